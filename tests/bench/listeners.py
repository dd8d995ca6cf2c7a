"""What it costs that many wait: 500 agents in long polls and 200 browsers' pages on one server, and how soon they hear.

    python -m tests.bench.listeners            # prints JSON; about four minutes

Starts a real `manage.py up --no-demo` on a folder of its own. The crowd is one process of its own, on the same
processors; what it uses is not counted. Costs are the difference to the same server at rest, in the server's own
processes (web, database, background).
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
AGENTS, BROWSERS, FLOWS, PEOPLE = 500, 200, 10, 10
SETTLE, REST = 35.0, 60.0
"""Seconds until everybody has asked twice; seconds over which the cost of waiting is measured."""
ALONE, CROWDED = 200, 100
"""Decisions timed with one client, and with the crowd."""
POLICY = """
[group.reviewers]
members = [{members}]
roles = ["reviewer"]
{flows}
"""
FLOW = """
[flow.flow-{n}]
required = []
[flow.flow-{n}.wait.approval]
groups = ["reviewers"]
exclude_requester = false
"""

Json = dict[str, Any]


# -- the server


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    folder: Path
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def manage(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    def costs(self) -> Json:
        """CPU seconds so far and memory in MB by part; memory is what each process has for itself."""
        found: Json = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(process.cmdline())
                part = "database" if "postgres" in words else "web" if "uvicorn" in words else "background"
                part = "web" if "multiprocessing" in words and _under_uvicorn(process) else part
                one = found.setdefault(part, {"cpu": 0.0, "mb": 0.0})
                times = process.cpu_times()
                one["cpu"] += times.user + times.system
                one["mb"] += process.memory_full_info().uss / 1e6
        return found


def _under_uvicorn(process: psutil.Process) -> bool:
    return any("uvicorn" in " ".join(parent.cmdline()) for parent in process.parents()[:2])


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A fresh `manage.py up`, ready, ended afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rehydrate-bench-"))
    folder.chmod(0o711)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("REHYDRATE_")}
    kept.pop("DATABASE_URL", None)
    environment = {**kept, "REHYDRATE_DATA": str(folder / "data")}
    log = folder / "up.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--no-demo", "--port", "0"],
            cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Server(process, folder, environment=environment)
    try:
        while not (match := re.search(r"^ready: (\S+)", log.read_text(), re.MULTILINE)):
            assert process.poll() is None, f"it did not start:\n{log.read_text()}"
            time.sleep(0.1)
        server.url = match[1]
        yield server
    except BaseException:
        print(log.read_text()[-5000:], file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


# -- a client that costs little


class Line:
    """One kept-alive HTTP connection; one request at a time."""

    def __init__(self, url: str, **headers: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.where = host, int(port)
        self.headers = {"Host": f"{host}:{port}", **headers}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str, str]:
        """(status, head, body). Once more on a new connection when the server has closed the old one meanwhile."""
        for last in (False, True):
            try:
                return await self._ask(method, path, body, headers)
            except (OSError, asyncio.IncompleteReadError):
                self.close()
                if last:
                    raise
        raise AssertionError

    async def _ask(self, method: str, path: str, body: Any, more: dict[str, str]) -> tuple[int, str, str]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self.where, limit=4_000_000)
        reader, writer = self._streams
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = {**self.headers, "Content-Length": str(len(raw)), "Content-Type": "application/json", **more}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + raw)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = int(answer.split(" ", 2)[1])
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        text = b""
        if length:
            text = await reader.readexactly(int(length[1]))
        elif "chunked" in answer.lower():
            while size := int(await reader.readuntil(b"\r\n"), 16):
                text += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readexactly(2)
        return status, answer, text.decode()

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Agent(Line):
    def __init__(self, url: str, key: str, name: str) -> None:
        super().__init__(url, Authorization=f"Bearer {key}")
        self.name = name

    async def post(self, path: str, body: Json) -> Json:
        status, _, text = await self.ask("POST", f"/api/v1{path}", body)
        assert status < 300, (status, text)
        return json.loads(text) if text else {}

    async def open_paused(self, flow: str) -> tuple[str, str]:
        """A run that waits for an approval: its id and the wait's."""
        wait = {"key": "w", "name": "approval", "kind": "approval", "due_in": 86400}
        events = [
            {"type": "checkpoint", "stage": "draft", "ref": "s3://draft"},
            {"type": "paused", "waits": [wait], "resume_when": "all"},
        ]
        external = f"x-{random.getrandbits(64):x}"
        body = {"flow": flow, "external_id": external, "holder": self.name, "events": events}
        run = (await self.post("/runs", body))["run"]
        return run["id"], run["waits"][0]["id"]

    async def claim(self, flow: str) -> Json | None:
        status, _, text = await self.ask("POST", "/api/v1/claims", {"flows": [flow], "holder": self.name, "wait": 30})
        assert status in (200, 204), (status, text)
        return json.loads(text) if status == 200 else None

    async def complete(self, envelope: Json) -> None:
        events = [{"type": "completed"}]
        await self.post(
            f"/runs/{envelope['run']['id']}/events", {"epoch": envelope["lease"]["epoch"], "events": events}
        )


