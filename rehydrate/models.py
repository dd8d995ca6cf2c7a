"""The tables. Workspaces, groups, flows and keys are written by set-up; everything about a run only by `ledger`.

The columns of Run, Wait, Effect, Decision and ExternalRef are the fields of the structs in core.state, name by name: a
row decodes into its struct, and a struct is written as its row (see projections.py). Comments say which query an index
serves; a foreign key with `db_index=False` is the first column of another index, and a second would only cost.
"""

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from rehydrate.core.state import ATTENTION
from rehydrate.ids import uuid7


class Workspace(models.Model):
    """A wall: runs, flows, keys and people of one never show in another."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    slug = models.SlugField(max_length=100, unique=True)
    title = models.CharField(max_length=200, blank=True)

    def __str__(self) -> str:
        return self.title or self.slug


class Group(models.Model):
    """People of a workspace with the same roles; a wait's policy names groups."""

    workspace = models.ForeignKey(Workspace, on_delete=models.PROTECT, related_name="groups")
    name = models.CharField(max_length=100)
    roles = ArrayField(models.CharField(max_length=20), default=list)
    members = models.ManyToManyField(settings.AUTH_USER_MODEL, through="Membership", related_name="rehydrate_groups")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["workspace", "name"], name="group_once")]

    def __str__(self) -> str:
        return self.name


class Membership(models.Model):
    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["group", "user"], name="membership_once")]

    def __str__(self) -> str:
        return f"{self.user_id} in {self.group_id}"


class Flow(models.Model):
    """A declared kind of run. Its policy is kept in versions: the one at a run's pause counts (rule 16)."""

    workspace = models.ForeignKey(Workspace, on_delete=models.PROTECT, related_name="flows")
    name = models.CharField(max_length=100)
    title = models.CharField(max_length=200, blank=True)
    current = models.PositiveIntegerField(default=1)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["workspace", "name"], name="flow_once")]

    def __str__(self) -> str:
        return self.title or self.name


class PolicyVersion(models.Model):
    """One version of a flow's policy (core.policy.FlowPolicy as JSON); never changed once written."""

    flow = models.ForeignKey(Flow, on_delete=models.PROTECT, related_name="versions")
    number = models.PositiveIntegerField()
    body = models.JSONField()
    changed_by = models.CharField(max_length=150)
    changed_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["flow", "number"], name="policy_version_once")]

    def __str__(self) -> str:
        return f"{self.flow} {self.number}"


class ApiKey(models.Model):
    """A key of an agent (one workspace, some flows) or of a person. Only a digest of the secret is kept."""

    class Kind(models.TextChoices):
        AGENT = "agent"
        PERSON = "person"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    kind = models.CharField(max_length=10, choices=Kind)
    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    workspace = models.ForeignKey(Workspace, null=True, on_delete=models.PROTECT, related_name="keys")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.PROTECT, related_name="api_keys"
    )  # a person's own key, or the owner of an agent's
    flows = ArrayField(models.CharField(max_length=100), default=list)
    scopes = ArrayField(models.CharField(max_length=50), default=list)
    created_at = models.DateTimeField(db_default=Now())
    created_by = models.CharField(max_length=150, blank=True)
    last_used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="key_has_its_place",
                condition=Q(kind="agent", workspace__isnull=False) | Q(kind="person", user__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix})"


