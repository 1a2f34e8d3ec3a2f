"""Measures the cost of masking and augmentation per step, and whole pre-trainings with peers.

    python benchmarks/pretrain.py --out benchmarks/records/<date>-<hardware>-augment
    python benchmarks/pretrain.py --case-a --out benchmarks/records/<date>-<hardware>-pretrain

The first takes turns at training steps of case A: filling in rows that one mask hides in every
step, and rows that are drawn anew; predicting, plainly and with each kind of augmentation. Ratios
are of neighbours in time; without a GPU, of one thread's own time, which others on the machine
disturb less. The second runs whole commands: 59,365 windows of 105 rows x 4,
bidirectional LSTM 128 x 2, batch 512, 50 epochs, from the command to its end, as slipstream
pretrain, and fewer epochs as a plain loop and under Lightning, with the same masked model. Without
a GPU both are small.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from slipstream import config as configs
from slipstream.config import Config, Pretrain, replace_settings
from slipstream.config.train import KINDS
from slipstream.data import dataset as datasets
from slipstream.engine.planning import TrainingWorkload
from slipstream.models import noise
from slipstream.tools.bench import cases, results
from slipstream.tools.bench.frameworks import has_lightning
from slipstream.tools.bench.results import (
    BenchResult,
    ResultRow,
    ResultTable,
    format_percent,
    format_spread,
)

WINDOWS, VALIDATION, CONTEXT = 59_365, 6_000, 105
STRENGTH, ROUNDS, STRETCH_S = 0.2, 7, 0.2
FIXED, PLAIN = "masked, always the same rows", "predicting"
MASKS = {"masked, random": "random", "masked, block": "block", "masked, patch": "patch"}
OURS = "slipstream pretrain"
PEERS = [("plain", "tf32", 4), ("lightning", "tf32", 4)]
PEERS_ON_CPU = [("plain", "fp32", 0), ("lightning", "fp32", 0)]


class FixedMaskWorkload(TrainingWorkload):
    """Pre-training that reuses its first mask."""

    @contextmanager
    def settings(self) -> Iterator[None]:
        draws: Callable[..., Tensor] = noise.mask_windows
        reused = self.__dict__.setdefault("reused", {})

        def first(how: Pretrain, inputs: Tensor, key: Tensor | None) -> Tensor:
            shape = inputs.shape[:2]
            if shape not in reused:
                reused[shape] = draws(how, inputs, key)
            mask: Tensor = reused[shape]
            return mask

        noise.mask_windows = first
        try:
            with super().settings():
                yield
        finally:
            noise.mask_windows = draws


def build_workloads() -> dict[str, TrainingWorkload]:
    """Build every variant of a training step of case A."""
    case = cases.build_standard_cases(["A"])[0]
    data = case.config.data
    table = _simulate(len(data.inputs or ()), case.dataset.index.num_rows)
    table = table.append_column("y", table.column("x0"))
    engine = {"plan": "off", "threads": 1}
    if torch.cuda.is_available():  # as a plan would have it
        engine |= {"precision": "fp16", "rnn": "slipstream"}
    plain = replace_settings(case.config, engine=engine)
    masked = replace_settings(
        plain, train={"objective": "masked"}, data={"split": {"train": 0.9, "val": 0.1}}
    )
    predicting, filling = datasets.load_dataset(plain, table), datasets.load_dataset(masked, table)
    workloads: dict[str, TrainingWorkload] = {
        FIXED: FixedMaskWorkload(replace_settings(masked, pretrain={"mask": "random"}), filling)
    }
    for name, mask in MASKS.items():
        workloads[name] = TrainingWorkload(
            replace_settings(masked, pretrain={"mask": mask}), filling
        )
    workloads[PLAIN] = TrainingWorkload(plain, predicting)
    for kind in KINDS:
        workloads[kind] = TrainingWorkload(
            replace_settings(plain, augment={kind: STRENGTH}), predicting
        )
    every = dict.fromkeys(KINDS, STRENGTH)
    workloads["all seven"] = TrainingWorkload(replace_settings(plain, augment=every), predicting)
    return workloads


def time_step_ms(trial: TrainingWorkload, steps: int) -> float:
    """Milliseconds per step; on a CPU, of this process."""
    if trial.device.type == "cuda":
        return trial.measure_ms_per_step(steps)
    with trial.settings():
        start = time.process_time()
        trial.time_steps(steps)
        return 1e3 * (time.process_time() - start) / steps


def measure_costs() -> BenchResult:
    start = time.monotonic()
    every = build_workloads()
    steps = {
        name: max(2, int(1e3 * STRETCH_S / time_step_ms(one, 3))) for name, one in every.items()
    }
    times: dict[str, list[float]] = {name: [] for name in every}
    for number in range(ROUNDS):
        for name, one in every.items():
            times[name].append(time_step_ms(one, steps[name]))
        print(f"round {number + 1} of {ROUNDS}", flush=True)
    rows, cells = [], []
    for name, repeats in times.items():
        base = FIXED if name.startswith("masked") else PLAIN
        ratios = [mine / theirs for mine, theirs in zip(repeats, times[base], strict=True)]
        row = ResultRow("A", name, "ms per step", repeats, {"against": base, "ratios": ratios})
        rows.append(row)
        cost = "" if name == base else format_percent(statistics.median(ratios) - 1)
        cells.append([name, format_spread(row), cost])
    config = next(iter(every.values())).config
    both = "bidirectional " if config.model.bidirectional else ""
    note = (
        f"{both}LSTM {config.model.hidden} x {config.model.layers}, {config.data.context} rows, "
        f"batch {config.train.batch}, strength {STRENGTH}, chance 0.5. Cost: the median over "
        "rounds of the ratio to the same round's step without it."
    )
    if not torch.cuda.is_available():
        note += " Milliseconds are of the process, in one thread, not of the clock."
    table = ResultTable("One training step", ["way", "ms per step", "cost"], cells, note)
    worst = max(
        (statistics.median(row.extra["ratios"]) - 1, row.variant)
        for row in rows
        if row.variant not in (FIXED, PLAIN, "all seven")
    )
    every_kind = format_percent(statistics.median(rows[-1].extra["ratios"]) - 1)
    headline = (
        f"Masking or one kind of augmentation: at most {format_percent(worst[0])} of a step "
        f"({worst[1]}); "
        f"all seven kinds {every_kind}"
    )
    settings = {"strength": STRENGTH, "rounds": ROUNDS, "steps": steps}
    return BenchResult("augment", headline, rows, [table], settings, time.monotonic() - start)


def _simulate(columns: int, rows: int) -> pa.Table:
    """Simulate autocorrelated columns: something for an encoder to learn."""
    draw = np.random.default_rng(0)
    values = draw.standard_normal((rows, columns))
    for row in range(1, rows):
        values[row] = 0.9 * values[row - 1] + 0.436 * values[row]
    return pa.table({f"x{i}": values[:, i] for i in range(columns)})


def write_job(folder: Path, *, small: bool, epochs: int) -> Path:
    """Write the data and the config of the case for a command."""
    windows, validation = (2_000, 400) if small else (WINDOWS, VALIDATION)
    rows = [windows + CONTEXT - 1, validation + CONTEXT - 1, CONTEXT]
    path = folder / "rows.parquet"
    pa.parquet.write_table(_simulate(4, sum(rows)), path)
    config: Config = configs.load(
        {
            "name": "case-a",
            "out": str(folder / "runs"),
            "data": {
                "path": str(folder / "rows.parquet"),
                "context": CONTEXT,
                "split": {"rows": rows},
            },
            "model": {"kind": "lstm", "hidden": 32 if small else 128, "layers": 2},
            "train": {"objective": "masked", "epochs": epochs, "batch": 512, "patience": "off"},
        }
    )
    (folder / "job.toml").write_text(configs.to_toml(config, only_set=True), encoding="utf-8")
    return folder / "job.toml"


def time_command(command: list[str]) -> float:
    """Return the seconds from the start of Python to its end."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-1500:]}")
    return time.perf_counter() - start


