"""The cast of the ledger's own tests: a workspace, its people, one agent, and short words for what they ask for.

They call `rehydrate.services` as the API and the console do. No test logic lives here.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from typing import Any

import msgspec
from django.contrib.auth.models import User

from rehydrate import loading, services
from rehydrate.callers import Caller, for_user
from rehydrate.core import commands as cmd
from rehydrate.core import parsing
from rehydrate.core.policy import FlowPolicy
from rehydrate.models import Flow, Group, Membership, PolicyVersion, Workspace

Json = dict[str, Any]

#: One flow with a bit of everything. `iban` is a secret.
FLOW: Json = {
    "title": "Orders",
    "required": [],
    "on_reject": "compensate",
    "secret": ["/ask/effect/arguments/iban"],
    "wait": {
        "legal": {"groups": ["legal"], "exclude_requester": False},
        "two": {
            "groups": ["legal"],
            "quorum": 2,
            "exclude_requester": False,
            "remind_every": "10m",
            "escalate_to": ["leads"],
            "escalate_after": "30m",
        },
    },
    "effect": {
        "order": {"impact": "money", "needs_approval": "legal", "compensation": "cancel", "title": "Order {n}"},
        "mail": {"retry_safe": True},
        "look": {"lookup": True},
        "gift": {"impact": "low"},
    },
}

_names = itertools.count(1)


class Cast:
    """A fresh workspace with alice, bob (legal), grace (leads), dave (operator) and the agent `bot`."""

    def __init__(self, flow: Json | None = None) -> None:
        self.workspace = Workspace.objects.create(slug=f"w{next(_names)}", title="Operations")
        self.people: dict[str, Caller] = {}
        for group, roles, members in (
            ("legal", ["reviewer"], ["alice", "bob"]),
            ("leads", ["reviewer"], ["grace"]),
            ("ops", ["operator"], ["dave"]),
        ):
            made = Group.objects.create(workspace=self.workspace, name=group, roles=roles)
            for name in members:
                user = User.objects.create_user(name, first_name=name.title())
                Membership.objects.create(group=made, user=user)
                self.people[name] = for_user(user, channel="api")
        self.flow = Flow.objects.create(workspace=self.workspace, name="flow", current=0)
        self.policy(FLOW if flow is None else flow)
        self.bot = Caller(
            kind="agent",
            id="bot",
            name="bot",
            workspaces={str(self.workspace.pk): frozenset()},
            flows=("*",),
        )

    def policy(self, body: Json) -> int:
        """The next version of the flow's policy; its number."""
        self.flow.current += 1
        rules: Json = msgspec.to_builtins(msgspec.convert(body, FlowPolicy))
        PolicyVersion.objects.create(flow=self.flow, number=self.flow.current, body=rules, changed_by="test")
        self.flow.save()
        return self.flow.current

    # -- agents

    def open(self, *events: Json, holder: str | None = "h1", **fields: Any) -> Run:
        body = _as(cmd.OpenRun, {"flow": "flow", "external_id": f"x-{next(_names)}", "holder": holder, **fields})
        body = msgspec.structs.replace(body, events=list(events))
        answer, _ = services.open_run(self.bot, body)
        return Run(self, answer)

    def claim(self, holder: str = "h2", **fields: Any) -> Json | None:
        return services.claim(self.bot, _as(cmd.Claim, {"flows": ["flow"], "holder": holder, **fields}))

    def signal(self, name: str, **fields: Any) -> Json:
        return services.send_signal(self.bot, _as(cmd.Signal, {"id": f"s-{next(_names)}", "name": name, **fields}))


