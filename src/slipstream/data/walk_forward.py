"""Walk-forward folds: the same series, split once for every test block.

Within a fold, training targets come before validation's and those before the test's: none knows the
future. A test window belongs to the fold whose block holds its first target row; the others may lie
in the next block, which that fold has not seen either. Together the folds test the windows of a
set over all blocks, each of them once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.config import Data, Signature
from slipstream.data import splits
from slipstream.data.series import Ints, SeriesIndex, Times, is_date
from slipstream.data.splits import TEST, TRAIN, VAL, SplitAssignment, WindowRanges
from slipstream.errors import UserError


@dataclass(frozen=True)
class FoldWindows:
    """The windows of one fold. Does not need torch."""

    label: str
    """Its test block: the first and last time, or row of the series"""
    assignment: SplitAssignment
    starts: dict[str, Ints]
    """First rows of the windows, by set"""
    left_out: dict[str, int]
    """Windows without a target, by set"""


def find_fold_windows(
    index: SeriesIndex, time: Times | None, data: Data, signature: Signature
) -> tuple[list[FoldWindows], list[str]]:
    """Return all folds, the earliest test block first, and notes; every set must have windows."""
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
            starts[name], left_out[name] = known, len(every) - len(known)
        folds.append(FoldWindows(label, assignment, starts, left_out))
    notes = [
        f"walk-forward in {len(walk)} folds: columns are scaled by the first fold's "
        f"{walk[0].count_rows(TRAIN):,} training rows, which every fold may know"
    ]
    if time is not None:
        notes += _describe_overlap(time, walk, data)
    return folds, notes


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
