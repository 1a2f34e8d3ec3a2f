"""Peak memory of a run: in memory for 5 million rows, and streamed for tables of growing size.

    python benchmarks/memory.py --out benchmarks/records/<date>-<machine>-memory

Each run is a process of its own; its peak is the most that it and its workers held at once, less
that of the same run on 3000 rows (the libraries, the driver). On a GPU only the first of these,
with every row a window.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import torch

COLUMNS, CONTEXT = 8, 400
ON_GPU = torch.cuda.is_available()
RUN = """
import sys, json, slipstream, torch
on_gpu = torch.cuda.is_available()
config, small = json.loads(sys.argv[1]), sys.argv[2]
slipstream.train(config | {"data": config["data"] | {"path": small}})
if on_gpu:
    torch.cuda.reset_peak_memory_stats()
print("ready", flush=True); sys.stdin.readline()
seconds = slipstream.train(config).summary["seconds"]
print(json.dumps([seconds, torch.cuda.max_memory_allocated() if on_gpu else 0]), flush=True)
"""


def write_table(path: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    schema = pa.schema([(f"x{i}", pa.float64()) for i in range(COLUMNS)])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for begin in range(0, rows, 100_000):
            count = min(100_000, rows - begin)
            made = [draw.standard_normal(count) for _ in range(COLUMNS)]
            writer.write_table(pa.table(made, schema=schema))


def peak_of(config: dict[str, object], small: Path) -> tuple[float, float, float]:
    """Megabytes at the peak, above a small run's, seconds, and megabytes on the device."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(config), str(small)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    watched, peaks, over = psutil.Process(process.pid), [0, 0], threading.Event()
    phase = 0

    def watch() -> None:
        while not over.is_set():
            total = 0
            for one in (watched, *watched.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += one.memory_info().rss
            peaks[phase] = max(peaks[phase], total)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    process.stdout.readline()
    phase = 1
    process.stdin.write("\n")
    process.stdin.flush()
    output = process.stdout.readline()
    over.set()
    thread.join()
    process.wait()
    seconds, device = json.loads(output)
    return (peaks[1] - peaks[0]) / 1e6, seconds, device / 1e6


def config_of(path: Path, out: Path, home: str, workers: int) -> dict[str, object]:
    return {
        "out": str(out),
        "data": {
            "path": str(path),
            "context": CONTEXT,
            "horizon": 1,
            "targets": ["x0"],
            "stride": 1 if ON_GPU else 50,
        },
        "model": {"kind": "linear"},
        "train": {"batch": 256, "epochs": 1},
        "engine": {
            "home": home,
            "plan": "off",
            "device": "cuda" if ON_GPU else "cpu",
            "workers": workers,
            "buffer_rows": 200_000,
        },
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    out: Path = arguments.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "small.parquet"
        write_table(small, 3000)
        streamed = [("stream", 0, (2, 5, 10, 20)), ("stream", 2, (5, 20))]
        for home, workers, sizes in [("device", 0, (5,)), *([] if ON_GPU else streamed)]:
            for millions in sizes:
                path = Path(folder) / f"{millions}.parquet"
                if not path.exists():
                    write_table(path, millions * 1_000_000)
                config = config_of(path, Path(folder), home, workers)
                peak, seconds, device = peak_of(config, small)
                data = millions * COLUMNS * 8
                rows.append(
                    {
                        "home": home,
                        "workers": workers,
                        "million_rows": millions,
                        "data_mb": data,
                        "peak_mb": round(peak),
                        "ratio": round(peak / data, 2),
                        "device_mb": round(device),
                        "seconds": round(seconds, 1),
                    }
                )
                print(rows[-1], flush=True)
    (out / "results.json").write_text(json.dumps(rows, indent=1))
    lines = [
        f"# Peak memory: {COLUMNS} columns of float64 in Parquet, context {CONTEXT}, batch 256",
        "",
        "Above the same run on 3000 rows, workers included. `stream` keeps 200,000 rows a worker.",
        "",
        "| home | workers | rows | data | peak | peak / data | on the device | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['home']} | {r['workers']} | {r['million_rows']} million | {r['data_mb']} MB | "
        f"{r['peak_mb']} MB | {r['ratio']} | {r['device_mb']} MB | {r['seconds']} |"
        for r in rows
    ]
    (out / "summary.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
