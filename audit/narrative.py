"""States, codes and events → sentences in the reader's language. All of the console's wording of facts is here.

Pure but for the active language. Nothing is decided here, and the English `message` fields of the API are not used.
Every function takes the plain dicts of contract.md section 6 "Shapes".
"""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext, gettext_lazy, ngettext, pgettext_lazy

from audit import formats

# --- states: (word, tone, mark). Tones are go, wait, stop, ask, plain; a mark is a symbol of static/marks.svg ---

RUN = {
    "running": (gettext_lazy("Running"), "go", "running"),
    "waiting": (gettext_lazy("Waiting"), "wait", "wait"),
    "ready": (gettext_lazy("Ready for an agent"), "go", "ready"),
    "review": (gettext_lazy("Needs review"), "stop", "review"),
    "compensating": (gettext_lazy("Being undone"), "wait", "undo"),
    "taken_over": (gettext_lazy("Taken over"), "ask", "hand"),
    "completed": (gettext_lazy("Completed"), "go", "done"),
    "terminated": (gettext_lazy("Terminated"), "plain", "ended"),
}
EFFECT = {
    "planned": (pgettext_lazy("effect", "planned"), "plain", "planned"),
    "started": (pgettext_lazy("effect", "under way"), "wait", "running"),
    "executed": (pgettext_lazy("effect", "done"), "go", "done"),
    "failed": (pgettext_lazy("effect", "failed"), "stop", "fail"),
    "unknown": (pgettext_lazy("effect", "outcome unknown"), "ask", "unknown"),
    "compensating": (pgettext_lazy("effect", "being undone"), "wait", "undo"),
    "compensated": (pgettext_lazy("effect", "undone"), "plain", "undo"),
    "compensation_unknown": (pgettext_lazy("effect", "undo: outcome unknown"), "ask", "unknown"),
    "withdrawn": (pgettext_lazy("effect", "withdrawn"), "plain", "ended"),
}
WAIT = {
    "open": (pgettext_lazy("wait", "open"), "wait", "wait"),
    "satisfied": (pgettext_lazy("wait", "answered"), "go", "done"),
    "rejected": (pgettext_lazy("wait", "rejected"), "stop", "fail"),
    "timed_out": (pgettext_lazy("wait", "timed out"), "stop", "wait"),
    "cancelled": (pgettext_lazy("wait", "cancelled"), "plain", "ended"),
    "superseded": (pgettext_lazy("wait", "superseded"), "plain", "ended"),
}
OUTCOME = {
    "continue": (gettext_lazy("May go on"), "go", "ready"),
    "wait": (gettext_lazy("Waits"), "wait", "wait"),
    "compensate": (gettext_lazy("Must be undone"), "wait", "undo"),
    "review": (gettext_lazy("A person must decide"), "stop", "review"),
    "terminate": (gettext_lazy("Ends"), "plain", "ended"),
}
RISK = {
    "high": (gettext_lazy("High risk"), "stop", "risk-high"),
    "medium": (gettext_lazy("Medium risk"), "wait", "risk-medium"),
    "low": (gettext_lazy("Low risk"), "plain", "risk-low"),
}
IMPACT = {
    "money": gettext_lazy("money"),
    "access": gettext_lazy("access"),
    "customer_promise": gettext_lazy("promise to a customer"),
    "compliance": gettext_lazy("compliance"),
    "irreversible": gettext_lazy("cannot be undone"),
    "low": gettext_lazy("low impact"),
}
KIND = {
    "approval": gettext_lazy("a person's decision"),
    "timer": gettext_lazy("a timer"),
    "callback": gettext_lazy("a callback"),
    "signal": gettext_lazy("a signal"),
}
ON_TIMEOUT = {
    "review": gettext_lazy("a person must say how it goes on"),
    "reject": gettext_lazy("it counts as not approved, and what was done is undone"),
    "escalate": gettext_lazy("it goes to the next level, with the same time again"),
    "resume": gettext_lazy("the agent is told that nobody answered; nothing is authorised"),
    "continue": gettext_lazy("it goes on without an answer"),
    "terminate": gettext_lazy("the run ends"),
}
CHOICE = {
    "approve": gettext_lazy("Approve"),
    "approve_with_conditions": gettext_lazy("Approve with conditions"),
    "edit": gettext_lazy("Edit and approve"),
    "reject": gettext_lazy("Reject"),
    "respond": gettext_lazy("Answer"),
    # decisions of other kinds
    "executed": gettext_lazy("It happened"),
    "not_executed": gettext_lazy("It did not happen"),
    "compensated": gettext_lazy("It was undone"),
}
CHOSE = {  # what somebody did, in the past, after their name
    "approve": gettext_lazy("approved"),
    "approve_with_conditions": gettext_lazy("approved with conditions"),
    "edit": gettext_lazy("edited and approved"),
    "reject": gettext_lazy("rejected"),
    "respond": gettext_lazy("answered"),
    "clear": gettext_lazy("cleared it to go on"),
    "retry": gettext_lazy("granted more tries"),
    "reconcile": gettext_lazy("reconciled an outcome"),
    "handback": gettext_lazy("handed it back to the agent"),
    "sign_off": gettext_lazy("signed an effect off"),
    "terminate": gettext_lazy("terminated the run"),
}
ACTION = {  # buttons of a recommendation
    "approve": gettext_lazy("Approve"),
    "approve_with_conditions": gettext_lazy("Approve with conditions"),
    "edit": gettext_lazy("Edit and approve"),
    "reject": gettext_lazy("Reject"),
    "respond": gettext_lazy("Answer"),
    "reconcile": gettext_lazy("Find out and reconcile"),
    "sign_off": gettext_lazy("Sign off"),
    "clear": gettext_lazy("Clear to go on"),
    "retry": gettext_lazy("Grant more tries"),
    "takeover": gettext_lazy("Take over"),
    "handback": gettext_lazy("Hand back"),
    "terminate": gettext_lazy("Terminate"),
}
FIELDS = {  # the ten
    "run_id": gettext_lazy("Run"),
    "stage": gettext_lazy("Stage"),
    "checkpoint": gettext_lazy("Checkpoint"),
    "input_ref": gettext_lazy("Input reference"),
    "waiting_for": gettext_lazy("Waiting for"),
    "timer_due_at": gettext_lazy("Deadline"),
    "external_refs": gettext_lazy("Outside references"),
    "effect_keys": gettext_lazy("Effect keys"),
    "decisions": gettext_lazy("Decisions"),
    "failures": gettext_lazy("Failures"),
}
SCOPES = {
    "mine": gettext_lazy("Mine"),
    "available": gettext_lazy("Available to me"),
    "overdue": gettext_lazy("Overdue"),
    "review": gettext_lazy("Needs review"),
    "unknown": gettext_lazy("Unknown outcome"),
    "taken_over": gettext_lazy("Taken over"),
    "decided": gettext_lazy("Decided"),
}
SCOPE_EMPTY = {
    "mine": gettext_lazy("Nothing waits for you by name. “Available to me” shows what anyone in your groups may take."),
    "available": gettext_lazy("Nothing waits for a decision that you may make."),
    "overdue": gettext_lazy("Nothing is past its deadline or left lying."),
    "review": gettext_lazy("No run needs a person to say how it goes on."),
    "unknown": gettext_lazy("Every effect outside has a known outcome."),
    "taken_over": gettext_lazy("Agents hold the wheel everywhere; nobody has taken a run over."),
    "decided": gettext_lazy("Nothing has been decided yet."),
}

