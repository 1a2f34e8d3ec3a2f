"""The draft of a config: the texts of a form, and steps of `data.prepare` with theirs.

A change is a list of small ones, each of which a button makes: settings, a column's role, a step
that is added, moved or removed.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream import config as configs
from slipstream.config import SIMULATED, Config
from slipstream.config.prepare import STEPS
from slipstream.errors import UserError
from slipstream.runs import to_json
from slipstream.webapp import forms, paths, settings
from slipstream.webapp.forms import Control
from slipstream.webapp.workspace import Workspace

PREPARE = "data.prepare"
MOST_STEPS = 100
ACCEPTABLE = ("no time", "repeated", "unreadable", "disorder")
"""Kinds of problems that can be accepted: a draft leaves out a time that the data have"""
Texts = dict[str, str]


@dataclass(frozen=True)
class Draft:
    """Settings as a form has them, and the steps apart from them."""

    settings: Texts
    steps: tuple[Texts, ...] = ()
    accepted: tuple[str, ...] = ()
    """Kinds of problems that a person wants to leave as they are"""

    def get(self, setting: str) -> str:
        return self.settings.get(setting, "").strip()

    def set(self, values: Mapping[str, str]) -> Draft:
        """Return the draft with some settings; an empty text removes one."""
        merged = self.settings | dict(values)
        return replace(self, settings={key: text for key, text in merged.items() if text.strip()})

    def get_names(self, setting: str) -> list[str]:
        """Return the names that a setting lists."""
        return list_names(self.get(setting))


def list_names(text: str) -> list[str]:
    """Return the names of a text: a list as TOML has it, or one name."""
    value = parse_value(text) if text[:1] in ("[", '"') else text
    if isinstance(value, list):
        return [str(one) for one in value]
    return [str(value)] if value else []


def format_names(names: Sequence[str]) -> str:
    """Return the text of a setting that lists names; "" for none."""
    return to_json(list(names), indent=None) if names else ""


def parse_value(text: str) -> Any:
    """Return the value of a text as TOML has it; the text itself where it is none."""
    try:
        parsed = tomllib.loads(f"x = {text}")
    except (tomllib.TOMLDecodeError, RecursionError, ValueError):
        return text
    value = parsed["x"] if parsed.keys() == {"x"} else text
    return value if isinstance(value, str | int | float | bool | list) else text


def parse_draft(value: Any) -> Draft:
    """Return the draft of a request."""
    if not isinstance(value, dict):
        raise UserError("draft: expected an object")
    texts, steps = value.get("settings", {}), value.get("steps", [])
    if not isinstance(steps, list) or len(steps) > MOST_STEPS:
        raise UserError(f"steps: expected a list of at most {MOST_STEPS}")
    accepted = value.get("accepted", [])
    if not isinstance(accepted, list) or not all(one in ACCEPTABLE for one in accepted):
        raise UserError(f"accepted: expected a list of {', '.join(ACCEPTABLE)}")
    steps = tuple(_parse_step(one) for one in steps)
    return Draft(_parse_texts(texts), steps, tuple(dict.fromkeys(accepted)))


def _parse_texts(value: Any) -> Texts:
    if not isinstance(value, dict):
        raise UserError("settings: expected an object")
    for key, text in value.items():
        if not isinstance(text, str) or len(text) > settings.MOST_TEXT:
            most = settings.MOST_TEXT
            raise UserError(f"{key[:100]}: expected a text of at most {most:,} characters")
    return value


def _parse_step(value: Any) -> Texts:
    texts = _parse_texts(value)
    known = {"step", *_get_controls(texts.get("step", ""))}
    for key in texts:
        if key not in known:
            raise UserError(f'"{key[:100]}" is not a setting of the step {texts["step"]}')
    return texts


def _get_controls(step: str) -> dict[str, Control]:
    for form in forms.list_step_forms():
        if form.step == step:
            return {control.setting: control for control in form.controls}
    raise UserError(f'"{step[:100]}" is no step; there are {", ".join(STEPS)}')


def load_draft(workspace: Workspace, config: Config) -> Draft:
    """Return the draft of a config, with paths relative to the folder."""
    texts = forms.fill(config)
    texts.pop(PREPARE, None)
    texts["data.path"] = "\n".join(to_relative(workspace, name) for name in config.data.paths)
    steps = []
    for step in config.data.prepare:
        values = step.model_dump(exclude_unset=True)
        if "path" in values:
            values["path"] = to_relative(workspace, values["path"])
        fields = {name: forms.format_value(value) for name, value in values.items()}
        steps.append({"step": step.step} | fields)
    return Draft(texts, tuple(steps)).set({})


def to_relative(workspace: Workspace, name: str) -> str:
    """Return a path below the folder relative to it."""
    is_inside = not name.startswith(SIMULATED) and paths.is_below(workspace.folder, Path(name))
    return str(Path(name).relative_to(workspace.folder)) if is_inside else name


def to_form(workspace: Workspace, draft: Draft) -> Texts:
    """Return the form of a draft, as New run has it."""
    if not draft.steps:
        return draft.settings
    every = (parse_step_values(workspace, step) for step in draft.steps)
    tables = ", ".join(forms.format_value(values) for values in every)
    return draft.settings | {PREPARE: f"[{tables}]"}


def parse_step_values(workspace: Workspace, step: Texts) -> dict[str, Any]:
    """Return the table of a step, as a config has it; the path of a join becomes absolute."""
    controls = _get_controls(step["step"])
    values: dict[str, Any] = {"step": step["step"]}
    for key, text in step.items():
        if key == "step" or not text.strip():
            continue
        if (step["step"], key) == ("join", "path"):
            values[key] = str(workspace.folder / text)
        else:
            values[key] = _parse_field(controls[key], text)
    return values


def _parse_field(control: Control, text: str) -> Any:
    """Return the value of a field: a text unless the field takes something else."""
    is_flag = control.choices == ("true", "false")
    if control.kind in ("text", "column") or (control.kind == "choice" and not is_flag):
        return text
    value = parse_value(text)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if is_number and not control.accepts_numbers else value


def format_config(workspace: Workspace, config: Config, folder: Path) -> str:
    """Return the config file of a draft, with paths relative to the folder that it is in."""

    def shorten(name: str) -> str:
        is_path = Path(name).is_absolute() and paths.is_below(workspace.folder, Path(name))
        return Path(os.path.relpath(name, folder)).as_posix() if is_path else name

    values = config.model_dump(exclude_unset=True)
    data = values["data"]
    names = tuple(shorten(name) for name in config.data.paths)
    data["path"] = names[0] if len(names) == 1 else names
    if config.data.labels is not None:
        data["labels"] = shorten(config.data.labels)
    for step in data.get("prepare", ()):
        if "path" in step:
            step["path"] = shorten(step["path"])
    return configs.to_toml(Config.model_validate(values), only_set=True)


SetRole = Callable[[Draft, str, str], Draft]


def apply_change(draft: Draft, change: Any, set_role: SetRole) -> Draft:
    """Return the draft after a change; `set_role` gives a column its role."""
    if not isinstance(change, list):
        raise UserError("change: expected a list")
    for one in change:
        match one:
            case {"set": dict(values)}:
                draft = draft.set(_parse_texts(values))
            case {"role": [str(column), str(role)]}:
                draft = set_role(draft, column, role)
            case {"add": dict(step), **rest}:
                draft = _insert(draft, _parse_step(step), rest.get("at"))
            case {"accept": str(kind)} if kind in ACCEPTABLE:
                draft = replace(draft, accepted=(*draft.accepted, kind))
            case {"move": [int(start), int(end)]}:
                draft = _move(draft, start, end)
            case {"remove": int(number)}:
                _check_number(draft, number)
                steps = draft.steps
                draft = replace(draft, steps=(*steps[:number], *steps[number + 1 :]))
            case _:
                raise UserError("change: expected set, role, add, accept, move or remove")
    return draft


def _insert(draft: Draft, step: Texts, at: Any) -> Draft:
    if len(draft.steps) >= MOST_STEPS:
        raise UserError(f"a draft has at most {MOST_STEPS} steps")
    steps = list(draft.steps)
    steps.insert(at if isinstance(at, int) else len(steps), step)
    return replace(draft, steps=tuple(steps))


def _move(draft: Draft, start: int, end: int) -> Draft:
    _check_number(draft, start)
    _check_number(draft, end)
    steps = list(draft.steps)
    steps.insert(end, steps.pop(start))
    return replace(draft, steps=tuple(steps))


def _check_number(draft: Draft, number: int) -> None:
    if not 0 <= number < len(draft.steps):
        raise UserError(f"there is no step {number + 1}")
