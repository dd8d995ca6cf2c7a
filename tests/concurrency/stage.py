"""How things are made to happen at once, or in a given order: barriers and events, never a sleep."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections

from rehydrate import cooperative, rights
from rehydrate.callers import Caller
from tests.conftest import eventually

Answer = Any
PATIENCE = 30


def _own_connection(call: Callable[[], Any]) -> Answer:
    """The call's answer, or what it raised; its thread's connection is given back."""
    try:
        return call()
    except Exception as error:  # the test looks at it
        return error
    finally:
        connections.close_all()


def at_once(*calls: Callable[[], Any]) -> list[Answer]:
    """All of these at the same instant. Their answers in order; what a call raised is its answer."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], Any]) -> Answer:
        gate.wait(PATIENCE)
        return _own_connection(call)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(one, call) for call in calls]]


#: Two of these the server leaves to threads; here they are in company, since they set timers anew.
ON_THE_LOOP = (
    "open_run", "append_events", "heartbeat", "rehydrate_run", "claim", "decide", "extend_wait", "comment_wait",
)  # fmt: skip


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


_elsewhere = threading.Event()


def carried_out_on(loop: asyncio.AbstractEventLoop, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called in any thread, is carried out on the loop."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _elsewhere.is_set():
            return function(*args, **kwargs)
        return asyncio.run_coroutine_threadsafe(cooperative.carry_out(function, *args, **kwargs), loop).result(PATIENCE)

    return call


def with_rights(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose caller is taken for who was looked up a moment ago."""

    def call(caller: Caller, *args: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {rights.NUMBER}")
            (number,) = cursor.fetchone()
        return function(dataclasses.replace(caller, rights=rights.Rights(number)), *args)

    return call


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """As another process would do it, which is not in this one's company."""
    _elsewhere.set()
    try:
        yield
    finally:
        _elsewhere.clear()


class Stage:
    """Lets a call run up to a certain point of the program and stand there until it is let go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.pool = ThreadPoolExecutor(8)
        self.gates: list[threading.Event] = []

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(_own_connection, call)

    def held(
        self, call: Callable[[], Any], owner: Any, name: str, *, after: bool = False
    ) -> tuple[Future[Any], Callable[[], None]]:
        """Starts the call and comes back when it stands before (or after) `owner.name`; with what lets it go on."""
        reached, go = threading.Event(), threading.Event()
        self.gates.append(go)
        original = getattr(owner, name)
        who: list[int | None] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            here = threading.current_thread()
            by_the_loop = cooperative.on_the_loop() or here.name.startswith("aside")
            mine = (here.ident in who or by_the_loop) and not reached.is_set()
            if mine and not after:
                reached.set()
                assert cooperative.aside(go.wait, PATIENCE)
            result = original(*args, **kwargs)
            if mine and after:
                reached.set()
                assert cooperative.aside(go.wait, PATIENCE)
            return result

        self.patch.setattr(owner, name, stop)

        def named() -> Any:
            who.append(threading.get_ident())
            return call()

        future = self.start(named)
        assert reached.wait(PATIENCE), f"{name} was not reached: {future}"
        return future, go.set

    def blocked(self, call: Callable[[], Any]) -> Future[Any]:
        """Starts the call and comes back when the database makes it wait for a lock."""
        before = _waiting()
        future = self.start(call)
        eventually(lambda: future.done() or _waiting() > before, what="a call that waits for a lock")
        assert not future.done(), f"it was to wait, and did not: {future.result()}"
        return future


def _waiting() -> int:
    with connection.cursor() as cursor:
        cursor.execute(  # of this database: other tests run beside
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(cursor.fetchone()[0])
