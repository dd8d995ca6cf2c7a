"""The rules of effects: planned once, started once; receipts are never refused (rules 8, 9, 10, 13, 17)."""

from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from rehydrate.core import commands as cmd
from rehydrate.core import conditions
from rehydrate.core import events as ev
from rehydrate.core.canonical import digest, fingerprint, same_digest
from rehydrate.core.draft import Draft, fill
from rehydrate.core.refusals import Refusal, invalid
from rehydrate.core.state import Effect
from rehydrate.core.verdict import NeedsAllEffects

DONE: Final = ("executed", "compensating", "compensated", "compensation_unknown")


def digest_of(value: Any) -> str:
    return digest(value)


def receipt_of(receipt: cmd.Receipt) -> dict[str, Any]:
    given = {"id": receipt.id, "status": receipt.status, "url": receipt.url, "data": receipt.data}
    return {key: value for key, value in given.items() if value is not None}


def known(draft: Draft, key: str) -> Effect:
    """The effect with this key, or 404."""
    effect = draft.state.effects.get(key)
    if effect is None:
        raise Refusal("not_found", f"This run has no effect with the key {key}.")
    return effect


def unsettle(draft: Draft, why: str) -> None:
    """The lease ended: what was under way has an unknown outcome. It never becomes failed or executed by itself."""
    error = {"code": "lease_ended", "message": why}
    for effect in list(draft.state.effects.values()):
        if effect.state == "started":
            draft.by_ledger(ev.EffectUnknown(key=effect.key, error=error))
        elif effect.state == "compensating":
            draft.by_ledger(ev.CompensationUnknown(key=effect.key, error=error))


def failure(draft: Draft, fact: ev.Fact, *, actor: ev.Actor | None = None) -> ev.Recorded:
    """A fact that counts as a failure (rule 17); the one that reaches the limit is told to people, once."""
    before = draft.run.failure_count
    recorded = draft.add(fact, actor=actor)
    run = draft.run
    if before < run.failure_limit == run.failure_count:
        draft.by_ledger(ev.RunEscalated(why="retries_exhausted", failures=run.failure_count))
    return recorded


def withdraw_planned(draft: Draft, why: str, *, only: str | None = None) -> None:
    for effect in list(draft.state.effects.values()):
        if effect.state == "planned" and only in (None, effect.key):
            draft.by_ledger(ev.EffectWithdrawn(key=effect.key, why=why))


# -- planning


def arguments_of(given: Any, pointer: str) -> tuple[dict[str, Any] | None, str | None]:
    """The arguments and their digest; a digest beside arguments must be theirs."""
    if given.arguments is None:
        return None, same_digest(given.arguments_digest) if given.arguments_digest is not None else None
    found = digest(given.arguments)
    if given.arguments_digest is not None and same_digest(given.arguments_digest) != found:
        raise invalid(f"{pointer}/arguments_digest", "This is not the digest of the arguments.")
    return given.arguments, found


def amount_of(amount: cmd.Amount | None) -> dict[str, Any] | None:
    return None if amount is None else {"value": amount.value, "currency": amount.currency}


