"""Group commit: what several requests on an event loop ask for at one instant is carried out for all of them, as one.

Whoever comes while others are carried out waits, and then all that wait are next. Alone nobody waits for company, and
the busier it is, the more is done at a time.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from rehydrate import cooperative

#: Seconds after which the next do not wait any longer for those that are being carried out, but go beside them.
#: Measured with eight clients on two processors: two batches beside each other are smaller, and both cost more.
PUNCTUAL: Final = 0.005


class Member:
    """One request's share, of one kind; only those of a kind go together."""

    def __init__(self, kind: str) -> None:
        self.kind: Final = kind
        self.over: asyncio.Future[None] | None = None

    def told(self) -> None:
        """Whoever waits for it goes on."""
        if self.over is not None and not self.over.done():
            self.over.set_result(None)


M = TypeVar("M", bound=Member)


class Group(Generic[M]):
    """`carry_out` gets what waits of one kind, `at_most` so many. It raises nothing, and may wait cooperatively."""

    def __init__(self, carry_out: Callable[[list[M]], None], *, at_most: int) -> None:
        self._carry_out: Final = carry_out
        self._at_most: Final = at_most
        self._waiting: dict[str, list[M]] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._in_time: set[str] = set()

    @property
    def waiting(self) -> int:
        """How many wait to be carried out."""
        return sum(map(len, self._waiting.values()))

    def join(self, member: M) -> None:
        """Returns when the member was carried out. Only on the loop."""
        member.over = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(member.kind, []).append(member)
        self._go_on()
        cooperative.wait_for(member.over)

    def _go_on(self) -> None:
        """Starts on the kind of which most wait, unless others are under way and in time.

        A task begins when all those that came at this instant have joined.
        """
        kinds = [kind for kind, waiting in self._waiting.items() if waiting and kind not in self._under_way]
        if kinds and not self._in_time:
            kind = max(kinds, key=lambda kind: len(self._waiting[kind]))
            self._in_time.add(kind)
            self._under_way[kind] = asyncio.get_running_loop().create_task(self._lead(kind))

    async def _lead(self, kind: str) -> None:
        members, self._waiting[kind] = self._waiting[kind][: self._at_most], self._waiting[kind][self._at_most :]
        late = asyncio.get_running_loop().call_later(PUNCTUAL, self._late, kind)
        try:
            await cooperative.carry_out(self._carry_out, members)
        finally:
            late.cancel()
            self._in_time.discard(kind)
            del self._under_way[kind]
            self._go_on()  # first, so that the database has something to do while these are answered
            for member in members:
                member.told()

    def _late(self, kind: str) -> None:
        self._in_time.discard(kind)
        self._go_on()
