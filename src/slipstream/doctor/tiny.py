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
from slipstream.data import dataset as datasets
from slipstream.engine import capture, measure
from slipstream.engine.job import Job, set_up
from slipstream.engine.trial import prepared
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


class Ran(NamedTuple):
    ms: float
    """Of one step"""
    loss: float
    """Mean over the first steps"""


@functools.cache
def plain(device: torch.device, kind: str = "lstm") -> Ran:
    """What every other step is compared with: fp32, eager, on the device."""
    found = _steps(device, kind)
    if not np.isfinite(found.loss):
        raise RuntimeError(f"the loss is {found.loss}")
    return found


def compared(device: torch.device, kind: str = "lstm", **how: Any) -> Ran:
    """Train for a moment and compare the losses with those of the plain step."""
    found, wanted = _steps(device, kind, **how), plain(device, kind).loss
    if not abs(found.loss - wanted) <= SAME_LOSS * abs(wanted):
        raise RuntimeError(f"gave other losses: {found.loss:.4g} instead of {wanted:.4g}")
    return found


def _steps(
    device: torch.device,
    kind: str = "lstm",
    change: Mapping[str, Any] | None = None,
    check: Callable[[Job], None] | None = None,
    **engine: Any,
) -> Ran:
    """Train for a moment, with some settings of the engine or of the plan changed."""
    wanted = JOB["engine"] | {"device": str(device)} | engine
    config = configs.load(JOB | {"model": MODELS[kind], "engine": wanted})
    task, rules = prepared(config, datasets.load(config, _waves()))
    chosen = replace(rules, **(change or {}))
    with chosen.flags():
        job = set_up(task, chosen)
        try:
            measure.first_steps_s(job, config, STEPS)
            loss = float(job.tape.losses[:STEPS].mean())
            spent = min(measure.first_steps_s(job, config, STEPS) for _ in range(STRETCHES))
            if job.failures():
                raise RuntimeError("; ".join(job.failures().values()))
            if check:
                check(job)
        finally:
            job.close()
    return Ran(1e3 * spent / STEPS, loss)


def preferred(device: torch.device) -> dict[str, Any]:
    """The plan for a typical small job, measured; or why there is none."""
    size, data, train = TYPICAL["model"]["hidden"], TYPICAL["data"], TYPICAL["train"]
    job = f"an LSTM of {size} units over {data['context']} rows, batch {train['batch']}"
    try:
        config = configs.load(TYPICAL, [f"engine.device={device}"])
        task, rules = prepared(config, datasets.load(config, _waves()))
        return {"job": job} | measure.decide(task, rules).to_dict()
    except Interrupted:
        raise
    except Exception as error:  # a device that fails is what the doctor is there for
        return {"job": job, "failed": reason(error)}


def _waves(rows: int = 2048) -> pa.Table:
    time = np.arange(rows)
    return pa.table({f"wave{n}": np.sin(2 * np.pi * time / n) for n in (12, 17, 24)})


def reason(error: BaseException) -> str:
    """The first line of what went wrong, with the last one where it only leads up to that."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]
