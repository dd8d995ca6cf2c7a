"""The run track: where a run's time went, as shapes in per cent of the width. Pure; a template draws it as SVG.

Time is squeezed (a wait of days beside work of seconds would hide the work), so widths tell order and rough length;
the legend and the hover titles tell exact times.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from audit.formats import parse_time

_SQUEEZE = 0.32  # exponent: 1 s → 1, 1 min → 3.7, 1 h → 13.7, 1 d → 38
_TICKS = {
    "effect.executed": "done",
    "effect.failed": "failed",
    "effect.unknown": "unknown",
    "effect.compensated": "undone",
    "effect.compensation_unknown": "unknown",
}


_STATES = {
    "executed": "done",
    "compensated": "undone",
    "failed": "failed",
    "unknown": "unknown",
    "compensation_unknown": "unknown",
}


@dataclass(frozen=True)
class Segment:
    """A stretch of time: `kind` is work, wait, held, rest (still to come) or over (past its deadline)."""

    kind: str
    start: dt.datetime
    end: dt.datetime
    x: float = 0.0
    width: float = 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, (self.end - self.start).total_seconds())


@dataclass(frozen=True)
class Tick:
    """Something at one instant: an effect (`kind` done, unknown, failed, undone) or a person's act (`person`)."""

    kind: str
    x: float
    at: dt.datetime
    label: str = ""


@dataclass
class Track:
    """What the template draws; all x and widths are per cent."""

    segments: list[Segment] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    now: float | None = None
    deadline: float | None = None
    deadline_at: dt.datetime | None = None
    worked: float = 0.0
    waited: float = 0.0
    done: int = 0
    unknown: int = 0
    ended: str = ""
    uid: str = "hatch"

    @property
    def now_x(self) -> float:
        """Kept inside the picture, since it has a radius."""
        return min(99.0, max(1.0, self.now or 0.0))

    @property
    def deadline_x(self) -> float:
        return min(99.6, max(0.4, self.deadline or 0.0))


def from_events(run: dict[str, Any], events: list[dict[str, Any]], now: dt.datetime) -> Track:
    """The large track: segments change where the run paused, went on, was taken over, was given back or ended."""
    opened = parse_time(run.get("created_at")) or now
    # An agent that opens a run works on it; one that nobody held at first waited for somebody to come.
    came = next((parse_time(e.get("at")) for e in events if e.get("type") == "lease.granted"), None)
    at_once = came is not None and (came - opened).total_seconds() < 2
    cuts: list[tuple[dt.datetime, str]] = [(opened, "work" if at_once else "wait")]
    marks: list[tuple[dt.datetime, str, str]] = []
    latest: dict[str, int] = {}
    for event in events:
        at, kind = parse_time(event.get("at")), str(event.get("type", ""))
        if at is None:
            continue
        if kind in {"paused", "failed", "released", "lease.lapsed"}:
            cuts.append((at, "wait"))
        elif kind == "taken_over":
            cuts.append((at, "held"))
        elif kind == "handed_back":
            cuts.append((at, "wait"))
            marks.append((at, "person", kind))
        elif kind in {"lease.granted", "lease.retaken", "recalled"}:
            cuts.append((at, "work"))
        elif kind in _TICKS:
            payload = event.get("payload") or {}
            key = str(payload.get("key", ""))
            if key in latest:  # one tick an effect: its latest outcome, so that a reconciled one is unknown no more
                marks[latest[key]] = (at, _TICKS[kind], key)
            else:
                latest[key] = len(marks)
                marks.append((at, _TICKS[kind], key))
        elif (event.get("actor") or {}).get("kind") == "person":
            marks.append((at, "person", kind))
    _settle_unknown(run, marks, latest)
    return _lay_out(run, cuts, marks, now)


