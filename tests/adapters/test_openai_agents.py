"""The SDK with its own scripted model, against a real ledger. What each trap of it comes to here:

1.  a state knows no run, time, reviewer or reason      test_run_knows_who_decided_what_when_and_why
2.  a context's secrets stand in the state in clear     test_secrets_of_the_context_are_in_no_state
3.  a state fits only its format and its agents         test_state_of_another_format_goes_to_a_person
                                                        test_other_version_leaves_the_run_alone
4.  a forged "approved" executes                        test_forged_approval_executes_nothing
                                                        test_state_that_was_changed_outside_is_refused
5.  two runs on copies of a state both execute          test_copy_of_a_state_executes_nothing
6.  a provider's error after approval repeats the tool  test_provider_error_after_an_approval_repeats_nothing
7.  edits are refused                                   test_edited_arguments_run_and_the_model_is_told
8.  a failed effect looks done                          test_failure_is_never_told_to_the_model_as_a_result
                                                        test_tool_that_hides_its_failures_is_refused
9.  ungated siblings run before the pause               test_ungated_sibling_runs_once_before_the_pause
10. resuming a finished state calls the model again     test_finished_run_calls_no_model
11. max_turns is ignored on resume                      test_turns_are_counted_over_pauses
12. arguments are a string of JSON, one of many calls   test_each_call_is_an_ask_of_its_own_with_a_form
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from agents import (
    Agent,
    FunctionTool,
    RunContextWrapper,
    Runner,
    UserError,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.testing import ScriptedModel, assistant_message, function_call
from django.contrib.auth import get_user_model
from django.urls import reverse

from rehydrate import seal
from rehydrate.adapters.openai_agents import effect, effect_call, flow
from rehydrate.client import Ledger, Refused, Worker
from rehydrate.models import CheckpointState
from tests.client.conftest import issue_key, status_of
from tests.conftest import eventually, in_a_loop

Json = dict[str, Any]

set_tracing_disabled(True)  # nothing of a test leaves this machine


@dataclass
class Bank:
    """The outside: what reached it, by key, and whether it works."""

    done: list[tuple[str, str, Json]] = field(default_factory=list)
    trouble: Exception | None = None

    def act(self, action: str, **arguments: str) -> str:
        if self.trouble is not None:
            raise self.trouble
        self.done.append((action, effect_call().key, arguments))
        return f"{action} {len(self.done)}"

    def names(self) -> list[str]:
        return [action for action, _, _ in self.done]


@pytest.fixture
def bank() -> Bank:
    return Bank()


def tools(bank: Bank) -> list[FunctionTool]:
    @effect(
        "payments.refund",
        approval="refund-approval",
        impact="money",
        resource="order/{order}",
        summary="Refund {amount} EUR for order {order}?",
    )
    @function_tool(needs_approval=True, failure_error_function=None)
    def refund(order: str, amount: str) -> str:
        """Give a customer money back."""
        return bank.act("refund", order=order, amount=amount)

    @effect("mail.send")
    @function_tool(failure_error_function=None)
    def mail(text: str) -> str:
        """Write to the customer."""
        return bank.act("mail", text=text)

    return [refund, mail]


def refund(call_id: str = "call_1", **arguments: str) -> Any:
    return function_call("refund", {"order": "17", "amount": "20.00", **arguments}, call_id=call_id)


def mail(text: str, call_id: str = "call_m") -> Any:
    return function_call("mail", {"text": text}, call_id=call_id)


SAYS = assistant_message


def serve(ledger: Ledger, agent: Agent[Any], **options: Any) -> None:
    """Registers the agent as the flow `case`; the same again is the same program in another process."""

    @flow(ledger, "case", agent, **options)
    def case(run: Any) -> str:
        return f"Look after {run.external_id}."


@dataclass
class Desk:
    """An agent under a ledger; `restarted` is the same program in a new process."""

    ledger: Ledger
    bank: Bank
    run_id: str = ""

    def start(self, *steps: Any, **options: Any) -> ScriptedModel:
        """Serve the agent with a model that says this, and open a run; gives the model."""
        model = self.serves(*steps, **options)
        self.run_id = self.ledger.open("case", "case-1", title="Case 1")["run"]["id"]
        assert self.ledger.work_once() == self.run_id
        return model

    def serves(self, *steps: Any, **options: Any) -> ScriptedModel:
        model = ScriptedModel(steps)
        serve(self.ledger, Agent(name="Support", model=model, tools=[*tools(self.bank)]), **options)
        return model

    def restarted(self, *steps: Any, **options: Any) -> ScriptedModel:
        """Another process, which has only the ledger, goes on with the run."""
        model = self.serves(*steps, **options)
        assert eventually(self.ledger.work_once, what="a turn") == self.run_id
        return model

    @property
    def run(self) -> Json:
        return self.ledger.get(self.run_id)


@pytest.fixture
def desk(ledger: Ledger, bank: Bank) -> Desk:
    return Desk(ledger, bank)


class Shelf:
    """A store of the agent's own; it can be full."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.full_at: int | None = None

    def save(self, name: str, state: str) -> str:
        if len(self.kept) == self.full_at:
            self.full_at = None
            raise OSError("the disk is full")
        self.kept[f"shelf://{name}"] = state
        return f"shelf://{name}"

    def load(self, ref: str) -> str:
        return self.kept[ref]


