"""Walk-forward folds: the same series, split once for every test block.

Within a fold, training targets come before validation's and those before the test's: none knows the
future. A test window belongs to the fold whose block holds its first target row; the others may lie
in the next block, which that fold has not seen either. Together the folds test the windows of a
set over all blocks, each of them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import splits, windows
from slipstream.data.series import Flags, Ints, SeriesIndex, Times, is_date
from slipstream.data.splits import TEST, TRAIN, VAL, SplitAssignment
from slipstream.errors import UserError


@dataclass(frozen=True)
class Fold:
    """One split of a walk-forward split."""

    label: str
    """When its test block is: times, or rows of the series, first and last"""
    starts: dict[str, Tensor]
    """First rows of the windows, by set"""

    @property
    def num_windows(self) -> dict[str, int]:
        """Windows, by set"""
        return {name: len(starts) for name, starts in self.starts.items()}


def find_folds(
    layout: SeriesIndex, time: Times | None, data: Data, signature: Signature
) -> tuple[SplitAssignment, tuple[Fold, ...], list[str]]:
    """The first fold's rows by set, every fold, and notes; each set of each fold has windows."""
    walk = splits.assign_walk_forward(layout, data.split)
    blocks = splits.merge_test_blocks(layout, walk)
    every_test = _starts(layout.breaks, blocks, TEST, data, signature)
    found = []
    for index, runs in enumerate(walk):
        tested = runs.mask(TEST, 0, layout.num_rows)
        starts = {
            "train": _starts(_training_breaks(layout, runs), runs, TRAIN, data, signature),
            "val": _starts(layout.breaks, runs, VAL, data, signature),
            "test": every_test[tested[every_test + signature.lead]],
        }
        number = f"{index + 1} of {len(walk)}"
        for which, (name, some) in enumerate(starts.items()):
            if not len(some):
                rows = runs.count_rows(which)
                raise UserError(splits.explain_empty_set(name, layout, rows, data, fold=number))
        label = _label(layout, time, runs, data) or f"block {number}"
        found.append(Fold(label, {name: torch.from_numpy(some) for name, some in starts.items()}))
    notes = [
        f"walk-forward in {len(walk)} folds: columns are scaled by the first fold's "
        f"{walk[0].count_rows(TRAIN):,} training rows, which every fold may know"
    ]
    if time is not None:
        notes += _apart(time, walk, data)
    return walk[0], tuple(found), notes


def find_search_folds(
    starts: dict[str, Tensor], count: int, *, offsets: Tensor, signature: Signature, purge: int
) -> tuple[dict[str, Tensor], ...]:
    """Folds of what a split trains and validates on: its own validation block is the last one's,
    and every fold before has the block of that length before it, with earlier rows to train on.

    Nothing of the test windows is in any of them.
    """
    train, val = starts["train"], starts["val"]
    if count == 1:
        return ({"train": train, "val": val},)
    both = torch.cat([train, val]).unique()
    owner = torch.bucketize(both, offsets, right=True) - 1
    whose = torch.bucketize(val, offsets, right=True) - 1
    first = torch.full((len(offsets) - 1,), torch.iinfo(torch.int64).max)
    first.scatter_reduce_(0, whose, val + signature.lead, "amin")
    last = torch.zeros(len(offsets) - 1, dtype=torch.int64)
    last.scatter_reduce_(0, whose, val + signature.lead + signature.steps_out, "amax")
    length = last - first
    begin, end = both + signature.lead, both + signature.lead + signature.steps_out
    found = []
    for back in range(count - 1, 0, -1):
        block = first[owner] - back * length[owner]
        known = length[owner] > 0
        fold = {
            "train": both[known & (end <= block - purge)],
            "val": both[known & (begin >= block) & (end <= block + length[owner])],
        }
        for name, some in fold.items():
            if not len(some):
                raise UserError(
                    f"tune.folds = {count}: fold {count - back} has no {name} windows; the "
                    "validation rows must come after training rows of the same series, and so many "
                    "times their length before them; lower it"
                )
        found.append(fold)
    return (*found, {"train": train, "val": val})


def select_known_rows(
    training: Flags, starts: Tensor, layout: SeriesIndex, signature: Signature
) -> Flags:
    """Of the rows that are for `training`, those up to the last target row of a fold's training
    windows, series by series: what that fold may know."""
    first = starts.numpy()
    owner = np.searchsorted(layout.offsets, first, side="right") - 1
    ends = np.zeros(len(layout.series_names), dtype=np.int64)
    np.maximum.at(ends, owner, first + signature.lead + signature.steps_out)
    return training & (np.arange(layout.num_rows) < np.repeat(ends, np.diff(layout.offsets)))


def _starts(
    breaks: Ints, runs: SplitAssignment, which: int, data: Data, signature: Signature
) -> Ints:
    return windows.find_ranges(
        breaks,
        runs,
        which=which,
        lead=signature.lead,
        steps_out=signature.steps_out,
        stride=data.stride,
    ).list_starts()


def _training_breaks(layout: SeriesIndex, runs: SplitAssignment) -> Ints:
    """Breaks also where each series' training begins: what a rolling fold forgot is no context."""
    begins = runs.begins[runs.sets == TRAIN]
    owners = np.searchsorted(layout.offsets, begins, side="right")
    return np.union1d(layout.breaks, begins[np.diff(owners, prepend=0) > 0])


def _label(layout: SeriesIndex, time: Times | None, runs: SplitAssignment, data: Data) -> str:
    """The test block's first and last time; without times, its rows where series agree on them."""
    mine = runs.sets == TEST
    first, last = runs.begins[mine], runs.ends[mine] - 1
    if time is None:
        begins = layout.offsets[np.searchsorted(layout.offsets, first, side="right") - 1]
        spans = set(zip((first - begins).tolist(), (last - begins).tolist(), strict=True))
        return "rows {} to {}".format(*spans.pop()) if len(spans) == 1 else ""
    return " to ".join(_moments(data, time[first].min(), time[last].max()))


def _moments(data: Data, *times: Any) -> list[str]:
    """Times as text: dates, or plain numbers of the time column."""
    if is_date(np.asarray(times)):
        return _dates(*times)
    first, *others = (f"{time:.15g}" for time in times)
    return [f"{data.time} {first}", *others]


def _dates(*microseconds: int) -> list[str]:
    """Times as text, to the day, minute or second where nothing finer is needed."""
    times = np.array(microseconds, dtype="datetime64[us]")
    units: tuple[npt.DTypeLike, ...] = ("datetime64[D]", "datetime64[m]", "datetime64[s]")
    for unit in units:
        if (times.astype(unit) == times).all():
            return [str(one).replace("T", " ") for one in times.astype(unit)]
    return [str(one).replace("T", " ") for one in times]


def _apart(time: Times, walk: tuple[SplitAssignment, ...], data: Data) -> list[str]:
    """A note where one series' training is later than another's test."""
    for index, runs in enumerate(walk):
        learnt = (runs.sets == TRAIN) | (runs.sets == VAL)
        latest = time[runs.ends[learnt] - 1].max()
        earliest = time[runs.begins[runs.sets == TEST]].min()
        if latest >= earliest:
            until, since = _moments(data, latest, earliest)
            return [
                f"walk-forward cuts each series in itself, and they do not end together: fold "
                f"{index + 1} learns from rows up to {until}, and is tested from {since} on"
            ]
    return []
