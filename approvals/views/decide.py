"""Deciding one ask: a confirmation for each choice, the consequences in sight, and what was typed never lost."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import Http404, HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from approvals import conditions, live, present, schema_form
from approvals.forms import ApproveForm, ConditionsForm, RejectForm, RespondForm
from approvals.web import (
    body,
    caller_of,
    forget_token,
    go,
    page,
    person,
    run_url,
    say,
    scope_of,
    sent_before,
    signed_in,
)
from rehydrate import selectors, services, wakeups
from rehydrate.core import commands
from rehydrate.core.refusals import Refusal

CHOICES = {
    "approve": "approve",
    "conditions": "approve_with_conditions",
    "edit": "edit",
    "reject": "reject",
    "respond": "respond",
}


@signed_in
@require_http_methods(["GET", "HEAD", "POST"])
def decide(request: HttpRequest, wait_id: Any, way: str) -> HttpResponse:
    """GET shows what will follow and asks to confirm; POST decides. GET decides nothing, whoever opens it."""
    if way not in CHOICES:
        raise Http404
    caller = caller_of(request)
    wait = selectors.get_wait(caller, str(wait_id))
    run = selectors.get_run(caller, str(wait["run"]))
    draft = Draft(request, wait, run, CHOICES[way])
    if request.method != "POST":
        return draft.page(request, status=200)
    if sent_before(request):
        return go(request, run_url(run["id"], scope_of(request)))
    if not draft.valid(request):
        forget_token(request)
        return draft.page(request, status=422)
    try:
        services.decide(caller, str(wait_id), body(commands.Decide, **draft.values()))
    except Refusal as refusal:
        forget_token(request)
        return _refused(request, draft, refusal)
    return go(request, _after(request, run, wait))


class Draft:
    """One person's answer in the making: the ask as it stands, the form as typed, the version they had before them."""

    def __init__(self, request: HttpRequest, wait: dict[str, Any], run: dict[str, Any], choice: str) -> None:
        self.wait, self.run, self.choice = wait, run, choice
        self.ask = present.ask_view(wait, run)
        self.user = person(request)
        posted = request.POST if request.method == "POST" else None
        self.shown_version = (
            _version(posted["wait_version"]) if posted and "wait_version" in posted else wait["version"]
        )
        self.high = self.ask["risk"] == "high" and choice != "reject"
        self.arguments = (self.ask["effect"] or {}).get("arguments") or {}
        self.rows = conditions.blank()
        self.conditions: list[dict[str, Any]] = []
        self.fields: list[schema_form.Field] = []
        self.answer: Any = None
        self.proof_error = ""
        self.general: list[str] = []
        self.refusal: Refusal | None = None
        self.form = self._form(posted)
        if choice == "edit":
            self.fields = schema_form.fields(self.ask["schema"], self.arguments)
        elif choice == "respond" and self.ask["response_schema"]:
            self.fields = schema_form.fields(self.ask["response_schema"], {})

    def _form(self, posted: Any) -> forms.Form:
        if self.choice == "reject":
            return RejectForm(posted, reasons=self.ask["reasons"])
        if self.choice == "approve_with_conditions":
            return ConditionsForm(posted)
        if self.choice == "respond" and not self.ask["response_schema"]:
            return RespondForm(posted)
        return ApproveForm(posted)

    def valid(self, request: HttpRequest) -> bool:
        """Reads all parts, so that every error shows at once."""
        good = self.form.is_valid()
        if self.choice == "approve_with_conditions":
            self.rows, self.conditions, right = conditions.read(request.POST, self.arguments)
            if request.POST.get("add_row"):  # without JavaScript: one more row, nothing sent
                self.rows.append(conditions.Row(len(self.rows)))
                return False
            good = good and right
        if self.fields:
            base = self.arguments if self.choice == "edit" else {}
            self.answer, right = schema_form.read(self.fields, request.POST, base)
            good = good and right
        if self.high and not self._proven(request):
            good = False
        return good

    def _proven(self, request: HttpRequest) -> bool:
        """High risk asks again who it is: the password, or for people without one the run's number typed by hand."""
        if self.user.has_usable_password():
            if self.user.check_password(request.POST.get("password", "")):
                return True
            self.proof_error = _("That is not your password.")
            return False
        if request.POST.get("typed", "").strip() == str(self.run.get("external_id")):
            return True
        self.proof_error = _("Type it exactly as it stands above.")
        return False

    def values(self) -> dict[str, Any]:
        """The body of the decision."""
        data = self.form.cleaned_data
        values: dict[str, Any] = {
            "choice": self.choice,
            "wait_version": self.shown_version,
            "comment": data.get("comment") or None,
            "reason": data.get("full_reason") or None,
            "seen": present.seen_by_reviewer(self.run, {**self.wait, "version": self.shown_version}),
        }
        if self.choice == "approve_with_conditions":
            values |= {"conditions": self.conditions, "expires_at": data.get("expires_at")}
        elif self.choice == "edit":
            values["arguments"] = self.answer
        elif self.choice == "respond":
            values["response"] = self.answer if self.fields else data["response"]
        return values

    def page(self, request: HttpRequest, *, status: int) -> HttpResponse:
        """The confirmation, as a page or as the inside of the dialog."""
        stale = self.refusal is not None and self.refusal.code == "stale_decision"
        return page(
            request,
            "decide/page.html",
            {
                "place": "run",
                "draft": self,
                "run": self.run,
                "wait": self.wait,
                "ask": self.ask,
                "way": next(way for way, choice in CHOICES.items() if choice == self.choice),
                "choice": self.choice,
                "form": self.form,
                "follows": present.follows(self.run, self.wait),
                "pointers": present.leaf_fields(self.arguments, schema=self.ask["schema"]),
                "ops": conditions.OPS,
                # after a stale answer the next press speaks of the ask as it stands now
                "version": self.wait["version"] if stale else self.shown_version,
                "closed": self.wait.get("status") != "open",
                "refusal": self.refusal,
                "scope": scope_of(request),
            },
            status=status,
        )


