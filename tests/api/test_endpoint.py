"""How each operation is carried out: who, what, once, answer. Tried on operations made for these tests."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connection, connections
from django.test import Client

from rehydrate import engine, keys, wakeups
from rehydrate.api import endpoint, limits, problems
from rehydrate.api.endpoint import Answer, Paged, get, post, resource
from rehydrate.api.idempotency import Grant
from rehydrate.callers import Caller
from rehydrate.core import commands
from rehydrate.core.refusals import Refusal
from rehydrate.models import AdminEvent, ApiKey, IdempotencyRecord, Workspace

from .conftest import bearer

pytestmark = pytest.mark.urls(__name__)

RUN = "01900000-0000-7000-8000-000000000000"


class Deed(commands.Body, frozen=True):
    """What the test's operation is asked to do."""

    name: commands.Name
    then: str = ""


class Nothing(commands.Body, frozen=True):
    note: str = ""


class Signs:
    """Lets one thread wait for another."""

    began = threading.Event()
    go_on = threading.Event()


@post(tag="Test", body=Deed, answers={201: None}, grants=lambda result, body, ids: _grant(body))
def do(caller: Caller, *, body: Deed) -> Answer:
    """Do something that can be counted."""
    AdminEvent.objects.create(actor_kind=caller.kind, actor_id=caller.id, act=body.name)
    match body.then:
        case "refuse":
            raise Refusal("wait_closed", "Bob was quicker.", wait={"id": "w-1"})
        case "limit":
            raise Refusal("rate_limited", "Slowly.", retry_after=7)
        case "fault":
            raise ZeroDivisionError
        case "database":
            raise OperationalError("gone")
        case "wait":
            Signs.began.set()
            assert Signs.go_on.wait(10)
        case _:
            pass
    return Answer({"count": AdminEvent.objects.filter(act=body.name).count()}, 201)


def _grant(body: Deed) -> Grant | None:
    return Grant(RUN, 1) if body.then == "grant" else None


@post(tag="Test", body=Nothing, answers={200: None}, people_only=True)
def decide(caller: Caller, *, run_id: str, key: str, body: Nothing) -> dict[str, Any]:
    """Only for people."""
    return {"by": caller.id, "channel": caller.channel, "run": run_id, "key": key}


class Wish(commands.Body, frozen=True):
    """Comes true at the n-th look."""

    at: int
    wait: int = 0


looks: list[int] = []
NEWS = wakeups.DELIVERY


@post(tag="Test", body=Wish, answers={200: None, 204: None}, polls=lambda _caller, _body: wakeups.listen(NEWS))
def wish(caller: Caller, *, body: Wish) -> dict[str, Any] | None:
    """Poll."""
    looks.append(body.wait)
    wakeups.listener().wake(NEWS)  # comes between this look and the wait that follows
    AdminEvent.objects.create(actor_kind=caller.kind, actor_id=caller.id, act="look")
    return {"looks": len(looks)} if len(looks) >= body.at else None


@post(tag="Test", body=Deed, answers={202: None}, apart=True)
def signal(caller: Caller, *, body: Deed) -> dict[str, Any]:
    """Commits by itself."""
    AdminEvent.objects.create(actor_kind=caller.kind, actor_id=caller.id, act=body.name)
    if body.then == "refuse":
        raise Refusal("ambiguous_signal", "Several fit.")
    return {"count": AdminEvent.objects.filter(act=body.name).count()}


@get(tag="Test", query=Paged, answers={200: None})
def look(caller: Caller, *, query: Paged) -> dict[str, Any]:
    """Read something."""
    return query.page()


@post(tag="Test", body=endpoint.Payload, answers={202: None}, signed_in=False)
def knock(caller: None, *, token: str, body: endpoint.Payload) -> dict[str, Any]:
    """Take anything."""
    return {"token": token, "value": body.value, "id": body.webhook_id}


urlpatterns = [
    resource("do", look, do),
    resource("runs/<str:run_id>/effects/<path:key>/decide", decide),
    resource("knock/<str:token>", knock),
    resource("wish", wish),
    resource("signal", signal),
]


def send(client: Client, key: str, body: Any, *, path: str = "/do", **headers: str) -> Any:
    raw = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return client.post(path, raw, content_type="application/json", headers=bearer(key, **headers))


def problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.content
    assert response.headers["Content-Type"] == "application/problem+json"
    document: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "code"} <= set(document)
    assert (document["status"], document["code"]) == (status, code)
    return document


