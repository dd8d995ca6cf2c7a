"""Requests with an Idempotency-Key on the web server's loop: the change and its answer, both or neither, and once."""

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from rehydrate import answers, cooperative, loading, projections, services, sql, wakeups
from rehydrate.api import idempotency
from rehydrate.core import decide
from rehydrate.core import events as ev
from rehydrate.memory import memory
from rehydrate.models import ApiKey, IdempotencyRecord, LedgerEvent, Workspace
from rehydrate.models import Run as RunRow
from tests.api.test_over_the_wire import Wire
from tests.conftest import eventually
from tests.contract import driver as d

pytestmark = pytest.mark.django_db(transaction=True)

NOTE = {"type": "note", "text": "a word of its own"}
REPLAYED = "idempotency-replayed"


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of requests that were carried out in a thread, from the start."""
    found: list[str] = []
    original = idempotency.once

    def once(request: idempotency.Request, act: Any) -> Any:
        found.append(request.key)
        return original(request, act)

    monkeypatch.setattr(idempotency, "once", once)
    return found


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that an error was logged for."""
    found: list[str] = []
    monkeypatch.setattr(services.log, "exception", lambda text, *args: found.append(text % args))
    return found


@pytest.fixture(params=["read", "remembered"])
def known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether runs are decided on as they are read, or as the server remembers them."""
    if request.param == "read":
        monkeypatch.setattr(memory, "moment", lambda: None)
    return str(request.param)


def the_first(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., Any]) -> None:
    """`act` stands in for the first call on the loop; it is given the original."""
    original, done = getattr(owner, name), threading.Event()

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if done.is_set() or not cooperative.on_the_loop():
            return original(*args, **kwargs)
        done.set()
        return act(original, *args, **kwargs)

    monkeypatch.setattr(owner, name, stand_in)


def claim_of(bot: d.Agent, **how: Any) -> d.Json:
    return {"flows": ["contract-approval"], "holder": "bot/w2", "agent": bot.card(), "wait": 0, **how}


def notes(run: d.Run) -> int:
    return LedgerEvent.objects.filter(run_id=run.id, type="note").count()


# -- claims


@pytest.mark.parametrize(("holder", "status"), [("bot/w2", 200), ("bot/another", 422)])
def test_a_claim_sent_again_need_not_wait_for_its_answer(
    world: d.World, monkeypatch: pytest.MonkeyPatch, holder: str, status: int
) -> None:
    """Its answer is there, though no other run is ready: meanwhile the lease runs out."""
    bot = world.agent("bot")
    bot.open(holder=None)
    first = bot.post("/claims", claim_of(bot, wait=4), idem="once").ok()
    waited: list[float] = []

    def rest(ear: wakeups.Ear, seconds: float) -> bool:
        waited.append(seconds)
        return False

    monkeypatch.setattr(wakeups, "rest", rest)
    again = bot.post("/claims", claim_of(bot, wait=4, holder=holder), idem="once")
    assert (again.status, waited) == (status, [])
    assert status == 422 or again.json == first


def test_a_claim_that_passed_a_run_over_is_carried_out_once(
    world: d.World, in_threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bot = world.agent("bot")
    passed, free = bot.open(holder=None), bot.open(holder=None)
    monkeypatch.setattr(services, "_claimed_now", {passed.id})  # a thread of this process is about to get it
    found = bot.post("/claims", claim_of(bot), idem="once")
    assert found.ok()["run"]["id"] == free.id
    assert (in_threads, found.headers.get(REPLAYED)) == ([], None)


@pytest.mark.parametrize("trouble", ["another of the same batch got the run", "reading broke off"])
def test_a_claim_that_cannot_be_done_with_others_passes_no_run_over(
    world: d.World, blamed: list[str], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    bot = world.agent("bot")
    first, _ = bot.open(holder=None), bot.open(holder=None)

    def in_trouble(_: Any, wants: Any) -> Any:
        if trouble == "reading broke off":
            raise psycopg.errors.QueryCanceled
        return [loading.SameRun() for _ in wants]

    the_first(monkeypatch, loading, "load_together", in_trouble)
    found = bot.post("/claims", claim_of(bot), idem="once").ok()
    assert blamed == []
    assert found["run"]["id"] == first.id, "the run that was ready for longer was passed over"


def test_who_hung_up_in_a_long_poll_may_ask_again_with_the_same_key(world: d.World, loop_server: str) -> None:
    """That nobody was there any more to be told of a run is no answer."""
    bot = world.agent("bot")
    topic = wakeups.ready(str(Workspace.objects.get(slug="default").pk), "contract-approval")
    body = json.dumps(claim_of(bot, wait=30)).encode()
    head = f"Authorization: Bearer {bot.key}\r\nIdempotency-Key: once\r\nContent-Type: application/json\r\n"
    with contextlib.closing(Wire(loop_server)) as killed:
        request = f"POST /api/v1/claims HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n"
        killed.socket.sendall(request.encode() + body)
        eventually(lambda: wakeups.listener().waits([topic]), what="a long poll that waits")
    eventually(lambda: not wakeups.listener().waits([topic]), what="its end")
    run = bot.open(holder=None)
    assert bot.post("/claims", claim_of(bot, wait=30), idem="once").ok()["run"]["id"] == run.id


def test_a_claim_that_changes_a_run_and_does_not_get_it_blames_no_other(
    world: d.World, blamed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when something that was due makes a ready run not ready."""
    bot = world.agent("bot")
    first, second = bot.open(holder=None), bot.open(holder=None)
    original = decide.claim

    def claim(draft: Any, body: Any) -> Any:
        if draft.run.id != first.id:
            return original(draft, body)
        return draft.add(ev.Noted(text="not now")) and None

    monkeypatch.setattr(decide, "claim", claim)
    assert bot.post("/claims", claim_of(bot), idem="once").ok()["run"]["id"] == second.id
    assert blamed == []


