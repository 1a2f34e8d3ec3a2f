"""Preparation of 5 million rows: resample, two filters, three formulas and a join.

    python benchmarks/prepare.py --out benchmarks/records/<date>-<machine>-prepare

Rows come ten times a second with jitter and are resampled to ten a second, so that all of them go
through every step. Each measurement is a process of its own. Its peak is the most memory that it
held, less what it held after preparing 3000 rows (the libraries); the data are the columns of the
file and the ones that steps add, as float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet

ROWS, COLUMNS, REPEATS = 5_000_000, 8, 3
STEPS = [
    {"step": "resample", "every": 0.1},
    {"step": "filter", "kind": "butterworth", "columns": ["x0"], "cutoff_hz": 1.0, "into": "slow"},
    {"step": "filter", "kind": "median", "columns": ["x1"], "rows": 11, "into": "clean"},
    {"step": "formula", "name": "power", "value": "x2 * lag(x3, 1)"},
    {"step": "formula", "name": "z", "value": "zscore(x4, 20)"},
    {"step": "formula", "name": "calm", "value": "where(std(x5, 50) < 1, mean(x6, 100), 0)"},
    {"step": "join", "columns": ["p"], "period": "1min"},
]
NEW_COLUMNS = 6
RUN = """
import json, sys, time
from slipstream.config import Config
from slipstream.data.dataset import load_dataset
from slipstream.data.files import read_tables
from slipstream.data.prepare.chain import PrepareChain

what, small, large = sys.argv[1], *map(json.loads, sys.argv[2:])

def prepare(config):
    config = Config(**config)
    if what != "steps":
        return load_dataset(config)
    return PrepareChain(config.data).apply(read_tables(config.data, None))

prepare(small)
print("ready", flush=True)
sys.stdin.readline()
began, used = time.perf_counter(), time.process_time()
result = prepare(large)
print(time.perf_counter() - began, time.process_time() - used, flush=True)
"""


def write_tables(folder: Path, rows: int) -> Path:
    """Write the table and the one to join, of a row a minute."""
    draw = np.random.default_rng(0)
    path = folder / f"{rows}.parquet"
    times = np.arange(rows) * 100_000 + draw.integers(-30_000, 30_000, rows)
    columns = {"time": pa.array(1_700_000_000_000_000 + times).cast(pa.timestamp("us"))}
    columns |= {f"x{i}": pa.array(draw.standard_normal(rows)) for i in range(COLUMNS)}
    pa.parquet.write_table(pa.table(columns), path, row_group_size=100_000)
    minutes = 1_699_999_800_000_000 + np.arange(rows // 600 + 10) * 60_000_000
    other = {"time": pa.array(minutes).cast(pa.timestamp("us"))}
    other["p"] = pa.array(draw.standard_normal(len(minutes)))
    pa.parquet.write_table(pa.table(other), folder / f"minutes-{rows}.parquet")
    return path


def make_config(path: Path, what: str) -> dict[str, object]:
    steps = [*STEPS[:-1], STEPS[-1] | {"path": str(path.with_stem(f"minutes-{path.stem}"))}]
    data = {"path": str(path), "time": "time", "targets": ["x7"], "context": 50, "horizon": 1}
    data |= {"missing": "forward", "prepare": [] if what == "dataset without steps" else steps}
    return {"data": data, "engine": {"device": "cpu", "home": "device"}}


def measure(what: str, small: Path, large: Path) -> tuple[float, float, float]:
    """Return seconds, seconds of CPU time, and megabytes at the peak above those after a small
    run."""
    configs = [json.dumps(make_config(path, what)) for path in (small, large)]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, what, *configs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    process.stdout.readline()
    watched, over = psutil.Process(process.pid), threading.Event()
    before = watched.memory_info().rss
    peak = [before]

    def watch() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], watched.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    process.stdin.write("\n")
    process.stdin.flush()
    seconds, cpu_s = map(float, process.stdout.readline().split())
    over.set()
    thread.join()
    process.communicate()
    return seconds, cpu_s, (peak[0] - before) / 1e6


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    out: Path = arguments.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        small, large = (write_tables(Path(folder), count) for count in (3000, ROWS))
        for what in ("steps", "dataset", "dataset without steps"):
            repeats = [measure(what, small, large) for _ in range(REPEATS)]
            seconds, cpu_s, peaks = zip(*repeats, strict=True)
            new = 0 if what == "dataset without steps" else NEW_COLUMNS
            data_mb = ROWS * (1 + COLUMNS + new) * 8 / 1e6
            results.append(
                {
                    "what": what,
                    "seconds": [round(one, 2) for one in seconds],
                    "cpu_s": [round(one, 2) for one in cpu_s],
                    "peak_mb": round(max(peaks)),
                    "data_mb": round(data_mb),
                    "ratio": round(max(peaks) / data_mb, 2),
                    "load": round(psutil.getloadavg()[0], 1),
                }
            )
            print(results[-1], flush=True)
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    lines = [
        f"# Preparation of {ROWS // 1_000_000} million rows, {COLUMNS} columns: resample, "
        "two filters, three formulas, a join",
        "",
        f"Medians of {REPEATS}. `steps`: reading Parquet and all steps. `dataset`: also the split,",
        "the scaler and the windows. The peak is the largest of the repeats, above a small run's;",
        "the data are the time, the columns of the file and the new ones, as float64. The load is",
        "that of the machine, whose two cores other processes shared.",
        "",
        "| what | seconds | CPU seconds | peak | data | peak / data | load |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['what']} | {statistics.median(r['seconds'])} | {statistics.median(r['cpu_s'])} | "
        f"{r['peak_mb']} MB | {r['data_mb']} MB | {r['ratio']} | {r['load']} |"
        for r in results
    ]
    (out / "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
