"""The steps of `data.prepare` row after row, as rows of a stream arrive.

A row is computed from the past rows that steps look back to and from what recursive filters
remember, which `PreparedRow` holds; the results are those of a whole series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config import Data, Signature
from slipstream.data.prepare.chain import StepPlan, plan_steps, select_steps
from slipstream.data.prepare.frames import SeriesFrame
from slipstream.data.prepare.resampling import CONSTANT, ROUNDING, get_lengths, get_shift
from slipstream.data.prepare.steps import Limits, Padding, Resampling, Step, StepInputs
from slipstream.data.series import MICROSECONDS, Floats, Times


class RowTime(NamedTuple):
    """The time of a row."""

    value: float
    """Microseconds of a date, or the number itself"""
    is_date: bool

    def since(self, earlier: RowTime) -> float:
        """Return the time since an earlier row, in seconds or in the unit of the numbers."""
        return (self.value - earlier.value) / (MICROSECONDS if self.is_date else 1)

    def to_array(self) -> Times:
        """Return the time as an array without dimensions."""
        return np.array(self.value, dtype=np.int64 if self.is_date else np.float64)

    @classmethod
    def from_array(cls, array: Times | None) -> RowTime | None:
        """Return the time of such an array; None where there is none."""
        return None if array is None else cls(array.item(), array.dtype == np.int64)

    def to_value(self) -> datetime | float:
        """Return a datetime, or the number itself."""
        if not self.is_date:
            return self.value
        return EPOCH + timedelta(microseconds=int(self.value))


EPOCH = datetime(1970, 1, 1)
Version = str
"""A column's name, and how many steps have written it, as in "current#1" """


@dataclass(frozen=True)
class PreparedRow:
    """The state of all steps after the newest row of a series; never changed in place."""

    inputs: Floats
    """The model's inputs in the newest row, in the model's order; NaN where one is missing"""
    waits: bool = True
    """Whether steps look back further than the series goes, so that the row does not count"""
    count: int = 0
    """The number of rows of the series so far"""
    past: dict[Version, Floats] = field(default_factory=dict)
    """The last values of columns that a step looks back to"""
    times: Times = field(default_factory=lambda: np.empty(0))
    filters: dict[Version, Floats] = field(default_factory=dict)
    """The state of steps that depend on all earlier rows, as recursive filters do"""
    known: frozenset[str] = frozenset()
    """The columns that have had a value so far"""


class VersionedStep(NamedTuple):
    """A step, and the versions of the columns that it reads and writes."""

    step: Step[Any]
    reads: dict[str, Version]
    writes: dict[str, Version]


