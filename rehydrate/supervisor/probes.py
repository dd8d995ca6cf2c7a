"""Questions that show whether a service still works. Each raises when it does not."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from django.db import close_old_connections, connection
from django_q.tasks import async_task

from rehydrate import pulse
from rehydrate.node import queue
from rehydrate.postgres import Embedded

TIMEOUT = 3.0
NO_TICK = 3.0
"""Seconds without a tick, which shows itself every second, after which another one is started."""


class NoAnswerError(Exception):
    """The service did not answer as it should; the message says how."""


def http_ok(url: str) -> Callable[[], None]:
    """Well when a GET answers 200 within `TIMEOUT` seconds."""
    parts = urlsplit(url)

    def probe() -> None:
        client = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=TIMEOUT)
        try:
            client.request("GET", parts.path or "/", headers={"Host": "127.0.0.1", "Connection": "close"})
            status = client.getresponse().status
        except OSError as error:
            raise NoAnswerError(str(error) or type(error).__name__) from error
        finally:
            client.close()
        if status != 200:
            raise NoAnswerError(f"it answers {status}")

    return probe


def postgres_answers(server: Embedded) -> Callable[[], None]:
    def probe() -> None:
        if not server.answers():
            raise NoAnswerError("it takes no connection")

    return probe


def cluster_works(cluster: str, *, ask_again: float = 5, ticks: bool = False) -> Callable[[], None]:
    """Well when a task handed to the cluster was carried out: a hung cluster looks alive in every other way.

    Asks again only after an answer, or after `ask_again` seconds, when the question may have been lost with a worker.
    With `ticks` it also starts a tick where none goes on: the schedule would do so within a minute.
    """
    asked_at: float | None = None
    started_at = 0.0
    last = 0

    def probe() -> None:
        nonlocal asked_at, last, started_at
        try:
            close_old_connections()
            beats = pulse.beats(cluster)
            first = asked_at is None
            answered = not first and beats != last
            if first or answered or time.monotonic() - (asked_at or 0) > ask_again:
                async_task("rehydrate.tasks.beat", cluster, cluster=queue(cluster), group="beat")
                asked_at, last = time.monotonic(), beats
            if ticks and time.monotonic() - started_at > ask_again:
                silent = pulse.seconds_since_tick(here=True)
                if silent is None or silent > NO_TICK:
                    async_task("rehydrate.tasks.tick", cluster=queue(cluster), group="tick")
                    started_at = time.monotonic()
            if not answered:
                raise NoAnswerError("a task that it was handed was not carried out")
        finally:
            connection.close()

    return probe
