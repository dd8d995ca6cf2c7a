"""What the crash tests share: one installation as a user starts it, agents as processes, people, a world that counts,
and the one question that is asked after every crash: is all well?"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from psycopg.rows import dict_row

from rehydrate import http1
from rehydrate.client import Ledger
from rehydrate.demo.world import World
from rehydrate.postgres import Embedded
from tests.conftest import HOME, ROOT, eventually, free_port
from tests.test_up import Up, clean_environment, csrf_token

from .errand import FLOW, Noting

Json = dict[str, Any]

HERE = Path(__file__).parent
PATIENCE = 90.0
"""Seconds for what takes one or two on an idle machine."""
ENDED = ("completed", "terminated")
ENDS_A_LEASE = (
    "lease.lapsed", "lease.retaken", "released", "paused", "failed", "completed", "taken_over", "terminated",
)  # fmt: skip
SET_UP = """
from django.core.management import call_command
call_command("apply", {flows!r})
call_command("issue_key", "agent", "--name", "errand")
call_command("issue_key", "person", "--user", "alice")
call_command("issue_key", "person", "--user", "bob")
"""
TICK = """
import select, sys
from rehydrate import engine
while not select.select([sys.stdin], [], [], 0.01)[0]:
    engine.tick()
"""


def wrong_clock(ahead: int) -> dict[str, str]:
    """The environment of a Python process whose clock is so many seconds ahead."""
    return {"PYTHONPATH": str(HERE / "clock"), "CLOCK_AHEAD": str(ahead)}


def kill(*processes: psutil.Process | subprocess.Popen[bytes]) -> None:
    """All of them, with no warning."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.kill()
    psutil.wait_procs([p for p in processes if isinstance(p, psutil.Process)], timeout=10)
    for process in processes:
        if isinstance(process, subprocess.Popen):
            process.wait(10)


@dataclass
class Person:
    """Somebody with a key, whose answered requests are noted as an agent's are."""

    name: str
    key: str
    http: httpx.Client

    def post(self, path: str, body: Json, *, key: str | None = None) -> httpx.Response:
        return self.http.post(path, json=body, headers={"Idempotency-Key": key or str(uuid.uuid4())})

    def do(self, path: str, body: Json) -> Json:
        """Until it is answered, as a person presses the button again."""
        key = str(uuid.uuid4())

        def press() -> httpx.Response | None:
            try:
                answer = self.post(path, body, key=key)
            except httpx.TransportError:
                return None
            return None if answer.status_code >= 500 else answer

        answer = eventually(press, within=PATIENCE, what=f"an answer to {path}")
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text[:600]}"
        return dict(answer.json())

    def open_wait(self, run_id: str) -> Json | None:
        found = self.http.get("/waits", params={"run": run_id, "status": "open"}).json()["results"]
        return next((dict(wait) for wait in found if wait["kind"] == "approval"), None)

    def decide(self, run_id: str, choice: str = "approve") -> Json:
        wait = self.open_wait(run_id)
        assert wait is not None, f"nothing is asked of run {run_id}"
        body = {"choice": choice, "wait_version": wait["version"], "reason": "As it should be."}
        return self.do(f"/waits/{wait['id']}/decisions", body)

    def act(self, run_id: str, act: str, **body: Any) -> Json:
        return self.do(f"/runs/{run_id}/{act}", {"reason": "As it should be.", **body})


@dataclass(frozen=True)
class Agent:
    """A process of the agent; where it was told to stand still, the marker says that it got there."""

    process: subprocess.Popen[bytes]
    marker: Path

    @property
    def stands(self) -> bool:
        return self.marker.exists()


