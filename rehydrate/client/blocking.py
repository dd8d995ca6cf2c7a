"""Steps that are written once, as coroutines, run for callers that block: what they await then blocks too."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


def blocking(steps: Coroutine[Any, Any, T]) -> T:
    """Run to the end without an event loop. RuntimeError when something in it waits for one."""
    try:
        steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    steps.close()
    raise RuntimeError("This waits for an event loop: async functions belong to AsyncLedger, not to Ledger.")


def blocks(step: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[S, P], T]:
    """The blocking method for a step `_name`: same parameters, same docstring, its result instead of a coroutine."""

    @functools.wraps(step)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return blocking(step(self, *args, **kwargs))

    method.__name__ = step.__name__.removeprefix("_")
    method.__qualname__ = method.__name__
    return method
