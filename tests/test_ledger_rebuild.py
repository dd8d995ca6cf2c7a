"""The tables are what the events say (rule 1), whatever happened; whoever tampers with either is found out (rule 2)."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from rehydrate import engine, ledger, loading, selectors, services, verify
from rehydrate.core.canonical import event_hash
from rehydrate.core.draft import Draft
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.refusals import Refusal
from rehydrate.models import LedgerEvent

from .core.kit import Story
from .core.player import Draw, Player, policies
from .ledger_cast import FLOW, Cast, Run, approval, callback, checkpoint, ev, in_an_hour, plan, timer

pytestmark = pytest.mark.django_db

IBAN = "DE02120300000000202051"


@pytest.fixture
def cast() -> Cast:
    return Cast()


def proved(run: Run) -> None:
    flaw, count = verify.run(run.id)
    assert flaw is None, str(flaw)
    assert count == run.state.run.version
    if not run.state.run.leased:  # what was decided on a part of the state is what the whole of it says
        found = selectors.get_verdict(run.cast.people["dave"], run.id)
        assert found["outcome"] == run.state.run.outcome or run.state.run.ended_at is not None
        assert selectors.current(run.cast.people["dave"], run.id).recorded == []


# -- what happened, and the tables afterwards


def an_approval_with_an_edit_and_a_secret(cast: Cast, clock: Any) -> Run:
    run = cast.open(checkpoint(state={"memory": 1}), requested_by="grace", labels={"team": "a"})
    effect = plan("k", "order", arguments={"n": 1, "iban": IBAN}, amount={"value": "10.00", "currency": "EUR"})
    run.pause(approval(effect=effect))
    run.decide("legal", "edit", arguments={"n": 2, "iban": IBAN}, expires_at=in_an_hour(clock.now()), reason="less")
    run.rehydrate()
    run.append(
        ev("effect.started", key="k", arguments={"n": 2, "iban": IBAN}),
        ev("effect.executed", key="k", receipt={"id": "r1", "data": {"ok": True}}),
        ev("completed", result={"ref": "s3://out"}),
    )
    return run


def conditions_and_a_mismatch(cast: Cast, clock: Any) -> Run:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    run.decide("legal", "approve_with_conditions", conditions=[{"pointer": "/n", "op": "<=", "value": 5}])
    run.rehydrate()
    with pytest.raises(Refusal, match=r"does not keep to its approval"):
        run.append(ev("effect.started", key="k", arguments={"n": 9}))
    run.hold("clear", codes=["condition_unmet"])
    run.rehydrate()
    run.append(ev("effect.started", key="k", arguments={"n": 4}), ev("effect.executed", key="k"))
    return run


def a_no_and_its_undo(cast: Cast, clock: Any) -> Run:
    run = cast.open(ev("external_ref", system="erp", id="po-1"), ev("external_ref", system="erp", id="po-1", url="u"))
    run.append(ev("external_ref", system="erp", id="po-1"), plan("g", compensation={"action": "take_back"}, start=True))
    run.append(ev("effect.executed", key="g", receipt={"id": "r"}), plan("later"))
    run.pause(approval(effect=plan("k", "order")), callback(), resume_when="any")
    run.decide("legal", "reject", reason="no")
    run.rehydrate()
    run.append(ev("effect.compensating", key="g"), ev("effect.compensation_failed", key="g", error={"code": "busy"}))
    run.append(ev("effect.compensating", key="g"), ev("effect.compensated", key="g", receipt={"id": "u"}))
    run.release()
    assert run.state.run.status == "terminated"
    return run


def signals_early_late_and_by_hook(cast: Cast, clock: Any) -> Run:
    run = cast.open()
    cast.signal("cb", flow="flow", external_id=run.external_id, payload={"n": 1})
    run.append(ev("wait.opened", wait=callback("early", name="cb")))
    run.pause({"key": "early"}, callback("hook"), timer(), resume_when="each")
    services.receive_hook(run.wait("hook").token, {"ok": True}, "w-1")
    cast.signal("cb", run=run.id, payload={"n": 2})
    run.rehydrate()
    run.pause({"key": "t"}, resume_when="all")
    clock.advance(hours=2)
    engine.tick()
    assert [wait.status for wait in run.state.waits.values()] == ["satisfied"] * 3
    return run


def a_signal_that_an_undo_waits_for(cast: Cast, clock: Any) -> Run:
    """The verdict needs every effect, so the pause is decided twice: the signal must be taken once all the same."""
    run = cast.open(plan("g", compensation={"action": "take_back"}, start=True))
    run.append(ev("effect.executed", key="g"), ev("cancelled", reason="enough"))
    run.release()
    run.rehydrate()
    cast.signal("undone", run=run.id)
    run.pause(callback("undone"))
    assert run.wait("undone").status == "satisfied"
    return run


def the_clock(cast: Cast, clock: Any) -> Run:
    run = cast.open()
    run.pause(approval("two", effect=plan("k", "order"), on_timeout="escalate"), callback(on_timeout="resume"))
    for minutes in (11, 25, 30, 45, 90):
        clock.advance(minutes=minutes)
        engine.tick()
    assert {wait.status for wait in run.state.waits.values()} == {"timed_out"}
    return run


def asked_about_what_failed_and_was_done(cast: Cast, clock: Any) -> Run:
    """Time-outs that come due in an append, which loads but a part of the run."""
    run = cast.open(plan("g", start=True), plan("m", "mail", start=True), lease_seconds=3600)
    run.append(ev("effect.executed", key="g"), ev("effect.failed", key="m", error={"code": "x"}))
    run.append(
        ev("wait.opened", wait=approval("legal", key="l1", effect={"key": "g"}, due_in=60)),
        ev("wait.opened", wait=approval("two", key="l2", effect={"key": "m"}, due_in=60)),
    )
    clock.advance(seconds=61)
    run.append(ev("note", text="time has passed"))
    assert {wait.status for wait in run.state.waits.values()} == {"timed_out"}
    run.pause(callback())
    return run


def an_approval_of_what_failed_runs_out(cast: Cast, clock: Any) -> Run:
    """The verdict of a release depends on an effect that nobody names."""
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    run.decide("legal", "approve", expires_at=in_an_hour(clock.now()))
    run.rehydrate(lease_seconds=3600)
    run.append(ev("effect.failed", key="k", error={"code": "down"}))
    for _ in range(3):
        clock.advance(minutes=30)
        run.heartbeat()
    run.release()
    assert run.state.run.reasons[0]["code"] == "approval_expired"
    return run


def votes(cast: Cast, clock: Any) -> Run:
    run = cast.open()
    run.pause(approval("two", effect=plan("k", "order")))
    run.decide("two", "approve")
    run.on_wait("claim_wait", "two")
    run.on_wait("assign_wait", "two", to="bob")
    run.on_wait("extend_wait", "two", due_in=7200)
    run.on_wait("request_info", "two", comment="why?")
    run.on_wait("comment_wait", "two", comment="hm")
    run.on_wait("escalate_wait", "two")
    run.decide("two", "edit", by="bob", arguments={"n": 3})
    run.decide("two", "approve", by="grace")
    assert run.wait("two").status == "satisfied"
    return run


def a_person_takes_over(cast: Cast, clock: Any) -> Run:
    run = cast.open(plan("m", "mail", start=True), plan("g"))
    run.append(ev("wait.opened", wait=approval(effect=plan("k", "order", arguments={"n": 1, "iban": IBAN}))))
    run.hold("takeover")
    run.hold(
        "handback",
        by="alice" if cast.people["alice"].may(str(cast.workspace.pk), "operator") else "dave",
        stage="sent",
        checkpoint={"ref": "s3://hand", "data": {"n": 1}},
        answers=[{"wait": run.wait("legal").id, "choice": "edit", "arguments": {"n": 1, "iban": IBAN}}],
        effects=[
            {"key": "m", "outcome": "not_executed"},
            {"key": "g", "receipt": {"id": "by-hand"}},
            {"system": "crm", "action": "call", "receipt": {"id": "phone"}},
        ],
        needed_engineer=True,
    )
    run.rehydrate()
    run.append(ev("completed"))
    return run


def outcomes_nobody_knew(cast: Cast, clock: Any) -> Run:
    run = cast.open(plan("a", start=True), plan("b", "look", start=True), plan("c", "mail", start=True))
    run.release()
    run.hold("reconcile", "a", outcome="not_executed")
    run.rehydrate()
    run.append(ev("effect.not_executed", key="b", evidence={"looked": True}), ev("effect.started", key="c"))
    old = run.epoch
    run.append(
        ev("effect.executed", key="c", receipt={"id": "r1"}), ev("effect.executed", key="c", receipt={"id": "r2"})
    )
    run.append(ev("effect.executed", key="a", receipt={"id": "it did"}))
    run.release()
    with pytest.raises(Refusal):
        run.append(
            ev("note", text="fenced"), ev("effect.executed", key="c", receipt={"id": "r\x00" + "3" * 600}), epoch=old
        )
    run.hold("reconcile", "a", outcome="executed", receipt={"id": "it did"})
    run.hold("sign_off", "a")
    return run


def failures(cast: Cast, clock: Any) -> Run:
    run = cast.open(lease_seconds=30)
    run.append(ev("failed", error={"code": "x", "message": "boom"}, retry_in=5))
    clock.advance(seconds=6)
    run.rehydrate()
    run.heartbeat()
    clock.advance(seconds=61)
    run.rehydrate()
    run.append(ev("failed", error={"code": "y"}, retryable=False))
    run.hold("retry", tries=2)
    run.hold("clear", codes=["not_retryable"], stage="again", input={"ref": "s3://2", "digest": "sha256:" + "AB" * 32})
    run.recall("h9")
    run.append(ev("cancelled", reason="enough"))
    run.release()
    return run


def a_policy_that_changed(cast: Cast, clock: Any) -> Run:
    run = cast.open()
    run.pause(approval(effect=plan("k", "order")))
    cast.policy({**FLOW, "wait": {**FLOW["wait"], "legal": {"groups": ["leads"], "quorum": 1}}})
    changed = ledger.policy_changed(
        workspace=cast.workspace, groups=set(), flow_waits={("flow", "legal")}, by="command"
    )
    assert changed == 1
    run.decide("legal", "respond", by="grace", response={"text": "later"})
    run.rehydrate(agent={"version": "2"}, input_digest="d")
    return run


STORIES = [
    an_approval_with_an_edit_and_a_secret,
    conditions_and_a_mismatch,
    a_no_and_its_undo,
    signals_early_late_and_by_hook,
    a_signal_that_an_undo_waits_for,
    the_clock,
    asked_about_what_failed_and_was_done,
    an_approval_of_what_failed_runs_out,
    votes,
    a_person_takes_over,
    outcomes_nobody_knew,
    failures,
    a_policy_that_changed,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_tables_are_what_the_events_say(story: Callable[[Cast, Any], Run], cast: Cast, clock: Any) -> None:
    proved(story(cast, clock))


def a_condition_on_a_secret(cast: Cast, clock: Any) -> Run:
    """Neither the condition's value, nor what the person saw, nor the refusal shows it."""
    run = cast.open()
    run.pause(approval(effect=plan("k", "order", arguments={"n": 1, "iban": IBAN})))
    conditions = [{"pointer": "/iban", "op": "==", "value": IBAN}]
    run.decide("legal", "approve_with_conditions", conditions=conditions, seen={"ask": run.wait("legal").ask})
    run.rehydrate()
    with pytest.raises(Refusal):
        run.append(ev("effect.started", key="k", arguments={"n": 1, "iban": "another"}))
    return run


