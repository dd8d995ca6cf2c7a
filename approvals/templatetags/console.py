"""Template tags of the console: forms, links to acts, and regions that were rendered before."""

from __future__ import annotations

import contextlib
import hashlib
from collections import OrderedDict
from typing import Any, Final
from urllib.parse import urlencode

from django import forms, template
from django.template import Context
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import get_language

from approvals.present import claimed_by

register = template.Library()


@register.filter
def is_choices(field: Any) -> bool:
    """Radio buttons or check boxes: they need a fieldset, not a label."""
    return isinstance(field.field.widget, forms.RadioSelect | forms.CheckboxSelectMultiple)


@register.filter
def in_list(value: Any, items: list[Any]) -> bool:
    """`value in items`, for tags that take it as an argument."""
    return value in items


@register.filter
def is_checkbox(field: Any) -> bool:
    """One check box: its label stands behind it."""
    return isinstance(field.field.widget, forms.CheckboxInput)


WAYS = {
    "approve": "approve",
    "approve_with_conditions": "conditions",
    "edit": "edit",
    "reject": "reject",
    "respond": "respond",
}


@register.filter
def region(regions: dict[str, str], name: str) -> SafeString:
    """A region's HTML, rendered (and escaped) by its own template."""
    return mark_safe(regions[name])  # noqa: S308 - it comes out of render_to_string


def _query(**params: Any) -> str:
    text = urlencode({name: value for name, value in params.items() if value})
    return f"?{text}" if text else ""


@register.simple_tag
def decide_link(
    ask: dict[str, Any], choice: str, scope: str = "", first: bool = False, wide: bool = False
) -> SafeString:
    """A choice as a link to its confirmation, which opens as a dialog where JavaScript runs."""
    return _button(reverse("decide", args=[ask["id"], WAYS[choice]]) + _query(scope=scope), choice, first, wide=wide)


def _is_next(run: dict[str, Any], code: str) -> bool:
    """Whether that is the first of the verdict's reasons: an answer is no remedy for anything above it."""
    reasons = (run.get("verdict") or {}).get("reasons") or [{}]
    return bool(reasons[0].get("code") == code)


@register.simple_tag
def recommend_button(button: dict[str, Any], run: dict[str, Any], scope: str = "", first: bool = False) -> SafeString:
    """A recommended act as a link to its form; of an ask's choices yes, no and answer; all stand in the bar."""
    action, subject = button.get("action"), button.get("subject")
    if action in WAYS:
        if action not in {"approve", "reject", "respond"} or not _is_next(run, "waiting"):
            return mark_safe("")
        return _button(reverse("decide", args=[subject, WAYS[action]]) + _query(scope=scope), str(action), first)
    if action == "reconcile":
        url = reverse("reconcile", args=[run["id"]]) + _query(key=subject, scope=scope)
    elif action == "sign_off":
        url = reverse("sign_off", args=[run["id"]]) + _query(key=subject, scope=scope)
    elif action == "handback":
        url = reverse("handback", args=[run["id"]])
    elif action == "takeover" and (run.get("verdict") or {}).get("outcome") != "review":
        return mark_safe("")  # always in the bar; it is advice only where a person has to act
    elif action in {"clear", "retry", "takeover"}:
        url = reverse("run_act", args=[run["id"], action]) + _query(effect=subject, scope=scope)
    else:
        return mark_safe("")
    return _button(url, str(action), first, dialog=action != "handback")


def _button(url: str, action: str, first: bool, *, dialog: bool = True, wide: bool = False) -> SafeString:
    return SafeString(
        render_to_string("_act.html", {"url": url, "action": action, "first": first, "dialog": dialog, "wide": wide})
    )


@register.simple_tag
def schema_attrs(field: Any) -> SafeString:
    """An input's limits and what describes it."""
    attrs = [(name, value) for name, value in field.limits.items()]
    if field.required:
        attrs.append(("required", "required"))
    if field.error:
        attrs.append(("aria-invalid", "true"))
    described = [f"{field.html_id}-{part}" for part in ("help", "error") if getattr(field, part)]
    if described:
        attrs.append(("aria-describedby", " ".join(described)))
    return format_html_join(" ", '{}="{}"', attrs)


@register.filter
def claimer(wait: dict[str, Any]) -> str:
    """Who has taken the question on."""
    return claimed_by(wait)


#: Rows of the inbox as they were drawn: a list that changed differs in a row or two, and drawing is most of its cost.
_drawn: OrderedDict[tuple[Any, ...], SafeString] = OrderedDict()
DRAWN_AT_MOST: Final = 2000
#: Seconds for which words of times that no script keeps ("asked 5 min ago") may stay; rows do not all end together.
DRAWN_FOR: Final = 30


@register.simple_tag(takes_context=True)
def inbox_row(context: Context, row: dict[str, Any]) -> SafeString:
    """One row of the inbox; the same for everybody who reads it in this language and zone, unless it names a holder."""
    reader = context["request"].user.pk if row["claimed_by"] else None
    shown = hashlib.sha256(repr(row).encode()).digest()
    age = (int(context["now"].timestamp()) + shown[0]) // DRAWN_FOR
    key = (get_language(), timezone.get_current_timezone_name(), context.get("scope"), reader, age, shown)
    html = _drawn.get(key)
    if html is None:
        template = context.template.engine.get_template("inbox/_row.html")  # type: ignore[union-attr]
        with context.push(row=row):
            html = _drawn[key] = template.render(context)
        if len(_drawn) > DRAWN_AT_MOST:
            with contextlib.suppress(KeyError):  # another thread took it
                _drawn.popitem(last=False)
    return html
