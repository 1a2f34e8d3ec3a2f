"""Pictures as <svg> elements with real text, to stand in a page."""

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
"""From so many times the lowest on, losses are drawn on a logarithmic axis"""


def draw_svg(draw: Callable[..., None], width: float, height: float, *given: Any) -> str:
    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure.add_subplot(), *given)
    return to_svg(figure)


def draw_grid(draw: Callable[..., None], each: list[tuple[Any, ...]], height: float) -> str:
    """One small picture per item, up to four in a row."""
    across = min(len(each), 4)
    down = -(-len(each) // across)
    full = 12.4 if across > 2 else 6.2
    figure = Figure(figsize=(full, height * down), layout="constrained")
    for place, given in enumerate(each, start=1):
        draw(figure.add_subplot(down, across, place), *given)
    return to_svg(figure)


_pictures = itertools.count()


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element whose ids clash with no other's on the page."""
    out = io.StringIO()
    with warnings.catch_warnings():  # the browser has fonts for what matplotlib's lack
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = escape_controls(out.getvalue())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{next(_pictures)}-", svg[svg.index("<svg") :])
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r' height="[\d.]+pt"', "", svg), count=1
    )


def shorten(name: str) -> str:
    """A name that fits beside a picture."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"


def use_log_if_wide(axes: Axes, shown: Sequence[float]) -> None:
    """A logarithmic axis where losses are positive and far apart."""
    if not shown or min(shown) <= 0 or max(shown) <= WIDE * min(shown):
        return
    axes.set_yscale("log")
    between = (1.0, 2.0, 5.0) if max(shown) < 100 * min(shown) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter("")
