"""The screen of a data file. A task that takes longer is answered with its progress."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from slipstream.app import paths, settings
from slipstream.app.pages import Screen, get_workspace, render, reply
from slipstream.app.tables import service
from slipstream.app.tables.service import CachedTable
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.data.formats import ENDINGS, PACKED

READING = {
    "encoding": "Encoding",
    "decimal": "Decimal mark",
    "skip_rows": "Lines above the names",
    "names": "Names, or none",
    "sheet": "Sheet",
    "variable": "Variable",
}
"""Settings of `[data]` that say how a file is read, which the page takes as parameters"""
MAX_ROWS = 200
MAX_OPTION = 200


def find_path(workspace: Workspace, name: str) -> Path:
    """Return the path of a data file or a folder of them, below the folder."""
    path = paths.resolve_below(workspace.folder, name)
    parts = path.relative_to(workspace.folder).parts
    if not parts or any(part.startswith(".") for part in parts) or not _exists(path):
        raise paths.MissingError(f"{name[:200]}: there is no such file")
    settings.refuse_path(workspace, settings.NamedPath("data.path", name))
    return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long a name
        return False


def list_overrides(request: Request) -> list[str]:
    """Return the settings that say how the file is read, as `--set` takes them."""
    values = {name: request.query_params.get(name, "")[:MAX_OPTION] for name in READING}
    return [f"data.{name}={value}" for name, value in values.items() if value]


async def find_table(request: Request, *, describe: bool = True) -> CachedTable:
    """Return the folder of a file's findings; `describe` requires that the file was read."""
    workspace = get_workspace(request)
    path = find_path(workspace, request.query_params.get("file", ""))
    table = await run_in_threadpool(workspace.tables.cache.locate, path, list_overrides(request))
    if describe and table.read("table") is None:
        raise UserError("the file has changed; load the page again")
    return table


async def ensure(
    request: Request, table: CachedTable, tasks: Sequence[tuple[Any, ...]]
) -> Response | None:
    """Run tasks that have not run yet; return an answer with the progress while they run."""
    workspace = get_workspace(request)
    try:
        progress = await asyncio.gather(*(workspace.tables.ensure(table, *task) for task in tasks))
    except UserError as error:
        raise settings.shorten_paths(error, workspace) from None
    going = [part for part in progress if part is not None]
    return reply({"progress": min(going)}, 202) if going else None


async def ensure_series(request: Request, table: CachedTable) -> Response | None:
    """Find the series, by the columns that `inspect` proposes."""
    wait = await ensure(request, table, [("findings",)])
    return wait or await ensure(request, table, [("series",)])


async def describe_table(request: Request) -> Response:
    """Rows, columns, and which column is the time."""
    table = await find_table(request, describe=False)
    wait = await ensure(request, table, [("table",)])
    return wait or reply(table.read("table"))


async def list_rows(request: Request) -> Response:
    """A page of rows, as text."""
    table = await find_table(request)
    begin = _read_number(request, "begin", 0)
    count = min(max(_read_number(request, "count", 20), 1), MAX_ROWS)
    return reply(await get_workspace(request).tables.read_rows(table, begin, count))


async def describe_column(request: Request) -> Response:
    """Statistics of a column's values."""
    table = await find_table(request)
    name = request.query_params.get("column", "")
    task = ("time",) if name == "time" else ("column", _find_column(request, table))
    wait = await ensure(request, table, [task])
    return wait or reply(table.read("-".join(map(str, task))))


async def describe_findings(request: Request) -> Response:
    """The findings of `slipstream inspect`."""
    table = await find_table(request)
    wait = await ensure(request, table, [("findings",)])
    return wait or reply(table.read("findings"))


async def list_series(request: Request) -> Response:
    """The series that the file holds."""
    table = await find_table(request)
    wait = await ensure_series(request, table)
    return wait or reply(table.read("series"))


async def correlate(request: Request) -> Response:
    """The correlations of all pairs of columns of numbers."""
    table = await find_table(request)
    columns = [("column", number) for number in table.list_correlated()]
    wait = await ensure(request, table, columns)
    wait = wait or await ensure(request, table, [("correlations",)])
    return wait or reply(table.read("correlations"))


async def draw(request: Request) -> Response:
    """The part of a column that a plot shows."""
    from slipstream.app.tables import levels

    table = await find_table(request)
    column = _find_column(request, table)
    axis = request.query_params.get("axis", levels.ROW)
    if axis not in (levels.ROW, levels.TIME):
        raise UserError("axis is time or row")
    series = request.query_params.get("series")
    tasks: list[tuple[Any, ...]] = [("column", column)]
    tasks += [("time",)] if axis == levels.TIME else []
    wait = await ensure(request, table, tasks)
    wait = wait or (await ensure_series(request, table) if series else None)
    if wait is not None:
        return wait
    wanted = levels.Request(
        column,
        axis,
        _read_number(request, "series", 0) if series else None,
        _read_float(request, "begin"),
        _read_float(request, "end"),
        _read_number(request, "width", 1000),
    )
    return reply(await run_in_threadpool(levels.draw, table, wanted))


def _find_column(request: Request, table: CachedTable) -> int:
    number = _read_number(request, "column", -1)
    if not 0 <= number < len(table.read("table")["columns"]):
        raise UserError("there is no such column")
    return number


def _read_number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    try:
        return int(text[:20])
    except ValueError:
        raise UserError(f"{name} is no number") from None


def _read_float(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{name} is no number")
    return value


MAX_FOLDERS = 200
UPLOAD_TYPE = "application/octet-stream"
"""A content type that a form of another site cannot send"""


async def show(request: Request) -> Response:
    """The files, or one of them."""
    workspace = get_workspace(request)
    await workspace.tables.prepare()
    name = request.query_params.get("file", "")
    if name:
        path = find_path(workspace, name)
        return render(request, "data_file.html", **_describe_page(request, path, name))
    files = await run_in_threadpool(_list_files, workspace)
    limit = service.find_limit(workspace.folder)
    return render(
        request,
        "data.html",
        files=files,
        limit=limit,
        place=service.UPLOADS,
        endings=",".join((*ENDINGS, *PACKED)),
    )


def _describe_page(request: Request, path: Path, name: str) -> dict[str, Any]:
    options = [part for override in list_overrides(request) for part in ("--set", override)]
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
    several = [(name, count) for name, count in folders.items() if count > 1][:MAX_FOLDERS]
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
    except service.UploadError as error:
        return Response(
            reply({"error": str(error)}).body,
            error.status,
            {"connection": "close"},
            "application/json",
        )
    except ClientDisconnect:
        return reply({"error": "the upload was cut off"}, 400)
    return reply({"file": file})


SCREEN = Screen(
    routes=(
        ("GET", "/data", show),
        ("POST", "/api/data/upload", upload),
        ("GET", "/api/data/table", describe_table),
        ("GET", "/api/data/rows", list_rows),
        ("GET", "/api/data/column", describe_column),
        ("GET", "/api/data/plot", draw),
        ("GET", "/api/data/findings", describe_findings),
        ("GET", "/api/data/series", list_series),
        ("GET", "/api/data/correlations", correlate),
    ),
    navigation=(("/data", "Data"),),
)
