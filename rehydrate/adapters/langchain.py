"""LangChain agents: their tool calls as effects of the ledger, so that no tool is run twice.

    agent = create_agent(model, tools, middleware=[HumanInTheLoopMiddleware(...), LedgerTools()], checkpointer=...)
    flow = GraphFlow(ledger, "assistant", agent)

`LedgerTools` comes after `HumanInTheLoopMiddleware`, whose asks then are about the very effects that run here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command
from pydantic import BaseModel, ValidationError

from rehydrate.adapters._langgraph_asks import action_of, plain
from rehydrate.adapters.langgraph import current_run, key_of
from rehydrate.client import Effect, EffectCall, Receipt

Result = ToolMessage | Command[Any]


class ToolFailed(Exception):
    """The tool came back with an error, so whether it reached the outside is not known."""


class LedgerTools(AgentMiddleware[Any, Any, Any]):
    """Runs tools as effects; `tools` names those with effects outside (all when left out: reading ones, too).

    On a replay the model gets the recorded result and the tool is left alone. What a tool throws, or its node turns
    into an error message, leaves the outcome unknown; arguments that do not fit the tool never reach it.
    """

    def __init__(self, tools: Collection[str] | None = None) -> None:
        super().__init__()
        self._only = None if tools is None else frozenset(tools)

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]) -> Result:
        call = request.tool_call
        if (self._only is not None and call["name"] not in self._only) or not _fits(request.tool, call["args"]):
            return handler(request)
        run, action = current_run(), action_of(call["name"])
        came: list[Result] = []

        def do(_: EffectCall) -> Receipt:
            came.append(handler(request))
            message = came[0]
            if not isinstance(message, ToolMessage):
                return Receipt(str(call["id"]))
            if message.status == "error":
                raise ToolFailed(message.text)
            return Receipt(str(call["id"]), data={"content": plain(message.content)})

        receipt = run.effect(Effect(action, plain(call["args"]), key=key_of(run, action, f"call/{call['id']}")), do=do)
        if came:
            return came[0]
        return ToolMessage(receipt.get("content") or "Done.", name=call["name"], tool_call_id=call["id"])


def _fits(tool: BaseTool | None, arguments: dict[str, Any]) -> bool:
    """Whether the tool would take these arguments at all; what is no pydantic model is left to the tool."""
    schema = tool.tool_call_schema if tool is not None else None
    if not (isinstance(schema, type) and issubclass(schema, BaseModel)):
        return True
    try:
        schema.model_validate(arguments)
    except ValidationError:
        return False
    return True
