"""`manage.py up` as a person uses it: real processes in a fresh data folder, asked over HTTP, ended, started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ROOT, eventually, free_port

# One after the other: each starts a dozen processes.
pytestmark = pytest.mark.processes
PATIENCE = 120.0
"""Seconds for what takes five on an idle machine."""


class Up:
    """One `manage.py up`. What it prints is read all the time; `wait_for` returns the first line that matches."""

    def __init__(self, folder: Path, *words: str, inside: Sequence[str] = (), **environment: str) -> None:
        self.folder = folder
        self.environment = environment
        self.process = subprocess.Popen(
            [*inside, sys.executable, "manage.py", "up", "--data", str(folder), *words],
            cwd=ROOT, env=clean_environment(**environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as out:
            for line in out:
                self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, *, within: float = PATIENCE) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = next(filter(None, (re.search(pattern, line) for line in list(self.lines))), None)
            assert match or not ended, "it ended:\n" + "\n".join(self.lines)
            return match

        return eventually(found, within=within, what=pattern)

    def ready(self) -> str:
        return self.wait_for(r"^ready: (http://127\.0\.0\.1:\d+)$")[1]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process | None:
        """The one that has this word in its command, while it lives."""
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if word in " ".join(child.cmdline()):
                    return child
        return None

    def end(self, number: int = signal.SIGTERM, *, within: float = PATIENCE) -> int:
        self.process.send_signal(number)
        code = self.process.wait(within)
        self._reader.join(10)
        return code

    def manage(self, *words: str) -> str:
        """Another command, which finds the same database by the same variable."""
        environment = clean_environment(REHYDRATE_DATA=str(self.folder), **self.environment)
        done = subprocess.run(
            [sys.executable, "manage.py", *words],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def clean_environment(**more: str) -> dict[str, str]:
    """A new user's: nothing that the tests set for themselves."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("REHYDRATE_") and name != "DATABASE_URL"
    }
    return {**kept, **more}


@pytest.fixture
def start(open_folder: Path) -> Iterator[Callable[..., Up]]:
    """Starts `up` without the demo in this test's folder (or another one); all of them are ended with the test."""
    started: list[Up] = []

    def begin(*words: str, folder: Path | None = None, **environment: str) -> Up:
        words = words or ("--port", str(free_port()), "--no-demo")
        up = Up(folder or open_folder / "data", *words, **environment)
        started.append(up)
        return up

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.end()
        up._reader.join(10)


def refused(up: Up) -> str:
    """The one sentence of an `up` that would not start."""
    code = up.process.wait(PATIENCE)
    up._reader.join(10)
    assert code != 0
    errors = [line for line in up.lines if "Error: " in line or line.startswith("error: ")]
    assert len(errors) == 1, up.lines
    assert "Traceback" not in "\n".join(up.lines)
    return errors[0]


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=30)


def csrf_token(page: httpx.Response) -> str:
    match = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
    assert match, page.text
    return match[1]


def use_link(link: str) -> bool:
    """Opens a sign-in link as a person does, in a fresh browser; True when that person is in afterwards."""
    origin = "/".join(link.split("/")[:3])
    with httpx.Client(base_url=origin, follow_redirects=True, timeout=30) as browser:
        page = browser.get(link)
        if "csrfmiddlewaretoken" in page.text:
            browser.post(link, data={"csrfmiddlewaretoken": csrf_token(page)}, headers={"Referer": link})
        return str(browser.get("/").url) == f"{origin}/"


