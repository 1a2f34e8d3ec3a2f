"""Reads a config from TOML, mappings and `section.key=value`, and explains what is wrong in it."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_origin

import tomli_w
from pydantic import ValidationError

from slipstream.checksums import read_verified
from slipstream.config.base import Section
from slipstream.config.data import SIMULATED
from slipstream.config.model import Model
from slipstream.config.sections import Config
from slipstream.config.tune import Tune
from slipstream.errors import UserError

OF_ENCODER = ("context", "scale", "channels", "inputs")
"""Of `[data]`, what an encoder settles"""
PATHS = (("data", "path"), ("data", "labels"), ("train", "init_from"))
"""Settings that name files and folders to read"""
LONGEST = 200
"""Characters of a value that a message shows"""


def load(source: Config | str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Read a config from a TOML file, a mapping or a Config, then apply `section.key=value`s.

    A relative path in a file is looked for beside the file, then in the working folder; one from
    elsewhere is of the working folder. All of them become absolute: what is stored with a run or
    sent to another process must be found from any folder.
    """
    if isinstance(source, Config):
        settings, origin = source.model_dump(exclude_unset=True), "config"
    elif isinstance(source, Mapping):
        settings, origin = _deep_copy(source), "config"
    else:
        settings, origin = _read(Path(source)), str(source)
    for override in overrides:
        _apply(settings, override)
    _change_paths(settings, _absolute)
    settings = _with_encoder(settings)
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{origin}: " + "\n  ".join(_explain(error))) from None


def replace_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """A config with some settings changed, by dotted name; `model.hidden.0` is one of a list."""
    found = config.model_dump(exclude_unset=True)
    for dotted, value in settings.items():
        *sections, key = dotted.split(".")
        if key.isdecimal():
            _change_one(config, found, sections, int(key), value)
            continue
        inner = found
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[key] = value
    try:
        return Config.model_validate(found)
    except ValidationError as error:
        raise UserError("; ".join(_explain(error))) from None


def _change_one(
    config: Config, found: dict[str, Any], path: Sequence[str], index: int, value: Any
) -> None:
    """Change one of a list, such as one layer's width; a single number stands for all of them."""
    section, key = path
    given = found.setdefault(section, {})
    if not isinstance(given.get(key), (list, tuple)):
        given[key] = list(config.model.sizes) if path == ["model", "hidden"] else []
    given[key] = list(given[key])
    if index >= len(given[key]):
        raise UserError(
            f"tune.space has {'.'.join(path)}.{index}, but there are {len(given[key])} of them, "
            "counted from 0"
        )
    given[key][index] = value


def load_demo(name: str = "demo") -> Config:
    """An embedded job: `demo`, an LSTM that estimates a simulated cell's state of charge;
    `search`, for better settings of it; `bars`, an encoder of simulated bars, and `regimes`, to
    tell their regimes from a hundred labels."""
    text = resources.files("slipstream").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return Config.model_validate(tomllib.loads(text))


def list_differences(one: Config, other: Config) -> list[str]:
    """The settings that differ, by their dotted names."""
    mine, theirs = one.model_dump(), other.model_dump()
    found = []
    for name, value in mine.items():
        if isinstance(value, dict):
            found += [f"{name}.{key}" for key in value if value[key] != theirs[name][key]]
        elif value != theirs[name]:
            found.append(name)
    return found


def to_toml(config: Config, *, only_set: bool = False) -> str:
    """Every setting, or those that were given: a preset fills in the others."""
    settings = config.model_dump(exclude_none=True, exclude_unset=only_set)
    if config.tune == Tune():  # nobody asked for a search
        settings.pop("tune", None)
    text = tomli_w.dumps(settings)
    before = ""
    while text != before:  # the innermost lists first
        before, text = text, re.sub(r"\[\n((?: +[^\n]*,\n)+?) *\]", _on_one_line, text)
    return text


