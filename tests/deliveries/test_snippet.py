"""The receiver that the README shows, started as its page says: woken by a signed delivery, deaf to anything else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rehydrate import sender
from rehydrate.models import Delivery
from tests.conftest import ROOT, Server, end, eventually, free_port
from tests.contract.driver import HttpTransport, World

pytestmark = pytest.mark.processes


@pytest.fixture
def world(live_server: Server, tmp_path: Path) -> Iterator[World]:
    transport = HttpTransport(live_server.url)
    yield World(transport, tmp_path)
    transport.client.close()


def test_a_signed_delivery_wakes_the_agent(world: World, live_server: Server, tmp_path: Path) -> None:
    port = free_port()
    said = world.apply(
        '[group.readers]\nmembers = ["alice"]\n'  # somebody has to answer the agent's question
        f'[flow.newsletter]\nrequired = []\ndeliver_to = "http://127.0.0.1:{port}/hooks"\n'
        '[flow.newsletter.wait.send-it]\ngroups = ["readers"]\n'
    )
    secret = said.rpartition(": ")[2].strip()
    bot = world.agent("newsletter")
    environment = {
        **os.environ,
        "REHYDRATE_URL": live_server.url,
        "REHYDRATE_KEY": str(bot.key),
        "WEBHOOK_SECRET": secret,
        "PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }
    log = tmp_path / "receiver.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "docs" / "receiver_snippet.py")], env=environment, stdout=out, stderr=out
        )
    try:
        unsigned = eventually(lambda: _post(port), within=60, what="the receiver")
        assert unsigned.status_code == 401
        run: Any = bot.post("/runs", {"flow": "newsletter", "external_id": "newsletter-1"}).ok(201)["run"]
        assert sender.send_due() == 1
        assert Delivery.objects.get().status == "delivered", log.read_text()
        waiting = eventually(
            lambda: bot.get(f"/runs/{run['id']}").ok()["status"] == "waiting", within=60, what="the agent's question"
        )
        assert waiting
    finally:
        end(process)


def _post(port: int) -> httpx.Response | None:
    try:
        return httpx.post(f"http://127.0.0.1:{port}/hooks", json={"type": "run.ready"})
    except httpx.TransportError:
        return None
