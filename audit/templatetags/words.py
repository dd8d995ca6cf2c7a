"""Template tags for words: times, money, marks, and the sentences of `audit.narrative`. No queries, no decisions."""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import Any

from django import template
from django.template.context import Context
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import Urlizer, format_html, json_script
from django.utils.safestring import SafeString, mark_safe

from audit import drills, formats, narrative, recovery, track

register = template.Library()


def _now(context: Context) -> dt.datetime:
    return formats.parse_time(context.get("now")) or timezone.now()


@register.simple_tag(takes_context=True)
def when(context: Context, value: Any, form: str = "auto") -> SafeString | str:
    """`<time>` in words, exact on hover. Forms: auto ("2 h ago", "in 2 h"), left, for, clock ("16:02"), exact."""
    moment = formats.parse_time(value)
    if moment is None:
        return "–"
    now = _now(context)
    if form == "clock":
        said = formats.clock(moment, now)
    elif form == "exact":
        said = formats.exact(moment)
    else:
        said = formats.relative(moment, now, form)
    live = form not in {"clock", "exact"}
    return format_html(
        '<time datetime="{}" title="{}"{}>{}</time>',
        moment.isoformat(),
        formats.exact(moment),
        format_html(' data-form="{}"', form) if live else "",
        said,
    )


@register.filter
def moment(value: Any) -> dt.datetime | None:
    """The datetime of a contract time string, for comparisons in a template."""
    return formats.parse_time(value)


@register.filter
def duration(seconds: Any) -> str:
    """Seconds as "1 h 12 min"."""
    return formats.duration(float(seconds or 0))


@register.filter
def money(value: Any) -> str:
    """`{value, currency}` as money."""
    return formats.plain(value) if formats.is_money(value) else ""


@register.filter
def plain(value: Any) -> str:
    """Any JSON value in words."""
    return formats.plain(value)


@register.filter
def happened_twice(effect: dict[str, Any]) -> str:
    """The alarm of an effect with two receipts, as a sentence."""
    return narrative.reason({"code": "effect_repeated", "subject": effect["key"]}, {"effects": [effect]})


@register.filter
def humanise(value: Any) -> str:
    """A field's name as a label."""
    return formats.humanise(value)


@register.filter
def pretty(value: Any) -> str:
    """JSON as it is, indented, for the folded-away raw view."""
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True, default=str)


@register.simple_tag
def mark(name: str) -> SafeString:
    """One symbol of the sprite, decoration only: the word always stands beside it."""
    return format_html('<svg class="mark" aria-hidden="true"><use href="{}#{}"/></svg>', static("marks.svg"), name)


@register.simple_tag
def tag(look: dict[str, str], extra: str = "") -> SafeString:
    """A state told by mark and word."""
    return format_html(
        '<span class="tag" data-tone="{}">{}{}{}</span>', look["tone"], mark(look["mark"]), look["word"], extra
    )


@register.simple_tag
def time_patterns() -> SafeString:
    """The duration patterns as a data block for the browser's clock."""
    return json_script(formats.patterns(), "time-patterns")


@register.filter
def run_status(code: Any) -> dict[str, str]:
    return narrative.run_status(code)


@register.filter
def effect_state(code: Any) -> dict[str, str]:
    return narrative.effect_state(code)


@register.filter
def wait_status(code: Any) -> dict[str, str]:
    return narrative.wait_status(code)


@register.filter
def risk_look(code: Any) -> dict[str, str]:
    return narrative.risk(code)


@register.filter
def impact(code: Any) -> str:
    return narrative.word(narrative.IMPACT, code)


@register.filter
def choice(code: Any) -> str:
    return narrative.word(narrative.CHOICE, code)


@register.filter
def action(code: Any) -> str:
    return narrative.word(narrative.ACTION, code)


@register.filter
def metadata_field(code: Any) -> str:
    return narrative.word(narrative.FIELDS, code)


