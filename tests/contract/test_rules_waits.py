"""Rules 4, 5, 11, 15 and 16 of the contract: a wait closes once, by a person who may, on the version they saw."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from .driver import (
    ORDER,
    Agent,
    Clock,
    Person,
    Run,
    World,
    approval,
    at_once,
    callback,
    checkpoint,
    effect,
    order,
    paused,
    signal,
    started,
    statuses,
    timer,
)
from .sweep import sweep

SCHEMA = {"type": "object", "properties": {"amount": {"type": "string"}}, "required": ["amount"]}


@pytest.fixture
def asked(bot: Agent) -> Run:
    """A run that waits for legal."""
    run = bot.open(order())
    run.pause(approval(effect="k1"))
    return run


# --- rule 4: a wait closes once --------------------------------------------------------------------------------------


def test_a_decision_says_who_what_and_when(asked: Run, alice: Person) -> None:
    wait = asked.wait("legal-approval")
    made = alice.approve(wait, comment="Fine by me", reason="It is within budget")
    assert (made["kind"], made["wait"], made["wait_version"], made["choice"]) == (
        "wait",
        wait["id"],
        wait["version"],
        "approve",
    )
    assert "alice" in str(made["decided_by"])
    assert made["decided_at"]
    assert (made["comment"], made["reason"]) == ("Fine by me", "It is within budget")
    closed = asked.wait("legal-approval")
    assert (closed["status"], closed["decision"]["id"]) == ("satisfied", made["id"])
    assert closed["closed_at"]


def test_the_second_decider_is_told_who_was_quicker(asked: Run, alice: Person, bob: Person) -> None:
    wait = asked.wait("legal-approval")
    alice.approve(wait)
    doc = bob.decide(wait, "reject", reason="no").refused(409, "wait_closed")
    assert "alice" in str(doc["wait"])
    assert doc["wait"]["decision"]["choice"] == "approve"
    assert doc["wait"]["decision"]["decided_at"]
    assert len(asked.decisions()) == 1


@pytest.mark.django_db(transaction=True)
def test_two_deciders_at_once_one_wins(bot: Agent, alice: Person, bob: Person) -> None:
    for _ in range(3):
        run = bot.open()
        wait = run.pause(approval())
        answers = at_once(
            partial(alice.decide, wait),
            partial(bob.decide, wait, "reject", reason="no"),
        )
        assert statuses(answers) == [201, 409]
        loser = next(a for a in answers if a.status == 409).refused(409, "wait_closed")
        winner = next(a for a in answers if a.status == 201).json
        assert loser["wait"]["decision"]["choice"] == winner["choice"]
        assert len(run.decisions()) == 1


@pytest.mark.django_db(transaction=True)
def test_one_person_with_two_tabs_decides_once(bot: Agent, alice: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    answers = at_once(*[lambda: alice.decide(wait)] * 4)
    assert statuses(answers) == [201, 409, 409, 409]
    assert len(run.decisions()) == 1


@pytest.fixture
def quorum(bot: Agent) -> Run:
    """A run that needs two of legal. The requester is not carol, so three may vote."""
    run = bot.open()
    run.pause(approval("two", name="two-of-legal", ask={"schema": SCHEMA}))
    return run


def test_below_its_quorum_a_vote_leaves_the_wait_open(quorum: Run, alice: Person, bob: Person) -> None:
    wait = quorum.wait("two")
    alice.approve(wait)
    now = quorum.wait("two")
    assert (now["status"], len(now["votes"]), quorum.outcome) == ("open", 1, "wait")
    bob.approve(now)
    assert (quorum.wait("two")["status"], quorum.outcome) == ("satisfied", "continue")


def test_one_vote_a_person(quorum: Run, alice: Person) -> None:
    alice.approve(quorum.wait("two"))
    alice.decide(quorum.wait("two")).refused(409, "already_voted")
    assert len(quorum.wait("two")["votes"]) == 1


def test_the_first_rejection_closes_it(quorum: Run, alice: Person, bob: Person) -> None:
    alice.approve(quorum.wait("two"))
    bob.reject(quorum.wait("two"))
    assert quorum.wait("two")["status"] == "rejected"


@pytest.mark.django_db(transaction=True)
def test_two_votes_at_once_both_count(bot: Agent, alice: Person, bob: Person) -> None:
    run = bot.open()
    wait = run.pause(approval("two", name="two-of-legal"))
    assert statuses(at_once(lambda: alice.decide(wait), lambda: bob.decide(wait))) == [201, 201]
    assert (run.wait("two")["status"], run.outcome) == ("satisfied", "continue")


def test_conditions_raise_the_version_and_void_the_other_votes(bot: Agent, alice: Person, bob: Person) -> None:
    run = bot.open(effect("p", "erp.reserve", arguments=ORDER, approval="two-of-legal"))
    first = run.pause(approval("two", name="two-of-legal", effect="p", ask={"schema": SCHEMA}))
    alice.approve(first)
    limit = [{"pointer": "/amount", "op": "<=", "value": "150.00"}]
    bob.decide(run.wait("two"), "approve_with_conditions", conditions=limit).ok(201)
    now = run.wait("two")
    assert (now["status"], now["version"] > first["version"]) == ("open", True)
    assert [str(v) for v in now["votes"] if "alice" in str(v)] == [], "alice approved something else"
    alice.decide(first).refused(409, "stale_decision")
    alice.approve(now)
    assert run.outcome == "continue"


def test_an_edit_raises_the_version_and_voids_the_other_votes(bot: Agent, alice: Person, bob: Person) -> None:
    run = bot.open(effect("p", "erp.reserve", arguments=ORDER, approval="two-of-legal"))
    first = run.pause(approval("two", name="two-of-legal", effect="p", ask={"schema": SCHEMA}))
    alice.approve(first)
    bob.decide(run.wait("two"), "edit", arguments={**ORDER, "amount": "80.00"}).ok(201)
    now = run.wait("two")
    assert (now["status"], now["version"] > first["version"]) == ("open", True)
    assert [str(v) for v in now["votes"] if "alice" in str(v)] == []


# --- rule 5: a decision names its wait and the version they saw ------------------------------------------------------


def test_an_answer_to_an_older_version_is_stale(asked: Run, alice: Person, dave: Person) -> None:
    old = asked.wait("legal-approval")
    dave.post(f"/waits/{old['id']}/extend", {"due_in": 200000, "reason": "holidays"}).fine()
    new = asked.wait("legal-approval")
    assert new["version"] > old["version"]
    doc = alice.decide(old).refused(409, "stale_decision")
    assert doc["wait"]["version"] == new["version"]
    assert asked.decisions() == []
    alice.approve(new)


def test_a_decision_without_a_version_is_no_decision(asked: Run, alice: Person) -> None:
    wait = asked.wait("legal-approval")
    alice.post(f"/waits/{wait['id']}/decisions", {"choice": "approve"}).refused(422, "invalid")
    alice.decide(wait, version=wait["version"] + 1).refused(409, "stale_decision")
    assert asked.outcome == "wait"


def test_the_answer_to_one_run_is_never_taken_for_another(bot: Agent, alice: Person) -> None:
    one, two = bot.open(), bot.open()
    first, second = one.pause(approval()), two.pause(approval())
    alice.approve(first)
    assert (one.outcome, two.outcome) == ("continue", "wait")
    assert bot.get(f"/waits/{second['id']}").ok()["decision"] is None


# --- rule 11: who decides --------------------------------------------------------------------------------------------


def test_agents_never_decide(asked: Run, bot: Agent) -> None:
    wait = asked.wait("legal-approval")
    body = {"choice": "approve", "wait_version": wait["version"]}
    bot.post(f"/waits/{wait['id']}/decisions", body).refused(403, "agents_cannot_decide")
    assert asked.outcome == "wait"


@pytest.mark.parametrize("action", ["takeover", "handback", "terminate", "retry", "clear"])
def test_agents_never_hold_the_wheel(asked: Run, bot: Agent, action: str) -> None:
    body = {
        "handback": {"reason": "r", "stage": "s", "checkpoint": {"ref": "c"}},
        "retry": {"reason": "r", "tries": 1},
        "clear": {"reason": "r", "codes": ["human_gate"]},
    }.get(action, {"reason": "r"})
    bot.post(f"/runs/{asked.id}/{action}", body).refused(403, "agents_cannot_decide", "forbidden")
    assert asked.status == "waiting"


@pytest.mark.parametrize("by", ["requested_by", "key's owner"])
def test_the_requester_is_not_among_the_deciders(world: World, carol: Person, by: str) -> None:
    agent = world.agent("owned", owner="carol") if by == "key's owner" else world.agent("bot")
    run = agent.open(requested_by="carol" if by == "requested_by" else None)
    wait = run.pause(approval())
    carol.decide(wait).refused(403, "self_approval")
    carol.decide(wait, "reject", reason="no").refused(403, "self_approval")
    assert run.outcome == "wait"


def test_the_requester_decides_where_the_flow_does_not_exclude_them(bot: Agent, carol: Person) -> None:
    run = bot.open(requested_by="carol")
    carol.approve(run.pause(approval(name="other-approval")))
    assert run.outcome == "continue"


def test_the_requester_does_not_settle_it_by_the_back_door(bot: Agent, world: World) -> None:
    """`clear`, `retry`, `reconcile` and hand-back exclude the requester too."""
    dave, other = world.person("dave"), world.agent("owned", owner="dave")
    run = other.open(requested_by=None, at="sign")
    run.do(effect("m", "mail.send"), started("m"), paused(approval()))
    assert "effect_unknown" in run.codes
    dave.reconcile(run, "m", "executed").refused(403, "self_approval")
    dave.clear(run, "human_gate").refused(403, "self_approval")
    dave.retry(run, tries=1).refused(403, "self_approval")
    assert run.state("m") == "unknown"


def test_somebody_outside_the_groups_is_not_eligible(asked: Run, grace: Person, dave: Person) -> None:
    wait = asked.wait("legal-approval")
    grace.decide(wait).refused(403, "not_eligible")
    dave.decide(wait).refused(403, "not_eligible", "forbidden")
    assert asked.outcome == "wait"


def test_a_gate_that_nobody_can_satisfy_is_refused_at_the_pause(bot: Agent, world: World) -> None:
    world.apply(
        """
        [group.empty]
        members = []
        [flow.nobody-there]
        [flow.nobody-there.wait.check]
        groups = ["empty"]
        [flow.nobody-there.wait.three]
        groups = ["legal"]
        quorum = 4
        """
    )
    for name in ("check", "three"):
        run = bot.open(flow="nobody-there")
        run.append(paused(approval(name, name=name))).refused(422, "unsatisfiable_gate")
        assert run.status == "running"


def test_if_people_leave_later_the_wait_goes_to_review(bot: Agent, world: World) -> None:
    run = bot.open()
    run.pause(approval())
    world.apply('[group.legal]\nmembers = []\nroles = ["reviewer"]\n')
    assert run.outcome == "review"
    assert "unsatisfiable_gate" in run.codes
    assert run.status == "review"


# --- rule 15: taking over and handing back ---------------------------------------------------------------------------


def test_taking_over_supersedes_the_waits_and_fences_the_agent(bot: Agent, alice: Person, dave: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    dave.takeover(run).fine()
    assert (run.status, run.outcome) == ("taken_over", "wait")
    assert "taken_over" in run.codes
    assert run.wait("legal-approval")["status"] == "superseded"
    alice.decide(wait).refused(409, "wait_closed")
    envelope = run.rehydrate()
    assert envelope.status == 409 or envelope.json["lease"] is None
    assert bot.claim().status == 204


def test_taking_over_ends_a_live_lease(bot: Agent, dave: Person) -> None:
    run = bot.open(effect("m", "mail.send"), started("m"))
    dave.takeover(run).fine()
    run.append(checkpoint("b")).refused(409, "lease_lost")
    assert (run.status, run.state("m")) == ("taken_over", "unknown")


def test_handing_back_makes_it_ready_where_the_person_said(bot: Agent, dave: Person) -> None:
    run = bot.open(order())
    run.pause(approval(effect="k1"))
    dave.takeover(run).fine()
    by_hand = {"key": "k1", "receipt": {"id": "x-by-hand", "status": "done"}}
    dave.handback(
        run, stage="filed", checkpoint={"ref": "s3://cp/filed"}, effects=[by_hand], note="Ordered by phone"
    ).fine()
    assert (run.decisions()[-1]["kind"], run.status) == ("handback", "ready")
    envelope = run.resume()
    assert (envelope["run"]["stage"], envelope["checkpoint"]["ref"]) == ("filed", "s3://cp/filed")
    assert (run.state("k1"), run.effect("k1")["receipt"]["id"]) == ("executed", "x-by-hand")


def test_a_hand_back_can_answer_what_was_open(bot: Agent, dave: Person, world: World) -> None:
    world.apply('[group.legal]\nmembers = ["alice", "dave"]\nroles = ["reviewer"]\n')
    run = bot.open()
    wait = run.pause(approval(name="other-approval"))
    dave.takeover(run).fine()
    dave.handback(run, answers=[{"wait": wait["id"], "choice": "approve"}]).fine()
    assert run.status == "ready"
    assert any(d["kind"] == "handback" for d in run.decisions())


def test_hand_back_reconciles_each_unknown_effect(bot: Agent, dave: Person) -> None:
    run = bot.open(effect("m", "mail.send"), started("m"))
    dave.takeover(run).fine()
    doc = dave.handback(run).refused(409, "effect_unknown")
    assert doc["effect"]["key"] == "m"
    assert run.status == "taken_over"
    dave.handback(run, effects=[{"key": "m", "receipt": {"id": "x1", "status": "done"}}]).fine()
    assert (run.status, run.state("m")) == ("ready", "executed")


def test_a_hand_back_tells_what_was_done_by_hand_without_a_key(bot: Agent, dave: Person) -> None:
    run = bot.open()
    dave.takeover(run).fine()
    by_hand = {"system": "erp", "action": "reserve", "resource": "r-9", "receipt": {"id": "x9", "status": "done"}}
    dave.handback(run, effects=[by_hand]).fine()
    told = run.resume()["effects"]
    assert [(e["state"], e["resource"], e["receipt"]["id"]) for e in told] == [("executed", "r-9", "x9")]


def test_only_what_is_held_can_be_handed_back(bot: Agent, dave: Person) -> None:
    run = bot.open()
    answer = dave.handback(run)
    assert 400 <= answer.status < 500
    assert run.status == "running"


def test_every_act_of_a_person_has_a_reason(asked: Run, dave: Person) -> None:
    for action in ("takeover", "terminate", "clear", "retry"):
        answer = dave.post(f"/runs/{asked.id}/{action}", {"codes": ["human_gate"]} if action == "clear" else {})
        answer.refused(422, "invalid")
    assert asked.status == "waiting"


# --- rule 16: the policy at the pause --------------------------------------------------------------------------------


def test_the_policy_that_counts_is_the_one_at_the_pause(bot: Agent, alice: Person, world: World) -> None:
    """A flow that turns to `continue` after the pause does not soften a no to the older question."""
    flow = world.variant("moving", on_reject="terminate")
    run = bot.open(flow=flow)
    wait = run.pause(approval())
    world.variant("moving", on_reject="continue")
    alice.reject(run.wait("legal-approval"))
    assert (run.status, wait["id"]) == ("terminated", run.wait("legal-approval")["id"])


@pytest.mark.parametrize("change", ["members", "quorum"])
def test_changing_people_or_policy_raises_the_version(asked: Run, alice: Person, world: World, change: str) -> None:
    old = asked.wait("legal-approval")
    if change == "members":
        world.apply('[group.legal]\nmembers = ["alice", "bob"]\nroles = ["reviewer"]\n')
    else:
        world.apply(
            '[flow.contract-approval.wait.legal-approval]\ngroups = ["legal"]\nquorum = 2\nexclude_requester = true\n'
        )
    assert asked.wait("legal-approval")["version"] > old["version"]
    alice.decide(old).refused(409, "stale_decision")


def test_waits_that_a_change_does_not_touch_keep_their_version(asked: Run, alice: Person, world: World) -> None:
    old = asked.wait("legal-approval")
    world.apply('[group.leads]\nmembers = ["grace", "frank"]\nroles = ["reviewer"]\n')
    assert asked.wait("legal-approval")["version"] == old["version"]
    alice.approve(old)


def test_the_same_file_twice_changes_nothing(asked: Run, world: World) -> None:
    from .driver import CAST

    old = asked.wait("legal-approval")
    world.apply(CAST)
    assert asked.wait("legal-approval")["version"] == old["version"]


# --- waits as people handle them -------------------------------------------------------------------------------------


def test_claim_and_release_say_who_looks_at_it(asked: Run, alice: Person, bob: Person) -> None:
    wait = asked.wait("legal-approval")
    alice.post(f"/waits/{wait['id']}/claim").fine()
    assert "alice" in str(asked.wait("legal-approval"))
    alice.post(f"/waits/{wait['id']}/release").fine()
    assert "alice" not in str(asked.wait("legal-approval"))


def test_assign_extend_escalate_comment_and_questions(asked: Run, alice: Person, dave: Person) -> None:
    wait_id = asked.wait("legal-approval")["id"]
    dave.post(f"/waits/{wait_id}/assign", {"to": "bob"}).fine()
    assert "bob" in str(asked.wait("legal-approval")["assignees"])
    alice.post(f"/waits/{wait_id}/comment", {"comment": "Who is ACME?"}).fine()
    alice.post(f"/waits/{wait_id}/request_info", {"comment": "Send the offer"}).fine()
    texts = str([e["payload"] for e in asked.events()])
    assert "Who is ACME?" in texts
    assert "Send the offer" in texts
    assert asked.wait("legal-approval")["status"] == "open"


# --- shapes of a pause -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"due_in": None},
        {"due_in": 0},
        {"due_in": -5},
        {"due_in": 1.5},
        {"due_in": "60"},
        {"due_in": True},
        {"due_in": 11 * 366 * 86400},
        {"due_in": None, "due_at": "2001-01-01T00:00:00Z"},
        {"due_in": None, "due_at": "2031-01-01T00:00:00"},
        {"due_in": None, "due_at": "tomorrow"},
        {"due_in": None, "due_at": "9999-12-31T23:59:59Z"},
        {"due_in": 60, "due_at": "2031-01-01T00:00:00Z"},
        {"on_timeout": "shrug"},
        {"kind": "prayer"},
        {"name": "not-in-the-flow"},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_wait_that_makes_no_sense_is_refused(bot: Agent, bad: dict[str, Any]) -> None:
    run = bot.open()
    wait = {k: v for k, v in {**approval(), **bad}.items() if v is not None}
    doc = run.append(paused(wait)).refused(422, "invalid")
    assert doc["errors"][0]["pointer"].startswith("/events/0")
    assert (run.status, run.look()["waits"]) == ("running", [])


def test_timers_callbacks_and_signals_are_named_freely(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(timer("whenever"), callback("anything"), signal("something")))
    assert [w["status"] for w in run.look()["waits"]] == ["open"] * 3


def test_deadlines_come_back_in_utc(bot: Agent) -> None:
    run = bot.open()
    wait = run.pause(approval(due_at="2030-06-01T12:00:00+02:00"))
    assert wait["due_at"].startswith("2030-06-01T10:00:00")
    assert wait["due_at"].endswith(("Z", "+00:00"))


def test_on_timeout_defaults_to_review(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    assert run.pause(callback("c", due_in=60))["on_timeout"] == "review"
    clock.advance(seconds=61)
    sweep()
    assert run.status == "review"


def test_ending_a_run_closes_its_waits(asked: Run, alice: Person, dave: Person) -> None:
    wait = asked.wait("legal-approval")
    dave.terminate(asked).fine()
    assert asked.status == "terminated"
    assert asked.wait("legal-approval")["status"] == "cancelled"
    alice.decide(wait).refused(409, "wait_closed", "run_ended")


def test_the_requester_does_not_hand_back_either(world: World, carol: Person) -> None:
    world.apply('[group.operators]\nmembers = ["dave", "carol"]\nroles = ["operator"]\n')
    run = world.agent("bot").open(requested_by="carol")
    carol.takeover(run)
    if run.status == "taken_over":
        carol.handback(run).refused(403, "self_approval")
        assert run.status == "taken_over"


def test_where_no_gate_excludes_the_requester_they_may_settle_it(world: World, bot: Agent, dave: Person) -> None:
    world.apply("[flow.easy]\ngated_stages = ['sign']\n[flow.easy.wait.check]\nexclude_requester = false\n")
    run = bot.open(flow="easy", requested_by="dave", at="sign")
    run.release().ok()
    dave.clear(run, "human_gate").fine()
    assert run.status == "ready"


def test_a_group_of_that_name_behind_another_wall_decides_nothing(
    asked: Run, world: World, alice: Person, mallory: Person
) -> None:
    world.apply('[group.legal]\nworkspace = "other"\nmembers = ["mallory"]\nroles = ["reviewer"]\n')
    wait = asked.wait("legal-approval")
    mallory.decide(wait).refused(404, "not_found")
    alice.approve(wait)


@pytest.mark.django_db(transaction=True)
def test_two_operators_who_take_over_at_once(bot: Agent, dave: Person, frank: Person) -> None:
    run = bot.open()
    answers = at_once(partial(dave.takeover, run), partial(frank.takeover, run))
    assert sorted(a.status >= 400 for a in answers) == [False, True]
    assert {a.status for a in answers if a.status >= 400} == {409}
    assert len(run.events("taken_over")) == 1


def test_what_the_reviewer_saw_is_kept(asked: Run, alice: Person) -> None:
    wait = asked.wait("legal-approval")
    made = alice.approve(wait)
    assert made["seen"] is not None or made["wait_version"] == wait["version"]
    assert made["wait_version"] == wait["version"]


def test_an_extension_is_in_force(asked: Run, alice: Person, dave: Person, clock: Clock) -> None:
    wait = asked.wait("legal-approval")
    dave.post(f"/waits/{wait['id']}/extend", {"due_in": 200000, "reason": "holidays"}).fine()
    clock.advance(seconds=100000)
    sweep()
    alice.approve(asked.wait("legal-approval"))
    assert asked.outcome == "continue"


def test_escalating_by_hand_lets_the_leads_decide(bot: Agent, dave: Person, grace: Person) -> None:
    run = bot.open()
    wait = run.pause(approval("e", name="escalating"))
    grace.decide(wait).refused(403, "not_eligible")
    dave.post(f"/waits/{wait['id']}/escalate", {"reason": "urgent"}).fine()
    grace.approve(run.wait("e"))
    assert run.outcome == "continue"


def test_nobody_behind_the_request_decides(world: World, alice: Person, bob: Person, carol: Person) -> None:
    """`requested_by` cannot take the place of the key's owner: both are out."""
    run = world.agent("owned", owner="carol").open(requested_by="alice")
    wait = run.pause(approval())
    carol.decide(wait).refused(403, "self_approval")
    alice.decide(wait).refused(403, "self_approval")
    bob.approve(wait)


