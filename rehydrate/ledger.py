"""The only writer. Each change of a run: read it, apply what is overdue, decide, record events and projections at once.

What is written names the revision that was read, and is one statement: where somebody else wrote the run in between,
nothing is written, and all of it is done again with the run locked. So of two at the same instant one is first, and the
other decides on what the first has left.

A refusal that matters is an event as well: it is committed, with what it changes, while the caller still gets the
refusal.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, TypeVar
from uuid import UUID

from django.db import connection, transaction

from rehydrate import loading, projections, seal, shapes, signals
from rehydrate.contexts import SYSTEM, context_of, make_context
from rehydrate.core import decide, waiting
from rehydrate.core import events as ev
from rehydrate.core.draft import Draft
from rehydrate.core.refusals import AUDITED, Refusal, not_found
from rehydrate.core.state import Run, State
from rehydrate.core.verdict import NeedsAllEffects
from rehydrate.ids import uuid7
from rehydrate.loading import Ground, Loaded
from rehydrate.models import Signal, Wait, Workspace
from rehydrate.projections import Change
from rehydrate.projections import Overtaken as Overtaken  # what callers of `change` may have to heed

R = TypeVar("R")
Json = dict[str, Any]

Work = Callable[[Draft], R]
#: Locks runs within a transaction and gives their ids.
Locker = Callable[[], list[str]]
Lock = Literal["if overtaken", "taken", "never"]


class NeedsLock(Exception):
    """The attempt touches more than its run (signals), which one statement cannot write: lock, and do it again."""


def change(
    run_id: str,
    work: Work[R],
    *,
    actor: dict[str, Any],
    operation: str,
    check: Callable[[Run], None] | None = None,
    rescue: Callable[[Draft, Refusal], None] | None = None,
    keep: Callable[[Draft], list[Json]] | None = None,
    lock: Lock = "if overtaken",
    **reading: Any,
) -> tuple[R, Draft]:
    """Do `work` on a run and commit it with its events. Raises the Refusal of `work`, after recording what matters.

    `check` looks at the run before anything happens (walls, roles) and raises; `rescue` records what is kept of a
    refused batch (receipts); `keep` gives the rows of opaque state that belong to what was decided; `reading` says what
    of the run is read (see `loading.load_runs`). `work` may be carried out more than once. `lock` says that the run is
    to be locked from the start, since `work` writes more than the run; or never, and `Overtaken` is for the caller.
    """
    step = partial(
        _change, work=work, actor=actor, operation=operation, check=check, rescue=rescue, keep=keep, reading=reading
    )
    if lock == "never":
        result, draft, refused = step(run_id, lock=False)
    elif connection.in_atomic_block:
        result, draft, refused = step(run_id, lock=True)
    else:
        try:
            if lock == "taken":
                raise NeedsLock
            result, draft, refused = step(run_id, lock=False)
        except (Overtaken, NeedsLock):
            with transaction.atomic():
                result, draft, refused = step(run_id, lock=True)
    if refused is not None:
        if refused.status == 409:  # the object as it stands
            refused.extra.setdefault("run_status", draft.run.status)
        raise shapes.refusal(refused, draft.policy if actor["kind"] == "person" else None)
    return result, draft


def _change(
    run_id: str,
    *,
    lock: bool,
    work: Work[R],
    actor: dict[str, Any],
    operation: str,
    check: Callable[[Run], None] | None,
    rescue: Callable[[Draft, Refusal], None] | None,
    keep: Callable[[Draft], list[Json]] | None,
    reading: dict[str, Any],
) -> tuple[Any, Draft, Refusal | None]:
    loaded = _read(run_id, lock=lock, reading=reading)
    if check is not None:
        check(loaded.state.run)
    try:
        result, draft, refused = _attempt(loaded, work, actor, operation, rescue)
    except NeedsAllEffects:
        # What is saved is the difference to this state: against the part, every row of the run would be written.
        loaded = _read(run_id, lock=lock, reading={**reading, "full": True})
        result, draft, refused = _attempt(loaded, work, actor, operation, rescue)
    _save(loaded, draft, keep(draft) if keep is not None and refused is None else [])
    return result, draft, refused


def _read(run_id: str, *, lock: bool, reading: dict[str, Any]) -> Loaded:
    if lock and reading.get("by_wait"):
        run_id = str(Wait.objects.filter(pk=run_id).values_list("run_id", flat=True).first() or run_id)
        reading = {**reading, "by_wait": False}
    for loaded in loading.load_runs([run_id] if run_id else [], lock=lock, **{"full": True, **reading}).values():
        return loaded
    raise not_found("wait" if "by_wait" in reading else "run")


def _attempt(
    loaded: Loaded,
    work: Work[R],
    actor: dict[str, Any],
    operation: str,
    rescue: Callable[[Draft, Refusal], None] | None,
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


def _save(loaded: Loaded, draft: Draft, states: list[Json]) -> None:
    if _worth_writing(loaded, draft):
        projections.save([_change_of(loaded, draft, states)])


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


def create(
    *,
    workspace: str,
    actor: dict[str, Any],
    work: Work[R],
    ground: Ground,
    keep: Callable[[Draft], list[Json]] = lambda draft: [],
) -> tuple[R, Draft]:
    """A new run with its first events, all or nothing.

    Raises IntegrityError when another opened it at the same instant.
    """

    def make() -> tuple[R, Draft]:
        policy = ground.policy
        ctx = make_context(
            now=ground.now, number=ground.number, policy=policy, pinned=policy, workspace=workspace, actor=actor,
            people=ground.people,
        )  # fmt: skip
        draft = Draft(State(Run(id=str(uuid7()))), ctx)
        result = work(draft)
        _match_buffered(draft, 0)
        decide.settle(draft)
        projections.save([_change_of(None, draft, keep(draft))])
        return result, draft

    try:
        try:
            with transaction.atomic() if connection.in_atomic_block else nullcontext():
                return make()
        except NeedsLock:
            with transaction.atomic():
                return make()
    except Refusal as refusal:
        raise shapes.refusal(refusal) from None


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
