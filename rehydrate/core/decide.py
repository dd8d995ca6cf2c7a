"""What each request does to a run, or why not: `decide_*(draft, request, ...)` adds facts or raises a Refusal.

Pure: the state, the request, the policy and the clock's reading come in, facts go out. The rule numbers are those of
contract.md section 4. Rules about waits and effects have modules of their own (waiting.py, effects.py).
"""

from typing import Any

from rehydrate.core import commands as cmd
from rehydrate.core import effects, policy, verdict, waiting
from rehydrate.core import events as ev
from rehydrate.core.canonical import instant, same_digest
from rehydrate.core.draft import Draft
from rehydrate.core.refusals import Refusal, invalid
from rehydrate.core.state import after

#: A claimed lease lasts this long until the agent's first call, so that a dead poller costs no more.
CLAIM_SECONDS = 10


# -- before and after every request


def apply_overdue(draft: Draft) -> None:
    """Rule 6: what is overdue by the database's clock happens first, whoever asks."""
    run = draft.run
    if run.ended:
        return
    if run.lease_expires_at is not None and run.lease_expires_at <= draft.now:
        lapse(draft)
    for wait in sorted(draft.state.open_waits(), key=lambda wait: wait.due_at):
        if draft.state.waits[wait.key].open:  # an `any` pause may have closed it a moment ago
            waiting.apply_due(draft, draft.state.waits[wait.key])
    run = draft.run
    if run.alarm_at is not None and run.alarm_at <= draft.now and run.ready_since is not None:
        draft.by_ledger(ev.RunUnclaimed(ready_since=run.ready_since))


def lapse(draft: Draft) -> None:
    """The lease ran out: a failure (rule 17), and whatever was under way has an unknown outcome."""
    run = draft.run
    assert run.holder is not None
    assert run.lease_expires_at is not None
    lapsed = ev.LeaseLapsed(epoch=run.epoch, holder=run.holder, due_at=run.lease_expires_at)
    effects.failure(draft, lapsed, actor=ev.SYSTEM)
    effects.unsettle(draft, f"{run.holder} did not renew its lease in time")


def settle(draft: Draft) -> None:
    """Without a lease the status follows the verdict, in the same transaction (section 3)."""
    run = draft.run
    if run.ended or run.leased or run.taken_over is not None:
        return
    found = verdict.assess(draft.state, draft.pinned, draft.now)
    if found.outcome == "terminate":
        end(draft, ev.RunTerminated(code=found.reasons[0].code, reason=found.reasons[0].message), actor=ev.SYSTEM)
        return
    status = verdict.STATUS[found.outcome]
    reasons = [{"code": r.code, "subject": r.subject} for r in found.reasons]
    claimable = status in ("ready", "compensating")
    # An undo that was given back has the same verdict as before, and is to be claimed anew all the same.
    anew = claimable and run.ready_since is None
    if anew or status != run.status or found.outcome != run.outcome or reasons != run.reasons:
        within = policy.seconds(draft.pinned.claim_within)
        draft.by_ledger(
            ev.VerdictChanged(
                status=status,
                outcome=found.outcome,
                reasons=reasons,
                # Failures at the limit were told when they reached it.
                escalated=status == "review"
                and run.status != "review"
                and found.reasons[0].code != "retries_exhausted",
                alarm_at=after(draft.now, within) if claimable else None,
            )
        )


def end(draft: Draft, fact: ev.Fact, *, actor: ev.Actor | None = None) -> ev.Recorded:
    """The end of a run: what is still planned is withdrawn (section 3)."""
    effects.withdraw_planned(draft, "the run ended")
    return draft.add(fact, actor=actor)


def refuse_end(draft: Draft) -> None:
    """Rule 13: a run with an effect started, unknown or under undo does not end."""
    for effect in draft.state.effects.values():
        if effect.state in ("started", "unknown"):
            raise Refusal(
                "effect_unknown",
                f"Nobody knows yet whether {effect.key} happened: reconcile it before the run ends.",
                subject=effect.key,
                effect=effect,
            )
        if effect.state in ("compensating", "compensation_unknown"):
            raise Refusal(
                "open_compensation",
                f"The undo of {effect.key} is not finished: the run cannot end before that.",
                subject=effect.key,
                effect=effect,
            )


# -- leases


