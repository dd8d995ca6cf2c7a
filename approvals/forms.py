"""The console's forms: what a person types, as the bodies of `rehydrate.core.commands`. Rules live in the ledger."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django import forms
from django.conf import settings
from django.contrib.auth import authenticate
from django.contrib.auth.models import User
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from approvals.models import SavedView, UserPreference
from approvals.prefs import zone_or_none


class LocalDateTime(forms.DateTimeInput):
    """The browser's own date and time input, in the reader's zone."""

    input_type = "datetime-local"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(format="%Y-%m-%dT%H:%M", **kwargs)


def lines(rows: int = 3, **attrs: Any) -> forms.Textarea:
    return forms.Textarea(attrs={"rows": rows, **attrs})


class SignInForm(forms.Form):
    """Name and password."""

    username = forms.CharField(
        label=_("User name"), max_length=150,
        widget=forms.TextInput(attrs={"autocomplete": "username", "autofocus": True, "autocapitalize": "none"}),
    )  # fmt: skip
    password = forms.CharField(
        label=_("Password"), strip=False, widget=forms.PasswordInput(attrs={"autocomplete": "current-password"})
    )

    def __init__(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self.request = request
        self.user: User | None = None
        super().__init__(*args, **kwargs)

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if data.get("username") and data.get("password"):
            self.user = authenticate(self.request, username=data["username"], password=data["password"])
            if self.user is None:
                raise forms.ValidationError(_("That name and password do not belong together."))
        return data


class ReasonForm(forms.Form):
    """An act that needs nothing but a reason, which stays in the ledger."""

    reason = forms.CharField(label=_("Reason"), max_length=500, widget=lines(3, autofocus=True))

    def values(self) -> dict[str, Any]:
        return dict(self.cleaned_data)


class RejectForm(forms.Form):
    """A reason from the ask's preset or one's own."""

    preset = forms.ChoiceField(label=_("Reason"), required=False, widget=forms.RadioSelect)
    reason = forms.CharField(label=_("In your own words"), required=False, max_length=4000, widget=lines(3))

    def __init__(self, *args: Any, reasons: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons:
            self.fields["preset"].choices = [(r, r) for r in reasons]  # type: ignore[attr-defined]
        else:
            del self.fields["preset"]
            self.fields["reason"].label = _("Reason")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        parts = [data.get("preset", ""), data.get("reason", "")]
        data["full_reason"] = " – ".join(part for part in parts if part)
        if not data["full_reason"]:
            self.add_error("reason", _("Say why, so that the agent and the auditor know."))
        return data


class ApproveForm(forms.Form):
    """Nothing has to be said; a comment may."""

    comment = forms.CharField(label=_("Comment (optional)"), required=False, max_length=4000, widget=lines(2))


class ConditionsForm(ApproveForm):
    """Until when the approval may be used; its rows are read by `approvals.conditions`."""

    expires_at = forms.DateTimeField(label=_("Valid until (optional)"), required=False, widget=LocalDateTime())

    def clean_expires_at(self) -> dt.datetime | None:
        value: dt.datetime | None = self.cleaned_data["expires_at"]
        if value and value <= timezone.now():
            raise forms.ValidationError(_("That is in the past."))
        return value


class RespondForm(forms.Form):
    """A free answer to a question that authorises nothing."""

    response = forms.CharField(label=_("Your answer"), max_length=4000, widget=lines(4, autofocus=True))
    comment = forms.CharField(label=_("Comment (optional)"), required=False, max_length=4000, widget=lines(2))


class CommentForm(forms.Form):
    """A line of discussion, or a request for information."""

    comment = forms.CharField(label=_("Message"), max_length=4000, widget=lines(3))

    def values(self) -> dict[str, Any]:
        return {"comment": self.cleaned_data["comment"]}


class InfoForm(CommentForm):
    comment = forms.CharField(label=_("What do you need to know?"), max_length=4000, widget=lines(3, autofocus=True))


class AssignForm(forms.Form):
    """Hand the question to somebody else, by user name."""

    to = forms.CharField(
        label=_("Hand to (user name)"), max_length=100, widget=forms.TextInput(attrs={"autofocus": True})
    )
    reason = forms.CharField(label=_("Why (optional)"), required=False, max_length=4000, widget=lines(2))

    def values(self) -> dict[str, Any]:
        return dict(self.cleaned_data)


class EscalateForm(forms.Form):
    reason = forms.CharField(label=_("Why"), max_length=4000, widget=lines(3, autofocus=True))

    def values(self) -> dict[str, Any]:
        return dict(self.cleaned_data)


class ExtendForm(forms.Form):
    """A later deadline."""

    due_at = forms.DateTimeField(label=_("New deadline"), widget=LocalDateTime(attrs={"autofocus": True}))
    reason = forms.CharField(label=_("Why (optional)"), required=False, max_length=4000, widget=lines(2))

    def clean_due_at(self) -> dt.datetime:
        value: dt.datetime = self.cleaned_data["due_at"]
        if value <= timezone.now():
            raise forms.ValidationError(_("That is in the past."))
        return value

    def values(self) -> dict[str, Any]:
        return dict(self.cleaned_data)


class RetryForm(ReasonForm):
    """More tries, for one effect or for the run as a whole."""

    tries = forms.IntegerField(label=_("How many more tries"), min_value=1, max_value=100, initial=1)
    effect = forms.ChoiceField(label=_("For"), required=False)
    field_order = ("tries", "effect", "reason")

    def __init__(self, *args: Any, effects: list[tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["effect"].choices = [("", _("the run as a whole")), *effects]  # type: ignore[attr-defined]

    def values(self) -> dict[str, Any]:
        return {**self.cleaned_data, "effect": self.cleaned_data["effect"] or None}


class ClearForm(ReasonForm):
    """Which reasons are settled by having been looked at, and the metadata that was missing."""

    codes = forms.MultipleChoiceField(label=_("What you have checked"), widget=forms.CheckboxSelectMultiple)
    stage = forms.CharField(label=_("Stage"), required=False, max_length=100)
    checkpoint_ref = forms.CharField(label=_("Checkpoint reference"), required=False, max_length=2000)
    input_ref = forms.CharField(label=_("Input reference"), required=False, max_length=2000)
    field_order = ("codes", "stage", "checkpoint_ref", "input_ref", "reason")

    def __init__(self, *args: Any, reasons: list[dict[str, Any]], missing: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reasons = reasons  # the template says them in words
        codes = [str(reason["code"]) for reason in reasons]
        self.fields["codes"].choices = [(code, code) for code in codes]  # type: ignore[attr-defined]
        self.fields["codes"].initial = codes
        for name, field in {"stage": "stage", "checkpoint": "checkpoint_ref", "input_ref": "input_ref"}.items():
            if name not in missing:
                del self.fields[field]

    def values(self) -> dict[str, Any]:
        data = self.cleaned_data
        return {
            "reason": data["reason"],
            "codes": data["codes"],
            "stage": data.get("stage") or None,
            "checkpoint": {"ref": data["checkpoint_ref"]} if data.get("checkpoint_ref") else None,
            "input": {"ref": data["input_ref"]} if data.get("input_ref") else None,
        }


class ReconcileForm(forms.Form):
    """What a person found out about an effect whose outcome nobody knew."""

    outcome = forms.ChoiceField(label=_("What did you find?"), widget=forms.RadioSelect)
    receipt_id = forms.CharField(
        label=_("Receipt or number found there (if it happened)"), required=False, max_length=500
    )
    receipt_url = forms.URLField(
        label=_("Link to it (optional)"), required=False, max_length=2000, assume_scheme="https"
    )
    reason = forms.CharField(label=_("Where you looked, and what you saw"), max_length=500, widget=lines(3))

    def __init__(self, *args: Any, undoing: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if undoing:
            choices = [
                ("compensated", _("It was undone.")),
                ("executed", _("It was not undone: it still stands outside.")),
            ]
        else:
            choices = [
                ("executed", _("It happened.")),
                ("not_executed", _("It did not happen. The agent may do it again.")),
                ("compensated", _("It happened and has been undone since.")),
            ]
        self.fields["outcome"].choices = choices  # type: ignore[attr-defined]

    def values(self) -> dict[str, Any]:
        data = self.cleaned_data
        receipt = {name: data[f"receipt_{name}"] for name in ("id", "url") if data[f"receipt_{name}"]}
        return {"outcome": data["outcome"], "reason": data["reason"], "receipt": receipt or None}


class HandbackForm(forms.Form):
    """Where the run goes on after a person held it; what was done by hand is read from the checklist's rows."""

    stage = forms.CharField(label=_("Stage"), max_length=100)
    checkpoint_ref = forms.CharField(label=_("Checkpoint reference"), required=False, max_length=2000)
    note = forms.CharField(label=_("Note for the agent (optional)"), required=False, max_length=4000, widget=lines(3))
    reason = forms.CharField(label=_("What you did, for the record"), max_length=500, widget=lines(3))
    needed_engineer = forms.BooleanField(label=_("An engineer had to help"), required=False)


class PreferenceForm(forms.ModelForm):  # type: ignore[type-arg]
    """Language, theme, time zone and keys."""

    language = forms.ChoiceField(label=_("Language"), required=False)
    time_zone = forms.CharField(
        label=_("Time zone"), required=False, max_length=64,
        help_text=_("Empty: the browser's own. For example Europe/Berlin or Asia/Shanghai."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )  # fmt: skip

    class Meta:
        model = UserPreference
        fields = ("language", "theme", "time_zone", "shortcuts")
        labels = {"theme": _("Theme"), "shortcuts": _("Keyboard shortcuts")}
        widgets = {"theme": forms.RadioSelect}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["language"].choices = [("", _("As the browser says")), *settings.LANGUAGES]  # type: ignore[attr-defined]

    def clean_time_zone(self) -> str:
        value: str = self.cleaned_data["time_zone"].strip()
        if value and zone_or_none(value) is None:
            raise forms.ValidationError(_("No such time zone."))
        return value


class SavedViewForm(forms.ModelForm):  # type: ignore[type-arg]
    class Meta:
        model = SavedView
        fields = ("name",)
        labels = {"name": _("Name of this view")}
