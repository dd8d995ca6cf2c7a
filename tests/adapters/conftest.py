"""The adapters' tests have the client's cast, and the examples of `docs/examples/` as processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver

from tests.client.conftest import alice, cast, key, ledger, person, ticking
from tests.conftest import ROOT, Server, _embedded

__all__ = ["alice", "cast", "key", "ledger", "person", "threads_url", "ticking"]


@pytest.fixture(scope="session")
def threads_url(postgres_server: object, worker_id: str) -> Iterator[str]:
    """A database for LangGraph's checkpoints on the tests' own PostgreSQL."""
    name = f"threads_{worker_id}"
    with psycopg.connect(_embedded().url("postgres"), autocommit=True) as admin:
        admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        admin.execute(f"CREATE DATABASE {name}")
        url = _embedded().url(name)
        with PostgresSaver.from_conn_string(url) as saver:
            saver.setup()
        yield url
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def saver(threads_url: str) -> Iterator[PostgresSaver]:
    """A real checkpointer on PostgreSQL; each test has threads of its own."""
    with PostgresSaver.from_conn_string(threads_url) as made:
        yield made


Json = dict[str, Any]


@dataclass
class Example:
    """One of them, running as a user would start it."""

    process: subprocess.Popen[bytes]
    folder: Path

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def outside(self) -> list[Json]:
        """What all its processes have done outside, in order."""
        return [json.loads(line) for line in (self.folder / "outside.jsonl").read_text().splitlines()]


@pytest.fixture
def example(cast: Server, key: str, tmp_path: Path) -> Iterator[Callable[..., Example]]:
    """Starts an example against the server; all that are started in a test share a folder."""
    started: list[Example] = []

    def start(name: str, *, environment: dict[str, str] | None = None) -> Example:
        env = {**os.environ, "REHYDRATE_URL": cast.url, "REHYDRATE_KEY": key, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(ROOT / "docs" / "examples" / name)]
        process = subprocess.Popen(command, env={**env, **(environment or {})}, cwd=tmp_path)
        started.append(Example(process, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.kill()
