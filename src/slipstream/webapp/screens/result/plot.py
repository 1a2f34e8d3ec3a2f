"""The rows of a plot: one series between two times, thinned to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from slipstream.data.prediction_columns import LABEL, PREDICTED, STEP
from slipstream.reporting.plots.predictions import (
    GAP,
    MICROSECONDS,
    Array,
    PredictionFile,
    Predictions,
    find_starts,
    interrupt,
    list_columns,
    read_classes,
    read_label_probability,
    round_values,
    thin,
)
from slipstream.stats import Moments

MOST_ROWS = 400_000
"""Rows in memory before they are thinned"""
MOST_POINTS = 4_000


class PlotView(NamedTuple):
    """What of a series is drawn."""

    series: int
    target: str
    """Empty for classes"""
    ahead: int = 0
    """The predicted row of every window; 0 for windows end to end"""
    low: float = -np.inf
    high: float = np.inf
    """The range of x"""
    points: int = 1_500
    window: int | None = None
    """The first predicted row of a window that is among those end to end"""


class PlotRows(NamedTuple):
    """Rows of a plot; `values` are [columns, rows], the truth and the prediction first."""

    x: Array
    window: Array
    stretch: Array
    """Changes where rows are missing"""
    values: Array


def read_plot(file: PredictionFile, view: PlotView) -> dict[str, Any]:
    """Return the values of a plot, None where a line is interrupted."""
    parts: list[PlotRows] = []
    count = num_rows = 0
    error = Moments()
    for part in _select(file, view):
        parts.append(part)
        count += len(part.x)
        num_rows += len(part.x)
        error.add(_measure(file, part))
        if count > MOST_ROWS:
            parts = [_shrink(_join(parts), MOST_ROWS // 4)]
            count = len(parts[0].x)
    rows = _join(parts) if parts else PlotRows(*(np.empty(0),) * 3, np.empty((2, 0)))
    order = np.argsort(rows.x, kind="stable")
    rows = PlotRows(*(column[..., order] for column in rows))
    thinned = _shrink(rows, min(max(view.points, 100), MOST_POINTS))
    figures = {"rows": num_rows, "points": len(thinned.x), "mean_error": error.mean}
    return _describe(file, view, thinned) | figures | ({} if error.count else {"mean_error": None})


def _measure(file: PredictionFile, part: PlotRows) -> Array:
    """Return the known absolute errors, or of classes whether each is wrong."""
    truth, predicted = part.values[:2]
    known = np.isfinite(truth) & np.isfinite(predicted)
    error = np.abs(predicted - truth)[known]
    return np.asarray(error > 0, dtype=float) if file.classes else error


def _select(file: PredictionFile, view: PlotView) -> Iterator[PlotRows]:
    """Yield the rows of a view, group by group."""
    is_laid_out = file.shape.is_forecast and not view.ahead
    starts = lay_out(file, view.series, view.window) if is_laid_out else None
    columns = list_columns(file, view.target, bands=True)
    stretch, last, usual = 0, np.nan, np.nan
    between = view.low, view.high
    for part in file.read(columns, series=view.series, between=between):
        window, x = find_starts(part), part.read_x()
        mine = (part.codes == view.series) & (x >= view.low) & (x <= view.high)
        if starts is not None:
            mine &= np.isin(window, starts)
        elif file.shape.is_forecast:
            mine &= part[STEP] == view.ahead
        rows = np.flatnonzero(mine)
        if not len(rows):
            continue
        x = x[rows]
        steps = np.diff(x, prepend=last)
        if np.isnan(usual) and len(x) > 2:
            usual = float(np.median(steps[1:]))
        stretches = stretch + np.cumsum(steps > GAP * usual)
        stretch, last = int(stretches[-1]), float(x[-1])
        values = np.stack([column[rows] for column in _read_columns(file, view, part)])
        yield PlotRows(x, window[rows], stretches, values)


def _read_columns(file: PredictionFile, view: PlotView, part: Predictions) -> list[Array]:
    """Return the truth, the prediction, and what is drawn beside them."""
    missing = np.full(len(part), np.nan)
    if file.classes:
        names = (LABEL if file.has_truth("") else None, PREDICTED)
        codes = [missing if n is None else read_classes(part, n, file.classes) for n in names]
        return [*codes, read_label_probability(part, file.classes)]
    truth = part[view.target] if file.has_truth(view.target) else missing
    bounds = [name for one in file.shape.find_bands(view.target) for name in (one.low, one.high)]
    return [truth, part[f"{view.target}_{PREDICTED}"], *(part[name] for name in bounds)]


@lru_cache(32)
def lay_out(file: PredictionFile, series: int, window: int | None = None) -> Array:
    """Return the first rows of a series' windows that follow each other without overlap; that of
    `window` is one of them."""
    firsts, length = [], 1
    for part in file.read([], series=series):
        mine = part.codes == series
        steps = part[STEP][mine]
        firsts.append(find_starts(part)[mine][steps == 1])
        length = max(length, int(steps.max(initial=1)))
    every = np.unique(np.concatenate(firsts)) if firsts else np.empty(0, dtype=np.int64)
    anchor = window if window is not None and window in every else None
    if anchor is None:
        return np.asarray(_chain(every, length), dtype=np.int64)
    before = _chain(-every[every < anchor][::-1], length, -anchor)
    after = _chain(every[every >= anchor], length)
    return np.asarray([*(-one for one in reversed(before)), *after], dtype=np.int64)


def _chain(firsts: Array, length: int, last: float = -np.inf) -> list[int]:
    """Return those of ascending first rows that are at least a window apart, the earliest first;
    `last` is one before them."""
    chosen, end = list[int](), last + length
    for first in firsts.tolist():
        if first >= end:
            chosen.append(first)
            end = first + length
    return chosen


def _join(parts: list[PlotRows]) -> PlotRows:
    return PlotRows(*(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)))


def _shrink(rows: PlotRows, most: int) -> PlotRows:
    """Retain the extremes of what is drawn."""
    truth, predicted, *others = rows.values
    lines = [predicted, *([] if np.isnan(truth).all() else [truth, predicted - truth])]
    retained = thin([*lines, *others[:1]], most)
    return PlotRows(*(column[..., retained] for column in rows))


def _describe(file: PredictionFile, view: PlotView, rows: PlotRows) -> dict[str, Any]:
    by_window = file.shape.is_forecast and not view.ahead
    x, values = rows.x, rows.values
    if len(x) > 1:
        x, values = interrupt(x, values, rows.stretch, rows.window if by_window else None)
    if file.shape.has_dates:
        x = x / MICROSECONDS
    lists = [round_values(column) for column in values]
    result: dict[str, Any] = {
        "dates": file.shape.has_dates,
        "x_name": file.shape.x_name,
        "x": [None if one != one else one for one in np.round(x, 6).tolist()],
        "true": lists[0],
        "predicted": lists[1],
        "bands": [],
    }
    if file.classes:
        return result | {"probability": lists[2], "classes": list(file.classes)}
    error = values[1] - values[0]
    bands = zip(file.shape.find_bands(view.target), lists[2::2], lists[3::2], strict=True)
    result["bands"] = [{"label": band.label, "low": low, "high": high} for band, low, high in bands]
    return result | {"error": round_values(error)}
