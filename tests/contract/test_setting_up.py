"""Section 7 of the contract as far as commands show it: apply, issue_key, and the alarm of a run that nobody claims."""

from __future__ import annotations

import pytest
from django.core.management import CommandError

from .driver import CAST, Agent, Clock, Person, World, approval
from .sweep import sweep


def test_the_same_file_twice_changes_nothing(world: World) -> None:
    first = world.apply('[group.night]\nmembers = ["olga"]\n')
    assert "night" in first
    assert "olga" in first
    again = world.apply('[group.night]\nmembers = ["olga"]\n')
    assert "night" not in again
    assert again == world.apply(CAST)


def test_a_change_is_printed(world: World) -> None:
    world.apply('[group.night]\nmembers = ["olga", "petr"]\n')
    printed = world.apply('[group.night]\nmembers = ["olga"]\n')
    assert "petr" in printed
    assert "olga" not in printed


def test_a_group_is_in_default_and_reviews_when_nothing_else_is_said(world: World, bot: Agent) -> None:
    world.apply('[group.night]\nmembers = ["olga"]\n[flow.night-shift.wait.check]\ngroups = ["night"]\n')
    run = bot.open(flow="night-shift")
    world.person("olga").approve(run.pause(approval("check", name="check")))
    assert run.outcome == "continue"


@pytest.mark.parametrize(
    "bad",
    [
        "[flow.x\n",
        "[nonsense.x]\n",
        "[flow.x]\nnonsense = 1\n",
        "[flow.x]\nworkspace = 'not-there'\n",
        "[flow.x]\non_reject = 'shrug'\n",
        "[flow.x]\nrequired = ['shoe_size']\n",
        "[flow.x]\nmax_failures = 0\n",
        "[flow.x]\nmax_failures = 'three'\n",
        "[flow.x.wait.y]\nquorum = 0\n",
        "[flow.x.wait.y]\nremind_every = 'often'\n",
        "[flow.x.effect.'a.b']\nimpact = 'huge'\n",
        "[group.x]\nroles = ['emperor']\n",
        "[group.x]\nmembers = 'alice'\n",
    ],
    ids=repr,
)
def test_a_file_that_makes_no_sense_changes_nothing(world: World, bot: Agent, bad: str) -> None:
    with pytest.raises(CommandError) as said:
        world.apply(f'[group.night]\nmembers = ["olga"]\n{bad}')
    assert len(str(said.value)) > 20
    with pytest.raises(CommandError):
        world.issue_key("person", "--user", "olga")


def test_a_key_for_nobody_is_refused(world: World) -> None:
    for args in (("person", "--user", "ghost"), ("agent", "--workspace", "ghost", "--name", "x")):
        with pytest.raises(CommandError):
            world.issue_key(*args)


def test_a_key_without_a_flow_allows_every_flow_of_its_workspace(bot: Agent, world: World) -> None:
    for flow in ("contract-approval", "never-declared", world.variant("declared-later")):
        bot.open(flow=flow)


def test_a_key_with_flows_allows_these(world: World) -> None:
    two = world.agent("two", flows=("contract-approval", "other"))
    two.open()
    two.open(flow="other")
    two.open_raw(flow="third").refused(403, "forbidden")


def test_an_undeclared_flow_has_the_defaults(bot: Agent, alice: Person) -> None:
    run = bot.open(flow="nobody-declared-it", at=None)
    look = run.look()
    assert look["metadata"]["failures"]["limit"] == 3
    opened = bot.open_raw(flow="nobody-declared-it").ok(201)
    assert opened["lease"]["seconds"] == 60
    run.pause(approval())
    assert run.verdict["missing"] == ["checkpoint"]
    other = bot.open(flow="nobody-declared-it")
    alice.reject(other.pause(approval()))
    assert (other.outcome, other.codes) == ("review", ["rejected"])


def test_a_run_that_nobody_claims_is_an_alarm(bot: Agent, clock: Clock) -> None:
    run = bot.open(holder=None)
    clock.advance(seconds=299)
    sweep()
    assert run.events("unclaimed") == []
    clock.advance(seconds=2)
    sweep()
    sweep()
    assert len(run.events("unclaimed")) == 1
    assert (run.status, bot.claim().status) == ("ready", 200)
