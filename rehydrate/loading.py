"""Rows as states: locking, loading and decoding runs, the policies they go by, their timers. Nothing is written.

A row decodes into the struct of its name (core/state.py): a projection is nothing but the folded state.
"""

import datetime as dt
from collections.abc import Iterable
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from django.db import connection
from msgspec import Struct

from rehydrate import clock, seal
from rehydrate.core.policy import UNDECLARED, FlowPolicy, load
from rehydrate.core.state import ATTENTION, Effect, Run, State, Wait

T = TypeVar("T", bound=Struct)

_ATTENTION: Final = "(" + ", ".join(f"'{state}'" for state in ATTENTION) + ")"


class Loaded(Struct, frozen=True):
    """A locked run as it stands, the database's time, and its policies: the newest, and the one pinned at its pause."""

    state: State
    now: dt.datetime
    number: int
    policy: FlowPolicy
    pinned: FlowPolicy


# -- policies: written once, so they may be kept in memory

_policies: dict[tuple[str, str, int], FlowPolicy] = {}


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

_LOCK: Final = "SELECT to_jsonb(r) FROM rehydrate_run r WHERE r.id = ANY(%s) ORDER BY r.id FOR NO KEY UPDATE"

_PARTS: Final = f"""
SELECT r.id, clock_timestamp() + %s::interval,
       coalesce((SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = r.workspace_id AND f.name = r.flow), 0),
       (SELECT jsonb_agg(to_jsonb(w)) FROM rehydrate_wait w WHERE w.run_id = r.id AND
           (%s OR w.status = 'open' OR w.pause = r.pause OR w.key = ANY(%s) OR w.id = ANY(%s))),
       (SELECT jsonb_agg(to_jsonb(e)) FROM rehydrate_effect e WHERE e.run_id = r.id AND
           (%s OR e.state IN {_ATTENTION} OR e.key = ANY(%s)
            OR e.key = ANY(ARRAY(SELECT w.effect_key FROM rehydrate_wait w WHERE w.run_id = r.id AND w.status = 'open'))
            OR e.fingerprint = ANY(%s) OR e.first_fingerprint = ANY(%s)))
FROM rehydrate_run r WHERE r.id = ANY(%s)
"""
_AT_ONCE: Final = _PARTS.replace("SELECT r.id,", "SELECT to_jsonb(r),", 1)


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
    tables as they were before it waited. Without a lock all of it is one statement, which sees one moment.
    """
    uuids = [UUID(run_id) for run_id in ids]
    same = list(prints)
    named: list[Any] = [list(wait_keys), [UUID(wait_id) for wait_id in wait_ids], full, list(keys), same, same]
    with connection.cursor() as cursor:
        runs: dict[str, dict[str, Any]] = {}
        if lock:
            cursor.execute(_LOCK, [uuids])
            runs = {row["id"]: row for (text,) in cursor.fetchall() for row in [_decoded(text)]}
            if not runs:
                return {}
        cursor.execute(_PARTS if lock else _AT_ONCE, [clock.interval(), full, *named, uuids])
        rows = cursor.fetchall()
    loaded: dict[str, Loaded] = {}
    for key, now, number, waits, effects in rows:
        run = run_of(runs[str(key)] if lock else _decoded(key))
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


def run_of(row: dict[str, Any]) -> Run:
    """A run's row as it comes from to_jsonb, unsealed."""
    return msgspec.convert(seal.unseal(row, row.get("sealed")), Run)


def structs(rows: Any, kind: type[T]) -> list[T]:
    """Rows as they come from to_jsonb, unsealed."""
    found = _decoded(rows) or []
    return [msgspec.convert(seal.unseal(row, row.get("sealed")), kind) for row in found]


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
