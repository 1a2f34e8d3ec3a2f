"""Runs a job's steps under the profiler, finds their bottleneck and tries what would help."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import config as configs
from slipstream import machine, runs
from slipstream.autotune.workload import TrainingWorkload, prepare_task, resolve_batch_size
from slipstream.config import Config, replace_settings
from slipstream.data import dataset as datasets
from slipstream.data.dataset import Dataset
from slipstream.engine import monitor, recovery
from slipstream.errors import UserError
from slipstream.models import permission
from slipstream.profiling import bottleneck, report, trace
from slipstream.profiling.bottleneck import MIN_FAULTS, StepFacts
from slipstream.profiling.trace import Trace
from slipstream.text import format_ms

REPEAT_S = 0.5
MAX_STEPS = 200
MIN_GAIN = 1.05
MAX_CHANGES = 3
BATCH_FACTOR = 4
LONG_STEP_MS = 250.0
"""A step that takes this long does not need a larger batch"""

Tell = Callable[[str], None]


def profile(
    config: Config | str | Path | Mapping[str, Any],
    *,
    overrides: tuple[str, ...] = (),
    steps: int = 30,
    out: str | Path | None = None,
    tensorboard: bool = False,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Find where the time of the config's training step goes, and what would make it shorter."""
    config = configs.load(config, overrides)
    permission.allow_classes(config)
    tell("loading the data ...")
    dataset = datasets.load_dataset(config)
    if dataset.memory is None and config.engine.home != "stream":
        config = replace_settings(config, engine={"home": "stream"})
    result, recorded, chrome = examine(config, dataset, steps=steps, tell=tell)
    folder = runs.create_run(config.name, out=str(out or "profiles")).folder
    result |= {"folder": str(folder), "sentences": list(report.write_sentences(result))}
    report.write_files(result, recorded, chrome, folder, tensorboard=tensorboard)
    return result


def examine(
    config: Config, dataset: Dataset, *, steps: int = 30, tell: Tell = lambda _: None
) -> tuple[dict[str, Any], Trace, bytes]:
    """Return the verdict with its evidence, the trace, and the trace in Chrome's format."""
    config = resolve_batch_size(config, dataset)
    tell("timing steps as they are ...")
    workload = TrainingWorkload(config, dataset)
    try:
        measured, recorded, chrome, sample = _record(workload, dataset, steps, tell)
    finally:
        workload.close()
        recovery.free_memory()
    trials = try_changes(config, dataset, measured, tell)
    facts = replace(measured, gains={change.name: gain for change, gain in trials})
    name, sentence = bottleneck.find_bottleneck(facts)
    bound = facts.floor
    result = {
        "name": config.name,
        "verdict": name,
        "sentence": sentence,
        "ms_per_step": facts.wall_ms,
        "windows_per_s": 1e3 * workload.windows_per_step / facts.wall_ms,
        "parts": report.list_parts(facts),
        "device_idle": facts.idle_share if facts.on_gpu else None,
        "calls_per_step": facts.calls,
        "floor": bound._asdict() | {"ms": bound.ms, "times": facts.wall_ms / bound.ms},
        "changes": recommend(trials, config, facts),
        "tried": [_describe(change, gain) for change, gain in trials],
        "operations": recorded.operations,
        "machine": sample,
        "facts": asdict(facts) | {"floor": bound._asdict()},
        "plan": workload.plan.to_dict(),
    }
    return result, recorded, chrome


def _record(
    workload: TrainingWorkload, dataset: Dataset, steps: int, tell: Tell
) -> tuple[StepFacts, Trace, bytes, dict[str, Any]]:
    """Measure the unchanged step: facts, trace, the trace in Chrome's format, a machine sample."""
    plan = workload.plan
    machine.warm_up(plan.device)
    count = count_steps(workload)
    before, faults = machine.read_cpu_usage(), _count_major_faults()
    wall_ms = min(workload.measure_ms_per_step(count) for _ in range(3))
    load = machine.compute_load(before, machine.read_cpu_usage())
    faults = _count_major_faults() - faults
    sample = monitor.sample_machine(plan.device)
    tell(f"{format_ms(wall_ms)} a step; recording {steps} steps ...")
    recorded, chrome = trace.record_trace(workload, min(steps, MAX_STEPS))
    tell("measuring what this machine could do ...")
    task, _ = prepare_task(workload.config, dataset)
    on_gpu = plan.device.type == "cuda"
    facts = StepFacts(
        on_gpu=on_gpu,
        wall_ms=wall_ms,
        floor=bottleneck.compute_floor(task, plan),
        faults=faults / (3 * count),
        threads=plan.threads,
        cores=machine.count_available_cores(),
        others=load.others if load else 0.0,
        **bottleneck.compute_shares(recorded, wall_ms=wall_ms, on_gpu=on_gpu),
    )
    return facts, recorded, chrome, sample


