"""What those who run the server ask it: is it alive, is it of use, what are its figures. Nothing about a single run."""

from __future__ import annotations

import hmac
import os

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from rehydrate import __version__, clock
from rehydrate.models import Heartbeat, Run, Wait

STALE_AFTER = 60.0
"""Seconds without a tick after which timers must be taken to stand still."""


@require_safe
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """200 while this process serves requests; asks nothing of others."""
    return JsonResponse({"status": "ok", "version": __version__})


@require_safe
@never_cache
def readyz(request: HttpRequest) -> HttpResponse:
    """200 when the database answers and timers fire; 503 with what is wrong."""
    checks: dict[str, str] = {}
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        checks["database"] = "ok"
        age = _seconds_since_tick()
        if age is None:
            checks["ticks"] = "none yet"
        else:
            checks["ticks"] = "ok" if age < STALE_AFTER else f"none for {age:.0f} s"
    except DatabaseError:
        checks["database"] = "not reachable"
    good = all(answer == "ok" for answer in checks.values())
    return JsonResponse({"status": "ok" if good else "unavailable", "checks": checks}, status=200 if good else 503)


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    """Prometheus' text. With REHYDRATE_METRICS_TOKEN set, only for those who bring it."""
    token = os.environ.get("REHYDRATE_METRICS_TOKEN")
    if token and not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {token}".encode()):
        return HttpResponse("This needs the metrics token.\n", status=401, content_type="text/plain")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures())
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
        age = _seconds_since_tick()
        if age is not None:
            ticks.add_metric([], age)
        return [info, runs, waits, ticks]


def _seconds_since_tick() -> float | None:
    last = Heartbeat.objects.filter(name__startswith="tick@").order_by("-at").values_list("at", flat=True).first()
    return (clock.now() - last).total_seconds() if last else None
