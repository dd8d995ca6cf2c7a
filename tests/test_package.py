"""What `pip install rehydrate` puts on an agent's machine: the client with its types, and no needs of the server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT, free_port

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git has, with the backend that is installed: no network."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if name.partition("/")[0] not in ("tests", "docs") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir"]
    subprocess.run([*build, str(folder), str(source)], capture_output=True, check=True)
    (built,) = folder.glob("rehydrate-*.whl")
    return built


@pytest.fixture(scope="module")
def machine(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel and what its own metadata requires, as an installer would put it there."""
    folder = tmp_path_factory.mktemp("machine")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    libraries = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (installed,) = Distribution.discover(name="rehydrate", path=[str(libraries)])
    for needed in required(installed.requires or []):
        for file in needed.files or []:
            if ".." not in file.parts:
                (libraries / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), libraries / file)
    return folder


def required(lines: list[str], seen: set[str] | None = None) -> Iterator[Distribution]:
    """The distributions that these requirements name, and theirs; extras are not asked for."""
    seen = set() if seen is None else seen
    for requirement in map(Requirement, lines):
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        found = distribution(requirement.name)
        yield found
        yield from required(found.requires or [], seen)


def run(machine: Path, *command: str) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    program, *words = command
    return subprocess.run(
        [str(machine / "bin" / program), *words], cwd=machine, env=kept, capture_output=True, text=True, check=False
    )


def test_the_client_works_where_there_is_no_django(machine: Path) -> None:
    code = "import rehydrate.client as c, importlib.util as u; print(c.AsyncLedger.__name__, u.find_spec('django'))"
    done = run(machine, "python", "-c", code)
    assert done.stdout == "AsyncLedger None\n", done.stderr


def test_the_doctor_comes_along(machine: Path) -> None:
    done = run(machine, "rehydrate", "doctor", f"http://127.0.0.1:{free_port()}", "--key", "k")
    assert done.returncode == 1, done.stderr
    assert "Nothing listens there" in done.stdout


def test_a_command_of_the_server_says_what_to_install(machine: Path) -> None:
    done = run(machine, "rehydrate", "up")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install 'rehydrate[server]'")


def test_the_wheel_is_typed_and_has_what_the_server_shows(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    assert {"rehydrate/client/py.typed", "rehydrate/_web/templates/base.html", "approvals/urls.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/"))]
