"""The bodies of all requests as typed structs, shared by the API, the console and the ledger. No rules: those are in
decide.

Unknown fields are refused by the parser (422); texts have limits, so that no field can fill the disk.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Id = Annotated[str, Meta(min_length=1, max_length=200)]
Name = Annotated[str, Meta(min_length=1, max_length=100)]
Line = Annotated[str, Meta(max_length=500)]
NonEmptyLine = Annotated[str, Meta(min_length=1, max_length=500)]
Text = Annotated[str, Meta(max_length=4000)]
Ref = Annotated[str, Meta(max_length=2000)]
Digest = Annotated[str, Meta(min_length=1, max_length=200)]
Epoch = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Version = Annotated[int, Meta(ge=1, le=2**53 - 1)]
Seconds = Annotated[int, Meta(ge=0, le=315_360_000)]
LeaseSeconds = Annotated[int, Meta(ge=1, le=3600)]
When = Annotated[datetime, Meta(tz=True)]
Impact = Literal["low", "money", "access", "customer_promise", "compliance", "irreversible"]
Risk = Literal["low", "medium", "high"]
Choice = Literal["approve", "approve_with_conditions", "edit", "reject", "respond"]
OnTimeout = Literal["review", "reject", "escalate", "resume", "continue", "terminate"]
OnReject = Literal["compensate", "terminate", "review", "continue"]
Object = dict[str, Any]


class Body(Struct, forbid_unknown_fields=True, frozen=True):
    """A request body or a part of one."""


# -- parts


class Input(Body, frozen=True):
    ref: Ref | None = None
    digest: Digest | None = None


class AgentInfo(Body, frozen=True):
    name: Name | None = None
    version: Name | None = None
    framework: Name | None = None
    reads: list[Name] = []


class Amount(Body, frozen=True):
    value: Annotated[str, Meta(pattern=r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?$(?!\n)")]
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$(?!\n)")]


class Error(Body, frozen=True):
    code: Line
    message: Text = ""


class Compensation(Body, frozen=True):
    action: Name
    system: Name | None = None
    arguments: Object | None = None


class Receipt(Body, frozen=True):
    id: Line | None = None
    status: Literal["accepted", "done"] = "done"
    url: Ref | None = None
    data: Any = None


class Detail(Body, frozen=True):
    label: Line
    value: Any = None


class EvidenceLink(Body, frozen=True):
    title: Line
    url: Ref | None = None


class AskEffect(Body, frozen=True):
    """The effect an ask is about: only its key when it is planned, or all of it."""

    key: Id
    system: Name | None = None
    action: Name | None = None
    resource: Line | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None
    amount: Amount | None = None
    impact: Impact | None = None
    reversible: bool | None = None
    compensation: Compensation | None = None


class Ask(Body, frozen=True):
    summary: Text | None = None
    details: Annotated[list[Detail], Meta(max_length=100)] = []
    effect: AskEffect | None = None
    schema: Object | None = None
    response_schema: Object | None = None
    choices: list[Choice] | None = None
    reasons: Annotated[list[Line], Meta(max_length=50)] = []
    risk: Risk | None = None
    rationale: Text | None = None
    evidence: Annotated[list[EvidenceLink], Meta(max_length=50)] = []
    rollback: Text | None = None


class WaitSpec(Body, frozen=True, rename={"from_": "from"}):
    """A wait to open, or (with only its key) one that is open already."""

    key: Id | None = None
    name: Name | None = None
    kind: Literal["approval", "timer", "callback", "signal"] | None = None
    due_at: When | None = None
    due_in: Annotated[int, Meta(ge=1)] | None = None
    on_timeout: OnTimeout | None = None
    on_reject: OnReject | None = None
    correlation: Line | None = None
    from_: Line | None = None
    ask: Ask | None = None


class Condition(Body, frozen=True):
    pointer: Annotated[str, Meta(max_length=500, pattern=r"^(/[^/]*)*$")]
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not_in", "exists"]
    value: Any = None


# -- what an agent appends


class AgentEvent(Body, frozen=True, tag_field="type"):
    """One event of an agent; the tag is its type."""


class Checkpoint(AgentEvent, frozen=True, tag="checkpoint"):
    stage: Name
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None
    state: Any = None
    next: Annotated[list[Any], Meta(max_length=100)] = []


class WaitOpened(AgentEvent, frozen=True, tag="wait.opened"):
    wait: WaitSpec


class EffectPlanned(AgentEvent, frozen=True, tag="effect.planned"):
    key: Id
    system: Name
    action: Name
    resource: Line | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None
    impact: Impact | None = None
    reversible: bool | None = None
    compensation: Compensation | None = None
    amount: Amount | None = None
    approval: Name | None = None
    repeat: bool = False
    start: bool = False


class EffectStarted(AgentEvent, frozen=True, tag="effect.started"):
    key: Id
    attempt: Annotated[int, Meta(ge=1)] | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None


class EffectExecuted(AgentEvent, frozen=True, tag="effect.executed"):
    """The receipt; the plan's fields come along where the effect was never planned."""

    key: Id
    receipt: Receipt = Receipt()
    attempt: Annotated[int, Meta(ge=1)] | None = None
    system: Name | None = None
    action: Name | None = None
    resource: Line | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None
    impact: Impact | None = None
    reversible: bool | None = None
    compensation: Compensation | None = None
    amount: Amount | None = None
    approval: Name | None = None
    repeat: bool = False


