"""Times the same job from the naive loop upward, with one technique added at a time."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from slipstream.base import machine
from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.config import Config, replace_settings
from slipstream.config.train import LAYER_WORDS
from slipstream.engine import recovery
from slipstream.engine.planning import TrainingWorkload
from slipstream.reporting.wording import format_seconds
from slipstream.tools import profiling
from slipstream.tools.bench.cases import Case
from slipstream.tools.bench.frameworks import PeerSettings, PlainTrial
from slipstream.tools.bench.results import (
    BenchResult,
    ProgressCallback,
    ResultRow,
    ResultTable,
    TimeBudget,
    format_ratio,
    format_spread,
)

REPEATS = 5
MIN_STEPS, MAX_STEPS = 2, 2000
WARM_S = 0.1
"""Seconds of steps before each repeat on a GPU, so that its clock is up"""
PLAN_FIELDS = ("precision", "rnn", "threads", "capture", "home", "compile", "onednn")
COPIES = 2
"""Augmented copies on disk, to compare with augmenting in the step"""
COMPILE_S = 15.0
"""How long torch.compile takes before its first step"""


class Rung(NamedTuple):
    technique: str
    settings: PeerSettings | dict[str, Any]
    """A plain PyTorch loop, or Slipstream with these settings of `engine`"""
    startup_s: float = 0.0
    copies: int | None = None
    """Replaces the config's `augment.cache`"""


@dataclass
class RungTrial:
    """A rung with its workload and its measurements."""

    rung: Rung
    workload: TrainingWorkload | PlainTrial | None = None
    problem: str = ""
    """Why there is no workload: it failed, or was left out"""
    measured: dict[str, Any] = field(default_factory=dict)
    """Figures that are measured once, such as memory"""
    repeats: list[float] = field(default_factory=list)


def list_rungs(config: Config, *, on_gpu: bool) -> Iterator[Rung]:
    """Yield the rungs from the loop that most people start with to Slipstream's own choice.

    The lower rungs are plain PyTorch scripts with a DataLoader.
    """
    recurrent, device = config.model.spec.is_recurrent, config.engine.device
    plain = PeerSettings("", "plain", "fp32", 0, fused=False, pinned=False, waits=True)

    def add_plain(technique: str, **change: Any) -> Rung:
        nonlocal plain
        plain = plain._replace(**change)
        return Rung(technique, plain)

    yield add_plain("naive loop")
    if on_gpu:
        if machine.has_tf32(machine.choose_device(device)):
            yield add_plain("+ TF32", precision="tf32")
        yield add_plain("+ AMP (fp16)", precision="fp16")
    elif machine.has_fast_bf16():
        yield add_plain("+ AMP (bf16)", precision="bf16")
    workers = 4 if on_gpu else 2
    name = f"+ {workers} workers{', pinned' if on_gpu else ''}"
    yield add_plain(name, workers=workers, pinned=on_gpu)
    yield add_plain("+ fused optimizer", fused=True)
    if on_gpu:
        yield add_plain("+ no syncs", waits=False)

    settings: dict[str, Any] = {"device": device, "plan": "off", "precision": plain.precision}
    settings |= {"home": "device", "capture": False, "compile": False, "fused": True}

    def add(technique: str, startup_s: float = 0.0, **change: Any) -> Rung:
        settings.update(change)
        return Rung(technique, dict(settings), startup_s)

    yield add("+ data on the device" if on_gpu else "+ gathered, no loader")
    if on_gpu:
        yield add("+ captured step", capture=True)
        if recurrent:
            yield add("+ cuDNN algorithm", plan="measure")
    else:
        yield add("+ threads, oneDNN", plan="measure")
    if not recurrent:
        yield add("+ torch.compile", COMPILE_S, compile=True, plan="off")
    best = {"device": device, "plan": "measure"}
    if config.augment.for_cache.kinds:
        copies = 0 if config.augment.cache else COPIES
        where = f"in {copies} copies on disk" if copies else "in the step"
        yield Rung(f"auto, augmented {where}", best, copies=copies)
    yield Rung("auto, all measured", best)


