"""The figures of a trained model and of the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from slipstream import runs
from slipstream.config import CLASS_LOSSES, Config
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.scoring import predict as score
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch


def make_chunk_loader(task: TrainingTask, *, with_time: bool = False) -> ChunkLoader:
    rows = task.config.engine.buffer_rows
    return lambda which: task.dataset.iter_chunks(
        which, task.series, rows=rows, with_time=with_time
    )


def score_model(task: TrainingTask, chosen: Plan) -> dict[str, Any]:
    """Every set's sums; predictions.parquet is written on the way."""
    dataset, predict = task.dataset, score.make_predictor(task.model, chosen)
    sums = {}
    for name in SETS:
        chunks = score.predict_batches(
            predict, make_chunk_loader(task, with_time=name == "test")(name)
        )
        if name == "test":
            chunks = _written(chunks, task)
        beside = ([chunk] for chunk in chunks)
        (sums[name],) = score.accumulate_sums(beside, dataset, dataset.signature.quantiles)
    return sums


def _written(chunks: Iterator[PredictionBatch], task: TrainingTask) -> Iterator[PredictionBatch]:
    """Pass the chunks on, and write each as it goes by."""
    with open_table_writer(task.run.folder / "predictions.parquet") as write:
        for chunk in chunks:
            write(score.build_table(chunk, task.dataset))
            yield chunk


@contextmanager
def open_table_writer(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Takes tables of one schema, and makes them one Parquet file when all are there."""
    writer: pa.parquet.ParquetWriter | None = None

    def write(table: pa.Table) -> None:
        nonlocal writer
        writer = writer or pa.parquet.ParquetWriter(temporary, table.schema)
        writer.write_table(table)

    with runs.replace_atomically(path) as temporary:
        try:
            yield write
        finally:
            if writer:
                writer.close()


BaselineSums = dict[str, tuple[Baseline, dict[str, Any]]]
"""Baselines by name, with the sums of every set; none where it means nothing"""


def score_baselines(task: TrainingTask) -> BaselineSums:
    """Every baseline, fitted on the task's own training windows."""
    found: BaselineSums = {}
    for name, baseline in score.fit_baselines(task.dataset, make_chunk_loader(task)).items():
        sums = {}
        for which in SETS if baseline.predict else ():
            assert baseline.predict is not None
            chunks = score.predict_batches(baseline.predict, make_chunk_loader(task)(which))
            (sums[which],) = score.accumulate_sums(([chunk] for chunk in chunks), task.dataset, ())
        found[name] = baseline, sums
    return found


def group_by_set(figures: dict[str, Any]) -> dict[str, Any]:
    """Each set's metrics, and in standardised units where there are such."""
    found = {"metrics": {which: read["overall"] for which, read in figures.items()}}
    if all("scaled" in read for read in figures.values()):
        found["scaled"] = {which: read["scaled"] for which, read in figures.items()}
    return found


def summarize_baseline(
    baseline: Baseline, sums: dict[str, Any], dataset: Dataset
) -> dict[str, Any] | None:
    if not sums:
        return None
    figures = {which: score.compute_metrics(one, dataset) for which, one in sums.items()}
    headline = score.get_task_metrics(dataset).HEADLINE
    by_step = [row[headline] for row in figures["test"]["per_step"]]
    return {"what": baseline.what, **group_by_set(figures), f"{headline}_by_step": by_step}


def get_comparison_metric(config: Config) -> str:
    """The error that models are compared by: log-loss, or one in standardised units."""
    if config.train.loss in CLASS_LOSSES:
        return "log_loss"
    return "mae" if config.train.loss in ("mae", "quantile") else "mse"


def get_error(found: dict[str, Any], which: str, kind: str) -> float:
    """That error of a model or a baseline, on one set."""
    return float(found.get("scaled", found["metrics"])[which][kind])


def get_error_over_seeds(found: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """How that error varies over the seeds, on the test set; None where there are not two."""
    spread: dict[str, dict[str, Any]] | None = found.get("scaled_spread") or found["spread"]
    return spread[kind] if spread else None


def find_better_baselines(model: dict[str, Any], beside: dict[str, Any], kind: str) -> list[str]:
    """Baselines with a lower test error than the model."""
    return [
        name
        for name, found in beside.items()
        if found is not None and get_error(found, "test", kind) < get_error(model, "test", kind)
    ]
