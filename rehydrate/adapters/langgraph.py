"""LangGraph: a compiled graph with a checkpointer as a flow of the ledger.

    flow = GraphFlow(ledger, "refunds", graph)
    flow.open("order-17", {"order": 17})            # a run; its external id is the thread's id
    ledger.work()

The thread lives in the checkpointer, and the ledger holds a reference to it. Each time the run may go on, the store is
read, never what a call returned: its open interrupts and static breakpoints become asks (`_langgraph_asks` says how),
and a run that was answered is resumed by interrupt id, under the ledger's lease. What vanished from the store is not
asked any more; a question that is asked anew, or otherwise, is another wait.

With an asynchronous checkpointer, whose loop has to run in another thread than the worker, nodes may be asynchronous.

LangGraph runs a node again from its top at each resume. So what a node does outside goes through `effect` here, whose
key stays the same for the same task, and what an agent's tools do through `rehydrate.adapters.langchain.LedgerTools`.
Whatever else a node throws leaves open what it did: a person looks at the run before it is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib.metadata import version as installed
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.constants import START
from langgraph.errors import UnknownInterruptError
from langgraph.pregel import Pregel
from langgraph.runtime import get_runtime
from langgraph.types import Command, PregelTask, StateSnapshot, interrupt

from rehydrate.adapters._langgraph_asks import Pending, Question, Terms, Translate, asked, plain, question, words
from rehydrate.client import Answer, Effect, Ledger, NotRetryable, RehydrateError, Run, errors
from rehydrate.client.run import Do
from rehydrate.client.shapes import Due, answer_of

Json = dict[str, Any]
Graph = Pregel[Any, Any, Any, Any]

# Before it, two interrupts of one node shared an id, and an answer could go to the wrong one.
LEAST_VERSION = (1, 2, 20)
# LangGraph refuses an answer to an interrupt that is not open, instead of giving it to another one, under this key.
STRICT_RESUME = "__pregel_strict_resume"
INPUT = "__input__"
RESUME = "__resume__"  # the channel in which the checkpointer keeps what a task was answered
KEY_LENGTH = 200  # of an effect's or a wait's key


class TooOld(RehydrateError, ImportError):
    """LangGraph 1.2.20 or later is needed: before it, an answer could go to another question than its own."""


class NoCheckpointer(RehydrateError, TypeError):
    """The graph needs a checkpointer, where its thread lives while people decide: compile it with one."""


class ThreadGone(NotRetryable):
    """The checkpointer does not hold this run's thread any more; going on would start another one from nothing."""


class ThreadNotWritten(RehydrateError):
    """The checkpointer does not hold this thread yet; open its run with an input, or let LangGraph begin it first."""

    def __init__(self) -> None:
        super().__init__(self.message)


class Stalled(NotRetryable):
    """The graph stopped, and neither an interrupt nor its breakpoints say why; look, then grant another try."""


class NodeFailed(NotRetryable):
    """A node threw an exception, so what it did outside is not known; look, then grant another try."""


class OtherAnswer(NotRetryable):
    """The thread holds another answer than the one given here: somebody resumed it beside the ledger."""


class NoRun(RehydrateError):
    """There is no run: effects and asks belong into the nodes of a graph that a worker serves by `GraphFlow`."""


def check_version(text: str) -> None:
    """Raises `TooOld` for a LangGraph before 1.2.20."""
    if tuple(int(part) for part in text.split(".")[:3] if part.isdigit()) < LEAST_VERSION:
        raise TooOld(f"{TooOld.__doc__} This is {text}.")


check_version(installed("langgraph"))


# --- what nodes use ----------------------------------------------------


@dataclass
class _Serving:
    """The run that this process goes on with, while its graph runs."""

    run: Run
    counts: Counter[tuple[str, int, str]] = field(default_factory=Counter)
    keys: dict[tuple[str, int, object], str] = field(default_factory=dict)

    def key(self, given: Effect) -> str:
        """An effect's key: the same whenever this task of the graph is run, however often that is."""
        if given.key is not None:
            return given.key
        info = get_runtime().execution_info
        if info is None:
            raise NoRun
        known = (info.task_id, info.node_attempt, given.identity)
        if known not in self.keys:
            counted = (info.task_id, info.node_attempt, given.action)
            self.counts[counted] += 1
            self.keys[known] = key_of(self.run, given.action, f"{info.task_id}/{self.counts[counted]}")
        return self.keys[known]


_serving: ContextVar[_Serving] = ContextVar("rehydrate_langgraph_serving")


