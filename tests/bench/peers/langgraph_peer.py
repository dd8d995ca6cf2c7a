"""LangGraph with PostgresSaver, in process: a node writes the state, the next one interrupts and gets the decision.

As documented, a process's clients share one saver over a pool; `one_each` gives each client a saver and a connection,
which goes round the saver's own lock. Durability is "sync": each step is kept before the next one begins.
"""

import uuid
from typing import Any, TypedDict

import psycopg
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from tests.bench.peers.harness import Options, Parts, drive
from tests.bench.plain import PAYLOAD, clock

CONNECTION: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
_resumed: dict[str, float] = {}


class State(TypedDict, total=False):
    task: str
    state: dict[str, Any]
    decision: dict[str, Any]


def work(state: State) -> State:
    return {"state": PAYLOAD}


def gate(state: State, config: RunnableConfig) -> State:
    decision = interrupt({"ask": "approve?", "action": "send_email"})
    _resumed[config["configurable"]["thread_id"]] = clock()
    return {"decision": decision}


def build(saver: Any) -> Any:
    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_node("gate", gate)
    graph.add_edge(START, "work")
    graph.add_edge("work", "gate")
    graph.add_edge("gate", END)
    return graph.compile(checkpointer=saver)


def run(given: Options, *, one_each: bool = False) -> None:
    with PostgresSaver.from_conn_string(given.database) as saver:
        saver.setup()

    def make(clients: int) -> Any:
        if one_each:
            open_ones: list[Any] = [psycopg.connect(given.database, **CONNECTION) for _ in range(clients)]
            graphs = [build(PostgresSaver(one)) for one in open_ones]
        else:
            pool: Any = ConnectionPool(given.database, min_size=clients, max_size=clients, kwargs=CONNECTION, open=True)
            open_ones = [pool]
            graphs = [build(PostgresSaver(pool))] * clients

        def cycle(k: int) -> Parts:
            thread = str(uuid.uuid4())
            config = {"configurable": {"thread_id": thread}}
            begun = clock()
            assert graphs[k].invoke({"task": "x"}, config, durability="sync")["__interrupt__"]
            paused = clock()
            answer: Command[Any] = Command(resume={"approved": True, "by": "u1"})
            result = graphs[k].invoke(answer, config, durability="sync")
            assert result["decision"]["approved"]
            assert result["state"]["step"] == 1
            return {"pause": paused - begun, "decide_to_resumed": _resumed.pop(thread) - paused}

        def close() -> None:
            for one in open_ones:
                one.close()

        return cycle, close

    drive(given, make, ("langgraph", "langgraph-checkpoint-postgres"))