def measure_ladder(
    cases: Sequence[Case], *, minutes: float, watch: ProgressCallback
) -> BenchResult:
    """Time every rung of every case; repeats take turns, so that a disturbance affects them all."""
    budget, rows = TimeBudget(minutes), []
    # torch.compile takes its time
    weights = [1 if case.config.model.spec.is_recurrent else 2 for case in cases]
    for number, case in enumerate(cases):
        share_s = budget.left_s * weights[number] / sum(weights[number:])
        rows += _measure_case(case, budget.spent_s + share_s, budget, watch)
    return BenchResult(
        kind="ladder",
        headline=_write_headline(cases, rows),
        rows=rows,
        tables=[_build_table(case, [r for r in rows if r.case == case.name]) for case in cases],
        settings={"minutes": minutes, "repeats": REPEATS}
        | {"cases": {case.name: case.settings for case in cases}},
        seconds=budget.spent_s,
    )


def _measure_case(
    case: Case, until_s: float, budget: TimeBudget, watch: ProgressCallback
) -> list[ResultRow]:
    device = machine.choose_device(case.config.engine.device)
    on_gpu = device.type == "cuda"
    machine.warm_up(device)
    rungs = list(list_rungs(case.config, on_gpu=on_gpu))
    trials: list[RungTrial] = []
    try:
        for rung in rungs:
            watch(f"{case.name}: {rung.technique}", budget.share)
            decisive = rung in (rungs[0], rungs[-1])
            if budget.spent_s + rung.startup_s + 1.0 <= until_s or decisive:
                trials.append(open_trial(case, rung, device))
                continue
            why = f"takes {rung.startup_s:.0f} s and more to start; " if rung.startup_s else ""
            trials.append(RungTrial(rung, problem=f"left out: {why}give more --minutes"))
        _time_in_turns(case, trials, until_s, budget, watch)
        return list(_build_rows(case, trials))
    finally:
        for trial in trials:
            if trial.workload:
                trial.workload.close()
        trials.clear()
        gc.collect()
        if on_gpu:
            recovery.free_memory()


def _time_in_turns(
    case: Case, trials: list[RungTrial], until_s: float, budget: TimeBudget, watch: ProgressCallback
) -> None:
    running = [(trial, trial.workload) for trial in trials if trial.workload]
    share_s = max(until_s - budget.spent_s, 0.0) / REPEATS / max(len(running), 1)
    for turn in range(REPEATS):
        for trial, workload in running:
            watch(f"{case.name}: repeat {turn + 1} of {REPEATS}", budget.share)
            if turn > 1 and budget.spent_s > until_s:
                continue
            warm_s = WARM_S if workload.device.type == "cuda" else 0.0
            with workload.settings():
                once_s = workload.time_steps(1)
            fits = int(share_s / max(once_s, 1e-6)) - 1 - workload.num_prefetched
            steps = max(MIN_STEPS, min(MAX_STEPS, fits))
            trial.repeats.append(workload.measure_ms_per_step(steps, warm_s=warm_s))


def open_trial(case: Case, rung: Rung, device: torch.device) -> RungTrial:
    """Set up the rung's workload; measure its memory and, on a GPU, the utilisation."""
    memory = PeakMemory(device)
    trial = RungTrial(rung)
    try:
        workload = _build_workload(case, rung)
        workload.measure_ms_per_step(1)
    except (RuntimeError, UserError) as error:
        trial.problem = "failed: " + str(error).strip().split("\n", 1)[0]
        return trial
    trial.workload = workload
    trial.measured = {"peak_bytes": memory.read_peak_bytes()}
    if device.type == "cuda":
        recorded, _ = profiling.record_trace(workload, 3)
        trial.measured["device_ms"] = profiling.compute_busy_ms(recorded)
    return trial


def _build_workload(case: Case, rung: Rung) -> TrainingWorkload | PlainTrial:
    config = case.config
    if isinstance(rung.settings, PeerSettings):
        # the plain loop has no accumulation: all windows of a step go at once
        train = {"batch": case.batch * config.train.accumulate, "accumulate": 1}
        return PlainTrial(replace_settings(config, train=train), case.dataset, rung.settings)
    config = config.model_copy(update={"engine": type(config.engine)(**rung.settings)})
    if rung.copies is not None:
        augment = config.augment.model_copy(update={"cache": rung.copies})
        config = config.model_copy(update={"augment": augment})
    return TrainingWorkload(config, case.dataset)


