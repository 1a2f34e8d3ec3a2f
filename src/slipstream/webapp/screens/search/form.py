"""The forms of searches and of pre-training: that of a new run, with parts of their own."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream import search_space
from slipstream.config import Config
from slipstream.errors import UserError
from slipstream.webapp import forms, settings
from slipstream.webapp.pages import get_workspace, read_object, reply
from slipstream.webapp.screens.new_run import (
    answer_ready,
    describe_job,
    show_form,
    submit_config,
)
from slipstream.webapp.searches import spaces
from slipstream.webapp.settings import Checked
from slipstream.webapp.workspace import Workspace

SPACE = "tune.space"


def show_search(request: Request) -> Response:
    """The form of a search."""
    controls = [one for one in forms.list_controls(forms.TUNE) if one.section == forms.TUNE]
    return show_form(
        request,
        forms.TUNE,
        "search_form.html",
        apart=(forms.TITLES[forms.TUNE],),
        tune_controls=controls,
        settings=spaces.list_settings(),
        list_rows=_list_rows,
    )


def _list_rows(config: Config | None) -> list[dict[str, Any]]:
    return spaces.list_rows(config.tune.space) if config else []


def show_pretraining(request: Request) -> Response:
    """The form of pre-training, and the encoders there are."""
    workspace = get_workspace(request)
    rows = workspace.rows.list(workspace.folder, workspace.places)
    encoders = [row for row in rows if row["kind"] == "pretrain"]
    return show_form(request, forms.PRETRAIN, "pretrain_form.html", encoders=encoders)


async def check_search(request: Request) -> Response:
    """Check the form of a search: what is wrong, or its config and command."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    if checked.config is None:
        return reply(_describe_problems(checked, values))
    usual = spaces.list_rows(search_space.make_default_space(checked.config))
    return reply(describe_job(workspace, checked.config, forms.TUNE) | {"usual": usual})


async def ready_search(request: Request) -> Response:
    """Whether a search can be trained on its data."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    return await answer_ready(request, checked, values.get("settings"), forms.TUNE)


async def ready_pretraining(request: Request) -> Response:
    """Whether an encoder can be pre-trained on its data."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await _check_pretraining(workspace, values)
    return await answer_ready(request, checked, values.get("settings"), forms.PRETRAIN)


def _check_search(workspace: Workspace, values: dict[str, Any]) -> Checked:
    try:
        space = spaces.parse_rows(values.get("space"))
    except UserError as error:
        return Checked(None, {SPACE: str(error)})
    return settings.check_form(workspace, values.get("settings"), forms.TUNE, space)


def _describe_problems(checked: Checked, values: dict[str, Any]) -> dict[str, Any]:
    """Return problems by setting; those of the space also by the row that they name."""
    message = checked.problems.get(SPACE) or checked.problems.get("tune", "")
    stated = message.partition("; did you mean")[0]
    named = [at for at, name in enumerate(_list_names(values.get("space"))) if name in stated]
    rows = {str(at): message for at in named[-1:]} if "tune.space" in message else {}
    problems = dict(checked.problems)
    if "tune.space" in message:
        problems = {key: one for key, one in problems.items() if one != message}
        problems[SPACE] = message
    return {"problems": problems, "rows": rows}


def _list_names(space: Any) -> list[str]:
    """Return the settings of the rows, as messages have them."""
    rows = space if isinstance(space, list) else []
    names = [row.get("setting") if isinstance(row, dict) else None for row in rows]
    return [f'"{name.strip()}"' if isinstance(name, str) else "\0" for name in names]


async def start_search(request: Request) -> Response:
    """Start a search; return its job, or what is wrong."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await run_in_threadpool(_check_search, workspace, values)
    if checked.config is None:
        return reply(_describe_problems(checked, values), 400)
    job = await run_in_threadpool(submit_config, workspace, checked.config, forms.TUNE)
    return reply({"job": job})


async def check_pretraining(request: Request) -> Response:
    """Check the form of pre-training."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await _check_pretraining(workspace, values)
    if checked.config is None:
        return reply({"problems": checked.problems})
    return reply(describe_job(workspace, checked.config, forms.PRETRAIN))


async def _check_pretraining(workspace: Workspace, values: dict[str, Any]) -> Checked:
    form = values.get("settings")
    return await run_in_threadpool(settings.check_form, workspace, form, forms.PRETRAIN)


async def start_pretraining(request: Request) -> Response:
    """Start pre-training; return its job, or what is wrong."""
    workspace, values = get_workspace(request), await read_object(request)
    checked = await _check_pretraining(workspace, values)
    if checked.config is None:
        return reply({"problems": checked.problems}, 400)
    job = await run_in_threadpool(submit_config, workspace, checked.config, forms.PRETRAIN)
    return reply({"job": job})
