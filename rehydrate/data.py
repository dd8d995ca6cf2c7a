"""The data folder: where it is, its version, its secrets, who is running on it. No Django here, and no database."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = 1
"""Grows when an older program could no longer read the folder."""


class DataFolderError(Exception):
    """The folder cannot be used; the message is one sentence for whoever started the program."""


@dataclass(frozen=True)
class Secrets:
    """`field_keys` encrypt what flows name secret: the first one encrypts, all of them decrypt."""

    secret_key: str
    field_keys: tuple[str, ...]

    @classmethod
    def generate(cls) -> Secrets:
        import base64

        field_key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        return cls(secret_key=secrets.token_urlsafe(50), field_keys=(field_key,))

    def dump(self) -> str:
        return json.dumps({"secret_key": self.secret_key, "field_keys": list(self.field_keys)}, indent=2) + "\n"


def folder() -> Path:
    """`REHYDRATE_DATA`; else `.data` beside `manage.py`; for an installed distribution, the user's own data folder."""
    named = os.environ.get("REHYDRATE_DATA")
    if named:
        return Path(named).expanduser().absolute()
    if (ROOT / "manage.py").exists():
        return ROOT / ".data"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "rehydrate"


def prepare() -> Path:
    """The folder, made and checked, with its version and secrets written. Raises `DataFolderError`."""
    path = folder()
    try:
        if not path.exists():
            # Every file inside is for the owner alone; root's folder lets the account through that PostgreSQL runs as.
            path.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)
        _check_version(path)
        if not (path / "secrets.json").exists():
            _write_once(path / "secrets.json", Secrets.generate().dump())
    except OSError as error:
        raise DataFolderError(f"The data folder {path} cannot be used: {error.strerror}.") from error
    return path


def secrets_file() -> Path:
    """Those of the embedded database are this folder's own; those of another are shared by all servers on it."""
    return folder() / ("secrets.shared.json" if os.environ.get("DATABASE_URL") else "secrets.json")


def given_secrets() -> Secrets | None:
    """From the environment, when it names both."""
    secret_key = os.environ.get("REHYDRATE_SECRET_KEY")
    field_keys = os.environ.get("REHYDRATE_FIELD_KEYS", "").replace(",", " ").split()
    return Secrets(secret_key, tuple(field_keys)) if secret_key and field_keys else None


def load_secrets() -> Secrets:
    """From the environment, else from the folder; before the first start, fresh ones that are kept nowhere."""
    if (given := given_secrets()) is not None:
        return given
    with contextlib.suppress(FileNotFoundError, PermissionError):
        kept = json.loads(secrets_file().read_text())
        return Secrets(str(kept["secret_key"]), tuple(str(key) for key in kept["field_keys"]))
    return Secrets.generate()


def write_private(path: Path, text: str) -> None:
    """Replaces `path` in one step; nobody but the owner can read it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def running_url() -> str | None:
    """Where the server that was started last on this folder answers, if it has said so."""
    try:
        url = json.loads((folder() / "up.json").read_text())["url"]
    except (OSError, ValueError, KeyError):
        return None
    return str(url)


def _check_version(path: Path) -> None:
    marker = path / "VERSION"
    if not marker.exists():
        _write_once(marker, f"{VERSION}\n")
    text = marker.read_text().strip()
    if not text.isdigit():
        raise DataFolderError(f"The data folder {path} has a VERSION file that holds no number.")
    if int(text) > VERSION:
        raise DataFolderError(
            f"The data folder {path} was written by a newer version of rehydrate (format {text}, this one reads "
            f"{VERSION}): update the program, or name another folder with --data."
        )


def _write_once(path: Path, text: str) -> None:
    """Of several processes that get here first, one writes and the others keep what it wrote."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    write_private(draft, text)
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
