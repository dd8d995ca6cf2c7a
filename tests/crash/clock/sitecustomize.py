"""A Python process whose wall clock is wrong: with this folder on PYTHONPATH, by CLOCK_AHEAD seconds.

The monotonic clock stays as it is, as it does when a machine's clock is set wrong.
"""

import ctypes
import datetime as dt
import gc
import os
import time

ahead = float(os.environ.get("CLOCK_AHEAD", "0"))
real_time, real_time_ns = time.time, time.time_ns
real_now, real_utcnow, real_today = dt.datetime.now, dt.datetime.utcnow, dt.date.today
offset = dt.timedelta(seconds=ahead)

if ahead:
    time.time = lambda: real_time() + ahead
    time.time_ns = lambda: real_time_ns() + int(ahead * 1e9)
    # The methods of a built-in type cannot be set, so they are put into its dictionary.
    for kind, name, wrong in (
        (dt.datetime, "now", lambda cls, tz=None: real_now(tz) + offset),
        (dt.datetime, "utcnow", lambda cls: real_utcnow() + offset),
        (dt.date, "today", lambda cls: (real_now() + offset).date()),
    ):
        gc.get_referents(kind.__dict__)[0][name] = classmethod(wrong)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