def plan(
    draft: Draft, given: Any, pointer: str, *, implicit: bool = False, receipt: bool = False
) -> ev.Recorded | None:
    """Enter an effect, once for its key (rule 8). None when it stands already; the state then has it as it is.

    `given` is an EffectPlanned, an EffectExecuted with the plan's fields (`receipt`: it happened, so nothing refuses
    to enter it), an ask's effect (`implicit`) or one done by hand.
    """
    if receipt and given.arguments is not None:  # it happened: a digest that is not theirs is no reason to lose it
        given = replace(given, arguments_digest=None)
    arguments, arguments_digest = arguments_of(given, pointer)
    amount = amount_of(given.amount)
    approval = getattr(given, "approval", None)
    repeat = getattr(given, "repeat", False)
    if not receipt:
        _approval_listed(draft, approval, f"{pointer}/approval")
    print_ = fingerprint(
        system=given.system,
        action=given.action,
        resource=given.resource,
        amount=amount,
        arguments_digest=arguments_digest,
    )
    there = draft.state.effects.get(given.key)
    if there is not None and print_ not in (there.fingerprint, there.first_fingerprint):
        return _replan(draft, there, given, arguments, arguments_digest, print_)
    if there is not None and not (there.implicit and not implicit):
        return None
    if there is None and not receipt:
        refuse_twin(draft, given.key, print_, repeat=repeat)
        _refuse_foreign_approval(draft, given.key, approval)
    kind = draft.policy.kind(given.system, given.action)
    impact = kind.impact if kind else given.impact or "low"
    gates = [name for name in (kind.needs_approval if kind else None, approval) if name]
    compensation = None
    if given.compensation if hasattr(given, "compensation") else None:
        undo = given.compensation
        compensation = {"system": undo.system or given.system, "action": undo.action, "arguments": undo.arguments}
    elif kind is not None and kind.compensation:
        compensation = {"system": given.system, "action": kind.compensation, "arguments": None}
    gated = bool(gates) or (kind is None and impact != "low") or (repeat and impact != "low")
    return draft.add(
        ev.EffectPlanned(
            key=given.key,
            system=given.system,
            action=given.action,
            resource=given.resource,
            arguments=arguments,
            arguments_digest=arguments_digest,
            fingerprint=print_,
            impact=impact,
            reversible=getattr(given, "reversible", None),
            compensation=compensation,
            amount=amount,
            gates=list(dict.fromkeys(gates)),
            gated=gated,
            repeat=repeat,
            retry_safe=bool(kind and kind.retry_safe),
            lookup=bool(kind and kind.lookup),
            title=fill(kind.title, draft.policy.shown(arguments), given.resource) if kind and kind.title else "",
            implicit=implicit,
        )
    )


def _approval_listed(draft: Draft, approval: str | None, pointer: str) -> None:
    if approval is not None and draft.policy.declared and approval not in draft.policy.wait:
        raise invalid(pointer, f"The flow lists no wait named {approval}.")


def _replan(
    draft: Draft, there: Effect, given: Any, arguments: dict[str, Any] | None, new_digest: str | None, print_: str
) -> ev.Recorded | None:
    """The same key with other content: only within an approval's conditions (rule 10), otherwise 422."""
    approval = there.approval
    same_target = (there.system, there.action, there.resource, there.amount) == (
        given.system,
        given.action,
        given.resource,
        amount_of(given.amount),
    )
    if (
        approval is not None
        and approval["status"] in ("approved", "used")
        and approval["conditions"]
        and same_target
        and there.state in ("planned", "failed")
        and arguments is not None
        and _only_conditioned(approval, arguments)
    ):
        _check_conditions(there, approval, arguments)
        refuse_twin(draft, there.key, print_, repeat=there.repeat)
        assert new_digest is not None
        return draft.add(
            ev.EffectReplanned(
                key=there.key,
                arguments=arguments,
                arguments_digest=new_digest,
                fingerprint=print_,
                why="within the conditions of its approval",
            )
        )
    if getattr(given, "start", False) and approval is not None and approval["status"] in ("approved", "used"):
        raise Refusal(
            "approval_mismatch",
            f"What is to run is not what was approved for {there.key}: ask again.",
            subject=there.key,
            effect=there,
        )
    raise Refusal(
        "effect_key_reused",
        f"{there.key} is planned with other content: a new act needs a key of its own.",
        subject=there.key,
        effect=there,
    )


def refuse_twin(draft: Draft, key: str, print_: str, *, repeat: bool) -> None:
    """Rule 8: the same act under another key is a double, unless it is said to be meant."""
    for twin in draft.state.effects.values():
        if twin.key == key or print_ not in (twin.fingerprint, twin.first_fingerprint):
            continue
        if repeat and twin.state not in ("started", "unknown"):
            continue
        how = f"its outcome is {twin.state}" if repeat else "say `repeat` if it is meant to happen again"
        raise Refusal("effect_duplicate", f"{twin.key} is the same act in this run: {how}.", subject=key, effect=twin)


