"""What becomes due is applied by the tick: to the second, never early, never twice, whatever happens to the ticks."""

from __future__ import annotations

import ast
import contextlib
import datetime as dt
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

import rehydrate
from rehydrate import claims, engine, verify, wakeups
from rehydrate.core import policy
from rehydrate.models import LedgerEvent, Timer
from rehydrate.models import Run as RunRow
from tests.conftest import eventually
from tests.ledger_cast import Cast, Run, approval, callback, ev, plan, timer
from tests.timing import Ticker, start_ticker

pytestmark = pytest.mark.django_db(transaction=True)

FLOW: dict[str, Any] = {
    "required": [],
    "on_reject": "compensate",
    "claim_within": "2s",
    "lease_seconds": 3600,
    "wait": {
        "plain": {"groups": ["legal"], "exclude_requester": False},
        "lax": {"groups": ["legal"], "exclude_requester": False, "allow_timeout_approve": True},
        "pressing": {
            "groups": ["legal"],
            "exclude_requester": False,
            "remind_before": "2s",
            "escalate_to": ["leads"],
            "escalate_after": "1s",
        },
        "nagging": {"groups": ["legal"], "exclude_requester": False, "remind_every": "10m"},
    },
    "effect": {"order": {"impact": "money", "needs_approval": "plain"}},
}
BERLIN_SUMMER, BERLIN_WINTER = dt.timezone(dt.timedelta(hours=2)), dt.timezone(dt.timedelta(hours=1))


@pytest.fixture
def cast() -> Cast:
    return Cast(FLOW)


@pytest.fixture
def ticker() -> Iterator[Callable[..., Ticker]]:
    started: list[Ticker] = []

    def start(*words: str) -> Ticker:
        started.append(start_ticker(*words))
        return started[-1]

    yield start
    for one in started:
        one.end()


def asleep(cast: Cast, **fields: Any) -> Run:
    run = cast.open()
    run.pause(timer(**fields))
    return run


def events(run: Run, *types: str) -> list[LedgerEvent]:
    found = LedgerEvent.objects.filter(run_id=run.id).order_by("seq")
    return list(found.filter(type__in=types) if types else found)


def kinds(run: Run) -> list[str]:
    return [event.type for event in events(run)]


def status(run: Run) -> tuple[str, list[str]]:
    row = RunRow.objects.get(pk=run.id)
    return row.status, [reason["code"] for reason in row.reasons]


def due(event: LedgerEvent) -> dt.datetime:
    """When it was to happen, as the event itself says."""
    text = event.payload.get("scheduled_for") or event.payload["due_at"]
    return dt.datetime.fromisoformat(text)


def never_early(*runs: Run) -> None:
    for run in runs:
        for event in events(run, "wait.satisfied", "wait.timed_out", "wait.escalated", "wait.reminded", "lease.lapsed"):
            assert event.at >= due(event), f"{event.type} came early"


def whole(*runs: Run) -> None:
    for run in runs:
        flaw, _ = verify.run(run.id)
        assert flaw is None, str(flaw)


# -- by real ticks alone: nobody else asks for any of these runs


