"""Predictions over every window of a set, their sums, and the table that stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from slipstream.base.errors import UserError
from slipstream.config import Config, Signature
from slipstream.data import windows
from slipstream.data.dataset import Dataset
from slipstream.data.filters import FilterDesign, PredictionFilter, describe_filter, design_filter
from slipstream.data.predictions import WindowPositions, build_prediction_table
from slipstream.data.scaler import Scaler, scale_limits
from slipstream.data.windows import Series, WindowChunk
from slipstream.engine import objective, recovery
from slipstream.engine.carried import CarriedPredictor
from slipstream.engine.plan import Plan
from slipstream.engine.step import EVAL_BATCH
from slipstream.models.forecaster import set_execution
from slipstream.scoring import classification, regression
from slipstream.scoring.batch import (
    ChunkLoader,
    HalfWidths,
    PredictionBatch,
    Predictor,
    TaskMetrics,
    find_runs,
)

Part = TypeVar("Part")
FIRST_GPU_ROWS, FIRST_GPU_WINDOWS = 1 << 19, 8 * EVAL_BATCH
"""The number of context rows, and of windows, that a GPU predicts in its first two passes"""
MAX_SEQUENCES = 1 << 15
"""The number of sequences that a network reads at a time: some kernels take fewer than 2^16"""
MEASURED_RATIO = 4
"""How many times as many it predicts in the third"""
MAX_GPU_WINDOWS = 1 << 20
MAX_PASS_BYTES = 1 << 32
"""What a pass may take on a GPU: no tensor of 16 bits has more numbers then than kernels count with
32 bits"""
TABLE_ROWS = 1 << 16
"""Rows of a table of predictions, unless one window has more"""
MAX_PASS_SHARE = 0.5
"""Of the GPU's free memory, for a pass: what it takes is extrapolated from smaller ones"""


def get_task_metrics(dataset: Dataset) -> TaskMetrics:
    """Return the module that scores the data set's task."""
    return classification if dataset.signature.classes else regression


