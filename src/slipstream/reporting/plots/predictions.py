"""Plots of predictions: series and single forecasts beside the truth, errors by horizon, by series
and their distribution, and how a classifier confuses classes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from slipstream.base.text import escape_to_line, format_number
from slipstream.data.predictions import ROW, STEP, Predictions, chain_windows
from slipstream.reporting.charts import (
    CYCLE,
    INK,
    MODEL,
    MUTED,
    RED,
    SKY,
    Array,
    Chart,
    Scale,
    cover,
    find_gaps,
    get_colour,
    interrupt,
    render_bars,
    round_values,
    shorten,
    thin,
)
from slipstream.reporting.wording import (
    add_unit,
    choose_layout,
    find_unit,
    format_moment,
    format_time,
)
from slipstream.runs.summary import ByStep, Metrics, RunSummary

MAX_NUMBERS = 40_000
"""Numbers in all zoomable plots together, five or six bytes each"""
MAX_WINDOW_TARGETS = 3
OPEN_TARGETS = 2
"""Targets of a series whose plots are visible at once; the others are folded away"""
MAX_BARS = 24
"""Series of which the error is drawn"""
CELLS, SHADES, BARS = 40, 5, 41
MAX_NAMED, MAX_COUNTED, MATRIX_SHADES = 10, 12, 8
"""Of a matrix of classes: names beside a shaded one, classes of one with counts, and shades"""
MAX_LINES = 4


class Chosen(NamedTuple):
    """A series or a window that is drawn, with its rank among the others."""

    rank: str
    """worst, median or best; empty where there is only one"""
    number: int


@dataclass(frozen=True)
class SeriesExample:
    """A series that the page draws: its heading and the plots of its targets."""

    title: str
    note: str
    plots: list[dict[str, Any]]
    """Title and number of each target's plot"""
    more: list[dict[str, Any]]
    """The plots that are folded away"""


@dataclass(frozen=True)
class ExamplePlots:
    """All examples of a run."""

    series: list[SeriesExample]
    windows: list[tuple[str, list[tuple[str, Markup]]]]
    """Single forecasts: a heading, and a titled chart for each target"""
    data: str
    """The zoomable plots, as JSON that is safe inside a page"""


def draw_examples(predictions: Predictions, targets: Sequence[str]) -> ExamplePlots:
    """Draw the worst, the median and the best series, and likewise single forecasts."""
    errors, windows = predictions.compute_errors(targets), predictions.find_windows()
    by_series = compute_series_errors(predictions, errors)
    chosen = choose_ranked(by_series)
    columns = 3 + 2 * len(predictions.shape.find_bands(targets[0]))
    limit = MAX_NUMBERS // (columns * len(chosen) * len(targets))
    series: list[SeriesExample] = []
    payload: list[dict[str, Any]] = []
    for choice in chosen:
        example, values = _draw_series(predictions, targets, choice, windows, limit=limit)
        places = [
            {"title": plot["title"], "number": len(payload) + i} for i, plot in enumerate(values)
        ]
        payload += values
        shared = example.title, example.note
        series.append(SeriesExample(*shared, places[:OPEN_TARGETS], places[OPEN_TARGETS:]))
    singles = []
    if predictions.shape.is_forecast and np.diff(windows).max() > 1:
        ranked = choose_ranked(compute_window_errors(windows, errors))
        singles = [_draw_window(predictions, targets, choice, windows) for choice in ranked]
    return ExamplePlots(series, singles, to_safe_json(payload))


