"""How the client's calls are tried again: never doubled, never for ever. Against a mocked transport; no server here."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from rehydrate.client import (
    Forbidden,
    Invalid,
    LeaseLost,
    Ledger,
    LedgerError,
    NotConfigured,
    RateLimited,
    Unavailable,
    Unreachable,
    WaitClosed,
)
from rehydrate.client.errors import refusal
from rehydrate.client.retry import Backoff, retry_in
from rehydrate.core.refusals import STATUS

RUN = {"id": "0190", "flow": "contract-approval", "external_id": "contract-17", "status": "ready"}


class Server:
    """Answers each request with the next of its script: a response, or an exception for an answer that is lost."""

    def __init__(self, *script: httpx.Response | Exception) -> None:
        self.script = list(script)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def keys(self) -> list[str]:
        return [request.headers["idempotency-key"] for request in self.requests]


class Sleeper:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def sleeper() -> Sleeper:
    return Sleeper()


@pytest.fixture
def connect(sleeper: Sleeper) -> Callable[..., Ledger]:
    def make(server: Server, **options: object) -> Ledger:
        ledger = Ledger("http://ledger.test", "key", transport=httpx.MockTransport(server), **options)  # type: ignore[arg-type]
        ledger._transport._sleep = sleeper.sleep
        ledger._transport._monotonic = lambda: sleeper.now
        return ledger

    return make


def ok(body: object = None, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=body if body is not None else {})


def problem(status: int, code: str, **more: object) -> httpx.Response:
    return httpx.Response(
        status,
        json={"code": code, "status": status, "detail": "Because.", **more},
        headers={"content-type": "application/problem+json"},
    )


def test_lost_answer_is_asked_for_again_under_the_same_key_with_the_same_bytes(connect):
    server = Server(httpx.ReadTimeout("late"), httpx.RemoteProtocolError("gone"), ok({"run": RUN, "lease": None}))
    ledger = connect(server)

    assert ledger.open("contract-approval", "contract-17")["run"] == RUN

    assert len(set(server.keys)) == 1
    assert len({request.content for request in server.requests}) == 1


def test_each_call_has_a_key_of_its_own(connect):
    server = Server(ok(), ok())
    ledger = connect(server)
    event = {"type": "note", "text": "Twice is meant twice."}

    ledger.append("0190", 1, [event])
    ledger.append("0190", 1, [event])

    assert len(set(server.keys)) == 2


def test_reads_carry_no_idempotency_key(connect):
    server = Server(ok(RUN))
    connect(server).get("0190")
    assert "idempotency-key" not in server.requests[0].headers


def test_rate_limit_waits_at_least_as_long_as_it_was_told(connect, sleeper):
    slow_down = problem(429, "rate_limited")
    slow_down.headers["retry-after"] = "7"
    server = Server(slow_down, ok())

    connect(server).release("0190", 1)

    assert len(sleeper.slept) == 1
    assert sleeper.slept[0] >= 7
    assert len(set(server.keys)) == 1


def test_pauses_between_tries_grow_and_are_capped(connect, sleeper):
    server = Server(*[problem(503, "unavailable") for _ in range(12)], ok())
    backoff = Backoff(base=0.1, cap=2.0, uniform=lambda low, high: high)

    connect(server, backoff=backoff, patience=600).release("0190", 1)

    assert sleeper.slept[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert sleeper.slept[5:] == pytest.approx([2.0] * 7)


def test_patience_ends_with_what_the_server_last_said(connect, sleeper):
    server = Server(*[problem(503, "unavailable") for _ in range(100)])
    with pytest.raises(Unavailable):
        connect(server, patience=10).release("0190", 1)
    assert sleeper.now <= 10


def test_server_that_cannot_be_reached_ends_as_unreachable(connect, sleeper):
    server = Server(*[httpx.ConnectError("refused") for _ in range(100)])
    with pytest.raises(Unreachable, match=r"ledger\.test"):
        connect(server, patience=3).release("0190", 1)
    assert 1 < len(server.requests) < 100


def test_internal_error_is_tried_a_few_times_only(connect):
    server = Server(*[problem(500, "") for _ in range(10)])
    with pytest.raises(LedgerError):
        connect(server, patience=600).release("0190", 1)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(403, "forbidden", Forbidden), (409, "lease_lost", LeaseLost), (422, "invalid", Invalid)],
)
def test_other_refusals_are_raised_at_once(connect, status, code, kind):
    server = Server(problem(status, code))
    with pytest.raises(kind, match="Because"):
        connect(server).append("0190", 1, [{"type": "note", "text": "x"}])
    assert len(server.requests) == 1


def test_claim_without_work_is_none_and_waits_longer_than_the_long_poll(connect):
    server = Server(httpx.Response(204))
    assert connect(server).claim(["contract-approval"], wait=20) is None
    assert json.loads(server.requests[0].content)["wait"] == 20
    assert server.requests[0].extensions["timeout"]["read"] > 20


def test_numbers_that_json_does_not_know_never_leave(connect):
    server = Server()
    with pytest.raises(ValueError, match="JSON"):
        connect(server).append("0190", 1, [{"type": "checkpoint", "stage": "x", "data": float("nan")}])
    assert server.requests == []


@pytest.mark.parametrize("code", sorted(STATUS))
def test_every_code_of_the_contract_is_an_exception_with_a_sentence(code):
    error = refusal({"code": code, "detail": "Just so."}, status=STATUS[code])
    assert type(error) is not LedgerError
    assert error.code == code
    assert error.message.endswith((".", "it"))
    assert str(error) == f"{error.message} Just so."
    assert type(error).__doc__


def test_refusal_carries_what_the_server_told():
    wait = {"id": "w1", "status": "satisfied", "decision": {"decided_by": "alice"}}
    error = refusal({"code": "wait_closed", "wait": wait, "run_status": "ready"}, status=409)
    assert isinstance(error, WaitClosed)
    assert error.wait == wait
    assert error.run_status == "ready"

    error = refusal({"code": "invalid", "errors": [{"pointer": "/events/0", "detail": "no such type"}]}, status=422)
    assert "/events/0: no such type" in str(error)


def test_proxy_that_speaks_no_json_is_understood():
    from rehydrate.client.transport import parse

    with pytest.raises(Unavailable):
        parse(httpx.Response(502, text="<html>Bad gateway</html>"))
    with pytest.raises(RateLimited):
        parse(httpx.Response(429, text="slow down"))


def test_client_without_address_or_key_says_what_is_missing(monkeypatch):
    monkeypatch.delenv("REHYDRATE_URL", raising=False)
    monkeypatch.delenv("REHYDRATE_KEY", raising=False)
    with pytest.raises(NotConfigured, match="REHYDRATE_URL"):
        Ledger()


def test_address_and_key_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("REHYDRATE_URL", "http://ledger.test/")
    monkeypatch.setenv("REHYDRATE_KEY", "k")
    with Ledger() as ledger:
        assert ledger.url == "http://ledger.test"


def test_runs_that_fail_more_are_tried_later():
    assert 1 <= retry_in(1) <= 2
    assert 16 <= retry_in(5) <= 32
    assert retry_in(50) <= 300
