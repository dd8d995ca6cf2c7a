"""States as the dicts of contract.md section 6 ("Shapes"): what the API sends and the console shows.

No reads, no rules.
"""

from typing import Any

import msgspec

from rehydrate import seal
from rehydrate.core import verdict as vd
from rehydrate.core.canonical import instant
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.refusals import Refusal
from rehydrate.core.state import Decision, Effect, Ref, Run, State, Wait
from rehydrate.loading import workspace_slug


def effect(found: Effect) -> dict[str, Any]:
    return {
        "key": found.key,
        "state": found.state,
        "title": found.title,
        "system": found.system,
        "action": found.action,
        "resource": found.resource,
        "arguments": found.arguments,
        "arguments_digest": found.arguments_digest,
        "amount": found.amount,
        "fingerprint": found.fingerprint,
        "impact": found.impact,
        "reversible": found.reversible,
        "attempt": found.attempt,
        "receipt": found.receipt,
        "error": found.error,
        "compensation": found.compensation,
        "undo_receipt": found.undo_receipt,
        "undo_attempt": found.undo_attempt,
        "undo_failures": found.undo_failures,
        "late": found.late,
        "gated": found.gated,
        "gates": found.gates,
        "approval": _approval(found),
        "repeat": found.repeat,
        "repeated": found.repeated,
        "retry_safe": found.retry_safe,
        "lookup": found.lookup,
        "conflict": found.conflict,
        "evidence": found.evidence,
        "reconciled": found.reconciled,
        "signed_off": found.signed_off,
        "planned_at": instant(found.planned_at),
        "started_at": instant(found.started_at),
        "executed_at": instant(found.executed_at),
        "updated_at": instant(found.updated_at),
    }


def _approval(found: Effect) -> dict[str, Any] | None:
    approval = found.approval
    if approval is None:
        return {"name": found.gates[0], "status": "required"} if found.gates else None
    return {
        key: approval.get(key) for key in ("name", "wait", "status", "choice", "conditions", "expires_at", "by", "at")
    }


def wait(found: Wait, *, callback_base: str | None = None, secrets: bool = True) -> dict[str, Any]:
    """A wait; the callback URL is part of it only for those who may hand it on (`secrets`)."""
    callback = f"{callback_base or ''}/api/v1/hooks/{found.token}" if found.token and secrets else None
    return {
        "id": found.id,
        "run": found.run_id,
        "key": found.key,
        "name": found.name,
        "kind": found.kind,
        "status": found.status,
        "version": found.version,
        "due_at": instant(found.due_at),
        "on_timeout": found.on_timeout,
        "on_reject": found.on_reject,
        "correlation": found.correlation,
        "from": found.source,
        "ask": found.ask,
        "choices": vd.choices(found) if found.kind == "approval" else [],
        "callback_url": callback,
        "assignees": list(dict.fromkeys(n for n in (*found.groups, found.assigned_to, found.claimed_by) if n)),
        "groups": found.groups,
        "assigned_to": found.assigned_to,
        "claimed_by": found.claimed_by,
        "votes": found.votes,
        "quorum": int(found.policy.get("quorum", 1)),
        "decision": found.decision,
        "signal": found.signal,
        "info_requested": found.info_requested,
        "escalation": found.escalation,
        "why": found.why,
        "opened_at": instant(found.opened_at),
        "closed_at": instant(found.closed_at),
    }


def decision(found: Decision) -> dict[str, Any]:
    return {
        "id": found.id,
        "run": found.run_id,
        "kind": found.kind,
        "wait": found.wait_id,
        "wait_name": found.wait_name,
        "wait_version": found.wait_version,
        "effect": found.effect_key,
        "choice": found.choice,
        "closes": found.closes,
        "arguments": found.arguments,
        "response": found.response,
        "conditions": found.conditions,
        "expires_at": instant(found.expires_at),
        "reason": found.reason,
        "comment": found.comment,
        "decided_by": found.decided_by,
        "decided_by_name": found.decided_by_name,
        "decided_at": instant(found.decided_at),
        "seen": found.seen,
        "detail": found.detail,
    }


def lease(run: Run) -> dict[str, Any] | None:
    if run.lease_expires_at is None:
        return None
    return {
        "epoch": run.epoch,
        "holder": run.holder,
        "seconds": run.lease_seconds,
        "expires_at": instant(run.lease_expires_at),
    }


def run_brief(run: Run) -> dict[str, Any]:
    """A run without its lists; `outcome` and `reasons` are those of the verdict when the status was last set."""
    return {
        "id": run.id,
        "workspace": workspace_slug(run.workspace_id),
        "flow": run.flow,
        "external_id": run.external_id,
        "title": run.title,
        "status": run.status,
        "stage": run.stage,
        "version": run.version,
        "checkpoint": run.checkpoint,
        "input": {"ref": run.input_ref, "digest": run.input_digest},
        "agent": run.agent,
        "labels": run.labels,
        "failure_count": run.failure_count,
        "last_error": run.last_error,
        "escalation": run.escalation,
        "outcome": run.outcome,
        "reasons": run.reasons,
        "alarms": run.alarms,
        "lease": lease(run),
        "taken_over": run.taken_over,
        "retry_at": instant(run.retry_at),
        "ready_since": instant(run.ready_since),
        "unclaimed_at": instant(run.unclaimed_at),
        "status_since": instant(run.status_since),
        "requested_by": run.requested_by,
        "opened_by": run.opened_by,
        "trace_id": run.trace_id,
        "created_at": instant(run.created_at),
        "updated_at": instant(run.updated_at),
        "ended_at": instant(run.ended_at),
        "result": run.result,
    }


