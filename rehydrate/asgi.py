"""The application that the web server imports: its event loop in front, and threads for all that would block it."""

import sys

from rehydrate.wsgi import application as wsgi

from django.conf import settings  # isort: skip # once Django is set up

from rehydrate import garbage, wakeups  # isort: skip
from rehydrate.api import lane  # isort: skip

application = lane.on_the_loop(lane.in_threads(wsgi, settings.WEB_THREADS))

# A thread that draws a page gives way five times as soon as by default to one that only has a few lines to carry out.
sys.setswitchinterval(0.001)
wakeups.stop_on_signals()  # so that long polls do not keep a server from ending
garbage.collect_rarely()
