"""Charts: one description of lines, bands, bars and dots over two scales, and its renderers.

`Chart.render` gives HTML for a page: marks as SVG that stretches with the page, labels as text of
one size, colours that follow the page's theme, and no script. `render_svg` and `render_png` give a
picture of one or more charts with everything in it. Plots that can be zoomed are drawn in the
browser by assets/charts.js, from the values that `thin`, `interrupt` and `round_values` prepare.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from xml.sax.saxutils import escape as escape_xml

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Tick = tuple[float, str]
"""A value and its label"""
Points = Sequence[tuple[float, float]]

EXTENT = 1000
"""Positions in a chart are from 0 to this, right and down"""
WIDE = 8
"""Ratio of the highest to the lowest value from which on a scale is logarithmic"""
DATE_STEPS = (
    *(("s", n) for n in (1, 5, 15, 30)),
    *(("m", n) for n in (1, 5, 15, 30)),
    *(("h", n) for n in (1, 3, 6, 12)),
    *(("D", n) for n in (1, 2, 3, 7, 14)),
    *(("M", n) for n in (1, 3, 6)),
    *(("Y", n) for n in (1, 2, 5, 10, 20, 50, 100)),
)
"""Unit and count of the steps between the ticks of dates, the shortest first"""

INK, MUTED, FAINT, CARD = "var(--ink)", "var(--muted)", "var(--faint)", "var(--card)"
BLUE, ORANGE, GREEN, PURPLE = "var(--blue)", "var(--orange)", "var(--green)", "var(--purple)"
RED, SKY, GREY = "var(--red)", "var(--sky)", "var(--grey)"
GRID = "var(--grid)"
MODEL, VALIDATION = BLUE, ORANGE
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
"""Colours that differ for the colour-blind too (Okabe and Ito)"""
PALETTE = {
    INK: "#1b2430",
    MUTED: "#5b6573",
    FAINT: "#b9c2cd",
    CARD: "#ffffff",
    GRID: "#e9ecf0",
    BLUE: "#0067a8",
    ORANGE: "#d98200",
    GREEN: "#008a63",
    PURPLE: "#b0508c",
    RED: "#c8460e",
    SKY: "#3d9fd8",
    GREY: "#7d8794",
}
"""The colours of a picture: those of the light theme in templates/page.css"""
_COLOURS = {
    "model": MODEL,
    "unfiltered": SKY,
    "ensemble": PURPLE,
    "ridge": ORANGE,
    "gbm": SKY,
    "rocket": GREEN,
    "seasonal": GREEN,
    "repeat": GREY,
    "interpolate": ORANGE,
    "mean": GREEN,
    "logistic": ORANGE,
    "majority": GREY,
}
MAX_NAME = 18
GAP = 1.9
"""Times the usual step from which on a line is interrupted"""
SIGNIFICANT = 4
MAX_EXACT = 2**53
"""Whole numbers below it are written without a decimal point"""


def get_colour(name: str) -> str:
    """Return the colour of the model or a baseline."""
    return _COLOURS.get(name, RED)


def shorten(name: str, limit: int = MAX_NAME) -> str:
    """Shorten a name to fit next to a plot; both of its ends remain."""
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"


@dataclass(frozen=True)
class Scale:
    """The range of one axis. Dates are microseconds since 1970."""

    low: float
    high: float
    log: bool = False
    dates: bool = False
    whole: bool = False
    """Whether only whole numbers are labelled"""
    ticks: tuple[Tick, ...] | None = None
    """Ticks to use instead of round values"""

    def place(self, values: Any) -> Floats:
        """Return the positions of values, 0 for the lowest and EXTENT for the highest."""
        numbers = np.asarray(values, dtype=float)
        low, high = self.low, self.high
        if self.log:
            numbers = np.log(np.where(numbers > 0, numbers, np.nan))
            low, high = math.log(low), math.log(high)
        return EXTENT * (numbers - low) / ((high - low) or 1.0)

    def find_value(self, share: float) -> float:
        """Return the value at a share of the axis, 0 for the lowest and 1 for the highest."""
        if self.log:
            return self.low * math.pow(self.high / self.low, share)
        return self.low + share * (self.high - self.low)

    def list_ticks(self, count: int) -> list[Tick]:
        """Return about `count` values with their labels, or the ticks that were set."""
        if self.ticks is not None:
            return list(self.ticks)
        if self.dates:
            return _list_dates(self.low, self.high, count)
        if self.log:
            return _list_decades(self.low, self.high, count)
        return _list_round(self.low, self.high, count, min_step=1.0 if self.whole else 0.0)


def cover(
    values: Iterable[float | None],
    *,
    zero: bool = False,
    log: bool = False,
    margin: float = 0.05,
) -> Scale:
    """Return a scale that covers the finite values; logarithmic, if allowed, where they are far
    apart. With `zero` it begins at zero."""
    array = np.array([v for v in values if v is not None], dtype=float)
    array = array[np.isfinite(array)]
    if not len(array):
        return Scale(0.0, 1.0)
    low, high = float(array.min()), float(array.max())
    if log and low > 0 and high > WIDE * low:
        room = (high / low) ** margin
        return Scale(low / room, high * room, log=True)
    if zero:
        return Scale(min(low, 0.0), high + margin * (high - min(low, 0.0)) or 1.0)
    room = margin * (high - low) or abs(low) * margin or 1.0
    return Scale(low - room, high + room)


def number_places(names: Sequence[str], *, limit: int = 12) -> Scale:
    """Return a scale of categories 0, 1, 2 ..., of which at most `limit` are named."""
    stride = max(-(-len(names) // limit), 1)
    ticks = tuple((float(i), names[i]) for i in range(0, len(names), stride))
    return Scale(-0.6, len(names) - 0.4, ticks=ticks)


def format_tick(value: float, step: float) -> str:
    """Format a value with as many decimals as its step needs."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{decimals}f}"


