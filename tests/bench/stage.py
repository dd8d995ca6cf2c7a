"""An installation of its own for a measurement: `up` on a fresh folder, keys, connections, what its processes used.

Durability is as it ships: fsync on. Nothing here measures by itself.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

ROOT = Path(__file__).resolve().parents[2]

FLOWS = """
[group.legal]
members = ["alice", "bob"]
roles = ["reviewer", "operator"]

[flow.bench]
title = "Contract approval"
required = ["checkpoint"]
on_reject = "review"

[flow.bench.wait.legal-approval]
groups = ["legal"]
"""


def child_environment(folder: Path) -> dict[str, str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("REHYDRATE_", "Q_CLUSTER", "DATABASE_URL"))
    }
    return {**env, "REHYDRATE_DATA": str(folder)}


@dataclass
class Installation:
    """A running `up`. `agent` and `person` are keys, `database` a URL for psycopg."""

    url: str
    port: int
    folder: Path
    process: subprocess.Popen[str]
    environment: dict[str, str]
    agent: str = ""
    person: str = ""
    database: str = ""
    lines: list[str] = field(default_factory=list)

    def manage(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Its processes by what they are: `web`, `postgres`, `work` (clusters), `up`."""
        found: dict[str, list[psutil.Process]] = {"web": [], "postgres": [], "work": [], "up": []}
        top = psutil.Process(self.process.pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                kind = (
                    "web" if "uvicorn" in words or "multiprocessing" in words
                    else "postgres" if "postgres" in words
                    else "work" if "qcluster" in words
                    else "up"
                )  # fmt: skip
                found[kind].append(process)
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """What each kind of process has used so far. Ended children count with their parents."""
        used = {}
        for kind, processes in self.processes().items():
            total = 0.0
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
            used[kind] = total
        return used


@contextlib.contextmanager
def installation(*, flows: str = FLOWS, ready_within: float = 120, **environment: str) -> Iterator[Installation]:
    """`up --no-demo` on a fresh folder, with the flows applied and keys issued. Everything is ended and removed."""
    folder = Path(tempfile.mkdtemp(prefix="rehydrate-bench-"))
    folder.chmod(0o711)
    env = {**child_environment(folder / "data"), **environment}
    process = subprocess.Popen(
        [sys.executable, "manage.py", "up", "--no-demo", "--port", "0"],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("ready: "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not ready.wait(ready_within) or process.poll() is not None:
            raise RuntimeError("up did not come up:\n" + "\n".join(lines))
        url = next(line for line in lines if line.startswith("ready: ")).removeprefix("ready: ")
        made = Installation(url, int(url.rsplit(":", 1)[1]), folder, process, env, lines=lines)
        (folder / "flows.toml").write_text(flows)
        made.manage("apply", str(folder / "flows.toml"))
        made.agent = made.manage("issue_key", "agent", "--workspace", "default", "--name", "bench")
        made.person = made.manage("issue_key", "person", "--user", "alice")
        made.database = made.manage(
            "shell", "-v", "0", "-c", "from django.conf import settings; print(settings.DATABASE_URL)"
        ).splitlines()[-1]
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        reader.join(10)
        if process.stdout is not None:
            process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


class Caller:
    """One kept-alive connection with a key. Raises when an answer is not of the expected kind.

    As little between an operation and its socket as can be, since it works on the cores that are measured. `once`: each
    request with an Idempotency-Key of its own, as agents who use our client send them.
    """

    def __init__(self, port: int, key: str, *, once: bool = False, timeout: float = 60) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.socket.makefile("rb")
        self.sent = 0  # requests
        self.once = once
        self.headers = f"Host: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"

    def post(self, path: str, body: Any, *, expect: tuple[int, ...] = (200, 201)) -> Any:
        self.sent += 1
        text = msgspec.json.encode(body)
        once = f"Idempotency-Key: {uuid.uuid4()}\r\n" if self.once else ""
        head = f"POST /api/v1{path} HTTP/1.1\r\n{self.headers}{once}Content-Length: {len(text)}\r\n\r\n"
        self.socket.sendall(head.encode() + text)
        status = int(self.answers.readline().split()[1])
        length = 0
        while line := self.answers.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        answer = self.answers.read(length)
        if status not in expect:
            raise RuntimeError(f"POST {path}: {status} {answer[:500]!r}")
        return msgspec.json.decode(answer) if answer else None

    def close(self) -> None:
        self.answers.close()
        self.socket.close()
