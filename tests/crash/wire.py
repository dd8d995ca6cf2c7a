"""The network between an agent and the server, which can be cut, fall silent, or lose an answer. It knows no HTTP but
the first line of a request."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

#: Closing with this sends a reset instead of a farewell.
RESET = struct.pack("ii", 1, 0)


@dataclass
class Loss:
    """One answer, or one request, that is to be lost: that of the next request whose first line matches."""

    line: re.Pattern[bytes]
    answer: bool
    happened: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    doomed: Loss | None = None

    def reset(self) -> None:
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Wire:
    """Listens on a port of its own and passes everything on to the server's. Threads do the work."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._losses: list[Loss] = []
        self._whole = threading.Event()
        self._whole.set()
        self._refusing = False
        self._closed = False
        self.swallowed = threading.Event()
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    # -- what can happen to it

    def cut(self) -> None:
        """Every connection is reset, and new ones are, until `mend`."""
        self._refusing = True
        self._reset_all()

    def silence(self) -> None:
        """Nothing gets through either way, and nobody is told, until `mend`; `swallowed` is set once somebody tried."""
        self.swallowed.clear()
        self._whole.clear()

    def mend(self) -> None:
        """Works again. What was under way is lost."""
        self._refusing = False
        if not self._whole.is_set():
            self._reset_all()
            self._whole.set()

    def lose_answer(self, line: str) -> Loss:
        """The server carries the next such request out, and its answer never arrives. `line` as in "POST /api/.*"."""
        return self._lose(line, answer=True)

    def lose_request(self, line: str) -> Loss:
        """The next such request never arrives."""
        return self._lose(line, answer=False)

    @contextmanager
    def open(self) -> Iterator[Wire]:
        try:
            yield self
        finally:
            self._closed = True
            self._whole.set()
            self._listener.close()
            self._reset_all()

    # -- inside

    def _lose(self, line: str, *, answer: bool) -> Loss:
        loss = Loss(re.compile(line.encode()), answer)
        with self._lock:
            self._losses.append(loss)
        return loss

    def _reset_all(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.reset()
            self._open.clear()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                connection = _Connection(client, socket.create_connection(self._to, timeout=5))
            except OSError:
                with suppress(OSError):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                client.close()
                continue
            connection.server.settimeout(None)
            with self._lock:
                self._open.add(connection)
            for pump in (self._requests, self._answers):
                threading.Thread(target=pump, args=(connection,), daemon=True).start()

    def _requests(self, connection: _Connection) -> None:
        for chunk in self._chunks(connection, connection.client):
            with self._lock:
                first = chunk.split(b"\r\n", 1)[0]
                loss = next((loss for loss in self._losses if loss.line.match(first)), None)
                if loss is not None:
                    self._losses.remove(loss)
            if loss is not None and not loss.answer:
                loss.happened.set()
                self._drop(connection)
                return
            connection.doomed = connection.doomed or loss
            with suppress(OSError):
                connection.server.sendall(chunk)

    def _answers(self, connection: _Connection) -> None:
        for chunk in self._chunks(connection, connection.server):
            if connection.doomed is not None:
                connection.doomed.happened.set()
                self._drop(connection)
                return
            with suppress(OSError):
                connection.client.sendall(chunk)

    def _chunks(self, connection: _Connection, source: socket.socket) -> Iterator[bytes]:
        while True:
            try:
                chunk = source.recv(65536)
            except OSError:
                chunk = b""
            if not self._whole.is_set():
                self.swallowed.set()
                self._whole.wait()
                chunk = b""
            if not chunk:
                self._drop(connection)
                return
            yield chunk

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.reset()