def require_lease(draft: Draft, epoch: int) -> None:
    """Every write of an agent names its epoch; an older epoch is fenced off."""
    run = draft.run
    if run.ended:
        raise Refusal("run_ended", "The run has ended; nothing can be added to it.", run_status=run.status)
    if not run.leased or run.epoch != epoch:
        held = run.taken_over["name"] if run.taken_over else run.holder
        raise Refusal(
            "lease_lost",
            "This lease is over: stop, and rehydrate or claim the run before you go on.",
            subject=f"epoch {epoch}",
            held_by=held,
            run_status=run.status,
        )


def grant(
    draft: Draft, *, holder: str, seconds: int | None, via: str, purpose: str, agent: dict[str, Any] | None
) -> None:
    """A new lease with the next epoch. A claimed one is short until the agent's first call."""
    seconds = seconds or draft.policy.lease_seconds
    first = min(CLAIM_SECONDS, seconds) if via == "claim" else seconds
    draft.add(
        ev.LeaseGranted(
            epoch=draft.run.epoch + 1,
            holder=holder,
            seconds=seconds,
            expires_at=after(draft.now, first),
            purpose=purpose,
            via=via,
            agent=agent,
        )
    )


def agent_info(given: cmd.AgentInfo | None) -> dict[str, Any] | None:
    if given is None:
        return None
    info = {"name": given.name, "version": given.version, "framework": given.framework}
    return {key: value for key, value in info.items() if value is not None} or None


def caller_facts(agent: cmd.AgentInfo | None, input_digest: str | None) -> verdict.CallerFacts:
    return verdict.CallerFacts(
        agent_version=agent.version if agent else None,
        reads=agent.reads if agent else [],
        input_digest=same_digest(input_digest) if input_digest is not None else None,
    )


def open_run(draft: Draft, body: cmd.OpenRun, *, workspace: str, owner: str | None) -> None:
    given = body.input
    digest = same_digest(given.digest) if given and given.digest is not None else None
    draft.add(
        ev.RunOpened(
            workspace=workspace,
            flow=body.flow,
            external_id=body.external_id,
            title=body.title,
            input={"ref": given.ref, "digest": digest} if given else None,
            agent=agent_info(body.agent),
            labels=body.labels,
            requested_by=body.requested_by,
            opened_by=owner,
            trace_id=body.trace_id,
            policy=draft.ctx.policy_number,
            failure_limit=draft.policy.max_failures,
        )
    )
    if body.holder is not None or body.events:
        holder = body.holder or draft.ctx.actor.name
        grant(draft, holder=holder, seconds=body.lease_seconds, via="open", purpose="continue", agent=None)


def rehydrate(draft: Draft, body: cmd.Rehydrate) -> verdict.Verdict:
    """The verdict for this caller; with continue or compensate the lease is granted (rule 3)."""
    run = draft.run
    if run.leased:
        if run.holder != body.holder:
            raise Refusal(
                "lease_held",
                f"{run.holder} holds the lease until {instant(run.lease_expires_at)}.",
                held_by=run.holder,
                run_status=run.status,
            )
        draft.add(ev.LeaseRetaken(epoch=run.epoch, holder=body.holder))
        effects.unsettle(draft, f"{body.holder} took its lease back")
    facts = caller_facts(body.agent, body.input_digest)
    found = verdict.assess(draft.state, draft.pinned, draft.now, facts)
    if found.outcome in ("continue", "compensate"):
        grant(
            draft,
            holder=body.holder,
            seconds=body.lease_seconds,
            via="rehydrate",
            purpose=found.outcome,
            agent=agent_info(body.agent),
        )
    elif found.reasons[0].code in ("input_changed", "version_changed"):
        seen = {"input_digest": facts.input_digest, "agent_version": facts.agent_version}
        if draft.run.mismatch != seen:
            draft.add(ev.ResumeMismatched(**seen))
    return found


def claim(draft: Draft, body: cmd.Claim) -> verdict.Verdict | None:
    """The lease of a claimable run, or None when it is not claimable for this agent: then nothing changes."""
    run = draft.run
    if run.leased or run.status not in ("ready", "compensating") or not reads(draft, body.agent):
        return None
    if run.retry_at is not None and run.retry_at > draft.now:
        return None  # an undo that failed is compensating all the while, and backs off like any other try
    found = verdict.assess(draft.state, draft.pinned, draft.now, caller_facts(body.agent, None))
    if found.outcome not in ("continue", "compensate"):
        return None
    grant(
        draft,
        holder=body.holder,
        seconds=body.lease_seconds,
        via="claim",
        purpose=found.outcome,
        agent=agent_info(body.agent),
    )
    return found


