"""Predict with a state that goes on from row to row, and with a window of rows each time."""

from __future__ import annotations

from slipstream.config import Config
from slipstream.config.explanation import format_value
from slipstream.inference.trained import Member, TrainedRun
from slipstream.scoring.batch import Predictor
from slipstream.scoring.ensemble import FoldPredictor, average_predictors
from slipstream.scoring.predict import make_predictor

WITHOUT_WINDOW = {
    "bidirectional": (False, "the backward direction begins at the window's last row"),
    "pool": ("last", "it needs the outputs of all rows of a window"),
    "patch": (1, "a token holds several rows, so most rows have none"),
    "normalize": ("none", "it needs all rows of a window"),
}
"""Settings of `[model]`: the value that a carried state works with, and why not with others"""
KINDS = ("lstm", "gru", "tcn")


def explain_refusal(trained: TrainedRun) -> str | None:
    """Say which setting rules out a carried state; None where nothing does."""
    if trained.mixtures:
        return "an ensemble of runs: stream its members one by one"
    return find_obstacle(trained.first.config)


def find_obstacle(config: Config) -> str | None:
    """Say which setting of a config rules out a carried state."""
    model = config.model
    if model.kind not in KINDS:
        return f'model.kind = "{model.kind}" has no state to carry on ({", ".join(KINDS)} have)'
    for name, (value, why) in WITHOUT_WINDOW.items():
        actual = getattr(model, name)
        if actual != value:
            return f"model.{name} = {format_value(actual)}: {why}"
    return None


def make_state_predictor(member: Member, fold: FoldPredictor, state: str) -> Predictor:
    """Return what a fold's models predict together, whatever state they were trained for."""
    trained = member.trained
    signature = trained.signature.model_copy(update={"state": state})
    predictors = [
        make_predictor(model, member.plan, signature, trained.scaler) for model in fold.models
    ]
    return average_predictors(predictors, signature)
