"""The form of a config, made from pydantic's schema: one control per setting, with its help.

A control holds a text, as `--set section.key=value` does; an empty text leaves the setting unset.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from slipstream.config import Config
from slipstream.config.base import AUTO, Section, list_from_data, read_descriptions
from slipstream.config.prepare import STEPS
from slipstream.runs import to_json

TRAIN, TUNE, PRETRAIN = "train", "tune", "pretrain"
COMMANDS = (TRAIN, TUNE, PRETRAIN)
"""The commands that a form can start"""
PLAIN_DATA = ("name", "data.path", "data.time", "data.id")
PLAIN_MODEL = ("model.kind", "model.hidden", "model.layers", "model.dropout")
PLAIN_TRAIN = ("train.epochs", "train.lr", "train.batch")
PLAIN = {
    TRAIN: (
        *(*PLAIN_DATA, "data.targets", "data.context", "data.horizon"),
        *(*PLAIN_MODEL, *PLAIN_TRAIN, "train.minutes", "train.repeats"),
    ),
    TUNE: (
        *(*PLAIN_DATA, "data.targets", "data.context", "data.horizon"),
        *(*PLAIN_MODEL, *PLAIN_TRAIN),
        *("tune.trials", "tune.minutes", "tune.sampler", "tune.pruner"),
    ),
    PRETRAIN: (
        *(*PLAIN_DATA, "data.inputs", "data.context", *PLAIN_MODEL, *PLAIN_TRAIN),
        *("train.minutes", "pretrain.mask", "pretrain.length", "pretrain.ratio"),
    ),
}
"""Settings that are shown at once; the others are folded away"""
OWN = ("out", "train.objective", "data.path")
"""Settings that the app sets itself"""
HIDDEN = {
    TRAIN: (*OWN, "tune", "pretrain"),
    TUNE: (*OWN, "tune.space", "pretrain"),
    PRETRAIN: (*OWN, "tune", "data.targets", "data.horizon", "data.labels", "data.static"),
}
"""Settings without a control: they belong to other commands, have an editor, or are not read"""
COLUMN = ("data.time", "data.id", "data.split.by")
COLUMNS = ("data.inputs", "data.targets", "data.future", "data.static", "data.ignore")
STEP_COLUMNS = {"columns": "columns"} | dict.fromkeys(("column", "high", "low"), "column")
"""Keys of steps that name columns; a join's keys name columns of another table"""
LABELS = {
    "name": "Name",
    "data.time": "Time column",
    "data.id": "Series column",
    "data.targets": "Targets",
    "data.context": "Context, rows",
    "data.horizon": "Horizon, rows",
    "model.kind": "Model",
    "model.hidden": "Width",
    "model.layers": "Layers",
    "model.dropout": "Dropout",
    "train.epochs": "Epochs",
    "train.lr": "Learning rate",
    "train.batch": "Batch size",
    "train.minutes": "Time limit, minutes",
    "train.repeats": "Repeats",
    "data.inputs": "Inputs",
    "tune.trials": "Trials",
    "tune.minutes": "Time limit, minutes",
    "tune.sampler": "Sampler",
    "tune.pruner": "Pruner",
    "pretrain.mask": "Mask",
    "pretrain.length": "Rows of a patch",
    "pretrain.ratio": "Hidden fraction of rows",
}
"""Labels of the settings that are shown at once"""
TITLES = {
    "": "Run",
    "data": "Data",
    "data.split": "Split",
    "model": "Model",
    "train": "Training",
    "augment": "Augmentation",
    "engine": "Engine",
    "tune": "Search",
    "pretrain": "Pre-training",
    "predict.filter": "Filter of predictions",
    "follow": "Tracker",
}
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}


@dataclass(frozen=True)
class Control:
    """One setting in the form."""

    setting: str
    kind: str
    """choice, several (of the choices), text, number, column, columns or value (any TOML value)"""
    help: str
    default: str
    choices: tuple[str, ...] = ()
    accepts_others: bool = False
    """Whether a choice may also be typed"""
    limits: str = ""
    is_plain: bool = False
    """Whether the setting is shown at once"""
    accepts_numbers: bool = False
    """Whether a text such as 3 is read as a number"""
    is_required: bool = False

    @property
    def label(self) -> str:
        return LABELS.get(self.setting, self.setting) if self.is_plain else self.setting

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        return re.split(r"(?<=[.;]) ", self.help, maxsplit=1)[0].rstrip(";")

    @property
    def section(self) -> str:
        return self.setting.rpartition(".")[0]


@cache
def list_controls(command: str = TRAIN) -> tuple[Control, ...]:
    """Return a control for every setting that the form of a command has."""
    schema = Config.model_json_schema()
    controls = _iter_controls(Config, schema, schema, HIDDEN[command])
    plain = PLAIN[command]
    if command == PRETRAIN:  # which has defaults of its own
        values = Config.model_validate({"train": {"objective": "masked"}}).model_dump()
        controls = (
            replace(control, default=format_value(get_value(values, control.setting)))
            for control in controls
        )
    return tuple(replace(control, is_plain=control.setting in plain) for control in controls)


