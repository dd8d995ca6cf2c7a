"""Deliveries on their way: what arrives, what is tried again and when, what is given up, and who waits for whom."""

from __future__ import annotations

import datetime as dt
import threading
import time
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection

from rehydrate import deliveries, seal, sender, webhooks
from rehydrate.core.delivering import AT_ONCE
from rehydrate.logs import without_secrets
from rehydrate.models import AdminEvent, Delivery, DeliveryAttempt, Endpoint
from rehydrate.webhooks import Message, Outcome
from tests.ledger_cast import Cast

from .receiver import Receiver, free_url, says
from .told import endpoint, secret, told

pytestmark = pytest.mark.django_db


def ready(cast: Cast) -> Delivery:
    """A run that is ready, and the delivery that tells of it."""
    run = cast.open(holder=None)
    return Delivery.objects.get(run_id=run.id)


def fails(message: Message) -> Outcome:
    return Outcome(seconds=0.0, error="connect_failed", detail="nobody there")


def takes(message: Message) -> Outcome:
    return Outcome(seconds=0.0, status=204)


def pass_time(clock: Any, row: Delivery) -> None:
    """Until its next try is due."""
    row.refresh_from_db()
    quiet = Endpoint.objects.get(pk=row.endpoint_id).quiet_until
    clock.move_to(max(row.next_at, quiet or row.next_at))
    clock.advance(seconds=0.01)


# -- what arrives


def test_the_body_is_exactly_what_the_contract_says(cast: Cast, receiver: Receiver) -> None:
    run = cast.open(holder=None)
    assert sender.send_due() == 1
    post = receiver.posts[0]
    row = Delivery.objects.get()
    assert post.verify(secret(cast)) == {
        "type": "run.ready",
        "timestamp": row.at.isoformat().replace("+00:00", "Z"),
        "data": {
            "run_id": run.id,
            "flow": "flow",
            "external_id": run.external_id,
            "status": "ready",
            "version": run.state.run.version,
        },
    }
    assert list(post.json) == ["type", "timestamp", "data"]
    assert post.id == str(row.pk)


def test_it_is_done_after_a_yes(cast: Cast, receiver: Receiver) -> None:
    row = ready(cast)
    sender.send_due()
    row.refresh_from_db()
    assert (row.status, row.attempts, row.last_status, row.sending) == ("delivered", 1, 204, False)
    tried = DeliveryAttempt.objects.get()
    assert (tried.number, tried.status, tried.error, tried.url) == (1, 204, None, receiver.url)
    assert tried.seconds is not None
    assert sender.send_due() == 0
    assert len(receiver.posts) == 1


def test_the_same_message_comes_again_under_the_same_id_with_a_time_and_signature_of_its_own(
    cast: Cast, receiver: Receiver, clock: Any
) -> None:
    receiver.answer = says(500, b"not now")
    row = ready(cast)
    sender.send_due()
    pass_time(clock, row)
    receiver.answer = None
    sender.send_due()
    first, second = receiver.posts
    assert (first.id, first.raw) == (second.id, second.raw)
    assert int(second.headers["webhook-timestamp"]) > int(first.headers["webhook-timestamp"])
    second.verify(secret(cast), now=clock.now())
    tried = DeliveryAttempt.objects.order_by("number")
    assert [(t.number, t.status, t.error, t.answer) for t in tried] == [
        (1, 500, "http_500", "not now"),
        (2, 204, None, None),
    ]


# -- what is tried again


def test_three_days_of_outage_and_then_it_is_given_up_with_one_escalation(cast: Cast, clock: Any) -> None:
    start = clock.now()
    row = ready(cast)
    for _ in range(100):
        sender.send_due(fails)
        row.refresh_from_db()
        if row.status != "pending":
            break
        pass_time(clock, row)
    assert row.status == "given_up"
    assert dt.timedelta(days=3) <= row.closed_at - start < dt.timedelta(days=3, minutes=5)
    assert DeliveryAttempt.objects.count() == row.attempts
    assert 20 <= row.attempts <= 40
    assert AdminEvent.objects.filter(act="delivery.given_up").count() == 1
    clock.advance(days=30)
    assert sender.send_due(fails) == 0
    deliveries.tidy()
    assert AdminEvent.objects.filter(act="delivery.given_up").count() == 1


