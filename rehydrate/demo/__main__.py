"""The demo's processes: `python -m rehydrate.demo world`, `agent FLOW`, or `all` of them. `up` starts each by itself.

The agents find the ledger by REHYDRATE_URL and REHYDRATE_KEY, and the world by REHYDRATE_DEMO_WORLD.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rehydrate.client import Ledger, LedgerError, NotConfigured
from rehydrate.demo import scenarios
from rehydrate.demo.agents import NEW_RUN_EVERY, SUPPLIER_PATIENCE, Agent
from rehydrate.demo.outside import DEFAULT_URL, Outside

# The demo shows one order whose answer is lost, so that there is an unknown outcome to find out about.
LOSE_FIRST = ("supplier.place_order",)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rehydrate.demo", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    world = commands.add_parser("world", help="the outside world, as a small HTTP service")
    _world_options(world)
    agent = commands.add_parser("agent", help="one flow's agent")
    agent.add_argument("flow", choices=scenarios.FLOWS)
    agent.add_argument("--world", default=None, help=f"where the world is ({DEFAULT_URL})")
    agent.add_argument("--no-runs", action="store_true", help="open no runs, only serve those that there are")
    agent.add_argument("--supplier-patience", type=int, default=SUPPLIER_PATIENCE, metavar="SECONDS")
    agent.add_argument("--new-run-every", type=float, default=NEW_RUN_EVERY, metavar="SECONDS")
    everything = commands.add_parser("all", help="the world and the four agents")
    _world_options(everything)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.command == "world":
        return _world(options)
    if options.command == "agent":
        return _agent(options)
    return _all(options)


def _world_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--public-url", default=None, help="how a browser reaches it, when that differs")
    parser.add_argument("--data", type=Path, default=Path(".data") / "world", help="the folder of its journal")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds that doing something takes at least")


def _world(options: argparse.Namespace) -> int:
    from rehydrate.demo.world import World

    stop = _stop_event()
    try:
        world = World(
            options.data,
            host=options.host,
            port=options.port,
            latency=options.latency,
            public_url=options.public_url,
            lose_first=LOSE_FIRST,
        )
    except OSError as error:
        print(f"error: The outside world cannot listen on {options.host}:{options.port}: {error.strerror}.")
        return 1
    world.start()
    print(f"the outside world: {world.url}", flush=True)
    stop.wait()
    world.stop()
    return 0


def _agent(options: argparse.Namespace) -> int:
    try:
        ledger = Ledger(name=f"{options.flow} agent")
    except NotConfigured as error:
        print(f"error: {error}")
        return 2
    agent = Agent(options.flow, ledger, Outside(options.world), supplier_patience=options.supplier_patience)
    stop = threading.Event()
    if not options.no_runs:
        opener = _opener(agent, stop, options.new_run_every)
        opener.start()
    try:
        ledger.work(poll=5)
    except LedgerError as error:
        print(f"error: {error}")
        return 1
    finally:
        stop.set()
    return 0


def _opener(agent: Agent, stop: threading.Event, every: float) -> threading.Thread:
    return threading.Thread(target=lambda: agent.keep_busy(stop, every=every), name="opener", daemon=True)


def _all(options: argparse.Namespace) -> int:
    """Everything as processes of its own, started again when one ends; for trying the demo against any server."""
    stop = _stop_event()
    me = [sys.executable, "-m", "rehydrate.demo"]
    address = options.public_url or f"http://{options.host}:{options.port}"
    world = [*me, "world", "--host", options.host, "--port", str(options.port), "--data", str(options.data)]
    world += ["--latency", str(options.latency), *(["--public-url", options.public_url] if options.public_url else [])]
    commands = {"world": world, **{flow: [*me, "agent", flow] for flow in scenarios.FLOWS}}
    environment = {**os.environ, "REHYDRATE_DEMO_WORLD": address}
    running: dict[str, subprocess.Popen[bytes]] = {}
    not_before = dict.fromkeys(commands, 0.0)
    while not stop.is_set():
        for name, command in commands.items():
            ended = name in running and running[name].poll() is not None
            if ended:
                print(f"{name} ended ({running.pop(name).returncode}), starting it again", flush=True)
                not_before[name] = time.monotonic() + 2
            if name not in running and time.monotonic() >= not_before[name]:
                running[name] = subprocess.Popen(command, env=environment, start_new_session=True)  # noqa: S603
        stop.wait(0.5)
    for process in running.values():
        process.terminate()
    for process in running.values():
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
    return 0


def _stop_event() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


if __name__ == "__main__":
    sys.exit(main())
