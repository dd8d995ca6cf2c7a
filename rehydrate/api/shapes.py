"""The shapes of answers (contract.md section 6, "Shapes"), for the schema and for the tests that hold answers to them.

Nothing is parsed or written through these: services and selectors give plain values.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from rehydrate.core import commands as c

Uuid = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
Object = dict[str, Any]
RunStatus = Literal["running", "waiting", "ready", "review", "compensating", "taken_over", "completed", "terminated"]
WaitStatus = Literal["open", "satisfied", "rejected", "timed_out", "cancelled", "superseded"]
EffectState = Literal[
    "planned",
    "started",
    "executed",
    "failed",
    "unknown",
    "compensating",
    "compensated",
    "compensation_unknown",
    "withdrawn",
]
WaitKind = Literal["approval", "timer", "callback", "signal"]
DeliveryStatus = Literal["pending", "set_aside", "delivered", "given_up", "withdrawn"]
DeliveryType = Literal["run.ready", "run.compensating", "run.review", "run.ended", "wait.opened"]
Outcome = Literal["continue", "wait", "compensate", "review", "terminate"]


class Shape(Struct, kw_only=True):
    """An answer or a part of one. A later version may add fields."""


# -- problems --------------------------------------------------------------------------------------------------------


class Fault(Shape):
    """One place of a body that does not fit."""

    pointer: str
    detail: str


class Problem(Shape):
    """RFC 9457. `code` is stable; `detail` says what to do; the rest is the object as it stands."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[Fault] | UnsetType = UNSET
    effect: Object | UnsetType | None = UNSET
    wait: Object | UnsetType | None = UNSET
    held_by: Any = UNSET
    run_status: str | UnsetType | None = UNSET
    recorded: list[Object] | UnsetType = UNSET


# -- the ledger ------------------------------------------------------------------------------------------------------


class Actor(Shape):
    kind: Literal["agent", "person", "system"]
    id: str
    name: str


class Event(Shape):
    """`payload` is as it was hashed; an auditor gets its secret fields as well, in `revealed`."""

    seq: int
    type: str
    actor: Actor
    at: c.When
    payload: Object
    prev_hash: str
    hash: str
    revealed: Object | UnsetType = UNSET


class RunCheckpoint(Shape):
    seq: int
    ref: str | None
    digest: str | None


class WaitingFor(Shape, rename={"from_": "from"}):
    name: str
    kind: WaitKind
    from_: str | None
    until: c.When | None
    on_timeout: str | None


class Ref(Shape):
    system: str
    type: str | None
    id: str


class EffectKey(Shape):
    key: str
    state: EffectState


class DecisionMade(Shape):
    kind: str
    choice: str | None
    by: str
    at: c.When
    conditions: list[Object]


class Failures(Shape):
    count: int
    limit: int
    last_error: Object | None
    escalation: int


class Metadata(Shape):
    """The ten fields (contract.md section 2): the smallest set from which a run can be put back together."""

    run_id: Uuid
    stage: str | None
    checkpoint: RunCheckpoint | None
    input_ref: str | None
    waiting_for: list[WaitingFor]
    timer_due_at: c.When | None
    external_refs: list[Ref]
    effect_keys: list[EffectKey]
    decisions: list[DecisionMade]
    failures: Failures


class Reason(Shape):
    code: str
    message: str
    subject: str | None


class ReasonHead(Shape):
    code: str
    subject: str | None
    message: str | UnsetType = UNSET


class Verdict(Shape):
    outcome: Outcome
    reasons: list[Reason]
    missing: list[str]
    next: Object
    recommended: Object


class Decision(Shape):
    id: Uuid
    run: Uuid
    kind: Literal["wait", "clear", "retry", "reconcile", "handback", "sign_off", "terminate"]
    wait: Uuid | None
    wait_name: str | None
    wait_version: int | None
    effect: str | None
    choice: str | None
    closes: bool
    arguments: Object | None
    response: Any
    conditions: list[Object]
    expires_at: c.When | None
    reason: str
    comment: str
    decided_by: str
    decided_by_name: str
    decided_at: c.When
    seen: Object | None
    detail: Object | None


