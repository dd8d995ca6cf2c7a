"""Durable Task: orchestrations whose waits are answered by people, and whose effects happen once.

contracts = Flow(ledger, "contract-approval")

@contracts.effect("esign.send")                 # runs in an activity; e.key is the idempotency key
def send(e): ...

@contracts.orchestrator                         # deterministic, as ever: it only yields
def contract(run, given):
    send = Effect("esign.send", given)
    answer = yield from run.ask("legal-approval", "Send the contract?", effect=send, due="3d")
    return (yield from run.effect(send)) if answer.approved else answer.reason

contracts.add_to(worker)

An orchestration instance is a run: its id is the run's external id. All that touches the ledger or the outside happens
in one activity, `Flow.activity`, which is safe to be delivered any number of times. Events of the task hub only wake
the orchestrator; what they carry is not looked at. `Receiver` makes such events of the ledger's deliveries, for a task
hub or, over HTTP, for Azure Durable Functions. Without it the orchestrator looks by itself now and then.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import grpc
import httpx
from durabletask import task
from durabletask.client import TaskHubGrpcClient
from durabletask.worker import TaskHubGrpcWorker
from standardwebhooks import Webhook, WebhookVerificationError

from rehydrate.client import (
    Answer,
    Approval,
    Callback,
    Effect,
    EffectCall,
    LeaseHeld,
    LeaseLost,
    Ledger,
    NotRetryable,
    NotToGoOn,
    RehydrateError,
    Run,
    RunEnded,
    Signal,
    Timer,
    Wait,
    handling,
)
from rehydrate.client.blocking import blocking
from rehydrate.client.run import Do
from rehydrate.client.shapes import Due, due_fields, seconds

Json = dict[str, Any]
T = TypeVar("T")
Steps = Generator[task.Task[Any], Any, T]
Orchestration = Callable[["DurableRun", Any], Steps[Any]]
D = TypeVar("D", bound=Do)

log = logging.getLogger("rehydrate.client")

FRAMEWORK = "durabletask"
# The event that wakes an orchestrator. It has one name: what it is about is asked of the ledger.
EVENT = "rehydrate"
KINDS: dict[str, type[Wait]] = {kind.kind: kind for kind in (Approval, Callback, Signal, Timer)}


class RunHasEnded(RehydrateError):
    """The run has ended in the ledger, so what is left of its orchestration is not done."""

    def __init__(self, status: str) -> None:
        self.status = status
        super().__init__(f"{self.message} ({status})")


class Flow:
    """A flow of the ledger whose runs are orchestrations.

    `opening` gives fields of `open` (title, requested_by, labels ...) for an instance's input. A lease lasts
    `lease_seconds` from each step to the next. An orchestrator that is not woken looks after `poll`, then after twice
    as long, up to `poll_at_most`. Change `version` when running instances could not be replayed with the new code;
    `reads` lists the versions that can.
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        *,
        version: str = "1",
        reads: Iterable[str] | None = None,
        opening: Callable[[Any], Mapping[str, Any]] | None = None,
        lease_seconds: int = 300,
        poll: str | int = "1m",
        poll_at_most: str | int = "1h",
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.opening = opening
        self.lease_seconds = lease_seconds
        self.poll, self.poll_at_most = seconds(poll), seconds(poll_at_most)
        self._card = {
            "name": ledger.name or name,
            "version": version,
            "framework": FRAMEWORK,
            "reads": list(reads or (version,)),
        }
        self._effects: dict[str, tuple[Do, Do | None]] = {}
        self._orchestrators: list[task.Orchestrator[Any, Any]] = []

    # --- what it is made of ----------------------------------------------------

    def effect(self, action: str, *, lookup: Do | None = None) -> Callable[[D], D]:
        """Register what is done for effects of this action (`system.action`); `lookup` finds out what became of one."""

        def register(do: D) -> D:
            self._effects[action] = (do, lookup)
            return do

        return register

    def undo(self, action: str) -> Callable[[Callable[[EffectCall], Any]], Callable[[EffectCall], Any]]:
        """Register how an effect is undone."""
        return self.ledger.undo(action)

    def orchestrator(self, function: Orchestration) -> task.Orchestrator[Any, Any]:
        """Make an orchestrator of a generator function of a `DurableRun` and the input.

        The run is opened before it and completed after it. Where it raises, the instance fails, and `tend` sends the
        run to a person. (A step of its own that says so would stand in the way of `rewind_orchestration`.)
        """

        @functools.wraps(function)
        def orchestrate(ctx: task.OrchestrationContext, given: Any) -> Steps[Any]:
            run = DurableRun(self, ctx, dict(self.opening(given)) if self.opening else {})
            run.id = yield from run._step("open")
            result = yield from function(run, given)
            yield from run._step("complete", result=result)
            return result

        self._orchestrators.append(orchestrate)
        return orchestrate

    def add_to(self, worker: TaskHubGrpcWorker) -> None:
        """Register the orchestrators and the activity of this flow."""
        for orchestrator in self._orchestrators:
            worker.add_orchestrator(orchestrator)

        def activity(_: task.ActivityContext, given: Json) -> Json:
            return self.activity(given)

        activity.__name__ = self.activity_name
        worker.add_activity(activity)

    @property
    def activity_name(self) -> str:
        return f"rehydrate-{self.name}"

    # --- the activity ----------------------------------------------------

    def activity(self, given: Json) -> Json:
        """One step of a run, with its calls to the ledger and the outside: safe to be delivered again.

        `{value, epoch}` when it is done; `{ended}` when the run has ended; else `{again_in}`: it may not be done now.
        """
        shared = given["epoch"] if given["step"] == "effect" else None
        for epoch in (shared, None) if shared else (None,):
            try:
                run = self._in_hand(given, epoch)
                with handling.worked_on(run):
                    return self._carry_out(run, given)
            except LeaseLost:
                continue  # it lapsed between two steps, or a person has the run
            except NotToGoOn as error:
                if error.outcome == "terminate":
                    return {"ended": ", ".join(reason["code"] for reason in error.verdict["reasons"])}
                break
            except RunEnded as error:
                return {"ended": error.run_status or "ended"}
            except (LeaseHeld, *handling.OUT_OF_REACH) as error:
                log.warning("%s/%s: %s", self.name, given["instance"], error)
                break
        return {"again_in": None}

    def _in_hand(self, given: Json, epoch: int | None) -> Run:
        """The run under the lease that its last step had, so that effects side by side share it; else under a new one.

        The instance is the holder, in whatever process its steps are done.
        """
        ledger = copy.copy(self.ledger)
        ledger.holder = f"{FRAMEWORK}/{given['instance']}"
        if epoch is None:
            opening: Any = {**given["opening"], "lease_seconds": self.lease_seconds}
            return blocking(
                handling.take(ledger, Run, self.name, given["instance"], agent=self._card, wait=0, opening=opening)
            )
        run = ledger.get(given["run"])
        envelope = {**run, "run": run, "lease": {"epoch": epoch, "seconds": self.lease_seconds}}
        return Run(ledger, envelope, handling.lease_of(ledger, envelope), stop=lambda: False)

    def _carry_out(self, run: Run, given: Json) -> Json:
        try:
            value = _STEPS[given["step"]](self, run, given)
        except BaseException as error:
            error = blocking(handling.leave(run, error))
            if not isinstance(error, (Exception, *handling.LEFT)):
                raise
            return {"again_in": None if isinstance(error, handling.LEFT) else run.retry_in()}
        return {"value": value, "epoch": None if run.left else run.epoch}

    def _open(self, run: Run, given: Json) -> str:
        run.checkpoint("begun", ref=f"{FRAMEWORK}:{given['instance']}")
        return run.id

    def _effect(self, run: Run, given: Json) -> Json:
        effect = Effect(**given["effect"])
        if effect.action not in self._effects:
            raise NotRetryable(f"This worker has no effect {effect.action}.")
        do, lookup = self._effects[effect.action]
        return run.effect(effect, do=do, lookup=lookup)

    def _pause(self, run: Run, given: Json) -> list[Json]:
        answers = run.pause(*map(_wait_of, given["waits"]), resume_when=given["resume_when"])
        return [dataclasses.asdict(answer) for answer in answers]

    def _checkpoint(self, run: Run, given: Json) -> None:
        run.checkpoint(given["stage"], **given["fields"])

    def _complete(self, run: Run, given: Json) -> None:
        run.complete(given["result"])

    # --- what the task hub forgot ----------------------------------------------------

    def tend(self, host: Host) -> list[str]:
        """Send the runs to a person whose orchestration has failed or is gone before they have ended; their ids.

        To be called now and then. So code that changed in mid-flight (the task hub says: non-determinism) is noticed.
        """
        sent = []
        for status in ("running", "ready", "waiting"):
            for run in self.ledger.runs(flow=self.name, status=status, limit=200)["results"]:
                found = host.status(run["external_id"])
                if found is not None and not found.over:
                    continue
                why = f"The orchestration is {found.state}. {found.detail}" if found else "The orchestration is gone."
                if self._give_up(run, why.strip()):
                    sent.append(run["id"])
        return sent

    def _give_up(self, run: Json, why: str) -> bool:
        ledger = copy.copy(self.ledger)
        ledger.holder = f"{FRAMEWORK}/{run['external_id']}"
        try:
            envelope = ledger.rehydrate(run["id"], agent=self._card)
            if not envelope["lease"]:
                envelope = ledger.recall(run["id"], reason=why)
            Run(ledger, envelope, handling.lease_of(ledger, envelope), stop=lambda: False).fail(
                NotRetryable(why), retryable=False
            )
        except RehydrateError as error:
            log.warning("%s/%s: %s", self.name, run["external_id"], error)
            return False
        return True


