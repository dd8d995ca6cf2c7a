"""A stand-alone agent in one file, without a framework: it asks a person before it grants access. See docs/plain.md."""

import json
import logging
import os
import secrets

from rehydrate.client import Effect, Ledger

ledger = Ledger(os.environ.get("REHYDRATE_URL", "http://127.0.0.1:8000"), name="access pilot")


def outside(e):
    """Does what an effect says: e.key is the idempotency key, e.arguments is what was approved. Gives the receipt.

    Here it writes a line into outside.jsonl. Really it calls a system, hands it the key, and raises `Refused` when that
    said no; whatever else is raised may have happened, and the ledger keeps it so.
    """
    with open("outside.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"key": e.key, "action": e.action, "arguments": e.arguments}) + "\n")
    return {"id": secrets.token_hex(4)}


@ledger.undo("tickets.close")
def close_ticket(e):
    return outside(e)


@ledger.flow("access-request", version="1")  # called from the top whenever the run may go on
def access_request(run):
    ticket = run.effect(
        "tickets.open", {"who": "Dana", "what": "payroll folder"}, undo=("tickets.close", {"who": "Dana"}), do=outside
    )
    run.checkpoint("asked", ref=f"https://tickets.example/{ticket['id']}", next=["Grant the access", "Tell Dana"])
    grant = Effect(
        "directory.grant_access", {"who": "Dana", "what": "payroll folder", "days": 30}, impact="access"
    )
    answer = run.ask(
        "access-review",
        "Give Dana access to the payroll folder for 30 days?",
        effect=grant,
        due="2d",
        risk="high",
        on_reject="continue",  # the flow goes on, and tells Dana
        details={"Dana works in": "Finance", "The folder has": "everybody's salaries"},
        schema={"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 90}}},
        rationale="Dana stands in for Erik, who has this access and is on leave for a month.",
        rollback="Nothing has been granted yet. Access can be taken away again; what was read cannot be unread.",
    )
    if not answer.approved:  # a person's no, or nobody answered in time
        run.effect("mail.send", {"to": "Dana", "text": f"Not granted: {answer.reason or answer.status}"}, do=outside)
        return "not granted"
    run.checkpoint("granting", ref=f"https://tickets.example/{ticket['id']}")
    granted = run.effect(grant, do=outside)  # as approved, or as edited; once, however often this process dies
    run.effect("mail.send", {"to": "Dana", "text": f"You have it: {granted['id']}"}, do=outside)
    return "granted"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    ledger.open("access-request", "access-1", title="Payroll access for Dana", requested_by="dana")
    ledger.work()  # on any number of machines; Ctrl-C and SIGTERM are clean
