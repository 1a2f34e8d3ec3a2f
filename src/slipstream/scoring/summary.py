"""Score a trained model and the baselines, and summarize the scores."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from slipstream import runs, stats
from slipstream.config import CLASS_LOSSES, Config
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.engine.plan import Plan
from slipstream.engine.single import TrainingTask
from slipstream.runs import Run
from slipstream.scoring.baseline_files import save_baselines
from slipstream.scoring.baselines import fit_baselines
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch
from slipstream.scoring.filtering import WindowFilter, make_window_filter
from slipstream.scoring.predict import (
    accumulate_side_by_side,
    build_table,
    get_task_metrics,
    make_predictor,
    predict_batches,
    predict_side_by_side,
)
from slipstream.stats import PairedComparison

PREDICTIONS = "predictions.parquet"
SetSums = dict[str, Any]
"""By set: the sums over its windows"""
BaselineSums = dict[str, tuple[Baseline, SetSums]]
"""By name: a baseline and its sums; empty sums where it means nothing"""


def make_chunk_loader(task: TrainingTask, *, with_time: bool = False) -> ChunkLoader:
    """Return a function from the name of a set to its windows."""
    rows = task.config.engine.buffer_rows
    return lambda which: task.dataset.iter_chunks(
        which, task.series, rows=rows, with_time=with_time
    )


def score_model(task: TrainingTask, plan: Plan) -> tuple[SetSums, SetSums]:
    """Return the sums over every set, with `predict.filter` and, where there is one, without; write
    the test set's predictions."""
    dataset = task.dataset
    predict = make_predictor(task.model, plan, dataset.signature, dataset.scaler)
    window_filter = make_window_filter(task.config, dataset)

    def predict_set(which: str) -> Iterator[list[PredictionBatch]]:
        load_chunks = make_chunk_loader(task, with_time=which == "test")
        for batch in predict_batches(predict, load_chunks(which)):
            yield [batch]

    def write_test(rows: Iterable[list[PredictionBatch]]) -> Iterator[list[PredictionBatch]]:
        with open_table_writer(task.run.folder / PREDICTIONS) as write:
            for row in rows:
                write(build_table(row[0], dataset))
                yield row

    sums = {}
    for which in SETS:
        rows: Iterable[list[PredictionBatch]] = predict_set(which)
        if window_filter:
            rows = join_unfiltered(rows, window_filter, [0])
        rows = write_test(rows) if which == "test" else rows
        sums[which] = accumulate_side_by_side(rows, dataset)
    model = {which: one[0] for which, one in sums.items()}
    return model, {which: one[1] for which, one in sums.items()} if window_filter else {}


def join_unfiltered(
    rows: Iterable[list[PredictionBatch]], window_filter: WindowFilter, positions: Sequence[int]
) -> Iterator[list[PredictionBatch]]:
    """Yield rows with every batch filtered, then those at these positions as they were."""
    for filtered, row in window_filter.filter_rows(rows):
        yield [*filtered, *(row[position] for position in positions)]


def summarize_filter(config: Config, dataset: Dataset, unfiltered: SetSums) -> dict[str, Any]:
    """Return the filter and the overall metrics without it, by set; nothing without a filter."""
    window_filter = make_window_filter(config, dataset)
    if window_filter is None:
        return {}
    return {"filter": window_filter.describe(), "unfiltered": summarize_sums(unfiltered)}


