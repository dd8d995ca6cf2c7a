"""Section 5 of the contract: each row of the verdict's table, the order between rows, and what `clear` settles."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from .driver import (
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    callback,
    completed,
    done,
    effect,
    ev,
    executed,
    failed,
    order,
    paused,
    started,
    timer,
    unknown,
)
from .sweep import sweep

RESERVED = effect("r", "erp.reserve")
LOST = [effect("m", "mail.send"), started("m"), unknown("m")]


def read(run: Run) -> tuple[str, list[str]]:
    verdict = run.verdict
    return verdict["outcome"], [reason["code"] for reason in verdict["reasons"]]


@pytest.fixture
def rejected(bot: Agent, alice: Person, world: World) -> Callable[..., Run]:
    """Gives a run, with these events behind it, whose ask got a no under this `on_reject`."""

    def give(*events: dict[str, Any], on_reject: str = "compensate", **how: Any) -> Run:
        run = bot.open(*events, flow=world.variant(f"on-{on_reject}", on_reject=on_reject), **how)
        run.do(paused(approval()))
        alice.reject(run.wait("legal-approval"))
        return run

    return give


# --- each row --------------------------------------------------------------------------------------------------------


def test_row_1_ended(bot: Agent) -> None:
    run = bot.open()
    run.do(completed())
    assert read(run) == ("terminate", ["run_ended"])


def test_row_2_a_person_holds_it(bot: Agent, dave: Person) -> None:
    run = bot.open()
    dave.takeover(run).fine()
    assert read(run) == ("wait", ["taken_over"])


@pytest.mark.parametrize("how", ["rejected", "cancelled", "timed_out"])
def test_row_3_a_no_that_people_look_at(bot: Agent, alice: Person, world: World, clock: Clock, how: str) -> None:
    run = bot.open(flow=world.variant("looked-at", on_reject="review"))
    if how == "cancelled":
        run.do(ev("cancelled", reason="The customer left"))
        run.release().ok()
    else:
        wait = run.pause(approval(due_in=60, on_timeout="reject"))
        if how == "rejected":
            alice.reject(wait)
        clock.advance(seconds=61)
        sweep()
    assert (read(run), run.status) == (("review", [how]), "review")


def test_row_3_a_wait_may_have_its_own_on_reject(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.reject(run.pause(approval(on_reject="review")))
    assert read(run) == ("review", ["rejected"])


def test_row_4_a_no_with_an_unknown_outcome(rejected: Callable[..., Run]) -> None:
    outcome, codes = read(rejected(*LOST))
    assert (outcome, codes[0]) == ("review", "effect_unknown")


def test_row_4_a_no_with_an_unknown_undo(rejected: Callable[..., Run]) -> None:
    run = rejected(*done(RESERVED))
    run.resume()
    run.do(
        ev("effect.compensating", key="r", attempt=1), ev("effect.compensation_unknown", key="r", error={"code": "t"})
    )
    outcome, codes = read(run)
    assert (outcome, codes[0]) == ("review", "compensation_unknown")


def test_row_4_a_no_where_something_cannot_be_undone(rejected: Callable[..., Run]) -> None:
    outcome, codes = read(rejected(*done(effect("p", "bank.pay"))))
    assert (outcome, codes[0]) == ("review", "sign_off_needed")


def test_row_5_a_no_with_something_to_undo(rejected: Callable[..., Run]) -> None:
    run = rejected(*done(RESERVED))
    outcome, codes = read(run)
    assert (outcome, codes[0], run.status) == ("compensate", "undo_pending", "compensating")


def test_row_5_with_terminate_a_person_looks_first(rejected: Callable[..., Run]) -> None:
    outcome, codes = read(rejected(*done(RESERVED), on_reject="terminate"))
    assert (outcome, codes[0]) == ("review", "undo_pending")


@pytest.mark.parametrize("on_reject", ["compensate", "terminate"])
def test_row_6_a_no_with_nothing_to_undo_ends_the_run(rejected: Callable[..., Run], on_reject: str) -> None:
    run = rejected(on_reject=on_reject)
    assert (run.status, run.outcome) == ("terminated", "terminate")
    assert any("rejected" in str(e) for e in run.events())


def test_row_6_with_continue_the_agent_is_told_the_no(rejected: Callable[..., Run]) -> None:
    run = rejected(*done(effect("m", "mail.send")), on_reject="continue")
    envelope = run.resume()
    assert envelope["verdict"]["outcome"] == "continue"
    assert envelope["waits"][0]["decision"]["choice"] == "reject"
    assert run.state("m") == "executed"


def test_row_7_required_metadata_missing(bot: Agent) -> None:
    run = bot.open(at=None)
    run.pause(approval())
    outcome, codes = read(run)
    assert (outcome, codes[0]) == ("review", "metadata_missing")


def test_row_8_an_unknown_outcome(bot: Agent) -> None:
    run = bot.open(*LOST)
    run.release().ok()
    assert (read(run), run.status) == (("review", ["effect_unknown"]), "review")
    assert run.verdict["reasons"][0]["subject"] in ("m", {"effect": "m"}, {"key": "m"}, "effect:m")


def test_row_9_executed_without_a_decision(bot: Agent) -> None:
    run = bot.open(order())
    run.do(executed("k1"))
    run.release().ok()
    assert (read(run), run.status) == (("review", ["executed_despite_rejection"]), "review")


def test_row_10_not_resolved(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval())
    assert read(run) == ("wait", ["waiting"])


def test_row_10_backing_off(bot: Agent) -> None:
    run = bot.open()
    run.do(failed(retry_in=600))
    assert read(run) == ("wait", ["backing_off"])


def test_row_11_a_time_out_that_leads_nowhere(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(callback("c", due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert (read(run), run.status) == (("review", ["timeout_undetermined"]), "review")


def test_row_12_input_changed(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    other = "sha256:" + "2" * 64
    for digest, code in ((other, "input_changed"), (None, "clear")):
        envelope = run.rehydrate(input_digest=digest).ok() if digest else run.rehydrate().ok()
        assert [r["code"] for r in envelope["verdict"]["reasons"]] == [code]
        assert bool(envelope["lease"]) is (code == "clear")


def test_row_12_the_same_input_goes_on(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    run.resume(input_digest="sha256:" + "1" * 64)


@pytest.mark.parametrize(("policy", "outcome"), [("review", "review"), ("continue", "continue")])
def test_row_12_version_changed(bot: Agent, alice: Person, world: World, policy: str, outcome: str) -> None:
    run = bot.open(flow=world.variant("moves", on_version_change=policy))
    alice.approve(run.pause(approval()))
    bot.version = "2"
    envelope = run.rehydrate().ok()
    assert envelope["verdict"]["outcome"] == outcome
    if outcome == "review":
        assert [r["code"] for r in envelope["verdict"]["reasons"]] == ["version_changed"]


def test_row_12_a_build_that_reads_the_old_version_goes_on(bot: Agent, alice: Person) -> None:
    """The contract lets an agent say what it `reads`; a claim goes by it, so a rehydrate does too."""
    run = bot.open()
    alice.approve(run.pause(approval()))
    run.resume(agent=bot.card(version="2", reads=["1", "2"]))


def test_row_13_a_condition_does_not_hold_now(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    too_low = [{"pointer": "/amount", "op": "<=", "value": "50.00"}]
    alice.decide(run.pause(approval(effect="k1")), "approve_with_conditions", conditions=too_low).ok(201)
    assert (read(run), run.status) == (("review", ["condition_unmet"]), "review")


def test_row_13_an_unused_approval_expired(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(order())
    until = (datetime.now(UTC) + timedelta(seconds=100)).isoformat()
    alice.approve(run.pause(approval(effect="k1")), expires_at=until)
    assert run.outcome == "continue"
    clock.advance(seconds=101)
    sweep()
    assert read(run) == ("review", ["approval_expired"])
    assert run.rehydrate().ok()["lease"] is None


def test_row_14_retries_exhausted(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    for _ in range(3):
        run.do(failed(retry_in=1))
        clock.advance(seconds=60)
        sweep()
        run.rehydrate()
    assert (read(run), run.status) == (("review", ["retries_exhausted"]), "review")


def test_row_14_not_retryable(bot: Agent) -> None:
    run = bot.open()
    run.do(failed(retryable=False))
    assert read(run) == ("review", ["not_retryable"])


def test_row_15_a_gated_stage(bot: Agent, clock: Clock) -> None:
    run = bot.open(at="sign")
    run.pause(timer(due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert (read(run), run.status) == (("review", ["human_gate"]), "review")


@pytest.mark.parametrize("by", ["approval", "clear", "handback"])
def test_row_15_is_opened_by_a_person(bot: Agent, alice: Person, dave: Person, clock: Clock, by: str) -> None:
    run = bot.open(at="sign")
    if by == "approval":
        alice.approve(run.pause(approval()))
    else:
        run.pause(timer(due_in=60))
        clock.advance(seconds=61)
        sweep()
        if by == "clear":
            dave.clear(run, "human_gate").fine()
        else:
            dave.takeover(run).fine()
            dave.handback(run, stage="sign").fine()
    assert (run.outcome, run.status) == ("continue", "ready")
    run.resume()


def test_row_15_a_response_opens_no_gate(bot: Agent, alice: Person) -> None:
    run = bot.open(at="sign")
    alice.decide(run.pause(approval()), "respond", response="maybe").ok(201)
    assert run.outcome == "review"


def test_row_16_clear(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    assert read(run) == ("continue", ["clear"])


def test_row_16_repeat_under_the_same_key(bot: Agent) -> None:
    pay = effect("p", "psp.charge")
    run = bot.open(pay, started("p", arguments=pay["arguments"]))
    run.release().ok()
    assert (read(run), run.status) == (("continue", ["retry_same_key"]), "ready")


def test_row_16_look_first(bot: Agent) -> None:
    send = effect("s", "esign.send")
    run = bot.open(send, started("s", arguments=send["arguments"]))
    run.release().ok()
    assert (read(run), run.status) == (("continue", ["look_up"]), "ready")


# --- the order: the first that applies gives the outcome, all that apply are listed ------------------------------


def test_1_before_2_an_ended_run_is_held_by_nobody(bot: Agent, dave: Person) -> None:
    run = bot.open()
    dave.takeover(run).fine()
    dave.terminate(run).fine()
    assert (run.outcome, run.codes[0], run.status) == ("terminate", "run_ended", "terminated")


def test_2_before_3(rejected: Callable[..., Run], dave: Person) -> None:
    run = rejected(on_reject="review")
    dave.takeover(run).fine()
    assert (run.outcome, run.codes[0]) == ("wait", "taken_over")


def test_3_before_4(rejected: Callable[..., Run], dave: Person) -> None:
    run = rejected(*LOST, on_reject="review")
    outcome, codes = read(run)
    assert (outcome, codes[:2]) == ("review", ["rejected", "effect_unknown"])
    dave.clear(run, "rejected").fine()
    outcome, codes = read(run)
    assert outcome == "review"
    assert "effect_unknown" in codes


def test_4_before_5(rejected: Callable[..., Run]) -> None:
    outcome, codes = read(rejected(*done(RESERVED), *LOST))
    assert (outcome, codes[0]) == ("review", "effect_unknown")
    assert "undo_pending" in codes


def test_5_before_6(rejected: Callable[..., Run]) -> None:
    run = rejected(*done(RESERVED))
    assert run.outcome == "compensate", "not terminated while something is left to undo"
    assert run.look()["ended_at"] is None


def test_6_before_7(rejected: Callable[..., Run]) -> None:
    run = rejected(at=None)
    assert (run.outcome, run.status) == ("terminate", "terminated")


def test_7_before_8(bot: Agent) -> None:
    run = bot.open(*LOST, at=None)
    run.pause(timer())
    outcome, codes = read(run)
    assert (outcome, codes[:2]) == ("review", ["metadata_missing", "effect_unknown"])


def test_8_before_9(bot: Agent) -> None:
    run = bot.open(*LOST, order())
    run.do(executed("k1"))
    outcome, codes = read(run)
    assert (outcome, codes[:2]) == ("review", ["effect_unknown", "executed_despite_rejection"])


@pytest.mark.parametrize("row", [7, 8, 9])
def test_7_8_9_before_10(bot: Agent, row: int) -> None:
    events = {7: [], 8: LOST, 9: [order(), executed("k1")]}[row]
    run = bot.open(*events, at=None if row == 7 else "draft")
    run.pause(timer())
    outcome, codes = read(run)
    assert (outcome, codes[-1], run.status) == ("review", "waiting", "review")


def test_10_before_11(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.do(paused(callback("c", due_in=60), timer("t", 600)))
    clock.advance(seconds=61)
    sweep()
    assert (run.outcome, run.codes[0], run.status) == ("wait", "waiting", "waiting")
    clock.advance(seconds=600)
    sweep()
    assert run.outcome == "review", "the time-out counts when the pause resolves"


def test_10_before_12(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval())
    envelope = run.rehydrate(input_digest="sha256:" + "2" * 64).ok()
    assert envelope["verdict"]["outcome"] == "wait"
    assert [r["code"] for r in envelope["verdict"]["reasons"]] == ["waiting", "input_changed"]


def test_11_before_12(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(callback("c", due_in=60))
    clock.advance(seconds=61)
    envelope = run.rehydrate(input_digest="sha256:" + "2" * 64).ok()
    assert [r["code"] for r in envelope["verdict"]["reasons"]] == ["timeout_undetermined", "input_changed"]


def test_12_before_13(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    too_low = [{"pointer": "/amount", "op": "<=", "value": "50.00"}]
    alice.decide(run.pause(approval(effect="k1")), "approve_with_conditions", conditions=too_low).ok(201)
    envelope = run.rehydrate(input_digest="sha256:" + "2" * 64).ok()
    assert [r["code"] for r in envelope["verdict"]["reasons"]] == ["input_changed", "condition_unmet"]


def test_13_before_14_before_15(bot: Agent, alice: Person, clock: Clock) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(order(), mail, at="sign")
    for _ in range(3):
        run.do(started("m"), ev("effect.failed", key="m", error={"code": "x", "message": "no"}))
    too_low = [{"pointer": "/amount", "op": "<=", "value": "50.00"}]
    alice.decide(run.pause(approval(effect="k1")), "approve_with_conditions", conditions=too_low).ok(201)
    assert run.codes[:2] == ["condition_unmet", "retries_exhausted"]
    other = bot.open(mail, at="sign")
    for _ in range(3):
        other.do(started("m"), ev("effect.failed", key="m", error={"code": "x", "message": "no"}))
    other.pause(timer(due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert other.codes == ["retries_exhausted", "human_gate"]


# --- next and recommended --------------------------------------------------------------------------------------------


def test_a_verdict_has_its_shape(bot: Agent) -> None:
    run = bot.open(*LOST)
    verdict = run.verdict
    assert set(verdict) == {"outcome", "reasons", "missing", "next", "recommended"}
    assert all(set(reason) == {"code", "message", "subject"} for reason in verdict["reasons"])
    assert all(reason["message"] for reason in verdict["reasons"])
    assert verdict["recommended"]
    assert run.look()["verdict"] == verdict


def test_next_says_where_to_go_on_and_what_to_skip(bot: Agent, alice: Person) -> None:
    pay = effect("p", "psp.charge")
    run = bot.open(*done(effect("m", "mail.send"), "xm"), pay, started("p", arguments=pay["arguments"]))
    alice.approve(run.pause(approval()))
    told = str(run.verdict["next"])
    assert "s3://cp/draft" in told
    assert "xm" in told, "the receipt of what is to be skipped"
    assert "'p'" in told, "and what is to be repeated"


def test_the_verdict_says_the_same_twice(bot: Agent) -> None:
    run = bot.open(*LOST)
    assert run.verdict == run.verdict


# --- clear -----------------------------------------------------------------------------------------------------------


def test_clear_settles_what_it_names_until_the_next_pause(bot: Agent, dave: Person, clock: Clock) -> None:
    run = bot.open(at="sign")
    run.pause(timer("t1", 60))
    clock.advance(seconds=61)
    sweep()
    dave.clear(run, "human_gate").fine()
    run.resume()
    run.pause(timer("t2", 60))
    clock.advance(seconds=61)
    sweep()
    assert read(run) == ("review", ["human_gate"])


def test_clear_settles_only_what_it_names(bot: Agent, dave: Person, clock: Clock) -> None:
    run = bot.open(at="sign")
    run.pause(callback("c", due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert run.codes == ["timeout_undetermined", "human_gate"]
    dave.clear(run, "timeout_undetermined").fine()
    assert read(run) == ("review", ["human_gate"])


@pytest.mark.parametrize("code", ["effect_unknown", "compensation_unknown", "undo_pending", "retries_exhausted"])
def test_clear_never_settles_these(bot: Agent, dave: Person, code: str) -> None:
    run = bot.open(*LOST)
    run.release().ok()
    answer = dave.clear(run, code)
    assert answer.status in (409, 422), answer.raw
    assert read(run) == ("review", ["effect_unknown"])


def test_after_a_cleared_no_the_run_goes_its_way(rejected: Callable[..., Run], dave: Person) -> None:
    """Row 3 says "and nobody cleared it": cleared, the no leads on to rows 4-6."""
    run = rejected(on_reject="review")
    dave.clear(run, "rejected").fine()
    assert run.outcome != "review"


def test_clear_is_a_decision_with_a_name(bot: Agent, dave: Person, clock: Clock) -> None:
    run = bot.open(at="sign")
    run.pause(timer("t1", 60))
    clock.advance(seconds=61)
    sweep()
    dave.clear(run, "human_gate").fine()
    (made,) = run.decisions()
    assert (made["kind"], "dave" in str(made["decided_by"])) == ("clear", True)


def test_a_clear_may_bring_the_new_input(bot: Agent, alice: Person, dave: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    new = {"ref": "s3://in/18", "digest": "sha256:" + "2" * 64}
    assert run.rehydrate(input_digest=new["digest"]).ok()["lease"] is None
    dave.clear(run, "input_changed", input=new).fine()
    assert run.resume(input_digest=new["digest"])["input"]["ref"] == "s3://in/18"
    alice.approve(run.pause(approval("b")))
    assert run.rehydrate(input_digest="sha256:" + "1" * 64).ok()["lease"] is None, "now the old one differs"
    run.resume(input_digest=new["digest"])


def test_a_version_that_a_person_let_in_is_the_runs_version_from_then_on(
    bot: Agent, alice: Person, dave: Person, clock: Clock
) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    bot.version = "2"
    assert run.rehydrate().ok()["lease"] is None
    dave.clear(run, "version_changed", agent_version="2").fine()
    run.resume()
    run.pause(timer(due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert bot.claim().ok()["run"]["id"] == run.id


def test_what_a_person_must_look_at_is_seen_in_the_list(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    bot.version = "2"
    run.rehydrate().ok()
    found = [r["id"] for r in alice.get("/runs", status="review").ok()["results"]]
    assert found == [run.id], "a resume that was refused for its version waits for a person, and is not forgotten"


def test_the_whole_table_is_listed_not_only_the_first(bot: Agent, clock: Clock) -> None:
    run = bot.open(*LOST, order(), at="sign")
    run.do(executed("k1"))
    run.pause(callback("c", due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert read(run) == (
        "review",
        ["effect_unknown", "executed_despite_rejection", "timeout_undetermined", "human_gate"],
    )
