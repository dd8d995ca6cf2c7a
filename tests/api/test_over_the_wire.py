"""What only a real socket shows: bodies without a length, connections that go on, HEAD without a body."""

import contextlib
import dataclasses
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from django.http import UnreadablePostError

from rehydrate import http1, sql, wakeups
from rehydrate.api import endpoint
from rehydrate.models import Signal, Workspace
from rehydrate.models import Wait as WaitRow
from tests.conftest import eventually
from tests.contract import driver as d

pytestmark = pytest.mark.django_db(transaction=True)

NOTE = {"type": "note", "text": "x"}


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
        self.name = self.socket.getsockname()

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
    monkeypatch.setattr(http1, "MORE_WITHIN", 0.2)
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


@pytest.fixture
def connection(wire: Wire, loop_servers_own: tuple[Any, Any]) -> Any:
    """The wire's other end."""
    server, _ = loop_servers_own
    (made,) = eventually(lambda: [one for one in server.server_state.connections if one.client == wire.name])
    return made


def test_what_is_sent_waits_for_no_acknowledgement(connection: Any) -> None:
    options = connection.transport.get_extra_info("socket")
    assert options.proto == 0  # asyncio does nothing about such a socket
    assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize("path", ["/healthz", "/api/v1/me", "/nowhere"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_is_sent_as_one(wire: Wire, connection: Any, method: str, path: str) -> None:
    sent: list[bytes] = []
    send = connection.transport.write

    def noted(data: bytes) -> None:
        sent.append(data)
        send(data)

    connection.transport.write = noted
    answer = wire.says(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 ")
    assert answer.endswith(b"\r\n\r\n") == (method == "HEAD")
    assert [piece for piece in sent if piece] == [answer]


@pytest.mark.parametrize("path", ["/api/v1/claims", "/api/v1/hooks/x"])  # on the loop, and in a thread
def test_who_asks_whether_to_go_on_is_told_so_before_the_answer(world: d.World, wire: Wire, path: str) -> None:
    bot = world.agent("bot")
    wire.socket.sendall(
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {bot.key}\r\nConnection: close\r\n"
        "Content-Type: application/json\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    assert wire.socket.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert wire.says(b"{}").startswith(b"HTTP/1.1 4")


def test_a_head_without_the_body_it_tells_of_is_sent_before_the_end() -> None:
    sent: list[bytes | str] = []
    transport = SimpleNamespace(write=sent.append, close=lambda: sent.append("closed"))
    cycle = SimpleNamespace(transport=transport, response_started=True, scope={"method": "GET"})
    one = http1._InOne(cycle)  # type: ignore[arg-type] # what it looks at
    one.write(b"head")
    assert sent == []
    one.close()
    assert sent == [b"head", "closed"]


CLAIM = b'{"flows": ["contract-approval"], "holder": "x"}'


def claiming(bot: d.Agent, *headers: str) -> bytes:
    lines = [f"Authorization: Bearer {bot.key}", "Content-Type: application/json", f"Content-Length: {len(CLAIM)}"]
    return "\r\n".join(["POST /api/v1/claims HTTP/1.1", "Host: x", *headers, *lines, "", ""]).encode() + CLAIM


def test_a_trailer_is_no_header(world: d.World, wire: Wire) -> None:
    """What a proxy strips or sets in a head it does not look for behind a body."""
    head = b"POST /api/v1/claims HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    trailer = f"Authorization: Bearer {world.agent('bot').key}\r\n\r\n".encode()
    chunk = b"%x\r\n%s\r\n0\r\n" % (len(CLAIM), CLAIM)
    assert wire.says(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + trailer).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("endless", [b"X-T: " + b"y" * 1000 + b"\r\n", b"0" * 1000])
def test_what_comes_behind_a_body_has_an_end(wire: Wire, endless: bytes) -> None:
    """Trailers, or the length of a chunk."""
    head = b"POST /api/v1/claims HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0"
    wire.socket.sendall(head + (b"\r\n" if b":" in endless else b""))
    with pytest.raises(ConnectionError):
        wire.socket.sendall(endless * 200_000)


def test_an_offer_to_change_what_is_spoken_is_ignored(world: d.World, wire: Wire) -> None:
    """So do curl --http2 and others with each request."""
    bot = world.agent("bot")
    wire.socket.sendall(claiming(bot, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"))
    assert wire.socket.recv(65536).startswith(b"HTTP/1.1 204 ")
    assert wire.says(claiming(bot, "Connection: close")).startswith(b"HTTP/1.1 204 ")


def test_one_that_comes_in_pieces_is_refused(
    world: d.World, wire: Wire, loop_servers_own: tuple[Any, list[str]]
) -> None:
    """The parser would take its body for what is spoken after the change."""
    server, _ = loop_servers_own
    asked = claiming(world.agent("bot"), "Connection: Upgrade", "Upgrade: h2c")
    middle = asked.index(b"h2c")
    wire.socket.sendall(asked[:middle])

    def is_read() -> bool:
        return any(one.client == wire.name and one._in_head for one in server.server_state.connections)

    eventually(is_read, what="the first piece")
    assert wire.says(asked[middle:]).startswith(b"HTTP/1.1 400 ")


def test_a_tunnel_is_refused(wire: Wire) -> None:
    assert wire.says(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 400 ")


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What went wrong with requests in this process."""
    seen: list[Exception] = []
    original = endpoint.carry_out

    def carry_out(*args: Any) -> Any:
        try:
            return original(*args)
        except Exception as error:
            seen.append(error)
            raise

    monkeypatch.setattr(endpoint, "carry_out", carry_out)
    return seen


def test_a_body_that_broke_off_answers_nothing(world: d.World, wire: Wire, failed: list[Exception]) -> None:
    """22 of 30 bytes came, then their connection ended: what was meant is not known."""
    wait = world.agent("bot").open().pause(d.callback())
    address = d.hook_path(wait["callback_url"])
    head = f"POST {address} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    wire.socket.sendall(f"{head}Content-Length: 30\r\n\r\napproved=yes&amount=10".encode())
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.hears() == b""
    eventually(lambda: failed, what="its end")
    assert [type(error) for error in failed] == [UnreadablePostError]
    assert Signal.objects.count() == 0
    assert WaitRow.objects.get(pk=wait["id"]).status == "open"


@pytest.mark.parametrize("came", [b"", b"{"])
def test_a_body_that_does_not_come_keeps_no_thread(
    world: d.World, loop_server: str, failed: list[Exception], monkeypatch: pytest.MonkeyPatch, came: bytes
) -> None:
    monkeypatch.setattr(http1, "MORE_WITHIN", 0.2)
    head = b"POST /api/v1/hooks/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9"
    with contextlib.closing(Wire(loop_server)) as slow:
        assert slow.says(head + b"\r\n\r\n" + came) == b""
    eventually(lambda: failed, what="its end")
    assert [type(error) for error in failed] == [UnreadablePostError]


def test_wrong_keys_do_not_use_up_the_databases_connections(world: d.World, loop_server: str) -> None:
    """A hundred at one instant, of which each has to be looked up."""
    key = world.agent("bot").key
    assert key is not None
    wrong = dataclasses.replace(world.agent("bot"), key=key[:-3] + ("aaa" if key[-3:] != "aaa" else "bbb"))
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(contextlib.closing(Wire(loop_server))) for _ in range(100)]
        for each in wires:
            each.socket.sendall(claiming(wrong))
        assert {each.socket.recv(65536)[9:12] for each in wires} == {b"401"}
    assert sql.own_connections._used == 0
    assert len(sql.own_connections._idle) <= sql.OWN_AT_MOST
