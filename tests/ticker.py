"""A tick as a process of its own, on the tests' database: `python -m tests.ticker [--seconds N] [--dies-by RUN] ...`.

What it does is rehydrate.tasks.tick; what a test wants to go wrong is put around it here.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import django


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="how long it ticks")
    parser.add_argument("--dies-by", help="the run at which the process is killed")
    parser.add_argument("--hangs-by", help="the run at which it never comes to an end")
    parser.add_argument("--longest", type=float, help="seconds that a batch may take")
    parser.add_argument("--batch", type=int, help="runs a batch")
    parser.add_argument("--clock", type=float, default=0, help="seconds by which this machine's clock is wrong")
    options = parser.parse_args()

    django.setup()
    from rehydrate import engine, sweep, tasks
    from rehydrate.core import decide

    apply_overdue = decide.apply_overdue

    def applied(draft: Any) -> None:
        if draft.run.id == options.dies_by:
            os.kill(os.getpid(), signal.SIGKILL)
        while draft.run.id == options.hangs_by:
            pass
        apply_overdue(draft)

    decide.apply_overdue = applied
    if options.clock:
        _shift_clock(options.clock)
    sweep.LONGEST = options.longest or sweep.LONGEST  # type: ignore[misc]
    engine.BATCH = options.batch or engine.BATCH  # type: ignore[misc]
    tasks.TICK_LASTS = options.seconds
    print("ticking", flush=True)
    tasks.tick()


def _shift_clock(seconds: float) -> None:
    """The clock of this process, wherever Python reads it."""
    import datetime as dt
    from datetime import datetime as real

    real_time = time.time

    class Shifted(real):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return real.now(tz) + dt.timedelta(seconds=seconds)

        @classmethod
        def utcnow(cls) -> Any:
            return real.now(dt.UTC).replace(tzinfo=None) + dt.timedelta(seconds=seconds)

    time.time = lambda: real_time() + seconds
    dt.datetime = Shifted  # type: ignore[misc]


if __name__ == "__main__":
    main()