def test_a_receiver_that_comes_back_within_three_days_misses_nothing(
    cast: Cast, receiver: Receiver, clock: Any
) -> None:
    rows = [ready(cast) for _ in range(3)]
    sender.send_due(fails)
    clock.advance(days=2, hours=23)
    assert sender.send_due() == 3
    assert {post.id for post in receiver.posts} == {str(row.pk) for row in rows}


def test_nothing_is_tried_before_its_time(cast: Cast, clock: Any) -> None:
    row = ready(cast)
    sender.send_due(fails)
    row.refresh_from_db()
    assert 3 < (row.next_at - clock.now()).total_seconds() < 7
    assert sender.send_due(fails) == 0
    left = deliveries.seconds_until_due()
    assert left is not None
    assert 3 < left < 7


@pytest.mark.parametrize(("status", "heeded"), [(429, True), (503, True), (500, False)])
def test_retry_after_is_heeded_for_all_of_the_receivers_deliveries(
    cast: Cast, receiver: Receiver, clock: Any, status: int, heeded: bool
) -> None:
    receiver.answer = says(status, retry_after="1800")
    first = ready(cast)
    sender.send_due()
    receiver.answer = None
    ready(cast)
    clock.advance(seconds=1700)
    assert sender.send_due() == (0 if heeded else 2)
    clock.advance(seconds=101)
    assert sender.send_due() == (2 if heeded else 0)
    first.refresh_from_db()
    assert first.status == "delivered"


def test_no_receiver_may_ask_for_more_than_an_hour(cast: Cast, receiver: Receiver, clock: Any) -> None:
    receiver.answer = says(503, retry_after="99999999")
    ready(cast)
    sender.send_due()
    receiver.answer = None
    clock.advance(seconds=3601)
    assert sender.send_due() == 1


@pytest.mark.parametrize(("failures", "seconds", "at_once"), [(0, None, 1), (0, 0.1, 8), (0, 5.0, 2), (1, 0.1, 1)])
def test_a_receiver_gets_as_much_at_once_as_it_can_take(
    cast: Cast, failures: int, seconds: float | None, at_once: int
) -> None:
    for _ in range(10):
        ready(cast)
    Endpoint.objects.update(failures=failures, last_seconds=seconds)
    assert len(deliveries.claim(free=32, free_for_slow=16)) == at_once
    assert deliveries.claim(free=32, free_for_slow=16) == []  # until one of them is over


def test_what_is_over_its_time_is_given_up_without_an_attempt_each(cast: Cast, clock: Any) -> None:
    """A thousand deliveries to a receiver that answers nobody are not tried one by one to the end."""
    rows = [ready(cast) for _ in range(6)]
    for _ in range(4):
        sender.send_due(fails)
        clock.advance(days=1)
    sender.send_due(fails)
    deliveries.tidy()
    for row in rows:
        row.refresh_from_db()
    assert {row.status for row in rows} == {"given_up"}
    assert AdminEvent.objects.filter(act="delivery.given_up").count() == 6


def test_after_days_in_which_this_server_stood_still_everything_is_tried_before_it_is_given_up(
    cast: Cast, receiver: Receiver, clock: Any
) -> None:
    ready(cast)
    for _ in range(4):
        sender.send_due(fails)
        clock.advance(hours=1)
    ready(cast)
    clock.advance(days=9)
    deliveries.tidy()
    assert sender.send_due() == 2
    assert len(receiver.posts) == 2


# -- a receiver that is gone


def test_410_switches_the_receiver_off_and_sets_aside_what_is_left(cast: Cast, receiver: Receiver, clock: Any) -> None:
    receiver.answer = says(410)
    row = ready(cast)
    sender.send_due()
    ready(cast)
    where = endpoint(cast)
    assert where.switched_off_at is not None
    assert AdminEvent.objects.filter(act="endpoint.switched_off").count() == 1
    clock.advance(days=10)
    assert sender.send_due() == 0
    deliveries.tidy()
    row.refresh_from_db()
    assert row.status == "pending"  # shown as set aside
    assert deliveries.seconds_until_due() is None
    receiver.answer = None
    deliveries.switch(cast.people["dave"], str(where.pk), on=True)
    assert sender.send_due() == 2
    assert [post.id for post in receiver.posts].count(str(row.pk)) == 2
    assert AdminEvent.objects.filter(act="endpoint.switched_on", actor_id="dave").count() == 1


