"""Which windows are for training, validation and test."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import folds, splits, windows
from slipstream.data.folds import Fold
from slipstream.data.labels import selection
from slipstream.data.series import RawSeries, SeriesIndex
from slipstream.data.splits import SETS, SplitAssignment
from slipstream.data.windows import WindowRanges
from slipstream.errors import UserError


def split_windows(
    store: RawSeries, data: Data, signature: Signature
) -> tuple[dict[str, Tensor], tuple[Fold, ...], npt.NDArray[np.bool_], list[str]]:
    """The windows by set, the folds of a walk, the rows that training may know, and notes."""
    layout = store.index
    found: tuple[Fold, ...] = ()
    told: list[str] = []
    numbers = selection.read_class_numbers(store) if signature.classes else None
    if data.split.stratified:
        assert numbers is not None
        by_set, training = selection.split_stratified(layout, numbers, data, signature)
        return {name: torch.from_numpy(some) for name, some in by_set.items()}, (), training, []
    if data.split.walk_forward is None or signature.masked:
        runs, ranges = find_windows(layout, data, signature)
        starts = {name: torch.from_numpy(some.list_starts()) for name, some in ranges.items()}
    else:
        runs, found, told = folds.find_folds(layout, store.time, data, signature)
        starts = found[-1].starts
    if numbers is not None:
        starts = selection.filter_labelled(starts, numbers, signature)
        found = tuple(
            replace(
                fold,
                starts=selection.filter_labelled(fold.starts, numbers, signature, fold=fold.label),
            )
            for fold in found
        )
    return starts, found, runs.mask(splits.TRAIN, 0, layout.num_rows), told


def find_windows(
    layout: SeriesIndex, data: Data, signature: Signature
) -> tuple[SplitAssignment, dict[str, WindowRanges]]:
    """Which rows belong to which set, and each set's windows; every set must have some.

    An encoder's test rows are left alone, and so are those of a walk's first fold and all later.
    """
    runs = assign_first_split(layout, data)
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
        ranges["test"] = ranges["test"].restrict(0, 0)
    for index, (name, found) in enumerate(ranges.items()):
        if not (len(found) or (signature.masked and name == "test")):
            raise UserError(splits.explain_empty_set(name, layout, runs.count_rows(index), data))
    return runs, ranges


def assign_first_split(layout: SeriesIndex, data: Data) -> SplitAssignment:
    walks = data.split.walk_forward is not None
    return (
        splits.assign_walk_forward(layout, data.split)[0]
        if walks
        else splits.assign_rows(layout, data)
    )