def make_predictor(model: nn.Module, plan: Plan, signature: Signature, scaler: Scaler) -> Predictor:
    """Return a function from windows to the model's predictions in their final form: quantiles in
    order, which those of a network need not be, and within `model.output_range`."""
    edges = scale_limits(signature, scaler)
    limits = edges and [torch.from_numpy(edge).to(plan.device) for edge in edges]
    if plan.native_kernels:
        set_execution(model, algorithms=plan.rnn, recompute=False, compiled=False)
    carry = CarriedPredictor(model, plan, signature) if signature.state == "carried" else None

    def predict_part(series: Series, starts: Tensor) -> Tensor:
        if carry is not None:
            raw = carry(series, starts)
        else:
            inputs, static = windows.gather_inputs(series, starts)
            static = None if static is None else static.to(plan.device)
            raw = objective.forward(model, inputs.to(plan.device), static, plan=plan)
        if signature.quantiles:
            raw = raw.sort(dim=-1).values
        if limits is None:
            return raw
        num_channels = signature.sequences_per_window
        merged = windows.merge_channels(raw, num_channels).clamp(*limits)
        return windows.separate_channels(merged, num_channels)

    size = max(MAX_SEQUENCES // signature.sequences_per_window, EVAL_BATCH)

    def predict(series: Series, starts: Tensor) -> Tensor:
        parts = [
            predicted
            for piece in starts.split(size)
            for predicted in split_if_full(lambda part: predict_part(series, part), piece)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return predict


def split_if_full(compute: Callable[[Tensor], Part], starts: Tensor) -> Iterator[Part]:
    """Yield `compute(starts)`, or where memory runs out, the results of halves of it."""
    try:
        yield compute(starts)
        return
    except recovery.MEMORY_ERRORS as error:
        if len(starts) == 1 or not recovery.is_out_of_memory(error):
            raise
    recovery.free_memory()
    for half in starts.chunk(2):
        yield from split_if_full(compute, half)


class MeasuredPass(NamedTuple):
    """The memory that a pass of so many windows took."""

    num_windows: int
    peak_bytes: int


def choose_pass_size(small: MeasuredPass, large: MeasuredPass, free_bytes: int) -> int:
    """Return how many windows a GPU should predict at a time, from two passes: a power of two, so
    that runs with a little more or less free memory agree."""
    limit_bytes = min(MAX_PASS_BYTES, MAX_PASS_SHARE * free_bytes)
    more = large.num_windows - small.num_windows, large.peak_bytes - small.peak_bytes
    each_bytes = max(more[1] / more[0], 1.0)
    left_bytes = limit_bytes - large.peak_bytes
    if left_bytes > 0:
        # trees take the same memory for any number of windows, but not all that does not grow is
        # that, so more windows are assumed to take more than was measured
        each_bytes = max(each_bytes, large.peak_bytes / large.num_windows / 4)
    fitting = min(large.num_windows + left_bytes / each_bytes, MAX_GPU_WINDOWS)
    return 1 << max(int(fitting), small.num_windows, 1).bit_length() - 1


class PassSizes:
    """The numbers of windows to predict at a time. On a GPU each pass costs hundreds of launches,
    so that passes should be large: after a first one, when everything is loaded, the memory of two
    small ones is measured, which decides the size of the others."""

    def __init__(self, series: Series) -> None:
        self._device = series.values.device
        self.size = EVAL_BATCH
        if self._device.type == "cuda":
            rows = len(series.context_rows) * series.sequences_per_window
            self.size = max(EVAL_BATCH, min(FIRST_GPU_ROWS // rows, FIRST_GPU_WINDOWS))
        self._is_settled = self._device.type != "cuda"
        self._is_loaded = False
        self._before_bytes = 0
        self._measured: list[MeasuredPass] = []

    def begin(self) -> None:
        """Begin a pass, with all that is done with its predictions."""
        if not self._is_settled:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before_bytes = torch.cuda.memory_allocated(self._device)

    def end(self, num_windows: int) -> None:
        """End a pass of so many windows."""
        if self._is_settled or num_windows < self.size:
            return
        if not self._is_loaded:
            self._is_loaded = True
            return
        peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before_bytes
        self._measured.append(MeasuredPass(num_windows, peak_bytes))
        if len(self._measured) == 1:
            self.size = MEASURED_RATIO * num_windows
            return
        taken_bytes, reserved_bytes = (
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
        )
        free_bytes = torch.cuda.mem_get_info(self._device)[0] + reserved_bytes - taken_bytes
        small, large = self._measured
        self.size, self._is_settled = choose_pass_size(small, large, free_bytes), True

    def halve(self, num_windows: int) -> None:
        """Take at most half as many windows from now on, since so many did not fit."""
        self.size, self._is_settled = max(num_windows // 2, 1), True


def predict_batches(
    predict: Predictor, chunks: Iterable[WindowChunk], *, truth: bool = True
) -> Iterator[PredictionBatch]:
    """Yield predictions for every window of the chunks."""
    return (batch for (batch,) in _predict_rows([predict], chunks, truth=truth))


def predict_side_by_side(
    predictors: Sequence[Predictor], load_chunks: ChunkLoader, set_name: str
) -> Iterator[list[PredictionBatch]]:
    """Yield rows with one batch of each predictor, all of the same windows."""
    return _predict_rows(predictors, load_chunks(set_name), truth=True)


@torch.inference_mode()
def _predict_rows(
    predictors: Sequence[Predictor], chunks: Iterable[WindowChunk], *, truth: bool
) -> Iterator[list[PredictionBatch]]:
    for chunk in chunks:
        passes, first = PassSizes(chunk.series), 0
        all_starts = chunk.starts.to(chunk.series.values.device)  # at once: each copy is a wait
        while first < len(all_starts):
            place, row = slice(first, first + passes.size), None
            starts, runs = all_starts[place], find_runs(chunk, chunk.starts[place])
            passes.begin()
            try:
                row = _predict_row(predictors, chunk, starts, runs, truth=truth)
            except recovery.MEMORY_ERRORS as error:
                if len(starts) == 1 or not recovery.is_out_of_memory(error):
                    raise
            if row is None:  # past the except block, whose traceback would pin the memory
                recovery.free_memory()
                passes.halve(len(starts))
                continue
            yield row
            passes.end(len(starts))
            first += len(starts)


def _predict_row(
    predictors: Sequence[Predictor],
    chunk: WindowChunk,
    starts: Tensor,
    runs: tuple[int, ...] | None,
    *,
    truth: bool,
) -> list[PredictionBatch]:
    """Return a batch of each predictor, of the windows with these first rows within the chunk."""
    series, known = chunk.series, None
    scales = series.find_target_scales(starts)
    if truth:
        known = windows.take_rows(series.targets, starts[:, None] + series.target_rows)
        known = known if scales is None else known * scales[0] + scales[1]
    row = []
    for predict in predictors:
        raw = predict(series, starts)
        known = None if known is None else known.to(raw.device)
        prediction = windows.merge_channels(raw, series.sequences_per_window)
        factor = None
        if scales is not None:
            factor, offset = scales.to(raw.device)
            prediction = prediction * factor[..., None] + offset[..., None]
        row.append(PredictionBatch(chunk, starts, prediction, known, factor, runs))
    return row


def accumulate(batches: Iterable[PredictionBatch], dataset: Dataset) -> Any:
    """Return the sums over a predictor's batches."""
    (sums,) = accumulate_side_by_side(([batch] for batch in batches), dataset)
    return sums


def accumulate_side_by_side(
    rows: Iterable[Sequence[PredictionBatch]], dataset: Dataset
) -> list[Any]:
    """Return each predictor's sums; a row holds one batch of every predictor."""
    metrics = get_task_metrics(dataset)
    totals: list[Any] = []
    for batches in rows:
        if not totals:
            totals = [metrics.start_sums(dataset, batch.prediction.device) for batch in batches]
        for sums, batch in zip(totals, batches, strict=True):
            sums.update(batch)
    assert totals
    return totals


def build_table(
    batch: PredictionBatch, dataset: Dataset, half_widths: HalfWidths | None = None
) -> pa.Table:
    """Return one row per window and predicted row: physical units, or probabilities of classes."""
    chunk = batch.chunk
    starts = batch.starts.cpu().numpy() + chunk.first_row
    positions = WindowPositions(
        dataset.signature, dataset.index, starts, chunk.time, chunk.first_row
    )
    columns = get_task_metrics(dataset).build_columns(batch, dataset, half_widths)
    return build_prediction_table(positions, columns)


def build_tables(
    batch: PredictionBatch, dataset: Dataset, half_widths: HalfWidths | None = None
) -> Iterator[pa.Table]:
    """Yield the rows of `build_table` in tables of whole windows, each a group of rows in a file:
    readers sample the groups, and a pass of a GPU has very many windows."""
    size = max(TABLE_ROWS // dataset.signature.steps_out, 1)
    for first in range(0, len(batch.starts), size):
        yield build_table(batch.select(slice(first, first + size)), dataset, half_widths)


MIN_PROBABILITY = 1e-30
"""Smaller probabilities count as this one, whose logarithm is finite in float32"""


@dataclass(frozen=True)
class WindowFilter:
    """The filter of a config, for the windows of a data set."""

    config: Config
    dataset: Dataset
    design: FilterDesign

    def describe(self) -> dict[str, Any]:
        """Return the filter's settings and delay, as in summaries."""
        return describe_filter(self.config.predict.filter, self.design)

    def start(self) -> BatchFilter:
        """Return a filter in its initial state, for one predictor and set."""
        return BatchFilter(self)

    def filter_rows(
        self, rows: Iterable[list[PredictionBatch]]
    ) -> Iterator[tuple[list[PredictionBatch], list[PredictionBatch]]]:
        """Yield the filtered and the unfiltered batches of each row; a row holds one batch of every
        predictor."""
        filters: list[BatchFilter] = []
        for row in rows:
            filters = filters or [self.start() for _ in row]
            yield [filter_.apply(batch) for filter_, batch in zip(filters, row, strict=True)], row


def make_window_filter(config: Config, dataset: Dataset) -> WindowFilter | None:
    """Return the filter that the config sets; None where it sets none. Refuse one that the windows
    do not allow."""
    design = None if config.masked else design_filter(config.predict.filter, dataset.signature.step)
    if design is None:
        return None
    memory = dataset.memory
    for set_name, starts in {} if memory is None else memory.starts.items():
        if len(starts) > 1 and not bool((starts.diff() == 1).any()):
            raise UserError(
                f'predict.filter.kind = "{design.kind}" needs consecutive windows, and no two of '
                f'the {set_name} windows are; set predict.filter = "none"'
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
