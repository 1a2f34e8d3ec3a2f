"""Prepare: roles, steps, split and problems of a draft, and the way on to a new run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream import config as configs
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.runs import write_text
from slipstream.webapp import forms, paths, settings
from slipstream.webapp.pages import get_workspace, read_object, render, reply
from slipstream.webapp.paths import clean_run_name
from slipstream.webapp.screens.prepare import findings as findings_of
from slipstream.webapp.screens.prepare import problems, roles, steps
from slipstream.webapp.screens.prepare.draft import (
    PREPARE,
    Draft,
    apply_change,
    format_config,
    load_draft,
    parse_draft,
    to_form,
)
from slipstream.webapp.screens.prepare.roles import Column
from slipstream.webapp.workspace import Workspace

SPLIT = tuple(f"data.split.{name}" for name in configs.Split.model_fields)
WINDOWS = ("data.task", "data.context", "data.horizon", "data.stride")
ROWS = (
    *("data.time_format", "data.missing", "data.na", "data.unsorted", "data.gap_tolerance"),
    *("data.short", "data.where", "data.encoding", "data.decimal", "data.skip_rows"),
    *("data.sheet", "data.variable", "data.labels"),
)
DRAFTS = ".slipstream/drafts"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FACTS = ("unit", "missing", "low", "high", "mean", "distinct", "course", "constant")


def show(request: Request) -> Response:
    """The page; what it shows comes with the first answer of `update`."""
    workspace = get_workspace(request)
    controls = {control.setting: control for control in forms.list_controls()}
    return render(
        request,
        "prepare.html",
        file=request.query_params.get("file", ""),
        start=request.query_params.get("start", ""),
        tables=paths.list_tables(workspace.folder),
        step_forms=forms.list_step_forms(),
        roles=roles.ROLES,
        groups={
            "windows": [controls[name] for name in WINDOWS],
            "rows": [controls[name] for name in ROWS if name in controls],
            "split": [controls[name] for name in SPLIT if name in controls],
        },
    )


async def update(request: Request) -> Response:
    """Begin a draft, or change one, and return all that the page shows of it."""
    workspace = get_workspace(request)
    body = await read_object(request)
    if "draft" in body:
        draft = parse_draft(body["draft"])
    else:
        draft = await _begin(workspace, str(body.get("file", "")), str(body.get("start", "")))
    error, findings = "", None
    try:
        findings = await findings_of.find(workspace, draft)
    except paths.MissingError:
        raise
    except UserError as problem:
        error = str(problem)
    change = body.get("change", [])
    answer = await run_in_threadpool(_describe, workspace, draft, findings, error, change)
    return reply(answer)


async def _begin(workspace: Workspace, file: str, start: str) -> Draft:
    """Return the draft of a config or a run, or what `slipstream inspect` proposes for a file."""
    if start:
        return load_draft(workspace, settings.load_start(workspace, start))
    draft = Draft({"data.path": file})
    try:
        findings = await findings_of.find(workspace, draft)
    except paths.MissingError:
        raise
    except UserError:  # how the file is read has to be set first
        return draft
    config = findings_of.get_proposal(findings)
    texts = {"data.path": file, "name": clean_run_name(Path(file).stem)}
    return load_draft(workspace, config).set(texts)


def _describe(
    workspace: Workspace, draft: Draft, findings: Any, error: str, change: Any
) -> dict[str, Any]:
    """Return the draft after a change with its columns, problems, config file and command."""
    present = findings_of.list_columns(findings) if findings else []

    def list_all(one: Draft) -> list[Column]:
        return [*present, *steps.list_created(workspace, one, present)]

    def set_role(one: Draft, column: str, role: str) -> Draft:
        return roles.set_role(one, list_all(one), column, role)

    draft = apply_change(draft, change, set_role)
    columns = list_all(draft)
    checked = settings.check_form(workspace, to_form(workspace, draft))
    wrong = dict(checked.problems)
    if checked.config is not None and findings:
        message = steps.check_steps(checked.config, columns)
        wrong |= {PREPARE: message} if message else {}
    answer = {
        "draft": asdict(draft),
        "columns": _describe_columns(draft, columns),
        "problems": _list_all(findings, draft, columns, [error, *wrong.values()]),
        "wrong": wrong,
        "step": steps.find_number(wrong.get(PREPARE, "")),
        "ready": not wrong and not error,
    }
    if findings:
        answer |= {key: findings[key] for key in ("rows", "series", "time")}
    if checked.config is not None:
        answer |= _describe_config(workspace, checked.config)
    return answer


def _describe_columns(draft: Draft, columns: Sequence[Column]) -> list[dict[str, Any]]:
    assigned = roles.get_roles(draft, columns)
    return [
        {key: one.facts[key] for key in FACTS if one.facts.get(key) is not None}
        | {"name": one.name, "type": one.type, "role": assigned[one.name], "made_by": one.made_by}
        for one in columns
    ]


def _list_all(
    findings: Any, draft: Draft, columns: Sequence[Column], errors: Sequence[str]
) -> list[dict[str, Any]]:
    """Return errors with the fixes that they name, then what is suspicious in the data."""
    every = [
        problems.DraftProblem(error, kind="error", fixes=problems.find_fixes(error, draft, columns))
        for error in errors
        if error
    ]
    if findings:
        every += problems.list_problems(findings, draft, columns)
    return [asdict(one) for one in every]


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
        from slipstream.webapp.screens.prepare.preview import parse_range, preview_steps

        return preview_steps(config, number, parse_range(body))

    return await _answer(request, draft, compute)


async def split(request: Request) -> Response:
    """The sets on the time axis, with their rows and windows."""
    draft, body = await _read(request)

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.webapp.screens.prepare.split import describe_split

        return describe_split(config, str(body.get("series", "")))

    return await _answer(request, draft, compute)


async def groups(request: Request) -> Response:
    """The values of a column by which rows may be split."""
    draft, body = await _read(request)

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.webapp.screens.prepare.split import list_groups

        return {"values": list_groups(config, str(body.get("column", "")))}

    return await _answer(request, draft.set(dict.fromkeys(SPLIT, "")), compute)


async def dates(request: Request) -> Response:
    """The rows of each set that dates bound, as `data.split.rows` counts them."""
    draft, body = await _read(request)
    borders = body.get("borders")
    if not isinstance(borders, list) or not all(isinstance(one, str) for one in borders):
        raise UserError("borders: expected a list of times")

    def compute(config: Config) -> dict[str, Any]:
        from slipstream.webapp.screens.prepare.split import count_rows_by_date

        return {"rows": count_rows_by_date(config, borders)}

    return await _answer(request, draft.set(dict.fromkeys(SPLIT, "")), compute)


async def ready(request: Request) -> Response:
    """Whether the draft can be trained on its data: rows and windows, or what is wrong."""
    workspace = get_workspace(request)
    draft, _ = await _read(request)
    try:
        config = await run_in_threadpool(_require_config, workspace, draft)
        return reply(await findings_of.check_ready(workspace, config))
    except UserError as error:
        message = str(error)
        fixes = [asdict(one) for one in problems.find_fixes(message, draft, ())]
        return reply({"error": message, "fixes": fixes, "step": steps.find_number(message)})


async def save(request: Request) -> Response:
    """Save a draft as a config file in the folder; another one is not replaced unasked."""
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
    """Keep a draft beside the jobs, and return the address of a new run with it."""
    workspace = get_workspace(request)
    draft, _ = await _read(request)
    config = await run_in_threadpool(_require_config, workspace, draft)
    path = workspace.folder / DRAFTS / f"{clean_run_name(config.name)[:100]}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, format_config(workspace, config, path.parent))
    return reply({"url": f"/new?start={quote(f'file:{DRAFTS}/{path.name}')}"})


async def _read(request: Request) -> tuple[Draft, dict[str, Any]]:
    body = await read_object(request)
    return parse_draft(body.get("draft")), body


def _require_config(workspace: Workspace, draft: Draft) -> Config:
    checked = settings.check_form(workspace, to_form(workspace, draft))
    if checked.config is None:
        raise UserError("; ".join(checked.problems.values()))
    return checked.config


async def _answer(
    request: Request, draft: Draft, compute: Callable[[Config], dict[str, Any]]
) -> Response:
    """Compute in a thread; a mistake of the user is an answer, with the fixes that it names."""
    workspace = get_workspace(request)

    def run() -> dict[str, Any]:
        try:
            return compute(_require_config(workspace, draft))
        except UserError as error:
            message = str(error).replace(f"{workspace.folder}/", "")
            fixes = [asdict(one) for one in problems.find_fixes(message, draft, ())]
            return {"error": message, "fixes": fixes, "step": steps.find_number(message)}

    return reply(await run_in_threadpool(run))
