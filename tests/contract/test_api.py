"""Section 6 of the contract: shapes, errors, idempotency, lists, bad input. What the acts mean: test_rules_*."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.test import Client

from .driver import (
    ORDER,
    Agent,
    Answer,
    Clock,
    Person,
    Run,
    World,
    approval,
    callback,
    checkpoint,
    completed,
    done,
    effect,
    ev,
    external_ref,
    failed,
    hook_path,
    order,
    paused,
    rows_with,
    started,
    timer,
)
from .sweep import sweep

RUN = {
    "id",
    "workspace",
    "flow",
    "external_id",
    "title",
    "status",
    "stage",
    "version",
    "metadata",
    "verdict",
    "checkpoint",
    "input",
    "agent",
    "waits",
    "effects",
    "labels",
    "failure_count",
    "last_error",
    "escalation",
    "ready_since",
    "requested_by",
    "created_at",
    "updated_at",
    "ended_at",
}
WAIT = {
    "id",
    "run",
    "name",
    "kind",
    "status",
    "version",
    "due_at",
    "on_timeout",
    "correlation",
    "ask",
    "callback_url",
    "assignees",
    "votes",
    "decision",
    "signal",
    "opened_at",
    "closed_at",
}
EFFECT = {
    "key",
    "state",
    "system",
    "action",
    "resource",
    "arguments",
    "fingerprint",
    "impact",
    "attempt",
    "receipt",
    "error",
    "compensation",
    "late",
    "approval",
    "title",
    "granted",
}
DECISION = {
    "id",
    "kind",
    "wait",
    "wait_version",
    "choice",
    "arguments",
    "response",
    "conditions",
    "expires_at",
    "reason",
    "comment",
    "decided_by",
    "decided_at",
    "seen",
}
EVENT = {"seq", "type", "actor", "at", "payload", "prev_hash", "hash"}
ENVELOPE = {"verdict", "lease", "run", "metadata", "checkpoint", "passed", "input", "waits", "effects", "undo"}


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_the_shape_of_a_run(bot: Agent) -> None:
    run = bot.open(*done(effect("m", "mail.send")), labels={"team": "north"}, requested_by="carol")
    look = run.look()
    assert set(look) >= RUN
    assert UUID(look["id"]).version == 7
    assert (look["flow"], look["external_id"], look["title"]) == ("contract-approval", "bot-1", "Contract 17")
    assert (look["labels"], look["input"]["ref"]) == ({"team": "north"}, "s3://in/17")
    assert look["agent"]["version"] == "1"
    assert "carol" in str(look["requested_by"])
    assert look["created_at"] <= look["updated_at"]
    assert look["workspace"] == "default"


def test_the_shape_of_a_wait(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    wait = run.pause(approval(effect="k1", correlation="c-1", ask={"rationale": "cheap", "rollback": "cancel it"}))
    assert set(wait) >= WAIT
    assert (wait["run"], wait["name"], wait["kind"], wait["status"]) == (run.id, "legal-approval", "approval", "open")
    assert (wait["correlation"], wait["decision"], wait["signal"], wait["closed_at"]) == ("c-1", None, None, None)
    assert wait["version"] == 1
    assert wait["ask"]["summary"] == "Order PO-1 from ACME?"
    assert wait["ask"]["effect"]["arguments"] == ORDER
    made = alice.approve(wait)
    assert set(made) >= DECISION
    assert set(run.wait("legal-approval")["decision"]) >= DECISION


def test_a_summary_left_out_is_the_flows_title(bot: Agent) -> None:
    run = bot.open(order())
    wait = approval(effect="k1")
    del wait["ask"]["summary"]
    assert run.pause(wait)["ask"]["summary"] == "Order PO-1 from ACME"


def test_the_shape_of_an_effect(bot: Agent) -> None:
    run = bot.open()
    plan = effect("m", "mail.send", amount={"value": "10.50", "currency": "EUR"}, start=True)
    got = run.do(plan)["effects"][0]
    assert set(got) >= EFFECT
    assert set(run.effect("m")) >= EFFECT - {"granted"}
    assert (got["key"], got["system"], got["action"], got["resource"]) == ("m", "mail", "send", "mail-m")
    assert re.fullmatch(r"(sha256:)?[0-9a-f]{64}", got["fingerprint"])


def test_the_shape_of_an_event(bot: Agent) -> None:
    run = bot.open()
    for event in run.events():
        assert set(event) >= EVENT
        assert set(event["actor"]) >= {"kind", "id", "name"}


def test_the_shape_of_opening_and_appending(bot: Agent) -> None:
    opened = bot.open_raw(events=[checkpoint()]).ok(201)
    assert set(opened) >= {"run", "lease"}
    assert set(opened["lease"]) >= {"epoch", "holder", "seconds", "expires_at"}
    assert (opened["lease"]["holder"], opened["lease"]["seconds"]) == ("bot/w1", 60)
    run = Run(bot, opened["run"]["id"], opened["lease"]["epoch"])
    got = run.do(checkpoint("b"), ev("note", text="hm"))
    assert set(got) >= {"run", "events", "effects", "waits", "lease"}
    assert "waits" not in got["run"], "the run comes without its lists"
    assert "effects" not in got["run"]
    assert got["run"]["stage"] == "b"
    assert got["lease"]["epoch"] == run.epoch


def test_the_shape_of_the_envelope(bot: Agent, alice: Person) -> None:
    run = bot.open(checkpoint("one"), checkpoint("two"), order(), *done(effect("m", "mail.send")))
    run.do(paused(approval("a2", effect="k1"), approval("a1"), when="all"))
    for key in ("a1", "a2"):
        alice.approve(run.wait(key))
    envelope = run.resume()
    assert set(envelope) >= ENVELOPE
    assert [w["key"] for w in envelope["waits"]] == ["a2", "a1"], "in the order given"
    assert all(set(w) >= {"id", "key", "name", "kind", "status", "decision", "signal"} for w in envelope["waits"])
    assert {e["key"]: e["state"] for e in envelope["effects"]} == {"k1": "planned", "m": "executed"}
    assert envelope["effects"][-1]["receipt"] is None or envelope["effects"][-1]["receipt"]["id"] == "x1"
    assert [p if isinstance(p, str) else p["stage"] for p in envelope["passed"]][:2] == ["draft", "one"]
    assert envelope["undo"] == []
    assert envelope["input"]["digest"].endswith("1" * 64)


def test_the_envelope_names_what_can_be_undone_newest_first(bot: Agent, alice: Person) -> None:
    run = bot.open(*done(effect("a", "erp.reserve")), *done(effect("b", "erp.reserve")))
    alice.reject(run.pause(approval()))
    assert run.rehydrate().ok()["undo"] == ["b", "a"]


# --- opening ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["flow", "external_id"])
def test_flow_and_external_id_are_mandatory(bot: Agent, lacks: str) -> None:
    doc = bot.open_raw(**{lacks: None}).refused(422, "invalid")
    assert lacks in str(doc["errors"])


def test_opening_what_is_known_gives_the_same_run_without_a_lease(bot: Agent) -> None:
    run = bot.open(external_id="x")
    again = bot.open_raw(external_id="x", events=[checkpoint("never")]).ok(200)
    assert (again["run"]["id"], again["lease"], again["run"]["stage"]) == (run.id, None, "draft")


def test_the_same_external_id_in_another_flow_is_another_run(bot: Agent, world: World) -> None:
    one = bot.open(external_id="x")
    assert bot.open(external_id="x", flow=world.variant("second")).id != one.id


def test_another_input_is_a_conflict(bot: Agent) -> None:
    bot.open(external_id="x")
    doc = bot.open_raw(external_id="x", input={"ref": "s3://other", "digest": "sha256:" + "2" * 64})
    assert doc.refused(409, "run_conflict")["code"] == "run_conflict"


def test_refused_first_events_open_nothing(bot: Agent) -> None:
    doc = bot.open_raw(external_id="x", events=[checkpoint(), ev("nonsense")]).refused(422, "invalid")
    assert doc["errors"][0]["pointer"].startswith("/events/1")
    bot.open_raw(external_id="x", events=[checkpoint(), order(), started("k1", arguments=ORDER)]).refused(
        409, "approval_required"
    )
    assert bot.get("/runs", external_id="x").ok()["total"] == 0


def test_a_flow_that_the_key_may_not_use(world: World) -> None:
    narrow = world.agent("narrow", flows=("contract-approval",))
    narrow.open()
    narrow.open_raw(flow="another").refused(403, "forbidden")
    narrow.claim("another").refused(403, "forbidden")


def test_a_whole_cycle_in_four_requests(bot: Agent, alice: Person) -> None:
    opened = bot.open_raw(events=[checkpoint(), paused(approval())]).ok(201)
    alice.approve(
        opened["run"]["waits"][0] if opened["run"].get("waits") else Run(bot, opened["run"]["id"], 0).wait("x")
    )
    envelope = bot.claim().ok()
    run = Run(bot, opened["run"]["id"], envelope["lease"]["epoch"])
    run.do(completed())
    assert run.status == "completed"


# --- idempotency -----------------------------------------------------------------------------------------------------


def test_the_same_key_and_body_gives_the_first_answer_again(bot: Agent) -> None:
    run = bot.open()
    first, second = (run.append(checkpoint("b"), idem="once") for _ in range(2))
    assert (second.status, second.json) == (first.status, first.json)
    assert len(run.events("checkpoint")) == 2, "draft and b"


def test_opening_again_with_the_key_gives_the_lease_of_the_first_answer(bot: Agent) -> None:
    body = {"flow": "contract-approval", "external_id": "x", "holder": "h", "events": [checkpoint()]}
    first, second = (bot.post("/runs", body, idem="once").ok(201) for _ in range(2))
    assert second == first


def test_the_same_key_with_another_body(bot: Agent) -> None:
    run = bot.open()
    run.append(checkpoint("b"), idem="once").ok()
    run.append(checkpoint("c"), idem="once").refused(422, "idempotency_key_reused")
    assert run.look()["stage"] == "b"


def test_keys_are_per_caller_and_path(bot: Agent, alice: Person, bob: Person, world: World) -> None:
    one, two = bot.open(), bot.open()
    one.append(checkpoint("b"), idem="once").ok()
    two.append(checkpoint("b"), idem="once").ok()
    assert two.look()["stage"] == "b"
    wait = one.pause(approval(name="two-of-legal", key="two"))
    body = {"choice": "approve", "wait_version": 1}
    for who in (alice, bob):
        who.post(f"/waits/{wait['id']}/decisions", body, idem="once").ok(201)
    assert one.wait("two")["status"] == "satisfied"


def test_a_decision_sent_again_is_the_same_decision(bot: Agent, alice: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    body = {"choice": "approve", "wait_version": wait["version"]}
    first, second = (alice.post(f"/waits/{wait['id']}/decisions", body, idem="once").ok(201) for _ in range(2))
    assert first == second
    assert len(run.decisions()) == 1


def test_a_start_is_never_repeated_to_an_agent_that_was_fenced(bot: Agent, clock: Clock) -> None:
    run = bot.open(effect("m", "mail.send"))
    send = partial(run.append, started("m"), idem="once")
    assert send().ok()["effects"][0]["granted"] is True
    assert send().ok()["effects"][0]["granted"] is True, "the answer was lost, the lease lives"
    clock.advance(seconds=61)
    send().refused(409, "lease_lost")


def test_a_planned_start_is_not_repeated_after_another_took_the_lease(bot: Agent) -> None:
    run = bot.open()
    old = run.epoch
    send = partial(run.append, {**effect("m", "mail.send"), "start": True}, epoch=old, idem="once")
    assert send().ok()["effects"][0]["granted"] is True
    run.rehydrate(holder="bot/w1").ok()
    send().refused(409, "lease_lost")


# --- errors ----------------------------------------------------------------------------------------------------------


def test_nobody_is_unauthenticated(world: World, bot: Agent) -> None:
    run = bot.open()
    for path in ("/runs", f"/runs/{run.id}", "/waits"):
        answer = world.nobody.get(path)
        assert "www-authenticate" in answer.headers
        answer.refused(401, "unauthenticated")
    world.nobody.post("/runs", {}).refused(401, "unauthenticated")


@pytest.mark.parametrize(
    "header", ["Bearer nonsense", "Bearer ", "Basic YTpi", "Bearer \u00e9", "Bearer " + "x" * 5000]
)
def test_a_wrong_key_is_unauthenticated(world: World, header: str) -> None:
    world.nobody.call("GET", "/runs", headers={"Authorization": header}).refused(401, "unauthenticated")


@pytest.mark.parametrize("run_id", ["0197a0de-0000-7000-8000-000000000000", "nonsense", "0", "%00", "a" * 300])
def test_ids_that_are_none(bot: Agent, run_id: str) -> None:
    bot.get(f"/runs/{run_id}").refused(404, "not_found")
    bot.post(f"/runs/{run_id}/events", {"epoch": 1, "events": [checkpoint()]}).refused(404, "not_found")
    bot.get(f"/waits/{run_id}").refused(404, "not_found")


def test_an_unknown_path_and_a_wrong_method_are_problems_too(bot: Agent) -> None:
    bot.get("/nothing/here").refused(404, "not_found")
    answer = bot.call("DELETE", "/runs")
    assert answer.status == 405
    assert answer.headers["content-type"].startswith("application/problem+json")


def test_a_conflict_carries_the_object_as_it_stands(bot: Agent, alice: Person, bob: Person) -> None:
    run = bot.open(*done(effect("m", "mail.send")))
    assert set(run.start("m").refused(409, "effect_already_executed")["effect"]) >= EFFECT - {"granted"}
    assert run.rehydrate(holder="other").refused(409, "lease_held")["held_by"]
    wait = run.pause(approval())
    alice.approve(wait)
    assert set(bob.decide(wait).refused(409, "wait_closed")["wait"]) >= WAIT
    assert run.append(checkpoint("b")).refused(409, "lease_lost")["run_status"] == "ready"


def test_a_problem_says_what_to_do(bot: Agent) -> None:
    doc = bot.open().append(started("nobody-planned")).json
    assert set(doc) >= {"type", "title", "status", "detail", "code"}
    assert len(doc["detail"]) > 15


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"{'a': 1}", b"\xff\xfe", b'{"a": 1}{"b": 2}', b"[" * 5000, b'{"a":' * 5000],
    ids=lambda raw: repr(raw[:12]),
)
def test_bodies_that_are_no_object(bot: Agent, raw: bytes) -> None:
    run = bot.open()
    for path in ("/runs", f"/runs/{run.id}/events", "/signals", "/claims", f"/runs/{run.id}/rehydrate"):
        answer = bot.call("POST", path, raw=raw)
        answer.refused(400 if answer.status == 400 else 422, "malformed", "invalid")


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""])
def test_other_media_types(bot: Agent, kind: str) -> None:
    run = bot.open()
    assert bot.call("POST", f"/runs/{run.id}/heartbeat", raw=b"epoch=1", kind=kind).status == 415


def test_json_with_a_charset_is_json(bot: Agent) -> None:
    run = bot.open()
    body = json.dumps({"epoch": run.epoch}).encode()
    assert bot.call("POST", f"/runs/{run.id}/heartbeat", raw=body, kind="application/json; charset=utf-8").status == 200


def padded(bot: Agent, size: int) -> bytes:
    body = {"flow": "contract-approval", "external_id": "big", "agent": bot.card(), "events": [checkpoint(state="")]}
    text = json.dumps(body)
    return text.replace('"state": ""', f'"state": "{"x" * (size - len(text))}"').encode()


def test_one_mib_and_one_byte(bot: Agent) -> None:
    bot.call("POST", "/runs", raw=padded(bot, 2**20 + 1)).refused(413, "too_large")
    assert bot.get("/runs", external_id="big").ok()["total"] == 0
    assert bot.call("POST", "/runs", raw=padded(bot, 2**20)).status == 201


def test_unknown_fields_are_refused_where_they_stand(bot: Agent) -> None:
    run = bot.open()
    top = bot.post(f"/runs/{run.id}/heartbeat", {"epoch": run.epoch, "surprise": 1}).refused(422, "invalid")
    assert [e["pointer"] for e in top["errors"]] == ["/surprise"]
    deep = run.append(checkpoint("b"), {**order(), "surprise": 1}).refused(422, "invalid")
    assert [e["pointer"] for e in deep["errors"]] == ["/events/1/surprise"]
    wait = {**approval(), "ask": {"summary": "?", "surprise": 1}}
    deeper = run.append(paused(wait)).refused(422, "invalid")
    assert deeper["errors"][0]["pointer"] == "/events/0/waits/0/ask/surprise"
    assert set(deeper["errors"][0]) == {"pointer", "detail"}


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{}],
        [7],
        [None],
        "checkpoint",
        [{"type": "nonsense"}],
        [{"type": 7}],
        [{"type": "checkpoint", "stage": 7}],
        [{"type": "checkpoint", "stage": ["x"]}],
        [{"type": "effect.planned", "key": "", "system": "s", "action": "a"}],
        [{"type": "effect.planned", "key": "k", "system": "s"}],
        [{"type": "effect.planned", "key": "k", "system": "s", "action": "a", "impact": "huge"}],
        [
            {
                "type": "effect.planned",
                "key": "k",
                "system": "s",
                "action": "a",
                "amount": {"value": 1, "currency": "EUR"},
            }
        ],
        [
            {
                "type": "effect.planned",
                "key": "k",
                "system": "s",
                "action": "a",
                "amount": {"value": "1", "currency": "e"},
            }
        ],
        [{"type": "failed", "error": "boom", "retryable": True}],
        [{"type": "failed", "error": {"code": "x", "message": "y"}, "retry_in": -1}],
        [{"type": "paused", "waits": []}],
        [{"type": "paused", "waits": [{}]}],
        [{"type": "paused", "waits": [approval()], "resume_when": "some"}],
        [paused(approval("a"), approval("a"))],
        [{"type": "run.opened"}],
        [{"type": "lease_lost"}],
        [{"type": "decision", "choice": "approve"}],
    ],
    ids=lambda events: json.dumps(events)[:60],
)
def test_events_that_make_no_sense(bot: Agent, events: Any) -> None:
    run = bot.open()
    answer = bot.post(f"/runs/{run.id}/events", {"epoch": run.epoch, "events": events})
    assert answer.refused(422, "invalid")["errors"]
    assert (run.status, run.look()["stage"]) == ("running", "draft")


@pytest.mark.parametrize("epoch", ["1", True, 1.5, -1, None, 2**63, [1]], ids=str)
def test_an_epoch_is_a_whole_number(bot: Agent, epoch: Any) -> None:
    run = bot.open()
    bot.post(f"/runs/{run.id}/heartbeat", {"epoch": epoch}).refused(422, "invalid")


@pytest.mark.parametrize(
    "text",
    ['"a\\u0000b"', '"a\\ud800b"', '{"a\\u0000": 1}', '["\\udfff"]'],
    ids=["NUL", "surrogate", "NUL in a key", "low"],
)
def test_texts_that_the_database_cannot_hold(bot: Agent, text: str) -> None:
    run = bot.open()
    for event in (
        '{"type":"checkpoint","stage":"b","data":%s}',
        '{"type":"effect.planned","key":"k","system":"mail","action":"send","arguments":{"x":%s}}',
    ):
        raw = f'{{"epoch":{run.epoch},"events":[{event.replace("%s", text)}]}}'.encode()
        run.append(raw=raw).refused(422, "invalid")
    for body in (
        f'{{"flow":"contract-approval","external_id":{text}}}',
        f'{{"flow":"contract-approval","external_id":"x","title":{text}}}',
    ):
        bot.call("POST", "/runs", raw=body.encode()).refused(422, "invalid")
    sent = f'{{"id":"s","name":"n","correlation":"c","payload":{text}}}'
    bot.call("POST", "/signals", raw=sent.encode()).refused(422, "invalid")
    bot.get("/runs", q="a\x00b").refused(422, "invalid")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_are_none(bot: Agent, number: str) -> None:
    run = bot.open()
    raw = b'{"epoch":%d,"events":[{"type":"checkpoint","stage":"b","data":{"n":%s}}]}' % (run.epoch, number.encode())
    answer = run.append(raw=raw)
    answer.refused(answer.status if answer.status in (400, 422) else 422, "invalid", "malformed")
    raw = b'{"id":"s","name":"n","correlation":"c","payload":%s}' % number.encode()
    answer = bot.call("POST", "/signals", raw=raw)
    answer.refused(answer.status if answer.status in (400, 422) else 422, "invalid", "malformed")


@pytest.mark.parametrize(
    "number",
    ["9007199254740993", "-9007199254740993", "9223372036854775808", "1" * 40, "0.1234567890123456789012", "1e309"],
)
def test_numbers_that_would_not_come_back_exactly(bot: Agent, number: str) -> None:
    run = bot.open()
    event = (
        b'{"type":"effect.planned","key":"m","system":"mail","action":"send","arguments":{"n":%s}}' % number.encode()
    )
    run.append(raw=b'{"epoch":%d,"events":[%s]}' % (run.epoch, event)).refused(422, "invalid")
    assert run.look()["effects"] == []


@pytest.mark.parametrize("number", ["0", "1", "-7", "0.1", "1.5", "9007199254740991", "1e3", "123456.789"])
def test_numbers_that_come_back(bot: Agent, number: str) -> None:
    run = bot.open()
    event = (
        b'{"type":"effect.planned","key":"m","system":"mail","action":"send","arguments":{"n":%s}}' % number.encode()
    )
    run.append(raw=b'{"epoch":%d,"events":[%s]}' % (run.epoch, event)).ok()
    assert run.effect("m")["arguments"]["n"] == json.loads(number)


@pytest.mark.parametrize(
    "text", ["\u202egnp.exe", "a\u200bb", "<script>alert(1)</script>", "=cmd()", "你好", "e\u0301", "😀"]
)
def test_any_other_text_comes_back_as_it_was(bot: Agent, text: str) -> None:
    run = bot.open(*done(effect("m", "mail.send", arguments={"t": text})), title=text)
    assert (run.look()["title"], run.effect("m")["arguments"]["t"]) == (text, text)


@pytest.mark.parametrize(
    "when", ["2030-06-01T12:00:00", "2030-06-01", "soon", 1900000000, "2030-13-01T00:00:00Z"], ids=str
)
def test_times_without_an_offset_are_refused(bot: Agent, alice: Person, when: Any) -> None:
    run = bot.open()
    wait = run.pause(approval())
    alice.decide(wait, expires_at=when).refused(422, "invalid")
    bot.signal("s", "n", correlation="c", occurred_at=when).refused(422, "invalid")
    assert run.outcome == "wait"


def test_an_idempotency_key_of_silly_length_is_no_500(bot: Agent) -> None:
    run = bot.open()
    answer = run.append(checkpoint("b"), idem="k" * 5000)
    assert answer.status in (200, 422)


# --- lists -----------------------------------------------------------------------------------------------------------


def test_lists_have_a_cursor_and_a_total(bot: Agent) -> None:
    ids = [bot.open(paused(approval())).id for _ in range(7)]
    page = bot.get("/runs", limit=3).ok()
    assert set(page) == {"results", "next", "total"}
    assert (len(page["results"]), page["total"], bool(page["next"])) == (3, 7, True)
    assert sorted(r["id"] for r in bot.pages("/runs", limit=3)) == sorted(ids)
    assert len(list(bot.pages("/waits", limit=2))) == 7
    run = bot.open()
    assert [e["seq"] for e in bot.pages(f"/runs/{run.id}/events", limit=1)] == list(range(1, run.look()["version"] + 1))


@pytest.mark.parametrize("limit", ["0", "-1", "201", "many", "1e3"])
def test_a_limit_is_at_most_200(bot: Agent, limit: str) -> None:
    answer = bot.get("/runs", limit=limit)
    assert answer.status in (200, 422)
    if answer.status == 200:
        assert int(limit) == 201, "only the one that is merely too large may be cut"


@pytest.mark.parametrize("cursor", ["nonsense", "%00", "eyJhIjoxfQ==", "a" * 5000])
def test_a_forged_cursor_is_refused(bot: Agent, cursor: str) -> None:
    bot.open()
    bot.get("/runs", cursor=cursor).refused(422, "invalid")


@pytest.mark.parametrize(
    ("query", "finds"),
    [
        ({"status": "running"}, "a"),
        ({"status": "waiting"}, "b"),
        ({"status": "completed"}, "c"),
        ({"flow": "second"}, "d"),
        ({"stage": "filed"}, "c"),
        ({"q": "Rabbit"}, "b"),
        ({"external_id": "ext-d"}, "d"),
        ({"label": "team=north"}, "b"),
        ({"system": "crm"}, "a"),
        ({"resource": "case-7"}, "a"),
        ({"system": "crm", "resource": "case-7"}, "a"),
        ({"system": "mail", "resource": "to-c"}, "c"),
        ({"system": "crm", "resource": "case-8"}, ""),
        ({"older_than": "1h"}, ""),
    ],
    ids=str,
)
def test_runs_are_found(bot: Agent, world: World, query: dict[str, str], finds: str) -> None:
    ids = {
        "a": bot.open(external_ref("crm", "case", "case-7"), external_id="ext-a").id,
        "b": bot.open(paused(approval()), external_id="ext-b", title="Buy a Rabbit", labels={"team": "north"}).id,
        "c": bot.open(
            *done(effect("m", "mail.send", resource="to-c")), completed(), external_id="ext-c", at="filed"
        ).id,
        "d": bot.open(external_id="ext-d", flow=world.variant("second"), holder=None).id,
    }
    page = bot.get("/runs", **query).ok()
    assert [r["id"] for r in page["results"]] == [ids[name] for name in finds]
    assert page["total"] == len(finds)


def test_waits_are_filtered(bot: Agent, alice: Person, grace: Person, world: World) -> None:
    one, two = bot.open(paused(approval())), bot.open(paused(approval()), flow=world.variant("second"))
    closed = bot.open(paused(approval()))
    alice.approve(closed.wait("legal-approval"))

    def found(who: Any, **query: Any) -> set[str]:
        return {w["run"] for w in who.get("/waits", **query).ok()["results"]}

    assert found(alice, status="open") == {one.id, two.id}
    assert found(alice, status="all") == {one.id, two.id, closed.id}
    assert found(alice, status="satisfied") == {closed.id}
    assert found(alice, run=one.id) == {one.id}
    assert found(alice, status="open", flow="second") == {two.id}
    assert found(alice, status="open", mine=1) == {one.id, two.id}
    assert found(grace, status="open", mine=1) == set(), "grace is not in legal"
    assert found(bot, status="open") == {one.id, two.id}


def test_unknown_filters_and_values(bot: Agent) -> None:
    assert bot.get("/runs", status="nonsense").status in (200, 422)
    assert bot.get("/waits", run="nonsense").status in (200, 404, 422)
    assert bot.get("/runs", older_than="nonsense").status in (422,)


# --- the other endpoints ------------------------------------------------------------------------------------------


def test_heartbeat_gives_the_lease(bot: Agent) -> None:
    run = bot.open()
    lease = run.heartbeat().ok()["lease"]
    assert (lease["epoch"], lease["holder"]) == (run.epoch, "bot/w1")


def test_claims_take_runs_of_the_named_flows_only(bot: Agent, world: World) -> None:
    bot.open(flow=world.variant("second"), holder=None)
    assert bot.claim("contract-approval").status == 204
    assert bot.claim("second").status == 200


def test_a_claim_waits_at_most_30_seconds(bot: Agent) -> None:
    bot.claim(wait=31).refused(422, "invalid")


def test_recovery_metrics_have_their_shape(bot: Agent, alice: Person, frank: Person) -> None:
    run = bot.open()
    alice.approve(run.pause(approval()))
    run.resume()
    got = frank.get(
        "/metrics/recovery",
        **{"from": "2020-01-01T00:00:00Z", "to": "2100-01-01T00:00:00Z", "flow": "contract-approval"},
    ).ok()
    assert set(got) >= {
        "from",
        "to",
        "flow",
        "pause_to_resume_seconds",
        "missing_metadata",
        "repeated_effects",
        "takeovers",
        "undetermined_timeouts",
        "engineer_needed",
    }
    assert set(got["pause_to_resume_seconds"]) == {"median", "p95", "count"}
    assert got["pause_to_resume_seconds"]["count"] == 1
    assert set(got["takeovers"]) == {"per_100_runs", "count", "of", "mean_handling_seconds"}


def test_readiness_says_what_is_missing(frank: Person) -> None:
    body = {
        "flow": "contract-approval",
        "happened_outside": True,
        "spans_days": True,
        "looked_up": [{"what": "idempotency keys of executed side effects", "where": "application log"}],
    }
    got = frank.post("/readiness", body).ok()
    assert set(got) >= {"needs_ledger", "present", "missing", "advice"}
    assert got["needs_ledger"] is True
    assert all(set(a) >= {"field", "send", "example"} for a in got["advice"])
    nothing = {"flow": "contract-approval", "happened_outside": False, "spans_days": False, "looked_up": []}
    assert frank.post("/readiness", nothing).ok()["needs_ledger"] is False


def test_the_schema_is_openapi_3_1(world: World, bot: Agent) -> None:
    answer = bot.call("GET", "/api/schema/", headers={"Accept": "application/json"})
    assert answer.status == 200
    text = answer.raw.decode()
    assert re.search(r"openapi\W+3\.1", text)
    for path in ("/api/v1/runs/{", "/api/v1/claims", "/api/v1/signals", "/decisions"):
        assert path in text
    assert bot.call("GET", "/api/docs/").status == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_health(world: World, path: str) -> None:
    answer = world.transport.send("GET", path, {}, None)
    assert answer.status in ((200, 503) if path == "/readyz" else (200,))


def test_every_event_of_an_agent_is_taken(bot: Agent, clock: Clock) -> None:
    run = bot.open()
    got = run.do(
        ev("note", text="hello"),
        external_ref("crm", "case", "c-7"),
        ev("wait.opened", wait=callback("c")),
        effect("m", "mail.send", start=True),
        ev("effect.failed", key="m", error={"code": "x", "message": "no"}),
        started("m", attempt=2),
        ev(
            "effect.executed",
            key="m",
            receipt={"id": "x1", "status": "accepted", "url": "https://x.example/1", "data": {"n": 1}},
        ),
        checkpoint("b", data={"n": 1}, next=["more"]),
    )
    assert [e["type"] for e in got["events"] if e["type"] in ("note", "external_ref", "wait.opened")] == [
        "note",
        "external_ref",
        "wait.opened",
    ]
    assert got["effects"][-1]["receipt"]["url"] == "https://x.example/1"
    run.do(failed(retry_in=1))
    clock.advance(seconds=2)
    run.resume()
    run.do(ev("cancelled", reason="enough"))
    assert isinstance(run.outcome, str)


def test_an_answer_of_any_call_is_json(bot: Agent, world: World) -> None:
    run = bot.open()
    run.do(paused(timer(), callback("c")))
    answers: list[Answer] = [
        bot.get(f"/runs/{run.id}"),
        bot.get("/waits"),
        world.nobody.post(hook_path(run.wait("c")["callback_url"]), {}),
    ]
    assert all(a.headers["content-type"].startswith("application/json") for a in answers)


def test_recovery_metrics_count_what_happened(
    bot: Agent, alice: Person, dave: Person, frank: Person, clock: Clock
) -> None:
    mail = effect("m", "mail.send")
    twice = bot.open(*done(mail))
    twice.pause(timer(due_in=10))
    clock.advance(seconds=11)
    twice.resume()
    twice.do(ev("effect.executed", key="m", receipt={"id": "x-again"}))
    held = bot.open()
    held.pause(approval())
    dave.takeover(held).fine()
    dave.handback(held, needed_engineer=True).fine()
    lost = bot.open()
    lost.pause(callback("c", due_in=10))
    sure = bot.open()
    sure.pause(callback("c", due_in=10, on_timeout="continue"))
    clock.advance(seconds=11)
    sweep()
    got = frank.get("/metrics/recovery", flow="contract-approval").ok()
    assert (got["repeated_effects"]["count"], got["takeovers"]["count"], got["takeovers"]["of"]) == (1, 1, 4)
    assert got["takeovers"]["per_100_runs"] == 25
    assert (got["undetermined_timeouts"]["count"], got["undetermined_timeouts"]["of"]) == (1, 2)
    assert (got["engineer_needed"]["count"], got["engineer_needed"]["of"]) == (1, 1)
    assert got["pause_to_resume_seconds"]["median"] >= 10
    other = frank.get("/metrics/recovery", flow="another").ok()
    assert (other["takeovers"]["count"], other["takeovers"]["of"]) == (0, 0)


def test_metrics_stay_behind_the_wall(bot: Agent, mallory: Person, dave: Person, world: World) -> None:
    run = bot.open()
    dave.takeover(run).fine()
    assert mallory.get("/metrics/recovery").ok()["takeovers"]["count"] == 0
    world.nobody.get("/metrics/recovery").refused(401, "unauthenticated")


def test_money_is_a_string_and_a_currency(bot: Agent) -> None:
    run = bot.open(effect("m", "mail.send", amount={"value": "48000.00", "currency": "EUR"}))
    planned = run.events("effect.planned")[0]["payload"]
    assert planned["amount"] == {"value": "48000.00", "currency": "EUR"}


def test_times_come_back_with_an_offset(bot: Agent) -> None:
    run = bot.open()
    look = run.look()
    for name in ("created_at", "updated_at"):
        assert look[name].endswith(("Z", "+00:00"))


def test_a_decision_with_a_body_of_another_wait_is_not_found(bot: Agent, alice: Person) -> None:
    alice.post(
        "/waits/0197a0de-0000-7000-8000-000000000000/decisions", {"choice": "approve", "wait_version": 1}
    ).refused(404, "not_found")


def test_a_schema_that_is_built_to_hang_does_not(bot: Agent, alice: Person) -> None:
    run = bot.open(order())
    evil = {"type": "object", "properties": {"amount": {"type": "string", "pattern": "^(a+)+$"}}}
    answer = run.append(paused(approval(effect="k1", ask={"schema": evil})))
    if answer.status == 422:  # refused when asked
        answer.refused(422, "invalid")
    else:  # or harmless when answered
        began = datetime.now(UTC)
        edited = {**ORDER, "amount": "a" * 60 + "!"}
        assert alice.decide(run.wait("legal-approval"), "edit", arguments=edited).status in (201, 422)
        assert datetime.now(UTC) - began < timedelta(seconds=5)


@pytest.mark.parametrize(
    "schema",
    [{"type": 7}, {"$ref": "https://example.com/x"}, {"$ref": "#/nowhere"}, {"$ref": "#"}, {"pattern": "("}, []],
    ids=str,
)
def test_a_schema_that_is_none_is_refused_or_harmless(bot: Agent, alice: Person, schema: Any) -> None:
    run = bot.open(order())
    answer = run.append(paused(approval(effect="k1", ask={"schema": schema})))
    if answer.status == 200:
        assert alice.decide(run.wait("legal-approval"), "edit", arguments={**ORDER, "n": "2"}).status in (201, 422)
    else:
        answer.refused(422, "invalid")


def test_a_thousand_events_in_one_batch(bot: Agent) -> None:
    run = bot.open()
    run.do(*[ev("note", text=f"n{n}") for n in range(300)])
    assert run.look()["version"] == len(run.events())


def test_filters_of_runs_hold_together(bot: Agent) -> None:
    bot.open(external_ref("crm", "case", "case-7"), external_ref("erp", "po", "po-9"))
    assert bot.get("/runs", system="crm", resource="po-9").ok()["total"] == 0, "one reference must be both"


def test_a_head_request_is_a_get_without_a_body(bot: Agent) -> None:
    run = bot.open()
    answer = bot.call("HEAD", f"/runs/{run.id}")
    assert (answer.status, answer.raw) == (200, b"")


def test_a_claim_whose_answer_was_lost_is_given_again(bot: Agent) -> None:
    run = bot.open(holder=None)
    body = {"flows": ["contract-approval"], "holder": "w", "agent": bot.card(), "wait": 0}
    first, second = (bot.post("/claims", body, idem="once").ok() for _ in range(2))
    assert (first["run"]["id"], second) == (run.id, first)
    assert [e["payload"]["via"] for e in run.events("lease.granted")].count("claim") == 1


def test_a_refusal_is_given_again_too(bot: Agent, alice: Person, bob: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    alice.approve(wait)
    body = {"choice": "approve", "wait_version": wait["version"]}
    first, second = (bob.post(f"/waits/{wait['id']}/decisions", body, idem="once") for _ in range(2))
    first.refused(409, "wait_closed")
    assert (second.status, second.json["code"]) == (409, "wait_closed")


def test_a_cursor_of_another_list_is_refused_or_harmless(bot: Agent) -> None:
    for _ in range(3):
        bot.open(paused(approval()))
    cursor = bot.get("/runs", limit=1).ok()["next"]
    for path in ("/waits", f"/runs/{bot.open().id}/events"):
        assert bot.get(path, cursor=cursor).status in (200, 422)


@pytest.mark.parametrize("when", ["2020-01-01T00:00:00", "yesterday", "2020-13-01T00:00:00Z"])
def test_times_in_a_query_have_an_offset_too(frank: Person, when: str) -> None:
    frank.get("/metrics/recovery", **{"from": when}).refused(422, "invalid")


def test_state_is_encrypted_at_rest(bot: Agent) -> None:
    bot.open(checkpoint("b", state={"memory": "tell-nobody-4711"}))
    for model in apps.get_app_config("rehydrate").get_models():
        assert rows_with(model._meta.db_table, "tell-nobody-4711") == 0


def test_the_browsers_session_is_good_for_the_api_with_its_csrf_token(bot: Agent, alice: Person) -> None:
    run = bot.open()
    wait = run.pause(approval())
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(get_user_model().objects.get(username="alice"))
    assert browser.get(f"/api/v1/runs/{run.id}").status_code == 200
    token = "x" * 32
    browser.cookies[settings.CSRF_COOKIE_NAME] = token
    made = browser.post(
        f"/api/v1/waits/{wait['id']}/decisions",
        {"choice": "approve", "wait_version": wait["version"]},
        content_type="application/json",
        headers={"X-CSRFToken": token},
    )
    assert made.status_code == 201, made.content
    assert "alice" in str(run.decisions()[0]["decided_by"])


@pytest.mark.parametrize(
    ("raw", "kind", "status"),
    [(b"{", "application/json", 400), (b"<a/>", "application/xml", 415), (b"x" * (2**20 + 1), "application/json", 413)],
    ids=["malformed", "xml", "too large"],
)
def test_a_bad_callback_answers_nothing(bot: Agent, world: World, raw: bytes, kind: str, status: int) -> None:
    run = bot.open()
    path = hook_path(run.pause(callback("c"))["callback_url"])
    world.nobody.post(path, raw=raw, kind=kind).refused(status)
    assert run.wait("c")["status"] == "open"


def test_an_external_ref_needs_no_type(bot: Agent) -> None:
    run = bot.open(ev("external_ref", system="crm", id="c-7"))
    assert run.look()["metadata"]["external_refs"] == [{"system": "crm", "type": None, "id": "c-7"}]


def test_an_external_ref_named_twice_is_one(bot: Agent) -> None:
    run = bot.open(external_ref("crm", "case", "c-7"), external_ref("crm", "case", "c-7"))
    assert len(run.look()["metadata"]["external_refs"]) == 1


@pytest.mark.parametrize("external_id", ["a/b", "ü 你 %", "x" * 300, "'; DROP TABLE x; --", "0"])
def test_external_ids_are_any_text(bot: Agent, external_id: str) -> None:
    run = bot.open(external_id=external_id)
    assert [r["id"] for r in bot.get("/runs", external_id=external_id).ok()["results"]] == [run.id]
    assert bot.open_raw(external_id=external_id).ok(200)["run"]["id"] == run.id


@pytest.mark.parametrize(
    "bad", [{"flows": []}, {"flows": "x"}, {"holder": None}, {"holder": ""}, {"wait": -1}], ids=str
)
def test_a_claim_that_makes_no_sense(bot: Agent, bad: dict[str, Any]) -> None:
    body = {"flows": ["contract-approval"], "holder": "w", "wait": 0, **bad}
    bot.post("/claims", body).refused(422, "invalid")
