"""What all tests share: one real PostgreSQL for a session, a clock that can be moved, a real web server.

Django reads its settings once, so the environment below is set when this file is imported, before they are read.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import datetime as dt
import http.client
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Nothing of a test outlives its session: no need to wait for the disk.
FAST_AND_LOOSE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def _home() -> Path:
    """A folder for the session; xdist's workers inherit the one that their controller made."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return Path(os.environ["REHYDRATE_TEST_HOME"])
    home = Path(tempfile.mkdtemp(prefix="rehydrate-tests-"))
    if os.geteuid() == 0:
        home.chmod(0o711)  # root's PostgreSQL runs as somebody else, who passes through
    atexit.register(_clear_up, home)
    return home


def _clear_up(home: Path) -> None:
    """The server was stopped by the last worker, unless that one was killed."""
    from rehydrate.postgres import Embedded

    server = Embedded(home)
    if server.is_running():
        server.stop()
    shutil.rmtree(home, ignore_errors=True)


def _embedded() -> Any:
    from rehydrate.postgres import Embedded

    return Embedded(HOME, settings=FAST_AND_LOOSE)


HOME = _home()
for _name in [name for name in os.environ if name.startswith("REHYDRATE_") or name == "Q_CLUSTER_NAME"]:
    del os.environ[_name]
sys.path.insert(0, str(ROOT))
os.environ.update(
    REHYDRATE_TEST_HOME=str(HOME),
    REHYDRATE_DATA=str(HOME / "data"),
    REHYDRATE_URL="http://testserver",
    REHYDRATE_STATIC="source",
    REHYDRATE_SECRET_KEY="for tests only, and long enough to be taken for a real one: 0123456789",
    REHYDRATE_FIELD_KEYS="MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    DATABASE_URL=_embedded().url(),
    DJANGO_SETTINGS_MODULE="rehydrate.settings",
)

from django.conf import settings  # noqa: E402
from django.utils import translation  # noqa: E402

assert settings.configured or settings.DATABASES  # read now; pytest-django sets Django up when it finds them read


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Says what the machine lacks, instead of letting each browser test fail in its own words."""
    if CHROMIUM is None and any(item.get_closest_marker("browser") for item in items):
        raise pytest.UsageError("The browser tests need Chromium: apt-get install chromium")


# -- the database


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """The session's own server: the first worker starts it, the last one out stops it."""
    server = _embedded()
    with server.in_use():
        yield server

        from rehydrate import wakeups

        wakeups.listener().stop()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None, postgres_server: Any) -> None:
    """pytest-django's hook before it makes a worker's database: the server must run by then."""
    from django.db.backends.postgresql.creation import DatabaseCreation
    from django.db.backends.postgresql.operations import DatabaseOperations

    from rehydrate import catalogs

    catalogs.compile_stale(settings.LOCALE_PATHS)
    empty = DatabaseOperations.execute_sql_flush

    def empty_past_the_triggers(self: Any, statements: Any) -> None:
        """The database refuses to empty its history, as it should; between two tests it must."""
        empty(self, ["SET LOCAL session_replication_role = replica", *statements])

    def drop(self: Any, name: str, verbosity: int) -> None:
        """The session of a web server that has just ended may be a moment late to go; it must not keep the database."""
        with self._nodb_cursor() as cursor:
            cursor.execute(f"DROP DATABASE {self.connection.ops.quote_name(name)} WITH (FORCE)")

    DatabaseOperations.execute_sql_flush = empty_past_the_triggers  # type: ignore[method-assign, assignment]
    DatabaseCreation._destroy_test_db = drop  # type: ignore[attr-defined]


@pytest.fixture
def open_folder() -> Path:
    """A folder for a server of the test's own: unlike `tmp_path`, one that root's PostgreSQL may pass through."""
    folder = Path(tempfile.mkdtemp(dir=HOME))
    if os.geteuid() == 0:
        folder.chmod(0o711)
    return folder


# -- the clock


class Clock:
    """Moves `rehydrate.clock`. Real time goes on beneath it."""

    def __init__(self) -> None:
        from rehydrate import clock

        self._module: Any = clock

    def advance(self, *, seconds: float = 0, **parts: float) -> dt.datetime:
        """Later by that much (any words of `timedelta`); the time it is then."""
        self._module.offset += dt.timedelta(seconds=seconds, **parts)
        return self.now()

    def move_to(self, moment: dt.datetime) -> dt.datetime:
        self._module.offset += moment - self._module.now()
        return self.now()

    def now(self) -> dt.datetime:
        moment: dt.datetime = self._module.now()
        return moment


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Needs a database, as `now()` asks it. Back to the real time at the end."""
    moved = Clock()
    try:
        yield moved
    finally:
        moved._module.offset = dt.timedelta(0)


# -- real processes

T = TypeVar("T")


def _ports() -> Iterator[int]:
    """Below those that the kernel gives to whoever names none: what is killed finds its port free when it comes again.
    Each process that runs tests has a stretch of its own, and begins anywhere in it."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(given.read_text().split()[0]) if given.exists() else 32768
    share = (end - 16384) // 8
    first = 16384 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8 * share
    start = secrets.randbelow(share)
    return (first + number % share for number in itertools.count(start))


