"""Rule 10 of the contract: what an approval covers, what it does not, edits, conditions, and what is gated."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import rfc8785

from .driver import (
    ORDER,
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    checkpoint,
    effect,
    executed,
    not_granted,
    order,
    paused,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "string"},
        "supplier": {"type": "string"},
        "amount": {"type": "string", "pattern": "^[0-9]+[.][0-9]{2}$"},
    },
    "required": ["n", "supplier", "amount"],
}


@pytest.fixture
def approved(bot: Agent, alice: Person) -> Callable[..., Run]:
    """Gives a run that holds its lease again after legal's answer about order k1."""

    def give(choice: str = "approve", **how: Any) -> Run:
        run = bot.open(order())
        alice.decide(run.pause(approval(effect="k1", ask={"schema": SCHEMA})), choice, **how).ok(201)
        run.resume()
        return run

    return give


def granted(run: Run, key: str = "k1", **arguments: Any) -> bool:
    return bool(run.start(key, arguments={**ORDER, **arguments}).ok()["effects"][0]["granted"])


# --- what is gated ---------------------------------------------------------------------------------------------------


def test_a_gated_effect_without_a_decision_does_not_start(bot: Agent) -> None:
    run = bot.open(order())
    doc = run.start("k1", arguments=ORDER).refused(409, "approval_required")
    assert doc["effect"]["key"] == "k1"
    not_granted(run.append({**order(), "start": True}), "approval_required")
    assert run.state("k1") == "planned"


def test_what_no_file_names_is_gated_above_low_impact(bot: Agent) -> None:
    run = bot.open(
        effect("a", "new.thing", impact="money"), effect("b", "new.other", impact="low"), effect("c", "bank.pay")
    )
    run.start("a", arguments={"of": "a"}).refused(409, "approval_required")
    run.start("b", arguments={"of": "b"}).ok()
    run.start("c", arguments={"of": "c"}).ok()  # declared, and its flow asks for no approval


def test_the_flows_impact_wins_over_the_agents(bot: Agent) -> None:
    run = bot.open(order(impact="low"), effect("m", "mail.send", impact="irreversible"))
    assert (run.effect("k1")["impact"], run.effect("m")["impact"]) == ("money", "low")
    run.start("k1", arguments=ORDER).refused(409, "approval_required")
    run.start("m", arguments={"of": "m"}).ok()


def test_the_flows_gate_is_not_replaced_by_the_agents_own(bot: Agent, alice: Person) -> None:
    run = bot.open(order(approval="other-approval"))
    alice.approve(run.pause(approval("other", name="other-approval", effect="k1")))
    run.resume()
    run.start("k1", arguments=ORDER).refused(409, "approval_required", "approval_mismatch")
    assert run.state("k1") == "planned"


def test_an_agents_own_approval_adds_to_the_flows(bot: Agent, alice: Person) -> None:
    run = bot.open(order(approval="other-approval"))
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.start("k1", arguments=ORDER).refused(409, "approval_required")
    alice.approve(run.pause(approval("other", name="other-approval", effect="k1")))
    run.resume()
    assert granted(run)


def test_an_agents_own_approval_gates_a_low_effect(bot: Agent, alice: Person) -> None:
    mail = effect("m", "mail.send", approval="other-approval")
    run = bot.open(mail)
    run.start("m", arguments=mail["arguments"]).refused(409, "approval_required")
    alice.approve(run.pause(approval("o", name="other-approval", effect="m")))
    run.resume()
    run.start("m", arguments=mail["arguments"]).ok()


@pytest.mark.parametrize("where", ["plan", "pause"])
def test_an_approval_that_a_declared_flow_does_not_list_is_refused(bot: Agent, where: str) -> None:
    run = bot.open()
    event = effect("m", "mail.send", approval="made-up") if where == "plan" else paused(approval("x", name="made-up"))
    run.append(event).refused(422, "invalid")