class EffectFailed(AgentEvent, frozen=True, tag="effect.failed"):
    key: Id
    error: Error
    attempt: Annotated[int, Meta(ge=1)] | None = None


class EffectUnknown(AgentEvent, frozen=True, tag="effect.unknown"):
    key: Id
    error: Error | None = None


class EffectNotExecuted(AgentEvent, frozen=True, tag="effect.not_executed"):
    key: Id
    evidence: Any = None


class EffectCompensating(AgentEvent, frozen=True, tag="effect.compensating"):
    key: Id
    attempt: Annotated[int, Meta(ge=1)] | None = None


class EffectCompensated(AgentEvent, frozen=True, tag="effect.compensated"):
    key: Id
    receipt: Receipt = Receipt()


class EffectCompensationFailed(AgentEvent, frozen=True, tag="effect.compensation_failed"):
    key: Id
    error: Error


class EffectCompensationUnknown(AgentEvent, frozen=True, tag="effect.compensation_unknown"):
    key: Id
    error: Error | None = None


class ExternalRef(AgentEvent, frozen=True, tag="external_ref"):
    """`ref_type` is the reference's own type:

    beside the event's `type` it cannot have that name (in `payload` it can).
    """

    system: Name
    id: Annotated[str, Meta(min_length=1, max_length=500)]
    ref_type: Name | None = None
    url: Ref | None = None


class Failed(AgentEvent, frozen=True, tag="failed"):
    error: Error
    retryable: bool = True
    retry_in: Seconds | None = None


class Cancelled(AgentEvent, frozen=True, tag="cancelled"):
    reason: Text = ""


class Note(AgentEvent, frozen=True, tag="note"):
    text: Text


class Paused(AgentEvent, frozen=True, tag="paused"):
    waits: Annotated[list[WaitSpec], Meta(min_length=1, max_length=100)]
    resume_when: Literal["all", "any", "each"] = "all"


class Result(Body, frozen=True):
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None


class Completed(AgentEvent, frozen=True, tag="completed"):
    result: Result | None = None


AgentEvents = (
    Checkpoint
    | WaitOpened
    | EffectPlanned
    | EffectStarted
    | EffectExecuted
    | EffectFailed
    | EffectUnknown
    | EffectNotExecuted
    | EffectCompensating
    | EffectCompensated
    | EffectCompensationFailed
    | EffectCompensationUnknown
    | ExternalRef
    | Failed
    | Cancelled
    | Note
    | Paused
    | Completed
)

# -- bodies of an agent's requests


class OpenRun(Body, frozen=True):
    flow: Name
    external_id: Annotated[str, Meta(min_length=1, max_length=300)]
    title: Line = ""
    input: Input | None = None
    agent: AgentInfo | None = None
    holder: Name | None = None
    lease_seconds: LeaseSeconds | None = None
    labels: Annotated[dict[str, Line], Meta(max_length=50)] = {}
    requested_by: Name | None = None
    trace_id: Line | None = None
    events: Annotated[list[Any], Meta(max_length=1000)] = []


class Append(Body, frozen=True):
    """`events` are parsed one by one, so that a receipt is kept when its neighbour is refused (rule 9)."""

    epoch: Epoch
    events: Annotated[list[Any], Meta(min_length=1, max_length=1000)]


