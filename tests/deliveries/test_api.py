# ruff: noqa: F811 - fixtures are imported by name
"""Deliveries over the API: who sees which, how lists go on, what sending again does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rehydrate import deliveries, seal, sender
from rehydrate.models import AdminEvent, Delivery, Endpoint
from rehydrate.webhooks import Outcome
from tests.contract.conftest import bot, transport, world  # noqa: F401 - the cast, as fixtures
from tests.contract.driver import Agent, Caller, Run, World
from tests.contract.test_roles import CALLERS, OK, caller

from .receiver import Receiver, says

pytestmark = pytest.mark.django_db


@pytest.fixture
def told(world: World, receiver: Receiver) -> str:
    """A flow that delivers."""
    return world.variant("told", deliver_to=receiver.url, required=[])


@pytest.fixture
def run(bot: Agent, told: str) -> Run:
    return bot.open(flow=told, holder=None, at=None)


def one(who: Caller) -> Any:
    (found,) = who.get("/deliveries").ok()["results"]
    return found


def test_a_delivery_as_it_is_shown(world: World, run: Run, receiver: Receiver) -> None:
    dave = world.person("dave")
    row = one(dave)
    assert {name: row[name] for name in ("type", "run", "flow", "status", "attempt", "sending", "last_error")} == {
        "type": "run.ready", "run": run.id, "flow": "told", "status": "pending", "attempt": 0, "sending": False,
        "last_error": None,
    }  # fmt: skip
    assert row["next_try_at"] is not None
    receiver.answer = says(500, b"<b>not now</b>")
    sender.send_due()
    whole = dave.get(f"/deliveries/{row['id']}").ok()
    assert (whole["attempt"], whole["last_error"], whole["last_status"]) == (1, "http_500", 500)
    (made,) = whole["attempts"]
    assert (made["number"], made["status"], made["error"], made["answer"]) == (1, 500, "http_500", "<b>not now</b>")
    assert whole["body"] == receiver.posts[0].json


SEES = {"agent", "dave", "erin", "frank"}
#: In a list, whoever stands outside of the wall sees an empty one; who stands inside and has no role for it is told so.
OUTSIDE = {"other-flow", "other-workspace-agent", "mallory"}


@pytest.mark.parametrize("name", CALLERS)
def test_who_sees_deliveries(world: World, run: Run, name: str) -> None:
    row = one(world.person("dave"))
    who = caller(world, name)
    listed, read = who.get("/deliveries"), who.get(f"/deliveries/{row['id']}")
    if name == "nobody":
        listed.refused(401)
        read.refused(401)
    elif name in OUTSIDE:
        assert (listed.ok()["total"], listed.ok()["results"]) == (0, [])
        read.refused(404, "not_found")
    elif name in SEES:
        assert [found["id"] for found in listed.ok()["results"]] == [row["id"]]
        assert read.ok()["id"] == row["id"]
    else:
        listed.refused(403, "forbidden")
        read.refused(403, "forbidden")


@pytest.mark.parametrize("name", CALLERS)
def test_who_sends_again(world: World, run: Run, name: str) -> None:
    sender.send_due()
    row = one(world.person("dave"))
    answer = caller(world, name).post(f"/deliveries/{row['id']}/resend")
    match name:
        case "nobody":
            answer.refused(401)
        case "dave" | "frank":
            assert answer.status in OK
        case "mallory":
            answer.refused(404, "not_found")
        case "other-flow" | "other-workspace-agent":
            answer.refused(404, "not_found")
        case _:
            answer.refused(403, "forbidden")
    assert one(world.person("dave"))["status"] == ("pending" if name in ("dave", "frank") else "delivered")


def test_sent_again_it_is_the_same_message(world: World, run: Run, receiver: Receiver) -> None:
    dave = world.person("dave")
    sender.send_due()
    row = one(dave)
    assert row["status"] == "delivered"
    sent = dave.post(f"/deliveries/{row['id']}/resend", {"reason": "It says that it lost it"}).ok()
    assert (sent["status"], sent["attempt"]) == ("pending", 1)
    sender.send_due()
    first, second = receiver.posts
    assert (first.id, first.raw) == (second.id, second.raw)
    whole = dave.get(f"/deliveries/{row['id']}").ok()
    assert (whole["status"], [made["number"] for made in whole["attempts"]]) == ("delivered", [1, 2])
    act = AdminEvent.objects.get(act="delivery.resent")
    assert (act.actor_id, act.channel, act.subject) == ("dave", "api", f"delivery {row['id']}")
    assert act.detail["reason"] == "It says that it lost it"


def test_what_was_given_up_has_three_days_anew(world: World, run: Run, receiver: Receiver, clock: Any) -> None:
    clock.advance(days=3, seconds=1)
    sender.send_due(lambda message: Outcome(seconds=0, error="timeout"))
    dave = world.person("dave")
    row = one(dave)
    assert (row["status"], row["next_try_at"]) == ("given_up", None)
    dave.post(f"/deliveries/{row['id']}/resend").ok()
    sender.send_due(lambda message: Outcome(seconds=0, error="timeout"))
    assert one(dave)["status"] == "pending"
    clock.advance(hours=1)
    sender.send_due()
    assert one(dave)["status"] == "delivered"


def test_what_is_being_sent_is_left_as_it_is(world: World, run: Run) -> None:
    dave = world.person("dave")
    (job,) = deliveries.claim(free=1, free_for_slow=1)
    sent = dave.post(f"/deliveries/{job.delivery}/resend").ok()
    assert (sent["sending"], sent["attempt"], sent["next_try_at"]) == (True, 1, None)
    assert deliveries.claim(free=1, free_for_slow=1) == []
    assert not AdminEvent.objects.filter(act="delivery.resent").exists()


def test_the_same_request_sent_again_sends_once(world: World, run: Run, receiver: Receiver) -> None:
    dave = world.person("dave")
    sender.send_due()
    row = one(dave)
    for _ in range(2):
        dave.post(f"/deliveries/{row['id']}/resend", idem="k-1").ok()
        sender.send_due()
    assert len(receiver.posts) == 2


def test_without_a_receiver_nothing_can_be_sent_again(world: World, run: Run) -> None:
    dave = world.person("dave")
    world.variant("told", required=[])
    row = one(dave)
    assert (row["status"], row["receiver"]["url"]) == ("withdrawn", None)
    dave.post(f"/deliveries/{row['id']}/resend").refused(422, "invalid")


def test_what_is_set_aside_is_found_as_such(world: World, run: Run, receiver: Receiver) -> None:
    dave = world.person("dave")
    receiver.answer = says(410)
    sender.send_due()
    row = one(dave)
    assert (row["status"], row["next_try_at"], row["receiver"]["switched_off_why"]) == ("set_aside", None, "gone")
    assert dave.get("/deliveries", status="set_aside").ok()["total"] == 1
    assert dave.get("/deliveries", status="pending").ok()["total"] == 0


def test_filters_and_cursors(world: World, bot: Agent, told: str) -> None:
    dave = world.person("dave")
    runs = [bot.open(flow=told, holder=None, at=None) for _ in range(5)]
    other = world.variant("told-too", deliver_to="http://127.0.0.1:9/x", required=[])
    bot.open(flow=other, holder=None, at=None)
    assert dave.get("/deliveries").ok()["total"] == 6
    assert dave.get("/deliveries", flow=told).ok()["total"] == 5
    assert [row["run"] for row in dave.pages("/deliveries", run=runs[2].id)] == [runs[2].id]
    assert [row["run"] for row in dave.pages("/deliveries", flow=told, limit=2)] == [run.id for run in reversed(runs)]
    dave.get("/deliveries", status="lost").refused(422)
    dave.get("/deliveries", colour="red").refused(422)
    dave.get("/deliveries", run="x").refused(404)
    dave.get("/deliveries", cursor="x").refused(422)


def test_an_agent_sees_those_of_its_own_flows(world: World, run: Run, told: str) -> None:
    mine = world.agent("mine", flows=(told,))
    assert mine.get("/deliveries").ok()["total"] == 1


def test_no_answer_shows_a_secret_or_what_may_be_one(world: World, bot: Agent, receiver: Receiver) -> None:
    flow = world.variant("keyed", deliver_to=f"{receiver.url}?key=very-private", required=[])
    bot.open(flow=flow, holder=None, at=None)
    secret = str(seal.decrypt(Endpoint.objects.get().secret))
    receiver.answer = says(500, f"signed with {secret}".encode())
    sender.send_due()
    assert receiver.posts[0].path.endswith("?key=very-private")
    for name in ("dave", "frank", "erin"):
        row = one(world.person(name))
        raw = world.person(name).get(f"/deliveries/{row['id']}").raw.decode()
        assert secret.removeprefix("whsec_") not in raw
        assert "very-private" not in raw
        assert not re.search(r"whsec_[A-Za-z0-9]", raw)
        assert row["receiver"]["url"] == f"{receiver.url}?…"


@pytest.mark.parametrize("path", ["/deliveries", "/deliveries/{id}"])
def test_lists_cost_the_same_however_long(world: World, bot: Agent, told: str, path: str) -> None:
    dave = world.person("dave")
    bot.open(flow=told, holder=None, at=None)

    def statements() -> int:
        address = path.format(id=Delivery.objects.earliest("at").pk)
        with CaptureQueriesContext(connection) as found:
            dave.get(address).ok()
        return len(found)

    statements()
    short = statements()
    for _ in range(5):
        bot.open(flow=told, holder=None, at=None)
    sender.send_due()
    assert statements() == short
    assert short <= 5


@pytest.mark.parametrize("bad", ["x", "0" * 40, "%00", "00000000-0000-0000-0000-000000000000"])
def test_an_id_that_is_none(world: World, run: Run, bad: str) -> None:
    dave = world.person("dave")
    dave.get(f"/deliveries/{bad}").refused(404, "not_found")
    dave.post(f"/deliveries/{bad}/resend").refused(404, "not_found")


def test_figures_for_prometheus(world: World, run: Run, receiver: Receiver, clock: Any) -> None:
    clock.advance(seconds=90)
    figures = Client().get("/metrics").content.decode()
    assert 'rehydrate_deliveries{status="pending"} 1.0' in figures
    assert 'rehydrate_receivers{state="well"} 1.0' in figures
    age = re.search(r"^rehydrate_oldest_pending_delivery_seconds ([0-9.]+)", figures, re.MULTILINE)
    assert age is not None
    assert 90 <= float(age[1]) < 150
    receiver.answer = says(410)
    sender.send_due()
    figures = Client().get("/metrics").content.decode()
    assert 'rehydrate_deliveries{status="set_aside"} 1.0' in figures
    assert 'rehydrate_receivers{state="switched_off"} 1.0' in figures
    assert "rehydrate_oldest_pending_delivery_seconds 0.0" in figures