class Run(models.Model):
    """One instance of a flow; keeps its id from open to end."""

    class Status(models.TextChoices):
        RUNNING = "running"  # an agent holds a live lease
        WAITING = "waiting"  # the pause is not resolved, or a retry is not due
        READY = "ready"  # may be claimed
        REVIEW = "review"  # a person must say how it goes on
        COMPENSATING = "compensating"  # undo is to be done (may be claimed) or being done
        TAKEN_OVER = "taken_over"  # a person holds it
        COMPLETED = "completed"
        TERMINATED = "terminated"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    workspace = models.ForeignKey(Workspace, on_delete=models.PROTECT, related_name="runs", db_index=False)
    flow = models.CharField(max_length=100)
    external_id = models.CharField(max_length=300)
    title = models.CharField(max_length=500, blank=True)
    status = models.CharField(max_length=20, choices=Status)
    stage = models.CharField(max_length=100, null=True)
    version = models.PositiveBigIntegerField()
    last_hash = models.CharField(max_length=64)
    policy = models.PositiveIntegerField()
    input_ref = models.TextField(null=True)
    input_digest = models.TextField(null=True)
    agent = models.JSONField(null=True)
    labels = models.JSONField(default=dict)
    requested_by = models.CharField(max_length=150, null=True)
    opened_by = models.CharField(max_length=150, null=True)
    trace_id = models.TextField(null=True)
    checkpoint = models.JSONField(null=True)
    passed = models.JSONField(default=list)
    epoch = models.PositiveBigIntegerField(default=0)
    holder = models.CharField(max_length=200, null=True)
    lease_seconds = models.PositiveIntegerField(default=0)
    lease_expires_at = models.DateTimeField(null=True)
    lease_purpose = models.CharField(max_length=20, null=True)
    pause = models.PositiveBigIntegerField(default=0)
    paused_at = models.DateTimeField(null=True)
    resume_when = models.CharField(max_length=10, null=True)
    pause_waits = models.JSONField(default=list)
    missing = models.JSONField(default=list)
    rejection = models.JSONField(null=True)
    cancelled = models.JSONField(null=True)
    cleared = models.JSONField(default=list)
    alarms = models.JSONField(default=list)
    mismatch = models.JSONField(null=True)
    failure_count = models.PositiveIntegerField(default=0)
    failure_limit = models.PositiveIntegerField(default=3)
    undo_failures = models.PositiveIntegerField(default=0)
    last_error = models.JSONField(null=True)
    not_retryable = models.BooleanField(default=False)
    escalation = models.PositiveIntegerField(default=0)
    retry_at = models.DateTimeField(null=True)
    taken_over = models.JSONField(null=True)
    handback = models.JSONField(null=True)
    ref_count = models.PositiveIntegerField(default=0)
    effect_count = models.PositiveIntegerField(default=0)
    decision_count = models.PositiveIntegerField(default=0)
    outcome = models.CharField(max_length=20)
    reasons = models.JSONField(default=list)
    ready_since = models.DateTimeField(null=True)
    alarm_at = models.DateTimeField(null=True)  # when being ready unclaimed becomes an alarm
    unclaimed_at = models.DateTimeField(null=True)
    status_since = models.DateTimeField(null=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)
    result = models.JSONField(null=True)
    sealed = models.TextField(null=True)  # the secret fields of the columns above, encrypted
    #: Grows with each write. A change that was decided on an older one writes nothing (see ledger.change).
    revision = models.PositiveBigIntegerField(db_default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["workspace", "flow", "external_id"], name="run_once"),
            models.CheckConstraint(
                name="lease_is_whole",
                condition=Q(lease_expires_at__isnull=True, holder__isnull=True)
                | Q(lease_expires_at__isnull=False, holder__isnull=False),
            ),
            models.CheckConstraint(
                name="ended_holds_nothing",
                condition=~Q(status__in=["completed", "terminated"])
                | Q(lease_expires_at__isnull=True, ended_at__isnull=False),
            ),
        ]
        indexes = [
            # claims: the oldest claimable run of some flows
            models.Index(
                fields=["workspace", "flow", "ready_since"],
                condition=Q(status__in=["ready", "compensating"], lease_expires_at__isnull=True),
                name="run_claimable",
            ),
            # the sweeper: leases that lapsed
            models.Index(fields=["lease_expires_at"], condition=Q(lease_expires_at__isnull=False), name="run_leased"),
            # the sweeper: runs that wait too long for an agent
            models.Index(fields=["alarm_at"], condition=Q(alarm_at__isnull=False), name="run_alarm"),
            # lists by status, newest first, and the inbox's scopes
            models.Index(fields=["workspace", "status", "-created_at"], name="run_by_status"),
            models.Index(fields=["workspace", "-created_at", "-id"], name="run_newest"),
            # the inbox: what nobody fetched, and alarms
            models.Index(fields=["unclaimed_at"], condition=Q(unclaimed_at__isnull=False), name="run_unclaimed"),
            models.Index(fields=["id"], condition=Q(ended_at__isnull=True) & ~Q(alarms=[]), name="run_alarmed"),
        ]

    def __str__(self) -> str:
        return f"{self.flow} {self.external_id}"


