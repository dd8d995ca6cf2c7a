"""Conditions of an approval: every operator against every kind of value, pointers, and where two values differ."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rehydrate.core.conditions import differing, exists, holds, resolve, unmet, within


def _holds(found: Any, op: str, wanted: Any) -> bool:
    return holds({"pointer": "/x", "op": op, "value": wanted}, {"x": found})


@pytest.mark.parametrize(
    ("found", "op", "wanted", "expected"),
    [
        # numbers and decimal strings are decimals, however they are written
        (5, "==", 5, True),
        (5, "==", "5", True),
        ("5.00", "==", 5, True),
        ("0.10", "==", "0.1", True),
        (0.1, "==", "0.1", True),
        (5, "!=", 6, True),
        (5, "!=", "5.0", False),
        ("9.9", "<", "10", True),  # as text it would not be
        ("10", "<", "9.9", False),
        (5, "<", 5, False),
        (5, "<=", 5, True),
        ("100.01", "<=", 100, False),
        (-1, "<", 0, True),
        (5, ">", 4.5, True),
        (5, ">=", "5.000", True),
        (0.3, "<=", "0.3", True),  # what was written, not its nearest double
        (9007199254740991, "<", "9007199254740992", True),
        # order is for numbers alone
        ("b", ">", "a", False),
        ("a", "<", "b", False),
        ([2], ">", [1], False),
        (None, "<=", 5, False),
        (True, ">=", 0, False),
        (5, "<", True, False),
        (5, "<", None, False),
        # what looks like a number and is none
        ("1_0", "<=", 50, False),
        (" 9", "<", 50, False),
        ("+5", "<", 50, False),
        ("１２", "<", 50, False),
        ("1e3", "<", 5000, False),
        ("NaN", "<=", 5, False),
        ("Infinity", ">", 5, False),
        ("", "<", 5, False),
        ("0x1", ">", 0, False),
        # types are not mixed
        (1, "==", True, False),
        (True, "==", True, True),
        (False, "==", 0, False),
        (True, "!=", 1, True),
        (None, "==", None, True),
        (None, "==", 0, False),
        ("", "==", None, False),
        ("x", "==", "x", True),
        ({"a": 1}, "==", {"a": 1}, True),
        ([1, 2], "==", [2, 1], False),
        # lists of what is allowed
        ("EUR", "in", ["EUR", "USD"], True),
        ("GBP", "in", ["EUR", "USD"], False),
        ("GBP", "not_in", ["EUR", "USD"], True),
        ("EUR", "not_in", ["EUR"], False),
        (5, "in", ["5.0"], True),
        (1, "in", [True], False),
        (1, "in", [], False),
        (1, "not_in", [], True),
        (1, "in", 1, False),  # no list, no answer
        (1, "not_in", 1, False),
        ("a", "in", "abc", False),
        # that it is there at all
        (None, "exists", True, True),
        (None, "exists", None, True),
        (5, "exists", False, False),
    ],
)
def test_each_operator(found: Any, op: str, wanted: Any, expected: bool) -> None:
    assert _holds(found, op, wanted) is expected


@pytest.mark.parametrize("op", ["==", "!=", "<", "<=", ">", ">=", "in", "not_in"])
def test_what_is_not_there_meets_nothing(op: str) -> None:
    assert not holds({"pointer": "/y", "op": op, "value": ["z"] if "in" in op else 1}, {"x": 1})
    assert holds({"pointer": "/y", "op": "exists", "value": False}, {"x": 1})
    assert not holds({"pointer": "/y", "op": "exists", "value": True}, {"x": 1})


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**6), max_value=10**6))
def test_order_is_that_of_decimals(number: Decimal) -> None:
    text = format(number, "f")
    for limit in ("-5", "0", "0.001", "999.999"):
        assert _holds(text, "<", limit) is (number < Decimal(limit))
        assert _holds(text, ">=", limit) is not _holds(text, "<", limit)


@pytest.mark.parametrize(
    ("pointer", "expected"),
    [
        ("/a/b", 1),
        ("/list/1", 20),
        ("/with~1slash", "s"),
        ("/with~0tilde", "t"),
        ("/", "empty"),
        ("", "all"),
    ],
)
def test_pointers(pointer: str, expected: Any) -> None:
    arguments = {"a": {"b": 1}, "list": [10, 20], "with/slash": "s", "with~tilde": "t", "": "empty"}
    assert resolve(arguments, pointer) == (arguments if expected == "all" else expected)
    assert exists(arguments, pointer)


@pytest.mark.parametrize(
    "pointer", ["/z", "/a/z", "/list/2", "/list/-", "/list/x", "/list/01", "/~2", "/a~", "a", "/a/b/c"]
)
def test_pointers_that_point_nowhere(pointer: str) -> None:
    assert not exists({"a": {"b": 1}, "list": [10, 20]}, pointer)


def test_unmet_says_which() -> None:
    conditions: list[dict[str, Any]] = [
        {"pointer": "/n", "op": "<=", "value": 5},
        {"pointer": "/m", "op": "==", "value": "x"},
    ]
    assert unmet(conditions, {"n": 4, "m": "x"}) == []
    assert len(unmet(conditions, {"n": 6})) == 2
    told = unmet([*conditions, {"pointer": "/m", "op": "!=", "value": "secret"}], {"n": 6, "m": "secret"})
    assert "/n (<=)" in told[0]
    assert "secret" not in str(told)  # values may be secret: which condition, and no more
    assert len(unmet(conditions, None)) == 2


@pytest.mark.parametrize(
    ("left", "right", "places"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["/a"]),
        ({"a": 1}, {}, ["/a"]),
        ({}, {"b": {"c": 1}}, ["/b"]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ["/a/c"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["/a/1"]),
        ({"a": [1, 2]}, {"a": [1]}, ["/a"]),
        ({"a/b": 1, "c~d": 1}, {"a/b": 2, "c~d": 2}, ["/a~1b", "/c~0d"]),
        ({"a": 1}, {"a": True}, ["/a"]),
        ({"a": 1}, {"a": "1"}, ["/a"]),
        (1, 1.5, [""]),
    ],
)
def test_where_two_values_differ(left: Any, right: Any, places: list[str]) -> None:
    assert differing(left, right) == places
    assert differing(right, left) == places


def test_within_what_may_differ() -> None:
    assert within(["/a", "/b/c"], ["/a", "/b"])
    assert not within(["/ab"], ["/a"])
    assert not within(["/a"], [])
    assert within([], [])
    assert within(["/x/y"], [""])
