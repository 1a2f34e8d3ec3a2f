"""The screen Prepare: roles, steps, split and problems of a draft, which becomes a new run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream import config as configs
from slipstream.app import forms, paths, settings
from slipstream.app.forms import Control
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.paths import clean_run_name
from slipstream.app.workspace import Workspace
from slipstream.base.errors import LeaveOut, Message, Setting, UserError, join_messages
from slipstream.config import SIMULATED, Config, Data
from slipstream.config.data import find_matches
from slipstream.config.prepare import STEPS, JoinStep, parse_steps
from slipstream.runs import to_json, write_text
from slipstream.runs.config import ChangedTarget, list_changed_targets

PREPARE = "data.prepare"
MAX_STEPS = 100
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
    """Return the names in a text: a TOML list, or one name."""
    value = parse_value(text) if text[:1] in ("[", '"') else text
    if isinstance(value, list):
        return [str(name) for name in value]
    return [str(value)] if value else []


def format_names(names: Sequence[str]) -> str:
    """Return the text of a setting that lists names; "" for none."""
    return to_json(list(names), indent=None) if names else ""


def parse_value(text: str) -> Any:
    """Return the TOML value of a text, or the text itself where it is no TOML."""
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
    if not isinstance(steps, list) or len(steps) > MAX_STEPS:
        raise UserError(f"steps: expected a list of at most {MAX_STEPS}")
    accepted = value.get("accepted", [])
    if not isinstance(accepted, list) or not all(kind in ACCEPTABLE for kind in accepted):
        raise UserError(f"accepted: expected a list of {', '.join(ACCEPTABLE)}")
    steps = tuple(_parse_step(step) for step in steps)
    return Draft(_parse_texts(texts), steps, tuple(dict.fromkeys(accepted)))


def _parse_texts(value: Any) -> Texts:
    if not isinstance(value, dict):
        raise UserError("settings: expected an object")
    for key, text in value.items():
        if not isinstance(text, str) or len(text) > settings.MAX_TEXT:
            most = settings.MAX_TEXT
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
    """Return the form of New run for a draft."""
    if not draft.steps:
        return draft.settings
    steps = (parse_step_values(workspace, step) for step in draft.steps)
    tables = ", ".join(map(forms.format_value, steps))
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
    """Return the value of a step's field: a text, unless the field takes another type."""
    is_flag = control.choices == ("true", "false")
    if control.kind in ("text", "column") or (control.kind == "choice" and not is_flag):
        return text
    value = parse_value(text)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if is_number and not control.accepts_numbers else value


def format_config(workspace: Workspace, config: Config, folder: Path) -> str:
    """Return the config file of a draft, with paths relative to its own folder."""

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
    for edit in change:
        match edit:
            case {"set": dict(values)}:
                draft = draft.set(_parse_texts(values))
            case {"role": [str(column), str(role)]}:
                draft = set_role(draft, column, role)
            case {"add": dict(step), **options}:
                draft = _insert(draft, _parse_step(step), options.get("at"))
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


def _insert(draft: Draft, step: Texts, position: Any) -> Draft:
    if len(draft.steps) >= MAX_STEPS:
        raise UserError(f"a draft has at most {MAX_STEPS} steps")
    steps = list(draft.steps)
    steps.insert(position if isinstance(position, int) else len(steps), step)
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


TIME, ID, INPUT, TARGET, STATIC, FUTURE, IGNORE = (
    *("time", "id", "input", "target", "static", "future", "ignore"),
)
ROLES = (TIME, ID, INPUT, TARGET, STATIC, FUTURE, IGNORE)
SETTINGS = {
    TIME: "data.time",
    ID: "data.id",
    TARGET: "data.targets",
    STATIC: "data.static",
    FUTURE: "data.future",
    IGNORE: "data.ignore",
    INPUT: "data.inputs",
}
"""The setting that lists the columns of each role"""
OUTPUT = "output"
"""A target that the model does not read"""
READABLE = ("number", "boolean")


class Column(NamedTuple):
    """A column of the file, or a column that a step makes."""

    name: str
    type: str
    facts: Mapping[str, Any]
    """The facts of `slipstream inspect` about the column"""
    made_by: int | None = None
    """The number of the step that makes the column"""


