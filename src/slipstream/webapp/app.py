"""The application: one table of routes, and what happens to errors."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slipstream.errors import UserError
from slipstream.webapp import live, static_files
from slipstream.webapp.pages import show_problem
from slipstream.webapp.paths import MissingError
from slipstream.webapp.screens import home, job, new_run, run
from slipstream.webapp.screens.compare import overlay
from slipstream.webapp.screens.compare import page as compare_page
from slipstream.webapp.screens.data import answers as data_answers
from slipstream.webapp.screens.data import pages as data_pages
from slipstream.webapp.screens.prepare import page as prepare
from slipstream.webapp.screens.result import exports, new_data
from slipstream.webapp.screens.result import page as result
from slipstream.webapp.screens.search import form as search_form
from slipstream.webapp.screens.search import page as search_page
from slipstream.webapp.screens.what_if import screen as what_if
from slipstream.webapp.security import Access, Security
from slipstream.webapp.workspace import Workspace

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
    ("GET", "/api/compare/curves", overlay.list_curves),
    ("GET", "/api/compare/predictions", overlay.list_predictions),
    ("GET", "/result/{run:run}", result.show),
    ("GET", "/api/result/{run:run}", result.describe),
    ("GET", "/api/plot/{run:run}", result.plot),
    ("GET", "/api/tests/{run:run}", new_data.list_tests),
    ("POST", "/api/test/{run:run}", new_data.start),
    ("GET", "/tested/{job}/{run:run}", new_data.download),
    ("GET", "/api/exports/{run:run}", exports.list_exports),
    ("POST", "/api/export/{run:run}", exports.start),
    ("GET", "/export/{format}/{run:run}", exports.download),
    ("GET", "/what-if", what_if.show),
    ("POST", "/api/what-if", what_if.open_session),
    ("GET", "/api/what-if/{session}", what_if.describe),
    ("POST", "/api/what-if/{session}/try", what_if.start),
    ("POST", "/api/what-if/{session}/stop", what_if.stop),
    ("POST", "/api/what-if/{session}/config", what_if.export),
    ("GET", "/events", live.show),
    ("GET", "/static/{file}", static_files.show),
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
