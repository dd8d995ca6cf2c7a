"""What the console keeps about a person: preferences and saved views. Nothing about runs, which the ledger keeps."""

from __future__ import annotations

from typing import ClassVar

from django.conf import settings
from django.db import models
from django.utils.translation import gettext_lazy as _


class UserPreference(models.Model):
    """How one person wants the console: empty means "as the browser says"."""

    class Theme(models.TextChoices):
        AUTO = "auto", _("As the system")
        LIGHT = "light", _("Light")
        DARK = "dark", _("Dark")

    user = models.OneToOneField(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="console_preference")
    language = models.CharField(max_length=16, blank=True, default="")
    theme = models.CharField(max_length=8, choices=Theme.choices, default=Theme.AUTO)
    time_zone = models.CharField(max_length=64, blank=True, default="")
    shortcuts = models.BooleanField(default=True)

    def __str__(self) -> str:
        return f"preferences of {self.user_id}"


class SavedView(models.Model):
    """A named inbox address (its query string), one person's own."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="saved_views")
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=500, blank=True, default="")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering: ClassVar = ["name"]
        constraints: ClassVar = [
            # read by the rail of every page: one person's views by name
            models.UniqueConstraint(fields=["user", "name"], name="saved_view_name_once_per_user"),
        ]

    def __str__(self) -> str:
        return self.name
