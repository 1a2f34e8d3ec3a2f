"""The duration and the memory of a job, estimated before it starts.

A guess from the sizes of its model and data, corrected by what earlier runs on this machine took.
It does without torch, so it is rough, and given as a range.
"""

from __future__ import annotations

import math
import os
import platform
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from slipstream import config as configs
from slipstream.app.jobs import choose_queue, read_object
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.config import ALL_ROWS, Config
from slipstream.reporting.run_rows import FINISHED

MAX_RUNS = 20
"""Earlier runs that are looked at, the newest first"""
USUAL_BATCH, USUAL_CLASSES = 256, 3
"""Values for settings that are chosen only in training"""
UNKNOWN = 4.0
"""The factor by which an estimate may be wrong, either way, without earlier runs"""
KNOWN = 1.4
"""The factor by which an estimate may be wrong beyond the spread of earlier runs"""
FIXED_S = 4.0
"""Start-up, reading, plan and report, without earlier runs"""
PROCESS_BYTES = {"cpu": 4e8, "cuda": 1.2e9}
COPIES = 8
"""Copies of the weights: gradients, moments, the best and the last good weights, and so on"""


class JobSize(NamedTuple):
    """The sizes that decide the duration of a job."""

    windows: float
    """Windows of the training set"""
    steps: float
    """Steps of all epochs and models"""
    epochs: int
    parameters: int
    step_s: float
    """Estimated seconds of a step"""
    data_bytes: float
    activation_bytes: float


class EarlierRun(NamedTuple):
    """The duration and memory of a finished run, and their ratio to the estimate."""

    kind: str
    data: tuple[str, ...]
    step_ratio: float
    """Measured seconds of a step relative to the estimate"""
    fixed_s: float
    rest_share: float
    """Validation and scoring relative to training"""
    host_bytes: float | None
    gpu_bytes: float | None
    windows: int
    rows: int


def estimate_job(
    workspace: Workspace, config: Config, rows: int, num_numbers: int, windows: int | None = None
) -> dict[str, Any]:
    """Return the ranges of seconds and bytes of a job, and the basis of the estimate.

    `rows` are those of the data, 0 where they are not known, `num_numbers` its columns of numbers,
    `windows` those of the training set where they were counted (of all folds together).
    """
    device = choose_queue(config.engine.device).partition(":")[0]
    earlier = _list_earlier(workspace, device)
    same = [run for run in earlier if run.data == config.data.paths]
    rows = rows or max((run.rows for run in same), default=0)
    if not rows or config.model.is_custom:
        subject = "a network of your own" if rows else "data that were not read yet"
        return {"basis": f"There is no estimate for {subject}."}
    share = median([run.windows / run.rows for run in same]) if same else None
    if windows:
        share = windows * config.data.stride / rows / (config.data.split.walk_forward or 1)
    config = _resolve_roughly(config, rows, num_numbers)
    size = _measure_job(config, rows, num_numbers, share, device)
    alike = [run for run in earlier if run.kind == config.model.kind]
    seconds = _estimate_seconds(config, size, alike)
    bytes_ = _estimate_bytes(size, alike, device)
    free = psutil.virtual_memory().available
    return {
        "seconds": seconds,
        "bytes": bytes_,
        "steps": round(size.steps),
        "parameters": size.parameters,
        "windows": round(size.windows),
        "basis": _explain(config, alike),
        "is_too_large": device == "cpu" and bytes_[0] > free,
    }


def _resolve_roughly(config: Config, rows: int, num_numbers: int) -> Config:
    """Return the config with what the data will decide of it, as far as their size tells."""
    import numpy as np

    from slipstream.data.defaults import DataFacts, SeriesFacts, resolve_auto

    data, is_forecast = config.data, bool(config.data.horizon)
    num_inputs = len(data.inputs or ()) or max(num_numbers, 1)
    num_targets = len(data.targets or ()) or num_inputs
    series = SeriesFacts(
        lengths=np.array([rows]),
        pieces=np.array([rows]),
        training_rows=np.array([int(rows * _find_train_share(config, rows))]),
        period=data.period,
        drift=1.0,
    )
    facts = DataFacts(
        num_inputs=num_inputs,
        num_targets=num_targets,
        num_shared=min(num_inputs, num_targets) if is_forecast else 0,
        has_static=bool(data.static),
        series=series,
    )
    resolved = resolve_auto(config, facts).config
    return resolved if resolved.data.context != ALL_ROWS else config


def _measure_job(
    config: Config, rows: int, num_numbers: int, share: float | None, device: str
) -> JobSize:
    from slipstream.config import Signature
    from slipstream.models.shapes import count_weights, guess_step_s

    data, train, model = config.data, config.train, config.model
    names = data.inputs or tuple(f"input {i}" for i in range(max(num_numbers, 1)))
    targets = data.targets or names
    inputs = tuple(dict.fromkeys((*data.future, *names)))
    signature = Signature(
        inputs=inputs,
        targets=targets,
        static=data.static,
        shared=0,
        context=data.context,
        horizon=data.horizon,
        channels=data.channels,
        quantiles=train.quantiles if train.loss == "quantile" else (),
        step=None,
        classes=tuple(map(str, range(USUAL_CLASSES))) if data.task == "classify" else (),
        future=data.future,
    )
    parameters = count_weights(model, signature)
    windows = max(rows * (share or _find_train_share(config, rows)) / data.stride, 1.0)
    batch = (USUAL_BATCH if train.batch == "auto" else train.batch) * train.accumulate
    steps = math.ceil(windows / batch) * train.max_epochs * train.repeats
    sequences = batch * signature.sequences_per_window
    tokens = 1 if model.spec.flattens else data.context // model.patch
    return JobSize(
        windows=windows,
        steps=steps * (data.split.walk_forward or 1),
        epochs=train.max_epochs,
        parameters=parameters,
        step_s=guess_step_s(
            model,
            weights=parameters,
            context=data.context,
            windows=sequences,
            cores=0 if device == "cuda" else os.cpu_count() or 1,
        ),
        data_bytes=4.0 * rows * (len(inputs) + len(targets)),
        activation_bytes=4.0
        * sequences
        * (data.context * len(inputs) + 12 * tokens * sum(model.sizes) * model.num_stacks),
    )


