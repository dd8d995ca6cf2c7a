"""The rules of waits:

how they open, pause a run, are decided, come due and are answered (rules 4, 5, 6, 7, 10, 11, 16).
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from rehydrate.core import commands as cmd
from rehydrate.core import conditions, effects, policy, schemas, verdict
from rehydrate.core import events as ev
from rehydrate.core.canonical import digest, fingerprint, instant
from rehydrate.core.draft import Draft, excluded, same_person
from rehydrate.core.refusals import Refusal, invalid
from rehydrate.core.state import Wait, after

#: Ten years: the longest that a wait may last.
LONGEST: Final = timedelta(days=3653)
#: An escalation that is no later than this, and than a tenth of its time, gives that time from the deadline itself on.
IN_TIME: Final = timedelta(minutes=1)

# -- opening


def open_one(draft: Draft, spec: cmd.WaitSpec, pointer: str) -> ev.Recorded:
    """`wait.opened`: opens a wait and keeps the lease."""
    facts = _new(draft, spec, pointer)
    if facts is None:
        raise invalid(f"{pointer}/key", "A wait with this key is open already.")
    return draft.add(ev.WaitOpened(wait=facts))


def pause(draft: Draft, event: cmd.Paused, pointer: str) -> ev.Recorded:
    """Gives the lease up and waits. Waits that are open already are named by their key and stay as they are."""
    opened: list[dict[str, Any]] = []
    named: list[str] = []
    for i, spec in enumerate(event.waits):
        where = f"{pointer}/waits/{i}"
        key = spec.key or spec.name
        if key is None:
            raise invalid(f"{where}/name", "This field is required.")
        if key in named:
            raise invalid(f"{where}/key", "Two waits of this pause have the same key.")
        facts = _new(draft, spec, where)
        if facts is not None:
            opened.append(facts)
        named.append(key)
    run = draft.run
    left = [wait.key for wait in draft.state.open_waits() if wait.key not in named and wait.pause]
    # An undo that waits for something does not forget why it undoes.
    no = verdict.the_no(draft.state, draft.pinned) if run.lease_purpose == "compensate" else None
    recorded = draft.add(
        ev.RunPaused(
            resume_when=event.resume_when,
            waits=opened,
            named=named,
            superseded=left,
            missing=_missing(draft, opened, named),
            policy=draft.ctx.policy_number,
            sticky_rejection={"code": no[0], "subject": no[1], "on_reject": no[2]} if no else None,
        )
    )
    effects.unsettle(draft, "the run paused in mid-effect")
    _first_answer_counts(draft)
    return recorded


def _first_answer_counts(draft: Draft) -> None:
    """A wait that was answered before an `any` pause named it is that pause's first answer."""
    run = draft.run
    if run.resume_when == "any" and verdict.pause_resolved(draft.state):
        rest = [wait.key for wait in draft.state.pause_list() if wait.open]
        if rest:
            draft.by_ledger(ev.WaitSuperseded(waits=rest, why="another wait of this pause was answered first"))


def _missing(draft: Draft, opened: list[dict[str, Any]], named: list[str]) -> list[str]:
    """Which of the ten fields the flow requires and this pause does not have."""
    run, state = draft.run, draft.state
    kinds = [wait["kind"] for wait in opened] + [state.waits[key].kind for key in named if key in state.waits]
    have = {
        "run_id": True,
        "stage": run.stage is not None,
        "checkpoint": run.checkpoint is not None,
        "input_ref": run.input_ref is not None,
        "waiting_for": bool(named),
        "timer_due_at": "timer" in kinds or bool(named),
        "external_refs": run.ref_count > 0,
        "effect_keys": bool(state.effects) or run.effect_count > 0,
        "decisions": run.decision_count > 0,
        "failures": True,
    }
    return [name for name in draft.policy.required if not have.get(name, True)]


