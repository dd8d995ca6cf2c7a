"""Several `up` on one database share the work; what is killed, hangs or is gone for a while mends by itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from rehydrate.postgres import Embedded
from tests import netns
from tests.conftest import FAST_AND_LOOSE, eventually, free_port
from tests.test_up import PATIENCE, Up

# One after the other: each starts a dozen processes.
pytestmark = pytest.mark.processes
Start = Callable[..., Up]
Agent = Callable[[Up], httpx.Client]


class Postgres:
    """A server that no `up` looks after, on a socket in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        if os.geteuid() == 0:
            folder.chmod(0o711)
        self.server = Embedded(folder, settings=FAST_AND_LOOSE)
        self.server.initialise()
        self.url = self.server.url()
        self.start()
        self.server.create_database()

    def start(self) -> None:
        self.process = self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self.process.wait(30)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            return connection.execute(sql).fetchall()

    def waiting(self) -> int:
        return int(self.ask("SELECT count(*) FROM rehydrate_timer WHERE fired_at IS NULL AND kind = 'deadline'")[0][0])

    def fired(self) -> list[int]:
        """How often each run's timer was."""
        rows = self.ask("SELECT count(*) FROM rehydrate_ledgerevent WHERE type = 'wait.satisfied' GROUP BY run_id")
        return [row[0] for row in rows]

    def early(self) -> int:
        return int(self.ask("SELECT count(*) FROM rehydrate_timer WHERE fired_at < due_at")[0][0])

    def ticking(self) -> dict[str, list[int]]:
        """The processes that tick, by their `up`."""
        found: dict[str, list[int]] = {}
        for name, pid in self.ask(
            "SELECT name, (detail->>'pid')::int FROM rehydrate_heartbeat"
            " WHERE starts_with(name, 'tick@') AND at > clock_timestamp() - interval '3 seconds'"
        ):
            found.setdefault(name.removeprefix("tick@").partition("#")[0], []).append(pid)
        return found


@pytest.fixture
def ledger(open_folder: Path) -> Iterator[Postgres]:
    """The database that all `up` of a test share."""
    server = Postgres(open_folder / "database")
    yield server
    server.stop()


@pytest.fixture
def start(ledger: Postgres, open_folder: Path) -> Iterator[Callable[..., Up]]:
    """Starts an `up` on that database, with a data folder of its own."""
    started: list[Up] = []

    def begin(*words: str, **how: Any) -> Up:
        folder = open_folder / f"data{len(started)}"
        up = Up(folder, *(words or ("--port", str(free_port()), "--no-demo")), DATABASE_URL=ledger.url, **how)
        started.append(up)
        return up

    yield begin
    for up in started:
        kill(up)


def kill(up: Up) -> None:
    """Everything of it at the same instant, with the one who would clear up after it."""
    if up.process.poll() is None:
        family = [psutil.Process(up.process.pid), *up.children()]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=30)
        up.process.wait(30)
    up._reader.join(10)


@pytest.fixture
def agent() -> Iterator[Callable[[Up], httpx.Client]]:
    """A client with a key of its own."""
    with contextlib.ExitStack() as stack:
        yield lambda up: stack.enter_context(_agent(up))


def _agent(up: Up) -> httpx.Client:
    flows = up.folder / "flows.toml"
    flows.write_text('[workspace.default]\ntitle = "Operations"\n')
    up.manage("apply", str(flows))
    key = up.manage("issue_key", "agent", "--name", f"bot{time.monotonic_ns()}")
    return httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=60)


def sleepers(client: httpx.Client, url: str, count: int, *, due_in: Callable[[int], int]) -> None:
    """Runs that wait for a timer."""
    for n in range(count):
        wait = {"name": "later", "kind": "timer", "due_in": due_in(n)}
        events = [
            {"type": "checkpoint", "stage": "s", "ref": "s3://x"},
            {"type": "paused", "waits": [wait]},
        ]
        body = {"flow": "any", "external_id": f"x-{time.monotonic_ns()}", "holder": "h", "events": events}
        answer = client.post(f"{url}/api/v1/runs", json=body)
        assert answer.status_code == 201, answer.text


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=10).status_code == 200
    return False


def problems(url: str) -> list[str]:
    """The codes of what is wrong; an answer that does not come in time is none."""
    with contextlib.suppress(httpx.HTTPError):
        return [problem["code"] for problem in httpx.get(f"{url}/readyz", timeout=15).json()["problems"]]
    return []


def test_two_share_the_work_and_either_goes_on_alone(start: Start, agent: Agent, ledger: Postgres) -> None:
    one = start()
    first = one.ready()
    two = start()
    second = two.ready()
    eventually(lambda: len(ledger.ticking()) == 2, within=PATIENCE, what="ticks of both")
    client = agent(one)
    for url in (first, second):
        eventually(lambda url=url: ready(url), within=PATIENCE, what=url)  # type: ignore[misc]
        sleepers(client, url, 60, due_in=lambda n: 2 + n % 12)
    kill(one)
    sleepers(client, second, 20, due_in=lambda n: 1 + n % 3)  # keys and secrets are the database's
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="all timers")
    assert (len(ledger.fired()), set(ledger.fired()), ledger.early()) == (140, {1}, 0)
    eventually(lambda: ready(second), within=PATIENCE, what="readiness")
    assert two.manage("verify_ledger").startswith("verified: ")

    again = start()  # on a folder of its own, and the other way round
    third = again.ready()
    sleepers(client, third, 20, due_in=lambda n: 1 + n % 8)
    kill(two)
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="all timers")
    assert (len(ledger.fired()), set(ledger.fired()), ledger.early()) == (160, {1}, 0)
    assert again.manage("verify_ledger").startswith("verified: ")


