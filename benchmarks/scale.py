"""Simulates a search and a walk-forward on 1 to 1,024 GPUs, from times that were measured.

    python benchmarks/scale.py --out benchmarks/records/<date>-simulated-scale
        [--picture docs/images/scale.svg] [--most 1024]

Nothing here runs on more than one GPU: `cluster.py` simulates workers, the storage of the study,
the sampler, checkpoints and failures. Every time comes from a record of `benchmarks/records`, named
beside it in `scale_inputs.py`, which also has what is assumed because nobody measured it here. The
simulation is compared with recorded searches on one GPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster
import scale_report as report
from cluster import Faults, Outcome, StorageCosts
from scale_inputs import ASSUMED, Model, load_model, read_source
from scale_report import Run, format_time

from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult

GPUS = (1, 4, 16, 64, 256, 1024)


def simulate_search(
    model: Model, name: str, storage: StorageCosts, gpus: int, **changes: Any
) -> Outcome:
    """Simulate one search; `changes` replace its costs, faults or job."""
    costs = changes.get("costs", model.costs)
    faults = changes.get("faults", model.faults)
    simulation = cluster.Simulation(
        changes.get("job", model.jobs[name]), costs, storage, faults, gpus=gpus
    )
    return simulation.run()


def simulate_sizes(model: Model, most: int) -> Iterator[Run]:
    """Yield every job on 1 to `most` GPUs; searches with each storage."""
    for job in model.jobs:
        alone = simulate_search(model, job, cluster.FREE, 1).wall_s
        for name, storage in {**model.storages, "no storage": cluster.FREE}.items():
            for gpus in (one for one in GPUS if one <= most):
                if name == "SQLite" and gpus > 16:  # processes of one machine only
                    continue
                outcome = simulate_search(model, job, storage, gpus)
                yield Run(f"search, {job}", name, outcome, alone / outcome.wall_s)
    for job, work in model.walks.items():
        first = 0.0
        for gpus in (one for one in GPUS if one <= most):
            outcome = cluster.simulate_walk_forward(work, model.costs, model.faults, gpus=gpus)
            first = first or outcome.wall_s
            yield Run(f"walk-forward, {job}", "shares", outcome, first / outcome.wall_s)


NUM_SEEDS = 3
"""Of failures"""
GROUPS = 8
"""Searches side by side, each with its share of the GPUs and trials"""


def list_changes(model: Model) -> dict[str, dict[str, Any]]:
    """Return what can be changed about a search with PostgreSQL, one change at a time."""
    storage = model.storages["PostgreSQL"]
    seldom = replace(storage, read_every_s=30.0)
    random = replace(model.costs, ask_s=0.0, ask_finished_s=0.0, ask_running_s=0.0)
    return {
        "as it is": {},
        'tune.sampler = "random"': {"costs": random},
        "a database server with 16 cores": {"storage": speed_up_server(storage, 8)},
        "eight searches side by side, 16 cores": {
            "storage": speed_up_server(storage, 8),
            "groups": GROUPS,
        },
        "trials of others read every 30 s": {"storage": seldom},
        "trials of others read every 30 s, 16 cores": {"storage": speed_up_server(seldom, 8)},
        "journal instead": {"storage": model.storages["journal"]},
    }


def speed_up_server(storage: StorageCosts, factor: float) -> StorageCosts:
    names = ("ask", "report", "tell", "heartbeat", "read", "read_running")
    parts = {name: getattr(storage, name) for name in names}
    return replace(
        storage,
        **{name: replace(one, serial_s=one.serial_s / factor) for name, one in parts.items()},
    )


def simulate_changes(model: Model, most: int) -> Iterator[Run]:
    for job in model.jobs:
        alone = simulate_search(model, job, cluster.FREE, 1).wall_s
        for name, change in list_changes(model).items():
            change = {"storage": model.storages["PostgreSQL"], "groups": 1} | change
            storage, groups = change.pop("storage"), change.pop("groups")
            smaller = replace(model.jobs[job], trials=model.jobs[job].trials // groups)
            if groups > 1:  # each has an eighth of the server
                storage = speed_up_server(storage, 1 / groups)
            for gpus in (one for one in (64, 1024) if one <= most):
                outcome = simulate_search(
                    model, job, storage, gpus // groups, job=smaller, **change
                )
                outcome.gpus *= groups
                outcome.spent_s = Counter(
                    {cause: groups * spent_s for cause, spent_s in outcome.spent_s.items()}
                )
                yield Run(f"search, {job}", name, outcome, alone / outcome.wall_s)


def simulate_faults(model: Model, most: int) -> Iterator[Run]:
    """Yield a walk-forward of large models under failures, by the time between checkpoints."""
    work, gpus = model.walks["large models"], min(64, most)
    # hours, so that something fails; longer epochs rather than more, which cost more to simulate
    job = replace(work.job, steps_per_epoch=50 * work.job.steps_per_epoch)
    work = replace(work, job=job)
    cost_s = model.costs.checkpoint_s * job.max_lanes
    plain = Faults(speed_spread=0.0)
    alone = cluster.simulate_walk_forward(work, model.costs, plain, gpus=gpus).wall_s
    for hours in (100.0, 10.0, 1.0):
        best_s = math.sqrt(2 * cost_s * 3600 * hours)
        for name, every_s in (
            ("every minute, the default", 60.0),
            (f"every {best_s:.0f} s, by Young", best_s),
            ("every hour", 3600.0),
        ):
            faults = Faults(process_hours=hours, checkpoint_every_s=every_s)
            outcomes = [
                cluster.simulate_walk_forward(work, model.costs, faults, gpus=gpus, seed=seed)
                for seed in range(NUM_SEEDS)
            ]
            variant = f"a process fails every {hours:,.0f} h; checkpoint {name}"
            outcome = average(outcomes)
            yield Run("failures", variant, outcome, alone / outcome.wall_s)


def average(outcomes: list[Outcome]) -> Outcome:
    """Return the mean of simulations with several seeds."""
    spent_s: Counter[str] = Counter()
    for outcome in outcomes:
        spent_s.update(outcome.spent_s)
    count = len(outcomes)
    return replace(
        outcomes[0],
        wall_s=statistics.fmean(one.wall_s for one in outcomes),
        spent_s=Counter({cause: total_s / count for cause, total_s in spent_s.items()}),
        failures=round(statistics.fmean(one.failures for one in outcomes)),
    )


def validate(model: Model) -> Iterator[tuple[str, float, float]]:
    """Yield recorded searches on one GPU: what, simulated, recorded."""
    costs, quiet = replace(model.costs, start_up_s=0.0), Faults()
    journal = model.storages["journal"]
    small = model.jobs["small models"]
    steps = math.ceil(447_029 / 512)  # training windows of the cells, batches of 512
    cells = replace(small, trials=48, epochs=20, steps_per_epoch=steps)
    outcome = cluster.Simulation(cells, costs, journal, quiet, gpus=1).run()
    yield "48 trials on simulated cells, s", outcome.wall_s, read_source("cells search")
    demand = replace(small, trials=64, epochs=10, steps_per_epoch=1_821)
    walls = [
        cluster.Simulation(one, costs, journal, quiet, gpus=1).run().wall_s
        for one in (demand, replace(demand, pruned_share=0.0))
    ]
    recorded = read_source("search with the pruner") / read_source("search without")
    yield "64 trials on demand: time with the pruner over without", walls[0] / walls[1], recorded


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--picture", type=Path)
    arguments.add_argument("--most", type=int, default=GPUS[-1])
    options = arguments.parse_args()
    began, model = time.perf_counter(), load_model()

    def collect(runs: Iterator[Run]) -> list[Run]:
        listed = []
        for run in runs:
            listed.append(run)
            where = f"{run.job}, {run.variant}, {run.outcome.gpus} GPUs"
            print(f"{where}: {format_time(run.outcome.wall_s)}, {run.speed_up:.1f}x", flush=True)
        return listed

    compared = list(validate(model))
    print(compared, flush=True)
    sizes = collect(simulate_sizes(model, options.most))
    changes = collect(simulate_changes(model, options.most))
    faults = collect(simulate_faults(model, options.most))
    jobs = list(dict.fromkeys(run.job for run in sizes))
    tables = [report.build_size_table(sizes, job) for job in jobs]
    tables += [report.build_change_table(changes), report.build_fault_table(faults)]
    tables += [report.build_validation_table(compared), report.build_input_table(model)]
    notes = [
        "A simulation: nothing here ran on more than one GPU. What it starts from was measured: "
        "storages and sampler on two Arm cores, training on an H200.",
        "Searches end with their last trial: retraining and report are not included.",
    ]
    rows = [run.to_row() for run in (*sizes, *changes, *faults)]
    settings = {"assumed": ASSUMED, "seed": 0, "device": "cpu"}
    headline = "Simulated: a search and a walk-forward on 1 to 1,024 GPUs"
    seconds = time.perf_counter() - began
    result = BenchResult("scale", headline, rows, tables, settings, seconds, notes)
    results.write_result(result, options.out)
    if options.picture:
        report.draw_picture(sizes, options.picture)
    print(*(table.to_markdown() for table in tables), sep="\n")


if __name__ == "__main__":
    main()
