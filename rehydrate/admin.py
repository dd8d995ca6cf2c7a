"""Django's admin for superusers: they see the ledger's tables there and change none of them."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest

_SECRET = {"digest", "token", "sealed"}


class ReadOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """Whoever wants to change something goes through `apply`, the console or the API, which write it down."""

    show_full_result_count = False
    list_per_page = 50

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_exclude(self, request: HttpRequest, obj: Any = None) -> list[str]:
        return [field.name for field in self.opts.fields if field.name in _SECRET]


for _model in apps.get_app_config("rehydrate").get_models():
    admin.site.register(_model, ReadOnly)
