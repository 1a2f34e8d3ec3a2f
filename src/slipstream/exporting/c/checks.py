"""Compare the steps of `data.prepare` in C with those in Python, on all rows of all series."""

from __future__ import annotations

from typing import Any

import numpy as np

from slipstream.errors import UserError
from slipstream.exporting.c.compiler import CLibrary
from slipstream.exporting.c.memory import CLayout
from slipstream.exporting.c.series import SeriesRows, iter_series
from slipstream.exporting.formats import LIMIT
from slipstream.exporting.interface import measure_spreads, widen_limit


def check_prepare(
    library: CLibrary, layout: CLayout, new_data: Any
) -> tuple[dict[str, Any], SeriesRows | None]:
    """Return the largest difference, and a series, if possible as long as the context; refuse
    steps that differ."""
    steps, model = layout.prepared, layout.model
    assert steps is not None
    spread = measure_spreads(model.signature.inputs, model.scaler)
    largest, limit, rows, first = 0.0, LIMIT, 0, None
    for series in iter_series(model, steps, new_data):
        values = library.prepare(series.raw, len(spread), state_bytes=layout.sizes.state_bytes)
        same = np.isnan(values) == np.isnan(series.prepared)
        distance = np.abs(values - series.prepared) / spread
        distance[~same] = np.inf
        # in double but for the last rounding, where rows are float
        sizes = np.nan_to_num(np.abs(series.prepared)) * (not layout.settings.double)
        allowed = widen_limit(LIMIT, sizes / spread)
        distance = np.nan_to_num(distance, nan=0.0, posinf=np.inf)
        largest, limit = max(largest, float(distance.max())), max(limit, float(allowed.max()))
        rows += len(series.raw)
        if first is None or len(first.raw) < min(len(series.raw), model.signature.context):
            first = series
        if not (distance <= allowed).all():
            raise UserError(
                f'series "{series.name}": data.prepare in C differs by up to {largest:.2g} of a '
                "column's spread; nothing was written. Pass --after-prepare to leave the steps to "
                "the caller"
            )
    return {"prepare": {"rows": rows, "max_rel": largest, "limit": limit}}, first
