"""What an agent hands in and gets back: effects, waits, answers. Plain values; nothing is sent or kept here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

from rehydrate.client.errors import RehydrateError

Json = dict[str, Any]
Due = str | int | timedelta | datetime

_DURATION = re.compile(r"(\d+)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# An event's inline data is at most 16 KiB; a receipt that is larger is cut down to its id, status and url.
RECEIPT_DATA_LIMIT = 12 * 1024


class BadDuration(RehydrateError, ValueError):
    """A time span is written like "90s", "15m", "2h", "3d", "1w" or "1d 12h"."""


def due_fields(due: Due) -> Json:
    """A deadline as the contract wants it: `due_in` in whole seconds, or `due_at` with an offset."""
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise BadDuration("A point in time needs an offset; datetime.now(UTC) has one.")
        return {"due_at": due.isoformat()}
    return {"due_in": seconds(due)}


def seconds(span: str | int | timedelta) -> int:
    """Whole seconds of "3d", "1d 12h", a number of seconds, or a timedelta."""
    if isinstance(span, timedelta):
        return int(span.total_seconds())
    if isinstance(span, int):
        return span
    text = span.strip().lower()
    if not text or _DURATION.sub("", text).strip():
        raise BadDuration(f"{BadDuration.__doc__} Not {span!r}.")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


def split_action(action: str) -> tuple[str, str]:
    """`crm.create_draft` is the system `crm` and its action `create_draft`."""
    system, dot, name = action.partition(".")
    if not (system and dot and name):
        raise ValueError(f"An action is written system.action, such as crm.create_draft; not {action!r}.")
    return system, name


# --- effects ----------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """A side effect outside, as a flow means it: what is done where, and how it is undone.

    `undo` names the action that undoes it (`"crm.delete_draft"`), with arguments as a pair. `key` is made from the run
    and the action when left out. One object is one effect: asked about and run, it is the same one.
    """

    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    resource: str | None = None
    amount: tuple[str, str] | None = None
    impact: str | None = None
    reversible: bool | None = None
    undo: str | tuple[str, Mapping[str, Any]] | None = None
    approval: str | None = None
    repeat: bool = False
    key: str | None = None
    identity: object = field(default_factory=object, repr=False, compare=False)  # kept by with_arguments

    def with_arguments(self, **changes: Any) -> Effect:
        """The same effect with some arguments changed, such as to meet a condition. It keeps its key within a run."""
        return replace(self, arguments={**self.arguments, **changes})

    def planned(self, key: str, *, start: bool, arguments: Mapping[str, Any] | None = None) -> Json:
        """The `effect.planned` event under this key."""
        system, action = split_action(self.action)
        event: Json = {
            "type": "effect.planned",
            "key": key,
            "system": system,
            "action": action,
            "arguments": dict(self.arguments if arguments is None else arguments),
        }
        if self.resource is not None:
            event["resource"] = self.resource
        if self.amount is not None:
            event["amount"] = {"value": self.amount[0], "currency": self.amount[1]}
        if self.impact is not None:
            event["impact"] = self.impact
        if self.reversible is not None:
            event["reversible"] = self.reversible
        if self.undo is not None:
            undo, undo_arguments = (self.undo, {}) if isinstance(self.undo, str) else self.undo
            undo_system, undo_action = split_action(undo)
            event["compensation"] = {"system": undo_system, "action": undo_action, "arguments": dict(undo_arguments)}
        if self.approval is not None:
            event["approval"] = self.approval
        if self.repeat:
            event["repeat"] = True
        if start:
            event["start"] = True
        return event


@dataclass(frozen=True)
class EffectCall:
    """What a `do`, look-up or undo function gets: the key to hand to the outside, and what to do under it."""

    key: str
    action: str
    arguments: Json
    resource: str | None = None
    amount: Json | None = None
    attempt: int = 1
    receipt: Json | None = None  # for undo functions: the receipt of what is to be undone
    run_id: str = ""
    external_id: str = ""


@dataclass(frozen=True)
class Receipt:
    """What the outside gave as proof. A `do` function may return one, or a dict with an `id`, or just an id."""

    id: str
    status: str = "done"
    url: str | None = None
    data: Any = None


def receipt_of(result: Any, key: str) -> Json:
    """The receipt that is recorded for what a `do` function returned."""
    if isinstance(result, Receipt):
        receipt: Json = {"id": result.id, "status": result.status, "url": result.url, "data": result.data}
    elif isinstance(result, Mapping):
        status = result.get("status")
        receipt = {
            "id": str(result.get("id") or key),
            "status": status if status in ("accepted", "done") else "done",
            "url": result.get("url"),
            "data": dict(result),
        }
    elif result is None:
        receipt = {"id": key, "status": "done"}
    else:
        receipt = {"id": str(result), "status": "done"}
    if receipt.get("data") is not None:
        # What a replay gives back must be what the first time gave: so both are what JSON makes of it.
        text = json.dumps(receipt["data"], default=str)
        receipt["data"] = json.loads(text) if len(text.encode()) <= RECEIPT_DATA_LIMIT else None
    if not isinstance(receipt.get("url"), str):
        receipt.pop("url", None)
    return {name: value for name, value in receipt.items() if value is not None}


def result_of(receipt: Mapping[str, Any] | None) -> Json:
    """What `run.effect` returns, now and on each replay: the receipt's id, status and url, and its data over them."""
    receipt = receipt or {}
    data = receipt.get("data")
    named = {name: receipt[name] for name in ("id", "status", "url") if receipt.get(name) is not None}
    if isinstance(data, Mapping):
        return {**named, **data}
    return named if data is None else {**named, "data": data}


