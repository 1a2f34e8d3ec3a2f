"""Measures accuracy: Slipstream and other libraries on the same windows in the same minutes.

    python benchmarks/accuracy.py --data ../shared/data --minutes 2 \\
        --out benchmarks/records/<date>-<hardware>-accuracy
    python benchmarks/accuracy.py --device cpu --cores 2 --jobs 8 --minutes 5 --out ...
    python benchmarks/accuracy.py --sets illness --tools SeasonalNaive LightGBM --out /tmp/accuracy

The sets and their test windows are in `accuracy_sets.py`, the peers in `accuracy_peers.py`.
Slipstream gets a config with facts about the data only: path, targets, horizon, split. All tools
are scored by one function on the same windows, and the windows and true values of Slipstream's
predictions are asserted to be those that the peers are scored on.

Each measurement, a set, a tool and a seed, is a process of its own. Its seconds begin with the
start of Python and end with the predictions. It is one line of `measurements.jsonl` in --out; a
repeated command measures only what is missing (--retry: also what failed), so that it can be
stopped at any time. A tool that fails, or does not end in time, is a row with the reason.
`--summarize` only writes the tables.

Peers need these packages, and are left out without them: neuralforecast (with coreforecast,
utilsforecast, pytorch-lightning, pandas; Ray is not needed), statsforecast (with statsmodels,
patsy, formulaic, interface-meta, wrapt, fugue, triad, adagio), lightgbm, scikit-learn (with joblib,
threadpoolctl, narwhals).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from accuracy_peers import PEERS, Clock
from accuracy_sets import HIGHER_IS_BETTER, SETS, AccuracySet, Problem, read_run, score

from slipstream import config as configs
from slipstream.base import machine
from slipstream.tools.bench import results
from slipstream.tools.bench.results import BenchResult, ResultRow, ResultTable

MEASUREMENTS = "measurements.jsonl"
SLIPSTREAM = {"slipstream-auto": "auto", "slipstream-tune": "tune", "slipstream-train": "train"}
"""The commands of Slipstream, by the tool's name"""
TOOLS = (*SLIPSTREAM, *PEERS)
DEFAULT_TOOLS = ("slipstream-auto", *PEERS)
PACKAGES = ("neuralforecast", "statsforecast", "lightgbm", "scikit-learn", "torch")
GRACE_SHARE, GRACE_S = 0.25, 30.0
"""A tool is stopped this long after its minutes"""
MIN_NOISE = 0.005
"""Differences below this share are noise, however little the seeds differ"""
ABSENT = "absent"


@dataclass(frozen=True)
class Measurement:
    """The result of one tool on one set from one seed."""

    set_name: str
    tool: str
    seed: int
    minutes: float
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    num_windows: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.set_name, self.tool, self.seed


def read_measurements(path: Path) -> dict[tuple[str, str, int], Measurement]:
    """Return the measurements of a file, the last one of each set, tool and seed; a line that a
    kill cut off is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            measurement = Measurement(**json.loads(line))
        except json.JSONDecodeError:
            continue
        found[measurement.key] = measurement
    return found


def append_measurement(path: Path, measurement: Measurement) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        start = "\n" if text and not text.endswith("\n") else ""  # after a line that was cut off
        file.write(start + json.dumps(asdict(measurement)) + "\n")


# One measurement, in a process of its own


def run_slipstream(
    problem: Problem, tool: str, seed: int, options: argparse.Namespace
) -> tuple[Any, float, dict[str, Any]]:
    """Run a command of Slipstream; return its test predictions, its seconds and parts of its
    summary."""
    command, minutes = SLIPSTREAM[tool], options.minutes
    sections: dict[str, Any] = {"seed": seed, "engine": {"device": options.device}}
    match command:
        case "train":
            sections["train"] = {"minutes": minutes}
        case "tune":
            sections["tune"] = {"minutes": minutes, "trials": 10_000, "seed": seed}
    config = problem.set.build_config(options.data, options.work, **sections)
    folder = Path(tempfile.mkdtemp(prefix=f"{problem.set.name}-{command}-", dir=options.work))
    job = folder / "job.toml"
    job.write_text(configs.to_toml(configs.load(config), only_set=True), encoding="utf-8")
    arguments = ["--json", "--quiet", "--out", str(folder / "runs")]
    arguments += [part for text in options.overrides for part in ("--set", text)]
    if command == "auto":
        arguments += ["--minutes", f"{minutes:g}"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", command, str(job), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"slipstream {command}: {_get_last_line(done.stderr)}")
    summary = json.loads(done.stdout)
    kept = ("verdict", "ensemble", "leaderboard", "coverage", "scaled", "windows", "time", "trials")
    details = {key: summary[key] for key in kept if key in summary}
    if "metrics" in summary:
        details["own_test"] = summary["metrics"].get("test")
    return read_run(problem, Path(summary["run"])), seconds, details


def measure(set_name: str, tool: str, seed: int, options: argparse.Namespace) -> Measurement:
    """Run a tool on a set and score its predictions."""
    began = time.perf_counter() - _read_process_age()
    problem = SETS[set_name].load(options.data, options.work)
    details: dict[str, Any] = {}
    if tool in SLIPSTREAM:
        predicted, seconds, details = run_slipstream(problem, tool, seed, options)
    else:
        clock = Clock(began, options.minutes, options.device == "cuda")
        predicted = PEERS[tool].run(problem, seed, clock)
        seconds = time.perf_counter() - began
    metrics, num_windows = score(problem, predicted)
    details["versions"] = _list_versions()
    details["hardware"] = machine.describe(machine.choose_device(options.device))
    return Measurement(
        set_name, tool, seed, options.minutes, metrics, seconds, num_windows, details
    )


def _read_process_age() -> float:
    import psutil

    return time.time() - psutil.Process().create_time()


def _list_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _get_last_line(text: str) -> str:
    """Return the last line of an error output that says something."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1][:300] if lines else "no output"