def reads(draft: Draft, agent: cmd.AgentInfo | None) -> bool:
    """Whether an agent reads the run's version; one that says nothing of itself is not asked."""
    ours = (draft.run.agent or {}).get("version")
    if agent is None or ours is None or agent.version == ours or ours in agent.reads:
        return True
    if agent.reads:
        return False
    return agent.version is None or draft.pinned.on_version_change == "continue"


def heartbeat(draft: Draft, body: cmd.Heartbeat) -> None:
    require_lease(draft, body.epoch)
    draft.renew()


def release(draft: Draft, body: cmd.Release) -> None:
    require_lease(draft, body.epoch)
    retry_at = after(draft.now, body.retry_in) if body.retry_in else None
    draft.add(ev.Released(epoch=body.epoch, retry_at=retry_at))
    effects.unsettle(draft, "the lease was released in mid-effect")


def recall(draft: Draft, body: cmd.Recall) -> verdict.Verdict:
    """An agent withdraws its open waits and gets the lease, such as when the user sends new input."""
    run = draft.run
    if run.ended:
        raise Refusal("run_ended", "The run has ended; there is nothing to recall.", run_status=run.status)
    if run.leased and run.holder != body.holder:
        raise Refusal("lease_held", f"{run.holder} holds the lease.", held_by=run.holder, run_status=run.status)
    if run.taken_over is not None:
        raise Refusal(
            "not_resumable",
            f"{run.taken_over['name']} holds the run.",
            held_by=run.taken_over["name"],
            run_status=run.status,
        )
    if run.leased:
        draft.add(ev.LeaseRetaken(epoch=run.epoch, holder=body.holder))
        effects.unsettle(draft, f"{body.holder} took its lease back")
    draft.add(ev.Recalled(reason=body.reason, waits=[wait.key for wait in draft.state.open_waits()]))
    found = verdict.assess(draft.state, draft.pinned, draft.now)
    if found.outcome not in ("continue", "compensate"):
        raise Refusal(
            "not_resumable", f"The run may not go on: {found.reasons[0].message}", run_status=run.status, verdict=found
        )
    grant(draft, holder=body.holder, seconds=body.lease_seconds, via="recall", purpose=found.outcome, agent=None)
    return found


# -- what agents append


def append(draft: Draft, event: cmd.AgentEvents, *, pointer: str, last: bool) -> tuple[ev.Recorded | None, str | None]:
    """One event of a batch under a live lease: its fact, and the key of the effect it named."""
    match event:
        case cmd.Paused() | cmd.Completed() | cmd.Failed() if not last:
            raise invalid(f"{pointer}/type", "This event gives the lease up, so it must be the last of its batch.")
        case cmd.Checkpoint():
            return _checkpoint(draft, event), None
        case cmd.WaitOpened():
            return waiting.open_one(draft, event.wait, f"{pointer}/wait"), None
        case cmd.EffectPlanned():
            return effects.plan_and_start(draft, event, pointer), event.key
        case cmd.EffectStarted():
            return effects.start(draft, event, pointer), event.key
        case cmd.EffectExecuted():
            return effects.executed(draft, event, pointer), event.key
        case cmd.EffectFailed():
            return effects.failed(draft, event), event.key
        case cmd.EffectUnknown():
            return effects.unknown(draft, event), event.key
        case cmd.EffectNotExecuted():
            return effects.not_executed(draft, event), event.key
        case cmd.EffectCompensating():
            return effects.compensating(draft, event), event.key
        case cmd.EffectCompensated():
            return effects.compensated(draft, event), event.key
        case cmd.EffectCompensationFailed():
            return effects.compensation_failed(draft, event), event.key
        case cmd.EffectCompensationUnknown():
            return effects.compensation_unknown(draft, event), event.key
        case cmd.ExternalRef():
            ref = ev.ExternalRefAdded(system=event.system, id=event.id, ref_type=event.ref_type, url=event.url)
            return draft.add(ref), None
        case cmd.Note():
            return draft.add(ev.Noted(text=event.text)), None
        case cmd.Failed():
            return _failed(draft, event), None
        case cmd.Cancelled():
            return draft.add(ev.RunCancelled(reason=event.reason)), None
        case cmd.Paused():
            return waiting.pause(draft, event, pointer), None
        case cmd.Completed():
            return _completed(draft, event), None


def _checkpoint(draft: Draft, event: cmd.Checkpoint) -> ev.Recorded:
    return draft.add(
        ev.Checkpointed(
            stage=event.stage,
            ref=event.ref,
            digest=same_digest(event.digest) if event.digest is not None else None,
            data=event.data,
            state_digest=effects.digest_of(event.state) if event.state is not None else None,
            next=event.next,
        )
    )


