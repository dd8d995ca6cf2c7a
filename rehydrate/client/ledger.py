"""The client's front door: the contract's calls, and the registry of flows and undo functions that a worker serves."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import httpx

from rehydrate.client import calls, tracing
from rehydrate.client.blocking import blocking, blocks
from rehydrate.client.errors import RehydrateError
from rehydrate.client.retry import Backoff
from rehydrate.client.run import Run
from rehydrate.client.shapes import EffectCall
from rehydrate.client.transport import Call, SyncTransport, Transport

if TYPE_CHECKING:
    from rehydrate.client.handling import Opening

Json = dict[str, Any]
FlowFunction = Callable[[Any], Any]  # of a Run, or of an AsyncRun
UndoFunction = Callable[[EffectCall], Any]
F = TypeVar("F", bound=FlowFunction)
U = TypeVar("U", bound=UndoFunction)


class NotConfigured(RehydrateError):
    """The client needs the server's address and a key: set REHYDRATE_URL and REHYDRATE_KEY, or pass url= and key=."""

    def __init__(self) -> None:
        super().__init__(self.message)


@dataclass(frozen=True)
class RegisteredFlow:
    """A flow's function, the version of this agent's code, and the versions whose paused runs it can go on with."""

    name: str
    function: FlowFunction
    version: str
    reads: tuple[str, ...]
    framework: str = "plain"


class LedgerCore(ABC):
    """What `Ledger` and `AsyncLedger` share: the contract's calls as steps, and what this agent serves."""

    _transport: Transport

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        name: str | None = None,
        holder: str | None = None,
    ) -> None:
        url = url or os.environ.get("REHYDRATE_URL")
        key = key or os.environ.get("REHYDRATE_KEY")
        if not url or not key:
            raise NotConfigured
        self.url = url.rstrip("/")
        self.name = name
        self.holder = holder or f"{socket.gethostname()[:60]}/{os.getpid()}/{uuid.uuid4().hex[:8]}"
        self.flows: dict[str, RegisteredFlow] = {}
        self.undo_functions: dict[str, UndoFunction] = {}
        self._key = key

    # --- what this agent serves ----------------------------------------------------

    def flow(
        self, name: str, *, version: str = "1", reads: Iterable[str] | None = None, framework: str = "plain"
    ) -> Callable[[F], F]:
        """Register a function as a flow: it is called from the top whenever a run of it may go on.

        Change `version` when paused runs could no longer go on with the new code; `reads` lists the versions it can.
        `framework` is what it is written with, for the people who look at its runs.
        """

        def register(function: F) -> F:
            self.flows[name] = RegisteredFlow(name, function, version, tuple(reads or (version,)), framework)
            return function

        return register

    def undo(self, action: str) -> Callable[[U], U]:
        """Register how an effect is undone; the function gets an `EffectCall` with the `receipt` of what it undoes."""

        def register(function: U) -> U:
            self.undo_functions[action] = function
            return function

        return register

    def agent_card(self, flow: RegisteredFlow) -> Json:
        """How this agent introduces itself."""
        return {
            "name": self.name or flow.name,
            "version": flow.version,
            "framework": flow.framework,
            "reads": list(flow.reads),
        }

    def card_for(self, flow: str) -> Json:
        """The card of a flow that may be registered or not."""
        return self.agent_card(self.flows.get(flow) or RegisteredFlow(flow, lambda _: None, "1", ("1",)))

    @abstractmethod
    def beat(self, run_id: str, epoch: int) -> Json:
        """One heartbeat, by the thread that keeps a lease."""

    # --- the contract's calls ----------------------------------------------------

    async def _open(
        self,
        flow: str,
        external_id: str,
        *,
        title: str | None = None,
        input_ref: str | None = None,
        input_digest: str | None = None,
        agent: Mapping[str, Any] | None = None,
        holder: str | None = None,
        lease_seconds: int | None = None,
        labels: Mapping[str, str] | None = None,
        requested_by: str | None = None,
        trace_id: str | None = None,
        events: Sequence[Mapping[str, Any]] | None = None,
    ) -> Json:
        """Open a run, or find it again: `{run, lease}`. Without a `holder` it is ready for a worker."""
        if agent is None and flow in self.flows:
            agent = self.agent_card(self.flows[flow])
        given = {name: value for name, value in (("ref", input_ref), ("digest", input_digest)) if value is not None}
        return await self._json(
            calls.open_run(
                flow,
                external_id,
                title=title,
                input=given or None,
                agent=agent,
                holder=holder,
                lease_seconds=lease_seconds,
                labels=labels,
                requested_by=requested_by,
                trace_id=trace_id or tracing.trace_id(),
                events=events,
            )
        )

    async def _append(
        self, run_id: str, epoch: int, events: Sequence[Mapping[str, Any]], *, patience: float | None = None
    ) -> Json:
        """Append events under a lease: `{run, events, effects, waits, lease}`."""
        return await self._json(calls.append(run_id, epoch, events), patience=patience)

    async def _heartbeat(self, run_id: str, epoch: int, *, patience: float | None = None) -> Json:
        return await self._json(calls.heartbeat(run_id, epoch), patience=patience)

    async def _release(self, run_id: str, epoch: int, *, retry_in: int | None = None) -> Json:
        """Give the lease back, to be tried again after `retry_in` seconds when given."""
        return await self._json(calls.release(run_id, epoch, retry_in=retry_in))

    async def _recall(self, run_id: str, *, reason: str, holder: str | None = None) -> Json:
        """Withdraw the open waits of a run and take its lease, as when new input makes the question moot."""
        return await self._json(calls.recall(run_id, holder=holder or self.holder, reason=reason))

    async def _rehydrate(
        self,
        run_id: str,
        *,
        holder: str | None = None,
        agent: Mapping[str, Any] | None = None,
        input_digest: str | None = None,
        lease_seconds: int | None = None,
    ) -> Json:
        """The envelope of a run, with a lease when it may go on."""
        return await self._json(
            calls.rehydrate(
                run_id,
                holder=holder or self.holder,
                agent=agent,
                input_digest=input_digest,
                lease_seconds=lease_seconds,
            )
        )

    async def _claim(
        self,
        flows: Sequence[str],
        *,
        holder: str | None = None,
        agent: Mapping[str, Any] | None = None,
        lease_seconds: int | None = None,
        wait: int = 0,
        patience: float | None = None,
    ) -> Json | None:
        """The envelope of the next run that may go on; None when none came within `wait` seconds."""
        call = calls.claim(flows, holder=holder or self.holder, agent=agent, lease_seconds=lease_seconds, wait=wait)
        _, envelope = await self._transport._send(call, patience=patience)
        return envelope if envelope is None else dict(envelope)

    async def _signal(
        self,
        name: str,
        *,
        id: str,
        run: str | None = None,
        flow: str | None = None,
        external_id: str | None = None,
        correlation: str | None = None,
        payload: Any = None,
        occurred_at: str | None = None,
        sequence: int | None = None,
    ) -> Json:
        """Send a signal to a run, by its id, by flow and external id, or by what its wait is correlated with."""
        return await self._json(
            calls.signal(
                name,
                id=id,
                run=run,
                flow=flow,
                external_id=external_id,
                correlation=correlation,
                payload=payload,
                occurred_at=occurred_at,
                sequence=sequence,
            )
        )

    async def _get(self, run_id: str) -> Json:
        """A run as it stands."""
        return await self._json(calls.get_run(run_id))

    async def _runs(self, /, **filters: Any) -> Json:
        """One page of runs: `{results, next, total}`."""
        return await self._json(calls.list_runs(**filters))

    async def _json(self, call: Call, *, patience: float | None = None) -> Json:
        _, answer = await self._transport._send(call, patience=patience)
        return dict(answer or {})