def test_two_in_networks_of_their_own(start: Start, agent: Agent, ledger: Postgres) -> None:
    """The same name of the machine, the same port, nothing in common but the database's socket."""
    hindrance = netns.why_not()
    if hindrance is not None:
        reason = f"this needs root, or namespaces for users (kernel.unprivileged_userns_clone): {hindrance}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    inside = [sys.executable, "-m", "tests.netns", "run"]
    one, two = (start("--port", "8000", "--no-demo", inside=inside) for _ in range(2))
    for up in (one, two):
        assert up.ready() == "http://127.0.0.1:8000"
    eventually(lambda: len(ledger.ticking()) == 2, within=PATIENCE, what="ticks of both")

    def codes(up: Up) -> Any:
        status, body = netns.get(up.process.pid, "http://127.0.0.1:8000/readyz")
        return status == 200 or (status and print(json.loads(body)))

    for up in (one, two):
        eventually(lambda up=up: codes(up), within=PATIENCE, what="readiness")  # type: ignore[misc]
    with pytest.raises(httpx.ConnectError):
        httpx.get("http://127.0.0.1:8000/healthz")
    kill(one)
    eventually(lambda: len(ledger.ticking()) == 1, within=PATIENCE, what="the other alone")
    assert codes(two)
    assert two.manage("verify_ledger").startswith("verified: ")


def test_a_database_that_is_gone_for_a_while(start: Start, agent: Agent, ledger: Postgres) -> None:
    ups = [start(), start()]
    urls = [up.ready() for up in ups]
    client = agent(ups[0])
    for url in urls:
        eventually(lambda url=url: ready(url), within=PATIENCE, what="readiness")  # type: ignore[misc]
    sleepers(client, urls[0], 10, due_in=lambda n: 1 + n)
    ledger.stop()
    for url in urls:
        eventually(lambda url=url: problems(url) == ["no_database"], within=PATIENCE, what="no_database")  # type: ignore[misc]
        assert httpx.get(f"{url}/healthz", timeout=30).status_code == 200
    ledger.start()
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="what became due meanwhile")
    for url in urls:
        eventually(lambda url=url: ready(url), within=PATIENCE, what="readiness")  # type: ignore[misc]
        sleepers(client, url, 5, due_in=lambda n: 1)
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="what becomes due later")
    assert (len(ledger.fired()), set(ledger.fired()), ledger.early()) == (20, {1}, 0)
    assert ups[1].manage("verify_ledger").startswith("verified: ")


def test_ticks_that_are_killed_are_replaced_within_seconds(start: Start, agent: Agent, ledger: Postgres) -> None:
    up = start()
    url = up.ready()
    client = agent(up)
    eventually(lambda: ready(url), within=PATIENCE, what="readiness")
    before = {pid for pids in ledger.ticking().values() for pid in pids}
    assert before
    sleepers(client, url, 10, due_in=lambda n: 2 + n)
    for pid in before:
        psutil.Process(pid).kill()
    killed = time.monotonic()

    def replaced() -> bool:
        return bool({pid for pids in ledger.ticking().values() for pid in pids} - before)

    eventually(replaced, within=PATIENCE, what="another tick")
    print(f"ticking again {time.monotonic() - killed:.1f} s after the last one was killed")
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="all timers")
    assert set(ledger.fired()) == {1}
    eventually(lambda: ready(url), within=PATIENCE, what="readiness")


@pytest.mark.parametrize("name", ["ticks", "work"])
def test_a_hung_cluster_is_seen_and_started_again(start: Start, agent: Agent, ledger: Postgres, name: str) -> None:
    """django-q2 hangs for good when an idle worker is killed: it holds the lock that all others wait for."""
    up = start()
    url = up.ready()
    client = agent(up)
    eventually(lambda: ready(url), within=PATIENCE, what="readiness")
    clusters = [child for child in psutil.Process(up.process.pid).children() if "qcluster" in child.cmdline()]
    cluster = next(child for child in clusters if child.environ()["Q_CLUSTER_NAME"].startswith(f"{name}@"))
    (sentinel,) = cluster.children()
    ticking = {pid for pids in ledger.ticking().values() for pid in pids}
    killed = time.monotonic()
    for worker in sentinel.children():
        if worker.pid not in ticking:
            worker.kill()
    up.wait_for(rf"up +\| {name} has not answered for ")
    seen = time.monotonic() - killed
    sleepers(client, url, 5, due_in=lambda n: 1 + n)
    up.wait_for(rf"up +\| {name} ended")
    eventually(lambda: not cluster.is_running(), within=PATIENCE, what="its end")
    eventually(lambda: ready(url), within=PATIENCE, what="readiness")
    print(f"{name}: seen after {seen:.1f} s, mended after {time.monotonic() - killed:.1f} s")
    eventually(lambda: ledger.waiting() == 0, within=PATIENCE, what="all timers")
    assert set(ledger.fired()) == {1}
