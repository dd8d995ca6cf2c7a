"""Secret fields: encrypted at rest, salted digests in the ledger, masked for those who may not see them. No rules of
runs.

A flow names them as JSON Pointers into what an agent sends, such as `/ask/effect/arguments/iban`. The same field
shows again
in effects, decisions and approvals, so a pointer counts by its tail from `/arguments/` on, wherever that tail appears.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

import jsonpointer
import msgspec
from cryptography.fernet import Fernet, MultiFernet
from django.conf import settings

from rehydrate.core.canonical import canonical
from rehydrate.core.parsing import escape

#: What stands in place of a secret for those who may not see it.
MASK: Final = "••••••"


@lru_cache(maxsize=1)
def _cipher() -> MultiFernet:
    """The first key encrypts, all decrypt, so that keys can be rotated."""
    return MultiFernet([Fernet(key) for key in settings.FIELD_ENCRYPTION_KEYS])


def encrypt(value: Any) -> bytes:
    return _cipher().encrypt(msgspec.json.encode(value))


def decrypt(token: bytes | str) -> Any:
    return msgspec.json.decode(_cipher().decrypt(token))


def encrypt_bytes(data: bytes) -> bytes:
    return _cipher().encrypt(data)


def decrypt_bytes(token: bytes) -> bytes:
    return _cipher().decrypt(token)


def tails(pointers: Iterable[str]) -> tuple[str, ...]:
    """The part of each pointer by which it is found anywhere."""
    return tuple(pointer[max(f"{pointer}/".rfind("/arguments/"), 0) :] for pointer in pointers)


def _walk(
    value: Any, path: str, ends: tuple[str, ...], swap: Callable[[str, Any], Any], known_as: str | None = None
) -> Any:
    """`known_as` is the path by which a value is told to be secret, where that is not where it stands."""
    called = path if known_as is None else known_as
    if called.endswith(ends) and value is not None:
        return swap(path, value)
    if isinstance(value, dict):
        aim = _aim(value, ends)
        return {
            key: _walk(
                child,
                f"{path}/{escape(key)}",
                ends,
                swap,
                aim if aim is not None and key == "value" else f"{called}/{escape(key)}",
            )
            for key, child in value.items()
        }
    if isinstance(value, list):
        return [_walk(child, f"{path}/{i}", ends, swap, f"{called}/{i}") for i, child in enumerate(value)]
    return value


_OPS: Final = frozenset({"==", "!=", "<", "<=", ">", ">=", "in", "not_in", "exists"})


def _aim(value: dict[str, Any], ends: tuple[str, ...]) -> str | None:
    """Where a condition `{pointer, op, value}` points: its value tells as much as the field itself, or as the secret
    that the field is a part of.
    """
    if not (isinstance(value.get("pointer"), str) and value.get("op") in _OPS and "value" in value):
        return None
    aim = f"/arguments{value['pointer']}"
    places = [aim[:end] for end in range(len(aim) + 1) if aim[end : end + 1] in ("/", "")]
    return next((place for place in places if place.endswith(ends)), aim)


def mask(value: Any, ends: tuple[str, ...]) -> Any:
    """The value with every secret field covered."""
    return _walk(value, "", ends, lambda path, secret: MASK) if ends else value


def unmask(value: Any, original: Any, ends: tuple[str, ...], path: str = "") -> Any:
    """An edited value with the covers that came back unchanged replaced by what they covered."""
    if not ends:
        return value
    return _walk(
        value,
        path,
        ends,
        lambda place, given: (
            jsonpointer.resolve_pointer(original, place[len(path) :], given) if given == MASK else given
        ),
    )


def masked(value: Any) -> bool:
    """True when a cover stands somewhere in the value."""
    if isinstance(value, dict):
        return any(masked(child) for child in value.values())
    if isinstance(value, list):
        return any(masked(child) for child in value)
    return bool(value == MASK)


def seal(value: dict[str, Any], ends: tuple[str, ...]) -> tuple[dict[str, Any], str | None]:
    """The value with salted digests in place of its secret fields, and those fields encrypted (None when there are
    none).
    """
    if not ends:
        return value, None
    hidden: dict[str, dict[str, Any]] = {}

    def swap(path: str, secret: Any) -> dict[str, str]:
        salt = secrets.token_hex(16)
        hidden[path] = {"salt": salt, "value": secret}
        return {"$digest": hashlib.sha256(salt.encode("ascii") + canonical(secret)).hexdigest()}

    sealed = _walk(value, "", ends, swap)
    return sealed, encrypt(hidden).decode("ascii") if hidden else None


def unseal(value: dict[str, Any], sealed: str | None) -> dict[str, Any]:
    """The value as it was before it was sealed."""
    if sealed is None:
        return value
    for path, hidden in decrypt(sealed).items():
        jsonpointer.set_pointer(value, path, hidden["value"])
    return value
