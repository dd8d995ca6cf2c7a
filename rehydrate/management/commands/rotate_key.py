"""`rotate_key`: prints a new key with the rights of an old one, which it revokes, and nothing else."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from rehydrate import keys
from rehydrate.management.commands.revoke_key import named


class Command(BaseCommand):
    help = "Print a new key with the same rights, and revoke the old one (at once, or later with revoke_key)."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("key", metavar="PREFIX")
        parser.add_argument(
            "--keep", action="store_true", help="leave the old one in force: revoke it when all use the new"
        )

    def handle(self, *args: Any, key: str, keep: bool, **options: Any) -> None:
        old = named(key)
        if old.revoked_at is not None:
            raise CommandError("This key is revoked: issue a new one.")
        with transaction.atomic():
            text = keys.renew(old)
            if not keep:
                keys.revoke(old, by="command")
        self.stdout.write(text)
