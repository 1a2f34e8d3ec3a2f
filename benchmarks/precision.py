"""Trains real jobs in every precision with the same seeds, and compares what they reach.

    python benchmarks/precision.py --data <folder> --out benchmarks/records/<date>-<hardware>-...

The examples with public data, as `job.py` has them. The figure is the validation RMSE, scaled, of
the best epoch; beside it how far its mean is from fp32's, and how far two seeds of one precision
are apart, which is the noise that any difference has to be seen in.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from job import EXAMPLES, JOBS

import slipstream

JOBS = JOBS | {"ETTh1, Transformer": (EXAMPLES / "etth1-transformer.toml", "ETTh1.csv")}

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--jobs", default="", help="jobs whose name holds this")
    given = arguments.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[float]]] = {}
    for name, (config, file) in JOBS.items():
        if given.jobs not in name:
            continue
        found[name] = {precision: [] for precision in PRECISIONS}
        for seed in range(given.seeds):
            for precision in PRECISIONS:
                with tempfile.TemporaryDirectory() as out:
                    result = slipstream.train(
                        config,
                        overrides=(
                            f"data.path={(given.data / file).resolve()}",
                            f"out={out}",
                            f"seed={seed}",
                            f"engine.precision={precision}",
                            "engine.plan=off",
                        ),
                    )
                rmse = math.sqrt(result.summary["scaled"]["val"]["mse"])
                found[name][precision].append(rmse)
                print(f"{name:8s} seed {seed} {precision}: {rmse:.5f}", flush=True)
    (given.out / "results.json").write_text(json.dumps(found, indent=1))
    (given.out / "summary.md").write_text(summarize(found))
    print(summarize(found))


def summarize(found: dict[str, dict[str, list[float]]]) -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    lines = [f"# Validation RMSE (scaled) by precision on {where}, torch {torch.__version__}", ""]
    for name, by_precision in found.items():
        exact = statistics.mean(by_precision["fp32"])
        seeds = len(by_precision["fp32"])
        lines += [
            f"## {name}, {seeds} seeds",
            "",
            "| precision | mean | against fp32 | highest to lowest seed |",
            "|---|---|---|---|",
        ]
        for precision, values in by_precision.items():
            mean = statistics.mean(values)
            spread = (max(values) - min(values)) / mean
            lines.append(
                f"| {precision} | {mean:.5f} | {100 * (mean / exact - 1):+.2f} % "
                f"| {100 * spread:.1f} % |"
            )
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
