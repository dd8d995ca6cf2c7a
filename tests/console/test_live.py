"""Pages that are told: a request that waits is answered by what changes, and by who may still see it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.sessions.models import Session as StoredSession
from django.db import connections
from django.test import Client

from approvals import live
from rehydrate import wakeups
from rehydrate.models import Membership
from tests.conftest import eventually
from tests.contract.driver import Agent, DjangoTransport, World, approval, order, paused

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def world(transactional_db: None, tmp_path: Any) -> World:
    from tests.contract.driver import CAST

    made = World(DjangoTransport(), tmp_path)
    made.apply(CAST)
    return made


@pytest.fixture(autouse=True)
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[wakeups.Listener]:
    """Nobody looks but when it is told, and who asks is asked again each time."""
    monkeypatch.setattr(live, "FRESH", 0)
    monkeypatch.setattr(wakeups, "SELDOM", (3600, 3600))
    monkeypatch.setattr(live, "PATIENCE", (60, 60))
    monkeypatch.setattr(live, "_seen", OrderedDict())
    made = wakeups.Listener()
    monkeypatch.setattr(wakeups, "_the_listener", made)
    yield made
    made.stop()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Page:
    """A page that somebody has open: its request waits, on a thread of its own."""

    def __init__(self, threads: ThreadPoolExecutor, client: Client, url: str) -> None:
        page = client.get(url).context
        query = {"state": page["live_state"], "wait": "yes"}
        address = f"{page['live_url']}?{page['live_query']}"
        before = len(_waiting())
        self.answer: Future[Any] = threads.submit(self._ask, client, address, query)
        eventually(lambda: len(_waiting()) > before, what="the page's request")

    @staticmethod
    def _ask(client: Client, address: str, query: dict[str, str]) -> Any:
        try:
            separator = "" if address.endswith("?") else "&"
            wanted = "&".join(f"{name}={value}" for name, value in query.items())
            return client.get(f"{address}{separator}{wanted}", headers={"HX-Request": "true"})
        finally:
            connections.close_all()


def _waiting() -> set[wakeups.Ear]:
    return {ear for ears in wakeups.listener()._ears.values() for ear in ears if ear._parked}


def waiting_order(bot: Agent) -> tuple[Any, dict[str, Any]]:
    run = bot.open(order(), paused(approval(effect="k1")))
    return run, run.wait("legal-approval")


@pytest.mark.parametrize("address", ["/?scope=available", "/runs/{run}/"])
def test_a_page_is_answered_when_somebody_else_decides(
    world: World, bot: Agent, session: Callable[[str], Client], threads: ThreadPoolExecutor, address: str
) -> None:
    run, wait = waiting_order(bot)
    page = Page(threads, session("alice"), address.format(run=run.id))
    assert not page.answer.done()
    world.person("bob").approve(wait)
    answer = page.answer.result(30)
    assert answer.status_code == 200
    assert b"hx-swap-oob" in answer.content


def test_what_is_no_news_for_a_page_does_not_end_its_wait(
    world: World,
    bot: Agent,
    session: Callable[[str], Client],
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, wait = waiting_order(bot)
    other = bot.open()
    page = Page(threads, session("alice"), f"/runs/{run.id}/")
    looks: list[Any] = []
    key_of = live.key_of

    def counted(*parts: Any) -> str:
        looks.append(parts)
        return key_of(*parts)

    monkeypatch.setattr(live, "key_of", counted)
    other.do({"type": "note", "text": "nothing for this page"})
    eventually(lambda: looks, what="a look")
    assert not page.answer.done()
    world.person("bob").approve(wait)
    assert page.answer.result(30).status_code == 200


def test_a_list_that_is_asked_for_again_without_news_is_not_looked_at_again(
    world: World,
    bot: Agent,
    session: Callable[[str], Client],
    threads: ThreadPoolExecutor,
    listener: wakeups.Listener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, wait = waiting_order(bot)
    alice = session("alice")
    Page(threads, alice, "/?scope=available")
    (ear,) = _waiting()
    eventually(lambda: listener._look_again_at is None, what="the second look of who begins to listen")
    eventually(lambda: listener.stamp(ear) in live._seen.values(), what="the end of that look")
    looks: list[Any] = []
    key_of = live.key_of

    def counted(*parts: Any) -> str:
        looks.append(parts)
        return key_of(*parts)

    monkeypatch.setattr(live, "key_of", counted)
    again = Page(threads, alice, "/?scope=available")
    assert len(looks) == 1  # the page itself
    world.person("bob").approve(wait)
    assert again.answer.result(30).status_code == 200
    assert len(looks) > 1


def test_whoever_signed_out_meanwhile_is_told_nothing(
    world: World, bot: Agent, session: Callable[[str], Client], threads: ThreadPoolExecutor
) -> None:
    run, wait = waiting_order(bot)
    page = Page(threads, session("alice"), f"/runs/{run.id}/")
    StoredSession.objects.all().delete()
    world.person("bob").approve(wait)
    answer = page.answer.result(30)
    assert (answer.status_code, answer.content) == (401, b"")
    assert not answer.cookies  # a late answer must not undo a new sign-in


def test_whoever_lost_the_right_to_see_it_is_told_nothing(
    world: World, bot: Agent, session: Callable[[str], Client], threads: ThreadPoolExecutor
) -> None:
    run, wait = waiting_order(bot)
    page = Page(threads, session("alice"), f"/runs/{run.id}/")
    Membership.objects.filter(user__username="alice").delete()
    world.person("bob").approve(wait)
    answer = page.answer.result(30)
    assert answer.status_code == 404
    assert run.id not in answer.content.decode()


def test_without_news_the_answer_is_empty_in_time(
    bot: Agent, session: Callable[[str], Client], threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = waiting_order(bot)
    monkeypatch.setattr(live, "PATIENCE", (0.5, 0.5))
    assert Page(threads, session("alice"), f"/runs/{run.id}/").answer.result(30).status_code == 204


def test_an_open_confirmation_is_told_that_another_was_quicker(
    world: World, bot: Agent, session: Callable[[str], Client], threads: ThreadPoolExecutor
) -> None:
    _, wait = waiting_order(bot)
    alice = session("alice")
    asked = threads.submit(Page._ask, alice, f"/waits/{wait['id']}/state/?v={wait['version']}", {"wait": "yes"})
    eventually(_waiting, what="the confirmation's request")
    world.person("bob").approve(wait)
    assert "bob" in asked.result(30).content.decode()


def test_when_only_the_counts_changed_only_they_are_drawn(bot: Agent, session: Callable[[str], Client]) -> None:
    run, _ = waiting_order(bot)
    alice = session("alice")
    page = alice.get(f"/runs/{run.id}/").context
    waiting_order(bot)
    news = alice.get(page["live_url"], {"state": page["live_state"]})
    assert news.content.count(b"hx-swap-oob") == 2  # the counts, and the state that is sent next
    assert b'id="rail-scopes" hx-swap-oob' in news.content
    state = news.content.decode().split('"state": "')[1].split('"')[0]
    assert alice.get(page["live_url"], {"state": state}).status_code == 204
    assert "HX-Trigger" not in news.headers


def test_pages_look_one_after_the_other(listener: wakeups.Listener) -> None:
    """Of a hundred pages of one workspace the next is woken when the one before has its answer."""
    ears = [wakeups.listen(wakeups.workspace("w")) for _ in range(100)]
    for ear in ears:
        ear.__enter__()
    eventually(lambda: listener._swept_at, what="that it listens")
    listener._look_again_at = None
    with listener._lock:
        listener._changed_runs({"w": ["r"]})
    listener._poke()
    for n, ear in enumerate(ears):
        assert ear.wait(60)
        assert not any(later._flag.is_set() for later in ears[n + 1 :])
        ear.__exit__(None, None, None)