def deeds(name: str = "pay") -> int:
    return AdminEvent.objects.filter(act=name).count()


# -- who -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer x", "Bearer rhk__", "Basic YTpi", "Bearer rhk_aaaaaaaaaa_" + "x" * 43, "\xff"],
)
def test_without_a_good_key_nothing_opens(client: Client, db: None, header: str) -> None:
    response = client.get("/do", headers={"Authorization": header})
    problem(response, 401, "unauthenticated")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")


def test_nobody_is_told_to_send_a_key(client: Client, db: None) -> None:
    assert "Authorization: Bearer" in problem(client.get("/do"), 401, "unauthenticated")["detail"]


def test_a_key_opens_until_it_is_revoked(client: Client, bot_key: str) -> None:
    assert client.get("/do", headers=bearer(bot_key)).status_code == 200
    keys.revoke(ApiKey.objects.get(name="bot"), by="frank")
    problem(client.get("/do", headers=bearer(bot_key)), 401, "unauthenticated")


def test_a_key_with_another_secret_opens_nothing(client: Client, bot_key: str) -> None:
    forged = bot_key[:-1] + ("A" if bot_key[-1] != "A" else "B")
    problem(client.get("/do", headers=bearer(forged)), 401, "unauthenticated")


def test_a_person_who_left_is_nobody(client: Client, alice: User, alice_key: str) -> None:
    User.objects.filter(pk=alice.pk).update(is_active=False)
    problem(client.get("/do", headers=bearer(alice_key)), 401, "unauthenticated")


def test_the_use_of_a_key_is_noted_once_a_minute(client: Client, bot_key: str, django_assert_num_queries: Any) -> None:
    client.get("/do", headers=bearer(bot_key))
    first = ApiKey.objects.get(name="bot").last_used_at
    assert first is not None
    with django_assert_num_queries(1):
        client.get("/do", headers=bearer(bot_key))
    assert ApiKey.objects.get(name="bot").last_used_at == first


def test_guessing_keys_is_slowed_down(client: Client, bot_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.wrong_keys, "_monotonic", lambda: 0.0)  # however slow the machine is
    answers = {client.get("/do", headers=bearer(f"rhk_{n:010}_{'x' * 43}")).status_code for n in range(121)}
    assert answers == {401, 429}
    response = client.get("/do", headers=bearer("rhk_nothing"))
    problem(response, 429, "rate_limited")
    assert int(response.headers["Retry-After"]) >= 1
    assert client.get("/do", headers=bearer(bot_key)).status_code == 200


def test_a_session_needs_its_csrf_token_for_changes(client: Client, alice: User) -> None:
    client.force_login(alice)
    assert client.get("/do").status_code == 200
    problem(client.post("/do", {"name": "pay"}, content_type="application/json"), 403, "forbidden")
    assert deeds() == 0
    client.cookies["rehydrate_csrf"] = "x" * 32
    headers = {"X-CSRFToken": "x" * 32}
    assert client.post("/do", {"name": "pay"}, content_type="application/json", headers=headers).status_code == 201


def test_a_key_counts_more_than_a_session(client: Client, alice: User) -> None:
    client.force_login(alice)
    problem(client.get("/do", headers={"Authorization": "Bearer nothing"}), 401, "unauthenticated")


# -- what ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""]
)
def test_only_json_is_taken(client: Client, bot_key: str, kind: str) -> None:
    response = client.generic("POST", "/do", b'{"name": "pay"}', content_type=kind, headers=bearer(bot_key))
    problem(response, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=UTF-8", "Application/JSON", "application/x+json"]
)
def test_json_by_any_of_its_names(client: Client, bot_key: str, kind: str) -> None:
    response = client.generic("POST", "/do", b'{"name": "pay"}', content_type=kind, headers=bearer(bot_key))
    assert response.status_code == 201


def test_a_body_may_have_one_mebibyte(client: Client, bot_key: str) -> None:
    room = 1024 * 1024 - len(json.dumps({"name": "pay", "then": ""}))
    assert send(client, bot_key, {"name": "pay", "then": "x" * room}).status_code == 201
    problem(send(client, bot_key, {"name": "pay", "then": "x" * (room + 1)}), 413, "too_large")
    problem(send(client, bot_key, {"name": "pay", "then": "x" * 3_000_000}), 413, "too_large")


