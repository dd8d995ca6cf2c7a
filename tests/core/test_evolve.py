"""What each fact does to a state: one story a subject. The rules of when a fact is recorded are tested elsewhere."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from rehydrate.core import events as ev
from rehydrate.core import state as st
from rehydrate.core.refusals import Refusal
from rehydrate.core.state import Run, State, evolve, fold

from .kit import BOT, RUN, START, Story, approval, callback, event, person, plan, policy

GATED = policy(
    required=[],
    wait={"ok": {"groups": ["legal"]}, "two": {"groups": ["legal"], "quorum": 2}},
    effect={"order": {"impact": "money", "needs_approval": "ok", "compensation": "cancel"}},
)


def test_every_fact_has_its_handler_and_its_type() -> None:
    assert set(ev.BY_TYPE.values()) == set(st._HANDLERS)
    assert all(ev.BY_TYPE[ev.type_of(msgspec.convert(_least(kind), kind))] is kind for kind in ev.BY_TYPE.values())


def _least(kind: type[ev.Fact]) -> dict[str, object]:
    """The smallest payload that makes a fact of this kind."""
    some: dict[object, object] = {str: "x", int: 1, bool: True}
    made: dict[str, object] = {"type": kind.__struct_config__.tag}
    for field in msgspec.structs.fields(kind):
        if field.required:
            made[field.encode_name] = some.get(field.type, {} if "dict" in str(field.type) else [])
            if "datetime" in str(field.type):
                made[field.encode_name] = "2026-01-01T00:00:00Z"
    return made


@pytest.mark.parametrize("kind", list(ev.BY_TYPE.values()), ids=list(ev.BY_TYPE))
def test_a_fact_about_what_is_not_loaded_changes_no_rows(kind: type[ev.Fact]) -> None:
    """A partial state is never asked for more than it has: facts about other waits and effects pass it by."""
    if kind in (ev.RunOpened, ev.EffectPlanned, ev.WaitOpened):
        return
    fact = msgspec.convert(_least(kind), kind)
    before = State(Run(id=RUN, version=4), complete=False)
    after = evolve(before, ev.Recorded(seq=5, at=START, actor=BOT, fact=fact))
    assert (after.waits, after.effects) == ({}, {})
    assert after.run.version == 5
    assert after.run.updated_at == START


def test_stages_passed_and_the_last_checkpoint() -> None:
    story = Story().open()
    story.append(event("checkpoint", stage="a", ref="1"), event("checkpoint", stage="b", ref="2", next=["sign"]))
    story.append(event("checkpoint", stage="a", state={"opaque": 1}))
    run = story.run
    assert (run.stage, run.passed) == ("a", ["a", "b"])
    assert run.checkpoint is not None
    assert run.checkpoint["seq"] == run.version
    assert run.checkpoint["has_state"]
    assert run.checkpoint["digest"] is not None


def test_the_same_reference_twice_is_one() -> None:
    story = Story().open()
    story.append(event("external_ref", system="erp", id="1"), event("external_ref", system="erp", id="1", url="u"))
    story.append(event("external_ref", system="erp", id="1", ref_type="po"))
    assert [(ref.type, ref.url) for ref in story.state.refs.values()] == [(None, None), ("po", None)]
    # The rows of before are not loaded: another transaction counts the same as the fold of all.
    fresh = replace(story.state, refs={})
    again = ev.Recorded(story.run.version + 1, START, BOT, ev.ExternalRefAdded(system="erp", id="1"))
    assert evolve(fresh, again).run.ref_count == evolve(story.state, again).run.ref_count


def test_a_pause_gives_up_the_lease_and_leaves_unnamed_waits_behind() -> None:
    story = Story(GATED).open()
    story.pause(callback("a"), callback("b")).signal("a").signal("b")
    story.rehydrate()
    story.pause(callback("c"), callback("d"))
    story.hold("takeover").hold("handback")
    story.rehydrate()
    assert {wait.status for wait in story.state.waits.values()} == {"satisfied", "superseded"}
    assert story.run.epoch == 3


def test_an_answer_counts_for_one_pause_only() -> None:
    story = Story(policy(required=[])).open().pause(callback("a")).signal("a")
    before = story.state.waits["a"]
    story.rehydrate()
    assert (before.consumed, story.state.waits["a"].consumed) == (False, True)
    with pytest.raises(Refusal, match="closed"):
        story.pause({"key": "a"})


def test_an_approval_is_bound_to_what_was_asked() -> None:
    story = Story(GATED).open().pause(approval("ok", plan(n=5)))
    effect = story.state.effects["k"]
    assert (effect.state, effect.implicit, effect.approvals["ok"]["status"]) == ("planned", True, "asked")
    story.decide("ok", "edit", arguments={"n": 3})
    effect = story.state.effects["k"]
    assert effect.arguments == {"n": 3}
    assert effect.fingerprint != effect.first_fingerprint
    approved = effect.approvals["ok"]
    assert (approved["status"], approved["fingerprint"], approved["by"]) == ("approved", effect.fingerprint, "alice")
    assert (story.state.waits["ok"].ask or {})["effect"]["arguments"] == {"n": 3}
    story.rehydrate()
    story.append(event("effect.started", key="k", arguments={"n": 3}))
    assert story.state.effects["k"].approvals["ok"]["status"] == "used"


def test_a_no_withdraws_what_was_planned_and_asking_again_plans_it_anew() -> None:
    story = Story(GATED).open().pause(approval("ok", plan()))
    story.decide("ok", "reject")
    assert story.state.effects["k"].state == "withdrawn"
    story.hold("clear", codes=["rejected"])
    story.rehydrate()
    story.pause(approval("ok2", plan(), name="ok"))
    effect = story.state.effects["k"]
    assert (effect.state, effect.approvals["ok"]["status"]) == ("planned", "asked")


def test_votes_below_the_quorum_and_what_voids_them() -> None:
    story = Story(GATED).open().pause(approval("two", plan()))
    story.decide("two", "approve")
    wait = story.state.waits["two"]
    assert (wait.open, len(wait.votes), wait.version) == (True, 1, 1)
    story.decide("two", "edit", by="bob", arguments={"n": 2})
    wait = story.state.waits["two"]
    assert ([vote["by"] for vote in wait.votes], wait.version, wait.open) == (["bob"], 2, True)
    story.decide("two", "approve", by="alice")
    wait = story.state.waits["two"]
    assert wait.status == "satisfied"
    assert (wait.decision or {})["arguments"] == {"n": 2}, "what the first one edited is what was decided"
    assert len(story.facts(ev.WaitVoted)) == 3
    assert story.run.decision_count == 3


def test_the_end_closes_and_withdraws_all_there_is() -> None:
    story = Story(GATED).open()
    story.append(event("effect.planned", **plan()), event("wait.opened", wait=callback()), event("completed"))
    assert story.run.status == "completed"
    assert not story.run.leased
    assert story.state.effects["k"].state == "withdrawn"
    assert story.state.waits["cb"].status == "cancelled"
    assert story.run.ended_at == story.now


def test_a_receipt_after_the_undo_takes_nothing_back() -> None:
    """A person found that it happened, it was undone, and then the receipt itself arrives."""
    story = Story(policy(required=[])).open()
    story.append(event("effect.planned", **plan(), compensation={"action": "cancel"}, start=True))
    story.append(event("effect.unknown", key="k"))
    story.hold("reconcile", key="k", outcome="executed")
    story.append(event("effect.compensating", key="k"), event("effect.compensated", key="k"))
    story.append(event("effect.executed", key="k", receipt={"id": "r1"}))
    effect = story.state.effects["k"]
    assert (effect.state, effect.receipt, effect.repeated) == ("compensated", {"id": "r1", "status": "done"}, 0)


def test_a_finding_about_the_undo_is_none_about_the_effect() -> None:
    """The undo did not happen, said a person; that the effect's own receipt comes again contradicts nothing."""
    story = Story(policy(required=[])).open()
    story.append(event("effect.planned", **plan(), compensation={"action": "cancel"}, start=True))
    story.append(event("effect.executed", key="k", receipt={"id": "r1"}))
    story.append(event("effect.compensating", key="k"), event("effect.compensation_unknown", key="k"))
    story.hold("reconcile", key="k", outcome="not_executed")
    assert story.state.effects["k"].state == "executed"
    story.append(event("effect.executed", key="k", receipt={"id": "r1"}))
    effect = story.state.effects["k"]
    assert (effect.state, effect.conflict) == ("executed", False)
    with pytest.raises(Refusal) as refused:
        story.append(event("effect.failed", key="k", error={"code": "x"}))
    assert refused.value.code == "effect_already_executed"


def test_folding_all_facts_gives_the_state() -> None:
    story = Story(GATED).open(requested_by="carol").pause(approval("ok", plan()))
    story.decide("ok", "approve")
    story.rehydrate()
    story.append(event("effect.started", key="k", arguments={"n": 1}), event("effect.executed", key="k"))
    story.append(event("completed", result={"ref": "s3://out"}))
    assert fold(RUN, story.history) == story.state
    assert story.run.result == {"ref": "s3://out", "digest": None, "data": None}
    assert person("alice").name == "Alice"
