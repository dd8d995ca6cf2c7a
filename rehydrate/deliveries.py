"""Receivers and their deliveries as rows: what is due and who sends it, what came of it, and what people do about it.

Rows are made by `outbox`, sent by `sender`. Whoever changes a receiver and its deliveries locks the receiver first.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec
from django.db import connection, transaction
from django.db.models import F, Q

from rehydrate import clock, notices, seal, selectors, webhooks
from rehydrate.callers import Caller
from rehydrate.core import delivering
from rehydrate.core.canonical import instant
from rehydrate.core.refusals import Refusal, invalid, not_found
from rehydrate.models import AdminEvent, Delivery, DeliveryAttempt, Endpoint, Workspace
from rehydrate.webhooks import Outcome

Json = dict[str, Any]

#: Of its own: threads that draw from the shared one would make what others draw from it another.
_dice = random.SystemRandom()
#: Seconds after which a sender that said nothing is taken for dead, and its attempt is made again: longer than an
#: attempt and a slow name server take together. It grows with the attempts: it may be the message that kills.
LEASE: Final = 60
OVERLAP: Final = dt.timedelta(hours=24)


# -- receivers, as flows name them


@transaction.atomic
def aim(workspace: Workspace, flow: str, url: str | None) -> tuple[str | None, str | None]:
    """Makes a flow's receiver what its policy says. What changed, in words, and the secret of one that is new.

    What is pending goes to the new address at once; without an address it is withdrawn.
    """
    endpoint = Endpoint.objects.select_for_update(no_key=True).filter(workspace=workspace, flow=flow).first()
    if endpoint is None or endpoint.url is None:
        if url is None:
            return None, None
        secret = webhooks.new_secret()
        fresh = {
            **dict.fromkeys(("previous_secret", "previous_until", "switched_off_at", "switched_off_why")),
            **dict.fromkeys(("quiet_until", "answered_at", "last_seconds")),
            "url": url, "secret": _sealed(secret), "failures": 0,
        }  # fmt: skip
        Endpoint.objects.update_or_create(workspace=workspace, flow=flow, defaults=fresh)
        return f"delivers to {url}", secret
    if endpoint.url == url:
        return None, None
    endpoint.url = url
    endpoint.save(update_fields=["url"])
    if url is None:
        count = _withdraw(endpoint)
        return f"delivers nowhere any more; {count} pending withdrawn" if count else "delivers nowhere any more", None
    _start_afresh(endpoint, clock.now())
    return f"delivers to {url}", None


def _sealed(secret: str) -> str:
    return seal.encrypt(secret).decode("ascii")


def _withdraw(endpoint: Endpoint) -> int:
    return Delivery.objects.filter(endpoint=endpoint, status="pending").update(
        status="withdrawn", closed_at=clock.now(), sending=False
    )


def _start_afresh(endpoint: Endpoint, now: dt.datetime) -> None:
    """The receiver is another one, or is well again: what is pending has its three days anew, beginning now."""
    Endpoint.objects.filter(pk=endpoint.pk).update(
        switched_off_at=None, switched_off_why=None, failures=0, quiet_until=None, last_seconds=None
    )
    Delivery.objects.filter(endpoint=endpoint, status="pending", sending=False).update(since=now, next_at=now)
    _tell(_of_all(endpoint))


def _tell(told: dict[notices.Kind, Any]) -> None:
    """Whom it is for hears of it when it is committed."""
    with connection.cursor() as cursor:
        cursor.execute(notices.tell(), [notices.parts(told)])


def _of_all(endpoint: Endpoint) -> dict[notices.Kind, Any]:
    """For senders, and for the pages of the receiver's workspace."""
    return {notices.Kind.DELIVERY: None, notices.Kind.CHANGED: {str(endpoint.workspace_id): None}}


def rotate(endpoint: Endpoint, *, overlap: dt.timedelta = OVERLAP, by: str = "command") -> str:
    """A new secret, shown this once. Until the overlap ends, the old one signs beside it."""
    with transaction.atomic():
        endpoint = Endpoint.objects.select_for_update(no_key=True).get(pk=endpoint.pk)
        secret = webhooks.new_secret()
        until = clock.now() + overlap if overlap else None
        endpoint.previous_secret = endpoint.secret if until else None
        endpoint.previous_until = until
        endpoint.secret = _sealed(secret)
        endpoint.save(update_fields=["secret", "previous_secret", "previous_until"])
        _note(endpoint, "endpoint.secret_rotated", by=by, old_signs_until=instant(until))
    return secret


