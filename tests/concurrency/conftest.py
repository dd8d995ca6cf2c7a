"""All of these commit for real; each has a fresh cast, and a stage on which the order of things can be set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ledger_cast import Cast

    from .stage import Stage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.django_db(transaction=True))


@pytest.fixture
def cast() -> Cast:
    from tests.ledger_cast import Cast

    return Cast()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    from .stage import Stage

    made = Stage(monkeypatch)
    try:
        yield made
    finally:
        for gate in made.gates:
            gate.set()
        made.pool.shutdown(wait=True)


@pytest.fixture(autouse=True, params=["each alone", "together", "on memory"])
def group_commit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each in its thread; on an event loop, as the web server does it; and there for callers whose rights are confirmed
    where it is written, so that what was just written need not be read.
    """
    from rehydrate import services, sql

    from . import stage

    if request.param == "each alone":
        yield
        return
    with stage.event_loop() as loop:
        for name in stage.ON_THE_LOOP:
            on_the_loop = stage.carried_out_on(loop, getattr(services, name))
            if request.param == "on memory":
                on_the_loop = stage.with_rights(on_the_loop)
            monkeypatch.setattr(services, name, on_the_loop)
        yield
    sql.own_connections.close()
