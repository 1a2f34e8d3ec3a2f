"""The application: one table of routes, and the responses to errors."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
import webbrowser
from importlib import resources
from pathlib import Path

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.app import jobs, live
from slipstream.app.pages import Navigation, Screen, show_problem
from slipstream.app.paths import MissingError
from slipstream.app.screens import (
    compare,
    data,
    home,
    job,
    new_run,
    prepare,
    result,
    run,
    search,
    what_if,
)
from slipstream.app.security import Access, Security
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.web_server import bind, format_url, is_loopback, run_server

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
REPORTING = ("uPlot.iife.min.js", "uPlot.min.css", "charts.js")
"""Files of `reporting/assets` that the report and the app share"""


def show(request: Request) -> Response:
    """Return a file by its name."""
    name = request.path_params["file"]
    is_shared = name in REPORTING
    package, folder = ("slipstream.reporting", "assets") if is_shared else (__package__, "static")
    root = resources.files(package).joinpath(folder)
    if name not in {file.name for file in root.iterdir()} or name[name.rfind(".") :] not in TYPES:
        raise MissingError("there is no such file")
    body = root.joinpath(name).read_bytes()
    if name == "uPlot.iife.min.js":
        body += root.joinpath("uPlot.drag.js").read_bytes()
    media = TYPES[name[name.rfind(".") :]]
    return Response(body, media_type=media, headers={"cache-control": "no-cache"})


SUPERVISE_S = 0.5


class RunConvertor(PathConvertor):
    """A run's id in a route: a path, whatever characters its names have."""

    regex = r"(?s:.*)"


register_url_convertor("run", RunConvertor())
SCREENS: tuple[Screen, ...] = (
    home.SCREEN,
    data.SCREEN,
    prepare.SCREEN,
    new_run.SCREEN,
    compare.SCREEN,
    search.SCREEN,
    what_if.SCREEN,
    run.SCREEN,
    result.SCREEN,
    job.SCREEN,
)
"""The screens, in the order of the navigation"""
ROUTES = (
    *(route for screen in SCREENS for route in screen.routes),
    ("GET", "/events", live.show),
    ("GET", "/static/{file}", show),
)
"""Every route: method, path, function"""


def create_app(workspace: Workspace, access: Access) -> Security:
    """Return the application for a folder, behind its security."""
    app = Starlette(
        routes=[Route(path, function, methods=[method]) for method, path, function in ROUTES],
        exception_handlers={
            MissingError: lambda request, error: show_problem(request, 404, str(error)),
            UserError: lambda request, error: show_problem(request, 400, str(error)),
            OSError: _explain_os_error,
            HTTPException: _explain_http_error,
        },
    )
    app.state.workspace = workspace
    app.state.navigation = Navigation(SCREENS)
    app.state.stopping = False
    return Security(app, access)


async def supervise(workspace: Workspace) -> None:
    """Start workers for the jobs that wait, for as long as the server runs."""
    try:
        while True:
            await asyncio.to_thread(_start_workers, workspace)
            await asyncio.sleep(SUPERVISE_S)
    finally:
        await workspace.tables.close()


def _start_workers(workspace: Workspace) -> None:
    try:
        workspace.supervisor.start_workers()
    except OSError:  # a full disk; the next look may find room
        return


def _explain_os_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    where = f"{error.filename}: " if error.filename else ""
    return show_problem(request, 507, f"{where}{error.strerror or error}")


def _explain_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "there is no such page" if error.status_code == 404 else str(error.detail)
    return show_problem(request, error.status_code, message)


STOP_S = 3
"""How long requests may take after a signal; jobs are processes of their own"""


def serve(workspace: Workspace, *, host: str, port: int, browser: bool) -> None:
    """Serve a folder until SIGTERM or SIGINT; jobs go on."""
    bound = bind(host, port)
    access = Access(secrets.token_urlsafe(24), bound.getsockname()[1], host)
    if not is_loopback(host):
        warn_about_network(host)
    url = f"{format_url(bound)}/?token={access.token}"
    os.chdir(workspace.folder)  # paths in configs are relative to it, as for the commands
    app = create_app(workspace, access)
    state = app.app.state
    tasks = set()

    def announce() -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        tasks.add(asyncio.get_running_loop().create_task(supervise(workspace)))
        if browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    def stop() -> None:
        state.stopping = True

    server_file = _register_server(workspace.folder, workspace.store.root)
    threading.Thread(target=_read_ahead, args=(workspace,), daemon=True).start()
    try:
        run_server(app, bound, announce, stop=stop, stop_s=STOP_S)
    finally:
        server_file.unlink(missing_ok=True)


def _read_ahead(workspace: Workspace) -> None:
    """Read the runs before the first page asks for them."""
    path = workspace.store.root / "rows.json"
    workspace.rows.load(path)
    workspace.rows.list(workspace.folder, workspace.run_folders)
    workspace.rows.save(path)


def _register_server(folder: Path, root: Path) -> Path:
    """Write the file that tells workers that a server runs; return its path."""
    try:
        return jobs.announce_server(root)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); the app keeps its jobs there"
        ) from None


def warn_about_network(host: str) -> None:
    """Warn that an address other than loopback can be reached from the network."""
    sys.stderr.write(
        f"slipstream: warning: {host} can be reached from the network, without encryption. Whoever "
        "has the URL with its token can read the folder's runs and data and start jobs on this "
        "machine; do not pass it on, and prefer an SSH tunnel to 127.0.0.1.\n"
    )
