"""A LangGraph agent that asks before it writes to a customer. Start it beside `make run`; docs/langgraph.md says how."""

import contextlib
import os
import sys
from typing import TypedDict

import psycopg
from langgraph.checkpoint.postgres import PostgresSaver
from langgraph.graph import START, StateGraph

from rehydrate.adapters.langgraph import GraphFlow, ask, effect
from rehydrate.client import Effect, Ledger


class Letter(TypedDict, total=False):
    customer: str
    text: str
    outcome: str


def draft(state: Letter) -> Letter:  # a model would write it; this one needs no key
    return {"text": f"Dear {state['customer']}, your contract ends in June. Shall we renew it?"}


def send(state: Letter) -> Letter:  # LangGraph runs a node again from its top at each resume
    mail = Effect("mail.send", {"to": state["customer"], "text": state["text"]}, impact="customer_promise")
    answer = ask("send-letter", f"Send this letter to {state['customer']}?", effect=mail, due="1d", risk="medium")
    if not answer.approved:  # a no, or nobody answered
        return {"outcome": f"not sent: {answer.reason or answer.status}"}
    return {"outcome": effect(mail, do=send_mail)["id"]}  # once, as approved or as edited


def send_mail(e):  # the outside: e.key is the idempotency key, e.arguments is what was approved
    with open("sent-mails.txt", "a") as outbox:
        print(e.key, "|", e.arguments["to"], "|", e.arguments["text"], file=outbox)
    return {"id": "mail-1"}


def threads() -> str:  # the database where LangGraph keeps its threads: THREADS_URL, or one that `make run` has room for
    if url := os.environ.get("THREADS_URL"):
        return url
    from rehydrate import data, postgres

    server = postgres.Embedded(data.folder())
    with psycopg.connect(server.url(), autocommit=True) as admin, contextlib.suppress(psycopg.errors.DuplicateDatabase):
        admin.execute("CREATE DATABASE threads")
    return server.url("threads")


builder = StateGraph(Letter)
builder.add_node("draft", draft)
builder.add_node("send", send)
builder.add_edge(START, "draft")
builder.add_edge("draft", "send")

if __name__ == "__main__":
    thread = sys.argv[1] if len(sys.argv) > 1 else "letter-1"
    with PostgresSaver.from_conn_string(threads()) as saver:
        saver.setup()
        ledger = Ledger()  # REHYDRATE_URL, REHYDRATE_KEY
        flow = GraphFlow(ledger, "letters", builder.compile(checkpointer=saver))
        flow.open(thread, {"customer": "ACME"}, title="Renewal letter to ACME")  # the same run, however often
        ledger.work()  # on any number of machines; Ctrl-C and SIGTERM are clean
