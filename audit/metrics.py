"""The six recovery metrics (contract.md section 8), counted from events alone. Reads only; no words and no charts."""

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

from django.db import connection

from rehydrate.models import Run

Figures = dict[str, Any]

_TYPES: Final = ["lease.granted", "paused", "effect.repeated", "taken_over", "handed_back", "wait.timed_out"]
_ENDS: Final = ["completed", "terminated"]
_OPEN: Final = [status for status in Run.Status.values if status not in _ENDS]

#: Events are numbered as they come, so a period is a span of numbers: its edges are found by halving, in twenty or
#: thirty looks at the primary key. (A transaction may keep its numbers for a while before they show: hence the minute
#: to either side; `at` decides.)
_SPAN: Final = """
WITH RECURSIVE search (edge, moment, low, high) AS (
    SELECT edge, moment, known.low, known.high
    FROM (VALUES ('first', %(start)s::timestamptz - interval '1 minute'),
                 ('last', %(end)s::timestamptz + interval '1 minute')) AS edges (edge, moment),
         (SELECT coalesce(min(id), 0) AS low, coalesce(max(id), 0) + 1 AS high FROM rehydrate_ledgerevent) AS known
  UNION ALL
    SELECT edge, moment,
        CASE WHEN middle.at < moment THEN middle.id + 1 ELSE low END,
        CASE WHEN middle.at < moment THEN high ELSE (low + high) / 2 END
    FROM search CROSS JOIN LATERAL (
        SELECT id, at FROM rehydrate_ledgerevent WHERE id >= (low + high) / 2 ORDER BY id LIMIT 1
    ) AS middle
    WHERE low < high
)
SELECT max(low) FILTER (WHERE edge = 'first'), max(low) FILTER (WHERE edge = 'last') FROM search
"""

#: Every occurrence that counts, one row each, as `facts (kind, run_id, workspace_id, flow, at, seconds, flag, n)`.
#:
#: A resume is the first lease to go on after a pause. What came before a lease is known from the period itself, or else
#: looked up run by run, backwards by `seq`.
_FACTS: Final = """
WITH e AS MATERIALIZED (
    SELECT ev.run_id, ev.workspace_id, r.flow, ev.seq, ev.at, ev.type, CASE ev.type
        WHEN 'lease.granted' THEN ev.payload->>'purpose' = 'continue' AND ev.payload->>'via' IS DISTINCT FROM 'open'
        WHEN 'paused' THEN jsonb_array_length(coalesce(ev.payload->'missing', '[]')) > 0
        WHEN 'handed_back' THEN coalesce((ev.payload->>'needed_engineer')::boolean, false)
        WHEN 'wait.timed_out' THEN ev.payload->>'then' = 'review'
        END AS flag
    FROM rehydrate_ledgerevent ev JOIN rehydrate_run r ON r.id = ev.run_id
    WHERE ev.workspace_id = ANY(%(workspaces)s::uuid[]) AND ev.type = ANY(%(types)s)
      AND ev.id >= %(first)s AND ev.id < %(last)s AND ev.at >= %(start)s AND ev.at < %(end)s
      AND (%(flows)s::text[] IS NULL OR r.flow = ANY(%(flows)s::text[]))
), facts AS (
    SELECT 'resumed' AS kind, g.run_id, g.workspace_id, g.flow, g.at,
        extract(epoch FROM g.at - coalesce(g.at_before, p.at))::float AS seconds, false AS flag, 1 AS n
    FROM (
        SELECT *, lag(type) OVER earlier AS type_before, lag(at) OVER earlier AS at_before
        FROM e WHERE type IN ('paused', 'lease.granted') WINDOW earlier AS (PARTITION BY run_id ORDER BY seq)
    ) AS g LEFT JOIN LATERAL (
        SELECT b.type, b.at FROM rehydrate_ledgerevent b
        WHERE g.type_before IS NULL AND b.run_id = g.run_id AND b.seq < g.seq AND b.type IN ('paused', 'lease.granted')
        ORDER BY b.seq DESC LIMIT 1
    ) AS p ON true
    WHERE g.type = 'lease.granted' AND g.flag AND coalesce(g.type_before, p.type) = 'paused'
  UNION ALL
    SELECT 'lacking', run_id, workspace_id, flow, at, NULL, false, 1
    FROM e WHERE type = 'paused' AND flag
  UNION ALL
    (SELECT DISTINCT ON (x.run_id, p.seq) 'repeated', x.run_id, x.workspace_id, x.flow, x.at, NULL, false, 1
    FROM e x CROSS JOIN LATERAL (
        SELECT b.seq FROM rehydrate_ledgerevent b
        WHERE b.run_id = x.run_id AND b.seq < x.seq AND b.type = 'lease.granted'
          AND EXISTS (
              SELECT FROM rehydrate_ledgerevent c WHERE c.run_id = b.run_id AND c.seq < b.seq AND c.type = 'paused'
          )
        ORDER BY b.seq DESC LIMIT 1
    ) p
    WHERE x.type = 'effect.repeated' ORDER BY x.run_id, p.seq, x.seq)
  UNION ALL
    SELECT 'taken_over', run_id, workspace_id, flow, at, NULL, false, 1 FROM e WHERE type = 'taken_over'
  UNION ALL
    SELECT 'handled', h.run_id, h.workspace_id, h.flow, h.at, extract(epoch FROM h.at - p.at)::float, h.flag, 1
    FROM e h CROSS JOIN LATERAL (
        SELECT b.at FROM rehydrate_ledgerevent b
        WHERE b.run_id = h.run_id AND b.seq < h.seq AND b.type = 'taken_over' ORDER BY b.seq DESC LIMIT 1
    ) p
    WHERE h.type = 'handed_back'
  UNION ALL
    SELECT 'timed_out', run_id, workspace_id, flow, at, NULL, coalesce(flag, false), 1
    FROM e WHERE type = 'wait.timed_out'
)
"""

