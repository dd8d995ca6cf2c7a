"""What each operation costs in statements and commits, and that lists and old runs cost no more (house.md: cost rule).

A number that grows here is a change to think about; one that shrinks is to be pinned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from rehydrate import engine, ledger, selectors, sweep

from .ledger_cast import Cast, Run, approval, callback, checkpoint, ev, plan

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def cast() -> Cast:
    """One that has opened a run before: policies and names are in memory by then."""
    cast = Cast()
    warm = cast.open()
    warm.pause(approval(effect=plan("k", "order")))
    return cast


@contextmanager
def costs(statements: int, commits: int = 0) -> Iterator[None]:
    """`commits` are those of transactions of several statements; the statement that saves is one by itself."""
    with CaptureQueriesContext(connection) as captured:
        yield
    sent = [query["sql"].lstrip() for query in captured.captured_queries]
    work = [sql for sql in sent if not sql.startswith(("BEGIN", "COMMIT"))]
    seen = len(work), sum(sql.startswith("COMMIT") for sql in sent)
    assert seen == (statements, commits), "\n".join(
        [f"{seen} instead of {(statements, commits)}", *(s[:140] for s in sent)]
    )


def test_opening(cast: Cast) -> None:
    with costs(2):
        cast.open()
    with costs(2):
        cast.open(checkpoint(), {"type": "paused", "waits": [approval(effect=plan("k", "order"))]})


def test_opening_what_is_known(cast: Cast) -> None:
    run = cast.open()
    with costs(3):
        cast.open(external_id=run.external_id)


@pytest.mark.parametrize(
    "events",
    [
        [ev("note", text="x")],
        [checkpoint(), ev("external_ref", system="erp", id="1"), ev("note", text="x")],
        [plan("a", start=True), ev("effect.executed", key="a", receipt={"id": "r"})],
        [*(plan(f"e{n}") for n in range(40))],
        [ev("failed", error={"code": "x"}, retry_in=5)],
        [ev("completed")],
    ],
    ids=["note", "three", "effect", "forty effects", "failed", "completed"],
)
def test_appending(cast: Cast, events: list[Any]) -> None:
    run = cast.open()
    with costs(2):
        run.append(*events)


def test_appending_a_pause(cast: Cast) -> None:
    run = cast.open()
    with costs(2):
        run.pause(approval(effect=plan("k", "order")))
    run = cast.open()
    with costs(6, commits=1):  # read twice: the lock and the look for a signal that came before
        run.pause(callback())


def test_a_state_beside_the_checkpoint_costs_no_more(cast: Cast) -> None:
    run = cast.open()
    with costs(2):
        run.append(checkpoint(state={"memory": 1}))


def test_the_rest_of_a_cycle(cast: Cast) -> None:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    wait = run.wait("legal")
    with _state_of(run, wait), costs(2):
        run.decide("legal", "approve")
    with costs(2):
        run.rehydrate()
    with costs(2):
        run.append(ev("effect.started", key="k", arguments={"n": 1}), ev("effect.executed", key="k"), ev("completed"))


@contextmanager
def _state_of(run: Run, wait: Any) -> Iterator[None]:
    """The cast looks a wait up before it decides; that is not the service's cost."""
    run.wait = lambda key: wait  # type: ignore[method-assign]
    yield
    del run.wait


def test_leases(cast: Cast) -> None:
    run = cast.open()
    with costs(2):
        run.heartbeat()
    with costs(2):
        run.release()
    with costs(2):
        assert cast.claim() is not None
    with costs(2, commits=1):
        assert cast.claim() is None


def test_a_refusal_is_written_in_one_statement_too(cast: Cast) -> None:
    from rehydrate.core.refusals import Refusal

    run = cast.open()
    with costs(2), pytest.raises(Refusal, match="lease"):
        run.append(ev("note", text="fenced"), epoch=7)


@pytest.mark.parametrize("many", [1, 25])
def test_time_costs_by_the_batch(cast: Cast, clock: Any, many: int) -> None:
    runs = [cast.open() for _ in range(many)]
    for run in runs:
        run.pause(callback(due_in=60))
    clock.advance(seconds=60)
    with costs(4 if many == 1 else 5, commits=1):  # how many are joined is said before
        assert sweep.catch_up([run.id for run in runs]) == many
    assert {run.wait("cb").status for run in runs} == {"timed_out"}
    with costs(4, commits=1):  # of a transaction that wrote nothing
        assert engine.tick() == 0