class Heartbeat(Body, frozen=True):
    epoch: Epoch


class Release(Body, frozen=True):
    epoch: Epoch
    retry_in: Seconds | None = None


class Recall(Body, frozen=True):
    holder: Name
    reason: Text
    lease_seconds: LeaseSeconds | None = None


class Rehydrate(Body, frozen=True):
    holder: Name
    agent: AgentInfo | None = None
    input_digest: Digest | None = None
    lease_seconds: LeaseSeconds | None = None


class Claim(Body, frozen=True):
    flows: Annotated[list[Name], Meta(min_length=1, max_length=100)]
    holder: Name
    agent: AgentInfo | None = None
    lease_seconds: LeaseSeconds | None = None
    wait: Annotated[int, Meta(ge=0, le=30)] = 0


class Signal(Body, frozen=True):
    id: Id
    name: Name
    run: Id | None = None
    flow: Name | None = None
    external_id: Annotated[str, Meta(min_length=1, max_length=300)] | None = None
    correlation: NonEmptyLine | None = None
    payload: Any = None
    occurred_at: When | None = None
    sequence: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None


# -- bodies of people's requests


class Decide(Body, frozen=True):
    choice: Choice
    wait_version: Version
    arguments: Object | None = None
    response: Any = None
    conditions: Annotated[list[Condition], Meta(max_length=50)] = []
    expires_at: When | None = None
    reason: Text = ""
    comment: Text = ""
    seen: Object | None = None


class WaitAction(Body, frozen=True):
    """`claim`, `release`, `escalate`, `request_info`, `comment`."""

    reason: Text = ""
    comment: Text = ""


class AssignWait(Body, frozen=True):
    to: Name
    reason: Text = ""


class ExtendWait(Body, frozen=True):
    due_at: When | None = None
    due_in: Annotated[int, Meta(ge=1)] | None = None
    reason: Text = ""


class AssignSignal(Body, frozen=True):
    wait: Id
    reason: Text = ""


class Reasoned(Body, frozen=True):
    """`takeover`, `terminate`, `sign_off`."""

    reason: NonEmptyLine


class Resend(Body, frozen=True):
    """Sends a delivery again."""

    reason: Text = ""


class CheckpointRef(Body, frozen=True):
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None


class Answer(Body, frozen=True):
    wait: Id
    choice: Choice
    arguments: Object | None = None
    response: Any = None
    reason: Text = ""


class HandEffect(Body, frozen=True):
    """An effect done by hand: a planned or unknown key, or all of a new one. `outcome` reconciles an unknown one."""

    key: Id | None = None
    outcome: Literal["executed", "not_executed", "compensated"] = "executed"
    system: Name | None = None
    action: Name | None = None
    resource: Line | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None
    amount: Amount | None = None
    impact: Impact | None = None
    receipt: Receipt = Receipt()


class Handback(Body, frozen=True):
    reason: NonEmptyLine
    stage: Name | None = None
    checkpoint: CheckpointRef | None = None
    note: Text = ""
    answers: Annotated[list[Answer], Meta(max_length=100)] = []
    effects: Annotated[list[HandEffect], Meta(max_length=200)] = []
    needed_engineer: bool = False


class Retry(Body, frozen=True):
    reason: NonEmptyLine
    effect: Id | None = None
    tries: Annotated[int, Meta(ge=1, le=100)] = 1


class RefIn(Body, frozen=True):
    system: Name
    id: Annotated[str, Meta(min_length=1, max_length=500)]
    type: Name | None = None
    url: Ref | None = None


class Clear(Body, frozen=True):
    reason: NonEmptyLine
    codes: Annotated[list[Name], Meta(min_length=1, max_length=50)]
    stage: Name | None = None
    checkpoint: CheckpointRef | None = None
    input: Input | None = None
    external_refs: Annotated[list[RefIn], Meta(max_length=100)] = []
    agent_version: Name | None = None


class Reconcile(Body, frozen=True):
    reason: NonEmptyLine
    outcome: Literal["executed", "not_executed", "compensated"]
    receipt: Receipt | None = None


# -- readiness (contract.md section 8)


class LookedUp(Body, frozen=True):
    what: Line
    where: Line = ""


class Readiness(Body, frozen=True):
    flow: Name
    happened_outside: bool = False
    spans_days: bool = False
    looked_up: Annotated[list[LookedUp], Meta(max_length=100)] = []
