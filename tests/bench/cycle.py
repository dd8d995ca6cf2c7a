"""One unit of work, the same for every system: open a run, checkpoint, pause, decide, resume, finish.

Over HTTP, the whole ledger, four requests: the run's first events come along with its opening. Run by itself:
`python -m tests.bench.cycle --clients 8`.
"""

import argparse
import json
import multiprocessing
import os
import uuid
from typing import Any

import msgspec
import psycopg

from tests.bench.plain import PAYLOAD, clock, percentiles, shares
from tests.bench.stage import Caller, Installation, installation


def cycle(agent: Caller, person: Caller, flow: str = "bench") -> dict[str, float]:
    """One cycle; the seconds of its parts. Of several clients each takes up whichever run is ready."""
    begun = clock()
    opened = agent.post(
        "/runs",
        {
            "flow": flow,
            "external_id": uuid.uuid4().hex,
            "title": "Contract",
            "holder": "bench-1",
            "events": [
                {"type": "checkpoint", "stage": "draft", "ref": "s3://drafts/17", "data": PAYLOAD},
                {
                    "type": "paused",
                    "waits": [
                        {
                            "name": "legal-approval",
                            "kind": "approval",
                            "due_in": 86400,
                            "ask": {"summary": "Send the contract?"},
                        }
                    ],
                },
            ],
        },
    )
    wait = opened["run"]["waits"][0]
    paused = clock()
    person.post(f"/waits/{wait['id']}/decisions", {"choice": "approve", "wait_version": wait["version"]})
    envelope = agent.post("/claims", {"flows": [flow], "holder": "bench-1", "wait": 30})
    resumed = clock()
    assert envelope["verdict"]["outcome"] == "continue"
    assert envelope["checkpoint"]["data"]["step"] == 1
    agent.post(
        f"/runs/{envelope['run']['id']}/events",
        {"epoch": envelope["lease"]["epoch"], "events": [{"type": "completed", "result": {"ref": "s3://signed/17"}}]},
    )
    done = clock()
    return {"pause": paused - begun, "decide_to_resumed": resumed - paused, "cycle": done - begun}


class Direct:
    """The same four operations by calling what answers them, as peers in process are called: no HTTP, no key.

    In a process with the installation's environment. Answers are what the API would encode.
    """

    def __init__(self, person: str | None = None) -> None:
        from django.contrib.auth.models import User

        from rehydrate import callers, services
        from rehydrate.core import commands as cmd
        from rehydrate.models import Workspace

        workspace = str(Workspace.objects.get(slug="default").pk)
        self.sent = 0
        self.services, self.commands = services, cmd
        if person is not None:
            self.caller = callers.for_user(User.objects.get(username=person), channel="api")
        else:
            self.caller = callers.Caller(
                kind="agent", id="bench", name="bench", workspaces={workspace: frozenset()}, flows=("*",)
            )

    def post(self, path: str, body: Any) -> Any:
        match path.strip("/").split("/"):
            case ["runs"]:
                return self.services.open_run(self.caller, self._body(body, self.commands.OpenRun))[0]
            case ["waits", wait, "decisions"]:
                return self.services.decide(self.caller, wait, self._body(body, self.commands.Decide))
            case ["claims"]:
                return self.services.claim(self.caller, self._body(body, self.commands.Claim))
            case ["runs", run, "events"]:
                return self.services.append_events(self.caller, run, self._body(body, self.commands.Append))
        raise ValueError(path)

    def _body(self, body: Any, shape: Any) -> Any:
        return msgspec.json.decode(json.dumps(body), type=shape)

    def close(self) -> None:
        """The connection is its thread's, and stays."""


