"""The chain of steps: its plan, and the tables after all steps.

`plan_steps` checks the steps against each other. `PrepareChain` carries them out: on whole tables,
series by series (`fit`, `apply`), or on tables that are larger than memory, whose columns are
computed as they are read (`stream`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import Config, Data
from slipstream.data import labels, predictions
from slipstream.data.columns import is_numeric, read_numbers, read_times
from slipstream.data.layout import UNNAMED
from slipstream.data.prepare.frames import (
    POSITION,
    SeriesFrame,
    add_positions,
    build_table,
    mark_positions,
    split_frames,
    to_classes,
)
from slipstream.data.prepare.joins import JoinedRows, JoinedTable, RowKeys, read_joins
from slipstream.data.prepare.steps import (
    Joining,
    Limits,
    Padding,
    Resampling,
    Step,
    StepInputs,
    make_step,
)
from slipstream.data.roles import (
    Roles,
    adapt_to_pretraining,
    find_roles,
    identify_series,
    refuse_unknown_jitter,
    sort_roles,
)
from slipstream.data.series import (
    Flags,
    Floats,
    Ints,
    SeriesIndex,
    describe_merged,
    list_rows,
    prepare_series,
)
from slipstream.data.table import DataTable, MemoryReader, SourceFile, release_memory

SCAN_ROWS = 1 << 18
"""The number of rows of a table on disk that are read at a time"""


@dataclass(frozen=True)
class Replay:
    """Results of an earlier run that steps reuse: fitted ranges, and tables to join."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    """The ranges that outliers steps were fitted to, by the step's number"""
    joins: Mapping[str, Any] = field(default_factory=dict)
    """Other tables or paths to join, by the file's name or the prefix of its columns"""


@dataclass(frozen=True)
class StepPlan:
    """The steps that make the needed columns, in order."""

    steps: tuple[Step[Any], ...]
    data: Data

    @property
    def rows_ahead(self) -> int:
        """Rows that every row looks ahead, because it was made from later ones."""
        steps = (step for step in self.steps if isinstance(step, Resampling))
        return next((step.look_ahead for step in steps), 0)

    @cached_property
    def look_ahead(self) -> dict[str, int]:
        """Rows that each written column looks ahead, through all steps."""
        reach: dict[str, int] = {}
        for step in self.steps:
            before = max((reach.get(name, self.rows_ahead) for name in step.reads), default=0)
            ahead = max(before, self.rows_ahead) + step.look_ahead
            reach |= dict.fromkeys(step.writes, ahead)
        return reach

    @cached_property
    def look_back(self) -> dict[str, int | None]:
        """Rows that each written column looks back, through all steps; None for all of them."""
        reach: dict[str, int | None] = {}
        for step in self.steps:
            if isinstance(step, Resampling):
                reach = dict.fromkeys(reach)
            rows = [reach.get(name, 0) for name in step.reads]
            known = [count for count in rows if count is not None]
            back = None
            if step.look_back is not None and len(known) == len(rows):
                back = max(known, default=0) + step.look_back
            reach |= dict.fromkeys(step.writes, back)
        return reach

    @cached_property
    def warm_up(self) -> dict[str, int | None]:
        """Rows at a series' beginning in which each written column may be unknown; None where only
        the data tell.

        A recursive filter knows its first row. A formula that contains one leaves the number of
        unknown rows open, and so does a join, which begins with the first row of its table.
        """
        reach: dict[str, int | None] = {}
        for step in self.steps:
            rows = [reach.get(name, 0) for name in step.reads]
            known = [count for count in rows if count is not None]
            total = None
            if step.warm_up is not None and len(known) == len(rows):
                total = max(known, default=0) + step.warm_up
            if isinstance(step, Resampling):
                reach = dict.fromkeys(reach)
            reach |= dict.fromkeys(step.writes, total)
        return reach

    def count_ahead(self, names: Collection[str]) -> int:
        """Return the most rows that one of these columns looks ahead."""
        ahead = (self.look_ahead.get(name, self.rows_ahead) for name in names)
        return max(ahead, default=self.rows_ahead)

    @property
    def written(self) -> tuple[str, ...]:
        """The columns that steps make or change, in order."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.writes))

    @property
    def changes_rows(self) -> bool:
        return any(step.changes_rows for step in self.steps)

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The classes of the columns that are labels."""
        return {name: classes for step in self.steps for name, classes in step.labels.items()}

    def makes_from_times(self, names: Collection[str]) -> bool:
        """Return whether steps make all of these columns from the rows' times alone."""
        selected = select_steps(self, names)
        reads_table = any(step.reads_table for step in selected.steps)
        return set(names) <= set(selected.written) and not (reads_table or selected.list_sources())

    def trace_to_file(self, names: Collection[str], columns: Collection[str]) -> set[str]:
        """Return the columns of the file that these columns are made from, or are themselves."""
        sources = select_steps(self, names).list_sources()
        return {name for name in (*names, *sources) if name in columns}

    def list_sources(self) -> dict[str, str]:
        """Return the columns that steps read from the file, each with the first step that reads
        it."""
        new: set[str] = set()
        sources: dict[str, str] = {}
        for step in self.steps:
            for name in step.reads:
                if name not in new:
                    sources.setdefault(name, step.where)
            new |= set(step.writes)
        return sources


