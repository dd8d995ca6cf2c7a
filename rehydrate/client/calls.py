"""The contract's calls (section 6) as requests, one function each. Nothing is sent here: sync and async share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rehydrate.client.transport import Call

Json = dict[str, Any]


def _given(**fields: Any) -> Json:
    """Fields that were given: what is None is left out, so that the server's defaults hold."""
    return {name: value for name, value in fields.items() if value is not None}


def _run(run_id: str, rest: str = "") -> str:
    return f"/runs/{quote(run_id, safe='')}{rest}"


def open_run(
    flow: str,
    external_id: str,
    *,
    title: str | None = None,
    input: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    holder: str | None = None,
    lease_seconds: int | None = None,
    labels: Any = None,
    requested_by: str | None = None,
    trace_id: str | None = None,
    events: Sequence[Mapping[str, Any]] | None = None,
) -> Call:
    body = _given(
        flow=flow,
        external_id=external_id,
        title=title,
        input=input,
        agent=agent,
        holder=holder,
        lease_seconds=lease_seconds,
        labels=labels,
        requested_by=requested_by,
        trace_id=trace_id,
        events=list(events) if events else None,
    )
    return Call("POST", "/runs", body)


def append(run_id: str, epoch: int, events: Sequence[Mapping[str, Any]]) -> Call:
    return Call("POST", _run(run_id, "/events"), {"epoch": epoch, "events": list(events)})


def heartbeat(run_id: str, epoch: int) -> Call:
    return Call("POST", _run(run_id, "/heartbeat"), {"epoch": epoch}, read_seconds=10.0)


def release(run_id: str, epoch: int, *, retry_in: int | None = None) -> Call:
    return Call("POST", _run(run_id, "/release"), _given(epoch=epoch, retry_in=retry_in))


def recall(run_id: str, *, holder: str, reason: str) -> Call:
    return Call("POST", _run(run_id, "/recall"), {"holder": holder, "reason": reason})


def rehydrate(
    run_id: str,
    *,
    holder: str,
    agent: Mapping[str, Any] | None = None,
    input_digest: str | None = None,
    lease_seconds: int | None = None,
) -> Call:
    body = _given(holder=holder, agent=agent, input_digest=input_digest, lease_seconds=lease_seconds)
    return Call("POST", _run(run_id, "/rehydrate"), body)


def claim(
    flows: Sequence[str],
    *,
    holder: str,
    agent: Mapping[str, Any] | None = None,
    lease_seconds: int | None = None,
    wait: int = 0,
) -> Call:
    body = _given(flows=list(flows), holder=holder, agent=agent, lease_seconds=lease_seconds, wait=wait)
    return Call("POST", "/claims", body, read_seconds=float(wait) + 15.0)


def signal(
    name: str,
    *,
    id: str,
    run: str | None = None,
    flow: str | None = None,
    external_id: str | None = None,
    correlation: str | None = None,
    payload: Any = None,
    occurred_at: str | None = None,
    sequence: int | None = None,
) -> Call:
    """To a run by its id, or by `flow` and `external_id`, or to whatever waits under a `correlation`."""
    body = _given(
        id=id,
        name=name,
        run=run,
        flow=flow,
        external_id=external_id,
        correlation=correlation,
        payload=payload,
        occurred_at=occurred_at,
        sequence=sequence,
    )
    return Call("POST", "/signals", body)


def get_run(run_id: str) -> Call:
    return Call("GET", _run(run_id))


def list_runs(**filters: Any) -> Call:
    """Filters as the contract names them: `flow`, `status`, `external_id`, `limit`, `cursor` ..."""
    return Call("GET", "/runs", params=_given(**filters))
