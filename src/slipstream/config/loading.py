"""Load a config from TOML, a mapping and `section.key=value`, with explained errors."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from slipstream.base.errors import Command, Option, Text, UserError, join_messages
from slipstream.base.run_names import OUT, find_run, is_run
from slipstream.base.storage import is_url, parse_path, read_verified, refuse_url
from slipstream.config.base import OptionText, Section, drop_auto, list_from_data, to_plain
from slipstream.config.data import SIMULATED, Data, find_matches
from slipstream.config.errors import (
    ConfigError,
    Origin,
    explain,
    explain_toml,
    format_value,
    shorten,
)
from slipstream.config.model import SPECS, Model, list_kinds
from slipstream.config.sections import Config
from slipstream.config.train import KINDS, Tune

TABLES = (
    *(".csv", ".tsv", ".dat", ".data", ".parquet", ".pq", ".arrow", ".feather", ".mat"),
    *(".xlsx", ".xls", ".ods", ".ts", ".arff", ".gz", ".zip"),
)
"""Endings of files that are data and not settings"""
ENCODER_SETTINGS = ("context", "scale", "channels", "inputs", "prepare")
"""Settings of `[data]` that follow from a pre-trained encoder"""
COPY_FIX = "set out to one (" + Option("out") + "), and copy the run afterwards:"
PATHS = (("data", "path"), ("data", "labels"))
"""Settings that name files and folders to read"""
ENCODER = (("train", "init_from"),)
"""The setting that names a run"""
NONFINITE_TEXT = re.compile(r'("*)(?:-?inf|nan)\1')
"""The texts of numbers that are not finite in JSON, and quoted ones, which are texts that look
alike"""


def load(source: Config | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Read a config from a TOML file, a mapping or a Config, then apply `section.key=value`s.

    A relative path in a file is looked for beside the file, then in the working folder; one from
    elsewhere is relative to the working folder. All become absolute, since a run's config and one
    that is sent to another process are read from any folder.
    """
    name, text = "config", ""
    if isinstance(source, Config):
        settings = source.model_dump(exclude_unset=True)
    elif isinstance(source, Mapping):
        settings = _copy_settings(source)
    else:
        settings, text = _read_toml(Path(source))
        name = str(source)
    origin = Origin(name, text, dict(_apply_override(settings, text) for text in overrides))
    _map_paths(settings, _make_absolute)
    _map_join_paths(settings, _make_absolute)
    where = "a run is trained in a folder of this machine"
    refuse_url(settings.get("out", OUT), where, COPY_FIX, Command("copy", "RUN"))
    _map_paths(settings, lambda name: _find_encoder(name, settings.get("out", OUT)), ENCODER)
    settings = _add_encoder_settings(settings)
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        problems = explain(error, Config)
        raise ConfigError(origin.format_problems(problems), problems) from None
    if isinstance(source, Config):
        _keep_notes(source, config)
    return config


def replace_settings(
    config: Config,
    settings: Mapping[str, Any] | None = None,
    *,
    reset_engine: bool = False,
    **sections: Mapping[str, Any],
) -> Config:
    """Return a config with some settings replaced, and checked again.

    `settings` has dotted names, of which `model.hidden.0` is one entry of a list; keywords replace
    settings of a section: `train={"lr": 1e-3}`. `reset_engine` resets `[engine]` to its defaults
    first.
    """
    result = config.model_dump(exclude_unset=True)
    if reset_engine:
        result.pop("engine", None)
    for section, values in sections.items():
        result[section] = result.get(section, {}) | dict(values)
    for dotted, value in (settings or {}).items():
        *path, key = dotted.split(".")
        if key.isdecimal():
            _replace_entry(config, result, path, int(key), value)
            continue
        inner: Any = result
        for name in path:
            if isinstance(inner, list):
                inner = _get_step(inner, name, dotted)
                continue
            if not inner.get(name):  # also a number that stands for all columns, 0
                inner[name] = {}
            if path[:2] == ["data", "prepare"] and isinstance(inner[name], (list, tuple)):
                inner[name] = [dict(step) for step in inner[name]]
            inner = inner[name]
            if not isinstance(inner, (dict, list)):
                where = ".".join(path)
                raise UserError(
                    f"{where} is {format_value(inner)} for all; give a table for {dotted}"
                )
        inner[key] = value
    try:
        changed = Config.model_validate(result)
    except ValidationError as error:
        raise UserError(
            join_messages(problem.message for problem in explain(error, Config))
        ) from None
    if not reset_engine:
        _keep_notes(config, changed)
    return changed


