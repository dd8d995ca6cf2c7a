"""Rows as states: locking, loading and decoding runs, the policies they go by, their timers. Nothing is written.

A row decodes into the struct of its name (core/state.py): a projection is nothing but the folded state.
"""

import datetime as dt
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

import msgspec
from django.db import connection
from msgspec import Struct

from rehydrate import clock, rights, seal, sql
from rehydrate.core.draft import People
from rehydrate.core.policy import UNDECLARED, FlowPolicy, load
from rehydrate.core.state import ATTENTION, Decision, Effect, Ref, Run, State, Wait

T = TypeVar("T", bound=Struct)

_ATTENTION: Final = "(" + ", ".join(f"'{state}'" for state in ATTENTION) + ")"


class Loaded(Struct, frozen=True):
    """A run as it stands, the database's time, and its policies: the newest, and the one pinned at its pause.

    `revision` is what its row was at; `people` are there where they were asked for; `sealed`: a row holds secrets;
    `rights` is the number of rights at that moment.
    """

    state: State
    now: dt.datetime
    number: int
    policy: FlowPolicy
    pinned: FlowPolicy
    revision: int
    people: People | None = None
    sealed: bool = False
    rights: int | None = None


# -- policies: written once, so they may be kept in memory

_policies: dict[tuple[str, str, int], FlowPolicy] = {}


def policy_of(workspace: str, flow: str, number: int) -> FlowPolicy:
    """A version of a flow's policy; number 0 is that of a flow that no file names."""
    if number == 0:
        return UNDECLARED
    key = (workspace, flow, number)
    if key not in _policies:
        ((body,),) = sql.texts(
            "SELECT v.body::text FROM rehydrate_policyversion v JOIN rehydrate_flow f ON f.id = v.flow_id"
            " WHERE f.workspace_id = %s AND f.name = %s AND v.number = %s",
            [workspace, flow, number],
        )
        _policies[key] = load(_decoded(body))
    return _policies[key]


#: Who may decide in a workspace: active people, by group, with the groups' roles.
PEOPLE: Final = """
SELECT jsonb_agg(jsonb_build_array(g.name, to_jsonb(g.roles), u.username)) FROM rehydrate_group g
    JOIN rehydrate_membership m ON m.group_id = g.id JOIN auth_user u ON u.id = m.user_id
    WHERE u.is_active AND g.workspace_id ="""


def _people(workspace: str) -> str:
    """Those of a workspace, as a value within a statement; `_SAME` where no rights changed since they were read."""
    known = f"{rights.NUMBER} = %(people_at)s::bigint AND {workspace} = ANY(%(people_of)s::uuid[])"
    return f"CASE WHEN {known} THEN '{_SAME}' ELSE ({PEOPLE} {workspace})::text END"


_SAME: Final = "same"
#: Of so many workspaces the people are kept.
_KEPT: Final = 50
#: The number of rights, and whose people were read at it, by workspace.
_people_at: tuple[int, dict[str, People]] | None = None


def _common() -> dict[str, Any]:
    """Parameters of every statement that reads runs. What a transaction has not committed yet is nothing to rely on."""
    kept = None if connection.in_atomic_block else _people_at
    at, of = kept if kept is not None else (None, {})
    return {"offset": clock.interval(), "people_at": at, "people_of": list(of), "kept": of}


def _people_in(text: str | None, workspace: str, number: int | None, common: dict[str, Any]) -> People:
    global _people_at
    if text == _SAME:
        return cast(People, common["kept"][workspace])
    found = people_in(text)
    if number is not None and not connection.in_atomic_block:
        kept = _people_at[1] if _people_at is not None and _people_at[0] == number else {}
        _people_at = number, {**(kept if len(kept) < _KEPT else {}), workspace: found}
    return found


def people_at(number: int, workspace: str) -> People | None:
    """Who may decide there, if they were read at this number of rights."""
    return _people_at[1].get(workspace) if _people_at is not None and _people_at[0] == number else None


class Ground(Struct, frozen=True):
    """What a run is opened on: the time, its flow's newest policy, those who may decide; or the run that is there."""

    now: dt.datetime
    number: int
    policy: FlowPolicy
    people: People
    known: str | None
    rights: int | None


class Site(Struct, frozen=True):
    """Where a run is to be opened."""

    workspace: str
    flow: str
    external_id: str


_GROUNDS: Final = f"""
SELECT a.n::text, to_jsonb(clock_timestamp() + %(offset)s::interval)::text,
       (SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = w.id AND f.name = a.flow)::text,
       {_people("w.id")},
       (SELECT r.id FROM rehydrate_run r
         WHERE r.workspace_id = w.id AND r.flow = a.flow AND r.external_id = a.external_id)::text,
       {rights.NUMBER}::text
FROM unnest(%(workspaces)s::uuid[], %(flows)s::text[], %(external_ids)s::text[])
    WITH ORDINALITY AS a(workspace, flow, external_id, n) JOIN rehydrate_workspace w ON w.id = a.workspace"""


