"""What reached the outside world, kept in one SQLite file so that a restart forgets nothing. No HTTP lives here."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Json = dict[str, Any]

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    at REAL NOT NULL,
    system TEXT NOT NULL,
    action TEXT NOT NULL,
    key TEXT NOT NULL,
    arguments TEXT NOT NULL,
    outcome TEXT NOT NULL,          -- done: it happened; repeat: known by its key, not done again; refused: not done
    result TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_key ON requests (key);
CREATE TABLE IF NOT EXISTS callbacks (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,             -- customer | supplier
    subject TEXT NOT NULL,          -- the case or order that it is about
    url TEXT NOT NULL,
    webhook_id TEXT NOT NULL,
    details TEXT NOT NULL,
    body TEXT,                      -- what is sent; null until somebody has decided on it
    due_at REAL,                    -- when it is sent (next); null: not by itself
    attempts INTEGER NOT NULL DEFAULT 0,
    answer TEXT                     -- how the other side answered; null until it has
);
CREATE TABLE IF NOT EXISTS modes (
    system TEXT NOT NULL,
    action TEXT NOT NULL,
    mode TEXT NOT NULL,
    seconds REAL NOT NULL,
    times INTEGER,                  -- how many requests it is for; null: all
    PRIMARY KEY (system, action)
);
"""