_REASONS = {
    "run_ended": gettext_lazy("The run has ended."),
    "taken_over": gettext_lazy("A person holds the run; agents are kept off until it is handed back."),
    "rejected": gettext_lazy("It was rejected."),
    "cancelled": gettext_lazy("It was cancelled."),
    "timed_out": gettext_lazy("The deadline passed without an answer, and that ends it."),
    "effect_unknown": gettext_lazy("%(subject)s was sent, but nobody knows whether it arrived."),
    "compensation_unknown": gettext_lazy("Undoing %(subject)s was begun, but nobody knows whether it worked."),
    "sign_off_needed": gettext_lazy("%(subject)s cannot be undone; a person must sign that off before the run ends."),
    "undo_pending": gettext_lazy("%(subject)s is still to be undone."),
    "metadata_missing": gettext_lazy("What this flow needs to resume safely is missing: %(subject)s."),
    "receipt_conflict": gettext_lazy("A receipt for %(subject)s contradicts what a person had found."),
    "executed_despite_rejection": gettext_lazy("%(subject)s was carried out although it was rejected."),
    "approval_mismatch": gettext_lazy("The agent tried to run something else than what was approved (%(subject)s)."),
    "waiting": gettext_lazy("It waits for an answer: %(subject)s"),
    "backing_off": gettext_lazy("It waits before the next try."),
    "timeout_undetermined": gettext_lazy("The deadline passed, and the flow does not say where to go (%(subject)s)."),
    "input_changed": gettext_lazy("The input is not the one that the run was paused with."),
    "version_changed": gettext_lazy("The agent's version is not the one that paused the run."),
    "condition_unmet": gettext_lazy("A condition of the approval does not hold (%(subject)s)."),
    "approval_expired": gettext_lazy("The approval has expired unused (%(subject)s)."),
    "retries_exhausted": gettext_lazy("All tries are used up (%(subject)s)."),
    "not_retryable": gettext_lazy("The agent says that trying again is no use."),
    "human_gate": gettext_lazy("This stage goes on only after a person has looked."),
    "unsatisfiable_gate": gettext_lazy("Nobody is left who may decide this (%(subject)s)."),
    "effect_repeated": gettext_lazy("%(subject)s seems to have happened twice: two different receipts."),
    "ambiguous_signal": gettext_lazy("A signal fits several waits; a person must say which."),
    "unclaimed": gettext_lazy("It may go on, but no agent has come for it."),
    "set_aside": gettext_lazy("Rehydrate could not apply what is due, and has set the run aside."),
    "clear": gettext_lazy("Everything needed is there."),
    "retry_same_key": gettext_lazy("%(subject)s is tried again under its own key, so it cannot happen twice."),
    "look_up": gettext_lazy("The agent first looks up whether %(subject)s happened."),
}

