"""What django-q carries out: a few lines each, the work is in `engine`. Each may run twice, and returns None."""

from __future__ import annotations

import os
import time

from django.db.models import F
from django.utils import timezone

from rehydrate import engine
from rehydrate.models import Heartbeat

TICK_LASTS = 95.0
"""Seconds: one starts every minute, so they overlap and a killed one leaves no gap."""


def tick() -> None:
    """Does what is due, again and again, for the length of a tick or until the supervisor stops."""
    end = time.monotonic() + TICK_LASTS
    while time.monotonic() < end and not _stopping():
        engine.tick()
        _note("tick")
        time.sleep(engine.seconds_until_due(at_most=1.0))


def beat(cluster: str) -> None:
    """Shows that this cluster carries out what it is handed: it hangs where it looks alive when an idle worker was killed."""
    _note(f"beat:{cluster}")


def beats(cluster: str) -> int:
    """How often this machine's cluster has shown itself."""
    row = Heartbeat.objects.filter(name=_name(f"beat:{cluster}")).values_list("count", flat=True).first()
    return row or 0


def _note(cluster: str) -> None:
    name = _name(cluster)
    if not Heartbeat.objects.filter(name=name).update(count=F("count") + 1, at=timezone.now()):
        Heartbeat.objects.get_or_create(name=name, defaults={"count": 1, "at": timezone.now()})


def _stopping() -> bool:
    """A cluster asked to end waits for its tasks, so a tick must not go on to its own end."""
    flag = os.environ.get("REHYDRATE_STOP_FLAG")
    return bool(flag) and os.path.exists(flag)


def _name(what: str) -> str:
    return f"{what}@{os.environ.get('REHYDRATE_NODE', 'alone')}"