def _note(endpoint: Endpoint, act: str, *, by: str, channel: str = "command", **detail: Any) -> None:
    AdminEvent.objects.create(
        workspace_id=endpoint.workspace_id,
        actor_kind="system" if by in {"command", "demo", "sender"} else "person",
        actor_id=by,
        act=act,
        subject=f"flow {endpoint.flow}",
        channel="system" if by == "sender" else channel,
        detail=detail,
    )


def _shown(jobs: Iterable[Job]) -> dict[notices.Kind, Any]:
    """For the pages of these runs, and those of their workspaces."""
    runs: dict[str, list[str]] = {}
    for job in jobs:
        runs.setdefault(job.workspace, []).append(job.run)
    return {notices.Kind.CHANGED: runs if sum(map(len, runs.values())) <= notices.NAMED_AT_MOST else None}


# -- sending


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attempt to make: counted already, and nobody else's until its lease ends."""

    delivery: UUID
    number: int
    endpoint: UUID
    run: str
    workspace: str
    since: dt.datetime
    slow: bool
    message: webhooks.Message


_DUE: Final = """
SELECT e.id FROM rehydrate_endpoint e
WHERE e.url IS NOT NULL AND e.switched_off_at IS NULL
  AND (e.quiet_until IS NULL OR e.quiet_until <= clock_timestamp() + %(moved)s::interval)
  AND EXISTS (SELECT 1 FROM rehydrate_delivery d WHERE d.endpoint_id = e.id AND d.status = 'pending'
    AND d.next_at <= clock_timestamp() + %(moved)s::interval)
FOR NO KEY UPDATE SKIP LOCKED
"""
# Counted in a statement after the lock: one that waits for nothing still sees only what was there when it began.
_COUNTS: Final = """
SELECT e.id, e.failures, e.last_seconds, n.now,
  (SELECT count(*) FROM rehydrate_delivery d WHERE d.endpoint_id = e.id AND d.sending AND d.next_at > n.now),
  (SELECT count(*) FROM (SELECT 1 FROM rehydrate_delivery d WHERE d.endpoint_id = e.id AND d.status = 'pending'
     AND d.next_at <= n.now LIMIT %(most)s) x)
FROM rehydrate_endpoint e, (SELECT clock_timestamp() + %(moved)s::interval AS now) n
WHERE e.id = ANY(%(ids)s) AND e.url IS NOT NULL AND e.switched_off_at IS NULL
ORDER BY e.answered_at DESC NULLS LAST, e.id
"""
_TAKE: Final = """
WITH picked AS (
  SELECT d.id FROM unnest(%(ids)s::uuid[], %(rooms)s::int[]) AS a(endpoint_id, room) CROSS JOIN LATERAL (
    SELECT id FROM rehydrate_delivery WHERE endpoint_id = a.endpoint_id AND status = 'pending' AND next_at <= %(now)s
    ORDER BY next_at, id LIMIT a.room FOR UPDATE SKIP LOCKED) d),
taken AS (
  UPDATE rehydrate_delivery d SET attempts = d.attempts + 1, sending = TRUE,
    next_at = %(now)s + make_interval(secs => %(lease)s * least(d.attempts + 1, 60))
  FROM picked WHERE d.id = picked.id RETURNING d.*),
tried AS (
  INSERT INTO rehydrate_deliveryattempt (delivery_id, number, url, started_at)
  SELECT t.id, t.attempts, e.url, %(now)s FROM taken t JOIN rehydrate_endpoint e ON e.id = t.endpoint_id)
SELECT t.id, t.attempts, t.endpoint_id, t.since, t.type, t.at, t.run_status, t.run_version, t.run_id,
  r.workspace_id, r.flow, r.external_id, e.url, e.secret,
  CASE WHEN e.previous_until > %(now)s THEN e.previous_secret END
FROM taken t JOIN rehydrate_run r ON r.id = t.run_id JOIN rehydrate_endpoint e ON e.id = t.endpoint_id
"""


