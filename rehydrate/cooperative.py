"""Plain functions on an event loop: where one of them waits, the loop goes on with others.

So what a request consists of is written once, without `async`: pages, workers and tests call it in threads of theirs,
and the web server's loop carries out hundreds of requests in one thread, which do not have to hand Python's lock to
each other. Each such function has a greenlet, which is switched away from wherever it waits.

What would block the loop is done `aside`, in a thread. Django sees to it that nothing is forgotten: on an event loop
its connections refuse to work (SynchronousOnlyOperation).
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar, cast

from django.db import connections
from greenlet import getcurrent, greenlet

P = ParamSpec("P")
T = TypeVar("T")

#: What is done aside at one instant, at most; the rest waits for its turn.
THREADS: Final = 100
#: What comes back when whoever is to be answered has hung up; where that can be known.
hung_up: Final[contextvars.ContextVar[Callable[[], Coroutine[Any, Any, None]] | None]] = contextvars.ContextVar(
    "hung_up", default=None
)
_threads: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")


class _Cooperating(greenlet):
    """A function that was called by `carry_out`."""


async def carry_out(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function gives or raises. Wherever it calls `wait_for`, the event loop goes on."""
    green = _Cooperating(function)
    green.gr_context = contextvars.copy_context()
    given = green.switch(*args, **kwargs)
    while not green.dead:
        try:
            found = await given
        except BaseException as error:
            given = green.throw(error)
        else:
            given = green.switch(found)
    return cast(T, given)


def on_the_loop() -> bool:
    """Whether this is carried out by `carry_out`, so that it must not block, and may wait."""
    return isinstance(getcurrent(), _Cooperating)


def wait_for(awaitable: Awaitable[T]) -> T:
    """What the awaitable gives or raises. Only on the loop."""
    green = getcurrent()
    assert isinstance(green, _Cooperating)
    assert green.parent is not None
    return cast(T, green.parent.switch(awaitable))


def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function gives or raises; where it would block the loop, it is called in a thread."""
    if not on_the_loop():
        return function(*args, **kwargs)

    def call() -> T:
        try:
            return function(*args, **kwargs)
        finally:
            connections.close_all()  # it goes back to the pool

    context = contextvars.copy_context()
    loop = asyncio.get_running_loop()
    return wait_for(loop.run_in_executor(_threads, lambda: context.run(call)))
