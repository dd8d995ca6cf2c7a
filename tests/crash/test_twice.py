"""The same request sent again after a lost answer, two of everything at once, and a clock that is an hour off.

What must hold after each of these is asked by the fixture `site`."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from .errand import FLOW
from .stage import Json, Person, Site, wrong_clock
from .wire import Wire

pytestmark = pytest.mark.processes


def at_once(*calls: Callable[[], httpx.Response]) -> list[httpx.Response]:
    """All of these at the same instant."""
    gate = Barrier(len(calls))

    def one(call: Callable[[], httpx.Response]) -> httpx.Response:
        gate.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(one, call) for call in calls]]


# -- the same request again


@dataclass
class Resender:
    """Each request is carried out and its answer lost; sent again, it is given that answer, and nothing changes."""

    site: Site
    wire: Wire
    sent: set[str] = field(default_factory=set)
    _through: dict[str, Person] = field(default_factory=dict)

    def __call__(self, who: Person, route: str, body: Json, **ids: str) -> Any:
        path = route.format(**{name: ids[name] for name in re.findall(r"{(\w+)}", route)})
        self.sent.add(f"/api/v1{route}")
        if who.name not in self._through:
            self._through[who.name] = self.site.by(self.wire.url, who)
        key = str(uuid.uuid4())
        loss = self.wire.lose_answer(f"POST /api/v1{re.escape(path)} ")
        with pytest.raises(httpx.TransportError):
            self._through[who.name].post(path, body, key=key)
        assert loss.happened.is_set()
        before = self.facts()
        answer = who.post(path, body, key=key)
        assert answer.headers.get("Idempotency-Replayed") == "true", (
            f"{route}: {answer.status_code} {answer.text[:500]}"
        )
        assert self.facts() == before, f"{route} was carried out twice"
        return answer.json()

    def facts(self) -> list[Json]:
        """How much of everything there is."""
        return self.site.sql(
            "SELECT (SELECT count(*) FROM rehydrate_ledgerevent) AS events,"
            " (SELECT count(*) FROM rehydrate_run) AS runs, (SELECT count(*) FROM rehydrate_adminevent) AS acts,"
            " (SELECT count(*) FROM rehydrate_signal) AS signals"
        )


def test_the_same_request_again_after_a_lost_answer_for_every_kind_of_post(site: Site, wire: Wire) -> None:
    again = Resender(site, wire)
    bot, alice = site.bot, site.alice

    def begin(name: str) -> tuple[str, int]:
        body = {"flow": FLOW, "external_id": name, "holder": "w1", "lease_seconds": 600, "requested_by": "carol"}
        answer = again(bot, "/runs", body)
        return answer["run"]["id"], answer["lease"]["epoch"]

    def append(run: str, epoch: int, *events: Json) -> Json:
        answer: Json = again(bot, "/runs/{run_id}/events", {"epoch": epoch, "events": list(events)}, run_id=run)
        return answer

    reserve = {"system": "crm", "action": "reserve", "arguments": {}}
    ask = {"name": "go-ahead", "kind": "approval", "due_in": 600, "ask": {"summary": "Order?"}}
    point = {"type": "checkpoint", "stage": "begin", "ref": "store://x"}

    # An agent's own.
    one, epoch = begin("twice-1")
    planned = {"type": "effect.planned", "key": "twice-1/reserve", "start": True, **reserve}
    assert append(one, epoch, point, planned)["effects"][0]["granted"] is True
    again(bot, "/runs/{run_id}/heartbeat", {"epoch": epoch}, run_id=one)
    append(one, epoch, {"type": "effect.executed", "key": "twice-1/reserve", "receipt": {"id": "r1"}})
    letters = [{"key": kind, "name": kind, "kind": kind, "due_in": 600} for kind in ("callback", "signal")]
    paused = append(one, epoch, {"type": "paused", "waits": [ask, *letters]})
    wait, hook, _ = paused["waits"]

    # Answers.
    token = urlsplit(hook["callback_url"]).path.rsplit("/", 1)[-1]
    assert again(bot, "/hooks/{token}", {"said": "yes"}, token=token)["state"] == "matched"
    assert again(bot, "/signals", {"id": "s1", "name": "signal", "run": one})["state"] == "matched"
    for act, body in (
        ("claim", {}),
        ("release", {}),
        ("comment", {"comment": "Hm."}),
        ("request_info", {"comment": "Which one?"}),
        ("extend", {"due_in": 900}),
        ("escalate", {}),
        ("assign", {"to": "bob"}),
    ):
        again(alice, f"/waits/{{wait_id}}/{act}", body, wait_id=wait["id"])
    version = alice.open_wait(one)["version"]  # type: ignore[index]
    decision = {"choice": "approve", "wait_version": version}
    again(alice, "/waits/{wait_id}/decisions", decision, wait_id=wait["id"])

    # Resumes: each time the same epoch, not another.
    lease = again(bot, "/runs/{run_id}/rehydrate", {"holder": "w1", "lease_seconds": 600}, run_id=one)["lease"]
    assert lease["epoch"] == 2
    again(bot, "/runs/{run_id}/release", {"epoch": 2}, run_id=one)
    claimed = again(bot, "/claims", {"flows": [FLOW], "holder": "w1", "lease_seconds": 600})
    assert (claimed["run"]["id"], claimed["lease"]["epoch"]) == (one, 3)

    # A person at the wheel.
    again(alice, "/runs/{run_id}/takeover", {"reason": "By hand."}, run_id=one)
    again(alice, "/runs/{run_id}/handback", {"reason": "Done.", "stage": "order"}, run_id=one)
    again(alice, "/runs/{run_id}/retry", {"reason": "Once more.", "tries": 1}, run_id=one)
    again(alice, "/runs/{run_id}/clear", {"reason": "Seen.", "codes": ["human_gate"]}, run_id=one)
    again(alice, "/runs/{run_id}/effects/{key}/sign_off", {"reason": "It stays."}, run_id=one, key="twice-1/reserve")
    again(alice, "/runs/{run_id}/terminate", {"reason": "Enough."}, run_id=one)

    two, epoch = begin("twice-2")
    append(two, epoch, point, {**planned, "key": "twice-2/reserve"})
    append(two, epoch, {"type": "effect.unknown", "key": "twice-2/reserve"}, {"type": "paused", "waits": [ask]})
    found = {"reason": "Looked.", "outcome": "not_executed"}
    again(alice, "/runs/{run_id}/effects/{key}/reconcile", found, run_id=two, key="twice-2/reserve")
    recalled = again(bot, "/runs/{run_id}/recall", {"holder": "w1", "reason": "New input."}, run_id=two)
    assert recalled["lease"]["epoch"] == 2
    twins = [{**letters[1], "key": key, "name": "news"} for key in ("a", "b")]
    waits = append(two, 2, {"type": "paused", "waits": twins})["waits"]
    kept = again(bot, "/signals", {"id": "s2", "name": "news", "run": two})
    assert kept["code"] == "ambiguous_signal"
    assigned = {"wait": waits[0]["id"], "reason": "It says so."}
    again(alice, "/signals/{signal_id}/assign", assigned, signal_id=kept["signal_id"])
    again(alice, "/runs/{run_id}/terminate", {"reason": "Enough."}, run_id=two)

    told = site.bot.do("/runs", {"flow": "told", "external_id": "told-1"})["run"]["id"]
    (delivery,) = site.alice.http.get("/deliveries", params={"run": told}).json()["results"]
    again(alice, "/deliveries/{delivery_id}/resend", {"reason": "It slept."}, delivery_id=delivery["id"])
    again(alice, "/runs/{run_id}/terminate", {"reason": "Enough."}, run_id=told)

    again(alice, "/readiness", {"flow": FLOW, "happened_outside": True, "spans_days": True, "looked_up": []})

    schema = httpx.get(f"{site.url}/api/schema/", params={"format": "json"}).json()
    posts = {path for path, methods in schema["paths"].items() if "post" in methods}
    assert again.sent == posts


# -- two of everything


def test_two_agents_on_one_run(site: Site) -> None:
    """Each knows the run, and neither knows of the other."""
    runs = site.open(3)
    for run in runs:
        site.agent(run=run)
        site.agent(run=run)
    for run in runs:
        site.reaches(run, "waiting")
        site.alice.decide(run)
    for run in runs:
        assert site.reaches(run, "completed")["failure_count"] == 0


def test_two_reviewers_at_the_same_instant(site: Site) -> None:
    site.agent(threads=3)
    for run in site.open(5):
        site.reaches(run, "waiting")
        wait = site.alice.open_wait(run)
        assert wait is not None
        path, body = f"/waits/{wait['id']}/decisions", {"wait_version": wait["version"]}
        yes, no = at_once(
            partial(site.alice.post, path, {**body, "choice": "approve"}),
            partial(site.bob.post, path, {**body, "choice": "reject", "reason": "No."}),
        )
        assert sorted([yes.status_code, no.status_code]) == [201, 409]
        second = max(yes, no, key=lambda answer: answer.status_code).json()
        assert second["code"] == "wait_closed"
        assert second["wait"]["decision"]["decided_by"] == ("alice" if yes.status_code == 201 else "bob")


def test_the_same_request_twice_at_the_same_instant(site: Site) -> None:
    """A button pressed twice, a client that lost its patience: one change, one answer."""
    body = {"flow": FLOW, "external_id": "at-once", "holder": "w1", "lease_seconds": 600}
    opened = at_once(*[lambda: site.bot.post("/runs", body, key="open-at-once") for _ in range(4)])
    assert {answer.status_code for answer in opened} == {201}
    run = opened[0].json()["run"]["id"]
    ask = {"name": "go-ahead", "kind": "approval", "due_in": 600, "ask": {"summary": "Order?"}}
    events = [{"type": "checkpoint", "stage": "begin", "ref": "store://x"}, {"type": "paused", "waits": [ask]}]
    append = {"epoch": 1, "events": events}
    appended = at_once(*[lambda: site.bot.post(f"/runs/{run}/events", append, key="append") for _ in range(4)])
    assert {answer.status_code for answer in appended} == {200}
    wait = appended[0].json()["waits"][0]
    decision = {"choice": "approve", "wait_version": wait["version"]}
    decided = at_once(
        *[lambda: site.alice.post(f"/waits/{wait['id']}/decisions", decision, key="decide") for _ in range(4)]
    )
    assert {answer.status_code for answer in decided} == {201}
    assert len({answer.json()["id"] for answer in decided}) == 1
    claim = {"flows": [FLOW], "holder": "w1", "lease_seconds": 600}
    claimed = at_once(*[lambda: site.bot.post("/claims", claim, key="claim") for _ in range(4)])
    assert {(answer.status_code, answer.json()["lease"]["epoch"]) for answer in claimed} == {(200, 2)}
    types = [event["type"] for event in site.events()[run]]
    assert types == [
        "run.opened", "lease.granted", "checkpoint", "paused", "verdict", "wait.decided", "verdict", "lease.granted",
    ]  # fmt: skip
    site.alice.act(run, "terminate")


def test_one_external_id_opened_by_many_at_the_same_instant(site: Site) -> None:
    body = {"flow": FLOW, "external_id": "many", "input": {"ref": "store://in", "digest": "sha256:" + "1" * 64}}
    opened = at_once(*[lambda: site.bot.post("/runs", body) for _ in range(6)])
    assert sorted(answer.status_code for answer in opened) == [200] * 5 + [201]
    assert len({answer.json()["run"]["id"] for answer in opened}) == 1
    site.alice.act(opened[0].json()["run"]["id"], "terminate")


def test_several_ticks_at_once(site: Site) -> None:
    """Those of `up`, and two more: each timer fires once, and none early."""
    with site.ticker(), site.ticker():
        runs = site.asleep(60)
        site.until(lambda: site.awake(runs) == len(runs), "the ticks")
    site.woken_once(runs)
    site.call_off(runs)


# -- the clock


@pytest.mark.parametrize("ahead", [3600, -3600], ids=["an hour ahead", "an hour behind"])
def test_the_servers_clock_is_wrong(site: Site, ahead: int) -> None:
    """One of two web servers, and one of the ticks: it is the database's clock that counts."""
    with site.web(ahead=ahead) as url, site.ticker(ahead=ahead):
        runs = site.asleep(5)
        alice = site.by(url, site.alice)
        awaited = site.open(2)
        for run in awaited:
            site.agent(run=run, url=url)
        for run in awaited:
            site.reaches(run, "waiting")
            wait = alice.open_wait(run)
            assert wait is not None
            alice.do(f"/waits/{wait['id']}/extend", {"due_in": 4 * 86400})
            alice.decide(run)
        for run in awaited:
            assert site.reaches(run, "completed")["failure_count"] == 0
        site.until(lambda: site.awake(runs) == len(runs), "the ticks")
    site.woken_once([*runs, *awaited])


@pytest.mark.parametrize("ahead", [3600, -3600], ids=["an hour ahead", "an hour behind"])
def test_an_agents_clock_is_wrong(site: Site, ahead: int) -> None:
    (run,) = site.open()
    site.agent(run=run, environment=wrong_clock(ahead))
    site.reaches(run, "waiting")
    site.alice.decide(run)
    assert site.reaches(run, "completed")["failure_count"] == 0
    site.woken_once([run])
