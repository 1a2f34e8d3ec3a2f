"""The candidates of `slipstream auto`: what is tried, and the search that proposes it and keeps the
candidates' errors on the validation blocks."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from optuna.trial import FrozenTrial, Trial, TrialState
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import config as configs
from slipstream import runs
from slipstream.base import machine
from slipstream.base.errors import ResumableError, UserError
from slipstream.base.run_names import AUTO_FILE
from slipstream.base.text import format_number
from slipstream.config import Config, Data
from slipstream.config import search_space as spaces
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.windows import WindowChunk
from slipstream.engine.lanes import LaneResult
from slipstream.engine.planning import make_plan
from slipstream.scoring.baselines import fit_baselines, list_baselines, make_network
from slipstream.scoring.batch import Baseline
from slipstream.scoring.boosting import BackgroundBoosting, prepare_boosting
from slipstream.scoring.ensemble import build_predictor
from slipstream.search import portfolio
from slipstream.search.budget import MARGIN, ModelCosts, SearchBudget
from slipstream.search.ensemble import FittedBaselines, choose_train_stride
from slipstream.search.library import (
    BlockWindows,
    Combination,
    ErrorUnits,
    Library,
    compute_errors,
    find_block_starts,
    make_library,
)
from slipstream.search.packs import DatasetCache, PackCosts, TrialData, TrialRun
from slipstream.search.portfolio import Facts, Params, Prefer
from slipstream.search.storage import NOTES, OUT_OF_MINUTES, OUT_OF_SHARE, OUT_OF_TIME
from slipstream.search.study import (
    GIVEN,
    PRUNED,
    get_score,
    rank_trials,
)
from slipstream.search.trials import OptunaSearch

CANDIDATES = "candidates"
"""The folder of the candidates' weights, until the members are chosen"""
OWN_PAST = "own past"
"""In the names of baselines that read the targets' past, and what is known ahead, alone"""
MAX_FITS_SHARE, FREE_FIT_SHARE = 0.4, 0.01
"""Of the whole time, for fitting the quick baselines on all validation blocks at most; those that
take less than the second share each are fitted in any case"""
MAX_FOLDS = {"cuda": 3, "cpu": 2}
"""Validation blocks, where the rows allow it"""
FEW_WINDOWS, FEW_WINDOWS_FOLDS = 1_000, 5
"""Windows of classes below which there are so many blocks, which cost little"""
MAX_TRIALS = 100_000
PARALLEL = {"cuda": 16, "cpu": 1}
GIVEN_PLACE = {"cuda": (0, 0), "cpu": (3, 6)}
"""The trials before that of the given config, at least and at most: on a CPU the cheaper ones come
first"""
MAX_PARENTS = 6
"""The best candidates whose neighbours are searched"""
MIN_TRIED, LATE_SHARE, LONGER, MIN_LONGER = 4, 0.9, 3.0, 1.5
"""Trials after which the best, if it was best after so much of its epochs, trains for so many times
as many of them; for fewer where the time is short, but not below the last number"""
MIN_SHORTER = 0.3
"""The share of its epochs with which a candidate is tried where there is no time for all"""
MIN_CONTEXT_GAIN = 0.1
"""How much lower the loss of a ridge on the most rows is than on the given ones, beyond its noise,
where the candidates of the portfolio read the most rows, too"""
MAX_LATE_S = 60.0
"""Beyond the whole time, until when the first candidate may train an epoch"""
MAX_MISFITS = 50
"""Drawn candidates that would not end in time, after which a search ends"""
MAX_DIFFERENCE = 1e-2
"""Between the predictions of a ridge, in double precision, and of its linear network, in standard
deviations"""
MAX_TRIAL_SHARE = {"cuda": 0.5, "cpu": 0.3}
"""Of the whole time, for one candidate at most; on a GPU many train at a time"""
TOO_SLOW = 2.0
"""Epochs are estimated roughly: one that seems to take so many times a candidate's share of the
time is not begun"""
RESERVED_SHARE = 0.35
"""Of the whole time, for the members' training at most"""
REPORT_S, REPORT_FACTOR, OVERHEAD_SHARE = 1.0, 0.25, 0.1
"""Seconds of files and reports: a constant, and more on a machine that is slow to start; at most
this share of the whole time"""
LOOKING_SHARE, LOOKING_FACTOR = 0.02, 10.0
"""Between two looks at what the answer would be: a share of the whole time, and so many times as
long as the last look took"""
MAX_MEASURING_S, MEASURING_SHARE = 3.0, 0.02
"""Seconds of measuring candidates at most, and as a share of the whole time"""
VALUE_S, WRITE_S = {"cuda": 1e-9, "cpu": 3.6e-8}, 1.2e-6
"""Seconds per predicted value: of its metrics, and of writing it with its intervals"""
REFIT_COST, REFIT_SHARE = 1.5, 0.45
"""The training of a member on all rows relative to its training before; the share of the whole time
that is reserved at most where it is wanted"""


@dataclass(frozen=True)
class AutoPlan:
    """What `slipstream auto` tries, and what it is to answer with."""

    prefer: Prefer
    candidates: list[Params]
    facts: Facts
    refit: bool = False
    """Whether the answer is trained on all rows too, for use"""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, folder: Path) -> AutoPlan | None:
        """Return the plan of a folder; None where it is not one of `slipstream auto`."""
        path = folder / AUTO_FILE
        if not path.exists():
            return None
        content = runs.read_json(path)
        lists = {name: tuple(content["facts"][name]) for name in ("contexts", "own_inputs")}
        facts = content["facts"] | lists
        return cls(**(content | {"facts": Facts(**facts)}))


