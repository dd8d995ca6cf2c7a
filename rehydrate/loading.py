"""Rows as states: locking, loading and decoding runs, the policies they go by, their timers. Nothing is written.

A row decodes into the struct of its name (core/state.py): a projection is nothing but the folded state.
"""

import datetime as dt
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar
from uuid import UUID

import msgspec
from django.db import connection
from msgspec import Struct

from rehydrate import clock, seal, sql
from rehydrate.core.draft import People
from rehydrate.core.policy import UNDECLARED, FlowPolicy, load
from rehydrate.core.state import ATTENTION, Decision, Effect, Ref, Run, State, Wait

T = TypeVar("T", bound=Struct)

_ATTENTION: Final = "(" + ", ".join(f"'{state}'" for state in ATTENTION) + ")"


class Loaded(Struct, frozen=True):
    """A run as it stands, the database's time, and its policies: the newest, and the one pinned at its pause.

    `revision` is what its row was at; `people` are there where they were asked for; `sealed`: a row holds secrets.
    """

    state: State
    now: dt.datetime
    number: int
    policy: FlowPolicy
    pinned: FlowPolicy
    revision: int
    people: People | None = None
    sealed: bool = False


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


#: Who may decide in a workspace: active people, by group, with the groups' roles.
PEOPLE: Final = """
SELECT jsonb_agg(jsonb_build_array(g.name, to_jsonb(g.roles), u.username)) FROM rehydrate_group g
    JOIN rehydrate_membership m ON m.group_id = g.id JOIN auth_user u ON u.id = m.user_id
    WHERE u.is_active AND g.workspace_id ="""


class Ground(Struct, frozen=True):
    """What a run is opened on: the time, its flow's newest policy, those who may decide; or the run that is there."""

    now: dt.datetime
    number: int
    policy: FlowPolicy
    people: People
    known: str | None


_GROUND: Final = f"""
SELECT to_jsonb(clock_timestamp() + %s::interval)::text,
       (SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = w.id AND f.name = %s)::text,
       ({PEOPLE} w.id)::text,
       (SELECT r.id::text FROM rehydrate_run r WHERE r.workspace_id = w.id AND r.flow = %s AND r.external_id = %s)
FROM rehydrate_workspace w WHERE w.id = %s
"""


def ground(workspace: str, flow: str, external_id: str) -> Ground:
    """All that opening a run needs to know. One statement."""
    ((now, number, people, known),) = sql.texts(_GROUND, [clock.interval(), flow, flow, external_id, workspace])
    policy = policy_of(workspace, flow, int(number or 0))
    return Ground(_instant(now), int(number or 0), policy, people_in(people), known)


_moment: Final = msgspec.json.Decoder(dt.datetime)


def _instant(text: str | None) -> dt.datetime:
    assert text is not None
    return _moment.decode(text)


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

_LOCK: Final = "SELECT r.id::text FROM rehydrate_run r WHERE r.id = ANY(%s) ORDER BY r.id FOR NO KEY UPDATE"


#: What an envelope tells beside the state.
_HISTORY: Final = """,
       (SELECT jsonb_agg(to_jsonb(x) ORDER BY x.id)::text FROM rehydrate_externalref x WHERE x.run_id = r.id),
       (SELECT jsonb_agg(to_jsonb(d) ORDER BY d.seq)::text FROM rehydrate_decision d WHERE d.run_id = r.id),
       (SELECT convert_from(s.sealed, 'UTF8') FROM rehydrate_checkpointstate s
         WHERE s.run_id = r.id AND s.seq = (r.checkpoint->>'seq')::bigint)
"""


class Pick(Struct, frozen=True):
    """A run that is not known yet: an expression for its id, and its parameters by name."""

    sql: str
    params: dict[str, Any]


def picked(pick: Pick) -> list[str]:
    """The id of the run that a pick finds, if there is one. For when it cannot be read."""
    rows = sql.texts(f"SELECT {pick.sql}::text", {**pick.params, "offset": clock.interval()})
    return [found for (found,) in rows if found is not None]


@lru_cache
def _reading(
    *, pick: str, one: bool, full: bool, people: bool, history: bool, by_wait: bool, named: frozenset[str]
) -> str:
    """The statement that reads runs with what is asked for. What is not is not in its text: plans stay simple."""
    waits = ["w.status = 'open'", "w.pause = r.pause"]
    waits += [f"w.{column} = ANY(%({name})s)" for name, column in _NAMED_WAITS.items() if name in named]
    effects = [
        f"e.state IN {_ATTENTION}",
        "e.key = ANY(ARRAY(SELECT w.effect_key FROM rehydrate_wait w WHERE w.run_id = r.id AND w.status = 'open'))",
    ]
    effects += [
        f"e.{column} = ANY(%({name})s)"
        for name, columns in _NAMED_EFFECTS.items()
        if name in named
        for column in columns
    ]
    some_waits, some_effects = ("", "") if full else (f"AND ({' OR '.join(each)})" for each in (waits, effects))
    asked = f", ({PEOPLE} r.workspace_id)::text" if people else ""
    which = pick or ("%(id)s" if one else "ANY(%(ids)s)")
    if by_wait:
        which = f"ANY(ARRAY(SELECT w.run_id FROM rehydrate_wait w WHERE w.id = {which}))"
    return f"""
SELECT to_jsonb(r)::text, to_jsonb(clock_timestamp() + %(offset)s::interval)::text,
       (SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = r.workspace_id AND f.name = r.flow)::text,
       (SELECT jsonb_agg(to_jsonb(w))::text FROM rehydrate_wait w WHERE w.run_id = r.id {some_waits}),
       (SELECT jsonb_agg(to_jsonb(e))::text FROM rehydrate_effect e WHERE e.run_id = r.id {some_effects}){asked}
{_HISTORY if history else ""} FROM rehydrate_run r WHERE r.id = {which}"""


