"""Bring new series to the time step of the training data."""

import itertools
from dataclasses import replace

import numpy as np

from slipstream.data import missing
from slipstream.data.series import MICROSECONDS, Floats, RawSeries

SAME_ROW = 1e-6
"""How far from a new row's time, in steps, an old one still counts as being there."""


def resample_series(raw: RawSeries, step: float) -> RawSeries:
    """Return the series at another step, from gap to gap.

    A coarser row is the mean of what lies after the row before it, up to its own time and not
    beyond; a finer one lies on the straight line between its neighbours.
    """
    index = raw.index
    assert raw.time is not None
    assert index.step is not None
    width = step * MICROSECONDS if index.has_dates else step
    coarser = step > index.step
    segments = list(itertools.pairwise([*index.breaks.tolist(), index.num_rows]))
    positions, times, breaks, offsets = [], [], [0], [0]
    for begin, end in segments:
        if begin in index.offsets[1:-1]:
            offsets.append(breaks[-1])
        old = raw.time[begin:end].astype(np.float64)
        position = (old - old[0]) / width
        grid = np.arange(int(position[-1] + SAME_ROW) + 1)
        positions.append((position, grid))
        times.append((old[0] + grid * width).astype(raw.time.dtype))
        breaks.append(breaks[-1] + len(grid))

    def resample(column: Floats) -> Floats:
        parts = []
        for (begin, end), (position, grid) in zip(segments, positions, strict=True):
            new = np.interp(grid, position, column[begin:end])
            if coarser:
                _write_means(new, column[begin:end], np.ceil(position - SAME_ROW))
            parts.append(new)
        return np.concatenate(parts)

    unknown, ahead = np.zeros(index.num_rows), np.zeros(index.num_rows)
    for first, past in index.unknown:
        unknown[first:past] = 1.0
    for past, count in zip(index.offsets[1:], index.ahead, strict=True):
        ahead[past - count : past] = 1.0
    begins = np.array([*offsets, breaks[-1]])
    return replace(
        raw,
        index=replace(
            index,
            offsets=begins,
            breaks=np.array(breaks[:-1]),
            group_begins=np.zeros(1, dtype=np.int64),
            group_codes=np.zeros(1, dtype=np.int64),
            step=step,
            skipped=missing.NO_RUNS,
            unknown=missing.encode_runs(resample(unknown) > 0),
            ahead=np.add.reduceat((resample(ahead) > 0).astype(np.int64), begins[:-1]),
        ),
        read_column=lambda name: resample(raw.read_column(name)),
        time=np.concatenate(times),
        notes=(*raw.notes, f"resampled from a step of {index.step:g} to {step:g}"),
    )


def _write_means(new: Floats, values: Floats, owner: Floats) -> None:
    """Replace each new value by the mean of the old ones that belong to it, where there are any."""
    inside = owner < len(new)
    owner, values = owner[inside].astype(np.int64), values[inside]
    size = np.bincount(owner, minlength=len(new))
    total = np.bincount(owner, weights=values, minlength=len(new))
    new[size > 0] = total[size > 0] / size[size > 0]
