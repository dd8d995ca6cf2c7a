"""The history, and how well recovery goes: metrics, drills, readiness. Reads only."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext
from django.views.decorators.http import require_http_methods, require_safe

from approvals.web import asked, caller_of, page, signed_in
from audit import drills as drill_words
from audit import metrics, readiness, recovery, selectors
from rehydrate import clock
from rehydrate.core.refusals import Refusal

FILTERS = ("q", "kind", "what", "from", "to")


@signed_in
@require_safe
def history(request: HttpRequest) -> HttpResponse:
    """Events of all runs that the person may see, newest first; search and filters live in the address."""
    filters = asked(request, *FILTERS)
    listed = selectors.history(caller_of(request), filters=filters, cursor=asked(request, "cursor").get("cursor"))
    query = request.GET.copy()
    query.pop("cursor", None)
    return page(
        request,
        "audit/history.html",
        {
            "place": "history",
            "entries": listed["results"],
            "next": listed["next"],
            "filters": filters,
            "query": query.urlencode(),
        },
    )


# --- how well recovery goes

DAYS = (7, 30, 90)
LISTED = 200


@signed_in
@require_safe
def recovery_page(request: HttpRequest) -> HttpResponse:
    """The six metrics of a period, all flows or one: figures, what they mean, charts, and by flow."""
    filters, period, backwards = _period(request)
    report = metrics.report(period, recovery.step_of(period.start, period.end))
    query = request.GET.urlencode()
    names = sorted({*selectors.flows(caller_of(request)), *report["flows"]})
    return page(
        request,
        "audit/recovery.html",
        {
            "place": "recovery",
            "filters": filters,
            "flows": names,
            "days": DAYS,
            "backwards": backwards,
            "period": period,
            "cards": recovery.cards(report, start=period.start, end=period.end),
            "by_flow": recovery.by_flow(report),
            "titles": [metric.title for metric in recovery.METRICS.values()],
            "query": query,
        },
    )


@signed_in
@require_safe
def recovery_runs(request: HttpRequest, metric: str) -> HttpResponse:
    """The runs behind one figure, the newest first."""
    if metric not in recovery.METRICS:
        raise Http404
    _, period, _ = _period(request)
    rows = metrics.behind(metric, period, limit=LISTED + 1)
    runs = selectors.runs_named(run for run, _, _ in rows)
    return page(
        request,
        "audit/recovery_runs.html",
        {
            "place": "recovery",
            "metric": recovery.METRICS[metric],
            "period": period,
            "entries": [{"run": runs[run], "at": at, "length": seconds} for run, at, seconds in rows[:LISTED]],
            "more": len(rows) > LISTED,
            "listed": LISTED,
            "query": request.GET.urlencode(),
        },
    )


def _period(request: HttpRequest) -> tuple[dict[str, str], metrics.Period, bool]:
    """What the address asks for: whole days in the reader's zone, or the last so many days (30), within the person's
    walls. The last value says that it ended before it began, so that the usual period is shown.
    """
    filters = asked(request, "flow", "from", "to", "days")
    now = clock.now()
    days = next((days for days in DAYS if filters.get("days") == str(days)), 30)
    end = selectors.day(filters.get("to", ""), after=True) or now
    start = selectors.day(filters.get("from", ""), after=False) or end - dt.timedelta(days=days)
    backwards = start >= end
    if backwards:
        start, end = now - dt.timedelta(days=days), now
    period = metrics.Period(
        workspaces=[str(known) for known in selectors.visible(caller_of(request))],
        flows=[filters["flow"]] if "flow" in filters else None,
        start=start,
        end=end,
    )
    return filters, period, backwards


# --- would it have been there

ROWS = 5
MOST_ROWS = 40


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def readiness_page(request: HttpRequest) -> HttpResponse:
    """What had to be looked up to recover one real incident, as a form, and what that says. Nothing is kept."""
    sent = request.POST
    count = min(MOST_ROWS, max(ROWS, sum(name.startswith("what-") for name in sent) + ("add_row" in sent)))
    rows = [
        {name: sent.get(f"{name}-{n}", "").replace("\x00", "").strip()[:500] for name in ("what", "where", "field")}
        | {"index": n}
        for n in range(count)
    ]
    said = {name: name in sent for name in ("happened_outside", "spans_days")}
    flow = sent.get("flow", "").replace("\x00", "").strip()[:100]
    report = None
    if request.method == "POST" and "add_row" not in sent:
        report = _readiness(caller_of(request), flow, rows, **said)
    return page(
        request,
        "audit/readiness.html",
        {
            "place": "readiness",
            "flows": selectors.flows(caller_of(request)),
            "flow": flow,
            "rows": rows,
            "fields": readiness.FIELDS,
            "said": said,
            "report": report,
        },
    )


def _readiness(caller: Any, flow: str, rows: list[dict[str, Any]], **said: bool) -> dict[str, Any]:
    """The report of `audit.readiness`, and with it the ten with their states, what was looked up for each of those
    that were missing, and as `unknown` what no field was recognised in.
    """
    asked_for = [{**row, "fields": readiness.fields_of(row["field"] or row["what"])} for row in rows]
    asked_for = [row for row in asked_for if row["what"] or row["field"]]
    recorded = selectors.recorded_fields(caller, flow) if flow else []
    report = readiness.report(**said, looked_up=[row["field"] or row["what"] for row in asked_for], recorded=recorded)
    advice = [
        {
            "field": item["field"],
            "send": gettext(item["send"]),
            "example": json.dumps(item["example"], ensure_ascii=False, indent=2),
            "looked": [row for row in asked_for if item["field"] in row["fields"]],
        }
        for item in report["advice"]
    ]
    states = {**dict.fromkeys(recorded, "recorded"), **dict.fromkeys(report["missing"], "missing")}
    ten = [{"name": field, "state": states.get(field, "empty")} for field in readiness.FIELDS]
    return {**report, "advice": advice, "ten": ten, "unknown": [row for row in asked_for if not row["fields"]]}


# --- drills


@signed_in
@require_safe
def timers(request: HttpRequest) -> HttpResponse:
    """What happens by itself next, what could not be applied, and what has happened because its time had come."""
    caller = caller_of(request)
    fired = selectors.history(caller, filters={"what": "time"}, cursor=None, limit=30)
    found = selectors.timers(caller)
    return page(request, "audit/timers.html", {"place": "timers", **found, "fired": fired["results"]})


@signed_in
@require_safe
def drills(request: HttpRequest) -> HttpResponse:
    """The last result of each drill, what to paste into a release checklist, and the results before."""
    found = selectors.drills(_who_runs_this(request))
    order = {name: place for place, name in enumerate(drill_words.NAMES)}
    latest = sorted(found["latest"], key=lambda result: order.get(result["drill"], len(order)))
    return page(
        request,
        "audit/drills.html",
        {"place": "drills", "latest": latest, "earlier": found["earlier"], "names": drill_words.NAMES},
    )


@signed_in
@require_safe
def drill_result(request: HttpRequest, result_id: uuid.UUID) -> HttpResponse:
    """One result, as it was found."""
    found = selectors.drill_result(_who_runs_this(request), result_id)
    if found is None:
        raise Http404
    return page(request, "audit/drill_result.html", {"place": "drills", "result": found})


def _who_runs_this(request: HttpRequest) -> Any:
    """The caller, when they run or audit some workspace here: drills are about the installation, not about a run."""
    caller = caller_of(request)
    if not caller.runs_something():
        raise Refusal("forbidden", "Drills are for operators, auditors and administrators.")
    return caller
