"""Django's admin for superusers: they see the ledger's tables there and change none of them."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import User
from django.db import transaction
from django.http import HttpRequest

from rehydrate import ledger
from rehydrate.models import AdminEvent, Workspace

_SECRET = {"digest", "token", "sealed", "secret", "previous_secret"}


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


class People(UserAdmin):  # type: ignore[type-arg]
    """People may be switched off here, never deleted: whatever they may decide gets a new version (rules 11 and 16)."""

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        with transaction.atomic():
            super().save_model(request, obj, form, change)
            if "is_active" not in form.changed_data:
                return
            by = request.user.get_username()
            for workspace in Workspace.objects.filter(groups__members=obj).distinct():
                AdminEvent.objects.create(
                    workspace=workspace,
                    actor_kind="person",
                    actor_id=by,
                    act="person.switched_on" if obj.is_active else "person.switched_off",
                    subject=obj.get_username(),
                    channel="admin",
                )
                names = set(obj.rehydrate_groups.filter(workspace=workspace).values_list("name", flat=True))
                ledger.policy_changed(workspace=workspace, groups=names, flow_waits=set(), by=by)


admin.site.unregister(User)
admin.site.register(User, People)
