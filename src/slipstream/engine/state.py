"""All that the rest of a run depends on: taken in the middle of it, and put back into a new job."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream import runs
from slipstream.engine import checkpoint, recovery
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.plan import Plan
from slipstream.engine.recovery import Snapshot
from slipstream.engine.single import SingleStep, TrainingTask
from slipstream.errors import UserError

WEIGHTS, OPTIMIZER, BEST, REST = (
    f"{name}.safetensors" for name in ("weights", "optimizer", "best", "rest")
)

GOOD = "good."
"""Before the names of what a rollback would go back to"""


@dataclass
class Progress:
    """Where training stands."""

    step: int = 0
    epochs: int = 0
    """Whole epochs, validated where that was due"""
    done: int = 0
    """Steps of the epoch in hand"""
    logged: int = 0
    """Those of them whose losses are in the log"""
    epoch: float = 0.0
    """Epochs done, the last one perhaps in part"""
    best_loss: float = math.inf
    best_epoch: float = 0.0
    best_step: int = 0
    since_best: int = 0
    """Validations without improvement"""
    since_cut: int = 0
    """The same, since the plateau schedule's last cut"""
    rate: float = 1.0
    """What plateaus and recoveries have left of the learning rate"""
    rollbacks: int = 0


@dataclass
class FitResult:
    """What training gave."""

    progress: Progress
    plan: Plan
    """As it ended; recoveries may have changed it"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Of the best validation"""
    stop_reason: str = ""
    """Why it ended"""
    signal_number: int = 0
    """Of the signal that ended it, if one did"""
    failures: dict[str, str] = field(default_factory=dict)
    """Programs that could not be captured, and why"""
    setup_s: float = 0.0
    train_s: float = 0.0
    validate_s: float = 0.0


def take_checkpoint(
    task: TrainingTask, job: SingleStep, result: FitResult, good: Snapshot
) -> Checkpoint:
    """A copy of the state on the host; from a GPU it arrives while training goes on."""
    at = result.progress
    rest = {"losses": job.buffers.losses[: at.done]}
    if job.scale is not None:
        rest |= {"scale": job.scale.scale, "since_growth": job.scale.since_growth}
    if at.done:  # in mid-epoch: where a rollback would go back to
        rest |= {GOOD + name: copy for name, copy in good.copies.items()}
    live = {
        WEIGHTS: task.model.state_dict(),
        OPTIMIZER: recovery.collect_optimizer_state(job.optimizer),
        BEST: result.weights,
        REST: rest,
    }
    tensors = {name: checkpoint.copy_to_host(found) for name, found in live.items() if found}
    ready = None
    if job.plan.device.type == "cuda":
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(job.plan.device))
    facts = {
        "progress": asdict(at),
        "plan": job.plan.to_dict(),
        "seconds": [result.setup_s, result.train_s, result.validate_s],
        "log_bytes": runs.get_log_size(task.run),
        "data": task.fingerprint,
    }
    return Checkpoint(at.step, tensors, facts, ready)


def read_progress(saved: Checkpoint) -> Progress:
    return parse_progress(saved.metadata["progress"])


def parse_progress(facts: dict[str, Any]) -> Progress:
    found = dict(facts)
    if found["best_loss"] is None:  # JSON has no infinity
        found["best_loss"] = math.inf
    return Progress(**found)


def restore_program(
    saved: Checkpoint, task: TrainingTask, job: SingleStep, result: FitResult
) -> Snapshot:
    """Put a state back into a job that has just been set up; a rollback's goal comes back."""
    device, tensors = job.plan.device, saved.tensors
    try:
        task.model.load_state_dict(tensors[WEIGHTS])
    except RuntimeError as error:
        raise UserError(f"the checkpoint of step {saved.step} does not fit: {error}") from None
    params = [param for group in job.optimizer.param_groups for param in group["params"]]
    for key, value in tensors.get(OPTIMIZER, {}).items():
        index, name = key.split(".", 1)
        job.optimizer.state[params[int(index)]][name] = value.to(device, copy=True)
    result.weights = {
        name: value.to(device, copy=True) for name, value in tensors.get(BEST, {}).items()
    }
    result.progress = read_progress(saved)
    result.setup_s, result.train_s, result.validate_s = saved.metadata["seconds"]
    rest = tensors[REST]
    if job.scale is not None and "scale" in rest:
        job.scale.scale.copy_(rest["scale"])
        job.scale.since_growth.copy_(rest["since_growth"])
    job.buffers.losses[: result.progress.done] = rest["losses"].to(device)
    good = {name[len(GOOD) :]: value for name, value in rest.items() if name.startswith(GOOD)}
    if not good:
        return recovery.take_snapshot(task.model, job.optimizer, job.scale)
    return Snapshot({name: value.to(device) for name, value in good.items()})
