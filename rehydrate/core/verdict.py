"""`assess(state, policy, now, caller)`: what must happen to a run now. Pure and total; it reads like contract.md
section 5.

Each row of the table is one function below, in the table's order; all that apply give their reasons, the first gives
the outcome.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from rehydrate.core import conditions
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.state import UNSETTLED, Effect, State, Wait

Outcome = Literal["continue", "wait", "compensate", "review", "terminate"]

#: What `clear` never settles: these need a receipt, a person's finding, or more tries.
NEVER_CLEARED: Final = frozenset({"effect_unknown", "compensation_unknown", "undo_pending", "retries_exhausted"})
#: What `clear` may name.
CLEARABLE: Final = frozenset(
    {
        "rejected",
        "cancelled",
        "timed_out",
        "sign_off_needed",
        "metadata_missing",
        "receipt_conflict",
        "executed_despite_rejection",
        "approval_mismatch",
        "effect_repeated",
        "timeout_undetermined",
        "input_changed",
        "version_changed",
        "condition_unmet",
        "approval_expired",
        "not_retryable",
        "human_gate",
        "unsatisfiable_gate",
    }
)


class NeedsAllEffects(Exception):
    """The state is partial and the verdict depends on every effect: load them all and ask again."""


class CallerFacts(Struct, frozen=True):
    """What rehydrate and claim say of the agent that comes; None is not known, and null differs from nothing."""

    agent_version: str | None = None
    reads: list[str] = []
    input_digest: str | None = None


class Reason(Struct, frozen=True):
    code: str
    message: str
    subject: str | None = None


class Verdict(Struct, frozen=True):
    outcome: Outcome
    reasons: list[Reason]
    missing: list[str] = []


class _Case(Struct, frozen=True):
    state: State
    policy: FlowPolicy
    now: datetime
    caller: CallerFacts | None


Found = Iterator[tuple[Outcome, Reason]]


# -- the state as the table speaks of it


def pause_resolved(state: State) -> bool:
    """`all`: none open. `any`: the first answer, satisfied or rejected. `each`: any answer at all."""
    waits = state.pause_list()
    if state.run.resume_when == "any":
        answered = any(wait.status in ("satisfied", "rejected") for wait in waits)
        return answered or not any(wait.open for wait in waits)
    if state.run.resume_when == "each":
        return any(not wait.open for wait in waits) or not waits
    return not any(wait.open for wait in waits)


def is_no(wait: Wait) -> str | None:
    """`rejected` or `timed_out` where the wait ended with a no, by a person or by its deadline's policy."""
    if wait.status == "rejected":
        return "rejected"
    if wait.status == "timed_out" and wait.why in ("reject", "terminate"):
        return "timed_out"
    return None


_WORST: Final = {"terminate": 0, "review": 1, "compensate": 2, "continue": 3}


def the_no(state: State, policy: FlowPolicy) -> tuple[str, str | None, str] | None:
    """(code, subject, on_reject) of the worst no that counts and that nobody cleared, or None."""
    run = state.run
    found: list[tuple[str, str | None, str]] = []
    if run.cancelled is not None:
        found.append(("cancelled", None, policy.on_reject))
    if run.rejection is not None:
        found.append((run.rejection["code"], run.rejection.get("subject"), run.rejection["on_reject"]))
    if run.pause and pause_resolved(state):
        waits = state.pause_list()
        if run.resume_when == "any" and any(wait.status in ("satisfied", "rejected") for wait in waits):
            waits = [wait for wait in waits if wait.status == "rejected"]  # the first answer alone counts
        for wait in waits:
            code = is_no(wait)
            if code is not None:
                found.append((code, wait.id, wait.on_reject))
    found = [no for no in found if no[0] not in run.cleared]
    # Cancelled is said once for the run; of the others the worst counts first.
    return min(found, key=lambda no: _WORST[no[2]]) if found else None


def undo_list(state: State) -> list[Effect]:
    """Executed effects with an undo that nobody waived, newest first."""
    return sorted((e for e in state.effects.values() if e.undoable), key=lambda e: -e.executed_seq)