def test_what_was_set_aside_has_three_days_anew(cast: Cast, receiver: Receiver, clock: Any) -> None:
    row = ready(cast)
    deliveries.switch(cast.people["dave"], str(endpoint(cast).pk), on=False)
    clock.advance(days=10)
    deliveries.switch(cast.people["dave"], str(endpoint(cast).pk), on=True)
    sender.send_due(fails)
    row.refresh_from_db()
    assert row.status == "pending"
    pass_time(clock, row)
    sender.send_due()
    assert receiver.types() == ["run.ready"]


# -- a policy that changes


def test_another_address_gets_what_is_pending(cast: Cast, receiver: Receiver) -> None:
    told(cast, free_url())
    row = ready(cast)
    sender.send_due()
    row.refresh_from_db()
    assert row.status == "pending"
    told(cast, receiver.url)
    sender.send_due()
    assert [post.id for post in receiver.posts] == [str(row.pk)]
    assert list(DeliveryAttempt.objects.order_by("number").values_list("url", flat=True))[1] == receiver.url


def test_without_an_address_it_is_withdrawn(cast: Cast, receiver: Receiver) -> None:
    row = ready(cast)
    told(cast, None)
    row.refresh_from_db()
    assert row.status == "withdrawn"
    assert sender.send_due() == 0
    cast.open(holder=None)
    assert Delivery.objects.count() == 1
    told(cast, receiver.url)  # named again: what was withdrawn stays so, and the secret is another
    assert sender.send_due() == 0
    assert receiver.posts == []


def test_what_was_written_while_the_address_went_is_withdrawn_by_the_sender(cast: Cast) -> None:
    row = ready(cast)
    Endpoint.objects.update(url=None)  # as a change sees it that began before
    assert sender.send_due() == 0
    assert deliveries.tidy() == 1
    row.refresh_from_db()
    assert row.status == "withdrawn"


def test_what_an_old_address_says_counts_for_nothing_at_the_new_one(cast: Cast, receiver: Receiver) -> None:
    row = ready(cast)
    (job,) = deliveries.claim(free=1, free_for_slow=1)
    told(cast, "http://127.0.0.1:9/other")
    deliveries.record(job, Outcome(seconds=0.1, status=410, error="http_410"))
    row.refresh_from_db()
    where = endpoint(cast)
    assert (where.switched_off_at, where.failures, row.status, row.sending) == (None, 0, "pending", False)


def test_two_secrets_during_an_overlap(cast: Cast, receiver: Receiver, clock: Any) -> None:
    old = secret(cast)
    new = deliveries.rotate(endpoint(cast), overlap=dt.timedelta(hours=1))
    assert new != old
    assert secret(cast) == new
    ready(cast)
    sender.send_due()
    receiver.posts[0].verify(old)
    receiver.posts[0].verify(new)
    clock.advance(seconds=3601)
    ready(cast)
    sender.send_due()
    post = receiver.posts[1]
    post.verify(new, now=clock.now())
    assert len(post.headers["webhook-signature"].split(" ")) == 1


# -- side by side


class Slow:
    """Takes its time for some URLs, until it is let go."""

    def __init__(self, *slow: str) -> None:
        self.slow = slow
        self.let_go = threading.Event()
        self.lock = threading.Lock()
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.took: list[str] = []

    def __call__(self, message: Message) -> Outcome:
        with self.lock:
            self.now[message.url] = self.now.get(message.url, 0) + 1
            self.most[message.url] = max(self.most.get(message.url, 0), self.now[message.url])
        if message.url in self.slow:
            self.let_go.wait(60)
        with self.lock:
            self.now[message.url] -= 1
            self.took.append(message.url)
        return Outcome(seconds=0.0, status=204)


def run_until(done: Any, attempt: Any, *, threads: int = 8) -> None:
    """The sender's loop until `done()`, asked between two looks."""
    deadline = time.monotonic() + 60
    sender.run(lasts=60, stopping=lambda: bool(done()) or time.monotonic() > deadline, attempt=attempt, threads=threads)
    assert done()


