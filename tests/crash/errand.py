"""The crash suite's agent, run as a process of its own: one errand with every kind of effect, a question and a timer.

It writes down each answer that it got, and can be made to stand still at a point of its way, to be killed there.
It imports nothing of the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from rehydrate.client import Effect, EffectCall, LeaseHeld, Ledger, Run, Unreachable, Worker
from rehydrate.demo.outside import Outside

Json = dict[str, Any]

FLOW = "errand"


class Noting(httpx.BaseTransport):
    """Passes requests on, and writes down each that was answered well: what the server said, it must stand by."""

    def __init__(self, notes: Path) -> None:
        self._inner = httpx.HTTPTransport()
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        response.read()
        if request.method == "POST" and response.is_success:
            note = {
                "path": request.url.path.removeprefix("/api/v1"),
                "body": json.loads(request.content or b"null"),
                "status": response.status_code,
                "answer": json.loads(response.content or b"null"),
            }
            os.write(self._notes, json.dumps(note).encode() + b"\n")  # one write: several processes share the file
        return response

    def close(self) -> None:
        self._inner.close()
        os.close(self._notes)


class Stand:
    """Where it stands still, once: `before`, `after` or `told`, and the action. The file says that it got there."""

    def __init__(self, point: str, marker: Path) -> None:
        self.point, self.marker = point, marker

    def at(self, point: str) -> None:
        if point == self.point and not self.marker.exists():
            self.marker.touch()
            threading.Event().wait()  # heartbeats go on meanwhile


def register(ledger: Ledger, outside: Outside, stand: Callable[[str], None] = lambda _: None) -> None:
    def do(call: EffectCall) -> Json:
        stand(f"before {call.action}")
        result = outside.do(call)
        stand(f"after {call.action}")
        return result

    @ledger.flow(FLOW)
    def errand(run: Run) -> Json:
        order = Effect("erp.order", {"n": run.external_id, "amount": "120.00"}, resource=run.external_id)
        run.checkpoint("begin", ref=f"store://{run.external_id}", next=["Reserve", "Ask", "Order", "Tell"])
        stand("before plan")
        # Not to be repeated, and nobody can look it up: a person has to.
        reserved = run.effect(
            "crm.reserve", {"n": run.external_id}, undo=("crm.free", {"n": run.external_id}), do=do
        )  # fmt: skip
        stand("told crm.reserve")
        answer = run.ask("go-ahead", f"Order for {run.external_id}?", effect=order, on_timeout="escalate")
        if not answer.authorised:
            return {"outcome": "not ordered"}
        run.checkpoint("order", ref=f"store://{run.external_id}/{reserved['id']}")
        run.effect(order, do=do)  # may be repeated under its key
        stand("told erp.order")
        run.effect("esign.send", {"n": run.external_id}, do=do, lookup=outside.find)  # can be looked up
        run.timer("cool-off", 1)
        run.effect("mail.tell", {"n": run.external_id}, do=do)
        return {"outcome": "ordered"}

    @ledger.undo("crm.free")
    def free(call: EffectCall) -> Json:
        return do(call)


def main() -> int:
    """Everything comes from the environment, as with any agent."""
    stand = Stand(os.environ.get("ERRAND_STAND", ""), Path(os.environ["ERRAND_MARKER"]))
    with Ledger(name="errand", transport=Noting(Path(os.environ["ERRAND_NOTES"]))) as ledger:
        register(ledger, Outside(os.environ["ERRAND_WORLD"]), stand.at)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if run_id := os.environ["ERRAND_RUN"]:
            stay_with(ledger, run_id)
        else:
            ledger.work(poll=1, concurrency=int(os.environ["ERRAND_THREADS"]))
    return 0


def stay_with(ledger: Ledger, run_id: str) -> None:
    """One run to its end, for an agent that knows which is its own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    worker = Worker(ledger)
    while True:
        with contextlib.suppress(LeaseHeld, Unreachable):
            envelope = ledger.rehydrate(run_id)
            if envelope["verdict"]["outcome"] == "terminate":
                return
            worker.handle(envelope)
        time.sleep(0.1)


def _end_with_parent() -> None:
    """Standard input ends when the test is gone, whatever became of it."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
