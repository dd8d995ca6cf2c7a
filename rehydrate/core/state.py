"""The state of a run, and `evolve(state, recorded) -> state`: the only way in which facts change it. No rules here.

The structs have the names and types of the columns (rehydrate/models.py): a row decodes into its struct, and a struct
is written as its row. A state may be partial (`complete` false): then it holds the open waits, those of the latest
pause, the effects that need attention and those that the command names; `evolve` never needs more.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from rehydrate.core import events as ev
from rehydrate.core.canonical import instant

ENDED: Final = frozenset({"completed", "terminated"})
#: Effect states in which it is not known what happened, or in which somebody is acting right now.
UNSETTLED: Final = frozenset({"started", "unknown", "compensating", "compensation_unknown"})
#: Effect states that a rule may ask about although nobody names the effect: a partial state has all of these.
ATTENTION: Final = ("planned", "failed", "started", "unknown", "compensating", "compensation_unknown")
#: The reasons that a hand-back settles: the person says where it goes on, and answers for it (rule 15).
SETTLED_BY_HANDBACK: Final = (
    "human_gate",
    "rejected",
    "timed_out",
    "cancelled",
    "timeout_undetermined",
    "metadata_missing",
    "condition_unmet",
    "approval_expired",
)


class Run(Struct, frozen=True, kw_only=True):
    """The run's own row; see models.Run for what each column is for."""

    id: str
    workspace_id: str = ""
    flow: str = ""
    external_id: str = ""
    title: str = ""
    status: str = "ready"
    stage: str | None = None
    version: int = 0
    last_hash: str = "0" * 64
    policy: int = 0
    input_ref: str | None = None
    input_digest: str | None = None
    agent: dict[str, Any] | None = None
    labels: dict[str, str] = {}
    requested_by: str | None = None
    opened_by: str | None = None
    trace_id: str | None = None
    checkpoint: dict[str, Any] | None = None
    passed: list[str] = []
    epoch: int = 0
    holder: str | None = None
    lease_seconds: int = 0
    lease_expires_at: datetime | None = None
    lease_purpose: str | None = None
    pause: int = 0
    paused_at: datetime | None = None
    resume_when: str | None = None
    pause_waits: list[str] = []
    missing: list[str] = []
    rejection: dict[str, Any] | None = None
    cancelled: dict[str, Any] | None = None
    cleared: list[str] = []
    alarms: list[dict[str, Any]] = []
    mismatch: dict[str, Any] | None = None
    failure_count: int = 0
    failure_limit: int = 3
    undo_failures: int = 0
    last_error: dict[str, Any] | None = None
    not_retryable: bool = False
    escalation: int = 0
    retry_at: datetime | None = None
    taken_over: dict[str, Any] | None = None
    handback: dict[str, Any] | None = None
    ref_count: int = 0
    decision_count: int = 0
    effect_count: int = 0
    outcome: str = ""
    reasons: list[dict[str, Any]] = []
    ready_since: datetime | None = None
    alarm_at: datetime | None = None
    unclaimed_at: datetime | None = None
    status_since: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    ended_at: datetime | None = None
    result: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def leased(self) -> bool:
        """True while a lease is recorded; whether it lapsed is for the clock to say (rule 6 applies that first)."""
        return self.lease_expires_at is not None


class Wait(Struct, frozen=True, kw_only=True):
    id: str
    run_id: str = ""
    key: str = ""
    name: str = ""
    kind: str = "approval"
    status: str = "open"
    version: int = 1
    due_at: datetime
    length: int = 0
    on_timeout: str = "review"
    on_reject: str = "review"
    correlation: str | None = None
    source: str | None = None
    token: str | None = None
    ask: dict[str, Any] | None = None
    effect_key: str | None = None
    risk: str | None = None
    policy: dict[str, Any] = {}
    groups: list[str] = []
    votes: list[dict[str, Any]] = []
    decision: dict[str, Any] | None = None
    signal: dict[str, Any] | None = None
    claimed_by: str | None = None
    assigned_to: str | None = None
    info_requested: dict[str, Any] | None = None
    remind_at: datetime | None = None
    escalate_at: datetime | None = None
    escalation: int = 0
    unsatisfiable: bool = False
    pause: int = 0
    consumed: bool = False
    why: str | None = None
    opened_at: datetime | None = None
    closed_at: datetime | None = None

    @property
    def open(self) -> bool:
        return self.status == "open"


class Effect(Struct, frozen=True, kw_only=True):
    run_id: str = ""
    key: str
    state: str = "planned"
    system: str = ""
    action: str = ""
    resource: str | None = None
    arguments: dict[str, Any] | None = None
    arguments_digest: str | None = None
    fingerprint: str = ""
    first_fingerprint: str = ""
    impact: str = "low"
    reversible: bool | None = None
    amount: dict[str, Any] | None = None
    compensation: dict[str, Any] | None = None
    gates: list[str] = []
    gated: bool = False
    approvals: dict[str, dict[str, Any]] = {}
    repeat: bool = False
    retry_safe: bool = False
    lookup: bool = False
    implicit: bool = False
    title: str = ""
    attempt: int = 0
    started_epoch: int = 0
    receipt: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    late: bool = False
    undo_attempt: int = 0
    undo_failures: int = 0
    undo_receipt: dict[str, Any] | None = None
    reconciled: dict[str, Any] | None = None
    conflict: bool = False
    signed_off: dict[str, Any] | None = None
    repeated: int = 0
    evidence: Any = None
    planned_seq: int = 0
    executed_seq: int = 0
    planned_at: datetime | None = None
    started_at: datetime | None = None
    executed_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def approval(self) -> dict[str, Any] | None:
        """The approval that counts first: of the gates the first that lacks a yes, else the latest asked for."""
        if not self.gates:
            return max(self.approvals.values(), key=lambda approval: str(approval["at"]), default=None)
        found = [self.approvals.get(name) for name in self.gates]
        lacking = (a for a in found if a is None or a["status"] not in ("approved", "used"))
        return next(lacking, found[0])

    @property
    def authorised(self) -> bool:
        """True when every gate has a person's yes (or the deadline's, where the flow allows that)."""
        approval = self.approval
        return not self.gated or (approval is not None and approval["status"] in ("approved", "used"))

    @property
    def undoable(self) -> bool:
        """Executed, with an undo declared, and no person said that it stays."""
        return self.state == "executed" and self.compensation is not None and self.signed_off is None


