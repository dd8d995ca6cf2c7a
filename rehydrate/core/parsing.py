"""Strict JSON and typed bodies: bytes -> values -> structs, or a refusal that points at the fault. No HTTP lives here.

What PostgreSQL or a double cannot hold is marked while it is read rather than refused at once: a receipt among it is
cleaned and kept (contract.md section 4, rule 9), everything else is refused with 422.
"""

import json
import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar

import msgspec

from rehydrate.core import commands
from rehydrate.core.canonical import digest
from rehydrate.core.refusals import Refusal

T = TypeVar("T")

MAX_BODY: Final = 1024 * 1024
#: Inline data of one event, in bytes of JSON (contract.md section 2). A checkpoint's `state` has a place of its own.
MAX_INLINE: Final = 16 * 1024
MAX_DEPTH: Final = 64
#: Beyond this a double skips whole numbers, so that what was sent would not come back.
MAX_EXACT: Final = 2**53 - 1
MAX_ERRORS: Final = 20

_BAD_ESCAPE: Final = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_UNHOLDABLE: Final = re.compile("[\x00\ud800-\udfff]")
_STEP: Final = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")

Error = dict[str, str]


class Inexact(str):
    """The text of a number that would not come back as it was sent: NaN, 1e400, 2**53, too many digits."""


class Doubled(dict[str, Any]):
    """An object that names a field twice, so that two readers may read two things."""


class Tainted:
    """One event of a batch with text or numbers that cannot be held, and where they are (pointers within the event)."""

    __slots__ = ("errors", "value")

    def __init__(self, value: Any, errors: list[Error]) -> None:
        self.value = value
        self.errors = errors


# -- bytes to values


