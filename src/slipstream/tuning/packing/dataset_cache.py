"""Loads the data of trials, once for each distinct `[data]`, and keeps it on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from slipstream.autotune import pack_size
from slipstream.autotune.rules import make_plan
from slipstream.config import Config
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.folds import Fold
from slipstream.data.windows import Series
from slipstream.engine.lanes.gradients import LaneMode
from slipstream.engine.plan import Plan
from slipstream.engine.single import resolve_settings
from slipstream.errors import UserError
from slipstream.training.context import load_dataset
from slipstream.training.encoder import EncoderMatch

MAX_DATASETS = 4
Starts = dict[str, Tensor]
"""The first rows of the windows, by set ("train", "val")"""


@dataclass(frozen=True)
class TrialData:
    """The data of one `[data]` section on the device, with the windows of every fold."""

    dataset: Dataset
    series: Series
    """One copy per fold, scaled by the training rows of that fold; that of the split comes first"""
    folds: tuple[Starts, ...]
    """The training and validation windows of each fold; test windows are in none"""
    first_fold: Starts
    """The windows of the first fold, in the copy of the split"""
    fingerprint: str
    encoder: EncoderMatch | None
    """The pre-trained encoder that models start from, if there is one"""

    @property
    def init(self) -> Mapping[str, Tensor]:
        """The weights of the encoder"""
        return self.encoder.weights if self.encoder else {}

    def select_folds(self, num_folds: int) -> TrialData:
        """Return the data for trials of so many folds: all, or the split itself for one."""
        if num_folds == len(self.folds):
            return self
        (*_, split) = self.folds
        return replace(self, folds=(split,), first_fold=split)

    def make_plan(self, config: Config) -> tuple[Plan, LaneMode]:
        """Plan a pack of models with this config."""
        data_bytes = len(self.folds) * self.dataset.data_bytes
        plan = make_plan(config, data_bytes=data_bytes, lanes=True)
        mode, _ = pack_size.choose_mode(config, self.dataset.signature, plan)
        return pack_size.adapt_plan_to_pack(plan, mode), mode

    def resolve_settings(self, config: Config) -> Config:
        """Resolve what depends on the data; class weights from the training windows of the first
        fold: all folds of a pack share them, and the first must not use labels of later ones."""
        return resolve_settings(config, self.dataset.select_fold(Fold("", self.first_fold)))


class DatasetCache:
    """The most recently used data, by what a config requests."""

    def __init__(self, config: Config, table: Any = None) -> None:
        self.config, self.table = config, table
        self._cache: OrderedDict[str, TrialData] = OrderedDict()

    def get(self, config: Config) -> TrialData:
        key = f"{config.data.model_dump_json()} {config.train.loss} {config.train.quantiles}"
        if key not in self._cache:
            self._cache[key] = self._load(config)
        self._cache.move_to_end(key)
        if len(self._cache) > MAX_DATASETS:
            self._cache.popitem(last=False)
        return self._cache[key]

    def _load(self, config: Config) -> TrialData:
        num_folds = self.config.tune.folds or 1
        init, dataset = load_dataset(config, self.table, num_folds=num_folds)
        plan = make_plan(config, data_bytes=num_folds * dataset.data_bytes, lanes=True)
        if dataset.memory is None or plan.home != "device":
            raise UserError(
                "a search keeps one copy of the series per fold on the device, but the plan puts "
                f"the data elsewhere ({plan.home}: {plan.reasons['home']}); leave engine.home "
                "unset, use less data, or lower tune.folds"
            )
        memory, earlier = dataset.memory, dataset.search_folds
        # the first fold of a walk-forward split: the later ones are test data
        starts = dataset.folds[0].starts if dataset.folds else memory.starts
        last = {name: starts[name] for name in ("train", "val")}
        copies = [memory.series, *(fold.series for fold in earlier)]
        series, first_rows = windows.concatenate_series(copies)
        shifted = [
            {name: first + rows for name, first in fold.starts.items()}
            for fold, rows in zip(earlier, first_rows[1:], strict=True)
        ]
        return TrialData(
            replace(dataset, search_folds=()),
            series.to(plan.device),
            (*shifted, last),
            earlier[0].starts if earlier else last,
            dataset.compute_fingerprint(),
            init,
        )
