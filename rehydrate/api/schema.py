"""OpenAPI 3.1 from the operations and their structs, through drf-spectacular. What it says is what `endpoint` does."""

import functools
from typing import Any, Final

import msgspec
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.renderers import OpenApiYamlRenderer

from rehydrate.api import shapes
from rehydrate.core import commands, refusals

_REF: Final = "#/components/schemas/{name}"

_REFUSALS: Final = {
    400: "The request cannot be read",
    401: "No key, or one that opens nothing",
    403: "Not allowed for this caller",
    404: "Not there, or not to be seen by this caller",
    409: "Not as things stand; the object as it stands comes along",
    413: "Over 1 MiB, or inline data over 16 KiB",
    415: "Another media type",
    422: "Something in the request does not fit; `errors` points at it",
    429: "Too many requests: wait for the seconds in Retry-After",
    503: "For now the server cannot answer; nothing was changed",
}

TAGS: Final = {
    "Agents": "Open runs, append events, pause, and put the very same run back together.",
    "Signals": "What comes from outside: stored before it is matched.",
    "Waits": "What paused runs wait for, and how people answer.",
    "Holding the wheel": "A person takes over, hands back, clears, retries, reconciles, ends.",
    "Deliveries": "What was POSTed to the receivers that flows name, signed as Standard Webhooks says.",
    "Reading": "Runs, their events and evidence, and how well recovery goes.",
}

_DESCRIPTION: Final = """\
A ledger for paused runs: an agent stops, the world moves on, and the very same run comes back.

Times are RFC 3339 with an offset. Ids are UUIDs. Every POST takes an `Idempotency-Key`: the same key and body gives the
first answer again. Refusals are `application/problem+json` with a stable `code` and a sentence that says what to do.
"""


class OperationSchema(AutoSchema):
    """drf-spectacular's view of an `Endpoint`: the operation's own description instead of serializers."""

    def get_operation(self, path: str, path_regex: str, path_prefix: str, method: str, registry: Any) -> dict[str, Any]:
        operation = self.view.operations[method]  # type: ignore[attr-defined]
        described: dict[str, Any] = {
            "operationId": operation.name,
            "tags": [operation.tag],
            "summary": operation.summary,
            "security": [{"key": []}, {"session": []}] if operation.signed_in else [{}],
            "parameters": _parameters(path, operation),
        }
        if operation.description:
            described["description"] = operation.description
        if operation.body is not None:
            described["requestBody"] = _request(operation)
        described["responses"] = _responses(operation)
        return described


def _parameters(path: str, operation: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in [part.partition("}")[0] for part in path.split("{")[1:]]:
        kind: dict[str, Any] = (
            {"type": "string", "format": "uuid"} if name.endswith("_id") else {"type": "string", "minLength": 1}
        )
        found.append({"name": name, "in": "path", "required": True, "schema": kind})
    if operation.query is not None:
        (schema,), components = msgspec.json.schema_components([operation.query], ref_template=_REF)
        name = schema["$ref"].rpartition("/")[2]
        for parameter, shape in components[name]["properties"].items():
            shape = {key: value for key, value in shape.items() if key != "default"}
            described = {"name": parameter, "in": "query", "required": False, "schema": shape}
            if "description" in shape:
                described["description"] = shape.pop("description")
            found.append(described)
    if operation.method == "POST" and operation.once:
        found.append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "The same key and body gives the first answer again, for seven days.",
                "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
            }
        )
    return found


def _request(operation: Any) -> dict[str, Any]:
    if operation.free_body:
        anything: dict[str, Any] = {"schema": {}}
        form = {"schema": {"type": "object", "additionalProperties": {"type": "string"}}}
        return {
            "required": False,
            "content": {"application/json": anything, "application/x-www-form-urlencoded": form},
        }
    ref = _REF.format(name=operation.body.__name__)
    needed = any(field.required for field in msgspec.structs.fields(operation.body))
    return {"required": needed, "content": {"application/json": {"schema": {"$ref": ref}}}}


