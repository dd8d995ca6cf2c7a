"""The ledger's deliveries, signed and really sent, wake instances: of a task hub, and of Azure Durable Functions.

The latter is a double of its documented HTTP API, served on this machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import pytest
from django.core.management import call_command
from standardwebhooks import Webhook

from rehydrate import sender
from rehydrate.adapters.durabletask import EVENT, AzureFunctions, Flow, Receiver
from rehydrate.models import Delivery
from rehydrate.webhooks import new_secret
from tests.deliveries.receiver import Server

Json = dict[str, Any]
CODE = "the system key"
SECRET = new_secret()


@dataclass
class Answered:
    status: int
    body: Any = None


@contextlib.contextmanager
def served(answer: Callable[[str, str, Mapping[str, str], bytes], Answered]) -> Iterator[str]:
    """The address where `answer(method, path, headers, body)` is served on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answered = answer(self.command, self.path, headers, body)
            sent = b"" if answered.body is None else json.dumps(answered.body).encode()
            self.send_response(answered.status)
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@dataclass
class Azure:
    """What the HTTP API of Durable Functions says of its instances, as documented, and what it was asked."""

    instances: dict[str, str] = field(default_factory=dict)  # instance -> runtimeStatus
    events: list[tuple[str, str, Any]] = field(default_factory=list)
    broken: bool = False

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answered:
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.broken:
            return Answered(503)
        if query.get("code") != CODE:
            return Answered(401)
        parts = [unquote(part) for part in url.path.split("/")]
        assert parts[:5] == ["", "runtime", "webhooks", "durabletask", "instances"]
        instance, rest = parts[5], parts[6:]
        state = self.instances.get(instance)
        if state is None:
            return Answered(404)
        if method == "GET":
            over = state in ("Completed", "Failed", "Terminated")
            return Answered(200 if over else 202, {"runtimeStatus": state, "output": "it broke" if over else None})
        if state != "Running":
            return Answered(410)
        if rest[0] == "terminate":
            self.instances[instance] = "Terminated"
            return Answered(202)
        assert rest[0] == "raiseEvent"
        if "application/json" not in headers.get("content-type", ""):
            return Answered(400)
        self.events.append((instance, rest[1], json.loads(body)))
        return Answered(202)


@pytest.fixture
def azure() -> Azure:
    return Azure({"c-1": "Running", "over": "Completed"})


@pytest.fixture
def functions(azure: Azure) -> Iterator[AzureFunctions]:
    with served(azure.answer) as url, httpx.Client(trust_env=False) as http:
        yield AzureFunctions(url, CODE, task_hub="hub", connection="Storage", http=http)


def signed(body: Json, secret: str = SECRET) -> tuple[Json, bytes]:
    text = json.dumps(body)
    now = datetime.now(UTC)
    signature = Webhook(secret).sign("msg_1", now, text)
    headers = {"Webhook-Id": "msg_1", "Webhook-Timestamp": str(int(now.timestamp())), "Webhook-Signature": signature}
    return headers, text.encode()


def told(type: str, status: str, instance: str = "c-1") -> tuple[Json, bytes]:
    return signed({"type": type, "timestamp": "", "data": {"external_id": instance, "status": status}})


# --- the HTTP API ----------------------------------------------------


def test_event_is_raised_where_the_instance_runs(azure, functions):
    assert functions.raise_event("c-1", EVENT) is True
    assert functions.raise_event("over", EVENT) is False
    assert functions.raise_event("never was", EVENT) is False
    assert azure.events == [("c-1", EVENT, {})]


def test_instance_is_terminated_once(azure, functions):
    assert functions.terminate("c-1", "No more") is True
    assert functions.terminate("c-1", "No more") is False
    assert azure.instances["c-1"] == "Terminated"


def test_status_says_what_became_of_an_instance(azure, functions):
    azure.instances["failed"] = "Failed"
    assert functions.status("c-1").state == "running"
    assert not functions.status("c-1").over
    assert functions.status("over").over
    assert functions.status("failed").detail == "it broke"
    assert functions.status("never was") is None


def test_wrong_key_is_an_error_and_not_an_instance_that_is_gone(azure):
    with served(azure.answer) as url, httpx.Client(trust_env=False) as http:
        functions = AzureFunctions(url, "wrong", http=http)
        for call in (functions.status, lambda i: functions.raise_event(i, EVENT), lambda i: functions.terminate(i, "")):
            with pytest.raises(httpx.HTTPStatusError):
                call("c-1")


