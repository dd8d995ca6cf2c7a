"""The table of contract.md section 5, row by row and each row against all later ones, from states built by hand."""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from rehydrate.core.state import Effect, Run, State, Wait
from rehydrate.core.verdict import CLEARABLE, NEVER_CLEARED, CallerFacts, NeedsAllEffects, Verdict, assess, next_steps

from .kit import RUN, START, policy

SOON, PAST = START + dt.timedelta(hours=1), START - dt.timedelta(hours=1)


def wait(key: str, **fields: Any) -> Wait:
    return Wait(id=f"w-{key}", key=key, name=key, due_at=SOON, pause=1, **fields)


def effect(key: str, state: str, **fields: Any) -> Effect:
    return Effect(key=key, state=state, system="erp", action="order", **fields)


def rejected(on_reject: str) -> dict[str, Any]:
    return {"rejection": {"code": "rejected", "subject": "w", "on_reject": on_reject}}


def approved(**fields: Any) -> dict[str, Any]:
    return {"legal": {"name": "legal", "status": "approved", "conditions": [], "expires_at": None, "at": "1", **fields}}


UNDO = {"system": "erp", "action": "cancel", "arguments": None}


@dataclass
class Case:
    """One situation: what of the state makes it, and what the table says of it."""

    row: float
    outcome: str
    code: str
    run: dict[str, Any] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    paused_for: list[str] | None = None
    effects: list[Effect] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)
    caller: CallerFacts | None = None

    def __str__(self) -> str:
        return f"row {self.row:g} {self.code}"

    def state(self) -> State:
        named = [w.key for w in self.waits] if self.paused_for is None else self.paused_for
        run = Run(id=RUN, **{"pause": 1, "resume_when": "all", "pause_waits": named, **self.run})
        return State(run, {w.key: w for w in self.waits}, {e.key: e for e in self.effects})

    def verdict(self) -> Verdict:
        return assess(self.state(), policy(**self.policy), START, self.caller)

    def with_(self, other: Case) -> Case | None:
        """Both situations at once, or None where they contradict each other."""
        clash = {k for k in self.run.keys() & other.run.keys() if self.run[k] != other.run[k]}
        if clash == {"alarms"}:
            clash = set()
        if clash:
            return None
        alarms = [*self.run.get("alarms", []), *other.run.get("alarms", [])]
        named = [
            *([w.key for w in self.waits] if self.paused_for is None else self.paused_for),
            *([w.key for w in other.waits] if other.paused_for is None else other.paused_for),
        ]
        return Case(
            self.row,
            self.outcome,
            self.code,
            {**self.run, **other.run, **({"alarms": alarms} if alarms else {})},
            [*self.waits, *other.waits],
            named,
            [*self.effects, *other.effects],
            {**self.policy, **other.policy},
            self.caller or other.caller,
        )


