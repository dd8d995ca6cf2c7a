"""The LangGraph adapter: real graphs, a real checkpointer on PostgreSQL, a real ledger, people with keys.

What LangGraph does by itself that could answer the wrong question or do something twice, and what shows that it cannot:

 1. A static breakpoint is no interrupt, only `.next` shows it   test_a_static_breakpoint_waits_for_a_person (before and
                                                                 after, in a subgraph; after a crash, unseen, a no)
 2. One bare answer for two open interrupts raises               test_each_of_several_interrupts_gets_its_own_answer
 3. An answer to an unknown id is silently ignored               test_an_answer_to_a_question_that_vanished_goes_nowhere
 4. An answer to the first question answers the second           test_an_answer_never_slips_to_the_next_question
 5. `Command(resume=None)` crashes                               test_nobody_answered_is_told_to_the_graph_as_none
 6. Nodes run again from their top, unanswered siblings too      test_a_node_that_runs_again_touches_the_outside_once,
                                                                 test_a_functional_graph_keeps_its_task_results
 7. Two workers on one thread both succeed                       test_of_two_workers_one_goes_on,
                                                                 test_a_worker_that_lost_its_lease_touches_nothing
 8. After an exception the old answer stays stored               test_an_exception_is_an_unknown_outcome,
                                                                 test_an_answer_given_beside_the_ledger_is_never_used,
                                                                 test_an_error_that_the_ledger_does_not_know_of
 9. A resume of a deleted thread starts a fresh one              test_a_deleted_thread_is_not_started_afresh
10. New input on a paused thread orphans its question            test_new_input_withdraws_the_question,
                                                                 test_input_beside_the_ledger_makes_the_answer_moot
11. Before 1.2.20 two interrupts of a node share an id           test_an_older_langgraph_is_refused
12. Batched decisions go by position, a wrong count is saved     test_batched_calls_are_decided_one_by_one
13. Per call, ungated tools run before the decision              test_per_call_mode_asks_by_the_tools_own_schema
14. The older inbox form is a list of one or several             test_the_older_inbox_form
15. What a call returns is not what is stored                    test_the_store_is_read_and_not_what_a_call_returned
16. An effect that fails or is unknown inside a node             test_an_effect_that_failed_is_tried_again,
                                                                 test_an_unknown_effect_waits_for_a_person
17. A tool's result may be lost after it ran, or be an error     test_a_tool_that_was_run_is_not_run_again,
                                                                 test_a_tool_with_an_error_is_an_unknown_effect
"""

from __future__ import annotations

import asyncio
import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt

from rehydrate.adapters.langchain import LedgerTools
from rehydrate.adapters.langgraph import (
    GraphFlow,
    NoCheckpointer,
    NoRun,
    ThreadNotWritten,
    TooOld,
    ask,
    check_version,
    current_run,
    effect,
)
from rehydrate.client import Effect, Ledger, NotSent, Worker
from tests.client.conftest import Person, reaches, status_of

pytestmark = pytest.mark.processes

Json = dict[str, Any]
THREAD = "order-17"


class State(TypedDict, total=False):
    said: Annotated[list[Any], operator.add]


def graph_of(saver: Any, *nodes: Callable[..., Any], parallel: bool = False, **options: Any) -> Any:
    """The nodes one after the other, or side by side."""
    builder = StateGraph(State)
    for node in nodes:
        name = getattr(node, "name", None) or node.__name__
        builder.add_node(name, node)
    names = list(builder.nodes)
    for before, name in zip([START, *names], names, strict=False):
        builder.add_edge(START if parallel else before, name)
    return builder.compile(checkpointer=saver, **options)


def said(graph: Any) -> list[Any]:
    return list(graph.get_state({"configurable": {"thread_id": THREAD}}).values.get("said", []))


def resume_beside(graph: Any, answer: Any) -> None:
    """Somebody resumes the thread without the ledger."""
    graph.invoke(Command(resume=answer), {"configurable": {"thread_id": THREAD}}, durability="sync")


@pytest.fixture
def saver(saver: PostgresSaver) -> PostgresSaver:
    saver.delete_thread(THREAD)
    return saver


@pytest.fixture
def start(ledger: Ledger) -> Callable[..., Json]:
    """Opens a run on a graph and serves it until it pauses."""

    def begin(graph: Any, **options: Any) -> Json:
        flow = GraphFlow(ledger, "refunds", graph, **options)
        run = flow.open(THREAD, {"said": ["in"]}, title="Order 17")
        assert ledger.work_once() == run["id"]
        return ledger.get(run["id"])

    return begin


def open_waits(ledger: Ledger, run: Json) -> list[Json]:
    return [wait for wait in ledger.get(run["id"])["waits"] if wait["status"] == "open"]


def answer(alice: Person, wait: Json, choice: str, **more: Any) -> None:
    alice._post(f"/waits/{wait['id']}/decisions", {"choice": choice, "wait_version": wait["version"], **more})


# --- interrupts ----------------------------------------------------


def refund(state: State) -> State:
    return {"said": [interrupt({"question": "Refund order 17?", "amount": "12.00"})]}


