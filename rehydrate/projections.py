"""Rows to states and back, many runs in one statement. Only `ledger` and the rebuild use this; no rules live here.

A row decodes into the struct of its name (core/state.py) and a struct is written as its row, so that a projection is
nothing but the folded state: what `evolve` says is what the tables hold.
"""

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from django.db import connection
from msgspec import Struct

from rehydrate import clock, seal
from rehydrate.core import events as ev
from rehydrate.core.canonical import event_hash
from rehydrate.core.policy import FlowPolicy, load
from rehydrate.core.state import Decision, Effect, Ref, Run, State, Wait

T = TypeVar("T", bound=Struct)

_ATTENTION: Final = "('planned','started','unknown','compensating','compensation_unknown')"


class Loaded(Struct, frozen=True):
    """A locked run as it stands, the database's time, and its policies: the newest, and the one pinned at its pause."""

    state: State
    now: dt.datetime
    number: int
    policy: FlowPolicy
    pinned: FlowPolicy


class Change(Struct, frozen=True):
    """What one transaction did to one run."""

    before: State | None
    after: State
    recorded: list[ev.Recorded]
    secret: tuple[str, ...] = ()
    now: dt.datetime | None = None


# -- policies: written once, so they may be kept in memory

_policies: dict[tuple[str, str, int], FlowPolicy] = {}
UNDECLARED: Final = FlowPolicy(declared=False)


def policy_of(workspace: str, flow: str, number: int) -> FlowPolicy:
    """A version of a flow's policy; number 0 is that of a flow that no file names."""
    if number == 0:
        return UNDECLARED
    key = (workspace, flow, number)
    if key not in _policies:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT v.body FROM rehydrate_policyversion v JOIN rehydrate_flow f ON f.id = v.flow_id"
                " WHERE f.workspace_id = %s AND f.name = %s AND v.number = %s",
                [workspace, flow, number],
            )
            row = cursor.fetchone()
        _policies[key] = load(_decoded(row[0]))
    return _policies[key]


def current_policy(workspace: str, flow: str) -> tuple[int, FlowPolicy]:
    """The newest policy of a flow and its number."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current FROM rehydrate_flow WHERE workspace_id = %s AND name = %s", [workspace, flow])
        row = cursor.fetchone()
    number = row[0] if row else 0
    return number, policy_of(workspace, flow, number)


_slugs: dict[str, str] = {}


def workspace_slug(workspace: str) -> str:
    """The workspace's name in answers; it never changes."""
    if workspace not in _slugs:
        with connection.cursor() as cursor:
            cursor.execute("SELECT slug FROM rehydrate_workspace WHERE id = %s", [workspace])
            row = cursor.fetchone()
        _slugs[workspace] = row[0] if row else workspace
    return _slugs[workspace]


def forget() -> None:
    """For tests, whose databases come and go within one process."""
    _policies.clear()
    _slugs.clear()


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str | bytes) else value


# -- reading

_LOCK: Final = "SELECT to_jsonb(r) FROM rehydrate_run r WHERE r.id = ANY(%s) ORDER BY r.id"

_PARTS: Final = f"""
SELECT r.id, clock_timestamp() + %s::interval,
       coalesce((SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = r.workspace_id AND f.name = r.flow), 0),
       (SELECT jsonb_agg(to_jsonb(w)) FROM rehydrate_wait w WHERE w.run_id = r.id AND
           (%s OR w.status = 'open' OR w.pause = r.pause OR w.key = ANY(%s) OR w.id = ANY(%s))),
       (SELECT jsonb_agg(to_jsonb(e)) FROM rehydrate_effect e WHERE e.run_id = r.id AND
           (%s OR e.state IN {_ATTENTION} OR e.key = ANY(%s)
            OR e.fingerprint = ANY(%s) OR e.first_fingerprint = ANY(%s)))
FROM rehydrate_run r WHERE r.id = ANY(%s)
"""


def load_runs(
    ids: list[str],
    *,
    lock: bool = True,
    full: bool = False,
    keys: Iterable[str] = (),
    wait_keys: Iterable[str] = (),
    wait_ids: Iterable[str] = (),
    prints: Iterable[str] = (),
) -> dict[str, Loaded]:
    """The runs with these ids, locked for the transaction in the order of their ids.

    The lock comes first and the rest in a statement of its own: a statement that waited for a lock still reads other
    tables as they were before it waited.
    """
    uuids = [UUID(run_id) for run_id in ids]
    with connection.cursor() as cursor:
        cursor.execute(_LOCK + (" FOR NO KEY UPDATE" if lock else ""), [uuids])
        runs = {row["id"]: row for (text,) in cursor.fetchall() for row in [_decoded(text)]}
        if not runs:
            return {}
        some = [list(keys), list(prints)]
        cursor.execute(
            _PARTS,
            [
                clock.interval(),
                full,
                list(wait_keys),
                [UUID(wait_id) for wait_id in wait_ids],
                full,
                some[0],
                some[1],
                some[1],
                [UUID(run_id) for run_id in runs],
            ],
        )
        rows = cursor.fetchall()
    loaded: dict[str, Loaded] = {}
    for run_id, now, number, waits, effects in rows:
        run = msgspec.convert(runs[str(run_id)], Run)
        state = State(
            run,
            {wait.key: wait for wait in structs(waits, Wait)},
            {effect.key: effect for effect in structs(effects, Effect)},
            complete=full,
        )
        policy = policy_of(run.workspace_id, run.flow, number)
        pinned = policy if run.policy == number else policy_of(run.workspace_id, run.flow, run.policy)
        loaded[run.id] = Loaded(state, now, number, policy, pinned)
    return loaded


