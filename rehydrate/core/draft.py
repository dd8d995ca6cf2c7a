"""A draft: the facts that one transaction is about to record, and the state they lead to. No rules of its own."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rehydrate.core import events as ev
from rehydrate.core.policy import FlowPolicy
from rehydrate.core.state import Run, State, after, evolve

_HOLE: Final = re.compile(r"\{(\w{1,50})\}")


class People(Struct, frozen=True):
    """Who may decide: the members of each group that have the reviewer's role, and all reviewers of the workspace."""

    groups: dict[str, list[str]] = {}
    reviewers: list[str] = []

    def of(self, groups: list[str]) -> set[str]:
        """The people of some groups, or all reviewers where none is named."""
        if not groups:
            return set(self.reviewers)
        return {name for group in groups for name in self.groups.get(group, [])}


class Context(Struct, frozen=True):
    """All that a decision needs besides the state: the clock's reading, the policy, who acts, and makers of ids.

    `policy` is the flow's newest; `pinned` the one at the run's pause or opening, which the verdict goes by (rule 16).
    """

    now: datetime
    policy: FlowPolicy
    policy_number: int
    pinned: FlowPolicy
    actor: ev.Actor
    new_id: Callable[[], str]
    new_token: Callable[[], str]
    people: Callable[[], People]
    owner: str | None = None  # of the agent's key


class Draft:
    """Facts in the making. `add` evolves the state at once, so that the next rule sees what the one before has done."""

    def __init__(self, state: State, ctx: Context) -> None:
        self.state = state
        self.ctx = ctx
        self.recorded: list[ev.Recorded] = []

    @property
    def run(self) -> Run:
        return self.state.run

    @property
    def now(self) -> datetime:
        return self.ctx.now

    @property
    def policy(self) -> FlowPolicy:
        return self.ctx.policy

    @property
    def pinned(self) -> FlowPolicy:
        return self.ctx.policy if self.run.policy == self.ctx.policy_number else self.ctx.pinned

    def add(self, fact: ev.Fact, *, actor: ev.Actor | None = None) -> ev.Recorded:
        recorded = ev.Recorded(seq=self.run.version + 1, at=self.now, actor=actor or self.ctx.actor, fact=fact)
        self.state = evolve(self.state, recorded)
        self.recorded.append(recorded)
        return recorded

    def by_ledger(self, fact: ev.Fact) -> ev.Recorded:
        return self.add(fact, actor=ev.SYSTEM)

    def renew(self) -> None:
        """Each accepted call renews the lease. That is the one change without a fact:

        heartbeats would drown the history.
        """
        if self.run.leased:
            expires_at = after(self.now, self.run.lease_seconds)
            self.state = replace(self.state, run=replace(self.run, lease_expires_at=expires_at))

    def rewind(self, state: State, count: int) -> None:
        """Forget everything after the first `count` facts."""
        self.state = state
        del self.recorded[count:]


def same_person(name: str) -> str:
    """A user name as it is compared where that keeps somebody out: an agent's spelling of it opens nothing."""
    return name.strip().casefold()


def excluded(run: Run, asked_by: str | None = None) -> set[str]:
    """Who may not decide: the requester, the key's owner, whoever started the run (rule 11), by `same_person`."""
    return {same_person(name) for name in (run.requested_by, run.opened_by, asked_by) if name}


def fill(title: str, arguments: dict[str, Any] | None, resource: str | None) -> str:
    """`Order {n} from {supplier}` with the effect's arguments filled in; a hole without its value stays as it is."""
    values = {"resource": resource, **(arguments or {})}

    def value(match: re.Match[str]) -> str:
        found = values.get(match[1])
        return str(found) if isinstance(found, str | int | float) and not isinstance(found, bool) else match[0]

    return _HOLE.sub(value, title)
