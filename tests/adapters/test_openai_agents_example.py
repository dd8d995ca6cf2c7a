"""The page's example, started as the page says: killed while it waits, decided over HTTP, started again."""

from __future__ import annotations

import pytest

from tests.client.conftest import reaches
from tests.conftest import eventually

pytestmark = pytest.mark.processes


def test_run_goes_on_in_another_process_as_it_was_edited(example, ledger, alice):
    agent = example("openai_agents_agent.py")
    run = eventually(lambda: ledger.runs(flow="refunds", status="waiting")["results"], what="the question")[0]
    agent.kill()
    ask = alice.open_wait(run["id"], "refund")["ask"]
    assert ask["summary"] == "Refund 20.00 EUR for order A-17?"
    assert run["agent"]["framework"] == "openai-agents"

    alice.decide(run["id"], "refund", "edit", arguments={**ask["effect"]["arguments"], "amount": "15.00"})
    example("openai_agents_agent.py")
    reaches(ledger, run["id"], "completed")

    key = "refunds/case-17/payments.refund/call_1"
    assert agent.outside() == [{"key": key, "order": "A-17", "amount": "15.00"}]
