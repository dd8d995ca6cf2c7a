"""What time does: whatever is due is applied, in batches, by whoever ticks.

The rules are those of every other transaction.
"""

import datetime as dt
from contextlib import suppress
from typing import Final

from rehydrate import claims, clock, ledger, services, signals
from rehydrate.core.refusals import Refusal
from rehydrate.models import IdempotencyRecord

#: Runs that one transaction catches up.
BATCH: Final = 200
#: Whoever stored a signal matches it at once; one that is older than this was left by a crash.
LEFT_BEHIND: Final = dt.timedelta(seconds=5)
#: How long the first answer to an Idempotency-Key is kept.
ANSWERS_KEPT: Final = dt.timedelta(days=7)


def tick() -> int:
    """Apply what is due now to all runs, and finish the matching of signals that a crash cut off.

    How many runs changed.
    """
    done = 0
    while True:
        due = claims.overdue(None, BATCH)
        caught = ledger.catch_up(due) if due else 0
        done += caught
        if caught == 0 or len(due) < BATCH:
            break
    for signal in signals.unfinished(clock.now() - LEFT_BEHIND):
        with suppress(Refusal):  # several waits fit: it is kept for a person, and nobody is here to be told
            services.match_signal(signal)
    return done


def tidy(*, at_most: int = 10_000) -> int:
    """Delete answers to Idempotency-Keys whose seven days are over. How many."""
    old = IdempotencyRecord.objects.filter(created_at__lt=clock.now() - ANSWERS_KEPT).values("pk")[:at_most]
    deleted, _ = IdempotencyRecord.objects.filter(pk__in=old).delete()
    return deleted


def seconds_until_due(*, at_most: float) -> float:
    """How long a tick may sleep: until the next due time, at most `at_most` seconds and never less than 20 ms."""
    left = claims.seconds_until_due()
    return at_most if left is None else min(at_most, max(left, 0.02))
