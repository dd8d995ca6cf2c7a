"""Applies what is due, many runs in one transaction; a run that keeps failing is set aside and holds up nobody.

A batch that raises is halved until the run whose fault it is stands alone. One that kills or hangs its worker leaves
nobody to say so: whoever finds a worker gone silent counts (`counted`) from then on, that is, notes each batch as tried
before trying it. What is noted (models.Trouble) is tried alone, again noted first, and set aside at `TRIES`, which the
inbox and an administrator's event tell once. While nothing goes wrong, none of this costs a statement.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from django.db import Error, InterfaceError, OperationalError, connection, transaction

from rehydrate import claims, clock, ledger, notices
from rehydrate.models import AdminEvent, Run, Trouble

log = logging.getLogger(__name__)

#: How often it is tried to apply what is due to a run before it is set aside.
TRIES: Final = 3
#: Between two tries of a run in trouble; and after as long, a try of which nothing was heard has lost its worker.
PAUSE: Final = dt.timedelta(seconds=5)
#: Seconds that a batch may take, many times what it needs: whatever a worker hangs at must not keep the others.
LONGEST: Final = 15.0
#: SQLSTATEs that say nothing about a run: connection, standby, rollback, resources, operator, system.
_NOBODYS_FAULT: Final = ("08", "25006", "40", "53", "55", "57", "58")


def overdue(
    limit: int, *, workspace: str | None = None, flows: tuple[str, ...] | None = None, counted: bool = False
) -> int:
    """Apply what is due to the most overdue runs, `limit` for each kind of due thing. How many were dealt with."""
    taken: list[str] = []

    def take() -> list[str]:
        taken.extend(claims.lock_overdue(limit, workspace=workspace, flows=flows))
        return taken

    if not counted:
        return _apply(taken, take)
    now = clock.now()
    with transaction.atomic():
        Trouble.objects.bulk_create(
            [Trouble(run_id=pk, tries=1, since=now, tried_at=now, retry_at=now + PAUSE) for pk in take()],
            ignore_conflicts=True,
        )
    return catch_up(taken)


def catch_up(run_ids: list[str]) -> int:
    """Apply what is due to these runs, as far as nobody holds them: whoever does applies the same."""
    return _apply(run_ids, lambda: _free(run_ids)) if run_ids else 0


def troubled(limit: int = 20) -> int:
    """Try the runs in trouble whose time has come, each alone and counted before. How many were dealt with.

    A few at a time: what is due to others comes in between.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT x.run_id, x.tries, x.retry_at IS NULL"
            " FROM rehydrate_trouble x JOIN rehydrate_run r ON r.id = x.run_id"
            " WHERE x.retry_at <= clock_timestamp() + %s::interval OR x.set_aside_at < r.updated_at"
            " ORDER BY x.tried_at LIMIT %s",
            [clock.interval(), limit],
        )
        due = [(str(run_id), tries, aside) for run_id, tries, aside in cursor.fetchall()]
    done = 0
    for run_id, tries, aside in due:
        if aside:  # a request has changed it since: it may be sound again
            done += catch_up([run_id])
        elif tries >= TRIES:  # whoever made the last try did not live to say what came of it
            done += _set_aside(run_id)
        elif _count(run_id, tries):
            dealt_with = catch_up([run_id])
            if not dealt_with:  # somebody holds it: that was no try
                Trouble.objects.filter(run_id=run_id, tries=tries + 1).update(tries=tries)
            done += dealt_with
    return done


def try_again(run_id: str, *, by: str, reason: str = "", channel: str = "console") -> bool:
    """A person has what was set aside tried again; False when it was not set aside."""
    with transaction.atomic():
        aside = Trouble.objects.filter(run_id=run_id, set_aside_at__isnull=False)
        if not aside.update(tries=0, set_aside_at=None, retry_at=clock.now()):
            return False
        _tell(run_id, "run.try_again", actor_kind="person", actor_id=by, channel=channel, detail={"reason": reason})
    return True


# -- one batch


def _apply(run_ids: list[str], lock: ledger.Locker) -> int:
    """In one transaction; where that raises in two, and so on."""
    try:
        with _in_time(LONGEST):
            return ledger.catch_up(lock)
    except Exception as error:
        if _is_nobodys_fault(error):
            raise
        if len(run_ids) == 1:
            log.exception("what is due cannot be applied to run %s", run_ids[0])
            _failed(run_ids[0], error)
            return 1
    middle = len(run_ids) // 2
    return catch_up(run_ids[:middle]) + catch_up(run_ids[middle:])


def _free(run_ids: list[str]) -> list[str]:
    """Locks those that nobody holds. What is applied to them ends their trouble."""
    free = claims.lock_free(run_ids)
    Trouble.objects.filter(run_id__in=free).delete()
    return free


def _is_nobodys_fault(error: Exception) -> bool:
    """Whether it failed for a reason that has nothing to do with the run: then the batch is tried again as it is."""
    if isinstance(error, ledger.Overtaken):
        return True
    if not isinstance(error, Error):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    if state is None:
        return isinstance(error, OperationalError | InterfaceError)
    return bool(state.startswith(_NOBODYS_FAULT))


class TookTooLong(Exception):
    """A batch did not come to its end in time."""


@contextlib.contextmanager
def _in_time(seconds: float) -> Iterator[None]:
    """Raises `TookTooLong` within it when the time is up. An alarm that was set before goes on afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"it took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    begun = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        # The outer alarm may have become due meanwhile: then it comes at once.
        rest = max(left - (time.monotonic() - begun), 0.001) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, rest)


# -- trouble


def _count(run_id: str, tries: int) -> bool:
    """Notes a try before it is made; False when somebody else makes it."""
    now = clock.now()
    mine = Trouble.objects.filter(run_id=run_id, tries=tries, retry_at__lte=now)
    return mine.update(tries=tries + 1, tried_at=now, retry_at=now + PAUSE) == 1


def _failed(run_id: str, error: Exception) -> None:
    now = clock.now()
    words = str(error).splitlines()
    text = f"{type(error).__name__}: {words[0][:300] if words else '–'}"
    found, new = Trouble.objects.get_or_create(
        run_id=run_id, defaults={"tries": 1, "since": now, "tried_at": now, "retry_at": now, "error": text}
    )
    if not new:
        Trouble.objects.filter(run_id=run_id).update(error=text, set_aside_at=now if found.set_aside_at else None)
        if found.tries >= TRIES:
            _set_aside(run_id)


def _set_aside(run_id: str) -> int:
    with transaction.atomic():
        in_trouble = Trouble.objects.filter(run_id=run_id, set_aside_at__isnull=True)
        if not in_trouble.update(set_aside_at=clock.now(), retry_at=None):
            return 0
        trouble = Trouble.objects.get(run_id=run_id)
        _tell(run_id, "run.set_aside", detail={"tries": trouble.tries, "error": trouble.error})
    log.error("run %s is set aside: what is due could not be applied in %s tries", run_id, trouble.tries)
    return 1


def _tell(run_id: str, act: str, *, actor_kind: str = "system", actor_id: str = "ledger", **fields: Any) -> None:
    workspace = Run.objects.values_list("workspace_id", flat=True).get(pk=run_id)
    AdminEvent.objects.create(
        workspace_id=workspace, actor_kind=actor_kind, actor_id=actor_id, act=act, subject=run_id, **fields
    )
    with connection.cursor() as cursor:  # pages that show the run show it
        cursor.execute(notices.tell(), [notices.parts({notices.Kind.CHANGED: {str(workspace): [run_id]}})])
