"""Which rows are for training, validation and test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.config import Data, Scalar, Split
from slipstream.data.roles import normalize_value
from slipstream.data.series import Ints, SeriesIndex
from slipstream.errors import UserError

SETS = ("train", "val", "test")
TRAIN, VAL, TEST = range(len(SETS))
UNUSED = len(SETS)


@dataclass(frozen=True)
class SplitAssignment:
    """Which set the rows belong to, as runs of rows of one set."""

    begins: Ints
    sets: npt.NDArray[np.int8]
    """An index into SETS, or UNUSED"""
    num_rows: int

    @property
    def ends(self) -> Ints:
        return np.append(self.begins[1:], self.num_rows)

    def mask(self, which: int, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """For the rows from `begin` to before `end`: is it in this set?"""
        rows = np.zeros(end - begin, dtype=bool)
        mine = (self.sets == which) & (self.begins < end) & (self.ends > begin)
        for first, last in zip(self.begins[mine], self.ends[mine], strict=True):
            rows[max(first - begin, 0) : last - begin] = True
        return rows

    def find_series(self, which: int, offsets: Ints) -> npt.NDArray[np.bool_]:
        """For every series, from one offset to before the next: has it a row in this set?"""
        mine = (self.sets == which) & (self.begins < self.ends)
        first = np.searchsorted(offsets, self.begins[mine], side="right") - 1
        last = np.searchsorted(offsets, self.ends[mine] - 1, side="right") - 1
        begun = np.bincount(first, minlength=len(offsets))
        ended = np.bincount(last + 1, minlength=len(offsets))
        return np.cumsum(begun - ended)[: len(offsets) - 1] > 0

    def count_rows(self, which: int) -> int:
        return int((self.ends - self.begins)[self.sets == which].sum())


def assign_rows(layout: SeriesIndex, data: Data) -> SplitAssignment:
    """Each row's set."""
    split = data.split
    if split.by is not None or split.folders:
        order = _by_value(layout, data) if split.by is not None else _by_folder(layout)
        return SplitAssignment(layout.group_begins, order[layout.group_codes], layout.num_rows)
    begins, sets = [], []
    for start, stop in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        borders = start + np.cumsum([0, *_counts(data, int(stop - start))])
        for index in range(len(SETS) + 1):
            if borders[index] < stop and (index == UNUSED or borders[index] < borders[index + 1]):
                begins.append(int(borders[index]))
                sets.append(index)
    return SplitAssignment(np.array(begins), np.array(sets, dtype=np.int8), layout.num_rows)


def assign_walk_forward(layout: SeriesIndex, split: Split) -> tuple[SplitAssignment, ...]:
    """Each row's set in every fold; the fold with the earliest test block comes first."""
    assert split.walk_forward is not None
    return tuple(_fold(layout, split, index) for index in range(split.walk_forward))


def merge_test_blocks(layout: SeriesIndex, folds: Sequence[SplitAssignment]) -> SplitAssignment:
    """The test blocks of all folds as one test set; everything else is unused."""
    sets = np.full(layout.num_rows, UNUSED, dtype=np.int8)
    for runs in folds:
        sets[runs.mask(TEST, 0, layout.num_rows)] = TEST
    return _as_runs(layout, sets)


def _fold(layout: SeriesIndex, split: Split, index: int) -> SplitAssignment:
    sets = np.full(layout.num_rows, UNUSED, dtype=np.int8)
    for start, stop in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        _lay_fold(sets[start:stop], split, index)
    return _as_runs(layout, sets)


