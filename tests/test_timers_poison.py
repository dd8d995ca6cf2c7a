"""A run that keeps failing is set aside after its limit, is told once, and holds up nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection

from rehydrate import engine, sweep, verify
from rehydrate.core import decide
from rehydrate.models import AdminEvent, LedgerEvent, Timer, Trouble
from rehydrate.models import Run as RunRow
from tests.conftest import eventually
from tests.ledger_cast import Cast, Run, callback, timer
from tests.timing import Ticker, start_ticker

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def cast() -> Cast:
    return Cast()


def asleep(cast: Cast, count: int, *, due_in: int = 60) -> list[Run]:
    runs = [cast.open() for _ in range(count)]
    for run in runs:
        run.pause(timer(due_in=due_in))
    return runs


def spoil(run: Run) -> None:
    """What no code of ours has written: the row of its wait cannot be read as one any more."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE rehydrate_wait SET policy = '\"no object\"' WHERE run_id = %s", [run.id])


def mend(run: Run) -> None:
    policy = LedgerEvent.objects.get(run_id=run.id, type="paused").payload["waits"][0]["policy"]
    from rehydrate.models import Wait

    Wait.objects.filter(run_id=run.id).update(policy=policy)


def told(run: Run) -> int:
    return AdminEvent.objects.filter(act="run.set_aside", subject=run.id).count()


def fired(*runs: Run) -> bool:
    """Each exactly once, and never early (the database refuses that, too)."""
    events = [LedgerEvent.objects.filter(run_id=run.id, type="wait.satisfied").count() for run in runs]
    assert max(events) <= 1
    return min(events) == 1


def until_set_aside(clock: Any) -> None:
    for _ in range(sweep.TRIES + 1):
        engine.tick()
        clock.advance(seconds=sweep.PAUSE.total_seconds())


def test_a_spoilt_row_among_sound_ones(cast: Cast, clock: Any) -> None:
    sound = asleep(cast, 20)
    (poison,) = asleep(cast, 1)
    spoil(poison)
    clock.advance(seconds=60)
    engine.tick()
    assert fired(*sound)
    trouble = Trouble.objects.get()
    assert (str(trouble.pk), trouble.set_aside_at) == (poison.id, None)
    assert "ValidationError" in trouble.error

    until_set_aside(clock)
    trouble.refresh_from_db()
    assert (trouble.tries, trouble.retry_at, told(poison)) == (sweep.TRIES, None, 1)
    clock.advance(days=1)
    engine.tick()
    trouble.refresh_from_db()
    assert (trouble.tries, told(poison)) == (sweep.TRIES, 1), "it is tried no more"
    later = asleep(cast, 3)
    clock.advance(seconds=60)
    engine.tick()
    assert fired(*later)


def test_an_operator_has_it_tried_again(cast: Cast, clock: Any) -> None:
    (poison,) = asleep(cast, 1)
    spoil(poison)
    clock.advance(seconds=60)
    until_set_aside(clock)
    assert told(poison) == 1

    assert sweep.try_again(poison.id, by="dave", reason="looked at it")
    until_set_aside(clock)
    assert told(poison) == 2, "set aside again, and told again"

    mend(poison)
    assert sweep.try_again(poison.id, by="dave")
    engine.tick()
    assert fired(poison)
    assert not Trouble.objects.exists()
    assert not sweep.try_again(poison.id, by="dave"), "it is not set aside"
    flaw, _ = verify.run(poison.id)
    assert flaw is None
    acts = AdminEvent.objects.filter(act="run.try_again").values_list("actor_id", flat=True)
    assert list(acts) == ["dave", "dave"]


