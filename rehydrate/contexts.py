"""What a decision needs besides the state of its run: the time, the policies, the people. No rules and no writes."""

import datetime as dt
import secrets as random_tokens
from typing import Any, Final

from django.db import connection

from rehydrate.core import events as ev
from rehydrate.core.draft import Context, People
from rehydrate.core.policy import FlowPolicy
from rehydrate.ids import uuid7
from rehydrate.loading import Loaded

SYSTEM: Final = {"kind": ev.SYSTEM.kind, "id": ev.SYSTEM.id, "name": ev.SYSTEM.name}


def people_of(workspace: str) -> People:
    """Who may decide in a workspace: active people with the reviewer's role, by group. One query."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT g.name, g.roles, u.username FROM rehydrate_group g"
            " JOIN rehydrate_membership m ON m.group_id = g.id JOIN auth_user u ON u.id = m.user_id"
            " WHERE g.workspace_id = %s AND u.is_active",
            [workspace],
        )
        rows = cursor.fetchall()
    able = {"reviewer", "operator", "admin"}
    reviewers = {name for _, roles, name in rows if able & set(roles)}
    groups: dict[str, list[str]] = {}
    for group, _, name in rows:
        if name in reviewers:
            groups.setdefault(group, []).append(name)
    return People(groups=groups, reviewers=sorted(reviewers))


def context_of(loaded: Loaded, actor: dict[str, Any]) -> Context:
    return make_context(
        now=loaded.now,
        number=loaded.number,
        policy=loaded.policy,
        pinned=loaded.pinned,
        workspace=loaded.state.run.workspace_id,
        actor=actor,
    )


def make_context(
    *, now: dt.datetime, number: int, policy: FlowPolicy, pinned: FlowPolicy, workspace: str, actor: dict[str, Any]
) -> Context:
    cache: list[People] = []

    def people() -> People:
        if not cache:
            cache.append(people_of(workspace))
        return cache[0]

    return Context(
        now=now,
        policy=policy,
        policy_number=number,
        pinned=pinned,
        actor=ev.Actor(kind=actor["kind"], id=actor["id"], name=actor["name"]),
        new_id=lambda: str(uuid7()),
        new_token=lambda: random_tokens.token_urlsafe(32),
        people=people,
        owner=actor.get("owner"),
    )
