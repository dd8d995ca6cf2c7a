"""The loop of an agent: claim a run that may go on, call its flow, tell the ledger how that went. Clean on SIGTERM."""

from __future__ import annotations

import contextlib
import inspect
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rehydrate.client import errors, handling
from rehydrate.client.blocking import blocking, blocks
from rehydrate.client.retry import Backoff
from rehydrate.client.run import Run, RunCore
from rehydrate.client.tracing import log

if TYPE_CHECKING:
    from rehydrate.client.ledger import Ledger, LedgerCore, RegisteredFlow

Json = dict[str, Any]

# A claim whose answer was lost is sent again under the same Idempotency-Key for this long, so that its lease is found.
CLAIM_PATIENCE = 8.0
# Seconds of rest after a claim that was answered "nothing" long before its time.
EARLY = 1.0


class WorkerCore(ABC):
    """What `Worker` and `AsyncWorker` share: which runs are claimed, and how one is gone on with."""

    kind: type[RunCore]

    def __init__(
        self, ledger: LedgerCore, *, flows: Iterable[str] | None = None, concurrency: int = 1, poll: int = 10
    ) -> None:
        self._ledger = ledger
        self._stop = threading.Event()
        self._poll = poll
        self._concurrency = concurrency
        self._died: BaseException | None = None
        names = list(flows) if flows is not None else list(ledger.flows)
        # One claim carries one agent card: flows whose cards say the same are claimed together.
        self._groups: dict[tuple[str, tuple[str, ...], str], list[RegisteredFlow]] = {}
        for name in names:
            flow = ledger.flows[name]
            self._groups.setdefault((flow.version, flow.reads, flow.framework), []).append(flow)
        if not self._groups:
            raise ValueError("No flow is registered: put @ledger.flow(...) on a function first.")

    def stop(self) -> None:
        """Take no new run; what is in hand goes on to its next safe point and is given back."""
        self._stop.set()

    @abstractmethod
    async def _rest(self, seconds: float) -> None:
        """Do nothing for so long, or until `stop`."""

    async def _serve(self, group: list[RegisteredFlow]) -> None:
        backoff, troubles = Backoff(base=0.2), 0
        while not self._stop.is_set():
            try:
                began = time.monotonic()
                found = await self._claim_and_handle(group, wait=self._poll)
                troubles = 0
                if found is None and time.monotonic() - began < self._poll / 2:
                    await self._rest(EARLY)  # the server has no place for one more to wait, or is ending
            except handling.OUT_OF_REACH as error:
                troubles += 1
                if troubles == 1:
                    log.warning("waiting for the ledger: %s", error)
                await self._rest(backoff.delay(troubles, retry_after=getattr(error, "retry_after", None)))
            except errors.LedgerError as error:
                if error.status in (401, 403, 422):
                    self._died = error
                    self.stop()
                    return
                troubles += 1
                log.warning("claim refused: %s", error)
                await self._rest(backoff.delay(troubles))
            except BaseException as error:
                self._died = error
                self.stop()
                return

    async def _once(self, *, wait: int = 0) -> str | None:
        """Claim and serve at most one run of any group."""
        for group in self._groups.values():
            run_id = await self._claim_and_handle(group, wait=wait)
            if run_id is not None:
                return run_id
        return None

    async def _claim_and_handle(self, group: list[RegisteredFlow], *, wait: int) -> str | None:
        envelope = await self._ledger._claim(
            [flow.name for flow in group],
            agent=self._ledger.agent_card(group[0]),
            wait=wait,
            patience=CLAIM_PATIENCE,
        )
        if envelope is None:
            return None
        await self._handle(envelope)
        return str(envelope["run"]["id"])

    async def _handle(self, envelope: Mapping[str, Any]) -> None:
        """Go on with the run of an envelope that came with a lease."""
        if not envelope.get("lease"):
            return
        lease = handling.lease_of(self._ledger, envelope)
        run = self.kind(self._ledger, envelope, lease, stop=self._stop.is_set)
        with handling.worked_on(run):
            try:
                await self._go_on(run)
            except handling.GONE as error:
                log.warning("%s: %s", run.name, error)
            except handling.OUT_OF_REACH as error:
                log.warning("%s: left as it is, its lease will lapse: %s", run.name, error)
            except errors.LedgerError as error:
                log.error("%s: %s", run.name, error)

    async def _go_on(self, run: RunCore) -> None:
        try:
            if run.verdict["outcome"] == "compensate":
                await run._compensate()
                await run._release()
            else:
                result = self._ledger.flows[run.flow].function(run)
                await run._complete(await result if inspect.isawaitable(result) else result)
                log.info("%s: completed", run.name)
        except BaseException as error:
            counted = await handling.leave(run, error)
            if isinstance(counted, errors.Paused):
                log.info("%s: paused", run.name)
            if not isinstance(counted, (Exception, *handling.LEFT)):
                raise


class Worker(WorkerCore):
    """Serves a ledger's flows with `concurrency` threads for each version of agent."""

    kind = Run

    def __init__(
        self, ledger: Ledger, *, flows: Iterable[str] | None = None, concurrency: int = 1, poll: int = 10
    ) -> None:
        super().__init__(ledger, flows=flows, concurrency=concurrency, poll=poll)

    once = blocks(WorkerCore._once)
    handle = blocks(WorkerCore._handle)

    def run(self) -> None:
        """Work until `stop` or a signal; raises what made it impossible to go on, such as a revoked key."""
        threads = [
            threading.Thread(
                target=lambda group=group: blocking(self._serve(group)), name=f"worker-{group[0].name}-{n}", daemon=True
            )
            for group in self._groups.values()
            for n in range(self._concurrency)
        ]
        with self._signals():
            for thread in threads:
                thread.start()
            self._stop.wait()
            for thread in threads:
                thread.join()
        if self._died is not None:
            raise self._died

    async def _rest(self, seconds: float) -> None:
        self._stop.wait(seconds)

    @contextlib.contextmanager
    def _signals(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _frame: object) -> None:
            log.info("%s: stopping", signal.Signals(number).name)
            self.stop()
            signal.signal(number, signal.SIG_DFL)  # whoever asks twice does not want to wait

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
