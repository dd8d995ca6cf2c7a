"""`rotate_webhook_secret`: prints the new secret of a flow's deliveries, and nothing else."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import deliveries
from rehydrate.core.policy import seconds
from rehydrate.models import Endpoint

LONGEST = dt.timedelta(days=365)


class Command(BaseCommand):
    help = "Print a new secret that signs a flow's deliveries; for a while the old one signs beside it."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--workspace", default="default")
        parser.add_argument("--flow", required=True)
        parser.add_argument(
            "--overlap",
            type=_duration,
            default=deliveries.OVERLAP,
            metavar="24h",
            help="for how long both sign, such as 90m or 2d; 0s: the old one is out at once (24h)",
        )

    def handle(self, *args: Any, workspace: str, flow: str, overlap: dt.timedelta, **options: Any) -> None:
        endpoint = Endpoint.objects.filter(workspace__slug=workspace, flow=flow, url__isnull=False).first()
        if endpoint is None:
            raise CommandError(
                f"The flow {flow} of workspace {workspace} delivers nowhere: give it a deliver_to first."
            )
        self.stdout.write(deliveries.rotate(endpoint, overlap=overlap))


def _duration(text: str) -> dt.timedelta:
    return min(dt.timedelta(seconds=min(seconds(text), 10**9)), LONGEST)
