"""Holding the wheel: take over and hand back, reconcile, sign off, clear, grant tries, terminate; care of a question.

Every act is a form with its reason, sent by POST; refusals are told next to the form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext, gettext_lazy
from django.views.decorators.http import require_http_methods, require_POST

from approvals import present
from approvals.forms import (
    AssignForm,
    ClearForm,
    CommentForm,
    EscalateForm,
    ExtendForm,
    HandbackForm,
    InfoForm,
    ReasonForm,
    ReconcileForm,
    RetryForm,
)
from approvals.web import (
    body,
    caller_of,
    forget_token,
    go,
    page,
    run_url,
    say,
    say_refusal,
    scope_of,
    sent_before,
    signed_in,
)
from rehydrate import selectors, services
from rehydrate.core import commands
from rehydrate.core.refusals import Refusal

NEVER_CLEARED = {"effect_unknown", "compensation_unknown", "undo_pending", "retries_exhausted"}
PASSING = {"waiting", "backing_off", "clear", "retry_same_key", "look_up", "taken_over", "run_ended"}


@dataclass(frozen=True)
class Act:
    """One act of a person: its words, its body, and how its form is made from the run and the address."""

    title: Any
    button: Any
    explains: Any
    body: type[Any]
    form: Callable[..., forms.Form]
    done: Any
    tone: str = "main"


def _plain(form: type[forms.Form]) -> Callable[..., forms.Form]:
    return lambda data, run, query: form(data)


def _retry(data: Any, run: dict[str, Any], query: Any) -> forms.Form:
    view = present.effects_view(run)
    effects = [
        (str(e["key"]), str(e.get("title") or e["key"])) for e in view["failed"] + view["planned"] + view["done"]
    ]
    return RetryForm(data, effects=effects, initial={"effect": query.get("effect", "")})


def clearable(run: dict[str, Any]) -> list[str]:
    """The verdict's codes that looking may settle (contract.md section 5)."""
    codes = [str(r.get("code")) for r in (run.get("verdict") or {}).get("reasons") or []]
    return list(dict.fromkeys(c for c in codes if c not in NEVER_CLEARED | PASSING))


def _clear(data: Any, run: dict[str, Any], query: Any) -> forms.Form:
    reasons = {str(r.get("code")): r for r in (run.get("verdict") or {}).get("reasons") or []}
    missing = [str(m) for m in (run.get("verdict") or {}).get("missing") or []]
    return ClearForm(data, reasons=[reasons[code] for code in clearable(run)], missing=missing)


