"""What a run predicts with: its model, or the mean of all of its lanes; and how far off it may be.

Intervals are split-conformal: to either side of a prediction, as far as a share of the validation
set's errors went, of that target and predicted row. Lanes' disagreement is no part of it: a few
seeds share most of their error, so their spread says little of it.

Shapes: B windows, H predicted rows, C targets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slipstream import checksums
from slipstream.config import Config, Signature
from slipstream.data.prediction_columns import LEVELS
from slipstream.data.scaler import Scaler
from slipstream.engine import checkpoint
from slipstream.engine.plan import Plan
from slipstream.errors import UserError
from slipstream.models import build
from slipstream.objectives import average_predictions, select_point
from slipstream.runs import Run
from slipstream.scoring import predict as score
from slipstream.scoring.batch import ChunkLoader, PredictionBatch, Predictor

MOST_ERRORS = 50_000_000
"""Numbers that intervals are made from; of more windows, an even sample"""
MODEL, ENSEMBLE = "model", "ensemble"
WEIGHTS, FACTS = "weights.safetensors", "lanes.json"
HalfWidths = dict[str, Tensor]
"""By level: how far its interval goes to either side, [H, C], scaled"""


def average_predictors(predictors: Sequence[Predictor], signature: Signature) -> Predictor:
    """Several models as one."""

    def predict(series: Any, starts: Tensor) -> Tensor:
        every = [one(series, starts) for one in predictors]
        return average_predictions(every, classes=bool(signature.classes))

    return predictors[0] if len(predictors) == 1 else predict


def predict_side_by_side(
    predictors: Sequence[Predictor], pieces: ChunkLoader, which: str, signature: Signature
) -> Iterator[list[PredictionBatch]]:
    """Each model's chunks of a set; of several, their mean comes last."""
    for each in zip(
        *(score.predict_batches(one, pieces(which)) for one in predictors), strict=True
    ):
        beside = list(each)
        if len(beside) > 1:
            every = [chunk.prediction for chunk in each]
            mean = average_predictions(every, classes=bool(signature.classes))
            beside.append(beside[0]._replace(prediction=mean))
        yield beside


