"""Who may do what: each endpoint as each kind of caller, held to a table. (Contract sections 6, 7 and rule 11.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps

from .driver import Agent, Caller, World, approval, effect, paused, rows_with, signal, started, unknown

OK = (200, 201, 202, 204)
CALLERS = [
    "nobody",
    "agent",
    "other-flow",
    "other-workspace-agent",
    "victor",
    "alice",
    "grace",
    "dave",
    "erin",
    "frank",
    "mallory",
]


def caller(world: World, name: str) -> Caller:
    match name:
        case "nobody":
            return world.nobody
        case "agent":
            return world.agent("bot")
        case "other-flow":
            return world.agent("elsewhere", flows=("another-flow",))
        case "other-workspace-agent":
            return world.agent("stranger", workspace="other")
        case _:
            return world.person(name)


# What each caller gets; everybody who is not named gets 403, and those who may not see it 404 (nobody: 401).
BLIND = {"nobody": 401, "other-flow": 404, "other-workspace-agent": 404, "mallory": 404}


def expect(
    world: World, name: str, answer_of: Callable[[Caller], Any], allowed: set[str], blind: dict[str, int]
) -> None:
    answer = answer_of(caller(world, name))
    if name in blind:
        answer.refused(blind[name])
    elif name in allowed:
        assert answer.status in OK, f"{name}: {answer.status} {answer.raw[:300]!r}"
    else:
        answer.refused(403)


SEE = {"agent", "victor", "alice", "grace", "dave", "erin", "frank"}


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("what", ["", "/verdict"])
def test_who_sees_a_run(world: World, bot: Agent, name: str, what: str) -> None:
    run = bot.open()
    expect(world, name, lambda who: who.get(f"/runs/{run.id}{what}"), SEE, BLIND)


@pytest.mark.parametrize("name", ["nobody", "other-flow", "other-workspace-agent", "erin", "frank", "mallory"])
@pytest.mark.parametrize("what", ["/events", "/evidence"])
def test_who_sees_the_whole_of_a_run(world: World, bot: Agent, name: str, what: str) -> None:
    run = bot.open()
    expect(world, name, lambda who: who.get(f"/runs/{run.id}{what}"), {"erin", "frank"}, BLIND)


@pytest.mark.parametrize("name", CALLERS)
def test_who_sees_a_wait(world: World, bot: Agent, name: str) -> None:
    wait = bot.open().pause(approval())
    expect(world, name, lambda who: who.get(f"/waits/{wait['id']}"), SEE, BLIND)


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("path", ["/runs", "/waits"])
def test_lists_show_nothing_behind_the_wall(world: World, bot: Agent, name: str, path: str) -> None:
    bot.open(paused(approval()))
    answer = caller(world, name).get(path)
    if name == "nobody":
        answer.refused(401)
    else:
        assert answer.ok()["total"] == (1 if name in SEE else 0)
        assert len(answer.json["results"]) == answer.json["total"]


@pytest.mark.parametrize("name", CALLERS)
def test_who_decides(world: World, bot: Agent, name: str) -> None:
    wait = bot.open().pause(approval())
    body = {"choice": "approve", "wait_version": wait["version"]}
    expect(world, name, lambda who: who.post(f"/waits/{wait['id']}/decisions", body), {"alice"}, BLIND)
    closed = bot.get(f"/waits/{wait['id']}").ok()["status"] != "open"
    assert closed is (name == "alice")


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("act", ["takeover", "terminate", "clear", "retry", "reconcile", "handback"])
def test_who_holds_the_wheel(world: World, bot: Agent, name: str, act: str) -> None:
    """Operators, and administrators, who "also" do what operators do."""
    run = bot.open(at="sign")
    body: dict[str, Any] = {"reason": "because"}
    path = f"/runs/{run.id}/{act}"
    if act == "clear":
        run.release().ok()
        body["codes"] = ["human_gate"]
    elif act == "retry":
        run.do({"type": "failed", "error": {"code": "x", "message": "y"}, "retry_in": 60})
        body["tries"] = 1
    elif act == "reconcile":
        run.do(effect("m", "mail.send"), started("m"), unknown("m"))
        path = f"/runs/{run.id}/effects/m/reconcile"
        body["outcome"] = "executed"
    elif act == "handback":
        world.person("dave").takeover(run).fine()
        body |= {"stage": "s", "checkpoint": {"ref": "c"}}
    before = run.look()["version"]
    who = caller(world, name)
    if act == "handback" and name == "frank":  # whether an administrator gives back what dave holds is left open
        assert who.post(path, body).status in (*OK, 403, 409)
    else:
        expect(world, name, lambda c: c.post(path, body), {"dave", "frank"}, BLIND)
    if name not in ("dave", "frank"):
        changed = [e for e in run.events()[before:] if "refus" not in e["type"]]
        assert changed == [], "a refusal is the most that it leaves"


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("act", ["events", "heartbeat", "release", "recall", "rehydrate"])
def test_who_moves_a_run_on(world: World, bot: Agent, name: str, act: str) -> None:
    """Agents of its flow, and nobody else: a person takes over instead."""
    run = bot.open()
    if act == "recall":
        run.pause(approval())
    bodies: dict[str, dict[str, Any]] = {
        "events": {"epoch": run.epoch, "events": [{"type": "note", "text": "hi"}]},
        "heartbeat": {"epoch": run.epoch},
        "release": {"epoch": run.epoch},
        "recall": {"holder": "bot/w1", "reason": "new input"},
        "rehydrate": {"holder": "bot/w1", "agent": bot.card()},
    }
    if name == "mallory":  # that this is for agents, or that there is nothing: both tell nothing
        assert world.person(name).post(f"/runs/{run.id}/{act}", bodies[act]).status in (403, 404)
    else:
        expect(world, name, lambda who: who.post(f"/runs/{run.id}/{act}", bodies[act]), {"agent"}, BLIND)


@pytest.mark.parametrize("name", CALLERS)
def test_who_opens_claims_and_signals(world: World, bot: Agent, name: str) -> None:
    who = caller(world, name)
    opened = who.post("/runs", {"flow": "contract-approval", "external_id": "x", "holder": "h"})
    claimed = who.post("/claims", {"flows": ["contract-approval"], "holder": "h", "wait": 0})
    if name == "nobody":
        opened.refused(401)
        claimed.refused(401)
    elif name == "agent":
        assert (opened.status, claimed.status) == (201, 204)
    elif name == "other-workspace-agent":  # the name is its own there: another flow of another workspace
        assert opened.status in (201, 403)
        assert bot.get("/runs").ok()["total"] == 0
    else:
        opened.refused(403)
        claimed.refused(403)


def test_the_same_names_in_two_workspaces_are_two_things(world: World, bot: Agent) -> None:
    stranger = world.agent("stranger", workspace="other")
    mine, theirs = bot.open(external_id="x"), stranger.open(external_id="x")
    assert mine.id != theirs.id
    mine.pause(signal("docs", correlation="c-1"))
    theirs.pause(signal("docs", correlation="c-1"))
    assert bot.signal("e1", "docs", correlation="c-1").ok(202)["matched"] == [mine.wait("docs")["id"]]
    assert theirs.status == "waiting"


def test_an_auditor_changes_nothing(world: World, bot: Agent) -> None:
    erin = world.person("erin")
    run = bot.open()
    wait = run.pause(approval())
    for act in ("claim", "release", "comment", "escalate"):
        erin.post(f"/waits/{wait['id']}/{act}", {"comment": "x"} if act == "comment" else {"reason": "x"}).refused(403)
    assert run.wait("legal-approval")["version"] == wait["version"]


def test_a_revoked_or_left_person_has_no_way_in(world: World, bot: Agent) -> None:
    alice = world.person("alice")
    wait = bot.open().pause(approval())
    world.apply('[group.legal]\nmembers = ["bob", "carol"]\nroles = ["reviewer"]\n')
    current = bot.get(f"/waits/{wait['id']}").ok()
    answer = alice.decide(current)
    assert answer.status in (403, 404)
    assert bot.get(f"/waits/{wait['id']}").ok()["status"] == "open"


def test_a_key_prints_alone_and_differs_each_time(world: World) -> None:
    keys = [world.issue_key("agent", "--workspace", "default", "--name", "fresh") for _ in range(2)]
    assert all(len(key) >= 32 and len(key.split()) == 1 for key in keys)
    assert keys[0] != keys[1]


def test_keys_are_stored_hashed(world: World, bot: Agent) -> None:
    assert bot.key
    for model in apps.get_app_config("rehydrate").get_models():
        assert rows_with(model._meta.db_table, bot.key) == 0
