"""The loop that sends deliveries: many attempts side by side, each on a thread that knows no database.

One thread claims and records, so that no transaction and no lock is held while a receiver takes its time. However many
senders run, `deliveries.claim` keeps them apart. One that is killed leaves its attempts to the others.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from django.conf import settings
from django.db import connection

from rehydrate import deliveries, wakeups, webhooks
from rehydrate.deliveries import Job
from rehydrate.webhooks import Message, Outcome

log = logging.getLogger(__name__)

#: Attempts side by side. Receivers that fail or are slow get half of them at most, whatever their number.
THREADS: Final = 32
#: Seconds between two looks at what is due, when nothing says that there is more.
LOOK_EVERY: Final = 5.0
NOTE_EVERY: Final = 5.0
TIDY_EVERY: Final = 30.0

Attempt = Callable[[Message], Outcome]


def attempt(message: Message) -> Outcome:
    """One attempt, as the operator's settings allow."""
    return webhooks.send(message, allow_private=settings.ALLOW_PRIVATE_TARGETS)


def run(
    *,
    lasts: float,
    stopping: Callable[[], bool] = lambda: False,
    note: Callable[[], None] = lambda: None,
    attempt: Attempt = attempt,
    threads: int = THREADS,
) -> None:
    """Sends what is due for so many seconds, then waits for what is under way."""
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="deliver") as pool,
        wakeups.listen(wakeups.DELIVERY) as ear,
    ):
        work = _Sending(pool, attempt, threads)
        end = time.monotonic() + lasts
        next_tidy = next_note = time.monotonic()
        while time.monotonic() < end and not stopping():
            try:
                if time.monotonic() >= next_note:
                    note()
                    next_note = time.monotonic() + NOTE_EVERY
                if time.monotonic() >= next_tidy:
                    deliveries.tidy()
                    next_tidy = time.monotonic() + TIDY_EVERY
                work.take_in()
                started = work.start()
                pause = 0.0 if started else _until_due()
            except Exception:
                # A sender that ended here would leave its attempts standing until their leases are over.
                log.exception("deliveries could not be looked after")
                connection.close()
                pause = 1.0
            if not ear.wait(pause) and wakeups.listener().stopping:
                break
        work.finish()


def _until_due() -> float:
    """How long to wait. What is due and was not to be had waits for an attempt to end, here or with another sender."""
    left = deliveries.seconds_until_due()
    return min(LOOK_EVERY, LOOK_EVERY if left is None else 0.5 if left <= 0 else left)


def send_due(attempt: Attempt = attempt) -> int:
    """Makes every attempt that is due now, one after the other; how many. For tests and by hand."""
    count = 0
    while jobs := deliveries.claim(free=THREADS, free_for_slow=THREADS):
        for job in jobs:
            deliveries.record(job, attempt(job.message))
        count += len(jobs)
    return count


class _Sending:
    """What is under way, and what came back and is still to be recorded."""

    def __init__(self, pool: ThreadPoolExecutor, attempt: Attempt, threads: int) -> None:
        self._pool = pool
        self._attempt = attempt
        self._free = threads
        self._free_for_slow = max(1, threads // 2)
        self._slow: set[tuple[object, int]] = set()
        self._back: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        self._done: list[tuple[Job, Outcome]] = []
        self._under_way = 0

    def start(self) -> int:
        """Claims what fits and hands it to threads."""
        jobs = deliveries.claim(free=self._free - self._under_way, free_for_slow=self._free_for_slow - len(self._slow))
        claimed_at = time.monotonic()
        for job in jobs:
            self._under_way += 1
            if job.slow:
                self._slow.add((job.delivery, job.number))
            self._pool.submit(self._make, job, claimed_at)
        return len(jobs)

    def _make(self, job: Job, claimed_at: float) -> None:
        if time.monotonic() - claimed_at > deliveries.LEASE - 2 * webhooks.TOTAL_SECONDS:
            # This process stood still, and by now another one may be at it.
            outcome = Outcome(seconds=0.0, error="interrupted", detail="the sender stood still before it sent")
        else:
            try:
                outcome = self._attempt(job.message)
            except Exception as error:  # `webhooks.send` never raises; whatever else does must not lose the thread
                outcome = Outcome(seconds=0.0, error="internal", detail=type(error).__name__)
        self._back.put((job, outcome))
        wakeups.listener().wake(wakeups.DELIVERY)  # there is something to record, and room for another

    def _over(self, back: tuple[Job, Outcome]) -> None:
        self._under_way -= 1
        self._slow.discard((back[0].delivery, back[0].number))
        self._done.append(back)

    def take_in(self) -> None:
        """Records what is over. What the database does not take now stays for the next time."""
        while not self._back.empty():
            self._over(self._back.get())
        if taken := [back for back in self._done if back[1].taken]:
            deliveries.record_taken(taken)
            self._done = [back for back in self._done if not back[1].taken]
        while self._done:
            deliveries.record(*self._done[0])
            del self._done[0]

    def finish(self) -> None:
        """Waits for what is under way, which has its own time limit, and records it."""
        deadline = time.monotonic() + webhooks.TOTAL_SECONDS + 5
        while self._under_way and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._over(self._back.get(timeout=0.5))
        try:
            self.take_in()
        except Exception:
            log.exception("what came of the last deliveries could not be recorded; they are sent again")
            connection.close()
