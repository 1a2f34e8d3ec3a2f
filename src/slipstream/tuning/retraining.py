"""Retrains the best settings of a search from other seeds, and tests the chosen ones.

A search selects the luckiest of many trials, so its best score is too good. `retrain_best` trains
the best few trials again from seeds that the search did not use, beside the config without a
search, and ranks them by mean validation loss. Only then does `run_tests` evaluate the test set,
once: for the chosen settings and for the config without a search, with the models of the
retraining.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial

from slipstream import config as configs
from slipstream import runs
from slipstream.config import Config
from slipstream.errors import DivergedError
from slipstream.runs import Run
from slipstream.scoring.summary import BaselineSums
from slipstream.training import start, trained_lanes
from slipstream.training.trained_lanes import LoadedData, TrainedLane
from slipstream.tuning import space as spaces
from slipstream.tuning.budget import SearchBudget
from slipstream.tuning.packing.dataset_cache import DatasetCache
from slipstream.tuning.packing.scheduler import PackScheduler
from slipstream.tuning.packing.trial import NOT_STARTED, TrialRun, TrialSource
from slipstream.tuning.storage.journal import OUT_OF_TIME

DEFAULT = -1
"""Stands for a trial number: the config without a search"""
MIN_TEST_S = 1.0
"""Models that have yet to be trained have at least this time, however late it is"""
LANES = "retraining"
"""The folder of the retrained lanes, until the test runs are made from them"""
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


def get_lane_folder(run: Run, trial: int, seed: int) -> Path:
    """Return where a retrained lane is saved."""
    return run.folder / LANES / f"{'default' if trial == DEFAULT else trial}-{seed}"


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
        is_final = (trial, seed) in self.finished
        return TrialRun(number, config, is_final=is_final, keeps_lane=not is_final)

    def finish(self, trial: TrialRun) -> None:
        if trial.trained is not None:  # saved before it counts: a kill cannot separate the two
            folder = get_lane_folder(self.run, *self.runs[trial.number][:2])
            trained_lanes.save_lane(folder, trial.trained)
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
    PackScheduler(run, datasets, retraining, parallel=max(len(retraining.runs), 1)).train()
    results = retraining.results
    ranked = sorted((results[trial] for trial, _ in entries), key=lambda result: result.rank)
    return [*ranked, results[DEFAULT]]


def run_tests(
    run: Run,
    config: Config,
    retrained: Sequence[RetrainedConfig],
    datasets: DatasetCache,
    budget: SearchBudget | None = None,
) -> dict[str, dict[str, Any]]:
    """Test the chosen settings and the default: ordinary runs, of the lanes that were retrained.

    Returns their summaries; `failed` gives the reason where there is no model. Where there is a
    budget, models that have yet to be trained have their share of what is left.
    """
    summaries: dict[str, dict[str, Any]] = {}
    chosen, default = retrained[0], retrained[-1]
    baselines: dict[str, list[BaselineSums]] = {}
    for name, base, result in (("best", chosen.config, chosen), ("default", config, default)):
        settings: dict[str, Any] = {
            "name": f"{config.name}-{name}",
            "seed": get_first_seed(config),
            "train.repeats": config.tune.retrain_seeds,
            "train.metric": config.tune.metric,
        }
        repeated = configs.replace_settings(base, settings)
        limit_s = None if budget is None else budget.left_s / (2 - len(summaries))
        test = FinalRun(run.folder / "retrained" / name, repeated, result.trial, limit_s)
        try:
            if result.num_failed == len(result.losses) > 0:  # every seed was retrained
                seeds = f"any of {len(result.losses)} seeds"
                raise DivergedError(f"no validation loss was finite, from {seeds}")
            data = datasets.get(repeated)
            shared = baselines.setdefault(data.fingerprint + str(data.dataset.signature), [])
            summaries[name] = test.finish(run, datasets, shared)
        except DivergedError as error:
            summaries[name] = {"run": str(test.folder), "failed": str(error)}
    runs.remove(run.folder / LANES)
    return summaries


@dataclass(frozen=True)
class FinalRun:
    """A run that tests retrained settings."""

    folder: Path
    config: Config
    trial: int
    limit_s: float | None
    """For models that have yet to be trained"""

    def finish(
        self, run: Run, datasets: DatasetCache, baselines: list[BaselineSums]
    ) -> dict[str, Any]:
        """Return the summary; score and write what is missing.

        Models that were not retrained are trained: further folds of a walk-forward split, or what
        the time was too short for.
        """
        if start.is_run_of(self.folder, self.config):
            return start.train_or_resume(self.folder, self.config, datasets.table, run.watch)
        first, num_seeds = self.config.seed, self.config.train.repeats
        saved = {
            seed - first: trained_lanes.load_lane(get_lane_folder(run, self.trial, seed))
            for seed in range(first, first + num_seeds)
        }
        trained = {number: lane for number, lane in saved.items() if lane is not None}
        data = datasets.get(self.config)
        config = self.config
        if len(trained) < num_seeds * max(len(data.dataset.folds), 1):
            config = self._limit_time(trained)
        if not trained:
            return start.train_or_resume(self.folder, config, datasets.table, run.watch)
        runs.remove(self.folder)
        loaded = LoadedData(data.dataset, data.fingerprint, data.encoder)
        return start.finish_trained(
            self.folder,
            config,
            loaded,
            trained,
            why="trained in the search",
            watch=run.watch,
            baselines=baselines,
        )

    def _limit_time(self, trained: Mapping[int, TrainedLane]) -> Config:
        """Return the config with the time that is left, in addition to what the lanes took."""
        if self.limit_s is None:
            return self.config
        before_s = max((sum(one.lane.seconds) for one in trained.values()), default=0.0)
        minutes = (before_s + max(self.limit_s, MIN_TEST_S)) / 60
        return configs.replace_settings(self.config, {"train.minutes": minutes})
