"""`import_langgraph`: shows the paused threads of a LangGraph checkpointer as runs, so that stuck ones are seen.

What it reads it leaves as it is, and a run that it opens is read only until it is adopted: it waits for the signal
`adoption`, in place of the thread's own questions, which stand in its history as notes. So nobody can answer them, and
no agent may claim the run. An agent that serves the flow takes it over with `GraphFlow.adopt(thread)`, which withdraws
that wait; from then on it is a run as any other, and what is still open in its thread is asked. People may take it over
or terminate it before. The deadline that each wait has to have is ten years off, about the latest that there is.

A thread is paused when interrupts are open in it, when a task of its failed, or when nodes are still to run, as at a
static breakpoint. Without its graph, nothing more can be told of it; values of types that are not LangGraph's or
LangChain's own are read as plain data, so no code of the agent's is needed, and none is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import services
from rehydrate.adapters._langgraph_asks import Pending, Terms, question
from rehydrate.callers import Caller
from rehydrate.core import commands as cmd
from rehydrate.core.parsing import convert
from rehydrate.models import Workspace

if TYPE_CHECKING:
    from langgraph.checkpoint.base import CheckpointTuple
    from langgraph.checkpoint.postgres import PostgresSaver

Json = dict[str, Any]

NAME = "import_langgraph"
TEN_YEARS = 3650 * 86400
NEEDED = (
    "This needs LangGraph and its PostgreSQL checkpointer on this machine: "
    "pip install 'langgraph>=1.2.20,<2' 'langgraph-checkpoint-postgres>=3,<4'"
)
# The channels in which LangGraph keeps what is under way (`langgraph._internal._constants`, `langgraph.graph.state`).
INTERRUPT, RESUME, ERROR, SENDS, BRANCH, START = (
    "__interrupt__", "__resume__", "__error__", "__pregel_tasks", "branch:to:", "__start__",
)  # fmt: skip


@dataclass(frozen=True)
class Thread:
    """A paused thread, as far as it can be read without its graph."""

    id: str
    checkpoint: str
    next: list[str]
    interrupts: list[Any]
    errors: list[str]

    @property
    def ref(self) -> str:
        return f"langgraph:{self.id}/{self.checkpoint}"


class Command(BaseCommand):
    help = (
        "Show the paused threads of a LangGraph checkpointer on PostgreSQL as runs. The checkpointer is only read; the "
        "runs are read only, too, until an agent that serves the flow adopts them (GraphFlow.adopt). Threads whose run "
        "is known are passed over."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("database", help="the checkpointer's database: postgresql://...")
        parser.add_argument("--flow", default="langgraph", help="the flow whose runs they become (langgraph)")
        parser.add_argument("--workspace", default="default")
        parser.add_argument("--agent-version", default="1", help="the version of the agent that they are of (1)")
        parser.add_argument("--thread", action="append", default=[], help="only this one; may be repeated")

    def handle(
        self, *, database: str, flow: str, workspace: str, agent_version: str, thread: list[str], **_: Any
    ) -> None:
        place = Workspace.objects.filter(slug=workspace).first()
        if place is None:
            raise CommandError(f"There is no workspace {workspace}: apply a file that names it first.")
        caller = Caller(kind="agent", id=NAME, name=NAME, workspaces={str(place.pk): frozenset()}, flows=(flow,))
        new = known = 0
        for found in paused_threads(database, thread):
            run, opened = services.open_run(caller, opening(found, flow=flow, agent_version=agent_version))
            new, known = new + opened, known + (not opened)
            if opened:
                self.stdout.write(f"{found.id}: {run['run']['title']}")
        self.stdout.write(f"{new} paused threads shown as runs of {flow}, {known} known before.")


# --- reading the checkpointer ----------------------------------------------------


def paused_threads(database: str, only: list[str]) -> Iterator[Thread]:
    """The paused threads of a checkpointer. `CommandError` when it cannot be read."""
    try:
        from langgraph.checkpoint.postgres import PostgresSaver
        from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
    except ImportError:
        raise CommandError(NEEDED) from None
    try:
        with psycopg.connect(database, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
            connection.execute("SET default_transaction_read_only = on")
            saver = PostgresSaver(connection, serde=JsonPlusSerializer(allowed_msgpack_modules=None))
            for name in only or _thread_ids(connection):
                thread = _read(saver, name)
                if thread is not None:
                    yield thread
    except psycopg.errors.UndefinedTable:
        raise CommandError("There are no LangGraph checkpoints in this database.") from None
    except psycopg.Error as error:
        raise CommandError(f"The checkpointer's database cannot be read: {error}") from None


def _thread_ids(connection: psycopg.Connection[Json]) -> list[str]:
    rows = connection.execute("SELECT DISTINCT thread_id FROM checkpoints WHERE checkpoint_ns = '' ORDER BY thread_id")
    return [row["thread_id"] for row in rows]


def _read(saver: PostgresSaver, thread_id: str) -> Thread | None:
    """A thread's latest checkpoint, if it waits for something."""
    saved = saver.get_tuple({"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}})
    if saved is None:
        return None
    interrupts, errors = _under_way(saved)
    values: Mapping[str, Any] = saved.checkpoint["channel_values"]
    nodes = {name.removeprefix(BRANCH) for name in values if name.startswith(BRANCH)}
    nodes |= {str(getattr(send, "node", send)) for send in values.get(SENDS) or []}
    if not (interrupts or errors or nodes or START in values):
        return None
    return Thread(thread_id, saved.checkpoint["id"], sorted(nodes), interrupts, errors)


def _under_way(saved: CheckpointTuple) -> tuple[list[Any], list[str]]:
    """The open interrupts and the errors of the tasks that have not come to their end."""
    writes: dict[str, dict[str, Any]] = {}
    for task, channel, value in saved.pending_writes or []:
        writes.setdefault(task, {})[channel] = value
    unfinished = [task for task in writes.values() if not set(task) - {INTERRUPT, RESUME, ERROR}]
    interrupts = [one for task in unfinished for one in task.get(INTERRUPT) or []]
    return interrupts, [str(task[ERROR]) for task in unfinished if ERROR in task]


# --- what it becomes ----------------------------------------------------


def opening(thread: Thread, *, flow: str, agent_version: str) -> cmd.OpenRun:
    """The run of a paused thread, with all that is known of it, waiting to be adopted."""
    asked = [sentence for one in thread.interrupts for sentence in _asked(thread, one)]
    said = [*asked, *(f"A task failed: {error}" for error in thread.errors)] or ["It has stopped between two nodes."]
    stage = ", ".join(thread.next)[:100] or "paused"
    adoption = {
        "key": "adoption",
        "name": "adoption",
        "kind": "signal",
        "due_in": TEN_YEARS,
        "from": f"an agent that serves {flow} and adopts it",
    }
    body: cmd.OpenRun = convert(
        {
            "flow": flow,
            "external_id": thread.id,
            "title": said[0][:200],
            "input": {"ref": f"langgraph:{thread.id}"},
            "agent": {"name": flow, "version": agent_version, "framework": "LangGraph"},
            "holder": NAME,
            "labels": {"imported": "langgraph"},
            "events": [
                {"type": "checkpoint", "stage": stage, "ref": thread.ref, "next": thread.next[:100]},
                *({"type": "note", "text": sentence[:4000]} for sentence in said[:100]),
                {"type": "paused", "waits": [adoption]},
            ],
        },
        cmd.OpenRun,
    )
    return body


def _asked(thread: Thread, interrupt: Any) -> Iterator[str]:
    """What an interrupt asks, in a line for each of its asks."""
    pending = Pending(
        id=getattr(interrupt, "id", ""),
        key="imported",
        node=", ".join(thread.next) or "this point",
        value=getattr(interrupt, "value", interrupt),
        response_schema=None,
    )
    for ask in question(pending, Terms()).asks:
        arguments = ask.effect.arguments if ask.effect is not None else dict(ask.details)
        told = "; ".join(f"{name}: {value}" for name, value in arguments.items())
        yield f"{ask.summary} ({told})" if told else ask.summary
