"""The data of every trial: read once for each `[data]` that trials ask for, and on the device."""

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
from slipstream.engine.single import resolve_class_weights
from slipstream.errors import UserError
from slipstream.training import loading

MOST = 4
"""Data sets that are kept at a time"""
Starts = dict[str, Tensor]


@dataclass(frozen=True)
class TrialData:
    """One `[data]`, ready to be trained on."""

    dataset: Dataset
    series: Series
    """One copy for each fold, scaled by that fold's training rows; the split's own comes first"""
    folds: tuple[Starts, ...]
    """What each lane of a trial trains and validates on; test windows are in none"""
    first_fold: Starts
    """The first fold's, within the split's own copy"""
    fingerprint: str
    init: Mapping[str, Tensor]
    """What models start from: the weights of a pre-trained encoder, if there is one"""

    def make_plan(self, config: Config) -> tuple[Plan, LaneMode]:
        """How a pack of such models is run."""
        data_bytes = len(self.folds) * self.dataset.data_bytes
        made = make_plan(config, data_bytes=data_bytes, lanes=True)
        mode, _ = pack_size.choose_mode(config, self.dataset.signature, made)
        return pack_size.adapt_plan_to_pack(made, mode), mode

    def apply_class_weights(self, config: Config) -> Config:
        """With balanced class weights from the first fold's training windows: all folds of a pack
        share them, and no later fold's labels are known to it."""
        return resolve_class_weights(config, self.dataset.select_fold(Fold("", self.first_fold)))


class DatasetCache:
    """Data by what was asked for."""

    def __init__(self, base: Config, table: Any = None) -> None:
        self.config, self.table = base, table
        self._kept: OrderedDict[str, TrialData] = OrderedDict()

    def get(self, config: Config) -> TrialData:
        key = config.data.model_dump_json() + str(config.train.loss)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._read(config)
        self._kept[key] = found
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)
        return found

    def _read(self, config: Config) -> TrialData:
        count = self.config.tune.folds or 1
        init, dataset = loading.load_dataset(config, self.table, num_folds=count)
        made = make_plan(config, data_bytes=count * dataset.data_bytes, lanes=True)
        if dataset.memory is None or made.home != "device":
            raise UserError(
                "a search trains many models from one copy of the series for each fold, on the "
                f"device, but they are to live elsewhere ({made.home}: {made.reasons['home']}); "
                "leave engine.home as it is, cut the data, or lower tune.folds"
            )
        memory, earlier = dataset.memory, dataset.search_folds
        # of a walk, the first fold: what comes later is tested on
        starts = dataset.folds[0].starts if dataset.folds else memory.starts
        last = {name: starts[name] for name in ("train", "val")}
        series, first_rows = windows.concatenate_series(
            [memory.series, *(one.series for one in earlier)]
        )
        return TrialData(
            replace(dataset, search_folds=()),
            series.to(made.device),
            (*map(_moved, (one.starts for one in earlier), first_rows[1:]), last),
            earlier[0].starts if earlier else last,
            dataset.compute_fingerprint(),
            init.weights if init else {},
        )


def _moved(starts: Starts, rows: int) -> Starts:
    return {name: some + rows for name, some in starts.items()}
