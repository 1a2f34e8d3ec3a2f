"""The settings of pre-training, and the defaults of a run that does so."""

from typing import Any, Literal

from slipstream.config.base import (
    CLASS_LOSSES,
    Count,
    Fraction,
    NonNegative,
    OptionText,
    Section,
    Width,
)
from slipstream.config.data import Data
from slipstream.config.model import SPECS, Model, format_encoders
from slipstream.config.train import Train

PRETRAIN_OVERRIDE = OptionText("train.objective=masked", "slipstream pretrain")
"""The override that turns any config into one of pre-training"""
DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"split": {"train": 0.9, "val": 0.1}},
    "train": {
        "optimizer": "adamw",
        "lr": 1e-3,
        "weight_decay": 1e-4,
        "schedule": "cosine",
        "lr_min": 1e-5,
        "epochs": 50,
        "batch": 512,
        "clip": 1.0,
        "patience": 5,
        "min_delta": 1e-3,
    },
}
"""Defaults of `slipstream pretrain`"""
RECURRENT_DEFAULTS = {"bidirectional": True, "layer_norm": True}
"""Further defaults for recurrent models"""
CLASS_SETTINGS = ("focal_gamma", "label_smoothing", "class_weights")
"""Settings of `[train]` that pre-training leaves out"""


class Pretrain(Section):
    """Masked pre-training, `slipstream pretrain`: an encoder learns to fill in hidden rows."""

    mask: Literal["patch", "block", "random"] = "patch"
    """Rows to hide: whole patches, one block, or single rows."""
    length: Count = 7
    """Rows of a patch. The offset of the grid of patches varies between windows, where the context
    leaves room."""
    ratio: Fraction = 0.15
    """Fraction of rows to hide, rounded to whole rows or patches: at least one, never all, the same
    number in every window."""
    variance: NonNegative = 0.0
    """Weight of a penalty against collapse, when the encoder maps all windows of a batch to the
    same vector: the mean of relu(1 - standard deviation) over its units. 0.1 is usual."""
    decoder: Width = 128
    """Hidden units of the decoder that maps the encoder's tokens to rows."""


def apply_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of pre-training to settings.

    Settings of classes are for the training that follows, and are left out.
    """
    result = dict(settings)
    train = result.get("train", {})
    if isinstance(train, dict):
        result["train"] = {
            key: value
            for key, value in train.items()
            if key not in CLASS_SETTINGS and not (key == "loss" and value in CLASS_LOSSES)
        }
    for name, values in DEFAULTS.items():
        section = result.get(name, {})
        if isinstance(section, dict):
            result[name] = values | section
    model = result.get("model", {})
    spec = SPECS.get(str(model.get("kind", "lstm"))) if isinstance(model, dict) else None
    if spec is not None and spec.is_recurrent:
        result["model"] = RECURRENT_DEFAULTS | model
    return result


def describe_recurrent(model: Model) -> list[str]:
    """Note what pre-training sets of a recurrent model by itself, and what follows from it."""
    names = [name for name in RECURRENT_DEFAULTS if getattr(model, name)]
    if not (model.spec.is_recurrent and names):
        return []
    listed = " and ".join(f"model.{name} = true" for name in names)
    after = ""
    if model.bidirectional:
        after = (
            "; a model that reads in both directions cannot carry its state from row to row: set "
            "model.bidirectional = false for that"
        )
    return [
        f"pre-trains with {listed}, its defaults for LSTM and GRU; runs that start from the "
        f"encoder have them too{after}"
    ]


def refuse_unfit(pretrain: Pretrain, data: Data, model: Model, train: Train) -> None:
    """Raise a ValueError that names the setting which does not go with pre-training."""
    kind = model.kind
    if model.spec.flattens:
        raise ValueError(
            f'model.kind = "{kind}" has no sequence encoder to pre-train; use {format_encoders()}'
        )
    if model.is_custom:
        raise ValueError(
            f'model.kind = "{kind}" is your own class, which has no encoder to pre-train; use '
            f"{format_encoders()}"
        )
    fewest = 2 * (pretrain.length if pretrain.mask == "patch" else 1)
    if data.context < fewest:
        raise ValueError(
            f"data.context = {data.context} is less than the {fewest} rows that masking needs, as "
            "some rows must stay visible; increase it, or reduce pretrain.length"
        )
    if train.loss not in ("mse", "mae", "huber"):
        raise ValueError(
            f'train.loss = "{train.loss}" does not work in pre-training; use "mse", "mae" or '
            '"huber"'
        )
    if train.repeats > 1:
        raise ValueError(
            "train.repeats does not apply to pre-training, which trains one encoder; remove it"
        )
    if train.init_from is not None:
        raise ValueError(
            "train.init_from does not apply to pre-training, which starts anew; remove it"
        )
