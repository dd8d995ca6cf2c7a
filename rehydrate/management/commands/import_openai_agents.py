"""`import_openai_agents`: shows paused states of the OpenAI Agents SDK as runs, so that stuck ones are seen.

A state is a file with what `result.to_state().to_json()` gave, one for each run; its name without the ending becomes
the run's external id. It is kept encrypted and without its contexts. A run that is opened is read only until it is
adopted (see `rehydrate.adoption`): an agent that serves the flow does that with `adopt(ledger, flow, external_id)` of
the adapter. Approvals that stand in a state count for nothing: people are asked anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rehydrate import adoption
from rehydrate.adoption import Found

NAME = "import_openai_agents"
NEEDED = "This needs the OpenAI Agents SDK on this machine: pip install 'openai-agents>=0.24,<1'"


class Command(BaseCommand):
    help = (
        "Show paused states of the OpenAI Agents SDK as runs, which are read only until an agent that serves the flow "
        "adopts them. The files are only read. States whose run is known are passed over."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "states", nargs="+", type=Path, metavar="FILE", help="a state as JSON; its name is the run's"
        )
        adoption.add_arguments(parser, flow="openai-agents")

    def handle(self, *, states: list[Path], flow: str, workspace: str, agent_version: str, **_: Any) -> None:
        found = (one for file in states for one in paused_state(file))
        new, known = adoption.show(
            found, by=NAME, flow=flow, workspace=workspace, agent_version=agent_version, say=self.stdout.write
        )
        self.stdout.write(f"{new} paused states shown as runs of {flow}, {known} known before.")


def paused_state(file: Path) -> Iterator[Found]:
    """The state in a file, if it waits for approvals. `CommandError` when it is none."""
    try:
        from rehydrate.adapters.openai_agents import FRAMEWORK, kept
    except ImportError:
        raise CommandError(NEEDED) from None
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise CommandError(f"{file} is no JSON.") from None
    if not isinstance(state, dict) or "$schemaVersion" not in state:
        raise CommandError(f"{file} is no state of the OpenAI Agents SDK: it has no $schemaVersion.")
    step = state.get("current_step") or {}
    calls = (step.get("data") or {}).get("interruptions") or []
    if calls:
        yield Found(
            external_id=file.stem,
            framework=FRAMEWORK,
            stage="step-1",
            said=[_asked(call) for call in calls],
            next=[str(call.get("tool_name") or "a tool") for call in calls],
            state=kept(state),
        )


def _asked(call: dict[str, Any]) -> str:
    """What a call that waits for an approval would do, in a line."""
    item = call.get("raw_item") or {}
    agent = (call.get("agent") or {}).get("name") or "The agent"
    return f"{agent} would call {call.get('tool_name') or item.get('name')} ({item.get('arguments')})"