def _new(draft: Draft, spec: cmd.WaitSpec, pointer: str) -> dict[str, Any] | None:
    """The facts of a new wait; None when the spec names one that exists and still counts."""
    key = spec.key or spec.name
    if key is None:
        raise invalid(f"{pointer}/name", "This field is required.")
    there = draft.state.waits.get(key)
    if there is not None:
        _same_wait(draft, there, spec, pointer)
        return None
    if spec.kind is None or spec.name is None:
        missing = "kind" if spec.kind is None else "name"
        raise invalid(f"{pointer}/{missing}", "There is no open wait with this key; a new one needs its name and kind.")
    rules = draft.policy.wait_policy(spec.name)
    due_at = _deadline(draft, spec, pointer)
    on_timeout = spec.on_timeout or "review"
    ask = None
    if spec.kind == "approval":
        if draft.policy.declared and spec.name not in draft.policy.wait:
            raise invalid(f"{pointer}/name", f"The flow lists no approval named {spec.name}.")
        if on_timeout == "continue" and not rules.allow_timeout_approve:
            raise invalid(f"{pointer}/on_timeout", "The flow does not allow an approval by time-out.")
        ask = _ask(draft, spec, pointer)
        _satisfiable(draft, spec.name, rules, pointer)
    elif spec.ask is not None:
        raise invalid(f"{pointer}/ask", "Only an approval asks something.")
    remind_at = policy.first_reminder(rules, opened_at=draft.now, due_at=due_at)
    escalate_at = policy.escalation(rules, opened_at=draft.now, due_at=due_at)
    return {
        "id": draft.ctx.new_id(),
        "key": key,
        "name": spec.name,
        "kind": spec.kind,
        "due_at": instant(due_at),
        "length": max(1, round((due_at - draft.now).total_seconds())),
        "on_timeout": on_timeout,
        "on_reject": spec.on_reject or draft.policy.on_reject,
        "correlation": spec.correlation,
        "from": spec.from_,
        "token": draft.ctx.new_token() if spec.kind == "callback" else None,
        "ask": ask,
        "policy": {**wait_rules(rules), **({"asked_by": draft.ctx.owner} if draft.ctx.owner else {})},
        "remind_at": instant(remind_at),
        "escalate_at": instant(escalate_at),
    }


def wait_rules(rules: policy.WaitPolicy) -> dict[str, Any]:
    """What of a wait's policy counts for as long as it is open (rule 16)."""
    return {
        "groups": list(rules.groups),
        "quorum": rules.quorum,
        "exclude_requester": rules.exclude_requester,
        "first_rejection_closes": rules.first_rejection_closes,
        "escalate_to": list(rules.escalate_to),
        "remind_every": rules.remind_every,
    }


def _same_wait(draft: Draft, there: Wait, spec: cmd.WaitSpec, pointer: str) -> None:
    """A key is unique in its run: naming it again must mean the same wait, and one that still counts."""
    if (spec.kind or there.kind) != there.kind or (spec.name or there.name) != there.name:
        raise invalid(f"{pointer}/key", "This key belongs to another wait of the run.")
    if there.status in ("cancelled", "superseded") or there.consumed:
        raise invalid(f"{pointer}/key", "The wait with this key is closed: a new wait needs a key of its own.")
    asked = ((there.ask or {}).get("effect") or {}).get("key")
    if spec.ask is not None and spec.ask.effect is not None and spec.ask.effect.key != asked:
        raise invalid(f"{pointer}/ask/effect/key", "The open wait with this key asks about another effect.")
    if spec.ask is not None and spec.ask.summary is not None and spec.ask.summary != (there.ask or {}).get("summary"):
        raise invalid(f"{pointer}/ask/summary", "The open wait with this key asks something else.")


def _deadline(draft: Draft, spec: cmd.WaitSpec, pointer: str) -> datetime:
    if (spec.due_at is None) == (spec.due_in is None):
        raise invalid(f"{pointer}/due_at", "A wait has a deadline: exactly one of due_at and due_in.")
    if spec.due_in is not None:
        if spec.due_in > LONGEST.total_seconds():
            raise invalid(f"{pointer}/due_in", "A wait lasts ten years at most.")
        return after(draft.now, spec.due_in)
    assert spec.due_at is not None
    if spec.due_at <= draft.now:
        raise invalid(f"{pointer}/due_at", "The deadline is not in the future.")
    if spec.due_at - draft.now > LONGEST:
        raise invalid(f"{pointer}/due_at", "A wait lasts ten years at most.")
    return spec.due_at.astimezone(UTC)


def _satisfiable(draft: Draft, name: str, rules: policy.WaitPolicy, pointer: str) -> None:
    """Rule 11: a gate that nobody can satisfy is refused when the run pauses."""
    able = able_to_decide(draft, list(rules.groups), rules.exclude_requester, asked_by=draft.ctx.owner)
    if len(able) < rules.quorum:
        need = f"{rules.quorum} people" if rules.quorum > 1 else "one person"
        detail = f"{name} needs {need} who may decide and did not request it; there are {len(able)}."
        raise Refusal(
            "unsatisfiable_gate", detail, subject=name, errors=[{"pointer": f"{pointer}/name", "detail": detail}]
        )