def _served() -> _Serving:
    try:
        return _serving.get()
    except LookupError:
        raise NoRun from None


def current_run() -> Run:
    """The run whose graph is running here: for checkpoints, notes and external references. Pauses are interrupts."""
    return _served().run


def effect(
    what: Effect | str, arguments: Mapping[str, Any] | None = None, *, do: Do, lookup: Do | None = None, **fields: Any
) -> Json:
    """Do something outside from a node, once however often the node is run: `Run.effect`, keyed by the node's task."""
    given = what if isinstance(what, Effect) else Effect(what, arguments or {}, **fields)
    serving = _served()
    return serving.run.effect(replace(given, key=serving.key(given)), do=do, lookup=lookup)


def ask(
    name: str, summary: str, *, effect: Effect | None = None, due: str | int | None = None, **fields: Any
) -> Answer:
    """Ask people from a node, and pause until they have answered. Fields: `rehydrate.client.Approval`.

    An `interrupt()` with all that a reviewer needs; ask about an effect, and what was edited is what `effect` runs.
    """
    key = _served().key(effect) if effect is not None else None
    return answer_of(interrupt(asked(name, effect, key, {"summary": summary, "due": due, **fields})))


# --- the flow ----------------------------------------------------


class GraphFlow:
    """Serves the runs of a flow with a graph.

    `wait` names the asks' policy, `waits` that of single tools, actions or nodes. `due`, `on_timeout` and `on_reject`
    are a wait's. By default the graph is told a no and goes on with it; `on_reject=None` leaves that to the flow's
    policy. `question` translates interrupts of a form of your own. `result` makes the run's result from the values at
    the end. `config` is passed to the graph, such as `{"recursion_limit": 100}`.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        graph: Graph,
        *,
        version: str = "1",
        reads: Iterable[str] | None = None,
        wait: str = "approval",
        waits: Mapping[str, str] | None = None,
        due: Due = "3d",
        on_timeout: str | None = None,
        on_reject: str | None = "continue",
        question: Translate | None = None,
        result: Callable[[Any], Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(graph.checkpointer, BaseCheckpointSaver):
            raise NoCheckpointer(NoCheckpointer.__doc__)
        self.ledger = ledger
        self.name = name
        self.graph = graph
        self.terms = Terms(wait=wait, waits=waits or {}, due=due, on_timeout=on_timeout, on_reject=on_reject)
        self._translate = question
        self._result = result
        self._config = dict(config or {})
        ledger.flow(name, version=version, reads=reads, framework=f"LangGraph {installed('langgraph')}")(self)

    # --- from outside the worker ----------------------------------------------------

    def open(self, thread_id: str, input: Any = None, **fields: Any) -> Json:
        """Open a run on a thread, or find it again: the run. Fields: those of `Ledger.open`.

        `input` is written into the thread, once. Without it the thread has to be there: one that LangGraph paused
        before the ledger came is adopted so. Raises `ThreadNotWritten` when there is neither.
        """
        if input is None and not _exists(self._read(thread_id)):
            raise ThreadNotWritten
        reference = f"langgraph:{thread_id}"
        opened = self.ledger.open(self.name, thread_id, holder=self.ledger.holder, input_ref=reference, **fields)
        run, lease = opened["run"], opened["lease"]
        if lease is None and input is not None and not _exists(self._read(thread_id)):
            lease = self.ledger.rehydrate(run["id"])["lease"]  # whoever opened it died before the input was written
        if lease is None:
            return dict(run)
        if input is not None:
            self._write(thread_id, input)
        return self._hand_over(run["id"], thread_id, lease)

    def send(self, thread_id: str, input: Any, *, reason: str = "New input came.") -> Json:
        """Give a run's thread new input: what it asked until now is withdrawn, and the graph starts anew from it.

        Raises `LeaseHeld` while a worker goes on with the run: send it again when that has paused.
        """
        run_id, lease = self._recall(thread_id, reason)
        self._write(thread_id, input)
        return self._hand_over(run_id, thread_id, lease)

    def recall(self, thread_id: str, *, reason: str = "The thread was changed beside the ledger.") -> Json:
        """Withdraw what a run asks, and let the worker read its thread anew: what is still open is asked again."""
        run_id, lease = self._recall(thread_id, reason)
        return self._hand_over(run_id, thread_id, lease)

    def adopt(self, thread_id: str) -> Json:
        """Take over a run that `manage.py import_langgraph` showed: its open interrupts are asked now."""
        return self.recall(thread_id, reason="An agent adopted the imported thread.")

    def _recall(self, thread_id: str, reason: str) -> tuple[str, Json]:
        run_id = self.ledger.open(self.name, thread_id)["run"]["id"]
        return run_id, self.ledger.recall(run_id, reason=reason)["lease"]

    def _write(self, thread_id: str, input: Any) -> None:
        """As the start node, input voids what was under way; only a functional graph, of one node, has none."""
        self.graph.update_state(self._thread(thread_id), input, as_node=START if START in self.graph.nodes else INPUT)

    def _hand_over(self, run_id: str, thread_id: str, lease: Json) -> Json:
        """The thread is as it should be: a worker goes on with it."""
        snapshot = self._read(thread_id)
        if _exists(snapshot):
            checkpoint = {"type": "checkpoint", "stage": stage_of(snapshot), "ref": ref_of(snapshot)}
            self.ledger.append(run_id, lease["epoch"], [checkpoint])
        return dict(self.ledger.release(run_id, lease["epoch"])["run"])

    # --- a worker's turn ----------------------------------------------------

    def __call__(self, run: Run) -> Any:
        """Go on with a run until it pauses or its graph has ended."""
        ran = False
        while True:
            snapshot = self._read(run.external_id)
            if not _exists(snapshot):
                if run.saved:
                    raise ThreadGone
                raise ThreadNotWritten  # whoever opened the run may be about to write its input
            self._settle(run, snapshot)
            if not snapshot.next:
                end = {"ref": ref_of(snapshot)}
                return end if self._result is None else {**end, "data": plain(self._result(snapshot.values))}
            run.checkpoint(stage_of(snapshot), ref=ref_of(snapshot), next=sorted(set(snapshot.next)), again=True)
            self._check_errors(run, snapshot)
            passed = self._pass_breakpoints(run, snapshot)
            command = self._answers(run, snapshot)
            if ran and not passed and command is None:
                raise Stalled  # as at a breakpoint that cannot be seen from here: going on would be a yes
            self._go_on(run, command)
            ran = True

    def _thread(self, thread_id: str) -> Any:
        configurable = {**self._config.get("configurable", {}), "thread_id": thread_id, STRICT_RESUME: True}
        return {**self._config, "configurable": configurable}

    def _read(self, thread_id: str) -> StateSnapshot:
        return self.graph.get_state(self._thread(thread_id), subgraphs=True)

    def _check_errors(self, run: Run, snapshot: StateSnapshot) -> None:
        """An error in the store that the ledger knows nothing of means that nobody knows what the node did."""
        for task in failed_tasks(snapshot):
            if not _ledger_knows(run, task):
                raise NodeFailed(f"{task.id}: “{words(task.name)}” failed before: {task.error}")

    def _pass_breakpoints(self, run: Run, snapshot: StateSnapshot) -> bool:
        """Static breakpoints are no interrupts: only the store and the graph's own lists tell that it stopped there.

        Whether there were any; then people have let the run pass.
        """
        stops = list(breakpoints(self.graph, snapshot))
        for stop in stops:
            nodes = " and ".join(f"“{words(name)}”" for name in stop.nodes)
            approval = self.terms.approval(
                wait_key(run.external_id, stop.snapshot, "breakpoint", stop.when, stop.nodes),
                stop.nodes[0],
                f"The agent stopped {stop.when} {nodes}. May it go on?",
                details=facts(stop.snapshot.values),
                choices=["approve", "reject"],
                on_reject=None,  # a breakpoint cannot be told a no: the flow's policy says what a no means
                who="reviewers",
            )
            if not run.pause(approval)[0].authorised:
                run.cancel(f"Nobody let it go on {stop.when} {nodes}.")
        return bool(stops)

    def _answers(self, run: Run, snapshot: StateSnapshot) -> Command[Any] | None:
        """The answers to all open interrupts, each for its own id; pauses the run until there are."""
        found = list(self._pending(run, snapshot))
        if not found:
            return None
        questions = [self._question(pending) for pending in found]
        answers = iter(run.pause(*(ask for question in questions for ask in question.asks)))
        resume = {
            pending.id: question.value([next(answers) for _ in question.asks])
            for pending, question in zip(found, questions, strict=True)
        }
        self._check_stored(snapshot, resume)
        return Command(resume=resume)

    def _question(self, pending: Pending) -> Question:
        own = self._translate(pending, self.terms) if self._translate is not None else None
        return own or question(pending, self.terms)

    def _pending(self, run: Run, snapshot: StateSnapshot) -> Iterator[Pending]:
        for task, inner in open_tasks(snapshot):
            for one in task.interrupts:
                yield Pending(
                    id=one.id,
                    key=wait_key(run.external_id, snapshot, one.id, one.value),
                    node=task.name,
                    value=one.value,
                    response_schema=one.response_schema if isinstance(one.response_schema, dict) else None,
                    tool_calls=tool_calls(inner.values),
                    effect_key=lambda action, subject: key_of(run, action, subject),
                )

    def _check_stored(self, snapshot: StateSnapshot, resume: Mapping[str, Any]) -> None:
        """After an exception the checkpointer keeps the answer, and gives it again in place of any later one."""
        for task, inner in open_tasks(snapshot):
            if task.error is None or not task.interrupts:
                continue
            saved = self._checkpointer.get_tuple(inner.config)
            stored = [
                v for id_, channel, v in (saved and saved.pending_writes) or [] if (id_, channel) == (task.id, RESUME)
            ]
            last = stored[-1] if stored else []
            if last and plain(last[-1]) != plain(resume[task.interrupts[-1].id]):
                raise OtherAnswer(f"{task.id}: {OtherAnswer.__doc__} (“{words(task.name)}”)")

    @property
    def _checkpointer(self) -> BaseCheckpointSaver[Any]:
        assert isinstance(self.graph.checkpointer, BaseCheckpointSaver)
        return self.graph.checkpointer

    def _go_on(self, run: Run, command: Command[Any] | None) -> None:
        """Let the graph run, step by step, until it stops by itself or this process may not go on."""
        token = _serving.set(_Serving(run))
        loop = getattr(self._checkpointer, "loop", None)
        try:
            if loop is None:
                self._stream(run, command)
            else:  # an asynchronous checkpointer: the graph runs where that lives, and this worker's thread waits
                asyncio.run_coroutine_threadsafe(self._astream(run, command), loop).result()
        except RehydrateError:
            raise  # the ledger, or this adapter, has said already what is known
        except UnknownInterruptError:
            raise  # the thread moved between reading and answering: nothing was given, and the store is read again
        except Exception as error:
            raise self._node_failed(run, error) from error
        finally:
            _serving.reset(token)

    def _stream(self, run: Run, command: Command[Any] | None) -> None:
        steps = self.graph.stream(command, self._thread(run.external_id), durability="sync", stream_mode="values")
        with contextlib.closing(steps):  # type: ignore[type-var]
            for _ in steps:
                run.check()

    async def _astream(self, run: Run, command: Command[Any] | None) -> None:
        steps = self.graph.astream(command, self._thread(run.external_id), durability="sync", stream_mode="values")
        async with contextlib.aclosing(steps):  # type: ignore[type-var]
            async for _ in steps:
                run.check()

    def _node_failed(self, run: Run, error: Exception) -> NodeFailed:
        """With the tasks' ids, by which the error is known when it is met in the store again."""
        failed: list[PregelTask] = []
        with contextlib.suppress(Exception):
            failed = list(failed_tasks(self._read(run.external_id)))
        ids = " ".join(task.id for task in failed)
        names = ", ".join(f"“{words(task.name)}”" for task in failed) or "The graph"
        return NodeFailed(f"{ids}: {names} failed, and what it did is not known: {type(error).__name__}: {error}")

    def _settle(self, run: Run, snapshot: StateSnapshot) -> None:
        """What was approved and then done by the graph itself, with no effect of the ledger, is recorded as seen."""
        left = run.approved()
        if not left:
            return
        called, finished = tool_results(snapshot), self._finished(run)
        for key in left:
            kind, name = key.split("/")[-2:] if "/" in key else ("", "")
            if (kind == "call" and called.get(name) == "success") or kind in finished:
                run.done(key, {"id": ref_of(snapshot), "status": "accepted"})
            elif kind == "call" and name in called:
                run.unsure(key, "The tool came back with an error.")

    def _finished(self, run: Run) -> set[str]:
        """The interrupts at the ledger's last checkpoint whose tasks have got their answers and come to their end."""
        _, _, checkpoint = str(run.saved.get("ref") or "").rpartition("/")
        config = self._thread(run.external_id)
        config["configurable"]["checkpoint_id"] = checkpoint
        past = self.graph.get_state(config)
        return {one.id for task in past.tasks if task.result is not None for one in task.interrupts}


