"""What only a real socket shows: bodies without a length, connections that go on, HEAD without a body."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from rehydrate import http1, wakeups
from rehydrate.models import Workspace
from tests.conftest import eventually
from tests.contract import driver as d

pytestmark = pytest.mark.django_db(transaction=True)

NOTE = {"type": "note", "text": "x"}


@pytest.fixture
def world(loop_server: str, tmp_path: Any) -> Iterator[d.World]:
    transport = d.HttpTransport(loop_server)
    made = d.World(transport, tmp_path)
    made.apply(d.CAST)
    yield made
    transport.client.close()


def in_pieces(raw: bytes, size: int = 4096) -> Iterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def test_a_body_may_come_in_pieces_without_a_length(world: d.World, loop_server: str) -> None:
    bot = world.agent("bot")
    run = bot.open()
    headers = {"Authorization": f"Bearer {bot.key}", "Content-Type": "application/json"}
    url = f"{loop_server}/api/v1/runs/{run.id}/events"
    body = json.dumps({"epoch": run.epoch, "events": [NOTE] * 500}).encode()
    taken = httpx.post(url, content=in_pieces(body), headers=headers)
    assert (taken.status_code, len(taken.json()["events"])) == (200, 500)
    large = json.dumps({"epoch": run.epoch, "events": [{**NOTE, "text": "x" * 3000}] * 700}).encode()
    refused = httpx.post(url, content=in_pieces(large), headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (413, "too_large")


def test_a_refused_body_leaves_the_connection_good(world: d.World, loop_server: str) -> None:
    bot = world.agent("bot")
    with httpx.Client(base_url=f"{loop_server}/api/v1") as client:
        for key, kind, status in (("none", "application/json", 401), (bot.key, "text/plain", 415)):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
            refused = client.post("/runs", content=b"x" * 100_000, headers=headers)
            assert refused.status_code == status
            assert client.get("/runs", headers={"Authorization": f"Bearer {bot.key}"}).status_code == 200


def test_a_head_request_has_the_head_alone(world: d.World, loop_server: str) -> None:
    bot = world.agent("bot")
    headers = {"Authorization": f"Bearer {bot.key}"}
    head = httpx.head(f"{loop_server}/api/v1/runs", headers=headers)
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


def test_more_long_polls_than_connections_hold_up_nobody(world: d.World, loop_server: str) -> None:
    """The server of the tests pools eight connections: twelve agents that wait for work hold none of them."""
    bot = world.agent("bot")
    headers = {"Authorization": f"Bearer {bot.key}"}
    api = f"{loop_server}/api/v1"

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


def test_who_hung_up_gets_no_run(world: d.World, loop_server: str) -> None:
    """An agent that was killed in its long poll takes nothing that another could go on with."""
    bot = world.agent("bot")
    topic = wakeups.ready(str(Workspace.objects.get(slug="default").pk), "contract-approval")
    body = json.dumps({"flows": ["contract-approval"], "holder": "killed", "wait": 30}).encode()
    head = f"Authorization: Bearer {bot.key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with contextlib.closing(Wire(loop_server)) as killed:
        killed.socket.sendall(f"POST /api/v1/claims HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        eventually(lambda: wakeups.listener().waits([topic]), what="a long poll that waits")
    eventually(lambda: not wakeups.listener().waits([topic]), what="its end")
    run = bot.open(holder=None)
    assert bot.claim(wait=0).ok()["run"]["id"] == run.id


# -- what no framework sees


class Wire:
    """A connection on which one says what one wants."""

    def __init__(self, url: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=30)

    def close(self) -> None:
        self.socket.close()

    def says(self, raw: bytes) -> bytes:
        """What comes back until the connection is closed."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(raw)
        return self.hears()

    def hears(self) -> bytes:
        heard = b""
        with contextlib.suppress(ConnectionError):
            while chunk := self.socket.recv(65536):
                heard += chunk
        return heard


@pytest.fixture
def wire(loop_server: str) -> Iterator[Wire]:
    with contextlib.closing(Wire(loop_server)) as made:
        yield made


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * http1.LONGEST_HEAD,
        b"GET /" + b"x" * http1.LONGEST_HEAD,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * (http1.LONGEST_HEAD // 6),
        b"GET / SPDY/7\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nNul: \x00\r\n\r\n",
        b"\xff" * 100,
    ],
)
def test_what_is_no_request_is_told_so_and_cut_off(wire: Wire, raw: bytes) -> None:
    answer = wire.says(raw)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer


@pytest.mark.parametrize("first", [b"", b"GET / HT", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET"])
def test_who_says_nothing_for_long_is_cut_off(loop_server: str, monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    monkeypatch.setattr(http1, "HEAD_WITHIN", 0.2)
    with contextlib.closing(Wire(loop_server)) as quiet:
        answer = quiet.says(first)  # comes back only when the connection is closed
    assert answer.count(b"HTTP/1.1 200 OK") == (1 if b"\r\n\r\n" in first else 0)


@pytest.mark.parametrize(
    "address", [b"/api/v1/runs?x=\xff", b"/api/v1/claims?x=\xc3\xbc", b"/\xff", b"/%ff", b"/api/v1/runs/%ff"]
)
@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_an_address_in_no_letters_is_refused(wire: Wire, method: bytes, address: bytes) -> None:
    head = b"Host: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer x\r\nContent-Length: 2\r\n"
    answer = wire.says(b"%s %s HTTP/1.1\r\n%s\r\n{}" % (method, address, head))
    assert int(answer.split()[1]) in range(400, 500), answer
