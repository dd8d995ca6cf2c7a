"""OpenAI Agents with its run state kept in a row, in process, with a model that costs nothing.

The SDK has no store of its own: three statements are the least that an application writes.
"""

import contextvars
import os
import uuid
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

import psycopg
from agents import Agent, ModelResponse, RunConfig, Runner, RunState, Usage, function_tool
from agents.models.interface import Model
from agents.testing import assistant_message, function_call

from tests.bench.peers.harness import Options, Parts, drive
from tests.bench.plain import PAYLOAD, clock

#: The tool notes here when the run really went on.
_resumed: contextvars.ContextVar[list[float]] = contextvars.ContextVar("resumed")


class Costless(Model):
    """First the tool is called; after its output comes a last message."""

    async def get_response(self, system_instructions: Any, input: Any, *more: Any, **others: Any) -> Any:
        last = input[-1] if isinstance(input, list) else {}
        if isinstance(last, dict) and last.get("type") == "function_call_output":
            output = [assistant_message("done")]
        else:
            output = [function_call("send_email", {"to": "a@example.com"}, call_id=f"c{uuid.uuid4().hex}")]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *more: Any, **others: Any) -> Any:
        raise NotImplementedError


@function_tool(needs_approval=True)
async def send_email(to: str) -> str:
    """Send an email."""
    _resumed.get().append(clock())
    return f"sent to {to}"


AGENT = Agent(name="bench", instructions="x", model=Costless(), tools=[send_email])
CONFIG = RunConfig(tracing_disabled=True)
INPUT: Any = [*(dict(message) for message in PAYLOAD["messages"]), {"role": "user", "content": "go"}]


def run(given: Options) -> None:
    with psycopg.connect(given.database, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE run_state (id uuid PRIMARY KEY, status text NOT NULL, state text NOT NULL,"
            " at timestamptz DEFAULT now())"
        )

    async def make(clients: int) -> Any:
        connections = [await psycopg.AsyncConnection.connect(given.database, autocommit=True) for _ in range(clients)]

        async def cycle(k: int) -> Parts:
            do, me, resumed = connections[k].execute, uuid.uuid4(), list[float]()
            _resumed.set(resumed)
            begun = clock()
            result = await Runner.run(AGENT, INPUT, run_config=CONFIG)
            assert len(result.interruptions) == 1
            kept = result.to_state().to_string()
            await do("INSERT INTO run_state (id, status, state) VALUES (%s, 'waiting', %s)", (me, kept))
            paused = clock()
            decided = await do("UPDATE run_state SET status = 'approved' WHERE id = %s AND status = 'waiting'", (me,))
            assert decided.rowcount == 1
            row = await (await do("SELECT state FROM run_state WHERE id = %s", (me,))).fetchone()
            assert row is not None
            state = await RunState.from_string(AGENT, row[0])
            state.approve(state.get_interruptions()[0])
            result = await Runner.run(AGENT, state, run_config=CONFIG)
            assert result.final_output == "done"
            await do("UPDATE run_state SET status = 'done' WHERE id = %s", (me,))
            return {"pause": paused - begun, "decide_to_resumed": resumed[0] - paused}

        async def close() -> None:
            for connection in connections:
                await connection.close()

        return cycle, close

    drive(given, make, ("openai-agents",))
