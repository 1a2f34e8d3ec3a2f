"""Tries changes of the settings that could make a step faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from slipstream.autotune.workload import TrainingWorkload
from slipstream.config import Config, replace_settings
from slipstream.data.dataset import Dataset
from slipstream.engine import recovery
from slipstream.errors import UserError
from slipstream.profiling.bottleneck import MIN_FAULTS, StepFacts

REPEAT_S = 0.5
MAX_STEPS = 200
MIN_GAIN = 1.05
MAX_CHANGES = 3
BATCH_FACTOR = 4
LONG_STEP_MS = 250.0
"""A step that takes this long does not need a larger batch"""

Tell = Callable[[str], None]


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
        yield SettingChange(
            "batch",
            f"train.batch = {batch}",
            {"train": {"batch": batch}},
            "fewer, larger steps change the training; look at the validation loss",
            BATCH_FACTOR,
        )


def recommend(trials: Trials, config: Config, facts: StepFacts) -> list[dict[str, Any]]:
    """Return the changes that help most, then those that would change the model."""
    useful = sorted((trial for trial in trials if trial[1] >= MIN_GAIN), key=lambda t: -t[1])
    advice = [to_dict(change, gain) for change, gain in useful] + _list_untried(config, facts)
    return advice[:MAX_CHANGES]


def to_dict(change: SettingChange, gain: float) -> dict[str, Any]:
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
