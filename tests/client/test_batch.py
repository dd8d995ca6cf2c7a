"""Chatty agents: what a batch holds goes to the ledger in few calls, in its order, and before anything that matters."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rehydrate.client import Invalid, Ledger
from rehydrate.client import run as run_module

FLOW = "errand"


class Counting(httpx.BaseTransport):
    """Counts the calls that append events."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.appends = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.appends += request.url.path.endswith("/events") and request.method == "POST"
        return self.inner.handle_request(request)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def wire() -> Counting:
    return Counting()


@pytest.fixture
def chatty(cast, key, wire):
    with Ledger(cast.url, key, transport=wire) as made:
        yield made


@pytest.fixture
def told(alice):
    """A run's events as the ledger has them: the text of notes, the type of others."""

    def look(run_id: str) -> list[Any]:
        events = alice.http.get(f"/runs/{run_id}/events", params={"limit": 200}).json()["results"]
        return [event["payload"].get("text") or event["type"] for event in events]

    return look


def test_many_notes_are_one_call(chatty, wire, told):
    with chatty.run(FLOW, "errand-1") as run:
        with run.batch():
            run.checkpoint("reading")
            for page in range(50):
                run.note(f"Page {page} read.")
            run.external_ref("shelf", "book", "b-1")
            assert wire.appends == 0
        assert wire.appends == 1
        assert told(run.id)[-52:] == ["checkpoint", *(f"Page {n} read." for n in range(50)), "external_ref"]


def test_what_was_held_is_on_record_before_an_effect_begins(chatty, told):
    seen: list[Any] = []

    with chatty.run(FLOW, "errand-1") as run, run.batch():
        run.checkpoint("only")
        run.note("I am going to write to the customer.")
        run.effect("mail.send", {"to": "bob"}, impact="low", do=lambda e: seen.append(told(run.id)))

    (events,) = seen
    assert events.index("I am going to write to the customer.") < events.index("effect.planned")


def test_what_was_held_is_on_record_before_a_pause(chatty, told):
    with chatty.run(FLOW, "errand-1") as run, run.batch():
        run.checkpoint("only")
        run.note("This needs a person.")
        run.ask("yes", "Go on?", due="1d")

    events = told(run.id)
    assert events.index("This needs a person.") < events.index("paused")


def test_what_was_held_survives_an_error_in_the_block(chatty, told):
    def script() -> None:
        with chatty.run(FLOW, "errand-1") as run, run.batch():
            run.checkpoint("only")
            run.note("It looked fine so far.")
            raise RuntimeError("It broke.")

    with pytest.raises(RuntimeError, match="It broke"):
        script()
    events = told(chatty.runs(flow=FLOW)["results"][0]["id"])
    assert events.index("It looked fine so far.") < events.index("failed")


@pytest.mark.parametrize("limit", ["BATCH_EVENTS", "BATCH_BYTES", "BATCH_SECONDS"])
def test_a_long_batch_is_told_on_the_way(chatty, wire, monkeypatch, limit):
    monkeypatch.setattr(run_module, limit, {"BATCH_EVENTS": 10, "BATCH_BYTES": 500, "BATCH_SECONDS": -1}[limit])
    with chatty.run(FLOW, "errand-1") as run, run.batch():
        run.checkpoint("only")
        for n in range(20):
            run.note(f"Thought {n}, at some length.")
        assert wire.appends >= 2


def test_a_replay_tells_no_checkpoint_twice(chatty, alice, told):
    def script() -> str:
        with chatty.run(FLOW, "errand-1") as run:
            with run.batch():
                run.checkpoint("one")
                run.checkpoint("two")
            run.ask("yes", "Go on?", due="1d")
        return str(run.id)

    alice.decide(script(), "yes", "approve")
    run_id = script()
    assert chatty.get(run_id)["stage"] == "two"
    assert told(run_id).count("checkpoint") == 2


def test_what_the_ledger_does_not_take_is_said_at_the_end_of_the_block(chatty):
    with pytest.raises(Invalid, match="text"), chatty.run(FLOW, "errand-1") as run, run.batch():
        run.note("x" * 100_000)
    assert chatty.get(run.id)["status"] != "completed"
