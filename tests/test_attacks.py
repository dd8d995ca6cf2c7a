# ruff: noqa: F811 - fixtures are imported by name
"""What an attacker, a race or a lost answer must not achieve: each test is a way in that was found, and is shut."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from rehydrate import callers, engine, signals
from rehydrate.core import decide, schemas
from rehydrate.models import Run as RunRow
from rehydrate.models import Signal

from .contract.conftest import (  # noqa: F401 - the cast, as fixtures
    alice,
    bob,
    bot,
    carol,
    dave,
    erin,
    grace,
    transport,
    victor,
    world,
)
from .contract.driver import (
    ORDER,
    Agent,
    Person,
    Run,
    World,
    approval,
    at_once,
    callback,
    checkpoint,
    done,
    effect,
    ev,
    executed,
    external_ref,
    hook_path,
    order,
    paused,
    rows_with,
    started,
    timer,
    unknown,
)
from .contract.driver import signal as awaits

pytestmark = pytest.mark.django_db

LIMIT = [{"pointer": "/amount", "op": "<=", "value": "50.00"}]
IBAN = "DE89370400440532013000"

SECRETIVE = """
[group.payers]
members = ["alice"]
roles = ["reviewer", "operator"]

[flow.payout]
required = []
on_reject = "review"
secret = ["/ask/effect/arguments/iban", "/payload/iban"]

[flow.payout.wait.legal-approval]
groups = ["legal", "payers"]

[flow.payout.wait.four-eyes]
groups = ["legal", "payers"]
quorum = 2

[flow.payout.effect."bank.pay"]
title = "Pay {iban}"
impact = "money"
needs_approval = "legal-approval"
"""

GATES = """
[flow.two-gates]
required = []
on_reject = "compensate"

[flow.two-gates.wait.legal-approval]
groups = ["legal"]

[flow.two-gates.wait.lead-approval]
groups = ["leads"]

