"""The plain examples, started as their pages say: they ask, are killed, are decided, started again, and touch once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT, eventually
from tests.deliveries.receiver import Server

from .conftest import effect_of, reaches

pytestmark = pytest.mark.processes

Json = dict[str, Any]


@dataclass(frozen=True)
class Example:
    command: tuple[str, ...]
    framework: str
    flow: str
    wait: str
    gated: str  # the effect that a person decides on


EXAMPLES = ROOT / "docs" / "examples"
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
def start(cast, key, tmp_path: Path):
    """Starts an example in a group of its own, which ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(example: Example, *, url: str = cast.url) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "REHYDRATE_URL": url, "REHYDRATE_KEY": key, "PYTHONPATH": str(ROOT)}
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
def outside(tmp_path: Path):
    """What reached the outside: each time, in order."""

    def look() -> list[Json]:
        journal = tmp_path / "outside.jsonl"
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    return look


@pytest.fixture
def asked(ledger):
    """The run that an example opened, once it waits for a person."""

    def find(example: Example) -> str:
        found = eventually(lambda: ledger.runs(flow=example.flow, status="waiting")["results"], what="the question")
        assert len(found) == 1
        return str(found[0]["id"])

    return find


@pytest.fixture
def cut(cast):
    """A way to the server that is cut when the receipt of a decided effect comes along: its URL, and the moment."""

    class Way(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if b'"effect.executed"' in body and any(example.gated.encode() in body for example in BOTH):
                reached.set()
                self.close_connection = True
                return
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            answer = httpx.request(self.command, f"{cast.url}{self.path}", content=body, headers=kept, timeout=60)
            self.send_response(answer.status_code)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    reached = Event()
    server = Server(("127.0.0.1", 0), Way)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    yield f"http://127.0.0.1:{server.server_port}", reached
    server.shutdown()
    server.server_close()


def once(outside: list[Json], example: Example) -> Json:
    """What the decided effect did, which it did once, as everything."""
    keys = [line["key"] for line in outside]
    assert len(keys) == len(set(keys))
    (line,) = (line for line in outside if line["action"] == example.gated)
    return dict(line)


def test_killed_while_they_wait_and_started_again(ledger, alice, start, asked, outside):
    agents = [start(example) for example in BOTH]
    runs = [asked(example) for example in BOTH]
    for agent in agents:
        kill(agent)
    for example, run_id in zip(BOTH, runs, strict=True):
        assert ledger.get(run_id)["agent"]["framework"] == example.framework
        ask = alice.open_wait(run_id, example.wait)["ask"]
        assert ask["summary"].endswith("?")
        assert ask["schema"]["properties"].keys() <= ask["effect"]["arguments"].keys()
        assert example.gated not in [line["action"] for line in outside()]
        alice.decide(run_id, example.wait, "approve")

    for example in BOTH:
        start(example)
    for example, run_id in zip(BOTH, runs, strict=True):
        assert reaches(ledger, run_id, "completed")["id"] == run_id
        once(outside(), example)


@pytest.mark.parametrize(
    ("example", "change"), [(PLAIN, {"days": 7}), (CURL, {"service": "standard"})], ids=["plain", "curl"]
)
def test_what_a_person_edited_is_what_is_done(ledger, alice, start, asked, outside, example, change):
    start(example)
    run_id = asked(example)
    arguments = {**alice.open_wait(run_id, example.wait)["ask"]["effect"]["arguments"], **change}
    alice.decide(run_id, example.wait, "edit", arguments=arguments)
    reaches(ledger, run_id, "completed")
    assert once(outside(), example)["arguments"] == arguments


@pytest.mark.parametrize("example", BOTH, ids=["plain", "curl"])
def test_killed_between_effect_and_receipt(ledger, alice, start, asked, outside, cut, example):
    """It was done and nobody was told: it is not done again, a person finds out and says so."""
    url, reached = cut
    agent = start(example, url=url)
    run_id = asked(example)
    alice.decide(run_id, example.wait, "approve")
    assert reached.wait(30)
    kill(agent)
    alice.act(run_id, "takeover")  # rather than wait for the lease to lapse
    effect = effect_of(ledger, run_id, example.gated)
    assert effect["state"] == "unknown"
    alice.reconcile(run_id, effect["key"], "executed", receipt={"id": once(outside(), example)["key"]})
    where = ledger.get(run_id)["checkpoint"]
    alice.act(run_id, "handback", stage=where["stage"], checkpoint={"ref": where["ref"]})

    start(example)
    reaches(ledger, run_id, "completed")
    once(outside(), example)


def test_no_is_taken_for_a_no(ledger, alice, start, asked, outside):
    start(PLAIN)
    run_id = asked(PLAIN)
    alice.decide(run_id, "access-review", "reject", reason="Erik is back.")
    reaches(ledger, run_id, "completed")
    assert [line["action"] for line in outside()] == ["tickets.open", "tickets.close", "mail.send"]
    assert outside()[-1]["arguments"]["text"] == "Not granted: Erik is back."