def _find_train_share(config: Config, rows: int) -> float:
    """Return the share of rows where training windows begin, as far as the config says."""
    split = config.data.split
    if split.rows:
        return min(split.rows[0] / rows, 1.0)
    return float(split.train) if isinstance(split.train, float | int) else 0.7


def _list_earlier(workspace: Workspace, device: str) -> list[EarlierRun]:
    """Return the newest finished runs of this machine and device."""
    earlier: list[EarlierRun] = []
    for row in workspace.rows.list(workspace.folder, workspace.run_folders):
        if row["state"] == FINISHED and row["kind"] == "train":
            path = workspace.folder / row["id"] / "metrics.json"
            try:
                run = _read_earlier(path, path.stat().st_mtime_ns, device)
            except OSError:
                continue
            earlier += [run] if run else []
        if len(earlier) == MAX_RUNS:
            break
    return earlier


@lru_cache(maxsize=1_000)
def _read_earlier(path: Path, _: int, device: str) -> EarlierRun | None:
    """Return a finished run's figures; None for a run of another machine, device or version."""
    from slipstream.models.shapes import guess_step_s

    summary = read_object(path)
    try:
        config, plan, seconds = (
            configs.load(path.parent / "config.toml"),
            summary["plan"],
            summary["time"],
        )
        hardware = plan["hardware"]
        here = (os.cpu_count(), f"{platform.system()} {platform.machine()}")
        is_here = (hardware["cores"], hardware["system"]) == here
        if (
            not is_here
            or not str(plan["device"]).startswith(device)
            or config.train.batch == "auto"
        ):
            return None
        channels = len(config.data.targets or ()) if config.data.channels == "independent" else 1
        guess = guess_step_s(
            config.model,
            weights=summary["parameters"],
            context=config.data.context,
            windows=config.train.batch * config.train.accumulate * channels,
            cores=0 if device == "cuda" else os.cpu_count() or 1,
        )
        training_s, steps = seconds["training_s"], summary.get("pack", summary)["steps"]
        monitor = summary["monitor"]
        return EarlierRun(
            kind=config.model.kind,
            data=config.data.paths,
            step_ratio=training_s / steps / guess,
            fixed_s=sum(seconds[f"{name}_s"] for name in ("startup", "data", "plan", "kernels")),
            rest_share=(seconds["validation_s"] + seconds["scoring_s"]) / training_s,
            host_bytes=monitor["rss_peak_bytes"],
            gpu_bytes=monitor["gpu_memory_peak_bytes"],
            windows=summary["windows"]["train"],
            rows=summary["data"]["rows"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, UserError):
        return None


def _estimate_seconds(config: Config, size: JobSize, alike: list[EarlierRun]) -> list[float]:
    ratios = [run.step_ratio for run in alike] or [1.0]
    margin = KNOWN if alike else UNKNOWN
    overhead = median([run.rest_share for run in alike]) if alike else 0.1 + 0.5 / size.epochs
    fixed = median([run.fixed_s for run in alike]) if alike else FIXED_S
    ends = []
    for ratio in (min(ratios) / margin, max(ratios) * margin):
        training = size.step_s * size.steps * ratio
        if config.train.minutes is not None:
            training = min(training, 60 * config.train.minutes)
        ends.append(fixed + training * (1 + overhead))
    if size.epochs > 1 and config.train.patience != "off":
        ends[0] = fixed + (ends[0] - fixed) / 2  # it may stop early
    return ends


def _estimate_bytes(size: JobSize, alike: list[EarlierRun], device: str) -> list[float]:
    job_bytes = 4.0 * size.parameters * COPIES + size.activation_bytes + size.data_bytes
    low = high = PROCESS_BYTES[device] + job_bytes
    seen = [run.gpu_bytes if device == "cuda" else run.host_bytes for run in alike]
    if known := [num_bytes for num_bytes in seen if num_bytes]:
        low, high = min(*known, high), max(*known, high)
        low = max(low, job_bytes)
    return [low / KNOWN if not alike else low, high + 2 * size.data_bytes]


def _explain(config: Config, alike: list[EarlierRun]) -> str:
    kind = config.model.kind
    if alike:
        runs = "one earlier run" if len(alike) == 1 else f"{len(alike)} earlier runs"
        text = f"From {runs} with model.kind = {kind} on this machine."
    else:
        text = (
            f"A guess from the sizes of model and data: no run with model.kind = {kind} has "
            "finished here yet."
        )
    if config.data.prepare:
        text += " Steps of data.prepare may change the number of rows."
    return text
