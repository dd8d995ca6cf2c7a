"""States as rows, many runs in one statement a table: the events with their chain, and the projections of them.

Only `ledger` and the rebuild use this; no rules live here. A struct is written as its row (core/state.py), so that a
projection is nothing but the folded state: what `evolve` says is what the tables hold.
"""

import datetime as dt
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from itertools import compress
from operator import is_not
from typing import Any, Final, TypeVar

import msgspec
from django.db import connection, transaction
from django.db.models import Model
from msgspec import Struct

from rehydrate import models, notices, outbox, seal, sql
from rehydrate.core import events as ev
from rehydrate.core.canonical import event_hash, instant
from rehydrate.core.state import Decision, Effect, Ref, Run, State, Wait
from rehydrate.loading import timers

#: Dicts, or structs that are written as their rows.
Rows = list[Any]


T = TypeVar("T", bound=Struct)


class Change(Struct, frozen=True):
    """What one transaction did to one run, which was at `revision`.

    `states` are rows of opaque state to keep; `answer` is the row of the answer that tells of it
    (an IdempotencyRecord).
    """

    before: State | None
    after: State
    recorded: list[ev.Recorded]
    secret: tuple[str, ...] = ()
    now: dt.datetime | None = None
    deliver: bool = False  # the flow names a URL for its deliveries
    revision: int = 0
    states: Rows = []
    sealed: bool = False  # rows that were read hold sealed fields
    answer: dict[str, Any] | None = None


#: An expression of SQL with its parameters.
Condition = tuple[str, list[Any]]


class Overtaken(Exception):
    """Somebody else wrote the run since it was read: nothing was saved."""


# -- writing


