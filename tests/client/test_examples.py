"""The plain examples, started as their pages say: they ask, are killed, are decided, started again, and touch once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, eventually

from .conftest import done, effect_of, everything_once, reaches

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "docs" / "examples"


@dataclass(frozen=True)
class Example:
    command: tuple[str, ...]
    framework: str
    flow: str
    wait: str
    gated: str  # the effect that a person decides on


PLAIN = Example(
    (sys.executable, str(EXAMPLES / "plain_agent.py")),
    "plain",
    "access-request",
    "access-review",
    "directory.grant_access",
)
CURL = Example(("sh", str(EXAMPLES / "curl_agent.sh")), "curl", "parcel", "shipping", "parcels.ship")
BOTH = (PLAIN, CURL)


@pytest.fixture
def start(cast, key, world, tmp_path: Path):
    """Starts an example in a group of its own, which ends with the test."""
    started: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "REHYDRATE_URL": cast.url,
        "REHYDRATE_KEY": key,
        "REHYDRATE_DEMO_WORLD": world.url,
        "PYTHONPATH": str(ROOT),
    }

    def run(example: Example) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(example.command, cwd=tmp_path, env=environment, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def asked(ledger):
    """The run that an example opened, once it waits for a person."""

    def find(example: Example) -> str:
        found = eventually(lambda: ledger.runs(flow=example.flow, status="waiting")["results"], what="the question")
        assert len(found) == 1
        return str(found[0]["id"])

    return find


def test_killed_while_they_wait_and_started_again(ledger, alice, world, start, asked):
    agents = [start(example) for example in BOTH]
    runs = [asked(example) for example in BOTH]
    for agent in agents:
        kill(agent)
    for example, run_id in zip(BOTH, runs, strict=True):
        assert ledger.get(run_id)["agent"]["framework"] == example.framework
        ask = alice.open_wait(run_id, example.wait)["ask"]
        assert ask["summary"].endswith("?")
        assert ask["schema"]["properties"].keys() <= ask["effect"]["arguments"].keys()
        assert done(world, example.gated) == []
        alice.decide(run_id, example.wait, "approve")

    for example in BOTH:
        start(example)
    for example, run_id in zip(BOTH, runs, strict=True):
        assert reaches(ledger, run_id, "completed")["id"] == run_id
        assert len(done(world, example.gated)) == 1
    assert everything_once(world)


@pytest.mark.parametrize(("example", "change"), [(PLAIN, {"days": 7}), (CURL, {"service": "standard"})])
def test_what_a_person_edited_is_what_is_done(ledger, alice, world, start, asked, example, change):
    start(example)
    run_id = asked(example)
    arguments = {**alice.open_wait(run_id, example.wait)["ask"]["effect"]["arguments"], **change}
    alice.decide(run_id, example.wait, "edit", arguments=arguments)
    reaches(ledger, run_id, "completed")
    (request,) = done(world, example.gated)
    assert request["arguments"] == arguments


@pytest.mark.parametrize("example", BOTH, ids=lambda example: example.framework)
def test_killed_between_effect_and_receipt(ledger, alice, world, start, asked, example):
    """It was done and nobody was told: it is not done again, a person finds out and says so."""
    agent = start(example)
    run_id = asked(example)
    system, action = example.gated.split(".")
    world.journal.set_mode(system, action, "slow", 60, 1)  # done, and its answer takes a minute
    alice.decide(run_id, example.wait, "approve")
    eventually(lambda: done(world, example.gated), what="the effect")
    kill(agent)
    alice.act(run_id, "takeover")  # rather than wait for the lease to lapse
    effect = effect_of(ledger, run_id, example.gated)
    assert effect["state"] == "unknown"
    number = done(world, example.gated)[0]["result"]["id"]
    alice.reconcile(run_id, effect["key"], "executed", receipt={"id": number})
    where = ledger.get(run_id)["checkpoint"]
    alice.act(run_id, "handback", stage=where["stage"], checkpoint={"ref": where["ref"]})

    start(example)
    reaches(ledger, run_id, "completed")
    assert len(done(world, example.gated)) == 1
    assert everything_once(world)


def test_no_is_taken_for_a_no(ledger, alice, world, start, asked):
    start(PLAIN)
    run_id = asked(PLAIN)
    alice.decide(run_id, "access-review", "reject", reason="Erik is back.")
    reaches(ledger, run_id, "completed")
    assert done(world, "directory.grant_access") == []
    assert len(done(world, "tickets.close")) == 1  # what was done before is undone first
    assert [mail["arguments"]["text"] for mail in done(world, "mail.send")] == ["Not granted: Erik is back."]
    assert everything_once(world)
