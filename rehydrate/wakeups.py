"""Waiting without asking again and again: one LISTEN connection a process wakes the threads that wait, by topic.

    with wakeups.listen(wakeups.TIMER) as ear:       # from here on nothing is missed
        while True:
            ...look...
            ear.wait(seconds)                        # True: look again; False: the time is over, or the process stops

Whoever listens before looking cannot lose a wake-up: a notice that comes while it looks is kept for the next `wait`.
A waiting thread holds no connection to the database; the one that listens is of its own, beside Django's. When that one
breaks it is made anew, and all are told to look, since notices may have been missed meanwhile. Should it be gone for
long, those who wait look by themselves every few seconds (`SELDOM`).

Of the agents that wait for runs of a flow only as many are woken as runs became ready, the longest waiting first.
None of these wake-ups is lost: one that was woken and leaves without having looked hands it on to the next.
What is told, and when: `notices`.
"""

import asyncio
import contextlib
import heapq
import logging
import os
import random
import selectors
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import psycopg
from django.conf import settings
from django.db import connection as django_connection

from rehydrate import claims, cooperative, notices
from rehydrate.notices import Kind

log = logging.getLogger(__name__)
#: Of its own: threads that draw from the shared one would make what others draw from it another.
_dice = random.SystemRandom()

T = TypeVar("T")
Topic = tuple[str, ...]

#: Something becomes due within `notices.HORIZON` seconds: whoever waits for it looks at least that often besides.
TIMER: Final[Topic] = ("timer",)
DELIVERY: Final[Topic] = ("delivery",)

#: Seconds between two looks of those who wait while nobody listens for them; each takes its own in this range.
SELDOM: Final = (2.0, 4.0)
#: How often those for whom somebody listens make sure that it is still so.
SURE: Final = (30.0, 40.0)
#: Seconds between two looks of the process on behalf of all agents that wait in it: should a notice ever be lost, or
#: no tick run that applies what is due, they wait no longer than this. Not above `notices.HORIZON`: what becomes due
#: sooner is told.
SWEEP: Final = (1.5, 2.0)
#: The least time between two of them.
SWEEP_PAUSE: Final = 0.1
#: How long after its due time something is taken to have been left undone by whoever ticks.
GRACE: Final = 0.25
#: A kind that nobody waits for any longer is listened for a while yet: most who leave come back.
LINGER: Final = 60.0
#: Pages that show a whole workspace look one after the other, so that a change which all of them show does not keep
#: those waiting who work on it: together they may use this share of a processor,
PAGES_SHARE: Final = 0.15
#: and, after a rest, so many seconds of one before that counts: a change at rest is shown at once.
PAGES_AHEAD: Final = 1.5
#: After so many seconds a look that is not over yet keeps the next one no longer.
PAGE_TAKES: Final = 1.0
#: Seconds by which they let agents go first.
AFTER_YOU: Final = 0.03
#: Rooms, each with so many places in a process (settings.WAITING): waiting threads must not be all there are.
AGENTS: Final = "agents"
PAGES: Final = "pages"
#: In a full room whoever has waited longest, and at least for so many seconds, makes place for the newest: it may be
#: gone without our knowing. Before that, the newest is not let in.
STAY: Final = 5.0
#: How soon the stop flag of the supervisor is seen.
GLANCE: Final = 0.5


def ready(workspace: str, flow: str | None) -> Topic:
    """A run of this flow (None: of any) of the workspace became claimable."""
    return ("ready", workspace, flow or "*")


def run(run_id: str) -> Topic:
    """This run changed. Woken at once."""
    return ("run", run_id)


def workspace(workspace_id: str) -> Topic:
    """Any run of the workspace changed. Woken in turn, see `PAGES_SHARE`."""
    return ("workspace", workspace_id)


#: What has to be told to those who wait for a topic. With a look at runs goes the time until the next may be ready.
_KINDS: Final = {
    "ready": (Kind.READY, Kind.TIMER),
    "run": (Kind.CHANGED,),
    "workspace": (Kind.CHANGED,),
    "timer": (Kind.TIMER,),
    "delivery": (Kind.DELIVERY,),
}