_REFUSALS = {
    "wait_closed": gettext_lazy("Somebody was quicker: this has been decided already."),
    "wait_expired": gettext_lazy("The deadline has passed. Nothing was carried out on your answer."),
    "already_voted": gettext_lazy("You have voted on this already; one vote a person."),
    "stale_decision": gettext_lazy("The ask has changed since you opened it. Look at what is new, then decide again."),
    "not_eligible": gettext_lazy("You are not among those who may decide this."),
    "self_approval": gettext_lazy("You asked for this yourself, so somebody else has to decide."),
    "agents_cannot_decide": gettext_lazy("Agents cannot decide."),
    "forbidden": gettext_lazy("You may not do this here. Ask an administrator of the workspace for the role."),
    "not_found": gettext_lazy("That is not here, or not for you to see."),
    "run_ended": gettext_lazy("The run has ended; nothing can be changed any more."),
    "effect_unknown": gettext_lazy(
        "An outcome is still unknown. Find out first whether it happened, then reconcile it."
    ),
    "open_compensation": gettext_lazy("Something is still being undone. Wait for that, or reconcile it."),
    "effect_already_executed": gettext_lazy("That has happened already."),
    "approval_required": gettext_lazy("That needs an approval first."),
    "approval_rejected": gettext_lazy("That was rejected."),
    "approval_expired": gettext_lazy("The approval has expired."),
    "condition_unmet": gettext_lazy("A condition does not hold."),
    "retries_exhausted": gettext_lazy("All tries are used up."),
    "not_resumable": gettext_lazy("The run is not in a state in which this can be done."),
    "lease_held": gettext_lazy("An agent is working on the run at this moment. Try again in a few seconds."),
    "lease_lost": gettext_lazy("The run is not held any more."),
    "invalid": gettext_lazy("Something in the form is not right yet; see the marked fields."),
    "unsatisfiable_gate": gettext_lazy("Nobody could decide that."),
    "idempotency_key_reused": gettext_lazy(
        "This form was sent before with other content. Reload the page and try again."
    ),
    "rate_limited": gettext_lazy("Too many tries. Wait a moment."),
    "too_large": gettext_lazy("That is too large."),
    "unavailable": gettext_lazy("The ledger cannot be reached at the moment. Nothing was changed; try again."),
    "effect_key_reused": gettext_lazy("That key belongs to another effect."),
    "malformed": gettext_lazy("That could not be read."),
}

