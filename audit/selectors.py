"""Reads across runs for the history. No wording, no writes."""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any

from django.db.models import Q
from django.utils import timezone

from rehydrate.models import DrillResult, Effect, Flow, LedgerEvent, Run, Timer, Trouble, Wait

PAGE = 60
DRILLS_LISTED = 30
#: How many of a flow's newest runs tell which fields it records.
SAMPLE = 20
DECISIONS = (
    "wait.decided",
    "handed_back",
    "cleared",
    "retry_granted",
    "effect.reconciled",
    "effect.signed_off",
    "taken_over",
)
#: What happened because its time had come.
BY_TIME = ("wait.satisfied", "wait.timed_out", "wait.reminded", "wait.escalated", "lease.lapsed", "run.unclaimed")
#: Bookkeeping that nobody searches for unless they ask for one run's whole timeline.
QUIET = ("lease.granted", "lease.retaken", "verdict", "wait.superseded")


def visible(caller: Any) -> list[uuid.UUID]:
    """The workspaces in which a person has a role."""
    return [uuid.UUID(known) for known, roles in caller.workspaces.items() if roles]


def history(caller: Any, *, filters: dict[str, str], cursor: str | None, limit: int = PAGE) -> dict[str, Any]:
    """`{results, next}`: events newest first, within the caller's workspaces; `filters`: q, kind, what, from, to.

    `q` finds a run by its id, external id or title, a person or agent by name, an effect by system, resource or key.
    """
    found = LedgerEvent.objects.filter(workspace_id__in=visible(caller)).exclude(type__in=QUIET)
    if kind := filters.get("kind"):
        found = found.filter(actor_kind=kind)
    if what := filters.get("what"):
        chosen = {
            "decisions": Q(type__in=DECISIONS),
            "effects": Q(type__startswith="effect."),
            "refused": Q(type="refused"),
            "time": Q(type__in=BY_TIME),
        }.get(what)
        if chosen is not None:
            found = found.filter(chosen)
    for name, lookup in (("from", "at__gte"), ("to", "at__lt")):
        if (moment := day(filters.get(name, ""), after=name == "to")) is not None:
            found = found.filter(**{lookup: moment})
    if text := filters.get("q", "").strip():
        found = found.filter(_search(text))
    if cursor and cursor.isascii() and cursor.isdigit() and len(cursor) < 19:
        found = found.filter(id__lt=int(cursor))
    rows = list(found.select_related("run").order_by("-id")[: limit + 1])
    more = rows[limit - 1].id if len(rows) > limit else None
    shapes = _shapes(rows[:limit])
    return {
        "results": [{**_entry(row), "run_shape": shapes.get(row.run_id)} for row in rows[:limit]],
        "next": str(more) if more else None,
    }


def _shapes(rows: list[LedgerEvent]) -> dict[Any, dict[str, Any]]:
    """Just enough of each run for the words: its effects' titles and its waits' questions, two queries a page."""
    runs = {row.run_id for row in rows}
    keys = {str(row.payload.get("key")) for row in rows if row.payload.get("key")}
    waits = {str(row.payload["wait"]) for row in rows if isinstance(row.payload.get("wait"), str)}
    shapes: dict[Any, dict[str, Any]] = {run: {"effects": [], "waits": []} for run in runs}
    for effect in Effect.objects.filter(run_id__in=runs, key__in=keys).values(
        "run_id", "key", "title", "action", "resource"
    ):
        shapes[effect["run_id"]]["effects"].append(effect)
    for wait in Wait.objects.filter(pk__in=waits).values("run_id", "id", "name", "ask"):
        shapes[wait["run_id"]]["waits"].append({**wait, "id": str(wait["id"])})
    return shapes


def timers(caller: Any, *, limit: int = 100) -> dict[str, Any]:
    """What becomes due by itself next in the caller's workspaces, and the runs to which it could not be applied:
    `{pending: [{due_at, run, shape}], more, trouble: [{run, tries, set_aside_at}]}`. `shape` is just enough of the run
    for the words: one timer, and what it is about. Three queries.
    """
    visible = [uuid.UUID(known) for known, roles in caller.workspaces.items() if roles]
    found = Timer.objects.filter(run__workspace_id__in=visible, fired_at__isnull=True, run__trouble__isnull=True)
    rows = list(found.select_related("run").order_by("due_at")[: limit + 1])
    waits = {str(w.pk): w for w in Wait.objects.filter(run_id__in={row.run_id for row in rows}, status="open")}
    keys = {row.subject for row in rows if row.kind == "expiry"}
    effects = Effect.objects.filter(run_id__in={row.run_id for row in rows}, key__in=keys) if keys else []
    acts = {(e.run_id, e.key): {"key": e.key, "title": e.title, "action": e.action} for e in effects}
    trouble = Trouble.objects.filter(run__workspace_id__in=visible).select_related("run").order_by("since")[:limit]
    return {
        "pending": [
            {
                "due_at": row.due_at,
                "run": row.run,
                "shape": _timer_shape(row, waits.get(row.subject), acts.get((row.run_id, row.subject))),
            }
            for row in rows[:limit]
        ],
        "more": len(rows) > limit,
        "trouble": list(trouble),
    }