class AbsoluteErrors:
    """Absolute errors of one predictor, as they come."""

    def __init__(self, num_windows: int, signature: Signature) -> None:
        numbers = num_windows * signature.steps_out * len(signature.targets)
        self._every = -(-numbers // MOST_ERRORS)
        self._quantiles = signature.quantiles
        self._found: list[Tensor] = []

    def add(self, chunk: PredictionBatch) -> None:
        assert chunk.truth is not None
        error = (select_point(chunk.prediction, self._quantiles) - chunk.truth).abs()
        self._found.append(error[:: self._every].cpu())

    def reach(self) -> HalfWidths:
        return fit_conformal(torch.cat(self._found))


def fit_conformal(errors: Tensor) -> HalfWidths:
    """What a share of errors [B, H, C] stays within, with the one that is still to come counted.

    Where there are too few for a level, it is the largest.
    """
    num = len(errors)
    ranked = errors.sort(dim=0).values
    return {
        name: ranked[min(math.ceil((num + 1) * level), num) - 1] for name, level in LEVELS.items()
    }


class CoverageCounter:
    """How many truths lay within the intervals."""

    def __init__(self, reach: HalfWidths, quantiles: tuple[float, ...]) -> None:
        self._reach, self._quantiles = reach, quantiles
        self.inside = dict.fromkeys(reach, 0)
        self.count = 0

    def add(self, chunk: PredictionBatch) -> None:
        assert chunk.truth is not None
        error = (select_point(chunk.prediction, self._quantiles) - chunk.truth).abs()
        self.count += error.numel()
        for name, far in self._reach.items():
            self.inside[name] += int((error <= far.to(error.device)).sum())


def compute_coverage(every: Sequence[CoverageCounter]) -> dict[str, float]:
    """By level: the share of truths within, of all together."""
    count = sum(one.count for one in every)
    return {name: sum(one.inside[name] for one in every) / count for name in every[-1].inside}


class FoldRecord(NamedTuple):
    """The lanes of one fold, or of a run without folds, as they are kept."""

    label: str | None
    weights: list[dict[str, Tensor]]
    best: int
    """The one that is the model"""
    reach: dict[str, HalfWidths]
    """Of the model, and of the ensemble where there is one"""


def save_lanes(
    run: Run, folds: Sequence[FoldRecord], scaler: Scaler, targets: Sequence[str], uses: str
) -> None:
    """Write lanes/: the weights of all of them, and what is needed to predict with them."""
    tensors, told, number = {}, [], 0
    for fold in folds:
        first = number
        for weights in fold.weights:
            for name, weight in weights.items():
                tensors[f"{number}/{name}"] = weight.detach().cpu().contiguous()
            number += 1
        physical = {
            who: {
                level: {
                    name: (far[:, i].double() * scaler.size[name]).tolist()
                    for i, name in enumerate(targets)
                }
                for level, far in reach.items()
            }
            for who, reach in fold.reach.items()
        }
        lanes = list(range(first, number))
        told.append({"label": fold.label, "lanes": lanes, "best": fold.best, "reach": physical})
    facts = {"uses": uses, "folds": told}
    checkpoint.write_folder(run.folder / "lanes", {WEIGHTS: tensors}, {FACTS: facts})


class FoldPredictor(NamedTuple):
    """What predicts, and how far off it may be where that is known."""

    predict: Predictor
    reach: HalfWidths | None


@dataclass(frozen=True)
class RunPredictors:
    """What a run predicts with."""

    signature: Signature
    scaler: Scaler
    description: str
    """In a few words"""
    folds: list[FoldPredictor]
    """One for every fold; the last is for new data"""

    @property
    def on_new_data(self) -> str:
        """What predicts there, in a few words"""
        return f"{self.description} of the last fold" if len(self.folds) > 1 else self.description


def load_predictors(
    run: Run, config: Config, plan: Plan, *, ensemble: bool | None = None
) -> RunPredictors:
    """The run's model, or the ensemble; by default, what was better on the validation set."""
    model, signature, scaler = checkpoint.load_model(run, config, plan.device)
    if signature.masked:
        raise UserError(
            f"{run.folder}: holds a pre-trained encoder, which predicts nothing yet; train from it "
            f'with train.init_from = "{run.folder}"'
        )
    model.eval()
    if not (run.folder / "lanes").exists():
        if ensemble:
            raise UserError(
                f"{run.folder}: holds one model, not an ensemble; train several with train.repeats"
            )
        return RunPredictors(
            signature, scaler, "the model", [FoldPredictor(score.make_predictor(model, plan), None)]
        )
    files = checksums.read_verified(run.folder / "lanes")
    facts = json.loads(files[FACTS])
    found = checkpoint.parse_tensors(files[WEIGHTS], run.folder / "lanes" / WEIGHTS)
    uses = facts["uses"] if ensemble is None else ENSEMBLE if ensemble else MODEL
    if uses == ENSEMBLE and not all(ENSEMBLE in fold["reach"] for fold in facts["folds"]):
        raise UserError(
            f"{run.folder}: has one model to a fold, no ensemble; train several with train.repeats"
        )
    voices = []
    for fold in facts["folds"]:
        numbers = fold["lanes"] if uses == ENSEMBLE else [fold["lanes"][fold["best"]]]
        predictors = [_predictor(found, number, config, signature, plan) for number in numbers]
        reach = _scaled(fold["reach"][uses], scaler, signature)
        voices.append(FoldPredictor(average_predictors(predictors, signature), reach))
    return RunPredictors(signature, scaler, _in_words(facts, uses), voices)


def _in_words(facts: Mapping[str, Any], uses: str) -> str:
    count = len(facts["folds"][-1]["lanes"])
    if uses == ENSEMBLE:
        return f"the mean of {count} models"
    return f"the best of {count} models" if count > 1 else "the model"


def _predictor(
    found: Mapping[str, Tensor], number: int, config: Config, signature: Signature, plan: Plan
) -> Predictor:
    prefix = f"{number}/"
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in found.items()
        if name.startswith(prefix)
    }
    return build_predictor(weights, config, signature, plan)


def build_predictor(
    weights: Mapping[str, Tensor], config: Config, signature: Signature, plan: Plan
) -> Predictor:
    """The model that has these weights."""
    with torch.random.fork_rng([]):
        model = build(config.model, signature)
    model.load_state_dict(weights)
    return score.make_predictor(model.to(plan.device).eval(), plan)


def _scaled(told: Mapping[str, Any], scaler: Scaler, signature: Signature) -> HalfWidths:
    return {
        level: torch.tensor(
            [[value / scaler.size[name] for value in by_target[name]] for name in signature.targets]
        ).T
        for level, by_target in told.items()
    }
