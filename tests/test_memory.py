"""What the server remembers of runs saves reading, and decides nothing that the database would not."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection

from rehydrate import clock, keys, loading, memory, sql
from rehydrate.core.draft import People
from rehydrate.core.policy import UNDECLARED
from rehydrate.core.state import Run as RunState
from rehydrate.core.state import State
from rehydrate.loading import Ground, Loaded, Site, Wanted
from rehydrate.memory import Memory
from rehydrate.models import ApiKey, Flow, LedgerEvent
from rehydrate.models import Run as RunRow
from rehydrate.projections import Change
from tests.contract import driver as d
from tests.contract.driver import approval, at_once, checkpoint, completed, ev, paused, statuses

pytestmark = pytest.mark.django_db(transaction=True)

NOTE = ev("note", text="x")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the event loop has read."""
    seen: list[str] = []

    def watched(name: str) -> None:
        original = getattr(loading, name)

        def counted(wants: Any) -> Any:
            seen.extend([name] * len(wants))
            return original(wants)

        monkeypatch.setattr(loading, name, counted)

    watched("grounds")
    watched("load_together")
    return seen


@pytest.fixture
def world(loop_server: str, tmp_path: Path, reads: list[str]) -> Iterator[d.World]:
    transport = d.HttpTransport(loop_server)
    made = d.World(transport, tmp_path)
    made.apply(d.CAST)
    # From now on it knows who they are.
    bot, dave = made.agent("bot"), made.person("dave")
    run = bot.open(paused(approval()))
    for person in (made.person("alice"), made.person("bob")):
        assert person.decide(run.opened["waits"][0], "approve").status in (201, 409)
    dave.terminate(run).ok()
    bot.claim().ok(204)
    reads.clear()
    yield made
    transport.client.close()
    if not made.forged:
        made.command("verify_ledger")


@pytest.fixture
def bot(world: d.World) -> d.Agent:
    return world.agent("bot")


def elsewhere(agent: d.Caller) -> None:
    """From now on the caller's requests go to another process, as it were: to Django in this thread."""
    agent.world.transport = d.DjangoTransport()


def test_what_was_just_written_is_not_read(bot: d.Agent, world: d.World, reads: list[str]) -> None:
    opened = bot.open(paused(approval()), at="draft")
    wait = opened.opened["waits"][0]
    world.person("alice").approve(wait)
    assert reads == []
    envelope = bot.claim().ok()
    assert reads == ["load_together"]
    opened.epoch = envelope["lease"]["epoch"]
    opened.do(checkpoint("sign"), completed())
    assert reads == ["load_together"]
    assert opened.status == "completed"


def test_a_run_that_is_there_is_found(bot: d.Agent) -> None:
    run = bot.open()
    again = bot.open_raw(external_id=run.opened["external_id"])
    assert (again.status, again.json["run"]["id"], again.json["lease"]) == (200, run.id, None)
    answers = at_once(*[partial(bot.open_raw, external_id="once")] * 6)
    assert statuses(answers) == [200] * 5 + [201]
    assert RunRow.objects.filter(external_id="once").count() == 1


def test_what_somebody_else_wrote_is_heeded(bot: d.Agent, world: d.World, reads: list[str]) -> None:
    run, by_loop = bot.open(), world.transport
    elsewhere(bot)
    world.person("dave").takeover(run).ok()
    world.transport = by_loop
    reads.clear()
    assert run.append(NOTE).status == 409
    assert reads == ["load_together"]
    assert [event["type"] for event in run.events()][-2:] == ["taken_over", "refused"]


def test_a_refusal_that_is_not_recorded_is_never_from_memory(bot: d.Agent, world: d.World, reads: list[str]) -> None:
    """Nothing is written then, so nothing would tell that the memory is right."""
    wait = bot.open(paused(approval())).opened["waits"][0]
    assert world.person("bob").decide(wait, "edit").status == 422
    assert reads == ["load_together"]


