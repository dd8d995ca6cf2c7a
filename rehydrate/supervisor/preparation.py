"""What must be in place before the first service starts: tables, translations, static files, schedules, the first person."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.staticfiles.finders import get_finders
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader
from django_q.models import Schedule
from django_q.tasks import async_task

from approvals.signin import make_link_path
from rehydrate import __version__, catalogs
from rehydrate.data import DataFolderError

OWN_APPS = {"rehydrate", "approvals", "audit"}
ADMINISTRATOR = "admin"
_MIGRATION_LOCK = 0x72656879  # any number that nobody else uses in this database


def migrate() -> None:
    """Brings the tables up to this version; refuses those of a newer one. Of several `up` on one database, one does it."""
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
    """One tick starts each minute, on the cluster that does nothing else; the first one at once."""
    Schedule.objects.update_or_create(
        name="tick",
        defaults={
            "func": "rehydrate.tasks.tick",
            "schedule_type": Schedule.MINUTES,
            "minutes": 1,
            "repeats": -1,
            "cluster": "ticks",
        },
    )
    async_task("rehydrate.tasks.tick", cluster="ticks", group="tick")


def first_administrator() -> None:
    """An empty installation gets a superuser without a password, who signs in by the link."""
    if not User.objects.filter(is_superuser=True).exists():
        user, _ = User.objects.get_or_create(username=ADMINISTRATOR)
        user.is_superuser = user.is_staff = user.is_active = True
        user.set_unusable_password()
        user.save()


def sign_in_link() -> str | None:
    """The path that signs an administrator in, once; None when no administrator is active."""
    try:
        administrators = User.objects.filter(is_superuser=True, is_active=True)
        user = administrators.filter(username=ADMINISTRATOR).first() or administrators.order_by("pk").first()
        return make_link_path(user) if user else None
    finally:
        connection.close()


@contextlib.contextmanager
def _one_migrates() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [_MIGRATION_LOCK])
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_MIGRATION_LOCK])
