"""The same job from the naive loop upward, one technique added at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from slipstream import machine
from slipstream.autotune.workload import TrainingWorkload
from slipstream.bench.cases import Case
from slipstream.bench.frameworks.plain_loop import PlainTrial
from slipstream.bench.frameworks.settings import PeerSettings
from slipstream.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_ratio,
    format_spread,
)
from slipstream.config import Config, replace_settings
from slipstream.engine import recovery
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.profiling import trace
from slipstream.reporting import format_seconds

REPEATS = 5
MOST_STEPS, LEAST_STEPS = 2000, 2
WARM_S = 0.1
COPIES = 2
"""Augmented ones on disk, to compare with augmenting in the step"""
COMPILE_S = 15.0
"""What torch.compile may take before its first step"""


Runs = TrainingWorkload | PlainTrial


class Rung(NamedTuple):
    technique: str
    how: PeerSettings | dict[str, Any]
    """A plain PyTorch loop, or Slipstream with these settings of `engine`"""
    takes_s: float = 0.0
    copies: int | None = None
    """Another `augment.cache` than the config's"""


def list_rungs(config: Config, *, on_gpu: bool) -> Iterator[Rung]:
    """From the loop that most people start with to what Slipstream does by itself.

    The lower ones are plain PyTorch, as in a script, up to what a DataLoader allows.
    """
    recurrent, device = config.model.spec.is_recurrent, config.engine.device
    way = PeerSettings("", "plain", "fp32", 0, fused=False, pinned=False, waits=True)

    def plainly(technique: str, **change: Any) -> Rung:
        nonlocal way
        way = way._replace(**change)
        return Rung(technique, way)

    yield plainly("naive loop")
    if on_gpu:
        if machine.has_tf32(machine.choose_device(device)):
            yield plainly("+ TF32", precision="tf32")
        yield plainly("+ AMP (fp16)", precision="fp16")
    elif machine.has_fast_bf16():
        yield plainly("+ AMP (bf16)", precision="bf16")
    workers = 4 if on_gpu else 2
    name = f"+ {workers} workers{', pinned' if on_gpu else ''}"
    yield plainly(name, workers=workers, pinned=on_gpu)
    yield plainly("+ fused optimizer", fused=True)
    if on_gpu:
        yield plainly("+ no syncs", waits=False)

    settings: dict[str, Any] = {"device": device, "plan": "off", "precision": way.precision}
    settings |= {"home": "device", "capture": False, "compile": False, "fused": True}

    def more(technique: str, takes_s: float = 0.0, **change: Any) -> Rung:
        settings.update(change)
        return Rung(technique, dict(settings), takes_s)

    yield more("+ data on the device" if on_gpu else "+ gathered, no loader")
    if on_gpu:
        yield more("+ captured step", capture=True)
        if recurrent:
            yield more("+ cuDNN algorithm", plan="measure")
    else:
        yield more("+ threads, oneDNN", plan="measure")
    if not recurrent:
        yield more("+ torch.compile", COMPILE_S, compile=True, plan="off")
    best = {"device": device, "plan": "measure"}
    if config.augment.for_cache.kinds:
        other = "in the step" if config.augment.cache else f"in {COPIES} copies on disk"
        copies = 0 if config.augment.cache else COPIES
        yield Rung(f"auto, augmented {other}", best, copies=copies)
    yield Rung("auto, all measured", best)


def measure_ladder(
    cases: Sequence[Case], *, minutes: float, watch: ProgressCallback
) -> BenchResult:
    """Time every rung of every case; repeats take turns, so that a disturbance meets them all."""
    budget, rows = TimeBudget(minutes), []
    # compiling takes its time
    weights = [1 if case.config.model.spec.is_recurrent else 2 for case in cases]
    for number, case in enumerate(cases):
        share_s = budget.left_s * weights[number] / sum(weights[number:])
        rows += _climb(case, budget.spent_s + share_s, budget, watch)
    return BenchResult(
        kind="ladder",
        headline=_headline(cases, rows),
        rows=rows,
        tables=[_table(case, [row for row in rows if row.case == case.name]) for case in cases],
        settings={"minutes": minutes, "repeats": REPEATS}
        | {"cases": {case.name: case.settings for case in cases}},
        seconds=budget.spent_s,
    )