_STEPS: dict[str, Callable[[Flow, Run, Json], Any]] = {
    "open": Flow._open,
    "effect": Flow._effect,
    "pause": Flow._pause,
    "checkpoint": Flow._checkpoint,
    "complete": Flow._complete,
}


# --- in the orchestrator ----------------------------------------------------


class DurableRun:
    """A run as its orchestrator sees it. Nothing is done here: each method is a generator, used with `yield from`.

    Keys are made as in `rehydrate.client.run`, by counting from the top. So they come out the same on each replay, and
    after a restart of the instance too. Effects may run side by side; other steps come one after the other.
    """

    id: str

    def __init__(self, flow: Flow, ctx: task.OrchestrationContext, opening: Json) -> None:
        self.ctx = ctx
        self._flow = flow
        self._opening = opening
        self._epoch: int | None = None
        self._counts: Counter[str] = Counter()
        self._keys: dict[object, str] = {}

    def effect(self, what: Effect | str, arguments: Mapping[str, Any] | None = None, **fields: Any) -> Steps[Json]:
        """Have something done outside, once; its receipt."""
        effect = what if isinstance(what, Effect) else Effect(what, arguments or {}, **fields)
        return self._step("effect", effect=self._given(effect))

    def effects(self, *effects: Effect) -> Steps[list[Json]]:
        """Have several things done outside, side by side; their receipts, in the order given."""
        given = [self._given(effect) for effect in effects]
        answers: list[Json] = yield task.when_all([self._call("effect", effect=each) for each in given])
        receipts: list[Json] = []
        for each, answer in zip(given, answers, strict=True):
            receipts.append(answer["value"] if "value" in answer else (yield from self._step("effect", effect=each)))
        return receipts

    def checkpoint(self, stage: str, **fields: Any) -> Steps[None]:
        """The run has come this far. Fields: `ref`, `digest`, `data`."""
        fields.setdefault("ref", f"{FRAMEWORK}:{self.ctx.instance_id}")
        return self._step("checkpoint", stage=stage, fields=fields)

    def ask(
        self, name: str, summary: str, *, effect: Effect | None = None, due: Due = "3d", **fields: Any
    ) -> Steps[Answer]:
        """Ask people, and wait for the answer. Fields: those of `Approval`."""
        return self.wait_for(Approval(name, due, summary=summary, effect=effect, **fields))

    def wait_for(self, wait: Wait) -> Steps[Answer]:
        """Wait for a timer, a callback, a signal or an approval; its answer."""
        return (yield from self.pause(wait))[0]

    def pause(self, *waits: Wait, resume_when: str = "all") -> Steps[list[Answer]]:
        """Wait until all (or with `"any"` the first) of these are answered; their answers, in the order given."""
        given = [self._given_wait(wait) for wait in waits]
        first_due = min(self._deadline(wait) for wait in waits)
        answers = yield from self._step("pause", deadline=first_due, waits=given, resume_when=resume_when)
        return [Answer(**answer) for answer in answers]

    # --- how a step gets done ----------------------------------------------------

    def _call(self, step: str, **given: Any) -> task.Task[Json]:
        known = {"instance": self.ctx.instance_id, "run": getattr(self, "id", None), "epoch": self._epoch}
        given = {**known, "opening": self._opening, "step": step, **given}
        return self.ctx.call_activity(self._flow.activity_name, input=given)

    def _step(self, step: str, deadline: datetime | None = None, **given: Any) -> Steps[Any]:
        """Have a step done, as soon as the ledger lets it be done."""
        delay = self._flow.poll
        while True:
            answer = yield self._call(step, **given)
            self._epoch = answer.get("epoch")
            if "value" in answer:
                return answer["value"]
            if "ended" in answer:
                raise RunHasEnded(answer["ended"])
            yield from self._sleep(answer["again_in"] or min(delay, self._until(deadline)))
            delay = min(2 * delay, self._flow.poll_at_most)

    def _sleep(self, delay: int) -> Steps[None]:
        """Until somebody wakes the orchestrator, or until then."""
        woken = self.ctx.wait_for_external_event(EVENT)
        due = self.ctx.create_timer(timedelta(seconds=delay))
        first = yield task.when_any([woken, due])
        (due if first is woken else woken).cancel()  # a waiter that nobody awaits would take the next event

    def _until(self, deadline: datetime | None) -> int:
        """Whole seconds until the deadline has passed."""
        if deadline is None:
            return self._flow.poll_at_most
        left = (deadline - self.ctx.current_utc_datetime).total_seconds()
        return int(left) + 1 if left > 0 else self._flow.poll_at_most

    # --- what the activity is given ----------------------------------------------------

    def _given(self, effect: Effect) -> Json:
        given = {f.name: getattr(effect, f.name) for f in dataclasses.fields(effect) if f.name != "identity"}
        return {**given, "arguments": dict(effect.arguments), "key": self._effect_key(effect)}

    def _effect_key(self, effect: Effect) -> str:
        if effect.key is not None:
            return effect.key
        if effect.identity not in self._keys:
            nth = self._nth(effect.action)
            self._keys[effect.identity] = f"{self._flow.name}/{self.ctx.instance_id}/{effect.action}/{nth}"
        return self._keys[effect.identity]

    def _given_wait(self, wait: Wait) -> Json:
        given = {f.name: getattr(wait, f.name) for f in dataclasses.fields(wait)}
        if wait.key is None:
            nth = self._nth(f"wait {wait.name}")
            given["key"] = wait.name if nth == 1 else f"{wait.name}-{nth}"
        if isinstance(wait, Approval) and wait.effect is not None:
            given["effect"] = self._given(wait.effect)
        return {**given, "kind": wait.kind, "due": due_fields(wait.due)}

    def _deadline(self, wait: Wait) -> datetime:
        """By the task hub's clock, which has no offset: only a guess of when to look."""
        if isinstance(wait.due, datetime):
            return wait.due.astimezone(UTC).replace(tzinfo=None)
        return self.ctx.current_utc_datetime + timedelta(seconds=seconds(wait.due))

    def _nth(self, name: str) -> int:
        self._counts[name] += 1
        return self._counts[name]


