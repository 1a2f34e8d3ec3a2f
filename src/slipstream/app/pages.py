"""Renders templates, with everything escaped, and answers as JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from slipstream import __version__
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.text import format_number
from slipstream.reporting.wording import format_seconds
from slipstream.runs import to_json

Handler = Callable[[Request], Response | Awaitable[Response]]


class Screen(NamedTuple):
    """A screen of the app: its routes, and its pages in the navigation.

    To add one, write a module in `screens/` that ends with its `SCREEN`, a template, a script, and
    a line in `SCREENS` (`app.py`).
    """

    routes: tuple[tuple[str, str, Handler], ...]
    """Method, path, function; earlier routes are matched first"""
    navigation: tuple[tuple[str, str], ...] = ()
    """Path and title of the screen's pages in the navigation"""
    section: str = ""
    """The page of the navigation that the screen belongs to, where it has none of its own"""


class Navigation:
    """The pages that every page links to."""

    def __init__(self, screens: Sequence[Screen]) -> None:
        self.items = [item for screen in screens for item in screen.navigation]
        self._sections = {
            _get_first_part(path): screen.section
            for screen in screens
            for _, path, _ in screen.routes
            if screen.section
        }

    def find_section(self, path: str) -> str:
        """Return the page of the navigation that a page belongs to."""
        first = _get_first_part(path)
        return self._sections.get(first, f"/{first}")


def _get_first_part(path: str) -> str:
    return path.split("/")[1]


def get_workspace(request: Request) -> Workspace:
    workspace: Workspace = request.app.state.workspace
    return workspace


def render(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Return a page from its template."""
    page = _get_environment().get_template(template)
    workspace = get_workspace(request)
    navigation: Navigation = request.app.state.navigation
    text = page.render(
        navigation=navigation.items,
        section=navigation.find_section(request.url.path),
        folder=str(workspace.folder),
        version=__version__,
        **values,
    )
    return HTMLResponse(text, status_code=status)


def reply(value: Any, status: int = 200) -> Response:
    """Return an answer as strict JSON."""
    return Response(to_json(value, indent=None), status, media_type="application/json")


async def read_request(request: Request) -> dict[str, Any]:
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