# --- reading a thread ----------------------------------------------------


@dataclass(frozen=True)
class Stop:
    """A static breakpoint at which a graph, or a subgraph of it, has stopped."""

    when: str
    nodes: tuple[str, ...]
    snapshot: StateSnapshot


def breakpoints(graph: Graph, snapshot: StateSnapshot, *, root: Graph | None = None) -> Iterator[Stop]:
    """The breakpoints before and after nodes that a thread stands at, also in subgraphs, whose states `root` reads."""
    root = root or graph
    before = _listed(graph.interrupt_before_nodes, snapshot.next)
    if before:
        yield Stop("before", before, snapshot)
    if graph.interrupt_after_nodes and snapshot.parent_config and (snapshot.metadata or {}).get("source") == "loop":
        after = _listed(graph.interrupt_after_nodes, root.get_state(snapshot.parent_config).next)
        if after:
            yield Stop("after", after, snapshot)
    subgraphs = dict(graph.get_subgraphs())
    for task in snapshot.tasks:
        inner = subgraphs.get(task.name)
        if isinstance(task.state, StateSnapshot) and isinstance(inner, Pregel):
            yield from breakpoints(inner, task.state, root=root)


def _listed(stops: Sequence[str] | str, nodes: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({node for node in nodes if stops == "*" or node in stops}))


