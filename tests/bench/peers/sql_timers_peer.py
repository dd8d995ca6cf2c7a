"""The limit for timers: hand-written SQL that fires a hundred in a statement, in two processes."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import psycopg

from tests.bench.peers.harness import Options, report, signal, sleep_until
from tests.bench.plain import percentiles

WORKERS, BATCH, POLL = 2, 100, 0.05
TABLES = """
CREATE TABLE run (id bigint PRIMARY KEY, status text NOT NULL, seq int NOT NULL DEFAULT 0, updated timestamptz);
CREATE TABLE event (run_id bigint NOT NULL, seq int NOT NULL, kind text NOT NULL, body jsonb, at timestamptz,
    PRIMARY KEY (run_id, seq));
CREATE TABLE timer (id bigint PRIMARY KEY, run_id bigint NOT NULL, due timestamptz NOT NULL, fired timestamptz);
CREATE INDEX ON timer (due) WHERE fired IS NULL;
"""
FIRE = """
WITH t AS (UPDATE timer SET fired = clock_timestamp() WHERE id IN (
        SELECT id FROM timer WHERE fired IS NULL AND due <= clock_timestamp() ORDER BY due, id LIMIT %s
        FOR UPDATE SKIP LOCKED) RETURNING run_id),
    r AS (UPDATE run SET seq = seq + 1, status = 'resumable', updated = clock_timestamp()
        FROM t WHERE run.id = t.run_id RETURNING run.id, seq),
    e AS (INSERT INTO event (run_id, seq, kind, body, at)
        SELECT id, seq, 'timer.fired', '{}', clock_timestamp() FROM r RETURNING 1)
SELECT count(*) FROM e
"""


def run(given: Options) -> None:
    with psycopg.connect(given.database, autocommit=True) as connection:
        connection.execute(TABLES)
        due = float(int(time.time()) + 8)
        connection.execute("INSERT INTO run SELECT n, 'sleeping' FROM generate_series(1, %s) n", [given.n])
        connection.execute("INSERT INTO timer SELECT id, id, to_timestamp(%s) FROM run", [due])
        connection.execute("VACUUM ANALYZE")
        context = multiprocessing.get_context("fork")
        lines = []
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            context.Process(target=_work, args=(given, due, theirs), daemon=True).start()
            lines.append(ours)
        sleep_until(due - 0.5)
        signal("begin")
        fired = [at for line in lines for at in line.recv()]
        signal("end")
        row = connection.execute(
            "SELECT count(*), (SELECT count(*) FROM timer WHERE fired < due) FROM event"
        ).fetchone()
        assert row is not None
        assert (row[0], len(fired)) == (given.n, given.n)
        report(
            ("psycopg",),
            n=given.n,
            early=row[1],
            lateness_ms=percentiles([at - due for at in fired]),
            drained_per_second=round(given.n / (max(fired) - due)),
        )


def _work(given: Options, due: float, line: Connection) -> None:
    fired: list[float] = []
    with psycopg.connect(given.database, autocommit=True) as connection:
        while True:
            row = connection.execute(FIRE, [BATCH], prepare=True).fetchone()
            assert row is not None
            if row[0]:
                fired += [time.time()] * row[0]
            elif time.time() > due and not _left(connection):
                break
            else:
                time.sleep(POLL)
    line.send(fired)


def _left(connection: psycopg.Connection) -> bool:
    return connection.execute("SELECT FROM timer WHERE fired IS NULL LIMIT 1").fetchone() is not None