def able_to_decide(
    draft: Draft, groups: list[str], exclude_requester: bool, *, asked_by: str | None = None
) -> set[str]:
    """Who may decide now. `asked_by` is the owner of the key that asks: an own ask is not one's to answer, either."""
    barred = excluded(draft.run, asked_by) if exclude_requester else set()
    return {name for name in draft.ctx.people().of(groups) if same_person(name) not in barred}


def able_for(draft: Draft, wait: Wait) -> set[str]:
    """Who may decide an existing wait now."""
    return able_to_decide(
        draft, wait.groups, bool(wait.policy.get("exclude_requester", True)), asked_by=wait.policy.get("asked_by")
    )


def _ask(draft: Draft, spec: cmd.WaitSpec, pointer: str) -> dict[str, Any]:
    ask = spec.ask or cmd.Ask()
    where = f"{pointer}/ask"
    for name in ("schema", "response_schema"):
        given = getattr(ask, name)
        wrong = schemas.problem(given) if given is not None else None
        if wrong is not None:
            raise invalid(f"{where}/{name}", f"This is no JSON Schema that can be used: {wrong}")
    if ask.choices is not None and not ask.choices:
        raise invalid(f"{where}/choices", "An ask allows at least one choice.")
    effect: dict[str, Any] | None = None
    title = ""
    if ask.effect is not None:
        effect, title = _ask_effect(draft, ask.effect, f"{where}/effect")
    elif ask.choices and {"edit", "approve_with_conditions"} & set(ask.choices):
        raise invalid(
            f"{where}/choices", "Without an effect there is nothing to edit and nothing to put conditions on."
        )
    return {
        "summary": ask.summary or title or spec.name,
        "details": [{"label": item.label, "value": item.value} for item in ask.details],
        "effect": effect,
        "schema": ask.schema,
        "response_schema": ask.response_schema,
        "choices": ask.choices,
        "reasons": ask.reasons,
        "risk": ask.risk or _risk(effect),
        "rationale": ask.rationale,
        "evidence": [{"title": item.title, "url": item.url} for item in ask.evidence],
        "rollback": ask.rollback,
    }


def _risk(effect: dict[str, Any] | None) -> str:
    """Where the agent says nothing of the risk: what is above low impact is not low risk."""
    return "low" if effect is None or effect["impact"] == "low" else "medium"


def _ask_effect(draft: Draft, asked: cmd.AskEffect, pointer: str) -> tuple[dict[str, Any], str]:
    """The ask's effect, planned if it was not: it is among the pending actions from now on."""
    if asked.system is None or asked.action is None:
        if asked.key not in draft.state.effects:
            name = "system" if asked.system is None else "action"
            raise invalid(f"{pointer}/{name}", "This effect is not planned: send its system and action, too.")
    else:
        effects.plan(draft, asked, pointer, implicit=True)
    effect = draft.state.effects[asked.key]
    return {
        "key": effect.key,
        "system": effect.system,
        "action": effect.action,
        "resource": effect.resource,
        "arguments": effect.arguments,
        "arguments_digest": effect.arguments_digest,
        "amount": effect.amount,
        "impact": effect.impact,
        "title": effect.title,
    }, effect.title


# -- the clock


def apply_due(draft: Draft, wait: Wait) -> None:
    """Deadline, escalation and reminder of one open wait, as far as they are due (rule 6)."""
    if wait.due_at <= draft.now:
        _deadline_passed(draft, wait)
        wait = draft.state.waits[wait.key]
        if not wait.open:
            return
    if wait.escalate_at is not None and wait.escalate_at <= draft.now:
        draft.by_ledger(
            ev.WaitEscalated(
                wait=wait.id,
                scheduled_for=wait.escalate_at,
                to=wait.policy.get("escalate_to") or [],
                why="no answer yet",
            )
        )
    if wait.remind_at is not None and wait.remind_at <= draft.now:
        next_at = policy.next_reminder(wait.policy.get("remind_every"), now=draft.now, due_at=wait.due_at)
        draft.by_ledger(ev.WaitReminded(wait=wait.id, scheduled_for=wait.remind_at, next_at=next_at))