def work_once(options: argparse.Namespace) -> None:
    """Measure once and write the result as one line to the file that the parent names."""
    set_name, tool, seed, path = options.worker
    try:
        measurement = measure(set_name, tool, int(seed), options)
    except Exception as error:  # a row of the table, not the end of the benchmark
        traceback.print_exc()
        reason = f"{type(error).__name__}: {_get_last_line(str(error))}"
        measurement = Measurement(set_name, tool, int(seed), options.minutes, problem=reason)
    append_measurement(Path(path), measurement)


# The plan of measurements


def applies_to(tool: str, accuracy_set: AccuracySet) -> bool:
    return tool in SLIPSTREAM or accuracy_set.task in PEERS[tool].tasks


def find_missing_packages(tool: str) -> list[str]:
    """Return the packages that a tool needs and that are not installed."""
    needed = PEERS[tool].packages if tool in PEERS else ()
    return [name for name in needed if importlib.util.find_spec(name) is None]


def list_seeds(tool: str, count: int) -> range:
    return range(count if tool in SLIPSTREAM or PEERS[tool].random else 1)


def start_worker(
    set_name: str, tool: str, seed: int, cores: Sequence[int], options: argparse.Namespace
) -> Measurement:
    """Measure in a new process, which is stopped with all of its children when its time is up."""
    folder = Path(tempfile.mkdtemp(prefix="worker-", dir=options.work))
    path, log = folder / "result.jsonl", folder / "worker.log"
    command = [sys.executable, __file__, "--worker", set_name, tool, str(seed), str(path)]
    command += ["--data", str(options.data), "--work", str(options.work), "--out", "unused"]
    command += ["--minutes", str(options.minutes), "--device", options.device]
    command += [part for text in options.overrides for part in ("--set", text)]
    limit_s = 60 * options.minutes * (1 + GRACE_SHARE) + GRACE_S
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {})
    if cores:
        command += ["--on-cores", ",".join(map(str, cores))]
        env["OMP_NUM_THREADS"] = str(len(cores))
    problem = ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            problem = f"not finished after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = read_measurements(path)
    if found:
        return next(iter(found.values()))
    if not problem:
        last = _get_last_line(log.read_text(encoding="utf-8", errors="replace"))
        problem = f"exit code {process.returncode}: {last}"
    return Measurement(set_name, tool, seed, options.minutes, problem=problem)


def is_done(measurement: Measurement | None, *, retry: bool) -> bool:
    if measurement is None or measurement.problem.startswith(ABSENT):
        return False
    return not (measurement.problem and retry)


def list_missing(
    known: Mapping[tuple[str, str, int], Measurement], options: argparse.Namespace
) -> Iterator[Measurement]:
    """Yield the measurements to carry out, and those of tools that are not installed, with the
    reason."""
    for set_name in options.sets:
        for tool in options.tools:
            if not applies_to(tool, SETS[set_name]):
                continue
            missing = find_missing_packages(tool)
            reason = f"{ABSENT}: {', '.join(missing)}" if missing else ""
            for seed in list_seeds(tool, options.seeds):
                if not is_done(known.get((set_name, tool, seed)), retry=options.retry):
                    yield Measurement(set_name, tool, seed, options.minutes, problem=reason)


