"""Questions that show whether a service still works. Each raises when it does not."""

from __future__ import annotations

import datetime as dt
import http.client
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from django.db import close_old_connections, connection
from django_q.tasks import async_task

from rehydrate import tasks
from rehydrate.postgres import Embedded

TIMEOUT = 3.0


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


def cluster_works(cluster: str) -> Callable[[], None]:
    """Well when a task handed to the cluster was carried out: a hung cluster looks alive in every other way.

    Asks again only after an answer, or when the question is old enough to have been lost.
    """
    asked_at: float | None = None
    last: dt.datetime | None = None

    def probe() -> None:
        nonlocal asked_at, last
        try:
            close_old_connections()
            beat = tasks.last_beat(cluster)
            first = asked_at is None
            answered = not first and beat != last
            if first or answered or time.monotonic() - (asked_at or 0) > 15:
                async_task("rehydrate.tasks.beat", cluster, cluster=cluster, group="beat")
                asked_at, last = time.monotonic(), beat
            if not answered:
                raise NoAnswerError("a task that it was handed was not carried out")
        finally:
            connection.close()

    return probe