def _failed(draft: Draft, event: cmd.Failed) -> ev.Recorded:
    run = draft.run
    undoing = run.lease_purpose == "compensate"
    failures = (run.undo_failures if undoing else run.failure_count) + 1
    limit = draft.pinned.max_failures if undoing else run.failure_limit
    seconds = event.retry_in if event.retry_in is not None else policy.backoff(failures)
    again = event.retryable and failures < limit  # otherwise there is no next try, and nothing to wait for
    recorded = effects.failure(
        draft,
        ev.RunFailed(
            error={"code": event.error.code, "message": event.error.message},
            retryable=event.retryable,
            retry_at=after(draft.now, seconds) if again else None,
            undoing=undoing,
        ),
    )
    effects.unsettle(draft, "the agent failed in mid-effect")
    return recorded


def _completed(draft: Draft, event: cmd.Completed) -> ev.Recorded:
    refuse_end(draft)
    status = "completed"
    no = verdict.the_no(draft.state, draft.pinned)
    if no is not None and no[2] != "continue":
        _refuse_end_after_no(draft)
        status = "terminated"  # it was declined, and is undone: that is no success
    result = None
    if event.result is not None:
        result = {"ref": event.result.ref, "digest": event.result.digest, "data": event.result.data}
    return end(draft, ev.RunCompleted(result=result, status=status))


def _refuse_end_after_no(draft: Draft) -> None:
    if not draft.state.complete:
        raise verdict.NeedsAllEffects
    undo = verdict.undo_list(draft.state)
    signs = [effect for effect in draft.state.effects.values() if verdict.needs_sign_off(effect)]
    for effect in [*undo, *signs]:
        text = "still to be undone" if effect in undo else "done and cannot be undone: a person must sign that off"
        raise Refusal(
            "open_compensation", f"{effect.key} is {text} before this run ends.", subject=effect.key, effect=effect
        )


def _refuse_end_unsigned(draft: Draft) -> None:
    """Rule 13: what stays done in a declined run, and cannot be undone, is signed off before a person ends it, too."""
    no = verdict.the_no(draft.state, draft.pinned)
    if no is None or no[2] == "continue" or "sign_off_needed" in draft.run.cleared:
        return
    for effect in draft.state.effects.values():
        if verdict.needs_sign_off(effect):
            raise Refusal(
                "open_compensation",
                f"{effect.key} is done and cannot be undone: sign that off before this run ends.",
                subject=effect.key,
                effect=effect,
            )


# -- people hold the wheel


def _not_ended(draft: Draft) -> None:
    if draft.run.ended:
        raise Refusal("run_ended", "The run has ended; its evidence is kept.", run_status=draft.run.status)


def takeover(draft: Draft, body: cmd.Reasoned) -> None:
    """Rule 15: agents are fenced off, the open waits are superseded."""
    _not_ended(draft)
    held = draft.run.taken_over
    if held is not None:
        raise Refusal(
            "lease_held", f"{held['name']} holds the run already.", held_by=held["name"], run_status=draft.run.status
        )
    draft.add(ev.TakenOver(reason=body.reason, superseded=[wait.key for wait in draft.state.open_waits()]))
    effects.unsettle(draft, "a person took over in mid-effect")


def handback(draft: Draft, body: cmd.Handback) -> None:
    """Rule 15: a decision that makes the run ready at the stage and checkpoint that the person named."""
    _not_ended(draft)
    held = draft.run.taken_over
    if held is None:
        raise Refusal("not_resumable", "Nobody holds this run: take it over first.", run_status=draft.run.status)
    superseded = {
        wait.id: wait
        for wait in draft.state.waits.values()
        if wait.status == "superseded" and instant(wait.closed_at) == held["at"]
    }
    answers = []
    for i, answer in enumerate(body.answers):
        wait = superseded.get(answer.wait)
        if wait is None:
            raise invalid(f"/answers/{i}/wait", "This wait was not open when the run was taken over.")
        answers.append(waiting.hand_answer(draft, wait, answer, f"/answers/{i}"))
    done_keys = [
        effects.done_by_hand(draft, done, f"/effects/{i}", reason=body.reason) for i, done in enumerate(body.effects)
    ]
    for effect in draft.state.effects.values():
        if effect.state in ("started", "unknown", "compensating", "compensation_unknown"):
            raise Refusal(
                "effect_unknown",
                f"Say first whether {effect.key} happened: hand back with what you found.",
                subject=effect.key,
                effect=effect,
            )
    checkpoint = None
    if body.checkpoint is not None:
        checkpoint = {"ref": body.checkpoint.ref, "digest": body.checkpoint.digest, "data": body.checkpoint.data}
    draft.add(
        ev.HandedBack(
            decision=draft.ctx.new_id(),
            reason=body.reason,
            stage=body.stage if body.stage is not None else draft.run.stage,
            checkpoint=checkpoint,
            note=body.note,
            answers=answers,
            effects=done_keys,
            needed_engineer=body.needed_engineer,
        )
    )


