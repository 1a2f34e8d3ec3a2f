"""Errors of one regime row by row, and two regimes compared.

A regime is how a model is fed with a stream: with the last rows as a window each time, or with one
row and the state that the rows before have left.

Shapes: N rows, H predicted rows, C targets, U units that are resampled, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream.data.dataset import Dataset
from slipstream.objectives import select_point
from slipstream.scoring.batch import PredictionBatch
from slipstream.stats import compute_percentile_interval

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MIN_UNITS = 5
"""Series, or blocks of rows, from which on resampling says anything"""
NUM_RESAMPLES, RESAMPLES_AT_ONCE = 1000, 50
SETTLED = 1.2
"""A start is over when the error is within this factor of the later one"""
NEGLIGIBLE = 1.05
"""Up to this ratio of errors, a regime that costs a fraction is preferred: seeds differ by more"""


class RowErrors(NamedTuple):
    """Errors of some predictions, in the order of rows."""

    rows: Ints
    """[N]: the last row that each prediction has seen, among all rows"""
    values: dict[str, Floats]
    """By metric, [N]: means over targets and predicted rows"""


def compute_row_errors(batch: PredictionBatch, dataset: Dataset) -> RowErrors:
    """Return the errors of each window: physical ones, and `scaled_` by the training deviation."""
    signature, scaler = dataset.signature, dataset.scaler
    assert batch.truth is not None
    rows = batch.starts.cpu().numpy() + batch.chunk.first_row + signature.context - 1
    if signature.classes:
        log_probs = torch.log_softmax(batch.prediction[:, :, 0].double(), dim=-1)
        labels = batch.truth[..., 0].long()
        loss = -log_probs.gather(-1, labels[..., None])[..., 0]
        wrong = (log_probs.argmax(dim=-1) != labels).double()
        values = {"log_loss": loss.mean(dim=1), "error_rate": wrong.mean(dim=1)}
    else:
        error = select_point(batch.prediction.double(), signature.quantiles) - batch.truth
        size = error.new_tensor([scaler.size[name] for name in signature.targets])
        deviation = error.new_tensor([scaler.deviation[name] for name in signature.targets])
        physical, scaled = error * size, error * size / deviation
        values = {
            "mae": physical.abs().mean(dim=(1, 2)),
            "mse": physical.square().mean(dim=(1, 2)),
            "scaled_mae": scaled.abs().mean(dim=(1, 2)),
            "scaled_mse": scaled.square().mean(dim=(1, 2)),
        }
    return RowErrors(rows, {name: one.cpu().numpy() for name, one in values.items()})


def join_errors(parts: list[RowErrors]) -> RowErrors:
    """Put errors one after the other."""
    rows = np.concatenate([one.rows for one in parts])
    names = parts[0].values
    return RowErrors(
        rows, {name: np.concatenate([p.values[name] for p in parts]) for name in names}
    )


class Places:
    """Where rows lie in their series: counted from the first one, or the first after a gap."""

    def __init__(self, dataset: Dataset) -> None:
        self._begins, self._offsets = dataset.index.segments, dataset.index.offsets

    def count(self, rows: Ints) -> Ints:
        """Return how many rows of the piece come before each."""
        counts: Ints = rows - self._begins[np.searchsorted(self._begins, rows, side="right") - 1]
        return counts

    def find_series(self, rows: Ints) -> Ints:
        """Return the number of each row's series."""
        return np.searchsorted(self._offsets, rows, side="right") - 1


def find_early_starts(dataset: Dataset, which: str) -> Ints:
    """Return, as starts of windows that reach back too far, the rows of a set that come before the
    first full window of their piece: those of series that have windows in this set only."""
    assert dataset.memory is not None
    signature, places, begins = dataset.signature, Places(dataset), dataset.index.segments
    by_set = {name: starts.numpy() for name, starts in dataset.memory.starts.items()}
    lead, reach = signature.context - 1, signature.lead - signature.context + signature.steps_out
    owners = {name: set(places.find_series(one + lead).tolist()) for name, one in by_set.items()}
    others = set().union(*(one for name, one in owners.items() if name != which))
    firsts = begins[np.isin(begins, by_set[which])]
    firsts = firsts[[int(s) in owners[which] - others for s in places.find_series(firsts)]]
    early = [np.arange(first, first + lead) for first in firsts]
    rows = np.concatenate([np.empty(0, np.int64), *early])
    truth = dataset.memory.series.targets.numpy()
    ahead = rows[:, None] + reach - np.arange(signature.steps_out)
    known = ~np.isnan(truth[np.minimum(ahead, len(truth) - 1)]).any(axis=(1, 2))
    starts: Ints = rows[known] - lead
    return starts


