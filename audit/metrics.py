"""The six recovery metrics (contract.md section 8), counted from events alone. Reads only; no charts and pages."""

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from django.db import connection

_TYPES: Final = ["lease.granted", "paused", "effect.repeated", "taken_over", "handed_back", "wait.timed_out"]

#: A resume is the first lease to go on after a pause. What came before it is looked up run by run, backwards by `seq`.
_SQL: Final = """
WITH e AS MATERIALIZED (
    SELECT ev.run_id, ev.seq, ev.at, ev.type, ev.payload
    FROM rehydrate_ledgerevent ev JOIN rehydrate_run r ON r.id = ev.run_id
    WHERE ev.workspace_id = ANY(%(workspaces)s::uuid[]) AND ev.type = ANY(%(types)s)
      AND ev.at >= %(start)s AND ev.at < %(end)s
      AND (%(flows)s::text[] IS NULL OR r.flow = ANY(%(flows)s::text[]))
), resumes AS (
    SELECT g.run_id, g.seq, extract(epoch FROM g.at - p.at) AS seconds
    FROM e g CROSS JOIN LATERAL (
        SELECT b.type, b.at FROM rehydrate_ledgerevent b
        WHERE b.run_id = g.run_id AND b.seq < g.seq AND b.type IN ('paused', 'lease.granted')
        ORDER BY b.seq DESC LIMIT 1
    ) p
    WHERE g.type = 'lease.granted' AND g.payload->>'purpose' = 'continue' AND p.type = 'paused'
), repeated AS (
    SELECT DISTINCT x.run_id, p.seq
    FROM e x CROSS JOIN LATERAL (
        SELECT b.seq FROM rehydrate_ledgerevent b
        WHERE b.run_id = x.run_id AND b.seq < x.seq AND b.type = 'lease.granted'
          AND EXISTS (
              SELECT FROM rehydrate_ledgerevent c WHERE c.run_id = b.run_id AND c.seq < b.seq AND c.type = 'paused'
          )
        ORDER BY b.seq DESC LIMIT 1
    ) p
    WHERE x.type = 'effect.repeated'
), handled AS (
    SELECT extract(epoch FROM h.at - p.at) AS seconds,
        coalesce((h.payload->>'needed_engineer')::boolean, false) AS engineer
    FROM e h CROSS JOIN LATERAL (
        SELECT b.at FROM rehydrate_ledgerevent b
        WHERE b.run_id = h.run_id AND b.seq < h.seq AND b.type = 'taken_over' ORDER BY b.seq DESC LIMIT 1
    ) p
    WHERE h.type = 'handed_back'
)
SELECT
    (SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) FROM resumes),
    (SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FROM resumes),
    (SELECT count(*) FROM resumes),
    (SELECT count(*) FROM e WHERE type = 'paused' AND jsonb_array_length(coalesce(payload->'missing', '[]')) > 0),
    (SELECT count(*) FROM repeated),
    (SELECT count(*) FROM e WHERE type = 'taken_over'),
    (SELECT count(*) FROM rehydrate_run r WHERE r.workspace_id = ANY(%(workspaces)s::uuid[])
        AND r.created_at < %(end)s AND coalesce(r.ended_at, %(end)s) >= %(start)s
        AND (%(flows)s::text[] IS NULL OR r.flow = ANY(%(flows)s::text[]))),
    (SELECT avg(seconds) FROM handled),
    (SELECT count(*) FROM e WHERE type = 'wait.timed_out' AND payload->>'then' = 'review'),
    (SELECT count(*) FROM e WHERE type = 'wait.timed_out'),
    (SELECT count(*) FROM handled WHERE engineer),
    (SELECT count(*) FROM handled)
"""


def recovery(
    *, workspaces: Sequence[str], flows: Sequence[str] | None, start: dt.datetime, end: dt.datetime
) -> dict[str, Any]:
    """The metrics of `[start, end)` in these workspaces; `flows` None is all of them.

    Missing metadata counts pauses that lacked it against all tries to resume (those that went on, and those that could
    not); takeovers count against the runs that were alive in the period.
    """
    wanted = {
        "workspaces": list(workspaces),
        "flows": None if flows is None else list(flows),
        "types": _TYPES,
        "start": start,
        "end": end,
    }
    with connection.cursor() as cursor:
        cursor.execute(_SQL, wanted)
        row = cursor.fetchone()
    median, p95, resumes, lacking, repeated, takeovers, runs, handling, undetermined, timeouts, engineer, handled = row
    return {
        "pause_to_resume_seconds": {"median": _seconds(median), "p95": _seconds(p95), "count": resumes},
        "missing_metadata": _share(lacking, resumes + lacking),
        "repeated_effects": _share(repeated, resumes),
        "takeovers": {
            "per_100_runs": round(100 * takeovers / runs, 2) if runs else None,
            "count": takeovers,
            "of": runs,
            "mean_handling_seconds": _seconds(handling),
        },
        "undetermined_timeouts": _share(undetermined, timeouts),
        "engineer_needed": _share(engineer, handled),
    }


def _share(count: int, of: int) -> dict[str, Any]:
    return {"count": count, "of": of, "share": round(count / of, 4) if of else None}


def _seconds(value: Any) -> float | None:
    return None if value is None else round(float(value), 3)