def test_a_flow_that_no_file_names_has_any_reviewer_but_the_requester(world: World, bot: Agent) -> None:
    carol, grace = world.person("carol"), world.person("grace")
    plan = effect("w", "erp.wire", impact="money")
    run = bot.open(plan, flow="undeclared", requested_by="carol")
    wait = run.pause(approval("whatever", name="whatever", effect="w"))
    carol.decide(wait).refused(403, "self_approval")
    grace.approve(wait)
    run.resume()
    run.start("w", arguments=plan["arguments"]).ok()


# --- an approval fits its ask's key and fingerprint only -------------------------------------------------------------


def test_an_approval_lets_exactly_that_run(approved: Callable[..., Run]) -> None:
    run = approved()
    assert granted(run)
    assert run.effect("k1")["approval"] is not None


def test_plan_and_start_with_an_approval_is_granted(approved: Callable[..., Run]) -> None:
    assert approved().append({**order(), "start": True}).ok()["effects"][0]["granted"] is True


def test_other_arguments_are_a_mismatch_and_go_to_review(approved: Callable[..., Run]) -> None:
    run = approved()
    run.start("k1", arguments={**ORDER, "amount": "100.01"}).refused(409, "approval_mismatch")
    assert (run.status, run.outcome, run.state("k1")) == ("review", "review", "planned")
    assert "approval_mismatch" in run.codes
    run.append(checkpoint("b")).refused(409, "lease_lost")


def test_a_gated_start_says_what_it_will_run(approved: Callable[..., Run]) -> None:
    run = approved()
    answer = run.start("k1")
    assert answer.status in (409, 422), "the plan's arguments are not taken for granted"
    assert run.state("k1") == "planned"


def test_the_approval_of_one_key_is_not_for_another(bot: Agent, alice: Person) -> None:
    two = order("k2", resource="po-2")
    run = bot.open(order(), two)
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.start("k2", arguments=ORDER).refused(409, "approval_required", "approval_mismatch")
    assert run.state("k2") == "planned"


def test_the_approval_of_one_run_is_not_for_another(approved: Callable[..., Run], bot: Agent) -> None:
    approved()
    other = bot.open(order())
    other.start("k1", arguments=ORDER).refused(409, "approval_required")


def test_an_ask_may_describe_an_effect_that_is_planned_later(bot: Agent, alice: Person) -> None:
    run = bot.open()
    whole = {k: v for k, v in order().items() if k != "type"}
    alice.approve(run.pause(approval(ask={"effect": whole})))
    run.resume()
    run.do(order())
    assert granted(run)


def test_what_is_planned_after_the_approval_must_be_what_was_asked(bot: Agent, alice: Person) -> None:
    run = bot.open()
    whole = {k: v for k, v in order().items() if k != "type"}
    alice.approve(run.pause(approval(ask={"effect": whole})))
    run.resume()
    other = {**ORDER, "amount": "999.00"}
    answer = run.append(order(arguments=other))
    if answer.status == 422:  # the ask has entered the effect already, so this is rule 8's key with other content
        answer.refused(422, "effect_key_reused")
    answer = run.start("k1", arguments=other)
    answer.refused(409, "approval_mismatch")


def test_the_first_start_uses_it_up_and_later_attempts_are_covered(approved: Callable[..., Run]) -> None:
    run = approved()
    assert granted(run)
    run.do({"type": "effect.failed", "key": "k1", "error": {"code": "x", "message": "no"}})
    assert granted(run)
    run.do(executed("k1"))
    run.append({**order("k2"), "repeat": True, "start": True})
    assert [e["state"] for e in run.look()["effects"] if e["key"] == "k2"] != ["started"]


def test_respond_authorises_nothing(approved: Callable[..., Run]) -> None:
    run = approved("respond", response="What does it cost?")
    run.start("k1", arguments=ORDER).refused(409, "approval_required")