def test_another_policy_counts_from_the_next_decision_on(bot: d.Agent, world: d.World, reads: list[str]) -> None:
    run = bot.open(paused(approval()))
    wait = run.opened["waits"][0]
    number = Flow.objects.get(name="contract-approval").current
    one = '[flow.contract-approval.wait.legal-approval]\ngroups = ["legal"]\nquorum = 1'
    assert one in d.CAST
    world.apply(d.CAST.replace(one, one.replace("quorum = 1", "quorum = 2")))
    assert Flow.objects.get(name="contract-approval").current == number + 1
    reads.clear()
    answer = world.person("alice").decide(wait, "approve")
    assert answer.status == 409, "the wait has another version by now"
    assert reads
    made = world.person("alice").decide(run.wait("legal-approval"), "approve").ok(201)
    assert made["wait_status"] == "open"


def test_who_may_not_decide_any_more_does_not(bot: d.Agent, world: d.World) -> None:
    run = bot.open(paused(approval()))
    wait, before = run.opened["waits"][0], LedgerEvent.objects.count()
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM rehydrate_membership m USING auth_user u WHERE u.id = m.user_id AND username = 'alice'"
        )
    assert world.person("alice").decide(wait, "approve").status == 404
    keys.revoke(ApiKey.objects.get(name="bot"), by="frank")
    assert run.append(NOTE).status == 401
    assert LedgerEvent.objects.count() == before


def test_a_clock_that_was_set_is_heeded(bot: d.Agent, world: d.World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = bot.open(paused(approval(due_in=60)))
    wait = run.opened["waits"][0]
    monkeypatch.setattr(clock, "offset", dt.timedelta(hours=1))
    assert world.person("alice").decide(wait, "approve").status == 409
    assert run.wait("legal-approval")["status"] == "timed_out"


@pytest.mark.parametrize(("ahead", "reading"), [(-0.02, ["load_together"]), (0.02, []), (0.2, ["load_together"])])
def test_nothing_is_done_before_its_time(
    bot: d.Agent, reads: list[str], monkeypatch: pytest.MonkeyPatch, ahead: float, reading: list[str]
) -> None:
    """The database's clock is never behind what was reckoned with, and only a little ahead of it."""
    run = bot.open()
    monkeypatch.setattr(clock, "offset", dt.timedelta(seconds=ahead))
    run.do(NOTE)
    assert reads == reading
    bot.world.forged = True  # a clock that goes back makes a lease shorter, which no event says


def test_a_run_that_is_gone_is_not_there(bot: d.Agent) -> None:
    run = bot.open()
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        cursor.execute("DELETE FROM rehydrate_run WHERE id = %s", [run.id])
        cursor.execute("DELETE FROM rehydrate_ledgerevent WHERE run_id = %s", [run.id])
        cursor.execute("SET session_replication_role = DEFAULT")
    assert run.append(NOTE).status == 404


def test_secrets_are_not_kept(world: d.World, bot: d.Agent) -> None:
    world.apply(d.CAST.replace("[flow.contract-approval]\n", '[flow.contract-approval]\nsecret = ["/iban"]\n', 1))
    run = bot.open(checkpoint("draft", data={"iban": "DE00 1234"}), at=None)
    run.do(NOTE)
    assert memory.memory._runs.get(run.id) is None


def test_a_connection_made_anew_may_lead_anywhere(bot: d.Agent, reads: list[str]) -> None:
    run = bot.open()
    assert memory.memory._runs.get(run.id) is not None
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'rehydrate group commit %'"
        )
    reads.clear()
    assert run.append(NOTE).status in (200, 503)
    run.do(NOTE)
    run.do(NOTE)
    assert reads


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Once it is emptied, the next statement of what was decided on a memory is carried out, and its answer is lost."""
    seen = ["not yet"]
    original = sql._carry_out

    def carry_out(conn: psycopg.Connection, text: str, params: Any) -> Any:
        found = original(conn, text, params)
        if "sound AS" in text and not seen and found[0][0]:
            seen.append(text)
            conn.close()
            raise psycopg.OperationalError("cut off")
        return found

    monkeypatch.setattr(sql, "_carry_out", carry_out)
    return seen


def test_a_write_whose_answer_is_lost_is_not_done_again(bot: d.Agent, cut: list[str]) -> None:
    """Nobody knows whether it was carried out: the agent is told so. Above all a start that may have been granted is
    not told to be another's.
    """
    run = bot.open()
    start = ev("effect.planned", key="k", system="mail", action="send", impact="low", arguments={"n": 1}, start=True)
    cut.clear()
    answer = run.append(start)
    assert cut
    assert answer.status == 503
    assert len(run.events("effect.started")) == 1


def test_a_connection_that_broke_while_it_was_idle_is_nobodys_trouble(bot: d.Agent) -> None:
    run = bot.open()
    with connection.cursor() as cursor:
        for own in sql.own_connections._idle:
            cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [own.info.backend_pid])
    run.do(NOTE)


def test_a_backup_that_was_restored_meanwhile_is_heeded(bot: d.Agent, world: d.World, reads: list[str]) -> None:
    """The same revision, of another history, over connections that went on."""
    run, by_loop = bot.open(), world.transport
    run.do(NOTE)
    row = RunRow.objects.get(pk=run.id)
    last = LedgerEvent.objects.filter(run_id=run.id).order_by("-seq")[0]
    with connection.cursor() as cursor:
        cursor.execute("SET session_replication_role = replica")
        cursor.execute("DELETE FROM rehydrate_ledgerevent WHERE run_id = %s AND seq = %s", [run.id, last.seq])
        cursor.execute("SET session_replication_role = DEFAULT")
    RunRow.objects.filter(pk=run.id).update(
        revision=row.revision - 1, version=row.version - 1, last_hash=last.prev_hash
    )
    elsewhere(bot)
    run.do(ev("note", text="written by another process since"))
    world.transport = by_loop
    assert RunRow.objects.get(pk=run.id).revision == row.revision
    reads.clear()
    run.do(NOTE)
    assert reads == ["load_together"]  # the command verify_ledger has the last word


def test_a_deadline_counts_by_the_databases_clock(bot: d.Agent) -> None:
    """What becomes due before a change is saved comes before it, though it was not due yet when it was decided."""
    run = bot.open()
    before = State(RunState(id=run.id, lease_expires_at=NOW + dt.timedelta(milliseconds=7)))
    condition, params = memory.sound(memory.Moment(NOW, 7, 0.0), [change(before, revision=1, before=before)])
    assert ">=" in condition
    assert params == [7, NOW.isoformat(), (NOW + dt.timedelta(milliseconds=7)).isoformat()]


# -- by itself -------------------------------------------------------------------------------------------------------

NOW = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)


class Watch:
    """This process's clock."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def mind(watch: Watch) -> Memory:
    made = Memory(monotonic=watch)
    made.learn(ground(), SITE, watch.at)
    return made