def plan_steps(data: Data, joined: Mapping[int, tuple[str, ...]] | None = None) -> StepPlan:
    """Check the steps against each other and return their plan; `joined` are the columns that each
    join brings.

    Without `joined`, no file is read, and the columns that a join brings are not known yet.
    """
    steps: list[Step[Any]] = []
    labels: dict[str, str] = {}
    for number, config in enumerate(data.prepare, start=1):
        step = make_step(number, config, (joined or {}).get(number, ()))
        try:
            step.check()
        except UserError as error:
            raise UserError(f"{step.where}: " + error.message) from None
        if step.needs_times and data.time_column is None:
            raise UserError(f"{step.where} needs the time of each row; set data.time")
        _check_look_ahead(step)
        for name in step.reads:
            if name in labels:
                raise UserError(
                    f'{step.where} reads "{name}", which {labels[name]} makes from rows to come; a '
                    "label can only be a target"
                )
        labels |= dict.fromkeys(step.labels, step.where)
        try:
            step.check_order(steps)
        except UserError as error:
            raise UserError(f"{step.where}: " + error.message) from None
        steps.append(step)
    return StepPlan(tuple(steps), data)


def _check_look_ahead(step: Step[Any]) -> None:
    accepts = getattr(step.config, "lookahead", True)
    if step.look_ahead and not accepts:
        raise UserError(
            f"{step.where} looks {format_count(step.look_ahead, 'row')} ahead, which is unknown "
            "when a prediction is made; use past rows only, or set lookahead = true in the step: "
            "these rows are then purged at every split border, and predictions come that much later"
        )


def select_steps(plan: StepPlan, needed: Collection[str]) -> StepPlan:
    """Return the steps that these columns depend on, and those that change rows."""
    wanted, steps = set(needed), []
    for step in reversed(plan.steps):
        if step.changes_rows:
            wanted = (wanted - set(step.writes)) | set(step.reads)
            steps.append(step)
        elif written := [name for name in step.writes if name in wanted]:
            wanted = (wanted - set(written)) | set(step.reads)
            steps.append(step)
    return replace(plan, steps=tuple(reversed(steps)))