# -- the change and its answer


def opens(world: d.World) -> tuple[d.Caller, str, d.Json]:
    return world.agent("bot"), "/runs", {"flow": "contract-approval", "external_id": "x", "title": "X", "holder": "w"}


def appends(world: d.World) -> tuple[d.Caller, str, d.Json]:
    run = world.agent("bot").open()
    return run.agent, f"/runs/{run.id}/events", {"epoch": run.epoch, "events": [NOTE]}


def beats(world: d.World) -> tuple[d.Caller, str, d.Json]:
    run = world.agent("bot").open()
    return run.agent, f"/runs/{run.id}/heartbeat", {"epoch": run.epoch}


def rehydrates(world: d.World) -> tuple[d.Caller, str, d.Json]:
    run = world.agent("bot").open(holder=None)
    return run.agent, f"/runs/{run.id}/rehydrate", {"holder": "bot/w1", "agent": run.agent.card()}


def claims(world: d.World) -> tuple[d.Caller, str, d.Json]:
    bot = world.agent("bot")
    bot.open(holder=None)
    return bot, "/claims", claim_of(bot)


def decides(world: d.World) -> tuple[d.Caller, str, d.Json]:
    wait = world.agent("bot").open().pause(d.approval())
    return world.person("alice"), f"/waits/{wait['id']}/decisions", {"choice": "approve", "wait_version": 1}


def is_fenced(world: d.World) -> tuple[d.Caller, str, d.Json]:
    run = world.agent("bot").open()
    return run.agent, f"/runs/{run.id}/events", {"epoch": run.epoch + 7, "events": [NOTE]}


REQUESTS = [opens, appends, beats, rehydrates, claims, decides, is_fenced]


@pytest.mark.parametrize("makes", REQUESTS)
def test_what_is_sent_again_changes_nothing_and_gets_the_first_answer(
    world: d.World, known: str, in_threads: list[str], makes: Any
) -> None:
    caller, path, body = makes(world)
    before = LedgerEvent.objects.count(), list(RunRow.objects.values_list("id", "revision"))
    first = caller.post(path, body, idem="once")
    assert first.status < 300 or makes is is_fenced, first
    after = LedgerEvent.objects.count(), list(RunRow.objects.values_list("id", "revision"))
    assert after != before
    assert in_threads == [], "it was to be carried out on the loop"
    again = caller.post(path, body, idem="once")
    assert (again.status, again.raw, again.headers.get(REPLAYED)) == (first.status, first.raw, "true")
    assert again.headers["content-type"] == first.headers["content-type"]
    assert (LedgerEvent.objects.count(), list(RunRow.objects.values_list("id", "revision"))) == after
    caller.post(path, {**body, "surplus": 1}, idem="once").refused(422, "invalid")
    kept: Any = IdempotencyRecord.objects.get()
    assert first.raw[:20] not in bytes(kept.body)


@pytest.mark.parametrize("makes", REQUESTS)
def test_an_answer_that_comes_late_is_of_what_was_saved(
    world: d.World, known: str, in_threads: list[str], monkeypatch: pytest.MonkeyPatch, makes: Any
) -> None:
    caller, path, body = makes(world)
    monkeypatch.setattr(answers, "await_all", lambda slots: None)  # nobody waits for it
    before = LedgerEvent.objects.count()
    first = caller.post(path, body, idem="once")
    added = LedgerEvent.objects.count() - before
    assert (in_threads, first.headers.get(REPLAYED)) == (["once"], None)
    again = caller.post(path, body, idem="once")
    assert (again.raw, again.headers.get(REPLAYED)) == (first.raw, "true")
    assert LedgerEvent.objects.count() - before == added
    assert len({event.seq for event in LedgerEvent.objects.all()}) == LedgerEvent.objects.count()