def load(raw: bytes) -> tuple[Any, bool]:
    """The JSON value, and whether it is surely clean. 400 `malformed` when it is no JSON, 422 when nested absurdly."""
    spotless = True

    def number(text: str) -> Any:
        nonlocal spotless
        value = _number(text)
        if type(value) is Inexact:
            spotless = False
        return value

    def constant(text: str) -> Any:
        nonlocal spotless
        spotless = False
        return Inexact(text)

    def pairs(items: list[tuple[str, Any]]) -> Any:
        nonlocal spotless
        value = dict(items)
        if len(value) != len(items):
            spotless = False
            return Doubled(value)
        return value

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal("malformed", f"The body is not UTF-8 (byte {error.start}).") from None
    if not text.strip(" \t\r\n"):
        raise Refusal("malformed", "The body is empty: send a JSON object.")
    try:
        value = json.loads(text, parse_float=number, parse_int=number, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise Refusal(
            "malformed", f"The body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise Refusal("invalid", _DEEP, errors=[{"pointer": "", "detail": _DEEP}]) from None
    if _BAD_ESCAPE.search(raw) or (raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _too_deep(value)):
        spotless = False
    return value, spotless


def _number(text: str) -> int | float | Inexact:
    """Whole numbers come back as int however they are written (20.0 and 2e1 are 20, as RFC 8785 has it)."""
    if len(text) <= 15 and (text.isdigit() or text[1:].isdigit()):
        return int(text)
    value = float(text)  # an overflow gives infinity
    if not -MAX_EXACT <= value <= MAX_EXACT:
        return Inexact(text)
    if len(text) > 16 or "e" in text or "E" in text:
        try:
            if Decimal(text) != Decimal(repr(value)):
                return Inexact(text)
        except InvalidOperation:
            return Inexact(text)
    return int(value) if value.is_integer() else value


def _too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    return bool(level)


# -- what cannot be held

_DEEP: Final = f"Nested deeper than {MAX_DEPTH} levels."
_TEXT: Final = "NUL characters and lone surrogates cannot be stored."
_NUMBER: Final = "This number would not come back as it was sent: send it as a string."
_TWICE: Final = "A field is named twice."


def faults(value: Any, pointer: str = "") -> list[Error]:
    """Where a value holds what cannot be stored as it is; at most twenty places."""
    found: list[Error] = []
    _look(value, pointer, 0, found)
    return found


def _look(value: Any, pointer: str, depth: int, found: list[Error]) -> None:
    if len(found) >= MAX_ERRORS:
        return
    if isinstance(value, Inexact):
        found.append({"pointer": pointer, "detail": _NUMBER})
    elif isinstance(value, str):
        if _UNHOLDABLE.search(value):
            found.append({"pointer": pointer, "detail": _TEXT})
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            found.append({"pointer": pointer, "detail": _DEEP})
            return
        if isinstance(value, Doubled):
            found.append({"pointer": pointer, "detail": _TWICE})
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str) and _UNHOLDABLE.search(key):
                found.append({"pointer": pointer, "detail": _TEXT})
            else:
                _look(child, f"{pointer}/{escape(str(key))}", depth + 1, found)


def cleaned(value: Any, depth: int = 0) -> Any:
    """The value without what cannot be held: bad characters dropped, inexact numbers as text, the depths cut off."""
    if isinstance(value, str):
        return _UNHOLDABLE.sub("", str(value))
    if isinstance(value, dict):
        if depth > MAX_DEPTH:
            return None
        return {_UNHOLDABLE.sub("", key): cleaned(child, depth + 1) for key, child in value.items()}
    if isinstance(value, list):
        return None if depth > MAX_DEPTH else [cleaned(child, depth + 1) for child in value]
    return value


def escape(token: str) -> str:
    """One step of a JSON Pointer (RFC 6901)."""
    return token.replace("~", "~0").replace("/", "~1")


# -- values to structs


def parse(raw: bytes, type_: type[T]) -> T:
    """A body as its struct.

    `events` are left for `parse_event`, one by one; those with what cannot be held come as `Tainted`. Raises
    `malformed` (400) or `invalid` (422) with pointers.
    """
    value, spotless = load(raw)
    if not spotless:
        if issubclass(type_, (commands.Append, commands.OpenRun)) and isinstance(value, dict):
            value = _with_tainted_events(value)
        elif errors := faults(value):
            raise _refused(errors)
    if type_ is commands.Signal and isinstance(value, dict) and isinstance(value.get("run"), dict):
        value = _with_target(value)
    result: T = convert(value, type_)
    if not isinstance(result, commands.Append | commands.OpenRun):
        result = in_utc(result)
    return result


def _with_tainted_events(value: dict[str, Any]) -> dict[str, Any]:
    events = value.get("events")
    if not isinstance(events, list) or isinstance(value, Doubled):
        if errors := faults(value):
            raise _refused(errors)
        return value
    if errors := faults({**value, "events": None}):
        raise _refused(errors)
    return {**value, "events": [Tainted(event, errors) if (errors := faults(event)) else event for event in events]}


def _with_target(value: dict[str, Any]) -> dict[str, Any]:
    """A signal's target may be written `run: {flow, external_id}`, too."""
    run = value["run"]
    if set(run) != {"flow", "external_id"} or "flow" in value or "external_id" in value:
        detail = "Name the run by its id, or by exactly `flow` and `external_id`."
        raise _refused([{"pointer": "/run", "detail": detail}])
    return {**{key: child for key, child in value.items() if key != "run"}, **run}


def convert(value: Any, type_: Any, pointer: str = "") -> Any:
    """A JSON value as its struct, or 422 `invalid` that points at the first field that does not fit."""
    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise _refused([_located(str(error), pointer)]) from None


def in_utc(value: Any, pointer: str = "") -> Any:
    """The value with its times in UTC (PostgreSQL takes no offset beyond 16 hours).

    422 for a time that has no place in UTC's calendar, such as the last hour of the year 9999 west of Greenwich.
    """
    if isinstance(value, datetime):
        try:
            return value.astimezone(UTC)
        except OverflowError:
            raise _refused([{"pointer": pointer, "detail": "This time is too far off."}]) from None
    if isinstance(value, msgspec.Struct):
        changes = {}
        for name, known_as in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            before = getattr(value, name)
            if (after := in_utc(before, f"{pointer}/{known_as}")) is not before:
                changes[name] = after
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, list):
        items = [in_utc(child, f"{pointer}/{i}") for i, child in enumerate(value)]
        return items if any(after is not before for after, before in zip(items, value, strict=True)) else value
    return value


def parse_event(raw: Any, index: int) -> commands.AgentEvents:
    """One event of a batch; pointers begin with `/events/{index}`. 413 when its inline data is over the limit."""
    pointer = f"/events/{index}"
    if isinstance(raw, Tainted):
        raise _refused([{**error, "pointer": pointer + error["pointer"]} for error in raw.errors])
    fields = flat(raw)
    if fields is not raw:
        pointer += "/payload"
    event: commands.AgentEvents = convert(fields, commands.AgentEvents, pointer)
    if isinstance(event, commands.Paused | commands.WaitOpened):
        event = in_utc(event, pointer)
    for part, where in _inline(fields, pointer):
        check_inline(part, where)
    return event


def flat(raw: Any) -> Any:
    """An event with its fields beside its `type`. They may come in a `payload`, as events are shown when they are read.

    There a reference's own type is called `type`; beside the event's type it is `ref_type`.
    """
    if not (isinstance(raw, dict) and set(raw) == {"type", "payload"} and isinstance(raw["payload"], dict)):
        return raw
    fields = dict(raw["payload"])
    if raw["type"] == "external_ref" and "type" in fields and "ref_type" not in fields:
        fields["ref_type"] = fields.pop("type")
    if "type" in fields:
        return raw  # refused as it is: `payload` is no field
    return {"type": raw["type"], **fields}


