"""What time does to a run (rule 6): deadlines, reminders, escalations, lapsed leases, retries, unclaimed runs."""

from __future__ import annotations

from typing import Any

import pytest

from rehydrate.core import events as ev
from rehydrate.core.refusals import Refusal

from .kit import START, Story, approval, callback, event, plan, policy, timer

PATIENT = {"groups": ["legal"], "remind_every": "10m", "escalate_to": ["leads"], "escalate_after": "30m"}


@pytest.fixture
def story() -> Story:
    return Story(policy(required=[], wait={"ok": PATIENT, "plain": {"groups": ["legal"]}})).open()


def test_a_deadline_is_exclusive(story: Story) -> None:
    story.pause(callback())
    story.later(seconds=3599, microseconds=999_999).tick()
    assert story.state.waits["cb"].open
    story.later(microseconds=1).tick()
    assert story.state.waits["cb"].status == "timed_out"
    assert story.facts(ev.WaitTimedOut)[0].due_at == story.now


def test_an_answer_at_the_deadline_is_too_late(story: Story) -> None:
    story.pause(approval("plain"))
    story.later(seconds=3600)
    with pytest.raises(Refusal) as refused:
        story.decide("plain", "approve")
    assert refused.value.code == "wait_expired"
    assert story.state.waits["plain"].status == "timed_out"
    assert story.types()[-3:] == ["wait.timed_out", "refused", "verdict"]


def test_a_timer_is_satisfied_and_never_early_or_twice(story: Story) -> None:
    story.pause(timer())
    story.later(seconds=3599).tick()
    assert story.run.status == "waiting"
    story.later(seconds=1).tick().tick()
    assert story.run.status == "ready"
    assert story.types().count("wait.satisfied") == 1


@pytest.mark.parametrize("days", [40, 400])
def test_long_timers(story: Story, days: int) -> None:
    story.pause(timer(due_in=days * 86_400))
    story.later(days=days, microseconds=-1).tick()
    assert story.run.status == "waiting"
    story.later(microseconds=1).tick()
    assert story.run.status == "ready"


@pytest.mark.parametrize(
    ("then", "status", "code"),
    [
        ("review", "review", "timeout_undetermined"),
        ("reject", "review", "timed_out"),
        ("terminate", "review", "timed_out"),
        ("resume", "ready", "clear"),
    ],
)
def test_where_a_time_out_leads(story: Story, then: str, status: str, code: str) -> None:
    story.pause(callback(on_timeout=then)).later(hours=1).tick()
    assert story.run.status == status
    assert story.codes[0] == code
    assert story.state.waits["cb"].status == "timed_out", "never shown as a person's no"


def test_after_an_outage_a_reminder_comes_once(story: Story) -> None:
    story.pause(approval("ok", due_in=86_400)).later(minutes=9).tick()
    assert not story.facts(ev.WaitReminded)
    story.later(minutes=1).tick()
    assert len(story.facts(ev.WaitReminded)) == 1
    story.later(minutes=19).tick().tick()  # one interval was missed
    first, second = story.facts(ev.WaitReminded)
    assert second.scheduled_for == first.next_at
    assert second.next_at == story.now + (first.next_at - first.scheduled_for)


def test_no_reminder_after_the_deadline(story: Story) -> None:
    story.pause(approval("ok", due_in=1200)).later(minutes=20).tick()
    assert story.types()[-2:] == ["wait.timed_out", "verdict"]


def test_an_escalation_brings_more_people_and_a_new_version(story: Story) -> None:
    story.pause(approval("ok")).later(minutes=30).tick().tick()
    wait = story.state.waits["ok"]
    assert wait.groups == ["legal", "leads"]
    assert (wait.version, wait.escalation, story.run.escalation) == (2, 1, 1)
    assert wait.open
    assert len(story.facts(ev.WaitEscalated)) == 1
    with pytest.raises(Refusal) as stale:
        story.decide("ok", "approve", version=1)
    assert stale.value.code == "stale_decision"
    story.decide("ok", "approve", by="grace")
    assert story.state.waits["ok"].status == "satisfied"