def divide_cores(options: argparse.Namespace) -> list[list[int]]:
    """Return the cores of each of the measurements that run at a time."""
    present = sorted(os.sched_getaffinity(0))
    count = options.cores or len(present) // options.jobs
    if count * options.jobs > len(present) or not count:
        raise SystemExit(f"{options.jobs} jobs of {count} cores need more than {len(present)}")
    return [present[count * job : count * (job + 1)] for job in range(options.jobs)]


def run_all(options: argparse.Namespace) -> None:
    """Carry out all measurements that are missing, `--jobs` at a time."""
    path = options.out / MEASUREMENTS
    known = read_measurements(path)
    places: Queue[list[int]] = Queue()
    for cores in divide_cores(options):
        places.put(cores)

    def carry_out(wanted: Measurement) -> Measurement:
        if wanted.problem:
            return wanted
        cores = places.get()
        try:
            return start_worker(wanted.set_name, wanted.tool, wanted.seed, cores, options)
        finally:
            places.put(cores)

    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(carry_out, wanted) for wanted in list_missing(known, options)]
        for future in as_completed(futures):
            found = future.result()
            if found != known.get(found.key):
                append_measurement(path, found)
            print(describe_measurement(found), flush=True)


def describe_measurement(measurement: Measurement) -> str:
    subject = f"{measurement.set_name}, {measurement.tool}, seed {measurement.seed}"
    if measurement.problem:
        return f"{subject}: {measurement.problem}"
    values = ", ".join(f"{name} {value:.4g}" for name, value in measurement.metrics.items())
    return f"{subject}: {values}; {measurement.seconds:.0f} s, {measurement.num_windows} windows"


# Tables


def build_rows(
    measurements: Iterable[Measurement], sets: Sequence[str], tools: Sequence[str]
) -> list[ResultRow]:
    """Return one row for each set and tool, with the first metric of each seed."""
    rows = []
    measurements = list(measurements)
    for set_name in sets:
        main, second = SETS[set_name].metrics
        for tool in tools:
            found = [m for m in measurements if (m.set_name, m.tool) == (set_name, tool)]
            done = sorted((m for m in found if not m.problem), key=lambda m: m.seed)
            problem = "" if done else next((m.problem for m in found), "")
            if not found:
                continue
            extra = {
                second: [m.metrics[second] for m in done],
                "seconds": [m.seconds for m in done],
                "windows": done[0].num_windows if done else None,
                "failed_seeds": len(found) - len(done),
            }
            values = [m.metrics[main] for m in done]
            rows.append(ResultRow(set_name, tool, main, values, extra, problem))
    return rows


def format_value(values: Sequence[float]) -> str:
    """Format the mean and, of several, the deviation."""
    mean = statistics.fmean(values)
    text = f"{mean:.4f}" if abs(mean) < 10 else f"{mean:.2f}"
    if len(values) < 2:
        return text
    return f"{text} ± {statistics.stdev(values):.1g}"


def rank_tools(rows: Sequence[ResultRow], metric: str | None = None) -> dict[str, list[float]]:
    """Return the ranks of each tool, one for each set that it was run on, by the mean over seeds of
    the sets' first metric, or of the second (`metric = "second"`); tools of equal means share the
    mean of their ranks, and tools that failed the last one."""
    ranks: dict[str, list[float]] = {}
    for set_name in dict.fromkeys(row.case for row in rows):
        cases = [row for row in rows if row.case == set_name]
        name = SETS[set_name].metrics[0 if metric is None else 1]
        sign = -1 if name in HIGHER_IS_BETTER else 1
        values = {}
        for row in cases:
            numbers = row.repeats if metric is None else row.extra[name]
            values[row.variant] = sign * statistics.fmean(numbers) if numbers else float("inf")
        for tool, value in values.items():
            if value == float("inf") and _is_absent(cases, tool):
                continue
            better = sum(other < value for other in values.values())
            equal = sum(other == value for other in values.values())
            ranks.setdefault(tool, []).append(better + (equal + 1) / 2)
    return ranks


def _is_absent(rows: Sequence[ResultRow], tool: str) -> bool:
    return any(row.variant == tool and row.problem.startswith(ABSENT) for row in rows)