def to_safe_json(value: Any) -> str:
    """Return JSON that cannot end the <script> element that it is in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _draw_series(
    predictions: Predictions, targets: Sequence[str], choice: Chosen, windows: Array, *, limit: int
) -> tuple[SeriesExample, list[dict[str, Any]]]:
    name = predictions.names[choice.number]
    total = int((predictions.codes[windows[:-1]] == choice.number).sum())
    picked = lay_end_to_end(predictions, windows, choice.number)
    lengths = np.diff(windows)[picked]
    before = np.cumsum(lengths) - lengths
    rows = np.repeat(windows[picked] - before, lengths) + np.arange(lengths.sum())
    owner = np.repeat(np.arange(len(picked)), lengths)
    x = predictions.read_x()[rows]
    order = np.argsort(x, kind="stable")
    rows, owner, x = rows[order], owner[order], x[order]
    plots = []
    for target in targets:
        plot = _collect(predictions, target, rows, x, owner, limit=limit)
        error = _average(np.abs(predictions.read_errors(target)[rows]))
        size = add_unit(format_number(error), find_unit(target))
        where = " of what is drawn" if len(picked) < total else ""
        title = f"{target} · mean absolute error{where} {size}"
        plots.append({"title": title, "group": choice.number, **plot})
    heading = f"{choice.rank.capitalize()} series: {name}" if choice.rank else f"Series: {name}"
    note = _describe_windows(predictions, len(picked), total, int(lengths.max()))
    if plots and len(plots[0]["steps"]) < len(rows):
        note += f" Of {len(rows):,} rows, the extremes of every stretch are drawn."
    return SeriesExample(heading, note, [], []), plots


def _describe_windows(predictions: Predictions, count: int, total: int, length: int) -> str:
    """Say which windows of a series are drawn."""
    if not predictions.shape.is_forecast:
        return f"Every one of {total:,} test windows, each estimating its last row."
    if length == 1:
        return f"Every one of {total:,} test windows, each forecasting one row."
    return (
        f"{count:,} of {total:,} test windows, end to end without overlap: no row is forecast "
        f"twice, each 1 to {length} rows ahead."
    )


def _collect(
    predictions: Predictions, target: str, rows: Array, x: Array, owner: Array, *, limit: int
) -> dict[str, Any]:
    """Return the values of a zoomable plot, thinned and rounded; None interrupts a line. `owner` is
    the number of each row's window."""
    shape, bands = predictions.shape, predictions.shape.find_bands(target)
    truth, predicted = (
        predictions.read_truth(target)[rows],
        predictions.read_predicted(target)[rows],
    )
    retained = thin([truth, predicted - truth], limit)
    edges = [predictions[name][rows] for band in bands for name in (band.low, band.high)]
    values = np.stack([column[retained] for column in (truth, predicted, *edges)])
    by_window = owner[retained] if shape.is_forecast and len(rows) > owner[-1] + 1 else None
    gaps = find_gaps(x)[retained] if len(x) > 2 else np.zeros(len(retained), dtype=bool)
    drawn_x, values = interrupt(x[retained], values, gaps, by_window)
    lists = [round_values(column) for column in values]
    return {
        "dates": shape.has_dates,
        "x_name": shape.x_name,
        "unit": escape_to_line(find_unit(target)),
        "steps": round_values(np.diff(drawn_x / shape.x_size, prepend=0.0), decimals=3),
        "true": lists[0],
        "predicted": lists[1],
        "bands": [
            {"label": band.label, "low": low, "high": high}
            for band, low, high in zip(bands, lists[2::2], lists[3::2], strict=True)
        ],
    }


def _average(errors: Array) -> float:
    """Return the mean of the errors that are known; NaN where none is."""
    known = errors[~np.isnan(errors)]
    return float(known.mean()) if len(known) else float("nan")


def _draw_window(
    predictions: Predictions, targets: Sequence[str], choice: Chosen, windows: Array
) -> tuple[str, list[tuple[str, Markup]]]:
    begin, end = int(windows[choice.number]), int(windows[choice.number + 1])
    rows, row = slice(begin, end), predictions[ROW]
    first = int(row[begin])
    # the past, as far as the first rows of other windows show it
    before = (predictions.codes == predictions.codes[begin]) & (predictions[STEP] == 1)
    before &= (row < first) & (row >= first - max(end - begin, 24))
    past = np.flatnonzero(before)
    past = past[np.argsort(row[past], kind="stable")]
    series = shorten(predictions.names[predictions.codes[begin]], 40)
    x = predictions.read_x()[begin]
    place = format_moment(x, predictions.shape.has_dates)
    place = place if predictions.shape.has_dates else f"{predictions.shape.x_name} {place}"
    rank = (
        f"{choice.rank.capitalize()} of {len(windows) - 1:,} windows"
        if choice.rank
        else "The window"
    )
    charts = [
        _draw_forecast(predictions, target, rows, past) for target in targets[:MAX_WINDOW_TARGETS]
    ]
    return f"{rank}: {series}, from {place}", charts


