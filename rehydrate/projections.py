"""States as rows, many runs in one statement a table: the events with their chain, and the projections of them.

Only `ledger` and the rebuild use this; no rules live here. A struct is written as its row (core/state.py), so that a
projection is nothing but the folded state: what `evolve` says is what the tables hold.
"""

import datetime as dt
from typing import Any, Final

import msgspec
from django.db import connection
from msgspec import Struct

from rehydrate import notices, outbox, seal
from rehydrate.core import events as ev
from rehydrate.core.canonical import event_hash, instant
from rehydrate.core.state import Decision, Effect, Ref, Run, State, Wait
from rehydrate.loading import timers


class Change(Struct, frozen=True):
    """What one transaction did to one run."""

    before: State | None
    after: State
    recorded: list[ev.Recorded]
    secret: tuple[str, ...] = ()
    now: dt.datetime | None = None
    deliver: bool = False  # the flow names a URL for its deliveries


# -- writing


def _columns(kind: type[Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _upsert(table: str, kind: type[Struct], on: str, keep: tuple[str, ...] = ()) -> str:
    columns = [*_columns(kind), "sealed"]
    quoted = ", ".join(f'"{column}"' for column in columns)
    sets = ", ".join(f'"{column}" = EXCLUDED."{column}"' for column in columns if column not in keep)
    return (
        f"INSERT INTO {table} ({quoted}) SELECT {quoted} FROM jsonb_populate_recordset(null::{table}, %s::jsonb)"
        f" ON CONFLICT ({on}) DO UPDATE SET {sets}"
    )


def _insert(table: str, columns: list[str], end: str = "") -> str:
    quoted = ", ".join(f'"{column}"' for column in columns)
    return (
        f"INSERT INTO {table} ({quoted}) SELECT {quoted} FROM jsonb_populate_recordset(null::{table}, %s::jsonb) {end}"
    )


_RUN: Final = _columns(Run)
#: What of a run an agent or a person may have written secrets into.
_SEALABLE: Final = ("checkpoint", "result", "last_error", "cancelled", "labels")
_INSERT_RUN: Final = _insert("rehydrate_run", [*_RUN, "sealed"])
_UPDATE_RUN: Final = (
    "UPDATE rehydrate_run t SET "
    + ", ".join(
        f'"{column}" = x."{column}"'
        for column in [*_RUN, "sealed"]
        if column not in ("id", "workspace_id", "created_at")
    )
    + " FROM jsonb_populate_recordset(null::rehydrate_run, %s::jsonb) x WHERE t.id = x.id"
)
_EVENT: Final = [
    "run_id", "workspace_id", "seq", "type", "actor_kind", "actor_id", "actor_name", "at",
    "payload", "sealed", "prev_hash", "hash",
]  # fmt: skip
_INSERT_EVENTS: Final = _insert("rehydrate_ledgerevent", _EVENT)
_UPSERT_WAITS: Final = _upsert("rehydrate_wait", Wait, "id", ("id", "run_id", "key", "token"))
_UPSERT_EFFECTS: Final = _upsert("rehydrate_effect", Effect, "run_id, key", ("run_id", "key"))
_INSERT_DECISIONS: Final = _insert("rehydrate_decision", [*_columns(Decision), "sealed"], "ON CONFLICT (id) DO NOTHING")
_INSERT_REFS: Final = _insert("rehydrate_externalref", _columns(Ref), "ON CONFLICT DO NOTHING")


def event_rows(change: Change) -> tuple[list[dict[str, Any]], str]:
    """The events as rows, chained on, and the hash of the last."""
    prev = change.before.run.last_hash if change.before is not None else change.after.run.last_hash
    run = change.after.run
    rows = []
    for recorded in change.recorded:
        secret = change.secret
        if isinstance(recorded.fact, ev.RunPaused | ev.WaitOpened):
            secret += ("/token",)  # whoever reads history must not be able to answer the callback
        payload, sealed = seal.seal(ev.dump(recorded.fact), secret)
        actor = {"kind": recorded.actor.kind, "id": recorded.actor.id, "name": recorded.actor.name}
        at = instant(recorded.at)
        type_ = ev.type_of(recorded.fact)
        hash_ = event_hash(prev, run=run.id, seq=recorded.seq, type_=type_, actor=actor, at=at, payload=payload)
        rows.append(
            {
                "run_id": run.id,
                "workspace_id": run.workspace_id,
                "seq": recorded.seq,
                "type": type_,
                "actor_kind": recorded.actor.kind,
                "actor_id": recorded.actor.id,
                "actor_name": recorded.actor.name,
                "at": at,
                "payload": payload,
                "sealed": sealed,
                "prev_hash": prev,
                "hash": hash_,
            }
        )
        prev = hash_
    return rows, prev


def rows_of(before: State | None, after: State, secret: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """What changed, as rows by table."""
    was = before or State(Run(id=after.run.id))
    waits = [wait for key, wait in after.waits.items() if was.waits.get(key) is not wait]
    effects = [effect for key, effect in after.effects.items() if was.effects.get(key) is not effect]
    decisions = [decision for key, decision in after.decisions.items() if key not in was.decisions]
    refs = [ref for key, ref in after.refs.items() if key not in was.refs]
    return {
        "waits": [_row(wait, secret) for wait in waits],
        "effects": [_row(effect, secret) for effect in effects],
        "decisions": [_row(decision, secret) for decision in decisions],
        "refs": [msgspec.to_builtins(ref) for ref in refs],
    }


def _row(struct: Struct, secret: tuple[str, ...]) -> dict[str, Any]:
    row, sealed = seal.seal(msgspec.to_builtins(struct), secret)
    return {**row, "sealed": sealed}


def _run_row(run: Run, secret: tuple[str, ...]) -> Run | dict[str, Any]:
    """A run as its row; the struct itself where nothing is secret, which is written the same and quicker."""
    if not secret:
        return run
    row = msgspec.to_builtins(run)
    kept, sealed = seal.seal({name: row[name] for name in _SEALABLE}, secret)
    return {**row, **kept, "sealed": sealed}


def save(changes: list[Change]) -> None:
    """Events and projections of many runs, in one statement (two where a timer is set anew). The runs are locked, or
    new.
    """
    new: list[Run | dict[str, Any]] = []
    old: list[Run | dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    parts: dict[str, list[dict[str, Any]]] = {"waits": [], "effects": [], "decisions": [], "refs": []}
    for change in changes:
        rows, last = event_rows(change)
        events += rows
        run = msgspec.structs.replace(change.after.run, last_hash=last)
        (new if change.before is None else old).append(_run_row(run, change.secret))
        for name, found in rows_of(change.before, change.after, change.secret).items():
            parts[name] += found
    fired, gone, pending = _timer_rows(changes)
    writes: list[tuple[str, Any]] = [
        (_INSERT_RUN, new),
        (_UPDATE_RUN, old),
        (_INSERT_EVENTS, events),
        (_UPSERT_WAITS, parts["waits"]),
        (_UPSERT_EFFECTS, parts["effects"]),
        (_INSERT_DECISIONS, parts["decisions"]),
        (_INSERT_REFS, parts["refs"]),
        (_FIRE_TIMERS, fired),
        (_DELETE_TIMERS, gone),
        (outbox.INSERT, outbox.rows(changes)),
    ]
    # The parts of one statement do not see each other: a timer that is set anew waits until its row before is gone.
    over = {_timer_key(row) for row in (*fired, *gone)}
    anew = [row for row in pending if _timer_key(row) in over]
    writes.append((_INSERT_TIMERS, [row for row in pending if _timer_key(row) not in over]))
    news = notices.of(changes, due=(dt.datetime.fromisoformat(row["due_at"]) for row in pending))
    with connection.cursor() as cursor:
        _write(cursor, writes, news)
        _write(cursor, [(_INSERT_TIMERS, anew)])


def _write(cursor: Any, writes: list[tuple[str, Any]], news: dict[notices.Kind, Any] | None = None) -> None:
    """What there is to write, as one statement: each way to the database costs as much as the work done there."""
    given = [(sql, msgspec.json.encode(rows).decode()) for sql, rows in writes if rows]
    sent = next((f"w{i}" for i, (sql, _) in enumerate(given) if sql is outbox.INSERT), None)
    if len(given) == 1 and not news and sent is None:
        cursor.execute(given[0][0], [given[0][1]])
    elif given:
        steps = ", ".join(f"w{i} AS ({sql})" for i, (sql, _) in enumerate(given))
        end, told = (notices.tell(sent), [notices.parts(news or {})]) if news or sent else ("SELECT 1", [])
        cursor.execute(f"WITH {steps} {end}", [*(rows for _, rows in given), *told])


_TIMER_SOURCE: Final = "jsonb_populate_recordset(null::rehydrate_timer, %s::jsonb) x"
_TIMER_SAME: Final = "t.run_id = x.run_id AND t.kind = x.kind AND t.subject = x.subject AND t.fired_at IS NULL"
_FIRE_TIMERS: Final = f"UPDATE rehydrate_timer t SET fired_at = x.fired_at FROM {_TIMER_SOURCE} WHERE {_TIMER_SAME}"
_DELETE_TIMERS: Final = f"DELETE FROM rehydrate_timer t USING {_TIMER_SOURCE} WHERE {_TIMER_SAME}"
_INSERT_TIMERS: Final = _insert("rehydrate_timer", ["run_id", "kind", "subject", "due_at"])

Rows = list[dict[str, Any]]


def _timer_key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["run_id"], row["kind"], row["subject"]


def _timer_rows(changes: list[Change]) -> tuple[Rows, Rows, Rows]:
    """The timers that fired, those that are needed no more, and those to set."""
    fired: Rows = []
    gone: Rows = []
    pending: Rows = []
    for change in changes:
        was = timers(change.before) if change.before is not None else {}
        now_pending = timers(change.after)
        for (kind, subject), due_at in was.items():
            row = {"run_id": change.after.run.id, "kind": kind, "subject": subject}
            # Whatever was due has had its effect in this transaction, even where nothing came of it.
            if change.now is not None and due_at <= change.now:
                fired.append({**row, "fired_at": instant(change.now)})
            elif now_pending.get((kind, subject)) != due_at:
                gone.append(row)
        for (kind, subject), due_at in now_pending.items():
            if was.get((kind, subject)) != due_at and (change.now is None or due_at > change.now):
                row = {"run_id": change.after.run.id, "kind": kind, "subject": subject}
                pending.append({**row, "due_at": instant(due_at)})
    return fired, gone, pending
