"""Which changes of a run bring a delivery about: exactly one a transition, in the transaction of the change."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction
from django.db.utils import IntegrityError
from django.test.utils import CaptureQueriesContext

from rehydrate import engine, sweep, verify
from rehydrate.core.refusals import Refusal
from rehydrate.ids import uuid7
from rehydrate.models import Delivery
from tests.ledger_cast import Cast, approval, callback, checkpoint, ev, plan

from .told import told, types

pytestmark = pytest.mark.django_db


def since(cast: Cast, mark: int) -> list[str]:
    return types(cast)[mark:]


def test_a_run_opened_for_workers_is_ready_once(cast: Cast) -> None:
    cast.open(holder=None)
    assert types(cast) == ["run.ready"]


def test_opening_with_a_lease_and_working_tells_nobody(cast: Cast) -> None:
    run = cast.open()
    run.append(checkpoint(), plan("a", start=True), ev("effect.executed", key="a", receipt={"id": "r"}))
    run.heartbeat()
    assert types(cast) == []


def test_a_whole_cycle(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    assert types(cast) == ["wait.opened"]
    run.decide("legal", "approve")
    assert types(cast) == ["wait.opened", "run.ready"]
    run.rehydrate()
    run.append(ev("effect.started", key="k", arguments={"n": 1}), ev("effect.executed", key="k"), ev("completed"))
    assert types(cast) == ["wait.opened", "run.ready", "run.ended"]


def test_each_row_says_what_the_run_had_come_to(cast: Cast) -> None:
    run = cast.open(holder=None)
    row = Delivery.objects.get()
    state = run.state.run
    assert (row.run_status, row.run_version, row.at, str(row.run_id)) == (
        "ready", state.version, state.updated_at, run.id,
    )  # fmt: skip


def test_ready_again_is_told_again(cast: Cast) -> None:
    run = cast.open()
    for key in ("one", "two"):
        run.pause(approval(key=key))
        run.decide(key, "approve")
        run.rehydrate()
    assert types(cast) == ["wait.opened", "run.ready"] * 2


def test_a_second_answer_while_it_is_ready_is_no_transition(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(key="one"), approval(key="two"), resume_when="each")
    run.decide("one", "approve")
    run.decide("two", "approve")
    assert types(cast) == ["wait.opened", "wait.opened", "run.ready"]


def test_a_vote_below_the_quorum_a_comment_and_a_new_deadline_tell_nobody(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval("two"))
    run.decide("two", "approve")
    run.on_wait("comment_wait", "two", comment="Seen")
    run.on_wait("extend_wait", "two", by="dave", due_in=7200)
    assert types(cast) == ["wait.opened"]


def test_a_wait_that_stays_open_under_another_pause_is_opened_once(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(key="one"), approval(key="two"), resume_when="each")
    run.decide("one", "approve")
    run.rehydrate()
    mark = len(types(cast))
    run.pause(approval(key="two"))
    assert since(cast, mark) == []


def test_a_wait_opened_before_the_pause_is_told_then(cast: Cast) -> None:
    run = cast.open()
    run.append({"type": "wait.opened", "wait": callback()})
    assert types(cast) == ["wait.opened"]
    run.pause(callback())
    assert types(cast) == ["wait.opened"]


def test_a_no_that_leaves_something_to_undo(cast: Cast) -> None:
    paid = plan("g", compensation={"action": "undo"}, start=True)
    run = cast.open(paid, ev("effect.executed", key="g", receipt={"id": "r"}))
    run.pause(approval(effect=plan("k", "order")))
    run.decide("legal", "reject")
    assert types(cast) == ["wait.opened", "run.compensating"]
    run.rehydrate()
    run.release()  # it is to be claimed anew
    assert types(cast) == ["wait.opened", "run.compensating", "run.compensating"]
    run.rehydrate()
    run.append(ev("effect.compensating", key="g"), ev("effect.compensated", key="g"))
    run.release()
    assert types(cast)[3:] == ["run.ended"]


def test_time_tells_too(cast: Cast, clock: Any) -> None:
    run = cast.open()
    run.pause({"key": "t", "name": "t", "kind": "timer", "due_in": 60})
    clock.advance(seconds=61)
    engine.tick()
    assert types(cast) == ["wait.opened", "run.ready"]
    run.rehydrate()
    clock.advance(seconds=3600)  # the lease lapses
    engine.tick()
    assert types(cast)[2:] == ["run.ready"]
    clock.advance(seconds=3600)  # nobody claims it: an alarm, no transition
    engine.tick()
    engine.tick()
    assert types(cast)[3:] == []


def test_what_was_ready_and_is_claimed_in_one_transaction_wakes_nobody(cast: Cast, clock: Any) -> None:
    run = cast.open()
    run.pause({"key": "t", "name": "t", "kind": "timer", "due_in": 60})
    clock.advance(seconds=61)
    assert run.rehydrate()["lease"] is not None
    assert types(cast) == ["wait.opened"]


def test_signals_and_callbacks_tell(cast: Cast) -> None:
    run = cast.open()
    run.pause({"key": "s", "name": "s", "kind": "signal", "due_in": 600})
    cast.signal("s", run=run.id)
    assert types(cast) == ["wait.opened", "run.ready"]


def test_a_signal_that_came_before_its_wait(cast: Cast) -> None:
    run = cast.open()
    cast.signal("s", run=run.id)
    run.pause({"key": "s", "name": "s", "kind": "signal", "due_in": 600})
    assert sorted(types(cast)) == ["run.ready", "wait.opened"]


def test_people_tell(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    mark = len(types(cast))
    run.hold("takeover")
    assert since(cast, mark) == []
    run.hold("handback", stage="after", checkpoint={"ref": "s3://x"})
    assert since(cast, mark) == ["run.ready"]
    run.hold("terminate")
    assert since(cast, mark) == ["run.ready", "run.ended"]


def test_review_is_told_once_however_its_reasons_change(cast: Cast) -> None:
    run = cast.open(plan("u", start=True), plan("v", start=True))
    run.release()
    assert types(cast) == ["run.review"]
    run.hold("reconcile", "u", outcome="not_executed")
    assert types(cast) == ["run.review"]
    run.hold("reconcile", "v", outcome="not_executed")
    assert types(cast) == ["run.review", "run.ready"]


def test_a_refusal_that_sends_the_run_to_review_tells_although_the_call_is_refused(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    run.decide("legal", "approve")
    run.rehydrate()
    mark = len(types(cast))
    with pytest.raises(Refusal):
        run.append(ev("effect.started", key="k", arguments={"n": 2}))
    assert since(cast, mark) == ["run.review"]


def test_many_runs_in_one_transaction(cast: Cast, clock: Any) -> None:
    runs = [cast.open() for _ in range(5)]
    for run in runs:
        run.pause(callback(due_in=60))
    clock.advance(seconds=61)
    sweep.catch_up([run.id for run in runs])
    assert sorted(types(cast)) == ["run.review"] * 5 + ["wait.opened"] * 5


# -- in the very transaction


def test_it_rolls_back_with_the_change(cast: Cast) -> None:
    with transaction.atomic():
        cast.open(holder=None)
        assert types(cast) == ["run.ready"]
        transaction.set_rollback(True)
    assert types(cast) == []


def test_it_costs_no_statement_more(cast: Cast) -> None:
    cast.open()  # policies are in memory by then
    with CaptureQueriesContext(connection) as told_of:
        cast.open(holder=None)
    told(cast, None)
    cast.open()
    with CaptureQueriesContext(connection) as silent_:
        cast.open(holder=None)
    assert len(told_of) == len(silent_)
    assert "rehydrate_delivery" in "".join(q["sql"] for q in told_of.captured_queries)
    assert "rehydrate_delivery" not in "".join(q["sql"] for q in silent_.captured_queries)


def test_a_flow_that_names_nobody_writes_nothing(db: None) -> None:
    cast = Cast()
    run = cast.open(holder=None)
    run.rehydrate()
    run.append(ev("completed"))
    assert not Delivery.objects.exists()


def test_the_database_itself_refuses_a_second_one_of_a_transition(cast: Cast) -> None:
    cast.open(holder=None)
    row = Delivery.objects.get()
    row.id = uuid7()
    with pytest.raises(IntegrityError), transaction.atomic():
        row.save(force_insert=True)


def test_facts_are_not_rows(cast: Cast) -> None:
    """Folding a run's history anew tells nobody anything: deliveries are no projection."""
    run = cast.open(holder=None)
    assert verify.run(run.id)[0] is None
    assert types(cast) == ["run.ready"]
