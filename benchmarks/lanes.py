"""Measures many models in one program, beside one model and beside Lightning at its best.

    python benchmarks/lanes.py --out benchmarks/records/<date>-<hardware>-lanes [--cases A,B]
        [--alone] [--steps]

First one recurrent layer, forward and backward, by cuDNN and by our own kernels, for one model and
for 16; then wide ones, of which several programs share one, or which run step by step where these
would not all run at once, for up to 64 models. Then whole
training steps of the standard cases: one model through cuDNN and through our kernels, 16 lanes and
64, and Lightning in its fastest ways, which --alone leaves out; --steps leaves out the layers.
Repeats of all but Lightning take turns; figures are medians. Needs a GPU.
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

from slipstream.autotune.workload import TrainingWorkload, prepare_task
from slipstream.bench import cases, results
from slipstream.bench.cases import Case
from slipstream.bench.frameworks import lightning_loop
from slipstream.bench.frameworks.settings import PeerSettings
from slipstream.bench.results import BenchResult, ResultRow, ResultTable
from slipstream.config import replace_settings
from slipstream.engine.lanes import pack
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.kernels import rnn_layer

LAYERS = {  # rows, windows, inputs, units, and whether only the last output is asked for
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


def captured(step: Step) -> Step:
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


def in_turns(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Milliseconds of each, in rounds over all of them."""
    counts = {}
    for name, step in steps.items():
        _ms(step, 3)
        counts[name] = max(3, int(1e3 * STRETCH_S / _ms(step, 3)))
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            _ms(step, max(counts[name] // 4, 1))  # its clock is up, its data are near
            found[name].append(_ms(step, counts[name]))
    return found


def _ms(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / count


def layer_steps(kind: str, size: Size, counts: tuple[int, ...]) -> Iterator[tuple[str, Step]]:
    """A layer by cuDNN, and by ours for as many models as there are `counts` and memory for."""
    T, B, D, H = size[:4]
    inner = D >= INNER
    layer = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](D, H).cuda()
    half = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](D, H).cuda().half()
    x16 = torch.randn(T, B, D, device="cuda").half().requires_grad_(inner)
    grad16 = torch.randn(T, B, H, device="cuda").half()
    leaves16 = [*half.parameters(), *([x16] if inner else [])]
    yield CUDNN, captured(lambda: torch.autograd.grad(half(x16)[0], leaves16, grad16))
    for lanes in counts:
        try:
            own = own_step(kind, size, layer.all_weights[0], lanes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        yield (OWN if lanes == 1 else f"{lanes} lanes"), own


def own_step(kind: str, size: Size, of_one: list[torch.Tensor], lanes: int) -> Step:
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

    return captured(step)


def layer_rows(kind: str, name: str, size: Size, counts: tuple[int, ...]) -> Iterator[ResultRow]:
    sizes = {f"{lanes} lanes": lanes for lanes in counts}
    for way, times in in_turns(dict(layer_steps(kind, size, counts))).items():
        each = [ms / sizes.get(way, 1) for ms in times]
        yield ResultRow(f"{kind.upper()} {name}", way, "ms per model", each)
    torch.cuda.empty_cache()


def solo(case: Case, **engine: Any) -> Step:
    """A captured step; torch's flags matter only until it is captured."""
    config = replace_settings(case.config, reset_engine=True, engine={"plan": "off"} | engine)
    return TrainingWorkload(config, case.dataset, first=5).step


def together(case: Case, lanes: int) -> Step:
    config = replace_settings(
        case.config, reset_engine=True, engine={"plan": "off", "precision": "fp16"}
    )
    task, plan = prepare_task(config, case.dataset)
    assert case.dataset.memory is not None
    assert task.series is not None
    starts = case.dataset.memory.starts
    made = [Lane(config.model_copy(update={"seed": seed}), starts) for seed in range(lanes)]
    taken = [0]

    def step() -> None:
        if taken[0] % packed.num_steps(0) == 0:
            packed.buffers["cursor"].zero_()
        taken[0] += 1
        packed.advance()

    with plan.flags():
        packed = pack.build_pack(made, case.dataset.signature, task.series, plan)
        packed.begin({place: EpochStart() for place in range(lanes)})
        for _ in range(5):
            step()
    if packed.failures():
        raise RuntimeError(packed.failures())
    return step


def case_of(name: str) -> Case:
    if name not in SMALL:
        return cases.build_standard_cases([name])[0]
    like, smaller = SMALL[name]
    case = cases.build_standard_cases([like])[0]
    return replace(case, name=name, config=replace_settings(case.config, **smaller))


def step_rows(case: Case, *, beside: bool) -> Iterator[ResultRow]:
    steps = {CUDNN: solo(case, precision="fp16")}
    if case.config.model.spec.is_recurrent:
        steps[OWN] = solo(case, precision="fp16", cudnn="off")
    else:
        steps = {"one model": steps[CUDNN]}
    sizes = dict.fromkeys(steps, 1)
    for lanes in LANES.get(case.name, [16, 64]):
        steps[f"{lanes} lanes"], sizes[f"{lanes} lanes"] = together(case, lanes), lanes
    for way, times in in_turns(steps).items():
        per_model = [ms / sizes[way] for ms in times]
        yield ResultRow(case.name, way, "ms per step and model", per_model, {"lanes": sizes[way]})
    del steps
    torch.cuda.empty_cache()
    for precision, workers in LIGHTNING if beside else ():
        name = f"{BEST}, {precision}, {workers} workers"
        peer = PeerSettings(name, "lightning", precision, workers)
        found = lightning_loop.time_steps(
            case.config, case.dataset, peer, warm_up=4 + 2 * workers, repeats=5, steps=20
        )
        yield ResultRow(case.name, name, "ms per step and model", found.times, {"lanes": 1})


def layers_table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for name in dict.fromkeys(row.case for row in rows):
        of_case = {row.variant: row.median for row in rows if row.case == name}
        own, theirs, many = of_case[OWN], of_case[CUDNN], of_case["16 lanes"]
        gains = f"{theirs / own:.2f}x", f"{theirs / many:.1f}x"
        cells.append([name, f"{theirs:.4f}", f"{own:.4f}", gains[0], f"{many:.4f}", gains[1]])
    headings = ["layer", "cuDNN", "our kernels", "faster by", "16 lanes, each", "faster by"]
    note = "One layer and direction of the case in fp16, forward and backward, captured; ms."
    return ResultTable("One recurrent layer", headings, cells, note)


def wide_table(rows: list[ResultRow]) -> ResultTable:
    ways = [OWN, "16 lanes", "64 lanes"]
    cells = []
    for name in dict.fromkeys(row.case for row in rows):
        of_case = {row.variant: row.median for row in rows if row.case == name}
        theirs = of_case[CUDNN]
        told = [
            f"{of_case[way]:.4f} ({theirs / of_case[way]:.2f}x)" if way in of_case else ""
            for way in ways
        ]
        cells.append([name, f"{theirs:.4f}", *told])
    headings = ["inputs to units", "cuDNN", "our kernels", "16 lanes, each", "64 lanes, each"]
    note = (
        "One layer over 24 rows, batch 256, fp16, forward and backward, captured; ms per model, and"
        " how much faster than cuDNN with one. Up to 128 units a program has a layer to itself;"
        " wider ones are split over several where all of these run at once, which is so for one"
        " model, and go step by step otherwise. Empty: out of memory."
    )
    return ResultTable("Wide layers", headings, cells, note)


def steps_table(rows: list[ResultRow]) -> ResultTable:
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
    headings = ["case", "way", "ms per step and model", "over the fastest with one"]
    note = "Whole training steps: gather, forward, loss, backward, clipping, update; ours in fp16."
    return ResultTable("Training steps", headings, cells, note)


def headline(steps: list[ResultRow]) -> str:
    told = [
        f"{row.case} {row.median:.3g}" for row in steps if row.extra["lanes"] == 16 and row.repeats
    ]
    return f"16 models in one program: {', '.join(told)} ms per step and model"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", default=",".join([*cases.STANDARD, *SMALL]))
    arguments.add_argument("--alone", action="store_true")
    arguments.add_argument("--steps", action="store_true")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    layers: list[ResultRow] = []
    wide: list[ResultRow] = []
    steps: list[ResultRow] = []
    for kind in ("lstm", "gru") if not given.steps else ():
        for name, size in LAYERS.items():
            layers += layer_rows(kind, name, size, (1, 16))
            print(f"{time.monotonic() - began:5.0f} s, layer {kind} {name}", flush=True)
    for name, size in WIDE.items() if not given.steps else ():
        wide += layer_rows("lstm", name, size, (1, 16, 64))
        print(f"{time.monotonic() - began:5.0f} s, layer lstm {name}", flush=True)
    for case in map(case_of, given.cases.split(",")):
        for row in step_rows(case, beside=not given.alone):
            steps.append(row)
            elapsed_s = time.monotonic() - began
            print(f"{elapsed_s:5.0f} s, {row.case:12s} {row.variant:45s} {row.median:.4f}")
        tables = [steps_table(steps)]
        if not given.steps:
            tables = [layers_table(layers), wide_table(wide), *tables]
        spent = time.monotonic() - began
        rows = [*layers, *wide, *steps]
        results.write_result(
            BenchResult("lanes", headline(steps), rows, tables, {}, spent), given.out
        )


if __name__ == "__main__":
    main()
