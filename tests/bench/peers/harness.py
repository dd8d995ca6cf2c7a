"""Drives one peer: N clients in one or two processes do cycles for some seconds, after a warm-up.

A peer's `make(clients)` is called in each process and gives `(cycle, close)`; `cycle(k)` does one whole cycle for
client k and returns the seconds of its parts. Where `make` is a coroutine function, `cycle` and `close` are coroutines.

Whoever started this measures what the machine does meanwhile, so it is told: the line `begin` is printed before the
measured part and `end` after it, and each time one line is read from standard input before things go on.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import inspect
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.bench.plain import clock, percentiles, shares

Parts = dict[str, float]
Make = Callable[[int], Any]
PATIENCE = 60.0


@dataclass(frozen=True)
class Options:
    """`database` is a libpq address of an empty database; times are in seconds; `n` is the number of timers."""

    database: str
    clients: int = 1
    seconds: float = 6
    warm: float = 1.5
    n: int = 5000


def options(words: list[str]) -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", required=True)
    for name, kind in (("clients", int), ("seconds", float), ("warm", float), ("n", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Options, name))
    return Options(**vars(parser.parse_args(words)))


def signal(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


def report(packages: tuple[str, ...], **found: Any) -> None:
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({**found, "versions": versions}), flush=True)


def drive(given: Options, make: Make, packages: tuple[str, ...]) -> None:
    """Measures and reports. Errors are reported, with what was done until then, and never hidden."""
    context = multiprocessing.get_context("fork")
    lines, processes = [], []
    for share in shares(given.clients):
        ours, theirs = context.Pipe()
        process = context.Process(target=_process, args=(make, share, given, theirs), daemon=True)
        process.start()
        lines.append(ours)
        processes.append(process)
    words = [_hear(line, given.warm) for line in lines]
    errors = [error for word in words if word != "ready" for error in word["errors"]]
    found: list[dict[str, Any]] = []
    took = 1.0
    signal("begin")
    if not errors:
        begun = clock()
        for line in lines:
            line.send("go")
        found = [_hear(line, given.seconds) for line in lines]
        took = clock() - begun
    signal("end")
    for line, process in zip(lines, processes, strict=True):
        if process.is_alive() and not errors:
            line.send("leave")
            process.join(15)
        if process.is_alive():
            process.kill()
    errors += [error for one in found for error in one["errors"]]
    cycles = [cycle for one in found for cycle in one["cycles"]]
    report(
        packages,
        clients=given.clients,
        cycles=len(cycles),
        per_second=round(len(cycles) / took, 1),
        **{
            f"{name}_ms": percentiles([cycle[name] for cycle in cycles])
            for name in ("pause", "decide_to_resumed", "cycle")
        },
        errors=errors[:3],
    )


def _hear(line: Connection, seconds: float) -> Any:
    if not line.poll(seconds + PATIENCE):
        return {"cycles": [], "errors": ["a process of clients does not answer"]}
    try:
        return line.recv()
    except EOFError:
        return {"cycles": [], "errors": ["a process of clients ended at once"]}


def _process(make: Make, clients: int, given: Options, line: Connection) -> None:
    run = _with_tasks if inspect.iscoroutinefunction(make) else _with_threads
    try:
        run(make, clients, given, line)
    except BaseException:
        line.send({"cycles": [], "errors": [traceback.format_exc()[-800:]]})
        raise


def _with_threads(make: Make, clients: int, given: Options, line: Connection) -> None:
    cycle, close = make(clients)
    errors: list[str] = []

    def phase(k: int, seconds: float) -> list[Parts]:
        done: list[Parts] = []
        try:
            end = clock() + seconds
            while (begun := clock()) < end:
                done.append({**cycle(k), "cycle": clock() - begun})
        except Exception:
            errors.append(traceback.format_exc()[-800:])
        return done

    with ThreadPoolExecutor(clients) as pool:

        def everybody(seconds: float) -> dict[str, Any]:
            done = pool.map(phase, range(clients), [seconds] * clients)
            return {"cycles": [one for each in done for one in each], "errors": errors}

        warm = everybody(given.warm)
        if not errors:
            line.send("ready")
            line.recv()
        line.send(everybody(given.seconds) if not errors else {**warm, "cycles": []})
        line.recv()  # alive until its CPU time was read
    close()


def _with_tasks(make: Make, clients: int, given: Options, line: Connection) -> None:
    async def run() -> None:
        cycle, close = await make(clients)
        errors: list[str] = []

        async def phase(k: int, seconds: float) -> list[Parts]:
            done: list[Parts] = []
            try:
                end = clock() + seconds
                while (begun := clock()) < end:
                    done.append({**await cycle(k), "cycle": clock() - begun})
            except Exception:
                errors.append(traceback.format_exc()[-800:])
            return done

        async def everybody(seconds: float) -> dict[str, Any]:
            done = await asyncio.gather(*(phase(k, seconds) for k in range(clients)))
            return {"cycles": [one for each in done for one in each], "errors": errors}

        warm = await everybody(given.warm)
        if not errors:
            line.send("ready")
            await asyncio.to_thread(line.recv)
        line.send(await everybody(given.seconds) if not errors else {**warm, "cycles": []})
        await asyncio.to_thread(line.recv)
        await close()

    asyncio.run(run())


def sleep_until(moment: float) -> None:
    """Until a moment of time.time()."""
    time.sleep(max(0.0, moment - time.time()))