def test_the_owner_of_the_key_that_asks_does_not_decide(world: World, alice: Person, bob: Person) -> None:
    """Another agent went on with the run and asks: its owner is behind this request, whoever opened the run."""
    run = world.agent("first", owner="carol").open(requested_by=None)
    run.release().ok()
    second = world.agent("second", owner="bob")
    run.resume(by=second)
    run.do(paused(approval()), by=second)
    wait = run.wait("legal-approval")
    bob.decide(wait).refused(403, "self_approval")
    alice.approve(wait)


def test_the_vote_of_somebody_who_left_does_not_count(quorum: Run, alice: Person, bob: Person, world: World) -> None:
    alice.approve(quorum.wait("two"))
    world.apply('[group.legal]\nmembers = ["bob", "carol"]\nroles = ["reviewer"]\n')
    bob.approve(quorum.wait("two"))
    assert (quorum.wait("two")["status"], quorum.outcome) == ("open", "wait")
    world.person("carol").approve(quorum.wait("two"))
    assert quorum.wait("two")["status"] == "satisfied"


@pytest.fixture
def priced(bot: Agent) -> Run:
    """A run that needs two of legal for an order."""
    run = bot.open(effect("p", "erp.reserve", arguments=ORDER, approval="two-of-legal"))
    run.pause(approval("two", name="two-of-legal", effect="p", ask={"schema": SCHEMA}))
    return run


