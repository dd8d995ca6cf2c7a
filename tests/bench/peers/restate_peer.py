"""Restate: its server on fresh storage, its Python SDK served by hypercorn over HTTP/2, decisions by awakeables.

It keeps its own log, with fsync on as it ships, and no PostgreSQL. Each process serves a copy of the service under a
name of its own. The server's binary is looked for below $BENCH_ROOT/npm.
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config

from tests.bench.peers.harness import Options, Parts, drive
from tests.bench.plain import PAYLOAD, clock

BINARIES = "npm/node_modules/@restatedev/restate-server-*/bin/restate-server"
SETTINGS = """
bind-port = {node}
disable-telemetry = true
log-filter = "warn"
cluster-name = "bench"
node-name = "n1"
[ingress]
bind-port = {ingress}
[admin]
bind-port = {admin}
"""
_paused: dict[str, float] = {}
_resumed: dict[str, float] = {}
_events: dict[str, asyncio.Event] = {}
_awakeables: dict[str, str] = {}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def server(binary: Path) -> Iterator[tuple[str, str]]:
    """The addresses of its ingress and of its administration."""
    ports = {name: free_port() for name in ("node", "ingress", "admin")}
    ingress, admin = (f"http://127.0.0.1:{ports[name]}" for name in ("ingress", "admin"))
    with tempfile.TemporaryDirectory(prefix="bench-restate-") as folder:
        (settings := Path(folder, "restate.toml")).write_text(SETTINGS.format(**ports))
        process = subprocess.Popen(
            [binary, "-c", settings, "--base-dir", Path(folder, "data"), "--no-logo", "--listen-mode", "tcp"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not (_answers(f"{admin}/health") and _answers(f"{ingress}/restate/health")):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("Restate's server does not come up")
                time.sleep(0.2)
            yield ingress, admin
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 (an address of our own)
            return bool(answer.status == 200)
    except OSError:
        return False


def run(given: Options) -> None:
    binary = next(Path(os.environ.get("BENCH_ROOT", ".bench")).resolve().glob(BINARIES), None)
    if binary is None:
        print(json.dumps({"missing": "Restate's server is not installed"}))
        return
    with server(binary) as (ingress, admin):
        drive(given, _maker(ingress, admin), ("restate-sdk",))


def _maker(ingress: str, admin: str) -> Any:
    async def make(clients: int) -> Any:
        name = f"bench{os.getpid()}"
        service = restate.Service(name)

        @service.handler()
        async def run(ctx: restate.Context, me: str) -> dict:
            async def checkpoint() -> dict:
                return PAYLOAD

            state = await ctx.run_typed("checkpoint", checkpoint)
            awakeable, promise = ctx.awakeable()

            async def notify() -> str:
                _awakeables[me] = awakeable
                return "ok"

            await ctx.run_typed("notify", notify)  # the console learns what to answer
            _paused.setdefault(me, clock())
            _events[me].set()
            decision = await promise
            _resumed.setdefault(me, clock())
            assert state["step"] == 1

            async def finish() -> dict:
                return {"approved": decision["approved"]}

            return dict(await ctx.run_typed("finish", finish))

        config, stop = Config(), asyncio.Event()
        config.bind = [f"127.0.0.1:{(port := free_port())}"]
        config.loglevel = "ERROR"
        serving = asyncio.create_task(serve(restate.app([service]), config, shutdown_trigger=stop.wait))
        await asyncio.sleep(0.5)
        http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        place = {"uri": f"http://127.0.0.1:{port}", "force": True}
        async with http.post(f"{admin}/deployments", json=place) as answer:
            assert answer.status in (200, 201), await answer.text()

        async def cycle(k: int) -> Parts:
            me = str(uuid.uuid4())
            event = _events[me] = asyncio.Event()
            begun = clock()
            call = asyncio.create_task(http.post(f"{ingress}/{name}/run", json=me))  # answers when the run is done
            await asyncio.wait_for(event.wait(), 30)
            decided = clock()
            url = f"{ingress}/restate/awakeables/{_awakeables.pop(me)}/resolve"
            async with http.post(url, json={"approved": True, "by": "u1"}) as answer:
                assert answer.status in (200, 202), await answer.text()
            async with await call as answer:
                assert (await answer.json())["approved"]
            del _events[me]
            return {"pause": _paused.pop(me) - begun, "decide_to_resumed": _resumed.pop(me) - decided}

        async def close() -> None:
            await http.close()
            stop.set()
            await asyncio.wait([serving], timeout=3)

        return cycle, close

    return make
