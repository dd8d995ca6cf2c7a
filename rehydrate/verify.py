"""Proves the ledger: walks the hash chains, folds the events again and compares them with the tables. Changes nothing.

An export is proved by its chains alone, anywhere: what a flow names secret stands in it as salted digests, as it does
in the hashes.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
import rfc8785
from django.db import connection, transaction

from rehydrate import loading, seal
from rehydrate.core import events as ev
from rehydrate.core.canonical import GENESIS, event_hash, instant
from rehydrate.core.state import Decision, Ref, State, fold
from rehydrate.models import LedgerEvent, Run

Event = Mapping[str, Any]
"""As the API gives it: seq, type, actor, at, payload, prev_hash, hash."""


@dataclass(frozen=True)
class Flaw:
    """The first thing that is wrong with a run; `seq` is 0 where no single event is."""

    run: str
    seq: int
    what: str

    def __str__(self) -> str:
        place = f"run {self.run}, event {self.seq}" if self.seq else f"run {self.run}"
        return f"{place}: {self.what}"


class ExportError(ValueError):
    """The file holds no ledger that could be proved; the message is one sentence."""


# -- the chain


def chain(run: str, events: Iterable[Event]) -> tuple[Flaw | None, int, str]:
    """The first event that does not follow from the one before it, how many do, and the last hash that holds."""
    seq, last = 0, GENESIS
    for event in events:
        number = event.get("seq")
        if number != seq + 1:
            return Flaw(run, seq + 1, f"it is missing; event {number} follows event {seq}"), seq, last
        seq = number
        if event.get("prev_hash") != last:
            return Flaw(run, seq, "it does not follow from the event before it (prev_hash)"), seq - 1, last
        try:
            expected = event_hash(
                last,
                run=run,
                seq=seq,
                type_=event["type"],
                actor=event["actor"],
                at=event["at"],
                payload=event["payload"],
            )
        except (KeyError, TypeError, rfc8785.CanonicalizationError) as error:
            return Flaw(run, seq, f"it cannot be read ({error})"), seq - 1, last
        if event.get("hash") != expected:
            return Flaw(run, seq, "its content was changed after it was written (hash)"), seq - 1, last
        last = expected
    return None, seq, last


# -- the database


def run_ids(only: str | None = None) -> Iterator[str]:
    """All runs in the order of their opening, or the one. Raises `Run.DoesNotExist`."""
    if only is not None:
        yield str(Run.objects.only("pk").get(pk=UUID(only)).pk)
        return
    for pk in Run.objects.order_by("pk").values_list("pk", flat=True).iterator():
        yield str(pk)


def run(run_id: str) -> tuple[Flaw | None, int]:
    """A run's chain and its tables, read as they were at one instant; with the number of its events."""
    with transaction.atomic():
        with connection.cursor() as cursor:
            if not connection.savepoint_ids:  # within another transaction, that one's view is the instant
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        rows = list(LedgerEvent.objects.filter(run_id=run_id).order_by("seq"))
        flaw, count, last = chain(run_id, (_event(row) for row in rows))
        if flaw is None:
            flaw = _tables(run_id, rows, last)
        return flaw, count


def _event(row: LedgerEvent) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "type": row.type,
        "actor": {"kind": row.actor_kind, "id": row.actor_id, "name": row.actor_name},
        "at": instant(row.at),
        "payload": row.payload,
        "prev_hash": row.prev_hash,
        "hash": row.hash,
    }


def _tables(run_id: str, rows: list[LedgerEvent], last: str) -> Flaw | None:
    """The events folded again, against what the tables say."""
    try:
        loaded = loading.load_runs([run_id], lock=False, full=True)[run_id]
    except msgspec.ValidationError as error:
        return Flaw(run_id, 0, f"a row of its tables cannot be read ({error})")
    if not rows:
        return Flaw(run_id, 1, "it is missing: the run has no events")
    if loaded.state.run.version != len(rows):
        return Flaw(run_id, len(rows) + 1, f"it is missing: the run is at version {loaded.state.run.version}")
    history = []
    for row in rows:
        try:
            fact = ev.parse(row.type, seal.unseal(row.payload, row.sealed))
        except (KeyError, msgspec.ValidationError) as error:
            return Flaw(run_id, row.seq, f"this version of the program cannot read it ({error})")
        history.append(ev.Recorded(row.seq, row.at, ev.Actor(row.actor_kind, row.actor_id, row.actor_name), fact))
    folded = fold(run_id, history)
    renewed = _renewed(folded.run.lease_expires_at, loaded.state.run.lease_expires_at)
    folded = msgspec.structs.replace(
        folded, run=msgspec.structs.replace(folded.run, last_hash=last, lease_expires_at=renewed)
    )
    for what, ours, theirs in _parts(run_id, folded, loaded.state):
        if ours != theirs:
            return Flaw(run_id, 0, f"the table of {what} differs from the events in {_differing(ours, theirs)}")
    return None