def compare_with_peers(rows: Sequence[ResultRow], tool: str) -> list[dict[str, Any]]:
    """Return, for each set, a tool's mean, the best peer's, and the verdict on their difference."""
    compared = []
    for set_name in dict.fromkeys(row.case for row in rows):
        sign = -1 if SETS[set_name].metrics[0] in HIGHER_IS_BETTER else 1
        cases = [row for row in rows if row.case == set_name and row.repeats]
        own = next((row for row in cases if row.variant == tool), None)
        peers = [row for row in cases if row.variant not in SLIPSTREAM]
        if own is None or not peers:
            continue
        best = min(peers, key=lambda row: sign * statistics.fmean(row.repeats))
        values = [statistics.fmean(row.repeats) for row in (own, best)]
        variance = sum(
            statistics.variance(row.repeats) / len(row.repeats)
            for row in (own, best)
            if len(row.repeats) > 1
        )
        noise = max(2 * variance**0.5, MIN_NOISE * abs(values[1]))
        difference = sign * (values[0] - values[1])
        verdict = "within noise" if abs(difference) <= noise else ""
        compared.append(
            {
                "set": set_name,
                "own": values[0],
                "peer": best.variant,
                "best": values[1],
                "difference": difference / abs(values[1]) if values[1] else 0.0,
                "verdict": verdict or ("better" if difference < 0 else "worse"),
            }
        )
    return compared


def build_tables(
    rows: Sequence[ResultRow], sets: Sequence[str], tools: Sequence[str]
) -> list[ResultTable]:
    """Return the tables of values, second metrics, seconds and the comparison with the peers."""
    tools = [tool for tool in tools if any(row.variant == tool for row in rows)]
    by_key = {(row.variant, row.case): row for row in rows}
    titles = [f"{name}, {SETS[name].metrics[0]}" for name in sets]
    reasons: list[str] = []
    published = list(dict.fromkeys(label for name in sets for label in SETS[name].published))

    def format_cell(tool: str, set_name: str, metric: str | None = None) -> str:
        row = by_key.get((tool, set_name))
        if row is None:
            return ""
        if row.problem:
            text = f"{tool}, {set_name}: {row.problem}"
            reasons.extend([text] if text not in reasons else [])
            return f"failed ({reasons.index(text) + 1})"
        values = row.repeats if metric is None else row.extra[metric]
        means = [
            statistics.fmean(other.repeats if metric is None else other.extra[metric])
            for other in rows
            if other.case == set_name and other.repeats
        ]
        name = metric or SETS[set_name].metrics[0]
        best = max(means) if name in HIGHER_IS_BETTER else min(means)
        text = format_value(values)
        return f"**{text}**" if statistics.fmean(values) == best else text

    def format_rank(ranks: Mapping[str, list[float]], tool: str) -> str:
        found = ranks.get(tool)
        return f"{statistics.fmean(found):.2f} ({len(found)} sets)" if found else ""

    ranks, second_ranks = rank_tools(rows), rank_tools(rows, "second")
    cells = []
    for tool in tools:
        spent = [s for row in rows if row.variant == tool for s in row.extra["seconds"]]
        seconds = f"{statistics.fmean(spent):.0f}" if spent else ""
        values = [format_cell(tool, name) for name in sets]
        cells.append([tool, *values, seconds, format_rank(ranks, tool)])
    for label in published:
        values = [SETS[name].published.get(label) for name in sets]
        cells.append([label, *("" if v is None else f"{v:g}" for v in values), "", ""])
    note = (
        "Mean ± standard deviation over seeds; bold is the best. The rank is the mean over the "
        "sets that a tool was run on; one that failed ranks last. Wall time is the mean of all "
        "runs."
    )
    if reasons:
        note += "\n\n" + "\n".join(f"{number}. {text}" for number, text in enumerate(reasons, 1))
    tables = [ResultTable("Accuracy", ["tool", *titles, "wall, s", "mean rank"], cells, note)]
    second = []
    for tool in tools:
        values = [format_cell(tool, name, SETS[name].metrics[1]) for name in sets]
        second.append([tool, *values, format_rank(second_ranks, tool)])
    headings = [f"{name}, {SETS[name].metrics[1]}" for name in sets]
    tables.append(ResultTable("The second metric", ["tool", *headings, "mean rank"], second))
    spent_cells = [
        [tool, *(_format_seconds(by_key.get((tool, name))) for name in sets)] for tool in tools
    ]
    tables.append(ResultTable("Wall time, s", ["tool", *sets], spent_cells))
    for tool in (tool for tool in tools if tool in SLIPSTREAM):
        compared = compare_with_peers(rows, tool)
        lines = []
        for line in compared:
            beside = f"{line['peer']}: {line['best']:.4g}", f"{100 * line['difference']:+.1f} %"
            lines.append([line["set"], f"{line['own']:.4g}", *beside, line["verdict"]])
        heads = ["set", tool, "best peer", "error beside it", "verdict"]
        note = (
            "The best peer is chosen by these test figures. Noise is two standard errors of the "
            f"difference, at least {100 * MIN_NOISE:g} %."
        )
        if lines:
            tables.append(ResultTable(f"{tool} beside the best peer", heads, lines, note))
    described = [
        [name, SETS[name].what, SETS[name].task, _count_windows(rows, name)] for name in sets
    ]
    tables.append(ResultTable("The sets", ["set", "what", "task", "test windows"], described))
    return tables


