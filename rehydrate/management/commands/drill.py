"""`drill`: the three drills before going live, really carried out; prints what they found for a release checklist."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, ProgrammingError, connection
from django.utils import translation
from django.utils.translation import gettext

from audit import drills as words
from rehydrate import data, postgres
from rehydrate.demo.drills import DRILLS
from rehydrate.demo.drills.procedures import perform
from rehydrate.demo.drills.processes import DrillError, Household
from rehydrate.demo.drills.servers import GivenServer, Keys, OwnServer, Server, make_keys, revoke_keys
from rehydrate.demo.drills.stage import Options
from rehydrate.models import DrillResult
from rehydrate.supervisor.preparation import build_catalogs

AGENT = f"{shlex.quote(sys.executable)} -m rehydrate.demo.drills.agent"
COULD_NOT = 2
"""Exit code when a drill could not even begin; 1 is a drill that failed."""

Json = dict[str, Any]


class Command(BaseCommand):
    help = (
        "Carry out the drills that come before going live: real processes, really killed, an outside that counts. "
        "Exits with 1 when one fails. Without --url they run against a server of their own on a temporary folder."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("drill", nargs="?", default="all", choices=["all", *DRILLS], help="which one (all)")
        parser.add_argument("--url", help="drill the server that runs there, instead of one of the drill's own")
        parser.add_argument(
            "--key",
            default=os.environ.get("REHYDRATE_KEY"),
            help="with --url: an agent's key that may use the flow `drill` (REHYDRATE_KEY). Without one, the drill "
            "makes keys in a workspace `drills` of this machine's installation, and revokes them afterwards",
        )
        parser.add_argument(
            "--person-key",
            default=os.environ.get("REHYDRATE_PERSON_KEY"),
            help="with --key: the key of a reviewer and operator of that workspace (REHYDRATE_PERSON_KEY)",
        )
        parser.add_argument(
            "--restart",
            metavar="COMMAND",
            help="with --url: what kills that server and starts it again; without it only the agents are killed",
        )
        parser.add_argument("--late", type=float, default=3.0, metavar="SECONDS", help="how late the late agent is (3)")
        parser.add_argument("--language", choices=[code for code, _ in settings.LANGUAGES], default=_language())
        parser.add_argument("--format", choices=["text", "markdown", "json"], default="text")
        parser.add_argument("--agent", default=AGENT, metavar="COMMAND", help="another agent to drill")

    def handle(self, *args: Any, drill: str, language: str, format: str, **options: Any) -> None:
        build_catalogs()
        chosen = DRILLS if drill == "all" else (drill,)
        with translation.override(language), _signals():
            try:
                results = self._perform(chosen, options)
            except KeyboardInterrupt:
                raise CommandError(gettext("Stopped; everything that was started has ended."), returncode=130) from None
            except (DrillError, OSError) as error:
                raise CommandError(str(error), returncode=COULD_NOT) from error
            self.stdout.write(_print(results, format))
            self._say(_keep(results))
        if not all(result["passed"] for result in results):
            sys.exit(1)

    def _perform(self, chosen: tuple[str, ...], options: Json) -> list[Json]:
        settled = Options(agent=shlex.split(options["agent"]), late=options["late"])
        results = []
        with _folder() as folder, _household(folder) as household, self._server(folder, household, options) as server:
            for name in chosen:
                self._say(gettext("Drill: %(title)s …") % {"title": words.title(name)})
                results.append(perform(name, server=server, folder=folder, household=household, options=settled))
        return results

    @contextlib.contextmanager
    def _server(self, folder: Path, household: Household, options: Json) -> Iterator[Server]:
        url, restart = options["url"], options["restart"]
        if url is None:
            if restart:
                raise DrillError(gettext("--restart is for a server named by --url."))
            self._say(gettext("Starting a server of the drill's own …"))
            yield OwnServer(folder, household)
        elif options["key"] and options["person_key"]:
            yield GivenServer(url, Keys(options["key"], options["person_key"]), restart=restart)
        elif options["key"]:
            raise DrillError(gettext("A person's key is needed too, to approve and to reconcile: --person-key."))
        else:
            # As this machine's other commands find the database. It must be the one behind the URL.
            environment = dict(os.environ)
            keys = make_keys(environment)
            try:
                yield GivenServer(url, keys, restart=restart)
            finally:
                revoke_keys(environment, keys)

    def _say(self, line: str) -> None:
        """Not part of what is pasted."""
        self.stderr.write(line, self.style.NOTICE)


def _print(results: list[Json], format: str) -> str:
    if format == "json":
        passed = all(result["passed"] for result in results)
        return json.dumps({"passed": passed, "drills": results}, ensure_ascii=False, indent=2)
    return words.markdown(results) if format == "markdown" else words.text(results)


def _language() -> str:
    """That of the terminal, as far as it is one of ours."""
    named = next(filter(None, (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh-hans" if named.lower().startswith("zh") else settings.LANGUAGE_CODE


# -- keeping the results


def _keep(results: list[Json]) -> str:
    """Puts the results where the console shows them, if this machine has an installation; says whether it did."""
    try:
        with _installation():
            DrillResult.objects.bulk_create(
                DrillResult(
                    drill=result["drill"],
                    passed=result["passed"],
                    started_at=result["started_at"],
                    version=result["version"],
                    body=result,
                )
                for result in results
            )
    except ProgrammingError:
        why = gettext("its tables are not those of this version yet; `up` sees to that.")
        return gettext("The results are not kept on the console's page: %(why)s") % {"why": why}
    except (DatabaseError, data.DataFolderError, postgres.PostgresError, OSError) as error:
        why = (str(error).strip().splitlines() or ["?"])[0]
        return gettext("The results are not kept on the console's page: %(why)s") % {"why": why}
    finally:
        connection.close()
    return gettext("The results are kept, and shown on the console's page “Drills”.")


@contextlib.contextmanager
def _installation() -> Iterator[None]:
    """The database of this machine's installation, started for the moment when it is an embedded one at rest."""
    if not settings.EMBEDDED_DATABASE:
        yield
        return
    server = postgres.Embedded(data.folder())
    if not (server.pgdata / "PG_VERSION").exists():
        raise data.DataFolderError(gettext("nothing has been set up in %(folder)s yet.") % {"folder": data.folder()})
    data.prepare()  # refuses a folder of a newer version
    with server.in_use():
        yield


# -- what is there for the time of the drill, and gone afterwards


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rehydrate-drill-"))
    if os.geteuid() == 0:
        folder.chmod(0o711)  # root's PostgreSQL runs as somebody else, who passes through
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _household(folder: Path) -> Iterator[Household]:
    household = Household(folder)
    try:
        yield household
    finally:
        # Whoever presses Ctrl-C again must not leave half of it running.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        household.close()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP are taken as Ctrl-C is: everything is ended on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
