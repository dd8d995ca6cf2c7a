"""How often something may fail or knock: token buckets in this process's memory. It guards guessing, not fairness."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from rehydrate.core.refusals import Refusal

MAX_BUCKETS: Final = 10_000


class Limit:
    """`per_minute` for each subject (an address, a token), in bursts of as much. Those long unseen are forgotten."""

    def __init__(self, per_minute: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, subject: str) -> None:
        """Takes one of the subject's tokens, or refuses with 429 `rate_limited`."""
        now = self._monotonic()
        with self._lock:
            left, at = self._buckets.pop(subject, (float(self.per_minute), now))
            left = min(float(self.per_minute), left + (now - at) * self.per_minute / 60)
            good = left >= 1
            self._buckets[subject] = (left - 1 if good else left, now)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        if not good:
            seconds = math.ceil((1 - left) * 60 / self.per_minute)
            raise Refusal("rate_limited", f"Too many tries: wait {seconds} s.", retry_after=seconds)

    def forget(self) -> None:
        """Everybody starts anew."""
        with self._lock:
            self._buckets.clear()


#: Keys that open nothing, by address.
wrong_keys = Limit(120)
#: Callback URLs that are none, by address; and calls of one that is, by its token.
wrong_hooks = Limit(120)
hooks = Limit(600)
