"""CPU time of recurrent layers on one thread: our kernels in C, ATen's layers and oneDNN's.

    python benchmarks/cpu_layers.py --out benchmarks/records/<date>-<machine>-cpu-layers

Forward and backward pass from the last output, interleaved; medians. CPU time, since wall time on
a shared machine is that of its other processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from slipstream.base import machine
from slipstream.kernels import build_library, rnn_layer

REPEATS = 7
SHAPES = {  # kind, layers, units, rows, inputs, batch
    "B": ("lstm", 2, 64, 24, 10, 256),
    "GRU": ("gru", 2, 64, 24, 10, 256),
    "LSTM 32, 120 rows": ("lstm", 1, 32, 120, 3, 256),
}


def make_passes(case: str) -> dict[str, Callable[[], None]]:
    """Make the passes of one case, by the name of what computes them."""
    kind, depth, units, rows, inputs, batch = SHAPES[case]
    layers = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](inputs, units, depth)
    x = torch.randn(rows, batch, inputs)

    def ours() -> None:
        sequence = x
        for layer, weights in enumerate(layers.all_weights):
            sequence = rnn_layer(kind, sequence, weights, last=layer == depth - 1)
        sequence.sum().backward()

    def with_torch(onednn: bool) -> Callable[[], None]:
        def run() -> None:
            with machine.set_flags(threads=1, tf32=False, onednn=onednn):
                layers(x)[0][-1].sum().backward()

        return run

    return {"ours": ours, "ATen": with_torch(False), "oneDNN": with_torch(True)}


def measure(case: str) -> dict[str, list[float]]:
    """Return the milliseconds of every repeat; the first one does not count."""
    passes = make_passes(case)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(REPEATS + 1):
        for name, run in passes.items():
            started_at = time.process_time()
            run()
            times[name].append(1e3 * (time.process_time() - started_at))
    return {name: each[1:] for name, each in times.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    out: Path = arguments.parse_args().out
    if not build_library():
        raise SystemExit("there is no C compiler that works")
    torch.set_num_threads(1)
    results = {case: measure(case) for case in SHAPES}
    lines = ["# CPU time of recurrent layers, forward and backward, on one thread", ""]
    lines += [f"Milliseconds: medians of {REPEATS} interleaved repeats (lowest to highest).", ""]
    lines += ["| case | ours | ATen | oneDNN | ATen / ours | oneDNN / ours |", "|---" * 6 + "|"]
    for case, times in results.items():
        middle = {name: statistics.median(each) for name, each in times.items()}
        cells = [f"{middle[n]:.1f} ({min(t):.1f} to {max(t):.1f})" for n, t in times.items()]
        ratios = [f"{middle[name] / middle['ours']:.2f}x" for name in ("ATen", "oneDNN")]
        lines.append(f"| {' | '.join([case, *cells, *ratios])} |")
    out.mkdir(parents=True, exist_ok=True)
    content = {"hardware": machine.describe(torch.device("cpu")), "ms": results}
    (out / "results.json").write_text(json.dumps(content, indent=1))
    (out / "summary.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
