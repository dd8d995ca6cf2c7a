"""Rules 1, 2 and 14 of the contract: one writer, a chain that anybody can verify, refusals that an auditor sees.

The verifier here is written from the contract alone and shares no code with the server.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import rfc8785
from django.apps import apps
from django.core.management import CommandError
from django.db import Error, connection, transaction

from .driver import (
    ORDER,
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    callback,
    checkpoint,
    completed,
    done,
    effect,
    ev,
    failed,
    order,
    paused,
    rows_with,
    started,
    timer,
    unknown,
)
from .sweep import sweep


def chain_is_whole(events: list[dict[str, Any]], run: str) -> None:
    """hash = SHA-256 over the previous hash (hex) and the canonical JSON of {run, seq, type, actor, at, payload}."""
    previous = "0" * 64
    for n, event in enumerate(events, start=1):
        assert event["seq"] == n, "no gap, none twice"
        assert event["prev_hash"] == previous
        body = {"run": run, **{k: event[k] for k in ("seq", "type", "actor", "at", "payload")}}
        previous = hashlib.sha256(previous.encode() + rfc8785.dumps(body)).hexdigest()
        assert event["hash"] == previous, f"event {n} ({event['type']}) does not fit its hash"


@pytest.fixture
def long_story(bot: Agent, alice: Person, bob: Person, dave: Person, clock: Clock) -> Run:
    """A run to which nearly everything happened."""
    run = bot.open(order(), ev("note", text="Grüße, 你好 \u202e & <b>"))
    wait = run.pause(approval(effect="k1"))
    dave.post(f"/waits/{wait['id']}/extend", {"due_in": 200000, "reason": "holidays"})
    bob.decide(wait)  # stale
    alice.approve(run.wait("legal-approval"), comment="ok")
    run.resume()
    run.do(started("k1", arguments=ORDER))
    clock.advance(seconds=61)
    run.append(checkpoint("b"))  # fenced
    dave.reconcile(run, "k1", "executed", receipt={"id": "x1"})
    run.resume()
    run.do(failed(retry_in=5))
    clock.advance(seconds=6)
    run.resume()
    run.pause(callback("c", correlation="c-1"))
    bot.signal("s1", "c", correlation="c-1", payload={"1.5": [1.5, 1e3, None, True]})
    run.resume()
    run.pause(timer(due_in=60))
    clock.advance(seconds=61)
    sweep()
    run.resume()
    run.do(effect("m", "mail.send"), started("m"), unknown("m"))
    dave.takeover(run)
    dave.handback(run, effects=[{"key": "m", "receipt": {"id": "xm"}}])
    run.resume()
    run.do(completed())
    assert run.status == "completed"
    return run


# --- rule 2 ----------------------------------------------------------------------------------------------------------


def test_the_chain_of_a_long_story_is_whole(long_story: Run, erin: Person) -> None:
    events = long_story.events()
    assert len(events) > 25
    chain_is_whole(events, long_story.id)
    assert long_story.look()["version"] == events[-1]["seq"]
    pack = erin.get(f"/runs/{long_story.id}/evidence").ok()
    assert [e["hash"] for e in pack["events"]] == [e["hash"] for e in events]
    assert events[-1]["hash"] in str(pack)


def test_each_event_says_who_and_when(long_story: Run) -> None:
    events = long_story.events()
    assert {e["actor"]["kind"] for e in events} == {"agent", "person", "system"}
    assert all(e["actor"]["name"] for e in events)
    times = [e["at"] for e in events]
    assert times == sorted(times)
    assert all(t.endswith(("Z", "+00:00")) for t in times)


def test_two_runs_have_chains_of_their_own(bot: Agent) -> None:
    one, two = bot.open(), bot.open()
    one.do(checkpoint("b"))
    two.do(checkpoint("b"))
    for run in (one, two):
        chain_is_whole(run.events(), run.id)
    assert one.events()[0]["hash"] != two.events()[0]["hash"]


def table(name: str) -> str:
    return str(apps.get_model("rehydrate", name)._meta.db_table)


@pytest.mark.parametrize(
    "sql", ["UPDATE {t} SET type = 'forged'", "UPDATE {t} SET seq = seq + 1000", "DELETE FROM {t}"], ids=str
)
def test_the_database_itself_refuses_to_change_events(bot: Agent, sql: str) -> None:
    run = bot.open()
    before = run.events()
    with pytest.raises(Error), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql.format(t=table("LedgerEvent")))
    assert run.events() == before


@pytest.fixture
def as_intruder() -> Callable[..., int]:
    """SQL of somebody who owns the database and switches the triggers off."""

    def execute(sql: str, *args: Any) -> int:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL session_replication_role = replica")
            cursor.execute(sql, args)
            count = int(cursor.rowcount)
            cursor.execute("SET LOCAL session_replication_role = DEFAULT")
            return count

    return execute


def says_no(world: World, *args: str) -> str:
    """What verify_ledger printed or said as it failed."""
    world.forged = True
    with pytest.raises((CommandError, SystemExit)) as caught:
        world.command("verify_ledger", *args)
    return str(caught.value)


def test_verify_ledger_is_content_with_a_long_story(long_story: Run, world: World) -> None:
    world.command("verify_ledger")
    world.command("verify_ledger", "--run", long_story.id)


@pytest.mark.parametrize("forged", ["payload", "order"])
def test_verify_ledger_finds_a_forged_event(
    long_story: Run, world: World, as_intruder: Callable[..., int], forged: str
) -> None:
    if forged == "payload":
        sql = 'UPDATE {t} SET payload = \'{{"text": "forged"}}\' WHERE run_id = %s AND seq = 5'
    else:
        sql = "DELETE FROM {t} WHERE run_id = %s AND seq = 5"
    assert as_intruder(sql.format(t=table("LedgerEvent")), long_story.id) == 1
    says_no(world)
    says_no(world, "--run", long_story.id)


# --- rule 1 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "column", "value"),
    [
        ("Run", "stage", "'forged'"),
        ("Run", "status", "'ready'"),
        ("Run", "failure_count", "7"),
        ("Wait", "version", "99"),
        ("Effect", "state", "'planned'"),
    ],
)
def test_verify_ledger_finds_a_forged_projection(
    long_story: Run, world: World, as_intruder: Callable[..., int], model: str, column: str, value: str
) -> None:
    """Nothing but the events' projections may stand in the tables."""
    where = "id" if model == "Run" else "run_id"
    forge = f"UPDATE {table(model)} SET {column} = {value} WHERE {where} = %s"
    assert as_intruder(forge, long_story.id) >= 1
    says_no(world, "--run", long_story.id)


