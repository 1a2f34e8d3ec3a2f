"""Which windows are for training, validation and test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import folds, labelled, splits, windows
from slipstream.data.folds import Fold
from slipstream.data.prepare import Layout, Store
from slipstream.data.splits import SETS, Runs
from slipstream.data.windows import Ranges
from slipstream.errors import UserError


def divide(
    store: Store, data: Data, signature: Signature
) -> tuple[dict[str, Tensor], tuple[Fold, ...], npt.NDArray[np.bool_], list[str]]:
    """The windows by set, the folds of a walk, the rows that training may know, and notes."""
    layout = store.layout
    found: tuple[Fold, ...] = ()
    told: list[str] = []
    numbers = labelled.numbers(store) if signature.classes else None
    if data.split.stratified:
        assert numbers is not None
        by_set, training = labelled.stratified(layout, numbers, data, signature)
        return {name: torch.from_numpy(some) for name, some in by_set.items()}, (), training, []
    if data.split.walk_forward is None or signature.masked:
        runs, ranges = find_windows(layout, data, signature)
        starts = {name: torch.from_numpy(some.starts()) for name, some in ranges.items()}
    else:
        runs, found, told = folds.find(layout, store.time, data, signature)
        starts = found[-1].starts
    if numbers is not None:
        starts = labelled.kept(starts, numbers, signature)
        found = tuple(
            replace(fold, starts=labelled.kept(fold.starts, numbers, signature, fold=fold.label))
            for fold in found
        )
    return starts, found, runs.mask(splits.TRAIN, 0, layout.num_rows), told


def find_windows(
    layout: Layout, data: Data, signature: Signature
) -> tuple[Runs, dict[str, Ranges]]:
    """Which rows belong to which set, and each set's windows; every set must have some.

    An encoder's test rows are left alone, and so are those of a walk's first fold and all later.
    """
    runs = assigned(layout, data)
    ranges = {
        name: windows.find_ranges(
            layout.breaks,
            runs,
            which=index,
            lead=signature.lead,
            steps_out=signature.steps_out,
            stride=data.stride,
        )
        for index, name in enumerate(SETS)
    }
    if signature.masked:
        ranges["test"] = ranges["test"].within(0, 0)
    for index, (name, found) in enumerate(ranges.items()):
        if not (len(found) or (signature.masked and name == "test")):
            raise UserError(splits.no_window(name, layout, runs.count(index), data))
    return runs, ranges


def assigned(layout: Layout, data: Data) -> Runs:
    walks = data.split.walk_forward is not None
    return splits.walk_forward(layout, data.split)[0] if walks else splits.assign(layout, data)
