"""`import_langgraph`: paused threads of a checkpointer are seen as runs, read only until an agent adopts them."""

from __future__ import annotations

import io
import operator
import sys
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import psycopg
import pytest
from django.core.management import CommandError, call_command
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt

from rehydrate.adapters.langgraph import GraphFlow
from tests.conftest import _embedded

pytestmark = pytest.mark.processes


class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]


@dataclass
class Money:
    """A type of the agent's own, which the server knows nothing of."""

    amount: str

    def __post_init__(self) -> None:
        made.append(self)


made: list[Money] = []


def first(state: State) -> State:
    match state["said"]:
        case ["broken"]:
            raise ValueError("The bank is closed.")
        case ["done"]:
            return {}
        case ["own"]:
            interrupt({"question": "Refund this?", "refund": Money("12.00")})
    return {"said": [interrupt({"question": "Refund order 17?", "amount": "12.00"})]}


def last(state: State) -> State:
    return {"said": ["last"]}


@pytest.fixture
def graph(saver: PostgresSaver) -> Any:
    assert isinstance(saver.conn, psycopg.Connection)
    for row in saver.conn.execute("SELECT DISTINCT thread_id FROM checkpoints").fetchall():
        saver.delete_thread(row["thread_id"])
    builder = StateGraph(State).add_node("first", first).add_node("last", last)
    return builder.add_edge(START, "first").add_edge("first", "last").compile(checkpointer=saver)


def begin(graph: Any, thread: str, word: str, **options: Any) -> None:
    graph.invoke({"said": [word]}, {"configurable": {"thread_id": thread}}, durability="sync", **options)


def imported(url: str, *options: str) -> str:
    out = io.StringIO()
    call_command("import_langgraph", url, "--flow", "refunds", *options, stdout=out)
    return out.getvalue()


def test_stuck_threads_are_seen_and_can_only_be_read(graph, ledger, alice, threads_url):
    begin(graph, "asking", "in")
    begin(graph, "stopped", "done", interrupt_before=["last"])
    begin(graph, "finished", "done")
    with pytest.raises(ValueError, match="bank"):
        begin(graph, "failed", "broken")
    assert "3 paused threads shown as runs of refunds, 0 known before." in imported(threads_url)
    assert "0 paused threads shown as runs of refunds, 3 known before." in imported(threads_url)
    runs = {run["external_id"]: run for run in ledger.runs(flow="refunds", label="imported")["results"]}
    assert {name: (run["title"], run["stage"], run["status"]) for name, run in runs.items()} == {
        "asking": ("Refund order 17? (amount: 12.00)", "first", "waiting"),
        "stopped": ("It has stopped between two nodes.", "last", "waiting"),
        "failed": ("A task failed: ValueError('The bank is closed.')", "first", "waiting"),
    }
    run = ledger.get(runs["asking"]["id"])
    assert run["agent"]["framework"] == "LangGraph"
    assert run["checkpoint"]["ref"].startswith("langgraph:asking/")
    (wait,) = run["waits"]
    refused = alice.http.post(f"/waits/{wait['id']}/decisions", json={"choice": "approve", "wait_version": 1})
    assert refused.status_code == 422, "nobody answers it"
    GraphFlow(ledger, "refunds", graph)
    assert ledger.work_once() is None, "no agent goes on with it by itself"


def test_an_adopted_thread_is_a_run_as_any_other(graph, ledger, alice, threads_url):
    begin(graph, "asking", "in")
    imported(threads_url, "--thread", "asking")
    flow = GraphFlow(ledger, "refunds", graph)
    run = flow.adopt("asking")
    assert ledger.work_once() == run["id"]
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert ledger.get(run["id"])["status"] == "completed"
    assert graph.get_state({"configurable": {"thread_id": "asking"}}).values["said"] == ["in", True, "last"]


def test_what_only_the_agent_knows_is_read_as_data(graph, ledger, threads_url):
    begin(graph, "asking", "own")
    made.clear()
    imported(threads_url)
    (run,) = ledger.runs(flow="refunds")["results"]
    assert run["title"] == "Refund this? (refund: {'amount': '12.00'})"
    assert made == []


def test_what_cannot_be_read_is_said_plainly(cast, monkeypatch, threads_url):
    with pytest.raises(CommandError, match="no LangGraph checkpoints"):
        imported(_embedded().url("postgres"))
    with pytest.raises(CommandError, match="cannot be read"):
        imported(_embedded().url("nowhere"))
    with pytest.raises(CommandError, match="no workspace"):
        imported(threads_url, "--workspace", "nowhere")
    monkeypatch.setitem(sys.modules, "langgraph.checkpoint.postgres", None)
    with pytest.raises(CommandError, match="pip install"):
        imported(threads_url)