_EVENTS = {
    "run.opened": gettext_lazy("opened the run"),
    "run.unclaimed": gettext_lazy("No agent has come for the run since it became ready"),
    "run.escalated": gettext_lazy("The run was escalated: it has failed as often as the flow allows"),
    "completed": gettext_lazy("finished the run"),
    "terminated": gettext_lazy("ended the run"),
    "checkpoint": gettext_lazy("reached checkpoint “%(stage)s”"),
    "external_ref": gettext_lazy("noted %(ref)s"),
    "failed": gettext_lazy("failed: %(error)s"),
    "cancelled": gettext_lazy("cancelled: %(reason)s"),
    "note": gettext_lazy("noted: %(text)s"),
    "paused": gettext_lazy("paused: %(asks)s"),
    "verdict": gettext_lazy("The run is now: %(status)s"),
    "lease.granted": gettext_lazy("took the run on (epoch %(epoch)s)"),
    "lease.retaken": gettext_lazy("took its own hold on the run back"),
    "lease.lapsed": gettext_lazy("The worker went silent; its hold on the run lapsed"),
    "released": gettext_lazy("gave the run back unfinished"),
    "recalled": gettext_lazy("withdrew the question: %(reason)s"),
    "resume.mismatched": gettext_lazy("came with another input or version than the run was paused with"),
    "refused": gettext_lazy("was refused: %(code)s"),
    "effect.planned": gettext_lazy("plans “%(effect)s”"),
    "effect.replanned": gettext_lazy("changed the plan for “%(effect)s”"),
    "effect.started": gettext_lazy("started “%(effect)s” (attempt %(attempt)s)"),
    "effect.executed": gettext_lazy("carried out “%(effect)s”, receipt %(receipt)s"),
    "effect.repeated": gettext_lazy("reported a second receipt for “%(effect)s”: %(receipt)s"),
    "effect.receipt_conflict": gettext_lazy(
        "reported something about “%(effect)s” that contradicts what a person had found"
    ),
    "effect.failed": gettext_lazy("failed at “%(effect)s”: %(error)s"),
    "effect.unknown": gettext_lazy("Nobody knows what became of “%(effect)s”"),
    "effect.not_executed": gettext_lazy("looked it up: “%(effect)s” did not happen"),
    "effect.compensating": gettext_lazy("is undoing “%(effect)s”"),
    "effect.compensated": gettext_lazy("undid “%(effect)s”"),
    "effect.compensation_failed": gettext_lazy("failed to undo “%(effect)s”: %(error)s"),
    "effect.compensation_unknown": gettext_lazy("Nobody knows whether “%(effect)s” was undone"),
    "effect.withdrawn": gettext_lazy("“%(effect)s” is withdrawn: it will not be carried out"),
    "effect.reconciled": gettext_lazy("found out about “%(effect)s”: %(outcome)s. %(reason)s"),
    "effect.signed_off": gettext_lazy("signed off that “%(effect)s” stays: %(reason)s"),
    "wait.opened": gettext_lazy("asked: %(ask)s"),
    "wait.satisfied": gettext_lazy("The timer “%(name)s” ran out, as it was meant to"),
    "wait.timed_out": gettext_lazy("Nobody answered “%(name)s” in time"),
    "wait.signalled": gettext_lazy("An answer came in for “%(name)s”"),
    "wait.superseded": gettext_lazy("The open question no longer counts"),
    "wait.reminded": gettext_lazy("A reminder of “%(name)s” went out"),
    "wait.escalated": gettext_lazy("escalated “%(name)s”"),
    "wait.claimed": gettext_lazy("took on “%(name)s”"),
    "wait.assigned": gettext_lazy("handed “%(name)s” to %(to)s"),
    "wait.extended": gettext_lazy("moved the deadline of “%(name)s”"),
    "wait.info_requested": gettext_lazy("asked for information: “%(text)s”"),
    "wait.commented": gettext_lazy("wrote: “%(text)s”"),
    "wait.policy_changed": gettext_lazy("Who may decide “%(name)s” has changed"),
    "signal.noted": gettext_lazy("A signal came that answers no open wait"),
    "taken_over": gettext_lazy("took the run over: %(reason)s"),
    "handed_back": gettext_lazy("handed the run back at “%(stage)s”: %(reason)s"),
    "cleared": gettext_lazy("cleared it to go on: %(reason)s"),
    "retry_granted": gettext_lazy("granted %(tries)s more tries: %(reason)s"),
}


def _pair(table: dict[str, tuple[Any, str, str]], code: Any) -> dict[str, str]:
    word, tone, mark = table.get(str(code), (str(code).replace("_", " "), "plain", "planned"))
    return {"code": str(code), "word": str(word), "tone": tone, "mark": mark}


def run_status(code: Any) -> dict[str, str]:
    """`{code, word, tone, mark}` of a run's status."""
    return _pair(RUN, code)


def effect_state(code: Any) -> dict[str, str]:
    """The same of an effect's state."""
    return _pair(EFFECT, code)


def wait_status(code: Any) -> dict[str, str]:
    """The same of a wait's status."""
    return _pair(WAIT, code)


def outcome(code: Any) -> dict[str, str]:
    """The same of a verdict's outcome."""
    return _pair(OUTCOME, code)


def risk(code: Any) -> dict[str, str]:
    """The same of an ask's risk."""
    return _pair(RISK, code)


def word(table: dict[str, Any], code: Any) -> str:
    """The word of a code, or the code itself made readable, so that a new one is never a hole in the page."""
    return str(table.get(str(code), formats.humanise(code)))


def effect_name(effect: dict[str, Any] | None, key: Any = "") -> str:
    """What a reviewer calls an effect: the flow's title for it, else its action and resource, else its key."""
    if effect:
        if effect.get("title"):
            return str(effect["title"])
        named = " · ".join(str(effect[part]) for part in ("action", "resource") if effect.get(part))
        if named:
            return named
    return str((effect or {}).get("key") or key or gettext("the effect"))


