"""The drills, really carried out; what they print; and that each of their points is found out when it does not hold."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.conf import settings
from django.utils import translation

from audit import drills as words
from rehydrate.demo.drills import CHECKS, DRILLS
from rehydrate.demo.drills.findings import Facts, checks
from rehydrate.models import ApiKey, DrillResult, Run, Workspace
from tests.conftest import HOME, ROOT, Server, _embedded, end, eventually, start_web
from tests.drilled import good_facts

Json = dict[str, Any]

# One after the other: each starts many processes.
pytestmark = pytest.mark.processes
PATIENCE = 300.0


def environment(**more: str) -> dict[str, str]:
    """An operator's at this test's database."""
    return {
        **os.environ,
        "DATABASE_URL": _embedded().url(settings.DATABASES["default"]["NAME"]),
        "LANG": "en_GB.UTF-8",
        "LC_ALL": "",
        "LC_MESSAGES": "",
        **more,
    }


def drill(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "manage.py", "drill", *words],
        cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def broken(name: str) -> str:
    return f"{sys.executable} -m tests.drill_agents {name}"


def points(result: Json) -> dict[str, bool]:
    return {check["name"]: check["passed"] for check in result["checks"]}


@pytest.fixture
def temporary() -> Path:
    """Where the drill puts what it throws away; root's PostgreSQL passes through."""
    folder = Path(tempfile.mkdtemp(dir=HOME))
    folder.chmod(0o711)
    return folder


