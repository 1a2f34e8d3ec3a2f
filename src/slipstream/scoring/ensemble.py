"""The predictors of a run: its model, or the mean of all of its lanes, and intervals.

Intervals are split-conformal: to either side of a prediction, they reach as far as a share of the
validation set's errors did, of that target and predicted row. The lanes' disagreement is no part
of it: a few seeds share most of their error, so their spread says little of it.

Shapes: B windows, H predicted rows, C targets.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.config import Config, Signature
from slipstream.data.dataset import Dataset
from slipstream.data.predictions import LEVELS
from slipstream.data.scaler import Scaler
from slipstream.engine import checkpoint
from slipstream.engine.plan import Plan
from slipstream.models.forecaster import build
from slipstream.models.losses import average_predictions, select_point
from slipstream.runs import Run
from slipstream.runs.lanes import (
    LANE_METADATA,
    LANE_WEIGHTS,
    LANES_FOLDER,
    Reach,
    read_lanes,
    select_lane,
)
from slipstream.runs.summary import IntervalScores
from slipstream.scoring.batch import ChunkLoader, HalfWidths, PredictionBatch, Predictor
from slipstream.scoring.predict import (
    WindowFilter,
    accumulate_side_by_side,
    make_predictor,
    predict_side_by_side,
)
from slipstream.scoring.regression import compute_crps, sum_pinball, weigh_levels

MAX_ERRORS = 50_000_000
"""The number of errors that intervals are computed from; of more windows, an even sample is used"""


def average_predictors(
    predictors: Sequence[Predictor], signature: Signature, weights: Sequence[float] | None = None
) -> Predictor:
    """Return a predictor of the mean of several models."""
    is_classifier = bool(signature.classes)

    def predict(series: Any, starts: Tensor) -> Tensor:
        predictions = [predictor(series, starts) for predictor in predictors]
        return average_predictions(predictions, classes=is_classifier, weights=weights)

    return predictors[0] if len(predictors) == 1 else predict


def predict_with_mean(
    predictors: Sequence[Predictor],
    load_chunks: ChunkLoader,
    set_name: str,
    signature: Signature,
    weights: Sequence[float] | None = None,
) -> Iterator[list[PredictionBatch]]:
    """Yield rows with a batch of each model; with several models, their mean comes last."""
    for row in predict_side_by_side(predictors, load_chunks, set_name):
        if len(row) > 1:
            predictions = [batch.prediction for batch in row]
            is_classifier = bool(signature.classes)
            mean = average_predictions(predictions, classes=is_classifier, weights=weights)
            row.append(row[0]._replace(prediction=mean))
        yield row


class AbsoluteErrors:
    """Absolute errors of one predictor on the validation set; not for classes, whose probabilities
    express the uncertainty."""

    def __init__(self, num_windows: int, signature: Signature) -> None:
        numbers = num_windows * signature.steps_out * len(signature.targets)
        self._stride, self._signature = -(-numbers // MAX_ERRORS), signature
        self._errors: list[Tensor] = []

    def add(self, batch: PredictionBatch) -> None:
        if not self._signature.classes:
            errors = batch.absolute_errors(self._signature.quantiles)
            self._errors.append(errors[:: self._stride].cpu())

    def fit_intervals(self) -> HalfWidths:
        """Return the half-widths of the intervals."""
        return fit_conformal(torch.cat(self._errors)) if self._errors else {}


def fit_conformal(errors: Tensor) -> HalfWidths:
    """Return the bound within which each level's share of the errors [B, H, C] and of one more
    error lies; with too few errors for a level, the largest error."""
    num, ranked = len(errors), errors.sort(dim=0).values
    ranks = {name: min(math.ceil((num + 1) * level), num) for name, level in LEVELS.items()}
    return {name: ranked[rank - 1] for name, rank in ranks.items()}


class IntervalSums:
    """Running sums over the intervals around the predictions of one set of windows: how many truths
    lie inside, how wide the intervals are, and the pinball loss of their ends."""

    def __init__(self, half_widths: HalfWidths, dataset: Dataset) -> None:
        signature, scaler = dataset.signature, dataset.scaler
        targets = signature.targets if half_widths else ()  # classes have no intervals, no scale

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, len(targets), dtype=torch.float64)

        self._half_widths, self._quantiles = half_widths, signature.quantiles
        self._limits = signature.output_range or (-math.inf, math.inf)
        self._size, self._shift = (
            torch.tensor([values[name] for name in targets], dtype=torch.float64)
            for values in (scaler.size, scaler.shift)
        )
        self._ends = {
            name: (0.5 - LEVELS[name] / 2, 0.5 + LEVELS[name] / 2) for name in half_widths
        }
        self._weights = weigh_levels([0.5, *(end for ends in self._ends.values() for end in ends)])
        self.levels = list(half_widths)
        self.count = 0
        """Windows times predicted rows"""
        self.inside, self.width = zeros(len(self.levels)), zeros(len(self.levels))
        """[levels, C]; the width in physical units"""
        self.pinball, self.truth = zeros(), zeros()
        """[C]: the pinball loss of the ends and of the prediction as the median, and the absolute
        truths, in physical units"""

    def add(self, batch: PredictionBatch) -> None:
        """Add a batch of predictions; waits for the device."""
        if not self._half_widths:
            return
        assert batch.truth is not None
        device = batch.prediction.device
        size, shift = self._size.to(device), self._shift.to(device)
        errors = batch.absolute_errors(self._quantiles)
        point = select_point(batch.prediction, self._quantiles).double() * size + shift
        truth = batch.truth.double() * size + shift
        factor = size if batch.factor is None else size * batch.factor
        is_possible = (truth >= self._limits[0]) & (truth <= self._limits[1])
        quantiles, inside, width = {0.5: point}, [], []
        for level, half_width in self._half_widths.items():
            half_width = half_width.to(device)
            low, high = (
                (point + side * half_width * factor).clamp(*self._limits) for side in (-1, 1)
            )
            quantiles |= zip(self._ends[level], (low, high), strict=True)
            inside.append(((errors <= half_width) & is_possible).sum(dim=(0, 1)))
            width.append((high - low).sum(dim=(0, 1)))
        self.count += errors.shape[0] * errors.shape[1]
        self.inside += torch.stack(inside).cpu()
        self.width += torch.stack(width).cpu()
        self.pinball += sum_pinball(quantiles, truth, self._weights).cpu()
        self.truth += truth.abs().sum(dim=(0, 1)).cpu()


def score_intervals(parts: Sequence[IntervalSums]) -> IntervalScores:
    """Return the scores of the intervals, of all parts together: by level the share of truths
    inside and the mean width, and the CRPS of the levels' quantiles; means over the targets."""
    count, levels = sum(part.count for part in parts), parts[-1].levels
    if not levels:
        return {"coverage": {}, "width": {}, "crps": None}
    inside, width, pinball, truth = (
        torch.stack([getattr(part, name) for part in parts]).sum(dim=0)
        for name in ("inside", "width", "pinball", "truth")
    )
    shares, widths = ((sums / count).mean(dim=1).tolist() for sums in (inside, width))
    crps = compute_crps(pinball, truth)
    return {
        "coverage": dict(zip(levels, shares, strict=True)),
        "width": dict(zip(levels, widths, strict=True)),
        "crps": None if crps is None else float(crps.mean()),
    }


