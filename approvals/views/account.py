"""Signing in and out, and a person's own settings."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.auth import login, logout, update_session_auth_hash
from django.contrib.auth.forms import SetPasswordForm
from django.core.cache import cache
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import translation
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from approvals import signin
from approvals.forms import PreferenceForm, SignInForm
from approvals.models import UserPreference
from approvals.prefs import THEME_COOKIE
from approvals.web import go, page, person, safe_next, say, signed_in

TRIES, TRIES_SECONDS = 10, 300
YEAR = 365 * 24 * 3600


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in(request: HttpRequest) -> HttpResponse:
    """Name and password."""
    if request.user.is_authenticated:
        return HttpResponseRedirect(safe_next(request, reverse("inbox")))
    form = SignInForm(request, request.POST if request.method == "POST" else None)
    status = 200
    if request.method == "POST":
        if _too_many(request):
            answer = render(request, "429.html", status=429)
            answer["Retry-After"] = str(TRIES_SECONDS)
            return answer
        if form.is_valid() and form.user is not None:
            cache.delete(_tries(request))
            login(request, form.user)
            return HttpResponseRedirect(safe_next(request, reverse("inbox")))
        status = 422
    return render(request, "account/sign_in.html", {"form": form, "next": safe_next(request, "")}, status=status)


def _tries(request: HttpRequest) -> str:
    name = request.POST.get("username", "")[:150].lower()
    return "signin:" + signin.fingerprint(f"{request.META.get('REMOTE_ADDR', '')}|{name}")


def _too_many(request: HttpRequest) -> bool:
    """Counts tries by address and name, so that guessing is slow and one office is not locked out as a whole.

    Whoever gets in starts anew: it is failures that count.
    """
    key = _tries(request)
    if cache.add(key, 1, TRIES_SECONDS):
        return False
    try:
        return cache.incr(key) > TRIES
    except ValueError:  # it ran out between the two calls
        return False


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def sign_in_link(request: HttpRequest, token: str) -> HttpResponse:
    """A link that signs in once: opening it only shows a button, so that a mail scanner uses nothing up."""
    if request.method == "POST":
        with transaction.atomic():
            user = signin.redeem(token)
            if user is not None:
                login(request, user, backend="django.contrib.auth.backends.ModelBackend")
        if user is not None:
            if not user.has_usable_password():
                say(request, _("Signed in. Set a password to come back without a link."), link=reverse("settings"))
            return HttpResponseRedirect(reverse("inbox"))
    found = signin.peek(token)
    return render(request, "account/link.html", {"person": found}, status=200 if found else 410)


@require_POST
def sign_out(request: HttpRequest) -> HttpResponse:
    """Ends the session."""
    logout(request)
    return HttpResponseRedirect(reverse("sign_in"))


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def preferences(request: HttpRequest) -> HttpResponse:
    """Language, theme, time zone, keys, password."""
    row = UserPreference.objects.filter(user=person(request)).first() or UserPreference(user=person(request))
    which = request.POST.get("form", "")
    form = PreferenceForm(request.POST if which == "preferences" else None, instance=row)
    password = SetPasswordForm(person(request), request.POST if which == "password" else None)
    if which == "preferences" and form.is_valid():
        form.save()
        with translation.override(row.language or translation.get_language()):
            say(request, _("Kept."))
        return _with_cookies(HttpResponseRedirect(reverse("settings")), language=row.language, theme=row.theme)
    if which == "password" and password.is_valid():
        password.save()
        update_session_auth_hash(request, person(request))
        say(request, _("The password is set."))
        return HttpResponseRedirect(reverse("settings"))
    return page(
        request,
        "account/settings.html",
        {"form": form, "password_form": password, "place": "settings"},
        status=422 if request.method == "POST" else 200,
    )


@require_POST
def switch(request: HttpRequest) -> HttpResponse:
    """Language or theme by one click, for people signed in or not; kept in the profile, else in a cookie."""
    language, theme = request.POST.get("language", ""), request.POST.get("theme", "")
    changes: dict[str, Any] = {}
    if language in dict(settings.LANGUAGES):
        changes["language"] = language
    if theme in UserPreference.Theme.values:
        changes["theme"] = theme
    if changes and request.user.is_authenticated:
        UserPreference.objects.update_or_create(user=request.user, defaults=changes)
    response = go(request, safe_next(request, reverse("inbox")))
    if request.headers.get("X-Requested-With") == "fetch":
        response = HttpResponse(status=204)
    return _with_cookies(response, **changes)


def _with_cookies(response: HttpResponse, *, language: str = "", theme: str = "") -> HttpResponse:
    """The sign-in page speaks the language and wears the theme last chosen in this browser."""
    options: dict[str, Any] = {"max_age": YEAR, "samesite": "Lax", "secure": settings.SESSION_COOKIE_SECURE}
    if language:
        response.set_cookie(settings.LANGUAGE_COOKIE_NAME, language, **options)
    if theme:
        response.set_cookie(THEME_COOKIE, theme, **options)
    return response
