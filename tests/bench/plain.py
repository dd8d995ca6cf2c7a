"""What all systems that are measured share; needs nothing but Python, so that peers' own environments can use it."""

import random
import time
from typing import Any

_words = random.Random(7)  # noqa: S311 (the same words for every system, nothing secret)
_VOCABULARY = ["".join(_words.choice("etaoinshrdlucmfwyp") for _ in range(_words.randint(2, 9))) for _ in range(400)]
#: The checkpoint that every system keeps: about 2 KB of JSON.
PAYLOAD: dict[str, Any] = {
    "step": 1,
    "messages": [
        {"role": "assistant" if i % 2 else "user", "content": " ".join(_words.choice(_VOCABULARY) for _ in range(26))}
        for i in range(10)
    ],
}
_SHARES = {"p50": 0.5, "p95": 0.95, "max": 1.0}


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50, p95 and the maximum, in milliseconds, and of how many."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    last = len(ordered) - 1
    found = {name: round(ordered[round(share * last)] * 1000, 2) for name, share in _SHARES.items()}
    return {**found, "n": len(ordered)}


def shares(clients: int) -> list[int]:
    """How many clients each process drives: one process for one client, two for more."""
    return [clients] if clients == 1 else [clients // 2, clients - clients // 2]


def clock() -> float:
    return time.perf_counter()
