"""Who waits is woken: by notices that come with the commit and only then, in time, few at a time, and none is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from django.db import connection, connections, transaction

from rehydrate import claims as ready_runs
from rehydrate import notices, sweep, wakeups
from rehydrate.ids import uuid7
from rehydrate.wakeups import Listener

from .conftest import Clock, eventually
from .deliveries.told import told
from .ledger_cast import Cast, approval, checkpoint, ev, timer

pytestmark = pytest.mark.django_db(transaction=True)
LONG = 60.0


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor) -> Iterator[Listener]:
    """This process's own, fresh, whose fallbacks are so seldom that only notices can wake in time."""
    monkeypatch.setattr(wakeups, "SELDOM", (3600, 3600))
    monkeypatch.setattr(wakeups, "SWEEP", (3600, 3600))
    made = Listener()
    monkeypatch.setattr(wakeups, "_the_listener", made)
    yield made
    made.stop()
    if made._thread is not None:
        made._thread.join(30)


@pytest.fixture
def cast() -> Cast:
    return Cast()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def settled() -> None:
    """The look of a process that has just begun to listen is over."""
    eventually(lambda: wakeups.listener()._swept_at, what="the first look")


class Waiting:
    """A thread that listens to topics; `looks` counts how often it looked."""

    def __init__(self, pool: ThreadPoolExecutor, *topics: wakeups.Topic, group: Any = None) -> None:
        self.looks = 0
        self._listens = threading.Event()
        self._leave = threading.Event()
        self.result: Future[None] = pool.submit(self._wait, topics, group)
        assert self._listens.wait(30)
        settled()

    def _wait(self, topics: tuple[wakeups.Topic, ...], group: Any) -> None:
        with wakeups.listen(*topics, group=group) as ear:
            self._listens.set()
            while ear.wait(LONG) and not self._leave.is_set():
                self.looks += 1

    def looked(self, times: int = 1) -> None:
        eventually(lambda: self.looks >= times, within=30, what="the wake-up")


def threads_end(call: Callable[[], Any]) -> Any:
    try:
        return call()
    finally:
        connections.close_all()


def claims(pool: ThreadPoolExecutor, cast: Cast, **fields: Any) -> Future[Any]:
    """An agent that waits for a run; comes back when it listens."""
    before = len(parked())
    future = pool.submit(threads_end, lambda: cast.claim(**{"wait": 30, **fields}))
    eventually(lambda: len(parked()) > before or future.done(), what="a waiting agent")
    return future


def parked() -> set[wakeups.Ear]:
    return {ear for ears in wakeups.listener()._ears.values() for ear in ears}


# -- with the commit, and only then


def test_a_resume_reaches_the_agent_that_waits(cast: Cast, listener: Listener, threads: ThreadPoolExecutor) -> None:
    run = cast.open()
    run.pause(approval())
    agent = claims(threads, cast)
    run.decide("legal", "approve")
    envelope = agent.result(30)
    assert envelope["run"]["id"] == run.id
    assert envelope["lease"]["holder"] == "h2"


def test_it_is_told_with_the_commit_and_never_without(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor
) -> None:
    run = cast.open()
    page = Waiting(threads, wakeups.run(run.id))
    page.looked()  # the second look of the first page that listens
    with psycopg.connect(**_params(), autocommit=True) as witness:
        witness.execute(f"LISTEN {notices.Kind.CHANGED.channel}")
        with transaction.atomic():
            run.append(ev("note", text="undone"))
            transaction.set_rollback(True)
        with transaction.atomic():
            run.append(ev("note", text="done"))
            assert list(witness.notifies(timeout=0.3)) == []
            assert page.looks == 1
        page.looked(2)
        (heard,) = witness.notifies(timeout=10, stop_after=1)
        assert notices.read(heard.payload) == [(notices.Kind.CHANGED, {str(cast.workspace.pk): [run.id]})]
        assert list(witness.notifies(timeout=0.3)) == []
    assert page.looks == 2


