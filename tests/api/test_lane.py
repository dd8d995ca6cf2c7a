"""Requests with a key, in front of Django, on the event loop, and through Django: the same status, headers and body."""

import io
from dataclasses import dataclass
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import pytest
from django.core.wsgi import get_wsgi_application
from django.test import RequestFactory
from django.urls import include, path

from rehydrate import sql
from rehydrate.api import lane
from rehydrate.api.endpoint import get, resource
from rehydrate.callers import Caller
from rehydrate.urls import urlpatterns as all_urls
from tests.conftest import in_a_loop

from .conftest import bearer

RUN = "01900000-0000-7000-8000-000000000000"


@get(tag="Test", answers={200: None})
def fall_over(caller: Caller, *, query: None) -> None:
    """Fail."""
    raise ZeroDivisionError


urlpatterns = [path("api/", include([resource("v1/fault", fall_over)])), *all_urls]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@dataclass
class Answer:
    status: str
    headers: dict[str, str]
    body: bytes


def ask(application: WSGIApplication, environ: WSGIEnvironment) -> Answer:
    begun: list[tuple[str, dict[str, str]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        assert len({name.lower() for name, _ in headers}) == len(headers), "a header is given twice"
        begun.append((status, dict(headers)))

    chunks = application(environ, start_response)
    body = b"".join(chunks)
    if hasattr(chunks, "close"):
        chunks.close()
    return Answer(*begun[0], body)


async def ask_on_the_loop(application: Any, environ: WSGIEnvironment) -> Answer:
    """The same request as the web server's event loop gets it."""
    body = environ["wsgi.input"].read()
    names = {"CONTENT_TYPE": "content-type", "CONTENT_LENGTH": "content-length"}
    names |= {name: name[5:].replace("_", "-").lower() for name in environ if name.startswith("HTTP_")}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "path": environ["PATH_INFO"].encode("latin1").decode(errors="replace"),
        "root_path": environ.get("SCRIPT_NAME", ""),
        "query_string": environ["QUERY_STRING"].encode(),
        "scheme": environ["wsgi.url_scheme"],
        "client": ("127.0.0.1", 1),
        "server": ("testserver", 80),
        "headers": [(names[name].encode(), str(environ[name]).encode()) for name in names if environ.get(name)],
    }
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    head, *chunks = sent
    headers = {name.decode().lower(): value.decode() for name, value in head["headers"]}
    assert len(headers) == len(head["headers"]), "a header is given twice"
    return Answer(str(head["status"]), headers, b"".join(chunk["body"] for chunk in chunks))


class Both:
    """The same request, in front of Django and through it; `left` counts those that were left to it.

    What is made for the event loop is asked there, too; `on_the_loop` counts those that were carried out there.
    """

    def __init__(self) -> None:
        self.through = get_wsgi_application()
        self.left = 0
        self.front = lane.in_front_of(self._left_to_django)
        self.on_the_loop = 0
        self.loop = lane.on_the_loop(self._left_to_threads)

    async def _left_to_threads(self, scope: Any, receive: Any, send: Any) -> None:
        self.on_the_loop -= 1
        await send({"type": "http.response.start", "status": 0, "headers": []})

    def _left_to_django(self, environ: WSGIEnvironment, start_response: StartResponse) -> Any:
        self.left += 1
        return self.through(environ, start_response)

    def ask(self, method: str, address: str, body: bytes = b"", *, key: str, **environ: Any) -> Answer:
        def request() -> WSGIEnvironment:
            kind = environ.get("CONTENT_TYPE", "application/json")
            made: Any = RequestFactory().generic(method, address, body, content_type=kind, headers=bearer(key))
            # A real server's stream may be read to its end, whatever was announced.
            return {**made.environ, **environ, "wsgi.input": io.BytesIO(body)}

        in_front, through = ask(self.front, request()), ask(self.through, request())
        assert in_front == through
        self.on_the_loop += 1
        on_the_loop = in_a_loop(self._ask_on_the_loop(request()))
        if on_the_loop.status != "0":
            headers = {name.lower(): value for name, value in in_front.headers.items()}
            assert on_the_loop == Answer(in_front.status.split()[0], headers, in_front.body)
        return in_front

    async def _ask_on_the_loop(self, environ: WSGIEnvironment) -> Answer:
        try:
            return await ask_on_the_loop(self.loop, environ)
        finally:
            sql.own_connections.close()


@pytest.fixture
def both() -> Both:
    return Both()


CHUNKED = {"HTTP_TRANSFER_ENCODING": "chunked", "CONTENT_LENGTH": ""}


@pytest.mark.parametrize(
    ("method", "address", "body", "environ", "status"),
    [
        ("GET", "/api/v1/runs", b"", {}, 200),
        ("GET", "/api/v1/runs?limit=0", b"", {}, 422),
        ("GET", f"/api/v1/runs/{RUN}", b"", {}, 404),
        ("GET", "/api/v1/runs/no-id", b"", {}, 404),
        ("GET", "/api/v1/metrics/recovery?to=2026-01-01T00:00:00Z", b"", {}, 200),
        ("GET", "/api/v1/fault", b"", {}, 500),
        ("POST", "/api/v1/claims", b'{"flows": ["*"], "holder": "w"}', {}, 204),
        ("POST", "/api/v1/claims", b'{"flows": ["*"], "holder": "w"}', CHUNKED, 204),
        ("POST", "/api/v1/claims", b"x" * (1024 * 1024 + 1), {}, 413),
        ("POST", "/api/v1/claims", b"x" * (1024 * 1024 + 1), CHUNKED, 413),
        ("POST", "/api/v1/claims", b"{", {}, 400),
        ("POST", "/api/v1/claims", b"{}", {"CONTENT_TYPE": "text/plain"}, 415),
        ("POST", "/api/v1/runs", b'{"colour": 1}', {}, 422),
        ("POST", f"/api/v1/waits/{RUN}/decisions", b"{}", {}, 403),
    ],
)
def test_both_ways_answer_the_same(
    both: Both, bot_key: str, method: str, address: str, body: bytes, environ: dict[str, str], status: int
) -> None:
    answer = both.ask(method, address, body, key=bot_key, **environ)
    assert (int(answer.status.split()[0]), both.left) == (status, 0), answer
    assert answer.headers["Content-Length"] == str(len(answer.body))
    assert answer.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "address", "body", "environ", "status"),
    [
        ("POST", "/api/v1/claims", b'{"flows": ["*"], "holder": "w"}', {}, 204),
        ("POST", "/api/v1/claims", b'{"flows": ["*"], "holder": "w", "wait": 1}', {}, 204),
        ("POST", "/api/v1/claims", b"{}", {"CONTENT_TYPE": "text/plain"}, 415),
        ("POST", "/api/v1/claims", b"[", {}, 400),
        ("POST", "/api/v1/claims?colour=1", b'{"flows": ["*"], "holder": "w"}', {}, 422),
        ("POST", "/api/v1/runs", b'{"colour": 1}', {}, 422),
        ("POST", f"/api/v1/runs/{RUN}/events", b'{"epoch": 1, "events": [{"type": "note", "text": "x"}]}', {}, 404),
        ("POST", "/api/v1/runs/no-id/heartbeat", b'{"epoch": 1}', {}, 404),
        ("POST", f"/api/v1/runs/{RUN}/rehydrate", b'{"holder": "w"}', {}, 404),
        ("POST", f"/api/v1/waits/{RUN}/decisions", b'{"choice": "approve", "wait_version": 1}', {}, 404),
        ("POST", f"/api/v1/waits/{RUN}/decisions", b"{}", {}, 403),
        ("POST", "/api/v1/claims", b'{"colour": 1}', {"HTTP_IDEMPOTENCY_KEY": "x" * 300}, 422),
    ],
)
def test_so_does_the_event_loop(
    both: Both, bot_key: str, method: str, address: str, body: bytes, environ: dict[str, str], status: int
) -> None:
    answer = both.ask(method, address, body, key=bot_key, **environ)
    assert (int(answer.status.split()[0]), both.on_the_loop) == (status, 1), answer


