"""Score a trained model on one of its own sets or on new data.

`evaluate` scores windows, each on its own, as in training (`score_windows`). With `stream`, it also
scores a state that is carried on from row to row, on the same rows, and says which of the two to
deploy (`score_stream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from slipstream import runs
from slipstream.base.errors import DATA_FILE, Option, UserError
from slipstream.base.statistics import compute_percentile_interval
from slipstream.base.storage import compute_sha256
from slipstream.data.dataset import Dataset
from slipstream.data.splits import SETS
from slipstream.data.table import open_table_writer
from slipstream.data.windows import Series, WindowChunk
from slipstream.engine import recovery
from slipstream.inference.networks import explain_no_steps
from slipstream.inference.portable import MEMBERS
from slipstream.inference.stream import StreamMeasurement, save_measurement
from slipstream.inference.trained import (
    Member,
    TrainedRun,
    find_baselines,
    load_own_sets,
    load_trained,
)
from slipstream.models.files import WEIGHTS_FILE
from slipstream.models.losses import select_point
from slipstream.models.shapes import count_multiply_adds
from slipstream.scoring.batch import Baseline, ChunkLoader, PredictionBatch, Predictor
from slipstream.scoring.ensemble import (
    FoldPredictor,
    IntervalSums,
    average_predictors,
    score_intervals,
)
from slipstream.scoring.predict import (
    WindowFilter,
    accumulate_side_by_side,
    build_tables,
    get_task_metrics,
    make_predictor,
    make_window_filter,
    predict_batches,
    predict_side_by_side,
)
from slipstream.scoring.summary import (
    get_comparison_metric,
    list_quantiles,
    merge_sums,
)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
TableWriter = Callable[[pa.Table], None]
UNFILTERED = "unfiltered"
"""The scores of the model without `predict.filter`"""
WINDOW, CARRIED = "window", "carried"
"""Each prediction from a window of its own, or from a state carried on from row to row"""
MIN_UNITS = 5
"""Series, or blocks of rows, below which resampling has no meaning"""
NUM_RESAMPLES, RESAMPLES_AT_ONCE = 1000, 50
"""Resamples are drawn in parts, so that their counts stay small in memory"""
SETTLED = 1.2
"""The warm-up ends when the error is within this factor of the later error"""
NEGLIGIBLE = 1.05
"""Up to this ratio of errors, a carried state, which costs a fraction, is preferred: seeds differ
by more"""
NO_CHANGE = 0.05
"""Changes below this, in percent, are shown as none"""


@recovery.explain_out_of_memory()
def evaluate(
    run: str | Path,
    data: Any = None,
    *,
    on: str = "test",
    resample: bool = False,
    ensemble: bool | None = None,
    joins: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    allow_code: bool = False,
    stream: bool = False,
    predictions: str | Path | None = None,
) -> dict[str, Any]:
    """Score a run's model; `slipstream.evaluate` documents the arguments."""
    file = None if predictions is None else _check_file(Path(predictions), stream=stream)
    loaded = load_evaluation(
        run,
        data,
        on=on,
        resample=resample,
        joins=joins,
        ensemble=ensemble,
        overrides=overrides,
        allow_code=allow_code,
    )
    if not stream:
        return score_windows(loaded, file)
    result = score_stream(loaded)
    return result | record_stream(loaded, result)


def _check_file(path: Path, *, stream: bool) -> Path:
    """Refuse a file that cannot be written, before anything is computed."""
    if stream:
        raise UserError(
            "only the predictions of windows are written; choose either these or the stream"
        )
    if path.suffix.lower() != ".parquet":
        raise UserError(f"{path}: these predictions are written as Parquet; name a .parquet file")
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{path}: there is no folder {path.parent}; create it first")
    return path


