"""What time does: whatever is due is applied, in batches, by whoever ticks.

The rules are those of every other transaction.
"""

from rehydrate import claims, clock, ledger, services, signals

#: Runs that one transaction catches up.
BATCH = 200


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
    for signal in signals.unfinished(clock.now()):
        services.match_signal(signal)
    return done


def seconds_until_due(*, at_most: float) -> float:
    """How long a tick may sleep: until the next due time, at most `at_most` seconds and never less than 20 ms."""
    left = claims.seconds_until_due()
    return at_most if left is None else min(at_most, max(left, 0.02))