def _refuse_foreign_approval(draft: Draft, key: str, approval: str | None) -> None:
    """An approval that was given for another effect, and is not used up, cannot be claimed for this one (rule 10)."""
    if approval is None:
        return
    waits = [
        wait for wait in draft.state.waits.values() if approval in (wait.name, wait.key) and wait.kind == "approval"
    ]
    if any(wait.effect_key == key for wait in waits):
        return
    for other in draft.state.effects.values():
        found = other.approvals.get(approval)
        if found is not None and found["status"] == "approved" and other.state in ("planned", "failed"):
            raise Refusal(
                "approval_mismatch",
                f"{approval} was given for {other.key}, and fits nothing else.",
                subject=key,
                effect=other,
            )


def plan_and_start(draft: Draft, event: cmd.EffectPlanned, pointer: str) -> ev.Recorded | None:
    """`effect.planned`; with `start: true` it is started where it may be; done, under way or unknown is no error."""
    recorded = plan(draft, event, pointer)
    effect = draft.state.effects[event.key]
    if event.start and not (effect.state in DONE or effect.state == "started" or _stuck(effect)):
        arguments, arguments_digest = arguments_of(event, pointer)
        _start(draft, effect, arguments, arguments_digest, pointer, said=True)
    return recorded


def _stuck(effect: Effect) -> bool:
    """Unknown, and nobody but a person can say what came of it: a conflict of reports is never settled by an agent."""
    return effect.state == "unknown" and (effect.conflict or not effect.retry_safe)


# -- starting


def start(draft: Draft, event: cmd.EffectStarted, pointer: str) -> ev.Recorded:
    effect = draft.state.effects.get(event.key)
    if effect is None:
        raise invalid(f"{pointer}/key", "Plan this effect before you start it.")
    if effect.state in DONE:
        raise Refusal(
            "effect_already_executed",
            f"{effect.key} has been done: use its receipt, do not do it again.",
            subject=effect.key,
            effect=effect,
        )
    if effect.state == "started" or _stuck(effect):
        how = "is under way" if effect.state == "started" else "has an unknown outcome"
        raise Refusal(
            "effect_unknown", f"{effect.key} {how}: it never runs again by itself.", subject=effect.key, effect=effect
        )
    arguments, arguments_digest = arguments_of(event, pointer)
    said = event.arguments is not None or event.arguments_digest is not None
    return _start(draft, effect, arguments, arguments_digest, pointer, said=said)


def _start(
    draft: Draft, effect: Effect, arguments: dict[str, Any] | None, new_digest: str | None, pointer: str, *, said: bool
) -> ev.Recorded:
    run = draft.run
    effect = _with_gate_of_now(draft, effect)
    if effect.gated:
        _check_gate(draft, effect, arguments, new_digest, pointer, said=said)
    elif effect.state == "withdrawn":
        raise Refusal("approval_rejected", f"{effect.key} was withdrawn.", subject=effect.key, effect=effect)
    elif new_digest is not None and not _same(new_digest, effect.arguments_digest):
        raise Refusal(
            "effect_key_reused",
            f"{effect.key} was planned with other arguments.",
            subject=effect.key,
            effect=effect,
        )
    if run.failure_count >= run.failure_limit and run.lease_purpose != "compensate":
        raise Refusal(
            "retries_exhausted",
            f"This run failed {run.failure_count} times of {run.failure_limit} allowed: a person must grant more.",
            subject=effect.key,
            effect=effect,
        )
    changed = new_digest is not None and not _same(new_digest, effect.arguments_digest)
    print_ = effect.fingerprint
    if changed:
        if effect.state == "unknown":
            raise Refusal(
                "effect_unknown",
                f"{effect.key} may have happened with other arguments: only the same can be repeated.",
                subject=effect.key,
                effect=effect,
            )
        if not draft.state.complete:
            raise NeedsAllEffects
        print_ = fingerprint(
            system=effect.system,
            action=effect.action,
            resource=effect.resource,
            amount=effect.amount,
            arguments_digest=new_digest,
        )
        refuse_twin(draft, effect.key, print_, repeat=effect.repeat)
    _refuse_twin_in_the_air(draft, effect, print_)
    return draft.add(
        ev.EffectStarted(
            key=effect.key,
            attempt=effect.attempt + 1,
            epoch=run.epoch,
            arguments=arguments if changed else None,
            arguments_digest=new_digest if changed else None,
            fingerprint=print_ if changed else None,
        )
    )