def told(model: ScriptedModel) -> list[str]:
    """The tools' outputs that the model was given at its last call."""
    assert model.last_call is not None
    return [item["output"] for item in model.last_call.input if item.get("type") == "function_call_output"]


# --- the way through ----------------------------------------------------


def test_approved_call_runs_once_in_another_process(desk, bank, alice):
    first = desk.start([refund()])
    assert bank.done == []
    assert desk.run["agent"]["framework"] == "openai-agents"

    alice.decide(desk.run_id, "refund-approval", "approve")
    second = desk.restarted([SAYS("Your money is on its way.")])

    assert desk.run["status"] == "completed"
    assert desk.run["metadata"]["effect_keys"] == [{"key": "case/case-1/payments.refund/call_1", "state": "executed"}]
    assert bank.done == [("refund", "case/case-1/payments.refund/call_1", {"order": "17", "amount": "20.00"})]
    assert told(second) == ["refund 1"]
    assert len(first.calls) == 1


def test_people_see_what_the_agent_is_built_with(desk, client):
    desk.start([refund()])
    client.force_login(get_user_model().objects.get(username="alice"))
    for page in (reverse("inbox"), reverse("run", args=[desk.run_id])):
        assert "openai-agents" in client.get(page).content.decode()


def test_model_is_told_the_reason_of_a_no(desk, bank, alice):
    desk.start([refund()])

    alice.decide(desk.run_id, "refund-approval", "reject", reason="It was never returned")
    model = desk.restarted([SAYS("I am sorry.")])

    assert told(model) == ["Not done: a reviewer said no. Reason: It was never returned"]
    assert desk.run["status"] == "completed"
    assert bank.done == []


def test_model_gets_the_answer_that_a_reviewer_gave_instead(desk, bank, alice):
    desk.start([refund()])

    alice.decide(desk.run_id, "refund-approval", "respond", response="Offer a voucher first")
    model = desk.restarted([SAYS("How about a voucher?")])

    assert told(model) == ["Not done. A reviewer answered instead: Offer a voucher first"]
    assert bank.done == []


def test_run_whose_flow_reviews_a_no_stays_for_a_person(desk, bank, alice):
    desk.start([refund()], on_reject=None)
    alice.decide(desk.run_id, "refund-approval", "reject", reason="No")
    assert desk.run["status"] == "review"
    assert desk.ledger.work_once() is None


def test_call_that_a_person_did_by_hand_is_not_asked_about_again(desk, bank, alice):
    desk.start([refund()])
    key = desk.run["effects"][0]["key"]

    alice.act(desk.run_id, "takeover")
    alice.act(desk.run_id, "handback", effects=[{"key": key, "receipt": {"id": "by hand 9"}}])
    model = desk.restarted([SAYS("Done.")])

    assert told(model) == ["Done: by hand 9"]
    assert desk.run["status"] == "completed"
    assert bank.done == []


def test_question_is_asked_again_after_a_takeover_that_answered_nothing(desk, bank, alice):
    desk.start([refund()])
    alice.act(desk.run_id, "takeover")
    alice.act(desk.run_id, "handback")
    desk.restarted()

    alice.decide(desk.run_id, "refund-approval", "approve")
    desk.restarted([SAYS("Done.")])

    assert bank.names() == ["refund"]
    assert desk.run["status"] == "completed"


