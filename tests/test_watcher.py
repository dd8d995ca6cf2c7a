"""The supervisor's loop, on small processes of the tests' own: started again when they die or hang, ended in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rehydrate.supervisor import reaper
from rehydrate.supervisor.service import Service
from rehydrate.supervisor.watcher import StartError, Watcher

pytestmark = pytest.mark.processes

SAYS_AND_STAYS = "import time; print('here', flush=True); time.sleep(60)"


@pytest.fixture
def watcher(tmp_path: Path) -> Iterator[Watcher]:
    made = Watcher(stop_flag=tmp_path / "stopping")
    yield made
    made.stop()


def service(name: str, code: str, **options: object) -> Service:
    return Service(name=name, command=[sys.executable, "-c", code], **{"stop_within": 2.0, **options})  # type: ignore[arg-type]


def run_until(watcher: Watcher, done: Callable[[], bool], *, within: float = 15) -> bool:
    """Runs the loop; True once it was ready. Fails when `done` does not come about."""
    ready: list[float] = []
    deadline = time.monotonic() + within
    look_after = watcher._look_after

    def with_an_eye_on(service: Service, *, ready: bool) -> None:
        look_after(service, ready=ready)
        watcher.stopping = watcher.stopping or done() or time.monotonic() > deadline

    watcher._look_after = with_an_eye_on  # type: ignore[method-assign]
    watcher.run(lambda: ready.append(time.monotonic()))
    assert done(), "it did not come about"
    return bool(ready)


def test_output_is_passed_on_under_the_services_name(watcher: Watcher, capsys: pytest.CaptureFixture[str]) -> None:
    watcher.add(
        service("talker", "import sys; print('to out'); print('to err', file=sys.stderr); import time; time.sleep(60)")
    )

    out: list[str] = []

    def both() -> bool:
        out.append(capsys.readouterr().out)
        return "to out" in "".join(out) and "to err" in "".join(out)

    run_until(watcher, both)
    assert {"talker            | to out", "talker            | to err"} <= set("".join(out).splitlines())


def test_what_dies_is_started_again_later_each_time(watcher: Watcher) -> None:
    one = watcher.add(service("mortal", "pass", essential=False))
    pauses: list[float] = []

    def three_times() -> bool:
        if one.process is None and one.failures > len(pauses):
            pauses.append(one.start_at - time.monotonic())
        return len(pauses) == 3

    run_until(watcher, three_times)
    assert pauses[0] < pauses[1] < pauses[2]


def test_what_falls_silent_is_ended_and_started_again(watcher: Watcher, tmp_path: Path) -> None:
    well = tmp_path / "well"
    well.touch()

    def probe() -> None:
        if not well.exists():
            raise RuntimeError("no answer")

    one = watcher.add(service("silent", SAYS_AND_STAYS, probe=probe, probe_every=0.05, patience=0.5))
    first: list[int] = []

    def another_process() -> bool:
        if one.well and not first:
            assert one.process is not None
            first.append(one.process.pid)
            well.unlink()
        return bool(first) and one.process is not None and one.process.pid != first[0]

    assert run_until(watcher, another_process)


def test_nobody_is_taken_for_silent_who_was_not_asked(watcher: Watcher) -> None:
    """As the database while its tables are brought up to date: the loop stands still for as long as that takes."""
    one = watcher.add(service("patient", SAYS_AND_STAYS, probe=lambda: None, probe_every=0.9, patience=0.5))
    watcher.start(one)
    watcher.wait_until_well(one, timeout=15)
    process, well_at = one.process, one.well_at or 0.0
    time.sleep(1)  # longer than its patience: this is what happens, not something to wait for
    run_until(watcher, lambda: (one.well_at or 0.0) > well_at)
    assert one.process is process
    assert one.ending_since is None


def test_one_that_ignores_the_request_to_end_is_killed(watcher: Watcher, tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    one = watcher.add(service("deaf", deaf, stop_within=0.3))
    run_until(watcher, lambda: one.well)
    process = one.process
    assert process is not None

    before = time.monotonic()
    watcher.stop()
    assert process.returncode == -9
    assert time.monotonic() - before < 5


def test_the_lowest_level_goes_last(watcher: Watcher, tmp_path: Path) -> None:
    log = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        f"def end(*_):\n    time.sleep({{delay}}); open({str(log)!r}, 'a').write('{{name}} '); sys.exit()\n"
        "signal.signal(15, end); print('up', flush=True)\nwhile True: time.sleep(1)"
    )
    base = watcher.add(service("base", code.format(name="base", delay=0), level=0))
    user = watcher.add(service("user", code.format(name="user", delay=0.3)))
    run_until(watcher, lambda: base.well and user.well)
    watcher.stop()
    assert log.read_text() == "base ".join(["user ", ""])


def test_an_essential_service_that_never_stands_ends_the_start(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rehydrate.supervisor.service.FIRST_PAUSE", 0.01)
    watcher.add(service("broken", "raise SystemExit(3)"))
    with pytest.raises(StartError, match=r"broken ended 5 times at its start \(exit 3\)"):
        watcher.run(lambda: pytest.fail("it was never ready"))


def test_a_broken_extra_does_not_hold_up_the_rest(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rehydrate.supervisor.service.FIRST_PAUSE", 0.01)
    main = watcher.add(service("main", SAYS_AND_STAYS))
    extra = watcher.add(service("extra", "raise SystemExit(3)", essential=False))
    assert run_until(watcher, lambda: main.well and extra.failures >= 3)


def test_one_waits_for_those_it_comes_after(watcher: Watcher) -> None:
    first = watcher.add(service("first", SAYS_AND_STAYS))
    second = watcher.add(service("second", SAYS_AND_STAYS, after=("first",)))
    seen: list[bool] = []

    def both() -> bool:
        if second.process is not None and not seen:
            seen.append(first.well)
        return second.well

    run_until(watcher, both)
    assert seen == [True]


def test_one_that_was_started_as_the_supervisor_was_killed_is_ended_though_the_reaper_was_not_told(
    tmp_path: Path,
) -> None:
    def started(*command: str, flag: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "REHYDRATE_STOP_FLAG": str(flag)}
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)

    flag = tmp_path / "stopping"
    waits = "import sys; sys.stdin.read()"
    with contextlib.ExitStack() as stack:
        told, untold, of_another = (
            stack.enter_context(started(sys.executable, "-c", waits, flag=its))
            for its in (flag, flag, tmp_path / "another")
        )
        reaps = stack.enter_context(started(sys.executable, "-I", reaper.__file__, str(flag), flag=flag))
        assert reaps.stdin is not None
        with reaps.stdin as gone:
            gone.write(f"+{told.pid} {int(signal.SIGTERM)} 1\n".encode())
        assert (told.wait(10), untold.wait(10)) == (-signal.SIGTERM, -signal.SIGINT)
        assert reaps.wait(30) == 0
        assert not flag.exists()
        assert of_another.poll() is None
