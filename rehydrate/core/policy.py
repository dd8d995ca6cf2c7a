"""What a flow's policy says, and its arithmetic: reminders, escalation, retries, who is excluded.

No state and no I/O.
"""

import re
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from rehydrate.core.commands import Impact, OnReject

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]+[smhdw])+")
_PART: Final = re.compile(r"([0-9]+)([smhdw])")

Duration = Annotated[str, Meta(pattern=r"^([0-9]{1,6}[smhdw])+$")]

#: The names a flow may require at a pause: the ten fields of contract.md section 2.
FIELDS: Final = (
    "run_id",
    "stage",
    "checkpoint",
    "input_ref",
    "waiting_for",
    "timer_due_at",
    "external_refs",
    "effect_keys",
    "decisions",
    "failures",
)


def seconds(duration: str) -> int:
    """`2h`, `1d12h` in seconds. Raises ValueError on anything else."""
    if not _DURATION.fullmatch(duration):
        raise ValueError(f"{duration!r} is no duration: write a number and s, m, h, d or w, such as 90m or 1d12h")
    return sum(int(number) * _UNITS[unit] for number, unit in _PART.findall(duration))


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a policy file: what it does not know is an error."""


class WaitPolicy(Strict, frozen=True):
    groups: list[str] = []
    quorum: Annotated[int, Meta(ge=1, le=50)] = 1
    exclude_requester: bool = True
    first_rejection_closes: bool = True
    remind_before: Duration | None = None
    remind_every: Duration | None = None
    escalate_to: list[str] = []
    escalate_after: Duration | None = None
    allow_timeout_approve: bool = False


class EffectPolicy(Strict, frozen=True):
    title: str = ""
    impact: Impact = "low"
    retry_safe: bool = False
    lookup: bool = False
    needs_approval: str | None = None
    compensation: str | None = None


class FlowPolicy(Strict, frozen=True):
    """One version of a flow's policy. `declared` is false for a flow that no file names."""

    title: str = ""
    declared: bool = True
    required: list[str] = msgspec.field(default_factory=lambda: ["checkpoint"])
    lease_seconds: Annotated[int, Meta(ge=1, le=3600)] = 60
    max_failures: Annotated[int, Meta(ge=1, le=1000)] = 3
    claim_within: Duration = "5m"
    on_reject: OnReject = "review"
    on_version_change: Annotated[str, Meta(pattern="^(review|continue)$")] = "review"
    gated_stages: list[str] = []
    deliver_to: str | None = None
    secret: list[str] = []
    wait: dict[str, WaitPolicy] = {}
    effect: dict[str, EffectPolicy] = {}

    def wait_policy(self, name: str) -> WaitPolicy:
        return self.wait.get(name) or WaitPolicy()

    def kind(self, system: str, action: str) -> EffectPolicy | None:
        """The declared kind of an effect: `system.action`, or its action alone."""
        return self.effect.get(f"{system}.{action}") or self.effect.get(action)

    def shown(self, arguments: dict[str, Any] | None) -> dict[str, Any]:
        """The arguments that may be part of a text that everybody reads: those that are not secret."""
        hidden = {pointer.rpartition("/arguments")[2] for pointer in self.secret if "/arguments" in pointer}
        return {} if "" in hidden else {k: v for k, v in (arguments or {}).items() if f"/{k}" not in hidden}


UNDECLARED: Final = FlowPolicy(declared=False)


def load(body: dict[str, Any]) -> FlowPolicy:
    """A policy from its stored form. Raises msgspec.ValidationError naming the place."""
    return msgspec.convert(body, FlowPolicy)


def first_reminder(policy: WaitPolicy, *, opened_at: datetime, due_at: datetime) -> datetime | None:
    """When the first reminder goes out: `remind_before` the deadline, else one `remind_every` after opening."""
    if policy.remind_before:
        at = due_at - timedelta(seconds=seconds(policy.remind_before))
        if at > opened_at:
            return at
        if not policy.remind_every:
            return None
    if policy.remind_every:
        return opened_at + timedelta(seconds=seconds(policy.remind_every))
    return None


def next_reminder(every: str | None, *, now: datetime, due_at: datetime) -> datetime | None:
    """The one after a reminder that went out at `now`: missed intervals are not made up for (rule 6)."""
    if not every:
        return None
    at = now + timedelta(seconds=seconds(every))
    return at if at < due_at else None


def escalation(policy: WaitPolicy, *, opened_at: datetime, due_at: datetime) -> datetime | None:
    """When the wait goes to more people, or None when its deadline comes first."""
    if not policy.escalate_after or not policy.escalate_to:
        return None
    at = opened_at + timedelta(seconds=seconds(policy.escalate_after))
    return at if at < due_at else None


def backoff(failures: int) -> int:
    """Seconds until the next try after `failed` without `retry_in`: 2, 4, 8 ... at most five minutes."""
    return int(min(300, 2 ** max(1, min(failures, 9))))
