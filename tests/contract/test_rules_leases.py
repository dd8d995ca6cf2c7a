"""Rules 3, 6 and 17 of the contract: one lease, one resume, time by the database, failures and their limit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from .driver import (
    Agent,
    Answer,
    Clock,
    Person,
    World,
    approval,
    at_once,
    callback,
    checkpoint,
    done,
    effect,
    ev,
    failed,
    not_granted,
    paused,
    signal,
    started,
    statuses,
    timer,
)
from .sweep import sweep

# --- rule 3: one live lease, one resume a pause ----------------------------------------------------------------------


def test_another_holder_is_told_that_the_lease_is_held(bot: Agent) -> None:
    run = bot.open()
    doc = run.rehydrate(holder="bot/other").refused(409, "lease_held")
    assert "bot/w1" in str(doc["held_by"])
    assert run.append(checkpoint("b")).status == 200, "the holder's lease is untouched"


def test_the_same_holder_may_take_its_lease_back_and_fences_its_sibling(bot: Agent) -> None:
    run = bot.open()
    old = run.epoch
    envelope = run.resume(holder="bot/w1")
    assert envelope["lease"]["epoch"] > old
    run.append(checkpoint("b"), epoch=old).refused(409, "lease_lost")
    run.do(checkpoint("b"))


@pytest.mark.django_db(transaction=True)
def test_of_many_rehydrates_one_gets_the_run(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    body = {"agent": bot.card()}
    calls = [lambda n=n: bot.post(f"/runs/{run.id}/rehydrate", {**body, "holder": f"w{n}"}) for n in range(8)]
    answers = at_once(*calls)
    assert statuses(answers) == [200] + [409] * 7
    assert {a.json["code"] for a in answers if a.status == 409} <= {"lease_held", "not_resumable"}


@pytest.mark.django_db(transaction=True)
def test_of_many_claims_one_gets_the_run_and_the_others_nothing(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    answers = at_once(*[lambda n=n: bot.claim(holder=f"w{n}") for n in range(8)])
    assert statuses(answers) == [200] + [204] * 7
    assert next(a.json for a in answers if a.status == 200)["run"]["id"] == run.id


@pytest.mark.django_db(transaction=True)
def test_every_ready_run_goes_to_one_claimer(bot: Agent) -> None:
    ids = {bot.open(holder=None).id for _ in range(6)}
    answers = at_once(*[lambda n=n: bot.claim(holder=f"w{n}") for n in range(8)])
    assert statuses(answers) == [200] * 6 + [204] * 2
    assert {a.json["run"]["id"] for a in answers if a.status == 200} == ids


@pytest.mark.django_db(transaction=True)
def test_a_long_poll_is_answered_at_once_when_a_run_becomes_ready(bot: Agent, alice: Person) -> None:
    run = bot.open()
    asked = run.pause(approval())
    began = datetime.now(UTC)
    claimed, decided = at_once(lambda: bot.claim(wait=20), lambda: alice.decide(asked))
    assert (claimed.status, decided.status) == (200, 201)
    assert claimed.json["run"]["id"] == run.id
    assert datetime.now(UTC) - began < timedelta(seconds=10)


def test_a_resume_is_granted_once_for_each_pause(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    run.resume(holder="bot/a")
    run.rehydrate(holder="bot/b").refused(409, "lease_held")
    assert bot.claim().status == 204


def test_no_lease_without_continue_or_compensate(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval())
    envelope = run.rehydrate().ok()
    assert (envelope["lease"], envelope["verdict"]["outcome"]) == (None, "wait")
    assert run.status == "waiting"
    run.append(checkpoint("b")).refused(409, "lease_lost", "not_resumable")


def test_after_a_pause_the_agent_is_fenced(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval())
    for tried in (run.append(checkpoint("b")), run.heartbeat(), run.release()):
        tried.refused(409, "lease_lost")


def test_an_epoch_that_was_never_granted_is_fenced(bot: Agent) -> None:
    run = bot.open()
    run.append(checkpoint("b"), epoch=run.epoch + 5).refused(409, "lease_lost")


def test_each_grant_has_a_higher_epoch(bot: Agent) -> None:
    run = bot.open()
    epochs = [run.epoch]
    for _ in range(3):
        run.release().ok()
        epochs.append(run.resume()["lease"]["epoch"])
    assert epochs == sorted(set(epochs))


def test_a_released_run_is_ready_and_may_be_claimed(bot: Agent) -> None:
    run = bot.open()
    run.release().ok()
    assert run.status == "ready"
    assert bot.claim().ok()["run"]["id"] == run.id


def test_release_with_retry_in_is_claimed_then_only(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.release(retry_in=300).ok()
    assert bot.claim().status == 204
    clock.advance(seconds=301)
    sweep()
    assert bot.claim().ok()["run"]["id"] == run.id


def test_a_claimed_lease_is_short_until_the_first_call(bot: Agent, clock: Clock) -> None:
    run = bot.open(holder=None)
    run.epoch = bot.claim().ok()["lease"]["epoch"]
    clock.advance(seconds=11)
    run.append(checkpoint("b")).refused(409, "lease_lost")
    run.epoch = bot.claim().ok()["lease"]["epoch"]
    run.heartbeat().ok()
    clock.advance(seconds=30)
    run.do(checkpoint("b"))


def test_a_claim_passes_over_versions_that_the_agent_does_not_read(bot: Agent, world: World) -> None:
    run = bot.open(holder=None)
    v2 = world.agent("bot-v2")
    v2.version = "2"
    before = run.look()["version"]
    assert v2.claim().status == 204
    assert run.look()["version"] == before
    assert v2.claim(agent=v2.card(reads=["1", "2"])).ok()["run"]["id"] == run.id


# --- rule 6: what is overdue is applied first, by the database's clock -----------------------------------------------


def test_a_lapsed_lease_is_lost_even_if_nobody_took_it(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    clock.advance(seconds=61)
    run.append(checkpoint("b")).refused(409, "lease_lost")
    assert run.status == "ready"
    assert run.look()["stage"] == "draft"


def test_every_accepted_call_renews_the_lease(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    for n in range(3):
        clock.advance(seconds=40)
        lease = (run.do(checkpoint(f"s{n}")) if n % 2 else run.heartbeat().ok())["lease"]
        assert lease["epoch"] == run.epoch
    assert run.status == "running"


def test_the_agent_names_the_length_of_its_lease(bot: Agent, clock: Clock) -> None:
    run = bot.open(lease_seconds=600)
    clock.advance(seconds=500)
    run.do(checkpoint("b"))
    clock.advance(seconds=599)
    assert run.status == "running"


def test_a_lapsed_lease_makes_what_was_under_way_unknown(bot: Agent, clock: Clock) -> None:
    run = bot.open(effect("m", "mail.send"), started("m"))
    clock.advance(seconds=61)
    envelope = run.rehydrate(holder="bot/w9").ok()
    assert (envelope["lease"], run.state("m")) == (None, "unknown")
    assert "effect_unknown" in run.codes


def test_a_deadline_holds_without_any_sweeper(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open()
    asked = run.pause(callback("c", due_in=60, on_timeout="continue"))
    clock.advance(seconds=60)
    assert bot.signal("late", "c", run=run.id).ok(202)["state"] == "late"
    assert bot.get(f"/waits/{asked['id']}").ok()["status"] == "timed_out"


def test_no_timer_fires_early(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(timer(due_in=600))
    clock.advance(seconds=590)
    sweep()
    assert (run.wait("sleep")["status"], run.outcome) == ("open", "wait")
    clock.advance(seconds=11)
    sweep()
    assert (run.wait("sleep")["status"], run.outcome, run.status) == ("satisfied", "continue", "ready")


def test_no_timer_fires_twice(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(timer(due_in=600))
    clock.advance(seconds=700)
    version = None
    for _ in range(3):
        sweep()
        version = version or run.look()["version"]
    assert run.look()["version"] == version
    run.resume()
    clock.advance(seconds=20)
    sweep()
    assert run.status == "running"


def test_a_swept_timer_makes_the_run_claimable(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(timer(due_in=600))
    assert bot.claim().status == 204
    clock.advance(seconds=601)
    sweep()
    assert bot.claim().ok()["run"]["id"] == run.id


@pytest.mark.parametrize("days", [40, 400])
def test_timers_of_many_days_work(bot: Agent, clock: Clock, days: int) -> None:
    run = bot.open()
    wait = run.pause(timer(due_in=days * 86400))
    due = datetime.fromisoformat(wait["due_at"])
    assert abs((due - datetime.now(UTC)).total_seconds() - days * 86400) < 60
    clock.advance(seconds=days * 86400 - 60)
    sweep()
    assert run.wait("sleep")["status"] == "open"
    clock.advance(seconds=120)
    sweep()
    assert run.status == "ready"


@pytest.mark.django_db(transaction=True)
def test_a_decision_and_a_deadline_at_once_close_the_wait_once(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open()
    asked = run.pause(approval(due_in=60))
    clock.advance(seconds=60)

    def swept() -> Answer:
        sweep()
        return bot.get(f"/waits/{asked['id']}")

    decided, _, _ = at_once(lambda: alice.decide(asked), swept, swept)
    decided.refused(409, "wait_expired")
    assert len(run.events("wait.timed_out")) == 1
    assert run.wait("legal-approval")["status"] == "timed_out"


# --- rule 17: failures -----------------------------------------------------------------------------------------------


def test_failed_gives_the_lease_up_and_backs_off(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.do(failed(retry_in=120))
    assert (run.status, run.outcome) == ("waiting", "wait")
    assert "backing_off" in run.codes
    run.append(checkpoint("b")).refused(409, "lease_lost")
    look = run.look()
    assert (look["failure_count"], look["last_error"]["code"]) == (1, "boom")
    clock.advance(seconds=121)
    sweep()
    assert run.status == "ready"
    run.resume()


def test_failures_effect_failures_and_lapsed_leases_all_count(bot: Agent, clock: Clock) -> None:
    run = bot.open(effect("m", "mail.send"), started("m"))
    run.do(ev("effect.failed", key="m", error={"code": "x", "message": "no"}))
    assert run.look()["failure_count"] == 1
    clock.advance(seconds=61)
    run.rehydrate()
    assert run.look()["failure_count"] == 2
    run.do(failed(retry_in=1))
    clock.advance(seconds=60)
    sweep()
    failures = run.look()["metadata"]["failures"]
    assert (failures["count"], failures["limit"], failures["last_error"]["code"]) == (3, 3, "boom")
    assert (run.outcome, run.status) == ("review", "review")
    assert "retries_exhausted" in run.codes
    assert failures["escalation"]


def test_starting_at_the_limit_is_refused_until_a_person_gives_more(bot: Agent, dave: Person) -> None:
    run = bot.open(effect("m", "mail.send"))
    for _ in range(3):
        run.do(started("m"), ev("effect.failed", key="m", error={"code": "x", "message": "no"}))
    run.start("m").refused(409, "retries_exhausted")
    not_granted(run.append(effect("m", "mail.send", start=True)), "retries_exhausted")
    dave.retry(run, effect="m", tries=1).fine()
    if run.status != "running":
        run.resume()
    assert run.start("m").ok()["effects"][0]["granted"] is True


def test_a_failure_that_is_not_retryable_goes_to_a_person(bot: Agent) -> None:
    run = bot.open()
    run.do(failed(retryable=False))
    assert (run.outcome, run.status) == ("review", "review")
    assert "not_retryable" in run.codes


# --- section 3: the run's states -------------------------------------------------------------------------------------


def test_a_run_without_a_holder_is_ready(bot: Agent) -> None:
    opened = bot.open_raw(holder=None, events=[checkpoint()]).ok(201)
    assert (opened["run"]["status"], opened["lease"]) == ("ready", None)
    assert opened["run"]["ready_since"]


def test_a_run_that_pauses_as_it_opens_has_no_lease(bot: Agent) -> None:
    opened = bot.open_raw(events=[checkpoint(), paused(approval())]).ok(201)
    assert (opened["run"]["status"], opened["lease"]) == ("waiting", None)


def test_completed_ends_the_run_for_good(bot: Agent, dave: Person) -> None:
    run = bot.open()
    run.do(ev("completed", result={"ref": "s3://out"}))
    look = run.look()
    assert (look["status"], bool(look["ended_at"]), look["verdict"]["outcome"]) == ("completed", True, "terminate")
    assert run.codes[0] == "run_ended"
    run.append(checkpoint("b")).refused(409, "run_ended", "lease_lost")
    dave.takeover(run).refused(409, "run_ended")
    dave.terminate(run).refused(409, "run_ended")
    envelope = run.rehydrate()
    assert envelope.status == 409 or envelope.json["lease"] is None
    assert run.status == "completed"


def test_paused_and_completed_come_last(bot: Agent) -> None:
    run = bot.open()
    for last in (paused(approval()), ev("completed", result={"ref": "r"})):
        run.append(last, checkpoint("b")).refused(422, "invalid")
    assert run.look()["stage"] == "draft"


def test_pause_all_waits_for_all(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), when="all"))
    alice.approve(run.wait("a"))
    assert (run.outcome, run.status) == ("wait", "waiting")
    bot.signal("1", "s", run=run.id).ok(202)
    assert (run.outcome, run.status) == ("continue", "ready")


def test_pause_any_takes_the_first_answer_and_supersedes_the_rest(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), timer("t"), when="any"))
    bot.signal("1", "s", run=run.id).ok(202)
    assert (run.status, run.wait("s")["status"]) == ("ready", "satisfied")
    assert {run.wait("a")["status"], run.wait("t")["status"]} == {"superseded"}
    alice.decide(run.wait("a")).refused(409, "wait_closed")


def test_pause_any_with_a_no_first_counts_the_no_alone(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), when="any"))
    alice.reject(run.wait("a"))
    assert (run.status, run.outcome) == ("terminated", "terminate")


def test_a_rejection_counts_when_the_pause_resolves_the_worst_first(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), when="all"))
    alice.reject(run.wait("a"))
    assert (run.outcome, run.status) == ("wait", "waiting")
    bot.signal("1", "s", run=run.id).ok(202)
    assert (run.outcome, run.status) == ("terminate", "terminated")


def test_pause_each_resumes_at_every_answer_and_leaves_the_others_open(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), when="each"))
    before = run.wait("a")
    bot.signal("1", "s", run=run.id).ok(202)
    assert run.status == "ready"
    run.resume()
    assert run.wait("a")["status"] == "open"
    run.do(paused(approval("a"), when="each"))
    after = run.wait("a")
    assert [after[k] for k in ("id", "version", "due_at")] == [before[k] for k in ("id", "version", "due_at")]
    assert run.outcome == "wait"
    alice.approve(before)
    assert run.status == "ready"


def test_only_the_latest_pause_counts(bot: Agent, alice: Person, world: World) -> None:
    run = bot.open(flow=world.variant("goes-on", on_reject="continue"))
    alice.reject(run.pause(approval("a")))
    assert run.outcome == "continue"
    run.resume()
    alice.approve(run.pause(approval("b")))
    assert run.outcome == "continue"
    assert "rejected" not in run.codes


def test_a_wait_opened_early_is_counted_by_the_pause_that_names_it(bot: Agent, world: World) -> None:
    run = bot.open()
    got = run.do(ev("wait.opened", wait=callback("c")))
    assert got["waits"][0]["callback_url"]
    assert got["lease"]["epoch"] == run.epoch
    assert run.status == "running"
    bot.signal("1", "c", run=run.id).ok(202)
    assert run.wait("c")["status"] == "satisfied"
    run.do(paused(callback("c")))
    assert (run.outcome, run.status) == ("continue", "ready")
    assert len(run.look()["waits"]) == 1


@pytest.mark.parametrize(
    ("on_timeout", "status", "outcome"),
    [("review", "review", "review"), ("resume", "ready", "continue"), ("continue", "ready", "continue")],
)
def test_what_a_deadline_does(bot: Agent, clock: Clock, on_timeout: str, status: str, outcome: str) -> None:
    run = bot.open()
    run.pause(callback("c", due_in=60, on_timeout=on_timeout))
    clock.advance(seconds=61)
    sweep()
    assert (run.wait("c")["status"], run.status, run.outcome) == ("timed_out", status, outcome)
    assert run.look()["metadata"]["decisions"] == [], "a time-out is never shown as a person's no"


@pytest.mark.parametrize("on_timeout", ["reject", "terminate"])
def test_a_deadline_that_says_no_leads_to_the_way_back(bot: Agent, clock: Clock, on_timeout: str) -> None:
    run = bot.open(*done(effect("r", "erp.reserve", impact="low"), "x1"))
    run.pause(approval(due_in=60, on_timeout=on_timeout))
    clock.advance(seconds=61)
    sweep()
    assert (run.wait("legal-approval")["status"], run.outcome, run.status) == (
        "timed_out",
        "compensate",
        "compensating",
    )


def test_escalate_keeps_the_wait_open_once_then_review(bot: Agent, alice: Person, grace: Person, clock: Clock) -> None:
    run = bot.open()
    first = run.pause(approval("e", name="escalating", due_in=600, on_timeout="escalate"))
    grace.decide(first).refused(403, "not_eligible")
    clock.advance(seconds=601)
    sweep()
    second = run.wait("e")
    assert (second["id"], second["status"], second["version"]) == (first["id"], "open", first["version"] + 1)
    gained = datetime.fromisoformat(second["due_at"]) - datetime.fromisoformat(first["due_at"])
    assert timedelta(seconds=599) <= gained <= timedelta(seconds=660), "the same length again"
    alice.decide(first).refused(409, "stale_decision")
    clock.advance(seconds=601)
    sweep()
    assert (run.wait("e")["status"], run.outcome) == ("timed_out", "review")


def test_the_ones_it_escalates_to_may_decide(bot: Agent, grace: Person, clock: Clock) -> None:
    run = bot.open()
    run.pause(approval("e", name="escalating", due_in=600, on_timeout="escalate"))
    clock.advance(seconds=601)
    sweep()
    grace.approve(run.wait("e"))
    assert run.outcome == "continue"


def test_continue_authorises_only_where_the_flow_allows_it(bot: Agent, clock: Clock) -> None:
    grant = effect("g", "crm.grant")
    run = bot.open(grant)
    run.pause(approval("s", name="soft-approval", effect="g", due_in=60, on_timeout="continue"))
    clock.advance(seconds=61)
    sweep()
    run.resume()
    assert run.start("g", arguments=grant["arguments"]).ok()["effects"][0]["granted"] is True


def test_continue_authorises_nothing_where_the_flow_does_not_allow_it(bot: Agent, clock: Clock) -> None:
    plan = effect("k1", "erp.create_order")
    run = bot.open(plan)
    answer = run.append(paused(approval(effect="k1", due_in=60, on_timeout="continue")))
    if answer.status == 422:  # the contract leaves open when it is told: refusing such a pause at once is as good
        answer.refused(422)
    else:
        clock.advance(seconds=61)
        sweep()
        if run.rehydrate().ok()["lease"]:
            run.start("k1", arguments=plan["arguments"]).refused(409, "approval_required")
    assert run.state("k1") == "planned"


def test_resume_on_timeout_authorises_nothing(bot: Agent, clock: Clock) -> None:
    plan = effect("k1", "erp.create_order")
    run = bot.open(plan)
    run.pause(approval(effect="k1", due_in=60, on_timeout="resume"))
    clock.advance(seconds=61)
    sweep()
    assert run.resume()["waits"][0]["status"] == "timed_out"
    run.start("k1", arguments=plan["arguments"]).refused(409, "approval_required")


def test_recall_withdraws_the_waits_and_gives_the_lease(bot: Agent, alice: Person) -> None:
    run = bot.open()
    asked = run.pause(approval())
    got = bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "The customer sent a new draft"}).ok()
    run.epoch = got["lease"]["epoch"]
    wait = run.wait("legal-approval")
    assert (wait["id"], wait["status"], run.status) == (asked["id"], "superseded", "running")
    assert any("The customer sent a new draft" in str(e["payload"]) for e in run.events())
    alice.decide(asked).refused(409, "wait_closed")
    run.do(checkpoint("again"))


def test_in_an_any_pause_a_time_out_is_no_answer(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.do(paused(callback("c", due_in=60), signal("s"), when="any"))
    clock.advance(seconds=61)
    sweep()
    assert (run.wait("c")["status"], run.status) == ("timed_out", "waiting")
    bot.signal("1", "s", run=run.id).ok(202)
    assert (run.codes, run.status) == (["clear"], "ready"), "the first answer alone counts"


def test_an_any_pause_that_nobody_answers_counts_its_time_outs(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.do(paused(callback("c", due_in=60), callback("d", due_in=90), when="any"))
    clock.advance(seconds=91)
    sweep()
    assert (run.outcome, run.status) == ("review", "review")


def test_each_with_an_answer_that_came_while_the_agent_worked(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(signal("a"), signal("b"), when="each"))
    bot.signal("1", "a", run=run.id).ok(202)
    run.resume()
    bot.signal("2", "b", run=run.id).ok(202)
    assert run.wait("b")["status"] == "satisfied"
    run.do(paused(signal("b"), when="each"))
    assert run.status == "ready", "an answer is never lost"
    assert [w["key"] for w in run.resume()["waits"]] == ["b"]


def test_what_the_next_pause_does_not_name_is_over(bot: Agent, alice: Person) -> None:
    run = bot.open()
    run.do(paused(approval("a"), signal("s"), when="each"))
    bot.signal("1", "s", run=run.id).ok(202)
    run.resume()
    run.do(paused(timer()))
    assert run.wait("a")["status"] == "superseded"
    assert [w["name"] for w in run.look()["metadata"]["waiting_for"]] == ["sleep"]


def test_a_wait_opened_early_may_time_out_before_the_pause(bot: Agent, clock: Clock) -> None:
    run = bot.open(lease_seconds=600)
    run.do(ev("wait.opened", wait=callback("c", due_in=60)))
    clock.advance(seconds=61)
    run.do(paused(callback("c", due_in=60)))
    assert (run.wait("c")["status"], run.outcome) == ("timed_out", "review")


def test_terminate_on_time_out_ends_a_run_with_nothing_to_undo(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(callback("c", due_in=60, on_timeout="terminate"))
    clock.advance(seconds=61)
    sweep()
    assert (run.status, run.wait("c")["status"]) == ("terminated", "timed_out")
    assert "timed_out" in str(run.events("terminated")[-1]["payload"])


def test_a_failure_while_undoing_is_tried_again(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(*done(effect("r", "erp.reserve")))
    alice.reject(run.pause(approval()))
    run.resume()
    run.do(failed(retry_in=60))
    assert "backing_off" in run.codes
    assert bot.claim().status == 204, "not before its next try"
    clock.advance(seconds=61)
    sweep()
    assert (run.status, run.outcome) == ("compensating", "compensate")
    assert bot.claim().ok()["undo"] == ["r"]


def test_an_undo_that_pauses_does_not_forget_why_it_undoes(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(*done(effect("r", "erp.reserve")))
    alice.reject(run.pause(approval()))
    run.resume()
    run.pause(timer(due_in=60))
    clock.advance(seconds=61)
    sweep()
    assert (run.status, run.outcome) == ("compensating", "compensate")


@pytest.mark.django_db(transaction=True)
def test_whatever_happens_at_once_the_ledger_stays_whole(bot: Agent, alice: Person, bob: Person, dave: Person) -> None:
    """Agents, reviewers, an operator and the sweeper at one run, all at the same instants."""
    run = bot.open(effect("m", "mail.send"))
    for n in range(4):
        run.rehydrate(holder="bot/a")
        run.append(paused(approval(f"a{n}"), signal(f"s{n}"), when="any"))
        wait = next((w for w in run.look()["waits"] if w["status"] == "open" and w["kind"] == "approval"), None)
        calls: list[Callable[[], Answer]] = [
            partial(bot.signal, f"e{n}", f"s{n}", run=run.id),
            partial(bot.claim, holder="bot/b"),
            partial(run.rehydrate, holder="bot/c"),
            partial(run.append, {**effect("m", "mail.send"), "start": True}),
            partial(dave.takeover, run) if n % 2 else partial(run.release),
            partial(dave.handback, run, effects=[{"key": "m", "receipt": {"id": "x"}}]),
        ]
        if wait:
            calls += [partial(alice.decide, wait), partial(bob.decide, wait, "reject", reason="no")]
        assert all(answer.status < 500 for answer in at_once(*calls))
        sweep()
    events = run.events()
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    epochs = [e["payload"]["epoch"] for e in events if e["type"] == "lease.granted"]
    assert len(epochs) == len(set(epochs))
    bot.world.command("verify_ledger", "--run", run.id)
