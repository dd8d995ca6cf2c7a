"""One run in hand: how it is come by, worked on under its lease, and left. A worker does so, and a `with` block."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from rehydrate.client import errors, tracing
from rehydrate.client.lease import Lease
from rehydrate.client.retry import Backoff, retry_in
from rehydrate.client.run import RunCore
from rehydrate.client.tracing import log

if TYPE_CHECKING:
    from rehydrate.client.ledger import LedgerCore

Json = dict[str, Any]
R = TypeVar("R", bound=RunCore)

# The flow asked for something that trying again will not change: a person looks at it.
NO_USE_TRYING = (
    errors.NotRetryable,
    errors.EffectKeyReused,
    errors.EffectDuplicate,
    errors.EffectNotGranted,
    errors.ApprovalRequired,
    errors.ApprovalRejected,
    errors.UnsatisfiableGate,
    errors.Invalid,
    errors.TooLarge,
)
# The ledger has written down what is wrong, and its verdict says how the run goes on.
LEDGER_KNOWS = (errors.ApprovalMismatch, errors.ApprovalExpired, errors.ConditionUnmet, errors.RetriesExhausted)
GONE = (errors.LeaseLost, errors.RunEnded, errors.NotFound)
OUT_OF_REACH = (errors.Unreachable, errors.Unavailable, errors.RateLimited)
# No error: the run was left as it should be.
LEFT = (errors.Paused, errors.Stopping)
# How often somebody who waits for a run looks at it.
LOOK = Backoff(base=0.2, cap=2.0)


class Opening(TypedDict, total=False):
    """What a `with` block may say of its run, beside its flow and external id: fields of `open`."""

    title: str
    input_ref: str
    input_digest: str
    labels: Mapping[str, str]
    requested_by: str
    trace_id: str
    lease_seconds: int


async def take(
    ledger: LedgerCore,
    kind: Callable[..., R],
    flow: str,
    external_id: str,
    *,
    agent: Mapping[str, Any] | None,
    wait: float,
    opening: Opening,
) -> R:
    """The run, opened or found again, with its lease; undone first where that is what its verdict says.

    Raises `NotToGoOn`, with the verdict, when it may not go on within `wait` seconds; `LeaseHeld` when somebody else
    works on it for longer than that.
    """
    agent = agent or ledger.card_for(flow)
    lease_seconds, digest = opening.get("lease_seconds"), opening.get("input_digest")
    opened = await ledger._open(flow, external_id, holder=ledger.holder, agent=agent, **opening)
    run = opened["run"]
    envelope: Json = {"run": run, "verdict": run["verdict"], "lease": opened["lease"]}
    began, looks = time.monotonic(), 0
    while True:
        refusal: errors.RehydrateError | None = None
        if not envelope["lease"]:
            try:
                envelope = await ledger._rehydrate(
                    run["id"], agent=agent, input_digest=digest, lease_seconds=lease_seconds
                )
            except errors.LeaseHeld as error:
                refusal = error
        if refusal is None and envelope["lease"]:
            taken = kind(ledger, envelope, lease_of(ledger, envelope), stop=lambda: False)
            if envelope["verdict"]["outcome"] != "compensate":
                return taken
            with worked_on(taken):
                await undo(taken)
            envelope["lease"] = None
            continue
        looks += 1
        delay = LOOK.delay(looks)
        refusal = refusal or errors.NotToGoOn(envelope["verdict"])
        ended = envelope["verdict"]["outcome"] == "terminate"
        if ended or time.monotonic() - began + delay > wait:
            raise refusal
        await ledger._transport.rest(delay)


def lease_of(ledger: LedgerCore, envelope: Mapping[str, Any]) -> Lease:
    """The lease that came with an envelope."""
    run = envelope["run"]
    return Lease(
        envelope["lease"],
        beat=lambda epoch: ledger.beat(run["id"], epoch),
        name=f"{run['flow']}/{run['external_id']}",
    )


@contextlib.contextmanager
def worked_on(run: RunCore) -> Iterator[None]:
    """While the block lasts the lease is kept, and what is logged and called belongs to the run."""
    with tracing.working_on(run.id, run.trace_id):
        run._lease.keep()
        try:
            yield
        finally:
            run._lease.close()


async def finish(run: RunCore) -> None:
    """A block that ended by itself completes its run, unless it has left it already."""
    if not run.left:
        await run._complete(None)


async def undo(run: RunCore) -> None:
    """Undo what the verdict lists, and give the run back."""
    try:
        await run._compensate()
        await run._release()
    except BaseException as error:
        if not isinstance(await leave(run, error), LEFT):
            raise


async def leave(run: RunCore, error: BaseException) -> BaseException:
    """Tell the ledger why the work on a run ended without a result; gives back the error that counted.

    Raises it when the ledger cannot be told: the lease is lost, or nobody answers.
    """
    error = gravest(error)
    if isinstance(error, (*GONE, *OUT_OF_REACH)):
        raise error
    if run.left:
        return error
    if isinstance(error, errors.Stopping):
        await run._release()
    elif isinstance(error, errors.EffectFailed):
        log.warning("%s: %s", run.name, error)
        await run._release(run.retry_in())
    elif isinstance(error, errors.EffectOutcomeUnknown):
        log.warning("%s: %s", run.name, error)
        await run._release(retry_in(1) if run.repeats(error.key) else None)
    elif isinstance(error, LEDGER_KNOWS):
        log.warning("%s: %s", run.name, error)
        await run._release()
    elif isinstance(error, Exception):
        log.warning("%s failed", run.name, exc_info=None if isinstance(error, errors.NotRetryable) else error)
        await run._fail(error, retryable=not isinstance(error, NO_USE_TRYING))
    else:
        with contextlib.suppress(errors.RehydrateError):
            await run._release()
    return error


def gravest(error: BaseException) -> BaseException:
    """Of what a task group hands on together the one that counts: a pause only when nothing went wrong beside it."""
    while isinstance(error, BaseExceptionGroup):
        wrong = error.split(LEFT)[1] or error
        error = wrong.exceptions[0]
    return error
