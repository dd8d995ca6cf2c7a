"""What only a real socket shows: bodies without a length, connections that go on, HEAD without a body."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract import driver as d

NOTE = {"type": "note", "text": "x"}


@pytest.fixture
def world(live_server: Any, tmp_path: Any) -> Iterator[d.World]:
    transport = d.HttpTransport(live_server.url)
    made = d.World(transport, tmp_path)
    made.apply(d.CAST)
    yield made
    transport.client.close()


def in_pieces(raw: bytes, size: int = 4096) -> Iterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def test_a_body_may_come_in_pieces_without_a_length(world: d.World, live_server: Any) -> None:
    bot = world.agent("bot")
    run = bot.open()
    headers = {"Authorization": f"Bearer {bot.key}", "Content-Type": "application/json"}
    url = f"{live_server.url}/api/v1/runs/{run.id}/events"
    body = json.dumps({"epoch": run.epoch, "events": [NOTE] * 500}).encode()
    taken = httpx.post(url, content=in_pieces(body), headers=headers)
    assert (taken.status_code, len(taken.json()["events"])) == (200, 500)
    large = json.dumps({"epoch": run.epoch, "events": [{**NOTE, "text": "x" * 3000}] * 700}).encode()
    refused = httpx.post(url, content=in_pieces(large), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")


def test_a_refused_body_leaves_the_connection_good(world: d.World, live_server: Any) -> None:
    bot = world.agent("bot")
    with httpx.Client(base_url=f"{live_server.url}/api/v1") as client:
        for key, kind, status in (("none", "application/json", 401), (bot.key, "text/plain", 415)):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
            refused = client.post("/runs", content=b"x" * 100_000, headers=headers)
            assert refused.status_code == status
            assert client.get("/runs", headers={"Authorization": f"Bearer {bot.key}"}).status_code == 200


def test_a_head_request_has_the_head_alone(world: d.World, live_server: Any) -> None:
    bot = world.agent("bot")
    headers = {"Authorization": f"Bearer {bot.key}"}
    head = httpx.head(f"{live_server.url}/api/v1/runs", headers=headers)
    assert (head.status_code, head.headers["content-type"], head.content) == (200, "application/json", b"")


def test_the_same_request_many_times_at_once_counts_once(world: d.World) -> None:
    bot = world.agent("bot")
    run = bot.open()
    gate = threading.Barrier(6)

    def send(_: int) -> d.Answer:
        gate.wait(timeout=30)
        return run.append(NOTE, idem="once")

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(send, range(6)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.raw for answer in answers}) == 1
    assert sum(answer.headers.get("idempotency-replayed") == "true" for answer in answers) == 5
    assert len(run.events("note")) == 1


def test_a_claim_sent_again_gets_the_same_run(world: d.World) -> None:
    bot = world.agent("bot")
    for _ in range(2):
        bot.open(holder=None)
    body = {"flows": ["contract-approval"], "holder": "bot/w2", "agent": bot.card(), "wait": 2}
    first, again = (bot.post("/claims", body, idem="once").ok() for _ in range(2))
    assert first == again
    other = bot.post("/claims", body, idem="another").ok()
    assert other["run"]["id"] != first["run"]["id"]
    assert bot.post("/claims", {**body, "wait": 1}, idem="a third").status == 204


def test_more_long_polls_than_connections_hold_up_nobody(world: d.World, live_server: Any) -> None:
    """The server of the tests pools eight connections: twelve agents that wait for work hold none of them."""
    bot = world.agent("bot")
    headers = {"Authorization": f"Bearer {bot.key}"}
    api = f"{live_server.url}/api/v1"

    def poll(n: int) -> httpx.Response:
        body = {"flows": ["contract-approval"], "holder": f"w{n}", "wait": 20}
        return httpx.post(f"{api}/claims", json=body, headers=headers, timeout=40)

    with ThreadPoolExecutor(12) as threads:
        polls = [threads.submit(poll, n) for n in range(12)]
        for _ in range(20):
            assert httpx.get(f"{api}/runs", headers=headers, timeout=15).status_code == 200
        assert not any(answer.done() for answer in polls)
        opened = {bot.open(holder=None).id for _ in range(12)}
        answers = [answer.result() for answer in polls]
    assert [answer.status_code for answer in answers] == [200] * 12
    assert {answer.json()["run"]["id"] for answer in answers} == opened
