"""What the client promises a flow, on a real server: nothing twice, stable answers, no work without a lease."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from rehydrate.client import (
    Answer,
    Approval,
    ApprovalMismatch,
    Callback,
    Effect,
    LeaseLost,
    Ledger,
    NotRetryable,
    NotSent,
    Refused,
    RunConflict,
    Signal,
    Timer,
    Unauthenticated,
    Worker,
)
from rehydrate.client.retry import Backoff
from tests.conftest import eventually

from .conftest import LEASE_SECONDS, effect_of, status_of

# No file names this flow, so it has the defaults: a rejection goes to review, any reviewer decides.
FLOW = "errand"


@pytest.fixture
def calls():
    """What a flow's functions were called with."""
    return []


def opened(ledger: Ledger, external_id: str = "errand-1", **more: Any) -> str:
    return str(ledger.open(FLOW, external_id, title="An errand", requested_by="carol", **more)["run"]["id"])


def test_flow_runs_from_the_top_and_nothing_happens_twice(ledger, alice, calls):
    @ledger.flow(FLOW)
    def errand(run):
        calls.append("called")
        run.checkpoint("one")
        first = run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or {"id": "x1", "n": len(calls)})
        yes = run.ask("first", "Go on?", due="1d", on_reject="continue")
        again = run.ask("first", "Really?", due="1d")
        run.checkpoint("two")
        second = run.effect("crm.note", {"n": 2}, do=lambda e: calls.append(e.key) or {"id": "x2"})
        return {"data": [first["n"], yes.choice, yes.reason, again.choice, second["id"]]}

    run_id = opened(ledger)
    ledger.work_once()
    alice.decide(run_id, "first", "reject", reason="Not yet")
    ledger.work_once()
    alice.decide(run_id, "first", "approve")
    ledger.work_once()

    run = ledger.get(run_id)
    assert run["status"] == "completed"
    assert run["stage"] == "two"
    assert calls == ["called", "errand/errand-1/crm.note/1", "called", "called", "errand/errand-1/crm.note/2"]
    assert [w["key"] for w in run["waits"]] == ["first", "first-2"]
    assert len(run["effects"]) == 2


def test_open_again_gives_the_same_run_and_another_input_is_refused(ledger):
    @ledger.flow(FLOW)
    def errand(run):
        return None

    run_id = opened(ledger, input_ref="s3://in/1", input_digest="sha256:1")
    assert opened(ledger, input_ref="s3://in/1", input_digest="sha256:1") == run_id
    with pytest.raises(RunConflict):
        opened(ledger, input_ref="s3://in/1", input_digest="sha256:2")


def test_replay_does_not_move_the_stage_back(ledger, alice):
    seen: list[Any] = []

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("draft", ref="s3://draft")
        run.checkpoint("ask", ref="s3://ask")
        seen.append((run.stage, run.saved.get("ref")))
        run.ask("yes", "Go on?", due="1d")
        seen.append((run.stage, run.saved.get("ref")))

    run_id = opened(ledger)
    ledger.work_once()
    version = ledger.get(run_id)["version"]
    alice.decide(run_id, "yes", "approve")
    ledger.work_once()

    assert seen[1:] == [("ask", "s3://ask"), ("ask", "s3://ask")]
    # decided, lease granted, completed (and its lease ended): nothing else was written again
    assert ledger.get(run_id)["version"] - version <= 5


@pytest.mark.parametrize("error", [NotSent("No paper."), Refused("422: no"), ConnectionRefusedError("down")])
def test_what_was_never_sent_has_failed_and_is_tried_again(ledger, calls, error):
    @ledger.flow(FLOW)
    def errand(run):
        def do(e):
            calls.append(e.attempt)
            if len(calls) == 1:
                raise error
            return "x1"

        run.checkpoint("only")
        return run.effect("crm.note", {"n": 1}, do=do)

    run_id = opened(ledger)
    ledger.work_once()
    assert effect_of(ledger, run_id, "crm.note")["state"] == "failed"
    eventually(ledger.work_once, what="another try")

    assert status_of(ledger, run_id) == "completed"
    assert calls == [1, 2]


def test_what_may_have_been_sent_is_unknown_and_waits_for_a_person(ledger, alice, calls):
    @ledger.flow(FLOW)
    def errand(run):
        def do(e):
            calls.append(e.key)
            raise TimeoutError("no answer")

        run.checkpoint("only")
        return run.effect("crm.note", {"n": 1}, do=do)

    run_id = opened(ledger)
    ledger.work_once()

    effect = effect_of(ledger, run_id, "crm.note")
    assert effect["state"] == "unknown"
    assert effect["error"] == {"code": "TimeoutError", "message": "no answer"}
    assert status_of(ledger, run_id) == "review"
    assert ledger.work_once() is None

    alice.reconcile(run_id, effect["key"], "executed", receipt={"id": "found-1"})
    ledger.work_once()
    assert status_of(ledger, run_id) == "completed"
    assert len(calls) == 1


