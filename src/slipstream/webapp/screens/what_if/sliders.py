"""The settings that What-if varies: their sliders, and values as options of the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import Config, OptionText
from slipstream.errors import UserError
from slipstream.runs import to_json
from slipstream.webapp import forms

KIND = "model.kind"
BUDGET = ("train.epochs",)
"""Settings that a run made from a try takes from the base instead"""
FEW_EPOCHS = 3
TIME_LIMIT_S = 30
"""A try is cut after so many seconds of training"""
FIXED = (f"train.minutes={TIME_LIMIT_S / 60:g}", "train.repeats=1", "name=try")
"""Options that every try has"""
STOPS: dict[str, tuple[float, ...]] = {
    "model.hidden": (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "model.layers": (1, 2, 3, 4),
    "model.dropout": (0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5),
    "train.lr": (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05),
    "train.batch": (16, 32, 64, 128, 256, 512, 1024),
    "train.weight_decay": (0, 1e-5, 1e-4, 1e-3, 0.01, 0.1),
    "train.epochs": (1, 2, 3, 5, 8, 12, 20, 30, 50),
}
"""Positions of a slider; the base's own value is one more"""
CONTEXTS = (0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4)
"""The same as multiples of the base's context"""
LABELS = {"train.weight_decay": "Weight decay"}
MOST_TEXT = 40


@dataclass(frozen=True)
class Slider:
    """A setting with the values that its slider has."""

    setting: str
    label: str
    help: str
    stops: tuple[float, ...]
    value: float
    """Of the base; the budget's, where that is smaller"""


def list_sliders(base: Config) -> list[Slider]:
    """Return a slider for each setting that a base config has as one number."""
    help_texts = {one.setting: (one.label, one.help) for one in forms.list_controls()}
    sliders = []
    for setting in ("data.context", *STOPS):
        value = read_setting(base, setting)
        if setting == "train.epochs":
            value = min(value, FEW_EPOCHS)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue  # a width for each layer, or a batch size that is measured
        label, text = help_texts[setting]
        stops = STOPS.get(setting) or _list_contexts(base)
        every = tuple(sorted({*stops, value}))
        sliders.append(Slider(setting, LABELS.get(setting, label), text, every, value))
    return sliders


def _list_contexts(base: Config) -> tuple[float, ...]:
    """Return contexts around the base's, as multiples of a patch."""
    patch = base.model.patch
    rounded = (round(base.data.context * factor / patch) * patch for factor in CONTEXTS)
    return tuple(one for one in rounded if one >= patch)


def list_kinds() -> tuple[str, ...]:
    """Return the kinds of models to choose from."""
    return next(one.choices for one in forms.list_controls() if one.setting == KIND)


def read_setting(config: Config | Mapping[str, Any], setting: str) -> Any:
    """Return the value of a setting by its name."""
    value: Any = config
    for key in setting.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    return value


def list_values(base: Config, sliders: list[Slider]) -> dict[str, Any]:
    """Return the values that a page begins with."""
    return {KIND: base.model.kind} | {one.setting: one.value for one in sliders}


def list_options(base: Config, values: Any) -> list[str]:
    """Return the options of the command that tries some values: those that differ from the base."""
    if not isinstance(values, dict):
        raise UserError("values: expected an object")
    sliders = list_sliders(base)
    known = list_values(base, sliders)
    options = []
    for setting, value in known.items():
        value = values.get(setting, value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number or (setting == KIND and isinstance(value, str))):
            raise UserError(f"{setting}: expected a number")
        if setting == KIND and value != base.model.kind and value not in list_kinds():
            raise UserError(f"{setting}: expected one of {', '.join(list_kinds())}")
        if value != read_setting(base, setting):
            text = value if isinstance(value, str) else to_json(value)
            options.append(OptionText(f"{setting}={text}"))
    if unknown := values.keys() - known.keys():
        raise UserError(f"{min(unknown)[:MOST_TEXT]} has no slider here")
    return [*options, *map(OptionText, FIXED)]
