"""Measures everything, ours beside the peers that are installed, and prints it as Markdown; `make bench`.

    python -m tests.bench                        # all of it, three rounds: about half an hour
    python -m tests.bench --quick                # one short round, to see that all works
    python -m tests.bench --only cycle,ingest    # of cycle, ingest, timers, listeners, growth; the others are kept
    python -m tests.bench --readme               # measures nothing; puts the kept results into README.md

Within a round all systems take turns, so that each round's meet the same machine; a ratio is the median of the rounds'.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench import beside, cycle, growth, ingest, listeners, machine, timers
from tests.bench.stage import ROOT, installation
from tests.bench.table import CLIENTS, DIRECT, ONCE, OURS, into, render

Json = dict[str, Any]
PARTS = ("cycle", "ingest", "timers", "listeners", "growth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of everything but the listeners")
    parser.add_argument("--full", action="store_true", help="growth with a million runs and ten million events")
    parser.add_argument("--only", default="", help=f"of {', '.join(PARTS)}: names with commas between them")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each measured stretch")
    parser.add_argument("--patience", type=float, help="seconds to wait for a quiet machine before each stretch")
    parser.add_argument("--json", type=Path, default=ROOT / "bench.json", metavar="FILE")
    parser.add_argument("--readme", action="store_true", help="fill README.md from the file, and measure nothing")
    given = parser.parse_args()
    if given.readme:
        readme = ROOT / "README.md"
        readme.write_text(into(readme.read_text(), json.loads(given.json.read_text())))
        return
    parts = [part for part in given.only.split(",") if part] or [
        part for part in PARTS if not (given.quick and part == "listeners")
    ]
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    bench = Bench(
        given.json,
        rounds=given.rounds or (1 if given.quick else 3),
        seconds=given.seconds or (2 if given.quick else 6),
        patience=given.patience if given.patience is not None else (2 if given.quick else 30),
    )
    if given.only and given.json.exists():
        bench.keep(json.loads(given.json.read_text()), but=parts)
    sizes = growth.FULL if given.full else growth.QUICK if given.quick else growth.USUAL
    measures: dict[str, Callable[[], None]] = {
        "cycle": bench.cycles,
        "ingest": lambda: bench.part("ingest", lambda: ingest.measure(seconds=bench.seconds)),
        "timers": bench.timers,
        "listeners": lambda: bench.part("listeners", listeners.measure),
        "growth": lambda: bench.part("growth", lambda: growth.measure(sizes)),
    }
    for part in parts:
        bench.attempt(part, measures[part])
    print(render(bench.results))
    sys.exit(1 if bench.results["failed"] else 0)


class Bench:
    """Collects results, and keeps them in the file after each part."""

    def __init__(self, file: Path, *, rounds: int, seconds: float, patience: float) -> None:
        self.file, self.rounds, self.seconds, self.patience = file, rounds, seconds, patience
        self.warm = min(2.0, seconds / 2)
        self.results: Json = {
            "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "rounds": rounds,
            "seconds": seconds,
            "versions": {},
            "failed": {},
        }

    def keep(self, kept: Json, *, but: list[str]) -> None:
        """What was measured before, of the same day and machine, but for the parts that are measured anew."""
        if kept["at"][:10] == self.results["at"][:10] and kept["machine"] == self.results["machine"]:
            self.results |= {name: kept[name] for name in PARTS if name in kept and name not in but}
            self.results |= {name: kept[name] for name in ("rounds", "seconds", "versions")}

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returns; what fails is told, and the rest goes on."""
        say(name)
        try:
            return measure()
        except Exception as error:
            traceback.print_exc()
            self.results["failed"][name] = str(error)[-500:]
            return None
        finally:
            self.file.write_text(json.dumps(self.results, indent=1))

    def watched(self, measure: Callable[[], Json]) -> Json:
        return machine.watched(measure, patience=self.patience)

    def part(self, name: str, measure: Callable[[], Json]) -> None:
        self.results[name] = self.watched(measure)

    def peer(self, name: str, database: beside.Database, **options: float) -> Json:
        found = beside.run(name, database, **options)
        self.results["versions"].update(found.pop("versions", {}))
        return found

    def cycles(self) -> None:
        systems: Json = {
            OURS: {"title": "Rehydrate, over HTTP, with the whole ledger", "runs": []},
            ONCE: {"title": "Rehydrate, each request with an Idempotency-Key, as our client sends it", "runs": []},
            DIRECT: {"title": "Rehydrate's ledger alone, without HTTP (in process)", "runs": []},
        }
        systems |= {name: {"title": title, "runs": []} for name, title in beside.CYCLES.items()}
        found: Json = {"systems": systems, "missing": {}}
        self.results["cycle"] = found
        for number in range(1, self.rounds + 1):
            self.attempt(f"cycle, round {number}, ours", lambda number=number: self._ours(number))  # type: ignore[misc]
            with beside.database() as database:
                for name in beside.CYCLES:
                    for clients in CLIENTS:
                        if systems[name]["title"] not in found["missing"]:
                            self._theirs(number, name, clients, database)
        found["systems"] = {name: system for name, system in systems.items() if system["runs"]}

    def _ours(self, number: int) -> None:
        with installation() as made:
            for clients in CLIENTS:
                for name in (OURS, ONCE, DIRECT):
                    ours = functools.partial(
                        cycle.measure,
                        made,
                        clients=clients,
                        seconds=self.seconds,
                        warm=self.warm,
                        direct=name == DIRECT,
                        once=name == ONCE,
                    )
                    self._keep(name, {"round": number, **self.watched(ours)})

    def _theirs(self, number: int, name: str, clients: int, database: beside.Database) -> None:
        options = {"clients": clients, "seconds": self.seconds, "warm": self.warm}
        run = self.attempt(
            f"cycle, round {number}, {name}, {clients}",
            lambda: self.watched(lambda: self.peer(name, database, **options)),
        )
        cycles = self.results["cycle"]
        if run and "missing" in run:
            cycles["missing"][cycles["systems"][name]["title"]] = run["missing"]
        elif run:
            self._keep(name, {"round": number, **run})

    def _keep(self, name: str, run: Json) -> None:
        self.results["cycle"]["systems"][name]["runs"].append(run)
        say(f"  {run['per_second']:g}/s; others {run['others_percent']:g} %")

    def timers(self) -> None:
        n = 1000 if self.seconds < 5 else 5000
        ours = self.watched(lambda: timers.measure(n=n, rounds=self.rounds))
        self.results["timers"] = {**ours, "peers": {}}
        with beside.database() as database:
            for name, title in beside.TIMERS.items():
                # Each sleeper of DBOS holds a thread.
                few = min(n, 1000) if name == "dbos_timers" else n
                found = self.attempt(
                    f"timers, {name}",
                    lambda name=name, few=few: self.watched(lambda: self.peer(name, database, n=few)),  # type: ignore[misc]
                )
                if found:
                    self.results["timers"]["peers"][title] = found


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