def test_events_and_projections_come_in_one_transaction(bot: Agent) -> None:
    run = bot.open()
    seen = len(run.events())
    got = run.do(checkpoint("b"), effect("m", "mail.send"), started("m"))
    assert [e["type"] for e in got["events"]][:3] == ["checkpoint", "effect.planned", "effect.started"]
    assert [e["seq"] for e in got["events"]] == list(range(seen + 1, seen + 1 + len(got["events"])))
    assert (run.look()["stage"], run.state("m"), run.look()["version"]) == ("b", "started", seen + len(got["events"]))


def test_the_version_grows_with_each_event(bot: Agent, alice: Person) -> None:
    run = bot.open()
    versions = [run.look()["version"]]
    wait = run.pause(approval())
    versions.append(run.look()["version"])
    alice.approve(wait)
    versions.append(run.look()["version"])
    assert all(a < b for a, b in itertools.pairwise(versions))
    assert versions[-1] == len(run.events())


# --- rule 14 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "wait_closed",
        "stale_decision",
        "effect_duplicate",
        "effect_already_executed",
        "effect_key_reused",
        "approval_required",
        "approval_mismatch",
        "agents_cannot_decide",
        "self_approval",
        "not_eligible",
        "effect_unknown",
        "lease_lost",
    ],
)
def test_a_refusal_that_matters_is_an_event(
    bot: Agent, alice: Person, bob: Person, grace: Person, dave: Person, carol: Person, code: str
) -> None:
    mail = effect("m", "mail.send")
    run = bot.open(order(), *done(mail), requested_by="carol")
    if code in ("wait_closed", "stale_decision", "agents_cannot_decide", "self_approval", "not_eligible"):
        wait = run.pause(approval(effect="k1"))
        if code == "wait_closed":
            alice.approve(wait)
            answer = bob.decide(wait)
        elif code == "agents_cannot_decide":
            answer = bot.post(f"/waits/{wait['id']}/decisions", {"choice": "approve", "wait_version": 1})
        else:
            who = {"stale_decision": alice, "self_approval": carol, "not_eligible": grace}[code]
            answer = who.decide(wait, version=wait["version"] + (code == "stale_decision"))
    elif code == "approval_mismatch":
        alice.approve(run.pause(approval(effect="k1")))
        run.resume()
        answer = run.start("k1", arguments={})
    elif code == "effect_unknown":
        run.do(effect("n", "mail.send"), started("n"), unknown("n"))
        answer = dave.terminate(run)
    elif code == "lease_lost":
        answer = run.append(checkpoint("b"), epoch=run.epoch - 1)
    else:
        answer = run.append(
            {
                "effect_duplicate": {**mail, "key": "m2"},
                "effect_already_executed": started("m"),
                "effect_key_reused": {**mail, "resource": "other"},
                "approval_required": started("k1", arguments=ORDER),
            }[code]
        )
    answer.refused(answer.status, code)
    assert len(run.alarms(code)) == 1
    chain_is_whole(run.events(), run.id)


