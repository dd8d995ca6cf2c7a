"""The recovery metrics as a person reads them: figures, what they mean, charts. Pure but for the language."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.utils.functional import Promise
from django.utils.translation import gettext, gettext_lazy

from audit import formats

Figures = dict[str, Any]

CHART_WIDTH, CHART_HEIGHT = 300.0, 56.0
MOST_STEPS = 31


@dataclasses.dataclass(frozen=True)
class Metric:
    """`value` is what the chart shows, `figure` the number to read, `detail` what it was counted from."""

    title: Promise
    meaning: Promise
    value: Callable[[Figures], float | None]
    figure: Callable[[Figures], str]
    detail: Callable[[Figures], str]


def length(seconds: float | None) -> str:
    """ "0.4 s" below ten seconds, else as durations are told everywhere."""
    if seconds is None:
        return "–"
    return gettext("%(s)s s") % {"s": f"{seconds:.1f}"} if seconds < 10 else formats.duration(seconds)


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %".replace(".0 %", " %")


def _resumed(found: Figures) -> str:
    if not found["count"]:
        return gettext("No run was resumed.")
    said = {"count": found["count"], "p95": length(found["p95"])}
    return gettext("Resumes: %(count)s; 95 of 100 within %(p95)s") % said


def _of(none: Promise, said: Promise) -> Callable[[Figures], str]:
    return lambda found: str(said) % found if found["of"] else str(none)


def _takeovers(found: Figures) -> str:
    if not found["count"]:
        return gettext("None in %(of)s runs.") % found
    told = gettext("%(count)s in %(of)s runs") % found
    if found["mean_handling_seconds"] is None:
        return told
    mean = length(found["mean_handling_seconds"])
    return gettext("%(told)s; handed back after %(mean)s on average") % {"told": told, "mean": mean}


def _share(found: Figures) -> float | None:
    share: float | None = found["share"]
    return share


METRICS: Final[Mapping[str, Metric]] = {
    "pause_to_resume_seconds": Metric(
        gettext_lazy("From pause to resume"),
        gettext_lazy(
            "The median time from a run's pause to the lease under which it goes on: how quickly work comes back. It "
            "includes the time for which the run had to wait."
        ),
        lambda found: found["median"],
        lambda found: length(found["median"]),
        _resumed,
    ),
    "missing_metadata": Metric(
        gettext_lazy("Failed for missing metadata"),
        gettext_lazy(
            "The share of tries to resume at which a field that the flow requires was not there, so that a person had "
            "to look: how complete the metadata is. Aim for none."
        ),
        _share,
        lambda found: percent(found["share"]),
        _of(gettext_lazy("No run was resumed."), gettext_lazy("%(count)s of %(of)s tries to resume")),
    ),
    "repeated_effects": Metric(
        gettext_lazy("Effects repeated after a resume"),
        gettext_lazy(
            "The share of resumes after which an effect reached the outside a second time: how good the idempotency "
            "is. Each one is an incident."
        ),
        _share,
        lambda found: percent(found["share"]),
        _of(gettext_lazy("No run was resumed."), gettext_lazy("%(count)s of %(of)s resumes")),
    ),
    "takeovers": Metric(
        gettext_lazy("Takeovers in 100 runs"),
        gettext_lazy(
            "How often a person had to take the wheel, and how long they held it: what recovery costs you. The chart "
            "shows how many there were."
        ),
        lambda found: float(found["count"]) or None,
        lambda found: "–" if found["per_100_runs"] is None else f"{found['per_100_runs']:g}",
        _takeovers,
    ),
    "undetermined_timeouts": Metric(
        gettext_lazy("Time-outs without a way on"),
        gettext_lazy(
            "The share of time-outs after which nothing said where the run should go: how well waits are designed. "
            "Give those waits an “on_timeout”."
        ),
        _share,
        lambda found: percent(found["share"]),
        _of(gettext_lazy("Nothing timed out."), gettext_lazy("%(count)s of %(of)s time-outs")),
    ),
    "engineer_needed": Metric(
        gettext_lazy("Takeovers that needed an engineer"),
        gettext_lazy(
            "The share of takeovers in which an engineer had to help all the same: whether the run's page tells a "
            "business team enough to act on."
        ),
        _share,
        lambda found: percent(found["share"]),
        _of(gettext_lazy("Nothing was handed back."), gettext_lazy("%(count)s of %(of)s takeovers handed back")),
    ),
}


def step_of(start: dt.datetime, end: dt.datetime) -> dt.timedelta:
    """The length of a chart's steps: whole days, or hours for up to two days; no more than `MOST_STEPS`."""
    span = end - start
    unit = dt.timedelta(hours=1) if span <= dt.timedelta(days=2) else dt.timedelta(days=1)
    return unit * max(1, math.ceil(span / unit / MOST_STEPS))


def cards(report: Mapping[str, Any], *, start: dt.datetime, end: dt.datetime) -> list[dict[str, Any]]:
    """`[{id, title, meaning, figure, detail, count, bars, told}]`; `told` is the chart in words."""
    step = step_of(start, end)
    places = [start + step * n for n in range(math.ceil((end - start) / step))]
    return [_card(name, metric, report, places) for name, metric in METRICS.items()]


def by_flow(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`[{flow, figures}]`: the figures in words, in the order of `METRICS`."""
    return [
        {"flow": flow, "figures": [metric.figure(found[name]) for name, metric in METRICS.items()]}
        for flow, found in report["flows"].items()
    ]


def _card(name: str, metric: Metric, report: Mapping[str, Any], places: list[dt.datetime]) -> dict[str, Any]:
    total = report["total"][name]
    steps = {place: found[name] for place, found in report["steps"].items()}
    values = [(place, metric.value(steps[place]) if place in steps else None) for place in places]
    seen = [(value, place) for place, value in values if value]
    told = gettext("Nothing to show over time.")
    if seen:
        _, place = max(seen)
        highest = metric.figure(steps[place]) if name != "takeovers" else str(steps[place]["count"])
        told = gettext("Over time; the highest is %(highest)s, from %(when)s on.") % {
            "highest": highest,
            "when": formats.exact(place),
        }
    return {
        "id": name,
        "title": metric.title,
        "meaning": metric.meaning,
        "figure": metric.figure(total),
        "detail": metric.detail(total),
        "count": total["count"],
        "bars": _bars([value for _, value in values]),
        "told": told,
    }


def _bars(values: list[float | None]) -> list[dict[str, float]]:
    """A bar for each value that is not nothing, the highest as high as the chart."""
    top = max((value for value in values if value), default=0.0)
    width = CHART_WIDTH / max(1, len(values))
    return [
        {
            "x": n * width + width * 0.12,
            "width": width * 0.76,
            "y": CHART_HEIGHT * (1 - value / top),
            "height": CHART_HEIGHT * value / top,
        }
        for n, value in enumerate(values)
        if value
    ]