def claim(*, free: int, free_for_slow: int) -> list[Job]:
    """Up to `free` attempts that are due, fairly among receivers, each counted and leased to whoever asked.

    However many senders ask at once: no attempt is given to two, and no receiver gets more than its share.
    """
    if free <= 0:
        return []
    moved = clock.interval()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(_DUE, {"moved": moved})
        locked = [row[0] for row in cursor.fetchall()]
        if not locked:
            return []
        cursor.execute(_COUNTS, {"moved": moved, "ids": locked, "most": max(delivering.AT_ONCE.values())})
        counted = cursor.fetchall()
        if not counted:
            return []
        now = counted[0][3]
        receivers = [
            delivering.Receiver(id=str(id_), busy=busy, due=due, pace=delivering.pace(failures, seconds))
            for id_, failures, seconds, _, busy, due in counted
        ]
        shares = delivering.share(receivers, free=free, free_for_slow=free_for_slow)
        if not shares:
            return []
        given = {"ids": [UUID(id_) for id_ in shares], "rooms": list(shares.values()), "now": now, "lease": LEASE}
        cursor.execute(_TAKE, given)
        slow = {UUID(receiver.id) for receiver in receivers if receiver.pace != "quick"}
        return [_job(row, now, slow) for row in cursor.fetchall()]


def _job(row: tuple[Any, ...], now: dt.datetime, slow: set[UUID]) -> Job:
    id_, number, endpoint, since, type_, at, status, version, run, workspace, flow, external_id, url, *sealed = row
    said = {
        "type": type_,
        "at": instant(at),
        "run": str(run),
        "flow": flow,
        "external_id": external_id,
        "run_status": status,
        "run_version": version,
    }
    return Job(
        delivery=id_,
        number=number,
        endpoint=endpoint,
        run=str(run),
        workspace=str(workspace),
        since=since,
        slow=endpoint in slow,
        message=webhooks.Message(
            id=str(id_),
            url=url,
            body=msgspec.json.encode(delivering.body(said)),
            secrets=tuple(str(seal.decrypt(each)) for each in sealed if each is not None),
            sent_at=now,
        ),
    )


_TAKEN: Final = """
WITH o AS (
  SELECT * FROM jsonb_to_recordset(%(taken)s::jsonb) AS x(delivery uuid, number int, endpoint uuid, url text,
    seconds float8, status int, answer text)),
tried AS (
  UPDATE rehydrate_deliveryattempt a SET seconds = o.seconds, status = o.status, answer = o.answer
  FROM o WHERE a.delivery_id = o.delivery AND a.number = o.number),
receivers AS (
  UPDATE rehydrate_endpoint e SET failures = 0, quiet_until = NULL, answered_at = %(now)s, last_seconds = o.seconds
  FROM (SELECT endpoint, url, max(seconds) AS seconds FROM o GROUP BY 1, 2) o WHERE e.id = o.endpoint AND e.url = o.url)
UPDATE rehydrate_delivery d SET status = 'delivered', closed_at = %(now)s, sending = FALSE, last_status = o.status,
  last_error = NULL
FROM (SELECT DISTINCT ON (delivery) delivery, status FROM o ORDER BY delivery, number DESC) o
WHERE d.id = o.delivery AND d.status <> 'delivered'
"""


def record_taken(done: list[tuple[Job, Outcome]]) -> None:
    """Attempts that were answered with a yes, all in one: that always counts, however late it comes."""
    taken = [
        {
            "delivery": str(job.delivery),
            "number": job.number,
            "endpoint": str(job.endpoint),
            "url": job.message.url,
            "seconds": round(outcome.seconds, 3),
            "status": outcome.status,
            "answer": outcome.answer,
        }
        for job, outcome in done
    ]
    ids = [job.endpoint for job, _ in done]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "SELECT clock_timestamp() + %s::interval FROM rehydrate_endpoint WHERE id = ANY(%s) ORDER BY id"
            " FOR NO KEY UPDATE",
            [clock.interval(), ids],
        )
        now = max(row[0] for row in cursor.fetchall())
        _tell(_shown([job for job, _ in done]))
        cursor.execute(_TAKEN, {"taken": msgspec.json.encode(taken).decode(), "now": now})


