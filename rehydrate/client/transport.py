"""One call over HTTP, tried again until it is answered. What the calls are lives in `calls`; when to retry, in `retry`.

Each POST carries an Idempotency-Key that stays the same over its retries, so a lost answer never doubles anything.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from rehydrate.client import tracing
from rehydrate.client.blocking import blocks
from rehydrate.client.errors import LedgerError, Unreachable, refusal
from rehydrate.client.retry import Backoff, worth_retrying
from rehydrate.client.tracing import log

API = "/api/v1"


@dataclass(frozen=True)
class Call:
    """One request: it can be sent by a sync or an async transport alike."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    params: Mapping[str, Any] | None = None
    read_seconds: float = 30.0
    idempotency_key: str = field(default_factory=lambda: str(uuid.uuid4()))

    def content(self) -> bytes | None:
        """The body as it goes over the wire, the same bytes on each try; what JSON has no number for is refused."""
        if self.body is None:
            return None
        return json.dumps(self.body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()

    def headers(self) -> dict[str, str]:
        if self.method != "POST":
            return {}
        return {"Content-Type": "application/json", "Idempotency-Key": self.idempotency_key}


def parse(response: httpx.Response) -> Any:
    """The answer's JSON; None for 204. Raises what the server refused with."""
    if response.status_code == 204:
        return None
    if response.is_success:
        return response.json()
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"title": f"HTTP {response.status_code}", "detail": response.text[:300]}
    raise refusal(problem, status=response.status_code, retry_after=retry_after(response))


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that the server asked us to wait, when it said so in seconds."""
    try:
        return float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None


def is_loopback(url: str) -> bool:
    return (urlsplit(url).hostname or "") in {"127.0.0.1", "localhost", "::1"}


class Transport(ABC):
    """What both kinds share: how often a call is tried."""

    def __init__(
        self,
        url: str,
        *,
        patience: float = 60.0,
        backoff: Backoff | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self.backoff = backoff or Backoff()
        self._monotonic = monotonic
        self._closed = threading.Event()

    async def _send(self, call: Call, *, patience: float | None = None) -> tuple[int, Any]:
        """Send until answered: `(status, JSON)`.

        Lost answers, 429 and 5xx are tried again with back-off for `patience` seconds; then `Unreachable` or the last
        refusal is raised. Other refusals are raised at once.
        """
        patience = self.patience if patience is None else patience
        content, headers, began = call.content(), {**call.headers(), **tracing.headers()}, self._monotonic()
        attempt = 0
        while True:
            attempt += 1
            trouble: LedgerError | Unreachable
            asked_to_wait: float | None = None
            try:
                response = await self._request(call, content, headers)
            except (httpx.UnsupportedProtocol, httpx.LocalProtocolError):
                raise
            except httpx.TransportError as error:
                if self._closed.is_set():
                    raise Unreachable("The client was closed.") from error
                trouble = Unreachable(f"{self.url}: {type(error).__name__} {error}".rstrip())
                trouble.__cause__ = error
            else:
                try:
                    return response.status_code, parse(response)
                except LedgerError as error:
                    if not worth_retrying(response.status_code, attempt):
                        raise
                    trouble, asked_to_wait = error, error.retry_after
            delay = self.backoff.delay(attempt, retry_after=asked_to_wait)
            if self._monotonic() - began + delay > patience:
                raise trouble
            log.info("trying %s %s again in %.2f s: %s", call.method, call.path, delay, trouble)
            await self.rest(delay)

    @abstractmethod
    async def _request(self, call: Call, content: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        """One try. Raises `httpx.TransportError`."""

    @abstractmethod
    async def rest(self, seconds: float) -> None:
        """Do nothing for so long."""


class SyncTransport(Transport):
    """Sends calls with httpx; safe to share between threads."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience: float = 60.0,
        backoff: Backoff | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(url, patience=patience, backoff=backoff, monotonic=monotonic)
        self._sleep = sleep
        self._http = httpx.Client(**_common(self.url, key), transport=transport)

    send = blocks(Transport._send)

    def close(self) -> None:
        self._closed.set()
        self._http.close()

    async def _request(self, call: Call, content: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        return self._http.request(**_request(call, content, headers))

    async def rest(self, seconds: float) -> None:
        self._sleep(seconds)


class AsyncTransport(Transport):
    """The same for one event loop."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        patience: float = 60.0,
        backoff: Backoff | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, patience=patience, backoff=backoff)
        self._http = httpx.AsyncClient(**_common(self.url, key), transport=transport)

    send = Transport._send

    async def close(self) -> None:
        self._closed.set()
        await self._http.aclose()

    async def _request(self, call: Call, content: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        return await self._http.request(**_request(call, content, headers))

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def _common(url: str, key: str) -> dict[str, Any]:
    """What both kinds of httpx client are made with."""
    return {
        "base_url": url + API,
        "headers": {"Authorization": f"Bearer {key}", "User-Agent": "rehydrate-client"},
        "timeout": httpx.Timeout(30.0, connect=5.0),
        "trust_env": not is_loopback(url),  # a proxy for the outside never stands before this machine's own server
    }


def _request(call: Call, content: bytes | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """A call as both kinds of httpx client take it."""
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params,
        "content": content,
        "headers": headers,
        "timeout": httpx.Timeout(call.read_seconds, connect=min(5.0, call.read_seconds)),
    }
