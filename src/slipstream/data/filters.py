"""Filters of predictions (`predict.filter`), row after row, with state; numpy only.

`make_filter(config, signature)` returns None or a `PredictionFilter`, which takes predictions in
physical units, or probabilities of classes:

    filter = make_filter(config, signature)
    for prediction in stream:               # [steps, targets, quantiles] or [steps, classes]
        shown = filter.push(prediction)     # the same shape, float64
    filter.reset()                          # at the start of each series, and after each gap

`filter.apply(predictions)` does the same for consecutive predictions along the first axis, and goes
on from what came before; both are equal to 1e-12. Every number of a prediction has a filter of its
own. Afterwards quantiles are sorted, since two that cross mean nothing, and numbers are limited to
`model.output_range`; the state is not. `filter.design` holds the coefficients, for other languages.

| kind | what it is | rows before the first | delay in rows |
|---|---|---|---|
| moving_average | the mean of the last `rows` | do not count | (rows - 1) / 2 |
| ema | y += 2 / (rows + 1) * (x - y) | hold its value | (rows - 1) / 2 |
| savgol | a polynomial of `order` over the last `rows`, at the newest | hold its value | 0 |
| butterworth | low pass of `order` at `cutoff_hz`, or period `rows` | hold its value | it depends |

The delay is by how many rows the filtered value of a steady change is late. All filters leave a
constant as it is: they work on the differences from the first value.
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

Floats = npt.NDArray[np.float64]
DEFAULT_ORDER = 2
CHUNK_NUMBERS = 1 << 22
"""Products in work at a time"""


@dataclass(frozen=True)
class FilterDesign:
    """The coefficients of a filter: either weights or sections."""

    kind: str
    delay_rows: float
    """By how many rows a steady change is late"""
    weights: Floats
    """Of the last rows, the newest first; they add up to 1. A moving average of fewer rows, at the
    start, is their mean; for `savgol` the rows before the first hold its value"""
    sections: Floats
    """[S, 5]: b0, b1, b2, a1, a2 of each second-order section, one after the other, each with the
    gain 1: y = b0 x + s1; s1 = b1 x - a1 y + s2; s2 = b2 x - a2 y"""


def design_filter(settings: PredictFilter, step: float | None) -> FilterDesign | None:
    """Return the coefficients; None where there is no filter. `step` is the time from row to row in
    seconds, or in the unit of the time column where it holds numbers."""
    kind, rows, order = settings.kind, settings.rows, settings.order or DEFAULT_ORDER
    weights, sections = np.empty(0), np.empty((0, 5))
    if kind == "none":
        return None
    if kind == "butterworth":
        sections = _design_butterworth(_find_cutoff(settings, step), order)
    elif kind == "ema":
        assert rows is not None
        weight = 2 / (rows + 1)
        sections = np.array([[weight, 0.0, 0.0, weight - 1, 0.0]])
    elif kind == "savgol":
        assert rows is not None
        weights = _fit_newest(rows, order)
    else:
        assert rows is not None
        weights = np.full(rows, 1 / rows)
    delay = float(weights @ np.arange(len(weights))) + sum(map(_compute_delay, sections))
    return FilterDesign(kind, delay if abs(delay) > 1e-9 else 0.0, weights, sections)


def _find_cutoff(settings: PredictFilter, step: float | None) -> float:
    """Return the cut-off in periods a row."""
    if settings.cutoff_hz is None:
        assert settings.rows is not None
        return 1 / settings.rows
    if step is None:
        raise UserError(
            "predict.filter.cutoff_hz needs the time from row to row, which the model's data do "
            "not have; set predict.filter.rows, the period of the cut-off, instead",
            setting="predict.filter.cutoff_hz",
        )
    cutoff = settings.cutoff_hz * step
    if cutoff >= 0.5:
        raise UserError(
            f"predict.filter.cutoff_hz is {settings.cutoff_hz:g}, but rows come every {step:g} s; "
            f"it should be below half their rate, {0.5 / step:g} Hz",
            setting="predict.filter.cutoff_hz",
        )
    return cutoff


def _design_butterworth(cutoff: float, order: int) -> Floats:
    """Return sections by the bilinear transform; the cut-off is in periods a row."""
    omega = math.tan(math.pi * cutoff)
    sections = []
    for pair in range(order // 2):
        damping = 2 * math.sin(math.pi * (2 * pair + 1) / (2 * order))
        total = 1 + damping * omega + omega**2
        gain = omega**2 / total
        a1, a2 = 2 * (omega**2 - 1) / total, (1 - damping * omega + omega**2) / total
        sections.append([gain, 2 * gain, gain, a1, a2])
    if order % 2:
        gain = omega / (1 + omega)
        sections.append([gain, gain, 0.0, (omega - 1) / (omega + 1), 0.0])
    return np.array(sections)


def _fit_newest(rows: int, order: int) -> Floats:
    """Return the weights of the value at the newest row of a polynomial fitted to all of them."""
    places = -np.arange(rows) / max(rows - 1, 1)  # from 0 to -1: powers stay of one size
    basis, _ = np.linalg.qr(places[:, None] ** np.arange(order + 1))
    weights = basis @ basis[0]
    return np.asarray(weights / weights.sum())


def _compute_delay(section: Floats) -> float:
    b0, b1, b2, a1, a2 = section
    return float((b1 + 2 * b2) / (b0 + b1 + b2) - (a1 + 2 * a2) / (1 + a1 + a2))


def advance_sections(sections: Floats, states: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the values after all sections, and the new states [S, 2, ...]."""
    new = np.empty_like(states)
    for (b0, b1, b2, a1, a2), old, state in zip(sections, states, new, strict=True):
        result = b0 * values + old[0]
        state[0] = b1 * values - a1 * result + old[1]
        state[1] = b2 * values - a2 * result
        values = result
    return values, new


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
        """Return what is known of the rows so far, as arrays by name."""
        return {
            "count": np.array(self._count),
            "first": self._first,
            "past": self._past,
            "sections": self._sections,
        }

    def set_state(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what `get_state` returned."""
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
        """Return filtered rows, consecutive along the first axis, after those before."""
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
        """Weigh the last rows of each; those before the first are 0, the first's difference."""
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
        from scipy import signal  # takes a while to import

        sections = self.design.sections
        full = np.insert(sections, 3, 1.0, axis=1)
        result, state = signal.sosfilt(
            full,
            values.reshape(len(values), -1),
            axis=0,
            zi=self._sections.reshape(len(full), 2, -1),
        )
        self._sections = state.reshape(self._sections.shape)
        return np.asarray(result).reshape(values.shape)


class PredictionFilter:
    """A filter of predictions in physical units, or of probabilities, with its state."""

    def __init__(self, design: FilterDesign, signature: Signature) -> None:
        self.design = design
        self.rows, self._signature = RowFilter(design), signature

    def reset(self) -> None:
        """Start again, as for a new series or after a gap."""
        self.rows.reset()

    def push(self, prediction: npt.ArrayLike) -> Floats:
        """Return one filtered prediction: [H, C, Q], or of classes [H, Q]."""
        return self._finish(self.rows.push(prediction))

    def apply(self, predictions: npt.ArrayLike) -> Floats:
        """Return consecutive ones, along the first axis."""
        return self._finish(self.rows.apply(predictions))

    def apply_pieces(self, predictions: npt.ArrayLike, follows: npt.NDArray[np.bool_]) -> Floats:
        """Return predictions along the first axis; the filter starts anew at each that does not
        follow the one before it."""
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