#: Runs that were alive in the period: those that are open still, and those that have ended since it began.
_COUNTED: Final = """
, alive AS (
    SELECT workspace_id, flow, count(*)::int AS n FROM (
        SELECT workspace_id, flow FROM rehydrate_run
        WHERE workspace_id = ANY(%(workspaces)s::uuid[]) AND status = ANY(%(open)s) AND created_at < %(end)s
      UNION ALL
        SELECT r.workspace_id, r.flow
        FROM rehydrate_ledgerevent ev JOIN rehydrate_run r ON r.id = ev.run_id
        WHERE ev.workspace_id = ANY(%(workspaces)s::uuid[]) AND ev.type = ANY(%(ends)s)
          AND ev.id >= %(first)s AND ev.at >= %(start)s AND r.created_at < %(end)s
    ) AS runs
    WHERE %(flows)s::text[] IS NULL OR flow = ANY(%(flows)s::text[])
    GROUP BY workspace_id, flow
), counted AS (
    SELECT kind, workspace_id, flow, at, seconds, flag, n FROM facts
  UNION ALL
    SELECT 'alive', workspace_id, flow, NULL, NULL, false, n FROM alive
), placed AS (
    SELECT *, date_bin(%(step)s, at, %(start)s) AS bucket FROM counted
)
"""
_FIGURES: Final = """
    percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE kind = 'resumed'),
    percentile_cont(0.95) WITHIN GROUP (ORDER BY seconds) FILTER (WHERE kind = 'resumed'),
    count(*) FILTER (WHERE kind = 'resumed'),
    count(*) FILTER (WHERE kind = 'lacking'),
    count(*) FILTER (WHERE kind = 'repeated'),
    count(*) FILTER (WHERE kind = 'taken_over'),
    coalesce(sum(n) FILTER (WHERE kind = 'alive'), 0),
    avg(seconds) FILTER (WHERE kind = 'handled'),
    count(*) FILTER (WHERE kind = 'timed_out' AND flag),
    count(*) FILTER (WHERE kind = 'timed_out'),
    count(*) FILTER (WHERE kind = 'handled' AND flag),
    count(*) FILTER (WHERE kind = 'handled')
FROM placed
"""
_TOTAL: Final = f"{_FACTS}{_COUNTED} SELECT {_FIGURES}"
_BY_FLOW_AND_TIME: Final = (
    f"{_FACTS}{_COUNTED} SELECT grouping(flow, bucket), flow, bucket, {_FIGURES}"
    " GROUP BY GROUPING SETS ((), (flow), (bucket))"
)
_BY_WORKSPACE_AND_FLOW: Final = (
    f"{_FACTS}{_COUNTED} SELECT workspace_id::text, flow, {_FIGURES} GROUP BY workspace_id, flow ORDER BY 1, 2"
)
_BEHIND_ONE: Final = f"""{_FACTS} SELECT run_id::text, at, seconds FROM facts
    WHERE kind = %(kind)s AND (flag OR NOT %(flagged)s) ORDER BY at DESC LIMIT %(limit)s"""

