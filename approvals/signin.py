"""Sign-in links that work once. Stateless: a token dies with the sign-in that uses it; passwords live elsewhere."""

from __future__ import annotations

import hashlib
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.db import transaction
from django.urls import reverse
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode


class _LinkTokens(PasswordResetTokenGenerator):
    """Signs user, password and last sign-in: whichever of them changes first ends the token."""

    key_salt = "approvals.signin.link"


_tokens = _LinkTokens()


def make_link_path(user: User) -> str:
    """The path of a link that signs `user` in once (valid for `PASSWORD_RESET_TIMEOUT` seconds)."""
    uid = urlsafe_base64_encode(str(user.pk).encode())
    return reverse("sign_in_link", args=[f"{uid}.{_tokens.make_token(user)}"])


def peek(token: str) -> Any | None:
    """The active user that `token` would sign in, or None. Changes nothing: mail scanners open links, too."""
    return _user_for(token, lock=False)


def redeem(token: str) -> Any | None:
    """The user to sign in, its row locked until the caller's transaction ends, or None when the link is used up.

    Must be called in a transaction that also signs in, so that of two simultaneous uses one wins.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("redeem() needs the transaction that signs in")
    return _user_for(token, lock=True)


def fingerprint(text: str) -> str:
    """A short digest for counting tries without keeping names."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _user_for(token: str, *, lock: bool) -> Any | None:
    uid, _, signature = token.partition(".")
    users = get_user_model()._default_manager.all()
    if lock:
        users = users.select_for_update()
    try:
        user = users.filter(pk=urlsafe_base64_decode(uid).decode()).first()
    except (ValueError, OverflowError):
        return None
    if user is None or not user.is_active or not _tokens.check_token(user, signature):
        return None
    return user
