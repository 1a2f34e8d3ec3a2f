"""Colours and fonts of the plots, and figures as <svg> elements with real text."""

import io
import itertools
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from slipstream.text import escape_controls

INK, MUTED, MODEL, VALIDATION = "#1f2937", "#6b7280", "#2563eb", "#f59e0b"
FAINT = "#cbd5e1"
COLOURS = {
    "model": MODEL,
    "ensemble": "#7c3aed",
    "ridge": "#f59e0b",
    "seasonal": "#10b981",
    "repeat": "#9ca3af",
    "interpolate": "#f59e0b",
    "mean": "#10b981",
    "logistic": "#f59e0b",
    "majority": "#9ca3af",
}
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a column may be called $x
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eef0f3",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.4,
}
WIDE = 8
"""Ratio of highest to lowest loss from which on the axis is logarithmic"""
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1)}
"""Options of a legend above the plot, clear of its points"""
_pictures = itertools.count()


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


def to_svg(figure: Figure) -> str:
    """Convert a figure to an <svg> element whose ids are unique on the page."""
    out = io.StringIO()
    with warnings.catch_warnings():  # browsers have fonts for glyphs that matplotlib lacks
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    svg = escape_controls(out.getvalue())
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>f{next(_pictures)}-", svg[svg.index("<svg") :])
    svg = re.sub(r' height="[\d.]+pt"', "", svg)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)


def shorten(name: str) -> str:
    """Shorten a name to fit next to a plot."""
    return name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"


def annotate(axes: Axes, text: str, at: tuple[float, float], **options: Any) -> None:
    """Write a small text at a distance of `xytext` points."""
    defaults: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center",
        "fontsize": 9,
        "color": MUTED,
    }
    axes.annotate(text, at, **defaults | options)


def label_series(axes: Axes, names: Sequence[str], total: int, *, turn: bool) -> None:
    """Label the bars of the worst of so many series."""
    options: dict[str, Any] = {"rotation": 40, "ha": "right"} if turn else {}
    axes.set_xticks(range(len(names)), [shorten(n) for n in names], fontsize=8.5, **options)
    axes.set_xlim(-0.7, max(len(names), 6) - 0.3)
    axes.grid(axis="x", visible=False)
    if total > len(names):
        axes.set_title(f"the {len(names)} worst of {total:,} series", fontsize=9.5, color=MUTED)


def use_log_if_wide(axes: Axes, values: Sequence[float]) -> None:
    """Use a logarithmic axis where values are positive and far apart."""
    if not values or min(values) <= 0 or max(values) <= WIDE * min(values):
        return
    axes.set_yscale("log")
    between = (1.0, 2.0, 5.0) if max(values) < 100 * min(values) else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    use_plain_numbers(axes.yaxis)


def use_plain_numbers(axis: Axis) -> None:
    """Label a logarithmic axis with numbers instead of powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter("")
