"""The lanes of a run, as they are saved: repeats of a model, or one model to a fold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from slipstream.base import storage
from slipstream.base.errors import UserError
from slipstream.config import Signature
from slipstream.runs import Run

Content = TypeVar("Content")
MODEL, ENSEMBLE = "model", "ensemble"
LevelReach = dict[str, dict[str, list[float]]]
"""The half-widths of intervals in physical units: by level, by target, by predicted row"""
Reach = dict[str, LevelReach]
"""The half-widths of the model and of the ensemble, by name"""
LANES_FOLDER, LANE_WEIGHTS, LANE_METADATA = "lanes", "weights.safetensors", "lanes.json"


class SavedFold(NamedTuple):
    """The saved predictor of one fold."""

    lanes: list[int]
    """The numbers of the lanes whose mean predicts"""
    reach: LevelReach


class SavedLanes(NamedTuple):
    """The saved predictors of a run, by fold; the last fold is used for new data."""

    folds: list[SavedFold]
    description: str
    weights: bytes
    """The weights of every lane; their names begin with the lane's number"""
    path: Path


def read_lanes(run: Run, signature: Signature, *, ensemble: bool | None) -> SavedLanes | None:
    """Read the lanes that predict, of the model or the ensemble; by default, of the better one on
    the validation set. None where a run has a single model only."""
    if signature.masked:
        raise UserError(
            f"{run.folder}: holds a pre-trained encoder, which predicts nothing yet; train from it "
            f'with train.init_from = "{run.folder}"'
        )
    folder = run.folder / LANES_FOLDER
    if not folder.exists():
        if ensemble:
            raise UserError(
                f"{run.folder}: holds one model, not an ensemble; train several with train.repeats"
            )
        return None
    files = storage.read_verified(folder)
    metadata = json.loads(files[LANE_METADATA])
    uses = metadata["uses"] if ensemble is None else ENSEMBLE if ensemble else MODEL
    if uses == ENSEMBLE and not all(ENSEMBLE in fold["reach"] for fold in metadata["folds"]):
        raise UserError(
            f"{run.folder}: has one model to a fold, no ensemble; train several with train.repeats"
        )
    folds = [
        SavedFold(
            fold["lanes"] if uses == ENSEMBLE else [fold["lanes"][fold["best"]]],
            fold["reach"][uses],
        )
        for fold in metadata["folds"]
    ]
    count = len(metadata["folds"][-1]["lanes"])
    choice = "mean" if uses == ENSEMBLE else "best"
    description = (
        f"the {choice} of {count} models" if count > 1 or uses == ENSEMBLE else "the model"
    )
    return SavedLanes(folds, description, files[LANE_WEIGHTS], folder / LANE_WEIGHTS)


def select_lane(weights: Mapping[str, Content], lane: int) -> dict[str, Content]:
    """Return the weights of one lane by their own names."""
    prefix = f"{lane}/"
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }
