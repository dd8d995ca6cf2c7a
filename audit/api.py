"""What audit adds to the API: the recovery metrics and the readiness report; audit stands above `rehydrate.api`."""

from datetime import timedelta
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from audit import metrics, readiness, selectors
from rehydrate import clock
from rehydrate.api import shapes
from rehydrate.api.endpoint import get, post, resource
from rehydrate.callers import Caller
from rehydrate.core import commands as c
from rehydrate.core.refusals import invalid


class Period(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename={"from_": "from"}):
    """`to` is now and `from` thirty days before it, when left out."""

    from_: c.When | UnsetType = UNSET
    to: c.When | UnsetType = UNSET
    flow: Annotated[str, Meta(min_length=1, max_length=100)] | UnsetType = UNSET


@get(tag="Reading", query=Period, answers={200: shapes.Recovery})
def recovery_metrics(caller: Caller, *, query: Period) -> dict[str, Any]:
    """Read how well recovery goes.

    The six recovery metrics, with numerators and denominators, by flow and period.
    """
    end = clock.now() if query.to is UNSET else query.to
    try:
        start = end - timedelta(days=30) if query.from_ is UNSET else query.from_
    except OverflowError:
        raise invalid("/to", "This time is too far off.") from None
    if start >= end:
        raise invalid("/from", "The period ends before it begins.")
    flow = None if query.flow is UNSET else query.flow
    everything = caller.kind != "agent" or "*" in caller.flows
    flows = None if everything else list(caller.flows)
    if flow is not None:
        flows = [flow] if flows is None or flow in flows else []
    found = metrics.recovery(workspaces=list(caller.workspaces), flows=flows, start=start, end=end)
    return {"from": start, "to": end, "flow": flow, **found}


@post(tag="Reading", body=c.Readiness, answers={200: shapes.ReadinessReport})
def readiness_report(caller: Caller, *, body: c.Readiness) -> dict[str, Any]:
    """Ask what a flow would have missed.

    Hand in what had to be looked up to recover one real incident: it says which of the ten fields were missing, how to
    send them, and whether this flow needs a ledger at all.
    """
    return readiness.report(
        happened_outside=body.happened_outside,
        spans_days=body.spans_days,
        looked_up=[item.what for item in body.looked_up],
        recorded=selectors.recorded_fields(caller, body.flow),
    )


urlpatterns = [
    resource("v1/metrics/recovery", recovery_metrics),
    resource("v1/readiness", readiness_report),
]
