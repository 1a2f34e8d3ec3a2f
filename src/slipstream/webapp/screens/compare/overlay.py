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

    Array = npt.NDArray[Any]

MOST_POINTS = 3_000
"""Points that a chart gets, the extremes of each interval among them"""
MOST_SERIES = 5_000
"""Series that the picker lists"""
ENDING = "_predicted"


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
    files = {name: path for name, folder in folders.items() if (path := find_predictions(folder))}
    contents = {name: one for name, path in files.items() if (one := _read_contents(path))}
    if not contents:
        return reply({"series": [], "targets": [], "steps": 0, "x": [], "lines": {}})
    series = _join([one.series for one in contents.values()])
    targets = _join([one.targets for one in contents.values()])
    steps = max(one.steps for one in contents.values())
    chosen = _choose(query.get("series"), series), _choose(query.get("target"), targets)
    step = min(max(_read_integer(query.get("step"), 1), 1), max(steps, 1))
    lines = {
        name: _read_line(path, _sign(path), *chosen, step if contents[name].steps else 0)
        for name, path in files.items()
        if name in contents
        and chosen[1] in contents[name].targets
        and chosen[0] in contents[name].series
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


def _read_contents(path: Path) -> Contents | None:
    try:
        return _list_contents(path, _sign(path))
    except (LookupError, OSError, ValueError):  # damaged, or half a copy
        return None


def _sign(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


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
def _list_contents(path: Path, _: tuple[int, int]) -> Contents:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    if "label" in names:
        targets = [name for name in names if name.startswith("p_")]
    else:
        ends = (name.removesuffix(ENDING) for name in names if name.endswith(ENDING))
        targets = [name for name in ends if name in names]
    columns = [name for name in ("series", "step") if name in names]
    table = pq.read_table(path, columns=columns)
    series = pc.unique(table["series"].cast(pa.string())).to_pylist()
    steps = int(pc.max(table["step"]).as_py() or 0) if "step" in names else 0
    x = "row"
    if "time" in names:
        kind = pq.read_schema(path).field("time").type
        x = "date" if pa.types.is_timestamp(kind) else "time"
    return Contents(tuple(map(str, series)), tuple(targets), steps, x)


@lru_cache(maxsize=64)
def _read_line(path: Path, _: tuple[int, int], series: str, target: str, step: int) -> Line:
    """Read one series; of a forecast, what was predicted so many steps ahead."""
    import numpy as np
    import pyarrow.parquet as pq

    names = pq.read_schema(path).names
    is_class = "label" in names
    columns = ["row", *(["time"] if "time" in names else [])]
    columns += ["label", target] if is_class else [target, f"{target}{ENDING}"]
    filters = [("series", "==", series), *([("step", "==", step)] if step else [])]
    table = pq.read_table(path, columns=columns, filters=filters)
    rows = table["row"].to_numpy()
    x = rows.astype(float)
    if "time" in names:
        time = table["time"].to_numpy()
        is_date = np.issubdtype(time.dtype, np.datetime64)
        x = time.astype("datetime64[us]").astype(np.int64) / 1e6 if is_date else time.astype(float)
    if is_class:
        labels = table["label"].to_numpy(zero_copy_only=False).astype(str)
        truth = (labels == target.removeprefix("p_")).astype(float)
        predicted = table[target].to_numpy()
    else:
        truth, predicted = table[target].to_numpy(), table[f"{target}{ENDING}"].to_numpy()
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