def _responses(operation: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, shape in sorted(operation.answers.items()):
        described: dict[str, Any] = {"description": _success(status)}
        if shape is not None:
            described["content"] = {"application/json": {"schema": {"$ref": _REF.format(name=shape.__name__)}}}
        if operation.method == "POST" and operation.once:
            described["headers"] = {
                "Idempotency-Replayed": {
                    "description": "`true` when this is the first answer, given again.",
                    "schema": {"type": "string", "enum": ["true"]},
                }
            }
        found[str(status)] = described
    for status in sorted(operation.refuses):
        found[str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    return found


def _success(status: int) -> str:
    return {200: "Done", 201: "Made", 202: "Taken", 204: "Nothing to give"}[status]


class Generator(SchemaGenerator):
    """The whole document. drf-spectacular finds the addresses; the components come from the structs."""

    def get_schema(self, request: Any = None, public: bool = True) -> dict[str, Any]:
        parsed: dict[str, Any] = self.parse(request, public=True)  # type: ignore[no-untyped-call]
        paths = {path: found for path, found in parsed.items() if path.startswith("/api/v1/")}
        return {
            "openapi": "3.1.0",
            "info": {"title": "rehydrate", "version": "1", "description": _DESCRIPTION},
            "tags": [{"name": name, "description": words} for name, words in TAGS.items()],
            "paths": paths,
            "components": {
                "schemas": _components(paths),
                "responses": {f"Problem{status}": _problem(status) for status in _REFUSALS},
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer", "description": "A key of an agent or of a person."},
                    "session": {
                        "type": "apiKey",
                        "in": "cookie",
                        "name": settings.SESSION_COOKIE_NAME,
                        "description": "The browser's session; changes need the CSRF token as well.",
                    },
                },
            },
        }


def _components(paths: dict[str, Any]) -> dict[str, Any]:
    named = {name for name in _refs(paths) if hasattr(commands, name)}
    bodies = [getattr(commands, name) for name in sorted(named)]
    answers = [getattr(shapes, name) for name in sorted(_refs(paths) - named)]
    _, found = msgspec.json.schema_components(
        [*bodies, *commands.AgentEvents.__args__, *answers, shapes.Problem], ref_template=_REF
    )
    events = [event.__name__ for event in commands.AgentEvents.__args__]
    found["AgentEvent"] = {
        "title": "AgentEvent",
        "description": "One event that an agent appends; `type` says which.",
        "oneOf": [{"$ref": _REF.format(name=name)} for name in events],
        "discriminator": {
            "propertyName": "type",
            "mapping": {
                event.__struct_config__.tag: _REF.format(name=event.__name__) for event in commands.AgentEvents.__args__
            },
        },
    }
    for body in ("OpenRun", "Append"):
        found[body]["properties"]["events"]["items"] = {"$ref": _REF.format(name="AgentEvent")}
    target = {"type": "object", "required": ["flow", "external_id"], "additionalProperties": False}
    target["properties"] = {name: found["Signal"]["properties"][name]["anyOf"][0] for name in ("flow", "external_id")}
    found["Signal"]["properties"]["run"]["anyOf"].append(target)
    return dict(sorted(found.items()))


def _refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        ref = value.get("$ref")
        here = {ref.rpartition("/")[2]} if isinstance(ref, str) and ref.startswith("#/components/schemas/") else set()
        return here.union(*map(_refs, value.values()))
    return set().union(*map(_refs, value)) if isinstance(value, list) else set()


def _problem(status: int) -> dict[str, Any]:
    codes = sorted(code for code, at in refusals.STATUS.items() if at == status)
    described: dict[str, Any] = {
        "description": f"{_REFUSALS[status]}: {', '.join(f'`{code}`' for code in codes)}.",
        "content": {"application/problem+json": {"schema": {"$ref": _REF.format(name="Problem")}}},
    }
    if status in (429, 503):
        described["headers"] = {
            "Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
        }
    if status == 401:
        described["headers"] = {"WWW-Authenticate": {"schema": {"type": "string"}}}
    return described


@functools.cache
def document() -> dict[str, Any]:
    """The schema; it does not change while the server runs."""
    return Generator().get_schema()  # type: ignore[no-untyped-call]


@require_safe
def schema_view(request: HttpRequest) -> HttpResponse:
    """OpenAPI 3.1 as JSON, or as YAML where that is asked for."""
    asked = request.GET.get("format") or request.headers.get("Accept", "")
    if "yaml" in asked:
        text = OpenApiYamlRenderer().render(document())  # type: ignore[no-untyped-call]
        return HttpResponse(text, content_type="application/yaml")
    return HttpResponse(msgspec.json.encode(document()), content_type="application/json")
