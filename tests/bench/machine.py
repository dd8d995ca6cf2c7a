"""The machine that is measured on: what it is, how busy others keep it, what our own processes used."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from rehydrate.postgres import binaries

#: Of the whole machine, in per cent: measuring begins below it; a round in which others used more than twice as much
#: is left out where there are better ones.
QUIET = 7.5


def describe() -> dict[str, Any]:
    import subprocess

    said = subprocess.run([binaries() / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "postgresql": said.split()[-1],
    }


def used_by(process: psutil.Process) -> float:
    """CPU seconds of a process and of the children that it has waited for."""
    with contextlib.suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))
    return 0.0


def tree(top: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return [top, *top.children(recursive=True)]
    return []


class Load:
    """How much of the machine others used since it was made, in per cent. Ours: this process and all below it."""

    def __init__(self) -> None:
        self.before = self._look()

    def others(self) -> float:
        """Per cent of all cores, between then and now; a host's stolen time counts as others'."""
        busy, ours, total = (now - then for now, then in zip(self._look(), self.before, strict=True))
        return round(100 * max(0.0, busy - ours) / total, 1) if total > 0 else 0.0

    def _look(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        parts = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        total = sum(times.get(part, 0.0) for part in parts)
        ours = sum(used_by(process) for process in tree(psutil.Process()))
        return total - times["idle"] - times.get("iowait", 0.0), ours, total


def watched(measure: Callable[[], dict[str, Any]], *, patience: float) -> dict[str, Any]:
    """What `measure` finds, and `others_percent`: begun when the machine is quiet, or after `patience` seconds."""
    deadline = time.monotonic() + patience
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        load = Load()
        time.sleep(0.7)
        quiet = quiet + 1 if load.others() < QUIET else 0
    load = Load()
    found = measure()
    return {**found, "others_percent": load.others()}