def test_a_slow_receiver_holds_up_nobody(db: None) -> None:
    slow, well = "http://127.0.0.1:9/slow", "http://127.0.0.1:9/well"
    for url in (slow, well):
        cast = told(_another(), url)
        for _ in range(20):
            ready(cast)
    Endpoint.objects.update(last_seconds=0.1)  # so far, both were quick
    attempt = Slow(slow)
    took_meanwhile: list[str] = []

    def all_well() -> bool:
        if not took_meanwhile and attempt.took.count(well) == 20:
            took_meanwhile.extend(attempt.took)
            attempt.let_go.set()
        return bool(took_meanwhile)

    run_until(all_well, attempt, threads=16)
    assert took_meanwhile == [well] * 20
    assert 1 <= attempt.most[slow] <= AT_ONCE["quick"]
    assert Delivery.objects.filter(endpoint=endpoint(cast), status="delivered").count() == 20


def _another() -> Cast:
    """A cast of its own: the people of one before it make way."""
    for user in User.objects.all():
        user.username = f"{user.username}-{user.pk}"
        user.save()
    return Cast()


def test_many_slow_receivers_hold_up_nobody(db: None) -> None:
    """More of them than there are threads: they share a part, and what is left is for those that are quick."""
    well = told(_another(), "http://127.0.0.1:9/well")
    ready(well)
    sender.send_due(takes)
    slow = [f"http://127.0.0.1:9/slow{n}" for n in range(12)]
    cast = told(_another(), slow[0])
    first = endpoint(cast)
    for url in slow[1:]:
        Endpoint.objects.create(workspace=cast.workspace, flow=url[-6:], url=url, secret=first.secret)
    row = ready(cast)
    for where in Endpoint.objects.exclude(pk__in=[first.pk, endpoint(well).pk]):
        Delivery.objects.create(
            endpoint=where, run_id=row.run_id, type="run.ready", subject=str(where.pk), run_status="ready",
            run_version=1, at=row.at, status="pending", since=row.since, next_at=row.next_at,
        )  # fmt: skip
    for _ in range(10):
        ready(well)
    attempt = Slow(*slow)
    took: list[str] = []

    def all_well() -> bool:
        if not took and attempt.took.count("http://127.0.0.1:9/well") == 10:
            took.extend(attempt.took)
            attempt.let_go.set()
        return bool(took)

    run_until(all_well, attempt, threads=8)
    assert took == ["http://127.0.0.1:9/well"] * 10


def test_a_dead_receiver_and_a_healthy_one_the_healthy_one_gets_everything(cast: Cast, receiver: Receiver) -> None:
    dead = told(_another(), free_url())
    for _ in range(15):
        ready(dead)
        ready(cast)
    sent = [str(pk) for pk in Delivery.objects.filter(endpoint=endpoint(cast)).values_list("pk", flat=True)]
    run_until(lambda: len(receiver.posts) >= 15, sender.attempt)
    assert sorted(post.id for post in receiver.posts) == sorted(sent)
    assert not Delivery.objects.filter(endpoint=endpoint(dead)).exclude(status="pending").exists()
    assert endpoint(dead).failures > 0


def test_no_transaction_is_open_while_it_is_sent(cast: Cast, receiver: Receiver) -> None:
    ready(cast)
    inside: list[bool] = []
    (job,) = deliveries.claim(free=1, free_for_slow=1)
    outer = len(connection.savepoint_ids)

    def attempt(message: Message) -> Outcome:
        inside.append(len(connection.savepoint_ids) > outer)
        return takes(message)

    deliveries.record(job, attempt(job.message))
    assert inside == [False]


def test_a_message_that_cannot_be_made_or_sent_holds_up_no_other(cast: Cast, receiver: Receiver, clock: Any) -> None:
    poison = ready(cast)
    fine = ready(cast)

    def attempt(message: Message) -> Outcome:
        if message.id == str(poison.pk):
            raise RuntimeError("poison")
        return takes(message)

    run_until(lambda: Delivery.objects.filter(pk=fine.pk, status="delivered").exists(), attempt)
    poison.refresh_from_db()
    assert (poison.status, poison.attempts, poison.last_error) == ("pending", 1, "internal")


# -- senders that die, or stand still


