"""Measures what one order of batches saves: lanes that read each batch once, beside lanes that each
read their own.

    python benchmarks/orders.py --out benchmarks/records/<date>-<hardware>-orders [--lanes 8]

Whole training steps of packs on the device that there is, in turns; figures are medians.
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


def made(case: Case, lanes: int, order_seed: int | None) -> Pack:
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


def step_ms(packed: Pack, steps: int) -> float:
    """Of the first steps of an epoch; the first of all is not timed."""
    with packed.plan.flags():
        packed.begin({place: EpochStart() for place in range(len(packed.lanes))})
        packed.advance()
        machine.synchronize(packed.plan.device)
        began = time.perf_counter()
        for _ in range(steps):
            packed.advance()
        machine.synchronize(packed.plan.device)
        return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--lanes", type=int, default=8)
    given = arguments.parse_args()
    began = time.monotonic()
    rows, cells = [], []
    for name in CASES:
        case = cases.build_standard_cases([name])[0]
        packs = {OWN: made(case, given.lanes, None), ONE: made(case, given.lanes, 0)}
        most = packs[OWN].num_steps(0) - 1
        found: dict[str, list[float]] = {way: [] for way in packs}
        for _ in range(2):  # captures
            for packed in packs.values():
                once = step_ms(packed, min(3, most))
        steps = max(1, min(most, int(1e3 * STRETCH_S / once)))
        for _ in range(ROUNDS):
            for way, packed in packs.items():
                found[way].append(step_ms(packed, steps))
        rows += [ResultRow(name, way, "ms per step", times) for way, times in found.items()]
        own, one = (statistics.median(found[way]) for way in (OWN, ONE))
        cells.append([name, f"{own:.3f}", f"{one:.3f}", f"{100 * (1 - one / own):.1f} %"])
        print(*cells[-1], flush=True)
        for packed in packs.values():
            packed.close()
    table = ResultTable(
        f"Steps of {given.lanes} lanes, ms",
        ["case", OWN, ONE, "saved"],
        cells,
        "Medians, in turns.",
    )
    told = ", ".join(f"{cell[0]} {cell[3]}" for cell in cells)
    spent = time.monotonic() - began
    outcome = BenchResult(
        "orders", f"One order for all lanes saves: {told}", rows, [table], {}, spent
    )
    results.write_result(outcome, given.out)


if __name__ == "__main__":
    main()