def _get_step(steps: list[dict[str, Any]], number: str, dotted: str) -> dict[str, Any]:
    """Return the settings of a step of `data.prepare` by its number."""
    if not number.isdecimal() or int(number) >= len(steps):
        raise UserError(f"{dotted}: data.prepare has {len(steps)} steps, numbered from 0")
    return steps[int(number)]


def get_setting(config: Config, dotted: str) -> Any:
    """Return the value of a setting, `model.hidden.0` and `data.prepare.0.rows` among them."""
    value: Any = config
    for name in dotted.split("."):
        if isinstance(value, (tuple, list)):
            value = value[int(name)] if name.isdecimal() and int(name) < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(name)
        elif name.isdecimal() and isinstance(value, int):  # one width for all layers
            continue
        else:
            value = getattr(value, name, None)
    return value


def _keep_notes(old: Config, new: Config) -> None:
    """Copy the notes on old names from a config to the config made from it."""
    if notes := tuple(dict.fromkeys((*old.engine.notes, *new.engine.notes))):
        new.engine.__dict__["notes"] = notes


def _replace_entry(
    config: Config, settings: dict[str, Any], path: Sequence[str], index: int, value: Any
) -> None:
    """Replace one entry of a list, such as one layer's width; a single number stands for all."""
    section, key = path
    values = settings.setdefault(section, {})
    if not isinstance(values.get(key), (list, tuple)):
        values[key] = list(config.model.sizes) if path == ["model", "hidden"] else []
    values[key] = list(values[key])
    if index >= len(values[key]):
        raise UserError(
            f"tune.space has {'.'.join(path)}.{index}, but there are {len(values[key])} entries, "
            "counted from 0",
            setting="tune.space",
        )
    values[key][index] = value


def load_demo(name: str = "demo") -> Config:
    """Load an embedded config.

    `demo` trains an LSTM that estimates a simulated cell's state of charge, `search` looks for
    better settings of it, `bars` pre-trains an encoder of simulated bars, and `regimes` classifies
    their regimes from a hundred labels.
    """
    text = resources.files("slipstream").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return Config.model_validate(tomllib.loads(text))


def list_differences(first: Config, second: Config) -> list[str]:
    """Return the dotted names of the settings that differ."""
    before, after = first.model_dump(), second.model_dump()
    names = []
    for name, value in before.items():
        if isinstance(value, dict):
            names += [f"{name}.{key}" for key in value if value[key] != after[name][key]]
        elif value != after[name]:
            names.append(name)
    return names


def to_toml(config: Config, *, only_set: bool = False) -> str:
    """Format every setting as TOML, or those that were set."""
    settings = config.model_dump(exclude_none=True, exclude_unset=only_set)
    if config.tune == Tune():  # the run is no search
        settings.pop("tune", None)
    text = tomli_w.dumps(settings)
    before = ""
    while text != before:  # the innermost lists first
        before, text = text, re.sub(r"\[\n((?: +[^\n]*,\n)+?) *\]", _join_lines, text)
    return text


