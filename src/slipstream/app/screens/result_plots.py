"""What the result screen draws from predictions: where a model errs, in one pass over its
predictions (by series, over time, the worst windows, the interval of the mean error), and the rows
of one series for a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.statistics import (
    MIN_BLOCKS,
    NUM_RESAMPLES,
    Moments,
    compute_percentile_interval,
)
from slipstream.data.predictions import (
    LABEL,
    PREDICTED,
    STEP,
    Array,
    PredictionFile,
    Predictions,
    chain_windows,
)
from slipstream.reporting.charts import GAP, interrupt, round_values, thin

BINS = 120
"""Bins of the error over time"""
MAX_WORST = 24
MAX_BLOCKS = 2_000
"""Blocks up to which all are resampled; above, a sample of them is precise enough"""
MAX_STARTS = 1 << 40
"""Rows of a series that a key can tell apart"""


class Blocks(NamedTuple):
    """Windows of a series that share rows, as one block."""

    key: Array
    total: Array
    windows: Array
    worst: Array
    """The mean error of the worst window"""
    start: Array
    """First predicted row of the worst window"""
    low: Array
    high: Array
    """The range of x"""


@dataclass
class ErrorSums:
    """Sums over rows, by series and over time."""

    series: int
    range: tuple[float, float]
    by_series: Array = field(init=False)
    """[5, series]: rows, windows, error, absolute error, squared error"""
    largest: Array = field(init=False)
    by_time: Array = field(init=False)
    """[2, bins]: rows, absolute error, or whether the class was wrong"""

    def __post_init__(self) -> None:
        self.by_series = np.zeros((5, self.series))
        self.largest = np.zeros(self.series)
        self.by_time = np.zeros((2, BINS))

    def add(self, part: Predictions, error: Array, over_time: Array) -> None:
        """Add the rows of a group; errors that are not finite are left out."""
        known = np.isfinite(error)
        codes, error, over_time = part.codes[known], error[known], over_time[known]
        first = part["step"][known] == 1 if part.shape.is_forecast else np.ones(len(codes))
        terms = (np.ones(len(codes)), first, error, np.abs(error), error**2)
        for sums, term in zip(self.by_series, terms, strict=True):
            sums += np.bincount(codes, weights=term, minlength=self.series)
        np.maximum.at(self.largest, codes, np.abs(error))
        low, high = self.range
        share = (part.read_x()[known] - low) / max(high - low, 1e-300)
        bins = np.clip(np.nan_to_num(share) * BINS, 0, BINS - 1).astype(np.int64)
        for sums, term in zip(self.by_time, (np.ones(len(codes)), over_time), strict=True):
            sums += np.bincount(bins, weights=term, minlength=BINS)


@lru_cache(16)
def compute_digest(file: PredictionFile, target: str, span: int) -> dict[str, Any]:
    """Return the errors of a target, or of classes (`target` is empty). Windows whose first rows
    are less than `span` rows apart form one block."""
    sums = ErrorSums(len(file.names), file.range)
    blocks: list[Blocks] = []
    for part in file.read(file.shape.list_columns(target)):
        error = part.read_errors(target)
        over_time = np.abs(error)
        if file.shape.classes:
            pair = [part.read_classes(name) for name in (LABEL, PREDICTED)]
            over_time = (pair[0] != pair[1]).astype(float)
        sums.add(part, error, over_time)
        blocks.append(_merge_windows(part, np.abs(error), max(span, 1)))
    joined = _join(blocks)
    return {
        "series": _describe_series(sums, file.shape.classes),
        "over_time": _describe_time(sums, file),
        "worst": _list_worst(joined, file),
        "mean": _divide(sums.by_series[3].sum(), sums.by_series[0].sum()),
        "interval": _bootstrap(joined),
        "blocks": int(np.count_nonzero(joined.windows)),
    }


def _merge_windows(part: Predictions, error: Array, span: int) -> Blocks:
    """Return the windows of a group by their blocks."""
    if not len(part):
        return Blocks(*(np.empty(0),) * 7)
    starts, x = part.find_starts(), part.read_x()
    change = (np.diff(starts) != 0) | (np.diff(part.codes) != 0)
    first = np.concatenate([[0], np.flatnonzero(change) + 1])
    last = np.append(first[1:], len(part)) - 1
    mean = np.add.reduceat(error, first) / (last - first + 1)
    key = part.codes[first] * MAX_STARTS + starts[first] // span
    known = np.isfinite(mean)
    total, count = np.where(known, mean, 0.0), known.astype(float)
    worst = np.where(known, mean, np.inf)
    return _group(Blocks(key, total, count, worst, starts[first], x[first], x[last]))


def _join(parts: Sequence[Blocks]) -> Blocks:
    if not parts:
        return Blocks(*(np.empty(0),) * 7)
    return _group(Blocks(*map(np.concatenate, zip(*parts, strict=True))))


def _group(blocks: Blocks) -> Blocks:
    """Merge entries of the same block; its worst window represents it."""
    if not len(blocks.key):
        return blocks
    if np.any(np.diff(blocks.key) < 0):
        order = np.argsort(blocks.key, kind="stable")
        blocks = Blocks(*(column[order] for column in blocks))
    first = np.concatenate([[0], np.flatnonzero(np.diff(blocks.key)) + 1])
    sums = [np.add.reduceat(column, first) for column in (blocks.total, blocks.windows)]
    largest = np.maximum.reduceat(blocks.worst, first)
    sizes = np.diff(np.append(first, len(blocks.key)))
    # the first window of each block that is as bad as its worst
    worst = np.flatnonzero(blocks.worst == np.repeat(largest, sizes))
    heads = worst[np.searchsorted(worst, first)]
    return Blocks(blocks.key[first], *sums, *(column[heads] for column in blocks[3:]))


def _list_worst(blocks: Blocks, file: PredictionFile) -> list[dict[str, Any]]:
    """Return the worst windows, at most one of two neighbouring blocks."""
    used: set[int] = set()
    result: list[dict[str, Any]] = []
    for block in np.argsort(-blocks.worst, kind="stable").tolist():
        key = int(blocks.key[block])
        if not used.isdisjoint((key - 1, key, key + 1)):
            continue
        used.add(key)
        size = file.shape.x_size
        worst = float(blocks.worst[block])
        result.append(
            {
                "series": key // MAX_STARTS,
                "row": int(blocks.start[block]),
                "low": float(blocks.low[block]) / size,
                "high": float(blocks.high[block]) / size,
                "error": worst if np.isfinite(worst) else None,
            }
        )
        if len(result) == MAX_WORST:
            break
    return result


def _describe_series(sums: ErrorSums, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return each series' figures, in the order of the file."""
    rows, windows, error, absolute, squared = sums.by_series
    named = {"log_loss": _divide(absolute, rows)}
    if not classes:
        named = {
            "mae": _divide(absolute, rows),
            "rmse": np.sqrt(_divide(squared, rows)),
            "bias": _divide(error, rows),
            "max_error": np.where(rows > 0, sums.largest, np.nan),
        }
    named["windows"] = windows.astype(int)
    columns = {key: values.tolist() for key, values in named.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _describe_time(sums: ErrorSums, file: PredictionFile) -> dict[str, Any]:
    low, high = file.range
    edges = np.linspace(low, high, BINS + 1) / file.shape.x_size
    rows, total = sums.by_time
    return {"x": ((edges[:-1] + edges[1:]) / 2).tolist(), "error": _divide(total, rows).tolist()}


def _divide(total: Any, count: Any) -> Any:
    """Divide; the result is NaN where the divisor is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total, dtype=float) / np.where(np.asarray(count) > 0, count, np.nan)


def _bootstrap(blocks: Blocks) -> list[float] | None:
    """Return the 95 % interval of the mean error, by resampling blocks; None with too few."""
    total, count = (column[blocks.windows > 0] for column in (blocks.total, blocks.windows))
    if len(total) < MIN_BLOCKS:
        return None
    generator = np.random.default_rng(0)
    size = min(len(total), MAX_BLOCKS)
    samples = np.empty(NUM_RESAMPLES)
    for number in range(NUM_RESAMPLES):
        drawn_blocks = generator.integers(len(total), size=size)
        samples[number] = total[drawn_blocks].sum() / count[drawn_blocks].sum()
    # fewer than there are vary more
    mean = total.sum() / count.sum()
    return compute_percentile_interval(mean + (samples - mean) * np.sqrt(size / len(total)))


MAX_ROWS = 400_000
"""Rows in memory before they are thinned"""
MAX_POINTS = 4_000


class PlotView(NamedTuple):
    """The part of a series that is drawn."""

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
        if count > MAX_ROWS:
            parts = [_shrink(_join_rows(parts), MAX_ROWS // 4)]
            count = len(parts[0].x)
    rows = _join_rows(parts) if parts else PlotRows(*(np.empty(0),) * 3, np.empty((2, 0)))
    order = np.argsort(rows.x, kind="stable")
    rows = PlotRows(*(column[..., order] for column in rows))
    thinned = _shrink(rows, min(max(view.points, 100), MAX_POINTS))
    figures = {"rows": num_rows, "points": len(thinned.x), "mean_error": error.mean}
    return _describe(file, view, thinned) | figures | ({} if error.count else {"mean_error": None})


def _measure(file: PredictionFile, part: PlotRows) -> Array:
    """Return the known absolute errors; for classes, whether each is wrong."""
    truth, predicted = part.values[:2]
    known = np.isfinite(truth) & np.isfinite(predicted)
    error = np.abs(predicted - truth)[known]
    return np.asarray(error > 0, dtype=float) if file.shape.classes else error


def _select(file: PredictionFile, view: PlotView) -> Iterator[PlotRows]:
    """Yield the rows of a view, group by group."""
    is_laid_out = file.shape.is_forecast and not view.ahead
    starts = lay_out(file, view.series, view.window) if is_laid_out else None
    columns = file.shape.list_columns(view.target, bands=True)
    stretch, last, usual = 0, np.nan, np.nan
    between = view.low, view.high
    for part in file.read(columns, series=view.series, between=between):
        window, x = part.find_starts(), part.read_x()
        chosen = (part.codes == view.series) & (x >= view.low) & (x <= view.high)
        if starts is not None:
            chosen &= np.isin(window, starts)
        elif file.shape.is_forecast:
            chosen &= part[STEP] == view.ahead
        rows = np.flatnonzero(chosen)
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
    """Return the truth, the prediction, and further lines of the plot."""
    shape = file.shape
    if shape.classes:
        missing = np.full(len(part), np.nan)
        truth = part.read_classes(LABEL) if shape.has_truth("") else missing
        return [truth, part.read_classes(PREDICTED), part.read_probability()]
    bounds = [
        part[name] for band in shape.find_bands(view.target) for name in (band.low, band.high)
    ]
    return [part.read_truth(view.target), part.read_predicted(view.target), *bounds]


@lru_cache(32)
def lay_out(file: PredictionFile, series: int, window: int | None = None) -> Array:
    """Return the first rows of a series' windows that follow one another without overlap; `window`,
    if given, is among them."""
    firsts, length = [], 1
    for part in file.read([], series=series):
        chosen = part.codes == series
        steps = part[STEP][chosen]
        firsts.append(part.find_starts()[chosen][steps == 1])
        length = max(length, int(steps.max(initial=1)))
    all_firsts = np.unique(np.concatenate(firsts)) if firsts else np.empty(0, dtype=np.int64)
    anchor = window if window is not None and window in all_firsts else None
    if anchor is None:
        return np.asarray(chain_windows(all_firsts, length), dtype=np.int64)
    before = chain_windows(-all_firsts[all_firsts < anchor][::-1], length, -anchor)
    after = chain_windows(all_firsts[all_firsts >= anchor], length)
    return np.asarray([*(-first for first in reversed(before)), *after], dtype=np.int64)


def _join_rows(parts: list[PlotRows]) -> PlotRows:
    return PlotRows(*(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True)))


def _shrink(rows: PlotRows, limit: int) -> PlotRows:
    """Thin out the rows, retaining the extremes of every line."""
    truth, predicted, *bounds = rows.values
    lines = [predicted, *([] if np.isnan(truth).all() else [truth, predicted - truth])]
    retained = thin([*lines, *bounds[:1]], limit)
    return PlotRows(*(column[..., retained] for column in rows))


def _describe(file: PredictionFile, view: PlotView, rows: PlotRows) -> dict[str, Any]:
    by_window = file.shape.is_forecast and not view.ahead
    x, values = rows.x, rows.values
    if len(x) > 1:
        x, values = interrupt(x, values, rows.stretch, rows.window if by_window else None)
    x = x / file.shape.x_size
    lists = [round_values(column) for column in values]
    result: dict[str, Any] = {
        "dates": file.shape.has_dates,
        "x_name": file.shape.x_name,
        "x": [None if value != value else value for value in np.round(x, 6).tolist()],
        "true": lists[0],
        "predicted": lists[1],
        "bands": [],
    }
    if file.shape.classes:
        return result | {"probability": lists[2], "classes": list(file.shape.classes)}
    error = values[1] - values[0]
    bands = zip(file.shape.find_bands(view.target), lists[2::2], lists[3::2], strict=True)
    result["bands"] = [{"label": band.label, "low": low, "high": high} for band, low, high in bands]
    return result | {"error": round_values(error)}
