"""The stories that matter most over a real socket, against the real web server: races, long polls, a whole life."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from .driver import (
    ORDER,
    Agent,
    Person,
    approval,
    at_once,
    checkpoint,
    completed,
    effect,
    executed,
    order,
    paused,
    started,
    statuses,
)

pytestmark = [
    pytest.mark.parametrize("transport", ["http"], indirect=True),
    pytest.mark.django_db(transaction=True),
]


def test_a_whole_life(bot: Agent, alice: Person) -> None:
    run = bot.open(order(), paused(approval(effect="k1")))
    alice.approve(run.wait("legal-approval"))
    run.epoch = bot.claim(wait=5).ok()["lease"]["epoch"]
    run.do(started("k1", arguments=ORDER))
    run.do(executed("k1"), completed())
    assert (run.status, run.state("k1")) == ("completed", "executed")


def test_two_deciders_at_once(bot: Agent, alice: Person, bob: Person) -> None:
    for _ in range(5):
        wait = bot.open().pause(approval())
        answers = at_once(partial(alice.decide, wait), partial(bob.decide, wait))
        assert statuses(answers) == [201, 409]


def test_many_rehydrates_and_claims_at_once(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    calls = [lambda n=n: run.rehydrate(holder=f"r{n}") for n in range(5)]
    calls += [lambda n=n: bot.claim(holder=f"c{n}") for n in range(5)]
    answers = at_once(*calls)
    assert sum(a.status == 200 and a.json["lease"] is not None for a in answers) == 1
    assert {a.status for a in answers} <= {200, 204, 409}


def test_a_long_poll_is_woken(bot: Agent, alice: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    began = datetime.now(UTC)
    claimed, _ = at_once(lambda: bot.claim(wait=20), lambda: alice.decide(wait))
    assert claimed.ok()["run"]["id"] == run.id
    assert datetime.now(UTC) - began < timedelta(seconds=5)


def test_one_key_sent_many_times_at_once_opens_one_run(bot: Agent) -> None:
    answers = at_once(*[lambda: bot.open_raw(external_id="x", holder=None)] * 8)
    assert statuses(answers) == [200] * 7 + [201]
    assert len({a.json["run"]["id"] for a in answers}) == 1


def test_one_idempotency_key_many_times_at_once_acts_once(bot: Agent) -> None:
    run = bot.open()
    answers = at_once(*[lambda: run.append(checkpoint("b"), idem="once")] * 6)
    assert {a.status for a in answers} <= {200, 409}
    assert any(a.status == 200 for a in answers)
    assert len(run.events("checkpoint")) == 2


def test_many_plan_and_starts_are_granted_once(bot: Agent) -> None:
    run = bot.open()
    plan = {**effect("m", "mail.send"), "start": True}
    answers = at_once(*[lambda: run.append(plan)] * 8)
    assert sum(a.ok()["effects"][0]["granted"] for a in answers) == 1
