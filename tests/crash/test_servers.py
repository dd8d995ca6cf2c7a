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


# -- django-q's clusters


def leaves(process: psutil.Process) -> list[psutil.Process]:
    """Those of a cluster that do its work: the processes at the ends of its tree."""
    return [child for child in process.children(recursive=True) if not child.children()]


def test_a_tick_is_killed_in_the_middle_of_its_batch(site: Site) -> None:
    runs = site.asleep(30)
    with site.database() as database:
        database.execute("LOCK TABLE rehydrate_ledgerevent IN EXCLUSIVE MODE")  # it gets as far as its first event
        site.until(
            lambda: site.sql(
                "SELECT 1 FROM pg_locks WHERE relation = 'rehydrate_ledgerevent'::regclass AND NOT granted"
            ),
            "a tick that writes",
        )
        workers = leaves(site.service("ticks"))
        kill(*workers)
        assert site.awake(runs) == 0
        database.rollback()
    site.until(lambda: site.awake(runs) == len(runs), "the next tick")
    site.woken_once(runs)
    site.call_off(runs)


def test_every_worker_is_killed_busy_or_idle(site: Site) -> None:
    """django-q2 can hang then, and look alive; timers must go on all the same."""
    for cluster in ("work", "ticks"):
        kill(*leaves(site.service(cluster)))
    runs = site.asleep(5)
    site.until(lambda: site.awake(runs) == len(runs), "the next tick")
    site.woken_once(runs)
    site.call_off(runs)
