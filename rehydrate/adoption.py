"""Runs that began elsewhere, shown as they stand and read only until an agent adopts them. For the `import_` commands.

Such a run waits for the signal `adoption`, in place of its own questions, which stand in its history as notes: so
nobody can answer them, and no agent may claim it. An agent that serves the flow takes it over by recalling that wait;
from then on it is a run as any other. People may take it over or terminate it before. The deadline that each wait has
to have is ten years off, about the latest that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from django.core.management.base import CommandError, CommandParser

from rehydrate import services
from rehydrate.callers import Caller
from rehydrate.core import commands as cmd
from rehydrate.core.parsing import convert
from rehydrate.models import Workspace

TEN_YEARS: Final = 3650 * 86400


@dataclass(frozen=True)
class Found:
    """A paused run of another system: what it asks, a line each, what comes next, and where its state is, or itself."""

    external_id: str
    framework: str
    stage: str
    said: list[str]
    next: list[str]
    ref: str | None = None
    state: str | None = None
    input_ref: str | None = None


def add_arguments(parser: CommandParser, *, flow: str) -> None:
    """What all of these commands may be told."""
    parser.add_argument("--flow", default=flow, help=f"the flow whose runs they become ({flow})")
    parser.add_argument("--workspace", default="default")
    parser.add_argument("--agent-version", default="1", help="the version of the agent that they are of (1)")


def show(
    found: Iterable[Found], *, by: str, flow: str, workspace: str, agent_version: str, say: Callable[[str], object]
) -> tuple[int, int]:
    """Opens a run for each, and says so; how many are new, and how many were known. Raises `CommandError`."""
    place = Workspace.objects.filter(slug=workspace).first()
    if place is None:
        raise CommandError(f"There is no workspace {workspace}: apply a file that names it first.")
    caller = Caller(kind="agent", id=by, name=by, workspaces={str(place.pk): frozenset()}, flows=(flow,))
    new = known = 0
    for one in found:
        run, opened = services.open_run(caller, _opening(one, by=by, flow=flow, agent_version=agent_version))
        new, known = new + opened, known + (not opened)
        if opened:
            say(f"{one.external_id}: {run['run']['title']}")
    return new, known


def _opening(found: Found, *, by: str, flow: str, agent_version: str) -> cmd.OpenRun:
    checkpoint = {"type": "checkpoint", "stage": found.stage[:100], "next": found.next[:100]}
    adoption = {
        "key": "adoption",
        "name": "adoption",
        "kind": "signal",
        "due_in": TEN_YEARS,
        "from": f"an agent that serves {flow} and adopts it",
    }
    given = {name: value for name in ("ref", "state") if (value := getattr(found, name)) is not None}
    body: cmd.OpenRun = convert(
        {
            "flow": flow,
            "external_id": found.external_id,
            "title": found.said[0][:200],
            **({"input": {"ref": found.input_ref}} if found.input_ref else {}),
            "agent": {"name": flow, "version": agent_version, "framework": found.framework},
            "holder": by,
            "labels": {"imported": found.framework.lower()},
            "events": [
                {**checkpoint, **given},
                *({"type": "note", "text": sentence[:4000]} for sentence in found.said[:100]),
                {"type": "paused", "waits": [adoption]},
            ],
        },
        cmd.OpenRun,
    )
    return body
