"""Draws what agents, people, signals and the clock do to one run, mostly what makes sense just then. No assertions."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import convert

from rehydrate.core import commands as cmd
from rehydrate.core import decide, effects, verdict, waiting
from rehydrate.core import events as ev
from rehydrate.core.draft import Draft
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.state import Effect, Wait

from .kit import BOT, Story, event, person, policy

T = TypeVar("T")
Work = Callable[[Draft], Any]

KEYS = ("a", "b", "c")
KINDS = ("order", "pay", "mail", "look", "other")
ACTIONS = {"order": "erp", "pay": "bank", "mail": "crm", "look": "bank", "other": "misc"}

_WAITS = {
    "legal": {"groups": ["legal"]},
    "two": {
        "groups": ["legal"],
        "quorum": 2,
        "exclude_requester": False,
        "first_rejection_closes": False,
        "remind_every": "20m",
        "escalate_to": ["leads"],
        "escalate_after": "30m",
        "allow_timeout_approve": True,
    },
}
_EFFECTS = {
    "order": {"impact": "money", "needs_approval": "legal", "compensation": "cancel", "title": "Order {n}"},
    "pay": {"impact": "money", "needs_approval": "two"},
    "mail": {"retry_safe": True},
    "look": {"lookup": True, "compensation": "unlook"},
}


def policies(draw: Draw) -> FlowPolicy:
    """A flow's policy: declared with kinds and gates, or one that no file names."""
    if draw.maybe(6):
        return FlowPolicy(declared=False)
    return policy(
        on_reject=draw.one(["review", "compensate", "terminate", "continue"]),
        on_version_change=draw.one(["review", "continue"]),
        required=draw.one([["checkpoint"], [], ["checkpoint", "input_ref", "external_refs"]]),
        max_failures=draw.one([2, 3]),
        gated_stages=["sign"],
        wait=_WAITS,
        effect=_EFFECTS,
    )