def test_a_body_without_a_length_is_read_to_its_end(client: Client, bot_key: str) -> None:
    from io import BytesIO

    def chunked(raw: bytes) -> Any:
        environ: dict[str, Any] = {
            "HTTP_TRANSFER_ENCODING": "chunked",
            "CONTENT_TYPE": "application/json",
            "wsgi.input": BytesIO(raw),
        }
        return client.generic("POST", "/do", headers=bearer(bot_key), **environ)

    assert chunked(b'{"name": "pay"}').status_code == 201
    problem(chunked(b'{"name": "%s"}' % (b"x" * 1024 * 1024)), 413, "too_large")


def test_a_body_may_be_left_out_where_nothing_is_needed(client: Client, alice_key: str, bot_key: str) -> None:
    path = f"/runs/{RUN}/effects/k/decide"
    assert client.post(path, headers=bearer(alice_key), content_type="application/json").status_code == 200
    problem(send(client, bot_key, b""), 400, "malformed")


def test_agents_are_told_that_they_cannot_even_when_the_body_is_wrong(client: Client, bot_key: str) -> None:
    problem(send(client, bot_key, {"colour": 1}, path=f"/runs/{RUN}/effects/k/decide"), 403, "agents_cannot_decide")


@pytest.mark.parametrize("run", ["1", "x" * 36, "{" + RUN + "}", RUN.replace("-", ""), "%00", "..", "%F0%9F%98%80"])
def test_what_is_no_id_is_not_there(client: Client, alice_key: str, run: str) -> None:
    problem(send(client, alice_key, {}, path=f"/runs/{run}/effects/k/decide"), 404, "not_found")


def test_an_effects_key_may_have_slashes(client: Client, alice_key: str) -> None:
    answer = send(client, alice_key, {}, path=f"/runs/{RUN.upper()}/effects/crm%2Forder:1/decide").json()
    assert answer == {"by": "alice", "channel": "api", "run": RUN, "key": "crm/order:1"}
    problem(send(client, alice_key, {}, path=f"/runs/{RUN}/effects/a%00b/decide"), 404, "not_found")


@pytest.mark.parametrize(
    ("query", "pointer"),
    [
        ("colour=red", "/colour"),
        ("limit=0", "/limit"),
        ("limit=201", "/limit"),
        ("limit=x", "/limit"),
        ("limit=1&limit=2", "/limit"),
        ("limit=", "/limit"),
        ("cursor=", "/cursor"),
        ("cursor=a%00", "/cursor"),
        ("limit=1.5", "/limit"),
    ],
)
def test_queries_are_as_strict_as_bodies(client: Client, bot_key: str, query: str, pointer: str) -> None:
    document = problem(client.get(f"/do?{query}", headers=bearer(bot_key)), 422, "invalid")
    assert document["errors"][0]["pointer"] == pointer


def test_queries_are_read(client: Client, bot_key: str) -> None:
    answer = client.get("/do?limit=200&cursor=abc", headers=bearer(bot_key))
    assert answer.json() == {"limit": 200, "cursor": "abc", "filters": {}}
    assert answer.headers["Cache-Control"] == "no-store"


def test_other_methods_are_told_which_there_are(client: Client, bot_key: str) -> None:
    for method in ("PUT", "PATCH", "DELETE", "TRACE", "FOO"):
        response = client.generic(method, "/do", headers=bearer(bot_key))
        problem(response, 405, "method_not_allowed")
        assert response.headers["Allow"] == "GET, POST, HEAD, OPTIONS"
    options = client.options("/do")
    assert (options.status_code, options.headers["Allow"]) == (204, "GET, POST, HEAD, OPTIONS")
    assert client.head("/do", headers=bearer(bot_key)).status_code == 200
    problem(client.get("/knock/t"), 405, "method_not_allowed")


