"""Export a finished run: `slipstream export RUN --to FORMAT` as a job, into the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from slipstream.errors import UserError
from slipstream.run_names import EXPORT_FILE
from slipstream.webapp import paths
from slipstream.webapp.jobs.store import OPEN, read_object
from slipstream.webapp.pages import get_workspace, reply
from slipstream.webapp.pages import read_object as read_request
from slipstream.webapp.screens.job import format_command
from slipstream.webapp.screens.result.new_data import EXPORT, find_finished, list_jobs, submit
from slipstream.webapp.screens.run import make_download_name, pack_folder
from slipstream.webapp.workspace import Workspace

FOLDER = "exports"
"""Below the run's folder: one folder for each format"""
FLAGS = ("int8", "after_prepare")
TEXTS = {"name": 60, "license": 60, "state": 20}
"""Options with a value, and how long that may be"""


async def start(request: Request) -> Response:
    """Start an export of a run."""
    values = await read_request(request)
    run = request.path_params["run"]
    job = await run_in_threadpool(submit_export, get_workspace(request), run, values)
    return reply({"job": job})


def submit_export(workspace: Workspace, run: str, values: dict[str, Any]) -> str:
    """Put an export into the queue; one of the same format is replaced."""
    from slipstream.exporting.formats import find_format

    to = values.get("to")
    if not isinstance(to, str):
        raise UserError("choose a format first")
    chosen = find_format(to[:40])
    folder = find_finished(workspace, run)
    out = folder / FOLDER / to
    options = _read_options(values.get("options"), chosen.settings)
    if any(job.state in OPEN for job in list_jobs(workspace, run, EXPORT) if job.extra["to"] == to):
        raise UserError(f"an export to {to} waits or runs already")
    paths.resolve_below(workspace.folder, f"{run}/{FOLDER}/{to}")  # no link leads out
    out.parent.mkdir(exist_ok=True)
    job, _ = workspace.store.create_folder()
    command = ["export", str(folder), "--to", to, "--out", str(out), "--force", *options]
    submit(workspace, job, command, run=run, extra={"kind": EXPORT, "to": to})
    return job


def _read_options(values: Any, settings: tuple[str, ...]) -> list[str]:
    """Return the options of a format as the command line has them."""
    if values is None:
        return []
    if not isinstance(values, dict):
        raise UserError("options: expected an object")
    options = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"[:60]
        if name not in settings:
            raise UserError(f"{option}: is no option of this format")
        if name in FLAGS and isinstance(value, bool):
            options += [option] if value else []
        elif name in TEXTS and isinstance(value, str) and len(value) <= TEXTS[name]:
            options += [f"{option}={value}"] if value.strip() else []
        else:
            raise UserError(f"{option}: expected a short text, or yes or no")
    return options


def list_exports(request: Request) -> Response:
    """Every format with its export, or the job that writes it."""
    from slipstream.exporting.formats import FORMATS

    workspace = get_workspace(request)
    run = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, run)
    jobs: dict[str, Any] = {}
    for job in list_jobs(workspace, run, EXPORT):
        jobs.setdefault(str(job.extra.get("to")), job)
    exports = []
    for name, one in FORMATS.items():
        values: dict[str, Any] = {"to": name, "what": one.what, "settings": list(one.settings)}
        if newest := jobs.get(name):
            state = {"job": newest.id, "state": newest.state, "error": newest.error}
            values |= state | {"position": newest.position, "command": format_command(newest)}
        values["export"] = _read_export(workspace, folder, run, name)
        exports.append(values)
    return reply({"exports": exports})


def _read_export(workspace: Workspace, folder: Path, run: str, to: str) -> dict[str, Any] | None:
    """Return what export.json says, for a page."""
    content = read_object(_find_export(workspace, folder, run, to) / EXPORT_FILE)
    if not content:
        return None
    names = ("parity", "inside", "before", "after", "notes", "versions", "files", "memory")
    result = {name: content[name] for name in names if name in content}
    files = [one for one in content.get("files") or [] if isinstance(one, dict)]
    return result | {"bytes": sum(int(one.get("bytes", 0)) for one in files)}


def _find_export(workspace: Workspace, folder: Path, run: str, to: str) -> Path:
    path = paths.resolve_below(workspace.folder, f"{run}/{FOLDER}/{to}")
    if folder.resolve() not in path.parents:
        raise paths.MissingError("there is no such export")
    return path


def download(request: Request) -> Response:
    """An export as a ZIP archive."""
    from slipstream.exporting.formats import FORMATS

    workspace = get_workspace(request)
    run, to = request.path_params["run"], request.path_params["format"]
    folder = paths.find_run_folder(workspace.folder, run)
    if to not in FORMATS:
        raise paths.MissingError("there is no such format")
    path = _find_export(workspace, folder, run, to)
    if not (path / EXPORT_FILE).is_file():
        raise paths.MissingError(f"this run has no export to {to}")
    name = f"{make_download_name(folder)}-{to}.zip"
    headers = {"content-disposition": f'attachment; filename="{name}"'}
    body = pack_folder(folder, path, path.parent)
    return Response(body, media_type="application/zip", headers=headers)
