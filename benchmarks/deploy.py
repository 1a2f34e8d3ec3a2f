"""Single-row latency and batch throughput of a deployed model, beside PyTorch, in one run.

    python benchmarks/deploy.py --out benchmarks/records/<date>-<machine>-deploy [--quick]

An LSTM and a GRU of 64 units x 2 layers, 24 rows x 10 columns, as `slipstream.export` writes them.
A single row carries the state on: `step.onnx` in onnxruntime on one thread, `slipstream.Stream` in
numpy, the C code compiled with -O3, and PyTorch's own layers on one thread, given the state. The
window that PyTorch's model(x) computes for each row is measured as well. A batch has 256 windows,
on all cores where a library uses them; the C code runs on one.

All methods take the same rows. They alternate, round by round; a round has some thousand calls,
and its percentiles are over its calls. Reported are medians over rounds, with the lowest and the
highest. The first round does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime
import pyarrow as pa
import pyarrow.parquet
import torch

import slipstream
from slipstream.base import machine

Array = npt.NDArray[Any]
COLUMNS, CONTEXT, BATCH = 10, 24, 256
KINDS = {"LSTM 64 x 2": "lstm", "GRU 64 x 2": "gru"}
LARGEST_DIFFERENCE = 1e-4
"""Of predictions of the methods; the target's spread is 1"""
WINDOW = "PyTorch model(x), 24 rows"
TIMER = """\
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "slip.h"

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* rows from a file; nanoseconds of each step and the last prediction to stdout */
int main(int argc, char **argv) {
    const long rows = atol(argv[2]), windows = atol(argv[3]);
    slip_value *values = malloc(sizeof(slip_value) * (size_t)rows * SLIP_INPUTS);
    double *times = malloc(sizeof(double) * (size_t)(rows + 1));
    slip_value out[SLIP_OUTPUTS] = {0};
    FILE *file = fopen(argv[1], "rb");
    long i, j;
    if (argc != 4 || !values || !times || !file) return 2;
    i = (long)fread(values, sizeof(slip_value) * SLIP_INPUTS, (size_t)rows, file);
    if (i != rows) return 2;
    slip_reset();
    for (i = 0; i < rows; i++) {
        const double begin = now();
        slip_step(values + i * SLIP_INPUTS, out);
        times[i] = now() - begin;
    }
    const slip_value last = out[0];
    times[rows] = now();
    for (j = 0; j < windows; j++)
        slip_window(values + (j % (rows - SLIP_CONTEXT)) * SLIP_INPUTS, out);
    times[rows] = (now() - times[rows]) / (double)windows;
    fwrite(times, sizeof(double), (size_t)(rows + 1), stdout);
    const double answer = (double)last;
    fwrite(&answer, sizeof(double), 1, stdout);
    return 0;
}
"""
"""Times the exported C code from within"""


class Sizes(NamedTuple):
    """How much is measured."""

    rounds: int
    rows: int
    """Single rows in a round"""
    batches: int
    """Batches in a round"""


class Measured(NamedTuple):
    """One round of one method."""

    row_us: Array | None
    """Microseconds of each row"""
    windows_per_s: float | None
    last: float | None
    """The prediction at the last row, for comparison"""


Method = Callable[[Array, Sizes], Measured]


def train_run(folder: Path, kind: str) -> Path:
    """Train a model for a moment; its speed does not depend on what it has learned."""
    draw = np.random.default_rng(0)
    columns = {f"x{i}": draw.standard_normal(1_500) for i in range(COLUMNS)}
    columns["y"] = columns["x0"] + 0.1 * draw.standard_normal(1_500)
    path = folder / "rows.parquet"
    pa.parquet.write_table(pa.table(columns), path)
    config = slipstream.Config(
        name=kind,
        out=str(folder / "runs"),
        data={"path": str(path), "targets": ["y"], "context": CONTEXT, "horizon": 0},
        model={"kind": kind, "hidden": 64, "layers": 2, "dropout": 0.0},
        train={"epochs": 1},
        engine={"device": "cpu", "plan": "off"},
    )
    return slipstream.train(config, quiet=True).run