@pytest.mark.parametrize(
    ("choice", "more", "heard"),
    [("approve", {}, True), ("reject", {"reason": "Too late."}, False), ("respond", {"response": "half"}, "half")],
)
def test_an_interrupt_is_asked_and_answered(ledger, alice, saver, start, choice, more, heard):
    graph = graph_of(saver, refund)
    run = start(graph)
    assert (run["status"], run["stage"]) == ("waiting", "refund")
    assert run["agent"]["framework"].startswith("LangGraph 1.")
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"] == "Refund order 17?"
    assert wait["ask"]["details"] == [{"label": "amount", "value": "12.00"}]
    alice.decide(run["id"], "approval", choice, **more)
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", heard]


def test_each_of_several_interrupts_gets_its_own_answer(ledger, alice, saver, start):
    def left(state: State) -> State:
        return {"said": [f"left {interrupt('Left?')}"]}

    def right(state: State) -> State:
        return {"said": [f"right {interrupt('Right?')}"]}

    graph = graph_of(saver, left, right, parallel=True)
    run = start(graph)
    by_question = {wait["ask"]["summary"]: wait for wait in open_waits(ledger, run)}
    answer(alice, by_question["Right?"], "respond", response="R")
    assert ledger.work_once() is None, "one answer of two: nothing goes on"
    answer(alice, by_question["Left?"], "respond", response="L")
    ledger.work_once()
    assert sorted(said(graph)) == ["in", "left L", "right R"]


def test_interrupts_in_subgraphs_are_asked_and_answered(ledger, alice, saver, start):
    def inner(state: State) -> State:
        return {"said": [f"inner {interrupt('Inner?')} {interrupt('Again?')}"]}

    subgraph = graph_of(None, inner, name="sub")
    graph = graph_of(saver, refund, subgraph, parallel=True)
    run = start(graph)
    for wait in open_waits(ledger, run):
        answer(alice, wait, "respond", response="one")
    ledger.work_once()
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"] == "Again?"
    answer(alice, wait, "respond", response="two")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert "inner one two" in said(graph)


def test_an_answer_never_slips_to_the_next_question(ledger, alice, saver, start):
    """Between reading the thread and answering it, somebody answers the first question beside the ledger."""

    def node(state: State) -> State:
        return {"said": [interrupt("First?"), interrupt("Second?")]}

    graph = graph_of(saver, node)
    meddle = threading.Event()

    def reading(pending: Any, terms: Any) -> None:
        if meddle.is_set() and pending.value == "First?":
            meddle.clear()
            resume_beside(graph, "beside")

    run = start(graph, question=reading)
    alice.decide(run["id"], "approval", "respond", response="for the first")
    meddle.set()
    ledger.work_once()
    assert graph.get_state({"configurable": {"thread_id": THREAD}}).interrupts[0].value == "Second?"
    reaches(ledger, run["id"], "ready")
    ledger.work_once()
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"] == "Second?"
    answer(alice, wait, "respond", response="for the second")
    ledger.work_once()
    assert said(graph) == ["in", "beside", "for the second"]


def test_an_answer_to_a_question_that_vanished_goes_nowhere(ledger, alice, saver, start):
    def node(state: State) -> State:
        return {"said": [interrupt("First?")]}

    def later(state: State) -> State:
        return {"said": [interrupt("Second?")]}

    graph = graph_of(saver, node, later)
    run = start(graph)
    resume_beside(graph, "beside")
    alice.decide(run["id"], "approval", "respond", response="too late")
    ledger.work_once()
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"] == "Second?"
    assert said(graph) == ["in", "beside"]


def test_nobody_answered_is_told_to_the_graph_as_none(ledger, saver, start, ticking):
    graph = graph_of(saver, refund)
    run = start(graph, due="1s", on_timeout="resume")
    reaches(ledger, run["id"], "ready")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", None]


def test_a_question_of_its_own_form_is_translated_by_its_developer(ledger, alice, saver, start):
    from rehydrate.adapters._langgraph_asks import Question

    def node(state: State) -> State:
        return {"said": [interrupt({"kind": "vote"})["vote"]]}

    def translate(pending: Any, terms: Any) -> Question:
        asked = terms.approval(pending.key, pending.node, "Who wins?", choices=["approve", "reject"])
        return Question([asked], lambda answers: {"vote": "yes" if answers[0].approved else "no"})

    graph = graph_of(saver, node)
    run = start(graph, question=translate)
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert said(graph) == ["in", "yes"]


def test_an_answer_has_the_form_that_the_graph_wants(ledger, alice, saver, start):
    schema = {"type": "object", "properties": {"percent": {"type": "integer"}}, "required": ["percent"]}

    def node(state: State) -> State:
        return {"said": [interrupt("How much?", response_schema=schema)["percent"]]}

    graph = graph_of(saver, node)
    run = start(graph)
    (wait,) = open_waits(ledger, run)
    assert (wait["ask"]["choices"], wait["ask"]["response_schema"]) == (["respond"], schema)
    answer(alice, wait, "respond", response={"percent": 50})
    ledger.work_once()
    assert said(graph) == ["in", 50]


