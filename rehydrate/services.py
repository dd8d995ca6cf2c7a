"""One function for each operation, for the API and the console alike: who may, then the ledger.

Dicts in the contract's shapes.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from uuid import UUID

from django.conf import settings
from django.db import IntegrityError, InterfaceError, OperationalError, transaction
from msgspec.structs import replace

from rehydrate import claims, clock, cooperative, ledger, loading, seal, selectors, shapes, signals, sweep, wakeups
from rehydrate.answers import Apart
from rehydrate.callers import Caller
from rehydrate.core import commands as cmd
from rehydrate.core import decide as core
from rehydrate.core import effects, verdict, waiting
from rehydrate.core import events as ev
from rehydrate.core.canonical import digest, fingerprint, instant, same_digest
from rehydrate.core.draft import Draft, excluded, same_person
from rehydrate.core.parsing import check_inline, lenient_receipt, parse_event
from rehydrate.core.refusals import Refusal, invalid, not_found
from rehydrate.core.state import Run, State
from rehydrate.core.state import Wait as WaitState
from rehydrate.models import Signal, Wait
from rehydrate.rights import Outdated

log = logging.getLogger(__name__)

Json = dict[str, Any]


# -- who may


def _sees(caller: Caller) -> Callable[[Run], None]:
    """What the caller may not see is not there."""

    def check(run: Run) -> None:
        if not caller.sees(run.workspace_id, run.flow):
            raise not_found("run")

    return check


def _agent_only(caller: Caller, run_id: str | None = None) -> None:
    """A person gets 404 for a run that is not theirs to see, and 403 for one that is."""
    if caller.kind != "agent":
        if run_id is not None:
            cooperative.aside(selectors.require_visible, caller, run_id)
        raise Refusal("forbidden", "This is for agents: use an agent's key.")


def _holds(caller: Caller, role: str) -> Callable[[Run], None]:
    """A person with this role in the run's workspace."""

    def check(run: Run) -> None:
        _sees(caller)(run)
        _person(caller, run.workspace_id, role)

    return check


def _not_requester(draft: Draft) -> None:
    """Rule 11: for clear, retry, reconcile and hand-back, too, where the flow excludes the requester."""
    rules = draft.pinned.wait.values()
    exclude = any(rule.exclude_requester for rule in rules) if rules else True
    if exclude and same_person(draft.ctx.actor.id) in excluded(draft.run):
        raise Refusal("self_approval", "Whoever requested this run may not settle it: somebody else must.")


