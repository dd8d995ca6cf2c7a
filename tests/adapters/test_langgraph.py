"""First slice."""
from __future__ import annotations
import operator
from typing import Annotated, Any, TypedDict
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from rehydrate.adapters.langgraph import GraphFlow, ask, effect

class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]

def test_an_interrupt_is_asked_and_answered(ledger, alice, saver):
    def node(state):
        return {"said": [interrupt({"question": "Refund order 17?", "amount": "12.00"})]}
    graph = StateGraph(State).add_node("refund", node).add_edge(START, "refund").compile(checkpointer=saver)
    flow = GraphFlow(ledger, "refunds", graph)
    run = flow.open("order-17", {"said": ["hello"]}, title="Order 17")
    assert ledger.work_once() == run["id"]
    run = ledger.get(run["id"])
    print(run)
    assert run["status"] == "waiting"
    alice.decide(run["id"], "approval", "approve")
    assert ledger.work_once() == run["id"]
    run = ledger.get(run["id"])
    assert run["status"] == "completed", run
    assert graph.get_state({"configurable": {"thread_id": "order-17"}}).values == {"said": ["hello", True]}
