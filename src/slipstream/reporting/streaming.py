"""Filters of predictions in words, and the two ways to use a model on a stream of rows in words,
tables and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.text import format_count, format_number

if TYPE_CHECKING:
    from markupsafe import Markup

FILTERS = {
    "moving_average": "moving average",
    "ema": "exponential average",
    "savgol": "Savitzky-Golay",
    "butterworth": "Butterworth low-pass",
}
REGIMES = {"window": "window", "carried": "carried state"}
NUMBERS = {"mae": "MAE", "rmse": "RMSE", "max_error": "max error"}
CLASSES = {"log_loss": "log-loss", "accuracy": "accuracy", "f1_macro": "F1 macro"}
BY_ROW = {"mae": "MAE", "rmse": "RMSE", "log_loss": "log-loss", "error_rate": "error rate"}
Table = tuple[list[str], list[list[str]]]
"""Headings and rows"""


def describe_filter(summary: Mapping[str, Any]) -> str:
    """Return the filter of a summary and its delay; empty where there is none."""
    settings = summary.get("filter")
    if not settings:
        return ""
    parts = [FILTERS[settings["kind"]]]
    parts += [f"{settings['rows']} rows"] if "rows" in settings else []
    parts += [f"cut-off {settings['cutoff_hz']:g} Hz"] if "cutoff_hz" in settings else []
    parts += [f"order {settings['order']}"] if "order" in settings else []
    delay = settings["delay_rows"]
    late = f"a steady change is {delay:.3g} rows late" if delay else "a steady change is not late"
    return f"predictions are filtered ({', '.join(parts)}): {late}"


def list_unfiltered(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the model without `predict.filter`, where there is one, by the name of its row."""
    return [("unfiltered", summary["unfiltered"])] if summary.get("unfiltered") else []


def tabulate_regimes(result: Mapping[str, Any]) -> Table:
    """Return the metrics of each regime on the same windows, and what a row costs."""
    names = CLASSES if result.get("classes") else NUMBERS
    rows = []
    for key, label in REGIMES.items():
        regime = result[key]
        if not regime["metrics"]:
            continue
        adds, first = regime["multiply_adds"], f"{regime['rows_to_first']:,}"
        end = [first, "-" if adds is None else f"{adds:,}"]
        cells = [format_number(regime["metrics"][name]) for name in names]
        rows.append([label, *cells, *end])
        for name, scores in list_unfiltered(regime):
            rows.append(
                [f"{label}, {name}", *(format_number(scores["metrics"][n]) for n in names), *end]
            )
    return ["", *names.values(), "first after rows", "multiply-adds a row"], rows


def tabulate_by_row(result: Mapping[str, Any]) -> Table:
    """Return the errors of each regime by rows since the start."""
    regimes = [name for name in REGIMES if result[name]["metrics"]]
    first = next(entry[name] for entry in result["by_row"] for name in regimes if entry[name])
    names = [name for name in BY_ROW if name in first]
    headings = [f"{REGIMES[regime]} {BY_ROW[name]}" for name in names for regime in regimes]
    rows = []
    for entry in result["by_row"]:
        same = entry["from"] == entry["to"]
        where = f"{entry['from']:,}" if same else f"{entry['from']:,} to {entry['to']:,}"
        count = max(entry[regime]["rows"] for regime in regimes if entry[regime])
        cells = [
            format_number(entry[regime][name]) if entry[regime] else "-"
            for name in names
            for regime in regimes
        ]
        rows.append([where, f"{count:,}", *cells])
    return ["rows before", "predictions", *headings], rows


def describe_stream(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to deploy and why, the warm-up, and how the comparison was made."""
    yield f"deploy: {REGIMES[result['deploy']['use']]}; {result['deploy']['reason']}"
    if warm_up := result["warm_up"]:
        percent = f"{100 * (warm_up['factor'] - 1):.0f} %"
        rows = warm_up["rows"]
        if rows is None:
            yield (
                "warm-up of the carried state: not known; no series begins in these rows, or its "
                f"error never came within {percent} of the later one"
            )
        else:
            yield (
                f"warm-up of the carried state: {format_count(rows, 'row')} until its "
                f"{BY_ROW[warm_up['metric']]} is within {percent} of the later "
                f"{format_number(warm_up['settled'])} in two ranges of the table"
            )
    if comparison := result["comparison"]:
        yield f"interval of the comparison: {comparison['how']}"
    if line := describe_filter(result):
        yield line


def write_stream_page(path: Path, result: Mapping[str, Any]) -> Path:
    """Write a self-contained page with the tables, and the errors over the rows since the start."""
    from slipstream.reporting.template import render_page, write_page

    page = render_page(
        "streaming.html",
        result=result,
        lines=list(describe_stream(result)),
        regimes=tabulate_regimes(result),
        by_row=tabulate_by_row(result),
        plot=_draw_by_row(result),
    )
    return write_page(path, page)


def _draw_by_row(result: Mapping[str, Any]) -> Markup:
    """Draw the errors of both regimes over the rows since the start, on a logarithmic axis."""
    from slipstream.reporting.charts import MODEL, ORANGE, Chart, Scale, cover

    metric = "log_loss" if result.get("classes") else "mae"
    colours = {"window": MODEL, "carried": ORANGE}
    curves = {
        name: [
            (1 + (entry["from"] + entry["to"]) / 2, entry[name][metric])
            for entry in result["by_row"]
            if entry[name]
        ]
        for name in colours
        if result[name]["metrics"]
    }
    ends = [x for curve in curves.values() for x, _ in curve]
    y = cover([error for curve in curves.values() for _, error in curve], zero=True)
    x_axis = Scale(min(ends), max(*ends, min(ends) + 1), log=True)
    chart = Chart(x_axis, y, "rows since the start", BY_ROW[metric], 260)
    for name, curve in curves.items():
        x, errors = zip(*curve, strict=True)
        chart.line(x, errors, colours[name], width=2.2, label=REGIMES[name])
        chart.dots(x, errors, colours[name])
    return chart.render()
