"""Real senders, really killed: what was under way is sent again, under the same id, and nothing is sent by two."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings

from rehydrate import deliveries, sender
from rehydrate.core.delivering import AT_ONCE
from rehydrate.models import Delivery, DeliveryAttempt
from tests.conftest import ROOT, _embedded, end, eventually
from tests.ledger_cast import Cast

from .receiver import Handler, Receiver
from .told import secret

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes]
START = Callable[[], subprocess.Popen[bytes]]

_SENDER = "import django; django.setup(); from rehydrate import sender; sender.run(lasts=120)"


@pytest.fixture
def start_sender(transactional_db: None) -> Iterator[START]:
    """A sender in a process of its own, on this test's database."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "DATABASE_URL": _embedded().url(settings.DATABASES["default"]["NAME"]),
            "REHYDRATE_ALLOW_PRIVATE_TARGETS": "1",
        }
        command = [sys.executable, "-c", _SENDER]
        started.append(subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        end(process)


def test_a_sender_killed_in_mid_send_leaves_its_delivery_to_the_next(
    cast: Cast, receiver: Receiver, start_sender: START, clock: Any
) -> None:
    let_go = threading.Event()
    receiver.answer = lambda handler: let_go.wait(60)
    cast.open(holder=None)
    process = start_sender()
    eventually(lambda: receiver.posts, within=60, what="the first attempt")
    process.kill()
    process.wait(30)
    let_go.set()
    receiver.answer = None
    row = Delivery.objects.get()
    assert (row.status, row.attempts, row.sending) == ("pending", 1, True)
    clock.advance(seconds=deliveries.LEASE + 1)
    assert sender.send_due() == 1
    first, second = receiver.posts
    assert (first.id, first.raw) == (second.id, second.raw)
    first.verify(secret(cast))
    row.refresh_from_db()
    assert (row.status, row.attempts) == ("delivered", 2)
    tried = DeliveryAttempt.objects.order_by("number").values_list("number", "status", "seconds")
    assert [(number, status) for number, status, _ in tried] == [(1, None), (2, 204)]


def test_two_senders_never_send_one_delivery_twice(cast: Cast, receiver: Receiver, start_sender: START) -> None:
    at_once: list[int] = []
    busy = Counter[str]()
    lock = threading.Lock()

    def count(handler: Handler) -> None:
        with lock:
            busy["now"] += 1
            at_once.append(busy["now"])
        handler.say(204)
        with lock:
            busy["now"] -= 1

    receiver.answer = count
    start_sender()
    start_sender()
    for _ in range(60):
        cast.open(holder=None)
    eventually(lambda: not Delivery.objects.exclude(status="delivered").exists(), within=90, what="the last delivery")
    sent = Counter(post.id for post in receiver.posts)
    assert len(sent) == 60
    assert set(sent.values()) == {1}
    assert max(at_once) <= AT_ONCE["quick"]  # however many senders there are