class Effect(Shape):
    """`granted` says, in the answer to an append, whether this call started it."""

    key: str
    state: EffectState
    title: str
    system: str
    action: str
    resource: str | None
    arguments: Object | None
    arguments_digest: str | None
    amount: Object | None
    fingerprint: str
    impact: str
    reversible: bool | None
    attempt: int
    receipt: Object | None
    error: Object | None
    compensation: Object | None
    undo_receipt: Object | None
    undo_attempt: int
    undo_failures: int
    late: bool
    gated: bool
    gates: list[str]
    approval: Object | None
    repeat: bool
    repeated: int
    retry_safe: bool
    lookup: bool
    conflict: bool
    evidence: Any
    reconciled: Object | None
    signed_off: Object | None
    planned_at: c.When | None
    started_at: c.When | None
    executed_at: c.When | None
    updated_at: c.When | None
    granted: bool | UnsetType = UNSET


class Wait(Shape, rename={"from_": "from"}):
    """`callback_url` is there only for those who may hand it on."""

    id: Uuid
    run: Uuid
    key: str
    name: str
    kind: WaitKind
    status: WaitStatus
    version: int
    due_at: c.When
    on_timeout: c.OnTimeout
    on_reject: c.OnReject
    correlation: str | None
    from_: str | None
    ask: Object | None
    choices: list[c.Choice]
    callback_url: str | None
    assignees: list[str]
    groups: list[str]
    assigned_to: str | None
    claimed_by: str | None
    votes: list[Object]
    quorum: int
    decision: Object | None
    signal: Object | None
    info_requested: Object | None
    escalation: int
    why: str | None
    opened_at: c.When
    closed_at: c.When | None


class RunInput(Shape):
    ref: str | None
    digest: str | None


class Lease(Shape):
    epoch: int
    holder: str
    seconds: int
    expires_at: c.When


class RunHead(Shape):
    """A run without its lists; `outcome` and `reasons` are those of the verdict when the status was last set."""

    id: Uuid
    workspace: str
    flow: str
    external_id: str
    title: str
    status: RunStatus
    stage: str | None
    version: int
    checkpoint: Object | None
    input: RunInput
    agent: Object | None
    labels: dict[str, str]
    failure_count: int
    last_error: Object | None
    escalation: int
    outcome: str
    reasons: list[ReasonHead]
    alarms: list[Object]
    lease: Lease | None
    taken_over: Object | None
    retry_at: c.When | None
    ready_since: c.When | None
    unclaimed_at: c.When | None
    status_since: c.When | None
    requested_by: str | None
    opened_by: str | None
    trace_id: str | None
    created_at: c.When
    updated_at: c.When
    ended_at: c.When | None
    result: Object | None


class VerdictHead(Shape):
    """The verdict when the status was last set, in short."""

    outcome: str
    reasons: list[ReasonHead]


class RunItem(RunHead):
    """A run in a list."""

    flow_title: str
    verdict: VerdictHead


class Timer(Shape):
    """Something that becomes due by itself: `then` is where a deadline leads, `to` who is reminded or asked next."""

    kind: str
    subject: str | None
    due_at: c.When
    then: str | None
    to: list[str]


class Trouble(Shape):
    """What is due could not be applied: how often that was tried, and whether an operator must have it tried again."""

    tries: int
    since: c.When
    tried_at: c.When
    retry_at: c.When | None
    set_aside_at: c.When | None
    error: str


class Run(RunHead):
    metadata: Metadata
    verdict: Verdict
    waits: list[Wait]
    effects: list[Effect]
    decisions: list[Decision]
    external_refs: list[Object]
    passed: list[str]
    flow_title: str | UnsetType = UNSET
    timers: list[Timer] | UnsetType = UNSET
    trouble: Trouble | UnsetType | None = UNSET


# -- answers to agents -------------------------------------------------------------------------------------------------


class Opened(Shape):
    """`lease` is null after a `paused`, without a `holder`, and for a run that was known."""

    run: Run
    lease: Lease | None


class Noted(Shape):
    """An event of the batch in its place; one that stood already is told with the place of its plan."""

    seq: int | None
    type: str
    at: c.When | None
    key: str | None


class Appended(Shape):
    run: RunHead
    events: list[Noted]
    effects: list[Effect]
    waits: list[Wait]
    lease: Lease | None


class Leased(Shape):
    lease: Lease | None
    run: RunHead


class Released(Shape):
    run: RunHead


class Envelope(Shape):
    """The run put back together: what must happen now, with all that is needed for it."""

    verdict: Verdict
    lease: Lease | None
    run: RunHead
    metadata: Metadata
    checkpoint: Object | None
    passed: list[str]
    input: RunInput
    waits: list[Wait]
    effects: list[Effect]
    undo: list[str]
    handback: Object | None


