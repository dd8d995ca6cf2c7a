"""What django-q carries out: a few lines each, the work is in `engine`. Each may run twice, and returns None."""

from __future__ import annotations

import datetime as dt
import logging
import os
import time

from django.db import connection
from django_q.tasks import async_task

from rehydrate import clock, engine, sender
from rehydrate.models import Heartbeat

log = logging.getLogger(__name__)

TICK_LASTS = 95.0
"""Seconds: one starts every minute, so they overlap and a killed one leaves no gap."""


def tick() -> None:
    """Does what is due, again and again, for the length of a tick or until the supervisor stops."""
    engine.tidy()
    end = time.monotonic() + TICK_LASTS
    while time.monotonic() < end and not _stopping():
        try:
            engine.tick()
            _note("tick")
            pause = engine.seconds_until_due(at_most=1.0)
        except Exception:
            # A tick that ended here would leave timers standing until the next minute.
            log.exception("a tick could not do all that is due")
            connection.close()
            pause = 1.0
        time.sleep(pause)


def start_deliver() -> None:
    """What the schedule starts each minute: the sender works on the other cluster, where nothing waits for ticks."""
    async_task("rehydrate.tasks.deliver", cluster="rehydrate", group="deliver")


def deliver() -> None:
    """Sends what is due to the receivers of flows, for the length of a tick or until the supervisor stops."""
    sender.run(lasts=TICK_LASTS, stopping=_stopping, note=lambda: _note("deliver"))


def beat(cluster: str) -> None:
    """Shows that this cluster carries out what it is handed: it can hang and look alive."""
    _note(f"beat:{cluster}")


def last_beat(cluster: str) -> dt.datetime | None:
    """When this machine's cluster last showed itself."""
    return Heartbeat.objects.filter(name=_name(f"beat:{cluster}")).values_list("at", flat=True).first()


def _note(what: str) -> None:
    Heartbeat.objects.update_or_create(name=_name(what), defaults={"at": clock.now()})


def _stopping() -> bool:
    """A cluster asked to end waits for its tasks, so a tick must not go on to its own end."""
    flag = os.environ.get("REHYDRATE_STOP_FLAG")
    return bool(flag) and os.path.exists(str(flag))


def _name(what: str) -> str:
    return f"{what}@{os.environ.get('REHYDRATE_NODE', 'alone')}"