def test_code_that_raises_for_one_run(cast: Cast, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, (poison,) = asleep(cast, 5), asleep(cast, 1)
    apply_overdue = decide.apply_overdue

    def raises(draft: Any) -> None:
        if draft.run.id == poison.id:
            raise ZeroDivisionError("a fault of ours")
        apply_overdue(draft)

    clock.advance(seconds=60)
    monkeypatch.setattr(decide, "apply_overdue", raises)
    until_set_aside(clock)
    assert fired(*sound)
    assert Trouble.objects.get().error == "ZeroDivisionError: a fault of ours"
    monkeypatch.undo()  # a newer version, say
    assert sweep.try_again(poison.id, by="dave")
    engine.tick()
    assert fired(poison)


def test_what_a_request_changed_since_is_sound_again(cast: Cast, clock: Any) -> None:
    run = cast.open()
    run.pause(callback(due_in=60))
    spoil(run)
    clock.advance(seconds=60)
    until_set_aside(clock)
    mend(run)
    assert run.rehydrate()["verdict"]["outcome"] == "review"  # the next request applies what is due, as ever
    engine.tick()
    assert not Trouble.objects.exists()


def test_more_of_them_than_a_batch_takes(cast: Cast, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most overdue of all are poisonous: whoever comes after them has their turn all the same."""
    monkeypatch.setattr(engine, "BATCH", 4)
    poisons = asleep(cast, 9, due_in=30)
    for poison in poisons:
        spoil(poison)
    sound = asleep(cast, 9)
    clock.advance(seconds=60)
    engine.tick()
    assert fired(*sound)
    until_set_aside(clock)
    assert [told(poison) for poison in poisons] == [1] * len(poisons)


def test_claims_go_on_beside_it(cast: Cast, clock: Any) -> None:
    """Who claims applies what is due to others, too."""
    (poison,), (sound,) = asleep(cast, 1), asleep(cast, 1)
    spoil(poison)
    clock.advance(seconds=60)
    envelope = cast.claim()
    assert envelope is not None
    assert envelope["run"]["id"] == sound.id
    assert Trouble.objects.get().tries == 1


def test_a_database_that_fails_is_nobodys_fault(cast: Cast, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = asleep(cast, 3)
    clock.advance(seconds=60)

    def gone(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr("rehydrate.projections.save", gone)
        with pytest.raises(OperationalError):
            engine.tick()
    assert not Trouble.objects.exists()
    engine.tick()
    assert fired(*runs)


def test_a_run_that_somebody_holds_is_not_blamed(cast: Cast, clock: Any) -> None:
    (run,) = asleep(cast, 1)
    spoil(run)
    clock.advance(seconds=60)
    engine.tick()
    before = Trouble.objects.get().tries
    clock.advance(seconds=sweep.PAUSE.total_seconds())
    with held(run):
        engine.tick()
    assert Trouble.objects.get().tries == before


def held(run: Run) -> Any:
    """Another session's lock on the run."""
    import contextlib

    import psycopg

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        with psycopg.connect(**connection.get_connection_params() | {"cursor_factory": None}) as other:
            other.execute("SELECT 1 FROM rehydrate_run WHERE id = %s FOR UPDATE", [run.id])
            yield
            other.rollback()

    return lock()


# -- workers that do not live to tell


@pytest.fixture
def ticker() -> Iterator[Callable[..., Ticker]]:
    started: list[Ticker] = []

    def start(*words: str) -> Ticker:
        started.append(start_ticker(*words))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.mark.processes
def test_a_run_that_kills_its_worker_is_set_aside(cast: Cast, ticker: Callable[..., Ticker]) -> None:
    """Whoever is killed says nothing: its tries were counted before. The others are done meanwhile."""
    sound, (poison,) = asleep(cast, 8, due_in=1), asleep(cast, 1, due_in=1)
    deaths = 0

    def told_once() -> bool:
        nonlocal deaths
        one = ticker("--dies-by", poison.id)
        eventually(lambda: one.process.poll() is not None or told(poison), within=60, what="a death, or its end")
        deaths += one.process.poll() is not None
        return told(poison) == 1

    eventually(told_once, within=240, what="setting it aside")
    assert 2 <= deaths <= sweep.TRIES + 1
    eventually(lambda: fired(*sound), within=60, what="the others")
    assert Trouble.objects.get().error == ""
    later = asleep(cast, 3, due_in=1)
    eventually(lambda: fired(*later), within=60, what="what comes later")
    assert told(poison) == 1
    for run in sound:
        assert verify.run(run.id)[0] is None


@pytest.mark.processes
def test_a_run_at_which_a_worker_hangs_is_set_aside(cast: Cast, ticker: Callable[..., Ticker]) -> None:
    sound, (poison,) = asleep(cast, 8, due_in=1), asleep(cast, 1, due_in=1)
    one = ticker("--hangs-by", poison.id, "--longest", "2")
    eventually(lambda: told(poison) == 1, within=120, what="setting it aside")
    assert fired(*sound)
    assert one.process.poll() is None, "the same worker goes on"
    assert "TookTooLong" in Trouble.objects.get().error


def test_what_agents_fail_at_is_told_once(cast: Cast, clock: Any) -> None:
    """Leases that lapse, by the tick alone: at the limit the run is in review, with one escalation."""
    run = cast.open(holder="h", lease_seconds=5)
    for _ in range(6):
        clock.advance(seconds=60)
        engine.tick()
        cast.claim()
    row = RunRow.objects.get(pk=run.id)
    assert (row.status, row.failure_count, row.escalation) == ("review", 3, 1)
    types = list(LedgerEvent.objects.filter(run_id=run.id).values_list("type", flat=True))
    assert (types.count("lease.lapsed"), types.count("run.escalated")) == (3, 1)
    assert not Timer.objects.filter(run_id=run.id, fired_at=None).exists()