def to_json_values(value: Any) -> Any:
    """Return settings, or one value, as values of strict JSON.

    A number that is not finite becomes its text in TOML ("inf", "-inf", "nan"); a text that looks
    the same gets quotes. `from_json_values` restores the settings exactly, with lists for tuples.
    """
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {str(key): to_json_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_values(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    is_ambiguous = isinstance(value, str) and NONFINITE_TEXT.fullmatch(value) is not None
    return f'"{value}"' if is_ambiguous else value


def from_json_values(value: Any) -> Any:
    """Return the settings that `to_json_values` has written."""
    if isinstance(value, Mapping):
        return {key: from_json_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [from_json_values(entry) for entry in value]
    match = NONFINITE_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return value[1:-1] if match[1] else float(value)


def _join_lines(array: re.Match[str]) -> str:
    items = [line.strip().removesuffix(",") for line in array[1].strip("\n").split("\n")]
    joined = f"[{', '.join(items)}]"
    return joined if len(joined) <= 80 else array[0]


def _read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Read a config file; relative paths in it are resolved against its folder."""
    if path.suffix.lower() in TABLES:
        raise UserError(
            f"{path}: is a table, not a config; write a TOML file that says [data] path = "
            f'"{path.name}", and name that'
        )
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        settings = tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such config file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a config file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; a config is a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(explain_toml(str(path), text, str(error))) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise UserError(f"{path}: cannot be read as TOML: {error}") from None
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")
    settings.setdefault("name", name or "run")

    def resolve(setting: str) -> str:
        if is_url(setting):
            return setting
        beside = path.resolve().parent / setting
        return str(beside if _exists(beside) or not _exists(Path(setting)) else Path(setting))

    def resolve_run(setting: str) -> str:
        beside = path.resolve().parent / setting
        return str(beside) if is_run(beside) else setting

    _map_paths(settings, resolve)
    _map_join_paths(settings, resolve)
    _map_paths(settings, resolve_run, ENCODER)
    return settings, text


def _make_absolute(path: str) -> str:
    """Return the absolute path; an address in object storage is returned unchanged."""
    return str(parse_path(path) if is_url(path) else Path(path).absolute())


def _exists(path: Path) -> bool:
    """Return whether the file or folder exists, or for a pattern any match."""
    return path.exists() or bool(find_matches(path)[1])


def _map_paths(
    settings: dict[str, Any],
    change: Callable[[str], str],
    paths: Iterable[tuple[str, str]] = PATHS,
) -> None:
    """Change these paths in the settings; the names of embedded data sets stay."""

    def map_one(value: Any) -> Any:
        is_path = isinstance(value, str) and value and not value.startswith(SIMULATED)
        return change(value) if is_path else value

    for section, key in paths:
        values = settings.get(section)
        if isinstance(values, dict) and key in values:
            value = values[key]
            is_list = isinstance(value, (list, tuple))
            mapped = [map_one(entry) for entry in value] if is_list else map_one(value)
            settings[section] = values | {key: mapped}


def _map_join_paths(settings: dict[str, Any], change: Callable[[str], str]) -> None:
    """Change the paths of the tables that steps of `data.prepare` join."""
    data = settings.get("data")
    if not isinstance(data, dict) or not isinstance(data.get("prepare"), (list, tuple)):
        return

    def map_one(step: Any) -> Any:
        has_path = isinstance(step, dict) and isinstance(step.get("path"), str) and step["path"]
        return step | {"path": change(step["path"])} if has_path else step

    settings["data"] = data | {"prepare": [map_one(step) for step in data["prepare"]]}


def _find_encoder(name: str, out: Any) -> str:
    """Return the absolute path of the run that `train.init_from` names; an absolute path is not
    completed, since the config of a run has to mean the same run for ever."""
    path = Path(name)
    if not path.is_absolute() and not is_run(path):
        try:
            path = find_run(name, out=str(out), kinds=("pretrain",))
        except UserError as error:
            reason = str(error).replace(name, shorten(name))
            raise UserError(f"train.init_from: {reason}", setting="train.init_from") from None
    return str(path.absolute())


def _add_encoder_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Add settings that follow from the encoder of `train.init_from`, where none are set."""
    sections = {name: settings.get(name, {}) for name in ("data", "model", "train")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return settings
    data, model, train = sections["data"], sections["model"], sections["train"]
    data, model = drop_auto(data, list_from_data(Data)), drop_auto(model, list_from_data(Model))
    encoder = train.get("init_from")
    unset = [key for key in Model.model_fields if key not in model]
    # runs of version 0.1 lack data.prepare
    unset += [key for key in ENCODER_SETTINGS if key not in (*data, "prepare")]
    if not isinstance(encoder, str) or not unset:
        return settings  # a run's own config is complete and needs no encoder folder
    try:
        folder = Path(encoder).resolve()
        exists = (folder / "config.toml").is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL, a loop of links
        exists = False
    if not exists:
        raise UserError(
            f"train.init_from = {format_value(encoder)}: there is no such run",
            setting="train.init_from",
        )
    encoder_data, encoder_model = _read_encoder(folder)
    filled = {"data": encoder_data | data, "model": encoder_model | model}
    return settings | filled | {"train": train | {"init_from": str(folder)}}


def _read_encoder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the settings of `[data]` that follow from an encoder's run, and its `[model]`."""
    path = folder / "config.toml"
    settings, _ = _read_toml(path)
    data, model = settings.get("data"), settings.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict):
        raise UserError(f"{path}: has no [data] or no [model]; it is not the config of a run")
    if ":" in str(model.get("kind")):  # a run from elsewhere must not name a module to import
        raise UserError(
            f'{path}: model.kind = "{model["kind"]}" is not an encoder; train.init_from takes '
            "a run of " + Command("pretrain")
        )
    data = {key: value for key, value in data.items() if key in ENCODER_SETTINGS}
    if (folder / "model").is_dir():
        signature = json.loads(read_verified(folder / "model").get("signature.json", b"{}"))
        data |= {key: signature[key] for key in ("inputs",) if key in signature}
    return data, model


def list_fixed_settings(config: Config) -> tuple[str, ...]:
    """List the settings that have to equal those of the encoder that `train.init_from` names."""
    if config.train.init_from is None:
        return ()
    spec = config.model.spec
    more = ("data.context",) if spec.knows_positions else ()
    return "model.kind", *(f"model.{name}" for name in spec.encoder_settings), "data.inputs", *more


def _copy_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    values = {
        key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else to_plain(value)
        for key, value in settings.items()
    }
    return {k: _copy_settings(v) if isinstance(v, Mapping) else v for k, v in values.items()}


def read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the settings that `section.key=value`s name, by section, unchecked."""
    settings: dict[str, Any] = {}
    for text in overrides:
        _apply_override(settings, text)
    return settings


def _apply_override(settings: dict[str, Any], override: str) -> tuple[tuple[str, ...], Text]:
    """Apply one override; return its setting and the option or argument that it comes from."""
    origin = override.option if isinstance(override, OptionText) else "overrides"
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError(
            f"{origin}: {format_value(override)} is not of the form section.key=value, as in "
            "train.lr=0.001"
        )
    for key in keys[:-1]:
        settings = settings.setdefault(key, {})
        if not isinstance(settings, dict):
            raise UserError(f'{origin}: {override}: "{key}" is a setting, not a section')
    if keys == ["engine", "cudnn"]:
        settings.pop("rnn", None)  # its name of today, which the override replaces
    value = text = text.strip()  # what is no TOML value (number, list, quoted text) stays text
    with suppress(ValueError, RecursionError):
        value = tomllib.loads(f"value = {text}")["value"]
    settings[keys[-1]] = value if isinstance(value, (bool, int, float, str, list, dict)) else text
    return tuple(keys), origin


def list_unused(config: Config) -> list[str]:
    """List the settings without effect that differ from their defaults, with the reason, and the
    settings given by an older name, with the new name."""
    unused = [*_find_in_train(config), *_find_in_data(config)]
    if "model.kind" not in config.tune.space:
        unused = [*_find_in_model(config), *unused]
    unused += [
        (f"augment.{kind}_chance", f"augment.{kind} is off")
        for kind in KINDS
        if not getattr(config.augment, kind)
    ]
    return [
        *config.engine.notes,
        *(
            f"{name} = {format_setting(config, name)} has no effect: {why}"
            for name, why in unused
            if _is_changed(config, name)
        ),
    ]


def _is_changed(config: Config, name: str) -> bool:
    section, key = name.split(".")
    settings = getattr(config, section)
    return bool(getattr(settings, key) != type(settings).model_fields[key].default)


def format_setting(config: Config, name: str) -> str:
    """Format the value of a setting as TOML has it, roughly."""
    section, _, key = name.partition(".")
    value = getattr(getattr(config, section), key) if key else getattr(config, section)
    if isinstance(value, tuple):
        return f"[{', '.join(_format_value(entry) for entry in value)}]"
    return _format_value(value)


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def _find_in_model(config: Config) -> Iterator[tuple[str, str]]:
    model, spec = config.model, config.model.spec
    kind = "your own class" if spec.is_custom else f'model.kind = "{model.kind}"'
    if not spec.is_sequential:
        reads = "has layers of its own" if spec.is_custom else "reads all rows of a window at once"
        yield from ((f"model.{name}", f"{kind} {reads}") for name in ("patch", "pool"))
    if not spec.has_hidden:
        names = ["hidden", "layers", "dropout"]
        if isinstance(model.hidden, tuple):  # the layers follow from it
            names.remove("layers")
        reason = "has layers of its own" if spec.is_custom else "has no hidden layer"
        yield from ((f"model.{name}", f"{kind} {reason}") for name in names)
    elif spec.is_recurrent and len(model.sizes) == 1:
        yield "model.dropout", "it drops between layers, and there is one"
    if config.data.task == "classify" or config.masked:
        yield "model.output_range", "it limits predicted numbers, and there are none"
    foreign = {name for kind_spec in SPECS.values() for name in kind_spec.settings} - set(
        spec.settings
    )
    for name in sorted(foreign):
        yield f"model.{name}", f"it is for {' and '.join(list_kinds(name))}, not {kind}"


def _find_in_train(config: Config) -> Iterator[tuple[str, str]]:
    train = config.train
    goes_with: dict[str, dict[str, tuple[str, ...]]] = {
        "loss": {"quantiles": ("quantile",), "huber_delta": ("huber",), "focal_gamma": ("focal",)},
        "optimizer": {"momentum": ("sgd",)},
        "schedule": {
            **dict.fromkeys(("step_epochs", "step_factor"), ("step",)),
            **dict.fromkeys(("plateau_patience", "plateau_factor"), ("plateau",)),
            **dict.fromkeys(("restart_epochs", "restart_growth"), ("restarts",)),
            "lr_min": ("cosine", "restarts", "plateau"),
        },
    }
    for choice, settings in goes_with.items():
        value = getattr(train, choice)
        for name, values in settings.items():
            if value not in values:
                wanted = " or ".join(f'"{allowed}"' for allowed in values)
                yield (
                    f"train.{name}",
                    f'it applies only with train.{choice} = {wanted}, not "{value}"',
                )
    for name in ("exploit_lr", "exploit_lr_min") if not train.exploit_epochs else ():
        yield f"train.{name}", "it applies only with train.exploit_epochs, which is 0"
    if train.patience == "off":
        yield "train.exploit_epochs", 'they begin when patience runs out, and it is "off"'
    if train.init_from is None:
        for name in ("freeze_epochs", "encoder_lr", "layer_decay"):
            yield f"train.{name}", "it applies only with train.init_from, which is not set"


def _find_in_data(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.time_column is None:
        for name in ("time_format", "gap_tolerance", "unsorted", "duplicates"):
            yield f"data.{name}", "it is about data.time, which is not set"
    if not data.horizon and not config.masked:
        yield "data.period", "it is for the seasonal baseline, which forecasts"
