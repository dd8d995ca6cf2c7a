"""The main way through, in Chromium: an ask arrives, is decided by keyboard, and the run finishes before one's eyes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Request, expect

from tests.conftest import eventually
from tests.contract.driver import Agent, World, approval, completed, executed, order, paused, started

from .conftest import PASSWORD, Desk

pytestmark = pytest.mark.browser
SitsDown = Callable[..., Desk]


def ask(bot: Agent, *, risk: str = "medium", **more: Any) -> tuple[Any, dict[str, Any]]:
    run = bot.open(order(), paused(approval(effect="k1", ask={"risk": risk, **more})))
    return run, run.wait("legal-approval")


def test_from_a_new_ask_to_a_finished_run_with_the_keyboard_alone(bot: Agent, sits_down: SitsDown) -> None:
    desk = sits_down("alice")
    page = desk.open("/?scope=available")
    expect(page.get_by_role("heading", name="All clear")).to_be_visible()

    run, _ = ask(bot, summary="Order PO-1 from ACME for €100?")
    expect(page.get_by_role("link", name="Order PO-1 from ACME for €100?")).to_be_visible()  # nothing was reloaded
    expect(page.locator('[data-scope="available"] b')).to_have_text("1")

    page.keyboard.press("j")
    expect(page.locator(".row-link:focus")).to_have_count(1)
    page.keyboard.press("a")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("“Order PO-1 from ACME” is carried out")
    assert run.wait("legal-approval")["status"] == "open"  # the key only opened the confirmation
    expect(dialog.get_by_label("Comment (optional)")).to_be_focused()
    page.keyboard.type("All right")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{run.id}/**")
    expect(page.locator(".flash")).to_contain_text("Decided.")
    assert run.wait("legal-approval")["decision"]["comment"] == "All right"

    expect(page.locator("#run-head")).to_contain_text("Ready for an agent")
    envelope = run.resume()
    expect(page.locator("#run-head")).to_contain_text("Running")
    assert envelope["run"]["id"] == run.id
    run.do(started("k1", arguments=run.effect("k1")["arguments"]), executed("k1", "PO-1"), completed())
    expect(page.locator("#run-next")).to_contain_text("Nothing: the run is finished.")
    expect(page.locator("#run-head .tag")).to_have_text("Completed")
    expect(page.locator("#run-timeline")).to_contain_text("carried out “Order PO-1 from ACME”, receipt PO-1")


def test_the_late_reviewer_is_told_who_was_quicker_and_loses_nothing(
    world: World, bot: Agent, sits_down: SitsDown
) -> None:
    run, wait = ask(bot, reasons=["Too dear"])
    bob = sits_down("bob")
    page = bob.open(f"/runs/{run.id}/")
    page.keyboard.press("r")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Too dear").check()
    dialog.get_by_label("In your own words").fill("Half the price next door")

    world.person("alice").approve(wait)
    expect(dialog.locator("#wait-state")).to_contain_text("alice was quicker and approved")  # by itself
    expect(dialog.get_by_label("In your own words")).to_have_value("Half the price next door")

    dialog.get_by_role("button", name="Reject").click()  # all the same
    expect(dialog.get_by_role("alert")).to_contain_text("alice was quicker and approved")
    expect(dialog.get_by_label("In your own words")).to_have_value("Half the price next door")
    assert run.wait("legal-approval")["status"] == "satisfied"
    assert len(run.decisions()) == 1


def test_half_typed_text_focus_and_selection_outlive_what_others_do(
    world: World, bot: Agent, sits_down: SitsDown
) -> None:
    run, wait = ask(bot)
    page = sits_down("alice").open(f"/runs/{run.id}/")
    box = page.get_by_label("Message")
    box.fill("I am not done")
    box.press("Home")
    world.person("bob").post(f"/waits/{wait['id']}/comment", {"comment": "Looks right to me"}).fine()
    expect(page.locator("#run-timeline")).to_contain_text("Looks right to me")
    expect(box).to_be_focused()
    page.keyboard.type("But ")
    expect(box).to_have_value("But I am not done")


def test_a_draft_comes_back_after_the_dialog_was_closed(bot: Agent, sits_down: SitsDown) -> None:
    run, _ = ask(bot)
    page = sits_down("alice").open(f"/runs/{run.id}/")
    page.keyboard.press("r")
    page.get_by_role("dialog").get_by_label("Reason").fill("Because of")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.wait_for_function("!document.activeElement.closest('dialog')")  # where the eye went, focus goes too
    page.keyboard.press("r")
    expect(page.get_by_role("dialog").get_by_label("Reason")).to_have_value("Because of")


def test_keys_do_nothing_in_inputs_with_modifiers_or_when_switched_off(bot: Agent, sits_down: SitsDown) -> None:
    run, _ = ask(bot)
    page = sits_down("alice").open("/?scope=available")
    search = page.get_by_role("searchbox")
    page.keyboard.press("/")
    expect(search).to_be_focused()
    page.keyboard.type("jar?")
    expect(search).to_have_value("jar?")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.locator(".row-link").first.focus()
    page.keyboard.press("Control+a")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
    page.keyboard.press("Escape")

    page.goto(page.url.split("/?")[0] + "/settings/")
    page.get_by_role("checkbox", name="Keyboard shortcuts").uncheck()
    page.get_by_role("button", name="Keep").click()
    page.goto(page.url.split("/settings")[0] + f"/runs/{run.id}/")
    page.keyboard.press("a")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert run.wait("legal-approval")["status"] == "open"


def test_high_risk_asks_for_the_password_in_the_same_dialog(bot: Agent, sits_down: SitsDown) -> None:
    run, _ = ask(bot, risk="high")
    page = sits_down("alice").open(f"/runs/{run.id}/")
    page.keyboard.press("a")
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Comment (optional)").fill("Checked twice")
    dialog.get_by_role("button", name="Approve").click()
    expect(dialog.locator("#proof-error")).to_contain_text("That is not your password.")
    expect(dialog.get_by_label("Comment (optional)")).to_have_value("Checked twice")
    dialog.get_by_label("High risk: your password again").fill(PASSWORD)
    dialog.get_by_role("button", name="Approve").click()
    expect(page.locator(".flash")).to_contain_text("Decided.")
    assert run.wait("legal-approval")["status"] == "satisfied"


def test_conditions_grow_by_rows_and_hold(bot: Agent, sits_down: SitsDown) -> None:
    run, _ = ask(bot)
    page = sits_down("alice").open(f"/runs/{run.id}/")
    page.locator(".bar").get_by_role("link", name="Approve with conditions").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Field").select_option("/amount")
    dialog.get_by_label("Limit").fill("90")
    dialog.get_by_role("button", name="One more condition").click()
    dialog.get_by_label("Field").nth(1).select_option("/supplier")
    dialog.get_by_label("Comparison").nth(1).select_option("==")
    dialog.get_by_label("Limit").nth(1).fill("ACME")
    dialog.get_by_role("button", name="Approve with conditions").click()
    expect(page.locator(".flash")).to_contain_text("Decided.")
    (decision,) = run.decisions()
    assert [(c["pointer"], c["op"], c["value"]) for c in decision["conditions"]] == [
        ("/amount", "<=", "90"),
        ("/supplier", "==", "ACME"),
    ]


def test_several_low_risk_asks_are_picked_with_x_and_approved_together(bot: Agent, sits_down: SitsDown) -> None:
    runs = [ask(bot, risk="low", summary=f"Order {n}")[0] for n in range(2)]
    page = sits_down("alice").open("/?scope=available")
    for _ in runs:
        page.keyboard.press("j")
        page.keyboard.press("x")
    expect(page.locator("[data-bulk-count]")).to_have_text("2")
    page.get_by_role("button", name="Approve together…").click()
    expect(page.get_by_role("heading", name="Approve these 2 asks")).to_be_visible()
    page.get_by_role("button", name="Approve all of these").click()
    expect(page.get_by_role("heading", name="2 were approved.")).to_be_visible()
    assert {run.wait("legal-approval")["status"] for run in runs} == {"satisfied"}


def test_everything_works_without_javascript(bot: Agent, sits_down: SitsDown) -> None:
    run, _ = ask(bot)
    page = sits_down("alice", js=False).open("/?scope=available")
    page.locator(".row-link").click()
    page.locator(".bar").get_by_role("link", name="Approve", exact=True).click()
    page.get_by_label("Comment (optional)").fill("By hand")
    page.get_by_role("button", name="Approve").click()
    expect(page.locator(".flash")).to_contain_text("Decided.")
    page.go_back()  # to a form that has been sent: it says so, and cannot be sent again
    expect(page.get_by_role("alert")).to_contain_text("You have decided this already: you approved")
    expect(page.get_by_role("button", name="Approve")).to_be_disabled()
    assert len(run.decisions()) == 1


def test_the_theme_switches_at_once_and_is_kept(bot: Agent, sits_down: SitsDown) -> None:
    desk = sits_down("alice")
    page = desk.page
    page.get_by_role("button", name="Dark theme").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.wait_for_function("fetch('/settings/').then(r => r.text()).then(t => t.includes('data-theme=\"dark\"'))")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_change_is_pushed_as_the_answer_to_a_request_that_was_waiting(
    world: World, bot: Agent, sits_down: SitsDown
) -> None:
    """A page that asked by the clock would be answered by a request that it sends after the change."""
    run, wait = ask(bot)
    page = sits_down("alice").page
    live = f"/runs/{run.id}/live/"
    sent: list[Request] = []
    over: list[Request] = []
    page.on("request", lambda request: sent.append(request) if live in request.url else None)
    page.on("requestfailed", lambda request: over.append(request) if live in request.url else None)
    page.on("requestfinished", lambda request: over.append(request) if live in request.url else None)
    page.goto(f"{page.url.split('/?')[0].rstrip('/')}/runs/{run.id}/")
    eventually(lambda: page.evaluate("1") and sent, what="the request that waits")
    asked = list(sent)
    with page.expect_response(lambda answer: live in answer.url) as answered:
        world.person("bob").approve(wait)
    assert answered.value.request in asked
    assert answered.value.status == 200
    expect(page.locator("#run-head")).to_contain_text("Ready for an agent")
    hidden = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true });"
    eventually(lambda: page.evaluate("1") and len(sent) > len(asked), what="the next request")
    page.evaluate(hidden % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
    eventually(lambda: page.evaluate("1") and len(over) == len(sent), what="the end of the request that waits")
    count = len(sent)
    run.resume()
    page.wait_for_timeout(1000)  # nothing is to happen
    assert len(sent) == count
    page.evaluate(hidden % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#run-head")).to_contain_text("Running")


def test_a_server_that_does_not_answer_is_told_and_the_page_catches_up(bot: Agent, sits_down: SitsDown) -> None:
    page = sits_down("alice").open("/?scope=available")
    page.route("**/inbox/live/**", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_contain_text("No connection")
    ask(bot, summary="Came meanwhile")
    page.unroute("**/inbox/live/**")
    expect(page.get_by_role("link", name="Came meanwhile")).to_be_visible()
    expect(page.locator("#trouble")).to_be_hidden()
