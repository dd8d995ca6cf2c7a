"""What this process remembers of the runs that it wrote a moment ago, so that their next step need not be read first.

Nothing is taken for granted. What was decided on a memory is saved only if, within the statement that saves it, the
database still has the run at that revision, with that hash; all rights and policies at that number (see `rights`); and
a clock that has come to the time that was reckoned with, is not further on than `SLACK`, and not where anything else
becomes due. Whatever else comes of it (a refusal that is not recorded, nothing to write, somebody who was quicker)
counts for nothing: then the run is read, and all of it is decided anew.
"""

import datetime as dt
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rehydrate import clock, loading, rights, sql
from rehydrate.core.state import Run, State
from rehydrate.loading import Ground, Loaded, Site, Wanted
from rehydrate.projections import Change, Condition

#: So many runs, those written last, each for so many seconds, and only those with few waits and effects.
RUNS: Final = 500
KEPT_FOR: Final = 60.0
FEW: Final = 20
FLOWS: Final = 1000
#: Seconds for which the database's time is reckoned on from when it was last read. Clocks drift less than SLACK in it.
RECKONED_FOR: Final = 1.0
SLACK: Final = dt.timedelta(milliseconds=50)


class Moment(Struct, frozen=True):
    """The database's time, read when this process's clock was at `at`; the number of rights then."""

    now: dt.datetime
    number: int
    at: float


class _Known(Struct, frozen=True):
    """A run as it was written, at that revision; and until when that is kept."""

    state: State
    revision: int
    until: float


class Memory:
    """Not for several threads: it is the event loop's."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._latest: dt.datetime | None = None
        self.forget()

    def forget(self) -> None:
        self._moment: Moment | None = None
        self._runs: OrderedDict[str, _Known] = OrderedDict()
        self._by_wait: dict[str, str] = {}
        self._policies: dict[tuple[str, str], int] = {}
        self._connections = sql.own_connections.made

    def moment(self) -> Moment | None:
        """What the database's time is by now, and at which number of rights; None where that is not known.

        A connection that had to be made anew may lead to another server, or to another state of this one.
        """
        if self._connections != sql.own_connections.made:
            self.forget()
        known, at = self._moment, self._monotonic()
        if known is None or at - known.at > RECKONED_FOR:
            return None
        now = self._onward(known.now + dt.timedelta(seconds=at - known.at))
        return Moment(now, known.number, at)

    def _onward(self, now: dt.datetime) -> dt.datetime:
        """Not a little earlier than what was reckoned or read before: that is how long an answer took to come."""
        if self._latest is None or not dt.timedelta(0) < self._latest - now < SLACK:
            self._latest = now
        return self._latest

    def recall(self, wanted: Wanted | Site, moment: Moment) -> Loaded | Ground | None:
        """What reading would find if nobody else wrote; None where too little is known."""
        if isinstance(wanted, Site):
            number = self._policies.get((wanted.workspace, wanted.flow))
            people = loading.people_at(moment.number, wanted.workspace)
            if number is None or people is None:
                return None
            policy = loading.policy_of(wanted.workspace, wanted.flow, number)
            return Ground(moment.now, number, policy, people, None, moment.number)
        if wanted.pick is not None or wanted.history:
            return None
        (named,) = wanted.ids
        known = self._runs.get(self._by_wait.get(named, "") if wanted.by_wait else named)
        if known is None or known.until < moment.at:
            return None
        run = known.state.run
        number = self._policies.get((run.workspace_id, run.flow))
        people = loading.people_at(moment.number, run.workspace_id)
        if number is None or (wanted.people and people is None):
            return None
        policy = loading.policy_of(run.workspace_id, run.flow, number)
        pinned = policy if run.policy == number else loading.policy_of(run.workspace_id, run.flow, run.policy)
        return Loaded(
            known.state, moment.now, number, policy, pinned, known.revision, people, rights=moment.number
        )  # fmt: skip

    def learn(self, found: Loaded | Ground, wanted: Wanted | Site, at: float) -> None:
        """From what was read just now, after this process's clock was at `at`."""
        if found.rights is None:
            return
        if self._moment is not None and self._moment.number != found.rights:
            if at < self._moment.at:
                return  # it was read before, and is told after
            self.forget()  # all of it may be other data by now: a backup was restored in its place
        self._onward(found.now)
        if self._moment is None or self._moment.at <= at:
            self._moment = Moment(found.now, found.rights, at)
        if len(self._policies) >= FLOWS:
            self._policies.clear()
        if isinstance(wanted, Site):
            self._policies[wanted.workspace, wanted.flow] = found.number
        elif isinstance(found, Loaded):
            self._policies[found.state.run.workspace_id, found.state.run.flow] = found.number

    def keep(self, change: Change, run: Run) -> None:
        """A change that was saved, with the run as it was written."""
        revision = change.revision + 1 if change.before is not None else 0
        known = self._runs.get(run.id)
        if known is not None and known.revision >= revision:
            return
        if change.now is not None:
            self._onward(change.now)
        self.drop(run.id)
        after = change.after
        if not after.complete or change.secret or change.sealed or len(after.waits) + len(after.effects) > FEW:
            return
        # As it is read without its history.
        state = replace(after, run=run, decisions={}, refs={}, opaque=None)
        self._runs[run.id] = _Known(state, revision, self._monotonic() + KEPT_FOR)
        self._by_wait.update((wait.id, run.id) for wait in state.waits.values())
        while len(self._runs) > RUNS or next(iter(self._runs.values())).until < self._monotonic():
            self.drop(next(iter(self._runs)))

    def drop(self, run_id: str) -> None:
        known = self._runs.pop(run_id, None)
        for wait in known.state.waits.values() if known is not None else ():
            self._by_wait.pop(wait.id, None)


memory: Final = Memory()


def sound(moment: Moment, changes: Iterable[Change]) -> Condition:
    """What must hold where these changes are saved: everything is as it was reckoned, and nothing more is due yet."""
    until = moment.now + SLACK
    for change in changes:
        if (before := change.before) is not None:
            run = before.run
            dues = (*loading.timers(before).values(), run.lease_expires_at, run.alarm_at)
            until = min(until, *(due for due in dues if due is not None and due > moment.now))
    at = f"clock_timestamp() + '{clock.interval()}'::interval"
    return (
        f"{rights.NUMBER} = %s::bigint AND {at} >= %s::timestamptz AND {at} < %s::timestamptz",
        [moment.number, moment.now.isoformat(), until.isoformat()],
    )
