"""Compare runs on the predicted rows that all of them have: errors and differences with intervals.

The windows of a test set are resampled in blocks of neighbours, the same ones for every run, so
that what makes a window hard for all runs cancels out of their difference. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.base import statistics
from slipstream.base.errors import UserError
from slipstream.data.predictions import (
    FOLD,
    LABEL,
    MIN_PROBABILITY,
    PREDICTIONS,
    ROW,
    STEP,
    Predictions,
    name_probability,
    read_predictions,
)
from slipstream.reporting.page import CURVES_IN

Array = npt.NDArray[Any]
MAX_UNITS = 4_000
"""Windows that are resampled; of more, neighbours are joined first"""
OTHER_ROWS = "were tested on different rows"
OTHER_TARGETS = "predict different targets"
OTHER_VALUES = (
    "have different true values in the same rows (of other data, or changed by data.prepare)"
)
SAME_TRUTH = 1e-4
"""Relative to their spread, how far the true values of two runs may differ by rounding"""


class PairedResult(NamedTuple):
    """The errors of runs on their common rows, and what to keep in mind."""

    rows: list[dict[str, Any]]
    notes: list[str]
    incomparable: list[str]
    """Runs that were tested on other rows, targets or true values than the first"""


@dataclass(frozen=True)
class TestRows:
    """The predicted rows of one run: where they are, and their errors."""

    keys: Array
    """[M]: series, row, step and fold as one number, ascending"""
    windows: Array
    """[M]: the same for the windows that they belong to"""
    truth: Array
    """[M, C] numbers, or [M, 1] codes of classes"""
    losses: dict[str, Array]
    """[M, C] by metric; NaN where the truth is missing"""

    def select(self, rows: Array) -> TestRows:
        losses = {name: values[rows] for name, values in self.losses.items()}
        return TestRows(self.keys[rows], self.windows[rows], self.truth[rows], losses)


def find_predictions(folder: Path) -> Path | None:
    """Return the test predictions of what a run, a search or a probe predicts with."""
    places = (folder / inside / PREDICTIONS for inside in CURVES_IN)
    return next((path for path in places if path.is_file()), None)


def pair_runs(folders: Mapping[str, Path], *, context: int) -> PairedResult:
    """Compare the predictions of runs with those of the first one, row by row."""
    tables = dict(_read_tables(folders))
    if len(tables) < 2:
        return PairedResult([], [], [])
    first = next(iter(tables))
    targets = _name_targets(tables[first])
    codes: dict[str, int] = {}
    runs = {
        label: _read_rows(table, targets, codes)
        for label, table in tables.items()
        if _name_targets(table) == targets
    }
    incomparable = {label: OTHER_TARGETS for label in tables if label not in runs}
    common, notes = _find_common(runs, first, incomparable)
    notes = [
        f"{label} and {first} {why}, so their errors cannot be compared"
        for label, why in incomparable.items()
    ] + notes
    rows = list(_compare(common, first, context, notes)) if len(common) > 1 else []
    return PairedResult(rows, notes, list(incomparable))


def _read_tables(folders: Mapping[str, Path]) -> Iterator[tuple[str, Predictions]]:
    for label, folder in folders.items():
        path = find_predictions(folder)
        if path is None:
            continue
        try:
            table = read_predictions(path)
        except UserError:  # damaged, or half a copy
            continue
        if len(table) and not table.sampled:
            yield label, table


def _name_targets(table: Predictions) -> tuple[str, ...]:
    """Return the numeric targets of a table; of classes, the label and the probabilities."""
    classes = table.shape.classes
    return (LABEL, *map(name_probability, classes)) if classes else table.shape.targets


def _read_rows(table: Predictions, targets: Sequence[str], codes: dict[str, int]) -> TestRows:
    series = np.array([codes.setdefault(name, len(codes)) for name in table.names])[table.codes]
    zeros = np.zeros(len(table), dtype=np.int64)
    row, step, fold = (
        table[name].astype(np.int64) if name in table.shape.columns else zeros
        for name in (ROW, STEP, FOLD)
    )
    windows = ((series * 64 + fold) << 40) + row - step + (1 << 32)
    keys = windows * 4096 + step % 4096
    truth, losses = _compute_losses(table, targets)
    order = np.argsort(keys, kind="stable")
    return TestRows(keys, windows, truth, losses).select(order)


def _compute_losses(table: Predictions, targets: Sequence[str]) -> tuple[Array, dict[str, Array]]:
    if not table.shape.classes:
        truth = np.stack([table.read_truth(name) for name in targets], axis=1)
        error = np.stack([table.read_errors(name) for name in targets], axis=1)
        return truth, {"mae": np.abs(error), "rmse": error**2}
    truth = table.read_classes(LABEL)[:, None]
    probs = np.stack([table[name] for name in targets[1:]], axis=1).astype(float)
    chosen = np.take_along_axis(probs, np.maximum(truth, 0), axis=1)
    right = (probs.argmax(axis=1)[:, None] == truth).astype(float)
    unknown = truth < 0
    log_loss = np.where(unknown, np.nan, -np.log(np.maximum(chosen, MIN_PROBABILITY)))
    return truth, {"log_loss": log_loss, "accuracy": np.where(unknown, np.nan, right)}


def _find_common(
    runs: dict[str, TestRows], first: str, incomparable: dict[str, str]
) -> tuple[dict[str, TestRows], list[str]]:
    """Return the rows that the comparable runs share; the reasons why others are not
    are added to `incomparable`."""
    base, notes, selected = runs[first], list[str](), {first: runs[first]}
    for label, run_rows in runs.items():
        keys, in_base, in_run = np.intersect1d(base.keys, run_rows.keys, return_indices=True)
        if not len(keys):
            incomparable[label] = OTHER_ROWS
        elif not is_same_truth(base.truth[in_base], run_rows.truth[in_run]):
            incomparable[label] = OTHER_VALUES
        elif label != first:
            selected[label] = run_rows
    shared = base.keys
    for rows in selected.values():
        shared = np.intersect1d(shared, rows.keys)
    largest = max(len(rows.keys) for rows in selected.values())
    if len(selected) > 1 and len(shared) < largest:
        notes.append(
            f"the test sets differ: of up to {largest:,} predicted rows, the {len(shared):,} that "
            "these runs share are compared window by window"
        )
    common = {
        label: rows.select(np.searchsorted(rows.keys, shared)) for label, rows in selected.items()
    }
    return (common if len(shared) else {}), notes


def is_same_truth(truth: Array, other_truth: Array) -> bool:
    """Whether the true values of two runs are the same, but for rounding."""
    spread = np.nanstd(truth) if np.isfinite(truth).any() else 0.0
    return bool(
        np.allclose(truth, other_truth, rtol=SAME_TRUTH, atol=SAME_TRUTH * spread, equal_nan=True)
    )


def _compare(
    runs: Mapping[str, TestRows], first: str, context: int, notes: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield one row per run and metric."""
    units = _join_windows(runs[first], context)
    if not units.is_enough:
        notes.append("the test set has too few windows that share no rows for intervals")
    for metric in runs[first].losses:
        sums = {label: units.sum(rows.losses[metric]) for label, rows in runs.items()}
        resampled = _resample(sums, units, metric) if units.is_enough else {}
        values = {
            label: float(_compute(losses.sum(axis=0), known.sum(axis=0), metric))
            for label, (losses, known) in sums.items()
        }
        for label, value in values.items():
            row: dict[str, Any] = {"run": label, "metric": metric, "value": value}
            row["rows"] = len(runs[label].keys)
            if label in resampled:
                row |= _name_bounds("", resampled[label])
            if label != first:
                row["difference"] = value - values[first]
                bounds = label in resampled and _name_bounds(
                    "difference_", resampled[label] - resampled[first]
                )
                if bounds:
                    interval = statistics.Interval(row["difference"], *bounds.values())
                    verdict = interval.judge(higher_is_better=metric in statistics.HIGHER_IS_BETTER)
                    row |= bounds | {"verdict": verdict}
            yield row


