"""A form made from a JSON Schema, and its answer read back as JSON. Pure; whether it is valid the ledger says.

Understood: objects (one level of nesting opened), strings (enum, date, date-time, email, uri, long text), integers,
numbers, booleans, enums. Everything else is edited as JSON. Fields that the schema does not name stay as they were.
`pattern` is left to the ledger, which guards against expressions built to hang.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from django.utils.translation import gettext

from approvals.present import escape_pointer, unescape_pointer, value_at

LONG_TEXT = 120
_INPUTS = {"date": "date", "email": "email", "uri": "url"}


@dataclass
class Field:
    """One input. `kind`: text, long, number, integer, boolean, choice, json, date, email, url."""

    pointer: str
    label: str  # the schema's title, empty where it has none
    raw: str
    kind: str
    value: str = ""
    help: str = ""
    required: bool = False
    options: list[Any] = field(default_factory=list)
    limits: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    original: Any = None

    @property
    def name(self) -> str:
        return f"field:{self.pointer}"

    @property
    def choices(self) -> list[str]:
        return [_shown(option, "choice") for option in self.options]

    @property
    def html_id(self) -> str:
        return "f" + "".join(c if c.isalnum() else "-" for c in self.pointer)


def fields(schema: Any, document: Any) -> list[Field]:
    """The inputs for what `schema` lets one edit of `document`, with its values."""
    found: list[Field] = []
    if isinstance(schema, dict):
        _collect(schema, document, "", found, depth=0)
    return found


def _collect(schema: dict[str, Any], document: Any, prefix: str, found: list[Field], *, depth: int) -> None:
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return
    for name, part in list(properties.items())[:100]:
        if not isinstance(part, dict) or part.get("readOnly"):
            continue
        pointer = f"{prefix}/{escape_pointer(str(name))}"
        if part.get("type") == "object" and isinstance(part.get("properties"), dict) and depth < 2:
            _collect(part, document, pointer, found, depth=depth + 1)
            continue
        value = value_at(document, pointer)
        kind = _kind(part, value)
        found.append(
            Field(
                pointer=pointer,
                label=str(part.get("title") or ""),
                raw=str(name),
                kind=kind,
                value=_shown(value, kind),
                help=str(part.get("description") or ""),
                required=name in (required or []) and kind != "boolean",
                options=list(part["enum"]) if kind == "choice" else [],
                limits=_limits(part, kind),
                original=value,
            )
        )


def _kind(part: dict[str, Any], value: Any) -> str:
    if isinstance(part.get("enum"), list) and all(isinstance(o, str | int | float | bool) for o in part["enum"]):
        return "choice"
    kind = part.get("type")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), None)
    if kind in {"integer", "number", "boolean"}:
        return str(kind)
    if kind == "string":
        if part.get("format") in _INPUTS:
            return _INPUTS[part["format"]]
        limit = part.get("maxLength")
        is_long = (isinstance(limit, int) and limit > LONG_TEXT) or (isinstance(value, str) and len(value) > LONG_TEXT)
        return "long" if is_long else "text"
    return "json"


def _shown(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if kind == "json":
        return json.dumps(value, ensure_ascii=False, indent=2)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _limits(part: dict[str, Any], kind: str) -> dict[str, Any]:
    names = {"minimum": "min", "maximum": "max"} if kind in {"integer", "number"} else {
        "minLength": "minlength", "maxLength": "maxlength",
    }  # fmt: skip
    got = {html: part[name] for name, html in names.items() if isinstance(part.get(name), int | float)}
    if kind == "number":
        got["step"] = "any"
    return got


def read(found: list[Field], posted: Mapping[str, Any], document: Any) -> tuple[Any, bool]:
    """`(document with the answers in it, whether all could be read)`; errors are put on the fields."""
    result = copy.deepcopy(document) if isinstance(document, dict) else {}
    good = True
    for item in found:
        raw = str(posted.get(item.name, "")) if item.kind != "boolean" else ("true" if item.name in posted else "false")
        item.value = raw
        if item.kind not in {"long", "json"}:
            raw = raw.strip()
        if raw == "" and item.kind not in {"boolean"}:
            if item.required:
                item.error = gettext("This is needed.")
                good = False
            elif item.original is None:
                continue
            else:
                _put(result, item.pointer, None if item.kind not in {"text", "long"} else "")
            continue
        try:
            _put(result, item.pointer, _parsed(item, raw))
        except ValueError as problem:
            item.error = str(problem)
            good = False
    return result, good


def _parsed(item: Field, raw: str) -> Any:
    if item.kind == "boolean":
        return raw == "true"
    if item.kind == "integer":
        try:
            return int(raw)
        except ValueError:
            raise ValueError(gettext("Give a whole number.")) from None
    if item.kind == "number":
        return _number(raw)
    if item.kind == "choice":
        if raw not in item.choices:
            raise ValueError(gettext("Choose one of the list."))
        return item.options[item.choices.index(raw)]
    if item.kind == "json":
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError(gettext("This is not JSON.")) from None
    return raw


def _number(raw: str) -> int | float:
    """A JSON number that comes back exactly, otherwise an error: money belongs in a string."""
    try:
        exact = Decimal(raw)
    except InvalidOperation:
        raise ValueError(gettext("Give a number.")) from None
    if not exact.is_finite():
        raise ValueError(gettext("Give a number."))
    if exact == exact.to_integral_value() and abs(exact) < 2**53:
        return int(exact)
    if Decimal(repr(float(exact))) != exact:
        raise ValueError(gettext("This number has more digits than can be kept."))
    return float(exact)


def _put(document: dict[str, Any], pointer: str, value: Any) -> None:
    tokens = [unescape_pointer(token) for token in pointer.split("/")[1:]]
    for token in tokens[:-1]:
        inner = document.get(token)
        if not isinstance(inner, dict):
            inner = document[token] = {}
        document = inner
    document[tokens[-1]] = value


def mark_errors(found: list[Field], errors: list[dict[str, Any]], root: str = "/arguments") -> list[str]:
    """Puts the ledger's `errors: [{pointer, detail}]` on their fields; returns those that belong to none."""
    rest = []
    for error in errors:
        pointer = str(error.get("pointer", "")).removeprefix(root)
        match = next((f for f in found if pointer == f.pointer or pointer.startswith(f.pointer + "/")), None)
        if match:
            match.error = str(error.get("detail", ""))
        else:
            rest.append(str(error.get("detail", "")))
    return rest
