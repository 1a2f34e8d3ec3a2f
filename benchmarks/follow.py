"""Compare runs that are followed with runs that are not: steps per second and whole duration.

python benchmarks/follow.py [--device cuda] [--to tensorboard] [--pairs 5] [--epochs 40]

Runs with and without `[follow]` alternate, each a process of its own, so that whatever else the
machine does meets both. The follower's own CPU seconds are counted too: they tell what it costs on
a busy machine, where the durations do not. Run it on a quiet one for the comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

JOB = """
out = "{out}"
[data]
path = "simulated:cell"
[model]
kind = "lstm"
hidden = {hidden}
[train]
epochs = {epochs}
patience = "off"
[engine]
device = "{device}"
[follow]
to = "{to}"
out = "{board}"
"""
POLL_S = 0.1


def train(folder: Path, options: argparse.Namespace, to: str) -> dict[str, Any]:
    """Train once; return its speed and duration, and the CPU seconds of its follower."""
    job = folder / "job.toml"
    values = {"epochs": options.epochs, "hidden": options.hidden, "device": options.device}
    job.write_text(JOB.format(out=folder, board=folder / "board", to=to, **values))
    start = time.perf_counter()
    command = [sys.executable, "-m", "slipstream", "train", str(job), "--quiet"]
    process = subprocess.Popen(command)
    follower: psutil.Process | None = None
    cpu_s = duration_s = 0.0
    while process.poll() is None or (follower is not None and follower.is_running()):
        if process.returncode is not None:
            duration_s = duration_s or time.perf_counter() - start
        follower = follower or (find_follower(process.pid) if to != "none" else None)
        if follower is not None:
            try:
                used = follower.cpu_times()
            except psutil.Error:
                break
            cpu_s = used.user + used.system
        time.sleep(POLL_S)
    duration_s = duration_s or time.perf_counter() - start
    assert process.wait() == 0
    (run,) = (path.parent for path in folder.glob("*/metrics.json"))
    logged = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    speeds = [event["steps_per_s"] for event in logged if event["event"] == "log"]
    return {
        "to": to,
        "steps_per_s": statistics.median(speeds[3:] or speeds),
        "seconds": duration_s,
        "follower_cpu_s": cpu_s,
    }


def find_follower(pid: int) -> psutil.Process | None:
    try:
        children = psutil.Process(pid).children()
        return next((one for one in children if "follow" in one.cmdline()), None)
    except psutil.Error:
        return None


def summarize(rows: list[dict[str, Any]], to: str) -> dict[str, Any]:
    def compute_median(name: str, kind: str) -> float:
        return statistics.median(row[name] for row in rows if row["to"] == kind)

    speeds = [compute_median("steps_per_s", kind) for kind in ("none", to)]
    durations = [compute_median("seconds", kind) for kind in ("none", to)]
    cpu_s = compute_median("follower_cpu_s", to)
    return {
        "steps_per_s": speeds,
        "slower_percent": 100 * (1 - speeds[1] / speeds[0]),
        "seconds": durations,
        "longer_percent": 100 * (durations[1] / durations[0] - 1),
        "follower_cpu_s": cpu_s,
        "follower_cpu_s_per_minute": 60 * cpu_s / durations[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--to", default="tensorboard")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for number in range(options.pairs):
        kinds = ("none", options.to)
        for to in kinds if number % 2 == 0 else reversed(kinds):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(train(Path(folder), options, to))
            print(json.dumps(rows[-1]), flush=True)
    result = summarize(rows, options.to) | {"rows": rows}
    print(json.dumps({name: value for name, value in result.items() if name != "rows"}))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
