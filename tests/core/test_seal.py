"""Secret fields: sealed where they are kept, put back where they are used, covered where they are shown."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from cryptography.fernet import Fernet

from rehydrate import seal
from rehydrate.core.canonical import canonical

ENDS = seal.tails(["/ask/effect/arguments/iban", "/data/ssn"])
IBAN = "DE02120300000000202051"


@pytest.fixture
def payload() -> dict[str, Any]:
    return {
        "key": "pay",
        "arguments": {"iban": IBAN, "n": 1},
        "waits": [{"ask": {"effect": {"arguments": {"iban": IBAN}}}}],
        "data": {"ssn": {"no": 7}},
    }


def test_a_pointer_counts_by_its_tail_from_the_arguments_on() -> None:
    assert ENDS == ("/arguments/iban", "/data/ssn")


def test_what_is_sealed_shows_nothing_and_comes_back(payload: dict[str, Any]) -> None:
    sealed, hidden = seal.seal(payload, ENDS)
    assert hidden is not None
    for text in (json.dumps(sealed), hidden):
        assert IBAN not in text
        assert '"no"' not in text
    assert sealed["arguments"]["n"] == 1
    assert set(sealed["arguments"]["iban"]) == {"$digest"}
    assert payload["arguments"]["iban"] == IBAN, "the original is as it was"
    assert seal.unseal(json.loads(json.dumps(sealed)), hidden) == payload


def test_the_digests_are_salted_and_can_be_proved(payload: dict[str, Any]) -> None:
    """The same secret in two places looks different; whoever has the salt can prove it."""
    sealed, hidden = seal.seal(payload, ENDS)
    there = sealed["waits"][0]["ask"]["effect"]["arguments"]["iban"]["$digest"]
    assert sealed["arguments"]["iban"]["$digest"] != there
    assert there != hashlib.sha256(canonical(IBAN)).hexdigest()
    assert hidden is not None
    salt = seal.decrypt(hidden)["/arguments/iban"]["salt"]
    proof = hashlib.sha256(salt.encode() + canonical(IBAN)).hexdigest()
    assert sealed["arguments"]["iban"]["$digest"] == proof


def test_nothing_secret_nothing_sealed(payload: dict[str, Any]) -> None:
    assert seal.seal(payload, ()) == (payload, None)
    assert seal.seal({"arguments": {"n": 1, "iban": None}}, ENDS) == ({"arguments": {"n": 1, "iban": None}}, None)
    assert seal.unseal(payload, None) is payload


def test_only_the_whole_name_counts() -> None:
    other = {"my_arguments": {"iban": "x"}, "arguments": {"iban2": "y", "deep": {"iban": "z"}}}
    assert seal.seal(other, ENDS)[1] is None


@pytest.mark.parametrize(
    ("secret", "pointer", "hidden"),
    [
        ("/arguments/iban", "/iban", True),
        ("/arguments/bank", "/bank/iban", True),
        ("/ask/effect/arguments", "/n", True),
        ("/arguments/bank", "/bank2/iban", False),
        ("/arguments/bank/iban", "/bank", False),
    ],
)
def test_a_condition_tells_as_much_as_the_field_it_points_at(secret: str, pointer: str, hidden: bool) -> None:
    condition = {"pointer": pointer, "op": "==", "value": IBAN}
    shown = seal.mask({"conditions": [condition]}, seal.tails([secret]))["conditions"][0]
    assert (shown["value"] == seal.MASK) is hidden
    sealed, kept = seal.seal({"conditions": [dict(condition)]}, seal.tails([secret]))
    assert (IBAN not in json.dumps(sealed)) is hidden
    assert seal.unseal(sealed, kept) == {"conditions": [condition]}


def test_covered_for_those_who_may_not_see(payload: dict[str, Any]) -> None:
    shown = seal.mask(payload, ENDS)
    assert shown["arguments"] == {"iban": seal.MASK, "n": 1}
    assert shown["data"] == {"ssn": seal.MASK}
    assert IBAN not in json.dumps(shown)


def test_a_cover_that_comes_back_is_what_it_covered() -> None:
    """A reviewer edits the amount and sends the covered field back as it was shown."""
    original = {"iban": IBAN, "n": 1}
    assert seal.unmask({"iban": seal.MASK, "n": 2}, original, ENDS, "/arguments") == {"iban": IBAN, "n": 2}
    assert seal.unmask({"iban": "DE99", "n": 2}, original, ENDS, "/arguments") == {"iban": "DE99", "n": 2}
    assert seal.unmask({"iban": seal.MASK, "n": 2}, original, (), "/arguments") == {"iban": seal.MASK, "n": 2}


def test_keys_can_be_rotated(payload: dict[str, Any], settings: Any) -> None:
    """The first key encrypts, all of them decrypt."""
    _, old = seal.seal(payload, ENDS)
    fresh = Fernet.generate_key().decode()
    settings.FIELD_ENCRYPTION_KEYS = [fresh, *settings.FIELD_ENCRYPTION_KEYS]
    seal._cipher.cache_clear()
    try:
        assert old is not None
        assert seal.decrypt(old)["/arguments/iban"]["value"] == IBAN
        token = seal.encrypt("new")
        assert Fernet(fresh).decrypt(token) == b'"new"'
    finally:
        seal._cipher.cache_clear()
