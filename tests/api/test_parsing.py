"""Bytes to structs: what is refused, with which code and pointer, and that nothing ever breaks the parser."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rehydrate.core import commands, parsing
from rehydrate.core.canonical import canonical, digest
from rehydrate.core.refusals import Refusal

OPEN: dict[str, Any] = {"flow": "contract-approval", "external_id": "contract-17"}


def refused(raw: bytes | dict[str, Any], type_: type[Any] = commands.OpenRun) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parsing.parse(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), type_)
    return caught.value


def pointers(refusal: Refusal) -> list[str]:
    return [error["pointer"] for error in refusal.extra["errors"]]


def signal(payload: str) -> bytes:
    return b'{"id": "s-1", "name": "paid", "payload": %s}' % payload.encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" \n",
        b"{",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": 1} x',
        b"\xff\xfe{\x00}\x00",
        b'"\xed\xa0\x80"',
        b'"a\x00b"',
        b"nul",
    ],
)
def test_what_is_no_json_is_malformed(raw: bytes) -> None:
    refusal = refused(raw)
    assert (refusal.code, refusal.status) == ("malformed", 400)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ([], ""),
        ({"flow": "f"}, "/external_id"),
        ({**OPEN, "flow": 7}, "/flow"),
        ({**OPEN, "flow": ""}, "/flow"),
        ({**OPEN, "colour": "red"}, "/colour"),
        ({**OPEN, "a/b~c": 1}, "/a~1b~0c"),
        ({**OPEN, "input": {"ref": 1}}, "/input/ref"),
        ({**OPEN, "agent": {"reads": ["1", 2]}}, "/agent/reads/1"),
        ({**OPEN, "agent": {"colour": 1}}, "/agent/colour"),
        ({**OPEN, "lease_seconds": True}, "/lease_seconds"),
        ({**OPEN, "lease_seconds": 1.5}, "/lease_seconds"),
        ({**OPEN, "lease_seconds": "60"}, "/lease_seconds"),
        ({**OPEN, "events": {}}, "/events"),
    ],
)
def test_wrong_types_and_fields_are_pointed_at(body: Any, pointer: str) -> None:
    refusal = refused(json.dumps(body).encode())
    assert (refusal.code, pointers(refusal)) == ("invalid", [pointer])


@pytest.mark.parametrize(
    "number",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e400",
        "1e300",
        "9007199254740992",
        "-9007199254740992",
        "9007199254740993.0",
        "0.12345678901234567890123",
        "1e-400",
        "123456789012345678901234567890",
        "9" * 5000,
        "0.1" + "0" * 30 + "1",
        "1e99999999999",
    ],
)
def test_numbers_that_would_not_come_back_are_refused(number: str) -> None:
    refusal = refused(signal(f'{{"lines": [1, {number}]}}'), commands.Signal)
    assert (refusal.code, pointers(refusal)) == ("invalid", ["/payload/lines/1"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9007199254740991", 2**53 - 1),
        ("-9007199254740991", 1 - 2**53),
        ("0.1", 0.1),
        ("0.10", 0.1),
        ("1e2", 100),
        ("20.0", 20),
        ("-0", 0),
        ("-0.0", 0),
        ("1.7976931348623157", 1.7976931348623157),
        ("5e-324", 5e-324),
        ("-12.5", -12.5),
    ],
)
def test_numbers_that_come_back_are_kept(text: str, value: float) -> None:
    assert parsing.parse(signal(text), commands.Signal).payload == value


def test_whole_numbers_may_be_written_as_floats() -> None:
    body = parsing.parse(b'{"epoch": 3.0}', commands.Heartbeat)
    assert body.epoch == 3
    assert type(body.epoch) is int


@pytest.mark.parametrize("text", [r'"a\u0000b"', r'"\ud800"', r'"\udc00\ud800"', r'{"a\u0000": 1}', r'["x", "\uDFFF"]'])
def test_text_that_cannot_be_stored_is_refused(text: str) -> None:
    refusal = refused(signal(text), commands.Signal)
    assert refusal.code == "invalid"
    assert pointers(refusal)[0].startswith("/payload")


@pytest.mark.parametrize("text", [r'"\ud83d\ude00"', '"\u202eevil\u200b"', r'"\\u0000"', r'"\\ud800"'])
def test_odd_but_storable_text_is_kept(text: str) -> None:
    assert parsing.parse(signal(text), commands.Signal).payload == json.loads(text)


def test_a_field_named_twice_is_refused() -> None:
    assert refused(b'{"flow": "a", "flow": "b", "external_id": "x"}').code == "invalid"
    assert pointers(refused(signal('{"x": {"amount": 1, "amount": 2}}'), commands.Signal)) == ["/payload/x"]


@pytest.mark.parametrize("depth", [66, 500, 5000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_bombs_are_refused(depth: int, opening: str, closing: str) -> None:
    middle = "1"
    refusal = refused(signal(opening * depth + middle + closing * depth), commands.Signal)
    assert (refusal.code, refusal.status) == ("invalid", 422)


def test_many_shallow_objects_are_fine() -> None:
    assert len(parsing.parse(signal(json.dumps([[{}]] * 5000)), commands.Signal).payload) == 5000


@pytest.mark.parametrize("due", ["2030-01-01T00:00:00", "2030-01-01", "tomorrow", "2030-13-01T00:00:00Z", 1893456000])
def test_times_need_an_offset(due: Any) -> None:
    refusal = refused({"id": "s", "name": "n", "occurred_at": due}, commands.Signal)
    assert pointers(refusal) == ["/occurred_at"]


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_times_beyond_the_calendar_are_refused(when: str) -> None:
    assert pointers(refused({"id": "s", "name": "n", "occurred_at": when}, commands.Signal)) == ["/occurred_at"]
    paused = {"type": "paused", "waits": [{"key": "a", "due_in": 1}, {"key": "b", "due_at": when}]}
    assert pointers(event_refused(paused, 2)) == ["/events/2/waits/1/due_at"]
    opened = {"type": "wait.opened", "payload": {"wait": {"due_at": when}}}
    assert pointers(event_refused(opened, 0)) == ["/events/0/payload/wait/due_at"]


def test_times_are_read_into_utc() -> None:
    when = "2030-01-01T09:00:00+17:30"
    body = parsing.parse(json.dumps({"id": "s", "name": "n", "occurred_at": when}).encode(), commands.Signal)
    assert str(body.occurred_at) == "2029-12-31 15:30:00+00:00"
    event = parsing.parse_event({"type": "paused", "waits": [{"due_in": 1}, {"due_at": when}]}, 0)
    assert isinstance(event, commands.Paused)
    assert [str(wait.due_at) for wait in event.waits] == ["None", "2029-12-31 15:30:00+00:00"]


def test_a_signals_target_is_written_either_way() -> None:
    flat = {"id": "s", "name": "n", "flow": "f", "external_id": "x"}
    nested = {"id": "s", "name": "n", "run": {"flow": "f", "external_id": "x"}}
    assert parsing.parse(json.dumps(flat).encode(), commands.Signal) == parsing.parse(
        json.dumps(nested).encode(), commands.Signal
    )
    assert pointers(refused({"id": "s", "name": "n", "run": {"flow": "f"}}, commands.Signal)) == ["/run"]


# -- events ----------------------------------------------------------------------------------------------------------


def event_refused(event: Any, index: int = 3) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parsing.parse_event(event, index)
    return caught.value


@pytest.mark.parametrize(
    ("event", "pointer"),
    [
        ("x", "/events/3"),
        ({}, "/events/3/type"),
        ({"type": "telepathy"}, "/events/3/type"),
        ({"type": 4}, "/events/3/type"),
        ({"type": "checkpoint"}, "/events/3/stage"),
        ({"type": "checkpoint", "stage": "a", "colour": 1}, "/events/3/colour"),
        ({"type": "paused", "waits": []}, "/events/3/waits"),
        ({"type": "paused", "waits": [{"from": 1}]}, "/events/3/waits/0/from"),
        ({"type": "paused", "waits": [{}, {"due_in": 1.5}]}, "/events/3/waits/1/due_in"),
        ({"type": "paused", "waits": [{"due_at": "2030-01-01T00:00:00"}]}, "/events/3/waits/0/due_at"),
        (
            {"type": "paused", "waits": [{"ask": {"details": [{"label": "x", "zz": 1}]}}]},
            "/events/3/waits/0/ask/details/0/zz",
        ),
    ],
)
def test_events_are_pointed_at_by_their_place(event: Any, pointer: str) -> None:
    refusal = event_refused(event)
    assert (refusal.code, pointers(refusal)) == ("invalid", [pointer])


@pytest.mark.parametrize(
    ("value", "currency"), [("1\n", "EUR"), ("1", "EUR\n"), ("1,0", "EUR"), ("1", "eur"), (1, "EUR")]
)
def test_money_is_a_string_amount_and_a_currency(value: Any, currency: str) -> None:
    event = {"type": "effect.planned", "key": "k", "system": "s", "action": "a"}
    assert event_refused({**event, "amount": {"value": value, "currency": currency}}).code == "invalid"
    assert parsing.parse_event({**event, "amount": {"value": "-12.50", "currency": "EUR"}}, 0)


def test_events_are_structs() -> None:
    event = parsing.parse_event({"type": "paused", "waits": [{"key": "a", "from": "ACME"}]}, 0)
    assert isinstance(event, commands.Paused)
    assert event.waits[0].from_ == "ACME"


def test_an_events_fields_may_stand_in_its_payload() -> None:
    flat = {"type": "external_ref", "system": "erp", "ref_type": "order", "id": "PO-77"}
    nested = {"type": "external_ref", "payload": {"system": "erp", "type": "order", "id": "PO-77"}}
    assert parsing.parse_event(flat, 0) == parsing.parse_event(nested, 0)
    assert pointers(event_refused({"type": "note", "payload": {"text": 1}})) == ["/events/3/payload/text"]
    assert pointers(event_refused({"type": "note", "payload": {"type": "note", "text": "x"}})) == ["/events/3/payload"]
    assert pointers(event_refused({"type": "note", "text": "x", "payload": {}})) == ["/events/3/payload"]
    receipt = {"type": "effect.executed", "payload": {"key": "k", "receipt": "R-1"}}
    read = parsing.lenient_receipt(receipt)
    assert read is not None
    assert read[0] == commands.EffectExecuted(key="k", receipt=commands.Receipt(id="R-1"))


def test_inline_data_is_at_most_16_kib() -> None:
    bulk = "x" * parsing.MAX_INLINE
    for event in (
        {"type": "checkpoint", "stage": "s", "data": bulk},
        {"type": "effect.planned", "key": "k", "system": "s", "action": "a", "arguments": {"a": bulk}},
        {"type": "paused", "waits": [{"key": "a"}, {"key": "b", "ask": {"rationale": "r", "schema": {"a": bulk}}}]},
    ):
        assert event_refused(event).code == "too_large"


def test_state_and_several_waits_have_room() -> None:
    half = {"key": "a", "ask": {"schema": {"a": "x" * (parsing.MAX_INLINE // 2)}}}
    state = parsing.parse_event({"type": "checkpoint", "stage": "s", "state": "x" * 500_000}, 0)
    waits = parsing.parse_event({"type": "paused", "waits": [half, half, half]}, 0)
    assert isinstance(state, commands.Checkpoint)
    assert isinstance(waits, commands.Paused)


# -- receipts (rule 9) -----------------------------------------------------------------------------------------------


def append(*events: str) -> commands.Append:
    return parsing.parse(b'{"epoch": 1, "events": [%s]}' % ", ".join(events).encode(), commands.Append)


def test_bad_text_in_one_event_leaves_its_neighbours_alone() -> None:
    body = append(
        r'{"type": "note", "text": "a\u0000"}',
        r'{"type": "effect.executed", "key": "k", "receipt": {"id": "R\u0000-\ud8001", "data": {"n": 1e400}}}',
        '{"type": "note", "text": "fine"}',
    )
    assert pointers(event_refused(body.events[0], 0)) == ["/events/0/text"]
    assert pointers(event_refused(body.events[1], 1)) == ["/events/1/receipt/id", "/events/1/receipt/data/n"]
    assert parsing.lenient_receipt(body.events[0]) is None
    receipt = commands.Receipt(id="R-1", data={"n": "1e400"})
    assert parsing.lenient_receipt(body.events[1]) == (commands.EffectExecuted(key="k", receipt=receipt), True)
    assert parsing.parse_event(body.events[2], 2) == commands.Note(text="fine")


def test_bad_text_beside_the_events_is_refused() -> None:
    raw = rb'{"epoch": 1, "colour": "\u0000", "events": [{"type": "note", "text": "x"}]}'
    assert pointers(refused(raw, commands.Append)) == ["/colour"]


def executed(**fields: Any) -> dict[str, Any]:
    return {"type": "effect.executed", "key": "k", **fields}


@pytest.mark.parametrize(
    ("event", "kept"),
    [
        (executed(colour="red"), commands.EffectExecuted(key="k")),
        (executed(receipt="R-1"), commands.EffectExecuted(key="k", receipt=commands.Receipt(id="R-1"))),
        (executed(receipt={"id": 17}), commands.EffectExecuted(key="k", receipt=commands.Receipt(id="17"))),
        (
            executed(receipt={"id": "R", "status": "odd"}),
            commands.EffectExecuted(key="k", receipt=commands.Receipt(id="R")),
        ),
        (
            executed(receipt={"id": "R", "url": 3, "x": 1}),
            commands.EffectExecuted(key="k", receipt=commands.Receipt(id="R")),
        ),
        (executed(amount={"value": "lots"}, system="crm"), commands.EffectExecuted(key="k", system="crm")),
        (
            {"type": "effect.failed", "key": "k"},
            commands.EffectFailed(key="k", error=commands.Error(code="unreadable")),
        ),
        (
            {"type": "effect.failed", "key": "k", "error": "no route"},
            commands.EffectFailed(key="k", error=commands.Error(code="unreadable", message="no route")),
        ),
    ],
)
def test_what_can_be_read_of_a_receipt_is_kept(event: dict[str, Any], kept: Any) -> None:
    read = parsing.lenient_receipt(event)
    assert read is not None
    assert read[0] == kept


def test_a_good_receipt_is_kept_as_it_is() -> None:
    event = executed(receipt={"id": "R-1", "status": "accepted", "url": "https://x", "data": {"a": 1}}, attempt=2)
    assert parsing.lenient_receipt(event) == (parsing.parse_event(event, 0), False)


@pytest.mark.parametrize(
    "event", [None, [], "x", {"type": ["effect.executed"]}, {"type": "effect.executed"}, executed(key="")]
)
def test_without_a_readable_key_there_is_no_receipt(event: Any) -> None:
    assert parsing.lenient_receipt(event) is None


def test_an_oversized_receipt_keeps_what_proves_the_act() -> None:
    bulk = {"a": "x" * parsing.MAX_INLINE}
    read = parsing.lenient_receipt(
        executed(receipt={"id": "R-1", "data": bulk}, system="s", action="a", arguments=bulk)
    )
    assert read is not None
    event, sanitised = read
    assert sanitised
    assert isinstance(event, commands.EffectExecuted)
    assert (event.receipt.id, event.receipt.data, event.arguments) == ("R-1", None, None)
    assert event.arguments_digest == digest(bulk)


# -- nothing breaks it -----------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
STRUCTS = [commands.OpenRun, commands.Append, commands.Signal, commands.Decide, commands.Handback, commands.Clear]


@given(st.binary(max_size=200), st.sampled_from(STRUCTS))
def test_any_bytes_are_parsed_or_refused(raw: bytes, type_: type[Any]) -> None:
    with pytest.raises(Refusal) as caught:
        parsing.parse(raw, type_)
    assert caught.value.status in (400, 422)


@given(values)
def test_what_is_accepted_comes_back_exactly(value: Any) -> None:
    raw = signal(json.dumps(value))
    with contextlib.suppress(Refusal):
        payload = parsing.parse(raw, commands.Signal).payload
        assert payload == value
        assert json.loads(canonical(payload)) == value
        assert msgspec.json.decode(msgspec.json.encode(payload)) == value


@given(
    st.dictionaries(
        st.sampled_from(["key", "receipt", "error", "amount", "arguments", "attempt", "system", "x"]), values
    )
)
def test_a_receipt_with_a_readable_key_is_never_lost(fields: dict[str, Any]) -> None:
    for type_ in ("effect.executed", "effect.failed"):
        body = append(json.dumps({**fields, "type": type_, "key": "k"}))
        read = parsing.lenient_receipt(body.events[0])
        assert read is not None
        event, _ = read
        assert event.key == "k"
        assert canonical(json.loads(msgspec.json.encode(event)))