def terminate(draft: Draft, body: cmd.Reasoned) -> None:
    _not_ended(draft)
    refuse_end(draft)
    _refuse_end_unsigned(draft)
    end(draft, ev.RunTerminated(code="terminated", reason=body.reason, decision=draft.ctx.new_id()))


def retry(draft: Draft, body: cmd.Retry) -> None:
    _not_ended(draft)
    if body.effect is not None and body.effect not in draft.state.effects:
        raise invalid("/effect", "This run has no effect with that key.")
    draft.add(ev.RetryGranted(decision=draft.ctx.new_id(), reason=body.reason, tries=body.tries, effect=body.effect))


def clear(draft: Draft, body: cmd.Clear) -> None:
    """Settles reasons until the next pause, and may supply what was missing (section 5)."""
    _not_ended(draft)
    for i, code in enumerate(body.codes):
        if code in verdict.NEVER_CLEARED:
            raise invalid(f"/codes/{i}", f"{code} cannot be cleared: it needs a finding, an undo, or more tries.")
        if code not in verdict.CLEARABLE:
            raise invalid(f"/codes/{i}", f"{code} is no reason that a person can clear.")
    given = body.input
    checkpoint = body.checkpoint
    draft.add(
        ev.Cleared(
            decision=draft.ctx.new_id(),
            codes=sorted(set(body.codes)),
            reason=body.reason,
            stage=body.stage,
            checkpoint={"ref": checkpoint.ref, "digest": checkpoint.digest, "data": checkpoint.data}
            if checkpoint
            else None,
            input={"ref": given.ref, "digest": same_digest(given.digest) if given.digest else None} if given else None,
            external_refs=[{"system": r.system, "type": r.type, "id": r.id, "url": r.url} for r in body.external_refs],
            agent_version=body.agent_version,
        )
    )


def reconcile(draft: Draft, key: str, body: cmd.Reconcile) -> None:
    """A person found out what happened to an effect with an unknown outcome."""
    effect = effects.known(draft, key)
    if not (effect.conflict and effect.state == "unknown"):  # that may come up after the end, and is settled then
        _not_ended(draft)
    if effect.state == "executed" and effect.repeated == 0:
        raise Refusal(
            "effect_already_executed",
            f"{key} has its receipt: there is nothing to find out.",
            subject=key,
            effect=effect,
        )
    if effect.state not in ("unknown", "compensation_unknown"):
        raise Refusal(
            "effect_unknown",
            f"{key} is {effect.state}: only an effect with an unknown outcome can be reconciled.",
            subject=key,
            effect=effect,
        )
    receipt = None if body.receipt is None else effects.receipt_of(body.receipt)
    draft.add(
        ev.EffectReconciled(
            decision=draft.ctx.new_id(), key=key, outcome=body.outcome, reason=body.reason, receipt=receipt
        )
    )


def sign_off(draft: Draft, key: str, body: cmd.Reasoned) -> None:
    """A person answers for an effect that stays although the run was declined (rule 13)."""
    _not_ended(draft)
    effect = effects.known(draft, key)
    if effect.state != "executed":
        raise Refusal(
            "effect_unknown",
            f"{key} is {effect.state}: only what was executed can be signed off.",
            subject=key,
            effect=effect,
        )
    draft.add(ev.EffectSignedOff(decision=draft.ctx.new_id(), key=key, reason=body.reason))


def refused(draft: Draft, refusal: Refusal, operation: str) -> None:
    """Rule 14: a refusal that matters is an event, too; rule 10:

    a mismatch sends the run to review and ends the lease.
    """
    mismatch = (
        refusal.code in ("approval_mismatch", "condition_unmet") and operation == "append" and not draft.run.ended
    )
    holder = draft.run.holder
    draft.add(
        ev.RefusedFact(
            operation=operation,
            code=refusal.code,
            message=refusal.message[:500],
            subject=refusal.subject,
            mismatch=mismatch,
        )
    )
    if mismatch:
        effects.unsettle(draft, f"the lease of {holder} ended: what was to run is not what was approved")
