"""Plain functions on an event loop: where one of them waits, the loop goes on with others.

So what a request consists of is written once, without `async`: pages, workers and tests call it in threads of theirs,
and the web server's loop carries out hundreds of requests in one thread, which do not have to hand Python's lock to
each other. Each such function has a greenlet, which is switched away from wherever it waits.

What would block the loop is done `aside`, in a thread. Django sees to it that nothing is forgotten: on an event loop
its connections refuse to work (SynchronousOnlyOperation).
"""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

from django.db import connections
from greenlet import GreenletExit, getcurrent, greenlet

P = ParamSpec("P")
T = TypeVar("T")

#: What is done aside at one instant, at most; the rest waits for its turn.
THREADS: Final = 100
#: Greenlets that are kept when they have nothing to do.
IDLE: Final = 100
#: What comes back when whoever is to be answered has hung up; where that can be known.
hung_up: Final[contextvars.ContextVar[Callable[[], Coroutine[Any, Any, None]] | None]] = contextvars.ContextVar(
    "hung_up", default=None
)
_threads: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="aside")


class _Over(NamedTuple):
    """A function has ended: with this, or this error."""

    given: Any
    error: BaseException | None


class _Cooperating(greenlet):
    """Carries out what `carry_out` is given, one after another: each new greenlet has its stack mapped into memory and
    out again, which costs four times as much as a switch.
    """

    over: _Over


_END: Final = object()


def _serve() -> NoReturn:
    green = getcurrent()
    assert isinstance(green, _Cooperating)
    assert green.parent is not None
    jobs: list[tuple[Any, ...]] = []
    while True:  # while nobody is served, nothing of a job is kept: neither in a variable nor as what is handed over
        jobs.append(green.parent.switch(_END))
        green.over = _outcome(*jobs.pop())


def _outcome(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Over:
    try:
        return _Over(function(*args, **kwargs), None)
    except GreenletExit:
        raise  # nobody is there any more who waits for it
    except BaseException as error:
        return _Over(None, error)


class _Idle(threading.local):
    """Greenlets belong to a thread."""

    def __init__(self) -> None:
        self.greenlets: list[_Cooperating] = []


_idle: Final = _Idle()


async def carry_out(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function gives or raises. Wherever it calls `wait_for`, the event loop goes on."""
    idle = _idle.greenlets
    if not idle:
        idle.append(green := _Cooperating(_serve))
        green.switch()  # to where it waits for what it is to do
    green = idle.pop()
    green.gr_context = contextvars.copy_context()
    given = green.switch(function, args, kwargs)
    while given is not _END:
        try:
            found = await given
        except BaseException as error:
            given = green.throw(error)
        else:
            given = green.switch(found)
    over = green.over
    del green.over
    green.gr_context = None
    if len(idle) < IDLE:
        idle.append(green)
    if over.error is not None:
        raise over.error
    return cast(T, over.given)


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