def prepare_auto(
    config: Config, data: Any, *, minutes: float, prefer: Prefer, refit: bool = False
) -> tuple[Config, AutoPlan, DatasetCache]:
    """Return the config of the search, its plan, and the data that were loaded for it."""
    config = _select_last_block(_adapt_config(config, minutes))
    spaces.check_config(config)
    config, cache = _choose_folds(config, data)
    scaled: dict[str, Any] = {}
    if portfolio.should_scale_series(config, cache.get(config).dataset):
        scaled = {"data.scale_by": "series"}
        scaled |= {"tune.metric": "mae"} if config.tune.metric == "mse" else {}
    if scaled or portfolio.is_scaled_by_series(config):
        scaled |= {} if "scale" in config.data.model_fields_set else {"data.scale": "seasonal"}
    if scaled:
        config = configs.replace_settings(config, scaled)
        cache = DatasetCache(config, data)
    base = cache.get(config)
    dataset, device = base.dataset, base.series.values.device.type
    contexts = [int(config.data.context)]
    for length in portfolio.list_contexts(config, dataset):
        changed = configs.replace_settings(config, {"data.context": length, "model.patch": 1})
        with suppress(UserError):  # too long for these rows
            found = cache.get(changed).dataset.num_windows
            if all(found[name] == dataset.num_windows[name] for name in ("val", "test")):
                contexts.append(length)
    own_inputs = portfolio.list_own_inputs(dataset)
    if own_inputs:
        changed = configs.replace_settings(config, {"data.inputs": own_inputs})
        found = cache.get(changed).dataset.num_windows
        if any(found[name] != dataset.num_windows[name] for name in ("val", "test")):
            own_inputs = ()  # a value that only other columns lack
        elif config.data.inputs is None:  # values of a search are named
            config = configs.replace_settings(config, {"data.inputs": dataset.signature.inputs})
    folds = config.tune.folds or 1
    speed = machine.measure_products()
    facts = Facts.of(config, dataset, contexts, device, folds, speed, own_inputs)
    candidates = portfolio.make_candidates(config, facts, prefer)
    given = portfolio.read_given(config)
    space = portfolio.make_space(given, candidates, facts)
    tune = {"space": space, "parallel": PARALLEL[device]}
    config = config.model_copy(update={"tune": config.tune.model_copy(update=tune)})
    cache.config = config
    return config, AutoPlan(prefer, candidates, facts, refit), cache


def _adapt_config(config: Config, minutes: float) -> Config:
    """Return the config with what a search needs: one model per trial, a score that all losses
    share."""
    has_own_score = config.data.task == "classify" or config.train.loss == "quantile"
    metric = "loss" if has_own_score else config.tune.metric
    if metric == "loss" and not has_own_score:
        metric = "mae" if config.train.loss in ("mae", "huber") else "mse"
    tune: dict[str, Any] = {
        "tune.minutes": minutes,
        "tune.metric": metric,
        "tune.trials": MAX_TRIALS,
        "tune.pruner": "median",
        "tune.startup_trials": 8,
        "tune.warmup_epochs": 4,
        "tune.space": {},
        "train.repeats": 1,
        "train.minutes": None,
        "train.state": "windows",
        "train.patience": portfolio.PATIENCE
        if config.train.patience == "off"
        else config.train.patience,
    }
    if config.train.batch == "auto":
        tune["train.batch"] = 256
    return configs.replace_settings(config, tune)


def _select_last_block(config: Config) -> Config:
    """Return the config with the last test block of a walk-forward split alone: all rows before it
    choose and train."""
    split = config.data.split
    if split.walk_forward is None or not isinstance(split.test, float):
        return config
    last = {"walk_forward": 1, "test": split.test / split.walk_forward}
    changed = split.model_copy(update=last)
    return config.model_copy(update={"data": config.data.model_copy(update={"split": changed})})


def _choose_folds(config: Config, data: Any) -> tuple[Config, DatasetCache]:
    """Return the config with as many validation blocks as the rows allow."""
    device = make_plan(config, data_bytes=0, lanes=True).device.type
    most = MAX_FOLDS[device]
    if config.data.task == "classify":  # a series is a window, and few of them say little
        whole = DatasetCache(configs.replace_settings(config, {"tune.folds": None}), data)
        if whole.get(config).dataset.num_windows["train"] < FEW_WINDOWS:
            most = FEW_WINDOWS_FOLDS
    for count in range(most, 1, -1):
        changed = configs.replace_settings(config, {"tune.folds": count})
        cache = DatasetCache(changed, data)
        try:
            loaded = cache.get(changed)
        except UserError as error:
            if error.setting != "tune.folds":
                raise
            continue
        if len(loaded.folds[0]["train"]) >= len(loaded.folds[-1]["train"]) / 4:
            return changed, cache
    alone = configs.replace_settings(config, {"tune.folds": None})
    return alone, DatasetCache(alone, data)


