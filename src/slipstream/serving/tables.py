"""The graph's outputs as the table that `slipstream predict` writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from slipstream.config import Signature
from slipstream.data.series import Floats
from slipstream.portable.model import Widths
from slipstream.portable.table import (
    PhysicalPredictions,
    WindowPlaces,
    build_prediction_table,
    list_class_columns,
    list_number_columns,
)
from slipstream.stats import select_median


@dataclass(frozen=True)
class TableMaker:
    """Turns predictions of windows, [N, H, C] or with quantiles or classes behind, into a table."""

    signature: Signature
    half_widths: Widths | None

    def make(self, places: WindowPlaces, values: Floats) -> pa.Table:
        """Return the predictions of these windows, with the place of each."""
        if classes := self.signature.classes:
            columns = list_class_columns(values.reshape(-1, len(classes)), classes)
            return build_prediction_table(places, columns)
        levels = self.signature.quantiles
        point = select_median(values, levels) if levels else values
        limits = self.signature.output_range or (-np.inf, np.inf)
        intervals = {
            level: ((point - width).clip(*limits), (point + width).clip(*limits))
            for level, width in (self.half_widths or {}).items()
        }
        physical = PhysicalPredictions(point, values if levels else None, intervals)
        return build_prediction_table(places, list_number_columns(physical, self.signature))
