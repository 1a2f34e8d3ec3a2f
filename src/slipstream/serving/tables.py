"""The graph's outputs as the table that `slipstream predict` writes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from slipstream.exporting.interface import Interface
from slipstream.portable.table import (
    PhysicalPredictions,
    WindowPlaces,
    build_prediction_table,
    list_class_columns,
    list_number_columns,
)
from slipstream.serving.batching import Arrays
from slipstream.stats import find_median


def make_table(interface: Interface, places: WindowPlaces, outputs: Arrays) -> pa.Table:
    """Return the predictions of these windows, with the place of each."""
    values = outputs[interface.output].astype(np.float64)
    if classes := interface.signature.classes:
        columns = list_class_columns(values.reshape(-1, len(classes)), classes)
        return build_prediction_table(places, columns)
    quantiles = values if interface.signature.quantiles else None
    point = values
    if quantiles is not None:
        point = quantiles[..., find_median(interface.signature.quantiles)]
    intervals = {
        level: (
            outputs["lower"][..., number].astype(np.float64),
            outputs["upper"][..., number].astype(np.float64),
        )
        for number, level in enumerate(interface.levels)
    }
    physical = PhysicalPredictions(point, quantiles, intervals)
    return build_prediction_table(places, list_number_columns(physical, interface.signature))
