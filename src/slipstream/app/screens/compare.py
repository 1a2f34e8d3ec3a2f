"""The screen Compare: loss curves, metrics, and predictions of one series."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from slipstream.app import paths
from slipstream.app.pages import Screen, get_workspace, render, reply
from slipstream.app.workspace import Workspace
from slipstream.base.errors import UserError
from slipstream.base.statistics import HIGHER_IS_BETTER
from slipstream.base.text import format_number
from slipstream.events import Epoch
from slipstream.reporting.run_rows import RUNNING
from slipstream.reporting.runs import Comparison, compare_runs, format_bounds, format_setting
from slipstream.reporting.wording import format_metric, is_ranked

MAX_RUNS = 8
"""Runs side by side: as many as there are colours for lines"""
MAX_CHOICES = 200
"""Runs that can be chosen on this page; Home lists all"""


def show(request: Request) -> Response:
    """The page of the chosen runs, or a list to choose from where there are fewer than two."""
    workspace = get_workspace(request)
    folders, missing = find_folders(workspace, request.query_params.getlist("run"))
    values: dict[str, Any] = {
        "choices": list_choices(workspace, list(folders)),
        "chosen": list(folders),
        "missing": missing,
        "most": MAX_RUNS,
        "comparison": None,
    }
    if len(folders) > 1:
        comparison = compare_runs(*folders.values())
        values |= describe(comparison, folders)
        values["command"] = _format_command(workspace, list(folders))
    return render(request, "compare.html", **values)


def find_folders(workspace: Workspace, names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the folders of runs by their ids, and the ids of runs that are gone."""
    names = list(dict.fromkeys(names))
    if len(names) > MAX_RUNS:
        raise UserError(f"{len(names)} runs; choose at most {MAX_RUNS} to compare")
    folders, missing = {}, []
    for name in names:
        try:
            folders[name] = paths.find_run_folder(workspace.folder, name)
        except paths.MissingError:
            missing.append(name)
    return folders, missing