_own: Final[ContextVar["Ear | None"]] = ContextVar("ear", default=None)


class _Flag:
    """A `threading.Event` for whom an event loop waits: any thread may set it.

    `left` is called when there is nobody any more to be answered.
    """

    def __init__(self, left: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._set = False
        self._left = left
        self._awaited: asyncio.Future[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._wake)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float) -> bool:
        if not self._set and timeout > 0:
            self._keep_watch()
            self._awaited = self._loop.create_future()
            end = self._loop.call_later(timeout, self._wake)
            try:
                cooperative.wait_for(self._awaited)
            finally:
                end.cancel()
        return self._set

    def _keep_watch(self) -> None:
        if self._watch is None and (hung_up := cooperative.hung_up.get()) is not None:
            self._watch = self._loop.create_task(hung_up())
            self._watch.add_done_callback(lambda watch: None if watch.cancelled() else self._left())

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


class Ear:
    """One thread's waiting, or one greenlet's (see `cooperative`). To be used in a `with`; made by `listen`."""

    def __init__(self, listener: "Listener", topics: Iterable[Topic], group: Hashable, room: str | None) -> None:
        self.topics = tuple(dict.fromkeys(topics))
        self.kinds = frozenset(kind for topic in self.topics for kind in _KINDS[topic[0]])
        self.group = group
        self.room = room
        self.since = time.monotonic()
        self.ticket = 0
        self._listener = listener
        self._flag = _Flag(self._gone) if cooperative.on_the_loop() else threading.Event()
        self._causes: dict[Topic, bool] = {}
        self._heeded: dict[Topic, bool] = {}
        self._over = False
        self.left = False
        """Nobody is there any more to be answered (where that can be known)."""
        self._parked = False
        self._looks_since: float | None = None

    def __enter__(self) -> Self:
        self._listener._join(self)
        _own.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _own.set(None)
        self._listener._leave(self)
        if isinstance(self._flag, _Flag):
            self._flag.close()

    def _end(self) -> None:
        """It waits no longer, now or later."""
        self._over = True
        self._flag.set()

    def _gone(self) -> None:
        self.left = True
        self._end()

    def wait(self, seconds: float) -> bool:
        """True when it is time to look again; False when `seconds` are over, or nobody should wait any longer."""
        end = time.monotonic() + seconds
        self._listener._looked(self)
        self._parked = True
        while not self._over:
            left = end - time.monotonic()
            pause = _dice.uniform(*(SURE if self._listener.hears(self) else SELDOM))
            woken = self._flag.wait(max(0.0, min(left, pause)))
            if woken and not self._over:
                self._listener._heed(self)
                return True
            if time.monotonic() >= end:
                return False
            if not self._listener.hears(self):
                return True
        return False

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to find: the process looked a moment ago, and has heard of nothing since."""
        return self._listener.quiet(self)

    def take_turn(self) -> None:
        """Its next `wait` ends when it is its turn among the pages, as if there were news."""
        self._listener.take_turn(self)

    def served(self, topic: Topic) -> None:
        """It has got a run of this topic: what else it was woken for is left to the next in line."""
        for cause, chain in self._heeded.items():
            if chain or cause != topic:
                self._listener._wake_few(cause, 1, chain=chain)
        self._heeded = {}


class Listener:
    """The process's one listening connection, its thread, and all ears. Threads start when somebody first listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ears: dict[Topic, OrderedDict[Ear, None]] = {}
        self._tickets = 0
        self._rooms: dict[str, OrderedDict[Ear, None]] = {}
        self._nothing: frozenset[Topic] = frozenset()
        self._stirred: set[Topic] = set()
        self._since = 0.0
        self._changes: dict[Topic, int] = {}
        self._last_wanted: dict[Kind, float] = {}
        self._armed: frozenset[Kind] = frozenset()
        self._later: OrderedDict[Ear, None] = OrderedDict()
        self._allowance = PAGES_AHEAD
        self._allowed_at = time.monotonic()
        self._looking: dict[Ear, float] = {}
        self._thread: threading.Thread | None = None
        self._sweep_at = self._swept_at = self._pages_at = 0.0
        self._look_again_at: float | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self.stopping = False
        self.pid: int | None = None
        """The server's process behind the connection, while there is one."""

    # -- for ears

    def hears(self, ear: Ear) -> bool:
        """Whether the ear would be told."""
        alive = self._thread is not None and self._thread.is_alive()
        return alive and ear.kinds <= self._armed

    def quiet(self, ear: Ear) -> bool:
        """Whether the last sweep found nothing in any of the ear's `ready` topics, and no notice has come since."""
        with self._lock:
            return ear.kinds <= self._armed and self._nothing.issuperset(ear.topics)

    def take_turn(self, ear: Ear) -> None:
        with self._lock:
            self._wake_later([ear])
        self._poke()

    def waits(self, topics: Iterable[Topic]) -> bool:
        """Whether somebody waits for one of them already."""
        with self._lock:
            return any(topic in self._ears for topic in topics)

    def stamp(self, ear: Ear) -> Hashable:
        """As long as it is the same, nothing has changed in the ear's workspaces. None: that is not known.

        A run by itself has no stamp: its lease is renewed without anybody being told.
        """
        with self._lock:
            if not ear.kinds <= self._armed or any(topic[0] != "workspace" for topic in ear.topics):
                return None
            return self._since, tuple(self._changes.get(topic, 0) for topic in ear.topics)

    def _join(self, ear: Ear) -> None:
        kinds = ear.kinds
        with self._lock:
            self._tickets += 1
            ear.ticket = self._tickets
            for topic in ear.topics:
                self._ears.setdefault(topic, OrderedDict())[ear] = None
            if self.stopping or not self._let_in(ear):
                ear._over = True
                return
            now = time.monotonic()
            for kind in kinds:
                self._last_wanted[kind] = now
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="wakeups", daemon=True)
                self._thread.start()
            if kinds <= self._armed:
                return
            self._poke()
        cooperative.aside(self._wait_until_armed, kinds)

    def _wait_until_armed(self, kinds: frozenset[Kind]) -> None:
        with self._lock:
            self._changed.wait_for(lambda: kinds <= self._armed or self.stopping, timeout=2)

    def _let_in(self, ear: Ear) -> bool:
        """Whether there is a place for one more in its room; it has it then."""
        places = settings.WAITING.get(ear.room) if ear.room is not None else None
        if not places:
            return True
        seated = self._rooms.setdefault(ear.room or "", OrderedDict())
        if len(seated) >= places:
            oldest = next(iter(seated))
            if ear.since - oldest.since < STAY:
                return False
            del seated[oldest]
            oldest._end()
        seated[ear] = None
        return True

    def _leave(self, ear: Ear) -> None:
        self._looked(ear)
        with self._lock:
            self._rooms.get(ear.room or "", OrderedDict()).pop(ear, None)
            for topic in ear.topics:
                ears = self._ears[topic]
                del ears[ear]
                if not ears:
                    del self._ears[topic]
            for kind in ear.kinds:
                self._last_wanted[kind] = time.monotonic()
            self._later.pop(ear, None)
            if ear.group is not None and not self.stopping:
                for topic, chain in ear._causes.items():  # woken, and gone without having looked since
                    self._wake_few_locked(topic, 1, only=ear.group, chain=chain)

    def _heed(self, ear: Ear) -> None:
        """It is about to look: what comes from now on is news again."""
        with self._lock:
            ear._parked = False
            ear._looks_since = time.thread_time() if Kind.CHANGED in ear.kinds else None
            ear._heeded, ear._causes = ear._causes, {}
            ear._flag.clear()

    def _looked(self, ear: Ear) -> None:
        """A page's look is over, with the answer that it came to: what it cost is taken from what all may use."""
        if ear._looks_since is None:
            return
        with self._lock:
            self._allowance -= time.thread_time() - ear._looks_since
            if self._looking.pop(ear, None) is not None and self._later:
                self._poke()
        ear._looks_since = None

    # -- waking; with the lock held, but for the first

    def wake(self, topic: Topic) -> None:
        """Wakes all of this process that listen for the topic, whatever the database says."""
        with self._lock:
            self._wake_all(topic)

    def _wake(self, ear: Ear, topic: Topic, *, chain: bool = False) -> None:
        ear._causes.setdefault(topic, chain)
        ear._flag.set()

    def _wake_all(self, topic: Topic) -> None:
        for ear in self._ears.get(topic, ()):
            self._wake(ear, topic)

    def _wake_few(self, topic: Topic, number: int, *, only: Hashable = None, chain: bool = False) -> None:
        with self._lock:
            self._wake_few_locked(topic, number, only=only, chain=chain)

    def _wake_few_locked(self, topic: Topic, number: int, *, only: Hashable = None, chain: bool = False) -> None:
        """The `number` longest waiting of each group that are not on their way already. A group's members can take the
        same runs, so one that finds nothing stands for all of them.
        """
        queues = [self._ears[each] for each in (topic, ready(topic[1], None)) if each in self._ears]
        groups: dict[Hashable, list[Ear]] = {}
        for ear in heapq.merge(*queues, key=lambda ear: ear.ticket):
            if (only is None or ear.group == only) and not ear._causes:
                groups.setdefault(ear.group, []).append(ear)
        for ears in groups.values():
            # Of those who are looking just now each may be about to find something: they come last.
            for ear in sorted(ears, key=lambda ear: not ear._parked)[:number]:
                self._wake(ear, topic, chain=chain)

    def _wake_later(self, ears: Iterable[Ear]) -> None:
        if not self._later:
            self._pages_at = time.monotonic() + AFTER_YOU
        for ear in ears:
            if not ear._flag.is_set():
                self._later.setdefault(ear)

    def _let_pages_look(self) -> float | None:
        """Wakes those whose turn it is. Seconds until the next one's, None when nobody is left."""
        now = time.monotonic()
        with self._lock:
            self._allowance = min(PAGES_AHEAD, self._allowance + (now - self._allowed_at) * PAGES_SHARE)
            self._allowed_at = now
            if not self._later:
                return None
            until = [self._pages_at, now - self._allowance / PAGES_SHARE]
            until += [since + PAGE_TAKES for since in self._looking.values()]
            if max(until) > now:
                return max(until) - now
            ear, _ = self._later.popitem(last=False)
            self._looking = {ear: now}
            self._wake(ear, ear.topics[0])
            return PAGE_TAKES if self._later else None

    def _wake_everybody(self) -> None:
        """After a time without hearing. Agents are woken by the sweep that follows, which knows who has work."""
        with self._lock:
            for topic, ears in list(self._ears.items()):
                if topic[0] in ("run", "workspace"):
                    self._wake_later(ears)
                elif topic[0] != "ready":
                    self._wake_all(topic)

    def _on_notify(self, notify: psycopg.Notify) -> None:
        for kind, what in notices.read(notify.payload):
            with self._lock:
                if kind is Kind.TIMER:
                    self._wake_all(TIMER)
                    self._sweep_soon()
                elif kind is Kind.DELIVERY:
                    self._wake_all(DELIVERY)
                elif kind is Kind.READY and what is None:
                    self._nothing = frozenset()
                    self._sweep_soon()
                elif kind is Kind.READY:
                    for workspace_id, flows in what.items():
                        self._stirred |= {ready(workspace_id, flow) for flow in (*flows, None)}
                        self._nothing -= self._stirred
                        for flow, number in flows.items():
                            self._wake_few_locked(ready(workspace_id, flow), number)
                elif kind is Kind.CHANGED:
                    self._changed_runs(what)

    def _changed_runs(self, what: dict[str, list[str] | None] | None) -> None:
        if what is None:
            self._since = time.monotonic()
            for topic, ears in self._ears.items():
                if topic[0] == "workspace":
                    self._wake_later(ears)
            return
        for workspace_id, run_ids in what.items():
            self._changes[workspace(workspace_id)] = self._changes.get(workspace(workspace_id), 0) + 1
            for run_id in run_ids or ():
                self._wake_all(run(run_id))
            self._wake_later(self._ears.get(workspace(workspace_id), ()))

    # -- the thread

    def _poke(self, byte: bytes = b"\0") -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, byte)

    def _run(self) -> None:
        failures = 0
        while not self.stopping:
            try:
                with _connect() as conn:
                    conn.add_notify_handler(self._on_notify)
                    self.pid, failures = conn.info.backend_pid, 0
                    self._serve(conn)
            except psycopg.Error as error:
                failures += 1
                (log.warning if failures == 3 else log.info)("nobody listens for news: %s", error)
            except Exception:
                failures += 1
                log.exception("nobody listens for news")
            finally:
                self.pid = None
                with self._lock:
                    self._armed, self._nothing = frozenset(), frozenset()
            if not self.stopping:
                self._pause(min(5.0, 0.05 * 2**failures) * _dice.uniform(0.5, 1.0))

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                selector.register(self._read, selectors.EVENT_READ)
                selector.select(min(left, GLANCE))
            self._glance()

    def _serve(self, conn: psycopg.Connection[Any]) -> None:
        self._arm(conn)
        self._wake_everybody()
        self._sweep_at = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(conn.fileno(), selectors.EVENT_READ)
            selector.register(self._read, selectors.EVENT_READ)
            while not self.stopping:
                self._arm(conn)
                if self._look_again_at is not None and time.monotonic() >= self._look_again_at:
                    self._look_again_at = None
                    self._since = time.monotonic()
                    self._wake_everybody()
                if time.monotonic() >= self._sweep_at:
                    self._sweep(conn)
                turn = self._let_pages_look()
                until = self._sweep_at - time.monotonic()
                selector.select(max(0.0, min(GLANCE, until, GLANCE if turn is None else turn)))
                self._glance()
                conn.pgconn.consume_input()
                while (notify := conn.pgconn.notifies()) is not None:
                    heard = psycopg.Notify(notify.relname.decode(), notify.extra.decode(), notify.be_pid)
                    self._on_notify(heard)

    def _arm(self, conn: psycopg.Connection[Any]) -> None:
        """Holds the lock of each kind that somebody waits for, or did a while ago, so that it is told."""
        now = time.monotonic()
        with self._lock:
            for topic in self._ears:
                self._last_wanted.update(dict.fromkeys(_KINDS[topic[0]], now))
            wanted = frozenset(kind for kind, last in self._last_wanted.items() if now - last < LINGER)
            new, old = wanted - self._armed, self._armed - wanted
        if not new and not old:
            return
        for kind in new:
            conn.execute(f"LISTEN {kind.channel}")
            conn.execute("SELECT pg_advisory_lock_shared(%s, %s)", [notices.LOCKS, int(kind)])
        for kind in old:
            conn.execute("SELECT pg_advisory_unlock_shared(%s, %s)", [notices.LOCKS, int(kind)])
            conn.execute(f"UNLISTEN {kind.channel}")
        with self._lock:
            self._armed = wanted
            self._changed.notify_all()
        if Kind.CHANGED in new:
            self._since = now
            # A transaction that looked for listeners just before commits in a moment, and has told nobody.
            self._look_again_at = now + 1.0

    def _sweep(self, conn: psycopg.Connection[Any]) -> None:
        """A look on behalf of all agents that wait here; it also shows that the connection lives."""
        with self._lock:
            awaited = [topic for topic in self._ears if topic[0] == "ready"]
            self._stirred = set()
        pause = _dice.uniform(*SWEEP)
        if awaited:
            left, found = claims.awaited(conn, [(topic[1], topic[2]) for topic in awaited], grace=GRACE)
            there = {ready(workspace_id, each) for workspace_id, flow in found for each in (flow, None)}
            with self._lock:
                self._nothing = frozenset(awaited) - there - self._stirred
            for workspace_id, flow in found:
                self._wake_few(ready(workspace_id, flow), 1, chain=True)
            if left is not None:
                pause = min(pause, left + 2 * GRACE)
        else:
            conn.execute("SELECT 1")
        self._swept_at = time.monotonic()
        self._sweep_at = self._swept_at + pause

    def _sweep_soon(self) -> None:
        self._sweep_at = min(self._sweep_at, self._swept_at + SWEEP_PAUSE)

    def _glance(self) -> None:
        """Whether to stop: a signal came, or the supervisor raised its flag."""
        with contextlib.suppress(BlockingIOError):
            if any(byte in (signal.SIGTERM, signal.SIGINT) for byte in os.read(self._read, 4096)):
                self.stop()
        flag = os.environ.get("REHYDRATE_STOP_FLAG")
        if flag and not self.stopping and os.path.exists(flag):
            self.stop()

    def stop(self) -> None:
        """Nobody waits any longer, now or later."""
        self.stopping = True
        self._poke()
        with self._lock:
            for ears in self._ears.values():
                for ear in ears:
                    ear._end()
            self._changed.notify_all()


