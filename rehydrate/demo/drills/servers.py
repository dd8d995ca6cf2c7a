"""What is drilled: a server of the drill's own on a folder that is thrown away, or one that runs already."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import httpx

from rehydrate import __version__, data
from rehydrate.demo.drills import FLOW, REVIEWER, WORKSPACE
from rehydrate.demo.drills.processes import PATIENCE, DrillError, Household, Spoken, eventually

Kind = Literal["own", "given"]
FLOWS = Path(__file__).with_name("flows.toml")


@dataclass(frozen=True)
class Keys:
    """Of the agent that is drilled, and of the person who decides and reconciles."""

    agent: str
    person: str


class Server(Protocol):
    kind: Kind
    url: str
    version: str
    keys: Keys

    def kill(self) -> int:
        """Ends it as a power cut would; how many processes that were. 0: it cannot be killed from here."""

    def start(self) -> None:
        """Starts it again on the same data; comes back when it answers."""


class OwnServer:
    """`manage.py up` in `folder`, on a free port, and all that belongs to it. Nothing of the user's is touched."""

    kind: Kind = "own"
    version = __version__

    def __init__(self, folder: Path, household: Household) -> None:
        self._data = folder / "data"
        self._household = household
        self._port = 0
        self._up: Spoken | None = None
        self.url = ""
        self.start()
        self.keys = make_keys(self._environment())

    def _environment(self) -> dict[str, str]:
        # Static files as they lie in the tree: nobody will look at a page.
        return clean_environment(REHYDRATE_DATA=str(self._data), REHYDRATE_STATIC="source")

    def start(self) -> None:
        command = [*manage(), "up", "--data", str(self._data), "--port", str(self._port), "--no-demo"]
        self._up = self._household.start(command, self._environment(), level=0)
        self.url = self._up.hear(_ready, what="the server's start", within=2 * PATIENCE)
        self._port = int(self.url.rpartition(":")[2])

    def kill(self) -> int:
        assert self._up is not None
        return self._up.kill()


def _ready(line: str) -> str | None:
    found = re.match(r"ready: (http://\S+)$", line)
    return found[1] if found else None


class GivenServer:
    """One that runs already. It is not ours to kill: `restart`, a command, does to it what its operators would."""

    kind: Kind = "given"

    def __init__(self, url: str, keys: Keys, *, restart: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.keys = keys
        self._restart = restart
        self.version = self._health()

    def _health(self) -> str:
        try:
            answer = httpx.get(f"{self.url}/healthz", timeout=5, trust_env=False)
            return str(answer.raise_for_status().json()["version"])
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise DrillError(f"{self.url} does not answer as a server of this kind does: {error}") from error

    def kill(self) -> int:
        if self._restart is None:
            return 0
        done = subprocess.run(shlex.split(self._restart), capture_output=True, text=True, check=False)
        if done.returncode:
            raise DrillError(f"{self._restart} failed (exit {done.returncode}): {done.stderr.strip()[-300:]}")
        return 1

    def start(self) -> None:
        def answers() -> bool:
            try:
                self._health()
            except DrillError:
                return False
            return True

        eventually(answers, what="the server's return")


# -- keys


def make_keys(environment: Mapping[str, str]) -> Keys:
    """The drills' workspace, flow and people, and fresh keys, by the commands that an operator would use."""
    run_command(environment, "apply", str(FLOWS))
    agent = run_command(
        environment, "issue_key", "agent", "--workspace", WORKSPACE, "--name", "drill agent", "--flow", FLOW
    )
    return Keys(agent, run_command(environment, "issue_key", "person", "--user", REVIEWER, "--name", "drill"))


def revoke_keys(environment: Mapping[str, str], keys: Keys) -> None:
    for key in (keys.agent, keys.person):
        run_command(environment, "revoke_key", key)


def run_command(environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        [*manage(), *words], env=dict(environment), cwd=data.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DrillError(f"`{words[0]}` failed: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()


def manage() -> list[str]:
    return [sys.executable, "-m", "rehydrate"]


def clean_environment(**more: str) -> dict[str, str]:
    """This process' environment without what leads to the user's own server and data."""
    ours = ("REHYDRATE_", "DATABASE_URL", "Q_CLUSTER_NAME")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONUNBUFFERED": "1", **more}
