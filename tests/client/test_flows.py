"""The demo's four flows from opening to end, over real HTTP; what reached the outside is counted there."""

from __future__ import annotations

import threading

import httpx
import pytest

from rehydrate.client import Ledger
from rehydrate.demo import scenarios
from rehydrate.demo.world import World
from tests.conftest import eventually

from .conftest import done, effect_of, everything_once, reaches, status_of


def run_of(ledger: Ledger, flow: str, index: int = 0) -> str:
    """The id of the run with this number."""
    external_id = scenarios.external_id(flow, index)
    return str(ledger.runs(flow=flow, external_id=external_id)["results"][0]["id"])


# --- contract approval ---


@pytest.fixture
def contract(ledger, demo):
    demo("contract-approval").open(0)
    run_id = run_of(ledger, "contract-approval")
    assert ledger.work_once() == run_id
    assert status_of(ledger, run_id) == "waiting"
    return run_id


def test_contract_is_sent_as_approved(ledger, world, alice, contract):
    assert done(world, "esign.send") == []

    alice.decide(contract, "legal-approval", "approve")
    ledger.work_once()

    run = ledger.get(contract)
    assert run["status"] == "completed"
    assert run["stage"] == "sign"
    assert [r["arguments"]["amount"] for r in done(world, "esign.send")] == ["48000.00"]
    assert everything_once(world)


def test_contract_is_sent_while_the_condition_holds(ledger, world, alice, contract):
    conditions = [{"pointer": "/amount", "op": "<=", "value": "50000.00"}]

    alice.decide(contract, "legal-approval", "approve_with_conditions", conditions=conditions)
    ledger.work_once()

    assert status_of(ledger, contract) == "completed"
    assert [r["arguments"]["amount"] for r in done(world, "esign.send")] == ["48000.00"]


def test_contract_is_brought_within_a_condition_that_does_not_hold_yet(ledger, world, alice, contract):
    conditions = [{"pointer": "/amount", "op": "<=", "value": "45000.00"}]

    alice.decide(contract, "legal-approval", "approve_with_conditions", conditions=conditions)
    assert status_of(ledger, contract) == "review"
    assert ledger.work_once() is None
    alice.act(contract, "clear", codes=["condition_unmet"])
    ledger.work_once()

    assert status_of(ledger, contract) == "completed"
    assert [r["arguments"]["amount"] for r in done(world, "esign.send")] == ["45000.00"]
    assert everything_once(world)


def test_contract_is_sent_as_edited(ledger, world, alice, contract):
    wait = alice.open_wait(contract, "legal-approval")
    arguments = {**wait["ask"]["effect"]["arguments"], "payment_days": 14}

    alice.decide(contract, "legal-approval", "edit", arguments=arguments)
    ledger.work_once()

    assert status_of(ledger, contract) == "completed"
    assert [r["arguments"]["payment_days"] for r in done(world, "esign.send")] == [14]


def test_rejected_contract_is_taken_back(ledger, world, alice, contract):
    draft = effect_of(ledger, contract, "crm.create_draft")["receipt"]["id"]

    alice.decide(contract, "legal-approval", "reject", reason="The price is too high")
    assert status_of(ledger, contract) == "compensating"
    ledger.work_once()

    assert status_of(ledger, contract) == "terminated"
    assert [r["arguments"]["undoes"] for r in done(world, "crm.delete_draft")] == [draft]
    assert done(world, "esign.send") == []
    assert everything_once(world)


def test_ask_tells_a_reviewer_all_there_is_to_know(contract, alice):
    wait = alice.open_wait(contract, "legal-approval")
    ask = wait["ask"]
    assert "Northwind Bakery" in ask["summary"]
    assert ask["effect"]["arguments"]["amount"] == "48000.00"
    assert ask["rationale"]
    assert ask["rollback"]
    assert httpx.get(ask["evidence"][0]["url"]).status_code == 200


def test_agent_that_starts_again_opens_nothing_anew(ledger, demo, contract):
    demo("contract-approval").open(0)
    assert ledger.runs(flow="contract-approval")["total"] == 1
    assert ledger.work_once() is None


# --- after-sales ---


@pytest.fixture
def case(ledger, demo):
    demo("after-sales").open(0)
    run_id = run_of(ledger, "after-sales")
    assert ledger.work_once() == run_id
    return run_id


def send_documents(world: World, external_id: str = "case-31") -> None:
    """Plays the customer, as the page that the run names lets one do."""
    (callback,) = world.journal.callbacks(kind="customer", subject=external_id)
    form = {"callback": str(callback["n"]), "note": "It leaks.", "documents": "photo.jpg"}
    assert httpx.post(f"{world.url}/play/customer/{external_id}", data=form).status_code == 200


def test_customer_is_refunded_after_sending_documents(ledger, world, alice, case):
    run = ledger.get(case)
    assert run["status"] == "waiting"
    page = next(ref["url"] for ref in run["external_refs"] if ref["system"] == "shop")
    assert "Send the documents" in httpx.get(page).text

    send_documents(world)
    reaches(ledger, case, "ready")
    ledger.work_once()
    details = {d["label"]: d["value"] for d in alice.open_wait(case, "refund-approval")["ask"]["details"]}
    assert details["And wrote"] == "It leaks."

    alice.decide(case, "refund-approval", "approve")
    ledger.work_once()

    assert status_of(ledger, case) == "completed"
    assert len(done(world, "payments.refund")) == 1
    assert everything_once(world)


