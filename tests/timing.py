"""Real ticks for the tests of timers: processes on the tests' database."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from tests.conftest import ROOT, _embedded, eventually


@dataclass
class Ticker:
    """A process that ticks (tests/ticker.py)."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.log.unlink(missing_ok=True)


def start_ticker(*words: str) -> Ticker:
    """Ticking already; `words` are the script's options."""
    name = settings.DATABASES["default"]["NAME"]
    handle, path = tempfile.mkstemp(suffix=".log")
    with os.fdopen(handle, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ticker", *words],
            cwd=ROOT, env={**os.environ, "DATABASE_URL": _embedded().url(name)}, stdout=out, stderr=out,
        )  # fmt: skip
    ticker = Ticker(process, Path(path))
    eventually(
        lambda: process.poll() is not None or b"ticking" in ticker.log.read_bytes(), within=60, what="the first tick"
    )
    return ticker
