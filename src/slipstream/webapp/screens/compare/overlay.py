"""What the charts of Compare draw: loss curves, and predictions of one series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from slipstream.errors import UserError
from slipstream.webapp.pages import get_workspace, reply
from slipstream.webapp.screens.compare.page import find_folders

if TYPE_CHECKING:
    import numpy.typing as npt

    from slipstream.reporting.plots.predictions import PredictionFile

    Array = npt.NDArray[Any]

MOST_POINTS = 3_000
"""Points that a chart gets, the extremes of each interval among them"""
MOST_SERIES = 5_000
"""Series that the picker lists"""


def list_curves(request: Request) -> Response:
    """The losses of runs after each epoch; of several models the mean, lowest and highest."""
    folders, _ = find_folders(get_workspace(request), request.query_params.getlist("run"))
    return reply({"curves": {name: _read_curve(folder) for name, folder in folders.items()}})


def _read_curve(folder: Path) -> list[dict[str, Any]]:
    from slipstream.reporting.comparison import read_epochs  # imports numpy

    by_epoch: dict[float, list[Mapping[str, Any]]] = {}
    for event in read_epochs(folder):
        by_epoch.setdefault(event["epoch"], []).append(event)
    return [
        {
            "epoch": epoch,
            "seconds": max(event.get("at_s", 0.0) for event in events),
            "val": sum(event["val_loss"] for event in events) / len(events),
            "low": min(event["val_loss"] for event in events) if len(events) > 1 else None,
            "high": max(event["val_loss"] for event in events) if len(events) > 1 else None,
        }
        for epoch, events in sorted(by_epoch.items())
    ]


class Contents(NamedTuple):
    """What a file of predictions has."""

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
    """The predictions of runs for one series, at most so many points between two ends."""
    from slipstream.catalog.pairing import find_predictions

    query = request.query_params
    folders, _ = find_folders(get_workspace(request), query.getlist("run"))
    places = {name: path for name, folder in folders.items() if (path := find_predictions(folder))}
    files = {name: one for name, path in places.items() if (one := _open(path))}
    contents = {name: _list_contents(file) for name, file in files.items()}
    if not contents:
        return reply({"series": [], "targets": [], "steps": 0, "x": [], "lines": {}})
    series = _join([one.series for one in contents.values()])
    targets = _join([one.targets for one in contents.values()])
    steps = max(one.steps for one in contents.values())
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
    about = {"series": series[:MOST_SERIES], "targets": targets, "steps": steps}
    chosen_values = {"chosen": {"series": chosen[0], "target": chosen[1], "step": step}}
    return reply(about | chosen_values | {"kind": first.x} | curves)


def _open(path: Path) -> PredictionFile | None:
    from slipstream.reporting.plots.predictions import open_predictions  # imports pyarrow

    try:
        return open_predictions(path)
    except UserError:  # damaged, or half a copy
        return None


def _join(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(one for part in lists for one in part))


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
    from slipstream.data.prediction_columns import STEP, TIME, name_probability

    steps = 0
    if file.shape.is_forecast:
        steps = max((int(part[STEP].max(initial=0)) for part in file.read([])), default=0)
    x = "row" if TIME not in file.shape.columns else "date" if file.shape.has_dates else "time"
    targets = tuple(map(name_probability, file.classes)) or file.targets
    known = tuple(name for name in targets if file.has_truth("" if file.classes else name))
    return Contents(file.names, known, steps, x)


@lru_cache(maxsize=64)
def _read_line(file: PredictionFile, series: str, target: str, step: int) -> Line:
    """Read one series; of a forecast, what was predicted so many steps ahead."""
    import numpy as np

    from slipstream.data.prediction_columns import LABEL, ROW, STEP, name_columns, name_probability
    from slipstream.reporting.plots.predictions import MICROSECONDS

    number, columns = file.names.index(series), [target, name_columns(target).predicted]
    labels = {name_probability(name): name for name in file.classes}
    if file.classes:
        columns = [LABEL, target]
    parts = []
    for part in file.read(columns, series=number):
        chosen = part.codes == number
        if step:
            chosen &= part[STEP] == step
        truth = part[LABEL] == labels[target] if file.classes else part[target]
        predicted = part[columns[-1]]
        parts.append([one[chosen] for one in (part[ROW], part.read_x(), truth, predicted)])
    rows, x, truth, predicted = (np.concatenate(some) for some in zip(*parts, strict=True))
    x = x / MICROSECONDS if file.shape.has_dates else x
    rows, at = np.unique(rows, return_index=True)
    return Line(rows, x[at], truth[at].astype(float), predicted[at].astype(float))


def _draw(
    lines: Mapping[str, Line], low: float | None, high: float | None, *, show_errors: bool
) -> dict[str, Any]:
    """Return the values of runs on common rows, as JSON has them."""
    import numpy as np

    from slipstream.catalog.pairing import is_same_truth
    from slipstream.reporting.plots.predictions import thin

    if not lines:
        return {"x": [], "truth": [], "truth_of": "", "lines": {}}
    rows = np.unique(np.concatenate([line.rows for line in lines.values()]))
    x, truth = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    values_by_run, truth_of = {}, ""
    for name, line in lines.items():
        at = np.searchsorted(rows, line.rows)
        x[at] = line.x
        known = np.isfinite(truth[at])
        if not is_same_truth(truth[at][known], line.truth[known]):
            truth_of = next(iter(lines))  # each run has true values of its own
        elif not truth_of:
            truth[at] = line.truth
        values_by_run[name] = np.full(len(rows), np.nan)
        values_by_run[name][at] = line.predicted - line.truth if show_errors else line.predicted
    within = np.ones(len(rows), dtype=bool)
    if low is not None and high is not None:
        inside = np.flatnonzero((x >= low) & (x <= high))
        if len(inside):  # with the neighbours, so that lines reach the edges
            within = np.zeros(len(rows), dtype=bool)
            within[max(inside[0] - 1, 0) : inside[-1] + 2] = True
    x, truth = x[within], truth[within]
    values_by_run = {name: values[within] for name, values in values_by_run.items()}
    to_thin = list(values_by_run.values()) if show_errors else [truth, *values_by_run.values()]
    points = thin([np.nan_to_num(one) for one in to_thin], MOST_POINTS)
    return {
        "x": x[points].tolist(),
        "truth": [] if show_errors else truth[points].tolist(),
        "truth_of": truth_of,
        "lines": {name: values[points].tolist() for name, values in values_by_run.items()},
        "rows": int(within.sum()),
    }
