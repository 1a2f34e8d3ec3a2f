"""The app with many runs: how long Home takes over HTTP, and the start and memory of the server.

    python benchmarks/ui_home.py [--runs 1000] [--requests 20] [--folder FOLDER]

Writes small run folders as finished trainings leave them, starts `slipstream ui` twice in a process
of its own (without and with the rows that the first start saved), and asks for the page and its
rows one after the other. The output is one JSON object; times are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from slipstream import config as configs
from slipstream import runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        write_runs(folder / "runs", options.runs)
        result = {
            "runs": options.runs,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "first_start": measure(folder, options.requests),
            "second_start": measure(folder, options.requests),
        }
    print(json.dumps(result, indent=1))


def write_runs(out: Path, count: int) -> None:
    """Write what is missing of so many finished runs."""
    for number in range(count):
        name = f"job{number:04d}-20260101T000000Z"
        if (out / name).exists():
            continue
        config = configs.Config(name="job", data={"path": "a.csv", "targets": ["y"]})
        files = {"config.toml": runs.format_config(config)}
        run = runs.create_run(name, out=str(out), files=files)
        run = runs.Run(run.folder.rename(out / name))
        run.append("start", run=str(run.folder), epochs=2, windows={"train": 1})
        for epoch in (1, 2):
            run.append("epoch", epoch=epoch, step=epoch, train_loss=1.0, val_loss=1.0 / epoch)
        error = 1 + number / count
        names = ("mae", "rmse", "mse", "r2", "max_error", "bias")
        scores = dict.fromkeys(names, error)
        metrics = {"metrics": {"test": scores, "val": scores, "train": scores}}
        scaled = {"scaled": {"test": {"mae": error, "mse": error}}}
        baselines = {"ridge": metrics | scaled}
        about = {"name": "job", "epochs": 2, "seconds": 1.0, "baselines": baselines}
        runs.write_metrics(run, metrics | scaled | about)


def measure(folder: Path, requests: int) -> dict[str, Any]:
    begin = time.perf_counter()
    command = [sys.executable, "-m", "slipstream", "ui", str(folder)]
    server = subprocess.Popen(
        [*command, "--no-browser", "--no-warm-worker"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        root, _, token = server.stdout.readline().strip().partition("/?token=")
        started_s = time.perf_counter() - begin
        process = psutil.Process(server.pid)
        start_bytes = process.memory_info().rss
        first_ms = sum(time_request(root, path, token) for path in ("/", "/api/runs"))
        before = process.cpu_times()
        pages = [time_request(root, "/", token) for _ in range(requests)]
        rows = [time_request(root, "/api/runs", token) for _ in range(requests)]
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        return {
            "start_s": round(started_s, 3),
            "start_mb": round(start_bytes / 1e6, 1),
            "first_page_and_rows_ms": round(first_ms, 1),
            "page_ms": round(statistics.median(pages), 1),
            "rows_ms": round(statistics.median(rows), 1),
            "page_and_rows_cpu_ms": round(1e3 * used_s / requests, 1),
            "mb_after": round(process.memory_info().rss / 1e6, 1),
        }
    finally:
        server.terminate()
        server.wait()


def time_request(root: str, path: str, token: str) -> float:
    """Return the milliseconds until the whole answer is there."""
    request = Request(root + path, headers={"Authorization": f"Bearer {token}"})
    begin = time.perf_counter()
    with urlopen(request) as answer:
        answer.read()
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