class LedgerEvent(models.Model):
    """One fact in a run's append-only ledger.

    A trigger refuses UPDATE, DELETE and TRUNCATE (see the first migration).
    """

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="events", db_index=False)
    # Its run's, which is what the database holds it to; a second constraint would be checked with each event.
    workspace = models.ForeignKey(
        Workspace, on_delete=models.PROTECT, related_name="+", db_index=False, db_constraint=False
    )
    seq = models.PositiveBigIntegerField()
    type = models.CharField(max_length=50)
    actor_kind = models.CharField(max_length=10)
    actor_id = models.CharField(max_length=200)
    actor_name = models.CharField(max_length=200)
    at = models.DateTimeField()
    payload = models.JSONField()
    sealed = models.TextField(null=True)  # the secret fields of the payload, encrypted; the payload has their digests
    prev_hash = models.CharField(max_length=64)
    hash = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "seq"], name="event_once")]
        indexes = [
            # the history page: newest first, by workspace, type or actor
            models.Index(fields=["workspace", "-id"], name="event_history"),
            models.Index(fields=["workspace", "type", "-id"], name="event_by_type"),
            models.Index(fields=["workspace", "actor_id", "-id"], name="event_by_actor"),
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.seq} {self.type}"


class CheckpointState(models.Model):
    """An agent's opaque state, encrypted, beside the event that holds its digest; deletable after the run's end."""

    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="states", db_index=False)
    seq = models.PositiveBigIntegerField()
    digest = models.CharField(max_length=64)
    sealed = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "seq"], name="checkpoint_state_once")]

    def __str__(self) -> str:
        return f"{self.run_id} {self.seq}"


class Wait(models.Model):
    """What a paused run waits for."""

    class Kind(models.TextChoices):
        APPROVAL = "approval"
        TIMER = "timer"
        CALLBACK = "callback"
        SIGNAL = "signal"

    class Status(models.TextChoices):
        OPEN = "open"
        SATISFIED = "satisfied"  # from open: an answer, a signal, or a timer that came due
        REJECTED = "rejected"  # from open: a person's no
        TIMED_OUT = "timed_out"  # from open: the deadline
        CANCELLED = "cancelled"  # from open: the run was cancelled or ended
        SUPERSEDED = "superseded"  # from open: another answer, a later pause, a recall or a takeover made it void

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="waits", db_index=False)
    key = models.CharField(max_length=200)
    name = models.CharField(max_length=100)
    kind = models.CharField(max_length=10, choices=Kind)
    status = models.CharField(max_length=12, choices=Status)
    version = models.PositiveIntegerField()
    due_at = models.DateTimeField()
    length = models.PositiveBigIntegerField()  # seconds between opening and deadline: an escalation gives as much again
    on_timeout = models.CharField(max_length=12)
    on_reject = models.CharField(max_length=12)
    correlation = models.CharField(max_length=500, null=True)
    source = models.TextField(null=True)  # whom or what it waits for, in words
    token = models.CharField(max_length=64, null=True)  # of its callback URL
    ask = models.JSONField(null=True)
    effect_key = models.CharField(max_length=200, null=True)
    risk = models.CharField(max_length=10, null=True)
    policy = models.JSONField(default=dict)
    groups = models.JSONField(default=list)
    votes = models.JSONField(default=list)
    decision = models.JSONField(null=True)
    signal = models.JSONField(null=True)
    claimed_by = models.CharField(max_length=150, null=True)
    assigned_to = models.CharField(max_length=150, null=True)
    info_requested = models.JSONField(null=True)
    remind_at = models.DateTimeField(null=True)
    escalate_at = models.DateTimeField(null=True)
    escalation = models.PositiveIntegerField(default=0)
    unsatisfiable = models.BooleanField(default=False)
    pause = models.PositiveBigIntegerField(default=0)
    consumed = models.BooleanField(default=False)  # an agent was told the answer: no later pause counts it again
    why = models.TextField(null=True)
    opened_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True)
    sealed = models.TextField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "key"], name="wait_key_once"),
            models.UniqueConstraint(fields=["token"], condition=Q(token__isnull=False), name="wait_token_once"),
            models.CheckConstraint(
                name="wait_closes_whole",
                condition=Q(status="open", closed_at__isnull=True) | (~Q(status="open") & Q(closed_at__isnull=False)),
            ),
        ]
        indexes = [
            # the inbox, and what is due: open waits by deadline
            models.Index(fields=["due_at", "id"], condition=Q(status="open"), name="wait_open"),
            # the inbox: what one has taken up, or was given
            models.Index(
                fields=["claimed_by"], condition=Q(status="open", claimed_by__isnull=False), name="wait_claimed"
            ),
            models.Index(
                fields=["assigned_to"], condition=Q(status="open", assigned_to__isnull=False), name="wait_assigned"
            ),
            # the append path: a run's open waits
            models.Index(fields=["run"], condition=Q(status="open"), name="wait_open_of_run"),
            # signals: by correlation and name
            models.Index(
                fields=["correlation", "name"], condition=Q(correlation__isnull=False), name="wait_correlation"
            ),
            # the list of decided asks, newest first
            models.Index(fields=["-closed_at", "-id"], name="wait_closed"),
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.run_id}"


