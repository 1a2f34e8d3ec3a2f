"""The search space: checks it, lists its values, and turns a trial's params into a config.

Does not import Optuna or torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from slipstream import config as configs
from slipstream.base.errors import Option, UserError
from slipstream.base.text import find_nearest
from slipstream.config import Config, Model, Range

INCOMPARABLE = {
    "seed": "chance, not a setting; tune.retrain_seeds shows its effect",
    "data.path": "the data",
    "data.targets": "the targets",
    "data.labels": "the labels",
    "data.horizon": "the horizon",
    "data.scale": "the units of the score",
    "data.split": "the windows that trials are scored on",
    "data.where": "the windows that trials are scored on",
    "data.prepare": "the rows that windows are made of",
    "data.stride": "the windows that trials are scored on",
    "train.objective": "the task",
    "train.state": "the state that windows begin with",
    "train.init_from": "how the data are scaled",
    "train.metric": "the score; set tune.metric",
    "augment.cache": "the source of the windows",
    "train.repeats": "the number of models per trial; set tune.folds or tune.retrain",
    "train.batch": 'the batch size by "auto"; list numbers',
}
"""Settings that a search cannot vary, because scores would not be comparable, and the reason"""
MIN_MINUTES, MAX_MINUTES = 0.01, 100_000
"""The time of `slipstream auto`"""
MAX_GRID = 1_000_000
"""The largest number of combinations in a grid"""
SAME_MODEL = ("engine", "tune", "pretrain", "predict", "follow", "name", "out")
"""Settings and sections that do not change the model"""


def check_minutes(minutes: Any, low: float = MIN_MINUTES) -> None:
    """Refuse a time for `slipstream auto` that is no number of minutes; None is the default."""
    is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if minutes is not None and not (is_number and low <= minutes <= MAX_MINUTES):
        raise UserError(
            Option("minutes")
            + f" is {str(minutes)[:40]}; it should be a number from {low:g} to {MAX_MINUTES:,}",
            setting="tune.minutes",
        )


def check_config(config: Config) -> None:
    """Raise a UserError for settings that a search does not support."""
    for name, is_set, fix in (
        ("train.repeats", config.train.repeats > 1, "set tune.retrain_seeds instead"),
        ("train.minutes", config.train.minutes is not None, "set tune.minutes instead"),
        (
            'train.state = "carried"',
            config.train.state == "carried",
            'search with "windows", and train the best settings with "carried"',
        ),
        ("train.objective", config.masked, "pre-train first, then set train.init_from"),
        ("augment.cache", config.augment.cache > 0, "remove it"),
        ("engine.sync", config.engine.sync, "remove it"),
        (
            "engine.data_parallel",
            config.engine.data_parallel > 1,
            "GPUs train different trials: search with " + Option("workers", "auto"),
        ),
    ):
        if is_set:
            raise UserError(
                f"{name} is not supported in a search", setting=name.partition(" ")[0], fix=fix
            )


def make_default_space(config: Config) -> dict[str, Any]:
    """Return the space that is searched without `[tune.space]`."""
    lr, decay, dropout = config.train.lr, config.train.weight_decay, config.model.dropout
    hidden, batch = max(config.model.sizes), config.train.batch
    space: dict[str, Any] = {
        "train.lr": Range(low=lr / 10, high=lr * 10, log=True),
        "train.weight_decay": Range(low=min(decay or 1e-6, 1e-6), high=max(decay, 1e-2), log=True),
        "train.batch": _list_around(256 if batch == "auto" else batch),
    }
    spec = config.model.spec
    if spec.has_hidden:
        space["model.dropout"] = Range(low=0.0, high=max(dropout, 0.4))
    if spec.has_hidden and config.train.init_from is None:
        step = getattr(config.model, spec.width_divisor) if spec.width_divisor else 1
        widths = {hidden // 2, hidden, hidden * 2}
        space["model.hidden"] = tuple(sorted(max(w // step * step, step) for w in widths))
        for name in spec.search:
            values = _list_around(getattr(config.model, name))
            highest = _get_maximum(name)
            space[f"model.{name}"] = tuple(value for value in values if value <= highest)
    return space


def _get_maximum(name: str) -> float:
    """Return the largest number that a setting of `[model]` accepts."""
    limits = (getattr(limit, "le", None) for limit in Model.model_fields[name].metadata)
    return min((limit for limit in limits if limit is not None), default=math.inf)


def _list_around(value: int) -> tuple[int, ...]:
    return tuple(sorted({max(value // 2, 1), value, value * 2}))


def make_space(config: Config) -> dict[str, Any]:
    """Return the space of the config; raise a UserError for a wrong name or value."""
    space = config.tune.space or make_default_space(config)
    for name, entry in space.items():
        _refuse_unknown(name, config)
        change = INCOMPARABLE.get(name)
        is_fixed = name == "train.batch" and "auto" not in _list_values(entry)
        if change and not is_fixed:
            fix = "" if ";" in change else "; remove it"
            raise UserError(
                f'tune.space has "{name}"; trials cannot be compared if it changes {change}{fix}',
                setting="tune.space",
            )
        if _strip_index(name) in configs.list_fixed_settings(config):
            fixed = "which the encoder of train.init_from determines"
            raise UserError(f'tune.space has "{name}", {fixed}', setting="tune.space")
        if name.split(".")[0] in SAME_MODEL:
            raise UserError(
                f'tune.space has "{name}", which does not change the model', setting="tune.space"
            )
        if configs.AUTO in _list_values(entry):
            raise UserError(
                f'tune.space has "{name}" = "auto", which would be the same in every trial; list '
                "values",
                setting="tune.space",
            )
        for value in _list_values(entry):
            _check_value(name, value, config, space)
    if "train.loss" in space and config.tune.metric == "loss":
        raise UserError(
            'tune.space has "train.loss", and different losses cannot be compared; set '
            'tune.metric = "mae" or "mse"',
            setting="tune.space",
        )
    return space


def _check_value(name: str, value: Any, config: Config, space: Mapping[str, Any]) -> None:
    """Raise a UserError if the setting does not accept the value. A value that only conflicts with
    other settings may fit the sampled ones; where it does not, the trial fails."""
    try:
        configs.replace_settings(config, {name: value})
    except UserError as error:
        text, parent = str(error), name.rpartition(".")[0]
        prefixes = (f"{name} ", f"{parent} ", f"{parent}: ")
        is_own = text.startswith(prefixes) or "tune.space" in text
        if is_own and not _fits_another_choice(name, value, config, space):
            message = f'tune.space."{name}": ' + error.message
            raise UserError(message, setting="tune.space") from None


def _fits_another_choice(name: str, value: Any, config: Config, space: Mapping[str, Any]) -> bool:
    for other_name, entry in space.items():
        for choice in _list_values(entry) if other_name != name else ():
            with suppress(UserError):
                configs.replace_settings(config, {other_name: choice, name: value})
                return True
    return False


def _strip_index(name: str) -> str:
    """Return "model.hidden" for "model.hidden.0"."""
    head, _, last = name.rpartition(".")
    return head if last.isdecimal() else name


def _list_values(entry: Any) -> tuple[Any, ...]:
    return (entry.low, entry.high) if isinstance(entry, Range) else tuple(entry)


def _refuse_unknown(name: str, config: Config) -> None:
    known, base = _list_names(config), _strip_index(name)
    if _is_of_step(name, config):
        return
    if base not in {*known, "seed"} and not name.startswith(("model.options.", "augment.jitter.")):
        nearest = find_nearest(base, known)
        hint = f'; did you mean "{nearest}"?' if nearest else ""
        raise UserError(
            f'tune.space has "{name}", which is not a setting{hint}', setting="tune.space"
        )


def _is_of_step(name: str, config: Config) -> bool:
    """Whether it is a setting of a step: `data.prepare.0.rows`."""
    section, _, rest = name.partition(".prepare.")
    number, _, key = rest.partition(".")
    if section != "data" or not number.isdecimal() or int(number) >= len(config.data.prepare):
        return False
    return key in type(config.data.prepare[int(number)]).model_fields and key != "step"


def _list_names(config: Config) -> list[str]:
    sections = {name: v for name, v in config.model_dump().items() if isinstance(v, dict)}
    return [f"{section}.{key}" for section, values in sections.items() for key in values]


def list_searchable() -> list[str]:
    """Return the settings that a space may have; `model.hidden.0`, `model.options.NAME` and
    `augment.jitter.COLUMN` are others."""
    return [
        name
        for name in _list_names(Config())
        if (name == "train.batch" or name not in INCOMPARABLE)
        and name.partition(".")[0] not in SAME_MODEL
    ]


def _refuse_large_grid(space: Mapping[str, Any]) -> None:
    """Refuse a grid of too many points, before any of them is made."""
    total = 1.0
    for name, entry in space.items():
        count = len(entry) if not isinstance(entry, Range) else 1.0
        if isinstance(entry, Range) and (entry.is_integer or entry.step is not None):
            count = (entry.high - entry.low) / (entry.step or 1) + 1
        total *= count
        if total > MAX_GRID:
            raise UserError(
                f'tune.sampler = "grid": tune.space."{name}" makes more than {MAX_GRID:,} '
                'combinations; give it a larger step or a list, or use "tpe"',
                setting="tune.sampler",
            )


def make_grid(space: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return all values of each entry."""
    _refuse_large_grid(space)
    grid: dict[str, list[Any]] = {}
    for name, entry in space.items():
        if not isinstance(entry, Range):
            grid[name] = to_params(entry)
        elif entry.is_integer:
            grid[name] = list(range(int(entry.low), int(entry.high) + 1, int(entry.step or 1)))
        elif entry.step is not None:
            count = int((entry.high - entry.low) / entry.step + 1e-9) + 1
            grid[name] = [entry.low + i * entry.step for i in range(count)]
        else:
            needs = f'needs a list or a step for "{name}"; or use "tpe"'
            raise UserError(f'tune.sampler = "grid" {needs}', setting="tune.sampler")
    return grid