_NAMED_WAITS: Final = {"wait_keys": "key", "wait_ids": "id"}
_NAMED_EFFECTS: Final = {"keys": ("key",), "prints": ("fingerprint", "first_fingerprint")}


def load_runs(
    ids: list[str],
    *,
    lock: bool = True,
    full: bool = False,
    people: bool = False,
    history: bool = False,
    by_wait: bool = False,
    pick: Pick | None = None,
    keys: Iterable[str] = (),
    wait_keys: Iterable[str] = (),
    wait_ids: Iterable[str] = (),
    prints: Iterable[str] = (),
) -> dict[str, Loaded]:
    """The runs with these ids, locked for the transaction in the order of their ids.

    The lock comes first and the rest in a statement of its own: a statement that waited for a lock still reads other
    tables as they were before it waited. Without a lock all of it is one statement, which sees one moment. `people`
    brings those who may decide, `history` all references and decisions and the latest checkpoint's opaque state.
    `by_wait`: the ids are those of waits, and their runs are meant; `pick` finds the run in the same statement.
    """
    if not ids and pick is None:
        return {}
    uuids = [UUID(run_id) for run_id in ids]
    given: dict[str, Any] = {
        "keys": list(keys),
        "prints": list(prints),
        "wait_keys": list(wait_keys),
        "wait_ids": [UUID(wait_id) for wait_id in wait_ids],
    }
    statement = _reading(
        pick=pick.sql if pick is not None else "",
        one=len(uuids) == 1,
        full=full,
        people=people,
        history=history,
        by_wait=by_wait,
        named=frozenset() if full else frozenset(name for name, values in given.items() if values),
    )
    where: dict[str, Any] = pick.params if pick is not None else {"id": uuids[0], "ids": uuids}
    if lock:
        sql.texts(_LOCK, [uuids])
    rows = sql.texts(statement, {**given, **where, "offset": clock.interval()})
    loaded: dict[str, Loaded] = {}
    for row, now, at, waits, effects, *more in rows:
        assert row is not None
        number = int(at or 0)
        marks, run = _struct(row, Run)
        staff = people_in(more.pop(0)) if people else None
        refs, decisions, opaque = more if history else (None, None, None)
        sealed = [marks.sealed is not None]
        state = State(
            run,
            {wait.key: wait for wait in structs(waits, Wait, sealed)},
            {effect.key: effect for effect in structs(effects, Effect, sealed)},
            {decision.id: decision for decision in structs(decisions, Decision)},
            {(ref.system, ref.type, ref.ref_id): ref for ref in structs(refs, Ref)},
            complete=full,
            opaque=opaque.encode() if opaque is not None else None,
        )
        policy = policy_of(run.workspace_id, run.flow, number)
        pinned = policy if run.policy == number else policy_of(run.workspace_id, run.flow, run.policy)
        loaded[run.id] = Loaded(state, _instant(now), number, policy, pinned, marks.revision, staff, any(sealed))
    return loaded


def people_in(rows: Any) -> People:
    """The people that `PEOPLE` found: those with the reviewer's role, by group."""
    able = {"reviewer", "operator", "admin"}
    found = _decoded(rows) or []
    reviewers = {name for _, roles, name in found if able & set(roles)}
    groups: dict[str, list[str]] = {}
    for group, _, name in found:
        if name in reviewers:
            groups.setdefault(group, []).append(name)
    return People(groups=groups, reviewers=sorted(reviewers))


class _Marks(Struct):
    """What a row has beside its struct's fields."""

    sealed: str | None = None
    revision: int = 0


def run_of(row: dict[str, Any]) -> Run:
    """A run's row as it comes from to_jsonb, unsealed."""
    return msgspec.convert(seal.unseal(row, row.get("sealed")), Run)


def _struct(row: str, kind: type[T]) -> tuple[_Marks, T]:
    marks = msgspec.json.decode(row, type=_Marks)
    if marks.sealed is None:
        return marks, msgspec.json.decode(row, type=kind)
    return marks, msgspec.convert(seal.unseal(msgspec.json.decode(row), marks.sealed), kind)


def structs(rows: Any, kind: type[T], sealed: list[bool] | None = None) -> list[T]:
    """Rows as they come from to_jsonb, unsealed. Whether any was sealed is added to the list `sealed`."""
    if not rows:
        return []
    hidden = not isinstance(rows, str) or any(m.sealed for m in msgspec.json.decode(rows, type=list[_Marks]))
    if sealed is not None:
        sealed.append(hidden)
    if not hidden:
        return msgspec.json.decode(rows, type=list[kind])  # type: ignore[valid-type]
    return [msgspec.convert(seal.unseal(row, row.get("sealed")), kind) for row in _decoded(rows)]


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