@dataclass(frozen=True)
class AutoBudget(SearchBudget):
    """The time of `slipstream auto`, whose tests are part of its costs."""

    @property
    def measuring_s(self) -> float:
        """What measuring the candidates for the leaderboard may take"""
        return min(MAX_MEASURING_S, MEASURING_SHARE * self.total_s)

    @property
    def overhead_s(self) -> float:
        needed_s = REPORT_S + REPORT_FACTOR * self.setup_s + self.measuring_s
        return min(OVERHEAD_SHARE * self.total_s, needed_s)


@dataclass
class AutoCosts:
    """What the end of `slipstream auto` takes, from what its candidates took so far."""

    num_windows: int
    """Windows that the answer and the baselines are scored on"""
    values_s: float = 0.0
    """For the metrics of one candidate in these windows"""
    write_s: float = 0.0
    """To write the answer's predictions"""
    window_s: dict[str, float] = field(default_factory=dict)
    """By candidate: to predict a window"""
    train_s: dict[str, float] = field(default_factory=dict)
    """By candidate: to train one model; on a GPU, where many train at a time, it is the mean"""
    setup_s: float = 0.0
    """To build the program that trains a candidate, where `train_s` does not have it"""
    fit_s: dict[str, float] = field(default_factory=dict)
    """By baseline: to fit it"""
    fixed: set[str] = field(default_factory=set)
    """Candidates that are the same from every seed, so that they are not trained again"""
    refits: bool = False
    """Whether the answer is trained on all rows as well"""

    def record_errors(self, name: str, seconds: float, num_windows: int) -> None:
        self.window_s[name] = seconds / max(num_windows, 1)

    def estimate_scoring(self, names: Iterable[str]) -> float:
        """Return the seconds of scoring these candidates, their mean and the baselines."""
        # the answer is compared with one baseline of each kind
        compared = [name for name in self.window_s if parse_baseline(name) == name]
        scored = [*names, *(name for name in compared if parse_name(name) is None)]
        predict_s = sum(self.window_s.get(name, 0.0) for name in scored) * self.num_windows
        return MARGIN * predict_s + (len(scored) + 1) * self.values_s + self.write_s

    def estimate_training(self, names: Iterable[str], mean_s: float) -> float:
        """Return the seconds of training a model of each candidate from another seed."""
        return self._sum_training((name for name in names if name not in self.fixed), mean_s)

    def _sum_training(self, names: Iterable[str], mean_s: float) -> float:
        trained = [name for name in names if parse_name(name) is not None]
        setup_s = self.setup_s * len(set(trained) - self.train_s.keys())
        return MARGIN * (setup_s + sum(self.train_s.get(name, mean_s) for name in trained))

    def estimate_refit(self, names: Iterable[str], mean_s: float) -> float:
        """Return the seconds of training a model of each candidate on all rows, and of fitting the
        baselines among them; 0 where that is not wanted."""
        if not self.refits:
            return 0.0
        chosen = list(names)
        fitted_s = sum(self.fit_s.get(name, 0.0) for name in chosen)
        return REFIT_COST * (self._sum_training(chosen, mean_s) + MARGIN * fitted_s)


