"""What must be in place before the first service starts: tables, translations, static files, schedules, people."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django_q.models import OrmQ, Schedule
from django_q.tasks import async_task

from approvals.signin import make_link_path
from rehydrate import __version__, catalogs, keys
from rehydrate.apply import apply
from rehydrate.data import DataFolderError, write_private
from rehydrate.flowfile import parse
from rehydrate.models import Flow, Workspace
from rehydrate.node import queue
from rehydrate.tasks import TICKS

OWN_APPS = {"rehydrate", "approvals", "audit"}
ADMINISTRATOR = "admin"
_MIGRATION_LOCK = 0x72656879  # any number that nobody else uses in this database


def migrate() -> None:
    """Brings the tables up to this version; refuses those of a newer one. Of several `up`, one does it."""
    with _one_migrates():
        loader = MigrationLoader(connection)
        unknown = [key for key in loader.applied_migrations if key[0] in OWN_APPS and key not in loader.disk_migrations]
        if unknown:
            app, name = sorted(unknown)[-1]
            raise DataFolderError(
                f"The database was written by a newer version of rehydrate (it has {app}.{name}): "
                "update the program, or name another folder with --data."
            )
        call_command("migrate", interactive=False, verbosity=0)


def build_catalogs() -> None:
    # Installed read-only, the catalogues came with the package.
    with contextlib.suppress(PermissionError):
        catalogs.compile_stale(settings.LOCALE_PATHS)


def collect_static() -> None:
    """Collects, hashes and compresses static files, unless nothing has changed since the last time."""
    target = Path(settings.STATIC_ROOT)
    if "Manifest" not in settings.STORAGES["staticfiles"]["BACKEND"]:
        return
    fingerprint = hashlib.sha256(__version__.encode())
    for finder in get_finders():
        for path, storage in finder.list([]):
            fingerprint.update(f"{path} {storage.size(path)} {storage.get_modified_time(path).timestamp()}\n".encode())
    marker = target / ".collected"
    if marker.exists() and marker.read_text() == fingerprint.hexdigest():
        return
    shutil.rmtree(target, ignore_errors=True)
    call_command("collectstatic", interactive=False, verbosity=0)
    marker.write_text(fingerprint.hexdigest())


def schedule_ticks() -> None:
    """Each minute a tick starts on this `up`'s cluster that does nothing else, and a sender; the first ones at once."""
    # What an earlier one left in the queue would start ticks that nobody needs.
    OrmQ.objects.filter(key=queue("ticks")).delete()
    for name, func, at_once in (
        ("tick", "rehydrate.tasks.tick", TICKS),
        ("deliver", "rehydrate.tasks.start_deliver", 1),
    ):
        Schedule.objects.update_or_create(
            name=queue(name),
            defaults={
                "func": func,
                "schedule_type": Schedule.MINUTES,
                "minutes": 1,
                "repeats": -1,
                "cluster": queue("ticks"),
            },
        )
        for _ in range(at_once):
            async_task(func, cluster=queue("ticks"), group=name)


@dataclass(frozen=True)
class Demo:
    """What the demo's processes are started with."""

    world_port: int
    keys: dict[str, str]

    @property
    def world_url(self) -> str:
        return f"http://127.0.0.1:{self.world_port}"


def demo(folder: Path) -> Demo:
    """Applies the demo's flows once (what people change afterwards stays), and keeps keys for its agents."""
    notes = folder / "demo.json"
    kept: dict[str, Any] = json.loads(notes.read_text()) if notes.exists() else {}
    text = (Path(__file__).parent.parent / "demo" / "flows.toml").read_text(encoding="utf-8")
    document = parse(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    workspaces = {name: flow.workspace for name, flow in document.flows.items()}
    if kept.get("applied") != digest or Flow.objects.filter(name__in=workspaces).count() < len(workspaces):
        apply(document, by="demo")
    agent_keys: dict[str, str] = {}
    for flow, slug in workspaces.items():
        text = kept.get("keys", {}).get(flow, "")
        if not text or keys.find(text) is None:
            text = keys.issue_agent(
                workspace=Workspace.objects.get(slug=slug), name=f"{flow} agent", flows=[flow], by="demo"
            )
        agent_keys[flow] = text
    port = _free_port(kept.get("world_port"))
    write_private(notes, json.dumps({"applied": digest, "world_port": port, "keys": agent_keys}, indent=2) + "\n")
    return Demo(world_port=port, keys=agent_keys)


def _free_port(wanted: int | None) -> int:
    """The wanted one, so that addresses given out earlier still lead to it; another when it is taken."""
    for port in (wanted or 0, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise DataFolderError("This machine has no free port for the demo's outside world: start with --no-demo.")


def first_administrator() -> None:
    """An empty installation gets a superuser without a password, who signs in by the link."""
    if not User.objects.filter(is_superuser=True).exists():
        user, _ = User.objects.get_or_create(username=ADMINISTRATOR)
        user.is_superuser = user.is_staff = user.is_active = True
        user.set_unusable_password()
        user.save()


def sign_in_link() -> str | None:
    """The path that signs an administrator in, once; None when no administrator is active."""
    connection.close()  # the one of the preparation: the server may have been started again since
    try:
        administrators = User.objects.filter(is_superuser=True, is_active=True)
        user = administrators.filter(username=ADMINISTRATOR).first() or administrators.order_by("pk").first()
        return make_link_path(user) if user else None
    finally:
        connection.close()


def _locked() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_MIGRATION_LOCK])
        return bool(cursor.fetchone()[0])


@contextlib.contextmanager
def _one_migrates() -> Iterator[None]:
    # Asked for again and again: an index that is made beside the work waits for every statement under way, and one that
    # waited for the lock would be one of those.
    while not _locked():
        time.sleep(0.2)
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_MIGRATION_LOCK])