# -- the crowd


@dataclass
class Crowd:
    """Everybody who waits. `got` has the moment at which an envelope was held, by run; `told` pages' answers by run."""

    server: Server
    key: str
    cookies: list[str]
    watched: list[str]
    got: dict[str, asyncio.Future[float]] = field(default_factory=dict)
    news: list[float] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def attach(self) -> None:
        self.tasks = [asyncio.create_task(self._agent(n)) for n in range(AGENTS)]
        self.tasks += [asyncio.create_task(self._browser(n)) for n in range(BROWSERS)]

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _agent(self, n: int) -> None:
        await asyncio.sleep(random.uniform(0, 15))  # noqa: S311
        agent = Agent(self.server.url, self.key, f"crowd-{n}")
        while True:
            try:
                envelope = await agent.claim(f"flow-{n % FLOWS}")
                if envelope is not None:
                    self.got[envelope["run"]["id"]].set_result(time.perf_counter())
                    await agent.complete(envelope)
            except Exception as error:
                self.troubles.append(f"agent: {error!r}")
                await asyncio.sleep(1)

    async def _browser(self, n: int) -> None:
        """As static/console.js does it."""
        await asyncio.sleep(random.uniform(0, 15))  # noqa: S311
        line = Line(self.server.url, Cookie=self.cookies[n % len(self.cookies)])
        path = "/?scope=available" if n % 2 else f"/runs/{self.watched[n % len(self.watched)]}/"
        _, _, text = await line.ask("GET", path)
        url, state = _live(text)
        while True:
            try:
                query = f"{url}{'&' if '?' in url else '?'}state={state}&wait=yes"
                status, _, text = await line.ask("GET", query, **{"HX-Request": "true"})
                assert status in (200, 204), status
                if status == 200:
                    self.news.append(time.perf_counter())
                    url, state = _live(text)
                await asyncio.sleep(0.7 if status == 200 else random.uniform(0, 0.2))  # noqa: S311
            except Exception as error:
                self.troubles.append(f"browser: {error!r}")
                await asyncio.sleep(2)


def _live(text: str) -> tuple[str, str]:
    found = re.search(r'<div id="live"[^>]*?hx-get="([^"]+)"[^>]*?"state": "([^"]*)"', text)
    assert found, text[:500]
    return html.unescape(found[1]), found[2]


async def _sign_in(server: Server, link: str) -> str:
    """The cookie of somebody who opened the link."""
    line = Line(server.url)
    path = link.removeprefix(server.url)
    _, head, text = await line.ask("GET", path)
    csrf = re.search(r"set-cookie:\s+(\w+)=(\w+)", head, re.IGNORECASE)
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', text)
    assert csrf, head
    assert token, text
    form = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": f"{csrf[1]}={csrf[2]}"}
    status, head, _ = await line.ask("POST", path, f"csrfmiddlewaretoken={token[1]}".encode(), **form)
    line.close()
    session = re.search(r"set-cookie:\s+(\w*session\w*)=(\w+)", head, re.IGNORECASE)
    assert session, (status, head)
    return f"{session[1]}={session[2]}"


# -- what is measured


async def _alone(server: Server, key: str, person: str) -> list[float]:
    """Milliseconds from sending a decision until the agent that waits holds the envelope."""
    opener, agent, reviewer = (
        Agent(server.url, key, "one"),
        Agent(server.url, key, "two"),
        Agent(server.url, person, "p"),
    )
    taken = []
    for _ in range(ALONE):
        _, wait = await opener.open_paused("flow-0")
        claim = asyncio.create_task(agent.claim("flow-0"))
        await asyncio.sleep(0.03)  # by then it waits
        began = time.perf_counter()
        decision = asyncio.create_task(_decide(reviewer, wait))
        envelope = await claim
        taken.append(time.perf_counter() - began)
        await decision
        assert envelope is not None
        await agent.complete(envelope)
    return [1000 * one for one in taken]