def _wait_of(given: Json) -> Wait:
    """The wait as the orchestrator meant it, from what JSON made of it."""
    fields = {name: value for name, value in given.items() if name != "kind"}
    due = fields["due"]
    fields["due"] = datetime.fromisoformat(due["due_at"]) if "due_at" in due else due["due_in"]
    if fields.get("effect") is not None:
        fields["effect"] = Effect(**fields["effect"])
    return KINDS[given["kind"]](**fields)


# --- who wakes the orchestrators ----------------------------------------------------


@dataclass(frozen=True)
class Found:
    """An instance as its host has it: `running`, `pending`, `suspended`, `completed`, `failed`, `terminated` ..."""

    state: str
    detail: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("completed", "failed", "terminated", "canceled")


class Host(Protocol):
    """Where instances live. Each method raises when the host cannot be reached."""

    def raise_event(self, instance: str, name: str) -> bool:
        """Wake an instance; False when it is over or unknown."""

    def terminate(self, instance: str, reason: str) -> bool:
        """End an instance; False when it is over or unknown."""

    def status(self, instance: str) -> Found | None:
        """What became of an instance; None when it is unknown."""


class TaskHub:
    """Instances of a task hub that this process has a client of."""

    def __init__(self, client: TaskHubGrpcClient) -> None:
        self._client = client

    def raise_event(self, instance: str, name: str) -> bool:
        if not self._lives(instance):
            return False
        self._client.raise_orchestration_event(instance, name)
        return True

    def terminate(self, instance: str, reason: str) -> bool:
        if not self._lives(instance):
            return False
        self._client.terminate_orchestration(instance, output=reason)
        return True

    def status(self, instance: str) -> Found | None:
        state = self._client.get_orchestration_state(instance)
        if state is None:
            return None
        failure = state.failure_details
        return Found(state.runtime_status.name.lower(), failure.message if failure else "")

    def _lives(self, instance: str) -> bool:
        found = self.status(instance)
        return found is not None and not found.over


