"""Renders a page from its template and writes it."""

from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from slipstream import runs
from slipstream.base.errors import Command, ResumableError, UserError
from slipstream.base.text import escape_controls, format_number
from slipstream.reporting.wording import (
    describe_step,
    format_metric,
    format_moment,
    format_plural,
    format_seconds,
    format_step,
    format_time,
    format_value,
)
from slipstream.runs.summary import RunOrigin

RUN_TEMPLATES = tuple(
    f"{name}.html"
    for name in ("base", "page", "regression", "examples", "zoom", "data", "plan", "advice")
)
MARK = b"Written by Slipstream"
"""In the footer of every page"""


def render_page(name: str, **values: Any) -> str:
    """Render a template with the style that all pages share."""
    style = _read_template("page.css")
    return escape_controls(_get_environment().get_template(name).render(style=style, **values))


def compile_templates() -> None:
    """Compile the templates of a run's page, which takes longer than to fill them in."""
    for name in RUN_TEMPLATES:
        _get_environment().get_template(name)


@cache
def _get_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_read_template),
    )
    environment.globals["asset"] = _read_asset
    environment.filters |= {
        "number": format_number,
        "metric": format_metric,
        "style": lambda outcome: {"better": " good", "worse": " lost"}.get(outcome, ""),
        "seconds": format_seconds,
        "time": format_time,
        "count": "{:,}".format,
        "value": format_value,
        "plural": format_plural,
        "moment": format_moment,
        "step": format_step,
        "describe_step": describe_step,
    }
    return environment


def write_report(page: str, *, of: Path, to: Path) -> Path:
    """Write the page of the run in `of` as report.html into the folder `to`."""
    path = to / "report.html"
    try:
        to.mkdir(parents=True, exist_ok=True)
        runs.write_text(path, page)
    except OSError as error:
        why = f"{path}: cannot be written ({error.strerror})"
        if error.errno in runs.DISK_FULL:
            fix = "make room and draw it again: " + Command("report", of)
            raise ResumableError(f"{why}; the rest of the run is complete", fix=fix) from None
        fix = "write it elsewhere: " + Command("report", of, out="FOLDER")
        raise UserError(why, fix=fix) from None
    return path


def write_page(path: Path, page: str) -> Path:
    """Write a page that is no run's report; only another page of Slipstream is replaced."""
    try:
        if path.exists() and MARK not in path.read_bytes():
            raise UserError(f"{path}: exists, and is no page of Slipstream; name another file")
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write_text(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def find_date(folder: Path, summary: RunOrigin) -> str:
    """Return when a run was finished; for runs of version 0.1, when its metrics were written."""
    finished = summary.get("finished_at")
    if finished is None:
        file = next(folder / n for n in ("metrics.json", "summary.json") if (folder / n).exists())
        finished = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat()
    return datetime.fromisoformat(finished).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _read_asset(name: str) -> Markup:
    """Return a script or a style that goes into the page as it is."""
    file = resources.files("slipstream.reporting").joinpath("assets", name)
    return Markup(file.read_text("utf-8").strip())


def _read_template(name: str) -> str:
    return resources.files("slipstream.reporting").joinpath("templates", name).read_text("utf-8")