def _list_round(low: float, high: float, count: int, *, min_step: float = 0.0) -> list[Tick]:
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [(low, f"{low:.4g}")]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (factor * step) <= count)
    step = max(step, min_step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(n * step, format_tick(n * step, step)) for n in range(first, last + 1)]
    return ticks or [(low + span / 2, f"{low + span / 2:.6g}")]


def _list_decades(low: float, high: float, count: int) -> list[Tick]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        values = [f * 10.0**decade for decade in decades for f in factors]
        inside = [v for v in values if low <= v <= high]
        if len(inside) <= count:
            break
    if len(inside) < 2:  # a short axis, such as from 6 to 9
        return _list_round(low, high, count)
    stride = -(-len(inside) // count)
    return [(v, f"{v:g}") for v in inside[::stride]]


def _list_dates(low: float, high: float, count: int) -> list[Tick]:
    ends = np.array([low, high]).astype("datetime64[us]")
    for unit, size in DATE_STEPS:
        first, last = ends.astype(f"datetime64[{unit}]").astype(np.int64).tolist()
        first = first // size * size
        if (last - first) // size <= count:
            break
    steps = np.arange(first, last + 1, size).astype(f"datetime64[{unit}]")
    steps = steps[steps >= ends[0]] if (steps >= ends[0]).any() else ends[:1]
    values = steps.astype("datetime64[us]").astype(np.int64)
    return [(float(v), _format_date(date, unit)) for v, date in zip(values, steps, strict=True)]


def _format_date(date: np.datetime64, unit: str) -> str:
    """Format a date as its step needs: a year, a month, a day, or a time of day."""
    text = str(date.astype("datetime64[s]"))
    day, time = text.split("T")
    if unit in "Y":
        return day[:-6]
    if unit == "M":
        return day[:-3]
    if unit == "D" or time == "00:00:00":
        return day
    return time if unit == "s" else time[:5]


@dataclass(frozen=True)
class Lines:
    """Lines of one style, each a pair of x and y and interrupted where a value is not finite."""

    traces: Sequence[tuple[Any, Any]]
    colour: str
    width: float = 1.6
    dash: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Area:
    """The space between two lines over the same x."""

    x: Any
    low: Any
    high: Any
    colour: str
    opacity: float = 0.2


@dataclass(frozen=True)
class Boxes:
    """Rectangles, each from the first to the second x and y."""

    x: tuple[Any, Any]
    y: tuple[Any, Any]
    colour: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Dots:
    """Dots, squares or rings, whose size does not depend on that of the chart."""

    x: Any
    y: Any
    colour: str
    size: float = 6
    square: bool = False
    hollow: bool = False
    opacity: float = 1.0


Mark = Lines | Area | Boxes | Dots


class Note(NamedTuple):
    """A small text right of a point; left of it near the right edge."""

    x: float
    y: float
    text: str
    kind: str = ""
    """"tag": on a ground of its own"""


class LegendEntry(NamedTuple):
    """A shape ("line", "dash", "dot", "square hollow", "box", "full" ...), its colour and text."""

    shape: str
    colour: str
    text: str


@dataclass
class Chart:
    """Marks over a horizontal and a vertical scale, in the order in which they are drawn."""

    x: Scale
    y: Scale
    x_label: str = ""
    y_label: str = ""
    height: int = 190
    x_ticks: int = 6
    y_ticks: int = 5
    axis: int | None = None
    """Characters left of the chart for the labels; as many as the longest has, if None"""
    title: str = ""
    """Of a picture; a page has its own headings"""
    grid: str = "y"
    """The axis whose ticks have grid lines"""
    marks: list[Mark] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    legend: list[LegendEntry] = field(default_factory=list)

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
        self.marks.append(Lines([(x, y)], colour, width, dash, opacity))
        self.name("line" if not dash else "dash", colour, label)

    def lines(
        self,
        traces: Sequence[tuple[Any, Any]],
        colour: str,
        *,
        opacity: float = 1.0,
        label: str = "",
    ) -> None:
        """Draw many thin lines of one colour; each is a pair of x and y."""
        self.marks.append(Lines(traces, colour, 1, "", opacity))
        self.name("line", colour, label)

    def area(
        self, x: Any, low: Any, high: Any, colour: str, *, opacity: float = 0.2, label: str = ""
    ) -> None:
        """Fill the space between two lines."""
        self.marks.append(Area(x, low, high, colour, opacity))
        self.name("box", colour, label)

    def boxes(
        self, x: tuple[Any, Any], y: tuple[Any, Any], colour: str, *, opacity: float = 1.0
    ) -> None:
        """Fill rectangles, each from the first to the second x and y."""
        self.marks.append(Boxes(x, y, colour, opacity))

    def dots(
        self,
        x: Any,
        y: Any,
        colour: str,
        *,
        size: float = 6,
        square: bool = False,
        hollow: bool = False,
        opacity: float = 1.0,
        label: str = "",
    ) -> None:
        """Draw dots, squares or rings."""
        self.marks.append(Dots(x, y, colour, size, square, hollow, opacity))
        self.name(f"{'square' if square else 'dot'}{' hollow' * hollow}", colour, label)

    def hline(self, y: float, colour: str, *, dash: str = "", label: str = "") -> None:
        """Draw a level across the chart."""
        self.line([self.x.low, self.x.high], [y, y], colour, width=1.4, dash=dash, label=label)

    def vline(self, x: float, colour: str = MUTED, *, dash: str = "2 3", note: str = "") -> None:
        """Mark a value of the horizontal axis, with a note at the top."""
        self.line([x, x], [self.y.low, self.y.high], colour, width=1, dash=dash)
        if note:
            self.note(x, self.y.high, note)

    def note(self, x: float, y: float, text: str, *, kind: str = "") -> None:
        """Write a small text right of a point."""
        self.notes.append(Note(x, y, text, kind))

    def name(self, shape: str, colour: str, text: str) -> None:
        """Add an entry to the legend, if it has a text."""
        if text:
            self.legend.append(LegendEntry(shape, colour, text))

    def measure_axis(self) -> int:
        """Return the number of characters of the longest label left of the chart."""
        return max((len(text) for _, text in self.y.list_ticks(self.y_ticks)), default=0)

    def render(self) -> Markup:
        """Return the chart as HTML; templates/page.css has its styles."""
        ys, xs = self.y.list_ticks(self.y_ticks), self.x.list_ticks(self.x_ticks)
        down = [EXTENT - float(self.y.place(value)) for value, _ in ys]
        across = [float(self.x.place(value)) for value, _ in xs]
        grid = "".join(f"M0 {_round(top)}H{EXTENT}" for top in down if self.grid == "y")
        grid += "".join(f"M{_round(left)} 0V{EXTENT}" for left in across if self.grid == "x")
        width = self.measure_axis() if self.axis is None else self.axis
        scale = "".join(
            f'<span style="top:{_to_percent(top)}">{escape(text)}</span>'
            for top, (_, text) in zip(down, ys, strict=True)
        )
        below = "".join(
            f'<span style="left:{_to_percent(left)}">{escape(text)}</span>'
            for left, (_, text) in zip(across, xs, strict=True)
        )
        label = f'<span class="unit">{escape(self.y_label)}</span>' if self.y_label else ""
        entries = "".join(map(_render_entry, self.legend))
        marks = "".join(self._render_mark(mark) for mark in self.marks)
        notes = "".join(map(self._render_note, self.notes))
        parts = [
            f'<div class="chart" style="--axis:{width}ch;--height:{self.height}px">',
            f'<div class="legend">{label}{entries}</div>' if label or entries else "",
            f'<div class="frame"><div class="ys">{scale}</div><div class="plot">',
            f'<svg viewBox="0 0 {EXTENT} {EXTENT}" preserveAspectRatio="none" aria-hidden="true">',
            f'<path class="grid" d="{grid}"/>{marks}</svg>{notes}',
            f'</div><div class="xs">{below}</div></div>' if below else "</div></div>",
            f'<div class="x-label">{escape(self.x_label)}</div>' if self.x_label else "",
            "</div>",
        ]
        return Markup("".join(parts))

    def _render_mark(self, mark: Mark) -> str:
        match mark:
            case Lines():
                pieces = [piece for x, y in mark.traces for piece in self.trace(x, y)]
                style = f"stroke:{mark.colour};stroke-width:{mark.width:g}"
                style += f";stroke-dasharray:{mark.dash}" if mark.dash else ""
                style += f";stroke-opacity:{mark.opacity:g}" if mark.opacity < 1 else ""
                return f'<path d="{_format_path(pieces)}" style="{style}"/>'
            case Area():
                path = f"{_format_path(self.outline(mark))}Z"
                return f'<path d="{path}" style="{_fill(mark.colour, mark.opacity)}"/>'
            case Boxes():
                path = "".join(
                    f"M{_round(a)} {_round(d)}H{_round(b)}V{_round(c)}H{_round(a)}z"
                    for a, b, c, d in self.place_boxes(mark)
                )
                return f'<path d="{path}" style="{_fill(mark.colour, mark.opacity)}"/>'
            case Dots():
                ring = self._render_dots(mark, CARD, mark.size - 3) if mark.hollow else ""
                return self._render_dots(mark, mark.colour, mark.size) + ring

    def _render_dots(self, mark: Dots, colour: str, size: float) -> str:
        # a stroke without length keeps its shape when the chart is stretched
        path = "".join(
            f"M{_round(left)} {_round(top)}h0"
            for piece in self.trace(mark.x, mark.y)
            for left, top in piece
        )
        style = f"stroke:{colour};stroke-width:{size:g};"
        style += f"stroke-linecap:{'square' if mark.square else 'round'}"
        style += f";stroke-opacity:{mark.opacity:g}" if mark.opacity < 1 else ""
        return f'<path d="{path}" style="{style}"/>'

    def _render_note(self, note: Note) -> str:
        left, top = float(self.x.place(note.x)), EXTENT - float(self.y.place(note.y))
        turned = " left" if is_turned(left) else ""
        name = f"note{turned}{' ' if note.kind else ''}{note.kind}"
        style = f"left:{_to_percent(left)};top:{_to_percent(top)}"
        return f'<span class="{name}" style="{style}">{escape(note.text)}</span>'

    def trace(self, x: Any, y: Any) -> list[list[tuple[float, float]]]:
        """Return the positions of points, in pieces that end where a value is not finite."""
        across = np.atleast_1d(self.x.place(x)).tolist()
        down = np.atleast_1d(EXTENT - self.y.place(y)).tolist()
        pieces: list[list[tuple[float, float]]] = [[]]
        for left, top in zip(across, down, strict=True):
            if left - left != 0 or top - top != 0:  # not finite
                pieces.append([])
            else:
                pieces[-1].append((left, top))
        return [piece for piece in pieces if piece]

    def outline(self, area: Area) -> list[list[tuple[float, float]]]:
        """Return the positions around an area."""
        ends = np.concatenate([np.asarray(area.x), np.asarray(area.x)[::-1]])
        edge = np.concatenate([np.asarray(area.high), np.asarray(area.low)[::-1]])
        return self.trace(ends, edge)

    def place_boxes(self, boxes: Boxes) -> Iterable[tuple[float, float, float, float]]:
        """Yield left, right, bottom and top of each rectangle."""
        left, right = (np.atleast_1d(self.x.place(ends)) for ends in boxes.x)
        low, high = (np.atleast_1d(EXTENT - self.y.place(ends)) for ends in boxes.y)
        shape = np.broadcast_shapes(left.shape, right.shape, low.shape, high.shape)
        edges = (np.broadcast_to(ends, shape).tolist() for ends in (left, right, low, high))
        return zip(*edges, strict=True)


def is_turned(left: float) -> bool:
    """Whether a note at this position is written left of its point, since it is near the edge."""
    return left > 0.85 * EXTENT


def _format_path(pieces: Iterable[Points]) -> str:
    return "".join(
        f"{'ML'[number > 0]}{_round(left)} {_round(top)}"
        for piece in pieces
        for number, (left, top) in enumerate(piece)
    )


def _round(position: float) -> str:
    return f"{position:.1f}".removesuffix(".0")


def _to_percent(position: float) -> str:
    return f"{position / (EXTENT / 100):.2f}%"


def _fill(colour: str, opacity: float) -> str:
    return f"fill:{colour};fill-opacity:{opacity:g}" if opacity < 1 else f"fill:{colour}"


def _render_entry(entry: LegendEntry) -> str:
    mark = f'<i class="{entry.shape}" style="--colour:{entry.colour}"></i>'
    return f"<span>{mark}{escape(entry.text)}</span>"


def render_bars(
    rows: Sequence[tuple[str, float, str]],
    *,
    colour: str | Sequence[str] = MODEL,
    limit: float | None = None,
) -> Markup:
    """Return horizontal bars as HTML, each with its name and its value in words, in one colour or
    each in its own; `limit` is the value of a bar that fills the width, by default the largest."""
    colours = [colour] * len(rows) if isinstance(colour, str) else colour
    longest = limit or max((value for _, value, _ in rows), default=0.0) or 1.0
    lines = "".join(
        f'<span class="name" title="{escape(name)}">{escape(name)}</span><span class="bar">'
        f'<i style="width:{100 * max(value, 0.0) / longest:.2f}%;background:{own}"></i></span>'
        f'<span class="value">{escape(text)}</span>'
        for (name, value, text), own in zip(rows, colours, strict=True)
    )
    return Markup(f'<div class="bars">{lines}</div>')


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
SIZE, TITLE_SIZE = 12, 14
"""Of letters in a picture, in pixels"""
CHARACTER = 0.56
"""The usual width of a character, in heights of a letter"""
LINE, MARGIN, BETWEEN = 18, 14, 26
"""Pixels of a line of text, around a picture, and between charts beside each other"""
KEY = 22
"""Pixels of the shape in a legend"""
SMOOTHING = 3
"""Pixels are drawn this many times as fine, then averaged"""


class Canvas(Protocol):
    """A surface to draw on, in pixels from the upper left."""

    def draw_lines(
        self, traces: Sequence[Points], colour: str, width: float, dash: str, opacity: float
    ) -> None: ...

    def fill(self, polygons: Sequence[Points], colour: str, opacity: float) -> None: ...

    def draw_dots(
        self, points: Points, colour: str, size: float, *, square: bool, opacity: float
    ) -> None: ...

    def write(
        self, x: float, y: float, text: str, colour: str, *, size: int = SIZE, anchor: str = "start"
    ) -> None:
        """Write text whose middle is at y and whose start, middle or end is at x."""
        ...


def render_svg(charts: Sequence[Chart], *, width: int = 900, columns: int = 1) -> str:
    """Return a picture of charts as an SVG file."""
    size = width, _measure_picture(charts, width, columns)
    canvas = SvgCanvas(*size)
    _paint(canvas, charts, size, columns)
    return canvas.finish()


def render_png(charts: Sequence[Chart], *, width: int = 900, columns: int = 1) -> bytes:
    """Return a picture of charts as a PNG file; needs Pillow, which the extras of trackers have."""
    size = width, _measure_picture(charts, width, columns)
    canvas = PixelCanvas(*size)
    _paint(canvas, charts, size, columns)
    return canvas.finish()


def _paint(canvas: Canvas, charts: Sequence[Chart], size: tuple[int, int], columns: int) -> None:
    """Draw charts in rows of `columns`; each row is as high as its highest chart."""
    width, height = size
    canvas.fill([[(0, 0), (width, 0), (width, height), (0, height)]], CARD, 1.0)
    column_width = _measure_column(width, columns)
    top = float(MARGIN)
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        for number, chart in enumerate(row):
            _Painter(
                canvas, chart, MARGIN + number * (column_width + BETWEEN), top, column_width
            ).paint()
        top += max(_measure_chart(chart, column_width) for chart in row) + MARGIN


def _measure_picture(charts: Sequence[Chart], width: int, columns: int) -> int:
    column_width = _measure_column(width, columns)
    rows = [charts[first : first + columns] for first in range(0, len(charts), columns)]
    return MARGIN + sum(max(_measure_chart(c, column_width) for c in row) + MARGIN for row in rows)


def _measure_column(width: int, columns: int) -> float:
    return (width - 2 * MARGIN - (columns - 1) * BETWEEN) / columns


def _measure_chart(chart: Chart, width: float) -> int:
    """Return the height of a chart with its title, legend and labels."""
    height = chart.height + LINE * len(_wrap_legend(chart, width)) + 8
    height += (LINE + 4) * bool(chart.title) + LINE * bool(chart.x_label)
    return height + LINE * bool(chart.x.list_ticks(chart.x_ticks))


def _measure_text(text: str, size: int = SIZE) -> float:
    return CHARACTER * size * len(text)


def _wrap_legend(chart: Chart, width: float) -> list[list[LegendEntry]]:
    """Return the entries of a legend in lines, the label of the vertical axis first."""
    entries = [LegendEntry("", INK, chart.y_label)] if chart.y_label else []
    lines: list[list[LegendEntry]] = []
    left = width
    for entry in [*entries, *chart.legend]:
        size = _measure_entry(entry)
        if left + size > width:
            lines.append([])
            left = 0.0
        lines[-1].append(entry)
        left += size
    return lines


def _measure_entry(entry: LegendEntry) -> float:
    return (KEY if entry.shape else 0) + _measure_text(entry.text) + 14


class _Painter:
    """Draws one chart of a picture."""

    def __init__(self, canvas: Canvas, chart: Chart, left: float, top: float, width: float) -> None:
        self.canvas, self.chart, self.left, self.top, self.width = canvas, chart, left, top, width
        longest = max((text for _, text in chart.y.list_ticks(chart.y_ticks)), key=len, default="")
        self.axis = _measure_text(longest) + 8 if longest else 0.0
        self.legend = _wrap_legend(chart, width)
        above = (LINE + 4) * bool(chart.title) + LINE * len(self.legend) + 8
        self.x0, self.y0 = left + self.axis, top + above
        self.x_size, self.y_size = width - self.axis - 8, float(chart.height)

    def paint(self) -> None:
        """Draw the title, the legend, both axes, the marks and the notes."""
        chart, line = self.chart, self.top
        if chart.title:
            middle = line + LINE / 2
            self.canvas.write(self.left, middle, chart.title, INK, size=TITLE_SIZE)
            line += LINE + 4
        for entries in self.legend:
            self._write_legend(entries, line + LINE / 2)
            line += LINE
        self._draw_axes()
        for mark in chart.marks:
            self._draw_mark(mark)
        for note in chart.notes:
            self._write_note(note)

    def _scale(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return positions of the chart in pixels."""
        return [
            (self.x0 + left * self.x_size / EXTENT, self.y0 + top * self.y_size / EXTENT)
            for left, top in points
        ]

    def _draw_axes(self) -> None:
        chart, canvas = self.chart, self.canvas
        below = self.y0 + self.y_size + LINE / 2 + 3
        for value, text in chart.y.list_ticks(chart.y_ticks):
            ends = [(0.0, EXTENT - float(chart.y.place(value)))] * 2
            (x, y), end = self._scale([ends[0], (EXTENT, ends[1][1])])
            if chart.grid == "y":
                canvas.draw_lines([[(x, y), end]], GRID, 1, "", 1.0)
            canvas.write(self.x0 - 8, y, text, MUTED, anchor="end")
        for value, text in chart.x.list_ticks(chart.x_ticks):
            left = float(chart.x.place(value))
            ends = self._scale([(left, 0.0), (left, EXTENT)])
            if chart.grid == "x":
                canvas.draw_lines([ends], GRID, 1, "", 1.0)
            canvas.write(ends[0][0], below, text, MUTED, anchor="middle")
        if chart.x_label:
            middle = self.x0 + self.x_size / 2
            canvas.write(middle, below + LINE, chart.x_label, MUTED, anchor="middle")

    def _write_legend(self, entries: Sequence[LegendEntry], middle: float) -> None:
        left, canvas = self.left, self.canvas
        for entry in entries:
            self._draw_key(entry, left, middle)
            shift = KEY if entry.shape else 0
            canvas.write(left + shift, middle, entry.text, MUTED if entry.shape else INK)
            left += _measure_entry(entry)

    def _draw_key(self, entry: LegendEntry, left: float, y: float) -> None:
        """Draw the shape of an entry, 16 pixels wide."""
        canvas, colour = self.canvas, entry.colour
        match entry.shape.split():
            case ["line" | "dash" as shape, *_]:
                dash = "4 3" if shape == "dash" else ""
                canvas.draw_lines([[(left, y), (left + 16, y)]], colour, 2, dash, 1.0)
            case ["dot" | "square" as shape, *kinds]:
                square = shape == "square"
                canvas.draw_dots([(left + 8, y)], colour, 9, square=square, opacity=1.0)
                if "hollow" in kinds:
                    canvas.draw_dots([(left + 8, y)], CARD, 5, square=square, opacity=1.0)
            case ["box" | "full" as shape, *kinds]:
                opacity = 1.0 if shape == "full" else 0.75 if "inner" in kinds else 0.4
                corners = [(left, y - 5), (left + 14, y - 5), (left + 14, y + 5), (left, y + 5)]
                canvas.fill([corners], colour, opacity)

    def _draw_mark(self, mark: Mark) -> None:
        chart, canvas = self.chart, self.canvas
        match mark:
            case Lines():
                pieces = [self._scale(p) for x, y in mark.traces for p in chart.trace(x, y)]
                canvas.draw_lines(pieces, mark.colour, mark.width, mark.dash, mark.opacity)
            case Area():
                pieces = [self._scale(piece) for piece in chart.outline(mark)]
                canvas.fill(pieces, mark.colour, mark.opacity)
            case Boxes():
                boxes = [
                    self._scale([(a, d), (b, d), (b, c), (a, c)])
                    for a, b, c, d in chart.place_boxes(mark)
                ]
                canvas.fill(boxes, mark.colour, mark.opacity)
            case Dots():
                points = [p for piece in chart.trace(mark.x, mark.y) for p in self._scale(piece)]
                square, opacity = mark.square, mark.opacity
                canvas.draw_dots(points, mark.colour, mark.size, square=square, opacity=opacity)
                if mark.hollow:
                    canvas.draw_dots(points, CARD, mark.size - 3, square=square, opacity=opacity)

    def _write_note(self, note: Note) -> None:
        left, top = float(self.chart.x.place(note.x)), EXTENT - float(self.chart.y.place(note.y))
        ((x, y),) = self._scale([(left, top)])
        turned = is_turned(left)
        if note.kind == "tag":
            size = _measure_text(note.text) + 4
            begin = x - size - 4 if turned else x + 2
            corners = [(begin, y - 8), (begin + size, y - 8), (begin + size, y + 8), (begin, y + 8)]
            self.canvas.fill([corners], CARD, 0.85)
        x += -4 if turned else 4
        self.canvas.write(x, y, note.text, MUTED, anchor="end" if turned else "start")


class SvgCanvas:
    """Writes the elements of an SVG file."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.elements: list[str] = []

    def draw_lines(
        self, traces: Sequence[Points], colour: str, width: float, dash: str, opacity: float
    ) -> None:
        style = f'fill="none" stroke="{_get_hex(colour)}" stroke-width="{width:g}"'
        style += f' stroke-dasharray="{dash}"' if dash else ""
        style += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
        self.elements.append(f'<path d="{_format_path(traces)}" {style}/>')

    def fill(self, polygons: Sequence[Points], colour: str, opacity: float) -> None:
        path = "".join(f"{_format_path([polygon])}z" for polygon in polygons)
        style = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        self.elements.append(f'<path d="{path}" fill="{_get_hex(colour)}"{style}/>')

    def draw_dots(
        self, points: Points, colour: str, size: float, *, square: bool, opacity: float
    ) -> None:
        path = "".join(f"{_format_path([[point]])}h0" for point in points)
        style = f'stroke="{_get_hex(colour)}" stroke-width="{size:g}"'
        style += f' stroke-linecap="{"square" if square else "round"}"'
        style += f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
        self.elements.append(f'<path d="{path}" {style}/>')

    def write(
        self, x: float, y: float, text: str, colour: str, *, size: int = SIZE, anchor: str = "start"
    ) -> None:
        weight = ' font-weight="600"' if size > SIZE else ""
        # a baseline in the middle is not known to every viewer
        place = f'x="{_round(x)}" y="{_round(y + 0.36 * size)}"'
        style = f'font-size="{size}"{weight} fill="{_get_hex(colour)}" text-anchor="{anchor}"'
        self.elements.append(f"<text {place} {style}>{escape_xml(text)}</text>")

    def finish(self) -> str:
        """Return the file."""
        size = f'width="{self.width}" height="{self.height}"'
        view = f'viewBox="0 0 {self.width} {self.height}" font-family="{FONT}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">'
        return f"{head}{''.join(self.elements)}</svg>\n"


class PixelCanvas:
    """Draws pixels with Pillow, finer than they are shown, for smooth edges."""

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image

        self.size = width, height
        self.image = Image.new("RGBA", (SMOOTHING * width, SMOOTHING * height), "white")

    def _composite(self, colour: str, opacity: float, paint: Any) -> None:
        """Draw shapes of one colour, which do not add up where they overlap."""
        from PIL import Image, ImageDraw

        mask = Image.new("L", self.image.size, 0)
        paint(ImageDraw.Draw(mask), round(255 * opacity))
        self.image.paste(_get_hex(colour), mask=mask)

    def draw_lines(
        self, traces: Sequence[Points], colour: str, width: float, dash: str, opacity: float
    ) -> None:
        pieces: list[Points] = [_enlarge(trace) for trace in traces]
        if dash:
            pattern = [SMOOTHING * float(length) for length in dash.split()]
            pieces = [dashed for piece in pieces for dashed in _cut(piece, pattern)]

        def paint(draw: Any, level: int) -> None:
            for piece in pieces:
                draw.line(piece, fill=level, width=round(SMOOTHING * width), joint="curve")

        self._composite(colour, opacity, paint)

    def fill(self, polygons: Sequence[Points], colour: str, opacity: float) -> None:
        def paint(draw: Any, level: int) -> None:
            for polygon in polygons:
                if len(polygon) > 1:
                    draw.polygon(_enlarge(polygon), fill=level)

        self._composite(colour, opacity, paint)

    def draw_dots(
        self, points: Points, colour: str, size: float, *, square: bool, opacity: float
    ) -> None:
        half = SMOOTHING * size / 2

        def paint(draw: Any, level: int) -> None:
            for x, y in _enlarge(points):
                edges = (x - half, y - half, x + half, y + half)
                (draw.rectangle if square else draw.ellipse)(edges, fill=level)

        self._composite(colour, opacity, paint)

    def write(
        self, x: float, y: float, text: str, colour: str, *, size: int = SIZE, anchor: str = "start"
    ) -> None:
        from PIL import ImageDraw

        font = _load_font(SMOOTHING * size)
        side = {"start": "l", "middle": "m", "end": "r"}[anchor]
        place = SMOOTHING * x, SMOOTHING * y
        ImageDraw.Draw(self.image).text(
            place, text, fill=_get_hex(colour), font=font, anchor=f"{side}m"
        )

    def finish(self) -> bytes:
        """Return the file."""
        file = io.BytesIO()
        self.image.convert("RGB").reduce(SMOOTHING).save(file, "PNG")
        return file.getvalue()


def _load_font(size: int) -> Any:
    """Return a font with most alphabets if the machine has it, else Pillow's own."""
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _get_hex(colour: str) -> str:
    return PALETTE.get(colour, colour)


def _enlarge(points: Points) -> list[tuple[float, float]]:
    return [(SMOOTHING * x, SMOOTHING * y) for x, y in points]


def _cut(points: Points, pattern: Sequence[float]) -> list[Points]:
    """Return the dashes of a line: of its length, every other stretch of the pattern."""
    dashes: list[Points] = []
    dash, part, left = [points[0]], 0, pattern[0]
    for (x, y), (to_x, to_y) in itertools.pairwise(points):
        length, done = math.hypot(to_x - x, to_y - y), 0.0
        while length - done > left:
            done += left
            point = x + (to_x - x) * done / length, y + (to_y - y) * done / length
            if part % 2 == 0:
                dashes.append([*dash, point])
            dash, part = [point], part + 1
            left = pattern[part % len(pattern)]
        left -= length - done
        dash.append((to_x, to_y))
    return [*dashes, dash] if part % 2 == 0 else dashes


def thin(columns: Sequence[Array], limit: int) -> Array:
    """Return at most `limit` rows to draw: the known extremes of every column in each interval, and
    both ends, so that all columns of a series span the same time."""
    rows = len(columns[0])
    if rows <= limit:
        return np.arange(rows)
    size = -(-rows // max((limit - 2) // (2 * len(columns)), 1))
    buckets = np.minimum(np.arange(-(-rows // size) * size), rows - 1).reshape(-1, size)
    extremes = [
        find(np.where(np.isnan(column), unknown, column)[buckets], axis=1)
        for column in columns
        for find, unknown in ((np.argmin, np.inf), (np.argmax, -np.inf))
    ]
    retained = [buckets[np.arange(len(buckets)), places] for places in extremes]
    return np.unique(np.concatenate([*retained, [0, rows - 1]]))


def find_gaps(x: Array) -> Array:
    """Number the stretches of rows that follow each other in the usual step."""
    steps = np.diff(x)
    return np.concatenate([[0], np.cumsum(steps > GAP * np.median(steps))])


def interrupt(
    x: Array, values: Array, stretches: Array, windows: Array | None
) -> tuple[Array, Array]:
    """Insert points that interrupt the lines: all lines at a gap, and between windows all but the
    first, the true values."""
    gap = np.flatnonzero(np.diff(stretches)) + 1
    joint = np.empty(0, dtype=int)
    if windows is not None:
        joint = np.setdiff1d(np.flatnonzero(np.diff(windows)) + 1, gap)
    rows = np.concatenate([gap, joint]).astype(int)
    inserted = np.full((len(values), len(rows)), np.nan)
    inserted[0, len(gap) :] = values[0, joint]  # the true values are one line
    order = np.argsort(rows, kind="stable")
    rows, inserted = rows[order], inserted[:, order]
    return np.insert(x, rows, x[rows]), np.insert(values, rows, inserted, axis=1)


def round_values(values: Array, *, decimals: int | None = None) -> list[float | None]:
    """Round to what can be seen, with whole numbers as such and None where nothing is known."""
    if decimals is None:
        finite = values[np.isfinite(values)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        decimals = SIGNIFICANT - 1 - int(np.floor(np.log10(span or 1.0)))
    rounded = np.round(np.where(np.isfinite(values), values, np.nan), decimals).tolist()
    return [
        None if v != v else int(v) if abs(v) < MAX_EXACT and v == int(v) else v for v in rounded
    ]
