"""The Optuna study behind a search: where it is kept, who samples, who prunes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from slipstream.config import Tune
from slipstream.errors import UserError
from slipstream.tuning import space as spaces
from slipstream.tuning.storage import database
from slipstream.tuning.storage.journal import NOTES, ChecksummedJournal

T = TypeVar("T")
JOURNAL = "study.log"
PRUNED = "pruned"
REASSIGNED = "given to another worker, because this one had been silent for too long"
LOST = "the worker that trained it went away, and so did the next"


def make_storage(
    folder: Path,
    url: str | None,
    *,
    beat_s: int = database.HEARTBEAT_S,
    grace_s: int = database.GRACE_PERIOD_S,
) -> BaseStorage:
    """A journal in the run's folder, or the database that `url` names."""
    if url is None:
        return JournalStorage(ChecksummedJournal(str(folder / JOURNAL)))
    return database.open_storage(url, beat_s=beat_s, grace_s=grace_s)


def count_trials(tune: Tune, space: Mapping[str, Any]) -> int:
    """As many as asked for; of a grid, no more than it has."""
    if tune.sampler != "grid":
        return tune.trials
    return min(tune.trials, math.prod(len(values) for values in spaces.make_grid(space).values()))


def make_sampler(tune: Tune, space: Mapping[str, Any], *, worker: int = 0) -> BaseSampler:
    """As asked for; workers of one study draw from seeds of their own."""
    seed = (tune.seed + worker) % 2**32  # as much as samplers take
    match tune.sampler:
        case "tpe":
            return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed)
        case "grid":
            return FullGridSampler(spaces.make_grid(space), seed=tune.seed)
        case "cmaes":
            return StatelessCmaEsSampler(seed=seed)


class FullGridSampler(optuna.samplers.GridSampler):
    """Optuna's would stop `Study.optimize` at its end, and raise where trials are asked for."""

    def after_trial(self, *_: Any) -> None:
        pass


class StatelessCmaEsSampler(optuna.samplers.CmaEsSampler):
    """Optuna's keeps its state in the study as a pickle, so that a study which somebody hands over
    could run code. Here the state is derived from the finished trials whenever it is needed."""

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        self._sampled = search_space
        return super().sample_relative(study, trial, search_space)

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        space = _SearchSpaceTransform(self._sampled, transform_step=True, transform_0_1=True)
        optimizer = self._init_optimizer(space, StudyDirection.MINIMIZE)
        while True:
            size = optimizer.population_size
            trials = self._get_solution_trials(completed_trials, optimizer.generation)[:size]
            if len(trials) < size:
                return optimizer
            optimizer.tell([(space.transform(one.params), one.values[0]) for one in trials])


def make_pruner(tune: Tune, epochs: int) -> BasePruner:
    least = max(tune.warmup_epochs, 1)
    match tune.pruner:
        case "median":
            return optuna.pruners.MedianPruner(
                n_startup_trials=tune.startup_trials, n_warmup_steps=tune.warmup_epochs
            )
        case "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=epochs)
        case "halving":
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=least)
        case "wilcoxon":
            return optuna.pruners.WilcoxonPruner()
        case "none":
            return optuna.pruners.NopPruner()


def _without_warnings(make: Callable[..., T], *given: Any, **how: Any) -> T:
    """Of what Optuna calls experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return make(*given, **how)


def open_study(
    name: str,
    storage: BaseStorage,
    tune: Tune,
    space: Mapping[str, Any],
    *,
    epochs: int,
    worker: int = 0,
) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=_without_warnings(make_sampler, tune, space, worker=worker),
            pruner=_without_warnings(make_pruner, tune, epochs),
            direction="minimize",
            load_if_exists=True,
        )
    except ModuleNotFoundError as error:
        raise UserError(
            f'tune.sampler = "{tune.sampler}" needs the package {error.name}; install it, or take '
            '"tpe"'
        ) from None


class TimedStudy:
    """The study, and the time that asking it takes."""

    def __init__(self, study: optuna.Study, space: Mapping[str, Any]) -> None:
        self.study, self.space = study, space
        self.distributions = spaces.make_distributions(space)
        self.spent_s = 0.0

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of steps that are reported again after a resume
            yield
        self.spent_s += time.perf_counter() - began

    def get_trials(self, *states: TrialState) -> list[FrozenTrial]:
        with self.measure_time():
            return self.study.get_trials(deepcopy=False, states=states or None)

    def ask(self) -> Trial:
        with self.measure_time():
            return self.study.ask(self.distributions)

    def reopen(self, number: int) -> Trial:
        """A trial that is under way, by its number; settings that it lacks, because the search was
        killed while they were drawn, are drawn now."""
        with self.measure_time():
            found = self.study.get_trials(deepcopy=False)[number]
            trial = Trial(self.study, found._trial_id)
            for name, distribution in self.distributions.items():
                trial._suggest(name, distribution)
            return trial

    def report(self, trial: Trial, value: float, step: int) -> str:
        """Note an epoch's loss; why the trial should end, if it should."""
        with self.measure_time():
            try:
                trial.report(value, step)
                return PRUNED if trial.should_prune() else ""
            except UpdateFinishedTrialError:
                return REASSIGNED

    def tell(
        self, trial: Trial, state: TrialState, value: float | None, notes: Mapping[str, Any]
    ) -> FrozenTrial | None:
        """The trial as it ended; nothing where another worker has been given it meanwhile."""
        with self.measure_time():
            try:
                trial.set_user_attr(NOTES, dict(notes))
                told = self.study.tell(trial, value, state=state, skip_if_finished=True)
            except UpdateFinishedTrialError:
                return None
        return told if told.state == state else None


def compute_importances(study: optuna.Study) -> dict[str, float]:
    """How much of the difference between good trials and the others each setting explains; nothing
    where there are too few to tell."""
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def describe_trial(trial: FrozenTrial, states: Mapping[TrialState, str]) -> dict[str, Any]:
    """A trial for a report."""
    lost = {"stopped": LOST} if trial.state == TrialState.FAIL else {}
    return {
        "trial": trial.number,
        "state": states.get(trial.state, "under way"),
        "value": trial.value,
        "params": trial.params,
        "losses": {step + 1: value for step, value in sorted(trial.intermediate_values.items())},
        **trial.user_attrs.get(NOTES, lost),
    }


def find_best(trials: list[FrozenTrial]) -> FrozenTrial | None:
    """The one with the lowest score among those that ran in full."""
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    return min(done, key=lambda trial: (trial.value, trial.number), default=None)
