"""The example of docs/langgraph.md, started as its page says, and killed between its pause and its resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.urls import reverse

from tests.client.conftest import reaches
from tests.conftest import HOME, eventually

pytestmark = pytest.mark.processes


def test_the_example_is_killed_and_comes_back_as_the_same_run(example, ledger, alice, client, tmp_path: Path):
    # Where the tests' PostgreSQL is, as `make run`'s is in its data folder.
    start = partial(example, "langgraph_agent.py", environment={"REHYDRATE_DATA": str(HOME)})
    first = start()
    (run,) = eventually(lambda: ledger.runs(flow="letters", status="waiting")["results"], what="the question")
    client.force_login(User.objects.get(username="alice"))
    inbox = client.get(reverse("inbox")).text
    assert "Send this letter to ACME?" in inbox
    assert run["agent"]["framework"] in inbox
    first.kill()
    wait = alice.open_wait(run["id"], "send-letter")
    assert wait["ask"]["summary"] == "Send this letter to ACME?"
    assert wait["ask"]["effect"]["arguments"]["to"] == "ACME"
    alice.decide(run["id"], "send-letter", "edit", arguments={"to": "ACME", "text": "Dear ACME, shall we renew?"})
    outbox = tmp_path / "sent-mails.txt"
    assert not outbox.exists(), "nothing is sent before somebody comes back to the run"
    start()
    ended = reaches(ledger, run["id"], "completed")
    (sent,) = outbox.read_text().splitlines()
    assert sent == f"{ended['effects'][0]['key']} | ACME | Dear ACME, shall we renew?"
    assert ended["effects"][0]["receipt"]["id"] == "mail-1"
