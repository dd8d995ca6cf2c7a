"""What a decision needs besides the state of its run: the time, the policies, the people. No rules and no writes."""

import datetime as dt
import secrets as random_tokens
from typing import Any, Final

from django.db import connection

from rehydrate import loading
from rehydrate.core import events as ev
from rehydrate.core.draft import Context, People
from rehydrate.core.policy import FlowPolicy
from rehydrate.ids import uuid7
from rehydrate.loading import Loaded

SYSTEM: Final = {"kind": ev.SYSTEM.kind, "id": ev.SYSTEM.id, "name": ev.SYSTEM.name}


def people_of(workspace: str) -> People:
    """Who may decide in a workspace. One query."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT ({loading.PEOPLE} %s)::text", [workspace])
        return loading.people_in(cursor.fetchone()[0])


def context_of(loaded: Loaded, actor: dict[str, Any]) -> Context:
    return make_context(
        now=loaded.now,
        number=loaded.number,
        policy=loaded.policy,
        pinned=loaded.pinned,
        workspace=loaded.state.run.workspace_id,
        actor=actor,
        people=loaded.people,
    )


def make_context(
    *,
    now: dt.datetime,
    number: int,
    policy: FlowPolicy,
    pinned: FlowPolicy,
    workspace: str,
    actor: dict[str, Any],
    people: People | None = None,
) -> Context:
    known = [people] if people is not None else []

    def staff() -> People:
        if not known:
            known.append(people_of(workspace))
        return known[0]

    return Context(
        now=now,
        policy=policy,
        policy_number=number,
        pinned=pinned,
        actor=ev.Actor(kind=actor["kind"], id=actor["id"], name=actor["name"]),
        new_id=lambda: str(uuid7()),
        new_token=lambda: random_tokens.token_urlsafe(32),
        people=staff,
        owner=actor.get("owner"),
    )
