"""`up`: everything that belongs together, started and watched. The work is in `rehydrate.supervisor`."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import data, dsn, postgres
from rehydrate.supervisor.watcher import StartError


class Command(BaseCommand):
    help = "Start the database, the web server, the workers and the demo, and keep them running until Ctrl-C."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="where to serve (127.0.0.1)")
        parser.add_argument("--port", type=_port, default=8000, help="on which port (8000; 0 for any free one)")
        parser.add_argument("--data", metavar="DIR", help="the data folder (REHYDRATE_DATA, else .data)")
        parser.add_argument("--no-demo", action="store_false", dest="demo", help="leave out the demo flows and agents")

    def handle(self, *args: Any, host: str, port: int, demo: bool, **options: Any) -> None:
        from rehydrate.supervisor import up

        try:
            code = up.run(up.Options(host=host, port=port, demo=demo))
        except (
            StartError,
            data.DataFolderError,
            postgres.PostgresError,
            dsn.AddressError,
            dsn.UnreachableError,
        ) as error:
            raise CommandError(str(error)) from error
        sys.exit(code)


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:
        raise ValueError(text)
    return number