def _version(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _refused(request: HttpRequest, draft: Draft, refusal: Refusal) -> HttpResponse:
    """Next to the form: who was quicker, what changed, what is wrong; the wait is read again as it stands now."""
    if refusal.code == "forbidden":
        draft.refusal = refusal
        return draft.page(request, status=refusal.status)
    caller = caller_of(request)
    fresh = selectors.get_wait(caller, str(draft.wait["id"]))
    draft.wait, draft.run = fresh, selectors.get_run(caller, str(fresh["run"]))
    draft.ask = present.ask_view(fresh, draft.run)
    draft.refusal = refusal
    if refusal.code == "invalid":
        errors = refusal.extra.get("errors") or []
        draft.general = schema_form.mark_errors(
            draft.fields, errors, "/arguments" if draft.choice == "edit" else "/response"
        )
    return draft.page(request, status=refusal.status)


def _after(request: HttpRequest, run: dict[str, Any], wait: dict[str, Any]) -> str:
    """Where to go on: the next open item of the scope one came from, else the run that was decided."""
    scope = scope_of(request)
    here = run_url(run["id"])
    if scope and scope != "decided":
        listed = selectors.inbox(caller_of(request), scope=scope, filters={}, cursor=None, limit=10)
        for item in listed["results"]:
            row = present.row(item)
            if row["wait_id"] != wait["id"] and row["run_id"] != run["id"]:
                say(request, _("Decided: %(what)s") % {"what": present.ask_view(wait, run)["summary"]}, link=here)
                return run_url(row["run_id"], scope, wait=row["wait_id"])
    say(request, _("Decided."))
    return run_url(run["id"], scope)


@signed_in
@require_safe
def wait_state(request: HttpRequest, wait_id: Any) -> HttpResponse:
    """For an open confirmation: nothing while the ask is as it was shown, else who decided or that it changed."""
    shown = _version(request.GET.get("v", ""))

    def look() -> HttpResponse | None:
        wait = selectors.get_wait(caller_of(request), str(wait_id))
        if wait.get("status") == "open" and wait.get("version") == shown:
            return None
        return page(request, "decide/_state.html", {"wait": wait, "changed": wait.get("status") == "open"})

    run_id = selectors.run_of_wait(caller_of(request), str(wait_id))
    return live.until(request, [wakeups.run(run_id)], look) or HttpResponse(status=204)
