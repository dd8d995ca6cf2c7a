"""OpenAI Agents SDK: a run of agents that pauses for people, and comes back as the same run in any process.

@effect("payments.refund", impact="money", summary="Refund {amount} EUR for order {order}?")
@function_tool(needs_approval=True, failure_error_function=None)
def refund(order: str, amount: str) -> str: ...

@flow(ledger, "refunds", Agent(name="Support", tools=[refund]))
def refunds(run):                       # what a new run begins with; ledger.work() does the rest
    return f"Look after case {run.external_id}."

The SDK stops at every call of an effect, whether or not a person is asked, so that its state is saved, and the call has
its id for good, before anything reaches the outside. The ledger alone says what may go on: approvals that stand in a
state count for nothing by themselves. What the model, the prompts and the tools are is none of this module's business.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

from agents import (
    Agent,
    FunctionTool,
    InputGuardrailTripwireTriggered,
    ItemHelpers,
    MaxTurnsExceeded,
    OutputGuardrailTripwireTriggered,
    RunConfig,
    Runner,
    RunResult,
    RunState,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
    UserError,
)
from agents.items import ToolApprovalItem
from agents.run import DEFAULT_MAX_TURNS
from agents.run_context import RunContextWrapper
from agents.tool import resolve_function_tool_failure_error_function
from agents.tool_context import ToolContext
from agents.version import __version__ as sdk_version
from pydantic import BaseModel

from rehydrate.client import Answer, Approval, Effect, EffectCall, Ledger, NotRetryable, Receipt, Run
from rehydrate.client.run import Do
from rehydrate.client.shapes import Due

Json = dict[str, Any]
Input = str | list[Any]
Start = Callable[[Run], Input]
S = TypeVar("S", bound=Start)
T = TypeVar("T")

FRAMEWORK = "openai-agents"
# An event's inline data is at most 16 KiB: of a longer final output the ledger keeps the beginning.
RESULT_CHARACTERS = 4000
ASK_CHARACTERS = 4000
# The same state would come out the same again.
NO_USE_TRYING = (
    MaxTurnsExceeded,
    InputGuardrailTripwireTriggered,
    OutputGuardrailTripwireTriggered,
    ToolInputGuardrailTripwireTriggered,
    ToolOutputGuardrailTripwireTriggered,
)


class Store(Protocol):
    """A place of your own for states, where the ledger shall only have references to them."""

    def save(self, name: str, state: str) -> str:
        """Keep a state under a name that is new each time; its reference, at most 2,000 characters."""

    def load(self, ref: str) -> str:
        """The state that was kept under this reference."""


# --- tools ----------------------------------------------------


@dataclass(kw_only=True)
class EffectTool(FunctionTool):
    """A function tool whose calls are effects of the run. Made by `effect`."""

    action: str
    approval: str
    asks_person: bool | Callable[..., Any]
    summary: str | None = None
    resource: str | None = None
    due: Due | None = None
    lookup: Do | None = None
    ask: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def effect(self, run: Run, call_id: str, arguments: Mapping[str, Any], *, asks: bool) -> Effect:
        """The effect that this call is, the same each time; where a person is asked, the ledger is told to insist."""
        return Effect(
            self.action,
            arguments,
            key=f"{run.flow}/{run.external_id}/{self.action}/{call_id}",
            resource=filled(self.resource, arguments) if self.resource else None,
            approval=self.approval if asks else None,
            **self.fields,
        )


def effect(
    action: str,
    *,
    approval: str | None = None,
    summary: str | None = None,
    resource: str | None = None,
    due: Due | None = None,
    lookup: Do | None = None,
    ask: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Callable[[FunctionTool], EffectTool]:
    """A tool that does something outside: `system.action`, done once for each call, however often the run is resumed.

    The tool's own `needs_approval` says whether a person is asked. `approval` names that wait (the tool's name when
    left out) and so chooses its policy. `summary` and `resource` may name arguments in braces; `summary=""` leaves the
    words to the flow's title for this effect. `lookup(e)` finds out what became of a call whose outcome is unknown.
    `ask` has more fields of `Approval`, the others are those of `Effect`: `impact`, `undo`, `reversible`, `repeat`.
    """

    def wrap(tool: FunctionTool) -> EffectTool:
        if resolve_function_tool_failure_error_function(tool) is not None:
            raise UserError(
                f"{tool.name}: what fails must not look done to the model; write "
                "@function_tool(failure_error_function=None) below @effect."
            )
        if tool.timeout_seconds is not None and tool.timeout_behavior != "raise_exception":
            raise UserError(
                f'{tool.name}: an effect that timed out may be done; use timeout_behavior="raise_exception".'
            )

        async def invoke(context: ToolContext[Any], arguments: str) -> Any:
            return await _in_hand().carry_out(wrapped, tool, context, arguments)

        async def stop(context: RunContextWrapper[Any], parameters: dict[str, Any], call_id: str) -> bool:
            if not await _asks_person(tool, context, parameters, call_id):
                _in_hand().unattended.add(call_id)
            return True

        given = {f.name: getattr(tool, f.name) for f in dataclasses.fields(tool) if f.init}
        wrapped = EffectTool(
            **{**given, "on_invoke_tool": invoke, "needs_approval": stop},
            action=action,
            approval=approval or tool.name,
            asks_person=tool.needs_approval,
            summary=summary,
            resource=resource,
            due=due,
            lookup=lookup,
            ask=ask or {},
            fields=fields,
        )
        return wrapped

    return wrap


async def _asks_person(
    tool: FunctionTool, context: RunContextWrapper[Any], parameters: dict[str, Any], call_id: str
) -> bool:
    if not callable(tool.needs_approval):
        return tool.needs_approval
    # A rule judges what will run: where defaults would be filled in afterwards, a person judges.
    if set(tool.params_json_schema.get("properties", {})) - set(parameters):
        return True
    return bool(await tool.needs_approval(context, parameters, call_id))


def effect_call() -> EffectCall:
    """For use in a tool: the effect it carries out. Hand `effect_call().key` to the outside as the idempotency key."""
    return _call.get()


def filled(template: str, arguments: Mapping[str, Any]) -> str:
    """The template with its arguments; as it stands where the model left one out."""
    try:
        return template.format_map(arguments)
    except (LookupError, ValueError, AttributeError):
        return template


# --- one flow ----------------------------------------------------


def flow(
    ledger: Ledger,
    name: str,
    agent: Agent[Any],
    *,
    version: str = "1",
    reads: Iterable[str] | None = None,
    context: Callable[[Run], Any] | None = None,
    store: Store | None = None,
    due: Due = "3d",
    on_reject: str | None = "continue",
    max_turns: int | None = DEFAULT_MAX_TURNS,
    run_config: RunConfig | None = None,
) -> Callable[[S], S]:
    """Register an agent, with those it hands over to, as a flow; the function gives what a new run begins with.

    `context` makes the SDK's context anew in each process: it is never part of a state, so it may hold secrets. States
    are kept by the ledger, encrypted, up to 1 MiB, or in a `store`. A person has until `due` to answer. After a no the
    model is told the reason; `on_reject=None` leaves that to the flow. `max_turns` counts over the whole run, pauses
    included. Change `version` with the agents' names or tools.
    """
    _refuse_unkept_tools(agent)

    def register(start: S) -> S:
        served = _Flow(agent, start, context, store, due, on_reject, max_turns, run_config)
        ledger.flow(name, version=version, reads=reads, framework=FRAMEWORK)(served.go_on)
        return start

    return register


@dataclass(frozen=True)
class _Saved:
    """What is kept at a checkpoint."""

    step: int
    sdk: str
    snapshot: Json
    unattended: list[str]  # ids of the calls that nobody is asked about
    said: str  # what the model said along with its calls


def kept(state: Json) -> str:
    """A state of the SDK's own (`state.to_json()`) as a run's first checkpoint keeps it, without its contexts."""
    _drop_contexts(state)
    return json.dumps(dataclasses.asdict(_Saved(1, sdk_version, state, [], "")))


def adopt(ledger: Ledger, name: str, external_id: str) -> Json:
    """Take over a run that `manage.py import_openai_agents` showed: a worker asks now what its state waits for."""
    run_id = ledger.open(name, external_id)["run"]["id"]
    lease = ledger.recall(run_id, reason="An agent adopted the imported state.")["lease"]
    return dict(ledger.release(run_id, lease["epoch"])["run"])


@dataclass(frozen=True)
class _Flow:
    agent: Agent[Any]
    start: Start
    context: Callable[[Run], Any] | None
    store: Store | None
    due: Due
    on_reject: str | None
    max_turns: int | None
    run_config: RunConfig | None

    def go_on(self, run: Run) -> Any:
        """Go on from the last checkpoint until the agents are through; pauses wherever people have to answer."""
        context = self.context(run) if self.context else None
        with _Hand(run) as hand:
            saved = self._load(run)
            if saved is None:
                result = hand.run(self.agent, self.start(run), context, self.max_turns, self.run_config)
                step, state = 0, None
            else:
                hand.unattended.update(saved.unattended)
                step, state = saved.step, self._restored(saved, context)
            while True:
                if state is None:
                    if not result.interruptions:
                        return _result_of(result.final_output)
                    step, state = step + 1, result.to_state()
                    said = "\n".join(_said(result))
                    saved = _Saved(step, sdk_version, _snapshot(state), sorted(hand.unattended), said)
                    self._save(run, f"step-{step}", saved)
                assert saved is not None
                if self._answer(run, hand, state, saved.said):
                    answered = dataclasses.replace(saved, snapshot=_snapshot(state))
                    self._save(run, f"step-{step}-answered", answered)
                result, state = hand.run(self.agent, state, None, self.max_turns, self.run_config), None

    # --- states ----------------------------------------------------

    def _save(self, run: Run, stage: str, saved: _Saved) -> None:
        text = json.dumps(dataclasses.asdict(saved))
        if self.store is None:
            run.checkpoint(stage, state=text)
        else:
            ref = self.store.save(f"{run.id}/{stage}-{_digest(text)[-12:]}", text)
            run.checkpoint(stage, ref=ref, digest=_digest(text))

    def _load(self, run: Run) -> _Saved | None:
        """The state of the last checkpoint, from the ledger or by its reference; None for a run that begins."""
        if not run.saved:
            return None
        text = run.saved.get("state")
        if text is None and self.store is not None and run.saved.get("ref"):
            text = self.store.load(run.saved["ref"])
            if _digest(text) != str(run.saved.get("digest")).removeprefix("sha256:"):
                raise NotRetryable("The stored state is not the one that this run saved: somebody changed it.")
        try:
            return _Saved(**json.loads(text or ""))
        except (TypeError, ValueError) as error:
            raise NotRetryable("The checkpoint holds no state of this agent, so it cannot go on from there.") from error

    def _restored(self, saved: _Saved, context: Any) -> RunState[Any, Agent[Any]]:
        restored = RunState.from_json(
            self.agent,
            saved.snapshot,
            context_deserializer=lambda _: context,  # unlike an override, it reaches nested agents, too
            strict_context=True,  # a nested state that cannot be read is an error, and not a fresh start
        )
        try:
            return _wait_for(restored)
        except Exception as error:
            raise NotRetryable(
                f"The state was saved by SDK {saved.sdk} in format {saved.snapshot.get('$schemaVersion')}; "
                f"SDK {sdk_version} with these agents cannot read it: {error}"
            ) from error

    # --- questions and answers ----------------------------------------------------

    def _answer(self, run: Run, hand: _Hand, state: RunState[Any, Agent[Any]], said: str) -> bool:
        """Put the ledger's answers into the state, or pause for them; False where calls go on that need none."""
        asked: list[tuple[ToolApprovalItem, Approval]] = []
        let_through = False
        for item in state.get_interruptions():
            tool, arguments = _tool_of(item), _arguments_of(item)
            if arguments is None:
                state.reject(item, rejection_message="Not done: the arguments are not a JSON object.")
            elif isinstance(tool, EffectTool) and _needs_nobody(run, hand, tool, item, arguments):
                state.approve(item)
                let_through = True
            else:
                asked.append((item, self._ask(run, tool, item, arguments, said)))
        # The SDK runs siblings that need nobody before it pauses, and so they do here: now that the state is saved.
        if let_through or not asked:
            return False
        answers = run.pause(*(approval for _, approval in asked))
        for (item, _), answer in zip(asked, answers, strict=True):
            if answer.authorised:
                state.approve(item)
            else:
                state.reject(item, rejection_message=_told(answer))
        return True

    def _ask(self, run: Run, tool: FunctionTool | None, item: ToolApprovalItem, arguments: Json, said: str) -> Approval:
        details = [("Agent", item.agent.name)]
        common: Json = {"on_reject": self.on_reject, "who": "A person who may decide", "key": item.call_id}
        if said:
            common["rationale"] = said[:ASK_CHARACTERS]
        if isinstance(tool, EffectTool):
            summary = tool.description.partition("\n")[0] if tool.summary is None else filled(tool.summary, arguments)
            fields = {"schema": tool.params_json_schema, **common, **tool.ask}
            return Approval(
                tool.approval,
                tool.due or self.due,
                summary=summary[:ASK_CHARACTERS],
                effect=tool.effect(run, str(item.call_id), arguments, asks=True),
                details=details,
                **fields,
            )
        if tool is not None and _nested_agent(tool) is not None:
            details += [(name, str(value)) for name, value in arguments.items()]
            summary = f"May {item.agent.name} give this to {_nested_agent(tool).name}?"
            return Approval(tool.name, self.due, summary=summary, details=details, **common)
        raise NotRetryable(f"{item.name} asks for approval and is no effect: put @effect(...) on it.")


