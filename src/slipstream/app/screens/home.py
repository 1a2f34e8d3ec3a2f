"""Home: all runs, what runs and waits, and the load of the machine."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream.app import paths, rows, settings
from slipstream.app.live import describe_jobs, read_load
from slipstream.app.pages import Screen, get_workspace, read_request, render, reply
from slipstream.app.screens.new_run import submit_config
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.reporting.runs import remove_runs


def show(request: Request) -> Response:
    """The page; its script asks for the rows."""
    workspace = get_workspace(request)
    command = f"slipstream runs {workspace.out}"
    return render(request, "home.html", command=command)


def list_rows(request: Request) -> Response:
    """All runs, jobs and the load, as JSON."""
    workspace = get_workspace(request)
    values = {
        "runs": workspace.rows.list(workspace.folder, workspace.run_folders),
        "jobs": describe_jobs(workspace),
        "load": read_load(workspace.folder),
    }
    return reply(values)


async def annotate(request: Request) -> Response:
    """Write the tags and the note of a run."""
    values = await read_request(request)
    folder = paths.find_run_folder(get_workspace(request).folder, request.path_params["run"])
    remark = values.get("remark", "")
    result = await run_in_threadpool(rows.write_annotations, folder, values.get("tags", []), remark)
    return reply(result)


async def remove(request: Request) -> Response:
    """Remove runs with all their files, as `slipstream runs remove`."""
    names = (await read_request(request)).get("runs")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError("runs: expected a list of ids")
    return reply({"removed": await run_in_threadpool(_remove, get_workspace(request), names)})


def _remove(workspace: Workspace, names: list[str]) -> list[str]:
    folders = [paths.find_run_folder(workspace.folder, name) for name in names]
    return [row.name for row in remove_runs(*folders)]


def start_demo(request: Request) -> Response:
    """Train the demo."""
    workspace = get_workspace(request)
    return reply({"job": submit_config(workspace, settings.load_start(workspace, "demo"))})


SCREEN = Screen(
    routes=(
        ("GET", "/", show),
        ("GET", "/api/runs", list_rows),
        ("POST", "/api/annotate/{run:run}", annotate),
        ("POST", "/api/remove", remove),
        ("POST", "/api/demo", start_demo),
    ),
    navigation=(("/", "Runs"),),
)
