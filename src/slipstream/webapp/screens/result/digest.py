"""Where a model errs, in one pass over its predictions: by series, over time, the worst windows,
and how far the mean error is certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from slipstream.data.prediction_columns import LABEL, PREDICTED
from slipstream.reporting.plots.predictions import (
    MICROSECONDS,
    Array,
    PredictionFile,
    Predictions,
    find_starts,
    list_columns,
    read_classes,
    read_errors,
)
from slipstream.stats import MIN_BLOCKS, NUM_RESAMPLES, compute_percentile_interval

BINS = 120
"""Of the error over time"""
MOST_WORST = 24
MOST_BLOCKS = 2_000
"""That are resampled; of more, the mean is certain enough to draw from some"""
WAY = 1 << 40
"""Blocks of rows that a series may have"""


class Blocks(NamedTuple):
    """Windows of a series that share rows, together."""

    key: Array
    total: Array
    windows: Array
    worst: Array
    """The mean error of the worst window"""
    start: Array
    """Its first predicted row"""
    low: Array
    high: Array
    """Its range of x"""


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
        first = part["step"][known] == 1 if part.is_forecast else np.ones(len(codes))
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
    """Return the errors of a target, or of classes (`target` is empty): windows whose first rows
    are less than `span` rows apart count as one place."""
    sums = ErrorSums(len(file.names), file.range)
    blocks: list[Blocks] = []
    for part in file.read(list_columns(file, target)):
        error = read_errors(part, target, file.classes)
        over_time = np.abs(error)
        if file.classes:
            pair = [read_classes(part, name, file.classes) for name in (LABEL, PREDICTED)]
            over_time = (pair[0] != pair[1]).astype(float)
        sums.add(part, error, over_time)
        blocks.append(_merge_windows(part, np.abs(error), max(span, 1)))
    joined = _join(blocks)
    return {
        "series": _describe_series(sums, file.classes),
        "over_time": _describe_time(sums, file),
        "worst": _list_worst(joined, file),
        "mean": _divide(sums.by_series[3].sum(), sums.by_series[0].sum()),
        "interval": _bootstrap(joined),
        "blocks": int(np.count_nonzero(joined.windows)),
    }


def _merge_windows(part: Predictions, error: Array, span: int) -> Blocks:
    """Return the windows of a group by their places."""
    if not len(part):
        return Blocks(*(np.empty(0),) * 7)
    starts, x = find_starts(part), part.read_x()
    change = (np.diff(starts) != 0) | (np.diff(part.codes) != 0)
    first = np.concatenate([[0], np.flatnonzero(change) + 1])
    last = np.append(first[1:], len(part)) - 1
    mean = np.add.reduceat(error, first) / (last - first + 1)
    key = part.codes[first] * WAY + starts[first] // span
    known = np.isfinite(mean)
    total, count = np.where(known, mean, 0.0), known.astype(float)
    worst = np.where(known, mean, np.inf)
    return _group(Blocks(key, total, count, worst, starts[first], x[first], x[last]))


def _join(parts: Sequence[Blocks]) -> Blocks:
    if not parts:
        return Blocks(*(np.empty(0),) * 7)
    return _group(Blocks(*map(np.concatenate, zip(*parts, strict=True))))


def _group(blocks: Blocks) -> Blocks:
    """Merge entries of the same place; its worst window stands for it."""
    if not len(blocks.key):
        return blocks
    if np.any(np.diff(blocks.key) < 0):
        order = np.argsort(blocks.key, kind="stable")
        blocks = Blocks(*(column[order] for column in blocks))
    first = np.concatenate([[0], np.flatnonzero(np.diff(blocks.key)) + 1])
    sums = [np.add.reduceat(column, first) for column in (blocks.total, blocks.windows)]
    largest = np.maximum.reduceat(blocks.worst, first)
    sizes = np.diff(np.append(first, len(blocks.key)))
    # the first window of each place that is as bad as its worst
    at = np.flatnonzero(blocks.worst == np.repeat(largest, sizes))
    heads = at[np.searchsorted(at, first)]
    return Blocks(blocks.key[first], *sums, *(column[heads] for column in blocks[3:]))


def _list_worst(blocks: Blocks, file: PredictionFile) -> list[dict[str, Any]]:
    """Return the worst windows, one of each place and not of its neighbour as well."""
    used: set[int] = set()
    result: list[dict[str, Any]] = []
    for at in np.argsort(-blocks.worst, kind="stable").tolist():
        key = int(blocks.key[at])
        if not used.isdisjoint((key - 1, key, key + 1)):
            continue
        used.add(key)
        size = MICROSECONDS if file.shape.has_dates else 1.0
        worst = float(blocks.worst[at])
        result.append(
            {
                "series": key // WAY,
                "row": int(blocks.start[at]),
                "low": float(blocks.low[at]) / size,
                "high": float(blocks.high[at]) / size,
                "error": worst if np.isfinite(worst) else None,
            }
        )
        if len(result) == MOST_WORST:
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
    edges = np.linspace(low, high, BINS + 1) / (MICROSECONDS if file.shape.has_dates else 1.0)
    rows, total = sums.by_time
    return {"x": ((edges[:-1] + edges[1:]) / 2).tolist(), "error": _divide(total, rows).tolist()}


def _divide(total: Any, count: Any) -> Any:
    """Divide; NaN where there is nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(total, dtype=float) / np.where(np.asarray(count) > 0, count, np.nan)


def _bootstrap(blocks: Blocks) -> list[float] | None:
    """Return the 95 % interval of the mean error, by resampling places; None with too few."""
    total, count = (column[blocks.windows > 0] for column in (blocks.total, blocks.windows))
    if len(total) < MIN_BLOCKS:
        return None
    generator = np.random.default_rng(0)
    size = min(len(total), MOST_BLOCKS)
    samples = np.empty(NUM_RESAMPLES)
    for number in range(NUM_RESAMPLES):
        drawn_blocks = generator.integers(len(total), size=size)
        samples[number] = total[drawn_blocks].sum() / count[drawn_blocks].sum()
    # fewer than there are vary more
    mean = total.sum() / count.sum()
    return compute_percentile_interval(mean + (samples - mean) * np.sqrt(size / len(total)))
