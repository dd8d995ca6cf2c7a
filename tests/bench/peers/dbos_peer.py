"""DBOS Transact, in process: a step keeps the state, an event shows the pause, the decision comes by send and recv."""

import multiprocessing
import os
import threading
import uuid
from typing import Any

from dbos import DBOS, SetWorkflowID

from tests.bench.peers.harness import Options, Parts, drive
from tests.bench.plain import PAYLOAD, clock

_paused: dict[str, float] = {}
_resumed: dict[str, float] = {}
_waits: dict[str, threading.Event] = {}


@DBOS.step()
def checkpoint() -> dict[str, Any]:
    return PAYLOAD


@DBOS.step()
def finish(decision: dict[str, Any]) -> dict[str, Any]:
    return {"approved": decision["approved"]}


@DBOS.workflow()
def workflow() -> dict[str, Any]:
    state = checkpoint()
    DBOS.set_event("status", {"status": "waiting", "ask": "approve?"})
    me = str(DBOS.workflow_id)
    _paused[me] = clock()
    _waits[me].set()
    decision = DBOS.recv("approval", timeout_seconds=3600)
    _resumed[me] = clock()
    assert state["step"] == 1
    return dict(finish(decision))


def launch(database: str) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": database,
            "log_level": "ERROR",
            "executor_id": str(os.getpid()),
            "application_version": "v1",
            "sys_db_pool_size": 20,
        }
    )
    DBOS.launch()


def make_tables(database: str) -> None:
    """In a process of its own: what is launched cannot be forked."""

    def launch_once() -> None:
        launch(database)
        DBOS.destroy()

    process = multiprocessing.get_context("fork").Process(target=launch_once)
    process.start()
    process.join()


def run(given: Options) -> None:
    make_tables(given.database)

    def make(clients: int) -> Any:
        launch(given.database)

        def cycle(k: int) -> Parts:
            me = str(uuid.uuid4())
            _waits[me] = threading.Event()
            begun = clock()
            with SetWorkflowID(me):
                handle = DBOS.start_workflow(workflow)
            assert _waits[me].wait(30)
            del _waits[me]
            decided = clock()
            DBOS.send(me, {"approved": True, "by": "u1"}, "approval")
            assert handle.get_result()["approved"]
            return {"pause": _paused.pop(me) - begun, "decide_to_resumed": _resumed.pop(me) - decided}

        def close() -> None:
            DBOS.destroy(workflow_completion_timeout_sec=1)

        return cycle, close

    drive(given, make, ("dbos",))
