"""What growth costs: appending to a long run against a short one, and pages when there are very many runs.

    python -m tests.bench.growth                # prints JSON; --full: a million runs, ten million events

The many are copies of two runs that an agent and a person made by the API, written straight into the tables: their
histories have the right shape and size, but are not chained, so `verify_ledger` has no say here.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.bench.ingest import batch, open_run
from tests.bench.plain import PAYLOAD, clock, percentiles
from tests.bench.stage import ROOT, Caller, Installation, installation

Json = dict[str, Any]
#: Tables smaller than this are rightly read from end to end.
BIG = 2000


@dataclass(frozen=True)
class Sizes:
    runs: int
    open_waits: int
    long: int = 10_000
    short: int = 10
    samples: int = 300


QUICK = Sizes(runs=10_000, open_waits=200, long=1_000, samples=50)
USUAL = Sizes(runs=50_000, open_waits=5_000)
FULL = Sizes(runs=1_000_000, open_waits=20_000)


def measure(sizes: Sizes = USUAL) -> Json:
    """`{append: {ratio, ...}, many: {pages: {name: percentiles}, scans, ...}}`; milliseconds, and see `explain`."""
    with installation() as made:
        return {"append": _append(made, sizes), "many": _many(made, sizes)}


# -- appending


def _append(made: Installation, sizes: Sizes) -> Json:
    """Alternating samples, so that both kinds meet the same machine; short runs are changed before they grow long."""
    agent = Caller(made.port, made.agent)
    long_one = _run_with(agent, sizes.long)
    taken: dict[str, list[float]] = {"long": [], "short": []}
    note = [{"type": "note", "text": "one more"}]
    for n in range(sizes.samples):
        if n % 10 == 0:
            short_one = _run_with(agent, sizes.short)
        for name, (run, epoch) in (("long", long_one), ("short", short_one)):
            begun = clock()
            agent.post(f"/runs/{run}/events", {"epoch": epoch, "events": note})
            taken[name].append(clock() - begun)
    agent.close()
    medians = {name: statistics.median(each) for name, each in taken.items()}
    return {
        "long": sizes.long,
        "short": sizes.short,
        "ratio": round(medians["long"] / medians["short"], 3),
        "long_ms": percentiles(taken["long"]),
        "short_ms": percentiles(taken["short"]),
    }


def _run_with(agent: Caller, events: int) -> tuple[str, int]:
    run, epoch = open_run(agent)
    left = events - 2  # it was opened, and the lease was granted
    while left > 0:
        agent.post(f"/runs/{run}/events", {"epoch": epoch, "events": batch(min(left, 100))})
        left -= 100
    return run, epoch


# -- many


def _many(made: Installation, sizes: Sizes) -> Json:
    waiting, done = _examples(made)
    with psycopg.connect(made.database, autocommit=True) as database:
        begun = clock()
        _fill(database, waiting, done, sizes)
        filled = clock() - begun
        events, runs, waits = (
            database.execute(query).fetchone() or (0,)
            for query in (
                "SELECT count(*) FROM rehydrate_ledgerevent",
                "SELECT count(*) FROM rehydrate_run",
                "SELECT count(*) FROM rehydrate_wait WHERE status = 'open'",
            )
        )
    looked = _explained(made, sizes)
    return {
        "runs": runs[0],
        "events": events[0],
        "open_waits": waits[0],
        "filled_in_seconds": round(filled),
        "pages": _pages(made, looked["cookie"], sizes),
        "scans": looked["scans"],
        "queries": looked["queries"],
    }


def _examples(made: Installation) -> tuple[str, str]:
    """The ids of a run that waits for legal's approval, and of one that has ended."""
    agent, person = Caller(made.port, made.agent), Caller(made.port, made.person)
    ids = []
    for ends in (False, True):
        wait = {"name": "legal-approval", "kind": "approval", "due_in": 30 * 86400, "ask": {"summary": "Send it?"}}
        notes = [{"type": "note", "text": f"read page {n}"} for n in range(1 if ends else 5)]
        checkpoint = {"type": "checkpoint", "stage": "draft", "ref": "s3://drafts/17", "data": PAYLOAD}
        opened = agent.post(
            "/runs",
            {
                "flow": "bench",
                "external_id": f"example-{ends}",
                "title": "Contract",
                "holder": "bench-1",
                "events": [checkpoint, *notes, {"type": "paused", "waits": [wait]}],
            },
        )["run"]
        ids.append(opened["id"])
        if ends:
            asked = opened["waits"][0]
            answer = {"choice": "approve", "wait_version": asked["version"]}
            person.post(f"/waits/{asked['id']}/decisions", answer)
            envelope = agent.post("/claims", {"flows": ["bench"], "holder": "bench-1", "wait": 30})
            assert envelope["run"]["id"] == opened["id"]
            completed = {"epoch": envelope["lease"]["epoch"], "events": [{"type": "completed"}]}
            agent.post(f"/runs/{opened['id']}/events", completed)
    agent.close()
    person.close()
    return ids[0], ids[1]


