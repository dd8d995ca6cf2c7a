"""The facts of a run: one frozen struct for each event kind, with `dump` and `parse`. What may happen is in decide.

A fact carries everything that `evolve` needs, so that folding the events alone gives the state again (no policy, no
clock). Times inside payloads are absolute and in UTC. `VERSION` grows when a payload changes its meaning; `parse` reads
all older ones.
"""

from datetime import datetime
from typing import Any

import msgspec
from msgspec import Struct

VERSION = 1


class Fact(Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """One fact; its tag is the event's type."""


class Actor(Struct, frozen=True):
    """Who did it: `kind` is agent, person or system; `id` is a key's id or a user name."""

    kind: str
    id: str
    name: str


SYSTEM = Actor(kind="system", id="ledger", name="Rehydrate")


class Recorded(Struct, frozen=True):
    """A fact in its place: the envelope that is hashed and stored."""

    seq: int
    at: datetime
    actor: Actor
    fact: Fact


# -- the run


class RunOpened(Fact, frozen=True, tag="run.opened"):
    workspace: str
    flow: str
    external_id: str
    title: str = ""
    input: dict[str, Any] | None = None
    agent: dict[str, Any] | None = None
    labels: dict[str, str] = {}
    requested_by: str | None = None
    opened_by: str | None = None
    trace_id: str | None = None
    policy: int = 0
    failure_limit: int = 3


class LeaseGranted(Fact, frozen=True, tag="lease.granted"):
    """A lease, with what the next `seconds` are for: `purpose` is continue or compensate; `via` names the call."""

    epoch: int
    holder: str
    seconds: int
    expires_at: datetime
    purpose: str
    via: str
    agent: dict[str, Any] | None = None


class LeaseLapsed(Fact, frozen=True, tag="lease.lapsed"):
    """Nobody renewed the lease in time; it counts as a failure (rule 17)."""

    epoch: int
    holder: str
    due_at: datetime


class LeaseRetaken(Fact, frozen=True, tag="lease.retaken"):
    """Its own holder took the lease back: the old epoch ends here."""

    epoch: int
    holder: str


class Released(Fact, frozen=True, tag="released"):
    epoch: int
    retry_at: datetime | None = None


class Recalled(Fact, frozen=True, tag="recalled"):
    """The agent withdrew its open waits."""

    reason: str
    waits: list[str] = []


class VerdictChanged(Fact, frozen=True, tag="verdict"):
    """Without a lease the status follows the verdict (section 3); recorded when it changes."""

    status: str
    outcome: str
    reasons: list[dict[str, Any]] = []
    escalated: bool = False
    alarm_at: datetime | None = None


class Checkpointed(Fact, frozen=True, tag="checkpoint"):
    stage: str
    ref: str | None = None
    digest: str | None = None
    data: Any = None
    state_digest: str | None = None
    next: list[Any] = []


class ExternalRefAdded(Fact, frozen=True, tag="external_ref"):
    system: str
    id: str
    ref_type: str | None = None
    url: str | None = None


class RunFailed(Fact, frozen=True, tag="failed"):
    error: dict[str, Any]
    retryable: bool = True
    retry_at: datetime | None = None
    undoing: bool = False


class RunCancelled(Fact, frozen=True, tag="cancelled"):
    reason: str = ""


class Noted(Fact, frozen=True, tag="note"):
    text: str


class RunPaused(Fact, frozen=True, tag="paused"):
    """The pause with its waits in order: `waits` are opened here, `named` lists the keys of all that count."""

    resume_when: str
    waits: list[dict[str, Any]] = []
    named: list[str] = []
    superseded: list[str] = []
    missing: list[str] = []
    policy: int = 0
    sticky_rejection: dict[str, Any] | None = None


class RunCompleted(Fact, frozen=True, tag="completed"):
    result: dict[str, Any] | None = None
    status: str = "completed"


class RunUnclaimed(Fact, frozen=True, tag="run.unclaimed"):
    """Ready for longer than the flow's `claim_within`, and nobody came: an alarm."""

    ready_since: datetime


class RunEscalated(Fact, frozen=True, tag="run.escalated"):
    """People are told, once: it failed as often as the flow allows."""

    why: str
    failures: int


class ResumeMismatched(Fact, frozen=True, tag="resume.mismatched"):
    """An agent came with another input or another version than the pause had; a person must say how it goes on."""

    input_digest: str | None = None
    agent_version: str | None = None


class RefusedFact(Fact, frozen=True, tag="refused"):
    """A refusal that matters to an auditor (rule 14)."""

    operation: str
    code: str
    message: str
    subject: str | None = None
    detail: dict[str, Any] | None = None
    mismatch: bool = False


class RunTerminated(Fact, frozen=True, tag="terminated"):
    """The end without success: by a person, or by the ledger after a no (`code`)."""

    code: str
    reason: str = ""
    decision: str | None = None


# -- effects


class EffectPlanned(Fact, frozen=True, tag="effect.planned"):
    key: str
    system: str
    action: str
    fingerprint: str
    resource: str | None = None
    arguments: dict[str, Any] | None = None
    arguments_digest: str | None = None
    impact: str = "low"
    reversible: bool | None = None
    compensation: dict[str, Any] | None = None
    amount: dict[str, Any] | None = None
    gates: list[str] = []
    gated: bool = False
    repeat: bool = False
    retry_safe: bool = False
    lookup: bool = False
    title: str = ""
    implicit: bool = False


class EffectReplanned(Fact, frozen=True, tag="effect.replanned"):
    """Other arguments for the same key: a reviewer's edit, or within an approval's conditions."""

    key: str
    arguments: dict[str, Any] | None
    arguments_digest: str
    fingerprint: str
    why: str
    wait: str | None = None  # whose answer it is; the other open asks about this effect get a new version


class EffectStarted(Fact, frozen=True, tag="effect.started"):
    key: str
    attempt: int
    epoch: int
    arguments: dict[str, Any] | None = None
    arguments_digest: str | None = None
    fingerprint: str | None = None


class EffectExecuted(Fact, frozen=True, tag="effect.executed"):
    key: str
    receipt: dict[str, Any] = {}
    late: bool = False
    sanitised: bool = False
    despite: bool = False


class EffectRepeated(Fact, frozen=True, tag="effect.repeated"):
    """A second receipt with another id: it happened twice outside."""

    key: str
    receipt: dict[str, Any] = {}
    late: bool = False


class EffectConflict(Fact, frozen=True, tag="effect.receipt_conflict"):
    """A receipt that contradicts what a person reconciled."""

    key: str
    reported: str
    receipt: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    late: bool = False


class EffectFailed(Fact, frozen=True, tag="effect.failed"):
    key: str
    error: dict[str, Any]
    late: bool = False
    sanitised: bool = False


class EffectUnknown(Fact, frozen=True, tag="effect.unknown"):
    key: str
    error: dict[str, Any] | None = None


class EffectNotExecuted(Fact, frozen=True, tag="effect.not_executed"):
    key: str
    evidence: Any = None


class EffectCompensating(Fact, frozen=True, tag="effect.compensating"):
    key: str
    attempt: int
    epoch: int


class EffectCompensated(Fact, frozen=True, tag="effect.compensated"):
    key: str
    receipt: dict[str, Any] = {}
    late: bool = False


class CompensationFailed(Fact, frozen=True, tag="effect.compensation_failed"):
    key: str
    error: dict[str, Any]


class CompensationUnknown(Fact, frozen=True, tag="effect.compensation_unknown"):
    key: str
    error: dict[str, Any] | None = None


class EffectWithdrawn(Fact, frozen=True, tag="effect.withdrawn"):
    key: str
    why: str


class EffectReconciled(Fact, frozen=True, tag="effect.reconciled"):
    """A person found out: `outcome` is executed, not_executed or compensated."""

    decision: str
    key: str
    outcome: str
    reason: str
    receipt: dict[str, Any] | None = None


class EffectSignedOff(Fact, frozen=True, tag="effect.signed_off"):
    decision: str
    key: str
    reason: str


# -- waits


class WaitOpened(Fact, frozen=True, tag="wait.opened"):
    wait: dict[str, Any]


class WaitVoted(Fact, frozen=True, tag="wait.decided"):
    """A person's structured answer: a vote below the quorum (`closes` false), or the decision that closes the wait."""

    decision: str
    wait: str
    wait_version: int
    choice: str
    closes: bool
    voids: bool = False
    arguments: dict[str, Any] | None = None
    response: Any = None
    conditions: list[dict[str, Any]] = []
    expires_at: datetime | None = None
    reason: str = ""
    comment: str = ""
    seen: dict[str, Any] | None = None


class WaitSatisfied(Fact, frozen=True, tag="wait.satisfied"):
    """A timer came due."""

    wait: str
    due_at: datetime


class WaitTimedOut(Fact, frozen=True, tag="wait.timed_out"):
    """The deadline passed without an answer; `then` is what happens by policy."""

    wait: str
    due_at: datetime
    then: str


class WaitSignalled(Fact, frozen=True, tag="wait.signalled"):
    wait: str
    signal: dict[str, Any]


class SignalNoted(Fact, frozen=True, tag="signal.noted"):
    """A signal for this run that answers no wait: late, superseded or ambiguous. Kept; resumes nothing by itself."""

    signal: dict[str, Any]
    state: str


class WaitSuperseded(Fact, frozen=True, tag="wait.superseded"):
    waits: list[str]
    why: str


class WaitReminded(Fact, frozen=True, tag="wait.reminded"):
    wait: str
    scheduled_for: datetime
    next_at: datetime | None = None


class WaitEscalated(Fact, frozen=True, tag="wait.escalated"):
    wait: str
    scheduled_for: datetime
    to: list[str] = []
    due_at: datetime | None = None
    why: str = ""
    last_call: bool = False


class WaitClaimed(Fact, frozen=True, tag="wait.claimed"):
    wait: str
    by: str | None = None


class WaitAssigned(Fact, frozen=True, tag="wait.assigned"):
    wait: str
    to: str
    reason: str = ""


class WaitExtended(Fact, frozen=True, tag="wait.extended"):
    wait: str
    due_at: datetime
    reason: str = ""
    remind_at: datetime | None = None


class WaitInfoRequested(Fact, frozen=True, tag="wait.info_requested"):
    wait: str
    text: str


class WaitCommented(Fact, frozen=True, tag="wait.commented"):
    wait: str
    text: str


class WaitPolicyChanged(Fact, frozen=True, tag="wait.policy_changed"):
    """Groups, members or the wait's policy changed: the version grows; the people who may decide now."""

    wait: str
    policy: dict[str, Any]
    unsatisfiable: bool = False


# -- people hold the wheel


class TakenOver(Fact, frozen=True, tag="taken_over"):
    reason: str
    superseded: list[str] = []


class HandedBack(Fact, frozen=True, tag="handed_back"):
    """A decision: the run is ready at the stage and checkpoint that the person named."""

    decision: str
    reason: str
    stage: str | None = None
    checkpoint: dict[str, Any] | None = None
    note: str = ""
    answers: list[dict[str, Any]] = []
    effects: list[str] = []
    needed_engineer: bool = False


class Cleared(Fact, frozen=True, tag="cleared"):
    decision: str
    codes: list[str]
    reason: str
    stage: str | None = None
    checkpoint: dict[str, Any] | None = None
    input: dict[str, Any] | None = None
    external_refs: list[dict[str, Any]] = []
    agent_version: str | None = None


class RetryGranted(Fact, frozen=True, tag="retry_granted"):
    decision: str
    reason: str
    tries: int
    effect: str | None = None


_ALL: tuple[type[Fact], ...] = tuple(
    value for value in globals().values() if isinstance(value, type) and issubclass(value, Fact) and value is not Fact
)
BY_TYPE: dict[str, type[Fact]] = {str(kind.__struct_config__.tag): kind for kind in _ALL}


def type_of(fact: Fact) -> str:
    """The event type of a fact, such as `effect.planned`."""
    return str(fact.__struct_config__.tag)


def dump(fact: Fact) -> dict[str, Any]:
    """The payload as JSON-ready builtins; times as RFC 3339 in UTC."""
    payload: dict[str, Any] = msgspec.to_builtins(fact)
    del payload["type"]
    return payload


def parse(type_: str, payload: dict[str, Any]) -> Fact:
    """The fact of a stored event. Raises KeyError for a type that no version of this program wrote."""
    return msgspec.convert({"type": type_, **payload}, BY_TYPE[type_])
