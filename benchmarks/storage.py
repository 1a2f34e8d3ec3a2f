"""Measures what a search costs besides training: proposals, the storage of its study, checkpoints.

    python benchmarks/storage.py --out benchmarks/records/<date>-<hardware>-storage
        [--parts sampler,storage,writers,checkpoint] [--postgres URL] [--quick]

`sampler`: CPU seconds of a proposal and of a pruner's decision, by the number of finished trials
and of trials under way, in a study in memory. `storage`: seconds of each operation of a worker on
SQLite, on a journal with its lock and, with --postgres, on PostgreSQL, by the number of trials
under way; for PostgreSQL also the CPU time of the server. `writers`: how many results of epochs one
and several processes write a second. `checkpoint`: bytes and seconds of checkpoints of 1, 16 and 64
models of case B. `benchmarks/scale.py` simulates clusters from these times.

Other programs on the machine lengthen wall times. Linux says how long a process was ready to run
but had no core (`/proc/PID/schedstat`), for this process and for the database's: `quiet_s` is the
wall time without that, which the simulation uses. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
import pyarrow as pa
import pyarrow.parquet
import sqlalchemy

import slipstream
from slipstream.engine import checkpoint
from slipstream.runs import Run
from slipstream.search import storage
from slipstream.search.sharing import OWNER
from slipstream.search.storage import NOTES
from slipstream.search.study import TimedStudy
from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

SPACE: dict[str, optuna.distributions.BaseDistribution] = {
    "model.hidden.0": optuna.distributions.IntDistribution(64, 256, step=16),
    "model.hidden.1": optuna.distributions.IntDistribution(32, 128, step=16),
    "train.lr": optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True),
    "train.weight_decay": optuna.distributions.FloatDistribution(1e-6, 1e-2, log=True),
    "model.dropout": optuna.distributions.FloatDistribution(0.0, 0.4),
    "train.batch": optuna.distributions.CategoricalDistribution((64, 128, 256)),
}
"""The space of `benchmarks/search.py`"""
EPOCHS = 10
FINISHED = (10, 100, 1_000, 5_000)
RUNNING = (0, 64, 512)
WRITERS = (1, 2, 4)
LANES = (1, 16, 64)
NOTE = {"epochs": 10.0, "steps": 7810, "best_epoch": 8.0, "seconds": 91.5, "stopped": "epochs"}
PARTS = ("sampler", "storage", "writers", "checkpoint")


class Timing(NamedTuple):
    """One operation: as it was, and without the time that it waited for a core."""

    wall_s: float
    cpu_s: float
    quiet_s: float
    server_cpu_s: float = 0.0


def read_schedule(pid: int | str) -> tuple[float, float]:
    """Return the seconds that a process had a core, and that it waited for one."""
    text = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii")
    on_core, waiting, _ = text.split()
    return int(on_core) / 1e9, int(waiting) / 1e9


def time_call(call: Callable[[], Any], server: int | None = None) -> Timing:
    """Time a call that may wait for the process `server`."""
    pids = ["self", *([server] if server else [])]
    wall, cpu, before = time.perf_counter(), time.process_time(), list(map(read_schedule, pids))
    call()
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    after = list(map(read_schedule, pids))
    waits = [late[1] - early[1] for early, late in zip(before, after, strict=True)]
    works = [late[0] - early[0] for early, late in zip(before, after, strict=True)]
    return Timing(wall_s, cpu_s, max(wall_s - sum(waits), cpu_s), sum(works[1:]))


def make_trials(
    count: int, state: optuna.trial.TrialState, draw: np.random.Generator
) -> list[optuna.trial.FrozenTrial]:
    """Return trials with settings of the space and the losses of their epochs."""
    trials = []
    for _ in range(count):
        params = {
            "model.hidden.0": 64 + 16 * int(draw.integers(13)),
            "model.hidden.1": 32 + 16 * int(draw.integers(7)),
            "train.lr": 10 ** draw.uniform(-4, -2),
            "train.weight_decay": 10 ** draw.uniform(-6, -2),
            "model.dropout": draw.uniform(0, 0.4),
            "train.batch": int(draw.choice((64, 128, 256))),
        }
        losses = np.sort(draw.uniform(0.05, 0.5, EPOCHS))[::-1]
        is_finished = state.is_finished()
        trials.append(
            optuna.trial.create_trial(
                state=state,
                value=float(losses[-1]) if is_finished else None,
                params=params,
                distributions=SPACE,
                intermediate_values=dict(enumerate(losses[: None if is_finished else 5].tolist())),
            )
        )
    return trials


# --- proposals


def measure_sampler(quick: bool) -> Iterator[ResultRow]:
    """Yield the CPU time of proposals and of the median pruner."""
    draw = np.random.default_rng(0)
    running = (16,) if quick else (16, 1_024)
    for under_way in running:
        for finished in FINISHED[:2] if quick else FINISHED:
            sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
            study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())
            study.add_trials(make_trials(finished, optuna.trial.TrialState.COMPLETE, draw))
            study.add_trials(make_trials(under_way, optuna.trial.TrialState.RUNNING, draw))
            extra = {"finished": finished, "under_way": under_way}
            asks = [time_call(lambda study=study: study.ask(SPACE)) for _ in range(7)]
            yield make_row("TPE", "proposal", asks[2:], extra)
            trial = study.ask(SPACE)
            decisions = [
                time_call(lambda trial=trial, step=step: report(trial, step, prune=True))
                for step in range(7)
            ]
            yield make_row("median pruner", "decision", decisions[2:], extra)


def report(trial: optuna.Trial, step: int, *, prune: bool) -> None:
    trial.report(0.04, step)
    if prune:
        trial.should_prune()


def make_row(case: str, variant: str, times: list[Timing], extra: dict[str, Any]) -> ResultRow:
    more = {
        "cpu_s": statistics.median(one.cpu_s for one in times),
        "quiet_s": statistics.median(one.quiet_s for one in times),
    }
    if any(one.server_cpu_s for one in times):
        more["server_cpu_s"] = statistics.fmean(one.server_cpu_s for one in times)
    return ResultRow(case, variant, "s", [one.wall_s for one in times], more | extra)


# --- the storage of the study


def open_study(url: str, name: str) -> TimedStudy:
    """Open a study without sampler or pruner of its own, so that only the storage is measured."""
    study = optuna.create_study(
        study_name=name,
        storage=storage.open_storage(url),
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),
        load_if_exists=True,
    )
    timed = TimedStudy(study, {})
    timed.distributions = SPACE
    return timed


def ask(study: TimedStudy) -> optuna.Trial:
    """Ask as a worker does, and claim the trial."""
    trial = study.ask()
    beat(study, trial)
    trial.set_user_attr(OWNER, {"id": "0" * 32, "trial": trial.number})
    return trial


def beat(study: TimedStudy, trial: optuna.Trial) -> None:
    study.storage.record_heartbeat(trial._trial_id)


def tell(study: TimedStudy, trial: optuna.Trial) -> None:
    trial.set_user_attr(NOTES, NOTE)
    study.study.tell(trial, 0.04)


def measure_storage(kind: str, url: str, quick: bool) -> Iterator[ResultRow]:
    """Yield the seconds of each operation, by the number of trials of others under way."""
    draw = np.random.default_rng(0)
    others = 0
    name = uuid.uuid4().hex  # a server may have studies of earlier measurements
    study, filler = open_study(url, name), open_study(url, name)
    server = find_server(study)
    for under_way in RUNNING[:1] if quick else RUNNING:
        filler.study.add_trials(
            make_trials(under_way - others, optuna.trial.TrialState.RUNNING, draw)
        )
        others = under_way
        study.get_trials()
        times: dict[str, list[Timing]] = {}

        def measure(what: str, call: Callable[[], Any], times: Any = times) -> None:
            times.setdefault(what, []).append(time_call(call, server))

        for _ in range(3 if quick else 20):
            trials: list[optuna.Trial] = []
            measure("ask", lambda trials=trials: trials.append(ask(study)))
            trial = trials[0]
            for step in range(4):
                measure("report", lambda trial=trial, step=step: trial.report(0.04, step))
            measure("read", study.get_trials)
            measure("heartbeat", lambda trial=trial: beat(study, trial))
            measure("tell", lambda trial=trial: tell(study, trial))
        for what, listed in times.items():
            yield make_row(kind, what, listed, {"under_way": under_way})


def measure_parsing(url: str, quick: bool) -> Iterator[ResultRow]:
    """Yield what a reader of a journal pays for each line that others have written."""
    name, times, lines = uuid.uuid4().hex, list[Timing](), 20 if quick else 400
    reader, writer = open_study(url, name), open_study(url, name)
    trial = writer.study.ask(SPACE)
    for repeat in range(5):
        reader.get_trials()
        for step in range(lines):
            trial.report(0.04, repeat * lines + step)
        timing = time_call(reader.get_trials)
        times.append(Timing(*(value / lines for value in timing)))
    yield make_row("journal", "parse", times, {})


def find_server(study: TimedStudy) -> int | None:
    """Return the process of PostgreSQL that serves this connection; None for other storages."""
    engine = getattr(getattr(study.storage, "_backend", None), "engine", None)
    if engine is None or engine.dialect.name != "postgresql":
        return None
    with engine.connect() as connection:
        return int(connection.execute(sqlalchemy.text("select pg_backend_pid()")).scalar_one())


def write_reports(url: str, number: int, start: Any, seconds: float, counts: Any) -> None:
    study = open_study(url, "writers")
    trial = study.study.ask(SPACE)
    trial.report(0.04, 0)
    start.wait()
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        count += 1
        trial.report(0.04, count)
    counts[number] = count


def measure_writers(kind: str, url: str, quick: bool) -> Iterator[ResultRow]:
    """Yield how many results one and several processes write a second."""
    context, seconds = multiprocessing.get_context("spawn"), 1.0 if quick else 6.0
    open_study(url, "writers")
    for num_writers in WRITERS[:2] if quick else WRITERS:
        barrier, counts = context.Barrier(num_writers), context.Array("i", num_writers)
        writers = [
            context.Process(target=write_reports, args=(url, i, barrier, seconds, counts))
            for i in range(num_writers)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        extra = {"writers": num_writers, "by_writer": [count / seconds for count in counts]}
        yield ResultRow(kind, "results written", "a second", [sum(counts) / seconds], extra)


# --- checkpoints


def measure_checkpoints(folder: Path, quick: bool) -> Iterator[ResultRow]:
    """Yield the bytes of checkpoints, and the seconds to write and to read them."""
    draw = np.random.default_rng(0)
    path = folder / "columns.parquet"
    table = {f"x{i}": draw.standard_normal(2_000) for i in range(10)}
    pa.parquet.write_table(pa.table(table), path)
    for lanes in LANES[:2] if quick else LANES:
        config = {
            "name": "checkpoint",
            "out": str(folder / "runs"),
            "data": {"path": str(path), "targets": ["x0"], "context": 24, "horizon": 1},
            "model": {"kind": "lstm", "hidden": 64, "layers": 2},
            "train": {"epochs": 1, "batch": 256, "repeats": lanes, "patience": "off"},
            "engine": {"device": "cpu"},
        }
        run = Run(Path(slipstream.train(config)))
        times: dict[str, list[Timing]] = {"write": [], "read": []}
        for _ in range(3 if quick else 9):
            saved, _ = checkpoint.read_newest(run)
            times["write"].append(
                time_call(lambda saved=saved, run=run: checkpoint.write_checkpoint(run, saved))
            )
            times["read"].append(time_call(lambda run=run: checkpoint.read_newest(run)))
        files = (run.checkpoints / f"step-{saved.step}").iterdir()
        extra = {"lanes": lanes, "bytes": sum(one.stat().st_size for one in files)}
        for what, listed in times.items():
            yield make_row("checkpoint of case B", what, listed, extra)


# --- the record


def describe(row: ResultRow) -> str:
    if row.unit != "s":
        return f"{row.repeats[0]:,.0f} {row.unit}"
    parts = [f"{1e3 * row.extra['quiet_s']:.2f} ms", f"CPU {1e3 * row.extra['cpu_s']:.2f} ms"]
    parts.append(f"wall {1e3 * min(row.repeats):.2f} to {1e3 * max(row.repeats):.1f} ms")
    if "server_cpu_s" in row.extra:
        parts.append(f"server {1e3 * row.extra['server_cpu_s']:.2f} ms")
    if "bytes" in row.extra:
        parts.append(f"{row.extra['bytes'] / 1e6:.2f} MB")
    return ", ".join(parts)


def build_table(rows: list[ResultRow]) -> ResultTable:
    cells = []
    for row in rows:
        names = ("finished", "under_way", "writers", "lanes")
        state = [
            f"{row.extra[name]:,} {name.replace('_', ' ')}" for name in names if name in row.extra
        ]
        cells.append([row.case, row.variant, ", ".join(state), describe(row)])
    note = "Medians: time without waiting for a core, CPU time of the process; range of wall times."
    return ResultTable("One operation", ["what", "operation", "with", "measured"], cells, note)


def list_storages(folder: Path, postgres: str | None) -> dict[str, str]:
    storages = {
        "SQLite": f"sqlite:///{folder}/study.db",
        "journal": f"journal:{folder}/study.log",
    }
    return storages | ({"PostgreSQL": postgres} if postgres else {})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--parts", default=",".join(PARTS))
    arguments.add_argument("--storages", default="SQLite,journal,PostgreSQL")
    arguments.add_argument("--postgres", metavar="URL", help="a server on this machine")
    arguments.add_argument("--folder", type=Path, help="where the studies are written")
    arguments.add_argument("--quick", action="store_true", help="to check the script")
    options = arguments.parse_args()
    parts, began, rows = options.parts.split(","), time.perf_counter(), list[ResultRow]()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", message="Heartbeat of storage")
    loads = [os.getloadavg()[0]]

    def add(new: Iterator[ResultRow]) -> None:
        for row in new:
            rows.append(row)
            print(f"{row.case}, {row.variant}, {row.extra}: {describe(row)}", flush=True)
        loads.append(os.getloadavg()[0])

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        storages = list_storages(Path(name), options.postgres)
        if "sampler" in parts:
            add(measure_sampler(options.quick))
        for kind, url in storages.items():
            if kind not in options.storages.split(","):
                continue
            if "storage" in parts:
                add(measure_storage(kind, url, options.quick))
            if "storage" in parts and kind == "journal":
                add(measure_parsing(url, options.quick))
            if "writers" in parts:
                add(measure_writers(kind, url, options.quick))
        if "checkpoint" in parts:
            add(measure_checkpoints(Path(name), options.quick))
    notes = [
        f"Load average of the machine meanwhile: {min(loads):.1f} to {max(loads):.1f}. The first "
        "figure of each row is the wall time without the time that the process, or PostgreSQL's, "
        "waited for a core (`/proc/PID/schedstat`); the numbers of results written a second "
        "include those waits.",
        "The journal lies on a local disk, not on NFS; PostgreSQL runs on the same machine.",
    ]
    settings = {"parts": parts, "load_average": loads, "device": "cpu"}
    headline = "What a search costs besides training: proposals, storage, checkpoints"
    seconds = time.perf_counter() - began
    table = build_table(rows)
    result = BenchResult("storage", headline, rows, [table], settings, seconds, notes)
    results.write_result(result, options.out)
    print(table.to_markdown())


if __name__ == "__main__":
    main()
