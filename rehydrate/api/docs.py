"""`/api/docs/`: the OpenAPI document as one page of plain HTML, drawn on the server. What it says is in `schema`."""

import functools
from itertools import zip_longest
from typing import Any, Final

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.html import format_html, format_html_join
from django.views.decorators.http import require_safe

from rehydrate.api import schema
from rehydrate.api.endpoint import OPERATIONS

_METHODS: Final = ("get", "post")


@require_safe
def docs_view(request: HttpRequest) -> HttpResponse:
    """The page; it needs no script and asks no other host."""
    return render(request, "api/docs.html", _page())


@functools.cache
def _page() -> dict[str, Any]:
    document = schema.document()
    operations = [
        _operation(path, method, item[method])
        for path, item in document["paths"].items()
        for method in _METHODS
        if method in item
    ]
    order = [operation.name for operation in OPERATIONS]
    operations.sort(key=lambda operation: order.index(operation["id"]))
    groups = [
        {
            "name": tag["name"],
            "anchor": _anchor(tag["name"]),
            "description": tag["description"],
            "operations": [operation for operation in operations if operation["tag"] == tag["name"]],
        }
        for tag in document["tags"]
    ]
    shapes = [
        {"name": name, "description": _coded(_words(shape)), "fields": _fields(shape), "one_of": _names(shape)}
        for name, shape in document["components"]["schemas"].items()
    ]
    return {"info": document["info"], "groups": groups, "shapes": shapes, "base": "/api/v1"}


def _operation(path: str, method: str, described: dict[str, Any]) -> dict[str, Any]:
    body = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answers = []
    for status, answer in described["responses"].items():
        if "$ref" in answer:
            answer = schema.document()["components"]["responses"][answer["$ref"].rpartition("/")[2]]
        content: dict[str, Any] = next(iter(answer.get("content", {}).values()), {})
        answers.append(
            {
                "status": status,
                "words": _coded(answer["description"]),
                "type": _type(content["schema"]) if content else None,
            }
        )
    return {
        "id": described["operationId"],
        "tag": described["tags"][0],
        "method": method.upper(),
        "path": path,
        "summary": described["summary"],
        "description": _coded(described.get("description", "")),
        "open": described["security"] == [{}],
        "parameters": [
            {**parameter, "type": _type(parameter["schema"])}
            for parameter in described["parameters"]
            if parameter["in"] != "path"
        ],
        "body": _type(body) if body is not None else None,
        "answers": answers,
    }


def _coded(text: str) -> str:
    """Text in which `names` in back-ticks are set as code."""
    parts = text.split("`")
    return format_html_join(
        "",
        "{}{}",
        (
            (plain, format_html("<code>{}</code>", code) if code else "")
            for plain, code in zip_longest(parts[::2], parts[1::2], fillvalue="")
        ),
    )


def _words(shape: dict[str, Any]) -> str:
    text: str = shape.get("description", "")
    # msgspec gives a struct without a docstring its signature for one, in some versions.
    return "" if text.startswith("An answer or a part of one") or text.startswith("A request body or a part") else text


def _names(shape: dict[str, Any]) -> list[str]:
    return [one["$ref"].rpartition("/")[2] for one in shape.get("oneOf", [])]


def _fields(shape: dict[str, Any]) -> list[dict[str, Any]]:
    needed = shape.get("required", [])
    return [
        {"name": name, "type": _type(kind), "required": name in needed, "default": _default(kind)}
        for name, kind in shape.get("properties", {}).items()
    ]


def _default(kind: dict[str, Any]) -> str:
    value = kind.get("default")
    return "" if value is None or value in ("", [], {}) else msgspec.json.encode(value).decode()


def _type(kind: dict[str, Any]) -> dict[str, str]:
    """A type in words, with the shape it leads to."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return {"words": name, "ref": name}
    if "enum" in kind:
        return {"words": " | ".join(str(value) for value in kind["enum"]), "ref": ""}
    if "anyOf" in kind or "oneOf" in kind:
        parts = [_type(one) for one in kind.get("anyOf", kind.get("oneOf", []))]
        words = " or ".join(part["words"] for part in parts if part["words"] != "null")
        nullable = any(part["words"] == "null" for part in parts)
        return {
            "words": f"{words} or null" if nullable else words,
            "ref": next((part["ref"] for part in parts if part["ref"]), ""),
        }
    if kind.get("type") == "array":
        inner = _type(kind.get("items", {}))
        return {"words": f"list of {inner['words']}", "ref": inner["ref"]}
    words = kind.get("format", kind.get("type", "anything"))
    limits = [f"{sign} {kind[name]}" for name, sign in _LIMITS.items() if name in kind]
    return {"words": f"{words} ({', '.join(limits)})" if limits else str(words), "ref": ""}


_LIMITS: Final = {
    "minimum": "at least",
    "maximum": "at most",
    "maxLength": "up to",
    "maxItems": "up to",
    "pattern": "like",
}


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
