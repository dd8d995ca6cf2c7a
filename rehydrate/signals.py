"""The rows of signals: stored before they are matched (rule 7).

Which wait they answer is for services and ledger to do.
"""

import datetime as dt
from typing import Any

from django.db import connection
from django.db.models import F, Q, QuerySet

from rehydrate import seal
from rehydrate.core.canonical import instant
from rehydrate.core.state import Run
from rehydrate.models import Signal, Wait


def targets(*, flow: str | None, external_id: str | None, correlation: str | None) -> list[str]:
    """The places where a signal and a wait may meet."""
    found = []
    if flow is not None and external_id is not None:
        found.append(f"run\x1f{flow}\x1f{external_id}")
    if correlation is not None:
        found.append(f"correlation\x1f{correlation}")
    return found


def lock(workspace: str, name: str, places: list[str]) -> None:
    """One lock for each place until the transaction ends, so that neither a wait nor a signal misses the other.

    A wait takes it with its run locked; a signal takes it in a transaction of its own, without any run: no deadlock.
    """
    with connection.cursor() as cursor:
        for place in sorted(places):
            cursor.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"signal\x1f{workspace}\x1f{name}\x1f{place}"]
            )


def buffered_for(run: Run, name: str, correlation: str | None) -> list[Signal]:
    """The signals that came before their wait and fit it, the oldest first; by sequence where the sender counts."""
    aimed = Q(run_id=run.id) | Q(flow=run.flow, external_id=run.external_id)
    if correlation is not None:
        aimed |= Q(correlation=correlation)
    return list(
        Signal.objects.filter(aimed, workspace_id=run.workspace_id, name=name, state__in=["buffered", "received"])
        .filter(Q(flows=["*"]) | Q(flows__contains=[run.flow]))
        .order_by(F("sequence").asc(nulls_last=True), "received_at", "id")[:20]
    )


def candidates(signal: Signal) -> list[Wait]:
    """The waits that a signal fits: by name and target within its workspace and its sender's flows."""
    found: QuerySet[Wait] = Wait.objects.filter(
        run__workspace_id=signal.workspace_id, name=signal.name, kind__in=["callback", "signal"]
    )
    if signal.flows != ["*"]:
        found = found.filter(run__flow__in=signal.flows)
    if signal.run_id is not None:
        found = found.filter(run_id=signal.run_id)
    if signal.external_id is not None:
        found = found.filter(run__flow=signal.flow, run__external_id=signal.external_id)
    if signal.correlation is not None:
        found = found.filter(correlation=signal.correlation)
    return list(found)


def newer_known(signal: Signal) -> bool:
    """Whether the sender said something newer already about the same (by `sequence`, else by `occurred_at`)."""
    same = Signal.objects.filter(
        workspace_id=signal.workspace_id,
        sender=signal.sender,
        name=signal.name,
        flow=signal.flow,
        external_id=signal.external_id,
        correlation=signal.correlation,
    ).exclude(pk=signal.pk)
    same = same.filter(run__isnull=True) if signal.run_id is None else same.filter(run_id=signal.run_id)
    if signal.sequence is not None:
        return same.filter(sequence__gt=signal.sequence).exists()
    if signal.occurred_at is not None:
        return same.filter(sequence__isnull=True, occurred_at__gt=signal.occurred_at).exists()
    return False


def sealed(payload: Any) -> str | None:
    """What a signal brings, as it is kept: encrypted, since it may hold what a flow calls secret."""
    return None if payload is None else seal.encrypt(payload).decode("ascii")


def payload_of(signal: Signal) -> Any:
    return None if signal.sealed is None else seal.decrypt(signal.sealed)


def as_answer(signal: Signal) -> dict[str, Any]:
    """The signal as it is kept with the wait it answered."""
    return {
        "id": str(signal.pk),
        "name": signal.name,
        "sender": signal.sender,
        "sender_id": signal.sender_id,
        "payload": payload_of(signal),
        "occurred_at": instant(signal.occurred_at),
        "sequence": signal.sequence,
        "received_at": instant(signal.received_at),
    }


def shape(signal: Signal) -> dict[str, Any]:
    return {
        **as_answer(signal),
        "state": signal.state,
        "run": str(signal.run_id) if signal.run_id else None,
        "flow": signal.flow,
        "external_id": signal.external_id,
        "correlation": signal.correlation,
        "wait": str(signal.wait_id) if signal.wait_id else None,
        "candidates": signal.candidates,
    }


#: What a signal is while no wait has it and nobody has been told otherwise.
PENDING = ("received", "buffered")


def matched(signal: Signal, run_id: str, wait_id: str, *, by_person: bool = False) -> bool:
    """Take the signal for a wait; False when somebody else took it first, or it is kept for a person to assign."""
    free = Signal.objects.filter(pk=signal.pk)
    free = free.exclude(state="matched") if by_person else free.filter(state__in=PENDING)
    return free.update(state="matched", run_id=run_id, wait_id=wait_id) == 1


def set_state(signal: Signal, state: str, *, found: list[str] | None = None) -> bool:
    """Say what became of a signal that nobody has taken; False when a wait took it meanwhile."""
    free = Signal.objects.filter(pk=signal.pk, state__in=PENDING)
    return free.update(state=state, candidates=found or []) == 1


def unfinished(before: dt.datetime) -> list[Signal]:
    """Signals whose matching was cut off by a crash."""
    return list(Signal.objects.filter(state="received", received_at__lt=before).order_by("received_at")[:100])