@cache
def _columns(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def _quoted(columns: Iterable[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


#: The runs come first, as `saved`; of one that was overtaken nothing else is written.
_SAVED: Final = "EXISTS (SELECT FROM saved)"
_EACH_SAVED: Final = "x.run_id IN (SELECT id FROM saved)"
_IF_SAVED: Final = f"WHERE {_SAVED}"


def _insert(table: str, columns: Iterable[str], end: str) -> str:
    names = _quoted(columns)
    return (
        f"INSERT INTO {table} ({names}) SELECT {names} FROM jsonb_populate_recordset(null::{table}, %s::jsonb) x {end}"
    )


@cache
def _update(table: type[Model], same: tuple[str, ...], columns: tuple[str, ...], end: str) -> str:
    """Rows found by the columns `same`, of the runs that are named; only what changed is set, and only that is sent."""
    typed = ", ".join(f'"{name}" {_type(table, name)}' for name in (*same, *columns))
    if table is models.Run:
        typed += ", from_hash text"
    sets = ", ".join(f'"{name}" = x."{name}"' for name in columns)
    if table is models.Run:
        sets = f"{sets}, revision = t.revision + 1".removeprefix(", ")
    found = " AND ".join(f't."{name}" = x."{name}"' for name in same)
    if table is models.Run:  # the same history, not only as long a one: a backup may have been restored meanwhile
        found += " AND t.last_hash = x.from_hash"
    run = "id" if table is models.Run else "run_id"
    return (
        f"UPDATE {table._meta.db_table} t SET {sets} FROM jsonb_to_recordset(%s::jsonb) AS x({typed})"
        f" WHERE t.{run} = ANY(%s::uuid[]) AND {found} {end}"
    )


def _type(table: type[Model], name: str) -> str:
    field = next(field for field in table._meta.concrete_fields if field.attname == name)
    return str(field.rel_db_type(connection) if field.is_relation else field.db_type(connection))


#: What of a run an agent or a person may have written secrets into.
_SEALABLE: Final = ("checkpoint", "result", "last_error", "cancelled", "labels")
_INSERT_RUN: Final = _insert("rehydrate_run", [*_columns(Run), "sealed"], "RETURNING id")
_EVENT: Final = [
    "run_id", "workspace_id", "seq", "type", "actor_kind", "actor_id", "actor_name", "at",
    "payload", "sealed", "prev_hash", "hash",
]  # fmt: skip
_INSERT_EVENTS: Final = _insert("rehydrate_ledgerevent", _EVENT, _IF_SAVED)
_INSERT_WAITS: Final = _insert("rehydrate_wait", [*_columns(Wait), "sealed"], _IF_SAVED)
_INSERT_EFFECTS: Final = _insert("rehydrate_effect", [*_columns(Effect), "sealed"], _IF_SAVED)
_INSERT_DECISIONS: Final = _insert(
    "rehydrate_decision", [*_columns(Decision), "sealed"], f"{_IF_SAVED} ON CONFLICT (id) DO NOTHING"
)
_INSERT_REFS: Final = _insert("rehydrate_externalref", _columns(Ref), f"{_IF_SAVED} ON CONFLICT DO NOTHING")
_INSERT_STATES: Final = _insert("rehydrate_checkpointstate", ["run_id", "seq", "digest", "sealed"], _IF_SAVED)


#: For the rest of the transaction, hundreds of rows are joined by hashing them (which `dsn.PLANS` turns off): else each
#: would be compared with each. Measured with the timers of 250 runs: 13 ms of PostgreSQL instead of 42.
_BY_HASH: Final = "SELECT set_config('enable_hashjoin', 'on', true), set_config('enable_nestloop', 'off', true)"

#: What there is an answer to already is not done again; and if another gives the first at this instant, its key stops
#: this whole statement.
_ANSWERED: Final = (
    "again AS MATERIALIZED (SELECT x.run_id FROM jsonb_to_recordset(%s::jsonb)"
    " AS x(run_id uuid, caller text, path text, key text) JOIN rehydrate_idempotencyrecord i"
    " ON i.caller = x.caller AND i.path = x.path AND i.key = x.key)"
)
_INSERT_ANSWERS: Final = (
    "INSERT INTO rehydrate_idempotencyrecord"
    " (caller, path, key, request_digest, status, content_type, body, run_id, epoch, created_at)"
    " SELECT caller, path, key, request_digest, status, content_type, body, granted, epoch, clock_timestamp()"
    " FROM jsonb_to_recordset(%s::jsonb) AS x(run_id uuid, caller text, path text, key text, request_digest text,"
    f" status smallint, content_type text, body bytea, granted uuid, epoch bigint) {_IF_SAVED}"
)


def event_rows(change: Change) -> tuple[Rows, str]:
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


def _row(struct: Struct, secret: tuple[str, ...]) -> Any:
    """A struct as its row; the struct itself where nothing is secret, which is written the same and quicker."""
    if not secret:
        return struct
    row, sealed = seal.seal(msgspec.to_builtins(struct), secret)
    return {**row, "sealed": sealed}


def _run_row(run: Run, secret: tuple[str, ...]) -> Any:
    if not secret:
        return run
    row = msgspec.to_builtins(run)
    kept, sealed = seal.seal({name: row[name] for name in _SEALABLE}, secret)
    return {**row, **kept, "sealed": sealed}


class _Changed:
    """Rows of one table that are there already, and the columns in which any of them changed."""

    def __init__(self, table: type[Model], kind: type[Struct], *same: str, end: str = f"AND {_SAVED}"):
        self.table, self.names, self.same, self.end = table, _columns(kind), same, end
        self.rows: list[tuple[Any, dict[str, Any]]] = []
        self.columns: set[str] = set()

    def add(self, was: Struct, now: Struct, row: Any, *, whole: bool, **more: Any) -> None:
        """`whole`: what is secret is sealed by the row, so the row is written as one."""
        self.rows.append((row, more))
        if whole:
            self.columns.update(self.names, ["sealed"])
        else:
            changed = map(is_not, msgspec.structs.astuple(was), msgspec.structs.astuple(now))
            self.columns.update(compress(self.names, changed))

    def step(self) -> tuple[str, Rows]:
        columns = tuple(sorted(self.columns.difference(self.same)))
        sent = (*self.same, *columns, *(["from_hash"] if self.table is models.Run else []))
        rows = [{name: more[name] if name in more else _value(row, name) for name in sent} for row, more in self.rows]
        return _update(self.table, self.same, columns, self.end), rows


def _value(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, dict) else getattr(row, name, None)


def save(changes: list[Change]) -> None:
    """Events and projections of many runs, in one statement (two where a timer is set anew), and who waits is told.

    Raises `Overtaken` when a run is not at its change's revision any more. One run then has nothing written; of
    several, which are locked, the caller's transaction must be given up.
    """
    made = _Rows(changes)
    if len(changes) > 1:
        with connection.cursor() as cursor:
            cursor.execute(_BY_HASH)
    with transaction.atomic(savepoint=False) if made.anew else nullcontext():
        if len(_write(made)) < len(changes):
            raise Overtaken
        if made.anew:
            with connection.cursor() as cursor:
                cursor.execute(_INSERT_TIMERS_ALONE, [_json(made.anew)])


def save_each(changes: list[Change], only_if: Condition | None = None) -> dict[str, Run]:
    """As `save`, but each run by itself, though in one statement: as they were written those that nobody overtook.

    None of them may take two statements (see `takes_two`). `only_if` holds for all of them, or nothing is written; and
    then a run that is opened may be there.
    """
    made = _Rows(sorted(changes, key=lambda change: change.after.run.id))  # so that no two wait for each other's locks
    assert not made.anew, "a timer that is set anew needs a transaction"
    return {run_id: made.written[run_id] for run_id in _write(made, only_if)}


def takes_two(change: Change) -> bool:
    fired, gone, pending = _timer_rows([change])
    return not {_timer_key(row) for row in (*fired, *gone)}.isdisjoint(map(_timer_key, pending))


class _Rows:
    """What changes of runs have for each table; how many runs, and what is told to whoever waits."""

    def __init__(self, changes: list[Change]) -> None:
        new: Rows = []
        old = _Changed(models.Run, Run, "id", "revision", end="RETURNING t.id")
        events: Rows = []
        new_waits: Rows = []
        old_waits = _Changed(models.Wait, Wait, "run_id", "key")
        new_effects: Rows = []
        old_effects = _Changed(models.Effect, Effect, "run_id", "key")
        decisions: Rows = []
        refs: Rows = []
        states: Rows = []
        self.written: dict[str, Run] = {}
        for change in changes:
            before, after, secret = change.before, change.after, change.secret
            whole = change.sealed or bool(change.secret)
            rows, last = event_rows(change)
            events += rows
            run = self.written[after.run.id] = msgspec.structs.replace(after.run, last_hash=last)
            if before is None:
                new.append(_run_row(run, secret))
                before = State(run)
            else:
                old.add(
                    before.run,
                    run,
                    _run_row(run, secret),
                    whole=whole,
                    revision=change.revision,
                    from_hash=before.run.last_hash,
                )
            for wait, was in _pairs(after.waits, before.waits):
                if was is None:
                    new_waits.append(_row(wait, secret))
                else:
                    old_waits.add(was, wait, _row(wait, secret), whole=whole)
            for effect, earlier in _pairs(after.effects, before.effects):
                if earlier is None:
                    new_effects.append(_row(effect, secret))
                else:
                    old_effects.add(earlier, effect, _row(effect, secret), whole=whole)
            decisions += [_row(made, secret) for key, made in after.decisions.items() if key not in before.decisions]
            refs += [msgspec.to_builtins(ref) for key, ref in after.refs.items() if key not in before.refs]
            states += change.states
        fired, gone, pending = _timer_rows(changes)
        self.answers = [{"run_id": it.after.run.id, **it.answer} for it in changes if it.answer is not None]
        # The parts of one statement do not see each other: a timer that is set anew waits until its row before is gone.
        over = {_timer_key(row) for row in (*fired, *gone)}
        self.anew = [row for row in pending if _timer_key(row) in over]
        assert not (new and old.rows), "runs are opened apart from those that are there"
        self.runs = (_INSERT_RUN, new) if new else old.step()
        self.others: list[tuple[str, Rows]] = [
            (_INSERT_EVENTS, events),
            (_INSERT_WAITS, new_waits),
            (_INSERT_EFFECTS, new_effects),
            *(changed.step() for changed in (old_waits, old_effects) if changed.rows),
            (_INSERT_DECISIONS, decisions),
            (_INSERT_REFS, refs),
            (_INSERT_STATES, states),
            (_FIRE_TIMERS, fired),
            (_DELETE_TIMERS, gone),
            (outbox.INSERT, outbox.rows(changes)),
            (_INSERT_ANSWERS, self.answers),
            (_INSERT_TIMERS, [row for row in pending if _timer_key(row) not in over]),
        ]
        self.ids = [change.after.run.id for change in changes]
        self.news = notices.of(changes, due=(dt.datetime.fromisoformat(row["due_at"]) for row in pending))


def _pairs(after: dict[str, T], before: dict[str, T]) -> list[tuple[T, T | None]]:
    """What is not as it was, beside what it was."""
    return [(now, before.get(key)) for key, now in after.items() if before.get(key) is not now]


def _write(made: _Rows, only_if: Condition | None = None) -> set[str]:
    """What there is to write, as one statement: each way to the database costs as much as the work done there.

    Where a statement joins a table, it names the `ids` of the runs beside: the plan, which is kept, must go by an index
    however small the table was when it was made. The ids of the runs that were as they had been read.
    """
    others = [step for step in made.others if step[1]]
    if_saved = _SAVED if len(made.ids) == 1 else _EACH_SAVED
    steps = "".join(f", w{i} AS ({step.replace(_SAVED, if_saved)})" for i, (step, _) in enumerate(others))
    (runs, changed), first, tests = made.runs, "", []
    params: list[Any] = []
    if made.answers:
        first, tests = f"{_ANSWERED}, ", ["x.id NOT IN (SELECT run_id FROM again)"]
        named = ("run_id", "caller", "path", "key")
        params.append(_json([{name: row[name] for name in named} for row in made.answers]))
    if only_if is not None:
        first += f"sound AS MATERIALIZED (SELECT WHERE {only_if[0]}), "
        tests.append("EXISTS (SELECT FROM sound)")
        params += only_if[1]
    if tests:
        new = runs is _INSERT_RUN
        there = " ON CONFLICT DO NOTHING" if new and only_if is not None else ""
        runs = runs.replace("RETURNING", f"{'WHERE' if new else 'AND'} {' AND '.join(tests)}{there} RETURNING")
    for step, rows in ((runs, changed), *others):
        params += [_json(rows), made.ids] if "ANY(%s::uuid[])" in step else [_json(rows)]
    told = ""
    sent = next((f"w{i}" for i, (step, _) in enumerate(others) if step is outbox.INSERT), None)
    if made.news or sent:
        told = f", ({notices.tell(sent, saved='saved')})"
        params.append(notices.parts(made.news))
    writing = f"WITH {first}saved AS ({runs}){steps}"
    statement = f"{writing} SELECT (SELECT string_agg(id::text, ' ') FROM saved){told}"
    ((found, *_),) = sql.texts(statement, params)
    return set((found or "").split())


def _json(rows: Rows) -> str:
    return msgspec.json.encode(rows).decode()


_TIMER_SOURCE: Final = "jsonb_populate_recordset(null::rehydrate_timer, %s::jsonb) x"
_TIMER_SAME: Final = (
    "t.run_id = ANY(%s::uuid[]) AND t.run_id = x.run_id AND t.kind = x.kind AND t.subject = x.subject"
    " AND t.fired_at IS NULL"
)
_FIRE_TIMERS: Final = (
    f"UPDATE rehydrate_timer t SET fired_at = x.fired_at FROM {_TIMER_SOURCE} WHERE {_TIMER_SAME} AND {_SAVED}"
)
_DELETE_TIMERS: Final = f"DELETE FROM rehydrate_timer t USING {_TIMER_SOURCE} WHERE {_TIMER_SAME} AND {_SAVED}"
_TIMER: Final = ["run_id", "kind", "subject", "due_at"]
_INSERT_TIMERS: Final = _insert("rehydrate_timer", _TIMER, _IF_SAVED)
_INSERT_TIMERS_ALONE: Final = _insert("rehydrate_timer", _TIMER, "")


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
