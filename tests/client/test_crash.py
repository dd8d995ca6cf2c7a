"""Agents as real processes, really killed: before, during and after an effect. The world counts what reached it."""

from __future__ import annotations

import os
import random
import signal
import subprocess

import pytest

from rehydrate.demo import scenarios
from tests.conftest import ROOT, end, eventually, start_web

from .conftest import done, effect_of, everything_once, reaches, status_of

pytestmark = pytest.mark.processes


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def opened(ledger, demo, ticking):
    """Opens a flow's run; its agents are other processes."""

    def make(flow: str, index: int = 0) -> str:
        demo(flow).open(index)
        external_id = scenarios.external_id(flow, index)
        ledger.flows.clear()
        return str(ledger.runs(flow=flow, external_id=external_id)["results"][0]["id"])

    return make


def test_killed_between_effect_and_receipt(ledger, world, alice, opened, process):
    run_id = opened("contract-approval")
    world.journal.set_mode("crm", "create_draft", "slow", 60, 1)  # done, and its answer takes a minute
    agent = process("contract-approval")
    eventually(lambda: done(world, "crm.create_draft"), what="the draft")
    kill(agent)

    run = reaches(ledger, run_id, "review")
    effect = effect_of(ledger, run_id, "crm.create_draft")
    assert effect["state"] == "unknown"
    assert run["verdict"]["outcome"] == "review"

    process("contract-approval")
    number = done(world, "crm.create_draft")[0]["result"]["id"]
    alice.reconcile(run_id, effect["key"], "executed", receipt={"id": number})
    reaches(ledger, run_id, "waiting")
    alice.decide(run_id, "legal-approval", "approve")
    reaches(ledger, run_id, "completed")

    assert everything_once(world)
    assert len(done(world, "crm.create_draft")) == 1


def test_killed_before_the_outside_was_reached(ledger, world, alice, opened, process):
    run_id = opened("contract-approval")
    world.journal.set_mode("crm", "create_draft", "slow_before", 60, 1)
    agent = process("contract-approval")
    eventually(lambda: not world.journal.modes(), what="the request")
    kill(agent)
    reaches(ledger, run_id, "review")
    assert done(world, "crm.create_draft") == []

    # The person looks outside, finds nothing, and says so.
    alice.reconcile(run_id, effect_of(ledger, run_id, "crm.create_draft")["key"], "not_executed")
    process("contract-approval")
    reaches(ledger, run_id, "waiting")

    assert effect_of(ledger, run_id, "crm.create_draft")["state"] == "executed"
    assert len(done(world, "crm.create_draft")) == 1


def test_killed_while_it_waits_for_a_person(ledger, world, alice, opened, process):
    run_id = opened("contract-approval")
    agent = process("contract-approval")
    reaches(ledger, run_id, "waiting")
    kill(agent)
    alice.decide(run_id, "legal-approval", "approve")

    process("contract-approval")
    run = reaches(ledger, run_id, "completed")

    assert run["id"] == run_id
    assert everything_once(world)


def test_killed_right_after_a_receipt(ledger, world, alice, opened, process):
    run_id = opened("contract-approval")
    agent = process("contract-approval")
    reaches(ledger, run_id, "waiting")
    world.journal.set_mode("crm", "mark_sent", "slow_before", 60, 1)
    alice.decide(run_id, "legal-approval", "approve")
    eventually(lambda: not world.journal.modes(), what="the last effect")
    assert effect_of(ledger, run_id, "esign.send")["state"] == "executed"
    kill(agent)
    reaches(ledger, run_id, "review")
    alice.reconcile(run_id, effect_of(ledger, run_id, "crm.mark_sent")["key"], "not_executed")

    process("contract-approval")
    reaches(ledger, run_id, "completed")

    assert len(done(world, "esign.send")) == 1
    assert len(done(world, "crm.mark_sent")) == 1


def test_killed_in_the_middle_of_an_undo(ledger, world, alice, opened, process):
    run_id = opened("contract-approval")
    agent = process("contract-approval")
    reaches(ledger, run_id, "waiting")
    world.journal.set_mode("crm", "delete_draft", "slow", 60, 1)
    alice.decide(run_id, "legal-approval", "reject", reason="The price is too high")
    eventually(lambda: done(world, "crm.delete_draft"), what="the undo")
    kill(agent)
    reaches(ledger, run_id, "review")
    effect = effect_of(ledger, run_id, "crm.create_draft")
    assert effect["state"] == "compensation_unknown"

    process("contract-approval")
    alice.reconcile(run_id, effect["key"], "compensated")
    reaches(ledger, run_id, "terminated")

    assert len(done(world, "crm.delete_draft")) == 1
    assert everything_once(world)


