"""The Django application of the history and its words."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class AuditConfig(AppConfig):
    """Has no tables: it reads the ledger."""

    name = "audit"
    verbose_name = _("Audit")