class Decision(Struct, frozen=True, kw_only=True):
    id: str
    run_id: str = ""
    seq: int = 0
    kind: str = "wait"
    wait_id: str | None = None
    wait_name: str | None = None
    wait_version: int | None = None
    effect_key: str | None = None
    choice: str | None = None
    closes: bool = True
    arguments: dict[str, Any] | None = None
    response: Any = None
    conditions: list[dict[str, Any]] = []
    expires_at: datetime | None = None
    reason: str = ""
    comment: str = ""
    decided_by: str = ""
    decided_by_name: str = ""
    decided_at: datetime
    seen: dict[str, Any] | None = None
    detail: dict[str, Any] | None = None


class Ref(Struct, frozen=True, kw_only=True):
    run_id: str = ""
    system: str
    type: str | None = None
    ref_id: str
    url: str | None = None


class State(Struct, frozen=True):
    """A run with its waits and effects by key. `decisions` and `refs` hold what was read (only an envelope needs that)
    and what the facts since have added; `opaque` is the agent's state at the checkpoint, encrypted, where it was read.
    """

    run: Run
    waits: dict[str, Wait] = field(default_factory=dict)
    effects: dict[str, Effect] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    refs: dict[tuple[str, str | None, str], Ref] = field(default_factory=dict)
    complete: bool = True
    opaque: bytes | None = None

    def wait_by_id(self, wait_id: str) -> Wait | None:
        return next((wait for wait in self.waits.values() if wait.id == wait_id), None)

    def pause_list(self) -> list[Wait]:
        """The waits of the latest pause, in the order given."""
        return [self.waits[key] for key in self.run.pause_waits if key in self.waits]

    def open_waits(self) -> list[Wait]:
        return [wait for wait in self.waits.values() if wait.open]


def in_part(state: State, *, keys: set[str], wait_keys: set[str], prints: set[str]) -> State:
    """A complete state as `loading.load_runs` loads it in part: the rules of that statement, in words of the core.

    Open waits, those of the latest pause and those named; effects that need attention, that an open wait asks about,
    that are named, or that are the same act (`prints`).
    """
    waits = {
        key: wait for key, wait in state.waits.items() if wait.open or wait.pause == state.run.pause or key in wait_keys
    }
    asked = {wait.effect_key for wait in state.open_waits()}
    effects = {
        key: effect
        for key, effect in state.effects.items()
        if effect.state in ATTENTION
        or key in keys
        or key in asked
        or {effect.fingerprint, effect.first_fingerprint} & prints
    }
    return State(state.run, waits, effects, complete=False)


# -- evolve

Handler = Callable[[State, Any, ev.Recorded], State]
_HANDLERS: dict[type[ev.Fact], Handler] = {}


def _on(*kinds: type[ev.Fact]) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for kind in kinds:
            _HANDLERS[kind] = handler
        return handler

    return register


def evolve(state: State, recorded: ev.Recorded) -> State:
    """The state after one recorded fact. Pure; never raises on what `decide` allowed."""
    state = _HANDLERS[type(recorded.fact)](state, recorded.fact, recorded)
    return _run(state, version=recorded.seq, updated_at=recorded.at)


def fold(run_id: str, history: list[ev.Recorded]) -> State:
    """The state of a run from all its events, the first being `run.opened`."""
    state = State(Run(id=run_id))
    for recorded in history:
        state = evolve(state, recorded)
    return state


def _run(state: State, /, **changes: Any) -> State:
    return replace(state, run=replace(state.run, **changes))


def _wait(state: State, wait_id: str, /, **changes: Any) -> State:
    """Change a wait by its id or its key; one that is not loaded is none of this state's business."""
    wait = state.waits.get(wait_id) or state.wait_by_id(wait_id)
    if wait is None:
        return state
    return replace(state, waits={**state.waits, wait.key: replace(wait, **changes)})


def _effect(state: State, key: str, rec: ev.Recorded, /, **changes: Any) -> State:
    effect = state.effects.get(key)
    if effect is None:
        return state
    return replace(state, effects={**state.effects, key: replace(effect, updated_at=rec.at, **changes)})


def _status(state: State, status: str, rec: ev.Recorded, **changes: Any) -> State:
    """Set the status; the time in it counts from the change."""
    if status != state.run.status:
        changes = {"status_since": rec.at, **changes}
    return _run(state, status=status, **changes)


def _no_lease(state: State, **changes: Any) -> State:
    return _run(state, holder=None, lease_expires_at=None, lease_purpose=None, **changes)


def _close(state: State, keys: list[str], status: str, rec: ev.Recorded, why: str | None = None) -> State:
    for key in keys:
        wait = state.waits.get(key) or state.wait_by_id(key)
        if wait is not None and wait.open:
            state = _wait(state, wait.key, status=status, closed_at=rec.at, why=why)
    return state


def _end(state: State, status: str, rec: ev.Recorded, why: str) -> State:
    """The end of a run closes its waits and timers (rule 13)."""
    state = _close(state, [wait.key for wait in state.open_waits()], "cancelled", rec, why)
    return _no_lease(
        _status(state, status, rec),
        ended_at=rec.at,
        ready_since=None,
        retry_at=None,
        alarm_at=None,
        taken_over=None,
        mismatch=None,
    )


