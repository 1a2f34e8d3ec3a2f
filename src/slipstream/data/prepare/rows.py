"""The steps of `data.prepare` row after row, as rows of a stream arrive.

A row is computed from the past rows that steps look back to and from what recursive filters
remember, which `PreparedRow` holds; the results are those of a whole series.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config import Data, Signature
from slipstream.data.prepare.chain import plan_steps, select_steps
from slipstream.data.prepare.frames import SeriesFrame
from slipstream.data.prepare.steps import Limits, Padding, Step, StepInputs
from slipstream.data.series import MICROSECONDS, Floats, Times


class RowTime(NamedTuple):
    """The time of a row."""

    value: float
    """Microseconds of a date, or the number itself"""
    is_date: bool

    def since(self, earlier: RowTime) -> float:
        """Return the time since an earlier row, in seconds or in the unit of the numbers."""
        return (self.value - earlier.value) / (MICROSECONDS if self.is_date else 1)


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
        self, data: Data, needed: Sequence[str], limits: Mapping[str, Limits], step_s: float | None
    ) -> None:
        plan = select_steps(plan_steps(data), needed)
        self.data, self.needed, self.limits, self.step_s = data, tuple(needed), limits, step_s
        self.padding = 0
        """The number of rows that pad a series before its first row"""
        self.pads_zero = False
        self.steps: list[VersionedStep] = []
        self.depth: dict[Version, int] = {}
        """The number of past rows that steps look back to, by version"""
        versions: dict[str, int] = {}
        for step in plan.steps:
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
        raw_columns = (name for name in needed if name not in plan.written)
        self.sources = tuple(dict.fromkeys((*plan.list_sources(), *raw_columns)))
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
