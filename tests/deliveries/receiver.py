"""A real HTTP receiver on a port of its own, which answers as it is told and keeps what it got. No test logic here."""

from __future__ import annotations

import datetime as dt
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from standardwebhooks import Webhook


@dataclass(frozen=True)
class Post:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    def verify(self, secret: str, *, now: dt.datetime | None = None) -> Any:
        """The body, when its signature is right: by the library, at the time the sender's clock says."""
        if now is None:
            return Webhook(secret).verify(self.raw, self.headers)
        # The library goes by this machine's clock: where a test moved the sender's, only the signature can be held.
        at = dt.datetime.fromtimestamp(int(self.headers["webhook-timestamp"]), dt.UTC)
        assert abs((at - now).total_seconds()) < 300
        expected = Webhook(secret).sign(self.id, at, self.raw.decode())
        assert expected in self.headers["webhook-signature"].split(" ")
        return self.json


Answer = Callable[["Handler"], object]


@dataclass
class Receiver:
    """`answer` says how it answers; by default 204. `posts` is what it got, in order."""

    answer: Answer | None = None
    posts: list[Post] = field(default_factory=list)
    server: Any = None

    def __enter__(self) -> Receiver:
        owner = self

        class Bound(Handler):
            receiver = owner

        self.server = Server(("127.0.0.1", 0), Bound)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hooks"

    def types(self) -> list[str]:
        return [post.json["type"] for post in self.posts]


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The sender hung up, as some tests want it to."""


class Handler(http.server.BaseHTTPRequestHandler):
    receiver: Receiver

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.receiver.posts.append(Post(self.path, {k.lower(): v for k, v in self.headers.items()}, raw))
        if self.receiver.answer is None:
            self.say(204)
        else:
            self.receiver.answer(self)

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def says(status: int, body: bytes = b"", **headers: str) -> Answer:
    return lambda handler: handler.say(status, body, **headers)


def free_url() -> str:
    """Nobody answers there."""
    with Receiver() as gone:
        return gone.url