def reason(item: dict[str, Any], run: dict[str, Any] | None = None) -> str:
    """One verdict reason as a sentence; its subject (an effect's key, a wait, a field) is named as people know it."""
    code = str(item.get("code", ""))
    template = _REASONS.get(code)
    if template is None:
        return str(item.get("message") or formats.humanise(code))
    return str(template) % {"subject": subject(item.get("subject"), run) or gettext("it")}


def subject(value: Any, run: dict[str, Any] | None = None) -> str:
    """A reason's subject in words: an effect by its title, a wait by its name, a metadata field by its label."""
    if isinstance(value, list):
        return gettext(", ").join(subject(part, run) for part in value)
    if value is None:
        return ""
    text = str(value)
    for effect in (run or {}).get("effects") or []:
        if effect.get("key") == text:
            return gettext("“%(name)s”") % {"name": effect_name(effect)}
    for wait in (run or {}).get("waits") or []:
        if text in {wait.get("id"), wait.get("key"), wait.get("name")}:
            ask = wait.get("ask") or {}
            return str(ask.get("summary") or formats.humanise(wait.get("name")))
    if text in FIELDS:
        return str(FIELDS[text])
    return text


def refusal(code: Any) -> str:
    """What a refused act says to the person, without the API's English."""
    return str(_REFUSALS.get(str(code), gettext("That was refused (%(code)s).") % {"code": code}))


def recommended(run: dict[str, Any]) -> dict[str, Any]:
    """The head of "what should happen next": `{sentence, why: [..], tone, mark}`, made from codes only."""
    verdict = run.get("verdict") or {}
    reasons = verdict.get("reasons") or []
    codes = [str(r.get("code")) for r in reasons]
    first = codes[0] if codes else ""
    look = outcome(verdict.get("outcome"))
    return {
        "sentence": _sentence(run, verdict, reasons, codes, first),
        "why": [reason(r, run) for r in reasons],
        "tone": "ask" if first in {"effect_unknown", "compensation_unknown", "receipt_conflict"} else look["tone"],
        "mark": "unknown" if first in {"effect_unknown", "compensation_unknown"} else look["mark"],
        "outcome": look,
    }


def _sentence(
    run: dict[str, Any], verdict: dict[str, Any], reasons: list[dict[str, Any]], codes: list[str], first: str
) -> str:
    status = run.get("status")
    named = subject(reasons[0].get("subject"), run) if reasons else ""
    named = named or gettext("the effect")
    if status == "completed":
        return gettext("Nothing: the run is finished.")
    if status == "terminated":
        return gettext("Nothing: the run has ended and its evidence is kept.")
    if status == "running":
        return gettext("Nothing from you: an agent is working on it.")
    if first == "taken_over":
        return gettext("Finish what is to be done by hand, then hand the run back to the agent.")
    if first in {"effect_unknown", "receipt_conflict"}:
        return gettext("Find out whether %(effect)s really happened, and record what you found.") % {"effect": named}
    if first == "compensation_unknown":
        return gettext("Find out whether %(effect)s was really undone, and record what you found.") % {"effect": named}
    if first == "sign_off_needed":
        return gettext("Sign off that %(effect)s stays as it is; then the run can end.") % {"effect": named}
    if first == "metadata_missing":
        return gettext("Supply what is missing, or take the run over.")
    if first in {"executed_despite_rejection", "approval_mismatch"}:
        return gettext("Check what the agent did against what was decided, then clear it or take the run over.")
    if first in {"rejected", "cancelled", "timed_out"} and verdict.get("outcome") == "review":
        return gettext("Say how it goes on after the no: clear it, take it over, or end it.")
    if first == "undo_pending":
        if verdict.get("outcome") == "review":
            return gettext("Say whether what was done is to be undone: take over, or end it after signing off.")
        return gettext("Nothing from you: what was done is being undone, newest first.")
    if first == "waiting":
        return _waiting_sentence(run)
    if first == "backing_off":
        return gettext("Nothing yet: the agent tries again by itself.")
    if first == "timeout_undetermined":
        return gettext("Nobody answered in time. Say how it goes on: clear it, take it over, or end it.")
    if first in {"input_changed", "version_changed"}:
        return gettext("Check whether the run may go on with what has changed, then clear it.")
    if first == "condition_unmet":
        return gettext(
            "Clear it, and the agent may change what your condition names, to keep to it; nothing else runs."
            " Or take it over, or end it."
        )
    if first == "approval_expired":
        return gettext("The approval no longer covers it: clear it with a reason, take it over, or end it.")
    if first in {"retries_exhausted", "not_retryable"}:
        return gettext("Mend the cause, then grant more tries; or take the run over.")
    if first == "human_gate":
        return gettext("Look over what was done and what comes next, then clear it to go on.")
    if status == "ready" and run.get("unclaimed_at"):
        return gettext("See whether the agents of this flow are running, or take the run over.")
    if status == "ready":
        return gettext("Nothing from you: an agent may take it on at any moment.")
    if "look_up" in codes:
        return gettext("Nothing from you: the agent first looks up what happened.")
    return str(outcome(verdict.get("outcome"))["word"])


