"""The pages of deliveries, without JavaScript: what an operator reads, does, and is told; and who gets in."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rehydrate import clock, sender
from rehydrate.models import AdminEvent, Delivery, Endpoint
from rehydrate.webhooks import Outcome
from tests.contract.driver import Agent, World, approval, paused
from tests.deliveries.receiver import Receiver, says

from .conftest import text_of

Session = Callable[[str], Client]


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    settings.ALLOW_PRIVATE_TARGETS = True
    with Receiver() as made:
        yield made


@pytest.fixture
def told(world: World, receiver: Receiver) -> str:
    return world.variant("told", deliver_to=receiver.url, required=[])


def ready(bot: Agent, told: str) -> Delivery:
    run = bot.open(flow=told, holder=None, at=None)
    return Delivery.objects.get(run_id=run.id)


def times_out(message: Any) -> Outcome:
    return Outcome(seconds=15.0, error="timeout")


def send_in_vain() -> None:
    """What is due is tried, and will be again: late enough for the slowest machine to look at the page before."""
    sender.send_due(times_out)
    Delivery.objects.filter(status="pending").update(next_at=clock.now() + dt.timedelta(hours=1))


def token(page: Any) -> str:
    return str(page.context["token"])


def test_an_empty_list_says_how_one_comes_about(world: World, session: Session) -> None:
    assert "deliver_to" in text_of(session("dave").get("/deliveries/"))


def test_the_list_tells_state_and_what_is_next(bot: Agent, told: str, session: Session) -> None:
    ready(bot, told)
    sender.send_due()
    ready(bot, told)
    send_in_vain()
    page = text_of(session("dave").get("/deliveries/"))
    for words in (
        "The run is ready",
        "Delivered",
        "To be tried again",
        "next try",
        "It did not answer in time",
        "Failing",
    ):
        assert words in page
    filtered = session("dave").get("/deliveries/?status=delivered")
    assert [row["status"] for row in filtered.context["rows"]] == ["delivered"]
    assert "No delivery fits" in text_of(session("dave").get("/deliveries/?status=withdrawn"))


def test_a_delivery_tells_every_attempt_and_what_is_sent(
    bot: Agent, told: str, receiver: Receiver, session: Session
) -> None:
    receiver.answer = says(500, b"<script>alert(1)</script> broken")
    row = ready(bot, told)
    sender.send_due()
    raw = session("erin").get(f"/deliveries/{row.pk}/")
    page = text_of(raw)
    for words in ("Attempt 1", "It answered 500", "broken", str(row.pk), "webhook-id", '"type": "run.ready"'):
        assert words in page
    assert "<script>alert(1)" not in raw.content.decode()
    assert "Send again" not in page  # an auditor changes nothing


def test_an_operator_sends_again(bot: Agent, told: str, receiver: Receiver, session: Session) -> None:
    row = ready(bot, told)
    sender.send_due()
    dave = session("dave")
    page = dave.get(f"/deliveries/{row.pk}/")
    answer = dave.post(f"/deliveries/{row.pk}/resend/", {"token": token(page)}, follow=True)
    assert "It is being sent again." in text_of(answer)
    sender.send_due()
    dave.post(f"/deliveries/{row.pk}/resend/", {"token": token(page)})  # a double click
    sender.send_due()
    assert [post.id for post in receiver.posts] == [str(row.pk)] * 2
    said = text_of(dave.get(f"/deliveries/{row.pk}/"))
    assert "dave sent it again" in said
    assert AdminEvent.objects.get(act="delivery.resent").channel == "console"


def test_what_was_given_up_is_an_alarm_until_it_is_sent_again(
    bot: Agent, told: str, session: Session, clock: Any
) -> None:
    rows = [ready(bot, told) for _ in range(2)]
    Delivery.objects.update(since=clock.now() - dt.timedelta(days=4))
    sender.send_due(times_out)
    Endpoint.objects.update(quiet_until=None)
    sender.send_due(times_out)
    dave = session("dave")
    page = dave.get("/deliveries/")
    assert page.context["delivery_alarms"] == 2
    assert "2 given up in the last seven days" in text_of(page)
    assert "The system gave it up after three days of tries" in text_of(dave.get(f"/deliveries/{rows[0].pk}/"))
    where = Endpoint.objects.get().pk
    confirm = dave.get(f"/receivers/{where}/again/")
    done = dave.post(f"/receivers/{where}/again/", {"token": token(confirm)}, follow=True)
    assert "2 are being sent again." in text_of(done)
    assert not done.context["delivery_alarms"]
    assert sender.send_due() == 2


def test_a_receiver_that_is_gone_is_seen_and_switched_on_again(
    bot: Agent, told: str, receiver: Receiver, session: Session
) -> None:
    receiver.answer = says(410)
    row = ready(bot, told)
    sender.send_due()
    dave = session("dave")
    page = dave.get("/deliveries/")
    for words in (
        "Switched off",
        "it answered 410",
        "1 set aside",
        "Set aside",
        "sent when its receiver is switched on",
    ):
        assert words in text_of(page)
    assert page.context["delivery_alarms"] == 1
    where = Endpoint.objects.get().pk
    confirm = dave.get(f"/receivers/{where}/on/")
    receiver.answer = None
    done = dave.post(f"/receivers/{where}/on/", {"token": token(confirm)}, follow=True)
    assert "on again" in text_of(done)
    sender.send_due()
    row.refresh_from_db()
    assert row.status == "delivered"
    confirm = dave.get(f"/receivers/{where}/off/")
    dave.post(f"/receivers/{where}/off/", {"token": token(confirm)})
    assert Endpoint.objects.get().switched_off_why == "dave"


def test_a_runs_page_tells_of_its_deliveries(bot: Agent, told: str, session: Session) -> None:
    run = bot.open(paused(approval()), flow=told, at=None)
    send_in_vain()
    for name, sees_more in (("dave", True), ("alice", False)):
        raw = session(name).get(f"/runs/{run.id}/")
        page = text_of(raw)
        for words in (
            "Deliveries",
            "A question was opened",
            "To be tried again",
            "next try",
            "It did not answer in time",
        ):
            assert words in page, words
        assert (f"/deliveries/{Delivery.objects.get().pk}/" in raw.content.decode()) is sees_more


def test_a_run_of_a_flow_that_names_nobody_says_nothing_of_them(bot: Agent, session: Session) -> None:
    run = bot.open()
    assert "deliveries-title" not in session("alice").get(f"/runs/{run.id}/").content.decode()


@pytest.mark.parametrize(
    ("name", "sees", "acts"),
    [("nobody", 302, 302), ("victor", 403, 403), ("alice", 403, 403), ("dave", 200, 302), ("frank", 200, 302),
     ("erin", 200, 403), ("mallory", 404, 404)],
)  # fmt: skip
def test_who_gets_in(bot: Agent, told: str, session: Session, client: Client, name: str, sees: int, acts: int) -> None:
    row = ready(bot, told)
    sender.send_due()
    who = client if name == "nobody" else session(name)
    assert who.get("/deliveries/").status_code == (200 if name == "mallory" else sees)
    assert who.get(f"/deliveries/{row.pk}/").status_code == sees
    assert who.post(f"/deliveries/{row.pk}/resend/", {"token": "t1"}).status_code == acts
    where = Endpoint.objects.get().pk
    off = who.post(f"/receivers/{where}/off/", {"token": "t2"}).status_code
    assert off == (404 if name in ("victor", "alice") else acts)
    row.refresh_from_db()
    changed = name in ("dave", "frank")
    assert row.status == ("pending" if changed else "delivered")
    assert (Endpoint.objects.get().switched_off_at is not None) is changed
    if name not in ("nobody",):
        assert ("/deliveries/" in who.get("/runs/").content.decode()) is (name in ("dave", "frank", "erin", "mallory"))


def test_a_look_changes_nothing(bot: Agent, told: str, session: Session) -> None:
    row = ready(bot, told)
    dave = session("dave")
    where = Endpoint.objects.get().pk
    for path in ("off", "on", "again"):
        assert dave.get(f"/receivers/{where}/{path}/").status_code == 200
    assert dave.get(f"/receivers/{where}/explode/").status_code == 404
    assert dave.get(f"/deliveries/{row.pk}/resend/").status_code == 405
    assert Endpoint.objects.get().switched_off_at is None


def test_pages_cost_the_same_however_much_is_on_them(bot: Agent, told: str, session: Session) -> None:
    dave = session("dave")
    first = ready(bot, told)
    paths = ["/deliveries/", "/deliveries/live/", f"/deliveries/{first.pk}/", f"/runs/{first.run_id}/"]

    def costs() -> dict[str, int]:
        found = {}
        for path in paths:
            with CaptureQueriesContext(connection) as asked:
                assert dave.get(path).status_code == 200
            found[path] = len(asked)
        return found

    costs()
    short = costs()
    for _ in range(8):
        ready(bot, told)
    sender.send_due()
    assert costs() == short
    assert max(short.values()) <= 17, short


def test_the_page_lives(bot: Agent, told: str, session: Session) -> None:
    ready(bot, told)
    dave = session("dave")
    page = dave.get("/deliveries/")
    state = page.context["live_state"]
    assert dave.get("/deliveries/live/", {"state": state}).status_code == 204
    sender.send_due()
    changed = dave.get("/deliveries/live/", {"state": state})
    assert changed.status_code == 200
    assert "Delivered" in text_of(changed)
    assert "<form" not in re.sub(r"<template.*?</template>", "", changed.content.decode())


def test_in_chinese(bot: Agent, told: str, session: Session) -> None:
    row = ready(bot, told)
    sender.send_due(times_out)
    dave = session("dave")
    dave.cookies.load({"rehydrate_language": "zh-hans"})
    for path in ("/deliveries/", f"/deliveries/{row.pk}/", f"/runs/{row.run_id}/"):
        page = text_of(dave.get(path))
        assert "运行已就绪" in page
        assert "The run is ready" not in page
