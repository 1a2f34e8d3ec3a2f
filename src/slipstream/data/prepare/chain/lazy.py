"""Steps on tables that stay on disk: columns are computed for the rows that are read.

Each read takes as many rows before and after as the steps look back and ahead, so it returns the
same values wherever it begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from slipstream.config import Data
from slipstream.config.prepare import LabelStep, OutliersStep
from slipstream.data.io.columns import read_numbers, read_times
from slipstream.data.io.table import DataTable
from slipstream.data.prepare.chain.frames import SeriesFrame, to_classes
from slipstream.data.prepare.chain.joined import JoinedTable, RowKeys
from slipstream.data.prepare.chain.operations import JoinedRows, apply_step
from slipstream.data.prepare.chain.plan import PlannedStep, StepPlan, select_steps
from slipstream.data.prepare.chain.replay import Limits
from slipstream.data.roles import identify_series
from slipstream.data.series import Floats, Ints, SeriesIndex
from slipstream.errors import UserError

SCAN_ROWS = 1 << 18


@dataclass(frozen=True)
class LazyReader:
    """Reads the columns of a file on disk, and computes those that steps make."""

    source: DataTable
    data: Data
    plan: StepPlan
    joins: Mapping[int, JoinedTable]
    limits: Mapping[str, Limits]

    def get_type(self, name: str) -> pa.DataType:
        if name in self.plan.labels:
            return pa.string()
        return pa.float64() if name in self.plan.written else self.source.reader.get_type(name)

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name not in self.plan.written:
            return self.source.reader.read(name, begin, end)
        values = self._compute(name, begin, end)
        if name not in self.plan.labels:
            return pa.chunked_array([values])
        return pa.chunked_array([to_classes(values, self.plan.labels[name]).cast(pa.string())])

    def _compute(self, name: str, begin: int, end: int) -> Floats:
        plan = select_steps(self.plan, [name])
        back, ahead = plan.look_back[name], plan.look_ahead[name]
        assert back is not None
        first, past = max(begin - back, 0), min(end + ahead, self.source.num_rows)
        rows = self.source.slice_rows(first, past)
        columns = {
            one: read_numbers(rows, one, where) for one, where in plan.list_sources().items()
        }
        times = None
        if self.data.time_column is not None:
            times = read_times(rows, self.data.time_column, self.data.time_format)
        codes, names = identify_series(rows, self.data)
        keys = {number: join.find_keys(rows) for number, join in self.joins.items()}
        borders = np.flatnonzero(np.diff(codes, prepend=-1, append=-1))
        result = np.empty(past - first)
        for low, high in itertools.pairwise(borders.tolist()):
            part = slice(low, high)
            frame = SeriesFrame(
                names[codes[low]],
                range(part.start, part.stop),
                0,
                None if times is None else times[part],
                None,
                {one: values[part] for one, values in columns.items()},
                range(part.stop - part.start),
            )
            for step in plan.steps:
                frame = self._apply(step, frame, keys)
            result[part] = frame.columns[name]
        return result[begin - first : end - first]

    def _apply(
        self, step: PlannedStep, frame: SeriesFrame, keys: Mapping[int, RowKeys]
    ) -> SeriesFrame:
        joined: JoinedRows | None = None
        join = self.joins.get(step.number)
        if join is not None:
            mine = keys[step.number]
            joined = join.by_id.get(mine.keys[mine.codes[frame.rows[0]]])
            if joined is not None and frame.times is not None:
                wait = join.find_first_known(joined, frame.times)
                if frame.times[-1] < wait:
                    joined = None  # nothing is known yet, which is no mistake in a part of a series
        try:
            limits = self.limits.get(str(step.number))
            return apply_step(step, frame, context=self.data.context, limits=limits, joined=joined)
        except UserError as error:
            raise UserError(f"{self.source.name}: {step.where}: {error}") from None


def refuse_unstreamable_steps(plan: StepPlan, limits: Mapping[str, Limits]) -> None:
    """Refuse steps that need more than a bounded number of rows."""
    for step in plan.steps:
        why = None
        if step.changes_rows:
            why = "makes other rows"
        elif isinstance(step.config, OutliersStep) and str(step.number) not in limits:
            why = "is fitted on all training rows"
        elif step.look_back is None:
            why = "depends on all rows before"
        elif step.look_ahead and not isinstance(step.config, LabelStep):
            why = "looks ahead"
        if why is not None:
            raise UserError(
                f'{step.where} {why}, which does not work with engine.home = "stream"; prepare the '
                'file beforehand, or set engine.home = "host"'
            )


def mark_unknown_rows(
    table: DataTable, index: SeriesIndex, features: Collection[str]
) -> SeriesIndex:
    """Return the index without the rows at the beginning of each series in which a feature is
    unknown, because steps look back; they are in no window."""
    if not features:
        return index
    counts = np.zeros(len(index.series_names), dtype=np.int64)
    unknown = np.ones(len(counts), dtype=bool)
    for begin in range(0, table.num_rows, SCAN_ROWS):
        end = min(begin + SCAN_ROWS, table.num_rows)
        rows = table.slice_rows(begin, end)
        absent = np.zeros(end - begin, dtype=bool)
        for name in features:
            absent |= np.isnan(read_numbers(rows, name, "data.prepare"))
        low, high = np.searchsorted(index.offsets, [begin, end - 1], side="right") - 1
        for series in range(int(low), int(high) + 1):
            if unknown[series]:
                first, past = np.clip(index.offsets[series : series + 2], begin, end) - begin
                run = absent[first:past]
                leading = len(run) if run.all() else int(run.argmin())
                counts[series] += leading
                unknown[series] = leading == len(run)
    if not counts.any():
        return index
    first_known: Ints = index.offsets[:-1] + counts
    breaks = np.union1d(index.breaks, first_known[first_known < index.num_rows])
    skipped = np.stack([index.offsets[:-1], counts], axis=1)  # they are rows of the file
    return replace(index, breaks=breaks, padding=counts, skipped=skipped)