def test_async_function_of_a_blocking_flow_has_not_begun(ledger, calls):
    async def do(e):
        calls.append(e.key)

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        run.effect("crm.note", {"n": 1}, do=do)

    run_id = opened(ledger)
    ledger.work_once()

    effect = effect_of(ledger, run_id, "crm.note")
    assert effect["state"] == "failed"
    assert "AsyncLedger" in effect["error"]["message"]
    assert calls == []


def test_unknown_effect_that_did_not_happen_runs_again_once(ledger, alice, calls):
    @ledger.flow(FLOW)
    def errand(run):
        def do(e):
            calls.append(e.key)
            if len(calls) == 1:
                raise TimeoutError("no answer")
            return "x1"

        run.checkpoint("only")
        return run.effect("crm.note", {"n": 1}, do=do)

    run_id = opened(ledger)
    ledger.work_once()
    alice.reconcile(run_id, effect_of(ledger, run_id, "crm.note")["key"], "not_executed")
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert len(calls) == 2
    assert len(set(calls)) == 1


def test_replay_that_plans_something_else_goes_to_a_person(ledger, alice):
    arguments = iter([{"n": 1}, {"n": 2}])

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        effect = Effect("bank.pay", next(arguments), impact="money")
        run.ask("yes", "Pay?", effect=effect, due="1d")
        return run.effect(effect, do=lambda e: pytest.fail("this was not approved"))

    run_id = opened(ledger)
    ledger.work_once()
    alice.decide(run_id, "yes", "approve")
    ledger.work_once()

    assert status_of(ledger, run_id) == "review"


def test_gated_effect_without_a_question_goes_to_a_person(ledger):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        return run.effect("bank.pay", {"n": 1}, impact="money", do=lambda e: pytest.fail("nobody approved this"))

    run_id = opened(ledger)
    ledger.work_once()
    assert status_of(ledger, run_id) == "review"


def test_edited_arguments_are_what_runs(ledger, alice, calls):
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        effect = Effect("mail.send", {"to": "bob", "text": "Dear Bob"}, impact="customer_promise")
        answer = run.ask("yes", "Send?", effect=effect, schema=schema, due="1d")
        run.effect(effect, do=lambda e: calls.append(e.arguments) or "x1")
        return {"data": answer.edited}

    run_id = opened(ledger)
    ledger.work_once()
    alice.decide(run_id, "yes", "edit", arguments={"to": "bob", "text": "Hello Bob"})
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert calls == [{"to": "bob", "text": "Hello Bob"}]


def test_condition_that_is_not_kept_stops_the_run(ledger, alice, calls):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        effect = Effect("bank.pay", {"amount": "100.00"}, impact="money")
        run.ask("yes", "Pay?", effect=effect, due="1d")
        run.effect(effect, do=lambda e: calls.append(e.arguments))

    run_id = opened(ledger)
    ledger.work_once()
    condition = {"pointer": "/amount", "op": "<=", "value": "50.00"}
    alice.decide(run_id, "yes", "approve_with_conditions", conditions=[condition])
    ledger.work_once()

    assert status_of(ledger, run_id) == "review"
    assert calls == []


def test_flow_goes_on_to_the_no_past_what_was_undone(ledger, alice, calls):
    ledger.undo("crm.delete_draft")(lambda e: calls.append(e.action))

    @ledger.flow(FLOW)
    def errand(run):
        draft = run.effect("crm.create_draft", undo="crm.delete_draft", do=lambda e: calls.append(e.action) or "d1")
        run.checkpoint("only")
        answer = run.ask("yes", "Send it?", due="1d", on_reject="continue")
        return {"data": [draft["id"], answer.reason]}

    run_id = opened(ledger)
    ledger.work_once()
    alice.decide(run_id, "yes", "reject", reason="Not this one")
    ledger.work_once()
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert calls == ["crm.create_draft", "crm.delete_draft"]


def test_failing_flow_is_tried_again_and_then_shown_to_a_person(ledger, calls):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        calls.append("called")
        raise RuntimeError("It broke.")

    run_id = opened(ledger)
    for _ in range(3):
        eventually(ledger.work_once, what="another try")

    run = ledger.get(run_id)
    assert run["status"] == "review"
    assert run["failure_count"] == 3
    assert run["last_error"]["code"] == "RuntimeError"
    assert len(calls) == 3