class SignalTaken(Shape):
    signal_id: Uuid
    state: Literal["matched", "buffered", "duplicate", "superseded", "late"]
    matched: list[Uuid]


class Decided(Decision):
    """The decision, with what became of the wait and the run."""

    wait_status: WaitStatus
    votes: list[Object]
    run_status: RunStatus


class Settled(Decision):
    """A person's decision about a run, with the run as it stands after it."""

    run: Run  # type: ignore[assignment]


class Chain(Shape):
    """How the events prove themselves: each hash is over the one before and the event's canonical JSON."""

    algorithm: str
    first: str | None
    last: str | None
    length: int


class Evidence(Shape):
    run: Run
    events: list[Event]
    decisions: list[Decision]
    chain: Chain


class SignalKept(Shape):
    id: Uuid
    name: str
    sender: str
    sender_id: str
    payload: Any
    occurred_at: c.When | None
    sequence: int | None
    received_at: c.When
    state: Literal["received", "buffered", "matched", "superseded", "late", "ambiguous"]
    run: Uuid | None
    flow: str | None
    external_id: str | None
    correlation: str | None
    wait: Uuid | None
    candidates: list[Uuid]


class DeliveryReceiver(Shape):
    """Where the flow's deliveries go, and its failures in a row. `switched_off_why` is `gone` after a 410."""

    id: Uuid
    url: str | None
    failures: int
    switched_off_at: c.When | None
    switched_off_why: str | None
    answered_at: c.When | None


class Delivery(Shape):
    """`id` is the `webhook-id`. `attempt` counts the attempts begun; `last_error` is a stable code."""

    id: Uuid
    type: DeliveryType
    wait: str | None
    run: Uuid
    run_title: str
    workspace: str
    flow: str
    external_id: str
    run_status: RunStatus
    run_version: int
    at: c.When
    status: DeliveryStatus
    sending: bool
    attempt: int
    next_try_at: c.When | None
    last_status: int | None
    last_error: str | None
    closed_at: c.When | None
    receiver: DeliveryReceiver


class DeliveryAttempt(Shape):
    """`answer` is the beginning of what the receiver said. Without `seconds` it is under way, or `interrupted`."""

    number: int
    url: str
    started_at: c.When
    seconds: float | None
    status: int | None
    error: str | None
    detail: str | None
    answer: str | None


class DeliveryData(Shape):
    run_id: Uuid
    flow: str
    external_id: str
    status: RunStatus
    version: int


class DeliveryBody(Shape):
    """What is POSTed."""

    type: DeliveryType
    timestamp: c.When
    data: DeliveryData


class DeliveryWhole(Delivery):
    """With its attempts, the first one first, and what is sent."""

    attempts: list[DeliveryAttempt]
    body: DeliveryBody


# -- callers -----------------------------------------------------------------------------------------------------------


class MyWorkspace(Shape):
    """`roles` are a person's; an agent has none."""

    name: str
    roles: list[str]


class Me(Shape):
    """Who asks. `flows` are those that an agent's key allows, `["*"]` for all; `owner` is who answers for that key."""

    kind: Literal["agent", "person"]
    name: str
    owner: str | None
    workspaces: list[MyWorkspace]
    flows: list[str]


# -- lists -------------------------------------------------------------------------------------------------------------


class Page(Shape):
    next: str | None
    total: int


class Runs(Page):
    results: list[RunItem]


class Waits(Page):
    results: list[Wait]


class Events(Page):
    results: list[Event]


class Deliveries(Page):
    results: list[Delivery]


class Signals(Page):
    results: list[SignalKept]


# -- metrics and readiness -------------------------------------------------------------------------------------------


class Duration(Shape):
    median: float | None
    p95: float | None
    count: int


class Share(Shape):
    count: int
    of: int
    share: float | None


class Takeovers(Shape):
    per_100_runs: float | None
    count: int
    of: int
    mean_handling_seconds: float | None


class Recovery(Shape, rename={"from_": "from"}):
    from_: c.When
    to: c.When
    flow: str | None
    pause_to_resume_seconds: Duration
    missing_metadata: Share
    repeated_effects: Share
    takeovers: Takeovers
    undetermined_timeouts: Share
    engineer_needed: Share


class Advice(Shape):
    field: str
    send: str
    example: Any


class ReadinessReport(Shape):
    needs_ledger: bool
    present: list[Any]
    missing: list[Any]
    advice: list[Advice]
