"""Tables as if the files had been prepared: in memory, or in parts where they are larger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import Data
from slipstream.config.prepare import JoinStep, LabelStep, OutliersStep, PadStep, ResampleStep
from slipstream.data.columns import is_numeric, read_numbers, read_times, require_column
from slipstream.data.layout import UNNAMED
from slipstream.data.prepare.chain import (
    JoinedRows,
    JoinedTable,
    Limits,
    PlannedStep,
    Replay,
    RowKeys,
    SeriesFrame,
    StepPlan,
    add_positions,
    apply_step,
    build_table,
    fit_limits,
    plan_steps,
    read_joins,
    select_steps,
    split_frames,
    to_classes,
)
from slipstream.data.roles import identify_series
from slipstream.data.series import Flags, Floats, Ints, SeriesIndex, list_rows
from slipstream.data.table import DataTable, MemoryReader, release_memory

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
            raise UserError(f"{self.source.name}: {step.where}: " + error.message) from None


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
                f'{step.where} {why}, which does not work with engine.home = "stream"; prepare '
                "the file beforehand, or " + "set " + Setting({"engine.home": "host"})
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


FindLimits = Callable[[PlannedStep, Sequence[SeriesFrame]], Limits]
"""Returns the ranges of an outliers step; empty where there are none yet"""


class PreparedTables(NamedTuple):
    """The tables after all steps."""

    tables: list[DataTable]
    data: Data
    """The settings for these tables"""
    notes: list[str]
    """On how the steps work"""
    left_out: list[str]
    """Notes on series without a row that is known"""
    limits: dict[str, Limits]
    """The ranges of the outliers steps, by the step's number"""
    latency: int = 0
    """How many rows after a row its inputs are known"""


