"""The list of files, the page of a file, and uploads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from slipstream.webapp import paths
from slipstream.webapp.pages import get_workspace, render, reply
from slipstream.webapp.screens.data.answers import READING, find_path, list_overrides
from slipstream.webapp.tables import uploads
from slipstream.webapp.workspace import Workspace

MOST_FOLDERS = 200
UPLOAD_TYPE = "application/octet-stream"
"""Which a form of another site could not send"""


async def show(request: Request) -> Response:
    """The files, or one of them."""
    workspace = get_workspace(request)
    await workspace.tables.prepare()
    name = request.query_params.get("file", "")
    if name:
        path = find_path(workspace, name)
        return render(request, "data_file.html", **_describe_page(request, path, name))
    files = await run_in_threadpool(_list_files, workspace)
    limit = uploads.find_limit(workspace.folder)
    return render(
        request,
        "data.html",
        files=files,
        limit=limit,
        place=uploads.PLACE,
        endings=",".join((*paths.TABLES, *paths.PACKED)),
    )


def _describe_page(request: Request, path: Path, name: str) -> dict[str, Any]:
    options = [part for one in list_overrides(request) for part in ("--set", one)]
    command = shlex.join(["slipstream", "inspect", name, *options])
    is_folder, query = path.is_dir(), request.query_params
    return {
        "file": name,
        "is_folder": is_folder,
        "command": command,
        "query": quote(name, safe=""),
        "size": None if is_folder else path.stat().st_size,
        "reading": [(key, title, query.get(key, "")) for key, title in READING.items()],
    }


def _list_files(workspace: Workspace) -> list[dict[str, Any]]:
    """List the data files and the folders that hold several of them."""
    names = paths.list_tables(workspace.folder)
    folders: dict[str, int] = {}
    for name in names:
        parent = name.rpartition("/")[0]
        if parent:
            folders[parent] = folders.get(parent, 0) + 1
    listed: list[dict[str, Any]] = []
    for name in names:
        try:
            status = (workspace.folder / name).stat()
        except OSError:
            continue
        listed.append({"name": name, "bytes": status.st_size, "time": status.st_mtime, "files": 0})
    several = [(name, count) for name, count in folders.items() if count > 1][:MOST_FOLDERS]
    listed += [{"name": name, "bytes": 0, "time": 0, "files": count} for name, count in several]
    return listed


async def upload(request: Request) -> Response:
    """Take a file, as the body of the request."""
    workspace = get_workspace(request)
    if request.headers.get("content-type") != UPLOAD_TYPE:
        return reply({"error": f"expected Content-Type: {UPLOAD_TYPE}"}, 415)
    stated = request.headers.get("content-length", "")
    size = int(stated) if stated.isdigit() and len(stated) < 16 else None
    name = request.query_params.get("name", "")
    try:
        file = await workspace.uploads.receive(name, size, request.stream())
    except uploads.UploadError as error:
        return Response(
            reply({"error": str(error)}).body,
            error.status,
            {"connection": "close"},
            "application/json",
        )
    except ClientDisconnect:
        return reply({"error": "the upload was cut off"}, 400)
    return reply({"file": file})