def identifier(n: int) -> str:
    """The id of the n-th copy, and of what it has one of: in order of time, as uuid7 is."""
    return f"{n:012x}70008000000000000000"


_ID = "(lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid"
_AGO = "make_interval(secs => %(total)s - n)"
#: What a copy has of its own, by table; everything else is the example's.
_OWN: dict[str, dict[str, str]] = {
    "run": {
        "id": _ID,
        "external_id": "'order-' || n",
        **{name: f"t.{name} - {_AGO}" for name in ("created_at", "updated_at", "status_since", "ended_at")},
    },
    "wait": {
        "id": _ID,
        "due_at": "t.due_at + make_interval(secs => n)",
        **{name: f"t.{name} - {_AGO}" for name in ("opened_at", "closed_at")},
    },
    "decision": {"id": _ID, "wait_id": _ID, "decided_at": f"t.decided_at - {_AGO}"},
    "ledgerevent": {"at": f"t.at - {_AGO}"},
    "timer": {"subject": f"{_ID}::text", "due_at": "t.due_at + make_interval(secs => n)"},
}


def _fill(database: psycopg.Connection[Any], waiting: str, done: str, sizes: Sizes, chunk: int = 50_000) -> None:
    """`runs` copies, of which every so many-eth waits."""
    every = sizes.runs // sizes.open_waits
    database.execute("SET session_replication_role = replica")  # what is copied has been checked
    for name, own in _OWN.items():
        table = f"rehydrate_{name}"
        columns = [
            row[0]
            for row in database.execute(
                "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND is_identity = 'NO'",
                [table],
            )
        ]
        key = "id" if name == "run" else "run_id"
        taken = {**dict.fromkeys(columns), **own, key: _ID}
        values = ", ".join(value or f't."{column}"' for column, value in taken.items())
        names = ", ".join(f'"{column}"' for column in taken)
        for start in range(1, sizes.runs + 1, chunk):
            end = min(start + chunk - 1, sizes.runs)
            database.execute(
                f"INSERT INTO {table} ({names}) SELECT {values}"
                f" FROM generate_series({start}, {end}) n JOIN {table} t"
                f" ON t.{key} = CASE WHEN n %% {every} = 0 THEN %(waiting)s::uuid ELSE %(done)s::uuid END",
                {"total": sizes.runs, "waiting": waiting, "done": done},
            )
    for name in _OWN:
        database.execute(f"VACUUM (ANALYZE) rehydrate_{name}")
    database.execute("CHECKPOINT")


def _addresses(n: int, waiting: int) -> dict[str, str]:
    """What is looked at, by what it is called. `n` is any copy; `waiting` is one that waits."""
    return {
        "inbox (API)": "/api/v1/waits?status=open",
        "inbox (page)": "/?scope=available",
        "search by external id (API)": f"/api/v1/runs?external_id=order-{n}",
        "search by external id (page)": f"/runs/?q=order-{n}",
        "run page": f"/runs/{_uuid(waiting)}/",
    }


def _uuid(n: int) -> str:
    raw = identifier(n)
    return "-".join((raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]))


