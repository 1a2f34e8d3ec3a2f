"""Predictions on a few validation series during training, for people who watch the run.

It is computed after a validation, by a copy of the model, so that training has the same numbers;
only while the run is watched; and seldom enough to take at most one percent of the time.
Shapes: N windows, H predicted rows, C targets.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream import runs
from slipstream.data.predictions import to_physical
from slipstream.data.series import MICROSECONDS, Ints, SeriesIndex
from slipstream.data.windows import WindowChunk
from slipstream.engine import recovery
from slipstream.engine.context import RunContext
from slipstream.engine.events import Preview
from slipstream.engine.lanes import LaneResult
from slipstream.engine.step import StepProgram
from slipstream.scoring.batch import PredictionBatch
from slipstream.scoring.ensemble import build_predictor
from slipstream.scoring.predict import predict_batches

MAX_SERIES, MAX_TARGETS, MAX_ROWS = 3, 4, 400
"""Limits of a preview: series, targets of each, and rows of a series"""
MIN_S, MAX_SHARE = 1.0, 0.01
"""Seconds between two previews, and the share of the time that they take, at most"""
DIGITS = 8


def build_preview(context: RunContext) -> Preview | None:
    """Return the preview of a run; None where the series are not in memory, or an encoder is
    pre-trained."""
    return (
        None
        if context.dataset.memory is None or context.config.masked
        else ValidationPreview(context)
    )


class ValidationPreview:
    """Writes `preview.json` into the run folder."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._due_at = 0.0
        self._windows: tuple[int, Ints] | None = None
        """The lane, and the windows that are shown of it"""

    def __call__(self, program: StepProgram, place: int, result: LaneResult) -> None:
        began, folder = time.perf_counter(), self.context.run.folder
        if began < self._due_at or not runs.is_watched(folder):
            return
        try:
            runs.write_preview(folder, self._describe(program, place, result))
        except Exception as error:  # whatever it is, training goes on without
            self._due_at = math.inf
            if recovery.is_out_of_memory(error):
                recovery.free_memory()
            self.context.run.warn(f"no predictions are shown: {recovery.first_line(error)}")
            return
        now = time.perf_counter()
        self._due_at = now + max(MIN_S, (now - began) / MAX_SHARE)

    def _describe(self, program: StepProgram, place: int, result: LaneResult) -> dict[str, Any]:
        context, dataset = self.context, self.context.dataset
        assert dataset.memory is not None
        if self._windows is None or self._windows[0] != result.number:
            starts = result.lane.starts["val"].numpy()
            self._windows = (
                result.number,
                choose_windows(starts, dataset.index, dataset.signature.steps_out),
            )
        weights, config = program.weights(place), result.lane.config
        predict = build_predictor(weights, config, dataset, program.plan)
        ids = torch.arange(len(dataset.index.series_names))
        series = context.series or dataset.memory.series
        chunk = WindowChunk(series, torch.from_numpy(self._windows[1]), 0, ids, dataset.memory.time)
        progress = result.progress
        return {
            "epoch": progress.epoch,
            "step": progress.step,
            "lane": result.number,
            "time": _name_axis(dataset.memory.time is not None, dataset.index),
            "targets": list(dataset.signature.targets[:MAX_TARGETS]),
            "classes": list(dataset.signature.classes),
            "series": self._describe_series(list(predict_batches(predict, [chunk]))),
        }

    def _describe_series(self, batches: Sequence[PredictionBatch]) -> list[dict[str, Any]]:
        """Return times, truths and predictions of each series, in physical units."""
        dataset = self.context.dataset
        index, signature, memory = dataset.index, dataset.signature, dataset.memory
        assert memory is not None
        starts = np.concatenate([batch.starts.cpu().numpy() for batch in batches])
        owners = np.searchsorted(index.offsets, starts, side="right") - 1
        columns = self._list_columns(batches)
        described = []
        for owner in np.unique(owners):
            is_own = owners == owner
            rows = (
                starts[is_own][:, None] + signature.lead + np.arange(signature.steps_out)
            ).ravel()
            times = rows - index.offsets[owner]
            if memory.time is not None:
                times = memory.time[rows] / (MICROSECONDS if index.has_dates else 1)
            values = {name: _format(column[is_own]) for name, column in columns.items()}
            name = index.series_names[owner]
            described.append({"name": name, "at": [float(moment) for moment in times], **values})
        return described

    def _list_columns(self, batches: Sequence[PredictionBatch]) -> dict[str, Any]:
        """Return truths, predictions and, with quantiles, the outer ones: [N, H, C] each. Of
        classes, the prediction is the probability of the true one."""
        signature, scaler = self.context.dataset.signature, self.context.dataset.scaler
        scaled = np.concatenate([batch.prediction.cpu().numpy() for batch in batches])
        truth = np.concatenate(
            [batch.truth.cpu().numpy() for batch in batches if batch.truth is not None]
        )
        if signature.classes:
            odds = torch.softmax(torch.from_numpy(scaled[:, :, 0]), dim=-1).numpy()
            numbers = truth[..., 0].astype(np.int64)
            return {"actual": truth, "predicted": np.take_along_axis(odds, numbers[..., None], -1)}
        values = to_physical(scaled, signature, scaler, truth=truth)
        columns = {"actual": values.truth, "predicted": values.point}
        if values.quantiles is not None and values.quantiles.shape[-1] > 1:
            columns |= {"low": values.quantiles[..., 0], "high": values.quantiles[..., -1]}
        return columns


def choose_windows(starts: Ints, index: SeriesIndex, num_rows: int) -> Ints:
    """Return windows of a few series, spread over all of them: those that follow one another
    without overlap, from the first on, until they predict enough rows."""
    owners = np.searchsorted(index.offsets, starts, side="right") - 1
    ids = np.unique(owners)
    spread = np.linspace(0, len(ids) - 1, min(len(ids), MAX_SERIES)).round().astype(np.int64)
    chosen = []
    for owner in ids[spread]:
        own_starts, position = np.sort(starts[owners == owner]), 0
        for _ in range(max(MAX_ROWS // num_rows, 1)):
            if position == len(own_starts):
                break
            chosen.append(own_starts[position])
            position = int(np.searchsorted(own_starts, own_starts[position] + num_rows))
    return np.array(chosen, dtype=np.int64)


def _name_axis(has_time: bool, index: SeriesIndex) -> str:
    return ("date" if index.has_dates else "time") if has_time else "row"


def _format(values: Any) -> list[list[float]]:
    """Return numbers [N, H, C] as one list per target, short enough for a page."""
    flat = values.reshape(-1, values.shape[-1])[:, :MAX_TARGETS].T
    return [[float(f"{value:.{DIGITS}g}") for value in column] for column in flat]
