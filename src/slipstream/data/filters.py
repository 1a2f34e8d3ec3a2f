"""Filters of columns (`data.prepare`) and of predictions (`predict.filter`).

`design_filter(settings, step)` returns the coefficients of either, and numpy suffices for them:

| kind | what it is | rows before the first | a missing value | delay in rows |
|---|---|---|---|---|
| moving_average | the mean of the last `rows` | do not count | does not count | (rows - 1) / 2 |
| median | the median of the last `rows` | do not count | does not count | (rows - 1) / 2 |
| ema | y += 2 / (rows + 1) * (x - y) | hold its value | holds the last known | (rows - 1) / 2 |
| savgol | a polynomial of `order` over the last `rows` | hold its value | stays `rows` rows | 0 |
| butterworth | a low pass of `order` | hold its value | holds the last known | it depends |

The delay is by how many rows the filtered value of a steady change is late. Where a value is
missing, so is the filtered one; predictions are never missing. All filters leave a constant exactly
as it is, because they work on differences from a value.

Columns: `filter_column` filters a whole column, `filter_newest` and `filter_value` its next row.

Predictions: `make_filter(config, signature)` returns None or a `PredictionFilter`, which takes
predictions in physical units, or probabilities of classes:

    filter = make_filter(config, signature)
    for prediction in stream:               # [steps, targets, quantiles] or [steps, classes]
        shown = filter.push(prediction)     # the same shape, float64
    filter.reset()                          # at the start of each series, and after each gap

`filter.apply(predictions)` does the same for consecutive predictions along the first axis, and goes
on from what came before; both are equal to 1e-12. Every number of a prediction has a filter of its
own. Afterwards quantiles are sorted, since two that cross mean nothing, and numbers are limited to
`model.output_range`; the state is not. `filter.design` holds the coefficients, for other languages.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.base.errors import UserError
from slipstream.config import Config, PredictFilter, Signature
from slipstream.config.prepare import DEFAULT_FILTER_ORDER, FilterStep
from slipstream.data.prepare import rolling
from slipstream.data.series import fill_forward

Floats = npt.NDArray[np.float64]
MAX_POWER = 1e6
"""Up to this power of row numbers, weights are exact to 1e-12 and equal those of
`scipy.signal.savgol_coeffs`: data that were prepared with scipy's weights must not change"""
CHUNK_NUMBERS = 1 << 22
"""The number of products that are computed at a time, to limit memory"""


@dataclass(frozen=True)
class FilterDesign:
    """The coefficients of a filter: weights or sections; a median has neither."""

    kind: str
    delay_rows: float
    """The number of rows by which the filter delays a steady change"""
    weights: Floats
    """The weights of the last rows, the newest first; they add up to 1. At the start, a moving
    average of fewer rows is their mean; for `savgol` the rows before the first hold its value"""
    sections: Floats
    """[S, 5]: b0, b1, b2, a1, a2 of each second-order section, one after the other, together with
    the gain 1: y = b0 x + s1; s1 = b1 x - a1 y + s2; s2 = b2 x - a2 y"""
    rows: int = 0
    """The length of the window; 0 where there are sections"""
    ahead: int = 0
    """The number of window rows after the filtered row"""


def design_filter(settings: PredictFilter | FilterStep, step: float | None) -> FilterDesign | None:
    """Return the coefficients of the configured filter; None where there is no filter. `step` is
    the time from row to row in seconds, or in the unit of the time column where it holds numbers.
    """
    if settings.kind == "none":
        return None
    order = settings.order or DEFAULT_FILTER_ORDER
    if settings.kind == "butterworth":
        return design_low_pass(_find_cutoff(settings, step), order)
    assert settings.rows is not None
    if settings.kind == "ema":
        return design_ema(settings.rows)
    _, ahead = get_reach(settings)
    return _design_window(settings.kind, settings.rows, order, ahead)


def get_reach(settings: PredictFilter | FilterStep) -> tuple[int | None, int]:
    """Return how many rows a filter looks back (None: to the first row) and ahead."""
    if settings.rows is None or settings.kind in ("ema", "butterworth"):
        return None, 0
    is_centered = isinstance(settings, FilterStep) and settings.centered
    ahead = settings.rows // 2 if is_centered else 0
    return settings.rows - 1 - ahead, ahead


