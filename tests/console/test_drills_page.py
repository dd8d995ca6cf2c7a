"""The page of the drills: what it shows, to whom, and what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rehydrate.demo.drills import CHECKS, DRILLS
from tests.contract.driver import Agent, World
from tests.drilled import good_facts, kept

from .conftest import text_of

Session = Callable[[str], Client]


def test_before_the_first_drill_it_says_how_to_begin(session: Session) -> None:
    page = text_of(session("dave").get("/drills/"))
    assert "No drill yet" in page
    assert "manage.py drill all" in page
    assert "Restart while waiting for a callback" in page


def test_the_last_result_of_each_stands_there_to_be_copied_and_the_others_below(session: Session) -> None:
    failed = good_facts()
    failed.touched["payments.pay"] = 2
    old = kept(DRILLS[0], failed)
    for drill in DRILLS:
        kept(drill, started_at="2026-11-30T12:00:00+00:00")
    dave = session("dave")
    page = dave.get("/drills/")
    words = text_of(page)
    assert words.count("- [x] **") == len(CHECKS) * len(DRILLS)
    assert "- [ ]" not in words
    assert "CRM-1" in words
    assert words.index("Restart while") < words.index("Late resume") < words.index("Effect done outside")
    assert f"/drills/{old.pk}/" in page.content.decode()

    alone = text_of(dave.get(f"/drills/{old.pk}/"))
    assert "FAILED" in alone
    assert "payments.pay 2×" in alone
    assert alone.count("- [ ] **") == 1
    assert dave.get("/drills/0196a000-0000-7000-8000-000000000000/").status_code == 404


def test_it_speaks_chinese(session: Session) -> None:
    kept(DRILLS[1])
    page = text_of(session("dave").get("/drills/", headers={"Accept-Language": "zh-hans"}))
    assert "人工审批后延迟恢复" in page
    assert "找到同一条运行实例" in page


@pytest.mark.parametrize(
    ("name", "sees"),
    [("victor", False), ("alice", False), ("dave", True), ("erin", True), ("frank", True), ("mallory", True)],
)
def test_it_is_for_those_who_run_or_audit_something(session: Session, name: str, sees: bool) -> None:
    """Drills are of the installation: whoever operates any workspace of it may know that it holds."""
    row = kept(DRILLS[0])
    somebody = session(name)
    for path in ("/drills/", f"/drills/{row.pk}/"):
        assert somebody.get(path).status_code == (200 if sees else 403), path
    assert ('href="/drills/"' in somebody.get("/").content.decode()) is sees
    assert Client().get("/drills/").status_code == 302


def test_a_run_is_linked_only_for_those_who_see_it(bot: Agent, session: Session) -> None:
    run = bot.open()
    facts = good_facts()
    facts.run = {"id": run.id, "flow": run.look()["flow"], "external_id": "x"}
    row = kept(DRILLS[0], facts)
    link = f'href="/runs/{run.id}/"'
    assert link in session("dave").get("/drills/").content.decode()
    assert link in session("dave").get(f"/drills/{row.pk}/").content.decode()
    assert link not in session("mallory").get("/drills/").content.decode()


def test_what_an_agent_said_is_no_markup(session: Session) -> None:
    facts = good_facts()
    facts.touched = {**facts.touched, "<script>x</script>.y": 1}
    kept(DRILLS[0], facts, error="<b>bold</b> | `code`")
    page = session("dave").get("/drills/").content.decode()
    assert "<script>x" not in page
    assert "<b>bold" not in page


def test_its_queries_do_not_grow_with_the_results(world: World, session: Session) -> None:
    dave = session("dave")

    def queries() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert dave.get("/drills/").status_code == 200
        return len(captured)

    for drill in DRILLS:
        kept(drill)
    few = queries()
    for _ in range(10):
        for drill in DRILLS:
            kept(drill)
    # Session, person, their roles, preferences, workspace and counts of the rail; latest, earlier, which runs are here.
    assert queries() == few == 10
