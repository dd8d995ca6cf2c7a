"""The few statements that every call of an agent consists of, carried out with as little between them and libpq as can
be: prepared once a connection, everything as text. All else goes through Django's cursors.

Measured for one statement: 35 µs of this process by a cursor, 10 by this; and it waits in one piece, so that a busy
process does not take turns with itself four times for each. In a transaction, and where queries are recorded (tests),
it is the cursor all the same, with the same statement and the same text. On an event loop (see `cooperative`) they go
to connections of this process's own, beside Django's, and what waits is the request alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from django.db import DEFAULT_DB_ALIAS, connections
from psycopg import errors, pq

from rehydrate import cooperative

Param = str | int | bool | Sequence[str] | None
Row = tuple[str | None, ...]

#: Statements that a connection keeps prepared: there are as many texts as ways of changing a run, which are not many.
KEPT: Final = 150

_numbers: Final = count()
_prepared: WeakKeyDictionary[psycopg.Connection, OrderedDict[str, bytes]] = WeakKeyDictionary()


def texts(statement: str, params: Mapping[str, Param] | Sequence[Param] = ()) -> list[Row]:
    """The rows of a statement, each value as PostgreSQL writes it. Raises Django's database errors.

    The statement casts what is not text to text, and its placeholders are `%s` or `%(name)s`.
    """
    if (own := apart()) is not None:
        return _carry_out(own, *_given(statement, params))
    django = connections[DEFAULT_DB_ALIAS]
    if cooperative.on_the_loop():
        with django.wrap_database_errors, own_connections.used() as own:
            return _carry_out(own, *_given(statement, params))
    if django.in_atomic_block or django.queries_logged or django.execute_wrappers:
        with django.cursor() as cursor:
            cursor.execute(statement, params)  # type: ignore[arg-type]
            return list(cursor.fetchall())
    django.close_if_health_check_failed()
    django.ensure_connection()
    with django.wrap_database_errors:
        return _carry_out(django.connection, *_given(statement, params))


_apart: Final[ContextVar[psycopg.Connection | None]] = ContextVar("apart", default=None)

#: It serves several: so it does not wait long for a row that somebody holds. Its statements are always the same few,
#: whose plans are good for any values.
_OWN: Final = "-c lock_timeout=50ms -c timezone=UTC -c plan_cache_mode=force_generic_plan"


#: So many at one instant, for all that the loop does; whoever needs one more waits for it.
OWN_AT_MOST: Final = 12


class Own:
    """Connections of this process beside Django's: made when they are needed, and kept until they break.

    Each statement commits by itself, and what is raised are psycopg's own errors.
    """

    def __init__(self) -> None:
        self._idle: list[psycopg.Connection] = []
        self._used = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self.made = 0
        """How many were made so far. What is known of the database may not hold for what a new one leads to."""

    @contextmanager
    def used(self) -> Iterator[psycopg.Connection]:
        """Here, in this greenlet or thread, `texts` goes to one of them."""
        while cooperative.on_the_loop() and self._used >= OWN_AT_MOST:
            self._wait()
        self._used += 1
        own = None
        try:
            own = self._sound() or cooperative.aside(self._connect)
            before = _apart.set(own)
            try:
                yield own
            finally:
                _apart.reset(before)
        finally:
            self._used -= 1
            if own is not None and not own.closed:
                self._idle.append(own)
            self._wake()

    def _wait(self) -> None:
        """Until one was given back."""
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            cooperative.wait_for(turn)
        except BaseException:
            if turn.done():
                self._wake()  # it is somebody else's
            raise

    def _wake(self) -> None:
        while self._queue:
            if not (turn := self._queue.popleft()).done():
                turn.set_result(None)
                return

    def _sound(self) -> psycopg.Connection | None:
        """One that did not break while it was idle: nobody could tell that from a write that broke off."""
        while self._idle:
            own = self._idle.pop()
            if not own.closed:
                poll = select.poll()
                poll.register(own.fileno(), select.POLLIN)
                if not poll.poll(0):  # whoever asks nothing is told nothing, but that it is over
                    return own
            own.close()
        return None

    def _connect(self) -> psycopg.Connection:
        given = connections[DEFAULT_DB_ALIAS].get_connection_params()
        given |= {"options": f"{given['options']} {_OWN}", "application_name": f"rehydrate group commit {os.getpid()}"}
        own = psycopg.connect(**given, autocommit=True)
        self.made += 1
        own.pgconn.nonblocking = 1  # for who sends; whoever calls in one piece is not concerned
        return own

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


own_connections: Final = Own()


def apart() -> psycopg.Connection | None:
    """The connection that `texts` goes to here instead of Django's."""
    return _apart.get()