class AutoSearch(OptunaSearch):
    """A search that proposes the portfolio, then neighbours of its best candidates, and keeps the
    candidates' errors."""

    budget: AutoBudget
    plan: AutoPlan
    library: Library
    weights_folder: Path
    fitted: list[FittedBaselines]
    """The baselines of the split itself"""
    end_costs: AutoCosts
    naive_errors: Tensor | None
    """What the errors of each series are relative to, where each counts the same"""
    fits: BaselineFits | None = None
    """The baselines, where this process fits them"""
    choose_now: Callable[[], Combination] | None = None
    """Returns what the answer would be"""
    _answer: Sequence[str] = ()
    """The members of the answer, when that was looked at last"""
    _likely: Sequence[str] = ()
    """The members of an ensemble then, whether or not the answer is one"""
    _setups_s: Sequence[float] = ()
    """What building the programs of packs took"""
    _look_at: float = -math.inf
    """When to look again"""

    def start_auto(self, plan: AutoPlan) -> None:
        """Prepare the library of errors, with what an earlier part of the search has left."""
        self.plan, self.fitted = plan, []
        epochs = [params["train.epochs"] for params in plan.candidates]
        self.costs.max_epochs = -(-sum(epochs) // max(len(epochs), 1))
        self.weights_folder = self.run.folder / CANDIDATES
        self.weights_folder.mkdir(exist_ok=True)
        longest = configs.replace_settings(
            self.config, {"data.context": max(plan.facts.contexts), "model.patch": 1}
        )
        data = self.datasets.get(longest)
        blocks = []
        for fold, first_row in zip(data.folds, data.first_rows, strict=True):
            blocks.append(fold["val"].cpu() - first_row + data.dataset.signature.lead)
        device = data.series.values.device
        self.library = make_library(blocks, data.dataset, self.config.tune.metric, device)
        self.naive_errors = get_naive_errors(self.config, data.dataset)
        self.end_costs = make_costs(data.dataset, device.type, refits=plan.refit)
        self.restore_candidates()

    def restore_candidates(self) -> None:
        """Compute the errors of candidates that another process, or an earlier one, has trained."""
        for path in self._find_weights():
            number, fold = map(int, path.stem.split("-")[:2])
            losses = self.library.losses.get(name_trial(number))
            if losses is None or not math.isfinite(losses[fold]):
                self._restore(path, number, fold)

    def _find_weights(self) -> list[Path]:
        """List the weights of candidates, those of workers too."""
        own = self.run.folder.glob(f"{CANDIDATES}/*.safetensors")
        return sorted([*own, *self.run.folder.glob(f"workers/*/{CANDIDATES}/*.safetensors")])

    def _restore(self, path: Path, number: int, fold: int) -> None:
        """Compute the errors of a candidate that was trained before."""
        trials = self.study.get_trials()
        if number >= len(trials) or get_score(trials[number]) is None:
            return  # it was pruned, or has not ended
        with suppress(UserError, OSError, ValueError, RuntimeError):  # it counts as untrained
            config = spaces.apply_params(self.config, self.study.space, trials[number].params)
            self._keep(name_trial(number), config, fold, load_file(path), self.datasets.get(config))

    def ask(self) -> TrialRun | None:
        """Return an interrupted trial, or a new one; None where none would end in time. What is
        left of the time is better spent on fresh seeds of the members then."""
        if not self.interrupted and self._propose(self.study.get_trials()) is None:
            return None
        return super().ask()

    def _ask_study(self, trials: Sequence[FrozenTrial]) -> Trial:
        """Propose the next of the portfolio, or a neighbour of one of the best."""
        if not any(trial.state == TrialState.WAITING for trial in trials):
            given = spaces.read_params(self.config, self.study.space)
            is_known = any(trial.user_attrs.get(GIVEN) for trial in trials)
            is_due = len(trials) >= self._find_given_place()
            with self.study.measure_time():
                if given is not None and not is_known and is_due:
                    self.study.study.enqueue_trial(given, user_attrs={GIVEN: True})
                elif (proposal := self._propose(trials)) is not None:
                    self.study.study.enqueue_trial(proposal)
        return self.study.ask()

    def _make_run(self, number: int, params: Mapping[str, Any], is_final: bool = False) -> TrialRun:
        """Refuse a candidate whose first epoch alone would take far more than its share."""
        facts = self.plan.facts
        epoch_s = portfolio.estimate_epoch_s(
            portfolio.read_given(self.config) | dict(params), facts
        )
        if not is_final and not self._lacks_model() and epoch_s > TOO_SLOW * self._trial_s:
            raise UserError(
                f"too slow: an epoch would take about {epoch_s / 60:.0f} minutes on this machine"
            )
        return super()._make_run(number, params, is_final)

    def _find_given_place(self) -> int:
        """Return how many candidates are tried before the given config."""
        facts = self.plan.facts
        least, most = GIVEN_PLACE[facts.device]
        given_s = portfolio.estimate_training_s(portfolio.read_given(self.config), facts)
        times = (portfolio.estimate_training_s(params, facts) for params in self.plan.candidates)
        return min(max(sum(train_s < given_s for train_s in times), least), most)

    def _propose(self, trials: Sequence[FrozenTrial]) -> Params | None:
        """Return the settings of the next candidate; on a CPU None where none fits into the time
        that is left."""
        space, given = self.study.space, portfolio.read_given(self.config)
        left_s = self.budget.left_s - self._estimate_end()
        find_share = make_estimate(trials, given, self.plan.facts, left_s)
        tried = [trial.params for trial in trials]
        tried += [trial.system_attrs.get("fixed_params", {}) for trial in trials]
        longer = self._train_longer(trials)
        if longer is not None and longer not in tried:
            return longer
        context = find_useful_context(self.library, max(self.plan.facts.contexts))
        ordered = portfolio.order_candidates(
            self.plan.candidates, self.plan.facts, self._prefers_own()
        )
        adapted = [
            portfolio.lengthen_context(candidate, context, self.plan.facts) for candidate in ordered
        ]
        new = [{name: candidate[name] for name in space} for candidate in adapted]
        new = [params for params in new if portfolio.is_in_space(params, space)]
        for params in new:
            if params not in tried and find_share(params) >= 1:
                return params
        generator = random.Random(f"{self.config.tune.seed} {len(trials)}")
        ranked = [trial for trial in rank_trials(trials) if trial.state == TrialState.COMPLETE]
        names = self.library.rank()
        order = [name_trial(trial.number) for trial in ranked]
        best = [name for name in names if name in order][:MAX_PARENTS]
        parents = [ranked[order.index(name)].params for name in best] or [
            *(trial.params for trial in ranked[:MAX_PARENTS]),
            *(self.plan.candidates if not ranked else ()),
        ]
        misfits = 0
        while misfits < MAX_MISFITS:
            place = min(int(generator.expovariate(0.5)), len(parents) - 1)
            changed = portfolio.change_params(
                given | parents[place], self.plan.facts, self.config, generator, self.plan.prefer
            )
            params = {name: changed[name] for name in space}
            if params in tried or not portfolio.is_in_space(params, space):
                continue
            if find_share(params) >= 1:
                return params
            misfits += 1
        return shorten(new, tried, find_share)  # rather than leave time unused

    def _prefers_own(self) -> bool | None:
        """Whether the best baseline that learns reads the own past alone; None where all do."""
        ranked = self.library.rank() if self.plan.facts.own_inputs else []
        learned = (name for name in ranked if parse_baseline(name) in ("ridge", "gbm"))
        best = next(learned, None)
        return None if best is None else OWN_PAST in best.split(", ")

    def _train_longer(self, trials: Sequence[FrozenTrial]) -> Params | None:
        """Return the best candidate with more epochs, where these may help. On a CPU, where
        candidates have few epochs each."""
        device, budget = self.plan.facts.device, self.budget
        numbers = [
            number for name in self.library.rank() if (number := parse_name(name)) is not None
        ]
        if device != "cpu" or len(trials) < MIN_TRIED or not numbers:
            return None
        left_s = budget.left_s - self._estimate_end()
        time_s = min(MAX_TRIAL_SHARE[device] * budget.total_s, left_s)
        return lengthen(trials[numbers[0]], time_s)

    def finish_fold(self, trial: TrialRun, fold: int, ended: LaneResult, data: TrialData) -> None:
        super().finish_fold(trial, fold, ended, data)
        result = trial.fold_results[fold]
        if result.stopped == PRUNED or not math.isfinite(result.loss):
            return
        self._keep(name_trial(trial.number), trial.config, fold, ended.weights, data)
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in ended.weights.items()}
        with runs.replace_atomically(self._get_path(trial.number, fold)) as temporary:
            save_file(host, temporary)

    def keep_baseline(self, config: Config, name: str, baseline: Baseline) -> None:
        """Keep a baseline of the split itself, for the answer to be compared with."""
        known = next((entry for entry in self.fitted if entry.data == config.data), None)
        if known is None:
            self.fitted.append(known := FittedBaselines(config.data, {}))
        known.baselines[name] = baseline

    def name_baseline(self, kind: str, data: Data) -> str:
        """Return the name of a baseline as a candidate: its kind, and where it reads other windows
        than the config has, which."""
        parts = [kind]
        if self.plan.facts.own_inputs and data.inputs == self.plan.facts.own_inputs:
            parts.append(OWN_PAST)
        if data.context != self.config.data.context:
            parts.append(f"{data.context} rows")
        return ", ".join(parts)

    def drop_weights(self, kept: Sequence[str]) -> None:
        """Remove the weights of all candidates but these."""
        for path in self._find_weights():
            if name_trial(int(path.stem.split("-")[0])) not in kept:
                path.unlink(missing_ok=True)

    def find_path(self, number: int, fold: int) -> Path:
        """Return the weights of a candidate, whichever process has trained it."""
        name = f"{number}-{fold}.safetensors"
        return next(path for path in self._find_weights() if path.name == name)

    def _get_path(self, number: int, fold: int) -> Path:
        return self.weights_folder / f"{number}-{fold}.safetensors"

    def _keep(
        self,
        name: str,
        config: Config,
        fold: int,
        weights: Mapping[str, Tensor],
        data: TrialData,
    ) -> None:
        """Keep the errors of a model on a validation block."""
        plan = make_plan(config, data_bytes=0, training=False)
        predict = build_predictor(weights, config, data.dataset, plan)
        windows = BlockWindows(
            data.series,
            data.folds[fold]["val"].to(data.series.values.device),
            data.first_rows[fold],
        )
        anchors = self.library.blocks[fold].anchors
        starts = find_block_starts(windows, anchors, data.dataset.signature)
        units, began = self.get_units(data.dataset), time.perf_counter()
        with plan.flags():  # a pack's lanes may have a thread each
            errors = compute_errors(predict, windows, starts, data.dataset, units)
        self.library.add(name, fold, errors)
        self.end_costs.record_errors(name, time.perf_counter() - began, len(starts))
        if config.model.kind == "linear":
            self.end_costs.fixed.add(name)

    @property
    def ranked_by(self) -> str | None:
        """The metric that the candidates are ranked by, where it is not the scaled `tune.metric`"""
        return None if self.naive_errors is None else "mase"

    def get_units(self, dataset: Dataset) -> ErrorUnits:
        """Return the units of the candidates' errors."""
        return ErrorUnits(get_sizes(dataset), self.naive_errors)

    def finish(self, trial: TrialRun) -> None:
        super().finish(trial)
        name = name_trial(trial.number)
        if self.plan.facts.device == "cpu":
            spent_s = time.perf_counter() - trial.started_at
            self.end_costs.train_s[name] = spent_s / trial.num_folds
        losses = self.library.losses.get(name)
        if losses is not None and not all(map(math.isfinite, losses)):
            self.library.forget(name)
        if name not in self.library.errors:
            for fold in range(trial.num_folds):
                self._get_path(trial.number, fold).unlink(missing_ok=True)
        if self.fits is not None:
            self.fits.add_trees()
        self._find_likely()

    def _find_likely(self) -> None:
        """Find the members that the answer would have; not too often, since that takes a while."""
        began = time.perf_counter()
        if began < self._look_at:
            return
        is_best = self.plan.prefer == "best"
        self._likely = self.library.list_members() if is_best else self.library.rank()[:1]
        self._answer = self._likely  # in a worker, which does not choose
        if self.choose_now is not None and self._likely:
            with suppress(ResumableError):  # none may be taken yet
                self._answer = list(self.choose_now().weights)
        now = time.perf_counter()
        wait_s = LOOKING_SHARE * self.budget.total_s, LOOKING_FACTOR * (now - began)
        self._look_at = now + max(wait_s)

    def fail(self, trial: TrialRun, reason: str) -> None:
        super().fail(trial, reason)
        self.library.forget(name_trial(trial.number))

    def record_setup(self, seconds: float) -> None:
        self._setups_s = (*self._setups_s, seconds)
        self.end_costs.setup_s = statistics.median(self._setups_s)

    def is_over(self) -> bool:
        return self._is_over_in(0.0)

    def _is_over_in(self, ahead_s: float) -> bool:
        is_late = self.budget.left_s - ahead_s <= self._estimate_end()
        return is_late and not self._lacks_model()

    def find_cut(self, costs: PackCosts | None = None) -> str:
        ahead_s = 0.0 if costs is None else 2 * costs.validate_s  # errors take about as long again
        if self._is_over_in(ahead_s):
            return OUT_OF_MINUTES
        if costs is None or not costs.trials or self._lacks_model():
            return ""
        until = time.perf_counter() + ahead_s - self._trial_s
        is_slow = all(trial.started_at < until for trial in costs.trials)
        return OUT_OF_SHARE if is_slow or costs.epoch_s > self._trial_s else ""

    @property
    def _trial_s(self) -> float:
        """Seconds that one candidate may take"""
        return MAX_TRIAL_SHARE[self.plan.facts.device] * self.budget.total_s

    def is_worth_validating(self, train_s: float, validate_s: float) -> bool:
        return train_s >= 2 * validate_s

    def _estimate_end(self) -> float:
        """Return the seconds that training and testing the answer of now would take."""
        share = REFIT_SHARE if self.plan.refit else RESERVED_SHARE
        most_s = share * (self.budget.total_s - self.budget.overhead_s)
        costs = self.costs.estimate_model()
        if costs is None or not self._likely:
            return most_s
        # the answer may become the best network yet
        networks = (name for name in self.library.rank() if parse_name(name) is not None)
        trained = dict.fromkeys([*self._answer, *islice(networks, 1)])
        train_s = self.end_costs.estimate_training(trained, costs.train_s)
        train_s += self.end_costs.estimate_refit(trained, costs.train_s)
        return min(train_s, most_s) + self.end_costs.estimate_scoring(self._likely)

    def estimate_members(self) -> dict[int, float]:
        """Return the seconds that a fresh model of each trial takes, that on all rows included."""
        mean_s = (self.costs.estimate_model() or ModelCosts(0.0)).train_s
        found = {}
        for trial in self.study.get_trials():
            names = [name_trial(trial.number)]
            train_s = self.end_costs.estimate_training(names, mean_s)
            found[trial.number] = train_s + self.end_costs.estimate_refit(names, mean_s)
        return found

    def estimate_tests(self, choice: Mapping[str, float]) -> float:
        """Return the seconds of what an answer needs beside fresh models: its test, and where it is
        trained on all rows as well, the fits of its baselines."""
        baselines = [name for name in choice if parse_name(name) is None]
        scored_s = self.end_costs.estimate_scoring(choice)
        return scored_s + self.end_costs.estimate_refit(baselines, 0.0)

    def _lacks_model(self) -> bool:
        """Whether no candidate has trained an epoch yet: the first one may, however late it is, so
        that there is a model; not much longer than all of the time."""
        is_early = self.budget.elapsed_s < self.budget.total_s + MAX_LATE_S
        return self.costs.num_epochs == 0 and is_early

    def report(self, trial: TrialRun, epoch: int, loss: float) -> str:
        reason = super().report(trial, epoch, loss)
        if not reason and time.perf_counter() - trial.started_at > self._trial_s:
            return OUT_OF_SHARE
        return OUT_OF_MINUTES if reason == OUT_OF_TIME else reason

    def wants_lane(self, trial: TrialRun, fold: int, loss: float) -> bool:
        return False  # the weights are saved anyway


