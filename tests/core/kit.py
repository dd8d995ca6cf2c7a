"""A ledger in memory for the core's tests: the steps of `ledger.change` around one state, without rows. No test logic.

What a partial state holds is said in `core.state.in_part`, as the projections load it.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import convert

from rehydrate.core import commands as cmd
from rehydrate.core import decide, waiting
from rehydrate.core import events as ev
from rehydrate.core.draft import Context, Draft, People
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.refusals import AUDITED, Refusal
from rehydrate.core.state import Run, State, in_part
from rehydrate.core.verdict import NeedsAllEffects, Verdict, assess

START = dt.datetime(2026, 3, 1, 12, 0, tzinfo=dt.UTC)
BOT = ev.Actor(kind="agent", id="key-1", name="bot")
PEOPLE = People(
    groups={"legal": ["alice", "bob", "carol"], "leads": ["grace"]},
    reviewers=["alice", "bob", "carol", "dave", "grace"],
)
RUN = "018f0000-0000-7000-8000-000000000001"


def person(name: str) -> ev.Actor:
    return ev.Actor(kind="person", id=name, name=name.title())


def policy(**fields: Any) -> FlowPolicy:
    """A policy from the words of a flow file."""
    return convert(fields, FlowPolicy)


def event(type_: str, **fields: Any) -> cmd.AgentEvents:
    """An agent's event, as it is parsed; `from_` is written `from`."""
    made: cmd.AgentEvents = convert({"type": type_, **fields}, cmd.AgentEvents)
    return made


