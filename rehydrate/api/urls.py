"""The addresses under /api/: the operations, the schema, its rendering, and a problem document for everything else."""

from django.urls import URLPattern, path, re_path

from rehydrate.api import docs, problems, schema
from rehydrate.api import views as v
from rehydrate.api.endpoint import resource

urlpatterns: list[URLPattern] = [
    resource("v1/me", v.who_am_i),
    resource("v1/runs", v.list_runs, v.open_run),
    resource("v1/runs/<str:run_id>", v.get_run),
    resource("v1/runs/<str:run_id>/events", v.list_events, v.append_events),
    resource("v1/runs/<str:run_id>/verdict", v.get_verdict),
    resource("v1/runs/<str:run_id>/evidence", v.get_evidence),
    resource("v1/runs/<str:run_id>/heartbeat", v.heartbeat),
    resource("v1/runs/<str:run_id>/release", v.release),
    resource("v1/runs/<str:run_id>/recall", v.recall),
    resource("v1/runs/<str:run_id>/rehydrate", v.rehydrate_run),
    resource("v1/runs/<str:run_id>/takeover", v.takeover),
    resource("v1/runs/<str:run_id>/handback", v.handback),
    resource("v1/runs/<str:run_id>/terminate", v.terminate),
    resource("v1/runs/<str:run_id>/retry", v.retry),
    resource("v1/runs/<str:run_id>/clear", v.clear),
    # An effect's key may have slashes in it.
    resource("v1/runs/<str:run_id>/effects/<path:key>/reconcile", v.reconcile),
    resource("v1/runs/<str:run_id>/effects/<path:key>/sign_off", v.sign_off),
    resource("v1/claims", v.claim),
    resource("v1/signals", v.list_signals, v.send_signal),
    resource("v1/signals/<str:signal_id>/assign", v.assign_signal),
    resource("v1/hooks/<str:token>", v.receive_hook),
    resource("v1/deliveries", v.list_deliveries),
    resource("v1/deliveries/<str:delivery_id>", v.get_delivery),
    resource("v1/deliveries/<str:delivery_id>/resend", v.resend_delivery),
    resource("v1/waits", v.list_waits),
    resource("v1/waits/<str:wait_id>", v.get_wait),
    resource("v1/waits/<str:wait_id>/decisions", v.decide),
    resource("v1/waits/<str:wait_id>/claim", v.claim_wait),
    resource("v1/waits/<str:wait_id>/release", v.release_wait),
    resource("v1/waits/<str:wait_id>/assign", v.assign_wait),
    resource("v1/waits/<str:wait_id>/extend", v.extend_wait),
    resource("v1/waits/<str:wait_id>/escalate", v.escalate_wait),
    resource("v1/waits/<str:wait_id>/request_info", v.request_info),
    resource("v1/waits/<str:wait_id>/comment", v.comment_wait),
    path("schema/", schema.schema_view, name="schema"),
    path("docs/", docs.docs_view, name="api_docs"),
    re_path(r"", problems.nothing_here),  # whatever it is, line breaks included
]
