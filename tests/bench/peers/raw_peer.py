"""The limit: the same work as hand-written SQL through psycopg, one statement and one commit a step."""

import json
import uuid
from typing import Any

import psycopg

from tests.bench.peers.harness import Options, Parts, drive
from tests.bench.plain import PAYLOAD, clock

TABLES = """
CREATE TABLE run (id uuid PRIMARY KEY, status text NOT NULL, seq int NOT NULL DEFAULT 0,
    updated timestamptz DEFAULT now());
CREATE TABLE event (run_id uuid NOT NULL, seq int NOT NULL, kind text NOT NULL, body jsonb,
    at timestamptz DEFAULT now(), PRIMARY KEY (run_id, seq));
CREATE TABLE checkpoint (run_id uuid NOT NULL, seq int NOT NULL, state jsonb NOT NULL, PRIMARY KEY (run_id, seq));
CREATE TABLE approval (id uuid PRIMARY KEY, run_id uuid NOT NULL, status text NOT NULL, decision jsonb,
    at timestamptz DEFAULT now());
CREATE INDEX ON approval (status) WHERE status = 'pending';
"""
PAUSE = """
WITH r AS (INSERT INTO run (id, status, seq) VALUES (%(run)s, 'waiting', 2)),
    e AS (INSERT INTO event (run_id, seq, kind, body) VALUES
        (%(run)s, 1, 'started', '{}'), (%(run)s, 2, 'paused', '{}')),
    k AS (INSERT INTO checkpoint VALUES (%(run)s, 1, %(state)s))
INSERT INTO approval (id, run_id, status) VALUES (%(approval)s, %(run)s, 'pending')
"""
DECIDE = """
WITH a AS (UPDATE approval SET status = 'approved', decision = '{"by": "u1"}'
        WHERE id = %(approval)s AND status = 'pending' RETURNING run_id),
    r AS (UPDATE run SET status = 'resumable', seq = run.seq + 1 FROM a WHERE run.id = a.run_id
        RETURNING run.id, run.seq)
INSERT INTO event (run_id, seq, kind, body) SELECT id, seq, 'decided', '{}' FROM r RETURNING seq
"""
CLAIM = """
WITH r AS (UPDATE run SET status = 'running', seq = seq + 1 WHERE id = %(run)s AND status = 'resumable'
        RETURNING id, seq),
    e AS (INSERT INTO event (run_id, seq, kind, body) SELECT id, seq, 'resumed', '{}' FROM r)
SELECT c.state FROM r JOIN checkpoint c ON c.run_id = r.id ORDER BY c.seq DESC LIMIT 1
"""
FINISH = """
WITH r AS (UPDATE run SET status = 'done', seq = seq + 1 WHERE id = %(run)s RETURNING id, seq)
INSERT INTO event (run_id, seq, kind, body) SELECT id, seq, 'finished', '{}' FROM r
"""
STATE = json.dumps(PAYLOAD)


def run(given: Options) -> None:
    with psycopg.connect(given.database, autocommit=True) as connection:
        connection.execute(TABLES)

    def make(clients: int) -> Any:
        connections = [psycopg.connect(given.database, autocommit=True) for _ in range(clients)]

        def cycle(k: int) -> Parts:
            do, ids = connections[k].execute, {"run": uuid.uuid4(), "approval": uuid.uuid4()}
            begun = clock()
            do(PAUSE, {**ids, "state": STATE}, prepare=True)
            paused = clock()
            assert do(DECIDE, ids, prepare=True).fetchone()
            row = do(CLAIM, ids, prepare=True).fetchone()
            assert row is not None
            assert row[0]["step"] == 1
            resumed = clock()
            do(FINISH, ids, prepare=True)
            return {"pause": paused - begun, "decide_to_resumed": resumed - paused}

        def close() -> None:
            for connection in connections:
                connection.close()

        return cycle, close

    drive(given, make, ("psycopg",))
