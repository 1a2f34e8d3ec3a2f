"""Times one training step, captured against eager, beside a plain PyTorch loop, in one run.

    python benchmarks/capture.py --out benchmarks/records/<date>-<gpu>-capture

The cases are those of the design notes: B, an LSTM 64 x 2 over 24 rows of 10 columns, and D, an
LSTM 128 x 1 over 150 rows of 4 columns, both with batches of 256 windows. Every way to run the
step is timed in turn, round after round; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from slipstream import config as configs
from slipstream import hardware
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import plan
from slipstream.engine.job import Task, set_up
from slipstream.models import build
from slipstream.runs import Run

CASES = {
    "B": {"hidden": 64, "layers": 2, "context": 24, "columns": 10},
    "D": {"hidden": 128, "layers": 1, "context": 150, "columns": 4},
}
BATCH, ROWS, ROUNDS = 256, 60_000, 7
WAYS = [("eager", "tf32"), ("eager", "fp16"), ("captured", "fp32"), ("captured", "tf32")]
WAYS += [("captured", "bf16"), ("captured", "fp16")]


def case_config(case: dict[str, int], precision: str) -> Config:
    return configs.load(
        {
            "data": {
                "inputs": [f"x{i}" for i in range(case["columns"])],
                "targets": ["y"],
                "context": case["context"],
                "horizon": 0,
            },
            "model": {"hidden": case["hidden"], "layers": case["layers"], "dropout": 0.0},
            "train": {"batch": BATCH},
            "engine": {"device": "cuda", "precision": precision},
        }
    )


def table(columns: int) -> pa.Table:
    draw = np.random.default_rng(0)
    made = {f"x{i}": draw.standard_normal(ROWS) for i in range(columns)}
    return pa.table(made | {"y": draw.standard_normal(ROWS)})


def ours(config: Config, dataset: Dataset, *, capture: bool) -> Callable[[int], float]:
    """A function that runs N steps and returns milliseconds per step."""
    engine = config.engine.model_copy(update={"capture": capture})
    chosen = plan.make(config.model_copy(update={"engine": engine}), data_bytes=0)
    torch.manual_seed(0)
    model = build(config.model, dataset.signature).to(chosen.device)
    series = dataset.memory.series.to(chosen.device)
    task = Task(config, model, dataset, series, Run(Path("nowhere")))
    job = set_up(task, chosen)
    job.home.begin(0)
    job.tape.begin([config.train.lr] * job.home.num_steps)

    def run(steps: int) -> float:
        with chosen.flags():
            job.tape.cursor.zero_()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                job.advance()
            torch.cuda.synchronize()
            spent = time.perf_counter() - began
        assert not job.failures()
        return 1e3 * spent / steps

    return run


def plain_loop(case: dict[str, int], dataset: Dataset) -> Callable[[int], float]:
    """What people write: windows made beforehand, DataLoader, fp32, the loss read every step."""
    series, starts = dataset.memory.series, dataset.memory.starts["train"]
    rows = starts[:, None] + torch.arange(case["context"])
    x = series.inputs[rows]
    y = series.targets[rows[:, -1]]
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=BATCH, shuffle=True
    )
    lstm = nn.LSTM(case["columns"], case["hidden"], case["layers"], batch_first=True).cuda()
    head = nn.Linear(case["hidden"], 1).cuda()
    params = [*lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)

    def run(steps: int) -> float:
        batches = iter(loader)
        torch.cuda.synchronize()
        began = time.perf_counter()
        total = 0.0
        for _ in range(steps):
            inputs, targets = next(batches)
            inputs, targets = inputs.cuda(), targets.cuda()
            loss = nn.functional.mse_loss(head(lstm(inputs)[0][:, -1]), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            total += loss.item()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / steps

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    out: Path = arguments.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[float]]] = {}
    for name, case in CASES.items():
        data = table(case["columns"])
        runs: dict[str, Callable[[int], float]] = {}
        for way, precision in WAYS:
            config = case_config(case, precision)
            dataset = datasets.load(config, data)
            runs[f"{way} {precision}"] = ours(config, dataset, capture=way == "captured")
        runs["plain loop fp32"] = plain_loop(case, dataset)
        for run in runs.values():
            run(10)
        found: dict[str, list[float]] = {way: [] for way in runs}
        for _ in range(ROUNDS):
            for way, run in runs.items():
                found[way].append(run(150 if way.startswith("captured") else 40))
        results[name] = found
    machine = hardware.describe(torch.device("cuda", 0))
    (out / "results.json").write_text(json.dumps({"hardware": machine, "ms": results}, indent=1))
    lines = [f"# Captured steps on {machine['gpu']}, torch {machine['torch']}", ""]
    lines += [
        "Milliseconds per training step, median of "
        f"{ROUNDS} interleaved rounds (lowest to highest).",
        "",
    ]
    for name, found in results.items():
        plain = statistics.median(found["plain loop fp32"])
        lines += [f"## Case {name}: {CASES[name]}, batch {BATCH}", ""]
        lines += ["| way | ms per step | times as fast as the plain loop |", "|---|---|---|"]
        for way, times in sorted(found.items(), key=lambda item: -statistics.median(item[1])):
            middle = statistics.median(times)
            spread = f"{min(times):.3f} to {max(times):.3f}"
            lines.append(f"| {way} | {middle:.3f} ({spread}) | {plain / middle:.1f} |")
        lines.append("")
    (out / "summary.md").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