class PrepareChain:
    """The steps of a data set, ready to be carried out on its tables."""

    def __init__(
        self, data: Data, needed: Collection[str] | None = None, replay: Replay | None = None
    ) -> None:
        """`needed` are the columns that a model reads; by default, all that steps make."""
        self.data, self.replay = data, replay or Replay()
        self.ahead = 0
        """Rows to add to the end of each series, of which only times are known"""
        plan_steps(data)  # what is wrong in them is said before any file is read
        self.joins = read_joins(data, self.replay.joins)
        joined = {number: join.column_names for number, join in self.joins.items()}
        self.plan = plan_steps(data, joined)
        if needed is None and data.inputs is not None:
            needed = (*data.inputs, *(data.targets or ()), *data.static, *data.future)
        self.needed = needed
        if needed is not None:
            self.plan = select_steps(self.plan, needed)

    @property
    def features(self) -> tuple[str, ...]:
        """The columns made by steps that a model may read."""
        return tuple(list_new_columns(self.plan, self.data))

    def list_inputs(self, table: DataTable) -> tuple[str, ...]:
        """Return the columns that a model may read, from the file or made by steps."""
        return tuple(dict.fromkeys((*self._list_values(table), *self.features)))

    @property
    def changes_rows(self) -> bool:
        return self.plan.changes_rows or self.ahead > 0

    @property
    def is_fitted(self) -> bool:
        """Whether no range is to be fitted on the training rows."""
        fitted = (step for step in self.plan.steps if isinstance(step.config, OutliersStep))
        return all(str(step.number) in self.replay.limits for step in fitted)

    def stream(self, tables: Sequence[DataTable]) -> PreparedTables:
        """Return tables that stay on disk, whose columns are computed as they are read."""
        plan, data = self.plan, self.data
        refuse_unstreamable_steps(plan, self.replay.limits)
        features, limits = self.features, dict(self.replay.limits)
        lazy = []
        for table in tables:
            check_columns(plan, table)
            new = (name for name in plan.written if name not in table.column_set)
            reader = LazyReader(table, data, plan, self.joins, limits)
            names = (*table.column_names, *new)
            ahead = plan.count_ahead([*features, *(data.targets or ())])
            lazy.append(replace(table, column_names=names, reader=reader, look_ahead=ahead))
        return PreparedTables(lazy, data, _describe_reach(plan, 0, data), [], limits)

    def draft(self, tables: Sequence[DataTable]) -> PreparedTables:
        """Return the tables as they are without the ranges that are to be fitted."""
        return self._run(tables, lambda *_: {}, final=False)

    def fit(self, tables: Sequence[DataTable], training: Flags) -> PreparedTables:
        """Return the tables with ranges fitted on the rows that `training` marks by position."""
        return self._run(tables, lambda step, frames: fit_limits(step, frames, training))

    def apply(self, tables: Sequence[DataTable]) -> PreparedTables:
        """Return the tables with the ranges of a trained model."""
        return self._run(tables, lambda *_: {})

    def _run(
        self, tables: Sequence[DataTable], find_limits: FindLimits, *, final: bool = True
    ) -> PreparedTables:
        plan, data = self.plan, self.data
        features = self.features
        every = self._split(tables, final=final)
        limits: dict[str, Limits] = {}
        resamples = any(isinstance(step.config, ResampleStep) for step in plan.steps)
        if self.ahead and not resamples:
            every = [[frame.extend(self.ahead) for frame in frames] for frames in every]
        for step in plan.steps:
            fitted: Limits = {}
            if isinstance(step.config, OutliersStep):
                frames = [frame for some in every for frame in some]
                fitted = self.replay.limits.get(str(step.number)) or find_limits(step, frames)
                limits[str(step.number)] = fitted
            for table, frames in zip(tables, every, strict=True):
                if isinstance(step.config, PadStep):
                    frames[:] = [_drop_unknown(frame, plan, features)[0] for frame in frames]
                self._apply(step, table, frames, fitted)
                if self.ahead and isinstance(step.config, ResampleStep):
                    frames[:] = [frame.extend(self.ahead) for frame in frames]
        latency = plan.count_ahead(features)
        ahead = plan.count_ahead([*features, *(data.targets or ())])
        notes = _describe_reach(plan, latency, data)
        stored = self._list_stored(every)
        built: list[DataTable] = []
        left_out: list[str] = []
        counts: list[int] = []
        for table, frames in zip(tables, every, strict=True):
            dropped, without = self._finish(table, frames, features)
            counts, left_out = [*counts, *dropped], [*left_out, *without]
            if not frames:
                continue
            result = build_table(table, frames, stored, plan.labels, data.time_column)
            result = replace(result, look_ahead=ahead)
            built.append(result if final else add_positions(result, frames))
        if not built:
            raise UserError(f"{tables[0].name}: data.prepare leaves no series with a row")
        notes += _describe_dropped(counts)
        release_memory()
        after = data.model_copy(update={"where": {}})
        return PreparedTables(built, after, notes, left_out, limits, latency)

    def _split(self, tables: Sequence[DataTable], *, final: bool) -> list[list[SeriesFrame]]:
        """Return each table's series, with the columns that steps work on."""
        every: list[list[SeriesFrame]] = []
        first = 0
        for table in tables:
            check_columns(self.plan, table)
            names = self.plan.list_sources()
            if self.changes_rows:
                names = dict.fromkeys(self._list_values(table), "data.inputs") | names
            frames = split_frames(table, self.data, names, first)
            if self.data.future:
                frames = self._mark_ahead(table, frames)
            first += sum(frame.num_rows for frame in frames)
            every.append(frames)
            if final and isinstance(table.reader, MemoryReader):
                for name in self._list_stored([frames]):  # need not stay in memory beside the new
                    table.reader.columns.pop(name, None)
        return every

    def _mark_ahead(self, table: DataTable, frames: list[SeriesFrame]) -> list[SeriesFrame]:
        """Count the rows at the end of each series in which the targets, or where these are not
        read the inputs, have no value: steps may hold or make values there."""
        data, plan = self.data, self.plan
        every = self.needed if self.needed is not None else self._list_values(table)
        inputs = [name for name in every if name not in (*data.future, *data.static)]
        observed = [name for name in inputs if name in (data.targets or inputs)] or inputs
        sources = plan.trace_to_file(observed, table.column_set)
        sources -= plan.trace_to_file(data.future, table.column_set)
        ends = np.zeros(len(frames), dtype=np.int64)
        for name in sources:
            known = ~np.isnan(read_numbers(table, name, "data.inputs"))
            for i, frame in enumerate(frames):
                mine = np.flatnonzero(known[np.asarray(frame.rows)])
                ends[i] = max(ends[i], mine[-1] + 1 if len(mine) else 0)
        return [
            replace(frame, ahead=frame.num_rows - int(end)) if end else frame
            for frame, end in zip(frames, ends, strict=True)
        ]

    def _list_values(self, table: DataTable) -> list[str]:
        """Return the columns of a table that hold values, not labels or ids."""
        data = self.data
        reserved = {
            *data.time_columns,
            data.time_column,
            data.split.by,
            *data.ids,
            *data.static,
            table.file_column,
        }
        if data.task == "classify":
            reserved |= set(data.targets or ())
        free = [name for name in table.column_names if name not in reserved]
        if self.needed is not None:
            return [name for name in free if name in self.needed]
        return [
            name
            for name in free
            if name not in data.ignore and not name.startswith(UNNAMED) and is_numeric(table, name)
        ]

    def _list_stored(self, every: Sequence[Sequence[SeriesFrame]]) -> list[str]:
        """Return the columns that are taken from the frames, not from the file."""
        written = self.plan.written
        if not self.changes_rows:
            return list(written)
        frames = [frame for some in every for frame in some]
        return list(dict.fromkeys((*(frames[0].columns if frames else ()), *written)))

    def _apply(
        self, step: PlannedStep, table: DataTable, frames: list[SeriesFrame], limits: Limits
    ) -> None:
        """Replace the frames of a table by those after a step."""
        join = self.joins.get(step.number)
        keys = None if join is None else join.find_keys(table)
        for i, frame in enumerate(frames):
            joined = None
            if join is not None and keys is not None:
                joined = _select_rows(join, keys, frame, table)
            try:
                frames[i] = apply_step(
                    step, frame, context=self.data.context, limits=limits, joined=joined
                )
            except UserError as error:
                where = table.name if frame.name == table.name else f'{table.name}, "{frame.name}"'
                raise UserError(f"{where}: {step.where}: " + error.message) from None
            if not frames[i].num_rows:
                raise UserError(f'{table.name}: {step.where} leaves "{frame.name}" without a row')

    def _finish(
        self, table: DataTable, frames: list[SeriesFrame], features: Collection[str]
    ) -> tuple[list[int], list[str]]:
        """Cut off the rows that are not known at both ends of each series; return how many those
        are at its beginning, and notes on series that have no others."""
        plan, without, counts = self.plan, [], []
        provisional = plan.count_ahead(features) - _count_final(plan)
        complete = []
        for frame in frames:
            known, dropped = _drop_unknown(frame, plan, features)
            end = known.num_rows - provisional
            if end <= 0 or not known.num_rows:
                what = (
                    f'series "{frame.name}" has {format_count(frame.num_rows, "row")}, of which '
                    "data.prepare leaves none: its steps look back or ahead further, or a join "
                    "has no earlier row"
                )
                if self.data.short == "error":
                    raise UserError(
                        f"{table.name}: {what}; leave such series out ("
                        + Setting({"data.short": "drop"})
                        + "), or shorten the steps"
                    )
                without.append(f"left out: {what}")
                continue
            if known.ahead:  # what looks ahead is not known yet in the rows before these either
                complete.append(replace(known, ahead=known.ahead + provisional))
            else:
                complete.append(known.cut(0, end))
            counts.append(dropped)
        frames[:] = complete
        return counts, without


