"""The cast of the contract tests and how they talk to the server: by HTTP only. No test logic and no models live here.

Setting up goes the way a user's set-up goes: `manage.py apply` for workspaces, people and flows, `manage.py issue_key`
for keys. Everything after that is a request under /api/v1, over Django's test client or over a real socket.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

import httpx
from django.core.management import call_command
from django.db import connection, connections
from django.test import Client
from psycopg import sql

API = "/api/v1"
CAST = (Path(__file__).parent / "cast.toml").read_text()
#: A JSON object as it comes over the wire: tests look into it freely.
Json = Any


class Clock(Protocol):
    """The fixture `clock`: moves the database's time as the server sees it."""

    def advance(self, *, seconds: float = 0) -> Any: ...


# --- answers and transports ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What came back for one request."""

    status: int
    headers: dict[str, str]
    raw: bytes
    asked: str

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    def ok(self, status: int = 200) -> Any:
        """The body, when the answer has this status (and is JSON)."""
        assert self.status == status, f"{self.asked}: {self.status} instead of {status}: {self.raw[:1500]!r}"
        return self.json if self.raw else None

    def fine(self) -> Any:
        """The body of a success where the contract leaves open which one (200 or 201)."""
        assert self.status in (200, 201), f"{self.asked}: {self.status}: {self.raw[:1500]!r}"
        return self.json

    def refused(self, status: int, *codes: str) -> Any:
        """The problem document, when the call was refused with this status and one of these codes."""
        assert self.status == status, f"{self.asked}: {self.status} instead of {status} {codes}: {self.raw[:1500]!r}"
        kind = self.headers.get("content-type", "").split(";")[0]
        assert kind == "application/problem+json", f"{self.asked}: a refusal came as {kind!r}"
        doc = self.json
        assert doc["code"] in codes if codes else doc["code"], f"{self.asked}: {doc['code']} instead of {codes}: {doc}"
        return doc


class Transport(Protocol):
    def send(self, method: str, path: str, headers: dict[str, str], content: bytes | None) -> Answer: ...


class DjangoTransport:
    """Requests through Django's handler in this process; an exception in a view is a 500, as it would be outside."""

    def send(self, method: str, path: str, headers: dict[str, str], content: bytes | None) -> Answer:
        client = Client(enforce_csrf_checks=True, raise_request_exception=False)
        rest = {k: v for k, v in headers.items() if k.lower() != "content-type"}
        kind = next((v for k, v in headers.items() if k.lower() == "content-type"), "")
        got = client.generic(method, path, content or b"", content_type=kind, headers=rest)
        raw = b"".join(getattr(got, "streaming_content", ())) if got.streaming else got.content
        return Answer(got.status_code, {k.lower(): v for k, v in got.items()}, raw, f"{method} {path}")


class HttpTransport:
    """The same over a real socket."""

    def __init__(self, base: str) -> None:
        self.client = httpx.Client(base_url=base, timeout=60)

    def send(self, method: str, path: str, headers: dict[str, str], content: bytes | None) -> Answer:
        sent = [(name.encode(), value.strip().encode("latin-1")) for name, value in headers.items()]
        got = self.client.request(method, path, headers=sent, content=content)
        return Answer(got.status_code, {k.lower(): v for k, v in got.headers.items()}, got.content, f"{method} {path}")


# --- people and agents -----------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Somebody with a key (or with none)."""

    world: World
    name: str
    key: str | None

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        idem: str | None = None,
        raw: bytes | None = None,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> Answer:
        sent = dict(headers or {})
        if self.key:
            sent["Authorization"] = f"Bearer {self.key}"
        if idem:
            sent["Idempotency-Key"] = idem
        content = raw
        if raw is None and method not in ("GET", "HEAD"):
            content = json.dumps({} if body is None else body).encode()
        if content is not None:
            sent["Content-Type"] = kind
        full = path if path.startswith("/api") else API + path
        if query:
            full += "?" + urlencode(query)
        return self.world.transport.send(method, full, sent, content)

    def get(self, path: str, **query: Any) -> Answer:
        return self.call("GET", path, **query)

    def post(self, path: str, body: Any = None, **how: Any) -> Answer:
        return self.call("POST", path, body, **how)

    def pages(self, path: str, **query: Any) -> Iterator[Json]:
        """Every row of a list, by following its cursor."""
        cursor: str | None = None
        while True:
            page = self.get(path, **query, **({"cursor": cursor} if cursor else {})).ok()
            yield from page["results"]
            cursor = page["next"]
            if not cursor:
                return