def list_choices(workspace: Workspace, chosen: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs to choose from: the chosen ones, then the newest."""
    rows = workspace.rows.list(workspace.folder, workspace.run_folders)
    rows.sort(key=lambda row: row["id"] not in chosen)
    return rows[: max(MAX_CHOICES, len(chosen))]


def describe(comparison: Comparison, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return the data of the page for a comparison."""
    labels = list(comparison.settings[0])[1:] if comparison.settings else _list_labels(comparison)
    ids = list(folders)
    by_label = dict(zip(labels, ids, strict=True))
    return {
        "comparison": comparison,
        "runs": [
            {
                "id": id_,
                "row": row,
                "reference": _format_link(
                    [id_, *(other_id for other_id in ids if other_id != id_)]
                ),
                "without": _format_link([other_id for other_id in ids if other_id != id_]),
                "config": paths.read_text(folders[id_] / "config.toml"),
            }
            for id_, row in zip(ids, comparison.runs, strict=True)
        ],
        "settings": [
            (row["setting"], [format_setting(row[label]) for label in labels])
            for row in comparison.settings
        ],
        "metrics": list(_iter_metrics(comparison, labels)),
        "paired": list(_iter_paired(comparison.paired, by_label)),
        "is_running": any(row.state == RUNNING for row in comparison.runs),
        "losses_differ": any(row["setting"] == "train.loss" for row in comparison.settings),
    }


def _list_labels(comparison: Comparison) -> list[str]:
    names = [row.name for row in comparison.runs]
    is_unique = len(set(names)) == len(names)
    return names if is_unique else [str(row.run) for row in comparison.runs]


def _iter_metrics(
    comparison: Comparison, labels: Sequence[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each metric's name and one cell per run, the best marked; no cell is marked where the
    errors cannot be compared."""
    rows = comparison.metrics
    for metric in dict.fromkeys(row["metric"] for row in rows):
        by_run = {row["run"]: row for row in rows if row["metric"] == metric}
        values = {label: _read_value(row) for label, row in by_run.items()}
        choose = max if metric in HIGHER_IS_BETTER else min
        is_judged = len(values) > 1 and not comparison.incomparable and is_ranked(metric)
        best = choose(values.values()) if is_judged else None
        cells = []
        for label in labels:
            row = by_run.get(label)
            cells.append(
                {
                    "value": format_number(values[label]) if row else "–",
                    "is_best": row is not None and values[label] == best,
                    "note": _describe_seeds(row) if row else "",
                }
            )
        yield format_metric(metric), cells


def _read_value(row: Mapping[str, Any]) -> float:
    return float(row.get("mean", row["test"]))


def _describe_seeds(row: Mapping[str, Any]) -> str:
    if "mean" not in row:
        return ""
    low, high = (format_number(row[end]) for end in ("low", "high"))
    return f"{low} to {high}, {row['n']} seeds"


def _iter_paired(
    rows: Sequence[Mapping[str, Any]], ids: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the paired metrics, each with its runs and the positions of their intervals in a
    plot."""
    for metric in dict.fromkeys(row["metric"] for row in rows):
        own_rows = [row for row in rows if row["metric"] == metric]
        bounds = [
            bound
            for row in own_rows
            for bound in (row.get("difference_low"), row.get("difference_high"))
            if bound is not None
        ]
        low, high = min([0.0, *bounds]), max([0.0, *bounds])
        margin = 0.06 * (high - low) or 1.0

        def locate(value: float, low: float = low - margin, high: float = high + margin) -> float:
            return round(100 * (value - low) / (high - low), 2)

        yield {
            "metric": format_metric(metric),
            "zero": locate(0.0),
            "runs": [
                {
                    "id": ids.get(row["run"], row["run"]),
                    "value": format_bounds(row, "value", ""),
                    "difference": format_bounds(row, "difference", "difference_"),
                    "verdict": row.get("verdict", ""),
                    "places": [
                        locate(row[key])
                        for key in ("difference_low", "difference", "difference_high")
                    ]
                    if "difference_low" in row
                    else None,
                }
                for row in own_rows
            ],
            "rows": own_rows[0]["rows"],
        }


def _format_link(ids: Sequence[str]) -> str:
    return "/compare?" + urlencode([("run", run) for run in ids])


def _format_command(workspace: Workspace, ids: Sequence[str]) -> str:
    folders = " ".join(shlex.quote(str(workspace.folder / run)) for run in ids)
    return f"slipstream runs compare {folders}"


if TYPE_CHECKING:
    import numpy.typing as npt

    from slipstream.data.predictions import PredictionFile

    Array = npt.NDArray[Any]

MAX_POINTS = 3_000
"""Points that a chart gets, the extremes of each interval among them"""
MAX_SERIES = 5_000
"""Series that the picker lists"""


def list_curves(request: Request) -> Response:
    """The losses of runs after each epoch; for several models the mean, lowest and highest."""
    folders, _ = find_folders(get_workspace(request), request.query_params.getlist("run"))
    return reply({"curves": {name: _read_curve(folder) for name, folder in folders.items()}})


def _read_curve(folder: Path) -> list[dict[str, Any]]:
    from slipstream.reporting.page import read_epochs  # imports numpy

    by_epoch: dict[float, list[Epoch]] = {}
    for event in read_epochs(folder):
        by_epoch.setdefault(event.epoch, []).append(event)
    return [
        {
            "epoch": epoch,
            "seconds": max(event.at_s or 0.0 for event in events),
            "val": sum(event.val_loss for event in events) / len(events),
            "low": min(event.val_loss for event in events) if len(events) > 1 else None,
            "high": max(event.val_loss for event in events) if len(events) > 1 else None,
        }
        for epoch, events in sorted(by_epoch.items())
    ]


class Contents(NamedTuple):
    """The targets, steps and x axis of a file of predictions."""

    series: tuple[str, ...]
    targets: tuple[str, ...]
    """Numbers, or the probabilities of classes"""
    steps: int
    """Predicted rows of a window; 0 where each row is predicted once"""
    x: str
    """time, date or row"""


class Line(NamedTuple):
    """The predictions of one series, by its rows, ascending."""

    rows: Array
    x: Array
    truth: Array
    predicted: Array


def list_predictions(request: Request) -> Response:
    """The predictions of runs for one series between two ends, with a limited number of points."""
    from slipstream.reporting.pairing import find_predictions

    query = request.query_params
    folders, _ = find_folders(get_workspace(request), query.getlist("run"))
    paths_by_run = {
        name: path for name, folder in folders.items() if (path := find_predictions(folder))
    }
    files = {name: file for name, path in paths_by_run.items() if (file := _open(path))}
    contents = {name: _list_contents(file) for name, file in files.items()}
    if not contents:
        return reply({"series": [], "targets": [], "steps": 0, "x": [], "lines": {}})
    series = _join([content.series for content in contents.values()])
    targets = _join([content.targets for content in contents.values()])
    steps = max(content.steps for content in contents.values())
    chosen = _choose(query.get("series"), series), _choose(query.get("target"), targets)
    step = min(max(_read_integer(query.get("step"), 1), 1), max(steps, 1))
    lines = {
        name: _read_line(file, *chosen, step if contents[name].steps else 0)
        for name, file in files.items()
        if chosen[1] in contents[name].targets and chosen[0] in contents[name].series
    }
    curves = _draw(
        {name: line for name, line in lines.items() if len(line.rows)},
        _read_bound(query.get("from")),
        _read_bound(query.get("to")),
        show_errors=query.get("show") == "errors",
    )
    first = next(iter(contents.values()))
    about = {"series": series[:MAX_SERIES], "targets": targets, "steps": steps}
    chosen_values = {"chosen": {"series": chosen[0], "target": chosen[1], "step": step}}
    return reply(about | chosen_values | {"kind": first.x} | curves)


def _open(path: Path) -> PredictionFile | None:
    from slipstream.data.predictions import open_predictions  # imports pyarrow

    try:
        return open_predictions(path)
    except UserError:  # damaged, or half a copy
        return None


def _join(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for part in lists for name in part))


def _choose(wanted: str | None, names: Sequence[str]) -> str:
    if wanted is not None and wanted in names:
        return wanted
    return names[0] if names else ""


def _read_integer(text: str | None, default: int) -> int:
    try:
        return int(text or default)
    except ValueError:
        return default


def _read_bound(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise UserError("from, to: expected numbers") from None


@lru_cache(maxsize=32)
def _list_contents(file: PredictionFile) -> Contents:
    from slipstream.data.predictions import STEP, name_probability

    steps, shape = 0, file.shape
    if shape.is_forecast:
        steps = max((int(part[STEP].max(initial=0)) for part in file.read([])), default=0)
    x = shape.x_name or "date"
    targets = tuple(map(name_probability, shape.classes)) or shape.targets
    known = tuple(name for name in targets if shape.has_truth("" if shape.classes else name))
    return Contents(file.names, known, steps, x)


@lru_cache(maxsize=64)
def _read_line(file: PredictionFile, series: str, target: str, step: int) -> Line:
    """Read one series; for a forecast, the predictions at one distance ahead."""
    import numpy as np

    from slipstream.data.predictions import LABEL, ROW, STEP, name_probability

    number, shape = file.names.index(series), file.shape
    labels = [name_probability(name) for name in shape.classes]
    columns = [LABEL, target] if shape.classes else shape.list_columns(target)
    parts = []
    for part in file.read(columns, series=number):
        chosen = part.codes == number
        if step:
            chosen &= part[STEP] == step
        if shape.classes:
            truth, predicted = part.read_classes(LABEL) == labels.index(target), part[target]
        else:
            truth, predicted = part.read_truth(target), part.read_predicted(target)
        values = part[ROW], part.read_x() / shape.x_size, truth, predicted
        parts.append([column[chosen] for column in values])
    rows, x, truth, predicted = (np.concatenate(column) for column in zip(*parts, strict=True))
    rows, first = np.unique(rows, return_index=True)
    return Line(rows, x[first], truth[first].astype(float), predicted[first].astype(float))


def _draw(
    lines: Mapping[str, Line], low: float | None, high: float | None, *, show_errors: bool
) -> dict[str, Any]:
    """Return the values of runs on common rows, as JSON has them."""
    import numpy as np

    from slipstream.reporting.charts import thin
    from slipstream.reporting.pairing import is_same_truth

    if not lines:
        return {"x": [], "truth": [], "truth_of": "", "lines": {}}
    rows = np.unique(np.concatenate([line.rows for line in lines.values()]))
    x, truth = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    values_by_run, truth_of = {}, ""
    for name, line in lines.items():
        positions = np.searchsorted(rows, line.rows)
        x[positions] = line.x
        known = np.isfinite(truth[positions])
        if not is_same_truth(truth[positions][known], line.truth[known]):
            truth_of = next(iter(lines))  # each run has true values of its own
        elif not truth_of:
            truth[positions] = line.truth
        values_by_run[name] = np.full(len(rows), np.nan)
        values_by_run[name][positions] = (
            line.predicted - line.truth if show_errors else line.predicted
        )
    within = np.ones(len(rows), dtype=bool)
    if low is not None and high is not None:
        inside = np.flatnonzero((x >= low) & (x <= high))
        if len(inside):  # with the neighbours, so that lines reach the edges
            within = np.zeros(len(rows), dtype=bool)
            within[max(inside[0] - 1, 0) : inside[-1] + 2] = True
    x, truth = x[within], truth[within]
    values_by_run = {name: values[within] for name, values in values_by_run.items()}
    to_thin = list(values_by_run.values()) if show_errors else [truth, *values_by_run.values()]
    points = thin([np.nan_to_num(values) for values in to_thin], MAX_POINTS)
    return {
        "x": x[points].tolist(),
        "truth": [] if show_errors else truth[points].tolist(),
        "truth_of": truth_of,
        "lines": {name: values[points].tolist() for name, values in values_by_run.items()},
        "rows": int(within.sum()),
    }


SCREEN = Screen(
    routes=(
        ("GET", "/compare", show),
        ("GET", "/api/compare/curves", list_curves),
        ("GET", "/api/compare/predictions", list_predictions),
    ),
    navigation=(("/compare", "Compare"),),
)