@_on(ev.RunOpened)
def _opened(state: State, fact: ev.RunOpened, rec: ev.Recorded) -> State:
    given = fact.input or {}
    run = Run(
        id=state.run.id,
        workspace_id=fact.workspace,
        flow=fact.flow,
        external_id=fact.external_id,
        title=fact.title,
        status="ready",
        policy=fact.policy,
        input_ref=given.get("ref"),
        input_digest=given.get("digest"),
        agent=fact.agent,
        labels=fact.labels,
        requested_by=fact.requested_by,
        opened_by=fact.opened_by,
        trace_id=fact.trace_id,
        failure_limit=fact.failure_limit,
        ready_since=rec.at,
        status_since=rec.at,
        created_at=rec.at,
    )
    return replace(state, run=run)


@_on(ev.LeaseGranted)
def _granted(state: State, fact: ev.LeaseGranted, rec: ev.Recorded) -> State:
    state = _status(state, "compensating" if fact.purpose == "compensate" else "running", rec)
    for wait in state.pause_list():
        if not wait.open and not wait.consumed:  # the agent is told this answer now: it counts for this pause only
            state = _wait(state, wait.key, consumed=True)
    return _run(
        state,
        epoch=fact.epoch,
        holder=fact.holder,
        lease_seconds=fact.seconds,
        lease_expires_at=fact.expires_at,
        lease_purpose=fact.purpose,
        agent=fact.agent if fact.agent is not None else state.run.agent,
        ready_since=None,
        retry_at=None,
        mismatch=None,
        alarm_at=None,
        unclaimed_at=None,
    )


def _failure(run: Run, *, undoing: bool) -> dict[str, Any]:
    if undoing:
        return {"undo_failures": run.undo_failures + 1}
    return {"failure_count": run.failure_count + 1}


@_on(ev.LeaseLapsed)
def _lapsed(state: State, fact: ev.LeaseLapsed, rec: ev.Recorded) -> State:
    run = state.run
    undoing = run.lease_purpose == "compensate"
    return _no_lease(
        state,
        **_failure(run, undoing=undoing),
        last_error={"code": "lease_lost", "message": f"{fact.holder} did not renew its lease in time"},
    )


@_on(ev.LeaseRetaken)
def _retaken(state: State, fact: ev.LeaseRetaken, rec: ev.Recorded) -> State:
    return _no_lease(state)


@_on(ev.Released)
def _released(state: State, fact: ev.Released, rec: ev.Recorded) -> State:
    return _no_lease(state, retry_at=fact.retry_at)


@_on(ev.Recalled)
def _recalled(state: State, fact: ev.Recalled, rec: ev.Recorded) -> State:
    # What was asked is withdrawn. What was answered, or ran out of time, was no ask any more and counts as before.
    state = _close(state, fact.waits, "superseded", rec, fact.reason)
    return _run(state, missing=[])


@_on(ev.VerdictChanged)
def _verdict(state: State, fact: ev.VerdictChanged, rec: ev.Recorded) -> State:
    claimable = fact.status in ("ready", "compensating")
    since = state.run.ready_since if state.run.status == fact.status and state.run.ready_since else rec.at
    state = _status(state, fact.status, rec)
    return _run(
        state,
        outcome=fact.outcome,
        reasons=fact.reasons,
        ready_since=since if claimable else None,
        alarm_at=fact.alarm_at if since == rec.at or state.run.alarm_at is None else state.run.alarm_at,
        unclaimed_at=state.run.unclaimed_at if claimable else None,
        escalation=state.run.escalation + fact.escalated,
        retry_at=None if fact.status == "ready" else state.run.retry_at,
    )


def _move(state: State, stage: str | None, checkpoint: dict[str, Any] | None) -> State:
    run = state.run
    passed = run.passed if stage is None or stage in run.passed else [*run.passed, stage]
    return _run(
        state, stage=stage if stage is not None else run.stage, passed=passed, checkpoint=checkpoint or run.checkpoint
    )


@_on(ev.Checkpointed)
def _checkpointed(state: State, fact: ev.Checkpointed, rec: ev.Recorded) -> State:
    checkpoint = {
        "seq": rec.seq,
        "stage": fact.stage,
        "ref": fact.ref,
        "digest": fact.digest or fact.state_digest,
        "data": fact.data,
        "next": fact.next,
        "has_state": fact.state_digest is not None,
    }
    return _move(state, fact.stage, checkpoint)


def _person_checkpoint(given: dict[str, Any] | None, stage: str | None, rec: ev.Recorded) -> dict[str, Any] | None:
    if given is None:
        return None
    return {
        "seq": rec.seq,
        "stage": stage,
        "ref": given.get("ref"),
        "digest": given.get("digest"),
        "data": given.get("data"),
        "next": [],
        "has_state": False,
    }


def _add_ref(state: State, ref: Ref) -> State:
    # Counted each time it is given: a state that was loaded does not hold the references from before, and must
    # count as the fold of all events does.
    key = (ref.system, ref.type, ref.ref_id)
    state = _run(state, ref_count=state.run.ref_count + 1)
    return state if key in state.refs else replace(state, refs={**state.refs, key: ref})


@_on(ev.ExternalRefAdded)
def _referenced(state: State, fact: ev.ExternalRefAdded, rec: ev.Recorded) -> State:
    return _add_ref(
        state, Ref(run_id=state.run.id, system=fact.system, type=fact.ref_type, ref_id=fact.id, url=fact.url)
    )


