"""Builds Optuna's samplers and pruners from `[tune]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna._transform import _SearchSpaceTransform
from optuna.distributions import BaseDistribution
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from slipstream.config import Tune
from slipstream.tuning import space as spaces


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
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
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