def test_policy_of_a_tool_says_whether_somebody_is_asked(ledger, bank: Bank, alice):
    async def large(_context: Any, parameters: Json, _call_id: str) -> bool:
        return float(parameters["amount"]) > 50

    @effect("payments.refund", approval="refund-approval", summary="Refund {amount}?")
    @function_tool(needs_approval=large, failure_error_function=None)
    def refund_up_to(amount: str) -> str:
        """Give a customer money back."""
        return bank.act("refund", amount=amount)

    def pay(amount: str, call_id: str) -> Any:
        return function_call("refund_up_to", {"amount": amount}, call_id=call_id)

    model = ScriptedModel([[pay("20.00", "a")], [pay("99.00", "b")], [SAYS("Paid.")]])
    serve(ledger, Agent(name="Support", model=model, tools=[refund_up_to]))
    run_id = ledger.open("case", "case-1")["run"]["id"]
    ledger.work_once()

    assert bank.done == [("refund", "case/case-1/payments.refund/a", {"amount": "20.00"})]
    alice.decide(run_id, "refund-approval", "approve")
    ledger.work_once()
    assert status_of(ledger, run_id) == "completed"
    assert [arguments["amount"] for _, _, arguments in bank.done] == ["20.00", "99.00"]


# --- agents of agents ----------------------------------------------------


def test_nested_agent_pauses_and_goes_on_inside(ledger, bank, alice):
    def cashier(*steps: Any) -> Agent[Any]:
        return Agent(name="Cashier", model=ScriptedModel(steps), tools=[*tools(bank)])

    def front(inner: Agent[Any], *steps: Any) -> tuple[Agent[Any], ScriptedModel]:
        model = ScriptedModel(steps)
        hand = inner.as_tool("ask_cashier", "Ask the cashier.")
        return Agent(name="Support", model=model, tools=[hand]), model

    agent, _ = front(cashier([refund()]), [function_call("ask_cashier", {"input": "Pay 17"}, call_id="call_n")])
    serve(ledger, agent)
    run_id = ledger.open("case", "case-1")["run"]["id"]
    ledger.work_once()
    wait = alice.open_wait(run_id, "refund-approval")
    assert {"label": "Agent", "value": "Cashier"} in wait["ask"]["details"]

    alice.decide(run_id, "refund-approval", "approve")
    agent, model = front(cashier([SAYS("Paid.")]), [SAYS("All done.")])
    serve(ledger, agent)
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert told(model) == ["Paid."]
    assert bank.names() == ["refund"]


def test_agent_that_took_over_from_another_goes_on(ledger, bank, alice):
    def team(front: list[Any], back: list[Any]) -> Agent[Any]:
        cashier = Agent[Any](name="Cashier", model=ScriptedModel(back), tools=[*tools(bank)])
        return Agent(name="Support", model=ScriptedModel(front), handoffs=[handoff(cashier)])

    serve(ledger, team([[function_call("transfer_to_cashier", {}, call_id="call_h")]], [[refund()]]))
    run_id = ledger.open("case", "case-1")["run"]["id"]
    ledger.work_once()

    alice.decide(run_id, "refund-approval", "approve")
    serve(ledger, team([], [[SAYS("Paid.")]]))
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert bank.names() == ["refund"]


def test_agent_may_itself_need_approval(ledger, bank, alice):
    def team(front: list[Any], back: list[Any]) -> Agent[Any]:
        cashier = Agent[Any](name="Cashier", model=ScriptedModel(back), tools=[*tools(bank)])
        ask = cashier.as_tool("ask_cashier", "Ask the cashier.", needs_approval=True)
        return Agent(name="Support", model=ScriptedModel(front), tools=[ask])

    serve(ledger, team([[function_call("ask_cashier", {"input": "Pay 17"}, call_id="call_n")]], []))
    run_id = ledger.open("case", "case-1")["run"]["id"]
    ledger.work_once()
    assert alice.open_wait(run_id, "ask_cashier")["ask"]["summary"] == "May Support give this to Cashier?"

    alice.decide(run_id, "ask_cashier", "approve")
    serve(ledger, team([[SAYS("All done.")]], [[mail("Hello")], [SAYS("Written.")]]))
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert bank.names() == ["mail"]


# --- the traps ----------------------------------------------------


def test_run_knows_who_decided_what_when_and_why(desk, alice):
    desk.start([refund()])
    alice.decide(desk.run_id, "refund-approval", "approve", reason="The parcel is back")
    desk.restarted([SAYS("Done.")])

    (decision,) = desk.run["metadata"]["decisions"]
    assert (decision["choice"], decision["by"]) == ("approve", "alice")
    assert decision["at"] > desk.run["created_at"]
    (wait,) = desk.run["waits"]
    assert wait["decision"]["reason"] == "The parcel is back"
    assert wait["ask"]["effect"]["arguments"] == {"order": "17", "amount": "20.00"}


