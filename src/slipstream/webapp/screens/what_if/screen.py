"""The routes of What-if: choose a base, move sliders, look at the history."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream.config import Config, ConfigError
from slipstream.webapp import paths, settings
from slipstream.webapp.jobs.store import OPEN
from slipstream.webapp.pages import get_workspace, read_object, render, reply
from slipstream.webapp.screens.new_run import format_job
from slipstream.webapp.screens.what_if import sliders, tries
from slipstream.webapp.workspace import Workspace

MOST_RUNS = 50
"""Runs to begin with that a page lists"""


def show(request: Request) -> Response:
    """The page: sliders for a session, or else what to begin with."""
    workspace = get_workspace(request)
    session = request.query_params.get("session", "")
    if not session:
        return render(
            request,
            "what_if_start.html",
            start=request.query_params.get("start", ""),
            sessions=tries.list_sessions(workspace),
            runs=_list_runs(workspace),
            configs=[one for one in paths.list_configs(workspace.folder) if not _is_own(one)],
            tables=paths.list_tables(workspace.folder),
        )
    base = tries.load_base(workspace, session)
    controls = sliders.list_sliders(base)
    return render(
        request,
        "what_if.html",
        session=session,
        base=base,
        sliders=controls,
        kinds=sliders.list_kinds(),
        limit_s=sliders.TIME_LIMIT_S,
        toml=format_job(base),
        values={
            "base": sliders.list_values(base, controls),
            "sliders": [asdict(one) for one in controls],
        },
    )


def _is_own(config: str) -> bool:
    return config.startswith(f"{tries.FOLDER}/")


def _list_runs(workspace: Workspace) -> list[dict[str, Any]]:
    rows = workspace.rows.list(workspace.folder, workspace.places)
    return [one for one in rows if one["kind"] == "train"][:MOST_RUNS]


async def open_session(request: Request) -> Response:
    """Create the folder of a base: `start` names a run, a config or the demo, or `settings` are
    those of a form."""
    workspace = get_workspace(request)
    values = await read_object(request)
    if "settings" in values:
        checked = await run_in_threadpool(settings.check_form, workspace, values["settings"])
        if checked.config is None:
            return reply({"error": "\n".join(checked.problems.values())}, 400)
        base = checked.config
    else:
        start = str(values.get("start", ""))
        base = await run_in_threadpool(settings.load_start, workspace, start)
    return reply({"session": await run_in_threadpool(tries.create_session, workspace, base)})


def describe(request: Request) -> Response:
    """The history of a session and the try that waits or trains, as JSON."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    base = tries.load_base(workspace, session)
    names = list(sliders.list_values(base, sliders.list_sliders(base)))
    jobs = tries.list_jobs(workspace, session)
    newest = jobs[0] if jobs else None
    current = None
    if newest is not None:
        current = {key: getattr(newest, key) for key in ("id", "state", "run", "position", "error")}
        current |= {"values": newest.extra.get("values"), "is_open": newest.state in OPEN}
    history = tries.list_tries(workspace, session, names)
    for one in history:
        one["command"] = _format_command(workspace, session, base, one["values"])
    return reply({"tries": history, "current": current})


def _format_command(workspace: Workspace, session: str, base: Config, values: Any) -> str:
    """Return the command that tries some values, as a shell takes it."""
    options = sliders.list_options(base, values)
    return shlex.join(["slipstream", *tries.build_command(workspace, session, options)])


async def start(request: Request) -> Response:
    """Try some values: return the job, or the finished try that had them, or what is wrong."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    values = (await read_object(request)).get("values")
    try:
        result = await run_in_threadpool(tries.submit_try, workspace, session, values)
    except ConfigError as error:
        problems = {".".join(one.path): one.message for one in error.problems}
        return reply({"problems": problems, "error": str(error)}, 400)
    base = await run_in_threadpool(tries.load_base, workspace, session)
    return reply(result | {"command": _format_command(workspace, session, base, values)})


async def stop(request: Request) -> Response:
    """Stop the try that waits or trains."""
    workspace = get_workspace(request)
    session = request.path_params["session"]
    await run_in_threadpool(tries.find_session, workspace, session)
    await run_in_threadpool(tries.stop_tries, workspace, session)
    return reply({})


async def export(request: Request) -> Response:
    """Write the config of a try, without its limits, for New run."""
    workspace = get_workspace(request)
    values = (await read_object(request)).get("values")
    path = await run_in_threadpool(
        tries.write_config, workspace, request.path_params["session"], values
    )
    return reply({"start": f"file:{path}"})