def from_summary(run: dict[str, Any], now: dt.datetime) -> Track:
    """The small track of a list row, without the run's events: opened, latest pause, now, deadline."""
    opened = parse_time(run.get("created_at")) or now
    cuts = [(opened, "work")]
    status = run.get("status")
    turned = parse_time(run.get("status_since")) or parse_time(run.get("updated_at")) or opened
    if status in {"waiting", "review", "ready", "compensating"}:
        cuts.append((turned, "wait"))
    elif status == "taken_over":
        cuts.append((turned, "held"))
    marks = []
    for effect in run.get("effects") or []:
        at = parse_time(effect.get("executed_at")) or parse_time(effect.get("updated_at"))
        kind = _STATES.get(str(effect.get("state")))
        if at and kind:
            marks.append((at, kind, str(effect.get("key", ""))))
    return _lay_out(run, cuts, marks, now)


def next_deadline(run: dict[str, Any]) -> dt.datetime | None:
    """The first thing to come due: an open wait's deadline, a retry, a timer; list rows bring theirs as `due_at`."""
    metadata = run.get("metadata") or {}
    open_waits = [w.get("due_at") for w in run.get("waits") or [] if w.get("status") == "open"]
    found = [*open_waits, *(w.get("until") for w in metadata.get("waiting_for") or [])]
    found += [metadata.get("timer_due_at"), run.get("due_at")]
    return min((moment for value in found if (moment := parse_time(value))), default=None)


def _settle_unknown(run: dict[str, Any], marks: list[tuple[dt.datetime, str, str]], latest: dict[str, int]) -> None:
    """Effects' present states win over the last event seen: a person's reconciling has an event of its own."""
    states = {str(e.get("key")): str(e.get("state")) for e in run.get("effects") or []}
    for key, index in latest.items():
        kind = _STATES.get(states.get(key, ""))
        if kind:
            at, _, label = marks[index]
            marks[index] = (at, kind, label)


def _lay_out(
    run: dict[str, Any],
    cuts: list[tuple[dt.datetime, str]],
    marks: list[tuple[dt.datetime, str, str]],
    now: dt.datetime,
) -> Track:
    ended = parse_time(run.get("ended_at"))
    end = ended or now
    track = Track(ended=str(run.get("status")) if ended else "", uid=f"h-{str(run.get('id') or 'x')[-12:]}")
    cuts = sorted((cut for cut in cuts if cut[0] <= end), key=lambda cut: cut[0])
    spans: list[Segment] = []
    for index, (start, kind) in enumerate(cuts):
        stop = cuts[index + 1][0] if index + 1 < len(cuts) else end
        if spans and spans[-1].kind == kind:
            spans[-1] = Segment(kind, spans[-1].start, stop)
        elif stop > start or index + 1 == len(cuts):
            spans.append(Segment(kind, start, stop))
    deadline = next_deadline(run) if not ended else None
    if deadline and deadline > now:
        spans.append(Segment("rest", now, deadline))
    weights = [max(1.0, span.seconds) ** _SQUEEZE + (2.0 if span.kind != "rest" else 0.0) for span in spans]
    scale = 100.0 / (sum(weights) or 1.0)
    x = 0.0
    for span, weight in zip(spans, weights, strict=True):
        width = weight * scale
        track.segments.append(Segment(span.kind, span.start, span.end, round(x, 2), round(width, 2)))
        x += width
        if span.kind == "work":
            track.worked += span.seconds
        elif span.kind in {"wait", "held"}:
            track.waited += span.seconds
    for at, kind, label in sorted(marks, key=lambda mark: mark[0]):
        track.ticks.append(Tick(kind, _place(track.segments, at), at, label))
    track.done = sum(tick.kind == "done" for tick in track.ticks)
    track.unknown = sum(tick.kind == "unknown" for tick in track.ticks)
    if not ended:
        past = [s for s in track.segments if s.kind != "rest"]
        track.now = round(past[-1].x + past[-1].width, 2) if past else 0.0
        if deadline:
            track.deadline_at = deadline
            track.deadline = 100.0 if deadline > now else _place(track.segments, deadline)
    return track


def _place(segments: list[Segment], at: dt.datetime) -> float:
    """Where an instant lies, linear inside its segment and kept off the very edges so that it stays visible."""
    for segment in segments:
        if segment.start <= at <= segment.end:
            share = (at - segment.start).total_seconds() / segment.seconds if segment.seconds else 0.5
            margin = min(1.2, segment.width / 4)
            return round(segment.x + margin + share * (segment.width - 2 * margin), 2)
    return 0.6 if segments and at < segments[0].start else 99.4
