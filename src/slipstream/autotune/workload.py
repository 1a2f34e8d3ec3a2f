"""Training steps to be timed, for the bench, the profiler and the doctor."""

import os
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from slipstream.autotune import timing
from slipstream.autotune.measure import choose_plan, find_batch_size
from slipstream.autotune.rules import make_plan
from slipstream.config import Config, replace_settings
from slipstream.data.dataset import Dataset
from slipstream.engine import capture
from slipstream.engine.lanes.lane import EpochStart
from slipstream.engine.lanes.schedule import compute_lrs
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask, build_step, build_task, seed_generators
from slipstream.runs import Run

NOWHERE = Run(Path(os.devnull))
"""Timed steps log nothing"""


def prepare_task(config: Config, dataset: Dataset) -> tuple[TrainingTask, Plan]:
    """Build a new model on its device, and make its plan by rules of thumb."""
    plan = make_plan(config, data_bytes=dataset.data_bytes, streamed=dataset.stream is not None)
    with seed_generators(config.seed, plan.device):
        return build_task(config, dataset, plan, NOWHERE), plan


def resolve_batch_size(config: Config, dataset: Dataset) -> Config:
    """Replace `train.batch = "auto"` by the measured batch size."""
    if config.train.batch != "auto":
        return config
    task, plan = prepare_task(replace_settings(config, train={"batch": 256}), dataset)
    batch, _ = find_batch_size(task, plan)
    return replace_settings(config, train={"batch": batch})


class TimedWorkload(ABC):
    """Something that takes training steps, which are timed."""

    device: torch.device
    num_prefetched = 0
    """Steps whose batches a loader has ready after a pause"""

    @abstractmethod
    def settings(self) -> AbstractContextManager[None]:
        """Set torch's flags as the steps need them."""

    @abstractmethod
    def step(self) -> None: ...

    def finish(self) -> None:  # noqa: B027 (most have nothing to finish)
        """Finish what the steps have deferred."""

    def time_steps(self, steps: int) -> float:
        """Return the seconds of some steps, the device's work included."""
        return timing.time_steps(self.step, steps, self.device, self.finish)

    def measure_ms_per_step(self, steps: int, *, warm_s: float = 0.0) -> float:
        """Return the milliseconds per step, after using up the batches that a loader prefetched.

        Steps for `warm_s` seconds come before those that count: an idle device lowers its clock.
        """
        with self.settings():
            if self.num_prefetched:
                self.time_steps(1 + self.num_prefetched)
            warm = time.perf_counter() + warm_s
            while time.perf_counter() < warm:
                self.time_steps(1)
            return 1e3 * self.time_steps(steps) / steps


class TrainingWorkload(TimedWorkload):
    """A model in training: its steps go on from epoch to epoch, without validations."""

    def __init__(self, config: Config, dataset: Dataset, *, first: int = 1) -> None:
        """Take the first steps, and those that a capture needs."""
        self.config = config
        task, plan = prepare_task(config, dataset)
        self.task, self.plan = task, choose_plan(task, plan)
        self.device = self.plan.device
        if self.plan.home in ("loader", "stream"):
            self.num_prefetched = self.plan.workers * self.plan.prefetch
        self.steps_done = 0
        with self.settings():
            self.job = build_step(task, self.plan)
            try:
                self.num_steps = self.job.batches.num_steps
                captured = capture.EAGER_FIRST + 1 if self.plan.capture else 1
                self.time_steps(max(first, captured))
                self.job.catch_up(min(first, self.num_steps))
                self.first_losses: list[float] = self.job.buffers.losses[:first].tolist()
                if failed := "; ".join(self.job.failures().values()):
                    raise RuntimeError(failed)
            except BaseException:
                self.job.close()
                raise

    @property
    def windows_per_step(self) -> int:
        return timing.count_windows_per_step(self.config)

    def settings(self) -> AbstractContextManager[None]:
        return self.plan.flags()

    def step(self) -> None:
        """Take the next step; the first of an epoch starts the epoch."""
        job, place = self.job, self.steps_done % self.num_steps
        if not place:
            epoch = self.steps_done // self.num_steps
            job.flush()
            job.batches.start_epoch(epoch)
            rates = compute_lrs(self.config.train, EpochStart(epoch), self.num_steps)
            job.buffers.begin(rates, first=self.steps_done)
        job.advance()
        if self.config.engine.sync:
            float(job.buffers.losses[place])
        self.steps_done += 1

    def finish(self) -> None:
        self.job.flush()

    def close(self) -> None:
        self.job.close()
