"""New data at the step that a model was trained on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from slipstream.data.series import MICROSECONDS, Floats, RawSeries

SAME_PLACE = 1e-6
"""How far from a new row's time, in steps, an old one still counts as being there."""


def resample_series(store: RawSeries, step: float) -> RawSeries:
    """The same series at another step, from gap to gap.

    A coarser row is the mean of what lies after the row before it, up to its own time and not
    beyond; a finer one lies on the straight line between its neighbours.
    """
    layout = store.index
    assert store.time is not None
    assert layout.step is not None
    width = step * MICROSECONDS if layout.has_dates else step
    coarser = step > layout.step
    spans = list(itertools.pairwise([*layout.breaks.tolist(), layout.num_rows]))
    places, times, breaks, offsets = [], [], [0], [0]
    for begin, end in spans:
        if begin in layout.offsets[1:-1]:
            offsets.append(breaks[-1])
        old = store.time[begin:end].astype(np.float64)
        place = (old - old[0]) / width
        grid = np.arange(int(place[-1] + SAME_PLACE) + 1)
        places.append((place, grid))
        times.append((old[0] + grid * width).astype(store.time.dtype))
        breaks.append(breaks[-1] + len(grid))

    def read(name: str) -> Floats:
        column, parts = store.read_column(name), []
        for (begin, end), (place, grid) in zip(spans, places, strict=True):
            new = np.interp(grid, place, column[begin:end])
            if coarser:
                _put_means(new, column[begin:end], np.ceil(place - SAME_PLACE))
            parts.append(new)
        return np.concatenate(parts)

    return replace(
        store,
        index=replace(
            layout,
            offsets=np.array([*offsets, breaks[-1]]),
            breaks=np.array(breaks[:-1]),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            step=step,
        ),
        read_column=read,
        time=np.concatenate(times),
        notes=(*store.notes, f"resampled from a step of {layout.step:g} to {step:g}"),
    )


def _put_means(new: Floats, values: Floats, owner: Floats) -> None:
    """Replace each new value by the mean of the old ones that belong to it, where there are any."""
    kept = owner < len(new)
    owner, values = owner[kept].astype(np.int64), values[kept]
    size = np.bincount(owner, minlength=len(new))
    total = np.bincount(owner, weights=values, minlength=len(new))
    new[size > 0] = total[size > 0] / size[size > 0]
