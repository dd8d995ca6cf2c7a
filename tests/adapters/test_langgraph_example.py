"""The example of docs/langgraph.md, started as its page says, and killed between its pause and its resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from tests.client.conftest import reaches
from tests.conftest import HOME, ROOT, eventually

pytestmark = pytest.mark.processes

Agent = Callable[[], "subprocess.Popen[bytes]"]


def kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


@pytest.fixture
def agent(cast, key, tmp_path) -> Iterator[Agent]:
    started: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "REHYDRATE_URL": cast.url,
        "REHYDRATE_KEY": key,
        "REHYDRATE_DATA": str(HOME),  # where the tests' PostgreSQL is, as `make run`'s is in its data folder
        "PYTHONPATH": str(ROOT),
    }

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "docs" / "examples" / "langgraph_agent.py")]
        started.append(subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True))
        return started[-1]

    yield start
    for process in started:  # not by SIGTERM: that would wait for the answer to its last poll
        kill(process)


def test_the_example_is_killed_and_comes_back_as_the_same_run(agent: Agent, ledger, alice, client, tmp_path: Path):
    first = agent()
    (run,) = eventually(lambda: ledger.runs(flow="letters", status="waiting")["results"], what="the question")
    client.force_login(User.objects.get(username="alice"))
    inbox = client.get(reverse("inbox")).text
    assert "Send this letter to ACME?" in inbox
    assert run["agent"]["framework"] in inbox
    kill(first)
    wait = alice.open_wait(run["id"], "send-letter")
    assert wait["ask"]["summary"] == "Send this letter to ACME?"
    assert wait["ask"]["effect"]["arguments"]["to"] == "ACME"
    alice.decide(run["id"], "send-letter", "edit", arguments={"to": "ACME", "text": "Dear ACME, shall we renew?"})
    outbox = tmp_path / "sent-mails.txt"
    assert not outbox.exists(), "nothing is sent before somebody comes back to the run"
    agent()
    ended = reaches(ledger, run["id"], "completed")
    (sent,) = outbox.read_text().splitlines()
    assert sent == f"{ended['effects'][0]['key']} | ACME | Dear ACME, shall we renew?"
    assert ended["effects"][0]["receipt"]["id"] == "mail-1"