def _with_gate_of_now(draft: Draft, effect: Effect) -> Effect:
    """The effect with the gate that the policy at the pause has for its kind, if that came after the plan (rule 16)."""
    kind = draft.pinned.kind(effect.system, effect.action)
    name = kind.needs_approval if kind else None
    if name is None or name in effect.gates:
        return effect
    return replace(effect, gates=[*effect.gates, name], gated=True)


def _refuse_twin_in_the_air(draft: Draft, effect: Effect, print_: str) -> None:
    """Rule 8: a meant repetition, too, waits until it is known what became of its twin."""
    for twin in draft.state.effects.values():
        if twin.key != effect.key and twin.fingerprint == print_ and twin.state in ("started", "unknown"):
            raise Refusal(
                "effect_duplicate",
                f"{twin.key} is the same act in this run: its outcome is {twin.state}.",
                subject=effect.key,
                effect=twin,
            )


_NOTHING: Final = digest({})


def _same(left: str | None, right: str | None) -> bool:
    """Equal digests; no arguments at all is the same as none."""
    return (left or _NOTHING) == (right or _NOTHING)


def _check_gate(
    draft: Draft, effect: Effect, arguments: dict[str, Any] | None, new_digest: str | None, pointer: str, *, said: bool
) -> None:
    """Rule 10: a gated effect starts only under an approval that fits its key and what it will run."""
    approval = effect.approval
    if approval is None or approval["status"] in ("asked", "timed_out"):
        raise Refusal(
            "approval_required",
            f"{effect.key} needs a person's yes{f' to {effect.gates[0]}' if effect.gates else ''} before it starts.",
            subject=effect.key,
            effect=effect,
        )
    latest = max(effect.approvals.values(), key=lambda found: str(found["at"]))
    if "rejected" in (approval["status"], latest["status"]) or effect.state == "withdrawn":
        raise Refusal("approval_rejected", f"A person said no to {effect.key}.", subject=effect.key, effect=effect)
    if not said and effect.arguments_digest is not None:
        raise invalid(f"{pointer}/arguments", "A gated effect says what it will run: arguments or arguments_digest.")
    names = effect.gates or [approval["name"]]
    for found in (effect.approvals[name] for name in names):
        _check_expired(draft, effect, found)
        _check_fits(effect, found, arguments, new_digest)
        _check_conditions(effect, found, _what_runs(effect, found, arguments, new_digest))


def _what_runs(
    effect: Effect, approval: dict[str, Any], arguments: dict[str, Any] | None, new_digest: str | None
) -> dict[str, Any] | None:
    """The arguments that a start names, which may be by their digest alone: those approved, or those planned now."""
    if arguments is not None:
        return arguments
    found: dict[str, Any] | None = effect.arguments
    if not _same(new_digest, effect.arguments_digest) and _same(new_digest, approval["digest"]):
        found = approval["arguments"]
    return found


def _check_expired(draft: Draft, effect: Effect, approval: dict[str, Any]) -> None:
    expires_at = approval["expires_at"]
    if approval["status"] == "approved" and expires_at and datetime.fromisoformat(expires_at) <= draft.now:
        raise Refusal(
            "approval_expired",
            f"The approval of {effect.key} expired at {expires_at}.",
            subject=effect.key,
            effect=effect,
        )


