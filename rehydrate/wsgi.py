"""The WSGI application that a web server imports."""

import os
import sys

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")

_django = get_wsgi_application()

from rehydrate import garbage, wakeups  # noqa: E402
from rehydrate.api import lane  # noqa: E402

application = lane.in_front_of(_django)

# A thread that draws a page gives way five times as soon as by default to one that only has a few lines to carry out.
sys.setswitchinterval(0.001)
wakeups.stop_on_signals()  # so that long polls do not keep a server from ending
garbage.collect_rarely()
