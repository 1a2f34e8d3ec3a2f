"""A summary of the data of a run: series, rows, ranges, gaps, and where each set lies in time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.config import Config
from slipstream.data import splits
from slipstream.data.dataset import Dataset
from slipstream.data.series import Ints
from slipstream.data.splits import SplitAssignment
from slipstream.runs.summary import ColumnSummary, DataSummary, Timeline

MAX_SERIES, MAX_PARTS = 12, 60
JOINED_ROWS = 64
"""Rows of a table that are compared at once with as many others"""
SETS = (*splits.SETS, "unused")


def summarize_data(dataset: Dataset, config: Config) -> DataSummary:
    """Return what metrics.json says about the data."""
    index = dataset.index
    time = dataset.memory.time if dataset.memory is not None else None
    summary: DataSummary = {
        "series": len(index.series_names),
        "rows": index.num_rows,
        "gaps": len(index.breaks) - len(index.series_names),
        "time": config.data.time_column,
        "dates": index.has_dates and time is not None,
        "step": index.step,
        "range": None if time is None else [_to_number(time.min()), _to_number(time.max())],
        "columns": _summarize_columns(dataset),
        "num_files": len(dataset.files),
        "files": dataset.summarize_files(),
    }
    if config.data.prepare:
        summary["prepare"] = _summarize_steps(dataset, config)
    if config.data.split.stratified:  # windows of one series are in several sets
        return summary | {"rows_by_set": None, "timelines": []}
    assignments = _assign_rows(dataset, config)
    last = assignments[-1][1]
    rows_by_set = {name: last.count_rows(position) for position, name in enumerate(SETS)}
    return summary | {
        "rows_by_set": rows_by_set,
        "timelines": list(_list_timelines(dataset, assignments)),
    }


def _summarize_steps(dataset: Dataset, config: Config) -> dict[str, Any]:
    """Return the steps of `data.prepare`, the ranges they were fitted to, and the latency."""
    step = dataset.index.step
    return {
        "steps": [
            settings.model_dump(exclude_defaults=True) | {"step": settings.step}
            for settings in config.data.prepare
        ],
        "limits": dataset.limits,
        "look_ahead": dataset.index.look_ahead,
        "latency_rows": dataset.latency,
        "latency": None if step is None else dataset.latency * step,
    }


def _summarize_columns(dataset: Dataset) -> dict[str, ColumnSummary]:
    """Return each column's role, its range over all rows and over the training rows."""
    signature, scaler = dataset.signature, dataset.scaler
    names = list(dict.fromkeys([*signature.inputs, *signature.targets]))
    lows: list[float | None] = [None] * len(names)
    highs, missing = list(lows), list(lows)
    if dataset.memory is not None:
        series = dataset.memory.series
        rows = torch.arange(len(series.values))
        values = series.to_table_scale(series.values, rows, slice(None)).numpy()
        lows, highs = (_reduce_rows(find, values).tolist() for find in (np.fmin, np.fmax))
        has_missing = bool(np.isnan(values).any())
        missing = np.isnan(values).sum(axis=0).tolist() if has_missing else [0] * len(names)
    units = {name: unit for file in dataset.files for name, unit in file.units.items()}
    columns = {}
    for name, low, high, count in zip(names, lows, highs, missing, strict=True):
        roles = [
            role for role in ("inputs", "targets", "future") if name in getattr(signature, role)
        ]
        absent = dataset.index.num_missing.get(name, count)
        column: ColumnSummary = {"roles": roles, "missing": absent}
        if name in units:
            column["unit"] = units[name]
        is_label = bool(signature.classes) and name in signature.targets
        if name in scaler.size and not is_label:
            shift, size = scaler.shift[name], scaler.size[name]
            known = [end * size + shift for end in (low, high) if end is not None]
            column["range"] = [_round(end, max(map(abs, known))) for end in known] or None
            column["training_range"] = [scaler.low[name], scaler.high[name]]
        columns[name] = column
    return columns


def _reduce_rows(find: np.ufunc, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `find.reduce` over the rows of a table of few columns. Many rows side by side take
    a tenth of the time of rows of five numbers."""
    columns, joined = values.shape[1], len(values) // JOINED_ROWS * JOINED_ROWS
    rest = values[joined:]
    if joined:
        wide = find.reduce(values[:joined].reshape(-1, JOINED_ROWS * columns), axis=0)
        rest = np.concatenate([wide.reshape(JOINED_ROWS, columns), rest])
    return np.asarray(find.reduce(rest, axis=0))


def _round(value: float, largest: float) -> float:
    """Round off what a scaled float32 does not know of a value, where `largest` is."""
    return round(value, 6 - math.ceil(math.log10(largest))) if largest > 0 else 0.0


def _assign_rows(dataset: Dataset, config: Config) -> list[tuple[str, SplitAssignment]]:
    """Return the set of each row, by fold where there are several."""
    index, data = dataset.index, config.data
    if data.split.walk_forward is None or config.masked:
        return [("", splits.assign_first_split(index, data))]
    folds = splits.assign_walk_forward(index, data.split)
    return [(f"fold {number}", fold) for number, fold in enumerate(folds, start=1)]


def _list_timelines(
    dataset: Dataset, assignments: list[tuple[str, SplitAssignment]]
) -> Iterator[Timeline]:
    """Yield some series, or the folds of the longest one, with the time range of each set."""
    index = dataset.index
    if len(assignments) > 1:
        longest = int(np.argmax(np.diff(index.offsets)))
        for label, assignment in assignments[-MAX_SERIES:]:
            yield {"name": label, "parts": _list_parts(dataset, assignment, longest)}
        return
    count = len(index.series_names)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MAX_SERIES)).round().astype(int))
    for series in chosen.tolist():
        parts = _list_parts(dataset, assignments[0][1], series)
        yield {"name": index.series_names[series], "parts": parts}


def _list_parts(dataset: Dataset, assignment: SplitAssignment, series: int) -> list[list[Any]]:
    """Return [set, first, last] of every stretch of rows in one set, without gaps in time."""
    index = dataset.index
    begin, end = (int(row) for row in index.offsets[series : series + 2])
    borders = _select(np.union1d(assignment.begins, index.breaks), begin, end)
    if len(borders) > MAX_PARTS:
        borders = _select(assignment.begins, begin, end)[:MAX_PARTS]
    runs = np.searchsorted(assignment.begins, borders, side="right") - 1
    time = dataset.memory.time if dataset.memory is not None else None
    parts = []
    for (first, past), run in zip(itertools.pairwise([*borders, end]), runs, strict=True):
        ends = [first - begin, past - 1 - begin] if time is None else time[[first, past - 1]]
        parts.append([SETS[assignment.sets[run]], *(_to_number(end_) for end_ in ends)])
    return parts


def _select(rows: Ints, begin: int, end: int) -> Ints:
    """Return the rows from `begin` to before `end`, with `begin` itself."""
    return np.union1d(rows[(rows >= begin) & (rows < end)], [begin])


def _to_number(value: Any) -> float | int:
    """Return a plain number: microseconds of dates, rows, or times as they are."""
    number: float | int = value.item() if isinstance(value, np.generic) else value
    return number
