"""One attempt: a message signed as Standard Webhooks says, sent to a checked address, and what came back.

Nothing here touches the database: while a receiver takes its time, nothing is locked. Every byte in and out has a
limit, and so has the whole attempt. A redirect is not followed.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import httpcore
import httpx
from standardwebhooks import Webhook

from rehydrate import __version__, targets
from rehydrate.logs import without_secrets

CONNECT_SECONDS: Final = 5.0
READ_SECONDS: Final = 10.0
#: The whole attempt, from the connection's start to the end of what is read of the answer.
TOTAL_SECONDS: Final = 15.0
#: Addresses of one name that are tried.
ADDRESSES: Final = 3
#: Of an answer so much is read, and so much is kept.
READ_BYTES: Final = 4096
KEPT_CHARACTERS: Final = 500

_SECRET_BYTES: Final = 32
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def new_secret() -> str:
    """A signing secret as Standard Webhooks writes it: `whsec_` and base64 of 32 random bytes."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


@dataclass(frozen=True, kw_only=True)
class Message:
    """What is sent where. `secrets`: the newest first, all of them sign; `sent_at` is the attempt's own time."""

    id: str
    url: str
    body: bytes
    secrets: tuple[str, ...]
    sent_at: dt.datetime

    def headers(self) -> dict[bytes | str, bytes | str]:
        """Those of Standard Webhooks, and what the answer should look like."""
        at = self.sent_at.astimezone(dt.UTC)
        signatures = [Webhook(secret).sign(self.id, at, self.body.decode()) for secret in self.secrets]
        return {
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            "user-agent": f"rehydrate/{__version__}",
            "accept": "*/*",
            "accept-encoding": "identity",
            "connection": "close",
            "webhook-id": self.id,
            "webhook-timestamp": str(int(at.timestamp())),
            "webhook-signature": " ".join(signatures),
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of an attempt: the receiver's `status`, or an `error` code and a sentence; the answer's start."""

    seconds: float
    status: int | None = None
    error: str | None = None
    detail: str | None = None
    answer: str | None = None
    retry_after: str | None = None

    @property
    def taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


def send(
    message: Message,
    *,
    allow_private: bool,
    resolve: targets.Resolve = targets.look_up,
    total: float = TOTAL_SECONDS,
    tls: ssl.SSLContext | None = None,
) -> Outcome:
    """Makes the attempt. Whatever goes wrong is an Outcome, never an exception."""
    start = time.monotonic()

    def failed(error: str, detail: str) -> Outcome:
        return Outcome(seconds=time.monotonic() - start, error=error, detail=clean(detail, message.secrets))

    try:
        status, headers, raw = _exchange(message, allow_private, resolve, start + total, tls or _tls())
    except targets.TargetError as error:
        return failed(error.code, str(error))
    except (httpcore.TimeoutException, TimeoutError):
        return failed("timeout", "it did not answer in time")
    except httpcore.ConnectError as error:
        return failed("tls_failed" if _about_tls(error) else "connect_failed", str(error))
    except (httpcore.ProtocolError, httpcore.NetworkError, httpcore.UnsupportedProtocol, OSError) as error:
        return failed("broken_answer", str(error) or type(error).__name__)
    except Exception as error:  # one message that cannot be sent holds up no other
        return failed("internal", f"{type(error).__name__}: {error}")
    return Outcome(
        seconds=time.monotonic() - start,
        status=status,
        error=None if 200 <= status < 300 else f"http_{status}",
        answer=_shown(headers, raw, message.secrets),
        retry_after=headers.get("retry-after"),
    )


def _exchange(
    message: Message, allow_private: bool, resolve: targets.Resolve, deadline: float, tls: ssl.SSLContext
) -> tuple[int, dict[str, str], bytes]:
    parsed = targets.parse(message.url, allow_private=allow_private)
    url = httpcore.URL(scheme=parsed.raw_scheme, host=parsed.raw_host, port=parsed.port, target=parsed.raw_path)
    limits = {"connect": CONNECT_SECONDS, "read": READ_SECONDS, "write": READ_SECONDS, "pool": CONNECT_SECONDS}
    network = _Checked(allow_private=allow_private, resolve=resolve, deadline=deadline)
    headers = {"host": parsed.netloc.decode("ascii"), **message.headers()}
    raw = b""
    with (
        httpcore.ConnectionPool(ssl_context=tls, network_backend=network, max_connections=1) as pool,
        pool.stream("POST", url, headers=headers, content=message.body, extensions={"timeout": limits}) as response,
    ):
        try:
            for chunk in response.iter_stream():
                raw += chunk
                if len(raw) >= READ_BYTES:
                    break
        except (httpcore.TimeoutException, httpcore.ProtocolError, httpcore.NetworkError):
            pass  # it has said whether it took the message; the rest is for people to read
    answered = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    return response.status, answered, raw[:READ_BYTES]


def _about_tls(error: BaseException) -> bool:
    return isinstance(error.__cause__ or error.__context__, ssl.SSLError)


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def clean(text: str, known: Iterable[str] = ()) -> str:
    """Text of others as it may be kept and shown: short, without control characters and without secrets."""
    for secret in known:
        text = text.replace(secret, "whsec_***").replace(secret.removeprefix("whsec_"), "***")
    return without_secrets(_CONTROL.sub("\ufffd", text))[:KEPT_CHARACTERS]


def _shown(headers: dict[str, str], raw: bytes, known: Iterable[str]) -> str | None:
    packed = headers.get("content-encoding", "identity").strip().lower()
    if packed not in ("", "identity"):
        return clean(f"({packed}: not unpacked)")  # whoever sends what nobody asked for may send a bomb
    return clean(raw.decode("utf-8", "replace"), known) or None


# -- the network, with checked addresses and one deadline for all of it


class _Checked(httpcore.NetworkBackend):
    """Looks a name up, checks what it finds, and connects to that. TLS and `Host` keep the name."""

    def __init__(self, *, allow_private: bool, resolve: targets.Resolve, deadline: float) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._deadline = deadline
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        found = targets.addresses(host, port, allow_private=self._allow_private, resolve=self._resolve)[:ADDRESSES]
        for last, address in zip([False] * (len(found) - 1) + [True], found, strict=True):
            try:
                stream = self._inner.connect_tcp(address, port, _left(self._deadline, timeout))
                return _Limited(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if last:
                    raise
        raise AssertionError("a name without addresses is refused before")

    def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        raise httpcore.UnsupportedProtocol("nothing is delivered to a socket file")


class _Limited(httpcore.NetworkStream):
    """A stream that ends at the attempt's deadline, however slowly it drips."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline, timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline, timeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        inner = self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline, timeout))
        return _Limited(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float, timeout: float | None) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the attempt took too long")
    return left if timeout is None else min(left, timeout)


Send = Callable[..., Outcome]
