"""Every way in which the ledger, or the work itself, can say no: one exception for each error code of the contract.

An exception's docstring is its message, so it says what to do. No calls and no retrying live here.
"""

from __future__ import annotations

from typing import Any, ClassVar

Json = dict[str, Any]


class RehydrateError(Exception):
    """Something about this run went wrong."""

    @property
    def message(self) -> str:
        """The docstring's first sentence: what happened and what to do."""
        return " ".join((type(self).__doc__ or "").split())


# --- what the server answers ----------------------------------------------------


class LedgerError(RehydrateError):
    """The ledger refused the call."""

    code: ClassVar[str] = ""
    by_code: ClassVar[dict[str, type[LedgerError]]] = {}

    def __init__(self, problem: Json | None = None, *, status: int = 0, retry_after: float | None = None) -> None:
        self.problem: Json = problem or {}
        self.status = status or int(self.problem.get("status") or 0)
        self.detail = str(self.problem.get("detail") or self.problem.get("title") or "")
        self.retry_after = retry_after
        super().__init__(f"{self.message} {self.detail}".strip())

    def __init_subclass__(cls, *, code: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if code:
            cls.code = code
            LedgerError.by_code[code] = cls

    @property
    def errors(self) -> list[Json]:
        """For 422: `[{pointer, detail}]`."""
        return list(self.problem.get("errors") or [])

    @property
    def effect(self) -> Json | None:
        """For 409: the effect as it stands."""
        return self.problem.get("effect")

    @property
    def wait(self) -> Json | None:
        """For 409: the wait as it stands, with who was quicker."""
        return self.problem.get("wait")

    @property
    def held_by(self) -> Any:
        """For 409: who holds the lease or the run."""
        return self.problem.get("held_by")

    @property
    def run_status(self) -> str | None:
        """For 409: the status of the run."""
        return self.problem.get("run_status")

    @property
    def recorded(self) -> list[Any]:
        """The receipts that were taken although the rest of the batch was refused."""
        return list(self.problem.get("recorded") or [])


class Malformed(LedgerError, code="malformed"):
    """The request could not be read; it is no JSON, or not of the documented form."""


class Unauthenticated(LedgerError, code="unauthenticated"):
    """The key is missing, wrong, expired or revoked; set REHYDRATE_KEY to one that `manage.py issue_key` printed."""


class Forbidden(LedgerError, code="forbidden"):
    """This key may not do that; issue one for this workspace, flow and scope."""


class NotEligible(LedgerError, code="not_eligible"):
    """This person is not among the deciders of the wait."""


class SelfApproval(LedgerError, code="self_approval"):
    """Who asked for the run may not decide on it."""


class AgentsCannotDecide(LedgerError, code="agents_cannot_decide"):
    """Only people decide; an agent can ask."""


class NotFound(LedgerError, code="not_found"):
    """There is no such thing, or this key may not see it."""


class LeaseLost(LedgerError, code="lease_lost"):
    """The lease on this run is no longer ours; stop working on it, whoever holds it now goes on."""


class LeaseHeld(LedgerError, code="lease_held"):
    """Another holder's lease on this run is alive; wait for it to end."""


class NotResumable(LedgerError, code="not_resumable"):
    """The run is not at a point where it can go on."""


class RunEnded(LedgerError, code="run_ended"):
    """The run has ended, and ended is final."""


class RunConflict(LedgerError, code="run_conflict"):
    """This external id belongs to a run with another input; open a new one under another id."""


class WaitClosed(LedgerError, code="wait_closed"):
    """The wait is closed already; the first answer counts."""


class WaitExpired(LedgerError, code="wait_expired"):
    """The wait's deadline has passed."""


class AlreadyVoted(LedgerError, code="already_voted"):
    """This person has voted on this wait already."""


class StaleDecision(LedgerError, code="stale_decision"):
    """The ask has changed since it was shown; look at it again."""


class EffectAlreadyExecuted(LedgerError, code="effect_already_executed"):
    """The effect has been executed; its receipt is in the answer, do not run it again."""


class EffectUnknown(LedgerError, code="effect_unknown"):
    """Whether the effect happened is not known; it does not run again until a person, or a look-up, has found out."""


class EffectDuplicate(LedgerError, code="effect_duplicate"):
    """The same effect is in this run under another key; use that key, or say repeat=True if it is meant twice."""


class ApprovalRequired(LedgerError, code="approval_required"):
    """A person has to approve this effect first; call run.ask(..., effect=...) before run.effect."""


class ApprovalRejected(LedgerError, code="approval_rejected"):
    """A person said no to this effect."""


class ApprovalMismatch(LedgerError, code="approval_mismatch"):
    """What was to run is not what was approved; the run went to review."""


class ApprovalExpired(LedgerError, code="approval_expired"):
    """The approval has expired; it has to be given again."""


class ConditionUnmet(LedgerError, code="condition_unmet"):
    """A condition of the approval does not hold; the run went to review."""


class RetriesExhausted(LedgerError, code="retries_exhausted"):
    """All tries are used up; a person can grant more."""


class OpenCompensation(LedgerError, code="open_compensation"):
    """Something is still to be undone, so the run cannot end yet."""


class AmbiguousSignal(LedgerError, code="ambiguous_signal"):
    """Several waits fit the signal; it is kept for a person to assign."""


class TooLarge(LedgerError, code="too_large"):
    """The body is too large; keep contents elsewhere and send a reference and a digest."""


class UnsupportedMediaType(LedgerError, code="unsupported_media_type"):
    """The server takes JSON only."""


class Invalid(LedgerError, code="invalid"):
    """A field is missing, unknown or wrong; `errors` says which."""

    def __init__(self, problem: Json | None = None, *, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(problem, status=status, retry_after=retry_after)
        listed = "; ".join(f"{e.get('pointer') or '/'}: {e.get('detail')}" for e in self.errors)
        if listed:
            self.args = (f"{self.args[0]} [{listed}]",)


class EffectKeyReused(LedgerError, code="effect_key_reused"):
    """This key belongs to an effect with other content; a replay has to plan the same."""


class IdempotencyKeyReused(LedgerError, code="idempotency_key_reused"):
    """This Idempotency-Key was used with another body."""


class UnsatisfiableGate(LedgerError, code="unsatisfiable_gate"):
    """Nobody could decide this; put somebody other than the requester into the wait's groups."""


class RateLimited(LedgerError, code="rate_limited"):
    """Too many calls; slow down."""


class Unavailable(LedgerError, code="unavailable"):
    """The server cannot answer just now; try again."""


class Unreachable(RehydrateError):
    """The ledger could not be reached, or its answer was lost, for longer than we were willing to try."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.message} {detail}".strip())


def refusal(problem: Json, *, status: int, retry_after: float | None = None) -> LedgerError:
    """The exception for a problem document; a code that this version does not know is a plain `LedgerError`."""
    kind = LedgerError.by_code.get(str(problem.get("code")))
    if kind is None and status == 429:
        kind = RateLimited
    elif kind is None and status in (502, 503, 504):
        kind = Unavailable
    return (kind or LedgerError)(problem, status=status, retry_after=retry_after)


# --- what a `do` function says of the outside ----------------------------------------------------


class NotSent(RehydrateError):
    """Nothing reached the outside, so this may be tried again; raised by a `do` or undo function that is sure of it."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or self.message)


class Refused(NotSent):
    """The outside answered, and said that it did not do it."""


class NotRetryable(RehydrateError):
    """Trying again is no use; raised from a flow, it sends the run to a person."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail or self.message)


# --- what the run tells its flow ----------------------------------------------------


class EffectFailed(RehydrateError):
    """The effect did not happen this time; the run is tried again later."""

    def __init__(self, key: str, detail: str = "") -> None:
        self.key = key
        super().__init__(f"{self.message} ({key}: {detail})")


class EffectOutcomeUnknown(RehydrateError):
    """The effect may or may not have happened; the run stops here until that is known."""

    def __init__(self, key: str, detail: str = "") -> None:
        self.key = key
        super().__init__(f"{self.message} ({key}: {detail})")


class EffectNotGranted(RehydrateError):
    """The ledger did not let the effect start as it stands."""

    def __init__(self, key: str, state: str) -> None:
        self.key, self.state = key, state
        super().__init__(f"{self.message} ({key} is {state})")


class NotToGoOn(RehydrateError):
    """The run may not go on now; its verdict says why, and who or what has to act first."""

    def __init__(self, verdict: Json) -> None:
        self.verdict = verdict
        reasons = " ".join(str(reason.get("message")) for reason in verdict.get("reasons") or [])
        super().__init__(f"{self.message} {verdict.get('outcome')}: {reasons}".strip())

    @property
    def outcome(self) -> str:
        """`wait`, `review`, `compensate` or `terminate`."""
        return str(self.verdict.get("outcome"))


# --- how a flow is left without an error; never caught by `except Exception` ---


class Paused(BaseException):
    """The run is paused; the flow is called again from the top when it may go on."""


class Stopping(BaseException):
    """This process is to stop; the run is given back so that another one goes on."""
