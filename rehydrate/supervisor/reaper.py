"""Ends what a killed supervisor left running. Imports nothing of the project: it must work whatever happened to that.

The supervisor holds the other end of standard input and writes `+<group> <signal>` for each process group it starts and
`-<group>` for each that has ended. End of file means that the supervisor is gone. Groups are ended in the opposite order
of their start, so that the database goes last.
"""

import os
import signal
import sys
import time

PATIENCE = 10.0
"""Seconds a group gets to end by itself before it is killed."""


def main() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    groups: dict[int, int] = {}
    for line in sys.stdin:
        if line.startswith("+"):
            group, number = line[1:].split()
            groups[int(group)] = int(number)
        elif line.startswith("-"):
            groups.pop(int(line[1:]), None)
    for group, number in reversed(groups.items()):
        end(group, number)


def end(group: int, number: int) -> None:
    """Asks the group to end, waits for it, and kills what is left."""
    if not tell(group, number):
        return
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if not tell(group, 0):
            return
    tell(group, signal.SIGKILL)


def tell(group: int, number: int) -> bool:
    """False when nobody of the group is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
