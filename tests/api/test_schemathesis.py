"""Schemathesis over the whole OpenAPI document, in process: no 5xx, and no answer outside of the schema.

Every operation is tried with made-up ids and with those of real runs, waits, effects and signals in many states, by an
administrator and by an agent; good and bad requests are made up alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.db import close_old_connections, transaction
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi import checks

from rehydrate.api import lane, limits
from rehydrate.wsgi import application
from tests.contract import driver as d

pytestmark = pytest.mark.django_db

CHECKS: list[Any] = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
# Coverage cases (each keyword of each schema, kept and broken) come as explicit examples.
THOROUGH = settings(
    max_examples=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Where eighteen kinds of events are taken there would be thousands of those: some random ones instead.
RANDOM = settings(THOROUGH, max_examples=40, phases=[Phase.generate])
TAKE_EVENTS = ["open_run", "append_events"]


@dataclass
class Cast:
    """Who calls, and the ids of what is there."""

    keys: list[str]
    ids: dict[str, list[str]]
    asked: int = 0
    calls: int = 0


@pytest.fixture(scope="module")
def stage(django_db_setup: None, django_db_blocker: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """The cast, made once for all tests here, in a transaction that is given up at the end."""
    with django_db_blocker.unblock(), transaction.atomic():
        yield _cast(tmp_path_factory.mktemp("cast"))
        transaction.set_rollback(True)


@pytest.fixture
def cast(stage: Cast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cast]:
    """The cast, as it was made. The application shares the connection, so it must not close it."""
    for limit in (limits.wrong_keys, limits.wrong_hooks, limits.hooks):
        monkeypatch.setattr(limit, "spend", lambda subject: None)
    monkeypatch.setattr(lane, "close_old_connections", lambda: None)
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield stage
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


def _cast(folder: Path) -> Cast:
    world = d.World(d.DjangoTransport(), folder)
    world.apply(d.CAST)
    bot, frank = world.agent("bot"), world.person("frank")
    running = bot.open(d.order("k1"), d.effect("mail", "mail.send"), d.started("mail", arguments={"of": "mail"}))
    sms = [d.effect("sms", "mail.send"), d.started("sms"), d.unknown("sms")]
    unknown = bot.open(*d.done(d.effect("pay", "psp.charge")), *sms)
    asked = bot.open(d.order("k1"), d.paused(d.approval(effect="k1"), d.callback(), d.signal(), when="each"))
    taken = bot.open(d.order("k1"))
    frank.takeover(taken).ok()
    ended = bot.open()
    ended.do(d.completed())
    world.apply('[flow.told]\nrequired = []\ndeliver_to = "https://agent.example/hooks"\n')
    for _ in range(3):
        bot.open(flow="told", holder=None, at=None)
    waits = asked.look()["waits"]
    frank.decide(waits[0], "reject", reason="No.")
    bot.signal("s-1", "documents", run=running.id)
    signals = frank.get("/signals").ok()["results"]
    return Cast(
        keys=[str(frank.key), str(bot.key)],
        ids={
            "run_id": [run.id for run in (running, unknown, asked, taken, ended)],
            "wait_id": [wait["id"] for wait in waits],
            "delivery_id": [delivery["id"] for delivery in frank.get("/deliveries").ok()["results"]],
            "signal_id": [signal["id"] for signal in signals],
            "key": ["k1", "mail", "pay", "sms"],
            "token": [wait["callback_url"].rpartition("/")[2] for wait in waits if wait["callback_url"]],
        },
    )


# Read while tests are collected, so that each operation is a test of its own. It asks no database.
schema = schemathesis.openapi.from_wsgi("/api/schema/", application)


def check(case: schemathesis.Case, cast: Cast) -> None:
    """The two callers take turns."""
    cast.calls += 1
    key = cast.keys[cast.calls % len(cast.keys)]
    if case.path.endswith("/claims") and isinstance(case.body, dict) and case.body.get("wait") in range(1, 31):
        case.body["wait"] = 0  # nobody is there to wait for
    case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, checks=CHECKS)


@schema.exclude(operation_id=TAKE_EVENTS).parametrize()
@THOROUGH
def test_made_up_requests(case: schemathesis.Case, cast: Cast) -> None:
    check(case, cast)


@schema.include(operation_id=TAKE_EVENTS).parametrize()
@RANDOM
def test_made_up_events(case: schemathesis.Case, cast: Cast) -> None:
    _about_what_is_there(case, cast)
    check(case, cast)


@schema.include(path_regex=r"\{").exclude(operation_id=TAKE_EVENTS).parametrize()
@THOROUGH
def test_requests_about_what_is_there(case: schemathesis.Case, cast: Cast) -> None:
    _about_what_is_there(case, cast)
    check(case, cast)


def _about_what_is_there(case: schemathesis.Case, cast: Cast) -> None:
    path = case.meta.components.get(ParameterLocation.PATH) if case.meta else None
    if path is not None and path.mode.is_negative:
        return  # the ids are what is meant to be wrong
    for name in case.path_parameters or {}:
        cast.asked += 1
        case.path_parameters[name] = cast.ids[name][cast.asked % len(cast.ids[name])]