def group_controls(command: str = TRAIN) -> list[tuple[str, list[Control]]]:
    """Return the controls by section, with the section's title."""
    groups: dict[str, list[Control]] = {}
    for control in list_controls(command):
        groups.setdefault(TITLES.get(control.section, control.section), []).append(control)
    return list(groups.items())


@dataclass(frozen=True)
class StepForm:
    """The controls of one kind of step of `data.prepare`."""

    step: str
    help: str
    controls: tuple[Control, ...]


@cache
def list_step_forms() -> tuple[StepForm, ...]:
    """Return the form of each kind of step; the name of a control is the key in its table."""
    step_forms = []
    for step, section in STEPS.items():
        schema, texts = section.model_json_schema(), read_descriptions(section)
        required = schema.get("required", ())
        controls = []
        for name, value in schema["properties"].items():
            if name != "step":
                control = _make_control(name, value, texts.get(name, ""))
                if step != "join" and control.kind in ("text", "value"):
                    control = replace(control, kind=STEP_COLUMNS.get(name, control.kind))
                controls.append(replace(control, is_required=name in required))
        step_forms.append(StepForm(step, section.__doc__ or "", tuple(controls)))
    return tuple(step_forms)


def _iter_controls(
    section: type[Section],
    root: Mapping[str, Any],
    node: Mapping[str, Any],
    hidden: Sequence[str],
    prefix: str = "",
) -> Iterator[Control]:
    texts = read_descriptions(section)
    for name, value in node["properties"].items():
        setting = f"{prefix}{name}"
        if setting in hidden:
            continue
        inner = section.model_fields[name].annotation
        if "$ref" in value and isinstance(inner, type):
            schema = root["$defs"][value["$ref"].rpartition("/")[2]]
            yield from _iter_controls(inner, root, schema, hidden, f"{setting}.")
        else:
            is_auto = name in list_from_data(section)
            forms = [form for form in value.get("anyOf", ()) if form.get("const") != AUTO]
            schema = value | {"anyOf": forms, "default": AUTO} if is_auto else value
            yield _make_control(setting, schema, texts.get(name, ""))


def _make_control(setting: str, schema: Mapping[str, Any], text: str) -> Control:
    forms = [form for form in schema.get("anyOf", (schema,)) if form.get("type") != "null"]
    choices: list[str] = []
    for form in forms:
        choices += form.get("items", {}).get("enum", ())
        choices += form.get("enum", ())
        choices += [form["const"]] if "const" in form else []
        choices += ["true", "false"] if form.get("type") == "boolean" else []
    kinds = {str(form.get("type")) for form in forms}
    is_closed = all(
        "enum" in form or "const" in form or form["type"] in ("boolean", "array") for form in forms
    )
    limits = [
        text.format(form[key])
        for form in forms
        for key, text in BOUNDS.items()
        if key in form and abs(form[key]) < 1e15
    ]
    return Control(
        setting=setting,
        kind=_find_kind(setting, kinds, choices),
        help=" ".join(text.split()).replace("`", ""),
        default=format_value(schema.get("default")),
        choices=tuple(choices),
        accepts_others=bool(choices) and not is_closed,
        limits=", ".join(dict.fromkeys(limits)),
        accepts_numbers=bool(kinds & {"integer", "number"}),
    )


def _find_kind(setting: str, kinds: set[str], choices: list[str]) -> str:
    if setting in COLUMN:
        return "column"
    if setting in COLUMNS:
        return "columns"
    if choices:
        return "several" if kinds == {"array"} else "choice"
    if kinds <= {"integer", "number"}:
        return "number"
    return "text" if kinds == {"string"} else "value"


def format_value(value: Any) -> str:
    """Return a setting's value as the form shows it."""
    if value is None or value in ([], {}, ()):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        pairs = (f"{_format_key(key)} = {format_toml(item)}" for key, item in value.items())
        return "{ " + ", ".join(pairs) + " }"
    return format_toml(value)


def format_toml(value: Any) -> str:
    """Return a value as TOML has it in one line."""
    if isinstance(value, dict):
        return format_value(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return to_json(value, indent=None)


def _format_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else to_json(key, indent=None)


def fill(config: Config, command: str = TRAIN) -> dict[str, str]:
    """Return the texts of a form for a config, one for each setting that the config sets."""
    values = config.model_dump(exclude_unset=True)
    texts = {}
    for control in list_controls(command):
        value = get_value(values, control.setting)
        text = format_value(value)
        # pre-training sets its defaults itself
        if value is not None and (command != PRETRAIN or text != control.default):
            texts[control.setting] = text
    return texts


def get_value(values: Any, setting: str) -> Any:
    """Return the value of a dotted setting; None without one."""
    for key in setting.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values
