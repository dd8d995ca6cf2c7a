"""What an endpoint is: who may call, what it takes, what it answers; and the one way in which it is done.

A function with `@get` or `@post` is an operation; `resource` makes the DRF view of the operations at one address.
The same description gives the OpenAPI schema (see `schema`). No operation lives here.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path
from rest_framework.exceptions import MethodNotAllowed
from rest_framework.request import Request
from rest_framework.views import APIView

from rehydrate import cooperative, wakeups
from rehydrate.api import auth, idempotency, parsing, problems, schema
from rehydrate.api.idempotency import Grant, Outcome
from rehydrate.callers import Caller
from rehydrate.core.refusals import Refusal, not_found
from rehydrate.rights import Outdated

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A body with another status than the operation's first one, or with what it grants."""

    body: Any
    status: int = 200


Limit = Annotated[int, msgspec.Meta(ge=1, le=200)]
Cursor = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]


class Paged(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`cursor` is the `next` of the page before; `limit` at most 200."""

    cursor: Cursor | msgspec.UnsetType = msgspec.UNSET
    limit: Limit = 50

    def page(self) -> dict[str, Any]:
        """As selectors take it: the filters that were given, the cursor, the limit."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not msgspec.UNSET}
        return {"limit": given.pop("limit"), "cursor": given.pop("cursor", None), "filters": given}


class Payload(msgspec.Struct):
    """What came in at a callback URL, what tells it from its repetitions, and the address it came from."""

    value: Any
    webhook_id: str
    address: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One method at one address.

    `act(caller, *ids, body or query)` gives the body, or an `Answer`. `answers` are the statuses of success with their
    shapes, the usual one first; `refuses` the statuses of refusal beyond those that `method` and `body` bring along.
    """

    method: str
    name: str
    summary: str
    description: str
    act: Callable[..., Any]
    answers: Mapping[int, Any]
    refuses: frozenset[int]
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    people_only: bool = False
    grants: Callable[[Any, Any, Mapping[str, str]], Grant | None] | None = None
    #: For a long poll: what hears of news for this caller and body, whose `wait` is how many seconds it may take.
    polls: Callable[[Caller, Any], wakeups.Ear] | None = None
    #: True where the operation commits by itself, and repeating it does no harm.
    apart: bool = False
    #: True for what a run consists of: it is carried out on the event loop where there is one (see `cooperative`), and
    #: a caller's rights are confirmed beside what is read, before anything is decided, written or answered.
    on_the_loop: bool = False
    #: False at addresses that are secret by themselves (callback URLs).
    signed_in: bool = True
    tag: str = ""

    @property
    def free_body(self) -> bool:
        """True where the body is anything, JSON or a form."""
        return self.body is Payload

    @property
    def once(self) -> bool:
        """True where an Idempotency-Key is heeded."""
        return self.method == "POST"


def get(
    *, tag: str, answers: Mapping[int, Any], refuses: tuple[int, ...] = (), query: type[msgspec.Struct] | None = None
) -> Callable[[Callable[..., Any]], Operation]:
    """A read. It changes nothing (rule 12)."""

    def describe(act: Callable[..., Any]) -> Operation:
        refusals = {401, 403, 422, 429, 503, *refuses}
        return Operation(
            method="GET", act=act, answers=answers, refuses=frozenset(refusals), query=query, tag=tag, **_words(act)
        )

    return describe


def post(
    *,
    tag: str,
    body: type[msgspec.Struct],
    answers: Mapping[int, Any],
    refuses: tuple[int, ...] = (),
    people_only: bool = False,
    grants: Callable[[Any, Any, Mapping[str, str]], Grant | None] | None = None,
    polls: Callable[[Caller, Any], wakeups.Ear] | None = None,
    apart: bool = False,
    on_the_loop: bool = False,
    signed_in: bool = True,
) -> Callable[[Callable[..., Any]], Operation]:
    """A change, with a JSON body and an Idempotency-Key."""

    def describe(act: Callable[..., Any]) -> Operation:
        refusals = {400, 409, 413, 415, 422, 429, 503, *refuses} | ({401, 403} if signed_in else set())
        return Operation(
            method="POST",
            act=act,
            answers=answers,
            refuses=frozenset(refusals),
            body=body,
            people_only=people_only,
            grants=grants,
            polls=polls,
            apart=apart,
            on_the_loop=on_the_loop,
            signed_in=signed_in,
            tag=tag,
            **_words(act),
        )

    return describe


def _words(act: Callable[..., Any]) -> dict[str, Any]:
    summary, _, rest = (act.__doc__ or "").strip().partition("\n")
    return {
        "name": act.__name__,
        "summary": summary.strip().rstrip("."),
        "description": re.sub(r"\s+", " ", rest).strip(),
    }


class Endpoint(APIView):
    """The operations at one address, each carried out as: who, what, once, answer."""

    operations: ClassVar[Mapping[str, Operation]] = {}
    schema = schema.OperationSchema()
    authentication_classes = ()
    permission_classes = ()
    throttle_classes = ()

    # DRF's own authenticators, negotiation, permissions and throttles make way for the lean steps in `carry_out`.
    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        if request.method not in (*self.operations, "OPTIONS") and (
            request.method != "HEAD" or "GET" not in self.operations
        ):
            raise MethodNotAllowed(request.method or "")

    def handle_exception(self, exc: Exception) -> HttpResponse:  # type: ignore[override]
        response = problems.for_exception(exc, self.request._request)
        if response.status_code == 405:
            response.headers["Allow"] = ", ".join(self.allowed_methods)
        return response

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        response.headers["Cache-Control"] = "no-store"
        return response

    def options(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponse:  # type: ignore[override]
        return HttpResponse(status=204, headers={"Allow": ", ".join(self.allowed_methods)})

    def _answer(self, request: Request, **ids: str) -> HttpResponse:
        http = request._request
        return carry_out(http, self.operations["GET" if http.method == "HEAD" else http.method or ""], ids)


def carry_out(http: HttpRequest, operation: Operation, ids: Mapping[str, str]) -> HttpResponse:
    """The answer to a request for this operation, with the ids of its address. Raises what `problems` puts in words."""
    # The body is read whatever comes of it: a connection with an unread body cannot be kept alive.
    raw = parsing.read(http) if operation.body else b""
    act = functools.partial(_carry_out, http, operation, ids, raw)
    if not operation.signed_in:
        return act(None)
    began = time.monotonic()
    caller = auth.caller_of(http, trusting=operation.on_the_loop)
    try:
        response = act(caller)
    except Exception as error:
        # Where the database did not answer, nobody knows what was saved: it is not done again.
        if (caller.confirmed or isinstance(error, DatabaseError)) and not isinstance(error, Outdated):
            raise
    else:
        if not caller.confirmed:
            auth.caller_of(http)  # nobody is answered whose key opens nothing any more
        return response
    return act(auth.caller_of(http), waited=round(time.monotonic() - began))


def _carry_out(
    http: HttpRequest,
    operation: Operation,
    ids: Mapping[str, str],
    raw: bytes,
    caller: Caller | None,
    *,
    waited: int = 0,
) -> HttpResponse:
    """`waited` are the seconds that a long poll has waited already."""
    try:
        given = _given(http, operation, raw)
        named = {name: _checked(name, value) for name, value in ids.items()}
    except Refusal:
        if operation.people_only and caller is not None and not caller.is_person:
            raise Refusal("agents_cannot_decide", "Only people may do this.") from None
        raise
    if operation.body is None:
        return answer(operation, operation.act(caller, **named, query=given)).response
    if operation.polls is not None and waited:
        given = msgspec.structs.replace(given, wait=max(0, given.wait - waited))
    return _post(http, operation, caller, named, given, raw)


def _given(http: HttpRequest, operation: Operation, raw: bytes) -> Any:
    query = (
        parsing.query(http, operation.query or NoQuery) if http.META.get("QUERY_STRING") or operation.query else None
    )
    if operation.body is None:
        return query
    if operation.free_body:
        return Payload(parsing.payload(http, raw), parsing.webhook_id(http, raw), http.META.get("REMOTE_ADDR", ""))
    return parsing.body(http, raw, operation.body)


def _post(
    http: HttpRequest, operation: Operation, caller: Caller | None, ids: dict[str, str], given: Any, raw: bytes
) -> HttpResponse:
    def act(given: Any = given, *, last: bool = True) -> Outcome:
        outcome = answer(operation, operation.act(caller, **ids, body=given), given, ids)
        return outcome if last or outcome.response.status_code != 204 else dataclasses.replace(outcome, final=False)

    def act_or_refuse(given: Any = given, *, last: bool = True) -> Outcome:
        try:
            return act(given, last=last)
        except Refusal as refusal:
            if refusal.status in (429, 503) or not (caller is None or caller.confirmed):
                raise
            return Outcome(problems.for_refusal(refusal))

    key = http.META.get(idempotency.HEADER)
    if key is None:
        return act().response
    once = idempotency.Request(
        caller=_who(caller),
        path=idempotency.short(http.path),
        key=idempotency.checked_key(key),
        digest=parsing.body_digest(raw),
    )
    if operation.apart:
        return idempotency.once_apart(once, act_or_refuse).response
    if operation.polls is not None and caller is not None and given.wait:
        return _poll(once, functools.partial(operation.polls, caller), given, act_or_refuse).response
    return _once(once, act_or_refuse).response


def _once(request: idempotency.Request, act: Callable[[], Outcome]) -> Outcome:
    return (idempotency.once_on_the_loop if cooperative.on_the_loop() else idempotency.once)(request, act)


def _poll(
    once: idempotency.Request, listen: Callable[[Any], wakeups.Ear], given: Any, act: Callable[..., Outcome]
) -> Outcome:
    """A long poll with an Idempotency-Key: each look is a transaction of its own, with the record of what it found."""
    try:
        ear = listen(given)
    except Refusal:
        return _once(once, act)  # it refuses the same, and that is kept
    look = msgspec.structs.replace(given, wait=0)
    end = time.monotonic() + given.wait
    with ear:
        waits = ear.quiet and not cooperative.aside(idempotency.known, once)
        while True:
            if waits and not wakeups.rest(ear, end - time.monotonic()):
                if ear.left:  # nobody hears the answer: nothing is done for them, and nothing is kept
                    return Outcome(HttpResponse(status=204), final=False)
                end = 0.0
            waits = True
            outcome = _once(once, functools.partial(act, look, last=time.monotonic() >= end))
            if outcome.final:
                return outcome


def _who(caller: Caller | None) -> str:
    """Whose Idempotency-Keys these are. Two agents may share a name, so it is the key that counts there."""
    if caller is None:
        return "hook"
    return f"{caller.kind}:{caller.key_id if caller.kind == 'agent' else caller.id}"


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """For operations without a query: any parameter is unknown."""


def answer(operation: Operation, result: Any, given: Any = None, ids: Mapping[str, str] | None = None) -> Outcome:
    """What an operation gave, as JSON with its status, and what it grants."""
    status = next(iter(operation.answers))
    if isinstance(result, Answer):
        status, result = result.status, result.body
    grant = operation.grants(result, given, ids or {}) if operation.grants and result is not None else None
    if result is None:
        response = HttpResponse(status=204)
        del response.headers["Content-Type"]
    else:
        response = HttpResponse(msgspec.json.encode(result), status=status, content_type="application/json")
    return Outcome(response, grant)


def _checked(name: str, value: str) -> str:
    """An id of the address. What can be no id is simply not there."""
    if name in ("key", "token"):
        if len(value) > 200 or "\x00" in value:
            raise not_found("effect" if name == "key" else "callback")
        return value
    if not _UUID.fullmatch(value):
        raise not_found(name.removesuffix("_id"))
    return value.lower()


#: All operations that answer somewhere, in the order of their addresses.
OPERATIONS: Final[list[Operation]] = []


def resource(route: str, *operations: Operation) -> URLPattern:
    """The operations at one address, as Django routes it; ids are named in angle brackets."""
    OPERATIONS.extend(operations)
    methods = {operation.method: operation for operation in operations}
    handlers = {method.lower(): Endpoint._answer for method in methods}
    view: type[Endpoint] = type("Endpoint", (Endpoint,), {"operations": methods, **handlers, "__doc__": ""})
    return path(route, view.as_view(), name=operations[0].name)
