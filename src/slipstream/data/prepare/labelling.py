"""Classes from the rows to come: the move of a column, the first barrier reached, or its sign."""

import numpy as np

from slipstream.config.prepare import LabelStep
from slipstream.data.series import Flags, Floats


def label_rows(columns: dict[str, Floats], step: LabelStep) -> Floats:
    """Return the number of each row's class among `step.classes`.

    It is NaN where one of the rows is missing that decide on it, as at the end of a series.
    """
    values, rows = columns[step.column], step.rows
    result = np.full(len(values), np.nan)
    if len(values) <= rows:
        return result
    now = values[:-rows]
    if step.kind == "barrier":
        high, low = (columns[name or step.column] for name in (step.high, step.low))
        result[:-rows] = _find_first_barrier(now, high, low, step)
        return result
    change = values[rows:] - now
    if step.kind == "sign":
        result[:-rows] = np.where(change == 0, np.nan, change > 0)
    else:
        up, down = _get_distances(now, step)
        result[:-rows] = _number_moves(change >= up, change <= -down)
    result[:-rows][np.isnan(change)] = np.nan
    return result


def _get_distances(now: Floats, step: LabelStep) -> tuple[Floats, Floats]:
    """Return how far up and down the thresholds are; NaN where there is no share of a value."""
    assert step.up is not None
    size: Floats = np.abs(now)
    if step.relative:
        size[size == 0] = np.nan
    else:
        size = np.where(np.isnan(now), np.nan, 1.0)
    return size * step.up, size * (step.down or step.up)


def _number_moves(up: Flags, down: Flags) -> Floats:
    """Return 2 for up, 0 for down and 1 for neither, or for both."""
    return 1.0 + up.astype(np.float64) - down


def _find_first_barrier(now: Floats, high: Floats, low: Floats, step: LabelStep) -> Floats:
    up, down = _get_distances(now, step)
    upper, lower = now + up, now - down
    result = np.full(len(now), 1.0)
    undecided = np.ones(len(now), dtype=bool)
    unknown = np.isnan(up)
    for ahead in range(1, step.rows + 1):
        some = slice(ahead, ahead + len(now))
        touches = high[some] >= upper, low[some] <= lower
        unknown |= np.isnan(high[some]) | np.isnan(low[some])
        decided = undecided & (touches[0] | touches[1])
        result[decided] = _number_moves(*touches)[decided]
        undecided &= ~decided
    result[unknown] = np.nan
    return result
