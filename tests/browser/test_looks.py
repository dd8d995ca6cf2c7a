"""Every page in both themes and both widths: axe finds nothing, nothing overflows, nothing breaks the policy."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from rehydrate import clock, sender
from rehydrate.models import Delivery, Trouble, Wait
from rehydrate.webhooks import Outcome
from tests.contract.driver import (
    Agent,
    World,
    approval,
    callback,
    completed,
    done,
    effect,
    order,
    paused,
    started,
    unknown,
)
from tests.drilled import good_facts, kept

from .conftest import Desk

pytestmark = pytest.mark.browser
SitsDown = Callable[..., Desk]
axe = Axe()


def findings(page: Page) -> list[str]:
    """What axe objects to, and what sticks out to the right."""
    found = [
        f"{rule['id']}: {node['html'][:160]}" for rule in axe.run(page).response["violations"] for node in rule["nodes"]
    ]
    beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    if beyond > 0:
        found.append(f"{beyond} pixels too wide")
    return found


@pytest.fixture
def places(world: World, bot: Agent) -> dict[str, str]:
    """An address for each page, with something on it."""
    schema = {"type": "object", "properties": {"supplier": {"type": "string"}, "amount": {"type": "string"}}}
    ask = approval(
        effect="k1",
        ask={"risk": "high", "reasons": ["Too dear"], "rationale": "Cheapest", "schema": schema, "rollback": "Cancel",
             "details": [{"label": "Since", "value": "2019"}], "evidence": [{"title": "Offer", "url": "https://x.example"}]},
    )  # fmt: skip
    run = bot.open(*done(effect("m1", "mail.send"), "msg-7"), order(), paused(ask))
    wait = run.wait("legal-approval")["id"]
    world.person("alice").post(f"/waits/{wait}/comment", {"comment": "Seen"}).fine()
    low = bot.open(order(), paused(approval(effect="k1", ask={"risk": "low"}))).wait("legal-approval")["id"]
    plan = effect("p1", "erp.reserve", compensation={"system": "erp", "action": "unreserve"})
    lost = bot.open(plan, started("p1", arguments=plan["arguments"]), unknown("p1"), paused(callback()))
    held = bot.open(order(), paused(approval(effect="k1")))
    world.person("dave").takeover(held).fine()
    told, receiver, late = _deliveries(world, bot)
    over = bot.open()
    over.do(completed())
    wrong = good_facts()
    wrong.touched["payments.pay"] = 2
    failed = kept("effect-done-record-lost", wrong, error="it was killed")
    for _ in range(2):
        kept("restart-while-waiting")
    return {
        "inbox": "/?scope=available",
        "filtered": "/?scope=available&q=zzz",
        "empty": "/?scope=overdue",
        "unknown": "/?scope=unknown",
        "bulk": f"/inbox/bulk/?wait={low}",
        "runs": "/runs/",
        "run": f"/runs/{run.id}/?scope=available",
        "run without receipt": f"/runs/{lost.id}/?scope=unknown",
        "run over": f"/runs/{over.id}/",
        "timeline": f"/runs/{run.id}/timeline/",
        "approve": f"/waits/{wait}/decide/approve/",
        "conditions": f"/waits/{wait}/decide/conditions/",
        "edit": f"/waits/{wait}/decide/edit/",
        "reject": f"/waits/{wait}/decide/reject/",
        "respond": f"/waits/{wait}/decide/respond/",
        "info": f"/waits/{wait}/info/",
        "extend": f"/waits/{wait}/extend/",
        "reconcile": f"/runs/{lost.id}/reconcile/?key=p1",
        "takeover": f"/runs/{run.id}/takeover/",
        "hand back": f"/runs/{held.id}/handback/",
        "clear": f"/runs/{lost.id}/clear/",
        "retry": f"/runs/{lost.id}/retry/",
        "history": "/history/",
        "recovery": "/recovery/",
        "nothing recovered": "/recovery/?flow=none&from=2026-01-02&to=2026-01-01",
        "taken over": "/recovery/takeovers/",
        "readiness": "/readiness/",
        "drills": "/drills/",
        "drill": f"/drills/{failed.pk}/",
        "timers": "/timers/",
        "set aside": f"/runs/{_set_aside(bot)}/",
        "deliveries": "/deliveries/",
        "deliveries filtered": "/deliveries/?status=withdrawn",
        "delivery": f"/deliveries/{late}/",
        "receiver off": f"/receivers/{receiver}/off/",
        "run with deliveries": f"/runs/{told}/",
        "settings": "/settings/",
        "not there": "/nothing/",
    }


def _set_aside(bot: Agent) -> str:
    """A run whose row cannot be read, and to which what is due could not be applied."""
    run = bot.open(paused(callback()))
    Wait.objects.filter(run_id=run.id).update(policy="no object")
    now = clock.now()
    Trouble.objects.create(
        run_id=run.id, tries=3, since=now, tried_at=now, set_aside_at=now, error="ValidationError: no object"
    )
    return run.id


def _deliveries(world: World, bot: Agent) -> tuple[str, str, str]:
    """A run whose receiver took one delivery and not the other, and another flow's receiver that is switched off."""
    for flow, host in (("told", "agent"), ("gone", "gone")):
        world.apply(f'[flow.{flow}]\nrequired = []\ndeliver_to = "https://{host}.example/hooks?key=1"\n')
    run = bot.open(paused(callback()), flow="told", at=None)
    answers = [Outcome(seconds=0.041, status=204), Outcome(seconds=15.0, error="timeout", detail="it did not answer")]
    sender.send_due(lambda message: answers[0])
    envelope = bot.post(f"/runs/{run.id}/recall", {"holder": "bot/w1", "reason": "New input"}).ok()
    run.epoch = envelope["lease"]["epoch"]
    run.release().ok()
    sender.send_due(lambda message: answers[1])
    bot.open(flow="gone", holder=None, at=None)
    sender.send_due(lambda message: Outcome(seconds=0.2, status=410, error="http_410", answer="Gone"))
    late = Delivery.objects.get(run_id=run.id, last_error="timeout")
    return run.id, str(late.endpoint_id), str(late.pk)


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)])
def test_no_page_has_a_fault_that_axe_can_find_or_is_too_wide(
    sits_down: SitsDown, places: dict[str, str], theme: str, width: int
) -> None:
    desk = sits_down("frank", theme=theme, width=width)
    found = {name: faults for name, path in places.items() if (faults := findings(desk.open(path)))}
    assert found == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_dialogs_and_the_doors_are_faultless_too(sits_down: SitsDown, places: dict[str, str], theme: str) -> None:
    desk = sits_down("alice", theme=theme)
    page = desk.open(places["run"])
    page.keyboard.press("a")
    expect(page.get_by_role("dialog").get_by_role("button", name="Approve")).to_be_visible()
    assert findings(page) == []
    page.get_by_role("dialog").get_by_role("button", name="Approve").click()
    expect(page.locator("#proof-error")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    assert findings(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert findings(page) == []
    assert findings(desk.open("/sign-in/MQ.used-up/")) == []


def test_the_chinese_console_fits_on_a_phone(sits_down: SitsDown, places: dict[str, str]) -> None:
    desk = sits_down("frank", width=390, locale="zh-CN")
    page = desk.open(places["run"])
    expect(page.locator("html")).to_have_attribute("lang", "zh-hans")
    names = (
        "inbox",
        "run",
        "hand back",
        "history",
        "conditions",
        "drills",
        "recovery",
        "readiness",
        "timers",
        "set aside",
    )
    found = {name: faults for name in names if (faults := findings(desk.open(places[name])))}  # fmt: skip
    assert found == {}


def test_the_readiness_report_is_read_and_a_checklist_copied_by_keyboard_alone(
    sits_down: SitsDown, places: dict[str, str]
) -> None:
    desk = sits_down("frank", width=390)
    desk.page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=desk.url)
    page = desk.open(places["readiness"])
    page.get_by_label("It does something outside").focus()
    page.keyboard.press("Space")
    page.locator("[name=what-0]").focus()
    page.keyboard.type("was the payment sent?")
    page.get_by_role("button", name="One more line").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[name=what-5]")).to_be_focused()
    page.keyboard.type("what the chat said")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="2 fields would have been missing")).to_be_visible()
    assert findings(page) == []

    page = desk.open(places["drill"])
    page.get_by_role("button", name="Copy").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert "- [ ] **Outside world" in page.evaluate("navigator.clipboard.readText()")


def test_the_first_page_is_light_and_asks_no_other_host(sits_down: SitsDown, places: dict[str, str]) -> None:
    desk = sits_down("alice")
    hosts: set[str] = set()
    desk.page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    desk.open(places["inbox"])
    assert hosts == {desk.url.split("/")[2]}
    total = len(gzip.compress(desk.page.content().encode()))
    for path in desk.page.evaluate("performance.getEntriesByType('resource').map(r => new URL(r.name).pathname)"):
        if path.startswith("/static/"):
            total += len(gzip.compress(httpx.get(desk.url + path).content))
    assert total < 150_000
