"""Random walks: agents, reviewers, an operator, signals and the clock do anything at any time; what must hold, holds.

Each seed is one story of its own, so a failure is repeated by its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from .driver import (
    ORDER,
    Agent,
    Answer,
    Clock,
    Person,
    Run,
    World,
    approval,
    callback,
    checkpoint,
    completed,
    effect,
    ev,
    executed,
    failed,
    order,
    paused,
    signal,
    started,
    timer,
    unknown,
)
from .sweep import sweep

STEPS = 50
ENDED = {"completed", "terminated"}
FOLLOWS = {
    "continue": "ready",
    "wait": "waiting",
    "compensate": "compensating",
    "review": "review",
    "terminate": "terminated",
}
#: What one step may do to an effect (contract section 3, and rule 9 for receipts that come from outside at any time).
NEXT: dict[str, set[str]] = {
    "planned": {"started", "executed", "failed", "unknown", "withdrawn"},
    "failed": {"started", "executed", "unknown", "withdrawn"},
    "started": {"executed", "failed", "unknown"},
    "unknown": {"started", "executed", "failed", "planned"},
    "executed": {"compensating", "unknown", "compensated"},
    "compensating": {"compensated", "compensation_unknown", "executed"},
    "compensation_unknown": {"compensated", "executed"},
    "compensated": {"unknown"},
    "withdrawn": {"executed", "unknown"},
}
PLANS = [
    order("k1"),
    effect("m", "mail.send"),
    effect("r", "erp.reserve"),
    effect("p", "psp.charge"),
    effect("s", "esign.send"),
    effect("b", "bank.pay"),
]


class Walk:
    """One run and everybody around it."""

    def __init__(self, seed: int, world: World, clock: Clock, flow: str) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - a repeatable story, no secret
        self.clock = clock
        self.bot: Agent = world.agent("bot")
        self.people: list[Person] = [world.person(name) for name in ("alice", "bob", "carol", "grace", "dave")]
        self.dave = world.person("dave")
        self.run: Run = self.bot.open(flow=flow, requested_by="carol")
        self.count = 0
        self.epochs = [self.run.epoch]

    def key(self) -> str:
        return str(self.dice.choice(PLANS)["key"])

    def args(self, key: str) -> Any:
        return next(plan["arguments"] for plan in PLANS if plan["key"] == key)

    def event(self) -> Any:
        key = self.key()
        return self.dice.choice(
            [
                checkpoint(self.dice.choice(["draft", "sign", "file"])),
                self.dice.choice(PLANS),
                {**self.dice.choice(PLANS), "start": True},
                started(key, arguments=self.args(key)),
                started(key, arguments={**ORDER, "amount": "1.00"}),
                executed(key, self.dice.choice(["x1", "x1", "x2"])),
                unknown(key),
                ev("effect.failed", key=key, error={"code": "x", "message": "no"}),
                ev("effect.not_executed", key=key, evidence={}),
                ev("effect.compensating", key=key, attempt=1),
                ev("effect.compensated", key=key, receipt={"id": "u1"}),
                ev("effect.compensation_failed", key=key, error={"code": "x", "message": "no"}),
                ev("effect.compensation_unknown", key=key, error={"code": "x", "message": "?"}),
                ev("note", text="hm"),
            ]
        )

    def wait(self) -> Any:
        self.count += 1
        key = f"w{self.count}"
        due = self.dice.choice([30, 600, 86400])
        then = self.dice.choice(["review", "reject", "resume", "continue", "terminate", "escalate"])
        if self.dice.random() < 0.5:
            asked = self.dice.choice([None, "k1"]) if any(e["key"] == "k1" for e in self.look["effects"]) else None
            then = "review" if then == "continue" else then
            return approval(key, effect=asked, due_in=due, on_timeout=then)
        make: Callable[..., Any] = self.dice.choice([callback, signal])
        return self.dice.choice([make(key, name="news", due_in=due, on_timeout=then), timer(key, due)])

    def append(self) -> Answer:
        epoch = self.dice.choice(self.epochs[-2:])
        return self.run.append(*[self.event() for _ in range(self.dice.choice([1, 1, 2, 4]))], epoch=epoch)

    def pause(self) -> Answer:
        waits = [self.wait() for _ in range(self.dice.choice([1, 1, 2]))]
        return self.run.append(paused(*waits, when=self.dice.choice(["all", "any", "each"])))

    def resume(self) -> Answer:
        return self.run.rehydrate(holder=self.dice.choice(["bot/w1", "bot/w2"]))

    def claim(self) -> Answer:
        got = self.bot.claim(self.look["flow"])
        if got.status == 200:
            self.run.epoch = got.json["lease"]["epoch"]
        return got

    def decide(self) -> Answer:
        asked = [w for w in self.look["waits"] if w["kind"] == "approval"]
        if not asked:
            return self.resume()
        wait, choice = self.dice.choice(asked), self.dice.choice(["approve", "approve", "reject", "respond", "edit"])
        how: dict[str, Any] = {"arguments": {**ORDER, "amount": "80.00"}} if choice == "edit" else {}
        who = self.dice.choice(self.people if self.dice.random() < 0.3 else self.people[:2])
        return who.decide(wait, choice, **how)

    def person(self) -> Answer:
        run, key = self.run, self.key()
        acts: list[Callable[[], Answer]] = [
            lambda: self.dave.takeover(run),
            lambda: self.dave.handback(run, effects=[{"key": key, "receipt": {"id": "xh"}}]),
            lambda: self.dave.handback(run),
            lambda: self.dave.clear(
                run, self.dice.choice(["human_gate", "rejected", "timeout_undetermined", "timed_out"])
            ),
            lambda: self.dave.retry(run, tries=2),
            lambda: self.dave.reconcile(run, key, self.dice.choice(["executed", "not_executed", "compensated"])),
            lambda: self.dave.sign_off(run, key),
        ]
        if self.dice.random() < 0.04:
            acts = [lambda: self.dave.terminate(run)]
        return self.dice.choice(acts)()

    def other(self) -> Answer:
        self.count += 1
        acts: list[Callable[[], Answer]] = [
            lambda: self.bot.signal(f"e{self.count}", "news", run=self.run.id),
            lambda: self.run.release(retry_in=self.dice.choice([0, 60])),
            lambda: self.run.append(failed(retry_in=30, retryable=self.dice.random() < 0.8)),
            lambda: self.bot.post(f"/runs/{self.run.id}/recall", {"holder": "bot/w1", "reason": "new input"}),
        ]
        if self.dice.random() < 0.06:
            acts = [
                lambda: self.run.append(completed()),
                lambda: self.run.append(ev("cancelled", reason="enough")),
            ]
        return self.dice.choice(acts)()

    def sensible_event(self) -> Any:
        """What a well-made agent would report next of one of the effects."""
        plan = self.dice.choice(PLANS)
        key = plan["key"]
        states = {e["key"]: e["state"] for e in self.look["effects"]}
        undoing = self.look["verdict"]["outcome"] == "compensate"
        receipt = {"receipt": {"id": "u1"}}
        odd = {"error": {"code": "x", "message": "no"}}
        ways: dict[str | None, list[Any]] = {
            None: [plan, plan, {**plan, "start": True}],
            "planned": [started(key, arguments=self.args(key))],
            "failed": [started(key, arguments=self.args(key))],
            "started": [executed(key), executed(key), unknown(key), ev("effect.failed", key=key, **odd)],
            "unknown": [executed(key), started(key, arguments=self.args(key)), ev("effect.not_executed", key=key)],
            "executed": [ev("effect.compensating", key=key)] if undoing else [plan, checkpoint("file")],
            "compensating": [
                ev("effect.compensated", key=key, **receipt),
                ev("effect.compensation_failed", key=key, **odd),
                ev("effect.compensation_unknown", key=key, **odd),
            ],
        }
        return self.dice.choice(ways.get(states.get(key), [ev("note", text="hm")]))

    def review(self) -> Answer:
        """What an operator would do about the first thing that stands in the way."""
        reason = self.dice.choice(self.look["verdict"]["reasons"])
        code, subject = reason["code"], reason["subject"]
        run = self.run
        if code in ("effect_unknown", "receipt_conflict"):
            return self.dave.reconcile(run, subject, self.dice.choice(["executed", "not_executed"]))
        if code == "compensation_unknown":
            return self.dave.reconcile(run, subject, self.dice.choice(["compensated", "not_executed"]))
        if code == "sign_off_needed":
            return self.dave.sign_off(run, subject)
        if code in ("retries_exhausted", "not_retryable"):
            return self.dave.retry(run, tries=3)
        if code == "undo_pending":
            return self.dave.takeover(run)
        return self.dave.clear(run, code)

    def hand_back(self) -> Answer:
        doubtful = {"started": "executed", "unknown": "not_executed", "compensation_unknown": "compensated"}
        found = [
            {"key": e["key"], "outcome": doubtful[e["state"]]} for e in self.look["effects"] if e["state"] in doubtful
        ]
        return self.dave.handback(self.run, effects=found)

    def sensible(self) -> Answer:
        status = self.look["status"]
        running = status == "running" or self.look["lease"]
        ways: dict[str, list[Callable[[], Answer]]] = {
            "running": [*[lambda: self.run.append(self.sensible_event())] * 6, self.pause, self.pause, self.other],
            "ready": [self.claim, self.resume],
            "compensating": [self.claim, self.resume],
            "waiting": [self.decide, self.decide, self.other, self.resume],
            "review": [self.review, self.review, self.review, self.decide, self.person],
            "taken_over": [self.hand_back],
        }
        return self.dice.choice(ways.get("running" if running else status, [self.resume, self.append, self.person]))()

    def step(self) -> Answer | None:
        self.look = self.run.look()
        if self.look["lease"]:
            self.run.epoch = self.look["lease"]["epoch"]
        if self.dice.random() < 0.1:
            self.clock.advance(seconds=self.dice.choice([5, 40, 65, 700]))
            return None
        if self.dice.random() < 0.8:
            return self.sensible()
        return self.dice.choice([self.append, self.append, self.resume, self.decide, self.person, self.other])()


def holds(before: dict[str, Any], now: dict[str, Any], answer: Answer | None) -> None:
    """What must be so after any step, whatever it was."""
    assert now["version"] >= before["version"]
    assert len(now["metadata"]) == 10
    assert now["metadata"]["effect_keys"] == [{"key": e["key"], "state": e["state"]} for e in now["effects"]]
    if before["status"] in ENDED:
        assert now["status"] == before["status"], "ended is final"
    if now["status"] in ENDED:
        assert not [w for w in now["waits"] if w["status"] == "open"], "ending closes the waits"
        assert not [e for e in now["effects"] if e["state"] == "planned"], "what was planned is withdrawn"
        assert now["verdict"]["outcome"] == "terminate"
    elif now["status"] == "taken_over":
        assert now["verdict"]["reasons"][0]["code"] == "taken_over"
        assert not [w for w in now["waits"] if w["status"] == "open"]
    elif now["lease"] is None:
        assert now["status"] == FOLLOWS[now["verdict"]["outcome"]], now["verdict"]
        in_the_air = [e for e in now["effects"] if e["state"] in ("started", "compensating")]
        assert not in_the_air, "without a lease nothing is under way"
    was = {w["id"]: w["status"] for w in before["waits"]}
    for wait in now["waits"]:
        assert was.get(wait["id"], "open") in ("open", wait["status"]), "a wait closes once"
    states = {e["key"]: e["state"] for e in before["effects"]}
    for effect_ in now["effects"]:
        old, new = states.get(effect_["key"]), effect_["state"]
        if old is not None and old != new:  # one step may do two things: what was overdue, and what was asked
            reach = NEXT[old] | {far for near in NEXT[old] for far in NEXT[near]}
            assert new in reach, f"{effect_['key']}: {old} -> {new}"
    tries = {e["key"]: e["attempt"] for e in before["effects"]}
    for effect_ in now["effects"]:
        if states.get(effect_["key"]) in ("executed", "compensated", "started"):
            assert effect_["attempt"] == tries[effect_["key"]], f"{effect_['key']} ran again"
    if answer is not None and answer.status == 200 and "/events" in answer.asked:
        for told in answer.json["effects"]:
            if told["granted"] and told["state"] == "started":
                assert tries.get(told["key"], 0) < told["attempt"], "granted to two"


@pytest.mark.parametrize("on_reject", ["compensate", "terminate", "review", "continue"])
@pytest.mark.parametrize("seed", range(3))
def test_what_must_hold_holds(world: World, clock: Clock, seed: int, on_reject: str) -> None:
    walk = Walk(seed * 10 + len(on_reject), world, clock, world.variant(f"walk-{on_reject}", on_reject=on_reject))
    before = walk.run.look()
    for n in range(STEPS):
        answer = walk.step()
        if answer is not None:
            assert answer.status < 500, f"step {n}: {answer.asked}: {answer.raw[:600]!r}"
        sweep()
        if walk.run.epoch != walk.epochs[-1]:
            assert walk.run.epoch > max(walk.epochs), "each grant has a higher epoch"
            walk.epochs.append(walk.run.epoch)
        now = walk.run.look()
        try:
            holds(before, now, answer)
        except AssertionError as error:
            raise AssertionError(f"step {n}, after {answer.asked if answer else 'the clock'}: {error}") from error
        before = now
    assert len(walk.run.events()) == before["version"]
