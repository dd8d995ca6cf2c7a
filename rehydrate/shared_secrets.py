"""The secrets of servers that share one database: kept in it, sealed with the password of its address.

Several `up` on one `DATABASE_URL`, each with a data folder of its own, must sign and encrypt with the same keys. A copy
of the database alone does not open them; a database that asks for no password protects them no better than itself.
Whoever wants to keep them apart sets `REHYDRATE_SECRET_KEY` and `REHYDRATE_FIELD_KEYS`, and nothing is stored here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path

import psycopg
from cryptography.fernet import Fernet, InvalidToken

from rehydrate import dsn
from rehydrate.data import DataFolderError, Secrets, given_secrets, write_private

_TABLE = """
CREATE TABLE IF NOT EXISTS rehydrate_shared_secrets (
    one_row boolean PRIMARY KEY DEFAULT true CHECK (one_row),
    salt bytea NOT NULL,
    sealed bytea NOT NULL
)
"""
_LOCK = 0x73656372


def settle(url: str, place: Path) -> None:
    """Writes to `place` what the servers of this database share, made now by the first of them.

    Raises `dsn.UnreachableError`, or `DataFolderError` when the stored ones were sealed with another password.
    """
    if given_secrets() is not None:
        return
    password = str(dsn.parse(url).get("password") or os.environ.get("PGPASSWORD") or "")
    with dsn.connect(url) as connection, connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        connection.execute(_TABLE)
        row = connection.execute("SELECT salt, sealed FROM rehydrate_shared_secrets").fetchone()
        if row is None:
            _keep(connection, Secrets.generate().dump(), password)
            row = connection.execute("SELECT salt, sealed FROM rehydrate_shared_secrets").fetchone()
            assert row is not None
        salt, sealed = bytes(row[0]), bytes(row[1])
        try:
            text = _seal(password, salt).decrypt(sealed).decode()
        except InvalidToken:
            text = _known_here(place, salt)
            _keep(connection, text, password)
    kept = json.dumps({**json.loads(text), "of": base64.b64encode(salt).decode()}, indent=2) + "\n"
    if not place.exists() or place.read_text() != kept:
        write_private(place, kept)


def _keep(connection: psycopg.Connection, text: str, password: str) -> None:
    row = connection.execute("SELECT salt FROM rehydrate_shared_secrets").fetchone()
    salt = bytes(row[0]) if row else os.urandom(16)
    connection.execute(
        "INSERT INTO rehydrate_shared_secrets (salt, sealed) VALUES (%s, %s) "
        "ON CONFLICT (one_row) DO UPDATE SET sealed = excluded.sealed",
        [salt, _seal(password, salt).encrypt(text.encode())],
    )


def _known_here(place: Path, salt: bytes) -> str:
    """The database's password was changed: a folder that knew the secrets before seals them anew."""
    if place.exists():
        kept = json.loads(place.read_text())
        if kept.pop("of", None) == base64.b64encode(salt).decode():
            return json.dumps(kept)
    raise DataFolderError(
        "The secrets in this database were sealed with another password: start once with a data folder that was used "
        "with it before, or set REHYDRATE_SECRET_KEY and REHYDRATE_FIELD_KEYS."
    )


def _seal(password: str, salt: bytes) -> Fernet:
    key = hashlib.scrypt(password.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32)
    return Fernet(base64.urlsafe_b64encode(key))