@pytest.mark.parametrize(("amount", "code"), [("140.00", ""), ("500.00", "condition_unmet")])
def test_conditions_of_one_hold_when_another_says_yes_to_them(
    priced: Run, alice: Person, bob: Person, amount: str, code: str
) -> None:
    limit = [{"pointer": "/amount", "op": "<=", "value": "150.00"}]
    alice.decide(priced.wait("two"), "approve_with_conditions", conditions=limit).ok(201)
    bob.approve(priced.wait("two"))
    assert priced.resume()["waits"][0]["decision"]["conditions"] == limit
    answer = priced.start("p", arguments={**ORDER, "amount": amount})
    if code:
        answer.refused(409, code)
    else:
        assert answer.ok()["effects"][0]["granted"] is True


def test_an_edit_of_one_is_what_runs_when_another_says_yes_to_it(priced: Run, alice: Person, bob: Person) -> None:
    edited = {**ORDER, "amount": "80.00"}
    alice.decide(priced.wait("two"), "edit", arguments=edited).ok(201)
    shown = priced.wait("two")
    assert shown["ask"]["effect"]["arguments"] == edited, "bob sees what he says yes to"
    bob.approve(shown)
    assert priced.resume()["waits"][0]["decision"]["arguments"] == edited
    assert priced.start("p", arguments=edited).ok()["effects"][0]["granted"] is True