@dataclass
class Person(Caller):
    """A human with a personal key."""

    def decide(self, wait: Json, choice: str = "approve", *, version: int | None = None, **how: Any) -> Answer:
        body = {"choice": choice, "wait_version": wait["version"] if version is None else version, **how}
        return self.post(f"/waits/{wait['id']}/decisions", body)

    def approve(self, wait: Json, **how: Any) -> Json:
        return self.decide(wait, "approve", **how).ok(201)

    def reject(self, wait: Json, **how: Any) -> Json:
        return self.decide(wait, "reject", **{"reason": "No.", **how}).ok(201)

    def takeover(self, run: Run, reason: str = "I will do it by hand") -> Answer:
        return self.post(f"/runs/{run.id}/takeover", {"reason": reason})

    def handback(self, run: Run, **how: Any) -> Answer:
        body = {"reason": "Done by hand", "stage": "after", "checkpoint": {"ref": "s3://cp/hand"}, **how}
        return self.post(f"/runs/{run.id}/handback", body)

    def terminate(self, run: Run, reason: str = "Not needed any more") -> Answer:
        return self.post(f"/runs/{run.id}/terminate", {"reason": reason})

    def clear(self, run: Run, *codes: str, **how: Any) -> Answer:
        return self.post(f"/runs/{run.id}/clear", {"codes": list(codes), "reason": "Looked at it", **how})

    def retry(self, run: Run, **how: Any) -> Answer:
        return self.post(f"/runs/{run.id}/retry", {"reason": "Once more", **how})

    def reconcile(self, run: Run, key: str, outcome: str, **how: Any) -> Answer:
        body = {"outcome": outcome, "reason": "Looked it up outside", **how}
        return self.post(f"/runs/{run.id}/effects/{key}/reconcile", body)

    def sign_off(self, run: Run, key: str) -> Answer:
        return self.post(f"/runs/{run.id}/effects/{key}/sign_off", {"reason": "It may stay as it is"})


@dataclass
class Agent(Caller):
    """A program with an agent key; `version` is the build it says it is."""

    version: str = "1"
    opened: int = field(default=0)

    def card(self, **over: Any) -> Json:
        return {"name": self.name, "version": self.version, "framework": "plain", "reads": [self.version], **over}

    def open_raw(self, **how: Any) -> Answer:
        self.opened += 1
        body: Json = {
            "flow": "contract-approval",
            "external_id": f"{self.name}-{self.opened}",
            "title": "Contract 17",
            "input": {"ref": "s3://in/17", "digest": "sha256:" + "1" * 64},
            "agent": self.card(),
            "holder": f"{self.name}/w1",
            **how,
        }
        return self.post("/runs", {k: v for k, v in body.items() if v is not None})

    def open(self, *events: Json, at: str | None = "draft", **how: Any) -> Run:
        """A new run with a lease (unless the events pause it), at a checkpoint of stage `at`."""
        first = [checkpoint(at)] if at else []
        if first or events:
            how["events"] = [*first, *events]
        got = self.open_raw(**how).ok(201)
        lease = got["lease"]
        return Run(self, got["run"]["id"], lease["epoch"] if lease else 0, got["run"])

    def signal(self, id: str, name: str, **target: Any) -> Answer:
        return self.post("/signals", {"id": id, "name": name, **target})

    def claim(self, *flows: str, holder: str | None = None, **how: Any) -> Answer:
        body = {
            "flows": list(flows) or ["contract-approval"],
            "holder": holder or f"{self.name}/w2",
            "agent": self.card(),
            "wait": 0,
            **how,
        }
        return self.post("/claims", body)