RUN_ACTS = {
    "takeover": Act(
        gettext_lazy("Take this run over"),
        gettext_lazy("Take over"),
        gettext_lazy("Agents are fenced off at once and open questions are withdrawn. You then do by hand what is to be"
                     " done, and hand the run back; until then nothing moves by itself."),
        commands.Reasoned, _plain(ReasonForm), gettext_lazy("You hold the run now."),
    ),
    "terminate": Act(
        gettext_lazy("Terminate this run"),
        gettext_lazy("Terminate"),
        gettext_lazy("The run ends for good, with all its evidence kept. What is still planned is withdrawn; what was"
                     " done outside stays done."),
        commands.Reasoned, _plain(ReasonForm), gettext_lazy("The run has ended."), "stop",
    ),
    "retry": Act(
        gettext_lazy("Grant more tries"),
        gettext_lazy("Grant"),
        gettext_lazy("The agent may try again, under the same keys, so that nothing that is done happens twice."),
        commands.Retry, _retry, gettext_lazy("More tries are granted."),
    ),
    "clear": Act(
        gettext_lazy("Clear the run to go on"),
        gettext_lazy("Clear"),
        gettext_lazy("You say that you have looked, and that it may go on all the same."
                     " This holds until the next pause."),
        commands.Clear, _clear, gettext_lazy("Cleared."),
    ),
}  # fmt: skip
WAIT_ACTS = {
    "info": Act(
        gettext_lazy("Ask for information"), gettext_lazy("Ask"),
        gettext_lazy("The question stays open; whoever asked, and all who may decide, see what you want to know."),
        commands.WaitAction, _plain(InfoForm), gettext_lazy("Asked."),
    ),
    "assign": Act(
        gettext_lazy("Hand to someone else"), gettext_lazy("Hand over"),
        gettext_lazy("They find it under “Mine”."),
        commands.AssignWait, _plain(AssignForm), gettext_lazy("Handed over."),
    ),
    "escalate": Act(
        gettext_lazy("Escalate"), gettext_lazy("Escalate"),
        gettext_lazy("The next level, named by the flow, is asked; the question stays the same."),
        commands.WaitAction, _plain(EscalateForm), gettext_lazy("Escalated."),
    ),
    "extend": Act(
        gettext_lazy("Give it more time"), gettext_lazy("Move the deadline"),
        gettext_lazy("Everyone who has the question open sees the new deadline."),
        commands.ExtendWait, _plain(ExtendForm), gettext_lazy("The deadline has moved."),
    ),
    "comment": Act(
        gettext_lazy("Comment"), gettext_lazy("Send"), "",
        commands.WaitAction, _plain(CommentForm), gettext_lazy("Sent."),
    ),
}  # fmt: skip
SERVICES = {
    "takeover": "takeover", "terminate": "terminate", "retry": "retry", "clear": "clear", "info": "request_info",
    "assign": "assign_wait", "escalate": "escalate_wait", "extend": "extend_wait", "comment": "comment_wait",
}  # fmt: skip


def _answer(
    request: HttpRequest, act: Act, run: dict[str, Any], call: Callable[[Any], Any], **context: Any
) -> HttpResponse:
    """The common course of an act: form, check, service, and back to the run."""
    form = act.form(request.POST if request.method == "POST" else None, run, request.GET)
    refusal: Refusal | None = None
    status = 200
    if request.method == "POST":
        if sent_before(request):
            return go(request, run_url(run["id"], scope_of(request)))
        if form.is_valid():
            try:
                call(body(act.body, **form.values()))  # type: ignore[attr-defined]
            except Refusal as problem:
                refusal, status = problem, problem.status
            else:
                say(request, str(act.done))
                return go(request, run_url(run["id"], scope_of(request)))
        else:
            status = 422
        forget_token(request)
    return page(
        request,
        "operate/form.html",
        {
            "place": "run",
            "act": act,
            "run": run,
            "form": form,
            "refusal": refusal,
            "scope": scope_of(request),
            **context,
        },
        status=status,
    )


@signed_in
@require_POST
def try_again(request: HttpRequest, run_id: Any) -> HttpResponse:
    """Has what is due of a run tried again that was set aside."""
    if not sent_before(request):
        try:
            services.try_again(caller_of(request), str(run_id), request.POST.get("reason", "").strip()[:2000])
            say(request, gettext("It is tried again within seconds."))
        except Refusal as refusal:
            if refusal.code in ("not_found", "forbidden"):
                raise
            say_refusal(request, refusal)
    return go(request, run_url(run_id))


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def run_act(request: HttpRequest, run_id: Any, name: str) -> HttpResponse:
    """Take over, terminate, retry, clear."""
    if name not in RUN_ACTS:
        raise Http404
    caller = caller_of(request)
    run = selectors.get_run(caller, str(run_id))
    return _answer(
        request, RUN_ACTS[name], run,
        lambda what: getattr(services, SERVICES[name])(caller, str(run_id), what),
        name=name,
    )  # fmt: skip


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def wait_act(request: HttpRequest, wait_id: Any, name: str) -> HttpResponse:
    """Ask for information, hand to someone, escalate, extend, comment."""
    if name not in WAIT_ACTS:
        raise Http404
    caller = caller_of(request)
    wait = selectors.get_wait(caller, str(wait_id))
    run = selectors.get_run(caller, str(wait["run"]))
    return _answer(
        request, WAIT_ACTS[name], run,
        lambda what: getattr(services, SERVICES[name])(caller, str(wait_id), what),
        wait=wait, name=name,
    )  # fmt: skip