def test_an_attempt_is_counted_before_it_is_made_and_made_again_when_its_sender_died(
    cast: Cast, receiver: Receiver, clock: Any
) -> None:
    row = ready(cast)
    assert len(deliveries.claim(free=4, free_for_slow=4)) == 1  # and its sender dies
    row.refresh_from_db()
    assert (row.attempts, row.sending) == (1, True)
    assert DeliveryAttempt.objects.filter(delivery=row, seconds=None).count() == 1
    assert deliveries.claim(free=4, free_for_slow=4) == []  # somebody is at it, for all anybody knows
    clock.advance(seconds=deliveries.LEASE + 1)
    assert sender.send_due() == 1
    row.refresh_from_db()
    assert (row.status, row.attempts) == ("delivered", 2)


def test_a_delivery_that_kills_each_of_its_senders_comes_back_ever_later_and_is_given_up(
    cast: Cast, clock: Any
) -> None:
    row = ready(cast)
    start = clock.now()
    pauses = []
    for _ in range(5):
        (job,) = deliveries.claim(free=4, free_for_slow=4)
        row.refresh_from_db()
        pauses.append(round((row.next_at - clock.now()).total_seconds()))
        clock.move_to(row.next_at)
        clock.advance(seconds=1)
    assert pauses == sorted(pauses)
    assert pauses[-1] > pauses[0] * 3
    clock.move_to(start + dt.timedelta(days=3, seconds=1))
    assert sender.send_due(fails) == 1
    row.refresh_from_db()
    assert row.status == "given_up"
    assert job.number == 5


def test_a_late_yes_counts_and_a_late_no_does_not(cast: Cast, clock: Any) -> None:
    yes, no = ready(cast), ready(cast)
    Endpoint.objects.update(last_seconds=0.1)
    early = {job.message.id: job for job in deliveries.claim(free=4, free_for_slow=4)}
    clock.advance(seconds=deliveries.LEASE + 1)
    later = {job.message.id: job for job in deliveries.claim(free=4, free_for_slow=4)}
    assert early.keys() == later.keys()
    deliveries.record(early[str(no.pk)], fails(early[str(no.pk)].message))
    deliveries.record(early[str(yes.pk)], takes(early[str(yes.pk)].message))
    yes.refresh_from_db()
    no.refresh_from_db()
    assert (yes.status, no.status, no.sending) == ("delivered", "pending", True)
    deliveries.record(later[str(yes.pk)], fails(later[str(yes.pk)].message))
    yes.refresh_from_db()
    assert yes.status == "delivered"


def test_a_sender_that_stood_still_does_not_send_what_another_one_may_be_sending(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ready(cast)
    made: list[Message] = []
    monkeypatch.setattr(deliveries, "LEASE", -1)  # as if its whole lease had gone by between claim and send

    def attempt(message: Message) -> Outcome:
        made.append(message)
        return takes(message)

    run_until(lambda: DeliveryAttempt.objects.filter(error="interrupted").exists(), attempt)
    assert made == []
    row.refresh_from_db()
    assert row.status == "pending"


# -- secrets


def test_the_secret_is_in_no_table_in_clear_and_in_no_log(
    cast: Cast, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    text = secret(cast)
    receiver.answer = says(500, f"you sent {text}".encode())
    ready(cast)
    sender.send_due()
    bare = text.removeprefix("whsec_")
    with connection.cursor() as cursor:
        for table in ("endpoint", "delivery", "deliveryattempt", "adminevent", "policyversion"):
            cursor.execute(f"SELECT count(*) FROM rehydrate_{table} t WHERE position(%s in t::text) > 0", [bare])
            assert cursor.fetchone()[0] == 0, table
    assert bare not in caplog.text
    assert seal.decrypt(endpoint(cast).secret) == text
    assert bare not in without_secrets(f"signed with {text}")


def test_an_attempt_is_what_the_settings_allow(cast: Cast, receiver: Receiver, settings: Any) -> None:
    settings.ALLOW_PRIVATE_TARGETS = False
    row = ready(cast)
    sender.send_due()
    row.refresh_from_db()
    assert (row.last_error, receiver.posts) == ("target_refused", [])
    assert webhooks.TOTAL_SECONDS < deliveries.LEASE