#: What stands behind each metric: the kind of fact, and whether only those with the flag count.
_BEHIND: Final = {
    "pause_to_resume_seconds": ("resumed", False),
    "missing_metadata": ("lacking", False),
    "repeated_effects": ("repeated", False),
    "takeovers": ("taken_over", False),
    "undetermined_timeouts": ("timed_out", True),
    "engineer_needed": ("handled", True),
}
METRICS: Final = tuple(_BEHIND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Period:
    """`[start, end)` in these workspaces (ids); `flows` None is all of them."""

    workspaces: Sequence[str]
    flows: Sequence[str] | None
    start: dt.datetime
    end: dt.datetime

    def parameters(self) -> dict[str, Any]:
        ((first, last),) = _rows(_SPAN, {"start": self.start, "end": self.end})
        return {
            "workspaces": list(self.workspaces),
            "flows": None if self.flows is None else list(self.flows),
            "types": _TYPES,
            "ends": _ENDS,
            "open": _OPEN,
            "start": self.start,
            "end": self.end,
            "first": first,
            "last": last,
            "step": self.end - self.start,
        }


def recovery(
    *, workspaces: Sequence[str], flows: Sequence[str] | None, start: dt.datetime, end: dt.datetime
) -> Figures:
    """The metrics of `[start, end)` in these workspaces; `flows` None is all of them.

    Missing metadata counts pauses that lacked it against all tries to resume (those that went on, and those that could
    not); takeovers count against the runs that were alive in the period.
    """
    period = Period(workspaces=workspaces, flows=flows, start=start, end=end)
    (row,) = _rows(_TOTAL, period.parameters())
    return _figures(row)


def report(period: Period, step: dt.timedelta) -> dict[str, Any]:
    """`{total, flows: {name: figures}, steps: {start: figures}}`; steps in which nothing happened are left out. A step
    has no runs to count takeovers against.
    """
    found: dict[str, Any] = {"total": None, "flows": {}, "steps": {}}
    for left_out, flow, bucket, *figures in _rows(_BY_FLOW_AND_TIME, {**period.parameters(), "step": step}):
        match left_out:
            case 0b11:
                found["total"] = _figures(figures)
            case 0b01:
                found["flows"][flow] = _figures(figures)
            case _ if bucket is not None:  # runs that are alive are so at no one time
                found["steps"][bucket] = _figures(figures)
    found["flows"] = dict(sorted(found["flows"].items()))
    return found


def by_workspace_and_flow(period: Period) -> list[tuple[str, str, Figures]]:
    """`(workspace id, flow, figures)` of each flow in which something happened, or is alive."""
    rows = _rows(_BY_WORKSPACE_AND_FLOW, period.parameters())
    return [(workspace, flow, _figures(figures)) for workspace, flow, *figures in rows]


def behind(metric: str, period: Period, *, limit: int) -> list[tuple[str, dt.datetime, float | None]]:
    """`(run id, when, seconds)` of what a metric of `METRICS` counts, the newest first."""
    kind, flagged = _BEHIND[metric]
    return _rows(_BEHIND_ONE, {**period.parameters(), "kind": kind, "flagged": flagged, "limit": limit})


def _rows(sql: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def _figures(row: Sequence[Any]) -> Figures:
    """The contract's shape of one line of figures."""
    (
        median, p95, resumes, lacking, repeated, takeovers, runs, handling, undetermined, timeouts, engineer, handled,
    ) = row  # fmt: skip
    return {
        "pause_to_resume_seconds": {"median": _seconds(median), "p95": _seconds(p95), "count": resumes},
        "missing_metadata": _share(lacking, resumes + lacking),
        "repeated_effects": _share(repeated, resumes),
        "takeovers": {
            "per_100_runs": round(100 * takeovers / runs, 2) if runs else None,
            "count": takeovers,
            "of": int(runs),
            "mean_handling_seconds": _seconds(handling),
        },
        "undetermined_timeouts": _share(undetermined, timeouts),
        "engineer_needed": _share(engineer, handled),
    }


def _share(count: int, of: int) -> dict[str, Any]:
    return {"count": count, "of": of, "share": round(count / of, 4) if of else None}


def _seconds(value: Any) -> float | None:
    return None if value is None else round(float(value), 3)