def _format_seconds(row: ResultRow | None) -> str:
    return f"{statistics.fmean(row.extra['seconds']):.0f}" if row and row.repeats else ""


def _count_windows(rows: Sequence[ResultRow], set_name: str) -> str:
    counts = {row.extra["windows"] for row in rows if row.case == set_name and row.repeats}
    return " to ".join(f"{count:,}" for count in sorted(counts))


def write_headline(rows: Sequence[ResultRow], minutes: float) -> str:
    ranks = rank_tools(rows)
    means = {tool: statistics.fmean(found) for tool, found in ranks.items()}
    if not means:
        return "No measurement has succeeded"
    own = next((tool for tool in SLIPSTREAM if tool in means), None)
    if own is None:
        best = min(means, key=lambda tool: means[tool])
        return f"{best} has the best mean rank, {means[best]:.2f}, in {minutes:g} min each"
    compared = compare_with_peers(rows, own)
    fine = sum(c["verdict"] != "worse" for c in compared)
    return (
        f"{own}: mean rank {means[own]:.2f} of {len(means)} tools in {minutes:g} min each; "
        f"better than the best peer or within noise on {fine} of {len(compared)} sets"
    )


def summarize(options: argparse.Namespace, seconds: float) -> BenchResult:
    """Write the record of all measurements of a folder, also those of earlier commands."""
    found = list(read_measurements(options.out / MEASUREMENTS).values())
    sets = [name for name in SETS if any(m.set_name == name for m in found)]
    tools = [name for name in TOOLS if any(m.tool == name for m in found)]
    rows = build_rows(found, sets, tools)
    minutes = sorted({m.minutes for m in found})
    settings = {
        "device": options.device,
        "cores": options.cores,
        "jobs": options.jobs,
        "minutes": minutes,
        "overrides": options.overrides,
        "sets": sets,
        "tools": tools,
        "versions": next((m.details["versions"] for m in found if "versions" in m.details), {}),
    }
    hardware = next((m.details["hardware"] for m in found if "hardware" in m.details), None)
    notes = [f"{name} {version}" for name, version in settings["versions"].items()]
    times = f"{', '.join(f'{m:g}' for m in minutes)} minute{'s' * (minutes != [1.0])}"
    notes = [f"Each tool has {times}.", ", ".join(notes)]
    if options.jobs > 1:
        notes.append(f"{options.jobs} measurements ran at a time, each on its own cores.")
    if options.overrides:
        notes.append(f"Slipstream was run with {' '.join(options.overrides)}.")
    notes = [note for note in [*notes, *options.note] if note]
    tables = build_tables(rows, sets, tools)
    headline = write_headline(rows, max(minutes, default=options.minutes))
    result = BenchResult("accuracy", headline, rows, tables, settings, seconds, notes, hardware)
    results.write_result(result, options.out)
    return result


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root = Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=Path, required=True, help="the folder of the record")
    parser.add_argument("--data", type=Path, default=root.parent / "shared" / "data")
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(DEFAULT_TOOLS))
    parser.add_argument("--seeds", type=int, default=3, help="the number of seeds")
    parser.add_argument("--minutes", type=float, default=2.0, help="the time of each tool")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default cuda if present")
    parser.add_argument("--cores", type=int, help="use only so many cores for a measurement")
    parser.add_argument("--jobs", type=int, default=1, help="so many measurements at a time")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--summarize", action="store_true", help="write the tables only")
    parser.add_argument("--work", type=Path, help="a folder for derived files and runs")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE"
    )
    parser.add_argument("--note", action="append", default=[], help="a remark for the summary")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--on-cores", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.data = options.data.resolve()
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def main() -> None:
    options = parse_options()
    if options.on_cores:
        os.sched_setaffinity(0, map(int, options.on_cores.split(",")))
    if options.worker:
        work_once(options)
        return
    began = time.perf_counter()
    if not options.summarize:
        with tempfile.TemporaryDirectory() as name:
            options.work = (options.work or Path(name)).resolve()
            options.work.mkdir(parents=True, exist_ok=True)
            run_all(options)
    result = summarize(options, time.perf_counter() - began)
    print(*(table.to_markdown() for table in result.tables), sep="\n")
    print(result.headline)


if __name__ == "__main__":
    main()