@register.filter
def scope(code: Any) -> str:
    return narrative.word(narrative.SCOPES, code)


@register.filter
def scope_empty(code: Any) -> str:
    return narrative.word(narrative.SCOPE_EMPTY, code)


@register.filter
def on_timeout(code: Any) -> str:
    return narrative.word(narrative.ON_TIMEOUT, code)


@register.filter
def refusal(code: Any) -> str:
    return narrative.refusal(code)


@register.filter
def decision(item: dict[str, Any]) -> str:
    return narrative.decision(item)


@register.filter
def waiting_for(wait: dict[str, Any]) -> str:
    return narrative.waiting_for(wait)


@register.filter
def conditions(items: list[dict[str, Any]] | None) -> list[str]:
    return narrative.conditions(items)


@register.filter
def actor(item: dict[str, Any] | None) -> str:
    return narrative.actor(item)


@register.filter
def error(value: Any) -> str:
    return narrative.error(value)


@register.filter
def effect_name(effect: dict[str, Any]) -> str:
    return narrative.effect_name(effect)


@register.simple_tag
def reason(item: dict[str, Any], run: dict[str, Any] | None = None) -> str:
    return narrative.reason(item, run)


@register.simple_tag
def subject(value: Any, run: dict[str, Any] | None = None) -> str:
    return narrative.subject(value, run)


@register.simple_tag
def told(event: dict[str, Any], run: dict[str, Any] | None = None) -> str:
    """An event in words, without its actor."""
    return narrative.event(event, run)


@register.simple_tag
def told_line(event: dict[str, Any], run: dict[str, Any] | None = None) -> dict[str, str]:
    """`{actor, text}` of an event."""
    return narrative.line(event, run)


@register.simple_tag
def upcoming(run: dict[str, Any]) -> list[dict[str, Any]]:
    return narrative.upcoming(run)


@register.simple_tag
def recommended(run: dict[str, Any]) -> dict[str, Any]:
    return narrative.recommended(run)


@register.filter
def who(value: Any) -> str:
    """A person by name: of a decision, of an object with a name, or the name itself."""
    if isinstance(value, dict) and "decided_by" in value:
        value = value.get("decided_by_name") or value["decided_by"]
    return narrative.actor(value)


@register.filter
def voter(vote: dict[str, Any]) -> str:
    return narrative.actor(vote.get("decided_by_name") or vote.get("name") or vote.get("decided_by") or vote.get("by"))


@register.filter
def voted_at(vote: dict[str, Any]) -> Any:
    return vote.get("decided_at") or vote.get("at")


@register.filter
def segment(kind: Any) -> str:
    return narrative.word(narrative.SEGMENT, kind)


@register.filter
def op_word(op: Any) -> str:
    return narrative.word(narrative.OPS, op)


@register.filter
def n(number: float) -> str:
    """A number for an SVG attribute, whatever the language's decimal sign."""
    return f"{number:.2f}"


@register.filter
def ago(value: Any, now: Any) -> str:
    """A time in words without its element, for use inside a sentence."""
    moment, present = formats.parse_time(value), formats.parse_time(now)
    return formats.relative(moment, present) if moment and present else "–"


@register.filter
def soon(value: Any, now: Any) -> str:
    """ "over" past a deadline, "soon" in its last two hours, else empty."""
    moment, present = formats.parse_time(value), formats.parse_time(now)
    if not moment or not present:
        return ""
    seconds = (moment - present).total_seconds()
    return "over" if seconds <= 0 else "soon" if seconds < 2 * formats.HOUR else ""


@register.simple_tag
def sprite() -> str:
    return static("marks.svg")


@register.simple_tag
def track_words(drawn: track.Track) -> str:
    return narrative.track(drawn)


@register.simple_tag
def step_words(item: dict[str, Any]) -> str:
    return narrative.step(item)