def _needs_nobody(run: Run, hand: _Hand, tool: EffectTool, item: ToolApprovalItem, arguments: Json) -> bool:
    """Nobody is to be asked about this call, or a person has done it by hand meanwhile."""
    key = tool.effect(run, str(item.call_id), arguments, asks=False).key
    known = run.known_effect(str(key))
    return item.call_id in hand.unattended or (known is not None and known["state"] == "executed")


def _told(answer: Answer) -> str:
    """What the model is told of an answer that is no yes. Who answered stays in the ledger."""
    if answer.choice == "respond":
        response = answer.response
        text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
        return f"Not done. A reviewer answered instead: {text}"
    if answer.rejected:
        return f"Not done: a reviewer said no. Reason: {answer.reason or answer.comment or 'none given'}"
    return "Not done: nobody answered in time." if answer.timed_out else "Not done."


# --- one process's turn with a run ----------------------------------------------------


class _Hand:
    """A run while this process has its lease: runs the agents, and their effects one after the other in a thread."""

    def __init__(self, run: Run) -> None:
        self.ledger_run = run
        self.unattended: set[str] = set()
        self._effects = ThreadPoolExecutor(1, thread_name_prefix=f"effects-{run.external_id}")
        self._begun: list[asyncio.Task[Any]] = []
        self._error: BaseException | None = None

    def __enter__(self) -> _Hand:
        return self

    def __exit__(self, *_: object) -> None:
        self._effects.shutdown()

    def run(
        self,
        agent: Agent[Any],
        what: Input | RunState[Any, Agent[Any]],
        context: Any,
        max_turns: int | None,
        run_config: RunConfig | None,
    ) -> RunResult:
        """The SDK's result. Raises what the ledger said to an effect as it was, and not the SDK's account of it."""

        async def turn() -> RunResult:
            _hand.set(self)
            try:
                return await Runner.run(agent, what, context=context, max_turns=max_turns, run_config=run_config)
            finally:
                # The SDK gives up on the siblings of a call that failed; what they did outside is still recorded.
                await asyncio.gather(*self._begun, return_exceptions=True)

        try:
            result = _wait_for(turn())
        except NO_USE_TRYING as error:
            raise self._error or NotRetryable(str(error)) from error
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        if self._error is not None:
            raise self._error
        return result

    async def carry_out(self, tool: EffectTool, inner: FunctionTool, context: ToolContext[Any], arguments: str) -> Any:
        """What the model gets for this call: done now, or the output that was recorded when it was done."""
        task = asyncio.ensure_future(self._carry_out(tool, inner, context, arguments))
        self._begun.append(task)
        return await asyncio.shield(task)

    async def _carry_out(self, tool: EffectTool, inner: FunctionTool, context: ToolContext[Any], arguments: str) -> Any:
        loop = asyncio.get_running_loop()
        given: Json = json.loads(arguments)
        outputs: list[Any] = []

        async def invoke(call: EffectCall) -> Any:
            _call.set(call)
            if call.arguments == given:
                return await inner.on_invoke_tool(context, arguments)
            edited = json.dumps(call.arguments)
            return await inner.on_invoke_tool(_with_arguments(context, edited), edited)

        def do(call: EffectCall) -> Receipt:
            outputs.append(asyncio.run_coroutine_threadsafe(invoke(call), loop).result())
            return _receipt_of(call, outputs[0])

        def carry_out() -> Json:
            if self._error is not None:
                raise self._error  # an effect before this one stopped the run
            asks = context.tool_call_id not in self.unattended
            what = tool.effect(self.ledger_run, context.tool_call_id, given, asks=asks)
            receipt = self.ledger_run.effect(what, do=do, lookup=tool.lookup)
            return {"receipt": receipt, "effect": self.ledger_run.known_effect(str(what.key)) or {}}

        try:
            done = await loop.run_in_executor(self._effects, carry_out)
        except BaseException as error:
            self._error = self._error or error
            raise UserError(f"{tool.name} stopped the run: {error}") from error
        output = outputs[0] if outputs else done["receipt"].get("output", f"Done: {done['receipt'].get('id')}")
        ran = done["effect"].get("arguments")
        if ran is None or ran == given:
            return output
        return f"A reviewer changed the arguments. It ran with {json.dumps(ran, ensure_ascii=False)}. Result: {output}"


