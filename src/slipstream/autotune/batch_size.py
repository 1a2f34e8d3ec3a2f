"""Find the batch size with the most windows a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream import machine
from slipstream.autotune.timing import try_plan
from slipstream.config import Config
from slipstream.engine import recovery
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.errors import UserError

MIN_BATCH, MAX_BATCH = 32, 16384
WORTHWHILE_SPEEDUP = 1.1
"""How much faster a larger batch must be, since it takes fewer steps to learn in"""


def set_batch_size(config: Config, batch: int) -> Config:
    """Return the config with this batch size."""
    train = config.train.model_copy(update={"batch": batch})
    return config.model_copy(update={"train": train})


def find_batch_size(task: TrainingTask, plan: Plan) -> tuple[int, list[dict[str, Any]]]:
    """Double the batch while it fits and is worth it, then bisect; return it and the evidence.

    Every size is tried with whole steps, the optimizer's state included.
    """
    evidence: list[dict[str, Any]] = []
    limit = min(MAX_BATCH, task.dataset.num_windows["train"])

    def measure_speed(batch: int) -> float:
        """Return windows per millisecond; 0 if the batch does not fit."""
        sized = replace(task, config=set_batch_size(task.config, batch))
        result = try_plan(sized, plan, f"batch = {batch}", evidence)
        return batch / result.ms if result else 0.0

    hint = machine.find_gpu_hint(plan.hardware.get("gpu", ""))
    best, fastest, batch = 0, 0.0, min(hint.batch // 4 if hint else MIN_BATCH, limit)
    while batch <= limit:
        speed = measure_speed(batch)
        if not speed:  # a batch between the last one and this one may fit
            low, high = best, batch
            while high - low > max(low // 4, 1):
                middle = (low + high) // 2
                speed = measure_speed(middle)
                low, high = (middle, high) if speed else (low, middle)
                if speed > WORTHWHILE_SPEEDUP * fastest:
                    best, fastest = middle, speed
            break
        if speed < WORTHWHILE_SPEEDUP * fastest:
            break
        best, fastest, batch = batch, speed, 2 * batch
    if not best:
        raise UserError(
            "not even one window fits; what is left to try: "
            f"{recovery.suggest_remedies(task.config)}"
        )
    return best, evidence
