"""Canonical JSON by RFC 8785's own examples, digests, fingerprints and the chain."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from rehydrate.core.canonical import GENESIS, canonical, digest, event_hash, fingerprint, same_digest


def test_the_example_of_rfc_8785() -> None:
    """Section 3.2.2 and 3.2.3: numbers, escapes, literals and the order of keys."""
    given = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"\u002f",
        "literals": [None, True, False],
    }
    assert canonical(given).decode() == (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )


def test_keys_are_ordered_by_utf_16_code_units() -> None:
    """Section 3.2.3: a character beyond the BMP sorts by its surrogates, before U+FB33; by code points it would not."""
    given = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }
    ordered = list(json.loads(canonical(given)))
    assert ordered == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]
    assert ordered != sorted(given), "the order of code points is another"


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("41b3de4355555554", "333333333.33333325"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
    ],
)
def test_numbers_of_appendix_b(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(number).decode() == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, "\ud800", {1: 2}])
def test_what_has_no_canonical_form(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        canonical(value)


#: As the parser lets them in: whole numbers are ints, and no number is beyond the exact ones.
broken = st.floats(-(2**53) + 1, 2**53 - 1).filter(lambda number: not number.is_integer())
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | broken
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=12,
)


@given(plain)
def test_the_form_is_json_of_the_same_value_and_stable(value: Any) -> None:
    form = canonical(value)
    assert json.loads(form) == value
    assert canonical(json.loads(form)) == form


def test_a_digest_does_not_know_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert digest({}) == hashlib.sha256(b"{}").hexdigest()


def test_one_spelling_for_a_digest() -> None:
    text = "Ab" * 32
    assert {same_digest(text), same_digest(f"sha256:{text}"), same_digest(f"sha256-{text}")} == {"ab" * 32}
    assert same_digest("md5:Ab") == "md5:Ab"
    assert same_digest("etag-7") == "etag-7"


ACT: dict[str, Any] = {
    "system": "erp",
    "action": "order",
    "resource": "po-1",
    "amount": {"value": "10.00", "currency": "EUR"},
    "arguments_digest": digest({"n": 1}),
}


def test_a_fingerprint_is_what_the_contract_says() -> None:
    assert fingerprint(**ACT) == hashlib.sha256(canonical(ACT)).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        {"system": "erp2"},
        {"action": "cancel"},
        {"resource": None},
        {"amount": None},
        {"amount": {"value": "10.0", "currency": "EUR"}},
        {"arguments_digest": None},
    ],
)
def test_each_part_of_an_act_counts(other: dict[str, Any]) -> None:
    assert fingerprint(**{**ACT, **other}) != fingerprint(**ACT)


LINK: dict[str, Any] = {
    "run": "r",
    "seq": 1,
    "type_": "note",
    "actor": {"kind": "agent", "id": "k", "name": "bot"},
    "at": "2026-01-01T00:00:00Z",
    "payload": {"text": "é"},
}


def test_a_link_covers_the_one_before_and_all_of_its_own() -> None:
    body = {"run": "r", "seq": 1, "type": "note", "actor": LINK["actor"], "at": LINK["at"], "payload": {"text": "é"}}
    assert event_hash(GENESIS, **LINK) == hashlib.sha256(b"0" * 64 + canonical(body)).hexdigest()
    others = [
        event_hash("1" * 64, **LINK),
        *(
            event_hash(GENESIS, **{**LINK, **other})
            for other in (
                {"run": "s"},
                {"seq": 2},
                {"type_": "checkpoint"},
                {"actor": {**LINK["actor"], "id": "l"}},
                {"at": "2026-01-01T00:00:00.000001Z"},
                {"payload": {"text": "e"}},
            )
        ),
    ]
    assert len({event_hash(GENESIS, **LINK), *others}) == len(others) + 1


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_json)
def test_the_quick_way_writes_what_the_reference_writes(value: Any) -> None:
    assert canonical(value) == rfc8785.dumps(value)


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**30])
def test_a_number_that_is_not_exact_is_refused_the_quick_way_too(number: int) -> None:
    with pytest.raises(rfc8785.IntegerDomainError):
        canonical({"a": [number]})
