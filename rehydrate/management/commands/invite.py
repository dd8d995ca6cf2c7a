"""`invite`: a link that signs one person in, once."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser

from approvals.signin import make_link_path


class Command(BaseCommand):
    help = "Print a link that signs this person in once, within a day."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("user", help="the user name, as a file given to `apply` names it")

    def handle(self, *args: Any, user: str, **options: Any) -> None:
        person = User.objects.filter(username=user).first()
        if person is None:
            raise CommandError(f"Nobody is called {user}: name the person in a group and apply the file first.")
        if not person.is_active:
            raise CommandError(f"{user} has been switched off and cannot sign in.")
        self.stdout.write(f"{settings.PUBLIC_URL}{make_link_path(person)}")
