"""Signs of life, as rows by name: who ticks, and which clusters carry out what they are handed. No rules of runs.

All by the database's clock. A row of a tick that is not deleted and falls silent is that of a worker that was killed or
hangs.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Final, Self

from django.db import connection

from rehydrate.node import node, queue

#: Seconds after which a tick that shows nothing must be taken to be gone: it shows itself every second.
SILENT: Final = 5

_SHOW: Final = (
    "INSERT INTO rehydrate_heartbeat (name, at, count, detail)"
    " VALUES (%s, clock_timestamp(), 1, jsonb_build_object('pid', %s::int))"
    " ON CONFLICT (name) DO UPDATE SET at = EXCLUDED.at, count = rehydrate_heartbeat.count + 1"
)


class Tick:
    """One tick's own sign of life, for as long as its `with`."""

    def __init__(self) -> None:
        self.name = f"tick@{node()}#{uuid.uuid4().hex[:12]}"
        self._shown = 0.0

    def show(self) -> None:
        """Once a second, however often it is called."""
        if time.monotonic() - self._shown < 1:
            return
        with connection.cursor() as cursor:
            cursor.execute(_SHOW, [self.name, os.getpid()])
        self._shown = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """A tick that ends by itself is missed by nobody."""
        forget([self.name])


def silent_ticks() -> list[str]:
    """The names of ticks that ended without a word, or hang. One of this `up` is missed as soon as its process is."""
    return [name for name, here, lives in _ticks() if not lives]


def ticks_here() -> int:
    """How many ticks of this `up` go on."""
    return sum(here and lives for _, here, lives in _ticks())


def _ticks() -> list[tuple[str, bool, bool]]:
    """(name, of this `up`, still going on) of each tick that has not ended by itself."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT name, (detail->>'pid')::int, at < clock_timestamp() - make_interval(secs => %s)"
            " FROM rehydrate_heartbeat WHERE starts_with(name, 'tick@')",
            [SILENT],
        )
        rows = cursor.fetchall()
    ours = f"tick@{node()}#"
    found = ((name, name.startswith(ours), pid, silent) for name, pid, silent in rows)
    return [(name, here, not silent and (not here or _lives(pid))) for name, here, pid, silent in found]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def forget(names: list[str]) -> None:
    if names:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM rehydrate_heartbeat WHERE name = ANY(%s)", [names])


def beat(cluster: str) -> None:
    """This `up`'s cluster carries out what it is handed."""
    with connection.cursor() as cursor:
        cursor.execute(_SHOW, [f"beat:{queue(cluster)}", os.getpid()])


def beats(cluster: str) -> int:
    """How often this `up`'s cluster has shown that."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT count FROM rehydrate_heartbeat WHERE name = %s", [f"beat:{queue(cluster)}"])
        row = cursor.fetchone()
    return row[0] if row else 0


def seconds_since_beat(cluster: str) -> float | None:
    """Since this `up`'s cluster last showed that; None when it never did."""
    return _since(f"beat:{queue(cluster)}")


def seconds_since_tick(*, here: bool = False) -> float | None:
    """Since any tick (`here`: of this `up`) last showed itself; None when none ever did."""
    return _since(f"tick@{node()}#" if here else "tick@")


def _since(start: str) -> float | None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM clock_timestamp() - max(at)) FROM rehydrate_heartbeat"
            " WHERE starts_with(name, %s)",
            [start],
        )
        (seconds,) = cursor.fetchone()
    return None if seconds is None else float(seconds)
