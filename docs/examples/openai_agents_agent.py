"""A support agent of the OpenAI Agents SDK: it asks a person before it pays money back. See docs/openai-agents.md."""

import json
import os

from agents import Agent, function_tool, set_tracing_disabled
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call

from rehydrate.adapters.openai_agents import effect, effect_call, flow
from rehydrate.client import Ledger

set_tracing_disabled(True)
ledger = Ledger(os.environ.get("REHYDRATE_URL", "http://127.0.0.1:8000"))


@effect("payments.refund", impact="money", summary="Refund {amount} EUR for order {order}?")
@function_tool(needs_approval=True, failure_error_function=None)
def refund(order: str, amount: str) -> str:
    """Give a customer money back."""
    with open("outside.jsonl", "a", encoding="utf-8") as file:  # really, a bank, which is handed the key
        file.write(json.dumps({"key": effect_call().key, "order": order, "amount": amount}) + "\n")
    return f"{amount} EUR are on their way back"


def think(call):  # plays the model, so that no key of a provider is needed
    outputs = [item["output"] for item in call.input if item.get("type") == "function_call_output"]
    if outputs:
        return [assistant_message(f"Dear customer, your case is closed. {outputs[-1]}")]
    order = {"order": "A-17", "amount": "20.00"}
    return [assistant_message("The lamp of order A-17 arrived broken."), function_call("refund", order, call_id="call_1")]


model = ScriptedModel([ModelStep.respond(think)] * 1000)  # leave it out when you have OPENAI_API_KEY
support = Agent(name="Support", instructions="Look after the customer's case.", model=model, tools=[refund])


@flow(ledger, "refunds", support)  # what a new run begins with
def refunds(run):
    return f"Look after {run.title}."


if __name__ == "__main__":
    ledger.open("refunds", "case-17", title="Case 17")
    ledger.work()  # on any number of machines; Ctrl-C and SIGTERM are clean
