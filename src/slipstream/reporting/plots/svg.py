"""Figures as <svg> elements with real text, to embed in a page."""

from __future__ import annotations

import io
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from slipstream.text import escape_controls

WIDE = 8
"""Ratio of highest to lowest loss from which on the axis is logarithmic"""


def draw_svg(draw: Callable[..., None], width: float, height: float, *arguments: Any) -> str:
    """Draw one plot of so many inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot(), *arguments)
    return to_svg(figure)


def draw_grid(draw: Callable[..., None], each: list[tuple[Any, ...]], height: float) -> str:
    """Draw one small plot per item, up to four in a row."""
    across = min(len(each), 4)
    down = -(-len(each) // across)
    full = 12.4 if across > 2 else 6.2
    figure = Figure(figsize=(full, height * down), layout="constrained")
    for place, arguments in enumerate(each, start=1):
        draw(figure.add_subplot(down, across, place), *arguments)
    return to_svg(figure)


_pictures = itertools.count()


def to_svg(figure: Figure) -> str:
    """Convert a figure to an <svg> element whose ids are unique on the page."""
    out = io.StringIO()
    with warnings.catch_warnings():  # browsers have fonts for glyphs that matplotlib lacks
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = escape_controls(out.getvalue())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{next(_pictures)}-", svg[svg.index("<svg") :])
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[\d.]+pt"', "", svg), count=1
    )


def shorten(name: str) -> str:
    """Shorten a name to fit next to a plot."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"


def use_log_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis where values are positive and far apart."""
    if not values or min(values) <= 0 or max(values) <= WIDE * min(values):
        return
    axes.set_yscale("log")
    between = (1.0, 2.0, 5.0) if max(values) < 100 * min(values) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