def verdict(state: State, found: vd.Verdict) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "reasons": [msgspec.to_builtins(reason) for reason in found.reasons],
        "missing": found.missing,
        "next": vd.next_steps(state, found),
        "recommended": vd.recommended(state, found),
    }


def metadata(state: State, refs: list[Ref], decisions: list[Decision]) -> dict[str, Any]:
    """The ten fields of contract.md section 2, exactly."""
    run = state.run
    waiting = [found for found in state.waits.values() if found.open]
    timers = [found.due_at for found in waiting if found.kind == "timer"] or [found.due_at for found in waiting]
    if run.retry_at is not None and run.status == "waiting":
        timers.append(run.retry_at)
    checkpoint = run.checkpoint
    return {
        "run_id": run.id,
        "stage": run.stage,
        "checkpoint": {key: checkpoint.get(key) for key in ("seq", "ref", "digest")} if checkpoint else None,
        "input_ref": run.input_ref,
        "waiting_for": [
            {
                "name": found.name,
                "kind": found.kind,
                "from": found.source,
                "until": instant(found.due_at),
                "on_timeout": found.on_timeout,
            }
            for found in sorted(waiting, key=lambda w: w.due_at)
        ],
        "timer_due_at": instant(min(timers)) if timers else None,
        "external_refs": [{"system": ref.system, "type": ref.type, "id": ref.ref_id} for ref in refs],
        "effect_keys": [{"key": e.key, "state": e.state} for e in sorted(state.effects.values(), key=_planned_order)],
        "decisions": [
            {
                "kind": found.kind,
                "choice": found.choice,
                "by": found.decided_by,
                "at": instant(found.decided_at),
                "conditions": found.conditions,
            }
            for found in decisions
        ],
        "failures": {
            "count": run.failure_count,
            "limit": run.failure_limit,
            "last_error": run.last_error,
            "escalation": run.escalation,
        },
    }


def _planned_order(found: Effect) -> int:
    return found.planned_seq


def run_whole(
    state: State,
    found: vd.Verdict,
    refs: list[Ref],
    decisions: list[Decision],
    *,
    callback_base: str | None = None,
    secrets: bool = True,
) -> dict[str, Any]:
    waits = sorted(state.waits.values(), key=lambda w: (w.opened_at or w.due_at, w.id))
    return {
        **run_brief(state.run),
        "metadata": metadata(state, refs, decisions),
        "verdict": verdict(state, found),
        "waits": [wait(item, callback_base=callback_base, secrets=secrets) for item in waits],
        "effects": [effect(item) for item in sorted(state.effects.values(), key=_planned_order)],
        "decisions": [decision(item) for item in decisions],
        "external_refs": [{"system": ref.system, "type": ref.type, "id": ref.ref_id, "url": ref.url} for ref in refs],
        "passed": state.run.passed,
    }


def envelope(
    state: State,
    found: vd.Verdict,
    refs: list[Ref],
    decisions: list[Decision],
    *,
    opaque: Any = None,
    callback_base: str | None = None,
) -> dict[str, Any]:
    """What rehydrate and claim answer: the run put back together."""
    run = state.run
    checkpoint = None if run.checkpoint is None else {**run.checkpoint, "state": opaque}
    return {
        "verdict": verdict(state, found),
        "lease": lease(run),
        "run": run_brief(run),
        "metadata": metadata(state, refs, decisions),
        "checkpoint": checkpoint,
        "passed": run.passed,
        "input": {"ref": run.input_ref, "digest": run.input_digest},
        "waits": [wait(item, callback_base=callback_base) for item in state.pause_list()],
        "effects": [effect(item) for item in sorted(state.effects.values(), key=_planned_order)],
        "undo": [item.key for item in vd.undo_list(state)],
        "handback": run.handback,
    }


def refusal(found: Refusal, policy: FlowPolicy | None = None) -> Refusal:
    """The refusal with the objects it carries in their shapes."""
    shaped: dict[str, Any] = {}
    for key, value in found.extra.items():
        if isinstance(value, Effect):
            shaped[key] = effect(value)
        elif isinstance(value, Wait):
            shaped[key] = wait(value, secrets=False)
        elif isinstance(value, vd.Verdict):
            shaped[key] = msgspec.to_builtins(value)
        else:
            shaped[key] = value
    found.extra = seal.mask(shaped, seal.tails(policy.secret)) if policy is not None and policy.secret else shaped
    return found
