"""Tiny jobs of our own engine: the plain step, the same step with something changed, and a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from slipstream import config as configs
from slipstream.autotune import measure
from slipstream.autotune.workload import prepare_task
from slipstream.data import dataset as datasets
from slipstream.engine import capture
from slipstream.engine.single import SingleStep, build_step
from slipstream.errors import Interrupted

SAME_LOSS = 0.05
"""How far a technique's losses may be from those of the plain step."""
STEPS = capture.EAGER_FIRST + 2
"""Of one stretch: after the first one, a captured step is replayed"""
STRETCHES = 2
JOB: dict[str, Any] = {
    "data": {"context": 12, "horizon": 2},
    "train": {"batch": 32},
    "engine": {"plan": "off", "precision": "fp32", "capture": False, "fused": False},
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
"""What the plan is asked about; it has epochs enough to be worth measuring"""


class TechniqueTiming(NamedTuple):
    ms: float
    """Of one step"""
    loss: float
    """Mean over the first steps"""


@functools.cache
def time_plain_step(device: torch.device, kind: str = "lstm") -> TechniqueTiming:
    """What every other step is compared with: fp32, eager, on the device."""
    found = _steps(device, kind)
    if not np.isfinite(found.loss):
        raise RuntimeError(f"the loss is {found.loss}")
    return found


def time_changed_step(device: torch.device, kind: str = "lstm", **how: Any) -> TechniqueTiming:
    """Train for a moment and compare the losses with those of the plain step."""
    found, wanted = _steps(device, kind, **how), time_plain_step(device, kind).loss
    if not abs(found.loss - wanted) <= SAME_LOSS * abs(wanted):
        raise RuntimeError(f"gave other losses: {found.loss:.4g} instead of {wanted:.4g}")
    return found


def _steps(
    device: torch.device,
    kind: str = "lstm",
    change: Mapping[str, Any] | None = None,
    check: Callable[[SingleStep], None] | None = None,
    **engine: Any,
) -> TechniqueTiming:
    """Train for a moment, with some settings of the engine or of the plan changed."""
    wanted = JOB["engine"] | {"device": str(device)} | engine
    config = configs.load(JOB | {"model": MODELS[kind], "engine": wanted})
    task, rules = prepare_task(config, datasets.load_dataset(config, _waves()))
    chosen = replace(rules, **(change or {}))
    with chosen.flags():
        job = build_step(task, chosen)
        try:
            measure.time_first_steps(job, config, STEPS)
            loss = float(job.buffers.losses[:STEPS].mean())
            spent = min(measure.time_first_steps(job, config, STEPS) for _ in range(STRETCHES))
            if job.failures():
                raise RuntimeError("; ".join(job.failures().values()))
            if check:
                check(job)
        finally:
            job.close()
    return TechniqueTiming(1e3 * spent / STEPS, loss)


def measure_plan(device: torch.device) -> dict[str, Any]:
    """The plan for a typical small job, measured; or why there is none."""
    size, data, train = TYPICAL["model"]["hidden"], TYPICAL["data"], TYPICAL["train"]
    job = f"an LSTM of {size} units over {data['context']} rows, batch {train['batch']}"
    try:
        config = configs.load(TYPICAL, [f"engine.device={device}"])
        task, rules = prepare_task(config, datasets.load_dataset(config, _waves()))
        return {"job": job} | measure.choose_plan(task, rules).to_dict()
    except Interrupted:
        raise
    except Exception as error:  # a device that fails is what the doctor is there for
        return {"job": job, "failed": summarize_error(error)}


def _waves(rows: int = 2048) -> pa.Table:
    time = np.arange(rows)
    return pa.table({f"wave{n}": np.sin(2 * np.pi * time / n) for n in (12, 17, 24)})


def summarize_error(error: BaseException) -> str:
    """The first line of what went wrong, with the last one where it only leads up to that."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]