def _name_bounds(prefix: str, samples: Array) -> dict[str, float]:
    bounds = statistics.compute_percentile_interval(samples)
    return dict(zip((f"{prefix}low", f"{prefix}high"), bounds or (), strict=False))


class Units(NamedTuple):
    """What is resampled: windows, or neighbours that were joined."""

    of_row: Array
    """[M]: the unit of each predicted row"""
    total: int
    block: int
    """Neighbouring units that share rows"""
    is_enough: bool

    def sum(self, losses: Array) -> tuple[Array, Array]:
        """Return the sums of losses and the counts in each unit, [total, C]."""
        known = np.isfinite(losses)
        return self._add(np.where(known, losses, 0.0)), self._add(known.astype(float))

    def _add(self, values: Array) -> Array:
        columns = [np.bincount(self.of_row, column, self.total) for column in values.T]
        return np.stack(columns, axis=1)


def _join_windows(rows: TestRows, context: int) -> Units:
    windows, of_row = np.unique(rows.windows, return_inverse=True)
    block = statistics.estimate_block_length(windows, context)
    is_enough = len(windows) >= statistics.MIN_BLOCKS * block
    joined = -(-len(windows) // MAX_UNITS)
    return Units(of_row // joined, -(-len(windows) // joined), -(-block // joined), is_enough)


def _resample(
    sums: Mapping[str, tuple[Array, Array]], units: Units, metric: str
) -> dict[str, Array]:
    """Return a metric of every run for the same resamples, [R] each."""
    parts: dict[str, list[Array]] = {label: [] for label in sums}
    for counts in statistics.draw_counts(units.total, units.block):
        for label, (losses, known) in sums.items():
            parts[label].append(_compute(counts @ losses, counts @ known, metric))
    return {label: np.concatenate(samples) for label, samples in parts.items()}


def _compute(losses: Array, known: Array, metric: str) -> Any:
    """Return a metric from sums of losses and counts, [C] or, of resamples, [R, C]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (losses / known).mean(axis=-1)
    return np.sqrt(means) if metric == "rmse" else means