def test_runs_of_failed_instances_go_to_a_person(azure, functions, ledger, alice):
    flow = Flow(ledger, "contract")
    begun = {
        instance: flow.activity({"step": "open", "instance": instance, "opening": {}, "epoch": None})["value"]
        for instance in ("c-1", "broke", "never was")
    }
    azure.instances["broke"] = "Failed"

    assert set(flow.tend(functions)) == {begun["broke"], begun["never was"]}

    assert ledger.get(begun["c-1"])["status"] == "running"
    assert "it broke" in ledger.get(begun["broke"])["last_error"]["message"]
    assert "gone" in ledger.get(begun["never was"])["last_error"]["message"]


# --- the receiver ----------------------------------------------------


def test_receiver_takes_only_what_the_ledger_signed(azure, functions):
    receiver = Receiver(functions, SECRET)
    headers, body = told("run.ready", "ready")
    assert receiver(headers, body) == 204
    assert receiver({}, body) == 401
    assert receiver({**headers, "Webhook-Signature": "nonsense"}, body) == 401
    assert receiver(headers, body.replace(b"c-1", b"c-2")) == 401
    assert receiver(*signed(json.loads(body), new_secret())) == 401
    assert azure.events == [("c-1", EVENT, {})]


def test_receiver_wakes_when_a_run_may_go_on_and_not_otherwise(azure, functions):
    receiver = Receiver(functions, SECRET)
    for type, status in (
        ("run.ready", "ready"),
        ("run.compensating", "compensating"),
        ("run.review", "review"),
        ("wait.opened", "waiting"),
        ("run.ended", "completed"),
    ):
        assert receiver(*told(type, status)) == 204
    assert len(azure.events) == 3


def test_terminated_run_ends_its_instance(azure, functions):
    assert Receiver(functions, SECRET, terminate=False)(*told("run.ended", "terminated")) == 204
    assert azure.instances["c-1"] == "Running"
    assert Receiver(functions, SECRET)(*told("run.ended", "terminated")) == 204
    assert azure.instances["c-1"] == "Terminated"


def test_delivery_for_an_instance_that_is_gone_is_taken(functions):
    assert Receiver(functions, SECRET)(*told("run.ready", "ready", "never was")) == 204
    assert Receiver(functions, SECRET)(*told("run.ready", "ready", "over")) == 204


def test_delivery_is_asked_for_again_while_the_host_is_out_of_reach(azure, functions):
    azure.broken = True
    assert Receiver(functions, SECRET)(*told("run.ready", "ready")) == 503


# --- all of it ----------------------------------------------------


def test_decision_reaches_the_instance_by_a_signed_delivery(ledger, alice, tmp_path, settings, azure, functions):
    settings.ALLOW_PRIVATE_TARGETS = True
    secrets: list[str] = []

    def answer(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answered:
        return Answered(Receiver(functions, secrets[0])(headers, body))

    with served(answer) as url:
        secrets.append(deliver_to(url, tmp_path))
        flow = Flow(ledger, "contract")
        begun = flow.activity({"step": "open", "instance": "c-1", "opening": {}, "epoch": None})
        wait = {"kind": "approval", "name": "legal", "key": "legal", "due": {"due_in": 3600}, "summary": "Send it?"}
        pause = {"step": "pause", "instance": "c-1", "opening": {}, "run": begun["value"], "epoch": begun["epoch"]}
        pause |= {"waits": [wait], "resume_when": "all"}
        assert flow.activity(pause) == {"again_in": None}
        sender.send_due()
        assert azure.events == []

        alice.decide(begun["value"], "legal", "approve")
        sender.send_due()

        assert azure.events == [("c-1", EVENT, {})]
        assert set(Delivery.objects.values_list("status", flat=True)) == {"delivered"}
        (answered,) = flow.activity(pause)["value"]
        assert answered["decision"]["choice"] == "approve"


def deliver_to(url: str, folder: Path) -> str:
    """Names the receiver in the flow's file; the secret that `apply` prints."""
    file, out = folder / "contract.toml", io.StringIO()
    flow = f'[flow.contract]\ndeliver_to = "{url}/hooks"\n[flow.contract.wait.legal]\ngroups = ["legal"]\n'
    file.write_text(f'[group.legal]\nmembers = ["alice"]\n{flow}')
    call_command("apply", str(file), stdout=out)
    (secret,) = re.findall(r"whsec_\S+", out.getvalue())
    return str(secret)