class Run:
    """One run as the cast sees it: the last answer, the epoch, and its waits by key."""

    def __init__(self, cast: Cast, answer: Json) -> None:
        self.cast = cast
        self.id: str = answer["run"]["id"]
        self.external_id: str = answer["run"]["external_id"]
        self.epoch: int = (answer["lease"] or {}).get("epoch", 0)

    @property
    def state(self) -> Any:
        return loading.load_runs([self.id], lock=False, full=True)[self.id].state

    def wait(self, key: str) -> Any:
        return self.state.waits[key]

    def append(self, *events: Json, epoch: int | None = None) -> Json:
        raw = json.dumps({"epoch": self.epoch if epoch is None else epoch, "events": list(events)})
        body = parsing.parse(raw.encode(), cmd.Append)
        return services.append_events(self.cast.bot, self.id, body)

    def pause(self, *waits: Json, resume_when: str = "all") -> Json:
        return self.append({"type": "paused", "waits": list(waits), "resume_when": resume_when})

    def heartbeat(self) -> Json:
        return services.heartbeat(self.cast.bot, self.id, cmd.Heartbeat(self.epoch))

    def release(self, retry_in: int | None = None) -> Json:
        return services.release(self.cast.bot, self.id, cmd.Release(self.epoch, retry_in))

    def recall(self, holder: str = "h1") -> Json:
        return self._leased(services.recall(self.cast.bot, self.id, cmd.Recall(holder, "new input")))

    def rehydrate(self, holder: str = "h2", **fields: Any) -> Json:
        body = _as(cmd.Rehydrate, {"holder": holder, **fields})
        return self._leased(services.rehydrate_run(self.cast.bot, self.id, body))

    def _leased(self, envelope: Json) -> Json:
        if envelope["lease"] is not None:
            self.epoch = envelope["lease"]["epoch"]
        return envelope

    # -- people

    def decide(self, key: str, choice: str, *, by: str = "alice", **fields: Any) -> Json:
        wait = self.wait(key)
        body = _as(cmd.Decide, {"choice": choice, "wait_version": fields.pop("version", wait.version), **fields})
        return services.decide(self.cast.people[by], wait.id, body)

    def on_wait(self, what: str, key: str, *, by: str = "alice", **fields: Any) -> Json:
        """claim_wait, release_wait, assign_wait, extend_wait, escalate_wait, request_info, comment_wait."""
        kinds: dict[str, type[Any]] = {"assign_wait": cmd.AssignWait, "extend_wait": cmd.ExtendWait}
        body = _as(kinds.get(what, cmd.WaitAction), fields)
        answer: Json = getattr(services, what)(self.cast.people[by], self.wait(key).id, body)
        return answer

    def hold(self, what: str, *key: str, by: str = "dave", **fields: Any) -> Json:
        """takeover, handback, terminate, retry, clear; with a key also reconcile and sign_off."""
        kinds: dict[str, type[Any]] = {
            "handback": cmd.Handback,
            "retry": cmd.Retry,
            "clear": cmd.Clear,
            "reconcile": cmd.Reconcile,
        }
        body = _as(kinds.get(what, cmd.Reasoned), {"reason": "because", **fields})
        answer: Json = getattr(services, what)(self.cast.people[by], self.id, *key, body)
        return answer


def _as(kind: type[Any], fields: Json) -> Any:
    return msgspec.convert(fields, kind)


def plan(key: str = "k", action: str = "gift", **fields: Any) -> Json:
    given = {"key": key, "system": "erp", "action": action, "resource": key, "arguments": {"n": 1}, **fields}
    return {"type": "effect.planned", **given}


def ev(type_: str, **fields: Any) -> Json:
    return {"type": type_, **fields}


def checkpoint(stage: str = "draft", **fields: Any) -> Json:
    return {"type": "checkpoint", "stage": stage, "ref": f"s3://{stage}", **fields}


def approval(name: str = "legal", *, key: str | None = None, effect: Json | None = None, **fields: Any) -> Json:
    wait: Json = {"key": key or name, "name": name, "kind": "approval", "due_in": 3600, **fields}
    if effect is not None:
        wait["ask"] = {"effect": {name: value for name, value in effect.items() if name != "type"}}
    return wait


def callback(key: str = "cb", **fields: Any) -> Json:
    return {"key": key, "name": key, "kind": "callback", "due_in": 3600, **fields}


def timer(key: str = "t", **fields: Any) -> Json:
    return {"key": key, "name": key, "kind": "timer", "due_in": 3600, **fields}


def in_an_hour(moment: dt.datetime, offset: int = 2) -> str:
    """A time an hour later, written with an offset that is not UTC's."""
    return (moment + dt.timedelta(hours=1)).astimezone(dt.timezone(dt.timedelta(hours=offset))).isoformat()
