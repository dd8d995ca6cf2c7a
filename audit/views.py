"""The history, and how well recovery goes: drills. Reads only."""

from __future__ import annotations

import uuid
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from approvals.web import asked, caller_of, page, signed_in
from audit import drills as drill_words
from audit import selectors
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