class Effect(models.Model):
    """A side effect outside. One per (run, key)."""

    class State(models.TextChoices):
        PLANNED = "planned"
        STARTED = "started"  # from planned, failed; from unknown where retry_safe
        EXECUTED = "executed"  # a receipt came
        FAILED = "failed"  # it certainly did not happen
        UNKNOWN = "unknown"  # the lease ended in mid-effect, or the agent does not know
        COMPENSATING = "compensating"  # from executed
        COMPENSATED = "compensated"
        COMPENSATION_UNKNOWN = "compensation_unknown"
        WITHDRAWN = "withdrawn"  # still planned when the run ended or the ask was rejected

    id = models.BigAutoField(primary_key=True)
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="effects", db_index=False)
    key = models.CharField(max_length=200)
    state = models.CharField(max_length=20, choices=State)
    system = models.CharField(max_length=100)
    action = models.CharField(max_length=100)
    resource = models.CharField(max_length=500, null=True)
    arguments = models.JSONField(null=True)
    arguments_digest = models.CharField(max_length=200, null=True)
    fingerprint = models.CharField(max_length=64)
    first_fingerprint = models.CharField(max_length=64)
    impact = models.CharField(max_length=20)
    reversible = models.BooleanField(null=True)
    amount = models.JSONField(null=True)
    compensation = models.JSONField(null=True)
    gates = models.JSONField(default=list)
    gated = models.BooleanField(default=False)
    approvals = models.JSONField(default=dict)
    repeat = models.BooleanField(default=False)
    retry_safe = models.BooleanField(default=False)
    lookup = models.BooleanField(default=False)
    implicit = models.BooleanField(default=False)
    title = models.TextField(blank=True)
    attempt = models.PositiveIntegerField(default=0)
    started_epoch = models.PositiveBigIntegerField(default=0)
    receipt = models.JSONField(null=True)
    error = models.JSONField(null=True)
    late = models.BooleanField(default=False)
    undo_attempt = models.PositiveIntegerField(default=0)
    undo_failures = models.PositiveIntegerField(default=0)
    undo_receipt = models.JSONField(null=True)
    reconciled = models.JSONField(null=True)
    conflict = models.BooleanField(default=False)
    signed_off = models.JSONField(null=True)
    repeated = models.PositiveIntegerField(default=0)
    evidence = models.JSONField(null=True)
    planned_seq = models.PositiveBigIntegerField(default=0)
    executed_seq = models.PositiveBigIntegerField(default=0)
    planned_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    executed_at = models.DateTimeField(null=True)
    updated_at = models.DateTimeField()
    sealed = models.TextField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "key"], name="effect_once")]
        indexes = [
            # planning: another key with the same fingerprint in the same run, as it is or as it was first planned
            models.Index(fields=["run", "fingerprint"], name="effect_twin"),
            models.Index(fields=["run", "first_fingerprint"], name="effect_first_twin"),
            # the append path: what needs attention
            models.Index(fields=["run"], condition=Q(state__in=list(ATTENTION)), name="effect_attention"),
            # the inbox's scope "unknown outcome"
            models.Index(
                fields=["updated_at"], condition=Q(state__in=["unknown", "compensation_unknown"]), name="effect_unknown"
            ),
            # runs by the outside system or resource they touched
            models.Index(fields=["system", "resource"], name="effect_outside"),
            models.Index(fields=["resource"], condition=Q(resource__isnull=False), name="effect_resource"),
        ]

    def __str__(self) -> str:
        return f"{self.key} of {self.run_id}"