def _timer_shape(row: Timer, wait: Wait | None, effect: dict[str, Any] | None) -> dict[str, Any]:
    then: str | None = None
    to: list[str] = []
    if wait is not None and row.kind == "deadline":
        then = "satisfied" if wait.kind == "timer" else wait.on_timeout
    if wait is not None:
        to = wait.groups if row.kind == "reminder" else wait.policy.get("escalate_to") or []
    return {
        "waits": [{"id": str(wait.pk), "name": wait.name, "ask": wait.ask}] if wait is not None else [],
        "effects": [effect] if effect is not None else [],
        "metadata": {"failures": {"count": row.run.failure_count, "limit": row.run.failure_limit}},
        "timers": [{"kind": row.kind, "subject": row.subject, "due_at": row.due_at, "then": then, "to": to}],
    }


def _search(text: str) -> Q:
    try:
        return Q(run_id=uuid.UUID(text))
    except ValueError:
        pass
    return (
        Q(run__external_id__icontains=text)
        | Q(run__title__icontains=text)
        | Q(run__flow=text)
        | Q(actor_name__icontains=text)
        | Q(actor_id=text)
        | Q(payload__key=text)
        | Q(payload__system=text)
        | Q(payload__resource=text)
        | Q(payload__id=text)
    )


def day(text: str, *, after: bool) -> dt.datetime | None:
    """Midnight of a day in the reader's zone (of the next day for an end), None when it is none."""
    try:
        day = dt.date.fromisoformat(text)
    except ValueError:
        return None
    if day.year < 2000 or day.year > 9000:
        return None
    start = dt.datetime.combine(day, dt.time.min, tzinfo=timezone.get_current_timezone())
    return start + dt.timedelta(days=1) if after else start


def _entry(row: LedgerEvent) -> dict[str, Any]:
    return {
        "seq": row.seq,
        "type": row.type,
        "actor": {"kind": row.actor_kind, "id": row.actor_id, "name": row.actor_name},
        "at": row.at,
        "payload": row.payload,
        "run_id": row.run_id,
        "run_title": row.run.title,
        "external_id": row.run.external_id,
    }


def drills(caller: Any) -> dict[str, Any]:
    """`{latest, earlier}`: the last result of each drill, and the results before, newest first. See `_result`."""
    latest = list(DrillResult.objects.order_by("drill", "-started_at").distinct("drill"))
    listed = DrillResult.objects.exclude(pk__in=[row.pk for row in latest]).order_by("-id")[:DRILLS_LISTED]
    return {"latest": _results(caller, latest), "earlier": [{"id": row.pk, **row.body} for row in listed]}


def drill_result(caller: Any, result_id: uuid.UUID) -> dict[str, Any] | None:
    """One result; None when there is none."""
    found = _results(caller, DrillResult.objects.filter(pk=result_id))
    return found[0] if found else None


def _results(caller: Any, rows: Iterable[DrillResult]) -> list[dict[str, Any]]:
    """The results as they were found, with their `id`, and `run_here`: whether the caller sees that run on this server
    (most ran on a server that was thrown away).
    """
    found = [{"id": row.pk, **row.body} for row in rows]
    runs = [result["run"]["id"] for result in found if result["run"]]
    seen = Run.objects.filter(pk__in=runs, workspace_id__in=visible(caller))
    here = set(map(str, seen.values_list("pk", flat=True)))
    return [{**result, "run_here": bool(result["run"]) and result["run"]["id"] in here} for result in found]


def flows(caller: Any) -> list[str]:
    """The names of the flows that are declared in the caller's workspaces."""
    declared = Flow.objects.filter(workspace_id__in=visible(caller))
    return list(declared.order_by("name").values_list("name", flat=True).distinct())


def recorded_fields(caller: Any, flow: str) -> list[str]:
    """Those of the ten fields that most of the flow's newest runs carry, as far as the caller may see them."""
    places = [workspace for workspace in caller.workspaces if caller.sees(workspace, flow)]
    runs = Run.objects.filter(workspace_id__in=places, flow=flow).order_by("-created_at", "-id")
    rows = list(runs.values_list("stage", "checkpoint", "input_ref", "pause_waits", "ref_count")[:SAMPLE])
    names = ("stage", "checkpoint", "input_ref", "waiting_for", "external_refs")
    seen = Counter(name for row in rows for name, value in zip(names, row, strict=True) if value)
    kept = [name for name in names if rows and seen[name] * 2 > len(rows)]
    return ["run_id", *kept] if rows else []


def runs_named(ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`{id: {pk, title, flow, external_id}}` of runs that were found within the caller's walls."""
    rows = Run.objects.filter(pk__in=set(ids)).values("pk", "title", "flow", "external_id")
    return {str(row["pk"]): dict[str, Any](row) for row in rows}
