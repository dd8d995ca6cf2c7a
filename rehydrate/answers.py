"""Answers that are saved with what they tell of, in one statement: what was decided waits until its answer is known.

On the event loop, whoever asks for a change gets its outcome when it was decided, and before it is saved; makes the
answer of it, and offers that. Then both are saved, or neither. Nobody waits for more than a moment for an answer.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, Final

from rehydrate import cooperative

#: Seconds in which an answer has to be there once its change was decided.
WITHIN: Final = 0.05


class Apart(Exception):
    """It cannot be saved with its answer here: all of it is to be done in a transaction of its own, from the start."""


class Slot:
    """For one request, on the loop: where its one change and its answer meet."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.decided = False
        """A change waits for its answer."""
        self._offered: asyncio.Future[dict[str, Any] | None] = loop.create_future()
        self._saved: asyncio.Future[bool] = loop.create_future()

    # -- for whoever asked

    def offer(self, row: dict[str, Any]) -> bool:
        """The answer, as the row that is saved. Whether it was, with its change; raises where nobody knows."""
        if not self._offered.done():
            self._offered.set_result(row)
        return cooperative.wait_for(self._saved)

    # -- for whoever saves

    def answer(self) -> dict[str, Any] | None:
        """What was offered by now. After this nothing is taken any more."""
        if not self._offered.done():
            self._offered.set_result(None)
        return self._offered.result()

    def settle(self, saved: bool | Exception) -> None:
        """What became of both. Only the first word counts."""
        if self._saved.done():
            return
        if isinstance(saved, Exception):
            self._saved.set_exception(saved)
        else:
            self._saved.set_result(saved)


def await_all(slots: list[Slot]) -> None:
    """Until all of these have their answers, or the time is up."""
    if waiting := [slot._offered for slot in slots if not slot._offered.done()]:
        cooperative.wait_for(asyncio.wait(waiting, timeout=WITHIN))


#: The slot of the request that is carried out here.
wanted: Final[ContextVar[Slot | None]] = ContextVar("wanted", default=None)
