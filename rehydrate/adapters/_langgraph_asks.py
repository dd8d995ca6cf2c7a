"""What a LangGraph interrupt asks, as approvals for people, and their answers as the interrupt wants them.

Pure: nothing is read or sent here, and LangGraph is not imported. The forms, and where each is defined:

- `ask()` of this adapter (`langgraph.py`);
- `HumanInTheLoopMiddleware`, batched: `langchain.agents.middleware.human_in_the_loop.HITLRequest` -> `HITLResponse`;
- the same per call: `ToolApprovalRequest` -> one `Decision`, whose allowed types are in the response schema;
- the older inbox form: `langgraph.prebuilt.interrupt.HumanInterrupt`, one or a list -> a list of `HumanResponse`;
- anything else, as `interrupt(value)` takes it: yes is True, no is False, a written answer is itself, nobody is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rehydrate.client import Answer, Approval, Effect, NotRetryable
from rehydrate.client.shapes import Due

Json = dict[str, Any]

ASK = "rehydrate.ask"
# Limits of the ledger's ask (`rehydrate.core.commands`).
SUMMARY, DETAILS, LABEL = 4000, 100, 500
# How LangGraph's users name the sentence among the fields of an interrupt, the likeliest first.
SENTENCES = ("question", "summary", "message", "prompt", "instruction", "instructions", "task", "description", "title")
TEXT_ANSWER = {"type": "string", "title": "Answer"}


class Unanswerable(NotRetryable):
    """The interrupt does not allow the answer that was given; a person has to take the run over."""


@dataclass(frozen=True)
class Terms:
    """On what terms a flow's questions are asked; `waits` names the wait of single tools, actions or nodes."""

    wait: str = "approval"
    waits: Mapping[str, str] = field(default_factory=dict)
    due: Due = "3d"
    on_timeout: str | None = None
    on_reject: str | None = "continue"

    def approval(self, key: str, subject: str, summary: str, **fields: Any) -> Approval:
        name = self.waits.get(subject, self.wait)
        given = {"on_timeout": self.on_timeout, "on_reject": self.on_reject, **fields}
        return Approval(name, given.pop("due", self.due), key=key, summary=summary[:SUMMARY], **given)


@dataclass(frozen=True)
class Pending:
    """An interrupt that waits for its answer: its request, and where in the thread it stands."""

    id: str
    key: str  # of (thread, checkpoint, interrupt id, digest of the request): the same wait on each reading
    node: str
    value: Any
    response_schema: Json | None
    tool_calls: Sequence[Mapping[str, Any]] = ()  # of the last message before it
    effect_key: Callable[[str, str], str] = "{}/{}".format  # of an action and what it is one of


@dataclass(frozen=True)
class Question:
    """One interrupt: what people are asked, and what its resume value is once all of that is answered."""

    asks: Sequence[Approval]
    value: Callable[[Sequence[Answer]], Any]


Translate = Callable[[Pending, Terms], Question | None]


def question(pending: Pending, terms: Terms) -> Question:
    """The question of an interrupt in whichever form it comes."""
    value = pending.value
    if isinstance(value, Mapping):
        if value.get("type") == ASK:
            return _of_ask(pending, terms)
        if "action_requests" in value and "review_configs" in value:
            return _of_batch(pending, terms)
        if value.get("type") == "tool_approval":
            return _of_call(pending, terms)
    requests = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if requests and all(isinstance(r, Mapping) and "action_request" in r and "config" in r for r in requests):
        return _of_inbox(pending, requests, terms)
    return _of_anything(pending, terms)


# --- `ask()` ----------------------------------------------------


def asked(name: str, effect: Effect | None, effect_key: str | None, fields: Mapping[str, Any]) -> Json:
    """The interrupt value of `ask()`: plain JSON, as it stands in the checkpointer."""
    value: Json = {"type": ASK, "name": name, **plain(fields)}
    if effect is not None:
        names = ("action", "arguments", "resource", "amount", "impact", "reversible", "undo", "approval", "repeat")
        value["effect"] = {"key": effect_key, **plain({name: getattr(effect, name) for name in names})}
    return value


