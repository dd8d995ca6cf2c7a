"""Long polls against real web servers: they hold no connection, keep nothing else waiting, and end when they should."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from django.db import connection

from rehydrate import sql
from rehydrate.notices import Kind
from tests.conftest import ROOT, Server, end, eventually, start_web
from tests.contract.driver import CAST, Agent, HttpTransport, World, approval, order, paused

FLOW = "contract-approval"


@pytest.fixture
def world(live_server: Server, tmp_path: Path) -> Iterator[World]:
    transport = HttpTransport(live_server.url)
    made = World(transport, tmp_path)
    made.apply(CAST)
    yield made
    transport.client.close()


@pytest.fixture
def bot(world: World) -> Agent:
    return world.agent("bot", owner="carol")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as pool:
        yield pool


@pytest.fixture
def small(live_server: Server, threads: ThreadPoolExecutor, tmp_path: Path) -> Iterator[Server]:
    """A server of eight threads, where four agents and two pages may wait."""
    server = start_web(tmp_path / "small.log", threads=8, REHYDRATE_WAITING_AGENTS="4", REHYDRATE_WAITING_PAGES="2")
    yield server
    end(server.process)


def claim(server: Server, bot: Agent, *, wait: int = 30, flow: str = FLOW) -> httpx.Response:
    body = {"flows": [flow], "holder": "w", "agent": bot.card(), "wait": wait}
    headers = {"Authorization": f"Bearer {bot.key}"}
    return httpx.post(f"{server.url}/api/v1/claims", json=body, headers=headers, timeout=60)


def claims(threads: ThreadPoolExecutor, number: int, *args: Any, **how: Any) -> list[Future[httpx.Response]]:
    return [threads.submit(claim, *args, **how) for _ in range(number)]


def listening(server: Server) -> int:
    """How many connections the server has that listen for news. This process may have its own."""
    return sessions(f"rehydrate wakeups {server.process.pid}")


def sessions(application: str, state: str = "") -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND application_name = %s AND (%s = '' OR state <> %s)",
            [application, state, state],
        )
        return int(cursor.fetchone()[0])


def connected(server: Server) -> int:
    """How many clients the server holds a connection to."""
    found = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == server.port for one in found)


def test_those_who_wait_hold_no_connection(bot: Agent, live_server: Server, threads: ThreadPoolExecutor) -> None:
    """Twenty wait; the server has its one listening connection, and of its pool of eight none is in use."""
    run = bot.open(order(), paused(approval(effect="k1")))
    waiting = claims(threads, 20, live_server, bot)
    eventually(lambda: connected(live_server) >= 20, within=30, what="twenty requests")
    eventually(lambda: listening(live_server) == 1, within=60, what="the listening connection")
    eventually(lambda: sessions("rehydrate", "idle") == 0, what="that no connection is in use")
    assert sessions("rehydrate") <= 8 + 1  # this test's own session is one of the application, too
    assert sessions(f"rehydrate group commit {live_server.process.pid}") <= sql.OWN_AT_MOST < 20
    assert not any(one.done() for one in waiting)
    bot.world.person("alice").approve(run.wait("legal-approval"))
    eventually(lambda: any(one.done() for one in waiting), within=30, what="the envelope")
    for _ in range(19):
        bot.open(holder=None)
    assert {one.result(40).status_code for one in waiting} == {200}
    assert len({one.result().json()["run"]["id"] for one in waiting}) == 20


def test_an_empty_answer_comes_in_time(bot: Agent, live_server: Server) -> None:
    began = time.monotonic()
    assert claim(live_server, bot, wait=2).status_code == 204
    assert 1.9 < time.monotonic() - began < 30


def test_a_decision_on_one_server_reaches_the_agent_that_waits_on_another(
    bot: Agent, live_server: Server, small: Server, threads: ThreadPoolExecutor
) -> None:
    run = bot.open(order(), paused(approval(effect="k1")))
    (waiting,) = claims(threads, 1, small, bot)
    eventually(lambda: listening(small) == 1, within=60, what="the listening connection")
    bot.world.person("alice").approve(run.wait("legal-approval"))
    assert waiting.result(40).json()["run"]["id"] == run.id


def test_more_who_wait_than_threads_keep_nothing_else_waiting(
    bot: Agent, small: Server, threads: ThreadPoolExecutor
) -> None:
    """Four of twenty have a place; the others are answered at once, and come again. A decision is taken as ever."""
    run = bot.open(order(), paused(approval(effect="k1")))
    waiting = claims(threads, 20, small, bot)
    eventually(lambda: sum(one.done() for one in waiting) >= 16, within=25, what="the answers of those without a place")
    assert {one.result().status_code for one in waiting if one.done()} == {204}
    wait = run.wait("legal-approval")
    answer = httpx.post(
        f"{small.url}/api/v1/waits/{wait['id']}/decisions",
        json={"choice": "approve", "wait_version": wait["version"]},
        headers={"Authorization": f"Bearer {bot.world.person('alice').key}"},
        timeout=20,
    )
    assert answer.status_code == 201
    assert httpx.get(f"{small.url}/healthz", timeout=20).status_code == 200
    eventually(lambda: any(one.done() and one.result().status_code == 200 for one in waiting), what="the envelope")


def test_in_a_full_room_the_newest_takes_the_place_of_who_waits_longest(
    bot: Agent, small: Server, threads: ThreadPoolExecutor
) -> None:
    """Whoever is gone without a word must not keep out those who are there."""
    old = claims(threads, 4, small, bot)
    eventually(lambda: not claims(threads, 1, small, bot, wait=1)[0].result(40).elapsed.total_seconds() < 0.9,
               within=60, what="a place")  # fmt: skip
    assert sum(one.done() and one.result().status_code == 204 for one in old) >= 1


def test_a_server_that_is_told_to_end_sends_those_who_wait_home(
    bot: Agent, small: Server, threads: ThreadPoolExecutor
) -> None:
    waiting = claims(threads, 4, small, bot)
    eventually(lambda: connected(small) >= 4, within=30, what="four requests")
    eventually(lambda: listening(small) == 1, within=60, what="the listening connection")
    small.process.terminate()
    assert {one.result(15).status_code for one in waiting} == {204}
    assert small.process.wait(15) == -signal.SIGTERM


FORKED = """
import os, sys, django
django.setup()
from rehydrate import wakeups