def _uuid(text: str, what: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise not_found(what) from None


def _reveal(draft: Draft, caller: Caller, value: Any) -> Any:
    """Secret fields are covered for people who are no auditors; an agent sees what it works with."""
    if not caller.is_person or caller.may(draft.run.workspace_id, "auditor"):
        return value
    return seal.mask(value, seal.tails(draft.policy.secret))


# -- agents


def open_run(caller: Caller, body: cmd.OpenRun) -> tuple[Json, bool]:
    """Open a run, or find the one with this external id. The answer, and whether it is new."""
    _agent_only(caller)
    (workspace,) = caller.workspaces
    if not caller.sees(workspace, body.flow):
        raise Refusal("forbidden", f"This key may not use the flow {body.flow}.")
    events: list[cmd.AgentEvents] = []

    def work(draft: Draft) -> None:
        events[:] = [parse_event(raw, i) for i, raw in enumerate(body.events)]
        core.open_run(draft, body, workspace=workspace, owner=caller.owner)
        epoch = draft.run.epoch
        for i, event in enumerate(events):
            core.require_lease(draft, epoch)
            core.append(draft, event, pointer=f"/events/{i}", last=i == len(events) - 1)
        if body.holder is None and draft.run.leased:
            core.release(draft, cmd.Release(epoch=epoch))

    for _ in range(2):
        try:
            draft = ledger.create(
                loading.Site(workspace, body.flow, body.external_id),
                work,
                actor=caller.actor(),
                keep=partial(_states, events=events),
                rights=caller.rights,
            )
        except IntegrityError:
            continue  # another opened it at the same instant: answer with that one
        if isinstance(draft, str):
            return cooperative.aside(_known_run, caller, draft, body), False
        state = draft.state
        found = verdict.assess(state, draft.pinned, draft.now)
        whole = shapes.run_whole(
            state, found, list(state.refs.values()), list(state.decisions.values()), callback_base=settings.PUBLIC_URL
        )
        return {"run": whole, "lease": shapes.lease(state.run)}, True
    raise Refusal("unavailable", "Two requests opened this run at once: try again.")


def _known_run(caller: Caller, run_id: str, body: cmd.OpenRun) -> Json:
    run = selectors.get_run(caller, run_id)
    given = same_digest(body.input.digest) if body.input and body.input.digest is not None else None
    known = run["input"]["digest"]
    if given is not None and known is not None and given != known:
        raise Refusal(
            "run_conflict",
            f"{body.external_id} is open with another input: use another external id, or rehydrate that run.",
            run={"id": run["id"], "status": run["status"], "input": run["input"]},
            run_status=run["status"],
        )
    return {"run": run, "lease": None}


def _states(draft: Draft, events: list[cmd.AgentEvents]) -> list[Json]:
    """An agent's opaque state as rows, encrypted, beside the checkpoint's event, which holds its digest."""
    states = [event.state for event in events if isinstance(event, cmd.Checkpoint) and event.state is not None]
    if not states:
        return []
    made = [
        rec for rec in draft.recorded if isinstance(rec.fact, ev.Checkpointed) and rec.fact.state_digest is not None
    ]
    return [
        {
            "run_id": draft.run.id,
            "seq": recorded.seq,
            "digest": getattr(recorded.fact, "state_digest", None),
            "sealed": f"\\x{seal.encrypt(value).hex()}",  # as PostgreSQL reads bytes
        }
        for recorded, value in zip(made, states, strict=True)
    ]


def append_events(caller: Caller, run_id: str, body: cmd.Append) -> Json:
    """Append a batch: all or nothing, but receipts (rule 9)."""
    _agent_only(caller, run_id)
    run_id = _uuid(run_id, "run")
    parsed: list[cmd.AgentEvents] = []
    bad: Refusal | None = None
    receipts: list[Receipt | None] = []
    for i, raw in enumerate(body.events):
        receipts.append(lenient_receipt(raw))
        try:
            parsed.append(parse_event(raw, i))
        except Refusal as refusal:
            receipt = receipts[-1]
            if receipt is not None and refusal.code in ("invalid", "too_large"):
                parsed.append(receipt[0])  # text that cannot be held is cleaned, and the receipt is kept
            else:
                bad = bad or refusal
    answer: list[tuple[ev.Recorded | None, str | None]] = []

    def work(draft: Draft) -> None:
        answer.clear()
        if _only_late_receipts(draft, body.epoch, receipts, bad):
            for i, receipt in enumerate(receipts):
                assert receipt is not None
                answer.append(_receipt(draft, receipt, body.epoch, f"/events/{i}"))
            return
        core.require_lease(draft, body.epoch)
        if bad is not None:
            raise bad
        for i, event in enumerate(parsed):
            pointer = f"/events/{i}"
            receipt = receipts[i]
            if receipt is not None and receipt[1]:
                answer.append(_receipt(draft, receipt, body.epoch, pointer))
            else:
                answer.append(core.append(draft, event, pointer=pointer, last=i == len(parsed) - 1))
        draft.renew()

    def rescue(draft: Draft, refusal: Refusal) -> None:
        kept = []
        plans = {event.key: event for event in parsed if isinstance(event, cmd.EffectPlanned)}
        for i, receipt in enumerate(receipts):
            if receipt is None:
                continue
            mark = draft.state, len(draft.recorded)
            try:
                recorded, key = _receipt(draft, _with_plan(receipt, plans), body.epoch, f"/events/{i}")
            except Refusal:
                draft.rewind(*mark)
                continue
            effect = shapes.effect(draft.state.effects[key or ""])
            kept.append({"key": key, "type": ev.type_of(recorded.fact) if recorded else None, "state": effect["state"]})
        if kept:
            refusal.extra["recorded"] = kept

    named: Json = _named([*parsed, *(receipt[0] for receipt in receipts if receipt is not None)])
    _, draft = ledger.change(
        run_id,
        work,
        actor=caller.actor(),
        operation="append",
        full=False,
        check=_sees(caller),
        rescue=rescue,
        keep=partial(_states, events=parsed),
        people=any(isinstance(event, cmd.Paused | cmd.WaitOpened) for event in parsed),
        rights=caller.rights,
        **named,
    )
    return _appended(draft, answer)


Receipt = tuple[cmd.EffectExecuted | cmd.EffectFailed, bool]

_PLAN: Final = (
    "system", "action", "resource", "arguments", "arguments_digest", "impact", "reversible", "compensation", "amount",
    "approval", "repeat",
)  # fmt: skip


def _with_plan(receipt: Receipt, plans: dict[str, cmd.EffectPlanned]) -> Receipt:
    """A receipt with its plan's fields, where the plan stands in the same batch and is refused with it."""
    event, changed = receipt
    plan = plans.get(event.key)
    if plan is None or not isinstance(event, cmd.EffectExecuted) or event.system is not None:
        return receipt
    return replace(event, **{name: getattr(plan, name) for name in _PLAN}), changed


def _only_late_receipts(draft: Draft, epoch: int, receipts: list[Any], bad: Refusal | None) -> bool:
    run = draft.run
    live = run.leased and run.epoch == epoch and not run.ended
    return not live and bad is None and all(receipt is not None for receipt in receipts)


def _receipt(draft: Draft, receipt: Receipt, epoch: int, pointer: str) -> tuple[ev.Recorded | None, str]:
    """Rule 9:

    from the live lease, or from the epoch that started the effect, whatever became of the lease or the run.
    """
    event, sanitised = receipt
    run = draft.run
    live = run.leased and run.epoch == epoch and not run.ended
    effect = draft.state.effects.get(event.key)
    granted = 1 <= epoch <= run.epoch
    latest = effect is None or effect.started_epoch in (0, epoch)
    # Of several attempts only the latest's epoch is kept; an older epoch may have begun one of those before.
    earlier = effect is not None and epoch < effect.started_epoch and effect.attempt + effect.undo_attempt > 1
    if not live and not (granted and (latest or earlier)):
        core.require_lease(draft, epoch)
    if not live and earlier and isinstance(event, cmd.EffectFailed):
        text = f"{event.key}: an earlier attempt failed: {event.error.code} {event.error.message}"
        return draft.add(ev.Noted(text=text[:4000])), event.key  # the attempt under way is another
    if isinstance(event, cmd.EffectExecuted):
        return effects.executed(draft, event, pointer, late=not live, sanitised=sanitised), event.key
    return effects.failed(draft, event, late=not live, sanitised=sanitised), event.key


def _named(events: list[cmd.AgentEvents]) -> dict[str, list[str]]:
    """What a batch names, so that only that is loaded: effects by key and by what they would do, waits by key."""
    keys: list[str] = []
    prints: list[str] = []
    wait_keys: list[str] = []

    def planned(given: Any) -> None:
        keys.append(given.key)
        if getattr(given, "system", None) is not None and given.action is not None:
            args = digest(given.arguments) if given.arguments is not None else given.arguments_digest
            prints.append(
                fingerprint(
                    system=given.system,
                    action=given.action,
                    resource=given.resource,
                    amount=effects.amount_of(given.amount),
                    arguments_digest=same_digest(args) if args is not None else None,
                )
            )

    for event in events:
        specs = (
            event.waits if isinstance(event, cmd.Paused) else [event.wait] if isinstance(event, cmd.WaitOpened) else []
        )
        for spec in specs:
            wait_keys += [text for text in (spec.key, spec.name) if text]
            if spec.ask is not None and spec.ask.effect is not None:
                planned(spec.ask.effect)
        if isinstance(event, cmd.EffectPlanned | cmd.EffectExecuted):
            planned(event)
        elif (key := getattr(event, "key", None)) is not None:
            keys.append(key)
    return {"keys": keys, "prints": prints, "wait_keys": wait_keys}


def _appended(draft: Draft, answer: list[tuple[ev.Recorded | None, str | None]]) -> Json:
    state = draft.state
    started = {rec.fact.key for rec in draft.recorded if isinstance(rec.fact, ev.EffectStarted | ev.EffectCompensating)}
    touched = list(dict.fromkeys(key for _, key in answer if key is not None))
    opened: list[str] = []
    for recorded in draft.recorded:
        if isinstance(recorded.fact, ev.RunPaused):
            opened += [wait["id"] for wait in recorded.fact.waits]
        elif isinstance(recorded.fact, ev.WaitOpened):
            opened.append(recorded.fact.wait["id"])
    waits = [wait for wait_id in opened if (wait := state.wait_by_id(wait_id)) is not None]
    return {
        "run": shapes.run_brief(state.run),
        "events": [_noted(state, recorded, key) for recorded, key in answer],
        "effects": [
            {**shapes.effect(state.effects[key]), "granted": key in started} for key in touched if key in state.effects
        ],
        "waits": [shapes.wait(wait, callback_base=settings.PUBLIC_URL) for wait in waits],
        "lease": shapes.lease(state.run),
    }


def _noted(state: State, recorded: ev.Recorded | None, key: str | None) -> Json:
    """An event of the batch in its place; one that stood already is told with the place of its plan."""
    if recorded is not None:
        return {"seq": recorded.seq, "type": ev.type_of(recorded.fact), "at": instant(recorded.at), "key": key}
    effect = state.effects.get(key or "")
    return {
        "seq": effect.planned_seq if effect else None,
        "type": "effect.planned",
        "at": instant(effect.planned_at) if effect else None,
        "key": key,
    }


def heartbeat(caller: Caller, run_id: str, body: cmd.Heartbeat) -> Json:
    _agent_only(caller, run_id)
    _, draft = ledger.change(
        _uuid(run_id, "run"),
        lambda draft: core.heartbeat(draft, body),
        actor=caller.actor(),
        operation="heartbeat",
        rights=caller.rights,
        full=False,
        check=_sees(caller),
    )
    return {"lease": shapes.lease(draft.run), "run": shapes.run_brief(draft.run)}


def release(caller: Caller, run_id: str, body: cmd.Release) -> Json:
    _agent_only(caller, run_id)
    _, draft = ledger.change(
        _uuid(run_id, "run"),
        lambda draft: core.release(draft, body),
        actor=caller.actor(),
        operation="release",
        full=False,
        check=_sees(caller),
    )
    return {"run": shapes.run_brief(draft.run)}


def recall(caller: Caller, run_id: str, body: cmd.Recall) -> Json:
    _agent_only(caller, run_id)
    found, draft = ledger.change(
        _uuid(run_id, "run"),
        lambda draft: core.recall(draft, body),
        actor=caller.actor(),
        operation="recall",
        check=_sees(caller),
        history=True,
    )
    return _envelope(draft, found)


def rehydrate_run(caller: Caller, run_id: str, body: cmd.Rehydrate) -> Json:
    """The envelope: what must happen now, and the lease where the run may go on."""
    _agent_only(caller, run_id)
    found, draft = ledger.change(
        _uuid(run_id, "run"),
        lambda draft: core.rehydrate(draft, body),
        actor=caller.actor(),
        operation="rehydrate",
        rights=caller.rights,
        check=_sees(caller),
        history=True,
    )
    return _envelope(draft, found)


def _envelope(draft: Draft, found: verdict.Verdict) -> Json:
    """Of a run that was read with its history."""
    state = draft.state
    opaque = seal.decrypt(state.opaque) if state.opaque is not None else None
    return shapes.envelope(
        state,
        found,
        list(state.refs.values()),
        list(state.decisions.values()),
        opaque=opaque,
        callback_base=settings.PUBLIC_URL,
    )


def claim(caller: Caller, body: cmd.Claim) -> Json | None:
    """The next ready run of some flows with its lease, waiting up to `wait` seconds; None when there is none."""
    workspace, flows = _may_claim(caller, body)
    if not body.wait or not wakeups.anybody_waits(_ready_topics(workspace, flows)):
        found = _claim_once(caller, workspace, flows, body)
        if found is not None or not body.wait:
            return found
    with ear_for_claim(caller, body) as ear:
        return wakeups.look_until(ear, body.wait, lambda: _claim_once(caller, workspace, flows, body))


def _may_claim(caller: Caller, body: cmd.Claim) -> tuple[str, tuple[str, ...] | None]:
    """The workspace, and the flows to claim from (None: all of them)."""
    _agent_only(caller)
    (workspace,) = caller.workspaces
    flows = None if body.flows == ["*"] and "*" in caller.flows else tuple(body.flows)
    for flow in flows or ():
        if not caller.sees(workspace, flow):
            raise Refusal("forbidden", f"This key may not use the flow {flow}.")
    return workspace, flows


def _ready_topics(workspace: str, flows: tuple[str, ...] | None) -> list[wakeups.Topic]:
    return [wakeups.ready(workspace, flow) for flow in (flows if flows is not None else (None,))]


def ear_for_claim(caller: Caller, body: cmd.Claim) -> wakeups.Ear:
    """Hears of runs that this claim could get; agents that could get the same ones are a group. Refuses as it would."""
    workspace, flows = _may_claim(caller, body)
    agent = body.agent
    readable = (agent.version, tuple(agent.reads)) if agent is not None else None
    topics = _ready_topics(workspace, flows)
    return wakeups.listen(*topics, group=(flows, readable), room=wakeups.AGENTS)


def _claim_once(caller: Caller, workspace: str, flows: tuple[str, ...] | None, body: cmd.Claim) -> Json | None:
    passed: list[str] = []
    caught_up = False
    while True:
        picked: list[str] = []
        with _one_claims() as mine:

            def work(draft: Draft, picked: list[str] = picked, mine: Mine = mine) -> verdict.Verdict | None:
                picked[:] = [draft.run.id]
                return core.claim(draft, body) if mine(draft.run.id) else None

            pick = claims.next_claimable(workspace, flows, body.agent, passed)
            try:
                found, draft = ledger.change(
                    "",
                    work,
                    actor=caller.actor(),
                    operation="claim",
                    rights=caller.rights,
                    lock="never",
                    history=True,
                    pick=pick,
                )
            except ledger.Overtaken:
                continue  # somebody else wrote it at the same instant: look again
            except (OperationalError, InterfaceError, Outdated, Apart):
                raise
            except Refusal as refusal:
                if refusal.code != "not_found":
                    raise
            except Exception:
                picked = picked or loading.picked(pick)
                if not picked:
                    raise
                log.exception("run %s cannot be claimed", picked[0])  # and holds up no other
            else:
                if found is not None:
                    wakeups.served(wakeups.ready(workspace, draft.run.flow))
                    return _envelope(draft, found)
        if picked:
            passed += picked
            continue
        if caught_up:
            return None
        # Rule 6: a lapsed lease or a due timer counts even if no sweeper came by yet.
        if cooperative.aside(sweep.overdue, 20, workspace=workspace, flows=flows) == 0:
            return None
        caught_up = True


Mine = Callable[[str], bool]
_claimed_now: set[str] = set()
_claiming = threading.Lock()


@contextmanager
def _one_claims() -> Iterator[Mine]:
    """Of this process's claims at one instant each run is for one: the others pass it over, instead of all deciding on
    it for one of them to be first.
    """
    taken: list[str] = []

    def mine(run_id: str) -> bool:
        with _claiming:
            if run_id in _claimed_now:
                return False
            _claimed_now.add(run_id)
        taken.append(run_id)
        return True

    try:
        yield mine
    finally:
        with _claiming:
            _claimed_now.difference_update(taken)


# -- signals


def send_signal(caller: Caller, body: cmd.Signal) -> Json:
    """Store a signal, then match it to one wait at most (rule 7)."""
    _agent_only(caller)
    (workspace,) = caller.workspaces
    aimed = [body.run is not None, body.flow is not None or body.external_id is not None, body.correlation is not None]
    if sum(aimed) != 1:
        raise invalid("/run", "Say whom it is for, once: run, or flow and external_id, or correlation.")
    if (body.flow is None) != (body.external_id is None):
        raise invalid("/external_id" if body.external_id is None else "/flow", "flow and external_id go together.")
    if body.flow is not None and not caller.sees(workspace, body.flow):
        raise Refusal("forbidden", f"This key may not use the flow {body.flow}.")
    check_inline(body.payload, "/payload")
    run_id = None
    if body.run is not None:
        run_id = _uuid(body.run, "run")
        selectors.require_visible(caller, run_id)
    signal = Signal(
        workspace_id=workspace,
        sender=caller.id,
        sender_id=body.id,
        name=body.name,
        flows=list(caller.flows),
        run_id=run_id,
        flow=body.flow,
        external_id=body.external_id,
        correlation=body.correlation,
        sealed=signals.sealed(body.payload),
        occurred_at=body.occurred_at,
        sequence=body.sequence,
        state="received",
    )
    return receive(signal)


def receive(signal: Signal) -> Json:
    """Store (in a transaction of its own, so that it is never lost) and match."""
    flow, external_id = signal.flow, signal.external_id
    if signal.run is not None:
        flow, external_id = signal.run.flow, signal.run.external_id
    with transaction.atomic():
        places = signals.targets(flow=flow, external_id=external_id, correlation=signal.correlation)
        signals.lock(str(signal.workspace_id), signal.name, places)
        signal.received_at = clock.now()
        try:
            with transaction.atomic():
                signal.save(force_insert=True)
        except IntegrityError:
            first = Signal.objects.get(
                workspace_id=signal.workspace_id, sender=signal.sender, sender_id=signal.sender_id
            )
            return {
                "signal_id": str(first.pk),
                "state": "duplicate",
                "matched": [str(first.wait_id)] if first.wait_id else [],
            }
    return match_signal(signal)


def match_signal(signal: Signal) -> Json:
    """Find the one open wait that the stored signal fits. Safe to repeat."""
    while True:
        found = signals.candidates(signal)
        still_open = [wait for wait in found if wait.status == "open"]
        if signals.newer_known(signal):
            return _unmatched(signal, "superseded", found)
        if len(still_open) > 1:
            ids = [str(wait.pk) for wait in still_open]
            answer = _unmatched(signal, "ambiguous", still_open)
            if answer["state"] != "ambiguous":
                return answer
            raise Refusal(
                "ambiguous_signal",
                "Several open waits fit: it is kept, and a person says which one it is for.",
                signal_id=str(signal.pk),
                candidates=ids,
            )
        if not still_open:
            ended = signal.run_id is not None and not found and selectors.is_ended(str(signal.run_id))
            return _unmatched(signal, "late" if found or ended else "buffered", found)
        (wait,) = still_open
        if _answer(signal, str(wait.run_id), str(wait.pk)):
            return {"signal_id": str(signal.pk), "state": "matched", "matched": [str(wait.pk)]}
        if (other := _taken(signal)) is not None:
            return other


def _taken(signal: Signal) -> Json | None:
    """What somebody else made of the signal meanwhile: a wait that was just being opened took it, for one."""
    signal.refresh_from_db(fields=["state", "wait_id"])
    if signal.state in signals.PENDING:
        return None
    matched = [str(signal.wait_id)] if signal.state == "matched" else []
    return {"signal_id": str(signal.pk), "state": signal.state, "matched": matched}


def _answer(signal: Signal, run_id: str, wait_id: str, *, actor: Json | None = None) -> bool:
    """Answer the wait with the signal, if it is still open once its run is locked."""

    def work(draft: Draft) -> bool:
        wait = draft.state.wait_by_id(wait_id)
        if wait is None or not wait.open:
            return False
        if not signals.matched(signal, run_id, wait_id, by_person=actor is not None):
            return False
        waiting.answer_by_signal(draft, wait, signals.as_answer(signal))
        return True

    by = actor or {"kind": "system", "id": signal.sender, "name": signal.sender}
    answered, _ = ledger.change(run_id, work, actor=by, operation="signal", lock="taken", wait_ids=[wait_id])
    return answered


def _unmatched(signal: Signal, state: str, found: list[Wait]) -> Json:
    """Kept, and resumes nothing; the run it would have been for has it in its history."""
    if not signals.set_state(signal, state, found=[str(wait.pk) for wait in found if wait.status == "open"]):
        other = _taken(signal)
        assert other is not None
        return other
    runs = {str(wait.run_id) for wait in found} or ({str(signal.run_id)} if signal.run_id else set())
    if state != "buffered" and len(runs) == 1:
        fact = ev.SignalNoted(signal=signals.as_answer(signal), state=state)
        by = {"kind": "system", "id": signal.sender, "name": signal.sender}
        ledger.change(runs.pop(), lambda draft: draft.add(fact), actor=by, operation="signal")
    return {"signal_id": str(signal.pk), "state": state, "matched": []}


def receive_hook(token: str, payload: Any, webhook_id: str) -> Json:
    """What came in at a callback wait's own address; `webhook_id` tells it from its repetitions."""
    wait = Wait.objects.filter(token=token).select_related("run").first()
    if wait is None:
        raise not_found("address")
    signal = Signal(
        workspace_id=wait.run.workspace_id,
        sender=f"hook:{wait.pk}",
        sender_id=webhook_id[:200],
        name=wait.name,
        flows=["*"],
        run_id=wait.run_id,
        sealed=signals.sealed(payload),
        state="received",
    )
    with transaction.atomic():
        signal.received_at = clock.now()
        try:
            with transaction.atomic():
                signal.save(force_insert=True)
        except IntegrityError:
            first = Signal.objects.get(
                workspace_id=signal.workspace_id, sender=signal.sender, sender_id=signal.sender_id
            )
            return {
                "signal_id": str(first.pk),
                "state": "duplicate",
                "matched": [str(first.wait_id)] if first.wait_id else [],
            }
        if _answer(signal, str(wait.run_id), str(wait.pk)):
            return {"signal_id": str(signal.pk), "state": "matched", "matched": [str(wait.pk)]}
        return _unmatched(signal, "late", [wait])


def assign_signal(caller: Caller, signal_id: str, body: cmd.AssignSignal) -> Json:
    """A person says which wait an ambiguous, late or buffered signal is for."""
    signal = Signal.objects.filter(pk=_uuid(signal_id, "signal"), workspace_id__in=list(caller.workspaces)).first()
    if signal is None:
        raise not_found("signal")
    wait = (
        Wait.objects.filter(pk=_uuid(body.wait, "wait"), run__workspace_id=signal.workspace_id)
        .select_related("run")
        .first()
    )
    if wait is None:
        raise invalid("/wait", "There is no such wait.")
    _person(caller, str(signal.workspace_id), "operator")
    if signal.state == "matched":
        raise Refusal("wait_closed", "This signal has answered a wait already.", signal_id=str(signal.pk))
    if wait.kind not in ("callback", "signal"):
        raise invalid("/wait", "A signal answers callbacks and signals only.")
    if not _answer(signal, str(wait.run_id), str(wait.pk), actor=caller.actor()):
        if (taken := _taken(signal)) is not None and taken["state"] == "matched":
            raise Refusal("wait_closed", "This signal has answered a wait already.", signal_id=str(signal.pk))
        raise Refusal(
            "wait_closed", "This wait needs no answer any more.", wait=selectors.get_wait(caller, str(wait.pk))
        )
    return {"signal_id": str(signal.pk), "state": "matched", "matched": [str(wait.pk)]}


def _person(caller: Caller, workspace: str, role: str) -> None:
    if not caller.is_person:
        raise Refusal("agents_cannot_decide", "Agents never decide: this needs a person.")
    if not caller.may(workspace, role):
        raise Refusal("forbidden", f"This needs the role {role} in this workspace.")


# -- people and waits


def _wait_change(
    caller: Caller, wait_id: str, operation: str, role: str, work: Callable[[Draft, WaitState], Any]
) -> tuple[Any, Draft, str]:
    wait_id = _uuid(wait_id, "wait")
    if not caller.is_person:
        _refused_agent(caller, cooperative.aside(selectors.run_of_wait, caller, wait_id), wait_id, operation)

    def check(run: Run) -> None:
        if not caller.sees(run.workspace_id, run.flow):
            raise not_found("wait")
        _person(caller, run.workspace_id, role)

    def act(draft: Draft) -> Any:
        wait = draft.state.wait_by_id(wait_id)
        if wait is None:
            raise not_found("wait")
        return work(draft, wait)

    result, draft = ledger.change(
        wait_id,
        act,
        actor=caller.actor(),
        operation=operation,
        check=check,
        rights=caller.rights,
        by_wait=True,
        people=True,
        wait_ids=[wait_id],
    )
    return result, draft, wait_id


def _refused_agent(caller: Caller, run_id: str, subject: str, operation: str) -> None:
    """Rule 11 and rule 14: an agent that tries to decide is refused, and that is kept."""

    def work(draft: Draft) -> None:
        raise Refusal("agents_cannot_decide", "Agents never decide: this needs a person.", subject=subject)

    ledger.change(run_id, work, actor=caller.actor(), operation=operation, check=_sees(caller), rights=caller.rights)


def decide(caller: Caller, wait_id: str, body: cmd.Decide) -> Json:
    """A person's structured answer to one version of one wait. The decision, with what became of wait and run."""

    _bounded({"arguments": body.arguments, "response": body.response, "conditions": body.conditions, "seen": body.seen})

    def work(draft: Draft, wait: WaitState) -> str:
        return waiting.decide(draft, wait.id, replace(body, arguments=_unmasked(draft, wait, body.arguments)))

    decision_id, draft, wait_id = _wait_change(caller, wait_id, "decide", "viewer", work)
    made = draft.state.decisions[decision_id]
    wait = draft.state.wait_by_id(wait_id)
    assert wait is not None
    answer = {**shapes.decision(made), "wait_status": wait.status, "votes": wait.votes, "run_status": draft.run.status}
    return dict(_reveal(draft, caller, answer))


def _unmasked(draft: Draft, wait: WaitState | None, arguments: Json | None, pointer: str = "/arguments") -> Json | None:
    """Arguments as a person sent them, with what covers of secrets stand for. A cover that covers nothing is 422."""
    if arguments is None or not draft.policy.secret:
        return arguments
    shown = ((wait.ask if wait else None) or {}).get("effect") or {}
    ends = seal.tails(draft.policy.secret)
    found: Json = seal.unmask(arguments, shown.get("arguments") or {}, ends, "/arguments")
    if seal.masked(found):
        raise invalid(pointer, f"{seal.MASK} stands for a value that is not shown, and there is none here.")
    return found


def _wait_answer(caller: Caller, draft: Draft, wait_id: str) -> Json:
    wait = draft.state.wait_by_id(wait_id)
    assert wait is not None
    shape = shapes.wait(wait, callback_base=settings.PUBLIC_URL, secrets=_may_hand_on(caller, draft.run))
    return dict(_reveal(draft, caller, shape))


def _may_hand_on(caller: Caller, run: Run) -> bool:
    return not caller.is_person or caller.may(run.workspace_id, "operator")


def _eligible(draft: Draft, wait: WaitState, caller: Caller) -> None:
    """Those who may decide, and operators, may move a wait along."""
    if not caller.may(draft.run.workspace_id, "operator"):
        waiting.require_eligible(draft, wait, caller.id)


def _tend(caller: Caller, wait_id: str, operation: str, work: Callable[[Draft, WaitState], Any]) -> Json:
    """Something done with a wait that does not decide it; the wait as it stands after it."""
    _, draft, wait_id = _wait_change(caller, wait_id, operation, "reviewer", work)
    return _wait_answer(caller, draft, wait_id)


def _move_along(caller: Caller, wait_id: str, operation: str, work: Callable[[Draft, WaitState], Any]) -> Json:
    """The same, by somebody who may decide it, or an operator."""

    def eligible(draft: Draft, wait: WaitState) -> None:
        _eligible(draft, wait, caller)
        work(draft, wait)

    return _tend(caller, wait_id, operation, eligible)


def claim_wait(caller: Caller, wait_id: str, body: cmd.WaitAction) -> Json:
    def work(draft: Draft, wait: WaitState) -> None:
        waiting.require_eligible(draft, wait, caller.id)
        waiting.take(draft, wait)

    return _tend(caller, wait_id, "claim", work)


def release_wait(caller: Caller, wait_id: str, body: cmd.WaitAction) -> Json:
    def work(draft: Draft, wait: WaitState) -> None:
        if wait.claimed_by != caller.id:
            _eligible(draft, wait, caller)
        waiting.give_back(draft, wait)

    return _tend(caller, wait_id, "release", work)


def assign_wait(caller: Caller, wait_id: str, body: cmd.AssignWait) -> Json:
    return _move_along(caller, wait_id, "assign", lambda draft, wait: waiting.assign(draft, wait, body))


def extend_wait(caller: Caller, wait_id: str, body: cmd.ExtendWait) -> Json:
    return _move_along(caller, wait_id, "extend", lambda draft, wait: waiting.extend(draft, wait, body))


def escalate_wait(caller: Caller, wait_id: str, body: cmd.WaitAction) -> Json:
    return _move_along(caller, wait_id, "escalate", lambda draft, wait: waiting.escalate(draft, wait, body))


def request_info(caller: Caller, wait_id: str, body: cmd.WaitAction) -> Json:
    return _move_along(caller, wait_id, "request_info", lambda draft, wait: waiting.request_info(draft, wait, body))


def comment_wait(caller: Caller, wait_id: str, body: cmd.WaitAction) -> Json:
    return _tend(caller, wait_id, "comment", lambda draft, wait: waiting.comment(draft, wait, body))


def _bounded(parts: Json) -> None:
    """What people send along is inline data of one event, too: at most 16 KiB each."""
    for name, part in parts.items():
        if part is not None:
            check_inline(part, f"/{name}")


# -- people hold the wheel


def _run_change(
    caller: Caller, run_id: str, operation: str, work: Callable[[Draft], Any], *, settles: bool = False
) -> Json:
    """The decision made, with the run as it stands after it; the run alone where no decision was made."""
    run_id = _uuid(run_id, "run")
    if not caller.is_person:
        _refused_agent(caller, run_id, run_id, operation)

    def act(draft: Draft) -> None:
        if settles:
            _not_requester(draft)
        work(draft)

    _, draft = ledger.change(run_id, act, actor=caller.actor(), operation=operation, check=_holds(caller, "operator"))
    run = selectors.get_run(caller, run_id)
    made = list(draft.state.decisions.values())
    if not made:
        return run
    return {**dict(_reveal(draft, caller, shapes.decision(made[-1]))), "run": run}


def takeover(caller: Caller, run_id: str, body: cmd.Reasoned) -> Json:
    return _run_change(caller, run_id, "takeover", lambda draft: core.takeover(draft, body))


def handback(caller: Caller, run_id: str, body: cmd.Handback) -> Json:
    _bounded({"checkpoint": body.checkpoint, **{f"answers/{i}": each for i, each in enumerate(body.answers)}})

    def work(draft: Draft) -> None:
        answers = [
            replace(answer, arguments=_unmasked(draft, draft.state.wait_by_id(answer.wait), answer.arguments))
            for answer in body.answers
        ]
        core.handback(draft, replace(body, answers=answers))

    return _run_change(caller, run_id, "handback", work, settles=True)


def terminate(caller: Caller, run_id: str, body: cmd.Reasoned) -> Json:
    return _run_change(caller, run_id, "terminate", lambda draft: core.terminate(draft, body))


def retry(caller: Caller, run_id: str, body: cmd.Retry) -> Json:
    """Grants more tries. What is due of a run that was set aside is tried again by it, whatever else it grants."""
    aside = selectors.trouble(caller, run_id)
    if aside is not None and aside["set_aside_at"] is not None:
        try_again(caller, run_id, body.reason)
        return selectors.get_run(caller, run_id)
    return _run_change(caller, run_id, "retry", lambda draft: core.retry(draft, body), settles=True)


def try_again(caller: Caller, run_id: str, reason: str) -> None:
    """A person has what is due of a run tried again that was set aside; the next tick does."""
    aside = selectors.trouble(caller, run_id)
    if not caller.is_person:
        raise Refusal("agents_cannot_decide", "Agents never decide: this needs a person.", subject=run_id)
    if aside is None:
        raise Refusal("not_resumable", "What is due could be applied: there is nothing to be tried again.")
    _person(caller, aside["run"]["workspace_id"], "operator")
    sweep.try_again(aside["run"]["id"], by=caller.id, reason=reason, channel=caller.channel)


def clear(caller: Caller, run_id: str, body: cmd.Clear) -> Json:
    _bounded({"checkpoint": body.checkpoint})
    return _run_change(caller, run_id, "clear", lambda draft: core.clear(draft, body), settles=True)


def reconcile(caller: Caller, run_id: str, key: str, body: cmd.Reconcile) -> Json:
    _bounded({"receipt": body.receipt})
    return _run_change(caller, run_id, "reconcile", lambda draft: core.reconcile(draft, key, body), settles=True)


def sign_off(caller: Caller, run_id: str, key: str, body: cmd.Reasoned) -> Json:
    return _run_change(caller, run_id, "sign_off", lambda draft: core.sign_off(draft, key, body), settles=True)
