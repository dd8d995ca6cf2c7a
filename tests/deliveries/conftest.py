"""Fixtures of the deliveries' tests: receivers on this machine, and a cast whose flow names one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .receiver import Receiver


@pytest.fixture(autouse=True)
def _targets(settings: Any) -> None:
    """The receivers of these tests are on this machine, as an operator may allow."""
    settings.ALLOW_PRIVATE_TARGETS = True


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that a test ends are asked often whether they should."""
    monkeypatch.setattr("rehydrate.sender.LOOK_EVERY", 0.2)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture
def cast(db: None, receiver: Receiver) -> Any:
    from tests.ledger_cast import Cast

    from .told import told

    return told(Cast(), receiver.url)
