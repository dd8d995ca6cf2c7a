"""Parts of the installation that are killed or stopped while agents and reviewers are at work, and all of it at once.

What must hold after each of these is asked by the fixture `site`."""

from __future__ import annotations

import signal

import psutil
import pytest

from .stage import Site, everything, kill

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("which", ["a worker", "all of it"])
def test_the_web_server_is_killed(site: Site, which: str) -> None:
    web = site.service("web")
    with site.at_work() as progress:
        progress(3)
        kill(*web.children()[:1] if which == "a worker" else [web, *web.children(recursive=True)])
        progress(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL], ids=["fast", "immediate", "killed"])
def test_postgresql_is_stopped(site: Site, number: signal.Signals) -> None:
    """Fast: it rolls back what is under way. Immediate: it drops everything and recovers at its start."""
    with site.at_work() as progress:
        progress(3)
        postgres = site.service("postgres")
        postgres.send_signal(number)
        psutil.wait_procs([postgres], timeout=30)
        progress(3)


def test_everything_is_killed_at_once_and_started_again(site: Site) -> None:
    with site.at_work() as progress:
        progress(3)
        kill(*everything(site))
        site.start_again()
        progress(3)


def test_everything_is_stopped_and_started_again(site: Site) -> None:
    with site.at_work() as progress:
        progress(3)
        assert site.up.end() == 0
        site.start_again()
        progress(3)