def test_after_a_no_it_does_not_start(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("goes-on", on_reject="continue"))
    alice.reject(run.pause(approval(effect="k1")))
    run.resume()
    run.start("k1", arguments=ORDER).refused(409, "approval_rejected")
    not_granted(run.append({**order(), "start": True}), "approval_rejected")


@pytest.mark.parametrize("after", ["a no", "no answer"])
def test_what_was_done_all_the_same_is_recorded_loudly(bot: Agent, alice: Person, world: World, after: str) -> None:
    run = bot.open(effect("g", "crm.grant"), flow=world.variant("goes-on", on_reject="continue"))
    if after == "a no":
        alice.reject(run.pause(approval("soft", name="soft-approval", effect="g")))
        run.resume()
    run.do(executed("g", "x1"))
    assert (run.effect("g")["receipt"]["id"], run.outcome) == ("x1", "review")
    assert "executed_despite_rejection" in run.codes


# --- edits -----------------------------------------------------------------------------------------------------------


def test_an_edit_replans_the_effect_in_the_deciding_transaction(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1", ask={"schema": SCHEMA}))
    edited = {**ORDER, "amount": "80.00"}
    made = alice.decide(wait, "edit", arguments=edited).ok(201)
    assert made["arguments"] == edited
    assert run.effect("k1")["arguments"] == edited
    assert len(run.events("effect.replanned")) == 1
    envelope = run.resume()
    assert envelope["waits"][0]["decision"]["arguments"] == edited
    assert granted(run, amount="80.00")


def test_after_an_edit_the_old_arguments_do_not_run(approved: Callable[..., Run]) -> None:
    run = approved("edit", arguments={**ORDER, "amount": "80.00"})
    run.start("k1", arguments=ORDER).refused(409, "approval_mismatch")


def test_planning_again_as_first_planned_or_as_replanned_is_the_same_effect(approved: Callable[..., Run]) -> None:
    edited = {**ORDER, "amount": "80.00"}
    run = approved("edit", arguments=edited)
    for arguments in (ORDER, edited):
        assert run.do(order(arguments=arguments))["effects"][0]["arguments"] == edited
    run.append(order(arguments={**ORDER, "amount": "1.00"})).refused(422, "effect_key_reused")
    # plan-and-start from the top, with what the agent first meant, runs what was approved or tells what is approved
    got = run.do({**order(arguments=edited), "start": True})["effects"][0]
    assert (got["granted"], got["arguments"]) == (True, edited)


@pytest.mark.parametrize(
    "arguments", [{"amount": "80.00"}, {**ORDER, "amount": "cheap"}, {**ORDER, "amount": 80}], ids=str
)
def test_edited_arguments_are_checked_against_the_schema(bot: Agent, alice: Person, arguments: dict[str, Any]) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1", ask={"schema": SCHEMA}))
    doc = alice.decide(wait, "edit", arguments=arguments).refused(422, "invalid")
    assert doc["errors"][0]["pointer"].startswith("/arguments")
    assert (run.outcome, run.effect("k1")["arguments"]) == ("wait", ORDER)


def test_an_edit_without_arguments_is_no_edit(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1", ask={"schema": SCHEMA}))
    alice.decide(wait, "edit").refused(422, "invalid")


def test_only_the_choices_of_the_ask_are_open(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1", ask={"choices": ["approve", "reject"]}))
    alice.decide(wait, "respond", response="hm").refused(422, "invalid")
    alice.decide(wait, "edit", arguments=ORDER).refused(422, "invalid")
    alice.approve(wait)


def test_a_response_is_checked_against_its_schema(bot: Agent, alice: Person) -> None:
    run = bot.open()
    shape = {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]}
    wait = run.pause(approval(ask={"response_schema": shape, "choices": ["respond", "reject"]}))
    alice.decide(wait, "respond", response={"sku": 7}).refused(422, "invalid")
    alice.decide(wait, "respond", response={"sku": "a-7"}).ok(201)


# --- conditions ------------------------------------------------------------------------------------------------------

LIMIT = [{"pointer": "/amount", "op": "<=", "value": "120.00"}]


@pytest.mark.parametrize(
    ("amount", "runs"), [("100.00", True), ("120.0", True), ("9.50", True), ("120.01", False), ("1000.00", False)]
)
def test_within_the_conditions_the_conditioned_argument_may_differ(
    approved: Callable[..., Run], amount: str, runs: bool
) -> None:
    run = approved("approve_with_conditions", conditions=LIMIT)
    answer = run.start("k1", arguments={**ORDER, "amount": amount})
    if runs:
        assert answer.ok()["effects"][0]["granted"] is True
        assert run.effect("k1")["arguments"]["amount"] == amount
    else:
        answer.refused(409, "condition_unmet")
        assert (run.state("k1"), run.outcome) == ("planned", "review")
        assert "condition_unmet" in run.codes


@pytest.mark.parametrize(
    "amount", ["1_0", "\uff11\uff10", " 9", "nine", "", "0x1", "NaN", "-Infinity", None, True, ["9"]], ids=repr
)
def test_what_is_no_decimal_never_holds(approved: Callable[..., Run], amount: Any) -> None:
    run = approved("approve_with_conditions", conditions=LIMIT)
    run.start("k1", arguments={**ORDER, "amount": amount}).refused(409, "condition_unmet")
    assert run.state("k1") == "planned"


def test_what_is_not_conditioned_may_not_differ(approved: Callable[..., Run]) -> None:
    run = approved("approve_with_conditions", conditions=LIMIT)
    run.start("k1", arguments={**ORDER, "supplier": "Other"}).refused(409, "approval_mismatch")


def test_conditions_are_checked_at_planning_too(approved: Callable[..., Run]) -> None:
    run = approved("approve_with_conditions", conditions=LIMIT)
    run.do(order(arguments={**ORDER, "amount": "110.00"}))
    run.append(order(arguments={**ORDER, "amount": "500.00"})).refused(409, "condition_unmet")


@pytest.mark.parametrize(
    "bad",
    [
        {"pointer": "/nowhere", "op": "==", "value": 1},
        {"pointer": "amount", "op": "==", "value": 1},
        {"pointer": "/amount/0", "op": "==", "value": "1"},
        {"pointer": "/tags/-", "op": "exists"},
        {"pointer": "/tags/7", "op": "exists"},
        {"pointer": "/~2", "op": "exists"},
        {"pointer": "/amount", "op": "~=", "value": 1},
        {"pointer": "/amount", "op": "==", "value": 1, "why": "?"},
    ],
    ids=str,
)
def test_conditions_that_point_nowhere_are_refused_when_deciding(
    bot: Agent, alice: Person, bad: dict[str, Any]
) -> None:
    run = bot.open(order(arguments={**ORDER, "tags": ["a", "b"]}))
    wait = run.pause(approval(effect="k1"))
    alice.decide(wait, "approve_with_conditions", conditions=[bad]).refused(422, "invalid")
    assert run.outcome == "wait"


@pytest.mark.parametrize(
    ("op", "value", "holds"),
    [
        ("==", "ACME", True),
        ("==", "acme", False),
        ("!=", "ACME", False),
        ("in", ["ACME", "Other"], True),
        ("not_in", ["ACME"], False),
        ("exists", True, True),
        ("<", "ZZZ", False),  # order compares numbers and decimal strings; other types never hold
        (">", 1, False),
    ],
)
def test_the_operators_of_conditions(bot: Agent, alice: Person, op: str, value: Any, holds: bool) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1"))
    conditions = [{"pointer": "/supplier", "op": op, "value": value}]
    alice.decide(wait, "approve_with_conditions", conditions=conditions).ok(201)
    if holds:
        assert run.outcome == "continue"
        run.resume()
        assert granted(run)
    else:  # row 13: the condition does not hold now
        assert (run.outcome, run.rehydrate().ok()["lease"]) == ("review", None)
        assert "condition_unmet" in run.codes


def test_conditions_are_kept_with_the_decision(approved: Callable[..., Run]) -> None:
    run = approved("approve_with_conditions", conditions=LIMIT)
    assert run.wait("legal-approval")["decision"]["conditions"] == LIMIT
    assert run.look()["metadata"]["decisions"][0]["conditions"] == LIMIT


def test_an_approval_expires(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(order())
    until = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    alice.approve(run.pause(approval(effect="k1")), expires_at=until)
    run.resume(lease_seconds=600)
    clock.advance(seconds=101)
    run.start("k1", arguments=ORDER).refused(409, "approval_expired")
    assert run.state("k1") == "planned"


def test_an_approval_that_was_used_in_time_does_not_expire(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(order())
    until = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    alice.approve(run.pause(approval(effect="k1")), expires_at=until)
    run.resume()
    assert granted(run)
    run.do(executed("k1"))
    clock.advance(seconds=120)
    assert run.outcome == "continue"


def test_a_second_ask_of_the_same_wait_needs_its_own_answer(bot: Agent, alice: Person) -> None:
    """Two asks of one name in one run: each covers its own effect only."""
    run = bot.open(order(), order("k2", resource="po-2"))
    run.do(paused(approval("a1", effect="k1"), approval("a2", effect="k2")))
    alice.approve(run.wait("a1"))
    alice.reject(run.wait("a2"))
    assert run.outcome == "terminate"
    assert run.state("k2") == "withdrawn"


def test_an_undeclared_kind_is_let_by_any_approval_that_names_it(bot: Agent, alice: Person) -> None:
    thing = effect("t", "new.thing", impact="irreversible")
    run = bot.open(thing)
    alice.approve(run.pause(approval("o", name="other-approval", effect="t")))
    run.resume()
    assert run.start("t", arguments=thing["arguments"]).ok()["effects"][0]["granted"] is True


def test_an_approval_that_names_no_effect_lets_none(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval()))
    run.resume()
    run.start("k1", arguments=ORDER).refused(409, "approval_required")


def test_an_approve_with_other_arguments_is_no_approve(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1"))
    alice.decide(wait, "approve", arguments={**ORDER, "amount": "1.00"}).refused(422, "invalid")
    alice.decide(wait, "approve", conditions=LIMIT).refused(422, "invalid")
    assert (run.outcome, run.effect("k1")["arguments"]) == ("wait", ORDER)


def test_a_digest_says_what_will_run_as_well(bot: Agent, alice: Person) -> None:
    digest = "sha256:" + hashlib.sha256(rfc8785.dumps(ORDER)).hexdigest()
    run = bot.open(order(arguments=None, arguments_digest=digest))
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.start("k1", arguments_digest="sha256:" + "0" * 64).refused(409, "approval_mismatch")
    other = bot.open(order(arguments=None, arguments_digest=digest))
    alice.approve(other.pause(approval(effect="k1")))
    other.resume()
    assert other.start("k1", arguments=ORDER).ok()["effects"][0]["granted"] is True


def test_a_batch_cannot_smuggle_another_effect_past_the_gate(approved: Callable[..., Run]) -> None:
    run = approved()
    more = order("k2", resource="po-2")
    run.append({"type": "effect.started", "key": "k1", "arguments": ORDER}, {**more, "start": True}).refused(
        409, "approval_required"
    )
    assert {e["state"] for e in run.look()["effects"]} == {"planned"}


def test_the_amount_is_part_of_what_was_approved(bot: Agent, alice: Person) -> None:
    run = bot.open(order(amount={"value": "100.00", "currency": "EUR"}))
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.append(order(amount={"value": "900.00", "currency": "EUR"})).refused(422, "effect_key_reused")
    assert run.effect("k1")["state"] == "planned"
