"""Addresses of the history, and of what says how well recovery goes."""

from django.urls import path

from audit import views

urlpatterns = [
    path("history/", views.history, name="history"),
    path("timers/", views.timers, name="timers"),
    path("drills/", views.drills, name="drills"),
    path("drills/<uuid:result_id>/", views.drill_result, name="drill_result"),
]
