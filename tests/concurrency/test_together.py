"""What several ask for at one instant is one statement to read and one to write, and yet is everybody's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from rehydrate import ledger, loading, projections, sql, verify
from rehydrate.core.refusals import Refusal
from rehydrate.models import Run as RunRow
from tests.conftest import eventually
from tests.ledger_cast import Cast, Run, approval, checkpoint, ev, plan

from .stage import PATIENCE, Stage

pytestmark = pytest.mark.parametrize("group_commit", ["together"], indirect=True)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each statement has written."""
    seen: list[int] = []
    original = projections.save_each

    def counted(changes: list[Any], *only_if: Any) -> Any:
        seen.append(len(changes))
        return original(changes, *only_if)

    monkeypatch.setattr(projections, "save_each", counted)
    return seen


class Company:
    """One call stands before its write; those that come meanwhile wait, and are carried out together after it."""

    def __init__(self, stage: Stage, first: Callable[[], Any]) -> None:
        self.stage, self.first = stage, first
        self.held: Future[Any] | None = None
        self.started: list[Future[Any]] = []

    def join(self, call: Callable[[], Any]) -> Future[Any]:
        """Comes back when the call waits for its turn."""
        if self.held is None:
            self.held, self.go_on = self.stage.held(self.first, projections, "_write")
        self.started.append(self.stage.start(call))
        eventually(lambda: ledger.group.waiting == len(self.started), what="a call that waits for its turn")
        return self.started[-1]

    def of(self, *calls: Callable[[], Any]) -> list[Any]:
        """The answers of calls that are carried out together, or what they raised."""
        started = [self.join(call) for call in calls]
        self.go_on()
        assert self.held is not None
        assert isinstance(self.held.result(), dict)
        return [future.result(PATIENCE) for future in started]


@pytest.fixture
def company(cast: Cast, stage: Stage) -> Company:
    return Company(stage, partial(cast.open().append, ev("note", text="x")))


@pytest.fixture
def claimants(cast: Cast, stage: Stage) -> Company:
    """Those who pick are in company of their own; the first picks this run."""
    cast.open().release()
    return Company(stage, cast.claim)


def whole(*runs: Run) -> None:
    for run in runs:
        flaw, _ = verify.run(run.id)
        assert flaw is None, str(flaw)


def codes(answers: list[Any]) -> Counter[str]:
    for answer in answers:
        assert isinstance(answer, Refusal) or not isinstance(answer, Exception), repr(answer)
    return Counter(answer.code if isinstance(answer, Refusal) else "ok" for answer in answers)


def test_what_agents_append_is_one_statement(cast: Cast, company: Company, batches: list[int]) -> None:
    pausing, completed, planned, beating, ready = (cast.open() for _ in range(5))
    ready.release()
    batches.clear()
    company.of(
        partial(pausing.append, checkpoint(), {"type": "paused", "waits": [approval()]}),
        partial(completed.append, {"type": "completed"}),
        partial(planned.append, plan(start=True)),
        beating.heartbeat,
        ready.rehydrate,
    )
    assert batches == [1, 5]
    assert (pausing.state.run.checkpoint["stage"], pausing.wait("legal").status) == ("draft", "open")
    assert completed.state.run.status == "completed"
    assert planned.state.effects["k"].state == "started"
    assert beating.state.run.lease_expires_at is not None
    assert ready.state.run.status == "running"
    whole(pausing, completed, planned, beating, ready)


def test_runs_are_opened_together(cast: Cast, stage: Stage, batches: list[int]) -> None:
    opening = Company(stage, lambda: cast.open().state.run.external_id and {})
    runs = opening.of(partial(cast.open, checkpoint()), partial(cast.open, {"type": "completed"}), cast.open)
    assert batches == [1, 3]
    assert [run.state.run.status for run in runs] == ["running", "completed", "running"]
    whole(*runs)


def test_decisions_are_made_together(cast: Cast, stage: Stage, batches: list[int]) -> None:
    runs = [cast.open() for _ in range(4)]
    for run in runs:
        run.pause(approval())
    batches.clear()
    first, *others = runs
    deciding = Company(stage, partial(first.decide, "legal", "approve"))
    decisions = deciding.of(*(partial(run.decide, "legal", "reject", by="bob", reason="no") for run in others))
    assert batches == [1, 3]
    assert [decision["wait_status"] for decision in decisions] == ["rejected"] * 3
    assert first.wait("legal").status == "satisfied"
    whole(*runs)


def test_claims_get_a_run_each_and_the_oldest_first(cast: Cast, claimants: Company, batches: list[int]) -> None:
    runs = [cast.open() for _ in range(4)]
    for run in runs:
        run.release()
    batches.clear()
    envelopes = claimants.of(*[cast.claim] * 3)
    assert batches == [1, 3]
    assert {envelope["run"]["id"] for envelope in envelopes} == {run.id for run in runs[:3]}
    last = cast.claim()
    assert last is not None
    assert last["run"]["id"] == runs[3].id
    assert cast.claim() is None
    whole(*runs)


def test_more_claims_than_runs(cast: Cast, claimants: Company) -> None:
    run = cast.open()
    run.release()
    envelopes = claimants.of(*[cast.claim] * 3)
    assert [envelope["run"]["id"] for envelope in envelopes if envelope is not None] == [run.id]