@signed_in
@require_POST
def wait_claim(request: HttpRequest, wait_id: Any, name: str) -> HttpResponse:
    """Take a question on, or let it go: one click, told to the others."""
    caller = caller_of(request)
    wait = selectors.get_wait(caller, str(wait_id))
    service = {"claim": services.claim_wait, "release": services.release_wait}.get(name)
    if service is None:
        raise Http404
    try:
        service(caller, str(wait_id), body(commands.WaitAction))
    except Refusal as refusal:
        say_refusal(request, refusal)
    return go(request, run_url(wait["run"], scope_of(request), wait=str(wait_id)))


def _effect(run: dict[str, Any], key: str) -> dict[str, Any]:
    effect = present.find_effect(run, key)
    if effect is None:
        raise Http404
    return effect


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def reconcile(request: HttpRequest, run_id: Any) -> HttpResponse:
    """What became of an effect whose outcome nobody knew; `?key=` names it."""
    caller, key = caller_of(request), request.GET.get("key", "")
    run = selectors.get_run(caller, str(run_id))
    effect = _effect(run, key)
    undoing = effect.get("state") == "compensation_unknown"
    act = Act(
        gettext_lazy("Find out and reconcile"), gettext_lazy("Record what I found"),
        gettext_lazy("Look in the outside system itself, not in a log of ours. What you record here decides whether"
                     " it is done again, so record only what you saw."),
        commands.Reconcile, lambda data, run, query: ReconcileForm(data, undoing=undoing),
        gettext_lazy("Recorded."),
    )  # fmt: skip
    return _answer(
        request,
        act,
        run,
        lambda what: services.reconcile(caller, str(run_id), key, what),
        effect=effect,
        name="reconcile",
    )


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def sign_off(request: HttpRequest, run_id: Any) -> HttpResponse:
    """An effect that cannot be undone stays as it is, and somebody answers for that; `?key=` names it."""
    caller, key = caller_of(request), request.GET.get("key", "")
    run = selectors.get_run(caller, str(run_id))
    act = Act(
        gettext_lazy("Sign off"), gettext_lazy("Sign off"),
        gettext_lazy("It has no undo. By signing off you say that it may stay as it is, and the run can end."),
        commands.Reasoned, _plain(ReasonForm), gettext_lazy("Signed off."),
    )  # fmt: skip
    return _answer(
        request, act, run, lambda what: services.sign_off(caller, str(run_id), key, what),
        effect=_effect(run, key), name="sign_off",
    )  # fmt: skip


# --- hand back -----------------------------------------------------------------------------------------------------

HAND_ROWS = 3


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def handback(request: HttpRequest, run_id: Any) -> HttpResponse:
    """The checklist of a run that a person holds, then what the agent will be told, then the handing back."""
    caller = caller_of(request)
    run = selectors.get_run(caller, str(run_id))
    waits = [w for w in run.get("waits") or [] if w.get("kind") == "approval" and w.get("status") == "superseded"]
    posted = request.POST if request.method == "POST" else None
    checkpoint = run.get("checkpoint") or {}
    form = HandbackForm(posted, initial={"stage": run.get("stage"), "checkpoint_ref": checkpoint.get("ref")})
    rows, own, errors = _hand_effects(run, posted)
    answers = _hand_answers(waits, posted)
    refusal: Refusal | None = None
    told: dict[str, Any] | None = None
    status = 200
    if posted is not None:
        if form.is_valid() and not errors:
            values = _handback_values(form, rows, own, answers)
            if posted.get("step") == "send":
                if sent_before(request):
                    return go(request, run_url(run["id"]))
                try:
                    services.handback(caller, str(run_id), body(commands.Handback, **values))
                except Refusal as problem:
                    refusal, status = problem, problem.status
                    forget_token(request)
                else:
                    say(request, gettext("Handed back. An agent may go on."))
                    return go(request, run_url(run["id"]))
            elif posted.get("step") == "preview":
                told = values
        else:
            status = 422
    return page(
        request,
        "operate/handback.html",
        {
            "place": "run", "run": run, "form": form, "rows": rows, "own": own, "answers": answers, "errors": errors,
            "told": told, "refusal": refusal, "effects": present.effects_view(run),
            "next_up": checkpoint.get("next") or [],
        },
        status=status,
    )  # fmt: skip