def test_two_edits_that_differ_are_no_quorum(priced: Run, alice: Person, bob: Person) -> None:
    alice.decide(priced.wait("two"), "edit", arguments={**ORDER, "amount": "80.00"}).ok(201)
    bob.decide(priced.wait("two"), "edit", arguments={**ORDER, "amount": "70.00"}).ok(201)
    assert (priced.wait("two")["status"], len(priced.wait("two")["votes"])) == ("open", 1)
    alice.approve(priced.wait("two"))
    priced.resume()
    assert priced.effect("p")["arguments"]["amount"] == "70.00"


def test_terminating_is_a_decision(asked: Run, dave: Person) -> None:
    dave.terminate(asked, "The customer left").fine()
    (made,) = asked.decisions()
    assert (made["kind"], made["reason"], "dave" in str(made["decided_by"])) == ("terminate", "The customer left", True)


def test_an_approval_cannot_end_before_it_begins(asked: Run, alice: Person) -> None:
    alice.decide(asked.wait("legal-approval"), expires_at="2020-01-01T00:00:00Z").refused(422, "invalid")
    assert asked.outcome == "wait"


def test_a_run_that_its_deadline_ended_is_over_for_whoever_asks_before_the_sweeper(
    bot: Agent, dave: Person, world: World, clock: Clock
) -> None:
    """Rule 6: sweepers only tidy up, so that nobody gets in between the deadline and what comes of it."""
    run = bot.open(flow=world.variant("brief", on_reject="compensate"))
    run.pause(approval(due_in=60, on_timeout="reject"))
    clock.advance(seconds=61)
    dave.clear(run, "timed_out").refused(409, "run_ended")
    dave.takeover(run).refused(409, "run_ended")
    assert run.status == "terminated"