def needs_sign_off(effect: Effect) -> bool:
    """Rule 13: done, above low impact, and nothing declared that would undo it."""
    return (
        effect.state == "executed"
        and effect.impact != "low"
        and effect.compensation is None
        and effect.signed_off is None
    )


def undo_exhausted(state: State, policy: FlowPolicy) -> list[str]:
    """Keys of the effects whose undo failed as often as the flow allows ("" for the undoing as a whole)."""
    keys = [e.key for e in undo_list(state) if e.undo_failures >= policy.max_failures]
    return [*keys, ""] if state.run.undo_failures >= policy.max_failures else keys


def missing(state: State) -> list[str]:
    """What was required at the latest pause, was not there, and still is not."""
    run = state.run
    have = {
        "stage": run.stage is not None,
        "checkpoint": run.checkpoint is not None,
        "input_ref": run.input_ref is not None,
        "external_refs": run.ref_count > 0,
    }
    return [name for name in run.missing if not have.get(name, False)]


# -- the rows


def _row_1(case: _Case) -> Found:
    if case.state.run.ended:
        yield "terminate", Reason("run_ended", "The run has ended.")


def _row_2(case: _Case) -> Found:
    held = case.state.run.taken_over
    if held is not None:
        yield "wait", Reason("taken_over", f"{held['name']} holds the run.", held["by"])


_NO: Final = {
    "rejected": "A person said no.",
    "cancelled": "The run was cancelled.",
    "timed_out": "Nobody answered by the deadline, which counts as a no here.",
}


def _rows_3_to_6(case: _Case) -> Found:
    no = the_no(case.state, case.policy)
    if no is None:
        return
    code, subject, on_reject = no
    if on_reject == "review":
        yield "review", Reason(code, _NO[code], subject)
        return
    if not case.state.complete:
        raise NeedsAllEffects
    stuck = False
    for effect in case.state.effects.values():
        if effect.state in ("unknown", "started"):
            stuck = True
            yield "review", Reason("effect_unknown", f"Nobody knows whether {_what(effect)} happened.", effect.key)
        elif effect.state in ("compensation_unknown", "compensating"):
            stuck = True
            yield (
                "review",
                Reason("compensation_unknown", f"Nobody knows whether {_what(effect)} was undone.", effect.key),
            )
        elif on_reject != "continue" and needs_sign_off(effect) and "sign_off_needed" not in case.state.run.cleared:
            stuck = True
            text = f"{_what(effect)} is done and cannot be undone: a person must sign that off."
            yield "review", Reason("sign_off_needed", text, effect.key)
    for key in undo_exhausted(case.state, case.policy):
        stuck = True
        yield "review", Reason("retries_exhausted", "Undoing failed as often as the flow allows.", key or None)
    undo = undo_list(case.state)
    for effect in undo:
        outcome: Outcome = "review" if on_reject == "terminate" or stuck else "compensate"
        yield outcome, Reason("undo_pending", f"{_what(effect)} is still to be undone.", effect.key)
    if not undo and on_reject != "continue":
        yield "review" if stuck else "terminate", Reason(code, _NO[code], subject)


def _row_7(case: _Case) -> Found:
    if "metadata_missing" in case.state.run.cleared:
        return
    for name in missing(case.state):
        yield "review", Reason("metadata_missing", f"The flow requires {name} at a pause, and it is not there.", name)


def _row_8(case: _Case) -> Found:
    for effect in case.state.effects.values():
        if effect.state in UNSETTLED and effect.conflict:
            text = f"A receipt for {_what(effect)} contradicts what a person found."
            yield "review", Reason("receipt_conflict", text, effect.key)
        elif effect.state == "unknown" and not (effect.retry_safe or effect.lookup):
            yield "review", Reason("effect_unknown", f"Nobody knows whether {_what(effect)} happened.", effect.key)
        elif effect.state == "compensation_unknown":
            text = f"Nobody knows whether {_what(effect)} was undone."
            yield "review", Reason("compensation_unknown", text, effect.key)


_ALARMS: Final = {
    "executed_despite_rejection": "{key} was executed without a person's approval, or against it.",
    "approval_mismatch": "What was to run is not what was approved: {key}.",
    "condition_unmet": "{key} does not keep to the conditions of its approval.",
}