class LoadedEvaluation(NamedTuple):
    """A trained run and the windows to score; each list has one entry for every fold, or one."""

    trained: TrainedRun
    on: str
    """The set, or "data" """
    set_name: str
    """The set's name in the data sets"""
    dataset: Dataset
    folds: list[Dataset]
    predictors: list[FoldPredictor]
    members: Sequence[Sequence[Predictor]]
    """Predictors of each member, for an ensemble of runs"""

    def describe(self) -> dict[str, Any]:
        """Return the names of the run, the model and the set for the summary."""
        return {
            "run": str(self.trained.run.folder),
            "on": self.on,
            "model": self.trained.describe(on_folds=bool(self.dataset.folds)),
        }

    def count_windows(self) -> dict[str, int]:
        """Return the numbers of windows that are scored, and that are left out."""
        return {
            "windows": sum(fold.num_windows[self.set_name] for fold in self.folds),
            "windows_without_target": sum(
                fold.left_out.get(self.set_name, 0) for fold in self.folds
            ),
        }


def load_evaluation(
    run: str | Path,
    data: Any,
    *,
    on: str,
    resample: bool,
    joins: Mapping[str, Any] | None,
    **options: Any,
) -> LoadedEvaluation:
    """Load a run and one of its own sets, or new data; `options` are those of `load_trained`."""
    if on not in SETS:
        raise UserError(f'there is no set "{on}"; choose one of {", ".join(SETS)}')
    set_name = on if data is None else "all"
    trained = load_trained(run, own_data=data is None, targets=True, **options)
    datasets = _load_datasets(trained, data, resample=resample, joins=joins)
    dataset, predictors, members = trained.bind(datasets, [set_name])
    if len(dataset.folds) > len(predictors):
        raise UserError(
            f"{trained.run.folder}: holds the model of one fold; set tune.retrain to have "
            "them all, or pass data with " + Option("data")
        )
    folds = [dataset.select_fold(fold) for fold in dataset.folds] or [dataset]
    count = len(folds)
    return LoadedEvaluation(
        trained,
        on if data is None else "data",
        set_name,
        dataset,
        folds,
        predictors[-count:],
        members[-count:],
    )


def _load_datasets(
    trained: TrainedRun, data: Any, *, resample: bool, joins: Mapping[str, Any] | None
) -> list[Dataset]:
    """Load each member's own data, or new data."""
    if data is not None:
        options: dict[str, Any] = {"targets": True, "resample": resample, "joins": joins}
        return [member.load_new(data, **options) for member in trained.members]
    if trained.untested:
        raise UserError(
            f"{trained.run.folder}: is {trained.untested}; it has seen the rows of all sets: pass "
            "new rows to score with " + Option("data")
        )
    if joins:
        raise UserError(
            "joins are for new data; pass the rows to score as well (" + Option("data") + ")"
        )
    runs.require_data(
        trained.run,
        trained.first.config,
        data,
        (
            "pass the rows to score with "
            + DATA_FILE
            + ", or a file with that whole table, of which the test set is scored, with "
            + Option("set", "data.path=FILE")
        ),
    )
    return load_own_sets(trained.members)