[flow.two-gates.effect."bank.pay"]
impact = "money"
needs_approval = "legal-approval"
"""


def e_failed(key: str) -> Any:
    return ev("effect.failed", key=key, error={"code": "x", "message": "no"})


def pay(key: str = "p", **over: Any) -> Any:
    args = {"iban": IBAN, "amount": "100.00"}
    return ev(
        "effect.planned", **{"key": key, "system": "bank", "action": "pay", "resource": "r", "arguments": args, **over}
    )


def ends_well(run: Run, world: World) -> None:
    """The chain and the projections of the run are as its events say."""
    assert "wrong" not in world.command("verify_ledger", "--run", run.id).lower()


# -- a recall withdraws what is open, not what was answered


def test_a_recall_does_not_forget_a_no(bot: Agent, alice: Person) -> None:
    run = bot.open(*done(effect("r", "erp.reserve", impact="low")), order())
    alice.reject(run.pause(approval(effect="k1")))
    assert run.status == "compensating"
    got = bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "I know better"})
    assert got.status == 409 or got.json["verdict"]["outcome"] == "compensate"
    assert "undo_pending" in run.codes


def test_a_recall_does_not_forget_a_no_that_a_person_reviews(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("reviewed", on_reject="review"))
    alice.reject(run.pause(approval(effect="k1")))
    bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "I know better"}).refused(409, "not_resumable")
    assert (run.outcome, run.codes) == ("review", ["rejected"])


def test_a_recall_of_the_rest_does_not_forget_a_no_among_them(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("reviewed", on_reject="review"))
    run.do(paused(approval(effect="k1"), approval("other", name="other-approval")))
    alice.reject(run.wait("legal-approval"))
    bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "I know better"}).refused(409, "not_resumable")
    assert run.outcome in ("wait", "review")


def test_a_recall_does_not_forget_a_time_out(bot: Agent, clock: Any) -> None:
    run = bot.open()
    run.pause(approval(due_in=60))
    clock.advance(seconds=61)
    bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "Nobody came"}).refused(409, "not_resumable")
    assert run.codes == ["timeout_undetermined"]


# -- a yes is for what was seen


def test_an_edit_of_one_reviewer_is_not_approved_by_another_who_saw_the_old_arguments(
    bot: Agent, alice: Person, grace: Person, world: World
) -> None:
    world.apply(GATES)
    plan = pay(approval="lead-approval")
    run = bot.open(plan, flow="two-gates")
    run.do(
        paused(
            approval(effect="p"),
            approval("lead", name="lead-approval", effect="p"),
        )
    )
    legal = run.wait("legal-approval")
    edited = {**plan["arguments"], "amount": "9000.00"}
    grace.decide(run.wait("lead"), "edit", arguments=edited).ok(201)
    alice.decide(legal, "approve").refused(409, "stale_decision")
    again = run.wait("legal-approval")
    assert again["version"] > legal["version"]
    assert again["ask"]["effect"]["arguments"] == edited
    alice.approve(again)
    run.resume()
    run.start("p", arguments=plan["arguments"]).refused(409, "approval_mismatch")


def test_what_breaks_the_conditions_does_not_start_by_its_digest(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    digest = run.effect("k1")["arguments_digest"]
    alice.decide(run.pause(approval(effect="k1")), "approve_with_conditions", conditions=LIMIT).ok(201)
    dave = run.agent.world.person("dave")
    dave.clear(run, "condition_unmet").fine()
    run.resume()
    run.do(order(arguments={**ORDER, "amount": "50.00"}))
    run.start("k1", arguments_digest=digest).refused(409, "condition_unmet")
    assert run.state("k1") == "planned"


def test_an_effect_under_way_is_not_edited(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(started("k1", arguments=ORDER))
    run.do(ev("wait.opened", wait=approval("again", effect="k1")))
    edit = alice.decide(run.wait("again"), "edit", arguments={**ORDER, "amount": "1.00"})
    edit.refused(409, "effect_unknown", "effect_already_executed")
    assert run.effect("k1")["arguments"] == ORDER


def test_what_is_done_is_not_edited(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(started("k1", arguments=ORDER), executed("k1"))
    wait = run.pause(approval("again", effect="k1"))
    alice.decide(wait, "edit", arguments={**ORDER, "amount": "1.00"}).refused(409, "effect_already_executed")
    assert run.effect("k1")["arguments"] == ORDER


def test_an_edit_does_not_make_a_twin(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(started("k1", arguments=ORDER), executed("k1"))
    run.do(order("k2", arguments={**ORDER, "amount": "90.00"}))
    wait = run.pause(approval("second", effect="k2"))
    alice.decide(wait, "edit", arguments=ORDER).refused(409, "effect_duplicate")
    assert run.effect("k2")["arguments"]["amount"] == "90.00"


@pytest.mark.parametrize("how", ["plan", "start"])
def test_conditions_do_not_make_a_twin(bot: Agent, alice: Person, how: str) -> None:
    run = bot.open(order(arguments={**ORDER, "amount": "40.00"}))
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(started("k1", arguments={**ORDER, "amount": "40.00"}), executed("k1"))
    run.do(order("k2", arguments={**ORDER, "amount": "30.00"}))
    wait = run.pause(approval("second", effect="k2"))
    alice.decide(wait, "approve_with_conditions", conditions=LIMIT).ok(201)
    run.resume()
    twin = {**ORDER, "amount": "40.00"}
    act = order("k2", arguments=twin) if how == "plan" else started("k2", arguments=twin)
    run.append(act).refused(409, "effect_duplicate")
    assert run.state("k2") == "planned"


def test_a_repeat_does_not_start_while_its_twin_is_in_the_air(bot: Agent) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(mail, {**mail, "key": "m2", "repeat": True})
    run.do(started("m"))
    run.start("m2").refused(409, "effect_duplicate")
    run.do(unknown("m"))
    run.start("m2").refused(409, "effect_duplicate")
    assert run.state("m2") == "planned"


def test_a_later_no_to_an_effect_that_failed_once_counts(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("goes-on", on_reject="continue"))
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(started("k1", arguments=ORDER), e_failed("k1"))
    alice.reject(run.pause(approval("once-more", name="other-approval", effect="k1")))
    run.resume()
    run.start("k1", arguments=ORDER).refused(409, "approval_rejected")


def test_a_withdrawn_effect_does_not_come_back_as_failed(bot: Agent, alice: Person, bob: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("goes-on", on_reject="continue"))
    run.do(paused(approval("a", effect="k1"), approval("b", effect="k1")))
    alice.reject(run.wait("a"))
    bob.approve(run.wait("b"))
    run.resume()
    run.append(e_failed("k1"))
    run.start("k1", arguments=ORDER).refused(409, "approval_rejected")


def test_other_arguments_reported_as_done_are_not_what_was_approved(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval(effect="k1")))
    run.resume()
    run.do(executed("k1", "x1", arguments={**ORDER, "amount": "9999.00"}))
    assert run.state("k1") == "executed"
    assert (run.outcome, run.codes[0]) == ("review", "executed_despite_rejection")


def test_what_ran_unstarted_under_an_expired_approval_is_an_alarm(bot: Agent, alice: Person, clock: Any) -> None:
    run = bot.open(order())
    until = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    alice.approve(run.pause(approval(effect="k1")), expires_at=until)
    run.resume(lease_seconds=600)
    clock.advance(seconds=101)
    run.do(executed("k1"))
    assert "executed_despite_rejection" in run.codes


def test_an_unknown_effect_is_not_repeated_with_other_arguments(bot: Agent, alice: Person) -> None:
    charge = effect("c", "psp.charge", arguments={"amount": "40.00"}, approval="other-approval")
    run = bot.open(charge)
    wait = run.pause(approval("other", name="other-approval", effect="c"))
    alice.decide(wait, "approve_with_conditions", conditions=LIMIT).ok(201)
    run.resume()
    run.do(started("c", arguments={"amount": "40.00"}), unknown("c"))
    run.start("c", arguments={"amount": "45.00"}).refused(409, "approval_mismatch", "effect_unknown")
    run.epoch = run.look()["lease"]["epoch"] if run.look()["lease"] else run.epoch
    assert run.effect("c")["arguments"] == {"amount": "40.00"}


def test_equal_means_the_same_text_for_what_only_looks_like_a_number(bot: Agent, alice: Person) -> None:
    account = {**ORDER, "account": "0012345"}
    run = bot.open(order(arguments=account))
    condition = {"pointer": "/account", "op": "==", "value": "0012345"}
    alice.decide(run.pause(approval(effect="k1")), "approve_with_conditions", conditions=[condition]).ok(201)
    run.resume()
    run.start("k1", arguments={**account, "account": "12345"}).refused(409, "condition_unmet")


def test_a_condition_names_a_field_and_not_everything(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1"))
    condition = {"pointer": "", "op": "exists"}
    alice.decide(wait, "approve_with_conditions", conditions=[condition]).refused(422, "invalid")


# -- votes


def test_the_shortest_life_of_all_votes_counts(bot: Agent, alice: Person, bob: Person, clock: Any) -> None:
    run = bot.open(effect("g", "bank.pay", approval="two-of-legal"))
    wait = run.pause(approval("two", name="two-of-legal", effect="g"))
    until = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    alice.approve(wait, expires_at=until)
    bob.approve(wait)
    run.resume(lease_seconds=600)
    clock.advance(seconds=101)
    run.start("g", arguments={"of": "g"}).refused(409, "approval_expired")


def test_a_vote_of_somebody_who_may_not_decide_any_more_does_not_count(
    bot: Agent, alice: Person, bob: Person, world: World
) -> None:
    run = bot.open(effect("g", "bank.pay", approval="two-of-legal"))
    alice.approve(run.pause(approval("two", name="two-of-legal", effect="g")))
    world.apply('[group.legal]\nmembers = ["bob", "carol"]\nroles = ["reviewer"]\n')
    bob.approve(run.wait("two"))
    assert run.wait("two")["status"] == "open"
    assert run.outcome == "wait"


# -- what a clear settles, and what it cannot settle yet


def test_a_no_that_comes_after_a_clear_is_not_cleared(bot: Agent, alice: Person, dave: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("reviewed", on_reject="review"))
    wait = run.pause(approval(effect="k1"))
    dave.clear(run, "rejected")
    alice.reject(wait)
    assert (run.outcome, run.codes) == ("review", ["rejected"])


def test_a_time_out_that_comes_after_a_clear_is_not_cleared(bot: Agent, dave: Person, clock: Any) -> None:
    run = bot.open()
    run.pause(approval(due_in=60))
    dave.clear(run, "timeout_undetermined")
    clock.advance(seconds=61)
    assert (run.outcome, run.codes) == ("review", ["timeout_undetermined"])


# -- the policy that counts


def test_the_gate_that_is_there_at_the_pause_counts_for_what_was_planned_before(bot: Agent, world: World) -> None:
    world.apply('[flow.tightened]\nrequired = []\n\n[flow.tightened.effect."bank.pay"]\nimpact = "money"\n')
    run = bot.open(pay(), flow="tightened")
    world.apply(
        "[flow.tightened]\nrequired = []\n\n"
        '[flow.tightened.wait.legal-approval]\ngroups = ["legal"]\n\n'
        '[flow.tightened.effect."bank.pay"]\nimpact = "money"\nneeds_approval = "legal-approval"\n'
    )
    run.pause(timer(due_in=1))
    run.agent.world.person("dave").takeover(run).fine()
    run.agent.world.person("dave").handback(run).fine()
    run.resume()
    run.start("p", arguments=pay()["arguments"]).refused(409, "approval_required")


def test_of_an_any_pause_the_first_answer_alone_counts_not_an_earlier_deadline(bot: Agent, clock: Any) -> None:
    run = bot.open(*done(effect("r", "erp.reserve", impact="low")))
    run.do(paused(approval(due_in=60, on_timeout="reject"), awaits("documents"), when="any"))
    clock.advance(seconds=61)
    assert run.outcome == "wait"
    bot.signal("s1", "documents", run=run.id).ok(202)
    assert (run.outcome, run.codes) == ("continue", ["clear"])


# -- receipts are never lost


def test_a_receipt_is_kept_though_its_own_plan_is_in_the_refused_batch(bot: Agent, clock: Any) -> None:
    run = bot.open()
    clock.advance(seconds=61)
    doc = run.append(*done(effect("m", "mail.send"), "x1")).refused(409, "lease_lost")
    assert [kept["key"] for kept in doc["recorded"]] == ["m"]
    assert run.effect("m")["receipt"]["id"] == "x1"


def test_the_receipt_of_the_first_attempt_counts_after_the_second_began(bot: Agent, dave: Person) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(mail, started("m"))
    first = run.epoch
    run.do(unknown("m"))
    dave.reconcile(run, "m", "not_executed").fine()
    run.resume()
    run.do(started("m"))
    run.append(executed("m", "x1"), epoch=first).ok()
    run.do(executed("m", "x2"))
    found = run.effect("m")
    assert (found["state"], found["receipt"]["id"], found["repeated"]) == ("executed", "x1", 1)


def test_the_failure_of_the_first_attempt_does_not_end_the_second(bot: Agent, dave: Person) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(mail, started("m"))
    first = run.epoch
    run.do(unknown("m"))
    dave.reconcile(run, "m", "not_executed").fine()
    run.resume()
    run.do(started("m"))
    run.append(e_failed("m"), epoch=first).ok()
    assert run.state("m") == "started"


def test_a_conflict_is_settled_by_a_person_only(bot: Agent, dave: Person) -> None:
    send = effect("s", "esign.send")
    run = bot.open(send, started("s", arguments=send["arguments"]))
    epoch = run.epoch
    run.do(unknown("s"))
    dave.reconcile(run, "s", "not_executed").fine()
    run.append(executed("s", "x1"), epoch=epoch).ok()
    assert run.codes[0] == "receipt_conflict"
    run.append(executed("s", "x1"), epoch=epoch)  # the answer was lost: sent again
    run.append(e_failed("s"), epoch=epoch)
    run.append(ev("effect.not_executed", key="s", evidence={}), epoch=epoch)
    run.start("s", arguments=send["arguments"])
    assert (run.state("s"), run.codes[0]) == ("unknown", "receipt_conflict")
    dave.reconcile(run, "s", "executed", receipt={"id": "x1"}).fine()
    assert run.state("s") == "executed"


def test_a_conflicting_retry_safe_effect_does_not_run_again(bot: Agent, dave: Person) -> None:
    charge = effect("c", "psp.charge")
    run = bot.open(charge, started("c", arguments=charge["arguments"]), unknown("c"))
    dave.reconcile(run, "c", "not_executed").fine()
    run.do(executed("c", "x1"))
    assert run.codes[0] == "receipt_conflict"
    run.start("c", arguments=charge["arguments"]).refused(409, "effect_unknown")


def test_the_same_act_reported_under_another_key_is_an_alarm(bot: Agent) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(*done(mail, "x1"))
    run.do({**mail, **executed("m2", "x2")})
    assert run.state("m2") == "executed"
    assert run.effect("m")["repeated"] == 1
    assert len(run.events("effect.repeated")) == 1


def test_a_receipt_with_a_wrong_digest_is_kept(bot: Agent) -> None:
    run = bot.open()
    got = run.append(
        {
            **executed("m", "x1"),
            "system": "mail",
            "action": "send",
            "arguments": {"a": 1},
            "arguments_digest": "sha256:" + "0" * 64,
        }
    )
    assert "m" in str(got.json.get("recorded") or got.json.get("effects"))
    assert run.effect("m")["receipt"]["id"] == "x1"


# -- a signal satisfies one wait at most


def _matched(signal_id: str) -> str:
    return str(Signal.objects.get(pk=signal_id).state)


@pytest.mark.django_db(transaction=True)
def test_a_signal_that_two_people_assign_at_once_answers_one_wait(bot: Agent, dave: Person, world: World) -> None:
    runs = [bot.open(), bot.open()]
    waits = [run.pause(awaits("documents", correlation="c1")) for run in runs]
    signal_id = bot.signal("s1", "documents", correlation="c1").refused(409, "ambiguous_signal")["signal_id"]
    answers = at_once(
        *[lambda wait=wait: dave.post(f"/signals/{signal_id}/assign", {"wait": wait["id"]}) for wait in waits]
    )
    assert sorted(a.status for a in answers) in ([200, 409], [202, 409])
    assert sorted(run.outcome for run in runs) == ["continue", "wait"]


def test_a_signal_matched_by_a_wait_that_opened_meanwhile_is_not_kept_for_another(
    bot: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bot.open()
    real = signals.candidates

    def slow(signal: Signal) -> Any:
        found = real(signal)
        monkeypatch.setattr(signals, "candidates", real)
        run.pause(awaits("documents", correlation="c1"))  # opens, and takes what has come
        return found

    monkeypatch.setattr(signals, "candidates", slow)
    told = bot.signal("s1", "documents", correlation="c1").ok(202)
    assert run.outcome == "continue"
    assert (told["state"], _matched(told["signal_id"])) == ("matched", "matched")
    other = bot.open()
    other.pause(awaits("documents", correlation="c1"))
    assert other.outcome == "wait"


def test_a_signal_that_came_before_is_not_lost_when_all_effects_have_to_be_looked_at(bot: Agent) -> None:
    run = bot.open(*done(effect("r", "erp.reserve", impact="low")))
    bot.signal("s1", "refunded", run=run.id).ok(202)
    run.do(ev("cancelled", reason="The customer left"))
    run.do(paused(awaits("refunded")))
    assert run.wait("refunded")["status"] == "satisfied"


def test_a_signal_that_came_before_two_waits_that_it_fits_is_kept_for_a_person(bot: Agent) -> None:
    run = bot.open()
    told = bot.signal("s1", "documents", run=run.id).ok(202)
    run.do(paused(awaits("a", name="documents"), awaits("b", name="documents")))
    assert run.outcome == "wait"
    assert _matched(told["signal_id"]) == "ambiguous"


def test_what_a_signal_brings_is_bounded(bot: Agent) -> None:
    run = bot.open()
    bot.signal("s1", "documents", run=run.id, payload={"text": "x" * 20_000}).refused(413, "too_large")


# -- secrets


def test_events_do_not_show_the_address_of_a_callback(bot: Agent, victor: Person) -> None:
    run = bot.open()
    run.do(ev("wait.opened", wait=callback("early")))
    run.do(paused(callback("supplier")))
    tokens = [hook_path(run.wait(key)["callback_url"]).rsplit("/", 1)[1] for key in ("early", "supplier")]
    for who in (victor, bot):
        for path in (f"/runs/{run.id}/events", f"/runs/{run.id}/evidence"):
            shown = who.get(path).ok()
            events = json.dumps(shown.get("events") or shown.get("results"))
            assert not [token for token in tokens if token in events]
    assert rows_with("rehydrate_ledgerevent", tokens[0]) == 0


def test_a_refusal_does_not_show_what_is_masked(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(pay(), flow="payout")
    wait = run.pause(approval(effect="p"))
    assert IBAN not in bob.get(f"/waits/{wait['id']}").raw.decode()
    stale = bob.decide(wait, "approve", version=wait["version"] + 1)
    stale.refused(409, "stale_decision")
    assert IBAN not in stale.raw.decode()
    bob.approve(wait)
    closed = bob.decide(wait, "approve")
    closed.refused(409, "wait_closed")
    assert IBAN not in closed.raw.decode()


def test_kept_answers_are_encrypted_at_rest(bot: Agent, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(checkpoint("a", state={"memo": "very-private"}), pay(), flow="payout", at=None)
    run.release().ok()
    first = bot.post(f"/runs/{run.id}/rehydrate", {"holder": "bot/w1", "agent": bot.card()}, idem="once")
    assert first.ok()["checkpoint"]["state"] == {"memo": "very-private"}
    with connection.cursor() as cursor:
        cursor.execute("SELECT body FROM rehydrate_idempotencyrecord")
        kept = b"".join(bytes(row[0]) for row in cursor.fetchall())
    assert kept
    assert b"very-private" not in kept
    assert IBAN.encode() not in kept
    again = bot.post(f"/runs/{run.id}/rehydrate", {"holder": "bot/w1", "agent": bot.card()}, idem="once")
    assert again.json == first.json


def _nowhere_in_clear(text: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'rehydrate\\_%'")
        tables = [row[0] for row in cursor.fetchall()]
    return [table for table in tables if rows_with(table, text)]


def test_a_secret_is_nowhere_in_clear(bot: Agent, alice: Person, bob: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(pay(), flow="payout", external_id="secretive")
    wait = run.pause(approval(effect="p"))
    condition = {"pointer": "/iban", "op": "==", "value": IBAN}
    answer = alice.decide(wait, "approve_with_conditions", conditions=[condition])
    if answer.status == 201:
        run.resume()
        run.start("p", arguments={**pay()["arguments"], "iban": "DE00000000000000000000"})
    assert _nowhere_in_clear(IBAN) == []
    assert IBAN not in bob.get(f"/runs/{run.id}").raw.decode()
    assert IBAN not in bob.get("/waits", status="all").raw.decode()


def test_what_a_signal_brings_is_as_secret_as_the_flow_says(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(flow="payout")
    bot.signal("s1", "documents", run=run.id, payload={"iban": IBAN}).ok(202)
    assert _nowhere_in_clear(IBAN) == []
    assert IBAN not in bob.get("/signals").raw.decode()
    run.pause(awaits("documents"))
    assert run.wait("documents")["signal"]["payload"] == {"iban": IBAN}
    assert _nowhere_in_clear(IBAN) == []


def test_a_secret_of_a_checkpoint_or_a_result_is_nowhere_in_clear(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE.replace('"/payload/iban"', '"/data/iban", "/result/data/iban"'))
    run = bot.open(checkpoint("a", data={"iban": IBAN}), flow="payout", at=None)
    assert _nowhere_in_clear(IBAN) == []
    assert run.look()["checkpoint"]["data"] == {"iban": IBAN}
    for path in (f"/runs/{run.id}", "/runs"):
        assert IBAN not in bob.get(path).raw.decode()
    run.do(ev("completed", result={"ref": "r", "data": {"iban": IBAN}}))
    assert _nowhere_in_clear(IBAN) == []
    assert run.look()["result"]["data"] == {"iban": IBAN}


def test_a_hand_back_keeps_secrets_and_takes_no_mask_for_a_value(bot: Agent, alice: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(pay(), flow="payout")
    run.pause(approval(effect="p"))
    alice.takeover(run).fine()
    shown = alice.get(f"/waits/{run.wait('legal-approval')['id']}").ok()
    arguments = shown["ask"]["effect"]["arguments"]
    assert arguments["iban"] != IBAN
    answer = {"wait": shown["id"], "choice": "edit", "arguments": {**arguments, "amount": "50.00"}}
    alice.handback(run, answers=[answer]).fine()
    assert run.effect("p")["arguments"] == {"iban": IBAN, "amount": "50.00"}
    assert _nowhere_in_clear(IBAN) == []


def test_a_mask_is_never_taken_for_a_value(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(pay(arguments={"amount": "100.00"}), flow="payout")
    wait = run.pause(approval(effect="p"))
    bob.decide(wait, "edit", arguments={"amount": "100.00", "iban": "••••••"}).refused(422, "invalid")


def test_what_does_not_fit_the_schema_is_not_told_where_it_is_masked(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE)
    run = bot.open(pay(), flow="payout")
    schema = {"properties": {"iban": {"pattern": "^X"}}}
    wait = run.pause(approval(effect="p", ask={"schema": schema}))
    shown = bob.get(f"/waits/{wait['id']}").ok()["ask"]["effect"]["arguments"]
    refused = bob.decide(wait, "edit", arguments={**shown, "amount": "1.00"})
    refused.refused(422, "invalid")
    assert IBAN not in refused.raw.decode()


def test_whole_arguments_may_be_secret(bot: Agent, bob: Person, world: World) -> None:
    world.apply(SECRETIVE.replace('"/ask/effect/arguments/iban"', '"/ask/effect/arguments"').replace("Pay {iban}", ""))
    run = bot.open(pay(), flow="payout")
    run.pause(approval(effect="p"))
    assert _nowhere_in_clear(IBAN) == []
    assert IBAN not in bob.get(f"/runs/{run.id}").raw.decode()
    assert run.effect("p")["arguments"]["iban"] == IBAN


def test_lists_cover_what_the_newest_policy_calls_secret(bot: Agent, bob: Person, world: World) -> None:
    world.apply(
        SECRETIVE.replace('secret = ["/ask/effect/arguments/iban", "/payload/iban"]\n', "").replace("{iban}", "")
    )
    run = bot.open(pay(), flow="payout")
    run.pause(approval(effect="p"))
    world.apply(SECRETIVE)
    assert IBAN not in bob.get(f"/runs/{run.id}").raw.decode()
    assert IBAN not in bob.get("/waits").raw.decode()


# -- who may


def test_the_requester_is_known_however_the_name_is_spelled(bot: Agent, carol: Person) -> None:
    run = bot.open(order(), requested_by="Carol ")
    carol.decide(run.pause(approval(effect="k1"))).refused(403, "self_approval")


def test_who_owns_the_key_that_asks_does_not_answer(bot: Agent, alice: Person, bob: Person, world: World) -> None:
    run = bot.open(order())
    run.release().ok()
    hers = world.agent("hers", owner="alice")
    run.resume(by=hers)
    hers.post(f"/runs/{run.id}/events", {"epoch": run.epoch, "events": [paused(approval(effect="k1"))]}).ok()
    wait = run.wait("legal-approval")
    alice.decide(wait).refused(403, "self_approval")
    assert wait["id"] not in [w["id"] for w in alice.get("/waits", mine=1).ok()["results"]]
    bob.approve(wait)


def test_a_hand_back_answers_only_what_the_takeover_closed(bot: Agent, dave: Person, world: World) -> None:
    run = bot.open(order())
    old = run.pause(approval("old", effect="k1"))
    bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "New input"}).ok()
    dave.takeover(run).fine()
    dave.handback(run, answers=[{"wait": old["id"], "choice": "approve"}]).refused(422, "invalid")


def test_two_keys_of_one_name_do_not_see_each_others_signals(bot: Agent, world: World) -> None:
    wide = world.agent("twin")
    narrow = Agent(world, "twin", world.issue_key("agent", "--workspace", "default", "--name", "twin", "--flow", "x"))
    run = wide.open()
    wide.signal("s1", "documents", run=run.id, payload={"secret": "of contract-approval"}).ok(202)
    assert narrow.get("/signals").ok()["results"] == []


# -- bad input


def _cursor(*parts: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


@pytest.mark.parametrize("place", ["abc", "9" * 40, "-1e5", "\ud800", "١"], ids=ascii)
def test_a_made_up_cursor_is_refused(bot: Agent, place: str) -> None:
    run = bot.open()
    for path, parts in ((f"/runs/{run.id}/events", [place]), ("/runs", [place, place]), ("/waits", [place, place])):
        assert bot.get(path, cursor=_cursor(*parts)).status in (200, 422)


@pytest.mark.parametrize("age", ["9" * 30 + "w", "²", "9999999999", "1d" * 200])
def test_an_age_beyond_all_time_is_no_fault(bot: Agent, age: str) -> None:
    assert bot.get("/runs", older_than=age).status in (200, 422)


@pytest.mark.parametrize("when", ["9999-12-31T23:59:59-12:00", "9999-12-31T23:59:59Z", "9000-01-01T00:00:00+14:00"])
def test_an_approval_may_hold_for_ever_and_nothing_breaks(bot: Agent, alice: Person, world: World, when: str) -> None:
    run = bot.open(order())
    answer = alice.decide(run.pause(approval(effect="k1")), expires_at=when)
    assert answer.status in (201, 422), answer.raw
    assert run.look()["status"] in ("ready", "waiting")
    if answer.status == 201:
        assert answer.json["expires_at"].endswith("Z")
        assert run.wait("legal-approval")["decision"]["expires_at"].endswith("Z")
        assert run.rehydrate().status == 200


@pytest.mark.parametrize("when", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z"])
def test_a_signal_from_the_end_of_time_breaks_nothing(bot: Agent, when: str) -> None:
    run = bot.open()
    assert bot.signal("s1", "documents", run=run.id, occurred_at=when).status in (202, 422)
    assert bot.get("/signals").status == 200
    run.do(paused(awaits("documents")))
    assert run.rehydrate().status == 200


def test_a_long_name_decides_as_any_other(bot: Agent, alice: Person) -> None:
    User.objects.filter(username="alice").update(first_name="A" * 150, last_name="B" * 150)
    run = bot.open(order())
    alice.approve(run.pause(approval(effect="k1")))


def _bomb(n: int, word: str) -> Any:
    parts = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)}
    return {"$defs": {**parts, f"d{n}": {"type": "string", "minLength": 100}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        _bomb(60, "anyOf"),
        _bomb(60, "allOf"),
        {"properties": {"default": {"$ref": "#/properties/default/x"}, "x": _bomb(3, "anyOf")}},
        {"properties": {"default": {**_bomb(60, "anyOf")["$defs"]["d0"]}}, **_bomb(60, "anyOf")},
        {"properties": {"n": {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "required": ["x"]},
        {"$ref": "#"},
        {"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "properties": {"n": {"$dynamicRef": "#x"}}}}},
    ],
    ids=["anyOf", "allOf", "nowhere", "hidden", "recursion", "self", "dynamic"],
)
def test_a_schema_that_unfolds_without_end_is_refused(bot: Agent, schema: Any) -> None:
    assert schemas.problem(schema) is not None
    run = bot.open(order())
    run.append(paused(approval(effect="k1", ask={"schema": schema}))).refused(422, "invalid")


def test_a_schema_with_common_parts_is_fine() -> None:
    money = {"type": "string", "pattern": "^[0-9]+$"}
    schema = {"$defs": {"m": money}, "properties": {"a": {"$ref": "#/$defs/m"}, "b": {"$ref": "#/$defs/m"}}}
    assert schemas.problem(schema) is None
    assert schemas.errors(schema, {"a": "1", "b": "x"}) != []


def test_a_run_opens_with_as_many_events_as_an_append_takes(bot: Agent) -> None:
    events = [ev("note", text="x")] * 1001
    bot.open_raw(events=events).refused(422, "invalid")


def test_what_people_write_is_bounded(bot: Agent, alice: Person, dave: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1"))
    big = "x" * 20_000
    alice.decide(wait, "respond", response={"text": big}).refused(413, "too_large")
    alice.decide(wait, "approve", seen={"text": big}).refused(413, "too_large")
    dave.clear(run, "human_gate", checkpoint={"ref": "r", "data": big}).refused(413, "too_large")


def test_an_external_ref_that_is_known_counts_once(bot: Agent, world: World) -> None:
    run = bot.open()
    for _ in range(3):
        run.do(external_ref("erp", "order", "4711"))
    assert run.look()["external_refs"] == [{"system": "erp", "type": "order", "id": "4711", "url": None}]
    ends_well(run, world)  # rows and folded events count alike


# -- reading


def test_a_run_is_read_as_of_one_moment(bot: Agent) -> None:
    run = bot.open(order())
    run.pause(approval(effect="k1"))
    with CaptureQueriesContext(connection) as captured:
        assert run.outcome == "wait"
    parts = ("rehydrate_run", "rehydrate_wait", "rehydrate_effect")
    reads = [q["sql"] for q in captured.captured_queries if any(part in q["sql"] for part in parts)]
    assert len(reads) == 1, "two statements may see two versions of one run"


# -- one bad apple


def test_one_broken_run_does_not_hold_up_the_others(bot: Agent, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, fine = bot.open(), bot.open()
    broken.pause(timer(due_in=5))
    fine.pause(timer(due_in=10))
    clock.advance(seconds=11)
    real = decide.apply_overdue

    def fails(draft: Any) -> None:
        if draft.run.id == broken.id:
            raise ValueError("this run cannot be read")
        real(draft)

    monkeypatch.setattr(decide, "apply_overdue", fails)
    engine.tick()
    assert RunRow.objects.get(pk=fine.id).status == "ready"


def test_one_broken_run_does_not_hold_up_the_claims_of_others(bot: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, fine = bot.open(), bot.open()
    broken.release().ok()
    fine.release().ok()
    real = decide.apply_overdue

    def fails(draft: Any) -> None:
        if draft.run.id == broken.id:
            raise ValueError("this run cannot be read")
        real(draft)

    monkeypatch.setattr(decide, "apply_overdue", fails)
    assert bot.claim().ok()["run"]["id"] == fine.id


# -- the end


def test_a_person_does_not_end_a_rejected_run_past_its_sign_off(bot: Agent, alice: Person, dave: Person) -> None:
    transfer = effect("p", "bank.pay", approval="other-approval")
    run = bot.open(transfer)
    alice.approve(run.pause(approval("first", name="other-approval", effect="p")))
    run.resume()
    run.do(started("p", arguments=transfer["arguments"]), executed("p"))
    alice.reject(run.pause(approval("second", name="other-approval")))
    dave.terminate(run).refused(409, "open_compensation")
    dave.sign_off(run, "p").fine()
    assert run.status == "terminated"


def test_a_conflict_in_a_run_that_ended_is_seen_and_settled(bot: Agent, dave: Person) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(mail, started("m"))
    epoch = run.epoch
    run.do(unknown("m"))
    dave.reconcile(run, "m", "not_executed").fine()
    dave.terminate(run).fine()
    run.append(executed("m", "x1"), epoch=epoch).ok()
    from rehydrate import selectors

    caller = callers.for_user(User.objects.get(username="dave"))
    assert run.id in [
        i["run"]["id"] for i in selectors.inbox(caller, scope="unknown", filters={}, cursor=None, limit=50)["results"]
    ]
    dave.reconcile(run, "m", "executed", receipt={"id": "x1"}).fine()
    assert (run.state("m"), run.status) == ("executed", "terminated")
