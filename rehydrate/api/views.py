"""Every operation of contract.md section 6, a few lines each: a service or a selector, and what it answers with."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from rehydrate import deliveries, selectors, services
from rehydrate.api import limits, shapes
from rehydrate.api.endpoint import Answer, Paged, Payload, get, post
from rehydrate.api.idempotency import Grant
from rehydrate.callers import Caller
from rehydrate.core import commands as c
from rehydrate.core.refusals import Refusal

Json = dict[str, Any]
Word = Annotated[str, Meta(min_length=1, max_length=500)]


# -- queries ---------------------------------------------------------------------------------------------------------


class RunsQuery(Paged):
    status: shapes.RunStatus | UnsetType = UNSET
    flow: Word | UnsetType = UNSET
    stage: Word | UnsetType = UNSET
    q: Word | UnsetType = UNSET
    system: Word | UnsetType = UNSET
    resource: Word | UnsetType = UNSET
    external_id: Word | UnsetType = UNSET
    label: Word | UnsetType = UNSET
    older_than: Word | UnsetType = UNSET


class WaitsQuery(Paged):
    status: shapes.WaitStatus | Literal["all"] | UnsetType = UNSET
    mine: Literal["0", "1"] | UnsetType = UNSET
    run: Word | UnsetType = UNSET
    flow: Word | UnsetType = UNSET
    kind: shapes.WaitKind | UnsetType = UNSET
    name: Word | UnsetType = UNSET
    resource: Word | UnsetType = UNSET
    q: Word | UnsetType = UNSET


class SignalsQuery(Paged):
    state: Literal["received", "buffered", "matched", "superseded", "late", "ambiguous"] | UnsetType = UNSET
    name: Word | UnsetType = UNSET


class DeliveriesQuery(Paged):
    status: shapes.DeliveryStatus | UnsetType = UNSET
    flow: Word | UnsetType = UNSET
    run: Word | UnsetType = UNSET


# -- agents ----------------------------------------------------------------------------------------------------------


def _lease(result: Json, body: Any, ids: Mapping[str, str]) -> Grant | None:
    """What a call that may give a lease grants."""
    lease = result.get("lease")
    return Grant(ids.get("run_id") or result["run"]["id"], lease["epoch"]) if lease else None


def _starts(result: Json, body: c.Append, ids: Mapping[str, str]) -> Grant | None:
    """An append grants what it starts."""
    started = any(effect.get("granted") for effect in result["effects"]) or any(
        event["type"] in ("effect.started", "effect.compensating") for event in result["events"]
    )
    return Grant(ids["run_id"], body.epoch) if started else None


@post(
    tag="Agents",
    body=c.OpenRun,
    answers={201: shapes.Opened, 200: shapes.Opened},
    refuses=(404,),
    grants=_lease,
    on_the_loop=True,
)
def open_run(caller: Caller, *, body: c.OpenRun) -> Answer:
    """Open a run.

    201 with a lease, if a `holder` is named and the events do not end in `paused`. 200 with the same run and no
    lease when `external_id` is known in that flow: rehydrate it. 409 `run_conflict` when the input digest differs.
    """
    result, made = services.open_run(caller, body)
    return Answer(result, 201 if made else 200)


@post(tag="Agents", body=c.Append, answers={200: shapes.Appended}, refuses=(404,), grants=_starts, on_the_loop=True)
def append_events(caller: Caller, *, run_id: str, body: c.Append) -> Json:
    """Append events.

    All or nothing, but receipts: `effect.executed` and `effect.failed` are kept even out of a batch that is
    refused, and are then listed as `recorded`. Each accepted call renews the lease. `paused` and `completed` come
    last.
    """
    return services.append_events(caller, run_id, body)


@post(tag="Agents", body=c.Heartbeat, answers={200: shapes.Leased}, refuses=(404,), on_the_loop=True)
def heartbeat(caller: Caller, *, run_id: str, body: c.Heartbeat) -> Json:
    """Renew the lease."""
    return services.heartbeat(caller, run_id, body)


@post(tag="Agents", body=c.Release, answers={200: shapes.Released}, refuses=(404,))
def release(caller: Caller, *, run_id: str, body: c.Release) -> Json:
    """Give the lease up."""
    return services.release(caller, run_id, body)


@post(tag="Agents", body=c.Recall, answers={200: shapes.Envelope}, refuses=(404,), grants=_lease)
def recall(caller: Caller, *, run_id: str, body: c.Recall) -> Json:
    """Withdraw the open waits and take the lease.

    Such as when the user sends new input. The reviewers see why.
    """
    return services.recall(caller, run_id, body)


@post(tag="Agents", body=c.Rehydrate, answers={200: shapes.Envelope}, refuses=(404,), grants=_lease, on_the_loop=True)
def rehydrate_run(caller: Caller, *, run_id: str, body: c.Rehydrate) -> Json:
    """Put a run back together.

    The envelope says what must happen now. A lease comes only with `continue` or `compensate`. 409 `lease_held`
    while another holder's lease lives; the same holder may take its own back.
    """
    return services.rehydrate_run(caller, run_id, body)


@post(
    tag="Agents",
    body=c.Claim,
    answers={200: shapes.Envelope, 204: None},
    grants=_lease,
    polls=services.ear_for_claim,
    on_the_loop=True,
)
def claim(caller: Caller, *, body: c.Claim) -> Json | None:
    """Claim the next run that is ready.

    `wait` is how many seconds it waits for one; 204 when none came.
    """
    return services.claim(caller, body)


# -- signals ---------------------------------------------------------------------------------------------------------


@post(tag="Signals", body=c.Signal, answers={202: shapes.SignalTaken}, refuses=(404,), apart=True)
def send_signal(caller: Caller, *, body: c.Signal) -> Json:
    """Send a signal.

    It is stored before it is matched and may come before its wait. Several fit: 409 `ambiguous_signal`, and it is
    kept for a person.
    """
    return services.send_signal(caller, body)


@get(tag="Signals", query=SignalsQuery, answers={200: shapes.Signals})
def list_signals(caller: Caller, *, query: SignalsQuery) -> Json:
    """List signals, newest first."""
    return selectors.list_signals(caller, **query.page())


@post(tag="Signals", body=c.AssignSignal, answers={200: shapes.SignalTaken}, refuses=(404,), people_only=True)
def assign_signal(caller: Caller, *, signal_id: str, body: c.AssignSignal) -> Json:
    """Say which wait a signal is for, where several fit."""
    return services.assign_signal(caller, signal_id, body)


@post(tag="Signals", body=Payload, answers={202: shapes.SignalTaken}, refuses=(404,), signed_in=False, apart=True)
def receive_hook(caller: None, *, token: str, body: Payload) -> Json:
    """Answer a callback wait.

    For systems that have no key: the address is unguessable. Takes JSON and forms; deduplicated by `webhook-id`,
    else by the body's digest.
    """
    limits.hooks.spend(token)
    try:
        return services.receive_hook(token, body.value, body.webhook_id)
    except Refusal as refusal:
        if refusal.code == "not_found":
            limits.wrong_hooks.spend(body.address)  # whoever tries addresses is slowed down
        raise


# -- waits -----------------------------------------------------------------------------------------------------------


@get(tag="Waits", query=WaitsQuery, answers={200: shapes.Waits}, refuses=(404,))
def list_waits(caller: Caller, *, query: WaitsQuery) -> Json:
    """List waits, those with the soonest deadline first.

    An agent sees those of its flows. Only open ones, unless `status` says otherwise.
    """
    return selectors.list_waits(caller, **query.page())


@get(tag="Waits", answers={200: shapes.Wait}, refuses=(404,))
def get_wait(caller: Caller, *, wait_id: str, query: None) -> Json:
    """Read a wait."""
    return selectors.get_wait(caller, wait_id)


@post(tag="Waits", body=c.Decide, answers={201: shapes.Decided}, refuses=(404,), people_only=True, on_the_loop=True)
def decide(caller: Caller, *, wait_id: str, body: c.Decide) -> Json:
    """Decide.

    Names the wait and its version. The first who closes it wins; the other is told who, what and when. Below the
    quorum a vote is 201 and the wait stays open.
    """
    return services.decide(caller, wait_id, body)


@post(tag="Waits", body=c.WaitAction, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def claim_wait(caller: Caller, *, wait_id: str, body: c.WaitAction) -> Json:
    """Take a wait on, so that others see it."""
    return services.claim_wait(caller, wait_id, body)


@post(tag="Waits", body=c.WaitAction, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def release_wait(caller: Caller, *, wait_id: str, body: c.WaitAction) -> Json:
    """Put a wait back for others."""
    return services.release_wait(caller, wait_id, body)


@post(tag="Waits", body=c.AssignWait, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def assign_wait(caller: Caller, *, wait_id: str, body: c.AssignWait) -> Json:
    """Hand a wait to somebody."""
    return services.assign_wait(caller, wait_id, body)


@post(tag="Waits", body=c.ExtendWait, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def extend_wait(caller: Caller, *, wait_id: str, body: c.ExtendWait) -> Json:
    """Give a wait another deadline."""
    return services.extend_wait(caller, wait_id, body)


@post(tag="Waits", body=c.WaitAction, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def escalate_wait(caller: Caller, *, wait_id: str, body: c.WaitAction) -> Json:
    """Escalate a wait to those whom its flow names."""
    return services.escalate_wait(caller, wait_id, body)


@post(tag="Waits", body=c.WaitAction, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def request_info(caller: Caller, *, wait_id: str, body: c.WaitAction) -> Json:
    """Ask for more before deciding."""
    return services.request_info(caller, wait_id, body)


@post(tag="Waits", body=c.WaitAction, answers={200: shapes.Wait}, refuses=(404,), people_only=True)
def comment_wait(caller: Caller, *, wait_id: str, body: c.WaitAction) -> Json:
    """Say something about a wait."""
    return services.comment_wait(caller, wait_id, body)


# -- holding the wheel -----------------------------------------------------------------------------------------------

WHEEL = "Holding the wheel"


@post(tag=WHEEL, body=c.Reasoned, answers={200: shapes.Run}, refuses=(404,), people_only=True)
def takeover(caller: Caller, *, run_id: str, body: c.Reasoned) -> Json:
    """Take a run over.

    Its agent is fenced off until it is handed back.
    """
    return services.takeover(caller, run_id, body)


@post(tag=WHEEL, body=c.Handback, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def handback(caller: Caller, *, run_id: str, body: c.Handback) -> Json:
    """Hand a run back.

    At the stage and checkpoint that are named, with answers to what was open and the effects that were done by hand.
    """
    return services.handback(caller, run_id, body)


@post(tag=WHEEL, body=c.Reasoned, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def terminate(caller: Caller, *, run_id: str, body: c.Reasoned) -> Json:
    """End a run and keep its evidence."""
    return services.terminate(caller, run_id, body)


@post(tag=WHEEL, body=c.Retry, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def retry(caller: Caller, *, run_id: str, body: c.Retry) -> Json:
    """Grant more tries."""
    return services.retry(caller, run_id, body)


@post(tag=WHEEL, body=c.Clear, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def clear(caller: Caller, *, run_id: str, body: c.Clear) -> Json:
    """Settle reasons for review until the next pause.

    It may supply metadata that is missing.
    """
    return services.clear(caller, run_id, body)


@post(tag=WHEEL, body=c.Reconcile, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def reconcile(caller: Caller, *, run_id: str, key: str, body: c.Reconcile) -> Json:
    """Say what became of an effect whose outcome is unknown."""
    return services.reconcile(caller, run_id, key, body)


@post(tag=WHEEL, body=c.Reasoned, answers={200: shapes.Settled}, refuses=(404,), people_only=True)
def sign_off(caller: Caller, *, run_id: str, key: str, body: c.Reasoned) -> Json:
    """Accept that an executed effect stays.

    Though its run was rejected or cancelled, and it cannot be undone.
    """
    return services.sign_off(caller, run_id, key, body)


# -- deliveries ------------------------------------------------------------------------------------------------------


@get(tag="Deliveries", query=DeliveriesQuery, answers={200: shapes.Deliveries}, refuses=(404,))
def list_deliveries(caller: Caller, *, query: DeliveriesQuery) -> Json:
    """List deliveries, newest first.

    For operators, auditors and administrators; an agent sees those of its flows.
    """
    return selectors.list_deliveries(caller, **query.page())


@get(tag="Deliveries", answers={200: shapes.DeliveryWhole}, refuses=(404,))
def get_delivery(caller: Caller, *, delivery_id: str, query: None) -> Json:
    """Read a delivery with its attempts."""
    return selectors.get_delivery(caller, delivery_id)


@post(tag="Deliveries", body=c.Resend, answers={200: shapes.DeliveryWhole}, refuses=(404,))
def resend_delivery(caller: Caller, *, delivery_id: str, body: c.Resend) -> Json:
    """Send a delivery again.

    The very same message, under the same `webhook-id`: a receiver that has it can tell. For operators. It has three
    days of tries before it; what is being sent right now is left as it is, and what is set aside stays so until its
    receiver is switched on.
    """
    return deliveries.resend(caller, delivery_id, body.reason)


# -- reading ---------------------------------------------------------------------------------------------------------


@get(tag="Reading", answers={200: shapes.Me})
def who_am_i(caller: Caller, *, query: None) -> Json:
    """Read whom a key belongs to, and what it may use.

    For setting an agent up: that its key is a right one, of which workspace, for which flows.
    """
    return selectors.who(caller)


@get(tag="Reading", query=RunsQuery, answers={200: shapes.Runs})
def list_runs(caller: Caller, *, query: RunsQuery) -> Json:
    """List runs, newest first."""
    return selectors.list_runs(caller, **query.page())


@get(tag="Reading", answers={200: shapes.Run}, refuses=(404,))
def get_run(caller: Caller, *, run_id: str, query: None) -> Json:
    """Read a run: its ten fields, its verdict, its waits and effects."""
    return selectors.get_run(caller, run_id)


@get(tag="Reading", query=Paged, answers={200: shapes.Events}, refuses=(404,))
def list_events(caller: Caller, *, run_id: str, query: Paged) -> Json:
    """List a run's events in their order."""
    return selectors.list_events(caller, run_id, cursor=query.cursor or None, limit=query.limit)


@get(tag="Reading", answers={200: shapes.Verdict}, refuses=(404,))
def get_verdict(caller: Caller, *, run_id: str, query: None) -> Json:
    """Ask what the ledger says must happen now."""
    return selectors.get_verdict(caller, run_id)


@get(tag="Reading", answers={200: shapes.Evidence}, refuses=(404,))
def get_evidence(caller: Caller, *, run_id: str, query: None) -> Json:
    """Take a run's whole pack: events, decisions, chain proof."""
    return selectors.evidence(caller, run_id)