def grounds(sites: Sequence[Site]) -> list[Ground]:
    """All that opening a run at each of these needs to know, in their order. One statement."""
    given = {
        "workspaces": [site.workspace for site in sites],
        "flows": [site.flow for site in sites],
        "external_ids": [site.external_id for site in sites],
    }
    common = _common()
    rows = {int(place or 0): row for place, *row in sql.texts(_GROUNDS, {**given, **common})}
    return [_ground_in(rows[place], site, common) for place, site in enumerate(sites, 1)]


def _ground_in(row: Sequence[str | None], site: Site, common: dict[str, Any]) -> Ground:
    now, at, people, known, right = row
    number = int(at or 0)
    policy = policy_of(site.workspace, site.flow, number)
    staff = _people_in(people, site.workspace, _number(right), common)
    return Ground(_instant(now), number, policy, staff, known, _number(right))


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


_moment: Final = msgspec.json.Decoder(dt.datetime)


def _instant(text: str | None) -> dt.datetime:
    assert text is not None
    return _moment.decode(text)


_slugs: dict[str, str] = {}


def workspace_slug(workspace: str) -> str:
    """The workspace's name in answers; it never changes."""
    if workspace not in _slugs:
        found = sql.texts("SELECT slug FROM rehydrate_workspace WHERE id = %s", [workspace])
        _slugs[workspace] = (found[0][0] if found else None) or workspace
    return _slugs[workspace]


def forget() -> None:
    """For tests, whose databases come and go within one process."""
    global _people_at
    _policies.clear()
    _slugs.clear()
    _people_at = None


def _decoded(value: Any) -> Any:
    return msgspec.json.decode(value) if isinstance(value, str | bytes) else value


# -- reading

_LOCK: Final = "SELECT r.id::text FROM rehydrate_run r WHERE r.id = ANY(%s::uuid[]) ORDER BY r.id FOR NO KEY UPDATE"


#: What an envelope tells beside the state.
_HISTORY: Final = """
       CASE WHEN r.ref_count > 0 THEN
         (SELECT json_agg(x ORDER BY x.id)::text FROM rehydrate_externalref x WHERE x.run_id = r.id) END,
       CASE WHEN r.decision_count > 0 THEN
         (SELECT json_agg(d ORDER BY d.seq)::text FROM rehydrate_decision d WHERE d.run_id = r.id) END,
       (SELECT convert_from(s.sealed, 'UTF8') FROM rehydrate_checkpointstate s
         WHERE s.run_id = r.id AND s.seq = (r.checkpoint->>'seq')::bigint)
"""


class Pick(Struct, frozen=True):
    """Runs that are not known yet: a SELECT of their ids, without its LIMIT, and its parameters by name."""

    sql: str
    params: dict[str, Any]


def picked(pick: Pick) -> list[str]:
    """The id of the run that a pick finds, if there is one. For when it cannot be read."""
    rows = sql.texts(f"SELECT ({pick.sql} LIMIT 1)::text", {**pick.params, "offset": clock.interval()})
    return [found for (found,) in rows if found is not None]


class Wanted(Struct, frozen=True, kw_only=True):
    """What is read of runs: by their `ids`, or those that `pick` finds.

    `full`: all waits and effects, else what a change may need (see `core.state.in_part`) and what is named. `people`
    brings those who may decide, `history` all references and decisions and the latest checkpoint's opaque state.
    `by_wait`: the ids are those of waits, and their runs are meant.
    """

    ids: Sequence[str] = ()
    full: bool = True
    people: bool = False
    history: bool = False
    by_wait: bool = False
    pick: Pick | None = None
    keys: Sequence[str] = ()
    wait_keys: Sequence[str] = ()
    wait_ids: Sequence[str] = ()
    prints: Sequence[str] = ()

    def named(self) -> frozenset[str]:
        return frozenset() if self.full else frozenset(name for name in _NAMED if getattr(self, name))


_NAMED_WAITS: Final = {"wait_keys": "key", "wait_ids": "id"}
_NAMED_EFFECTS: Final = {"keys": ("key",), "prints": ("fingerprint", "first_fingerprint")}
_NAMED: Final = (*_NAMED_WAITS, *_NAMED_EFFECTS)
_CASTS: Final = {"id": "::uuid[]"}


