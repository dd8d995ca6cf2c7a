"""`verify_ledger`: proves the hash chains and the tables, or an exported file. Names the first event that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import verify
from rehydrate.models import Run


class Command(BaseCommand):
    help = "Walk the hash chains and rebuild the tables from the events; exit 1 at the first that is wrong."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--run", metavar="ID", help="only this run")
        parser.add_argument(
            "--file", metavar="EXPORT", help="an evidence pack instead of the database; - for standard input"
        )

    def handle(self, *args: Any, run: str | None, file: str | None, **options: Any) -> None:
        if file is not None:
            self._file(file)
        else:
            self._database(run)

    def _database(self, only: str | None) -> None:
        runs = events = 0
        try:
            for run_id in verify.run_ids(only):
                flaw, count = verify.run(run_id)
                if flaw is not None:
                    raise CommandError(str(flaw))
                runs, events = runs + 1, events + count
        except (Run.DoesNotExist, ValueError):
            raise CommandError(f"There is no run {only}.") from None
        self._good(runs, events, "the tables are what the events say")

    def _file(self, file: str) -> None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
            flaw, runs, events = verify.export(text)
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise CommandError(f"{file} is not UTF-8 text.") from error
        except verify.ExportError as error:
            raise CommandError(f"{file}: {error}.") from error
        if flaw is not None:
            raise CommandError(str(flaw))
        self._good(runs, events, "the tables are not in the file")

    def _good(self, runs: int, events: int, tables: str) -> None:
        self.stdout.write(f"verified: {events} events of {runs} runs; every chain holds, {tables}")