def _check_fits(
    effect: Effect, approval: dict[str, Any], arguments: dict[str, Any] | None, new_digest: str | None
) -> None:
    if _same(new_digest, approval["digest"]):
        return
    if arguments is None and _same(new_digest, effect.arguments_digest):
        arguments = effect.arguments  # replanned within the conditions, and named by its digest
    if approval["conditions"] and arguments is not None and _only_conditioned(approval, arguments):
        return
    raise Refusal(
        "approval_mismatch",
        f"What is to run is not what was approved for {effect.key}: ask again.",
        subject=effect.key,
        effect=effect,
    )


def _only_conditioned(approval: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """True when the arguments differ from the approved ones at the conditioned pointers only."""
    pointers = [condition["pointer"] for condition in approval["conditions"]]
    return conditions.within(conditions.differing(approval["arguments"] or {}, arguments), pointers)


def _check_conditions(effect: Effect, approval: dict[str, Any], arguments: dict[str, Any] | None) -> None:
    for unmet in conditions.unmet(approval["conditions"], arguments):
        raise Refusal(
            "condition_unmet",
            f"{effect.key} does not keep to its approval: {unmet}.",
            subject=effect.key,
            effect=effect,
        )


# -- what came of it


def executed(
    draft: Draft, event: cmd.EffectExecuted, pointer: str, *, late: bool = False, sanitised: bool = False
) -> ev.Recorded | None:
    """The receipt (rule 9). None when it is known already."""
    effect = draft.state.effects.get(event.key)
    receipt = receipt_of(event.receipt)
    if effect is None:
        for name in ("system", "action"):
            if getattr(event, name) is None:
                raise invalid(
                    f"{pointer}/{name}", "This effect was never planned: send the plan's fields with the receipt."
                )
        return _executed_unplanned(draft, event, pointer, receipt, late=late, sanitised=sanitised)
    if effect.conflict and effect.state == "unknown":
        return _conflict_again(draft, effect, "executed", receipt=receipt, late=late)
    finding = _finding(effect)
    if finding is not None and effect.state in ("planned", "executed", "compensated", "failed", "withdrawn"):
        return _against_finding(draft, effect, receipt, late=late, sanitised=sanitised)
    if effect.state in DONE:
        first = (effect.receipt or {}).get("id")
        if receipt.get("id") is None or receipt.get("id") == first:
            return None
        if finding is not None and first is None:  # a person found that it happened; this is its receipt
            return draft.add(ev.EffectExecuted(key=effect.key, receipt=receipt, late=late, sanitised=sanitised))
        return draft.add(ev.EffectRepeated(key=effect.key, receipt=receipt, late=late))
    return draft.add(
        ev.EffectExecuted(
            key=effect.key,
            receipt=receipt,
            late=late,
            sanitised=sanitised,
            despite=not _was_approved(draft, effect, event),
        )
    )


def _was_approved(draft: Draft, effect: Effect, event: cmd.EffectExecuted) -> bool:
    """Whether what is reported as done is what a person said yes to: as it was started, or as it could have been."""
    if not effect.gated:
        return True
    if not effect.authorised:
        return False
    arguments, new_digest = event.arguments, effect.arguments_digest
    if arguments is not None:
        new_digest = digest(arguments)
    elif event.arguments_digest is not None:
        new_digest = same_digest(event.arguments_digest)
    if effect.state in ("started", "unknown"):
        return _same(new_digest, effect.arguments_digest)
    try:
        _check_gate(draft, effect, arguments, new_digest, "", said=True)
    except Refusal:
        return False
    return True


def _conflict_again(
    draft: Draft,
    effect: Effect,
    reported: str,
    *,
    receipt: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
    late: bool = False,
) -> ev.Recorded | None:
    """One more report on an effect whose reports contradict a person's finding: it stays a person's to settle."""
    said = {"reported": reported, "receipt": receipt, "error": error}
    if effect.evidence == said:
        return None
    return draft.add(ev.EffectConflict(key=effect.key, reported=reported, receipt=receipt, error=error, late=late))


def _executed_unplanned(
    draft: Draft, event: cmd.EffectExecuted, pointer: str, receipt: dict[str, Any], *, late: bool, sanitised: bool
) -> ev.Recorded:
    plan(draft, event, pointer, receipt=True)
    effect = draft.state.effects[event.key]
    recorded = draft.add(
        ev.EffectExecuted(key=event.key, receipt=receipt, late=late, sanitised=sanitised, despite=not effect.authorised)
    )
    for twin in list(draft.state.effects.values()):
        same = twin.key != effect.key and effect.fingerprint in (twin.fingerprint, twin.first_fingerprint)
        if same and twin.state in DONE and not effect.repeat:  # the same act twice, under two keys
            draft.by_ledger(ev.EffectRepeated(key=twin.key, receipt=receipt, late=late))
    return recorded


def _finding(effect: Effect) -> dict[str, Any] | None:
    """What a person found out about the effect itself; what they found about its undo says nothing of its receipt."""
    found = effect.reconciled
    return None if found is None or found.get("undo") else found


def _against_finding(
    draft: Draft, effect: Effect, receipt: dict[str, Any], *, late: bool, sanitised: bool
) -> ev.Recorded | None:
    """A receipt for an effect that a person reconciled: it fits what they found, or it is a conflict."""
    assert effect.reconciled is not None
    ours = (effect.receipt or {}).get("id")
    theirs = receipt.get("id")
    if effect.reconciled["outcome"] == "executed" and (ours is None or theirs is None or ours == theirs):
        if theirs is None or ours == theirs:
            return None
        return draft.add(ev.EffectExecuted(key=effect.key, receipt=receipt, late=late, sanitised=sanitised))
    if effect.reconciled["outcome"] == "compensated" and (theirs is None or ours in (None, theirs)):
        return None
    return draft.add(ev.EffectConflict(key=effect.key, reported="executed", receipt=receipt, late=late))


def failed(draft: Draft, event: cmd.EffectFailed, *, late: bool = False, sanitised: bool = False) -> ev.Recorded | None:
    """It certainly did not happen. Counts as a failure (rule 17)."""
    effect = known(draft, event.key)
    error = {"code": event.error.code, "message": event.error.message}
    if effect.conflict and effect.state == "unknown":
        return _conflict_again(draft, effect, "failed", error=error, late=late)
    finding = _finding(effect)
    if finding is not None and effect.state in ("planned", "executed", "compensated"):
        if finding["outcome"] == "not_executed":
            return None
        return draft.add(ev.EffectConflict(key=effect.key, reported="failed", error=error, late=late))
    if effect.state in DONE:
        raise Refusal(
            "effect_already_executed",
            f"{effect.key} has a receipt: it cannot have failed.",
            subject=effect.key,
            effect=effect,
        )
    if effect.state == "failed" and late:
        return None
    return failure(draft, ev.EffectFailed(key=effect.key, error=error, late=late, sanitised=sanitised))


def unknown(draft: Draft, event: cmd.EffectUnknown) -> ev.Recorded | None:
    effect = known(draft, event.key)
    if effect.state == "unknown":
        return None
    if effect.state in DONE:
        raise Refusal("effect_already_executed", f"{effect.key} has its receipt.", subject=effect.key, effect=effect)
    if effect.state == "withdrawn":
        raise Refusal("approval_rejected", f"{effect.key} was withdrawn.", subject=effect.key, effect=effect)
    error = {"code": event.error.code, "message": event.error.message} if event.error else None
    return draft.add(ev.EffectUnknown(key=effect.key, error=error))


def not_executed(draft: Draft, event: cmd.EffectNotExecuted) -> ev.Recorded:
    """After a look-up; only a kind that has one may say so, otherwise a person reconciles."""
    effect = known(draft, event.key)
    if effect.state in DONE:
        raise Refusal("effect_already_executed", f"{effect.key} has its receipt.", subject=effect.key, effect=effect)
    if effect.state != "unknown" or not effect.lookup or effect.conflict:
        raise Refusal(
            "effect_unknown",
            f"Only a person, or an agent whose flow declares a look-up, can say that {effect.key} did not happen.",
            subject=effect.key,
            effect=effect,
        )
    return draft.add(ev.EffectNotExecuted(key=effect.key, evidence=event.evidence))


# -- undo


def compensating(draft: Draft, event: cmd.EffectCompensating) -> ev.Recorded:
    effect = known(draft, event.key)
    if effect.state == "compensated":
        raise Refusal("effect_already_executed", f"{effect.key} is undone.", subject=effect.key, effect=effect)
    if effect.state != "executed":
        code = "open_compensation" if effect.state in ("compensating", "compensation_unknown") else "effect_unknown"
        raise Refusal(
            code,
            f"{effect.key} is {effect.state}: only what was executed can be undone.",
            subject=effect.key,
            effect=effect,
        )
    if effect.undo_failures >= draft.policy.max_failures:
        raise Refusal(
            "retries_exhausted",
            f"Undoing {effect.key} failed {effect.undo_failures} times: a person must grant more.",
            subject=effect.key,
            effect=effect,
        )
    return draft.add(ev.EffectCompensating(key=effect.key, attempt=effect.undo_attempt + 1, epoch=draft.run.epoch))


def _under_undo(draft: Draft, key: str, *states: str) -> Effect:
    effect = known(draft, key)
    if effect.state not in states:
        code = "effect_already_executed" if effect.state in DONE else "effect_unknown"
        raise Refusal(code, f"{effect.key} is {effect.state}: no undo of it is under way.", subject=key, effect=effect)
    return effect


def compensated(draft: Draft, event: cmd.EffectCompensated, *, late: bool = False) -> ev.Recorded | None:
    if known(draft, event.key).state == "compensated":
        return None
    _under_undo(draft, event.key, "compensating", "compensation_unknown")
    return draft.add(ev.EffectCompensated(key=event.key, receipt=receipt_of(event.receipt), late=late))


def compensation_failed(draft: Draft, event: cmd.EffectCompensationFailed) -> ev.Recorded:
    _under_undo(draft, event.key, "compensating")
    error = {"code": event.error.code, "message": event.error.message}
    return draft.add(ev.CompensationFailed(key=event.key, error=error))


def compensation_unknown(draft: Draft, event: cmd.EffectCompensationUnknown) -> ev.Recorded:
    _under_undo(draft, event.key, "compensating")
    error = {"code": event.error.code, "message": event.error.message} if event.error else None
    return draft.add(ev.CompensationUnknown(key=event.key, error=error))


# -- by hand


def done_by_hand(draft: Draft, done: cmd.HandEffect, pointer: str, *, reason: str) -> str:
    """What a person did, or found out, while they held the run (rule 15).

    The effect's key, made where none was named.
    """
    key = done.key if done.key is not None else f"by-hand:{draft.ctx.new_id()}"
    effect = draft.state.effects.get(key)
    if effect is None:
        for name in ("system", "action"):
            if getattr(done, name) is None:
                raise invalid(f"{pointer}/{name}", "This run has no such effect: say what it was.")
        if done.outcome != "executed":
            raise invalid(f"{pointer}/outcome", "Only what was done can be added.")
        plan(draft, replace(done, key=key), pointer, receipt=True)
    elif effect.state == "executed" and done.outcome == "executed":
        return key
    elif effect.state in DONE and effect.state != "compensation_unknown" and done.outcome != "compensated":
        raise Refusal("effect_already_executed", f"{effect.key} is {effect.state}.", subject=effect.key, effect=effect)
    draft.add(
        ev.EffectReconciled(
            decision=draft.ctx.new_id(),
            key=key,
            outcome=done.outcome,
            reason=reason,
            receipt=receipt_of(done.receipt),
        )
    )
    return key