def _deadline_passed(draft: Draft, wait: Wait) -> None:
    if wait.kind == "timer":
        draft.by_ledger(ev.WaitSatisfied(wait=wait.id, due_at=wait.due_at))
    elif wait.on_timeout == "escalate":
        # Once more, and the same length again. After an outage that counts from now: nobody could have seen it before.
        in_time = draft.now - wait.due_at < min(IN_TIME, timedelta(seconds=wait.length) / 10)
        due_at = after(wait.due_at if in_time else draft.now, wait.length)
        draft.by_ledger(
            ev.WaitEscalated(
                wait=wait.id,
                scheduled_for=wait.due_at,
                to=wait.policy.get("escalate_to") or [],
                due_at=due_at,
                why="nobody answered by the deadline",
                last_call=True,
            )
        )
    else:
        draft.by_ledger(ev.WaitTimedOut(wait=wait.id, due_at=wait.due_at, then=wait.on_timeout))


# -- deciding


def require_open(wait: Wait) -> None:
    if wait.open:
        return
    if wait.status == "timed_out":
        raise Refusal(
            "wait_expired",
            f"The deadline was {instant(wait.due_at)}: this came too late, and nothing was executed by it.",
            subject=wait.id,
            wait=wait,
        )
    decision = wait.decision
    if decision is not None:
        text = f"{decision['decided_by_name']} was quicker: {decision['choice']} at {decision['decided_at']}."
    else:
        text = f"This wait is {wait.status}: {wait.why or 'it needs no answer any more'}."
    raise Refusal("wait_closed", text, subject=wait.id, wait=wait)


def require_eligible(draft: Draft, wait: Wait, user: str) -> None:
    """Only people whom the wait's policy names, and not the requester where the flow excludes them (rule 11)."""
    barred = excluded(draft.run, wait.policy.get("asked_by"))
    if wait.policy.get("exclude_requester", True) and same_person(user) in barred:
        raise Refusal("self_approval", "Whoever requested this may not decide it: somebody else must.", subject=wait.id)
    if user not in draft.ctx.people().of(wait.groups):
        who = ", ".join(wait.groups) or "the reviewers"
        raise Refusal("not_eligible", f"This is decided by {who}.", subject=wait.id)


def decide(draft: Draft, wait_id: str, body: cmd.Decide) -> str:
    """A person's structured answer to one version of one wait (rules 4, 5, 10). The decision's id."""
    wait = draft.state.wait_by_id(wait_id)
    assert wait is not None
    user = draft.ctx.actor.id
    if wait.kind != "approval":
        raise invalid("/choice", f"A {wait.kind} is not decided by a person.")
    require_eligible(draft, wait, user)
    require_open(wait)
    if body.wait_version != wait.version:
        raise Refusal(
            "stale_decision",
            f"The ask has changed since (version {wait.version}): look at it again, nothing was decided.",
            subject=wait.id,
            wait=wait,
        )
    if any(vote["by"] == user for vote in wait.votes):
        raise Refusal("already_voted", "You have voted already; somebody else must, too.", subject=wait.id, wait=wait)
    _check_answer(draft, wait, body)
    return _record(draft, wait, body)


def _check_answer(draft: Draft, wait: Wait, body: cmd.Decide | cmd.Answer, pointer: str = "") -> None:
    ask = wait.ask or {}
    effect = ask.get("effect")
    if body.choice not in verdict.choices(wait):
        raise invalid(f"{pointer}/choice", f"This ask allows only {', '.join(verdict.choices(wait))}.")
    if body.choice == "edit":
        if effect is None:
            raise invalid(f"{pointer}/choice", "There is no effect to edit.")
        if body.arguments is None:
            raise invalid(f"{pointer}/arguments", "Send the edited arguments.")
        if effect["arguments"] is None and effect["arguments_digest"] is not None:
            raise invalid(f"{pointer}/arguments", "The ledger holds only the digest of these arguments.")
        _check_schema(ask.get("schema"), body.arguments, f"{pointer}/arguments")
        _check_editable(draft, wait)
    elif body.arguments is not None and (effect is None or digest(body.arguments) != digest(effect["arguments"] or {})):
        raise invalid(f"{pointer}/arguments", "Other arguments are an edit.")
    if body.choice == "respond" and ask.get("response_schema") is not None:
        _check_schema(ask["response_schema"], body.response, f"{pointer}/response")
    if isinstance(body, cmd.Decide):
        _check_conditions(draft, effect, body)


def _check_editable(draft: Draft, wait: Wait) -> None:
    """What has begun is what it is: its arguments are evidence, and no edit reaches it."""
    effect = draft.state.effects[wait.effect_key or ""]
    if effect.state in effects.DONE:
        raise Refusal(
            "effect_already_executed",
            f"{effect.key} has been done: an edit comes too late.",
            subject=wait.id,
            effect=effect,
        )
    if effect.state in ("started", "unknown"):
        raise Refusal(
            "effect_unknown", f"{effect.key} is {effect.state}: an edit comes too late.", subject=wait.id, effect=effect
        )