def measure_whole(epochs: int | None) -> BenchResult:
    """Time ours in full, before and after each peer; of each peer time a few epochs, and
    extrapolate to all of them."""
    start = time.monotonic()
    small = not torch.cuda.is_available()
    epochs = epochs or (2 if small else 50)
    rows = []
    with tempfile.TemporaryDirectory() as folder:

        def ours(epochs: int) -> float:
            path = write_job(Path(folder), small=small, epochs=epochs)
            took = time_command(["-m", "slipstream", "pretrain", str(path), "--quiet"])
            print(f"{OURS}, {epochs} epochs: {took:.1f} s", flush=True)
            return took

        mine = [ours(epochs)]
        rows.append(ResultRow("A", OURS, "s", mine))
        for framework, precision, workers in PEERS_ON_CPU if small else PEERS:
            if framework == "lightning" and not has_lightning():
                continue
            name = f"{framework}, {precision}, {workers} workers"
            peer_options = [framework, precision, str(workers), "habits"]
            few = (1, 2) if small else (3, 15)
            took = []
            for count in few:
                path = write_job(Path(folder), small=small, epochs=count)
                took.append(
                    time_command(
                        ["-m", "slipstream.tools.bench.frameworks", str(path), *peer_options]
                    )
                )
                print(f"{name}, {count} epochs: {took[-1]:.1f} s", flush=True)
            each = (took[1] - took[0]) / (few[1] - few[0])
            more = {"epochs": few, "seconds": took, "extrapolated": True}
            rows.append(ResultRow("A", name, "s", [took[0] + each * (epochs - few[0])], more))
            mine.append(ours(epochs))
    first = rows[0].median
    cells = [
        [row.variant, format_spread(row), results.format_ratio(row.median / first)] for row in rows
    ]
    size = f"{2_000 if small else WINDOWS:,} windows, {epochs} epochs"
    note = (
        "From the command to its end; ours also judges what it filled in and draws the report. "
        "The first of our runs builds the kernels, where none did before. Others ran for "
        f"{' and '.join(map(str, few))} epochs, and what {epochs} take follows from these."
    )
    table = ResultTable(
        f"Whole pre-training: {size}", ["way", "seconds", "ours is faster by"], cells, note
    )
    headline = f"Whole pre-training of case A ({size}): {first:.1f} s"
    settings: dict[str, Any] = {"epochs": epochs, "small": small}
    return BenchResult("pretrain", headline, rows, [table], settings, time.monotonic() - start)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--case-a", action="store_true")
    arguments.add_argument("--epochs", type=int)
    options = arguments.parse_args()
    result = measure_whole(options.epochs) if options.case_a else measure_costs()
    results.write_result(result, options.out)
    print(result.headline)


if __name__ == "__main__":
    main()
