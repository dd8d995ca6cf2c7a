"""Rules 7 and 12 of the contract: a signal is stored before it is matched, matched once, and GET changes nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from .driver import Agent, Clock, Person, Run, World, approval, callback, ev, hook_path, paused, signal, statuses, timer
from .driver import at_once as together
from .sweep import sweep


@pytest.mark.parametrize("target", ["run", "external id", "correlation"])
def test_a_signal_finds_its_wait_by_name_and_target(bot: Agent, target: str) -> None:
    run, other = bot.open(external_id="one"), bot.open(external_id="two")
    wait = run.pause(signal("docs", correlation="c-1"))
    other.pause(signal("docs", correlation="c-2"))
    where = {
        "run": {"run": run.id},
        "external id": {"flow": "contract-approval", "external_id": "one"},
        "correlation": {"correlation": "c-1"},
    }[target]
    got = bot.signal("e1", "docs", payload={"pages": 3}, **where).ok(202)
    assert (got["state"], got["matched"]) == ("matched", [wait["id"]])
    assert got["signal_id"]
    assert (run.wait("docs")["status"], run.status, other.status) == ("satisfied", "ready", "waiting")
    envelope = run.resume()
    assert envelope["waits"][0]["signal"]["payload"] == {"pages": 3}


def test_a_signal_of_another_name_matches_nothing(bot: Agent) -> None:
    run = bot.open()
    run.pause(signal("docs"))
    assert bot.signal("e1", "invoice", run=run.id).ok(202)["state"] == "buffered"
    assert run.status == "waiting"


@pytest.mark.parametrize("before", ["the wait", "the run"])
def test_a_signal_may_come_first(bot: Agent, before: str) -> None:
    run = None if before == "the run" else bot.open(external_id="soon")
    early = bot.signal("e1", "docs", flow="contract-approval", external_id="soon").ok(202)
    assert (early["state"], early["matched"]) == ("buffered", [])
    run = run or bot.open(external_id="soon")
    run.do(paused(signal("docs")))
    assert (run.wait("docs")["status"], run.status) == ("satisfied", "ready")


def test_a_signal_is_deduplicated_by_sender_and_id(bot: Agent, world: World) -> None:
    run = bot.open()
    run.do(paused(signal("docs"), signal("more")))
    assert bot.signal("e1", "docs", run=run.id).ok(202)["state"] == "matched"
    assert bot.signal("e1", "docs", run=run.id).ok(202)["state"] == "duplicate"
    # another sender's e1 is another signal
    other = world.agent("second-bot")
    assert other.signal("e1", "more", run=run.id).ok(202)["state"] == "matched"


@pytest.mark.django_db(transaction=True)
def test_the_same_signal_sent_many_times_at_once_counts_once(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(signal("docs"), signal("docs-2", name="docs-2")))
    answers = together(*[lambda: bot.signal("e1", "docs", run=run.id)] * 6)
    assert statuses(answers) == [202] * 6
    assert sorted(a.json["state"] for a in answers) == ["duplicate"] * 5 + ["matched"]


@pytest.mark.django_db(transaction=True)
def test_a_signal_and_its_wait_at_once_find_each_other(bot: Agent) -> None:
    for n in range(4):
        run = bot.open()
        sent, opened = together(
            partial(bot.signal, f"e{n}", "docs", run=run.id),
            partial(run.append, paused(signal("docs"))),
        )
        assert (sent.status, opened.status) == (202, 200)
        assert (run.wait("docs")["status"], run.status) == ("satisfied", "ready")


def test_one_signal_satisfies_one_wait_at_most(bot: Agent) -> None:
    run = bot.open()
    run.pause(signal("first", name="docs"))
    bot.signal("e1", "docs", run=run.id).ok(202)
    run.resume()
    run.pause(signal("second", name="docs"))
    assert run.wait("second")["status"] == "open"


def test_what_fits_only_closed_waits_is_late_and_never_matched_later(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    run.pause(signal("first", name="docs", due_in=60, on_timeout="continue"))
    clock.advance(seconds=61)
    sweep()
    late = bot.signal("e1", "docs", run=run.id).ok(202)
    assert (late["state"], late["matched"]) == ("late", [])
    run.resume()
    run.pause(signal("second", name="docs"))
    assert run.wait("second")["status"] == "open"


def test_several_fitting_waits_are_left_to_a_person(bot: Agent, dave: Person) -> None:
    run = bot.open()
    run.do(paused(signal("a", name="docs"), signal("b", name="docs")))
    doc = bot.signal("e1", "docs", run=run.id, payload={"n": 1}).refused(409, "ambiguous_signal")
    assert {run.wait("a")["status"], run.wait("b")["status"]} == {"open"}
    wait = run.wait("b")
    signal_id = doc.get("signal_id") or doc["signal"]["id"]
    dave.post(f"/signals/{signal_id}/assign", {"wait": wait["id"], "reason": "It is b's"}).fine()
    assert (run.wait("a")["status"], run.wait("b")["status"]) == ("open", "satisfied")
    assert run.wait("b")["signal"]["payload"] == {"n": 1}


def test_an_agent_cannot_assign_a_signal(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(signal("a", name="docs"), signal("b", name="docs")))
    doc = bot.signal("e1", "docs", run=run.id).refused(409, "ambiguous_signal")
    signal_id = doc.get("signal_id") or doc["signal"]["id"]
    answer = bot.post(f"/signals/{signal_id}/assign", {"wait": run.wait("a")["id"], "reason": "mine"})
    answer.refused(403, "forbidden", "agents_cannot_decide")
    assert run.wait("a")["status"] == "open"


@pytest.mark.parametrize(
    ("newer", "older"),
    [
        ({"sequence": 5}, {"sequence": 4}),
        ({"occurred_at": "2026-01-02T00:00:00Z"}, {"occurred_at": "2026-01-01T00:00:00Z"}),
    ],
    ids=["sequence", "occurred_at"],
)
def test_what_is_older_than_what_is_known_is_superseded(
    bot: Agent, newer: dict[str, Any], older: dict[str, Any]
) -> None:
    run = bot.open()
    assert bot.signal("e2", "price", run=run.id, **newer).ok(202)["state"] == "buffered"
    assert bot.signal("e1", "price", run=run.id, **older).ok(202)["state"] == "superseded"
    run.pause(signal("price"))
    assert run.wait("price")["status"] == "satisfied"


def test_a_signal_stays_within_its_workspace_and_the_senders_flows(bot: Agent, world: World) -> None:
    run = bot.open()
    run.pause(signal("docs", correlation="c-1"))
    stranger = world.agent("stranger", workspace="other")
    narrow = world.agent("narrow", flows=("something-else",))
    for sender in (stranger, narrow):
        answer = sender.signal("e1", "docs", correlation="c-1")
        assert answer.status in (202, 403, 404)
        if answer.status == 202:
            assert answer.json["matched"] == []
        aimed = sender.signal("e2", "docs", run=run.id)
        assert aimed.status in (202, 403, 404)
        assert run.status == "waiting"


def test_a_signal_does_not_answer_an_approval(bot: Agent) -> None:
    run = bot.open()
    run.pause(approval("legal-approval"))
    assert bot.signal("e1", "legal-approval", run=run.id, payload={"choice": "approve"}).ok(202)["matched"] == []
    assert run.status == "waiting"


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"external_id": "x"},
        {"correlation": "c", "occurred_at": "2026-01-01T00:00:00"},
        {"correlation": "c", "sequence": 1.5},
    ],
    ids=str,
)
def test_a_signal_without_a_clear_target_is_refused(bot: Agent, bad: dict[str, Any]) -> None:
    bot.signal("e1", "docs", **bad).refused(422, "invalid")


# --- callback links --------------------------------------------------------------------------------------------------


@pytest.fixture
def link(bot: Agent) -> tuple[Run, str]:
    """A run that waits for a supplier who has no key, and the path of the supplier's link."""
    run = bot.open()
    wait = run.pause(callback("supplier"))
    return run, hook_path(wait["callback_url"])