class RowSteps:
    """The steps that compute a model's inputs, row after row."""

    def __init__(
        self,
        data: Data,
        needed: Sequence[str],
        limits: Mapping[str, Limits],
        step_s: float | None,
        plan: StepPlan | None = None,
    ) -> None:
        """`plan` has the steps; by default, all that the needed columns come from, and of these
        those after the one that resamples."""
        if plan is None:
            plan = select_steps(plan_steps(data), needed)
        _, resampling, after = split_steps(plan)
        self.data, self.needed, self.limits, self.step_s = data, tuple(needed), limits, step_s
        self.resampling = resampling
        """The step that makes the rows which these steps take; None where they take all rows"""
        self.padding = 0
        """The number of rows that pad a series before its first row"""
        self.pads_zero = False
        self.steps: list[VersionedStep] = []
        self.depth: dict[Version, int] = {}
        """The number of past rows that steps look back to, by version"""
        versions: dict[str, int] = {}
        if resampling is not None:
            resampling.check_rows(step_s)
        for step in after:
            step.check_rows(step_s)
            if isinstance(step, Padding):
                if step.number != plan.steps[-1].number:
                    raise UserError(
                        f"{step.where} cannot be streamed: other steps follow it; make it the last "
                        "step"
                    )
                self.padding, self.pads_zero = step.count_rows(data.context), step.is_zero
                continue
            reads = {name: f"{name}#{versions.get(name, 0)}" for name in step.reads}
            versions |= {name: versions.get(name, 0) + 1 for name in step.writes}
            writes = {name: f"{name}#{versions[name]}" for name in step.writes}
            for version in reads.values():
                self.depth[version] = max(self.depth.get(version, 0), step.look_back or 0)
            self.steps.append(VersionedStep(step, reads, writes))
        self.max_depth = max(self.depth.values(), default=0)
        own = replace(plan, steps=after)
        raw_columns = (name for name in needed if name not in own.written)
        self.sources = tuple(dict.fromkeys((*own.list_sources(), *raw_columns)))
        self.outputs = [f"{name}#{versions.get(name, 0)}" for name in needed]
        self.features = [(name, plan.warm_up[name]) for name in needed if name in plan.written]

    def start(self) -> PreparedRow:
        """Return the state before the first row of a series."""
        return PreparedRow(np.empty(0))

    def add(self, state: PreparedRow, values: Floats, time: RowTime | None) -> PreparedRow:
        """Return the state after the next row, given its values in the order of `sources`."""
        known = {f"{name}#0": float(v) for name, v in zip(self.sources, values, strict=True)}
        memory = dict(state.filters)
        for versioned in self.steps:
            self._compute(versioned, state, time, known, memory)
        inputs = np.array([known[version] for version in self.outputs])
        seen = state.known | {
            name for name, value in zip(self.needed, inputs, strict=True) if not math.isnan(value)
        }
        times = state.times
        if self.max_depth:
            times = _append_time(times, time)[-self.max_depth :]
        return PreparedRow(
            inputs=inputs,
            waits=any(
                name not in seen and (rows is None or 0 < rows >= state.count)
                for name, rows in self.features
            ),
            count=state.count + 1,
            past={
                version: np.append(state.past.get(version, ()), known[version])[-depth:]
                for version, depth in self.depth.items()
                if depth
            },
            times=times,
            filters=memory,
            known=seen,
        )

    def _compute(
        self,
        versioned: VersionedStep,
        state: PreparedRow,
        time: RowTime | None,
        known: dict[Version, float],
        memory: dict[Version, Floats],
    ) -> None:
        """Add the values that a step writes for the new row to `known`, and its new state to
        `memory`."""
        step, reads, writes = versioned
        back = min(step.look_back or 0, state.count)
        columns = {
            name: np.append(state.past[version][-back:] if back else (), known[version])
            for name, version in reads.items()
        }
        times = None
        if time is not None:
            times = _append_time(state.times[len(state.times) - back :], time)
        rows = range(back + 1)
        frame = SeriesFrame("", rows, 0, times, self.step_s, columns, rows)
        inputs = StepInputs(self.data.context, self.limits.get(str(step.number)))
        remembered = {
            name: state.filters[version]
            for name, version in writes.items()
            if version in state.filters
        }
        values, after = step.compute_row(frame, inputs, remembered)
        known |= {writes[name]: value for name, value in values.items()}
        memory |= {writes[name]: numbers for name, numbers in after.items()}


def split_steps(
    plan: StepPlan,
) -> tuple[tuple[Step[Any], ...], Resampling | None, tuple[Step[Any], ...]]:
    """Return the steps before the one that resamples, that one, and those after it."""
    for number, step in enumerate(plan.steps):
        if isinstance(step, Resampling):
            return plan.steps[:number], step, plan.steps[number + 1 :]
    return (), None, plan.steps


SUMS, COUNTS, FIRSTS, HIGHS, LOWS, LASTS, SEEN = range(7)
"""Rows of `BinState.values`; SEEN has the time of the last known value"""
MAX_MADE = 1_000_000
"""New rows that one row may complete"""


