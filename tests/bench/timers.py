"""Timers that come due at the same second: how late they are, and how many a second are dealt with.

    python -m tests.bench.timers               # prints JSON; about two minutes

A real `up` on a folder of its own, fsync on as it ships; its own ticks fire them, and nobody else asks. A timer is done
when another session sees it fired, so that its commit counts: that one notes every ten milliseconds what it would see
(a snapshot), and looks at the rows when all is over: counting takes of the processors that are measured.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import psycopg

from tests.bench.plain import percentiles
from tests.bench.stage import ROOT, Installation, installation

LOOK_EVERY = 0.01
"""Seconds between two snapshots: what is told of lateness is that much too high at most."""
OVER_EVERY = 10
"""Snapshots between two questions whether any is left."""
AHEAD = (15, 60, 180)
"""Seconds between the first row and the due time: runs are made meanwhile, and all is quiet at the end. A machine that
is too busy for the first gets the next.
"""


def measure(*, n: int = 5000, rounds: int = 3) -> dict[str, Any]:
    """Medians of the rounds: `{n, rounds, early, twice, lateness_ms: {p50, p95, max}, drained_per_second, cpu_us}`.

    `early` and `twice` are sums; `cpu_us` is what one timer cost, by part of the system, in microseconds.
    """
    with installation() as made:
        found = [_round(made, n) for _ in range(rounds)]
    return {
        "n": n,
        "rounds": found,
        "early": sum(one["early"] for one in found),
        "twice": sum(one["twice"] for one in found),
        "lateness_ms": {
            name: statistics.median(one["lateness_ms"][name] for one in found) for name in ("p50", "p95", "max")
        },
        "drained_per_second": statistics.median(one["drained_per_second"] for one in found),
        "cpu_us": {part: statistics.median(one["cpu_us"][part] for one in found) for part in ("work", "postgres")},
    }


def _round(made: Installation, n: int) -> dict[str, Any]:
    with psycopg.connect(made.database, autocommit=True) as database:
        for ahead in AHEAD:
            due_at = _filled(made, n, ahead)
            if due_at is None:
                continue
            database.execute("VACUUM (ANALYZE) rehydrate_timer, rehydrate_run, rehydrate_wait")
            left, now = _left(database, due_at)
            if left == n and now < due_at - dt.timedelta(seconds=1):
                break
        else:
            raise RuntimeError(f"{n} timers could not be made {AHEAD[-1]} s ahead")
        time.sleep((due_at - now).total_seconds() - 0.3)
        before = made.cpu_seconds()
        seen: list[tuple[dt.datetime, str]] = []
        while len(seen) % OVER_EVERY or _left(database, due_at)[0]:
            time.sleep(LOOK_EVERY)
            seen.append(_snapshot(database))
        time.sleep(0.5)
        after = made.cpu_seconds()
        lateness = _lateness(database, due_at, seen)
        early, twice = database.execute(
            "SELECT count(*) FILTER (WHERE t.fired_at < t.due_at), count(*) FILTER (WHERE e.times <> 1)"
            " FROM rehydrate_timer t JOIN (SELECT run_id, count(*) AS times FROM rehydrate_ledgerevent"
            "   WHERE type = 'wait.satisfied' GROUP BY 1) e USING (run_id) WHERE t.due_at = %s",
            [due_at],
        ).fetchone() or (n, n)
    return {
        "early": early + sum(late < 0 for late in lateness),
        "twice": twice,
        "lateness_ms": percentiles(lateness),
        "drained_per_second": round(n / max(lateness)),
        "cpu_us": {part: round((after[part] - before[part]) / n * 1e6) for part in ("work", "postgres")},
    }


def _filled(made: Installation, n: int, ahead: int) -> dt.datetime | None:
    """When they are due; None when they could not be made in time."""
    filled = subprocess.run(
        [sys.executable, "-m", "tests.bench.timers", "--fill", str(n), "--ahead", str(ahead)],
        cwd=ROOT, env={**made.environment, "DJANGO_SETTINGS_MODULE": "rehydrate.settings"},
        capture_output=True, text=True,
    )  # fmt: skip
    return dt.datetime.fromisoformat(filled.stdout.strip()) if filled.returncode == 0 else None


def _left(database: psycopg.Connection[Any], due_at: dt.datetime) -> tuple[int, dt.datetime]:
    row = database.execute(
        "SELECT count(*), clock_timestamp() FROM rehydrate_timer WHERE fired_at IS NULL AND due_at = %s", [due_at]
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def _snapshot(database: psycopg.Connection[Any]) -> tuple[dt.datetime, str]:
    row = database.execute("SELECT clock_timestamp(), pg_current_snapshot()::text").fetchone()
    assert row is not None
    return row[0], row[1]


def _lateness(
    database: psycopg.Connection[Any], due_at: dt.datetime, seen: list[tuple[dt.datetime, str]]
) -> list[float]:
    """Seconds after `due_at` of the first snapshot in which each timer is fired, by the transaction that fired it."""
    fired = database.execute("SELECT xmin::text, count(*) FROM rehydrate_timer WHERE due_at = %s GROUP BY 1", [due_at])
    lateness: list[float] = []
    for transaction, timers in fired.fetchall():
        found = database.execute(
            "SELECT at FROM unnest(%s::timestamptz[], %s::pg_snapshot[]) AS s(at, snapshot)"
            " WHERE pg_visible_in_snapshot(%s::xid8, snapshot) ORDER BY at LIMIT 1",
            [[at for at, _ in seen], [snapshot for _, snapshot in seen], transaction],
        ).fetchone()
        assert found is not None, "a timer that nobody saw fired"
        lateness += [(found[0] - due_at).total_seconds()] * timers
    return lateness


# -- within the installation


def fill(n: int, *, due_in: int, batch: int = 500) -> dt.datetime:
    """`n` runs that each wait for a timer that is due at the same instant, made as an agent makes them."""
    from django.db import transaction

    from rehydrate import clock, projections
    from rehydrate.models import Workspace

    workspace, _ = Workspace.objects.get_or_create(slug="bench")
    due_at = clock.now().replace(microsecond=0) + dt.timedelta(seconds=due_in)
    for start in range(0, n, batch):
        changes = [_paused(str(workspace.pk), due_at) for _ in range(min(batch, n - start))]
        with transaction.atomic():
            projections.save(changes)
    return due_at


def _paused(workspace: str, due_at: dt.datetime) -> Any:
    """A run with a checkpoint that waits for a timer: what the ledger would save, without its commit."""
    from rehydrate import clock, loading, projections
    from rehydrate.contexts import make_context
    from rehydrate.core import commands as cmd
    from rehydrate.core import decide
    from rehydrate.core.draft import Draft
    from rehydrate.core.state import Run, State
    from rehydrate.ids import uuid7

    policy = loading.policy_of(workspace, "timers", 0)
    actor = {"kind": "agent", "id": "bench", "name": "bench"}
    ctx = make_context(now=clock.now(), number=0, policy=policy, pinned=policy, workspace=workspace, actor=actor)
    draft = Draft(State(Run(id=str(uuid7()))), ctx)
    body = cmd.OpenRun(flow="timers", external_id=str(uuid7()), holder="bench")
    decide.open_run(draft, body, workspace=workspace, owner=None)
    checkpoint = cmd.Checkpoint(stage="asleep", ref="s3://drafts/17")
    pause = cmd.Paused(waits=[cmd.WaitSpec(name="later", kind="timer", due_at=due_at)], resume_when="all")
    for event in (checkpoint, pause):
        decide.append(draft, event, pointer="/events/0", last=True)
    decide.settle(draft)
    return projections.Change(None, draft.state, draft.recorded, (), draft.now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fill", type=int, help="make so many in the database of this environment, and say when")
    parser.add_argument("--ahead", type=int, default=AHEAD[0], help="seconds until those are due")
    options = parser.parse_args()
    if options.fill:
        import django

        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")
        django.setup()
        print(fill(options.fill, due_in=options.ahead).isoformat())
    else:
        print(json.dumps(measure(n=options.n, rounds=options.rounds), indent=2))


if __name__ == "__main__":
    main()
