"""Addresses of the history, and of what says how well recovery goes."""

from django.urls import path

from audit import views

urlpatterns = [
    path("history/", views.history, name="history"),
    path("timers/", views.timers, name="timers"),
    path("recovery/", views.recovery_page, name="recovery"),
    path("recovery/<slug:metric>/", views.recovery_runs, name="recovery_runs"),
    path("readiness/", views.readiness_page, name="readiness"),
    path("drills/", views.drills, name="drills"),
    path("drills/<uuid:result_id>/", views.drill_result, name="drill_result"),
]