def find_useful_context(library: Library, longest: int) -> int:
    """Return the rows that candidates read at least, as the baselines have shown: the most of all
    where a ridge on these is clearly better than on the given ones, as where a week explains what a
    day does not; else 0."""
    ranked = [name for name in library.rank() if parse_baseline(name) == "ridge"]
    long = [name for name in ranked if name.endswith(f" {longest} rows")]
    given = [name for name in ranked if name not in long]
    if not long or not given:
        return 0
    loss, given_loss = (library.compute_loss(names[0]) for names in (long, given))
    noise = library.compute_noise(long[0], given[0])
    return longest if given_loss - loss > max(MIN_CONTEXT_GAIN * given_loss, 2 * noise) else 0


def make_estimate(
    trials: Sequence[FrozenTrial], given: Params, facts: Facts, left_s: float
) -> Callable[[Params], float]:
    """Return a function that says how often a candidate would end in the time that is left, by what
    others took in comparison with their estimates; on a GPU, and before any has ended, as often as
    one likes. Settings that a candidate does not have are the given ones."""

    def estimate(params: Params) -> float:
        return portfolio.estimate_training_s(given | params, facts)

    ratios = [
        trial.user_attrs.get(NOTES, {}).get("seconds", 0.0) / max(estimate(trial.params), 1e-9)
        for trial in trials
        if trial.state == TrialState.COMPLETE
    ]
    if facts.device != "cpu" or not ratios:
        return lambda _: math.inf
    pace = statistics.median(ratios)
    return lambda params: left_s / max(pace * estimate(params), 1e-9)


