"""New run: choose data and settings, check them as the command line would, and start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream import config as configs
from slipstream.app import forms, paths, settings
from slipstream.app.jobs import choose_queue
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.paths import clean_run_name
from slipstream.app.screens import estimates, prepare
from slipstream.app.screens.prepare import Draft
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.config import SIMULATED, Config, search_space
from slipstream.runs import write_text

MAX_ROWS = 10**12
"""A request with larger numbers is refused: no table has as many rows"""
MIN_MINUTES = 0.1
PREFERENCES = {
    "best": "an ensemble where it is better",
    "fast": "one model",
    "small": "one for a microcontroller",
}
"""The choices of `slipstream auto --prefer`"""


def show(request: Request) -> Response:
    """The form."""
    return show_form(request, forms.TRAIN, "new_run.html", preferences=PREFERENCES)


def show_form(
    request: Request, command: str, template: str, *, apart: tuple[str, ...] = (), **values: Any
) -> Response:
    """Return the form of a command; the template shows the groups `apart` itself."""
    workspace = get_workspace(request)
    start = request.query_params.get("start", "")
    config = settings.load_start(workspace, start, command) if start else None
    return render(
        request,
        template,
        groups=[group for group in forms.group_controls(command) if group[0] not in apart],
        presets=settings.list_presets(),
        tables=paths.list_tables(workspace.folder),
        configs=paths.list_configs(workspace.folder),
        start=start,
        allow_code=workspace.allow_code,
        values=forms.fill(config, command) if config else {},
        data=_list_data(workspace, config),
        config=config,
        **values,
    )


def _list_data(workspace: Workspace, config: Config | None) -> str:
    """Return the paths of a config's data, relative to the folder, one a line."""
    names = []
    for name in config.data.paths if config else ():
        path = Path(name)
        is_inside = not name.startswith(SIMULATED) and paths.is_below(workspace.folder, path)
        names.append(str(path.relative_to(workspace.folder)) if is_inside else name)
    return "\n".join(names)


async def inspect_file(request: Request) -> Response:
    """The columns of a data file and settings that fit; further parameters say how the file is
    read."""
    workspace = get_workspace(request)
    name = request.query_params.get("path", "")
    draft = Draft(dict(request.query_params))
    findings = await prepare.find_file(workspace, name, prepare.list_reading(draft))
    return reply(_describe_findings(Path(name), findings))