class AzureFunctions:
    """Instances of Azure Durable Functions, over its HTTP API.

    `url` is the function app's, `code` its system key `durabletask_extension`. Raises httpx.HTTPError when the app does
    not answer as that API says. Source: HTTP API reference of Durable Functions, version 2 and later.
    """

    def __init__(
        self,
        url: str,
        code: str,
        *,
        task_hub: str | None = None,
        connection: str | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        self._base = f"{url.rstrip('/')}/runtime/webhooks/durabletask/instances"
        given = {"code": code, "taskHub": task_hub, "connection": connection}
        self._params = {name: value for name, value in given.items() if value is not None}
        self._http = http or httpx.Client(timeout=30)

    def raise_event(self, instance: str, name: str) -> bool:
        return self._accepted(f"{_quoted(instance)}/raiseEvent/{_quoted(name)}", json={})

    def terminate(self, instance: str, reason: str) -> bool:
        return self._accepted(f"{_quoted(instance)}/terminate", reason=reason)

    def status(self, instance: str) -> Found | None:
        answer = self._http.get(f"{self._base}/{_quoted(instance)}", params=self._params)
        if answer.status_code in (404, 410):
            return None
        body = answer.raise_for_status().json()
        output = body.get("output")
        return Found(body["runtimeStatus"].lower(), output if isinstance(output, str) else json.dumps(output))

    def _accepted(self, path: str, json: Any = None, **params: str) -> bool:
        answer = self._http.post(f"{self._base}/{path}", params={**self._params, **params}, json=json)
        if answer.status_code in (404, 410):
            return False
        answer.raise_for_status()
        return True


def _quoted(name: str) -> str:
    return quote(name, safe="")


class Receiver:
    """Makes a wake-up of each delivery of the ledger. It has no port: whatever serves HTTP hands requests to it.

    A run that has been terminated ends its instance too, wherever that is, unless `terminate` is false.
    """

    def __init__(self, host: Host, secret: str, *, terminate: bool = True) -> None:
        self._host = host
        self._webhook = Webhook(secret)
        self._terminate = terminate

    def __call__(self, headers: Mapping[str, str], body: bytes) -> int:
        """The status to answer with: 204 taken, 401 not signed by the ledger, 503 to be sent again."""
        try:
            told = self._webhook.verify(body, dict(headers))
        except (WebhookVerificationError, ValueError):  # the latter for headers that are no signature at all
            return 401
        instance, status = told["data"]["external_id"], told["data"]["status"]
        try:
            if told["type"] == "run.ended" and status == "terminated" and self._terminate:
                known = self._host.terminate(instance, "The run was terminated in the ledger.")
            elif told["type"] in ("run.ready", "run.compensating", "run.ended"):
                known = self._host.raise_event(instance, EVENT)
            else:
                return 204
        except (httpx.HTTPError, grpc.RpcError) as error:
            log.warning("%s could not be woken: %s", instance, error)
            return 503
        if not known:
            log.warning("%s: no such instance is running", instance)
        return 204
