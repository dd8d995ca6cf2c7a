"""The rules of contract.md section 4 as a small program of their own, written from the contract alone.

It knows one run: its lease, waits, effects and verdict; what each request must be answered with; and what time does.
Nothing of the server is imported. Where the contract leaves something open, both ways are taken (`Told` says which
came), so that what is held to is what was promised.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

ENDED = ("completed", "terminated")
STATUS = {
    "continue": "ready",
    "wait": "waiting",
    "review": "review",
    "compensate": "compensating",
    "terminate": "terminated",
}
LEASE, CLAIMED = 60, 10
DONE = ("executed", "compensating", "compensated", "compensation_unknown")
FAILURES = 3


@dataclass(frozen=True)
class Kind:
    """A kind of effect as the flow declares it."""

    key: str
    system: str
    action: str
    impact: str = "low"
    gated: bool = False
    undo: bool = False
    retry_safe: bool = False
    lookup: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        return {"of": self.key, "amount": "100.00"}


KINDS = {
    kind.key: kind
    for kind in (
        Kind("mail", "mail", "send"),
        Kind("order", "erp", "create_order", "money", gated=True, undo=True),
        Kind("grant", "crm", "grant", "access", gated=True),
        Kind("reserve", "erp", "reserve", "money", undo=True),
        Kind("pay", "bank", "pay", "money"),
        Kind("charge", "psp", "charge", "money", retry_safe=True),
        Kind("sign", "esign", "send", "customer_promise", lookup=True),
    )
}
GATES = {"order": "legal-approval", "grant": "soft-approval"}


@dataclass
class Effect:
    kind: Kind
    state: str = "planned"
    attempt: int = 0
    epoch: int = 0
    done_at: int = 0
    amount: str = "100.00"
    approval: str | None = None  # approved | rejected | timed_out | asked
    approved_amount: str | None = None
    signed_off: bool = False
    undo_failures: int = 0
    receipt: str | None = None


@dataclass
class Wait:
    key: str
    name: str
    kind: str
    due: dt.datetime
    length: float
    on_timeout: str
    quorum: int = 1
    effect: str | None = None
    status: str = "open"
    version: int = 1
    votes: dict[str, str] = field(default_factory=dict)
    choice: str | None = None
    escalated: bool = False
    undetermined: bool = False
    id: str = ""
    in_pause: bool = False
    consumed: bool = False

    @property
    def open(self) -> bool:
        return self.status == "open"

    @property
    def answered(self) -> bool:
        return self.status in ("satisfied", "rejected")


@dataclass
class Lease:
    epoch: int
    holder: str
    until: dt.datetime
    purpose: str = "continue"


@dataclass(frozen=True)
class Expected:
    """The status that an answer has, and the codes that a refusal may have."""

    status: int
    codes: tuple[str, ...] = ()


def ok(status: int = 200) -> Expected:
    return Expected(status)


def no(status: int, *codes: str) -> Expected:
    return Expected(status, codes)


@dataclass
class Model:
    on_reject: str
    epoch: int = 1
    lease: Lease | None = None
    ended: str | None = None
    held: str | None = None
    stage: str | None = None
    effects: dict[str, Effect] = field(default_factory=dict)
    waits: dict[str, Wait] = field(default_factory=dict)
    pause: list[str] = field(default_factory=list)
    resume_when: str = "all"
    cleared: set[str] = field(default_factory=set)
    cancelled: bool = False
    alarms: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    limit: int = FAILURES
    undo_failures: int = 0
    retry_at: dt.datetime | None = None
    not_retryable: bool = False
    clock: int = 0
    signals: dict[str, dict[str, Any]] = field(default_factory=dict)

    # -- what time does (rule 6)

    def let_pass(self, now: dt.datetime) -> None:
        """All that is overdue, in the order in which it came due."""
        while not self.ended:
            due = [(wait.due, wait) for wait in self.waits.values() if wait.open and wait.due <= now]
            if self.lease is not None and self.lease.until <= now:
                self.failures += 1
                if self.lease.purpose == "compensate":
                    self.undo_failures += 1
                    self.failures -= 1
                self.drop_lease()
            elif due:
                self.come_due(min(due, key=lambda pair: pair[0])[1], now)
            else:
                break
        if self.retry_at is not None and self.retry_at <= now:
            self.retry_at = None

    def come_due(self, wait: Wait, now: dt.datetime) -> None:
        if wait.kind == "timer":
            self.close(wait, "satisfied")
        elif wait.on_timeout == "escalate" and not wait.escalated:
            wait.escalated = True
            wait.version += 1
            # Whoever it goes to has all of that time, after an outage too.
            since = wait.due if now - wait.due < dt.timedelta(seconds=min(60, wait.length / 10)) else now
            wait.due = since + dt.timedelta(seconds=wait.length)
        else:
            self.close(wait, "timed_out")
            wait.undetermined = wait.on_timeout in ("review", "escalate")
            if wait.effect and wait.kind == "approval":
                effect = self.effects[wait.effect]
                if wait.on_timeout == "continue":
                    effect.approval, effect.approved_amount = "approved", effect.amount
                elif effect.approval == "asked":
                    effect.approval = "timed_out"

    def close(self, wait: Wait, status: str) -> None:
        assert wait.open
        wait.status = status
        if wait.in_pause and self.resume_when == "any" and wait.answered:
            for other in self.of_pause():
                if other.open:
                    other.status = "superseded"

    def drop_lease(self) -> None:
        """However a lease ends, what was under way has an unknown outcome."""
        self.lease = None
        for effect in self.effects.values():
            effect.state = {"started": "unknown", "compensating": "compensation_unknown"}.get(
                effect.state, effect.state
            )

    # -- the verdict (section 5)

    def of_pause(self) -> list[Wait]:
        return [self.waits[key] for key in self.pause]

    def resolved(self) -> bool:
        waits = self.of_pause()
        if self.resume_when == "all":
            return all(not wait.open for wait in waits)
        if self.resume_when == "any":
            return any(wait.answered for wait in waits) or all(not wait.open for wait in waits)
        return any(not wait.open for wait in waits)

    def the_no(self) -> tuple[str, str] | None:
        found: list[tuple[str, str]] = []
        if self.cancelled:
            found.append(("cancelled", self.on_reject))
        if self.pause and self.resolved():
            waits = self.of_pause()
            if self.resume_when == "any" and any(wait.answered for wait in waits):
                waits = [wait for wait in waits if wait.answered]
            for wait in waits:
                if wait.status == "rejected":
                    found.append(("rejected", self.on_reject))
                elif wait.status == "timed_out" and wait.on_timeout in ("reject", "terminate"):
                    found.append(("timed_out", self.on_reject))
        found = [each for each in found if each[0] not in self.cleared]
        return found[0] if found else None

    def undo_list(self) -> list[str]:
        left = [(e.done_at, key) for key, e in self.effects.items() if e.state == "executed" and e.kind.undo]
        return [key for _, key in sorted(left, reverse=True) if not self.effects[key].signed_off]

    def unsigned(self) -> list[str]:
        return [
            key
            for key, e in self.effects.items()
            if e.state == "executed" and e.kind.impact != "low" and not e.kind.undo and not e.signed_off
        ]

    def verdict(self) -> tuple[str, str]:
        """(outcome, first code)"""
        if self.ended:
            return "terminate", "run_ended"
        if self.held:
            return "wait", "taken_over"
        said = self.the_no()
        if said is not None:
            code, on_reject = said
            if on_reject == "review":
                return "review", code
            states = {e.state for e in self.effects.values()}
            if states & {"unknown", "started"}:
                return "review", "effect_unknown"
            if states & {"compensation_unknown", "compensating"}:
                return "review", "compensation_unknown"
            if on_reject != "continue" and self.unsigned() and "sign_off_needed" not in self.cleared:
                return "review", "sign_off_needed"
            undo = self.undo_list()
            if any(self.effects[key].undo_failures >= FAILURES for key in undo) or self.undo_failures >= FAILURES:
                return "review", "retries_exhausted"
            if undo:
                return ("review" if on_reject == "terminate" else "compensate"), "undo_pending"
            if on_reject != "continue":
                return "terminate", code
        for effect in self.effects.values():
            if effect.state == "unknown" and not effect.kind.retry_safe and not effect.kind.lookup:
                return "review", "effect_unknown"
            if effect.state == "compensation_unknown":
                return "review", "compensation_unknown"
        for code in self.alarms.values():
            if code not in self.cleared:
                return "review", code
        if self.pause and not self.resolved():
            return "wait", "waiting"
        if self.retry_at is not None:
            return "wait", "backing_off"
        counts = self.of_pause()
        first_answer = self.resume_when == "any" and any(wait.answered for wait in counts)
        undetermined = any(wait.status == "timed_out" and wait.undetermined for wait in counts)
        if undetermined and not first_answer and "timeout_undetermined" not in self.cleared:
            return "review", "timeout_undetermined"
        if self.failures >= self.limit:
            return "review", "retries_exhausted"
        if self.not_retryable and "not_retryable" not in self.cleared:
            return "review", "not_retryable"
        said_yes = any(wait.kind == "approval" and wait.choice in ("approve", "edit") for wait in counts)
        if self.stage == "sign" and not said_yes and "human_gate" not in self.cleared:
            return "review", "human_gate"
        return "continue", "clear"

    def status(self) -> str:
        if self.ended:
            return self.ended
        if self.held:
            return "taken_over"
        if self.lease:
            return "running" if self.lease.purpose == "continue" else "compensating"
        return STATUS[self.verdict()[0]]

    def settle(self) -> None:
        """Without a lease, a verdict that says so ends the run."""
        if not self.ended and not self.held and self.lease is None and self.verdict()[0] == "terminate":
            self.end("terminated")

    def end(self, status: str) -> None:
        self.ended = status
        self.lease = None
        for wait in self.waits.values():
            if wait.open:
                wait.status = "cancelled"
        for effect in self.effects.values():
            if effect.state == "planned":
                effect.state = "withdrawn"

    # -- leases (rule 3)

    def grant(self, holder: str, now: dt.datetime, *, seconds: int = LEASE, purpose: str = "continue") -> None:
        assert self.lease is None, "two leases at once"
        self.epoch += 1
        self.lease = Lease(self.epoch, holder, now + dt.timedelta(seconds=seconds), purpose)

    def live(self, epoch: int) -> Expected | None:
        """Why an agent's write under this epoch is refused; None when it is not."""
        if self.ended:
            return no(409, "run_ended")
        if self.lease is None or self.lease.epoch != epoch:
            return no(409, "lease_lost")
        return None

    def renew(self, now: dt.datetime) -> None:
        if self.lease is not None:
            self.lease.until = now + dt.timedelta(seconds=LEASE)

    def rehydrate(self, holder: str, now: dt.datetime) -> tuple[Expected, bool]:
        """What it is answered with, and whether that grants a lease."""
        if self.lease is not None:
            if self.lease.holder != holder:
                return no(409, "lease_held"), False
            self.drop_lease()
        outcome, _ = self.verdict()
        if outcome in ("continue", "compensate"):
            self.grant(holder, now, purpose=outcome)
            return ok(), True
        return ok(), False

    def claimable(self) -> bool:
        if self.ended or self.held or self.lease is not None:
            return False
        return self.verdict()[0] == "continue" or (self.verdict()[0] == "compensate" and self.retry_at is None)

    def cancel(self) -> None:
        self.cancelled = True
        self.cleared.discard("cancelled")
        for wait in self.waits.values():
            if wait.open:
                wait.status = "cancelled"

    def fail(self, now: dt.datetime, retry_in: int) -> None:
        assert self.lease is not None
        undoing = self.lease.purpose == "compensate"
        self.undo_failures += undoing
        self.failures += not undoing
        again = self.undo_failures < FAILURES if undoing else self.failures < self.limit
        self.retry_at = now + dt.timedelta(seconds=retry_in) if again else None
        self.drop_lease()

    # -- a person at the wheel (rule 15)

    def take_over(self, who: str) -> None:
        self.drop_lease()
        self.held, self.retry_at = who, None
        for wait in self.waits.values():
            if wait.open:
                wait.status = "superseded"

    def hand_back(self, stage: str) -> None:
        """Whatever held the run up is settled."""
        self.held, self.stage = None, stage
        self.pause, self.cancelled, self.alarms = [], False, {}
        self.failures = self.undo_failures = 0
        self.not_retryable, self.retry_at = False, None
        self.cleared.add("human_gate")

    def grant_tries(self, tries: int) -> None:
        self.failures, self.limit, self.undo_failures = 0, tries, 0
        self.not_retryable, self.retry_at = False, None
        for effect in self.effects.values():
            effect.undo_failures = 0

    def pause_on(self, keys: list[str], when: str) -> None:
        for wait in self.waits.values():
            if wait.open and wait.in_pause and wait.key not in keys:
                wait.status = "superseded"
            wait.in_pause = wait.in_pause or wait.key in keys
        self.pause, self.resume_when = keys, when
        self.cleared, self.retry_at = set(), None
        self.drop_lease()
        if when == "any" and self.resolved():
            for wait in self.of_pause():
                if wait.open:
                    wait.status = "superseded"

    # -- effects (rules 8, 9, 10, 17)

    def may_start(self, effect: Effect, amount: str) -> list[str]:
        """Why this effect may not start now, with these arguments; nothing when it may. Any of the codes will do."""
        if effect.state in DONE:
            return ["effect_already_executed"]
        if effect.state == "started" or (effect.state == "unknown" and not effect.kind.retry_safe):
            return ["effect_unknown"]
        codes = []
        if effect.kind.gated:
            if effect.approval == "rejected" or effect.state == "withdrawn":
                codes.append("approval_rejected")
            elif effect.approval != "approved":
                codes.append("approval_required")
            elif amount != effect.approved_amount:
                codes.append("approval_mismatch")
        elif effect.state == "withdrawn":
            codes.append("approval_rejected")
        elif amount != effect.amount:
            codes.append("effect_key_reused")
        assert self.lease is not None
        if self.failures >= self.limit and self.lease.purpose != "compensate":
            codes.append("retries_exhausted")
        return codes

    def started(self, effect: Effect) -> None:
        assert self.lease is not None
        effect.state, effect.epoch = "started", self.lease.epoch
        effect.attempt += 1

    def executed(self, effect: Effect, receipt: str) -> None:
        if effect.state in ("planned", "failed", "started", "unknown", "withdrawn"):
            self.clock += 1
            effect.state, effect.receipt, effect.done_at = "executed", receipt, self.clock

    def mismatch(self, effect: Effect, code: str) -> None:
        """What was to run is not what was approved: the lease ends, and a person looks at it."""
        self.alarms[effect.kind.key] = code
        self.drop_lease()

    # -- waits (rules 4, 5, 7, 10)

    def decide(self, wait: Wait, who: str, choice: str, version: int) -> Expected:
        if not wait.open:
            return no(409, "wait_closed", "wait_expired")
        if version != wait.version:
            return no(409, "stale_decision")
        if who in wait.votes:
            return no(409, "already_voted")
        effect = self.effects[wait.effect] if wait.effect else None
        if choice == "edit" and (effect is None or effect.state not in ("planned", "failed")):
            return no(422, "invalid")
        if choice == "reject":
            wait.choice = choice
            self.close(wait, "rejected")
            if effect is not None:
                effect.approval = "rejected"
                if effect.state == "planned":
                    effect.state = "withdrawn"
            return ok(201)
        if choice == "edit":
            assert effect is not None
            effect.amount = "80.00"
            for other in self.waits.values():
                if other.open and other.effect == wait.effect and (other is not wait or wait.quorum > 1):
                    other.votes.clear()
                    other.version += 1
        wait.votes[who] = choice
        if len(wait.votes) < wait.quorum and choice != "respond":  # an answer that authorises nothing needs no second
            return ok(201)
        wait.choice = choice
        self.close(wait, "satisfied")
        if effect is not None and choice in ("approve", "edit"):
            effect.approval, effect.approved_amount = "approved", effect.amount
        return ok(201)