def structs(rows: Any, kind: type[T]) -> list[T]:
    """Rows as they come from to_jsonb, unsealed."""
    found = _decoded(rows) or []
    return [msgspec.convert(seal.unseal(row, row.get("sealed")), kind) for row in found]


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
_INSERT_RUN: Final = _insert("rehydrate_run", _RUN)
_UPDATE_RUN: Final = (
    "UPDATE rehydrate_run t SET "
    + ", ".join(f'"{column}" = x."{column}"' for column in _RUN if column not in ("id", "workspace_id", "created_at"))
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
        payload, sealed = seal.seal(ev.dump(recorded.fact), change.secret)
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


def instant(when: dt.datetime) -> str:
    """RFC 3339 in UTC with microseconds as they are and a Z: the one spelling in hashes and answers."""
    return when.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")


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


def save(changes: list[Change]) -> None:
    """Events and projections of many runs, one statement a table. The runs are locked, or new."""
    new: list[Run] = []
    old: list[Run] = []
    events: list[dict[str, Any]] = []
    parts: dict[str, list[dict[str, Any]]] = {"waits": [], "effects": [], "decisions": [], "refs": []}
    for change in changes:
        rows, last = event_rows(change)
        events += rows
        run = msgspec.structs.replace(change.after.run, last_hash=last)
        (new if change.before is None else old).append(run)
        for name, found in rows_of(change.before, change.after, change.secret).items():
            parts[name] += found
    with connection.cursor() as cursor:
        for sql, given in (
            (_INSERT_RUN, new),
            (_UPDATE_RUN, old),
            (_INSERT_EVENTS, events),
            (_UPSERT_WAITS, parts["waits"]),
            (_UPSERT_EFFECTS, parts["effects"]),
            (_INSERT_DECISIONS, parts["decisions"]),
            (_INSERT_REFS, parts["refs"]),
        ):
            if given:
                cursor.execute(sql, [msgspec.json.encode(given).decode()])
        _save_timers(cursor, changes)


# -- timers

TimerKey = tuple[str, str]


def timers(state: State) -> dict[TimerKey, dt.datetime]:
    """What becomes due by itself, by (kind, subject). Leases and alarms have columns of their own on the run."""
    found: dict[TimerKey, dt.datetime] = {}
    run = state.run
    if run.ended:
        return found
    for wait in state.waits.values():
        if wait.open:
            found["deadline", wait.id] = wait.due_at
            if wait.remind_at is not None:
                found["reminder", wait.id] = wait.remind_at
            if wait.escalate_at is not None:
                found["escalation", wait.id] = wait.escalate_at
    if run.retry_at is not None and not run.leased:
        found["retry", ""] = run.retry_at
    for effect in state.effects.values():
        if effect.state == "planned" and not run.leased:
            for approval in effect.approvals.values():
                if approval["status"] == "approved" and approval["expires_at"]:
                    found["expiry", effect.key] = dt.datetime.fromisoformat(approval["expires_at"])
    return found


def _save_timers(cursor: Any, changes: list[Change]) -> None:
    over: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []
    for change in changes:
        was = timers(change.before) if change.before is not None else {}
        now_pending = timers(change.after)
        for (kind, subject), due_at in was.items():
            # Whatever was due has had its effect in this transaction, even where nothing came of it.
            fired = change.now is not None and due_at <= change.now
            if fired or now_pending.get((kind, subject)) != due_at:
                fired_at = instant(change.now) if fired and change.now is not None else None
                over.append({"run_id": change.after.run.id, "kind": kind, "subject": subject, "fired_at": fired_at})
        for (kind, subject), due_at in now_pending.items():
            if was.get((kind, subject)) != due_at and (change.now is None or due_at > change.now):
                pending.append(
                    {"run_id": change.after.run.id, "kind": kind, "subject": subject, "due_at": instant(due_at)}
                )
    if over:
        payload = msgspec.json.encode(over).decode()
        same = "t.run_id = x.run_id AND t.kind = x.kind AND t.subject = x.subject AND t.fired_at IS NULL"
        source = "jsonb_populate_recordset(null::rehydrate_timer, %s::jsonb) x"
        cursor.execute(
            f"UPDATE rehydrate_timer t SET fired_at = x.fired_at FROM {source} WHERE {same} AND x.fired_at IS NOT NULL",
            [payload],
        )
        cursor.execute(f"DELETE FROM rehydrate_timer t USING {source} WHERE {same} AND x.fired_at IS NULL", [payload])
    if pending:
        cursor.execute(
            _insert("rehydrate_timer", ["run_id", "kind", "subject", "due_at"]), [msgspec.json.encode(pending).decode()]
        )
