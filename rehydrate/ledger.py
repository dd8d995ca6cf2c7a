"""The only writer. Each change of a run: read it, apply what is overdue, decide, record events and projections at once.

What is written names the revision that was read, and is one statement: where somebody else wrote the run in between,
nothing is written, and all of it is done again with the run locked. So of two at the same instant one is first, and the
other decides on what the first has left.

A refusal that matters is an event as well: it is committed, with what it changes, while the caller still gets the
refusal.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final, Literal, TypeVar
from uuid import UUID

import psycopg
from django.db import OperationalError, connection, transaction
from msgspec.structs import replace

from rehydrate import answers, cooperative, loading, projections, seal, shapes, signals
from rehydrate.contexts import SYSTEM, context_of, make_context
from rehydrate.core import decide, waiting
from rehydrate.core import events as ev
from rehydrate.core.draft import Draft
from rehydrate.core.refusals import AUDITED, Refusal, not_found
from rehydrate.core.state import Run, State
from rehydrate.core.verdict import NeedsAllEffects
from rehydrate.group_commit import Group, Member
from rehydrate.ids import uuid7
from rehydrate.loading import Ground, Loaded, Site, Wanted
from rehydrate.memory import memory, sound
from rehydrate.models import Signal, Wait, Workspace
from rehydrate.projections import Change
from rehydrate.projections import Overtaken as Overtaken  # what callers of `change` may have to heed
from rehydrate.rights import Outdated, Rights
from rehydrate.sql import own_connections

log = logging.getLogger(__name__)

R = TypeVar("R")
Json = dict[str, Any]

Work = Callable[[Draft], R]
#: Locks runs within a transaction and gives their ids.
Locker = Callable[[], list[str]]
Lock = Literal["if overtaken", "taken", "never"]


class NeedsLock(Exception):
    """The attempt touches more than its run (signals), which one statement cannot write: lock, and do it again."""


Rescue = Callable[[Draft, Refusal], None]


class _Step(Member, ABC):
    """What one caller asks for, and in the end what became of it: `outcome`, or the `error` to raise."""

    def __init__(self, wanted: Wanted | Site, rights: Rights | None) -> None:
        super().__init__(_kind_of(wanted))
        self.wanted = wanted
        self.outcome: Any = None
        self.error: Exception | None = None
        self.alone = False  # it could not be done together with others
        self.rights = rights
        self.slot: answers.Slot | None = None  # its answer is saved with it

    @abstractmethod
    def decide(self, found: Any) -> Change | None:
        """Decides on what was read, and gives what is to be saved. May be carried out more than once."""

    def confirm(self, found: Loaded | Ground) -> None:
        """Raises `Outdated` where anybody's rights have changed since the caller was looked up."""
        if self.rights is not None:
            self.rights.confirm(found.rights)


class _Changing(_Step):
    """Do `work` on a run. The outcome: what it gave, the draft, and the Refusal of `work` if it refused."""

    def __init__(
        self,
        wanted: Wanted,
        *,
        work: Work[Any],
        actor: dict[str, Any],
        operation: str,
        check: Callable[[Run], None] | None,
        rescue: Rescue | None,
        keep: Callable[[Draft], list[Json]] | None,
        rights: Rights | None,
    ) -> None:
        super().__init__(wanted, rights)
        self.work, self.actor, self.operation = work, actor, operation
        self.check, self.rescue, self.keep = check, rescue, keep

    def decide(self, loaded: Loaded) -> Change | None:
        if self.check is not None:
            self.check(loaded.state.run)
        self.outcome = _attempt(loaded, self.work, self.actor, self.operation, self.rescue)
        _, draft, refused = self.outcome
        if not _worth_writing(loaded, draft):
            return None
        return _change_of(loaded, draft, self.keep(draft) if self.keep is not None and refused is None else [])