class PeakMemory:
    """Measures the peak of memory from its creation on, above the use at that time.

    On a GPU it measures the GPU's memory; without one, this process's memory where Linux allows a
    reset of the peak.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before: float | None = torch.cuda.memory_allocated(device)
            return
        self.before = None
        with suppress(OSError):  # on macOS, Windows and older kernels
            with open("/proc/self/clear_refs", "w") as file:  # noqa: PTH123 (no regular file)
                file.write("5")
            self.before = _read_status("VmRSS")

    def read_peak_bytes(self) -> float | None:
        if self.before is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(_read_status("VmHWM") - self.before, 0.0)


def _read_status(name: str) -> float:
    with open("/proc/self/status") as file:  # noqa: PTH123
        line = next(line for line in file if line.startswith(name))
    return 1024.0 * int(line.split()[1])


def _build_rows(case: Case, trials: Sequence[RungTrial]) -> Iterator[ResultRow]:
    first = before = None
    for trial in trials:
        technique, settings = trial.rung.technique, trial.rung.settings
        if trial.workload is None:
            yield ResultRow(case.name, technique, "ms per step", problem=trial.problem)
            continue
        row = ResultRow(case.name, technique, "ms per step", trial.repeats)
        first = first or row.median
        before = before or row.median
        extra = {
            "settings": settings._asdict() if isinstance(settings, PeerSettings) else settings,
            "windows_per_s": 1e3 * trial.workload.windows_per_step / row.median,
            "speedup": first / row.median,
            "speedup_over_rung_before": before / row.median,
            "run_s": row.median / 1e3 * trial.workload.num_steps * case.config.train.epochs,
        }
        if "device_ms" in trial.measured:
            extra["device_busy"] = min(trial.measured["device_ms"] / row.median, 1.0)
        if isinstance(trial.workload, TrainingWorkload):
            extra["plan"] = {name: getattr(trial.workload.plan, name) for name in PLAN_FIELDS}
        before = row.median
        yield replace(row, extra=extra | trial.measured)


def _write_headline(cases: Sequence[Case], rows: Sequence[ResultRow]) -> str:
    best = []
    for case in cases:
        timed = [row for row in rows if row.case == case.name and row.repeats]
        if timed:
            best.append(f"{case.name} {format_ratio(timed[-1].extra['speedup'])}")
    return "What each technique brings: from the naive loop to auto " + ", ".join(best)


def _build_table(case: Case, rows: Sequence[ResultRow]) -> ResultTable:
    columns: dict[str, Callable[[ResultRow], str]] = {
        "technique": lambda row: row.variant,
        "ms per step": format_spread,
        "windows/s": lambda row: f"{row.extra['windows_per_s']:,.0f}",
        "vs naive": lambda row: format_ratio(row.extra["speedup"]),
        "vs before": lambda row: format_ratio(row.extra["speedup_over_rung_before"]),
        "GPU busy": lambda row: f"{row.extra['device_busy']:.0%}",
        "peak memory": lambda row: _format_megabytes(row.extra.get("peak_bytes")),
        "whole run": lambda row: format_seconds(row.extra["run_s"]),
    }
    if not any("device_ms" in row.extra for row in rows):
        del columns["GPU busy"]
    cells = [
        [format_cell(row) for format_cell in columns.values()]
        if row.repeats
        else [row.variant, row.problem, *[""] * (len(columns) - 2)]
        for row in rows
    ]
    epochs = case.config.train.epochs
    return ResultTable(
        f"{case.name}: {case.description}",
        list(columns),
        cells,
        f"The whole run is {epochs} epochs of {case.dataset.num_windows['train']:,} windows, "
        f"without validations; memory is above the use before. {_describe_choice(rows)}",
    )


def _describe_choice(rows: Sequence[ResultRow]) -> str:
    plan = rows[-1].extra.get("plan")
    if not plan:
        return ""
    parts = [plan["precision"], f"home {plan['home']}"]
    if plan["capture"]:
        parts += dict.fromkeys(LAYER_WORDS[layer] for layer in plan["rnn"])
        parts.append("captured")
    else:
        parts.append(format_count(plan["threads"], "thread"))
    return f"auto chose {', '.join(parts)}."


def _format_megabytes(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value / 1e6:,.0f} MB" if value >= 1e6 else f"{value / 1e6:.1f} MB"
