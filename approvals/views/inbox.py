"""The inbox: scopes, search, filters, saved views, and deciding several low-risk asks at once."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_POST, require_safe

from approvals import live, present, reads
from approvals.forms import SavedViewForm
from approvals.models import SavedView
from approvals.web import asked, body, caller_of, frame, page, person, say, scope_of, sent_before, signed_in
from rehydrate import selectors, services
from rehydrate.core import commands
from rehydrate.core.refusals import Refusal

PAGE = 50
FILTERS = ("q", "flow", "risk")
OPENS_ON = ("mine", "available", "review", "unknown", "overdue", "taken_over")
REGIONS = {"rail-scopes": "_scopes.html", "inbox-rows": "inbox/_rows.html"}
BULK_MAX = 50


def load(request: HttpRequest) -> dict[str, Any]:
    """One scope of the inbox as its page shows it."""
    framed = frame(request)
    scope = framed["scope"] or _first_with_work(framed["scopes"])
    filters = asked(request, *FILTERS)
    listed = selectors.inbox(
        caller_of(request), scope=scope, filters=filters, cursor=asked(request, "cursor").get("cursor"), limit=PAGE
    )
    ticks = reads.effects_of([str(item["run"]["id"]) for item in listed["results"]])
    rows = [present.row(item, ticks) for item in listed["results"]]
    if filters.get("risk"):
        rows = [r for r in rows if r["risk"] == filters["risk"]]
    return {
        **framed,
        "place": "inbox",
        "scope": scope,
        "rows": rows,
        "next": listed.get("next"),
        "total": listed["total"],
        "counted_to": selectors.COUNTED_TO,
        "filters": filters,
        "filtered": bool(filters),
        "query": _query(request, scope),
        "bulk_rows": [r for r in rows if r["bulk"]],
    }


def _first_with_work(scopes: list[dict[str, Any]]) -> str:
    """Where the inbox opens when its address names no scope; with no work at all, where new work will show."""
    counts = {scope["id"]: scope["count"] for scope in scopes}
    return next((name for name in OPENS_ON if counts.get(name)), "available")


def _query(request: HttpRequest, scope: str) -> str:
    """The address as it is kept: with the scope, so that the list under somebody's eyes never becomes another one."""
    query = request.GET.copy()
    query["scope"] = scope
    for name in ("state", "wait", "cursor"):
        query.pop(name, None)
    return query.urlencode()


def _key(request: HttpRequest) -> str:
    """Another one whenever the list or the counts are: what is told of a run grows its version."""
    scope = scope_of(request)
    if not scope:
        return ""  # the page chooses one; it asks for news of that one next
    place = asked(request, "cursor").get("cursor")
    listed = selectors.inbox_versions(
        caller_of(request), scope=scope, filters=asked(request, *FILTERS), cursor=place, limit=PAGE
    )
    return live.key_of([scope, listed], selectors.inbox_counts(caller_of(request)))


@signed_in
@require_safe
def inbox(request: HttpRequest) -> HttpResponse:
    """The first page."""
    key = _key(request)
    context = load(request)
    regions = live.render_regions(request, REGIONS, context)
    context |= {
        "regions": regions,
        "live_state": live.state_of(key, regions),
        "live_url": reverse("inbox_live"),
        "live_query": context["query"],
        "views": SavedView.objects.filter(user=person(request)),
        "save_form": SavedViewForm(),
    }
    return page(request, "inbox/page.html", context)


@signed_in
@require_safe
def inbox_live(request: HttpRequest) -> HttpResponse:
    """What changed since the state that the page holds."""
    return live.answer(
        request,
        key=lambda: _key(request),
        make=lambda: live.render_regions(request, REGIONS, load(request)),
        counts=lambda: live.render_counts(request, "inbox"),
        said=_("The list was updated."),
    )


@signed_in
@require_safe
def scopes_live(request: HttpRequest) -> HttpResponse:
    """The rail's counts alone, for pages that have nothing else that lives."""
    return live.answer(
        request,
        key=lambda: live.key_of(selectors.inbox_counts(caller_of(request))),
        make=lambda: live.render_counts(request),
    )


@signed_in
@require_POST
def save_view(request: HttpRequest) -> HttpResponse:
    """Keeps the inbox's address under a name, or forgets one."""
    if request.POST.get("forget"):
        SavedView.objects.filter(user=person(request), pk=_number(request.POST["forget"])).delete()
        say(request, _("The view is gone."))
        return HttpResponseRedirect(reverse("inbox"))
    form = SavedViewForm(request.POST)
    query = request.POST.get("query", "")[:500]
    if form.is_valid():
        SavedView.objects.update_or_create(
            user=person(request), name=form.cleaned_data["name"], defaults={"query": query}
        )
        say(request, _("The view is kept."))
    return HttpResponseRedirect(reverse("inbox") + (f"?{query}" if query else ""))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 15 else 0


@signed_in
def bulk(request: HttpRequest) -> HttpResponse:
    """Several low-risk asks of one kind: GET lists them to confirm, POST answers each and tells the result of each."""
    source = request.POST if request.method == "POST" else request.GET
    rows = []
    for wait_id in list(dict.fromkeys(source.getlist("wait")))[:BULK_MAX]:
        try:
            wait = selectors.get_wait(caller_of(request), wait_id)
            run = selectors.get_run(caller_of(request), wait["run"])
        except Refusal:
            continue
        rows.append(present.row({"wait": wait, "run": run}))
    flows = {r["flow"] for r in rows}
    fit = bool(rows) and len(flows) == 1 and all(r["bulk"] for r in rows)
    if request.method != "POST" or not fit or sent_before(request):
        return page(request, "inbox/bulk.html", {"rows": rows, "fit": fit, "place": "inbox"})
    results = []
    for row in rows:
        # the version that was listed, not the newest: an ask that changed in between is not decided unseen
        version = source.get(f"version-{row['wait_id']}", "")
        try:
            services.decide(
                caller_of(request),
                row["wait_id"],
                body(
                    commands.Decide,
                    choice="approve",
                    wait_version=_number(version) or None,
                    seen=present.seen_by_reviewer(row["run"], row["wait"]),
                ),
            )
            results.append({"row": row, "code": ""})
        except Refusal as refusal:
            results.append({"row": row, "code": refusal.code})
    good = sum(not r["code"] for r in results)
    said = ngettext("%(n)d was approved.", "%(n)d were approved.", good) % {"n": good}
    return page(request, "inbox/bulk.html", {"results": results, "said": said, "place": "inbox"})
