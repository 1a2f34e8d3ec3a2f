"""The as-of join: each row gets the newest row of another table that is already known.

A bar that is stamped with the start of its period is known only at the end of it. Joining by
`time <=` alone would show the close of a four-hour bar up to four hours early.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.base.text import format_count
from slipstream.data.prepare.rolling import to_span

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Times = npt.NDArray[Any]
Label = Literal["start", "end"]
ROUNDING = 1e-6
"""Of a period: how late a row may be where times are plain numbers, as 0.1 + 0.2 for 0.3"""


def join_as_of(
    times: Times,
    other_times: Times,
    columns: Mapping[str, Floats],
    *,
    period: str | float | None = None,
    label: str = "end",
    delay: str | float | None = None,
    limit: str | float | None = None,
) -> dict[str, Floats]:
    """Return the other table's columns at these times, NaN before any of its rows is known.

    A row of the other table is known from the end of its period on: at its own time where `label`
    is "end", one `period` later where it is "start"; and `delay` after that. With a `limit`, it
    is used for that long only.
    """
    rows = match_rows(times, other_times, period=period, label=label, delay=delay, limit=limit)
    known = rows >= 0
    result = {}
    for name, values in columns.items():
        result[name] = values[rows] if len(values) else np.empty(len(rows))
        result[name][~known] = np.nan
    return result


def match_rows(
    times: Times,
    other_times: Times,
    *,
    period: str | float | None = None,
    label: str = "end",
    delay: str | float | None = None,
    limit: str | float | None = None,
) -> Ints:
    """Return which row of the other table is known at each time; -1 where none is.

    Both tables are in time order, the other one without repeated times.
    """
    _check_times(times, other_times)
    known_from = other_times + _get_wait(times, period, label, delay)
    at = times
    if times.dtype != np.int64 and period is not None:
        at = times + ROUNDING * to_span(period, times, "period")
    rows = np.searchsorted(known_from, at, side="right") - 1
    if limit is not None and len(other_times):
        old = at - known_from[rows] >= to_span(limit, times, "limit")
        rows[old] = -1
    if len(rows) and (rows < 0).all():
        raise UserError(
            "the join matches nothing: no row of the other table is known at any time of this one; "
            "compare their times, and period, label, delay and limit"
        )
    return rows


def _get_wait(
    times: Times, period: str | float | None, label: str, delay: str | float | None
) -> float:
    """Return how long after its time stamp a row is known, in the unit of the times."""
    if label == "start" and period is None:
        raise UserError('label = "start" needs the period after which a row is known, as in "4h"')
    wait = to_span(period, times, "period") if label == "start" and period is not None else 0
    return wait + (to_span(delay, times, "delay") if delay else 0)


def _check_times(times: Times, other_times: Times) -> None:
    if times.dtype != other_times.dtype:
        raise UserError(
            "one table has dates and the other plain numbers as times; convert one of them"
        )
    steps = np.diff(other_times)
    if (steps < 0).any():
        raise UserError("the other table is not in time order; sort it")
    if (steps == 0).any():
        row = int(np.flatnonzero(steps == 0)[0])
        raise UserError(
            f"{format_count(int((steps == 0).sum()), 'row')} of the other table repeat the time "
            f"of the row before, first row {row + 2}; remove them, or join by id as well"
        )
