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
ASK_EVERY, ASK_AGAIN = 3.0, 5.0
"""Seconds after which a cluster is asked again: after its answer, and without one. A tick that was started shows itself
well within the latter.
"""


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


def cluster_works(cluster: str, *, ticks: int = 0) -> Callable[[], None]:
    """Well when a task handed to the cluster was carried out: a hung cluster looks alive in every other way.

    Asks again some seconds after an answer, or when the question may have been lost with a worker. With `ticks` it also
    starts as many as are missing of them: the schedule would do so within a minute.
    """
    asked_at = 0.0
    started_at = time.monotonic()
    last: int | None = None
    answered = False

    def probe() -> None:
        nonlocal asked_at, started_at, last, answered
        try:
            close_old_connections()
            beats = pulse.beats(cluster)
            answered = answered or (last is not None and beats != last)
            since = time.monotonic() - asked_at
            if last is None or since > (ASK_EVERY if answered else ASK_AGAIN):
                async_task("rehydrate.tasks.beat", cluster, cluster=queue(cluster), group="beat")
                well = answered
                asked_at, last, answered = time.monotonic(), beats, False
            else:
                well = answered
            if ticks and time.monotonic() - started_at > ASK_AGAIN and (missing := ticks - pulse.ticks_here()) > 0:
                for _ in range(missing):
                    async_task("rehydrate.tasks.tick", cluster=queue(cluster), group="tick")
                started_at = time.monotonic()
            if not well:
                raise NoAnswerError("a task that it was handed was not carried out")
        finally:
            connection.close()

    return probe