@dataclass
class Run:
    """One run, as the agent that opened it sees it."""

    agent: Agent
    id: str
    epoch: int
    opened: Json = field(repr=False, default_factory=dict)

    # what the agent does
    def append(self, *events: Json, epoch: int | None = None, by: Agent | None = None, **how: Any) -> Answer:
        body = {"epoch": self.epoch if epoch is None else epoch, "events": list(events)}
        return (by or self.agent).post(f"/runs/{self.id}/events", body, **how)

    def do(self, *events: Json, **how: Any) -> Json:
        return self.append(*events, **how).ok(200)

    def pause(self, *waits: Json, when: str = "all") -> Json:
        """Pause on these; the first wait as it then stands."""
        self.do(paused(*waits, when=when))
        return self.wait(waits[0]["key"])

    def rehydrate(self, *, by: Agent | None = None, holder: str | None = None, **how: Any) -> Answer:
        who = by or self.agent
        body = {"holder": holder or f"{who.name}/w1", "agent": who.card(), **how}
        got = who.post(f"/runs/{self.id}/rehydrate", body)
        if got.status == 200 and got.json["lease"]:
            self.epoch = got.json["lease"]["epoch"]
        return got

    def resume(self, **how: Any) -> Json:
        """The envelope, when the run may go on and the lease was given."""
        envelope = self.rehydrate(**how).ok()
        assert envelope["lease"], f"no lease: {envelope['verdict']}"
        return envelope

    def heartbeat(self, epoch: int | None = None) -> Answer:
        return self.agent.post(f"/runs/{self.id}/heartbeat", {"epoch": self.epoch if epoch is None else epoch})

    def release(self, **how: Any) -> Answer:
        return self.agent.post(f"/runs/{self.id}/release", {"epoch": self.epoch, **how})

    def start(self, key: str, **how: Any) -> Answer:
        return self.append(ev("effect.started", key=key, **how))

    # what anybody sees of it
    def look(self, who: Caller | None = None) -> Json:
        return (who or self.agent).get(f"/runs/{self.id}").ok()

    @property
    def status(self) -> str:
        return str(self.look()["status"])

    @property
    def verdict(self) -> Json:
        return self.agent.get(f"/runs/{self.id}/verdict").ok()

    @property
    def outcome(self) -> str:
        return str(self.verdict["outcome"])

    @property
    def codes(self) -> list[str]:
        return [reason["code"] for reason in self.verdict["reasons"]]

    def wait(self, key: str) -> Json:
        """The wait with this key, whole, with its key beside it (the latest when several pauses named one alike)."""
        found = [w for w in self.look()["waits"] if w.get("key", w["name"]) == key]
        assert found, f"no wait {key!r} in {self.look()['waits']}"
        return self.agent.get(f"/waits/{found[-1]['id']}").ok()

    def effect(self, key: str) -> Json:
        return next(e for e in self.look()["effects"] if e["key"] == key)

    def state(self, key: str) -> str:
        return str(self.effect(key)["state"])

    def events(self, kind: str | None = None, who: Caller | None = None) -> list[Json]:
        rows = list((who or self.agent.world.person("erin")).pages(f"/runs/{self.id}/events", limit=200))
        return [row for row in rows if kind is None or kind in row["type"]]

    def alarms(self, code: str) -> list[Json]:
        """The events that tell of this refusal (a verdict that names the code as its reason is not one)."""
        return [e for e in self.events() if e["type"] != "verdict" and code in f"{e['type']} {e['payload']}"]

    def decisions(self) -> list[Json]:
        return list(self.agent.world.person("erin").get(f"/runs/{self.id}/evidence").ok()["decisions"])


# --- events as an agent writes them ----------------------------------------------------------------------------------


def ev(kind: str, **fields: Any) -> Json:
    return {"type": kind, **fields}


def checkpoint(stage: str | None = "draft", **fields: Any) -> Json:
    return ev("checkpoint", **{"stage": stage, "ref": f"s3://cp/{stage}", "digest": "sha256:" + "c" * 64, **fields})


ORDER = {"n": "PO-1", "supplier": "ACME", "amount": "100.00"}


def order(key: str = "k1", **over: Any) -> Json:
    """A money effect that the flow gates by `legal-approval` and that can be undone."""
    return ev(
        "effect.planned",
        **{"key": key, "system": "erp", "action": "create_order", "resource": "po-1", "arguments": ORDER, **over},
    )


def effect(key: str, kind: str, **over: Any) -> Json:
    """Any other kind of effect, such as `mail.send`."""
    system, action = kind.split(".")
    base = {"key": key, "system": system, "action": action, "resource": f"{system}-{key}", "arguments": {"of": key}}
    return ev("effect.planned", **{**base, **over})


def started(key: str, **fields: Any) -> Json:
    return ev("effect.started", key=key, **fields)


def executed(key: str, receipt: str = "x1", **fields: Any) -> Json:
    return ev("effect.executed", key=key, **{"receipt": {"id": receipt, "status": "done"}, **fields})


def unknown(key: str) -> Json:
    return ev("effect.unknown", key=key, error={"code": "timeout", "message": "no answer"})


def failed(retry_in: float | None = None, retryable: bool = True) -> Json:
    more = {} if retry_in is None else {"retry_in": retry_in}
    return ev("failed", error={"code": "boom", "message": "It broke"}, retryable=retryable, **more)


def done(plan: Json, receipt: str = "x1") -> list[Json]:
    """A whole effect in one batch: planned, started, executed."""
    return [plan, started(plan["key"], arguments=plan["arguments"]), executed(plan["key"], receipt)]


def paused(*waits: Json, when: str = "all") -> Json:
    return ev("paused", waits=list(waits), resume_when=when)