async def _decide(reviewer: Agent, wait: str) -> None:
    await reviewer.post(f"/waits/{wait}/decisions", {"choice": "approve", "wait_version": 1})


async def _crowded(crowd: Crowd, key: str, person: str) -> list[float]:
    """The same with everybody there: the envelope goes to one of the fifty agents that wait for its flow."""
    opener, reviewer = Agent(crowd.server.url, key, "one"), Agent(crowd.server.url, person, "p")
    taken = []
    for n in range(CROWDED):
        run, wait = await opener.open_paused(f"flow-{n % FLOWS}")
        crowd.got[run] = asyncio.get_running_loop().create_future()
        await asyncio.sleep(0.2)
        began = time.perf_counter()
        await _decide(reviewer, wait)
        taken.append(await asyncio.wait_for(crowd.got[run], 40) - began)
    return [1000 * one for one in taken]


async def _pages(crowd: Crowd, key: str) -> Json:
    """Seconds until every page shows that a run was opened, when nothing else goes on."""
    await asyncio.sleep(8)
    opener = Agent(crowd.server.url, key, "one")
    crowd.news.clear()
    began = time.perf_counter()
    await opener.open_paused("flow-0")
    await asyncio.sleep(6)
    seen = sorted(at - began for at in crowd.news)
    return {"pages": len(seen), "p50": round(seen[len(seen) // 2], 3), "last": round(seen[-1], 3)} if seen else {}


def _percentiles(taken: list[float]) -> Json:
    cuts = statistics.quantiles(taken, n=20, method="inclusive")
    return {"p50": round(statistics.median(taken), 2), "p95": round(cuts[-1], 2), "max": round(max(taken), 2)}


async def _at_rest(server: Server, seconds: float) -> Json:
    """Per cent of a core, and memory, by part."""
    before = server.costs()
    await asyncio.sleep(seconds)
    after = server.costs()
    return {
        part: {
            "cpu_percent": round(100 * (after[part]["cpu"] - before[part]["cpu"]) / seconds, 2),
            "mb": round(after[part]["mb"], 1),
        }
        for part in sorted(after)
        if part in before
    }


async def _measure(server: Server) -> Json:
    people = [f"person-{n}" for n in range(PEOPLE)]
    policy = server.folder / "bench.toml"
    flows = "".join(FLOW.format(n=n) for n in range(FLOWS))
    policy.write_text(POLICY.format(members=", ".join(f'"{name}"' for name in people), flows=flows))
    server.manage("apply", str(policy))
    key = server.manage("issue_key", "agent", "--name", "bot")
    person = server.manage("issue_key", "person", "--user", people[0])
    links = [server.manage("invite", name) for name in people]
    cookies = [await _sign_in(server, link) for link in links]
    opener = Agent(server.url, key, "opener")
    watched = [(await opener.open_paused("flow-0"))[0] for _ in range(20)]

    alone = await _alone(server, key, person)
    empty = await _at_rest(server, REST / 2)
    crowd = Crowd(server, key, cookies, watched)
    crowd.attach()
    await asyncio.sleep(SETTLE)
    full = await _at_rest(server, REST)
    pages = await _pages(crowd, key)
    crowded = await _crowded(crowd, key, person)
    await crowd.leave()

    def more(what: str, *parts: str) -> float:
        return float(round(sum(full[part][what] - empty[part][what] for part in parts), 2))

    return {
        "agents": AGENTS,
        "browsers": BROWSERS,
        "decision_to_envelope_ms": {"one_client": _percentiles(alone), "with_the_crowd": _percentiles(crowded)},
        "cost_of_waiting": {
            "cpu_percent_of_a_core": more("cpu_percent", *full),
            "mb": more("mb", *full),
            "web_cpu_percent": more("cpu_percent", "web"),
            "web_mb": more("mb", "web"),
            "database_cpu_percent": more("cpu_percent", "database"),
        },
        "pages_show_a_change_within_s": pages,
        "at_rest": {"without": empty, "with_the_crowd": full},
        "troubles": crowd.troubles[:5],
    }


def measure() -> Json:
    """All of it, in about four minutes. Milliseconds, per cent of one core, MB (10^6 bytes), seconds."""
    with serving() as server:
        return asyncio.run(_measure(server))


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
