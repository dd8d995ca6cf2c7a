"""What happens by itself and when, in words; and what could not be applied, with the button that has it tried again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from audit import narrative
from rehydrate import engine, sweep
from rehydrate.models import AdminEvent, Trouble
from tests.contract import driver as d

from .conftest import text_of
from .test_pages import token_of

Session = Callable[[str], Client]


def page(client: Client, run: d.Run, *, language: str = "en") -> str:
    return text_of(client.get(f"/runs/{run.id}/", headers={"Accept-Language": language}))


def timer(**fields: Any) -> d.Json:
    return {"name": "cool-off", "kind": "timer", "due_in": 7200, **fields}


def test_every_timer_of_a_run_says_what_happens(bot: d.Agent, session: Session) -> None:
    run = bot.open(
        d.order(), d.paused(d.approval(effect="k1", due_in=90_000), timer(), d.callback(on_timeout="resume"))
    )
    shown = page(session("dave"), run)
    assert "What happens by itself, and when" in shown
    assert "The timer “Cool off” runs out, as it is meant to" in shown
    assert re.search(r"The deadline of “[^”]+” passes: a person must say how it goes on", shown)
    assert "the agent is told that nobody answered, and nothing more" in shown
    chinese = page(session("dave"), run, language="zh-hans")
    assert "自动发生的事及其时间" in chinese
    assert "定时器" in chinese


def test_a_lease_a_retry_and_an_alarm_too(bot: d.Agent, session: Session) -> None:
    held, failed, idle = bot.open(), bot.open(), bot.open()
    failed.do({"type": "failed", "error": {"code": "x"}, "retry_in": 60})
    idle.release()
    assert "loses its hold on the run, if nothing is heard from it" in page(session("dave"), held)
    assert "Next try: number 2 of" in page(session("dave"), failed)
    assert "It becomes an alarm in the inbox, if no agent has come for it" in page(session("dave"), idle)


def test_nothing_happens_by_itself_to_what_a_person_holds(bot: d.Agent, world: d.World, session: Session) -> None:
    run = bot.open()
    world.person("dave").takeover(run).fine()
    assert "Nothing: it stays as it is until somebody acts." in page(session("dave"), run)


@pytest.mark.parametrize("language", ["en", "zh-hans"])
@pytest.mark.parametrize("key", list(narrative._UPCOMING), ids=str)
def test_each_sentence_is_whole(key: tuple[str, str | None], language: str) -> None:
    from django.utils import translation

    kind, then = key
    run = {
        "waits": [{"id": "w", "name": "legal"}],
        "effects": [{"key": "k", "title": "Order 17"}],
        "metadata": {"failures": {"count": 1, "limit": 3}},
        "timers": [
            {
                "kind": kind,
                "subject": "k" if kind == "expiry" else "bot" if kind == "lease" else "w",
                "then": then,
                "to": ["leads"],
                "due_at": "2026-12-01T10:00:00Z",
            }
        ],
    }
    with translation.override(language):
        (said,) = narrative.upcoming(run)
    assert "%" not in said["text"]
    assert ("Order 17" in said["text"]) is (kind == "expiry")
    assert ("leads" in said["text"]) is (kind in ("reminder", "escalation") or then == "escalate")


# -- what could not be applied


@pytest.fixture
def poison(bot: d.Agent, clock: Any) -> d.Run:
    """A run whose row cannot be read, set aside by the tick."""
    run = bot.open(d.paused(timer(due_in=60)))
    with connection.cursor() as cursor:
        cursor.execute("UPDATE rehydrate_wait SET policy = '\"no object\"' WHERE run_id = %s", [run.id])
    for _ in range(sweep.TRIES + 1):
        clock.advance(seconds=60)
        engine.tick()
    assert Trouble.objects.get().set_aside_at is not None
    return run


def test_its_page_says_so_and_has_it_tried_again(poison: d.Run, session: Session, clock: Any) -> None:
    client = session("dave")
    shown = client.get(f"/runs/{poison.id}/")
    assert shown.status_code == 200
    words = text_of(shown)
    assert "Rehydrate could not apply what is due" in words
    assert f"Tried {sweep.TRIES} times" in words
    assert "ValidationError" in words
    answer = client.post(f"/runs/{poison.id}/try-again/", {"token": token_of(shown), "reason": "mended"}, follow=True)
    assert "It is tried again within seconds." in text_of(answer)
    assert Trouble.objects.get().tries == 0
    told = AdminEvent.objects.get(act="run.try_again")
    assert (told.actor_id, told.detail) == ("dave", {"reason": "mended"})
    client.post(f"/runs/{poison.id}/try-again/", {"token": token_of(shown), "reason": "mended"})
    assert AdminEvent.objects.filter(act="run.try_again").count() == 1


def test_only_operators_have_it_tried_again(poison: d.Run, session: Session, world: d.World) -> None:
    client = session("alice")
    shown = client.get(f"/runs/{poison.id}/")
    assert "An operator of the workspace can have it tried again." in text_of(shown)
    assert client.post(f"/runs/{poison.id}/try-again/", {"reason": "please"}).status_code == 403
    world.person("alice").retry(poison).refused(403, "forbidden")
    assert Trouble.objects.get().set_aside_at is not None


def test_it_stands_in_the_inbox_and_nothing_else_is_held_up(poison: d.Run, bot: d.Agent, session: Session) -> None:
    other = bot.open(d.order(), d.paused(d.approval(effect="k1")))
    client = session("dave")
    shown = client.get("/?scope=review")
    assert f"/runs/{poison.id}/" in shown.content.decode()
    assert "has set the run aside" in text_of(shown)
    assert f"/runs/{other.id}/" in session("alice").get("/?scope=available").content.decode()
    timers = text_of(client.get("/timers/"))
    assert "Could not be applied" in timers
    assert "Tried 3 times" in timers
    assert 'rehydrate_runs_in_trouble{state="set_aside"} 1.0' in client.get("/metrics").content.decode()


def test_lists_and_policies_do_not_stumble_over_it(poison: d.Run, world: d.World, bot: d.Agent, tmp_path: Any) -> None:
    other = bot.open(d.order(), d.paused(d.approval(effect="k1")))
    before = other.wait("legal-approval")["version"]
    found = bot.get("/waits", status="all").fine()["results"]
    assert [wait["run"] for wait in found] == [other.id]
    world.apply(d.CAST.replace('members = ["grace"]', 'members = ["grace", "gwen"]').replace(
        'members = ["alice", "bob", "carol"]', 'members = ["alice", "bob", "carol", "cleo"]'
    ))  # fmt: skip
    assert other.wait("legal-approval")["version"] > before


def test_the_api_has_it_tried_again_and_verify_names_it(poison: d.Run, world: d.World, clock: Any) -> None:
    from rehydrate import verify
    from rehydrate.models import LedgerEvent, Wait

    flaw, _ = verify.run(poison.id)
    assert "cannot be read" in str(flaw)
    policy = LedgerEvent.objects.get(run_id=poison.id, type="paused").payload["waits"][0]["policy"]
    Wait.objects.filter(run_id=poison.id).update(policy=policy)
    world.person("dave").retry(poison).fine()
    engine.tick()
    assert poison.status == "ready"
    assert not Trouble.objects.exists()


def test_the_page_of_timers(bot: d.Agent, session: Session, clock: Any) -> None:
    client = session("dave")
    assert "Nothing is waiting for its time." in text_of(client.get("/timers/"))
    run = bot.open(d.order(), d.paused(d.approval(effect="k1"), timer(due_in=60)))
    done = bot.open(d.paused(timer(due_in=30)))
    shown = text_of(client.get("/timers/"))
    assert "The timer “Cool off” runs out, as it is meant to" in shown
    clock.advance(seconds=45)
    engine.tick()
    answer = client.get("/timers/")
    assert f"/runs/{done.id}/" in answer.content.decode()
    assert "ran out, as it was meant to" in text_of(answer)
    clock.advance(seconds=30)
    assert "overdue" in text_of(client.get("/timers/")), f"nobody has ticked since: {run.id}"
    assert "Nothing fits" not in text_of(client.get("/history/?what=time"))


def test_it_shows_nothing_of_others(bot: d.Agent, world: d.World, session: Session) -> None:
    run = bot.open(d.paused(timer()))
    assert f"/runs/{run.id}/" not in session("mallory").get("/timers/").content.decode()
