"""From a request to its `Caller`: a Bearer key of an agent or a person, or the browser's session with CSRF."""

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec
from django.contrib.auth.models import User
from django.db.models.functions import Now
from django.http import HttpRequest
from rest_framework.authentication import CSRFCheck
from rest_framework.exceptions import NotAuthenticated

from rehydrate import callers, cooperative, keys, rights, sql
from rehydrate.api import limits
from rehydrate.callers import Caller
from rehydrate.core.refusals import Refusal
from rehydrate.models import ApiKey

#: A key's row is written at most this often, so that reading stays reading.
USED_EVERY: Final = "1 minute"
#: Seconds for which a caller who was looked up is kept: not longer, so that the use of a key is noted in time.
KEPT_FOR: Final = 60.0
MAX_KEPT: Final = 1000
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Kept:
    """Callers who were looked up, with the number that everybody's rights had then, by the digest of their key."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._found: OrderedDict[str, tuple[float, Caller, int]] = OrderedDict()

    def get(self, key: str) -> Caller | None:
        """The caller, whose `rights` are still to be confirmed."""
        found = self._found.get(keys.digest_of(key))
        if found is None or found[0] < self._monotonic():
            return None
        return dataclasses.replace(found[1], rights=rights.Rights(found[2]))

    def put(self, key: str, caller: Caller, number: int) -> None:
        self._found[keys.digest_of(key)] = self._monotonic() + KEPT_FOR, caller, number
        if len(self._found) > MAX_KEPT:
            self._found.popitem(last=False)

    def drop(self, key: str) -> None:
        self._found.pop(keys.digest_of(key), None)


kept: Final = Kept()


def caller_of(request: HttpRequest, *, trusting: bool = False) -> Caller:
    """Who is asking. Raises 401 `unauthenticated`, or 403 `forbidden` for a session without its CSRF token.

    Trusting, it may be what the key was found to be a while ago: then there are `rights`, to be confirmed.
    """
    header = request.META.get("HTTP_AUTHORIZATION")
    return _by_key(request, header, trusting) if header is not None else _by_session(request)


#: One statement for whoever it is, without building rows of models: it is run before everything else.
_FIND: Final = f"""
SELECT jsonb_build_object(
    'number', {rights.NUMBER},
    'id', k.id, 'kind', k.kind, 'name', k.name, 'digest', k.digest, 'workspace', k.workspace_id, 'flows', k.flows,
    'stale', k.last_used_at < now() - %s::interval IS NOT FALSE, 'user_id', u.id, 'username', u.username,
    'full_name', btrim(u.first_name || ' ' || u.last_name), 'barred', u.is_active IS FALSE, 'roles', CASE
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
    END)::text
FROM rehydrate_apikey k LEFT JOIN auth_user u ON u.id = k.user_id
WHERE k.prefix = %s AND k.revoked_at IS NULL
"""  # noqa: S608 (a statement of ours)


class _Key(msgspec.Struct):
    """A key that was not revoked, and whoever is behind it."""

    number: int | None
    id: str
    kind: str
    name: str
    digest: str
    workspace: str | None
    flows: list[str]
    stale: bool
    barred: bool
    user_id: int | None
    username: str | None
    full_name: str | None
    roles: dict[str, list[str]] | None


def _by_key(request: HttpRequest, header: str, trusting: bool) -> Caller:
    scheme, _, text = header.partition(" ")
    text = text.strip()
    prefix = keys.prefix_of(text) if scheme.lower() == "bearer" else None
    if prefix is None:
        raise _wrong(request, "Send a key: Authorization: Bearer rhk_...")
    if trusting and (known := kept.get(text)) is not None:
        return known
    kept.drop(text)
    found = sql.texts(_FIND, [USED_EVERY, prefix])
    key = msgspec.json.decode(found[0][0] or "", type=_Key) if found else None
    if key is None or not keys.opens(text, key.digest) or key.barred:
        raise _wrong(request, "This key is not known, or was revoked.")
    if key.stale:
        cooperative.aside(_used_now, key.id)
    caller = _caller(key)
    if key.number is not None:
        kept.put(text, caller, key.number)
    return caller


def _used_now(key_id: str) -> None:
    ApiKey.objects.filter(pk=key_id).update(last_used_at=Now())


def _caller(key: _Key) -> Caller:
    if key.kind == ApiKey.Kind.PERSON:
        assert key.username is not None
        assert key.user_id is not None
        return callers.person(
            key.username, key.full_name or "", key.roles or {}, user_id=key.user_id, key_id=key.id, channel="api"
        )
    return Caller(
        kind="agent",
        id=key.name,
        name=key.name,
        workspaces={str(key.workspace): frozenset()},
        flows=tuple(key.flows),
        owner=key.username,
        key_id=key.id,
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