SITE = Site("w", "flow", "x")


def ground(now: dt.datetime = NOW, number: int = 7, policy: int = 0) -> Ground:
    return Ground(now, policy, UNDECLARED, People(groups={}, reviewers=[]), None, number)


def run(name: str = "r", **fields: Any) -> RunState:
    return RunState(id=name, workspace_id="w", flow="flow", **fields)


def change(state: State, *, revision: int = 0, before: State | None = None) -> Change:
    return Change(before=before, after=state, recorded=[], revision=revision)


def test_time_goes_on_with_this_process_for_a_second(mind: Memory, watch: Watch) -> None:
    watch.at += 0.25
    moment = mind.moment()
    assert moment is not None
    assert (moment.now, moment.number) == (NOW + dt.timedelta(seconds=0.25), 7)
    watch.at += memory.RECKONED_FOR
    assert mind.moment() is None


def test_what_is_reckoned_does_not_go_back_by_a_little(mind: Memory, watch: Watch) -> None:
    watch.at += 0.5
    first = mind.moment()
    mind.learn(ground(NOW + dt.timedelta(seconds=0.49)), SITE, watch.at)
    second = mind.moment()
    assert first is not None
    assert second is not None
    assert second.now == first.now
    mind.learn(ground(NOW - dt.timedelta(hours=1)), SITE, watch.at)  # the database's clock was set
    third = mind.moment()
    assert third is not None
    assert third.now == NOW - dt.timedelta(hours=1)


