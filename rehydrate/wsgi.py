"""The application as WSGI, all of it in threads. The web server imports `rehydrate.asgi`, which stands in front."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")

_django = get_wsgi_application()

from rehydrate.api import lane  # noqa: E402

application = lane.in_front_of(_django)
