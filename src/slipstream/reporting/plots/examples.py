"""Predicted and true values: series that can be zoomed, and single forecasts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from slipstream.base.text import escape_to_line, format_number
from slipstream.reporting.plots.chart import INK, MODEL, MUTED, RED, Chart, shorten
from slipstream.reporting.plots.predictions import (
    MICROSECONDS,
    Array,
    Chosen,
    Predictions,
    choose_ranked,
    compute_series_errors,
    compute_window_errors,
    find_gaps,
    interrupt,
    lay_end_to_end,
    round_values,
    thin,
)
from slipstream.reporting.plots.scale import Scale, cover
from slipstream.reporting.wording import add_unit, find_unit, format_moment

MAX_NUMBERS = 40_000
"""Numbers in all zoomable plots together, five or six bytes each"""
MAX_WINDOW_TARGETS = 3
OPEN_TARGETS = 2
"""Targets of a series whose plots are visible at once; the others are folded away"""


@dataclass(frozen=True)
class SeriesExample:
    """A series that the page draws: its heading and the plots of its targets."""

    title: str
    note: str
    plots: list[dict[str, Any]]
    """Title and number of each target's plot"""
    more: list[dict[str, Any]]
    """Those that are folded away"""


@dataclass(frozen=True)
class ExamplePlots:
    """All examples of a run."""

    series: list[SeriesExample]
    windows: list[tuple[str, list[tuple[str, Markup]]]]
    """Single forecasts: a heading, and a titled chart for each target"""
    data: str
    """What the script draws, as JSON that is safe inside a page"""


def draw_examples(predictions: Predictions, targets: Sequence[str]) -> ExamplePlots:
    """Draw the worst, the median and the best series, and likewise single forecasts."""
    errors, windows = predictions.compute_errors(targets), predictions.find_windows()
    by_series = compute_series_errors(predictions, errors)
    chosen = choose_ranked(by_series)
    columns = 3 + 2 * len(predictions.find_bands(targets[0]))
    most = MAX_NUMBERS // (columns * len(chosen) * len(targets))
    series: list[SeriesExample] = []
    payload: list[dict[str, Any]] = []
    for one in chosen:
        example, values = _draw_series(predictions, targets, one, windows, most=most)
        places = [
            {"title": plot["title"], "number": len(payload) + i} for i, plot in enumerate(values)
        ]
        payload += values
        shared = example.title, example.note
        series.append(SeriesExample(*shared, places[:OPEN_TARGETS], places[OPEN_TARGETS:]))
    singles = []
    if predictions.is_forecast and np.diff(windows).max() > 1:
        ranked = choose_ranked(compute_window_errors(windows, errors))
        singles = [_draw_window(predictions, targets, one, windows) for one in ranked]
    return ExamplePlots(series, singles, to_safe_json(payload))


