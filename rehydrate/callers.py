"""Who is asking: an agent with its key, or a person with their roles. Made by authentication; no rules of runs here."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from rehydrate.rights import Rights

if TYPE_CHECKING:
    from django.contrib.auth.models import User

#: Each role holds what the ones before it in this list hold; `auditor` stands beside them.
LADDER = ("viewer", "reviewer", "operator", "admin")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caller:
    """An authenticated caller.

    `workspaces` maps a workspace's id to the roles there (an agent's map has its one workspace and no roles).
    `flows` are the flow names an agent's key allows, `("*",)` for all of its workspace. `owner` is the user name behind
    an agent's key. `channel` tells where a person came from: "console" or "api". `rights` is there for one who was
    looked up for an earlier request: whoever acts for such a caller confirms them first.
    """

    kind: Literal["agent", "person", "system"]
    id: str
    name: str
    workspaces: dict[str, frozenset[str]]
    flows: tuple[str, ...] = ()
    owner: str | None = None
    user_id: int | None = None
    key_id: str | None = None
    channel: str = "api"
    rights: Rights | None = None

    @property
    def confirmed(self) -> bool:
        """True for one who was looked up for this very request, or whose rights were confirmed since."""
        return self.rights is None or self.rights.confirmed

    @property
    def is_person(self) -> bool:
        return self.kind == "person"

    def may(self, workspace: str, role: str) -> bool:
        """True when the caller, a person, has at least `role` in the workspace (its id as text)."""
        roles = self.workspaces.get(workspace, frozenset())
        if role in roles:
            return True
        if role == "auditor":
            return "admin" in roles
        return role in LADDER and any(held in LADDER and LADDER.index(held) >= LADDER.index(role) for held in roles)

    def runs_something(self) -> bool:
        """True when the caller, a person, operates or audits at least one workspace: what concerns the whole
        installation, and no single run, is theirs to see.
        """
        return any(self.may(known, "operator") or self.may(known, "auditor") for known in self.workspaces)

    def sees(self, workspace: str, flow: str) -> bool:
        """True when runs of the flow are within the caller's wall."""
        if workspace not in self.workspaces:
            return False
        if self.kind == "agent":
            return "*" in self.flows or flow in self.flows
        return bool(self.workspaces[workspace])

    def actor(self) -> dict[str, Any]:
        """The `actor` of this caller's events, with the `owner` of an agent's key."""
        return {"kind": self.kind, "id": self.id, "name": self.name, "owner": self.owner}


def for_user(user: "User", *, channel: str = "console") -> Caller:
    """The caller behind a signed-in person. A superuser is an admin (and auditor) of every workspace."""
    from rehydrate.models import Membership, Workspace

    workspaces: dict[str, set[str]] = {}
    if user.is_superuser:
        workspaces = {str(pk): {"admin", "auditor"} for pk in Workspace.objects.values_list("pk", flat=True)}
    else:
        rows = Membership.objects.filter(user=user).values_list("group__workspace_id", "group__roles")
        for workspace, roles in rows:
            workspaces.setdefault(str(workspace), set()).update(roles)
    return person(user.get_username(), user.get_full_name(), workspaces, user_id=user.pk, channel=channel)


def person(
    username: str,
    full_name: str,
    roles: Mapping[str, Iterable[str]],
    *,
    user_id: int,
    channel: str,
    key_id: str | None = None,
) -> Caller:
    """The caller behind a person, with the roles in each workspace."""
    return Caller(
        kind="person",
        id=username,
        name=full_name[:200] or username,  # as much as history has room for
        workspaces={workspace: frozenset(held) for workspace, held in roles.items()},
        user_id=user_id,
        key_id=key_id,
        channel=channel,
    )
