"""Group commit: what several threads ask for at one instant, one of them carries out for all, as one.

Whoever comes while another is at it waits; whoever is at it next takes all that waits. Alone nobody waits for company,
and the busier it is, the more is done at a time. What is carried out, and how, is for the caller to say.
"""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar


class Member:
    """One thread's share. `over` once it was carried out, or was left for its thread to do alone."""

    def __init__(self) -> None:
        self.over = False
        self._turn = threading.Lock()
        self._turn.acquire()

    def wait(self) -> None:
        """Until it is over, or until it is this thread's turn to lead."""
        self._turn.acquire()

    def wake(self) -> None:
        self._turn.release()


M = TypeVar("M", bound=Member)


class Group(Generic[M]):
    """`carry_out` gets what waits, `at_most` so many, one call at a time; it raises nothing."""

    def __init__(self, carry_out: Callable[[list[M]], None], *, at_most: int) -> None:
        self._carry_out: Final = carry_out
        self._at_most: Final = at_most
        self._lock = threading.Lock()
        self._waiting: list[M] = []
        self._led = False

    @property
    def waiting(self) -> int:
        """How many wait to be carried out."""
        return len(self._waiting)

    def join(self, member: M) -> None:
        """Returns when the member is over."""
        with self._lock:
            leads = not self._led
            self._led = True
            if not leads:
                self._waiting.append(member)
        if not leads:
            member.wait()
        if not member.over:
            self._lead(member)

    def _lead(self, own: M) -> None:
        with self._lock:
            others, self._waiting = self._waiting[: self._at_most - 1], self._waiting[self._at_most - 1 :]
        try:
            self._carry_out([own, *others])
        finally:
            own.over = True
            for member in others:
                member.over = True
                member.wake()
            with self._lock:
                heir = self._waiting.pop(0) if self._waiting else None
                self._led = heir is not None
            if heir is not None:
                heir.wake()