def _count_major_faults() -> int:
    """Return how many pages this process has fetched from disk so far."""
    try:
        import resource
    except ImportError:  # Windows does not count them
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class SettingChange(NamedTuple):
    """A change to try."""

    name: str
    setting: str
    """As the user would write it"""
    sections: dict[str, dict[str, Any]]
    remark: str = ""
    windows_factor: int = 1
    """How many times as many windows a step then has"""
    resets_engine: bool = False
    """Whether all other engine settings are dropped"""


Trials = list[tuple[SettingChange, float]]
"""Changes, and how many times as fast they are, in windows per second"""


def count_steps(workload: TrainingWorkload) -> int:
    """Return how many steps one repeat takes."""
    once_s = workload.time_steps(2) / 2
    return max(2, min(MAX_STEPS, int(REPEAT_S / max(once_s, 1e-6))))


def try_changes(config: Config, dataset: Dataset, facts: StepFacts, tell: Tell) -> Trials:
    """Measure the gain of each change; leave out those that fail."""
    trials = []
    for change in _list_changes(config, dataset, facts):
        tell(f"trying {change.setting} ...")
        try:
            changed = replace_settings(config, reset_engine=change.resets_engine, **change.sections)
            workload = TrainingWorkload(changed, dataset)
        except (RuntimeError, ValueError, UserError):
            continue
        try:
            count = count_steps(workload)
            ms = min(workload.measure_ms_per_step(count) for _ in range(3))
            trials.append((change, change.windows_factor * facts.wall_ms / ms))
        except RuntimeError:
            continue
        finally:
            workload.close()
            recovery.free_memory()
    return trials


def _change_engine(name: str, setting: str, **settings: Any) -> SettingChange:
    return SettingChange(name, setting, {"engine": settings})


def _list_changes(config: Config, dataset: Dataset, facts: StepFacts) -> Iterator[SettingChange]:
    engine, train = config.engine, config.train
    assert train.batch != "auto"
    if facts.on_gpu and engine.sync:
        yield _change_engine("sync", "engine.sync = false", sync=False)
    if engine.home in ("loader", "host") and dataset.memory is not None:
        yield _change_engine("home", 'engine.home = "device"', home="device")
    if engine.home in ("loader", "stream"):
        workers = max(2, min(8, facts.cores))
        if engine.workers == 0 and facts.cores > 1:
            yield _change_engine("workers", f"engine.workers = {workers}", workers=workers)
        if facts.on_gpu and not (engine.pinned and engine.non_blocking):
            setting = "engine.pinned = true, engine.non_blocking = true"
            yield _change_engine("pinned", setting, pinned=True, non_blocking=True)
    if facts.on_gpu and engine.capture is False:
        yield _change_engine("capture", "engine.capture = true", capture=True)
    if engine.threads != "auto" and not facts.on_gpu:
        yield _change_engine("threads", 'engine.threads = "auto"', threads="auto", plan="measure")
    if engine.fused is False:
        yield _change_engine("fused", "engine.fused = true", fused=True)
    if engine.preset != "auto" or engine.model_fields_set - {"device", "plan", "preset"}:
        settings = {"engine": {"device": engine.device, "plan": "measure"}}
        yield SettingChange("auto", "[engine] left to Slipstream", settings, resets_engine=True)
    batch = BATCH_FACTOR * train.batch
    if dataset.num_windows["train"] >= 2 * batch and facts.wall_ms < LONG_STEP_MS:
        name = f"train.batch = {batch}"
        remark = "fewer, larger steps change the training; look at the validation loss"
        yield SettingChange("batch", name, {"train": {"batch": batch}}, remark, BATCH_FACTOR)


def recommend(trials: Trials, config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """Return the changes that help most, then those that would change the model."""
    useful = sorted((trial for trial in trials if trial[1] >= MIN_GAIN), key=lambda t: -t[1])
    advice = [_describe(change, gain) for change, gain in useful] + _list_untried(config, facts)
    return advice[:MAX_CHANGES]


def _describe(change: SettingChange, gain: float) -> dict[str, Any]:
    return {"setting": change.setting, "gain": gain, "tried": True, "remark": change.remark}


def _list_untried(config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """List changes that cannot be tried without another model, or more of the machine."""
    advice: list[dict[str, Any]] = []
    if facts.faults >= MIN_FAULTS:
        remark = "reads Parquet in pieces; or end other work"
        advice.append({"setting": 'engine.home = "stream"', "gain": None, "remark": remark})
    recurrent = facts.kernels.get("recurrent", 0.0) / facts.wall_ms
    if recurrent > 0.5 and config.model.patch == 1 and config.data.context % 4 == 0:
        remark = "four rows per time step: a chain a quarter as long, and another model"
        gain = 1 / (1 - 0.75 * recurrent)
        advice.append({"setting": "model.patch = 4", "gain": gain, "remark": remark})
    return [one | {"tried": False} for one in advice]