def test_customer_is_told_the_no_and_no_money_moves(ledger, world, alice, case):
    send_documents(world)
    reaches(ledger, case, "ready")
    ledger.work_once()

    alice.decide(case, "refund-approval", "reject", reason="Repair it instead")
    ledger.work_once()

    assert status_of(ledger, case) == "completed"
    assert done(world, "payments.refund") == []
    assert "Repair it instead" in done(world, "mail.tell_customer")[0]["arguments"]["text"]
    assert everything_once(world)


def test_documents_that_come_twice_count_once(ledger, world, case):
    (callback,) = world.journal.callbacks(kind="customer")
    for _ in range(2):
        answer = httpx.post(callback["url"], json={"documents": "a"}, headers={"webhook-id": "msg_1"})
        assert answer.status_code == 202
    assert answer.json()["state"] == "duplicate"
    assert ledger.work_once() == case
    assert ledger.work_once() is None


def test_payment_whose_answer_was_lost_is_looked_up_and_not_repeated(ledger, world, alice, case):
    send_documents(world)
    reaches(ledger, case, "ready")
    ledger.work_once()
    world.journal.set_mode("payments", "refund", "lose_answer", 0, 1)
    alice.decide(case, "refund-approval", "approve")

    ledger.work_once()
    assert effect_of(ledger, case, "payments.refund")["state"] == "unknown"
    eventually(ledger.work_once, what="another try")

    assert status_of(ledger, case) == "completed"
    assert len(done(world, "payments.refund")) == 1
    assert everything_once(world)


def test_mail_whose_answer_was_lost_is_sent_again_under_the_same_key(ledger, world, demo):
    world.journal.set_mode("mail", "ask_for_documents", "lose_answer", 0, 1)
    demo("after-sales").open(0)
    case = run_of(ledger, "after-sales")

    ledger.work_once()
    assert effect_of(ledger, case, "mail.ask_for_documents")["state"] == "unknown"
    eventually(ledger.work_once, what="another try")

    assert status_of(ledger, case) == "waiting"
    sent = [r for r in world.journal.requests() if r["action"] == "ask_for_documents"]
    assert sorted(r["outcome"] for r in sent) == ["done", "repeat"]
    assert len({r["key"] for r in sent}) == 1


def test_system_that_is_down_is_tried_again_later(ledger, world, demo):
    world.journal.set_mode("crm", "open_case", "fail", 0, 2)
    demo("after-sales").open(0)
    case = run_of(ledger, "after-sales")

    ledger.work_once()
    assert effect_of(ledger, case, "crm.open_case")["state"] == "failed"
    assert ledger.get(case)["failure_count"] == 1
    for _ in range(2):
        eventually(ledger.work_once, what="another try")

    assert status_of(ledger, case) == "waiting"
    assert effect_of(ledger, case, "crm.open_case")["attempt"] == 3
    assert everything_once(world)


# --- purchasing ---


def confirm(world: World, order: str) -> None:
    """Plays the supplier who was asked last."""
    callback = world.journal.callbacks(kind="supplier", subject=order)[0]
    form = {"callback": str(callback["n"]), "confirmed": "yes"}
    assert httpx.post(f"{world.url}/play/supplier/{order}", data=form).status_code == 200


def test_order_is_confirmed_by_the_supplier(ledger, world, demo):
    demo("purchasing").open(0)
    order = run_of(ledger, "purchasing")
    ledger.work_once()
    assert status_of(ledger, order) == "waiting"

    confirm(world, "po-1001")
    reaches(ledger, order, "ready")
    ledger.work_once()

    assert status_of(ledger, order) == "completed"
    promised = world.journal.callbacks(kind="supplier")[0]["body"]["delivery_date"]
    assert done(world, "erp.confirm_order")[0]["arguments"]["delivery_date"] == promised
    assert everything_once(world)


def test_order_whose_answer_was_lost_waits_for_a_person_who_finds_out(ledger, world, alice, demo):
    world.journal.set_mode("supplier", "place_order", "lose_answer", 0, 1)
    demo("purchasing").open(0)
    order = run_of(ledger, "purchasing")

    ledger.work_once()
    effect = effect_of(ledger, order, "supplier.place_order")
    assert status_of(ledger, order) == "review"
    assert effect["state"] == "unknown"
    assert "/runs/purchasing/po-1001" in effect["error"]["message"]
    book = next(r["url"] for r in ledger.get(order)["external_refs"] if r["system"] == "supplier")
    number = done(world, "supplier.place_order")[0]["result"]["id"]
    assert number in httpx.get(book).text

    alice.reconcile(order, effect["key"], "executed", receipt={"id": number})
    confirm(world, "po-1001")
    eventually(lambda: ledger.work_once() and status_of(ledger, order) == "completed", what="the end")

    assert len(done(world, "supplier.place_order")) == 1
    assert everything_once(world)