def _climb(
    case: Case, until_s: float, budget: TimeBudget, watch: ProgressCallback
) -> list[ResultRow]:
    device = machine.choose_device(case.config.engine.device)
    on_gpu = device.type == "cuda"
    machine.warm_up(device)
    found: list[tuple[Rung, Runs | str, dict[str, Any]]] = []
    open_trials: list[Runs] = []
    steps = list(list_rungs(case.config, on_gpu=on_gpu))
    try:
        for rung in steps:
            watch(f"{case.name}: {rung.technique}", budget.share)
            decisive = rung in (steps[0], steps[-1])
            if budget.spent_s + rung.takes_s + 1.0 > until_s and not decisive:
                takes = f"takes {rung.takes_s:.0f} s and more to start; " if rung.takes_s else ""
                found.append((rung, f"left out: {takes}give more --minutes", {}))
            else:
                opened, measured = _opened(case, rung, device)
                found.append((rung, opened, measured))
                if not isinstance(opened, str):
                    open_trials.append(opened)
        share_s = max(until_s - budget.spent_s, 0.0) / REPEATS / max(len(open_trials), 1)
        repeats: dict[int, list[float]] = {id(trial): [] for trial in open_trials}
        for turn in range(REPEATS):
            for trial in open_trials:
                watch(f"{case.name}: repeat {turn + 1} of {REPEATS}", budget.share)
                if turn > 1 and budget.spent_s > until_s:
                    continue
                warm_s = WARM_S if on_gpu else 0.0
                repeats[id(trial)].append(
                    trial.measure_ms_per_step(_steps(trial, share_s), warm_s=warm_s)
                )
        return list(_rows(case, found, repeats))
    finally:
        for trial in open_trials:
            trial.close()
        found.clear()
        gc.collect()
        if on_gpu:
            recovery.free_memory()


def _steps(trial: Runs, share_s: float) -> int:
    """As many as its share of the time allows, those that use up a loader's head start included."""
    with trial.settings():
        once_s = trial.time_steps(1)
    fits = int(share_s / max(once_s, 1e-6)) - 1 - trial.num_prefetched
    return max(LEAST_STEPS, min(MOST_STEPS, fits))


def _opened(case: Case, rung: Rung, device: torch.device) -> tuple[Runs | str, dict[str, Any]]:
    """The rung's trial, or why there is none; and what is measured once."""
    gauge = PeakMemory(device)
    try:
        trial: Runs
        if isinstance(rung.how, PeerSettings):
            trial = PlainTrial(_one_pass(case.config), case.dataset, rung.how)
        else:
            engine = type(case.config.engine)(**rung.how)
            config = case.config.model_copy(update={"engine": engine})
            if rung.copies is not None:
                augment = config.augment.model_copy(update={"cache": rung.copies})
                config = config.model_copy(update={"augment": augment})
            trial = TrainingWorkload(config, case.dataset)
        trial.measure_ms_per_step(1)
    except (RuntimeError, UserError) as error:
        why = str(error).strip().split("\n", 1)[0]
        return f"failed: {why}", {}
    measured: dict[str, Any] = {"peak_bytes": gauge.peak_bytes()}
    if device.type == "cuda":
        measured["device_ms"] = trace.compute_busy_ms(trace.record_trace(trial, 3)[0])
    return trial, measured


def _one_pass(config: Config) -> Config:
    """The plain loop has no accumulation: all windows of a step go at once."""
    batch = config.train.batch
    assert batch != "auto"
    return replace_settings(
        config, train={"batch": batch * config.train.accumulate, "accumulate": 1}
    )


