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
import inspect
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urljoin

import httpx

from rehydrate.client import errors
from rehydrate.client.blocking import blocking, blocks
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
    from rehydrate.client.ledger import LedgerCore

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
# Such an effect has its receipt. One that was undone after a no is passed over as well: the flow comes to the no.
DONE = ("executed", "compensated")
# A receipt is worth a long wait: without it, what was done outside is not known to anybody.
RECEIPT_PATIENCE = 900.0
# A batch is sent on its own when it has so many events, bytes, or seconds; a body has at most 1000 events and 1 MiB.
BATCH_EVENTS, BATCH_BYTES, BATCH_SECONDS = 200, 256 * 1024, 5.0


class RunCore:
    """One run under this process's lease: what `Run` and `AsyncRun` share, each public method as a step `_name`."""

    in_loop = False

    def __init__(
        self, ledger: LedgerCore, envelope: Mapping[str, Any], lease: Lease, *, stop: Callable[[], bool]
    ) -> None:
        run = envelope["run"]
        self._ledger = ledger
        self._lease = lease
        self._stop = stop
        self.id: str = run["id"]
        self.flow: str = run["flow"]
        self.external_id: str = run["external_id"]
        self.name = f"{self.flow}/{self.external_id}"
        self.title: str = run.get("title") or ""
        self.labels: Any = run.get("labels") or {}
        self.trace_id: str | None = run.get("trace_id")
        self.envelope: Json = dict(envelope)  # as the ledger gave it (contract section 6, Rehydrate)
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
        self.last_error: Json = failures.get("last_error") or {}  # {code, message} of the last failure, if any
        self._failures = int(failures.get("count") or 0)
        self._failures_allowed = int(failures.get("limit") or 1_000_000)
        refs = metadata.get("external_refs") or []
        self._refs: set[tuple[str, str, str]] = {(r["system"], r.get("type") or "", r["id"]) for r in refs}
        self._counts: Counter[str] = Counter()
        self._keys: dict[object, str] = {}
        self._batches = 0
        self._held: list[Json] = []
        self._held_bytes, self._held_since = 0, 0.0
        self.left = False  # the lease was given up: paused, completed, failed or released

    # --- where the run is ----------------------------------------------------

    async def _checkpoint(
        self,
        stage: str,
        *,
        ref: str | None = None,
        digest: str | None = None,
        data: Any = None,
        state: Any = None,
        next: Sequence[str] | None = None,
        again: bool = False,
    ) -> None:
        """The run can go on from here. A stage that was passed before is passed over: a replay never moves back.

        `again` is for a framework that goes on from a state of its own and may come to a stage several times: then only
        the same `ref` as before is passed over.
        """
        moved = again and ref != self.saved.get("ref")
        if stage in self._passed and not moved:
            self.check()
            return
        event: Json = {"type": "checkpoint", "stage": stage}
        for name, value in (("ref", ref), ("digest", digest), ("data", data), ("state", state), ("next", next)):
            if value is not None:
                event[name] = value
        await self._tell_or_hold(event)
        self._passed.add(stage)
        self.stage, self.saved = stage, event

    async def _note(self, text: str) -> None:
        """A sentence for the people who look at the run. Written each time it is reached, replays included."""
        await self._tell_or_hold({"type": "note", "text": text})

    async def _external_ref(self, system: str, type: str, id: str, *, url: str | None = None) -> None:
        """Something outside that belongs to this run; its page links to it."""
        if (system, type, id) in self._refs:
            return
        event: Json = {"type": "external_ref", "system": system, "ref_type": type, "id": id}
        if url is not None:
            event["url"] = url
        await self._tell_or_hold(event)
        self._refs.add((system, type, id))

    def check(self) -> None:
        """Raise when this process may not, or should not, go on: for long work between two calls."""
        self._lease.check()
        if self._stop():
            raise errors.Stopping

    async def _tell_or_hold(self, event: Json) -> None:
        """Tell the ledger now; in a batch, together with others."""
        if not self._batches:
            await self._append([event])
            return
        self.check()
        self._held_since = self._held_since if self._held else time.monotonic()
        self._held.append(event)
        self._held_bytes += len(json.dumps(event))
        old = time.monotonic() - self._held_since > BATCH_SECONDS
        if old or len(self._held) >= BATCH_EVENTS or self._held_bytes >= BATCH_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        """Tell the ledger what a batch holds."""
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            await self._tell(held, patience=None)

    # --- effects ----------------------------------------------------

    async def _effect(
        self,
        /,
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
        if known is not None and known["state"] in DONE:
            self.check()
            return result_of(known.get("receipt"))
        if known is not None and known["state"] == "unknown" and lookup is not None:
            found = await self._look_up(effect, key, known, lookup)
            if found is not None:
                return found
        try:
            await self._append([effect.planned(key, start=True, arguments=self._edited(key))])
        except BaseException as error:
            if (self._effects.get(key) or {}).get("granted"):  # cancelled while it was being granted: it did not begin
                await self._record({"type": "effect.failed", "key": key, "error": error_of(error)})
            raise
        known = self._effects[key]
        if not known.get("granted"):
            if known["state"] in DONE:
                return result_of(known.get("receipt"))
            if known["state"] in ("unknown", "started"):
                raise errors.EffectOutcomeUnknown(key)
            raise errors.EffectNotGranted(key, known["state"])
        return await self._do(key, self._call_for(effect, key, known), do)

    @property
    def epoch(self) -> int:
        """The lease's epoch."""
        return self._lease.epoch

    def known_effect(self, key: str) -> Json | None:
        """An effect of this run as the ledger last told of it; None when it was never planned."""
        return self._effects.get(key)

    async def _do(self, key: str, call: EffectCall, do: Do) -> Json:
        try:
            result = await self._called(do, call)
        except NEVER_SENT as error:
            await self._record({"type": "effect.failed", "key": key, "error": error_of(error)})
            raise errors.EffectFailed(key, str(error)) from error
        except BaseException as error:
            await self._record({"type": "effect.unknown", "key": key, "error": error_of(error)})
            if isinstance(error, Exception):
                raise errors.EffectOutcomeUnknown(key, f"{type(error).__name__}: {error}") from error
            raise
        receipt = receipt_of(result, key)
        await self._record({"type": "effect.executed", "key": key, "receipt": receipt})
        return result_of(receipt)

    def approved(self) -> list[str]:
        """The keys of the latest pause's effects that may run and were never started."""
        return [
            key
            for wait in self._waits.values()
            if (key := ((wait.get("ask") or {}).get("effect") or {}).get("key")) is not None
            and answer_of(wait).authorised
            and self._effects.get(key, {}).get("state") == "planned"
        ]

    async def _done(self, key: str, result: Any) -> None:
        """Record that a planned effect was done by other hands than a `do` function, as by a framework by itself."""
        await self._record({"type": "effect.executed", "key": key, "receipt": receipt_of(result, key)})

    async def _unsure(self, key: str, why: str) -> None:
        """Record that a planned effect may have been done by other hands, and that nobody knows."""
        await self._record({"type": "effect.unknown", "key": key, "error": {"code": "unsure", "message": why[:1000]}})

    async def _called(self, function: Do, call: EffectCall) -> Any:
        """What a `do`, look-up or undo function returned, async or not."""
        result = function(call)
        if not inspect.isawaitable(result):
            return result
        if not self.in_loop:
            if inspect.iscoroutine(result):
                result.close()  # it has not begun
            raise errors.NotSent(f"{call.action} has an async function: those belong to AsyncLedger, not to Ledger.")
        return await result

    async def _look_up(self, effect: Effect, key: str, known: Json, lookup: Do) -> Json | None:
        """Find out what became of an effect; None when it did not happen, so that it may be started."""
        self.check()
        found = await self._called(lookup, self._call_for(effect, key, known))
        if found is not None:
            receipt = receipt_of(found, key)
            await self._record({"type": "effect.executed", "key": key, "receipt": receipt})
            return result_of(receipt)
        evidence = f"{effect.action} was looked up by its key at {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: not there."
        await self._record({"type": "effect.not_executed", "key": key, "evidence": evidence})
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

    async def _ask(
        self, /, name: str, summary: str, *, effect: Effect | None = None, due: Due = "3d", **fields: Any
    ) -> Answer:
        """Ask people, and pause until they have answered; the answer is the same on each replay. Fields: `Approval`."""
        return await self._wait_for(Approval(name, due, summary=summary, effect=effect, **fields))

    async def _timer(self, /, name: str, due: Due, **fields: Any) -> Answer:
        """Pause until then."""
        return await self._wait_for(Timer(name, due, **fields))

    async def _callback(self, /, name: str, *, due: Due = "3d", **fields: Any) -> Answer:
        """Pause until somebody calls the wait's URL. To hand the URL out first, `open` the wait and `wait_for` that."""
        return await self._wait_for(Callback(name, due, **fields))

    async def _signal(self, /, name: str, *, due: Due = "3d", **fields: Any) -> Answer:
        """Pause until a signal of this name comes."""
        return await self._wait_for(Signal(name, due, **fields))

    async def _open(self, wait: Wait) -> OpenWait:
        """Open a wait and go on: its URL can be handed out before the run pauses for it."""
        key = self._wait_key(wait)
        await self._see_waits([key])
        known = self._waits.get(key)
        if known is None:
            opened = await self._append([{"type": "wait.opened", "wait": wait.body(key)}])
            self._learn_waits(opened.get("waits") or [])
            known = self._waits[key]
        url = known.get("callback_url")
        return OpenWait(wait, key, known["id"], urljoin(self._ledger.url + "/", url) if url else None)

    async def _wait_for(self, wait: Wait | OpenWait) -> Answer:
        """Pause for one wait, and give its answer."""
        return (await self._pause(wait))[0]

    async def _pause(self, *waits: Wait | OpenWait, resume_when: str = "all") -> list[Answer]:
        """Pause until all (or with `"any"` the first) of these are answered; their answers, in the order given."""
        keys = await self._keys_of_pause(waits, first_counts=resume_when == "any")
        if self._resolved(keys, first_counts=resume_when == "any"):
            self.check()
            return [self._answer(wait, key) for wait, key in zip(waits, keys, strict=True)]
        await self._pause_for(waits, keys, resume_when)

    async def _each(self, waits: Sequence[Wait | OpenWait]) -> tuple[list[Answer], list[tuple[Wait | OpenWait, str]]]:
        """The answers that have come, and the waits that are open still, with their keys."""
        answers: list[Answer] = []
        left: list[tuple[Wait | OpenWait, str]] = []
        for wait, key in zip(waits, await self._keys_of_pause(waits, first_counts=False), strict=True):
            known = self._waits.get(key)
            if known is not None and known["status"] != "open":
                answers.append(answer_of(known))
            else:
                left.append((wait, key))
        return answers, left

    async def _pause_for_each(self, left: Sequence[tuple[Wait | OpenWait, str]]) -> None:
        """Pause until the next of these is answered; when there are none, the flow goes on."""
        if left:
            await self._pause_for([wait for wait, _ in left], [key for _, key in left], "each")

    async def _keys_of_pause(self, waits: Sequence[Wait | OpenWait], *, first_counts: bool) -> list[str]:
        """The keys of this pause's waits: anew (`.2`, `.3` ...) where a takeover or a recall withdrew them."""
        keys = [wait.key if isinstance(wait, OpenWait) else self._wait_key(wait) for wait in waits]
        await self._see_waits(keys, first_counts=first_counts)
        if not first_counts:
            return [self._latest(key) for key in keys]
        # The losers of such a pause are superseded too, but by the answer that counts; only all of them are withdrawn.
        generation, current = 1, keys
        while all(self._withdrawn(key) for key in current):
            generation += 1
            current = [f"{key}.{generation}" for key in keys]
        return current

    def _resolved(self, keys: Sequence[str], *, first_counts: bool) -> bool:
        known = [self._waits[key] for key in keys if key in self._waits]
        if first_counts and any(w["status"] in ("satisfied", "rejected") or w.get("decision") for w in known):
            return True
        return len(known) == len(keys) and all(wait["status"] != "open" for wait in known)

    def _answer(self, wait: Wait | OpenWait, key: str) -> Answer:
        known = self._waits.get(key)
        if known is not None:
            return answer_of(known)
        inner = wait.wait if isinstance(wait, OpenWait) else wait
        return Answer(key, inner.name, inner.kind, "superseded")  # never opened: its twin was answered before the pause

    async def _pause_for(self, waits: Sequence[Wait | OpenWait], keys: Sequence[str], resume_when: str) -> NoReturn:
        events: list[Json] = []
        bodies: list[Json] = []
        for wait, key in zip(waits, keys, strict=True):
            inner = wait.wait if isinstance(wait, OpenWait) else wait
            if self._waits.get(key) is not None:
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
        await self._append(events)
        self.left = True
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
        known = self._waits.get(key)
        return known is not None and known["status"] in ("superseded", "cancelled") and not known.get("decision")

    # --- undoing ----------------------------------------------------

    async def _compensate(self) -> None:
        """Undo what the verdict lists, newest first, with the functions registered by `@ledger.undo`."""
        for key in self.undo_list:
            known = self._effects[key]
            compensation = known.get("compensation") or {}
            action = str(compensation.get("action"))
            if "." not in action:
                action = f"{compensation.get('system')}.{action}"
            await self._append([{"type": "effect.compensating", "key": key}])
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
                result = await self._called(undo, call)
            except NEVER_SENT as error:
                await self._record({"type": "effect.compensation_failed", "key": key, "error": error_of(error)})
                raise errors.EffectFailed(key, str(error)) from error
            except BaseException as error:
                await self._record({"type": "effect.compensation_unknown", "key": key, "error": error_of(error)})
                if isinstance(error, Exception):
                    raise errors.EffectOutcomeUnknown(key, f"{type(error).__name__}: {error}") from error
                raise
            await self._record({"type": "effect.compensated", "key": key, "receipt": receipt_of(result, call.key)})

    # --- the end, and talking to the ledger ----------------------------------------------------

    async def _cancel(self, reason: str) -> None:
        """Call the run off; the flow's policy says what is undone."""
        await self._append([{"type": "cancelled", "reason": reason}])
        raise errors.Stopping

    async def _complete(self, result: Any) -> None:
        """The flow is through: what it returned is the run's result."""
        event: Json = {"type": "completed"}
        if isinstance(result, Mapping) and result and set(result) <= {"ref", "digest", "data"}:
            event["result"] = dict(result)
        elif result is not None:
            event["result"] = {"data": result}
        await self._append([event])
        self.left = True

    async def _fail(self, error: BaseException, *, retryable: bool) -> None:
        """The flow failed: it is tried again later, or a person looks at it now."""
        self._failures += 1
        pause = (self.retry_in() or 0) if retryable else 0
        await self._append([{"type": "failed", "error": error_of(error), "retryable": retryable, "retry_in": pause}])
        self.left = True

    def retry_in(self) -> int | None:
        """Seconds until the next try after the failures so far; None when there is none: a person looks at it now."""
        return None if self._failures >= self._failures_allowed else retry_in(self._failures)

    def repeats(self, key: str) -> bool:
        """Whether the agent itself may settle this effect's unknown outcome, by its key or by looking it up."""
        effect = self._effects.get(key) or {}
        return bool(effect.get("retry_safe") or effect.get("lookup"))

    async def _release(self, retry_in: int | None = None) -> None:
        """Give the lease back: the ledger's verdict says what happens now. One that is gone already is as good."""
        with contextlib.suppress(errors.LeaseLost, errors.RunEnded):
            await self._flush()
            await self._ledger._release(self.id, self._lease.epoch, retry_in=retry_in)
        self.left = True

    async def _append(self, events: list[Json]) -> Json:
        self._lease.check()
        if self._stop() and events[-1]["type"] not in ("paused", "completed", "failed"):
            raise errors.Stopping
        await self._flush()
        return await self._tell(events, patience=None)

    async def _record(self, receipt: Json) -> None:
        """Record what became of an effect: also when the lease is lost, and for as long as it may take."""
        await self._tell([receipt], patience=RECEIPT_PATIENCE)

    async def _tell(self, events: list[Json], *, patience: float | None) -> Json:
        try:
            answer = await self._ledger._append(self.id, self._lease.epoch, events, patience=patience)
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

    async def _see_waits(self, keys: Sequence[str], *, first_counts: bool = False) -> None:
        """The envelope has the waits of the latest pause; the others are fetched when one is first needed."""
        withdrawn = map(self._withdrawn, keys)
        if self._all_waits or (
            all(key in self._waits for key in keys) and not (all(withdrawn) if first_counts else any(withdrawn))
        ):
            return
        latest = list(self._waits.values())
        self._learn_waits((await self._ledger._get(self.id)).get("waits") or [])
        self._learn_waits(latest)  # what the verdict was given on stays as it was
        self._all_waits = True

    def _learn(self, effect: Json) -> None:
        self._effects[effect["key"]] = {**self._effects.get(effect["key"], {}), "granted": None, **effect}


class Run(RunCore):
    """One run under this process's lease, in code that blocks."""

    checkpoint = blocks(RunCore._checkpoint)
    note = blocks(RunCore._note)
    external_ref = blocks(RunCore._external_ref)
    effect = blocks(RunCore._effect)
    done = blocks(RunCore._done)
    unsure = blocks(RunCore._unsure)
    ask = blocks(RunCore._ask)
    timer = blocks(RunCore._timer)
    callback = blocks(RunCore._callback)
    signal = blocks(RunCore._signal)
    open = blocks(RunCore._open)
    wait_for = blocks(RunCore._wait_for)
    pause = blocks(RunCore._pause)
    compensate = blocks(RunCore._compensate)
    cancel = blocks(RunCore._cancel)
    complete = blocks(RunCore._complete)
    fail = blocks(RunCore._fail)
    release = blocks(RunCore._release)

    def each(self, *waits: Wait | OpenWait) -> Iterator[Answer]:
        """The answers as they come: the flow is called again at each, gets all so far, and pauses for the rest."""
        answers, left = blocking(self._each(waits))
        yield from answers
        blocking(self._pause_for_each(left))

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Notes, checkpoints and references of this block go to the ledger together, in their order.

        They are on record when the block has ended, or before: whatever else the run does waits until they are, and
        many, large or old ones are sent on the way. A process that dies in the block may take the last ones with it.
        """
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            blocking(self._flush())


def error_of(error: BaseException) -> Json:
    """An exception as the contract's `{code, message}`."""
    code = getattr(error, "code", None)
    return {
        "code": code if isinstance(code, str) and code else type(error).__name__,
        "message": (str(error) or type(error).__name__)[:1000],
    }