def _row_9(case: _Case) -> Found:
    for alarm in case.state.run.alarms:
        if (
            alarm["code"] in ("executed_despite_rejection", "approval_mismatch")
            and alarm["code"] not in case.state.run.cleared
        ):
            text = _ALARMS[alarm["code"]].format(key=alarm["subject"])
            yield "review", Reason(alarm["code"], text, alarm["subject"])
    if "unsatisfiable_gate" not in case.state.run.cleared:
        for wait in case.state.open_waits():
            if wait.unsatisfiable:
                yield "review", Reason("unsatisfiable_gate", f"Nobody is left who may decide {wait.name}.", wait.id)


def _row_10(case: _Case) -> Found:
    run = case.state.run
    if run.pause and not pause_resolved(case.state):
        for wait in case.state.pause_list():
            if wait.open:
                yield "wait", Reason("waiting", f"It waits for {wait.source or wait.name}.", wait.id)
    if run.retry_at is not None and run.retry_at > case.now:
        yield "wait", Reason("backing_off", f"The next try is at {run.retry_at.isoformat().replace('+00:00', 'Z')}.")


def _row_11(case: _Case) -> Found:
    if "timeout_undetermined" in case.state.run.cleared or not pause_resolved(case.state):
        return
    if case.state.run.resume_when == "any" and any(
        w.status in ("satisfied", "rejected") for w in case.state.pause_list()
    ):
        return  # the first answer alone counts
    for wait in case.state.pause_list():
        if wait.status == "timed_out" and wait.why == "review":
            text = f"Nobody answered {wait.name} by its deadline, and the flow does not say where that leads."
            yield "review", Reason("timeout_undetermined", text, wait.id)


def _row_12(case: _Case) -> Found:
    run, caller = case.state.run, case.caller
    if caller is None:
        given, version, reads = (run.mismatch or {}).get("input_digest"), (run.mismatch or {}).get("agent_version"), []
    else:
        given, version, reads = caller.input_digest, caller.agent_version, caller.reads
    if (
        given is not None
        and run.input_digest is not None
        and given != run.input_digest
        and "input_changed" not in run.cleared
    ):
        yield "review", Reason("input_changed", "The agent brings another input than the run was opened with.")
    ours = (run.agent or {}).get("version")
    changed = version is not None and ours is not None and version != ours and ours not in reads
    unread = bool(reads) and ours is not None and ours != version and ours not in reads
    if (changed or unread) and case.policy.on_version_change == "review" and "version_changed" not in run.cleared:
        yield "review", Reason("version_changed", f"The run is of version {ours}; the agent is of version {version}.")


def _row_13(case: _Case) -> Found:
    run = case.state.run
    for alarm in run.alarms:
        if alarm["code"] == "condition_unmet" and "condition_unmet" not in run.cleared:
            yield (
                "review",
                Reason("condition_unmet", _ALARMS["condition_unmet"].format(key=alarm["subject"]), alarm["subject"]),
            )
    for effect in case.state.effects.values():
        if effect.state not in ("planned", "failed"):
            continue
        for approval in effect.approvals.values():
            if approval["status"] != "approved":
                continue
            if "condition_unmet" not in run.cleared:
                for unmet in conditions.unmet(approval["conditions"], effect.arguments):
                    yield "review", Reason("condition_unmet", f"{_what(effect)}: {unmet}", effect.key)
            expires_at = approval["expires_at"]
            if expires_at and datetime.fromisoformat(expires_at) <= case.now and "approval_expired" not in run.cleared:
                yield "review", Reason("approval_expired", f"The approval of {_what(effect)} has expired.", effect.key)


def _row_14(case: _Case) -> Found:
    run = case.state.run
    if run.failure_count >= run.failure_limit:
        yield (
            "review",
            Reason("retries_exhausted", f"It failed {run.failure_count} times of {run.failure_limit} allowed."),
        )
    if run.not_retryable and "not_retryable" not in run.cleared:
        yield "review", Reason("not_retryable", "The agent says that trying again does not help.")


