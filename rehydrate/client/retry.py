"""When a call is tried again, and after how long. Pure arithmetic: no clock, no sleeping, no HTTP."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

# What a proxy or a restarting server answers: the same call, under the same Idempotency-Key, may go through later.
RETRIED_STATUSES = frozenset({429, 500, 502, 503, 504})
SERVER_ERROR_TRIES = 4  # a 500 is more likely a fault than a restart: a few tries, then it is shown

_system_random = random.SystemRandom()


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter, between `floor` and `cap` seconds."""

    base: float = 0.1
    factor: float = 2.0
    cap: float = 5.0
    floor: float = 0.02
    uniform: Callable[[float, float], float] = field(default=_system_random.uniform, repr=False)

    def delay(self, attempt: int, *, retry_after: float | None = None) -> float:
        """Seconds to wait after the `attempt`-th try (from 1); never less than the server asked for."""
        most = min(self.cap, self.base * self.factor ** min(attempt - 1, 30))
        drawn = self.uniform(self.floor, max(self.floor, most))
        return drawn if retry_after is None else max(retry_after, 0.0) + drawn


def worth_retrying(status: int, attempt: int) -> bool:
    """Whether an answer with this status may be followed by the same call again."""
    if status == 500:
        return attempt < SERVER_ERROR_TRIES
    return status in RETRIED_STATUSES


def retry_in(failures: int, *, base: float = 2.0, cap: float = 300.0) -> int:
    """Whole seconds until a run that failed is tried again: doubled with each failure, with some jitter."""
    most = min(cap, base * 2.0 ** min(max(failures, 1) - 1, 20))
    return max(1, round(_system_random.uniform(most / 2, most)))
