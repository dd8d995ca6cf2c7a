"""The Django application of the console."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class ApprovalsConfig(AppConfig):
    """Holds people's preferences and saved views; every page a person acts on."""

    default_auto_field = "django.db.models.BigAutoField"
    name = "approvals"
    verbose_name = _("Console")
