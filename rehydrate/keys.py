"""API keys: made, shown once, kept as a digest, found again, revoked. Whom a key stands for is said in `callers`."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from django.contrib.auth.models import User
from django.db.models.functions import Now

from rehydrate.models import AdminEvent, ApiKey, Workspace

_MARK = "rhk"
EVERY_FLOW = "*"


def issue_agent(
    *, workspace: Workspace, name: str, flows: list[str], owner: User | None = None, by: str = "command"
) -> str:
    """A new key of an agent: the text to hand over, which is never shown again. No flows named: all."""
    key, text = _make(kind=ApiKey.Kind.AGENT, name=name, workspace=workspace, user=owner, flows=flows or [EVERY_FLOW])
    _note(key, "key.issued", by=by)
    return text


def issue_person(*, user: User, name: str = "", by: str = "command") -> str:
    """A new personal key; it may do what its person may."""
    key, text = _make(kind=ApiKey.Kind.PERSON, name=name or user.get_username(), user=user)
    _note(key, "key.issued", by=by)
    return text


def find(text: str) -> ApiKey | None:
    """The live key with this text, or None. One indexed look-up, then a comparison in constant time."""
    prefix = prefix_of(text)
    if prefix is None:
        return None
    key = ApiKey.objects.select_related("workspace", "user").filter(prefix=prefix, revoked_at__isnull=True).first()
    return key if key is not None and opens(text, key.digest) else None


def prefix_of(text: str) -> str | None:
    """By what the row of a key is found; None for what is no key."""
    mark, _, rest = text.partition("_")
    prefix, _, secret = rest.partition("_")
    return prefix if mark == _MARK and prefix and secret and len(text) <= 200 else None


def opens(text: str, digest: str) -> bool:
    """Whether the text is the key with this digest; compared in constant time."""
    return hmac.compare_digest(digest, digest_of(text))


def revoke(key: ApiKey, *, by: str) -> None:
    """From now on the key opens nothing. Doing it twice changes nothing."""
    if ApiKey.objects.filter(pk=key.pk, revoked_at__isnull=True).update(revoked_at=Now()):
        _note(key, "key.revoked", by=by)


def renew(old: ApiKey, *, by: str = "command") -> str:
    """A new key with the rights of an old one, shown this once; the old one stays in force until it is revoked."""
    key, text = _make(
        kind=old.kind,
        name=old.name,
        workspace=old.workspace,
        user=old.user,
        flows=old.flows,
        scopes=old.scopes,
        created_by=by,
    )
    _note(key, "key.renewed", by=by)
    return text


def _make(**columns: object) -> tuple[ApiKey, str]:
    prefix = secrets.token_hex(5)
    text = f"{_MARK}_{prefix}_{secrets.token_urlsafe(32)}"
    return ApiKey.objects.create(prefix=prefix, digest=digest_of(text), **columns), text


def digest_of(text: str) -> str:
    """What is kept of a key."""
    # The text has 256 random bits: a slow password hash would add nothing but time to each request.
    return hashlib.sha256(text.encode()).hexdigest()


def _note(key: ApiKey, act: str, *, by: str) -> None:
    AdminEvent.objects.create(
        workspace=key.workspace,
        actor_kind="system" if by in {"command", "demo"} else "person",
        actor_id=by,
        act=act,
        subject=str(key),
        detail={"kind": key.kind, "flows": key.flows, "user": key.user.get_username() if key.user else None},
    )
