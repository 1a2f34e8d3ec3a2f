"""Estimate how long training takes."""

from __future__ import annotations

from typing import Any

from slipstream import machine
from slipstream.config import Config
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask


def count_windows_per_step(config: Config) -> int:
    """Return the windows of one optimizer step."""
    assert config.train.batch != "auto"
    return config.train.batch * config.train.accumulate


def count_steps(task: TrainingTask) -> int:
    """Return the optimizer steps of one epoch."""
    return -(-task.dataset.num_windows["train"] // count_windows_per_step(task.config))


def estimate_duration(task: TrainingTask, plan: Plan) -> dict[str, Any]:
    """Return how long training takes without validations, and whether that was measured."""
    if plan.ms_per_step is None:
        return {"expected_s": guess_duration_s(task, plan), "expected_is": "guessed"}
    expected_s = plan.ms_per_step / 1e3 * count_steps(task) * task.config.train.epochs
    return {"expected_s": expected_s, "expected_is": "measured"}


def guess_duration_s(task: TrainingTask, plan: Plan) -> float:
    """Guess very roughly how many seconds training takes, from multiplications and kernel calls."""
    config = task.config
    spec = config.model.spec
    tokens = 1 if spec.flattens else config.data.context // config.model.patch
    calls = spec.count_calls(tokens) * len(config.model.sizes)
    windows = task.dataset.num_windows["train"] * config.train.epochs
    weights = sum(p.numel() for p in task.model.parameters())
    on_gpu = plan.device.type == "cuda"
    speed = 1e13 if on_gpu else 5e9 * machine.count_available_cores()
    step_s = 1e-4 + 5e-6 * calls if on_gpu else 1e-3 + 3e-4 * calls  # of the smallest model
    products = 6 * weights * tokens * windows * task.dataset.signature.sequences_per_window
    return products / speed + step_s * windows / count_windows_per_step(config)
