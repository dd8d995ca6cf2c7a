"""The way of a request that brings a key: past what only browsers need. It has no session, no language, no messages.

A key is sent by nobody unasked, so nothing of what guards a session is lost (see `auth.caller_of`). What a run consists
of (opening, appending, deciding, claiming) is carried out on the web server's event loop, as `cooperative` has it; all
else in a thread.
"""

import functools
import io
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Final
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from a2wsgi.wsgi import WSGIMiddleware, build_environ
from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from django.db import close_old_connections
from django.http import HttpRequest, HttpResponse
from django.middleware.security import SecurityMiddleware
from django.urls import Resolver404, URLPattern, URLResolver, get_resolver, resolve
from django.utils.log import log_response

from rehydrate import cooperative
from rehydrate.api import endpoint, problems
from rehydrate.api.endpoint import Operation

GetResponse = Callable[[HttpRequest], HttpResponse]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApplication = Callable[[dict[str, Any], Receive, Send], Coroutine[Any, Any, None]]

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
    lane = _Lane()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        found = lane.find(environ) if "HTTP_AUTHORIZATION" in environ else None
        if found is None:
            return django(environ, start_response)
        try:
            response = _answer(*found)
        finally:
            close_old_connections()  # as Django does at the end of each request
        body = response.content
        headers = [*response.headers.items(), ("Content-Length", str(len(body))), *lane.always]
        start_response(f"{response.status_code} {response.reason_phrase}", headers)
        return [body]

    return application


def in_threads(wsgi: WSGIApplication, number: int) -> ASGIApplication:
    """The application, each request in one of so many threads."""
    threads: Any = WSGIMiddleware(wsgi, workers=number)  # type: ignore[arg-type] # typed, but in its own way

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        whole = scope["type"] != "http"

        async def received() -> Message:
            nonlocal whole
            message = await receive()
            if message["type"] == "http.disconnect" and not whole:
                raise ConnectionResetError("the body broke off")
            whole = whole or not message.get("more_body", False)
            return message

        await threads(scope, received, send)

    return application


#: Longer bodies are gone through in a thread, where they keep nobody else waiting (bytes).
SHORT: Final = 32_768


def on_the_loop(others: ASGIApplication) -> ASGIApplication:
    """An application that carries out on the event loop what is made for it (`Operation.on_the_loop`), for those who
    bring a key; and leaves all else to others.

    The answers are the same in both ways.
    """
    lane = _Lane()
    always = _encoded(lane.always)

    async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await others(scope, receive, send)
        # WSGI writes "-" as "_": what a proxy strips or sets must not come by under the other name.
        scope["headers"] = headers = [(name, value) for name, value in scope["headers"] if b"_" not in name]
        names = dict(headers)
        if b"authorization" not in names or not 0 < int(names.get(b"content-length", 0)) <= SHORT:
            return await others(scope, receive, send)
        body = io.BytesIO()
        environ: WSGIEnvironment = dict(build_environ(scope, body))  # type: ignore[arg-type] # it only holds the body
        found = lane.find(environ)
        if found is None or not found[1].on_the_loop:
            return await others(scope, receive, send)
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body.write(message.get("body", b""))
            more = message.get("more_body", False)
        found[0]._body = body.getvalue()  # as Django keeps what it has read
        cooperative.hung_up.set(functools.partial(_disconnected, receive))
        response = await cooperative.carry_out(_answer, *found)
        content = response.content
        headers = [*_encoded(response.headers.items()), (b"content-length", b"%d" % len(content)), *always]
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        return await send({"type": "http.response.body", "body": content})

    return application


def _encoded(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin1"), value.encode("latin1")) for name, value in headers]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Lane:
    def __init__(self) -> None:
        self._addresses = Addresses(get_resolver())
        self.always = _always()
        """The headers that are the same for all answers."""

    def find(self, environ: WSGIEnvironment) -> tuple[WSGIRequest, Operation, Mapping[str, str]] | None:
        """The request, the operation that it asks for, and the ids in its address; None where it is Django's."""
        path = environ["PATH_INFO"]
        # An address in other than ASCII is none, or one of an effect; and reading a request decodes it in its place.
        if not path.startswith(_API) or environ.get("SCRIPT_NAME") or not path.isascii():
            return None
        if (found := self._addresses.find(environ["REQUEST_METHOD"], path)) is None:
            return None
        request = WSGIRequest(environ)
        if settings.SECURE_SSL_REDIRECT and not request.is_secure():
            return None
        return request, *found


def _answer(request: WSGIRequest, operation: Operation, ids: Mapping[str, str]) -> HttpResponse:
    try:
        response = endpoint.carry_out(request, operation, ids)
    except Exception as error:
        response = problems.for_exception(error, request)
    finally:
        request.close()
    if response.status_code >= 500:
        log_response("%s: %s", response.reason_phrase, request.path, response=response, request=request)
    return response


def _always() -> list[tuple[str, str]]:
    """Those of Django's security middleware are among them."""
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
