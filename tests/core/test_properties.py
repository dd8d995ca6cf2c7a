"""Whatever agents, people, signals and the clock do to a run, in whatever order: what must hold after each step.

`REHYDRATE_EXAMPLES` (a number) makes the search longer; what it finds then is not in the fixed set that CI runs.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rehydrate.core import events as ev
from rehydrate.core.draft import Draft
from rehydrate.core.refusals import Refusal
from rehydrate.core.state import ENDED, Run, State, evolve, fold
from rehydrate.core.verdict import STATUS, CallerFacts, NeedsAllEffects, assess, next_steps, recommended, the_no
from rehydrate.services import _named

from .kit import RUN, Story
from .player import Draw, Player, Step, policies

#: conftest clears the environment of everything called REHYDRATE_*, so the bigger profile has a name of its own.
MORE = int(os.environ.get("CORE_EXAMPLES", "0"))
LONGEST = 60

profile = settings(
    max_examples=MORE or 800,
    derandomize=not MORE,
    database=None,
    deadline=None,
    # A history shrinks slowly, and its notes tell the story as it is.
    phases=[Phase.generate] if not MORE else [Phase.generate, Phase.target],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


class Watched:
    """A story whose every step is looked at."""

    def __init__(self, draw: Draw) -> None:
        self.story = Story(policies(draw))
        self.player = Player(draw, self.story)
        self.decisions: dict[str, Any] = {}
        self.refs: dict[Any, Any] = {}
        self.steps = 0

    def step(self) -> None:
        story = self.story
        step = self.player.step()
        # Rows of decisions and references are not loaded: a transaction sees only its own.
        before = replace(story.state, decisions={}, refs={})
        _, draft, refused = story.attempt(before, step.work, step.actor, step.operation)
        note(f"{story.now:%d %H:%M:%S} {step.name}: {refused.code if refused else 'ok'} {_types(draft)}")
        if step.events is not None:
            self.in_part_alike(before, step, draft, refused)
        story.keep(draft)
        self.decisions |= draft.state.decisions
        self.refs = draft.state.refs | self.refs
        self.facts_survive(draft.recorded)
        self.moves_are_allowed(before, draft.recorded)
        self.stands(step)

    def in_part_alike(self, before: State, step: Step, whole: Draft, refused: Refusal | None) -> None:
        """An append loads a part of the state: it decides and evolves the same, or asks for the rest."""
        part = self.story.in_part(**_named(step.events or []))
        part = replace(part, decisions={}, refs={})
        try:
            _, draft, other = self.story.attempt(part, step.work, step.actor, step.operation)
        except NeedsAllEffects:
            return
        assert (other.code if other else None) == (refused.code if refused else None)
        assert draft.recorded == whole.recorded
        assert draft.run == whole.run
        for rest, found in ((whole.state.waits, draft.state.waits), (whole.state.effects, draft.state.effects)):
            for key, row in rest.items():
                known = found.get(key, before.waits.get(key) or before.effects.get(key))
                assert row == known, f"{key} differs where the state was loaded in part"

    def facts_survive(self, recorded: list[ev.Recorded]) -> None:
        for one in recorded:
            stored = msgspec.json.decode(msgspec.json.encode(ev.dump(one.fact)))
            assert ev.parse(ev.type_of(one.fact), stored) == one.fact

    def moves_are_allowed(self, before: State, recorded: list[ev.Recorded]) -> None:
        """Fact by fact: epochs grow by one, closed waits stay closed, what is done is not started, ended is final."""
        state = before
        for one in recorded:
            after = evolve(state, one)
            if isinstance(one.fact, ev.LeaseGranted):
                assert not state.run.leased, "two leases"
                assert one.fact.epoch == after.run.epoch == state.run.epoch + 1
            else:
                assert after.run.epoch == state.run.epoch
                assert state.run.leased or not after.run.leased
            for key, wait in state.waits.items():
                assert wait.open or after.waits[key].status == wait.status, "a wait closes once"
                assert after.waits[key].version >= wait.version
            for key, effect in state.effects.items():
                move = effect.state, after.effects[key].state
                assert move[0] == move[1] or move in MOVES, f"{key}: {move}"
            if state.run.ended:
                assert after.run.status == state.run.status, "ended is final"
                assert not after.run.leased
                assert not after.open_waits()
            assert after.run.version == state.run.version + 1 == one.seq
            state = after

    def stands(self, step: Step) -> None:
        story, run = self.story, self.story.run
        found = story.verdict
        assert found == assess(story.state, story.pinned, story.now), "the same question twice"
        assert found.outcome in STATUS
        assert found.reasons
        assert next_steps(story.state, found)["sentence"]
        assert recommended(story.state, found)["sentence"]
        assess(story.state, story.pinned, story.now, CallerFacts(agent_version="3", reads=["2"], input_digest="d9"))
        try:
            assert assess(story.in_part(), story.pinned, story.now) == found
        except NeedsAllEffects:
            assert the_no(story.state, story.pinned) is not None, "only a no depends on every effect"
        # Section 3: without a lease the status follows the verdict, in the same transaction.
        if run.leased:
            assert run.status in ("running", "compensating")
            assert run.lease_expires_at is not None
            assert run.lease_expires_at > story.now
        elif run.taken_over is not None:
            assert run.status == "taken_over"
        elif not run.ended:
            assert run.status == STATUS[found.outcome]
            assert [r["code"] for r in run.reasons] == [r.code for r in found.reasons]
            claimable = run.status in ("ready", "compensating")
            assert (run.ready_since is not None) == claimable
            assert claimable == (run.alarm_at is not None or run.unclaimed_at is not None), "unclaimed is no silence"
            assert not [e.key for e in story.state.effects.values() if e.state in ("started", "compensating")]
        for wait in story.state.open_waits():
            assert wait.due_at > story.now, "nothing overdue is left"
        again = story.attempt(story.state, lambda draft: None, ev.SYSTEM, "tick")[1]
        assert not again.recorded, "what is overdue is applied once"
        assert (run.status in ENDED) == (run.ended_at is not None)

    def rebuilt(self) -> None:
        """Folding the facts gives the state that the steps made."""
        folded = fold(RUN, self.story.history)
        ours = replace(self.story.state, decisions=self.decisions, refs=self.refs)
        # Bare heartbeats renew the lease without a fact.
        folded, ours = (replace(s, run=replace(s.run, lease_expires_at=None)) for s in (folded, ours))
        for name in ("run", "waits", "effects", "decisions", "refs"):
            one, other = getattr(folded, name), getattr(ours, name)
            assert one == other, name if name != "run" else _differing(one, other)


#: Section 3, with what a hand-back and a person's finding may do besides.
MOVES = {
    *(("planned", to) for to in ("started", "executed", "failed", "unknown", "withdrawn", "compensated")),
    *(("failed", to) for to in ("started", "executed", "unknown", "planned", "compensated")),
    *(("started", to) for to in ("executed", "failed", "unknown")),
    *(("unknown", to) for to in ("started", "executed", "failed", "planned", "compensated")),
    *(("executed", to) for to in ("compensating", "unknown", "compensated")),
    *(("compensating", to) for to in ("compensated", "compensation_unknown", "executed")),
    *(("compensation_unknown", to) for to in ("compensated", "executed", "planned")),
    ("compensated", "unknown"),  # a receipt contradicts what a person found
    *(("withdrawn", to) for to in ("planned", "executed", "failed", "unknown", "compensated")),
}


def _types(draft: Draft) -> list[str]:
    return [ev.type_of(recorded.fact) for recorded in draft.recorded]


def _differing(one: Run, other: Run) -> str:
    return ", ".join(
        f"{name}: {getattr(one, name)!r} != {getattr(other, name)!r}"
        for name in Run.__struct_fields__
        if getattr(one, name) != getattr(other, name)
    )


@profile
@given(st.randoms(use_true_random=True))
def test_any_history_keeps_the_rules(source: random.Random) -> None:
    watched = Watched(Draw(source))
    left = source.randint(10, LONGEST)
    while left > 0:
        watched.step()
        left -= 5 if watched.story.run.ended else 1  # little happens after the end
    watched.rebuilt()