class _Opening(_Step):
    """A new run with its first events. The outcome: the draft, or the id of the run that is there."""

    def __init__(
        self,
        site: Site,
        *,
        work: Callable[[Draft], None],
        actor: dict[str, Any],
        keep: Callable[[Draft], list[Json]],
        rights: Rights | None,
    ) -> None:
        super().__init__(site, rights)
        self.site, self.work, self.actor, self.keep = site, work, actor, keep

    def decide(self, ground: Ground) -> Change | None:
        if ground.known is not None:
            self.outcome = ground.known
            return None
        policy = ground.policy
        ctx = make_context(
            now=ground.now, number=ground.number, policy=policy, pinned=policy, workspace=self.site.workspace,
            actor=self.actor, people=ground.people,
        )  # fmt: skip
        self.outcome = draft = Draft(State(Run(id=str(uuid7()))), ctx)
        try:
            self.work(draft)
            _match_buffered(draft, 0)
            decide.settle(draft)
        except Refusal as refusal:
            raise shapes.refusal(refusal) from None
        return _change_of(None, draft, self.keep(draft))


def change(
    run_id: str,
    work: Work[R],
    *,
    actor: dict[str, Any],
    operation: str,
    check: Callable[[Run], None] | None = None,
    rescue: Rescue | None = None,
    keep: Callable[[Draft], list[Json]] | None = None,
    rights: Rights | None = None,
    lock: Lock = "if overtaken",
    **reading: Any,
) -> tuple[R, Draft]:
    """Do `work` on a run and commit it with its events. Raises the Refusal of `work`, after recording what matters.

    `check` looks at the run before anything happens (walls, roles) and raises; `rescue` records what is kept of a
    refused batch (receipts); `keep` gives the rows of opaque state that belong to what was decided; `rights` are
    confirmed before all of it; `reading` says what of the run is read (see `loading.Wanted`). `work` may be carried out
    more than once, and in another thread or greenlet. `lock` says that the run is to be locked from the start, since
    `work` writes more than the run; or never, and `Overtaken` is for the caller.
    """
    step = _Changing(
        Wanted(ids=[run_id] if run_id else [], **reading),
        work=work, actor=actor, operation=operation, check=check, rescue=rescue, keep=keep, rights=rights,
    )  # fmt: skip
    result, draft, refused = _carried_out(step, lock)
    if refused is not None:
        if refused.status == 409:  # the object as it stands
            refused.extra.setdefault("run_status", draft.run.status)
        raise shapes.refusal(refused, draft.policy if actor["kind"] == "person" else None)
    return result, draft


def create(
    site: Site,
    work: Callable[[Draft], None],
    *,
    actor: dict[str, Any],
    keep: Callable[[Draft], list[Json]] = lambda draft: [],
    rights: Rights | None = None,
) -> Draft | str:
    """A new run with its first events, all or nothing; or the id of the run that is there.

    Raises IntegrityError when another opened it at the same instant.
    """
    outcome: Draft | str = _carried_out(
        _Opening(site, work=work, actor=actor, keep=keep, rights=rights), "if overtaken"
    )
    return outcome


def _carried_out(step: _Step, lock: Lock) -> Any:
    on_the_loop = cooperative.on_the_loop()
    if on_the_loop and (slot := answers.wanted.get()) is not None:
        if slot.decided:
            raise answers.Apart  # it is saved with one change
        step.slot = slot
    if lock != "never" and not on_the_loop and connection.in_atomic_block:
        return _alone(step, lock=True)
    try:
        if lock == "taken":
            raise NeedsLock
        return _together(step) if on_the_loop else _alone(step)
    except (Overtaken, NeedsLock):
        if lock == "never":
            raise
        if step.slot is not None:
            raise answers.Apart from None
        return cooperative.aside(_locked, step)


def _locked(step: _Step) -> Any:
    with transaction.atomic():
        return _alone(step, lock=True)


def _alone(step: _Step, *, lock: bool = False) -> Any:
    # Another may be opening the same run, and what encloses this goes on.
    nested = isinstance(step, _Opening) and connection.in_atomic_block
    with transaction.atomic() if nested else nullcontext():
        try:
            step.confirm(found := _read(step.wanted, lock=lock))
            change = step.decide(found)
        except NeedsAllEffects:
            # What is saved is the difference to this state: against the part, every row of the run would be written.
            assert isinstance(step.wanted, Wanted)
            step.confirm(found := _read(replace(step.wanted, full=True), lock=lock))
            change = step.decide(found)
        if change is not None:
            projections.save([change])
    return step.outcome


