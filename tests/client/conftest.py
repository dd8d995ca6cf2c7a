"""The cast of the client's tests: a real server, the demo's flows and people, and an outside world that counts."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command

from rehydrate.client import Ledger
from rehydrate.demo.agents import Agent
from rehydrate.demo.outside import Outside
from rehydrate.demo.world import World
from tests.conftest import ROOT, Server, end, eventually

Json = dict[str, Any]

FLOWS = ROOT / "rehydrate" / "demo" / "flows.toml"
LEASE_SECONDS = 2


@dataclass
class Person:
    """Somebody with a personal key."""

    name: str
    http: httpx.Client

    def _post(self, path: str, body: Json) -> Json:
        answer = self.http.post(path, json=body)
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text[:800]}"
        return dict(answer.json())

    def open_wait(self, run_id: str, name: str) -> Json:
        waits = self.http.get("/waits", params={"run": run_id, "status": "open"}).json()["results"]
        found = [wait for wait in waits if wait["name"] == name]
        assert found, f"{name} is not among the open waits {waits}"
        return dict(found[0])

    def decide(self, run_id: str, name: str, choice: str, **more: Any) -> Json:
        wait = self.open_wait(run_id, name)
        return self._post(f"/waits/{wait['id']}/decisions", {"choice": choice, "wait_version": wait["version"], **more})

    def act(self, run_id: str, act: str, **body: Any) -> Json:
        return self._post(f"/runs/{run_id}/{act}", {"reason": "As it should be.", **body})

    def reconcile(self, run_id: str, key: str, outcome: str, **body: Any) -> Json:
        return self.act(run_id, f"effects/{key}/reconcile", outcome=outcome, **body)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "world").start()
    yield made
    made.stop()


@pytest.fixture
def outside(world: World) -> Outside:
    return Outside(world.url)


@pytest.fixture
def cast(live_server: Server, tmp_path: Path) -> Server:
    """The demo's people and flows, with leases short enough to see them lapse."""
    text = re.sub(r"lease_seconds = \d+", f"lease_seconds = {LEASE_SECONDS}", FLOWS.read_text())
    path = tmp_path / "flows.toml"
    path.write_text(text)
    call_command("apply", str(path), stdout=io.StringIO())
    return live_server


def issue_key(*args: str) -> str:
    out = io.StringIO()
    call_command("issue_key", *args, stdout=out)
    return out.getvalue().strip()


@pytest.fixture
def person(cast: Server) -> Iterator[Callable[[str], Person]]:
    made: list[httpx.Client] = []

    def make(name: str) -> Person:
        headers = {"Authorization": f"Bearer {issue_key('person', '--user', name)}"}
        made.append(httpx.Client(base_url=f"{cast.url}/api/v1", headers=headers, timeout=30))
        return Person(name, made[-1])

    yield make
    for client in made:
        client.close()


@pytest.fixture
def alice(person: Callable[[str], Person]) -> Person:
    """Decides in every group."""
    return person("alice")


@pytest.fixture
def key(cast: Server) -> str:
    return issue_key("agent", "--name", "bot")


@pytest.fixture
def ledger(cast: Server, key: str) -> Iterator[Ledger]:
    with Ledger(cast.url, key, patience=20) as made:
        yield made


@pytest.fixture
def demo(ledger: Ledger, outside: Outside) -> Callable[..., Agent]:
    """One of the demo's agents, in this process: its turn comes with `ledger.work_once()`."""

    def make(flow: str, **options: Any) -> Agent:
        return Agent(flow, ledger, outside, **options)

    return make


@pytest.fixture
def process(cast: Server, key: str, world: World) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """One of the demo's agents as a process of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(flow: str, *options: str, url: str = cast.url) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "REHYDRATE_URL": url,
            "REHYDRATE_KEY": key,
            "REHYDRATE_DEMO_WORLD": world.url,
        }
        command = [sys.executable, "-m", "rehydrate.demo", "agent", flow, "--no-runs", *options]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        end(process)


@pytest.fixture
def tick(cast: Server) -> Callable[[], None]:
    """Does what the clock says is due, once: what the tick's cluster does all the time."""
    from rehydrate import engine

    def once() -> None:
        engine.tick()

    return once


@pytest.fixture
def ticking(cast: Server) -> Iterator[None]:
    """The clock's work is done all the time, as in production."""
    from django.db import connections

    from rehydrate import engine

    stop = threading.Event()

    def loop() -> None:
        try:
            while not stop.wait(0.1):
                engine.tick()
        finally:
            connections.close_all()

    thread = threading.Thread(target=loop, name="ticks")
    thread.start()
    yield
    stop.set()
    thread.join()


def status_of(ledger: Ledger, run_id: str) -> str:
    return str(ledger.get(run_id)["status"])


def reaches(ledger: Ledger, run_id: str, *statuses: str, within: float = 30.0) -> Json:
    """The run, once it has one of these statuses."""

    def look() -> Json | None:
        run = ledger.get(run_id)
        return run if run["status"] in statuses else None

    return dict(eventually(look, within=within, what=f"status {' or '.join(statuses)}"))


def effect_of(ledger: Ledger, run_id: str, action: str, n: int = 1) -> Json:
    run = ledger.get(run_id)
    return next(dict(e) for e in run["effects"] if e["key"].endswith(f"/{action}/{n}"))


def done(world: World, action: str) -> list[Json]:
    """What the world really did of this kind, oldest first."""
    system, name = action.split(".")
    found = [r for r in world.journal.requests() if (r["system"], r["action"]) == (system, name)]
    return [r for r in reversed(found) if r["outcome"] == "done"]


def everything_once(world: World) -> bool:
    counts = world.journal.counts()
    return bool(counts) and all(n == 1 for n in counts.values())