def score_windows(loaded: LoadedEvaluation, predictions: Path | None = None) -> dict[str, Any]:
    """Score the model and the baselines on the windows of a set, and write the model's predictions
    to a file, if one is named."""
    trained, set_name, dataset, folds = (
        loaded.trained,
        loaded.set_name,
        loaded.dataset,
        loaded.folds,
    )
    plan, signature = trained.first.plan, dataset.signature
    intervals = [
        IntervalSums(predictor.half_widths or {}, fold)
        for predictor, fold in zip(loaded.predictors, folds, strict=True)
    ]
    filters = [make_window_filter(trained.first.config, fold) for fold in folds]
    writer = nullcontext() if predictions is None else open_table_writer(predictions)
    with plan.flags(), writer as write:
        memory = dataset.memory
        series = None if memory is None else memory.series.to(plan.device)
        rows, with_time = trained.first.config.engine.buffer_rows, write is not None
        loaders = [_make_loader(fold, series, rows, with_time=with_time) for fold in folds]
        device = torch.device("cpu") if series is None else plan.device
        baselines, notes = find_baselines(trained, folds, loaders, device)
        beside = _list_beside(trained, loaded.members, baselines)
        writers = [write] * len(folds)
        parts = (folds, loaders, loaded.predictors, intervals, beside, filters, writers)
        sums = [_score_fold(_Fold(*part), set_name) for part in zip(*parts, strict=True)]
        scores, *side_scores = (merge_sums(many).compute() for many in zip(*sums, strict=True))
    window_filter = filters[-1]
    names = [*beside[-1], *([UNFILTERED] if window_filter else [])]
    metrics = {name: get_overall(side) for name, side in zip(names, side_scores, strict=True)}
    interval_scores = score_intervals(intervals)
    return {
        **loaded.describe(),
        **get_overall(scores),
        **({"filter": window_filter.describe()} if window_filter else {}),
        **({UNFILTERED: metrics[UNFILTERED]} if window_filter else {}),
        **({"classes": list(signature.classes)} if signature.classes else {}),
        "baselines": {
            name: {"what": baseline.description, **metrics[name]} if baseline.predict else None
            for name, baseline in baselines[-1].items()
        },
        **_summarize_members(trained, metrics),
        **list_quantiles(dataset),
        **{name: None if found == {} else found for name, found in interval_scores.items()},
        **loaded.count_windows(),
        "detail": scores,
        "plan": plan.to_dict(),
        "notes": [*dataset.notes, *notes, *([trained.untested] if trained.untested else [])],
    }


class _Fold(NamedTuple):
    """The windows of one fold, or all windows, and the predictors to score on them."""

    dataset: Dataset
    load_chunks: ChunkLoader
    model: FoldPredictor
    intervals: IntervalSums
    beside: Mapping[str, Predictor]
    filter: WindowFilter | None
    write: TableWriter | None


def _make_loader(
    dataset: Dataset, series: Series | None, rows: int, *, with_time: bool
) -> ChunkLoader:
    return lambda set_name: dataset.iter_chunks(set_name, series, rows=rows, with_time=with_time)


def _list_beside(
    trained: TrainedRun,
    members: Sequence[Sequence[Predictor]],
    baselines: Sequence[Mapping[str, Baseline]],
) -> list[dict[str, Predictor]]:
    """Return by fold the predictors to score beside the model: baselines and members."""
    by_fold = []
    for number, fold in enumerate(baselines):
        beside = {name: baseline.predict for name, baseline in fold.items() if baseline.predict}
        if members:
            names = (_name_member(member) for member in trained.members)
            beside |= zip(names, members[number], strict=True)
        by_fold.append(beside)
    return by_fold


def _name_member(member: Member) -> str:
    return f"{MEMBERS}/{member.name}"  # no baseline has a name like this


def _score_fold(fold: _Fold, set_name: str) -> list[Any]:
    """Return the sums of errors of the model, of each predictor beside it and, where predictions
    are filtered, of the unfiltered model."""
    predictors = [fold.model.predict, *fold.beside.values()]
    names = ["", *fold.beside]
    filters = {
        position: fold.filter.start()
        for position, name in enumerate(names)
        if fold.filter and (not name or name.startswith(f"{MEMBERS}/"))
    }

    def score_rows() -> Iterator[list[PredictionBatch]]:
        for row in predict_side_by_side(predictors, fold.load_chunks, set_name):
            raw = [row[0]] if fold.filter else []
            for position, running_filter in filters.items():
                row[position] = running_filter.apply(row[position])
            fold.intervals.add(row[0])
            if fold.write:
                for table in build_tables(row[0], fold.dataset, fold.model.half_widths):
                    fold.write(table)
            yield [*row, *raw]

    return accumulate_side_by_side(score_rows(), fold.dataset)