def _of_ask(pending: Pending, terms: Terms) -> Question:
    fields = {name: part for name, part in pending.value.items() if name != "type"}
    effect = fields.pop("effect", None)
    if effect is not None:
        for name in ("amount", "undo"):  # pairs, which JSON makes lists of
            effect = {**effect, name: tuple(effect[name]) if isinstance(effect.get(name), list) else effect.get(name)}
    due, name = fields.pop("due", None) or terms.due, fields.pop("name")
    given = {"on_timeout": terms.on_timeout, "on_reject": terms.on_reject, **fields}
    approval = Approval(name, due, key=pending.key, effect=Effect(**effect) if effect else None, **given)
    return Question([approval], lambda answers: as_wait(answers[0]))


def as_wait(answer: Answer) -> Json:
    """An answer as JSON, for the checkpointer; `rehydrate.client.shapes.answer_of` makes it an `Answer` again."""
    return {name: getattr(answer, name) for name in Answer.__dataclass_fields__}


# --- HumanInTheLoopMiddleware ----------------------------------------------------


def _of_batch(pending: Pending, terms: Terms) -> Question:
    """Decisions go by position, and a wrong count would be saved for good: so each action has an ask of its own."""
    requests = list(pending.value["action_requests"])
    allowed = {config["action_name"]: config["allowed_decisions"] for config in pending.value["review_configs"]}
    calls = list(pending.tool_calls)
    asks = []
    for position, request in enumerate(requests):
        call = next((c for c in calls if (c["name"], c["args"]) == (request["name"], request["args"])), None)
        if call is not None:
            calls.remove(call)
        subject = f"call/{call['id']}" if call is not None else f"{pending.id}/{position}"
        key = f"{pending.key}/{position}" if len(requests) > 1 else pending.key
        asks.append(
            _of_tool(pending, terms, request, key=key, subject=subject, allowed=allowed.get(request["name"]) or [])
        )

    def value(answers: Sequence[Answer]) -> Json:
        return {
            "decisions": [
                _decision(answer, request["name"], allowed.get(request["name"]) or [])
                for answer, request in zip(answers, requests, strict=True)
            ]
        }

    return Question(asks, value)


def _of_call(pending: Pending, terms: Terms) -> Question:
    request = pending.value
    allowed, schema = _decisions_of(pending.response_schema or {})
    ask = _of_tool(
        pending,
        terms,
        request,
        key=pending.key,
        subject=f"call/{request['tool_call_id']}",
        allowed=allowed,
        schema=schema,
    )
    return Question([ask], lambda answers: _decision(answers[0], request["name"], allowed))


def _decisions_of(schema: Json) -> tuple[list[str], Json | None]:
    """The decisions that a `ToolApprovalRequest` allows, and the schema of its arguments if they can be edited."""
    parts = schema.get("$defs") or {}
    types = [part.get("properties", {}).get("type", {}).get("const") for part in (*parts.values(), schema)]
    allowed = [type_ for type_ in ("approve", "edit", "reject", "respond") if type_ in types]
    reference = parts.get("EditedAction", {}).get("properties", {}).get("args", {}).get("$ref", "")
    arguments = parts.get(reference.removeprefix("#/$defs/"))
    return allowed, {**arguments, "$defs": parts} if arguments else None


def _of_tool(
    pending: Pending,
    terms: Terms,
    request: Mapping[str, Any],
    *,
    key: str,
    subject: str,
    allowed: Sequence[str],
    schema: Json | None = None,
) -> Approval:
    name = request["name"]
    action = action_of(name)
    return terms.approval(
        key,
        name,
        _described(request.get("description"), name),
        effect=Effect(
            action,
            plain(request["args"]),
            key=pending.effect_key(action, subject),
            repeat=True,  # the same call may be wanted again, and people are asked about each
        ),
        choices=list(allowed),
        schema=schema,
        response_schema=TEXT_ANSWER if "respond" in allowed else None,
        who="reviewers",
    )


def _described(description: str | None, name: str) -> str:
    """The developer's words for the action, down to the first empty line; the middleware's own repeat the arguments."""
    first = (description or "").strip().split("\n\n")[0].strip()
    generic = not first or first == "Tool execution requires approval"
    return f"The agent wants to run “{words(name)}”." if generic else first


