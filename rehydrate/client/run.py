"""A run as its flow sees it: checkpoints, effects that never happen twice, and pauses. The loop around it is `worker`.

A flow is called from its top each time the run may go on. What it did before is not done again, because everything it
does has a name that comes out the same on each call:

- an effect's key is `<flow>/<external id>/<system.action>/<n>`, n counting the effects of that action from the top;
- a wait's key is its name, and from the second of that name on `<name>-<n>`;
- a stage that was passed is not entered again.

So a flow has to take the same way each time it is called: what it depends on is the run's input, receipts and answers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urljoin

import httpx

from rehydrate.client import errors
from rehydrate.client.lease import Lease
from rehydrate.client.retry import retry_in
from rehydrate.client.shapes import (
    Answer,
    Approval,
    Callback,
    Due,
    Effect,
    EffectCall,
    OpenWait,
    Signal,
    Timer,
    Wait,
    answer_of,
    receipt_of,
    result_of,
)

if TYPE_CHECKING:
    from rehydrate.client.ledger import Ledger

log = logging.getLogger("rehydrate.client")

Json = dict[str, Any]
Do = Callable[[EffectCall], Any]

# Raised before anything can have left this machine for the other side: the effect has not happened.
NEVER_SENT: tuple[type[BaseException], ...] = (
    errors.NotSent,
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
    ConnectionRefusedError,
    socket.gaierror,
)
# A receipt is worth a long wait: without it, what was done outside is not known to anybody.
RECEIPT_PATIENCE = 900.0


class Run:
    """One run under this process's lease."""

    def __init__(self, ledger: Ledger, envelope: Mapping[str, Any], lease: Lease, *, stop: Callable[[], bool]) -> None:
        run = envelope["run"]
        self._ledger = ledger
        self._lease = lease
        self._stop = stop
        self.id: str = run["id"]
        self.flow: str = run["flow"]
        self.external_id: str = run["external_id"]
        self.title: str = run.get("title") or ""
        self.labels: Any = run.get("labels") or {}
        self.input: Json = envelope.get("input") or run.get("input") or {}
        self.stage: str | None = run.get("stage")
        self.saved: Json = envelope.get("checkpoint") or {}  # the last checkpoint: stage, ref, digest, data, state
        self.verdict: Json = envelope["verdict"]
        self.undo_list: list[str] = list(envelope.get("undo") or [])
        passed = list(envelope.get("passed") or [])
        if self.stage in passed:  # a person may have handed it back at an earlier stage: the later ones come again
            passed = passed[: passed.index(self.stage) + 1]
        self._passed: set[str] = {*passed, *([self.stage] if self.stage and self.saved else [])}
        self._effects: dict[str, Json] = {}
        for effect in [*(run.get("effects") or []), *(envelope.get("effects") or [])]:
            self._learn(effect)
        self._waits: dict[str, Json] = {}
        self._learn_waits([*(run.get("waits") or []), *(envelope.get("waits") or [])])
        self._all_waits = lease.epoch <= 1  # nobody had the run before: there are none that the envelope leaves out
        metadata = envelope.get("metadata") or {}
        failures = metadata.get("failures") or {}
        self._failures = int(failures.get("count") or 0)
        self._failures_allowed = int(failures.get("limit") or 1_000_000)
        refs = metadata.get("external_refs") or []
        self._refs: set[tuple[str, str, str]] = {(r["system"], r.get("type") or "", r["id"]) for r in refs}
        self._counts: Counter[str] = Counter()
        self._keys: dict[object, str] = {}

    # --- where the run is ----------------------------------------------------

    def checkpoint(
        self,
        stage: str,
        *,
        ref: str | None = None,
        digest: str | None = None,
        data: Any = None,
        state: Any = None,
        next: Sequence[str] | None = None,
    ) -> None:
        """The run can go on from here. A stage that was passed before is passed over: a replay never moves back."""
        if stage in self._passed:
            self.check()
            return
        event: Json = {"type": "checkpoint", "stage": stage}
        for name, value in (("ref", ref), ("digest", digest), ("data", data), ("state", state), ("next", next)):
            if value is not None:
                event[name] = value
        self._append([event])
        self._passed.add(stage)
        self.stage = stage

    def note(self, text: str) -> None:
        """A sentence for the people who look at the run. Written each time it is reached, replays included."""
        self._append([{"type": "note", "text": text}])

    def external_ref(self, system: str, type: str, id: str, *, url: str | None = None) -> None:
        """Something outside that belongs to this run; its page links to it."""
        if (system, type, id) in self._refs:
            return
        event: Json = {"type": "external_ref", "system": system, "ref_type": type, "id": id}
        if url is not None:
            event["url"] = url
        self._append([event])
        self._refs.add((system, type, id))

    def check(self) -> None:
        """Raise when this process may not, or should not, go on: for long work between two calls."""
        self._lease.check()
        if self._stop():
            raise errors.Stopping

    # --- effects ----------------------------------------------------

    def effect(
        self,
        what: Effect | str,
        arguments: Mapping[str, Any] | None = None,
        *,
        do: Do,
        lookup: Do | None = None,
        **fields: Any,
    ) -> Json:
        """Do something outside, once for the whole life of the run, and give back its receipt, now and on each replay.

        `do(e)` gets `e.key` (hand it to the outside as the idempotency key) and `e.arguments` (as approved or edited),
        and returns a dict with an `id`, an id, or a `Receipt`. When it raises `NotSent` or `Refused`, or could not
        connect, the effect has failed and the run is tried again later. Anything else may have reached the outside:
        the outcome is unknown, and the run stops until it is known. `lookup(e)` finds out: what `do` would have
        returned, or None. Other fields are those of `Effect`.
        """
        effect = what if isinstance(what, Effect) else Effect(what, arguments or {}, **fields)
        key = self._effect_key(effect)
        known = self._effects.get(key)
        if known is not None and known["state"] == "executed":
            self.check()
            return result_of(known.get("receipt"))
        if known is not None and known["state"] == "unknown" and lookup is not None:
            found = self._look_up(effect, key, known, lookup)
            if found is not None:
                return found
        self._append([effect.planned(key, start=True, arguments=self._edited(key))])
        known = self._effects[key]
        if not known.get("granted"):
            if known["state"] == "executed":
                return result_of(known.get("receipt"))
            if known["state"] in ("unknown", "started"):
                raise errors.EffectOutcomeUnknown(key)
            raise errors.EffectNotGranted(key, known["state"])
        return self._do(key, self._call_for(effect, key, known), do)

    def _do(self, key: str, call: EffectCall, do: Do) -> Json:
        try:
            result = do(call)
        except NEVER_SENT as error:
            self._record({"type": "effect.failed", "key": key, "error": error_of(error)})
            raise errors.EffectFailed(key, str(error)) from error
        except BaseException as error:
            self._record({"type": "effect.unknown", "key": key, "error": error_of(error)})
            if isinstance(error, Exception):
                raise errors.EffectOutcomeUnknown(key, f"{type(error).__name__}: {error}") from error
            raise
        receipt = receipt_of(result, key)
        self._record({"type": "effect.executed", "key": key, "receipt": receipt})
        return result_of(receipt)

    def _look_up(self, effect: Effect, key: str, known: Json, lookup: Do) -> Json | None:
        """Find out what became of an effect; None when it did not happen, so that it may be started."""
        self.check()
        found = lookup(self._call_for(effect, key, known))
        if found is not None:
            receipt = receipt_of(found, key)
            self._record({"type": "effect.executed", "key": key, "receipt": receipt})
            return result_of(receipt)
        evidence = f"{effect.action} was looked up by its key at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: not there."
        self._record({"type": "effect.not_executed", "key": key, "evidence": evidence})
        return None

    def _call_for(self, effect: Effect, key: str, known: Json) -> EffectCall:
        arguments = known.get("arguments")
        return EffectCall(
            key=key,
            action=effect.action,
            arguments=dict(effect.arguments if arguments is None else arguments),
            resource=effect.resource,
            amount=known.get("amount"),
            attempt=int(known.get("attempt") or 1),
            receipt=known.get("receipt"),
            run_id=self.id,
            external_id=self.external_id,
        )

    def _effect_key(self, effect: Effect) -> str:
        if effect.key is not None:
            return effect.key
        if effect.identity not in self._keys:
            self._keys[effect.identity] = f"{self.flow}/{self.external_id}/{self._nth(effect.action)}"
        return self._keys[effect.identity]

    def _nth(self, name: str) -> str:
        self._counts[name] += 1
        return f"{name}/{self._counts[name]}"

    def _edited(self, key: str) -> Json | None:
        """The arguments to run when a person edited them; None when the flow's own stand."""
        effect = self._effects.get(key)
        if effect is None or effect.get("arguments") is None:
            return None
        edited = (effect.get("approval") or {}).get("choice") == "edit"
        for wait in self._waits.values():
            asked = ((wait.get("ask") or {}).get("effect") or {}).get("key")
            edited = edited or (asked == key and (wait.get("decision") or {}).get("arguments") is not None)
        return dict(effect["arguments"]) if edited else None

    # --- pauses ----------------------------------------------------

    def ask(self, name: str, summary: str, *, effect: Effect | None = None, due: Due = "3d", **fields: Any) -> Answer:
        """Ask people, and pause until they have answered; the answer is the same on each replay. Fields: `Approval`."""
        return self.wait_for(Approval(name, due, summary=summary, effect=effect, **fields))

    def timer(self, name: str, due: Due, **fields: Any) -> Answer:
        """Pause until then."""
        return self.wait_for(Timer(name, due, **fields))

    def callback(self, name: str, *, due: Due = "3d", **fields: Any) -> Answer:
        """Pause until somebody calls the wait's URL. To hand the URL out first, `open` the wait and `wait_for` that."""
        return self.wait_for(Callback(name, due, **fields))

    def signal(self, name: str, *, due: Due = "3d", **fields: Any) -> Answer:
        """Pause until a signal of this name comes."""
        return self.wait_for(Signal(name, due, **fields))

    def open(self, wait: Wait) -> OpenWait:
        """Open a wait and go on: its URL can be handed out before the run pauses for it."""
        key = self._wait_key(wait)
        known = self._wait(key)
        if known is None:
            self._learn_waits(self._append([{"type": "wait.opened", "wait": wait.body(key)}]).get("waits") or [])
            known = self._waits[key]
        url = known.get("callback_url")
        return OpenWait(wait, key, known["id"], urljoin(self._ledger.url + "/", url) if url else None)

    def wait_for(self, wait: Wait | OpenWait) -> Answer:
        """Pause for one wait, and give its answer."""
        return self.pause(wait)[0]

    def pause(self, *waits: Wait | OpenWait, resume_when: str = "all") -> list[Answer]:
        """Pause until all (or with `"any"` the first) of these are answered; their answers, in the order given."""
        keys = self._keys_of_pause(waits, first_counts=resume_when == "any")
        if self._resolved(keys, first_counts=resume_when == "any"):
            self.check()
            return [self._answer(wait, key) for wait, key in zip(waits, keys, strict=True)]
        self._pause(waits, keys, resume_when)

    def each(self, *waits: Wait | OpenWait) -> Iterator[Answer]:
        """The answers as they come: the flow is called again at each, gets all so far, and pauses for the rest."""
        left: list[tuple[Wait | OpenWait, str]] = []
        for wait, key in zip(waits, self._keys_of_pause(waits, first_counts=False), strict=True):
            known = self._wait(key)
            if known is not None and known["status"] != "open":
                yield answer_of(known)
            else:
                left.append((wait, key))
        if left:
            self._pause([wait for wait, _ in left], [key for _, key in left], "each")

    def _keys_of_pause(self, waits: Sequence[Wait | OpenWait], *, first_counts: bool) -> list[str]:
        """The keys of this pause's waits: anew (`.2`, `.3` ...) where a takeover or a recall withdrew them."""
        keys = [wait.key if isinstance(wait, OpenWait) else self._wait_key(wait) for wait in waits]
        if not first_counts:
            return [self._latest(key) for key in keys]
        # The losers of such a pause are superseded too, but by the answer that counts; only all of them are withdrawn.
        generation, current = 1, keys
        while all(self._withdrawn(key) for key in current):
            generation += 1
            current = [f"{key}.{generation}" for key in keys]
        return current

    def _resolved(self, keys: Sequence[str], *, first_counts: bool) -> bool:
        known = [wait for wait in map(self._wait, keys) if wait is not None]
        if first_counts and any(w["status"] in ("satisfied", "rejected") or w.get("decision") for w in known):
            return True
        return len(known) == len(keys) and all(wait["status"] != "open" for wait in known)

    def _answer(self, wait: Wait | OpenWait, key: str) -> Answer:
        known = self._wait(key)
        if known is not None:
            return answer_of(known)
        inner = wait.wait if isinstance(wait, OpenWait) else wait
        return Answer(key, inner.name, inner.kind, "superseded")  # never opened: its twin was answered before the pause

    def _pause(self, waits: Sequence[Wait | OpenWait], keys: Sequence[str], resume_when: str) -> NoReturn:
        events: list[Json] = []
        bodies: list[Json] = []
        for wait, key in zip(waits, keys, strict=True):
            inner = wait.wait if isinstance(wait, OpenWait) else wait
            if self._wait(key) is not None:
                bodies.append({"key": key})  # open already: it keeps its id, version and deadline
                continue
            body = inner.body(key)
            if isinstance(inner, Approval):
                effect_key = None
                if inner.effect is not None:
                    effect_key = self._effect_key(inner.effect)
                    if effect_key not in self._effects:
                        events.append(inner.effect.planned(effect_key, start=False))
                body["ask"] = inner.ask(effect_key)
            bodies.append(body)
        events.append({"type": "paused", "waits": bodies, "resume_when": resume_when})
        self._append(events)
        raise errors.Paused

    def _wait_key(self, wait: Wait) -> str:
        """The key of the wait that this call means, by its name and how often it came from the top."""
        if wait.key is not None:
            return wait.key
        self._counts[f"wait {wait.name}"] += 1
        count = self._counts[f"wait {wait.name}"]
        return wait.name if count == 1 else f"{wait.name}-{count}"

    def _latest(self, key: str) -> str:
        latest, generation = key, 1
        while self._withdrawn(latest):
            generation += 1
            latest = f"{key}.{generation}"
        return latest

    def _withdrawn(self, key: str) -> bool:
        """Closed without any answer, as by a takeover or a recall."""
        known = self._wait(key)
        return known is not None and known["status"] in ("superseded", "cancelled") and not known.get("decision")

    # --- undoing ----------------------------------------------------

    def compensate(self) -> None:
        """Undo what the verdict lists, newest first, with the functions registered by `@ledger.undo`."""
        for key in self.undo_list:
            known = self._effects[key]
            compensation = known.get("compensation") or {}
            action = str(compensation.get("action"))
            if "." not in action:
                action = f"{compensation.get('system')}.{action}"
            self._append([{"type": "effect.compensating", "key": key}])
            undo = self._ledger.undo_functions.get(action)
            call = EffectCall(
                key=f"{key}/undo",
                action=action,
                arguments=dict(compensation.get("arguments") or {}),
                resource=known.get("resource"),
                amount=known.get("amount"),
                receipt=known.get("receipt"),
                run_id=self.id,
                external_id=self.external_id,
            )
            try:
                if undo is None:
                    raise errors.NotSent(f"This agent has no undo function for {action}.")
                result = undo(call)
            except NEVER_SENT as error:
                self._record({"type": "effect.compensation_failed", "key": key, "error": error_of(error)})
                raise errors.EffectFailed(key, str(error)) from error
            except BaseException as error:
                self._record({"type": "effect.compensation_unknown", "key": key, "error": error_of(error)})
                if isinstance(error, Exception):
                    raise errors.EffectOutcomeUnknown(key, f"{type(error).__name__}: {error}") from error
                raise
            self._record({"type": "effect.compensated", "key": key, "receipt": receipt_of(result, call.key)})

    # --- the end, and talking to the ledger ----------------------------------------------------

    def cancel(self, reason: str) -> None:
        """Call the run off; the flow's policy says what is undone."""
        self._append([{"type": "cancelled", "reason": reason}])
        raise errors.Stopping

    def complete(self, result: Any) -> None:
        """The flow is through: what it returned is the run's result."""
        event: Json = {"type": "completed"}
        if isinstance(result, Mapping) and result and set(result) <= {"ref", "digest", "data"}:
            event["result"] = dict(result)
        elif result is not None:
            event["result"] = {"data": result}
        self._append([event])

    def fail(self, error: BaseException, *, retryable: bool) -> None:
        """The flow failed: it is tried again later, or a person looks at it now."""
        self._failures += 1
        pause = (self.retry_in() or 0) if retryable else 0
        self._append([{"type": "failed", "error": error_of(error), "retryable": retryable, "retry_in": pause}])

    def retry_in(self) -> int | None:
        """Seconds until the next try after the failures so far; None when there is none: a person looks at it now."""
        return None if self._failures >= self._failures_allowed else retry_in(self._failures)

    def repeats(self, key: str) -> bool:
        """Whether the agent itself may settle this effect's unknown outcome, by its key or by looking it up."""
        effect = self._effects.get(key) or {}
        return bool(effect.get("retry_safe") or effect.get("lookup"))

    def release(self, retry_in: int | None = None) -> None:
        """Give the lease back: the ledger's verdict says what happens now. One that is gone already is as good."""
        with contextlib.suppress(errors.LeaseLost, errors.RunEnded):
            self._ledger.release(self.id, self._lease.epoch, retry_in=retry_in)

    def _append(self, events: list[Json]) -> Json:
        self._lease.check()
        if self._stop() and events[-1]["type"] not in ("paused", "completed", "failed"):
            raise errors.Stopping
        return self._tell(events, patience=None)

    def _record(self, receipt: Json) -> None:
        """Record what became of an effect: also when the lease is lost, and for as long as it may take."""
        self._tell([receipt], patience=RECEIPT_PATIENCE)

    def _tell(self, events: list[Json], *, patience: float | None) -> Json:
        try:
            answer = self._ledger.append(self.id, self._lease.epoch, events, patience=patience)
        except (errors.LeaseLost, errors.RunEnded) as error:
            self._lease.lose(error)
            if patience is not None and error.recorded:
                return {}
            raise
        if answer.get("lease"):
            self._lease.renewed(answer["lease"])
        for effect in answer.get("effects") or []:
            self._learn(effect)
        self._failures = int((answer.get("run") or {}).get("failure_count") or self._failures)
        return answer

    def _learn_waits(self, waits: Sequence[Json]) -> None:
        for wait in waits:
            key = wait.get("key") or wait["name"]
            self._waits[key] = {**self._waits.get(key, {}), **wait, "key": key}

    def _wait(self, key: str) -> Json | None:
        """A wait of this run. The envelope has those of the latest pause; the others are fetched when first needed."""
        if key not in self._waits and not self._all_waits:
            latest = dict(self._waits)
            self._learn_waits(self._ledger.get(self.id).get("waits") or [])
            self._learn_waits(list(latest.values()))  # what the verdict was given on stays as it was
            self._all_waits = True
        return self._waits.get(key)

    def _learn(self, effect: Json) -> None:
        self._effects[effect["key"]] = {**self._effects.get(effect["key"], {}), "granted": None, **effect}


def error_of(error: BaseException) -> Json:
    """An exception as the contract's `{code, message}`."""
    code = getattr(error, "code", None)
    return {
        "code": code if isinstance(code, str) and code else type(error).__name__,
        "message": (str(error) or type(error).__name__)[:1000],
    }
