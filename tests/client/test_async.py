"""The client in an event loop keeps the same promises: nothing twice, no work without a lease, cancelled or not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest

from rehydrate.client import Approval, AsyncLedger, AsyncWorker, NotSent, NotToGoOn, Signal, Unauthenticated
from rehydrate.client.retry import Backoff
from tests.conftest import ROOT, end, eventually, in_a_loop

from .conftest import LEASE_SECONDS, effect_of, reaches, status_of

FLOW = "errand"


@pytest.fixture
def calls() -> list[Any]:
    """What a flow's functions were called with."""
    return []


@pytest.fixture
def opened(ledger):
    def make(external_id: str = "errand-1") -> str:
        return str(ledger.open(FLOW, external_id, title="An errand", requested_by="carol")["run"]["id"])

    return make


@pytest.fixture
def in_loop(cast, key):
    """Runs a story with a ledger of its own, in an event loop of its own."""

    def run(story: Callable[[AsyncLedger], Awaitable[Any]], **options: Any) -> Any:
        async def told() -> Any:
            async with AsyncLedger(cast.url, key, **options) as ledger:
                return await story(ledger)

        return in_a_loop(told())

    return run


def serve(ledger: AsyncLedger, flow: Callable[..., Awaitable[Any]], name: str = FLOW) -> AsyncLedger:
    ledger.flow(name)(flow)
    return ledger


def test_flow_runs_from_the_top_and_nothing_happens_twice(ledger, in_loop, opened, alice, calls):
    async def send(e):
        await asyncio.sleep(0)
        calls.append(e.key)
        return {"id": f"x{len(calls)}"}

    async def errand(run):
        await run.checkpoint("one")
        first = await run.effect("crm.note", {"n": 1}, do=send)
        answer = await run.ask("yes", "Go on?", due="1d")
        second = await run.effect("crm.note", {"n": 2}, do=lambda e: calls.append(e.key) or "x2")
        return {"data": [first["id"], answer.choice, second["id"]]}

    async def turn(mine: AsyncLedger) -> None:
        await serve(mine, errand).work_once()

    run_id = opened()
    in_loop(turn)
    alice.decide(run_id, "yes", "approve")
    in_loop(turn)

    run = ledger.get(run_id)
    assert run["status"] == "completed"
    assert calls == ["errand/errand-1/crm.note/1", "errand/errand-1/crm.note/2"]


def test_each_kind_of_pause(ledger, in_loop, opened, alice, calls):
    async def errand(run):
        await run.checkpoint("only")
        first = await run.pause(Signal("paid", "1d"), Signal("cancelled", "1d"), resume_when="any")
        calls.append([a.status for a in first])
        asks = Approval("a", "1d", summary="A?"), Approval("b", "1d", summary="B?")
        calls.append([a.name async for a in run.each(*asks)])

    async def turn(mine: AsyncLedger) -> None:
        await serve(mine, errand).work_once()

    run_id = opened()
    in_loop(turn)
    ledger.signal("paid", id="s1", run=run_id)
    in_loop(turn)
    alice.decide(run_id, "b", "approve")
    in_loop(turn)
    alice.decide(run_id, "a", "approve")
    in_loop(turn)

    assert status_of(ledger, run_id) == "completed"
    assert calls[0] == ["satisfied", "superseded"]
    assert calls[-1] == ["a", "b"]


@pytest.mark.parametrize(("error", "state"), [(NotSent("No paper."), "failed"), (TimeoutError("late"), "unknown")])
def test_an_exception_says_whether_the_outside_was_reached(ledger, in_loop, opened, error, state):
    async def errand(run):
        async def do(e):
            raise error

        await run.checkpoint("only")
        await run.effect("crm.note", {"n": 1}, do=do)

    run_id = opened()
    in_loop(lambda mine: serve(mine, errand).work_once())
    assert effect_of(ledger, run_id, "crm.note")["state"] == state
    assert status_of(ledger, run_id) == {"failed": "waiting", "unknown": "review"}[state]


