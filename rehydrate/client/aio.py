"""The client for code that runs in an event loop: the same names and promises as `Ledger`, `Run` and `Worker`, awaited.

ledger = AsyncLedger()

@ledger.flow("contract-approval")
async def contract(run):
    await run.checkpoint("draft", ref="s3://...")
    answer = await run.ask("legal-approval", "Send contract 17 to ACME?")

asyncio.run(ledger.work())

What a flow is cancelled in the middle of is told to the ledger before the cancellation goes on: an effect that may
have reached the outside is unknown then, and a receipt that is there is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from typing import Any, TypeVar, Unpack

import httpx

from rehydrate.client import calls, handling
from rehydrate.client.ledger import LedgerCore
from rehydrate.client.retry import Backoff
from rehydrate.client.run import RunCore
from rehydrate.client.shapes import Answer, OpenWait, Wait
from rehydrate.client.tracing import log
from rehydrate.client.transport import AsyncTransport, SyncTransport
from rehydrate.client.worker import WorkerCore

Json = dict[str, Any]
T = TypeVar("T")


async def to_the_end(steps: Coroutine[Any, Any, T]) -> T:
    """Awaited to its end also when the waiting task is cancelled; the cancellation goes on afterwards."""
    task = asyncio.ensure_future(steps)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failed := task.exception()):
            raise cancelled from failed
        raise cancelled
    return task.result()


class AsyncRun(RunCore):
    """One run under this process's lease, in an event loop. `do`, look-up and undo functions may be async, too."""

    in_loop = True

    checkpoint = RunCore._checkpoint
    note = RunCore._note
    external_ref = RunCore._external_ref
    effect = RunCore._effect
    done = RunCore._done
    unsure = RunCore._unsure
    ask = RunCore._ask
    timer = RunCore._timer
    callback = RunCore._callback
    signal = RunCore._signal
    open = RunCore._open
    wait_for = RunCore._wait_for
    pause = RunCore._pause
    compensate = RunCore._compensate
    cancel = RunCore._cancel
    complete = RunCore._complete
    fail = RunCore._fail
    release = RunCore._release

    async def each(self, *waits: Wait | OpenWait) -> AsyncIterator[Answer]:
        """The answers as they come: the flow is called again at each, gets all so far, and pauses for the rest."""
        answers, left = await self._each(waits)
        for answer in answers:
            yield answer
        await self._pause_for_each(left)

    @contextlib.asynccontextmanager
    async def batch(self) -> AsyncIterator[None]:
        """As `Run.batch`: notes, checkpoints and references of this block go to the ledger together."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            await self._flush()

    async def _tell(self, events: list[Json], *, patience: float | None) -> Json:
        return await to_the_end(super()._tell(events, patience=patience))


class AsyncLedger(LedgerCore):
    """A connection to the run ledger for one event loop. Parameters as for `Ledger`."""

    _transport: AsyncTransport

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        name: str | None = None,
        holder: str | None = None,
        patience: float = 60.0,
        backoff: Backoff | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, key, name=name, holder=holder)
        self._transport = AsyncTransport(self.url, self._key, patience=patience, backoff=backoff, transport=transport)
        self._beats = SyncTransport(self.url, self._key, patience=patience, backoff=backoff)

    async def close(self) -> None:
        self._beats.close()
        await self._transport.close()

    async def __aenter__(self) -> AsyncLedger:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def beat(self, run_id: str, epoch: int) -> Json:
        return dict(self._beats.send(calls.heartbeat(run_id, epoch), patience=1.0)[1])

    # --- serving runs ----------------------------------------------------

    async def work(self, *, flows: Iterable[str] | None = None, concurrency: int = 10, poll: int = 10) -> None:
        """Serve the registered flows until SIGTERM or SIGINT: then what is in hand goes on to its next safe point."""
        await AsyncWorker(self, flows=flows, concurrency=concurrency, poll=poll).run()

    async def work_once(self, *, flows: Iterable[str] | None = None, wait: int = 0) -> str | None:
        """Serve at most one run, and give its id: for tests, and for jobs started by a scheduler."""
        return await AsyncWorker(self, flows=flows).once(wait=wait)

    @contextlib.asynccontextmanager
    async def run(
        self,
        flow: str,
        external_id: str,
        *,
        agent: Mapping[str, Any] | None = None,
        wait: float = 0.0,
        **opening: Unpack[handling.Opening],
    ) -> AsyncIterator[AsyncRun]:
        """As `Ledger.run`: a run in hand, for a script that is no worker."""
        run = await handling.take(self, AsyncRun, flow, external_id, agent=agent, wait=wait, opening=opening)
        with handling.worked_on(run):
            try:
                yield run
                await handling.finish(run)
            except BaseException as error:
                if not isinstance(await handling.leave(run, error), handling.LEFT):
                    raise

    # --- the contract's calls ----------------------------------------------------

    open = LedgerCore._open
    append = LedgerCore._append
    heartbeat = LedgerCore._heartbeat
    release = LedgerCore._release
    recall = LedgerCore._recall
    rehydrate = LedgerCore._rehydrate
    claim = LedgerCore._claim
    signal = LedgerCore._signal
    get = LedgerCore._get
    runs = LedgerCore._runs


class AsyncWorker(WorkerCore):
    """Serves a ledger's flows with `concurrency` tasks for each version of agent."""

    kind = AsyncRun

    def __init__(
        self, ledger: AsyncLedger, *, flows: Iterable[str] | None = None, concurrency: int = 10, poll: int = 10
    ) -> None:
        super().__init__(ledger, flows=flows, concurrency=concurrency, poll=poll)
        self._stopped = asyncio.Event()

    once = WorkerCore._once
    handle = WorkerCore._handle

    async def run(self) -> None:
        """Work until `stop` or a signal; raises what made it impossible to go on, such as a revoked key."""
        with self._signals():
            async with asyncio.TaskGroup() as tasks:
                for group in self._groups.values():
                    for n in range(self._concurrency):
                        tasks.create_task(self._serve(group), name=f"worker-{group[0].name}-{n}")
        if self._died is not None:
            raise self._died

    def stop(self) -> None:
        super().stop()
        self._stopped.set()

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)

        def handle(number: signal.Signals) -> None:
            log.info("%s: stopping", number.name)
            self.stop()
            loop.remove_signal_handler(number)  # whoever asks twice does not want to wait

        for number in numbers:
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # only the main thread can
                loop.add_signal_handler(number, handle, number)
        try:
            yield
        finally:
            for number in numbers:
                with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                    loop.remove_signal_handler(number)
