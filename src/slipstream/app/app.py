"""The application: one table of routes, and what happens to errors."""

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
from slipstream.app.pages import show_problem
from slipstream.app.paths import MissingError
from slipstream.app.screens import compare, home, job, new_run, prepare, result, run, what_if
from slipstream.app.screens import compare as compare_page
from slipstream.app.screens import data as data_answers
from slipstream.app.screens import data as data_pages
from slipstream.app.screens import search as search_form
from slipstream.app.screens import search as search_page
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
    if name not in {one.name for one in root.iterdir()} or name[name.rfind(".") :] not in TYPES:
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
TABLE = (
    ("GET", "/", home.show),
    ("GET", "/api/runs", home.list_rows),
    ("POST", "/api/annotate/{run:run}", home.annotate),
    ("POST", "/api/remove", home.remove),
    ("POST", "/api/demo", home.start_demo),
    ("GET", "/new", new_run.show),
    ("GET", "/api/inspect", new_run.inspect_file),
    ("POST", "/api/check", new_run.check),
    ("POST", "/api/ready", new_run.ready),
    ("POST", "/api/estimate", new_run.estimate),
    ("POST", "/api/start", new_run.start),
    ("GET", "/search", search_page.list_searches),
    ("GET", "/search/new", search_form.show_search),
    ("GET", "/search/{run:run}", search_page.show),
    ("GET", "/api/trials/{run:run}", search_page.list_trials),
    ("POST", "/api/search/check", search_form.check_search),
    ("POST", "/api/search/ready", search_form.ready_search),
    ("POST", "/api/search/start", search_form.start_search),
    ("POST", "/api/search/resume/{run:run}", search_page.resume),
    ("GET", "/pretrain", search_form.show_pretraining),
    ("POST", "/api/pretrain/check", search_form.check_pretraining),
    ("POST", "/api/pretrain/ready", search_form.ready_pretraining),
    ("POST", "/api/pretrain/start", search_form.start_pretraining),
    ("GET", "/data", data_pages.show),
    ("POST", "/api/data/upload", data_pages.upload),
    ("GET", "/api/data/table", data_answers.describe_table),
    ("GET", "/api/data/rows", data_answers.list_rows),
    ("GET", "/api/data/column", data_answers.describe_column),
    ("GET", "/api/data/plot", data_answers.draw),
    ("GET", "/api/data/findings", data_answers.describe_findings),
    ("GET", "/api/data/series", data_answers.list_series),
    ("GET", "/api/data/correlations", data_answers.correlate),
    ("GET", "/prepare", prepare.show),
    ("POST", "/api/prepare/draft", prepare.update),
    ("POST", "/api/prepare/preview", prepare.preview),
    ("POST", "/api/prepare/split", prepare.split),
    ("POST", "/api/prepare/groups", prepare.groups),
    ("POST", "/api/prepare/dates", prepare.dates),
    ("POST", "/api/prepare/ready", prepare.ready),
    ("POST", "/api/prepare/save", prepare.save),
    ("POST", "/api/prepare/continue", prepare.proceed),
    ("GET", "/job/{job}", job.show),
    ("GET", "/api/job/{job}", job.describe),
    ("POST", "/api/job/{job}/stop", job.stop),
    ("POST", "/api/job/{job}/first", job.move_first),
    ("GET", "/run/{run:run}", run.show),
    ("POST", "/api/stop/{run:run}", run.stop),
    ("POST", "/api/resume/{run:run}", run.resume),
    ("GET", "/report/{run:run}", run.show_report),
    ("GET", "/download/{file}/{run:run}", run.download),
    ("GET", "/compare", compare_page.show),
    ("GET", "/api/compare/curves", compare.list_curves),
    ("GET", "/api/compare/predictions", compare.list_predictions),
    ("GET", "/result/{run:run}", result.show),
    ("GET", "/api/result/{run:run}", result.describe),
    ("GET", "/api/plot/{run:run}", result.plot),
    ("GET", "/api/tests/{run:run}", result.list_tests),
    ("POST", "/api/test/{run:run}", result.start_test),
    ("GET", "/tested/{job}/{run:run}", result.download_predictions),
    ("GET", "/api/exports/{run:run}", result.list_exports),
    ("POST", "/api/export/{run:run}", result.start_export),
    ("GET", "/export/{format}/{run:run}", result.download_export),
    ("GET", "/what-if", what_if.show),
    ("POST", "/api/what-if", what_if.open_session),
    ("GET", "/api/what-if/{session}", what_if.describe),
    ("POST", "/api/what-if/{session}/try", what_if.start),
    ("POST", "/api/what-if/{session}/stop", what_if.stop),
    ("POST", "/api/what-if/{session}/config", what_if.export),
    ("GET", "/events", live.show),
    ("GET", "/static/{file}", show),
)
"""Every route: method, path, function"""


def create_app(workspace: Workspace, access: Access) -> Security:
    """Return the application for a folder, behind its security."""
    app = Starlette(
        routes=[Route(path, function, methods=[method]) for method, path, function in TABLE],
        exception_handlers={
            MissingError: lambda request, error: show_problem(request, 404, str(error)),
            UserError: lambda request, error: show_problem(request, 400, str(error)),
            OSError: _explain_os_error,
            HTTPException: _explain_http_error,
        },
    )
    app.state.workspace = workspace
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
    state = app.app.state  # type: ignore[attr-defined]
    tasks = set()

    def announce() -> None:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        tasks.add(asyncio.get_running_loop().create_task(supervise(workspace)))
        if browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()

    def stop() -> None:
        state.stopping = True

    presence_file = announce_presence(workspace.folder, workspace.store.root)
    threading.Thread(target=_read_ahead, args=(workspace,), daemon=True).start()
    try:
        run_server(app, bound, announce, stop=stop, stop_s=STOP_S)
    finally:
        presence_file.unlink(missing_ok=True)


def _read_ahead(workspace: Workspace) -> None:
    """Read the runs before the first page asks for them."""
    path = workspace.store.root / "rows.json"
    workspace.rows.load(path)
    workspace.rows.list(workspace.folder, workspace.places)
    workspace.rows.save(path)


def announce_presence(folder: Path, root: Path) -> Path:
    try:
        return jobs.announce_server(root)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); the app keeps its jobs there"
        ) from None


def warn_about_network(host: str) -> None:
    """Say what another address than loopback means."""
    sys.stderr.write(
        f"slipstream: warning: {host} can be reached from the network, without encryption. Whoever "
        "has the URL with its token can read the folder's runs and data and start jobs on this "
        "machine; do not pass it on, and prefer an SSH tunnel to 127.0.0.1.\n"
    )
