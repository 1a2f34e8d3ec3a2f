"""One way to run a job, set up to be timed: for the bench, the profile and their likes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream import hardware
from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.engine import capture, measure, optim, plan
from slipstream.engine.job import Task, set_up
from slipstream.engine.plan import Plan
from slipstream.models import build
from slipstream.runs import Run

NOWHERE = Run(Path(os.devnull))
"""A trial tells nobody"""


def prepared(config: Config, dataset: Dataset) -> tuple[Task, Plan]:
    """A freshly drawn model on its device, and the rules of thumb for it."""
    chosen = plan.make(config, data_bytes=dataset.data_bytes, streamed=dataset.stream is not None)
    with torch.random.fork_rng([chosen.device] if chosen.device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model = build(config.model, dataset.signature).to(chosen.device)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and chosen.home == "device":
        series = series.to(chosen.device)
    return Task(config, model, dataset, series, NOWHERE), chosen


def changed(config: Config, *, engine_anew: bool = False, **sections: Mapping[str, Any]) -> Config:
    """The config with some settings of some sections replaced, and checked again.

    `engine_anew` keeps nothing of `engine` but what is given."""
    settings = config.model_dump(exclude_unset=True)
    if engine_anew:
        settings.pop("engine", None)
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | dict(values)
    return Config.model_validate(settings)


class Trial:
    """A model in training. Steps go on from epoch to epoch, as in a run, without validations."""

    def __init__(self, config: Config, dataset: Dataset, *, first: int = 1) -> None:
        """`first` steps, and those that a capture needs, are taken at once."""
        self.config = config
        task, chosen = prepared(config, dataset)
        self.plan = measure.decide(task, chosen)
        self.done = 0
        with self.plan.flags(), self._seeded():
            self.job = set_up(task, self.plan)
            try:
                self.num_steps = self.job.home.num_steps
                captured = capture.EAGER_FIRST + 1 if self.plan.capture else 1
                self.first_s = self.run(max(first, captured))
                self.first_losses: list[float] = self.job.tape.losses[:first].tolist()
                failed = "; ".join(self.job.failures().values())
                if failed:
                    raise RuntimeError(failed)
            except BaseException:
                self.job.close()
                raise

    @property
    def windows(self) -> int:
        """Of one step"""
        batch = self.config.train.batch
        assert batch != "auto"
        return batch * self.config.train.accumulate

    def _seeded(self) -> Any:
        """Dropout draws from the seed; the caller's generators stay put."""
        return torch.random.fork_rng([self.plan.device] if self.plan.device.type == "cuda" else [])

    def stretch(self, steps: int) -> float:
        """Milliseconds per step over so many of them, a loader's head start used up before."""
        with self.plan.flags():
            if self.plan.home in ("loader", "stream"):
                self.run(1 + self.plan.workers * self.plan.prefetch)
            return 1e3 * self.run(steps) / steps

    def run(self, steps: int) -> float:
        """Seconds for so many steps, the device's work included."""
        job = self.job
        hardware.wait(self.plan.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        job.flush()
        hardware.wait(self.plan.device)
        return time.perf_counter() - began

    def step(self) -> None:
        """The next step, and the epoch's beginning where it is the first."""
        job, place = self.job, self.done % self.num_steps
        if not place:
            epoch = self.done // self.num_steps
            job.flush()
            job.home.begin(epoch)
            job.tape.begin(optim.rates(self.config.train, epoch, self.num_steps))
        job.advance()
        if self.config.engine.sync:
            float(job.tape.losses[place])
        self.done += 1

    def close(self) -> None:
        self.job.close()
