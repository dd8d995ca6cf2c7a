"""What flows' receivers were told: the list, one delivery with its attempts, sending again, receivers off and on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.translation import gettext, gettext_lazy, ngettext
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from approvals import live
from approvals.web import asked, caller_of, frame, go, page, say, say_refusal, sent_before, signed_in
from rehydrate import deliveries, selectors
from rehydrate.core.refusals import Refusal
from rehydrate.models import AdminEvent, Endpoint

PAGE = 50
FILTERS = ("status", "flow", "run")
STATUSES = ("pending", "set_aside", "given_up", "delivered", "withdrawn")
LIST_REGIONS = {
    "rail-scopes": "_scopes.html",
    "delivery-receivers": "deliveries/_receivers.html",
    "delivery-rows": "deliveries/_rows.html",
}
PAGE_REGIONS = {
    "rail-scopes": "_scopes.html",
    "delivery-state": "deliveries/_state.html",
    "delivery-attempts": "deliveries/_attempts.html",
}


@dataclass(frozen=True)
class Act:
    """What an operator does about a receiver, in words."""

    title: Any
    explains: Any
    button: Any
    tone: str


ACTS = {
    "off": Act(
        gettext_lazy("Switch the receiver off"),
        gettext_lazy("Nothing is sent to it any more. What is pending is set aside until it is switched on again."),
        gettext_lazy("Switch off"),
        "stop",
    ),
    "on": Act(
        gettext_lazy("Switch the receiver on again"),
        gettext_lazy("What was set aside is sent now, with three days of tries before it."),
        gettext_lazy("Switch on"),
        "main",
    ),
    "again": Act(
        gettext_lazy("Send again what was given up"),
        gettext_lazy("Each message goes out once more under the id it had, with three days of tries before it."),
        gettext_lazy("Send again"),
        "main",
    ),
}


def _load_list(request: HttpRequest) -> dict[str, Any]:
    caller = caller_of(request)
    filters = asked(request, *FILTERS)
    listed = selectors.list_deliveries(
        caller, filters=filters, cursor=asked(request, "cursor").get("cursor"), limit=PAGE, counted=False
    )
    query = request.GET.copy()
    for name in ("state", "wait", "cursor"):
        query.pop(name, None)
    return {
        **frame(request),
        "place": "deliveries",
        "rows": listed["results"],
        "next": listed["next"],
        "receivers": selectors.list_receivers(caller),
        "filters": filters,
        "statuses": STATUSES,
        "query": query.urlencode(),
    }


def _list_key(context: dict[str, Any]) -> str:
    rows = [(d["id"], d["status"], d["attempt"], d["sending"], d["next_try_at"]) for d in context["rows"]]
    return live.key_of([rows, context["receivers"], context["scopes"]])


@signed_in
@require_safe
def delivery_list(request: HttpRequest) -> HttpResponse:
    """The receivers and how they do, and the deliveries, newest first; filters live in the address."""
    context = _load_list(request)
    regions = live.render_regions(request, LIST_REGIONS, context)
    context |= {
        "regions": regions,
        "live_state": live.state_of(_list_key(context), regions),
        "live_url": reverse("deliveries_live"),
        "live_query": request.GET.urlencode(),
    }
    return page(request, "deliveries/list.html", context)


@signed_in
@require_safe
def delivery_list_live(request: HttpRequest) -> HttpResponse:
    """What changed of the list since the state that the page holds."""
    return live.answer(
        request,
        key=lambda: _list_key(_load_list(request)),
        make=lambda: live.render_regions(request, LIST_REGIONS, _load_list(request)),
        said=gettext("The list was updated."),
    )


def _load_one(request: HttpRequest, delivery_id: Any) -> dict[str, Any]:
    caller = caller_of(request)
    delivery = selectors.get_delivery(caller, str(delivery_id))
    workspace = Endpoint.objects.values_list("workspace_id", flat=True).get(pk=delivery["receiver"]["id"])
    acts = AdminEvent.objects.filter(subject=f"delivery {delivery['id']}", workspace_id=workspace)
    return {
        **frame(request),
        "place": "deliveries",
        "delivery": delivery,
        "acts": list(acts.order_by("-id")[:PAGE]),
        "may_operate": caller.may(str(workspace), "operator"),
    }


def _one_key(context: dict[str, Any]) -> str:
    return live.key_of([context["delivery"], len(context["acts"]), context["scopes"]])


@signed_in
@require_safe
def delivery_page(request: HttpRequest, delivery_id: Any) -> HttpResponse:
    """One delivery: what happens next and when, every attempt, and what people did about it."""
    context = _load_one(request, delivery_id)
    regions = live.render_regions(request, PAGE_REGIONS, context)
    context |= {
        "regions": regions,
        "live_state": live.state_of(_one_key(context), regions),
        "live_url": reverse("delivery_live", args=[delivery_id]),
    }
    return page(request, "deliveries/page.html", context)


@signed_in
@require_safe
def delivery_live(request: HttpRequest, delivery_id: Any) -> HttpResponse:
    """What changed of it since the state that the page holds."""
    return live.answer(
        request,
        key=lambda: _one_key(_load_one(request, delivery_id)),
        make=lambda: live.render_regions(request, PAGE_REGIONS, _load_one(request, delivery_id)),
        said=gettext("This delivery has changed."),
    )


@signed_in
@require_POST
def resend(request: HttpRequest, delivery_id: Any) -> HttpResponse:
    """Sends the message once more, under the same id."""
    if not sent_before(request):
        try:
            deliveries.resend(caller_of(request), str(delivery_id))
            say(request, gettext("It is being sent again."))
        except Refusal as refusal:
            if refusal.code != "invalid":
                raise
            say_refusal(request, refusal)
    return go(request, reverse("delivery", args=[delivery_id]))


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def receiver_act(request: HttpRequest, endpoint_id: Any, name: str) -> HttpResponse:
    """A confirmation, then the act: a receiver off, on again, or what was given up sent again."""
    caller = caller_of(request)
    receiver = next((r for r in selectors.list_receivers(caller) if r["id"] == str(endpoint_id)), None)
    if receiver is None or name not in ACTS:
        raise Http404
    if not receiver["may_operate"]:
        raise Refusal("forbidden", "Only operators look after receivers.")
    if request.method != "POST":
        return page(
            request,
            "deliveries/act.html",
            {"place": "deliveries", "receiver": receiver, "name": name, "act": ACTS[name]},
        )
    if not sent_before(request):
        if name == "again":
            count = deliveries.resend_given_up(caller, str(endpoint_id))
            say(request, ngettext("%(n)d is being sent again.", "%(n)d are being sent again.", count) % {"n": count})
        else:
            deliveries.switch(caller, str(endpoint_id), on=name == "on")
            on = gettext("The receiver is on again: what was set aside is on its way.")
            say(request, on if name == "on" else gettext("The receiver is off: nothing is sent to it."))
    return go(request, reverse("deliveries"))
