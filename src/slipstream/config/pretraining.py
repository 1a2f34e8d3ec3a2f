"""How an encoder is pre-trained, and what a run that does so has by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt

from slipstream.config.base import CLASS_LOSSES, Fraction, NonNegative, Section
from slipstream.config.registry import SPECS, format_encoders

if TYPE_CHECKING:
    from slipstream.config.sections import Config

PRETRAIN_OVERRIDE = "train.objective=masked"
"""As an override: what makes any job one of pre-training"""
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
"""What `slipstream pretrain` takes where the config says nothing"""
RECURRENT_DEFAULTS = {"bidirectional": True, "layer_norm": True}
"""The same for lstm and gru"""
OF_CLASSES = ("focal_gamma", "label_smoothing", "class_weights")
"""Of `[train]`, what an encoder has no use for"""


class Pretrain(Section):
    """Masked pre-training, `slipstream pretrain`: rows are hidden, and an encoder fills them in."""

    mask: Literal["patch", "block", "random"] = "patch"
    """What is hidden of a window: whole patches of rows, one block, or single rows anywhere."""
    length: PositiveInt = 7
    """Rows of a patch. The grid of patches begins at another row in every window, where the
    context's rest leaves room."""
    ratio: Fraction = 0.15
    """Share of rows to hide, rounded to whole rows or patches: at least one, never all, and the
    same number in every window."""
    variance: NonNegative = 0.0
    """Weight of a penalty where the encoder gives all windows of a batch the same: the mean of
    relu(1 - deviation) over its units. 0.1 is usual."""
    decoder: PositiveInt = 128
    """Hidden units of the decoder that makes rows of the encoder's tokens."""


def apply_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """A pre-training run's settings, with its own defaults where they say nothing.

    What they say of classes is for the training that follows, and left out.
    """
    found = dict(settings)
    train = found.get("train", {})
    if isinstance(train, dict):
        found["train"] = {
            key: value
            for key, value in train.items()
            if key not in OF_CLASSES and not (key == "loss" and value in CLASS_LOSSES)
        }
    for name, values in DEFAULTS.items():
        given = found.get(name, {})
        if isinstance(given, dict):
            found[name] = values | given
    model = found.get("model", {})
    spec = SPECS.get(str(model.get("kind", "lstm"))) if isinstance(model, dict) else None
    if spec is not None and spec.is_recurrent:
        found["model"] = RECURRENT_DEFAULTS | model
    return found


def refuse_unfit(config: Config) -> None:
    """A ValueError names what of a config cannot be pre-trained."""
    kind, how, train = config.model.kind, config.pretrain, config.train
    if config.model.spec.flattens:
        raise ValueError(
            f'model.kind = "{kind}" reads a window as one row, so there is no sequence to '
            f"pre-train; use {format_encoders()}"
        )
    if config.model.is_custom:
        raise ValueError(
            f'model.kind = "{kind}" is a class of your own, which has no encoder to pre-train; use '
            f"{format_encoders()}"
        )
    fewest = 2 * (how.length if how.mask == "patch" else 1)
    if config.data.context < fewest:
        raise ValueError(
            f"data.context = {config.data.context} is less than the {fewest} rows that masking "
            "takes, since some must stay visible; raise it, or lower pretrain.length"
        )
    if train.loss not in ("mse", "mae", "huber"):
        raise ValueError(
            f'train.loss = "{train.loss}" cannot tell how well rows are filled in; for '
            'pre-training use "mse", "mae" or "huber"'
        )
    if train.repeats > 1:
        raise ValueError("train.repeats goes with training; one encoder is pre-trained")
    if train.init_from is not None:
        raise ValueError("train.init_from goes with training; pre-training begins anew")
