"""Reads, in the contract's shapes. Nothing here changes anything: what is overdue is applied to what is shown, not
stored.

Lists are one statement: the total and the page come from the same rows. Cursors name the last row's place, so that a
row
that stays is seen exactly once however much comes and goes meanwhile.
"""

import base64
import datetime as dt
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import connection

from rehydrate import clock, loading, seal, shapes
from rehydrate.callers import Caller
from rehydrate.contexts import SYSTEM, context_of
from rehydrate.core import decide, delivering, verdict
from rehydrate.core import events as ev
from rehydrate.core.canonical import instant
from rehydrate.core.draft import Draft, same_person
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.refusals import Refusal, invalid, not_found
from rehydrate.core.state import Decision, Effect, Ref, Run, State, Wait
from rehydrate.models import Workspace

Json = dict[str, Any]

# -- one run


def _timers(state: State) -> list[Json]:
    """What becomes due by itself, the soonest first, with where it leads (`then`) and to whom (`to`)."""
    run = state.run
    due = dict(loading.timers(state))
    if run.lease_expires_at is not None:
        due["lease", run.holder or ""] = run.lease_expires_at
    if run.alarm_at is not None:
        due["unclaimed", ""] = run.alarm_at
    found = []
    for (kind, subject), due_at in sorted(due.items(), key=lambda item: item[1]):
        item: Json = {"kind": kind, "subject": subject or None, "due_at": instant(due_at), "then": None, "to": []}
        wait = state.wait_by_id(subject) if kind in ("deadline", "reminder", "escalation") else None
        if wait is not None and kind == "deadline":
            item["then"] = "satisfied" if wait.kind == "timer" else wait.on_timeout
        if wait is not None and kind == "reminder":
            item["to"] = [wait.assigned_to or wait.claimed_by] if wait.assigned_to or wait.claimed_by else wait.groups
        elif wait is not None and (kind == "escalation" or item["then"] == "escalate"):
            item["to"] = wait.policy.get("escalate_to") or []
        found.append(item)
    return found


def find_run(workspace: str, flow: str, external_id: str) -> str | None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM rehydrate_run WHERE workspace_id = %s AND flow = %s AND external_id = %s",
            [workspace, flow, external_id],
        )
        row = cursor.fetchone()
    return str(row[0]) if row else None


