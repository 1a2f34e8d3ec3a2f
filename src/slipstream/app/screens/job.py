"""The page of a job whose run has no folder yet, or that failed: its position in the queue, its
error."""

from __future__ import annotations

import asyncio
import shlex
import time
import tomllib
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from slipstream.app import forms, paths
from slipstream.app.jobs import FINISHED, OPEN, AppJob, stop_job
from slipstream.app.pages import Screen, get_workspace, render, reply
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.runs.config import flatten_settings

LOOK_S = 0.02
MAX_WAIT_S = 10


def show(request: Request) -> Response:
    """The page of a job; the run's page once there is one."""
    workspace = get_workspace(request)
    job = find_job(workspace, request)
    if job.run is not None and not job.error:
        return RedirectResponse(f"/run/{quote(job.run)}", 303)
    if job.state == FINISHED and str(job.extra.get("page", "")).startswith("/result/"):
        return RedirectResponse(str(job.extra["page"]), 303)
    config = read_config(workspace, job)
    return render(
        request,
        "job.html",
        job=job,
        command=format_command(job),
        config=config,
        asked=list_asked(workspace, config),
    )


def find_job(workspace: Workspace, request: Request) -> AppJob:
    try:
        return workspace.store.read(request.path_params["job"])
    except UserError:
        raise paths.MissingError("there is no such job") from None


def format_command(job: AppJob) -> str:
    """Return a job's command as a shell takes it."""
    return shlex.join(["slipstream", *(part for part in job.command if part != "--json")])


def read_config(workspace: Workspace, job: AppJob) -> str:
    """Return the config that a job was started with."""
    for path in (workspace.store.jobs / job.id).glob("*.toml"):
        return path.read_text(encoding="utf-8")
    return ""


def list_asked(workspace: Workspace, config: str) -> list[tuple[str, str]]:
    """Return the settings of a job's config by their names, as a form has them."""
    try:
        settings = flatten_settings(tomllib.loads(config))
    except (ValueError, RecursionError):  # half a file, or one that was edited
        return []
    folder = f"{workspace.folder}/"
    return [
        (name, forms.format_value(value).replace(folder, "")) for name, value in settings.items()
    ]


async def describe(request: Request) -> Response:
    """A job's state, as JSON; with `wait`, once it has a run or has ended, or after this many
    seconds."""
    wait = request.query_params.get("wait", "")
    until = time.monotonic() + min(int(wait) if wait.isdigit() else 0, MAX_WAIT_S)
    while True:
        job = await run_in_threadpool(find_job, get_workspace(request), request)
        if job.run or job.state not in OPEN or time.monotonic() >= until:
            break
        await asyncio.sleep(LOOK_S)
    return reply({"state": job.state, "run": job.run, "error": job.error, "position": job.position})


def stop(request: Request) -> Response:
    """Cancel or stop a job."""
    workspace = get_workspace(request)
    job = stop_job(workspace.store, find_job(workspace, request).id)
    return reply({"state": job.state})


def move_first(request: Request) -> Response:
    """Put a waiting job before the others."""
    workspace = get_workspace(request)
    workspace.store.move_first(find_job(workspace, request).id)
    return reply({})


SCREEN = Screen(
    routes=(
        ("GET", "/job/{job}", show),
        ("GET", "/api/job/{job}", describe),
        ("POST", "/api/job/{job}/stop", stop),
        ("POST", "/api/job/{job}/first", move_first),
    ),
    section="/",
)
