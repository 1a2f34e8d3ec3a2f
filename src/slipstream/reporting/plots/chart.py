"""Static charts: marks as SVG that stretches with the page, labels as text of one size.

Nothing here needs a script. Colours are CSS variables, so that a chart follows the page's theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from slipstream.reporting.plots.scale import EXTENT, Scale

INK, MUTED, FAINT, CARD = "var(--ink)", "var(--muted)", "var(--faint)", "var(--card)"
BLUE, ORANGE, GREEN, PURPLE = "var(--blue)", "var(--orange)", "var(--green)", "var(--purple)"
RED, SKY, GREY = "var(--red)", "var(--sky)", "var(--grey)"
MODEL, VALIDATION = BLUE, ORANGE
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
"""Colours that differ for the colour-blind too (Okabe and Ito)"""
_COLOURS = {
    "model": MODEL,
    "unfiltered": SKY,
    "ensemble": PURPLE,
    "ridge": ORANGE,
    "seasonal": GREEN,
    "repeat": GREY,
    "interpolate": ORANGE,
    "mean": GREEN,
    "logistic": ORANGE,
    "majority": GREY,
}
MAX_NAME = 18


def get_colour(name: str) -> str:
    """Return the colour of the model or a baseline."""
    return _COLOURS.get(name, RED)


def shorten(name: str, most: int = MAX_NAME) -> str:
    """Shorten a name to fit next to a plot."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"