CASES = [
    Case(1, "terminate", "run_ended", {"status": "completed"}),
    Case(2, "wait", "taken_over", {"taken_over": {"by": "dave", "name": "Dave"}}),
    Case(3, "review", "rejected", rejected("review")),
    Case(4, "review", "effect_unknown", rejected("compensate"), effects=[effect("4a", "unknown")]),
    Case(4, "review", "compensation_unknown", rejected("compensate"), effects=[effect("4b", "compensation_unknown")]),
    Case(4, "review", "sign_off_needed", rejected("compensate"), effects=[effect("4c", "executed", impact="money")]),
    Case(
        4,
        "review",
        "retries_exhausted",
        rejected("compensate"),
        effects=[effect("4d", "executed", compensation=UNDO, undo_failures=3)],
    ),
    Case(5, "compensate", "undo_pending", rejected("compensate"), effects=[effect("5", "executed", compensation=UNDO)]),
    Case(5.1, "review", "undo_pending", rejected("terminate"), effects=[effect("5t", "executed", compensation=UNDO)]),
    Case(6, "terminate", "rejected", rejected("compensate")),
    Case(6.1, "terminate", "cancelled", {"cancelled": {"reason": "", "by": "k"}}, policy={"on_reject": "terminate"}),
    Case(7, "review", "metadata_missing", {"missing": ["checkpoint"]}),
    Case(8, "review", "effect_unknown", effects=[effect("8a", "unknown")]),
    Case(8, "review", "receipt_conflict", effects=[effect("8b", "unknown", conflict=True, retry_safe=True)]),
    Case(8, "review", "compensation_unknown", effects=[effect("8c", "compensation_unknown")]),
    Case(
        9,
        "review",
        "executed_despite_rejection",
        {"alarms": [{"code": "executed_despite_rejection", "subject": "9a"}]},
    ),
    Case(9, "review", "approval_mismatch", {"alarms": [{"code": "approval_mismatch", "subject": "9b"}]}),
    Case(9, "review", "unsatisfiable_gate", waits=[wait("9c", unsatisfiable=True)], paused_for=[]),
    Case(10, "wait", "waiting", waits=[wait("10")]),
    Case(10.1, "wait", "backing_off", {"retry_at": SOON}),
    Case(11, "review", "timeout_undetermined", waits=[wait("11", status="timed_out", why="review")]),
    Case(
        12,
        "review",
        "input_changed",
        {"input_digest": "d1", "mismatch": {"input_digest": "d2", "agent_version": None}},
    ),
    Case(12.1, "review", "version_changed", {"agent": {"version": "1"}}, caller=CallerFacts(agent_version="2")),
    Case(
        13,
        "review",
        "condition_unmet",
        effects=[
            effect(
                "13a",
                "planned",
                arguments={"n": 9},
                approvals=approved(conditions=[{"pointer": "/n", "op": "<=", "value": 5}]),
            )
        ],
    ),
    Case(
        13.1,
        "review",
        "approval_expired",
        effects=[effect("13b", "planned", approvals=approved(expires_at=START.isoformat()))],
    ),
    Case(13.2, "review", "condition_unmet", {"alarms": [{"code": "condition_unmet", "subject": "13c"}]}),
    Case(14, "review", "retries_exhausted", {"failure_count": 3, "failure_limit": 3}),
    Case(14.1, "review", "not_retryable", {"not_retryable": True}),
    Case(15, "review", "human_gate", {"stage": "sign"}, policy={"gated_stages": ["sign"]}),
    Case(16, "continue", "clear"),
    Case(16.1, "continue", "retry_same_key", effects=[effect("16b", "unknown", retry_safe=True)]),
    Case(16.2, "continue", "look_up", effects=[effect("16c", "unknown", lookup=True)]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row(case: Case) -> None:
    found = case.verdict()
    assert (found.outcome, found.reasons[0].code) == (case.outcome, case.code)
    assert found.missing == case.run.get("missing", [])


#: Two rows that are about the same no exclude each other; what they do together is told below.
BOTH_NO = {(a, b) for a in (3, 4, 5, 5.1, 6, 6.1) for b in (3, 4, 5, 5.1, 6, 6.1)} - {(4, 5)}
PAIRS = [
    (one, other, both)
    for one, other in itertools.combinations(CASES, 2)
    if int(one.row) != int(other.row)
    and int(other.row) != 16
    and (one.row, other.row) not in BOTH_NO
    and (both := one.with_(other)) is not None
    # Rows 11 and 15 need the pause to be resolved, or not to be.
    and not (one.code == "waiting" and other.row == 11)
]


def test_nearly_all_pairs_can_come_together() -> None:
    assert len(PAIRS) > 300


@pytest.mark.parametrize(("one", "other", "both"), PAIRS, ids=lambda part: str(part) if isinstance(part, Case) else "")
def test_the_earlier_row_gives_the_outcome_and_the_later_is_told_too(one: Case, other: Case, both: Case) -> None:
    found = both.verdict()
    codes = [reason.code for reason in found.reasons]
    assert (found.outcome, codes[0]) == (one.outcome, one.code) or _row_4(one, both, found), codes
    assert other.code in codes


def _row_4(one: Case, both: Case, found: Verdict) -> bool:
    """A no where the other situation brings an unknown outcome: that is row 4's, whatever else is to be undone."""
    unsettled = any(e.state in ("unknown", "compensation_unknown") for e in both.effects)
    return int(one.row) in (4, 5, 6) and unsettled and found.outcome == "review"


@pytest.mark.parametrize("case", [c for c in CASES if c.code in CLEARABLE - {"receipt_conflict"}], ids=str)
def test_what_was_cleared_is_settled(case: Case) -> None:
    case = Case(
        case.row, "", case.code, {**case.run, "cleared": [case.code]}, case.waits, case.paused_for, case.effects
    )
    case.policy = {"gated_stages": ["sign"]}
    assert case.code not in [reason.code for reason in case.verdict().reasons]


@pytest.mark.parametrize("case", [c for c in CASES if c.code in NEVER_CLEARED], ids=str)
def test_what_is_never_cleared(case: Case) -> None:
    case = Case(
        case.row, "", case.code, {**case.run, "cleared": [case.code]}, case.waits, case.paused_for, case.effects
    )
    assert case.code in [reason.code for reason in case.verdict().reasons]


class TestTheNo:
    """Rows 3 to 6: the worst no counts, when the pause resolves."""

    def of(self, *waits: Wait, resume_when: str = "all", effects: list[Effect] | None = None, **rules: Any) -> Verdict:
        return Case(0, "", "", {"resume_when": resume_when}, list(waits), None, effects or [], rules).verdict()

    @pytest.mark.parametrize(
        ("ways", "outcome", "code"),
        [
            (["continue"], "continue", "clear"),
            (["compensate", "continue"], "terminate", "rejected"),
            (["continue", "review"], "review", "rejected"),
            (["compensate", "review"], "review", "rejected"),
            (["review", "terminate"], "terminate", "rejected"),
        ],
    )
    def test_the_worst_first(self, ways: list[str], outcome: str, code: str) -> None:
        nos = [wait(f"n{i}", status="rejected", on_reject=way) for i, way in enumerate(ways)]
        found = self.of(*nos)
        assert (found.outcome, found.reasons[0].code) == (outcome, code)
        assert self.of(*reversed(nos)).outcome == outcome

    def test_not_before_the_pause_resolves(self) -> None:
        no = wait("a", status="rejected", on_reject="terminate")
        assert self.of(no, wait("b")).outcome == "wait"
        assert self.of(no, wait("b"), resume_when="any").outcome == "terminate"
        assert self.of(no, wait("b"), resume_when="each").outcome == "terminate"

    @pytest.mark.parametrize("then", ["reject", "terminate"])
    def test_a_deadline_may_be_a_no(self, then: str) -> None:
        found = self.of(wait("a", status="timed_out", why=then, on_reject="terminate"))
        assert (found.outcome, found.reasons[0].code) == ("terminate", "timed_out")

    @pytest.mark.parametrize("then", ["resume", "continue"])
    def test_or_none(self, then: str) -> None:
        assert self.of(wait("a", status="timed_out", why=then, on_reject="terminate")).outcome == "continue"

    def test_the_first_answer_of_any_outweighs_a_time_out(self) -> None:
        late = wait("late", status="timed_out", why="review")
        assert self.of(wait("ok", status="satisfied"), late, resume_when="any").outcome == "continue"
        assert self.of(wait("ok", status="satisfied"), late).reasons[0].code == "timeout_undetermined"

    def test_continue_tells_the_no_and_still_looks_at_what_is_unknown(self) -> None:
        no = wait("a", status="rejected", on_reject="continue")
        found = self.of(no, effects=[effect("e", "unknown", retry_safe=True)])
        assert (found.outcome, found.reasons[0].code) == ("review", "effect_unknown")
        assert self.of(no, effects=[effect("e", "executed", impact="money")]).outcome == "continue"

    def test_a_waived_undo_is_none(self) -> None:
        no = wait("a", status="rejected", on_reject="compensate")
        kept = effect("e", "executed", compensation=UNDO, signed_off={"by": "dave"})
        assert self.of(no, effects=[kept]).outcome == "terminate"

    def test_undo_newest_first(self) -> None:
        no = wait("a", status="rejected", on_reject="compensate")
        done = [effect(str(n), "executed", compensation=UNDO, executed_seq=n) for n in (2, 9, 5)]
        case = Case(0, "", "", {}, [no], None, done)
        assert [reason.subject for reason in case.verdict().reasons] == ["9", "5", "2"]
        assert next_steps(case.state(), case.verdict())["undo"] == ["9", "5", "2"]

    def test_a_state_in_part_does_not_guess(self) -> None:
        no = wait("a", status="rejected", on_reject="compensate")
        whole = Case(0, "", "", {}, [no]).state()
        part = State(whole.run, whole.waits, {}, complete=False)
        with pytest.raises(NeedsAllEffects):
            assess(part, policy(), START)
        clear = Case(0, "", "", {}, [wait("a", status="satisfied")]).state()
        assert assess(State(clear.run, clear.waits, {}, complete=False), policy(), START).outcome == "continue"


class TestWhoComes:
    """Row 12: what rehydrate and claim bring; null differs from nothing."""

    RUN: dict[str, Any] = {"input_digest": "d1", "agent": {"version": "1"}}

    @pytest.mark.parametrize(
        ("caller", "code"),
        [
            (None, "clear"),
            (CallerFacts(), "clear"),
            (CallerFacts(input_digest="d1", agent_version="1"), "clear"),
            (CallerFacts(input_digest="d2"), "input_changed"),
            (CallerFacts(agent_version="2"), "version_changed"),
            (CallerFacts(agent_version="2", reads=["1"]), "clear"),
            (CallerFacts(agent_version="2", reads=["3"]), "version_changed"),
            (CallerFacts(reads=["3"]), "version_changed"),
            (CallerFacts(reads=["1"]), "clear"),
        ],
    )
    def test_what_differs(self, caller: CallerFacts | None, code: str) -> None:
        assert Case(0, "", "", self.RUN, caller=caller).verdict().reasons[0].code == code

    def test_nothing_to_differ_from(self) -> None:
        caller = CallerFacts(input_digest="d2", agent_version="2")
        assert Case(0, "", "", {}, caller=caller).verdict().reasons[0].code == "clear"

    def test_a_flow_may_not_mind(self) -> None:
        caller = CallerFacts(agent_version="2", input_digest="d2")
        case = Case(0, "", "", self.RUN, policy={"on_version_change": "continue"}, caller=caller)
        assert [reason.code for reason in case.verdict().reasons] == ["input_changed"]


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        ("approve", "clear"),
        ("approve_with_conditions", "clear"),
        ("edit", "clear"),
        ("respond", "human_gate"),
        (None, "human_gate"),
    ],
)
def test_what_opens_a_gated_stage(choice: str | None, code: str) -> None:
    answered = wait("legal", status="satisfied", decision={"choice": choice} if choice else None)
    case = Case(0, "", "", {"stage": "sign"}, [answered], policy={"gated_stages": ["sign"]})
    assert case.verdict().reasons[0].code == code
    other = Case(0, "", "", {"stage": "draft"}, [answered], policy={"gated_stages": ["sign"]})
    assert other.verdict().reasons[0].code == "clear"