@lru_cache(maxsize=1000)
def _reading(
    *, pick: str, one: bool, full: bool, people: bool, history: bool, by_wait: bool, named: frozenset[str], part: str
) -> str:
    """The statement that reads runs with what is asked for. What is not is not in its text: plans stay simple. Rows are
    made json, and not jsonb, which sorts and copies what is but sent: a third to a half of the time, measured.

    `part` goes before its rows, and its parameters' names begin with it; the columns are always the same.
    """
    waits = ["w.status = 'open'", "w.pause = r.pause"]
    waits += [
        f"w.{column} = ANY(%({part}{name})s{_CASTS.get(column, '')})"
        for name, column in _NAMED_WAITS.items()
        if name in named
    ]
    effects = [
        f"e.state IN {_ATTENTION}",
        "e.key = ANY(ARRAY(SELECT w.effect_key FROM rehydrate_wait w WHERE w.run_id = r.id AND w.status = 'open'))",
    ]
    effects += [
        f"e.{column} = ANY(%({part}{name})s)"
        for name, columns in _NAMED_EFFECTS.items()
        if name in named
        for column in columns
    ]
    some_waits, some_effects = ("", "") if full else (f"AND ({' OR '.join(each)})" for each in (waits, effects))
    if pick:
        found = pick.replace("%(", f"%({part}").replace(f"%({part}offset)s", "%(offset)s")
        which = f"({found} LIMIT 1)" if one else f"ANY(ARRAY({found} LIMIT %({part}limit)s))"
    else:
        which = f"%({part}id)s::uuid" if one else f"ANY(%({part}ids)s::uuid[])"
    if by_wait:
        which = f"ANY(ARRAY(SELECT w.run_id FROM rehydrate_wait w WHERE w.id = {which}))"
    return f"""
SELECT '{part}', row_to_json(r)::text, r.revision::text, to_jsonb(clock_timestamp() + %(offset)s::interval)::text,
       (SELECT f.current FROM rehydrate_flow f WHERE f.workspace_id = r.workspace_id AND f.name = r.flow)::text,
       (SELECT json_agg(w)::text FROM rehydrate_wait w WHERE w.run_id = r.id {some_waits}),
       CASE WHEN r.effect_count > 0 THEN
         (SELECT json_agg(e)::text FROM rehydrate_effect e WHERE e.run_id = r.id {some_effects}) END,
       {rights.NUMBER}::text, {_people("r.workspace_id") if people else "NULL"},
       {_HISTORY if history else "NULL, NULL, NULL"} FROM rehydrate_run r WHERE r.id = {which}"""


def lock_runs(ids: Sequence[str]) -> None:
    """For the rest of the transaction, in the order of their ids."""
    sql.texts(_LOCK, [list(ids)])


def load_runs(ids: list[str], *, lock: bool = True, **wanted: Any) -> dict[str, Loaded]:
    """The runs with these ids, locked for the transaction in the order of their ids; `wanted` as in `Wanted`.

    The lock comes first and the rest in a statement of its own: a statement that waited for a lock still reads other
    tables as they were before it waited. Without a lock all of it is one statement, which sees one moment.
    """
    want = Wanted(**{"full": False, **wanted}, ids=ids)
    if not ids and want.pick is None:
        return {}
    if lock:
        lock_runs(ids)
    return {loaded.state.run.id: loaded for loaded in _read(want)}


def load_run(want: Wanted) -> Loaded | None:
    """The one run that is wanted, without a lock."""
    return next(iter(_read(want)), None)


def _read(want: Wanted) -> list[Loaded]:
    statement, params = _asked("", [want])
    rows = sql.texts(statement, {**params, **(common := _common())})
    return [_loaded_in(row[1:], want, common) for row in rows]


def load_together(wants: Sequence[Wanted]) -> list[Loaded | Exception | None]:
    """The one run that each of them wants, all in one statement; None where there is no such run.

    Of those who pick alike each gets another run, and of those who want the same run one. An error where it cannot be
    read like this, and is to be read alone.
    """
    found: list[Loaded | Exception | None] = [None] * len(wants)
    alike: dict[Any, list[tuple[int, Wanted]]] = {}
    for i, want in enumerate(wants):
        alike.setdefault(_shape(want), []).append((i, want))
    parts = [(f"p{n}_", places) for n, places in enumerate(alike.values())]
    asked = [_asked(part, [want for _, want in places]) for part, places in parts]
    params = {name: value for _, given in asked for name, value in given.items()}
    rows: dict[str | None, list[sql.Row]] = {}
    for part, *row in sql.texts(" UNION ALL ".join(text for text, _ in asked), {**params, **(common := _common())}):
        rows.setdefault(part, []).append(tuple(row))
    for part, places in parts:
        _share_out(places, rows.get(part, []), found, common)
    return found