def _design_window(kind: str, rows: int, order: int, ahead: int) -> FilterDesign:
    if kind == "median":  # a median has no weights
        return FilterDesign(
            kind, (rows - 1) / 2 - ahead, np.empty(0), np.empty((0, 5)), rows, ahead
        )
    weights = _fit_polynomial(rows, order, ahead) if kind == "savgol" else np.full(rows, 1 / rows)
    delay = float(weights @ np.arange(rows)) - ahead
    return FilterDesign(kind, _round_delay(delay), weights, np.empty((0, 5)), rows, ahead)


def design_ema(rows: int) -> FilterDesign:
    """Return the exponential average with the weight 2 / (rows + 1) for each new value."""
    weight = 2 / (rows + 1)
    return _make_recursive("ema", np.array([[weight, 0.0, 0.0, weight - 1, 0.0]]))


def design_low_pass(cutoff: float, order: int) -> FilterDesign:
    """Return a Butterworth filter by the bilinear transform; the cut-off is a share of half the
    sampling rate. The sections are those of `scipy.signal.butter`, to the bit: data that were
    prepared with them must not change."""
    warped = 4 * np.tan(np.pi * cutoff / 2)  # for a rate of 2, as the transform below
    analog = -np.exp(1j * np.pi * np.arange(-order + 1, order, 2) / (2 * order)) * warped
    gain = warped**order * np.real(1 / np.prod(4 - analog))
    poles = (4 + analog) / (4 - analog)
    # one pole of each conjugate pair, the fastest to settle first; the two may differ by rounding
    pairs = (poles[(order + 1) // 2 :] + poles[: order // 2][::-1].conj()) / 2
    denominators = [np.poly([pole, pole.conj()]).real[1:] for pole in pairs]
    numerators = [[1.0, 2.0, 1.0] for _ in pairs]  # two zeros at -1
    if order % 2:
        # a real pole has one zero at -1; the other one, at 0, belongs to the slowest pole near it
        denominators.insert(0, np.array([-poles[order // 2].real, 0.0]))
        numerators.insert(0, [1.0, 2.0, 1.0])
        near = [number for number, pole in enumerate(pairs, start=1) if pole.real > -0.5]
        numerators[max(near, default=0)] = [1.0, 1.0, 0.0]
    sections = np.concatenate([numerators, denominators], axis=1)
    sections[0, :3] *= gain
    return _make_recursive("butterworth", sections)


def _make_recursive(kind: str, sections: Floats) -> FilterDesign:
    delay = float(sum(map(_compute_delay, sections)))
    return FilterDesign(kind, _round_delay(delay), np.empty(0), sections)


def _compute_delay(section: Floats) -> float:
    b0, b1, b2, a1, a2 = section
    return float((b1 + 2 * b2) / (b0 + b1 + b2) - (a1 + 2 * a2) / (1 + a1 + a2))


def _round_delay(delay: float) -> float:
    return delay if abs(delay) > 1e-9 else 0.0


def _find_cutoff(settings: PredictFilter | FilterStep, step: float | None) -> float:
    """Return the cut-off as a share of half the sampling rate."""
    if settings.cutoff_hz is None:
        assert settings.rows is not None
        return 2 / settings.rows
    is_of_column = isinstance(settings, FilterStep)
    setting = "cutoff_hz" if is_of_column else "predict.filter.cutoff_hz"
    if step is None:
        raise UserError(
            f"{setting} needs the time from row to row; set data.time"
            if is_of_column
            else f"{setting} needs the time from row to row, which the model's data do not have; "
            "set predict.filter.rows, the period of the cut-off, instead",
            setting=None if is_of_column else setting,
        )
    half_rate_hz = 0.5 / step
    if settings.cutoff_hz >= half_rate_hz:
        raise UserError(
            f"{setting} is {settings.cutoff_hz:g}, but rows come every {step:g} s; it should be "
            f"below half their rate, {half_rate_hz:g} Hz",
            setting=None if is_of_column else setting,
        )
    return settings.cutoff_hz / half_rate_hz


def _fit_polynomial(rows: int, order: int, ahead: int) -> Floats:
    """Return the weights, the newest row first, of the value that a polynomial fitted to all rows
    has `ahead` rows before the newest one."""
    positions = np.arange(1.0 - rows + ahead, 1.0 + ahead)
    if (rows - 1) ** order > MAX_POWER:
        positions /= rows - 1  # the value at 0 is the same, and powers are of one size
    powers = positions ** np.arange(order + 1)[:, None]
    value_at_0 = np.eye(order + 1)[0]
    weights, *_ = np.linalg.lstsq(powers, value_at_0, rcond=np.finfo(np.float64).eps)
    return np.ascontiguousarray(weights[::-1])


def filter_column(values: Floats, design: FilterDesign) -> Floats:
    """Return the filtered column of a series; NaN where a value is missing."""
    if len(design.sections):
        return _filter_recursively(values, design.sections)
    result = np.empty_like(values)
    back = design.rows - 1 - design.ahead
    for read, write, inner in rolling.split_rows(len(values), back, design.ahead):
        result[write] = _filter_window(values[read], design)[inner]
    return result


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
    state = np.zeros((len(sections), 2, 1))
    for row in range(begin, len(values), rolling.CHUNK_ROWS):
        rows = slice(row, row + rolling.CHUNK_ROWS)
        filtered, state = run_sections(sections, state, filled[rows, None] - first)
        result[rows] = filtered[:, 0]
    result += first
    result[missing] = np.nan
    return result


def _filter_window(values: Floats, design: FilterDesign) -> Floats:
    """Filter over the last rows, then move the result `ahead` rows to the past."""
    if design.kind == "savgol":
        return _filter_polynomial(values, design)
    late = np.append(values, np.full(design.ahead, np.nan))
    average = rolling.compute_known_mean
    if design.kind == "median":
        average = rolling.compute_known_median
    result = average(late, design.rows)[design.ahead :]
    result[np.isnan(values)] = np.nan
    return result


def _filter_polynomial(values: Floats, design: FilterDesign) -> Floats:
    """Return the value at each row of a polynomial fitted around it, or to the rows up to it.

    The weights add up to 1; those of differences from the row keep a constant as it is.
    """
    before = np.full(design.rows - 1 - design.ahead, values[0])
    after = np.full(design.ahead, values[-1])
    padded = np.concatenate([before, values, after])
    result = np.zeros(len(values))
    for first, weight in enumerate(design.weights[::-1]):
        result += weight * (padded[first : first + len(values)] - values)
    return values + result


def filter_newest(values: Floats, design: FilterDesign) -> float:
    """Return the filtered value of the last row, equal to that of `filter_column`, from the rows of
    its window or all that exist; for filters without a state that look back only."""
    newest, window = values[-1], values[-design.rows :]
    if np.isnan(newest):
        return float(newest)
    if design.kind == "savgol":
        before = np.full(design.rows - len(window), window[0])
        weights = np.ascontiguousarray(design.weights[::-1])
        return float(newest + weights @ (np.concatenate([before, window]) - newest))
    known = window[~np.isnan(window)]
    if design.kind == "median":
        return float(np.median(known))
    return float(newest + (known - newest).mean())


def filter_value(design: FilterDesign, memory: Floats | None, value: float) -> tuple[float, Floats]:
    """Return the filtered value of the next row, equal to that of `filter_column`, and the new
    memory; for filters with a state. `memory` has the first and the last known value, then the
    state; None before the first row."""
    is_missing = math.isnan(value)
    if memory is None or math.isnan(memory[0]):
        memory = np.concatenate([[value, value], np.zeros(2 * len(design.sections))])
        if is_missing:
            return math.nan, memory
    first, last = memory[:2]
    filled = last if is_missing else value
    result, states = advance_sections(
        design.sections, memory[2:].reshape(-1, 2), np.asarray(filled - first)
    )
    new = np.concatenate([[first, filled], states.ravel()])
    return math.nan if is_missing else float(first + result), new


def advance_sections(sections: Floats, states: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the values after all sections, and the new states [S, 2, ...]."""
    new = np.empty_like(states)
    for (b0, b1, b2, a1, a2), old, state in zip(sections, states, new, strict=True):
        result = b0 * values + old[0]
        state[0] = b1 * values - a1 * result + old[1]
        state[1] = b2 * values - a2 * result
        values = result
    return values, new


def run_sections(sections: Floats, states: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return consecutive values [T, N] after all sections, and the new states [S, 2, N]."""
    from scipy import signal  # takes a while to import, and a device may not have it

    full = np.insert(sections, 3, 1.0, axis=1)
    result, new = signal.sosfilt(full, values, axis=0, zi=states)
    return np.asarray(result), np.asarray(new)


class RowFilter:
    """A filter over rows of numbers of any shape, with its state."""

    def __init__(self, design: FilterDesign) -> None:
        self.design = design
        self.reset()

    def reset(self) -> None:
        """Forget all rows: the next one is the first."""
        self._count = 0
        self._first = self._past = np.empty(0)
        self._sections: npt.NDArray[Any] = np.empty(0)

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return the filter's state, as arrays by name."""
        return {
            "count": np.array(self._count),
            "first": self._first,
            "past": self._past,
            "sections": self._sections,
        }

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Restore a state that `get_state` returned."""
        self._count = int(state["count"])
        self._first, self._past = state["first"].copy(), state["past"].copy()
        self._sections = state["sections"].copy()

    def push(self, row: npt.ArrayLike) -> Floats:
        """Return the filtered row."""
        values = np.asarray(row, dtype=np.float64)
        if not len(self.design.sections):
            return np.asarray(self.apply(values[None])[0])
        if not self._count:
            self._start(values)
        self._count += 1
        values, self._sections = advance_sections(
            self.design.sections, self._sections, values - self._first
        )
        return self._first + values

    def apply(self, rows: npt.ArrayLike) -> Floats:
        """Return consecutive rows, along the first axis, filtered after the rows pushed before."""
        values = np.asarray(rows, dtype=np.float64)
        if not len(values):
            return values
        if not self._count:
            self._start(values[0])
        filter_all = self._apply_sections if len(self.design.sections) else self._apply_weights
        result = self._first + filter_all(values - self._first)
        self._count += len(values)
        return result

    def _start(self, first: Floats) -> None:
        design = self.design
        self._first = first.copy()
        self._past = np.zeros((max(len(design.weights) - 1, 0), *first.shape))
        self._sections = np.zeros((len(design.sections), 2, *first.shape))

    def _apply_weights(self, values: Floats) -> Floats:
        """Return the weighted sum of the last rows for each row; rows before the first count as 0,
        the first row's difference from itself."""
        weights = self.design.weights[::-1]
        joined = np.concatenate([self._past, values])
        self._past = joined[len(joined) - len(self._past) :]
        windows = np.lib.stride_tricks.sliding_window_view(joined, len(weights), axis=0)
        at_once = max(1, CHUNK_NUMBERS // windows[0].size)
        parts = [windows[i : i + at_once] @ weights for i in range(0, len(values), at_once)]
        result = np.concatenate(parts)
        if self.design.kind == "moving_average" and self._count < len(weights):
            known = np.arange(1, len(values) + 1) + self._count
            share = len(weights) / np.minimum(known, len(weights))
            result *= share.reshape(-1, *[1] * (values.ndim - 1))
        return result

    def _apply_sections(self, values: Floats) -> Floats:
        sections, states = self.design.sections, self._sections
        flat = states.reshape(len(sections), 2, -1)
        result, new = run_sections(sections, flat, values.reshape(len(values), -1))
        self._sections = new.reshape(states.shape)
        return result.reshape(values.shape)


class PredictionFilter:
    """A filter of predictions in physical units, or of probabilities, with its state."""

    def __init__(self, design: FilterDesign, signature: Signature) -> None:
        self.design = design
        self.rows, self._signature = RowFilter(design), signature

    def reset(self) -> None:
        """Start again, as for a new series or after a gap."""
        self.rows.reset()

    def push(self, prediction: npt.ArrayLike) -> Floats:
        """Return one filtered prediction: [H, C, Q], or [H, Q] for classes."""
        return self._finish(self.rows.push(prediction))

    def apply(self, predictions: npt.ArrayLike) -> Floats:
        """Return consecutive predictions, along the first axis, filtered."""
        return self._finish(self.rows.apply(predictions))

    def apply_pieces(self, predictions: npt.ArrayLike, follows: npt.NDArray[np.bool_]) -> Floats:
        """Return filtered predictions along the first axis; the filter is reset at each prediction
        that does not follow the one before."""
        values = np.asarray(predictions, dtype=np.float64)
        result = np.empty_like(values)
        edges = np.union1d(np.flatnonzero(~follows), [0, len(values)])
        for begin, end in itertools.pairwise(edges.tolist()):
            if not follows[begin]:
                self.reset()
            result[begin:end] = self.apply(values[begin:end])
        return result

    def _finish(self, values: Floats) -> Floats:
        if self._signature.classes:
            return values.clip(0.0, 1.0)  # but for rounding they are
        if self._signature.quantiles:
            values = np.sort(values, axis=-1)
        limits = self._signature.output_range
        return values if limits is None else values.clip(*limits)


def make_filter(config: Config, signature: Signature) -> PredictionFilter | None:
    """Return the filter that the config sets, in its initial state; None where it sets none."""
    design = design_filter(config.predict.filter, signature.step)
    return None if design is None else PredictionFilter(design, signature)


def describe_filter(settings: PredictFilter, design: FilterDesign) -> dict[str, Any]:
    """Return a filter's settings and its delay, as summaries contain them."""
    return {**settings.model_dump(exclude_none=True), "delay_rows": design.delay_rows}