def check_columns(plan: StepPlan, table: DataTable) -> None:
    """Refuse steps that read columns which neither the table nor a step before has, and steps that
    make columns which exist already."""
    known = dict.fromkeys(table.column_names)
    for step in plan.steps:
        if step.formula is not None:
            try:
                step.formula.check_columns(known)
            except UserError as error:
                raise UserError(f"{table.name}: {step.where}: " + error.message) from None
        else:
            wider = replace(table, column_names=tuple(known))
            for name in step.reads:
                require_column(wider, name, step.where)
        for name in step.writes:
            if name in known and name not in step.reads:
                fix = "set prefix" if isinstance(step.config, JoinStep) else "choose another name"
                raise UserError(
                    f'{table.name}: {step.where} makes "{name}", but there is a column of that '
                    f"name; {fix}"
                )
        known |= dict.fromkeys(step.writes)


def list_new_columns(plan: StepPlan, data: Data) -> list[str]:
    """Return the columns made by steps that a model may read."""
    if data.inputs is not None:
        used = {*data.inputs, *data.static, *data.future}
        return [name for name in plan.written if name in used]
    only_targets = data.horizon == 0 or data.task == "classify"
    excluded = {*(data.targets or () if only_targets else ()), *data.ignore, *plan.labels}
    return [name for name in plan.written if name not in excluded]


