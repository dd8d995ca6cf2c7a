"""Section 2 of the contract: the ten fields, what a flow requires of them, and references instead of contents."""

from __future__ import annotations

from typing import Any

import pytest

from .driver import (
    Agent,
    Clock,
    Person,
    World,
    approval,
    callback,
    checkpoint,
    completed,
    done,
    effect,
    ev,
    external_ref,
    failed,
    paused,
    timer,
)

TEN = {
    "run_id",
    "stage",
    "checkpoint",
    "input_ref",
    "waiting_for",
    "timer_due_at",
    "external_refs",
    "effect_keys",
    "decisions",
    "failures",
}


def test_a_new_run_has_exactly_the_ten_fields_null_or_empty(bot: Agent) -> None:
    run = bot.open(at=None, input=None)
    meta = run.look()["metadata"]
    assert set(meta) == TEN
    assert meta["run_id"] == run.id
    assert [meta[k] for k in ("stage", "checkpoint", "input_ref", "timer_due_at")] == [None] * 4
    assert [meta[k] for k in ("waiting_for", "external_refs", "effect_keys", "decisions")] == [[]] * 4
    failures = meta["failures"]
    assert set(failures) == {"count", "limit", "last_error", "escalation"}
    assert (failures["count"], failures["limit"], failures["last_error"], bool(failures["escalation"])) == (
        0,
        3,
        None,
        False,
    )


def test_the_ten_fields_are_filled_by_what_happens(bot: Agent, alice: Person, clock: Clock) -> None:
    run = bot.open(
        checkpoint("filed", ref="s3://cp/2"), *done(effect("m", "mail.send")), external_ref("crm", "case", "c-7")
    )
    alice.approve(run.pause(approval("a1")), comment="ok")
    run.resume()
    run.do(failed(retry_in=1))
    clock.advance(seconds=2)
    run.resume()
    run.do(paused(callback("supplier", **{"from": "ACME"}), timer("sleep", 600)))
    meta = run.look()["metadata"]
    assert set(meta) == TEN
    assert meta["stage"] == "filed"
    assert set(meta["checkpoint"]) == {"seq", "ref", "digest"}
    assert (meta["checkpoint"]["ref"], meta["input_ref"]) == ("s3://cp/2", "s3://in/17")
    waiting = {w["name"]: w for w in meta["waiting_for"]}
    assert set(waiting["supplier"]) == {"name", "kind", "from", "until", "on_timeout"}
    assert (waiting["supplier"]["kind"], waiting["supplier"]["from"], waiting["supplier"]["on_timeout"]) == (
        "callback",
        "ACME",
        "review",
    )
    assert meta["timer_due_at"] == run.wait("sleep")["due_at"]
    assert meta["external_refs"] == [{"system": "crm", "type": "case", "id": "c-7"}]
    assert meta["effect_keys"] == [{"key": "m", "state": "executed"}]
    assert [set(d) for d in meta["decisions"]] == [{"kind", "choice", "by", "at", "conditions"}]
    assert (meta["decisions"][0]["kind"], meta["decisions"][0]["choice"]) == ("wait", "approve")
    assert "alice" in str(meta["decisions"][0]["by"])
    assert set(meta["failures"]) == {"count", "limit", "last_error", "escalation"}
    assert (meta["failures"]["count"], meta["failures"]["limit"]) == (1, 3)


def test_nothing_is_waited_for_once_it_is_over(bot: Agent) -> None:
    run = bot.open()
    run.pause(timer())
    assert run.look()["metadata"]["timer_due_at"]
    run.agent.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "new input"}).ok()
    meta = run.look()["metadata"]
    assert (meta["waiting_for"], meta["timer_due_at"]) == ([], None)


def test_the_envelope_carries_the_same_ten(bot: Agent, alice: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    envelope = run.resume()
    assert set(envelope["metadata"]) == TEN
    assert envelope["metadata"]["run_id"] == run.id


@pytest.mark.parametrize("lacks", ["checkpoint", "input_ref"])
def test_what_a_flow_requires_and_is_missing_goes_to_review(bot: Agent, alice: Person, lacks: str) -> None:
    how: dict[str, Any] = {"at": None} if lacks == "checkpoint" else {"input": None}
    run = bot.open(**how)
    run.pause(approval())
    verdict = run.verdict
    assert (verdict["outcome"], verdict["missing"]) == ("review", [lacks])
    assert verdict["reasons"][0]["code"] == "metadata_missing"
    assert run.status == "review"


def test_nothing_is_missing_when_all_is_there(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval())
    assert run.verdict["missing"] == []
    assert run.outcome == "wait"


@pytest.mark.parametrize("field", ["stage", "external_refs", "effect_keys"])
def test_a_flow_may_require_other_fields_of_the_ten(bot: Agent, world: World, field: str) -> None:
    flow = world.variant("strict", required=[field])
    run = bot.open(flow=flow, at=None)
    run.pause(approval())
    assert run.verdict["missing"] == [field]


def test_a_clear_may_supply_what_is_missing(bot: Agent, alice: Person, dave: Person) -> None:
    run = bot.open(at=None, input=None)
    wait = run.pause(approval())
    assert sorted(run.verdict["missing"]) == ["checkpoint", "input_ref"]
    given = {"stage": "draft", "checkpoint": {"ref": "s3://cp/x"}, "input": {"ref": "s3://in/x", "digest": "d"}}
    dave.clear(run, "metadata_missing", **given).fine()
    meta = run.look()["metadata"]
    assert (meta["checkpoint"]["ref"], meta["input_ref"], meta["stage"]) == ("s3://cp/x", "s3://in/x", "draft")
    assert (run.verdict["missing"], run.outcome) == ([], "wait")
    alice.approve(run.agent.get(f"/waits/{wait['id']}").ok())
    assert run.outcome == "continue"


def test_missing_metadata_counts_in_the_metrics(bot: Agent, frank: Person) -> None:
    run = bot.open(at=None)
    run.pause(timer())
    figures = frank.get("/metrics/recovery", flow="contract-approval").ok()["missing_metadata"]
    assert set(figures) == {"count", "of", "share"}
    assert figures["count"] >= 1


def test_inline_data_is_small(bot: Agent) -> None:
    run = bot.open()
    run.do(checkpoint("b", data={"x": "y" * 15_000}))
    answer = run.append(checkpoint("c", data={"x": "y" * 17_000}))
    answer.refused(413 if answer.status == 413 else 422)
    assert run.look()["stage"] == "b"


def test_state_may_be_large_and_stays_out_of_the_events(bot: Agent) -> None:
    run = bot.open()
    run.do(checkpoint("b", state={"memory": "secret-" * 60_000}))
    assert "secret-secret-" not in str(run.events())
    run.release().ok()
    assert "memory" in str(run.resume()["checkpoint"]), "the agent gets its state back"


def test_next_tells_people_what_the_agent_means_to_do(bot: Agent) -> None:
    run = bot.open(checkpoint("b", next=["send the contract", "file it"]))
    assert "send the contract" in str(run.look())


def test_a_completed_run_keeps_its_ten_fields(bot: Agent) -> None:
    run = bot.open(*done(effect("m", "mail.send")))
    run.do(ev("note", text="done"), completed())
    meta = run.look()["metadata"]
    assert (set(meta), meta["effect_keys"]) == (TEN, [{"key": "m", "state": "executed"}])