@pytest.mark.parametrize("name", ["stage", "checkpoint", "input_ref", "external_refs"])
def test_metadata_may_come_after_the_pause(name: str) -> None:
    later: dict[str, Any] = {"stage": "s", "checkpoint": {"ref": "r"}, "input_ref": "r", "external_refs": 1}
    found = {"ref_count": 1} if name == "external_refs" else {name: later[name]}
    assert Case(0, "", "", {"missing": [name]}).verdict().missing == [name]
    assert Case(0, "", "", {"missing": [name], **found}).verdict().outcome == "continue"


def test_deadlines_are_exclusive() -> None:
    """An approval that expires now has expired; a retry that is due now is due."""
    expires = effect("e", "planned", approvals=approved(expires_at=START.isoformat()))
    assert Case(0, "", "", effects=[expires]).verdict().reasons[0].code == "approval_expired"
    later = effect("e", "planned", approvals=approved(expires_at=(START + dt.timedelta(microseconds=1)).isoformat()))
    assert Case(0, "", "", effects=[later]).verdict().outcome == "continue"
    assert Case(0, "", "", {"retry_at": START}).verdict().outcome == "continue"
    assert Case(0, "", "", {"retry_at": START + dt.timedelta(microseconds=1)}).verdict().outcome == "wait"
