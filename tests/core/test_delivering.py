"""When deliveries are tried again, and how attempts are shared among receivers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rehydrate.core.delivering import (
    AT_ONCE,
    GIVE_UP_AFTER,
    LONGEST_PAUSE,
    Receiver,
    backoff,
    next_try,
    pace,
    quiet,
    retry_after,
    share,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_waits_grow_up_to_four_hours_and_spread() -> None:
    assert [backoff(n, 0.5) for n in (1, 2, 3, 4)] == [5, 15, 45, 135]
    assert backoff(400, 0.5) == 4 * 3600
    assert (backoff(1, 0.0), backoff(1, 1.0)) == (3.75, 6.25)


@given(luck=st.floats(0, 1))
def test_three_days_of_tries_the_last_one_at_their_end(luck: float) -> None:
    at = NOW
    tries: list[datetime] = []
    while (again := next_try(attempts=len(tries) + 1, since=NOW, now=at, luck=luck)) is not None:
        assert at < again <= NOW + GIVE_UP_AFTER
        tries.append(again)
        at = again
    assert tries[-1] == NOW + timedelta(days=3)
    assert 20 <= len(tries) <= 40


def test_a_receiver_may_ask_for_a_pause_within_limits() -> None:
    def after(pause: float) -> float:
        again = next_try(attempts=1, since=NOW, now=NOW, luck=0.5, pause=pause)
        assert again is not None
        return (again - NOW).total_seconds()

    assert after(120) == 120
    assert after(0) == 5
    assert after(10**9) == LONGEST_PAUSE


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120), (" 0 ", 0), ("Sun, 01 Mar 2026 12:01:00 GMT", 60), ("Sun, 01 Mar 2020 12:01:00 GMT", 0),
        (None, None), ("", None), ("soon", None), ("-5", None), ("1.5", None), ("٣", None), ("9" * 60, None),
        ("9" * 40, float("9" * 12)), ("Sun, 99 Mar 2026 12:01:00 GMT", None), ("nan", None), ("inf", None),
    ],
)  # fmt: skip
def test_retry_after_in_both_its_forms(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, NOW) == seconds


def test_one_that_keeps_failing_is_left_alone_for_a_minute_at_most() -> None:
    assert [quiet(n) for n in (0, 1, 2, 3, 4, 9, 500)] == [0, 0, 0, 1, 2, 60, 60]


def test_receivers_take_turns() -> None:
    receivers = [Receiver(str(n), busy=0, due=4) for n in range(3)]
    assert share(receivers, free=5, free_for_slow=5) == {"0": 2, "1": 2, "2": 1}


def test_one_that_fails_gets_one_attempt_and_all_of_those_together_only_part() -> None:
    failing = [Receiver(f"f{n}", busy=0, due=4, pace="untold") for n in range(20)]
    well = Receiver("well", busy=1, due=40)
    given_ = share([*failing, well], free=32, free_for_slow=10)
    assert given_.pop("well") == AT_ONCE["quick"] - 1
    assert list(given_.values()) == [1] * 10


def test_one_that_is_new_fails_or_is_slow_is_treated_with_care() -> None:
    assert [pace(0, None), pace(1, 0.1), pace(0, 2.1), pace(0, 0.1)] == ["untold", "untold", "slow", "quick"]
    assert AT_ONCE["untold"] < AT_ONCE["slow"] < AT_ONCE["quick"]


_receivers = st.lists(
    st.builds(
        Receiver,
        id=st.uuids().map(str),
        busy=st.integers(0, 6),
        due=st.integers(0, 4),
        pace=st.sampled_from(sorted(AT_ONCE)),
    ),
    max_size=30,
    unique_by=lambda r: r.id,
)


@given(receivers=_receivers, free=st.integers(0, 40), part=st.integers(-3, 40))
def test_nobody_gets_more_than_there_is(receivers: list[Receiver], free: int, part: int) -> None:
    given_ = share(receivers, free=free, free_for_slow=part)
    assert sum(given_.values()) <= free
    for r in receivers:
        assert given_.get(r.id, 0) <= r.due
        assert given_.get(r.id, 0) + r.busy <= max(AT_ONCE[r.pace], r.busy)
    assert sum(given_.get(r.id, 0) for r in receivers if r.pace != "quick") <= max(part, 0)
    # Nothing is left unused that somebody could have had.
    quick = [r for r in receivers if r.pace == "quick"]
    wanting = [r for r in quick if given_.get(r.id, 0) < min(r.due, AT_ONCE["quick"] - r.busy)]
    assert not wanting or sum(given_.values()) == free
