"""The console as plain pages and forms, without JavaScript: what somebody reads, sends, and is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from approvals.signin import make_link_path
from rehydrate import selectors
from tests.contract.driver import (
    Agent,
    World,
    approval,
    callback,
    completed,
    done,
    effect,
    executed,
    order,
    paused,
    started,
    unknown,
)

from .conftest import PASSWORD, text_of

Session = Callable[[str], Client]


def waiting_order(bot: Agent, *, risk: str = "medium", **ask: Any) -> tuple[Any, dict[str, Any]]:
    run = bot.open(order(), paused(approval(effect="k1", ask={"risk": risk, **ask})))
    return run, run.wait("legal-approval")


def token_of(response: Any) -> str:
    return str(response.context["token"])


def form(client: Client, wait: dict[str, Any], way: str = "approve", **fields: Any) -> Any:
    """Opens the confirmation and sends it, as a browser would."""
    url = f"/waits/{wait['id']}/decide/{way}/"
    opened = client.get(url)
    assert opened.status_code == 200
    data = {"token": token_of(opened), "wait_version": opened.context["version"], **fields}
    return client.post(url, data)


# --- who gets in


def test_nobody_sees_anything_before_signing_in(world: World, client: Client) -> None:
    for path in ("/", "/runs/", "/history/", "/settings/", "/inbox/live/"):
        answer = client.get(path)
        assert answer.status_code == 302
        assert answer.headers["Location"].startswith("/sign-in/")


def test_name_and_password_sign_in_and_a_wrong_one_is_told_at_the_form(world: World, session: Session) -> None:
    session("alice")
    visitor = Client()
    wrong = visitor.post("/sign-in/", {"username": "alice", "password": "nope"})
    assert wrong.status_code == 422
    assert "do not belong together" in text_of(wrong)
    right = visitor.post("/sign-in/", {"username": "alice", "password": PASSWORD, "next": "/runs/"})
    assert right.headers["Location"] == "/runs/"
    assert visitor.get("/runs/").status_code == 200


def test_signing_in_never_leads_to_another_host(world: World, session: Session) -> None:
    session("alice")
    there = Client().post("/sign-in/", {"username": "alice", "password": PASSWORD, "next": "https://evil.example/"})
    assert there.headers["Location"] == "/"


def test_a_sign_in_link_is_used_up_by_a_press_and_not_by_a_look(world: World) -> None:
    path = make_link_path(User.objects.get(username="alice"))
    scanner = Client()
    assert scanner.get(path).status_code == 200
    assert scanner.head(path).status_code == 200
    alice = Client()
    assert alice.post(path).status_code == 302
    assert alice.get("/").status_code == 200
    again = Client()
    assert again.get(path).status_code == 410
    assert again.post(path).status_code == 410
    assert again.get("/").status_code == 302


def test_guessing_a_password_is_slowed_down(world: World, session: Session) -> None:
    session("bob")
    guesser = Client(REMOTE_ADDR="192.0.2.7")
    answers = [guesser.post("/sign-in/", {"username": "bob", "password": str(n)}).status_code for n in range(12)]
    assert answers[:10] == [422] * 10
    assert answers[-1] == 429
    elsewhere = Client(REMOTE_ADDR="192.0.2.8").post("/sign-in/", {"username": "bob", "password": PASSWORD})
    assert elsewhere.status_code == 302


def test_another_workspaces_people_find_nothing(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    mallory = session("mallory")
    for path in (
        f"/runs/{run.id}/", f"/runs/{run.id}/live/", f"/runs/{run.id}/timeline/", f"/runs/{run.id}/takeover/",
        f"/runs/{run.id}/handback/", f"/runs/{run.id}/reconcile/?key=k1", f"/waits/{wait['id']}/decide/approve/",
        f"/waits/{wait['id']}/state/", f"/waits/{wait['id']}/assign/",
    ):  # fmt: skip
        assert mallory.get(path).status_code == 404, path
    for page in ("/?scope=available", "/?scope=review", "/runs/", "/history/"):
        assert "PO-1" not in text_of(mallory.get(page))
    assert run.status == "waiting"


# --- reading


def test_the_run_page_says_what_was_done_what_comes_what_went_wrong_and_what_to_do(
    world: World, bot: Agent, session: Session
) -> None:
    run = bot.open(
        *done(effect("m1", "mail.send"), "msg-7"),
        *done(effect("r1", "erp.reserve", compensation={"system": "erp", "action": "unreserve"}), "BR-9"),
        order(),
        paused(
            approval(
                effect="k1",
                ask={"rationale": "Cheapest of three", "rollback": "Cancel in 14 days", "reasons": ["Too dear"],
                     "evidence": [{"title": "Offers", "url": "https://x.example/o"}]},
            )
        ),
    )  # fmt: skip
    page = text_of(session("alice").get(f"/runs/{run.id}/"))
    for said in (
        "Order PO-1 from ACME?", "Decide: may the agent do this?", "Medium risk", "Cheapest of three",
        "Cancel in 14 days", "Offers", "msg-7", "BR-9", "undone by unreserve", "If approved", "If rejected",
        "Ready to resume?", "s3://cp/draft", "Timeline", "“Order PO-1 from ACME” is carried out",
    ):  # fmt: skip
        assert said in page, said


def test_text_of_agents_is_never_markup(world: World, bot: Agent, session: Session) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    run = bot.open(
        order(arguments={"n": evil, "supplier": "A", "amount": "1"}),
        paused(
            approval(
                effect="k1",
                ask={"summary": evil, "rationale": evil, "details": [{"label": evil, "value": evil}],
                     "evidence": [{"title": evil, "url": "javascript:alert(1)"}]},
            )
        ),
        title=evil,
    )  # fmt: skip
    alice = session("alice")
    for path in (f"/runs/{run.id}/", "/?scope=available", "/runs/", "/history/", f"/runs/{run.id}/timeline/"):
        body = alice.get(path).content.decode()
        assert "<script>alert" not in body
        assert "<img src=x" not in body
        assert 'href="javascript:' not in body


def test_inbox_counts_and_lists_come_out_the_same(world: World, bot: Agent, session: Session) -> None:
    for _ in range(3):
        waiting_order(bot)
    alice = session("alice")
    page = alice.get("/?scope=available")
    assert len(page.context["rows"]) == page.context["total"] == 3
    assert next(s["count"] for s in page.context["scopes"] if s["id"] == "available") == 3


def test_a_page_costs_the_same_number_of_queries_however_much_is_on_it(
    world: World, bot: Agent, session: Session
) -> None:
    alice = session("alice")
    costs: dict[str, list[int]] = {}
    for _ in range(2):
        run, _ = waiting_order(bot)
        for path in (
            "/?scope=available",
            "/inbox/live/?scope=available",
            "/runs/",
            "/history/",
            f"/runs/{run.id}/?scope=available",
        ):
            alice.get(path)  # what is read once for a process is read
            with CaptureQueriesContext(connection) as asked:
                assert alice.get(path).status_code == 200
            costs.setdefault(path.replace(run.id, "…"), []).append(len(asked))
        for _ in range(4):
            waiting_order(bot)
    assert {path: cost for path, cost in costs.items() if len(set(cost)) > 1} == {}
    assert max(max(cost) for cost in costs.values()) <= 17, costs


def test_search_and_filters_live_in_the_address_and_can_be_kept(world: World, bot: Agent, session: Session) -> None:
    waiting_order(bot, summary="Buy apples")
    waiting_order(bot, summary="Buy pears", risk="high")
    alice = session("alice")
    assert [r["summary"] for r in alice.get("/?scope=available&q=pears").context["rows"]] == ["Buy pears"]
    assert [r["summary"] for r in alice.get("/?scope=available&risk=high").context["rows"]] == ["Buy pears"]
    alice.post("/inbox/views/", {"name": "Pears", "query": "scope=available&q=pears"})
    assert "Pears" in text_of(alice.get("/"))
    assert "Pears" not in text_of(session("bob").get("/"))


def test_a_number_finds_its_run_and_the_rest_on_request(world: World, bot: Agent, session: Session) -> None:
    for name in ("order-1", "order-10"):
        bot.open(external_id=name)
    bot.open(order(resource="msg-7"), external_id="case-3")

    def found(query: str) -> set[str]:
        page = alice.get(f"/runs/?{query}")
        assert page.status_code == 200
        return {run["external_id"] for run in page.context["runs"]}

    alice = session("alice")
    assert found("q=order-1") == {"order-1"}
    assert "within=1" in alice.get("/runs/?q=order-1").content.decode()
    assert found("q=order-1&within=1") == {"order-1", "order-10"}
    assert found("q=rder-1") == {"order-1", "order-10"}
    assert found("q=msg-7") == {"case-3"}
    assert found("q=order-1&status=completed") == set()


def test_counts_go_no_further_than_they_show(
    world: World, bot: Agent, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selectors, "FIGURES_TO", 2)
    monkeypatch.setattr(selectors, "COUNTED_TO", 2)
    alice = session("alice")
    for expected, words in (
        ("1", "1 item,"),
        ("2", "2 items,"),
        ("2+", "More than 2 items,"),
        ("2+", "More than 2 items,"),
    ):
        waiting_order(bot)
        page = alice.get("/?scope=available")
        assert next(s["figure"] for s in page.context["scopes"] if s["id"] == "available") == expected
        assert words in text_of(page)
    assert len(page.context["rows"]) == 4


@pytest.mark.parametrize("scope", ["mine", "available", "overdue", "review", "unknown", "taken_over", "decided"])
def test_every_scope_has_a_real_empty_state(world: World, session: Session, scope: str) -> None:
    page = session("alice").get(f"/?scope={scope}")
    assert "All clear" in text_of(page)


def test_a_live_page_is_told_only_what_changed(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    state = alice.get(f"/runs/{run.id}/").context["live_state"]
    assert alice.get(f"/runs/{run.id}/live/", {"state": state}).status_code == 204
    world.person("bob").approve(wait)
    news = alice.get(f"/runs/{run.id}/live/", {"state": state})
    assert news.status_code == 200
    assert b'id="run-head" hx-swap-oob' in news.content
    assert b"<textarea" not in news.content  # never a form that somebody may be typing in
    newer = news.content.decode().split('"state": "')[1].split('"')[0]
    assert alice.get(f"/runs/{run.id}/live/", {"state": newer}).status_code == 204


# --- deciding


def test_opening_any_page_decides_nothing(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    for way in ("approve", "conditions", "edit", "reject", "respond"):
        assert alice.get(f"/waits/{wait['id']}/decide/{way}/").status_code == 200
        assert alice.head(f"/waits/{wait['id']}/decide/{way}/").status_code == 200
    assert run.wait("legal-approval")["status"] == "open"


def test_approving_lets_the_same_run_go_on_to_its_end(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    answer = form(session("alice"), wait, comment="Fine by me")
    assert answer.status_code == 302
    run.resume()
    arguments = run.effect("k1")["arguments"]
    run.do(started("k1", arguments=arguments), executed("k1", "PO-1"), completed())
    assert run.status == "completed"
    (decision,) = run.decisions()
    assert decision["decided_by"] == "alice"
    assert decision["comment"] == "Fine by me"
    assert decision["seen"]["wait_version"] == wait["version"]
    page = text_of(session("bob").get(f"/runs/{run.id}/"))
    assert "Nothing: the run is finished." in page


def test_the_same_form_sent_twice_decides_once_and_tells_no_error(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    url = f"/waits/{wait['id']}/decide/approve/"
    opened = alice.get(url)
    data = {"token": token_of(opened), "wait_version": opened.context["version"]}
    assert [alice.post(url, data).status_code for _ in range(2)] == [302, 302]
    assert len(run.decisions()) == 1
    assert run.events("refused") == []


def test_the_slower_reviewer_is_told_who_what_and_when_and_keeps_the_typed_text(
    world: World, bot: Agent, session: Session
) -> None:
    run, wait = waiting_order(bot, reasons=["Too dear"])
    bob = session("bob")
    opened = bob.get(f"/waits/{wait['id']}/decide/reject/")
    world.person("alice").approve(wait)
    told = bob.post(
        f"/waits/{wait['id']}/decide/reject/",
        {"token": token_of(opened), "wait_version": wait["version"], "preset": "Too dear", "reason": "half the price"},
    )
    assert told.status_code == 409
    assert "alice was quicker and approved" in text_of(told)
    assert "half the price" in told.content.decode()
    assert run.wait("legal-approval")["status"] == "satisfied"
    state = bob.get(f"/waits/{wait['id']}/state/?v={wait['version']}")
    assert "alice was quicker" in text_of(state)


def test_an_ask_that_changed_is_shown_anew_before_it_can_be_answered(
    world: World, bot: Agent, session: Session
) -> None:
    run, wait = waiting_order(bot)
    bob = session("bob")
    opened = bob.get(f"/waits/{wait['id']}/decide/approve/")
    world.person("alice").post(f"/waits/{wait['id']}/extend", {"due_in": 99999}).fine()
    assert "has changed" in text_of(bob.get(f"/waits/{wait['id']}/state/?v={wait['version']}"))
    stale = bob.post(
        f"/waits/{wait['id']}/decide/approve/", {"token": token_of(opened), "wait_version": wait["version"]}
    )
    assert stale.status_code == 409
    assert "has changed since you opened it" in text_of(stale)
    assert run.wait("legal-approval")["status"] == "open"
    again = bob.post(
        f"/waits/{wait['id']}/decide/approve/",
        {"token": token_of(stale), "wait_version": stale.context["version"]},
    )
    assert again.status_code == 302
    assert run.wait("legal-approval")["status"] == "satisfied"


def test_rejecting_needs_a_reason_preset_or_own(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot, reasons=["Too dear", "Wrong supplier"])
    alice = session("alice")
    silent = form(alice, wait, "reject")
    assert silent.status_code == 422
    assert "Say why" in text_of(silent)
    assert form(alice, wait, "reject", preset="Too dear", reason="by far").status_code == 302
    assert run.wait("legal-approval")["decision"]["reason"] == "Too dear – by far"


def test_conditions_are_rows_and_wrong_ones_are_told_at_the_row(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    none = form(alice, wait, "conditions", **{"pointer-0": "", "op-0": "<=", "value-0": ""})
    assert none.status_code == 422
    more = form(alice, wait, "conditions", **{"pointer-0": "/amount", "op-0": "<=", "value-0": "90", "add_row": "1"})
    assert "pointer-1" in more.content.decode()
    assert run.wait("legal-approval")["status"] == "open"
    good = form(alice, wait, "conditions", **{"pointer-0": "/amount", "op-0": "<=", "value-0": "90"})
    assert good.status_code == 302
    (decision,) = run.decisions()
    assert decision["choice"] == "approve_with_conditions"
    assert [(c["pointer"], c["op"], c["value"]) for c in decision["conditions"]] == [("/amount", "<=", "90")]


def test_editing_is_a_form_made_from_the_schema_checked_on_the_server_too(
    world: World, bot: Agent, session: Session
) -> None:
    schema = {
        "type": "object",
        "properties": {"supplier": {"type": "string", "title": "Supplier", "minLength": 3}, "n": {"readOnly": True}},
    }
    run, wait = waiting_order(bot, schema=schema)
    alice = session("alice")
    opened = alice.get(f"/waits/{wait['id']}/decide/edit/")
    assert [f.pointer for f in opened.context["draft"].fields] == ["/supplier"]
    short = form(alice, wait, "edit", **{"field:/supplier": "X"})
    assert short.status_code == 422
    assert any(f.error for f in short.context["draft"].fields)
    assert form(alice, wait, "edit", **{"field:/supplier": "ACME West"}).status_code == 302
    assert run.effect("k1")["arguments"] == {"n": "PO-1", "supplier": "ACME West", "amount": "100.00"}


def test_high_risk_asks_again_who_it_is(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot, risk="high")
    alice = session("alice")
    assert form(alice, wait).status_code == 422
    assert form(alice, wait, password="wrong").status_code == 422
    assert run.wait("legal-approval")["status"] == "open"
    assert form(alice, wait, password=PASSWORD).status_code == 302


def test_somebody_without_a_password_types_the_runs_number_instead(world: World, bot: Agent) -> None:
    run, wait = waiting_order(bot, risk="high")
    alice = Client()
    alice.post(make_link_path(User.objects.get(username="alice")))
    assert form(alice, wait, typed="something").status_code == 422
    assert form(alice, wait, typed=run.opened["external_id"]).status_code == 302


def test_who_may_not_decide_is_told_so_next_to_the_form(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    own = form(session("carol"), wait)  # the bot's owner asked for it
    assert own.status_code == 403
    assert "You asked for this yourself" in text_of(own)
    outsider = form(session("grace"), wait)
    assert outsider.status_code == 403
    assert "not among those who may decide" in text_of(outsider)
    assert run.wait("legal-approval")["status"] == "open"


def test_after_a_decision_the_next_item_opens(world: World, bot: Agent, session: Session) -> None:
    _, first = waiting_order(bot, summary="First")
    second_run, _ = waiting_order(bot, summary="Second")
    alice = session("alice")
    answer = form(alice, first, scope="available")
    assert answer.headers["Location"].startswith(f"/runs/{second_run.id}/?scope=available")
    page = text_of(alice.get(answer.headers["Location"]))
    assert "Decided: First" in page


def test_low_risk_asks_of_one_kind_are_approved_together_each_with_its_result(
    world: World, bot: Agent, session: Session
) -> None:
    low = [waiting_order(bot, risk="low", summary=f"Order {n}") for n in range(3)]
    high = waiting_order(bot, risk="high")
    alice = session("alice")
    ids = [wait["id"] for _, wait in low]
    refused = alice.get("/inbox/bulk/", {"wait": [*ids, high[1]["id"]]})
    assert "cannot be approved together" in text_of(refused)
    listed = alice.get("/inbox/bulk/", {"wait": ids})
    world.person("bob").reject(low[2][1], reason="No")
    result = alice.post(
        "/inbox/bulk/",
        {"wait": ids[:2], "token": token_of(listed), **{f"version-{w['id']}": w["version"] for _, w in low}},
    )
    assert "2 were approved." in text_of(result)
    assert [run.wait("legal-approval")["status"] for run, _ in low] == ["satisfied", "satisfied", "rejected"]


def test_a_secret_field_is_masked_on_every_page_and_survives_an_edit_that_leaves_it_alone(
    world: World, bot: Agent, session: Session
) -> None:
    iban = "DE89370400440532013000"
    world.apply(
        """
        [flow.paying]
        secret = ["/ask/effect/arguments/iban"]
        [flow.paying.wait.check]
        groups = ["legal"]
        [flow.paying.effect."bank.pay"]
        impact = "money"
        needs_approval = "check"
        """
    )
    pay = {"key": "p", "system": "bank", "action": "pay", "resource": "r", "arguments": {"iban": iban, "n": "1"}}
    ask = {"key": "check", "name": "check", "kind": "approval", "due_in": 999, "ask": {"effect": pay, "risk": "medium"}}
    run = bot.open(paused(ask), flow="paying")
    wait = run.wait("check")
    alice = session("alice")
    for path in (f"/runs/{run.id}/", f"/waits/{wait['id']}/decide/edit/", "/history/", "/?scope=available"):
        page = alice.get(path)
        assert page.status_code == 200
        assert iban not in page.content.decode(), path
    assert iban in session("erin").get(f"/runs/{run.id}/").content.decode()  # an auditor sees everything
    fields = {f.name: f.value for f in alice.get(f"/waits/{wait['id']}/decide/edit/").context["draft"].fields}
    assert form(alice, wait, "edit", **{**fields, "field:/n": "2"}).status_code == 302
    assert run.effect("p")["arguments"] == {"iban": iban, "n": "2"}


# --- care of a question


def test_a_question_is_taken_on_let_go_handed_over_and_asked_about(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    alice.post(f"/waits/{wait['id']}/hold/claim/")
    assert "you have it" in text_of(alice.get("/?scope=mine"))
    alice.post(f"/waits/{wait['id']}/hold/release/")
    page = alice.get(f"/waits/{wait['id']}/info/")
    alice.post(f"/waits/{wait['id']}/info/", {"token": token_of(page), "comment": "Is the price final?"})
    page = alice.get(f"/waits/{wait['id']}/assign/")
    alice.post(f"/waits/{wait['id']}/assign/", {"token": token_of(page), "to": "bob", "reason": "Yours"})
    seen = text_of(session("bob").get(f"/runs/{run.id}/"))
    assert "Is the price final?" in seen
    assert len(session("bob").get("/?scope=mine").context["rows"]) == 1


def test_a_comment_sent_twice_is_one_comment(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot)
    alice = session("alice")
    page = alice.get(f"/runs/{run.id}/")
    for _ in range(2):
        alice.post(f"/waits/{wait['id']}/comment/", {"token": token_of(page), "comment": "Looks right"})
    assert len(run.events("wait.commented")) == 1


# --- holding the wheel


def test_taking_over_and_handing_back_shows_what_the_agent_will_be_told(
    world: World, bot: Agent, session: Session
) -> None:
    run, _ = waiting_order(bot)
    dave = session("dave")
    page = dave.get(f"/runs/{run.id}/takeover/")
    dave.post(f"/runs/{run.id}/takeover/", {"token": token_of(page), "reason": "The supplier called"})
    assert run.status == "taken_over"
    assert "then hand the run back" in text_of(dave.get(f"/runs/{run.id}/"))
    page = dave.get(f"/runs/{run.id}/handback/")
    fields = {
        "token": token_of(page), "stage": "ordered", "checkpoint_ref": "s3://cp/ordered", "note": "Ordered by phone",
        "reason": "Ordered by phone", "done-0": "executed", "receipt-0": "PO-1", "own-system-0": "phone",
        "own-action-0": "call",
    }  # fmt: skip
    preview = dave.post(f"/runs/{run.id}/handback/", {**fields, "step": "preview"})
    assert preview.status_code == 200
    assert "What the agent will be told" in text_of(preview)
    assert run.status == "taken_over"
    sent = dave.post(f"/runs/{run.id}/handback/", {**fields, "token": token_of(preview), "step": "send"})
    assert sent.status_code == 302, text_of(sent)
    look = run.look()
    assert (look["status"], look["stage"]) == ("ready", "ordered")
    assert run.state("k1") == "executed"


def test_an_unknown_outcome_is_found_in_the_inbox_reconciled_and_the_run_goes_on(
    world: World, bot: Agent, session: Session
) -> None:
    plan = effect("p1", "erp.reserve", compensation={"system": "erp", "action": "unreserve"})
    run = bot.open(plan, started("p1", arguments=plan["arguments"]), unknown("p1"), paused(callback()))
    dave = session("dave")
    assert len(dave.get("/?scope=unknown").context["rows"]) == 1
    page = dave.get(f"/runs/{run.id}/reconcile/?key=p1")
    empty = dave.post(f"/runs/{run.id}/reconcile/?key=p1", {"token": token_of(page)})
    assert empty.status_code == 422
    dave.post(
        f"/runs/{run.id}/reconcile/?key=p1",
        {"token": token_of(page), "outcome": "executed", "receipt_id": "R-77", "reason": "Seen in the ERP"},
    )
    assert run.state("p1") == "executed"
    assert run.effect("p1")["receipt"]["id"] == "R-77"
    assert len(dave.get("/?scope=unknown").context["rows"]) == 0


def test_a_viewer_who_tries_an_operators_act_is_told_and_nothing_happens(
    world: World, bot: Agent, session: Session
) -> None:
    run, _ = waiting_order(bot)
    victor = session("victor")
    page = victor.get(f"/runs/{run.id}/terminate/")
    refused = victor.post(f"/runs/{run.id}/terminate/", {"token": token_of(page), "reason": "Because"})
    assert refused.status_code == 403
    assert "may not do this here" in text_of(refused)
    assert run.status == "waiting"


# --- words, history, settings


def test_the_language_is_kept_and_everything_speaks_it(world: World, bot: Agent, session: Session) -> None:
    run, _ = waiting_order(bot)
    alice = session("alice")
    alice.post("/settings/switch/", {"language": "zh-hans", "next": "/"})
    page = alice.get(f"/runs/{run.id}/")
    assert 'lang="zh-hans"' in page.content.decode()
    assert "接下来应该做什么" in text_of(page)
    other_browser = Client()
    other_browser.force_login(User.objects.get(username="alice"))
    assert "我可处理的" in text_of(other_browser.get("/"))


def test_settings_keep_zone_theme_and_keys_and_refuse_a_zone_that_is_none(world: World, session: Session) -> None:
    alice = session("alice")
    base = {"form": "preferences", "language": "", "theme": "dark"}
    wrong = alice.post("/settings/", {**base, "time_zone": "Mars/Olympus"})
    assert wrong.status_code == 422
    assert "No such time zone" in text_of(wrong)
    assert alice.post("/settings/", {**base, "time_zone": "Asia/Shanghai"}).status_code == 302
    body = alice.get("/").content.decode()
    assert 'data-theme="dark"' in body
    assert 'data-shortcuts="off"' in body


def test_history_finds_who_did_what_across_runs(world: World, bot: Agent, session: Session) -> None:
    _, first = waiting_order(bot, summary="First")
    second, _ = waiting_order(bot, summary="Second")
    world.person("alice").reject(first, reason="Too dear")
    erin = session("erin")
    assert "alice rejected: “Too dear”" in text_of(erin.get("/history/?what=decisions"))
    assert {e["run_id"] for e in erin.get(f"/history/?q={second.id}").context["entries"]} == {
        e["run_id"] for e in erin.get(f"/history/?q={second.opened['external_id']}").context["entries"]
    }
    assert erin.get("/history/?kind=person").context["entries"][0]["actor"]["id"] == "alice"
    assert "Nothing fits the search" in text_of(erin.get("/history/?q=nothing-like-this"))
    assert erin.get("/history/?from=2999-01-01").context["entries"] == []
    assert erin.get("/history/?from=yesterday&cursor=x").status_code == 200


@pytest.mark.parametrize(
    "nonsense", ["%00", "%ff%fe", "'\"><b>", "x" * 5000, "%F0%9F%92%A9", "-1", "1e400", "NaN", "%", "..%2f", "\u202e"]
)
def test_no_address_breaks_a_page(world: World, bot: Agent, session: Session, nonsense: str) -> None:
    run, wait = waiting_order(bot)
    frank = session("frank")
    for path in (
        f"/?scope={nonsense}", f"/?scope=available&q={nonsense}&flow={nonsense}&risk={nonsense}",
        f"/?scope=available&cursor={nonsense}", f"/inbox/live/?state={nonsense}", f"/inbox/bulk/?wait={nonsense}",
        f"/runs/?q={nonsense}&status={nonsense}&label={nonsense}&system={nonsense}", f"/runs/?older_than={nonsense}",
        f"/runs/?cursor={nonsense}", f"/runs/{run.id}/?wait={nonsense}&scope={nonsense}",
        f"/runs/{run.id}/timeline/?cursor={nonsense}", f"/runs/{run.id}/live/?state={nonsense}",
        f"/runs/{run.id}/reconcile/?key={nonsense}", f"/runs/{run.id}/retry/?effect={nonsense}",
        f"/waits/{wait['id']}/state/?v={nonsense}", f"/history/?q={nonsense}&from={nonsense}&kind={nonsense}",
        f"/history/?cursor={nonsense}", f"/sign-in/{nonsense.replace('/', '')}/", f"/sign-in/?next={nonsense}",
    ):  # fmt: skip
        assert frank.get(path).status_code < 500, path


def test_no_answer_typed_breaks_a_form(world: World, bot: Agent, session: Session) -> None:
    run, wait = waiting_order(bot, risk="low")
    alice, dave = session("alice"), session("dave")
    for typed in (
        "a\x00b",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        "9" * 400,
        "x" * 9000,
        "[" * 9000,
    ):
        answers = [
            form(alice, wait, "conditions", **{"pointer-0": "/amount", "op-0": "<=", "value-0": typed}, comment=typed),
            form(alice, wait, "edit", **{"field:/supplier": typed, "field:/amount": typed}),
            form(alice, wait, "reject", reason=typed),
            form(alice, wait, "respond", response=typed),
        ]
        page = dave.get(f"/runs/{run.id}/handback/")
        answers.append(
            dave.post(
                f"/runs/{run.id}/handback/",
                {"token": token_of(page), "step": "send", "stage": typed, "reason": typed, "own-system-0": typed,
                 "own-action-0": typed, "own-receipt-0": typed, "done-0": typed, "receipt-0": typed, "note": typed},
            )
        )  # fmt: skip
        assert {a.status_code // 100 for a in answers} <= {3, 4}
        if run.wait("legal-approval")["status"] != "open":
            run, wait = waiting_order(bot, risk="low")


def test_pages_that_are_not_there_say_so(world: World, session: Session) -> None:
    alice = session("alice")
    for path in ("/nothing/", "/runs/019a0000-0000-7000-8000-000000000001/", "/runs/no-uuid/"):
        answer = alice.get(path)
        assert answer.status_code == 404
        assert "That is not here" in text_of(answer)


def test_a_row_that_was_drawn_before_is_drawn_anew_for_whoever_holds_it(
    world: World, bot: Agent, session: Session
) -> None:
    """Rows are kept as they were drawn; who has claimed an ask is told so, and all others whose it is."""
    _, wait = waiting_order(bot)
    alice, bob = session("alice"), session("bob")
    assert "has it" not in text_of(alice.get("/?scope=available"))
    world.person("alice").post(f"/waits/{wait['id']}/claim", {}).ok()
    assert "you have it" in text_of(alice.get("/?scope=mine"))
    assert "you have it" not in text_of(bob.get("/?scope=mine"))
    chinese = alice.get("/?scope=mine", headers={"Accept-Language": "zh-hans"})
    assert "you have it" not in text_of(chinese)