def test_flow_that_says_it_is_no_use_goes_to_a_person_at_once(ledger):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        raise NotRetryable("The customer does not exist.")

    run_id = opened(ledger)
    ledger.work_once()

    run = ledger.get(run_id)
    assert run["status"] == "review"
    assert run["last_error"]["message"] == "The customer does not exist."


# --- pauses ---


def test_first_answer_counts_and_the_other_is_superseded(ledger):
    answers: list[Answer] = []

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        answers[:] = run.pause(Signal("paid", "1d"), Timer("late", "1d"), resume_when="any")

    run_id = opened(ledger)
    ledger.work_once()
    assert ledger.signal("paid", id="s1", run=run_id, payload={"amount": "5"})["state"] == "matched"
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert [a.status for a in answers] == ["satisfied", "superseded"]
    assert answers[0].payload == {"amount": "5"}


def test_timer_wins_over_a_silent_supplier(ledger, tick):
    answers: list[Answer] = []

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        supplier = run.open(Callback("supplier", "1d"))
        assert supplier.url
        assert supplier.url.startswith("http")
        answers[:] = run.pause(supplier, Timer("late", 1), resume_when="any")

    run_id = opened(ledger)
    ledger.work_once()
    eventually(lambda: tick() or status_of(ledger, run_id) == "ready", what="the timer")
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert [a.status for a in answers] == ["superseded", "satisfied"]


def test_signal_that_comes_before_its_wait_is_not_lost(ledger):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        return {"data": run.signal("paid", due="1d").payload}

    run_id = opened(ledger)
    assert ledger.signal("paid", id="s1", flow=FLOW, external_id="errand-1", payload="early")["state"] == "buffered"
    ledger.work_once()
    ledger.work_once()
    assert status_of(ledger, run_id) == "completed"


def test_each_answer_is_taken_as_it_comes(ledger, alice):
    seen: list[Any] = []

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        seen.append([a.name for a in run.each(Approval("a", "1d", summary="A?"), Approval("b", "1d", summary="B?"))])

    run_id = opened(ledger)
    ledger.work_once()
    before = {w["name"]: (w["id"], w["due_at"]) for w in ledger.get(run_id)["waits"]}
    alice.decide(run_id, "b", "approve")
    ledger.work_once()
    after = {w["name"]: (w["id"], w["due_at"]) for w in ledger.get(run_id)["waits"]}
    alice.decide(run_id, "a", "approve")
    ledger.work_once()

    assert status_of(ledger, run_id) == "completed"
    assert after == before
    assert seen == [["a", "b"]]


def test_question_is_asked_anew_after_a_takeover_without_an_answer(ledger, alice):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        return {"data": run.ask("yes", "Go on?", due="1d").choice}

    run_id = opened(ledger)
    ledger.work_once()
    alice.act(run_id, "takeover")
    assert ledger.work_once() is None
    alice.act(run_id, "handback", stage="only", checkpoint={"ref": "s3://only"})
    ledger.work_once()

    assert [(w["key"], w["status"]) for w in ledger.get(run_id)["waits"]] == [("yes", "superseded"), ("yes.2", "open")]
    alice.decide(run_id, "yes", "approve")
    ledger.work_once()
    assert status_of(ledger, run_id) == "completed"


# --- leases ---


def test_lease_is_kept_while_an_effect_takes_long(ledger, tick):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")

        def slow(e):
            assert not threading.Event().wait(LEASE_SECONDS * 2)
            tick()
            return "x1"

        return run.effect("crm.note", {"n": 1}, do=slow)

    run_id = ledger.open(FLOW, "errand-1", title="An errand")["run"]["id"]
    envelope = ledger.claim([FLOW], lease_seconds=LEASE_SECONDS)
    Worker(ledger).handle(envelope)

    assert status_of(ledger, run_id) == "completed"
    assert ledger.get(run_id)["failure_count"] == 0


def test_work_stops_when_a_person_takes_over_but_the_receipt_is_kept(ledger, alice):
    reached: list[str] = []

    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")

        def do(e):
            alice.act(run.id, "takeover")
            return "x1"

        run.effect("crm.note", {"n": 1}, do=do)
        reached.append("after the effect")
        run.effect("crm.note", {"n": 2}, do=lambda e: pytest.fail("the lease was lost"))

    run_id = opened(ledger)
    ledger.work_once()

    effect = effect_of(ledger, run_id, "crm.note")
    assert effect["state"] == "executed"
    assert effect["late"] is True
    assert status_of(ledger, run_id) == "taken_over"
    assert len(ledger.get(run_id)["effects"]) == 1