def get_roles(draft: Draft, columns: Sequence[Column]) -> dict[str, str]:
    """Return the role of each column; a target that is no input is an `output`."""
    listed = {role: set(draft.get_names(setting)) for role, setting in SETTINGS.items()}
    is_listed = bool(draft.get(SETTINGS[INPUT]))
    roles = {}
    for column in columns:
        name = column.name
        is_input = name in listed[INPUT]
        if not is_listed:
            is_input = column.type in READABLE and name not in listed[IGNORE]
        role = next(
            (
                candidate
                for candidate in (TIME, ID, TARGET, STATIC, FUTURE)
                if name in listed[candidate]
            ),
            "",
        )
        if role == TARGET and not (is_input and _reads_targets(draft)):
            role = OUTPUT
        roles[name] = role or (INPUT if is_input else IGNORE)
    return roles


def _reads_targets(draft: Draft) -> bool:
    """Return whether a target may be an input as well: with a horizon, its past rows are known."""
    return draft.get("data.horizon") != "0" and draft.get("data.task") != "classify"


def find_used(draft: Draft, columns: Sequence[Column]) -> set[str]:
    """Return the columns that the model reads or predicts."""
    used = (INPUT, TARGET, OUTPUT, STATIC, FUTURE)
    return {name for name, role in get_roles(draft, columns).items() if role in used}


def set_role(draft: Draft, columns: Sequence[Column], column: str, role: str) -> Draft:
    """Return the draft in which a column has another role."""
    if role not in (*ROLES, OUTPUT):
        raise UserError(f"{role[:100]} is no role; there are {', '.join(ROLES)}")
    known = [known_column.name for known_column in columns]
    if column not in known:
        raise UserError(f'there is no column "{column[:100]}"')
    listed = {role_name: draft.get_names(setting) for role_name, setting in SETTINGS.items()}
    is_listed = bool(draft.get(SETTINGS[INPUT]))
    for names in listed.values():
        names[:] = [name for name in names if name != column]
    if role == TIME:
        listed[TIME] = []
    if role in (TARGET, OUTPUT):
        if draft.get("data.task") == "classify":
            listed[TARGET] = []
        listed[TARGET].append(column)
    elif role not in (INPUT, IGNORE):
        listed[role].append(column)
    reads = role == INPUT or (role == TARGET and _reads_targets(draft))
    if is_listed and reads:
        listed[INPUT].append(column)
    elif not is_listed and not reads and role in (OUTPUT, IGNORE):
        listed[IGNORE].append(column)
    texts = {}
    for role_name, setting in SETTINGS.items():
        names = (
            listed[role_name]
            if role_name in (TARGET, TIME)
            else sorted(listed[role_name], key=_rank(known))
        )
        is_plain = (
            role_name in (TIME, ID) and len(names) == 1 and names == list_names(names[0].strip())
        )
        texts[setting] = names[0] if is_plain else format_names(names)
    if is_listed and not listed[INPUT]:
        texts[SETTINGS[INPUT]] = "[]"  # refused with the reason; without it, every column is one
    if role == TIME and listed[TIME] != draft.get_names(SETTINGS[TIME]):
        texts["data.time_format"] = ""
    return draft.set(texts)


def _rank(known: Sequence[str]) -> Any:
    ranks = {name: rank for rank, name in enumerate(known)}
    return lambda name: ranks.get(name, len(ranks))


Findings = dict[str, Any]
INSPECT_S = 120.0
"""The time limit of an inspection"""
MAX_FINDINGS = 16
"""Entries of each cache; the oldest ones are dropped"""
CHECKED_TRAIN = {"objective", "loss", "quantiles", "repeats"}
"""Settings of `[train]` that decide whether the data can be trained on"""
_known: OrderedDict[tuple[Any, ...], Findings] = OrderedDict()
"""Recent findings by file, time, size and settings of the reader"""
_checked: OrderedDict[tuple[Any, ...], dict[str, Any] | UserError] = OrderedDict()
"""Recent answers of `check_ready`, by the settings that matter and the state of the files"""


async def find(workspace: Workspace, draft: Draft) -> Findings:
    """Return the findings about the data of a draft."""
    name = draft.get("data.path")
    if "\n" in name:
        raise UserError("this page takes one file, folder or pattern; data.path lists several")
    return await find_file(workspace, name, list_reading(draft))


def list_reading(draft: Draft) -> list[str]:
    """Return the settings that say how the files are read, as `--set` takes them."""
    from slipstream.tools.inspection import READING  # pyarrow takes a while to import

    texts = {f"data.{key}": draft.get(f"data.{key}") for key in READING}
    return [f"{setting}={text}" for setting, text in texts.items() if text]


async def find_file(workspace: Workspace, name: str, overrides: Sequence[str] = ()) -> Findings:
    """Return the findings of `slipstream inspect` about a file; `overrides` are settings of the
    reader."""
    key = (workspace.folder, name, *overrides, _read_state(workspace, name))
    if key not in _known:
        _known[key] = await _inspect(workspace, name, overrides)
        while len(_known) > MAX_FINDINGS:
            _known.popitem(last=False)
    if "error" in _known[key]:
        raise UserError(str(_known[key]["error"]).replace(f"{workspace.folder}/", ""))
    return _known[key]


