"""Measures what a common order of batches saves: lanes that read each batch once, compared with
lanes that each read their own.

    python benchmarks/orders.py --out benchmarks/records/<date>-<hardware>-orders [--lanes 8]

It times whole training steps of packs on the available device, in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from slipstream import machine
from slipstream.autotune.workload import prepare_task
from slipstream.bench import cases, results
from slipstream.bench.cases import Case
from slipstream.bench.results import BenchResult, ResultRow, ResultTable
from slipstream.config import replace_settings
from slipstream.engine.lanes import pack
from slipstream.engine.lanes.lane import EpochStart, Lane
from slipstream.engine.lanes.pack import Pack

CASES = ("MLP", "Transformer", "B")
ROUNDS, STRETCH_S = 9, 0.5
OWN, ONE = "an order for each lane", "one order for all"


def build_pack(case: Case, lanes: int, order_seed: int | None) -> Pack:
    config = replace_settings(
        case.config, reset_engine=True, engine={"plan": "off"}, train={"order_seed": order_seed}
    )
    task, plan = prepare_task(config, case.dataset)
    assert case.dataset.memory is not None
    assert task.series is not None
    starts = case.dataset.memory.starts
    some = [Lane(config.model_copy(update={"seed": seed}), starts) for seed in range(lanes)]
    with plan.flags():
        return pack.build_pack(some, case.dataset.signature, task.series, plan)


def time_step_ms(packed: Pack, steps: int) -> float:
    """Return the time per step at the start of an epoch, without the very first step."""
    with packed.plan.flags():
        packed.begin({place: EpochStart() for place in range(len(packed.lanes))})
        packed.advance()
        machine.synchronize(packed.plan.device)
        start = time.perf_counter()
        for _ in range(steps):
            packed.advance()
        machine.synchronize(packed.plan.device)
        return 1e3 * (time.perf_counter() - start) / steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--lanes", type=int, default=8)
    options = arguments.parse_args()
    start = time.monotonic()
    rows, cells = [], []
    for name in CASES:
        case = cases.build_standard_cases([name])[0]
        packs = {
            OWN: build_pack(case, options.lanes, None),
            ONE: build_pack(case, options.lanes, 0),
        }
        most = packs[OWN].num_steps(0) - 1
        times_by_variant: dict[str, list[float]] = {variant: [] for variant in packs}
        for _ in range(2):  # captures
            for packed in packs.values():
                once = time_step_ms(packed, min(3, most))
        steps = max(1, min(most, int(1e3 * STRETCH_S / once)))
        for _ in range(ROUNDS):
            for variant, packed in packs.items():
                times_by_variant[variant].append(time_step_ms(packed, steps))
        rows += [
            ResultRow(name, variant, "ms per step", times)
            for variant, times in times_by_variant.items()
        ]
        own, one = (statistics.median(times_by_variant[variant]) for variant in (OWN, ONE))
        cells.append([name, f"{own:.3f}", f"{one:.3f}", f"{100 * (1 - one / own):.1f} %"])
        print(*cells[-1], flush=True)
        for packed in packs.values():
            packed.close()
    table = ResultTable(
        f"Steps of {options.lanes} lanes, ms",
        ["case", OWN, ONE, "saved"],
        cells,
        "Medians, in turns.",
    )
    savings = ", ".join(f"{cell[0]} {cell[3]}" for cell in cells)
    spent = time.monotonic() - start
    result = BenchResult(
        "orders", f"One order for all lanes saves: {savings}", rows, [table], {}, spent
    )
    results.write_result(result, options.out)


if __name__ == "__main__":
    main()
