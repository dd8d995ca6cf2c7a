"""The loop that keeps services running: one thread, woken by their output, their end, and signals."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

from rehydrate.supervisor.service import Service, say

SELF = "up"
GIVE_UP_AFTER = 5
"""Failures in a row of one essential service before the first `ready`; later ones are tried for ever."""


class StartError(Exception):
    """The system could not be brought up; the message is one sentence."""


class Stopped(BaseException):
    """A signal asked for the end while something was being prepared. Not an `Exception`: nobody may swallow it."""


class Watcher:
    """Runs services until told to stop.

    `stop_flag` is raised while they are ended, for tasks that go on long; `keep_open` is inherited by the reaper, so
    that a lock outlives a killed supervisor.
    """

    def __init__(self, *, stop_flag: Path, keep_open: Sequence[int] = ()) -> None:
        self.stop_flag = stop_flag
        self.stop_flag.unlink(missing_ok=True)
        self.services: list[Service] = []
        self.stopping = False
        self.interruptible = True
        self._selector = selectors.DefaultSelector()
        self._probes = ThreadPoolExecutor(max_workers=4, thread_name_prefix="probe")
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("reaper.py")), str(stop_flag)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, pass_fds=tuple(keep_open), text=True,
        )  # fmt: skip

    # -- signals

    def listen(self) -> None:
        """SIGINT, SIGTERM and SIGHUP stop everything; a second one is less patient."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            for service in self.services:
                service.stop_within = min(service.stop_within, 1.0)
            return
        self.stopping = True
        if self.interruptible:
            raise Stopped

    # -- one service

    def add(self, service: Service) -> Service:
        self.services.append(service)
        return service

    def start(self, service: Service) -> None:
        process = service.start()
        self._tell_reaper(f"+{process.pid} {int(service.stop_signal)} {service.level}\n")
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, service)

    def wait_until_well(self, service: Service, *, timeout: float) -> None:
        """Runs the loop for as long as it takes. Raises `StartError` when the process ends or the time is up."""
        deadline = time.monotonic() + timeout
        while not service.well:
            self._listen_once()
            service.ask(self._probes)
            if not service.running or time.monotonic() > deadline:
                raise StartError(f"{service.name} could not be started; its own words stand above.")

    # -- all of them

    def run(self, when_ready: Callable[[], None]) -> None:
        """Starts what is not started and keeps it going until a signal comes."""
        self.interruptible = False
        ready = False
        while not self.stopping:
            self._listen_once()
            for service in self.services:
                self._look_after(service, ready=ready)
            if not ready and all(service.well or service.given_up for service in self.services):
                ready = True
                when_ready()

    def _look_after(self, service: Service, *, ready: bool) -> None:
        if service.process is None:
            if time.monotonic() >= service.start_at and self._may_start(service):
                self.start(service)
            return
        if not service.running:
            self._bury(service, ready=ready)
            return
        service.ask(self._probes)
        service.kill_if_late()
        if service.ending_since is None and service.silent_for > service.patience:
            say(
                SELF,
                f"{service.name} has not answered for {service.silent_for:.0f} s ({service.last_word}): "
                "starting it again",
            )
            service.ask_to_end()

    def _may_start(self, service: Service) -> bool:
        return all(other.well for other in self.services if other.name in service.after)

    def _bury(self, service: Service, *, ready: bool) -> None:
        assert service.process is not None
        code = service.process.returncode
        self._drain(service)
        # What the process itself had started must not go on beside its successor.
        service.tell(signal.SIGKILL)
        self._tell_reaper(f"-{service.process.pid}\n")
        service.ended()
        if self.stopping:
            return
        if not ready and service.essential and service.failures >= GIVE_UP_AFTER:
            raise StartError(
                f"{service.name} ended {service.failures} times at its start (exit {code}); its own words stand above."
            )
        pause = max(0.0, service.start_at - time.monotonic())
        say(SELF, f"{service.name} ended ({_how(code)}); starting it again in {pause:.1f} s")

    # -- the end

    def stop(self) -> None:
        """Ends all services, level by level: those that need others before those."""
        self.stopping, self.interruptible = True, False
        with contextlib.suppress(OSError):
            self.stop_flag.touch()
        for level in sorted({service.level for service in self.services}, reverse=True):
            wave = [service for service in self.services if service.level == level]
            for service in reversed(wave):
                service.ask_to_end()
            while any(service.running for service in wave):
                self._listen_once()
                for service in wave:
                    service.kill_if_late()
            for service in wave:
                if service.process is not None:
                    self._bury(service, ready=True)
        self.stop_flag.unlink(missing_ok=True)
        self._probes.shutdown(wait=False, cancel_futures=True)
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(10)

    # -- inside

    def _listen_once(self) -> None:
        for key, _ in self._selector.select(timeout=0.1):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif not key.data.pass_on(sys.stdout):
                self._selector.unregister(key.fileobj)

    def _drain(self, service: Service) -> None:
        assert service.process is not None
        out = service.process.stdout
        assert out is not None
        deadline = time.monotonic() + 0.5
        while out.fileno() in self._selector.get_map() and time.monotonic() < deadline:
            before = time.monotonic()
            self._listen_once()
            if time.monotonic() - before > 0.09:
                break
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(out)
        out.close()

    def _tell_reaper(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.write(line)
            self._reaper.stdin.flush()


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"exit {code}"