def _pages(made: Installation, cookie: str, sizes: Sizes) -> Json:
    """Milliseconds from the request to the whole answer, over a connection that is kept, page after page in turn."""
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=60)
    headers = {"Authorization": f"Bearer {made.person}"}, {"Cookie": cookie}
    taken: dict[str, list[float]] = {}
    chosen = random.Random(7)  # noqa: S311 (the same in each round)
    every = sizes.runs // sizes.open_waits
    for turn in range(max(40, sizes.samples // 5) + 3):
        n = chosen.randint(1, sizes.runs)
        waiting = every * chosen.randint(1, sizes.open_waits)
        for name, address in _addresses(n, waiting if turn % 2 else n).items():
            begun = clock()
            connection.request("GET", address, headers=headers[0] if address.startswith("/api/") else headers[1])
            answer = connection.getresponse()
            body = answer.read()
            spent = clock() - begun
            if answer.status != 200:
                raise RuntimeError(f"GET {address}: {answer.status} {body[:300]!r}")
            if "search" in name and f"order-{n}".encode() not in body:
                raise RuntimeError(f"GET {address} does not find it")
            if turn >= 3:
                taken.setdefault(name, []).append(spent)
    connection.close()
    return {name: percentiles(each) for name, each in taken.items()}


# -- within the installation's environment


def _explained(made: Installation, sizes: Sizes) -> Json:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.growth", "--explain", str(sizes.runs), str(sizes.open_waits)],
        cwd=ROOT, env={**made.environment, "DJANGO_SETTINGS_MODULE": "rehydrate.settings", "REHYDRATE_URL": made.url},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def explain(runs: int, open_waits: int) -> Json:
    """`{cookie, queries: {page: how many}, scans: {"page: table": [SQL]}}`: what would be read from end to end."""
    import django

    django.setup()
    from django.conf import settings
    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client

    alice = User.objects.get(username="alice")
    client = Client(headers={"host": settings.PUBLIC_URL.partition("://")[2]})
    client.force_login(alice)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND reltuples >= %s"
            " AND relnamespace = current_schema()::regnamespace",
            [BIG],
        )
        big = {row[0] for row in cursor.fetchall()}
        cursor.execute("SELECT indexrelid::regclass::text FROM pg_index WHERE indpred IS NOT NULL")
        partial = {row[0] for row in cursor.fetchall()}
    plans: list[tuple[str, Any]] = []

    def explaining(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if not many and sql.lstrip().upper().startswith(("SELECT", "WITH")):
            with context["connection"].connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
                plans.append((sql, cursor.fetchone()[0]))
        return execute(sql, params, many, context)

    queries: Json = {}
    scans: dict[str, list[str]] = {}
    n = runs // open_waits * (open_waits // 2)
    for name, address in _addresses(n, n).items():
        plans.clear()
        with connection.execute_wrapper(explaining):
            answer = client.get(address)
        assert answer.status_code == 200, (address, answer.status_code)
        queries[name] = len(plans)
        for sql, plan in plans:
            for table in _scanned(plan, partial) & big:
                scans.setdefault(f"{name}: {table.removeprefix('rehydrate_')}", []).append(sql)
    cookie = client.cookies[settings.SESSION_COOKIE_NAME]
    return {"cookie": f"{cookie.key}={cookie.value}", "queries": queries, "scans": scans}


def _scanned(plan: Any, partial: set[str], *, limited: bool = False) -> set[str]:
    """Tables that a plan reads from end to end, be it by an index of all rows; not what a LIMIT ends early, nor what an
    index holds that is `partial`, of the rows asked for alone.
    """
    if isinstance(plan, str):
        plan = json.loads(plan)
    if isinstance(plan, list):
        return set().union(*(_scanned(each, partial, limited=limited) for each in plan))
    kind, limited = plan.get("Node Type", ""), limited or plan.get("Node Type") == "Limit"
    by_all = (
        kind in ("Index Scan", "Index Only Scan") and "Index Cond" not in plan and plan["Index Name"] not in partial
    )
    whole = kind == "Seq Scan" or (by_all and not limited)
    below = [plan["Plan"]] if "Plan" in plan else plan.get("Plans", [])
    return ({plan["Relation Name"]} if whole else set()).union(
        *(_scanned(each, partial, limited=limited) for each in below)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--explain", type=int, nargs=2, metavar=("RUNS", "WAITS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.explain:
        print(json.dumps(explain(*given.explain)))
    else:
        print(json.dumps(measure(FULL if given.full else QUICK if given.quick else USUAL), indent=2))


if __name__ == "__main__":
    main()