class Mixing(NamedTuple):
    """How the models' predictions are combined and filtered."""

    weights: Sequence[float] | None = None
    """The weights of the mean; None for equal weights"""
    filter: WindowFilter | None = None


class MeanScores(NamedTuple):
    """The sums over the validation and the test set of each model, and of their mean as the last;
    and the intervals of some of them, by name."""

    val: list[Any]
    test: list[Any]
    half_widths: dict[str, HalfWidths]
    intervals: dict[str, IntervalSums]
    """The sums over the test set"""
    unfiltered: dict[str, dict[str, Any]]
    """The sums without `predict.filter`, by name and set, where there is a filter"""


def score_with_mean(
    predictors: Sequence[Predictor],
    dataset: Dataset,
    load_chunks: ChunkLoader,
    positions: Mapping[str, int],
    write: Callable[[list[PredictionBatch], dict[str, HalfWidths]], None],
    mixing: Mixing,
    *,
    intervals: bool = True,
) -> MeanScores:
    """Score several models and their mean; fit intervals on the validation set, score them on the
    test set, and write the test set's batches.

    `positions` names the models, and their mean, that have intervals, unless `intervals` is off.
    Intervals are fitted to unfiltered predictions, so that they stay the same where another filter
    is set.
    """
    signature, count = dataset.signature, len(predictors) + (len(predictors) > 1)

    def predict_set(set_name: str) -> Iterator[tuple[list[PredictionBatch], list[PredictionBatch]]]:
        rows = predict_with_mean(predictors, load_chunks, set_name, signature, mixing.weights)
        if mixing.filter:
            yield from mixing.filter.filter_rows(rows)
        else:
            yield from ((row, []) for row in rows)

    def collect_errors() -> Iterator[list[PredictionBatch]]:
        for row, raw in predict_set("val"):
            for name, absolute in errors.items():
                absolute.add((raw or row)[positions[name]])
            yield [*row, *raw]

    fitted, num_val = positions if intervals else (), dataset.num_windows["val"]
    errors = {name: AbsoluteErrors(num_val, signature) for name in fitted}
    val = accumulate_side_by_side(collect_errors(), dataset)
    half_widths = {name: absolute.fit_intervals() for name, absolute in errors.items()}
    sums = {name: IntervalSums(half_widths[name], dataset) for name in errors}

    def write_test() -> Iterator[list[PredictionBatch]]:
        for row, raw in predict_set("test"):
            for name, interval_sums in sums.items():
                interval_sums.add(row[positions[name]])
            write(row, half_widths)
            yield [*row, *raw]

    test = accumulate_side_by_side(write_test(), dataset)
    unfiltered = {
        name: {"val": val[count + position], "test": test[count + position]}
        for name, position in positions.items()
        if mixing.filter
    }
    return MeanScores(val[:count], test[:count], half_widths, sums, unfiltered)