_hand: ContextVar[_Hand] = ContextVar("hand")
_call: ContextVar[EffectCall] = ContextVar("call")


def _in_hand() -> _Hand:
    hand = _hand.get(None)
    if hand is None:
        raise UserError("An effect runs only under a run of the ledger: serve its agent by ledger.work().")
    return hand


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The one loop of this process: the SDK's connections to a model belong to the loop that opened them."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=FRAMEWORK, daemon=True).start()
    return loop


def _wait_for(what: Coroutine[Any, Any, T]) -> T:
    running: Future[T] = asyncio.run_coroutine_threadsafe(what, _loop())
    return running.result()


# --- the SDK's shapes ----------------------------------------------------


def _snapshot(state: RunState[Any, Agent[Any]]) -> Json:
    """The state as JSON, without any context: the SDK writes a context that is a mapping as it is, secrets included."""
    snapshot = state.to_json(context_serializer=lambda _: {})
    _drop_contexts(snapshot)
    return snapshot


def _drop_contexts(value: Any) -> None:
    if isinstance(value, dict):
        if "$schemaVersion" in value and value["context"].get("context") is not None:
            value["context"]["context"] = {}
        for child in value.values():
            _drop_contexts(child)
    elif isinstance(value, list):
        for child in value:
            _drop_contexts(child)