def record(job: Job, outcome: Outcome) -> None:
    """What came of an attempt. Anything but a yes counts only of the latest one."""
    if outcome.taken:
        record_taken([(job, outcome)])
        return
    with transaction.atomic():
        endpoint = Endpoint.objects.select_for_update(no_key=True).get(pk=job.endpoint)
        now = clock.now()
        _tell(_shown([job]))
        DeliveryAttempt.objects.filter(delivery=job.delivery, number=job.number).update(
            seconds=round(outcome.seconds, 3),
            status=outcome.status,
            error=outcome.error,
            detail=outcome.detail,
            answer=outcome.answer,
        )
        said = {"sending": False, "last_status": outcome.status, "last_error": outcome.error}
        mine = Delivery.objects.filter(pk=job.delivery, status="pending", attempts=job.number)
        if endpoint.url != job.message.url:  # the flow names another by now, which knows nothing of this
            mine.update(since=now, next_at=now, **said)
            return
        _refused(endpoint, job, outcome, now)
        if outcome.status == 410:
            mine.update(next_at=now, **said)
            return
        pause = delivering.retry_after(outcome.retry_after, now) if outcome.status in (429, 503) else None
        again = delivering.next_try(
            attempts=job.number,
            since=job.since,
            now=now,
            luck=_dice.random(),
            pause=pause,
        )
        if again is not None:
            mine.update(next_at=again, **said)
        elif mine.update(status="given_up", closed_at=now, **said):
            _note_given_up(endpoint, [job.delivery])


def _refused(endpoint: Endpoint, job: Job, outcome: Outcome, now: dt.datetime) -> None:
    """What a failure says of the receiver: it is left alone for a while, or switched off."""
    if outcome.status == 410:
        if endpoint.switched_off_at is None:
            endpoint.switched_off_at, endpoint.switched_off_why = now, "gone"
            endpoint.save(update_fields=["switched_off_at", "switched_off_why"])
            _note(endpoint, "endpoint.switched_off", by="sender", why="it answered 410", delivery=str(job.delivery))
        return
    asked = delivering.retry_after(outcome.retry_after, now) if outcome.status in (429, 503) else None
    rest = max(delivering.quiet(endpoint.failures + 1), min(asked or 0.0, delivering.LONGEST_PAUSE))
    until = max(endpoint.quiet_until or now, now + dt.timedelta(seconds=rest))
    Endpoint.objects.filter(pk=endpoint.pk).update(
        failures=F("failures") + 1, quiet_until=until, last_seconds=outcome.seconds
    )


def _note_given_up(endpoint: Endpoint, deliveries: list[UUID]) -> None:
    """One escalation for each: what follows is up to people."""
    AdminEvent.objects.bulk_create(
        AdminEvent(
            workspace_id=endpoint.workspace_id,
            actor_kind="system",
            actor_id="sender",
            act="delivery.given_up",
            subject=f"delivery {delivery}",
            outcome="escalated",
            channel="system",
            detail={"flow": endpoint.flow},
        )
        for delivery in deliveries
    )


def tidy(*, at_most: int = 1000) -> int:
    """Ends what no attempt ends: what was written while its flow stopped naming a receiver, and what is over its three
    days with a receiver that answers nobody. How many.
    """
    now = clock.now()
    count = 0
    for endpoint in Endpoint.objects.filter(url__isnull=True, deliveries__status="pending").distinct():
        with transaction.atomic():
            locked = Endpoint.objects.select_for_update(no_key=True).get(pk=endpoint.pk)
            count += _withdraw(locked) if locked.url is None else 0
    # It failed lately: one that was not asked for days, because this server stood still, is asked first.
    failing = Endpoint.objects.filter(
        failures__gte=3, quiet_until__gt=now - dt.timedelta(minutes=5), switched_off_at__isnull=True, url__isnull=False
    )
    over = Q(status="pending", since__lt=now - delivering.GIVE_UP_AFTER) & (Q(sending=False) | Q(next_at__lte=now))
    for endpoint in failing:
        with transaction.atomic():
            Endpoint.objects.select_for_update(no_key=True).get(pk=endpoint.pk)
            ids = list(Delivery.objects.filter(over, endpoint=endpoint).values_list("pk", flat=True)[:at_most])
            Delivery.objects.filter(pk__in=ids).update(status="given_up", closed_at=now, sending=False)
            _note_given_up(endpoint, ids)
            count += len(ids)
    return count


