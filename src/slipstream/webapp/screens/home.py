"""Home: all runs, what runs and waits, and the load of the machine."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream.webapp import paths, rows
from slipstream.webapp.live import describe_jobs
from slipstream.webapp.machine_load import read_load
from slipstream.webapp.pages import get_workspace, read_object, render, reply


def show(request: Request) -> Response:
    """The page; its script asks for the rows."""
    workspace = get_workspace(request)
    command = f"slipstream runs {workspace.out}"
    return render(request, "home.html", command=command)


def list_rows(request: Request) -> Response:
    """All runs, jobs and the load, as JSON."""
    workspace = get_workspace(request)
    values = {
        "runs": workspace.rows.list(workspace.folder, workspace.places),
        "jobs": describe_jobs(workspace),
        "load": read_load(workspace.folder),
    }
    return reply(values)


async def annotate(request: Request) -> Response:
    """Write the tags and the note of a run."""
    values = await read_object(request)
    folder = paths.find_run_folder(get_workspace(request).folder, request.path_params["run"])
    remark = values.get("remark", "")
    result = await run_in_threadpool(rows.write_annotations, folder, values.get("tags", []), remark)
    return reply(result)