def test_older_epoch_is_fenced_off(ledger):
    run_id = ledger.open(FLOW, "errand-1", title="An errand", holder="one")["run"]["id"]
    ledger.release(run_id, 1)
    envelope = ledger.rehydrate(run_id, holder="two")
    assert envelope["lease"]["epoch"] == 2
    with pytest.raises(LeaseLost):
        ledger.append(run_id, 1, [{"type": "note", "text": "I am still here."}])


def test_mismatch_has_its_own_exception(ledger, alice):
    run_id = ledger.open(FLOW, "errand-1", title="An errand", holder="one")["run"]["id"]
    plan = Effect("bank.pay", {"n": 1}, impact="money").planned("k1", start=False)
    ask = {"summary": "Pay?", "effect": {"key": "k1"}}
    wait = {"name": "yes", "kind": "approval", "due_in": 600, "ask": ask}
    checkpoint = {"type": "checkpoint", "stage": "only", "ref": "s3://x"}
    ledger.append(run_id, 1, [checkpoint, plan, {"type": "paused", "waits": [wait]}])
    alice.decide(run_id, "yes", "approve")
    epoch = ledger.rehydrate(run_id, holder="one")["lease"]["epoch"]

    with pytest.raises(ApprovalMismatch) as caught:
        ledger.append(run_id, epoch, [{"type": "effect.started", "key": "k1", "arguments": {"n": 2}}])

    assert caught.value.status == 409
    assert status_of(ledger, run_id) == "review"


def test_stopping_worker_gives_the_run_back_at_a_safe_point(ledger, calls):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")

        def do(e):
            calls.append(e.key)
            worker.stop()
            return "x1"

        run.effect("crm.note", {"n": 1}, do=do)
        run.effect("crm.note", {"n": 2}, do=lambda e: calls.append(e.key))

    run_id = opened(ledger)
    worker = Worker(ledger, poll=1)
    worker.run()

    assert len(calls) == 1
    assert effect_of(ledger, run_id, "crm.note")["state"] == "executed"
    assert status_of(ledger, run_id) == "ready"
    ledger.work_once()
    assert status_of(ledger, run_id) == "completed"
    assert len(calls) == 2


def test_worker_with_a_revoked_key_says_so_and_ends(cast):
    with Ledger(cast.url, "not-a-key") as stranger:

        @stranger.flow(FLOW)
        def errand(run):
            return None

        with pytest.raises(Unauthenticated, match="REHYDRATE_KEY"):
            stranger.work(poll=1)


def test_two_workers_share_the_runs(ledger, calls):
    @ledger.flow(FLOW)
    def errand(run):
        run.checkpoint("only")
        run.effect("crm.note", {"n": run.external_id}, do=lambda e: calls.append(e.key))

    for n in range(6):
        opened(ledger, f"errand-{n}")
    worker = Worker(ledger, concurrency=3, poll=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        eventually(lambda: ledger.runs(flow=FLOW, status="completed")["total"] == 6, what="the end of all")
    finally:
        worker.stop()
        thread.join()
    assert len(calls) == len(set(calls)) == 6


# --- answers that get lost ---


class Lossy(httpx.BaseTransport):
    """The network loses the first answer to every POST; the server has acted on it by then."""

    def __init__(self) -> None:
        self.inner = httpx.HTTPTransport()
        self.seen: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self.inner.handle_request(request)
        key = request.headers.get("idempotency-key")
        if key is None or key in self.seen:
            return answer
        self.seen.add(key)
        answer.read()
        raise httpx.ReadError("the answer was lost", request=request)

    def close(self) -> None:
        self.inner.close()


def test_every_answer_is_lost_once_and_still_nothing_happens_twice(cast, key, alice, calls):
    transport = Lossy()
    with Ledger(cast.url, key, transport=transport, backoff=Backoff(base=0.01)) as ledger:

        @ledger.flow(FLOW)
        def errand(run):
            run.checkpoint("one")
            run.effect("crm.note", {"n": 1}, do=lambda e: calls.append(e.key) or "x1")
            run.ask("yes", "Go on?", due="1d")
            run.effect("crm.note", {"n": 2}, do=lambda e: calls.append(e.key) or "x2")

        run_id = opened(ledger)
        ledger.work_once()
        alice.decide(run_id, "yes", "approve")
        ledger.work_once()

        run = ledger.get(run_id)
        assert run["status"] == "completed"
        assert [(e["state"], e["attempt"]) for e in run["effects"]] == [("executed", 1), ("executed", 1)]
        assert len(run["waits"]) == 1
        assert ledger.runs(flow=FLOW)["total"] == 1
    assert len(calls) == len(set(calls)) == 2
    assert len(transport.seen) >= 9
