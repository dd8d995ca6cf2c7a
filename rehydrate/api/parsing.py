"""From an HTTP request to a typed body or query. Everything that needs no Django is in `rehydrate.core.parsing`."""

import hashlib
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from django.core.exceptions import RequestDataTooBig
from django.http import HttpRequest

from rehydrate.core import parsing
from rehydrate.core.refusals import Refusal, invalid

T = TypeVar("T")

_JSON: Final = "application/json"
MAX_FIELDS: Final = 1000


def read(request: HttpRequest) -> bytes:
    """The whole body, or 413 `too_large` beyond 1 MiB, whether its length was announced or not."""
    too_large = Refusal(
        "too_large", "A body may have at most 1 MiB: keep what is larger elsewhere, and send references."
    )
    chunked = "chunked" in request.META.get("HTTP_TRANSFER_ENCODING", "").lower()
    if chunked and "wsgi.input" in request.META and not request.META.get("CONTENT_LENGTH"):
        # Django takes a request without a length for one without a body; the server's stream ends where the body does.
        raw: bytes = request.META["wsgi.input"].read(parsing.MAX_BODY + 1)
        request._body = raw
    else:
        try:
            announced = int(request.META.get("CONTENT_LENGTH") or 0)
        except ValueError:
            announced = 0
        if announced > parsing.MAX_BODY:
            raise too_large
        try:
            raw = request.body
        except RequestDataTooBig:
            raise too_large from None
    if len(raw) > parsing.MAX_BODY:
        raise too_large
    return raw


def body(request: HttpRequest, raw: bytes, type_: type[T]) -> T:
    """The body as its struct. An empty one is fine where every field may be left out."""
    if not raw and not required(type_):
        return type_()
    if raw and _media_type(request) != _JSON:
        raise Refusal("unsupported_media_type", "Send JSON: Content-Type: application/json.")
    return parsing.parse(raw, type_)


def required(type_: type[Any]) -> bool:
    """True when a struct has a field that must be given."""
    return any(field.required for field in msgspec.structs.fields(type_))


def payload(request: HttpRequest, raw: bytes) -> Any:
    """What came in at a callback URL: JSON, or the fields of a form (one that is named twice becomes a list)."""
    match _media_type(request) if raw else _JSON:
        case "application/json":
            value, spotless = parsing.load(raw)
            errors = [] if spotless else parsing.faults(value)
        case "application/x-www-form-urlencoded":
            value = _form(raw)
            errors = parsing.faults(value)
        case "multipart/form-data":
            value = _fields([(name, text) for name, texts in request.POST.lists() for text in texts])
            errors = parsing.faults(value)
        case _:
            raise Refusal("unsupported_media_type", "Send JSON or a form.")
    if errors:
        raise Refusal("invalid", f"{errors[0]['pointer'] or 'The body'}: {errors[0]['detail']}", errors=errors)
    parsing.check_inline(value, "")
    return value


def _form(raw: bytes) -> dict[str, Any]:
    try:
        pairs = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(raw),
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:  # also what UnicodeDecodeError is
        raise Refusal("malformed", "The body is not a form in UTF-8.") from None
    return _fields(pairs)


def _fields(pairs: list[tuple[str, str]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, text in pairs:
        if name not in fields:
            fields[name] = text
        elif isinstance(fields[name], list):
            fields[name].append(text)
        else:
            fields[name] = [fields[name], text]
    return fields


def _media_type(request: HttpRequest) -> str:
    """The media type without its parameters. JSON is UTF-8 by its RFC; whoever says otherwise is refused."""
    media, _, rest = request.META.get("CONTENT_TYPE", "").partition(";")
    media = media.strip().lower()
    charset = next(
        (part.split("=", 1)[1] for part in rest.split(";") if part.strip().lower().startswith("charset=")), ""
    )
    if media == _JSON and charset.strip(' "').lower() not in ("", "utf-8", "utf8", "us-ascii"):
        return f"{media}; charset={charset}"
    return _JSON if media.startswith("application/") and media.endswith("+json") else media


def query(request: HttpRequest, type_: type[T]) -> T:
    """The query as its struct: unknown names, names given twice and what the database cannot hold are 422."""
    given: dict[str, Any] = {}
    for name, texts in request.GET.lists():
        if len(texts) != 1:
            raise invalid(f"/{parsing.escape(name)}", "This parameter is given more than once.")
        given[name] = texts[0]
    if errors := parsing.faults(given):
        raise Refusal("invalid", f"{errors[0]['pointer']}: {errors[0]['detail']}", errors=errors)
    limit = given.get("limit", "")
    if limit.isascii() and limit.isdigit() and len(limit) < 10:
        given["limit"] = int(limit)  # the one number among the parameters; leniency for all would read times as numbers
    result: T = parsing.in_utc(parsing.convert(given, type_))
    return result


def body_digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def webhook_id(request: HttpRequest, raw: bytes) -> str:
    """What tells a callback from its repetitions: the sender's id (Standard Webhooks), else the body's digest."""
    given = request.META.get("HTTP_WEBHOOK_ID")
    if given is None:
        return f"sha256:{body_digest(raw)}"
    if not 1 <= len(given) <= 200 or not given.isprintable():
        raise invalid("", "The header webhook-id has 1 to 200 printable characters.")
    return str(given)