@register.simple_tag
def ten_value(item: dict[str, Any]) -> str:
    return narrative.ten_value(item["name"], item["value"])


@register.simple_tag
def wait_word(wait: dict[str, Any]) -> str:
    return narrative.wait_status(wait.get("status"))["word"]


@register.simple_tag(takes_context=True)
def effect_time(
    context: Context, effect: dict[str, Any], events: list[dict[str, Any]] | None = None
) -> SafeString | str:
    """When an effect was carried out, or last changed."""
    at = (
        effect.get("executed_at")
        or effect.get("updated_at")
        or next(
            (
                event.get("at")
                for event in reversed(events or [])
                if str(event.get("type", "")).startswith("effect.")
                and (event.get("payload") or {}).get("key") == effect.get("key")
            ),
            None,
        )
    )
    return when(context, at, "clock") if at else ""


def _link(url: Any, text: Any) -> SafeString | str:
    """A link out of the console: http and https only, so that no agent's text becomes a script."""
    address = str(url or "")
    if not address.lower().startswith(("https://", "http://")):
        return str(text)
    return format_html('<a href="{}" rel="noopener noreferrer nofollow" target="_blank">{}</a>', address, text)


class _Linker(Urlizer):
    """Django's, for whole http(s) addresses only; as careful as `_link`."""

    trailing_punctuation_chars = Urlizer.trailing_punctuation_chars + "”’»。，、；：！？）】》"
    simple_url_2_re = re.compile(r"(?!)")
    url_template = '<a href="{href}" rel="noopener noreferrer nofollow" target="_blank"{attrs}>{url}</a>'

    @staticmethod
    def is_email_simple(value: str) -> bool:
        return False


_linker = _Linker()


@register.filter
def linked(text: Any) -> SafeString:
    """Plain text with its addresses to click on; everything else in it is escaped."""
    return mark_safe(_linker(str(text), autoescape=True))  # noqa: S308 - it escapes what is not safe already


@register.simple_tag
def ref_link(ref: dict[str, Any]) -> SafeString | str:
    """What the run is called in another system, as a link where the agent gave one."""
    return format_html(
        "{} · {}: {}", ref.get("system") or "–", ref.get("type") or "–", _link(ref.get("url"), ref.get("id"))
    )


@register.simple_tag
def evidence_link(item: dict[str, Any]) -> SafeString | str:
    return _link(item.get("url"), item.get("title") or item.get("url"))


@register.simple_tag
def receipt_link(receipt: dict[str, Any]) -> SafeString | str:
    return _link(receipt.get("url"), receipt.get("id"))


@register.inclusion_tag("run/_track.html", takes_context=True)
def run_track(context: Context, run: dict[str, Any], events: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The run track: large with the run's events, small without."""
    now = _now(context)
    drawn = track.from_events(run, events, now) if events is not None else track.from_summary(run, now)
    return {"track": drawn, "large": events is not None, "run": run, "now": now}


@register.filter
def drill_title(name: str) -> str:
    return drills.title(name)


@register.filter
def drill_about(name: str) -> str:
    return drills.about(name)


@register.filter
def drill_checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    return drills.checks(result)


@register.filter
def drill_steps(result: dict[str, Any]) -> list[str]:
    return drills.steps(result)


@register.filter
def drill_look(result: dict[str, Any]) -> dict[str, str]:
    """Passed or failed, as a tag."""
    return {"tone": "go" if result["passed"] else "stop", "mark": "done" if result["passed"] else "fail",
            "word": drills.passed(result)}  # fmt: skip


@register.filter
def drill_server(result: dict[str, Any]) -> str:
    return drills.server(result)


@register.filter
def drill_markdown(results: Any) -> str:
    """A checklist to paste, of one result or of several."""
    return drills.markdown([results] if isinstance(results, dict) else list(results))


@register.filter
def length_words(seconds: float) -> str:
    """A length of time, in tenths of a second when it is short."""
    return recovery.length(seconds)
