"""`predict.filter` along the predictions of consecutive windows.

Each predicted row ahead, target and quantile has a filter of its own; it starts at the first window
of a series, of a piece between gaps and of a set, and where a window is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.data.dataset import Dataset
from slipstream.errors import UserError
from slipstream.portable.filters import (
    FilterDesign,
    PredictionFilter,
    describe_filter,
    design_filter,
)
from slipstream.scoring.batch import PredictionBatch

MIN_PROBABILITY = 1e-30
"""What a probability of 0 counts as; its logarithm is finite in float32"""


@dataclass(frozen=True)
class WindowFilter:
    """The filter of a config, for the windows of a data set."""

    config: Config
    dataset: Dataset
    design: FilterDesign

    def describe(self) -> dict[str, Any]:
        """Return its settings and delay, as summaries contain them."""
        return describe_filter(self.config.predict.filter, self.design)

    def start(self) -> BatchFilter:
        """Return it in its initial state, for one predictor and set."""
        return BatchFilter(self)

    def filter_rows(
        self, rows: Iterable[list[PredictionBatch]]
    ) -> Iterator[tuple[list[PredictionBatch], list[PredictionBatch]]]:
        """Yield the filtered batches of each row and those as they were; a row holds one batch of
        every predictor."""
        filters: list[BatchFilter] = []
        for row in rows:
            filters = filters or [self.start() for _ in row]
            yield [one.apply(batch) for one, batch in zip(filters, row, strict=True)], row


def make_window_filter(config: Config, dataset: Dataset) -> WindowFilter | None:
    """Return the filter that the config sets; None where it sets none. Refuse one that the windows
    do not allow."""
    design = None if config.masked else design_filter(config.predict.filter, dataset.signature.step)
    if design is None:
        return None
    memory = dataset.memory
    for which, starts in {} if memory is None else memory.starts.items():
        if len(starts) > 1 and not bool((starts.diff() == 1).any()):
            raise UserError(
                f'predict.filter.kind = "{design.kind}" needs consecutive windows, and no two of '
                f'the {which} windows are; set predict.filter = "none"'
            )
    return WindowFilter(config, dataset, design)


class BatchFilter:
    """The filter of one predictor over the windows of a set, batch after batch."""

    def __init__(self, window_filter: WindowFilter) -> None:
        dataset = window_filter.dataset
        signature, scaler = dataset.signature, dataset.scaler
        self._filter = PredictionFilter(window_filter.design, signature)
        self._breaks, self._last = dataset.index.breaks, (-2, -1)
        self._reach = signature.context - 1
        self._is_classifier = bool(signature.classes)
        if not self._is_classifier:
            self._size, self._shift = (
                np.array([[by_name[name]] for name in signature.targets])
                for by_name in (scaler.size, scaler.shift)
            )

    def apply(self, batch: PredictionBatch) -> PredictionBatch:
        """Return the batch with filtered predictions, float64."""
        rows = batch.starts.cpu().numpy() + batch.chunk.first_row + self._reach
        values = self._filter_values(self._read(batch.prediction), rows)
        return batch._replace(prediction=self._write(values).to(batch.prediction.device))

    def _filter_values(self, values: Any, rows: Any) -> Any:
        """Filter physical predictions, or probabilities, [B, ...], made after these rows."""
        pieces = np.searchsorted(self._breaks, rows, side="right")
        follows = np.diff(rows, prepend=self._last[0]) == 1
        follows &= np.diff(pieces, prepend=self._last[1]) == 0
        self._last = int(rows[-1]), int(pieces[-1])
        return self._filter.apply_pieces(values, follows)

    def _read(self, prediction: Tensor) -> Any:
        values = prediction.double()
        if self._is_classifier:
            return torch.softmax(values, dim=-1).cpu().numpy()
        return values.cpu().numpy() * self._size + self._shift

    def _write(self, values: Any) -> Tensor:
        if self._is_classifier:
            return torch.from_numpy(values).clamp(min=MIN_PROBABILITY).log()
        return torch.from_numpy((values - self._shift) / self._size)