def test_many_are_written_without_comparing_each_with_each(cast: Cast, clock: Any) -> None:
    runs = [cast.open() for _ in range(25)]
    for run in runs:
        run.pause(callback(due_in=60))
    clock.advance(seconds=60)
    with CaptureQueriesContext(connection) as captured:
        assert sweep.catch_up([run.id for run in runs]) == 25
    *_, settings, saving, _ = [query["sql"] for query in captured.captured_queries]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(settings)
        cursor.execute(f"EXPLAIN {saving}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert plan.count("Update on") == 3, plan
    assert plan.count("Hash") >= 3, plan
    assert "Nested Loop" not in plan, plan


def test_the_thousandth_event_costs_what_the_first_did(cast: Cast) -> None:
    """And loads no more: neither closed waits nor effects that are done."""
    run = cast.open(lease_seconds=3600)
    for batch in range(10):
        keys = [f"{batch}-{n}" for n in range(50)]
        run.append(*(plan(key, start=True) for key in keys))
        run.append(*(ev("effect.executed", key=key, receipt={"id": key}) for key in keys))
    seen: list[int] = []

    def look(draft: Any) -> None:
        seen.append(len(draft.state.effects) + len(draft.state.waits))

    with costs(1):
        ledger.change(run.id, look, actor=cast.bot.actor(), operation="look", full=False, keys=["0-0"])
    assert seen == [1]
    with costs(2):
        run.append(plan("one more", start=True))


def test_only_rows_that_changed_are_written(cast: Cast) -> None:
    """Also where the verdict needs all effects, and the run is loaded a second time: a pause in an undo."""
    done = [plan(f"e{n}", compensation={"action": "undo"}, start=True) for n in range(5)]
    run = cast.open(*done, *(ev("effect.executed", key=event["key"]) for event in done), ev("cancelled"))
    run.release()
    run.rehydrate()
    before = _written(run)
    run.append(ev("effect.compensating", key="e3"), ev("effect.compensated", key="e3"))
    run.pause(callback())
    assert [key for key, row in _written(run).items() if before[key] != row] == ["e3"]


def _written(run: Run) -> dict[str, int]:
    """By which transaction each effect's row was written last."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT key, xmin::text::bigint FROM rehydrate_effect WHERE run_id = %s", [run.id])
        return dict(cursor.fetchall())


LISTS: dict[str, Callable[[Cast], Any]] = {
    "runs": lambda cast: selectors.list_runs(cast.people["dave"], filters={}, cursor=None, limit=50),
    "runs of an agent": lambda cast: selectors.list_runs(cast.bot, filters={"q": "x"}, cursor=None, limit=50),
    "waits": lambda cast: selectors.list_waits(cast.people["alice"], filters={}, cursor=None, limit=50),
    "decided": lambda cast: selectors.inbox(cast.people["alice"], scope="decided", filters={}, cursor=None, limit=50),
    "review": lambda cast: selectors.inbox(cast.people["dave"], scope="review", filters={}, cursor=None, limit=50),
    "unknown": lambda cast: selectors.inbox(cast.people["dave"], scope="unknown", filters={}, cursor=None, limit=50),
    "counts": lambda cast: selectors.inbox_counts(cast.people["dave"]),
}


def _some_of_each(cast: Cast, times: int) -> None:
    for _ in range(times):
        cast.open().pause(approval(effect=plan("k", "order")))
        run = cast.open()
        run.pause(approval(effect=plan("k", "order")))
        run.decide("legal", "approve")
        cast.open(plan("u", start=True)).release()


@pytest.mark.parametrize("name", LISTS)
def test_a_page_costs_the_same_however_long_it_is(name: str, cast: Cast) -> None:
    _some_of_each(cast, 1)
    LISTS[name](cast)
    short = _statements(lambda: LISTS[name](cast))
    _some_of_each(cast, 7)
    answer = LISTS[name](cast)
    assert name == "counts" or answer["total"] >= 8
    assert _statements(lambda: LISTS[name](cast)) == short == (2 if name == "counts" else 1)


def test_what_one_may_decide_needs_ones_groups_as_well(cast: Cast) -> None:
    def available() -> Any:
        return selectors.inbox(cast.people["alice"], scope="available", filters={}, cursor=None, limit=50)

    _some_of_each(cast, 1)
    assert available()["total"] == 2
    with costs(2):
        available()
    _some_of_each(cast, 7)
    with costs(2):
        assert available()["total"] == 9


def _statements(work: Callable[[], Any]) -> int:
    with CaptureQueriesContext(connection) as captured:
        work()
    return len(captured)


def test_a_run_with_everything_in_two(cast: Cast) -> None:
    run = cast.open(*(plan(f"e{n}") for n in range(20)), ev("external_ref", system="erp", id="1"))
    for caller in (cast.people["dave"], cast.bot):
        with costs(2):
            selectors.get_run(caller, run.id)
    with costs(1):
        selectors.get_verdict(cast.bot, run.id)
    with costs(2):
        selectors.list_events(cast.bot, run.id, cursor=None, limit=200)
