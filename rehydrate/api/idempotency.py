"""Idempotency-Key: the first answer to a POST, kept with the change it tells of, and given again. No endpoints here."""

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from django.db import connection, transaction
from django.http import HttpResponse

from rehydrate import answers, clock, cooperative, seal
from rehydrate.api import problems
from rehydrate.core.refusals import Refusal
from rehydrate.models import IdempotencyRecord, Run

HEADER: Final = "HTTP_IDEMPOTENCY_KEY"
KEPT_FOR: Final = timedelta(days=7)

#: A fresh row, or one whose seven days are over, is ours. A twin under way holds the row until it commits: we wait.
_RESERVE: Final = """
INSERT INTO rehydrate_idempotencyrecord AS r (caller, path, key, request_digest, content_type, created_at)
VALUES (%(caller)s, %(path)s, %(key)s, %(digest)s, '', clock_timestamp())
ON CONFLICT (caller, path, key) DO UPDATE
SET request_digest = EXCLUDED.request_digest, status = NULL, body = NULL, run_id = NULL, epoch = NULL,
    created_at = EXCLUDED.created_at
WHERE r.created_at < clock_timestamp() - %(kept)s::interval
RETURNING id
"""


@dataclass(frozen=True)
class Request:
    """What makes two requests the same: who, where, which key; and whether they say the same: the body's digest."""

    caller: str
    path: str
    key: str
    digest: str


@dataclass(frozen=True)
class Grant:
    """A lease or start that an answer grants: it must not be given again once the epoch is no longer live."""

    run_id: str
    epoch: int


@dataclass(frozen=True)
class Outcome:
    """An answer, what it grants, and whether it is the last word (a long poll that found nothing asks again)."""

    response: HttpResponse
    grant: Grant | None = None
    final: bool = True


def checked_key(text: str) -> str:
    """The header's value, or 422: 1 to 255 printable characters."""
    if not 1 <= len(text) <= 255 or not text.isprintable():
        detail = "Idempotency-Key has 1 to 255 printable characters."
        raise Refusal("invalid", detail, errors=[{"pointer": "", "detail": detail}])
    return text


def short(path: str) -> str:
    """The path as it is kept: what is longer than its column, or secret by itself, is told apart by a digest."""
    if "/hooks/" in path:
        return f"hooks#{hashlib.sha256(path.encode()).hexdigest()}"
    return path if len(path) <= 300 else f"{path[:200]}#{hashlib.sha256(path.encode()).hexdigest()}"


def once(request: Request, act: Callable[[], Outcome]) -> Outcome:
    """Carries `act` out, or gives the answer of the time it was.

    The record commits with the change. What `act` raises undoes both, so that a 5xx or 429 is never kept; a refusal is
    turned into its problem before, since the ledger commits refusals that matter (contract.md section 4, rule 14).
    """
    with transaction.atomic():
        row_id = _reserve(request)
        if row_id is None:
            return Outcome(_replay(request))
        outcome = act()
        if _is_kept(outcome):
            _keep(row_id, outcome)
        else:
            transaction.set_rollback(True)
        return outcome


def once_on_the_loop(request: Request, act: Callable[[], Outcome]) -> Outcome:
    """As `once`, on the event loop: the one change and the answer are saved in one statement, with those of others.

    Whatever that cannot do (an answer that is there already, a change that takes a lock, an answer without a change) is
    done in a thread, and from the start: nothing was saved then.
    """
    slot = answers.Slot()
    before = answers.wanted.set(slot)
    try:
        outcome = act()
    except answers.Apart:
        outcome = None
    except BaseException:
        slot.answer()  # there will be none
        raise
    finally:
        answers.wanted.reset(before)
    if outcome is not None and slot.decided:
        if _is_kept(outcome) and slot.offer(_row(request, outcome)):
            return outcome
    elif outcome is not None and not outcome.final and not cooperative.aside(known, request):
        return outcome
    slot.answer()
    return cooperative.aside(once, request, act)


def _is_kept(outcome: Outcome) -> bool:
    status = outcome.response.status_code
    return outcome.final and status != 429 and status < 500


def _row(request: Request, outcome: Outcome) -> dict[str, Any]:
    """As the ledger saves it (see `projections.Change`)."""
    return {
        "caller": request.caller,
        "path": request.path,
        "key": request.key,
        "request_digest": request.digest,
        "status": outcome.response.status_code,
        "content_type": outcome.response.headers.get("Content-Type", ""),
        "body": f"\\x{_sealed(outcome.response.content).hex()}",  # as PostgreSQL reads bytes
        "granted": outcome.grant.run_id if outcome.grant else None,
        "epoch": outcome.grant.epoch if outcome.grant else None,
    }


def once_apart(request: Request, act: Callable[[], Outcome]) -> Outcome:
    """As `once`, where `act` has transactions of its own and may safely be repeated; the answer is kept after it.

    For signals: they are stored before they are matched, and deduplicated by what they are.
    """
    if known(request):
        return Outcome(_replay(request))
    outcome = act()
    with transaction.atomic():
        row_id = _reserve(request)
        if row_id is None:
            return Outcome(_replay(request))
        _keep(row_id, outcome)
    return outcome


def known(request: Request) -> bool:
    """Whether there is an answer to this key."""
    fresh = IdempotencyRecord.objects.filter(created_at__gte=clock.now() - KEPT_FOR)
    return fresh.filter(caller=request.caller, path=request.path, key=request.key).exists()


def _reserve(request: Request) -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(
            _RESERVE,
            {
                "caller": request.caller,
                "path": request.path,
                "key": request.key,
                "digest": request.digest,
                "kept": f"{KEPT_FOR.total_seconds()} seconds",
            },
        )
        row = cursor.fetchone()
    return int(row[0]) if row else None


def _keep(row_id: int, outcome: Outcome) -> None:
    grant = outcome.grant
    IdempotencyRecord.objects.filter(pk=row_id).update(
        status=outcome.response.status_code,
        content_type=outcome.response.headers.get("Content-Type", ""),
        body=_sealed(outcome.response.content),
        run_id=grant.run_id if grant else None,
        epoch=grant.epoch if grant else None,
    )


def _sealed(content: bytes) -> bytes:
    """An answer as it is kept, small and encrypted: it may hold an agent's state, secrets and addresses."""
    return seal.encrypt_bytes(zlib.compress(content, 1) if len(content) > 500 else content)


def _unsealed(kept: bytes) -> bytes:
    content = seal.decrypt_bytes(kept)
    return zlib.decompress(content) if content.startswith(b"x") else content  # no JSON begins like this


def _replay(request: Request) -> HttpResponse:
    kept: Any = IdempotencyRecord.objects.get(caller=request.caller, path=request.path, key=request.key)
    if kept.request_digest != request.digest:
        detail = "This Idempotency-Key was used with another body: use a new key for a new request."
        return problems.for_refusal(Refusal("idempotency_key_reused", detail))
    if kept.epoch is not None and not _is_live(kept.run_id, kept.epoch):
        detail = "What this request was granted is over: its lease is no longer live. Rehydrate the run."
        return problems.for_refusal(Refusal("lease_lost", detail))
    response = HttpResponse(_unsealed(bytes(kept.body)), status=kept.status)
    if kept.content_type:
        response.headers["Content-Type"] = kept.content_type
    else:
        del response.headers["Content-Type"]
    response.headers["Idempotency-Replayed"] = "true"
    return response


def _is_live(run_id: Any, epoch: int) -> bool:
    return Run.objects.filter(pk=run_id, epoch=epoch, lease_expires_at__gt=clock.now()).exists()