def told(name):
    with wakeups.listen(wakeups.TIMER) as ear:
        print(name, "listens", flush=True)
        print(name, "told" if ear.wait(60) else "not told", flush=True)

with wakeups.listen(wakeups.TIMER):
    child = os.fork()
    if child == 0:
        told("child")
        os._exit(0)
    told("parent")
os.waitpid(child, 0)
"""


@pytest.mark.django_db(transaction=True)
def test_a_forked_worker_hears_for_itself(live_server: Server) -> None:
    """As django-q's workers do. The parent's connection stays the parent's."""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKED], cwd=ROOT, env=live_server.environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in range(2)) == ["child listens\n", "parent listens\n"]
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, '3null')", [Kind.TIMER.channel])
        assert sorted(process.stdout.readline() for _ in range(2)) == ["child told\n", "parent told\n"]
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_of_two_workers_one_may_be_killed(bot: Agent, live_server: Server, tmp_path: Path) -> None:
    """The other answers meanwhile, and it is replaced."""
    server = start_web(tmp_path / "two.log", workers=2)
    try:

        def workers() -> list[psutil.Process]:
            found = psutil.Process(server.process.pid).children()
            alive = [one for one in found if one.status() != psutil.STATUS_ZOMBIE]
            return [one for one in alive if "spawn_main" in " ".join(one.cmdline())]

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
            return False

        eventually(lambda: len(workers()) == 2, what="two workers")
        first, _ = workers()
        first.kill()
        eventually(lambda: len(workers()) == 2 and first not in workers(), within=60, what="another worker")
        eventually(answers, what="an answer")
        run = bot.open(holder=None)
        assert claim(server, bot).json()["run"]["id"] == run.id
    finally:
        end(server.process)