@pytest.mark.parametrize("kept", ["by the ledger", "in a store"])
def test_secrets_of_the_context_are_in_no_state(ledger, bank: Bank, alice, kept):
    seen: list[Any] = []
    shelf = Shelf() if kept == "in a store" else None

    @effect("payments.refund", approval="refund-approval", impact="money")
    @function_tool(needs_approval=True, failure_error_function=None)
    def pay(context: RunContextWrapper[Any]) -> str:
        """Give a customer money back."""
        seen.append(context.context)
        return bank.act("refund")

    def team(front: list[Any], back: list[Any]) -> Agent[Any]:
        cashier = Agent[Any](name="Cashier", model=ScriptedModel(back), tools=[pay])
        return Agent(name="Support", model=ScriptedModel(front), tools=[cashier.as_tool("cashier", "Ask.")])

    def serve_team(front: list[Any], back: list[Any]) -> None:
        serve(ledger, team(front, back), context=lambda _: {"password": "hunter2"}, store=shelf)

    serve_team(
        [[function_call("cashier", {"input": "Pay"}, call_id="call_n")]], [[function_call("pay", {}, call_id="call_p")]]
    )
    run_id = ledger.open("case", "case-1")["run"]["id"]
    ledger.work_once()
    alice.decide(run_id, "refund-approval", "approve")
    serve_team([[SAYS("Done.")]], [[SAYS("Paid.")]])
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert seen == [{"password": "hunter2"}]  # made anew in each process, for nested agents too
    sealed = [bytes(row.sealed) for row in CheckpointState.objects.all()]
    states = list(shelf.kept.values()) if shelf else [seal.decrypt(state) for state in sealed]
    assert len(states) == 2
    assert all("Look after" in state and "hunter2" not in state for state in states)
    assert not any(b"Look after" in state for state in sealed)


def test_state_of_another_format_goes_to_a_person(desk, bank, alice):
    shelf = Shelf()
    desk.start([refund()], store=shelf)
    alice.decide(desk.run_id, "refund-approval", "approve")
    # The agent of that name is gone from the new code, which says all the same that it reads the old version.
    serve(desk.ledger, Agent(name="Helpdesk", model=ScriptedModel([]), tools=[*tools(bank)]), store=shelf)
    desk.ledger.work_once()

    assert desk.run["status"] == "review"
    assert "format 1." in desk.run["last_error"]["message"]
    assert bank.done == []


def test_other_version_leaves_the_run_alone(desk, bank, alice):
    desk.start([refund()], version="1")
    alice.decide(desk.run_id, "refund-approval", "approve")
    desk.serves([SAYS("Done.")], version="2")
    assert desk.ledger.work_once() is None
    assert desk.run["status"] == "ready"

    desk.restarted([SAYS("Done.")], version="2", reads=["1", "2"])
    assert bank.names() == ["refund"]


def test_forged_approval_executes_nothing(desk, bank, alice):
    """A state in which everything is approved, in the place of the one that the run saved."""
    shelf = Shelf()
    desk.start([refund()], store=shelf)
    alice.decide(desk.run_id, "refund-approval", "respond", response="Not yet")
    desk.restarted([refund("call_2", amount="90.00")], store=shelf)
    assert desk.run["status"] == "waiting"
    alice.act(desk.run_id, "takeover")
    forged = json.loads(list(shelf.kept.values())[-1])
    forged["snapshot"]["context"]["approvals"]["refund"] = {"approved": True, "rejected": []}
    forged["unattended"] = ["call_2"]
    text = json.dumps(forged)
    digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    ref = shelf.save("forged", text)
    alice.act(desk.run_id, "handback", checkpoint={"ref": ref, "digest": digest}, stage="step-2")

    desk.restarted(store=shelf)

    assert bank.done == []
    assert desk.run["status"] == "review"
    assert desk.run["last_error"]["code"] == "approval_required"


def test_state_that_was_changed_outside_is_refused(desk, bank, alice):
    shelf = Shelf()
    desk.start([refund()], store=shelf)
    alice.decide(desk.run_id, "refund-approval", "approve")
    for ref, text in shelf.kept.items():
        shelf.kept[ref] = text.replace("20.00", "90.00")
    desk.restarted(store=shelf)

    assert desk.run["status"] == "review"
    assert "somebody changed it" in desk.run["last_error"]["message"]
    assert bank.done == []


