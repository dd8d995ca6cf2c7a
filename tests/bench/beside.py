"""Peers, run beside ours: each in a process of its own, on a PostgreSQL from the same wheel, with fsync on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg

from rehydrate.postgres import Embedded
from tests.bench.machine import tree, used_by
from tests.bench.stage import ROOT

#: What makes cycles, and what fires timers: names of tests.bench.peers, and their titles.
CYCLES = {
    "raw": "psycopg alone, one statement a step (the limit here)",
    "restate": "Restate (server in Rust, Python SDK)",
    "langgraph_per_client": "LangGraph, PostgresSaver, one saver a client (in process)",
    "langgraph": "LangGraph, PostgresSaver, one saver (in process)",
    "openai_agents": "OpenAI Agents, state in a row (in process)",
    "dbos": "DBOS, send and recv (in process)",
}
TIMERS = {"sql_timers": "SQL in hundreds (the limit here)", "dbos_timers": "DBOS sleepers"}


def home() -> Path:
    return Path(os.environ.get("BENCH_ROOT", ROOT / ".bench"))


def python() -> str:
    """The Python that has the peers: $BENCH_PYTHON, else that of `make bench-peers`, else this one."""
    theirs = home() / "bin" / "python"
    return os.environ.get("BENCH_PYTHON") or (str(theirs) if theirs.exists() else sys.executable)


@dataclass
class Database:
    """The peers' PostgreSQL."""

    server: Embedded
    pid: int

    @contextlib.contextmanager
    def fresh(self, name: str) -> Iterator[str]:
        """The address of an empty database, in the form that every driver understands."""
        with psycopg.connect(self.server.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
            connection.execute("CHECKPOINT")
            try:
                yield f"postgresql://postgres:@/{name}?host={quote(str(self.server.socket_folder))}"
            finally:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@contextlib.contextmanager
def database() -> Iterator[Database]:
    folder = Path(tempfile.mkdtemp(prefix="bench-peers-"))
    folder.chmod(0o711)
    server = Embedded(folder)
    try:
        server.initialise()
        process = server.start()
        try:
            yield Database(server, process.pid)
        finally:
            server.stop()
            process.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(name: str, where: Database, **options: float) -> dict[str, Any]:
    """What a peer reports, with `cpu_ms` of the measured part by `postgres` and `peer`; or `{missing: why}`.

    RuntimeError, with its last words, when it fails.
    """
    with where.fresh(f"bench_{name}") as url:
        words = [f"--{option}={value}" for option, value in options.items()]
        environment = {**os.environ, "BENCH_ROOT": str(home()), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [python(), "-m", "tests.bench.peers", name, f"--database={url}", *words],
            cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(errors := tempfile.TemporaryFile("w+")),  # noqa: SIM115
        )  # fmt: skip
        with process, errors:
            try:
                found = _listen(process, where)
                process.wait(60)  # by itself: it ends what it has started
            finally:
                for one in reversed(tree(psutil.Process(process.pid)) if process.poll() is None else []):
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            if not found or found.get("errors"):
                errors.seek(0)
                raise RuntimeError(f"{name}: {found.get('errors') or errors.read()[-800:] or 'no answer'}")
    return found


def _listen(process: subprocess.Popen[str], where: Database) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    looks: list[dict[str, float]] = []
    for line in process.stdout:
        if line.strip() in ("begin", "end"):
            looks.append({
                "postgres": sum(map(used_by, tree(psutil.Process(where.pid)))),
                "peer": sum(map(used_by, tree(psutil.Process(process.pid)))),
            })  # fmt: skip
            process.stdin.write("go\n")
            process.stdin.flush()
        elif line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            if len(looks) == 2:
                found["cpu_ms"] = {part: 1000 * (looks[1][part] - looks[0][part]) for part in looks[0]}
            return found
    return {}
