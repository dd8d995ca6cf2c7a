"""How well recovery goes, as pages and for Prometheus: what they count, to whom they show it, what they cost."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from prometheus_client.parser import text_string_to_metric_families

from audit import metrics, recovery
from rehydrate.models import Workspace
from tests.contract.driver import Agent, World, approval, callback, completed, done, effect, ev, timer
from tests.contract.sweep import sweep

from .conftest import text_of

Session = Callable[[str], Client]


@pytest.fixture
def happened(world: World, bot: Agent, clock: Any) -> dict[str, Any]:
    """One of each: resumes after 11 s and 61 s, a repeated effect, a takeover with an engineer, time-outs, a lack."""
    dave, alice = world.person("dave"), world.person("alice")
    twice = bot.open(*done(effect("m", "mail.send")))
    twice.pause(timer(due_in=10))
    clock.advance(seconds=11)
    twice.resume()
    twice.do(ev("effect.executed", key="m", receipt={"id": "x-again"}))
    slow = bot.open()
    wait = slow.pause(approval())
    clock.advance(seconds=61)
    alice.approve(wait)
    slow.resume()
    slow.do(completed())
    held = bot.open()
    held.pause(approval())
    dave.takeover(held).fine()
    clock.advance(seconds=30)
    dave.handback(held, needed_engineer=True).fine()
    lost = bot.open()
    lost.pause(callback("c", due_in=10))
    sure = bot.open()
    sure.pause(callback("c", due_in=10, on_timeout="continue"))
    clock.advance(seconds=11)
    sweep()
    lacking = bot.open(at=None)
    lacking.pause(timer(due_in=1000))
    return {"twice": twice, "slow": slow, "held": held, "lost": lost, "sure": sure, "lacking": lacking}


def queries(client: Client, path: str) -> int:
    with CaptureQueriesContext(connection) as captured:
        assert client.get(path).status_code == 200
    return len(captured)


# --- the figures


def test_each_figure_says_what_it_counts_and_leads_to_its_runs(
    world: World, happened: dict[str, Any], session: Session
) -> None:
    told = world.person("frank").get("/metrics/recovery").ok()
    resume, held = told["pause_to_resume_seconds"], told["takeovers"]["mean_handling_seconds"]
    assert resume["median"] >= 36
    assert resume["p95"] >= 58
    assert held >= 30
    median, p95, mean = map(recovery.length, (resume["median"], resume["p95"], held))
    victor = session("victor")
    page = victor.get("/recovery/")
    words = text_of(page)
    for said in (
        f"{median} Resumes: 2; 95 of 100 within {p95}", "33.3 % 1 of 3 tries to resume", "50 % 1 of 2 resumes",
        f"16.67 1 in 6 runs; handed back after {mean} on average", "50 % 1 of 2 time-outs",
        "100 % 1 of 1 takeovers handed back", "Aim for none", "By flow", "Contract approval",
    ):  # fmt: skip
        assert said in words, words
    assert page.content.decode().count("<rect ") == 6

    leads = {
        "pause_to_resume_seconds": {"twice", "slow"}, "missing_metadata": {"lacking"}, "repeated_effects": {"twice"},
        "takeovers": {"held"}, "undetermined_timeouts": {"lost"}, "engineer_needed": {"held"},
    }  # fmt: skip
    assert set(leads) == set(metrics.METRICS) == set(recovery.METRICS)
    for metric, names in leads.items():
        assert f'href="/recovery/{metric}/?' in page.content.decode()
        listed = victor.get(f"/recovery/{metric}/").content.decode()
        assert set(re.findall(r'href="/runs/([0-9a-f-]{36})/"', listed)) == {happened[name].id for name in names}


def test_the_api_the_page_and_prometheus_tell_the_same(world: World, happened: dict[str, Any]) -> None:
    told = world.person("frank").get("/metrics/recovery").ok()
    place = Workspace.objects.get(slug="default")
    now = dt.datetime.fromisoformat(told["to"])
    period = metrics.Period(workspaces=[str(place.pk)], flows=None, start=now - dt.timedelta(days=30), end=now)
    report = metrics.report(period, dt.timedelta(days=1))
    assert {name: told[name] for name in metrics.METRICS} == report["total"] == report["flows"]["contract-approval"]
    assert metrics.by_workspace_and_flow(period) == [(str(place.pk), "contract-approval", report["total"])]
    for metric in metrics.METRICS:
        assert sum(found[metric]["count"] for found in report["steps"].values()) == report["total"][metric]["count"]
        assert len(metrics.behind(metric, period, limit=9)) == report["total"][metric]["count"]


def test_a_period_and_a_flow_leave_the_rest_out(
    bot: Agent, happened: dict[str, Any], session: Session, clock: Any
) -> None:
    clock.advance(days=40)
    late = bot.open()
    late.pause(timer(due_in=5))
    clock.advance(seconds=6)
    late.resume()
    frank = session("frank")
    assert "Resumes: 1;" in text_of(frank.get("/recovery/"))
    assert "Resumes: 3;" in text_of(frank.get("/recovery/?days=90"))
    assert "None in 6 runs." in text_of(frank.get("/recovery/"))  # one of the seven has ended before
    day = clock.now().date() - dt.timedelta(days=40)
    assert "Resumes: 2;" in text_of(frank.get(f"/recovery/?from={day}&to={day}"))
    assert "No run was resumed." in text_of(frank.get("/recovery/?days=90&flow=another"))
    backwards = text_of(frank.get("/recovery/?from=2026-05-02&to=2026-05-01"))
    assert "ends before it begins" in backwards
    assert "Resumes: 1;" in backwards


@pytest.mark.parametrize(
    "query",
    ["from=x&to=y", "days=0", "days=99999999", "from=0001-01-01", "to=9999-12-31", "flow=%00", "flow=%F0%9F%98%80"],
)
def test_an_address_made_by_hand_is_no_error(session: Session, query: str) -> None:
    victor = session("victor")
    assert victor.get(f"/recovery/?{query}").status_code == 200
    assert victor.get(f"/recovery/takeovers/?{query}").status_code == 200
    assert victor.get(f"/recovery/nothing/?{query}").status_code == 404


def test_nothing_shows_through_the_wall(happened: dict[str, Any], session: Session) -> None:
    mallory = session("mallory")
    page = text_of(mallory.get("/recovery/"))
    assert "No run was resumed." in page
    assert "Contract approval" not in page
    assert "Nothing in this period" in text_of(mallory.get("/recovery/takeovers/"))
    for path in ("/recovery/", "/recovery/takeovers/", "/readiness/"):
        assert Client().get(path).status_code == 302


def test_the_queries_do_not_grow(bot: Agent, happened: dict[str, Any], session: Session, clock: Any) -> None:
    victor = session("victor")
    few = {path: queries(victor, path) for path in ("/recovery/", "/recovery/takeovers/", "/readiness/")}
    # What every page costs (7), and: the flows' names; the time, where the period lies, the figures or what is behind
    # one, the runs.
    assert few == {"/recovery/": 11, "/recovery/takeovers/": 11, "/readiness/": 8}
    for _ in range(4):
        run = bot.open()
        run.pause(timer(due_in=5))
        clock.advance(seconds=6)
        run.resume()
    assert {path: queries(victor, path) for path in few} == few


def test_it_is_told_in_chinese_too(happened: dict[str, Any], session: Session) -> None:
    page = text_of(session("victor").get("/recovery/", headers={"Accept-Language": "zh-hans"}))
    assert "从暂停到恢复" in page
    assert "恢复 2 次" in page
    for english in ("resume", "share", "takeover", "period"):
        assert english not in page.lower()


def test_steps_are_days_or_hours_and_never_too_many() -> None:
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    for span in (dt.timedelta(minutes=5), dt.timedelta(days=2), dt.timedelta(days=30), dt.timedelta(days=4000)):
        step = recovery.step_of(start, start + span)
        assert span / step <= recovery.MOST_STEPS
        assert step % dt.timedelta(hours=1 if span <= dt.timedelta(days=2) else 24) == dt.timedelta(0)


# --- Prometheus


def scraped() -> dict[str, dict[tuple[str, ...], float]]:
    text = Client().get("/metrics").content.decode()
    names = ("workspace", "flow", "quantile")
    return {
        family.name: {tuple(s.labels[name] for name in names if name in s.labels): s.value for s in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_prometheus_reads_the_last_day_by_workspace_and_flow(
    world: World, happened: dict[str, Any], clock: Any
) -> None:
    told = world.person("frank").get("/metrics/recovery").ok()
    found = {name: values for name, values in scraped().items() if name.startswith("rehydrate_recovery_")}
    flow = ("default", "contract-approval")
    assert found.pop("rehydrate_recovery_pause_to_resume_seconds") == {
        (*flow, "0.5"): told["pause_to_resume_seconds"]["median"],
        (*flow, "0.95"): told["pause_to_resume_seconds"]["p95"],
    }
    assert found.pop("rehydrate_recovery_takeover_handling_seconds") == {
        flow: told["takeovers"]["mean_handling_seconds"]
    }
    assert {name.removeprefix("rehydrate_recovery_"): values[flow] for name, values in found.items()} == {
        "resumes": 2, "missing_metadata": 1, "resume_attempts": 3, "repeated_effects": 1, "takeovers": 1, "runs": 6,
        "undetermined_timeouts": 1, "timeouts": 2, "engineer_needed": 1, "handbacks": 1,
    }  # fmt: skip
    clock.advance(days=2)
    later = scraped()
    assert later["rehydrate_recovery_resumes"][flow] == 0
    assert later["rehydrate_recovery_runs"][flow] == 5


def test_a_scrape_costs_the_same_however_many_flows_there_are(world: World, happened: dict[str, Any]) -> None:
    before = queries(Client(), "/metrics")
    stranger = world.agent("stranger", workspace="other")
    for flow in ("one", "two", "three"):
        stranger.open(flow=flow)
    assert queries(Client(), "/metrics") == before
    assert {labels[0] for labels in scraped()["rehydrate_recovery_runs"]} == {"default", "other"}


# --- readiness


def ask(client: Client, *looked_up: tuple[str, str, str], **said: str) -> Any:
    rows = {
        f"{name}-{n}": value
        for n, row in enumerate(looked_up)
        for name, value in zip(("what", "where", "field"), row, strict=True)
    }
    return client.post("/readiness/", {**rows, **said})


def test_what_was_looked_up_becomes_fields_with_what_to_send(session: Session) -> None:
    page = ask(
        session("victor"),
        ("was the payment sent?", "application log", ""),
        ("the thing in the drawer", "", ""),
        ("Carol's word", "chat", "decisions"),
        happened_outside="1",
        flow="contract-approval",
    )
    words = text_of(page)
    assert page.status_code == 200
    assert "2 fields would have been missing" in words
    assert "Looked up: was the payment sent? (in application log)" in words
    assert "Looked up: Carol's word (in chat)" in words
    assert "with `start` before acting" in words
    assert '"key": "pay-17"' in words
    assert "Not recognised the thing in the drawer" in words
    assert 'value="Carol&#x27;s word"' in page.content.decode()


def test_what_the_runs_record_already_counts(bot: Agent, session: Session) -> None:
    for _ in range(3):
        bot.open()
    row = ("", "", "checkpoint")
    assert "Nothing that you looked up" in text_of(
        ask(session("victor"), row, happened_outside="1", flow="contract-approval")
    )
    # Another workspace's person learns nothing of it.
    mallory = ask(session("mallory"), row, happened_outside="1", flow="contract-approval")
    assert "1 field would have been missing" in text_of(mallory)


def test_a_flow_that_can_run_again_needs_none(session: Session) -> None:
    assert "This flow needs no ledger" in text_of(ask(session("victor"), ("prompt", "", "")))


def test_more_lines_come_without_javascript_and_keep_what_was_typed(session: Session) -> None:
    victor = session("victor")
    rows = [(f"thing {n}", "", "") for n in range(5)]
    page = ask(victor, *rows, add_row="1", spans_days="1").content.decode()
    assert page.count('name="what-') == 6
    assert 'value="thing 4"' in page
    assert 'name="spans_days" value="1" checked' in page
    assert "would have been" not in page
    many = ask(victor, *[("x", "", "")] * 200, add_row="1")
    assert many.content.decode().count('name="what-') == 40


def test_hostile_words_are_words(session: Session) -> None:
    page = ask(session("victor"), ("<script>alert(1)</script> payment\x00", "<b>", "no-such-field"), flow="\x00<i>",
               happened_outside="1")  # fmt: skip
    assert page.status_code == 200
    assert "<script>alert" not in page.content.decode()


def test_advice_is_given_in_chinese(session: Session) -> None:
    from audit import readiness

    rows = [("", "", field) for field in readiness.FIELDS]
    victor = session("victor")
    victor.defaults["HTTP_ACCEPT_LANGUAGE"] = "zh-hans"
    words = text_of(ask(victor, *rows, happened_outside="1"))
    assert "10 个字段" in words
    for _, send, _ in readiness._FIELDS.values():
        assert send not in words
