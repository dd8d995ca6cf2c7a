"""A PostgreSQL address as Django's settings, and as words for people (never with the password)."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

_DJANGO_NAMES = {"dbname": "NAME", "user": "USER", "password": "PASSWORD", "host": "HOST", "port": "PORT"}


class AddressError(ValueError):
    """The address cannot be read; the message is one sentence."""


class UnreachableError(Exception):
    """The database does not take a connection; the message is one sentence, without the password."""


#: Plans are kept, and made while tables are small: a plan that reads a whole table, or joins by hashing it, would stay.
#: Nor is one question worth several processes.
PLANS: Final = (
    " ".join(f"-c {name}=off" for name in ("enable_seqscan", "enable_hashjoin", "enable_mergejoin"))
    + " -c max_parallel_workers_per_gather=0"
)
#: Seconds for which a connection that answered is taken to live.
TRUSTED: Final = 1.0


class Pooled(psycopg.Connection):
    """A pooled connection: what the pool asks at each loan, whether it lives, it asks the server once in a while only.

    A server that went away meanwhile costs the one request that finds out its connection, and an answer of 503.
    """

    _answered: float | None = None

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        asked = query == ""  # as ConnectionPool.check_connection does
        if asked and self._answered is not None and time.monotonic() - self._answered < TRUSTED:
            return self.cursor()
        cursor = super().execute(query, *args, **kwargs)
        if asked:
            self._answered = time.monotonic()
        return cursor


def connect(url: str) -> psycopg.Connection:
    """A connection of its own, outside of Django. Raises `UnreachableError`."""
    try:
        return psycopg.connect(url, connect_timeout=10)
    except psycopg.OperationalError as error:
        reason = " ".join(str(error).split())
        raise UnreachableError(f"The {describe(url)} cannot be reached: {reason}") from None


def parse(url: str) -> dict[str, Any]:
    """What libpq reads in it, both in its URL form and as `key=value` words."""
    if url.startswith("postgis://") or ("://" in url and not url.startswith(("postgres://", "postgresql://"))):
        raise AddressError("DATABASE_URL must begin with postgresql://: no other database is supported.")
    try:
        return conninfo_to_dict(url)
    except ProgrammingError as error:
        raise AddressError(f"DATABASE_URL cannot be read: {str(error).splitlines()[0]}") from None


def database_settings(url: str, *, pool: int) -> dict[str, Any]:
    """The entry for `DATABASES`; `pool` is the largest number of pooled connections, 0 for one kept by each thread."""
    parts = parse(url)
    settings: dict[str, Any] = {django: str(parts.pop(libpq, "") or "") for libpq, django in _DJANGO_NAMES.items()}
    options: dict[str, Any] = {
        "application_name": "rehydrate",
        "connect_timeout": 10,
        "server_side_binding": True,
        "prepare_threshold": 2,
        **parts,
        "options": f"{PLANS} {parts.get('options') or ''}".strip(),
    }
    if pool:
        options["pool"] = {"min_size": 1, "max_size": pool, "timeout": 10, "connection_class": Pooled}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **settings,
        "CONN_MAX_AGE": 0 if pool else None,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": options,
    }


def describe(url: str) -> str:
    """Such as `database "rehydrate" on db.example:5432`."""
    parts = parse(url)
    place = str(parts.get("host") or "this machine")
    port = f":{parts['port']}" if parts.get("port") else ""
    return f'database "{parts.get("dbname") or ""}" on {place}{port}'