def _drive(
    port: int,
    agent_key: str,
    person_key: str,
    clients: int,
    warm: float,
    seconds: float,
    pipe: Any,
    environment: dict[str, str] | None = None,
    once: bool = False,
) -> None:
    """Clients in this process; with an `environment` they call the ledger directly."""
    import threading

    if environment is not None:
        os.environ.update(environment, DJANGO_SETTINGS_MODULE="rehydrate.settings")
        import django

        django.setup()
        from rehydrate import garbage

        garbage.collect_rarely()
    results: list[dict[str, float]] = []
    requests: list[int] = []
    before = os.times()
    errors: list[str] = []
    ready, go = threading.Barrier(clients + 1), threading.Barrier(clients + 1)

    def loop() -> None:
        agent: Any = Caller(port, agent_key, once=once) if environment is None else Direct()
        person: Any = Caller(port, person_key, once=once) if environment is None else Direct("alice")
        try:
            end = clock() + warm
            while clock() < end:
                cycle(agent, person)
            warmed = agent.sent + person.sent
            ready.wait()
            go.wait()
            end = clock() + seconds
            while clock() < end:
                results.append(cycle(agent, person))
            requests.append(agent.sent + person.sent - warmed)
        except Exception as error:
            errors.append(repr(error))
            ready.abort()
            go.abort()
        finally:
            agent.close()
            person.close()

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        ready.wait(warm + 60)
        pipe.send("ready")
        pipe.recv()
        before = os.times()
        go.wait()
    except threading.BrokenBarrierError:
        pass
    for thread in threads:
        thread.join(seconds + 60)
    used = os.times()
    cpu = used.user + used.system - before.user - before.system
    pipe.send((results, errors, cpu, sum(requests)))
    pipe.recv()  # connections stay until what was used on their account has been read


def measure(
    made: Installation,
    *,
    clients: int,
    seconds: float = 6,
    warm: float = 2,
    direct: bool = False,
    once: bool = False,
) -> dict[str, Any]:
    """Cycles a second with `clients` clients in at most two processes, latencies in ms, CPU ms a cycle by process.

    `direct`: without HTTP, so that what the clients' processes use is the ledger's. `once`: with Idempotency-Keys.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for share in shares(clients):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_drive,
            args=(made.port, made.agent, made.person, share, warm, seconds, theirs),
            kwargs={"environment": made.environment if direct else None, "once": once},
            daemon=True,
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    words = [pipe.recv() for pipe in pipes]
    if any(word != "ready" for word in words):
        raise RuntimeError(f"a client failed while warming up: {words}")
    cpu, commits = made.cpu_seconds(), _commits(made)
    begun = clock()
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    took = clock() - begun
    after = made.cpu_seconds()
    for pipe in pipes:
        pipe.send("over")
    for process in processes:
        process.join(30)
    errors = [error for _, failed, _, _ in found for error in failed]
    if errors:
        raise RuntimeError("; ".join(errors[:3]))
    cycles = [each for results, _, _, _ in found for each in results]
    n = len(cycles)
    return {
        "clients": clients,
        "cycles": n,
        "per_second": round(n / took, 1),
        **{
            f"{name}_ms": percentiles([each[name] for each in cycles])
            for name in ("pause", "decide_to_resumed", "cycle")
        },
        "cpu_ms_a_cycle": {
            **{kind: round((after[kind] - cpu[kind]) / n * 1000, 2) for kind in cpu},
            "clients": round(sum(used for _, _, used, _ in found) / n * 1000, 2),
        },
        "requests_a_cycle": round(sum(sent for *_, sent in found) / n, 2),
        "commits_a_cycle": round((_commits(made) - commits) / n, 2),
    }


def _commits(made: Installation) -> int:
    """Transactions that wrote: each takes a number."""
    with psycopg.connect(made.database, autocommit=True) as connection:
        row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--direct", action="store_true", help="call the ledger in the clients' processes, without HTTP")
    parser.add_argument("--once", action="store_true", help="send an Idempotency-Key with each request")
    given = parser.parse_args()
    with installation() as made:
        for clients in given.clients:
            print(
                json.dumps(measure(made, clients=clients, seconds=given.seconds, direct=given.direct, once=given.once)),
                flush=True,
            )