@pytest.mark.parametrize(
    "story",
    [an_approval_with_an_edit_and_a_secret, a_person_takes_over, a_condition_on_a_secret],
    ids=lambda story: story.__name__,
)
@pytest.mark.parametrize("secret", ["/ask/effect/arguments/iban", "/ask/effect/arguments"])
def test_no_secret_is_in_clear_in_any_table(
    story: Callable[[Cast, Any], Run], secret: str, cast: Cast, clock: Any
) -> None:
    cast.policy({**FLOW, "secret": [secret]})
    proved(story(cast, clock))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema()"
            " AND table_name LIKE 'rehydrate_%%'"
        )
        tables = [name for (name,) in cursor.fetchall()]
        assert "rehydrate_ledgerevent" in tables
        for table in tables:
            cursor.execute(f"SELECT count(*) FROM {table} t WHERE t::text LIKE %s", [f"%{IBAN}%"])
            assert cursor.fetchone() == (0,), f"the secret stands in {table}"


# -- any history, on real rows


class Rows(Story):
    """The player's run as rows: each step is a `ledger.change`, loaded in part where an append would."""

    def __init__(self, cast: Cast, clock: Any, draw: Draw) -> None:
        super().__init__(policies(draw))
        self.cast, self.clock = cast, clock
        self.policies = _Versions(cast)
        self.number = 0
        self.id: str | None = None
        self.publish(draw)

    def publish(self, draw: Draw) -> None:
        self.number = self.cast.policy(msgspec.to_builtins(policies(draw)))

    def later(self, **parts: float) -> Story:
        self.clock.advance(**parts)
        self.now = self.clock.now()
        return self

    def carry_out(self, step: Any) -> None:
        actor = {"kind": step.actor.kind, "id": step.actor.id, "name": step.actor.name}
        workspace = str(self.cast.workspace.pk)
        if self.id is None:
            site = loading.Site(workspace, "flow", "x")
            draft = ledger.create(site, self.opening(step, workspace), actor=actor)
            assert isinstance(draft, Draft)
            self.id = draft.run.id
        else:
            named: dict[str, Any] = {} if step.events is None else services._named(step.events)
            full = step.events is None
            with contextlib.suppress(Refusal):
                ledger.change(self.id, step.work, actor=actor, operation=step.operation, full=full, **named)
        loaded = loading.load_runs([self.id], lock=False, full=True)[self.id]
        self.state, self.now = loaded.state, loaded.now

    def opening(self, step: Any, workspace: str) -> Callable[[Any], None]:
        from rehydrate.core import commands as cmd
        from rehydrate.core import decide

        body = cmd.OpenRun(flow="flow", external_id="walk", holder="h0", requested_by="grace")
        return lambda draft: decide.open_run(draft, body, workspace=workspace, owner=None)


