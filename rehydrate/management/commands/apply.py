"""`apply FILE.toml`: makes workspaces, groups, people and flows what the file says, and prints what it changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate.apply import apply
from rehydrate.flowfile import FileError, parse


class Command(BaseCommand):
    help = "Make workspaces, groups, people and flows what FILE.toml says. The same file twice changes nothing."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", metavar="FILE.toml", help="the file, or - for standard input")

    def handle(self, *args: Any, file: str, **options: Any) -> None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise CommandError(f"{file} is not UTF-8 text.") from error
        try:
            report = apply(parse(text))
        except FileError as error:
            raise CommandError(f"{file}: {error}") from error
        for line in report.changes or ["nothing changed"]:
            self.stdout.write(line)
        for line in report.secrets:
            self.stdout.write(line)
        for note in report.notes:
            self.stderr.write(f"note: {note}")