def apply_params(config: Config, space: Mapping[str, Any], params: Mapping[str, Any]) -> Config:
    """Return the config of one trial."""
    settings = dict(params)
    for name, value in params.items():
        if not isinstance(entry := space[name], Range):
            settings[name] = entry[to_params(entry).index(value)]
    return configs.replace_settings(config, {"train.metric": config.tune.metric, **settings})


def read_params(config: Config, space: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the params of the config itself, or None where a value of it is not in the space."""
    params: dict[str, Any] = {}
    for name, entry in space.items():
        value = configs.get_setting(config, name)
        if isinstance(entry, Range):
            if not isinstance(value, (int, float)) or not entry.contains(value):
                return None
            params[name] = value if entry.is_integer else float(value)
        else:
            (text,) = to_params([value])
            if text not in to_params(entry):
                return None
            params[name] = text
    return params


def describe_space(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space for the summary: ranges as tables, choices as in the trials' params."""
    return {
        name: entry.model_dump() if isinstance(entry, Range) else to_params(entry)
        for name, entry in space.items()
    }


def to_params(choices: Sequence[Any]) -> list[Any]:
    """Return choices as Optuna's study and JSON hold them: a list as its JSON text, a number that
    is not finite as "inf"."""
    return [
        json.dumps(choice) if isinstance(choice, (list, tuple)) else configs.to_json_values(choice)
        for choice in choices
    ]
