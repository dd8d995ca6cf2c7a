"""Refusals: the one exception by which the core says no, with a stable code (contract.md section 6). No HTTP here."""

from typing import Any, Final

#: HTTP status of each stable code. The API sends it as it stands; the console shows the message.
STATUS: Final[dict[str, int]] = {
    "malformed": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_eligible": 403,
    "self_approval": 403,
    "agents_cannot_decide": 403,
    "not_found": 404,
    "lease_lost": 409,
    "lease_held": 409,
    "not_resumable": 409,
    "run_ended": 409,
    "run_conflict": 409,
    "wait_closed": 409,
    "wait_expired": 409,
    "already_voted": 409,
    "stale_decision": 409,
    "effect_already_executed": 409,
    "effect_unknown": 409,
    "effect_duplicate": 409,
    "approval_required": 409,
    "approval_rejected": 409,
    "approval_mismatch": 409,
    "approval_expired": 409,
    "condition_unmet": 409,
    "retries_exhausted": 409,
    "open_compensation": 409,
    "ambiguous_signal": 409,
    "too_large": 413,
    "unsupported_media_type": 415,
    "invalid": 422,
    "effect_key_reused": 422,
    "idempotency_key_reused": 422,
    "unsatisfiable_gate": 422,
    "rate_limited": 429,
    "unavailable": 503,
}

#: Refusals that matter to an auditor and become an event of the run (rule 14).
AUDITED: Final[frozenset[str]] = frozenset(
    {
        "agents_cannot_decide",
        "already_voted",
        "approval_expired",
        "approval_mismatch",
        "approval_rejected",
        "approval_required",
        "condition_unmet",
        "effect_already_executed",
        "effect_duplicate",
        "effect_key_reused",
        "effect_unknown",
        "lease_lost",
        "not_eligible",
        "open_compensation",
        "self_approval",
        "stale_decision",
        "unsatisfiable_gate",
        "wait_closed",
        "wait_expired",
    }
)


class Refusal(Exception):
    """A clear no: `code` is stable, `message` says what to do, `extra` is the object as it stands (effect, wait,
    errors...).

    `subject` names what was refused (an effect's key, a wait's id) for the audit event.
    """

    def __init__(self, code: str, message: str, *, subject: str | None = None, **extra: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = STATUS[code]
        self.subject = subject
        self.extra = extra


def invalid(pointer: str, detail: str) -> Refusal:
    """422 `invalid` for one place of the body; `pointer` is a JSON Pointer (RFC 6901)."""
    return Refusal("invalid", f"{pointer or 'The body'}: {detail}", errors=[{"pointer": pointer, "detail": detail}])


def not_found(what: str) -> Refusal:
    """404, also for what the caller may not see, so that an id tells nothing."""
    return Refusal("not_found", f"There is no such {what}.")