# --- what nodes do outside ----------------------------------------------------


def test_a_node_that_runs_again_touches_the_outside_once(ledger, alice, saver, start):
    touched: list[str] = []

    def pay(call: Any) -> str:
        touched.append(call.key)
        return f"receipt {len(touched)}"

    def left(state: State) -> State:
        first = effect("bank.pay", {"n": 1}, do=pay)
        second = effect("bank.pay", {"n": 2}, do=pay)
        return {"said": [first["id"], second["id"], interrupt("Left?")]}

    def right(state: State) -> State:
        receipt = effect("bank.pay", {"n": 3}, do=pay)
        return {"said": [interrupt("Right?"), interrupt("Really right?"), receipt["id"]]}

    graph = graph_of(saver, left, right, parallel=True)
    run = start(graph)
    for _ in range(2):
        for wait in open_waits(ledger, run):
            answer(alice, wait, "approve")
        ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert len(touched) == len(set(touched)) == 3
    assert {e["key"] for e in ledger.get(run["id"])["effects"]} == set(touched)
    assert sorted(map(str, said(graph))) == ["True", "True", "True", "in", "receipt 1", "receipt 2", "receipt 3"]


def test_a_functional_graph_keeps_its_task_results(ledger, alice, saver):
    touched: list[int] = []

    @task
    def pay(amount: int) -> str:
        return str(effect("bank.pay", {"amount": amount}, do=lambda _: touched.append(amount))["id"])

    @entrypoint(checkpointer=saver)
    def shop(amount: int) -> Json:
        receipt = pay(amount).result()
        return {"receipt": receipt, "sent": interrupt("Send it?")}

    flow = GraphFlow(ledger, "shop", shop, result=lambda values: values)
    run = flow.open(THREAD, 12)
    ledger.work_once()
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert touched == [12]


def test_an_ask_about_an_effect_runs_what_was_edited(ledger, alice, saver, start):
    touched: list[Json] = []

    def pay(state: State) -> State:
        send = Effect("bank.pay", {"to": "ACME", "amount": "100.00"}, impact="money", amount=("100.00", "EUR"))
        reply = ask("payment", "Pay ACME?", effect=send, due="1d", risk="high")
        if not reply.approved:
            return {"said": [reply.reason]}
        return {"said": [effect(send, do=lambda call: touched.append(call.arguments))["id"], reply.by]}

    graph = graph_of(saver, pay)
    run = start(graph)
    (wait,) = open_waits(ledger, run)
    assert (wait["name"], wait["ask"]["risk"]) == ("payment", "high")
    assert wait["ask"]["effect"]["arguments"] == {"to": "ACME", "amount": "100.00"}
    alice.decide(run["id"], "payment", "edit", arguments={"to": "ACME", "amount": "90.00"})
    ledger.work_once()
    run = ledger.get(run["id"])
    assert (run["status"], run["effects"][0]["state"]) == ("completed", "executed")
    assert touched == [{"to": "ACME", "amount": "90.00"}]
    assert said(graph)[-1] == "alice"


def test_effects_outside_a_worker_are_refused():
    with pytest.raises(NoRun):
        effect("bank.pay", do=print)
    with pytest.raises(NoRun):
        current_run()


def test_an_effect_that_failed_is_tried_again(ledger, alice, saver, start):
    tries: list[str] = []

    def pay(call: Any) -> str:
        tries.append(call.key)
        if len(tries) == 1:
            raise NotSent("The bank was closed.")
        return "paid"

    def node(state: State) -> State:
        said = interrupt("Pay?")
        return {"said": [said, effect("bank.pay", {"amount": 1}, do=pay)["id"]]}

    graph = graph_of(saver, node)
    run = start(graph)
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert ledger.get(run["id"])["effects"][0]["state"] == "failed"
    reaches(ledger, run["id"], "ready")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", True, "paid"]


def test_an_unknown_effect_waits_for_a_person(ledger, alice, saver, start):
    tries: list[str] = []

    def pay(call: Any) -> str:
        tries.append(call.key)
        raise TimeoutError("The bank did not answer.")

    def node(state: State) -> State:
        return {"said": [interrupt("Pay?"), effect("bank.pay", {"amount": 1}, do=pay)["id"]]}

    graph = graph_of(saver, node)
    run = start(graph)
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    run = ledger.get(run["id"])
    assert (run["status"], run["verdict"]["reasons"][0]["code"]) == ("review", "effect_unknown")
    alice.reconcile(run["id"], run["effects"][0]["key"], "executed", receipt={"id": "found"})
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", True, "found"]
    assert len(tries) == 1


# --- exceptions, crashes, several workers ----------------------------------------------------


