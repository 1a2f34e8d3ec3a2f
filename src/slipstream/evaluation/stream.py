"""Score a model as it is used on a stream: with a window of rows each time, and with a state that
is carried on from row to row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream.data.dataset import Dataset
from slipstream.data.windows import WindowChunk
from slipstream.errors import UserError
from slipstream.evaluation.carried import explain_refusal, make_state_predictor
from slipstream.evaluation.regimes import (
    NEGLIGIBLE,
    ErrorRatio,
    Places,
    RowErrors,
    compare_errors,
    compute_row_errors,
    find_early_starts,
    join_errors,
    measure_warm_up,
    tabulate_rows,
)
from slipstream.evaluation.scores import UNFILTERED, get_overall
from slipstream.evaluation.setup import LoadedEvaluation
from slipstream.portable.cost import count_multiply_adds
from slipstream.scoring.batch import PredictionBatch, Predictor
from slipstream.scoring.filtering import make_window_filter
from slipstream.scoring.predict import get_task_metrics, predict_batches
from slipstream.scoring.summary import get_comparison_metric, merge_sums

WINDOW, CARRIED = "window", "carried"
NO_CHANGE = 0.05
"""Percent that round to nothing"""


class RegimeSums(NamedTuple):
    """What one regime scored on the windows of a fold."""

    sums: Any
    unfiltered: Any
    """Without `predict.filter`; None where there is none"""
    errors: RowErrors
    """Of the windows, and of the rows before a series' first"""


def score_stream(loaded: LoadedEvaluation) -> dict[str, Any]:
    """Score both regimes on the same rows, and say which one to deploy."""
    trained, dataset = loaded.trained, loaded.dataset
    if dataset.memory is None:
        raise UserError(
            "a stream is scored over whole series, but these stay on disk; pass "
            "--set engine.home=host"
        )
    refusal = explain_refusal(trained)
    with trained.first.plan.flags():
        folds = [_score_fold(loaded, number, refusal) for number in range(len(loaded.folds))]
    regimes = {name: [fold[name] for fold in folds] for name in folds[0]}
    summaries = {name: _summarize(loaded, name, many) for name, many in regimes.items()}
    errors = {name: join_errors([one.errors for one in many]) for name, many in regimes.items()}
    places = Places(dataset)
    is_classifier = bool(dataset.signature.classes)
    names = ("log_loss", "error_rate") if is_classifier else ("mae", "mse")
    table = tabulate_rows(errors, places, names)
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
    comparison = compare_errors(common, errors[WINDOW], metric, places, dataset.signature.context)
    costs = {name: one["multiply_adds"] for name, one in summaries.items()}
    return {
        **result,
        "warm_up": measure_warm_up(table, dataset.signature.context, CARRIED, names[0]),
        "comparison": {"metric": metric, **comparison._asdict()},
        "deploy": choose_regime(comparison, (costs[WINDOW], costs[CARRIED])),
        "notes": list(dataset.notes),
    }


def _score_fold(
    loaded: LoadedEvaluation, number: int, refusal: str | None
) -> dict[str, RegimeSums]:
    """Score each possible regime on one fold's windows."""
    dataset, fold, first = loaded.folds[number], loaded.predictors[number], loaded.trained.first
    memory = dataset.memory
    assert memory is not None
    series = memory.series.to(first.plan.device)
    (chunk,) = dataset.iter_chunks(loaded.which, series, rows=0)
    none = torch.empty(0, dtype=torch.int64)
    if not fold.models:
        return {WINDOW: _score_regime(loaded, fold.predict, dataset, chunk, none)}
    window = make_state_predictor(first, fold, "windows")
    regimes = {WINDOW: _score_regime(loaded, window, dataset, chunk, none)}
    if refusal is None:
        early = torch.from_numpy(find_early_starts(dataset, loaded.which))
        carried = make_state_predictor(first, fold, "carried")
        regimes[CARRIED] = _score_regime(loaded, carried, dataset, chunk, early)
    return regimes


def _score_regime(
    loaded: LoadedEvaluation,
    predict: Predictor,
    dataset: Dataset,
    chunk: WindowChunk,
    early: torch.Tensor,
) -> RegimeSums:
    """Score the windows of a chunk; of the rows before them, only the errors are returned."""
    window_filter = make_window_filter(loaded.trained.first.config, dataset)
    one = window_filter.start() if window_filter else None
    device = chunk.series.values.device
    metrics = get_task_metrics(dataset)
    sums = metrics.start_sums(dataset, device)
    unfiltered = metrics.start_sums(dataset, device) if one else None
    errors = []
    starts = torch.cat([chunk.starts, early]).sort().values
    for raw in predict_batches(predict, [chunk._replace(starts=starts)]):
        batch = one.apply(raw) if one else raw
        errors.append(compute_row_errors(batch, dataset))
        is_window = ~torch.isin(batch.starts.cpu(), early).to(device)
        if is_window.any():
            sums.update(_select_windows(batch, is_window))
            if unfiltered:
                unfiltered.update(_select_windows(raw, is_window))
    return RegimeSums(sums, unfiltered, join_errors(errors))


def _select_windows(batch: PredictionBatch, mask: torch.Tensor) -> PredictionBatch:
    assert batch.truth is not None
    return batch._replace(
        starts=batch.starts[mask], prediction=batch.prediction[mask], truth=batch.truth[mask]
    )


def _select_rows(errors: RowErrors, rows: Any) -> RowErrors:
    """Return the errors at these rows."""
    order = np.argsort(errors.rows, kind="stable")
    places = order[np.searchsorted(errors.rows[order], rows)]
    return RowErrors(rows, {name: values[places] for name, values in errors.values.items()})


def _summarize(loaded: LoadedEvaluation, name: str, folds: list[RegimeSums]) -> dict[str, Any]:
    """Return the metrics of a regime on the windows, and what a prediction costs."""
    member, fold = loaded.trained.first, loaded.predictors[-1]
    signature = member.trained.signature
    scores = merge_sums([one.sums for one in folds]).compute()
    result = {**get_overall(scores), "per_series": scores["per_series"]}
    if folds[0].unfiltered is not None:
        whole = merge_sums([one.unfiltered for one in folds]).compute()
        result[UNFILTERED] = get_overall(whole)
    cost = None
    if fold.models:
        cost = count_multiply_adds(member.config.model, signature, carried=name == CARRIED)
    rows = signature.context if name == WINDOW else 1
    return {
        **result,
        "multiply_adds": None if cost is None else cost * len(fold.models),
        "rows_to_first": rows,
        "refused": None,
    }


def choose_regime(ratio: ErrorRatio, multiply_adds: tuple[int, int]) -> dict[str, str]:
    """Return the regime to deploy, with the reason and the figures: the carried state, which costs
    less, unless its error may be higher by more than is negligible.

    `multiply_adds` are those of a window and of a row with a carried state.
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
    return {"use": regime, "reason": reason}


def _describe_change(ratio: float) -> str:
    percent = 100 * (ratio - 1)
    if abs(percent) < NO_CHANGE:
        return "that of windows"
    return f"{abs(percent):.1f} % {'higher' if percent > 0 else 'lower'} than that of windows"