def _lay_fold(sets: npt.NDArray[np.int8], split: Split, index: int) -> None:
    """Write one series' sets. What does not fit before its start is cut off."""
    num_rows, folds, purge = len(sets), split.walk_forward, split.purge
    assert folds is not None
    assert isinstance(split.val, float)
    assert isinstance(split.test, float)
    block = int(num_rows * split.test / folds + 1e-9)  # 0.29 * 100 is a little less than 29
    ahead = purge + round(num_rows * split.val) + purge  # between training and the test block
    blocks = num_rows - folds * block + block * np.arange(folds)
    test = int(blocks[index])
    train_end = max(test - ahead, 0)
    longest = max(int(blocks[0]) - ahead, 0) if split.window == "rolling" else train_end
    sets[train_end - longest : train_end] = TRAIN
    for before in blocks[:index] + block:
        sets[before : before + split.embargo] = UNUSED
    sets[max(test - ahead + purge, 0) : max(test - purge, 0)] = VAL
    sets[test : test + block] = TEST


def _as_runs(layout: SeriesIndex, sets: npt.NDArray[np.int8]) -> SplitAssignment:
    changes = np.flatnonzero(np.diff(sets, prepend=np.int8(-1)))
    begins = np.union1d(changes, layout.offsets[:-1])
    return SplitAssignment(begins, sets[begins], layout.num_rows)


def _by_folder(layout: SeriesIndex) -> npt.NDArray[np.int8]:
    unknown = [name for name in layout.group_names if name not in SETS]
    if unknown:
        raise UserError(
            f'data.split.folders: "{unknown[0]}" is neither train/, val/ nor test/ below data.path'
        )
    return np.array([SETS.index(name) for name in layout.group_names], dtype=np.int8)


def _counts(data: Data, num_rows: int) -> tuple[int, int, int]:
    split = data.split
    if split.rows is not None:
        return split.rows[0], split.rows[1], split.rows[2]
    train, val, test = split.train, split.val, split.test
    assert isinstance(train, float)
    assert isinstance(val, float)
    test = test if isinstance(test, float) else 0.0
    # borders are rounded, not lengths, so that shares which add up to 1 use every row
    first, second, third = (round(num_rows * s) for s in (train, train + val, train + val + test))
    return first, second - first, third - second


def _by_value(layout: SeriesIndex, data: Data) -> npt.NDArray[np.int8]:
    split = data.split
    asked: dict[str, int] = {}
    for index, name in enumerate(SETS):
        values = getattr(split, name)
        for value in values or ():
            text = normalize_value(value)
            if asked.setdefault(text, index) != index:
                raise UserError(f'data.split: "{value}" is in both {SETS[asked[text]]} and {name}')
            if text not in layout.group_names:
                _refuse_unknown(layout, data, name, value)
    rest = UNUSED if split.train is not None else SETS.index("train")
    return np.array([asked.get(name, rest) for name in layout.group_names], dtype=np.int8)


def _refuse_unknown(layout: SeriesIndex, data: Data, name: str, value: Scalar) -> None:
    found = ", ".join(layout.group_names[:20])
    raise UserError(
        f'data.split.{name} names "{value}", which "{data.split.by}" never is; it has {found}'
    )


def explain_empty_set(
    name: str, layout: SeriesIndex, rows: int, data: Data, *, fold: str = ""
) -> str:
    """Why a set, or a fold's set, is empty, and what would fill it."""
    gaps = len(layout.breaks) - len(layout.series_names)
    leaves = f"data.split.walk_forward leaves fold {fold}" if fold else "data.split leaves"
    message = (
        f"{leaves} no {name} window: its {rows:,} rows hold no {max(data.horizon, 1)} target rows "
        f"in one piece with {data.context} context rows"
    )
    if gaps:
        message += (
            f"; {gaps:,} gaps in time break the series up (raise data.gap_tolerance, or set it "
            "to inf to take rows as they follow)"
        )
    remedy = _fuller(name, data.split) if fold else "give it more rows"
    return f"{message}; {remedy}, or shorten data.context or data.horizon"


def _fuller(name: str, split: Split) -> str:
    """Which settings give the folds' sets of this name more rows."""
    if name == "test":
        return "raise data.split.test or lower data.split.walk_forward"
    if name == "val":
        return "raise data.split.val"
    costs = ["val", "test", *(each for each in ("purge", "embargo") if getattr(split, each))]
    return f"lower data.split.{' or data.split.'.join(costs)}"
