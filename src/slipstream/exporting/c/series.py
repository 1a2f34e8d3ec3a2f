"""The rows of a run's series before and after `data.prepare`, to compare the C code with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.data.io.files import read_tables
from slipstream.data.prepare.chain.frames import split_frames
from slipstream.data.prepare.chain.operations import apply_step
from slipstream.exporting.c.prepare import PreparedColumns
from slipstream.portable.model import PortableModel

Floats = npt.NDArray[np.float64]
MAX_ROWS = 1_000_000
"""Rows of a table on disk, which may be larger than memory, that are compared"""


class SeriesRows(NamedTuple):
    """All rows of one series."""

    name: str
    raw: Floats
    """[rows, columns] that come in"""
    prepared: Floats
    """[rows, inputs] that the model reads, without rows that are padded"""


def iter_series(model: PortableModel, steps: PreparedColumns, source: Any) -> Iterator[SeriesRows]:
    """Yield every series of the run's own data, or of new data; of a table on disk, those of its
    first rows."""
    data = model.config.data
    if isinstance(source, (str, os.PathLike)):
        data, source = data.model_copy(update={"path": str(source)}), None
    names = dict.fromkeys(steps.columns, "data.inputs")
    for table in read_tables(data, source):
        if table.row_groups and table.num_rows > MAX_ROWS:
            table = table.slice_rows(0, MAX_ROWS)
        for frame in split_frames(table, data, names, 0):
            raw = np.stack([frame.columns[name] for name in steps.columns], axis=1)
            for step in steps.steps:
                limits = model.limits.get(str(step.number))
                frame = apply_step(step, frame, context=data.context, limits=limits)
            every = [frame.columns[name][frame.padding :] for name in model.signature.inputs]
            yield SeriesRows(frame.name, raw, np.stack(every, axis=1))
