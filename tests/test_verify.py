"""`verify_ledger` on exported files: what it finds, and how it names the place. The database: tests/contract."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rehydrate import verify
from rehydrate.core.canonical import GENESIS, event_hash

RUN = "01890a5d-ac96-774b-bcce-b302099a8057"
Events = list[dict[str, Any]]


@pytest.fixture
def events() -> Events:
    """Four events of one run, chained as the ledger chains them."""
    made: Events = []
    last = GENESIS
    actor = {"kind": "agent", "id": "bot", "name": "bot"}
    for seq, kind in enumerate(["run.opened", "checkpoint", "note", "completed"], start=1):
        at, payload = f"2026-01-01T00:00:0{seq}Z", {"n": seq, "text": "é"}
        hash_ = event_hash(last, run=RUN, seq=seq, type_=kind, actor=actor, at=at, payload=payload)
        made.append(
            {"seq": seq, "type": kind, "actor": actor, "at": at, "payload": payload, "prev_hash": last, "hash": hash_}
        )
        last = hash_
    return made


def lines(events: Events) -> str:
    return "\n".join([json.dumps({"run": {"id": RUN, "title": "x"}}), *map(json.dumps, events)]) + "\n"


def test_an_honest_chain_holds(events: Events) -> None:
    flaw, count, last = verify.chain(RUN, events)
    assert (flaw, count, last) == (None, 4, events[-1]["hash"])


def change_payload(events: Events) -> None:
    events[1]["payload"]["n"] = 7


def change_actor(events: Events) -> None:
    events[1]["actor"] = {"kind": "person", "id": "mallory", "name": "m"}


def change_time(events: Events) -> None:
    events[1]["at"] = "2026-01-01T00:00:09Z"


def change_type(events: Events) -> None:
    events[1]["type"] = "approved"


def remove(events: Events) -> None:
    del events[1]


def swap(events: Events) -> None:
    events[1]["seq"], events[2]["seq"] = 3, 2
    events[1], events[2] = events[2], events[1]


def insert(events: Events) -> None:
    events.insert(1, {**events[1]})


def forge_hash(events: Events) -> None:
    """Changed, and its own hash made to fit: what comes after tells."""
    one = events[0]
    one["payload"] = {"n": 9}
    one["hash"] = event_hash(
        GENESIS, run=RUN, seq=1, type_=one["type"], actor=one["actor"], at=one["at"], payload=one["payload"]
    )


def not_exact(events: Events) -> None:
    events[1]["payload"] = {"n": 2**60}


@pytest.mark.parametrize(
    "tamper", [change_payload, change_actor, change_time, change_type, remove, swap, insert, forge_hash, not_exact]
)
def test_the_first_wrong_event_is_named(events: Events, tamper: Callable[[Events], None]) -> None:
    tamper(events)
    flaw, good, _ = verify.chain(RUN, events)
    assert flaw is not None
    assert flaw.seq in (2, 3)
    assert good == flaw.seq - 1


def test_another_runs_events_do_not_pass_for_this_ones(events: Events) -> None:
    flaw, _, _ = verify.chain(RUN.replace("0189", "0190"), events)
    assert flaw is not None
    assert flaw.seq == 1


@pytest.mark.parametrize(
    "form",
    [
        lines,
        lambda events: json.dumps({"run": {"id": RUN}, "events": events}),
        lambda events: "\n".join(json.dumps({"run_id": RUN, **event}) for event in reversed(events)),
    ],
    ids=["lines", "document", "unsorted"],
)
def test_a_file_is_proved_in_each_form(events: Events, form: Callable[[Events], str], tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text(form(events), encoding="utf-8")
    out = io.StringIO()
    call_command("verify_ledger", file=str(path), stdout=out)
    assert out.getvalue().startswith("verified: 4 events of 1 runs")

    events[2]["payload"]["n"] = "other"
    path.write_text(form(events), encoding="utf-8")
    with pytest.raises(CommandError, match=rf"run {RUN}, event 3: its content was changed"):
        call_command("verify_ledger", file=str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no events"),
        ("{}", "holds no events"),
        ("nonsense\n{}", "line 1 is no JSON"),
        ("[1, 2]", "line 1 is no JSON object"),
        ('{"seq": 1, "prev_hash": "x"}', "line 1 does not say which run"),
    ],
)
def test_what_is_no_ledger_is_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "export.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        call_command("verify_ledger", file=str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        call_command("verify_ledger", file="nothing.jsonl")
