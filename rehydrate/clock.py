"""The one clock: the database's `clock_timestamp()`. Tests move `offset`; nothing else does."""

import datetime as dt

from django.db import connection

#: Added to the database's clock. Always zero outside of tests.
offset: dt.timedelta = dt.timedelta(0)


def interval() -> str:
    """The offset as a parameter of a statement."""
    return f"{offset.total_seconds()} seconds"


def now() -> dt.datetime:
    """The database's time of this instant (not of the transaction's start), in UTC."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp() + %s::interval", [interval()])
        row = cursor.fetchone()
    value: dt.datetime = row[0]
    return value
