"""The history: who did what, when, across runs. Reads only."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from approvals.web import asked, caller_of, page, signed_in
from audit import selectors

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