def test_an_answer_that_is_late_tells_no_older_time(mind: Memory, watch: Watch) -> None:
    mind.learn(ground(NOW - dt.timedelta(minutes=5)), SITE, watch.at - 0.1)
    moment = mind.moment()
    assert moment is not None
    assert moment.now == NOW


def test_nothing_is_reckoned_to_be_before_what_was_read(mind: Memory, watch: Watch) -> None:
    """Two read at about the same instant, and the answer to the first came last."""
    mind.learn(ground(NOW + dt.timedelta(milliseconds=2)), SITE, watch.at)
    mind.learn(ground(NOW + dt.timedelta(milliseconds=1)), SITE, watch.at)
    moment = mind.moment()
    assert moment is not None
    assert moment.now == NOW + dt.timedelta(milliseconds=2)


def test_policies_are_known_at_one_number(mind: Memory, watch: Watch) -> None:
    loading._people_at = (8, {"w": People(groups={}, reviewers=[])})
    try:
        mind.learn(ground(number=8), SITE, watch.at)
        moment = mind.moment()
        assert moment is not None
        assert mind.recall(SITE, moment) is not None
        assert mind.recall(Site("w", "another", "x"), moment) is None
        mind.learn(ground(number=9), Site("w", "another", "x"), watch.at)
        moment = mind.moment()
        assert moment is not None
        assert mind.recall(SITE, moment) is None
    finally:
        loading.forget()


def test_runs_are_kept_for_a_while_at_their_latest_revision(mind: Memory, watch: Watch) -> None:
    mind.keep(change(State(run())), run())
    mind.keep(change(State(run()), revision=1, before=State(run())), run(stage="later"))
    mind.keep(change(State(run())), run(stage="late, from a batch that was slower"))
    moment = memory.Moment(NOW, 7, watch.at)
    found = mind.recall(Wanted(ids=["r"]), moment)
    assert isinstance(found, Loaded)
    assert (found.state.run.stage, found.revision, found.now, found.rights) == ("later", 2, NOW, 7)
    assert mind.recall(Wanted(ids=["r"], history=True), moment) is None
    assert mind.recall(Wanted(ids=["r"], people=True), moment) is None  # who may decide is not known
    assert mind.recall(Wanted(ids=["r"]), memory.Moment(NOW, 7, watch.at + memory.KEPT_FOR + 1)) is None


def test_what_was_read_in_part_is_not_kept(mind: Memory) -> None:
    mind.keep(change(State(run())), run())
    mind.keep(change(State(run(), complete=False), revision=1, before=State(run())), run())
    assert mind._runs == {}


def test_those_whose_time_is_over_go(mind: Memory, watch: Watch) -> None:
    mind.keep(change(State(run("a"))), run("a"))
    watch.at += memory.KEPT_FOR + 1
    mind.keep(change(State(run("b"))), run("b"))
    assert list(mind._runs) == ["b"]


def test_what_is_learnt_late_at_an_older_number_spoils_nothing(mind: Memory, watch: Watch) -> None:
    mind.learn(ground(number=6, policy=3), SITE, watch.at - 0.1)
    moment = mind.moment()
    assert moment is not None
    assert (moment.number, mind._policies["w", "flow"]) == (7, 0)


def test_flows_are_not_remembered_without_end(mind: Memory, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FLOWS", 10)
    for n in range(25):
        mind.learn(ground(), Site("w", f"flow-{n}", "x"), watch.at)
    assert len(mind._policies) <= 10


def test_so_many_are_kept(mind: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "RUNS", 3)
    for name in "abcde":
        mind.keep(change(State(run(name))), run(name))
    assert list(mind._runs) == ["c", "d", "e"]


def test_nothing_is_kept_beyond_a_new_connection(mind: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    mind.keep(change(State(run())), run())
    monkeypatch.setattr(sql.own_connections, "made", sql.own_connections.made + 1)
    assert mind.moment() is None
    assert mind._runs == {}
