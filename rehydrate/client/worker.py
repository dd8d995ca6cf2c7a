"""The loop of an agent: claim a run that may go on, call its flow, tell the ledger how that went. Clean on SIGTERM."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rehydrate.client import errors
from rehydrate.client.lease import Lease
from rehydrate.client.retry import Backoff, retry_in
from rehydrate.client.run import Run

if TYPE_CHECKING:
    from rehydrate.client.ledger import Ledger, RegisteredFlow

log = logging.getLogger("rehydrate.client")

Json = dict[str, Any]

# A claim whose answer was lost is sent again under the same Idempotency-Key for this long, so that its lease is found.
CLAIM_PATIENCE = 8.0
# Seconds of rest after a claim that was answered "nothing" long before its time.
EARLY = 1.0
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


class Worker:
    """Serves a ledger's flows with `concurrency` threads for each version of agent."""

    def __init__(
        self, ledger: Ledger, *, flows: Iterable[str] | None = None, concurrency: int = 1, poll: int = 10
    ) -> None:
        self._ledger = ledger
        self._stop = threading.Event()
        self._poll = poll
        self._concurrency = concurrency
        self._died: BaseException | None = None
        names = list(flows) if flows is not None else list(ledger.flows)
        # One claim names one agent version: flows of the same version are claimed together.
        self._groups: dict[tuple[str, tuple[str, ...]], list[RegisteredFlow]] = {}
        for name in names:
            flow = ledger.flows[name]
            self._groups.setdefault((flow.version, flow.reads), []).append(flow)
        if not self._groups:
            raise ValueError("No flow is registered: put @ledger.flow(...) on a function first.")

    # --- the process ----------------------------------------------------

    def run(self) -> None:
        """Work until `stop` or a signal; raises what made it impossible to go on, such as a revoked key."""
        threads = [
            threading.Thread(target=self._serve, args=(group,), name=f"worker-{group[0].name}-{n}", daemon=True)
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

    def stop(self) -> None:
        """Take no new run; what is in hand goes on to its next safe point and is given back."""
        self._stop.set()

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

    def _serve(self, group: list[RegisteredFlow]) -> None:
        backoff, troubles = Backoff(base=0.2), 0
        while not self._stop.is_set():
            try:
                began = time.monotonic()
                found = self._claim_and_handle(group, wait=self._poll)
                troubles = 0
                if found is None and time.monotonic() - began < self._poll / 2:
                    self._stop.wait(EARLY)  # the server has no place for one more to wait, or is ending
            except (errors.Unreachable, errors.RateLimited, errors.Unavailable) as error:
                troubles += 1
                if troubles == 1:
                    log.warning("waiting for the ledger: %s", error)
                self._stop.wait(backoff.delay(troubles, retry_after=getattr(error, "retry_after", None)))
            except errors.LedgerError as error:
                if error.status in (401, 403, 422):
                    self._died = error
                    self._stop.set()
                    return
                troubles += 1
                log.warning("claim refused: %s", error)
                self._stop.wait(backoff.delay(troubles))
            except BaseException as error:
                self._died = error
                self._stop.set()
                return

    def once(self, *, wait: int = 0) -> str | None:
        """Claim and serve at most one run of any group."""
        for group in self._groups.values():
            run_id = self._claim_and_handle(group, wait=wait)
            if run_id is not None:
                return run_id
        return None

    def _claim_and_handle(self, group: list[RegisteredFlow], *, wait: int) -> str | None:
        envelope = self._ledger.claim(
            [flow.name for flow in group],
            agent=self._ledger.agent_card(group[0]),
            wait=wait,
            patience=CLAIM_PATIENCE,
        )
        if envelope is None:
            return None
        self.handle(envelope)
        return str(envelope["run"]["id"])

    # --- one run ----------------------------------------------------

    def handle(self, envelope: Mapping[str, Any]) -> None:
        """Go on with the run of an envelope that came with a lease."""
        grant = envelope.get("lease")
        if not grant:
            return
        run_id = envelope["run"]["id"]
        name = f"{envelope['run']['flow']}/{envelope['run']['external_id']}"
        lease = Lease(grant, beat=lambda epoch: self._ledger.heartbeat(run_id, epoch, patience=1.0), name=name)
        run = Run(self._ledger, envelope, lease, stop=self._stop.is_set)
        lease.keep()
        try:
            self._go_on(run, envelope, name)
        except GONE as error:
            log.warning("%s: %s", name, error)
        except (errors.Unreachable, errors.Unavailable, errors.RateLimited) as error:
            log.warning("%s: left as it is, its lease will lapse: %s", name, error)
        except errors.LedgerError as error:
            log.error("%s: %s", name, error)
        finally:
            lease.close()

    def _go_on(self, run: Run, envelope: Mapping[str, Any], name: str) -> None:
        try:
            if envelope["verdict"]["outcome"] == "compensate":
                run.compensate()
                run.release()
            else:
                run.complete(self._ledger.flows[run.flow].function(run))
                log.info("%s: completed", name)
        except errors.Paused:
            log.info("%s: paused", name)
        except errors.Stopping:
            run.release()
        except (*GONE, errors.Unreachable, errors.Unavailable, errors.RateLimited):
            raise
        except errors.EffectFailed as error:
            log.warning("%s: %s", name, error)
            run.release(run.retry_in())
        except errors.EffectOutcomeUnknown as error:
            log.warning("%s: %s", name, error)
            run.release(retry_in(1) if run.repeats(error.key) else None)
        except LEDGER_KNOWS as error:
            log.warning("%s: %s", name, error)
            run.release()
        except Exception as error:
            log.warning("%s failed", name, exc_info=not isinstance(error, errors.NotRetryable))
            run.fail(error, retryable=not isinstance(error, NO_USE_TRYING))
        except BaseException:
            with contextlib.suppress(errors.RehydrateError):
                run.release()
            raise
