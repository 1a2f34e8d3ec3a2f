"""The functions and operators of formulas.

What is missing stays missing: a result is NaN where a value that it depends on is, except in
`where`, which needs only the value that it picks, `fill` and `missing`. Truth is 1 and 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from slipstream.data.prepare import calendars, rolling
from slipstream.data.prepare.filters import compute_ema

Floats = npt.NDArray[np.float64]
MOST_ROWS = 100_000


@dataclass(frozen=True)
class Function:
    """What a formula may call."""

    usage: str
    """How to call it, for messages"""
    compute: Callable[..., Any]
    num_values: int = 1
    """Number of arguments that are expressions; the others are numbers of rows"""
    takes: Literal["values", "window", "shift", "times"] = "values"
    fewest_rows: int = 1
    default_rows: int | None = None
    unbounded: bool = False
    """Whether it looks back to the first row"""

    def get_reach(self, rows: int | None) -> tuple[int | None, int]:
        """Return how many rows it looks back (None: to the first row) and ahead."""
        if self.unbounded:
            return None, 0
        if rows is None:
            return 0, 0
        return (max(rows, 0), max(-rows, 0)) if self.takes == "shift" else (rows - 1, 0)


def compute_lag(values: Floats, rows: int) -> Floats:
    """Return the values of so many rows before, or of later rows where it is negative."""
    result = np.full(len(values), np.nan)
    if 0 <= rows < len(values):
        result[rows:] = values[: len(values) - rows]
    elif -len(values) < rows < 0:
        result[:rows] = values[-rows:]
    return result


def compute_diff(values: Floats, rows: int) -> Floats:
    return values - compute_lag(values, rows)


def compute_cumsum(values: Floats) -> Floats:
    """Return the sum of the known values so far."""
    missing = np.isnan(values)
    total = np.cumsum(np.where(missing, 0.0, values))
    total[missing] = np.nan
    return total


def choose(condition: Floats, if_true: Floats, if_false: Floats) -> Floats:
    chosen = np.where(condition != 0, if_true, if_false)
    return np.where(np.isnan(condition), np.nan, chosen)


def clip(values: Floats, low: Floats, high: Floats) -> Floats:
    return np.minimum(np.maximum(values, low), high)


def fill(values: Floats, other: Floats) -> Floats:
    return np.where(np.isnan(values), other, values)


def find_missing(values: Floats) -> Floats:
    return np.isnan(values).astype(np.float64)


def _make_logical(compute: Callable[..., Any]) -> Callable[..., Floats]:
    """Return a function of truth values that keeps what is missing."""

    def apply(*values: Floats) -> Floats:
        missing = np.isnan(values[0])
        for value in values[1:]:
            missing = missing | np.isnan(value)
        return np.where(missing, np.nan, compute(*values))

    return apply


FUNCTIONS = {
    "lag": Function("lag(x, rows)", compute_lag, takes="shift", default_rows=1),
    "diff": Function("diff(x, rows)", compute_diff, takes="shift", default_rows=1),
    "mean": Function("mean(x, rows)", rolling.compute_mean, takes="window"),
    "sum": Function("sum(x, rows)", rolling.compute_sum, takes="window"),
    "std": Function("std(x, rows)", rolling.compute_std, takes="window", fewest_rows=2),
    "min": Function("min(x, rows)", rolling.compute_min, takes="window"),
    "max": Function("max(x, rows)", rolling.compute_max, takes="window"),
    "median": Function("median(x, rows)", rolling.compute_median, takes="window"),
    "zscore": Function("zscore(x, rows)", rolling.compute_zscore, takes="window", fewest_rows=2),
    "ema": Function("ema(x, rows)", compute_ema, takes="window", unbounded=True),
    "cumsum": Function("cumsum(x)", compute_cumsum, unbounded=True),
    "where": Function("where(condition, if_true, if_false)", choose, 3),
    "clip": Function("clip(x, low, high)", clip, 3),
    "minimum": Function("minimum(a, b)", np.minimum, 2),
    "maximum": Function("maximum(a, b)", np.maximum, 2),
    "fill": Function("fill(x, value)", fill, 2),
    "missing": Function("missing(x)", find_missing),
    "log": Function("log(x)", np.log),
    "exp": Function("exp(x)", np.exp),
    "abs": Function("abs(x)", np.abs),
    "sqrt": Function("sqrt(x)", np.sqrt),
    "sign": Function("sign(x)", np.sign),
    "floor": Function("floor(x)", np.floor),
    "sin": Function("sin(x)", np.sin),
    "cos": Function("cos(x)", np.cos),
    "tanh": Function("tanh(x)", np.tanh),
    "hour": Function("hour()", calendars.compute_hour, 0, takes="times"),
    "minute": Function("minute()", calendars.compute_minute, 0, takes="times"),
    "weekday": Function("weekday()", calendars.compute_weekday, 0, takes="times"),
    "day_of_year": Function("day_of_year()", calendars.compute_day_of_year, 0, takes="times"),
    "month": Function("month()", calendars.compute_month, 0, takes="times"),
}
OPERATORS = {
    "+": Function("a + b", np.add, 2),
    "-": Function("a - b", np.subtract, 2),
    "*": Function("a * b", np.multiply, 2),
    "/": Function("a / b", np.divide, 2),
    "//": Function("a // b", np.floor_divide, 2),
    "%": Function("a % b", np.mod, 2),
    "**": Function("a ** 2", np.power, 2),
    "negate": Function("-a", np.negative),
    "<": Function("a < b", _make_logical(np.less), 2),
    "<=": Function("a <= b", _make_logical(np.less_equal), 2),
    ">": Function("a > b", _make_logical(np.greater), 2),
    ">=": Function("a >= b", _make_logical(np.greater_equal), 2),
    "==": Function("a == b", _make_logical(np.equal), 2),
    "!=": Function("a != b", _make_logical(np.not_equal), 2),
    "and": Function("a and b", _make_logical(np.logical_and), 2),
    "or": Function("a or b", _make_logical(np.logical_or), 2),
    "not": Function("not a", _make_logical(np.logical_not)),
}
