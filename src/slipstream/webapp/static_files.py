"""Scripts and styles: those of the app, and uPlot, which the reports have too."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from slipstream.webapp.paths import MissingError

TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
REPORTING = ("uPlot.iife.min.js", "uPlot.min.css")
"""In `reporting/assets`, with its licence"""


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