@pytest.mark.processes
def test_everything_that_can_become_due(cast: Cast, ticker: Callable[..., Ticker]) -> None:
    soon: dict[str, Any] = {"due_in": 3}
    order = plan("k", "order")
    sleeper = asleep(cast, **soon)
    timed_out = {}
    for then in ("review", "reject", "resume", "terminate", "escalate"):
        timed_out[then] = cast.open()
        timed_out[then].pause(callback(on_timeout=then, **soon))
    lax = cast.open()
    lax.pause(approval("lax", effect=plan("k", "gift"), on_timeout="continue", **soon))
    pressing = cast.open()
    pressing.pause(approval("pressing", due_in=6))
    silent = cast.open(plan("u", "gift", start=True), lease_seconds=3)
    failing = cast.open()
    failing.append(ev("failed", error={"code": "x"}, retry_in=3))
    expiring = cast.open()
    expiring.pause(approval("plain", effect=order))
    now = expiring.state.run.paused_at
    expiring.decide("plain", "approve", expires_at=(now + dt.timedelta(seconds=5)).isoformat())
    runs = [sleeper, *timed_out.values(), lax, pressing, silent, failing, expiring]

    ticker()
    expected: list[tuple[Run, tuple[str, list[str]]]] = [
        (sleeper, ("ready", ["clear"])),
        (timed_out["review"], ("review", ["timeout_undetermined"])),
        (timed_out["resume"], ("ready", ["clear"])),
        # the same length again, and then a person says how it goes on
        (timed_out["escalate"], ("review", ["timeout_undetermined"])),
        (lax, ("ready", ["clear"])),
        (pressing, ("review", ["timeout_undetermined"])),
        (silent, ("review", ["effect_unknown"])),
        (failing, ("ready", ["clear"])),
        (expiring, ("review", ["approval_expired"])),
    ]
    for run, wanted in expected:
        eventually(lambda run=run, wanted=wanted: status(run) == wanted, within=60, what=str(wanted))  # type: ignore[misc]
    # The flow says that a no is undone; nothing was done, so the run is over.
    for then in ("reject", "terminate"):
        eventually(lambda then=then: status(timed_out[then])[0] == "terminated", within=60, what=then)  # type: ignore[misc]
    assert [event.payload["to"] for event in events(pressing, "wait.escalated")] == [["leads"]]
    assert len(events(pressing, "wait.reminded")) == 1
    first, second = events(timed_out["escalate"], "wait.escalated", "wait.timed_out")
    assert due(second) - due(first) == dt.timedelta(seconds=3)
    for ready in (sleeper, failing, lax):
        eventually(lambda run=ready: kinds(run).count("run.unclaimed") == 1, within=60, what="the alarm")  # type: ignore[misc]
    never_early(*runs)
    whole(*runs)
    for run in runs:
        assert max(Counter(f"{e.type} {e.payload.get('wait')}" for e in events(run, *_ONCE)).values(), default=1) == 1


_ONCE = ("wait.satisfied", "wait.timed_out", "wait.reminded", "lease.lapsed", "run.unclaimed")


@pytest.mark.processes
def test_four_ticks_killed_at_random(cast: Cast, ticker: Callable[..., Ticker]) -> None:
    """Hundreds of timers over some seconds; whoever ticks is killed at any instant, and replaced."""
    chance = random.Random(20261129)  # noqa: S311 (no secret)
    runs = [asleep(cast, due_in=chance.randint(1, 8)) for _ in range(240)]
    ticking = [ticker("--batch", "7") for _ in range(4)]
    kills = 0

    def all_fired() -> bool:
        nonlocal kills
        if kills < 12:
            victim = chance.randrange(4)
            ticking[victim].kill()
            kills += 1
            ticking[victim] = ticker("--batch", "7")
        return not Timer.objects.filter(fired_at=None, kind="deadline").exists()

    eventually(all_fired, within=180, what="all timers")
    count = Counter(LedgerEvent.objects.filter(type="wait.satisfied").values_list("run_id", flat=True))
    assert len(count) == len(runs)
    assert set(count.values()) == {1}, "none twice"
    assert {status(run)[0] for run in runs} == {"ready"}
    never_early(*runs)
    whole(*chance.sample(runs, 40))


@pytest.mark.processes
@pytest.mark.parametrize("wrong", [3600, -3600])
def test_a_machine_whose_clock_is_an_hour_wrong(cast: Cast, ticker: Callable[..., Ticker], wrong: int) -> None:
    soon, later = asleep(cast, due_in=2), asleep(cast, due_in=1800)
    lost = cast.open(lease_seconds=2)
    held = cast.open(lease_seconds=1800)
    ticker("--clock", str(wrong))
    eventually(lambda: status(soon)[0] == "ready", within=60, what="the timer")
    eventually(lambda: "lease.lapsed" in kinds(lost), within=60, what="the lapse")
    assert status(later)[0] == "waiting"
    assert status(held)[0] == "running"
    never_early(soon, lost)


