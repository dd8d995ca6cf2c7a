"""A policy's arithmetic: durations, reminders, escalations, back-off. Moments are instants: no time zone bends them."""

from __future__ import annotations

import datetime as dt
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from rehydrate.core import policy
from rehydrate.core.policy import FlowPolicy, WaitPolicy
from rehydrate.core.state import after

NOON = dt.datetime(2026, 3, 28, 12, 0, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("90m", 5400), ("2h", 7200), ("1d12h", 129_600), ("400d", 34_560_000), ("1w", 604_800), ("1h1h", 7200)],
)
def test_durations(text: str, seconds: int) -> None:
    assert policy.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "1.5h", "-1h", "1 h", "1y", "1h ", "h1", "1h30", "٣h", "1H", "1hh"])
def test_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        policy.seconds(text)


def test_a_policy_file_that_says_no_duration_is_refused() -> None:
    for field in ("claim_within", "remind_every"):
        body: dict[str, Any] = {field: "soon"} if field == "claim_within" else {"wait": {"legal": {field: "soon"}}}
        with pytest.raises(msgspec.ValidationError, match=field):
            policy.load(body)


def test_a_declared_kind_is_found_by_system_and_action() -> None:
    rules = policy.load({"effect": {"erp.order": {"impact": "money"}, "order": {"impact": "access"}}})
    assert rules.kind("erp", "order") == rules.effect["erp.order"]
    assert rules.kind("crm", "order") == rules.effect["order"]
    assert rules.kind("erp", "pay") is None
    assert FlowPolicy().wait_policy("legal") == WaitPolicy()


class TestReminders:
    def test_none_without_a_policy(self) -> None:
        assert policy.first_reminder(WaitPolicy(), opened_at=NOON, due_at=NOON + HOUR) is None

    def test_before_the_deadline(self) -> None:
        rules = WaitPolicy(remind_before="20m", remind_every="10m")
        at = policy.first_reminder(rules, opened_at=NOON, due_at=NOON + HOUR)
        assert at == NOON + dt.timedelta(minutes=40)

    def test_a_short_wait_is_reminded_by_interval_or_not_at_all(self) -> None:
        soon = NOON + dt.timedelta(minutes=15)
        both = WaitPolicy(remind_before="20m", remind_every="10m")
        assert policy.first_reminder(both, opened_at=NOON, due_at=soon) == NOON + dt.timedelta(minutes=10)
        assert policy.first_reminder(WaitPolicy(remind_before="20m"), opened_at=NOON, due_at=soon) is None

    def test_by_interval(self) -> None:
        at = policy.first_reminder(WaitPolicy(remind_every="10m"), opened_at=NOON, due_at=NOON + HOUR)
        assert at == NOON + dt.timedelta(minutes=10)

    def test_missed_intervals_are_not_made_up_for(self) -> None:
        late = NOON + dt.timedelta(days=3)
        assert policy.next_reminder("1h", now=late, due_at=late + 2 * HOUR) == late + HOUR

    def test_none_at_or_after_the_deadline(self) -> None:
        assert policy.next_reminder("1h", now=NOON, due_at=NOON + HOUR) is None
        assert policy.next_reminder(None, now=NOON, due_at=NOON + HOUR) is None


class TestEscalation:
    RULES = WaitPolicy(escalate_to=["leads"], escalate_after="30m")

    def test_after_a_while(self) -> None:
        assert policy.escalation(self.RULES, opened_at=NOON, due_at=NOON + HOUR) == NOON + HOUR / 2

    def test_never_when_the_deadline_is_first(self) -> None:
        assert policy.escalation(self.RULES, opened_at=NOON, due_at=NOON + HOUR / 2) is None

    @pytest.mark.parametrize("rules", [WaitPolicy(escalate_after="30m"), WaitPolicy(escalate_to=["leads"])])
    def test_needs_both_the_time_and_the_people(self, rules: WaitPolicy) -> None:
        assert policy.escalation(rules, opened_at=NOON, due_at=NOON + HOUR) is None


def test_back_off_doubles_up_to_five_minutes() -> None:
    assert [policy.backoff(n) for n in range(0, 12)] == [2, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_summer_time_changes_nothing(zone: str) -> None:
    """29 March 2026, 01:00 UTC: Berlin's clocks jump. A day has 86,400 seconds all the same, wherever it is written."""
    start = NOON.astimezone(ZoneInfo(zone)).astimezone(dt.UTC)
    assert (after(start, 86_400) - NOON).total_seconds() == 86_400
    local = NOON.astimezone(ZoneInfo(zone))
    at = policy.first_reminder(
        WaitPolicy(remind_every="1d"), opened_at=local.astimezone(dt.UTC), due_at=after(NOON, 200_000)
    )
    assert at == NOON + dt.timedelta(seconds=86_400)


def test_four_hundred_days() -> None:
    assert after(NOON, policy.seconds("400d")) == dt.datetime(2027, 5, 2, 12, 0, tzinfo=dt.UTC)
    assert after(NOON, policy.seconds("40d")) == dt.datetime(2026, 5, 7, 12, 0, tzinfo=dt.UTC)
