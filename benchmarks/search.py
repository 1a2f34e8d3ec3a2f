"""Measures a search whose trials train together, compared with Optuna and Lightning in sequence.

    python benchmarks/search.py --out benchmarks/records/<date>-<hardware>-search [--parts ...]

The job: 64 trials over LSTMs of 64 to 256 and 32 to 128 units, learning rate, dropout, decay and
batch, on simulated demand: 24 rows of 11 columns, 3 rows ahead, about 200,000 training windows, 10
epochs. `search` runs it without pruning, `pruned` with; `lightning` times three whole trials of it,
of batches 128, 256 and 256, and extrapolates to all of the search's trials by their steps;
`together` and `alone` search on a twentieth of the data, with trials together and with one trial
after another, in as many studies as `--studies` says, each of `--studies-of` trials; `memory` notes
what is in use at trials 20 and 200. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet
import torch

import slipstream
from slipstream import config as configs
from slipstream.events import Event, Fallback, PackStart, Recovery, TrialEnd
from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

STATIONS, ROWS = 100, 2_530
WINDOWS = 199_800
TRIALS, EPOCHS = 64, 10
BATCHES = (64, 128, 256)
SPACE = {
    "model.hidden.0": {"low": 64, "high": 256, "step": 16},
    "model.hidden.1": {"low": 32, "high": 128, "step": 16},
    "train.lr": {"low": 1e-4, "high": 1e-2, "log": True},
    "train.weight_decay": {"low": 1e-6, "high": 1e-2, "log": True},
    "model.dropout": {"low": 0.0, "high": 0.4},
    "train.batch": list(BATCHES),
}
TOGETHER, PRUNED, USUAL, ALONE = (
    "trials together, no pruning",
    "trials together, median pruner",
    "Optuna and Lightning, one after another",
    "one after another",
)


def simulate_demand(rows: int = ROWS, *, stations: int = STATIONS, seed: int = 0) -> pa.Table:
    """Simulate hourly demand at stations: days, weeks, weather, holidays, and their own noise."""
    draw = np.random.default_rng(seed)
    hour = np.arange(rows)
    parts = []
    for station in range(stations):
        level, swing, shift = draw.uniform(5, 50), draw.uniform(0.2, 0.8), draw.uniform(0, 24)
        day, week = 2 * np.pi * (hour + shift) / 24, 2 * np.pi * hour / 168
        warmth = np.convolve(draw.standard_normal(rows + 47), np.ones(48) / 48, "valid")[:rows] * 7
        rain = np.maximum(np.convolve(draw.standard_normal(rows + 5), np.ones(6) / 6, "valid"), 0)
        holiday = (draw.random(rows // 24 + 1) < 0.03).repeat(24)[:rows]
        price = np.cumsum(draw.standard_normal(rows)) * 0.01
        noise = np.zeros(rows)
        shocks = draw.standard_normal(rows)
        for t in range(1, rows):
            noise[t] = 0.8 * noise[t - 1] + 0.6 * shocks[t]
        shape = 1 + swing * np.sin(day) + 0.3 * np.sin(week) + 0.15 * warmth - 0.4 * rain[:rows]
        values = level * (shape * (1 - 0.5 * holiday) - 0.2 * price + 0.15 * noise)
        parts.append(
            {
                "station": np.full(rows, station),
                "hour": hour,
                "demand": values,
                "hour_sin": np.sin(2 * np.pi * hour / 24),
                "hour_cos": np.cos(2 * np.pi * hour / 24),
                "week_sin": np.sin(week),
                "week_cos": np.cos(week),
                "warmth": warmth,
                "rain": rain[:rows],
                "holiday": holiday.astype(float),
                "price": price,
                "level": np.full(rows, level),
                "trend": hour / rows,
            }
        )
    return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def build_job(path: Path, out: Path, **tune: Any) -> dict[str, Any]:
    return {
        "name": "demand",
        "out": str(out),
        "data": {
            "path": str(path),
            "time": "hour",
            "id": "station",
            "targets": ["demand"],
            "context": 24,
            "horizon": 3,
            "split": {"train": 0.8, "val": 0.1, "test": 0.1},
        },
        "model": {"kind": "lstm", "hidden": [128, 64], "dropout": 0.1},
        "train": {"epochs": EPOCHS, "patience": "off", "batch": 128},
        "tune": {"trials": TRIALS, "retrain": 0, "pruner": "none", "space": SPACE} | tune,
    }


def run_search(
    settings: dict[str, Any], watch: Any = None
) -> tuple[dict[str, Any], float, list[Any]]:
    start = time.perf_counter()
    result = slipstream.tune(settings, on_event=watch)
    trials = result.study.get_trials(deepcopy=False)
    return result.summary, time.perf_counter() - start, trials


def time_lightning(path: Path, out: Path, batch: int, precision: str, workers: int) -> float:
    """Return the seconds of one whole trial, from the start of Python to its end."""
    settings = build_job(path, out)
    del settings["tune"]
    settings["train"] |= {"batch": batch}
    settings["model"] |= {"hidden": [160, 80]}
    file = out / f"trial-{batch}.toml"
    file.write_text(configs.to_toml(configs.load(settings)), encoding="utf-8")
    command = [sys.executable, "-m", "slipstream.tools.bench.frameworks", str(file)]
    start = time.perf_counter()
    subprocess.run([*command, "lightning", precision, str(workers), "plain"], check=True)
    return time.perf_counter() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--parts", default="search,pruned,lightning,together,alone,memory")
    arguments.add_argument("--precision", default="tf32")
    arguments.add_argument("--workers", type=int, default=4)
    arguments.add_argument("--parallel", type=int, default=0)
    arguments.add_argument("--studies", type=int, default=3)
    arguments.add_argument("--studies-of", type=int, default=TRIALS)
    options = arguments.parse_args()
    parts = options.parts.split(",")
    start = time.perf_counter()

    def log(what: str) -> None:
        print(f"{time.perf_counter() - start:5.0f} s, {what}", flush=True)

    rows: list[ResultRow] = []

    def write() -> None:
        spent = time.perf_counter() - start
        settings = {"space": SPACE, "trials": TRIALS, "epochs": EPOCHS}
        result = BenchResult(
            "search", _write_headline(rows), rows, [_build_table(rows)], settings, spent
        )
        results.write_result(result, options.out)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "demand.parquet"
        pa.parquet.write_table(simulate_demand(), path)
        trials: list[Any] = []
        for part, variant, pruner in (("search", TOGETHER, "none"), ("pruned", PRUNED, "median")):
            if part in parts:

                def show(event: Event) -> None:
                    if isinstance(event, PackStart):
                        places = f"{event.places} places for {len(event.trials)} trials"
                        precision = (event.plan or {}).get("precision")
                        shape = f"{event.widths}, batch {event.batch}, {precision}"
                        log(f"pack of {places}: {shape}, {event.mode}")
                    elif isinstance(event, Recovery | Fallback):
                        log(str(event))

                more = {"parallel": options.parallel} if options.parallel else {}
                summary, whole_s, searched = run_search(
                    build_job(path, folder, pruner=pruner, **more), show
                )
                trials = trials or searched
                best = summary["best"]["value"]
                more = {
                    "whole_s": whole_s,
                    "optuna_share": summary["optuna_share"],
                    "best": best,
                    "trials": summary["trials"],
                    "packs": summary["packs"],
                }
                rows.append(ResultRow("demand", variant, "s", [summary["search_s"]], more))
                log(f"{variant}: {summary['search_s']:.1f} s, {whole_s:.1f} s in all, {more}")
                write()
        if "lightning" in parts:
            timed = []
            for batch in (256, 128, 256):
                elapsed_s = time_lightning(path, folder, batch, options.precision, options.workers)
                timed.append((-(-WINDOWS // batch) * EPOCHS, elapsed_s))
                log(f"Lightning, batch {batch}: {elapsed_s:.1f} s")
            start_s, each_s = _fit_line(timed)
            steps = [-(-WINDOWS // trial.params["train.batch"]) * EPOCHS for trial in trials]
            total = sum(start_s + each_s * count for count in steps)
            more = {"timed": timed, "start_s": start_s, "ms_per_step": 1e3 * each_s}
            rows.append(ResultRow("demand", USUAL, "s", [total], more | {"extrapolated": True}))
            log(f"{USUAL}: {total:.0f} s, extrapolated; {1e3 * each_s:.2f} ms a step")
            write()
        if "memory" in parts:
            seen = {}
            tiny = folder / "tiny.parquet"
            pa.parquet.write_table(simulate_demand(200), tiny)

            def note(event: Event) -> None:
                if isinstance(event, TrialEnd) and event.trial in (20, 60, 100, 200):
                    host = psutil.Process().memory_info().rss / 1e6
                    device = torch.cuda.memory_reserved() / 1e6 if torch.cuda.is_available() else 0
                    seen[event.trial] = {"host_mb": host, "device_mb": device}

            settings = build_job(tiny, folder, trials=204, parallel=16)
            settings["train"]["epochs"] = 1
            run_search(settings, note)
            rows.append(
                ResultRow(
                    "memory", "of the host and of the device, by trial", "MB", [], {"seen": seen}
                )
            )
            log(f"memory: {seen}")
            write()
        small = folder / "small.parquet"
        if {"together", "alone"} & set(parts):
            pa.parquet.write_table(simulate_demand(ROWS // 20), small)
        variants = {"together": ("together", options.parallel or "auto"), "alone": (ALONE, 1)}
        for part, (variant, parallel) in variants.items():
            if part in parts:
                bests, seconds = [], []
                for seed in range(options.studies):
                    tune = {"seed": seed, "parallel": parallel, "trials": options.studies_of}
                    summary, _, _ = run_search(build_job(small, folder, **tune))
                    bests.append(summary["best"]["value"])
                    seconds.append(summary["search_s"])
                rows.append(
                    ResultRow(
                        "quality", variant, "best validation loss", bests, {"search_s": seconds}
                    )
                )
                log(f"quality, {variant}: {bests}, {seconds}")
                write()


def _fit_line(timed: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the seconds of the start and per step, by least squares."""
    slope, start = np.polyfit(
        [steps for steps, _ in timed], [elapsed_s for _, elapsed_s in timed], 1
    )
    return float(start), float(slope)


