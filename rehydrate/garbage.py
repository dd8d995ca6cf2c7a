"""How often Python looks for garbage in circles: rarely, in processes that make and drop many rows."""

import gc
from functools import cache


@cache
def collect_rarely() -> None:
    """What was imported so far stays for good, and is not gone through again; what comes is looked after seldom.

    Measured: a third of what a timer costs its worker, and a twentieth of what a request costs the web server, went
    into looking through rows that were about to be dropped anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
