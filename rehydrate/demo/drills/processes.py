"""Starting processes, hearing what they say, and killing them and all that they started. Nothing about ledgers here."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rehydrate import data

T = TypeVar("T")

#: Seconds that anything may take which takes a few on an idle machine.
PATIENCE = 90.0


class DrillError(Exception):
    """The drill could not go on; the message is one sentence."""


def eventually(ask: Callable[[], T | None], *, what: str, within: float = PATIENCE, pause: float = 0.05) -> T:
    """The first true answer; a `DrillError` when none comes in time."""
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise DrillError(f"{what} did not come about within {within:.0f} seconds")
        time.sleep(pause)


class Household:
    """All processes of a drill. They are ended with it, also when it is killed itself (by the supervisor's reaper)."""

    def __init__(self, folder: Path) -> None:
        adopt_orphans()
        reaper = Path(data.__file__).parent / "supervisor" / "reaper.py"
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", str(reaper), str(folder / "stopping")],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, text=True,
        )  # fmt: skip
        self._members: list[Spoken] = []

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, level: int = 1) -> Spoken:
        """A process in a session of its own, so that Ctrl-C is for the drill alone. Higher levels are ended first."""
        process = Spoken(command, environment)
        self._members.append(process)
        self._tell(f"+{process.pid} {int(signal.SIGTERM)} {level}\n")
        return process

    def close(self) -> None:
        """Ends everybody, the last one started first."""
        for process in reversed(self._members):
            process.end()
            self._tell(f"-{process.pid}\n")
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.close()
        self._reaper.wait(10)

    def _tell(self, line: str) -> None:
        assert self._reaper.stdin is not None
        with contextlib.suppress(OSError):
            self._reaper.stdin.write(line)
            self._reaper.stdin.flush()


class Spoken:
    """A process whose output is read all the time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            list(command), env=dict(environment), cwd=data.ROOT, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"output-{self.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def hear(self, listen: Callable[[str], T | None], *, what: str, within: float = PATIENCE) -> T:
        """What `listen` makes of the first line that says something to it, of all lines so far and to come."""
        deadline = time.monotonic() + within
        read = 0
        with self._news:
            while True:
                for line in self.lines[read:]:
                    if (said := listen(line)) is not None:
                        return said
                read = len(self.lines)
                if not self.running and not self._reader.is_alive():
                    raise DrillError(
                        f"{what}: the process ended first (exit {self._process.returncode}){self._words()}"
                    )
                if time.monotonic() > deadline:
                    raise DrillError(f"{what}: not heard within {within:.0f} seconds{self._words()}")
                self._news.wait(0.2)

    def _words(self) -> str:
        last = [line for line in self.lines if line.strip()][-12:]
        return "; its last words: " + " | ".join(last) if last else ""

    def kill(self) -> int:
        """SIGKILL to it and everything that it started, all at once; how many there were."""
        if not self.running:
            return 0
        family: list[int] = []
        # Held still first, so that nobody starts anybody else meanwhile.
        while fresh := [pid for pid in (self.pid, *descendants(self.pid)) if pid not in family]:
            send(fresh, signal.SIGSTOP)
            family += fresh
        send(family, signal.SIGKILL)
        self._process.wait()
        eventually(lambda: all(is_gone(pid) for pid in family[1:]), what="the end of those who were killed", pause=0.01)
        self._reader.join(5)
        return len(family)

    def end(self, within: float = 45.0) -> None:
        """Asks it to end, and kills it when it does not."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(within)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(5)


# -- families


def adopt_orphans() -> None:
    """On Linux: what a killed process leaves behind becomes this one's child, which sees to it that it really goes.

    In a container whose first process buries nobody, a dead PostgreSQL would else look alive to the one that follows.
    """
    if sys.platform == "linux":
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0)


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """All that a process has started, and they in turn."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    left = [pid]
    while left:
        mine = children.get(left.pop(), [])
        found += mine
        left += mine
    return found


def is_gone(pid: int) -> bool:
    """Whether no process has this number any longer; buries it when it is ours to bury."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _parents() -> list[tuple[int, int]]:
    """`(process, parent)` of all, from /proc, or from `ps` where there is none."""
    proc = Path("/proc")
    if (proc / "self" / "stat").exists():
        found = []
        for place in proc.iterdir():
            if place.name.isdigit():
                with contextlib.suppress(OSError):
                    # The name in brackets may hold anything; the parent is the second word after it.
                    found.append((int(place.name), int((place / "stat").read_text().rpartition(")")[2].split()[1])))
        return found
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout  # noqa: S607
    return [(int(pid), int(parent)) for pid, parent in map(str.split, listed.splitlines())]