def _on_one_line(array: re.Match[str]) -> str:
    items = [line.strip().removesuffix(",") for line in array[1].strip("\n").split("\n")]
    joined = f"[{', '.join(items)}]"
    return joined if len(joined) <= 80 else array[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such config file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; a config is a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: is not valid TOML: {error}") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise UserError(f"{path}: cannot be read as TOML: {error}") from None
    settings.setdefault("name", _as_name(path.stem))
    _change_paths(settings, lambda named: _beside(named, path))
    return settings


def _change_paths(settings: dict[str, Any], change: Callable[[str], str]) -> None:
    """Change every path that settings name; the embedded data sets are none."""

    def changed_one(named: Any) -> Any:
        is_path = isinstance(named, str) and named and not named.startswith(SIMULATED)
        return change(named) if is_path else named

    for section, key in PATHS:
        values = settings.get(section)
        if isinstance(values, dict) and key in values:
            named = values[key]
            many = isinstance(named, (list, tuple))
            found = [changed_one(one) for one in named] if many else changed_one(named)
            settings[section] = values | {key: found}


def _absolute(named: str) -> str:
    return str(Path(named).absolute())


def _with_encoder(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that follow from the encoder of `train.init_from`, where they say nothing."""
    sections = {name: settings.get(name, {}) for name in ("data", "model", "train")}
    if not all(isinstance(section, dict) for section in sections.values()):
        return settings
    data, model, train = sections["data"], sections["model"], sections["train"]
    asked = train.get("init_from")
    needed = [key for key in Model.model_fields if key not in model]
    needed += [key for key in OF_ENCODER if key not in data]
    if not isinstance(asked, str) or not needed:
        return settings  # of a run that was begun: it does without the encoder's folder
    try:
        folder = Path(asked).resolve()
        there = (folder / "config.toml").is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name, a NUL, a loop of links
        there = False
    if not there:
        raise UserError(f'train.init_from = "{_shortened(asked)}": there is no such run')
    given, network = _of_encoder(folder)
    filled = {"data": given | data, "model": network | model}
    return settings | filled | {"train": train | {"init_from": str(folder)}}


def _of_encoder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the run of an encoder settles of `[data]`, and its `[model]`."""
    path = folder / "config.toml"
    theirs = _read(path)
    data, network = theirs.get("data"), theirs.get("model")
    if not isinstance(data, dict) or not isinstance(network, dict):
        raise UserError(f"{path}: lacks [data] or [model]; it is not the config of a run")
    if ":" in str(network.get("kind")):  # nor would a run that may be anybody's name a module
        raise UserError(
            f'{path}: model.kind = "{network["kind"]}" is no encoder; train.init_from takes the '
            "run of slipstream pretrain"
        )
    given = {key: value for key, value in data.items() if key in OF_ENCODER}
    if (folder / "model").is_dir():
        signature = json.loads(read_verified(folder / "model").get("signature.json", b"{}"))
        given |= {key: signature[key] for key in ("inputs",) if key in signature}
    return given, network


def _as_name(stem: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem)
    return kept.lstrip("._-") or "run"


def _beside(named: str, config_path: Path) -> str:
    beside = config_path.resolve().parent / named
    return str(beside if beside.exists() or not Path(named).exists() else Path(named))


def _deep_copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    given = {
        key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
        for key, value in settings.items()
    }
    return {k: _deep_copy(v) if isinstance(v, Mapping) else v for k, v in given.items()}


def _apply(settings: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f'--set takes section.key=value, as in train.lr=0.001, not "{override}"')
    for key in keys[:-1]:
        settings = settings.setdefault(key, {})
        if not isinstance(settings, dict):
            raise UserError(f'--set {override}: "{key}" is a value, not a section')
    settings[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value where it is one (numbers, lists, quoted text), else the text itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text


def _explain(error: ValidationError) -> Iterator[str]:
    """One line per wrong setting, the alternatives of a union joined."""
    lines: dict[str, list[str]] = {}
    for item in error.errors():
        path, section = _locate(item["loc"])
        setting = ".".join(path)
        if item["type"] == "extra_forbidden":
            lines[setting] = [f"{setting} is not a setting{_nearest(path[-1], section)}"]
        elif item["type"] == "value_error":
            lines.setdefault(setting, []).append(str(item["ctx"]["error"]))
        else:
            wanted = item["msg"].replace("Input should be ", "").replace("a valid ", "a ")
            wanted = wanted.replace("String should match pattern", "text that matches")
            found = _shortened(repr(item["input"]))
            said = lines.setdefault(setting, [f"{setting} is {found}; it should be"])
            said.append(wanted if len(said) == 1 else f"or {wanted}")
    for said in lines.values():
        yield " ".join(said)


def _shortened(text: str) -> str:
    """As much of a value as a message has room for."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def _locate(loc: tuple[int | str, ...]) -> tuple[list[str], type[Section]]:
    """The setting's dotted path, without the branch names that unions add, and its section."""
    section: type[Section] = Config
    path: list[str] = []
    entries = False
    for part in map(str, loc):
        path.append(part)
        if entries:
            break
        field = section.model_fields.get(part)
        inner = field.annotation if field else None
        if entries := get_origin(inner) is dict:
            continue  # the entry's own name follows
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            break
        section = inner
    return path, section


def _nearest(key: str, section: type[Section]) -> str:
    close = difflib.get_close_matches(key, section.model_fields, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    for name, field in Config.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section) and key in inner.model_fields:
            return f'; did you mean "{name}.{key}"?'
    return f"; known here: {', '.join(section.model_fields)}"
