"""A run in hand, `with ledger.run(...)`: for scripts that are no workers. Started again, the block is the same run."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rehydrate.client import Effect, EffectFailed, LeaseHeld, Ledger, NotToGoOn, RunConflict

from .conftest import LEASE_SECONDS, effect_of, status_of

FLOW = "errand"


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def sibling(cast, key):
    """The same agent in another process, as far as the ledger can tell."""
    with Ledger(cast.url, key) as made:
        yield made


def run_id_of(ledger: Ledger, flow: str = FLOW) -> str:
    return str(ledger.runs(flow=flow)["results"][0]["id"])


def test_block_that_pauses_is_left_and_started_again_goes_on(ledger, sibling, alice, calls):
    def script(mine: Ledger) -> None:
        with mine.run(FLOW, "errand-1", title="An errand", requested_by="carol") as run:
            run.checkpoint("one")
            run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1")
            answer = run.ask("yes", "Go on?", due="1d")
            calls.append(answer.choice)
            run.complete({"data": answer.choice})

    script(ledger)
    with pytest.raises(NotToGoOn) as early:
        script(ledger)
    assert early.value.outcome == "wait"
    alice.decide(run_id_of(ledger), "yes", "approve")
    script(sibling)
    with pytest.raises(NotToGoOn) as late:
        script(ledger)
    assert late.value.outcome == "terminate"

    assert calls == ["errand/errand-1/crm.note/1", "approve"]
    assert status_of(ledger, run_id_of(ledger)) == "completed"
    assert ledger.runs(flow=FLOW)["total"] == 1


def test_block_that_ends_by_itself_completes_the_run(ledger):
    with ledger.run(FLOW, "errand-1", agent={"name": "bot", "version": "7", "framework": "bespoke"}) as run:
        run.checkpoint("only")
    found = ledger.get(run.id)
    assert found["status"] == "completed"
    assert found["agent"]["framework"] == "bespoke"


def test_error_in_the_block_is_told_and_goes_on(ledger):
    def script() -> None:
        with ledger.run(FLOW, "errand-1") as run:
            run.checkpoint("only")
            raise RuntimeError("It broke.")

    with pytest.raises(RuntimeError, match="It broke"):
        script()
    found = ledger.get(run_id_of(ledger))
    assert found["last_error"] == {"code": "RuntimeError", "message": "It broke."}
    assert found["failure_count"] == 1


def test_run_that_is_called_off_is_left_without_an_error(ledger):
    with ledger.run(FLOW, "errand-1") as run:
        run.checkpoint("only")
        run.cancel("The customer called.")
    assert status_of(ledger, run.id) == "review"


def test_two_at_once_only_the_one_with_the_lease_goes_on(ledger, sibling):
    with ledger.run(FLOW, "errand-1") as run:
        run.checkpoint("only")
        with pytest.raises(LeaseHeld), sibling.run(FLOW, "errand-1"):
            pytest.fail("the run was in other hands")
    assert status_of(ledger, run.id) == "completed"


def test_what_a_dead_process_held_is_waited_for(ledger, sibling, ticking):
    ledger.open(FLOW, "errand-1", holder=ledger.holder, lease_seconds=LEASE_SECONDS)  # and it dies here
    with sibling.run(FLOW, "errand-1", wait=30) as run:
        run.checkpoint("only")
    found = ledger.get(run.id)
    assert found["status"] == "completed"
    assert found["failure_count"] == 1  # the lease that lapsed


def test_answer_is_waited_for(ledger, alice):
    with ledger.run(FLOW, "errand-1") as run:
        run.checkpoint("only")
        run.ask("yes", "Go on?", due="1d")
    seen: list[str | None] = []

    def patient() -> None:
        with ledger.run(FLOW, "errand-1", wait=30) as again:
            assert again.envelope["waits"][0]["decision"]["choice"] == "approve"
            seen.append(again.ask("yes", "Go on?", due="1d").choice)

    thread = threading.Thread(target=patient)
    thread.start()
    alice.decide(run.id, "yes", "approve")
    thread.join()
    assert seen == ["approve"]


def test_what_was_rejected_is_undone_before_the_block_is_refused(ledger, alice, calls):
    ledger.undo("crm.delete_draft")(lambda e: calls.append((e.action, e.receipt["id"])) or "gone")

    def script() -> None:
        with ledger.run("contract-approval", "contract-1", input_ref="s3://1") as run:
            run.checkpoint("draft", ref="s3://draft")
            run.effect("crm.create_draft", {"n": 1}, undo="crm.delete_draft", do=lambda e: "d1")
            send = Effect("esign.send", {"n": 1})
            run.ask("legal-approval", "Send?", effect=send)
            run.effect(send, do=lambda e: pytest.fail("this was rejected"))

    script()
    run_id = run_id_of(ledger, "contract-approval")
    alice.decide(run_id, "legal-approval", "reject", reason="Too expensive")
    with pytest.raises(NotToGoOn, match="terminate"):
        script()

    assert calls == [("crm.delete_draft", "d1")]
    assert effect_of(ledger, run_id, "crm.create_draft")["state"] == "compensated"
    assert status_of(ledger, run_id) == "terminated"


def test_undo_that_fails_is_told_and_raised(ledger, alice):
    def script() -> None:
        with ledger.run("contract-approval", "contract-1", input_ref="s3://1") as run:
            run.checkpoint("draft", ref="s3://draft")
            run.effect("crm.create_draft", {"n": 1}, undo="crm.delete_draft", do=lambda e: "d1")
            run.ask("legal-approval", "Send?", effect=Effect("esign.send", {"n": 1}))

    script()
    run_id = run_id_of(ledger, "contract-approval")
    alice.decide(run_id, "legal-approval", "reject")
    with pytest.raises(EffectFailed, match="no undo function"):
        script()
    effect = effect_of(ledger, run_id, "crm.create_draft")
    assert effect["state"] == "executed"  # it stands: nothing was undone
    assert effect["error"]["code"] == "NotSent"


def test_another_input_is_another_run(ledger):
    with ledger.run(FLOW, "errand-1", input_digest="sha256:1") as run:
        run.checkpoint("only")
    with pytest.raises(RunConflict), ledger.run(FLOW, "errand-1", input_digest="sha256:2"):
        pytest.fail("this is not the run that was opened")
    assert ledger.runs(flow=FLOW)["total"] == 1