def test_only_the_database_says_what_time_it_is() -> None:
    """No other clock decides anything: whoever reads one of this machine's says so here."""
    clocks = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "timezone.now"}
    root = Path(rehydrate.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("dt.").removeprefix("django.") in clocks
    }
    decided_elsewhere = {name for name in readers if not name.startswith(("demo/", "client/", "supervisor/"))}
    assert decided_elsewhere <= MACHINE_CLOCKS, decided_elsewhere


#: `ids` stamps UUIDs, which order nothing; `webhooks` stamps what it signs, as the standard says.
MACHINE_CLOCKS = {"ids.py", "webhooks.py"}


# -- the calendar, by a clock that is moved


@contextlib.contextmanager
def just_before(clock: Any, moment: dt.datetime) -> Iterator[None]:
    """A second before it, then at it."""
    clock.move_to(moment - dt.timedelta(seconds=1, milliseconds=500))
    yield
    clock.move_to(moment)


@pytest.mark.parametrize("days", [40, 400, 3652])
def test_long_timers(cast: Cast, clock: Any, days: int) -> None:
    run = asleep(cast, due_in=days * 86_400)
    with just_before(clock, run.wait("t").due_at):
        engine.tick()
        assert status(run)[0] == "waiting"
    engine.tick()
    assert status(run)[0] == "ready"
    never_early(run)


def test_a_duration_over_the_end_of_summer_time_is_as_long_as_any_other(cast: Cast, clock: Any) -> None:
    clock.move_to(dt.datetime(2027, 10, 30, 12, tzinfo=BERLIN_SUMMER))
    run = asleep(cast, due_in=86_400)
    opened, due_at = run.wait("t").opened_at, run.wait("t").due_at
    assert due_at - opened == dt.timedelta(days=1)
    assert due_at.astimezone(BERLIN_WINTER).hour == 11
    with just_before(clock, due_at):
        engine.tick()
        assert status(run)[0] == "waiting"
    engine.tick()
    assert status(run)[0] == "ready"


def test_an_hour_that_comes_twice(cast: Cast, clock: Any) -> None:
    """Half past two in Berlin on 31 October 2027: the offset says which one is meant."""
    clock.move_to(dt.datetime(2027, 10, 30, 12, tzinfo=BERLIN_SUMMER))
    first, second = (
        asleep(cast, due_in=None, due_at=dt.datetime(2027, 10, 31, 2, 30, tzinfo=zone).isoformat())
        for zone in (BERLIN_SUMMER, BERLIN_WINTER)
    )
    assert second.wait("t").due_at - first.wait("t").due_at == dt.timedelta(hours=1)
    clock.move_to(first.wait("t").due_at)
    engine.tick()
    assert (status(first)[0], status(second)[0]) == ("ready", "waiting")
    clock.move_to(second.wait("t").due_at)
    engine.tick()
    assert status(second)[0] == "ready"


def test_after_an_outage_a_repeating_reminder_comes_once(cast: Cast, clock: Any) -> None:
    run = cast.open()
    run.pause(approval("nagging", due_in=86_400))
    clock.advance(hours=5)
    engine.tick()
    engine.tick()
    assert kinds(run).count("wait.reminded") == 1
    (pending,) = Timer.objects.filter(run_id=run.id, kind="reminder", fired_at=None)
    clock.move_to(pending.due_at)
    engine.tick()
    assert kinds(run).count("wait.reminded") == 2
    every = dt.timedelta(seconds=policy.seconds("10m"))
    first, second = events(run, "wait.reminded")
    assert due(second) - first.at == every
    never_early(run)


