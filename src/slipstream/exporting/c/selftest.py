"""main.c: a self-test of the C code with windows of the test set, or with rows of a series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.errors import UserError
from slipstream.exporting.c.arrays import format_double, format_floats
from slipstream.exporting.c.memory import CLayout
from slipstream.exporting.c.series import SeriesRows
from slipstream.exporting.c.source import render
from slipstream.exporting.formats import ReferenceBatch, SeriesPiece
from slipstream.exporting.interface import measure_spreads, widen_limit
from slipstream.portable.model import PortableRun
from slipstream.portable.stream import Stream, StreamPrediction

MOST_WINDOWS, MOST_NUMBERS = 8, 20_000
"""How much a self-test holds at most; one window at least"""
MOST_ROWS = 200
"""Rows of a series that the steps of `data.prepare` are tested on"""
ROWS_AFTER_CONTEXT = 50
"""Rows with predictions that count, where the state is carried on"""


def count_windows(layout: CLayout) -> int:
    """Return how many windows the self-test has."""
    signature = layout.model.signature
    return max(min(MOST_NUMBERS // (signature.context * len(signature.inputs)), MOST_WINDOWS), 1)


def write_selftest(
    layout: CLayout, examples: ReferenceBatch, limit: float, series: SeriesRows | None
) -> str:
    """Return the text of main.c."""
    signature, scaler = layout.model.signature, layout.model.scaler
    double, windows = layout.settings.double, examples.windows
    expected = next(iter(examples.outputs.values()))  # lower and upper follow it
    extra = [name for name in ("static", "future") if getattr(windows, name) is not None]
    names = {"static": "constants", "future": "future"}
    spread = _measure_spreads(layout)
    limit = _widen_limit(layout, limit, expected, spread)
    values: dict[str, Any] = {
        "p": layout.settings.name,
        "on": "test set",
        "limit": f"{limit:g}",
        "num_windows": len(windows.rows),
        "rows": _format_rows(windows.rows, double=double),
        "constants": (),
        "future": (),
        "expected": _format_rows(expected, double=True),
        "spread": _format_rows(spread[None], double=True)[0],
        "window_arguments": "".join(f", {names[one]}[n]" for one in extra),
        # a step that prepares or filters gives other numbers than a window
        "compares_steps": not (layout.prepared or layout.parts.filter_past),
        "prepared_rows": (),
    }
    for one in extra:
        values[names[one]] = _format_rows(getattr(windows, one), double=double)
    if series is not None:
        deviations = measure_spreads(signature.inputs, scaler)[None]
        if not double:
            prepared = np.nan_to_num(np.abs(series.prepared[:MOST_ROWS]))
            limit = float(widen_limit(limit, prepared / deviations).max())
        values |= {
            "limit": f"{limit:g}",
            "raw_rows": _format_rows(series.raw[:MOST_ROWS], double=double),
            "prepared_rows": _format_rows(series.prepared[:MOST_ROWS], double=True),
            "input_spread": _format_rows(deviations, double=True)[0],
        }
    return render("main.c.j2", values)


def count_rows(layout: CLayout) -> int:
    """Return how many rows of a series the self-test has, where the state is carried on."""
    signature = layout.model.signature
    ahead = signature.future_shape[0] * signature.future_shape[1]
    outputs = signature.steps_out * len(signature.targets) * signature.outputs
    columns = layout.prepared.columns if layout.prepared else signature.inputs
    width = len(columns) + ahead + outputs
    return max(min(MOST_NUMBERS // width, signature.context + ROWS_AFTER_CONTEXT), 1)


def write_row_selftest(layout: CLayout, run: PortableRun, start: SeriesPiece, limit: float) -> str:
    """Return the text of main.c: rows before `data.prepare` from the start of a series, and what
    a stream of them predicts."""
    signature, double = layout.model.signature, layout.settings.double
    if not double:
        start = _round_to_float(start)
    columns = layout.prepared.columns if layout.prepared else signature.inputs
    if layout.prepared is None:
        run = _drop_steps(run)
    expected = _predict_rows(run, start, columns)
    known = [one for one in expected if one is not None]
    if not known:
        raise UserError("no series is long enough for the self-test of the C code")
    first = len(expected) - len(known)
    count = len(expected)
    spread = _measure_spreads(layout)
    limit = _widen_limit(layout, limit, np.stack(known), spread)
    ahead, fixed = start.future, start.static
    values: dict[str, Any] = {
        "p": layout.settings.name,
        "limit": f"{limit:g}",
        "first": first,
        "prepares": layout.prepared is not None,
        "rows": _format_rows(start.rows[:count], double=double),
        "constants": () if fixed is None else _format_rows(fixed[None], double=double),
        "future": () if ahead is None else _format_rows(ahead[:count], double=double),
        "expected": _format_rows(np.stack(known), double=True),
        "spread": _format_rows(spread[None], double=True)[0],
    }
    return render("main_rows.c.j2", values)


def _measure_spreads(layout: CLayout) -> npt.NDArray[np.float64]:
    signature = layout.model.signature
    return (
        np.ones(1) if signature.classes else measure_spreads(signature.targets, layout.model.scaler)
    )


def _widen_limit(
    layout: CLayout, limit: float, expected: npt.NDArray[Any], spread: npt.NDArray[np.float64]
) -> float:
    """Return the limit of the differences from these predictions [N, H, C] or [N, H, C, Q]."""
    signature, scaler = layout.model.signature, layout.model.scaler
    if signature.classes:
        return limit
    shift = np.array([scaler.shift[name] for name in signature.targets])
    unit = np.array([scaler.size[name] for name in signature.targets])
    inputs = max(
        abs(edge[name] - scaler.shift[name]) / scaler.size[name]
        for edge in (scaler.low, scaler.high)
        for name in signature.inputs
    )
    by_target = expected.reshape(len(expected), signature.steps_out, len(spread), -1)
    size = np.maximum(np.abs(by_target - shift[:, None]), inputs * unit[:, None])
    if not layout.settings.double:
        size = np.maximum(size, np.abs(by_target))
    return float(widen_limit(limit, size / spread[:, None]).max())


def _round_to_float(piece: SeriesPiece) -> SeriesPiece:
    """Return the numbers that the C code reads."""
    rows, static, future = (
        None if one is None else one.astype(np.float32).astype(np.float64) for one in piece
    )
    assert rows is not None
    return SeriesPiece(rows, static, future)


def _drop_steps(run: PortableRun) -> PortableRun:
    """Return the run for rows that `data.prepare` has been applied to."""
    (member,) = run.members
    config = member.first.config
    data = config.data.model_copy(update={"prepare": ()})
    bare = config.model_copy(update={"data": data})
    models = tuple(replace(one, config=bare) for one in member.models)
    return replace(run, members=(replace(member, models=models),))


def _predict_rows(
    run: PortableRun, start: SeriesPiece, columns: Sequence[str]
) -> list[npt.NDArray[Any] | None]:
    """Return what is predicted after each row, up to one that makes a gap."""
    stream = Stream(run, regime="carried")
    places = [columns.index(name) for name in stream.columns]
    result: list[npt.NDArray[Any] | None] = []
    for number, row in enumerate(start.rows[:, places]):
        ahead = None if start.future is None else start.future[number]
        try:
            prediction = stream.push(row, id="", static=start.static, future=ahead)
        except UserError:
            break
        if prediction is None and result and result[-1] is not None:
            break
        result.append(None if prediction is None else _get_values(prediction))
    return result


def _get_values(prediction: StreamPrediction) -> npt.NDArray[Any]:
    every = (prediction.probabilities, prediction.quantiles, prediction.point)
    return next(one for one in every if one is not None)


def _format_rows(values: npt.NDArray[Any], *, double: bool) -> list[str]:
    """Return the initializer of each first-axis entry, flat."""
    flat = values.reshape(len(values), -1)
    if not double:
        return ["{" + ", ".join(format_floats(one)) + "}" for one in flat.astype(np.float32)]
    return ["{" + ", ".join(map(format_double, one)) + "}" for one in flat.tolist()]
