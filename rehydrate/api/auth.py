"""From a request to its `Caller`: a Bearer key of an agent or a person, or the browser's session with CSRF."""

import dataclasses
import datetime as dt
from typing import Final

from django.contrib.auth.models import User
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import CSRFCheck
from rest_framework.exceptions import NotAuthenticated

from rehydrate import callers, keys
from rehydrate.api import limits
from rehydrate.callers import Caller
from rehydrate.core.refusals import Refusal
from rehydrate.models import ApiKey

#: A key's row is written at most this often, so that reading stays reading.
USED_EVERY: Final = dt.timedelta(minutes=1)
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def caller_of(request: HttpRequest) -> Caller:
    """Who is asking. Raises 401 `unauthenticated`, or 403 `forbidden` for a session without its CSRF token."""
    header = request.META.get("HTTP_AUTHORIZATION")
    return _by_key(request, header) if header is not None else _by_session(request)


def _by_key(request: HttpRequest, header: str) -> Caller:
    scheme, _, text = header.partition(" ")
    if scheme.lower() != "bearer":
        raise _wrong(request, "Send a key: Authorization: Bearer rhk_...")
    # No cache: a revoked key opens nothing from the next request on.
    key = keys.find(text.strip())
    if key is None or (key.user is not None and not key.user.is_active):
        raise _wrong(request, "This key is not known, or was revoked.")
    now = timezone.now()
    if key.last_used_at is None or key.last_used_at < now - USED_EVERY:
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - USED_EVERY)
        ApiKey.objects.filter(stale, pk=key.pk).update(last_used_at=now)
    if key.kind == ApiKey.Kind.PERSON and key.user is not None:
        return dataclasses.replace(callers.for_user(key.user, channel="api"), key_id=str(key.pk))
    return Caller(
        kind="agent",
        id=key.name,
        name=key.name,
        workspaces={str(key.workspace_id): frozenset()},
        flows=tuple(key.flows),
        owner=key.user.get_username() if key.user else None,
        key_id=str(key.pk),
    )


def _wrong(request: HttpRequest, detail: str) -> Refusal:
    limits.wrong_keys.spend(request.META.get("REMOTE_ADDR", ""))
    return Refusal("unauthenticated", detail)


def _by_session(request: HttpRequest) -> Caller:
    user = getattr(request, "user", None)
    if not isinstance(user, User) or not user.is_active:
        raise NotAuthenticated
    if request.method not in _SAFE:
        # Only a session is sent along by a browser unasked; a key is not, and needs no token.
        check = CSRFCheck(lambda _: None)  # type: ignore[arg-type]
        check.process_request(request)
        if reason := check.process_view(request, None, (), {}):  # type: ignore[arg-type]
            raise Refusal("forbidden", f"The CSRF token is missing or wrong: {reason}")
    return callers.for_user(user, channel="api")
