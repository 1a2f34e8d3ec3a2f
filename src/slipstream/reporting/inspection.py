"""Writes the page about files that were inspected: columns with a plot each, problems, a config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from slipstream.reporting.plots.chart import MODEL, Chart
from slipstream.reporting.plots.scale import Scale, cover
from slipstream.reporting.template import render_page, write_page

Floats = npt.NDArray[np.float64]
HEIGHT = 110


class Course(NamedTuple):
    """A column's values over the rows, of every stretch of `stride` rows."""

    stride: int
    low: Floats
    high: Floats
    mean: Floats


def render_inspection(result: Mapping[str, Any], courses: Mapping[str, Course]) -> str:
    """Render the page."""
    plots = {name: draw_course(course) for name, course in courses.items()}
    return render_page("inspection.html", result=result, plots=plots)


def write_inspection(path: Path, result: Mapping[str, Any], courses: Mapping[str, Course]) -> Path:
    """Write a self-contained page."""
    return write_page(path, render_inspection(result, courses))


def draw_course(course: Course) -> Markup:
    """Draw the mean over the rows, within the range of each stretch."""
    rows = (np.arange(len(course.mean)) + 0.5) * course.stride
    known = ~np.isnan(course.mean)
    x = Scale(0.0, float(max(len(course.mean) * course.stride, 1)), whole=True)
    y = cover([*course.low[known], *course.high[known]])
    chart = Chart(x, y, "row", "", HEIGHT, y_ticks=3)
    if course.stride > 1:
        chart.area(rows[known], course.low[known], course.high[known], MODEL)
    chart.line(rows, course.mean, MODEL, width=1.2)
    return chart.render()
