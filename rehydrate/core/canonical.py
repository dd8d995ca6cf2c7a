"""Canonical JSON (RFC 8785), digests, fingerprints and the hash chain. No state and no rules."""

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, overload

import msgspec
import rfc8785

#: What the first event of a run carries as `prev_hash`.
GENESIS: Final = "0" * 64

_SHA256: Final = re.compile(r"(?:sha256[:-])?([0-9a-fA-F]{64})")


@overload
def instant(when: datetime) -> str: ...
@overload
def instant(when: None) -> None: ...
@overload
def instant(when: datetime | None) -> str | None: ...
def instant(when: datetime | None) -> str | None:
    """RFC 3339 in UTC with a Z and microseconds as they are: the one spelling in hashes, payloads and answers."""
    return None if when is None else _spelt(when)


@lru_cache(maxsize=1000)
def _spelt(when: datetime) -> str:
    """Kept, since what happens at one instant is told in many places."""
    return f"{(when if when.tzinfo is UTC else when.astimezone(UTC)).isoformat()[:-6]}Z"  # without +00:00


_encoder: Final = msgspec.json.Encoder(order="sorted")
_EXACT: Final = 2**53


def canonical(value: Any) -> bytes:
    """The RFC 8785 form of a JSON value. Numbers must be exact as IEEE doubles (checked where they come in).

    An encoder in C writes the same form of what has no fractions, and no characters beyond the basic plane, by which
    keys would be in another order.
    """
    if _without_fractions(value):
        text = _encoder.encode(value)
        if text.isascii() or max(text) < 0xF0:
            return text
    return rfc8785.dumps(value)


def _without_fractions(value: Any) -> bool:
    left = [value]
    while left:
        one = left.pop()
        kind = type(one)
        if kind is dict:
            left += one.values()
        elif kind is list:
            left += one
        elif not (kind is str or one is None or kind is bool or (kind is int and -_EXACT < one < _EXACT)):
            return False
    return True


def digest(value: Any) -> str:
    """SHA-256 over the canonical form, 64 hex digits."""
    return hashlib.sha256(canonical(value)).hexdigest()


def same_digest(text: str) -> str:
    """One spelling for a digest: `sha256:AB..` and `ab..` are the same; other kinds stay as they are."""
    match = _SHA256.fullmatch(text)
    return match[1].lower() if match else text


def fingerprint(
    *, system: str, action: str, resource: str | None, amount: Mapping[str, Any] | None, arguments_digest: str | None
) -> str:
    """What makes two effects the same act: SHA-256 over {system, action, resource, amount, arguments_digest}."""
    return digest(
        {
            "system": system,
            "action": action,
            "resource": resource,
            "amount": dict(amount) if amount else None,
            "arguments_digest": arguments_digest,
        }
    )


def event_hash(
    prev_hash: str, *, run: str, seq: int, type_: str, actor: Mapping[str, Any], at: str, payload: Mapping[str, Any]
) -> str:
    """The link of the chain: SHA-256 over the previous hash (as hex text) and the event's canonical JSON."""
    body = canonical({"run": run, "seq": seq, "type": type_, "actor": actor, "at": at, "payload": payload})
    return hashlib.sha256(prev_hash.encode("ascii") + body).hexdigest()
