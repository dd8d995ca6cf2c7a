"""Conditions of an approval: JSON Pointers into the arguments, compared exactly. Pure; nothing of runs here."""

import re
from decimal import Decimal
from typing import Any, Final

import jsonpointer

_MISSING: Final = object()
_POINTER: Final = re.compile(r"(/([^~/]|~[01])*)*")
#: What counts as a decimal in text: no signs but a minus, no spaces, no other digits than ASCII's. What begins with a
#: needless zero is an account or an article, not a number: 0012 is not 12.
_TEXT: Final = re.compile(r"-?(0|[1-9][0-9]{0,39})(\.[0-9]{1,40})?", re.ASCII)


def resolve(arguments: Any, pointer: str) -> Any:
    """The value at an RFC 6901 pointer, or a marker that equals nothing."""
    if not _POINTER.fullmatch(pointer) or pointer.endswith("/-"):
        return _MISSING
    return jsonpointer.resolve_pointer(arguments, pointer, _MISSING)


def exists(arguments: Any, pointer: str) -> bool:
    return resolve(arguments, pointer) is not _MISSING


def _decimal(value: Any) -> Decimal | None:
    """Numbers and decimal strings as decimals; everything else has no order."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str) and not _TEXT.fullmatch(value):
        return None
    return Decimal(str(value))


def _equal(left: Any, right: Any) -> bool:
    """JSON equality: true is not 1; numbers by value, and a decimal string equals the number it spells."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, str) and isinstance(right, str) and left == right:
        return True
    a, b = _decimal(left), _decimal(right)
    if a is not None and b is not None:
        return a == b
    return type(left) is type(right) and bool(left == right)


def holds(condition: dict[str, Any], arguments: Any) -> bool:
    """Whether one `{pointer, op, value}` holds for the arguments."""
    found = resolve(arguments, condition["pointer"])
    op, wanted = condition["op"], condition.get("value")
    if op == "exists":
        return (found is not _MISSING) is (wanted is not False)
    if found is _MISSING:
        return False
    if op == "==":
        return _equal(found, wanted)
    if op == "!=":
        return not _equal(found, wanted)
    if op in ("in", "not_in"):
        inside = isinstance(wanted, list) and any(_equal(found, item) for item in wanted)
        return inside if op == "in" else isinstance(wanted, list) and not inside
    left, right = _decimal(found), _decimal(wanted)
    if left is None or right is None:
        return False
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[op]


def unmet(conditions: list[dict[str, Any]], arguments: Any) -> list[str]:
    """In words, each condition that does not hold now; without its value, which may be secret."""
    return [
        f"its condition on {condition['pointer']} ({condition['op']}) does not hold"
        for condition in conditions
        if not holds(condition, arguments)
    ]


def differing(left: Any, right: Any, pointer: str = "") -> list[str]:
    """The pointers of the smallest places at which two JSON values differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        found: list[str] = []
        for key in sorted({*left, *right}):
            place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            if key in left and key in right:
                found += differing(left[key], right[key], place)
            else:
                found.append(place)
        return found
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [p for i, (a, b) in enumerate(zip(left, right, strict=True)) for p in differing(a, b, f"{pointer}/{i}")]
    return [] if type(left) is type(right) and left == right else [pointer]


def within(pointers: list[str], allowed: list[str]) -> bool:
    """True when every pointer is one of the allowed ones, or lies under one."""
    return all(any(p == a or p.startswith(a + "/") or a == "" for a in allowed) for p in pointers)