def _waiting_sentence(run: dict[str, Any]) -> str:
    waits = [w for w in run.get("waits") or [] if w.get("status") == "open"]
    approvals = [w for w in waits if w.get("kind") == "approval"]
    if approvals:
        if len(approvals) > 1:
            return ngettext("Decide %(n)d question.", "Decide %(n)d questions.", len(approvals)) % {"n": len(approvals)}
        choices = approvals[0].get("choices") or (approvals[0].get("ask") or {}).get("choices") or ["approve"]
        if "approve" in choices:
            return gettext("Decide: may the agent do this?")
        return gettext("Answer the agent's question.")
    others = [waiting_for(w) for w in waits]
    return gettext("Nothing from you: it waits for %(what)s.") % {
        "what": gettext(", ").join(others) or gettext("an answer")
    }


def waiting_for(wait: dict[str, Any]) -> str:
    """ "a callback from the supplier", "a timer": whom or what a wait is for."""
    kind = word(KIND, wait.get("kind"))
    source = wait.get("from")
    if isinstance(source, list):
        source = gettext(", ").join(str(s) for s in source)
    if source:
        return gettext("%(kind)s from %(source)s") % {"kind": kind, "source": source}
    return kind


# --- what happens by itself ---

_UPCOMING = {  # by the kind of the timer and, for a deadline, where it leads; with the mark that stands before it
    ("deadline", "satisfied"): (gettext_lazy("The timer “%(name)s” runs out, as it is meant to"), "wait"),
    ("deadline", "review"): (
        gettext_lazy("The deadline of “%(name)s” passes: a person must say how it goes on"), "review"
    ),
    ("deadline", "reject"): (
        gettext_lazy("The deadline of “%(name)s” passes: it counts as not approved"), "undo"
    ),
    ("deadline", "escalate"): (
        gettext_lazy(
            "The deadline of “%(name)s” passes: it goes to %(to)s, once, with the same time again; after that a person"
            " must say how it goes on"
        ),
        "person",
    ),
    ("deadline", "resume"): (
        gettext_lazy("The deadline of “%(name)s” passes: the agent is told that nobody answered, and nothing more"),
        "ready",
    ),
    ("deadline", "continue"): (
        gettext_lazy("The deadline of “%(name)s” passes: it goes on without an answer"), "ready"
    ),
    ("deadline", "terminate"): (gettext_lazy("The deadline of “%(name)s” passes: the run ends"), "ended"),
    ("reminder", None): (gettext_lazy("Reminder of “%(name)s” to %(to)s"), "wait"),
    ("escalation", None): (gettext_lazy("“%(name)s” goes to %(to)s as well, once; its deadline stays"), "person"),
    ("retry", None): (gettext_lazy("Next try: number %(n)s of %(limit)s"), "running"),
    ("expiry", None): (
        gettext_lazy("The approval of “%(name)s” expires if it was not used: a person must say how it goes on"), "limit"
    ),
    ("lease", None): (
        gettext_lazy("%(holder)s loses its hold on the run, if nothing is heard from it: that counts as a failure"),
        "agent",
    ),
    ("unclaimed", None): (gettext_lazy("It becomes an alarm in the inbox, if no agent has come for it"), "warn"),
}  # fmt: skip


def upcoming(run: dict[str, Any]) -> list[dict[str, Any]]:
    """`[{at, text, mark}]`: what happens to a run by itself, and when, the soonest first."""
    failures = (run.get("metadata") or {}).get("failures") or {}
    waits = {wait.get("id"): wait for wait in run.get("waits") or []}
    effects = {effect.get("key"): effect for effect in run.get("effects") or []}
    found = []
    for timer in run.get("timers") or []:
        kind, about = timer.get("kind"), timer.get("subject")
        text, mark = _UPCOMING.get((kind, timer.get("then")), (formats.humanise(kind), "wait"))
        wait = waits.get(about)
        values = {
            "name": timer_subject(wait) if wait else effect_name(effects.get(about), about),
            "to": gettext(", ").join(timer.get("to") or []) or gettext("everyone who may decide"),
            "n": failures.get("count", 0) + 1,
            "limit": failures.get("limit", "–"),
            "holder": about,
        }
        found.append({"at": timer.get("due_at"), "text": str(text) % values, "mark": mark})
    return found


def timer_subject(wait: dict[str, Any]) -> str:
    """What a wait is called where its time is told: its ask, else its name."""
    return str((wait.get("ask") or {}).get("summary") or formats.humanise(wait.get("name")))