def shorten(
    candidates: Sequence[Params], tried: Sequence[Params], find_share: Callable[[Params], float]
) -> Params | None:
    """Return the first of the candidates that were not tried, whatever their epochs, with as many
    epochs as there is time for; None where that is a small share of them for each."""

    def drop_epochs(params: Params) -> Params:
        return {name: value for name, value in params.items() if name != "train.epochs"}

    known = [drop_epochs(params) for params in tried]
    for params in candidates:
        share = find_share(params)
        if share >= MIN_SHORTER and drop_epochs(params) not in known:
            return {**params, "train.epochs": max(int(share * params["train.epochs"]), 1)}
    return None


def lengthen(trial: FrozenTrial, time_s: float) -> Params | None:
    """Return the settings of a trial with more epochs, as many as the time allows; None where it
    was not best in its last ones, or the time allows few more."""
    notes = trial.user_attrs.get(NOTES, {})
    factor = min(LONGER, time_s / max(notes.get("seconds", math.inf), 1e-9))
    is_late = notes.get("best_epoch", 0.0) >= LATE_SHARE * notes.get("epochs", math.inf)
    if trial.state != TrialState.COMPLETE or not is_late or factor < MIN_LONGER:
        return None
    return {**trial.params, "train.epochs": int(factor * trial.params["train.epochs"])}


