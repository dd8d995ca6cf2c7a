"""`forget_state`: deletes the opaque checkpoint state of a run that has ended; the events keep its digest."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from rehydrate.models import AdminEvent, CheckpointState, Run


class Command(BaseCommand):
    help = "Delete what agents kept as `state` beside the checkpoints of a run that has ended."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--run", required=True, type=UUID, metavar="ID")

    def handle(self, *args: Any, run: UUID, **options: Any) -> None:
        with transaction.atomic():
            found = Run.objects.select_for_update().filter(pk=run).first()
            if found is None:
                raise CommandError("There is no such run.")
            if found.ended_at is None:
                raise CommandError("This run has not ended: its agent may still need the state.")
            deleted, _ = CheckpointState.objects.filter(run=found).delete()
            AdminEvent.objects.create(
                workspace=found.workspace,
                actor_kind="system",
                actor_id="command",
                act="state.forgotten",
                subject=str(run),
                detail={"states": deleted},
            )
        self.stdout.write(f"deleted: {deleted}")