# --- waits ----------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Something a paused run waits for, until `due`. `who` says in words whom or what it waits for."""

    kind: ClassVar[str]

    name: str
    due: Due
    _: KW_ONLY
    on_timeout: str | None = None
    on_reject: str | None = None
    correlation: str | None = None
    who: str | None = None
    key: str | None = None

    def body(self, key: str) -> Json:
        """The wait as the contract's `paused` and `wait.opened` take it."""
        wait: Json = {"key": key, "name": self.name, "kind": self.kind, **due_fields(self.due)}
        for name, value in (
            ("on_timeout", self.on_timeout),
            ("on_reject", self.on_reject),
            ("correlation", self.correlation),
            ("from", self.who),
        ):
            if value is not None:
                wait[name] = value
        return wait


@dataclass(frozen=True)
class Timer(Wait):
    """A point in time."""

    kind = "timer"


@dataclass(frozen=True)
class Callback(Wait):
    """A call to an unguessable URL, from a system that has no key."""

    kind = "callback"


@dataclass(frozen=True)
class Signal(Wait):
    """A signal by name, from a system that has a key."""

    kind = "signal"


@dataclass(frozen=True)
class Approval(Wait):
    """A question to people: a plain sentence, and what is proposed, well enough told that nobody has to ask around."""

    kind = "approval"

    summary: str = ""
    effect: Effect | None = None
    details: Sequence[tuple[str, str]] | Mapping[str, str] = ()
    schema: Mapping[str, Any] | None = None  # JSON Schema of the arguments that may be edited
    response_schema: Mapping[str, Any] | None = None
    choices: Sequence[str] | None = None
    reasons: Sequence[str] | None = None
    risk: str | None = None
    rationale: str | None = None
    evidence: Sequence[tuple[str, str]] = ()
    rollback: str | None = None

    def ask(self, effect_key: str | None) -> Json:
        pairs = self.details.items() if isinstance(self.details, Mapping) else self.details
        ask: Json = {"summary": self.summary} if self.summary else {}
        if pairs:
            ask["details"] = [{"label": label, "value": value} for label, value in pairs]
        if effect_key is not None:
            ask["effect"] = {"key": effect_key}
        if self.evidence:
            ask["evidence"] = [{"title": title, "url": url} for title, url in self.evidence]
        for name in ("schema", "response_schema", "risk", "rationale", "rollback"):
            value = getattr(self, name)
            if value is not None:
                ask[name] = value
        for name in ("choices", "reasons"):
            value = getattr(self, name)
            if value is not None:
                ask[name] = list(value)
        return ask


@dataclass(frozen=True)
class OpenWait:
    """A wait that was opened ahead of its pause; `url` is where its callback goes."""

    wait: Wait
    key: str
    id: str
    url: str | None


# --- answers ----------------------------------------------------

YES = frozenset({"approve", "approve_with_conditions", "edit"})


@dataclass(frozen=True)
class Answer:
    """How a wait ended: a person's decision, a signal, or the passing of time."""

    key: str
    name: str
    kind: str
    status: str  # open | satisfied | rejected | timed_out | cancelled | superseded
    decision: Json = field(default_factory=dict)
    signal: Json = field(default_factory=dict)
    on_timeout: str | None = None

    @property
    def open(self) -> bool:
        return self.status == "open"

    @property
    def satisfied(self) -> bool:
        return self.status == "satisfied"

    @property
    def approved(self) -> bool:
        """A person said yes: as it was, edited, or with conditions."""
        return self.status != "rejected" and self.choice in YES

    @property
    def edited(self) -> bool:
        return self.choice == "edit"

    @property
    def rejected(self) -> bool:
        """A person said no. A time-out is never a person's no."""
        return self.status == "rejected" or self.choice == "reject"

    @property
    def timed_out(self) -> bool:
        return self.status == "timed_out"

    @property
    def authorised(self) -> bool:
        """The effect may run: a person said yes, or nobody answered where the flow lets that count as a yes."""
        return self.approved or (self.timed_out and self.on_timeout == "continue")

    @property
    def choice(self) -> str | None:
        return self.decision.get("choice")

    @property
    def arguments(self) -> Json | None:
        """The arguments as a person edited them."""
        return self.decision.get("arguments")

    @property
    def response(self) -> Any:
        return self.decision.get("response")

    @property
    def conditions(self) -> list[Json]:
        """`[{pointer, op, value}]`, into the effect's arguments."""
        return list(self.decision.get("conditions") or [])

    @property
    def reason(self) -> str | None:
        return self.decision.get("reason") or None

    @property
    def comment(self) -> str | None:
        return self.decision.get("comment") or None

    @property
    def by(self) -> str | None:
        """Who decided."""
        who = self.decision.get("decided_by", self.decision.get("by"))
        return str(who.get("name") or who.get("id")) if isinstance(who, Mapping) else who

    @property
    def payload(self) -> Any:
        """What the signal or callback carried."""
        return self.signal.get("payload")


def answer_of(wait: Mapping[str, Any]) -> Answer:
    """The answer that a wait of the envelope, or of a run, carries."""
    return Answer(
        key=wait.get("key") or wait["name"],
        name=wait["name"],
        kind=wait["kind"],
        status=wait["status"],
        decision=dict(wait.get("decision") or {}),
        signal=dict(wait.get("signal") or {}),
        on_timeout=wait.get("on_timeout"),
    )
