"""Fixtures of the console's tests over HTTP: the contract tests' cast, signed in by session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from tests.contract.driver import CAST, Agent, DjangoTransport, World

PASSWORD = "correct horse battery"


@pytest.fixture
def world(db: None, tmp_path: Path) -> World:
    made = World(DjangoTransport(), tmp_path)
    made.apply(CAST)
    return made


@pytest.fixture
def bot(world: World) -> Agent:
    return world.agent("bot", owner="carol")


@pytest.fixture
def session(world: World) -> Callable[[str], Client]:
    """A signed-in session of one of the cast, who has a password."""

    from django.contrib.auth.models import User  # not before Django is set up

    def make(name: str) -> Client:
        user = User.objects.get(username=name)
        user.set_password(PASSWORD)
        user.save()
        client = Client(raise_request_exception=True)
        client.force_login(user)
        return client

    return make


def text_of(response: Any) -> str:
    """The page's words, without tags and with white space as one blank each."""
    import html
    import re

    body = re.sub(r"<(script|style).*?</\1>", " ", response.content.decode(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())
