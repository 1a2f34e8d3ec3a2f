"""Predict new data with a trained model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from slipstream.base.errors import UserError
from slipstream.base.text import escape_controls
from slipstream.data.table import check_table_path, open_table_writer
from slipstream.engine import recovery
from slipstream.inference.rows import describe_unknown_future, find_last_windows
from slipstream.inference.trained import TrainedRun, load_trained
from slipstream.scoring.batch import PredictionBatch
from slipstream.scoring.predict import (
    WindowFilter,
    build_table,
    make_window_filter,
    predict_batches,
)


def predict(
    run: str | Path,
    data: Any,
    *,
    every: bool = False,
    resample: bool = False,
    ensemble: bool | None = None,
    joins: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
) -> pa.Table:
    """Predict with a run's model; `slipstream.predict` documents the arguments."""
    trained = load_trained(run, overrides=overrides, ensemble=ensemble, allow_code=allow_code)
    return predict_with(trained, data, every=every, resample=resample, joins=joins)


@recovery.explain_out_of_memory()
def predict_with(
    trained: TrainedRun,
    data: Any,
    *,
    every: bool = False,
    resample: bool = False,
    joins: Mapping[str, Any] | None = None,
) -> pa.Table:
    """Predict with a run that is loaded already."""
    datasets = [
        member.load_new(data, targets=False, resample=resample, joins=joins)
        for member in trained.members
    ]
    dataset, folds, _ = trained.bind(datasets, ["all"])
    plan, predictor = trained.first.plan, folds[-1]
    assert dataset.memory is not None
    signature, notes = dataset.signature, list(dataset.notes)
    settings = trained.first.config.data
    only_last = signature.horizon > 0 and not every
    if not only_last:
        left_out, num_windows = dataset.left_out["all"], dataset.num_windows["all"]
        notes += describe_unknown_future(settings, signature, left_out, num_windows)
    for note in notes:
        warnings.warn(escape_controls(note), stacklevel=2)
    with plan.flags():
        (chunk,) = dataset.iter_chunks("all", dataset.memory.series.to(plan.device), rows=0)
        last: torch.Tensor | None = None
        if only_last:
            ends = find_last_windows(dataset.index, settings, signature, chunk.starts.numpy())
            last = torch.from_numpy(ends)
        window_filter = make_window_filter(trained.first.config, dataset)
        if last is not None and window_filter is None:
            chunk = chunk._replace(starts=last)
        batches = predict_batches(predictor.predict, [chunk], truth=False)
        if window_filter:
            batches = _filter_batches(batches, window_filter, last)
        tables = [build_table(batch, dataset, predictor.half_widths) for batch in batches]
    metadata = {"model": trained.describe(on_folds=False)}
    if window_filter:
        metadata["filter"] = json.dumps(window_filter.describe())
    return pa.concat_tables(tables).replace_schema_metadata(metadata)


def _filter_batches(
    batches: Iterable[PredictionBatch], window_filter: WindowFilter, selected: torch.Tensor | None
) -> Iterator[PredictionBatch]:
    """Yield the predictions of each batch, filtered, and limited to the selected windows."""
    for batch in map(window_filter.start().apply, batches):
        if selected is None:
            yield batch
        elif (where := torch.isin(batch.starts.cpu(), selected)).any():
            yield batch.select(where)


def write_predictions(table: pa.Table, path: Path) -> None:
    """Write predictions as CSV, Parquet or Arrow, by the file's ending."""
    check_table_path(path, "predictions")
    try:
        with open_table_writer(path) as write:
            write(table)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