def _tool_of(item: ToolApprovalItem) -> FunctionTool | None:
    tools = [tool for tool in item.agent.tools if isinstance(tool, FunctionTool) and tool.name == item.tool_name]
    return tools[0] if len(tools) == 1 else None


def _arguments_of(item: ToolApprovalItem) -> Json | None:
    try:
        arguments = json.loads(item.arguments or "")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def _with_arguments(context: ToolContext[Any], arguments: str) -> ToolContext[Any]:
    return ToolContext.from_agent_context(
        context,
        context.tool_call_id,
        tool_call=context.tool_call,
        agent=context.agent,
        tool_name=context.tool_name,
        tool_arguments=arguments,
        tool_namespace=context.tool_namespace,
        run_config=context.run_config,
    )


def _receipt_of(call: EffectCall, output: Any) -> Receipt:
    """What a tool returned, as the proof of what it did, from which a later process tells the model the same."""
    if isinstance(output, Receipt):
        return output
    if isinstance(output, BaseModel):
        output = output.model_dump(mode="json")
    given = output if isinstance(output, Mapping) else {}
    url = given.get("url")
    return Receipt(str(given.get("id") or call.key), url=url if isinstance(url, str) else None, data={"output": output})


def _result_of(output: Any) -> Any:
    if isinstance(output, BaseModel):
        output = output.model_dump(mode="json")
    text = output if isinstance(output, str) else json.dumps(output, default=str)
    if len(text.encode()) > RESULT_CHARACTERS:
        return {"digest": _digest(text), "data": f"{text[:RESULT_CHARACTERS]} …"}
    return {"data": output if isinstance(output, str) else json.loads(text)}


def _said(result: RunResult) -> list[str]:
    """The texts of the model's last response."""
    output = [item for response in result.raw_responses[-1:] for item in response.output]
    return [text for item in output if item.type == "message" and (text := ItemHelpers.extract_text(item))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _nested_agent(tool: FunctionTool) -> Any:
    return getattr(tool, "_agent_instance", None)


def _refuse_unkept_tools(root: Agent[Any]) -> None:
    """A tool that people are asked about must be an effect, or be an agent with effects of its own."""
    seen: list[Agent[Any]] = []
    found: Sequence[Any] = [root]
    while found:
        agent, *found = found
        if agent in seen:
            continue
        seen.append(agent)
        for tool in agent.tools:
            if not isinstance(tool, FunctionTool):
                continue
            nested = _nested_agent(tool)
            if nested is not None:
                found.append(nested)
            elif tool.needs_approval is not False and not isinstance(tool, EffectTool):
                raise UserError(f"{tool.name} of {agent.name} needs approval and is no effect: put @effect(...) on it.")
        for handoff in agent.handoffs:
            reached = handoff if isinstance(handoff, Agent) else getattr(handoff, "_agent_ref", lambda: None)()
            found += [reached] if reached is not None else []