def open_tasks(snapshot: StateSnapshot) -> Iterator[tuple[PregelTask, StateSnapshot]]:
    """The innermost tasks that are not done, each with the state that it runs on."""
    for task in snapshot.tasks:
        inner = list(open_tasks(task.state)) if isinstance(task.state, StateSnapshot) else []
        yield from inner or [(task, snapshot)]


def failed_tasks(snapshot: StateSnapshot) -> Iterator[PregelTask]:
    return (task for task, _ in open_tasks(snapshot) if task.error is not None)


def _ledger_knows(run: Run, task: PregelTask) -> bool:
    """Whether the ledger was told of this error, and then let the run go on all the same."""
    kind = getattr(errors, str(task.error).partition("(")[0], None)
    told = isinstance(kind, type) and issubclass(kind, RehydrateError)
    return told or task.id in str(run.last_error.get("message"))


def tool_calls(values: Any) -> Sequence[Mapping[str, Any]]:
    """The tool calls of the last message that has any."""
    messages = values.get("messages") if isinstance(values, Mapping) else None
    return next((m.tool_calls for m in reversed(messages or []) if getattr(m, "tool_calls", None)), [])


def tool_results(snapshot: StateSnapshot) -> dict[str, str]:
    """How the tool calls of a thread, and of the subgraphs it is in, came back: `success` or `error`, by their ids."""
    found: dict[str, str] = {}
    for one in [snapshot, *(task.state for task in snapshot.tasks if isinstance(task.state, StateSnapshot))]:
        messages = one.values.get("messages") if isinstance(one.values, Mapping) else None
        found |= {m.tool_call_id: m.status for m in messages or [] if getattr(m, "type", None) == "tool"}
    return found


