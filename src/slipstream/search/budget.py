"""How long a search may take: `tune.minutes` covers the whole command, reports included.

What the retraining and the tests will take follows from the trials: the time of one epoch of one
model, in a program with others. What else the end takes follows from the start of the command,
which shows how fast the machine is at the moment.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from slipstream.config import Config, Tune

OVERHEAD_SHARE, MAX_OVERHEAD_S = 0.1, 15.0
"""Of the whole time, and at most unless the start was slow: for baselines, files and reports"""
SETUP_FACTOR = 4.0
"""How much longer than start-up and loading these may take on a slow machine"""
RETRAINING_SHARE = 0.5
"""Of the whole time without the overhead, for retraining and tests at most"""
MIN_SEEDS = 2
"""A single seed does not show how much of a difference is chance"""
MARGIN = 1.2
"""How much longer a model may take than expected"""


class ModelCosts(NamedTuple):
    """What one model takes, beside others in its program."""

    train_s: float
    """To train it to its end"""
    score_s: float = 0.0
    """To predict every window with it: less than an epoch, whose windows also have a backward
    pass"""


class RetrainingPlan(NamedTuple):
    """How many of the best trials are retrained, from how many seeds; none if there is no time."""

    num_trials: int
    num_seeds: int

    def compute_seconds(self, costs: ModelCosts, *, with_tests: bool = False) -> float:
        """Return the seconds of retraining the trials and the default, and of their tests."""
        retraining_s = MARGIN * costs.train_s * (self.num_trials + 1) * self.num_seeds
        return retraining_s + self.compute_test_s(costs, with_tests=with_tests)

    def compute_test_s(self, costs: ModelCosts, *, with_tests: bool = False) -> float:
        """Return the seconds of two test runs; `with_tests` if they train models of their own, for
        further folds."""
        trained_s = costs.train_s if with_tests else 0.0
        return MARGIN * (trained_s + costs.score_s) * 2 * self.num_seeds


NO_RETRAINING = RetrainingPlan(0, 0)


def list_retraining_plans(tune: Tune) -> Iterator[RetrainingPlan]:
    """Yield what is retrained if there is time, then less and less: fewer trials, then seeds."""
    for num_seeds in range(tune.retrain_seeds, MIN_SEEDS - 1, -1):
        for num_trials in range(tune.retrain, 0, -1):
            yield RetrainingPlan(num_trials, num_seeds)


def plan_retraining(
    tune: Tune, costs: ModelCosts, limit_s: float, *, with_tests: bool = False
) -> RetrainingPlan:
    """Return the most that can be retrained and tested within the limit."""
    for plan in list_retraining_plans(tune):
        if plan.compute_seconds(costs, with_tests=with_tests) <= max(limit_s, 0.0):
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

    def estimate_model(self) -> ModelCosts | None:
        """Return what one model takes; None before the first epoch."""
        if not self.num_epochs:
            return None
        mean = sum(self.complete) / len(self.complete) if self.complete else self.max_epochs
        epoch_s = (self.clock() - self.started_at) / self.num_epochs
        return ModelCosts(epoch_s * mean, epoch_s)


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
    setup_s: float = 0.0
    """What start-up and loading took"""

    @classmethod
    def of(
        cls, config: Config, spent_s: float, started_at: float, *, setup_s: float | None = None
    ) -> Self:
        """Return the budget of a search that is about to begin; `setup_s`: by default, all that has
        passed since `started_at`."""
        walks = config.data.split.walk_forward is not None
        if setup_s is None:
            setup_s = time.perf_counter() - started_at
        return cls(
            config.tune,
            config.train.max_epochs,
            spent_s,
            started_at,
            with_tests=walks,
            setup_s=setup_s,
        )

    @property
    def total_s(self) -> float:
        return math.inf if self.tune.minutes is None else 60 * self.tune.minutes

    @property
    def elapsed_s(self) -> float:
        return self.spent_s + self.clock() - self.started_at

    @property
    def overhead_s(self) -> float:
        most_s = max(MAX_OVERHEAD_S, SETUP_FACTOR * self.setup_s)
        return min(OVERHEAD_SHARE * self.total_s, most_s)

    @property
    def left_s(self) -> float:
        """What is left for training and tests"""
        return self.total_s - self.overhead_s - self.elapsed_s

    @property
    def _most_s(self) -> float:
        """What retraining and tests take at most"""
        return RETRAINING_SHARE * (self.total_s - self.overhead_s)

    def compute_reserve_s(self, costs: ModelCosts | None) -> float:
        """Return the seconds that the trials leave to retraining and tests."""
        most_s = self._most_s
        if not self.tune.retrain or math.isinf(most_s):
            return 0.0
        if costs is None:
            return most_s
        plan = plan_retraining(self.tune, costs, most_s, with_tests=self.with_tests)
        if plan == NO_RETRAINING:
            return self.compute_least_s(costs)
        return plan.compute_seconds(costs, with_tests=self.with_tests)

    def compute_least_s(self, costs: ModelCosts | None) -> float:
        """Return the seconds of what the end has at least: a test of the best trial's model."""
        return min(MARGIN * costs.score_s, self._most_s) if costs and self.tune.retrain else 0.0

    def is_over(self, costs: ModelCosts | None, ahead_s: float = 0.0) -> bool:
        """Whether the trials' time ends within the next `ahead_s` seconds."""
        return self.left_s - self.compute_reserve_s(costs) <= ahead_s

    def is_past(self, costs: ModelCosts | None, validate_s: float = 0.0) -> bool:
        """Whether what still trains has to stop at once, within an epoch too; `validate_s` is what
        its validation takes."""
        return self.left_s - validate_s <= self.compute_least_s(costs)

    def plan_retraining(self, costs: ModelCosts | None) -> RetrainingPlan:
        """Return what can be retrained and tested in the time that is left."""
        if math.isinf(self.total_s):
            return next(list_retraining_plans(self.tune), NO_RETRAINING)
        if costs is None:  # not even one epoch was complete
            return NO_RETRAINING
        plan = plan_retraining(self.tune, costs, self.left_s, with_tests=self.with_tests)
        if plan == NO_RETRAINING:  # what the trials left to it may have become a little too short
            limit_s = MARGIN**2 * self.left_s
            least = self.tune.model_copy(update={"retrain": min(self.tune.retrain, 1)})
            least = least.model_copy(update={"retrain_seeds": MIN_SEEDS})
            plan = plan_retraining(least, costs, limit_s, with_tests=self.with_tests)
        return plan

    def is_late(self, plan: RetrainingPlan, costs: ModelCosts, ahead_s: float = 0.0) -> bool:
        """Whether what is retrained has to end, so that the tests have their time; `ahead_s` is
        what it takes to end it."""
        return self.left_s - ahead_s <= plan.compute_test_s(costs, with_tests=self.with_tests)