def check_inline(value: Any, pointer: str) -> None:
    """413 `too_large` when a value takes more than 16 KiB as JSON."""
    if len(msgspec.json.encode(value)) > MAX_INLINE:
        detail = "Inline data is at most 16 KiB: keep it elsewhere and send a reference and a digest."
        raise Refusal("too_large", detail, errors=[{"pointer": pointer, "detail": detail}])


def _inline(raw: dict[str, Any], pointer: str) -> list[tuple[Any, str]]:
    """What counts as one piece of inline data: each wait by itself, a checkpoint without its state, else the event."""
    match raw["type"]:
        case "paused":
            return [(wait, f"{pointer}/waits/{i}") for i, wait in enumerate(raw["waits"])]
        case "checkpoint":
            return [({key: value for key, value in raw.items() if key != "state"}, pointer)]
        case _:
            return [(raw, pointer)]


def _refused(errors: list[Error]) -> Refusal:
    first = errors[0]
    return Refusal("invalid", f"{first['pointer'] or 'The body'}: {first['detail']}", errors=errors)


def _located(message: str, pointer: str) -> Error:
    """msgspec's "Expected `int`, got `str` - at `$.waits[0].from`" as a pointer and a sentence."""
    detail, _, path = message.partition(" - at `")
    for name, item in _STEP.findall(path.rstrip("`")):
        if item == "...":
            break
        pointer += "/" + escape(name or item)
    if match := re.fullmatch(r"Object missing required field `(.+)`", detail):
        return {"pointer": f"{pointer}/{escape(match[1])}", "detail": "This field is required."}
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", detail, re.DOTALL):
        return {"pointer": f"{pointer}/{escape(match[1])}", "detail": "There is no such field."}
    return {"pointer": pointer, "detail": f"{detail}."}


# -- receipts that are never refused (rule 9)

_RECEIPTS: Final[dict[Any, type[commands.EffectExecuted] | type[commands.EffectFailed]]] = {
    "effect.executed": commands.EffectExecuted,
    "effect.failed": commands.EffectFailed,
}


def lenient_receipt(raw: Any) -> tuple[commands.EffectExecuted | commands.EffectFailed, bool] | None:
    """What can be read of an `effect.executed` or `effect.failed`, and whether anything had to be cleaned or left out.

    None when it is another event, or its key cannot be read.
    """
    tainted = isinstance(raw, Tainted)
    value = flat(cleaned(raw.value) if isinstance(raw, Tainted) else raw)
    type_ = _RECEIPTS.get(value.get("type")) if isinstance(value, dict) and isinstance(value.get("type"), str) else None
    if type_ is None:
        return None
    name, read = ("error", _error) if type_ is commands.EffectFailed else ("receipt", _receipt)
    given = {**value, name: read(value.get(name))}
    changed = value.get(name) is not None and given[name] != value[name]
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(type_):
        if field.encode_name not in given:
            continue
        try:
            fields[field.name] = msgspec.convert(given[field.encode_name], field.type)
        except msgspec.ValidationError:
            changed = True
    if "key" not in fields:
        return None
    changed = changed or bool(set(given) - {field.encode_name for field in msgspec.structs.fields(type_)} - {"type"})
    event = type_(**fields)
    if len(msgspec.json.encode(event)) > MAX_INLINE:
        event, changed = _cut(event), True
    return event, tainted or changed


def _receipt(value: Any) -> dict[str, Any]:
    """A receipt's readable fields; a bare text or number is taken as its id."""
    if not isinstance(value, dict):
        return {} if value is None else {"id": _cut_text(value), "status": "done"}
    kept = {name: value[name] for name in ("id", "status", "url", "data") if name in value}
    if kept.get("id") is not None:
        kept["id"] = _cut_text(kept["id"])
    if kept.get("status") not in ("accepted", "done"):
        kept.pop("status", None)
    url = kept.get("url")
    if url is not None and not (isinstance(url, str) and len(url) <= 2000):
        del kept["url"]
    return kept


def _error(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"code": "unreadable", "message": "" if value is None else _cut_text(value, 4000)}
    return {"code": _cut_text(value.get("code", "unreadable")), "message": _cut_text(value.get("message", ""), 4000)}


def _cut_text(value: Any, limit: int = 500) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text[:limit]


def _cut(event: Any) -> Any:
    """An oversized receipt without its bulk: what proves the act stays."""
    if isinstance(event, commands.EffectFailed):
        return event
    event = msgspec.structs.replace(event, receipt=msgspec.structs.replace(event.receipt, data=None))
    if event.arguments is not None and len(msgspec.json.encode(event)) > MAX_INLINE:
        known = event.arguments_digest or digest(event.arguments)
        event = msgspec.structs.replace(event, arguments=None, arguments_digest=known)
    return event
