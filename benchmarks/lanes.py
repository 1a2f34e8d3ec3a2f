"""Measures many models in one program, compared with one model and with Lightning at its best.

    python benchmarks/lanes.py --out benchmarks/records/<date>-<hardware>-lanes [--cases A,B]
        [--alone] [--steps]

First one recurrent layer, forward and backward, with cuDNN and with our own kernels, for one model
and for 16. Then wide layers, for up to 64 models: several programs share a layer, or it runs step
by step where these programs would not all run at once. Then whole training steps of the standard
cases: one model with cuDNN and with our kernels, 16 and 64 lanes, and Lightning's fastest variants,
which --alone leaves out; --steps leaves out the layers. Repeats of all but Lightning take turns;
figures are medians. Needs a GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.config import replace_settings
from slipstream.engine import pack
from slipstream.engine.lanes import EpochStart, Lane
from slipstream.engine.planning import TrainingWorkload, build_by_rules
from slipstream.kernels import rnn_layer
from slipstream.tools.bench import cases, results
from slipstream.tools.bench.cases import Case
from slipstream.tools.bench.frameworks import PeerSettings, time_lightning_steps
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

LAYERS = {  # rows, windows, inputs, units, and whether only the last output is needed
    "A": (105, 512, 4, 128, False),
    "B": (24, 256, 10, 64, False),
    "C": (400, 200, 4, 128, True),
    "D": (150, 256, 4, 128, True),
}
WIDE = {  # rows, windows, inputs, units: a first layer, and layers after another one
    "11 to 256": (24, 256, 11, 256, False),
    "256 to 128": (24, 256, 256, 128, False),
    "256 to 192": (24, 256, 256, 192, False),
    "256 to 256": (24, 256, 256, 256, False),
    "11 to 512": (24, 256, 11, 512, False),
}
INNER = 128
"""Inputs from which on a layer comes after another one: they are in half precision and have a
gradient"""
LANES = {"A": [16], "B": [16, 64], "C": [16], "D": [16]}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {  # of a standard case, what is smaller
    "small MLP": ("MLP", {"model": {"hidden": [64, 32], "layers": 2}, "train": {"batch": 128}}),
    "small Transformer": (
        "Transformer",
        {"model": {"hidden": 32, "layers": 2, "heads": 4}, "train": {"batch": 64}},
    ),
}
LIGHTNING = [("tf32", 0), ("tf32", 4), ("tf32", 8), ("bf16", 8)]
ROUNDS = 5
STRETCH_S = 0.04
CUDNN, OWN, BEST = "one model, cuDNN", "one model, our kernels", "Lightning at its best"
Step = Callable[[], Any]
Size = tuple[int, int, int, int, bool]


def capture(step: Step) -> Step:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_: Step = step) -> None:  # what the step reads lives as long as its graph
        graph.replay()

    return replay


def time_in_turns(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Return the milliseconds of each step, measured in rounds over all of them."""
    counts = {}
    for name, step in steps.items():
        _time_ms(step, 3)
        counts[name] = max(3, int(1e3 * STRETCH_S / _time_ms(step, 3)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            _time_ms(step, max(counts[name] // 4, 1))  # its clock is up, its data are near
            times[name].append(_time_ms(step, counts[name]))
    return times


def _time_ms(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def build_layer_steps(kind: str, size: Size, counts: tuple[int, ...]) -> Iterator[tuple[str, Step]]:
    """Yield a layer with cuDNN, and with our kernels for as many models as fit into memory."""
    T, B, D, H = size[:4]
    inner = D >= INNER
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](D, H).cuda()
    half = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](D, H).cuda().half()
    x16 = torch.randn(T, B, D, device="cuda").half().requires_grad_(inner)
    grad16 = torch.randn(T, B, H, device="cuda").half()
    leaves16 = [*half.parameters(), *([x16] if inner else [])]
    yield CUDNN, capture(lambda: torch.autograd.grad(half(x16)[0], leaves16, grad16))
    for lanes in counts:
        try:
            own = build_own_step(kind, size, layer.all_weights[0], lanes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        yield (OWN if lanes == 1 else f"{lanes} lanes"), own


def build_own_step(kind: str, size: Size, of_one: list[torch.Tensor], lanes: int) -> Step:
    T, B, D, H, last = size
    inner = D >= INNER
    weights = [w.detach().expand(lanes, *w.shape).clone().requires_grad_() for w in of_one]
    x = torch.randn(lanes, T, B, D, device="cuda")
    x = x.half().requires_grad_() if inner else x
    grad = torch.randn(lanes, *([] if last else [T]), B, H, device="cuda").half()
    leaves = [*weights, *([x] if inner else [])]

    def step() -> Any:
        with torch.autocast("cuda", torch.float16):
            out = torch.func.vmap(lambda x, *w: rnn_layer(kind, x, w, last=last))(x, *weights)
        return torch.autograd.grad(out, leaves, grad)

    return capture(step)


def measure_layer(kind: str, name: str, size: Size, counts: tuple[int, ...]) -> Iterator[ResultRow]:
    sizes = {f"{lanes} lanes": lanes for lanes in counts}
    for variant, times in time_in_turns(dict(build_layer_steps(kind, size, counts))).items():
        each = [ms / sizes.get(variant, 1) for ms in times]
        yield ResultRow(f"{kind.upper()} {name}", variant, "ms per model", each)
    torch.cuda.empty_cache()


def build_single_step(case: Case, **engine: Any) -> Step:
    """Build a captured step; torch's flags matter only until it is captured."""
    config = replace_settings(case.config, reset_engine=True, engine={"plan": "off"} | engine)
    return TrainingWorkload(config, case.dataset, first=5).step


def build_lane_step(case: Case, lanes: int) -> Step:
    config = replace_settings(
        case.config, reset_engine=True, engine={"plan": "off", "precision": "fp16"}
    )
    task, plan = build_by_rules(config, case.dataset)
    assert case.dataset.memory is not None
    assert task.series is not None
    starts = case.dataset.memory.starts
    members = [Lane(config.model_copy(update={"seed": seed}), starts) for seed in range(lanes)]
    num_taken = 0

    def step() -> None:
        nonlocal num_taken
        if num_taken % packed.num_steps(0) == 0:
            packed.buffers["cursor"].zero_()
        num_taken += 1
        packed.advance()

    with plan.flags():
        packed = pack.build_pack(members, case.dataset.signature, task.series, plan)
        packed.begin({place: EpochStart() for place in range(lanes)})
        for _ in range(5):
            step()
    if packed.failures():
        raise RuntimeError(packed.failures())
    return step


def build_case(name: str) -> Case:
    if name not in SMALL:
        return cases.build_standard_cases([name])[0]
    like, smaller = SMALL[name]
    case = cases.build_standard_cases([like])[0]
    return replace(case, name=name, config=replace_settings(case.config, **smaller))


def measure_steps(case: Case, *, with_lightning: bool) -> Iterator[ResultRow]:
    steps = {CUDNN: build_single_step(case, precision="fp16")}
    if case.config.model.spec.is_recurrent:
        steps[OWN] = build_single_step(case, precision="fp16", rnn="slipstream")
    else:
        steps = {"one model": steps[CUDNN]}
    sizes = dict.fromkeys(steps, 1)
    for lanes in LANES.get(case.name, [16, 64]):
        steps[f"{lanes} lanes"], sizes[f"{lanes} lanes"] = build_lane_step(case, lanes), lanes
    for variant, times in time_in_turns(steps).items():
        per_model = [ms / sizes[variant] for ms in times]
        yield ResultRow(
            case.name, variant, "ms per step and model", per_model, {"lanes": sizes[variant]}
        )
    del steps
    torch.cuda.empty_cache()
    for precision, workers in LIGHTNING if with_lightning else ():
        name = f"{BEST}, {precision}, {workers} workers"
        peer = PeerSettings(name, "lightning", precision, workers)
        timings = time_lightning_steps(
            case.config, case.dataset, peer, warm_up=4 + 2 * workers, repeats=5, steps=20
        )
        yield ResultRow(case.name, name, "ms per step and model", timings.times, {"lanes": 1})


def build_layers_table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row.case for row in rows):
        of_case = {row.variant: row.median for row in rows if row.case == name}
        own, theirs, many = of_case[OWN], of_case[CUDNN], of_case["16 lanes"]
        gains = f"{theirs / own:.2f}x", f"{theirs / many:.1f}x"
        cells.append([name, f"{theirs:.4f}", f"{own:.4f}", gains[0], f"{many:.4f}", gains[1]])
    headings = ["layer", "cuDNN", "our kernels", "faster by", "16 lanes, each", "faster by"]
    note = "One layer and direction of the case in fp16, forward and backward, captured; ms."
    return ResultTable("One recurrent layer", headings, cells, note)


def build_wide_table(rows: list[ResultRow]) -> ResultTable:
    variants = [OWN, "16 lanes", "64 lanes"]
    cells = []
    for name in dict.fromkeys(row.case for row in rows):
        of_case = {row.variant: row.median for row in rows if row.case == name}
        theirs = of_case[CUDNN]
        labels = [
            f"{of_case[variant]:.4f} ({theirs / of_case[variant]:.2f}x)"
            if variant in of_case
            else ""
            for variant in variants
        ]
        cells.append([name, f"{theirs:.4f}", *labels])
    headings = ["inputs to units", "cuDNN", "our kernels", "16 lanes, each", "64 lanes, each"]
    note = (
        "One layer over 24 rows, batch 256, fp16, forward and backward, captured; ms per model, and"
        " how much faster than cuDNN with one. Up to 128 units a program has a layer to itself;"
        " wider ones are split over several where all of these run at once, which is so for one"
        " model, and go step by step otherwise. Empty: out of memory."
    )
    return ResultTable("Wide layers", headings, cells, note)


def build_steps_table(rows: list[ResultRow]) -> ResultTable:
    one: dict[str, float] = {}
    for row in rows:
        if row.variant.startswith("one model"):
            one[row.case] = min(row.median, one.get(row.case, row.median))
    cells = [
        [
            row.case,
            row.variant,
            f"{row.median:.4f} ({min(row.repeats):.4f} to {max(row.repeats):.4f})",
            results.format_ratio(one[row.case] / row.median),
        ]
        for row in rows
    ]
    headings = ["case", "variant", "ms per step and model", "over the fastest with one"]
    note = "Whole training steps: gather, forward, loss, backward, clipping, update; ours in fp16."
    return ResultTable("Training steps", headings, cells, note)


def write_headline(steps: list[ResultRow]) -> str:
    labels = [
        f"{row.case} {row.median:.3g}" for row in steps if row.extra["lanes"] == 16 and row.repeats
    ]
    return f"16 models in one program: {', '.join(labels)} ms per step and model"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", default=",".join([*cases.STANDARD, *SMALL]))
    arguments.add_argument("--alone", action="store_true")
    arguments.add_argument("--steps", action="store_true")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    start = time.monotonic()
    layers: list[ResultRow] = []
    wide: list[ResultRow] = []
    steps: list[ResultRow] = []
    for kind in ("lstm", "gru") if not options.steps else ():
        for name, size in LAYERS.items():
            layers += measure_layer(kind, name, size, (1, 16))
            print(f"{time.monotonic() - start:5.0f} s, layer {kind} {name}", flush=True)
    for name, size in WIDE.items() if not options.steps else ():
        wide += measure_layer("lstm", name, size, (1, 16, 64))
        print(f"{time.monotonic() - start:5.0f} s, layer lstm {name}", flush=True)
    for case in map(build_case, options.cases.split(",")):
        for row in measure_steps(case, with_lightning=not options.alone):
            steps.append(row)
            elapsed_s = time.monotonic() - start
            print(f"{elapsed_s:5.0f} s, {row.case:12s} {row.variant:45s} {row.median:.4f}")
        tables = [build_steps_table(steps)]
        if not options.steps:
            tables = [build_layers_table(layers), build_wide_table(wide), *tables]
        spent = time.monotonic() - start
        rows = [*layers, *wide, *steps]
        results.write_result(
            BenchResult("lanes", write_headline(steps), rows, tables, {}, spent), options.out
        )


if __name__ == "__main__":
    main()
