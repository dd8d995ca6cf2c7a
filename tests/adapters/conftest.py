"""The adapters' tests have the client's cast: a real server, people with keys, a ledger of an agent's own."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from langgraph.checkpoint.postgres import PostgresSaver

from tests.client.conftest import alice, cast, key, ledger, person, ticking
from tests.conftest import _embedded

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
