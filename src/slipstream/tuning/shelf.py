"""The data of every trial: read once for each `[data]` that trials ask for, and on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.data import folds
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series
from slipstream.engine import packing, plan
from slipstream.engine.passes import Mode
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.training import reading

MOST = 4
"""Data sets that are kept at a time"""
Starts = dict[str, Tensor]


@dataclass(frozen=True)
class Ready:
    """One `[data]`, ready to be trained on."""

    dataset: Dataset
    series: Series
    folds: tuple[Starts, ...]
    """What each lane of a trial trains and validates on; test windows are in none"""
    fingerprint: str
    init: Mapping[str, Tensor]
    """What models start from: the weights of a pre-trained encoder, if there is one"""

    def plan(self, config: Config) -> tuple[Plan, Mode]:
        """How a pack of such models is run."""
        made = plan.make(config, data_bytes=self.dataset.data_bytes, lanes=True)
        mode, _ = packing.mode_for(config, self.dataset.signature, made)
        return packing.as_pack(made, mode), mode


class Shelf:
    """Data by what was asked for."""

    def __init__(self, base: Config, table: Any = None) -> None:
        self.base, self.table = base, table
        self._kept: OrderedDict[str, Ready] = OrderedDict()

    def get(self, config: Config) -> Ready:
        key = config.data.model_dump_json() + str(config.train.loss)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._read(config)
        self._kept[key] = found
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)
        return found

    def _read(self, config: Config) -> Ready:
        init, dataset = reading.load(config, self.table)
        made = plan.make(config, data_bytes=dataset.data_bytes, lanes=True)
        if dataset.memory is None or made.home != "device":
            raise UserError(
                "a search trains many models from one copy of the series on the device, but they "
                f"are to live elsewhere ({made.home}: {made.reasons['home']}); leave engine.home "
                "as it is, or cut the data"
            )
        memory = dataset.memory
        # of a walk, the first fold: what comes later is tested on
        starts = dataset.folds[0].starts if dataset.folds else memory.starts
        walked = folds.back_from(
            starts,
            self.base.tune.folds or 1,
            offsets=torch.from_numpy(dataset.layout.offsets),
            signature=dataset.signature,
            purge=config.data.split.purge,
        )
        return Ready(
            dataset,
            memory.series.to(made.device),
            walked,
            dataset.fingerprint(),
            init.weights if init else {},
        )
