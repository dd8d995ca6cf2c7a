"""Brings everything up, in order: lock, port, database, migrations, pages, the first people, then the services."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from rehydrate import data, dsn, http1, ops, postgres, tasks
from rehydrate.node import queue
from rehydrate.supervisor import preparation, probes
from rehydrate.supervisor.service import Service, say
from rehydrate.supervisor.watcher import SELF, StartError, Stopped, Watcher

WEB_WORKERS = max(1, (os.cpu_count() or 2) // 2)
"""One for two processors: PostgreSQL works about as long for a request as Python, and the more of those that come at
one instant meet in one process, the more is done together (see `group_commit`)."""
WEB_POOL = 12
"""Connections a worker pools."""
WEB_WAITING_AGENTS, WEB_WAITING_PAGES = 560, 240
"""Long polls that may wait in a worker: those of 500 agents and 200 pages, and some more."""
WEB_THREADS = 400
"""Threads a worker, which are started when they are needed. A page that waits for news holds one, asleep and without a
connection; agents wait on the event loop, and hold none. Those above the places are for everything else, so that those
who wait never keep a decision waiting."""
WEB_CONNECTIONS = 2000
"""Clients a worker serves at one instant; more are told to come again (503)."""


@dataclass(frozen=True, kw_only=True)
class Options:
    host: str = "127.0.0.1"
    port: int = 8000
    demo: bool = True


def run(options: Options) -> int:
    """Runs until a signal comes; the exit code. Raises `StartError` and its kin with one sentence."""
    folder = data.prepare()
    with _one_at_a_time(folder) as lock:
        address = _free_address(options)
        # Settings are read already: the processes to come get what this one knows better.
        url = os.environ.get("REHYDRATE_URL") or f"http://{_shown(options.host)}:{address[1]}"
        os.environ.setdefault("REHYDRATE_URL", url)
        os.environ["REHYDRATE_SUPERVISED"] = "1"
        os.environ.setdefault("REHYDRATE_NODE", _node(folder))
        stop_flag = folder / "stopping"
        os.environ.update(REHYDRATE_DATA=str(folder), REHYDRATE_STOP_FLAG=str(stop_flag))
        watcher = Watcher(stop_flag=stop_flag, keep_open=[lock])
        watcher.listen()
        try:
            return _run(options, folder, address, watcher)
        except Stopped:
            return 0
        finally:
            say(SELF, "stopping")
            (folder / "up.json").unlink(missing_ok=True)
            watcher.stop()


def _run(options: Options, folder: Path, address: tuple[str, int], watcher: Watcher) -> int:
    public_url = os.environ["REHYDRATE_URL"].rstrip("/")
    local = f"http://{_shown(options.host)}:{address[1]}"
    with contextlib.ExitStack() as stack:
        if settings.EMBEDDED_DATABASE:
            _start_postgres(folder, watcher, stack)
        else:
            dsn.connect(settings.DATABASE_URL).close()
        preparation.migrate()
        preparation.build_catalogs()
        preparation.collect_static()
        preparation.schedule_ticks()
        preparation.first_administrator()
        demo = preparation.demo(folder) if options.demo else None

        for service in [_web(address, local), *_clusters(), *_demo(demo, folder, local)]:
            watcher.add(service)

        def when_ready() -> None:
            data.write_private(folder / "up.json", json.dumps({"pid": os.getpid(), "url": public_url}) + "\n")
            _line(f"ready: {local}")
            link = preparation.sign_in_link()
            if link:
                _line(f"sign in (once, within a day): {public_url}{link}")

        watcher.run(when_ready)
    return 0


# -- before anything is started


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[int]:
    """Holds the folder's lock. A killed predecessor's reaper holds it until it has cleared up: that is waited for."""
    path = folder / "up.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = path.read_text().strip()
                if (holder.isdigit() and _alive(int(holder))) or time.monotonic() > deadline:
                    raise StartError(
                        f"Another `up` (process {holder or 'unknown'}) is running on the data folder {folder}: "
                        "stop it, or name another folder with --data."
                    ) from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _node(folder: Path) -> str:
    """A name of its own among all that share a database: nobody else on this machine runs on this folder."""
    return f"{socket.gethostname()[:60]}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"


def _free_address(options: Options) -> tuple[str, int]:
    """The host and port to serve on; port 0 is replaced by a free one."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return options.host, int(probe.getsockname()[1])
    except socket.gaierror as error:
        raise StartError(f"The host {options.host} is not known here: {error.strerror}.") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"Port {options.port} on {options.host} is taken by another program: name another one with --port."
            ) from None
        raise StartError(f"Port {options.port} on {options.host} cannot be used: {error.strerror}.") from None


