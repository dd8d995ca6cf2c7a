"""From a request to its `Caller`: a Bearer key of an agent or a person, or the browser's session with CSRF."""

import json
from typing import Any, Final

from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.http import HttpRequest
from rest_framework.authentication import CSRFCheck
from rest_framework.exceptions import NotAuthenticated

from rehydrate import callers, keys
from rehydrate.api import limits
from rehydrate.callers import Caller
from rehydrate.core.refusals import Refusal
from rehydrate.models import ApiKey

#: A key's row is written at most this often, so that reading stays reading.
USED_EVERY: Final = "1 minute"
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def caller_of(request: HttpRequest) -> Caller:
    """Who is asking. Raises 401 `unauthenticated`, or 403 `forbidden` for a session without its CSRF token."""
    header = request.META.get("HTTP_AUTHORIZATION")
    return _by_key(request, header) if header is not None else _by_session(request)


#: One statement for whoever it is, without building rows of models: it is run before everything else.
_FIND: Final = """
SELECT k.id, k.kind, k.name, k.digest, k.workspace_id, k.flows, k.last_used_at < now() - %s::interval IS NOT FALSE,
    u.id, u.username, u.first_name, u.last_name, u.is_active, CASE
        WHEN k.kind = 'agent' THEN NULL
        WHEN u.is_superuser THEN (
            SELECT jsonb_object_agg(w.id, '["admin", "auditor"]'::jsonb) FROM rehydrate_workspace w
        )
        ELSE (
            SELECT jsonb_object_agg(x.workspace_id, x.roles) FROM (
                SELECT g.workspace_id, jsonb_agg(DISTINCT role) AS roles
                FROM rehydrate_membership m JOIN rehydrate_group g ON g.id = m.group_id, unnest(g.roles) role
                WHERE m.user_id = u.id GROUP BY g.workspace_id
            ) x
        )
    END
FROM rehydrate_apikey k LEFT JOIN auth_user u ON u.id = k.user_id
WHERE k.prefix = %s AND k.revoked_at IS NULL
"""


def _by_key(request: HttpRequest, header: str) -> Caller:
    scheme, _, text = header.partition(" ")
    text = text.strip()
    prefix = keys.prefix_of(text) if scheme.lower() == "bearer" else None
    if prefix is None:
        raise _wrong(request, "Send a key: Authorization: Bearer rhk_...")
    # No cache: a revoked key opens nothing from the next request on.
    with connection.cursor() as cursor:
        cursor.execute(_FIND, [USED_EVERY, prefix])
        row = cursor.fetchone()
    if row is None or not keys.opens(text, row[3]) or row[11] is False:
        raise _wrong(request, "This key is not known, or was revoked.")
    key_id, kind, name, _, workspace, flows, stale, user_id, username, first, last, _, roles = row
    if stale:
        ApiKey.objects.filter(pk=key_id).update(last_used_at=Now())
    if kind == ApiKey.Kind.PERSON:
        return callers.person(
            username, f"{first} {last}".strip(), _roles(roles), user_id=user_id, key_id=str(key_id), channel="api"
        )
    return Caller(
        kind="agent",
        id=name,
        name=name,
        workspaces={str(workspace): frozenset()},
        flows=tuple(flows),
        owner=username,
        key_id=str(key_id),
    )


def _roles(found: Any) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = json.loads(found) if isinstance(found, str) else found or {}
    return roles


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