def _hand_effects(run: dict[str, Any], posted: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """`(the run's unsettled effects with what was said of each, effects added by hand, errors)`."""
    errors: list[str] = []
    rows = []
    for index, effect in enumerate(run.get("effects") or []):
        if effect.get("state") not in {"planned", "unknown", "failed", "compensation_unknown"}:
            continue
        row = {
            "effect": effect,
            "index": index,
            "unknown": effect.get("state") in present.UNKNOWN_STATES,
            "undoing": effect.get("state") == "compensation_unknown",
            "said": (posted or {}).get(f"done-{index}", ""),
            "receipt": (posted or {}).get(f"receipt-{index}", "").strip()[:500] if posted else "",
            "error": "",
        }
        if posted is not None and row["unknown"] and not row["said"]:
            row["error"] = gettext("Say what became of it; an unknown outcome cannot be handed back.")
            errors.append(row["error"])
        rows.append(row)
    own = []
    for index in range(HAND_ROWS):
        item = {
            name: ((posted or {}).get(f"own-{name}-{index}", "") or "").strip()[:500]
            for name in ("system", "action", "resource", "receipt")
        }
        item["index"] = str(index)
        if (
            posted is not None
            and any(item[n] for n in ("system", "action", "resource", "receipt"))
            and not (item["system"] and item["action"])
        ):
            item["error"] = gettext("Name the system and what was done there.")
            errors.append(item["error"])
        own.append(item)
    return rows, own, errors


def _hand_answers(waits: list[dict[str, Any]], posted: Any) -> list[dict[str, Any]]:
    return [
        {"wait": w, "index": i, "said": (posted or {}).get(f"answer-{i}", ""),
         "reason": ((posted or {}).get(f"answer-reason-{i}", "") or "")[:4000]}
        for i, w in enumerate(waits)
    ]  # fmt: skip


def _handback_values(
    form: forms.Form, rows: list[dict[str, Any]], own: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> dict[str, Any]:
    data = form.cleaned_data
    effects: list[dict[str, Any]] = []
    for row in rows:
        if row["said"] in {"executed", "not_executed", "compensated"} and (row["unknown"] or row["said"] == "executed"):
            effect = {"key": row["effect"]["key"], "outcome": row["said"]}
            if row["receipt"]:
                effect["receipt"] = {"id": row["receipt"]}
            effects.append(effect)
    for item in own:
        if item["system"] and item["action"]:
            effects.append(
                {
                    "key": f"by-hand:{item['system']}:{item['action']}:{item['resource'] or item['index']}"[:200],
                    "system": item["system"][:100],
                    "action": item["action"][:100],
                    "resource": item["resource"] or None,
                    "receipt": {"id": item["receipt"]} if item["receipt"] else {},
                }
            )
            effects[-1] = {k: v for k, v in effects[-1].items() if v is not None}
    return {
        "reason": data["reason"],
        "stage": data["stage"],
        "checkpoint": {"ref": data["checkpoint_ref"]} if data["checkpoint_ref"] else None,
        "note": data["note"],
        "answers": [
            {"wait": a["wait"]["id"], "choice": a["said"], "reason": a["reason"]}
            for a in answers
            if a["said"] in {"approve", "reject"}
        ],
        "effects": effects,
        "needed_engineer": data["needed_engineer"],
    }
