"""The steps of `data.prepare`, row after row: as many rows stay in memory as a step looks back.

Every step reads the rows that the steps before it made, and adds one value to each column that it
writes. A column that is changed in place has a new version, so that an earlier step still reads the
earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slipstream.config import Data, Signature
from slipstream.config.prepare import FilterStep, JoinStep, PadStep, ResampleStep
from slipstream.data.prepare import filters
from slipstream.data.prepare.chain.frames import SeriesFrame
from slipstream.data.prepare.chain.operations import apply_step
from slipstream.data.prepare.chain.plan import PlannedStep, plan_steps, select_steps
from slipstream.data.prepare.chain.replay import Limits
from slipstream.data.series import MICROSECONDS, Floats, Times
from slipstream.errors import UserError
from slipstream.portable.filters import advance_sections
from slipstream.portable.streaming.parsing import RowTime
from slipstream.portable.streaming.prepared import PreparedRow, Version


class StreamedStep(NamedTuple):
    """A step, and the versions of the columns that it reads and writes."""

    step: PlannedStep
    reads: dict[str, Version]
    writes: dict[str, Version]
    sections: Floats | None
    """[S, 5], of a filter with a state, which looks back over all rows"""


class StreamedSteps:
    """The steps that the inputs of a model come from."""

    def __init__(
        self, data: Data, needed: Sequence[str], limits: Mapping[str, Limits], step: float | None
    ) -> None:
        plan = select_steps(plan_steps(data), needed)
        self.data, self.needed, self.limits, self.step = data, tuple(needed), limits, step
        self.padding = 0
        """Rows to put before the first one of a series"""
        self.pads_zero = False
        self.steps: list[StreamedStep] = []
        self.depth: dict[Version, int] = {}
        """How many past rows of a version some step looks back to"""
        versions: dict[str, int] = {}
        for number, one in enumerate(plan.steps, start=1):
            refuse_unstreamable(one)
            if isinstance(one.config, PadStep):
                self._add_padding(one, one.config, is_last=number == len(plan.steps))
                continue
            reads = {name: f"{name}#{versions.get(name, 0)}" for name in one.reads}
            versions |= {name: versions.get(name, 0) + 1 for name in one.writes}
            writes = {name: f"{name}#{versions[name]}" for name in one.writes}
            for version in reads.values():
                self.depth[version] = max(self.depth.get(version, 0), one.look_back or 0)
            self.steps.append(StreamedStep(one, reads, writes, self._design(one)))
        self.most_back = max(self.depth.values(), default=0)
        others = (name for name in needed if name not in plan.written)
        self.sources = tuple(dict.fromkeys((*plan.list_sources(), *others)))
        self.outputs = [f"{name}#{versions.get(name, 0)}" for name in needed]
        self.features = [(name, plan.warm_up[name]) for name in needed if name in plan.written]

    def _add_padding(self, step: PlannedStep, config: PadStep, *, is_last: bool) -> None:
        if not is_last:
            raise UserError(
                f"{step.where} cannot be streamed: other steps follow it; make it the last step"
            )
        self.padding = config.rows or self.data.context - 1
        self.pads_zero = config.value == "zero"

    def _design(self, step: PlannedStep) -> Floats | None:
        config = step.config
        if not isinstance(config, FilterStep) or step.look_back is not None:
            return None
        sections = filters.design_sections(
            kind=config.kind,
            rows=config.rows,
            cutoff_hz=config.cutoff_hz,
            order=config.order or filters.DEFAULT_ORDER,
            step_s=self.step,
        )
        return np.delete(sections, 3, axis=1)  # which is 1

    def start(self) -> PreparedRow:
        """Return what there is before the first row of a series."""
        return PreparedRow(np.empty(0))

    def add(self, state: PreparedRow, values: Floats, time: RowTime | None) -> PreparedRow:
        """Return the next row, from its values in the order of `sources`."""
        known = {f"{name}#0": float(v) for name, v in zip(self.sources, values, strict=True)}
        memory = dict(state.filters)
        for one in self.steps:
            if one.sections is None:
                known |= self._compute(state, one, known, time)
                continue
            for read, write in zip(one.reads.values(), one.writes.values(), strict=True):
                known[write], memory[write] = _filter(
                    one.sections, state.filters.get(write), known[read]
                )
        inputs = np.array([known[version] for version in self.outputs])
        seen = state.known | {
            name for name, value in zip(self.needed, inputs, strict=True) if not math.isnan(value)
        }
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
            times=self._append_time(state.times, time)[-self.most_back :]
            if self.most_back
            else state.times,
            filters=memory,
            known=seen,
        )

    def _append_time(self, times: Times, time: RowTime | None) -> Times:
        if time is None:
            return times
        return np.append(times, time.value).astype(np.int64 if time.is_date else np.float64)

    def _compute(
        self,
        state: PreparedRow,
        one: StreamedStep,
        known: Mapping[Version, float],
        time: RowTime | None,
    ) -> dict[Version, float]:
        """Return what a step writes to the new row, from the rows that it looks back to."""
        back = min(one.step.look_back or 0, state.count)
        columns = {
            name: np.append(state.past[version][-back:] if back else (), known[version])
            for name, version in one.reads.items()
        }
        config = one.step.config
        if isinstance(config, FilterStep):
            order = config.order or filters.DEFAULT_ORDER
            rows = (one.step.look_back or 0) + 1
            return {
                version: filters.filter_newest(
                    columns[name], kind=config.kind, rows=rows, order=order
                )
                for name, version in zip(one.reads, one.writes.values(), strict=True)
            }
        times = None
        if time is not None:
            before = state.times[len(state.times) - back :] if back else state.times[:0]
            times = self._append_time(before, time)
        every = range(back + 1)
        frame = SeriesFrame("", every, 0, times, self.step, columns, every)
        limits = self.limits.get(str(one.step.number))
        result = apply_step(one.step, frame, context=self.data.context, limits=limits)
        return {version: float(result.columns[name][-1]) for name, version in one.writes.items()}


def _filter(sections: Floats, memory: Floats | None, value: float) -> tuple[float, Floats]:
    """Return the filtered value and what to remember; what is missing counts as the last value."""
    is_missing = math.isnan(value)
    if memory is None or math.isnan(memory[0]):
        memory = np.concatenate([[value, value], np.zeros(2 * len(sections))])
        if is_missing:
            return math.nan, memory
    first, last = memory[:2]
    filled = last if is_missing else value
    result, states = advance_sections(
        sections, memory[2:].reshape(-1, 2), np.asarray(filled - first)
    )
    new = np.concatenate([[first, filled], states.ravel()])
    return math.nan if is_missing else float(first + result), new


def refuse_unstreamable(step: PlannedStep) -> None:
    """Refuse a step that a row cannot pass as it comes."""
    config, reason = step.config, None
    if isinstance(config, ResampleStep):
        reason = "rows have to come at the model's own step; resample them before they are pushed"
    elif isinstance(config, JoinStep):
        reason = "its table is not part of the stream; train on columns that each row has"
    elif step.look_ahead:
        reason = f"it looks {step.look_ahead} rows ahead"
    elif step.look_back is None and not isinstance(config, FilterStep):
        reason = "its formula looks back over all rows; use a function of so many rows"
    if reason:
        raise UserError(f"{step.where} cannot be streamed: {reason}")


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
        for one in self.plan.steps:
            if not one.changes_rows:
                frame = apply_step(one, replace(frame), context=1)
        return np.stack([frame.columns[name] for name in self.names], axis=1)


def plan_future(data: Data, signature: Signature) -> FutureSteps | None:
    """Return the steps that make the columns of `data.future`, where times alone suffice."""
    names, step = signature.future, signature.step
    if not names or step is None or not plan_steps(data).makes_from_times(names):
        return None
    return FutureSteps(data, names, signature.horizon, step)