async def _inspect(workspace: Workspace, name: str, overrides: Sequence[str]) -> Findings:
    """Run `slipstream inspect` in a process of its own, since a file may be large; return its
    output or, for an unreadable file, its message."""
    path = name
    if not name.startswith(SIMULATED):
        path = str(paths.resolve_below(workspace.folder, name))
        if not name or not (Path(path).exists() or find_matches(Path(path))[1]):
            raise paths.MissingError(f"{name}: there is no such file")
    options = [word for override in overrides for word in ("--set", override)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "slipstream", "inspect", path, "--json", *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(INSPECT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise UserError(f"{name}: reading it took more than {INSPECT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        findings: dict[str, Any] = json.loads(output)
    except ValueError:
        raise UserError("the file could not be read") from None
    return findings


def _read_state(workspace: Workspace, name: str) -> tuple[tuple[str, int, int], ...]:
    """Return the names, times and sizes of files, which change whenever a file does."""
    if name.startswith(SIMULATED):
        return ()
    path = paths.resolve_below(workspace.folder, name)
    settings.refuse_path(workspace, settings.NamedPath("data.path", name))
    files = [path]
    if path.is_dir():
        files = [path / table for table in paths.list_tables(path)]
    elif not path.exists():
        files = find_matches(path)[1]
    return tuple(_stamp_file(file) for file in files)


def _stamp_file(file: Path) -> tuple[str, int, int]:
    try:
        facts = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), facts.st_mtime_ns, facts.st_size


def list_columns(findings: Findings) -> list[Column]:
    """Return the columns of the file."""
    return [Column(facts["name"], facts["type"], facts) for facts in findings["columns"]]


def get_proposal(findings: Findings) -> Config:
    """Return the config that `slipstream inspect` proposes. Its open questions are left out: the
    page shows each beside the data, with its fixes."""
    values = configs.from_json_values(findings["config"])
    data = {name: value for name, value in values["data"].items() if name != "undecided"}
    return Config.model_validate(values | {"data": data})


async def check_ready(workspace: Workspace, config: Config) -> dict[str, Any]:
    """Return the rows and windows that a run of a config would have, found by the code of training;
    a UserError says why it could not be trained."""
    names = [*config.data.paths, config.data.labels or ""]
    names += [str(getattr(step, "path", "")) for step in config.data.prepare]
    states = [_read_state(workspace, name) for name in filter(None, names)]
    matters = {
        "data": config.data.model_dump(),
        "train": config.train.model_dump(include=CHECKED_TRAIN),
        "jitter": config.augment.model_dump(include={"jitter"}),
    }
    key = (workspace.folder, to_json(configs.to_json_values(matters)), *states)
    if key not in _checked:
        _checked[key] = await _check(workspace, config)
        while len(_checked) > MAX_FINDINGS:
            _checked.popitem(last=False)
    answer = _checked[key]
    if isinstance(answer, UserError):
        raise UserError(answer.message, setting=answer.setting)
    return answer


async def _check(workspace: Workspace, config: Config) -> dict[str, Any] | UserError:
    try:
        return await workspace.tables.check(config)
    except UserError as error:
        return settings.shorten_paths(error, workspace)


def list_created(workspace: Workspace, draft: Draft, present: Sequence[Column]) -> list[Column]:
    """Return the columns that steps make and the file does not have; incomplete steps make none."""
    names = {column.name for column in present}
    created = []
    for number, step in enumerate(draft.steps, start=1):
        for name, kind in _list_outputs(workspace, draft, step):
            if name not in names:
                names.add(name)
                created.append(Column(name, kind, {}, number))
    return created


def _list_outputs(workspace: Workspace, draft: Draft, step: Texts) -> list[tuple[str, str]]:
    from slipstream.app.screens.prepare_rows import refuse_large_joins
    from slipstream.app.settings import JOINED, NamedPath, refuse_path
    from slipstream.data.prepare.chain import plan_steps
    from slipstream.data.prepare.joins import read_joins

    try:
        (parsed,) = parse_steps([parse_step_values(workspace, step)])
        time = tuple(draft.get_names("data.time")) or ("time",)
        data = Data().model_copy(update={"prepare": (parsed,), "time": time})
        joined = {}
        if isinstance(parsed, JoinStep):
            refuse_path(workspace, NamedPath(JOINED, parsed.path))
            refuse_large_joins([parsed])
            joined = {n: join.column_names for n, join in read_joins(data, {}).items()}
        plan = plan_steps(data, joined)
    except (UserError, ValueError, OSError):
        return []
    return [(name, "text" if name in plan.labels else "number") for name in plan.written]


def check_steps(config: Config, columns: Sequence[Column]) -> Message | None:
    """Return a problem of a config's steps that the config alone does not show; None without one.
    `columns` are the columns of the file."""
    if not config.data.prepare:
        return None
    from slipstream.app.screens.prepare_rows import refuse_large_joins
    from slipstream.data.prepare.chain import PrepareChain, check_columns
    from slipstream.data.table import DataTable, MemoryReader

    joined = [config.data.time_column] if config.data.time_column else []
    names = tuple(
        dict.fromkeys([*(column.name for column in columns if column.made_by is None), *joined])
    )
    try:
        refuse_large_joins(config.data.prepare)
        chain = PrepareChain(config.data.model_copy(update={"inputs": None}))
        check_columns(chain.plan, DataTable("the file", names, 1, MemoryReader({}), ()))
    except UserError as error:
        return error.message
    return None


Change = list[dict[str, Any]]
NOT_INPUTS = ("empty", "text", "constant", "counter", "copy")
"""Kinds of columns that are no inputs"""
MARKED = ("code", "no numbers", "infinite")
"""Kinds of problems whose values `data.na` may list"""


@dataclass(frozen=True)
class Fix:
    """A button that changes the draft."""

    title: str
    change: Change


@dataclass(frozen=True)
class DraftProblem:
    """A note or a problem of the data or the draft."""

    message: str
    column: str | None = None
    kind: str = ""
    fixes: list[Fix] = field(default_factory=list)
    answer: str = ""
    """The draft's answer to the problem; "" while it has none"""


def list_problems(
    findings: Findings, draft: Draft, columns: Sequence[Column]
) -> list[DraftProblem]:
    """List the problems of the data, each with its fixes, or with the draft's answer."""
    roles = get_roles(draft, columns)
    problems = []
    for remark in findings["problems"]:
        kind = remark.get("kind", "")
        answer = _find_answer(kind, remark, draft, roles, findings)
        fixes = [] if answer else list(_list_fixes(kind, remark, draft, findings))
        problems.append(DraftProblem(remark["message"], remark["column"], kind, fixes, answer))
    return [*_check_draft(draft, columns), *_check_time(findings, draft), *problems]


def _check_time(findings: Findings, draft: Draft) -> Iterator[DraftProblem]:
    """Yield a problem where the draft leaves out a time that the data have, unless another problem
    says why."""
    time = findings["time"]
    kinds = {remark.get("kind") for remark in findings["problems"]}
    if time is None or draft.get("data.time") or kinds & {"unreadable", "repeated", "disorder"}:
        return
    message = "holds the time, which is not used: rows are taken in the order of the file"
    name, kind = " and ".join(time["time_columns"]), "no time"
    if kind in draft.accepted:
        yield DraftProblem(message, name, kind, answer="the time is not used")
        return
    fix = Fix("Use it as the time", [{"set": _list_time_settings(findings)}])
    yield DraftProblem(message, name, kind, [fix, _do_without_time(kind)])


def _do_without_time(kind: str) -> Fix:
    settings = dict.fromkeys(("data.time", "data.time_format", "data.unsorted"), "")
    return Fix("Do without the time", [{"set": settings}, {"accept": kind}])


def _list_time_settings(findings: Findings) -> dict[str, str]:
    time = findings["time"]
    names = time["time_columns"]
    text = names[0] if len(names) == 1 else to_json(names, indent=None)
    return {"data.time": text, "data.time_format": time["time_format"] or ""}


def _check_draft(draft: Draft, columns: Sequence[Column]) -> Iterator[DraftProblem]:
    """Yield contradictions between settings, each with a fix; the loader refuses them as well."""
    targets, inputs = draft.get_names("data.targets"), draft.get_names("data.inputs")
    for name in targets:
        column = next((candidate for candidate in columns if candidate.name == name), None)
        if name in inputs and draft.get("data.horizon") == "0":
            message = "a target among the inputs: with data.horizon = 0, the model would read it"
            fix = Fix("Remove it from the inputs", [{"role": [name, OUTPUT]}])
            yield DraftProblem(message, name, "target", [fix])
        elif column is not None and column.type == "text" and draft.get("data.task") != "classify":
            message = "the target is text, which is not a number to predict"
            change: Change = [{"set": {"data.task": "classify", "data.horizon": ""}}]
            change += [{"role": [name, OUTPUT]}]
            yield DraftProblem(message, name, "target", [Fix("Predict classes", change)])
    data = {"prepare": draft.steps, "targets": targets or None}
    for changed in list_changed_targets(_parse_columns(data)):
        yield DraftProblem(
            changed.describe(), changed.target, "target", _list_filter_fixes(changed, draft)
        )
    roles = get_roles(draft, columns)
    for column in columns:
        if column.made_by is not None and roles[column.name] == IGNORE:
            message = f"step {column.made_by} makes it, but no role uses it"
            fixes = [Fix("Make it an input", [{"role": [column.name, INPUT]}])]
            yield DraftProblem(message, column.name, "unused", fixes)
    if not targets and not draft.get("data.labels"):
        yield DraftProblem("no column is a target; click one", None, "no target")


def _parse_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft's steps with their lists of columns, which a draft has as texts, as lists."""
    keys = ("columns", "into")
    steps = [
        step | {key: list_names(step[key]) for key in keys if key in step}
        for step in data["prepare"]
    ]
    return {"prepare": steps, "targets": data["targets"]}


def _list_filter_fixes(changed: ChangedTarget, draft: Draft) -> list[Fix]:
    """Return the fix that filters into a new column and makes it an input, where a step can."""
    step = draft.steps[changed.number - 1]
    columns = list_names(step.get("columns", ""))
    if changed.step != "filter" or step.get("into", "").strip() or not columns:
        return []
    names = [f"{name}_filtered" for name in columns]
    added = step | {"into": format_names(names)}
    change: Change = [{"remove": changed.number - 1}, {"add": added, "at": changed.number - 1}]
    change += [{"role": [name, INPUT]} for name in names]
    return [Fix(f"Filter into {', '.join(names)}", change)]


def _find_answer(
    kind: str, remark: Mapping[str, Any], draft: Draft, roles: Mapping[str, str], findings: Findings
) -> str:
    """Describe the draft's answer to a problem; "" without one."""
    column, time = remark["column"], draft.get_names("data.time")
    if kind in draft.accepted and not time:
        return "the time is not used"
    role = roles.get(column or "", IGNORE)
    is_used = role in (TARGET, OUTPUT, "input", "static", "future")
    if kind in NOT_INPUTS:
        is_class = kind == "text" and draft.get("data.task") == "classify" and role == OUTPUT
        return f"its role is {role}" if not is_used or is_class else ""
    if kind in ("missing", *MARKED) and not is_used:
        return f"its role is {role}"
    match kind:
        case "missing":
            policy = draft.get("data.missing")
            return f'data.missing = "{policy}"' if policy in ("forward", "drop") else ""
        case "code" | "no numbers" | "infinite":
            marks, values = _list_marks(draft), configs.from_json_values(remark["values"])
            is_marked = bool(values) and all(value in marks for value in values)
            return "data.na lists it" if is_marked else ""
        case "gaps":
            if not time:
                return "the time is not used"
            steps = [step["step"] for step in draft.steps]
            if "resample" in steps:
                return "rows are resampled"
            is_open = draft.get("data.gap_tolerance") == "inf"
            return "data.gap_tolerance = inf" if is_open else ""
        case "disorder" | "repeated":
            proposed = findings["config"]["data"].get("id")
            if time and draft.get("data.id") and draft.get_names("data.id") != [proposed]:
                return f"the series are identified by {draft.get('data.id')}"
            is_sorted = kind == "disorder" and draft.get("data.unsorted") == "sort" and bool(time)
            if is_sorted:
                return 'data.unsorted = "sort"'
            policy = draft.get("data.duplicates")
            if kind == "repeated" and time and policy in ("first", "last", "mean"):
                return f'data.duplicates = "{policy}"'
            if kind == "repeated" and draft.steps and draft.steps[0]["step"] == "resample":
                return "rows are resampled"
            is_other = bool(time) and " and ".join(time) != column
            return f"the time is {' and '.join(time)}" if is_other else ""
        case "unreadable":
            is_other = bool(time) and column not in time and " and ".join(time) != column
            return f"the time is {' and '.join(time)}" if is_other else ""
        case "swapped":
            chosen = draft.get("data.time_format")
            if not time or " and ".join(time) != column:
                return "it is not the time"
            is_chosen = chosen != (findings["time"]["time_format"] or "")
            return f'data.time_format = "{chosen}"' if is_chosen else ""
        case "no time":
            return f"the time is {' and '.join(time)}" if time else ""
    return ""


def _list_fixes(
    kind: str, remark: Mapping[str, Any], draft: Draft, findings: Findings
) -> Iterator[Fix]:
    column = remark["column"]
    if kind == "missing":
        yield Fix("Repeat the last value", [{"set": {"data.missing": "forward"}}])
        yield Fix("Leave such rows out", [{"set": {"data.missing": "drop"}}])
    elif kind in MARKED and remark["values"]:
        marks = [*_list_marks(draft), *configs.from_json_values(remark["values"])]
        texts = {"data.na": forms.format_toml(list(dict.fromkeys(marks)))}
        if not draft.get("data.missing"):
            texts["data.missing"] = "forward"
        yield Fix("Read it as missing", [{"set": texts}])
    elif kind == "gaps":
        yield Fix("Take rows as they follow", [{"set": {"data.gap_tolerance": "inf"}}])
        step_s = findings["time"]["step"]
        if step_s:
            step = {"step": "resample", "every": f"{step_s:.12g}"}
            yield Fix(f"Resample every {step_s:.6g}", [{"add": step, "at": 0}])
    elif kind == "disorder":
        texts = _list_time_settings(findings) | {"data.unsorted": "sort"}
        yield Fix("Sort the rows by time", [{"set": texts}])
    elif kind == "repeated":
        texts = _list_time_settings(findings)
        yield Fix("Average rows of one time", [{"set": texts | {"data.duplicates": "mean"}}])
        yield Fix("Keep the first of them", [{"set": texts | {"data.duplicates": "first"}}])
    elif kind == "swapped":
        for text in remark["values"]:
            yield Fix(f"Read it as {text}", [{"set": {"data.time_format": str(text)}}])
    if kind in ("disorder", "repeated", "unreadable"):
        yield _do_without_time(kind)
    if kind in (*NOT_INPUTS, "missing", *MARKED) and column is not None:
        yield Fix("Ignore the column", [{"role": [column, IGNORE]}])


def _list_marks(draft: Draft) -> list[Any]:
    marks = parse_value(draft.get("data.na"))
    return marks if isinstance(marks, list) else []


def find_fixes(message: Message, draft: Draft, columns: Sequence[Column] = ()) -> list[Fix]:
    """Return a button for each fix that a message holds: settings that the draft does not have yet,
    and columns to leave out."""
    known = {control.setting for control in forms.list_controls()}
    fixes: list[Fix] = []
    for part in message.parts:
        match part:
            case Setting(values):
                texts = {
                    name: value if isinstance(value, str) else forms.format_toml(value)
                    for name, value in values.items()
                }
                new = {name: text for name, text in texts.items() if draft.get(name) != text}
                if new and new.keys() <= known:
                    title = " and ".join(f"{name} = {text}" for name, text in new.items())
                    fixes.append(Fix(f"Set {title}", [{"set": new}]))
            case LeaveOut(_, column, "data.ignore"):
                if column in find_used(draft, columns):
                    fixes.append(Fix("Ignore the column", [{"role": [column, IGNORE]}]))
            case LeaveOut(_, column, setting):
                names = draft.get_names(setting)
                if column in names:
                    remaining = format_names([name for name in names if name != column])
                    fixes.append(
                        Fix(f"Leave {column} out of {setting}", [{"set": {setting: remaining}}])
                    )
    return fixes


SPLIT = tuple(f"data.split.{name}" for name in configs.Split.model_fields)
WINDOWS = ("data.task", "data.context", "data.horizon", "data.stride")
ROWS = (
    *("data.time_format", "data.missing", "data.na", "data.unsorted", "data.gap_tolerance"),
    *("data.short", "data.where", "data.encoding", "data.decimal", "data.skip_rows"),
    *("data.names", "data.sheet", "data.variable", "data.labels"),
)
DRAFTS = ".slipstream/drafts"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FACTS = ("unit", "missing", "low", "high", "mean", "distinct", "course", "constant")


def show(request: Request) -> Response:
    """The page; its content comes with the first answer of `update`."""
    workspace = get_workspace(request)
    controls = {control.setting: control for control in forms.list_controls()}
    return render(
        request,
        "prepare.html",
        file=request.query_params.get("file", ""),
        start=request.query_params.get("start", ""),
        tables=paths.list_tables(workspace.folder),
        step_forms=forms.list_step_forms(),
        roles=ROLES,
        groups={
            "windows": [controls[name] for name in WINDOWS],
            "rows": [controls[name] for name in ROWS if name in controls],
            "split": [controls[name] for name in SPLIT if name in controls],
        },
    )


async def update(request: Request) -> Response:
    """Begin a draft, or change one, and return the data of the page."""
    workspace = get_workspace(request)
    body = await read_request(request)
    if "draft" in body:
        draft = parse_draft(body["draft"])
    else:
        draft = await _begin(workspace, str(body.get("file", "")), str(body.get("start", "")))
    error, findings = None, None
    try:
        findings = await find(workspace, draft)
    except paths.MissingError:
        raise
    except UserError as problem:
        error = problem.message
    change = body.get("change", [])
    answer = await run_in_threadpool(_describe, workspace, draft, findings, error, change)
    return reply(answer)


async def _begin(workspace: Workspace, file: str, start: str) -> Draft:
    """Return the draft of a config or a run, or the proposal of `slipstream inspect` for a file."""
    if start:
        return load_draft(workspace, settings.load_start(workspace, start))
    draft = Draft({"data.path": file})
    try:
        findings = await find(workspace, draft)
    except paths.MissingError:
        raise
    except UserError:  # how the file is read has to be set first
        return draft
    config = get_proposal(findings)
    texts = {"data.path": file, "name": clean_run_name(Path(file).stem)}
    return load_draft(workspace, config).set(texts)


def _describe(
    workspace: Workspace, draft: Draft, findings: Any, error: Message | None, change: Any
) -> dict[str, Any]:
    """Return the draft after a change with its columns, problems, config file and command."""
    present = list_columns(findings) if findings else []

    def list_all(draft: Draft) -> list[Column]:
        return [*present, *list_created(workspace, draft, present)]

    def assign_role(draft: Draft, column: str, role: str) -> Draft:
        return set_role(draft, list_all(draft), column, role)

    draft = apply_change(draft, change, assign_role)
    columns = list_all(draft)
    checked = settings.check_form(workspace, to_form(workspace, draft))
    wrong = dict(checked.errors)
    if checked.config is not None and findings:
        message = check_steps(checked.config, columns)
        wrong |= {} if message is None else {PREPARE: message}
    answer = {
        "draft": asdict(draft),
        "columns": _describe_columns(draft, columns),
        "problems": _list_all(
            findings, draft, columns, [*([] if error is None else [error]), *wrong.values()]
        ),
        "wrong": {setting: str(message) for setting, message in wrong.items()},
        "step": configs.find_step(str(wrong.get(PREPARE, ""))),
        "ready": not wrong and error is None,
    }
    if findings:
        answer |= {key: findings[key] for key in ("rows", "series", "time")}
    if checked.config is not None:
        answer |= _describe_config(workspace, checked.config)
    return answer


def _describe_columns(draft: Draft, columns: Sequence[Column]) -> list[dict[str, Any]]:
    assigned = get_roles(draft, columns)
    return [
        {key: column.facts[key] for key in FACTS if column.facts.get(key) is not None}
        | {
            "name": column.name,
            "type": column.type,
            "role": assigned[column.name],
            "made_by": column.made_by,
        }
        for column in columns
    ]


def _list_all(
    findings: Any, draft: Draft, columns: Sequence[Column], errors: Sequence[Message]
) -> list[dict[str, Any]]:
    """Return errors with the fixes that they name, then the problems of the data."""
    problems = [
        DraftProblem(str(error), kind="error", fixes=find_fixes(error, draft, columns))
        for error in errors
    ]
    if findings:
        problems += list_problems(findings, draft, columns)
    return [asdict(problem) for problem in problems]


def _describe_config(workspace: Workspace, config: Config) -> dict[str, Any]:
    name = clean_run_name(config.name)
    return {
        "name": name,
        "toml": format_config(workspace, config, workspace.folder),
        "command": f"slipstream train {name}.toml --out {workspace.out}",
        "unused": configs.list_unused(config),
    }


async def preview(request: Request) -> Response:
    """A column before and after a step, on a range of rows."""
    draft, body = await _read(request)
    number = body.get("number", 0)
    if not isinstance(number, int) or isinstance(number, bool):
        raise UserError("number: expected the number of a step")

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.app.screens.prepare_rows import parse_range, preview_steps

        return preview_steps(config, number, parse_range(body))

    return await _answer(request, draft, compute)


async def split(request: Request) -> Response:
    """The sets on the time axis, with their rows and windows."""
    draft, body = await _read(request)

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.app.screens.prepare_rows import describe_split

        return describe_split(config, str(body.get("series", "")))

    return await _answer(request, draft, compute)


async def rows(request: Request) -> Response:
    """The rows that training sees, with the set of each, as a file."""
    draft, body = await _read(request)
    workspace, ending = get_workspace(request), str(body.get("ending", ".parquet"))

    def compute() -> tuple[bytes, str]:
        from slipstream.app.screens.prepare_rows import format_rows

        config = _require_config(workspace, draft)
        return format_rows(config, ending), clean_run_name(config.name)[:100]

    try:
        content, name = await run_in_threadpool(compute)
    except UserError as error:
        raise settings.shorten_paths(error, workspace) from None
    headers = {"content-disposition": f'attachment; filename="{name}-rows{ending}"'}
    return Response(content, media_type="application/octet-stream", headers=headers)


async def groups(request: Request) -> Response:
    """The values of a column by which rows may be split."""
    draft, body = await _read(request)

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.app.screens.prepare_rows import list_groups

        return {"values": list_groups(config, str(body.get("column", "")))}

    return await _answer(request, draft.set(dict.fromkeys(SPLIT, "")), compute)


async def dates(request: Request) -> Response:
    """The rows of each set between dates, as `data.split.rows` counts them."""
    draft, body = await _read(request)
    borders = body.get("borders")
    if not isinstance(borders, list) or not all(isinstance(border, str) for border in borders):
        raise UserError("borders: expected a list of times")

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.app.screens.prepare_rows import count_rows_by_date

        return {"rows": count_rows_by_date(config, borders)}

    return await _answer(request, draft.set(dict.fromkeys(SPLIT, "")), compute)


async def ready(request: Request) -> Response:
    """Check whether the draft can be trained on its data: return rows and windows, or the
    problem."""
    workspace = get_workspace(request)
    draft, _ = await _read(request)
    try:
        config = await run_in_threadpool(_require_config, workspace, draft)
        return reply(await check_ready(workspace, config))
    except UserError as error:
        return reply(_describe_error(error, draft))


async def save(request: Request) -> Response:
    """Save a draft as a config file in the folder; an existing file is replaced only on request."""
    workspace = get_workspace(request)
    draft, body = await _read(request)
    name = str(body.get("name", "")).removesuffix(".toml")
    if not NAME.fullmatch(name) or name == "pyproject":
        raise UserError(
            "a name has up to 100 letters, digits, dots, dashes and underscores, and begins with a "
            "letter or a digit"
        )
    config = await run_in_threadpool(_require_config, workspace, draft)
    path = workspace.folder / f"{name}.toml"
    text = format_config(workspace, config, workspace.folder)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(f"{path.name}: is not a plain file; choose another name")
    if body.get("replace") is True:
        write_text(path, text)
    else:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return reply({"error": f"{path.name}: exists", "exists": True}, 409)
    command = f"slipstream train {path.name} --out {workspace.out}"
    return reply({"start": f"file:{path.name}", "command": command})


async def proceed(request: Request) -> Response:
    """Store a draft beside the jobs, and return the address of a new run with it."""
    workspace = get_workspace(request)
    draft, _ = await _read(request)
    config = await run_in_threadpool(_require_config, workspace, draft)
    path = workspace.folder / DRAFTS / f"{clean_run_name(config.name)[:100]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_config(workspace, config, path.parent))
    return reply({"url": f"/new?start={quote(f'file:{DRAFTS}/{path.name}')}"})


async def _read(request: Request) -> tuple[Draft, dict[str, Any]]:
    body = await read_request(request)
    return parse_draft(body.get("draft")), body


def _require_config(workspace: Workspace, draft: Draft) -> Config:
    checked = settings.check_form(workspace, to_form(workspace, draft))
    if checked.config is None:
        raise UserError(join_messages(checked.errors.values()))
    return checked.config


async def _answer(
    request: Request, draft: Draft, compute: Callable[[Config], dict[str, Any]]
) -> Response:
    """Compute an answer in a thread; a user's mistake becomes an answer with the fixes that it
    names."""
    workspace = get_workspace(request)

    def run() -> dict[str, Any]:
        try:
            return compute(_require_config(workspace, draft))
        except UserError as error:
            return _describe_error(settings.shorten_paths(error, workspace), draft)

    return reply(await run_in_threadpool(run))


def _describe_error(error: UserError, draft: Draft) -> dict[str, Any]:
    """Return an error for the page: its message, its buttons and its step."""
    fixes = [asdict(fix) for fix in find_fixes(error.message, draft)]
    return {"error": str(error), "fixes": fixes, "step": configs.find_step(str(error))}


SCREEN = Screen(
    routes=(
        ("GET", "/prepare", show),
        ("POST", "/api/prepare/draft", update),
        ("POST", "/api/prepare/preview", preview),
        ("POST", "/api/prepare/split", split),
        ("POST", "/api/prepare/rows", rows),
        ("POST", "/api/prepare/groups", groups),
        ("POST", "/api/prepare/dates", dates),
        ("POST", "/api/prepare/ready", ready),
        ("POST", "/api/prepare/save", save),
        ("POST", "/api/prepare/continue", proceed),
    ),
    navigation=(("/prepare", "Prepare"),),
)