def facts(values: Any) -> list[tuple[str, Any]]:
    """What a state says in a few words, for people: its short texts, numbers and yes or no."""
    if not isinstance(values, Mapping):
        return []
    short = [(words(name), v) for name, v in values.items() if isinstance(v, str | int | float | bool)]
    return [(name, value) for name, value in short if len(str(value)) <= 500][:20]


def _exists(snapshot: StateSnapshot) -> bool:
    return snapshot.created_at is not None


def ref_of(snapshot: StateSnapshot) -> str:
    """Where the state is: `langgraph:<thread>/<checkpoint>`."""
    where = snapshot.config["configurable"]
    return f"langgraph:{where['thread_id']}/{where['checkpoint_id']}"


def stage_of(snapshot: StateSnapshot) -> str:
    """The stage is what comes next, by the nodes' names."""
    return ", ".join(sorted(set(snapshot.next)))[:100] or "end"


def wait_key(thread_id: str, snapshot: StateSnapshot, *request: Any) -> str:
    """A wait's key: by thread, checkpoint, interrupt id and request, so that another question is another wait."""
    checkpoint = snapshot.config["configurable"]["checkpoint_id"]
    text = json.dumps(plain([thread_id, checkpoint, *request]), sort_keys=True)
    return f"interrupt-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def key_of(run: Run, action: str, subject: str) -> str:
    """An effect's key in the outside world: by run, action and what in the graph it belongs to."""
    begin, end = f"{run.flow}/{run.external_id}", f"{action}/{subject}"
    if len(begin) + len(end) >= KEY_LENGTH:
        begin = hashlib.sha256(begin.encode()).hexdigest()[:32]
    return f"{begin}/{end}"
