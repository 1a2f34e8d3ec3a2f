"""Lengths of time in the unit of a time column."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.config.prepare import parse_duration
from slipstream.errors import UserError

Times = npt.NDArray[Any]
MICROSECONDS = 1e6


def to_span(value: str | float, times: Times, setting: str) -> int | float:
    """Return a length of time in the unit of the times: microseconds, or that of plain numbers.

    For plain numbers it has to be a number too, as their unit is not known.
    """
    if times.dtype != np.int64:
        if isinstance(value, str):
            raise UserError(
                f'{setting} is "{value}", but data.time holds plain numbers; write {setting} as a '
                "number in their unit"
            )
        return float(value)
    exact = parse_duration(value, setting) * MICROSECONDS
    whole = round(exact)
    if not whole or not math.isclose(exact, whole, rel_tol=1e-12):
        raise UserError(f"{setting} is {value}; use a whole number of microseconds")
    return whole
