"""Measures whole commands, from the shell's view: `slipstream train JOB --json` in a new process.

    python benchmarks/whole.py --out benchmarks/records/<date>-<hardware>-whole [--cases demo B ...]
    python benchmarks/whole.py --cases demo --device cpu --out ...
    python benchmarks/whole.py --quick --cases demo B --device cpu --out /tmp/whole

Cases: `demo` is the embedded one. `B`: LSTM 64 x 2, 24 rows x 10 columns, 40 epochs x 124 steps;
`B x16` and `B x64` train it from so many seeds. `D`: LSTM 128, 150 rows x 5 columns, 20 epochs x
125 steps; `D x16`. `cells`: 770,000 rows of simulated cells, LSTM 64; `cells x8`; `cells search`
searches 48 trials on them. `etth1` is examples/etth1-lstm.toml, for which --etth1 names the file.
`rows 1e6`, `rows 1e7` and `rows 4e7` are large tables: an LSTM 32 on five columns, 48 rows
of context, batches of 4,096, one epoch.

The commands have caches of their own, empty at first: each case runs once, which is its first time,
then --repeats times with warm caches. Cases share the caches unless --cold empties them before
each. The floor, `import torch` and one tensor on the device, is measured in between.

The peer is a Lightning script of the same job: the same network, first weights, batches, learning
rates and validations (`slipstream.tools.bench.frameworks`). It neither tests nor compares with
baselines. Where Lightning is not installed, the plain PyTorch loop of the same module takes its
place, and the result says so. For repeats and searches one model is timed, and the rest is
extrapolated as one process that trains all of them one after another.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import scipy.signal

from slipstream import config as configs
from slipstream.data.simulated import cell
from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable, format_ratio

FLOOR = "import torch; torch.zeros(1, device={device!r})"
PEER_FLOOR = {"lightning": "import lightning, torch; torch.zeros(1, device={device!r})"}
LIGHTNING, PLAIN = "lightning", "plain"
PEER_NAMES = {
    LIGHTNING: "Lightning",
    PLAIN: "plain PyTorch loop (Lightning is not installed)",
}
CACHES = ("SLIPSTREAM_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
TRIALS = 48
CELL_ROWS = 770_000
BLOCK_ROWS = 4_000_000
"""Rows of a large table that are simulated at a time"""
SPACE = {
    "model.hidden": [32, 64, 128],
    "train.lr": {"low": 3e-4, "high": 1e-2, "log": True},
    "train.weight_decay": {"low": 1e-6, "high": 1e-2, "log": True},
}


class WholeCase(NamedTuple):
    """A command, and how many models of one config it trains."""

    name: str
    command: str
    config: dict[str, Any]
    models: int = 1


class Timing(NamedTuple):
    """One command: its time from outside, and what it says of itself."""

    wall_s: float
    cpu_s: float
    summary: dict[str, Any]

    @property
    def parts(self) -> dict[str, float]:
        """The parts of its time; the end of the process comes after its own clock."""
        spent: dict[str, float] = dict(self.summary["time"])
        inside_s = spent.pop("wall_s")
        return spent | {"exit_s": self.wall_s - inside_s}

    @property
    def training_s(self) -> float:
        names = ("training_s", "validation_s", "searching_s", "retraining_s")
        return sum(self.parts.get(name, 0.0) for name in names)


def simulate_columns(path: Path, rows: int, columns: int) -> None:
    """Write a table of sums of waves with noise."""
    draw = np.random.default_rng(0)
    at = np.arange(rows)[:, None]
    waves = np.sin(at / draw.uniform(5, 200, columns) + draw.uniform(0, 6, columns))
    values = waves @ draw.standard_normal((columns, columns)) / 3
    values += 0.2 * draw.standard_normal(values.shape)
    table = {f"x{i}": values[:, i] for i in range(columns)}
    pa.parquet.write_table(pa.table(table), path)


def simulate_walks(path: Path, rows: int) -> None:
    """Write a large table of five columns of fp32, block by block: four of noise, and their slow
    average with noise."""
    draw = np.random.default_rng(0)
    names = [f"x{i}" for i in range(4)]
    schema = pa.schema([(name, pa.float32()) for name in [*names, "y"]])
    with pa.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - start)
            columns = draw.standard_normal((4, count), dtype=np.float32)
            slow = scipy.signal.lfilter([0.1], [1, -0.9], columns.mean(axis=0)).astype(np.float32)
            slow += 0.1 * draw.standard_normal(count, dtype=np.float32)
            writer.write_table(pa.table([*columns, slow], schema=schema))


def simulate_cells(path: Path, rows: int) -> None:
    """Write as many simulated cells as have so many rows."""
    tables, count = [], 0
    while count < rows:
        table = cell.simulate(len(tables))
        names = [f"{len(tables)}-{name}" for name in table["cell"].to_pylist()]
        tables.append(table.set_column(0, "cell", pa.array(names)))
        count += table.num_rows
    pa.parquet.write_table(pa.concat_tables(tables), path)


def build_cases(folder: Path, options: argparse.Namespace) -> Iterator[WholeCase]:
    """Yield the cases that were requested; their data are written when they are due."""
    small, device = options.quick, {"device": options.device}
    demo = configs.load_demo("demo").model_dump(mode="json", exclude_unset=True)
    demo |= {"engine": device}
    if small:
        demo["train"] = demo["train"] | {"epochs": 2}
    shapes = {
        "B": (45_400, 10, 24, 40),
        "D": (45_700, 5, 150, 20),
        "cells": (CELL_ROWS, 3, 120, 20),
    }
    for name in options.cases:
        kind, _, rest = name.partition(" ")
        if kind == "rows":
            rows = int(float(rest)) // (100 if small else 1)
            path = folder / f"{rows}.parquet"
            simulate_walks(path, rows)
            yield WholeCase(name, "train", _build_large_job(path) | {"engine": device})
            path.unlink()
            continue
        if kind == "demo":
            yield WholeCase(name, "train", demo)
            continue
        if kind == "etth1":
            yield WholeCase(name, "train", _load_etth1(options) | {"engine": device})
            continue
        rows, columns, context, epochs = shapes[kind]
        if small:
            rows, epochs = rows // 20, 2
        path = folder / f"{kind}.parquet"
        if not path.exists() and kind == "cells":
            simulate_cells(path, rows)
        elif not path.exists():
            simulate_columns(path, rows, columns)
        config = _build_job(kind, path, context, epochs) | {"engine": device}
        models = int(rest[1:]) if rest.startswith("x") else 1
        if models > 1:
            config["train"] = config["train"] | {"repeats": models}
        if rest == "search":
            models = 4 if small else TRIALS
            config["tune"] = {"trials": models, "space": dict(SPACE)}
        if small:
            config["model"] |= {"hidden": 8}
            config["data"] |= {"stride": 4}
            config.get("tune", {}).get("space", {}).pop("model.hidden", None)
        yield WholeCase(name, "tune" if rest == "search" else "train", config, models)


def _build_job(kind: str, path: Path, context: int, epochs: int) -> dict[str, Any]:
    train: dict[str, Any] = {"batch": 256, "epochs": epochs, "patience": "off"}
    if kind == "cells":
        demo = configs.load_demo("demo").model_dump(mode="json", exclude_unset=True)
        return {
            "name": kind,
            "data": demo["data"] | {"path": str(path)},
            "model": {"kind": "lstm", "hidden": 64, "layers": 1, "patch": 5},
            "train": train | {"batch": 512, "lr": 2e-3},
        }
    hidden, layers = (64, 2) if kind == "B" else (128, 1)
    return {
        "name": kind,
        "data": {"path": str(path), "targets": ["x0"], "context": context, "horizon": 1},
        "model": {"kind": "lstm", "hidden": hidden, "layers": layers, "dropout": 0.0},
        "train": train,
    }


def _build_large_job(path: Path) -> dict[str, Any]:
    return {
        "name": "large",
        "data": {
            "path": str(path),
            "inputs": [f"x{i}" for i in range(4)] + ["y"],
            "targets": ["y"],
            "context": 48,
            "horizon": 1,
        },
        "model": {"kind": "lstm", "hidden": 32, "layers": 1, "dropout": 0.0},
        "train": {"batch": 4096, "epochs": 1, "patience": "off"},
    }


def _load_etth1(options: argparse.Namespace) -> dict[str, Any]:
    if options.etth1 is None:
        raise SystemExit("the case etth1 needs --etth1 ETTh1.csv")
    path = Path(__file__).parent.parent / "examples" / "etth1-lstm.toml"
    config = configs.load(path).model_dump(mode="json", exclude_unset=True)
    config["data"] |= {"path": str(options.etth1.absolute())}
    if options.quick:
        config["train"] |= {"epochs": 1}
    return config


class Bench:
    """Runs the commands of all cases in one folder, with caches of its own."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.caches = folder / "caches"
        self.peer = LIGHTNING if importlib.util.find_spec("lightning") else PLAIN
        self.floors: list[float] = []
        self.peer_floor_s = 0.0
        self.peer_times: dict[str, list[tuple[float, float]]] = {}
        """Of one model, by its config"""

    def empty_caches(self) -> None:
        shutil.rmtree(self.caches, ignore_errors=True)

    def run(self, *arguments: str) -> tuple[float, float, str]:
        """Run Python; return its wall time, its CPU time and its output."""
        env = os.environ | {name: str(self.caches / name.lower()) for name in CACHES}
        began, before = time.perf_counter(), _read_cpu_s()
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=False, env=env
        )
        wall_s = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
        return wall_s, _read_cpu_s() - before, done.stdout

    def measure_floor(self) -> float:
        wall_s, _, _ = self.run("-c", FLOOR.format(device=self.options.device))
        self.floors.append(wall_s)
        return wall_s

    def time_command(self, case: WholeCase) -> Timing:
        job = self._write_job(case.config)
        out = self.folder / "runs"
        wall_s, cpu_s, text = self.run(
            "-m", "slipstream", case.command, str(job), "--json", "--quiet", "--out", str(out)
        )
        shutil.rmtree(out, ignore_errors=True)
        return Timing(wall_s, cpu_s, json.loads(text))

    def _write_job(self, config: dict[str, Any]) -> Path:
        path = self.folder / "job.toml"
        path.write_text(configs.to_toml(configs.load(config), only_set=True), encoding="utf-8")
        return path

    def time_peer(self, case: WholeCase) -> list[tuple[float, float]]:
        """Return the wall and CPU time of the other framework's script of one model."""
        train = {k: v for k, v in case.config["train"].items() if k != "repeats"}
        single = {k: v for k, v in case.config.items() if k != "tune"} | {"train": train}
        job = self._write_job(single)
        precision, workers = self.options.peer.split(":")
        arguments = ["-m", "slipstream.tools.bench.frameworks", str(job), self.peer, precision]
        key = job.read_text(encoding="utf-8")
        if key not in self.peer_times:
            runs = range(self.options.peer_runs)
            self.peer_times[key] = [self.run(*arguments, workers, "")[:2] for _ in runs]
        return self.peer_times[key]

    def measure(self, case: WholeCase) -> Iterator[ResultRow]:
        """Yield the rows of a case: ours, and the peer's."""
        if self.options.cold:
            self.empty_caches()
        print(f"{case.name}: first time ...", flush=True)
        first = self.time_command(case)
        self.measure_floor()
        warm = []
        for number in range(1, self.options.repeats + 1):
            warm.append(self.time_command(case))
            print(f"{case.name}: {warm[-1].wall_s:.1f} s ({number})", flush=True)
        middle = sorted(warm, key=lambda one: one.wall_s)[len(warm) // 2]
        extra = {
            "models": case.models,
            "first_s": first.wall_s,
            "first_parts": first.parts,
            "training_s": middle.training_s,
            "cpu_s": middle.cpu_s,
            "parts": middle.parts,
            "pack": (middle.summary.get("pack") or {}).get("places"),
        }
        yield ResultRow(case.name, "slipstream", "s", [one.wall_s for one in warm], extra)
        if self.options.peer != "off":
            yield self._measure_peer(case)

    def _measure_peer(self, case: WholeCase) -> ResultRow:
        timed = self.time_peer(case)
        single = [wall_s for wall_s, _ in timed]
        walls = [self.peer_floor_s + case.models * (s - self.peer_floor_s) for s in single]
        extra = {
            "models": case.models,
            "single_s": single,
            "single_cpu_s": statistics.median(cpu_s for _, cpu_s in timed),
            "extrapolated": case.models > 1,
        }
        print(f"{case.name}: {PEER_NAMES[self.peer]}: {min(walls):.1f} s", flush=True)
        return ResultRow(case.name, PEER_NAMES[self.peer], "s", walls, extra)

    def measure_peer_floor(self) -> None:
        code = PEER_FLOOR.get(self.peer, FLOOR).format(device=self.options.device)
        self.peer_floor_s = min(self.run("-c", code)[0] for _ in range(2))


def _read_cpu_s() -> float:
    """Return the CPU time of all commands so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build_tables(rows: Sequence[ResultRow], floor_s: float) -> list[ResultTable]:
    ours = [row for row in rows if row.variant == "slipstream"]
    peers = {row.case: row for row in rows if row.variant != "slipstream"}
    cells = []
    for row in ours:
        beyond = row.median - row.extra["training_s"] - floor_s
        peer, beside, cpu = peers.get(row.case), "", f"{row.extra['cpu_s']:.0f}"
        if peer is not None and peer.extra["extrapolated"]:
            beside = f"{peer.median:.1f} (extrapolated): {format_ratio(peer.median / row.median)}"
        elif peer is not None:
            beside = f"{peer.median:.1f}: {format_ratio(peer.median / row.median)}"
            cpu += f"; peer {peer.extra['single_cpu_s']:.0f}"
        spread = f"{row.median:.1f} ({min(row.repeats):.1f} to {max(row.repeats):.1f})"
        seconds = row.extra["first_s"], row.extra["training_s"], beyond
        cells.append([row.case, spread, *(f"{one:.1f}" for one in seconds), beside, cpu])
    peer_name = next((row.variant for row in peers.values()), "no peer")
    headings = ["case", "wall, s", "first time", "training", "beyond training and floor"]
    headings += [peer_name, "CPU time, s"]
    note = f"The floor is {floor_s:.1f} s. Training includes validation, and all of a search."
    names = list(dict.fromkeys(name for row in ours for name in row.extra["parts"]))
    parts = []
    for row in ours:
        listed = (row.extra["parts"].get(name) for name in names)
        parts.append([row.case, *("" if one is None else f"{one:.2f}" for one in listed)])
    headings_of_parts = ["case", *(name.removesuffix("_s") for name in names)]
    return [
        ResultTable("Whole commands", headings, cells, note),
        ResultTable("Where each second went", headings_of_parts, parts, "Of the median run."),
    ]


def run_bench(options: argparse.Namespace) -> BenchResult:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        bench, rows = Bench(Path(name), options), list[ResultRow]()
        bench.measure_floor()
        if options.peer != "off":
            bench.measure_peer_floor()
        for case in build_cases(Path(name), options):
            rows += bench.measure(case)
        floors = bench.floors
    floor_s = statistics.median(floors)
    rows.insert(0, ResultRow("floor", "import torch", "s", floors))
    notes = ["Caches are emptied before each case."] if options.cold else []
    if options.peer != "off":
        how = f"{PEER_NAMES[bench.peer]}, precision and workers {options.peer}"
        notes.append(f"The peer is the {how}, which neither tests nor fits baselines.")
        notes.append(f"Its imports alone take {bench.peer_floor_s:.1f} s.")
    if options.quick:
        notes.append("Small sizes (--quick): a check of the benchmark, not a measurement.")
    first = next(row for row in rows if row.variant == "slipstream")
    headline = f"Whole commands: {first.case} in {first.median:.1f} s, floor {floor_s:.1f} s"
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    tables = build_tables(rows[1:], floor_s)
    seconds = time.perf_counter() - began
    return BenchResult("whole", headline, rows, tables, settings, seconds, notes)


LARGE = ("rows 1e6", "rows 1e7", "rows 4e7")
CASES = ("demo", "B", "B x16", "B x64", "D", "D x16", "cells", "cells x8", "cells search")
NEEDING_MORE = (*LARGE, "etth1")
"""Cases that run only where they are named"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--cases", nargs="+", choices=(*CASES, *NEEDING_MORE), default=CASES)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--cold", action="store_true", help="empty the caches before each case")
    arguments.add_argument("--quick", action="store_true", help="small sizes, to check the script")
    arguments.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    arguments.add_argument("--etth1", type=Path, metavar="FILE", help="ETTh1.csv")
    arguments.add_argument(
        "--peer", metavar="PRECISION:WORKERS", help="how the peer runs (fp32:0, tf32:4); or off"
    )
    arguments.add_argument("--peer-runs", type=int, default=1)
    options = arguments.parse_args()
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.peer = options.peer or ("fp32:0" if options.device == "cpu" else "tf32:4")
    result = run_bench(options)
    results.write_result(result, options.out)
    print(*(table.to_markdown() for table in result.tables), sep="\n")
    print(result.headline)


if __name__ == "__main__":
    main()