def _row_15(case: _Case) -> Found:
    run = case.state.run
    if run.stage is None or run.stage not in case.policy.gated_stages or "human_gate" in run.cleared:
        return
    yes = ("approve", "approve_with_conditions", "edit")
    approved = any(
        wait.kind == "approval" and (wait.decision or {}).get("choice") in yes for wait in case.state.pause_list()
    )
    if not approved:
        yield "review", Reason("human_gate", f"Stage {run.stage} needs a person's yes before it goes on.", run.stage)


def _row_16(case: _Case) -> Found:
    plain = True
    for effect in case.state.effects.values():
        if effect.state != "unknown":
            continue
        plain = False
        if effect.lookup:
            yield "continue", Reason("look_up", f"Look up first whether {_what(effect)} happened.", effect.key)
        else:
            yield "continue", Reason("retry_same_key", f"Repeat {_what(effect)} under the same key.", effect.key)
    if plain:
        yield "continue", Reason("clear", "Nothing stands in the way.")


ROWS: Final[tuple[Callable[[_Case], Found], ...]] = (
    _row_1,
    _row_2,
    _rows_3_to_6,
    _row_7,
    _row_8,
    _row_9,
    _row_10,
    _row_11,
    _row_12,
    _row_13,
    _row_14,
    _row_15,
)


def assess(state: State, policy: FlowPolicy, now: datetime, caller: CallerFacts | None = None) -> Verdict:
    """The verdict at `now`. Raises NeedsAllEffects when a partial state cannot tell."""
    case = _Case(state, policy, now, caller)
    found = [item for row in ROWS for item in row(case)]
    if not found:
        found = list(_row_16(case))
    reasons: list[Reason] = []
    for _, reason in found:
        if reason not in reasons:
            reasons.append(reason)
    return Verdict(found[0][0], reasons, missing(state) if "metadata_missing" not in state.run.cleared else [])


def _what(effect: Effect) -> str:
    return effect.title or f"{effect.system} {effect.action}"


STATUS: Final[dict[str, str]] = {
    "continue": "ready",
    "wait": "waiting",
    "compensate": "compensating",
    "review": "review",
    "terminate": "terminated",
}


# -- what happens on it, in words and in data


def next_steps(state: State, verdict: Verdict) -> dict[str, Any]:
    """`next`: the checkpoint to go on from, what to skip with its receipt, what to retry or undo, in order."""
    run = state.run
    effects = state.effects.values()
    skip = [{"key": e.key, "receipt": e.receipt} for e in effects if e.state == "executed"]
    unknown = [e for e in effects if e.state == "unknown"]
    return {
        "sentence": _next_sentence(state, verdict),
        "checkpoint": run.checkpoint,
        "skip": skip,
        "retry": [e.key for e in unknown if e.retry_safe and not e.lookup],
        "look_up": [e.key for e in unknown if e.lookup],
        "undo": [e.key for e in undo_list(state)],
        "on_approve": [e.key for e in effects if e.state == "planned"],
        "on_reject": [e.key for e in undo_list(state)],
    }


def _next_sentence(state: State, verdict: Verdict) -> str:
    run = state.run
    if verdict.outcome == "continue":
        return f"The agent goes on from {run.stage or 'the start'}."
    if verdict.outcome == "compensate":
        return "The agent undoes what was done, the newest first."
    if verdict.outcome == "terminate":
        return "The run is over; its evidence is kept."
    return verdict.reasons[0].message


_BUTTONS: Final[dict[str, str]] = {
    "effect_unknown": "reconcile",
    "compensation_unknown": "reconcile",
    "receipt_conflict": "reconcile",
    "sign_off_needed": "sign_off",
    "retries_exhausted": "retry",
    "not_retryable": "retry",
    "undo_pending": "takeover",
    "taken_over": "handback",
    "unsatisfiable_gate": "takeover",
}


def recommended(state: State, verdict: Verdict) -> dict[str, Any]:
    """The same for a person:

    one sentence, why, and the buttons that carry it out, the first being the recommended one.
    """
    buttons: list[dict[str, Any]] = []
    if not state.run.ended:
        buttons = _buttons(state, verdict)
    unique = {msgspec.json.encode(button): button for button in buttons}
    return {
        "sentence": _recommended_sentence(state, verdict),
        "why": " ".join(reason.message for reason in verdict.reasons),
        "code": verdict.reasons[0].code,
        "buttons": list(unique.values()),
    }


