"""Agents that are killed at every point of an effect, and the network between them and the server.

What must hold after each of these is asked by the fixture `site`."""

from __future__ import annotations

import pytest

from .stage import Site, kill
from .wire import Wire

pytestmark = pytest.mark.processes


# Where an agent is killed; then: the effect, its state, how often it happened outside, the run's status.
POINTS: dict[str, tuple[str, str, int, str]] = {
    "before plan": ("crm.reserve", "executed", 1, "waiting"),
    "before crm.reserve": ("crm.reserve", "unknown", 0, "review"),
    "after crm.reserve": ("crm.reserve", "unknown", 1, "review"),
    "told crm.reserve": ("crm.reserve", "executed", 1, "waiting"),
    # One may be repeated under its key, which the outside honours; the other can be looked up. Nobody is asked.
    "before erp.order": ("erp.order", "executed", 1, "completed"),
    "after erp.order": ("erp.order", "executed", 1, "completed"),
    "after esign.send": ("esign.send", "executed", 1, "completed"),
    "after crm.free": ("crm.reserve", "compensation_unknown", 1, "review"),
}


def test_killed_at_every_point_of_an_effect(site: Site) -> None:
    """Each agent stands at a point of its own, on a run of its own; then all are killed at once."""
    runs = dict(zip(POINTS, site.open(len(POINTS)), strict=True))
    agents = {point: site.agent(run=run, stand=point) for point, run in runs.items()}
    for point, run in runs.items():
        if "erp" in point or "esign" in point or "free" in point:
            site.reaches(run, "waiting")
            site.alice.decide(run, "reject" if "free" in point else "approve")
    for agent in agents.values():
        site.stood(agent)
    kill(*(agent.process for agent in agents.values()))
    site.agent()
    site.agent()

    for point, (action, state, times, status) in POINTS.items():
        found = site.reaches(runs[point], status)
        assert site.effect(runs[point], action)["state"] == state, point
        assert len(site.done(action, runs[point])) == times, point
        kinds = {decision["kind"] for decision in found["metadata"]["decisions"]}
        assert kinds <= {"wait"}, f"{point}: a person was needed"


def test_killed_while_the_outside_is_at_it(site: Site) -> None:
    (run,) = site.open()
    site.world.journal.set_mode("crm", "reserve", "slow_before", 2, 1)
    agent = site.agent(run=run)
    site.until(lambda: not site.world.journal.modes(), "the request")
    kill(agent.process)  # the world goes on and does it all the same

    site.until(lambda: site.done("crm.reserve", run), "the reservation")
    site.reaches(run, "review", code="effect_unknown")


# -- the network


def test_the_network_is_cut_while_the_outside_is_at_it(site: Site, wire: Wire) -> None:
    """The receipt is told when the network is back: late, and still of use."""
    (run,) = site.open()
    site.agent(run=run, url=wire.url)
    site.reaches(run, "waiting")
    site.world.journal.set_mode("erp", "order", "slow", 1, 1)
    site.alice.decide(run)
    site.until(lambda: site.done("erp.order", run), "the order")
    wire.cut()
    # Without a network its lease is gone; whether the order was placed, nobody knows.
    site.until(lambda: site.effect(run, "erp.order")["state"] == "unknown", "the lapse")
    wire.mend()
    site.reaches(run, "completed")
    assert len(site.done("erp.order", run)) == 1


def test_the_network_falls_silent_and_another_agent_goes_on(site: Site, wire: Wire) -> None:
    """The first one is fenced off when it comes back, whatever it still has to say."""
    (run,) = site.open()
    cut_off = site.agent(run=run, stand="told crm.reserve", url=wire.url)
    site.stood(cut_off)
    wire.silence()
    site.until(wire.swallowed.is_set, "a heartbeat that nobody hears")
    site.agent()
    site.reaches(run, "waiting")
    wire.mend()
    assert site.look(run)["status"] == "waiting"
    assert len(site.done("crm.reserve", run)) == 1


@pytest.mark.parametrize("lost", ["answer", "request"])
def test_each_kind_of_request_of_an_agent_is_lost_once(site: Site, wire: Wire, lost: str) -> None:
    """The client sends it again under the same key; to the run it is as if nothing had been."""
    lose = wire.lose_answer if lost == "answer" else wire.lose_request
    losses = [lose("POST /api/v1/.*/rehydrate"), *(lose("POST /api/v1/runs/.*/events") for _ in range(4))]
    (run,) = site.open()
    site.agent(run=run, url=wire.url)
    site.reaches(run, "waiting")
    site.alice.decide(run)
    found = site.reaches(run, "completed")

    assert all(loss.happened.is_set() for loss in losses)
    assert found["failure_count"] == 0
    types = [event["type"] for event in site.events()[run]]
    assert types.count("checkpoint") == 2
    assert types.count("effect.started") == types.count("effect.executed") == 4
    assert types.count("lease.granted") == types.count("paused") + 1