def test_pause_inside_a_task_group_is_a_pause(ledger, in_loop, opened, alice, calls):
    async def errand(run):
        await run.checkpoint("only")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1"))
            tasks.create_task(run.effect("crm.note", {"n": 2}, do=lambda e: calls.append(e.key) or "x2"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.ask("yes", "Go on?", due="1d"))

    run_id = opened()
    in_loop(lambda mine: serve(mine, errand).work_once())
    assert status_of(ledger, run_id) == "waiting"
    alice.decide(run_id, "yes", "approve")
    in_loop(lambda mine: serve(mine, errand).work_once())

    assert status_of(ledger, run_id) == "completed"
    assert sorted(calls) == ["errand/errand-1/crm.note/1", "errand/errand-1/crm.note/2"]


# --- cancelled ---


class Held(httpx.AsyncBaseTransport):
    """Holds back the answer to the first call whose body has this text in it; the server has acted on it by then."""

    def __init__(self, text: bytes) -> None:
        self.inner = httpx.AsyncHTTPTransport()
        self.text = text
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.inner.handle_async_request(request)
        if self.text in request.content and not self.held.is_set():
            self.held.set()
            await self.go_on.wait()
        return answer

    async def aclose(self) -> None:
        await self.inner.aclose()


async def in_the_middle_of_an_effect(mine: AsyncLedger) -> asyncio.Task[str | None]:
    """A turn whose effect has begun, and does not end."""
    begun = asyncio.Event()

    async def errand(run):
        async def do(e):
            begun.set()
            await asyncio.Event().wait()

        await run.checkpoint("only")
        await run.effect("crm.note", {"n": 1}, do=do)

    turn = asyncio.create_task(serve(mine, errand).work_once())
    await begun.wait()
    return turn


def test_cancelled_in_the_middle_of_an_effect_its_outcome_is_unknown(ledger, in_loop, opened):
    async def story(mine: AsyncLedger) -> None:
        turn = await in_the_middle_of_an_effect(mine)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    run_id = opened()
    in_loop(story)
    assert effect_of(ledger, run_id, "crm.note")["state"] == "unknown"
    assert status_of(ledger, run_id) == "review"  # and the lease was given back at once


@pytest.mark.parametrize(("held", "state"), [(b'"start":true', "failed"), (b'"effect.executed"', "executed")])
def test_cancelled_while_the_ledger_answers_nothing_is_left_in_doubt(ledger, in_loop, opened, calls, held, state):
    async def story(mine: AsyncLedger) -> None:
        transport = mine._transport._http._transport
        assert isinstance(transport, Held)

        async def errand(run):
            await run.checkpoint("only")
            await run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1")

        turn = asyncio.create_task(serve(mine, errand).work_once())
        await transport.held.wait()
        turn.cancel()
        await asyncio.sleep(0)
        transport.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await turn

    run_id = opened()
    in_loop(story, transport=Held(held))
    assert effect_of(ledger, run_id, "crm.note")["state"] == state
    assert len(calls) == (state == "executed")


# --- the lease, the worker ---


def test_a_busy_loop_does_not_cost_the_lease(ledger, in_loop, opened, ticking):
    async def errand(run):
        def busy(e):
            assert not threading.Event().wait(LEASE_SECONDS * 2)  # nothing else of the loop gets a turn meanwhile
            return "x1"

        await run.checkpoint("only")
        await run.effect("crm.note", {"n": 1}, do=busy)

    async def story(mine: AsyncLedger) -> None:
        serve(mine, errand)
        envelope = await mine.claim([FLOW], lease_seconds=LEASE_SECONDS)
        assert envelope is not None
        await AsyncWorker(mine).handle(envelope)

    run_id = opened()
    in_loop(story)
    assert status_of(ledger, run_id) == "completed"
    assert ledger.get(run_id)["failure_count"] == 0


def test_worker_serves_many_runs_at_once_and_stops(ledger, in_loop, opened, calls):
    together = 5

    async def story(mine: AsyncLedger) -> None:
        all_here = asyncio.Barrier(together)

        async def errand(run):
            await run.checkpoint("only")
            await all_here.wait()  # passes only when all of them are in hand at the same time
            await run.effect("crm.note", {"n": run.external_id}, do=lambda e: calls.append(e.key) or "x")
            if len(calls) == together:
                worker.stop()

        worker = AsyncWorker(serve(mine, errand), concurrency=together, poll=1)
        await worker.run()

    runs = [opened(f"errand-{n}") for n in range(together)]
    in_loop(story)
    assert {status_of(ledger, run_id) for run_id in runs} <= {"completed", "ready"}
    assert len(calls) == len(set(calls)) == together


def test_worker_with_a_wrong_key_says_so_and_ends(cast):
    async def story() -> None:
        async with AsyncLedger(cast.url, "not-a-key") as stranger:
            with pytest.raises(Unauthenticated, match="REHYDRATE_KEY"):
                await serve(stranger, lambda run: asyncio.sleep(0)).work(poll=1)

    in_a_loop(story())


class Lossy(httpx.AsyncBaseTransport):
    """The network loses the first answer to every POST; the server has acted on it by then."""

    def __init__(self) -> None:
        self.inner = httpx.AsyncHTTPTransport()
        self.seen: set[str] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        answer = await self.inner.handle_async_request(request)
        key = request.headers.get("idempotency-key")
        if key is None or key in self.seen:
            return answer
        self.seen.add(key)
        await answer.aread()
        raise httpx.ReadError("the answer was lost", request=request)

    async def aclose(self) -> None:
        await self.inner.aclose()


def test_every_answer_is_lost_once_and_still_nothing_happens_twice(ledger, in_loop, opened, calls):
    async def errand(run):
        await run.checkpoint("one")
        await run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1")

    run_id = opened()
    transport = Lossy()
    in_loop(lambda mine: serve(mine, errand).work_once(), transport=transport, backoff=Backoff(base=0.01))
    assert [(e["state"], e["attempt"]) for e in ledger.get(run_id)["effects"]] == [("executed", 1)]
    assert status_of(ledger, run_id) == "completed"
    assert len(calls) == 1
    assert len(transport.seen) >= 4


def test_run_in_hand(ledger, in_loop, alice, calls):
    async def story(mine: AsyncLedger) -> None:
        async with mine.run(FLOW, "errand-1", title="An errand") as run:
            async with run.batch():
                await run.checkpoint("only")
                await run.note("Thinking.")
            await run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1")
            await run.ask("yes", "Go on?", due="1d")
            await run.complete({"data": "through"})

    async def too_early(mine: AsyncLedger) -> None:
        with pytest.raises(NotToGoOn):
            await story(mine)

    in_loop(story)
    in_loop(too_early)
    run_id = ledger.runs(flow=FLOW)["results"][0]["id"]
    alice.decide(run_id, "yes", "approve")
    in_loop(story)
    assert status_of(ledger, run_id) == "completed"
    assert len(calls) == 1


AGENT = """
import asyncio, sys
from rehydrate.client import AsyncLedger

ledger = AsyncLedger()

@ledger.flow("errand")
async def errand(run):
    async def slowly(e):
        print("doing", flush=True)
        await asyncio.sleep(1)
        print("done", flush=True)
        return "x1"

    await run.checkpoint("only")
    await run.effect("crm.note", {"n": 1}, do=slowly)
    await run.effect("crm.note", {"n": 2}, do=slowly)

asyncio.run(ledger.work())
"""


@pytest.mark.processes
def test_sigterm_in_the_middle_of_an_effect_waits_for_its_receipt(cast, key, ledger, opened, tmp_path):
    environment = {**os.environ, "REHYDRATE_URL": cast.url, "REHYDRATE_KEY": key}
    run_id = opened()
    log = tmp_path / "agent.log"
    with log.open("wb") as out:
        agent = subprocess.Popen([sys.executable, "-c", AGENT], cwd=ROOT, env=environment, stdout=out)
    try:
        eventually(lambda: "doing" in log.read_text(), what="the effect")
        agent.terminate()
        assert agent.wait(timeout=20) == 0
    finally:
        end(agent)

    assert reaches(ledger, run_id, "ready")["failure_count"] == 0
    assert [e["state"] for e in ledger.get(run_id)["effects"]] == ["executed"]
    assert log.read_text().split() == ["doing", "done"]


def test_cancelling_twice_is_as_good(ledger, in_loop, opened):
    """The second cancellation comes while the first is being told to the ledger."""

    async def story(mine: AsyncLedger) -> None:
        transport = mine._transport._http._transport
        assert isinstance(transport, Held)
        turn = await in_the_middle_of_an_effect(mine)
        turn.cancel()
        await transport.held.wait()
        turn.cancel()
        await asyncio.sleep(0)
        transport.go_on.set()
        with suppress(asyncio.CancelledError):
            await turn

    run_id = opened()
    in_loop(story, transport=Held(b'"effect.unknown"'))
    assert effect_of(ledger, run_id, "crm.note")["state"] == "unknown"
    assert status_of(ledger, run_id) == "review"
