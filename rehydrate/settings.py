"""Django's settings, one file, read from the environment and the data folder. Nothing is decided elsewhere.

DATABASE_URL             another PostgreSQL than the embedded one
REHYDRATE_DATA           the data folder (`.data` beside manage.py)
REHYDRATE_URL            the public address; cookies, redirects and HSTS are those of https unless it begins with
http://
REHYDRATE_HOSTS          more host names to answer to, separated by commas
REHYDRATE_TRUST_PROXY    1: a proxy in front sets X-Forwarded-Proto
REHYDRATE_SECRET_KEY     signs sessions and links  (otherwise made at the first start and kept in the data folder)
REHYDRATE_FIELD_KEYS     encrypts secret fields: the first encrypts, all decrypt  (the same)
REHYDRATE_ALLOW_PRIVATE_TARGETS  1: webhooks may go to private addresses
REHYDRATE_DB_POOL        connections a process pools; 0: each thread keeps its own
REHYDRATE_WAITING_AGENTS, REHYDRATE_WAITING_PAGES  how many long polls of each may wait in a process; 0: any number
REHYDRATE_METRICS_TOKEN  /metrics is only for those who bring it
REHYDRATE_LOG_LEVEL      WARNING
REHYDRATE_STATIC         "source": serve static files as they lie in the tree (tests, development)
REHYDRATE_NODE           this `up` among those that share a database  (otherwise made of machine and data folder)
REHYDRATE_DEBUG          1: Django's debug pages
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from csp.constants import NONE, SELF

from rehydrate import data
from rehydrate.dsn import database_settings
from rehydrate.node import queue
from rehydrate.postgres import Embedded


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


ROOT = data.ROOT
DATA = data.folder()
# An installed distribution carries pages and styles inside the package; a checkout has them at its top level.
WEB = ROOT if (ROOT / "templates").is_dir() else Path(__file__).parent / "_web"

DEBUG = _flag("REHYDRATE_DEBUG")
_secrets = data.load_secrets()
SECRET_KEY = _secrets.secret_key
FIELD_ENCRYPTION_KEYS = list(_secrets.field_keys)
ALLOW_PRIVATE_TARGETS = _flag("REHYDRATE_ALLOW_PRIVATE_TARGETS")

# -- where it answers

PUBLIC_URL = (os.environ.get("REHYDRATE_URL") or data.running_url() or "http://127.0.0.1:8000").rstrip("/")
_public = urlsplit(PUBLIC_URL)
# Without a word to the contrary the settings are those of a server on the open net. `up` says http:// when that is it.
SECURE = not os.environ.get("REHYDRATE_URL", "https://").startswith("http://")
ALLOWED_HOSTS = [
    *dict.fromkeys(
        host
        for host in [
            *os.environ.get("REHYDRATE_HOSTS", "").replace(",", " ").split(),
            _public.hostname or "",
            "127.0.0.1",
            "localhost",
            "[::1]",
        ]
        if host
    )
]
CSRF_TRUSTED_ORIGINS = [f"{_public.scheme}://{_public.netloc}"] if _public.netloc else []
ROOT_URLCONF = "rehydrate.urls"
WSGI_APPLICATION = "rehydrate.wsgi.application"
APPEND_SLASH = False

# -- what it is made of

INSTALLED_APPS = [
    "rehydrate",
    "approvals",
    "audit",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "csp",
    "django_htmx",
    "django_q",
    "rest_framework",
    "drf_spectacular",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "rehydrate.api.lane.with_key",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "approvals.prefs.PreferenceMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [WEB / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.template.context_processors.i18n",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# -- the database

DATABASE_URL = os.environ.get("DATABASE_URL") or Embedded(DATA).url()
EMBEDDED_DATABASE = "DATABASE_URL" not in os.environ or not os.environ["DATABASE_URL"]
# The web server's many threads share a pool. Clusters fork, which a pool does not survive: one connection a process.
_pool = int(os.environ.get("REHYDRATE_DB_POOL") or 0)
DATABASES = {"default": database_settings(DATABASE_URL, pool=_pool)}

# The web server's threads, which are started when they are needed: for all that its event loop leaves to them.
WEB_THREADS = int(os.environ.get("REHYDRATE_WEB_THREADS") or 64)
# Places of long polls. Each page that waits holds a thread: there must be more threads than places.
WAITING = {room: int(os.environ.get(f"REHYDRATE_WAITING_{room.upper()}") or 0) for room in ("agents", "pages")}

# -- people

AUTH_PASSWORD_VALIDATORS: list[dict[str, Any]] = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "sign_in"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "sign_in"
PASSWORD_RESET_TIMEOUT = 24 * 60 * 60  # a sign-in link is good for a day, and once
SESSION_COOKIE_AGE = 14 * 24 * 60 * 60
# Another port of the same machine shares cookies: a name of our own keeps two servers from signing each other out.
_cookie_suffix = f"_{_public.port}" if _public.port else ""
SESSION_COOKIE_NAME = f"rehydrate_session{_cookie_suffix}"
CSRF_COOKIE_NAME = f"rehydrate_csrf{_cookie_suffix}"

# -- words and times

LANGUAGE_CODE = "en"
LANGUAGES = [("en", "English"), ("zh-hans", "简体中文")]  # each in its own words, so that it is found
LANGUAGE_COOKIE_NAME = "rehydrate_language"
LANGUAGE_COOKIE_SAMESITE = "Lax"
LOCALE_PATHS = [WEB / "locale"]
USE_I18N = True
USE_TZ = True
TIME_ZONE = "UTC"

# -- static files

STATIC_URL = "/static/"
STATIC_ROOT = DATA / "static"
STATICFILES_DIRS = [WEB / "static"]
_static_from_source = DEBUG or os.environ.get("REHYDRATE_STATIC") == "source"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"
        if _static_from_source
        else "whitenoise.storage.CompressedManifestStaticFilesStorage"
    },
}
WHITENOISE_USE_FINDERS = _static_from_source
WHITENOISE_AUTOREFRESH = _static_from_source
WHITENOISE_ALLOW_ALL_ORIGINS = False

# -- security

SECURE_SSL_REDIRECT = SECURE
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]  # probed from the same machine, without TLS
SECURE_HSTS_SECONDS = 365 * 24 * 60 * 60 if SECURE else 0
SECURE_HSTS_INCLUDE_SUBDOMAINS = SECURE
SECURE_HSTS_PRELOAD = SECURE
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _flag("REHYDRATE_TRUST_PROXY") else None
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
SESSION_COOKIE_SECURE = SECURE
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SECURE = SECURE
CSRF_COOKIE_HTTPONLY = True  # htmx sends the token that stands in the page
CSRF_COOKIE_SAMESITE = "Lax"
LANGUAGE_COOKIE_SECURE = SECURE
CONTENT_SECURITY_POLICY: dict[str, Any] = {
    "DIRECTIVES": {
        "default-src": [SELF],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "object-src": [NONE],
        "base-uri": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
    }
}
# The API answers 413 above 1 MiB itself, in its own words; Django's own limit stands just behind it.
DATA_UPLOAD_MAX_MEMORY_SIZE = 1024 * 1024 + 1024
DATA_UPLOAD_MAX_NUMBER_FIELDS = 2000

# -- the API

REST_FRAMEWORK: dict[str, Any] = {
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS: dict[str, Any] = {
    "TITLE": "rehydrate",
    "DESCRIPTION": "A ledger for paused runs: open, pause, decide, and put the very same run back together.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SERVE_INCLUDE_SCHEMA": False,
    "COMPONENT_SPLIT_REQUEST": True,
    "SCHEMA_PATH_PREFIX": r"/api/v1",
}

# -- work in the background (house.md, "Django-q2, as it really is")

Q_CLUSTER: dict[str, Any] = {
    "name": "rehydrate",
    "label": "Background work",
    "orm": "default",
    "workers": 4,  # senders of deliveries overlap as ticks do, and leave two
    "queue_limit": 8,
    "timeout": 150,
    "retry": 360,  # more than twice the timeout: the clock starts when a task is taken into memory
    "poll": 0.5,
    "save_limit": -1,  # anything else locks the whole history at each task
    "catch_up": False,
    "ack_failures": True,
    "max_attempts": 3,
    "scheduler": False,
    "log_level": "WARNING",
    # Each `up` has queues of its own (pulse.queue): what hangs in one is nobody else's, and what one asks of its own
    # clusters no other answers. The work itself is shared, row by row.
    "ALT_CLUSTERS": {
        queue("work"): {},
        # One tick starts a minute and loops for two: two or three at a time, on workers of their own.
        queue("ticks"): {"workers": 4, "queue_limit": 4, "timeout": 150, "retry": 360, "scheduler": True},
    },
}

# -- the log goes to standard error, without secrets

LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"secrets": {"()": "rehydrate.logs.WithoutSecrets"}},
    "formatters": {"plain": {"format": "%(levelname)s %(name)s: %(message)s"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "plain", "filters": ["secrets"]},
    },
    "root": {"handlers": ["stderr"], "level": os.environ.get("REHYDRATE_LOG_LEVEL") or "WARNING"},
    "loggers": {
        "django": {"handlers": [], "propagate": True},
        "django.server": {"handlers": [], "propagate": True},
        # Every 4xx is the caller's to see, and the ledger keeps those that matter.
        "django.request": {"level": "ERROR"},
        "django-q": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
    },
}

SILENCED_SYSTEM_CHECKS: list[str] = []