def test_a_callback_link_takes_json(link: tuple[Run, str], world: World) -> None:
    run, path = link
    got = world.nobody.post(path, {"accepted": True}).ok(202)
    assert got["state"] == "matched"
    assert (run.wait("supplier")["status"], run.status) == ("satisfied", "ready")
    assert run.resume()["waits"][0]["signal"]["payload"] == {"accepted": True}


def test_a_callback_link_takes_forms(link: tuple[Run, str], world: World) -> None:
    run, path = link
    world.nobody.post(path, raw=b"accepted=yes&note=soon", kind="application/x-www-form-urlencoded").ok(202)
    assert run.wait("supplier")["signal"]["payload"] == {"accepted": "yes", "note": "soon"}


def test_a_callback_is_deduplicated_by_its_webhook_id(link: tuple[Run, str], world: World) -> None:
    run, path = link
    head = {"webhook-id": "msg_1"}
    assert world.nobody.post(path, {"n": 1}, headers=head).ok(202)["state"] == "matched"
    assert world.nobody.post(path, {"n": 2}, headers=head).ok(202)["state"] == "duplicate"
    assert run.wait("supplier")["signal"]["payload"] == {"n": 1}


def test_a_callback_is_deduplicated_by_its_body_otherwise(link: tuple[Run, str], world: World) -> None:
    _, path = link
    assert world.nobody.post(path, {"n": 1}).ok(202)["state"] == "matched"
    assert world.nobody.post(path, {"n": 1}).ok(202)["state"] == "duplicate"
    assert world.nobody.post(path, {"n": 2}).ok(202)["state"] == "late"