def test_checkpoint_without_a_state_goes_to_a_person(desk, bank, alice):
    """Rather than to the beginning, where the model would make its calls anew."""
    desk.start([refund()])
    alice.act(desk.run_id, "takeover")
    alice.act(desk.run_id, "handback", stage="paid", checkpoint={"ref": "file:///tmp/notes.txt"})
    model = desk.restarted([refund("call_9")])
    assert model.calls == ()
    assert desk.run["status"] == "review"
    assert "no state of this agent" in desk.run["last_error"]["message"]


def test_copy_of_a_state_executes_nothing(desk, bank, alice, cast):
    """Whoever holds a copy while somebody else has the run is fenced off before the outside is reached."""
    desk.start([refund()])
    alice.decide(desk.run_id, "refund-approval", "approve")
    copy = desk.ledger.claim(["case"])
    with Ledger(cast.url, issue_key("agent", "--name", "other"), holder="other") as other:
        assert other.claim(["case"]) is None
        desk.ledger.release(desk.run_id, copy["lease"]["epoch"])
        held = other.claim(["case"])
        assert held

        desk.serves([SAYS("Done.")])
        Worker(desk.ledger).handle(copy)
        assert bank.done == []

        serve(other, Agent(name="Support", model=ScriptedModel([[SAYS("Done.")]]), tools=[*tools(bank)]))
        Worker(other).handle(held)
    assert bank.names() == ["refund"]
    assert desk.run["status"] == "completed"


def test_provider_error_after_an_approval_repeats_nothing(desk, bank, alice):
    desk.start([refund()])
    alice.decide(desk.run_id, "refund-approval", "approve")
    desk.restarted(ConnectionError("the model is away"))
    assert bank.names() == ["refund"]
    assert desk.run["failure_count"] == 1
    assert desk.run["stage"] == "step-1-answered"

    model = desk.restarted([SAYS("Done.")])

    assert bank.names() == ["refund"]
    assert told(model) == ["refund 1"]
    assert desk.run["status"] == "completed"


def test_edited_arguments_run_and_the_model_is_told(desk, bank, alice):
    desk.start([refund()])

    alice.decide(desk.run_id, "refund-approval", "edit", arguments={"order": "17", "amount": "15.00"})
    desk.restarted(ConnectionError("the model is away"))
    model = desk.restarted([SAYS("You get 15.")])

    assert [arguments for _, _, arguments in bank.done] == [{"order": "17", "amount": "15.00"}]
    assert told(model) == [
        'A reviewer changed the arguments. It ran with {"order": "17", "amount": "15.00"}. Result: refund 1'
    ]
    assert desk.run["status"] == "completed"


def test_failure_is_never_told_to_the_model_as_a_result(desk, bank, alice):
    desk.start([refund()])
    alice.decide(desk.run_id, "refund-approval", "approve")

    bank.trouble = Refused("the bank is closed")
    assert desk.restarted().calls == ()
    assert desk.run["effects"][0]["state"] == "failed"

    bank.trouble = TimeoutError("no answer")
    assert desk.restarted().calls == ()
    assert desk.run["effects"][0]["state"] == "unknown"
    assert desk.run["status"] == "review"

    bank.trouble = None
    alice.reconcile(desk.run_id, desk.run["effects"][0]["key"], "not_executed")
    model = desk.restarted([SAYS("Done.")])
    assert told(model) == ["refund 1"]


def test_tool_that_hides_its_failures_is_refused(ledger, bank: Bank):
    @function_tool
    def hides() -> str:
        """Turns what goes wrong into a result."""
        return bank.act("hides")

    with pytest.raises(UserError, match="must not look done"):
        effect("payments.refund")(hides)

    @function_tool(failure_error_function=None, timeout=1.0)
    async def hurries() -> str:
        """Is given up on after a second."""
        return bank.act("hurries")

    with pytest.raises(UserError, match="timed out"):
        effect("payments.refund")(hurries)


def test_gated_tool_that_is_no_effect_is_refused(ledger):
    @function_tool(needs_approval=True, failure_error_function=None)
    def bare() -> str:
        """Does something outside."""
        return ""

    inner = Agent[Any](name="Inner", tools=[bare])
    for outer in (
        Agent[Any](name="Outer", handoffs=[inner]),
        Agent[Any](name="Outer", handoffs=[handoff(inner)]),
        Agent[Any](name="Outer", tools=[inner.as_tool("inner", "Ask.")]),
    ):
        with pytest.raises(UserError, match="bare of Inner"):
            serve(ledger, outer)


