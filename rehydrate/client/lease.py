"""The lease on one run while a flow works on it: kept by heartbeats in the background, or known to be lost."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rehydrate.client.errors import LeaseLost, LedgerError, RehydrateError, RunEnded
from rehydrate.client.tracing import log

# A claimed lease lasts this long until the first call, whatever it lasts afterwards (contract section 6, Claim).
CLAIM_GRACE_SECONDS = 10.0


class Lease:
    """Epoch and remaining time by this process's monotonic clock, which no change of the wall clock touches."""

    def __init__(
        self,
        grant: Mapping[str, Any],
        *,
        beat: Callable[[int], Any],
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = int(grant["epoch"])
        self.seconds = float(grant.get("seconds") or 60)
        self._beat = beat
        self._name = name
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._lost: RehydrateError | None = None
        self._until = monotonic() + min(self.seconds, CLAIM_GRACE_SECONDS)
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def check(self) -> None:
        """Raise `LeaseLost` (or `RunEnded`) once this process may no longer work on the run."""
        if self._lost is not None:
            raise self._lost
        if self._monotonic() > self._until:
            # The server has not been heard of for the whole length: it has let the lease lapse, or will say otherwise.
            self.lose(LeaseLost({"detail": "It ran out before it could be renewed."}))
            self.check()

    def lose(self, why: RehydrateError) -> None:
        with self._lock:
            self._lost = self._lost or why

    def renewed(self, grant: Mapping[str, Any] | None = None) -> None:
        """A call was accepted, and each accepted call renews the lease."""
        with self._lock:
            if grant and grant.get("seconds"):
                self.seconds = float(grant["seconds"])
            self._until = self._monotonic() + self.seconds

    def keep(self) -> None:
        """Start renewing in the background: by a thread, so that an event loop that is busy does not cost the lease."""
        keep = contextvars.copy_context().run  # its calls and log records belong to the run, too
        self._thread = threading.Thread(target=keep, args=(self._keep,), name=f"lease-{self._name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop renewing; the lease itself is ended by what was told to the ledger."""
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=0.1)  # one in flight may end by itself: it harms nothing

    def _keep(self) -> None:
        pause = min(self.seconds, CLAIM_GRACE_SECONDS) / 3  # a run that is over sooner costs no heartbeat at all
        while not self._done.wait(pause):
            began = self._monotonic()
            try:
                answer = self._beat(self.epoch)
            except (LeaseLost, RunEnded) as error:
                if not self._done.is_set():
                    log.warning("%s: %s", self._name, error)
                    self.lose(error)
                return
            except LedgerError as error:
                log.warning("%s: heartbeat refused: %s", self._name, error)
                pause = self.seconds / 3
            except RehydrateError as error:
                log.info("%s: heartbeat not answered: %s", self._name, error)
                pause = min(1.0, self.seconds / 10)
            else:
                grant = answer.get("lease") if isinstance(answer, Mapping) else None
                with self._lock:
                    if grant and grant.get("seconds"):
                        self.seconds = float(grant["seconds"])
                    self._until = max(self._until, began + self.seconds)
                pause = self.seconds / 3