@pytest.mark.parametrize(
    ("method", "address", "body", "environ"),
    [
        ("GET", "/api/v1/runs", b"", {}),
        ("POST", f"/api/v1/runs/{RUN}/release", b'{"epoch": 1}', {}),
        ("POST", "/api/v1/claims", b'{"flows": ["*"], "holder": "w"}', CHUNKED),
        ("POST", "/api/v1/runs", b'{"title": "' + b"x" * lane.SHORT + b'"}', {}),
    ],
)
def test_what_would_keep_the_loop_is_left_to_threads(
    both: Both, bot_key: str, method: str, address: str, body: bytes, environ: dict[str, str]
) -> None:
    both.ask(method, address, body, key=bot_key, **environ)
    assert both.on_the_loop == 0


def test_a_name_with_underscores_is_no_header() -> None:
    """WSGI knows X_Forwarded_Proto and X-Forwarded-Proto by one name, and a proxy vouches for the second alone."""
    left: list[Any] = []

    async def others(scope: Any, receive: Any, send: Any) -> None:
        left.extend(scope["headers"])

    headers = [(b"x_forwarded_proto", b"https"), (b"x-forwarded-proto", b"http"), (b"authorization_", b"x")]
    nothing: Any = None
    in_a_loop(lane.on_the_loop(others)({"type": "http", "headers": headers}, nothing, nothing))
    assert left == [(b"x-forwarded-proto", b"http")]


