"""What a search tries: Optuna's distributions from the config, and a config from what was drawn."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from slipstream import config as configs
from slipstream.config import Config, Range
from slipstream.engine import pretrained
from slipstream.errors import UserError

INCOMPARABLE = {
    "seed": "chance, not a setting; tune.retrain_seeds shows what it does",
    "data.path": "other data",
    "data.targets": "other targets",
    "data.labels": "other labels",
    "data.horizon": "another horizon",
    "data.scale": "the units of the score",
    "data.split": "the windows that trials are scored on",
    "data.where": "the windows that trials are scored on",
    "data.stride": "the windows that trials are scored on",
    "data.channels": "what a window is",
    "train.objective": "what is learnt",
    "train.init_from": "how the data are scaled",
    "train.metric": "the score; set tune.metric",
    "augment.cache": "where windows come from",
    "train.repeats": "how many models a trial is; set tune.folds or tune.retrain",
    "train.batch": 'a number, not "auto"',
}
"""Settings whose trials cannot be told better or worse by one score, and why"""


def make_default_space(config: Config) -> dict[str, Any]:
    """What is tried where nothing is named."""
    lr, decay, dropout = config.train.lr, config.train.weight_decay, config.model.dropout
    hidden, batch = max(config.model.sizes), config.train.batch
    space: dict[str, Any] = {
        "train.lr": Range(low=lr / 10, high=lr * 10, log=True),
        "train.weight_decay": Range(low=min(decay or 1e-6, 1e-6), high=max(decay, 1e-2), log=True),
        "train.batch": tuple(sorted({max(int(batch) // 2, 1), int(batch), int(batch) * 2}))
        if batch != "auto"
        else (128, 256, 512),
    }
    spec = config.model.spec
    if spec.has_hidden:
        space["model.dropout"] = Range(low=0.0, high=max(dropout, 0.4))
    if spec.has_hidden and config.train.init_from is None:
        step = getattr(config.model, spec.width_divisor) if spec.width_divisor else 1
        widths = {hidden // 2, hidden, hidden * 2}
        space["model.hidden"] = tuple(sorted(max(w // step * step, step) for w in widths))
        for name in spec.search:
            value = getattr(config.model, name)
            space[f"model.{name}"] = tuple(sorted({max(value // 2, 1), value, value * 2}))
    return space


def make_space(config: Config) -> dict[str, Any]:
    """The space, checked: every name is a setting, every value one that it takes."""
    space = config.tune.space or make_default_space(config)
    for name, entry in space.items():
        _refuse_unknown(name, config)
        section = name.split(".")[0]
        told = INCOMPARABLE.get(name)
        if told and not (name == "train.batch" and "auto" not in _ends(entry)):
            raise UserError(f'tune.space has "{name}", which changes {told}')
        if _setting(name) in pretrained.list_fixed_settings(config):
            raise UserError(
                f'tune.space has "{name}", which the encoder that train.init_from names settles'
            )
        if section in ("engine", "tune", "pretrain", "name", "out"):
            raise UserError(f'tune.space has "{name}", which does not change a model')
        for value in _ends(entry):
            _refuse_misfit(name, value, config, space)
    if "train.loss" in space and config.tune.metric == "loss":
        raise UserError(
            'tune.space has "train.loss", and different losses cannot be compared; set '
            'tune.metric = "mae" or "mse"'
        )
    return space


def _refuse_misfit(name: str, value: Any, config: Config, space: Mapping[str, Any]) -> None:
    """A UserError where the setting itself takes no such value. What only does not go with other
    settings may go with what is drawn for those, and is a failed trial where it does not."""
    try:
        configs.replace_settings(config, {name: value})
    except UserError as error:
        told, listed = str(error), name.rpartition(".")[0]
        named = told.startswith((f"{name} ", f"{listed} ")) or "tune.space" in told
        if named and not _fits_beside_another(name, value, config, space):
            raise UserError(f'tune.space."{name}": {error}') from None


def _fits_beside_another(name: str, value: Any, config: Config, space: Mapping[str, Any]) -> bool:
    for other, entry in space.items():
        for choice in _ends(entry) if other != name else ():
            with suppress(UserError):
                configs.replace_settings(config, {other: choice, name: value})
                return True
    return False


def _setting(name: str) -> str:
    """Without the number of one of a list."""
    head, _, last = name.rpartition(".")
    return head if last.isdecimal() else name


def _ends(entry: Any) -> tuple[Any, ...]:
    return (entry.low, entry.high) if isinstance(entry, Range) else tuple(entry)


def _refuse_unknown(name: str, config: Config) -> None:
    settings = config.model_dump()
    known = {
        f"{section}.{key}" for section, v in settings.items() if isinstance(v, dict) for key in v
    }
    base = _setting(name)
    if base not in known | {"seed"} and not name.startswith("model.options."):
        close = difflib.get_close_matches(base, known, n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        raise UserError(f'tune.space has "{name}", which is not a setting{hint}')


def make_distributions(space: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """As Optuna wants them; a list among the choices becomes its text."""
    found: dict[str, BaseDistribution] = {}
    for name, entry in space.items():
        if not isinstance(entry, Range):
            found[name] = CategoricalDistribution([_text(value) for value in entry])
        elif entry.is_integer:
            step = int(entry.step or 1)
            high = int(entry.low) + (int(entry.high) - int(entry.low)) // step * step
            found[name] = IntDistribution(int(entry.low), high, log=entry.log, step=step)
        else:
            found[name] = FloatDistribution(entry.low, entry.high, log=entry.log, step=entry.step)
    return found


def make_grid(space: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Every value of every entry."""
    found: dict[str, list[Any]] = {}
    for name, entry in space.items():
        if not isinstance(entry, Range):
            found[name] = [_text(value) for value in entry]
        elif entry.is_integer:
            found[name] = list(range(int(entry.low), int(entry.high) + 1, int(entry.step or 1)))
        elif entry.step is not None:
            count = int((entry.high - entry.low) / entry.step + 1e-9) + 1
            found[name] = [entry.low + i * entry.step for i in range(count)]
        else:
            raise UserError(
                f'tune.sampler = "grid" needs a list or a step for "{name}"; or take "tpe"'
            )
    return found


def apply_params(config: Config, space: Mapping[str, Any], params: Mapping[str, Any]) -> Config:
    """The config of one trial."""
    settings: dict[str, Any] = {}
    for name, value in params.items():
        entry = space[name]
        if isinstance(entry, Range):
            settings[name] = value
        else:
            settings[name] = next(one for one in entry if _text(one) == value)
    whole = {"train.metric": config.tune.metric, **settings}
    return configs.replace_settings(config, whole)


def describe_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """The space for a report: ranges as tables, choices as trials have them."""
    return {
        name: entry.model_dump() if isinstance(entry, Range) else [_text(value) for value in entry]
        for name, entry in space.items()
    }


def _text(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, tuple)) else value
