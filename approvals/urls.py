"""The console's addresses."""

from django.urls import path

from approvals.views import account, decide, deliveries, inbox, operate, runs

urlpatterns = [
    path("", inbox.inbox, name="inbox"),
    path("inbox/live/", inbox.inbox_live, name="inbox_live"),
    path("inbox/bulk/", inbox.bulk, name="bulk"),
    path("inbox/views/", inbox.save_view, name="save_view"),
    path("live/", inbox.scopes_live, name="scopes_live"),
    path("runs/", runs.run_list, name="runs"),
    path("runs/<uuid:run_id>/", runs.run_page, name="run"),
    path("runs/<uuid:run_id>/live/", runs.run_live, name="run_live"),
    path("runs/<uuid:run_id>/timeline/", runs.timeline, name="timeline"),
    path("runs/<uuid:run_id>/handback/", operate.handback, name="handback"),
    path("runs/<uuid:run_id>/reconcile/", operate.reconcile, name="reconcile"),
    path("runs/<uuid:run_id>/try-again/", operate.try_again, name="try_again"),
    path("runs/<uuid:run_id>/sign-off/", operate.sign_off, name="sign_off"),
    path("runs/<uuid:run_id>/<slug:name>/", operate.run_act, name="run_act"),
    path("waits/<uuid:wait_id>/state/", decide.wait_state, name="wait_state"),
    path("waits/<uuid:wait_id>/decide/<slug:way>/", decide.decide, name="decide"),
    path("waits/<uuid:wait_id>/hold/<slug:name>/", operate.wait_claim, name="wait_claim"),
    path("waits/<uuid:wait_id>/<slug:name>/", operate.wait_act, name="wait_act"),
    path("deliveries/", deliveries.delivery_list, name="deliveries"),
    path("deliveries/live/", deliveries.delivery_list_live, name="deliveries_live"),
    path("deliveries/<uuid:delivery_id>/", deliveries.delivery_page, name="delivery"),
    path("deliveries/<uuid:delivery_id>/live/", deliveries.delivery_live, name="delivery_live"),
    path("deliveries/<uuid:delivery_id>/resend/", deliveries.resend, name="delivery_resend"),
    path("receivers/<uuid:endpoint_id>/<slug:name>/", deliveries.receiver_act, name="receiver_act"),
    path("sign-in/", account.sign_in, name="sign_in"),
    path("sign-in/<str:token>/", account.sign_in_link, name="sign_in_link"),
    path("sign-out/", account.sign_out, name="sign_out"),
    path("settings/", account.preferences, name="settings"),
    path("settings/switch/", account.switch, name="switch"),
]