def test_killed_again_and_again_at_any_instant(ledger, world, alice, opened, process):
    """Systems that honour the key are asked again without anybody's help, and still do everything once."""
    run_id = opened("operations")
    world.latency = 0.3
    dice = random.Random(7)  # noqa: S311 (the same instants each time)
    decided = False
    for _ in range(5):
        agent = process("operations")
        try:
            agent.wait(timeout=dice.uniform(0.6, 1.6))
        except subprocess.TimeoutExpired:
            kill(agent)
        run = reaches(ledger, run_id, "waiting", "ready", "completed", "review")
        if run["status"] == "waiting" and run["verdict"]["reasons"][0]["code"] == "waiting" and not decided:
            alice.decide(run_id, "operations-review", "approve")
            decided = True
        if run["status"] == "review":
            alice.act(run_id, "retry", tries=10)
    world.latency = 0.0
    process("operations")
    # The last kill may have been the one too many, or have come before the question was asked.
    while (run := reaches(ledger, run_id, "waiting", "review", "completed"))["status"] != "completed":
        if run["status"] == "review":
            alice.act(run_id, "retry", tries=10)
        elif run["verdict"]["reasons"][0]["code"] == "waiting" and not decided:
            alice.decide(run_id, "operations-review", "approve")
            decided = True

    assert everything_once(world)
    assert len(done(world, "cms.publish_prices")) == 1
    assert len(done(world, "mail.announce")) == 1


def test_two_agents_of_one_flow_do_nothing_twice(ledger, world, alice, opened, process):
    runs = [opened("contract-approval", index) for index in range(4)]
    for _ in range(2):
        process("contract-approval")
    for run_id in runs:
        reaches(ledger, run_id, "waiting")
        alice.decide(run_id, "legal-approval", "approve")
    for run_id in runs:
        reaches(ledger, run_id, "completed")
    assert everything_once(world)
    assert len(done(world, "esign.send")) == 4


def test_sigterm_in_the_middle_of_an_effect_waits_for_its_receipt(ledger, world, opened, process):
    run_id = opened("contract-approval")
    world.journal.set_mode("crm", "create_draft", "slow", 1.5, 1)
    agent = process("contract-approval")
    eventually(lambda: done(world, "crm.create_draft"), what="the draft")
    agent.terminate()

    assert agent.wait(timeout=20) == 0
    assert effect_of(ledger, run_id, "crm.create_draft")["state"] == "executed"
    # Either it was given back, or it got as far as its pause.
    assert status_of(ledger, run_id) in ("ready", "waiting")
    assert ledger.get(run_id)["failure_count"] == 0


def test_sigterm_while_idle_ends_at_once_and_holds_nothing(ledger, opened, process):
    run_id = opened("contract-approval")
    agent = process("contract-approval")
    reaches(ledger, run_id, "waiting")
    agent.terminate()
    assert agent.wait(timeout=20) == 0
    assert status_of(ledger, run_id) == "waiting"


def test_server_that_is_killed_and_comes_back_is_waited_for(ledger, world, alice, opened, process, tmp_path):
    """The agent outlives the server; what was done and could not be told in time is not done again."""
    server = start_web(tmp_path / "second.log")
    run_id = opened("contract-approval")
    world.journal.set_mode("crm", "create_draft", "slow", 1.0, 1)
    agent = process("contract-approval", url=server.url)
    eventually(lambda: done(world, "crm.create_draft"), what="the draft")
    os.killpg(server.process.pid, signal.SIGKILL)  # granian's workers, too
    server.process.wait()
    again = subprocess.Popen(server.process.args, cwd=ROOT, env=server.environment, start_new_session=True)
    try:
        # Away for longer than a lease it was in review meanwhile, and the late receipt settled that.
        reaches(ledger, run_id, "waiting", within=60)
        alice.decide(run_id, "legal-approval", "approve")
        reaches(ledger, run_id, "completed")
    finally:
        end(agent)
        end(again)
    assert everything_once(world)
