"""Retrains the best settings of a search from other seeds, and tests the chosen ones.

A search selects the luckiest of many trials, so its best score is too good. `retrain_best` trains
the best few trials again from seeds that the search did not use, beside the config without a
search, and ranks them by mean validation loss. Only then does `run_tests` evaluate the test set,
once: for the chosen settings and for the config without a search.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial

from slipstream import config as configs
from slipstream import runs, training
from slipstream.config import Config
from slipstream.errors import DivergedError
from slipstream.runs import Run
from slipstream.tuning import space as spaces
from slipstream.tuning.budget import SearchBudget
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.packing.trial import NOT_STARTED, TrialRun, TrialSource
from slipstream.tuning.storage.journal import OUT_OF_TIME

DEFAULT = -1
"""Stands for a trial number: the config without a search"""
MIN_TEST_S = 1.0
"""A test run has at least this time, however late it is"""
SEED_OFFSET = 1000
"""From the seed of the config to the first seed of the retraining"""


class RetrainedConfig(NamedTuple):
    """The settings of one trial, or the default, and their validation losses over the seeds."""

    trial: int
    config: Config
    losses: list[float]
    stopped: Sequence[str] = ()
    """Why each of these trainings ended"""

    @property
    def mean_loss(self) -> float:
        return statistics.fmean(self.losses or [math.inf])

    @property
    def finite_losses(self) -> list[float]:
        return [loss for loss in self.losses if math.isfinite(loss)]

    @property
    def num_failed(self) -> int:
        return len(self.losses) - len(self.finite_losses)

    @property
    def is_cut_off(self) -> bool:
        """Whether `tune.minutes` ended one of the trainings, or came before all of them"""
        return not self.losses or any(OUT_OF_TIME in reason for reason in self.stopped)

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Lower is better: the number of failed seeds, then complete trainings before those that
        were cut off, then the mean loss of the finite ones."""
        mean = statistics.fmean(self.finite_losses or [math.inf])
        return self.num_failed, self.is_cut_off, mean


def get_first_seed(config: Config) -> int:
    """Return the first retraining seed; beyond the largest seed of a config it starts from 0."""
    return (config.seed + SEED_OFFSET) % (2**63 - config.tune.retrain_seeds)


class Retraining(TrialSource):
    """A source with one trial for each config and seed; resumes from the run's events."""

    def __init__(
        self,
        run: Run,
        config: Config,
        entries: Sequence[tuple[int, Config]],
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.run, self.is_late = run, is_late
        self.results = {trial: RetrainedConfig(trial, entry, []) for trial, entry in entries}
        first = get_first_seed(config)
        self.runs = [
            (trial, seed, entry.model_copy(update={"seed": seed}))
            for trial, entry in entries
            for seed in range(first, first + config.tune.retrain_seeds)
        ]
        known = {
            (event["trial"], event["seed"]): event
            for event in runs.read_events(run)
            if event["event"] == "retrained" and {"trial", "seed", "loss"} <= event.keys()
        }
        self.finished = set(known)
        """Trial and seed of each known result"""
        self.pending = [i for i, run in enumerate(self.runs) if run[:2] not in known]
        for trial, seed, _ in self.runs:
            if (trial, seed) in known:
                self._add(trial, known[trial, seed]["loss"], known[trial, seed])

    def ask(self) -> TrialRun | None:
        return self.reopen(self.pending[0]) if self.pending and not self.is_late() else None

    def is_over(self) -> bool:
        return self.is_late()

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        return OUT_OF_TIME if self.is_late() else ""

    def reopen(self, number: int) -> TrialRun:
        self.pending = [other for other in self.pending if other != number]
        trial, seed, config = self.runs[number]
        return TrialRun(number, config, is_final=(trial, seed) in self.finished)

    def finish(self, trial: TrialRun) -> None:
        self._record(trial, trial.score, trial.summarize())

    def fail(self, trial: TrialRun, reason: str) -> None:
        if reason == NOT_STARTED:
            return
        self._record(trial, math.inf, {"stopped": reason})

    def _add(self, trial: int, loss: float | None, details: Mapping[str, Any]) -> None:
        was = self.results[trial]
        loss = math.inf if loss is None else loss
        stopped = [*was.stopped, details.get("stopped", "")]
        self.results[trial] = was._replace(losses=[*was.losses, loss], stopped=stopped)

    def _record(self, run: TrialRun, loss: float, details: Mapping[str, Any]) -> None:
        trial, seed, _ = self.runs[run.number]
        self._add(trial, loss, details)
        self.finished.add((trial, seed))
        self.run.append("retrained", trial=trial, seed=seed, loss=loss, **details)


def retrain_best(
    run: Run,
    config: Config,
    best: Sequence[FrozenTrial],
    space: Mapping[str, Any],
    datasets: DatasetCache,
    is_late: Callable[[], bool] = lambda: False,
) -> list[RetrainedConfig]:
    """Retrain the best trials and the default; return the chosen one first, the default last.

    What trains when `is_late` says so is cut off at its next validation.
    """
    default = configs.replace_settings(config, {"train.metric": config.tune.metric})
    entries = [(trial.number, spaces.apply_params(config, space, trial.params)) for trial in best]
    retraining = Retraining(run, config, [*entries, (DEFAULT, default)], is_late)
    if config.tune.folds is not None:
        # not validated: the pruner may require folds
        tune = config.tune.model_copy(update={"folds": None})
        datasets = DatasetCache(config.model_copy(update={"tune": tune}), datasets.table)
    PackScheduler(run, datasets, retraining, parallel=max(len(retraining.runs), 1)).train()
    results = retraining.results
    ranked = sorted((results[trial] for trial, _ in entries), key=lambda result: result.rank)
    return [*ranked, results[DEFAULT]]


def run_tests(
    run: Run,
    config: Config,
    retrained: Sequence[RetrainedConfig],
    table: Any,
    budget: SearchBudget | None = None,
) -> dict[str, dict[str, Any]]:
    """Train and test the chosen settings and the default as ordinary runs over several seeds.

    Returns their summaries; `failed` gives the reason where there is no model. Where there is a
    budget, each run has its share of what is left.
    """
    summaries = {}
    chosen, default = retrained[0], retrained[-1]
    runs_left = 2
    for name, base, result in (("best", chosen.config, chosen), ("default", config, default)):
        settings: dict[str, Any] = {
            "name": f"{config.name}-{name}",
            "seed": get_first_seed(config),
            "train.repeats": config.tune.retrain_seeds,
            "train.metric": config.tune.metric,
        }
        if budget is not None:
            settings["train.minutes"] = max(budget.left_s / runs_left, MIN_TEST_S) / 60
        runs_left -= 1
        repeated = configs.replace_settings(base, settings)
        folder = run.folder / "retrained" / name
        try:
            if result.num_failed == len(result.losses) > 0:  # the retraining used the same seeds
                seeds = f"any of {len(result.losses)} seeds"
                raise DivergedError(f"no validation loss was finite, from {seeds}")
            summaries[name] = training.train_or_resume(folder, repeated, table, run.watch)
        except DivergedError as error:
            summaries[name] = {"run": str(folder), "failed": str(error)}
    return summaries
