"""One installation for the tests of a file; each leaves it as it found it, with every run at its end and nobody at
work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import stage
from .stage import Site
from .wire import Wire


@pytest.fixture(scope="module")
def installation() -> Iterator[Site]:
    with stage.site() as made:
        yield made


@pytest.fixture
def site(installation: Site) -> Iterator[Site]:
    """After each test, whatever it did: all is well."""
    yield installation
    try:
        installation.all_is_well()
    finally:
        installation.dismiss()


@pytest.fixture
def wire(site: Site) -> Iterator[Wire]:
    with Wire(site.port).open() as made:
        yield made