def _shape(want: Wanted) -> tuple[Any, ...]:
    """Those of one shape are read by one part of the statement."""
    pick = (want.pick.sql, msgspec.json.encode(want.pick.params, order="sorted")) if want.pick is not None else None
    return want.full, want.people, want.history, want.by_wait, pick, want.named()


def _asked(part: str, wants: Sequence[Wanted]) -> tuple[str, dict[str, Any]]:
    """The statement for runs that are wanted alike, and its parameters, but for those that are common to all."""
    want, ids = wants[0], [run_id for want in wants for run_id in want.ids]
    statement = _reading(
        pick=want.pick.sql if want.pick is not None else "",
        one=not part and len(ids) <= 1,
        full=want.full,
        people=want.people,
        history=want.history,
        by_wait=want.by_wait,
        named=(named := want.named()),
        part=part,
    )
    given: dict[str, Any] = {"id": ids[0] if ids else None, "ids": ids, "limit": len(wants)}
    given.update(want.pick.params if want.pick is not None else {})
    given.update((name, [value for want in wants for value in getattr(want, name)]) for name in named)
    return statement, {f"{part}{name}": value for name, value in given.items()}


class SameRun(Exception):
    """Somebody else of those who read together got the run."""


def _share_out(
    wants: list[tuple[int, Wanted]],
    rows: list[sql.Row],
    found: list[Loaded | Exception | None],
    common: dict[str, Any],
) -> None:
    """Gives each of those who want alike its run, of what was read for them."""
    picking = wants[0][1].pick is not None
    places = [i for i, _ in wants] if picking else []
    by_id = {named: i for i, want in reversed(wants) for named in want.ids}
    for row in rows:
        try:
            loaded = _loaded_in(row, wants[0][1], common)
        except Exception as error:  # nobody knows whose it is: each of those who got none reads alone
            for i, _ in wants:
                found[i] = found[i] or error
            continue
        ids = [wait.id for wait in loaded.state.waits.values()] if wants[0][1].by_wait else [loaded.state.run.id]
        for i in [places.pop(0)] if picking else [by_id[each] for each in ids if each in by_id]:
            found[i] = loaded
    for i, want in wants:
        if not picking and found[i] is None and by_id[want.ids[0]] != i:
            found[i] = SameRun()


def _loaded_in(row: sql.Row, want: Wanted, common: dict[str, Any]) -> Loaded:
    text, revision, now, at, waits, effects, right, staff, refs, decisions, opaque = row
    assert text is not None
    number = int(at or 0)
    sealed: list[bool] = []
    (run,) = structs(f"[{text}]", Run, sealed)
    state = State(
        run,
        {wait.key: wait for wait in structs(waits, Wait, sealed)},
        {effect.key: effect for effect in structs(effects, Effect, sealed)},
        {decision.id: decision for decision in structs(decisions, Decision)},
        {(ref.system, ref.type, ref.ref_id): ref for ref in structs(refs, Ref)},
        complete=want.full,
        opaque=opaque.encode() if opaque is not None else None,
    )
    policy = policy_of(run.workspace_id, run.flow, number)
    return Loaded(
        state,
        _instant(now),
        number,
        policy,
        policy if run.policy == number else policy_of(run.workspace_id, run.flow, run.policy),
        int(revision or 0),
        _people_in(staff, run.workspace_id, _number(right), common) if want.people else None,
        any(sealed),
        _number(right),
    )


def people_in(rows: str | None) -> People:
    """The people that `PEOPLE` found: those with the reviewer's role, by group."""
    able = {"reviewer", "operator", "admin"}
    found = _decoded(rows) or []
    reviewers = {name for _, roles, name in found if able & set(roles)}
    groups: dict[str, list[str]] = {}
    for group, _, name in found:
        if name in reviewers:
            groups.setdefault(group, []).append(name)
    return People(groups=groups, reviewers=sorted(reviewers))


def run_of(row: dict[str, Any]) -> Run:
    """A run's row as it comes from to_jsonb, unsealed."""
    return msgspec.convert(seal.unseal(row, row.get("sealed")), Run)


def structs(rows: Any, kind: type[T], sealed: list[bool] | None = None) -> list[T]:
    """Rows as they come from json_agg, unsealed. Whether any was sealed is added to the list `sealed`."""
    if not rows:
        return []
    # As PostgreSQL spells a row; within agents' data it puts a space there, and then it takes longer.
    if isinstance(rows, str) and rows.count('"sealed":') == rows.count('"sealed":null'):
        if sealed is not None:
            sealed.append(False)
        return msgspec.json.decode(rows, type=list[kind])  # type: ignore[valid-type]
    loose = _decoded(rows)
    if sealed is not None:
        sealed.append(any(row.get("sealed") for row in loose))
    return [msgspec.convert(seal.unseal(row, row.get("sealed")), kind) for row in loose]


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