class Story:
    """One run: what was recorded, the state it led to, and the clock, which only the test moves."""

    def __init__(self, rules: FlowPolicy | None = None, *, people: People = PEOPLE) -> None:
        self.policies: dict[int, FlowPolicy] = {1: rules if rules is not None else FlowPolicy()}
        self.number = 1
        self.people = people
        self.now = START
        self.state = State(Run(id=RUN))
        self.history: list[ev.Recorded] = []
        self.ids = itertools.count(1)

    # -- short words

    @property
    def run(self) -> Run:
        return self.state.run

    @property
    def pinned(self) -> FlowPolicy:
        return self.policies.get(self.run.policy, self.policies[self.number])

    @property
    def verdict(self) -> Verdict:
        return assess(self.state, self.pinned, self.now)

    @property
    def codes(self) -> list[str]:
        return [reason.code for reason in self.verdict.reasons]

    def types(self, since: int = 0) -> list[str]:
        return [ev.type_of(recorded.fact) for recorded in self.history[since:]]

    def facts(self, kind: type[ev.Fact]) -> list[Any]:
        return [recorded.fact for recorded in self.history if isinstance(recorded.fact, kind)]

    def later(self, **parts: float) -> Story:
        self.now += dt.timedelta(**parts)
        return self

    # -- the steps of one transaction

    def context(self, actor: ev.Actor) -> Context:
        """Ids count from the run's version, so that two attempts at the same step make the same ones."""
        ids = itertools.count(1)
        version = self.run.version

        def new_id() -> str:
            return f"018f0000-0000-7000-8000-{version:06d}{next(ids):06d}"

        return Context(
            now=self.now,
            policy=self.policies[self.number],
            policy_number=self.number,
            pinned=self.pinned,
            actor=actor,
            new_id=new_id,
            new_token=lambda: f"token-{new_id()}",
            people=lambda: self.people,
        )

    def attempt(
        self, state: State, work: Callable[[Draft], Any], actor: ev.Actor, operation: str
    ) -> tuple[Any, Draft, Refusal | None]:
        """What `ledger.change` does between loading and saving."""
        draft = Draft(state, self.context(actor))
        decide.apply_overdue(draft)
        mark = draft.state, len(draft.recorded)
        try:
            result = work(draft)
            decide.settle(draft)
        except Refusal as refusal:
            draft.rewind(*mark)
            if refusal.code in AUDITED:
                decide.refused(draft, refusal, operation)
            decide.settle(draft)
            return None, draft, refusal
        return result, draft, None

    def do(self, work: Callable[[Draft], Any], *, actor: ev.Actor = BOT, operation: str = "append") -> Any:
        """Carry it out and keep what it recorded; raises the refusal after recording what matters."""
        result, draft, refused = self.attempt(self.state, work, actor, operation)
        self.keep(draft)
        if refused is not None:
            raise refused
        return result

    def keep(self, draft: Draft) -> None:
        self.history += draft.recorded
        self.state = draft.state

    def in_part(self, *, keys: Iterable[str] = (), wait_keys: Iterable[str] = (), prints: Iterable[str] = ()) -> State:
        """The state as an append loads it."""
        return in_part(self.state, keys=set(keys), wait_keys=set(wait_keys), prints=set(prints))

    # -- what agents do

    def open(self, *, holder: str | None = "bot-1", **fields: Any) -> Story:
        body = convert({"flow": "flow", "external_id": "x-1", "holder": holder, **fields}, cmd.OpenRun)
        self.do(lambda draft: decide.open_run(draft, body, workspace="w", owner=fields.get("owner")), operation="open")
        return self

    def append(self, *events: cmd.AgentEvents, epoch: int | None = None) -> Story:
        self.do(self.batch(*events, epoch=epoch))
        return self

    def batch(self, *events: cmd.AgentEvents, epoch: int | None = None) -> Callable[[Draft], None]:
        def work(draft: Draft) -> None:
            decide.require_lease(draft, draft.run.epoch if epoch is None else epoch)
            for i, one in enumerate(events):
                decide.append(draft, one, pointer=f"/events/{i}", last=i == len(events) - 1)
            draft.renew()

        return work

    def add(self, type_: str, **fields: Any) -> Story:
        return self.append(event(type_, **fields))

    def pause(self, *waits: dict[str, Any], resume_when: str = "all") -> Story:
        return self.add("paused", waits=list(waits), resume_when=resume_when)

    def rehydrate(self, holder: str = "bot-2", **fields: Any) -> Verdict:
        body = convert({"holder": holder, **fields}, cmd.Rehydrate)
        found: Verdict = self.do(lambda draft: decide.rehydrate(draft, body), operation="rehydrate")
        return found

    def claim(self, holder: str = "bot-2", **fields: Any) -> Verdict | None:
        body = convert({"flows": ["flow"], "holder": holder, **fields}, cmd.Claim)
        found: Verdict | None = self.do(lambda draft: decide.claim(draft, body), operation="claim")
        return found

    def release(self, retry_in: int | None = None) -> Story:
        body = cmd.Release(epoch=self.run.epoch, retry_in=retry_in)
        self.do(lambda draft: decide.release(draft, body), operation="release")
        return self

    def tick(self) -> Story:
        """What a sweeper does: nothing but what is overdue."""
        self.do(lambda draft: None, actor=ev.SYSTEM, operation="tick")
        return self

    def signal(self, key: str) -> Story:
        answer = {"id": f"signal-{key}", "name": self.state.waits[key].name, "payload": {"n": 1}}
        self.do(
            lambda draft: waiting.answer_by_signal(draft, draft.state.waits[key], answer),
            actor=ev.SYSTEM,
            operation="signal",
        )
        return self

    # -- what people do

    def decide(self, key: str, choice: str, *, by: str = "alice", **fields: Any) -> str:
        wait = self.state.waits[key]
        body = convert({"choice": choice, "wait_version": fields.pop("version", wait.version), **fields}, cmd.Decide)
        made: str = self.do(lambda draft: waiting.decide(draft, wait.id, body), actor=person(by), operation="decide")
        return made

    def hold(self, what: str, *, by: str = "dave", **fields: Any) -> Story:
        """takeover, handback, terminate, retry, clear; with `key` also reconcile and sign_off."""
        kinds: dict[str, Any] = {
            "takeover": cmd.Reasoned,
            "terminate": cmd.Reasoned,
            "sign_off": cmd.Reasoned,
            "handback": cmd.Handback,
            "retry": cmd.Retry,
            "clear": cmd.Clear,
            "reconcile": cmd.Reconcile,
        }
        key = fields.pop("key", None)
        body = convert({"reason": "because", **fields}, kinds[what])
        work = getattr(decide, what)
        self.do(
            (lambda draft: work(draft, body)) if key is None else (lambda draft: work(draft, key, body)),
            actor=person(by),
            operation=what,
        )
        return self


__all__ = ["BOT", "START", "NeedsAllEffects", "Story", "event", "person", "policy"]


def plan(key: str = "k", *, n: int = 1, **fields: Any) -> dict[str, Any]:
    """The fields of an effect of the flow `erp`."""
    return {"key": key, "system": "erp", "action": "order", "resource": "po", "arguments": {"n": n}, **fields}


def approval(key: str = "ok", effect: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A wait for a person, an hour long."""
    wait = {"key": key, "name": key, "kind": "approval", "due_in": 3600, **fields}
    if effect is not None:
        wait["ask"] = {"effect": effect, **fields.get("ask", {})}
    return wait


def callback(key: str = "cb", **fields: Any) -> dict[str, Any]:
    return {"key": key, "name": key, "kind": "callback", "due_in": 3600, **fields}


def timer(key: str = "t", **fields: Any) -> dict[str, Any]:
    return {"key": key, "name": key, "kind": "timer", "due_in": 3600, **fields}
