"""Fixtures of the contract tests: the world, its cast, and the way to the server (in process, or a socket)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .driver import CAST, Agent, DjangoTransport, HttpTransport, Person, Transport, World

OVER_HTTP = os.environ.get("CONTRACT_OVER_HTTP") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All of these need the database; those over HTTP really commit, and cannot move the other process's clock."""
    here = str(Path(__file__).parent)
    for item in [i for i in items if str(i.path).startswith(here)]:
        if OVER_HTTP and "clock" in getattr(item, "fixturenames", ()):
            items.remove(item)
            config.hook.pytest_deselected(items=[item])
        elif OVER_HTTP or not item.get_closest_marker("django_db"):
            item.add_marker(pytest.mark.django_db(transaction=OVER_HTTP))


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    """In process unless CONTRACT_OVER_HTTP=1 or the test says so."""
    if OVER_HTTP or getattr(request, "param", "") == "http":
        over_http = HttpTransport(request.getfixturevalue("loop_server"))
        yield over_http
        over_http.client.close()
    else:
        yield DjangoTransport()


@pytest.fixture
def world(transport: Transport, tmp_path: Path) -> Iterator[World]:
    """A fresh server with the cast; afterwards its chains are whole, and the projections are what the events say."""
    made = World(transport, tmp_path)
    made.apply(CAST)
    yield made
    if not made.forged:
        made.command("verify_ledger")


@pytest.fixture
def bot(world: World) -> Agent:
    """The agent of the default workspace that may use every flow."""
    return world.agent("bot")


def _person(name: str, doc: str) -> Any:
    def give(world: World) -> Person:
        return world.person(name)

    give.__doc__ = doc
    return pytest.fixture(name=name)(give)


alice = _person("alice", "Legal reviewer.")
bob = _person("bob", "Legal reviewer.")
carol = _person("carol", "Legal reviewer too, and the one who requests.")
grace = _person("grace", "Reviewer in `leads`, to whom things are escalated; not in legal.")
dave = _person("dave", "Operator.")
erin = _person("erin", "Auditor.")
frank = _person("frank", "Administrator of the workspace.")
victor = _person("victor", "Viewer.")
mallory = _person("mallory", "Everything, but in another workspace.")
