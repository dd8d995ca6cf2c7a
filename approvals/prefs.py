"""A person's language, theme and time zone, put in force for each request. What is shown with them is elsewhere."""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable
from dataclasses import dataclass

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.utils import timezone, translation

from approvals.models import UserPreference

ZONE_COOKIE = "rehydrate_zone"
THEME_COOKIE = "rehydrate_theme"


@dataclass(frozen=True)
class Prefs:
    """What is in force: `theme` is auto, light or dark; `time_zone` an IANA name or empty."""

    language: str = ""
    theme: str = "auto"
    time_zone: str = ""
    shortcuts: bool = True


def load(request: HttpRequest) -> Prefs:
    """The person's kept choice; for nobody signed in, what the cookies say."""
    cookie_theme = request.COOKIES.get(THEME_COOKIE, "auto")
    fallback = Prefs(theme=cookie_theme if cookie_theme in UserPreference.Theme.values else "auto")
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return fallback
    row = UserPreference.objects.filter(user_id=user.pk).first()
    if row is None:
        return fallback
    return Prefs(language=row.language, theme=row.theme, time_zone=row.time_zone, shortcuts=row.shortcuts)


def zone_or_none(name: str) -> zoneinfo.ZoneInfo | None:
    """The zone of that name, or None for an unknown, empty or malformed one."""
    if not name or len(name) > 64:
        return None
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return None


class PreferenceMiddleware:
    """Puts `request.prefs` there and activates language and time zone; stands after authentication and locale.

    The ledger's API answers in one language whoever asks, so its paths are left alone.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.path.startswith(("/api/", "/hooks/", "/static/", "/healthz", "/readyz", "/metrics")):
            return self.get_response(request)
        prefs = load(request)
        request.prefs = prefs  # type: ignore[attr-defined]
        known = dict(settings.LANGUAGES)
        if prefs.language in known:
            translation.activate(prefs.language)
            request.LANGUAGE_CODE = translation.get_language() or settings.LANGUAGE_CODE
        zone = zone_or_none(prefs.time_zone) or zone_or_none(request.COOKIES.get(ZONE_COOKIE, ""))
        if zone is not None:
            timezone.activate(zone)
        try:
            response = self.get_response(request)
        finally:
            timezone.deactivate()
        response.headers.setdefault("Content-Language", translation.get_language() or settings.LANGUAGE_CODE)
        return response
