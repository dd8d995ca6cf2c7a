"""A random story of one run, told to the server and to a model of the rules (`crash.model`); both must come out alike.

Agents that forget, lose their connection or their answers, and come back; reviewers, an operator, signals; a clock that
jumps, and ticks that stand still for a while. After each step: what was answered is what the rules say; what is stored
is what the rules say; the hash chain holds; the tables are what the events say; nothing happened twice outside.
"""

from __future__ import annotations

import copy
import datetime as dt
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import Error, OperationalError, connection
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from rehydrate import engine, projections, verify
from tests.contract.driver import CAST, Agent, Answer, Caller, DjangoTransport, World, ev
from tests.crash.model import CLAIMED, DONE, GATES, KINDS, LEASE, Effect, Expected, Lease, Model, Wait, no, ok

Json = dict[str, Any]

#: How much in CI; a longer search is STORIES=2000.
STORIES = int(os.environ.get("STORIES", "40"))
STEPS = int(os.environ.get("STORY_STEPS", "40"))
#: Refusals that an auditor must find in the ledger (rule 14); every other one leaves no trace.
AUDITED = {
    "agents_cannot_decide", "already_voted", "approval_mismatch", "approval_rejected", "approval_required",
    "effect_already_executed", "effect_duplicate", "effect_key_reused", "effect_unknown", "lease_lost", "not_eligible",
    "open_compensation", "self_approval", "stale_decision", "wait_closed", "wait_expired",
}  # fmt: skip
HOLDERS = ("w1", "w2")
FLOWS = ("compensate", "terminate", "review", "continue")
HOW = st.sampled_from(["once", "once", "without a key", "without a key", "again", "lost before", "lost after"])


@dataclass
class Deed:
    """Something that somebody may do, when, and with which choices."""

    act: Callable[..., None]
    weight: int
    when: Callable[[Story], Any]
    choices: dict[str, st.SearchStrategy[Any]]


DEEDS: list[Deed] = []


