"""Words: times, money, the run track, and sentences made from codes, in both languages."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import polib
import pytest
from django.conf import settings
from django.utils import translation

from audit import formats, narrative, track
from rehydrate.core.events import BY_TYPE
from rehydrate.core.refusals import STATUS

NOON = dt.datetime(2026, 11, 29, 12, 0, tzinfo=dt.UTC)


def later(**parts: float) -> dt.datetime:
    return NOON + dt.timedelta(**parts)


@pytest.mark.parametrize(
    ("moment", "form", "said"),
    [
        (later(seconds=-2), "auto", "just now"),
        (later(minutes=-46), "auto", "46 min ago"),
        (later(hours=2), "auto", "in 2 h"),
        (later(hours=1, minutes=12), "left", "1 h 12 min left"),
        (later(minutes=-3), "left", "3 min over"),
        (later(days=3, hours=4), "for", "3 d 4 h"),
        (later(days=40), "for", "40 d"),
    ],
)
def test_times_are_told_in_words(moment: dt.datetime, form: str, said: str) -> None:
    with translation.override("en"):
        assert formats.relative(moment, NOON, form) == said


@pytest.mark.parametrize(
    ("language", "value", "currency", "said"),
    [
        ("en", "12000", "EUR", "€12,000.00"),
        ("en", "189.9", "USD", "$189.90"),
        ("en", "-5", "CHF", "−5.00 CHF"),
        ("en", "1200", "JPY", "¥1,200"),
        ("zh-hans", "1200", "CNY", "¥1,200.00"),
        ("zh-hans", "1200", "JPY", "JP¥1,200"),
        ("en", "NaN", "EUR", "NaN EUR"),
    ],
)
def test_money_is_written_as_its_readers_write_it(language: str, value: str, currency: str, said: str) -> None:
    with translation.override(language):
        assert formats.money(value, currency) == said


def test_every_event_of_the_ledger_has_a_sentence() -> None:
    worded = set(narrative._EVENTS) | {"wait.decided"}
    assert set(BY_TYPE) - worded == set()


def test_an_event_whose_payload_lacks_a_field_still_reads() -> None:
    for kind in BY_TYPE:
        said = narrative.line({"type": kind, "actor": {"kind": "agent", "name": "bot"}, "payload": {}})
        assert said["text"]
        assert "%(" not in said["text"]


def test_every_refusal_has_words_of_its_own() -> None:
    agents_only = {
        "unauthenticated", "run_conflict", "effect_duplicate", "approval_mismatch", "ambiguous_signal",
        "unsupported_media_type",
    }  # fmt: skip
    unworded = {code for code in STATUS if code not in narrative._REFUSALS}
    assert unworded <= agents_only


def test_the_reason_names_the_effect_as_people_know_it() -> None:
    run = {"effects": [{"key": "po:77", "title": "Order PO-77 sent", "state": "unknown"}], "waits": []}
    with translation.override("en"):
        said = narrative.reason({"code": "effect_unknown", "subject": "po:77"}, run)
        assert said == "“Order PO-77 sent” was sent, but nobody knows whether it arrived."
    with translation.override("zh-hans"):
        assert "Order PO-77 sent" in narrative.reason({"code": "effect_unknown", "subject": "po:77"}, run)
        assert "无人知道" in narrative.reason({"code": "effect_unknown", "subject": "po:77"}, run)


def test_the_recommendation_asks_to_find_out_first_when_an_outcome_is_unknown() -> None:
    run = {
        "status": "review",
        "effects": [{"key": "k", "title": "Slot reserved"}],
        "verdict": {"outcome": "review", "reasons": [{"code": "effect_unknown", "subject": "k"}]},
    }
    with translation.override("en"):
        told = narrative.recommended(run)
    assert told["sentence"] == "Find out whether “Slot reserved” really happened, and record what you found."
    assert told["tone"] == "ask"


def test_the_chinese_is_complete_and_keeps_every_placeholder() -> None:
    (folder,) = settings.LOCALE_PATHS
    catalogue = polib.pofile(str(Path(folder) / "zh_Hans" / "LC_MESSAGES" / "django.po"))
    assert [entry.msgid for entry in catalogue if not entry.translated()] == []
    assert [entry.msgid for entry in catalogue if "fuzzy" in entry.flags] == []
    import re

    for entry in catalogue:
        texts = list(entry.msgstr_plural.values()) if entry.msgid_plural else [entry.msgstr]
        for text in texts:
            assert set(re.findall(r"%\(\w+\)[sd]", text)) == set(re.findall(r"%\(\w+\)[sd]", entry.msgid))


# --- the run track


def event(kind: str, at: dt.datetime, **payload: Any) -> dict[str, Any]:
    return {"type": kind, "at": at.isoformat(), "actor": {"kind": "agent", "name": "bot"}, "payload": payload}


def paused_run(**more: Any) -> dict[str, Any]:
    return {
        "id": "019a0000-0000-7000-8000-000000000001",
        "status": "waiting",
        "created_at": later(minutes=-60).isoformat(),
        "effects": [{"key": "a", "state": "executed"}, {"key": "b", "state": "unknown"}],
        "waits": [{"status": "open", "due_at": later(hours=1).isoformat()}],
        **more,
    }


def test_the_track_tells_work_wait_effects_now_and_deadline() -> None:
    events = [
        event("run.opened", later(minutes=-60)),
        event("lease.granted", later(minutes=-60)),
        event("effect.executed", later(minutes=-55), key="a"),
        event("effect.unknown", later(minutes=-52), key="b"),
        event("paused", later(minutes=-50)),
    ]
    drawn = track.from_events(paused_run(), events, NOON)
    assert [s.kind for s in drawn.segments] == ["work", "wait", "rest"]
    assert (drawn.worked, drawn.waited) == (600, 3000)
    assert (drawn.done, drawn.unknown) == (1, 1)
    assert drawn.deadline == 100.0
    assert drawn.now == pytest.approx(drawn.segments[2].x, abs=0.02)
    ends = [s.x + s.width for s in drawn.segments]
    assert ends[-1] == pytest.approx(100, abs=0.1)
    assert all(0 <= tick.x <= drawn.segments[0].width for tick in drawn.ticks)


def test_a_reconciled_effect_is_no_longer_drawn_as_unknown() -> None:
    events = [
        event("lease.granted", later(minutes=-60)),
        event("effect.unknown", later(minutes=-52), key="b"),
        event("effect.reconciled", later(minutes=-5), key="b", outcome="executed"),
    ]
    run = paused_run(effects=[{"key": "b", "state": "executed"}])
    drawn = track.from_events(run, events, NOON)
    assert (drawn.done, drawn.unknown) == (1, 0)


def test_an_ended_run_has_neither_now_nor_deadline() -> None:
    run = paused_run(status="completed", ended_at=later(minutes=-1).isoformat())
    drawn = track.from_events(run, [event("lease.granted", later(minutes=-60))], NOON)
    assert drawn.now is None
    assert drawn.deadline is None


def test_the_tracks_sentence_says_what_the_picture_shows() -> None:
    with translation.override("en"):
        said = narrative.track(track.from_summary(paused_run(updated_at=later(minutes=-50).isoformat()), NOON))
    assert said.startswith("Run so far: worked 10 min, waited 50 min")
