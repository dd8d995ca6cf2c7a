"""The client's plain values: time spans, effects, receipts, answers; and the lease's clock. No server here."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from rehydrate.client import Approval, Callback, Effect, LeaseLost, Receipt
from rehydrate.client.lease import Lease
from rehydrate.client.shapes import BadDuration, answer_of, due_fields, receipt_of, result_of, seconds
from rehydrate.demo.agents import within


@pytest.mark.parametrize(
    ("span", "expected"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("3d", 259200), ("1w", 604800), ("1d 12h", 129600), (45, 45)],
)
def test_spans_are_whole_seconds(span, expected):
    assert seconds(span) == expected
    assert seconds(timedelta(seconds=expected)) == expected
    assert due_fields(span) == {"due_in": expected}


@pytest.mark.parametrize("span", ["", "3", "3 days", "d3", "-2h", "1.5h", "soon"])
def test_spans_that_are_none_are_refused(span):
    with pytest.raises(BadDuration):
        seconds(span)


def test_points_in_time_need_an_offset():
    assert due_fields(datetime(2026, 12, 1, tzinfo=UTC)) == {"due_at": "2026-12-01T00:00:00+00:00"}
    with pytest.raises(BadDuration):
        due_fields(datetime(2026, 12, 1))  # noqa: DTZ001 (this is the fault)


def test_effect_is_planned_as_the_contract_wants_it():
    effect = Effect(
        "payments.refund",
        {"case": "31"},
        amount=("189.00", "EUR"),
        impact="money",
        undo=("payments.charge", {"case": "31"}),
    )
    assert effect.planned("k", start=True) == {
        "type": "effect.planned",
        "key": "k",
        "system": "payments",
        "action": "refund",
        "arguments": {"case": "31"},
        "amount": {"value": "189.00", "currency": "EUR"},
        "impact": "money",
        "compensation": {"system": "payments", "action": "charge", "arguments": {"case": "31"}},
        "start": True,
    }


def test_action_without_its_system_is_refused():
    with pytest.raises(ValueError, match=r"system\.action"):
        Effect("refund").planned("k", start=False)


@pytest.mark.parametrize(
    ("result", "receipt", "returned"),
    [
        ({"id": "x1", "extra": 1}, {"id": "x1", "status": "done", "data": {"id": "x1", "extra": 1}}, {"extra": 1}),
        ("x1", {"id": "x1", "status": "done"}, {"id": "x1"}),
        (None, {"id": "key", "status": "done"}, {"id": "key"}),
        (
            Receipt("x1", "accepted", "http://x/1"),
            {"id": "x1", "status": "accepted", "url": "http://x/1"},
            {"id": "x1"},
        ),
        ({"id": 7, "status": "weird"}, {"id": "7", "status": "done", "data": {"id": 7, "status": "weird"}}, {"id": 7}),
    ],
)
def test_what_a_function_returns_becomes_a_receipt_and_comes_back(result, receipt, returned):
    assert receipt_of(result, "key") == receipt
    assert returned.items() <= result_of(receipt).items()


def test_receipt_that_is_too_large_keeps_its_id():
    receipt = receipt_of({"id": "x1", "url": "http://x/1", "blob": "x" * 20_000}, "key")
    assert receipt == {"id": "x1", "status": "done", "url": "http://x/1"}


def test_replay_gives_back_the_very_same():
    first = receipt_of({"id": "x1", "when": datetime(2026, 1, 1, tzinfo=UTC), "pair": (1, 2)}, "key")
    assert result_of(first) == {"id": "x1", "status": "done", "when": "2026-01-01 00:00:00+00:00", "pair": [1, 2]}


def test_waits_and_asks_carry_only_what_was_said():
    assert Callback("supplier", "2h", who="Nordholz").body("supplier") == {
        "key": "supplier",
        "name": "supplier",
        "kind": "callback",
        "due_in": 7200,
        "from": "Nordholz",
    }
    ask = Approval("legal", "1d", summary="Send it?", details={"Price": "1"}, choices=["approve"]).ask("k")
    assert ask == {
        "summary": "Send it?",
        "details": [{"label": "Price", "value": "1"}],
        "effect": {"key": "k"},
        "choices": ["approve"],
    }


@pytest.mark.parametrize(
    ("status", "choice", "approved", "rejected"),
    [
        ("satisfied", "approve", True, False),
        ("satisfied", "edit", True, False),
        ("satisfied", "approve_with_conditions", True, False),
        ("satisfied", "respond", False, False),
        ("rejected", "reject", False, True),
        ("timed_out", None, False, False),
        ("superseded", "approve", True, False),
    ],
)
def test_answers_tell_yes_from_no_from_silence(status, choice, approved, rejected):
    decision = {"choice": choice, "decided_by": {"id": "alice", "name": "Alice"}} if choice else None
    answer = answer_of({"key": "k", "name": "legal", "kind": "approval", "status": status, "decision": decision})
    assert (answer.approved, answer.rejected) == (approved, rejected)
    assert answer.by == ("Alice" if choice else None)


def test_silence_authorises_only_where_the_flow_lets_it():
    wait = {"name": "legal", "kind": "approval", "status": "timed_out"}
    assert not answer_of({**wait, "on_timeout": "resume"}).authorised
    assert answer_of({**wait, "on_timeout": "continue"}).authorised


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([{"pointer": "/amount", "op": "<=", "value": "45000.00"}], {"amount": "45000.00"}),
        ([{"pointer": "/amount", "op": "<", "value": "45000"}], {"amount": "44999.99"}),
        ([{"pointer": "/amount", "op": "<=", "value": 60000}], {}),
        ([{"pointer": "/days", "op": "<=", "value": 14}], {"days": 14}),
        ([{"pointer": "/currency", "op": "==", "value": "USD"}], {"currency": "USD"}),
        ([{"pointer": "/nowhere", "op": "<=", "value": 1}], {}),
    ],
)
def test_agent_keeps_within_the_conditions_of_an_approval(conditions, expected):
    effect = Effect("esign.send", {"amount": "48000.00", "days": 30, "currency": "EUR"})
    changed = within(effect, conditions)
    assert changed.arguments == {**effect.arguments, **expected}
    assert changed.identity is effect.identity


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lease_that_was_not_renewed_in_time_is_lost():
    clock = Clock()
    lease = Lease({"epoch": 3, "seconds": 60}, beat=lambda epoch: {}, name="run", monotonic=clock)
    clock.now = 9.0
    lease.check()
    lease.renewed({"epoch": 3, "seconds": 60})
    clock.now = 68.0
    lease.check()
    clock.now = 70.0
    with pytest.raises(LeaseLost):
        lease.check()
    lease.renewed()
    with pytest.raises(LeaseLost):
        lease.check()


def test_claimed_lease_ends_early_unless_something_is_heard():
    clock = Clock()
    lease = Lease({"epoch": 1, "seconds": 60}, beat=lambda epoch: {}, name="run", monotonic=clock)
    clock.now = 10.5
    with pytest.raises(LeaseLost):
        lease.check()


def test_client_needs_no_django():
    code = (
        "import sys; import rehydrate.client, rehydrate.demo.agents, rehydrate.demo.world; "
        "print([m for m in sys.modules if m.split('.')[0] in {'django', 'rest_framework', 'psycopg', 'msgspec'}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
