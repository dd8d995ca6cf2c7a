"""Of any number at once one wins, the others are told, and the ledger is whole (rules 3, 4, 6, 7, 8)."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User

from rehydrate import engine, loading, projections, services, signals, sweep, verify
from rehydrate.callers import for_user
from rehydrate.core.refusals import Refusal
from rehydrate.models import Decision, Group, LedgerEvent, Membership, Signal
from rehydrate.models import Run as RunRow
from tests.ledger_cast import Cast, Run, approval, callback, ev, plan

from .stage import Stage, at_once, elsewhere


def codes(answers: list[Any]) -> Counter[str]:
    """How many were fine, and how many were refused with which code; anything else is a fault of ours."""
    for answer in answers:
        assert isinstance(answer, Refusal) or not isinstance(answer, Exception), repr(answer)
    return Counter(answer.code if isinstance(answer, Refusal) else "ok" for answer in answers)


def whole(*runs: Run) -> None:
    for run in runs:
        flaw, _ = verify.run(run.id)
        assert flaw is None, str(flaw)


def types(run: Run) -> list[str]:
    return list(LedgerEvent.objects.filter(run_id=run.id).order_by("seq").values_list("type", flat=True))


@pytest.fixture
def crowd(cast: Cast) -> list[str]:
    """Eight people of legal."""
    names = [f"lawyer{n}" for n in range(8)]
    for name in names:
        user = User.objects.create_user(name, first_name=name.title())
        Membership.objects.create(group=Group.objects.get(workspace=cast.workspace, name="legal"), user=user)
        cast.people[name] = for_user(user, channel="api")
    return names


# -- deciding


def test_one_of_many_deciders_wins_and_the_others_are_told_who(cast: Cast, crowd: list[str]) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    choices = ["approve", "reject"] * 4
    answers = at_once(*(partial(run.decide, "legal", c, by=n) for c, n in zip(choices, crowd, strict=True)))
    assert codes(answers) == {"ok": 1, "wait_closed": 7}
    (won,) = [answer for answer in answers if not isinstance(answer, Refusal)]
    for answer in answers:
        if isinstance(answer, Refusal):
            told = answer.extra["wait"]["decision"]
            assert (told["decided_by"], told["choice"]) == (won["decided_by"], won["choice"])
            assert told["decided_at"] == won["decided_at"]
    assert Decision.objects.filter(run_id=run.id).count() == 1
    assert run.wait("legal").status == {"approve": "satisfied", "reject": "rejected"}[won["choice"]]
    whole(run)


def test_a_quorum_is_met_once(cast: Cast, crowd: list[str]) -> None:
    run = cast.open()
    run.pause(approval("two", effect=plan("k", "order")))
    answers = at_once(*(partial(run.decide, "two", "approve", by=name) for name in crowd))
    assert codes(answers) == {"ok": 2, "wait_closed": 6}
    assert len(run.wait("two").votes) == 2
    whole(run)


def test_one_person_in_two_tabs_votes_once(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval("two", effect=plan("k", "order")))
    answers = at_once(*[partial(run.decide, "two", "approve", by="alice")] * 4)
    assert codes(answers) == {"ok": 1, "already_voted": 3}
    assert run.wait("two").status == "open"
    whole(run)


def test_a_deadline_that_has_passed_wins_over_a_decision(cast: Cast, clock: Any) -> None:
    runs = [cast.open() for _ in range(4)]
    for run in runs:
        run.pause(approval(effect=plan("k", "order"), due_in=60))
    clock.advance(seconds=60)
    decisions = [partial(run.decide, "legal", "approve") for run in runs]
    answers = at_once(*decisions, engine.tick, engine.tick)
    assert codes(answers[:4]) == {"wait_expired": 4}
    for run in runs:
        assert types(run).count("wait.timed_out") == 1
        assert run.wait("legal").decision is None
    whole(*runs)


def test_a_decision_that_is_overtaken_by_its_deadline_is_too_late(cast: Cast, clock: Any, stage: Stage) -> None:
    """A decision that was made in time and written after the time-out was decided on what is no more."""
    run = cast.open()
    run.pause(approval(effect=plan("k", "order"), due_in=60))
    clock.advance(seconds=50)
    deciding, go_on = stage.held(partial(run.decide, "legal", "approve"), projections, "_write")
    clock.advance(seconds=20)
    assert sweep.catch_up([run.id]) == 1
    go_on()
    assert codes([deciding.result()]) == {"wait_expired": 1}
    assert types(run).count("wait.timed_out") == 1
    assert run.wait("legal").decision is None
    whole(run)


def test_a_decision_that_waited_for_the_time_out_is_too_late(cast: Cast, clock: Any, stage: Stage) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order"), due_in=60))
    clock.advance(seconds=60)
    sweeping, go_on = stage.held(engine.tick, projections, "save")
    deciding = stage.blocked(partial(run.decide, "legal", "approve"))
    go_on()
    assert sweeping.result() == 1
    assert codes([deciding.result()]) == {"wait_expired": 1}
    whole(run)


# -- leases


def test_of_many_rehydrates_one_gets_the_lease(cast: Cast) -> None:
    run = cast.open()
    run.pause(callback())
    services.receive_hook(run.wait("cb").token, {}, "w")
    answers = at_once(*(partial(run.rehydrate, f"h{n}") for n in range(8)))
    assert codes(answers) == {"ok": 1, "lease_held": 7}
    (won,) = [answer for answer in answers if not isinstance(answer, Refusal)]
    assert won["lease"]["epoch"] == run.state.run.epoch == 2
    assert {a.extra["held_by"] for a in answers if isinstance(a, Refusal)} == {won["lease"]["holder"]}
    whole(run)


def test_each_run_is_claimed_once(cast: Cast) -> None:
    runs = [cast.open(holder=None) for _ in range(5)]
    answers = at_once(*(partial(cast.claim, f"h{n}") for n in range(12)))
    claimed = [answer["run"]["id"] for answer in answers if answer is not None]
    assert sorted(claimed) == sorted(run.id for run in runs)
    assert {run.state.run.epoch for run in runs} == {1}
    whole(*runs)


def test_claims_and_rehydrates_at_once(cast: Cast) -> None:
    run = cast.open(holder=None)
    calls = [partial(cast.claim, f"c{n}") for n in range(4)]
    answers = at_once(*calls, *(partial(run.rehydrate, f"h{n}") for n in range(4)))
    granted = [a for a in answers if a is not None and not isinstance(a, Refusal) and a["lease"] is not None]
    assert len(granted) == 1
    assert types(run).count("lease.granted") == 1
    whole(run)


def test_a_lapsed_lease_counts_once_whoever_finds_it(cast: Cast, clock: Any) -> None:
    run = cast.open(plan("k", start=True), lease_seconds=10)
    clock.advance(seconds=10)
    calls: list[Any] = [
        partial(run.append, ev("note", text="late")),
        run.heartbeat,
        engine.tick,
        engine.tick,
        cast.claim,
    ]
    answers = at_once(*calls)
    assert codes(answers[:2]) == {"lease_lost": 2}
    assert (types(run).count("lease.lapsed"), types(run).count("effect.unknown")) == (1, 1)
    assert run.state.run.failure_count == 1
    whole(run)


def test_an_append_that_a_takeover_overtakes_is_fenced(cast: Cast, stage: Stage) -> None:
    """What it was decided on is no more when it is written: so it is decided anew, on what the takeover has left."""
    run = cast.open(plan("k", start=True))
    appending, go_on = stage.held(partial(run.append, ev("note", text="too late")), projections, "_write")
    with elsewhere():
        run.hold("takeover")
    go_on()
    assert codes([appending.result()]) == {"lease_lost": 1}
    assert types(run)[-3:] == ["taken_over", "effect.unknown", "refused"]
    whole(run)

    run = cast.open()
    taking, go_on = stage.held(partial(run.hold, "takeover"), projections, "_write")
    with elsewhere():
        run.append(ev("note", text="in time"))
    go_on()
    assert codes([taking.result()]) == {"ok": 1}
    assert types(run)[-2:] == ["note", "taken_over"]
    whole(run)


@pytest.mark.parametrize("by", ["an event", "a heartbeat, which is none"])
def test_what_is_overtaken_is_done_again(by: str, cast: Cast, stage: Stage) -> None:
    run = cast.open()
    appending, go_on = stage.held(partial(run.append, ev("note", text="first read")), projections, "_write")
    with elsewhere():
        if by == "an event":
            run.append(ev("note", text="first written"))
        else:
            run.heartbeat()
    go_on()
    assert codes([appending.result()]) == {"ok": 1}
    texts = [row.payload["text"] for row in LedgerEvent.objects.filter(run_id=run.id, type="note").order_by("seq")]
    assert texts == ["first written", "first read"][-len(texts) :]
    whole(run)


def test_appends_and_a_takeover_in_any_order(cast: Cast) -> None:
    run = cast.open()
    notes = [partial(run.append, ev("note", text=str(n))) for n in range(6)]
    answers = at_once(*notes, partial(run.hold, "takeover"))
    assert set(codes(answers)) <= {"ok", "lease_lost"}
    seen = types(run)
    assert "note" not in seen[seen.index("taken_over") :]
    assert seen.count("note") == codes(answers[:-1])["ok"]
    assert list(LedgerEvent.objects.filter(run_id=run.id).order_by("seq").values_list("seq", flat=True)) == list(
        range(1, len(seen) + 1)
    )
    whole(run)


def test_one_effect_is_started_once(cast: Cast) -> None:
    """Two threads of one agent, under the same epoch."""
    run = cast.open()
    answers = at_once(*[partial(run.append, plan("k", start=True))] * 6)
    assert codes(answers) == {"ok": 6}
    assert sorted(answer["effects"][0]["granted"] for answer in answers) == [False] * 5 + [True]
    assert (types(run).count("effect.planned"), types(run).count("effect.started")) == (1, 1)
    whole(run)


# -- opening


def test_one_external_id_opens_one_run(cast: Cast) -> None:
    def open_it(n: int) -> Run:
        return cast.open(ev("note", text=str(n)), external_id="the same", holder=f"h{n}")

    answers = at_once(*(partial(open_it, n) for n in range(8)))
    assert len({answer.id for answer in answers}) == 1
    assert sorted(answer.epoch for answer in answers) == [0] * 7 + [1], "the others get no lease"
    assert RunRow.objects.filter(external_id="the same").count() == 1
    assert types(answers[0]).count("note") == 1
    whole(answers[0])


def test_one_external_id_with_two_inputs(cast: Cast) -> None:
    calls = [partial(cast.open, external_id="x", input={"digest": f"d{n}"}) for n in range(4)]
    assert codes(at_once(*calls)) == {"ok": 1, "run_conflict": 3}


# -- signals

TARGETS = ["run", "external_id", "correlation"]


def send(cast: Cast, run: Run, target: str, *, correlation: str | None = None) -> Any:
    aim: dict[str, Any] = {
        "run": {"run": run.id},
        "external_id": {"flow": "flow", "external_id": run.external_id},
        "correlation": {"correlation": correlation or run.external_id},
    }[target]
    return cast.signal("cb", **aim)


def answered_once(run: Run) -> None:
    wait = run.wait("cb")
    assert wait.status == "satisfied"
    assert types(run).count("wait.signalled") == 1
    (signal,) = Signal.objects.all()
    assert (signal.state, str(signal.wait_id)) == ("matched", wait.id)
    assert "signal.noted" not in types(run)
    assert run.state.run.status == "ready"
    whole(run)


@pytest.mark.parametrize("target", TARGETS)
def test_a_signal_while_its_wait_is_being_written(target: str, cast: Cast, stage: Stage) -> None:
    """The pause has looked for signals and found none; its commit is not visible yet."""
    run = cast.open()
    pausing, go_on = stage.held(partial(run.pause, callback(correlation=run.external_id)), projections, "save")
    sending = stage.blocked(partial(send, cast, run, target))
    go_on()
    assert codes([pausing.result(), sending.result()]) == {"ok": 2}
    assert sending.result()["state"] == "matched"
    answered_once(run)


@pytest.mark.parametrize("target", TARGETS)
def test_a_pause_while_a_signal_is_between_stored_and_matched(target: str, cast: Cast, stage: Stage) -> None:
    """The pause takes it; the sender is told so, and not that it came too late."""
    run = cast.open()
    sending, go_on = stage.held(partial(send, cast, run, target), services, "match_signal")
    run.pause(callback(correlation=run.external_id))
    assert run.wait("cb").status == "satisfied"
    go_on()
    answer = sending.result()
    assert (answer["state"], answer["matched"]) == ("matched", [run.wait("cb").id])
    answered_once(run)


@pytest.mark.parametrize("target", TARGETS)
def test_a_pause_while_a_signal_has_seen_no_wait(target: str, cast: Cast, stage: Stage) -> None:
    """The signal looked before the wait was there, and is about to be kept for later."""
    run = cast.open()
    sending, go_on = stage.held(partial(send, cast, run, target), signals, "set_state")
    run.pause(callback(correlation=run.external_id))
    go_on()
    assert sending.result()["state"] == "matched"
    answered_once(run)


@pytest.mark.parametrize("target", TARGETS)
def test_a_signal_and_a_pause_in_any_order(target: str, cast: Cast) -> None:
    for _ in range(4):
        Signal.objects.all().delete()
        run = cast.open()
        answers = at_once(partial(run.pause, callback(correlation=run.external_id)), partial(send, cast, run, target))
        assert codes(answers) == {"ok": 2}
        answered_once(run)


def test_a_signal_answers_one_of_two_runs_that_open_their_waits_at_once(cast: Cast) -> None:
    runs = [cast.open() for _ in range(4)]
    send(cast, runs[0], "correlation", correlation="po-1")
    answers = at_once(*(partial(run.pause, callback(correlation="po-1")) for run in runs))
    assert codes(answers) == {"ok": 4}
    assert sorted(run.wait("cb").status for run in runs) == ["open"] * 3 + ["satisfied"]
    whole(*runs)


def test_a_signal_on_its_way_to_one_wait_is_not_taken_by_another(cast: Cast, stage: Stage) -> None:
    """It has found the one wait it fits; before it locks that run, another one opens and takes it."""
    first, second = cast.open(), cast.open()
    first.pause(callback(correlation="po-1"))
    sending, go_on = stage.held(partial(send, cast, first, "correlation", correlation="po-1"), services, "_answer")
    second.pause(callback(correlation="po-1"))
    go_on()
    answer = sending.result()
    satisfied = [run for run in (first, second) if run.wait("cb").status == "satisfied"]
    assert len(satisfied) == 1
    assert answer["matched"] == [satisfied[0].wait("cb").id]
    whole(first, second)


def test_one_signal_sent_many_times_at_once_is_one(cast: Cast) -> None:
    run = cast.open()
    run.pause(callback())
    answers = at_once(*[partial(cast.signal, "cb", id="same", run=run.id)] * 6)
    states = Counter(answer["state"] for answer in answers)
    assert states == {"matched": 1, "duplicate": 5}
    answered_once(run)


def test_a_callback_url_called_many_times_at_once(cast: Cast) -> None:
    run = cast.open()
    run.pause(callback())
    token = run.wait("cb").token
    answers = at_once(*(partial(services.receive_hook, token, {"n": n}, f"w{n}") for n in range(6)))
    assert Counter(answer["state"] for answer in answers) == {"matched": 1, "late": 5}
    assert types(run).count("wait.signalled") == 1
    assert types(run).count("signal.noted") == 5, "what came too late is kept in the history"
    whole(run)


# -- the clock


def test_two_tickers_do_everything_once(cast: Cast, clock: Any) -> None:
    runs = [cast.open() for _ in range(30)]
    for run in runs:
        run.pause(callback(due_in=60))
    clock.advance(seconds=60)
    answers = at_once(engine.tick, engine.tick, engine.tick)
    assert codes(answers) == {"ok": 3}
    assert sum(answers) == 30
    for run in runs:
        assert types(run).count("wait.timed_out") == 1
    assert engine.tick() == 0
    whole(*runs[:5])


def test_a_second_sweeper_passes_over_what_the_first_one_holds(cast: Cast, clock: Any, stage: Stage) -> None:
    held, free = cast.open(), cast.open()
    for run in (held, free):
        run.pause(callback(due_in=60))
    clock.advance(seconds=60)
    sweeping, go_on = stage.held(partial(sweep.catch_up, [held.id]), projections, "save")
    assert sweep.catch_up([held.id, free.id]) == 1
    assert free.wait("cb").status == "timed_out"
    assert held.wait("cb").status == "open"
    go_on()
    assert sweeping.result() == 1
    whole(held, free)


def test_who_may_decide_is_known_until_anybodys_rights_change(cast: Cast) -> None:
    """Those of a workspace are read once; whoever leaves is out, and whoever joins is in, with the next decision."""
    first, second, third = (cast.open() for _ in range(3))
    for run in (first, second, third):
        run.pause(approval())
    first.decide("legal", "approve")
    kept = loading._people_at
    assert kept is not None
    assert kept[1][str(cast.workspace.pk)].groups["legal"] == ["alice", "bob"]
    Membership.objects.filter(user__username="alice").delete()
    with pytest.raises(Refusal) as refusal:
        second.decide("legal", "approve")
    assert refusal.value.code == "not_eligible"
    carol = User.objects.create_user("carol")
    Membership.objects.create(group=Group.objects.get(workspace=cast.workspace, name="legal"), user=carol)
    cast.people["carol"] = for_user(carol, channel="api")
    third.decide("legal", "approve", by="carol")
    assert third.wait("legal").status == "satisfied"
    whole(first, second, third)
