"""Results as Markdown: one table of systems, one of our other figures with their bars. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Json = dict[str, Any]
OURS = "rehydrate"
#: The same without HTTP: no peer, but what peers in process are like.
DIRECT = "rehydrate_direct"
#: The same with Idempotency-Keys, which no peer is asked to keep here: no peer either.
ONCE = "rehydrate_once"
CLIENTS = (8, 1)
#: Rounds in which others used more of the machine than this are left out of a median, where there are others.
NOISY = 15.0
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def render(results: Json) -> str:
    """The whole report. Parts that were not measured are left out."""
    blocks = [_head(results)]
    if results.get("cycle"):
        blocks += [_cycles(results["cycle"]), *_notes(results["cycle"])]
    figures = [
        f"| {what} | {measured} | {bar} | {'yes' if reached else '**no**'} |"
        for what, measured, bar, reached in _figures(results)
    ]
    if figures:
        blocks.append("\n".join(["| figure | measured | bar | reached |", "| --- | --- | --- | --- |", *figures]))
    loads = [
        f"{name} {results[name]['others_percent']:g} %"
        for name in ("ingest", "timers", "listeners", "growth")
        if results.get(name)
    ]
    if loads:
        blocks.append(f"Others used of the machine meanwhile: {', '.join(loads)}.")
    if beside := _beside(results):
        blocks.append(beside)
    failed = results.get("failed") or {}
    blocks += [f"Failed: {name}: {why}" for name, why in failed.items()]
    return "\n\n".join(blocks) + "\n"


def into(text: str, results: Json) -> str:
    """`text` with the report between its markers. ValueError when it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{render(results)}{END}{after}"


def _head(results: Json) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(results.get("versions", {}).items()))
    rounds = results["rounds"]
    return (
        f"Measured {results['at'][:10]} on {machine['cores']} cores, {machine['ram_gb']:g} GB, {machine['system']};"
        f" Python {machine['python']}, PostgreSQL {machine['postgresql']}{versions and ', '}{versions}."
        f" {rounds} {'round' if rounds == 1 else 'rounds, medians'}; clients on the same cores."
    )


# -- cycles


def _cycles(cycle: Json) -> str:
    head = (
        "| system | cycles/s, 8 clients | cycles/s, 1 client | decision → resumed, 1 client, p50 / p95 ms"
        " | CPU ms a cycle, 8 clients | ours is, 8 clients | ours is, 1 client | others' load |"
    )
    systems = cycle["systems"]
    ordered = sorted(systems, key=lambda name: -(_median(_kept(systems[name]["runs"], 8), _rate) or 0))
    lines = [head, "| --- " * 8 + "|"]
    for name in ordered:
        runs = systems[name]["runs"]
        eight, one = _kept(runs, 8), _kept(runs, 1)
        title = f"**{systems[name]['title']}**" if name == OURS else systems[name]["title"]
        latency = " / ".join(
            _number(_median(one, lambda run, share=share: run["decide_to_resumed_ms"][share]))  # type: ignore[misc]
            for share in ("p50", "p95")
        )
        ratios = ["" if name == OURS else _times(ratio(systems, name, clients)) for clients in CLIENTS]
        loads = [run["others_percent"] for run in (*eight, *one)]
        lines.append(
            f"| {title} | {_number(_median(eight, _rate))} | {_number(_median(one, _rate))} | {latency}"
            f" | {_number(_median(eight, cpu_of))} | {ratios[0]} | {ratios[1]} | {_span(loads)} |"
        )
    return "\n".join(lines)


def _notes(cycle: Json) -> Iterable[str]:
    commits = [run["commits_a_cycle"] for run in cycle["systems"].get(OURS, {}).get("runs", [])]
    requests = [run["requests_a_cycle"] for run in cycle["systems"].get(OURS, {}).get("runs", [])]
    if commits:
        span = f"{min(commits):g} to {max(commits):g} commits a cycle, ticks included"
        yield f"Ours: {max(requests):g} requests and {span}."
    missing = cycle.get("missing") or {}
    if missing:
        yield "Not measured: " + "; ".join(f"{title} ({why})" for title, why in missing.items()) + "."
    runs = [(system["title"], run) for system in cycle["systems"].values() for run in system["runs"]]
    noisy = [
        f"{title}, {_clients(run['clients'])}, round {run['round']} ({run['others_percent']:g} %)"
        for title, run in runs
        if run["others_percent"] > NOISY
    ]
    if noisy:
        which = "; ".join(noisy) if len(noisy) <= 5 else "bench.json has which"
        yield (
            f"In {len(noisy)} of {len(runs)} runs others used more than {NOISY:g} % of the machine ({which})."
            " Medians leave them out where there are quiet ones."
        )


def ratio(systems: Json, name: str, clients: int) -> float | None:
    """How many times as many cycles a second ours does: the median over rounds in which both were measured."""
    ours = {run["round"]: run for run in systems.get(OURS, {}).get("runs", []) if run["clients"] == clients}
    theirs = {run["round"]: run for run in systems[name]["runs"] if run["clients"] == clients}
    both = [(ours[number], theirs[number]) for number in ours.keys() & theirs.keys() if theirs[number]["per_second"]]
    quiet = [pair for pair in both if max(run["others_percent"] for run in pair) <= NOISY]
    found = [mine["per_second"] / other["per_second"] for mine, other in quiet or both]
    return statistics.median(found) if found else None


