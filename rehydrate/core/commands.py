"""The bodies of all requests as typed structs, shared by the API, the console and the ledger. No rules: those are in decide.

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


# -- parts ---------------------------------------------------------------------------------------------------------


class Input(Body):
    ref: Ref | None = None
    digest: Digest | None = None


class AgentInfo(Body):
    name: Name | None = None
    version: Name | None = None
    framework: Name | None = None
    reads: list[Name] = []


class Amount(Body):
    value: Annotated[str, Meta(pattern=r"^-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?$")]
    currency: Annotated[str, Meta(pattern=r"^[A-Z]{3}$")]


class Error(Body):
    code: Line
    message: Text = ""


class Compensation(Body):
    action: Name
    system: Name | None = None
    arguments: Object | None = None


class Receipt(Body):
    id: Line | None = None
    status: Literal["accepted", "done"] = "done"
    url: Ref | None = None
    data: Any = None


class Detail(Body):
    label: Line
    value: Any = None


class EvidenceLink(Body):
    title: Line
    url: Ref | None = None


class AskEffect(Body):
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


class Ask(Body):
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


class WaitSpec(Body, rename={"from_": "from"}):
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


class Condition(Body):
    pointer: Annotated[str, Meta(max_length=500, pattern=r"^(/[^/]*)*$")]
    op: Literal["==", "!=", "<", "<=", ">", ">=", "in", "not_in", "exists"]
    value: Any = None


# -- what an agent appends ------------------------------------------------------------------------------------------


class AgentEvent(Body, tag_field="type"):
    """One event of an agent; the tag is its type."""


class Checkpoint(AgentEvent, tag="checkpoint"):
    stage: Name
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None
    state: Any = None
    next: Annotated[list[Any], Meta(max_length=100)] = []


class WaitOpened(AgentEvent, tag="wait.opened"):
    wait: WaitSpec


class EffectPlanned(AgentEvent, tag="effect.planned"):
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


class EffectStarted(AgentEvent, tag="effect.started"):
    key: Id
    attempt: Annotated[int, Meta(ge=1)] | None = None
    arguments: Object | None = None
    arguments_digest: Digest | None = None


class EffectExecuted(AgentEvent, tag="effect.executed"):
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


class EffectFailed(AgentEvent, tag="effect.failed"):
    key: Id
    error: Error
    attempt: Annotated[int, Meta(ge=1)] | None = None


class EffectUnknown(AgentEvent, tag="effect.unknown"):
    key: Id
    error: Error | None = None


class EffectNotExecuted(AgentEvent, tag="effect.not_executed"):
    key: Id
    evidence: Any = None


class EffectCompensating(AgentEvent, tag="effect.compensating"):
    key: Id
    attempt: Annotated[int, Meta(ge=1)] | None = None


class EffectCompensated(AgentEvent, tag="effect.compensated"):
    key: Id
    receipt: Receipt = Receipt()


class EffectCompensationFailed(AgentEvent, tag="effect.compensation_failed"):
    key: Id
    error: Error


class EffectCompensationUnknown(AgentEvent, tag="effect.compensation_unknown"):
    key: Id
    error: Error | None = None


class ExternalRef(AgentEvent, tag="external_ref"):
    """`ref_type` is the reference's own type: beside the event's `type` it cannot have that name (in `payload` it can)."""

    system: Name
    id: Annotated[str, Meta(min_length=1, max_length=500)]
    ref_type: Name | None = None
    url: Ref | None = None


class Failed(AgentEvent, tag="failed"):
    error: Error
    retryable: bool = True
    retry_in: Seconds | None = None


class Cancelled(AgentEvent, tag="cancelled"):
    reason: Text = ""


class Note(AgentEvent, tag="note"):
    text: Text


class Paused(AgentEvent, tag="paused"):
    waits: Annotated[list[WaitSpec], Meta(min_length=1, max_length=100)]
    resume_when: Literal["all", "any", "each"] = "all"


class Result(Body):
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None


class Completed(AgentEvent, tag="completed"):
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

# -- bodies of an agent's requests ----------------------------------------------------------------------------------


class OpenRun(Body):
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
    events: list[Any] = []


class Append(Body):
    """`events` are parsed one by one, so that a receipt is kept when its neighbour is refused (rule 9)."""

    epoch: Epoch
    events: Annotated[list[Any], Meta(min_length=1, max_length=1000)]


class Heartbeat(Body):
    epoch: Epoch


class Release(Body):
    epoch: Epoch
    retry_in: Seconds | None = None


class Recall(Body):
    holder: Name
    reason: Text
    lease_seconds: LeaseSeconds | None = None


class Rehydrate(Body):
    holder: Name
    agent: AgentInfo | None = None
    input_digest: Digest | None = None
    lease_seconds: LeaseSeconds | None = None


class Claim(Body):
    flows: Annotated[list[Name], Meta(min_length=1, max_length=100)]
    holder: Name
    agent: AgentInfo | None = None
    lease_seconds: LeaseSeconds | None = None
    wait: Annotated[int, Meta(ge=0, le=30)] = 0


class Signal(Body):
    id: Id
    name: Name
    run: Id | None = None
    flow: Name | None = None
    external_id: Annotated[str, Meta(min_length=1, max_length=300)] | None = None
    correlation: NonEmptyLine | None = None
    payload: Any = None
    occurred_at: When | None = None
    sequence: Annotated[int, Meta(ge=0, le=2**53 - 1)] | None = None


# -- bodies of people's requests ------------------------------------------------------------------------------------


class Decide(Body):
    choice: Choice
    wait_version: Version
    arguments: Object | None = None
    response: Any = None
    conditions: Annotated[list[Condition], Meta(max_length=50)] = []
    expires_at: When | None = None
    reason: Text = ""
    comment: Text = ""
    seen: Object | None = None


class WaitAction(Body):
    """`claim`, `release`, `escalate`, `request_info`, `comment`."""

    reason: Text = ""
    comment: Text = ""


class AssignWait(Body):
    to: Name
    reason: Text = ""


class ExtendWait(Body):
    due_at: When | None = None
    due_in: Annotated[int, Meta(ge=1)] | None = None
    reason: Text = ""


class AssignSignal(Body):
    wait: Id
    reason: Text = ""


class Reasoned(Body):
    """`takeover`, `terminate`, `sign_off`."""

    reason: NonEmptyLine


class CheckpointRef(Body):
    ref: Ref | None = None
    digest: Digest | None = None
    data: Any = None


class Answer(Body):
    wait: Id
    choice: Choice
    arguments: Object | None = None
    response: Any = None
    reason: Text = ""


class HandEffect(Body):
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


class Handback(Body):
    reason: NonEmptyLine
    stage: Name | None = None
    checkpoint: CheckpointRef | None = None
    note: Text = ""
    answers: Annotated[list[Answer], Meta(max_length=100)] = []
    effects: Annotated[list[HandEffect], Meta(max_length=200)] = []
    needed_engineer: bool = False


class Retry(Body):
    reason: NonEmptyLine
    effect: Id | None = None
    tries: Annotated[int, Meta(ge=1, le=100)] = 1


class RefIn(Body):
    system: Name
    id: Annotated[str, Meta(min_length=1, max_length=500)]
    type: Name | None = None
    url: Ref | None = None


class Clear(Body):
    reason: NonEmptyLine
    codes: Annotated[list[Name], Meta(min_length=1, max_length=50)]
    stage: Name | None = None
    checkpoint: CheckpointRef | None = None
    input: Input | None = None
    external_refs: Annotated[list[RefIn], Meta(max_length=100)] = []
    agent_version: Name | None = None


class Reconcile(Body):
    reason: NonEmptyLine
    outcome: Literal["executed", "not_executed", "compensated"]
    receipt: Receipt | None = None


# -- readiness (contract.md section 8) --------------------------------------------------------------------------------


class LookedUp(Body):
    what: Line
    where: Line = ""


class Readiness(Body):
    flow: Name
    happened_outside: bool = False
    spans_days: bool = False
    looked_up: Annotated[list[LookedUp], Meta(max_length=100)] = []
