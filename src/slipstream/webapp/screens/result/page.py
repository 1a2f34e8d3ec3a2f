"""The page of a result, and the figures that its script draws."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from slipstream import runs
from slipstream.catalog.details import show_run
from slipstream.catalog.rows import DAMAGE_ERRORS, FINISHED, read_row
from slipstream.errors import UserError
from slipstream.reporting.formatting import choose_layout, format_number
from slipstream.reporting.wording import format_percent
from slipstream.stats import HIGHER_IS_BETTER
from slipstream.webapp import paths
from slipstream.webapp.jobs.store import read_object
from slipstream.webapp.pages import get_workspace, render, reply
from slipstream.webapp.rows import describe_row
from slipstream.webapp.screens.result.new_data import PREDICTIONS, find_test
from slipstream.webapp.screens.run import FILES

if TYPE_CHECKING:
    from slipstream.reporting.plots.predictions import PredictionFile

INNER = {"search": "retrained/best", "probe": "fine-tuned"}
"""Of runs that hold others: the one whose model `predict` uses"""
MOST_NAME = 200
"""Characters of a name in a list"""
MOST_SERIES = 20_000


class ResultSource(NamedTuple):
    """Predictions, and the scores that belong to them."""

    path: Path
    summary: Mapping[str, Any]
    """Of the run"""
    scores: Mapping[str, Any]
    """Of these predictions in detail; empty where they were not scored"""
    config: Mapping[str, Any]


def show(request: Request) -> Response:
    """The page of a finished run's result."""
    workspace = get_workspace(request)
    name = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, name)
    row = describe_row(workspace.folder, read_row(folder))
    values: dict[str, Any] = {"run": row, "id": name, "url": quote(name), "inner": ""}
    inner = INNER.get(row["kind"], "")
    if inner and (folder / inner / "metrics.json").is_file():
        values["inner"] = quote(f"{name}/{inner}")
    summary = _read_summary(folder) if row["state"] == FINISHED and not inner else {}
    values |= _describe(summary, row)
    return render(
        request,
        "result.html",
        **values,
        details=show_run(folder),
        has_predictions=(folder / PREDICTIONS).is_file() and bool(values["rows"]),
        files=[(file, title) for file, title in FILES.items() if _has_file(folder, file)],
        commands=_list_commands(folder),
        config=paths.read_text(folder / "config.toml"),
        tables=paths.list_tables(workspace.folder) if values["rows"] else [],
    )


def _list_commands(folder: Path) -> dict[str, str]:
    """Return what the page does, as commands."""
    run = shlex.quote(str(folder))
    return {
        "evaluate": f"slipstream evaluate {run} --data FILE --predictions predictions.parquet",
        "predict": f"slipstream predict {run} FILE --out predictions.csv",
        "export": f"slipstream export {run} --to onnx --out FOLDER",
        "report": f"slipstream report {run}",
    }


def _has_file(folder: Path, name: str) -> bool:
    return (folder / "model").is_dir() if name == "model.zip" else (folder / name).is_file()


def _read_summary(folder: Path) -> dict[str, Any]:
    try:
        return runs.read_metrics(folder)
    except UserError:
        return {}  # of a run of another kind


