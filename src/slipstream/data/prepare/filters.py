"""Filters over past rows, or over rows around each one where that is asked for.

| kind | what it is | rows before the first | a missing value |
|---|---|---|---|
| moving_average, median | of the last `rows` values | do not count | does not count |
| savgol | polynomial of `order` over the last `rows` values | hold its value | stays `rows` rows |
| ema | y += 2 / (rows + 1) * (x - y) | hold its value | holds the last known one |
| butterworth | low pass of `order` at `cutoff_hz` | hold its value | holds the last known one |

Where a value is missing, so is the filtered one.
"""

from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import signal

from slipstream.base.errors import UserError
from slipstream.data.prepare import rolling
from slipstream.data.series import fill_forward

Floats = npt.NDArray[np.float64]
Kind = Literal["ema", "moving_average", "median", "butterworth", "savgol"]
DEFAULT_ORDER = 2
MOST_ROWS = {"ema": 1_000_000, "moving_average": 1_000_000, "median": 100_001, "savgol": 1001}
HIGHEST_ORDER = {"butterworth": 10, "savgol": 5}


def apply_filter(
    values: Floats,
    *,
    kind: str,
    rows: int | None = None,
    cutoff_hz: float | None = None,
    order: int = DEFAULT_ORDER,
    step_s: float | None = None,
    centered: bool = False,
) -> Floats:
    """Return the filtered column; `step_s` is the time from row to row, for a cut-off in Hz."""
    check_filter(kind=kind, rows=rows, cutoff_hz=cutoff_hz, order=order, centered=centered)
    if kind in ("butterworth", "ema"):
        sections = design_sections(
            kind=kind, rows=rows, cutoff_hz=cutoff_hz, order=order, step_s=step_s
        )
        return _filter_recursively(values, sections)
    assert rows is not None
    back, ahead = get_reach(kind=kind, rows=rows, centered=centered)
    assert back is not None
    result = np.empty_like(values)
    for read, write, inner in rolling.split_rows(len(values), back, ahead):
        result[write] = _filter_window(values[read], kind, rows, order, ahead)[inner]
    return result


def filter_newest(values: Floats, *, kind: str, rows: int, order: int = DEFAULT_ORDER) -> float:
    """Return what `apply_filter` returns for the last row alone, from the last `rows` values or all
    that there are; for filters that look back so far only."""
    newest, window = values[-1], values[-rows:]
    if np.isnan(newest):
        return float(newest)
    if kind == "savgol":
        before = np.full(rows - len(window), window[0])
        weights = _weigh_newest(rows, order)
        return float(newest + weights @ (np.concatenate([before, window]) - newest))
    known = window[~np.isnan(window)]
    if kind == "median":
        return float(np.median(known))
    return float(newest + (known - newest).mean())


@cache
def _weigh_newest(rows: int, order: int) -> Floats:
    return np.asarray(signal.savgol_coeffs(rows, order, pos=rows - 1, use="dot"))


def get_reach(*, kind: str, rows: int | None, centered: bool = False) -> tuple[int | None, int]:
    """Return how many rows a filter looks back (None: to the first row) and ahead."""
    if rows is None or kind in ("ema", "butterworth"):
        return None, 0
    ahead = rows // 2 if centered else 0
    return rows - 1 - ahead, ahead


def check_filter(
    *, kind: str, rows: int | None, cutoff_hz: float | None, order: int, centered: bool
) -> None:
    """Refuse settings that make no filter, before any data are read."""
    if kind == "butterworth":
        _check_butterworth(rows, cutoff_hz, order, centered)
        return
    if cutoff_hz is not None:
        raise UserError(f'cutoff_hz belongs to kind = "butterworth"; kind = "{kind}" takes rows')
    if kind not in MOST_ROWS:
        raise UserError(
            f'there is no filter "{kind}"; use {", ".join((*MOST_ROWS, "butterworth"))}'
        )
    most = MOST_ROWS[kind]
    if rows is None or not 1 <= rows <= most:
        value = "missing" if rows is None else rows
        raise UserError(f'rows is {value}; kind = "{kind}" needs from 1 to {most:,} rows')
    if kind == "savgol" and not 0 <= order < min(rows, HIGHEST_ORDER[kind] + 1):
        raise UserError(
            f"order is {order}; a Savitzky-Golay filter needs 0 to {HIGHEST_ORDER[kind]}, and more "
            f"rows than that (rows = {rows})"
        )
    if centered and kind == "ema":
        raise UserError('kind = "ema" cannot be centered; use "moving_average"')
    if centered and rows % 2 == 0:
        raise UserError(f"rows is {rows}; a centered filter needs an odd number of rows")


