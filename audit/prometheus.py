"""The recovery metrics of the last day for Prometheus, read at each scrape; by workspace and flow."""

from __future__ import annotations

import datetime as dt
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from audit import metrics
from rehydrate import clock
from rehydrate.models import Workspace

#: Each is of this window before the scrape: a day's events are read quickly however long the history is.
WINDOW: Final = dt.timedelta(days=1)
LABELS: Final = ["workspace", "flow"]

#: Name, help, and where the value stands in a flow's figures. Shares come as numerator and denominator, so that they
#: can be added up over flows before they are divided.
_GAUGES: Final = [
    ("resumes", "Runs that were resumed after a pause", "pause_to_resume_seconds", "count"),
    ("missing_metadata", "Tries to resume that failed for missing metadata", "missing_metadata", "count"),
    ("resume_attempts", "Tries to resume, successful or not", "missing_metadata", "of"),
    ("repeated_effects", "Resumes after which an effect was repeated", "repeated_effects", "count"),
    ("takeovers", "Runs that a person took over", "takeovers", "count"),
    ("runs", "Runs that were alive", "takeovers", "of"),
    ("takeover_handling_seconds", "Mean time from takeover to hand-back", "takeovers", "mean_handling_seconds"),
    ("undetermined_timeouts", "Time-outs whose way on could not be determined", "undetermined_timeouts", "count"),
    ("timeouts", "Time-outs", "undetermined_timeouts", "of"),
    ("engineer_needed", "Takeovers that needed an engineer, of those handed back", "engineer_needed", "count"),
    ("handbacks", "Takeovers that were handed back", "engineer_needed", "of"),
]


class Recovery(Collector):
    """`rehydrate_recovery_*`: four queries a scrape, however many workspaces and flows there are."""

    def collect(self) -> list[Metric]:
        names = {str(pk): slug for pk, slug in Workspace.objects.values_list("pk", "slug")}
        end = clock.now()
        period = metrics.Period(workspaces=list(names), flows=None, start=end - WINDOW, end=end)
        found = metrics.by_workspace_and_flow(period)
        resume = GaugeMetricFamily(
            "rehydrate_recovery_pause_to_resume_seconds",
            "Time from pause to successful resume, in the last 24 hours.",
            labels=[*LABELS, "quantile"],
        )
        gauges = []
        for name, text, metric, part in _GAUGES:
            gauge = GaugeMetricFamily(f"rehydrate_recovery_{name}", f"{text}, in the last 24 hours.", labels=LABELS)
            for workspace, flow, figures in found:
                if (value := figures[metric][part]) is not None:
                    gauge.add_metric([names[workspace], flow], value)
            gauges.append(gauge)
        for workspace, flow, figures in found:
            for quantile, part in (("0.5", "median"), ("0.95", "p95")):
                if (value := figures["pause_to_resume_seconds"][part]) is not None:
                    resume.add_metric([names[workspace], flow, quantile], value)
        return [resume, *gauges]