def conditions(items: list[dict[str, Any]] | None, labels: dict[str, str] | None = None) -> list[str]:
    """Each condition as "Amount ≤ 12000"."""
    signs = {
        "==": "=", "!=": "≠", "<": "<", "<=": "≤", ">": ">", ">=": "≥",
        "in": gettext("is one of"), "not_in": gettext("is none of"), "exists": gettext("is there:"),
    }  # fmt: skip
    said = []
    for item in items or []:
        pointer = str(item.get("pointer", ""))
        label = (labels or {}).get(pointer) or formats.humanise(pointer.strip("/").replace("/", " › "))
        said.append(f"{label} {signs.get(str(item.get('op')), item.get('op'))} {formats.plain(item.get('value'))}")
    return said


def decision(item: dict[str, Any]) -> str:
    """ "approved with conditions": what was chosen, to stand after the decider's name."""
    kind, choice = str(item.get("kind", "wait")), str(item.get("choice") or "")
    if kind == "wait":
        return word(CHOSE, choice) if choice else gettext("decided")
    return word(CHOSE, kind)


def actor(item: dict[str, Any] | str | None) -> str:
    """Who did it, by name; the ledger itself is "the system"."""
    if isinstance(item, str):
        return item or gettext("somebody")
    if not item or item.get("kind") == "system":
        return gettext("The system")
    return str(item.get("name") or item.get("id") or gettext("somebody"))


def event(item: dict[str, Any], run: dict[str, Any] | None = None) -> str:
    """One ledger event as words that stand after the actor's name."""
    kind = str(item.get("type", ""))
    payload = item.get("payload") or {}
    if kind == "wait.decided":
        return _decided(payload)
    if kind == "wait.claimed" and not payload.get("by"):
        return gettext("let go of “%(name)s”") % _EventWords(payload, run)
    template = _EVENTS.get(kind)
    if template is None:
        return formats.humanise(kind.replace(".", " "))
    text = str(template)
    # only what the sentence names is worked out; whatever the payload lacks reads as a dash
    values = _EventWords(payload, run)
    return text % values


class _EventWords(dict):  # type: ignore[type-arg]
    """Lazily gives an event's payload in words, so that a payload without a field still makes a sentence."""

    def __init__(self, payload: dict[str, Any], run: dict[str, Any] | None) -> None:
        super().__init__()
        self.payload, self.run = payload, run

    def __missing__(self, name: str) -> str:
        got = getattr(self, f"_{name}", None)
        return str(got() if got else formats.plain(self.payload.get(name)))

    def _effect(self) -> str:
        key = self.payload.get("key") or self.payload.get("effect")
        for effect in (self.run or {}).get("effects") or []:
            if effect.get("key") == key:
                return effect_name(effect)
        return effect_name(self.payload if self.payload.get("action") else None, key)

    def _receipt(self) -> str:
        receipt = self.payload.get("receipt") or {}
        return str(receipt.get("id") or "–") if isinstance(receipt, dict) else str(receipt)

    def _error(self) -> str:
        return error(self.payload.get("error"))

    def _ask(self) -> str:
        wait = self.payload.get("wait") or self.payload
        wait = wait if isinstance(wait, dict) else {}
        return str((wait.get("ask") or {}).get("summary") or waiting_for(wait))

    def _asks(self) -> str:
        waits = [w for w in self.payload.get("waits") or [] if isinstance(w, dict)]
        said = [str((w.get("ask") or {}).get("summary") or waiting_for(w)) for w in waits]
        return gettext(", ").join(said) or gettext("waiting on")

    def _name(self) -> str:
        value = self.payload.get("wait")
        for wait in (self.run or {}).get("waits") or []:
            if wait.get("id") == value:
                return str((wait.get("ask") or {}).get("summary") or formats.humanise(wait.get("name")))
        return formats.humanise(self.payload.get("name") or gettext("the question"))

    def _ref(self) -> str:
        parts = (self.payload.get(part) for part in ("system", "ref_type", "id"))
        return " ".join(str(part) for part in parts if part)

    def _outcome(self) -> str:
        return word(CHOICE, self.payload.get("outcome"))

    def _code(self) -> str:
        return refusal(self.payload.get("code"))

    def _status(self) -> str:
        return run_status(self.payload.get("status"))["word"]


#: Sentences that name their own subject: no actor stands before them.
SUBJECTLESS = frozenset(
    {
        "run.unclaimed", "run.escalated", "verdict", "lease.lapsed", "effect.unknown", "effect.compensation_unknown",
        "effect.withdrawn", "wait.satisfied", "wait.timed_out", "wait.signalled", "wait.superseded", "wait.reminded",
        "wait.policy_changed", "signal.noted",
    }
)  # fmt: skip


