"""One watched process: how it is started, asked whether it answers, and ended. When to do which is the watcher's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TextIO

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
PROVEN_AFTER = 30.0
"""Seconds after which a process that still runs is no longer counted as failing."""


@dataclass(kw_only=True)
class Service:
    """A process and what is known about it.

    `probe` raises when the process does not answer as it should; it runs on another thread. A service without one is
    taken to be well while it runs. `patience` is how long it may fail to answer before it is ended and started again.
    Without an `essential` one the system is not ready. `after` names services that must be well first.
    All are ended level by level, the highest first: what needs another stands on a higher one.
    """

    name: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    probe: Callable[[], None] | None = None
    probe_every: float = 2.0
    patience: float = 20.0
    stop_signal: signal.Signals = signal.SIGTERM
    stop_within: float = 15.0
    essential: bool = True
    level: int = 1
    after: tuple[str, ...] = ()
    directory: str | None = None

    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    start_at: float = 0.0
    started_at: float = 0.0
    well_at: float | None = None
    last_word: str = ""
    ending_since: float | None = None
    _asked_at: float = 0.0
    _waiting_since: float | None = None
    _answer: Future[None] | None = None
    _partial: bytes = b""

    # -- starting and ending

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def well(self) -> bool:
        """True when it runs and has answered since it was started (or cannot be asked)."""
        return self.running and self.ending_since is None and self.well_at is not None

    @property
    def given_up(self) -> bool:
        """True when nobody should wait for it any longer, though it goes on being tried."""
        return not self.essential and self.failures >= 2

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
            cwd=self.directory,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends all in order
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.started_at = time.monotonic()
        self.well_at = self.ending_since = self._answer = self._waiting_since = None
        self._asked_at, self._partial, self.last_word = 0.0, b"", ""
        return self.process

    def ended(self) -> None:
        """Notes the end of the process and when it may be started again: later after each failure in a row."""
        assert self.process is not None
        if time.monotonic() - self.started_at > PROVEN_AFTER:
            self.failures = 0
        pause = min(FIRST_PAUSE * 2**self.failures, LONGEST_PAUSE)
        self.failures += 1
        self.start_at = time.monotonic() + pause
        self.process = None
        self.well_at = self.ending_since = None

    def tell(self, number: signal.Signals) -> None:
        """Signals the process and what it started."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def ask_to_end(self) -> None:
        if self.running and self.ending_since is None:
            assert self.process is not None
            self.ending_since = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(self.stop_signal)

    def kill_if_late(self) -> None:
        if self.running and self.ending_since is not None and time.monotonic() - self.ending_since > self.stop_within:
            say(self.name, f"did not end within {self.stop_within:.0f} s, and is killed")
            self.tell(signal.SIGKILL)
            self.ending_since = time.monotonic()

    # -- asking

    def ask(self, executor: Executor) -> None:
        """Takes in the last answer and asks again when it is time. Never blocks."""
        now = time.monotonic()
        if self.probe is None:
            if self.well_at is None and now - self.started_at > 1:
                self.well_at = now
            return
        if self._answer is not None:
            if not self._answer.done():
                return
            error = self._answer.exception()
            if error is None:
                self.well_at, self.last_word, self._waiting_since = now, "", None
            else:
                self.last_word = str(error)
            self._answer = None
        pause = self.probe_every if self.well_at is not None else min(self.probe_every, 0.1)
        if now - self._asked_at >= pause:
            self._asked_at = now
            self._waiting_since = self._waiting_since or now
            self._answer = executor.submit(self.probe)

    @property
    def silent_for(self) -> float:
        """Seconds since it was first asked without an answer. While nobody asks it is not silent: the loop may have
        been busy with something else for long, such as migrations on a slow machine.
        """
        return 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since

    # -- what it says

    def pass_on(self, out: TextIO) -> bool:
        """Prints what it wrote since, line by line under its name. False when it will write no more."""
        if self.process is None or self.process.stdout is None:
            return False
        try:
            chunk = os.read(self.process.stdout.fileno(), 65536)
        except BlockingIOError:
            return True
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if not chunk and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            say(self.name, line.decode(errors="replace"), out)
        return bool(chunk)


def say(name: str, text: str, out: TextIO | None = None) -> None:
    """One line under a name; a reader that has gone away is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{name:<17} | {text}", file=out or sys.stdout, flush=True)
