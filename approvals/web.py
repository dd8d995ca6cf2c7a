"""What all pages share: who is asking, the frame around a page, bodies made from forms, and one-time form tokens."""

from __future__ import annotations

import datetime as dt
import functools
import json
import secrets
from collections.abc import Callable
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import get_user
from django.contrib.auth.models import User
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils.cache import patch_cache_control, patch_vary_headers
from django.utils.http import url_has_allowed_host_and_scheme

from rehydrate import callers, clock, selectors
from rehydrate.core import parsing
from rehydrate.core.refusals import Refusal

P = ParamSpec("P")
T = TypeVar("T")
SCOPES = ("mine", "available", "overdue", "review", "unknown", "taken_over", "decided")
#: Form tokens remembered for each session, so that a form sent twice acts once.
TOKENS_KEPT = 60
Shape = dict[str, Any]


def is_htmx(request: HttpRequest) -> bool:
    """Whether htmx asks for a part of a page (and not for a page that history restores)."""
    return request.headers.get("HX-Request") == "true" and request.headers.get("HX-History-Restore-Request") != "true"


def signed_in(view: Callable[Concatenate[HttpRequest, P], HttpResponse]) -> Callable[..., HttpResponse]:
    """Only for people who signed in. A page leads to sign-in; a part of a page gets 401, and the page says so.

    `not_found` and `forbidden` of the ledger become the pages 404 and 403.
    """

    @functools.wraps(view)
    def inner(request: HttpRequest, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            if is_htmx(request):
                return HttpResponse(status=401)
            return HttpResponseRedirect(f"{reverse('sign_in')}?{urlencode({'next': request.get_full_path()})}")
        request.caller = callers.for_user(request.user)  # type: ignore[attr-defined]
        try:
            response = view(request, *args, **kwargs)
        except SignedOutError:
            return HttpResponse(status=401)
        except Refusal as refusal:
            if refusal.code == "not_found":
                raise Http404(refusal.message) from refusal
            if refusal.code == "forbidden":
                return page(request, "403.html", {"refusal": refusal}, status=403)
            if refusal.code == "invalid":  # an address that was made by hand, such as a cursor of another list
                return HttpResponseRedirect(request.path)
            raise
        patch_cache_control(response, private=True, no_cache=True)
        patch_vary_headers(response, ["HX-Request", "Accept-Language", "Cookie"])
        return response

    return inner


class SignedOutError(Exception):
    """While the answer was waited for, the person signed out, was switched off, or the session ended."""


def renew(request: HttpRequest) -> None:
    """The person and their roles as of now, for an answer that comes later than its request.

    The request's own session stays as it was: what a late answer said about the cookie would undo a new sign-in.
    """
    sessions = import_module(settings.SESSION_ENGINE)
    now = HttpRequest()
    now.session = sessions.SessionStore(request.session.session_key)
    user = get_user(now)
    if not isinstance(user, User):
        raise SignedOutError
    request.user = user
    request.caller = callers.for_user(user)  # type: ignore[attr-defined]


def caller_of(request: HttpRequest) -> Any:
    """The `rehydrate.callers.Caller` of this request."""
    return request.caller  # type: ignore[attr-defined]


def person(request: HttpRequest) -> User:
    """The signed-in user; only for views that `signed_in` guards."""
    return cast(User, request.user)


def scope_of(request: HttpRequest) -> str:
    """The inbox scope that the address names, or that a form carried along."""
    wanted = request.GET.get("scope") or request.POST.get("scope") or ""
    return wanted if wanted in SCOPES else ""


def frame(request: HttpRequest) -> Shape:
    """What is around every page: the rail with its counts, the token of its forms, the moment it was made."""
    counts = selectors.inbox_counts(caller_of(request))
    return {
        "now": clock.now(),
        "scopes": [{"id": name, "count": counts.get(name), "figure": _figure(counts.get(name))} for name in SCOPES],
        "scope": scope_of(request),
        "delivery_alarms": counts.get("deliveries"),
        "token": secrets.token_urlsafe(18),
    }


def _figure(count: int | None) -> str:
    """A count as the rail shows it; nothing where it is not counted."""
    if count is None:
        return ""
    return str(count) if count <= selectors.FIGURES_TO else f"{selectors.FIGURES_TO}+"


def page(request: HttpRequest, template: str, context: Shape | None = None, *, status: int = 200) -> HttpResponse:
    """A full page with its frame; for htmx asking for a dialog, only what belongs in it."""
    base = "_dialog.html" if is_htmx(request) and request.headers.get("HX-Target") == "dialog-body" else "base.html"
    context = context or {}
    around = {} if "scopes" in context else frame(request)
    return render(request, template, {**around, "base": base, **context}, status=status)


def body(kind: type[T], **values: Any) -> T:
    """A request body of `rehydrate.core.commands`, parsed exactly as the API parses it; else a Refusal `invalid`."""
    given = {name: value for name, value in values.items() if value is not None}
    return parsing.parse(json.dumps(given, default=_as_text).encode(), kind)


def _as_text(value: Any) -> str:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")


def asked(request: HttpRequest, *names: str) -> dict[str, str]:
    """Search and filters of the address: what is there, cut to a sane length, without what no database can hold."""
    found = {name: request.GET.get(name, "").replace("\x00", "").strip()[:300] for name in names}
    return {name: value for name, value in found.items() if value}


def sent_before(request: HttpRequest) -> bool:
    """Whether this very form was sent already (double click, back button, reload); remembers its token."""
    token = request.POST.get("token", "")
    if not token:
        return False
    used: list[str] = request.session.get("tokens", [])
    if token in used:
        return True
    request.session["tokens"] = [*used, token][-TOKENS_KEPT:]
    request.session.save()  # now, so that the second click's request finds it even while this one still works
    return False


def forget_token(request: HttpRequest) -> None:
    """After a refusal the same form may be sent again."""
    token = request.POST.get("token", "")
    request.session["tokens"] = [t for t in request.session.get("tokens", []) if t != token]


def go(request: HttpRequest, url: str) -> HttpResponse:
    """POST/redirect/GET, for htmx as a header."""
    if is_htmx(request):
        return HttpResponse(status=204, headers={"HX-Redirect": url})
    return HttpResponseRedirect(url)


def run_url(run_id: Any, scope: str = "", **query: Any) -> str:
    """The address of a run's page, keeping the scope one came from."""
    params = {name: value for name, value in {"scope": scope, **query}.items() if value}
    return reverse("run", args=[run_id]) + (f"?{urlencode(params)}" if params else "")


def safe_next(request: HttpRequest, fallback: str) -> str:
    """`next` of the form when it leads to this host, else the fallback."""
    target = request.POST.get("next") or request.GET.get("next") or ""
    if url_has_allowed_host_and_scheme(target, {request.get_host()}, require_https=request.is_secure()):
        return target
    return fallback


def say(request: HttpRequest, text: str, *, link: str = "") -> None:
    """A message for the next page; `link` leads to what it is about."""
    messages.success(request, text, extra_tags=link)


def say_refusal(request: HttpRequest, refusal: Refusal) -> None:
    """The same for an act without a form; the template puts the code into words."""
    messages.error(request, refusal.code)
