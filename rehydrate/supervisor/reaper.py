"""Ends what a killed supervisor left running. Imports nothing of the project: it must work whatever happened to that.

    python reaper.py STOP_FLAG

The supervisor holds the other end of standard input and writes `+<group> <signal> <level>` for each process group it
starts and `-<group>` for each that has ended. End of file means that the supervisor is gone: then a flag is raised that
tells long tasks to stop, and the groups are ended, the highest level first: the database goes after those who use it.
"""

import os
import signal
import sys
import time

PATIENCE = 8.0
"""Seconds a level gets to end by itself before it is killed."""


def main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: dict[int, tuple[int, int]] = {}
    for line in sys.stdin:
        if line.startswith("+"):
            group, number, level = line[1:].split()
            groups[int(group)] = (int(number), int(level))
        elif line.startswith("-"):
            groups.pop(int(line[1:]), None)
    if not groups and not untold():
        return
    with open(sys.argv[1], "w"):
        pass
    for level in sorted({level for _, level in groups.values()}, reverse=True):
        end({group: number for group, (number, its) in groups.items() if its == level})
    end(dict.fromkeys(untold(), signal.SIGINT))
    os.unlink(sys.argv[1])


def untold() -> set[int]:
    """The groups of all that were started with this flag's path, and are left."""
    mark = b"REHYDRATE_STOP_FLAG=" + os.fsencode(sys.argv[1])
    found = set()
    for process in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        try:
            with open(f"/proc/{process}/environ", "rb") as environment:
                if mark in environment.read().split(b"\0"):
                    found.add(os.getpgid(int(process)))
        except (OSError, ValueError):
            pass  # it has ended, it is somebody else's, or no process at all
    return found - {os.getpgid(0)}


def end(groups: dict[int, int]) -> None:
    """Asks the groups' leaders to end, waits for all of each group, and kills what is left."""
    for group, number in groups.items():
        try:
            os.kill(group, number)
        except ProcessLookupError:
            # The leader is gone; whoever it left behind is told instead.
            tell(group, number)
    left = set(groups)
    deadline = time.monotonic() + PATIENCE
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if tell(group, 0)}
    for group in left:
        tell(group, signal.SIGKILL)


def tell(group: int, number: int) -> bool:
    """False when nobody of the group is left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