def _draw_forecast(
    predictions: Predictions, target: str, rows: slice, past: Array
) -> tuple[str, Markup]:
    truth, predicted = predictions.read_truth(target), predictions.read_predicted(target)[rows]
    time, bands = predictions.read_x(), predictions.shape.find_bands(target)
    x, earlier = time[rows], time[past]
    edges = [predictions[name][rows] for band in bands for name in (band.low, band.high)]
    y = cover(np.concatenate([truth[rows], truth[past], predicted, *edges]).tolist())
    ends = float(min([x[0], *earlier[:1]])), float(x[-1])
    scale = Scale(*ends, dates=predictions.shape.has_dates)
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
    below = Chart(scale, cover([0.0, *error.tolist()]), predictions.shape.x_name, "", 56)
    below.x_ticks, below.y_ticks = 3 if scale.dates else 5, 3
    below.area(x, np.zeros(len(x)), error, RED)
    below.line(x, error, RED, width=1.3)
    chart.name("line", RED, "error, below")
    size = add_unit(format_number(_average(np.abs(error)), figures=3), find_unit(target))
    # one width for the labels of both, so that their rows are above each other
    chart.axis = below.axis = max(chart.measure_axis(), below.measure_axis())
    return f"{target} · mean absolute error {size}", chart.render() + below.render()


def choose_ranked(errors: Array) -> list[Chosen]:
    """Choose the worst, the median and the best, as far as they differ. An infinite error is the
    worst; an unknown one (NaN) is chosen only where all are unknown."""
    order = np.argsort(-errors, kind="stable")  # NaN last
    order = order[: np.count_nonzero(~np.isnan(errors)) or len(order)]
    if len(order) == 1:
        return [Chosen("", int(order[0]))]
    picked = {"worst": order[0], "best": order[-1]}
    if len(order) > 2:
        picked = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    return [Chosen(rank, int(number)) for rank, number in picked.items()]


def compute_series_errors(predictions: Predictions, errors: Array) -> Array:
    """Return the mean of the known errors of each series; NaN where none is known."""
    known, count = ~np.isnan(errors), len(predictions.names)
    codes = predictions.codes[known]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(
            np.bincount(codes, weights=errors[known], minlength=count)
            / np.bincount(codes, minlength=count)
        )