class Ledger(LedgerCore):
    """A connection to the run ledger. One is enough for a process; threads may share it.

    `url` and `key` come from REHYDRATE_URL and REHYDRATE_KEY when left out. `holder` names this process.
    """

    _transport: SyncTransport

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        name: str | None = None,
        holder: str | None = None,
        patience: float = 60.0,
        backoff: Backoff | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, key, name=name, holder=holder)
        self._transport = SyncTransport(self.url, self._key, patience=patience, backoff=backoff, transport=transport)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def beat(self, run_id: str, epoch: int) -> Json:
        return self.heartbeat(run_id, epoch, patience=1.0)

    # --- serving runs ----------------------------------------------------

    def work(self, *, flows: Iterable[str] | None = None, concurrency: int = 1, poll: int = 10) -> None:
        """Serve the registered flows until SIGTERM or SIGINT: then what is in hand goes on to its next safe point."""
        from rehydrate.client.worker import Worker

        Worker(self, flows=flows, concurrency=concurrency, poll=poll).run()

    def work_once(self, *, flows: Iterable[str] | None = None, wait: int = 0) -> str | None:
        """Serve at most one run, and give its id: for tests, and for jobs started by a scheduler."""
        from rehydrate.client.worker import Worker

        return Worker(self, flows=flows).once(wait=wait)

    @contextlib.contextmanager
    def run(
        self,
        flow: str,
        external_id: str,
        *,
        agent: Mapping[str, Any] | None = None,
        wait: float = 0.0,
        **opening: Unpack[Opening],
    ) -> Iterator[Run]:
        """A run in hand, for a script that is no worker: opened, or found again, and its lease kept for the block.

            with ledger.run("contract-approval", "contract-17", title="Contract 17") as run:
                run.checkpoint("draft", ref="s3://contracts/17.json")
                answer = run.ask("legal-approval", "Send contract 17?")     # a pause leaves the block
                run.complete({"outcome": answer.choice})

        A block that ends by itself completes the run; one that pauses, or that calls the run off, is left without an
        exception (`run.left`); an exception is told to the ledger and goes on. Start it again and the block runs from
        its top, as a flow does. Raises `NotToGoOn` when the run may not go on within `wait` seconds, and `LeaseHeld`
        when another process works on it for longer. Other fields: those of `open`.
        """
        from rehydrate.client import handling

        run = blocking(handling.take(self, Run, flow, external_id, agent=agent, wait=wait, opening=opening))
        with handling.worked_on(run):
            try:
                yield run
                blocking(handling.finish(run))
            except BaseException as error:
                if not isinstance(blocking(handling.leave(run, error)), handling.LEFT):
                    raise

    # --- the contract's calls ----------------------------------------------------

    open = blocks(LedgerCore._open)
    append = blocks(LedgerCore._append)
    heartbeat = blocks(LedgerCore._heartbeat)
    release = blocks(LedgerCore._release)
    recall = blocks(LedgerCore._recall)
    rehydrate = blocks(LedgerCore._rehydrate)
    claim = blocks(LedgerCore._claim)
    signal = blocks(LedgerCore._signal)
    get = blocks(LedgerCore._get)
    runs = blocks(LedgerCore._runs)