def test_an_exception_is_an_unknown_outcome(ledger, alice, saver, start):
    heard: list[Any] = []

    def node(state: State) -> State:
        heard.append(interrupt("Pay?"))
        if len(heard) == 1:
            raise ValueError("Something broke halfway.")
        return {"said": heard[-1:]}

    graph = graph_of(saver, node)
    run = start(graph)
    alice.decide(run["id"], "approval", "respond", response="yes")
    ledger.work_once()
    stopped = ledger.get(run["id"])
    assert stopped["status"] == "review"
    assert stopped["verdict"]["reasons"][0]["code"] == "not_retryable"
    assert "Something broke halfway." in stopped["last_error"]["message"]
    assert ledger.work_once() is None, "nothing is tried again by itself"
    alice.act(run["id"], "retry")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert heard == ["yes", "yes"]


def broken_beside(graph: Any, answer: Any) -> None:
    with pytest.raises(ValueError, match="broke"):
        resume_beside(graph, answer)


def test_an_error_that_the_ledger_does_not_know_of(ledger, alice, saver, start):
    tries: list[Any] = []

    def node(state: State) -> State:
        tries.append(interrupt("Pay?"))
        if len(tries) == 1:
            raise ValueError("It broke.")
        return {"said": tries[-1:]}

    graph = graph_of(saver, node)
    run = start(graph)
    broken_beside(graph, True)
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "review"
    assert len(tries) == 1
    alice.act(run["id"], "retry")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"


def test_an_answer_given_beside_the_ledger_is_never_used(ledger, alice, saver, start):
    heard: list[Any] = []

    def node(state: State) -> State:
        heard.append(interrupt("Pay?"))
        raise ValueError("It broke.")

    graph = graph_of(saver, node)
    run = start(graph)
    broken_beside(graph, True)
    alice.decide(run["id"], "approval", "reject", reason="No.")
    ledger.work_once()
    for _ in range(2):
        assert status_of(ledger, run["id"]) == "review"
        alice.act(run["id"], "retry")
        ledger.work_once()
    assert "another answer" in ledger.get(run["id"])["last_error"]["message"]
    assert heard == [True], "only what was called beside the ledger"


def test_a_deleted_thread_is_not_started_afresh(ledger, alice, saver, start):
    graph = graph_of(saver, refund)
    run = start(graph)
    saver.delete_thread(THREAD)
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    run = ledger.get(run["id"])
    assert (run["status"], run["last_error"]["code"]) == ("review", "ThreadGone")
    assert said(graph) == []


def test_the_store_is_read_and_not_what_a_call_returned(ledger, alice, saver):
    """A worker died after its graph had paused and before the ledger was told."""
    graph = graph_of(saver, refund)
    run = GraphFlow(ledger, "refunds", graph).open(THREAD, {"said": ["in"]})
    graph.invoke(None, {"configurable": {"thread_id": THREAD}}, durability="sync")
    ledger.work_once()
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"] == "Refund order 17?"


