"""How long a search may take: `tune.minutes` covers the trials, the retraining, the tests and the
reports.

What the retraining will take follows from the trials: the time of one epoch of one model, in a
program with others.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from slipstream.config import Config, Tune

OVERHEAD_SHARE, MAX_OVERHEAD_S = 0.1, 15.0
"""Of the whole time, and at most: for loading, scoring and reports"""
RETRAINING_SHARE = 0.5
"""Of the whole time without the overhead, for retraining and tests at most"""
MIN_SEEDS = 2
"""A single seed does not show how much of a difference is chance"""
MARGIN = 1.2
"""How much longer a model may take than expected"""


class RetrainingPlan(NamedTuple):
    """How many of the best trials are retrained, from how many seeds; none if there is no time."""

    num_trials: int
    num_seeds: int

    def compute_seconds(self, model_s: float, *, with_tests: bool = False) -> float:
        """Return the seconds for the trials and the default, where a model takes `model_s`."""
        test_s = self.compute_test_s(model_s) if with_tests else 0.0
        return MARGIN * model_s * (self.num_trials + 1) * self.num_seeds + test_s

    def compute_test_s(self, model_s: float) -> float:
        """Return the seconds of test runs that train models of their own, for further folds."""
        return MARGIN * model_s * 2 * self.num_seeds


NO_RETRAINING = RetrainingPlan(0, 0)


def list_retraining_plans(tune: Tune) -> Iterator[RetrainingPlan]:
    """Yield what is retrained if there is time, then less and less: fewer trials, then seeds."""
    for num_seeds in range(tune.retrain_seeds, MIN_SEEDS - 1, -1):
        for num_trials in range(tune.retrain, 0, -1):
            yield RetrainingPlan(num_trials, num_seeds)


def plan_retraining(
    tune: Tune, model_s: float, limit_s: float, *, with_tests: bool = False
) -> RetrainingPlan:
    """Return the most that can be retrained, and tested, within the limit."""
    for plan in list_retraining_plans(tune):
        if plan.compute_seconds(model_s, with_tests=with_tests) <= max(limit_s, 0.0):
            return plan
    return NO_RETRAINING


@dataclass
class TrainingCosts:
    """What models cost, from the trials so far."""

    max_epochs: int
    clock: Callable[[], float] = time.perf_counter
    num_epochs: int = 0
    """Epochs of single models"""
    complete: list[float] = field(default_factory=list)
    """Epochs of the trials that trained to their end"""
    epoch_s: float = 0.0
    """The longest that a trial took from one report to the next, with those beside it"""
    started_at: float = field(init=False)
    _reported_at: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def record_epoch(self, trial: int, num_folds: int) -> None:
        """Record that every fold of a trial has trained an epoch."""
        now = self.clock()
        self.num_epochs += num_folds
        if trial in self._reported_at:
            self.epoch_s = max(self.epoch_s, now - self._reported_at[trial])
        self._reported_at[trial] = now

    def record_end(self, trial: int, epochs: float, *, is_complete: bool) -> None:
        self._reported_at.pop(trial, None)
        if is_complete:
            self.complete.append(epochs)

    def estimate_model_s(self) -> float | None:
        """Return the seconds of training one model to its end; None before the first epoch."""
        if not self.num_epochs:
            return None
        mean = sum(self.complete) / len(self.complete) if self.complete else self.max_epochs
        return (self.clock() - self.started_at) / self.num_epochs * mean


@dataclass(frozen=True)
class SearchBudget:
    """The time of a search, from the start of its command."""

    tune: Tune
    max_epochs: int
    spent_s: float = 0.0
    """By earlier parts of the search"""
    started_at: float = field(default_factory=time.perf_counter)
    clock: Callable[[], float] = time.perf_counter
    with_tests: bool = False
    """Whether the test runs train further folds of a walk-forward split"""

    @classmethod
    def of(cls, config: Config, spent_s: float, started_at: float) -> Self:
        walks = config.data.split.walk_forward is not None
        return cls(config.tune, config.train.max_epochs, spent_s, started_at, with_tests=walks)

    @property
    def total_s(self) -> float:
        return math.inf if self.tune.minutes is None else 60 * self.tune.minutes

    @property
    def elapsed_s(self) -> float:
        return self.spent_s + self.clock() - self.started_at

    @property
    def overhead_s(self) -> float:
        return min(OVERHEAD_SHARE * self.total_s, MAX_OVERHEAD_S)

    @property
    def left_s(self) -> float:
        """What is left for training"""
        return self.total_s - self.overhead_s - self.elapsed_s

    def compute_reserve_s(self, model_s: float | None) -> float:
        """Return the seconds that the trials leave to retraining and tests."""
        most_s = RETRAINING_SHARE * (self.total_s - self.overhead_s)
        if not self.tune.retrain or math.isinf(most_s):
            return 0.0
        if model_s is None:
            return most_s
        plan = plan_retraining(self.tune, model_s, most_s, with_tests=self.with_tests)
        return plan.compute_seconds(model_s, with_tests=self.with_tests)

    def is_over(self, model_s: float | None, ahead_s: float = 0.0) -> bool:
        """Whether the trials' time ends within the next `ahead_s` seconds."""
        return self.left_s - self.compute_reserve_s(model_s) <= ahead_s

    def plan_retraining(self, model_s: float | None) -> RetrainingPlan:
        """Return what can be retrained and tested in the time that is left."""
        if math.isinf(self.total_s):
            return next(list_retraining_plans(self.tune), NO_RETRAINING)
        return plan_retraining(self.tune, model_s or 0.0, self.left_s, with_tests=self.with_tests)

    def is_late(self, plan: RetrainingPlan, model_s: float) -> bool:
        """Whether what is retrained has to end, so that the tests have their time."""
        return self.left_s <= (plan.compute_test_s(model_s) if self.with_tests else 0.0)
