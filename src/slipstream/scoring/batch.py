"""Some windows' predictions, and what a task's figures are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from slipstream.data.dataset import Dataset
from slipstream.data.windows import Series, WindowChunk


class PredictionBatch(NamedTuple):
    """Some windows' predictions, scaled."""

    chunk: WindowChunk
    starts: Tensor
    """[B], within the piece"""
    prediction: Tensor
    """[B, H, C, Q]"""
    truth: Tensor | None
    """[B, H, C]; None where the future is not known"""


Predictor = Callable[[Series, Tensor], Tensor]
"""First rows of windows to their predictions, one row per sequence: [B * fold, H, C / fold, Q]."""


class Baseline(NamedTuple):
    what: str
    """In a few words; where there is none here, why"""
    predict: Predictor | None


ChunkLoader = Callable[[str], Iterable[WindowChunk]]
"""A set's name to its windows."""


class TaskMetrics(Protocol):
    """What a task's figures are: sums over windows, what they say, and what to hold them against.

    The modules `numbers` and `classes` are one each.
    """

    HEADLINE: str
    """The metric that pictures and sentences show first"""

    def begin(self, dataset: Dataset, chunk: PredictionBatch) -> Any:
        """Empty sums, on the chunk's device."""

    def add(
        self, sums: Any, chunk: PredictionBatch, owner: Tensor, quantiles: tuple[float, ...], /
    ) -> None:
        """Take in a chunk whose windows are of these series."""

    def merged(self, sums: Sequence[Any]) -> Any:
        """The sums over several sets."""

    def read(self, sums: Any, dataset: Dataset) -> dict[str, Any]:
        """Figures: overall, and in detail."""

    def columns(
        self, chunk: PredictionBatch, dataset: Dataset, reach: Mapping[str, Tensor] | None, /
    ) -> Iterable[tuple[str, Any]]:
        """Truths, where they are known, and predictions, as columns of a table, with names."""

    def baselines(self, dataset: Dataset, pieces: ChunkLoader) -> dict[str, Baseline]:
        """What a model must beat, as far as each means something for this data."""

    def certainty(
        self, test: Any, beside: Mapping[str, Any], dataset: Dataset, /
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What else the test set's sums tell, held against those of others, by name: for the
        summary, and for the test set's detail."""
