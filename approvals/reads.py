"""Two small reads that only pages need: a run's newest events, and what its track shows in a list. No rules, no words.

Callers have found the runs through `rehydrate.selectors`, which keeps the walls.
"""

from __future__ import annotations

from typing import Any

from rehydrate.core.canonical import instant
from rehydrate.models import Effect, LedgerEvent

#: Ticks of all tracks of one list; more would not be told apart.
TICKS_MAX = 1500


def newest_events(run_id: str, limit: int) -> list[dict[str, Any]]:
    """The last `limit` events, oldest first, in the contract's shape; secret fields are digests, as they are stored."""
    rows = LedgerEvent.objects.filter(run_id=run_id).order_by("-seq")[:limit]
    return [
        {
            "seq": row.seq,
            "type": row.type,
            "actor": {"kind": row.actor_kind, "id": row.actor_id, "name": row.actor_name},
            "at": instant(row.at),
            "payload": row.payload,
            "prev_hash": row.prev_hash,
            "hash": row.hash,
        }
        for row in reversed(rows)
    ]


def effects_of(run_ids: list[str]) -> dict[str, list[dict[str, Any]]]:
    """`{run: [{key, state, executed_at, updated_at}]}` of some runs, in one query."""
    found: dict[str, list[dict[str, Any]]] = {}
    rows = Effect.objects.filter(run_id__in=run_ids).exclude(state__in=["planned", "withdrawn"]).order_by("planned_seq")
    for row in rows.values("run_id", "key", "state", "executed_at", "updated_at")[:TICKS_MAX]:
        found.setdefault(str(row["run_id"]), []).append(
            {
                "key": row["key"],
                "state": row["state"],
                "executed_at": instant(row["executed_at"]),
                "updated_at": instant(row["updated_at"]),
            }
        )
    return found