@dataclass
class Site:
    """One installation: its data folder, `up`, the outside world, the people, and all that was ever acknowledged."""

    folder: Path
    port: int
    world: World
    up: Up
    agent_key: str = ""
    agents: list[Agent] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    _clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    # -- the installation

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def notes(self) -> Path:
        return self.folder / "acknowledged.jsonl"

    def begin(self) -> None:
        """Once for an installation: its people and its flow, and somebody who looks at the pages."""
        self.up.ready()
        self.back()
        out = self.up.manage("shell", "--no-imports", "-c", SET_UP.format(flows=str(HERE / "errand.toml")))
        self.agent_key, *keys = out.splitlines()[-3:]
        self.alice, self.bob = (self.caller(name, key) for name, key in zip(("alice", "bob"), keys, strict=True))
        self.bot = self.caller("errand", self.agent_key)
        self.ledger = self._clients.enter_context(
            Ledger(self.url, self.agent_key, holder="opener", patience=PATIENCE, transport=Noting(self.notes))
        )
        self.browser = self._clients.enter_context(httpx.Client(base_url=self.url, timeout=30))
        link = self.up.wait_for(rf"({self.url}/sign-in/\S+)")[1]
        page = self.browser.get(link)
        form = {"csrfmiddlewaretoken": csrf_token(page)}
        assert self.browser.post(link, data=form, headers={"Referer": link}).status_code == 302

    def caller(self, name: str, key: str, url: str = "") -> Person:
        """Somebody's requests by hand, past the client; `url` when they come another way."""
        headers = {"Authorization": f"Bearer {key}"}
        http = httpx.Client(
            base_url=f"{url or self.url}/api/v1", headers=headers, timeout=30, transport=Noting(self.notes)
        )  # fmt: skip
        return Person(name, key, self._clients.enter_context(http))

    def by(self, url: str, who: Person) -> Person:
        return self.caller(who.name, who.key, url)

    def start_again(self) -> None:
        self.up.process.wait(PATIENCE)
        self.up._reader.join(10)
        self.up = Up(self.folder / "data", "--no-demo", "--port", str(self.port))
        assert self.up.ready() == self.url

    def end(self) -> None:
        self.dismiss()
        self._clients.close()
        if self.up.process.poll() is None:
            self.up.end()
        self.up._reader.join(10)
        self.world.stop()

    def service(self, name: str) -> psutil.Process:
        """The process that `up` started under this name."""

        def find() -> psutil.Process | None:
            mark = {"web": "uvicorn", "postgres": "postgres", "ticks": "qcluster", "work": "qcluster"}[name]
            for child in psutil.Process(self.up.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    words = " ".join(child.cmdline())
                    cluster = child.environ().get("Q_CLUSTER_NAME", "")
                    if mark in words and (mark != "qcluster" or cluster.startswith(name)):
                        return child
            return None

        return eventually(find, within=PATIENCE, what=f"the process {name}")

    def serves(self) -> bool:
        """The web server, the database and the timers work."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def back(self) -> None:
        eventually(self.serves, within=PATIENCE, what="everything in its place")

    def until(self, ask: Callable[[], Any], what: str) -> None:
        eventually(ask, within=PATIENCE, what=what)

    @contextlib.contextmanager
    def process(self, *words: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """Another process on the same database, beside those of `up`."""
        names = {
            "DATABASE_URL": self.embedded.url(),
            "REHYDRATE_DATA": str(self.folder / "data"),
            "REHYDRATE_URL": self.url,
        }
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=clean_environment(**{**names, **environment}), stdin=subprocess.PIPE
        )
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            kill(process)

    @contextlib.contextmanager
    def web(self, *, ahead: int) -> Iterator[str]:
        """The address of another web server, whose clock is so many seconds ahead."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        words = http1.command("127.0.0.1", port)[1:]
        with self.process(*words, **wrong_clock(ahead), REHYDRATE_URL=url, REHYDRATE_DB_POOL="4") as process:

            def answers() -> bool:
                assert process.poll() is None
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{url}/healthz", timeout=5).status_code == 200
                return False

            self.until(answers, "the other web server")
            yield url
            for child in psutil.Process(process.pid).children(recursive=True):
                kill(child)

    def ticker(self, *, ahead: int = 0) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Another tick, all the time, beside those of `up`."""
        return self.process("manage.py", "shell", "--no-imports", "-c", TICK, **wrong_clock(ahead))

    # -- agents and runs

    def agent(
        self,
        *,
        run: str = "",
        stand: str = "",
        url: str = "",
        threads: int = 1,
        environment: dict[str, str] | None = None,
    ) -> Agent:
        """Another process of the agent, for one run or for whatever comes; `stand` is where it stands still."""
        marker = self.folder / f"stands-{uuid.uuid4()}"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.errand"],
            cwd=ROOT,
            env=clean_environment(
                REHYDRATE_URL=url or self.url,
                REHYDRATE_KEY=self.agent_key,
                ERRAND_WORLD=self.world.url,
                ERRAND_NOTES=str(self.notes),
                ERRAND_RUN=run,
                ERRAND_STAND=stand,
                ERRAND_MARKER=str(marker),
                ERRAND_THREADS=str(threads),
                **(environment or {}),
            ),
            stdin=subprocess.PIPE,
        )
        self.agents.append(Agent(process, marker))
        return self.agents[-1]

    def stood(self, agent: Agent) -> None:
        self.until(lambda: agent.stands, "the agent at its point")

    def dismiss(self) -> None:
        """Nobody is at work any more; a poll that nobody waits for would still be given the next run."""
        polling = [agent.process for agent in self.agents if not agent.stands]
        for process in polling:
            process.terminate()
        for process in polling:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for agent in self.agents:
            kill(agent.process)
            if agent.process.stdin is not None:
                agent.process.stdin.close()
        self.agents.clear()

    def open(self, count: int = 1, **more: Any) -> list[str]:
        """New errands, ready for whoever claims them; `more` as the client's `open` takes it."""
        made = []
        for _ in range(count):
            name = f"errand-{len(self.opened)}"
            answer = self.ledger.open(FLOW, name, input_ref="store://in", requested_by="carol", **more)
            self.opened.append(answer["run"]["id"])
            made.append(answer["run"]["id"])
        return made

    def look(self, run_id: str) -> Json:
        return self.ledger.get(run_id)

    def effect(self, run_id: str, action: str) -> Json:
        found = [e for e in self.look(run_id)["effects"] if f"{e['system']}.{e['action']}" == action]
        assert len(found) == 1, f"{action} is not once in {found}"
        return dict(found[0])

    def reaches(self, run_id: str, *statuses: str, code: str | None = None) -> Json:
        """The run, once it has one of these statuses (and the verdict this reason)."""

        def there() -> Json | None:
            run = self.look(run_id)
            codes = [reason["code"] for reason in run["verdict"]["reasons"]]
            return run if run["status"] in statuses and (code is None or code in codes) else None

        return eventually(there, within=PATIENCE, what=f"{' or '.join(statuses)} {code or ''}")

    def done(self, action: str, run_id: str | None = None) -> list[Json]:
        """What the world really did of this kind."""
        system, name = action.split(".")
        found = [
            r
            for r in self.world.journal.requests()
            if (r["system"], r["action"], r["outcome"]) == (system, name, "done")
        ]
        of_run = f"/{self.look(run_id)['external_id']}/" if run_id else ""
        return [r for r in found if of_run in r["key"]]

    @contextlib.contextmanager
    def at_work(self, runs: int = 9) -> Iterator[Callable[[int], None]]:
        """Two agents of three threads, and somebody who decides whatever is asked, on so many errands at once. What it
        gives waits until so many more things have happened outside."""
        over = threading.Event()

        def decide() -> None:
            while not over.wait(0.05):
                with contextlib.suppress(httpx.TransportError, KeyError, ValueError):
                    for wait in self.bob.http.get("/waits", params={"status": "open"}).json()["results"]:
                        body = {"choice": "approve", "wait_version": wait["version"]}
                        if wait["kind"] == "approval":
                            self.bob.post(f"/waits/{wait['id']}/decisions", body)

        def progress(more: int) -> None:
            enough = sum(self.world.journal.counts().values()) + more
            self.until(lambda: sum(self.world.journal.counts().values()) >= enough, "progress")

        self.world.latency = 0.1
        self.open(runs)
        reviewer = threading.Thread(target=decide, name="reviewer")
        reviewer.start()
        try:
            self.agent(threads=3)
            self.agent(threads=3)
            yield progress
        finally:
            over.set()
            reviewer.join()
            self.world.latency = 0.0

    # -- timers

    def asleep(self, count: int) -> list[str]:
        """Runs that a timer wakes, all at the same instant, once all are open; nobody but a tick looks at them."""
        begin = {"type": "checkpoint", "stage": "asleep", "ref": "store://asleep"}
        timed = time.monotonic()
        self.call_off(self.open(1, holder="sleeper"))
        each = time.monotonic() - timed
        due = self.sql("SELECT clock_timestamp() + make_interval(secs => %s) AS at", 2 + 2 * count * each)[0]["at"]
        timer = {"key": "alarm", "name": "alarm", "kind": "timer", "due_at": due.isoformat()}
        return self.open(count, events=[begin, {"type": "paused", "waits": [timer]}], holder="sleeper")

    def call_off(self, runs: list[str]) -> None:
        for run in runs:
            self.alice.act(run, "terminate")

    def awake(self, runs: list[str]) -> int:
        """How many of them have been woken."""
        woken = "SELECT 1 FROM rehydrate_ledgerevent WHERE type = 'wait.satisfied' AND run_id::text = ANY(%s)"
        return len(self.sql(woken, runs))

    def woken_once(self, runs: list[str]) -> None:
        """None early, none twice."""
        rows = self.sql(
            "SELECT e.run_id::text AS run, e.at >= w.due_at AS in_time FROM rehydrate_ledgerevent e"
            " JOIN rehydrate_wait w ON w.id::text = e.payload ->> 'wait'"
            " WHERE e.type = 'wait.satisfied' AND e.run_id::text = ANY(%s)",
            runs,
        )
        assert sorted(row["run"] for row in rows) == sorted(runs)
        assert all(row["in_time"] for row in rows)

    # -- the database, past the server

    def sql(self, statement: str, *values: Any) -> list[Json]:
        with self.database() as connection:
            return connection.execute(statement, values).fetchall()

    @contextlib.contextmanager
    def database(self) -> Iterator[psycopg.Connection[Json]]:
        with psycopg.connect(self.embedded.url(), row_factory=dict_row) as connection:
            yield connection

    @property
    def embedded(self) -> Embedded:
        return Embedded(self.folder / "data")

    # -- is all well?

    def bring_home(self) -> None:
        """Each run that stands still says why on its page; when that is settled, it goes on, until all have ended."""
        left = {run_id for run_id in self.opened if self.look(run_id)["status"] not in ENDED}
        if left:
            self.agent()
        shown: set[tuple[str, str]] = set()

        def all_ended() -> bool:
            for run_id in list(left):
                run = self.look(run_id)
                if run["status"] in ENDED:
                    left.discard(run_id)
                    continue
                self._says_why(run, shown)
                self._settle(run)
            return not left

        eventually(all_ended, within=PATIENCE, what=f"the end of {len(left)} runs")

    def _says_why(self, run: Json, shown: set[tuple[str, str]]) -> None:
        assert run["status"] == "running" or run["verdict"]["reasons"], f"run {run['id']} stands still without a reason"
        assert all(reason["message"] for reason in run["verdict"]["reasons"])
        if (run["id"], run["status"]) in shown or run["status"] == "running":
            return
        shown.add((run["id"], run["status"]))
        page = self.browser.get(f"/runs/{run['id']}/")
        assert page.status_code == 200, page.status_code
        sentence = re.search(r'<p class="next-sentence">(.+?)</p>', page.text, re.S)
        assert sentence, f"the page of a run in {run['status']} does not say what happens next"

    def _settle(self, run: Json) -> None:
        """What a person does about a run that waits for one. What goes on by itself meanwhile is let go on."""
        if run["status"] == "waiting":
            if self.alice.open_wait(run["id"]) is not None:
                self.alice.decide(run["id"])
            return
        if run["status"] != "review":
            return
        reason = run["verdict"]["reasons"][0]
        key = reason["subject"]
        match reason["code"]:
            case "effect_unknown":
                found = self.world.journal.look_up(key)
                more = {"outcome": "executed", "receipt": {"id": found["id"]}} if found else {"outcome": "not_executed"}
            case "compensation_unknown":
                more = {"outcome": "compensated" if self.world.journal.look_up(f"{key}/undo") else "not_executed"}
            case "retries_exhausted" | "not_retryable":
                self.alice.act(run["id"], "retry", tries=5)
                return
            case code:
                raise AssertionError(f"a crash is no reason for {code}: {run['verdict']}")
        found_out = {"reason": "Looked outside.", **more}
        answer = self.alice.post(f"/runs/{run['id']}/effects/{key}/reconcile", found_out)
        assert answer.status_code in (200, 409), answer.text  # a late receipt may have settled it at this very moment

    def all_is_well(self) -> None:
        """After a crash, whichever: the four things that quality.md asks."""
        self.back()
        self.bring_home()
        events = self.events()
        nothing_acknowledged_is_lost(self.acknowledged(), events, self.signals())
        no_lease_twice(events)
        self.no_effect_twice()
        assert self.up.manage("verify_ledger").startswith("verified: ")

    def acknowledged(self) -> list[Json]:
        return [json.loads(line) for line in self.notes.read_text().splitlines()]

    def events(self) -> dict[str, list[Json]]:
        """The ledger, run by run."""
        found: dict[str, list[Json]] = {}
        for row in self.sql(
            "SELECT run_id::text AS run, seq, type, payload FROM rehydrate_ledgerevent ORDER BY run_id, seq"
        ):
            found.setdefault(row["run"], []).append(row)
        return found

    def signals(self) -> dict[str, Json]:
        return {row["id"]: row for row in self.sql("SELECT id::text, state, wait_id::text FROM rehydrate_signal")}

    def no_effect_twice(self) -> None:
        """The world did each thing once at most; the ledger knows of each what the world knows."""
        counts = self.world.journal.counts()
        twice = {key: count for key, count in counts.items() if count > 1}
        assert not twice, f"done more than once: {twice}"
        told: Counter[str] = Counter()
        for run_id in self.opened:
            run = self.look(run_id)
            for effect in run["effects"]:
                happened = effect["state"] in ("executed", "compensated")
                assert counts.get(effect["key"], 0) == int(happened), (
                    f"{effect['key']} is {effect['state']} in the ledger"
                )
                if happened:
                    told[effect["key"]] += 1
                    known = self.world.journal.look_up(effect["key"]) or {}
                    assert effect["receipt"]["id"] == known["id"], f"{effect['key']} has another's receipt"
        untold = [key for key in counts if not key.endswith("/undo") and key not in told]
        assert not untold, f"the ledger does not know of {untold}"


def nothing_acknowledged_is_lost(notes: list[Json], events: dict[str, list[Json]], signals: dict[str, Json]) -> None:
    """Whatever anybody was told is so: each event in its place, each grant, each decision, each signal."""
    assert notes
    facts = {(run, event["seq"]): event for run, rows in events.items() for event in rows}
    decisions = {
        row["payload"]["decision"]: row for rows in events.values() for row in rows if "decision" in row["payload"]
    }
    grants = {
        (row["run"], row["payload"]["epoch"], row["payload"]["holder"])
        for rows in events.values()
        for row in rows
        if row["type"] == "lease.granted"
    }
    for note in notes:
        path, body, answer = note["path"], note["body"], note["answer"]
        match path.strip("/").split("/"):
            case ["runs"]:
                assert answer["run"]["id"] in events, f"a run that was opened is gone: {note}"
            case ["runs", run, "events"]:
                for event in answer["events"]:
                    fact = facts.get((run, event["seq"]))
                    assert event["seq"] is None or (fact and fact["type"] == event["type"]), f"{event} of {run} is gone"
            case ["claims"] if answer is not None:
                assert (answer["run"]["id"], answer["lease"]["epoch"], body["holder"]) in grants, f"no grant: {note}"
            case ["runs", run, "rehydrate" | "recall"] if answer["lease"]:
                assert (run, answer["lease"]["epoch"], body["holder"]) in grants, f"no grant: {note}"
            case ["runs", run, "release"]:
                assert any(e["type"] == "released" and e["payload"]["epoch"] == body["epoch"] for e in events[run]), (
                    note
                )
            case ["waits", _, "decisions"] | ["runs", _, "handback" | "clear" | "retry" | "terminate"]:
                assert answer["id"] in decisions, f"a decision is gone: {note}"
            case ["runs", _, "effects", *_]:
                assert answer["id"] in decisions, f"a finding is gone: {note}"
            case ["runs", run, "takeover"]:
                assert any(event["type"] == "taken_over" for event in events[run]), note
            case ["signals"] | ["hooks", _]:
                kept = signals.get(answer["signal_id"])
                assert kept, f"a signal is gone: {note}"
                assert answer["state"] != "matched" or kept["wait_id"] in answer["matched"], note


def no_lease_twice(events: dict[str, list[Json]]) -> None:
    """Each grant has the next epoch, and none is given before the one before it has ended."""
    for run, rows in events.items():
        epoch, live = 0, False
        for row in rows:
            if row["type"] == "lease.granted":
                assert not live, f"two leases at once on {run}, at event {row['seq']}"
                assert row["payload"]["epoch"] == epoch + 1, f"epochs of {run} at event {row['seq']}"
                epoch, live = epoch + 1, True
            elif row["type"] in ENDS_A_LEASE or row["payload"].get("mismatch"):
                live = False


@contextlib.contextmanager
def site() -> Iterator[Site]:
    """An installation in a folder of its own, with the durability that a user gets; ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="crash-", dir=HOME))
    if os.geteuid() == 0:
        folder.chmod(0o711)  # root's PostgreSQL runs as somebody else, who passes through
    port = free_port()
    up = Up(folder / "data", "--no-demo", "--port", str(port))
    made = Site(folder, port, World(folder / "world").start(), up)
    try:
        made.begin()
        yield made
    finally:
        made.end()
        print("\n".join(made.up.lines))  # shown with a failure


def everything(site: Site) -> list[psutil.Process]:
    """`up` and all that it started, the database and the one that clears up after it included."""
    top = psutil.Process(site.up.process.pid)
    return [top, *top.children(recursive=True)]
