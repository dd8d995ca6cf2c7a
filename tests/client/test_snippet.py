"""The agent in twenty lines that the README shows, started as its page says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, end, eventually

from .conftest import reaches

pytestmark = pytest.mark.processes


def test_agent_in_twenty_lines_sends_what_a_person_approved(cast, key, ledger, alice, tmp_path):
    environment = {**os.environ, "REHYDRATE_URL": cast.url, "REHYDRATE_KEY": key, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "agent.log"
    with log.open("wb") as out:
        agent = subprocess.Popen(
            [sys.executable, "-u", str(ROOT / "docs" / "agent_snippet.py")], env=environment, cwd=tmp_path, stdout=out
        )
    try:
        runs = eventually(lambda: ledger.runs(flow="newsletter", status="waiting")["results"], what="the question")
        assert "sending" not in log.read_text()
        alice.decide(runs[0]["id"], "send-it", "approve")
        run = reaches(ledger, runs[0]["id"], "completed")
    finally:
        end(agent)
    assert run["effects"][0]["receipt"]["id"] == "msg-1"
    assert log.read_text().count("sending") == 1
