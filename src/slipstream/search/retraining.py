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

from optuna.trial import FrozenTrial, TrialState

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import DivergedError
from slipstream.config import Config
from slipstream.config import search_space as spaces
from slipstream.engine.lanes import LaneResult
from slipstream.engine.planning import LANES_PER_STEP
from slipstream.events import Retrained
from slipstream.runs import Run
from slipstream.runs.summary import RunSummary
from slipstream.scoring.summary import BaselineSums
from slipstream.search.budget import SearchBudget
from slipstream.search.packs import (
    NOT_STARTED,
    DatasetCache,
    PackCosts,
    PackScheduler,
    TrialData,
    TrialRun,
    TrialSource,
)
from slipstream.search.storage import OUT_OF_TIME, TIME_REASONS
from slipstream.search.study import TimedStudy, rank_trials
from slipstream.search.trials import LANE, OptunaSearch
from slipstream.training import run as training_runs
from slipstream.training import trained_lanes
from slipstream.training.trained_lanes import LoadedData, TrainedLane

DEFAULT = -1
"""Stands for a trial number: the config without a search"""
MIN_TEST_S = 1.0
"""Models that have yet to be trained have at least this time, however late it is"""
LANES = "retraining"
"""The folder of the retrained lanes, until the test runs are made from them"""
NOT_CHOSEN = "other trials became better"
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
        """Whether the minutes ended one of the trainings, or came before all of them"""
        return not self.losses or any(
            limit in reason for reason in self.stopped for limit in TIME_REASONS
        )

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Lower is better: the number of failed seeds, then complete trainings before those that
        were cut off, then the mean loss of the finite ones."""
        mean = statistics.fmean(self.finite_losses or [math.inf])
        return self.num_failed, self.is_cut_off, mean


def choose_settings(retrained: Sequence[RetrainedConfig]) -> RetrainedConfig:
    """Return the best of what `Retraining.rank` returns: a trial, or the default where none is
    better."""
    best, default = retrained[0], retrained[-1]
    return default if default.finite_losses and default.rank <= best.rank else best


def get_first_seed(config: Config) -> int:
    """Return the first retraining seed; beyond the largest seed of a config it starts from 0."""
    return (config.seed + SEED_OFFSET) % (2**63 - config.tune.retrain_seeds)


def get_lane_folder(run: Run, trial: int, seed: int) -> Path:
    """Return where a retrained lane is saved."""
    return run.folder / LANES / f"{'default' if trial == DEFAULT else trial}-{seed}"


class Retraining(TrialSource):
    """A source with one trial for each config and seed, the default's first.

    It takes known results from the run's events. Its trials have negative numbers, since they may
    train beside those of the search.
    """

    late_reason = OUT_OF_TIME

    def __init__(self, run: Run, config: Config, study: TimedStudy | None = None) -> None:
        self.run, self.config, self.study = run, config, study
        self.is_late: Callable[[float], bool] = lambda _: False
        """Whether the time is over in so many seconds: cuts off what trains"""
        first = get_first_seed(config)
        self.seeds = range(first, first + config.tune.retrain_seeds)
        self.known = {
            (event.trial, event.seed): event
            for event in runs.read_events(run)
            if isinstance(event, Retrained)
        }
        self.results: dict[int, RetrainedConfig] = {}
        self.pending: list[int] = []
        """Numbers of the trials that have yet to start"""
        self.running: dict[int, TrialRun] = {}
        default = configs.replace_settings(config, {"train.metric": config.tune.metric})
        self._add(DEFAULT, default)

    def _add(self, trial: int, config: Config) -> None:
        self.results[trial] = RetrainedConfig(trial, config, [])
        for position, seed in enumerate(self.seeds):
            number = -1 - len(self.seeds) * (trial + 1) - position
            if event := self.known.get((trial, seed)):
                self._add_result(event)
            elif number not in self.running:
                self.pending.append(number)

    def _parse(self, number: int) -> tuple[int, int]:
        """Return the trial of the search, and the seed."""
        trial, position = divmod(-1 - number, len(self.seeds))
        return trial - 1, self.seeds[position]

    def set_candidates(self, trials: Sequence[FrozenTrial]) -> None:
        """Retrain these trials beside the default, and no others."""
        chosen = {trial.number for trial in trials}
        for trial in self.results.keys() - chosen - {DEFAULT}:
            del self.results[trial]
        self.pending = [name for name in self.pending if self._parse(name)[0] in self.results]
        for number, run in self.running.items():
            if self._parse(number)[0] not in self.results:
                run.stop_reason = NOT_CHOSEN
        for candidate in trials:
            if candidate.number not in self.results:
                self._add(candidate.number, self._make_config(candidate))

    def _make_config(self, trial: FrozenTrial) -> Config:
        assert self.study is not None
        return spaces.apply_params(self.config, self.study.space, trial.params)

    def rank(self) -> list[RetrainedConfig]:
        """Return the results: the trials, the best first, and the default last."""
        trials = [result for trial, result in self.results.items() if trial != DEFAULT]
        return [*sorted(trials, key=lambda result: result.rank), self.results[DEFAULT]]

    def ask(self) -> TrialRun | None:
        return self._start(self.pending[0]) if self.pending and not self.is_over() else None

    def fill_place(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        for number in self.pending if not self.is_over() else ():
            if fits(self._make_run(number)):
                return self._start(number)
        return None

    def _make_run(self, number: int) -> TrialRun:
        trial, seed = self._parse(number)
        if trial not in self.results:  # it was a candidate before a kill
            config = self._make_config(self._get_trial(trial))
        else:
            config = self.results[trial].config
        is_final = (trial, seed) in self.known
        config = config.model_copy(update={"seed": seed})
        return TrialRun(number, config, is_final=is_final, keeps_lane=True)

    def _start(self, number: int) -> TrialRun:
        self.pending = [pending for pending in self.pending if pending != number]
        self.running[number] = self._make_run(number)
        return self.running[number]

    def is_over(self) -> bool:
        return self.is_late(0.0)

    def find_cut(self, costs: PackCosts | None = None) -> str:
        validate_s = 0.0 if costs is None else costs.validate_s
        return self.late_reason if self.is_late(validate_s) else ""

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        return self.find_cut()

    def reopen(self, number: int) -> TrialRun:
        """Return a trial again; one of the search has ended, even if its pack was killed before."""
        if number < 0:
            return self._start(number)
        config = self._make_config(self._get_trial(number))
        return TrialRun(number, config, self.config.tune.folds or 1, is_final=True)

    def _get_trial(self, number: int) -> FrozenTrial:
        assert self.study is not None
        return self.study.get_trials()[number]

    def finish(self, trial: TrialRun) -> None:
        del self.running[trial.number]
        if trial.stop_reason == NOT_CHOSEN:
            if self._parse(trial.number)[0] in self.results:  # it was chosen again
                self.pending.append(trial.number)
            return
        if trial.trained is not None:  # saved before it counts: a kill cannot separate the two
            folder = get_lane_folder(self.run, *self._parse(trial.number))
            trained_lanes.save_lane(folder, trial.trained)
        self._record(trial, trial.score, trial.summarize())

    def fail(self, trial: TrialRun, reason: str) -> None:
        self.running.pop(trial.number, None)
        if reason != NOT_STARTED and trial.number < 0:
            self._record(trial, math.inf, {"stopped": reason})

    def _add_result(self, event: Retrained) -> None:
        if event.trial not in self.results:
            return
        was = self.results[event.trial]
        loss = math.inf if event.loss is None else event.loss  # JSON has no infinity
        stopped = [*was.stopped, event.stopped or ""]
        self.results[event.trial] = was._replace(losses=[*was.losses, loss], stopped=stopped)

    def _record(self, run: TrialRun, loss: float, details: Mapping[str, Any]) -> None:
        trial, seed = self._parse(run.number)
        event = Retrained(trial=trial, seed=seed, loss=loss, **details)
        self.known[trial, seed] = event
        self._add_result(event)
        self.run.append(event)


class FilledSearch(TrialSource):
    """A search whose empty places train what is retrained after it: the default, and the best
    trials so far once few trials are left. Those that others overtake are dropped."""

    def __init__(self, search: OptunaSearch, retraining: Retraining, *, few: int) -> None:
        self.search, self.retraining, self.few = search, retraining, few
        self._num_left = math.inf
        """Trials in training when the candidates were last chosen"""

    def _choose(self, number: int) -> TrialSource:
        return self.search if number >= 0 else self.retraining

    def ask(self) -> TrialRun | None:
        return self.search.ask()

    def is_over(self) -> bool:
        return self.search.is_over()

    def find_cut(self, costs: PackCosts | None = None) -> str:
        return self.search.find_cut(costs)

    def is_worth_validating(self, train_s: float, validate_s: float) -> bool:
        return self.search.is_worth_validating(train_s, validate_s)

    def list_extremes(self, config: Config) -> Sequence[Config]:
        return self.search.list_extremes(config)

    def reopen(self, number: int) -> TrialRun:
        return self._choose(number).reopen(number)

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        return self._choose(trial.number).report(trial, epoch, loss)

    def finish_fold(self, trial: TrialRun, fold: int, ended: LaneResult, data: TrialData) -> None:
        self._choose(trial.number).finish_fold(trial, fold, ended, data)

    def finish(self, trial: TrialRun) -> None:
        self._choose(trial.number).finish(trial)

    def fail(self, trial: TrialRun, reason: str) -> None:
        self._choose(trial.number).fail(trial, reason)

    def record_setup(self, seconds: float) -> None:
        self.search.record_setup(seconds)

    def fill_place(self, fits: Callable[[TrialRun], bool]) -> TrialRun | None:
        search, num_left = self.search, len(self.search.running)
        if num_left < min(self.few, self._num_left):
            self._num_left = num_left
            ranked = rank_trials(search.study.get_trials(TrialState.COMPLETE))
            self.retraining.set_candidates(ranked[: search.config.tune.retrain])
        return self.retraining.fill_place(fits)


def fill_places(search: OptunaSearch, device: str) -> TrialSource:
    """Return a search that fills its empty places, unless others share it or its time is limited:
    what is retrained then depends on the time that is left."""
    tune = search.config.tune
    if search.membership is not None or not tune.retrain or tune.minutes is not None:
        return search
    spare = LANES_PER_STEP if device == "cuda" else machine.count_available_cores()
    retraining = Retraining(search.run, search.config, search.study)
    return FilledSearch(search, retraining, few=max(spare // (tune.folds or 1), 1))


def retrain_best(
    retraining: Retraining, best: Sequence[FrozenTrial], scheduler: PackScheduler
) -> list[RetrainedConfig]:
    """Retrain the best trials and the default; return the best trial first, the default last."""
    retraining.set_candidates(best)
    scheduler.pool.source = retraining
    scheduler.train()
    return retraining.rank()


def run_tests(
    run: Run,
    config: Config,
    retrained: Sequence[RetrainedConfig],
    datasets: DatasetCache,
    budget: SearchBudget | None = None,
) -> dict[str, RunSummary]:
    """Test the chosen settings and the default: ordinary runs, of the lanes that were retrained.

    Returns their summaries; `failed` gives the reason where there is no model. Where there is a
    budget, models that have yet to be trained have their share of what is left.
    """
    summaries: dict[str, RunSummary] = {}
    chosen, default = choose_settings(retrained), retrained[-1]
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
        numbers = range(repeated.seed, repeated.seed + repeated.train.repeats)
        saved = [get_lane_folder(run, result.trial, seed) for seed in numbers]
        test = FinalRun(run.folder / "retrained" / name, repeated, saved, limit_s)
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


def score_best(
    run: Run, config: Config, chosen: Config, datasets: DatasetCache, budget: SearchBudget
) -> dict[str, RunSummary]:
    """Test the model of the best trial as the search has trained it; return the summary, as
    `run_tests` does."""
    settings = {"name": f"{config.name}-best", "train.metric": config.tune.metric}
    alone = configs.replace_settings(chosen, {**settings, "train.repeats": 1})
    folder = run.folder / "retrained" / "best"
    test = FinalRun(folder, alone, [run.folder / "best" / LANE], budget.left_s)
    try:
        return {"best": test.finish(run, datasets, [])}
    except DivergedError as error:
        return {"best": {"run": str(folder), "failed": str(error)}}


@dataclass(frozen=True)
class FinalRun:
    """A run that tests settings which the search has trained."""

    folder: Path
    config: Config
    saved: Sequence[Path]
    """The folders of its lanes, one per seed, as far as they were trained"""
    limit_s: float | None
    """For models that have yet to be trained"""

    def finish(self, run: Run, datasets: DatasetCache, baselines: list[BaselineSums]) -> RunSummary:
        """Return the summary; score and write what is missing.

        Models that were not retrained are trained: further folds of a walk-forward split, or what
        the time was too short for.
        """
        if training_runs.is_run_of(self.folder, self.config):
            return training_runs.train_or_resume(
                self.folder, self.config, datasets.table, run.watch
            )
        lanes = enumerate(map(trained_lanes.load_lane, self.saved))
        trained = {number: lane for number, lane in lanes if lane is not None}
        data = datasets.get(self.config)
        config = self.config
        if len(trained) < len(self.saved) * max(len(data.dataset.folds), 1):
            config = self._limit_time(trained)
        if not trained:
            return training_runs.train_or_resume(self.folder, config, datasets.table, run.watch)
        runs.remove(self.folder)
        loaded = LoadedData(data.dataset, data.fingerprint, data.encoder)
        return training_runs.finish_trained(
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
        before_s = max((sum(lane_run.lane.seconds) for lane_run in trained.values()), default=0.0)
        minutes = (before_s + max(self.limit_s, MIN_TEST_S)) / 60
        return configs.replace_settings(self.config, {"train.minutes": minutes})