def _kept(runs: list[Json], clients: int) -> list[Json]:
    of = [run for run in runs if run["clients"] == clients]
    return [run for run in of if run["others_percent"] <= NOISY] or of


def _rate(run: Json) -> float:
    return float(run["per_second"])


def cpu_of(run: Json) -> float:
    """CPU ms a cycle, everything that belongs to the system and its clients."""
    if "cpu_ms_a_cycle" in run:
        return float(sum(run["cpu_ms_a_cycle"].values()))
    return float(sum(run["cpu_ms"].values()) / max(1, run["cycles"]))


def _median(runs: list[Json], of: Callable[[Json], float]) -> float | None:
    return statistics.median(of(run) for run in runs) if runs else None


# -- the other figures: what, measured, bar, whether it is reached


def _figures(results: Json) -> Iterable[tuple[str, str, str, bool]]:
    if cycle := results.get("cycle"):
        yield from _cycle_bars(cycle["systems"])
    if ingest := results.get("ingest"):
        for clients, found in ingest["clients"].items():
            rate = found["events_per_second"]
            yield f"events/s in batches of 100, {_clients(int(clients))}", f"{rate:,.0f}", "> 10,000", rate > 10_000
    if timers := results.get("timers"):
        p95, rate = timers["lateness_ms"]["p95"], timers["drained_per_second"]
        n = f"{timers['n']:,} timers due at once"
        amiss = timers["early"] + timers["twice"]
        yield f"{n}: early or twice", str(amiss), "0", amiss == 0
        yield f"{n}: late, p95 ms", _number(p95), "< 600", p95 < 600
        yield f"{n}: drained a second", f"{rate:,.0f}", "> 8,000", rate > 8000
    if listeners := results.get("listeners"):
        crowd = f"{listeners['agents']} agents and {listeners['browsers']} browsers"
        p95 = listeners["decision_to_envelope_ms"]["with_the_crowd"]["p95"]
        cost = listeners["cost_of_waiting"]
        yield f"decision → envelope with {crowd} listening, p95 ms", _number(p95), "< 100", p95 < 100
        cpu = cost["cpu_percent_of_a_core"]
        yield "what they cost, memory MB", _number(cost["mb"]), "< 300", cost["mb"] < 300
        yield "what they cost, % of a core", _number(cpu), "< 5", cpu < 5
    if growth := results.get("growth"):
        longer = growth["append"]["ratio"]
        runs = f"{growth['append']['long']:,} events against one with {growth['append']['short']:,}"
        yield f"append to a run with {runs}", _times(longer), "≤ 1.2×", longer <= 1.2
        many = growth["many"]
        at = f"{many['runs']:,} runs, {many['events']:,} events, {many['open_waits']:,} open waits"
        for page, found in many["pages"].items():
            yield f"{page}, {at}: p95 ms", _number(found["p95"]), "< 50", found["p95"] < 50
        scans = many["scans"]
        yield "queries of these pages without an index", ", ".join(scans) or "0", "0", not scans


def _cycle_bars(systems: Json) -> Iterable[tuple[str, str, str, bool]]:
    ratios = {name: ratio(systems, name, 8) for name in systems if name not in (OURS, ONCE, DIRECT, "raw")}
    known = {name: found for name, found in ratios.items() if found is not None}
    if known:
        least = min(known, key=lambda name: known[name])
        yield f"cycles/s, 8 clients, against the fastest peer ({least})", _times(known[least]), "> 1×", known[least] > 1
    if "restate" in known:
        yield "cycles/s, 8 clients, against Restate", _times(known["restate"]), "≥ 1.3×", known["restate"] >= 1.3
    one = _kept(systems.get(OURS, {}).get("runs", []), 1)
    for share, bar in (("p50", 8), ("p95", 25)) if one else ():
        found = statistics.median(run["decide_to_resumed_ms"][share] for run in one)
        yield f"decision → agent holds the envelope, 1 client, {share} ms", _number(found), f"< {bar}", found < bar


def _beside(results: Json) -> str:
    timers = results.get("timers") or {}
    peers = timers.get("peers") or {}
    if not peers:
        return ""
    rows = {"**Rehydrate**": timers, **peers}
    lines = ["| timers due at once | n | late, p50 / p95 ms | drained a second |", "| --- | --- | --- | --- |"]
    for title, found in rows.items():
        if why := found.get("missing"):
            lines.append(f"| {title} | {why} | | |")
            continue
        late = found["lateness_ms"]
        lines.append(
            f"| {title} | {found['n']:,} | {_number(late['p50'])} / {_number(late['p95'])}"
            f" | {found['drained_per_second']:,.0f} |"
        )
    return "\n".join(lines)


# -- words


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _span(loads: list[float]) -> str:
    return f"{min(loads):.0f}–{max(loads):.0f} %" if loads else "–"


def _clients(n: int) -> str:
    return "1 client" if n == 1 else f"{n} clients"
