"""Every refusal and fault as `application/problem+json` (RFC 9457). It words problems; it does not decide on any."""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from django.core.exceptions import BadRequest, PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.request import UnreadablePostError
from django.views.decorators.csrf import csrf_exempt
from rest_framework import exceptions as drf

from rehydrate.core.refusals import Refusal

log = logging.getLogger("rehydrate.api")

CONTENT_TYPE: Final = "application/problem+json"

#: Codes that only HTTP knows; those of the contract are in `rehydrate.core.refusals`.
_CODES: Final = {
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid",
    429: "rate_limited",
    500: "internal_error",
    503: "unavailable",
}


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> HttpResponse:
    """A problem document. `extra` holds members of its own: `errors`, or the object as it stands."""
    body = {
        "type": f"urn:rehydrate:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        **(extra or {}),
    }
    response = HttpResponse(msgspec.json.encode(body), status=status, content_type=CONTENT_TYPE)
    for name, value in (headers or {}).items():
        response.headers[name] = value
    return response


def for_refusal(refusal: Refusal) -> HttpResponse:
    """The core's no as it goes over the wire, with what it says about the object as it stands."""
    headers = {}
    if refusal.status in (429, 503):
        headers["Retry-After"] = str(refusal.extra.get("retry_after", 1))
    elif refusal.status == 401:
        headers["WWW-Authenticate"] = WWW_AUTHENTICATE
    extra = {name: value for name, value in refusal.extra.items() if name not in _RESERVED}
    if refusal.status == 422:
        extra.setdefault("errors", [{"pointer": "", "detail": refusal.message}])
    return problem(refusal.status, refusal.code, refusal.message, headers=headers, extra=extra)


_RESERVED: Final = frozenset({"type", "title", "status", "detail", "code", "retry_after"})
WWW_AUTHENTICATE: Final = 'Bearer realm="rehydrate"'


def for_exception(error: Exception, request: HttpRequest | None = None) -> HttpResponse:
    """Whatever a view raised, as a problem. Faults of our own are logged and told without their insides."""
    match error:
        case Refusal():
            return for_refusal(error)
        case drf.APIException():
            return _for_drf(error)
        case Http404():
            return problem(404, "not_found", "There is nothing at this address.")
        case PermissionDenied():
            return problem(403, "forbidden", str(error) or "This is not allowed.")
        case RequestDataTooBig():
            return problem(413, "too_large", "A body may have at most 1 MiB.")
        case UnreadablePostError() | MultiPartParserError():
            return problem(400, "malformed", "The body cannot be read: it broke off, or is no form.")
        case BadRequest() | SuspiciousOperation():
            return problem(400, "malformed", str(error) or "The request cannot be read.")
        case OperationalError() | InterfaceError():
            # Gone, restarting, out of connections, a deadlock or a time-out: it will pass. Where it went away in the
            # middle of a commit, nobody knows what was written.
            log.warning("database: %s", error)
            detail = "The database did not answer. Try again with the same Idempotency-Key; without one, look first."
            return problem(503, "unavailable", detail, headers={"Retry-After": "1"})
        case _:
            log.error("%s %s", *_line(request), exc_info=error)
            detail = "Something went wrong in the server. Nothing was changed; the log says more."
            return problem(500, "internal_error", detail)


def _line(request: HttpRequest | None) -> tuple[str, str]:
    return (request.method or "", request.path) if request else ("", "")


def _for_drf(error: drf.APIException) -> HttpResponse:
    status = error.status_code
    detail = error.detail if isinstance(error.detail, str) else "The request is not valid."
    headers: dict[str, str] = {}
    match error:
        case drf.NotAuthenticated():
            detail = "Send a key: Authorization: Bearer <key>."
        case drf.Throttled():
            headers["Retry-After"] = str(int(getattr(error, "wait", None) or 1))
            detail = "Too many requests. Try again after the seconds that Retry-After says."
        case _:
            pass
    if status == 401:
        headers["WWW-Authenticate"] = WWW_AUTHENTICATE
    return problem(status, _CODES.get(status, "malformed"), str(detail), headers=headers)


@csrf_exempt
def nothing_here(request: HttpRequest) -> HttpResponse:
    """404 for every address under /api/ that is none."""
    return problem(404, "not_found", f"There is nothing at {request.path}. /api/docs/ lists the addresses.")