class Journal:
    """Every method is one transaction; threads may share it."""

    def __init__(self, path: Path | str) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self.new = not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'requests'").fetchone()
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # --- requests ----------------------------------------------------

    def take(self, system: str, action: str, key: str, arguments: Json, *, honours_key: bool, make: Any) -> Json:
        """Do what is asked: `make(n)` gives the result of request number n. A key that is honoured is done once."""
        with self._transaction() as db:
            if honours_key and key:
                known = db.execute(
                    "SELECT result FROM requests WHERE key = ? AND system = ? AND action = ? AND outcome = 'done'",
                    (key, system, action),
                ).fetchone()
                if known:
                    self._insert(db, system, action, key, arguments, "repeat", known["result"])
                    return {**json.loads(known["result"]), "repeated": True}
            n = self._insert(db, system, action, key, arguments, "done", "{}")
            result: Json = make(n)
            db.execute("UPDATE requests SET result = ? WHERE n = ?", (json.dumps(result), n))
            return result

    def refuse(self, system: str, action: str, key: str, arguments: Json, why: str) -> None:
        with self._transaction() as db:
            self._insert(db, system, action, key, arguments, "refused", json.dumps({"detail": why}))

    def _insert(
        self, db: sqlite3.Connection, system: str, action: str, key: str, arguments: Json, outcome: str, result: str
    ) -> int:
        cursor = db.execute(
            "INSERT INTO requests (at, system, action, key, arguments, outcome, result) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (time.time(), system, action, key, json.dumps(arguments), outcome, result),
        )
        return int(cursor.lastrowid or 0)

    def requests(self, *, key: str | None = None, run: str | None = None, limit: int = 500) -> list[Json]:
        """The newest first; of one key, or of one run (`flow/external id`, with which its keys begin)."""
        where, values = "1 = 1", list[Any]()
        if key is not None:
            where, values = "key = ?", [key]
        elif run is not None:
            where, values = "substr(key, 1, ?) = ?", [len(run) + 1, run + "/"]
        with self._lock:
            rows = self._db.execute(
                f"SELECT * FROM requests WHERE {where} ORDER BY n DESC LIMIT ?",  # noqa: S608 (no outside text in it)
                (*values, limit),
            ).fetchall()
        return [_request(row) for row in rows]

    def request(self, n: int) -> Json | None:
        with self._lock:
            row = self._db.execute("SELECT * FROM requests WHERE n = ?", (n,)).fetchone()
        return _request(row) if row else None

    def look_up(self, key: str) -> Json | None:
        """The result of what was done under a key."""
        with self._lock:
            row = self._db.execute(
                "SELECT result FROM requests WHERE key = ? AND outcome = 'done' ORDER BY n LIMIT 1", (key,)
            ).fetchone()
        return json.loads(row["result"]) if row else None

    def counts(self) -> dict[str, int]:
        """How often each key was really done. Anything but one is a fault of somebody's."""
        with self._lock:
            rows = self._db.execute("SELECT key, count(*) AS n FROM requests WHERE outcome = 'done' GROUP BY key")
            return {row["key"]: row["n"] for row in rows.fetchall()}

    # --- modes -------------------------------------------------------

    def set_mode(self, system: str, action: str, mode: str, seconds: float, times: int | None) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM modes WHERE system = ? AND action = ?", (system, action))
            if mode != "normal":
                db.execute("INSERT INTO modes VALUES (?, ?, ?, ?, ?)", (system, action, mode, seconds, times))

    def use_mode(self, system: str, action: str) -> tuple[str, float]:
        """The mode for this request: of the action, else of the system, else of everything (`*`)."""
        with self._transaction() as db:
            for place in ((system, action), (system, "*"), ("*", "*")):
                row = db.execute("SELECT * FROM modes WHERE system = ? AND action = ?", place).fetchone()
                if row is None:
                    continue
                if row["times"] is not None:
                    db.execute("UPDATE modes SET times = times - 1 WHERE system = ? AND action = ?", place)
                    db.execute("DELETE FROM modes WHERE times <= 0")
                return row["mode"], row["seconds"]
        return "normal", 0.0

    def modes(self) -> list[Json]:
        with self._lock:
            return [dict(row) for row in self._db.execute("SELECT * FROM modes ORDER BY system, action").fetchall()]

    # --- callbacks ---------------------------------------------------

    def add_callback(
        self, kind: str, subject: str, url: str, *, details: Json, body: Json | None = None, after: float | None = None
    ) -> None:
        """Somebody outside may call this URL; by itself after so many seconds, or when a person plays them."""
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM callbacks WHERE url = ?", (url,)).fetchone():
                return
            db.execute(
                "INSERT INTO callbacks (kind, subject, url, webhook_id, details, body, due_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    kind,
                    subject,
                    url,
                    f"msg_{uuid.uuid4().hex}",
                    json.dumps(details),
                    None if body is None else json.dumps(body),
                    None if after is None else time.time() + after,
                ),
            )

    def callbacks(self, *, kind: str | None = None, subject: str | None = None) -> list[Json]:
        with self._lock:
            rows = self._db.execute("SELECT * FROM callbacks ORDER BY n DESC").fetchall()
        found = [_callback(row) for row in rows]
        return [c for c in found if kind in (None, c["kind"]) and subject in (None, c["subject"])]

    def due_callback(self) -> tuple[Json | None, float]:
        """The next callback that is due now (its next try is booked), and the seconds until there may be another."""
        now = time.time()
        with self._transaction() as db:
            row = db.execute(
                "SELECT * FROM callbacks WHERE answer IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT 1"
            ).fetchone()
            if row is None:
                return None, 60.0
            if row["due_at"] > now:
                return None, row["due_at"] - now
            again = now + min(60.0, 2.0 ** (row["attempts"] + 1))
            db.execute("UPDATE callbacks SET attempts = attempts + 1, due_at = ? WHERE n = ?", (again, row["n"]))
            return _callback(row), 0.0

    def send_callback(self, n: int, body: Json) -> None:
        """Somebody plays the outside: this is what they say, now."""
        with self._transaction() as db:
            db.execute(
                "UPDATE callbacks SET body = ?, due_at = ? WHERE n = ? AND answer IS NULL",
                (json.dumps(body), time.time(), n),
            )

    def answered_callback(self, n: int, answer: str) -> None:
        with self._transaction() as db:
            db.execute("UPDATE callbacks SET answer = ?, due_at = NULL WHERE n = ?", (answer, n))


def _request(row: sqlite3.Row) -> Json:
    return {**dict(row), "arguments": json.loads(row["arguments"]), "result": json.loads(row["result"])}


def _callback(row: sqlite3.Row) -> Json:
    body = row["body"]
    return {**dict(row), "details": json.loads(row["details"]), "body": None if body is None else json.loads(body)}
