"""The real thing, `manage.py up` with its demo, in the hands of a reviewer who knows only what the pages say.

One `up` serves the whole module. The tests are one working day: they run in this order, each on runs of its own.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from tests.conftest import HOME, eventually, free_port
from tests.test_up import Up

# One process after the other shares the module's `up`.
pytestmark = [pytest.mark.browser, pytest.mark.processes]

SECONDS = 1000
PATIENCE = 90 * SECONDS
"""Milliseconds for what takes two seconds on an idle machine."""


@dataclass
class Reviewer:
    """Somebody before a browser. Goes from page to page by links alone."""

    up: Up
    url: str
    context: BrowserContext
    page: Page

    def sign_in(self, link: str) -> None:
        self.page.goto(link)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{self.url}/")

    def scope(self, name: str) -> None:
        """A scope of the inbox, from the rail."""
        self.page.get_by_role("navigation", name="Inbox").get_by_role("link", name=name).click()

    def take_up(self, scope: str, words: str) -> None:
        """Opens the item of the inbox that has these words, as soon as it is there."""
        self.scope(scope)
        row = self.page.locator(".row", has_text=words)
        expect(row).to_have_count(1, timeout=PATIENCE)
        row.locator(".row-link").click()
        expect(self.head).to_be_visible()

    def find_run(self, number: str) -> None:
        """Opens a run from the list of all runs, by its number."""
        self.page.get_by_role("navigation", name="More places").get_by_role("link", name="Runs").click()
        self.page.get_by_label("Search", exact=True).fill(number)
        self.page.get_by_role("button", name="Filter").click()
        self.page.locator(".row", has_text=number).locator(".row-link").click()
        expect(self.head).to_contain_text(number)

    @property
    def head(self) -> Locator:
        return self.page.locator("#run-head")

    def status(self, word: str) -> None:
        """The run comes into this state before one's eyes."""
        expect(self.head.locator(".tag")).to_have_text(word, timeout=PATIENCE)

    def choose(self, name: str) -> Locator:
        """Presses a choice of the bar, or of its menu; the confirmation that opens."""
        bar = self.page.locator("#run-bar")
        link = bar.get_by_role("link", name=name).locator("visible=true")
        if not link.count():
            bar.get_by_text("More", exact=True).click()
        link.first.click()
        return self.dialog

    @property
    def dialog(self) -> Locator:
        return self.page.get_by_role("dialog")

    def follow(self, link: Locator) -> Page:
        """A link out of the console, which opens a page beside it."""
        with self.context.expect_page() as opened:
            link.click()
        opened.value.wait_for_load_state()
        return opened.value

    def what_arrived(self) -> list[list[str]]:
        """The outside world's own list for the run on the page, the newest first: what, number, outcome."""
        there = self.follow(self.page.locator("#run-body dt:has-text('Where to look') + dd a").first)
        expect(there.get_by_role("heading", level=1)).to_contain_text("What arrived for")
        rows = [row.locator("td").all_inner_texts() for row in there.get_by_role("row").all()[1:]]
        there.close()
        return [row[1:] for row in rows]


class World:
    """The outside world as a machine sees it: what was really done, how often."""

    def __init__(self, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{json.loads((folder / 'demo.json').read_text())['world_port']}"

    def done(self, run: str, action: str) -> list[dict[str, Any]]:
        """What was done under the keys of a run, `flow/number`."""
        got = httpx.get(f"{self.url}/journal", params={"run": run}, timeout=30).json()["requests"]
        return [r["arguments"] for r in got if f"{r['system']}.{r['action']}" == action and r["outcome"] == "done"]

    def doubled(self) -> list[str]:
        """Whatever was done more than once."""
        return [key for key, times in httpx.get(f"{self.url}/counts", timeout=30).json().items() if times != 1]

    def misbehave(self, **how: Any) -> None:
        httpx.post(f"{self.url}/modes", json=how, timeout=30, follow_redirects=True).raise_for_status()


@pytest.fixture(scope="module")
def folder() -> Path:
    """The data folder; root's PostgreSQL passes through what is above it."""
    above = Path(tempfile.mkdtemp(dir=HOME))
    if os.geteuid() == 0:
        above.chmod(0o711)
    return above / "data"


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[[], Up]]:
    """Starts `up` with its demo, always on the same port and folder."""
    port = str(free_port())
    started: list[Up] = []

    def begin() -> Up:
        started.append(Up(folder, "--port", port))
        return started[-1]

    yield begin
    for up in started:
        if up.process.poll() is None:
            up.end()


