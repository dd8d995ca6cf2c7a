"""Rows of conditions (field, comparison, limit) read from a form into contract.md's `conditions`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext

from approvals.present import leaf_fields, value_at

OPS = ("<=", "<", "==", "!=", ">=", ">", "in", "not_in", "exists")
ROWS_MAX = 20


@dataclass
class Row:
    """One row as typed, with its error."""

    index: int
    pointer: str = ""
    op: str = "<="
    value: str = ""
    error: str = ""


def blank(count: int = 1) -> list[Row]:
    return [Row(index) for index in range(count)]


def read(posted: Mapping[str, Any], arguments: Any) -> tuple[list[Row], list[dict[str, Any]], bool]:
    """`(rows as typed, conditions, whether all is right)`. An empty row is no condition."""
    rows: list[Row] = []
    found: list[dict[str, Any]] = []
    good = True
    pointers = {row["pointer"] for row in leaf_fields(arguments)}
    for index in range(ROWS_MAX):
        row = Row(
            index,
            str(posted.get(f"pointer-{index}", "")),
            str(posted.get(f"op-{index}", "<=")),
            str(posted.get(f"value-{index}", "")).strip(),
        )
        if f"pointer-{index}" not in posted:
            continue
        rows.append(row)
        if not row.pointer and not row.value:
            continue
        if row.pointer not in pointers:
            row.error = gettext("Choose a field.")
        elif row.op not in OPS:
            row.error = gettext("Choose a comparison.")
        elif not row.value and row.op != "exists":
            row.error = gettext("Give a limit.")
        if row.error:
            good = False
            continue
        found.append({"pointer": row.pointer, "op": row.op, "value": typed(row, value_at(arguments, row.pointer))})
    if good and not found:
        if not rows:
            rows = blank()
        rows[0].error = gettext("Give at least one condition, or approve without any.")
        good = False
    return rows, found, good


def typed(row: Row, like: Any) -> Any:
    """The typed text in the type of the argument it is compared with; a decimal string stays a string."""
    if row.op == "exists":
        return row.value.lower() not in {"no", "false", "0", "否"}
    if row.op in {"in", "not_in"}:
        return [_one(part.strip(), like) for part in row.value.replace("，", ",").split(",") if part.strip()]
    return _one(row.value, like)


def _one(text: str, like: Any) -> Any:
    if isinstance(like, bool):
        return text.lower() in {"yes", "true", "1", "是"}
    if isinstance(like, int | float):
        try:
            value = json.loads(text)
        except ValueError:
            return text
        return value if isinstance(value, int | float) and not isinstance(value, bool) else text
    return text
