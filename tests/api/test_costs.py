"""What a request costs: how many statements the calls take that a cycle is made of, and that this does not grow."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.contract import driver as d


@pytest.fixture
def world(db: None, tmp_path: Any) -> d.World:
    made = d.World(d.DjangoTransport(), tmp_path)
    made.apply(d.CAST)
    # The first use of a key is noted; that is not what is counted here.
    made.agent("bot").get("/runs").ok()
    made.person("alice").get("/runs").ok()
    return made


def statements(call: Callable[[], d.Answer]) -> tuple[Any, int]:
    """The answer's body, and the number of statements; those that begin and end transactions are counted, too."""
    with CaptureQueriesContext(connection) as found:
        answer = call()
    assert answer.status in (200, 201), answer.raw
    return answer.json, len(found)


def asked(bot: d.Agent) -> d.Run:
    return bot.open(d.order("k1"), d.paused(d.approval(effect="k1")))


def test_a_cycle_of_four_requests(world: d.World) -> None:
    bot, alice = world.agent("bot"), world.person("alice")
    events = [d.checkpoint(), d.order("k1"), d.paused(d.approval(effect="k1"))]
    opened, opening = statements(lambda: bot.open_raw(events=events))
    run = d.Run(bot, opened["run"]["id"], 0)
    wait = run.wait("legal-approval")
    _, deciding = statements(lambda: alice.decide(wait))
    envelope, claiming = statements(bot.claim)
    run.epoch = envelope["lease"]["epoch"]
    _, finishing = statements(lambda: run.append(d.checkpoint("sent"), d.completed()))
    assert (opening <= 16, deciding <= 15, claiming <= 12, finishing <= 8) == (True,) * 4, (
        f"open {opening}, decide {deciding}, claim {claiming}, append {finishing}"
    )


def test_rehydrating(world: d.World) -> None:
    bot, alice = world.agent("bot"), world.person("alice")
    run = asked(bot)
    alice.approve(run.wait("legal-approval"))
    body = {"holder": "bot/w1", "agent": bot.card()}
    envelope, rehydrating = statements(lambda: bot.post(f"/runs/{run.id}/rehydrate", body))
    assert envelope["lease"]
    assert rehydrating <= 10


def test_an_idempotency_key_adds_four_statements(world: d.World) -> None:
    run = world.agent("bot").open()
    _, without = statements(lambda: run.append(d.ev("note", text="a")))
    _, with_key = statements(lambda: run.append(d.ev("note", text="b"), idem="k-1"))
    _, again = statements(lambda: run.append(d.ev("note", text="b"), idem="k-1"))
    assert with_key == without + 4  # a transaction's two ends, the record's place, its answer
    assert again <= 5


def test_appending_costs_the_same_on_a_long_run(world: d.World) -> None:
    run = world.agent("bot").open()
    _, early = statements(lambda: run.append(d.ev("note", text="early")))
    run.do(*[d.ev("note", text=str(n)) for n in range(500)])
    _, late = statements(lambda: run.append(d.ev("note", text="late")))
    _, batch = statements(lambda: run.append(*[d.ev("note", text=str(n)) for n in range(100)]))
    assert early == late == batch


@pytest.mark.parametrize("path", ["/runs", "/waits", "/signals"])
def test_lists_cost_the_same_however_long(world: d.World, path: str) -> None:
    bot = world.agent("bot")
    asked(bot)
    bot.signal("s-0", "early", flow="contract-approval", external_id="nobody").ok(202)
    _, short = statements(lambda: bot.get(path))
    for n in range(5):
        asked(bot)
        bot.signal(f"s-{n + 1}", "early", flow="contract-approval", external_id="nobody").ok(202)
    page, long = statements(lambda: bot.get(path))
    assert (page["total"], long) == (6, short)