def test_a_wrong_key_is_told_the_same(both: Both) -> None:
    answer = both.ask("POST", "/api/v1/runs", b"x" * 10_000, key="none")
    assert (answer.status, both.left) == ("401 Unauthorized", 0)
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    ("method", "address", "environ", "status"),
    [
        ("HEAD", "/api/v1/runs", {}, 200),
        ("OPTIONS", "/api/v1/runs", {}, 204),
        ("DELETE", "/api/v1/runs", {}, 405),
        ("GET", "/api/v1/nothing", {}, 404),
        ("GET", "/api/v1/runs//verdict", {}, 404),
        ("GET", "/api/v1/runs/", {}, 404),
        ("GET", "/api/v1/runs/ü", {}, 404),
        ("POST", f"/api/v1/runs/{RUN}/effects/a/b/reconcile", {}, 403),
        ("GET", "/api/v1/runs", {"SCRIPT_NAME": "/prefix"}, 200),
    ],
)
def test_what_is_no_operation_is_left_to_django(
    both: Both, bot_key: str, method: str, address: str, environ: dict[str, Any], status: int
) -> None:
    answer = both.ask(method, address, key=bot_key, **environ)
    assert (int(answer.status.split()[0]), both.left) == (status, 1), answer


def test_so_is_what_brings_no_key(both: Both) -> None:
    environ: Any = RequestFactory().get("/api/v1/runs").environ
    assert ask(both.front, environ).status == "401 Unauthorized"
    assert both.left == 1


def test_without_tls_nobody_is_answered(settings: Any, bot_key: str) -> None:
    settings.SECURE_SSL_REDIRECT = True
    settings.SECURE_HSTS_SECONDS = 60
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    both = Both()
    answer = both.ask("GET", "/api/v1/runs", key=bot_key)
    assert (answer.status, both.left) == ("301 Moved Permanently", 1)
    answer = both.ask("GET", "/api/v1/runs", key=bot_key, HTTP_X_FORWARDED_PROTO="https")
    assert (answer.status, both.left) == ("200 OK", 1)
    assert answer.headers["Strict-Transport-Security"] == "max-age=60"
