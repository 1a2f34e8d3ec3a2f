"""Measures repeats as lanes beside the same seeds one after another: whole commands of the demo.

    python benchmarks/repeats.py --out benchmarks/records/<date>-<hardware>-repeats [--repeats 8]

Each command starts Python, reads, trains, scores and writes; every lane's test error is held
against its single run's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream.bench import results
from slipstream.bench.results import BenchResult, ResultRow, ResultTable

LANES, ALONE = "as lanes of one run", "one run after another"


def command(out: str, *settings: str) -> tuple[float, dict[str, Any]]:
    """Seconds and summary of one training command."""
    given = [part for one in (f"out={out}", *settings) for part in ("--set", one)]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "--quiet", "--json", *given],
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - began, json.loads(done.stdout)


def outcome(
    together: dict[str, Any], took_s: float, alone: list[tuple[float, float]]
) -> BenchResult:
    """`alone`: seconds and test error of each seed by itself."""
    whole = sum(seconds for seconds, _ in alone)
    errors = [lane["metrics"]["test"]["mae"] for lane in together["lanes"]]
    apart = max(abs(a - b) / b for a, (_, b) in zip(errors, alone, strict=True))
    packed = together["pack"]
    rows = [
        ResultRow(
            "demo", LANES, "s", [took_s], {"mode": packed["mode"], "places": packed["places"]}
        ),
        ResultRow("demo", ALONE, "s", [whole], {"each_s": [seconds for seconds, _ in alone]}),
    ]
    cells = [
        [LANES, f"{took_s:.1f}", f"{packed['places']} at a time, {packed['mode']}"],
        [ALONE, f"{whole:.1f}", f"{whole / len(alone):.1f} each"],
    ]
    note = f"Test errors of lanes and single runs differ by at most {apart:.1e} of themselves."
    table = ResultTable(f"{len(alone)} seeds of the demo", ["way", "seconds", "how"], cells, note)
    headline = f"{len(alone)} repeats of the demo as lanes: {whole / took_s:.2f}x less time"
    return BenchResult("repeats", headline, rows, [table], {"evidence": packed["evidence"]}, took_s)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--repeats", type=int, default=8)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        took_s, together = command(folder, f"train.repeats={given.repeats}")
        alone = []
        for seed in range(given.repeats):
            seconds, summary = command(folder, f"seed={seed}")
            alone.append((seconds, summary["metrics"]["test"]["mae"]))
            print(f"seed {seed}: {seconds:.1f} s", flush=True)
    found = outcome(together, took_s, alone)
    results.write_result(found, given.out)
    print(found.headline)


if __name__ == "__main__":
    main()