@dataclass(frozen=True)
class LazyReader:
    """Reads the columns of a file on disk, and computes the columns that steps make."""

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
            source: read_numbers(rows, source, where)
            for source, where in plan.list_sources().items()
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
                {source: values[part] for source, values in columns.items()},
                range(part.stop - part.start),
            )
            for step in plan.steps:
                frame = self._apply(step, frame, keys)
            result[part] = frame.columns[name]
        return result[begin - first : end - first]

    def _apply(
        self, step: Step[Any], frame: SeriesFrame, keys: Mapping[int, RowKeys]
    ) -> SeriesFrame:
        joined: JoinedRows | None = None
        join = self.joins.get(step.number)
        if join is not None:
            row_keys = keys[step.number]
            joined = join.by_id.get(row_keys.keys[row_keys.codes[frame.rows[0]]])
            if joined is not None and frame.times is not None:
                wait = join.find_first_known(joined, frame.times)
                if frame.times[-1] < wait:
                    joined = None  # nothing is known yet, which is no mistake in a part of a series
        try:
            limits = self.limits.get(str(step.number))
            return step.apply(frame, StepInputs(self.data.context, limits, joined))
        except UserError as error:
            raise UserError(f"{self.source.name}: {step.where}: " + error.message) from None


def refuse_unstreamable_steps(plan: StepPlan, limits: Mapping[str, Limits]) -> None:
    """Refuse steps that need more than a bounded number of rows."""
    for step in plan.steps:
        reason = step.explain_no_parts(has_limits=str(step.number) in limits)
        if reason is not None:
            raise UserError(
                f'{step.where} {reason}, which does not work with engine.home = "stream"; prepare '
                "the file beforehand, or set " + Setting({"engine.home": "host"})
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


FindLimits = Callable[[Step[Any], Sequence[SeriesFrame]], Limits]
"""A function that returns the fitted ranges of an outliers step; they are empty before fitting"""


class PreparedTables(NamedTuple):
    """The tables after all steps."""

    tables: list[DataTable]
    data: Data
    """The settings of the data that hold for these tables"""
    notes: list[str]
    """Notes on the effect of the steps"""
    left_out: list[str]
    """Notes on rows that were merged, and on series without a row that is known"""
    limits: dict[str, Limits]
    """The ranges of the outliers steps, by the step's number"""
    latency: int = 0
    """The number of rows after which a row's inputs are known"""


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
    def holds_values(self) -> bool:
        """Whether the values of a table's own columns are taken from its series as well, because
        they may become others."""
        return self.changes_rows or self.data.duplicates == "mean"

    @property
    def is_fitted(self) -> bool:
        """Whether no range is to be fitted on the training rows."""
        fitted = (step for step in self.plan.steps if step.is_fitted)
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
        """Return the tables without applying the ranges that are still to be fitted."""
        return self._run(tables, lambda *_: {}, final=False)

    def fit(self, tables: Sequence[DataTable], training: Flags) -> PreparedTables:
        """Return the tables with ranges fitted on the rows that `training` marks by position."""
        return self._run(tables, lambda step, frames: step.fit(frames, training))

    def apply(self, tables: Sequence[DataTable]) -> PreparedTables:
        """Return the tables with the ranges of a trained model."""
        return self._run(tables, lambda *_: {})

    def _run(
        self, tables: Sequence[DataTable], find_limits: FindLimits, *, final: bool = True
    ) -> PreparedTables:
        plan, data = self.plan, self.data
        features = self.features
        groups = self._split(tables, final=final)
        merged = Counter({f.name: f.num_merged for frames in groups for f in frames})
        limits: dict[str, Limits] = {}
        resamples = any(isinstance(step, Resampling) for step in plan.steps)
        if self.ahead and not resamples:
            groups = [[frame.extend(self.ahead) for frame in frames] for frames in groups]
        for step in plan.steps:
            fitted: Limits = {}
            if step.is_fitted:
                frames = [frame for group in groups for frame in group]
                fitted = self.replay.limits.get(str(step.number)) or find_limits(step, frames)
                limits[str(step.number)] = fitted
            for table, frames in zip(tables, groups, strict=True):
                if isinstance(step, Padding):
                    frames[:] = [_drop_unknown(frame, plan, features)[0] for frame in frames]
                self._apply(step, table, frames, fitted)
                if self.ahead and isinstance(step, Resampling):
                    frames[:] = [frame.extend(self.ahead) for frame in frames]
        latency = plan.count_ahead(features)
        ahead = plan.count_ahead([*features, *(data.targets or ())])
        notes = _describe_reach(plan, latency, data)
        stored = self._list_stored(groups)
        built: list[DataTable] = []
        left_out = describe_merged(merged, data.duplicates)
        counts: list[int] = []
        for table, frames in zip(tables, groups, strict=True):
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
        groups: list[list[SeriesFrame]] = []
        first = 0
        for table in tables:
            check_columns(self.plan, table)
            names = self.plan.list_sources()
            if self.holds_values:
                names = dict.fromkeys(self._list_values(table), "data.inputs") | names
            frames = split_frames(table, self.data, names, first)
            if self.data.future:
                frames = self._mark_ahead(table, frames)
            first += sum(frame.num_rows for frame in frames)
            groups.append(frames)
            if final and isinstance(table.reader, MemoryReader):
                for name in self._list_stored([frames]):  # need not stay in memory beside the new
                    table.reader.columns.pop(name, None)
        return groups

    def _mark_ahead(self, table: DataTable, frames: list[SeriesFrame]) -> list[SeriesFrame]:
        """Count the rows at the end of each series without a value of the targets or, where these
        are not read, of the inputs; later steps may hold or make values there."""
        data, plan = self.data, self.plan
        names = self.needed if self.needed is not None else self._list_values(table)
        inputs = [name for name in names if name not in (*data.future, *data.static)]
        observed = [name for name in inputs if name in (data.targets or inputs)] or inputs
        sources = plan.trace_to_file(observed, table.column_set)
        sources -= plan.trace_to_file(data.future, table.column_set)
        ends = np.zeros(len(frames), dtype=np.int64)
        for name in sources:
            known = ~np.isnan(read_numbers(table, name, "data.inputs"))
            for i, frame in enumerate(frames):
                rows = np.flatnonzero(known[np.asarray(frame.rows)])
                ends[i] = max(ends[i], rows[-1] + 1 if len(rows) else 0)
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

    def _list_stored(self, groups: Sequence[Sequence[SeriesFrame]]) -> list[str]:
        """Return the columns that are taken from the frames, not from the file."""
        written = self.plan.written
        if not self.holds_values:
            return list(written)
        frames = [frame for group in groups for frame in group]
        return list(dict.fromkeys((*(frames[0].columns if frames else ()), *written)))

    def _apply(
        self, step: Step[Any], table: DataTable, frames: list[SeriesFrame], limits: Limits
    ) -> None:
        """Replace the frames of a table by the frames after a step."""
        join = self.joins.get(step.number)
        keys = None if join is None else join.find_keys(table)
        for i, frame in enumerate(frames):
            joined = None
            if join is not None and keys is not None:
                joined = _select_rows(join, keys, frame, table)
            try:
                frames[i] = step.apply(frame, StepInputs(self.data.context, limits, joined))
            except UserError as error:
                where = table.name if frame.name == table.name else f'{table.name}, "{frame.name}"'
                raise UserError(f"{where}: {step.where}: " + error.message) from None
            if not frames[i].num_rows:
                raise UserError(f'{table.name}: {step.where} leaves "{frame.name}" without a row')

    def _finish(
        self, table: DataTable, frames: list[SeriesFrame], features: Collection[str]
    ) -> tuple[list[int], list[str]]:
        """Cut off the unknown rows at both ends of each series; return the number cut off at the
        beginning, and notes on series of which no row is left."""
        plan, without, counts = self.plan, [], []
        provisional = plan.count_ahead(features) - _count_final(plan)
        complete = []
        for frame in frames:
            known, dropped = _drop_unknown(frame, plan, features)
            end = known.num_rows - provisional
            if end <= 0 or not known.num_rows:
                problem = (
                    f'series "{frame.name}" has {format_count(frame.num_rows, "row")}, of which '
                    "data.prepare leaves none: its steps look back or ahead further, or a join "
                    "has no earlier row"
                )
                if self.data.short == "error":
                    raise UserError(
                        f"{table.name}: {problem}; leave such series out ("
                        + Setting({"data.short": "drop"})
                        + "), or shorten the steps"
                    )
                without.append(f"left out: {problem}")
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
        step.check_columns(replace(table, column_names=tuple(known)))
        for name in step.writes:
            if name in known and name not in step.reads:
                fix = "set prefix" if isinstance(step, Joining) else "choose another name"
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
    """Return the look-ahead of steps whose last rows need not be cut off: linear resampling makes
    no row before the later row is there."""
    return sum(
        step.look_ahead
        for step in plan.steps
        if isinstance(step, Resampling) and step.makes_final_rows
    )


def _drop_unknown(
    frame: SeriesFrame, plan: StepPlan, features: Collection[str]
) -> tuple[SeriesFrame, int]:
    """Return the frame from the first row on in which every feature has a value, as far as steps
    look back, and the number of rows that are cut off."""
    first = 0
    for name in features:
        if name not in frame.columns:
            continue  # a later step makes it
        rows = plan.warm_up.get(name, 0)
        longest = frame.num_rows if rows is None else rows
        head = np.isnan(frame.columns[name][: longest + 1])
        first = max(first, int(head.argmin()) if not head.all() else len(head) - 1 + bool(longest))
    return frame.cut(first, frame.num_rows), max(first - frame.padding, 0)


def _select_rows(
    join: JoinedTable, keys: RowKeys, frame: SeriesFrame, table: DataTable
) -> JoinedRows | None:
    """Return the joined rows of a series; its rows must agree in their id."""
    if len(keys.keys) == 1:
        return join.by_id.get(keys.keys[0])
    codes = np.unique(keys.codes[list_rows(frame.rows)])
    if len(codes) > 1:
        raise UserError(
            f'{table.name}: {join.where}: the rows of series "{frame.name}" differ in '
            f"{', '.join(join.step.ids)}; name it in data.id as well"
        )
    return join.by_id.get(keys.keys[codes[0]])


def _describe_dropped(counts: Sequence[int]) -> list[str]:
    """Note how many rows at the beginning of series are left out."""
    longest = max(counts)
    if not longest:
        return []
    rows = "the first row" if longest == 1 else f"the first {longest:,} rows"
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


class Source(NamedTuple):
    """Tables, and the role of each of their columns."""

    data: Data
    tables: list[DataTable]
    roles: Roles
    classes: tuple[str, ...]
    notes: list[str]
    limits: dict[str, Limits]
    latency: int = 0
    features: tuple[str, ...] = ()
    """The columns made by steps of `data.prepare` that a model may read"""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(file for table in self.tables for file in table.files)


def find_source(
    config: Config, data: Data, tables: list[DataTable], before: Sequence[str]
) -> Source:
    """Return the source of the tables: the roles of the columns, with labels as class numbers;
    `before` are earlier notes."""
    roles, notes = find_roles(tables[0], data)
    notes += before
    if config.masked:
        roles, data = adapt_to_pretraining(roles, data)
    else:
        predictions.refuse_clashes(config, tables[0], roles)
    roles = sort_roles(roles)
    refuse_unknown_jitter(config.augment.jitter, roles.inputs)
    names: tuple[str, ...] = ()
    if data.task == "classify" and data.labels is None:
        tables, names = labels.encode_labels(tables, roles.targets[0], "data.targets")
        labels.refuse_too_few(names, f'column "{roles.targets[0]}"')
    return Source(data, tables, roles, names, notes, {})


def mark_source_rows(source: Source, training: Flags, index: SeriesIndex) -> Flags:
    """Mark the training rows by their position before the first step; `training` marks them after
    the last one."""
    data, roles, min_rows = source.data, source.roles, source.data.context + source.data.horizon
    counted = Roles(roles.inputs, (POSITION,), roles.static)
    tables = [
        replace(table, column_names=(*table.column_names, POSITION)) for table in source.tables
    ]
    positions = prepare_series(tables, data, counted, min_rows=min_rows).read_column(POSITION)
    return mark_positions(positions, training, index.offsets)
