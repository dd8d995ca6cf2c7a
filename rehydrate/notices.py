"""What a transaction tells those who wait: pure, plus the one SELECT that says it. Who waits, and how: `wakeups`.

A notice rides along in the statement that saves the change, so it is heard when the change is committed, and never
otherwise. PostgreSQL commits transactions that notify one after the other, so only what somebody may be waiting for is
told: whoever listens for a kind holds an advisory lock on it, shared, for as long as its connection lives, and a
transaction that could have the lock to itself keeps silent.
"""

import datetime as dt
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import msgspec

from rehydrate.core.state import Run, State

CHANNEL: Final = "rehydrate_"
#: The first half of the advisory locks' keys; a kind is the second.
LOCKS: Final = 0x72656879

#: Whoever waits for timers looks at least this often (seconds): only what becomes due sooner needs to be told.
HORIZON: Final = 2.0
#: A payload holds less than 8,000 bytes: of more than this many, "several" is told instead.
NAMED_AT_MOST: Final = 40


class Kind(IntEnum):
    """What a notice is about, by its number in the locks' keys and in the payload."""

    READY = 1  # {workspace: {flow: number of runs}} that may be claimed now; null: look for yourself
    CHANGED = 2  # {workspace: [run ids], or null for too many to name}; null: anything
    TIMER = 3  # something becomes due within HORIZON
    DELIVERY = 4  # something is to be delivered

    @property
    def channel(self) -> str:
        """Each has its own: whoever waits for one is not disturbed by the others."""
        return f"{CHANNEL}{int(self)}"


class Change(Protocol):
    """What one transaction did to one run, as `projections` has it."""

    @property
    def before(self) -> State | None: ...
    @property
    def after(self) -> State: ...
    @property
    def recorded(self) -> Sequence[Any]: ...
    @property
    def now(self) -> dt.datetime | None: ...


def of(changes: Sequence[Change], *, due: Iterable[dt.datetime] = ()) -> dict[Kind, Any]:
    """What these changes are news for, by kind. `due` are the times of timers that were set."""
    ready: dict[str, dict[str, int]] = {}
    changed: dict[str, list[str]] = {}
    dues = list(due)
    now: dt.datetime | None = None
    for change in changes:
        run, was = change.after.run, change.before.run if change.before is not None else None
        now = now or change.now
        # Told also of a run that was claimable before: whoever looked meanwhile has passed it over, locked as it was.
        if _claimable(run, change.now):
            flows = ready.setdefault(run.workspace_id, {})
            flows[run.flow] = flows.get(run.flow, 0) + 1
        if change.recorded:
            changed.setdefault(run.workspace_id, []).append(run.id)
        for at, before in (
            (run.lease_expires_at, was.lease_expires_at if was is not None else None),
            (run.alarm_at, was.alarm_at if was is not None else None),
        ):
            if at is not None and (before is None or at < before):
                dues.append(at)
    told: dict[Kind, Any] = {}
    if ready:
        told[Kind.READY] = ready if sum(map(len, ready.values())) <= NAMED_AT_MOST else None
    if changed:
        named = {ws: ids if len(ids) <= NAMED_AT_MOST else None for ws, ids in changed.items()}
        few = sum(len(ids or [""]) for ids in named.values()) <= NAMED_AT_MOST
        told[Kind.CHANGED] = named if few else None if len(named) > NAMED_AT_MOST else dict.fromkeys(named)
    if now is not None and any(at - now <= dt.timedelta(seconds=HORIZON) for at in dues):
        told[Kind.TIMER] = None
    return told


def _claimable(run: Run, now: dt.datetime | None) -> bool:
    """As `claims.next_claimable` sees it."""
    if run.status not in ("ready", "compensating") or run.lease_expires_at is not None:
        return False
    return run.retry_at is None or (now is not None and run.retry_at <= now)


def tell(deliveries: str | None = None, *, saved: str | None = None) -> str:
    """The last SELECT of a statement, with `parts(...)` as its one parameter. `deliveries` is a step of the statement:
    when it returns rows, there is something to deliver. So is `saved`, without
    whose rows nothing is told.

    Asking for the lock tells whether somebody listens; two who ask at the same instant may both be told so, which costs
    a notice too many and no more. The time makes each one: of equal notices in one transaction PostgreSQL delivers the
    first.
    """
    more = f" UNION ALL SELECT {Kind.DELIVERY:d}, '{Kind.DELIVERY:d}null' WHERE EXISTS (SELECT FROM {deliveries})"
    return (
        f"SELECT count(pg_notify('{CHANNEL}' || kind, part || E'\\n#' || clock_timestamp()))"
        " FROM (SELECT kind, part FROM jsonb_to_recordset(%s::jsonb) AS x(kind int, part text)"
        f"{more if deliveries else ''}) told"
        f" WHERE {f'EXISTS (SELECT FROM {saved}) AND ' if saved else ''}"
        f"CASE WHEN pg_try_advisory_lock({LOCKS}, kind) THEN NOT pg_advisory_unlock({LOCKS}, kind) ELSE true END"
    )


def parts(told: dict[Kind, Any]) -> str:
    """The parameter of `tell`: a row for each kind, of which those are told that somebody listens for."""
    rows = [
        {"kind": int(kind), "part": f"{int(kind)}{msgspec.json.encode(what).decode()}"} for kind, what in told.items()
    ]
    return msgspec.json.encode(rows).decode()


def read(payload: str) -> list[tuple[Kind, Any]]:
    """What a payload tells. A kind that is not known, of a newer program on the same database, is passed over."""
    known = {str(int(kind)): kind for kind in Kind}
    return [
        (kind, msgspec.json.decode(line[1:]))
        for line in payload.split("\n")
        if (kind := known.get(line[:1])) is not None
    ]