def time_rows(step: Callable[[Array], float], rows: Array) -> tuple[Array, float]:
    """Call a function with each row; return microseconds and the last result."""
    times, value = np.empty(len(rows)), 0.0
    for i, row in enumerate(rows):
        began = time.perf_counter_ns()
        value = step(row)
        times[i] = time.perf_counter_ns() - began
    return times / 1e3, value


def time_batches(predict: Callable[[Array], Any], rows: Array, count: int) -> float:
    """Return windows per second of batches of consecutive windows."""
    windows = np.lib.stride_tricks.sliding_window_view(rows, CONTEXT, axis=0).transpose(0, 2, 1)
    batch = np.ascontiguousarray(windows[:BATCH], dtype=np.float32)
    predict(batch)
    began = time.perf_counter()
    for _ in range(count):
        predict(batch)
    return count * BATCH / (time.perf_counter() - began)


def make_onnx(run: Path, folder: Path) -> Method:
    """Return onnxruntime on the exported graphs."""
    slipstream.export(run, to="onnx", out=folder, quiet=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    step = onnxruntime.InferenceSession(folder / "step.onnx", options)
    whole = onnxruntime.InferenceSession(folder / "model.onnx")
    states = {one.name: one.shape[1:] for one in step.get_inputs() if one.name != "row"}
    names = ["prediction", *(f"new_{name}" for name in states)]

    def measure(rows: Array, sizes: Sizes) -> Measured:
        feeds = {name: np.zeros((1, *shape), np.float32) for name, shape in states.items()}

        def call(row: Array) -> float:
            feeds["row"] = row[None]
            prediction, *after = step.run(names, feeds)
            feeds.update(zip(states, after, strict=True))
            return float(prediction[0, 0, 0])

        times, last = time_rows(call, rows)
        speed = time_batches(lambda x: whole.run(["prediction"], {"rows": x}), rows, sizes.batches)
        return Measured(times, speed, last)

    return measure


def make_stream(run: Path) -> Method:
    """Return `slipstream.Stream`, which takes neither torch nor onnxruntime."""

    def measure(rows: Array, _: Sizes) -> Measured:
        stream = slipstream.Stream(run, regime="carried")

        def call(row: Array) -> float:
            prediction = stream.push(row)
            assert prediction is not None
            return prediction.value

        times, last = time_rows(call, rows)
        return Measured(times, None, last)

    return measure


def make_c(run: Path, folder: Path) -> Method:
    """Return the exported C code, in a process of its own."""
    slipstream.export(run, to="c", out=folder, quiet=True)
    (folder / "timer.c").write_text(TIMER)
    program = folder / "timer"
    files = [str(folder / "slip.c"), str(folder / "timer.c")]
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c99", "-O3", *files, "-lm", "-o", str(program)], check=True)

    def measure(rows: Array, sizes: Sizes) -> Measured:
        path = folder / "rows.bin"
        rows.astype(np.float32).tofile(path)
        count = sizes.batches * BATCH
        done = subprocess.run(
            [program, path, str(len(rows)), str(count)], check=True, capture_output=True
        )
        *times, window, last = np.frombuffer(done.stdout, dtype=np.float64)
        return Measured(np.array(times) / 1e3, 1e9 / window, last)

    return measure


def make_torch(run: Path) -> dict[str, Method]:
    """Return PyTorch's layers on one row with its state, and the model on the row's window."""
    model = slipstream.load(run, device="cpu")
    core, scaler = model.module.core, model.scaler
    core.use_own_kernels = False  # PyTorch's layers, not ours
    columns = list(model.inputs)
    shift, size = (np.array([by[name] for name in columns]) for by in (scaler.shift, scaler.size))
    target = scaler.shift["y"], scaler.size["y"]

    def scale(rows: Array) -> torch.Tensor:
        return torch.from_numpy(((rows - shift) / size).astype(np.float32))

    def measure_row(rows: Array, _: Sizes) -> Measured:
        states: list[Any] = [None] * len(core.layers)

        def call(row: Array) -> float:
            sequence = scale(row)[None, None]
            for depth, layer in enumerate(core.layers):
                sequence, states[depth] = layer(sequence, states[depth])
            return float(core.head(sequence[-1], None)) * target[1] + target[0]

        with torch.inference_mode(), machine.set_flags(threads=1, tf32=False, onednn=True):
            times, last = time_rows(call, rows)
        return Measured(times, None, last)

    def measure_window(rows: Array, sizes: Sizes) -> Measured:
        def call(at: int) -> float:
            window = scale(rows[at : at + CONTEXT])[:, None]
            return float(model.module(window, None))

        def predict(windows: Array) -> torch.Tensor:
            out: torch.Tensor = model.module(scale(windows).transpose(0, 1).contiguous(), None)
            return out

        with torch.inference_mode():
            with machine.set_flags(threads=1, tf32=False, onednn=True):
                times = np.empty(len(rows) - CONTEXT)
                for at in range(len(times)):
                    began = time.perf_counter_ns()
                    call(at)
                    times[at] = time.perf_counter_ns() - began
            with machine.set_flags(threads=os.cpu_count() or 1, tf32=False, onednn=True):
                speed = time_batches(predict, rows, sizes.batches)
        return Measured(times / 1e3, speed, None)

    return {"PyTorch layers, 1 row": measure_row, WINDOW: measure_window}


def make_methods(run: Path, folder: Path) -> dict[str, Method]:
    return {
        "step.onnx, onnxruntime": make_onnx(run, folder / "onnx"),
        "slipstream.Stream, numpy": make_stream(run),
        "C99": make_c(run, folder / "c"),
        **make_torch(run),
    }


def measure(methods: Mapping[str, Method], sizes: Sizes) -> dict[str, dict[str, list[float]]]:
    """Return by method: the percentiles and the throughput of each round."""
    draw = np.random.default_rng(1)
    result: dict[str, dict[str, list[float]]] = {name: {} for name in methods}
    for number in range(sizes.rounds + 1):
        rows = draw.standard_normal((sizes.rows, COLUMNS))
        rows = rows.astype(np.float32).astype(np.float64)
        answers = {}
        for name, method in methods.items():
            # every library gets float32 rows but PyTorch, whose scaling is done in float64
            done = method(rows if "PyTorch" in name else rows.astype(np.float32), sizes)
            if done.last is not None:
                answers[name] = done.last
            if number == 0:
                continue
            entry = result[name]
            if done.row_us is not None:
                for percent in (50, 99):
                    value = float(np.percentile(done.row_us, percent))
                    entry.setdefault(f"p{percent}_us", []).append(value)
            if done.windows_per_s is not None:
                entry.setdefault("windows_per_s", []).append(done.windows_per_s)
        spread = max(answers.values()) - min(answers.values())
        if spread > LARGEST_DIFFERENCE:
            raise SystemExit(f"the methods disagree after {sizes.rows} rows: {answers}")
    return result


def format_cell(values: list[float] | None) -> str:
    if not values:
        return "–"
    digits = 0 if min(values) >= 1_000 else 1
    middle, low, high = (f"{f(values):,.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


def summarize(results: Mapping[str, Any], sizes: Sizes) -> str:
    """Return the tables as Markdown."""
    lines = [
        "# Latency of one row and throughput of batches",
        "",
        f"Medians of {sizes.rounds} alternating rounds (lowest to highest); a round has "
        f"{sizes.rows:,} rows and {sizes.batches} batches of {BATCH} windows of {CONTEXT} rows. "
        "Microseconds for a row: one thread. The C code computes windows on one thread, the others "
        "on all cores.",
    ]
    for case, methods in results.items():
        lines += ["", f"## {case}", "", "| | p50, µs | p99, µs | windows/s |", "|---|---|---|---|"]
        for name, one in methods.items():
            cells = [format_cell(one.get(key)) for key in ("p50_us", "p99_us", "windows_per_s")]
            lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--quick", action="store_true", help="a few rows only, to try it")
    parsed = arguments.parse_args()
    sizes = Sizes(2, 300, 2) if parsed.quick else Sizes(7, 3_000, 20)
    warnings.simplefilter("ignore")
    results = {}
    for case, kind in KINDS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            results[case] = measure(make_methods(train_run(folder, kind), folder), sizes)
    text = summarize(results, sizes)
    parsed.out.mkdir(parents=True, exist_ok=True)
    hardware = machine.describe(torch.device("cpu"))
    hardware["onnxruntime"] = onnxruntime.__version__
    content = {"hardware": hardware, "sizes": sizes._asdict(), "results": results}
    (parsed.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (parsed.out / "summary.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