def _read(wanted: Wanted | Site, *, lock: bool) -> Loaded | Ground:
    if isinstance(wanted, Site):
        (ground,) = loading.grounds([wanted])
        return ground
    by_wait = wanted.by_wait
    if lock:
        if by_wait:
            found = Wait.objects.filter(pk=wanted.ids[0]).values_list("run_id", flat=True).first()
            wanted = replace(wanted, ids=[str(found or wanted.ids[0])], by_wait=False)
        loading.lock_runs(wanted.ids)
    loaded = loading.load_run(wanted)
    if loaded is None:
        raise not_found("wait" if by_wait else "run")
    return loaded


# -- what several ask for at one instant

#: More at once would keep each of them waiting for all.
AT_MOST: Final = 40


def _together(step: _Step) -> Any:
    group.join(step)
    if step.alone and step.slot is not None:
        raise answers.Apart
    if step.alone:
        return cooperative.aside(_alone, step)
    if step.error is not None:
        raise step.error
    return step.outcome


def _carry_out(steps: list[_Step]) -> None:
    """One statement to read, one to save, for all of them. What cannot be done like this each does alone."""
    for step in steps:
        step.alone = True
    try:
        with own_connections.used() as own:
            if left := _without_reading(own, steps):
                _carry_out_on(own, left)
    except Exception:
        log.debug("done alone", exc_info=True)  # and there it is raised, if it is more than a passing trouble
    finally:
        for step in steps:
            _settle(step, False)


Changes = dict[str, tuple[_Step, Change]]


def _with_answers(changes: Changes) -> Changes:
    """The changes, with the answers of those that are saved with them; without those that have none."""
    asked = {step: step.slot for step, _ in changes.values() if step.slot is not None}
    for step, slot in asked.items():
        step.alone, slot.decided = False, True
        step.told()
    answers.await_all(list(asked.values()))
    found: Changes = {}
    for run_id, (step, change) in changes.items():
        if step.slot is None:
            found[run_id] = step, change
        elif (row := step.slot.answer()) is not None:
            found[run_id] = step, replace(change, answer=row)
    return found


def _settle(step: _Step, saved: bool | Exception) -> None:
    if step.slot is not None and step.slot.decided:
        step.slot.settle(saved)


def _without_reading(own: psycopg.Connection, steps: list[_Step]) -> list[_Step]:
    """Carries out what can be decided on what this process remembers (see `memory`); the others are to be read."""
    moment = memory.moment()
    if moment is None:
        return steps
    changes: Changes = {}
    for step in steps:
        if step.rights is None or step.rights.number != moment.number:
            continue
        try:
            found = memory.recall(step.wanted, moment)
            change = step.decide(found) if found is not None else None
        except Exception as error:
            log.debug("read, since on a memory: %r", error)
            continue
        if change is not None and change.after.run.id not in changes and not projections.takes_two(change):
            changes[change.after.run.id] = step, change
    changes = _with_answers(changes)
    if not changes:
        return [step for step in steps if step.alone]
    saved: dict[str, Run] = {}
    try:
        asked = [change for _, change in changes.values()]
        saved = projections.save_each(asked, sound(moment, asked))
    except psycopg.Error as error:
        if own.closed:
            _unknown(changes, error)
    for run_id in saved:
        changes[run_id][0].alone = False
    for run_id, (step, change) in changes.items():
        if run_id not in saved:
            memory.drop(run_id)
            continue
        if step.rights is not None:
            step.rights.confirm(moment.number)
        memory.keep(change, saved[run_id])
        _settle(step, True)
    return [step for step in steps if step.alone]


def _unknown(changes: Changes, error: psycopg.Error) -> None:
    """Nobody knows what was saved: each is told so, and nobody does it again."""
    for step, _ in changes.values():
        step.alone, step.error = False, OperationalError(*error.args)
        _settle(step, step.error)


