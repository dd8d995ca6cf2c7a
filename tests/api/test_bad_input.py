"""Values at and beyond the edge, at every place that takes one: a clear refusal or an ordinary answer, never a 5xx."""

import itertools
from typing import Any

import pytest

from tests.contract import driver as d

TIMES = [
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59.999999Z",
    "9999-12-31T23:59:59-23:59",
    "2026-03-29T02:30:00+01:00",
    "2030-01-01T09:00:00+17:30",
    "2024-02-29T24:00:00Z",
    "2030-06-30T23:59:60Z",
    "2030-01-01T00:00:00",
    "",
]
NUMBERS = [0, -1, 1, 2**31, 2**53 - 1, 2**53, 2**63, 2**64, 10**30, 1.5, -0.0, 1e16, True, "1", None, [], {}]
TEXTS = [
    "",
    " ",
    "\u200b",
    "\u202ereversed",
    "é" * 5000,
    "<script>alert(1)</script>",
    "=1+1",
    "'; DROP TABLE x; --",
    "%s %(a)s",
]
POINTERS = [
    "",
    "/",
    "/a/b/c",
    "/~2",
    "~",
    "a",
    "/" * 100,
    "/-",
    "/0",
    "//",
    "/amount/x",
    "/lines/-",
    "/lines/99999999999999999999",
]


@pytest.fixture
def world(db: None, tmp_path: Any) -> d.World:
    made = d.World(d.DjangoTransport(), tmp_path)
    made.apply(d.CAST)
    return made


def ordinary(answer: d.Answer) -> int:
    """The status, when it is no fault of ours and a refusal is a problem document."""
    assert answer.status < 500, f"{answer.asked}: {answer.raw!r}"
    if answer.status >= 400:
        assert answer.json["code"]
        assert answer.json["detail"]
    return answer.status


@pytest.mark.parametrize("when", TIMES)
def test_times(world: d.World, when: str) -> None:
    bot, alice = world.agent("bot"), world.person("alice")
    run = bot.open()
    ordinary(bot.signal("s-1", "n", run=run.id, occurred_at=when))
    ordinary(alice.get("/metrics/recovery", to=when))
    ordinary(alice.get("/metrics/recovery", **{"from": when}))
    assert ordinary(run.append(d.paused(d.approval(due_at=when)))) in (200, 422)
    wait = bot.open(d.order("k1"), d.paused(d.approval(effect="k1"))).wait("legal-approval")
    ordinary(alice.post(f"/waits/{wait['id']}/extend", {"due_at": when}))
    ordinary(alice.decide(wait, version=2, expires_at=when))


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_numbers(world: d.World, number: Any) -> None:
    bot, alice, frank = world.agent("bot"), world.person("alice"), world.person("frank")
    run = bot.open(d.order("k1"))
    ordinary(bot.open_raw(lease_seconds=number))
    ordinary(bot.open_raw(external_id=number))
    ordinary(bot.claim(lease_seconds=number))
    ordinary(bot.claim(holder=number))
    ordinary(bot.signal("s-1", "n", run=run.id, sequence=number, payload=number))
    ordinary(run.heartbeat(epoch=number))
    ordinary(run.append(d.started("k1", attempt=number)))
    ordinary(run.append(d.checkpoint(data=number, state=number, next=[number])))
    ordinary(run.append(d.effect("e", "mail.send", amount=number)))
    ordinary(run.append(d.ev("effect.executed", key="k1", receipt=number)))
    ordinary(run.append(d.ev("effect.executed", key="k2", receipt={"id": number, "data": number})))
    ordinary(run.append(d.paused(d.approval(due_in=number), when="any")))
    ordinary(run.append(d.ev("failed", error={"code": "x"}, retry_in=number)))
    ordinary(run.release(retry_in=number))
    ordinary(frank.retry(run, tries=number))
    wait = bot.open(d.order("k1"), d.paused(d.approval(effect="k1"))).wait("legal-approval")
    ordinary(alice.post(f"/waits/{wait['id']}/extend", {"due_in": number}))
    ordinary(alice.decide(wait, version=number))
    ordinary(alice.decide(wait, "respond", response=number))
    for name in ("limit", "cursor", "older_than", "status", "label", "q"):
        ordinary(alice.get("/runs", **{name: number}))


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_texts(world: d.World, text: str) -> None:
    bot, alice, frank = world.agent("bot"), world.person("alice"), world.person("frank")
    for name in ("flow", "external_id", "title", "holder", "requested_by", "trace_id"):
        ordinary(bot.open_raw(**{name: text}))
    ordinary(bot.open_raw(labels={text: text}))
    ordinary(bot.open_raw(input={"ref": text, "digest": text}))
    run = bot.open()
    ordinary(run.append(d.checkpoint(text, ref=text, digest=text)))
    ordinary(
        run.append(d.ev("effect.planned", key=text, system=text, action=text, resource=text, arguments={text: text}))
    )
    ordinary(run.append(d.ev("external_ref", system=text, id=text, ref_type=text, url=text)))
    ordinary(run.append(d.ev("failed", error={"code": text, "message": text})))
    ask = {"summary": text, "details": [{"label": text, "value": text}], "reasons": [text], "rationale": text}
    other = bot.open(d.order("k1"))
    ordinary(other.append(d.paused(d.approval(key=text, effect="k1", ask=ask, correlation=text))))
    for name in ("q", "flow", "stage", "system", "resource", "external_id", "label", "older_than", "status", "cursor"):
        ordinary(alice.get("/runs", **{name: text}))
    for name in ("run", "flow", "name", "kind", "resource", "q", "status", "mine", "cursor"):
        ordinary(alice.get("/waits", **{name: text}))
    ordinary(frank.terminate(run, text))


@pytest.mark.parametrize("pointer", POINTERS)
def test_pointers_and_operators(world: d.World, pointer: str) -> None:
    bot, alice = world.agent("bot"), world.person("alice")
    operators = ["==", "!=", "<", "<=", ">", ">=", "in", "not_in", "exists", "~="]
    values: list[Any] = [None, 1, "1", "1e400", [], [1], {"a": 1}]
    wait = bot.open(d.order("k1"), d.paused(d.approval(effect="k1"))).wait("legal-approval")
    for op, value in zip(operators * 2, itertools.cycle(values), strict=False):
        conditions = [{"pointer": pointer, "op": op, "value": value}]
        status = ordinary(alice.decide(wait, "approve_with_conditions", conditions=conditions))
        if status == 201:  # it is known, then: the next one decides about another ask
            wait = bot.open(d.order("k1"), d.paused(d.approval(effect="k1"))).wait("legal-approval")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#"},
        {"$ref": "https://elsewhere.example/schema"},
        {"$ref": "file:///etc/passwd"},
        {"properties": {"n": {"pattern": "^(a+)+$"}}},
        {"properties": {"n": {"pattern": "("}}},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"type": "object", "additionalProperties": False},
        {"multipleOf": 0},
    ],
    ids=str,
)
def test_schemas_of_asks(world: d.World, schema: Any) -> None:
    bot, alice = world.agent("bot"), world.person("alice")
    run = bot.open(d.order("k1"))
    for ask in ({"schema": schema}, {"response_schema": schema}):
        if ordinary(run.append(d.paused(d.approval(effect="k1", ask=ask)))) == 200:
            wait = run.wait("legal-approval")
            ordinary(alice.decide(wait, "edit", arguments={**d.ORDER, "n": "a" * 40 + "!"}))
            ordinary(alice.decide(wait, "respond", response={"n": "a" * 40 + "!"}))
            run = bot.open(d.order("k1"))
