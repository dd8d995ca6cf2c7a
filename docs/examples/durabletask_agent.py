"""A contract approval as a durable orchestration: it asks a person before it sends. See docs/durabletask.md."""

import json
import os
import secrets

from durabletask.client import TaskHubGrpcClient
from durabletask.testing import create_test_backend
from durabletask.worker import TaskHubGrpcWorker

from rehydrate.adapters.durabletask import Flow
from rehydrate.client import Effect, Ledger

ledger = Ledger(os.environ.get("REHYDRATE_URL", "http://127.0.0.1:8000"))
contracts = Flow(ledger, "contracts", opening=lambda given: {"title": f"Contract for {given['customer']}"}, poll="2s")


@contracts.effect("crm.create_draft")
@contracts.effect("esign.send")
def outside(e):  # really, a system, which is handed e.key
    with open("outside.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"key": e.key, "action": e.action, "arguments": e.arguments}) + "\n")
    return {"id": secrets.token_hex(4)}


@contracts.orchestrator  # deterministic: it only yields
def contract(run, given):
    draft = yield from run.effect("crm.create_draft", {"customer": given["customer"]})
    send = Effect("esign.send", {"draft": draft["id"], "amount": given["amount"]}, impact="customer_promise")
    question = f"Send the contract over {given['amount']} EUR to {given['customer']}?"
    answer = yield from run.ask("legal-approval", question, effect=send, due="3d", on_reject="continue")
    if not answer.approved:  # a no, or nobody answered
        return f"not sent: {answer.reason or answer.status}"
    return (yield from run.effect(send))["id"]  # as approved or as edited


if __name__ == "__main__":
    hub = os.environ.get("TASK_HUB")  # such as localhost:4001; without one, a task hub in memory
    if hub is None:
        port = int(os.environ.get("PORT", "4001"))
        create_test_backend(port=port)
        hub = f"localhost:{port}"
    with TaskHubGrpcWorker(host_address=hub) as worker, TaskHubGrpcClient(host_address=hub) as client:
        contracts.add_to(worker)
        worker.start()
        if client.get_orchestration_state("contract-17") is None:
            given = {"customer": "Northwind", "amount": "48000.00"}
            client.schedule_new_orchestration(contract, input=given, instance_id="contract-17")
        done = client.wait_for_orchestration_completion("contract-17", timeout=7 * 86400)
        print("done:", done.get_output())
