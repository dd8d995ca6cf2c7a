"""The page's example, started as the page says: killed while it waits, decided over HTTP, started again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from durabletask.client import TaskHubGrpcClient
from durabletask.testing import create_test_backend

from tests.client.conftest import reaches
from tests.conftest import eventually, free_port

pytestmark = pytest.mark.processes


@pytest.fixture
def task_hub() -> Iterator[str]:
    """A task hub that outlives the example's process."""
    port = free_port()
    backend = create_test_backend(port=port)
    yield f"localhost:{port}"
    backend.stop()


def rests(task_hub: str) -> bool:
    """Nothing is under way: what is lost with a worker, this task hub does not hand out again."""
    with TaskHubGrpcClient(host_address=task_hub) as client:
        history = client.get_orchestration_history("contract-17")
    return any(type(event).__name__ == "TimerCreatedEvent" for event in history)


@pytest.mark.parametrize("hub", ["lives on", "dies too"])
def test_contract_is_sent_once_by_another_process(example, ledger, alice, task_hub, hub):
    """With its task hub the instance goes on from its history; without, it starts again, and the ledger remembers."""
    environment = {"TASK_HUB": task_hub} if hub == "lives on" else {"PORT": str(free_port())}
    agent = example("durabletask_agent.py", environment=environment)
    run = eventually(lambda: ledger.runs(flow="contracts", status="waiting")["results"], what="the question")[0]
    assert (run["agent"]["framework"], run["title"]) == ("durabletask", "Contract for Northwind")
    if hub == "lives on":
        eventually(lambda: rests(task_hub), what="the orchestrator's rest")
    agent.kill()

    ask = alice.open_wait(run["id"], "legal-approval")["ask"]
    assert ask["summary"] == "Send the contract over 48000.00 EUR to Northwind?"
    alice.decide(run["id"], "legal-approval", "edit", arguments={**ask["effect"]["arguments"], "amount": "45000.00"})
    if hub == "dies too":
        environment = {"PORT": str(free_port())}
    example("durabletask_agent.py", environment=environment)
    reaches(ledger, run["id"], "completed")

    drafted, sent = agent.outside()
    assert drafted["key"] == "contracts/contract-17/crm.create_draft/1"
    assert sent["key"] == "contracts/contract-17/esign.send/1"
    assert sent["arguments"]["amount"] == "45000.00"
