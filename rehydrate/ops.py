"""What those who run the server ask it: is it alive, is it of use, what are its figures. Nothing about a single run."""

from __future__ import annotations

import hmac
import os

from django.db import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from audit.prometheus import Recovery
from rehydrate import __version__, claims, pulse, selectors
from rehydrate.models import Run, Trouble, Wait

STALE_AFTER = 10.0
"""Seconds without a tick, of whichever `up`, after which timers must be taken to stand still."""
LATE_AFTER = 30.0
"""Seconds after which what is due and not done is a reason not to be called ready."""
CLUSTERS = {"work": 20.0, "ticks": 12.0}
"""Seconds for which a cluster of this `up` may leave a question unanswered (supervisor/up.py)."""


@require_safe
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """200 while this process serves requests; asks nothing of others."""
    return JsonResponse({"status": "ok", "version": __version__})


@require_safe
@never_cache
def readyz(request: HttpRequest) -> HttpResponse:
    """200 when the database answers and time goes on; 503 with `problems: [{code, message}]`. `checks` says each in a
    word or two.
    """
    checks = {"database": "ok"}
    problems: list[dict[str, str]] = []

    def wrong(check: str, said: str, code: str, message: str) -> None:
        checks[check] = said
        problems.append({"code": code, "message": message})

    try:
        age = pulse.seconds_since_tick()
        if age is None:
            wrong("ticks", "none yet", "no_tick", "Nothing has looked at timers yet: they stand still.")
        elif age > STALE_AFTER:
            wrong("ticks", f"none for {age:.0f} s", "stale_tick", f"Nothing has looked at timers for {age:.0f} s.")
        else:
            checks["ticks"] = "ok"
        late = -(claims.seconds_until_due() or 0.0)
        if late > LATE_AFTER:
            wrong("timers", f"{late:.0f} s late", "late_timers", f"Something has been due for {late:.0f} s.")
        else:
            checks["timers"] = "ok"
        for cluster, within in CLUSTERS.items() if os.environ.get("REHYDRATE_SUPERVISED") else ():
            silent = pulse.seconds_since_beat(cluster)
            if silent is not None and silent > within:
                said = f"The cluster {cluster} has carried out nothing for {silent:.0f} s; it is started again."
                wrong(cluster, f"silent for {silent:.0f} s", "hung_cluster", said)
            else:
                checks[cluster] = "ok"
    except (DatabaseError, InterfaceError):
        checks = {}
        wrong("database", "not reachable", "no_database", "The database does not answer: nothing can be done.")
    status = 503 if problems else 200
    words = "unavailable" if problems else "ok"
    return JsonResponse({"status": words, "checks": checks, "problems": problems}, status=status)


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus' text. With REHYDRATE_METRICS_TOKEN set, only for those who bring it."""
    token = os.environ.get("REHYDRATE_METRICS_TOKEN")
    if token and not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
        return HttpResponse("This needs the metrics token.\n", status=401, content_type="text/plain")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures())
    registry.register(Recovery())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


class Figures(Collector):
    """Read from the database at each scrape, so that it does not matter which process answers."""

    def collect(self) -> list[Metric]:
        from django.db.models import Count

        info = GaugeMetricFamily("rehydrate_info", "The version that runs.", labels=["version"])
        info.add_metric([__version__], 1)
        runs = GaugeMetricFamily("rehydrate_runs", "Runs that have not ended, by status.", labels=["status"])
        open_runs = Run.objects.filter(ended_at__isnull=True).values_list("status").annotate(count=Count("pk"))
        for status, count in open_runs.order_by("status"):
            runs.add_metric([status], count)
        waits = GaugeMetricFamily("rehydrate_open_waits", "Waits that are open, by kind.", labels=["kind"])
        for kind, count in (
            Wait.objects.filter(status="open").values_list("kind").annotate(count=Count("pk")).order_by("kind")
        ):
            waits.add_metric([kind], count)
        ticks = GaugeMetricFamily("rehydrate_seconds_since_tick", "Seconds since timers were last looked at.")
        age = pulse.seconds_since_tick()
        if age is not None:
            ticks.add_metric([], age)
        late = GaugeMetricFamily("rehydrate_timers_late_seconds", "How long the most overdue thing has been due.")
        late.add_metric([], max(0.0, -(claims.seconds_until_due() or 0.0)))
        trouble = GaugeMetricFamily(
            "rehydrate_runs_in_trouble",
            "Runs to which what is due could not be applied: tried again, or set aside for an operator.",
            labels=["state"],
        )
        aside = Trouble.objects.filter(set_aside_at__isnull=False).count()
        trouble.add_metric(["set_aside"], aside)
        trouble.add_metric(["tried_again"], Trouble.objects.count() - aside)
        return [info, runs, waits, ticks, late, trouble, *_delivery_figures()]


def _delivery_figures() -> list[Metric]:
    """Of what is delivered there is no end, and nobody needs to act on it: what is not, is counted."""
    states, oldest = selectors.delivery_backlog()
    backlog = GaugeMetricFamily("rehydrate_deliveries", "Deliveries that were not taken, by status.", labels=["status"])
    for status, count in states.items():
        backlog.add_metric([status], count)
    age = GaugeMetricFamily("rehydrate_oldest_pending_delivery_seconds", "Age of the oldest delivery to be sent.")
    age.add_metric([], oldest)
    receivers = GaugeMetricFamily("rehydrate_receivers", "Receivers of deliveries, by how they do.", labels=["state"])
    for state, count in selectors.receiver_states().items():
        receivers.add_metric([state], count)
    return [backlog, age, receivers]
