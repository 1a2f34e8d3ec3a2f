"""main.c: a self-test of the C code with windows of the test set."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.exporting.c.arrays import format_double, format_floats
from slipstream.exporting.c.memory import CLayout
from slipstream.exporting.c.series import SeriesRows
from slipstream.exporting.c.source import render
from slipstream.exporting.formats import ReferenceBatch

MOST_WINDOWS, MOST_NUMBERS = 8, 20_000
"""How much a self-test holds at most; one window at least"""
MOST_ROWS = 200
"""Rows of a series that the steps of `data.prepare` are tested on"""


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
    spread = [1.0] if signature.classes else [scaler.deviation[one] for one in signature.targets]
    values: dict[str, Any] = {
        "p": layout.settings.name,
        "on": "test set",
        "limit": f"{limit:g}",
        "num_windows": len(windows.rows),
        "rows": _format_rows(windows.rows, double=double),
        "constants": (),
        "future": (),
        "expected": _format_rows(expected, double=True),
        "spread": _format_rows(np.array([spread]), double=True)[0],
        "window_arguments": "".join(f", {names[one]}[n]" for one in extra),
        # a step that prepares or filters gives other numbers than a window
        "compares_steps": not (layout.prepared or layout.parts.filter_past),
        "prepared_rows": (),
    }
    for one in extra:
        values[names[one]] = _format_rows(getattr(windows, one), double=double)
    if series is not None:
        deviations = [[scaler.deviation[name] for name in signature.inputs]]
        values |= {
            "raw_rows": _format_rows(series.raw[:MOST_ROWS], double=double),
            "prepared_rows": _format_rows(series.prepared[:MOST_ROWS], double=True),
            "input_spread": _format_rows(np.array(deviations), double=True)[0],
        }
    return render("main.c.j2", values)


def _format_rows(values: npt.NDArray[Any], *, double: bool) -> list[str]:
    """Return the initializer of each first-axis entry, flat."""
    flat = values.reshape(len(values), -1)
    if not double:
        return ["{" + ", ".join(format_floats(one)) + "}" for one in flat.astype(np.float32)]
    return ["{" + ", ".join(map(format_double, one)) + "}" for one in flat.tolist()]