def _describe_findings(path: Path, findings: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a file, its problems, and the form that it suggests."""
    suggested = prepare.get_proposal(findings)
    columns = [
        {key: column.get(key) for key in ("name", "type", "unit", "role")}
        for column in findings["columns"]
    ]
    return {
        "columns": columns,
        "rows": findings["rows"],
        "problems": [
            {"column": problem["column"], "message": problem["message"]}
            for problem in findings["problems"]
        ],
        "values": forms.fill(suggested) | {"name": clean_run_name(path.stem)},
    }


async def check(request: Request) -> Response:
    """Check a form: return its mistakes, or its config and command."""
    workspace = get_workspace(request)
    form = (await read_request(request)).get("settings")
    checked = await run_in_threadpool(settings.check_form, workspace, form)
    if checked.config is None:
        return reply({"problems": checked.problems})
    return reply(describe_job(workspace, checked.config, forms.TRAIN))


async def ready(request: Request) -> Response:
    """Whether the form can be trained on its data."""
    workspace = get_workspace(request)
    form = (await read_request(request)).get("settings")
    checked = await run_in_threadpool(settings.check_form, workspace, form)
    return await answer_ready(request, checked, form)


async def answer_ready(
    request: Request, checked: settings.Checked, form: Any, command: str = forms.TRAIN
) -> Response:
    """Return the rows and windows of a job, or its problems by setting, with fixes: settings that a
    message names."""
    if checked.config is None:
        return reply({"problems": checked.problems})
    try:
        sizes = await prepare.check_ready(get_workspace(request), checked.config)
    except UserError as error:
        fixes = [
            {"title": fix.title, "set": change["set"]}
            for fix in prepare.find_fixes(error.message, Draft(form))
            for change in fix.change
            if "set" in change
        ]
        setting = settings.find_setting(error, command)
        return reply({"problems": {setting: str(error)}, "fixes": fixes})
    return reply({"problems": {}, **sizes})


def describe_job(workspace: Workspace, config: Config, command: str) -> dict[str, Any]:
    """Return the config and the command of a form without problems."""
    return {
        "problems": {},
        "toml": format_job(config),
        "command": f"slipstream {command} {config.name}.toml --out {workspace.out}",
        "unused": configs.list_unused(config),
    }


async def estimate(request: Request) -> Response:
    """How long the job of a form will take, and how much memory."""
    workspace, body = get_workspace(request), await read_request(request)
    checked = await run_in_threadpool(settings.check_form, workspace, body.get("settings"))
    if checked.config is None:
        return reply({})
    rows, numbers = (body.get(name) for name in ("rows", "numbers"))
    windows = body.get("windows")
    counts = (rows, numbers, windows or 0)
    if not all(isinstance(count, int) and 0 <= count <= MAX_ROWS for count in counts):
        raise UserError(f"rows, numbers and windows: expected integers up to {MAX_ROWS:,}")
    sizes = int(rows or 0), int(numbers or 0), windows
    return reply(await run_in_threadpool(estimates.estimate_job, workspace, checked.config, *sizes))


def format_job(config: Config) -> str:
    """Return the config file of a job."""
    return configs.to_toml(config, only_set=True)


async def start(request: Request) -> Response:
    """Start a job with the settings of a form; return its id, or the mistakes."""
    workspace = get_workspace(request)
    form = (await read_request(request)).get("settings")
    checked = await run_in_threadpool(settings.check_form, workspace, form)
    if checked.config is None:
        return reply({"problems": checked.problems}, 400)
    job = await run_in_threadpool(submit_config, workspace, checked.config)
    return reply({"job": job})


async def start_auto(request: Request) -> Response:
    """Start `slipstream auto` with the settings of a form; return its job, or the mistakes."""
    workspace, body = get_workspace(request), await read_request(request)
    minutes, prefer, refit = body.get("minutes"), body.get("prefer"), body.get("refit", False)
    search_space.check_minutes(minutes or 0, MIN_MINUTES)
    if not isinstance(prefer, str) or prefer not in PREFERENCES:
        raise UserError(f"prefer: expected one of {', '.join(PREFERENCES)}")
    if not isinstance(refit, bool):
        raise UserError("refit: expected true or false")
    checked = await run_in_threadpool(settings.check_form, workspace, body.get("settings"))
    if checked.config is None:
        return reply({"problems": checked.problems}, 400)
    options = ("--minutes", f"{minutes:g}", "--prefer", prefer, *(("--refit",) if refit else ()))
    job = await run_in_threadpool(submit_config, workspace, checked.config, "auto", options=options)
    return reply({"job": job})


def submit_config(
    workspace: Workspace,
    config: Config,
    verb: str = forms.TRAIN,
    *,
    options: tuple[str, ...] = (),
) -> str:
    """Write a config and put its training, search or pre-training into the queue."""
    job, folder = workspace.store.create_folder()
    path = folder / f"{clean_run_name(config.name)}.toml"
    write_text(path, format_job(config))
    command = [verb, str(path), *options, "--out", str(workspace.out), "--json"]
    if workspace.allow_code and verb != forms.PRETRAIN:
        command.append("--allow-code")
    workspace.store.submit(
        job,
        command,
        device=choose_queue(config.engine.device),
        name=config.name,
        extra={"out": str(workspace.out)},
    )
    workspace.supervisor.start_workers()
    return job


SCREEN = Screen(
    routes=(
        ("GET", "/new", show),
        ("GET", "/api/inspect", inspect_file),
        ("POST", "/api/check", check),
        ("POST", "/api/ready", ready),
        ("POST", "/api/estimate", estimate),
        ("POST", "/api/start", start),
        ("POST", "/api/auto", start_auto),
    ),
    navigation=(("/new", "New run"),),
)
