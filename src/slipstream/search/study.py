"""The Optuna study of a search: opens it with its sampler and pruner, asks it for trials and tells
it their results."""

from __future__ import annotations

import importlib
import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from slipstream.base.errors import UserError
from slipstream.config import Config, Range, Tune
from slipstream.config import search_space as spaces
from slipstream.search import storage as storages
from slipstream.search.database import HEARTBEAT
from slipstream.search.storage import CUT_OFF, JOURNAL, NOTES, Journal, name_state

PRUNED = "pruned"
GIVEN = "slipstream.given"
"""The user attribute of the trial with the given config"""
REASSIGNED = "reassigned to another worker, because this one had sent no heartbeat for too long"
LOST = "the worker that trained it disappeared, and so did the next one"


def open_study(
    config: Config,
    folder: Path,
    url: str | None,
    name: str,
    *,
    seed_offset: int = 0,
    heartbeat: tuple[int, int] = HEARTBEAT,
) -> TimedStudy:
    """Open or create the study, in the storage `url` or else in a journal in `folder`."""
    tune, space = config.tune, spaces.make_space(config)
    storage: BaseStorage
    if url is None:
        storage = JournalStorage(Journal(folder / JOURNAL))
    else:
        storage = storages.open_storage(url, heartbeat)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = make_sampler(tune, space, seed_offset=seed_offset)
            pruner = make_pruner(tune, config.train.max_epochs)
        study = optuna.create_study(
            study_name=name, storage=storage, sampler=sampler, pruner=pruner, load_if_exists=True
        )
    except ModuleNotFoundError as error:
        message = f'tune.sampler = "{tune.sampler}" needs the package {error.name}'
        raise UserError(f'{message}; install it, or use "tpe"') from None
    opened = TimedStudy(study, space)
    opened.flush()
    return opened


