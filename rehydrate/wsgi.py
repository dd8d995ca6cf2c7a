"""The WSGI application that a web server imports."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")

application = get_wsgi_application()

from rehydrate import wakeups  # noqa: E402

wakeups.stop_on_signals()  # so that long polls do not keep a server from ending