def _describe(summary: dict[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page has of a summary; empty lists where there is nothing to compare."""
    empty: dict[str, Any] = {
        "rows": [],
        "headings": [],
        "headline": "",
        "sorted_by": "",
        "notes": [],
        "facts": [],
        "targets": [],
        "classes": None,
        "lanes": None,
    }
    if not summary:
        return empty
    from slipstream.reporting.page import build_rows, find_order

    try:
        layout = choose_layout(summary)
        return {
            "rows": _add_bars(build_rows(summary)),
            "headings": [column.heading for column in layout.columns],
            "headline": layout.headline.heading,
            "sorted_by": find_order(layout.columns).heading,
            "notes": [str(note) for note in summary.get("notes") or ()],
            "facts": _list_facts(summary, row),
            "targets": _compare_targets(summary),
            "classes": _describe_classes(summary),
            "lanes": _describe_lanes(summary),
        }
    except DAMAGE_ERRORS:
        return empty  # a pre-trained encoder, or a run of another version


def _add_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the length of each row's bar, in percent of the longest: that of the first metric, which
    it stands beside."""
    largest = max((row["headline"] for row in rows if row["headline"] is not None), default=0.0)
    for row in rows:
        known = row["headline"] is not None and largest > 0
        row["bar"] = round(100 * row["headline"] / largest, 1) if known else 0
    return rows


def _list_facts(summary: dict[str, Any], row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the figures at the top: name, value, and what is said below it."""
    layout = choose_layout(summary)
    intervals = (summary.get("intervals") or {}).get(layout.subset) or {}
    facts = []
    for column in dict.fromkeys((layout.headline, layout.second, layout.facts[-1][0])):
        value = format_number(column.read(summary), column.decimals)
        interval = intervals.get(column.key)
        note = ""
        if interval:
            low, high = (format_number(one, column.decimals) for one in interval)
            note = f"95 % interval {low} to {high}"
        facts.append({"name": column.heading, "key": column.key, "value": value, "note": note})
    if summary.get("uses") == "ensemble" and summary.get("ensemble"):
        value = format_number(layout.headline.read(summary["ensemble"]), layout.headline.decimals)
        name = f"{layout.headline.heading} of the ensemble"
        facts.append({"name": name, "key": "ensemble", "value": value})
        facts[-1]["note"] = "which predict uses"
    if row["baseline"]:
        best = format_number(row["baseline_error"])
        against = str(row["against"] or "").rpartition(", ")[0]
        if row["against_low"] is not None and row["metric"] not in HIGHER_IS_BETTER:
            low, high = (format_percent(row[name]) for name in ("against_low", "against_high"))
            against += f", 95 % interval {low} to {high}"
        who = "the ensemble" if summary.get("uses") == "ensemble" else "the model"
        name = f"{layout.headline.heading}, best baseline"
        facts.append({"name": name, "key": "baseline", "value": best})
        facts[-1]["note"] = f"{row['baseline']}; {who}: {against}" if against else row["baseline"]
    windows = (summary.get("windows") or {}).get(layout.subset)
    if windows is not None:
        left_out = (summary.get("windows_without_target") or {}).get(layout.subset)
        note = f"{left_out:,} left out: no target" if left_out else ""
        facts.append({"name": "Windows", "key": "windows", "value": f"{windows:,}", "note": note})
    facts += _list_quantile_facts(summary)
    for level, share in (summary.get("coverage") or {}).items():
        name, value = f"Inside the {level} % interval", f"{100 * share:.1f} %"
        note = "of the single model" if summary.get("uses") == "ensemble" else ""
        facts.append({"name": name, "key": f"coverage-{level}", "value": value, "note": note})
    return facts


def _list_quantile_facts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pinball loss of predicted quantiles and what lies between the outermost ones."""
    metrics, levels = (summary.get("metrics") or {}).get("test") or {}, summary.get("quantiles")
    facts = []
    if levels and "pinball" in metrics:
        value = format_number(metrics["pinball"])
        note = f"the mean of the quantiles {', '.join(f'{one:g}' for one in levels)}"
        facts.append({"name": "Pinball loss", "key": "pinball", "value": value, "note": note})
    if levels and "coverage" in metrics:
        name = f"Between the quantiles {levels[0]:g} and {levels[-1]:g}"
        note = f"of the true values; {100 * (levels[-1] - levels[0]):.0f} % should be"
        value = f"{100 * metrics['coverage']:.1f} %"
        facts.append({"name": name, "key": "coverage", "value": value, "note": note})
    return facts


def _compare_targets(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of each of several targets, beside those of the baselines."""
    from slipstream.reporting.page import get_unit

    per_target = summary["detail"]["test"].get("per_target") or {}
    if len(per_target) < 2:
        return []
    baselines = {
        name: one["per_target"]
        for name, one in (summary.get("baselines") or {}).items()
        if one and one.get("per_target")
    }
    return [
        {
            "name": target,
            "unit": get_unit(summary, target),
            "cells": [format_number(errors[key]) for key in ("mae", "rmse", "r2", "bias")],
            "baselines": {
                name: format_number(one[target]["mae"]) for name, one in baselines.items()
            },
        }
        for target, errors in per_target.items()
    ]


def _describe_classes(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the confusion matrix with shares, the figures of each class, and the calibration."""
    if not summary.get("classes"):
        return None
    detail = summary["detail"]["test"]
    confusion = []
    for name, row in zip(summary["classes"], detail["confusion"], strict=True):
        total = max(sum(row), 1)
        cells = [
            {"count": n, "percent": 100 * n / total, "shade": -(-10 * n // total)} for n in row
        ]
        confusion.append({"name": name, "cells": cells})
    figures = [
        {
            "name": name,
            "count": one["count"],
            "cells": [format_number(one[key], 4) for key in ("precision", "recall", "f1", "auc")],
        }
        for name, one in detail["per_class"].items()
    ]
    return {"names": summary["classes"], "confusion": confusion, "figures": figures}


def _describe_lanes(summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the test errors of the models of a run with repeats or folds, as points on a line."""
    from slipstream.reporting import wording

    lanes = summary.get("lanes")
    if not lanes:
        return None
    column = choose_layout(summary).headline
    values = [column.read(lane) for lane in lanes]
    known = [value for value in values if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin
    groups: dict[str, list[dict[str, Any]]] = {}
    for lane, value in zip(lanes, values, strict=True):
        name = f"fold {lane['fold']}" if lane.get("fold") is not None else "repeats"
        place = None if value is None else round(100 * (value - low) / (high - low), 2)
        text = format_number(value, column.decimals)
        point = {"seed": lane.get("seed"), "place": place, "text": text, "best": lane.get("best")}
        point["label"] = lane.get("label") or ""
        groups.setdefault(name, []).append(point)
    return {
        "heading": column.heading,
        "groups": groups,
        "low": format_number(low),
        "high": format_number(high),
        "lines": list(wording.describe_lanes(summary)),
    }


def describe(request: Request) -> Response:
    """The errors of a run's predictions, or of a test's, as JSON: by series, time and horizon."""
    from slipstream.webapp.screens.result.digest import compute_digest

    source = find_source(request)
    file = _open_predictions(source.path)
    target = _choose_target(request, file.targets)
    values: dict[str, Any] = {
        "targets": list(file.targets),
        "target": target,
        "classes": list(file.classes),
        "names": [name[:MOST_NAME] for name in file.names[:MOST_SERIES]],
        "more_series": max(len(file.names) - MOST_SERIES, 0),
        "dates": file.shape.has_dates,
        "x_name": file.shape.x_name,
        "steps": _count_steps(source) if file.shape.is_forecast else 0,
        "unit": _find_unit(source.summary, target),
        "has_truth": file.has_truth(target),
        "num_rows": file.num_rows,
        "by_step": _compare_steps(source),
        "by_step_metric": choose_layout(source.summary).headline.heading,
        "reliability": _read_reliability(source),
    }
    if file.has_truth(target) and not request.query_params.get("brief"):
        values |= compute_digest(file, target, _read_span(source.config))
        values["series"] = values["series"][:MOST_SERIES]
    return reply(values)


def plot(request: Request) -> Response:
    """The rows of one series for a plot, as JSON."""
    from slipstream.reporting.plots.predictions import MICROSECONDS
    from slipstream.webapp.screens.result.plot import PlotView, read_plot

    source = find_source(request)
    file = _open_predictions(source.path)
    series = _read_whole(request, "series")
    if series >= len(file.names):
        raise paths.MissingError("there is no such series")
    size = MICROSECONDS if file.shape.has_dates else 1.0
    view = PlotView(
        series=series,
        target=_choose_target(request, file.targets),
        ahead=_read_whole(request, "ahead"),
        low=_read_number(request, "low", float("-inf")) * size,
        high=_read_number(request, "high", float("inf")) * size,
        points=_read_whole(request, "points", 1_500),
        window=_read_whole(request, "window") if "window" in request.query_params else None,
    )
    return reply(read_plot(file, view))


def _open_predictions(path: Path) -> PredictionFile:
    from slipstream.reporting.plots.predictions import open_predictions  # imports pyarrow

    if not path.is_file():
        raise paths.MissingError("there are no predictions here")
    return open_predictions(path)


def find_source(request: Request) -> ResultSource:
    """Return the run's own predictions, or those of a test by its job."""
    workspace = get_workspace(request)
    run = request.path_params["run"]
    folder = paths.find_run_folder(workspace.folder, run)
    summary, config = _read_summary(folder), read_config(folder)
    job = request.query_params.get("source", "")
    if job:
        test = find_test(workspace, run, job)
        path = workspace.store.jobs / test.id / PREDICTIONS
        scores = read_object(workspace.store.jobs / test.id / "output.json")
        return ResultSource(path, summary, scores.get("detail") or {}, config)
    path = paths.resolve_below(workspace.folder, f"{run}/{PREDICTIONS}")
    detail = summary.get("detail")
    own = detail.get("test") if isinstance(detail, dict) else None
    return ResultSource(path, summary, own or {}, config)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a run's settings; empty where they cannot be read."""
    try:
        return tomllib.loads(paths.read_text(folder / "config.toml"))
    except (ValueError, RecursionError):
        return {}


def _choose_target(request: Request, targets: tuple[str, ...]) -> str:
    """Return the target of a request, by its number; empty for classes."""
    number = _read_whole(request, "target")
    if not targets:
        return ""
    if number >= len(targets):
        raise paths.MissingError("there is no such target")
    return targets[number]


def _read_whole(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, "") or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"{name}: expected a whole number")
    return int(text)


def _read_number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise UserError(f"{name}: expected a number") from None
    if value != value:
        raise UserError(f"{name}: expected a number")
    return value


def _read_span(config: Mapping[str, Any]) -> int:
    """Return how many rows a window has."""
    data = config.get("data")
    sizes = [data.get(key) for key in ("context", "horizon")] if isinstance(data, dict) else []
    return max(sum(size for size in sizes if isinstance(size, int)), 1)


def _count_steps(source: ResultSource) -> int:
    data = source.config.get("data")
    horizon = data.get("horizon") if isinstance(data, dict) else None
    return horizon if isinstance(horizon, int) and horizon > 0 else 1


def _find_unit(summary: Mapping[str, Any], target: str) -> str:
    from slipstream.reporting.page import get_unit

    return get_unit(dict(summary), target) if target else ""


def _compare_steps(source: ResultSource) -> dict[str, list[Any]]:
    """Return the error over the rows ahead: of the model, and on its own test set the baselines."""
    steps = source.scores.get("per_step")
    if not isinstance(steps, list) or len(steps) < 2:
        return {}
    key = choose_layout(source.summary).headline.key
    curves = {"model": [step.get(key) for step in steps]}
    detail = source.summary.get("detail")
    if isinstance(detail, dict) and detail.get("test") is source.scores:
        for name, one in (source.summary.get("baselines") or {}).items():
            if one and one.get(f"{key}_by_step"):
                curves[name] = one[f"{key}_by_step"]
    return curves


def _read_reliability(source: ResultSource) -> list[Any]:
    bins = source.scores.get("reliability")
    return [one for one in bins if one.get("count")] if isinstance(bins, list) else []
