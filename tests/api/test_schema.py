"""The OpenAPI document: valid, whole, and true; and the page that shows it."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from rehydrate.api import schema, shapes
from rehydrate.core.refusals import STATUS
from tests.contract import driver as d


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return schema.document()


def test_it_is_served_to_anybody_as_json_and_as_yaml(client: Client, document: dict[str, Any]) -> None:
    assert client.get("/api/schema/").json() == msgspec.json.decode(msgspec.json.encode(document))
    yaml = client.get("/api/schema/?format=yaml")
    assert yaml.headers["Content-Type"] == "application/yaml"
    assert yaml.content.startswith(b"openapi: 3.1.0")


def addresses(patterns: list[Any] | None = None, before: str = "/") -> Iterator[str]:
    for pattern in get_resolver().url_patterns if patterns is None else patterns:
        here = before + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from addresses(pattern.url_patterns, here)
        elif isinstance(pattern, URLPattern):
            yield re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", here)


def test_every_address_of_the_api_is_in_it(document: dict[str, Any]) -> None:
    assert sorted(document["paths"]) == sorted(path for path in addresses() if path.startswith("/api/v1/"))


def test_every_operation_has_words_and_a_name_of_its_own(document: dict[str, Any]) -> None:
    found = [operation for item in document["paths"].values() for operation in item.values()]
    names = [operation["operationId"] for operation in found]
    assert len(set(names)) == len(names)
    assert all(operation["summary"] and operation["tags"][0] in schema.TAGS for operation in found)


def test_every_reference_leads_somewhere_and_every_shape_is_a_schema(document: dict[str, Any]) -> None:
    for name in schema._refs(document):
        assert name in document["components"]["schemas"]
    for name, shape in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(shape)
        assert shape.get("description", "") != "An answer or a part of one. A later version may add fields.", name


def test_every_code_is_told_where_it_may_come(document: dict[str, Any]) -> None:
    told = " ".join(response["description"] for response in document["components"]["responses"].values())
    assert [code for code in STATUS if f"`{code}`" not in told] == []


def test_bodies_are_strict_and_answers_may_grow(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["OpenRun"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["Run"]
    assert schemas["Append"]["properties"]["events"]["items"] == {"$ref": "#/components/schemas/AgentEvent"}
    assert len(schemas["AgentEvent"]["oneOf"]) == 18


def test_the_page_shows_every_operation_and_asks_no_other_host(client: Client, document: dict[str, Any]) -> None:
    response = client.get("/api/docs/")
    page = response.content.decode()
    assert response.status_code == 200
    for operation in (operation for item in document["paths"].values() for operation in item.values()):
        assert f'id="{operation["operationId"]}"' in page
    for name in document["components"]["schemas"]:
        assert f'id="shape-{name}"' in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)
    assert "<script" not in page
    assert "style=" not in page
    assert "script-src 'self'" in response.headers["Content-Security-Policy"]


# -- answers hold to their shapes, to the letter -----------------------------------------------------------------------


def strictly(shape: type[msgspec.Struct], value: Any) -> None:
    """The value fits, and has no field that the shape does not tell of."""
    msgspec.convert(value, shape)
    _known(msgspec.json.schema(shape), value, shape.__name__)


def _known(kind: dict[str, Any], value: Any, where: str, defs: dict[str, Any] | None = None) -> None:
    defs = kind.get("$defs", defs or {})
    if "$ref" in kind:
        kind = defs[kind["$ref"].rpartition("/")[2]]
    if "anyOf" in kind and value is not None:
        kind = next(one for one in kind["anyOf"] if one.get("type") != "null")
        return _known(kind, value, where, defs)
    if isinstance(value, list):
        for item in value:
            _known(kind.get("items", {}), item, f"{where}[]", defs)
    elif isinstance(value, dict) and "properties" in kind:
        assert set(value) <= set(kind["properties"]), f"{where}: {set(value) - set(kind['properties'])}"
        for name, child in value.items():
            _known(kind["properties"][name], child, f"{where}.{name}", defs)
    return None


def test_answers_have_the_shapes_that_are_told(db: None, tmp_path: Any) -> None:
    world = d.World(d.DjangoTransport(), tmp_path)
    world.apply(d.CAST)
    bot, alice, frank = world.agent("bot"), world.person("alice"), world.person("frank")
    first = bot.open_raw(events=[d.checkpoint(), d.order("k1")]).ok(201)
    strictly(shapes.Opened, first)
    run = d.Run(bot, first["run"]["id"], first["lease"]["epoch"])
    strictly(shapes.Leased, run.heartbeat().ok())
    waits = [d.approval(effect="k1"), d.callback(), d.signal()]
    strictly(shapes.Appended, run.append(d.external_ref("crm", "case", "7"), d.paused(*waits)).ok())
    strictly(shapes.Waits, bot.get("/waits").ok())
    wait = run.wait("legal-approval")
    strictly(shapes.Wait, wait)
    strictly(shapes.Wait, alice.post(f"/waits/{wait['id']}/comment", {"comment": "Looking."}).ok())
    strictly(shapes.Decided, alice.decide(wait).ok(201))
    url = d.hook_path(run.wait("supplier")["callback_url"])
    strictly(shapes.SignalTaken, world.nobody.post(url, {"paid": True}).ok(202))
    strictly(shapes.SignalTaken, bot.signal("s-1", "documents", run=run.id).ok(202))
    strictly(shapes.Signals, frank.get("/signals").ok())
    strictly(shapes.Envelope, run.resume())
    run.do(d.started("k1", arguments=d.ORDER), d.unknown("k1"))
    strictly(shapes.Released, run.release().ok())
    strictly(shapes.Settled, frank.reconcile(run, "k1", "executed").ok())
    strictly(shapes.Run, frank.takeover(run).ok())
    strictly(shapes.Settled, frank.handback(run).ok())
    strictly(shapes.Run, run.look())
    strictly(shapes.Verdict, run.verdict)
    strictly(shapes.Runs, bot.get("/runs").ok())
    strictly(shapes.Events, bot.get(f"/runs/{run.id}/events").ok())
    strictly(shapes.Evidence, world.person("erin").get(f"/runs/{run.id}/evidence").ok())
    strictly(shapes.Recovery, frank.get("/metrics/recovery").ok())
    report = {"flow": "contract-approval", "happened_outside": True, "looked_up": [{"what": "effect_keys"}]}
    strictly(shapes.ReadinessReport, bot.post("/readiness", report).ok())
    strictly(shapes.Problem, bot.post("/readiness", {}).refused(422, "invalid"))