@_on(ev.RunFailed)
def _failed(state: State, fact: ev.RunFailed, rec: ev.Recorded) -> State:
    run = state.run
    return _no_lease(
        state,
        **_failure(run, undoing=fact.undoing),
        last_error=fact.error,
        not_retryable=not fact.retryable,
        retry_at=fact.retry_at,
    )


@_on(ev.RunCancelled)
def _cancelled(state: State, fact: ev.RunCancelled, rec: ev.Recorded) -> State:
    state = _close(state, [wait.key for wait in state.open_waits()], "cancelled", rec, fact.reason)
    return _run(
        state,
        cancelled={"reason": fact.reason, "by": rec.actor.id},
        cleared=[c for c in state.run.cleared if c != "cancelled"],
    )


@_on(ev.Noted, ev.WaitCommented)
def _noted(state: State, fact: ev.Noted, rec: ev.Recorded) -> State:
    return state


def _open_wait(state: State, given: dict[str, Any], rec: ev.Recorded) -> State:
    due_at = datetime.fromisoformat(given["due_at"])
    ask = given.get("ask")
    policy = given.get("policy") or {}
    wait = Wait(
        id=given["id"],
        run_id=state.run.id,
        key=given["key"],
        name=given["name"],
        kind=given["kind"],
        due_at=due_at,
        length=given["length"],
        on_timeout=given["on_timeout"],
        on_reject=given["on_reject"],
        correlation=given.get("correlation"),
        source=given.get("from"),
        token=given.get("token"),
        ask=ask,
        effect_key=((ask or {}).get("effect") or {}).get("key"),
        risk=(ask or {}).get("risk"),
        policy=policy,
        groups=policy.get("groups") or [],
        remind_at=_time(given.get("remind_at")),
        escalate_at=_time(given.get("escalate_at")),
        opened_at=rec.at,
    )
    state = replace(state, waits={**state.waits, wait.key: wait})
    if wait.effect_key is not None and wait.effect_key in state.effects:
        effect = state.effects[wait.effect_key]
        again: dict[str, Any] = {"state": "planned"} if effect.state == "withdrawn" else {}
        if (effect.approvals.get(wait.name) or {}).get("status") not in ("approved", "used"):
            again["approvals"] = _with(
                effect.approvals,
                wait.name,
                {"wait": wait.id, "name": wait.name, "status": "asked", "at": instant(rec.at)},
            )
        state = _effect(state, effect.key, rec, gated=True, **again)
    return state


def _with(approvals: dict[str, Any], name: str, approval: dict[str, Any]) -> dict[str, Any]:
    return {**approvals, name: approval}


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


@_on(ev.WaitOpened)
def _wait_opened(state: State, fact: ev.WaitOpened, rec: ev.Recorded) -> State:
    return _open_wait(state, fact.wait, rec)


@_on(ev.RunPaused)
def _paused(state: State, fact: ev.RunPaused, rec: ev.Recorded) -> State:
    state = _close(state, fact.superseded, "superseded", rec, "a later pause does not name it")
    for given in fact.waits:
        state = _open_wait(state, given, rec)
    for key in fact.named:
        state = _wait(state, key, pause=rec.seq)
    return _no_lease(
        state,
        pause=rec.seq,
        paused_at=rec.at,
        resume_when=fact.resume_when,
        pause_waits=fact.named,
        missing=fact.missing,
        policy=fact.policy,
        rejection=fact.sticky_rejection,
        cleared=[],
        handback=None,
        retry_at=None,
    )


@_on(ev.RunCompleted)
def _completed(state: State, fact: ev.RunCompleted, rec: ev.Recorded) -> State:
    return _run(_end(state, fact.status, rec, "the run ended"), result=fact.result)


@_on(ev.RunTerminated)
def _terminated(state: State, fact: ev.RunTerminated, rec: ev.Recorded) -> State:
    state = _end(state, "terminated", rec, fact.reason or "the run was ended")
    if fact.decision is None:
        return state
    return _decided(state, rec, id=fact.decision, kind="terminate", choice="terminate", reason=fact.reason)


@_on(ev.RunUnclaimed)
def _unclaimed(state: State, fact: ev.RunUnclaimed, rec: ev.Recorded) -> State:
    return _run(state, unclaimed_at=rec.at, alarm_at=None)


@_on(ev.RunEscalated)
def _run_escalated(state: State, fact: ev.RunEscalated, rec: ev.Recorded) -> State:
    return _run(state, escalation=state.run.escalation + 1)


@_on(ev.ResumeMismatched)
def _mismatched(state: State, fact: ev.ResumeMismatched, rec: ev.Recorded) -> State:
    return _run(state, mismatch={"input_digest": fact.input_digest, "agent_version": fact.agent_version})


def _alarm(state: State, code: str, subject: str | None) -> State:
    alarm = {"code": code, "subject": subject}
    state = _run(state, cleared=[c for c in state.run.cleared if c != code])
    return state if alarm in state.run.alarms else _run(state, alarms=[*state.run.alarms, alarm])


@_on(ev.RefusedFact)
def _refused(state: State, fact: ev.RefusedFact, rec: ev.Recorded) -> State:
    if not fact.mismatch:
        return state
    # Rule 10: what was to run is not what was approved. The run goes to review, and the lease ends.
    return _no_lease(_alarm(state, fact.code, fact.subject))


# -- effects