def _connect() -> psycopg.Connection[Any]:
    """A connection of its own to Django's database; one that is cut off unseen is noticed within seconds."""
    params = django_connection.get_connection_params()
    for name in ("cursor_factory", "context", "prepare_threshold"):
        params.pop(name, None)
    alive = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}
    name = f"rehydrate wakeups {os.getpid()}"
    return psycopg.connect(**{**params, **alive, "application_name": name}, autocommit=True)


# -- the process's own

_the_lock = threading.Lock()
_the_listener: Listener | None = None
_left_to_parent: list[Listener] = []


def listener() -> Listener:
    """This process's one."""
    global _the_listener
    with _the_lock:
        if _the_listener is None:
            _the_listener = Listener()
        return _the_listener


def listen(*topics: Topic, group: Hashable = None, room: str | None = None) -> Ear:
    """Listens for these topics from `with` on. `group`: see `Listener._wake_few_locked`; for `ready` topics alone.

    In a `room` that is full its `wait` is over at once.
    """
    return Ear(listener(), topics, group, room)


def anybody_waits(topics: Iterable[Topic]) -> bool:
    """Whether a thread of this process waits for one of them. Where nobody does, looking comes before listening."""
    return listener().waits(topics)


def served(topic: Topic) -> None:
    """This thread has got what became ready in this topic, whether it waited for it or not."""
    if (ear := _own.get()) is not None:
        ear.served(topic)


def look_until(ear: Ear, seconds: float, look: Callable[[], T | None]) -> T | None:
    """What `look` finds within `seconds`, None when it found nothing. No connection of Django's is held in between.

    An ear that knows there is nothing does not even look: of 500 agents that ask anew twice a minute almost none does.
    """
    end = time.monotonic() + seconds
    while (found := None if ear.quiet else look()) is None:
        if not rest(ear, end - time.monotonic()):
            return None
    return found


def rest(ear: Ear, seconds: float) -> bool:
    """As `Ear.wait`, giving the thread's connection to the database back before."""
    if not cooperative.on_the_loop() and not django_connection.in_atomic_block:
        django_connection.close()
    return ear.wait(seconds)


def stop_on_signals() -> None:
    """From now on SIGTERM and SIGINT end all waiting, whatever else the process does about them. In the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(listener()._write, warn_on_full_buffer=False)


def _after_fork() -> None:
    """A child has none of its parent's threads; the parent's connection is not its to close."""
    global _the_lock, _the_listener
    _the_lock = threading.Lock()
    if _the_listener is not None:
        _left_to_parent.append(_the_listener)
        _the_listener = None


os.register_at_fork(after_in_child=_after_fork)
