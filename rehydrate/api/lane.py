"""The way of a request that brings a key: past what only browsers need. It has no session, no language, no messages.

A key is sent by nobody unasked, so nothing of what guards a session is lost (see `auth.caller_of`).
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from django.db import close_old_connections
from django.http import HttpRequest, HttpResponse
from django.middleware.security import SecurityMiddleware
from django.urls import Resolver404, URLPattern, URLResolver, get_resolver, resolve
from django.utils.log import log_response

from rehydrate.api import endpoint, problems
from rehydrate.api.endpoint import Operation

GetResponse = Callable[[HttpRequest], HttpResponse]

_API: Final = "/api/v1/"
#: No answer to a key is a page, nor is it anybody else's.
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def with_key(get_response: GetResponse) -> GetResponse:
    """Middleware. A request with a key goes straight to its view, which takes its own exceptions: what `in_front_of`
    leaves to Django, and all of them where there is no WSGI.
    """

    def middleware(request: HttpRequest) -> HttpResponse:
        if "HTTP_AUTHORIZATION" not in request.META or not request.path_info.startswith(_API):
            return get_response(request)
        try:
            found = resolve(request.path_info)
        except Resolver404:
            return get_response(request)
        request.resolver_match = found
        response: HttpResponse = found.func(request, *found.args, **found.kwargs)
        response.headers.setdefault("Content-Length", str(len(response.content)))
        for name, value in _HEADERS.items():
            response.headers[name] = value
        return response

    return middleware


def in_front_of(django: WSGIApplication) -> WSGIApplication:
    """An application that carries out operations for those who bring a key, and leaves all else to Django's.

    The answers are the same in both ways. Measured: Django's signals, middleware, resolver and views took a fifth of
    what such a request takes of this process.
    """
    addresses = Addresses(get_resolver())
    always = _always()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if "HTTP_AUTHORIZATION" not in environ or not path.startswith(_API) or environ.get("SCRIPT_NAME"):
            return django(environ, start_response)
        # An address in other than ASCII is none, or one of an effect; and reading a request decodes it in its place.
        found = addresses.find(environ["REQUEST_METHOD"], path) if path.isascii() else None
        if found is None:
            return django(environ, start_response)
        request = WSGIRequest(environ)
        if settings.SECURE_SSL_REDIRECT and not request.is_secure():
            return django(environ, start_response)
        response = _answer(request, *found)
        body = response.content
        headers = [*response.headers.items(), ("Content-Length", str(len(body))), *always]
        start_response(f"{response.status_code} {response.reason_phrase}", headers)
        return [body]

    return application


def _answer(request: WSGIRequest, operation: Operation, ids: Mapping[str, str]) -> HttpResponse:
    try:
        response = endpoint.carry_out(request, operation, ids)
    except Exception as error:
        response = problems.for_exception(error, request)
    finally:
        request.close()
        close_old_connections()  # as Django does at the end of each request
    if response.status_code >= 500:
        log_response("%s: %s", response.reason_phrase, request.path, response=response, request=request)
    return response


def _always() -> list[tuple[str, str]]:
    """The headers that are the same for all answers, those of Django's security middleware among them."""
    request = WSGIRequest({"REQUEST_METHOD": "GET", "wsgi.input": io.BytesIO(), "wsgi.url_scheme": "https"})
    response = HttpResponse(headers=_HEADERS)
    SecurityMiddleware(lambda _: response).process_response(request, response)
    del response.headers["Content-Type"]
    return list(response.headers.items())


class Addresses:
    """Where operations are: the words of an address in their places, with room for ids between them.

    Not for ids that may have slashes in them; those are few, and Django's resolver finds them.
    """

    def __init__(self, resolver: URLResolver) -> None:
        self._known: dict[tuple[str | None, ...], tuple[list[str], Mapping[str, Operation]]] = {}
        for route, operations in _routes(resolver):
            segments = route.split("/")
            names = [segment[5:-1] for segment in segments if segment.startswith("<str:")]
            words = tuple(None if segment.startswith("<str:") else segment for segment in segments)
            if "<path:" not in route:
                self._known[words] = names, operations
        self._words = {word for words in self._known for word in words}

    def find(self, method: str, path: str) -> tuple[Operation, dict[str, str]] | None:
        """The operation, and the ids in its address."""
        segments = path.removeprefix("/").split("/")
        found = self._known.get(tuple(segment if segment in self._words else None for segment in segments))
        ids = [segment for segment in segments if segment not in self._words]
        if found is None or not all(ids) or (operation := found[1].get(method)) is None:
            return None
        return operation, dict(zip(found[0], ids, strict=True))


def _routes(resolver: URLResolver, above: str = "") -> Iterator[tuple[str, Mapping[str, Operation]]]:
    for pattern in resolver.url_patterns:
        route = above + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern, route)
        elif isinstance(pattern, URLPattern):
            view = getattr(pattern.callback, "view_class", None)
            if view is not None and issubclass(view, endpoint.Endpoint):
                yield route, view.operations