def started_in(folder: Path) -> list[psutil.Process]:
    """Processes that have to do with this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            mentioned = [*process.cmdline(), process.environ().get("REHYDRATE_DATA", "")]
        except psutil.Error:
            continue
        if any(str(folder) in word for word in mentioned):
            found.append(process)
    return found


def test_all_three_pass_on_a_server_of_their_own_and_are_kept(transactional_db: None, temporary: Path) -> None:
    done = drill("all", "--format", "json", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["passed"] is True
    assert [result["drill"] for result in told["drills"]] == list(DRILLS)
    for result in told["drills"]:
        assert points(result) == dict.fromkeys(CHECKS, True)
        assert result["server"]["kind"] == "own"
        assert result["error"] is None

    restart, late, lost = (result["steps"] for result in told["drills"])
    killed = next(step for step in restart if step["code"] == "server_killed")
    assert killed["processes"] > 5
    assert next(step for step in restart if step["code"] == "callback_taken")["attempts"] >= 2
    assert next(step for step in late if step["code"] == "waited")["seconds"] > 8
    assert [step["code"] for step in lost].count("agent_killed") == 3

    # Nothing is left but what it found, and that is in the caller's database, not what it worked with.
    assert list(temporary.iterdir()) == []
    assert started_in(temporary) == []
    assert "The results are kept" in done.stderr
    kept = list(DrillResult.objects.order_by("started_at"))
    assert [(row.drill, row.passed, row.body) for row in kept] == [(r["drill"], True, r) for r in told["drills"]]
    assert not Run.objects.exists()

    for result in told["drills"]:
        assert_told_in_both_languages(result)


def assert_told_in_both_languages(result: Json) -> None:
    for language in ("en", "zh-hans"):
        with translation.override(language):
            for told in (words.text([result]), words.markdown([result])):
                assert result["run"]["id"] in told
                assert "%(" not in told
                for effect in result["checks"][2]["evidence"]["effects"]:
                    assert effect["receipt"] in told
            markdown = words.markdown([result])
            assert markdown.count("- [x] **") == len(CHECKS)
            assert "- [ ]" not in markdown
    with translation.override("zh-hans"):
        ours = words.title(result["drill"]), words.about(result["drill"]), *(c["title"] for c in words.checks(result))
        assert all(any("\u4e00" <= letter <= "\u9fff" for letter in said) for said in ours)


def test_against_a_running_server_it_makes_its_own_place_and_keys_there(live_server: Server) -> None:
    done = drill("restart-while-waiting", "--url", live_server.url, "--format", "markdown", LANG="zh_CN.UTF-8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("### 等待外部回调时进程重启 (`restart-while-waiting`)")
    assert done.stdout.count("- [x] ") == len(CHECKS)
    assert live_server.url in done.stdout

    place = Workspace.objects.get(slug="drills")
    assert [run.status for run in Run.objects.all()] == ["completed"]
    assert Run.objects.get().workspace == place
    assert {key.kind for key in ApiKey.objects.all()} == {"agent", "person"}
    assert not ApiKey.objects.filter(revoked_at__isnull=True).exists()
    assert DrillResult.objects.get().body["steps"][3]["code"] == "server_left_alone"


@pytest.mark.parametrize(
    ("agent", "name", "found_out"),
    [
        ("LookAlike", "restart-while-waiting", {"same_run", "checkpoint", "effects", "once"}),
        ("Headstrong", "effect-done-record-lost", {"once"}),
        ("Forgetful", "restart-while-waiting", {"effects", "once"}),
        ("Careless", "restart-while-waiting", {"checkpoint"}),
    ],
)
def test_an_agent_that_does_wrong_is_found_out(live_server: Server, agent: str, name: str, found_out: set[str]) -> None:
    done = drill(name, "--url", live_server.url, "--format", "json", "--agent", broken(agent))
    assert done.returncode == 1, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)["drills"]
    assert {point for point, passed in points(result).items() if not passed} >= found_out
    assert DrillResult.objects.get().passed is False


def test_a_drill_that_breaks_off_says_why_and_what_it_had_seen(live_server: Server) -> None:
    done = drill("late-resume-after-approval", "--url", live_server.url, "--language", "en", "--agent", broken("Dying"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no memory left" in done.stdout
    assert "✓" not in done.stdout
    assert "FAILED" in done.stdout


def test_a_running_server_is_restarted_as_its_operators_would(live_server: Server, tmp_path: Path) -> None:
    """Killed and started again in the middle, on the same data: a second web server beside the tests' own."""
    server = start_web(tmp_path / "web.log")
    again = tmp_path / "again.pid"
    script = tmp_path / "restart.py"
    script.write_text(
        "import os, signal, subprocess\n"
        f"os.killpg({server.process.pid}, signal.SIGKILL)\n"
        f"process = subprocess.Popen({list(server.process.args)!r}, env={server.environment!r}, cwd={str(ROOT)!r},\n"  # type: ignore[arg-type]
        "    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        f"open({str(again)!r}, 'w').write(str(process.pid))\n"
    )
    try:
        done = drill(
            "restart-while-waiting", "--url", server.url, "--restart", f"{sys.executable} {script}", "--format", "json"
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (result,) = json.loads(done.stdout)["drills"]
        codes = [step["code"] for step in result["steps"]]
        assert codes[2:5] == ["agent_killed", "server_killed", "server_started"]
        assert "restarted by the command" in " ".join(words.steps(result))
    finally:
        end(server.process)
        if again.exists():
            psutil.Process(int(again.read_text())).terminate()
    assert drill("--restart", "true").returncode == 2  # there is no server to restart


def test_keys_that_are_given_are_used_and_stay(live_server: Server, tmp_path: Path) -> None:
    """As against a server on another machine: a flow that nobody declared, in the workspace of the keys."""
    import io

    from django.core.management import call_command

    def key(*args: str) -> str:
        out = io.StringIO()
        call_command("issue_key", *args, stdout=out)
        return out.getvalue().strip()

    path = tmp_path / "people.toml"
    path.write_text('[workspace.default]\n[group.ops]\nmembers = ["olga"]\nroles = ["reviewer", "operator"]\n')
    call_command("apply", str(path), stdout=io.StringIO())
    agent, person = key("agent", "--name", "bot"), key("person", "--user", "olga")

    incomplete = drill("effect-done-record-lost", "--url", live_server.url, "--key", agent)
    assert incomplete.returncode == 2
    assert "--person-key" in incomplete.stderr

    done = drill("effect-done-record-lost", "--url", live_server.url, REHYDRATE_KEY=agent, REHYDRATE_PERSON_KEY=person)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == len(CHECKS)
    assert done.stdout.rstrip().endswith("The drill passed.")
    assert [run.workspace.slug for run in Run.objects.all()] == ["default"]
    assert not Workspace.objects.filter(slug="drills").exists()
    assert ApiKey.objects.filter(revoked_at__isnull=True).count() == 2


def test_a_server_that_is_not_there_is_one_sentence(transactional_db: None) -> None:
    done = drill("--url", "http://127.0.0.1:9", "--key", "rhk_a_b", "--person-key", "rhk_c_d")
    assert done.returncode == 2
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not DrillResult.objects.exists()


def test_ctrl_c_in_the_middle_leaves_nothing_behind(transactional_db: None, temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "manage.py", "drill", "late-resume-after-approval"],
        cwd=ROOT, env=environment(TMPDIR=str(temporary)), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        seen = next((line for line in process.stderr if line.startswith("Drill: ")), "")
        process.send_signal(signal.SIGINT)
        told, said = process.communicate(timeout=PATIENCE)
    assert seen, said
    assert (process.returncode, told) == (130, "")
    assert "everything that was started has ended" in said
    assert started_in(temporary) == []
    assert list(temporary.iterdir()) == []
    assert not DrillResult.objects.exists()


def test_killed_itself_it_leaves_nobody_behind(temporary: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from rehydrate.demo.drills.processes import Household;"
        "member = Household(Path(sys.argv[1])).start(['sleep', '600'], dict(os.environ));"
        "print(member.pid, flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(temporary)], cwd=ROOT, capture_output=True, text=True)
    left = int(done.stdout)
    eventually(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == "zombie", what="its end")


def test_without_an_installation_it_says_that_nothing_is_kept(live_server: Server, open_folder: Path) -> None:
    """The database is then the data folder's own, and there is none."""
    from rehydrate.management.commands import drill as command

    env = {name: value for name, value in environment().items() if name != "DATABASE_URL"}
    code = "import django; django.setup(); from rehydrate.management.commands.drill import _keep; print(_keep([]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**env, "REHYDRATE_DATA": str(open_folder / "data")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "not kept" in done.stdout
    assert not (open_folder / "data").exists()
    assert command.COULD_NOT == 2


# --- judging


def set_in(facts: Facts, *path: Any) -> Facts:
    """The facts with the last of `path` in the place that the rest of it names."""
    changed = copy.deepcopy(facts)
    *place, name, value = path
    holder: Any = changed
    for step in place:
        holder = holder[step] if isinstance(holder, dict | list) else getattr(holder, step)
    if isinstance(holder, dict | list):
        holder[name] = value
    else:
        setattr(holder, name, value)
    return changed


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        (("back", "run", "r2"), "same_run"),
        (("back", "found", "r2"), "same_run"),
        (("runs", 2), "same_run"),
        (("back", "lease", "epoch", 1), "same_run"),
        (("after", "status", "waiting"), "same_run"),
        (("back", "checkpoint", "seq", 8), "checkpoint"),
        (("back", "checkpoint", "ref", "drill://x/draft"), "checkpoint"),
        (("stage", "paying"), "checkpoint"),
        (("back", "effects", 0, "state", "unknown"), "effects"),
        (("back", "effects", 0, "receipt", None), "effects"),
        (("back", "effects", 0, "receipt", "id", "CRM-2"), "effects"),
        (("after", "effects", 0, "attempt", 2), "effects"),
        (("back", "effects", []), "effects"),
        (("verdicts", 0, "found", ["review", ["human_gate"]]), "verdict"),
        (("verdicts", []), "verdict"),
        (("touched", "payments.pay", 2), "once"),
        (("touched", "payments.pay", 0), "once"),
        (("touched", "mail.send", 1), "once"),
    ],
)
def test_each_point_is_lost_by_what_it_is_about_alone(wrong: tuple[Any, ...], fails: str) -> None:
    assert all(check["passed"] for check in checks(good_facts()))
    found = checks(set_in(good_facts(), *wrong))
    assert [check["name"] for check in found if not check["passed"]] == [fails]