def approval(key: str = "legal-approval", *, effect: str | None = None, **over: Any) -> Json:
    ask = {"summary": "Order PO-1 from ACME?", "risk": "medium", **over.pop("ask", {})}
    if effect:
        ask["effect"] = {"key": effect}
    due = {} if "due_at" in over else {"due_in": 86400}
    return {"key": key, "name": "legal-approval", "kind": "approval", "ask": ask, **due, **over}


def callback(key: str = "supplier", **over: Any) -> Json:
    return {"key": key, "name": over.pop("name", key), "kind": "callback", "due_in": 86400, **over}


def signal(key: str = "documents", **over: Any) -> Json:
    return {"key": key, "name": over.pop("name", key), "kind": "signal", "due_in": 86400, **over}


def timer(key: str = "sleep", due_in: int = 600, **over: Any) -> Json:
    return {"key": key, "name": key, "kind": "timer", "due_in": due_in, **over}


def external_ref(system: str, kind: str, id: str) -> Json:
    """The one event with a `type` of its own, so it is sent with its fields in `payload`, as events are shown."""
    return {"type": "external_ref", "payload": {"system": system, "type": kind, "id": id}}


def completed() -> Json:
    return ev("completed", result={"ref": "s3://out/17", "digest": "sha256:" + "9" * 64})


# --- the world -------------------------------------------------------------------------------------------------------


class World:
    """A fresh server with the cast in it."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport = transport
        self.folder = folder
        self.people: dict[str, Person] = {}
        self.agents: dict[str, Agent] = {}
        self.applied = 0
        #: A test that forged the ledger says so; after every other one it is verified.
        self.forged = False

    def apply(self, toml: str) -> str:
        """What `manage.py apply` printed for this file."""
        self.applied += 1
        path = self.folder / f"setup-{self.applied}.toml"
        path.write_text(toml)
        out = io.StringIO()
        call_command("apply", str(path), stdout=out)
        return out.getvalue()

    def variant(self, name: str, **policy: Any) -> str:
        """A flow like contract-approval, with these lines of its policy different; its name."""
        text = CAST[CAST.index("[flow.contract-approval]") :].replace("flow.contract-approval", f"flow.{name}")
        head, rest = text.split("\n\n", 1)
        lines = [line for line in head.splitlines() if line.split(" = ")[0] not in policy]
        lines += [f"{key} = {json.dumps(value)}" for key, value in policy.items() if value is not None]
        self.apply("\n".join(lines) + "\n\n" + rest)
        return name

    def issue_key(self, *args: str) -> str:
        out = io.StringIO()
        call_command("issue_key", *args, stdout=out)
        return out.getvalue().strip()

    def person(self, name: str) -> Person:
        if name not in self.people:
            self.people[name] = Person(self, name, self.issue_key("person", "--user", name))
        return self.people[name]

    def agent(
        self, name: str = "bot", *, workspace: str = "default", flows: tuple[str, ...] = (), owner: str | None = None
    ) -> Agent:
        if name not in self.agents:
            args = ["agent", "--workspace", workspace, "--name", name]
            for flow in flows:
                args += ["--flow", flow]
            if owner:
                args += ["--owner", owner]
            self.agents[name] = Agent(self, name, self.issue_key(*args))
        return self.agents[name]

    @property
    def nobody(self) -> Caller:
        return Caller(self, "nobody", None)

    def command(self, name: str, *args: str) -> str:
        """What a management command printed; raises (CommandError or SystemExit) when it says no."""
        out = io.StringIO()
        call_command(name, *args, stdout=out, stderr=out)
        return out.getvalue()


def hook_path(url: str) -> str:
    """The path of a callback's URL."""
    return urlsplit(url).path


def at_once(*calls: Callable[[], Answer]) -> list[Answer]:
    """All of these at the same instant, each in a thread with a database connection of its own."""
    gate = threading.Barrier(len(calls))

    def one(call: Callable[[], Answer]) -> Answer:
        gate.wait(timeout=30)
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(one, call) for call in calls]]


def rows_with(table: str, text: str) -> int:
    """How many rows of a table show this text anywhere in clear."""
    query = sql.SQL("SELECT count(*) FROM {} t WHERE t::text LIKE %s").format(sql.Identifier(table))
    with connection.cursor() as cursor:
        cursor.execute(query, [f"%{text}%"])
        return int(cursor.fetchone()[0])


def not_granted(answer: Answer, code: str) -> None:
    """`start: true` that may not start: `granted: false`, or the refusal of the start (the contract leaves it open)."""
    if answer.status == 200:
        assert answer.json["effects"][-1]["granted"] is False
    else:
        answer.refused(409, code)


def statuses(answers: list[Answer]) -> list[int]:
    return sorted(answer.status for answer in answers)
