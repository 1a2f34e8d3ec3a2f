"""Fills a page's template."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from slipstream import runs
from slipstream.errors import ResumableError, UserError
from slipstream.reporting.plots.classification import format_time
from slipstream.reporting.wording import format_number, format_seconds
from slipstream.text import escape_controls


def render_page(name: str, **values: Any) -> str:
    """The page, with the style that all pages share."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_file),
    )
    environment.filters |= {"number": format_number, "seconds": format_seconds, "when": format_time}
    return escape_controls(environment.get_template(name).render(style=_file("page.css"), **values))


def write_report(page: str, *, of: Path, to: Path) -> Path:
    """Write the page of a run as report.html into a folder."""
    path = to / "report.html"
    try:
        to.mkdir(parents=True, exist_ok=True)
        runs.write_text(path, page)
    except OSError as error:
        why = f"{path}: cannot be written ({error.strerror})"
        if error.errno in runs.DISK_FULL:
            fix = f"make room and draw it again: slipstream report {of}"
            raise ResumableError(f"{why}; everything else of the run is there; {fix}") from None
        fix = f"write it elsewhere: slipstream report {of} --out FOLDER"
        raise UserError(f"{why}; {fix}") from None
    return path


def _file(name: str) -> str:
    return resources.files("slipstream.reporting").joinpath(name).read_text("utf-8")