def compute_window_errors(windows: Array, errors: Array) -> Array:
    """Return the mean of the known errors of each window; NaN where none is known."""
    known = ~np.isnan(errors)
    sums = np.add.reduceat(np.where(known, errors, 0.0), windows[:-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / np.add.reduceat(known, windows[:-1], dtype=int))


def lay_end_to_end(predictions: Predictions, windows: Array, series: int) -> Array:
    """Return the numbers of a series' windows that follow each other without overlap."""
    begins = windows[:-1]
    owned = np.flatnonzero(predictions.codes[begins] == series)
    first = predictions[ROW][begins[owned]]
    order = np.argsort(first, kind="stable")
    owned, first = owned[order], first[order]
    length = int(np.diff(windows)[owned].max(initial=1))
    return np.asarray(owned[np.searchsorted(first, chain_windows(first, length))])


def draw_by_step(summary: RunSummary) -> Markup:
    """Draw the error over the rows ahead, of the model and the baselines."""
    headline = choose_layout(summary).headline
    key: ByStep = "log_loss_by_step" if summary.get("classes") else "mae_by_step"
    curves = {
        name: result[key]
        for name, result in summary["baselines"].items()
        if result and result.get(key)
    }
    curves["model"] = [step[headline.key] for step in summary["detail"]["test"]["per_step"]]
    steps = np.arange(1, len(curves["model"]) + 1)
    y = cover([error for curve in curves.values() for error in curve], zero=True)
    label = "mean absolute error" if headline.key == "mae" else headline.heading
    chart = Chart(Scale(1.0, float(steps[-1]), whole=True), y, "rows ahead", label, 220)
    for name, curve in curves.items():
        width = 2.4 if name == "model" else 1.4
        values = [np.nan if error is None else error for error in curve]
        chart.line(steps, values, get_colour(name), width=width, label=name)
    return chart.render()


def draw_by_series(per_series: Mapping[str, Metrics], unit: str) -> Markup:
    """Draw the mean absolute error of the worst series."""
    known = {name: mae for name, row in per_series.items() if (mae := row["mae"]) is not None}
    worst = sorted(known.items(), key=lambda item: -item[1])[:MAX_BARS]
    return render_bars(
        [(name, mae, add_unit(format_number(mae, figures=3), unit)) for name, mae in worst]
    )


def draw_distributions(
    predictions: Predictions, targets: Sequence[str]
) -> list[tuple[str, Markup, Markup]]:
    """Draw for each target how its errors are distributed, and predicted over true values."""
    plots = []
    for target in targets:
        truth, predicted = predictions.read_truth(target), predictions.read_predicted(target)
        known = np.isfinite(predicted - truth)
        truth, predicted = truth[known], predicted[known]
        if not len(truth):
            continue
        plots.append((target, _draw_histogram(predicted - truth), _draw_scatter(truth, predicted)))
    return plots


def _draw_histogram(error: Any) -> Markup:
    """Draw the distribution of the errors; the outermost bars hold all that lie beyond."""
    reach = float(np.quantile(np.abs(error), 0.995)) or 1.0
    edges = np.linspace(-reach, reach, BARS + 1)
    counts = _count(error, edges)
    y = Scale(0.0, 1.05 * counts.max(), ticks=())
    chart = Chart(Scale(-reach, reach), y, "predicted - true", height=180, x_ticks=5)
    chart.boxes((edges[:-1], edges[1:]), (np.zeros(BARS), counts), MODEL, opacity=0.85)
    chart.vline(0.0, INK, dash="4 3")
    return chart.render()


def _draw_scatter(truth: Any, predicted: Any) -> Markup:
    """Draw how many rows lie at each pair of true and predicted value, on a logarithmic scale."""
    scale = cover([truth.min(), truth.max(), predicted.min(), predicted.max()], margin=0.02)
    chart = Chart(scale, scale, "true", "predicted", 180, x_ticks=5)
    edges = np.linspace(scale.low, scale.high, CELLS + 1)
    across, down = (_find_cells(values, scale) for values in (truth, predicted))
    counts = np.bincount(across * CELLS + down, minlength=CELLS * CELLS).reshape(CELLS, CELLS)
    levels = np.ceil(SHADES * np.log1p(counts) / np.log1p(counts.max())).astype(int)
    for level in range(1, SHADES + 1):
        borders = np.diff(np.pad(levels == level, ((0, 0), (1, 1))).astype(int), axis=1)
        (i, begin), (_, end) = np.nonzero(borders == 1), np.nonzero(borders == -1)
        boxes = (edges[i], edges[i + 1]), (edges[begin], edges[end])
        chart.boxes(*boxes, MODEL, opacity=0.1 + 0.9 * level / SHADES)
    chart.line([scale.low, scale.high], [scale.low, scale.high], INK, width=1, dash="4 3")
    return chart.render()


def _find_cells(values: Any, scale: Scale) -> Any:
    share = (values - scale.low) / (scale.high - scale.low)
    return np.clip((share * CELLS).astype(np.int64), 0, CELLS - 1)


def _count(values: Any, edges: Any) -> Any:
    """Count the values between equal edges; those beyond belong to the outermost."""
    share = (values - edges[0]) / (edges[-1] - edges[0])
    places = np.clip((share * (len(edges) - 1)).astype(np.int64), 0, len(edges) - 2)
    return np.bincount(places, minlength=len(edges) - 1)


def draw_classes(summary: RunSummary) -> dict[str, Any]:
    """Draw the plots of a classifier, by their names in the template."""
    detail = summary["detail"]["test"]
    worst = [window for window in detail["worst"] if window["inputs"]]
    return {
        "confusion": _draw_confusion(summary["classes"], detail["confusion"]),
        "reliability": _draw_reliability(detail["reliability"]),
        "worst": [(_describe_mistake(window), _draw_mistake(window)) for window in worst],
    }


def _draw_confusion(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Markup:
    """Draw labels down, predictions across; shades are shares of the label's windows."""
    matrix = np.array(counts, dtype=float)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    if len(names) > MAX_COUNTED:
        return _shade_matrix(names, shares)
    head = "".join(f"<th>{escape(shorten(name))}</th>" for name in names)
    rows = ""
    for name, row, share in zip(names, matrix, shares, strict=True):
        cells = "".join(
            f'<td style="--share:{100 * part:.0f}%">{count:,.0f}<small>{100 * part:.0f} %</small>'
            "</td>"
            for count, part in zip(row, share, strict=True)
        )
        rows += f"<tr><td>{escape(shorten(name))}</td>{cells}</tr>"
    return Markup(
        f'<table class="matrix"><tr><th>label ↓ predicted →</th>{head}</tr>{rows}</table>'
    )


def _shade_matrix(names: Sequence[str], shares: Any) -> Markup:
    """Draw the shares of many classes as shades, the first label on top."""
    stride = -(-len(names) // MAX_NAMED)
    ticks = [(float(i), shorten(names[i], 9)) for i in range(0, len(names), stride)]
    x = Scale(-0.5, len(names) - 0.5, ticks=tuple(ticks))
    y = Scale(len(names) - 0.5, -0.5, ticks=tuple(ticks))
    chart = Chart(x, y, "predicted", "label; darker is a larger share of the label's windows", 420)
    levels = np.ceil(shares * MATRIX_SHADES).astype(int)
    for level in range(1, MATRIX_SHADES + 1):
        down, across = np.nonzero(levels == level)
        edges = (across - 0.5, across + 0.5), (down + 0.5, down - 0.5)
        chart.boxes(*edges, MODEL, opacity=level / MATRIX_SHADES)
    return chart.render()


def _draw_reliability(bins: Sequence[Mapping[str, Any]]) -> Markup:
    """Draw how often the predicted class was right over its probability."""
    full = [bin_ for bin_ in bins if bin_["count"]]
    total = sum(bin_["count"] for bin_ in full)
    width = full[0]["high"] - full[0]["low"]
    low = max(min(bin_["low"] for bin_ in full) - width, 0.0)
    chart = Chart(
        Scale(low, 1.0), Scale(0.0, 1.0), "probability of the predicted class", "accuracy", 240
    )
    edges = [bin_["low"] for bin_ in full], [bin_["high"] for bin_ in full]
    shares = [bin_["count"] / total for bin_ in full]
    chart.boxes(edges, ([0.0] * len(full), shares), SKY, opacity=0.45)
    chart.name("box", SKY, "share of windows")
    chart.line([low, 1.0], [low, 1.0], MUTED, width=1, dash="5 4", label="perfect calibration")
    points = [bin_["confidence"] for bin_ in full], [bin_["accuracy"] for bin_ in full]
    chart.line(*points, MODEL, width=2, label="the model")
    chart.dots(*points, MODEL, size=7)
    return chart.render()


def draw_accuracy_by_series(per_series: Mapping[str, Metrics]) -> Markup:
    """Draw the accuracy of the worst series."""
    known = {name: row["accuracy"] for name, row in per_series.items()}
    shares = [(name, share) for name, share in known.items() if share is not None]
    shares = sorted(shares, key=lambda pair: pair[1])[:MAX_BARS]
    return render_bars([(name, share, f"{100 * share:.1f} %") for name, share in shares], limit=1.0)


def _describe_mistake(window: Mapping[str, Any]) -> str:
    return (
        f"{shorten(window['series'], 40)} · {format_time(window)} · label {window['label']} "
        f"({100 * window['p_label']:.1f} %), predicted {window['predicted']}"
    )


def _draw_mistake(window: Mapping[str, Any]) -> Markup:
    """Draw the inputs of a misclassified window, each scaled to its own range."""
    inputs = list(window["inputs"].items())[:MAX_LINES]
    rows = max(len(values) for _, values in inputs)
    x = Scale(1.0 - rows, 0.0) if rows > 1 else cover([0.0])
    chart = Chart(x, Scale(-0.05, 1.05, ticks=()), "rows before the window's end", "", 130)
    for (name, values), colour in zip(inputs, CYCLE, strict=False):
        y = np.array(values, dtype=float)
        low, high = float(y.min()), float(y.max())
        scaled = (y - low) / (high - low) if high > low else np.full_like(y, 0.5)
        label = f"{shorten(name)} {low:.3g} to {high:.3g}"
        chart.line(np.arange(len(y)) - len(y) + 1, scaled, colour, width=1.4, label=label)
    return chart.render()