def tabulate_rows(
    regimes: Mapping[str, RowErrors], places: Places, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the errors by rows since the start, in ranges that double."""
    counts = {name: places.count(one.rows) for name, one in regimes.items()}
    most = max(int(count.max(initial=0)) for count in counts.values())
    table = []
    for first, last in _iter_ranges(most):
        entry: dict[str, Any] = {"from": first, "to": last}
        for name, errors in regimes.items():
            inside = (counts[name] >= first) & (counts[name] <= last)
            entry[name] = _average(errors, inside, names) if inside.any() else None
        if any(entry[name] for name in regimes):
            table.append(entry)
    return table


def _iter_ranges(most: int) -> Iterator[tuple[int, int]]:
    first, width = 0, 1
    while first <= most:
        yield first, min(first + width - 1, most)
        first, width = first + width, max(first + width, 1)


def _average(errors: RowErrors, inside: npt.NDArray[np.bool_], names: tuple[str, ...]) -> Any:
    result: dict[str, float] = {"rows": int(inside.sum())}
    for name in names:
        mean = float(errors.values[name][inside].mean())
        result["rmse" if name == "mse" else name] = math.sqrt(mean) if name == "mse" else mean
    return result


def measure_warm_up(
    table: list[dict[str, Any]], context: int, name: str, metric: str
) -> dict[str, Any]:
    """Return how many rows a regime needs until its error is within a factor of the later one."""
    known = [entry for entry in table if entry[name]]
    late = [entry for entry in known if entry["from"] >= context] or known[-1:]
    weights = [entry[name]["rows"] for entry in late]
    settled = float(np.average([entry[name][metric] for entry in late], weights=weights))
    rows = None
    if known and known[0]["from"] == 0:
        fits = [entry[name][metric] <= SETTLED * settled for entry in known]
        pairs = zip(known, fits, [*fits[1:], True], strict=True)
        rows = next((entry["from"] for entry, now, then in pairs if now and then), None)
    return {"rows": rows, "factor": SETTLED, "metric": metric, "settled": settled}


class ErrorRatio(NamedTuple):
    """The error of one regime over that of another on the same rows."""

    value: float
    interval: list[float] | None
    how: str
    """What was resampled, or why nothing was"""


def compare_errors(
    one: RowErrors, other: RowErrors, metric: str, places: Places, context: int
) -> ErrorRatio:
    """Return the ratio of the mean errors of `one` and `other`, which have the same rows, with a
    bootstrap interval: whole series are drawn, or where there are few, blocks of rows."""
    above, below = one.values[metric], other.values[metric]
    root = math.sqrt if metric.endswith("mse") else float
    ratio = root(float(above.sum()) / max(float(below.sum()), 1e-300))
    units = places.find_series(one.rows)
    what, count = "series", len(np.unique(units))
    if count < MIN_UNITS:
        units = units * (int(one.rows.max()) // context + 1) + one.rows // context
        what = f"blocks of {context:,} rows from {count} series; other series may differ by more"
    _, codes = np.unique(units, return_inverse=True)
    sums = np.stack([np.bincount(codes, weights=values) for values in (above, below)], axis=1)
    if len(sums) < MIN_UNITS:
        return ErrorRatio(ratio, None, f"none: the rows make {len(sums)} {what}")
    generator, samples = np.random.default_rng(0), []
    for _ in range(0, NUM_RESAMPLES, RESAMPLES_AT_ONCE):
        chances = np.full(len(sums), 1 / len(sums))
        drawn_sums = generator.multinomial(len(sums), chances, size=RESAMPLES_AT_ONCE) @ sums
        samples.append(drawn_sums[:, 0] / np.maximum(drawn_sums[:, 1], 1e-300))
    ratios = np.concatenate(samples)
    ratios = np.sqrt(ratios) if root is math.sqrt else ratios
    how = f"{NUM_RESAMPLES:,} resamples of {len(sums):,} {what}"
    return ErrorRatio(ratio, compute_percentile_interval(ratios), how)
