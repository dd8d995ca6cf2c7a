"""Which run an agent may claim next, and which runs are overdue. The lease is the ledger's."""

from typing import Any, Final

import psycopg
from django.db import connection

from rehydrate import clock
from rehydrate.core.commands import AgentInfo
from rehydrate.loading import Pick


def next_claimable(workspace: str, flows: tuple[str, ...] | None, agent: AgentInfo | None, passed: list[str]) -> Pick:
    """Picks the longest ready runs of these flows (None: of all); not one of those passed over."""
    where = ""
    given: dict[str, Any] = {"workspace": workspace, "passed": passed}
    if flows is not None:
        where += " AND c.flow = ANY(%(flows)s)"
        given["flows"] = list(flows)
    if agent is not None and (agent.version or agent.reads):
        where += " AND (c.agent->>'version' IS NULL OR c.agent->>'version' = ANY(%(versions)s)"
        where += ")" if agent.reads else " OR true)"
        given["versions"] = [version for version in (agent.version, *agent.reads) if version is not None]
    return Pick(
        "SELECT c.id FROM rehydrate_run c"
        " WHERE c.workspace_id = %(workspace)s AND c.status IN ('ready', 'compensating') AND c.lease_expires_at IS NULL"
        " AND (c.retry_at IS NULL OR c.retry_at <= clock_timestamp() + %(offset)s::interval)"
        f"{where} AND NOT c.id = ANY(%(passed)s::uuid[]) ORDER BY c.ready_since, c.id",
        given,
    )


#: As a value of its own, which an index on the due time can use: a function that changes within a statement it cannot.
_NOW: Final = "(SELECT clock_timestamp() + %s::interval)"
#: What is in trouble is tried alone, and counted (see sweep.py).
_SOUND: Final = " AND NOT EXISTS (SELECT 1 FROM rehydrate_trouble x WHERE x.run_id = r.id)"


def lock_overdue(limit: int, *, workspace: str | None = None, flows: tuple[str, ...] | None = None) -> list[str]:
    """Locks runs for which something is due (a timer, a lapsed lease, an alarm) and gives their ids.

    The most overdue of each kind, `limit` of each; what another transaction holds is passed over and does not count.
    One that was caught up at this very moment may be among them. Needs a transaction.
    """
    where = _SOUND
    given: list[Any] = []
    if workspace is not None:
        where, given = where + " AND r.workspace_id = %s", [workspace]
        if flows is not None:
            where, given = where + " AND r.flow = ANY(%s)", [workspace, list(flows)]
    end = "LIMIT %s FOR NO KEY UPDATE OF r SKIP LOCKED"
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH timed AS (SELECT r.id FROM rehydrate_timer t JOIN rehydrate_run r ON r.id = t.run_id"
            f" WHERE t.fired_at IS NULL AND t.due_at <= {_NOW}{where} ORDER BY t.due_at {end}),"
            " leased AS (SELECT r.id FROM rehydrate_run r"
            f" WHERE r.lease_expires_at <= {_NOW}{where} ORDER BY r.lease_expires_at {end}),"
            " alarmed AS (SELECT r.id FROM rehydrate_run r"
            f" WHERE r.alarm_at <= {_NOW}{where} ORDER BY r.alarm_at {end})"
            " SELECT id FROM timed UNION SELECT id FROM leased UNION SELECT id FROM alarmed",
            [clock.interval(), *given, limit] * 3,
        )
        return [str(row[0]) for row in cursor.fetchall()]


def lock_free(run_ids: list[str]) -> list[str]:
    """Locks those of these runs that nobody holds, and gives their ids. Needs a transaction."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM rehydrate_run WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED",
            [run_ids],
        )
        return [str(row[0]) for row in cursor.fetchall()]


def seconds_until_due() -> float | None:
    """Seconds until the next thing becomes due, negative when it is overdue, None when nothing is pending."""

    def first(column: str, table: str, run: str) -> str:
        sound = f"NOT EXISTS (SELECT 1 FROM rehydrate_trouble x WHERE x.run_id = r.{run})"
        return f"(SELECT {column} FROM {table} r WHERE {column} IS NOT NULL AND {sound} ORDER BY {column} LIMIT 1)"

    timed = first("due_at", "(SELECT * FROM rehydrate_timer WHERE fired_at IS NULL)", "run_id")
    leased, alarmed = (first(column, "rehydrate_run", "id") for column in ("lease_expires_at", "alarm_at"))
    troubled = "(SELECT min(retry_at) FROM rehydrate_trouble)"
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT extract(epoch FROM least({timed}, {leased}, {alarmed}, {troubled})"
            " - clock_timestamp() - %s::interval)",
            [clock.interval()],
        )
        row = cursor.fetchone()
    return None if row is None or row[0] is None else float(row[0])


_CLAIMABLE = (
    "r.status IN ('ready', 'compensating') AND r.lease_expires_at IS NULL"
    " AND (r.retry_at IS NULL OR r.retry_at <= clock_timestamp() + %(clock)s::interval)"
)
_PAST = "<= (SELECT clock_timestamp() + %(clock)s::interval - %(grace)s::interval)"
_AWAITED = f"""
WITH asked AS (SELECT * FROM unnest(%(workspaces)s::uuid[], %(flows)s::text[]) AS a(workspace_id, flow))
SELECT a.workspace_id, a.flow, NULL::float FROM asked a WHERE a.flow <> '*' AND EXISTS (
    SELECT FROM rehydrate_run r WHERE r.workspace_id = a.workspace_id AND r.flow = a.flow AND {_CLAIMABLE})
UNION SELECT r.workspace_id, r.flow, NULL FROM asked a, LATERAL (
    SELECT r.workspace_id, r.flow FROM rehydrate_run r WHERE r.workspace_id = a.workspace_id AND {_CLAIMABLE} LIMIT 1
) r WHERE a.flow = '*'
UNION SELECT r.workspace_id, r.flow, NULL FROM (
    (SELECT id FROM rehydrate_run WHERE lease_expires_at {_PAST} ORDER BY lease_expires_at LIMIT 100)
    UNION ALL
    (SELECT run_id FROM rehydrate_timer WHERE fired_at IS NULL AND due_at {_PAST} ORDER BY due_at LIMIT 100)
) due JOIN rehydrate_run r ON r.id = due.id WHERE TRUE{_SOUND}
UNION ALL SELECT NULL, NULL, extract(epoch FROM least(
    (SELECT min(due_at) FROM rehydrate_timer WHERE fired_at IS NULL AND NOT due_at {_PAST}),
    (SELECT min(lease_expires_at) FROM rehydrate_run WHERE NOT lease_expires_at {_PAST})
) - clock_timestamp() - %(clock)s::interval)
"""


def awaited(
    conn: psycopg.Connection[Any], asked: list[tuple[str, str]], *, grace: float
) -> tuple[float | None, list[tuple[str, str]]]:
    """For those who wait for runs of `asked` (workspace, flow; "*" for any): seconds until something becomes due by
    itself, and the (workspace, flow) in which there is a run to claim, or something was due `grace` seconds ago.
    """
    given = {
        "clock": clock.interval(),
        "grace": f"{grace} seconds",
        "workspaces": [workspace for workspace, _ in asked],
        "flows": [flow for _, flow in asked],
    }
    left: float | None = None
    found: list[tuple[str, str]] = []
    for workspace, flow, seconds in conn.execute(_AWAITED, given).fetchall():
        if workspace is None:
            left = seconds
        else:
            found.append((str(workspace), flow))
    return left, found
