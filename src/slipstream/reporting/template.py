"""Fills a page's template."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from slipstream.reporting.classes import when
from slipstream.reporting.words import number, seconds
from slipstream.text import printable


def filled(name: str, **values: Any) -> str:
    """The page, with the style that all pages share."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_file),
    )
    environment.filters |= {"number": number, "seconds": seconds, "when": when}
    return printable(environment.get_template(name).render(style=_file("page.css"), **values))


def _file(name: str) -> str:
    return resources.files("slipstream.reporting").joinpath(name).read_text("utf-8")