def compute_ema(values: Floats, rows: int) -> Floats:
    """Return the exponential moving average with the weight 2 / (rows + 1) for each new value."""
    return _filter_recursively(values, _design_ema(rows))


def design_sections(
    *, kind: str, rows: int | None, cutoff_hz: float | None, order: int, step_s: float | None
) -> Floats:
    """Return the second-order sections of a filter that looks back over all rows."""
    if kind == "ema":
        assert rows is not None
        return _design_ema(rows)
    assert cutoff_hz is not None
    return _design_butterworth(cutoff_hz, order, step_s)


def _design_ema(rows: int) -> Floats:
    weight = 2 / (rows + 1)
    return np.array([[weight, 0.0, 0.0, 1.0, weight - 1, 0.0]])


def _check_butterworth(
    rows: int | None, cutoff_hz: float | None, order: int, centered: bool
) -> None:
    highest = HIGHEST_ORDER["butterworth"]
    if cutoff_hz is None or not cutoff_hz > 0 or rows is not None:
        raise UserError('kind = "butterworth" takes cutoff_hz, above 0, instead of rows')
    if not 1 <= order <= highest:
        raise UserError(f"order is {order}; a Butterworth filter needs from 1 to {highest}")
    if centered:
        raise UserError('kind = "butterworth" cannot be centered; use "savgol" or "moving_average"')


def _design_butterworth(cutoff_hz: float, order: int, step_s: float | None) -> Floats:
    """Return the filter's second-order sections."""
    if step_s is None:
        raise UserError("cutoff_hz needs the time from row to row; set data.time")
    nyquist_hz = 0.5 / step_s
    if cutoff_hz >= nyquist_hz:
        raise UserError(
            f"cutoff_hz is {cutoff_hz:g}, but rows come every {step_s:g} s; it should be below "
            f"half their rate, {nyquist_hz:g} Hz"
        )
    sections = signal.butter(order, cutoff_hz / nyquist_hz, output="sos")
    return np.asarray(sections, dtype=np.float64)


def design_savgol(rows: int, order: int, ahead: int = 0) -> Floats:
    """Return the weights of the rows around a row, the oldest first; they add up to 1."""
    weights = signal.savgol_coeffs(rows, order, pos=rows - 1 - ahead, use="dot")
    return np.asarray(weights, dtype=np.float64)


def _filter_recursively(values: Floats, sections: Floats) -> Floats:
    """Apply a low pass as if the first known value had been there for ever.

    The difference from that value is filtered, from rest: the same as starting from the state
    that the value would have led to, but a constant column stays exactly as it is.
    """
    missing = np.isnan(values)
    known = np.flatnonzero(~missing)
    result = np.full(len(values), np.nan)
    if not len(known):
        return result
    begin = int(known[0])
    first, filled = values[begin], fill_forward(values)
    state = np.zeros((len(sections), 2))
    for some in range(begin, len(values), rolling.CHUNK_ROWS):
        rows = slice(some, some + rolling.CHUNK_ROWS)
        result[rows], state = signal.sosfilt(sections, filled[rows] - first, zi=state)
    result += first
    result[missing] = np.nan
    return result


def _filter_window(values: Floats, kind: str, rows: int, order: int, ahead: int) -> Floats:
    """Filter over the last `rows` values, then move the result `ahead` rows to the past."""
    if kind == "savgol":
        return _filter_polynomial(values, rows, order, ahead)
    late = np.append(values, np.full(ahead, np.nan))
    if kind == "median":
        result = rolling.compute_known_median(late, rows)[ahead:]
    else:
        result = rolling.compute_known_mean(late, rows)[ahead:]
    result[np.isnan(values)] = np.nan
    return result


def _filter_polynomial(values: Floats, rows: int, order: int, ahead: int) -> Floats:
    """Return the value at each row of a polynomial fitted around it, or to the rows up to it.

    The weights add up to 1; those of differences from the row keep a constant as it is.
    """
    weights = design_savgol(rows, order, ahead)
    before = np.full(rows - 1 - ahead, values[0])
    after = np.full(ahead, values[-1])
    padded = np.concatenate([before, values, after])
    result = np.zeros(len(values))
    for weight, first in zip(weights, range(rows), strict=True):
        result += weight * (padded[first : first + len(values)] - values)
    return values + result
