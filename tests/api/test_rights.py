"""Whose rights were taken is refused at the very next request, though callers are kept between two of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from django.contrib.auth.models import User, update_last_login
from django.db import connection, connections
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from rehydrate import keys, rights, wakeups
from rehydrate.api import auth, endpoint
from rehydrate.api.endpoint import post, resource
from rehydrate.callers import Caller
from rehydrate.core import commands
from rehydrate.core.refusals import Refusal
from rehydrate.models import AdminEvent, ApiKey, Group, LedgerEvent, Membership, Run, Workspace
from tests.conftest import end, eventually, start_web
from tests.contract import driver as d

from .conftest import bearer

Json = dict[str, Any]


def number() -> int | None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {rights.NUMBER}")
        found: tuple[int | None] = cursor.fetchone()
    return found[0]


def run_sql(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


# -- the number ------------------------------------------------------------------------------------------------------

RAISE: dict[str, Callable[[], Any]] = {
    "a key is issued": lambda: keys.issue_person(user=User.objects.get()),
    "a key is revoked": lambda: keys.revoke(ApiKey.objects.get(), by="frank"),
    "a key has other flows": lambda: ApiKey.objects.update(flows=["other"]),
    "a key is deleted": lambda: ApiKey.objects.all().delete(),
    "somebody comes": lambda: User.objects.create_user("bob"),
    "somebody is barred": lambda: User.objects.update(is_active=False),
    "somebody may do everything": lambda: User.objects.update(is_superuser=True),
    "somebody has another name": lambda: User.objects.update(username="alicia"),
    "somebody joins a group": lambda: Membership.objects.create(
        group=Group.objects.create(workspace=Workspace.objects.get(), name="new"), user=User.objects.get()
    ),
    "somebody leaves a group": lambda: Membership.objects.all().delete(),
    "a group has another name": lambda: Group.objects.update(name="law"),
    "a group has other roles": lambda: Group.objects.update(roles=["viewer"]),
    "a workspace comes": lambda: Workspace.objects.create(slug="new"),
    "all leave": lambda: run_sql("SET CONSTRAINTS ALL IMMEDIATE; TRUNCATE rehydrate_membership"),
    "triggers are off": lambda: run_sql("SET LOCAL session_replication_role = replica; DELETE FROM rehydrate_apikey"),
}


@pytest.mark.parametrize("change", RAISE)
def test_whatever_makes_a_caller_raises_the_number(alice: User, bot_key: str, change: str) -> None:
    before = number()
    assert before is not None
    RAISE[change]()
    after = number()
    assert after is not None
    assert after > before


def test_use_does_not(alice: User, bot_key: str) -> None:
    before = number()
    ApiKey.objects.update(last_used_at=Now())
    update_last_login(User, alice)
    assert number() == before


def test_it_comes_never_again(alice: User) -> None:
    before = number()
    assert before is not None
    run_sql("DELETE FROM rehydrate_rights")
    assert number() is None
    User.objects.update(first_name="A")
    again = number()
    assert again is not None
    assert again > before
    run_sql("UPDATE rehydrate_rights SET number = number + 1000000000000")  # as where the clock was set back
    User.objects.update(first_name="B")
    assert number() == again + 1000000000000 + 1


# -- keeping ---------------------------------------------------------------------------------------------------------


def someone(name: str = "bot") -> Caller:
    return Caller(kind="agent", id=name, name=name, workspaces={})


def test_a_caller_is_kept_for_a_minute_and_to_be_confirmed_each_time() -> None:
    now = [0.0]
    kept = auth.Kept(monotonic=lambda: now[0])
    kept.put("rhk_a_secret", someone(), 7)
    first, again = kept.get("rhk_a_secret"), kept.get("rhk_a_secret")
    assert first is not None
    assert first.rights is not None
    assert again is not None
    first.rights.confirm(7)
    assert (first.confirmed, again.confirmed) == (True, False)
    with pytest.raises(rights.Outdated):
        first.rights.confirm(None)
    assert kept.get("rhk_a_other") is None
    now[0] = auth.KEPT_FOR + 1
    assert kept.get("rhk_a_secret") is None


def test_not_more_than_some_are_kept() -> None:
    kept = auth.Kept()
    for n in range(auth.MAX_KEPT + 1):
        kept.put(str(n), someone(str(n)), 7)
    assert kept.get("0") is None
    assert kept.get("1") is not None


# -- what an operation does about it ---------------------------------------------------------------------------------


class Errand(commands.Body, frozen=True):
    then: str = ""


@post(tag="Test", body=Errand, answers={200: None, 204: None}, on_the_loop=True)
def errand(caller: Caller, *, body: Errand) -> Json | None:
    """Do it with rights confirmed; or refuse, or find nothing, before they are."""
    if body.then == "refuse":
        raise Refusal("wait_closed", "Bob was quicker.")
    if body.then == "nothing":
        return None
    if caller.rights is not None:
        caller.rights.confirm(number())
    AdminEvent.objects.create(actor_kind=caller.kind, actor_id=caller.id, act="errand")
    return {"flows": caller.flows}


class Wish(commands.Body, frozen=True):
    wait: int


class Waits:
    """What a long poll was asked to wait, and the time that it takes to be told that rights are others by now."""

    now = 0.0
    asked: ClassVar[list[int]] = []


@post(
    tag="Test",
    body=Wish,
    answers={204: None},
    polls=lambda _caller, _body: wakeups.listen(wakeups.DELIVERY),
    on_the_loop=True,
)
def wish(caller: Caller, *, body: Wish) -> None:
    """Wait twelve seconds, and find that rights are others by now."""
    Waits.asked.append(body.wait)
    Waits.now += 12
    if caller.rights is not None:
        caller.rights.confirm(None)


urlpatterns = [resource("errand", errand), resource("wish", wish)]
errands = pytest.mark.urls(__name__)


def run_errand(client: Client, key: str, then: str = "", **headers: str) -> Any:
    return client.post("/errand", {"then": then}, content_type="application/json", headers=bearer(key, **headers))


@pytest.fixture
def kept_key(client: Client, bot_key: str) -> str:
    """One that was used a moment ago."""
    assert run_errand(client, bot_key).status_code == 200
    return bot_key


def looks_up(call: Callable[[], Any]) -> tuple[Any, int]:
    """What it gave, and how many times a key was looked up for it."""
    with CaptureQueriesContext(connection) as sent:
        gave = call()
    return gave, sum("rehydrate_apikey" in query["sql"] for query in sent)


@errands
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "k-1"}])
def test_who_is_confirmed_is_not_looked_up_again(client: Client, kept_key: str, headers: dict[str, str]) -> None:
    answer, count = looks_up(lambda: run_errand(client, kept_key, **headers))
    assert (answer.status_code, count) == (200, 0)


@errands
@pytest.mark.parametrize(("then", "status"), [("refuse", 409), ("nothing", 204)])
def test_who_is_not_confirmed_is_looked_up_before_the_answer_leaves(
    client: Client, kept_key: str, then: str, status: int
) -> None:
    answer, count = looks_up(lambda: run_errand(client, kept_key, then))
    assert (answer.status_code, count) == (status, 1)
    again, count = looks_up(lambda: run_errand(client, kept_key, then, **{"Idempotency-Key": "k-1"}))
    assert (again.status_code, count) == (status, 1)
    replayed, count = looks_up(lambda: run_errand(client, kept_key, then, **{"Idempotency-Key": "k-1"}))
    assert (replayed.status_code, replayed.headers["Idempotency-Replayed"], count) == (status, "true", 1)


@errands
@pytest.mark.parametrize("then", ["", "refuse", "nothing"])
def test_who_was_revoked_is_refused_whatever_would_come(client: Client, kept_key: str, then: str) -> None:
    headers = {"Idempotency-Key": "k-1"}
    assert run_errand(client, kept_key, then, **headers).status_code in (200, 204, 409)
    keys.revoke(ApiKey.objects.get(), by="frank")
    done = AdminEvent.objects.filter(act="errand").count()
    for sent in ({}, headers, {"Idempotency-Key": "k-2"}):
        assert run_errand(client, kept_key, then, **sent).status_code == 401
    assert AdminEvent.objects.filter(act="errand").count() == done


@errands
def test_who_changed_is_looked_up_and_carried_on(client: Client, kept_key: str) -> None:
    ApiKey.objects.update(flows=["other"])
    changed, count = looks_up(lambda: run_errand(client, kept_key))
    assert (changed.json(), count) == ({"flows": ["other"]}, 1)
    assert looks_up(lambda: run_errand(client, kept_key))[1] == 0


@errands
def test_a_long_poll_that_begins_anew_waits_for_what_is_left(
    client: Client, kept_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(monotonic=lambda: Waits.now))
    Waits.asked.clear()
    body = {"wait": 20}
    assert client.post("/wish", body, content_type="application/json", headers=bearer(kept_key)).status_code == 204
    assert Waits.asked == [20, 8]


@errands
def test_without_a_number_nobody_is_kept(client: Client, kept_key: str) -> None:
    run_sql("DELETE FROM rehydrate_rights")
    for _ in range(2):
        answer, count = looks_up(lambda: run_errand(client, kept_key))
        assert (answer.status_code, count) == (200, 1)


# -- the six operations ----------------------------------------------------------------------------------------------


class Stage:
    """An agent for one flow, with an owner; a reviewer; a run under way, one that is ready, and one that waits."""

    def __init__(self, transport: d.Transport, folder: Any) -> None:
        self.world = world = d.World(transport, folder)
        world.apply(d.CAST)
        world.apply('[group.reviewers]\nmembers = ["alice"]\nroles = ["viewer"]\n')
        self.alice = world.person("alice")
        self.bot = bot = world.agent("bot", flows=("contract-approval",), owner="carol")
        self.run = bot.open()
        bot.open(holder=None)
        self.wait = bot.open().pause(d.approval())

    def calls(self, idem: str | None) -> dict[str, Callable[[], d.Answer]]:
        run, card = self.run, self.bot.card()
        said = {"flow": "contract-approval", "external_id": "late", "holder": "w", "agent": card}
        choice = {"choice": "approve", "wait_version": self.wait["version"]}
        return {
            "open_run": lambda: self.bot.post("/runs", said, idem=idem),
            "append_events": lambda: run.append(d.ev("note", text="late"), idem=idem),
            "heartbeat": lambda: self.bot.post(f"/runs/{run.id}/heartbeat", {"epoch": run.epoch}, idem=idem),
            "rehydrate_run": lambda: self.bot.post(
                f"/runs/{run.id}/rehydrate", {"holder": "bot/w1", "agent": card}, idem=idem
            ),
            "claim": lambda: self.bot.post(
                "/claims", {"flows": ["contract-approval"], "holder": "w", "agent": card}, idem=idem
            ),
            "decide": lambda: self.alice.post(f"/waits/{self.wait['id']}/decisions", choice, idem=idem),
        }

    def warm(self) -> None:
        """Both are kept by whoever answers."""
        self.run.heartbeat().ok()
        self.alice.decide(self.wait, version=99).refused(409)

    def refusals(self, idem: str | None = None) -> dict[str, int]:
        """The statuses of those that were refused; what came through is an error of the test that asks."""
        return {name: answer.status for name, call in self.calls(idem).items() if (answer := call()).status >= 300}


AGENTS = ("open_run", "append_events", "heartbeat", "rehydrate_run", "claim")
CHANGES: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "keys are revoked": (
        lambda: ApiKey.objects.update(revoked_at=Now()),
        dict.fromkeys((*AGENTS, "decide"), 401),
    ),
    "a person and an owner are barred": (
        lambda: User.objects.filter(username__in=("alice", "carol")).update(is_active=False),
        dict.fromkeys((*AGENTS, "decide"), 401),
    ),
    "another flow; no group": (
        lambda: (ApiKey.objects.update(flows=["other"]), Membership.objects.filter(user__username="alice").delete()),
        dict(zip((*AGENTS, "decide"), (403, 404, 404, 404, 403, 404), strict=True)),
    ),
    "another flow; not in the group that decides": (
        lambda: (
            ApiKey.objects.update(flows=["other"]),
            Membership.objects.filter(user__username="alice", group__name="legal").delete(),
        ),
        dict(zip((*AGENTS, "decide"), (403, 404, 404, 404, 403, 403), strict=True)),
    ),
    "another flow; a group with less": (
        lambda: (ApiKey.objects.update(flows=["other"]), Group.objects.filter(name="legal").update(roles=["viewer"])),
        dict(zip((*AGENTS, "decide"), (403, 404, 404, 404, 403, 403), strict=True)),
    ),
}


def history() -> int:
    """How much was done. That something was refused may be told, too."""
    return LedgerEvent.objects.exclude(type="refused").count()


@pytest.mark.parametrize("idem", [None, "k-1"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_very_next_request_is_refused(db: None, tmp_path: Any, change: str, idem: str | None) -> None:
    stage = Stage(d.DjangoTransport(), tmp_path)
    make, expected = CHANGES[change]
    stage.warm()
    make()
    before = history()
    assert stage.refusals(idem) == expected
    assert history() == before


@pytest.mark.parametrize("idem", [None, "k-1"])
def test_an_answer_that_is_kept_is_given_to_nobody_whose_key_was_revoked(
    db: None, tmp_path: Any, idem: str | None
) -> None:
    stage = Stage(d.DjangoTransport(), tmp_path)
    assert stage.refusals("k-1") == {}
    keys.revoke(ApiKey.objects.get(name="bot"), by="frank")
    keys.revoke(ApiKey.objects.get(name="alice"), by="frank")
    assert stage.refusals("k-1") == dict.fromkeys((*AGENTS, "decide"), 401)


def test_a_kept_caller_costs_no_look_up(db: None, tmp_path: Any) -> None:
    stage = Stage(d.DjangoTransport(), tmp_path)
    stage.warm()
    counts = {name: looks_up(call)[1] for name, call in stage.calls(None).items()}
    assert counts == dict.fromkeys((*AGENTS, "decide"), 0)


# -- in several processes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_server(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = start_web(tmp_path_factory.mktemp("other") / "web.log")
    yield server.url
    end(server.process)


@pytest.fixture
def both(loop_server: str, other_server: str) -> Iterator[list[d.HttpTransport]]:
    transports = [d.HttpTransport(loop_server), d.HttpTransport(other_server)]
    yield transports
    for transport in transports:
        transport.client.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("change", CHANGES)
def test_so_it_is_in_each_process(both: list[d.HttpTransport], tmp_path: Any, change: str) -> None:
    stage = Stage(both[0], tmp_path)
    make, expected = CHANGES[change]
    for stage.world.transport in both:
        stage.warm()
    make()
    before = history()
    for stage.world.transport in both:
        assert stage.refusals() == expected
    assert history() == before


@pytest.mark.django_db(transaction=True)
def test_a_long_poll_gives_nothing_to_whom_was_revoked_meanwhile(tmp_path: Any) -> None:
    world = d.World(d.DjangoTransport(), tmp_path)
    world.apply(d.CAST)
    waiting, run = world.agent("waiting"), world.agent("opening").open()
    waiting.claim().ok(204)

    def poll() -> d.Answer:
        try:
            return waiting.claim(wait=20)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(poll)
        eventually(lambda: any(wakeups.listener()._ears.values()), what="the long poll")
        keys.revoke(ApiKey.objects.get(name="waiting"), by="frank")
        run.release().ok()
        assert answer.result(timeout=30).status == 401
    assert Run.objects.get(pk=run.id).status == "ready"
