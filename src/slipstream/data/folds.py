"""Walk-forward folds: the same series, split once for every test block.

Within a fold, training targets come before validation's and those before the test's: none knows the
future. A test window belongs to the fold whose block holds its first target row; the others may lie
in the next block, which that fold has not seen either. Together the folds test the windows of a
set over all blocks, each of them once.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import Data, Signature
from slipstream.data import splits
from slipstream.data.series import Flags, Ints, SeriesIndex, Times, is_date
from slipstream.data.splits import TEST, TRAIN, VAL, SplitAssignment, WindowRanges
from slipstream.errors import UserError


@dataclass(frozen=True)
class Fold:
    """One split of a walk-forward split."""

    label: str
    """Its test block: the first and last time, or row of the series"""
    starts: dict[str, Tensor]
    """First rows of the windows, by set"""
    left_out: dict[str, int] = field(default_factory=dict)
    """Windows without a target, by set"""

    @property
    def num_windows(self) -> dict[str, int]:
        """Windows, by set"""
        return {name: len(starts) for name, starts in self.starts.items()}


def find_folds(
    index: SeriesIndex, time: Times | None, data: Data, signature: Signature
) -> tuple[SplitAssignment, tuple[Fold, ...], list[str]]:
    """Return the first fold's assignment, all folds, and notes; every set must have windows."""
    walk = splits.assign_walk_forward(index, data.split)
    blocks = splits.merge_test_blocks(index, walk)

    def find(breaks: Ints, assignment: SplitAssignment, which: int) -> WindowRanges:
        return splits.find_set_windows(breaks, assignment, which, data, signature)

    every_test = find(index.breaks, blocks, TEST)
    folds = []
    for fold, assignment in enumerate(walk, start=1):
        # series break also where training begins: rows before a rolling fold are no context
        begins = assignment.begins[assignment.sets == TRAIN]
        owners = np.searchsorted(index.offsets, begins, side="right")
        breaks = np.union1d(index.breaks, begins[np.diff(owners, prepend=0) > 0])
        ranges = {
            "train": find(breaks, assignment, TRAIN),
            "val": find(index.breaks, assignment, VAL),
            "test": every_test,
        }
        mine = assignment.mask(TEST)
        number = f"{fold} of {len(walk)}"
        label = _describe_block(index, time, assignment, data) or f"block {number}"
        starts, left_out = {}, {}
        for which, (name, some) in enumerate(ranges.items()):
            every, known = some.list_starts(), some.exclude(index.unknown, signature).list_starts()
            if name == "test":
                every, known = (rows[mine[rows + signature.lead]] for rows in (every, known))
            if not len(every):
                rows = assignment.count_rows(which)
                raise UserError(splits.explain_empty_set(name, index, rows, data, fold=number))
            splits.refuse_unknown(name, len(every), len(known), signature, fold=label)
            starts[name], left_out[name] = torch.from_numpy(known), len(every) - len(known)
        folds.append(Fold(label, starts, left_out))
    notes = [
        f"walk-forward in {len(walk)} folds: columns are scaled by the first fold's "
        f"{walk[0].count_rows(TRAIN):,} training rows, which every fold may know"
    ]
    if time is not None:
        notes += _describe_overlap(time, walk, data)
    return walk[0], tuple(folds), notes


def find_search_folds(
    starts: dict[str, Tensor], count: int, offsets: Tensor, signature: Signature, purge: int
) -> tuple[dict[str, Tensor], ...]:
    """Return the folds of a search, train and val windows only.

    The last fold is the split itself. Every fold before it validates on the block of the same
    length before the next fold's, and trains on earlier rows. No fold has a test window.
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
    folds = []
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
                    f"tune.folds = {count}: fold {count - back} has no {name} windows; each fold "
                    "validates on a block of rows before the last one's, so there must be that "
                    "many blocks of training rows; reduce tune.folds"
                )
        folds.append(fold)
    return (*folds, {"train": train, "val": val})


def select_known_rows(
    training: Flags, starts: Tensor, index: SeriesIndex, signature: Signature
) -> Flags:
    """Return the `training` rows up to the last target row of a fold's training windows, series by
    series: those that the fold may be scaled by."""
    first = starts.numpy()
    owner = np.searchsorted(index.offsets, first, side="right") - 1
    ends = np.zeros(len(index.series_names), dtype=np.int64)
    np.maximum.at(ends, owner, first + signature.lead + signature.steps_out)
    return training & (np.arange(index.num_rows) < np.repeat(ends, np.diff(index.offsets)))


def _describe_block(
    index: SeriesIndex, time: Times | None, assignment: SplitAssignment, data: Data
) -> str:
    """Name the test block's first and last time; without times, its rows if all series agree."""
    mine = assignment.sets == TEST
    first, last = assignment.begins[mine], assignment.ends[mine] - 1
    if time is None:
        begins = index.offsets[np.searchsorted(index.offsets, first, side="right") - 1]
        spans = set(zip((first - begins).tolist(), (last - begins).tolist(), strict=True))
        return "rows {} to {}".format(*spans.pop()) if len(spans) == 1 else ""
    return " to ".join(_format_times(data, time[first].min(), time[last].max()))


def _format_times(data: Data, *times: Any) -> list[str]:
    """Format dates, to the day, minute or second where nothing finer is needed, or numbers."""
    if not is_date(np.asarray(times)):
        first, *others = (f"{time:.15g}" for time in times)
        return [f"{data.time_column} {first}", *others]
    dates = np.array(times, dtype="datetime64[us]")
    rounded = (dates.astype(f"datetime64[{unit}]") for unit in ("D", "m", "s"))
    shortest = next((some for some in rounded if (some == dates).all()), dates)
    return [str(date).replace("T", " ") for date in shortest]


def _describe_overlap(time: Times, walk: tuple[SplitAssignment, ...], data: Data) -> list[str]:
    """Note where one series' training is later than another's test."""
    for fold, assignment in enumerate(walk, start=1):
        learnt = (assignment.sets == TRAIN) | (assignment.sets == VAL)
        latest = time[assignment.ends[learnt] - 1].max()
        earliest = time[assignment.begins[assignment.sets == TEST]].min()
        if latest >= earliest:
            until, since = _format_times(data, latest, earliest)
            return [
                f"walk-forward cuts each series in itself, and they do not end together: fold "
                f"{fold} learns from rows up to {until}, and is tested from {since} on"
            ]
    return []