def test_a_deadline_that_escalates_does_so_once(story: Story) -> None:
    """The wait stays open for the same length again, then it goes to review."""
    story.pause(approval("ok", on_timeout="escalate", due_in=600)).later(seconds=600).tick()
    wait = story.state.waits["ok"]
    assert wait.open
    assert wait.due_at == story.now + (story.now - START)
    assert "leads" in wait.groups
    assert (wait.version, wait.on_timeout) == (2, "review")
    story.later(seconds=600).tick()
    assert story.codes == ["timeout_undetermined"]


@pytest.mark.parametrize("late", [60, 590, 610, 172_800])
def test_after_an_outage_the_second_chance_counts_from_now(story: Story, late: int) -> None:
    """Whoever it goes to then has all of the time, not what the outage left of it."""
    story.pause(callback(on_timeout="escalate", due_in=600)).later(seconds=600 + late).tick()
    wait = story.state.waits["cb"]
    assert wait.open
    assert (wait.due_at - story.now).total_seconds() == 600


def test_a_last_call_and_its_reminder_in_one_step(story: Story) -> None:
    story.pause(approval("ok", on_timeout="escalate")).later(hours=1).tick()
    assert [t for t in story.types() if t.startswith("wait.")] == ["wait.escalated", "wait.reminded"]
    before = len(story.history)
    story.tick()
    assert len(story.history) == before


@pytest.mark.parametrize(
    ("resume_when", "order", "status"),
    [
        # a: due after one hour, b: after two
        ("any", ["a"], "waiting"),  # a time-out is no answer
        ("each", ["a"], "ready"),
        ("all", ["a"], "waiting"),
        ("all", ["a", "b"], "ready"),
    ],
)
def test_each_pause_resolves_in_its_way(story: Story, resume_when: str, order: list[str], status: str) -> None:
    waits = [callback("a", on_timeout="resume"), callback("b", due_in=7200, on_timeout="resume")]
    story.pause(*waits, resume_when=resume_when).later(hours=len(order)).tick()
    assert [key for key, wait in story.state.waits.items() if not wait.open] == order
    assert story.run.status == status


def test_two_timers_of_any_the_first_one_counts(story: Story) -> None:
    """Both were due during an outage: in the order of their deadlines, and the second comes too late to count."""
    story.pause(timer("late", due_in=7200), timer("early"), resume_when="any").later(hours=3).tick()
    assert story.state.waits["early"].status == "satisfied"
    assert story.state.waits["late"].status == "superseded"


def test_each_leaves_the_others_as_they_are(story: Story) -> None:
    story.pause(callback("a"), callback("b", due_in=7200), resume_when="each").signal("a")
    before = story.state.waits["b"]
    story.rehydrate()
    story.pause({"key": "b"}, resume_when="each")
    after = story.state.waits["b"]
    assert (after.id, after.version, after.due_at) == (before.id, before.version, before.due_at)
    story.later(hours=2).tick()
    assert story.state.waits["b"].status == "timed_out"


def test_a_lapsed_lease_is_lost_and_counts_as_a_failure(story: Story) -> None:
    story.append(event("effect.planned", **plan(), start=True))
    story.later(seconds=59).add("note", text="alive")  # renews
    story.later(seconds=60)
    with pytest.raises(Refusal) as refused:
        story.add("note", text="too late")
    assert refused.value.code == "lease_lost"
    assert story.types()[-4:] == ["lease.lapsed", "effect.unknown", "refused", "verdict"]
    assert story.run.failure_count == 1
    assert story.run.status == "review"
    assert story.facts(ev.LeaseLapsed)[0].due_at == story.now


