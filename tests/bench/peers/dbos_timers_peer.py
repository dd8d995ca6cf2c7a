"""DBOS workflows that sleep durably until the same instant; each is done when its next step is recorded."""

import time

from dbos import DBOS

from tests.bench.peers.dbos_peer import launch
from tests.bench.peers.harness import Options, report, signal, sleep_until
from tests.bench.plain import percentiles

_woke: list[float] = []
_done: list[float] = []


@DBOS.step()
def step() -> int:
    return 1


@DBOS.workflow()
def sleeper(due: float) -> None:
    DBOS.sleep(max(0.001, due - time.time()))
    _woke.append(time.time())
    step()
    _done.append(time.time())


def run(given: Options) -> None:
    launch(given.database)
    due = time.time() + 10 + given.n * 0.004
    handles = [DBOS.start_workflow(sleeper, due) for _ in range(given.n)]
    if time.time() > due - 1:
        raise RuntimeError(f"{given.n} sleepers could not be started in time")
    sleep_until(due - 0.5)
    signal("begin")
    for handle in handles:
        handle.get_result()
    signal("end")
    report(
        ("dbos",),
        n=given.n,
        early=sum(at < due for at in _woke),
        woke_ms=percentiles([at - due for at in _woke]),
        lateness_ms=percentiles([at - due for at in _done]),
        drained_per_second=round(given.n / (max(_done) - due)),
    )
    DBOS.destroy(workflow_completion_timeout_sec=1)