def _given(statement: str, params: Mapping[str, Param] | Sequence[Param]) -> tuple[str, list[bytes | None]]:
    text, order = _numbered(statement)
    given = params if order is None else [params[name] for name in order]  # type: ignore[call-overload]
    return text, [_text(value) for value in given]


@lru_cache(maxsize=1000)
def _numbered(statement: str) -> tuple[str, list[str] | None]:
    """The statement with `$1`, and the names in that order (None: by position)."""
    names: list[str] = []
    places = count(1)

    def number(found: re.Match[str]) -> str:
        if (name := found[1]) is None:
            return f"${next(places)}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    text = re.sub(r"%(?:\((\w+)\))?s", number, statement)
    return text, names or None


def _text(value: Param) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str | int):
        return str(value).encode()
    quoted = ('"' + str(item).replace("\\", "\\\\").replace('"', '\\"') + '"' for item in value)
    return ("{" + ",".join(quoted) + "}").encode()


def _carry_out(conn: psycopg.Connection, text: str, params: list[bytes | None]) -> list[Row]:
    names = _prepared.setdefault(conn, OrderedDict())
    try:
        result = _result(conn, names, text, params)
    except errors.InvalidSqlStatementName:
        # After a rollback psycopg forgets all that is prepared, and with what is its own also what is kept here.
        names.clear()
        result = _result(conn, names, text, params)
    columns = range(result.nfields)
    return [
        tuple(value.decode() if (value := result.get_value(row, column)) is not None else None for column in columns)
        for row in range(result.ntuples)
    ]


def _result(conn: psycopg.Connection, names: OrderedDict[str, bytes], text: str, params: list[bytes | None]) -> Any:
    pgconn = conn.pgconn
    if (name := names.get(text)) is None:
        if len(names) >= KEPT:
            _, oldest = names.popitem(last=False)
            _checked(conn, _waited(conn, pgconn.exec_, pgconn.send_query, b"DEALLOCATE " + oldest))
        name = f"kept_{next(_numbers)}".encode()
        _checked(conn, _waited(conn, pgconn.prepare, pgconn.send_prepare, name, text.encode()))
        names[text] = name
    else:
        names.move_to_end(text)
    return _checked(conn, _waited(conn, pgconn.exec_prepared, pgconn.send_query_prepared, name, params))


def _waited(conn: psycopg.Connection, blocking: Callable[..., Any], send: Callable[..., None], *given: Any) -> Any:
    """The result of what libpq is asked for: in one piece, or sent, and waited for on the loop."""
    if not cooperative.on_the_loop():
        return blocking(*given)
    try:
        send(*given)
        return _fetched(conn.pgconn)
    except BaseException:
        conn.close()  # nobody knows what is still to come on it
        raise


def _fetched(pgconn: pq.abc.PGconn) -> Any:
    """The last result of what was sent."""
    while pgconn.flush():
        cooperative.wait_for(_ready(pgconn.socket, writing=True))
        pgconn.consume_input()
    found = None
    while True:
        while pgconn.is_busy():
            cooperative.wait_for(_ready(pgconn.socket))
            pgconn.consume_input()
        if (result := pgconn.get_result()) is None:
            return found
        found = result


def _ready(descriptor: int, *, writing: bool = False) -> asyncio.Future[None]:
    """Over when there is something to read; or, for who is writing, room for more."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def ready() -> None:
        loop.remove_reader(descriptor)
        if writing:
            loop.remove_writer(descriptor)
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, ready)
    if writing:
        loop.add_writer(descriptor, ready)
    return future


def _checked(conn: psycopg.Connection, result: Any) -> Any:
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return result
    if conn.pgconn.status != pq.ConnStatus.OK:
        raise psycopg.OperationalError(conn.pgconn.get_error_message())
    raise errors.error_from_result(result)
