"""`import_langgraph`: shows the paused threads of a LangGraph checkpointer as runs, so that stuck ones are seen.

What it reads it leaves as it is, and a run that it opens is read only until it is adopted (see `rehydrate.adoption`):
an agent that serves the flow does that with `GraphFlow.adopt(thread)`, and what is still open in its thread is asked.

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

from rehydrate import adoption
from rehydrate.adapters._langgraph_asks import Pending, Terms, question
from rehydrate.adoption import Found

if TYPE_CHECKING:
    from langgraph.checkpoint.base import CheckpointTuple
    from langgraph.checkpoint.postgres import PostgresSaver

Json = dict[str, Any]

NAME = "import_langgraph"
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
        adoption.add_arguments(parser, flow="langgraph")
        parser.add_argument("--thread", action="append", default=[], help="only this one; may be repeated")

    def handle(
        self, *, database: str, flow: str, workspace: str, agent_version: str, thread: list[str], **_: Any
    ) -> None:
        found = (shown(one) for one in paused_threads(database, thread))
        new, known = adoption.show(
            found, by=NAME, flow=flow, workspace=workspace, agent_version=agent_version, say=self.stdout.write
        )
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


def shown(thread: Thread) -> Found:
    """All that is known of a paused thread."""
    asked = [sentence for one in thread.interrupts for sentence in _asked(thread, one)]
    said = [*asked, *(f"A task failed: {error}" for error in thread.errors)] or ["It has stopped between two nodes."]
    return Found(
        external_id=thread.id,
        framework="LangGraph",
        stage=", ".join(thread.next) or "paused",
        said=said,
        next=thread.next,
        ref=thread.ref,
        input_ref=f"langgraph:{thread.id}",
    )


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
