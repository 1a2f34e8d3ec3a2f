"""A job before its run has a folder, or that failed before: its place in the queue, its error."""

from __future__ import annotations

import shlex
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from slipstream.errors import UserError
from slipstream.webapp import paths
from slipstream.webapp.jobs.store import AppJob
from slipstream.webapp.jobs.supervisor import stop_job
from slipstream.webapp.pages import get_workspace, render, reply
from slipstream.webapp.workspace import Workspace


def show(request: Request) -> Response:
    """The page of a job; the run's page once there is one."""
    workspace = get_workspace(request)
    job = find_job(workspace, request)
    if job.run is not None and not job.error:
        return RedirectResponse(f"/run/{quote(job.run)}", 303)
    return render(
        request,
        "job.html",
        job=job,
        command=format_command(job),
        config=read_config(workspace, job),
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


def describe(request: Request) -> Response:
    """A job's state, as JSON."""
    job = find_job(get_workspace(request), request)
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