def test_a_heartbeat_renews_without_a_fact(story: Story) -> None:
    from rehydrate.core import commands as cmd
    from rehydrate.core import decide

    version = story.run.version
    story.later(seconds=59)
    story.do(lambda draft: decide.heartbeat(draft, cmd.Heartbeat(1)), operation="heartbeat")
    story.later(seconds=59).tick()
    assert story.run.version == version
    assert story.run.leased


def test_a_claimed_lease_is_short_until_the_first_call(story: Story) -> None:
    story.release()
    assert story.claim() is not None
    story.later(seconds=9).add("note", text="here")
    story.later(seconds=59).tick()
    assert story.run.status == "running"
    story.later(seconds=1).tick()
    assert not story.run.leased

    assert story.claim() is not None
    story.later(seconds=10).tick()
    assert not story.run.leased


def test_a_failure_backs_off_until_its_next_try(story: Story) -> None:
    story.add("failed", error={"code": "x"}, retry_in=30)
    assert (story.run.status, story.codes) == ("waiting", ["backing_off"])
    story.later(seconds=29, microseconds=999_999).tick()
    assert story.run.status == "waiting"
    story.later(microseconds=1).tick()
    assert story.run.status == "ready"
    assert story.run.retry_at is None


def test_failures_at_the_limit_are_told_once(story: Story) -> None:
    for _ in range(3):
        story.add("failed", error={"code": "x"}, retry_in=1).later(seconds=1).tick()
        if story.run.status == "ready":
            story.rehydrate()
    assert (story.run.status, story.codes) == ("review", ["retries_exhausted"])
    story.later(days=1).tick()
    assert story.types().count("run.escalated") == 1
    assert story.run.escalation == 1


def test_nobody_claims_it(story: Story) -> None:
    story.release()
    story.later(minutes=4, seconds=59).tick()
    assert story.run.unclaimed_at is None
    story.later(seconds=1).tick().later(hours=1).tick()
    assert story.types().count("run.unclaimed") == 1
    story.claim()
    assert story.run.unclaimed_at is None


def test_an_undo_given_back_is_an_alarm_as_well(story: Story) -> None:
    """The verdict is the same as before the lease: it must be claimable, and no silence, all the same."""
    story = Story(policy(required=[], on_reject="compensate")).open()
    story.append(event("effect.planned", **plan(), compensation={"action": "cancel"}, start=True))
    story.append(event("effect.executed", key="k", receipt={"id": "r"}), event("cancelled"))
    story.release()
    assert story.run.status == "compensating"
    assert story.rehydrate().outcome == "compensate"
    story.release()
    assert story.run.status == "compensating"
    assert story.run.ready_since == story.now
    story.later(minutes=5).tick()
    assert story.run.unclaimed_at == story.now


def test_an_ended_run_has_nothing_due(story: Story) -> None:
    story.append(event("wait.opened", wait=timer()), event("completed"))
    before = len(story.history)
    story.later(days=1).tick()
    assert len(story.history) == before
    assert story.state.waits["t"].status == "cancelled"


def test_a_person_who_holds_the_run_is_not_pressed(story: Story) -> None:
    story.pause(approval("ok"))
    story.hold("takeover").later(days=1).tick()
    assert story.run.status == "taken_over"
    assert story.types()[-1] == "taken_over"


def test_approval_by_time_out_only_where_the_flow_allows_it() -> None:
    rules: dict[str, Any] = {"groups": ["legal"], "allow_timeout_approve": True}
    effects = {"order": {"impact": "money", "needs_approval": "ok"}}
    story = Story(policy(required=[], wait={"ok": rules, "plain": {"groups": ["legal"]}}, effect=effects)).open()
    with pytest.raises(Refusal, match="does not allow"):
        story.pause(approval("plain", plan(), on_timeout="continue"))
    story.pause(approval("ok", plan(), on_timeout="continue")).later(hours=1).tick()
    assert story.run.status == "ready"
    assert story.state.effects["k"].authorised
    story.rehydrate()
    story.append(event("effect.started", key="k", arguments={"n": 1}))
    assert story.state.effects["k"].state == "started"
