"""What one incident says about a flow: words to fields, and whether a ledger is needed at all."""

import pytest

from audit import readiness

FIELDS = ["run_id", "stage", "checkpoint", "input_ref", "waiting_for", "timer_due_at", "external_refs", "effect_keys"]
FIELDS += ["decisions", "failures"]


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_known_by_its_name_and_comes_with_advice(field: str) -> None:
    report = readiness.report(happened_outside=True, spans_days=False, looked_up=[field])
    assert report["missing"] == [field]
    assert report["present"] == [other for other in FIELDS if other != field]
    (advice,) = report["advice"]
    assert advice["field"] == field
    assert advice["send"]
    assert advice["example"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("Was the payment already sent?", "effect_keys"),
        ("the supplier's order number", "external_refs"),
        ("who approved it in Slack", "decisions"),
        ("when the timeout was due", "timer_due_at"),
        ("审批意见", "decisions"),
        ("通知是否发送过", "effect_keys"),
        ("卡在哪个阶段", "stage"),
    ],
)
def test_people_use_their_own_words(words: str, field: str) -> None:
    assert field in readiness.fields_of(words)


def test_what_the_runs_record_is_not_missing() -> None:
    report = readiness.report(
        happened_outside=True, spans_days=True, looked_up=["stage", "checkpoint"], recorded=["stage"]
    )
    assert (report["needs_ledger"], report["missing"]) == (True, ["checkpoint"])


def test_a_flow_that_can_simply_run_again_needs_no_ledger() -> None:
    report = readiness.report(happened_outside=False, spans_days=False, looked_up=["prompt"])
    assert (report["needs_ledger"], report["advice"]) == (False, [])
