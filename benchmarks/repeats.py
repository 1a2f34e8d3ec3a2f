"""Measures repeats as lanes, compared with the same seeds one after another: commands of the demo.

    python benchmarks/repeats.py --out benchmarks/records/<date>-<hardware>-repeats [--repeats 8]

Each command starts Python, reads, trains, scores and writes; every lane's test error is compared
with that of its single run.
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

from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

LANES, ALONE = "as lanes of one run", "one run after another"


def run_command(out: str, *settings: str) -> tuple[float, dict[str, Any]]:
    """Run one training command; return its seconds and summary."""
    options = [part for one in (f"out={out}", *settings) for part in ("--set", one)]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "train", "--quiet", "--json", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, json.loads(done.stdout)


def build_result(
    together: dict[str, Any], elapsed_s: float, alone: list[tuple[float, float]]
) -> BenchResult:
    """`alone`: seconds and test error of each seed by itself."""
    whole = sum(seconds for seconds, _ in alone)
    errors = [lane["metrics"]["test"]["mae"] for lane in together["lanes"]]
    difference = max(abs(a - b) / b for a, (_, b) in zip(errors, alone, strict=True))
    packed = together["pack"]
    rows = [
        ResultRow(
            "demo", LANES, "s", [elapsed_s], {"mode": packed["mode"], "places": packed["places"]}
        ),
        ResultRow("demo", ALONE, "s", [whole], {"each_s": [seconds for seconds, _ in alone]}),
    ]
    cells = [
        [LANES, f"{elapsed_s:.1f}", f"{packed['places']} at a time, {packed['mode']}"],
        [ALONE, f"{whole:.1f}", f"{whole / len(alone):.1f} each"],
    ]
    note = f"Test errors of lanes and single runs differ by at most {difference:.1e} of themselves."
    table = ResultTable(f"{len(alone)} seeds of the demo", ["way", "seconds", "how"], cells, note)
    headline = f"{len(alone)} repeats of the demo as lanes: {whole / elapsed_s:.2f}x less time"
    return BenchResult(
        "repeats", headline, rows, [table], {"evidence": packed["evidence"]}, elapsed_s
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--repeats", type=int, default=8)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        elapsed_s, together = run_command(folder, f"train.repeats={options.repeats}")
        alone = []
        for seed in range(options.repeats):
            seconds, summary = run_command(folder, f"seed={seed}")
            alone.append((seconds, summary["metrics"]["test"]["mae"]))
            print(f"seed {seed}: {seconds:.1f} s", flush=True)
    result = build_result(together, elapsed_s, alone)
    results.write_result(result, options.out)
    print(result.headline)


if __name__ == "__main__":
    main()
