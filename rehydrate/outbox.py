"""Which deliveries a change of a run brings about, as rows that are written in the very statement of the change.

No sending here (`sender`), and no rules of runs. A transition is what a commit shows: a run that became ready and was
claimed in the same transaction wakes nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rehydrate.core.canonical import instant
from rehydrate.core.state import Run
from rehydrate.ids import uuid7

if TYPE_CHECKING:
    from rehydrate.projections import Change

#: One parameter, the rows as JSON; `saved` are the runs (see projections). A flow's receiver is found by name: without
#: one nothing is written.
INSERT: Final = (
    "INSERT INTO rehydrate_delivery (id, endpoint_id, run_id, type, subject, run_status, run_version,"
    " at, status, attempts, since, next_at, sending)"
    " SELECT x.id, e.id, x.run_id, x.type, x.subject, x.run_status, x.run_version,"
    " x.at, 'pending', 0, x.at, x.at, FALSE"
    " FROM jsonb_to_recordset(%s::jsonb) AS x(id uuid, workspace uuid, flow text, run_id uuid, type text, subject text,"
    " run_status text, run_version bigint, at timestamptz)"
    " JOIN rehydrate_endpoint e ON e.workspace_id = x.workspace AND e.flow = x.flow AND e.url IS NOT NULL"
    " WHERE EXISTS (SELECT FROM saved) RETURNING 1"
)


def rows(changes: list[Change]) -> list[dict[str, Any]]:
    """One row a transition, and one for each wait that was opened."""
    return [row for change in changes if change.deliver for row in _rows(change)]


def _rows(change: Change) -> list[dict[str, Any]]:
    before, run = change.before, change.after.run
    opened = [key for key in change.after.waits if before is None or key not in before.waits]
    due = [("wait.opened", key) for key in opened]
    if (type_ := _transition(before.run if before is not None else None, run)) is not None:
        due.append((type_, ""))
    at = change.now or run.updated_at
    return [
        {
            "id": str(uuid7()),
            "workspace": run.workspace_id,
            "flow": run.flow,
            "run_id": run.id,
            "type": type_,
            "subject": subject,
            "run_status": run.status,
            "run_version": run.version,
            "at": instant(at),
        }
        for type_, subject in due
    ]


def _transition(was: Run | None, run: Run) -> str | None:
    """What the run has come to, if it was not there before. It is ready anew whenever it became claimable again."""
    if run.ended:
        return None if was is not None and was.ended else "run.ended"
    same = was is not None and was.status == run.status
    if run.status == "review":
        return None if same else "run.review"
    if run.status in ("ready", "compensating") and run.ready_since is not None:
        return None if same and was is not None and was.ready_since == run.ready_since else f"run.{run.status}"
    return None
