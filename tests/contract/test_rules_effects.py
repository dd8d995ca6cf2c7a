"""Rules 8, 9 and 13 of the contract, and the effect's states: one effect a key, receipts never refused, clean ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from .driver import (
    ORDER,
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    at_once,
    checkpoint,
    completed,
    done,
    effect,
    ev,
    executed,
    order,
    paused,
    started,
    statuses,
    timer,
    unknown,
)

MAIL = effect("m", "mail.send")


def e_failed(key: str) -> Any:
    return ev("effect.failed", key=key, error={"code": "x", "message": "no"})


# --- rule 8: one effect a (run, key) ---------------------------------------------------------------------------------


def test_planning_again_answers_with_the_effect_as_it_stands(bot: Agent) -> None:
    run = bot.open(MAIL)
    assert run.do(MAIL)["effects"][0]["state"] == "planned"
    run.do(started("m"))
    assert run.do(MAIL)["effects"][0]["state"] == "started"
    run.do(executed("m", "x1"))
    again = run.do(MAIL)["effects"][0]
    assert (again["state"], again["receipt"]["id"]) == ("executed", "x1")
    assert len(run.look()["effects"]) == 1
    assert len(run.events("effect.planned")) == 1


def test_plan_and_start_in_one_call(bot: Agent) -> None:
    run = bot.open()
    first = run.do({**MAIL, "start": True})["effects"][0]
    assert (first["granted"], first["state"], first["attempt"]) == (True, "started", 1)
    under_way = run.do({**MAIL, "start": True})["effects"][0]
    assert (under_way["granted"], under_way["state"]) == (False, "started")
    run.do(unknown("m"))
    lost = run.do({**MAIL, "start": True})["effects"][0]
    assert (lost["granted"], lost["state"]) == (False, "unknown")


def test_plan_and_start_of_what_is_done_gives_its_receipt(bot: Agent) -> None:
    run = bot.open(*done(MAIL))
    again = run.do({**MAIL, "start": True})["effects"][0]
    assert (again["granted"], again["receipt"]["id"]) == (False, "x1")


@pytest.mark.django_db(transaction=True)
def test_of_many_plan_and_starts_one_is_granted(bot: Agent) -> None:
    run = bot.open()
    answers = at_once(*[lambda: run.append({**MAIL, "start": True})] * 6)
    assert statuses(answers) == [200] * 6
    assert sorted(a.json["effects"][0]["granted"] for a in answers) == [False] * 5 + [True]
    assert len(run.events("effect.started")) == 1


def test_starting_what_is_executed_is_refused_with_the_receipt(bot: Agent) -> None:
    run = bot.open(*done(MAIL))
    doc = run.start("m").refused(409, "effect_already_executed")
    assert doc["effect"]["receipt"]["id"] == "x1"


@pytest.mark.parametrize(
    "change",
    [{"arguments": {"of": "another"}}, {"resource": "elsewhere"}, {"action": "post"}, {"system": "sms"}],
    ids=str,
)
def test_the_same_key_with_other_content_is_refused(bot: Agent, change: dict[str, Any]) -> None:
    run = bot.open(MAIL)
    run.append({**MAIL, **change}).refused(422, "effect_key_reused")
    assert run.effect("m")["arguments"] == {"of": "m"}


def test_the_same_content_spelled_otherwise_is_the_same(bot: Agent) -> None:
    run = bot.open(effect("m", "mail.send", arguments={"a": 1, "b": "é"}))
    assert run.append(effect("m", "mail.send", arguments={"b": "\u00e9", "a": 1.0})).status == 200


def test_another_key_with_the_same_fingerprint_is_a_duplicate(bot: Agent) -> None:
    run = bot.open(*done(MAIL))
    twin = {**MAIL, "key": "m2"}
    assert run.append(twin).refused(409, "effect_duplicate")["effect"]["key"] == "m"
    assert [e["key"] for e in run.look()["effects"]] == ["m"]
    # the same act in another run is no duplicate
    bot.open(twin)


def test_a_repeat_on_purpose_is_planned_when_its_impact_is_low(bot: Agent) -> None:
    run = bot.open(*done(MAIL))
    twin = {**MAIL, "key": "m2", "repeat": True, "start": True}
    assert run.do(twin)["effects"][0]["granted"] is True
    assert run.effect("m")["fingerprint"] == run.effect("m2")["fingerprint"]


@pytest.mark.parametrize("state", ["started", "unknown"])
def test_no_repeat_while_the_twin_is_in_the_air(bot: Agent, state: str) -> None:
    run = bot.open(MAIL, started("m"))
    if state == "unknown":
        run.do(unknown("m"))
    run.append({**MAIL, "key": "m2", "repeat": True}).refused(409, "effect_duplicate")


def test_a_repeat_above_low_impact_needs_an_approval_that_names_it(bot: Agent) -> None:
    pay = effect("p", "psp.charge")
    run = bot.open(*done(pay))
    answer = run.append({**pay, "key": "p2", "repeat": True, "start": True})
    if answer.status == 200:
        assert answer.json["effects"][-1]["granted"] is False
        answer = run.start("p2", arguments=pay["arguments"])
    answer.refused(409, "approval_required", "effect_duplicate")


def test_amount_and_arguments_make_the_fingerprint(bot: Agent) -> None:
    run = bot.open(
        effect("a", "mail.send", resource="r", arguments={"x": 1}),
        effect("b", "mail.send", resource="r", arguments={"x": 2}),
        effect("c", "mail.send", resource="r", arguments={"x": 1}, amount={"value": "1.00", "currency": "EUR"}),
        effect("d", "mail.send", resource="r", arguments={"x": 1}, amount={"value": "1.00", "currency": "USD"}),
        effect("e", "mail.send", resource="s", arguments={"x": 1}),
    )
    assert len({e["fingerprint"] for e in run.look()["effects"]}) == 5


def test_all_or_nothing(bot: Agent) -> None:
    run = bot.open()
    assert run.append(checkpoint("b"), MAIL, started("nobody-planned-it")).status in (404, 409, 422)
    look = run.look()
    assert (look["stage"], look["effects"]) == ("draft", [])


# --- the effect's states ---------------------------------------------------------------------------------------------


@pytest.fixture
def at(bot: Agent, dave: Person) -> Callable[..., Run]:
    """Gives a run whose effect `m` stands in the named state."""

    def give(state: str) -> Run:
        plan = effect("m", "erp.reserve", impact="low")
        way = {
            "planned": [],
            "started": [started("m")],
            "executed": [started("m"), executed("m")],
            "failed": [started("m"), e_failed("m")],
            "unknown": [started("m"), unknown("m")],
        }
        if state in way:
            return bot.open(plan, *way[state])
        run = bot.open(plan, started("m"), executed("m"), ev("cancelled", reason="The customer left"))
        run.do(ev("effect.compensating", key="m", attempt=1))
        if state == "compensated":
            run.do(ev("effect.compensated", key="m", receipt={"id": "u1"}))
        if state == "compensation_unknown":
            run.do(ev("effect.compensation_unknown", key="m", error={"code": "t", "message": "?"}))
        return run

    return give


STARTED, FAILED, EXECUTED = started("m"), e_failed("m"), executed("m", "x2")
NOT_EXECUTED = ev("effect.not_executed", key="m", evidence={"looked": "nothing there"})
COMPENSATING = ev("effect.compensating", key="m", attempt=1)
COMPENSATED = ev("effect.compensated", key="m", receipt={"id": "u1"})
UNDO_FAILED = ev("effect.compensation_failed", key="m", error={"code": "x", "message": "no"})
UNDO_UNKNOWN = ev("effect.compensation_unknown", key="m", error={"code": "x", "message": "?"})


@pytest.mark.parametrize(
    ("state", "event", "then"),
    [
        ("planned", STARTED, "started"),
        ("failed", STARTED, "started"),
        ("started", EXECUTED, "executed"),
        ("started", FAILED, "failed"),
        ("started", unknown("m"), "unknown"),
        ("unknown", EXECUTED, "executed"),
        ("unknown", FAILED, "failed"),
        ("compensating", COMPENSATED, "compensated"),
        ("compensating", UNDO_UNKNOWN, "compensation_unknown"),
        ("compensating", UNDO_FAILED, "executed"),
    ],
    ids=lambda x: x if isinstance(x, str) else x["type"],
)
def test_what_an_effect_may_do(at: Callable[..., Run], state: str, event: dict[str, Any], then: str) -> None:
    run = at(state)
    assert run.state("m") == state
    run.do(event)
    assert run.state("m") == then


@pytest.mark.parametrize(
    ("state", "event"),
    [
        ("started", STARTED),
        ("executed", STARTED),
        ("unknown", STARTED),
        ("compensating", STARTED),
        ("compensated", STARTED),
        ("compensation_unknown", STARTED),
        ("executed", FAILED),
        ("executed", unknown("m")),
        ("executed", NOT_EXECUTED),
        ("planned", COMPENSATING),
        ("started", COMPENSATING),
        ("failed", COMPENSATING),
        ("unknown", COMPENSATING),
        ("compensated", COMPENSATING),
        ("compensation_unknown", COMPENSATING),
        ("planned", COMPENSATED),
        ("planned", UNDO_FAILED),
    ],
    ids=lambda x: x if isinstance(x, str) else x["type"],
)
def test_what_an_effect_may_not_do(at: Callable[..., Run], state: str, event: dict[str, Any]) -> None:
    run = at(state)
    answer = run.append(event)
    if event is FAILED or event == unknown("m"):  # what came back from outside may be kept, but it moves nothing
        assert answer.status < 500
    else:
        assert answer.status in (409, 422), answer.raw
    assert run.state("m") == state


def test_an_effect_that_nobody_planned_cannot_start(bot: Agent) -> None:
    run = bot.open()
    answer = run.start("ghost")
    assert answer.status in (404, 409, 422)
    assert run.look()["effects"] == []


def test_a_retry_safe_effect_is_started_again_under_its_key(bot: Agent) -> None:
    pay = effect("p", "psp.charge")
    run = bot.open(pay, started("p", arguments=pay["arguments"]), unknown("p"))
    assert (run.outcome, run.codes) == ("continue", ["retry_same_key"])
    again = run.start("p", arguments=pay["arguments"]).ok()["effects"][0]
    assert (again["granted"], again["attempt"], again["state"]) == (True, 2, "started")


@pytest.mark.parametrize(("found", "state"), [("executed", "executed"), ("not_executed", "planned")])
def test_an_effect_with_lookup_is_looked_up_by_the_agent(bot: Agent, found: str, state: str) -> None:
    send = effect("s", "esign.send")
    run = bot.open(send, started("s", arguments=send["arguments"]), unknown("s"))
    assert (run.outcome, run.codes) == ("continue", ["look_up"])
    run.start("s", arguments=send["arguments"]).refused(409, "effect_unknown")
    seen = executed("s") if found == "executed" else ev("effect.not_executed", key="s", evidence={"list": []})
    run.do(seen)
    assert run.state("s") == state


def test_an_agent_does_not_look_up_what_has_no_lookup(bot: Agent) -> None:
    run = bot.open(MAIL, started("m"), unknown("m"))
    answer = run.append(ev("effect.not_executed", key="m", evidence={"list": []}))
    assert answer.status in (409, 422), "a person reconciles it"
    assert run.state("m") == "unknown"


@pytest.mark.parametrize("end", ["pause", "release", "failed", "lapse", "takeover", "takeback"])
def test_when_the_lease_ends_in_any_way_what_is_under_way_is_unknown(
    bot: Agent, dave: Person, clock: Clock, end: str
) -> None:
    run = bot.open(MAIL, started("m"))
    if end == "pause":
        run.do(paused(timer()))
    elif end == "release":
        run.release().ok()
    elif end == "failed":
        run.do(ev("failed", error={"code": "x", "message": "y"}))
    elif end == "lapse":
        clock.advance(seconds=61)
        run.append(checkpoint("b")).refused(409, "lease_lost")
    elif end == "takeover":
        dave.takeover(run).fine()
    else:
        run.rehydrate(holder="bot/w1").ok()
    assert run.state("m") == "unknown"


def test_when_the_lease_ends_an_undo_under_way_is_unknown(at: Callable[..., Run], clock: Clock) -> None:
    run = at("compensating")
    clock.advance(seconds=61)
    run.append(checkpoint("b")).refused(409, "lease_lost")
    assert (run.state("m"), run.outcome, run.status) == ("compensation_unknown", "review", "review")
    assert "compensation_unknown" in run.codes


@pytest.mark.parametrize(
    ("outcome", "state"), [("executed", "executed"), ("not_executed", "planned"), ("compensated", "compensated")]
)
def test_a_person_reconciles_an_unknown_effect(at: Callable[..., Run], dave: Person, outcome: str, state: str) -> None:
    run = at("compensation_unknown" if outcome == "compensated" else "unknown")
    dave.reconcile(run, "m", outcome, receipt={"id": "x1"}).fine()
    assert run.state("m") == state
    made = run.decisions()[-1]
    assert (made["kind"], "dave" in str(made["decided_by"])) == ("reconcile", True)


def test_what_is_still_planned_when_the_run_ends_is_withdrawn(bot: Agent) -> None:
    run = bot.open(MAIL)
    run.do(completed())
    assert run.state("m") == "withdrawn"


def test_what_is_still_planned_when_the_ask_is_rejected_is_withdrawn(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(order(), flow=world.variant("goes-on", on_reject="continue"))
    alice.reject(run.pause(approval(effect="k1")))
    assert (run.state("k1"), run.outcome) == ("withdrawn", "continue")


# --- rule 9: a receipt is never refused ------------------------------------------------------------------------------


def test_a_receipt_is_taken_after_the_lease_was_lost(bot: Agent, clock: Clock) -> None:
    run = bot.open(MAIL, started("m"))
    clock.advance(seconds=61)
    run.rehydrate(holder="bot/new")
    got = run.append(executed("m", "x1")).ok()
    assert (got["effects"][0]["state"], got["effects"][0]["late"]) == ("executed", True)
    assert run.effect("m")["receipt"]["id"] == "x1"


def test_a_failure_is_taken_after_the_lease_was_lost(bot: Agent, clock: Clock) -> None:
    run = bot.open(MAIL, started("m"))
    clock.advance(seconds=61)
    run.append(e_failed("m")).ok()
    assert run.state("m") == "failed"


def test_a_receipt_from_an_epoch_that_did_not_start_it_is_fenced(bot: Agent) -> None:
    run = bot.open()
    old = run.epoch
    run.resume()
    run.do(MAIL, started("m"))
    run.append(executed("m", "forged"), epoch=old).refused(409, "lease_lost")
    assert run.state("m") == "started"


@pytest.mark.parametrize("how", ["cancelled", "taken over", "handed on"])
def test_a_receipt_is_taken_from_a_run_that_went_on_without_it(bot: Agent, dave: Person, how: str) -> None:
    run = bot.open(MAIL, started("m"))
    epoch = run.epoch
    if how == "cancelled":
        run.do(ev("cancelled", reason="The customer left"))
        run.release().ok()
    elif how == "taken over":
        dave.takeover(run).fine()
    else:
        dave.takeover(run).fine()
        dave.handback(run, effects=[{"key": "m", "receipt": {"id": "x1"}}]).fine()
    run.append(executed("m", "x1"), epoch=epoch).ok()
    assert (run.state("m"), run.effect("m")["receipt"]["id"]) == ("executed", "x1")


def test_a_receipt_is_taken_from_an_ended_run(bot: Agent, dave: Person) -> None:
    run = bot.open(MAIL, started("m"))
    epoch = run.epoch
    dave.takeover(run).fine()
    dave.reconcile(run, "m", "not_executed").fine()
    dave.terminate(run).fine()
    assert run.status == "terminated"
    run.append(executed("m", "x1"), epoch=epoch).ok()
    assert "x1" in str(run.effect("m")["receipt"])
    assert run.status == "terminated", "ended is final"


def test_a_receipt_is_kept_out_of_a_batch_that_is_refused(bot: Agent) -> None:
    run = bot.open(MAIL, started("m"))
    doc = run.append(checkpoint("b"), executed("m", "x1"), started("ghost"))
    assert doc.status in (404, 409, 422)
    assert "m" in str(doc.json["recorded"])
    assert (run.state("m"), run.look()["stage"]) == ("executed", "draft")


def test_a_receipt_is_kept_out_of_a_batch_with_bad_fields(bot: Agent) -> None:
    run = bot.open(MAIL, started("m"))
    doc = run.append(executed("m", "x1"), checkpoint("b", surprise=1)).refused(422, "invalid")
    assert doc["errors"][0]["pointer"].startswith("/events/1")
    assert "m" in str(doc["recorded"])
    assert run.state("m") == "executed"


def test_a_receipt_is_kept_out_of_a_fenced_batch(bot: Agent, clock: Clock) -> None:
    run = bot.open(MAIL, started("m"))
    clock.advance(seconds=61)
    doc = run.append(executed("m", "x1"), checkpoint("b")).refused(409, "lease_lost")
    assert "m" in str(doc["recorded"])
    assert (run.state("m"), run.look()["stage"]) == ("executed", "draft")


@pytest.mark.parametrize("text", ["a\\u0000b", "a\\ud800b"], ids=["NUL", "lone surrogate"])
def test_text_in_a_receipt_that_the_database_cannot_hold_is_cleaned(bot: Agent, text: str) -> None:
    run = bot.open(MAIL, started("m"))
    event = f'{{"type":"effect.executed","key":"m","receipt":{{"id":"x1","data":{{"answer":"{text}"}}}}}}'
    got = run.append(raw=f'{{"epoch":{run.epoch},"events":[{event}]}}'.encode()).ok()
    assert got["effects"][0]["state"] == "executed"
    assert "sanitised" in str(run.events("effect.executed")[0]["payload"]) + str(got)
    assert "\x00" not in str(run.effect("m")["receipt"])


def test_a_receipt_that_contradicts_a_person_makes_it_unknown_again(bot: Agent, dave: Person) -> None:
    run = bot.open(MAIL, started("m"))
    epoch = run.epoch
    run.do(unknown("m"))
    dave.reconcile(run, "m", "not_executed").fine()
    run.append(executed("m", "x1"), epoch=epoch).ok()
    assert (run.state("m"), run.outcome) == ("unknown", "review")
    assert "receipt_conflict" in run.codes


def test_a_second_receipt_with_another_id_is_an_alarm(bot: Agent) -> None:
    run = bot.open(*done(MAIL, "x1"))
    run.append(executed("m", "x1")).ok()
    assert run.events("effect_repeated") == run.events("repeated") == []
    run.append(executed("m", "x2")).ok()
    assert run.effect("m")["receipt"]["id"] == "x1"
    assert [e for e in run.events() if "repeated" in e["type"] or "effect_repeated" in str(e["payload"])]


def test_what_was_done_without_a_plan_is_recorded(bot: Agent) -> None:
    run = bot.open()
    run.do({**executed("m", "x1"), "system": "mail", "action": "send", "resource": "r", "arguments": {}})
    assert (run.state("m"), run.outcome) == ("executed", "continue")


# --- rule 13: ending -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["started", "unknown"])
@pytest.mark.parametrize("how", ["completed", "terminate"])
def test_a_run_with_an_open_outcome_does_not_end(at: Callable[..., Run], dave: Person, state: str, how: str) -> None:
    run = at(state)
    answer = run.append(completed()) if how == "completed" else dave.terminate(run)
    assert answer.refused(409, "effect_unknown")["effect"]["key"] == "m"
    assert run.look()["ended_at"] is None


@pytest.mark.parametrize("state", ["compensating", "compensation_unknown"])
@pytest.mark.parametrize("how", ["completed", "terminate"])
def test_a_run_with_an_open_undo_does_not_end(at: Callable[..., Run], dave: Person, state: str, how: str) -> None:
    run = at(state)
    answer = run.append(completed()) if how == "completed" else dave.terminate(run)
    answer.refused(409, "open_compensation", "effect_unknown")
    assert run.look()["ended_at"] is None


def test_what_cannot_be_undone_is_signed_off_before_a_rejected_run_ends(
    bot: Agent, alice: Person, dave: Person
) -> None:
    pay = effect("p", "bank.pay", approval="other-approval")
    run = bot.open(pay)
    alice.approve(run.pause(approval("first", name="other-approval", effect="p")))
    run.resume()
    run.do(started("p", arguments=pay["arguments"]), executed("p"))
    alice.reject(run.pause(approval("second", name="other-approval")))
    assert (run.outcome, run.status) == ("review", "review")
    assert "sign_off_needed" in run.codes
    dave.sign_off(run, "p").fine()
    assert (run.decisions()[-1]["kind"], run.status) == ("sign_off", "terminated")


def test_low_impact_needs_no_sign_off(bot: Agent, alice: Person) -> None:
    run = bot.open(*done(MAIL))
    alice.reject(run.pause(approval()))
    assert run.status == "terminated"


def test_undo_goes_newest_first_and_then_the_run_ends(bot: Agent, alice: Person) -> None:
    a, b = effect("a", "erp.reserve", impact="low"), effect("b", "erp.reserve", impact="low")
    run = bot.open(*done(a, "xa"), *done(b, "xb"))
    alice.reject(run.pause(approval()))
    assert run.status == "compensating"
    envelope = bot.claim().ok()
    run.epoch = envelope["lease"]["epoch"]
    assert (envelope["verdict"]["outcome"], envelope["undo"]) == ("compensate", ["b", "a"])
    for key in envelope["undo"]:
        run.do(
            ev("effect.compensating", key=key, attempt=1), ev("effect.compensated", key=key, receipt={"id": f"u{key}"})
        )
    if not run.look()["ended_at"]:  # it ends with the lease at the latest
        run.release()
    assert (run.status, run.state("a"), run.state("b")) == ("terminated", "compensated", "compensated")


def test_an_undo_that_keeps_failing_goes_to_a_person(bot: Agent, alice: Person) -> None:
    run = bot.open(*done(effect("a", "erp.reserve", impact="low"), "xa"))
    alice.reject(run.pause(approval()))
    run.resume()
    for n in range(1, 4):
        run.do(
            ev("effect.compensating", key="a", attempt=n),
            ev("effect.compensation_failed", key="a", error={"code": "x", "message": "no"}),
        )
    assert run.outcome == "review"
    assert run.state("a") == "executed"
    run.append(ev("effect.compensating", key="a", attempt=4)).refused(409, "retries_exhausted")


def test_a_gated_order_is_shown_with_its_title(bot: Agent) -> None:
    run = bot.open(order())
    assert run.effect("k1")["title"] == "Order PO-1 from ACME"
    assert run.effect("k1")["arguments"] == ORDER
    assert run.effect("k1")["impact"] == "money"


@pytest.mark.parametrize(
    "receipt",
    [
        *("x1", 17, None, ["x1"]),
        *({"id": 17}, {"id": "x1", "status": "maybe"}, {"id": "x1", "surprise": 1}, {"id": "x" * 5000}),
        *({"id": "x1", "data": "y" * 20_000}, {"id": "x1", "url": ["no"]}),
    ],
    ids=lambda receipt: str(receipt)[:40],
)
def test_an_odd_receipt_is_kept_all_the_same(bot: Agent, receipt: Any) -> None:
    run = bot.open(MAIL, started("m"))
    run.append(ev("effect.executed", key="m", receipt=receipt)).ok()
    assert run.state("m") == "executed"


def test_an_odd_failure_is_kept_all_the_same(bot: Agent) -> None:
    run = bot.open(MAIL, started("m"))
    run.append(ev("effect.failed", key="m", error="it broke\u0000")).ok()
    assert run.state("m") == "failed"


def test_late_receipts_in_one_batch_are_all_taken(bot: Agent, clock: Clock) -> None:
    run = bot.open(MAIL, effect("n", "mail.send"), started("m"), started("n"))
    clock.advance(seconds=61)
    got = run.append(executed("m", "x1"), e_failed("n")).ok()
    assert [e["late"] for e in got["effects"]] == [True, True]
    assert (run.state("m"), run.state("n")) == ("executed", "failed")


def test_the_start_of_another_attempt_does_not_let_the_old_epoch_speak(bot: Agent, dave: Person) -> None:
    """An old epoch's receipt for an effect that a newer epoch started again is still a fact: it happened twice."""
    pay = effect("p", "psp.charge")
    run = bot.open(pay, started("p", arguments=pay["arguments"]))
    old = run.epoch
    run.release().ok()
    run.resume()
    run.do(started("p", arguments=pay["arguments"]), executed("p", "x2"))
    answer = run.append(executed("p", "x1"), epoch=old)
    if answer.status == 200:  # taken as the second receipt that it is
        assert run.alarms("repeated")
    else:  # or fenced, since the epoch that started it is another now; the first receipt stands either way
        answer.refused(409, "lease_lost")
    assert run.effect("p")["receipt"]["id"] == "x2"


def test_completing_closes_waits_that_are_still_open(bot: Agent) -> None:
    run = bot.open(ev("wait.opened", wait={"key": "c", "name": "c", "kind": "callback", "due_in": 600}), MAIL)
    run.do(completed())
    assert (run.wait("c")["status"], run.state("m"), run.status) == ("cancelled", "withdrawn", "completed")


def test_keys_may_be_written_in_any_letters(bot: Agent, dave: Person) -> None:
    key = "pay/2026 é%?#你"
    run = bot.open(effect(key, "mail.send"), started(key), unknown(key))
    dave.reconcile(run, quote(key, safe=""), "executed", receipt={"id": "x1"}).fine()
    assert run.state(key) == "executed"


def test_nothing_new_is_started_by_an_agent_that_is_fenced_in_the_middle(bot: Agent, dave: Person) -> None:
    run = bot.open(MAIL)
    dave.takeover(run).fine()
    run.start("m").refused(409, "lease_lost")
    run.append({**effect("n", "mail.send"), "start": True}).refused(409, "lease_lost")
    assert [(e["key"], e["state"]) for e in run.look()["effects"]] == [("m", "planned")]