def _check_schema(schema: dict[str, Any] | None, value: Any, pointer: str) -> None:
    if schema is None:
        return
    found = schemas.errors(schema, value)
    if found:
        errors = [{"pointer": pointer + error["pointer"], "detail": error["detail"]} for error in found]
        raise Refusal("invalid", f"{errors[0]['pointer']}: {errors[0]['detail']}", errors=errors)


def _check_conditions(draft: Draft, effect: dict[str, Any] | None, body: cmd.Decide) -> None:
    if (body.choice == "approve_with_conditions") != bool(body.conditions):
        raise invalid("/conditions", "Conditions belong to approve_with_conditions, which needs at least one.")
    for i, condition in enumerate(body.conditions):
        if (
            effect is None
            or effect["arguments"] is None
            or condition.pointer == ""  # all of the arguments are no field: whatever it says would allow any others
            or not conditions.exists(effect["arguments"], condition.pointer)
        ):
            raise invalid(f"/conditions/{i}/pointer", "The effect's arguments have no such field.")
        if condition.op in ("in", "not_in") and not isinstance(condition.value, list):
            raise invalid(f"/conditions/{i}/value", "A list is needed here.")
    if body.expires_at is not None and _utc(body.expires_at, "/expires_at") <= draft.now:
        raise invalid("/expires_at", "The approval would have expired already.")


def _record(draft: Draft, wait: Wait, body: cmd.Decide) -> str:
    changes = body.choice in ("edit", "approve_with_conditions")
    votes = [] if changes else wait.votes
    able = able_for(draft, wait)  # a vote counts as long as whoever gave it may decide
    same = [v for v in votes if (v["choice"] == "reject") == (body.choice == "reject") and v["by"] in able]
    quorum = int(wait.policy.get("quorum", 1))
    if body.choice == "respond" or (body.choice == "reject" and wait.policy.get("first_rejection_closes", True)):
        closes = True
    else:
        closes = len(same) + 1 >= quorum
    if body.choice == "edit":
        assert body.arguments is not None
        assert wait.effect_key is not None
        replan(draft, wait, body.arguments, why=f"edited by {draft.ctx.actor.name}")
    decision = draft.ctx.new_id()
    draft.add(
        ev.WaitVoted(
            decision=decision,
            wait=wait.id,
            wait_version=body.wait_version,
            choice=body.choice,
            closes=closes,
            voids=changes,
            arguments=body.arguments,
            response=body.response,
            conditions=[{"pointer": c.pointer, "op": c.op, "value": c.value} for c in body.conditions],
            expires_at=_utc(body.expires_at, "/expires_at") if body.expires_at else None,
            reason=body.reason,
            comment=body.comment,
            seen=body.seen,
        )
    )
    if closes and body.choice == "reject" and wait.effect_key is not None:
        effects.withdraw_planned(draft, "a person said no", only=wait.effect_key)
    return decision


def replan(draft: Draft, wait: Wait, arguments: dict[str, Any], *, why: str) -> None:
    """A reviewer's edit replans the ask's key in the deciding transaction (rule 10)."""
    effect = draft.state.effects[wait.effect_key or ""]
    new_digest = digest(arguments)
    if new_digest == effect.arguments_digest:
        return
    print_ = fingerprint(
        system=effect.system,
        action=effect.action,
        resource=effect.resource,
        amount=effect.amount,
        arguments_digest=new_digest,
    )
    effects.refuse_twin(draft, effect.key, print_, repeat=effect.repeat)
    draft.add(
        ev.EffectReplanned(
            key=effect.key,
            arguments=arguments,
            arguments_digest=new_digest,
            fingerprint=print_,
            why=why,
            wait=wait.id,
        )
    )


