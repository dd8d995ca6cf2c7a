"""What time does: whatever is due is applied, in batches, by whoever ticks.

The rules are those of every other transaction. Any number may tick at once: what one holds, the others pass over.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from django.db import Error

from rehydrate import claims, clock, services, signals, sweep, wakeups
from rehydrate.core.refusals import Refusal
from rehydrate.models import IdempotencyRecord

log = logging.getLogger(__name__)

#: Runs that one transaction catches up.
BATCH: Final = 250
#: Whoever stored a signal matches it at once; one that is older than this was left by a crash.
LEFT_BEHIND: Final = dt.timedelta(seconds=5)
#: How long the first answer to an Idempotency-Key is kept.
ANSWERS_KEPT: Final = dt.timedelta(days=7)


def tick(*, counted: bool = False, go_on: Callable[[], bool] = lambda: True) -> int:
    """Apply what is due now to all runs, and finish the matching of signals that a crash cut off.

    `counted` notes each batch before trying it (see sweep.py); `go_on` is asked between two batches. How many runs were
    dealt with.
    """
    done = 0
    while go_on() and (caught := sweep.overdue(BATCH, counted=counted)):
        done += caught
    done += sweep.troubled()
    for found in signals.unfinished(clock.now() - LEFT_BEHIND):
        try:
            with suppress(Refusal):  # several waits fit: it is kept for a person, and nobody is here to be told
                services.match_signal(found)
        except Error:
            raise
        except Exception:
            log.exception("signal %s cannot be matched", found.pk)  # and holds up no other
    return done


def tidy(*, at_most: int = 10_000) -> int:
    """Delete answers to Idempotency-Keys whose seven days are over. How many."""
    old = IdempotencyRecord.objects.filter(created_at__lt=clock.now() - ANSWERS_KEPT).values("pk")[:at_most]
    deleted, _ = IdempotencyRecord.objects.filter(pk__in=old).delete()
    return deleted


def sleep_until_due(ear: wakeups.Ear, at_most: float) -> None:
    """Sleep until the next due time, at most `at_most` seconds and never less than 10 ms.

    `ear` listens for `wakeups.TIMER`, and has done so since before what is due was applied.
    """
    end = time.monotonic() + at_most
    while True:  # woken when something earlier appears
        left = claims.seconds_until_due()
        pause = end - time.monotonic()
        if not ear.wait(pause if left is None else min(pause, max(left, 0.01))):
            return
