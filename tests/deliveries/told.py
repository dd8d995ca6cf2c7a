"""The ledger's cast with a flow that delivers, and what its deliveries are. No test logic here."""

from __future__ import annotations

from rehydrate import deliveries, seal
from rehydrate.models import Delivery, Endpoint
from tests.ledger_cast import FLOW, Cast


def told(cast: Cast, url: str | None) -> Cast:
    """The cast's flow delivers to `url` from now on."""
    cast.policy({**FLOW, "deliver_to": url})
    deliveries.aim(cast.workspace, "flow", url)
    return cast


def endpoint(cast: Cast) -> Endpoint:
    return Endpoint.objects.get(workspace=cast.workspace, flow="flow")


def secret(cast: Cast) -> str:
    return str(seal.decrypt(endpoint(cast).secret))


def types(cast: Cast) -> list[str]:
    """The deliveries so far, in the order of their transitions."""
    rows = Delivery.objects.filter(endpoint__workspace=cast.workspace)
    return list(rows.order_by("at", "id").values_list("type", flat=True))