def test_nobody_is_told_what_nobody_waits_for(cast: Cast) -> None:
    with psycopg.connect(**_params(), autocommit=True) as witness:
        listening = (
            "SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database AND d.datname = current_database()"
            " WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid = %s"
        )
        ready = [notices.LOCKS, int(notices.Kind.READY)]
        # The server of an earlier test still listens for those who were there a minute ago.
        gone = wakeups.LINGER * 2
        eventually(lambda: not witness.execute(listening, ready).fetchall(), within=gone, what="that nobody listens")
        witness.execute(f"LISTEN {notices.Kind.READY.channel}")
        run = cast.open()
        run.append(checkpoint(), ev("note", text="x"))
        run.release()
        assert list(witness.notifies(timeout=0.3)) == []
        witness.execute("SELECT pg_advisory_lock_shared(%s, %s)", [notices.LOCKS, int(notices.Kind.READY)])
        cast.open(holder=None)
        (heard,) = witness.notifies(timeout=10, stop_after=1)
        assert notices.read(heard.payload) == [(notices.Kind.READY, {str(cast.workspace.pk): {"flow": 1}})]


def _params() -> dict[str, Any]:
    params = connection.get_connection_params()
    return {name: params[name] for name in ("dbname", "user", "password", "host", "port") if name in params}


# -- nothing is lost


def test_the_connection_is_cut_and_comes_back(cast: Cast, listener: Listener, threads: ThreadPoolExecutor) -> None:
    run = cast.open()
    run.pause(approval())
    page, tick = Waiting(threads, wakeups.workspace(str(cast.workspace.pk))), Waiting(threads, wakeups.TIMER)
    agent = claims(threads, cast)
    old = listener.pid
    eventually(lambda: page.looks >= 1, what="the second look of the first page that listens")
    seen = page.looks, tick.looks
    made = wakeups._connect
    closed, opened = threading.Event(), threading.Event()

    def connect_later() -> Any:
        closed.set()
        assert opened.wait(30)
        return made()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wakeups, "_connect", connect_later)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [old])
        assert closed.wait(30)
        run.decide("legal", "approve")  # while nobody hears of it
        assert not agent.done()
        opened.set()
        assert agent.result(30)["run"]["id"] == run.id
    page.looked(seen[0] + 1)
    tick.looked(seen[1] + 1)
    assert listener.pid != old


