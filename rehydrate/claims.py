"""Which run an agent may claim next: found with SKIP LOCKED, so that no two look at the same one.

The lease is the ledger's.
"""

from typing import Any

from django.db import connection

from rehydrate import clock
from rehydrate.core.commands import AgentInfo


def next_claimable(
    workspace: str, flows: tuple[str, ...] | None, agent: AgentInfo | None, passed: list[str]
) -> str | None:
    """The id of the longest ready run of these flows (None: of all), locked; without those passed over."""
    reads = [agent.version, *agent.reads] if agent is not None and (agent.version or agent.reads) else None
    named: list[Any] = [list(flows)] if flows is not None else []
    versions: list[Any] = []
    if reads is not None:
        versions = [[r for r in reads if r is not None], not (agent and agent.reads)]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM rehydrate_run"
            " WHERE workspace_id = %s AND status IN ('ready', 'compensating') AND lease_expires_at IS NULL"
            " AND (retry_at IS NULL OR retry_at <= clock_timestamp() + %s::interval)"
            + (" AND flow = ANY(%s)" if flows is not None else "")
            + (" AND (agent->>'version' IS NULL OR agent->>'version' = ANY(%s) OR %s)" if reads is not None else "")
            + " AND NOT id = ANY(%s::uuid[]) ORDER BY ready_since, id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED",
            [workspace, clock.interval(), *named, *versions, passed],
        )
        row = cursor.fetchone()
    return str(row[0]) if row else None


def overdue(workspace: str | None, limit: int, flows: tuple[str, ...] | None = None) -> list[str]:
    """Ids of runs for which something is due: a lapsed lease, a timer, an alarm. The most overdue first."""
    where = ""
    given: list[Any] = []
    if workspace is not None:
        where, given = " AND r.workspace_id = %s", [workspace]
        if flows is not None:
            where, given = where + " AND r.flow = ANY(%s)", [workspace, list(flows)]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT id FROM ("
            "  (SELECT r.id, r.lease_expires_at AS due FROM rehydrate_run r"
            f"    WHERE r.lease_expires_at <= clock_timestamp() + %s::interval{where} ORDER BY 2 LIMIT %s)"
            "  UNION ALL (SELECT r.id, t.due_at FROM rehydrate_timer t JOIN rehydrate_run r ON r.id = t.run_id"
            f"    WHERE t.fired_at IS NULL AND t.due_at <= clock_timestamp() + %s::interval{where} ORDER BY 2 LIMIT %s)"
            "  UNION ALL (SELECT r.id, r.alarm_at FROM rehydrate_run r"
            f"    WHERE r.alarm_at <= clock_timestamp() + %s::interval{where} ORDER BY 2 LIMIT %s)"
            ") x ORDER BY due LIMIT %s",
            [*([clock.interval(), *given, limit] * 3), limit],
        )
        return list(dict.fromkeys(str(row[0]) for row in cursor.fetchall()))


def seconds_until_due() -> float | None:
    """Seconds until the next thing becomes due, negative when it is overdue, None when nothing is pending."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM least("
            " (SELECT min(due_at) FROM rehydrate_timer WHERE fired_at IS NULL),"
            " (SELECT min(lease_expires_at) FROM rehydrate_run WHERE lease_expires_at IS NOT NULL),"
            " (SELECT min(alarm_at) FROM rehydrate_run WHERE alarm_at IS NOT NULL))"
            " - clock_timestamp() - %s::interval)",
            [clock.interval()],
        )
        row = cursor.fetchone()
    return None if row is None or row[0] is None else float(row[0])