def test_an_ordinary_mistake_is_no_event(bot: Agent) -> None:
    run = bot.open()
    before = run.look()["version"]
    run.append(ev("checkpoint", stage=7)).refused(422, "invalid")
    run.append(ev("nonsense")).refused(422, "invalid")
    assert run.look()["version"] == before


def test_a_refused_batch_leaves_nothing_but_the_refusal(bot: Agent) -> None:
    run = bot.open(*done(effect("m", "mail.send")))
    before = len(run.events())
    run.append(checkpoint("b"), started("m")).refused(409, "effect_already_executed")
    later = run.events()[before:]
    assert len(later) == 1
    assert "effect_already_executed" in str(later[0])
    assert run.look()["stage"] == "draft"


# --- secrets ---------------------------------------------------------------------------------------------------------

IBAN = "DE89370400440532013000"
SECRET_FLOW = """
[flow.paying]
title = "Paying"
secret = ["/ask/effect/arguments/iban"]
[flow.paying.wait.check]
groups = ["legal"]
[flow.paying.effect."bank.pay"]
title = "Pay {n}"
impact = "money"
needs_approval = "check"
"""


def test_secret_fields_enter_the_events_as_digests(bot: Agent, world: World, erin: Person, victor: Person) -> None:
    world.apply(SECRET_FLOW)
    pay = {"key": "p", "system": "bank", "action": "pay", "resource": "r", "arguments": {"iban": IBAN, "n": "1"}}
    run = bot.open(flow="paying")
    run.do(paused(approval("check", name="check", ask={"effect": pay})))
    events = run.events()
    assert IBAN not in str(events)
    assert IBAN not in str(run.look(victor))
    chain_is_whole(events, run.id)
    for model in apps.get_app_config("rehydrate").get_models():
        assert rows_with(model._meta.db_table, IBAN) == 0, f"{model.__name__} holds the secret in clear"
    world.command("verify_ledger", "--run", run.id)
