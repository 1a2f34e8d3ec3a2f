"""One way to run a job, set up to be timed: for the bench, the profile and their likes."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from slipstream import hardware
from slipstream.config import Config
from slipstream.config.seeds import fold_seed
from slipstream.data.dataset import Dataset
from slipstream.engine import capture, copies, measure, optim, plan
from slipstream.engine.job import Task, set_up, weighed
from slipstream.engine.plan import Plan
from slipstream.models import build
from slipstream.runs import Run

NOWHERE = Run(Path(os.devnull))
"""A trial tells nobody"""


def prepared(config: Config, dataset: Dataset) -> tuple[Task, Plan]:
    """A freshly drawn model on its device, and the rules of thumb for it."""
    config = weighed(config, dataset)
    chosen = plan.make(config, data_bytes=dataset.data_bytes, streamed=dataset.stream is not None)
    with torch.random.fork_rng([chosen.device] if chosen.device.type == "cuda" else []):
        torch.manual_seed(fold_seed(config.seed))
        model = build(config.model, dataset.signature).to(chosen.device)
    series = None if dataset.memory is None else dataset.memory.series
    if series is not None and chosen.home == "device":
        series = series.to(chosen.device)
    found = copies.find(config, dataset, NOWHERE)
    return Task(config, model, dataset, series, NOWHERE, copies=found), chosen


def changed(config: Config, *, engine_anew: bool = False, **sections: Mapping[str, Any]) -> Config:
    """The config with some settings of some sections replaced, and checked again.

    `engine_anew` keeps nothing of `engine` but what is given."""
    settings = config.model_dump(exclude_unset=True)
    if engine_anew:
        settings.pop("engine", None)
    for name, values in sections.items():
        settings[name] = settings.get(name, {}) | dict(values)
    return Config.model_validate(settings)


class Timed(ABC):
    """Something that takes training steps, to be timed."""

    device: torch.device
    head_start = 0
    """Steps whose batches a loader has ready when it was left alone for a while"""

    @abstractmethod
    def settings(self) -> AbstractContextManager[None]:
        """Torch's flags as its steps want them."""

    @abstractmethod
    def step(self) -> None: ...

    def finish(self) -> None:  # noqa: B027 (most put off nothing)
        """Do what steps have put off."""

    def run(self, steps: int) -> float:
        """Seconds for so many steps, the device's work included."""
        hardware.wait(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        hardware.wait(self.device)
        return time.perf_counter() - began

    def stretch(self, steps: int, *, warm_s: float = 0.0) -> float:
        """Milliseconds per step over so many of them, a loader's head start used up before.

        `warm_s` of steps come before those that count: a device's clock falls while it rests.
        """
        with self.settings():
            if self.head_start:
                self.run(1 + self.head_start)
            warm = time.perf_counter() + warm_s
            while time.perf_counter() < warm:
                self.run(1)
            return 1e3 * self.run(steps) / steps


class Trial(Timed):
    """A model in training. Steps go on from epoch to epoch, as in a run, without validations."""

    def __init__(self, config: Config, dataset: Dataset, *, first: int = 1) -> None:
        """`first` steps, and those that a capture needs, are taken at once."""
        self.config = config
        task, chosen = prepared(config, dataset)
        self.plan = measure.decide(task, chosen)
        self.device = self.plan.device
        if self.plan.home in ("loader", "stream"):
            self.head_start = self.plan.workers * self.plan.prefetch
        self.done = 0
        with self.settings():
            self.job = set_up(task, self.plan)
            try:
                self.num_steps = self.job.home.num_steps
                captured = capture.EAGER_FIRST + 1 if self.plan.capture else 1
                self.run(max(first, captured))
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

    def settings(self) -> AbstractContextManager[None]:
        return self.plan.flags()

    def step(self) -> None:
        """The next step, and the epoch's beginning where it is the first."""
        job, place = self.job, self.done % self.num_steps
        if not place:
            epoch = self.done // self.num_steps
            job.flush()
            job.home.begin(epoch)
            rates = optim.rates(self.config.train, epoch, self.num_steps)
            job.tape.begin(rates, first=self.done)
        job.advance()
        if self.config.engine.sync:
            float(job.tape.losses[place])
        self.done += 1

    def finish(self) -> None:
        self.job.flush()

    def close(self) -> None:
        self.job.close()