def test_after_an_outage_everything_is_applied_once_and_in_its_order(cast: Cast, clock: Any) -> None:
    """Days later: the last call of an escalation counts from now, since nobody could have seen it before."""
    run, other = cast.open(), asleep(cast, due_in=60)
    run.pause(callback(on_timeout="escalate", due_in=600))
    clock.advance(days=3)
    engine.tick()
    assert kinds(run).count("wait.escalated") == 1
    assert run.wait("cb").open
    left = run.wait("cb").due_at - clock.now()
    assert dt.timedelta(seconds=590) < left <= dt.timedelta(seconds=600)
    clock.advance(seconds=600)
    engine.tick()
    assert status(run) == ("review", ["timeout_undetermined"])
    assert status(other)[0] == "ready"
    whole(run, other)


# -- whoever applies it, it comes to the same


def test_the_tick_gives_what_the_next_request_would_have_given(cast: Cast, clock: Any) -> None:
    def some() -> list[Run]:
        runs = [asleep(cast, due_in=60)]
        for then in ("review", "reject", "resume", "terminate", "escalate"):
            runs.append(cast.open(plan("e", "gift", start=True), ev("effect.executed", key="e", receipt={"id": "r"})))
            runs[-1].pause(callback(on_timeout=then, due_in=60))
        runs.append(cast.open())
        runs[-1].pause(callback("a", due_in=60), callback("b", due_in=50, on_timeout="resume"), resume_when="any")
        runs.append(cast.open(plan("u", "look", start=True), lease_seconds=60))
        runs.append(cast.open())
        runs[-1].append(ev("failed", error={"code": "x"}, retry_in=60))
        return runs

    ticked, asked = some(), some()
    clock.advance(seconds=61)
    for run in asked:
        with contextlib.suppress(Exception):  # whatever becomes of the request itself
            run.append(ev("note", text="too late"), epoch=99)
    engine.tick()
    for one, other in zip(ticked, asked, strict=True):
        told = [kind for kind in kinds(other) if kind != "refused"]
        assert kinds(one) == told
        assert status(one) == status(other)
        assert {k: w.status for k, w in one.state.waits.items()} == {k: w.status for k, w in other.state.waits.items()}
    whole(*ticked, *asked)


# -- waking up


def test_a_sleeping_tick_is_woken_by_an_earlier_timer(cast: Cast) -> None:
    with wakeups.listen(wakeups.TIMER) as ear:
        asleep(cast, due_in=3600)
        slept = threading.Thread(target=_sleep, args=(ear,))
        slept.start()
        asleep(cast, due_in=1)
        slept.join(40)
        assert not slept.is_alive(), "it sleeps on, though something is due"


def _sleep(ear: wakeups.Ear) -> None:
    try:
        engine.sleep_until_due(ear, 300)
    finally:
        connection.close()


def test_what_is_due_is_found_by_its_index(cast: Cast) -> None:
    """However much is pending: a tick looks at what is due and at nothing else."""
    workspace = str(cast.workspace.pk)
    cast.open()
    columns = ", ".join(f'"{f.column}"' for f in RunRow._meta.concrete_fields if f.column not in ("id", "external_id"))
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO rehydrate_run (id, external_id, {columns})"
            f" SELECT gen_random_uuid(), n::text, {columns} FROM rehydrate_run, generate_series(1, 5000) n"
        )
        cursor.execute(
            "INSERT INTO rehydrate_timer (run_id, kind, subject, due_at)"
            " SELECT id, 'deadline', '', now() + interval '1 hour' + random() * interval '1 day' FROM rehydrate_run"
        )
        cursor.execute("ANALYZE rehydrate_timer, rehydrate_run")
    for ask in (
        lambda: claims.lock_overdue(100),
        lambda: claims.lock_overdue(100, workspace=workspace, flows=("flow",)),
        lambda: [str(claims.seconds_until_due())],
    ):
        assert _rows_read(ask) < 200


def _rows_read(ask: Callable[[], Any]) -> int:
    """Rows of timers that a call reads, as PostgreSQL counts them."""

    def read() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                "SELECT seq_tup_read + idx_tup_fetch + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes"
                " WHERE relname = 'rehydrate_timer') FROM pg_stat_user_tables WHERE relname = 'rehydrate_timer'"
            )
            return int(cursor.fetchone()[0])

    before = read()
    ask()
    return read() - before
