"""Fixtures of the browser tests: Chromium, the real server, and the contract tests' cast with passwords."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.conftest import CHROMIUM, Server
from tests.contract.driver import CAST, Agent, HttpTransport, World

PASSWORD = "correct horse battery"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    # Playwright's loop runs in this thread; the tests' own queries are short and wait for nothing of it.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
    del os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"]


@pytest.fixture
def world(live_server: Server, tmp_path: Path) -> Iterator[World]:
    transport = HttpTransport(live_server.url)
    made = World(transport, tmp_path)
    made.apply(CAST)
    yield made
    transport.client.close()


@pytest.fixture
def bot(world: World) -> Agent:
    return world.agent("bot", owner="carol")


@dataclass
class Desk:
    """Somebody of the cast before a browser of their own; what the page complains of is kept."""

    page: Page
    url: str
    complaints: list[str]

    def open(self, path: str) -> Page:
        self.page.goto(self.url + path)
        return self.page


@pytest.fixture
def sits_down(chromium: Browser, world: World, live_server: Server) -> Iterator[Callable[..., Desk]]:
    """`sits_down("alice", theme="dark", width=390, js=True)`: signs in through the page, as she would."""
    from django.contrib.auth.models import User

    contexts: list[BrowserContext] = []
    desks: list[Desk] = []

    def sit(name: str, *, theme: str = "light", width: int = 1440, js: bool = True, **options: Any) -> Desk:
        user = User.objects.get(username=name)
        user.set_password(PASSWORD)
        user.save()
        context = chromium.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=theme,  # type: ignore[arg-type]
            java_script_enabled=js,
            locale=options.pop("locale", "en-GB"),
            timezone_id="Europe/Berlin",
            reduced_motion="reduce",
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        desk = Desk(page, live_server.url, [])
        page.on("pageerror", lambda error: desk.complaints.append(str(error)))
        page.on("console", lambda said: desk.complaints.append(said.text) if "Content Security" in said.text else None)
        page.goto(live_server.url + "/sign-in/")
        page.fill("[name=username]", name)
        page.fill("[name=password]", PASSWORD)
        page.click("button.main")
        page.wait_for_selector(".rail")
        desks.append(desk)
        return desk

    yield sit
    for context in contexts:
        context.close()
    assert [complaint for desk in desks for complaint in desk.complaints] == []