class FoldRecord(NamedTuple):
    """The lanes of one fold, or of a run without folds, as they are saved."""

    label: str | None
    weights: list[dict[str, Tensor]]
    best: int
    """The lane that is the model"""
    half_widths: dict[str, HalfWidths]
    """The half-widths of the model, and of the ensemble where there is one"""


def save_lanes(
    run: Run, folds: Sequence[FoldRecord], scaler: Scaler, targets: Sequence[str], uses: str
) -> None:
    """Write lanes/: the weights of every lane, and the metadata for predicting with them."""
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    number = 0
    for fold in folds:
        lanes = list(range(number, number + len(fold.weights)))
        number += len(lanes)
        for lane, weights in zip(lanes, fold.weights, strict=True):
            for name, weight in weights.items():
                tensors[f"{lane}/{name}"] = weight.detach().cpu().contiguous()
        reach = to_reach(fold.half_widths, scaler, targets)
        entries.append({"label": fold.label, "lanes": lanes, "best": fold.best, "reach": reach})
    metadata = {"uses": uses, "folds": entries}
    folder = run.folder / LANES_FOLDER
    checkpoint.write_folder(folder, {LANE_WEIGHTS: tensors}, {LANE_METADATA: metadata})


def to_reach(
    half_widths: Mapping[str, HalfWidths], scaler: Scaler, targets: Sequence[str]
) -> Reach:
    """Return half-widths in their saved form: JSON values in physical units."""
    return {
        predictor: {
            level: {
                name: (values[:, i].double() * scaler.size[name]).tolist()
                for i, name in enumerate(targets)
            }
            for level, values in by_level.items()
        }
        for predictor, by_level in half_widths.items()
    }


def to_half_widths(saved: Mapping[str, Any], scaler: Scaler, targets: Sequence[str]) -> HalfWidths:
    """Return half-widths from the reach of one predictor."""
    return {
        level: torch.tensor(
            [[value / scaler.size[name] for value in by_target[name]] for name in targets]
        ).T
        for level, by_target in saved.items()
    }


class FoldPredictor(NamedTuple):
    """A fold's predictor, and the half-widths of its intervals where they are known."""

    predict: Predictor
    half_widths: HalfWidths | None
    models: Sequence[nn.Module] = ()
    """The networks that the predictor averages"""


@dataclass(frozen=True)
class RunPredictors:
    """The predictors of a run."""

    signature: Signature
    scaler: Scaler
    description: str
    folds: list[FoldPredictor]
    """The predictor of every fold; the last one is used for new data"""

    @property
    def models(self) -> list[nn.Module]:
        """The networks of the last fold."""
        return list(self.folds[-1].models)

    def describe_on_new_data(self) -> str:
        return f"{self.description} of the last fold" if len(self.folds) > 1 else self.description


def load_predictors(
    run: Run, config: Config, plan: Plan, *, ensemble: bool | None = None
) -> RunPredictors:
    """Load the run's model or its ensemble; by default, the better one on the validation set."""
    model, signature, scaler = checkpoint.load_model(run, config, plan.device)
    lanes = read_lanes(run, signature, ensemble=ensemble)
    if lanes is None:
        predict = make_predictor(model.eval(), plan, signature, scaler)
        only = FoldPredictor(predict, None, [model])
        return RunPredictors(signature, scaler, "the model", [only])
    tensors = checkpoint.parse_tensors(lanes.weights, lanes.path)
    folds: list[FoldPredictor] = []
    for fold in lanes.folds:
        models = [
            _build_model(select_lane(tensors, lane), config, signature, plan) for lane in fold.lanes
        ]
        predictors = [make_predictor(model, plan, signature, scaler) for model in models]
        half_widths = to_half_widths(fold.reach, scaler, signature.targets)
        predict = average_predictors(predictors, signature)
        folds.append(FoldPredictor(predict, half_widths, models))
    return RunPredictors(signature, scaler, lanes.description, folds)


def build_predictor(
    weights: Mapping[str, Tensor], config: Config, dataset: Dataset, plan: Plan
) -> Predictor:
    """Return the predictor of the model with these weights."""
    model = _build_model(weights, config, dataset.signature, plan)
    return make_predictor(model, plan, dataset.signature, dataset.scaler)


def _build_model(
    weights: Mapping[str, Tensor], config: Config, signature: Signature, plan: Plan
) -> nn.Module:
    with torch.random.fork_rng([]):
        model = build(config.model, signature)
    model.load_state_dict(weights)
    return model.to(plan.device).eval()
