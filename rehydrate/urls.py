"""Every address of the server. What answers there lives in the apps."""

from django.contrib import admin
from django.urls import include, path

from rehydrate import ops

urlpatterns = [
    path("healthz", ops.healthz, name="healthz"),
    path("readyz", ops.readyz, name="readyz"),
    path("metrics", ops.metrics, name="metrics"),
    path("api/", include("audit.api")),  # before the API's own, which ends in a 404 for everything else
    path("api/", include("rehydrate.api.urls")),
    path("admin/", admin.site.urls),
    path("", include("approvals.urls")),
    path("", include("audit.urls")),
]
