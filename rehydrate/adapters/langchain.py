"""LangChain agents: their tool calls as effects of the ledger, so that no tool is run twice.

    review = HumanInTheLoopMiddleware({"send_email": True})
    agent = create_agent(model, tools, middleware=[review, LedgerTools("send_email")], checkpointer=...)
    flow = GraphFlow(ledger, "assistant", agent)

`LedgerTools` comes after `HumanInTheLoopMiddleware`, whose asks then are about the very effects that run here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp
from langgraph.prebuilt.tool_node import ToolCallRequest
from langgraph.types import Command
from pydantic import BaseModel, ValidationError

from rehydrate.adapters._langgraph_asks import action_of, plain
from rehydrate.adapters.langgraph import current_run, key_of
from rehydrate.client import Effect, EffectCall, EffectFailed, NotRetryable, NotSent, Receipt

Result = ToolMessage | Command[Any]


class ToolFailed(Exception):
    """The tool came back with an error, so whether it reached the outside is not known."""


class ToolAsks(NotRetryable):
    """A tool that asks people by itself cannot be an effect: leave it out of LedgerTools, and use `effect` in it."""


class LedgerTools(AgentMiddleware[Any, Any, Any]):
    """Runs the tools of these names as effects: those that reach the outside. What only reads may run as often.

    On a replay the model gets the recorded result and the tool is left alone. What a tool throws, or its node turns
    into an error message, leaves the outcome unknown; arguments that do not fit the tool never reach it.
    """

    def __init__(self, name: str, *names: str) -> None:
        super().__init__()
        self._names = frozenset([name, *names])

    def wrap_tool_call(self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Result]) -> Result:
        call = request.tool_call
        if call["name"] not in self._names or not _fits(request.tool, call["args"]):
            return handler(request)
        run, action = current_run(), action_of(call["name"])
        came: list[Result | GraphBubbleUp] = []

        def do(_: EffectCall) -> Receipt:
            try:
                result = handler(request)
            except GraphBubbleUp as stop:
                came.append(stop)
                raise NotSent(ToolAsks.__doc__ or "") from stop
            if isinstance(result, ToolMessage) and result.status == "error":
                raise ToolFailed(result.text)
            came.append(result)
            content = plain(result.content) if isinstance(result, ToolMessage) else None
            return Receipt(str(call["id"]), data={"content": content})

        effect = Effect(action, plain(call["args"]), key=key_of(run, action, f"call/{call['id']}"))
        try:
            receipt = run.effect(effect, do=do)
        except EffectFailed as error:
            if came:
                raise ToolAsks from error
            raise
        if came and not isinstance(came[0], GraphBubbleUp):
            return came[0]
        return ToolMessage(receipt.get("content") or "Done.", name=call["name"], tool_call_id=call["id"])

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[Result]]
    ) -> Result:
        """The same for an asynchronous agent: a thread talks to the ledger, and the tool runs in the agent's loop."""
        loop = asyncio.get_running_loop()

        async def handle(given: ToolCallRequest) -> Result:
            return await handler(given)

        def wait(given: ToolCallRequest) -> Result:
            return asyncio.run_coroutine_threadsafe(handle(given), loop).result()

        return await asyncio.to_thread(self.wrap_tool_call, request, wait)


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