class Decision(models.Model):
    """A person's structured answer. Votes below a quorum are decisions that close nothing (`closes` false)."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="decisions", db_index=False)
    seq = models.PositiveBigIntegerField()
    kind = models.CharField(max_length=12)
    wait_id = models.UUIDField(null=True)
    wait_name = models.CharField(max_length=100, null=True)
    wait_version = models.PositiveIntegerField(null=True)
    effect_key = models.CharField(max_length=200, null=True)
    choice = models.CharField(max_length=30, null=True)
    closes = models.BooleanField(default=True)
    arguments = models.JSONField(null=True)
    response = models.JSONField(null=True)
    conditions = models.JSONField(default=list)
    expires_at = models.DateTimeField(null=True)
    reason = models.TextField(blank=True)
    comment = models.TextField(blank=True)
    decided_by = models.CharField(max_length=200)
    decided_by_name = models.CharField(max_length=200)
    decided_at = models.DateTimeField()
    seen = models.JSONField(null=True)
    detail = models.JSONField(null=True)
    sealed = models.TextField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["wait_id"], condition=Q(kind="wait", closes=True), name="wait_closed_by_one_decision"
            )
        ]
        indexes = [
            models.Index(fields=["run", "seq"], name="decision_of_run"),
            models.Index(fields=["decided_by", "-decided_at"], name="decision_by_person"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.choice} by {self.decided_by}"


class ExternalRef(models.Model):
    """A resource in another system that a run is about."""

    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="external_refs", db_index=False)
    system = models.CharField(max_length=100)
    type = models.CharField(max_length=100, null=True)
    ref_id = models.CharField(max_length=500)
    url = models.TextField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "system", "type", "ref_id"], nulls_distinct=False, name="external_ref_once"
            )
        ]
        indexes = [
            models.Index(fields=["system", "ref_id"], name="external_ref_outside"),
            models.Index(fields=["ref_id"], name="external_ref_id"),
        ]

    def __str__(self) -> str:
        return f"{self.system} {self.ref_id}"


class Timer(models.Model):
    """Something that becomes due by itself. A row fires once: `fired_at` is set in the transaction of what it did."""

    class Kind(models.TextChoices):
        DEADLINE = "deadline"
        REMINDER = "reminder"
        ESCALATION = "escalation"
        RETRY = "retry"
        EXPIRY = "expiry"  # of an approval that nobody used

    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="timers")
    kind = models.CharField(max_length=12, choices=Kind)
    subject = models.CharField(max_length=200, default="")  # a wait's id or an effect's key
    due_at = models.DateTimeField()
    fired_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["run", "kind", "subject"], condition=Q(fired_at__isnull=True), name="timer_pending_once"
            ),
            models.CheckConstraint(
                name="timer_never_early", condition=Q(fired_at__isnull=True) | Q(fired_at__gte=F("due_at"))
            ),
        ]
        indexes = [
            # the tick: what is due
            models.Index(fields=["due_at"], condition=Q(fired_at__isnull=True), name="timer_due"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.due_at:%Y-%m-%d %H:%M}"


class Trouble(models.Model):
    """A run to which what is due could not be applied. Tries are counted before they are made: whoever dies of one
    counts, too. At its limit the run is set aside, which holds up nobody and is told once (see sweep.py).
    """

    run = models.OneToOneField(Run, primary_key=True, on_delete=models.PROTECT, related_name="trouble")
    tries = models.PositiveSmallIntegerField()
    since = models.DateTimeField()
    tried_at = models.DateTimeField()
    retry_at = models.DateTimeField(null=True)  # null: it was set aside, and waits for an operator
    error = models.TextField(blank=True)
    set_aside_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="trouble_is_tried_or_set_aside",
                condition=Q(retry_at__isnull=False, set_aside_at__isnull=True)
                | Q(retry_at__isnull=True, set_aside_at__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return f"{self.run_id} {self.tries}"


class Signal(models.Model):
    """What came from outside, stored before it is matched (rule 7)."""

    class State(models.TextChoices):
        RECEIVED = "received"  # stored; matching has not finished
        BUFFERED = "buffered"  # no wait fits yet
        MATCHED = "matched"
        SUPERSEDED = "superseded"  # older than what was known
        LATE = "late"  # fits only waits that are closed
        AMBIGUOUS = "ambiguous"  # fits several; a person assigns it

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    workspace = models.ForeignKey(Workspace, on_delete=models.PROTECT, related_name="signals")
    sender = models.CharField(max_length=200)
    sender_id = models.CharField(max_length=200)
    name = models.CharField(max_length=100)
    flows = ArrayField(models.CharField(max_length=100), default=list)  # what the sender's key reaches
    run = models.ForeignKey(Run, null=True, on_delete=models.PROTECT, related_name="signals")
    flow = models.CharField(max_length=100, null=True)
    external_id = models.CharField(max_length=300, null=True)
    correlation = models.CharField(max_length=500, null=True)
    payload = models.JSONField(null=True)
    occurred_at = models.DateTimeField(null=True)
    sequence = models.PositiveBigIntegerField(null=True)
    state = models.CharField(max_length=12, choices=State)
    wait_id = models.UUIDField(null=True)
    candidates = models.JSONField(default=list)
    received_at = models.DateTimeField()
    sealed = models.TextField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["workspace", "sender", "sender_id"], name="signal_once"),
        ]
        indexes = [
            # a wait opens: what came before it
            models.Index(
                fields=["workspace", "name"], condition=Q(state__in=["buffered", "received"]), name="signal_buffered"
            ),
            models.Index(fields=["workspace", "-received_at"], name="signal_newest"),
            models.Index(fields=["workspace", "sender", "name"], name="signal_of_sender"),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.sender_id}"


class Endpoint(models.Model):
    """Where a flow's deliveries go (its newest policy's `deliver_to`), with what they are signed, and how it does."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    workspace = models.ForeignKey(Workspace, on_delete=models.PROTECT, related_name="endpoints")
    flow = models.CharField(max_length=100)
    url = models.TextField(null=True)  # null: the flow names none any more
    secret = models.TextField()  # encrypted
    previous_secret = models.TextField(null=True)  # encrypted; signs beside the new one until `previous_until`
    previous_until = models.DateTimeField(null=True)
    switched_off_at = models.DateTimeField(null=True)
    switched_off_why = models.CharField(max_length=200, null=True)
    failures = models.PositiveIntegerField(default=0)  # attempts in a row that failed
    last_seconds = models.FloatField(null=True)  # what its last attempt took: a slow one gets fewer at once
    quiet_until = models.DateTimeField(null=True)  # nothing is sent before: it asked for that, or it keeps failing
    answered_at = models.DateTimeField(null=True)  # when it took a delivery last
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["workspace", "flow"], name="endpoint_once")]

    def __str__(self) -> str:
        return f"{self.flow} → {self.url}"


