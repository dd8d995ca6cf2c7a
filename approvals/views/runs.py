"""The list of runs and a run's page, which is also the page to decide on."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from approvals import live, present, reads
from approvals.forms import CommentForm
from approvals.web import asked, caller_of, frame, page, signed_in
from rehydrate import selectors, wakeups
from rehydrate.core.refusals import Refusal

EVENTS = 200
RUN_FILTERS = ("q", "status", "flow", "stage", "system", "resource", "external_id", "label", "older_than")
STATUSES = ("running", "waiting", "ready", "review", "compensating", "taken_over", "completed", "terminated")
REGIONS = {
    "rail-scopes": "_scopes.html",
    "run-head": "run/_head.html",
    "run-next": "run/_next.html",
    "run-body": "run/_body.html",
    "run-timeline": "run/_timeline.html",
    "run-bar": "run/_bar.html",
}


@signed_in
@require_safe
def run_list(request: HttpRequest) -> HttpResponse:
    """Runs of every state, by search and filters that live in the address."""
    filters = asked(request, *RUN_FILTERS)
    cursor = asked(request, "cursor").get("cursor")
    sought = filters | asked(request, "within")
    listed, named = selectors.find_runs(caller_of(request), filters=sought, cursor=cursor, limit=50)
    ticks = reads.effects_of([run["id"] for run in listed["results"]])
    query = request.GET.copy()
    query.pop("cursor", None)
    return page(
        request,
        "run/list.html",
        {
            "place": "runs",
            "runs": [{**run, "effects": ticks.get(run["id"], [])} for run in listed["results"]],
            "next": listed.get("next"),
            "total": listed["total"],
            "counted_to": selectors.COUNTED_TO,
            "named": named,
            "filters": filters,
            "statuses": STATUSES,
            "query": query.urlencode(),
        },
    )


def load(request: HttpRequest, run_id: Any) -> dict[str, Any]:
    """A run as its page shows it."""
    caller = caller_of(request)
    run = selectors.get_run(caller, str(run_id))
    events = reads.newest_events(run["id"], EVENTS)
    wait = present.bar_wait(run, request.GET.get("wait", ""))
    asks = [present.ask_view(w, run, events) for w in present.open_approvals(run)]
    current = next((a for a in asks if wait and a["id"] == wait["id"]), None)
    workspace = str(run.get("workspace") or "")
    return {
        **frame(request),
        "place": "run",
        "run": run,
        "events": events,
        "shown_events": present.timeline(events),
        "events_before": int(run["version"]) > len(events),
        "asks": asks,
        "ask": current,
        "bar": present.bar_of(current) if current else None,
        "others": present.other_waits(run),
        "effects": present.effects_view(run),
        "follows": present.follows(run, wait),
        "ten": present.ten_view(run),
        "wrong": present.wrong_view(run),
        "held": run.get("status") == "taken_over",
        "ended": run.get("ended_at"),
        "may_see_deliveries": caller_may(caller, workspace, "operator") or caller_may(caller, workspace, "auditor"),
        "deliveries": selectors.deliveries_of_run(run["id"]),
        "may_operate": caller_may(caller, workspace, "operator"),
        "may_see_raw": caller_may(caller, workspace, "auditor"),
    }


def caller_may(caller: Any, workspace: str, role: str) -> bool:
    """Whether the caller holds the role there; the run may name its workspace by id or by name."""
    return any(caller.may(known, role) for known in caller.workspaces if workspace in {known, ""}) or (
        workspace not in caller.workspaces and any(caller.may(known, role) for known in caller.workspaces)
    )


def _key(request: HttpRequest, run_id: Any) -> str:
    """Another one whenever the run or the counts are: whatever happens to a run grows its version."""
    caller = caller_of(request)
    return live.key_of(selectors.versions_of(caller, str(run_id)), selectors.inbox_counts(caller))


@signed_in
@require_safe
def run_page(request: HttpRequest, run_id: Any) -> HttpResponse:
    """What happened, what should happen next, and the buttons for it."""
    try:
        key = _key(request, run_id)
        context = load(request, run_id)
    except Refusal:
        raise
    except Exception:
        aside = _set_aside(request, run_id)
        if aside is None:
            raise
        return aside
    regions = live.render_regions(request, REGIONS, context)
    query = request.GET.copy()
    query.pop("state", None)
    context |= {
        "regions": regions,
        "live_state": live.state_of(key, regions),
        "live_url": reverse("run_live", args=[run_id]),
        "live_query": query.urlencode(),
        "comment_form": CommentForm(),
        "queue": _queue(request, context),
    }
    return page(request, "run/page.html", context)


def _set_aside(request: HttpRequest, run_id: Any) -> HttpResponse | None:
    """The page of a run whose state cannot be read or worked out, where that is known; None where it is not."""
    caller = caller_of(request)
    trouble = selectors.trouble(caller, str(run_id))
    if trouble is None:
        return None
    run = trouble["run"]
    operates = caller.may(run["workspace_id"], "operator")
    return page(request, "run/aside.html", {"place": "run", "run": run, "trouble": trouble, "may_operate": operates})


def _queue(request: HttpRequest, context: dict[str, Any]) -> list[dict[str, Any]]:
    """The scope one came from, beside the run on wide screens."""
    scope = context["scope"]
    if not scope:
        return []
    listed = selectors.inbox(caller_of(request), scope=scope, filters={}, cursor=None, limit=30)
    return [present.row(item) for item in listed["results"]]


@signed_in
@require_safe
def run_live(request: HttpRequest, run_id: Any) -> HttpResponse:
    """What changed of it since the state that the page holds."""
    return live.answer(
        request,
        key=lambda: _key(request, run_id),
        make=lambda: live.render_regions(request, REGIONS, load(request, run_id)),
        counts=lambda: live.render_counts(request, "run"),
        topics=[wakeups.run(str(run_id))],
        said=_("This run has changed."),
    )


@signed_in
@require_safe
def timeline(request: HttpRequest, run_id: Any) -> HttpResponse:
    """All events of a run, page by page."""
    caller = caller_of(request)
    run = selectors.get_run(caller, str(run_id))
    listed = selectors.list_events(caller, str(run_id), cursor=asked(request, "cursor").get("cursor"), limit=EVENTS)
    return page(
        request,
        "run/timeline.html",
        {
            "place": "runs",
            "run": run,
            "events": listed["results"],
            "events_next": listed.get("next"),
            "events_total": listed.get("total"),
            "may_see_raw": caller_may(caller, str(run.get("workspace") or ""), "auditor"),
        },
    )