def make_distributions(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions; a choice that is a list becomes its JSON text."""
    distributions: dict[str, BaseDistribution] = {}
    for name, entry in space.items():
        if not isinstance(entry, Range):
            distributions[name] = CategoricalDistribution(spaces.to_params(entry))
        elif entry.is_integer:
            step = int(entry.step or 1)
            high = int(entry.low) + (int(entry.high) - int(entry.low)) // step * step
            distributions[name] = IntDistribution(int(entry.low), high, log=entry.log, step=step)
        else:
            distributions[name] = FloatDistribution(**entry.model_dump())
    return distributions


class TimedStudy:
    """A study, its search space, and the time that calls to Optuna took."""

    def __init__(self, study: optuna.Study, space: Mapping[str, Any]) -> None:
        self.study, self.space = study, space
        self.storage: Any = study._storage
        backend = getattr(self.storage, "_backend", None)
        self.journal = backend if isinstance(backend, Journal) else None
        self.distributions = make_distributions(space)
        self.spent_s = 0.0

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        started_at = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about steps that are reported again after a resume
            yield
        self.spent_s += time.perf_counter() - started_at

    def get_trials(self, *states: TrialState) -> list[FrozenTrial]:
        with self.measure_time():
            return self.study.get_trials(deepcopy=False, states=states or None)

    def ask(self) -> Trial:
        with self.measure_time():
            trial = self.study.ask(self.distributions)
            self.flush()
            return trial

    def enqueue_given(self, config: Config) -> None:
        """Have the search begin with the given config, where its space has it; a grid has it by
        itself."""
        given = spaces.read_params(config, self.space)
        if given is None or config.tune.sampler == "grid" or self.get_trials():
            return
        with self.measure_time():
            self.study.enqueue_trial(given, user_attrs={GIVEN: True})
            self.flush()

    def flush(self) -> None:
        """Have the disk store a new study, trial or result, so that a power failure loses none."""
        if self.journal is not None:
            self.journal.flush()

    def reopen(self, number: int) -> Trial:
        """Return a running trial by its number. A kill may have interrupted the sampling of its
        parameters; the missing ones are sampled now."""
        with self.measure_time():
            frozen = self.study.get_trials(deepcopy=False)[number]
            trial = Trial(self.study, frozen._trial_id)
            for name, distribution in self.distributions.items():
                trial._suggest(name, distribution)
            return trial

    def report(self, trial: Trial, value: float, step: int) -> str:
        """Report an intermediate value; return why the trial has to stop, or ""."""
        with self.measure_time():
            try:
                trial.report(value, step)
                return PRUNED if trial.should_prune() else ""
            except UpdateFinishedTrialError:
                return REASSIGNED

    def tell(
        self, trial: Trial, state: TrialState, value: float | None, notes: Mapping[str, Any]
    ) -> FrozenTrial | None:
        """Finish a trial; return None if it was reassigned to another worker meanwhile."""
        with self.measure_time():
            try:
                trial.set_user_attr(NOTES, dict(notes))
                frozen = self.study.tell(trial, value, state=state, skip_if_finished=True)
                self.flush()
            except UpdateFinishedTrialError:
                return None
        return frozen if frozen.state == state else None


def count_trials(tune: Tune, space: Mapping[str, Any]) -> int:
    """Return the number of trials to run: `tune.trials`, or the size of a smaller grid."""
    if tune.sampler != "grid":
        return tune.trials
    return min(tune.trials, math.prod(len(values) for values in spaces.make_grid(space).values()))


def import_evaluator() -> None:
    """Import what `compute_importances` needs in a thread: more than a second, where scikit-learn
    is installed."""
    name = "optuna.importance._ped_anova"
    if name not in sys.modules:
        Thread(target=importlib.import_module, args=(name,), daemon=True).start()


def compute_importances(study: optuna.Study) -> dict[str, float]:
    """Return how strongly each setting separates good trials from others (PED-ANOVA); {} if there
    are too few trials."""
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optuna.importance.get_param_importances(study, evaluator=evaluator)
    except (ValueError, RuntimeError, ZeroDivisionError):
        return {}


def describe_trial(trial: FrozenTrial) -> dict[str, Any]:
    """Return the entry of a trial in trials.json."""
    lost = {"stopped": LOST} if trial.state == TrialState.FAIL else {}
    return {
        "trial": trial.number,
        "state": get_state(trial),
        "value": get_score(trial),
        "params": trial.params,
        "losses": {step + 1: value for step, value in sorted(trial.intermediate_values.items())},
        **trial.user_attrs.get(NOTES, lost),
    }


def get_state(trial: FrozenTrial) -> str:
    """Return the name of a trial's state."""
    return name_state(trial.state, trial.user_attrs.get(NOTES, {}))


def get_score(trial: FrozenTrial) -> float | None:
    """Return a trial's lowest validation loss; of a pruned one, which has no score, the last."""
    if get_state(trial) == CUT_OFF:
        lowest: float | None = trial.user_attrs[NOTES].get("lowest")
        return lowest
    return trial.value


def rank_trials(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the complete trials, the one with the lowest value first, then those that were cut
    off: they trained for fewer epochs, so their losses cannot be compared with the others'."""
    ranks = {}
    for trial in trials:
        is_complete, score = trial.state == TrialState.COMPLETE, get_score(trial)
        if score is not None and (is_complete or get_state(trial) == CUT_OFF):
            ranks[trial.number] = (not is_complete, score, trial.number), trial
    return [trial for _, trial in sorted(ranks.values(), key=lambda pair: pair[0])]


def make_sampler(tune: Tune, space: Mapping[str, Any], *, seed_offset: int = 0) -> BaseSampler:
    """Build the sampler; workers of one study sample from different seeds."""
    seed = (tune.seed + seed_offset) % 2**32  # the largest seed that samplers accept
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
    """A grid sampler for `Study.ask`: Optuna's calls `Study.stop`, which only `optimize` allows."""

    def after_trial(self, *_: Any) -> None:
        pass


class StatelessCmaEsSampler(optuna.samplers.CmaEsSampler):
    """CMA-ES that recomputes its state from the finished trials. Optuna's stores it in the study as
    a pickle, so that a study from somebody else could run code."""

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        self._current_space = search_space
        return super().sample_relative(study, trial, search_space)

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        space = self._current_space
        transform = _SearchSpaceTransform(space, transform_step=True, transform_0_1=True)
        optimizer = self._init_optimizer(transform, StudyDirection.MINIMIZE)
        while True:
            size = optimizer.population_size
            trials = self._get_solution_trials(completed_trials, optimizer.generation)[:size]
            if len(trials) < size:
                return optimizer
            optimizer.tell(
                [(transform.transform(trial.params), trial.values[0]) for trial in trials]
            )


def make_pruner(tune: Tune, epochs: int) -> BasePruner:
    min_epochs = max(tune.warmup_epochs, 1)
    match tune.pruner:
        case "median":
            return optuna.pruners.MedianPruner(
                n_startup_trials=tune.startup_trials, n_warmup_steps=tune.warmup_epochs
            )
        case "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=min_epochs, max_resource=epochs)
        case "halving":
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=min_epochs)
        case "wilcoxon":
            return optuna.pruners.WilcoxonPruner()
        case "none":
            return optuna.pruners.NopPruner()