@dataclass(frozen=True)
class BinState:
    """The bin that the newest row lies in, and what came before; never changed in place."""

    values: Floats
    """[7, columns], of the rows in the bin; LASTS and SEEN also of those before it"""
    prepared: PreparedRow
    """Of the steps before"""
    time: RowTime | None = None
    """Of the newest row"""
    number: int = 0
    """The bin's end, as a multiple of `every`"""
    is_made: bool = False
    """Whether the bin's new row was made, because the newest row lies at its end"""


class MadeRow(NamedTuple):
    """A row at regular times."""

    values: Floats
    time: RowTime | None
    ends_bin: bool
    """Whether the newest row lies at its time; otherwise it has a later time"""


class RowResampler:
    """Makes rows at regular times from the rows of a stream, as `resampling.resample` does.

    A new row is made as soon as no later row can belong to it: with the row at its very time, or
    else with the first row after it. Rows of a gap that hold the last value are made together.
    """

    def __init__(self, data: Data, columns: Sequence[str], limits: Mapping[str, Limits]) -> None:
        """`columns` are those that later steps, or the model, read of a new row."""
        plan = plan_steps(data)
        before, resampling, _ = split_steps(plan)
        assert resampling is not None
        self.step, self.columns, self.bars = resampling, tuple(columns), resampling.bars
        made = () if self.bars is None else resampling.writes
        read = (*(name for name in columns if name not in made), *resampling.reads)
        self.read = tuple(dict.fromkeys(read))
        """The columns of the rows in bins, after the steps before"""
        earlier = select_steps(replace(plan, steps=before), self.read)
        try:
            self.before = RowSteps(data, self.read, limits, None, earlier)
        except UserError as error:
            raise UserError(error.message + f"; put {resampling.where} first") from None
        self.sources = self.before.sources

    def start(self) -> BinState:
        """Return what there is before the first row."""
        values = np.zeros((7, len(self.read)))
        values[[LASTS, SEEN]] = np.nan
        return BinState(values, self.before.start())

    def add(self, state: BinState, values: Floats, time: RowTime) -> tuple[BinState, list[MadeRow]]:
        """Return the state after a row, from its values in the order of `sources`, and the new
        rows that it completes, the oldest first."""
        step, limit, rounding = self._get_lengths(time)
        if self.bars is not None and self.bars.is_start:
            time = time._replace(value=time.value + get_shift(time.to_array(), step))
        number = _count_bins(time.value - rounding, step)
        made: list[MadeRow] = []
        if state.time is not None:
            first = state.number + state.is_made
            last = number - 1
            if math.isfinite(limit):
                last = min(last, math.floor((state.time.value + limit) / step) + 1)
            if last - first > MAX_MADE:
                raise UserError(
                    f"the row comes {time.since(state.time):g} after the one before it, which "
                    f"{self.step.where} would fill with {last - first:,} rows; reset the stream, "
                    "or set a limit in the step"
                )
            for bin_number in range(first, last + 1):
                if bin_number * step - state.time.value >= limit - rounding:
                    break
                made.append(self._make_row(state, bin_number, time, ends_bin=False))
        prepared = self.before.add(state.prepared, values, time)
        bins = state.values.copy()
        if state.time is None or number != state.number:
            bins[:LASTS] = 0.0
        _add_values(bins, prepared.inputs, time.value)
        after = BinState(bins, prepared, time, number, is_made=False)
        if number * step <= time.value + rounding and not (
            state.is_made and number == state.number
        ):
            made.append(self._make_row(after, number, time, ends_bin=True))
        is_made = number * step <= time.value + rounding
        return replace(after, is_made=is_made), made

    def _get_lengths(self, time: RowTime) -> tuple[Any, Any, Any]:
        """Return the step and the limit in the unit of the times, and what rounding allows."""
        dtype = np.int64 if time.is_date else np.float64
        config = self.step.config
        step, limit = get_lengths(np.empty(0, dtype=dtype), config.every, config.limit)
        return step, limit, 0 if time.is_date else ROUNDING * step

    def _make_row(self, state: BinState, number: int, time: RowTime, *, ends_bin: bool) -> MadeRow:
        step, limit, rounding = self._get_lengths(time)
        bins, end = state.values, number * step
        has_rows = (bins[COUNTS] > 0) & (number == state.number)
        with np.errstate(invalid="ignore"):
            held = np.where(end - bins[SEEN] < limit - rounding, bins[LASTS], np.nan)
        values = held
        if self.step.config.method == "mean":
            counts = np.maximum(bins[COUNTS], 1)
            means, firsts = bins[SUMS] / counts, bins[FIRSTS]
            means = np.where(np.abs(means - firsts) <= CONSTANT * np.abs(firsts), firsts, means)
            values = np.where(has_rows, means, held)
        known = dict(zip(self.read, values.tolist(), strict=True))
        if self.bars is not None:
            place = {name: i for i, name in enumerate(self.read)}
            close = float(held[place[self.bars.sources[3]]])
            rows = (FIRSTS, HIGHS, LOWS)
            for source, name, row in zip(self.bars.sources, self.bars.names, rows, strict=False):
                column = place[source]
                known[name] = float(bins[row, column]) if has_rows[column] else close
            known[self.bars.names[3]] = close
            for name in self.bars.volumes:
                known[name] = float(bins[SUMS, place[name]]) if has_rows[place[name]] else 0.0
        moment = self.get_time(number, is_date=time.is_date)
        return MadeRow(np.array([known[name] for name in self.columns]), moment, ends_bin)

    def get_time(self, number: int, *, is_date: bool) -> RowTime:
        """Return the time of the new row of a bin."""
        step, _, _ = self._get_lengths(RowTime(0, is_date))
        end = (number - (self.bars is not None and self.bars.is_start)) * step
        return RowTime(end if is_date else float(end), is_date)