def _buttons(state: State, verdict: Verdict) -> list[dict[str, Any]]:
    buttons: list[dict[str, Any]] = []
    codes = [reason.code for reason in verdict.reasons]
    for reason in verdict.reasons:
        if reason.code in _BUTTONS:
            subject = reason.subject if _BUTTONS[reason.code] in ("reconcile", "sign_off", "retry") else None
            buttons.append({"action": _BUTTONS[reason.code], "subject": subject, "codes": [reason.code]})
        elif reason.code == "waiting":
            wait = state.wait_by_id(reason.subject or "")
            if wait is not None and wait.kind == "approval":
                for choice in choices(wait):
                    buttons.append({"action": choice, "subject": wait.id, "codes": []})
    if verdict.outcome == "review":
        clearable = [code for code in dict.fromkeys(codes) if code in CLEARABLE and code not in _BUTTONS]
        if clearable:
            buttons.append({"action": "clear", "subject": None, "codes": clearable})
    if any(alarm["code"] == "effect_repeated" for alarm in state.run.alarms):
        buttons.append({"action": "clear", "subject": None, "codes": ["effect_repeated"]})
    if state.run.taken_over is None:
        buttons.append({"action": "takeover", "subject": None, "codes": []})
    buttons.append({"action": "terminate", "subject": None, "codes": []})
    return buttons


def choices(wait: Wait) -> list[str]:
    """The answers this ask allows;

    an edit only where something can be edited, conditions only where there is an effect.
    """
    ask = wait.ask or {}
    given = ask.get("choices")
    if given:
        return list(given)
    if ask.get("effect"):
        return ["approve", "approve_with_conditions", "edit", "reject", "respond"]
    return ["approve", "reject", "respond"]


_ADVICE: Final[dict[str, str]] = {
    "run_ended": "Nothing is left to do.",
    "taken_over": "Finish what you took over, and hand it back.",
    "rejected": "Say how it goes on after the no.",
    "cancelled": "Say how it goes on after the cancellation.",
    "timed_out": "Say how it goes on, since nobody answered in time.",
    "effect_unknown": "Find out whether it happened outside, and record what you found.",
    "compensation_unknown": "Find out whether the undo happened outside, and record what you found.",
    "receipt_conflict": "Two reports contradict each other: find out which is true, and record it.",
    "sign_off_needed": "Confirm that what was done may stay as it is.",
    "undo_pending": "What was done is being undone.",
    "metadata_missing": "Supply what is missing, or clear it.",
    "executed_despite_rejection": "Something ran without a yes: look at it before anything else happens.",
    "approval_mismatch": "What the agent wanted to run is not what was approved: look at it.",
    "unsatisfiable_gate": "Nobody may decide this any more: name somebody, or take over.",
    "waiting": "Decide.",
    "backing_off": "Wait for the next try.",
    "timeout_undetermined": "Nobody answered in time: say how it goes on.",
    "input_changed": "The input changed: say whether the run may go on with it.",
    "version_changed": "The agent changed: say whether the new version may go on with this run.",
    "condition_unmet": "The conditions of the approval are not met: look at it.",
    "approval_expired": "The approval has expired: look at it.",
    "retries_exhausted": "It failed too often: find the cause, then grant more tries.",
    "not_retryable": "The agent says that trying again does not help: find the cause.",
    "human_gate": "This stage needs a person's yes.",
    "clear": "Nothing: the agent goes on by itself.",
    "look_up": "Nothing: the agent looks first whether it happened.",
    "retry_same_key": "Nothing: the agent repeats it safely.",
}


def _recommended_sentence(state: State, verdict: Verdict) -> str:
    code = verdict.reasons[0].code
    if code == "waiting" and not any(wait.open and wait.kind == "approval" for wait in state.pause_list()):
        return "Nothing: what it waits for comes from elsewhere."
    return _ADVICE[code]