class _Versions(dict[int, FlowPolicy]):
    """The player writes a new policy here: it becomes a version of the flow."""

    def __init__(self, cast: Cast) -> None:
        super().__init__()
        self.cast = cast

    def __setitem__(self, number: int, rules: FlowPolicy) -> None:
        assert self.cast.policy(msgspec.to_builtins(rules)) == number
        super().__setitem__(number, rules)

    def __missing__(self, number: int) -> FlowPolicy:
        return loading.policy_of(str(self.cast.workspace.pk), "flow", number)


@pytest.mark.parametrize("seed", range(12))
def test_any_history_is_rebuilt(seed: int, cast: Cast, clock: Any) -> None:
    draw = Draw(random.Random(seed))  # noqa: S311 - the same walk each time
    story = Rows(cast, clock, draw)
    player = Player(draw, story)
    for _ in range(45):
        story.carry_out(player.step())
        if story.run.ended:
            break
    assert story.id is not None
    flaw, count = verify.run(story.id)
    assert flaw is None, str(flaw)
    assert count == story.run.version > 3


# -- tampering


@pytest.fixture
def victim(cast: Cast, clock: Any) -> Run:
    run = a_no_and_its_undo(cast, clock)
    proved(run)
    return run


def tamper(sql: str, *params: Any) -> int:
    """As somebody who owns the database could: past the triggers. How many rows it changed."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL session_replication_role = replica")
        cursor.execute(sql, params)
        rows = cursor.rowcount
        cursor.execute("SET LOCAL session_replication_role = origin")
        return int(rows)


def told(run: Run) -> str:
    with pytest.raises(CommandError) as error:
        call_command("verify_ledger", stdout=io.StringIO())
    with pytest.raises(CommandError):
        call_command("verify_ledger", run=run.id, stdout=io.StringIO())
    return str(error.value)


ONE_EVENT = {
    "payload": "UPDATE rehydrate_ledgerevent SET payload = payload || '{\"forged\": 1}' WHERE run_id = %s AND seq = 4",
    "type": "UPDATE rehydrate_ledgerevent SET type = 'note' WHERE run_id = %s AND seq = 4",
    "actor": "UPDATE rehydrate_ledgerevent SET actor_id = 'mallory' WHERE run_id = %s AND seq = 4",
    "actor's name": "UPDATE rehydrate_ledgerevent SET actor_name = 'Mallory' WHERE run_id = %s AND seq = 4",
    "time": "UPDATE rehydrate_ledgerevent SET at = at + interval '1 microsecond' WHERE run_id = %s AND seq = 4",
    "hash": "UPDATE rehydrate_ledgerevent SET hash = repeat('0', 64) WHERE run_id = %s AND seq = 4",
    "hash before": "UPDATE rehydrate_ledgerevent SET prev_hash = repeat('0', 64) WHERE run_id = %s AND seq = 4",
    "deleted": "DELETE FROM rehydrate_ledgerevent WHERE run_id = %s AND seq = 4",
}


@pytest.mark.parametrize("what", ONE_EVENT)
def test_the_first_wrong_event_is_named(what: str, victim: Run) -> None:
    assert tamper(ONE_EVENT[what], victim.id) == 1
    assert told(victim).startswith(f"run {victim.id}, event 4: ")


def test_two_events_that_changed_places(victim: Run) -> None:
    tamper(
        "UPDATE rehydrate_ledgerevent SET seq = CASE seq WHEN 4 THEN 100005 ELSE 100004 END"
        " WHERE run_id = %s AND seq IN (4, 5)",
        victim.id,
    )
    tamper("UPDATE rehydrate_ledgerevent SET seq = seq - 100000 WHERE run_id = %s AND seq > 100000", victim.id)
    assert told(victim).startswith(f"run {victim.id}, event 4: ")


def test_the_last_event_cut_off(victim: Run) -> None:
    last = LedgerEvent.objects.filter(run_id=victim.id).count()
    assert tamper("DELETE FROM rehydrate_ledgerevent WHERE run_id = %s AND seq = %s", victim.id, last) == 1
    assert told(victim).startswith(f"run {victim.id}, event {last}: it is missing")


def test_all_events_gone(victim: Run) -> None:
    tamper("DELETE FROM rehydrate_ledgerevent WHERE run_id = %s", victim.id)
    assert told(victim).startswith(f"run {victim.id}, event 1: it is missing")


def test_a_chain_forged_to_its_end_shows_in_the_tables(victim: Run) -> None:
    """Every hash fits again, and yet: the last one is kept with the run, and the rows tell the old story."""
    rows = list(LedgerEvent.objects.filter(run_id=victim.id).order_by("seq"))
    prev = rows[0].prev_hash
    for row in rows:
        payload = {**row.payload, "receipt": {"id": "forged"}} if row.type == "effect.executed" else row.payload
        actor = {"kind": row.actor_kind, "id": row.actor_id, "name": row.actor_name}
        at = row.at.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
        made = event_hash(prev, run=victim.id, seq=row.seq, type_=row.type, actor=actor, at=at, payload=payload)
        tamper(
            "UPDATE rehydrate_ledgerevent SET payload = %s, prev_hash = %s, hash = %s WHERE id = %s",
            msgspec.json.encode(payload).decode(),
            prev,
            made,
            row.pk,
        )
        prev = made
    assert "differs from the events" in told(victim)


def test_an_event_of_another_run_does_not_pass(cast: Cast, clock: Any, victim: Run) -> None:
    other = cast.open(ev("note", text="mine"))
    tamper("DELETE FROM rehydrate_ledgerevent WHERE run_id = %s AND seq = 3", other.id)
    assert tamper("UPDATE rehydrate_ledgerevent SET run_id = %s WHERE run_id = %s AND seq = 3", other.id, victim.id)
    flaw, _ = verify.run(other.id)
    assert flaw is not None
    assert flaw.seq == 3


#: Any column of a projection: a status, a text, a time, a row more, a row less.
ROWS = {
    "run status": ("runs", "UPDATE rehydrate_run SET status = 'completed' WHERE id = %s"),
    "run version": ("", "UPDATE rehydrate_run SET version = version + 1 WHERE id = %s"),
    "last hash": ("runs", "UPDATE rehydrate_run SET last_hash = repeat('0', 64) WHERE id = %s"),
    "run title": ("runs", "UPDATE rehydrate_run SET title = 'other' WHERE id = %s"),
    "wait status": (
        "waits",
        "UPDATE rehydrate_wait SET status = 'satisfied' WHERE run_id = %s AND status = 'rejected'",
    ),
    "wait decision": ("waits", "UPDATE rehydrate_wait SET decision = NULL WHERE run_id = %s AND status = 'rejected'"),
    "wait deadline": ("waits", "UPDATE rehydrate_wait SET due_at = due_at + interval '1 s' WHERE run_id = %s"),
    "wait gone": ("waits", "DELETE FROM rehydrate_wait WHERE run_id = %s AND key = 'cb'"),
    "effect state": ("effects", "UPDATE rehydrate_effect SET state = 'executed' WHERE run_id = %s AND key = 'g'"),
    "receipt": ("effects", "UPDATE rehydrate_effect SET receipt = '{\"id\": \"x\"}' WHERE run_id = %s AND key = 'g'"),
    "effect gone": ("effects", "DELETE FROM rehydrate_effect WHERE run_id = %s AND key = 'g'"),
    "decision reason": ("decisions", "UPDATE rehydrate_decision SET reason = 'yes' WHERE run_id = %s"),
    "decider": ("decisions", "UPDATE rehydrate_decision SET decided_by = 'mallory' WHERE run_id = %s"),
    "decision gone": ("decisions", "DELETE FROM rehydrate_decision WHERE run_id = %s"),
    "reference": ("external refs", "UPDATE rehydrate_externalref SET ref_id = 'po-2' WHERE run_id = %s"),
    "reference gone": ("external refs", "DELETE FROM rehydrate_externalref WHERE run_id = %s"),
    "reference more": (
        "external refs",
        "INSERT INTO rehydrate_externalref (run_id, system, ref_id) VALUES (%s, 'erp', 'po-9')",
    ),
}


@pytest.mark.parametrize("what", ROWS)
def test_a_row_that_was_edited_is_found(what: str, victim: Run) -> None:
    table, sql = ROWS[what]
    assert tamper(sql, victim.id) >= 1
    message = told(victim)
    assert message.startswith(f"run {victim.id}")
    assert f"the table of {table}" in message or not table


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE rehydrate_ledgerevent SET payload = '{}' WHERE run_id = %s",
        "DELETE FROM rehydrate_ledgerevent WHERE run_id = %s",
    ],
)
def test_the_database_itself_refuses(sql: str, victim: Run) -> None:
    from django.db import DatabaseError, transaction

    with pytest.raises(DatabaseError, match="append-only"), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(sql, [victim.id])
    proved(victim)
