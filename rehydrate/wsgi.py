"""The WSGI application that a web server imports."""

import os
import sys

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "rehydrate.settings")

application = get_wsgi_application()

from rehydrate import garbage, ledger, wakeups  # noqa: E402

# A thread that draws a page gives way five times as soon as by default to one that only has a few lines to carry out.
sys.setswitchinterval(0.001)
wakeups.stop_on_signals()  # so that long polls do not keep a server from ending
garbage.collect_rarely()
ledger.together = True
