"""The figures of a trained model and of the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from slipstream import runs
from slipstream.config import Config
from slipstream.data.splits import SETS
from slipstream.engine import score
from slipstream.engine.job import Task
from slipstream.engine.plan import Plan
from slipstream.engine.score import Baseline, Chunk


def pieces(task: Task, *, with_time: bool = False) -> score.Pieces:
    rows = task.config.engine.buffer_rows
    return lambda which: task.dataset.pieces(which, task.series, rows=rows, with_time=with_time)


def score_model(task: Task, chosen: Plan) -> dict[str, Any]:
    """Every set's figures; predictions.parquet is written on the way."""
    dataset, predict = task.dataset, score.of_model(task.model, chosen)
    scores = {}
    for name in SETS:
        chunks = score.chunks(predict, pieces(task, with_time=name == "test")(name))
        if name == "test":
            chunks = _written(chunks, task)
        scores[name] = score.tally(chunks, dataset, dataset.signature.quantiles)
    return scores


def _written(chunks: Iterator[Chunk], task: Task) -> Iterator[Chunk]:
    """Pass the chunks on, and write each as it goes by."""
    with writing(task.run.folder / "predictions.parquet") as write:
        for chunk in chunks:
            write(score.as_table(chunk, task.dataset))
            yield chunk


@contextmanager
def writing(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Takes tables of one schema, and makes them one Parquet file when all are there."""
    writer: pa.parquet.ParquetWriter | None = None

    def write(table: pa.Table) -> None:
        nonlocal writer
        writer = writer or pa.parquet.ParquetWriter(temporary, table.schema)
        writer.write_table(table)

    with runs.replacing(path) as temporary:
        try:
            yield write
        finally:
            if writer:
                writer.close()


def score_baselines(found: dict[str, Baseline], task: Task) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, baseline in found.items():
        if baseline.predict is None:
            figures[name] = None
            continue
        by_set = {
            which: score.tally(
                score.chunks(baseline.predict, pieces(task)(which)), task.dataset, ()
            )
            for which in SETS
        }
        figures[name] = told_of_baseline(baseline, by_set)
    return figures


def told_of_baseline(baseline: Baseline, by_set: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": baseline.what,
        "metrics": {which: scored["overall"] for which, scored in by_set.items()},
        "scaled": {which: scored["scaled"] for which, scored in by_set.items()},
        "mae_by_step": [row["mae"] for row in by_set["test"]["per_step"]],
    }


def judged_by(config: Config) -> str:
    """The error that models are compared by, in standardised units."""
    return "mae" if config.train.loss in ("mae", "quantile") else "mse"


def beaten_by(model: dict[str, float], beside: dict[str, Any], kind: str) -> list[str]:
    """Baselines with a lower scaled test error than the model."""
    return [
        name
        for name, found in beside.items()
        if found is not None and found["scaled"]["test"][kind] < model[kind]
    ]