def test_of_two_workers_one_goes_on(ledger, alice, saver, start, cast, key, threads_url):
    barrier = threading.Barrier(2)
    heard: list[Any] = []

    def node(state: State) -> State:
        reply = interrupt("Pay?")
        heard.append(reply)
        return {"said": [reply]}

    graph = graph_of(saver, node)
    run = start(graph)
    alice.decide(run["id"], "approval", "approve")
    served: list[str | None] = []

    def serve() -> None:
        with Ledger(cast.url, key) as own, PostgresSaver.from_conn_string(threads_url) as own_saver:
            GraphFlow(own, "refunds", graph_of(own_saver, node))
            barrier.wait()
            served.append(own.work_once())

    workers = [threading.Thread(target=serve) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(served, key=str) == sorted([run["id"], None], key=str)
    assert heard == [True]
    assert said(graph) == ["in", True]


def test_a_worker_that_lost_its_lease_touches_nothing(ledger, alice, saver, start):
    touched: list[Any] = []

    def slow(state: State) -> State:
        alice.act(current_run().id, "takeover")
        return {"said": ["slow"]}

    def pay(state: State) -> State:
        return {"said": [effect("bank.pay", {"amount": 1}, do=touched.append)["id"]]}

    run = start(graph_of(saver, slow, pay))
    assert run["status"] == "taken_over"
    assert touched == []
    alice.act(run["id"], "handback", needed_engineer=False)
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert len(touched) == 1


def test_a_question_that_a_takeover_withdrew_is_asked_again(ledger, alice, saver, start):
    graph = graph_of(saver, refund)
    run = start(graph)
    alice.act(run["id"], "takeover")
    alice.act(run["id"], "handback", needed_engineer=False)
    ledger.work_once()
    (wait,) = open_waits(ledger, run)
    answer(alice, wait, "approve")
    ledger.work_once()
    assert said(graph) == ["in", True]


def test_a_worker_that_is_stopped_gives_the_run_back_between_two_nodes(ledger, saver):
    def first(state: State) -> State:
        worker.stop()
        return {"said": ["first"]}

    graph = graph_of(saver, first, note("second"))
    run = GraphFlow(ledger, "refunds", graph).open(THREAD, {"said": ["in"]})
    worker = Worker(ledger)
    worker.once()
    assert status_of(ledger, run["id"]) == "ready"
    assert said(graph) == ["in", "first"]
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", "first", "second"]


@contextlib.contextmanager
def loop_with_saver(url: str) -> Iterator[AsyncPostgresSaver]:
    """An asynchronous checkpointer, and the loop that it lives in, in a thread beside the worker's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def there(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    context = AsyncPostgresSaver.from_conn_string(url)
    try:
        yield there(context.__aenter__())
        there(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_asynchronous_graph(ledger, alice, threads_url):
    touched: list[Any] = []

    async def pay(state: State) -> State:
        receipt = await asyncio.to_thread(effect, "bank.pay", {"amount": 1}, do=touched.append)
        return {"said": [interrupt("Pay more?"), receipt["id"] != ""]}

    with loop_with_saver(threads_url) as saver:
        saver.delete_thread(THREAD)
        graph = graph_of(saver, pay)
        run = GraphFlow(ledger, "refunds", graph).open(THREAD, {"said": ["in"]})
        ledger.work_once()
        alice.decide(run["id"], "approval", "respond", response="no")
        ledger.work_once()
        assert status_of(ledger, run["id"]) == "completed"
        assert said(graph) == ["in", "no", True]
    assert len(touched) == 1


# --- input ----------------------------------------------------


def test_opening_twice_writes_the_input_once(ledger, saver):
    flow = GraphFlow(ledger, "refunds", graph_of(saver, refund))
    first, second = (flow.open(THREAD, {"said": ["in"]}) for _ in range(2))
    assert first["id"] == second["id"]
    assert said(flow.graph) == ["in"]


def test_a_thread_that_is_not_there_is_opened_with_an_input(ledger, saver):
    with pytest.raises(ThreadNotWritten):
        GraphFlow(ledger, "refunds", graph_of(saver, refund)).open(THREAD)
    assert ledger.runs(flow="refunds")["total"] == 0


def test_a_thread_that_paused_before_the_ledger_came_is_adopted(ledger, alice, saver):
    graph = graph_of(saver, refund)
    graph.invoke({"said": ["in"]}, {"configurable": {"thread_id": THREAD}}, durability="sync")
    run = GraphFlow(ledger, "refunds", graph).open(THREAD)
    ledger.work_once()
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert said(graph) == ["in", True]


def test_an_opener_that_died_before_the_input_is_made_good(ledger, saver):
    flow = GraphFlow(ledger, "refunds", graph_of(saver, refund))
    run = ledger.open("refunds", THREAD)["run"]
    flow.open(THREAD, {"said": ["in"]})
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "waiting"
    assert said(flow.graph) == ["in"]


def test_new_input_withdraws_the_question(ledger, alice, saver):
    def node(state: State) -> State:
        return {"said": [interrupt(f"Answer {state['said'][-1]}?")]}

    flow = GraphFlow(ledger, "refunds", graph_of(saver, node))
    run = flow.open(THREAD, {"said": ["one"]})
    ledger.work_once()
    (old,) = open_waits(ledger, run)
    flow.send(THREAD, {"said": ["two"]})
    ledger.work_once()
    (new,) = open_waits(ledger, run)
    assert (old["ask"]["summary"], new["ask"]["summary"]) == ("Answer one?", "Answer two?")
    refused = alice.http.post(
        f"/waits/{old['id']}/decisions", json={"choice": "approve", "wait_version": old["version"]}
    )
    assert refused.json()["code"] == "wait_closed"
    answer(alice, new, "approve")
    ledger.work_once()
    assert said(flow.graph) == ["one", "two", True]


def test_input_beside_the_ledger_makes_the_answer_moot(ledger, alice, saver, start):
    graph = graph_of(saver, refund)
    run = start(graph)
    graph.invoke({"said": ["new"]}, {"configurable": {"thread_id": THREAD}}, durability="sync")
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    assert said(graph) == ["in", "new"], "the old yes is not taken for the new question's"
    (wait,) = open_waits(ledger, run)
    answer(alice, wait, "reject", reason="No.")
    ledger.work_once()
    assert said(graph) == ["in", "new", False]


# --- static breakpoints ----------------------------------------------------


def note(word: str) -> Callable[[State], State]:
    def node(state: State) -> State:
        return {"said": [word]}

    node.__name__ = word
    return node


BEFORE, AFTER = {"interrupt_before": ["second"]}, {"interrupt_after": ["first"]}


@pytest.mark.parametrize("where", [BEFORE, AFTER])
@pytest.mark.parametrize("nested", [False, True], ids=["outer", "subgraph"])
def test_a_static_breakpoint_waits_for_a_person(ledger, alice, saver, start, where, nested):
    graph = graph_of(None if nested else saver, note("first"), note("second"), **where)
    if nested:
        graph.name = "sub"
        graph = graph_of(saver, graph)
    run = start(graph)
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["summary"].startswith("The agent stopped ")
    assert wait["ask"]["choices"] == ["approve", "reject"]
    assert "second" not in said(graph)
    answer(alice, wait, "approve")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph)[-2:] == ["first", "second"]


def test_a_breakpoint_is_not_passed_by_the_worker_after_a_crash(ledger, saver):
    """The first worker died at the breakpoint; to LangGraph the next one's call without input would be a yes."""
    graph = graph_of(saver, note("first"), note("second"), interrupt_before=["second"])
    run = GraphFlow(ledger, "refunds", graph).open(THREAD, {"said": ["in"]})
    graph.invoke(None, {"configurable": {"thread_id": THREAD}}, durability="sync")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "waiting"
    assert said(graph) == ["in", "first"]


def test_a_breakpoint_that_cannot_be_seen_is_never_passed_unasked(ledger, alice, saver, start):
    """The outer graph cannot find the inner one in what its node calls, nor so its breakpoints."""
    hidden = {"inner": graph_of(None, note("first"), note("second"), interrupt_before=["second"])}

    def outer(state: State) -> State:
        return {"said": hidden["inner"].invoke({"said": ["inner"]})["said"]}

    graph = graph_of(saver, outer)
    run = start(graph)
    assert (run["status"], run["last_error"]["code"]) == ("review", "Stalled")
    assert ledger.work_once() is None
    alice.act(run["id"], "retry")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert said(graph) == ["in", "inner", "first", "second"]


def test_a_no_at_a_breakpoint_goes_the_flows_way(ledger, alice, saver, start):
    graph = graph_of(saver, note("first"), interrupt_before=["first"])
    run = start(graph)
    alice.decide(run["id"], "approval", "reject", reason="Not today.")
    assert status_of(ledger, run["id"]) == "review"
    assert ledger.work_once() is None
    assert said(graph) == ["in"]


# --- agents with tools ----------------------------------------------------


class Scripted(GenericFakeChatModel):
    """LangChain's own scripted model; it says the same whatever tools it is given."""

    def bind_tools(self, tools: Any, **options: Any) -> Scripted:
        return self


def calls(*wanted: tuple[str, Json]) -> AIMessage:
    return AIMessage(
        "", tool_calls=[{"name": name, "args": args, "id": f"call-{n}"} for n, (name, args) in enumerate(wanted, 1)]
    )


class BreaksOnce(AgentMiddleware[Any, Any, Any]):
    """Lets the first tool run, and loses its result."""

    broken = False

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        result = handler(request)
        if not self.broken:
            self.broken = True
            raise ConnectionError("The network is gone.")
        return result


class Tools:
    """Tools that count what reached the outside."""

    def __init__(self) -> None:
        self.sent: list[Json] = []

        @tool
        def send_email(to: str, text: str) -> str:
            """Send an email."""
            self.sent.append({"to": to, "text": text})
            if to == "nobody":
                raise TimeoutError("The mail server did not answer.")
            return f"sent to {to}"

        @tool
        def look_up(name: str) -> str:
            """Look somebody up."""
            self.sent.append({"looked_up": name})
            return f"{name} is known"

        self.all = [send_email, look_up]


EMAIL = ("send_email", {"to": "ann", "text": "Hello"})
ALLOWED = ["approve", "edit", "reject", "respond"]


@pytest.fixture
def assistant(ledger: Ledger, saver: PostgresSaver) -> Callable[..., tuple[Any, Json, Tools]]:
    """An agent whose model wants these tool calls, served until it pauses."""

    def begin(
        *wanted: tuple[str, Json], mode: str = "batched", middleware: Any = (), through_ledger: bool = True
    ) -> tuple[Any, Json, Tools]:
        tools = Tools()
        review = HumanInTheLoopMiddleware(
            {"send_email": {"allowed_decisions": ALLOWED, "description": "Send this email to a customer"}},
            interrupt_mode=mode,
        )
        agent = create_agent(
            Scripted(messages=iter([calls(*wanted), AIMessage("All done.")])),
            tools=tools.all,
            middleware=[review, *middleware, *([LedgerTools("send_email", "look_up")] if through_ledger else [])],
            checkpointer=saver,
        )
        flow = GraphFlow(ledger, "assistant", agent, waits={"send_email": "mail"})
        run = flow.open(THREAD, {"messages": [{"role": "user", "content": "Write to Ann."}]})
        ledger.work_once()
        return agent, ledger.get(run["id"]), tools

    return begin


def results(agent: Any) -> list[str]:
    messages = agent.get_state({"configurable": {"thread_id": THREAD}}).values["messages"]
    return [m.text for m in messages if isinstance(m, ToolMessage)]


def test_batched_calls_are_decided_one_by_one(ledger, alice, assistant):
    wanted = [EMAIL, ("send_email", {"to": "bob", "text": "Hello"}), ("send_email", {"to": "eve", "text": "Hello"})]
    agent, run, tools = assistant(*wanted, ("look_up", {"name": "dan"}))
    ann, bob, eve = sorted(open_waits(ledger, run), key=lambda wait: str(wait["ask"]["effect"]["arguments"]["to"]))
    assert (ann["name"], ann["ask"]["choices"]) == ("mail", ALLOWED)
    assert ann["ask"]["summary"] == "Send this email to a customer"
    assert ann["ask"]["effect"]["action"] == "send_email"
    answer(alice, ann, "edit", arguments={"to": "ann", "text": "Dear Ann"})
    answer(alice, eve, "reject", reason="Not to Eve.")
    assert ledger.work_once() is None, "two decisions for three calls are never delivered"
    answer(alice, bob, "respond", response="Bob has left.")
    ledger.work_once()
    run = ledger.get(run["id"])
    assert run["status"] == "completed"
    assert sorted(map(str, tools.sent)) == sorted(map(str, [{"to": "ann", "text": "Dear Ann"}, {"looked_up": "dan"}]))
    told = " | ".join(results(agent))
    assert "Bob has left." in told
    assert "Not to Eve." in told
    states = {effect["arguments"].get("to", "dan"): effect["state"] for effect in run["effects"]}
    assert states["ann"] == states["dan"] == "executed"
    assert states["eve"] == states["bob"] == "withdrawn"


def test_per_call_mode_asks_by_the_tools_own_schema(ledger, alice, assistant):
    _, run, tools = assistant(EMAIL, ("look_up", {"name": "dan"}), mode="per_call")
    assert tools.sent == [{"looked_up": "dan"}], "what needs no decision ran, once"
    (wait,) = open_waits(ledger, run)
    assert wait["ask"]["choices"] == ALLOWED
    assert set(wait["ask"]["schema"]["properties"]) == {"to", "text"}
    refused = alice.http.post(
        f"/waits/{wait['id']}/decisions",
        json={"choice": "edit", "wait_version": wait["version"], "arguments": {"to": 5}},
    )
    assert refused.status_code == 422, "an answer that LangGraph would refuse is refused while it can be mended"
    answer(alice, wait, "edit", arguments={"to": "ann", "text": "Dear Ann"})
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert tools.sent == [{"looked_up": "dan"}, {"to": "ann", "text": "Dear Ann"}]


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_an_agent_without_ledger_tools_is_recorded_as_seen(ledger, alice, assistant, mode):
    _, run, tools = assistant(EMAIL, mode=mode, through_ledger=False)
    alice.decide(run["id"], "mail", "approve")
    ledger.work_once()
    (effect,) = ledger.get(run["id"])["effects"]
    assert (effect["state"], effect["receipt"]["status"]) == ("executed", "accepted")
    assert len(tools.sent) == 1


def test_the_same_call_wanted_again_is_asked_about_again(ledger, alice, saver):
    tools = Tools()
    again = AIMessage("", tool_calls=[{"name": EMAIL[0], "args": EMAIL[1], "id": "call-again"}])
    agent = create_agent(
        Scripted(messages=iter([calls(EMAIL), again, AIMessage("All done.")])),
        tools=tools.all,
        middleware=[HumanInTheLoopMiddleware({"send_email": True}), LedgerTools("send_email")],
        checkpointer=saver,
    )
    run = GraphFlow(ledger, "assistant", agent).open(THREAD, {"messages": [("user", "Write to Ann.")]})
    ledger.work_once()
    for choice in ("reject", "approve"):
        alice.decide(run["id"], "approval", choice, reason="Later.")
        ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert len(tools.sent) == 1


def test_a_tool_that_was_run_is_not_run_again(ledger, alice, assistant):
    """Something breaks after the tool's receipt was recorded and before LangGraph has stored its result."""
    agent, run, tools = assistant(EMAIL, middleware=[BreaksOnce()])
    alice.decide(run["id"], "mail", "approve")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "review"
    alice.act(run["id"], "retry")
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert len(tools.sent) == 1
    assert results(agent) == ["sent to ann"]


def test_a_tool_with_an_error_is_an_unknown_effect(ledger, alice, assistant):
    agent, run, tools = assistant(("send_email", {"to": "nobody", "text": "Hello"}))
    alice.decide(run["id"], "mail", "approve")
    ledger.work_once()
    assert ledger.get(run["id"])["verdict"]["reasons"][0]["code"] == "effect_unknown"
    (effect,) = ledger.get(run["id"])["effects"]
    alice.reconcile(run["id"], effect["key"], "executed", receipt={"id": "found"})
    ledger.work_once()
    assert status_of(ledger, run["id"]) == "completed"
    assert (len(tools.sent), results(agent)) == (1, ["Done."])


def test_arguments_that_do_not_fit_never_reach_the_tool(ledger, assistant):
    agent, run, tools = assistant(("look_up", {"nme": "dan"}))
    assert run["status"] == "completed"
    assert (tools.sent, run["effects"]) == ([], [])
    assert "name" in results(agent)[0]


def test_a_call_that_was_rejected_does_not_run_though_the_middleware_lets_it(ledger, alice, saver):
    """The middleware asks its predicate again at the resume, and would skip the answer when that has changed."""
    tools, asks = Tools(), [True]
    review = HumanInTheLoopMiddleware({"send_email": {"allowed_decisions": ALLOWED, "when": lambda _: asks[0]}})
    model = Scripted(messages=iter([calls(EMAIL), AIMessage("All done.")]))
    middleware = [review, LedgerTools("send_email")]
    agent = create_agent(model, tools=tools.all, middleware=middleware, checkpointer=saver)
    run = GraphFlow(ledger, "assistant", agent).open(THREAD, {"messages": [("user", "Write to Ann.")]})
    ledger.work_once()
    asks[0] = False
    alice.decide(run["id"], "approval", "reject", reason="No.")
    ledger.work_once()
    run = ledger.get(run["id"])
    assert (run["status"], run["last_error"]["code"]) == ("review", "approval_rejected")
    assert tools.sent == []


def test_a_tool_that_asks_by_itself_is_no_effect(ledger, saver):
    @tool
    def ask_somebody(question: str) -> str:
        """Ask a person."""
        return str(interrupt(question))

    model = Scripted(messages=iter([calls(("ask_somebody", {"question": "Why?"})), AIMessage("All done.")]))
    agent = create_agent(model, tools=[ask_somebody], middleware=[LedgerTools("ask_somebody")], checkpointer=saver)
    run = GraphFlow(ledger, "assistant", agent).open(THREAD, {"messages": [("user", "Ask.")]})
    ledger.work_once()
    run = ledger.get(run["id"])
    assert (run["status"], run["last_error"]["code"]) == ("review", "ToolAsks")
    assert "leave it out" in run["last_error"]["message"]


@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_an_asynchronous_agent(ledger, alice, threads_url, mode):
    sent: list[str] = []

    @tool
    async def send_email(to: str, text: str) -> str:
        """Send an email."""
        await asyncio.sleep(0)
        sent.append(to)
        return f"sent to {to}"

    with loop_with_saver(threads_url) as saver:
        saver.delete_thread(THREAD)
        review = HumanInTheLoopMiddleware({"send_email": True}, interrupt_mode=mode)
        model = Scripted(messages=iter([calls(EMAIL), AIMessage("All done.")]))
        middleware = [review, LedgerTools("send_email")]
        agent = create_agent(model, tools=[send_email], middleware=middleware, checkpointer=saver)
        run = GraphFlow(ledger, "assistant", agent).open(THREAD, {"messages": [("user", "Write to Ann.")]})
        ledger.work_once()
        alice.decide(run["id"], "approval", "approve")
        ledger.work_once()
        run = ledger.get(run["id"])
        assert (run["status"], run["effects"][0]["state"]) == ("completed", "executed")
        assert (sent, results(agent)) == (["ann"], ["sent to ann"])


def test_the_older_inbox_form(ledger, alice, saver, start):
    everything = dict.fromkeys(["allow_accept", "allow_edit", "allow_respond", "allow_ignore"], True)

    def request(action: str) -> Json:
        return {
            "action_request": {"action": action, "args": {"n": 1}},
            "config": everything,
            "description": f"May I {action}?",
        }

    def node(state: State) -> State:
        return {"said": interrupt([request("one"), request("two"), request("three"), request("four")])}

    graph = graph_of(saver, node)
    run = start(graph)
    waits = {wait["ask"]["effect"]["action"]: wait for wait in open_waits(ledger, run)}
    assert waits["one"]["ask"]["summary"] == "May I one?"
    assert set(waits["one"]["ask"]["choices"]) == set(ALLOWED)
    answer(alice, waits["one"], "approve")
    answer(alice, waits["two"], "edit", arguments={"n": 2})
    answer(alice, waits["three"], "respond", response="Rather not.")
    answer(alice, waits["four"], "reject", reason="No.")
    ledger.work_once()
    assert said(graph)[1:] == [
        {"type": "accept", "args": None},
        {"type": "edit", "args": {"action": "two", "args": {"n": 2}}},
        {"type": "response", "args": "Rather not."},
        {"type": "ignore", "args": None},
    ]
    run = ledger.get(run["id"])
    assert run["status"] == "completed"
    assert {effect["action"]: effect["state"] for effect in run["effects"]} == {
        "one": "executed",
        "two": "executed",
        "three": "withdrawn",
        "four": "withdrawn",
    }


def test_an_action_whose_answer_never_came_is_not_taken_for_done(ledger, alice, saver, start):
    def node(state: State) -> State:
        wanted = {"action": "pay", "args": {"n": 1}}
        return {"said": interrupt({"action_request": wanted, "config": {"allow_accept": True}})}

    graph = graph_of(saver, node)
    run = start(graph)
    alice.decide(run["id"], "approval", "approve")
    graph.invoke({"said": ["new"]}, {"configurable": {"thread_id": THREAD}}, durability="sync")
    ledger.work_once()
    assert "executed" not in [effect["state"] for effect in ledger.get(run["id"])["effects"]]
    alice.decide(run["id"], "approval", "approve")
    ledger.work_once()
    states = [effect["state"] for effect in ledger.get(run["id"])["effects"]]
    assert sorted(states) == ["executed", "withdrawn"]


# --- what is refused ----------------------------------------------------


@pytest.mark.parametrize("text", ["1.2.19", "1.1.40", "0.6.0"])
def test_an_older_langgraph_is_refused(text):
    check_version("1.2.20")
    check_version("2.0.0")
    with pytest.raises(TooOld, match=text):
        check_version(text)


def test_a_graph_needs_a_checkpointer(ledger):
    with pytest.raises(NoCheckpointer):
        GraphFlow(ledger, "refunds", graph_of(None, refund))
    GraphFlow(ledger, "refunds", graph_of(InMemorySaver(), refund))