def _renewed(by_events: dt.datetime | None, stored: dt.datetime | None) -> dt.datetime | None:
    """A live lease is renewed by each call without an event of its own: then the later end is the right one."""
    return max(by_events, stored) if by_events is not None and stored is not None else by_events


def _parts(run_id: str, folded: State, stored: State) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    yield "runs", _plain(folded.run), _plain(stored.run)
    yield "waits", _plain(folded.waits), _plain(stored.waits)
    yield "effects", _plain(folded.effects), _plain(stored.effects)
    decisions = {row.id: row for row in _rows("rehydrate_decision", run_id, Decision)}
    yield "decisions", _plain({row.id: row for row in folded.decisions.values()}), _plain(decisions)
    # A reference that was given twice is one row, whatever its address was the second time.
    refs = {_ref_key(row): _plain(row) for row in _rows("rehydrate_externalref", run_id, Ref)}
    yield "external refs", {_ref_key(row): _plain(row) for row in folded.refs.values()}, refs


def _rows(table: str, run_id: str, kind: type[Any]) -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT to_jsonb(t) FROM {table} t WHERE run_id = %s", [run_id])  # noqa: S608 (a name of ours)
        rows = [json.loads(row) if isinstance(row, str) else row for (row,) in cursor.fetchall()]
    return [msgspec.convert(seal.unseal(row, row.get("sealed")), kind) for row in rows]


def _ref_key(ref: Ref) -> str:
    return json.dumps([ref.system, ref.type, ref.ref_id])


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _differing(ours: dict[str, Any], theirs: dict[str, Any], path: str = "") -> str:
    """The names of the fields, not what is in them: that may be secret."""
    names: list[str] = []
    for key in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(key), theirs.get(key)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict) and not path:
            names.append(_differing(one, other, f"{key}."))
        else:
            names.append(f"{path}{key}")
    return ", ".join(names)


# -- an export


def export(text: str) -> tuple[Flaw | None, int, int]:
    """The first flaw of an evidence pack (one JSON document, or JSON Lines), how many runs and events were read."""
    runs: dict[str, list[Event]] = {}
    for run_id, event in _read(text):
        runs.setdefault(run_id, []).append(event)
    if not runs:
        raise ExportError("the file holds no events")
    for run_id, events in runs.items():
        flaw, _, _ = chain(run_id, sorted(events, key=_seq))
        if flaw is not None:
            return flaw, len(runs), sum(map(len, runs.values()))
    return None, len(runs), sum(map(len, runs.values()))


def _seq(event: Event) -> int:
    number = event.get("seq")
    return number if isinstance(number, int) else 0


def _read(text: str) -> Iterator[tuple[str, Event]]:
    """Events with the run that they belong to: named on their line, or by the last line before that names one."""
    current: str | None = None
    for number, entry in _entries(text):
        if not isinstance(entry, dict):
            raise ExportError(f"line {number} is no JSON object")
        current = _run_of(entry) or current
        for event in entry["events"] if isinstance(entry.get("events"), list) else [entry]:
            if not isinstance(event, dict) or "prev_hash" not in event:
                continue
            if current is None:
                raise ExportError(f"line {number} does not say which run its event belongs to")
            yield current, event


def _entries(text: str) -> Iterator[tuple[int, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        pass
    else:
        yield from enumerate(whole if isinstance(whole, list) else [whole], start=1)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                raise ExportError(f"line {number} is no JSON") from None


def _run_of(entry: dict[str, Any]) -> str | None:
    for name in ("run", "run_id"):
        value = entry.get(name)
        if isinstance(value, dict):
            value = value.get("id")
        if isinstance(value, str):
            return value
    return None