def to_safe_json(value: Any) -> str:
    """Return JSON that cannot end the <script> element that it is in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _draw_series(
    predictions: Predictions, targets: Sequence[str], one: Chosen, windows: Array, *, most: int
) -> tuple[SeriesExample, list[dict[str, Any]]]:
    name = predictions.names[one.number]
    total = int((predictions.codes[windows[:-1]] == one.number).sum())
    picked = lay_end_to_end(predictions, windows, one.number)
    lengths = np.diff(windows)[picked]
    rows = np.concatenate([np.arange(windows[n], windows[n + 1]) for n in picked])
    owner = np.repeat(np.arange(len(picked)), lengths)
    x = predictions.read_x()[rows]
    order = np.argsort(x, kind="stable")
    rows, owner, x = rows[order], owner[order], x[order]
    plots = []
    for target in targets:
        plot = _collect(predictions, target, rows, (x, owner), most)
        error = np.abs(predictions[f"{target}_predicted"][rows] - predictions[target][rows]).mean()
        size = add_unit(format_number(float(error)), find_unit(target))
        where = " of what is drawn" if len(picked) < total else ""
        title = f"{target} · mean absolute error{where} {size}"
        plots.append({"title": title, "group": one.number, **plot})
    heading = f"{one.rank.capitalize()} series: {name}" if one.rank else f"Series: {name}"
    note = _describe_windows(predictions, len(picked), total, int(lengths.max()))
    if plots and len(plots[0]["x"]) < len(rows):
        note += f" Of {len(rows):,} rows, the extremes of every stretch are drawn."
    return SeriesExample(heading, note, [], []), plots


def _describe_windows(predictions: Predictions, count: int, total: int, length: int) -> str:
    """Say which windows of a series are drawn."""
    if not predictions.is_forecast:
        return f"Every one of {total:,} test windows, each estimating its last row."
    if length == 1:
        return f"Every one of {total:,} test windows, each forecasting one row."
    return (
        f"{count:,} of {total:,} test windows, end to end without overlap: no row is forecast "
        f"twice, each 1 to {length} rows ahead."
    )


def _collect(
    predictions: Predictions, target: str, rows: Array, at: tuple[Array, Array], most: int
) -> dict[str, Any]:
    """Collect the values of one plot, thinned and rounded; None interrupts a line."""
    x, owner = at
    truth, predicted = predictions[target][rows], predictions[f"{target}_predicted"][rows]
    retained = thin([truth, predicted - truth], most)
    bands = predictions.find_bands(target)
    columns = [
        truth,
        predicted,
        *(predictions[name][rows] for b in bands for name in (b.low, b.high)),
    ]
    values = np.stack([column[retained] for column in columns])
    place, window = x[retained], owner[retained]
    forecast = predictions.is_forecast and len(rows) > owner[-1] + 1
    gaps = find_gaps(x)[retained] if len(x) > 2 else np.zeros(len(place), dtype=bool)
    place, values = interrupt(place, values, gaps, window if forecast else None)
    if predictions.has_dates:
        place = place / MICROSECONDS
    steps = np.diff(place, prepend=0.0)
    lists = [round_values(column) for column in values]
    return {
        "dates": predictions.has_dates,
        "xName": predictions.x_name,
        "unit": escape_to_line(find_unit(target)),
        "x": round_values(steps, decimals=3),
        "true": lists[0],
        "predicted": lists[1],
        "bands": [
            {"label": band.label, "low": low, "high": high}
            for band, low, high in zip(bands, lists[2::2], lists[3::2], strict=True)
        ],
    }


def _draw_window(
    predictions: Predictions, targets: Sequence[str], one: Chosen, windows: Array
) -> tuple[str, list[tuple[str, Markup]]]:
    begin, end = int(windows[one.number]), int(windows[one.number + 1])
    rows, row = slice(begin, end), predictions["row"]
    first = int(row[begin])
    # the past, as far as the first rows of other windows show it
    before = (predictions.codes == predictions.codes[begin]) & (predictions["step"] == 1)
    before &= (row < first) & (row >= first - max(end - begin, 24))
    past = np.flatnonzero(before)
    past = past[np.argsort(row[past], kind="stable")]
    series = shorten(predictions.names[predictions.codes[begin]], 40)
    x = predictions.read_x()[begin]
    place = format_moment(x, predictions.has_dates)
    place = place if predictions.has_dates else f"{predictions.x_name} {place}"
    rank = f"{one.rank.capitalize()} of {len(windows) - 1:,} windows" if one.rank else "The window"
    charts = [
        _draw_forecast(predictions, target, rows, past) for target in targets[:MAX_WINDOW_TARGETS]
    ]
    return f"{rank}: {series}, from {place}", charts


def _draw_forecast(
    predictions: Predictions, target: str, rows: slice, past: Array
) -> tuple[str, Markup]:
    truth, predicted = predictions[target], predictions[f"{target}_predicted"][rows]
    every, bands = predictions.read_x(), predictions.find_bands(target)
    x, earlier = every[rows], every[past]
    edges = [predictions[name][rows] for band in bands for name in (band.low, band.high)]
    y = cover(np.concatenate([truth[rows], truth[past], predicted, *edges]).tolist())
    ends = float(min([x[0], *earlier[:1]])), float(x[-1])
    scale = Scale(*ends, dates=predictions.has_dates)
    chart = Chart(replace(scale, ticks=()), y, "", "", 150)
    for band, low, high in zip(bands, edges[::2], edges[1::2], strict=True):
        chart.area(x, low, high, MODEL, opacity=0.2)
        chart.name("box" if band is bands[0] else "box inner", MODEL, band.label)
    if len(past):
        joined = [*earlier, x[0]], [*truth[past], truth[rows][0]]
        chart.line(*joined, MUTED, width=1.2, label="before")
    chart.line(x, truth[rows], INK, width=1.4, label="true")
    chart.line(x, predicted, MODEL, width=2, label="predicted")
    error = predicted - truth[rows]
    below = Chart(scale, cover([0.0, *error.tolist()]), predictions.x_name, "", 56)
    below.x_ticks, below.y_ticks = 3 if scale.dates else 5, 3
    below.area(x, np.zeros(len(x)), error, RED)
    below.line(x, error, RED, width=1.3)
    chart.name("line", RED, "error, below")
    size = add_unit(format_number(float(np.abs(error).mean()), figures=3), find_unit(target))
    # one width for the labels of both, so that their rows are above each other
    chart.axis = below.axis = max(chart.measure_axis(), below.measure_axis())
    return f"{target} · mean absolute error {size}", chart.render() + below.render()