class Delivery(models.Model):
    """One transition of a run that its flow's receiver is to hear of; written in the transition's own transaction.

    Its id is the `webhook-id`, the same at every attempt. What is pending while its receiver is switched off is shown
    as set aside.
    """

    class Type(models.TextChoices):
        READY = "run.ready"
        COMPENSATING = "run.compensating"
        REVIEW = "run.review"
        ENDED = "run.ended"
        WAIT_OPENED = "wait.opened"

    class Status(models.TextChoices):
        PENDING = "pending"  # to be sent at `next_at`; also from given_up and delivered, when somebody sends it again
        DELIVERED = "delivered"  # the receiver answered 2xx
        GIVEN_UP = "given_up"  # from pending: three days of attempts failed
        WITHDRAWN = "withdrawn"  # from pending: the flow names no receiver any more

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    # Each has an index below that begins with it.
    endpoint = models.ForeignKey(Endpoint, on_delete=models.PROTECT, related_name="deliveries", db_index=False)
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="deliveries", db_index=False)
    type = models.CharField(max_length=20, choices=Type)
    subject = models.CharField(max_length=200, default="")  # the key of the wait that was opened
    run_status = models.CharField(max_length=20)
    run_version = models.PositiveBigIntegerField()
    at = models.DateTimeField()  # of the transition
    status = models.CharField(max_length=12, choices=Status)
    attempts = models.PositiveIntegerField(default=0)  # counted before each is made
    since = models.DateTimeField()  # its three days count from here
    next_at = models.DateTimeField()  # while an attempt is made: when its sender is taken for dead
    sending = models.BooleanField(default=False)
    last_status = models.PositiveSmallIntegerField(null=True)
    last_error = models.CharField(max_length=30, null=True)
    closed_at = models.DateTimeField(null=True)  # delivered, given up or withdrawn

    class Meta:
        constraints = [
            # one a transition; also the deliveries of a run
            models.UniqueConstraint(fields=["run", "run_version", "type", "subject"], name="delivery_once"),
            models.CheckConstraint(
                name="delivery_closes_whole",
                condition=Q(status="pending", closed_at__isnull=True)
                | (~Q(status="pending") & Q(closed_at__isnull=False, sending=False)),
            ),
        ]
        indexes = [
            # the sender: what is due, receiver by receiver
            models.Index(fields=["endpoint", "next_at"], condition=Q(status="pending"), name="delivery_due"),
            # the sender: how many attempts a receiver is getting right now
            models.Index(fields=["endpoint"], condition=Q(sending=True), name="delivery_sending"),
            # the list, newest first
            models.Index(fields=["endpoint", "-at", "-id"], name="delivery_newest"),
            # the list and the alarm: the few that were not taken, among the many that were
            models.Index(
                fields=["endpoint", "-at", "-id"],
                condition=Q(status__in=["given_up", "withdrawn"]),
                name="delivery_not_taken",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.type} {self.run_id}"


class DeliveryAttempt(models.Model):
    """One try to hand a delivery over. Written before it is made: without an outcome, its sender died over it."""

    delivery = models.ForeignKey(Delivery, on_delete=models.PROTECT, related_name="tries", db_index=False)
    number = models.PositiveIntegerField()
    url = models.TextField()
    started_at = models.DateTimeField()
    seconds = models.FloatField(null=True)
    status = models.PositiveSmallIntegerField(null=True)
    error = models.CharField(max_length=30, null=True)
    detail = models.TextField(null=True)
    answer = models.TextField(null=True)  # its beginning

    class Meta:
        constraints = [models.UniqueConstraint(fields=["delivery", "number"], name="delivery_attempt_once")]

    def __str__(self) -> str:
        return f"{self.delivery_id} {self.number}"


class IdempotencyRecord(models.Model):
    """The first answer to a request with an Idempotency-Key, kept seven days and given again."""

    caller = models.CharField(max_length=220)
    path = models.CharField(max_length=300)
    key = models.CharField(max_length=255)
    request_digest = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(null=True)
    content_type = models.CharField(max_length=100, default="application/json")
    body = models.BinaryField(null=True)
    run_id = models.UUIDField(null=True)
    epoch = models.PositiveBigIntegerField(null=True)  # of a lease or start that the answer grants
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["caller", "path", "key"], name="idempotency_once")]
        indexes = [models.Index(fields=["created_at"], name="idempotency_age")]

    def __str__(self) -> str:
        return f"{self.path} {self.key}"