def _shown(host: str) -> str:
    """A host as it stands in an address that people open."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104 (compared, not bound)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


# -- the database


def _start_postgres(folder: Path, watcher: Watcher, stack: contextlib.ExitStack) -> None:
    server = postgres.Embedded(folder)
    with server.lock(exclusive=True):
        # Alone with it: one that still runs was left behind by a killed predecessor.
        if server.is_running():
            server.stop()
        server.initialise()
        service = watcher.add(
            Service(
                name="postgres",
                command=server.command(),
                probe=probes.postgres_answers(server),
                stop_signal=signal.SIGINT,
                stop_within=30,
                level=0,
                directory=str(folder),
            )
        )
        watcher.start(service)
        watcher.wait_until_well(service, timeout=60)
        server.create_database()
    stack.enter_context(server.lock(exclusive=False))


# -- the services


def _manage(*words: str) -> list[str]:
    return [sys.executable, "-m", "rehydrate", *words]


def _web(address: tuple[str, int], local: str) -> Service:
    host, port = address
    return Service(
        name="web",
        command=http1.command(host, port, workers=WEB_WORKERS, connections=WEB_CONNECTIONS),
        environment={
            "REHYDRATE_DB_POOL": str(WEB_POOL),
            "REHYDRATE_WEB_THREADS": str(WEB_THREADS),
            "REHYDRATE_WAITING_AGENTS": str(WEB_WAITING_AGENTS),
            "REHYDRATE_WAITING_PAGES": str(WEB_WAITING_PAGES),
        },
        probe=probes.http_ok(f"{local}/healthz"),
        directory=str(data.ROOT),
    )  # fmt: skip


def _clusters() -> list[Service]:
    return [
        Service(
            name=name,
            command=_manage("qcluster"),
            environment={"Q_CLUSTER_NAME": queue(name)},
            probe=probes.cluster_works(name, ticks=tasks.TICKS if name == "ticks" else 0),
            probe_every=1,
            patience=patience,
            stop_within=5,
            directory=str(data.ROOT),
        )
        # Each has more workers than go on for long at once: one is always free to answer.
        for name, patience in ops.CLUSTERS.items()
    ]


def _demo(demo: preparation.Demo | None, folder: Path, local: str) -> list[Service]:
    """The small outside world, and one process for each agent."""
    if demo is None:
        return []
    command = [sys.executable, "-m", "rehydrate.demo"]
    world = Service(
        name="world",
        command=[*command, "world", "--port", str(demo.world_port), "--data", str(folder / "world")],
        probe=probes.http_ok(f"{demo.world_url}/counts"),
        essential=False,
        directory=str(data.ROOT),
    )
    agents = [
        Service(
            name=flow,
            command=[*command, "agent", flow],
            environment={"REHYDRATE_URL": local, "REHYDRATE_KEY": key, "REHYDRATE_DEMO_WORLD": demo.world_url},
            essential=False,
            after=("web", "world"),
            level=2,  # while the server still takes their receipts
            directory=str(data.ROOT),
        )
        for flow, key in demo.keys.items()
    ]
    return [world, *agents]


def _line(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, flush=True)