def _read_together(steps: list[_Step]) -> Sequence[Loaded | Ground | Exception | None]:
    """What each of them wants; they are of one kind (see `_kind_of`)."""
    if sites := [step.wanted for step in steps if isinstance(step.wanted, Site)]:
        return loading.grounds(sites)
    return loading.load_together([step.wanted for step in steps if isinstance(step.wanted, Wanted)])


def _carry_out_on(own: psycopg.Connection, steps: list[_Step]) -> None:
    changes: Changes = {}
    read = _read_together(steps)
    at = time.monotonic()
    for step, found in zip(steps, read, strict=True):
        try:
            if isinstance(found, Exception):
                continue
            if found is None:
                raise not_found("wait" if isinstance(step.wanted, Wanted) and step.wanted.by_wait else "run")
            memory.learn(found, step.wanted, at)
            step.confirm(found)
            change = step.decide(found)
            if change is None:
                step.alone = False
            elif change.after.run.id not in changes and not projections.takes_two(change):
                changes[change.after.run.id] = step, change
        except (Refusal, NeedsLock, Outdated) as error:
            step.alone, step.error = False, error
        except Exception:
            log.debug("done alone", exc_info=True)
    changes = _with_answers(changes)
    if not changes:
        return
    try:
        saved = projections.save_each([change for _, change in changes.values()])
    except psycopg.Error as error:
        if own.closed:
            _unknown(changes, error)
        return
    for run_id, (step, _) in changes.items():
        step.alone, step.error = False, None if run_id in saved else Overtaken()
        _settle(step, run_id in saved)
    for run_id, run in saved.items():
        memory.keep(changes[run_id][1], run)


group: Final = Group[_Step](_carry_out, at_most=AT_MOST)


def _kind_of(wanted: Wanted | Site) -> str:
    """Those who read alike go together: their statements are simpler. And who picks what nobody has picked yet does so
    one after the other.
    """
    if isinstance(wanted, Site):
        return "new"
    return "picked" if wanted.pick is not None else "by wait" if wanted.by_wait else "by id"


# -- one change


def _attempt(
    loaded: Loaded,
    work: Work[R],
    actor: dict[str, Any],
    operation: str,
    rescue: Rescue | None,
) -> tuple[R | None, Draft, Refusal | None]:
    draft = Draft(loaded.state, context_of(loaded, actor))
    decide.apply_overdue(draft)
    if draft.recorded:
        decide.settle(draft)  # what came of it, too: a run that ended by then is over for whoever asks
    mark = draft.state, len(draft.recorded)
    try:
        result = work(draft)
        _match_buffered(draft, mark[1])
        decide.settle(draft)
    except Refusal as refusal:
        draft.rewind(*mark)
        if rescue is not None:
            rescue(draft, refusal)
        if refusal.code in AUDITED:
            decide.refused(draft, refusal, operation)
        decide.settle(draft)
        return None, draft, refusal
    return result, draft, None


def _worth_writing(loaded: Loaded, draft: Draft) -> bool:
    before = loaded.state
    if draft.recorded or draft.run is not before.run:
        return True
    return any(due_at <= draft.now for due_at in loading.timers(before).values())


def _change_of(loaded: Loaded | None, draft: Draft, states: list[Json]) -> Change:
    return Change(
        before=loaded.state if loaded is not None else None,
        after=draft.state,
        recorded=draft.recorded,
        secret=seal.tails(draft.policy.secret),
        now=draft.now,
        deliver=bool(draft.policy.deliver_to),
        revision=loaded.revision if loaded is not None else 0,
        states=states,
        sealed=loaded is not None and loaded.sealed,
    )


def catch_up(lock: Locker) -> int:
    """Apply what is overdue to runs nobody asks about, many in one transaction. How many of them changed.

    `lock` locks runs within it and gives their ids. Nothing is saved when one of them cannot be caught up: whose fault
    that is, and what becomes of it, is for `sweep` to say.
    """
    with transaction.atomic():
        ids = lock()
        if not ids:
            return 0
        changes: list[Change | None] = []
        whole: list[str] = []  # those of which the verdict needs all effects
        for run_id, loaded in loading.load_runs(ids, lock=False).items():
            try:
                changes.append(_caught_up(loaded))
            except NeedsAllEffects:
                whole.append(run_id)
        if whole:
            changes += [_caught_up(loaded) for loaded in loading.load_runs(whole, lock=False, full=True).values()]
        changed = [change for change in changes if change is not None]
        if changed:
            projections.save(changed)
    return len(changed)