class PeakMemory:
    """The most memory that is held from here on, above what is held now: the device's, or the
    process' where the kernel lets us start its count anew."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: float | None = torch.cuda.memory_allocated(device)
        else:
            self.before = _resident("VmRSS") if _count_anew() else None

    def peak_bytes(self) -> float | None:
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(_resident("VmHWM") - self.before, 0.0)


def _count_anew() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 (no regular file)
            file.write("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> float:
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith(name))
    return 1024.0 * int(line.split()[1])


def _rows(
    case: Case,
    found: Sequence[tuple[Rung, Runs | str, dict[str, Any]]],
    repeats: dict[int, list[float]],
) -> Iterator[ResultRow]:
    first = before = None
    for rung, trial, measured in found:
        if isinstance(trial, str):
            yield ResultRow(case.name, rung.technique, "ms per step", problem=trial)
            continue
        row = ResultRow(case.name, rung.technique, "ms per step", repeats[id(trial)])
        first = first or row.median
        before = before or row.median
        more = {
            "settings": rung.how._asdict() if isinstance(rung.how, PeerSettings) else rung.how,
            "windows_per_s": 1e3 * trial.windows_per_step / row.median,
            "speedup": first / row.median,
            "speedup_over_rung_before": before / row.median,
            "run_s": row.median / 1e3 * trial.num_steps * case.config.train.epochs,
        }
        if "device_ms" in measured:
            more["device_busy"] = min(measured["device_ms"] / row.median, 1.0)
        if isinstance(trial, TrainingWorkload):
            more["plan"] = _choices(trial.plan)
        before = row.median
        yield ResultRow(row.case, row.way, row.unit, row.repeats, more | measured)


def _choices(plan: Plan) -> dict[str, Any]:
    names = ("precision", "cudnn", "threads", "capture", "home", "compile", "onednn")
    return {name: getattr(plan, name) for name in names}


def _headline(cases: Sequence[Case], rows: Sequence[ResultRow]) -> str:
    best = []
    for case in cases:
        timed = [row for row in rows if row.case == case.name and row.repeats]
        if timed:
            best.append(f"{case.name} {format_ratio(timed[-1].more['speedup'])}")
    return "What each technique brings: from the naive loop to auto " + ", ".join(best)


def _table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    on_gpu = any("device_ms" in row.more for row in rows)
    columns: list[tuple[str, Callable[[ResultRow], str]]] = [
        ("technique", lambda row: row.way),
        ("ms per step", format_spread),
        ("windows/s", lambda row: f"{row.more['windows_per_s']:,.0f}"),
        ("vs naive", lambda row: format_ratio(row.more["speedup"])),
        ("vs before", lambda row: format_ratio(row.more["speedup_over_rung_before"])),
    ]
    if on_gpu:
        columns.append(("GPU busy", lambda row: f"{row.more['device_busy']:.0%}"))
    columns.append(("peak memory", lambda row: _megabytes(row.more.get("peak_bytes"))))
    columns.append(("whole run", lambda row: format_seconds(row.more["run_s"])))
    cells = []
    for row in rows:
        if row.repeats:
            cells.append([tell(row) for _, tell in columns])
        else:
            cells.append([row.way, row.problem, *[""] * (len(columns) - 2)])
    epochs = case.config.train.epochs
    return ResultTable(
        f"{case.name}: {case.what}",
        [name for name, _ in columns],
        cells,
        f"The whole run is {epochs} epochs of {case.dataset.num_windows['train']:,} windows, "
        "without "
        f"validations; memory is above what was held before. {_chosen(rows)}",
    )


def _chosen(rows: Sequence[ResultRow]) -> str:
    last = rows[-1].more.get("plan")
    if not last:
        return ""
    parts = [last["precision"], f"home {last['home']}"]
    if last["capture"]:
        parts += ["cuDNN " + "/".join(dict.fromkeys(last["cudnn"]))] if last["cudnn"] else []
        parts.append("captured")
    else:
        parts.append(f"{last['threads']} thread{'s' if last['threads'] > 1 else ''}")
    return f"auto chose {', '.join(parts)}."


def _megabytes(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e6:,.0f} MB" if value >= 1e6 else f"{value / 1e6:.1f} MB"