class Draw:
    """Short words around a source of randomness."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def one(self, options: Sequence[T]) -> T:
        return self.source.choice(options)

    def maybe(self, one_in: int = 2) -> bool:
        return self.source.randrange(one_in) == 0


class Step(msgspec.Struct):
    """One request: its work, who asks, and the batch it came from (None for requests that load the whole run)."""

    name: str
    work: Work
    actor: ev.Actor = BOT
    operation: str = "append"
    events: list[Any] | None = None


class Player:
    def __init__(self, draw: Draw, story: Story) -> None:
        self.draw = draw
        self.story = story
        self.usual = {key: draw.one(KINDS) for key in KEYS}

    def step(self) -> Step:
        """The next request; before it the clock may have moved."""
        draw, story = self.draw, self.story
        if draw.maybe(5):
            story.later(
                seconds=draw.one([1, 1, 15, 15, 61, 1300] if story.run.leased else [1, 15, 400, 1300, 3601, 90_000])
            )
        if draw.maybe(40):
            story.number += 1
            story.policies[story.number] = policies(draw)
        run = story.run
        if not run.version:
            return self.opening()
        ways: list[Callable[[], Step]] = []
        if run.leased:
            ways += [self.batch] * 12 + [self.heartbeat, self.release]
        else:
            often = 4 if run.status in ("ready", "compensating") else 1
            ways += [self.rehydrate] * 2 * often + [self.claim] * often + [self.batch]
        if story.state.open_waits():
            ways += [self.answer] * 9 + [self.nudge] * 3
        if run.taken_over is not None:
            ways += [self.handback] * 6
        if run.status == "review":
            ways += [self.settle] * 8
        if story.state.effects:
            ways += [self.receipt]
        ways += [self.tick, self.settle, self.recall, self.hold]
        return draw.one(ways)()

    # -- agents

    def opening(self) -> Step:
        draw = self.draw
        body = convert(
            {
                "flow": "flow",
                "external_id": "x",
                "holder": "h0",
                "requested_by": draw.one([None, "carol"]),
                "input": draw.one([None, {"ref": "s3://in", "digest": "d1"}]),
                "agent": draw.one([None, {"name": "bot", "version": "1"}]),
            },
            cmd.OpenRun,
        )
        return Step("open", lambda draft: decide.open_run(draft, body, workspace="w", owner=None), operation="open")

    def epoch(self) -> int:
        epoch = self.story.run.epoch
        return epoch - 1 if epoch and self.draw.maybe(25) else epoch

    def batch(self) -> Step:
        events = [self.event() for _ in range(self.draw.one([1, 1, 2, 3]))]
        epoch = self.epoch()
        return Step("append " + " ".join(map(_tag, events)), self.story.batch(*events, epoch=epoch), events=events)

    def heartbeat(self) -> Step:
        body = cmd.Heartbeat(self.epoch())
        return Step("heartbeat", lambda d: decide.heartbeat(d, body), operation="heartbeat", events=[])

    def release(self) -> Step:
        body = cmd.Release(self.epoch(), self.draw.one([None, 30]))
        return Step("release", lambda d: decide.release(d, body), operation="release", events=[])

    def event(self) -> Any:
        draw = self.draw
        ways: list[Callable[[], Any]] = [self.planned] * 4 + [self.checkpoint] * 2 + [self.pause] * 4
        ways += [self.wait_opened, self.failed, self.reference, lambda: event("note", text="hm")]
        if draw.maybe(4):
            ways += [self.cancelled, self.completed]
        for effect in self.story.state.effects.values():
            often = 8 if effect.state in ("started", "compensating", "unknown") or _granted(effect) else 3
            ways += [partial(self.about, effect)] * often
        return draw.one(ways)()

    def checkpoint(self) -> Any:
        return event("checkpoint", stage=self.draw.one(["draft", "sign", "send"]), ref="s3://c", digest="SHA256:x")

    def reference(self) -> Any:
        return event("external_ref", system="erp", id=self.draw.one(["1", "2"]), ref_type=self.draw.one([None, "po"]))

    def cancelled(self) -> Any:
        return event("cancelled", reason="the user left")

    def failed(self) -> Any:
        draw = self.draw
        error = {"code": "boom", "message": "it broke"}
        return event("failed", error=error, retryable=not draw.maybe(5), retry_in=draw.one([None, 0, 10]))

    def completed(self) -> Any:
        return event("completed", result=self.draw.one([None, {"ref": "s3://out"}]))

    def content(self) -> dict[str, Any]:
        draw = self.draw
        key = draw.one(KEYS)
        action = draw.one(KINDS) if draw.maybe(8) else self.usual[key]
        return {
            "key": key,
            "system": ACTIONS[action],
            "action": action,
            "arguments": {"n": 2 if draw.maybe(6) else KEYS.index(key) // 2},
            "impact": draw.one([None, "low", "money"]),
        }

    def planned(self) -> Any:
        draw = self.draw
        known = list(self.story.state.effects.values())
        if known and draw.maybe(3):  # again, as first planned or as it stands
            effect = draw.one(known)
            given = _content_of(effect)
            if effect.arguments is not None and draw.maybe(3):
                given["arguments"] = {"n": draw.one([1, 2, 3])}
        else:
            given = self.content()
        extra: dict[str, Any] = {"start": draw.maybe(3), "repeat": draw.maybe(6)}
        if draw.maybe(5):
            extra["approval"] = draw.one(["legal", "two"])
        if draw.maybe(5):
            extra["compensation"] = {"action": "undo"}
        return event("effect.planned", **given, **extra)

    def about(self, effect: Effect) -> Any:
        """Something about an effect, mostly what its state allows."""
        draw, key = self.draw, effect.key
        error = {"code": "down", "message": "no answer"}
        receipt = {"id": draw.one([None, "r1", "r1", "r1", "r2"])}
        arguments = draw.one([effect.arguments, effect.arguments, {"n": 9}])
        kinds = {
            "planned": ["started", "started", "executed"],
            "failed": ["started"],
            "started": ["executed", "executed", "failed", "unknown"],
            "unknown": ["not_executed", "executed", "started", "failed"],
            "executed": ["compensating", "compensating", "executed"],
            "compensating": ["compensated", "compensation_failed", "compensation_unknown"],
        }.get(effect.state, ["executed"])
        if draw.maybe(10):
            kinds = ["started", "executed", "failed", "unknown", "not_executed", "compensating", "compensated"]
        kind = draw.one(kinds)
        fields: dict[str, Any] = {"key": key}
        if kind == "started":
            fields["arguments"] = arguments
        elif kind in ("executed", "compensated"):
            fields["receipt"] = receipt
        elif kind in ("failed", "unknown", "compensation_failed", "compensation_unknown"):
            fields["error"] = error
        return event(f"effect.{kind}", **fields)

    def receipt(self) -> Step:
        """A receipt that comes late, whatever became of the lease."""
        draw = self.draw
        effect = draw.one(list(self.story.state.effects.values()))
        if draw.maybe():
            late: Any = event("effect.executed", key=effect.key, receipt={"id": draw.one(["r1", "r2"])})
            return Step(
                f"late receipt {effect.key}", lambda d: effects.executed(d, late, "/events/0", late=True), events=[late]
            )
        lost: Any = event("effect.failed", key=effect.key, error={"code": "down"})
        return Step(f"late failure {effect.key}", lambda d: effects.failed(d, lost, late=True), events=[lost])

    # -- pauses

    def spec(self) -> dict[str, Any]:
        draw = self.draw
        number = draw.one(["", "", "2", "3"])
        kind = draw.one(["approval", "approval", "approval", "timer", "callback", "signal"])
        name = (
            draw.one(["legal", "legal", "two"])
            if kind == "approval"
            else {"timer": "t", "callback": "cb"}.get(kind, "s")
        )
        wait: dict[str, Any] = {
            "key": name + number,
            "name": name,
            "kind": kind,
            "due_in": draw.one([10, 3600, 3600, 34_560_000]),
            "on_timeout": draw.one(["review", "reject", "escalate", "resume", "terminate"]),
            "on_reject": draw.one([None, None, "continue", "compensate"]),
        }
        if kind == "approval":
            if name == "two" and draw.maybe(3):
                wait["on_timeout"] = "continue"
            known = list(self.story.state.effects)
            if draw.maybe(8):
                wait["ask"] = {"summary": "A question"}
            elif known and draw.maybe():
                wait["ask"] = {"effect": {"key": draw.one(known)}}
            else:
                wait["ask"] = {"effect": self.content()}
        return wait

    def wait_opened(self) -> Any:
        return event("wait.opened", wait=self.spec())

    def pause(self) -> Any:
        draw = self.draw
        waits = [self.spec() for _ in range(draw.one([1, 1, 2, 3]))]
        waits += [{"key": wait.key} for wait in self.story.state.open_waits() if draw.maybe()]
        waits += [{"key": wait.key} for wait in self.story.state.waits.values() if not wait.open and draw.maybe(10)]
        waits = list({wait["key"]: wait for wait in waits}.values())
        return event("paused", waits=waits, resume_when=draw.one(["all", "any", "each"]))

    # -- leases

    def agent(self) -> cmd.AgentInfo | None:
        return self.draw.one([None, None, cmd.AgentInfo(version="1"), cmd.AgentInfo(version="2", reads=["1"]), _OTHER])

    def rehydrate(self) -> Step:
        draw = self.draw
        holder = draw.one(["h1", self.story.run.holder or "h1", "h2"])
        body = cmd.Rehydrate(holder, self.agent(), draw.one([None, None, "d1", "d2"]))
        return Step("rehydrate", lambda d: decide.rehydrate(d, body), operation="rehydrate")

    def claim(self) -> Step:
        body = cmd.Claim(["flow"], "h3", self.agent())
        return Step("claim", lambda d: decide.claim(d, body), operation="claim")

    def recall(self) -> Step:
        body = cmd.Recall(self.draw.one(["h1", self.story.run.holder or "h1"]), "new input")
        return Step("recall", lambda d: decide.recall(d, body), operation="recall")

    # -- people and the world

    def answer(self) -> Step:
        """An answer to an open wait (or to a closed one, now and then)."""
        draw = self.draw
        waits = list(self.story.state.waits.values()) if draw.maybe(12) else self.story.state.open_waits()
        wait = draw.one(waits)
        if wait.kind in ("callback", "signal"):
            return self.signal(wait)
        choice = draw.one(["approve", "approve", "approve_with_conditions", "edit", "reject", "respond"])
        fields: dict[str, Any] = {}
        if choice == "edit":
            fields["arguments"] = {"n": draw.one([1, 2, 3])}
        if choice == "approve_with_conditions":
            fields["conditions"] = [{"pointer": "/n", "op": draw.one(["<=", "=="]), "value": draw.one([1, 2])}]
        if choice != "reject" and draw.maybe(4):
            fields["expires_at"] = (self.story.later().now + _MINUTE).isoformat()
        version = wait.version - (1 if wait.version > 1 and draw.maybe(20) else 0)
        body = convert({"choice": choice, "wait_version": version, **fields}, cmd.Decide)
        who = draw.one(["alice", "bob", "grace", "carol"] if draw.maybe(4) else ["alice", "bob"])
        return Step(f"{who}: {choice}", lambda d: waiting.decide(d, wait.id, body), person(who), "decide")

    def signal(self, wait: Wait) -> Step:
        answer = {"id": "sig", "name": wait.name, "payload": {"n": 1}}

        def work(draft: Draft) -> Any:
            found = draft.state.waits[wait.key]
            return waiting.answer_by_signal(draft, found, answer) if found.open else None

        return Step(f"signal {wait.name}", work, ev.SYSTEM, "signal")

    def nudge(self) -> Step:
        """What people do with an open wait besides deciding."""
        draw = self.draw
        key = draw.one(self.story.state.open_waits()).key
        ways: dict[str, Callable[[Draft, Wait], Any]] = {
            "claim": waiting.take,
            "release": waiting.give_back,
            "assign": lambda d, w: waiting.assign(d, w, cmd.AssignWait(to="bob")),
            "extend": lambda d, w: waiting.extend(d, w, cmd.ExtendWait(due_in=40_000_000)),
            "escalate": lambda d, w: waiting.escalate(d, w, cmd.WaitAction()),
            "request_info": lambda d, w: waiting.request_info(d, w, cmd.WaitAction(comment="why?")),
            "comment": lambda d, w: waiting.comment(d, w, cmd.WaitAction(comment="hm")),
            "policy_changed": lambda d, w: waiting.policy_changed(d, w, d.policy.wait_policy(w.name)),
        }
        name = draw.one(list(ways))
        return Step(name, lambda d: ways[name](d, d.state.waits[key]), person(draw.one(["alice", "bob"])), name)

    def tick(self) -> Step:
        return Step("tick", lambda draft: None, ev.SYSTEM, "tick")

    def hold(self) -> Step:
        draw = self.draw
        body = cmd.Reasoned("because")
        if draw.maybe(12):
            return Step("terminate", lambda d: decide.terminate(d, body), person("dave"), "terminate")
        return Step("takeover", lambda d: decide.takeover(d, body), person("dave"), "takeover")

    def handback(self) -> Step:
        draw, state = self.draw, self.story.state
        done: list[dict[str, Any]] = []
        for effect in state.effects.values():
            if effect.state == "unknown" and not draw.maybe(10):
                done.append({"key": effect.key, "outcome": draw.one(["executed", "not_executed"])})
            elif effect.state == "compensation_unknown" and not draw.maybe(10):
                done.append({"key": effect.key, "outcome": draw.one(["compensated", "not_executed"])})
            elif effect.state == "planned" and draw.maybe(4):
                done.append({"key": effect.key, "receipt": {"id": "by-hand"}})
        if draw.maybe(6):
            done.append({"system": "crm", "action": "mail", "arguments": {"n": 7}, "receipt": {"id": "m"}})
        answers: list[dict[str, Any]] = [
            {"wait": wait.id, "choice": draw.one(["approve", "reject", "respond"])}
            for wait in state.waits.values()
            if wait.status == "superseded" and wait.kind == "approval" and draw.maybe()
        ]
        checkpoint = draw.one([None, {"ref": "s3://hand"}])
        body = convert(
            {
                "reason": "done by hand",
                "stage": draw.one([None, "send"]),
                "checkpoint": checkpoint,
                "answers": answers,
                "effects": done,
            },
            cmd.Handback,
        )
        who = person(draw.one(["alice", "dave"]))
        return Step("handback", lambda d: decide.handback(d, body), who, "handback")

    def settle(self) -> Step:
        """What a person does about a run in review."""
        draw, state = self.draw, self.story.state
        unknown = [e.key for e in state.effects.values() if e.state in ("unknown", "compensation_unknown")]
        stays = [e.key for e in state.effects.values() if e.state == "executed"]
        ways: list[Callable[[], Step]] = [self.clear, self.clear, self.retry]
        if unknown:
            ways += [lambda: self.reconcile(draw.one(unknown))] * 4
        if stays:
            ways += [lambda: self.sign_off(draw.one(stays))] * 2
        return draw.one(ways)()

    def clear(self) -> Step:
        draw, story = self.draw, self.story
        codes = [code for code in story.codes if code in verdict.CLEARABLE] or [draw.one(sorted(verdict.CLEARABLE))]
        fields: dict[str, Any] = {"codes": codes, "reason": "looked at it"}
        if draw.maybe(4):
            fields |= {"stage": "send", "checkpoint": {"ref": "s3://p"}}
        if draw.maybe(4):
            fields |= {"input": {"ref": "s3://in2", "digest": "d2"}, "agent_version": "2"}
        if draw.maybe(4):
            fields["external_refs"] = [{"system": "erp", "id": "1"}]
        body = convert(fields, cmd.Clear)
        return Step(f"clear {codes}", lambda d: decide.clear(d, body), person("dave"), "clear")

    def retry(self) -> Step:
        body = cmd.Retry("try again", self.draw.one([None, *self.story.state.effects]), self.draw.one([1, 2]))
        return Step("retry", lambda d: decide.retry(d, body), person("dave"), "retry")

    def reconcile(self, key: str) -> Step:
        draw = self.draw
        outcome = draw.one(["executed", "not_executed", "compensated"])
        body = convert(
            {"reason": "saw it", "outcome": outcome, "receipt": draw.one([None, {"id": "r1"}])}, cmd.Reconcile
        )
        return Step(f"reconcile {key}", lambda d: decide.reconcile(d, key, body), person("dave"), "reconcile")

    def sign_off(self, key: str) -> Step:
        return Step(
            f"sign_off {key}",
            lambda d: decide.sign_off(d, key, cmd.Reasoned("it may stay")),
            person("dave"),
            "sign_off",
        )


_OTHER = cmd.AgentInfo(version="9")
_MINUTE = dt.timedelta(minutes=1)


def _granted(effect: Effect) -> bool:
    return effect.state == "planned" and effect.authorised


def _tag(found: Any) -> str:
    return str(found.__struct_config__.tag)


def _content_of(effect: Effect) -> dict[str, Any]:
    given: dict[str, Any] = {"key": effect.key, "system": effect.system, "action": effect.action}
    if effect.arguments is not None:
        given["arguments"] = effect.arguments
    return given