@pytest.mark.urls("rehydrate.urls")
@pytest.mark.parametrize("path", ["", "v1", "v1/", "v1/runs/", "v1/nope", "v1/hooks/", "v1/hooks/a/b", "a%0Ab", "%00"])
def test_every_other_address_is_a_problem_too(client: Client, db: None, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        problem(client.generic(method, f"/api/{path}", b"{}", content_type="application/json"), 404, "not_found")


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_take_json_and_forms(client: Client, db: None) -> None:
    def knocked(raw: bytes, kind: str, **headers: str) -> Any:
        return client.generic("POST", "/knock/t", raw, content_type=kind, headers=headers).json()

    by_json = knocked(b'{"paid": true}', "application/json", **{"webhook-id": "msg_1"})
    assert by_json == {"token": "t", "value": {"paid": True}, "id": "msg_1"}
    form = knocked(b"a=1&b=x%20y&b=z&c=", "application/x-www-form-urlencoded")
    assert form["value"] == {"a": "1", "b": ["x y", "z"], "c": ""}
    assert form["id"].startswith("sha256:")
    parts = client.post("/knock/t", {"a": "1", "b": "é"})
    assert parts.json()["value"] == {"a": "1", "b": "é"}


@pytest.mark.parametrize(
    ("raw", "kind", "status", "code"),
    [
        (b"", "application/json", 400, "malformed"),
        (b"{", "application/json", 400, "malformed"),
        (b"\xff", "application/x-www-form-urlencoded", 400, "malformed"),
        (b"a=%ff", "application/x-www-form-urlencoded", 400, "malformed"),
        (b"a=%00", "application/x-www-form-urlencoded", 422, "invalid"),
        (b"<a/>", "application/xml", 415, "unsupported_media_type"),
        (b'"\\u0000"', "application/json", 422, "invalid"),
        (b'"' + b"x" * 20_000 + b'"', "application/json", 413, "too_large"),
        (b"--x", "multipart/form-data", 400, "malformed"),
        (b"a=1&" * 1100, "application/x-www-form-urlencoded", 400, "malformed"),
    ],
)
def test_callbacks_refuse_what_cannot_be_read(
    client: Client, db: None, raw: bytes, kind: str, status: int, code: str
) -> None:
    problem(client.generic("POST", "/knock/t", raw, content_type=kind), status, code)


def test_a_webhook_id_is_short(client: Client, db: None) -> None:
    response = client.post("/knock/t", {}, content_type="application/json", headers={"webhook-id": "x" * 201})
    problem(response, 422, "invalid")


# -- once ------------------------------------------------------------------------------------------------------------


def test_the_same_key_and_body_gives_the_first_answer_again(client: Client, bot_key: str) -> None:
    first = send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"})
    again = send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"})
    assert (first.status_code, first.json()) == (again.status_code, again.json()) == (201, {"count": 1})
    assert "Idempotency-Replayed" not in first.headers
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.headers["Content-Type"] == first.headers["Content-Type"]
    assert deeds() == 1


def test_without_a_key_each_request_counts(client: Client, bot_key: str) -> None:
    send(client, bot_key, {"name": "pay"})
    assert send(client, bot_key, {"name": "pay"}).json() == {"count": 2}


def test_the_same_key_with_another_body_is_refused(client: Client, bot_key: str) -> None:
    send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"})
    problem(send(client, bot_key, {"name": "pay more"}, **{"Idempotency-Key": "k-1"}), 422, "idempotency_key_reused")
    assert deeds("pay more") == 0


def test_keys_are_each_callers_own(client: Client, bot_key: str, alice_key: str, operations_office: Workspace) -> None:
    namesake = keys.issue_agent(workspace=operations_office, name="bot", flows=[])
    for key in (bot_key, alice_key, namesake):
        assert send(client, key, {"name": "pay"}, **{"Idempotency-Key": "k-1"}).status_code == 201
    assert deeds() == 3


def test_a_refusal_is_kept_with_what_it_changed(client: Client, bot_key: str) -> None:
    for _ in range(2):
        response = send(client, bot_key, {"name": "pay", "then": "refuse"}, **{"Idempotency-Key": "k-1"})
        assert problem(response, 409, "wait_closed")["wait"] == {"id": "w-1"}
    assert response.headers["Idempotency-Replayed"] == "true"
    assert deeds() == 1


@pytest.mark.parametrize(
    ("then", "status", "code"),
    [("fault", 500, "internal_error"), ("database", 503, "unavailable"), ("limit", 429, "rate_limited")],
)
def test_what_passes_is_never_kept(client: Client, bot_key: str, then: str, status: int, code: str) -> None:
    for _ in range(2):
        response = send(client, bot_key, {"name": "pay", "then": then}, **{"Idempotency-Key": "k-1"})
        problem(response, status, code)
        assert "Idempotency-Replayed" not in response.headers
    assert (deeds(), IdempotencyRecord.objects.count()) == (0, 0)
    if status != 500:
        assert int(response.headers["Retry-After"]) in (1, 7)


def test_what_cannot_be_read_uses_no_key_up(client: Client, bot_key: str) -> None:
    problem(send(client, bot_key, {"name": 1}, **{"Idempotency-Key": "k-1"}), 422, "invalid")
    assert send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"}).status_code == 201


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb"])
def test_keys_have_a_form(client: Client, bot_key: str, key: str) -> None:
    problem(send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": key}), 422, "invalid")


def test_a_grant_is_not_given_again_to_a_dead_epoch(client: Client, bot_key: str) -> None:
    first = send(client, bot_key, {"name": "pay", "then": "grant"}, **{"Idempotency-Key": "k-1"})
    assert first.status_code == 201
    again = send(client, bot_key, {"name": "pay", "then": "grant"}, **{"Idempotency-Key": "k-1"})
    problem(again, 409, "lease_lost")
    assert deeds() == 1


def test_after_seven_days_a_key_is_new(client: Client, bot_key: str) -> None:
    send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"})
    with connection.cursor() as cursor:
        cursor.execute("UPDATE rehydrate_idempotencyrecord SET created_at = created_at - interval '6 days 23 hours'")
        assert send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"}).json() == {"count": 1}
        assert engine.tidy() == 0
        cursor.execute("UPDATE rehydrate_idempotencyrecord SET created_at = created_at - interval '1 hour'")
    assert send(client, bot_key, {"name": "pay"}, **{"Idempotency-Key": "k-1"}).json() == {"count": 2}
    with connection.cursor() as cursor:
        cursor.execute("UPDATE rehydrate_idempotencyrecord SET created_at = created_at - interval '7 days 1 second'")
    assert engine.tidy() == 1


def test_a_long_poll_keeps_what_it_found_and_nothing_else(client: Client, bot_key: str) -> None:
    looks.clear()
    headers = {"Idempotency-Key": "k-1"}
    first = send(client, bot_key, {"at": 2, "wait": 5}, path="/wish", **headers)
    again = send(client, bot_key, {"at": 2, "wait": 5}, path="/wish", **headers)
    assert (first.json(), again.json(), looks) == ({"looks": 2}, {"looks": 2}, [0, 0])
    assert deeds("look") == 1
    none = send(client, bot_key, {"at": 9, "wait": 0}, path="/wish", **{"Idempotency-Key": "k-2"})
    replayed = send(client, bot_key, {"at": 9, "wait": 0}, path="/wish", **{"Idempotency-Key": "k-2"})
    assert (none.status_code, replayed.status_code, replayed.content) == (204, 204, b"")
    assert replayed.headers["Idempotency-Replayed"] == "true"
    assert "Content-Type" not in replayed.headers


@pytest.mark.parametrize(("then", "status"), [("", 202), ("refuse", 409)])
def test_what_commits_by_itself_is_answered_once_too(client: Client, bot_key: str, then: str, status: int) -> None:
    body = {"name": "pay", "then": then}
    first, again = (send(client, bot_key, body, path="/signal", **{"Idempotency-Key": "k-1"}) for _ in range(2))
    assert (first.status_code, again.status_code, first.json()) == (status, status, again.json())
    assert again.headers["Idempotency-Replayed"] == "true"
    assert deeds() == 1
    other = send(client, bot_key, {"name": "pay more"}, path="/signal", **{"Idempotency-Key": "k-1"})
    problem(other, 422, "idempotency_key_reused")


@pytest.mark.django_db(transaction=True)
def test_a_twin_waits_for_the_first_and_gets_its_answer(bot_key: str) -> None:
    Signs.began.clear()
    Signs.go_on.clear()

    def sent() -> Any:
        try:
            client = Client(raise_request_exception=False)
            return send(client, bot_key, {"name": "pay", "then": "wait"}, **{"Idempotency-Key": "k-1"})
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sent)
        assert Signs.began.wait(10)
        twin = pool.submit(sent)
        Signs.go_on.set()
        answers = [first.result(timeout=20), twin.result(timeout=20)]
    assert [answer.json() for answer in answers] == [{"count": 1}] * 2
    assert sorted(answer.headers.get("Idempotency-Replayed", "") for answer in answers) == ["", "true"]
    assert deeds() == 1


# -- answers ---------------------------------------------------------------------------------------------------------


def test_faults_are_told_without_their_insides(client: Client, bot_key: str) -> None:
    response = send(client, bot_key, {"name": "pay", "then": "fault"})
    document = problem(response, 500, "internal_error")
    assert "ZeroDivision" not in response.content.decode()
    assert document["detail"]


def test_extra_members_never_hide_the_standard_ones() -> None:
    response = problems.for_refusal(Refusal("invalid", "No.", type="x", status_="y", errors=[]))
    document = msgspec.json.decode(response.content)
    assert document["type"] == "urn:rehydrate:problem:invalid"
    assert document["status"] == 422
