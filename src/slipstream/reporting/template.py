"""Fills a page's template."""

from __future__ import annotations

from importlib import resources
from typing import Any

import jinja2

from slipstream.reporting.words import number, seconds


def filled(name: str, **values: Any) -> str:
    """The page, with the style that all pages share."""
    folder = resources.files("slipstream.reporting")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "seconds": seconds}
    text, style = (folder.joinpath(file).read_text("utf-8") for file in (name, "page.css"))
    return environment.from_string(text).render(style=style, **values)