def test_it_serves_prints_a_link_that_works_once_and_stops_cleanly(start: Callable[..., Up]) -> None:
    up = start()
    url = up.ready()
    link = up.wait_for(rf"({url}/sign-in/\S+)")[1]
    assert get(f"{url}/healthz").json()["status"] == "ok"
    eventually(lambda: get(f"{url}/readyz").status_code == 200, within=60, what="readyz")
    assert "rehydrate_info" in get(f"{url}/metrics").text

    assert use_link(link)
    assert not use_link(link)

    children = up.children()
    assert {"postgres", "web", "work", "ticks"} <= {line.split("|")[0].strip() for line in up.lines if "|" in line} | {
        "web", "work", "ticks"
    }  # fmt: skip
    assert len(children) > 4
    assert up.end() == 0
    assert [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
    assert stat_mode(up.folder / "secrets.json") == 0o600


def stat_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_started_again_everything_is_where_it_was(start: Callable[..., Up], open_folder: Path) -> None:
    first = start()
    first.ready()
    flows = open_folder / "flows.toml"
    flows.write_text('[group.legal]\nmembers = ["alice"]\n\n[flow.contract-approval]\ntitle = "Contracts"\n')
    assert "flow contract-approval: made" in first.manage("apply", str(flows))
    key = first.manage("issue_key", "agent", "--name", "bot")
    link = first.manage("invite", "alice")
    assert first.end(signal.SIGINT) == 0

    # Nothing runs now: a command starts the database for itself, and stops it again.
    assert first.manage("apply", str(flows)) == "nothing changed"
    assert not (first.folder / "postgres" / "postmaster.pid").exists()

    second = start("--no-demo", "--port", link.split(":")[2].split("/")[0])
    url = second.ready()
    answer = httpx.get(f"{url}/api/v1/runs", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    assert use_link(link)


def test_what_dies_is_started_again_and_a_killed_supervisor_leaves_nobody_behind(start: Callable[..., Up]) -> None:
    up = start()
    url = up.ready()

    web = up.child("uvicorn")
    assert web is not None
    for process in [web, *web.children(recursive=True)]:
        process.kill()
    up.wait_for(r"web ended \(by SIGKILL\)")
    eventually(lambda: answers(url), within=60, what="the web server")

    postgres = next(child for child in up.children() if "postgres" in child.name())
    postgres.kill()
    up.wait_for(r"postgres ended \(by SIGKILL\)")
    eventually(lambda: answers(f"{url}/readyz"), within=60, what="the database")

    left = up.children()
    up.process.kill()
    up.process.wait(10)
    psutil.wait_procs(left, timeout=60)
    assert [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []

    again = start("--port", url.rpartition(":")[2], "--no-demo")
    assert again.ready() == url


def answers(url: str) -> bool:
    try:
        return httpx.get(url if "readyz" in url else f"{url}/healthz", timeout=3).status_code == 200
    except httpx.HTTPError:
        return False


def test_the_demo_has_work_waiting_within_seconds_and_its_agents_come_back(start: Callable[..., Up]) -> None:
    up = start("--port", "0")
    url = up.ready()

    def every_flow_waits() -> bool:
        found = dict(re.findall(r'^rehydrate_open_waits\{kind="(\w+)"\} (\d+)', get(f"{url}/metrics").text, re.M))
        return int(found.get("approval", 0)) >= 2 and int(found.get("callback", 0)) >= 1

    eventually(every_flow_waits, within=60, what="work that waits")
    assert stat_mode(up.folder / "demo.json") == 0o600

    agent = up.child("after-sales")
    assert agent is not None
    agent.kill()
    up.wait_for(r"after-sales ended \(by SIGKILL\)")
    eventually(lambda: up.child("after-sales"), within=60, what="the agent")
    assert up.manage("verify_ledger").startswith("verified: ")
    assert up.end() == 0


def test_two_on_one_folder_and_two_on_one_port_are_told_so(start: Callable[..., Up], open_folder: Path) -> None:
    first = start()
    url = first.ready()
    port = url.rpartition(":")[2]

    second = refused(start("--port", "0", "--no-demo"))
    assert f"Another `up` (process {first.process.pid})" in second

    third = refused(start("--port", port, "--no-demo", folder=open_folder / "other"))
    assert f"Port {port} on 127.0.0.1 is taken" in third
    assert answers(url)


def test_a_folder_of_a_newer_version_is_left_alone(start: Callable[..., Up], open_folder: Path) -> None:
    folder = open_folder / "data"
    folder.mkdir()
    (folder / "VERSION").write_text("999\n")

    assert "newer version of rehydrate" in refused(start())
    assert sorted(path.name for path in folder.iterdir()) == ["VERSION"]


def test_a_cluster_of_another_postgresql_is_left_alone(start: Callable[..., Up], open_folder: Path) -> None:
    cluster = open_folder / "data" / "postgres"
    cluster.mkdir(parents=True)
    (cluster / "PG_VERSION").write_text("99\n")

    assert "holds a PostgreSQL 99 cluster" in refused(start())


def test_an_unreachable_database_is_named_without_its_password(start: Callable[..., Up]) -> None:
    nobody = free_port()
    up = start("--port", "0", "--no-demo", DATABASE_URL=f"postgresql://bob:hunter2@127.0.0.1:{nobody}/ledger")

    sentence = refused(up)
    assert f'database "ledger" on 127.0.0.1:{nobody} cannot be reached' in sentence
    assert "hunter2" not in "\n".join(up.lines)


def test_a_database_of_another_kind_is_refused(start: Callable[..., Up]) -> None:
    assert "must begin with postgresql://" in refused(start("--no-demo", DATABASE_URL="mysql://localhost/x"))


def test_an_unknown_host_is_named(start: Callable[..., Up]) -> None:
    assert "192.0.2.1" in refused(start("--host", "192.0.2.1", "--port", "0", "--no-demo"))


def test_a_stop_while_it_is_still_starting_is_clean_too(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_for(r"^postgres ")
    assert up.end() == 0
    assert not (up.folder / "postgres" / "postmaster.pid").exists()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_a_taken_port_is_seen_before_anything_is_made(
    start: Callable[..., Up], taken_port: int, open_folder: Path
) -> None:
    assert "is taken" in refused(start("--port", str(taken_port), "--no-demo"))
    assert not (open_folder / "data" / "postgres").exists()