def test_one_run_is_changed_one_after_the_other(cast: Cast, company: Company, batches: list[int]) -> None:
    run = cast.open()
    batches.clear()
    answers = company.of(*(partial(run.append, {"type": "completed"}) for _ in range(3)))
    assert codes(answers) == {"ok": 1, "run_ended": 2} or codes(answers) == {"ok": 1, "lease_lost": 2}
    assert batches == [1, 1]
    whole(run)


def test_the_same_run_opened_twice(cast: Cast, stage: Stage) -> None:
    opening = Company(stage, lambda: cast.open() and {})
    answers = opening.of(*[partial(cast.open, external_id="once")] * 3)
    assert len({run.id for run in answers}) == 1
    assert RunRow.objects.filter(external_id="once").count() == 1
    whole(answers[0])


def test_a_refusal_is_its_own_and_is_recorded(cast: Cast, company: Company, batches: list[int]) -> None:
    fine, fenced = cast.open(), cast.open()
    before = fenced.state.run.version
    batches.clear()
    answers = company.of(
        partial(fine.append, ev("note", text="fine")),
        partial(fenced.append, ev("note", text="old epoch"), epoch=7),
    )
    assert [isinstance(answer, Refusal) and answer.code for answer in answers] == [False, "lease_lost"]
    assert batches == [1, 2]
    assert fenced.state.run.version == before + 1  # the refusal is an event
    whole(fine, fenced)


def test_what_somebody_else_holds_keeps_nobody_else(cast: Cast, company: Company) -> None:
    held, free = cast.open(), cast.open()
    with transaction.atomic():
        loading.lock_runs([held.id])
        late = company.join(partial(held.append, ev("note", text="late")))
        (soon,) = company.of(partial(free.append, ev("note", text="soon")))
        assert soon["events"][0]["type"] == "note"
        assert not late.done()
    assert late.result(PATIENCE)["events"][0]["type"] == "note"
    whole(held, free)


def test_a_signal_that_came_before_its_wait_is_taken_alone(cast: Cast, company: Company, batches: list[int]) -> None:
    run, pausing = cast.open(), cast.open()
    cast.signal("news", run=pausing.id)
    batches.clear()
    answers = company.of(
        partial(run.append, ev("note", text="x")),
        partial(pausing.pause, {"name": "news", "kind": "signal", "due_in": 60}),
    )
    assert codes(answers) == {"ok": 2}
    assert batches == [1, 1]  # neither with the signal
    assert pausing.wait("news").status == "satisfied"
    whole(run, pausing)


def test_a_deadline_is_set_anew_alone(cast: Cast, stage: Stage, batches: list[int]) -> None:
    runs = [cast.open() for _ in range(3)]
    for run in runs:
        run.pause(approval())
    batches.clear()
    decided, extended, commented = runs
    company = Company(stage, partial(decided.decide, "legal", "approve"))
    answers = company.of(
        partial(extended.on_wait, "extend_wait", "legal", due_in=7200, reason="more time"),
        partial(commented.on_wait, "comment_wait", "legal", comment="soon"),
    )
    assert codes(answers) == {"ok": 2}
    assert batches == [1, 1]
    assert extended.wait("legal").due_at > commented.wait("legal").due_at
    whole(*runs)


def test_a_run_that_cannot_be_read_is_nobody_elses_trouble(cast: Cast, company: Company) -> None:
    broken, sound = cast.open(), cast.open()
    RunRow.objects.filter(pk=broken.id).update(missing={"no": "list"})
    failed, fine = company.of(partial(broken.append, ev("note", text="x")), partial(sound.append, ev("note", text="y")))
    assert isinstance(failed, Exception)
    assert not isinstance(failed, Refusal)
    assert fine["events"][0]["type"] == "note"
    whole(sound)


def test_a_connection_that_broke_meanwhile(cast: Cast, company: Company) -> None:
    runs = [cast.open() for _ in range(2)]
    with sql.own_connections.used() as own:
        pass
    answers = company.of(*(partial(run.append, ev("note", text="x")) for run in runs))
    assert codes(answers) == {"ok": 2}
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [own.info.backend_pid])
    run = cast.open()
    run.append(ev("note", text="after it"))
    with sql.own_connections.used() as another:
        assert another is not own
    whole(*runs, run)


def test_a_write_that_breaks_off_is_nobodys_success(cast: Cast, company: Company, monkeypatch: Any) -> None:
    """Nobody knows what was saved: everybody is told that the database did not answer, and nobody does it again."""
    runs = [cast.open() for _ in range(2)]
    before = [run.state.run.version for run in runs]
    original = sql._carry_out
    written: list[str] = []

    def cut(conn: psycopg.Connection, text: str, params: Any) -> Any:
        if text.startswith("WITH"):
            written.append(text)
            if len(written) == 2:  # the first is that of the one that stands before its write
                conn.close()
                raise psycopg.OperationalError("cut off")
        return original(conn, text, params)

    monkeypatch.setattr(sql, "_carry_out", cut)
    answers = company.of(*(partial(run.append, ev("note", text="x")) for run in runs))
    monkeypatch.undo()
    assert [type(answer).__name__ for answer in answers] == ["OperationalError", "OperationalError"]
    assert [run.state.run.version for run in runs] == before
    whole(*runs)