@dataclass
class Chart:
    """Marks over a horizontal and a vertical scale."""

    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    height: int = 190
    x_ticks: int = 6
    y_ticks: int = 5
    axis: int | None = None
    """Characters left of the chart for the labels; as many as the longest has, if None"""
    marks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    legend: list[tuple[str, str, str]] = field(default_factory=list)
    """Shape, colour and text"""

    def line(
        self,
        x: Any,
        y: Any,
        colour: str,
        *,
        width: float = 1.6,
        dash: str = "",
        label: str = "",
        opacity: float = 1.0,
    ) -> None:
        """Draw a line, interrupted where a value is not finite."""
        style = f"stroke:{colour};stroke-width:{width:g}"
        style += f";stroke-dasharray:{dash}" if dash else ""
        style += f";stroke-opacity:{opacity:g}" if opacity < 1 else ""
        self.marks.append(f'<path d="{self._trace(x, y)}" style="{style}"/>')
        self._add_legend("line" if not dash else "dash", colour, label)

    def lines(
        self, many: Sequence[Any], colour: str, *, opacity: float = 1.0, label: str = ""
    ) -> None:
        """Draw many thin lines of one colour; each is a pair of x and y."""
        path = "".join(self._trace(x, y) for x, y in many)
        style = f"stroke:{colour};stroke-width:1;stroke-opacity:{opacity:g}"
        self.marks.append(f'<path d="{path}" style="{style}"/>')
        self._add_legend("line", colour, label)

    def area(
        self, x: Any, low: Any, high: Any, colour: str, *, opacity: float = 0.2, label: str = ""
    ) -> None:
        """Fill the space between two lines."""
        ends = np.concatenate([np.asarray(x), np.asarray(x)[::-1]])
        edge = np.concatenate([np.asarray(high), np.asarray(low)[::-1]])
        path = f"{self._trace(ends, edge)}Z"
        self.marks.append(f'<path d="{path}" style="{_fill(colour, opacity)}"/>')
        self._add_legend("box", colour, label)

    def boxes(
        self, x: tuple[Any, Any], y: tuple[Any, Any], colour: str, *, opacity: float = 1.0
    ) -> None:
        """Fill rectangles, each from the first to the second x and y."""
        left, right = (np.atleast_1d(self.x.place(ends)) for ends in x)
        low, high = (np.atleast_1d(EXTENT - self.y.place(ends)) for ends in y)
        shape = np.broadcast_shapes(left.shape, right.shape, low.shape, high.shape)
        edges = (np.broadcast_to(ends, shape).tolist() for ends in (left, right, low, high))
        path = "".join(
            f"M{_round(a)} {_round(d)}H{_round(b)}V{_round(c)}H{_round(a)}z"
            for a, b, c, d in zip(*edges, strict=True)
        )
        self.marks.append(f'<path d="{path}" style="{_fill(colour, opacity)}"/>')

    def dots(
        self,
        x: Any,
        y: Any,
        colour: str,
        *,
        size: float = 6,
        square: bool = False,
        hollow: bool = False,
        label: str = "",
    ) -> None:
        """Draw dots, squares or rings, whose size does not depend on that of the chart."""
        self._draw_dots(x, y, colour, size=size, square=square)
        if hollow:
            self._draw_dots(x, y, CARD, size=size - 3, square=square)
        self._add_legend(f"{'square' if square else 'dot'}{' hollow' * hollow}", colour, label)

    def hline(self, y: float, colour: str, *, dash: str = "", label: str = "") -> None:
        """Draw a level across the chart."""
        self.line([self.x.low, self.x.high], [y, y], colour, width=1.4, dash=dash, label=label)

    def vline(self, x: float, colour: str = MUTED, *, dash: str = "2 3", note: str = "") -> None:
        """Mark a place on the horizontal axis, with a note at the top."""
        self.line([x, x], [self.y.low, self.y.high], colour, width=1, dash=dash)
        if note:
            self.note(x, self.y.high, note)

    def note(self, x: float, y: float, text: str, *, kind: str = "") -> None:
        """Write a small text right of a point."""
        left, top = self.x.place(x) / (EXTENT / 100), 100 - self.y.place(y) / (EXTENT / 100)
        turned = " left" if left > 85 else ""
        name = f"note{turned}{' ' if kind else ''}{kind}"
        place = f"left:{left:.2f}%;top:{top:.2f}%"
        self.notes.append(f'<span class="{name}" style="{place}">{escape(text)}</span>')

    def name(self, shape: str, colour: str, text: str) -> None:
        """Add an entry to the legend."""
        self._add_legend(shape, colour, text)

    def measure_axis(self) -> int:
        """Return the number of characters of the longest label left of the chart."""
        return max((len(text) for _, text in self.y.list_ticks(self.y_ticks)), default=0)

    def render(self) -> Markup:
        """Return the chart as HTML."""
        ys, xs = self.y.list_ticks(self.y_ticks), self.x.list_ticks(self.x_ticks)
        across = [EXTENT - self.y.place(value) for value, _ in ys]
        grid = "".join(f"M0 {_round(float(at))}H{EXTENT}" for at in across)
        width = self.measure_axis() if self.axis is None else self.axis
        scale = "".join(
            f'<span style="top:{at / (EXTENT / 100):.2f}%">{escape(text)}</span>'
            for at, (_, text) in zip(across, ys, strict=True)
        )
        below = "".join(
            f'<span style="left:{self.x.place(value) / (EXTENT / 100):.2f}%">{escape(text)}</span>'
            for value, text in xs
        )
        label = f'<span class="unit">{escape(self.y_label)}</span>' if self.y_label else ""
        entries = "".join(map(_render_entry, self.legend))
        parts = [
            f'<div class="chart" style="--axis:{width}ch;--height:{self.height}px">',
            f'<div class="legend">{label}{entries}</div>' if label or entries else "",
            f'<div class="frame"><div class="ys">{scale}</div><div class="plot">',
            f'<svg viewBox="0 0 {EXTENT} {EXTENT}" preserveAspectRatio="none" aria-hidden="true">',
            f'<path class="grid" d="{grid}"/>{"".join(self.marks)}</svg>{"".join(self.notes)}',
            f'</div><div class="xs">{below}</div></div>' if below else "</div></div>",
            f'<div class="x-label">{escape(self.x_label)}</div>' if self.x_label else "",
            "</div>",
        ]
        return Markup("".join(parts))

    def _add_legend(self, shape: str, colour: str, label: str) -> None:
        if label:
            self.legend.append((shape, colour, label))

    def _trace(self, x: Any, y: Any) -> str:
        """Return a path through the points, with a new beginning after each that is not finite."""
        across, down = self.x.place(x), EXTENT - self.y.place(y)
        command, path = "M", []
        for left, top in zip(across.tolist(), down.tolist(), strict=True):
            if left - left != 0 or top - top != 0:  # not finite
                command = "M"
                continue
            path.append(f"{command}{_round(left)} {_round(top)}")
            command = "L"
        return "".join(path)

    def _draw_dots(self, x: Any, y: Any, colour: str, *, size: float, square: bool) -> None:
        across = np.atleast_1d(self.x.place(x)).tolist()
        down = np.atleast_1d(EXTENT - self.y.place(y)).tolist()
        points = (p for p in zip(across, down, strict=True) if p[0] - p[0] == 0 == p[1] - p[1])
        # a stroke without length keeps its shape when the chart is stretched
        path = "".join(f"M{_round(left)} {_round(top)}h0" for left, top in points)
        cap = "square" if square else "round"
        style = f"stroke:{colour};stroke-width:{size:g};stroke-linecap:{cap}"
        self.marks.append(f'<path d="{path}" style="{style}"/>')


def _round(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")


def _fill(colour: str, opacity: float) -> str:
    return f"fill:{colour};fill-opacity:{opacity:g}" if opacity < 1 else f"fill:{colour}"


def _render_entry(entry: tuple[str, str, str]) -> str:
    shape, colour, text = entry
    return f'<span><i class="{shape}" style="--colour:{colour}"></i>{escape(text)}</span>'


def render_bars(
    rows: Sequence[tuple[str, float, str]], *, colour: str = MODEL, most: float | None = None
) -> Markup:
    """Return horizontal bars, each with its name and its value in words."""
    longest = most or max((value for _, value, _ in rows), default=0.0) or 1.0
    lines = "".join(
        f'<span class="name" title="{escape(name)}">{escape(name)}</span><span class="bar">'
        f'<i style="width:{100 * max(value, 0.0) / longest:.2f}%;background:{colour}"></i></span>'
        f'<span class="value">{escape(text)}</span>'
        for name, value, text in rows
    )
    return Markup(f'<div class="bars">{lines}</div>')