def test_whoever_waits_meanwhile_looks_by_itself(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> Any:
        raise psycopg.OperationalError("too many connections")

    monkeypatch.setattr(wakeups, "_connect", refused)
    monkeypatch.setattr(wakeups, "SELDOM", (0.05, 0.1))
    run = cast.open()
    run.pause(approval())
    agent = claims(threads, cast)
    run.decide("legal", "approve")
    assert agent.result(30)["run"]["id"] == run.id


def test_a_lost_notice_is_no_stall(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeups, "SWEEP", (0.05, 0.1))
    monkeypatch.setattr(Listener, "_on_notify", lambda *_: None)
    runs = [cast.open() for _ in range(3)]
    for run in runs:
        run.pause(approval())
    agents = [claims(threads, cast, holder=f"h{n}") for n in range(3)]
    with transaction.atomic():
        for run in runs:
            run.decide("legal", "approve")
    assert {agent.result(30)["run"]["id"] for agent in agents} == {run.id for run in runs}


def test_a_lapsed_lease_and_a_due_retry_reach_an_agent_without_any_tick(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor
) -> None:
    """The sweep sleeps an hour here, or until the next thing is due."""
    dead = cast.open(lease_seconds=1)
    assert claims(threads, cast).result(30)["run"]["id"] == dead.id
    tired = cast.open()
    agent = claims(threads, cast)
    tired.release(retry_in=1)
    assert agent.result(30)["run"]["id"] == tired.id


# -- few are woken


def test_of_those_who_wait_for_a_flow_one_is_woken_for_one_run(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor
) -> None:
    ws = str(cast.workspace.pk)
    same = [Waiting(threads, wakeups.ready(ws, "flow"), group="v1") for _ in range(3)]
    newer = Waiting(threads, wakeups.ready(ws, "flow"), group="v2")
    any_flow = Waiting(threads, wakeups.ready(ws, None), group="all")
    other = Waiting(threads, wakeups.ready(ws, "other"), group="v1")
    elsewhere = Waiting(threads, wakeups.ready(str(uuid7()), "flow"), group="v1")
    for time in (1, 2):
        cast.open(holder=None)
        for first_of_its_group in (same[0], newer, any_flow):
            first_of_its_group.looked(time)
    assert [w.looks for w in (*same, newer, any_flow, other, elsewhere)] == [2, 0, 0, 2, 2, 0, 0]


def test_two_runs_wake_two(cast: Cast, listener: Listener, threads: ThreadPoolExecutor, clock: Clock) -> None:
    ws = str(cast.workspace.pk)
    line = [Waiting(threads, wakeups.ready(ws, "flow"), group="v1") for _ in range(3)]
    runs = [cast.open() for _ in range(2)]
    for run in runs:
        run.pause(timer())
    clock.advance(hours=2)
    sweep.catch_up([run.id for run in runs])
    line[0].looked()
    line[1].looked()
    assert line[2].looks == 0


def test_whoever_leaves_without_looking_hands_its_wake_up_on(cast: Cast, listener: Listener) -> None:
    """An agent whose time is over, or whose look found an older run, was woken in the same instant."""
    topic = wakeups.ready(str(cast.workspace.pk), "flow")
    behind = wakeups.listen(topic, group="v1")
    with wakeups.listen(topic, group="v1") as first, behind:
        settled()
        cast.open(holder=None)
        eventually(lambda: first._causes, what="the notice")
        assert not behind._causes
        first.__exit__(None, None, None)
        assert behind.wait(30)
        first.__enter__()


def test_whoever_takes_a_run_of_another_flow_hands_its_wake_up_on(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor
) -> None:
    one, other = (wakeups.ready(str(cast.workspace.pk), flow) for flow in ("flow", "other"))
    with wakeups.listen(one, other, group="both") as ear:
        behind = Waiting(threads, one, group="one")
        elsewhere = Waiting(threads, other, group="other")
        cast.open(holder=None)
        assert ear.wait(30)
        behind.looked()
        wakeups.served(other)
        behind.looked(2)
        assert elsewhere.looks == 0


def test_every_run_finds_an_agent_whoever_wakes(cast: Cast, listener: Listener, threads: ThreadPoolExecutor) -> None:
    """Sixteen agents of two versions, and runs that become ready one by one and several at once."""
    runs = [cast.open() for _ in range(16)]
    for run in runs:
        run.pause(approval())
    agents = [
        claims(threads, cast, holder=f"h{n}", agent={"version": f"v{n % 2}", "reads": ["v0", "v1"]}) for n in range(16)
    ]
    for run in runs[:8]:
        run.decide("legal", "approve")
    with transaction.atomic():
        for run in runs[8:]:
            run.decide("legal", "approve")
    assert {agent.result(30)["run"]["id"] for agent in agents} == {run.id for run in runs}


def test_senders_are_told_of_what_is_to_be_delivered(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor
) -> None:
    told(cast, "https://agent.example/hooks")
    sender = Waiting(threads, wakeups.DELIVERY)
    (ear,) = listener._ears[wakeups.DELIVERY]
    eventually(lambda: ear._parked and not ear._causes, what="that it waits")
    before = sender.looks  # whoever listens first is told to look
    cast.open(flow="told to nobody", holder=None)
    cast.open(holder=None)
    sender.looked(before + 1)
    assert sender.looks == before + 1


# -- nobody looks for what is known not to be there


def test_an_agent_that_asks_anew_while_nothing_is_there_does_not_look(
    cast: Cast, listener: Listener, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    next_claimable = ready_runs.next_claimable

    def counted(*given: Any) -> Any:
        looks.append(str(given[1]))
        return next_claimable(*given)

    monkeypatch.setattr(ready_runs, "next_claimable", counted)
    first = claims(threads, cast)
    eventually(lambda: listener._nothing, what="the process's own look")
    seen = len(looks)
    second = claims(threads, cast, holder="h3")
    assert len(looks) == seen
    runs = {cast.open(holder=None).id for _ in range(2)}
    assert {agent.result(30)["run"]["id"] for agent in (first, second)} == runs
    other = cast.open(holder=None)
    assert claims(threads, cast).result(30)["run"]["id"] == other.id
