"""Renders templates, with everything escaped, and answers as JSON."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from slipstream import __version__
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.text import format_number
from slipstream.reporting.wording import format_seconds
from slipstream.runs import to_json

NAVIGATION = (
    ("/", "Runs"),
    ("/data", "Data"),
    ("/prepare", "Prepare"),
    ("/new", "New run"),
    ("/compare", "Compare"),
    ("/search", "Search"),
    ("/pretrain", "Pre-train"),
    ("/what-if", "What-if"),
)
"""The screens, in the order of the navigation"""
OF_RUNS = ("run", "result", "job")
"""The first parts of paths that belong to the first screen"""


def get_workspace(request: Request) -> Workspace:
    workspace: Workspace = request.app.state.workspace
    return workspace


def render(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Return a page from its template."""
    page = _get_environment().get_template(template)
    workspace = get_workspace(request)
    text = page.render(
        navigation=NAVIGATION,
        section=find_section(request.url.path),
        folder=str(workspace.folder),
        version=__version__,
        **values,
    )
    return HTMLResponse(text, status_code=status)


def find_section(path: str) -> str:
    """Return the screen of the navigation that a page belongs to."""
    first = path.split("/")[1]
    return "/" if first in OF_RUNS else f"/{first}"


def reply(value: Any, status: int = 200) -> Response:
    """Return an answer as strict JSON."""
    return Response(to_json(value, indent=None), status, media_type="application/json")


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request. No other content type is read: a form of another site
    could not send this one."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise UserError("expected Content-Type: application/json")
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UserError("expected a JSON object") from None
    if not isinstance(value, dict):
        raise UserError("expected a JSON object")
    return value


def show_problem(request: Request, status: int, message: str) -> Response:
    """Return an error: as JSON to scripts, as a page to people."""
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": message}, status)
    return render(request, "problem.html", status, message=message)


@cache
def _get_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(_read_template),
    )
    environment.filters |= {"number": format_number, "seconds": format_seconds}
    return environment


def _read_template(name: str) -> str:
    return resources.files("slipstream.app").joinpath("templates", name).read_text("utf-8")