def _caught_up(loaded: Loaded) -> Change | None:
    draft = Draft(loaded.state, context_of(loaded, SYSTEM))
    decide.apply_overdue(draft)
    decide.settle(draft)
    return _change_of(loaded, draft, []) if _worth_writing(loaded, draft) else None


def policy_changed(*, workspace: Workspace, groups: set[str], flow_waits: set[tuple[str, str]], by: str) -> int:
    """Rule 16: groups, members or waits' policies changed, so the open approvals they touch get a new version.

    `groups` are the names of changed groups, `flow_waits` the (flow, wait name) whose policy changed. Their number.
    """
    actor = {"kind": "system" if by == "command" else "person", "id": by, "name": by}
    open_asks = Wait.objects.filter(run__workspace=workspace, status="open", kind="approval")
    # What was set aside may not even be readable (see sweep.py), and holds up nobody here, either.
    sound = open_asks.exclude(run__trouble__set_aside_at__isnull=False)
    runs = {str(run_id) for run_id in sound.values_list("run_id", flat=True)}
    count = 0
    for run_id in sorted(runs):
        found = loading.load_runs([run_id], lock=False)[run_id].state
        if any(_touched(found, wait, groups, flow_waits) for wait in found.open_waits()):

            def work(draft: Draft) -> int:
                touched = [w for w in draft.state.open_waits() if _touched(draft.state, w, groups, flow_waits)]
                for wait in touched:
                    waiting.policy_changed(draft, wait, draft.policy.wait_policy(wait.name))
                return len(touched)

            changed, _ = change(run_id, work, actor=actor, operation="policy_changed")
            count += changed
    return count


def _touched(state: State, wait: Any, groups: set[str], flow_waits: set[tuple[str, str]]) -> bool:
    """A wait that names no group depends on every group of the workspace: any of them may have reviewers."""
    if wait.kind != "approval":
        return False
    return (
        (state.run.flow, wait.name) in flow_waits or bool(groups & set(wait.groups)) or bool(groups and not wait.groups)
    )


# -- signals that came before their wait (rule 7)


def _match_buffered(draft: Draft, since: int) -> None:
    """Waits that were opened just now take what came for them before."""
    opened: list[str] = []
    for recorded in draft.recorded[since:]:
        if isinstance(recorded.fact, ev.RunPaused):
            opened += [wait["id"] for wait in recorded.fact.waits]
        elif isinstance(recorded.fact, ev.WaitOpened):
            opened.append(recorded.fact.wait["id"])
    run = draft.run
    waits = [wait for wait_id in opened if (wait := draft.state.wait_by_id(wait_id)) is not None]
    fits: dict[UUID, tuple[Signal, list[str]]] = {}
    for wait in sorted(waits, key=lambda wait: (wait.name, wait.correlation or "")):
        if wait.kind not in ("callback", "signal"):
            continue
        if not connection.in_atomic_block:
            raise NeedsLock
        targets = signals.targets(flow=run.flow, external_id=run.external_id, correlation=wait.correlation)
        signals.lock(run.workspace_id, wait.name, targets)
        for signal in signals.buffered_for(run, wait.name, wait.correlation):
            fits.setdefault(signal.pk, (signal, []))[1].append(wait.id)
    if fits and not draft.state.complete:
        raise NeedsAllEffects  # a signal is taken once: not by an attempt that may yet need more of the state
    for signal, wait_ids in fits.values():
        left = [wait for wait_id in wait_ids if (wait := draft.state.wait_by_id(wait_id)) is not None and wait.open]
        if len(left) == 1:
            if signals.matched(signal, run.id, left[0].id):
                waiting.answer_by_signal(draft, left[0], signals.as_answer(signal))
        elif left and signals.set_state(signal, "ambiguous", found=[wait.id for wait in left]):
            draft.by_ledger(ev.SignalNoted(signal=signals.as_answer(signal), state="ambiguous"))  # a person assigns it
