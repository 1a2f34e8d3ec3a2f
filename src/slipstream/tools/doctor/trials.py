"""Tiny training jobs: the plain step, the same step with one setting changed, and a plan."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from slipstream import config as configs
from slipstream.base.errors import Interrupted
from slipstream.data import dataset as datasets
from slipstream.engine import capture
from slipstream.engine.planning import build_by_rules, choose_plan, time_first_steps
from slipstream.engine.single import SingleStep, build_step
from slipstream.models import custom
from slipstream.training import advice
from slipstream.training.fitting import load_dataset

SAME_LOSS = 0.05
"""The largest relative difference between the losses of a technique and of the plain step"""
STEPS = capture.EAGER_FIRST + 2
"""Steps of one repeat: after the first repeat, a captured step is replayed"""
REPEATS = 2
JOB: dict[str, Any] = {
    "data": {"context": 12, "horizon": 2},
    "train": {"batch": 32},
    "engine": {"plan": "off", "precision": "fp32", "capture": False, "fused": False}
    | {"rnn": "cudnn"},  # on a CPU, PyTorch's layers
}
"""The plain step, in which one setting at a time is changed"""
MODELS: dict[str, dict[str, Any]] = {
    "lstm": {"kind": "lstm", "hidden": 16, "layers": 2, "dropout": 0.1},
    "mlp": {"kind": "mlp", "hidden": 16, "layers": 1, "dropout": 0.0},  # few kernels to compile
}
TYPICAL: dict[str, Any] = {
    "data": {"context": 24, "horizon": 12},
    "model": {"kind": "lstm", "hidden": 64, "layers": 1},
    "train": {"batch": 128, "epochs": 100_000},
    "engine": {"plan": "measure"},
}
"""The job whose plan is measured; it has so many epochs that measuring is worth it"""


class TechniqueTiming(NamedTuple):
    ms: float
    """Milliseconds per step"""
    loss: float
    """Mean loss of the first steps"""


@functools.cache
def time_plain_step(device: torch.device, kind: str = "lstm") -> TechniqueTiming:
    """Time the step that all others are compared with: fp32, eager, on the device."""
    timing = _time_steps(device, kind)
    if not np.isfinite(timing.loss):
        raise RuntimeError(f"the loss is {timing.loss}")
    return timing


def time_changed_step(device: torch.device, kind: str = "lstm", **how: Any) -> TechniqueTiming:
    """Time steps with changed settings and compare their losses with the plain step's."""
    timing, expected = _time_steps(device, kind, **how), time_plain_step(device, kind).loss
    if not abs(timing.loss - expected) <= SAME_LOSS * abs(expected):
        raise RuntimeError(f"gave other losses: {timing.loss:.4g} instead of {expected:.4g}")
    return timing


def _time_steps(
    device: torch.device,
    kind: str = "lstm",
    change: Mapping[str, Any] | None = None,
    check: Callable[[SingleStep], None] | None = None,
    **engine: Any,
) -> TechniqueTiming:
    """Time some steps with changed settings of the engine or of the plan."""
    settings = JOB["engine"] | {"device": str(device)} | engine
    config = configs.load(JOB | {"model": MODELS[kind], "engine": settings})
    task, rules = build_by_rules(config, datasets.load_dataset(config, _build_waves()))
    plan = replace(rules, **(change or {}))
    with plan.flags():
        job = build_step(task, plan)
        try:
            time_first_steps(job, config, STEPS)
            job.catch_up(STEPS)
            loss = float(job.buffers.losses[:STEPS].mean())
            elapsed_s = min(time_first_steps(job, config, STEPS) for _ in range(REPEATS))
            if job.failures():
                raise RuntimeError("; ".join(job.failures().values()))
            if check:
                check(job)
        finally:
            job.close()
    return TechniqueTiming(1e3 * elapsed_s / STEPS, loss)


def measure_plan(device: torch.device) -> dict[str, Any]:
    """Measure the plan for a typical small job, or report why there is none."""
    size, data, train = TYPICAL["model"]["hidden"], TYPICAL["data"], TYPICAL["train"]
    job = f"an LSTM of {size} units over {data['context']} rows, batch {train['batch']}"
    try:
        config = configs.load(TYPICAL, [f"engine.device={device}"])
        task, rules = build_by_rules(config, datasets.load_dataset(config, _build_waves()))
        return {"job": job} | choose_plan(task, rules).to_dict()
    except Interrupted:
        raise
    except Exception as error:  # finding a device that fails is the doctor's purpose
        return {"job": job, "failed": summarize_error(error)}


def _build_waves(rows: int = 2048) -> pa.Table:
    time = np.arange(rows)
    return pa.table({f"wave{n}": np.sin(2 * np.pi * time / n) for n in (12, 17, 24)})


def summarize_error(error: BaseException) -> str:
    """Return the first line of an error, with the last one where the first only introduces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]


def examine_job(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Load a job's data, list its problems, and measure changes of its settings for a few seconds
    each."""
    config = configs.load(path)
    custom.allow_classes(config)
    tell(f"reading the data of {path} ...")
    _, dataset = load_dataset(config)
    return {
        "config": str(path),
        "series": len(dataset.index.series_names),
        "windows": dataset.num_windows,
        "windows_without_target": dataset.left_out,
        "notes": list(dataset.notes),
        "advice": advice.measure_changes(config, tell=tell),
    }


triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

SIZE = 1024


# Triton evaluates the annotations, and knows no names but those of its own language
def _add_scaled(left: tl.tensor, right: tl.tensor, out: tl.tensor, size: tl.constexpr) -> None:
    place = tl.arange(0, size)
    tl.store(out + place, 2 * tl.load(left + place) + tl.load(right + place))


def check_kernel(device: torch.device) -> None:
    """Compile and run the kernel, and compare with torch."""
    left, right, out = torch.rand(3, SIZE, device=device)
    triton.jit(_add_scaled)[(1,)](left, right, out, size=SIZE)
    torch.testing.assert_close(out, 2 * left + right)
