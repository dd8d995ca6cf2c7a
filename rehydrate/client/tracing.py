"""Which trace a call belongs to: the run's own, or that of OpenTelemetry's current span where that is installed.

It goes along in three ways: in the `traceparent` header of each call (W3C Trace Context), in log records, and as the
parent of the spans that a flow makes, so that what happens after a pause of days is in the trace that it began in.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

try:
    from opentelemetry import context, trace
except ImportError:  # optional: agents without it lose nothing
    trace = None  # type: ignore[assignment]

SAMPLED = 1
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")


@dataclass(frozen=True)
class Worked:
    """The run that this thread or task works on."""

    run_id: str = ""
    trace_id: str = ""


NOTHING = Worked()
_worked: ContextVar[Worked] = ContextVar("rehydrate_worked", default=NOTHING)


def trace_id() -> str | None:
    """The trace of OpenTelemetry's current span; of the run that is worked on; None outside of both."""
    span = trace.get_current_span().get_span_context() if trace else None
    if span is not None and span.is_valid:
        return trace.format_trace_id(span.trace_id)
    return _worked.get().trace_id or None


def headers() -> dict[str, str]:
    """The `traceparent` of a call made now; nothing when there is no trace that fits one."""
    span = trace.get_current_span().get_span_context() if trace else None
    if span is not None and span.is_valid:
        ids = trace.format_trace_id(span.trace_id), trace.format_span_id(span.span_id)
        return {"traceparent": f"00-{ids[0]}-{ids[1]}-{int(span.trace_flags):02x}"}
    worked = _worked.get().trace_id
    if not _TRACE_ID.fullmatch(worked):
        return {}
    return {"traceparent": f"00-{worked}-{_span_id()}-{SAMPLED:02x}"}


@contextlib.contextmanager
def working_on(run_id: str, trace_id: str | None) -> Iterator[None]:
    """What is logged, called and traced in this block belongs to this run."""
    token = _worked.set(Worked(run_id, trace_id or ""))
    try:
        with _continued(trace_id or ""):
            yield
    finally:
        _worked.reset(token)


@contextlib.contextmanager
def _continued(trace_id: str) -> Iterator[None]:
    """OpenTelemetry's context, with the run's trace as the parent of new spans; unless a span is open already."""
    if trace is None or not _TRACE_ID.fullmatch(trace_id) or trace.get_current_span().get_span_context().is_valid:
        yield
        return
    parent = trace.SpanContext(
        trace_id=int(trace_id, 16), span_id=int(_span_id(), 16), is_remote=True, trace_flags=trace.TraceFlags(SAMPLED)
    )
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
    try:
        yield
    finally:
        context.detach(token)


def _span_id() -> str:
    return secrets.token_hex(8)


class RunOfRecord(logging.Filter):
    """Puts `run_id` and `trace_id` on log records, empty outside of a run. For a handler whose format shows them."""

    def filter(self, record: logging.LogRecord) -> bool:
        worked = _worked.get()
        record.run_id, record.trace_id = worked.run_id, trace_id() or ""
        return True


log = logging.getLogger("rehydrate.client")
"""The client's own logger: each of its records carries both."""
log.addFilter(RunOfRecord())