def name_trial(number: int) -> str:
    return f"trial {number}"


def parse_name(name: str) -> int | None:
    """Return the number of a trial; None for a baseline."""
    return int(name.removeprefix("trial ")) if name.startswith("trial ") else None


def make_costs(dataset: Dataset, device: str, *, refits: bool) -> AutoCosts:
    """Return what scoring an answer costs, before any candidate was timed."""
    counts, signature = dataset.num_windows, dataset.signature
    num_windows = counts["val"] + counts["test"]
    num_windows += counts["train"] // choose_train_stride(dataset)
    values = signature.steps_out * len(signature.targets)
    return AutoCosts(
        num_windows,
        VALUE_S[device] * num_windows * values,
        WRITE_S * counts["test"] * values,
        refits=refits,
    )


def parse_baseline(name: str) -> str:
    """Return the kind of a baseline from its name as a candidate."""
    return name.split(",")[0]


def get_sizes(dataset: Dataset) -> Tensor | None:
    """Return the sizes of a standard deviation in scaled units, [C]; None for classes."""
    signature, scaler = dataset.signature, dataset.scaler
    if signature.classes:
        return None
    return torch.tensor([scaler.size[name] / scaler.deviation[name] for name in signature.targets])


def get_naive_errors(config: Config, dataset: Dataset) -> Tensor | None:
    """Return the naive errors that a search judges by where each series is scaled by itself, as its
    verdict does; None elsewhere."""
    by_series = config.data.scale_by == "series" and config.tune.metric == "mae"
    signature = dataset.signature
    if not by_series or not signature.horizon or signature.quantiles or signature.classes:
        return None
    naive = dataset.naive_errors
    return naive if bool((naive > 0).any()) else None


class BaselineCandidate(NamedTuple):
    """A baseline that may become a member, as a network."""

    name: str
    config: Config
    baseline: Baseline
    seconds: float
    weights: Mapping[str, Tensor]


class FoldBaselines(NamedTuple):
    """What the baselines of one fold are fitted and judged on."""

    config: Config
    data: TrialData
    number: int
    starts: dict[str, Tensor]

    @property
    def dataset(self) -> Dataset:
        return self.data.dataset.select_fold(Fold("", self.starts))

    def load_chunks(self, set_name: str) -> Iterator[WindowChunk]:
        ids = torch.arange(len(self.data.dataset.index.series_names))
        yield WindowChunk(self.data.series, self.starts[set_name], 0, ids, None)

    @property
    def windows(self) -> BlockWindows:
        return BlockWindows(self.data.series, self.starts["val"], self.data.first_rows[self.number])


class SlowBaseline(NamedTuple):
    """A baseline that would take too long to be judged on all blocks."""

    name: str
    seconds: float
    """On one of them"""
    num_blocks: int

    @property
    def reason(self) -> str:
        return (
            f"{format_number(self.seconds, figures=2)} s a validation block, of which there are "
            f"{self.num_blocks}, is too much of the minutes"
        )


