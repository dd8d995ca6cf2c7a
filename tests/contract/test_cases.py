"""The eighteen situations from the field (S01-S18), each as a story told through the API.

Where a step's codes differ from contract.md, the contract's stand (so `effect_duplicate`, not `duplicate_intent`).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from .driver import (
    ORDER,
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    callback,
    checkpoint,
    done,
    effect,
    ev,
    executed,
    external_ref,
    failed,
    hook_path,
    order,
    paused,
    signal,
    started,
    unknown,
)
from .sweep import sweep


def test_s01_a_step_that_asks_again_never_repeats_what_it_did(bot: Agent, alice: Person) -> None:
    """Each answer re-runs the step from its top; the ledger makes the repeats harmless."""
    run = bot.open(*done(effect("k1", "mail.send")), at="s")
    waits: list[str] = []
    for name, choice in (("a1", "respond"), ("a2", "respond"), ("a3", "approve")):
        if waits:
            run.resume()
            again = run.do(effect("k1", "mail.send", start=True))
            assert again["effects"][0]["granted"] is False
            assert (again["effects"][0]["state"], again["effects"][0]["receipt"]["id"]) == ("executed", "x1")
        asked = run.pause(approval(name, ask={"choices": ["approve", "reject", "respond"]}))
        how: dict[str, Any] = {"response": "Send it back"} if choice == "respond" else {}
        alice.decide(asked, choice, **how).ok(201)
        waits.append(asked["id"])
    # the answer to a1 is never applied to a2 or a3
    said = [(d["wait"], d["choice"]) for d in run.decisions()]
    assert said == list(zip(waits, ["respond", "respond", "approve"], strict=True))
    assert len(set(waits)) == 3
    assert [e["key"] for e in run.look()["effects"]] == ["k1"]
    assert len(run.events("effect.executed")) == 1
    assert len(run.events("effect.planned")) == 1
    assert run.outcome == "continue"


def test_s02_a_payment_under_a_fresh_key_is_not_a_second_payment(bot: Agent, dave: Person) -> None:
    run = bot.open(effect("k1", "mail.send", resource="acct", arguments={"to": "x"}))
    twin = effect("k2", "mail.send", resource="acct", arguments={"to": "x"})
    run.do(started("k1"), unknown("k1"))
    blocked = run.append(twin).refused(409, "effect_duplicate")
    assert blocked["effect"]["key"] == "k1"
    assert run.outcome == "review"
    assert "effect_unknown" in run.codes
    dave.reconcile(run, "k1", "executed", receipt={"id": "x1", "status": "done"}).fine()
    assert run.outcome == "continue"
    assert run.append(twin).refused(409, "effect_duplicate")["effect"]["receipt"]["id"] == "x1"
    effects = run.look()["effects"]
    assert [(e["key"], e["state"]) for e in effects] == [("k1", "executed")]
    assert len(run.alarms("effect_duplicate")) == 2, "each blocked intent is in the ledger"


def test_s02_a_second_payment_on_purpose_needs_a_person_who_names_both(bot: Agent, alice: Person) -> None:
    same = {"resource": "acct", "arguments": {"to": "x"}}
    run = bot.open(*done(effect("k1", "psp.charge", **same)))
    run.append(effect("k2", "psp.charge", **same)).refused(409, "effect_duplicate")
    # above low impact "repeat" needs an approval whose ask names it
    twin = effect("k2", "psp.charge", repeat=True, approval="other-approval", **same)
    plan = run.append(twin)
    if plan.status == 200:
        run.start("k2", arguments=same["arguments"]).refused(409, "approval_required")
    else:
        plan.refused(409, "approval_required", "effect_duplicate")
    ask = {"effect": {"key": "k2", "system": "psp", "action": "charge", **same}, "summary": "Charge again beside k1?"}
    alice.approve(run.pause(approval("again", name="other-approval", ask=ask)))
    run.resume()
    run.do(twin)
    assert run.start("k2", arguments=same["arguments"]).ok()["effects"][0]["granted"] is True


def test_s03_a_wait_that_timed_out_swallows_nothing(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    w1 = run.pause(callback("w1", name="approval.received", due_in=60, on_timeout="continue"))
    clock.advance(seconds=61)
    sweep()
    assert run.resume()["waits"][0]["status"] == "timed_out"
    w2 = run.pause(callback("w2", name="approval.received", due_in=3600))
    first = bot.signal("e1", "approval.received", run=run.id, payload={"ok": True}).ok(202)
    assert (first["state"], first["matched"]) == ("matched", [w2["id"]])
    again = bot.signal("e1", "approval.received", run=run.id, payload={"ok": True}).ok(202)
    assert again["state"] == "duplicate"
    w1 = bot.get(f"/waits/{w1['id']}").ok()
    assert (w1["status"], w1["signal"]) == ("timed_out", None)
    assert run.wait("w2")["status"] == "satisfied"
    assert run.outcome == "continue"
    clock.advance(seconds=7200)
    sweep()
    run.resume()
    assert run.wait("w2")["status"] == "satisfied"
    assert run.rehydrate(holder="another").status == 409, "no third resume"


def test_s04_an_event_before_its_wait_is_kept_for_it(bot: Agent) -> None:
    run = bot.open(*done(effect("k1", "mail.send")))
    early = bot.signal("e1", "job.done", correlation="c1", payload={"job": 7}).ok(202)
    assert (early["state"], early["matched"]) == ("buffered", [])
    got = run.do(paused(callback("w1", name="job.done", correlation="c1")))
    assert got["waits"][0]["status"] == "satisfied"
    assert run.wait("w1")["signal"] is not None
    assert (run.outcome, run.status) == ("continue", "ready")
    assert bot.signal("e1", "job.done", correlation="c1", payload={"job": 7}).ok(202)["state"] == "duplicate"
    before = run.look()["version"]
    lost = bot.signal("e2", "job.done", correlation="c9").ok(202)
    assert (lost["state"], lost["matched"]) == ("buffered", [])
    assert run.look()["version"] == before
    run.resume()
    assert run.rehydrate(holder="another").status == 409
    assert not [w for w in run.look()["waits"] if w["status"] == "timed_out"]


def test_s05_an_approval_covers_the_arguments_that_were_approved(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval("a1", effect="k1")))
    run.resume()
    other = {**ORDER, "amount": "900.00"}
    run.start("k1", arguments=other).refused(409, "approval_mismatch")
    assert run.status == "review", "rule 10's mismatch ends the lease"
    assert run.outcome == "review"
    assert "approval_mismatch" in run.codes
    assert run.state("k1") in ("planned",), "nothing was started"
    assert len(run.alarms("approval_mismatch")) == 1


def test_s05_an_approval_covers_its_own_effect_only(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval("a1", effect="k1")))
    run.resume()
    args = {"to": "y"}
    answer = run.append(effect("k2", "erp.wire", impact="money", approval="legal-approval", arguments=args, start=True))
    if answer.status == 200:  # planned, but never granted by the approval of another effect
        assert answer.json["effects"][0]["granted"] is False
        answer = run.start("k2", arguments=args)
    answer.refused(409, "approval_mismatch", "approval_required")
    assert all(e["state"] == "planned" for e in run.look()["effects"])


def test_s05_what_was_done_against_the_approval_is_never_shown_as_approved(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval("a1", effect="k1")))
    run.resume()
    run.start("k1", arguments={**ORDER, "amount": "900.00"}).refused(409, "approval_mismatch")
    run.append(executed("k1", "x9")).ok()
    assert run.outcome == "review"
    assert {"executed_despite_rejection", "approval_mismatch"} & set(run.codes)


def test_s05_the_control_run_goes_through(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    alice.approve(run.pause(approval("call-id-that-differs", effect="k1")))
    run.resume()
    assert run.start("k1", arguments=dict(reversed(ORDER.items()))).ok()["effects"][0]["granted"] is True
    run.do(executed("k1"))
    assert (run.state("k1"), run.outcome) == ("executed", "continue")


def test_s06_an_expired_approval_cannot_be_approved(bot: Agent, alice: Person, bob: Person, clock: Clock) -> None:
    run = bot.open(order())
    a1 = run.pause(approval("a1", effect="k1", due_in=600, on_timeout="review"))
    clock.advance(seconds=601)  # nobody sweeps
    late = alice.decide(a1).refused(409, "wait_expired")
    assert late["wait"]["status"] == "timed_out"
    assert (run.wait("a1")["status"], run.outcome, run.state("k1")) == ("timed_out", "review", "planned")
    sweep()
    sweep()
    bob.decide(a1).refused(409, "wait_expired")
    assert len(run.events("wait.timed_out")) == 1
    assert run.decisions() == []
    late_tries = [e for e in run.events() if e["actor"]["kind"] == "person" and "wait_expired" in str(e["payload"])]
    assert {e["actor"]["name"] for e in late_tries} == {"alice", "bob"}
    assert run.rehydrate().ok()["lease"] is None


def test_s06_the_deadline_itself_is_too_late_and_just_before_is_not(bot: Agent, alice: Person, clock: Clock) -> None:
    r2, r3 = bot.open(), bot.open()
    due = (datetime.now(UTC) + timedelta(seconds=600)).isoformat()
    a2, a3 = r2.pause(approval(due_at=due)), r3.pause(approval(due_at=due))
    clock.advance(seconds=590)
    alice.decide(a3).ok(201)
    clock.advance(seconds=10)
    alice.decide(a2).refused(409, "wait_expired")


def test_s07_parallel_asks_are_answered_one_by_one(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("p1"), approval("p2"), approval("p3")))
    waits = {key: run.wait(key) for key in ("p1", "p2", "p3")}
    assert len({w["id"] for w in waits.values()}) == 3
    # nothing is ever matched by run alone
    assert alice.post(f"/runs/{run.id}/decisions", {"choice": "approve"}).status in (404, 405)
    assert alice.post("/waits//decisions", {"choice": "approve"}).status in (404, 405)
    alice.approve(waits["p2"])
    alice.reject(waits["p3"])
    assert run.wait("p1")["status"] == "open"
    assert (run.wait("p2")["status"], run.wait("p3")["status"]) == ("satisfied", "rejected")
    assert run.outcome == "wait"
    assert len(run.decisions()) == 2


def test_s07_a_wait_key_in_use_cannot_be_used_for_something_else(bot: Agent) -> None:
    run = bot.open(ev("wait.opened", wait=approval("p2")))
    answer = run.append(ev("wait.opened", wait=approval("p2", ask={"summary": "Something else?"})))
    answer.refused(409 if answer.status == 409 else 422)
    assert len(run.look()["waits"]) == 1


def test_s07_an_event_that_fits_three_waits_is_applied_to_none(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(*(signal(key, name="answered") for key in ("p1", "p2", "p3"))))
    doc = bot.signal("e1", "answered", run=run.id).refused(409, "ambiguous_signal")
    ids = [run.wait(key)["id"] for key in ("p1", "p2", "p3")]
    assert all(wait_id in str(doc) for wait_id in ids), "the three candidates are named"
    assert {run.wait(key)["status"] for key in ("p1", "p2", "p3")} == {"open"}


def test_s08_after_a_restart_the_same_run_is_found(bot: Agent, alice: Person) -> None:
    run = bot.open(checkpoint("s3", ref="s3://cp/c3"), external_id="job-7")
    a1 = run.pause(approval("a1"))
    # a new process knows nothing but the external id
    again = bot.open_raw(external_id="job-7", holder="bot/new", events=[checkpoint("s1")]).ok(200)
    assert (again["run"]["id"], again["run"]["status"], again["lease"]) == (run.id, "waiting", None)
    assert (again["run"]["stage"], again["run"]["checkpoint"]["ref"]) == ("s3", "s3://cp/c3")
    alice.approve(a1)
    envelope = bot.claim(holder="bot/new").ok()
    assert (envelope["run"]["id"], envelope["verdict"]["outcome"]) == (run.id, "continue")
    assert envelope["checkpoint"]["ref"] == "s3://cp/c3"
    assert (envelope["waits"][0]["id"], envelope["waits"][0]["decision"]["choice"]) == (a1["id"], "approve")
    other = {"ref": "s3://in/v2", "digest": "sha256:" + "2" * 64}
    bot.open_raw(external_id="job-7", input=other).refused(409, "run_conflict")
    assert bot.get("/runs", external_id="job-7").ok()["total"] == 1
    assert len(run.decisions()) == 1
    assert run.look()["stage"] == "s3"


def test_s09_an_outage_is_caught_up_with_one_reminder(world: World, bot: Agent, clock: Clock) -> None:
    run = bot.open()
    a1 = run.pause(approval("a1", name="reminding", due_in=86400, on_timeout="escalate"))
    clock.advance(seconds=32 * 60)
    sweep()
    sweep()
    reminders, escalations = run.events("remind"), run.events("escalat")
    assert (len(reminders), len(escalations)) == (1, 1)
    clock.advance(seconds=10)
    sweep()
    assert (len(run.events("remind")), len(run.events("escalat"))) == (1, 1)
    assert run.outcome == "wait"
    assert run.wait("a1")["id"] == a1["id"]
    assert run.decisions() == []


def test_s10_no_agent_and_no_requester_approves(world: World, alice: Person) -> None:
    p1, p2 = world.agent("p1", owner="carol"), world.agent("p2", owner="carol")
    carol, bob = world.person("carol"), world.person("bob")
    run = p1.open(requested_by=None)
    a1 = run.pause(approval("a1"))
    body = {"choice": "approve", "wait_version": a1["version"]}
    p1.post(f"/waits/{a1['id']}/decisions", body).refused(403, "agents_cannot_decide")
    p2.post(f"/waits/{a1['id']}/decisions", body).refused(403, "agents_cannot_decide")
    carol.decide(a1).refused(403, "self_approval")
    assert run.outcome == "wait"
    assert bob.decide(a1).ok(201)["decided_by"] is not None
    assert run.outcome == "continue"
    assert [d["choice"] for d in run.decisions()] == ["approve"]
    denied = [e for e in run.events() if "agents_cannot_decide" in str(e) or "self_approval" in str(e)]
    assert len(denied) == 3
    actor = run.events("wait.decided") or run.events("decision") or run.events("decided")
    assert actor[0]["actor"]["name"] == "bob"


def test_s10_the_name_in_the_body_has_no_authority(bot: Agent, alice: Person) -> None:
    a1 = bot.open().pause(approval("a1"))
    body = {"choice": "approve", "wait_version": a1["version"], "actor": "alice"}
    answer = bot.post(f"/waits/{a1['id']}/decisions", body)
    answer.refused(403 if answer.status == 403 else 422)
    assert alice.get(f"/waits/{a1['id']}").ok()["status"] == "open"


def test_s10_a_gate_that_only_the_requester_could_pass_is_refused(world: World) -> None:
    world.apply(
        """
        [group.solo]
        members = ["carol"]
        [flow.lonely]
        required = ["checkpoint"]
        [flow.lonely.wait.check]
        groups = ["solo"]
        exclude_requester = true
        """
    )
    run = world.agent("p1", owner="carol").open(flow="lonely")
    run.append(paused(approval("check", name="check"))).refused(422, "unsatisfiable_gate")


def test_s11_links_that_scanners_open_decide_nothing(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open()
    run.do(paused(approval("a1"), callback("c1")))
    a1, c1 = run.wait("a1"), run.wait("c1")
    version = run.look()["version"]
    for method in ("HEAD", "GET"):
        for path in (f"/waits/{a1['id']}/decisions", hook_path(c1["callback_url"])):
            for who in (world.nobody, alice):
                assert who.call(method, path).status < 500
    assert (run.outcome, run.look()["version"], run.decisions()) == ("wait", version, [])
    alice.approve(a1)
    alice.decide(a1).refused(409, "wait_closed", "already_voted")
    assert len(run.decisions()) == 1


def test_s11_a_post_without_the_csrf_token_is_refused(bot: Agent, alice: Person) -> None:
    from django.contrib.auth import get_user_model
    from django.test import Client

    a1 = bot.open().pause(approval("a1"))
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(get_user_model().objects.get(username="alice"))
    forged = browser.post(
        f"/api/v1/waits/{a1['id']}/decisions",
        {"choice": "approve", "wait_version": a1["version"]},
        content_type="application/json",
    )
    assert forged.status_code == 403
    assert alice.get(f"/waits/{a1['id']}").ok()["status"] == "open"


def test_s12_long_ids_come_back_digit_by_digit_or_not_at_all(bot: Agent, alice: Person) -> None:
    big = "2512292042121000001"
    run = bot.open()
    as_number = run.append(effect("k0", "mail.send", arguments={"id": int(big)}))
    if as_number.status == 200:
        assert big in as_number.raw.decode()
    else:
        as_number.refused(422, "invalid")
    run.do(*done(effect("k1", "mail.send", resource=big, arguments={"id": big, "total": "0.1"})))
    run.do(external_ref("crm", "case", big))
    seen = run.look(alice)
    assert run.effect("k1")["resource"] == big
    assert run.effect("k1")["arguments"]["id"] == big
    assert seen["metadata"]["external_refs"][0]["id"] == big
    assert any(big in str(e["payload"]) for e in run.events("effect.planned"))
    a1 = run.pause(approval("a1", ask={"choices": ["respond"]}))
    alice.decide(a1, "respond", response={"id": big}).ok(201)
    assert run.wait("a1")["decision"]["response"] == {"id": big}
    run.resume()
    run.do(paused(callback("c1", name="case.updated", correlation=big)))
    assert bot.signal("s1", "case.updated", correlation=big).ok(202)["state"] == "matched"
    assert run.outcome == "continue"


@pytest.mark.parametrize("number", ["1e400", "NaN", "Infinity", "-Infinity"])
def test_s12_amounts_that_are_no_numbers_are_refused(bot: Agent, number: str) -> None:
    run = bot.open()
    for place in ('"arguments":{"amount":%s}', '"amount":{"value":%s,"currency":"EUR"}'):
        event = '{"type":"effect.planned","key":"k1","system":"mail","action":"send",%s}' % (place % number)
        raw = f'{{"epoch":{run.epoch},"events":[{event}]}}'.encode()
        run.append(raw=raw).refused(422, "invalid")
    assert run.look()["effects"] == []


def test_s13_a_newer_build_goes_on_when_a_person_says_so(bot: Agent, alice: Person, dave: Person, world: World) -> None:
    run = bot.open(checkpoint("s1", ref="s3://cp/schema1"))
    a1 = run.pause(approval("a1"))
    v2 = world.agent("bot-v2")
    v2.version = "2"
    alice.approve(a1)
    assert v2.claim().status == 204, "a claim passes over what it does not read"
    assert run.status == "ready", "and changes nothing there"
    refused = run.rehydrate(by=v2).ok()
    assert (refused["lease"], refused["verdict"]["outcome"]) == (None, "review")
    assert "version_changed" in [r["code"] for r in refused["verdict"]["reasons"]]
    assert run.look()["failure_count"] == 0
    migrated = {"ref": "s3://cp/schema2", "digest": "sha256:" + "2" * 64}
    dave.clear(run, "version_changed", stage="s1", checkpoint=migrated, agent_version="2").fine()
    envelope = run.resume(by=v2)
    assert (envelope["verdict"]["outcome"], envelope["checkpoint"]["ref"]) == ("continue", "s3://cp/schema2")
    assert envelope["run"]["id"] == run.id
    assert [d["kind"] for d in run.decisions()] == ["wait", "clear"]


def test_s14_a_poison_run_is_set_aside_and_holds_up_nobody(
    bot: Agent, world: World, dave: Person, clock: Clock
) -> None:
    flow = world.variant("newer", max_failures=5)
    bad = bot.open(flow=flow)
    for n in range(5):
        if n:
            clock.advance(seconds=3600)
            sweep()
            bad.epoch = bot.claim(flow).ok()["lease"]["epoch"]
        bad.do(failed(retry_in=1))
    others = {bot.open(flow=flow, holder=None).id for _ in range(20)}
    clock.advance(seconds=3600)
    sweep()
    assert (bad.outcome, bad.status) == ("review", "review")
    assert "retries_exhausted" in bad.codes
    look = bad.look()
    assert (look["failure_count"], bool(look["escalation"])) == (5, True)
    escalations = [e for e in bad.events() if "escalat" in e["type"] or e["payload"].get("escalated")]
    assert len(escalations) == 1
    served = {bot.claim(flow).ok()["run"]["id"] for _ in range(20)}
    assert served == others
    assert bot.claim(flow).status == 204
    assert bad.rehydrate().ok()["lease"] is None
    dave.retry(bad, tries=3).fine()
    assert bad.outcome == "continue"
    assert bot.claim(flow).ok()["run"]["id"] == bad.id
    assert len(bad.events("failed")) == 5, "the old failures stay in history"
    assert bad.look()["effects"] == []


def test_s15_starting_over_repeats_nothing_and_finds_the_limit(bot: Agent, dave: Person) -> None:
    k1, k2 = effect("k1", "crm.create_case", impact="low"), effect("k2", "mail.send")
    run = bot.open(*done(k1), k2, external_id="job-9")
    for n in range(1, 4):
        run.do(started("k2", attempt=n), ev("effect.failed", key="k2", error={"code": "x", "message": "no"}))
    assert run.look()["failure_count"] == 3
    assert "retries_exhausted" in run.codes
    assert run.outcome == "review"
    assert bot.open_raw(external_id="job-9", events=[k1]).ok(200)["run"]["id"] == run.id
    again = run.append(k1, k2)  # the same process starts over, or another one that took the lease back
    assert [e["state"] for e in again.ok()["effects"]] == ["executed", "failed"]
    assert again.json["effects"][0]["receipt"]["id"] == "x1"
    run.start("k2").refused(409, "retries_exhausted")
    dave.retry(run, effect="k2", tries=1).fine()
    if run.status != "running":
        run.resume()
    assert run.start("k2").ok()["effects"][0]["granted"] is True
    run.do(executed("k2", "x2"))
    assert run.outcome == "continue"
    k2_now = run.effect("k2")
    assert (k2_now["attempt"], k2_now["state"]) == (4, "executed")
    assert (len(run.events("effect.started")), len(run.events("effect.executed"))) == (5, 2)
    grants = [d for d in run.decisions() if d["kind"] == "retry"]
    assert len(grants) == 1
    assert "dave" in str(grants[0]["decided_by"])


@pytest.fixture
def died_between(bot: Agent, alice: Person, clock: Clock) -> Run:
    """A run whose agent died after the outside acted and before the receipt."""
    run = bot.open(order())
    alice.approve(run.pause(approval("a1", effect="k1")))
    run.resume()
    run.start("k1", arguments=ORDER).ok()
    clock.advance(seconds=61)
    return run


def test_s16_a_lost_receipt_is_an_unknown_outcome(died_between: Run, dave: Person) -> None:
    run = died_between
    envelope = run.rehydrate(holder="bot/new").ok()
    assert (envelope["lease"], envelope["verdict"]["outcome"]) == (None, "review")
    assert (run.state("k1"), run.status) == ("unknown", "review")
    run.start("k1", arguments=ORDER).refused(409, "lease_lost")
    dave.reconcile(run, "k1", "executed", receipt={"id": "x1", "status": "done"}).fine()
    assert run.outcome == "continue"
    run.resume(holder="bot/new")
    run.start("k1", arguments=ORDER).refused(409, "effect_already_executed")
    assert (run.effect("k1")["attempt"], run.state("k1")) == (1, "executed")


def test_s16_what_did_not_happen_may_be_tried_once_more(died_between: Run, dave: Person, clock: Clock) -> None:
    run = died_between
    sweep()
    clock.advance(seconds=86400)
    sweep()
    assert run.state("k1") == "unknown", "never turned into failed or executed by a timer"
    dave.reconcile(run, "k1", "not_executed").fine()
    assert run.state("k1") == "planned"
    run.resume()
    # rule 10: the approval that the first start used up covers later attempts of the same effect
    assert run.start("k1", arguments=ORDER).ok()["effects"][0]["granted"] is True
    run.do(executed("k1"))
    assert (run.effect("k1")["attempt"], len(run.events("effect.executed"))) == (2, 1)


def test_s17_501_asks_are_all_found(bot: Agent, alice: Person) -> None:
    soon, rest = [60, 120, 180], [7200 + n for n in range(498)]
    for n, due in enumerate(rest + soon):
        ref = external_ref("erp", "po", f"po-{n % 7}")
        bot.open(ref, paused(approval("a", due_in=due)), holder=None)
    page = alice.get("/waits", status="open", mine=1).ok()
    assert page["total"] == 501
    assert page["next"]
    assert len(page["results"]) <= 200
    dues = [w["due_at"] for w in page["results"]]
    assert dues == sorted(dues), "the soonest deadlines come first"
    # some are decided and some appear while we page on
    seen = [w["id"] for w in page["results"]]
    for wait in page["results"][:5]:
        alice.approve(wait)
    rest_of_list = list(alice.pages("/waits", status="open", mine=1))
    for wait in rest_of_list[-5:]:
        alice.approve(wait)
    new = {bot.open(paused(approval("a", due_in=90000)), holder=None).id for _ in range(5)}
    cursor = page["next"]
    while cursor:
        page = alice.get("/waits", status="open", mine=1, cursor=cursor).ok()
        seen += [w["id"] for w in page["results"]]
        cursor = page["next"]
    stayed = {w["id"] for w in rest_of_list[:-5]}
    assert stayed <= set(seen)
    assert len(seen) == len(set(seen)), "nothing twice"
    assert alice.get("/waits", status="open", mine=1, limit=1).ok()["total"] == 501 - 10 + 5
    assert new
    # filters run before paging
    found = alice.get("/runs", status="waiting", flow="contract-approval", limit=200).ok()
    assert found["total"] == 496
    by_po = [alice.get("/runs", system="erp", resource=f"po-{n}", limit=200).ok() for n in range(7)]
    assert sum(page["total"] for page in by_po) == 501
    assert all(page["total"] == len(page["results"]) for page in by_po)


def test_s18_a_callback_that_never_comes_is_seen(bot: Agent, dave: Person, clock: Clock) -> None:
    run = bot.open(*done(effect("k1", "mail.send")))
    no_deadline = callback("w1")
    del no_deadline["due_in"]
    run.append(paused(no_deadline)).refused(422, "invalid")
    run.pause(callback("w1", due_in=6 * 3600, on_timeout="review"))
    clock.advance(seconds=6 * 3600 + 1)
    sweep()
    assert (run.outcome, run.status) == ("review", "review")
    assert len(run.events("wait.timed_out")) == 1
    clock.advance(seconds=3600)
    late = bot.signal("e1", "w1", run=run.id, payload={"job": "x1"}).ok(202)
    assert (late["state"], late["matched"]) == ("late", [])
    assert (run.outcome, run.status) == ("review", "review")
    dave.clear(run, *set(run.codes)).fine()
    assert run.outcome == "continue"
    run.resume()
    assert (run.state("k1"), len(run.events("effect.executed"))) == ("executed", 1)