def _decision(answer: Answer, name: str, allowed: Sequence[str]) -> Json:
    """One `Decision`. Raises `Unanswerable` for what the middleware would refuse."""
    if answer.edited:
        decision: Json = {"type": "edit", "edited_action": {"name": name, "args": answer.arguments or {}}}
    elif answer.authorised:
        decision = {"type": "approve"}
    elif answer.choice == "respond":
        decision = {"type": "respond", "message": _text(answer.response)}
    else:
        decision = {"type": "reject", **({"message": why} if (why := _why(answer)) else {})}
    if decision["type"] not in allowed:
        raise Unanswerable(f"{words(name)} allows {', '.join(allowed)}, and the answer was {_how(answer)}.")
    return decision


# --- the older inbox form ----------------------------------------------------

_INBOX = {"allow_accept": "approve", "allow_edit": "edit", "allow_ignore": "reject", "allow_respond": "respond"}


def _of_inbox(pending: Pending, requests: Sequence[Any], terms: Terms) -> Question:
    asks = []
    for position, request in enumerate(requests):
        wanted = request["action_request"]
        allowed = [choice for flag, choice in _INBOX.items() if request["config"].get(flag)]
        tool = {"name": wanted["action"], "args": wanted.get("args") or {}, "description": request.get("description")}
        key = f"{pending.key}/{position}" if len(requests) > 1 else pending.key
        asks.append(
            _of_tool(pending, terms, tool, key=key, subject=f"{pending.id}/{position}", allowed=allowed or ["approve"])
        )

    def value(answers: Sequence[Answer]) -> list[Json]:
        return [
            _inbox_response(answer, request["action_request"])
            for answer, request in zip(answers, requests, strict=True)
        ]

    return Question(asks, value)


def _inbox_response(answer: Answer, wanted: Mapping[str, Any]) -> Json:
    if answer.edited:
        return {"type": "edit", "args": {"action": wanted["action"], "args": answer.arguments or {}}}
    if answer.authorised:
        return {"type": "accept", "args": None}
    if answer.choice == "respond":
        return {"type": "response", "args": _text(answer.response)}
    return {"type": "ignore", "args": None}


# --- anything else ----------------------------------------------------


def _of_anything(pending: Pending, terms: Terms) -> Question:
    value = plain(pending.value)
    summary, details = f"The agent asks at “{words(pending.node)}”.", {}
    if isinstance(value, str):
        summary = value
    elif isinstance(value, Mapping):
        named = next((name for name in SENTENCES if isinstance(value.get(name), str) and value[name].strip()), None)
        summary = value[named] if named else summary
        details = {words(name): part for name, part in value.items() if name != named}
    elif value is not None:
        details = {"Asked": value}
    fits = pending.response_schema is not None  # a form of its own, which neither yes nor no would fit
    ask = terms.approval(
        pending.key,
        pending.node,
        summary,
        details=list(details.items())[:DETAILS],
        choices=["respond"] if fits else ["approve", "reject", "respond"],
        response_schema=pending.response_schema,
        who="reviewers",
    )
    return Question([ask], lambda answers: _plain_answer(answers[0]))


def _plain_answer(answer: Answer) -> Any:
    if answer.choice == "respond":
        return answer.response
    return True if answer.authorised else False if answer.rejected else None


# --- words and values ----------------------------------------------------


def action_of(tool: str) -> str:
    """The action `system.name` of a tool: its own name where it has that form, as in `crm.create`."""
    system, dot, name = tool.partition(".")
    return tool if system and dot and name else f"tool.{tool}"


def words(name: str) -> str:
    return str(name).replace("_", " ").replace(".", " ").strip()[:LABEL]


def plain(value: Any) -> Any:
    """The value as JSON has it; what JSON does not know becomes its text."""
    return json.loads(json.dumps(value, default=_as_json))


def _as_json(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # a message, or another pydantic model
    return dump(mode="json") if callable(dump) else str(value)


def _text(response: Any) -> str:
    return response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)


def _why(answer: Answer) -> str | None:
    if answer.rejected:
        return answer.reason or answer.comment
    return "Nobody answered in time. This is nobody's no." if answer.timed_out else f"The question is {answer.status}."


def _how(answer: Answer) -> str:
    return answer.choice or answer.status