class AdminEvent(models.Model):
    """What administrators and set-up did, and refused attempts that belong to no run. Append-only, as the ledger is."""

    id = models.BigAutoField(primary_key=True)
    workspace = models.ForeignKey(Workspace, null=True, on_delete=models.PROTECT, related_name="+")
    at = models.DateTimeField(db_default=Now())
    actor_kind = models.CharField(max_length=10)
    actor_id = models.CharField(max_length=200)
    act = models.CharField(max_length=100)
    subject = models.CharField(max_length=300, blank=True)
    outcome = models.CharField(max_length=20, default="done")
    channel = models.CharField(max_length=20, default="command")
    detail = models.JSONField(default=dict)

    class Meta:
        indexes = [models.Index(fields=["workspace", "-id"], name="admin_event_history")]

    def __str__(self) -> str:
        return f"{self.act} {self.subject}"


class Heartbeat(models.Model):
    """When a part of the system last showed that it works: each tick writes its row;

    `/readyz` and the supervisor read it.
    """

    name = models.CharField(max_length=100, primary_key=True)
    at = models.DateTimeField()
    count = models.PositiveBigIntegerField(default=0)
    detail = models.JSONField(default=dict)

    def __str__(self) -> str:
        return self.name


class DrillResult(models.Model):
    """How one drill went, as `manage.py drill` found it (see demo.drills.procedures); written once, never changed."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    drill = models.CharField(max_length=50)
    passed = models.BooleanField()
    started_at = models.DateTimeField()
    version = models.CharField(max_length=50)
    body = models.JSONField()

    class Meta:
        indexes = [models.Index(fields=["drill", "-started_at"], name="drill_latest")]  # the last ones of each

    def __str__(self) -> str:
        return f"{self.drill} {self.started_at:%Y-%m-%d %H:%M}"
