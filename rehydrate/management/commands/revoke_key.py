"""`revoke_key`: from now on a key opens nothing."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import keys
from rehydrate.models import ApiKey


def named(text: str) -> ApiKey:
    """The key with this prefix, which may be given as the whole key."""
    key = ApiKey.objects.filter(prefix=keys.prefix_of(text) or text).first()
    if key is None:
        raise CommandError("There is no such key: name the part between the first two underscores, or the whole key.")
    return key


class Command(BaseCommand):
    help = "Revoke a key, named by its prefix (the part between the first two underscores) or as a whole."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("key", metavar="PREFIX")

    def handle(self, *args: Any, key: str, **options: Any) -> None:
        found = named(key)
        keys.revoke(found, by="command")
        self.stdout.write(f"revoked: {found}")
