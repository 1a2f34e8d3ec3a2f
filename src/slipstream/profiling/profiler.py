"""Runs a job's steps under the profiler, judges them, and tries what would help."""

from __future__ import annotations

import csv
import gzip
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from slipstream import config as configs
from slipstream import machine, runs
from slipstream.autotune import measure
from slipstream.autotune.workload import TrainingWorkload, prepare_task
from slipstream.config import Config, replace_settings
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import monitor, recovery
from slipstream.errors import UserError
from slipstream.models import permission
from slipstream.profiling import bottleneck, floor, plots, trace
from slipstream.profiling.bottleneck import StepFacts
from slipstream.profiling.trace import Trace

STRETCH_S = 0.5
MOST_STEPS = 200
WORTH_TELLING = 1.05
MOST_TOLD = 3
LARGER = 4
LONG_STEP_MS = 250.0
"""A step that takes this long has no use for a larger batch"""

Tell = Callable[[str], None]


class SettingChange(NamedTuple):
    """Something to try."""

    name: str
    setting: str
    """As the user would write it"""
    sections: dict[str, dict[str, Any]]
    remark: str = ""
    windows: int = 1
    """How many times the windows of a step it has"""
    anew: bool = False
    """Whether all other engine settings go"""


def profile(
    config: Config | str | Path | Mapping[str, Any],
    *,
    overrides: tuple[str, ...] = (),
    steps: int = 30,
    out: str | Path | None = None,
    tensorboard: bool = False,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Where the time of the config's training step goes, and what would make it shorter."""
    settings = configs.load(config, overrides)
    permission.allow_classes(settings)
    tell("loading the data ...")
    dataset = datasets.load_dataset(settings)
    if dataset.memory is None and settings.engine.home != "stream":
        settings = replace_settings(settings, engine={"home": "stream"})
    found, recorded, chrome = examine(settings, dataset, steps=steps, tell=tell)
    folder = runs.create_run(settings.name, out=str(out or "profiles")).folder
    found |= {"folder": str(folder), "sentences": list(write_sentences(found))}
    _write(found, recorded, chrome, folder, tensorboard=tensorboard)
    return found


def examine(
    config: Config, dataset: Dataset, *, steps: int = 30, tell: Tell = lambda _: None
) -> tuple[dict[str, Any], Trace, bytes]:
    """The verdict with its evidence, the trace, and the trace as Chrome reads it."""
    if config.train.batch == "auto":
        sized, plan = prepare_task(replace_settings(config, train={"batch": 256}), dataset)
        batch, _ = measure.find_batch_size(sized, plan)
        config = replace_settings(config, train={"batch": batch})
    tell("timing steps as they are ...")
    trial = TrainingWorkload(config, dataset)
    try:
        facts, recorded, chrome, sample = _measured(trial, dataset, steps, tell)
        plan = trial.plan
    finally:
        trial.close()
        recovery.free_memory()
    tried = list(_tried(config, dataset, facts, tell))
    facts = replace(facts, gains={change.name: gain for change, gain in tried})
    name, what = bottleneck.find_bottleneck(facts)
    low = facts.floor
    return (
        {
            "name": config.name,
            "verdict": name,
            "sentence": what,
            "ms_per_step": facts.wall_ms,
            "windows_per_s": 1e3 * trial.windows_per_step / facts.wall_ms,
            "parts": _parts(facts),
            "device_idle": facts.idle_share if facts.on_gpu else None,
            "calls_per_step": facts.calls,
            "floor": low._asdict() | {"ms": low.ms, "times": facts.wall_ms / low.ms},
            "changes": _told(tried, config, facts),
            "tried": [_as_dict(change, gain) for change, gain in tried],
            "operations": recorded.operations,
            "machine": sample,
            "facts": asdict(facts) | {"floor": low._asdict()},
            "plan": plan.to_dict(),
        },
        recorded,
        chrome,
    )


def _measured(
    trial: TrainingWorkload, dataset: Dataset, steps: int, tell: Tell
) -> tuple[StepFacts, Trace, bytes, dict[str, Any]]:
    plan = trial.plan
    machine.warm_up(plan.device)
    count = _count(trial)
    usage = MachineUsage()
    wall_ms = min(trial.measure_ms_per_step(count) for _ in range(3))
    faults, others = usage.faults() / (3 * count), usage.others()
    sample = monitor.sample_machine(plan.device)
    tell(f"{wall_ms:.3g} ms a step; recording {steps} steps ...")
    recorded, chrome = trace.record_trace(trial, min(steps, MOST_STEPS))
    tell("measuring what this machine could do ...")
    task, _ = prepare_task(trial.config, dataset)
    low = floor.compute_floor(task, plan, floor.measure_peaks(plan))
    on_gpu = plan.device.type == "cuda"
    facts = StepFacts(
        on_gpu=on_gpu,
        wall_ms=wall_ms,
        floor=low,
        faults=faults,
        threads=plan.threads,
        cores=machine.count_available_cores(),
        others=others,
        **bottleneck.compute_shares(recorded, wall_ms=wall_ms, on_gpu=on_gpu),
    )
    return facts, recorded, chrome, sample


class MachineUsage:
    """What happens on the machine from here on."""

    def __init__(self) -> None:
        self.began = self._now()

    def _now(self) -> tuple[float, float, float, int]:
        own = psutil.Process()
        mine = sum(sum(p.cpu_times()[:2]) for p in (own, *own.children(recursive=True)))
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return time.monotonic(), sum(times) - idle, mine, _major_faults()

    def faults(self) -> int:
        """Major page faults of this process"""
        return self._now()[3] - self.began[3]

    def others(self) -> float:
        """Cores that other processes keep busy"""
        (now, busy, mine, _), (then, was_busy, was_mine, _) = self._now(), self.began
        return max((busy - was_busy) - (mine - was_mine), 0.0) / (now - then)


def _major_faults() -> int:
    """Pages that this process had to fetch from disk so far; 0 where nobody counts them."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _count(trial: TrainingWorkload) -> int:
    once_s = trial.time_steps(2) / 2
    return max(2, min(MOST_STEPS, int(STRETCH_S / max(once_s, 1e-6))))


def _tried(
    config: Config, dataset: Dataset, facts: StepFacts, tell: Tell
) -> Iterator[tuple[SettingChange, float]]:
    """What each change brings, in windows a second; one that fails brings nothing."""
    for change in _changes(config, dataset, facts):
        tell(f"trying {change.setting} ...")
        try:
            other = TrainingWorkload(
                replace_settings(config, reset_engine=change.anew, **change.sections), dataset
            )
        except (RuntimeError, ValueError, UserError):
            continue
        try:
            count = _count(other)
            ms = min(other.measure_ms_per_step(count) for _ in range(3))
            yield change, change.windows * facts.wall_ms / ms
        except RuntimeError:
            continue
        finally:
            other.close()
            recovery.free_memory()


def _changes(config: Config, dataset: Dataset, facts: StepFacts) -> Iterator[SettingChange]:
    engine, train = config.engine, config.train
    assert train.batch != "auto"

    def of_engine(name: str, text: str, **settings: Any) -> SettingChange:
        return SettingChange(name, text, {"engine": settings})

    if facts.on_gpu and engine.sync:
        yield of_engine("sync", "engine.sync = false", sync=False)
    if engine.home in ("loader", "host") and dataset.memory is not None:
        yield of_engine("home", 'engine.home = "device"', home="device")
    if engine.home in ("loader", "stream"):
        workers = max(2, min(8, facts.cores))
        if engine.workers == 0 and facts.cores > 1:
            yield of_engine("workers", f"engine.workers = {workers}", workers=workers)
        if facts.on_gpu and not (engine.pinned and engine.non_blocking):
            text = "engine.pinned = true, engine.non_blocking = true"
            yield of_engine("pinned", text, pinned=True, non_blocking=True)
    if facts.on_gpu and engine.capture is False:
        yield of_engine("capture", "engine.capture = true", capture=True)
    if engine.threads != "auto" and not facts.on_gpu:
        yield of_engine("threads", 'engine.threads = "auto"', threads="auto", plan="measure")
    if engine.fused is False:
        yield of_engine("fused", "engine.fused = true", fused=True)
    if engine.preset != "auto" or engine.model_fields_set - {"device", "plan", "preset"}:
        yield SettingChange(
            "auto",
            "[engine] left to Slipstream",
            {"engine": {"device": engine.device, "plan": "measure"}},
            anew=True,
        )
    room = dataset.num_windows["train"] >= 2 * LARGER * train.batch
    if room and facts.wall_ms < LONG_STEP_MS:
        yield SettingChange(
            "batch",
            f"train.batch = {LARGER * train.batch}",
            {"train": {"batch": LARGER * train.batch}},
            "fewer, larger steps: it learns otherwise, look at the validation loss",
            LARGER,
        )


def _told(
    tried: list[tuple[SettingChange, float]], config: Config, facts: StepFacts
) -> list[dict[str, Any]]:
    """The changes that help most: those that were tried, then what would change the model."""
    best = sorted((item for item in tried if item[1] >= WORTH_TELLING), key=lambda item: -item[1])
    told = [_as_dict(change, gain) for change, gain in best[:MOST_TOLD]]
    if len(told) < MOST_TOLD:
        told += _advice(config, facts)
    return told[:MOST_TOLD]


def _as_dict(change: SettingChange, gain: float) -> dict[str, Any]:
    return {"setting": change.setting, "gain": gain, "tried": True, "remark": change.remark}


def _advice(config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """What cannot be tried without another model, or more of the machine."""
    found = []
    if facts.faults >= bottleneck.FAULTS_COUNT:
        found.append(
            _expected('engine.home = "stream"', None, "reads Parquet in pieces; or end other work")
        )
    model = config.model
    recurrent = facts.kernels.get("recurrent", 0.0) / facts.wall_ms
    if recurrent > 0.5 and model.patch == 1 and config.data.context % 4 == 0:
        gain = 1 / (1 - 0.75 * recurrent)
        remark = "four rows per time step: a chain a quarter as long, and another model"
        found.append(_expected("model.patch = 4", gain, remark))
    return found


def _expected(setting: str, gain: float | None, remark: str) -> dict[str, Any]:
    return {"setting": setting, "gain": gain, "tried": False, "remark": remark}


PARTS = {
    "recurrent": "recurrent layers",
    "matrix": "matrix products",
    "attention": "attention",
    "optimizer": "weight update",
    "copy": "copies",
    "data": "data",
    "other": "other operations",
    "launch": "driver calls",
}


def _parts(facts: StepFacts) -> list[dict[str, Any]]:
    """The whole step, part by part, largest first."""
    parts = {PARTS[kind]: ms for kind, ms in facts.kernels.items()}
    if facts.on_gpu:
        parts["copies to the GPU"] = facts.copy_ms
        parts["GPU idle: data"] = facts.idle["data"]
        parts["GPU idle: host waited"] = facts.idle["wait"]
        parts["GPU idle: launches, host"] = facts.idle["launch"]
    else:
        parts["data"] = facts.idle["data"]
        parts["Python, between operations"] = facts.idle["outside"]
    whole = facts.wall_ms
    rows = [{"part": p, "ms": ms, "share": ms / whole} for p, ms in parts.items() if ms > 0]
    return sorted(rows, key=lambda row: -row["ms"])


def _write(
    found: dict[str, Any], recorded: Trace, chrome: bytes, folder: Path, *, tensorboard: bool
) -> None:
    runs.write_json(folder / "profile.json", found)
    with runs.replace_atomically(folder / "trace.json.gz") as temporary:
        temporary.write_bytes(gzip.compress(chrome, compresslevel=4))
    if tensorboard:
        place = folder / "tensorboard"
        place.mkdir()
        shutil.copyfile(folder / "trace.json.gz", place / "slipstream.pt.trace.json.gz")
    with (
        runs.replace_atomically(folder / "operations.csv") as temporary,
        temporary.open("w") as file,
    ):
        writer = csv.DictWriter(file, ["place", "kind", "name", "calls", "ms"])
        writer.writeheader()
        writer.writerows(recorded.operations)
    plots.plot_timeline(recorded, folder, title=found["name"], wall_ms=found["ms_per_step"])
    runs.write_text(folder / "summary.md", _markdown(found))


def _markdown(found: dict[str, Any]) -> str:
    lines = [f"# {found['name']}: {found['verdict']}", "", *found["sentences"], ""]
    lines += ["| part of the step | ms | share |", "|---|---|---|"]
    lines += [f"| {p['part']} | {p['ms']:.3g} | {p['share']:.0%} |" for p in found["parts"]]
    lines += ["", "| operation | where | calls a step | ms a step |", "|---|---|---|---|"]
    lines += [
        f"| {o['name'][:80]} | {o['place']} | {o['calls']:.3g} | {o['ms']:.3g} |"
        for o in found["operations"][:25]
    ]
    return "\n".join(lines) + "\n"


def _times(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def write_sentences(found: dict[str, Any]) -> Iterator[str]:
    """The verdict in words."""
    yield (
        f"{found['verdict'].capitalize()}: {found['sentence']}. A step takes "
        f"{found['ms_per_step']:.3g} ms ({found['windows_per_s']:,.0f} windows a second)."
    )
    low = found["floor"]
    names = {"arithmetic_ms": "arithmetic", "memory_ms": "memory", "chain_ms": "recurrent chain"}
    why = ", ".join(f"{name} {low[key]:.3g} ms" for key, name in names.items() if low[key] > 0)
    yield f"It is {_times(low['times'])} times its floor of {low['ms']:.3g} ms ({why})."
    if not found["changes"]:
        yield "Nothing that could be tried here makes it more than 5 % faster."
    for change in found["changes"]:
        gain = f"{change['gain']:.2g}x" if change["gain"] else ""
        how = f"{gain} as fast, tried" if change["tried"] else f"{gain} expected, not tried".strip()
        remark = f" ({change['remark']})" if change["remark"] else ""
        yield f"{change['setting']}: {how}{remark}."
