"""From a form to a config: presets, checks, and the paths and classes that the app refuses."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from slipstream import config as configs
from slipstream.app import forms, paths
from slipstream.app.searches import load_trial
from slipstream.app.workspace import Workspace
from slipstream.base.errors import Message, UserError
from slipstream.base.storage import refuse_url
from slipstream.config import SIMULATED, Config, ConfigError, OptionText, search_space
from slipstream.config.base import Section, list_from_data
from slipstream.runs import to_json

DEMO = "demo"
DEMOS = {forms.TRAIN: "demo", forms.TUNE: "search", forms.PRETRAIN: "bars"}
"""The embedded config of each command"""
PATHS = ("data.path", "data.labels", "train.init_from")
"""Settings that name files or runs"""
JOINED, TRACKER = "data.prepare", "follow.out"
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
"""The beginning of an address, also of a file or a database"""
MLFLOW = "MLFLOW_TRACKING_URI"
REMOTE = ("is in object storage, which this app does not read", "use the command line for")
MAX_NAME = 200
MAX_TEXT = 100_000
"""Characters of one setting"""


class Preset(NamedTuple):
    """A start for a form: some settings under a name."""

    name: str
    title: str
    settings: dict[str, Any]
    task: str = ""
    """The only `data.task` that the preset is for; "" for any"""


class Checked(NamedTuple):
    """A form's config, or its mistakes by setting; "" is the key of mistakes that concern
    several."""

    config: Config | None
    errors: dict[str, Message]

    @property
    def problems(self) -> dict[str, str]:
        """The mistakes by setting, as a page shows them."""
        return {setting: str(message) for setting, message in self.errors.items()}


def list_presets() -> list[Preset]:
    """Return the settings that the app offers to begin with. The first comment is the title, a
    second one names the task that they are for."""
    folder = resources.files("slipstream.app").joinpath("presets")
    presets = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        text = file.read_text("utf-8")
        title, second, *_ = text.split("\n")
        task = second.removeprefix("# only: ") if second.startswith("# only: ") else ""
        name = Path(file.name).stem
        presets.append(Preset(name, title.lstrip("# "), tomllib.loads(text), task))
    return presets


def check_form(
    workspace: Workspace, form: Any, command: str = forms.TRAIN, space: Any = None
) -> Checked:
    """Return the config of a form: settings and their texts, as `--set` takes them; of a search
    also its space, as `[tune.space]` has it."""
    if not isinstance(form, dict):
        raise UserError("settings: expected an object")
    try:
        overrides = _list_overrides(workspace, form, command)
        config = configs.load({"tune": {"space": space}} if space else {}, overrides)
        refuse_unsafe(workspace, config)
        _require_data(config)
        if command == forms.TUNE:
            search_space.check_config(config)
            search_space.make_space(config)
            if config.tune.sampler == "grid":
                search_space.make_grid(search_space.make_space(config))
    except ConfigError as error:
        named = {".".join(problem.path): problem.message for problem in error.problems}
        return Checked(None, {setting: Message(text) for setting, text in named.items()})
    except UserError as error:
        return Checked(None, {find_setting(error, command): error.message})
    return Checked(config, {})


def find_setting(error: UserError, command: str) -> str:
    """Return the setting that an error is about, if the form has it, else ""."""
    known = ("tune.space", *(control.setting for control in forms.list_controls(command)))
    return error.setting if error.setting in known else ""


def shorten_paths(error: UserError, workspace: Workspace) -> UserError:
    """Return an error whose message names files below the folder by their paths in it."""
    message = error.message.map_texts(lambda text: text.replace(f"{workspace.folder}/", ""))
    return UserError(message, setting=error.setting)


def _list_overrides(workspace: Workspace, form: dict[str, Any], command: str) -> list[str]:
    """Return the settings of a form as `--set` has them."""
    known = {control.setting: control for control in forms.list_controls(command)}
    overrides: list[str] = [configs.PRETRAIN_OVERRIDE] if command == forms.PRETRAIN else []
    for setting, text in form.items():
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise UserError(f"{setting[:100]}: expected a text of at most {MAX_TEXT:,} characters")
        if setting in PATHS and text.strip():
            overrides.append(_format_path(workspace, setting, text))
        elif setting not in known and setting not in PATHS:
            raise UserError(f"{setting[:100]} is not a setting of this form")
        elif text.strip():
            is_text = known[setting].kind in ("text", "column") and text[:1] not in ("[", '"')
            value = to_json(text, indent=None) if is_text else text
            overrides.append(OptionText(f"{setting}={value}"))
    return overrides


def _format_path(workspace: Workspace, setting: str, text: str) -> str:
    """Return the override of a setting that names files, one a line, relative to the folder; what
    is outside of it is not even looked at."""
    full = []
    for name in text.split("\n"):
        refuse_path(workspace, NamedPath(setting, name))
        full.append(name if name.startswith(SIMULATED) else str(workspace.folder / name))
    return OptionText(f"{setting}={to_json(full[0] if len(full) == 1 else full, indent=None)}")


class NamedPath(NamedTuple):
    """A path or an address in a config, and the setting that has it."""

    setting: str
    text: str


def list_paths(config: Config) -> list[NamedPath]:
    """Return every path and address of a config, including the choices of a search. `out` is left
    out, since each job has a folder of its own."""
    named = {
        "data.path": config.data.paths,
        "data.labels": (config.data.labels,),
        JOINED: tuple(getattr(step, "path", None) for step in config.data.prepare),
        "train.init_from": (config.train.init_from,),
        TRACKER: (config.follow.out,),
    }
    for name, entry in config.tune.space.items():
        values = entry if isinstance(entry, list | tuple) else ()
        flat = [text for value in values for text in _flatten(value)]
        if name in named:
            named[name] = (*named[name], *flat)
    return [NamedPath(name, text) for name, texts in named.items() for text in texts if text]


def _flatten(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else (value,)
    return [item for item in values if isinstance(item, str)]


def refuse_path(workspace: Workspace, path: NamedPath) -> None:
    """Refuse any address, and a path that leads outside the folder after resolving links. Every
    path of a form, a draft, a search space or a resumed run passes this one check."""
    name = path.text[:MAX_NAME]
    if path.text.startswith(SIMULATED) and path.setting == "data.path":
        return
    if path.setting == TRACKER and ADDRESS.match(path.text):
        if path.text == os.environ.get(MLFLOW):
            return
        raise UserError(
            f"{TRACKER} = {to_json(name, indent=None)}: is an address, to which this app does not "
            f"send; start the app with {MLFLOW} set to it, and leave {TRACKER} empty"
        )
    refuse_url(path.text, *REMOTE)
    full = workspace.folder / path.text
    out = paths.find_link_out(workspace.folder, full)
    if out is None:
        return
    where = f"is not below {workspace.folder}, the folder of this app"
    if out != full:
        inner = str(out)[:MAX_NAME]
        raise UserError(f"{name}: leads to {inner}, which {where} after resolving links")
    raise UserError(f"{name}: {where}")


def _require_data(config: Config) -> None:
    if not config.data.paths:
        raise UserError("choose the data first")


def refuse_unsafe(workspace: Workspace, config: Config) -> None:
    """Refuse paths and addresses outside of the folder, and classes to import unless the server
    allows them."""
    for path in list_paths(config):
        refuse_path(workspace, path)
    entry = config.tune.space.get("model.kind", ())
    choices = entry if isinstance(entry, list | tuple) else ()
    for kind in (config.model.kind, *map(str, choices)):
        if ":" in kind and not workspace.allow_code:
            raise UserError(
                f'model.kind = "{kind}" runs code of your own; start the app with '
                "`slipstream ui --allow-code` to permit that",
                setting="model.kind",
            )


def load_start(workspace: Workspace, start: str, command: str = forms.TRAIN) -> Config:
    """Return the config that a new form begins with: `demo`, `preset:NAME`, `file:PATH`
    (or `config:PATH`), `run:ID`, `trial:NUMBER:ID` of a search, or `encoder:ID` to fine-tune."""
    kind, _, name = start.partition(":")
    if start == DEMO:
        return configs.load_demo(DEMOS[command])
    if kind == "preset":
        for preset in list_presets():
            if preset.name == name:
                return Config.model_validate(preset.settings)
    if kind in ("file", "config"):
        path = paths.resolve_below(workspace.folder, name)
        if path.suffix == ".toml":
            return configs.load(path)
    if kind == "run":
        settings = configs.load(paths.find_run_folder(workspace.folder, name) / "config.toml")
        return _drop_defaults(settings)
    if kind == "trial":
        number, _, run = name.partition(":")
        return _drop_defaults(load_trial(paths.find_run_folder(workspace.folder, run), number))
    if kind == "encoder":
        return load_fine_tuning(paths.find_run_folder(workspace.folder, name))
    raise paths.MissingError("there is no such preset, config or run")


def load_fine_tuning(folder: Path) -> Config:
    """Return a config that starts from the encoder of a run, on the same files."""
    pretrained = configs.load(folder / "config.toml")
    if not pretrained.masked:
        raise UserError(f"{folder.name}: is not a run of slipstream pretrain")
    data = {key: getattr(pretrained.data, key) for key in ("path", "time", "id")}
    data = {key: value for key, value in data.items() if value}
    return configs.load({"data": data, "train": {"init_from": str(folder)}})


def _drop_defaults(config: Config) -> Config:
    """Return a run's config, which has every setting, with only those that differ from defaults,
    and those that a new run would resolve from its data."""
    task = {"train": {"objective": "masked"}} if config.masked else {}
    default = Config.model_validate(task).model_dump()

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
    for name in ("data", "model", "train") if not config.masked else ():
        section: Section = getattr(config, name)
        resolved = {key: getattr(section, key) for key in list_from_data(type(section))}
        settings[name] = resolved | settings.get(name, {})
    split = settings.get("data", {}).get("split")
    if split:
        settings["data"]["split"] = config.data.split.model_dump(exclude_defaults=True)
    settings.pop("out", None)
    if config.masked:
        settings["train"] = settings.get("train", {}) | {"objective": "masked"}
    return Config.model_validate(settings)
