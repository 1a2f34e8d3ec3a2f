"""Predictions for a batch of windows, and the interfaces that the scoring modules share.

Shapes: B windows, H predicted rows, C targets, Q quantiles or classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slipstream.base.statistics import PairedComparison
from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series, WindowChunk
from slipstream.models.losses import select_point

MAX_RUNS = 16
"""Runs of one series in a batch up to which each is summed by itself"""
HalfWidths = dict[str, Tensor]
"""The half-width of the interval around a prediction, by level: [H, C], scaled"""


class PredictionBatch(NamedTuple):
    """Predictions for some windows, in the scale of the whole table."""

    chunk: WindowChunk
    starts: Tensor
    """[B], within the chunk"""
    prediction: Tensor
    """[B, H, C, Q]"""
    truth: Tensor | None
    """[B, H, C]; None where the future is not known"""
    factor: Tensor | None = None
    """[B, 1, C]: the size of each window's series, relative to that of the whole table, with
    `data.scale_by = "series"`"""
    runs: tuple[int, ...] | None = None
    """The numbers of consecutive windows of one series; None where they are many or not known"""

    def find_series(self) -> Tensor:
        """Return the number of each window's series among all series, [B]; never waits."""
        device = self.prediction.device
        if len(self.chunk.series_ids) == 1:
            only = int(self.chunk.series_ids)
            return torch.full((len(self.starts),), only, dtype=torch.int64, device=device)
        local = self.chunk.series.find_series(self.starts)
        return self.chunk.series_ids.to(device, non_blocking=True)[local.to(device)]

    def select(self, rows: slice | Tensor) -> PredictionBatch:
        """Return the predictions for some of the windows, a range of them or those that are
        marked."""

        def take(values: Tensor) -> Tensor:
            return values[rows.to(values.device) if isinstance(rows, Tensor) else rows]

        truth = None if self.truth is None else take(self.truth)
        factor = None if self.factor is None else take(self.factor)
        starts, prediction = take(self.starts), take(self.prediction)
        return PredictionBatch(self.chunk, starts, prediction, truth, factor)

    def errors(self, quantiles: tuple[float, ...]) -> Tensor:
        """Return point prediction - truth, [B, H, C]; with `factor`, in the units of each series:
        those of a large series are no more than those of a small one."""
        assert self.truth is not None
        errors = select_point(self.prediction, quantiles) - self.truth
        return errors if self.factor is None else errors / self.factor

    def absolute_errors(self, quantiles: tuple[float, ...]) -> Tensor:
        """Return the absolute values of `errors`, [B, H, C]."""
        return self.errors(quantiles).abs()


Predictor = Callable[[Series, Tensor], Tensor]
"""A function from the series and first rows of windows to their predictions, one row per sequence:
[B * C, H, 1, Q] with independent channels, else [B, H, C, Q]"""

ChunkLoader = Callable[[str], Iterable[WindowChunk]]
"""A function from the name of a set to its windows"""


class Baseline(NamedTuple):
    """A simple predictor that a model must beat."""

    description: str
    """A short description; where the data allows no such baseline, the reason"""
    predict: Predictor | None
    state: Mapping[str, Tensor] = MappingProxyType({})
    """The fitted tensors; with the signature of the data they restore the baseline"""


class TaskMetrics(Protocol):
    """The differences between predicting numbers and classes, implemented by `regression` and
    `classification`."""

    HEADLINE: str
    """The metric that plots and sentences show first"""

    def start_sums(self, dataset: Dataset, device: torch.device) -> Any:
        """Return empty sums: `update` adds a batch whose truth is known, `merge` the sums over
        other sets of the same shape, and `compute` returns the metrics."""

    def build_columns(
        self, batch: PredictionBatch, dataset: Dataset, half_widths: HalfWidths | None, /
    ) -> Iterable[tuple[str, Any]]:
        """Yield the named columns of a table: truths where they are known, and predictions."""

    def compare_with(
        self, model: Any, references: Mapping[str, Any], /, *, context: int
    ) -> PairedComparison:
        """Compare the model's sums over a set with the sums of the references, by name."""

    def describe_test(
        self, model: Any, references: Mapping[str, Any], dataset: Dataset, /
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the additions to the summary and to the test set's details, from the sums of the
        model and of the references over the test set."""


def add_by_group(
    sums: Tensor, groups: Tensor, values: Tensor, runs: Sequence[int] | None = None
) -> None:
    """Add values [B, ...] to the sums [groups, ...] of their groups [B], which come in runs; never
    waits, and gives the same bits each time. `runs` has the lengths of the runs, where they are
    few and the host knows them."""
    sums.index_add_(0, *sum_by_group(groups, values, runs))


def sum_by_group(
    groups: Tensor, values: Tensor, runs: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return groups and sums of values to add to them: one row of each run where `runs` has their
    lengths. On a GPU no group has two rows that are not zero, as `add_by_group` needs it."""
    if runs is not None:
        totals = [part.sum(dim=0) for part in values.split(list(runs))]
        return select_firsts(groups, runs), torch.stack(totals)
    return groups, _sum_runs(values, groups) if values.is_cuda else values


def select_firsts(values: Tensor, runs: Sequence[int]) -> Tensor:
    """Return the first value of each run."""
    return torch.stack([part[0] for part in values.split(list(runs))])


def find_runs(chunk: WindowChunk, starts: Tensor) -> tuple[int, ...] | None:
    """Return the numbers of consecutive windows of one series, from first rows within the chunk;
    None where there are more than `MAX_RUNS`."""
    if len(chunk.series_ids) == 1 or not len(starts):
        return (len(starts),)
    local = torch.bucketize(starts.cpu().contiguous(), chunk.series.offsets.cpu(), right=True)
    lengths = torch.unique_consecutive(local, return_counts=True)[1]
    return tuple(lengths.tolist()) if len(lengths) <= MAX_RUNS else None


def _sum_runs(values: Tensor, groups: Tensor) -> Tensor:
    """Return the sum of each run of equal groups in its last row, and zeros in the others: a GPU
    adds rows of one group in any order, and only zeros make no difference then. It takes some
    70 launches, and the runs need not be known."""
    shape, is_last = (-1, *[1] * (values.dim() - 1)), torch.ones_like(groups, dtype=torch.bool)
    is_last[:-1] = groups[1:] != groups[:-1]
    distance = 1
    while distance < len(values):
        same = (groups[distance:] == groups[:-distance]).view(shape)
        added = torch.where(same, values[:-distance], 0.0)
        values = torch.cat([values[:distance], values[distance:] + added])
        distance *= 2
    return torch.where(is_last.view(shape), values, 0.0)
