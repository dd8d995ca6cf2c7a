"""The benchmarks work, and tell what they found; how fast anything is, is not asked here."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.bench import cycle
from tests.bench.peers.__main__ import NAMES
from tests.bench.stage import ROOT, installation
from tests.bench.table import BEGIN, END, OURS, into, ratio, render


@pytest.mark.processes
def test_a_cycle_needs_four_requests_and_four_commits() -> None:
    with installation() as made:
        found = cycle.measure(made, clients=1, seconds=0.8, warm=0.3)
    assert found["cycles"] > 0
    assert found["requests_a_cycle"] == 4
    # Heartbeats and ticks commit, too: a few a second, whatever the cycles do.
    assert found["commits_a_cycle"] <= 4 + 15 / found["cycles"]
    assert found["commits_a_cycle"] >= 4
    assert found["cycle_ms"]["n"] == found["cycles"]


def run(number: int, clients: int, rate: float, others: float = 3.0, **more: Any) -> dict[str, Any]:
    latency = {"p50": 4.0, "p95": 5.5, "max": 9.0, "n": 100}
    return {
        "round": number, "clients": clients, "per_second": rate, "cycles": 100, "decide_to_resumed_ms": latency,
        "cpu_ms": {"postgres": 300.0, "peer": 700.0}, "others_percent": others, **more,
    }  # fmt: skip


def ours(number: int, clients: int, rate: float, others: float = 3.0) -> dict[str, Any]:
    cpu = {"web": 3.5, "postgres": 1.5, "work": 0.0, "up": 0.0, "clients": 1.0}
    return run(number, clients, rate, others, cpu_ms_a_cycle=cpu, commits_a_cycle=4.02, requests_a_cycle=4.0)


@pytest.fixture
def results() -> dict[str, Any]:
    return {
        "at": "2026-01-31T10:00:00+00:00",
        "machine": {"cores": 2, "ram_gb": 8.0, "system": "Linux x86_64", "python": "3.11.7", "postgresql": "18.1"},
        "versions": {"restate-sdk": "1.3.0"},
        "rounds": 3,
        "failed": {},
        "cycle": {
            "missing": {"DBOS": "the package dbos is not installed"},
            "systems": {
                OURS: {
                    "title": "Rehydrate",
                    "runs": [ours(1, 8, 300), ours(2, 8, 330), ours(3, 8, 30, others=70), ours(1, 1, 120)],
                },
                "restate": {"title": "Restate", "runs": [run(1, 8, 150), run(2, 8, 220), run(3, 8, 140)]},
            },
        },
        "ingest": {
            "others_percent": 4.0, "clients": {"1": {"events_per_second": 9000}, "8": {"events_per_second": 12000}},
        },
        "timers": {
            "n": 5000, "early": 0, "twice": 0, "lateness_ms": {"p50": 200.0, "p95": 400.0}, "drained_per_second": 9000,
            "others_percent": 21.5,
            "peers": {
                "DBOS sleepers": {"missing": "the package dbos is not installed"},
                "SQL": {"n": 5000, "lateness_ms": {"p50": 90.0, "p95": 150.0}, "drained_per_second": 28000},
            },
        },
    }  # fmt: skip


def test_the_table_has_ratios_bars_and_what_was_not_installed(results: dict[str, Any]) -> None:
    text = render(results)
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:]]
        rows.setdefault(cells[0] if cells else "", cells)
    assert rows["**Rehydrate**"][1:5] == ["315", "120", "4.0 / 5.5", "6.0"], "the noisy third round is left out"
    assert rows["Restate"][1:7] == ["150", "–", "– / –", "10.0", "1.75×", "–"]
    assert "Rehydrate, 8 clients, round 3 (70 %)" in text
    assert "Not measured: DBOS (the package dbos is not installed)." in text
    assert rows["events/s in batches of 100, 1 client"][1:4] == ["9,000", "> 10,000", "**no**"]
    assert rows["events/s in batches of 100, 8 clients"][3] == "yes"
    assert rows["DBOS sleepers"][1] == "the package dbos is not installed"
    assert "meanwhile: ingest 4 %, timers 21.5 %." in text
    assert "Measured 2026-01-31 on 2 cores, 8 GB" in text


def test_a_ratio_compares_within_rounds(results: dict[str, Any]) -> None:
    assert ratio(results["cycle"]["systems"], "restate", 8) == pytest.approx((300 / 150 + 330 / 220) / 2)
    assert ratio(results["cycle"]["systems"], "restate", 1) is None


def test_the_readme_is_filled_between_its_markers(results: dict[str, Any]) -> None:
    once = into(f"before\n{BEGIN}\nlast year's\n{END}\nafter", results)
    assert once.startswith("before\n")
    assert once.endswith("\nafter")
    assert "last year's" not in once
    assert into(once, results) == once
    assert BEGIN in (ROOT / "README.md").read_text()
    with pytest.raises(ValueError, match="bench:begin"):
        into("no place for it", results)


def test_a_peer_that_is_not_installed_says_so() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['dbos'] = None; sys.argv = ['peers', 'dbos', '--database', 'x'];"
        "from tests.bench.peers.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"missing": "the package dbos is not installed"}
    assert "dbos" in NAMES