def line(item: dict[str, Any], run: dict[str, Any] | None = None) -> dict[str, str]:
    """One timeline line: `{actor, text}`, the actor empty where the sentence has a subject of its own."""
    named = item.get("type") not in SUBJECTLESS
    return {"actor": actor(item.get("actor")) if named else "", "text": event(item, run)}


def _decided(payload: dict[str, Any]) -> str:
    said = decision({"kind": "wait", "choice": payload.get("choice")})
    if payload.get("closes") is False:
        said = gettext("%(did)s (a vote; more are needed)") % {"did": said}
    why = payload.get("reason") or payload.get("comment")
    if payload.get("response") not in (None, "", {}):
        why = formats.plain(payload["response"])
    return gettext("%(did)s: “%(why)s”") % {"did": said, "why": why} if why else said


def error(value: Any) -> str:
    """An error field as words: its message, else its code."""
    if isinstance(value, dict):
        return str(value.get("message") or value.get("code") or "–")
    return str(value) if value else "–"


# --- the run track, comparisons, consequences ------------------------------------------------------------------------

SEGMENT = {
    "work": gettext_lazy("worked"),
    "wait": gettext_lazy("waited"),
    "held": gettext_lazy("held by a person"),
    "rest": gettext_lazy("until the deadline"),
}
OPS = {
    "==": "=",
    "!=": "≠",
    "<": "<",
    "<=": "≤",
    ">": ">",
    ">=": "≥",
    "in": gettext_lazy("is one of"),
    "not_in": gettext_lazy("is none of"),
    "exists": gettext_lazy("is there"),
}


def track(drawn: Any) -> str:
    """The track as a sentence, for those who do not see it."""
    parts = [gettext("worked %(t)s") % {"t": formats.duration(drawn.worked)}]
    if drawn.waited:
        parts.append(gettext("waited %(t)s") % {"t": formats.duration(drawn.waited)})
    if drawn.done:
        parts.append(ngettext("%(n)d done outside", "%(n)d done outside", drawn.done) % {"n": drawn.done})
    if drawn.unknown:
        parts.append(ngettext("%(n)d outcome unknown", "%(n)d outcomes unknown", drawn.unknown) % {"n": drawn.unknown})
    if drawn.deadline_at:
        parts.append(gettext("deadline %(t)s") % {"t": formats.exact(drawn.deadline_at)})
    return gettext("Run so far: %(parts)s") % {"parts": gettext(", ").join(parts)}


def step(item: dict[str, Any]) -> str:
    """One consequence of a button, before it is pressed."""
    act, effect = item.get("act"), item.get("effect")
    name = effect_name(effect) if effect else ""
    if act == "do":
        return gettext("“%(effect)s” is carried out") % {"effect": name}
    if act == "undo":
        undo = (effect or {}).get("compensation") or {}
        return gettext("“%(effect)s” is undone (%(how)s)") % {"effect": name, "how": undo.get("action", "–")}
    if act == "stays":
        return gettext("“%(effect)s” stays as it is: no undo is known") % {"effect": name}
    if act == "withdrawn":
        return gettext("“%(effect)s” is not carried out") % {"effect": name}
    if act == "resume":
        return gettext("the agent goes on from “%(stage)s”") % {"stage": item.get("stage") or gettext("the start")}
    if act == "told_no":
        return gettext("the agent is told the no and goes on")
    if act == "review":
        return gettext("a person says how it goes on")
    if act == "ends":
        return gettext("the run ends with its evidence kept")
    if act == "votes":
        return gettext("your vote is kept; %(n)s in all are needed") % {"n": item.get("quorum")}
    return formats.plain(item.get("text"))


def ten_value(name: str, value: Any) -> str:
    """One of the ten fields in a few words."""
    if name == "checkpoint" and isinstance(value, dict):
        number = value.get("seq")
        return str(value.get("ref") or (gettext("at event %(n)s") % {"n": number} if number is not None else ""))
    if name == "waiting_for":
        return gettext(", ").join(formats.humanise(item.get("name")) for item in value or [] if isinstance(item, dict))
    if name == "timer_due_at":
        moment = formats.parse_time(value)
        return formats.exact(moment) if moment else ""
    if name == "external_refs":
        return gettext(", ").join(f"{r.get('system')} {r.get('id')}" for r in (value or [])[:3] if isinstance(r, dict))
    if name in {"effect_keys", "decisions"}:
        return str(len(value)) if value else ""
    if name == "failures":
        failures = value or {}
        return gettext("%(n)s of %(limit)s") % {"n": failures.get("count", 0), "limit": failures.get("limit", "–")}
    return str(value) if value else ""