def get_overall(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics over all windows: physical ones, and scaled ones where they exist."""
    scaled = {"scaled": scores["scaled"]} if "scaled" in scores else {}
    return {"metrics": scores["overall"], **scaled}


def _summarize_members(trained: TrainedRun, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members' own metrics and their weights for new data."""
    if not trained.mixtures:
        return {}
    weights = trained.mixtures[-1].weights
    return {
        "members": [
            {
                "name": member.name,
                "kind": member.config.model.kind,
                "weight": weight,
                **metrics[_name_member(member)],
            }
            for member, weight in zip(trained.members, weights, strict=True)
        ]
    }


class RegimeSums(NamedTuple):
    """The scores of windows, or of a carried state, on the windows of a fold."""

    sums: Any
    unfiltered: Any
    """Sums without `predict.filter`; None where the run has none"""
    errors: RowErrors
    """Errors of the windows, and of the rows before a series' first window"""


def score_stream(loaded: LoadedEvaluation) -> dict[str, Any]:
    """Score both regimes on the same rows, and say which one to deploy."""
    trained, dataset = loaded.trained, loaded.dataset
    if dataset.memory is None:
        raise UserError(
            "a stream is scored over whole series, but these stay on disk; pass "
            + Option("set", "engine.home=host")
        )
    refusal = explain_refusal(trained)
    with trained.first.plan.flags():
        folds = [
            _score_streamed_fold(loaded, number, refusal) for number in range(len(loaded.folds))
        ]
    regimes = {name: [fold[name] for fold in folds] for name in folds[0]}
    summaries = {name: _summarize(loaded, name, many) for name, many in regimes.items()}
    errors = {name: join_errors([fold.errors for fold in many]) for name, many in regimes.items()}
    positions = SeriesPositions(dataset)
    is_classifier = bool(dataset.signature.classes)
    names = ("log_loss", "error_rate") if is_classifier else ("mae", "mse")
    table = tabulate_rows(errors, positions, names)
    window_filter = make_window_filter(trained.first.config, dataset)
    result = {
        **loaded.describe(),
        **({"classes": list(dataset.signature.classes)} if is_classifier else {}),
        **({"filter": window_filter.describe()} if window_filter else {}),
        WINDOW: summaries[WINDOW],
        CARRIED: summaries.get(CARRIED, {"metrics": None, "refused": refusal}),
        "by_row": table,
        **loaded.count_windows(),
    }
    if refusal is not None:
        why = f"a carried state is not possible: {refusal}"
        decision = {"warm_up": None, "comparison": None, "deploy": _deploy(WINDOW, why)}
        return {**result, **decision, "notes": list(dataset.notes)}
    metric = "log_loss"  # of classes, the one that has a value for each row
    if not is_classifier:
        metric = f"scaled_{get_comparison_metric(trained.first.config)}"
    common = _select_rows(errors[CARRIED], errors[WINDOW].rows)
    comparison = compare_errors(
        common, errors[WINDOW], metric, positions, dataset.signature.context
    )
    costs = {name: summary["multiply_adds"] for name, summary in summaries.items()}
    return {
        **result,
        "warm_up": measure_warm_up(table, dataset.signature.context, CARRIED, names[0]),
        "comparison": {"metric": metric, **comparison._asdict()},
        "deploy": choose_regime(comparison, (costs[WINDOW], costs[CARRIED])),
        "notes": list(dataset.notes),
    }


def record_stream(loaded: LoadedEvaluation, result: Mapping[str, Any]) -> dict[str, Any]:
    """Record which regime was better in the run's folder, where `Stream`, the server and exports
    look for it; return the path as `recorded`, and why it is None as a note."""
    trained = loaded.trained
    metric = "log_loss" if loaded.dataset.signature.classes else "mae"
    carried, weights = result[CARRIED]["metrics"], trained.run.model / WEIGHTS_FILE
    path, note = None, None
    if loaded.on == "train":
        note = "the result is not recorded: the default regime follows rows beside the training set"
    elif carried is not None and weights.is_file():
        measurement = StreamMeasurement(
            use=result["deploy"]["use"],
            metric=metric,
            window=result[WINDOW]["metrics"][metric],
            carried=carried[metric],
            on=loaded.on,
            windows=result["windows"],
            networks=len(loaded.predictors[-1].models),
            weights=compute_sha256(weights),
        )
        try:
            path = save_measurement(trained.run, measurement)
        except OSError as error:
            note = f"the result is not recorded: {trained.run.folder} ({error.strerror})"
    notes = [*result["notes"], *([note] if note else [])]
    return {"recorded": None if path is None else str(path), "notes": notes}


def explain_refusal(trained: TrainedRun) -> str | None:
    """Return the reason that rules out a carried state; None without one."""
    if trained.mixtures:
        return "an ensemble of runs: stream its members one by one"
    return explain_no_steps(trained.first.config.model)


def _score_streamed_fold(
    loaded: LoadedEvaluation, number: int, refusal: str | None
) -> dict[str, RegimeSums]:
    """Score each possible regime on one fold's windows."""
    dataset, fold, first = loaded.folds[number], loaded.predictors[number], loaded.trained.first
    memory = dataset.memory
    assert memory is not None
    series = memory.series.to(first.plan.device)
    (chunk,) = dataset.iter_chunks(loaded.set_name, series, rows=0)
    no_starts = torch.empty(0, dtype=torch.int64)
    if not fold.models:
        return {WINDOW: _score_regime(loaded, fold.predict, dataset, chunk, no_starts)}
    window = make_state_predictor(first, fold, "windows")
    regimes = {WINDOW: _score_regime(loaded, window, dataset, chunk, no_starts)}
    if refusal is None:
        early = torch.from_numpy(find_early_starts(dataset, loaded.set_name))
        carried = make_state_predictor(first, fold, "carried")
        regimes[CARRIED] = _score_regime(loaded, carried, dataset, chunk, early)
    return regimes


def make_state_predictor(member: Member, fold: FoldPredictor, state: str) -> Predictor:
    """Return the predictor of a fold's models in this regime, whichever they were trained for."""
    trained = member.trained
    signature = trained.signature.model_copy(update={"state": state})
    predictors = [
        make_predictor(model, member.plan, signature, trained.scaler) for model in fold.models
    ]
    return average_predictors(predictors, signature)


def _score_regime(
    loaded: LoadedEvaluation,
    predict: Predictor,
    dataset: Dataset,
    chunk: WindowChunk,
    early: torch.Tensor,
) -> RegimeSums:
    """Score the windows of a chunk; rows before the first windows only add to the row errors."""
    window_filter = make_window_filter(loaded.trained.first.config, dataset)
    running_filter = window_filter.start() if window_filter else None
    device = chunk.series.values.device
    metrics = get_task_metrics(dataset)
    sums = metrics.start_sums(dataset, device)
    unfiltered = metrics.start_sums(dataset, device) if running_filter else None
    errors = []
    starts = torch.cat([chunk.starts, early]).sort().values
    for raw in predict_batches(predict, [chunk._replace(starts=starts)]):
        batch = running_filter.apply(raw) if running_filter else raw
        errors.append(compute_row_errors(batch, dataset))
        is_window = ~torch.isin(batch.starts.cpu(), early)
        if is_window.any():
            sums.update(batch.select(is_window))
            if unfiltered:
                unfiltered.update(raw.select(is_window))
    return RegimeSums(sums, unfiltered, join_errors(errors))


def _select_rows(errors: RowErrors, rows: Any) -> RowErrors:
    """Return the errors at these rows."""
    order = np.argsort(errors.rows, kind="stable")
    selected = order[np.searchsorted(errors.rows[order], rows)]
    return RowErrors(rows, {name: values[selected] for name, values in errors.values.items()})


def _summarize(loaded: LoadedEvaluation, name: str, folds: list[RegimeSums]) -> dict[str, Any]:
    """Return the metrics of a regime on the windows, and the cost of a prediction."""
    member, models = loaded.trained.first, loaded.predictors[-1].models
    signature = member.trained.signature
    scores = merge_sums([fold.sums for fold in folds]).compute()
    result = {**get_overall(scores), "per_series": scores["per_series"]}
    if folds[0].unfiltered is not None:
        whole = merge_sums([fold.unfiltered for fold in folds]).compute()
        result[UNFILTERED] = get_overall(whole)
    cost = None
    if models:
        cost = count_multiply_adds(member.config.model, signature, carried=name == CARRIED)
    rows = signature.context if name == WINDOW else 1
    return {
        **result,
        "multiply_adds": None if cost is None else cost * len(models),
        "rows_to_first": rows,
        "refused": None,
    }


class RowErrors(NamedTuple):
    """The errors of predictions, in the order of rows."""

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
    return RowErrors(rows, {name: errors.cpu().numpy() for name, errors in values.items()})


def join_errors(parts: list[RowErrors]) -> RowErrors:
    """Concatenate errors."""
    rows = np.concatenate([part.rows for part in parts])
    names = parts[0].values
    return RowErrors(
        rows, {name: np.concatenate([part.values[name] for part in parts]) for name in names}
    )


class SeriesPositions:
    """Positions of rows in their series: counted from the first row, or the first after a gap."""

    def __init__(self, dataset: Dataset) -> None:
        self._begins, self._offsets = dataset.index.segments, dataset.index.offsets

    def count(self, rows: Ints) -> Ints:
        """Return the number of rows since the series began, or since the last gap."""
        counts: Ints = rows - self._begins[np.searchsorted(self._begins, rows, side="right") - 1]
        return counts

    def find_series(self, rows: Ints) -> Ints:
        """Return the number of each row's series."""
        return np.searchsorted(self._offsets, rows, side="right") - 1


def find_early_starts(dataset: Dataset, set_name: str) -> Ints:
    """Return the starts of incomplete windows, which reach back beyond the start of a series and
    end before its first full window. Only series with all windows in this set count."""
    assert dataset.memory is not None
    signature, positions, begins = (
        dataset.signature,
        SeriesPositions(dataset),
        dataset.index.segments,
    )
    by_set = {name: starts.numpy() for name, starts in dataset.memory.starts.items()}
    lead, reach = signature.context - 1, signature.lead - signature.context + signature.steps_out
    owners = {
        name: set(positions.find_series(starts + lead).tolist()) for name, starts in by_set.items()
    }
    shared = set().union(*(series for name, series in owners.items() if name != set_name))
    firsts = begins[np.isin(begins, by_set[set_name])]
    firsts = firsts[[int(s) in owners[set_name] - shared for s in positions.find_series(firsts)]]
    early = [np.arange(first, first + lead) for first in firsts]
    rows = np.concatenate([np.empty(0, np.int64), *early])
    truth = dataset.memory.series.targets.numpy()
    ahead = rows[:, None] + reach - np.arange(signature.steps_out)
    known = ~np.isnan(truth[np.minimum(ahead, len(truth) - 1)]).any(axis=(1, 2))
    starts: Ints = rows[known] - lead
    return starts


def tabulate_rows(
    regimes: Mapping[str, RowErrors], positions: SeriesPositions, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return the errors by rows since the start, in ranges that double."""
    counts = {name: positions.count(errors.rows) for name, errors in regimes.items()}
    last_row = max(int(count.max(initial=0)) for count in counts.values())
    table = []
    for first, last in _iter_ranges(last_row):
        entry: dict[str, Any] = {"from": first, "to": last}
        for name, errors in regimes.items():
            inside = (counts[name] >= first) & (counts[name] <= last)
            entry[name] = _average(errors, inside, names) if inside.any() else None
        if any(entry[name] for name in regimes):
            table.append(entry)
    return table


def _iter_ranges(last_row: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last row of ranges that double: 0, 1, 2 to 3, 4 to 7 and so on."""
    first, width = 0, 1
    while first <= last_row:
        yield first, min(first + width - 1, last_row)
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
    """Return after how many rows a regime's error stays within `SETTLED` of the later error."""
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
    """The error of one regime relative to another on the same rows."""

    value: float
    interval: list[float] | None
    how: str
    """The resampled units, or why there is no interval"""


def compare_errors(
    errors: RowErrors, reference: RowErrors, metric: str, positions: SeriesPositions, context: int
) -> ErrorRatio:
    """Return the ratio of the mean error to a reference's on the same rows, with a bootstrap
    interval: whole series are drawn or, where there are few, blocks of rows."""
    above, below = errors.values[metric], reference.values[metric]
    root = math.sqrt if metric.endswith("mse") else float
    ratio = root(float(above.sum()) / max(float(below.sum()), 1e-300))
    units = positions.find_series(errors.rows)
    units_name, count = "series", len(np.unique(units))
    if count < MIN_UNITS:
        units = units * (int(errors.rows.max()) // context + 1) + errors.rows // context
        units_name = (
            f"blocks of {context:,} rows from {count} series; other series may differ by more"
        )
    _, codes = np.unique(units, return_inverse=True)
    sums = np.stack([np.bincount(codes, weights=values) for values in (above, below)], axis=1)
    if len(sums) < MIN_UNITS:
        return ErrorRatio(ratio, None, f"none: the rows make {len(sums)} {units_name}")
    generator, samples = np.random.default_rng(0), []
    for _ in range(0, NUM_RESAMPLES, RESAMPLES_AT_ONCE):
        chances = np.full(len(sums), 1 / len(sums))
        drawn_sums = generator.multinomial(len(sums), chances, size=RESAMPLES_AT_ONCE) @ sums
        samples.append(drawn_sums[:, 0] / np.maximum(drawn_sums[:, 1], 1e-300))
    ratios = np.concatenate(samples)
    ratios = np.sqrt(ratios) if root is math.sqrt else ratios
    how = f"{NUM_RESAMPLES:,} resamples of {len(sums):,} {units_name}"
    return ErrorRatio(ratio, compute_percentile_interval(ratios), how)


def choose_regime(ratio: ErrorRatio, multiply_adds: tuple[int, int]) -> dict[str, str]:
    """Return the regime to deploy, with the reason and the figures: the carried state, which costs
    less, unless its error may be higher by more than is negligible.

    `multiply_adds` are the cost of a window, and of a row with a carried state.
    """
    cost = f"{multiply_adds[1]:,} multiply-adds a row instead of {multiply_adds[0]:,}"
    change, limit = _describe_change(ratio.value), f"{100 * (NEGLIGIBLE - 1):.0f} %"
    if ratio.interval is None:
        few = "there are too few rows to be sure, and the test figures are those of windows"
        return _deploy(WINDOW, f"the error of a carried state is {change}, but {few}")
    low, high = ratio.interval
    bounds = f"(95 %: {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %)"
    if high <= NEGLIGIBLE:
        return _deploy(CARRIED, f"its error is {change} {bounds}, and it takes {cost}")
    more = f"{'is' if low > NEGLIGIBLE else 'may be'} more than {limit} higher"
    return _deploy(
        WINDOW,
        f"the error of a carried state is {change} {bounds}: it {more}; it would take {cost}",
    )


def _deploy(regime: str, reason: str) -> dict[str, str]:
    """Return a regime to deploy and the reason, as the summary has them."""
    return {"use": regime, "reason": reason}


def _describe_change(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    if abs(percent) < NO_CHANGE:
        return "that of windows"
    return f"{abs(percent):.1f} % {'higher' if percent > 0 else 'lower'} than that of windows"
