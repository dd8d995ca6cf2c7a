"""Template tags that put deliveries into words. No queries, no decisions."""

from __future__ import annotations

import json
from typing import Any

from django import template
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

register = template.Library()

_LOOKS: dict[str, tuple[str, str, Any]] = {
    "pending": ("wait", "wait", gettext_lazy("To be sent")),
    "sending": ("wait", "running", gettext_lazy("Being sent")),
    "failing": ("wait", "undo", gettext_lazy("To be tried again")),
    "set_aside": ("ask", "hand", gettext_lazy("Set aside")),
    "delivered": ("go", "done", gettext_lazy("Delivered")),
    "given_up": ("stop", "fail", gettext_lazy("Given up")),
    "withdrawn": ("plain", "ended", gettext_lazy("Withdrawn")),
}
_TYPES: dict[str, Any] = {
    "run.ready": gettext_lazy("The run is ready"),
    "run.compensating": gettext_lazy("There is something to undo"),
    "run.review": gettext_lazy("The run needs a review"),
    "run.ended": gettext_lazy("The run has ended"),
    "wait.opened": gettext_lazy("A question was opened"),
}
_ERRORS: dict[str, Any] = {
    "target_refused": gettext_lazy("Its address may not be delivered to"),
    "unresolvable": gettext_lazy("Its name has no address"),
    "connect_failed": gettext_lazy("Nobody answered at its address"),
    "tls_failed": gettext_lazy("Its certificate was not accepted"),
    "timeout": gettext_lazy("It did not answer in time"),
    "broken_answer": gettext_lazy("Its answer broke off, or was none"),
    "interrupted": gettext_lazy("The sender ended before it knew the outcome"),
    "internal": gettext_lazy("It could not be sent; the log says more"),
}
_ACTS: dict[str, Any] = {
    "delivery.resent": gettext_lazy("sent it again"),
    "delivery.given_up": gettext_lazy("gave it up after three days of tries"),
}


def _look(name: str) -> dict[str, str]:
    tone, mark, word = _LOOKS[name]
    return {"tone": tone, "mark": mark, "word": str(word)}


@register.filter
def delivery_look(delivery: dict[str, Any]) -> dict[str, str]:
    """Its state, by mark and word."""
    status = str(delivery["status"])
    if delivery["sending"]:
        status = "sending"
    elif status == "pending" and delivery["last_error"]:
        status = "failing"
    return _look(status)


@register.filter
def delivery_status(status: str) -> str:
    """A status in words, for filters."""
    return _look(status)["word"]


@register.filter
def delivery_type(type_: str) -> str:
    """What it tells."""
    return str(_TYPES[type_])


@register.filter
def delivery_error(code: str | None) -> str:
    """What went wrong with an attempt; nothing for none."""
    if not code:
        return ""
    if code.startswith("http_"):
        return _("It answered %(status)s") % {"status": code.removeprefix("http_")}
    return str(_ERRORS.get(code, code))


@register.filter
def in_its_order(body: dict[str, Any]) -> str:
    """The body, indented, its fields in the order in which they are sent."""
    return json.dumps(body, ensure_ascii=False, indent=2)


@register.filter
def delivery_act(act: str) -> str:
    """What somebody did about it."""
    return str(_ACTS.get(act, act))


@register.filter
def receiver_look(receiver: dict[str, Any]) -> dict[str, str]:
    """How a receiver does, by mark and word."""
    if receiver["switched_off_at"]:
        return {"tone": "ask", "mark": "hand", "word": _("Switched off")}
    if receiver["failures"]:
        return {"tone": "stop", "mark": "warn", "word": _("Failing")}
    if receiver["answered_at"]:
        return {"tone": "go", "mark": "done", "word": _("Takes what it is sent")}
    return {"tone": "plain", "mark": "planned", "word": _("Nothing sent yet")}


@register.filter
def switched_off_why(receiver: dict[str, Any]) -> str:
    """By whom, or by what."""
    why = receiver["switched_off_why"]
    if why == "gone":
        return _("it answered 410: it wants no more")
    return _("by %(who)s") % {"who": why} if why else ""