def _write_headline(rows: list[ResultRow]) -> str:
    by = {row.variant: row for row in rows}
    if TOGETHER in by and USUAL in by:
        ratio = by[USUAL].median / by[TOGETHER].median
        return (
            f"{TRIALS} trials in {by[TOGETHER].median:.0f} s; Optuna and Lightning, one after "
            f"another, {by[USUAL].median:,.0f} s (three trials timed, the rest extrapolated): "
            f"{ratio:.0f}x"
        )
    parts = [
        f"{variant}, {by[variant].median:.0f} s" for variant in (TOGETHER, PRUNED) if variant in by
    ]
    if parts:
        return f"{TRIALS} trials: {'; '.join(parts)}"
    return "; ".join(f"{row.case}, {row.variant}: {_describe(row)}" for row in rows)


def _describe(row: ResultRow) -> str:
    if row.case == "quality":
        spread = statistics.stdev(row.repeats) if len(row.repeats) > 1 else 0.0
        mean = statistics.fmean(row.repeats)
        return f"{mean:.4g} {row.unit}, mean of {len(row.repeats)} studies, sd {spread:.1g}"
    if row.repeats:
        return f"{row.median:.4g} {row.unit}"
    return ", ".join(
        f"{seen['host_mb']:,.0f} MB and {seen['device_mb']:,.0f} MB at {trial}"
        for trial, seen in row.extra["seen"].items()
    )


def _build_table(rows: list[ResultRow]) -> ResultTable:
    cells = [[row.case, row.variant, _describe(row)] for row in rows]
    return ResultTable("A search of 64 trials", ["case", "way", "result"], cells)


if __name__ == "__main__":
    main()
