"""Statements that go to libpq directly: the same rows as by a cursor, Django's errors, and a bounded number kept."""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.db import DataError, IntegrityError, OperationalError, connection, transaction

from rehydrate import sql
from rehydrate.ids import uuid7

pytestmark = pytest.mark.django_db(transaction=True)

AWKWARD = ["plain", "", 'quo"te', "back\\slash", "{a,b}", "NULL", "line\nbreak", "é中😀", " "]


def both(statement: str, params: object = ()) -> list[sql.Row]:
    """By libpq and by a cursor: one and the same."""
    straight = sql.texts(statement, params)  # type: ignore[arg-type]
    with transaction.atomic():
        assert sql.texts(statement, params) == straight  # type: ignore[arg-type]
    return straight


def test_texts_come_back_as_they_went() -> None:
    for text in AWKWARD:
        assert both("SELECT %s::text, NULL::text", [text]) == [(text, None)]
    assert both("SELECT unnest(%s::text[])", [AWKWARD]) == [(text,) for text in AWKWARD]
    assert both("SELECT unnest(%s::text[])", [[]]) == []


def test_names_and_places() -> None:
    assert both("SELECT %(a)s::text, %(b)s::text, %(a)s::text", {"a": "x", "b": None, "c": "unused"}) == [
        ("x", None, "x")
    ]
    some = [uuid7(), uuid7()]
    assert both("SELECT unnest(%s::uuid[])::text", [some]) == [(str(each),) for each in some]
    assert both("SELECT (%s::bool)::text, (%s::int + 1)::text", [True, 4]) == [("true", "5")]


def test_errors_are_djangos() -> None:
    with pytest.raises(DataError):
        sql.texts("SELECT %s::int::text", ["no number"])
    with pytest.raises(IntegrityError):
        sql.texts("INSERT INTO rehydrate_heartbeat (name, at, count, detail) VALUES (%s, NULL, 0, '{}')", ["x"])
    assert sql.texts("SELECT 'goes on'") == [("goes on",)]


def test_a_connection_that_was_lost_is_an_operational_error_and_the_next_one_works() -> None:
    ((pid,),) = sql.texts("SELECT pg_backend_pid()::text")
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [int(pid or 0)])
    finally:
        other.close()
    with pytest.raises(OperationalError):
        sql.texts("SELECT 'lost'")
    connection.close()
    assert sql.texts("SELECT 'new'") == [("new",)]


def test_a_bounded_number_is_kept_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    connection.close()
    monkeypatch.setattr(sql, "KEPT", 3)
    for _ in range(3):
        for n in range(7):
            assert sql.texts(f"SELECT '{n}'") == [(str(n),)]
    assert sql.texts("SELECT count(*)::text FROM pg_prepared_statements WHERE name LIKE 'kept_%%'") == [("3",)]


def test_what_a_rollback_makes_the_server_forget_is_prepared_again() -> None:
    """psycopg deallocates everything after a rollback, once it has prepared something itself."""
    assert sql.texts("SELECT 'kept'") == [("kept",)]
    with suppress(ZeroDivisionError), transaction.atomic(), connection.cursor() as cursor:
        for _ in range(5):  # it prepares what it is asked a few times
            cursor.execute("SELECT %s::int", [1])
        raise ZeroDivisionError
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        cursor.execute("SELECT count(*) FROM pg_prepared_statements")
        assert cursor.fetchone() == (0,), "it forgets"
    assert sql.texts("SELECT 'kept'") == [("kept",)]