def test_a_guessed_link_leads_nowhere(world: World, link: tuple[Run, str]) -> None:
    _, path = link
    stem, token = path.rsplit("/", 1) if not path.endswith("/") else path[:-1].rsplit("/", 1)
    assert len(token) >= 22, "unguessable"
    world.nobody.post(f"{stem}/{'x' * len(token)}", {"accepted": True}).refused(404, "not_found")


def test_each_callback_wait_has_a_link_of_its_own(bot: Agent) -> None:
    run = bot.open()
    run.do(paused(callback("a"), callback("b"), timer("t")))
    assert run.wait("a")["callback_url"] != run.wait("b")["callback_url"]
    assert run.wait("t")["callback_url"] is None


def test_the_link_may_be_given_away_before_pausing(bot: Agent, world: World) -> None:
    run = bot.open()
    url = run.do(ev("wait.opened", wait=callback("c")))["waits"][0]["callback_url"]
    world.nobody.post(hook_path(url), {"quick": True}).ok(202)
    run.do(paused(callback("c")))
    assert run.status == "ready"


# --- rule 12 ---------------------------------------------------------------------------------------------------------


def test_get_and_head_change_nothing(
    link: tuple[Run, str], bot: Agent, alice: Person, erin: Person, clock: Clock
) -> None:
    run, path = link
    wait = run.wait("supplier")
    clock.advance(seconds=86401)  # even what is overdue is not applied by reading
    before = len(run.events())
    reads = [
        f"/runs/{run.id}",
        f"/runs/{run.id}/verdict",
        f"/runs/{run.id}/events",
        f"/runs/{run.id}/evidence",
        "/runs",
        "/waits?status=all",
        f"/waits/{wait['id']}",
        path,
        f"/waits/{wait['id']}/decisions",
        f"/runs/{run.id}/takeover",
        f"/runs/{run.id}/rehydrate",
        "/claims",
    ]
    for who in (bot, alice, erin):
        for method in ("GET", "HEAD"):
            for read in reads:
                assert who.call(method, read).status < 500
    assert len(run.events()) == before


def test_a_kept_signal_of_a_narrow_sender_is_not_matched_to_another_flow(bot: Agent, world: World) -> None:
    narrow = world.agent("narrow", flows=("something-else",))
    assert narrow.signal("e1", "docs", correlation="c-1").ok(202)["state"] == "buffered"
    run = bot.open()
    run.pause(signal("docs", correlation="c-1"))
    assert run.wait("docs")["status"] == "open"
    own = narrow.open(flow="something-else")
    own.pause(signal("docs", correlation="c-1"))
    assert own.wait("docs")["status"] == "satisfied"


def test_a_callback_after_the_end_is_late(link: tuple[Run, str], dave: Person, world: World) -> None:
    run, path = link
    dave.terminate(run).fine()
    assert world.nobody.post(path, {"accepted": True}).ok(202)["state"] == "late"
    assert run.status == "terminated"


def test_a_late_signal_can_be_assigned_by_a_person(bot: Agent, dave: Person, clock: Clock) -> None:
    run = bot.open()
    run.pause(signal("first", name="docs", due_in=60, on_timeout="continue"))
    clock.advance(seconds=61)
    sweep()
    late = bot.signal("e1", "docs", run=run.id).ok(202)
    run.resume()
    run.pause(signal("second", name="docs"))
    dave.post(f"/signals/{late['signal_id']}/assign", {"wait": run.wait("second")["id"], "reason": "It is this"}).fine()
    assert run.status == "ready"


def test_a_signal_to_somebody_elses_run_is_not_found(world: World, bot: Agent) -> None:
    run = bot.open()
    run.pause(signal("docs"))
    stranger = world.agent("stranger", workspace="other")
    stranger.signal("e1", "docs", run=run.id).refused(404, "not_found")
    aimed = stranger.signal("e2", "docs", flow="contract-approval", external_id="bot-1").ok(202)
    assert aimed["matched"] == []
    assert run.status == "waiting"


@pytest.mark.django_db(transaction=True)
def test_two_signals_for_one_wait_at_once_one_answers(bot: Agent) -> None:
    run = bot.open()
    run.pause(signal("docs"))
    answers = together(*[partial(bot.signal, f"e{n}", "docs", run=run.id) for n in range(5)])
    assert statuses(answers) == [202] * 5
    assert sorted(a.json["state"] for a in answers) == ["late"] * 4 + ["matched"]