def _count_bins(time: float, step: float) -> int:
    """Return the number of the first multiple of a step at or after a time."""
    if isinstance(step, int):
        return -(-int(time) // step)
    return math.ceil(time / step)


def _add_values(bins: Floats, values: Floats, time: float) -> None:
    """Add the known values of a row to its bin."""
    known = ~np.isnan(values)
    is_first = known & (bins[COUNTS] == 0)
    bins[FIRSTS] = np.where(is_first, values, bins[FIRSTS])
    bins[HIGHS] = np.where(is_first, values, np.fmax(bins[HIGHS], values))
    bins[LOWS] = np.where(is_first, values, np.fmin(bins[LOWS], values))
    bins[SUMS] += np.where(known, values, 0.0)
    bins[COUNTS] += known
    bins[LASTS] = np.where(known, values, bins[LASTS])
    bins[SEEN] = np.where(known, time, bins[SEEN])


def _append_time(times: Times, time: RowTime | None) -> Times:
    if time is None:
        return times
    return np.append(times, time.value).astype(np.int64 if time.is_date else np.float64)


class FutureSteps:
    """Steps that make the columns of `data.future` from times alone."""

    def __init__(self, data: Data, names: Sequence[str], horizon: int, step: float) -> None:
        self.plan = select_steps(plan_steps(data), names)
        self.names, self.horizon, self.step = tuple(names), horizon, step

    def compute(self, time: RowTime) -> Floats:
        """Return the columns [H, U] over the rows after a time."""
        unit = MICROSECONDS if time.is_date else 1
        times = time.value + np.arange(1, self.horizon + 1) * (self.step * unit)
        times = times.astype(np.int64 if time.is_date else np.float64)
        rows = range(self.horizon)
        frame = SeriesFrame("", rows, 0, times, self.step, {}, rows)
        for step in self.plan.steps:
            if not step.changes_rows:
                frame = step.apply(frame, StepInputs(context=1))
        return np.stack([frame.columns[name] for name in self.names], axis=1)


def plan_future(data: Data, signature: Signature) -> FutureSteps | None:
    """Return the steps that make the columns of `data.future`, where times alone suffice."""
    names, step = signature.future, signature.step
    if not names or step is None or not plan_steps(data).makes_from_times(names):
        return None
    return FutureSteps(data, names, signature.horizon, step)