def deed(
    *, weight: int = 1, when: Callable[[Story], Any] = lambda story: True, **choices: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a method as one of the things that may happen. (As rules of their own, half of them would be switched
    off in each story, and few stories would get anywhere.)"""

    def register(act: Callable[..., None]) -> Callable[..., None]:
        DEEDS.append(Deed(act, weight, when, choices))
        return act

    return register


@dataclass
class Sent:
    """A request as it can be sent again, with its first answer."""

    who: Caller
    path: str
    body: Json
    key: str
    answer: Answer
    grants: int | None


class StandingClock:
    """The database's clock, which moves when it is told to and never by itself: a story is told alike each time, on
    whatever machine. `clock_timestamp()` is found here before it is found in the catalogue."""

    @contextmanager
    def in_place(self) -> Iterator[StandingClock]:
        name = connection.ops.quote_name(connection.settings_dict["NAME"])
        with connection.cursor() as cursor:
            cursor.execute("CREATE SCHEMA story")
            cursor.execute("CREATE TABLE story.clock AS SELECT clock_timestamp() AS at")
            cursor.execute(
                "CREATE FUNCTION story.clock_timestamp() RETURNS timestamptz LANGUAGE sql"
                " AS 'SELECT at FROM story.clock'"
            )
            cursor.execute(f"ALTER DATABASE {name} SET search_path = public, story, pg_catalog")
        connection.close()  # the next one has that path
        try:
            yield self
        finally:
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER DATABASE {name} RESET search_path")
                cursor.execute("DROP SCHEMA story CASCADE")
            connection.close()

    def stand_at(self, moment: dt.datetime) -> None:
        with connection.cursor() as cursor:
            cursor.execute("UPDATE story.clock SET at = %s", [moment])


class Story(RuleBasedStateMachine):
    """The server's side of the model, and everybody who acts."""

    world: World
    clock: StandingClock
    model: Model
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.bot: Agent = self.world.agent("bot")
        self.people = {name: self.world.person(name) for name in ("alice", "bob", "carol", "dave", "grace")}
        self.dave = self.people["dave"]
        self.ticks = True

    # -- the story begins

    @initialize(on_reject=st.sampled_from(FLOWS))
    def begin(self, on_reject: str) -> None:
        self.open(on_reject)

    @deed(weight=6, when=lambda self: self.model.ended, on_reject=st.sampled_from(FLOWS), soon=st.integers(0, 2))
    def begin_again(self, on_reject: str, soon: int) -> None:
        """A few more steps after the end, then another run."""
        if not soon:
            self.open(on_reject)

    def open(self, on_reject: str) -> None:
        type(self).count += 1
        self.now = dt.datetime.now(dt.UTC)
        self.clock.stand_at(self.now)
        self.outside, self.undone = Counter[str](), Counter[str]()  # what really happened, by key
        self.known: dict[str, int] = {}  # holder -> the epoch that it knows of
        self.epochs: list[int] = []
        self.grants: dict[str, int] = {}  # effect -> epoch under which it was started and nothing done yet
        self.undoing: dict[str, int] = {}
        self.to_tell: dict[str, tuple[int, str]] = {}  # done outside, and not told yet: (epoch, receipt)
        self.sent: list[Sent] = []
        self.waits = self.signals = 0
        self.buffered: str | None = None
        self.signal_ids: list[str] = []
        self.version = 0
        self.looked = True  # whether a request has looked at the run since the clock was moved
        flow = f"story-{on_reject}"
        self.model = Model(on_reject)
        self.flow = flow
        body = {
            "flow": flow,
            "external_id": f"story-{self.count}-{uuid4()}",
            "title": "A story",
            "input": {"ref": "s3://in", "digest": "sha256:" + "1" * 64},
            "holder": "w1",
            "requested_by": "carol",
            "events": [ev("checkpoint", stage="draft", ref="s3://cp")],
        }
        answer = self.bot.post("/runs", body).ok(201)
        self.id: str = answer["run"]["id"]
        self.model.lease = Lease(1, "w1", self.later(LEASE))
        self.model.stage = "draft"
        self.known["w1"] = 1
        self.epochs.append(1)
        self.check()

    def teardown(self) -> None:
        """Nobody claims this run in the next story."""
        self.ticks = True
        if hasattr(self, "id") and not self.model.ended:
            self.dave.post(f"/runs/{self.id}/takeover", {"reason": "over"})
            stuck = {"started", "unknown", "compensation_unknown", "compensating"}
            effects = [
                {"key": e["key"], "outcome": "compensated" if "comp" in e["state"] else "executed"}
                for e in self.look()["effects"]
                if e["state"] in stuck
            ]
            self.dave.post(f"/runs/{self.id}/handback", {"reason": "over", "stage": "x", "effects": effects}).ok()
            self.dave.post(f"/runs/{self.id}/terminate", {"reason": "over"}).ok()

    # -- how a request is made

    def later(self, seconds: float) -> dt.datetime:
        return self.now + dt.timedelta(seconds=seconds)

    def before(self, *, looks: bool = True) -> None:
        """Two seconds later. `looks` says that the request to come reads the run: then it applies what is overdue,
        whether ticks go on or not."""
        self.now += dt.timedelta(seconds=2)
        self.clock.stand_at(self.now)
        self.model.let_pass(self.now)
        self.model.settle()
        if self.ticks or not looks:
            engine.tick()
        self.version = self.stored_version()
        self.looked = False

    def send(
        self,
        who: Caller,
        path: str,
        body: Json,
        expected: Expected,
        *,
        how: str = "once",
        grants: Callable[[Json], int | None] = lambda _: None,
    ) -> Answer:
        """Send it, some way or other; the answer is as expected, and a repetition changes nothing."""
        key = str(uuid4())
        self.looked = True
        if how == "lost before":
            with self.connection_lost():
                lost = who.call("POST", path, body, idem=key)
            if lost.status >= 500:
                assert lost.status == 503, lost.raw
                assert self.stored_version() == self.version, "a transaction that was cut off left something behind"
        answer = who.call("POST", path, body, idem=None if how == "without a key" else key)
        note(f"{who.name} {path} {json.dumps(body)} -> {answer.status} {answer.raw[:160]!r}")
        assert answer.status < 500, answer.raw
        code = answer.json["code"] if answer.status >= 400 else ""
        fits = answer.status == expected.status and (not expected.codes or code in expected.codes)
        assert fits, f"{path} {body}: {answer.status} {code} instead of {expected}: {answer.raw[:800]!r}"
        after = self.stored_version()
        if answer.status >= 400 and self.ticks:
            grew = after - self.version
            traced = (grew > 0) == (code in AUDITED)
            assert traced or "recorded" in answer.json, f"{path}: {code} added {grew} events"
        granted = grants(answer.json) if answer.status < 300 and answer.raw else None
        if how != "without a key":
            self.sent.append(Sent(who, path, body, key, answer, granted))
        if how in ("again", "lost after"):
            self.again(self.sent[-1], live=granted)
            assert self.stored_version() == after, "the same request again changed something"
        return answer

    def again(self, sent: Sent, *, live: int | None) -> None:
        """The first answer comes again, but never a grant that is over."""
        answer = sent.who.call("POST", sent.path, sent.body, idem=sent.key)
        if sent.grants is not None and live != sent.grants:
            answer.refused(409, "lease_lost")
        else:
            assert (answer.status, answer.raw) == (sent.answer.status, sent.answer.raw), answer.raw

    @contextmanager
    def connection_lost(self) -> Iterator[None]:
        """The database's connection breaks when all is written and nothing is committed."""
        save = projections.save

        def break_off(changes: Any) -> None:
            if connection.in_atomic_block:  # otherwise it commits by itself
                save(changes)
            with suppress(Error), connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            raise OperationalError("the connection was lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(projections, "save", break_off)
            yield
        connection.close()  # the test client, unlike a server, keeps a connection that broke

    def stored_version(self) -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT version FROM rehydrate_run WHERE id = %s", [self.id])
            return int(cursor.fetchone()[0])

    def look(self) -> Json:
        found: Json = self.bot.get(f"/runs/{self.id}").ok()
        return found

    # -- what must hold after each step

    def check(self) -> None:
        self.model.settle()
        if self.ticks or not self.looked:
            engine.tick()
        flaw, _ = verify.run(self.id)
        assert flaw is None, flaw
        run, model = self.look(), self.model
        assert run["version"] >= self.version, "the version never falls"
        stored = {
            wait["key"]: (wait["status"], wait["version"] if wait["status"] == "open" else 0) for wait in run["waits"]
        }
        known = {w.key: (w.status, w.version if w.open else 0) for w in model.waits.values()}
        assert stored == known, f"{stored} instead of {known}"
        for wait in run["waits"]:
            if wait["status"] == "open":
                due = dt.datetime.fromisoformat(wait["due_at"])
                right = model.waits[wait["key"]].due
                assert due == right, f"{wait['key']} is due at {due}, not {right}"
        effects = {e["key"]: e["state"] for e in run["effects"]}
        ours = {k: e.state for k, e in model.effects.items()}
        assert effects == ours, f"{effects} instead of {ours} in {run['status']}, {model.status()}: {run['verdict']}"
        if model.lease is not None:
            assert run["lease"], "the lease is gone"
            assert (run["lease"]["epoch"], run["lease"]["holder"]) == (model.lease.epoch, model.lease.holder)
            assert dt.datetime.fromisoformat(run["lease"]["expires_at"]) == model.lease.until
            assert run["status"] in ("running", "compensating")
        else:
            assert run["lease"] is None
            assert run["status"] == model.status(), f"{run['verdict']} instead of {model.verdict()}"
            if not model.ended:
                outcome, code = model.verdict()
                told = run["verdict"]
                assert told["outcome"] == outcome
                assert code == "clear" or code in [reason["code"] for reason in told["reasons"]], told["reasons"]
        if model.ended:
            assert run["status"] == model.ended
        for key, effect in model.effects.items():
            times = self.outside[key]
            assert times <= 1 or effect.kind.retry_safe, f"{key} happened {times} times outside"
            assert self.undone[key] <= 1

    def act(self, who: Caller, path: str, body: Json, expected: Expected, how: str = "once", **more: Any) -> Answer:
        answer = self.send(who, path, body, expected, how=how, **more)
        return answer

    # -- leases

    def learn(self, holder: str, envelope: Json) -> None:
        lease = envelope["lease"]
        assert lease is not None
        assert self.model.lease is not None
        assert lease["epoch"] == self.model.epoch == self.epochs[-1] + 1, "each grant has the next epoch"
        self.known[holder] = lease["epoch"]
        self.epochs.append(lease["epoch"])

    @deed(holder=st.sampled_from(HOLDERS), how=HOW)
    def rehydrate(self, holder: str, how: str) -> None:
        self.before()
        expected, granted = self.model.rehydrate(holder, self.now)
        body = {"holder": holder, "agent": self.bot.card()}
        if self.model.ended or self.model.held:
            expected = ok()
        answer = self.send(self.bot, f"/runs/{self.id}/rehydrate", body, expected, how=how, grants=_lease_of)
        if answer.status == 200:
            assert (answer.json["lease"] is not None) == granted, answer.json["verdict"]
            if granted:
                self.learn(holder, answer.json)
                self.same_envelope(answer.json)
        self.check()

    def same_envelope(self, envelope: Json) -> None:
        """Whoever comes back is told all that it needs: stage, waits of the pause in order, effects, what to undo."""
        model = self.model
        assert envelope["run"]["stage"] == model.stage
        if model.pause:
            assert [wait["key"] for wait in envelope["waits"]] == model.pause
        assert {e["key"]: e["state"] for e in envelope["effects"]} == {k: e.state for k, e in model.effects.items()}
        assert model.lease is not None
        if model.lease.purpose == "compensate":
            assert envelope["undo"] == model.undo_list()

    @deed(holder=st.sampled_from(HOLDERS), how=HOW)
    def claim(self, holder: str, how: str) -> None:
        self.before()
        body = {"flows": [self.flow], "holder": holder, "agent": self.bot.card(), "wait": 0}
        if not self.model.claimable():
            self.send(self.bot, "/claims", body, ok(204), how=how)
        else:
            self.model.grant(holder, self.now, seconds=CLAIMED, purpose=self.model.verdict()[0])
            answer = self.send(self.bot, "/claims", body, ok(), how=how, grants=_lease_of)
            assert answer.json["run"]["id"] == self.id
            self.learn(holder, answer.json)
            self.same_envelope(answer.json)
        self.check()

    @deed(holder=st.sampled_from(HOLDERS))
    def forget(self, holder: str) -> None:
        """The agent is killed: it knows nothing any more, and nobody is told."""
        self.known.pop(holder, None)

    def an_epoch(self, stale: bool) -> int:
        """The epoch of the live lease, or one from before."""
        live = self.model.lease.epoch if self.model.lease else self.model.epoch
        return self.epochs[0] if stale and len(self.epochs) > 1 else live

    @deed(when=lambda self: self.model.lease is not None or self.waits % 3 == 0, stale=st.booleans(), how=HOW)
    def heartbeat(self, stale: bool, how: str) -> None:
        self.before()
        epoch = self.an_epoch(stale)
        refused = self.model.live(epoch)
        self.send(self.bot, f"/runs/{self.id}/heartbeat", {"epoch": epoch}, refused or ok(), how=how)
        if refused is None:
            self.model.renew(self.now)
        self.check()

    @deed(
        when=lambda self: self.model.lease is not None or self.waits % 3 == 0,
        stale=st.booleans(),
        retry_in=st.sampled_from([None, 120]),
        how=HOW,
    )
    def release(self, stale: bool, retry_in: int | None, how: str) -> None:
        self.before()
        epoch = self.an_epoch(stale)
        refused = self.model.live(epoch)
        body = {"epoch": epoch, **({"retry_in": retry_in} if retry_in else {})}
        if refused is None:
            self.model.drop_lease()
            self.model.retry_at = self.later(retry_in) if retry_in else None
        self.send(self.bot, f"/runs/{self.id}/release", body, refused or ok(), how=how)
        self.check()

    @deed(
        when=lambda self: any(wait.open for wait in self.model.waits.values()) or self.model.ended,
        holder=st.sampled_from(HOLDERS),
        how=HOW,
    )
    def recall(self, holder: str, how: str) -> None:
        self.before()
        model, expected = self.model, ok()
        if model.ended:
            expected = no(409, "run_ended")
        elif model.lease is not None and model.lease.holder != holder:
            expected = no(409, "lease_held")
        elif model.held:
            expected = no(409, "not_resumable")
        else:
            tried = copy.deepcopy(model)
            tried.drop_lease()
            for wait in tried.waits.values():
                if wait.open:
                    wait.status = "superseded"
            outcome, _ = tried.verdict()
            if outcome in ("continue", "compensate"):
                tried.grant(holder, self.now, purpose=outcome)
                self.model = tried
            else:
                expected = no(409, "not_resumable")
        body = {"holder": holder, "reason": "New input."}
        answer = self.send(self.bot, f"/runs/{self.id}/recall", body, expected, how=how, grants=_lease_of)
        if answer.status == 200:
            self.learn(holder, answer.json)
        self.check()

    # -- what agents append

    def append(self, events: list[Json], expected: Expected, how: str, epoch: int | None = None) -> Answer:
        epoch = self.an_epoch(False) if epoch is None else epoch
        body = {"epoch": epoch, "events": events}

        def granted(answer: Json) -> int | None:
            return epoch if any(effect["granted"] for effect in answer["effects"]) else None

        answer = self.send(self.bot, f"/runs/{self.id}/events", body, expected, how=how, grants=granted)
        if answer.status == 200 and self.model.live(epoch) is None:
            self.model.renew(self.now)
        return answer

    @deed(
        when=lambda self: self.model.lease is not None or self.waits % 3 == 0,
        stale=st.booleans(),
        stage=st.sampled_from(["draft", "draft", "sign"]),
        how=HOW,
    )
    def checkpoint(self, stale: bool, stage: str, how: str) -> None:
        self.before()
        epoch = self.an_epoch(stale)
        refused = self.model.live(epoch)
        self.append([ev("checkpoint", stage=stage, ref=f"s3://{stage}")], refused or ok(), how, epoch)
        if refused is None:
            self.model.stage = stage
        self.check()

    def plan_of(self, key: str, **more: Any) -> Json:
        kind = KINDS[key]
        plan = {"key": key, "system": kind.system, "action": kind.action, "resource": key, "arguments": kind.arguments}
        return {"type": "effect.planned", **plan, **more}

    @deed(weight=2, when=lambda self: self.model.lease is not None, key=st.sampled_from(sorted(KINDS)), how=HOW)
    def plan(self, key: str, how: str) -> None:
        self.before()
        refused = self.model.live(self.an_epoch(False))
        answer = self.append([self.plan_of(key)], refused or ok(), how)
        if refused is None:
            self.model.effects.setdefault(key, Effect(KINDS[key]))
            assert answer.json["effects"][0]["granted"] is False
        self.check()

    @deed(when=lambda self: self.model.lease is not None and self.model.effects, how=HOW)
    def plan_otherwise(self, data: st.DataObject, how: str) -> None:
        """The same key with other content, or the same content under another key."""
        self.before()
        refused = self.model.live(self.an_epoch(False))
        key = data.draw(st.sampled_from(sorted(self.model.effects)), "key")
        if data.draw(st.booleans(), "twin"):
            event, code = {**self.plan_of(key), "key": f"{key}-twin"}, no(409, "effect_duplicate")
        else:
            event, code = self.plan_of(key, arguments={"of": "something else"}), no(422, "effect_key_reused")
        self.append([event], refused or code, how)
        self.check()

    def starting(self, key: str, amount: str, event: Json, how: str, *, planned: bool) -> None:
        """A start, by itself or with the plan: granted where it may be, and to one only."""
        model = self.model
        epoch = self.an_epoch(False)
        refused = model.live(epoch)
        if refused is not None:
            self.append([event], refused, how)
            return
        assert model.lease is not None
        new = key not in model.effects
        effect = model.effects.get(key) or Effect(KINDS[key])
        codes = model.may_start(effect, amount)
        no_error = planned and (effect.state in DONE or effect.state == "started" or "effect_unknown" in codes)
        expected = ok() if not codes or no_error else no(422 if codes == ["effect_key_reused"] else 409, *codes)
        answer = self.append([event], expected, how)
        if answer.status == 200:
            told = answer.json["effects"][0]
            assert told["granted"] is (not codes), told
            model.effects[key] = effect
            if not codes:
                attempt = effect.attempt
                model.started(effect)
                assert told["attempt"] == attempt + 1
                happened = self.outside[key] and not effect.kind.retry_safe
                assert not happened, f"{key} has happened, and was granted again"
                if effect.kind.gated:
                    assert effect.approval == "approved"
                self.grants[key] = epoch
                self.to_tell.pop(key, None)
        else:
            assert not new or key not in {e["key"] for e in self.look()["effects"]}
            if answer.json["code"] == "approval_mismatch":
                model.mismatch(effect, "approval_mismatch")

    @deed(
        weight=4,
        when=lambda self: self.model.lease is not None and self.model.lease.purpose == "continue",
        key=st.sampled_from(sorted(KINDS)),
        how=HOW,
    )
    def plan_and_start(self, key: str, how: str) -> None:
        self.before()
        if self.model.lease is not None and self.model.lease.purpose == "continue":
            self.starting(key, "100.00", self.plan_of(key, start=True), how, planned=True)
        self.check()

    @deed(
        weight=2,
        when=lambda self: self.model.lease is not None and self.model.lease.purpose == "continue",
        amount=st.sampled_from(["as it is", "as it is", "as it is", "100.00", "1.00"]),
        how=HOW,
    )
    def start(self, data: st.DataObject, amount: str, how: str) -> None:
        self.before()
        model = self.model
        if model.effects and model.lease is not None and model.lease.purpose == "continue":
            key = data.draw(st.sampled_from(sorted(model.effects)), "key")
            effect = model.effects[key]
            amount = effect.amount if amount == "as it is" else amount
            if effect.state == "unknown" and amount != effect.amount:
                amount = effect.amount
            event = ev("effect.started", key=key, arguments={**KINDS[key].arguments, "amount": amount})
            self.starting(key, amount, event, how, planned=False)
        self.check()

    @deed(weight=6, when=lambda self: any(self.live_grant(key) for key in self.grants))
    def happen(self, data: st.DataObject) -> None:
        """The agent does it outside. What it was granted is good for as long as its lease lives, and for once."""
        key = data.draw(st.sampled_from([key for key in self.grants if self.live_grant(key)]), "key")
        epoch = self.grants.pop(key)
        if not KINDS[key].retry_safe:
            assert not self.outside[key], f"{key} happens twice"
        self.outside[key] = 1  # an outside that honours the key does it once, however often it is asked
        self.to_tell[key] = (epoch, f"receipt-{key}")

    def live_grant(self, key: str) -> bool:
        return self.model.lease is not None and self.model.lease.epoch == self.grants[key]

    @deed(
        weight=4,
        when=lambda self: self.to_tell,
        how=HOW,
        beside=st.sampled_from(["alone", "alone", "with what is refused"]),
    )
    def tell(self, data: st.DataObject, how: str, beside: str) -> None:
        """The receipt, whatever became of the lease or the run; and out of a batch that is refused."""
        self.before()
        key = data.draw(st.sampled_from(sorted(self.to_tell)), "key")
        epoch, receipt = self.to_tell[key]
        live = self.model.live(epoch)
        event = ev("effect.executed", key=key, receipt={"id": receipt})
        if beside == "alone":
            self.append([event], ok(), how, epoch)
        else:
            answer = self.append([event, ev("effect.started", key="nothing")], live or no(422, "invalid"), how, epoch)
            assert [each["key"] for each in answer.json["recorded"]] == [key]
        self.model.executed(self.model.effects[key], receipt)
        del self.to_tell[key]
        if live is not None:
            assert self.model.lease is None or self.model.lease.epoch != epoch
        self.check()

    @deed(
        when=lambda self: any(self.live_grant(key) for key in self.grants),
        what=st.sampled_from(["failed", "unknown"]),
        how=HOW,
    )
    def fail_effect(self, data: st.DataObject, what: str, how: str) -> None:
        """Nothing happened, and the agent knows it; or it does not know."""
        self.before()
        keys = [key for key in self.grants if self.live_grant(key)]
        if keys:
            key = data.draw(st.sampled_from(keys), "key")
            error = {"code": "x", "message": "No."}
            self.append([ev(f"effect.{what}", key=key, error=error)], ok(), how)
            self.model.effects[key].state = what
            self.model.failures += what == "failed"
            del self.grants[key]
        self.check()

    @deed(weight=4, when=lambda self: self.model.lease is not None, how=HOW)
    def look_up(self, data: st.DataObject, how: str) -> None:
        """An agent whose flow has a look-up finds out, and says what it found."""
        self.before()
        unknown = [key for key, e in self.model.effects.items() if e.state == "unknown" and e.kind.lookup]
        if unknown and self.model.lease is not None:
            key = data.draw(st.sampled_from(unknown), "key")
            effect = self.model.effects[key]
            if self.outside[key]:
                receipt = f"receipt-{key}"
                self.append([ev("effect.executed", key=key, receipt={"id": receipt})], ok(), how)
                self.model.executed(effect, receipt)
            else:
                self.append([ev("effect.not_executed", key=key, evidence="not there")], ok(), how)
                effect.state = "planned"
            self.grants.pop(key, None)
            self.to_tell.pop(key, None)
        self.check()

    # -- undoing

    @deed(
        weight=6,
        when=lambda self: self.model.lease is not None and self.model.lease.purpose == "compensate",
        how=HOW,
    )
    def undo(self, how: str) -> None:
        self.before()
        model = self.model
        undo = model.undo_list()
        if model.lease is not None and model.lease.purpose == "compensate" and undo:
            key = undo[0]
            tired = model.effects[key].undo_failures >= 3
            self.append([ev("effect.compensating", key=key)], no(409, "retries_exhausted") if tired else ok(), how)
            if not tired:
                model.effects[key].state = "compensating"
                self.undoing[key] = model.lease.epoch
        self.check()

    @deed(
        weight=8,
        when=lambda self: self.model.lease is not None and self.undoing,
        end=st.sampled_from(["compensated", "compensated", "failed", "unknown", "silent"]),
        how=HOW,
    )
    def undone_or_not(self, data: st.DataObject, end: str, how: str) -> None:
        self.before()
        model = self.model
        mine = [k for k, epoch in self.undoing.items() if model.lease is not None and model.lease.epoch == epoch]
        if mine:
            key = data.draw(st.sampled_from(mine), "key")
            effect = model.effects[key]
            error = {"code": "x", "message": "No."}
            del self.undoing[key]
            if end in ("compensated", "silent"):
                self.undone[key] += 1
            if end == "compensated":
                self.append([ev("effect.compensated", key=key, receipt={"id": f"undo-{key}"})], ok(), how)
                effect.state = "compensated"
            elif end == "failed":
                self.append([ev("effect.compensation_failed", key=key, error=error)], ok(), how)
                effect.state = "executed"
                effect.undo_failures += 1
            elif end == "unknown":
                self.append([ev("effect.compensation_unknown", key=key, error=error)], ok(), how)
                effect.state = "compensation_unknown"
        self.check()

    # -- pauses and ends

    def new_wait(self, data: st.DataObject, *, news: bool) -> tuple[Json, Wait]:
        self.waits += 1
        key = f"w{self.waits}"
        due = data.draw(st.sampled_from([90, 900, 86400]), "due_in")
        then = data.draw(st.sampled_from(["review", "review", "reject", "resume", "terminate", "escalate"]), "then")
        kinds = ["approval", "approval", "approval", "two", "timer"] + (["signal"] if news else [])
        kind = data.draw(st.sampled_from(kinds), "kind")
        spec: Json = {"key": key, "kind": kind, "due_in": due, "on_timeout": then}
        quorum, effect, name = 1, None, "other-approval"
        if kind == "timer":
            name = "sleep"
            del spec["on_timeout"]
        elif kind == "signal":
            name = "news"
        else:
            spec["kind"] = "approval"
            spec["ask"] = {"summary": "May I?"}
            asked = [
                k for k in GATES if k in self.model.effects and self.model.effects[k].state in ("planned", "failed")
            ]
            asked = [k for k in asked if self.model.effects[k].approval is None]
            if kind == "two":
                name, quorum = "two-of-legal", 2
            elif asked and data.draw(st.sampled_from([True, True, True, False]), "about it"):
                effect = data.draw(st.sampled_from(asked), "effect")
                name = GATES[effect]
                spec["ask"]["effect"] = {"key": effect}
                if name == "soft-approval" and then == "resume":
                    spec["on_timeout"] = then = "continue"
        spec["name"] = name
        made = Wait(key, name, spec["kind"], self.later(due), due, then, quorum, effect)
        return spec, made

    def opened(self, answer: Answer, made: list[Wait]) -> None:
        """The waits stand; a signal that came before its wait is taken by it."""
        ids = {wait["key"]: wait for wait in answer.json["waits"]}
        for wait in made:
            wait.id = ids[wait.key]["id"]
            self.model.waits[wait.key] = wait
            if wait.effect:
                self.model.effects[wait.effect].approval = "asked"

    def take_buffered(self) -> None:
        open_news = [wait for wait in self.model.waits.values() if wait.open and wait.name == "news"]
        if self.buffered is not None and open_news:
            (wait,) = open_news
            self.model.close(wait, "satisfied")
            self.buffered = None

    @deed(when=lambda self: self.model.lease is not None and self.model.lease.purpose == "continue", how=HOW)
    def open_wait(self, data: st.DataObject, how: str) -> None:
        self.before()
        model = self.model
        if model.lease is not None and model.lease.purpose == "continue":
            spec, made = self.new_wait(data, news=not self.news_open())
            answer = self.append([ev("wait.opened", wait=spec)], ok(), how)
            self.opened(answer, [made])
            self.take_buffered()
        self.check()

    def news_open(self) -> bool:
        return any(wait.open and wait.name == "news" for wait in self.model.waits.values())

    @deed(
        weight=2,
        when=lambda self: self.model.lease is not None and self.model.lease.purpose == "continue",
        mode=st.sampled_from(["all", "all", "any", "each"]),
        how=HOW,
    )
    def pause(self, data: st.DataObject, mode: str, how: str) -> None:
        self.before()
        model = self.model
        if model.lease is not None and model.lease.purpose == "continue":
            made: list[Wait] = []
            specs: list[Json] = []
            for _ in range(data.draw(st.sampled_from([1, 1, 2, 3]), "how many")):
                news = not self.news_open() and not any(wait.name == "news" for wait in made)
                asked = [wait.effect for wait in made]
                spec, wait = self.new_wait(data, news=news)
                if wait.effect is not None and wait.effect in asked:
                    continue
                specs.append(spec)
                made.append(wait)
            keep = [w.key for w in model.waits.values() if w.open and not w.consumed]
            named = [key for key in keep if data.draw(st.booleans(), f"also {key}")]
            specs += [{"key": key} for key in named]
            answer = self.append([ev("paused", waits=specs, resume_when=mode)], ok(), how)
            self.opened(answer, made)
            model.pause_on([wait.key for wait in made] + named, mode)
            self.take_buffered()
        self.check()

    @deed(when=lambda self: self.model.lease is not None, often=st.integers(0, 2), how=HOW)
    def complete(self, often: int, how: str) -> None:
        self.before()
        model = self.model
        if model.lease is not None and not often:
            expected, said = ok(), model.the_no()
            states = {e.state for e in model.effects.values()}
            if states & {"started", "unknown"} or states & {"compensating", "compensation_unknown"}:
                expected = no(409, "effect_unknown", "open_compensation")
            elif said is not None and said[1] != "continue" and (model.undo_list() or model.unsigned()):
                expected = no(409, "open_compensation")
            answer = self.append([ev("completed", result={"ref": "s3://out"})], expected, how)
            if answer.status == 200:
                status = answer.json["run"]["status"]
                assert status == "completed" or (said is not None and status == "terminated")
                model.end(status)
        self.check()

    @deed(
        when=lambda self: self.model.lease is not None,
        retry_in=st.sampled_from([30, 300]),
        retryable=st.sampled_from([True, True, False]),
        how=HOW,
    )
    def fail(self, retry_in: int, retryable: bool, how: str) -> None:
        self.before()
        model = self.model
        if model.lease is not None:
            error = {"code": "boom", "message": "It broke."}
            event = ev("failed", error=error, retryable=retryable, retry_in=retry_in)
            self.append([event], ok(), how)
            model.fail(self.now, retry_in)
            if not retryable:
                model.not_retryable, model.retry_at = True, None
            else:
                model.not_retryable = False
        self.check()

    @deed(
        when=lambda self: self.model.lease is not None and not self.model.cancelled and len(self.epochs) > 1,
        how=HOW,
    )
    def cancel(self, how: str) -> None:
        self.before()
        if self.model.lease is not None:
            self.append([ev("cancelled", reason="Enough.")], ok(), how)
            self.model.cancel()
        self.check()

    # -- answers

    @deed(
        weight=6,
        when=lambda self: any(wait.kind == "approval" for wait in self.model.waits.values()),
        who=st.sampled_from(["alice", "alice", "bob", "bob", "carol", "grace"]),
        choice=st.sampled_from(["approve", "approve", "approve", "reject", "edit", "respond"]),
        stale=st.sampled_from([False, False, False, True]),
        how=HOW,
    )
    def decide(self, data: st.DataObject, who: str, choice: str, stale: bool, how: str) -> None:
        self.before()
        model = self.model
        asks = [wait for wait in model.waits.values() if wait.kind == "approval"]
        open_asks = [wait for wait in asks if wait.open]
        if open_asks and data.draw(st.sampled_from([True] * 5 + [False]), "an open one"):
            asks = open_asks
        wait = data.draw(st.sampled_from(asks), "wait")
        version = wait.version + 1 if stale else wait.version
        body: Json = {"choice": choice, "wait_version": version, "reason": "So."}
        if choice == "edit":
            body["arguments"] = {**KINDS[wait.effect or "order"].arguments, "amount": "80.00"}
        if choice == "respond":
            body["response"] = "Hm."
        if who in ("carol", "grace") and not (who == "carol" and wait.name == "other-approval"):
            expected = no(403, "not_eligible", "self_approval")
            if not wait.open or stale:
                expected = Expected(0)
            answer = (
                self.any_refusal(f"/waits/{wait.id}/decisions", body, who)
                if not expected.status
                else self.send(self.people[who], f"/waits/{wait.id}/decisions", body, expected, how=how)
            )
            assert answer.status in (403, 409)
        else:
            if model.ended:
                expected = no(409, "wait_closed", "wait_expired", "run_ended")
            else:
                expected = model.decide(wait, who, choice, version)
            self.send(self.people[who], f"/waits/{wait.id}/decisions", body, expected, how=how)
        self.check()

    def any_refusal(self, path: str, body: Json, who: str) -> Answer:
        self.looked = True
        answer = self.people[who].post(path, body)
        assert 400 <= answer.status < 500
        return answer

    @deed(repeat=st.booleans(), how=HOW)
    def signal(self, repeat: bool, how: str) -> None:
        """News, early, in time, late, or once more."""
        self.before(looks=False)
        model = self.model
        news = [wait for wait in model.waits.values() if wait.name == "news"]
        if repeat and self.signal_ids:
            expected, name = "duplicate", self.signal_ids[-1]
        else:
            self.signals += 1
            name = f"{self.id}-{self.signals}"
            if any(wait.open for wait in news):
                expected = "matched"
            elif news or model.ended:
                expected = "late"
            elif self.buffered is None:
                expected = "buffered"
            else:
                return  # one at a time: which of several is taken is left open
            self.signal_ids.append(name)
        body = {"id": name, "name": "news", "run": self.id, "payload": {"n": self.signals}}
        answer = self.send(self.bot, "/signals", body, ok(202), how=how)
        if how == "lost before" and answer.json["state"] == "duplicate" != expected:
            # It was stored before the connection broke, and is matched by the next tick.
            self.now += dt.timedelta(seconds=6)
            self.clock.stand_at(self.now)
            engine.tick()
        else:
            assert answer.json["state"] == expected
        if expected == "matched":
            (wait,) = [wait for wait in news if wait.open]
            assert answer.json["matched"] in ([wait.id], [])
            model.close(wait, "satisfied")
        elif expected == "buffered":
            self.buffered = name
        self.check()

    # -- a person at the wheel

    def person(self, path: str, body: Json, expected: Expected, how: str) -> Answer:
        body = {"reason": "As it should be.", **body}
        return self.send(self.dave, f"/runs/{self.id}{path}", body, expected, how=how)

    def ended(self) -> Expected | None:
        return no(409, "run_ended") if self.model.ended else None

    @deed(when=lambda self: len(self.epochs) % 3 == 2, how=HOW)
    def take_over(self, how: str) -> None:
        self.before()
        expected = self.ended() or (no(409, "lease_held") if self.model.held else ok())
        self.person("/takeover", {}, expected, how)
        if expected.status == 200:
            self.model.take_over("dave")
        self.check()

    @deed(
        when=lambda self: self.model.held or self.model.lease is None,
        thorough=st.sampled_from([True, True, False]),
        stage=st.sampled_from(["after", "sign"]),
        how=HOW,
    )
    def hand_back(self, thorough: bool, stage: str, how: str) -> None:
        self.before()
        model = self.model
        unknown = {k: e for k, e in model.effects.items() if e.state in ("unknown", "compensation_unknown")}
        found = [{"key": key, **self.truth(key)} for key in unknown] if thorough else []
        expected = self.ended() or (ok() if model.held else no(409, "not_resumable"))
        if expected.status == 200 and unknown and not thorough:
            expected = no(409, "effect_unknown")
        self.person("/handback", {"stage": stage, "effects": found}, expected, how)
        if expected.status == 200:
            for key in unknown:
                self.settle_effect(key)
            model.hand_back(stage)
            assert model.verdict()[0] == "continue", "a hand-back makes it ready"
        self.check()

    def truth(self, key: str) -> Json:
        """What somebody who looks outside finds."""
        if self.model.effects[key].state == "compensation_unknown":
            return {"outcome": "compensated" if self.undone[key] else "not_executed"}
        if self.outside[key]:
            return {"outcome": "executed", "receipt": {"id": f"receipt-{key}"}}
        return {"outcome": "not_executed"}

    def settle_effect(self, key: str) -> None:
        effect = self.model.effects[key]
        if effect.state == "compensation_unknown":
            effect.state = "compensated" if self.undone[key] else "executed"
            self.undoing.pop(key, None)
        elif self.outside[key]:
            self.model.executed(effect, f"receipt-{key}")
        else:
            effect.state = "planned"
        self.grants.pop(key, None)

    @deed(when=lambda self: self.model.effects, how=HOW)
    def reconcile(self, data: st.DataObject, how: str) -> None:
        self.before()
        model = self.model
        unknown = [k for k, e in model.effects.items() if e.state in ("unknown", "compensation_unknown")]
        pool = (
            unknown
            if unknown and data.draw(st.sampled_from([True] * 4 + [False]), "an unknown one")
            else sorted(model.effects)
        )
        key = data.draw(st.sampled_from(pool), "key")
        body = self.truth(key)
        if model.ended:
            expected = no(409, "run_ended")
        elif key not in unknown:
            expected = no(409, "effect_already_executed", "effect_unknown")
        else:
            expected = ok()
        self.person(f"/effects/{key}/reconcile", body, expected, how)
        if expected.status == 200:
            self.settle_effect(key)
        self.check()

    @deed(when=lambda self: self.model.unsigned() or self.model.undo_list(), how=HOW)
    def sign_off(self, data: st.DataObject, how: str) -> None:
        self.before()
        done = sorted({*self.model.unsigned(), *self.model.undo_list()})
        if done:
            key = data.draw(st.sampled_from(done), "key")
            expected = self.ended() or ok()
            self.person(f"/effects/{key}/sign_off", {}, expected, how)
            if expected.status == 200:
                self.model.effects[key].signed_off = True
        self.check()

    @deed(when=lambda self: self.model.failures > 0 or self.model.undo_failures > 0, how=HOW)
    def retry(self, how: str) -> None:
        self.before()
        expected = self.ended() or ok()
        self.person("/retry", {"tries": 2}, expected, how)
        if expected.status == 200:
            self.model.grant_tries(2)
        self.check()

    @deed(how=HOW)
    def clear(self, data: st.DataObject, how: str) -> None:
        """What stands in the way, if a person may clear that; now and then, what nobody may."""
        self.before()
        model = self.model
        code = model.verdict()[1]
        never = ("effect_unknown", "compensation_unknown", "undo_pending", "retries_exhausted")
        clearable = (
            "rejected", "cancelled", "timed_out", "timeout_undetermined", "human_gate", "approval_mismatch",
            "not_retryable", "sign_off_needed",
        )  # fmt: skip
        if code not in clearable:
            code = data.draw(st.sampled_from(never), "code")
            self.person("/clear", {"codes": [code]}, self.ended() or no(422, "invalid"), how)
        else:
            self.person("/clear", {"codes": [code]}, ok(), how)
            model.cleared.add(code)
            model.alarms = {key: each for key, each in model.alarms.items() if each != code}
            model.not_retryable = model.not_retryable and code != "not_retryable"
        self.check()

    @deed(when=lambda self: len(self.epochs) > 3, often=st.integers(0, 9), how=HOW)
    def terminate(self, often: int, how: str) -> None:
        if often:
            return
        self.before()
        model = self.model
        said = model.the_no()
        states = {e.state for e in model.effects.values()}
        expected = ok()
        if model.ended:
            expected = no(409, "run_ended")
        elif states & {"started", "unknown", "compensating", "compensation_unknown"}:
            expected = no(409, "effect_unknown", "open_compensation")
        elif said is not None and said[1] != "continue" and model.unsigned() and "sign_off_needed" not in model.cleared:
            expected = no(409, "open_compensation")
        self.person("/terminate", {}, expected, how)
        if expected.status == 200:
            model.held = None
            model.end("terminated")
        self.check()

    # -- what somebody sensible would do next: stories get further with it

    @deed(
        weight=6,
        when=lambda self: self.model.claimable(),
        holder=st.sampled_from(HOLDERS),
        claim=st.booleans(),
        how=HOW,
    )
    def go_on(self, holder: str, claim: bool, how: str) -> None:
        if claim:
            self.claim(holder, how)
        else:
            self.rehydrate(holder, how)

    @deed(weight=5, when=lambda self: self.model.status() in ("review", "taken_over"), how=HOW)
    def settle(self, data: st.DataObject, how: str) -> None:
        self.before()
        match self.model.verdict()[1]:
            case "effect_unknown" | "compensation_unknown":
                self.reconcile(data, how)
            case "retries_exhausted":
                self.retry(how)
            case "sign_off_needed" | "undo_pending":
                self.sign_off(data, how)
            case "taken_over":
                self.hand_back(True, "after", how)
            case _:
                self.clear(data, how)

    # -- who comes next

    @rule(data=st.data())
    def somebody_does_something(self, data: st.DataObject) -> None:
        able = {deed.act.__name__: deed for deed in sorted(DEEDS, key=lambda deed: -deed.weight) if deed.when(self)}
        name = data.draw(st.sampled_from([name for name, deed in able.items() for _ in range(deed.weight)]), "deed")
        given = {name: data.draw(choice, name) for name, choice in able[name].choices.items()}
        if "data" in inspect.signature(able[name].act).parameters:
            given["data"] = data
        note(f"{self.now:%d %H:%M:%S} {self.model.status()} {self.model.verdict()}")
        able[name].act(self, **given)

    # -- time, and what comes again

    @deed(weight=2, seconds=st.sampled_from([5, 45, 70, 600, 4000, 90_000]))
    def wait_a_while(self, seconds: int) -> None:
        self.now += dt.timedelta(seconds=seconds)
        if self.ticks:
            self.before()
            self.check()

    @deed()
    def ticks_stand_still_or_go_on(self) -> None:
        """All the same to whoever asks: what is overdue happens first."""
        self.ticks = not self.ticks

    @deed(weight=2, when=lambda self: self.sent)
    def an_old_request_again(self, data: st.DataObject) -> None:
        """One that was in some queue all the while."""
        self.before(looks=False)
        sent = data.draw(st.sampled_from(self.sent[-12:]), "request")
        live = self.model.lease.epoch if self.model.lease else None
        self.again(sent, live=live)
        assert self.stored_version() == self.version
        self.check()


def _lease_of(envelope: Json) -> int | None:
    return int(envelope["lease"]["epoch"]) if envelope.get("lease") else None


@pytest.mark.django_db(transaction=True)
def test_every_story_goes_as_the_rules_say(tmp_path: Path) -> None:
    world = World(DjangoTransport(), tmp_path)
    world.apply(CAST)
    for on_reject in FLOWS:
        world.variant(f"story-{on_reject}", on_reject=on_reject)
    how_much = settings(
        max_examples=STORIES,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize="STORIES" not in os.environ,
        print_blob=True,
        phases=[Phase.generate, *([Phase.shrink] if os.environ.get("STORY_SHRINK") else [])],
    )
    with StandingClock().in_place() as clock:
        run_state_machine_as_test(type("Story", (Story,), {"world": world, "clock": clock}), settings=how_much)
