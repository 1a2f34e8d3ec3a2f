"""From a form to a config: presets, checks, and what the app refuses beyond the command line."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import config as configs
from slipstream.config import SIMULATED, Config, ConfigError, OptionText
from slipstream.errors import UserError
from slipstream.runs import to_json
from slipstream.webapp import forms, paths
from slipstream.webapp.workspace import Workspace

DEMO = "demo"
MOST_TEXT = 100_000
"""Characters of one setting"""


class Preset(NamedTuple):
    """A start for a form: some settings under a name."""

    name: str
    title: str
    settings: dict[str, Any]


class Checked(NamedTuple):
    """A form's config, or what is wrong in it by setting; "" for what concerns no single one."""

    config: Config | None
    problems: dict[str, str]


def list_presets() -> list[Preset]:
    """Return the settings that the app offers to begin with; the first comment is the title."""
    folder = resources.files("slipstream.webapp").joinpath("presets")
    presets = []
    for file in sorted(folder.iterdir(), key=lambda one: one.name):
        text = file.read_text("utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        presets.append(Preset(Path(file.name).stem, title, tomllib.loads(text)))
    return presets


def check_form(workspace: Workspace, form: Any) -> Checked:
    """Return the config of a form: settings and their texts, as `--set` takes them."""
    if not isinstance(form, dict):
        raise UserError("settings: expected an object")
    known = {control.setting: control for control in forms.list_controls()}
    overrides = []
    for setting, text in form.items():
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            return Checked(None, {str(setting): "expected a text of at most 100,000 characters"})
        if setting == "data.path" and text:
            overrides.append(_format_path(workspace, text))
        elif setting not in known:
            return Checked(None, {"": f"{setting[:100]} is not a setting of this form"})
        elif text.strip():
            is_text = known[setting].kind in ("text", "column") and text[:1] not in ("[", '"')
            value = to_json(text, indent=None) if is_text else text
            overrides.append(OptionText(f"{setting}={value}"))
    try:
        config = configs.load({}, overrides)
        refuse_unsafe(workspace, config)
        _require_data(config)
    except ConfigError as error:
        return Checked(None, {".".join(one.path): one.message for one in error.problems})
    except UserError as error:
        return Checked(None, {"": str(error)})
    return Checked(config, {})


def _format_path(workspace: Workspace, text: str) -> str:
    """Return the override of `data.path`; paths are relative to the folder."""
    names = text.split("\n")
    full = [one if one.startswith(SIMULATED) else str(workspace.folder / one) for one in names]
    return OptionText(f"data.path={to_json(full[0] if len(full) == 1 else full, indent=None)}")


def _require_data(config: Config) -> None:
    if not config.data.paths:
        raise UserError("choose the data first")


def refuse_unsafe(workspace: Workspace, config: Config) -> None:
    """Refuse files outside of the folder, and classes to import unless the server allows them."""
    folder = workspace.folder
    joined = [getattr(step, "path", None) for step in config.data.prepare]
    names = [*config.data.paths, config.data.labels, config.train.init_from, *joined]
    for name in filter(None, names):
        if not name.startswith(SIMULATED) and not paths.is_below(folder, Path(name).resolve()):
            raise UserError(f"{name}: is not below {folder}, the folder that this app shows")
    entry = config.tune.space.get("model.kind", ())
    choices = entry if isinstance(entry, list | tuple) else ()
    for kind in (config.model.kind, *map(str, choices)):
        if ":" in kind and not workspace.allow_code:
            raise UserError(
                f'model.kind = "{kind}" runs code of your own; start the app with '
                "`slipstream ui --allow-code` to permit that"
            )


def load_start(workspace: Workspace, start: str) -> Config:
    """Return the config that a new form begins with: `preset:NAME`, `file:PATH` or `run:ID`."""
    kind, _, name = start.partition(":")
    if start == DEMO:
        return configs.load_demo()
    if kind == "preset":
        for preset in list_presets():
            if preset.name == name:
                return Config.model_validate(preset.settings)
    if kind == "file":
        path = paths.resolve_below(workspace.folder, name)
        if path.suffix == ".toml":
            return configs.load(path)
    if kind == "run":
        settings = configs.load(paths.find_run_folder(workspace.folder, name) / "config.toml")
        return _drop_defaults(settings)
    raise paths.MissingError("there is no such preset, config or run")


def _drop_defaults(config: Config) -> Config:
    """Return a run's config, which has every setting, with only those that differ from defaults."""
    default = Config().model_dump()

    def differ(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for key, value in values.items():
            if (
                key == "split"
                or not isinstance(value, dict)
                or not isinstance(usual.get(key), dict)
            ):
                if value != usual.get(key):
                    result[key] = value
            elif inner := differ(value, usual[key]):
                result[key] = inner
        return result

    settings = differ(config.model_dump(), default)
    split = settings.get("data", {}).get("split")
    if split:
        settings["data"]["split"] = config.data.split.model_dump(exclude_defaults=True)
    settings.pop("out", None)
    return Config.model_validate(settings)
