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
    seq: int
    type: str
    actor: Actor
    at: c.When
    payload: Object
    prev_hash: str
    hash: str


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
    last_error: Any
    escalation: Any


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


class Verdict(Shape):
    outcome: Outcome
    reasons: list[Reason]
    missing: list[str]
    next: Any
    recommended: Any


class Decision(Shape):
    id: Uuid
    kind: Literal["wait", "clear", "retry", "reconcile", "handback", "sign_off", "terminate"]
    wait: Uuid | None
    wait_version: int | None
    choice: str | None
    arguments: Object | None
    response: Any
    conditions: list[Object]
    expires_at: c.When | None
    reason: str
    comment: str
    decided_by: Any
    decided_at: c.When
    seen: Object | None


class Effect(Shape):
    key: str
    state: EffectState
    system: str
    action: str
    resource: str | None
    arguments: Object | None
    fingerprint: str
    impact: str
    attempt: int
    receipt: Object | None
    error: Object | None
    compensation: Object | None
    late: bool
    approval: Any
    title: str
    granted: bool | UnsetType | None = UNSET


class Wait(Shape):
    id: Uuid
    run: Any
    name: str
    kind: WaitKind
    status: WaitStatus
    version: int
    due_at: c.When | None
    on_timeout: c.OnTimeout | None
    correlation: str | None
    ask: Object | None
    callback_url: str | None
    assignees: list[Any]
    votes: list[Any]
    decision: Object | None
    signal: Object | None
    opened_at: c.When
    closed_at: c.When | None


class RunHead(Shape):
    """A run without its lists."""

    id: Uuid
    workspace: str
    flow: str
    external_id: str
    title: str
    status: RunStatus
    stage: str | None
    version: int
    created_at: c.When
    updated_at: c.When
    ended_at: c.When | None


class Run(RunHead):
    metadata: Metadata
    verdict: Verdict
    checkpoint: Object | None
    input: Object | None
    agent: Object | None
    waits: list[Wait]
    effects: list[Effect]
    labels: dict[str, str]
    failure_count: int
    last_error: Any
    escalation: Any
    ready_since: c.When | None
    requested_by: str | None


class Lease(Shape):
    epoch: int
    holder: str
    seconds: int
    expires_at: c.When


# -- answers to agents -----------------------------------------------------------------------------------------------


class Opened(Shape):
    run: Run
    lease: Lease | None


class Appended(Shape):
    run: RunHead
    events: list[Object]
    effects: list[Object]
    waits: list[Object]
    lease: Lease | None


class Leased(Shape):
    lease: Lease | None


class Released(Shape):
    run: RunHead


class Envelope(Shape):
    verdict: Verdict
    lease: Lease | None
    run: Any
    metadata: Metadata
    checkpoint: Object | None
    passed: list[str]
    input: Object | None
    waits: list[Object]
    effects: list[Object]
    undo: list[str]


class SignalTaken(Shape):
    signal_id: str
    state: Literal["matched", "buffered", "duplicate", "superseded", "late"]
    matched: list[Uuid]


class HookTaken(Shape):
    signal_id: str
    state: Literal["matched", "buffered", "duplicate", "superseded", "late"]


class Decided(Decision):
    pass


class Evidence(Shape):
    run: Any
    events: list[Event]
    decisions: list[Any]


# -- lists -----------------------------------------------------------------------------------------------------------


class Page(Shape):
    next: str | None
    total: int


class Runs(Page):
    results: list[RunHead]


class Waits(Page):
    results: list[Wait]


class Events(Page):
    results: list[Event]


class Signals(Page):
    results: list[Object]


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
