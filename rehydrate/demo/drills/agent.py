"""The agent that is drilled: `python -m rehydrate.demo.drills.agent DRILL EXTERNAL_ID`. It works until it is killed.

A fresh process knows the order's own number and nothing else: it finds the run by that, asks what must happen now,
and obeys. What it sees goes to standard output, one JSON object a line, for the drill to judge. It finds the ledger by
REHYDRATE_URL and REHYDRATE_KEY, and the outside world by REHYDRATE_DEMO_WORLD.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import threading
import time
from functools import partial
from typing import Any

from rehydrate.client import Approval, Callback, Effect, EffectCall, LeaseHeld, Ledger, Run, Worker
from rehydrate.demo.drills import APPROVAL, CALLBACK, FLOW
from rehydrate.demo.outside import Outside

Json = dict[str, Any]

LEASE_SECONDS = 5
AMOUNT, CURRENCY = "1250.00", "EUR"
ENDED = ("completed", "terminated")
# How long it asks again for a run whose lease a dead process still holds.
PATIENCE = 60.0


class DrilledAgent:
    """One process' agent. `due` is how many seconds the approval may take."""

    def __init__(self, drill: str, external_id: str, *, due: int, flow: str = FLOW) -> None:
        self.drill = drill
        self.external_id = external_id
        self.due = due
        self.flow = flow
        self.ledger = Ledger(name="drill agent")
        self.outside = Outside(timeout=120)
        self.ledger.flow(flow, version="1")(self.pay_an_order)

    # --- the flow

    def pay_an_order(self, run: Run) -> Json:
        order = {"order": run.external_id}
        run.checkpoint("draft", ref=self.ref("draft"))
        run.effect("crm.create_draft", order, impact="low", do=self.act)
        awaited: list[Any] = []
        if self.drill == "restart-while-waiting":
            quote = run.open(Callback(CALLBACK, "1d", who="the supplier"))
            run.effect("supplier.request_quote", order, impact="low", do=partial(self.act, callback_url=quote.url))
            awaited.append(quote)
        run.checkpoint("asked", ref=self.ref("asked"), next=["Pay the order", "Note the payment"])
        pay = Effect(
            "payments.pay",
            {**order, "amount": AMOUNT, "currency": CURRENCY},
            resource=run.external_id,
            amount=(AMOUNT, CURRENCY),
            impact="money",
        )
        # The strictest end that a deadline can have: were it to count after the approval, the run would be over.
        approval = Approval(
            APPROVAL, self.due, summary=f"Drill: pay {AMOUNT} {CURRENCY}?", effect=pay, on_timeout="terminate"
        )
        run.pause(*awaited, approval)
        run.checkpoint("paying", ref=self.ref("paying"), next=["Pay the order", "Note the payment"])
        paid = run.effect(pay, do=self.act)
        run.effect("crm.note_payment", {**order, "payment": paid["id"]}, impact="low", do=self.act)
        return {"outcome": "paid", "payment": paid["id"]}

    def act(self, effect: EffectCall, *, callback_url: str | None = None) -> Json:
        """Do it outside."""
        say("acting", key=effect.key)
        return self.outside.do(effect, callback_url=callback_url)

    def ref(self, stage: str) -> str:
        return f"drill://{self.external_id}/{stage}"

    # --- coming to it, or back to it

    def find(self) -> str:
        """The id of the run with this number: opened, or found as it was left."""
        digest = hashlib.sha256(self.external_id.encode()).hexdigest()
        opened = self.ledger.open(
            self.flow,
            self.external_id,
            title=f"Drill {self.external_id}",
            input_ref=self.ref("input"),
            input_digest=f"sha256:{digest}",
        )
        return str(opened["run"]["id"])

    def come_back(self, run_id: str) -> Json:
        """What the ledger says must happen now; waits for the lease of a dead process to lapse."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.ledger.rehydrate(
                    run_id,
                    agent=self.ledger.agent_card(self.ledger.flows[self.flow]),
                    lease_seconds=LEASE_SECONDS,
                )
            except LeaseHeld:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.25)

    def go_on(self, envelope: Json) -> None:
        """Do what the envelope says: nothing without a lease."""
        Worker(self.ledger).handle(envelope)

    def work(self) -> None:
        run_id = self.find()
        say("found", run=run_id)
        envelope = self.come_back(run_id)
        told = ("verdict", "lease", "checkpoint", "effects", "passed", "waits")
        say("envelope", run=envelope["run"]["id"], **{name: envelope.get(name) for name in told})
        self.go_on(envelope)
        status = self.ledger.get(run_id)["status"]
        say("left", status=status)
        if status not in ENDED:
            threading.Event().wait()  # a worker that idles; it is for the drill to kill it


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main(kind: type[DrilledAgent] = DrilledAgent) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drill")
    parser.add_argument("external_id")
    parser.add_argument("--due", type=int, required=True)
    parser.add_argument("--flow", default=FLOW)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kind(options.drill, options.external_id, due=options.due, flow=options.flow).work()
    return 0


if __name__ == "__main__":
    sys.exit(main())