class BaselineFits:
    """The baselines as candidates: the quick ones are fitted at once, trees beside the trials."""

    def __init__(self, search: AutoSearch) -> None:
        self.search = search
        self.candidates: dict[str, BaselineCandidate] = {}
        """Those of the split itself, by name"""
        self.slow: list[SlowBaseline] = []
        """Those that are not judged on every block, which would take too long"""
        self._spent_s = 0.0
        facts, given = search.plan.facts, int(search.config.data.context)
        self.folds = list(self._list_folds(given))
        """Those that trees are fitted to"""
        self._fit(self.folds, without=("gbm",))
        longest = max(facts.contexts)
        if longest != given:
            # a season that the given context lacks may fit the longest
            without = ["gbm", "repeat", *(["seasonal"] if "seasonal" in self.candidates else [])]
            self._fit(list(self._list_folds(longest)), without=without)
        if facts.own_inputs:
            for rows in sorted({given, longest}):
                folds = list(self._list_folds(rows, is_own=True))
                self._fit(folds, without=("gbm", "repeat", "seasonal"))
        if context := find_useful_context(search.library, longest):
            self.folds = list(self._list_folds(context))
        prepared = [prepare_boosting(fold.dataset, fold.load_chunks) for fold in self.folds]
        self._boosting, self._has_trees = BackgroundBoosting(lambda: prepared), False

    def _list_folds(self, context: int, *, is_own: bool = False) -> Iterator[FoldBaselines]:
        search, facts = self.search, self.search.plan.facts
        changes: dict[str, Any] = {"data.context": context, "model.patch": 1}
        if is_own:
            changes["data.inputs"] = facts.own_inputs
        if facts.targets > 1 and facts.is_forecast and (is_own or facts.targets == facts.inputs):
            changes["data.channels"] = "independent"
        config = configs.replace_settings(search.config, changes)
        data = search.datasets.get(config)
        device = data.series.values.device
        for number, fold in enumerate(data.folds):
            starts = {name: rows.to(device) for name, rows in fold.items()}
            yield FoldBaselines(config, data, number, starts)

    def _fit(self, folds: Sequence[FoldBaselines], *, without: Collection[str]) -> None:
        """Fit the baselines of each block and keep their errors: those of the split itself first,
        then as many others as there is time for, the quickest first."""
        *earlier, newest = folds
        kinds = [kind for kind in list_baselines(newest.dataset) if kind not in without]
        seconds = {kind: self._fit_one(newest, kind) for kind in kinds}
        total_s = self.search.budget.total_s
        for kind in sorted(kinds, key=lambda kind: seconds[kind]):
            more_s, left_s = len(earlier) * seconds[kind], MAX_FITS_SHARE * total_s - self._spent_s
            if more_s <= max(left_s, FREE_FIT_SHARE * total_s):
                for fold in earlier:
                    self._fit_one(fold, kind)
                continue
            name = self.search.name_baseline(kind, newest.config.data)
            self.slow.append(SlowBaseline(name, seconds[kind], len(folds)))
            self.search.library.forget(name)
            self.candidates.pop(name, None)

    def _fit_one(self, fold: FoldBaselines, kind: str) -> float:
        """Fit a baseline to a block and keep its errors; return the seconds that it took."""
        began = time.perf_counter()
        others = [other for other in list_baselines(fold.dataset) if other != kind]
        baseline = fit_baselines(fold.dataset, fold.load_chunks, without=others)[kind]
        fitted_s = time.perf_counter() - began
        self._add(fold, kind, baseline, fitted_s)
        seconds = time.perf_counter() - began
        self._spent_s += seconds
        return seconds

    def _add(self, fold: FoldBaselines, kind: str, baseline: Baseline, seconds: float) -> None:
        """Keep the errors of a baseline on its block."""
        search, data = self.search, fold.data
        name = search.name_baseline(kind, fold.config.data)
        if fold.number == len(data.folds) - 1:
            search.keep_baseline(fold.config, kind, baseline)
        if baseline.predict is None:
            return
        anchors = search.library.blocks[fold.number].anchors
        wanted = find_block_starts(fold.windows, anchors, data.dataset.signature)
        units = search.get_units(data.dataset)
        with make_plan(search.config, data_bytes=0, training=False).flags():
            began = time.perf_counter()
            errors = compute_errors(baseline.predict, fold.windows, wanted, data.dataset, units)
            is_finite = bool(errors.isfinite().all())
        search.end_costs.record_errors(name, time.perf_counter() - began, len(wanted))
        if not is_finite:
            return
        quantiles = data.dataset.signature.quantiles
        if quantiles:  # a baseline predicts one number for all of them, and is no member
            errors = errors.expand(-1, len(quantiles))
        search.library.add(name, fold.number, errors)
        if quantiles:
            return
        if fold.number < len(data.folds) - 1:
            return
        network = make_network(kind, baseline.state, data.dataset.signature)
        if network is None:
            return  # it reads rows before its window, which a stream does not keep
        config = replace_model(fold.config, network.model)
        if kind == "ridge":
            plan = make_plan(config, data_bytes=0, training=False)
            predict = build_predictor(network.weights, config, data.dataset, plan)
            plain = ErrorUnits(get_sizes(data.dataset))
            network_errors, baseline_errors = (
                compute_errors(run, fold.windows, wanted, data.dataset, plain)
                for run in (predict, baseline.predict)
            )
            if float((network_errors - baseline_errors).abs().max()) > MAX_DIFFERENCE:
                return
        candidate = BaselineCandidate(name, config, baseline, seconds, network.weights)
        self.candidates[name] = candidate
        search.end_costs.fit_s[name] = seconds

    def add_trees(self, *, wait: bool = False) -> None:
        """Keep the errors of the trees once they are fitted."""
        if self._has_trees or not (wait or self._boosting.is_done):
            return
        self._has_trees = True
        for fold, trees in zip(self.folds, self._boosting.wait() or (), strict=False):
            others = [name for name in list_baselines(fold.dataset) if name != "gbm"]
            found = fit_baselines(fold.dataset, fold.load_chunks, None, trees, without=others)
            seconds = self._boosting.seconds / len(self.folds)
            self._add(fold, "gbm", found["gbm"], seconds)

    def finish(self) -> dict[str, BaselineCandidate]:
        """Wait for the trees, and return the candidates of the split itself."""
        self.add_trees(wait=True)
        return self.candidates


def replace_model(config: Config, model: Mapping[str, Any]) -> Config:
    """Return a config with these settings of `[model]` and no others, but for the limits of
    predictions, which are of the data."""
    loss = {} if config.data.task == "classify" else {"train.loss": "mse"}
    limits = config.model.output_range
    section = dict(model) | ({} if limits is None else {"output_range": limits})
    content = config.model_dump(exclude_unset=True) | {"model": section}
    return configs.replace_settings(Config.model_validate(content), loss)