@pytest.fixture
def late_order(ledger, demo, tick):
    demo("purchasing", supplier_patience=1).open(1)
    run_id = run_of(ledger, "purchasing", 1)
    assert ledger.work_once() == run_id
    eventually(lambda: tick() or status_of(ledger, run_id) == "ready", what="the timer")
    assert ledger.work_once() == run_id
    return run_id


def test_order_of_a_silent_supplier_goes_to_the_second_one(ledger, world, alice, late_order):
    alice.decide(late_order, "late-supplier", "approve")
    ledger.work_once()
    assert status_of(ledger, late_order) == "waiting"
    confirm(world, "po-1002")
    reaches(ledger, late_order, "ready")
    ledger.work_once()

    assert status_of(ledger, late_order) == "completed"
    assert [r["arguments"]["supplier"] for r in done(world, "supplier.place_order")] == [
        "Slow River Mill",
        "Nordholz Timber",
    ]
    assert len(done(world, "supplier.cancel_order")) == 1
    assert everything_once(world)


def test_silent_supplier_is_reminded_when_the_buyer_can_wait(ledger, world, alice, late_order):
    alice.decide(late_order, "late-supplier", "respond", response={"reminder": "We can wait a day."})
    ledger.work_once()
    confirm(world, "po-1002")
    reaches(ledger, late_order, "ready")
    ledger.work_once()

    assert status_of(ledger, late_order) == "completed"
    assert done(world, "supplier.cancel_order") == []
    assert done(world, "supplier.remind")[0]["arguments"]["text"] == "We can wait a day."
    assert everything_once(world)


def test_order_that_is_not_wanted_any_more_is_cancelled_everywhere(ledger, world, alice, late_order):
    alice.decide(late_order, "late-supplier", "reject", reason="We do not need it any more")
    ledger.work_once()

    assert status_of(ledger, late_order) == "terminated"
    assert len(done(world, "supplier.cancel_order")) == 1
    assert len(done(world, "erp.cancel_order")) == 1
    assert everything_once(world)


def test_declined_order_is_undone(ledger, world, demo):
    demo("purchasing").open(0)
    order = run_of(ledger, "purchasing")
    ledger.work_once()
    (callback,) = world.journal.callbacks(kind="supplier")
    assert httpx.post(callback["url"], json={"confirmed": False, "reason": "Sold out"}).status_code == 202

    eventually(lambda: ledger.work_once() and status_of(ledger, order) == "terminated", what="the end")

    # Newest first: the supplier before our own books.
    assert [r["system"] for r in done(world, "supplier.cancel_order") + done(world, "erp.cancel_order")] == [
        "supplier",
        "erp",
    ]
    assert done(world, "supplier.cancel_order")[0]["n"] < done(world, "erp.cancel_order")[0]["n"]
    assert everything_once(world)


# --- operations ---


def test_price_list_is_published_as_the_reviewer_edited_it(ledger, world, alice, demo):
    demo("operations").open(1)
    campaign = run_of(ledger, "operations", 1)
    ledger.work_once()
    wait = alice.open_wait(campaign, "operations-review")
    arguments = {**wait["ask"]["effect"]["arguments"], "discount_percent": 25, "banner": "Garden sale"}

    alice.decide(campaign, "operations-review", "edit", arguments=arguments)
    ledger.work_once()

    assert status_of(ledger, campaign) == "completed"
    (live,) = done(world, "cms.publish_prices")
    assert live["arguments"] == arguments
    assert done(world, "mail.announce")[0]["arguments"]["text"] == "Garden sale"
    assert everything_once(world)


def test_edit_beyond_the_schema_is_refused_with_the_field(alice, demo, ledger):
    demo("operations").open(0)
    campaign = run_of(ledger, "operations")
    ledger.work_once()
    wait = alice.open_wait(campaign, "operations-review")
    arguments = {**wait["ask"]["effect"]["arguments"], "discount_percent": 80}
    body = {"choice": "edit", "wait_version": wait["version"], "arguments": arguments}

    answer = alice.http.post(f"/waits/{wait['id']}/decisions", json=body)

    assert answer.status_code == 422
    assert "discount_percent" in answer.json()["errors"][0]["pointer"]


def test_new_runs_are_opened_only_when_all_have_ended(ledger, alice, demo):
    agent = demo("operations")
    stop = threading.Event()
    opener = threading.Thread(target=lambda: agent.keep_busy(stop, every=0.05))
    opener.start()
    try:
        eventually(lambda: ledger.runs(flow="operations")["total"] == scenarios.AT_START, what="the first runs")
        for index in range(scenarios.AT_START):
            eventually(ledger.work_once, what="a run")
            alice.decide(run_of(ledger, "operations", index), "operations-review", "approve")
        assert ledger.runs(flow="operations")["total"] == scenarios.AT_START
        for _ in range(scenarios.AT_START):
            eventually(ledger.work_once, what="a run")
        eventually(lambda: ledger.runs(flow="operations")["total"] == scenarios.AT_START + 1, what="a new run")
    finally:
        stop.set()
        opener.join()
