"""Timers that come due at the same second. Under work."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import transaction

from rehydrate import clock, loading, projections
from rehydrate.contexts import make_context
from rehydrate.core import commands as cmd
from rehydrate.core import decide
from rehydrate.core.draft import Draft
from rehydrate.core.state import Run, State
from rehydrate.ids import uuid7
from rehydrate.models import Workspace

AGENT = {"kind": "agent", "id": "bench", "name": "bench"}


def fill(n: int, *, due_in: int, batch: int = 500) -> dt.datetime:
    """`n` runs that each wait for a timer that is due at the same instant, made as an agent makes them."""
    workspace, _ = Workspace.objects.get_or_create(slug="bench")
    due_at = clock.now() + dt.timedelta(seconds=due_in)
    for start in range(0, n, batch):
        changes = [_paused(str(workspace.pk), i, due_at) for i in range(start, min(n, start + batch))]
        with transaction.atomic():
            projections.save(changes)
    return due_at


def _paused(workspace: str, i: int, due_at: dt.datetime) -> projections.Change:
    number, policy = 0, loading.policy_of(workspace, "bench", 0)
    ctx = make_context(now=clock.now(), number=number, policy=policy, pinned=policy, workspace=workspace, actor=AGENT)
    draft = Draft(State(Run(id=str(uuid7()))), ctx)
    body = cmd.OpenRun(flow="bench", external_id=f"timer-{uuid7()}", holder="h")
    decide.open_run(draft, body, workspace=workspace, owner=None)
    events: list[Any] = [
        cmd.Checkpoint(stage="asleep", ref="s3://bench"),
        cmd.Paused(waits=[cmd.WaitSpec(name="later", kind="timer", due_at=due_at)], resume_when="all"),
    ]
    for event in events:
        decide.append(draft, event, pointer="/events/0", last=True)
    decide.settle(draft)
    return projections.Change(None, draft.state, draft.recorded, (), draft.now)
