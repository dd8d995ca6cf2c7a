"""Events taken in batches of a hundred, each batch one request and one commit: how many a second.

python -m tests.bench.ingest                # prints JSON
"""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

from tests.bench.plain import clock, percentiles
from tests.bench.stage import Caller, Installation, installation

BATCH = 100
CLIENTS = (1, 8)


def batch(size: int = BATCH) -> list[dict[str, Any]]:
    """What an agent tells of its work: nine notes, then a checkpoint, and so on."""
    return [
        {"type": "checkpoint", "stage": f"step-{n}", "ref": f"s3://drafts/17/{n}"}
        if n % 10 == 9
        else {"type": "note", "text": f"read page {n} of the supplier's answer"}
        for n in range(size)
    ]


def open_run(agent: Caller) -> tuple[str, int]:
    """A run that the caller holds: its id and the lease's epoch."""
    opened = agent.post("/runs", {"flow": "bench", "external_id": uuid.uuid4().hex, "holder": "bench-1"})
    return opened["run"]["id"], opened["lease"]["epoch"]


def measure(*, seconds: float = 6) -> dict[str, Any]:
    """`{batch, clients: {"1": {events_per_second, batch_ms, cpu_us_an_event}, "8": ...}}`."""
    with installation() as made:
        return {"batch": BATCH, "clients": {str(clients): _with(made, clients, seconds) for clients in CLIENTS}}


def _with(made: Installation, clients: int, seconds: float) -> dict[str, Any]:
    taken: list[float] = []
    errors: list[str] = []
    start = threading.Barrier(clients + 1)

    def client() -> None:
        agent = Caller(made.port, made.agent)
        try:
            run, epoch = open_run(agent)
            body = {"epoch": epoch, "events": batch()}
            for _ in range(3):
                agent.post(f"/runs/{run}/events", body)
            start.wait(60)
            end = clock() + seconds
            while (begun := clock()) < end:
                agent.post(f"/runs/{run}/events", body)
                taken.append(clock() - begun)
        except Exception as error:
            errors.append(repr(error))
            start.abort()
        finally:
            agent.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        start.wait(60)
    except threading.BrokenBarrierError:
        raise RuntimeError("; ".join(errors[:3])) from None
    before, begun = made.cpu_seconds(), clock()
    for thread in threads:
        thread.join()
    took, after = clock() - begun, made.cpu_seconds()
    if errors:
        raise RuntimeError("; ".join(errors[:3]))
    events = len(taken) * BATCH
    return {
        "events_per_second": round(events / took),
        "batch_ms": percentiles(taken),
        "cpu_us_an_event": {kind: round((after[kind] - before[kind]) / events * 1e6, 1) for kind in after},
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