def seconds_until_due() -> float | None:
    """Seconds until the next attempt is due, negative when one is overdue, None when nothing is pending."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT extract(epoch FROM min(greatest(d.next_at, e.quiet_until)) - clock_timestamp() - %s::interval)"
            " FROM rehydrate_endpoint e CROSS JOIN LATERAL (SELECT next_at FROM rehydrate_delivery"
            "  WHERE endpoint_id = e.id AND status = 'pending' ORDER BY next_at LIMIT 1) d"
            " WHERE e.url IS NOT NULL AND e.switched_off_at IS NULL",
            [clock.interval()],
        )
        (left,) = cursor.fetchone()
    return None if left is None else float(left)


# -- what people do


def resend(caller: Caller, delivery_id: str, reason: str = "") -> Json:
    """Sends the very same message once more: the same id, so that a receiver that has it already can tell.

    What is being sent right now stays as it is; what waits is sent at once, with three days before it.
    """
    found = selectors.find_delivery(caller, delivery_id, acts=True)
    with transaction.atomic():
        endpoint = Endpoint.objects.select_for_update(no_key=True).get(pk=found["receiver"]["id"])
        if endpoint.url is None:
            raise invalid("", "Its flow names no receiver any more: give it a deliver_to first.")
        now = clock.now()
        under_way = Q(status="pending", sending=True, next_at__gt=now)
        if Delivery.objects.filter(~under_way, pk=found["id"]).update(
            status="pending", closed_at=None, sending=False, since=now, next_at=now
        ):
            Endpoint.objects.filter(pk=endpoint.pk).update(quiet_until=None)
            _tell(_of_all(endpoint))
            AdminEvent.objects.create(
                workspace_id=endpoint.workspace_id,
                actor_kind="person",
                actor_id=caller.id,
                act="delivery.resent",
                subject=f"delivery {found['id']}",
                channel=caller.channel,
                detail={
                    "flow": endpoint.flow,
                    "run": found["run"],
                    "type": found["type"],
                    "was": found["status"],
                    "reason": reason,
                },
            )
    return selectors.get_delivery(caller, delivery_id)


def _for_operator(caller: Caller, endpoint_id: str) -> Endpoint:
    """The receiver, locked, for somebody who operates its workspace."""
    endpoint = Endpoint.objects.select_for_update(no_key=True).filter(pk=endpoint_id).first()
    if endpoint is None or not caller.sees(str(endpoint.workspace_id), endpoint.flow):
        raise not_found("receiver")
    if not caller.may(str(endpoint.workspace_id), "operator"):
        raise Refusal("forbidden", "Only operators look after receivers.")
    return endpoint


def resend_given_up(caller: Caller, endpoint_id: str) -> int:
    """Sends again all that a receiver was given up for. How many."""
    with transaction.atomic():
        endpoint = _for_operator(caller, endpoint_id)
        now = clock.now()
        count = Delivery.objects.filter(endpoint=endpoint, status="given_up").update(
            status="pending", closed_at=None, since=now, next_at=now
        )
        if count:
            Endpoint.objects.filter(pk=endpoint.pk).update(quiet_until=None)
            _tell(_of_all(endpoint))
            _note(endpoint, "endpoint.resent", by=caller.id, channel=caller.channel, deliveries=count)
    return count


def switch(caller: Caller, endpoint_id: str, *, on: bool) -> None:
    """Switches a receiver off, or on again; what was set aside is sent then. Doing it twice changes nothing."""
    with transaction.atomic():
        endpoint = _for_operator(caller, endpoint_id)
        if endpoint.url is None or on is (endpoint.switched_off_at is None):
            return
        now = clock.now()
        if on:
            _start_afresh(endpoint, now)
        else:
            Endpoint.objects.filter(pk=endpoint.pk).update(switched_off_at=now, switched_off_why=caller.name[:200])
        act = "endpoint.switched_on" if on else "endpoint.switched_off"
        _note(endpoint, act, by=caller.id, channel=caller.channel)