def _count_final(plan: StepPlan) -> int:
    """Return the rows of look-ahead that need no cut: linear resampling makes no row too early."""
    return sum(
        step.look_ahead
        for step in plan.steps
        if isinstance(step.config, ResampleStep) and step.config.method == "linear"
    )


def _drop_unknown(
    frame: SeriesFrame, plan: StepPlan, features: Collection[str]
) -> tuple[SeriesFrame, int]:
    """Return the rows from which on every feature has a value, as far as steps look back, and how
    many rows of the series are cut off."""
    first = 0
    for name in features:
        if name not in frame.columns:
            continue  # a later step makes it
        rows = plan.warm_up.get(name, 0)
        most = frame.num_rows if rows is None else rows
        head = np.isnan(frame.columns[name][: most + 1])
        first = max(first, int(head.argmin()) if not head.all() else len(head) - 1 + bool(most))
    return frame.cut(first, frame.num_rows), max(first - frame.padding, 0)


def _select_rows(
    join: JoinedTable, keys: RowKeys, frame: SeriesFrame, table: DataTable
) -> JoinedRows | None:
    """Return the joined rows of a series; its rows must agree in their id."""
    if len(keys.keys) == 1:
        return join.by_id.get(keys.keys[0])
    own = np.unique(keys.codes[list_rows(frame.rows)])
    if len(own) > 1:
        raise UserError(
            f'{table.name}: {join.where}: the rows of series "{frame.name}" differ in '
            f"{', '.join(join.step.ids)}; name it in data.id as well"
        )
    return join.by_id.get(keys.keys[own[0]])


def _describe_dropped(counts: Sequence[int]) -> list[str]:
    """Note how many rows at the beginning of series are left out."""
    most = max(counts)
    if not most:
        return []
    rows = "the first row" if most == 1 else f"the first {most:,} rows"
    up_to = "up to " if len(set(counts)) > 1 else ""
    of = "" if len(counts) == 1 else " of each series"
    return [f"data.prepare leaves out {up_to}{rows}{of}, before every column has a value"]


def _describe_reach(plan: StepPlan, latency: int, data: Data) -> list[str]:
    """Note how far inputs and targets look ahead."""
    notes = []
    if latency:
        rows = format_count(latency, "row")
        notes.append(
            f"data.prepare: inputs look {rows} ahead, so a prediction comes {rows} late (its "
            "latency), and these rows are purged at every split border"
        )
    ahead = plan.count_ahead(data.targets or ())
    if ahead > latency and plan.steps:
        rows = format_count(ahead, "row")
        notes.append(
            f"data.prepare: targets look {rows} ahead; these rows are purged at every split border"
        )
    return notes
