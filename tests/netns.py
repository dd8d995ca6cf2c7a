"""A process in a network of its own, on Linux: `python -m tests.netns run COMMAND...`, and a GET from inside of it.

As root, or where users may have namespaces of their own. Files, such as a database's socket, are shared all the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import urllib.request

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def enter_new() -> None:
    """This process has a network of its own from now on, with nothing but its loopback."""
    _call("unshare", CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def enter(pid: int) -> None:
    """This process shares the network of another."""
    for kind, flag in (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET)):
        if os.stat(f"/proc/{pid}/ns/{kind}").st_ino != os.stat(f"/proc/self/ns/{kind}").st_ino:
            with open(f"/proc/{pid}/ns/{kind}") as namespace:
                _call("setns", namespace.fileno(), flag)


def why_not() -> str | None:
    """Why it cannot be done on this machine; None when it can."""
    tried = subprocess.run(
        [sys.executable, "-m", "tests.netns", "run", sys.executable, "-c", ""], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def get(pid: int, url: str) -> tuple[int, str]:
    """(status, body) of a GET from within the network of process `pid`; status 0 where nothing answers."""
    asked = subprocess.run(
        [sys.executable, "-m", "tests.netns", "get", str(pid), url], capture_output=True, text=True, timeout=60
    )
    status, _, body = asked.stdout.partition("\n")
    return int(status or 0), body


def main(what: str, *words: str) -> None:
    if what == "run":
        enter_new()
        os.execvp(words[0], words)  # noqa: S606 (a test's own command)
    enter(int(words[0]))
    try:
        with urllib.request.urlopen(words[1], timeout=30) as answer:  # noqa: S310 (a test's own server)
            print(answer.status, answer.read().decode(), sep="\n")
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode(), sep="\n")
    except OSError:
        print(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
