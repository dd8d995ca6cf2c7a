"""When a delivery is tried again, and which receivers get how many attempts at once. Pure: no database, no clock.

What is sent is Standard Webhooks (https://www.standardwebhooks.com): 2xx is done, 410 means that nobody wants more,
anything else is tried again. A redirect is not followed: it is an answer like any other that is no 2xx.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

from msgspec import Struct

#: For so long a delivery is tried, from its transition or from when somebody sends it again.
GIVE_UP_AFTER: Final = timedelta(days=3)
_FIRST: Final = 5.0
_GROWS: Final = 3.0
_LONGEST: Final = 4 * 3600.0
#: A receiver may ask for a pause (429 and 503 with Retry-After), but for no longer than that.
LONGEST_PAUSE: Final = 3600.0

#: Attempts that one receiver is given at once while it answers quickly, slowly, or (yet) not at all.
AT_ONCE: Final = {"quick": 8, "slow": 2, "untold": 1}
#: Seconds beyond which an answer is slow.
SLOW: Final = 2.0


def body(delivery: dict[str, Any]) -> dict[str, Any]:
    """What is POSTed (contract.md, section 6), the same at every attempt: `at` is the transition's time."""
    return {
        "type": delivery["type"],
        "timestamp": delivery["at"],
        "data": {
            "run_id": delivery["run"],
            "flow": delivery["flow"],
            "external_id": delivery["external_id"],
            "status": delivery["run_status"],
            "version": delivery["run_version"],
        },
    }


class Receiver(Struct, frozen=True):
    """A receiver for which something is due: its attempts under way, and how many more are due."""

    id: str
    busy: int
    due: int
    pace: str = "quick"


def pace(failures: int, seconds: float | None) -> str:
    """How a receiver is to be treated after so many failures in a row, its last attempt having taken so long."""
    if failures or seconds is None:
        return "untold"
    return "slow" if seconds > SLOW else "quick"


def share(receivers: list[Receiver], *, free: int, free_for_slow: int) -> dict[str, int]:
    """How many attempts each receiver gets of the `free` ones: in turns, the quick before all others.

    Those others get `free_for_slow` at most: however many they are, the quick ones wait for none of them.
    """
    given: dict[str, int] = {}
    room = {r.id: min(r.due, max(0, AT_ONCE[r.pace] - r.busy)) for r in receivers}
    for quick in (True, False):
        left = free if quick else min(free, free_for_slow)
        turn = [r.id for r in receivers if (r.pace == "quick") is quick]
        while left > 0 and (turn := [id_ for id_ in turn if given.get(id_, 0) < room[id_]]):
            for id_ in turn[:left]:
                given[id_] = given.get(id_, 0) + 1
            free -= len(turn[:left])
            left -= len(turn[:left])
    return given


def backoff(attempts: int, luck: float) -> float:
    """Seconds until the next attempt after so many: 5, 15, 45 ... at most 4 hours, a quarter more or less by `luck`
    (0 to 1), so that what failed together is not tried together.
    """
    return float(min(_LONGEST, _FIRST * _GROWS ** max(0, min(attempts, 20) - 1)) * (0.75 + luck / 2))


def next_try(
    *, attempts: int, since: datetime, now: datetime, luck: float, pause: float | None = None
) -> datetime | None:
    """When to try again after an attempt that failed: the last time at the end of the three days, after which None.

    `pause` is what the receiver asked for, in seconds.
    """
    end = since + GIVE_UP_AFTER
    if now >= end:
        return None
    wait = max(backoff(attempts, luck), min(pause or 0.0, LONGEST_PAUSE))
    return min(now + timedelta(seconds=wait), end)


def quiet(failures: int) -> float:
    """Seconds in which a receiver that failed so often in a row is left alone, whatever else is due for it."""
    return float(min(60, 2 ** (failures - 3))) if failures >= 3 else 0.0


def retry_after(value: str | None, now: datetime) -> float | None:
    """The header's seconds, which may be given as a date (RFC 9110, 10.2.3); None for anything else."""
    if value is None or len(value) > 50:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())