@_on(ev.EffectPlanned)
def _planned(state: State, fact: ev.EffectPlanned, rec: ev.Recorded) -> State:
    known = state.effects.get(fact.key)
    effect = Effect(
        run_id=state.run.id,
        key=fact.key,
        system=fact.system,
        action=fact.action,
        resource=fact.resource,
        arguments=fact.arguments,
        arguments_digest=fact.arguments_digest,
        fingerprint=fact.fingerprint,
        first_fingerprint=fact.fingerprint,
        impact=fact.impact,
        reversible=fact.reversible,
        amount=fact.amount,
        compensation=fact.compensation,
        gates=fact.gates,
        gated=fact.gated,
        repeat=fact.repeat,
        retry_safe=fact.retry_safe,
        lookup=fact.lookup,
        implicit=fact.implicit,
        title=fact.title,
        planned_seq=rec.seq,
        planned_at=rec.at,
        updated_at=rec.at,
    )
    if known is not None:  # planned by its ask before: the agent's own plan only adds to it
        effect = replace(
            effect,
            state=known.state,
            approvals=known.approvals,
            gated=effect.gated or known.gated,
            planned_seq=known.planned_seq,
            planned_at=known.planned_at,
            arguments=known.arguments,
            arguments_digest=known.arguments_digest,
            fingerprint=known.fingerprint,
            first_fingerprint=known.first_fingerprint,
            attempt=known.attempt,
        )
    state = replace(state, effects={**state.effects, fact.key: effect})
    return state if known is not None else _run(state, effect_count=state.run.effect_count + 1)


@_on(ev.EffectReplanned)
def _replanned(state: State, fact: ev.EffectReplanned, rec: ev.Recorded) -> State:
    state = _effect(
        state,
        fact.key,
        rec,
        arguments=fact.arguments,
        arguments_digest=fact.arguments_digest,
        fingerprint=fact.fingerprint,
    )
    for wait in state.open_waits():
        if wait.effect_key == fact.key and wait.id != fact.wait:  # whoever looks at it now sees something else
            state = _wait(
                state,
                wait.key,
                ask=_ask_about(wait, fact),
                votes=[],
                version=wait.version + 1,
                policy=_plain(wait.policy),
            )
    return state


def _ask_about(wait: Wait, fact: ev.EffectReplanned) -> dict[str, Any]:
    ask = wait.ask or {}
    return {
        **ask,
        "effect": {**ask["effect"], "arguments": fact.arguments, "arguments_digest": fact.arguments_digest},
    }


def _plain(policy: dict[str, Any]) -> dict[str, Any]:
    """The wait's policy without what void votes had asked for."""
    return {key: value for key, value in policy.items() if key != "carried"}