def test_effect_does_nothing_outside_a_run_of_the_ledger(bank):
    agent = Agent[Any](name="Support", model=ScriptedModel([[mail("Hello")]]), tools=[*tools(bank)])
    with pytest.raises(UserError, match="only under a run of the ledger"):
        in_a_loop(Runner.run(agent, "Hello"))
    assert bank.done == []


def test_ungated_sibling_runs_once_before_the_pause(desk, bank, alice):
    """It runs when its call is saved: dying right after it, before its output is saved, does not repeat it."""
    shelf = Shelf()
    shelf.full_at = 1
    desk.start([refund(), mail("We are looking into it")], store=shelf)
    assert bank.names() == ["mail"]
    assert desk.run["status"] == "waiting"
    assert desk.run["verdict"]["reasons"][0]["code"] == "backing_off"

    desk.restarted(store=shelf)
    alice.decide(desk.run_id, "refund-approval", "reject", reason="No")
    model = desk.restarted([SAYS("Sorry.")], store=shelf)

    assert bank.names() == ["mail"]
    assert sorted(told(model)) == ["Not done: a reviewer said no. Reason: No", "mail 1"]
    assert desk.run["status"] == "completed"


def test_finished_run_calls_no_model(desk, alice):
    desk.start([SAYS("Nothing to do.")])
    assert desk.run["status"] == "completed"
    model = desk.serves([SAYS("Again?")])
    assert desk.ledger.work_once() is None
    assert model.calls == ()


def test_turns_are_counted_over_pauses(desk, bank, alice):
    desk.start([refund("call_1")], max_turns=2)
    alice.decide(desk.run_id, "refund-approval", "approve")
    desk.restarted([refund("call_2", order="18")], max_turns=99)
    alice.decide(desk.run_id, "refund-approval", "approve")
    model = desk.restarted([SAYS("A turn too many.")], max_turns=99)

    assert model.calls == ()
    assert desk.run["status"] == "review"
    assert "Max turns (2)" in desk.run["last_error"]["message"]
    assert bank.names() == ["refund", "refund"]  # what was approved is done; only the model is not asked any more


def test_each_call_is_an_ask_of_its_own_with_a_form(desk, bank, alice):
    desk.start([SAYS("Both were damaged."), refund("call_1"), refund("call_2", order="18", amount="9.00")])

    waits = {wait["key"]: wait for wait in desk.run["waits"]}
    assert waits.keys() == {"call_1", "call_2"}
    ask = waits["call_2"]["ask"]
    assert ask["summary"] == "Refund 9.00 EUR for order 18?"
    assert ask["rationale"] == "Both were damaged."
    assert ask["effect"]["arguments"] == {"order": "18", "amount": "9.00"}
    assert ask["effect"]["resource"] == "order/18"
    assert set(ask["schema"]["properties"]) == {"order", "amount"}

    first = alice.http.post(f"/waits/{waits['call_1']['id']}/decisions", json={"choice": "approve", "wait_version": 1})
    assert first.status_code == 201
    assert desk.run["status"] == "waiting"
    assert bank.done == []
    alice.decide(desk.run_id, "refund-approval", "reject", reason="Only one")
    model = desk.restarted([SAYS("Done.")])

    assert [arguments["order"] for _, _, arguments in bank.done] == ["17"]
    assert told(model) == ["refund 1", "Not done: a reviewer said no. Reason: Only one"]


def test_arguments_that_are_no_object_are_sent_back_to_the_model(desk, bank):
    model = desk.start([function_call("refund", "[1, 2]", call_id="call_1")], [SAYS("I give up.")])
    assert told(model) == ["Not done: the arguments are not a JSON object."]
    assert desk.run["status"] == "completed"


def test_model_that_asks_for_the_same_again_is_stopped(desk, bank, alice):
    desk.start([refund("call_1")])
    alice.decide(desk.run_id, "refund-approval", "approve")
    desk.restarted([refund("call_2")])
    assert desk.run["status"] == "review"
    assert desk.run["last_error"]["code"] == "effect_duplicate"
    assert bank.names() == ["refund"]


def test_long_output_is_kept_by_its_digest_and_its_beginning(desk, alice):
    desk.start([SAYS("long " * 5000)])
    events = alice.http.get(f"/runs/{desk.run_id}/events").json()["results"]
    result = events[-1]["payload"]["result"]
    assert result["data"].startswith("long long")
    assert result["digest"] == hashlib.sha256(b"long " * 5000).hexdigest()