def hand_answer(draft: Draft, wait: Wait, answer: cmd.Answer, pointer: str) -> dict[str, Any]:
    """An answer given while handing back, to a wait that the takeover superseded.

    The agent is told it. It authorises the ask's effect only from somebody who might have decided it alone: holding the
    wheel does not put one into another group.
    """
    authorises = False
    if wait.kind == "approval":
        authorises = draft.ctx.actor.id in able_for(draft, wait) and (
            int(wait.policy.get("quorum", 1)) == 1 or answer.choice == "reject"
        )
        if answer.choice == "approve_with_conditions":
            raise invalid(f"{pointer}/choice", "Conditions are given on the ask itself, not while handing back.")
        _check_answer(draft, wait, answer, pointer)
        if answer.choice not in ("edit", "reject") and not _asks_of_now(draft, wait):
            authorises = False  # what it asked about was changed by another answer since
        if authorises and answer.choice == "edit" and answer.arguments is not None and wait.effect_key is not None:
            replan(draft, wait, answer.arguments, why=f"edited by {draft.ctx.actor.name}")
    return {
        "wait": wait.id,
        "choice": answer.choice,
        "arguments": answer.arguments,
        "response": answer.response,
        "reason": answer.reason,
        "authorises": authorises,
    }


def _asks_of_now(draft: Draft, wait: Wait) -> bool:
    effect = draft.state.effects.get(wait.effect_key or "")
    asked = (wait.ask or {}).get("effect") or {}
    return effect is None or asked.get("arguments_digest") == effect.arguments_digest


# -- what people do with a wait besides deciding


def take(draft: Draft, wait: Wait) -> None:
    require_open(wait)
    if wait.claimed_by not in (None, draft.ctx.actor.id):
        raise Refusal("lease_held", f"{wait.claimed_by} is looking at it.", held_by=wait.claimed_by, wait=wait)
    if wait.claimed_by is None:
        draft.add(ev.WaitClaimed(wait=wait.id, by=draft.ctx.actor.id))


def give_back(draft: Draft, wait: Wait) -> None:
    require_open(wait)
    if wait.claimed_by is not None:
        draft.add(ev.WaitClaimed(wait=wait.id, by=None))


def assign(draft: Draft, wait: Wait, body: cmd.AssignWait) -> None:
    require_open(wait)
    if body.to not in able_for(draft, wait):
        raise invalid("/to", "This person may not decide it.")
    draft.add(ev.WaitAssigned(wait=wait.id, to=body.to, reason=body.reason))


def extend(draft: Draft, wait: Wait, body: cmd.ExtendWait) -> None:
    require_open(wait)
    due_at = _deadline(draft, cmd.WaitSpec(due_at=body.due_at, due_in=body.due_in), "")
    if due_at <= wait.due_at:
        raise invalid("/due_at", "The new deadline is not later than the old one.")
    remind_at = wait.remind_at
    draft.add(ev.WaitExtended(wait=wait.id, due_at=due_at, reason=body.reason, remind_at=remind_at))


def escalate(draft: Draft, wait: Wait, body: cmd.WaitAction) -> None:
    require_open(wait)
    to = wait.policy.get("escalate_to") or []
    if not to:
        raise invalid("", "The flow names nobody to escalate to.")
    draft.add(
        ev.WaitEscalated(wait=wait.id, scheduled_for=draft.now, to=to, why=body.reason or "asked for by a person")
    )


def request_info(draft: Draft, wait: Wait, body: cmd.WaitAction) -> None:
    require_open(wait)
    text = body.comment or body.reason
    if not text:
        raise invalid("/comment", "Say what you need to know.")
    draft.add(ev.WaitInfoRequested(wait=wait.id, text=text))


def comment(draft: Draft, wait: Wait, body: cmd.WaitAction) -> None:
    text = body.comment or body.reason
    if not text:
        raise invalid("/comment", "Say something.")
    draft.add(ev.WaitCommented(wait=wait.id, text=text))


def policy_changed(draft: Draft, wait: Wait, rules: policy.WaitPolicy) -> None:
    """Rule 16: the version grows; rule 11: if nobody is left who may decide, the run goes to review."""
    kept = [
        group for group in wait.groups if group not in rules.groups and group in (wait.policy.get("escalate_to") or [])
    ]
    new = {**wait_rules(rules), "groups": [*rules.groups, *(kept if wait.escalation else [])]}
    able = able_to_decide(draft, new["groups"], rules.exclude_requester, asked_by=wait.policy.get("asked_by"))
    draft.add(ev.WaitPolicyChanged(wait=wait.id, policy=new, unsatisfiable=len(able) < rules.quorum))


# -- signals


def answer_by_signal(draft: Draft, wait: Wait, signal: dict[str, Any]) -> ev.Recorded:
    return draft.add(ev.WaitSignalled(wait=wait.id, signal=signal))


def _utc(when: datetime, pointer: str) -> datetime:
    try:
        return when.astimezone(UTC)
    except OverflowError:
        raise invalid(pointer, "This instant is beyond the calendar in UTC.") from None