@_on(ev.EffectStarted)
def _started(state: State, fact: ev.EffectStarted, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    if effect is None:
        return state
    changes: dict[str, Any] = {}
    if fact.arguments_digest is not None:
        changes = {
            "arguments": fact.arguments if fact.arguments is not None else effect.arguments,
            "arguments_digest": fact.arguments_digest,
            "fingerprint": fact.fingerprint or effect.fingerprint,
        }
    changes["approvals"] = {
        name: {**approval, "status": "used", "attempt": fact.attempt} if approval["status"] == "approved" else approval
        for name, approval in effect.approvals.items()
    }
    return _effect(
        state,
        fact.key,
        rec,
        state="started",
        attempt=fact.attempt,
        started_epoch=fact.epoch,
        started_at=rec.at,
        error=None,
        reconciled=None,
        **changes,
    )


@_on(ev.EffectExecuted)
def _executed(state: State, fact: ev.EffectExecuted, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    # A receipt that comes after the undo began tells of the effect, and takes nothing back of the undo.
    undone = effect is not None and effect.state in ("compensating", "compensated", "compensation_unknown")
    happened = {} if undone else {"state": "executed", "error": None, "executed_at": rec.at, "executed_seq": rec.seq}
    state = _effect(
        state,
        fact.key,
        rec,
        receipt=fact.receipt,
        late=fact.late,
        attempt=max(1, effect.attempt) if effect is not None else 1,
        **happened,
    )
    return _alarm(state, "executed_despite_rejection", fact.key) if fact.despite else state


@_on(ev.EffectRepeated)
def _repeated(state: State, fact: ev.EffectRepeated, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    state = _effect(state, fact.key, rec, repeated=(effect.repeated if effect else 0) + 1)
    state = _alarm(state, "effect_repeated", fact.key)
    return _run(state, escalation=state.run.escalation + 1)


@_on(ev.EffectConflict)
def _conflict(state: State, fact: ev.EffectConflict, rec: ev.Recorded) -> State:
    evidence = {"reported": fact.reported, "receipt": fact.receipt, "error": fact.error}
    effect = state.effects.get(fact.key)
    receipt = (effect.receipt if effect else None) or fact.receipt  # it proves something, whatever comes of it
    return _effect(
        state, fact.key, rec, state="unknown", conflict=True, late=fact.late, evidence=evidence, receipt=receipt
    )


@_on(ev.EffectFailed)
def _effect_failed(state: State, fact: ev.EffectFailed, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    # What a person withdrew by a no does not come back as something to try again.
    stands = "withdrawn" if effect is not None and effect.state == "withdrawn" else "failed"
    state = _effect(state, fact.key, rec, state=stands, error=fact.error, late=fact.late)
    run = state.run
    return _run(
        state,
        **_failure(run, undoing=False),
        last_error=fact.error,
    )


@_on(ev.EffectUnknown)
def _effect_unknown(state: State, fact: ev.EffectUnknown, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    attempt = max(1, effect.attempt) if effect else 1
    return _effect(state, fact.key, rec, state="unknown", error=fact.error, attempt=attempt)


@_on(ev.EffectNotExecuted)
def _not_executed(state: State, fact: ev.EffectNotExecuted, rec: ev.Recorded) -> State:
    return _effect(state, fact.key, rec, state="planned", error=None, evidence=fact.evidence)


@_on(ev.EffectCompensating)
def _compensating(state: State, fact: ev.EffectCompensating, rec: ev.Recorded) -> State:
    return _effect(
        state, fact.key, rec, state="compensating", undo_attempt=fact.attempt, started_epoch=fact.epoch, error=None
    )


@_on(ev.EffectCompensated)
def _compensated(state: State, fact: ev.EffectCompensated, rec: ev.Recorded) -> State:
    return _effect(state, fact.key, rec, state="compensated", undo_receipt=fact.receipt, error=None)


@_on(ev.CompensationFailed)
def _compensation_failed(state: State, fact: ev.CompensationFailed, rec: ev.Recorded) -> State:
    effect = state.effects.get(fact.key)
    failures = (effect.undo_failures if effect else 0) + 1
    state = _effect(state, fact.key, rec, state="executed", error=fact.error, undo_failures=failures)
    return _run(state, last_error=fact.error)


@_on(ev.CompensationUnknown)
def _compensation_unknown(state: State, fact: ev.CompensationUnknown, rec: ev.Recorded) -> State:
    return _effect(state, fact.key, rec, state="compensation_unknown", error=fact.error)


@_on(ev.EffectWithdrawn)
def _withdrawn(state: State, fact: ev.EffectWithdrawn, rec: ev.Recorded) -> State:
    return _effect(state, fact.key, rec, state="withdrawn")


# -- waits


def _decided(state: State, rec: ev.Recorded, **given: Any) -> State:
    """The state with one more decision, made by the event's actor."""
    decision = Decision(
        run_id=state.run.id,
        seq=rec.seq,
        decided_by=rec.actor.id,
        decided_by_name=rec.actor.name,
        decided_at=rec.at,
        **given,
    )
    state = replace(state, decisions={**state.decisions, decision.id: decision})
    return _run(state, decision_count=state.run.decision_count + 1)


@_on(ev.WaitVoted)
def _voted(state: State, fact: ev.WaitVoted, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="wait",
        wait_id=fact.wait,
        wait_name=wait.name if wait else None,
        wait_version=fact.wait_version,
        effect_key=wait.effect_key if wait else None,
        choice=fact.choice,
        closes=fact.closes,
        arguments=fact.arguments,
        response=fact.response,
        conditions=fact.conditions,
        expires_at=fact.expires_at,
        reason=fact.reason,
        comment=fact.comment,
        seen=fact.seen,
    )
    if wait is None:
        return state
    vote = {
        "by": rec.actor.id,
        "name": rec.actor.name,
        "choice": fact.choice,
        "at": instant(rec.at),
        "decision": fact.decision,
        "expires_at": instant(fact.expires_at),
    }
    votes = [vote] if fact.voids else [*wait.votes, vote]
    changes: dict[str, Any] = {"votes": votes, "version": wait.version + fact.voids, "info_requested": None}
    if fact.arguments is not None or fact.conditions:
        changes["policy"] = {
            **wait.policy,
            "carried": {
                "conditions": fact.conditions,
                "expires_at": instant(fact.expires_at),
                "arguments": fact.arguments,
            },
        }
    if fact.choice == "edit" and wait.ask is not None and wait.ask.get("effect"):
        edited = state.effects.get(wait.effect_key or "")
        changes["ask"] = {
            **wait.ask,
            "effect": {
                **wait.ask["effect"],
                "arguments": fact.arguments,
                "arguments_digest": edited.arguments_digest if edited else None,
            },
        }
    if fact.closes:
        carried = changes.get("policy", wait.policy).get("carried") or {}
        answer = {
            "id": fact.decision,
            "kind": "wait",
            "wait": fact.wait,
            "wait_version": fact.wait_version,
            "choice": fact.choice,
            "seen": fact.seen,
            "arguments": fact.arguments if fact.arguments is not None else carried.get("arguments"),
            "response": fact.response,
            "conditions": fact.conditions or carried.get("conditions") or [],
            "expires_at": _first(
                [carried.get("expires_at"), *(v.get("expires_at") for v in votes if _same_side(v, vote))]
            ),
            "reason": fact.reason,
            "comment": fact.comment,
            "decided_by": rec.actor.id,
            "decided_by_name": rec.actor.name,
            "decided_at": instant(rec.at),
        }
        status = "rejected" if fact.choice == "reject" else "satisfied"
        changes |= {"status": status, "closed_at": rec.at, "decision": answer}
        state = _not_cleared(state, status)
        if wait.effect_key is not None:
            state = _approve(state, wait, answer, rec)
    return _any_closed(_wait(state, wait.key, **changes), wait, rec, counts=fact.closes)


def _same_side(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (left["choice"] == "reject") is (right["choice"] == "reject")


def _first(times: list[str | None]) -> str | None:
    """The earliest of some instants: an approval of several people holds for as long as all of them said."""
    return min((text for text in times if text), key=datetime.fromisoformat, default=None)


def _not_cleared(state: State, *codes: str) -> State:
    """What was cleared before it came about is not settled by that."""
    return _run(state, cleared=[code for code in state.run.cleared if code not in codes])


def _approve(state: State, wait: Wait, answer: dict[str, Any], rec: ev.Recorded) -> State:
    """Bind the decision to the ask's effect: its key and its fingerprint as they are now (rule 10)."""
    effect = state.effects.get(wait.effect_key or "")
    if effect is None or answer["choice"] == "respond":
        return state
    approval = {
        "wait": wait.id,
        "name": wait.name,
        "status": "rejected" if answer["choice"] == "reject" else "approved",
        "fingerprint": effect.fingerprint,
        "choice": answer["choice"],
        "conditions": answer["conditions"],
        "expires_at": answer["expires_at"],
        "by": answer["decided_by"],
        "at": answer["decided_at"],
        "arguments": effect.arguments,
        "digest": effect.arguments_digest,
    }
    return _effect(state, effect.key, rec, approvals=_with(effect.approvals, wait.name, approval))


def _any_closed(state: State, wait: Wait, rec: ev.Recorded, *, counts: bool) -> State:
    """An `any` pause resolves at its first answer, which alone counts and supersedes the rest."""
    run = state.run
    if counts and run.resume_when == "any" and wait.key in run.pause_waits and run.pause == wait.pause:
        others = [key for key in run.pause_waits if key != wait.key]
        return _close(state, others, "superseded", rec, f"{wait.name} was answered first")
    return state


@_on(ev.WaitSatisfied)
def _satisfied(state: State, fact: ev.WaitSatisfied, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    state = _wait(state, fact.wait, status="satisfied", closed_at=rec.at)
    return _any_closed(state, wait, rec, counts=True) if wait else state


@_on(ev.WaitTimedOut)
def _timed_out(state: State, fact: ev.WaitTimedOut, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    state = _wait(state, fact.wait, status="timed_out", closed_at=rec.at, why=fact.then)
    state = _not_cleared(state, "timed_out", "timeout_undetermined")
    if wait is None or wait.effect_key is None or wait.effect_key not in state.effects:
        return state
    effect = state.effects[wait.effect_key]
    if (effect.approvals.get(wait.name) or {}).get("wait") != wait.id:
        return state
    approval: dict[str, Any] = {
        "wait": wait.id,
        "name": wait.name,
        "status": "approved" if fact.then == "continue" else "timed_out",
        "fingerprint": effect.fingerprint,
        "choice": "timeout_continue" if fact.then == "continue" else None,
        "conditions": [],
        "expires_at": None,
        "by": "ledger",
        "at": instant(rec.at),
        "arguments": effect.arguments,
        "digest": effect.arguments_digest,
    }
    return _effect(state, effect.key, rec, approvals=_with(effect.approvals, wait.name, approval))


@_on(ev.WaitSignalled)
def _signalled(state: State, fact: ev.WaitSignalled, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    state = _wait(state, fact.wait, status="satisfied", closed_at=rec.at, signal=fact.signal)
    return _any_closed(state, wait, rec, counts=True) if wait else state


@_on(ev.SignalNoted)
def _signal_noted(state: State, fact: ev.SignalNoted, rec: ev.Recorded) -> State:
    return state


@_on(ev.WaitSuperseded)
def _superseded(state: State, fact: ev.WaitSuperseded, rec: ev.Recorded) -> State:
    return _close(state, fact.waits, "superseded", rec, fact.why)


@_on(ev.WaitReminded)
def _reminded(state: State, fact: ev.WaitReminded, rec: ev.Recorded) -> State:
    return _wait(state, fact.wait, remind_at=fact.next_at)


@_on(ev.WaitEscalated)
def _escalated(state: State, fact: ev.WaitEscalated, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    if wait is None:
        return state
    groups = [*wait.groups, *(group for group in fact.to if group not in wait.groups)]
    return _wait(
        _run(state, escalation=state.run.escalation + 1),
        fact.wait,
        groups=groups,
        policy={**wait.policy, "groups": groups},
        due_at=fact.due_at or wait.due_at,
        on_timeout="review" if fact.last_call else wait.on_timeout,
        escalate_at=None,
        escalation=wait.escalation + 1,
        version=wait.version + 1,
        unsatisfiable=False,
    )


@_on(ev.WaitClaimed)
def _wait_claimed(state: State, fact: ev.WaitClaimed, rec: ev.Recorded) -> State:
    return _wait(state, fact.wait, claimed_by=fact.by)


@_on(ev.WaitAssigned)
def _wait_assigned(state: State, fact: ev.WaitAssigned, rec: ev.Recorded) -> State:
    return _wait(state, fact.wait, assigned_to=fact.to, claimed_by=None)


@_on(ev.WaitExtended)
def _wait_extended(state: State, fact: ev.WaitExtended, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    version = (wait.version if wait else 0) + 1
    return _wait(state, fact.wait, due_at=fact.due_at, version=version, remind_at=fact.remind_at)


@_on(ev.WaitInfoRequested)
def _info_requested(state: State, fact: ev.WaitInfoRequested, rec: ev.Recorded) -> State:
    return _wait(
        state,
        fact.wait,
        info_requested={"by": rec.actor.id, "name": rec.actor.name, "text": fact.text, "at": instant(rec.at)},
    )


@_on(ev.WaitPolicyChanged)
def _policy_changed(state: State, fact: ev.WaitPolicyChanged, rec: ev.Recorded) -> State:
    wait = state.wait_by_id(fact.wait)
    if wait is None:
        return state
    carried = {key: wait.policy[key] for key in ("carried", "asked_by") if key in wait.policy}
    return _wait(
        state,
        fact.wait,
        policy={**fact.policy, **carried},
        groups=fact.policy.get("groups") or [],
        version=wait.version + 1,
        unsatisfiable=fact.unsatisfiable,
    )


# -- people hold the wheel


@_on(ev.TakenOver)
def _taken_over(state: State, fact: ev.TakenOver, rec: ev.Recorded) -> State:
    state = _close(state, fact.superseded, "superseded", rec, "a person took over")
    held = {"by": rec.actor.id, "name": rec.actor.name, "at": instant(rec.at), "reason": fact.reason}
    return _no_lease(_status(state, "taken_over", rec), taken_over=held, ready_since=None, retry_at=None, alarm_at=None)


@_on(ev.HandedBack)
def _handed_back(state: State, fact: ev.HandedBack, rec: ev.Recorded) -> State:
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="handback",
        choice="handback",
        reason=fact.reason,
        comment=fact.note,
        detail={
            "stage": fact.stage,
            "checkpoint": fact.checkpoint,
            "answers": fact.answers,
            "effects": fact.effects,
            "needed_engineer": fact.needed_engineer,
            "taken_over": state.run.taken_over,
        },
    )
    state = _move(state, fact.stage, _person_checkpoint(fact.checkpoint, fact.stage, rec))
    for answer in fact.answers:
        wait = state.wait_by_id(answer["wait"])
        if wait is None:
            continue
        given = {
            "id": fact.decision,
            "kind": "handback",
            "wait": wait.id,
            "wait_version": wait.version,
            "choice": answer["choice"],
            "seen": None,
            "arguments": answer.get("arguments"),
            "response": answer.get("response"),
            "conditions": [],
            "expires_at": None,
            "reason": answer.get("reason", ""),
            "comment": "",
            "decided_by": rec.actor.id,
            "decided_by_name": rec.actor.name,
            "decided_at": instant(rec.at),
        }
        state = _wait(state, wait.key, decision=given)
        if answer.get("authorises"):
            state = _approve(state, wait, given, rec)
    # A hand-back settles what held the run up, as a clear does, and it passes the gate of its stage.
    return _run(
        state,
        taken_over=None,
        handback={
            "by": rec.actor.id,
            "at": instant(rec.at),
            "stage": fact.stage,
            "note": fact.note,
            # Only what was chosen: arguments and responses are with the waits, where secret fields are sealed.
            "answers": [{key: given.get(key) for key in ("wait", "choice", "authorises")} for given in fact.answers],
        },
        rejection=None,
        cancelled=None,
        alarms=[],
        mismatch=None,
        missing=[],
        failure_count=0,
        undo_failures=0,
        not_retryable=False,
        cleared=sorted({*state.run.cleared, *SETTLED_BY_HANDBACK}),
        retry_at=None,
    )


@_on(ev.Cleared)
def _cleared(state: State, fact: ev.Cleared, rec: ev.Recorded) -> State:
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="clear",
        choice="clear",
        reason=fact.reason,
        detail={"codes": fact.codes, "stage": fact.stage, "agent_version": fact.agent_version},
    )
    stage = fact.stage if fact.stage is not None else state.run.stage
    state = _move(state, fact.stage, _person_checkpoint(fact.checkpoint, stage, rec))
    for ref in fact.external_refs:
        added = Ref(
            run_id=state.run.id, system=ref["system"], type=ref.get("type"), ref_id=ref["id"], url=ref.get("url")
        )
        state = _add_ref(state, added)
    run = state.run
    changes: dict[str, Any] = {
        "cleared": sorted({*run.cleared, *fact.codes}),
        "alarms": [alarm for alarm in run.alarms if alarm["code"] not in fact.codes],
        "mismatch": None if {"input_changed", "version_changed"} & set(fact.codes) else run.mismatch,
        "not_retryable": run.not_retryable and "not_retryable" not in fact.codes,
    }
    if fact.input is not None:
        changes |= {"input_ref": fact.input.get("ref"), "input_digest": fact.input.get("digest")}
    if fact.agent_version is not None:
        changes["agent"] = {**(run.agent or {}), "version": fact.agent_version}
    return _run(state, **changes)


@_on(ev.RetryGranted)
def _retry_granted(state: State, fact: ev.RetryGranted, rec: ev.Recorded) -> State:
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="retry",
        effect_key=fact.effect,
        choice="retry",
        reason=fact.reason,
        detail={"tries": fact.tries},
    )
    for effect in list(state.effects.values()):
        if effect.undo_failures and fact.effect in (None, effect.key):
            state = _effect(state, effect.key, rec, undo_failures=0)
    # The counter restarts, with as many tries as were granted; what failed before stays in the history.
    return _run(state, failure_count=0, failure_limit=fact.tries, undo_failures=0, not_retryable=False, retry_at=None)


@_on(ev.EffectReconciled)
def _reconciled(state: State, fact: ev.EffectReconciled, rec: ev.Recorded) -> State:
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="reconcile",
        effect_key=fact.key,
        choice=fact.outcome,
        reason=fact.reason,
        detail={"receipt": fact.receipt},
    )
    effect = state.effects.get(fact.key)
    if effect is None:
        return state
    by: dict[str, Any] = {"outcome": fact.outcome, "by": rec.actor.id, "at": instant(rec.at), "reason": fact.reason}
    if effect.state == "compensation_unknown":
        by["undo"] = True  # what was found out is about the undo
    changes: dict[str, Any] = {"reconciled": by, "conflict": False, "error": None}
    if fact.outcome == "executed":
        changes |= {
            "state": "executed",
            "receipt": fact.receipt if fact.receipt is not None else effect.receipt or {},
            "executed_at": effect.executed_at or rec.at,
            "executed_seq": effect.executed_seq or rec.seq,
        }
    elif fact.outcome == "compensated":
        changes |= {"state": "compensated", "undo_receipt": fact.receipt}
    elif effect.state == "compensation_unknown":  # the undo did not happen: the effect stands
        changes |= {"state": "executed"}
    else:
        changes |= {"state": "planned", "receipt": None}
    return _effect(state, fact.key, rec, **changes)


@_on(ev.EffectSignedOff)
def _signed_off(state: State, fact: ev.EffectSignedOff, rec: ev.Recorded) -> State:
    state = _decided(
        state,
        rec,
        id=fact.decision,
        kind="sign_off",
        effect_key=fact.key,
        choice="sign_off",
        reason=fact.reason,
    )
    by = {"by": rec.actor.id, "at": instant(rec.at), "reason": fact.reason}
    return _effect(state, fact.key, rec, signed_off=by)


def after(when: datetime, seconds: int) -> datetime:
    """`when` plus whole seconds; durations never pass through local time, so daylight-saving cannot bend them."""
    return when + timedelta(seconds=seconds)