def is_ended(run_id: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT ended_at IS NOT NULL FROM rehydrate_run WHERE id = %s", [run_id])
        row = cursor.fetchone()
    return bool(row and row[0])


def _id(text: str, what: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise not_found(what) from None


def current(caller: Caller, run_id: str) -> Draft:
    """The run as of now, with what is overdue applied in memory only (rule 6, rule 12). 404 where it is not visible."""
    run_id = _id(run_id, "run")
    found = loading.load_runs([run_id], lock=False, full=True).get(run_id)
    if found is None or not caller.sees(found.state.run.workspace_id, found.state.run.flow):
        raise not_found("run")
    draft = Draft(found.state, context_of(found, SYSTEM))
    decide.apply_overdue(draft)
    decide.settle(draft)
    return draft


def require_visible(caller: Caller, run_id: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT workspace_id, flow FROM rehydrate_run WHERE id = %s", [run_id])
        row = cursor.fetchone()
    if row is None or not caller.sees(str(row[0]), row[1]):
        raise not_found("run")


def versions_of(caller: Caller, run_id: str) -> list[Any]:
    """What tells one state of a run's page from another: its version, which grows with each event, its lease's end, its
    trouble, and how its deliveries go. 404 when the caller may not see it.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT r.workspace_id, r.flow, r.version, r.lease_expires_at, x.tries, x.set_aside_at,"
            " (SELECT jsonb_agg(jsonb_build_array(d.status, d.attempts, d.sending, d.next_at) ORDER BY d.id)"
            " FROM rehydrate_delivery d WHERE d.run_id = r.id)"
            " FROM rehydrate_run r LEFT JOIN rehydrate_trouble x ON x.run_id = r.id WHERE r.id = %s",
            [_id(run_id, "run")],
        )
        row = cursor.fetchone()
    if row is None or not caller.sees(str(row[0]), row[1]):
        raise not_found("run")
    return list(row[2:])


def run_of_wait(caller: Caller, wait_id: str) -> str:
    """The run of a wait that the caller may see, else 404."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT r.id, r.workspace_id, r.flow FROM rehydrate_wait w JOIN rehydrate_run r ON r.id = w.run_id"
            " WHERE w.id = %s",
            [_id(wait_id, "wait")],
        )
        row = cursor.fetchone()
    if row is None or not caller.sees(str(row[1]), row[2]):
        raise not_found("wait")
    return str(row[0])


def refs_and_decisions(run_id: str) -> tuple[list[Ref], list[Decision]]:
    """The external references and the decisions of a run, oldest first. One query."""
    refs, decisions, _ = _beside(run_id)
    return refs, decisions


def _beside(run_id: str) -> tuple[list[Ref], list[Decision], Json | None]:
    """The same, and what trouble there is with what is due. One query."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT (SELECT jsonb_agg(to_jsonb(x) ORDER BY x.id) FROM rehydrate_externalref x WHERE x.run_id = %s),"
            " (SELECT jsonb_agg(to_jsonb(d) ORDER BY d.seq) FROM rehydrate_decision d WHERE d.run_id = %s),"
            f" (SELECT {_TROUBLE} FROM rehydrate_trouble x WHERE x.run_id = %s)",
            [run_id, run_id, run_id],
        )
        refs, decisions, trouble = cursor.fetchone()
    if isinstance(trouble, str):
        trouble = msgspec.json.decode(trouble)
    return loading.structs(refs, Ref), loading.structs(decisions, Decision), trouble


_TROUBLE: Final = (
    "jsonb_build_object('tries', x.tries, 'since', x.since, 'tried_at', x.tried_at, 'retry_at', x.retry_at,"
    " 'set_aside_at', x.set_aside_at, 'error', x.error)"
)


def trouble(caller: Caller, run_id: str) -> Json | None:
    """`{run: {id, workspace_id, flow, external_id, title, status}, tries, since, tried_at, retry_at, set_aside_at,
    error}`: a run to which what is due could not be applied, without reading its state, which may be what is wrong.
    None when there is no trouble; 404 where it is not visible.
    """
    run_id = _id(run_id, "run")
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT r.workspace_id, r.flow, r.external_id, r.title, r.status,"
            f" (SELECT {_TROUBLE} FROM rehydrate_trouble x WHERE x.run_id = r.id) FROM rehydrate_run r WHERE r.id = %s",
            [run_id],
        )
        row = cursor.fetchone()
    if row is None or not caller.sees(str(row[0]), row[1]):
        raise not_found("run")
    workspace, flow, external_id, title, status, found = row
    if found is None:
        return None
    about = {"id": run_id, "workspace_id": str(workspace), "flow": flow, "external_id": external_id, "title": title}
    kept: Json = msgspec.json.decode(found) if isinstance(found, str) else found
    return {"run": {**about, "status": status}, **kept}


def covers(caller: Caller, workspace: str, policy: FlowPolicy) -> tuple[str, ...]:
    """Which fields are masked for this caller: none for agents and auditors."""
    if not caller.is_person or caller.may(workspace, "auditor"):
        return ()
    return seal.tails(policy.secret)


def get_run(caller: Caller, run_id: str) -> Json:
    draft = current(caller, run_id)
    run = draft.run
    refs, decisions, in_trouble = _beside(run.id)
    found = verdict.assess(draft.state, draft.pinned, draft.now)
    whole = shapes.run_whole(
        draft.state,
        found,
        refs,
        decisions,
        callback_base=settings.PUBLIC_URL,
        secrets=not caller.is_person or caller.may(run.workspace_id, "operator"),
    )
    whole["flow_title"] = draft.pinned.title or run.flow
    whole["timers"] = _timers(draft.state)
    whole["trouble"] = in_trouble
    return dict(seal.mask(whole, covers(caller, run.workspace_id, draft.policy)))


def get_verdict(caller: Caller, run_id: str) -> Json:
    draft = current(caller, run_id)
    found = verdict.assess(draft.state, draft.pinned, draft.now)
    shape = shapes.verdict(draft.state, found)
    return dict(seal.mask(shape, covers(caller, draft.run.workspace_id, draft.policy)))


def get_wait(caller: Caller, wait_id: str) -> Json:
    draft = current(caller, run_of_wait(caller, wait_id))
    wait = draft.state.wait_by_id(_id(wait_id, "wait"))
    if wait is None:
        raise not_found("wait")
    run = draft.run
    secrets = not caller.is_person or caller.may(run.workspace_id, "operator")
    shape = shapes.wait(wait, callback_base=settings.PUBLIC_URL, secrets=secrets)
    return dict(seal.mask(shape, covers(caller, run.workspace_id, draft.policy)))


# -- events

_EVENT: Final = "seq, type, actor_kind, actor_id, actor_name, at, payload, sealed, prev_hash, hash"


def event_shape(row: tuple[Any, ...]) -> Json:
    seq, type_, kind, actor_id, name, at, payload, _sealed, prev_hash, hash_ = row
    payload = msgspec.json.decode(payload) if isinstance(payload, str) else payload
    return {
        "seq": seq,
        "type": type_,
        "actor": {"kind": kind, "id": actor_id, "name": name},
        "at": instant(at),
        "payload": payload,
        "prev_hash": prev_hash,
        "hash": hash_,
    }


def list_events(caller: Caller, run_id: str, *, cursor: str | None, limit: int) -> Json:
    """Events in order. Payloads are as they were hashed: secret fields are digests there, for everybody."""
    run_id = _id(run_id, "run")
    require_visible(caller, run_id)
    after = int(_place(cursor, ["bigint"])[0]) if cursor else 0
    with connection.cursor() as db:
        db.execute(
            f"SELECT {_EVENT}, (SELECT version FROM rehydrate_run WHERE id = %s)"
            " FROM rehydrate_ledgerevent WHERE run_id = %s AND seq > %s ORDER BY seq LIMIT %s",
            [run_id, run_id, after, limit + 1],
        )
        rows = db.fetchall()
        total = rows[0][-1] if rows else after
    results = [event_shape(row[:-1]) for row in rows[:limit]]
    more = _cursor([str(results[-1]["seq"])]) if len(rows) > limit else None
    return {"results": results, "next": more, "total": total}


def all_events(run_id: str) -> list[Json]:
    with connection.cursor() as db:
        db.execute(f"SELECT {_EVENT} FROM rehydrate_ledgerevent WHERE run_id = %s ORDER BY seq", [run_id])
        return [event_shape(row) for row in db.fetchall()]


def evidence(caller: Caller, run_id: str) -> Json:
    """The whole pack: the run, its events with the chain's proof, and the decisions."""
    run = get_run(caller, run_id)
    events = all_events(run["id"])
    return {
        "run": run,
        "events": events,
        "decisions": run["decisions"],
        "chain": {
            "algorithm": "SHA-256 over the hash before (hex) and RFC 8785 of run, seq, type, actor, at, payload",
            "first": events[0]["prev_hash"] if events else None,
            "last": events[-1]["hash"] if events else None,
            "length": len(events),
        },
    }


def history_of(run_id: str) -> list[ev.Recorded]:
    """All events of a run as facts, secret fields restored, for rebuilding it."""
    with connection.cursor() as db:
        db.execute(f"SELECT {_EVENT} FROM rehydrate_ledgerevent WHERE run_id = %s ORDER BY seq", [run_id])
        rows = db.fetchall()
    found = []
    for seq, type_, kind, actor_id, name, at, payload, sealed, _prev, _hash in rows:
        payload = msgspec.json.decode(payload) if isinstance(payload, str) else payload
        fact = ev.parse(type_, seal.unseal(payload, sealed))
        found.append(ev.Recorded(seq=seq, at=at, actor=ev.Actor(kind=kind, id=actor_id, name=name), fact=fact))
    return found


# -- lists


def _cursor(place: list[str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def _place(cursor: str, kinds: list[str]) -> list[str]:
    """The place that a cursor names, or 422."""
    try:
        found = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=list[str])
    except (ValueError, msgspec.DecodeError):
        found = []
    if len(found) != len(kinds) or not all(_CURSOR[kind](part) for kind, part in zip(kinds, found, strict=True)):
        raise invalid("/cursor", "Use the `next` of the page before.")
    return found


def _is(read: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            read(text)
        except ValueError:
            return False
        return text.isascii()

    return check


#: What each part of a cursor has to be, by the type of its column.
_CURSOR: Final[dict[str, Callable[[str], bool]]] = {
    "bigint": lambda text: text.isascii() and text.isdigit() and len(text) < 19,
    "uuid": _is(UUID),
    "timestamptz": _is(dt.datetime.fromisoformat),
}


class _Where:
    """A WHERE clause in the making: parts and their parameters."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.params: list[Any] = []

    def add(self, sql: str, *params: Any) -> None:
        self.parts.append(f"({sql})")
        self.params += params

    def add_likely(self, sql: str, *params: Any) -> None:
        """What is true of most rows, which the planner cannot know: taken for rare, it would have all rows sorted
        before the first page, instead of read in the order that an index has.
        """
        self.add(f"CASE WHEN {sql} THEN TRUE ELSE FALSE END", *params)

    def sql(self) -> str:
        return " AND ".join(self.parts) or "TRUE"


def _like(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def _walls(where: _Where, caller: Caller) -> None:
    where.add("r.workspace_id = ANY(%s)", [UUID(workspace) for workspace in caller.workspaces])
    if caller.kind == "agent" and "*" not in caller.flows:
        where.add("r.flow = ANY(%s)", list(caller.flows))


def _rows(
    tables: str,
    where: _Where,
    *,
    order: list[tuple[str, str, str]],
    select: str,
    cursor: str | None,
    limit: int,
    count_to: int | None = None,
) -> tuple[list[Json], str | None, int]:
    """(rows, next, total) of one statement. `order` is [(column, type, ASC or DESC)], the last one the items' own id.

    Counting and finding a page are apart, so that a page is found by the index that has its order. With `count_to`,
    the total is one more where there are more.
    """
    columns = ", ".join(f"{column} AS o{i}" for i, (column, _, _) in enumerate(order))
    by = ", ".join(f"{column} {direction}" for column, _, direction in order)
    shown_by = ", ".join(f"o{i} {direction}" for i, (_, _, direction) in enumerate(order))
    after, place = "", []
    if cursor:
        place = _place(cursor, [kind for _, kind, _ in order])
        sign = ">" if order[0][2] == "ASC" else "<"
        names = ", ".join(column for column, _, _ in order)
        values = ", ".join(f"%s::{kind}" for _, kind, _ in order)
        after = f"AND ({names}) {sign} ({values})"
    counted = "" if count_to is None else f"LIMIT {count_to + 1}"
    statement = (
        f"WITH p AS (SELECT {columns} FROM {tables} WHERE {where.sql()} {after} ORDER BY {by} LIMIT {limit + 1})"
        f" SELECT (SELECT count(*) FROM (SELECT FROM {tables} WHERE {where.sql()} {counted}) f),"
        f" (SELECT jsonb_agg(to_jsonb(y) ORDER BY {shown_by}) FROM"
        f" (SELECT {select}, p.* FROM p, {tables} WHERE {order[-1][0]} = p.o{len(order) - 1}) y)"
    )
    with connection.cursor() as db:
        try:
            db.execute(statement, [*where.params, *place, *where.params])
        except Exception as error:
            if cursor and type(error).__name__ in ("DataError",):
                raise invalid("/cursor", "Use the `next` of the page before.") from None
            raise
        total, found = db.fetchone()
    rows = msgspec.json.decode(found) if isinstance(found, str) else found or []
    more = None
    if len(rows) > limit:
        rows = rows[:limit]
        more = _cursor([str(rows[-1][f"o{i}"]) for i in range(len(order))])
    return rows, more, total


#: A page of the console counts so far; a list of the API counts all.
COUNTED_TO: Final = 200
#: The rail's figures go so far.
FIGURES_TO: Final = 99


#: A run's row with the number of its flow's newest policy: what that calls secret is covered in older runs, too.
_RUN: Final = (
    "to_jsonb(r) || jsonb_build_object('newest', (SELECT p.current FROM rehydrate_flow p"
    " WHERE p.workspace_id = r.workspace_id AND p.name = r.flow)) AS run"
)


def _pinned(run: Run) -> FlowPolicy:
    return loading.policy_of(run.workspace_id, run.flow, run.policy)


def _covers_of(caller: Caller, run: Run, row: Json) -> tuple[str, ...]:
    """What is masked of a run in a list: what its own policy calls secret, and what the newest does."""
    newest = loading.policy_of(run.workspace_id, run.flow, row.get("newest") or 0)
    ends = [*covers(caller, run.workspace_id, _pinned(run)), *covers(caller, run.workspace_id, newest)]
    return tuple(dict.fromkeys(ends))


def _run_item(caller: Caller, row: Json) -> Json:
    run = loading.run_of(row)
    policy = _pinned(run)
    shape = {
        **shapes.run_brief(run),
        "flow_title": policy.title or run.flow,
        "verdict": {"outcome": run.outcome, "reasons": run.reasons},
    }
    return dict(seal.mask(shape, _covers_of(caller, run, row)))


def _aside_item(row: Json, aside: Json) -> Json:
    """A run that was set aside, without reading its state: that may be what is wrong with it."""
    plain = ("id", "flow", "external_id", "title", "status", "requested_by", "created_at", "updated_at")
    reasons = [{"code": "set_aside", "subject": None}]
    return {
        **{name: row[name] for name in plain},
        "flow_title": row["flow"],
        "verdict": {"outcome": "review", "reasons": reasons},
        "trouble": aside,
    }


def _wait_item(caller: Caller, row: Json, run_row: Json) -> Json:
    run = loading.run_of(run_row)
    wait = msgspec.convert(seal.unseal(row, row.get("sealed")), Wait)
    secrets = not caller.is_person or caller.may(run.workspace_id, "operator")
    shape = shapes.wait(wait, callback_base=settings.PUBLIC_URL, secrets=secrets)
    return dict(seal.mask(shape, _covers_of(caller, run, run_row)))


def _searched(where: _Where, text: str) -> None:
    """Free text: titles, external ids, asks, and what was touched outside."""
    like = _like(text)
    where.add(
        "r.title ILIKE %s OR r.external_id ILIKE %s OR EXISTS (SELECT 1 FROM rehydrate_wait s WHERE s.run_id = r.id"
        " AND s.ask->>'summary' ILIKE %s) OR EXISTS (SELECT 1 FROM rehydrate_effect s WHERE s.run_id = r.id AND"
        " s.resource ILIKE %s) OR EXISTS (SELECT 1 FROM rehydrate_externalref s WHERE s.run_id = r.id"
        " AND s.ref_id ILIKE %s)",
        like,
        like,
        like,
        like,
        like,
    )


def _outside(where: _Where, filters: Json) -> None:
    """What a run touched outside: system and resource of one and the same effect or reference."""
    given = {name: filters[name] for name in ("system", "resource") if name in filters}
    if not given:
        return
    effect = " AND ".join(f"s.{name} = %s" for name in given)
    reference = " AND ".join(f"s.{'ref_id' if name == 'resource' else name} = %s" for name in given)
    where.add(
        f"EXISTS (SELECT 1 FROM rehydrate_effect s WHERE s.run_id = r.id AND {effect})"
        f" OR EXISTS (SELECT 1 FROM rehydrate_externalref s WHERE s.run_id = r.id AND {reference})",
        *given.values(),
        *given.values(),
    )


def _run_filters(where: _Where, filters: Json) -> None:
    for name in ("status", "flow", "stage", "external_id"):
        if name in filters:
            where.add(f"r.{name} = %s", filters[name])
    if "q" in filters:
        _searched(where, filters["q"])
    if "named" in filters:
        where.add(
            "r.id = ANY(ARRAY(SELECT n.id FROM rehydrate_run n WHERE n.external_id = %s"
            " UNION SELECT e.run_id FROM rehydrate_effect e WHERE e.resource = %s"
            " UNION SELECT x.run_id FROM rehydrate_externalref x WHERE x.ref_id = %s))",
            *[filters["named"]] * 3,
        )
    _outside(where, filters)
    if "label" in filters:
        key, _, value = str(filters["label"]).replace("=", ":", 1).partition(":")
        if value:
            where.add("r.labels ->> %s = %s", key, value)
        else:
            where.add("jsonb_exists(r.labels, %s)", key)
    if "older_than" in filters:
        where.add("r.status_since < clock_timestamp() - make_interval(secs => %s)", _age(str(filters["older_than"])))


def _age(text: str) -> int:
    from rehydrate.core.policy import seconds

    try:
        age = int(text) if text.isdigit() and len(text) < 11 else seconds(text)
        return min(age, 10**10)  # older than anything
    except ValueError:
        raise invalid("/older_than", "Write a number of seconds, or a number and s, m, h, d or w.") from None


def who(caller: Caller) -> Json:
    """Who asks, and what they may use."""
    names = dict(Workspace.objects.filter(pk__in=caller.workspaces).values_list("pk", "slug"))
    workspaces = [{"name": names[UUID(key)], "roles": sorted(roles)} for key, roles in caller.workspaces.items()]
    return {
        "kind": caller.kind,
        "name": caller.id,
        "owner": caller.owner,
        "workspaces": sorted(workspaces, key=lambda workspace: str(workspace["name"])),
        "flows": sorted(caller.flows),
    }


_NEWEST: Final = [("r.created_at", "timestamptz", "DESC"), ("r.id", "uuid", "DESC")]


def list_runs(caller: Caller, *, filters: Json, cursor: str | None, limit: int, count_to: int | None = None) -> Json:
    """Runs, newest first."""
    where = _Where()
    _walls(where, caller)
    _run_filters(where, filters)
    rows, more, total = _rows(
        "rehydrate_run r", where, order=_NEWEST, select=_RUN, cursor=cursor, limit=limit, count_to=count_to
    )
    return {"results": [_run_item(caller, row["run"]) for row in rows], "next": more, "total": total}


def find_runs(caller: Caller, *, filters: Json, cursor: str | None, limit: int) -> tuple[Json, bool]:
    """Runs as `list_runs`, counted to `COUNTED_TO`, and whether they are those that `q` names.

    A number that is the external id of a run, or of something outside that it touched, finds these alone, by index;
    `within` set, or where none has it, all texts are searched.
    """
    filters = dict(filters)
    text, within = filters.get("q"), filters.pop("within", None)
    if text and not within:
        named = {name: value for name, value in filters.items() if name != "q"} | {"named": text}
        found = list_runs(caller, filters=named, cursor=cursor, limit=limit, count_to=COUNTED_TO)
        if found["total"]:
            return found, True
    return list_runs(caller, filters=filters, cursor=cursor, limit=limit, count_to=COUNTED_TO), False


_SOONEST: Final = [("w.due_at", "timestamptz", "ASC"), ("w.id", "uuid", "ASC")]
_BOTH: Final = f"to_jsonb(w) AS wait, {_RUN}"
_TABLES: Final = "rehydrate_wait w JOIN rehydrate_run r ON r.id = w.run_id"


def list_waits(caller: Caller, *, filters: Json, cursor: str | None, limit: int) -> Json:
    """Waits, those with the soonest deadline first; `status` is open when left out."""
    where = _Where()
    _walls(where, caller)
    where.add(_NOT_ASIDE)
    status = filters.get("status", "open")
    if status == "open":
        where.add("w.status = 'open'")  # as the index says it: a plan that is kept cannot tell from a parameter
    elif status != "all":
        where.add("w.status = %s", status)
    if "run" in filters:
        where.add("r.id = %s", _id(str(filters["run"]), "run"))
    for name in ("flow",):
        if name in filters:
            where.add(f"r.{name} = %s", filters[name])
    for name in ("name", "kind"):
        if name in filters:
            where.add(f"w.{name} = %s", filters[name])
    if "group" in filters:
        where.add("jsonb_exists(w.groups, %s)", filters["group"])
    _outside(where, filters)
    if "due_before" in filters:
        where.add("w.due_at < %s", filters["due_before"])
    if "q" in filters:
        _searched(where, str(filters["q"]))
    if filters.get("mine") == "1" and caller.is_person:
        _may_decide(where, caller)
    rows, more, total = _rows(_TABLES, where, order=_SOONEST, select=_BOTH, cursor=cursor, limit=limit)
    results = [_wait_item(caller, row["wait"], row["run"]) for row in rows]
    return {"results": results, "next": more, "total": total}


def _groups_of(caller: Caller) -> list[tuple[str, str]]:
    """(workspace, group) of a person, of groups with a role that may decide."""
    with connection.cursor() as db:
        db.execute(
            "SELECT g.workspace_id, g.name FROM rehydrate_membership m JOIN rehydrate_group g ON g.id = m.group_id"
            " WHERE m.user_id = %s",
            [caller.user_id],
        )
        return [(str(workspace), name) for workspace, name in db.fetchall()]


#: They are few, or something is very wrong: looked up once, not for each row.
_NOT_ASIDE: Final = "NOT r.id = ANY(ARRAY(SELECT x.run_id FROM rehydrate_trouble x WHERE x.set_aside_at IS NOT NULL))"


def _may_decide(where: _Where, caller: Caller) -> None:
    """Open asks that this person may decide, and has not voted on.

    One who is in no group of a workspace decides nothing there.
    """
    ways: list[str] = []
    params: list[Any] = []
    mine = _groups_of(caller)
    for workspace in caller.workspaces:
        names = [name for place, name in mine if place == workspace]
        if names and caller.may(workspace, "reviewer"):
            ways.append("(r.workspace_id = %s AND (w.groups = '[]'::jsonb OR jsonb_exists_any(w.groups, %s)))")
            params += [UUID(workspace), names]
    where.add_likely(" OR ".join(ways), *params) if ways else where.add("FALSE")
    where.add("w.kind = 'approval' AND w.status = 'open'")
    where.add_likely(
        "NOT (coalesce((w.policy->>'exclude_requester')::boolean, TRUE) AND coalesce(%s = ANY(ARRAY["
        "lower(trim(r.requested_by)), lower(trim(r.opened_by)), lower(trim(w.policy->>'asked_by'))]), FALSE))",
        same_person(caller.id),
    )
    where.add_likely("NOT w.votes @> jsonb_build_array(jsonb_build_object('by', %s::text))", caller.id)


# -- the inbox

SCOPES: Final = ("mine", "available", "overdue", "review", "unknown", "taken_over", "decided")
_WAIT_SCOPES: Final = ("mine", "available", "decided")


def _scope(where: _Where, caller: Caller, scope: str) -> str:
    """Adds a scope's condition; the tables it reads."""
    _walls(where, caller)
    if scope in _WAIT_SCOPES:
        where.add(_NOT_ASIDE)  # what cannot be answered is not offered; the run itself is under "review"
    if scope == "mine":
        where.add("w.status = 'open' AND (w.claimed_by = %s OR w.assigned_to = %s)", caller.id, caller.id)
    elif scope == "available":
        _may_decide(where, caller)
        where.add_likely("w.claimed_by IS NULL OR w.claimed_by = %s", caller.id)
    elif scope == "decided":
        where.add("w.decision IS NOT NULL AND w.closed_at IS NOT NULL")
    elif scope == "overdue":
        late = [{"code": code} for code in ("timeout_undetermined", "timed_out")]
        where.add(
            "r.unclaimed_at IS NOT NULL OR (r.status = 'review' AND (r.reasons @> %s OR r.reasons @> %s))",
            msgspec.json.encode(late[:1]).decode(),
            msgspec.json.encode(late[1:]).decode(),
        )
    elif scope == "review":
        # An act that happened twice outside is an alarm whatever the run does, until somebody clears it.
        twice = msgspec.json.encode([{"code": "effect_repeated"}]).decode()
        where.add(
            "r.status = 'review' OR (r.ended_at IS NULL AND r.alarms <> '[]'::jsonb AND r.alarms @> %s::jsonb)"
            " OR r.id = ANY(ARRAY(SELECT x.run_id FROM rehydrate_trouble x WHERE x.set_aside_at IS NOT NULL))",
            twice,
        )
    elif scope == "unknown":
        where.add(
            "r.id = ANY(ARRAY(SELECT e.run_id FROM rehydrate_effect e WHERE"
            " e.state IN ('unknown', 'compensation_unknown')))"
            " AND EXISTS (SELECT 1 FROM rehydrate_effect e WHERE e.run_id = r.id AND"
            " e.state IN ('unknown', 'compensation_unknown') AND (r.ended_at IS NULL OR e.conflict))"
        )
    elif scope == "taken_over":
        where.add("r.status = 'taken_over'")
    else:
        raise invalid("/scope", f"A scope is one of {', '.join(SCOPES)}.")
    return _TABLES if scope in _WAIT_SCOPES else "rehydrate_run r"


def inbox_counts(caller: Caller) -> dict[str, int]:
    """How many items each scope of work has, up to one more than `FIGURES_TO`, in one statement.

    `deliveries`: alarms about those.
    """
    scopes = [scope for scope in SCOPES if scope != "decided"]
    parts: list[str] = []
    params: list[Any] = []
    for scope in scopes:
        where = _Where()
        tables = _scope(where, caller, scope)
        parts.append(f"(SELECT count(*) FROM (SELECT FROM {tables} WHERE {where.sql()} LIMIT {FIGURES_TO + 1}) f)")
        params += where.params
    trouble, more = _trouble(caller)
    with connection.cursor() as db:
        db.execute("SELECT " + ", ".join([*parts, trouble]), [*params, *more])
        return dict(zip((*scopes, "deliveries"), db.fetchone(), strict=True))


def inbox(caller: Caller, *, scope: str, filters: Json, cursor: str | None, limit: int) -> Json:
    """`{results: [{wait, run}], next, total}`: what a scope holds, the most urgent first;

    `wait` is null for a run's own item; `total` is at most one more than `COUNTED_TO`.
    """
    tables, where, order = _listed(caller, scope, filters)
    if scope in _WAIT_SCOPES:
        rows, more, total = _rows(
            tables, where, order=order, select=_BOTH, cursor=cursor, limit=limit, count_to=COUNTED_TO
        )
        results: list[Json] = [
            {
                "wait": _wait_item(caller, row["wait"], row["run"]),
                "run": _run_item(caller, row["run"]),
            }
            for row in rows
        ]
    else:
        select = (
            f"{_RUN}, (SELECT {_TROUBLE} FROM rehydrate_trouble x WHERE x.run_id = r.id AND x.set_aside_at IS NOT NULL)"
            " AS aside, (SELECT jsonb_agg(to_jsonb(e)) FROM rehydrate_effect e WHERE e.run_id = r.id"
            " AND e.state IN ('unknown', 'compensation_unknown')) AS effects"
        )
        rows, more, total = _rows(
            tables, where, order=order, select=select, cursor=cursor, limit=limit, count_to=COUNTED_TO
        )
        results = []
        for row in rows:
            if row["aside"] is not None:
                results.append({"wait": None, "run": _aside_item(row["run"], row["aside"])})
                continue
            item = _run_item(caller, row["run"])
            item["effects"] = [shapes.effect(e) for e in loading.structs(row["effects"], Effect)]
            run = loading.run_of(row["run"])
            results.append({"wait": None, "run": seal.mask(item, _covers_of(caller, run, row["run"]))})
    return {"results": results, "next": more, "total": total}


def inbox_versions(caller: Caller, *, scope: str, filters: Json, cursor: str | None, limit: int) -> list[Any]:
    """What tells one state of `inbox(...)` from another: its total, and its items' ids with their runs' versions."""
    tables, where, order = _listed(caller, scope, filters)
    item = "w.id" if scope in _WAIT_SCOPES else "r.id"
    select = f"{item} AS item, r.version AS version"
    rows, _, total = _rows(tables, where, order=order, select=select, cursor=cursor, limit=limit, count_to=COUNTED_TO)
    return [total, *((row["item"], row["version"]) for row in rows)]


def _listed(caller: Caller, scope: str, filters: Json) -> tuple[str, _Where, list[tuple[str, str, str]]]:
    """A scope's tables, condition and order."""
    where = _Where()
    tables = _scope(where, caller, scope)
    if filters.get("flow"):
        where.add("r.flow = %s", filters["flow"])
    if filters.get("q"):
        _searched(where, str(filters["q"]))
    if filters.get("risk"):
        where.add("w.risk = %s" if scope in _WAIT_SCOPES else "TRUE OR %s IS NULL", filters["risk"])
    if scope == "decided":
        return tables, where, [("w.closed_at", "timestamptz", "DESC"), ("w.id", "uuid", "DESC")]
    if scope in _WAIT_SCOPES:
        return tables, where, _SOONEST
    return tables, where, [("coalesce(r.status_since, r.created_at)", "timestamptz", "ASC"), ("r.id", "uuid", "ASC")]


# -- signals


def list_signals(caller: Caller, *, filters: Json, cursor: str | None, limit: int) -> Json:
    """Signals, newest first."""
    from rehydrate import signals
    from rehydrate.models import Signal

    where = _Where()
    where.add("s.workspace_id = ANY(%s)", [UUID(workspace) for workspace in caller.workspaces])
    if caller.kind == "agent" and "*" not in caller.flows:
        where.add("s.sender = %s AND s.flows <@ %s::varchar[]", caller.id, list(caller.flows))
    for name in ("state", "name"):
        if name in filters:
            where.add(f"s.{name} = %s", filters[name])
    order = [("s.received_at", "timestamptz", "DESC"), ("s.id", "uuid", "DESC")]
    rows, more, total = _rows("rehydrate_signal s", where, order=order, select="s.id AS id", cursor=cursor, limit=limit)
    found = Signal.objects.in_bulk([UUID(row["id"]) for row in rows])
    results = []
    for row in rows:
        signal = found[UUID(row["id"])]
        results.append(seal.mask(signals.shape(signal), _covers_everywhere(caller, str(signal.workspace_id))))
    return {"results": results, "next": more, "total": total}


def _covers_everywhere(caller: Caller, workspace: str) -> tuple[str, ...]:
    """What any flow of the workspace calls secret: before it is matched, a signal may belong to any of them."""
    if not caller.is_person or caller.may(workspace, "auditor"):
        return ()
    with connection.cursor() as db:
        db.execute("SELECT name, current FROM rehydrate_flow WHERE workspace_id = %s", [workspace])
        policies = [loading.policy_of(workspace, flow, number) for flow, number in db.fetchall()]
    return tuple(dict.fromkeys(end for policy in policies for end in seal.tails(policy.secret)))


# -- deliveries

#: As it is shown: what is pending at a receiver that is switched off is set aside.
_SHOWN_STATUS: Final = (
    "CASE WHEN d.status <> 'pending' THEN d.status WHEN e.url IS NULL THEN 'withdrawn'"
    " WHEN e.switched_off_at IS NOT NULL THEN 'set_aside' ELSE 'pending' END"
)
_DELIVERY: Final = (
    "to_jsonb(d) AS delivery, to_jsonb(e) - 'secret' - 'previous_secret' AS receiver, r.flow, r.external_id,"
    f" r.title, r.workspace_id, {_SHOWN_STATUS} AS shown"
)
_DELIVERIES: Final = (
    "rehydrate_delivery d JOIN rehydrate_endpoint e ON e.id = d.endpoint_id JOIN rehydrate_run r ON r.id = d.run_id"
)
_NEWEST_DELIVERY: Final = [("d.at", "timestamptz", "DESC"), ("d.id", "uuid", "DESC")]


def oversees(caller: Caller, workspace: str) -> bool:
    """Who may look at deliveries: operators, auditors and administrators; agents those of their own flows."""
    return not caller.is_person or caller.may(workspace, "operator") or caller.may(workspace, "auditor")


#: What is asked of a row for each status as it is shown, in words that an index fits.
_WITH_STATUS: Final = {
    "pending": "d.status = 'pending' AND e.switched_off_at IS NULL",
    "set_aside": "d.status = 'pending' AND e.switched_off_at IS NOT NULL",
    "delivered": "d.status = 'delivered'",
    "given_up": "d.status = 'given_up'",
    "withdrawn": "d.status = 'withdrawn'",
}


def list_deliveries(caller: Caller, *, filters: Json, cursor: str | None, limit: int, counted: bool = True) -> Json:
    """Deliveries, newest first; `total` is None where nobody has them counted. 403 for people who oversee no workspace.

    Each receiver's newest are read from its index and merged, so that a page costs the same however many there were.
    """
    places = [workspace for workspace in caller.workspaces if oversees(caller, workspace)]
    if not places and caller.workspaces:
        raise Refusal("forbidden", "Deliveries are for operators, auditors and administrators.")
    receivers, rows = _Where(), _Where()
    receivers.add("workspace_id = ANY(%s)", [UUID(workspace) for workspace in places])
    if caller.kind == "agent" and "*" not in caller.flows:
        receivers.add("flow = ANY(%s)", list(caller.flows))
    if "flow" in filters:
        receivers.add("flow = %s", filters["flow"])
    if "status" in filters:
        rows.add(_WITH_STATUS.get(filters["status"], "FALSE"))
    if "run" in filters:
        rows.add("d.run_id = %s", _id(str(filters["run"]), "run"))
    after, place = "", []
    if cursor:
        place = _place(cursor, [kind for _, kind, _ in _NEWEST_DELIVERY])
        after = "AND (d.at, d.id) < (%s::timestamptz, %s::uuid)"
    newest = f"ORDER BY d.at DESC, d.id DESC LIMIT {limit + 1}"
    count = f"(SELECT count(*) FROM e JOIN rehydrate_delivery d ON d.endpoint_id = e.id WHERE {rows.sql()})"
    with connection.cursor() as db:
        db.execute(
            f"WITH e AS (SELECT * FROM rehydrate_endpoint WHERE {receivers.sql()})"
            f" SELECT {count if counted else 'NULL'}, (SELECT jsonb_agg(to_jsonb(p)) FROM (SELECT {_DELIVERY} FROM e"
            " CROSS JOIN LATERAL (SELECT d.* FROM rehydrate_delivery d"
            f"  WHERE d.endpoint_id = e.id AND {rows.sql()} {after} {newest}) d"
            f" JOIN rehydrate_run r ON r.id = d.run_id {newest}) p)",
            [*receivers.params, *(rows.params if counted else []), *rows.params, *place],
        )
        total, found = db.fetchone()
    found = [_delivery(row) for row in (msgspec.json.decode(found) if isinstance(found, str) else found or [])]
    more = _cursor([found[limit - 1]["at"], found[limit - 1]["id"]]) if len(found) > limit else None
    return {"results": found[:limit], "next": more, "total": total}


def find_delivery(caller: Caller, delivery_id: str, *, acts: bool = False) -> Json:
    """A delivery, else 404; 403 for people who may see its run and not this. `acts`: an operator is asked for."""
    with connection.cursor() as db:
        db.execute(
            f"SELECT to_jsonb(x) FROM (SELECT {_DELIVERY} FROM {_DELIVERIES} WHERE d.id = %s) x",
            [_id(delivery_id, "delivery")],
        )
        found = db.fetchone()
    row = (msgspec.json.decode(found[0]) if isinstance(found[0], str) else found[0]) if found else None
    if row is None or not caller.sees(row["workspace_id"], row["flow"]):
        raise not_found("delivery")
    if not oversees(caller, row["workspace_id"]):
        raise Refusal("forbidden", "Deliveries are for operators, auditors and administrators.")
    if acts and not caller.may(row["workspace_id"], "operator"):
        raise Refusal("forbidden", "Only operators send deliveries again.")
    return _delivery(row)


def get_delivery(caller: Caller, delivery_id: str) -> Json:
    """A delivery with its attempts, the first one first, and the body that is sent."""
    found = find_delivery(caller, delivery_id)
    with connection.cursor() as db:
        db.execute(
            "SELECT number, url, started_at, seconds, status, error, detail, answer FROM rehydrate_deliveryattempt"
            " WHERE delivery_id = %s ORDER BY number",
            [found["id"]],
        )
        rows = db.fetchall()
    names = ("number", "url", "started_at", "seconds", "status", "error", "detail", "answer")
    attempts = [dict(zip(names, row, strict=True)) for row in rows]
    for made in attempts:
        made["started_at"] = instant(made["started_at"])
        made["url"] = shown_url(made["url"])
        # Without an outcome it is being made right now, or its sender died over it.
        if made["seconds"] is None and not (found["sending"] and made["number"] == found["attempt"]):
            made["error"] = "interrupted"
    return {**found, "attempts": attempts, "body": delivering.body(found)}


def deliveries_of_run(run_id: str, *, limit: int = 50) -> list[Json]:
    """The newest deliveries of a run that the caller was found to see, for its page: what is next, and when."""
    with connection.cursor() as db:
        db.execute(
            f"SELECT jsonb_agg(to_jsonb(x)) FROM (SELECT {_DELIVERY} FROM {_DELIVERIES} WHERE d.run_id = %s"
            " ORDER BY d.at DESC, d.id DESC LIMIT %s) x",
            [run_id, limit],
        )
        (found,) = db.fetchone()
    rows = msgspec.json.decode(found) if isinstance(found, str) else found or []
    return [_delivery(row) for row in rows]


#: For so long a delivery that was given up is an alarm, unless somebody sends it again.
ALARM_DAYS: Final = 7
_GIVEN_UP: Final = (
    "SELECT count(*) FROM rehydrate_delivery g WHERE g.endpoint_id = e.id AND g.status = 'given_up'"
    f" AND g.closed_at > clock_timestamp() - interval '{ALARM_DAYS} days'"
)


def list_receivers(caller: Caller) -> list[Json]:
    """The receivers of flows, as far as the caller oversees them: how each does, and what it has before it."""
    places = [UUID(workspace) for workspace in caller.workspaces if oversees(caller, workspace)]
    with connection.cursor() as db:
        db.execute(
            "SELECT jsonb_agg(to_jsonb(x) ORDER BY x.flow, x.workspace) FROM (SELECT e.id, e.url, e.flow, e.failures,"
            " e.switched_off_at, e.switched_off_why, e.quiet_until, e.answered_at, e.workspace_id,"
            " w.slug AS workspace, (SELECT count(*) FROM rehydrate_delivery p WHERE p.endpoint_id = e.id"
            f" AND p.status = 'pending') AS pending, ({_GIVEN_UP}) AS given_up FROM rehydrate_endpoint e"
            " JOIN rehydrate_workspace w ON w.id = e.workspace_id"
            " WHERE e.workspace_id = ANY(%s) AND e.url IS NOT NULL) x",
            [places],
        )
        (found,) = db.fetchone()
    rows: list[Json] = msgspec.json.decode(found) if isinstance(found, str) else found or []
    for row in rows:
        row["url"] = shown_url(row["url"])
        row["may_operate"] = caller.may(row["workspace_id"], "operator")
    return rows


def delivery_backlog() -> tuple[dict[str, int], float]:
    """How many deliveries are pending, set aside and given up, and the age in seconds of the oldest pending one."""
    with connection.cursor() as db:
        db.execute(
            "SELECT CASE WHEN e.switched_off_at IS NULL THEN 'pending' ELSE 'set_aside' END, count(*),"
            " extract(epoch FROM clock_timestamp() + %s::interval - min(d.at))"
            " FROM rehydrate_delivery d JOIN rehydrate_endpoint e ON e.id = d.endpoint_id"
            " WHERE d.status = 'pending' AND e.url IS NOT NULL GROUP BY 1 UNION ALL"
            " SELECT 'given_up', count(*), 0 FROM rehydrate_delivery WHERE status = 'given_up'",
            [clock.interval()],
        )
        rows = {status: (count, float(age)) for status, count, age in db.fetchall()}
    counts = {status: rows.get(status, (0, 0.0))[0] for status in ("pending", "set_aside", "given_up")}
    return counts, rows.get("pending", (0, 0.0))[1]


def receiver_states() -> dict[str, int]:
    """How many receivers take what they are sent, fail, or are switched off."""
    with connection.cursor() as db:
        db.execute(
            "SELECT count(*) FILTER (WHERE switched_off_at IS NULL AND failures = 0),"
            " count(*) FILTER (WHERE switched_off_at IS NULL AND failures > 0),"
            " count(*) FILTER (WHERE switched_off_at IS NOT NULL) FROM rehydrate_endpoint WHERE url IS NOT NULL"
        )
        return dict(zip(("well", "failing", "switched_off"), db.fetchone(), strict=True))


def _trouble(caller: Caller) -> tuple[str, list[Any]]:
    """A count for everybody who oversees deliveries: receivers that are off, and deliveries given up of late."""
    places = [UUID(workspace) for workspace in caller.workspaces if caller.is_person and oversees(caller, workspace)]
    if not places:
        return "0", []
    return (
        f"(SELECT coalesce(sum((e.switched_off_at IS NOT NULL)::int + ({_GIVEN_UP})), 0)::int FROM rehydrate_endpoint e"
        " WHERE e.workspace_id = ANY(%s) AND e.url IS NOT NULL)",
        [places],
    )


def shown_url(url: str) -> str:
    """An address as everybody may read it: what follows its path may be a key."""
    return url.partition("?")[0] + ("?…" if "?" in url else "")


def _delivery(row: Json) -> Json:
    delivery, receiver, status = row["delivery"], row["receiver"], row["shown"]
    pending = status == "pending" and not delivery["sending"]
    due = max((when for when in (delivery["next_at"], receiver["quiet_until"]) if when), key=dt.datetime.fromisoformat)
    return {
        "id": delivery["id"],
        "type": delivery["type"],
        "wait": delivery["subject"] or None,
        "run": delivery["run_id"],
        "run_title": row["title"],
        "workspace": loading.workspace_slug(row["workspace_id"]),
        "flow": row["flow"],
        "external_id": row["external_id"],
        "run_status": delivery["run_status"],
        "run_version": delivery["run_version"],
        "at": _instant(delivery["at"]),
        "status": status,
        "sending": delivery["sending"] and status in ("pending", "set_aside"),
        "attempt": delivery["attempts"],
        "next_try_at": _instant(due) if pending else None,
        "last_status": delivery["last_status"],
        "last_error": delivery["last_error"],
        "closed_at": _instant(delivery["closed_at"]),
        "receiver": {
            "id": receiver["id"],
            "url": shown_url(receiver["url"]) if receiver["url"] else None,
            "failures": receiver["failures"],
            "switched_off_at": _instant(receiver["switched_off_at"]),
            "switched_off_why": receiver["switched_off_why"],
            "answered_at": _instant(receiver["answered_at"]),
        },
    }


def _instant(text: str | None) -> str | None:
    return None if text is None else instant(dt.datetime.fromisoformat(text))
