"""Which rows are for training, validation and test."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.config import Data, Scalar
from slipstream.data.prepare import Ints, Layout
from slipstream.data.roles import as_text
from slipstream.errors import UserError

SETS = ("train", "val", "test")
UNUSED = len(SETS)


@dataclass(frozen=True)
class Runs:
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

    def count(self, which: int) -> int:
        return int((self.ends - self.begins)[self.sets == which].sum())


def assign(layout: Layout, data: Data) -> Runs:
    """Each row's set."""
    split = data.split
    if split.by is not None or split.folders:
        order = _by_value(layout, data) if split.by is not None else _by_folder(layout)
        return Runs(layout.group_begins, order[layout.group_codes], layout.num_rows)
    begins, sets = [], []
    for start, stop in zip(layout.offsets[:-1], layout.offsets[1:], strict=True):
        borders = start + np.cumsum([0, *_counts(data, int(stop - start))])
        for index in range(len(SETS) + 1):
            if borders[index] < stop and (index == UNUSED or borders[index] < borders[index + 1]):
                begins.append(int(borders[index]))
                sets.append(index)
    return Runs(np.array(begins), np.array(sets, dtype=np.int8), layout.num_rows)


def _by_folder(layout: Layout) -> npt.NDArray[np.int8]:
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
    assert isinstance(test, float)
    # borders are rounded, not lengths, so that shares which add up to 1 use every row
    first, second, third = (round(num_rows * s) for s in (train, train + val, train + val + test))
    return first, second - first, third - second


def _by_value(layout: Layout, data: Data) -> npt.NDArray[np.int8]:
    split = data.split
    asked: dict[str, int] = {}
    for index, name in enumerate(SETS):
        values = getattr(split, name)
        for value in values or ():
            text = as_text(value)
            if asked.setdefault(text, index) != index:
                raise UserError(f'data.split: "{value}" is in both {SETS[asked[text]]} and {name}')
            if text not in layout.group_names:
                _refuse_unknown(layout, data, name, value)
    rest = UNUSED if split.train is not None else SETS.index("train")
    return np.array([asked.get(name, rest) for name in layout.group_names], dtype=np.int8)


def _refuse_unknown(layout: Layout, data: Data, name: str, value: Scalar) -> None:
    found = ", ".join(layout.group_names[:20])
    raise UserError(
        f'data.split.{name} names "{value}", which "{data.split.by}" never is; it has {found}'
    )
