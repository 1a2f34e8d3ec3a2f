"""Which rows are for training, validation and test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.config import Data, Scalar
from slipstream.data.prepare import Store, as_text
from slipstream.errors import UserError

SETS = ("train", "val", "test")
UNUSED = len(SETS)


def assign(store: Store, data: Data) -> npt.NDArray[np.int8]:
    """Per row its set: an index into SETS, or UNUSED."""
    split = data.split
    if split.by is not None:
        return _by_value(store, data)
    if split.folders:
        unknown = [name for name in store.group_names if name not in SETS]
        if unknown:
            raise UserError(
                f'data.split.folders: "{unknown[0]}" is neither train/, val/ nor test/ below '
                "data.path"
            )
        order = np.array([SETS.index(name) for name in store.group_names], dtype=np.int8)
        return order[store.groups]
    sets = np.full(store.num_rows, UNUSED, dtype=np.int8)
    for start, stop in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        borders = start + np.cumsum([0, *_counts(data, int(stop - start))])
        for index in range(len(SETS)):
            sets[borders[index] : min(borders[index + 1], stop)] = index
    return sets


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


def _by_value(store: Store, data: Data) -> npt.NDArray[np.int8]:
    split = data.split
    asked: dict[str, int] = {}
    for index, name in enumerate(SETS):
        values = getattr(split, name)
        for value in values or ():
            text = as_text(value)
            if asked.setdefault(text, index) != index:
                raise UserError(f'data.split: "{value}" is in both {SETS[asked[text]]} and {name}')
            if text not in store.group_names:
                _refuse_unknown(store, data, name, value)
    rest = UNUSED if split.train is not None else SETS.index("train")
    order = np.array([asked.get(name, rest) for name in store.group_names], dtype=np.int8)
    return order[store.groups]


def _refuse_unknown(store: Store, data: Data, name: str, value: Scalar) -> None:
    found = ", ".join(store.group_names[:20])
    raise UserError(
        f'data.split.{name} names "{value}", which "{data.split.by}" never is; it has {found}'
    )
