"""What django-q carries out: a few lines each, the work is in `engine`. Each may run twice, and returns None."""

from __future__ import annotations

import contextlib
import logging
import os
import time

from django.db import DatabaseError, InterfaceError, connection
from django_q.tasks import async_task

from rehydrate import engine, garbage, pulse, sender, wakeups
from rehydrate.node import queue

log = logging.getLogger(__name__)

TICK_LASTS = 125.0
"""Seconds: one starts every minute, so that two go on at any time: on two cores, and a killed one leaves no gap."""
TICKS = 2
"""How many of them are wanted. Of more than one above that the last to come leaves: a worker is kept free."""
SENDER_LASTS = 95.0
"""Seconds, after which it waits for what is under way."""


def tick() -> None:
    """Does what is due, again and again, for the length of a tick or until the supervisor stops."""
    if pulse.ticks_here() > TICKS:
        return
    garbage.collect_rarely()
    me = pulse.Tick()
    end = time.monotonic() + TICK_LASTS

    def go_on() -> bool:
        me.show()
        return time.monotonic() < end and not _stopping()

    def once() -> None:
        gone = pulse.silent_ticks()
        engine.tick(counted=bool(gone), go_on=go_on)
        if go_on():
            pulse.forget(gone)  # what they had in hand was dealt with, or is noted

    with contextlib.suppress(DatabaseError, InterfaceError), me, wakeups.listen(wakeups.TIMER) as ear:
        tidied = False
        while time.monotonic() < end and not _stopping():
            try:
                once()
                tidied = tidied or engine.tidy() >= 0
                engine.sleep_until_due(ear, 1.0)
            except Exception:
                # A tick that ended here would leave timers standing until the next minute.
                log.exception("a tick could not do all that is due")
                connection.close()
                time.sleep(1.0)


def start_deliver() -> None:
    """What the schedule starts each minute: the sender works on the other cluster, where nothing waits for ticks."""
    async_task("rehydrate.tasks.deliver", cluster=queue("work"), group="deliver")


def deliver() -> None:
    """Sends what is due to the receivers of flows, for a minute and a half or until the supervisor stops."""
    sender.run(lasts=SENDER_LASTS, stopping=_stopping, note=lambda: pulse.beat("deliver"))


def beat(cluster: str) -> None:
    """Shows that this cluster carries out what it is handed: it can hang and look alive."""
    pulse.beat(cluster)


def _stopping() -> bool:
    """A cluster asked to end waits for its tasks, so a tick must not go on to its own end."""
    flag = os.environ.get("REHYDRATE_STOP_FLAG")
    return bool(flag) and os.path.exists(str(flag))