@contextmanager
def open_table_writer(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Give a function that takes tables of one schema; the file appears when all are written."""
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


def score_baselines(
    dataset: Dataset, load_chunks: ChunkLoader, baselines: Mapping[str, Baseline] | None = None
) -> BaselineSums:
    """Score these baselines, or those fitted to the data set's own training windows, on every
    set."""
    baselines = baselines or fit_baselines(dataset, load_chunks)
    scored: BaselineSums = {name: (one, {}) for name, one in baselines.items()}
    usable = {name: one.predict for name, one in baselines.items() if one.predict}
    for which in dataset.num_windows:
        rows = predict_side_by_side([*usable.values()], load_chunks, which)
        for name, sums in zip(usable, accumulate_side_by_side(rows, dataset), strict=True):
            scored[name][1][which] = sums
    return scored


def save_scored_baselines(run: Run, folds: Sequence[BaselineSums]) -> None:
    """Write baselines/: those of every fold, or of a run without folds."""
    save_baselines(run, [{name: one for name, (one, _) in fold.items()} for fold in folds])


def summarize_scores(
    run: Run,
    config: Config,
    dataset: Dataset,
    model: SetSums,
    baselines: BaselineSums,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's summary as far as its scores go, and the metrics of every set in detail.

    `others` are sums over the test set that are compared with the model's as the baselines' are.
    """
    detail = {which: sums.compute() for which, sums in model.items()}
    scores = group_by_set(detail)
    beside = {
        name: summarize_baseline(baseline, sums, dataset) if sums else None
        for name, (baseline, sums) in baselines.items()
    }
    tested = {name: sums["test"] for name, (_, sums) in baselines.items() if sums}
    metrics, metric = get_task_metrics(dataset), get_comparison_metric(config)
    comparison, more = metrics.describe_test(model["test"], {**tested, **others}, dataset)
    detail["test"] |= more
    paired = metrics.compare_with(model["test"], tested, context=dataset.signature.context)
    summary = {
        "run": str(run.folder),
        "name": config.name,
        **scores,
        "windows": count_windows(dataset),
        "windows_without_target": dataset.left_out,
        "baselines": beside,
        "judged_by": metric,
        **summarize_comparison(paired, metric),
        **comparison,
        **list_quantiles(dataset),
    }
    return summary, detail


def list_quantiles(dataset: Dataset) -> dict[str, Any]:
    """Return the levels of predicted quantiles, where there are any."""
    levels = dataset.signature.quantiles
    return {"quantiles": list(levels)} if levels else {}


def summarize_comparison(paired: PairedComparison, metric: str) -> dict[str, Any]:
    """Return the verdict on a model, the baselines that are better, and every difference."""
    key = metric if metric in paired.differences else f"scaled_{metric}"
    verdicts = {name: one["verdict"] for name, one in paired.differences[key].items()}
    return {
        "beaten_by": [name for name, verdict in verdicts.items() if verdict == stats.WORSE],
        "against_baselines": {
            "verdict": stats.combine_verdicts(verdicts.values()),
            "metric": key,
            "level": stats.LEVEL,
            "how": paired.how,
            "differences": paired.differences,
        },
    }


def count_windows(dataset: Dataset) -> dict[str, int]:
    """Return the number of windows by set, of all folds together."""
    counts = [fold.num_windows for fold in dataset.folds] or [dataset.num_windows]
    return {which: sum(count[which] for count in counts) for which in counts[0]}


def group_by_set(detail: Mapping[str, Any]) -> dict[str, Any]:
    """Return each set's overall metrics, also in standardised units where there are such."""
    sections = {"metrics": "overall", "scaled": "scaled"}
    return {
        name: {which: metrics[section] for which, metrics in detail.items()}
        for name, section in sections.items()
        if all(section in metrics for metrics in detail.values())
    }


def summarize_sums(sums: SetSums) -> dict[str, Any]:
    """Return the overall metrics from each set's sums."""
    return group_by_set({which: one.compute() for which, one in sums.items()})


def summarize_baseline(baseline: Baseline, sums: SetSums, dataset: Dataset) -> dict[str, Any]:
    """Return a baseline's overall metrics, the headline metric of every predicted row, and of
    numbers those of each target."""
    detail = {which: one.compute() for which, one in sums.items()}
    headline = get_task_metrics(dataset).HEADLINE
    by_step = [row[headline] for row in detail["test"]["per_step"]]
    result = {"what": baseline.what, **group_by_set(detail), f"{headline}_by_step": by_step}
    if "per_target" in detail["test"]:
        result["per_target"] = detail["test"]["per_target"]
    return result


def list_missing_baselines(baselines: BaselineSums) -> list[str]:
    """Say of each baseline without scores why it has none."""
    return [
        f"no {name} baseline: {baseline.what}"
        for name, (baseline, sums) in baselines.items()
        if not sums
    ]


def get_comparison_metric(config: Config) -> str:
    """Return the metric that models are compared by: an error in standardised units, or of classes
    the log-loss. Weights of classes shift the probabilities, and are set for the sake of rare
    classes: then it is the balanced accuracy."""
    if config.train.loss in CLASS_LOSSES:
        return "log_loss" if config.train.class_weights == "none" else "balanced_accuracy"
    return "mae" if config.train.loss in ("mae", "quantile") else "mse"


def get_metric(summary: Mapping[str, Any], which: str, metric: str) -> float:
    """Return that metric of a model or a baseline on one set."""
    return float((summary.get("scaled") or summary["metrics"])[which][metric])


def get_metric_over_seeds(summary: Mapping[str, Any], metric: str) -> dict[str, Any] | None:
    """Return how that metric varies over the seeds on the test set; None with a single seed."""
    spread: dict[str, dict[str, Any]] | None = summary.get("scaled_spread") or summary["spread"]
    return spread[metric] if spread else None


def merge_sums(many: Sequence[Any]) -> Any:
    """Return the sums over several sets of the same shape."""
    return many[0].merge(many[1:])