@pytest.mark.parametrize("saved", [True, False])
def test_who_lost_the_connection_is_told_so_and_may_ask_again(
    world: d.World, known: str, in_threads: list[str], monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    run = world.agent("bot").open()

    def broken(original: Any, *args: Any) -> Any:
        if saved:
            original(*args)
        own = sql.apart()
        assert own is not None
        own.close()
        raise psycopg.OperationalError("the connection was lost")

    the_first(monkeypatch, projections, "save_each", broken)
    assert run.append(NOTE, idem="once").status == 503
    assert (notes(run), in_threads) == (int(saved), [])
    again = run.append(NOTE, idem="once")
    assert (again.status, again.headers.get(REPLAYED)) == (200, "true" if saved else None)
    assert notes(run) == 1


def test_an_answer_that_cannot_be_made_leaves_nothing_behind(
    world: d.World, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.agent("bot").open()
    the_first(monkeypatch, services, "_appended", lambda *_: 1 / 0)
    first = run.append(NOTE, idem="once")
    again = run.append(NOTE, idem="once")
    # On a memory nobody's rights were confirmed, so that it is asked once more at once.
    assert (first.status, again.headers.get(REPLAYED)) == ((500, None) if known == "read" else (200, "true"))
    assert (again.status, notes(run)) == (200, 1)


def test_what_another_process_answered_meanwhile_is_not_done_again(
    world: d.World, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.agent("bot").open()
    other = d.World(d.DjangoTransport(), world.folder)
    beside = d.Agent(other, "bot", run.agent.key)
    path, body = f"/runs/{run.id}/events", {"epoch": run.epoch, "events": [NOTE]}
    theirs: list[d.Answer] = []

    def overtaken(original: Any, *args: Any) -> Any:
        theirs.append(cooperative.aside(beside.post, path, body, idem="once"))
        return original(*args)

    the_first(monkeypatch, projections, "save_each", overtaken)
    mine = run.agent.post(path, body, idem="once")
    assert (mine.raw, mine.headers.get(REPLAYED)) == (theirs[0].raw, "true")
    assert (theirs[0].status, notes(run)) == (200, 1)


def test_a_key_that_has_an_answer_opens_no_other_run(world: d.World, known: str) -> None:
    bot = world.agent("bot")
    first = bot.open_raw(external_id="one")
    body = {"flow": "contract-approval", "external_id": "one", "title": "T"}
    made = bot.post("/runs", {**body, "external_id": "two"}, idem="once").ok(201)
    bot.post("/runs", {**body, "external_id": "three"}, idem="once").refused(422, "idempotency_key_reused")
    assert {str(pk) for pk in RunRow.objects.values_list("id", flat=True)} == {
        first.json["run"]["id"],
        made["run"]["id"],
    }


def test_one_key_for_several_at_once_harms_no_other(world: d.World, known: str) -> None:
    """What goes together in one statement is refused together; then each is done by itself."""
    bot = world.agent("bot")
    body = {"flow": "contract-approval", "title": "T"}

    def opening(external_id: str, key: str) -> Callable[[], d.Answer]:
        return lambda: bot.post("/runs", {**body, "external_id": external_id}, idem=key)

    clash = [opening(f"clash-{i}", "once") for i in range(4)]
    others = [opening(f"other-{i}", f"other-{i}") for i in range(4)]
    found = d.at_once(*clash, *others)
    assert d.statuses(found[:4]) == [201, 422, 422, 422]
    assert d.statuses(found[4:]) == [201] * 4
    assert (RunRow.objects.count(), IdempotencyRecord.objects.count()) == (5, 5)


def test_the_same_claim_many_times_at_once_gets_one_run(world: d.World) -> None:
    bot = world.agent("bot")
    for _ in range(3):
        bot.open(holder=None)
    found = d.at_once(*[lambda: bot.post("/claims", claim_of(bot), idem="once")] * 6)
    assert d.statuses(found) == [200] * 6
    assert len({answer.raw for answer in found}) == 1
    assert RunRow.objects.filter(lease_expires_at__isnull=False).count() == 1


def test_who_brings_no_key_has_nothing_of_those_before(world: d.World, known: str) -> None:
    run = world.agent("bot").open()
    run.append(NOTE, idem="once").ok()
    for _ in range(3):
        run.append(NOTE).ok()
    assert (notes(run), IdempotencyRecord.objects.count()) == (4, 1)


@pytest.mark.parametrize("when", ["decided", "saved"])
def test_a_key_that_was_revoked_meanwhile_gets_no_answer(
    world: d.World, known: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Revoked before it is saved what was decided on a memory is not saved; what was read is saved, and not told."""
    run = world.agent("bot").open()

    def revoked(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs) if when == "saved" else None
        cooperative.aside(lambda: ApiKey.objects.filter(name="bot").update(revoked_at="2020-01-01T00:00:00Z"))
        return found if when == "saved" else original(*args, **kwargs)

    the_first(monkeypatch, projections, "save_each", revoked)
    answer = run.append(NOTE, idem="once")
    if known == "remembered" and when == "decided":
        assert (answer.status, notes(run)) == (401, 0)
    else:
        assert (answer.status, notes(run)) == (200, 1)
    assert IdempotencyRecord.objects.count() == notes(run)