@pytest.fixture(scope="module")
def reviewer(start: Callable[[], Up], chromium: Browser) -> Iterator[Reviewer]:
    up = start()
    url = up.ready()
    context = chromium.new_context(locale="en-GB", reduced_motion="reduce", viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(30 * SECONDS)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    seat = Reviewer(up, url, context, page)
    seat.sign_in(up.wait_for(rf"({url}/sign-in/\S+)")[1])
    yield seat
    context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def world(reviewer: Reviewer, folder: Path) -> World:
    return World(folder)


def test_a_newcomer_signs_in_by_the_link_and_has_work_before_them(reviewer: Reviewer) -> None:
    page = reviewer.page
    expect(page.get_by_role("heading", level=1)).to_have_text("Available to me")
    for words in ("24 months of oven maintenance", "Lease of six electric forklifts", "the spring price list"):
        expect(page.locator(".row", has_text=words)).to_be_visible(timeout=PATIENCE)
    unknown = page.locator('[data-scope="unknown"] b')
    expect(unknown).to_have_text("1", timeout=PATIENCE)


def test_an_order_whose_answer_was_lost_is_looked_up_outside_and_goes_on(reviewer: Reviewer, world: World) -> None:
    page = reviewer.page
    reviewer.take_up("Unknown outcome", "Order")
    number = page.locator("#run-head .id").inner_text()
    in_doubt = page.locator("#run-body .fx[data-unknown]")
    expect(in_doubt).to_contain_text("did not answer")
    there = reviewer.follow(in_doubt.get_by_role("link", name=f"{world.url}/runs/"))
    receipt = there.get_by_role("row", name="supplier: place order").get_by_role("link").inner_text()
    there.close()

    in_doubt.get_by_role("link", name="Find out and reconcile").click()
    dialog = reviewer.dialog
    expect(dialog.get_by_role("link", name=number).first).to_have_attribute("href", re.compile(world.url))
    dialog.get_by_label("It happened.", exact=True).check()
    dialog.get_by_label("Receipt or number found there").fill(receipt)
    dialog.get_by_label("Where you looked").fill("The supplier has it in its list of orders")
    dialog.get_by_role("button", name="Record what I found").click()
    expect(page.locator(".flash")).to_contain_text("Recorded.")

    expect(page.locator("#run-body .fx[data-unknown]")).to_have_count(0)
    expect(page.locator("#run-body")).to_contain_text(receipt)
    reviewer.status("Completed")  # the supplier confirms by itself
    assert len(world.done(f"purchasing/{number}", "supplier.place_order")) == 1


def test_a_contract_is_approved_on_a_condition_and_sent_once_within_it(reviewer: Reviewer, world: World) -> None:
    page = reviewer.page
    reviewer.take_up("Available to me", "oven maintenance")
    expect(page.locator("#run-body")).to_contain_text("above the 45,000 EUR that the frame contract foresees")
    dialog = reviewer.choose("Approve with conditions")
    row = dialog.locator(".cond-row").first
    row.get_by_label("Field").select_option(label="Price (48000.00)")
    row.get_by_label("Comparison").select_option(label="≤")
    row.get_by_label("Limit").fill("45000.00")
    dialog.get_by_role("button", name="Approve with conditions").click()
    expect(dialog).to_have_count(0)

    # The price is above that: the page says so, and what clearing it lets the agent do.
    reviewer.take_up("Needs review", "oven maintenance")
    expect(page.locator("#run-next")).to_contain_text("the agent may change what your condition names, to keep to it")
    page.locator("#run-next").get_by_role("link", name="Clear to go on").click()
    dialog.get_by_label("Reason").fill("Sales agreed to the lower price by telephone")
    dialog.get_by_role("button", name="Clear").click()
    expect(dialog).to_have_count(0)

    reviewer.find_run("contract-17")
    reviewer.status("Completed")
    sent = [line for line in reviewer.what_arrived() if line[0] == "esign: send"]
    assert [line[2] for line in sent] == ["done"]
    assert [told["amount"] for told in world.done("contract-approval/contract-17", "esign.send")] == ["45000.00"]


def test_a_contract_is_rejected_with_a_reason_and_its_draft_taken_back(reviewer: Reviewer, world: World) -> None:
    page = reviewer.page
    reviewer.take_up("Available to me", "electric forklifts")
    draft = "Draft of contract-18 for Harbour Logistics in the customer file"
    expect(page.locator("#run-body .then [data-tone=stop]")).to_contain_text(draft)  # the consequence, in advance
    dialog = reviewer.choose("Reject")
    dialog.get_by_label("The terms are not ours").check()
    dialog.get_by_role("button", name="Reject").click()
    expect(dialog).to_have_count(0)

    reviewer.find_run("contract-18")
    reviewer.status("Terminated")
    expect(page.locator("#run-timeline")).to_contain_text("The terms are not ours")
    assert [line[0] for line in reviewer.what_arrived()] == ["crm: delete draft", "crm: create draft"]
    assert world.done("contract-approval/contract-18", "esign.send") == []


def test_a_customer_sends_documents_and_is_refunded_once(reviewer: Reviewer, world: World) -> None:
    page = reviewer.page
    reviewer.find_run("case-31")
    reviewer.status("Waiting")
    expect(page.locator("#run-body")).to_contain_text("a photo of the damage and the receipt")
    customer = reviewer.follow(page.locator("#run-body").get_by_role("link", name="/play/customer/case-31").first)
    customer.get_by_label("What you would like to say").fill("It leaks from below.")
    customer.get_by_role("button", name="Send the documents").click()
    expect(customer.locator("main")).to_contain_text("The run goes on within a few seconds.")
    customer.close()

    expect(page.locator("#run-bar").get_by_role("link", name="Approve")).to_be_visible(timeout=PATIENCE)
    expect(page.locator("#run-body")).to_contain_text("It leaks from below.")
    reviewer.choose("Approve").get_by_role("button", name="Approve").click()
    expect(page.locator(".flash")).to_contain_text("Decided.")
    reviewer.status("Completed")
    assert [told["amount"] for told in world.done("after-sales/case-31", "payments.refund")] == ["189.00"]


def test_a_reviewer_edits_what_is_published(reviewer: Reviewer, world: World) -> None:
    reviewer.take_up("Available to me", "the garden sale")
    dialog = reviewer.choose("Edit and approve")
    expect(dialog).to_contain_text("Above 30 % we sell below cost.")
    discount = dialog.get_by_label("Discount in %")
    expect(discount).to_have_value("35")
    dialog.get_by_role("button", name="Edit and approve").click()
    expect(dialog.locator(".field .error")).to_be_visible()  # the ledger's word on 35, beside the field
    discount.fill("25")
    dialog.get_by_label("Text of the banner").fill("Everything for the garden, 25 % off.")
    dialog.get_by_role("button", name="Edit and approve").click()
    expect(dialog).to_have_count(0)

    reviewer.find_run("campaign-6")
    reviewer.status("Completed")
    published = world.done("operations/campaign-6", "cms.publish_prices")
    assert [(told["discount_percent"], told["banner"]) for told in published] == [
        (25, "Everything for the garden, 25 % off.")
    ]


def test_an_agent_killed_while_it_acts_leaves_a_doubt_that_a_person_settles(reviewer: Reviewer, world: World) -> None:
    page, run = reviewer.page, "contract-approval/contract-29"
    clerk = reviewer.up.manage("issue_key", "agent", "--name", "clerk", "--owner", "carol")
    httpx.post(
        f"{reviewer.url}/api/v1/runs",
        headers={"Authorization": f"Bearer {clerk}"},
        json={
            "flow": "contract-approval",
            "external_id": "contract-29",
            "title": "contract-29: an agent will be killed over it",
            "input": {"ref": f"{world.url}/documents/{run}"},
        },
        timeout=30,
    ).raise_for_status()
    world.misbehave(system="esign", action="send", mode="slow", seconds=60, times=1)
    reviewer.take_up("Available to me", "contract-29")
    reviewer.choose("Approve").get_by_role("button", name="Approve").click()
    expect(reviewer.dialog).to_have_count(0)

    # The request is there, its answer is a minute away: the agent is in the middle of it.
    eventually(lambda: world.done(run, "esign.send"), within=60, what="the request")
    agent = agent_of(reviewer.up, "contract-approval")
    agent.kill()
    reviewer.up.wait_for(r"contract-approval ended \(by SIGKILL\)")
    eventually(lambda: agent_of(reviewer.up, "contract-approval").pid != agent.pid, within=60, what="a new agent")

    reviewer.take_up("Unknown outcome", "contract-29")
    arrived = reviewer.what_arrived()
    assert [line[0] for line in arrived] == ["esign: send", "crm: create draft"]
    page.locator("#run-body .fx[data-unknown]").get_by_role("link", name="Find out and reconcile").click()
    dialog = reviewer.dialog
    dialog.get_by_label("It happened.", exact=True).check()
    dialog.get_by_label("Receipt or number found there").fill(arrived[0][1])
    dialog.get_by_label("Where you looked").fill("It stands in the list of what went out for signature")
    dialog.get_by_role("button", name="Record what I found").click()
    expect(dialog).to_have_count(0)

    reviewer.find_run("contract-29")
    reviewer.status("Completed")
    assert len(world.done(run, "esign.send")) == 1
    assert [told["envelope"] for told in world.done(run, "crm.mark_sent")] == [arrived[0][1]]
    assert world.doubled() == []


def agent_of(up: Up, flow: str) -> psutil.Process:
    """The supervisor's child that serves this flow."""

    def found() -> psutil.Process | None:
        for child in up.children():
            try:
                if child.cmdline()[-2:] == ["agent", flow]:
                    return child
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    return eventually(found, within=60, what=f"the agent of {flow}")


def test_a_silent_supplier_is_reminded_and_confirms(reviewer: Reviewer, world: World) -> None:
    page = reviewer.page
    reviewer.take_up("Available to me", "Slow River Mill has not confirmed order po-1002")
    dialog = reviewer.choose("Answer")
    dialog.get_by_label("Reminder to Slow River Mill").fill("Dear miller, will there be panels?")
    dialog.get_by_role("button", name="Answer").click()
    expect(dialog).to_have_count(0)

    reviewer.find_run("po-1002")
    expect(page.locator("#run-body")).to_contain_text("Slow River Mill, to confirm the order", timeout=PATIENCE)
    supplier = reviewer.follow(page.locator("#run-body").get_by_role("link", name="/play/supplier/po-1002").first)
    supplier.get_by_role("button", name="Confirm the order").last.click()
    supplier.close()
    reviewer.status("Completed")
    reminders = world.done("purchasing/po-1002", "supplier.remind")
    assert [told["text"] for told in reminders] == ["Dear miller, will there be panels?"]
    assert len(world.done("purchasing/po-1002", "erp.confirm_order")) == 1


def test_stopped_and_started_again_everything_is_where_it_was(
    reviewer: Reviewer, world: World, start: Callable[[], Up]
) -> None:
    page = reviewer.page
    dave = reviewer.up.manage("issue_key", "person", "--user", "dave")

    def listed(what: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{reviewer.url}/api/v1/{what}", headers={"Authorization": f"Bearer {dave}"}, timeout=30)
        return list(answer.raise_for_status().json()["results"])

    def at_rest() -> dict[str, str]:
        """What nobody but a person moves on: ended runs, and open questions."""
        ended = {r["external_id"]: f"{r['id']} {r['status']}" for r in listed("runs?limit=200") if r["ended_at"]}
        waits = listed("waits?status=open&limit=200")
        return ended | {w["id"]: f"{w['run']} {w['due_at']}" for w in waits if w["kind"] == "approval"}

    reviewer.find_run("contract-17")
    before = at_rest()
    assert {"contract-17", "contract-18", "contract-29", "case-31", "campaign-6", "po-1002"} <= before.keys()
    assert reviewer.up.end() == 0

    reviewer.up = start()
    assert reviewer.up.ready() == reviewer.url
    assert before.items() <= at_rest().items()
    page.reload()
    reviewer.status("Completed")  # and still signed in
    reviewer.take_up("Available to me", "the spring price list")
    reviewer.choose("Approve").get_by_role("button", name="Approve").click()
    expect(reviewer.dialog).to_have_count(0)
    reviewer.find_run("campaign-5")
    reviewer.status("Completed")
    assert world.doubled() == []
    assert reviewer.up.manage("verify_ledger").startswith("verified: ")