_next_port = _ports()


def free_port() -> int:
    """A port that nobody has, and that nobody gets who does not ask for this one."""
    while True:
        port = next(_next_port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    """What it gives, from a thread of its own: where a browser was driven, this thread has a loop that runs already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def eventually(ask: Callable[[], T | None], *, within: float = 20.0, what: str = "it") -> T:
    """The first true answer; fails when none comes in time."""
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {within:.0f} s")
        time.sleep(0.02)


@dataclass
class Server:
    """A real web server on this test's database."""

    url: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.url


def start_web(log: Path, *, threads: int = 64, workers: int = 1, **environment: str) -> Server:
    """The web server as `up` starts it, on a free port, answering; the caller ends it."""
    port = free_port()
    name = settings.DATABASES["default"]["NAME"]
    env = {
        **os.environ,
        "DATABASE_URL": _embedded().url(name),
        "REHYDRATE_URL": f"http://127.0.0.1:{port}",
        "REHYDRATE_DB_POOL": "8",
        "REHYDRATE_WEB_THREADS": str(threads),
        "REHYDRATE_WAITING_AGENTS": "24",
        "REHYDRATE_WAITING_PAGES": "24",
        **environment,
    }
    from rehydrate import http1

    command = http1.command("127.0.0.1", port, workers=workers)
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", port, process, log, env)

    def answers() -> bool:
        assert process.poll() is None, f"the web server ended:\n{log.read_text()}"
        try:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            client.request("GET", "/healthz")
            return client.getresponse().status == 200
        except OSError:
            return False
        finally:
            client.close()

    eventually(answers, what="the web server")
    return server


@pytest.fixture(scope="session")
def loop_servers_own(django_db_setup: None, django_db_blocker: Any) -> Iterator[tuple[Any, list[str]]]:
    """The web server in this process, and what it remembered wrongly."""
    import uvicorn
    from django.db import connections

    from rehydrate import http1, sql
    from rehydrate.api import lane
    from rehydrate.memory import memory
    from rehydrate.wsgi import application

    def in_a_thread(environ: Any, start_response: Any) -> Any:
        try:
            return application(environ, start_response)
        finally:
            connections.close_all()  # there is no pool here

    front = lane.on_the_loop(lane.in_threads(in_a_thread, 64))
    config = uvicorn.Config(
        front,
        port=free_port(),
        http=http1.Protocol,
        ws="none",
        log_level="error",
        lifespan="off",
        loop="asyncio",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([config.bind_socket()],))  # as one of several workers
    thread.start()
    eventually(lambda: server.started, what="the web server")
    misremembered: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "keep", _compared(memory, misremembered))
        yield server, misremembered
    server.should_exit = True
    thread.join(30)
    sql.own_connections.close()


def _compared(memory: Any, misremembered: list[str]) -> Callable[[Any, Any], None]:
    """What the server remembers of a run is what it would read."""
    from rehydrate import loading

    original = memory.keep

    def keep(change: Any, run: Any) -> None:
        original(change, run)
        known, read = memory._runs.get(run.id), loading.load_run(loading.Wanted(ids=[run.id]))
        if known is not None and read is not None and read.revision == known.revision and read.state != known.state:
            misremembered.append(f"remembered: {known.state}\n  and read: {read.state}")

    return keep


@pytest.fixture
def loop_server(loop_servers_own: tuple[Any, list[str]]) -> Iterator[str]:
    """The address of the web server in this process, with its event loop and its threads, on this process's database.

    For tests with `transaction=True`.
    """
    server, misremembered = loop_servers_own
    yield f"http://127.0.0.1:{server.config.port}"
    assert not misremembered, misremembered.pop()


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process and its group, by force when it will not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)


@pytest.fixture(scope="session")
def web_server(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of a worker; use `live_server`, which cleans the tables in between."""
    server = start_web(tmp_path_factory.mktemp("web") / "web.log")
    yield server
    end(server.process)


@pytest.fixture
def live_server(transactional_db: None, web_server: Server) -> Server:
    """Real HTTP: `.url`, on the test's own tables, which are emptied afterwards. In place of pytest-django's."""
    return web_server


@pytest.fixture(autouse=True)
def _language() -> Iterator[None]:
    """A page that was asked for in this process leaves its language behind: not for the next test."""
    yield
    translation.deactivate()


@pytest.fixture(autouse=True)
def _live_server_helper() -> None:
    """pytest-django's helper for its own `live_server`, which ours replaces."""
