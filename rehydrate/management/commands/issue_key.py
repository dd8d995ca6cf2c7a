"""`issue_key`: prints one new key and nothing else, so that a script can take it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from rehydrate import keys
from rehydrate.models import Workspace


class Command(BaseCommand):
    help = "Print a new API key of an agent or of a person. It is shown this once."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        kinds = parser.add_subparsers(dest="kind", required=True, metavar="agent|person")
        agent = kinds.add_parser("agent", help="a key of an agent")
        agent.add_argument("--workspace", default="default")
        agent.add_argument("--name", required=True, help="what the agent is called in the ledger")
        agent.add_argument("--flow", action="append", default=[], help="a flow it may use; may be repeated; none: all")
        agent.add_argument("--owner", help="the person behind the agent, who counts as its requester")
        person = kinds.add_parser("person", help="a personal key")
        person.add_argument("--user", required=True)
        person.add_argument("--name", default="", help="what the key is for")

    def handle(self, *args: Any, kind: str, **options: Any) -> None:
        with transaction.atomic():
            text = self._agent(**options) if kind == "agent" else self._person(**options)
        self.stdout.write(text)

    def _agent(self, *, workspace: str, name: str, flow: list[str], owner: str | None, **options: Any) -> str:
        place = Workspace.objects.filter(slug=workspace).first()
        if place is None:
            raise CommandError(f"There is no workspace {workspace}: apply a file that names it first.")
        person = self._user(owner) if owner else None
        return keys.issue_agent(workspace=place, name=name, flows=list(dict.fromkeys(flow)), owner=person)

    def _person(self, *, user: str, name: str, **options: Any) -> str:
        return keys.issue_person(user=self._user(user), name=name)

    def _user(self, name: str) -> User:
        person = User.objects.filter(username=name).first()
        if person is None:
            raise CommandError(f"Nobody is called {name}: name the person in a group and apply the file first.")
        return person
