"""What the web server speaks, with bounds that uvicorn leaves to whoever stands in front of it."""

import asyncio
import re
import socket
import sys
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: The longest head of a request, with its address and all headers (bytes).
LONGEST_HEAD: Final = 65_536
#: Seconds in which a head has to be there once its connection has begun, or its first byte has come; and after it, of
#: its body, each further piece.
MORE_WITHIN: Final = 30.0

#: Seconds for which a connection is kept without a request: longer than proxies and agents keep theirs.
KEPT_ALIVE: Final = 75
#: Seconds that requests have to end once the server is told to.
GRACE: Final = 10


def command(host: str, port: int, *, workers: int = 1, connections: int = 1000) -> list[str]:
    """What runs the web server in the foreground. SIGTERM ends it, SIGKILL of its group at once."""
    options = {
        "host": host,
        "port": port,
        "workers": workers,
        "limit-concurrency": connections,
        "timeout-keep-alive": KEPT_ALIVE,
        "timeout-graceful-shutdown": GRACE,
        # wakeups.stop_on_signals takes the place of uvloop's own handling of signals; and uvloop is not faster here.
        "loop": "asyncio",
        "http": "rehydrate.http1:Protocol",
        "ws": "none",
        "log-level": "error",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    # Whose request it is says the connection; what a proxy says of it, SECURE_PROXY_SSL_HEADER.
    return [sys.executable, "-m", "uvicorn", *words, "--no-access-log", "--no-proxy-headers", "--no-server-header",
            "rehydrate.asgi:application"]  # fmt: skip


#: What a client offers to change to, which is nothing that is spoken here: it may be ignored (RFC 9110, 7.8).
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """A connection. One that sends a head or trailers without end, or nothing for long, is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between = True  # a head is what comes next
        self._in_head = False
        self._head = self._since_body = 0  # bytes
        self._expected_since: float | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so only where the server opened its port itself, and not as one of several workers.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        all_head = self._between or self._in_head
        if self._between:
            # The parser takes a body that comes with an offer to change for what is spoken after the change.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"", head) + end + rest if end else data
        self._since_body += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_head and all_head:
            self._head += len(data)
            if self._head > LONGEST_HEAD:
                self._refuse("The head of this request is too long.")
        elif not self._in_head and not self._between and self._since_body > LONGEST_HEAD:
            self.transport.close()  # trailers, or the frame of a chunk, without end

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._between, self._in_head, self._head = False, True, 0
        self._expect_more()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what comes after a body (trailers) is none
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect_nothing()
        if self.parser.should_upgrade():  # it came in pieces, or asks for a tunnel
            self._refuse("Nothing is spoken here but HTTP/1.1: send the request without Upgrade.")
            return
        super().on_headers_complete()
        self.cycle.transport = _InOne(self.cycle)  # type: ignore[assignment] # all that a cycle uses of it
        self._expect_more()

    def on_body(self, body: bytes) -> None:
        self._since_body = 0
        self._expect_nothing()
        self._expect_more()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._between, self._since_body = True, 0
        self._expect_nothing()
        if not self.transport.is_closing():
            super().on_message_complete()

    def _refuse(self, why: str) -> None:
        """And hang up. Nothing is said in the middle of another answer."""
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response(why)
        else:
            self.transport.close()

    def _expect_more(self) -> None:
        if self._expected_since is None:
            self._expected_since = self.loop.time()
            if self._patience is None:
                self._patience = self.loop.call_later(MORE_WITHIN, self._look)

    def _expect_nothing(self) -> None:
        self._expected_since = None

    def _look(self) -> None:
        """A timer for each thing that is expected would cost more than reading it: this one looks what it is by now."""
        self._patience = None
        if self._expected_since is None:
            return
        if self.flow.read_paused:
            self._expected_since = self.loop.time()  # it is we who do not read
        left = self._expected_since + MORE_WITHIN - self.loop.time()
        if left > 0:
            self._patience = self.loop.call_later(left, self._look)
        else:
            self.transport.close()


class _InOne:
    """The transport of an answer, whose head is sent together with the beginning of its body, and not before it: two
    packets wake whoever waits for them twice.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None
        self._joined = cycle.scope["method"] == "HEAD"  # nothing comes after it

    def write(self, data: bytes) -> None:
        if self._joined or not self._cycle.response_started:  # a 100 (Continue) is no answer yet
            self._transport.write(data)
        elif self._head is None:
            self._head = data
        else:
            self._joined = True
            self._transport.write(self._head + data)

    def close(self) -> None:
        if self._head is not None and not self._joined:
            self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
