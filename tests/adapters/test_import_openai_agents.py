"""`import_openai_agents`: paused states of the SDK are seen as runs, read only until an agent adopts them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call
from django.core.management import CommandError, call_command

from rehydrate.adapters.openai_agents import adopt, effect, effect_call, flow
from rehydrate.models import CheckpointState
from tests.conftest import in_a_loop

pytestmark = pytest.mark.processes

set_tracing_disabled(True)  # nothing of a test leaves this machine


@function_tool(name_override="refund", needs_approval=True)
def before(order: str) -> str:
    """As it was before there was a ledger."""
    raise AssertionError("nobody approved it")


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A state that waits for an approval, as a team has kept it; its context holds a secret."""
    model = ScriptedModel([[function_call("refund", {"order": "17"}, call_id="call_1")]])
    agent = Agent[Any](name="Support", model=model, tools=[before])
    result = in_a_loop(Runner.run(agent, "Look after case 1.", context={"token": "hush-hush"}))
    file = tmp_path / "case-1.json"
    file.write_text(json.dumps(result.to_state().to_json()))
    return file


def imported(*files: Path) -> str:
    out = io.StringIO()
    call_command("import_openai_agents", *map(str, files), "--flow", "case", stdout=out)
    return out.getvalue()


def test_a_stuck_state_is_seen_and_can_only_be_read(stuck, ledger, alice):
    assert "1 paused states shown as runs of case, 0 known before." in imported(stuck)
    assert "0 paused states shown as runs of case, 1 known before." in imported(stuck)
    (run,) = ledger.runs(flow="case")["results"]
    assert (run["external_id"], run["status"]) == ("case-1", "waiting")
    assert run["title"] == 'Support would call refund ({"order":"17"})'
    (wait,) = ledger.get(run["id"])["waits"]
    refused = alice.http.post(f"/waits/{wait['id']}/decisions", json={"choice": "approve", "wait_version": 1})
    assert refused.status_code == 422, "nobody answers it"
    assert b"hush-hush" not in bytes(CheckpointState.objects.get(run_id=run["id"]).sealed)


def test_an_adopted_state_is_a_run_as_any_other(stuck, ledger, alice):
    done: list[str] = []

    @effect("payments.refund")
    @function_tool(needs_approval=True, failure_error_function=None)
    def refund(order: str) -> str:
        """As it is under the ledger."""
        done.append(effect_call().key)
        return "refunded"

    imported(stuck)
    agent = Agent[Any](name="Support", model=ScriptedModel([[assistant_message("It is done.")]]), tools=[refund])
    flow(ledger, "case", agent)(lambda run: "Look after it.")
    assert ledger.work_once() is None, "no agent goes on with it by itself"
    run = adopt(ledger, "case", "case-1")
    assert ledger.work_once() == run["id"]
    assert done == [], "a person is asked first"
    alice.decide(run["id"], "refund", "approve")
    assert ledger.work_once() == run["id"]
    assert ledger.get(run["id"])["status"] == "completed"
    assert done == ["case/case-1/payments.refund/call_1"]


def test_what_is_no_state_is_said_plainly(cast, tmp_path):
    file = tmp_path / "x.json"
    with pytest.raises(CommandError, match="cannot be read"):
        imported(file)
    file.write_text("{")
    with pytest.raises(CommandError, match="no JSON"):
        imported(file)
    file.write_text("{}")
    with pytest.raises(CommandError, match="no state of the OpenAI Agents SDK"):
        imported(file)
