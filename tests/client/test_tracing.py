"""Trace ids go along: to the run, over its pauses, in the headers of its calls, in log records, into OpenTelemetry."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from opentelemetry import trace

from rehydrate.client import Ledger, RunOfRecord
from tests.conftest import ROOT

FLOW = "errand"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


class Recording(httpx.BaseTransport):
    """Keeps the `traceparent` of each call, by its path's last word."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.seen: dict[str, str | None] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen[request.url.path.rpartition("/")[2]] = request.headers.get("traceparent")
        return self.inner.handle_request(request)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def wire() -> Recording:
    return Recording()


@pytest.fixture
def agent(cast, key, wire):
    with Ledger(cast.url, key, transport=wire) as made:
        yield made


def in_span() -> Any:
    context = trace.SpanContext(int(TRACE, 16), int(SPAN, 16), is_remote=False, trace_flags=trace.TraceFlags(1))
    return trace.use_span(trace.NonRecordingSpan(context))


def current_trace() -> str:
    return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)


def test_run_opened_in_a_span_stays_in_its_trace_over_a_pause(agent, alice, wire, caplog):
    seen: list[str] = []

    @agent.flow(FLOW)
    def errand(run):
        seen.append(current_trace())  # the parent of the spans that the flow makes
        logging.getLogger("rehydrate.client").info("at work")
        run.checkpoint("only")
        run.ask("yes", "Go on?", due="1d")

    with in_span():
        run_id = agent.open(FLOW, "errand-1")["run"]["id"]
    assert wire.seen["runs"] == f"00-{TRACE}-{SPAN}-01"
    assert agent.get(run_id)["trace_id"] == TRACE

    with caplog.at_level(logging.INFO, "rehydrate.client"):
        agent.work_once()  # far from the span, as on another machine and days later
        alice.decide(run_id, "yes", "approve")
        agent.work_once()
    assert seen == [TRACE, TRACE]
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", wire.seen["events"] or "")
    at_work = [(r.run_id, r.trace_id) for r in caplog.records if r.message == "at work"]
    assert at_work == [(run_id, TRACE)] * 2
    assert current_trace() == "0" * 32
    assert wire.seen["claims"] is None


def test_given_trace_id_is_the_runs_own(agent, wire):
    with agent.run(FLOW, "errand-1", trace_id=TRACE) as run:
        run.checkpoint("only")
        assert current_trace() == TRACE
    assert agent.get(run.id)["trace_id"] == TRACE


def test_trace_id_that_is_none_of_w3c_is_kept_and_sent_in_no_header(agent, wire):
    with agent.run(FLOW, "errand-1", trace_id="order-4711") as run:
        run.checkpoint("only")
    assert agent.get(run.id)["trace_id"] == "order-4711"
    assert wire.seen["events"] is None


def test_agents_own_log_lines_say_which_run_they_are_of(agent, capsys):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(run_id)s %(trace_id)s %(message)s"))
    handler.addFilter(RunOfRecord())
    log = logging.getLogger("an-agent")
    log.addHandler(handler)
    try:
        with agent.run(FLOW, "errand-1", trace_id=TRACE) as run:
            run.checkpoint("only")
            log.warning("inside")
        log.warning("outside")
    finally:
        log.removeHandler(handler)
    assert capsys.readouterr().out == f"{run.id} {TRACE} inside\n  outside\n"


WITHOUT = f"""
import sys
sys.modules["opentelemetry"] = None
from rehydrate.client import Ledger, tracing
with Ledger() as ledger, ledger.run("errand", "errand-1", trace_id="{TRACE}") as run:
    run.checkpoint("only")
    print(tracing.headers()["traceparent"])
"""


@pytest.mark.processes
def test_without_opentelemetry_the_runs_trace_goes_along_all_the_same(cast, key, ledger):
    environment = {**os.environ, "REHYDRATE_URL": cast.url, "REHYDRATE_KEY": key}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"00-{TRACE}-")
    assert ledger.runs(flow=FLOW)["results"][0]["status"] == "completed"
