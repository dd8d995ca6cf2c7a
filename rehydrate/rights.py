"""Whether what a caller was found to be still holds: rights have a number, which every change of anybody's raises.

Whoever was looked up a moment ago is taken for the same until the statement that reads the run says that rights have
another number by now. So a key that was revoked opens nothing from the next request on, and yet is not looked up anew
for each. The number is kept by the database itself (triggers, migration 0010), whoever writes.
"""

from typing import Final

from msgspec import Struct

#: The number, as a value within a statement; NULL where it is not kept, and then nothing is taken for granted.
NUMBER: Final = "(SELECT x.number FROM rehydrate_rights x WHERE x.id = 1)"


class Outdated(Exception):
    """Somebody's rights changed since the caller was looked up: nothing was done; look again."""


class Rights(Struct):
    """The number at which a caller was looked up, and whether a statement has confirmed it since."""

    number: int
    confirmed: bool = False

    def confirm(self, number: int | None) -> None:
        """Raises `Outdated` unless `number`, which was read beside the run, is still the one."""
        if number != self.number:
            raise Outdated
        self.confirmed = True