def test_what_was_not_seen_has_not_passed_and_reads_all_the_same() -> None:
    found = checks(Facts(moments=3))
    assert not any(check["passed"] for check in found)
    result: Json = {
        "drill": DRILLS[0], "passed": False, "started_at": "2026-11-29T12:00:00+00:00", "seconds": 1.0,
        "version": "1", "server": {"kind": "own", "url": "http://x"}, "run": None, "checks": found, "steps": [],
        "error": "it did not begin",
    }  # fmt: skip
    for say in (words.text, words.markdown):
        told = say([result])
        assert "it did not begin" in told
        assert "None" not in told
    assert words.markdown([result]).count("- [ ] ") == len(CHECKS)


def test_every_step_moment_and_point_has_words() -> None:
    source = "".join(path.read_text() for path in (ROOT / "rehydrate" / "demo" / "drills").glob("*.py"))
    import re

    steps = set(re.findall(r'\.step\(\s*"(\w+)"', source))
    moments = set(re.findall(r'\.expect\(\s*"(\w+)"', source))
    assert steps
    assert steps - set(words._STEPS) == set()
    assert moments == set(words._MOMENTS)
    assert set(CHECKS) == set(words._CHECKS) == set(words._EVIDENCE)
    assert set(DRILLS) == set(words._TITLES) == set(words._ABOUT)
