"""Plain functions on an event loop: what they give and raise, how they take turns, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from greenlet import getcurrent

from rehydrate.cooperative import carry_out, on_the_loop, wait_for
from tests.conftest import in_a_loop

said: contextvars.ContextVar[str] = contextvars.ContextVar("said", default="nothing")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    in_a_loop(test())


def after(turns: int, given: Any = None) -> Any:
    """What it gives, once the loop has gone round so often."""

    async def later() -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        return given

    return wait_for(later())


def test_it_gives_what_the_function_gives_and_raises_what_it_raises() -> None:
    def work(first: int, *, second: int) -> int:
        assert on_the_loop()
        assert after(1, second) == second
        return first + second

    def fail() -> None:
        after(1)
        raise LookupError("nothing there")

    async def test() -> None:
        assert await carry_out(work, 1, second=2) == 3
        with pytest.raises(LookupError, match="nothing there"):
            await carry_out(fail)
        assert await carry_out(work, 3, second=4) == 7
        assert not on_the_loop()

    run(test)


def test_what_is_awaited_raises_where_it_is_waited_for() -> None:
    def work() -> str:
        async def fail() -> None:
            raise LookupError("nothing there")

        try:
            wait_for(fail())
        except LookupError as error:
            after(1)
            return str(error)
        return "nothing was raised"

    async def test() -> None:
        assert await carry_out(work) == "nothing there"

    run(test)


def test_several_take_turns_each_in_a_greenlet_of_its_own_and_the_next_takes_one_that_is_over() -> None:
    order: list[str] = []

    def work(name: str, turns: int) -> Any:
        order.append(f"{name} begins")
        after(turns)
        order.append(f"{name} ends")
        return weakref.ref(getcurrent())

    async def test() -> None:
        long, short = await asyncio.gather(carry_out(work, "long", 9), carry_out(work, "short", 3))
        assert order == ["long begins", "short begins", "short ends", "long ends"]
        assert long() is not short()
        assert (await carry_out(work, "next", 1))() in (long(), short())

    run(test)


def test_each_has_the_context_of_whoever_called_it_and_no_other() -> None:
    def work(word: str) -> tuple[str, str]:
        before = said.get()
        said.set(word)
        after(2)
        return before, said.get()

    async def test() -> None:
        assert await carry_out(work, "one") == ("nothing", "one")
        said.set("outside")
        two, three = await asyncio.gather(carry_out(work, "two"), carry_out(work, "three"))
        assert (two, three) == (("outside", "two"), ("outside", "three"))
        assert said.get() == "outside"

    run(test)


class Thing:
    """Something of which one can see that it is gone."""


def test_nothing_of_what_was_given_or_raised_is_kept() -> None:
    def work(thing: Thing) -> Thing:
        after(1)
        return thing

    def fail(thing: Thing) -> None:
        raise LookupError(thing)

    async def test() -> None:
        thing = Thing()
        gone = weakref.ref(thing)
        assert await carry_out(work, thing) is thing
        with pytest.raises(LookupError):
            await carry_out(fail, thing)
        del thing
        gc.collect()
        assert gone() is None

    run(test)


def test_one_that_is_cancelled_is_told_so_where_it_waits_and_leaves_the_next_alone() -> None:
    told: list[str] = []

    def work() -> None:
        try:
            wait_for(asyncio.get_running_loop().create_future())
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def test() -> None:
        task = asyncio.create_task(carry_out(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert told == ["cancelled"]
        assert await carry_out(after, 1, "well") == "well"

    run(test)
