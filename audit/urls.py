"""Addresses of the history."""

from django.urls import path

from audit import views

urlpatterns = [path("history/", views.history, name="history")]
