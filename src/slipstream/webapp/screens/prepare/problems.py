"""What is wrong with the data or the draft, and the buttons that change the draft.

A fix is a change as `draft.apply_change` takes it. Messages of the command line name the setting
that helps, as in `data.missing = "forward"`; such a setting is a fix, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream import config as configs
from slipstream.runs import to_json
from slipstream.runs.config import ChangedTarget, list_changed_targets
from slipstream.webapp import forms
from slipstream.webapp.screens.prepare.draft import Draft, format_names, list_names, parse_value
from slipstream.webapp.screens.prepare.findings import Findings
from slipstream.webapp.screens.prepare.roles import (
    IGNORE,
    INPUT,
    OUTPUT,
    TARGET,
    Column,
    find_used,
    get_roles,
)

Change = list[dict[str, Any]]
NOT_INPUTS = ("empty", "text", "constant", "counter", "copy")
"""Kinds of columns that are no inputs"""
MARKED = ("code", "no numbers", "infinite")
"""Kinds of problems whose values `data.na` may list"""
SETTING = re.compile(r'((?:data|model|train|engine)\.[a-z_.]+) = (\[[^\]\n]*\]|"[^"\n]*"|-?[\w.]+)')
LEFT_OUT = re.compile(
    r'column "(?P<column>[^"]+)": .*leave the column out of (?P<setting>data\.[a-z]+)', re.S
)
UNNEEDED = re.compile(r'input "(?P<column>.+?)" .*data\.ignore', re.S)


@dataclass(frozen=True)
class Fix:
    """A button that changes the draft."""

    title: str
    change: Change


@dataclass(frozen=True)
class DraftProblem:
    """Something to know about the data or the draft."""

    message: str
    column: str | None = None
    kind: str = ""
    fixes: list[Fix] = field(default_factory=list)
    answer: str = ""
    """What the draft does about it; "" while it does nothing"""


def list_problems(
    findings: Findings, draft: Draft, columns: Sequence[Column]
) -> list[DraftProblem]:
    """List what is suspicious in the data, each with its fixes, or with what the draft does."""
    roles = get_roles(draft, columns)
    problems = []
    for remark in findings["problems"]:
        kind = remark.get("kind", "")
        answer = _find_answer(kind, remark, draft, roles, findings)
        fixes = [] if answer else list(_list_fixes(kind, remark, draft, findings))
        problems.append(DraftProblem(remark["message"], remark["column"], kind, fixes, answer))
    return [*_check_draft(draft, columns), *_check_time(findings, draft), *problems]


def _check_time(findings: Findings, draft: Draft) -> Iterator[DraftProblem]:
    """Yield that the draft does without a time which the data have, unless a problem says why."""
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
    """Yield what is wrong between settings, which the loader says as well, with a fix."""
    targets, inputs = draft.get_names("data.targets"), draft.get_names("data.inputs")
    for name in targets:
        column = next((one for one in columns if one.name == name), None)
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
    for one in list_changed_targets(_parse_columns(data)):
        yield DraftProblem(one.describe(), one.target, "target", _list_filter_fixes(one, draft))
    roles = get_roles(draft, columns)
    for column in columns:
        if column.made_by is not None and roles[column.name] == IGNORE:
            message = f"step {column.made_by} makes it, but no role uses it"
            fixes = [Fix("Make it an input", [{"role": [column.name, INPUT]}])]
            yield DraftProblem(message, column.name, "unused", fixes)
    if not targets and not draft.get("data.labels"):
        yield DraftProblem("no column is a target; click one", None, "no target")


def _parse_columns(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return steps of a draft with their lists of columns, which are texts there, as lists."""
    keys = ("columns", "into")
    steps = [
        step | {key: list_names(step[key]) for key in keys if key in step}
        for step in data["prepare"]
    ]
    return {"prepare": steps, "targets": data["targets"]}


def _list_filter_fixes(changed: ChangedTarget, draft: Draft) -> list[Fix]:
    """Return the fix that filters into a new column, which is an input, where a step can do so."""
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
    """Say what the draft does about a problem."""
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
            is_marked = bool(values) and all(one in marks for one in values)
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
        every = findings["time"]["step"]
        if every:
            step = {"step": "resample", "every": f"{every:.12g}"}
            yield Fix(f"Resample every {every:.6g}", [{"add": step, "at": 0}])
    elif kind == "disorder":
        texts = _list_time_settings(findings) | {"data.unsorted": "sort"}
        yield Fix("Sort the rows by time", [{"set": texts}])
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


def find_fixes(message: str, draft: Draft, columns: Sequence[Column]) -> list[Fix]:
    """Return the fixes that a message of the command line names: settings that the draft does not
    have yet, and columns to ignore."""
    known = {control.setting for control in forms.list_controls()}
    together: dict[str, str] = {}
    fixes = []
    for setting, value in SETTING.findall(message):
        text = value[1:-1] if value[:1] == '"' else value.rstrip(".")
        if setting in known and draft.get(setting) != text and setting not in together:
            together[setting] = text
    if " and data." in message and len(together) > 1:
        title = " and ".join(f"{setting} = {text}" for setting, text in together.items())
        fixes.append(Fix(f"Set {title}", [{"set": together}]))
    else:
        fixes += [
            Fix(f"Set {setting} = {text}", [{"set": {setting: text}}])
            for setting, text in together.items()
        ]
    match = LEFT_OUT.search(message)
    if match and match["column"] in (names := draft.get_names(match["setting"])):
        rest = [name for name in names if name != match["column"]]
        change: Change = [{"set": {match["setting"]: format_names(rest)}}]
        fixes.append(Fix(f"Leave {match['column']} out of {match['setting']}", change))
    match = UNNEEDED.search(message)
    if match and match["column"] in find_used(draft, columns):
        fixes.append(Fix("Ignore the column", [{"role": [match["column"], IGNORE]}]))
    return fixes
