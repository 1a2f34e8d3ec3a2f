"""The chain of steps: its plan, its reach, and the steps carried out series by series."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slipstream.base.errors import Setting, UserError
from slipstream.config import Config, Data, Split
from slipstream.config.prepare import (
    CalendarStep,
    ClipStep,
    FilterStep,
    FormulaStep,
    JoinStep,
    LabelStep,
    OutliersStep,
    PadStep,
    PrepareStep,
    ResampleStep,
    UnitStep,
    name_step,
)
from slipstream.data import labels, predictions
from slipstream.data.columns import is_numeric, read_codes, read_numbers, read_times
from slipstream.data.files import read_tables
from slipstream.data.prepare import calendars, filters, joins, labelling, resampling
from slipstream.data.prepare.formulas import Formula, parse_formula
from slipstream.data.roles import (
    Roles,
    adapt_to_pretraining,
    find_roles,
    normalize_value,
    refuse_unknown_jitter,
    sort_roles,
)
from slipstream.data.series import (
    MICROSECONDS,
    Flags,
    Floats,
    Ints,
    SeriesIndex,
    Times,
    is_date,
    iter_ordered,
    list_rows,
    prepare_series,
)
from slipstream.data.table import DataTable, SourceFile, concatenate_tables

POSITION = "\0position"
"""A column that counts the rows of all series as they were before the first step"""


@dataclass(frozen=True)
class SeriesFrame:
    """The rows of one series, in time order. A column is NaN where a value is missing."""

    name: str
    rows: Ints | range
    """The rows of the file, in time order, before the first step"""
    first_position: int
    """How many rows all series before it have together, before the first step"""
    times: Times | None
    step: float | None
    """The usual step: seconds for timestamps, else in the time column's own unit"""
    columns: dict[str, Floats]
    origin: Ints | range
    """Which of `rows` each row was made from, or the last of several"""
    padding: int = 0
    """How many rows come before the first one of the file"""
    skipped: int = 0
    """How many rows were cut off before the first one that is no padding"""
    ahead: int = 0
    """How many rows at the end are to be predicted, with nothing but what is known ahead"""

    @property
    def num_rows(self) -> int:
        return len(self.origin)

    def write(self, columns: Mapping[str, Floats]) -> SeriesFrame:
        """Return the frame with some columns added or replaced."""
        return replace(self, columns=self.columns | dict(columns))

    def cut(self, begin: int, end: int) -> SeriesFrame:
        """Return the rows from `begin` to before `end`; a view."""
        return replace(
            self,
            times=None if self.times is None else self.times[begin:end],
            columns={name: values[begin:end] for name, values in self.columns.items()},
            origin=self.origin[begin:end],
            padding=max(self.padding - begin, 0),
            skipped=self.skipped + max(begin - self.padding, 0),
            ahead=max(self.ahead - (self.num_rows - end), 0),
        )

    def extend(self, rows: int) -> SeriesFrame:
        """Return the frame with further rows at its usual step, of which only times are known."""
        assert self.times is not None
        unit = MICROSECONDS if is_date(self.times) else 1
        times = self.times[-1] + np.arange(1, rows + 1) * ((self.step or 1.0) * unit)
        return replace(
            self,
            times=np.concatenate([self.times, times.astype(self.times.dtype)]),
            columns={
                name: np.concatenate([values, np.full(rows, np.nan)])
                for name, values in self.columns.items()
            },
            origin=np.concatenate([list_rows(self.origin), np.full(rows, self.origin[-1])]),
            ahead=self.ahead + rows,
        )

    def list_source_rows(self) -> Ints | range:
        """Return the row of the file that each row was made from."""
        if isinstance(self.rows, range) and isinstance(self.origin, range):
            return self.rows[self.origin.start : self.origin.stop]
        origin = list_rows(self.origin)
        rows: Ints = self.rows.start + origin if isinstance(self.rows, range) else self.rows[origin]
        return rows


def split_frames(
    table: DataTable, data: Data, columns: Mapping[str, str], first_position: int
) -> list[SeriesFrame]:
    """Return each series' rows with these columns, read as numbers; values are the settings that
    name them."""
    ordered = list(iter_ordered(table, data))
    numbers = {name: read_numbers(table, name, where) for name, where in columns.items()}
    frames = []
    for series in ordered:
        rows = series.rows
        at: Any = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        picked = {name: values[at] for name, values in numbers.items()}
        every = range(len(rows))
        frames.append(
            SeriesFrame(series.name, rows, first_position, series.time, series.step, picked, every)
        )
        first_position += len(rows)
    return frames


def build_table(
    source: DataTable,
    frames: Sequence[SeriesFrame],
    stored: Collection[str],
    labels: Mapping[str, tuple[str, ...]],
    time: str | None,
) -> DataTable:
    """Return the frames of a table as one, series after series.

    `stored` columns are those of the frames; others are read from the source when they are needed.
    """
    columns: dict[str, pa.ChunkedArray] = {}
    for name in stored:
        values = _concatenate([frame.columns.pop(name) for frame in frames])
        if name in labels:
            columns[name] = pa.chunked_array([to_classes(values, labels[name])])
        else:
            columns[name] = pa.chunked_array([pa.array(values)])
        del values  # before the next one is joined
    if time is not None:
        columns[time] = pa.chunked_array([_to_times([frame.times for frame in frames])])
    rows = _join_rows([frame.list_source_rows() for frame in frames])
    padded = None
    if any(frame.padding for frame in frames):
        padded = np.concatenate([np.arange(f.num_rows) < f.padding for f in frames])
    ahead = None
    if any(frame.ahead for frame in frames):
        ahead = np.concatenate([np.arange(f.num_rows) >= f.num_rows - f.ahead for f in frames])
    num_rows = sum(frame.num_rows for frame in frames)
    new = (name for name in columns if name not in source.column_set)
    return replace(
        source,
        column_names=(*source.column_names, *new),
        num_rows=num_rows,
        reader=PreparedReader(columns, source, rows),
        first_row=0,
        row_groups=(),
        source_rows=rows,
        padded=padded,
        skipped={frame.name: frame.skipped for frame in frames if frame.skipped},
        ahead=ahead,
    )


def add_positions(table: DataTable, frames: Sequence[SeriesFrame]) -> DataTable:
    """Return a table with one more column, which no list of columns names: where each row was
    before the first step."""
    assert isinstance(table.reader, PreparedReader)
    positions = [frame.first_position + list_rows(frame.origin) for frame in frames]
    column = pa.chunked_array([_concatenate(positions).astype(np.float64)])
    reader = replace(table.reader, columns=table.reader.columns | {POSITION: column})
    return replace(table, reader=reader)


@dataclass(frozen=True)
class PreparedReader:
    """Reads columns that steps have made, and the others from the rows that they were made from."""

    columns: dict[str, pa.ChunkedArray]
    source: DataTable
    rows: Ints | None
    """None where they are those of the source, in order"""

    def get_type(self, name: str) -> pa.DataType:
        known = self.columns.get(name)
        return self.source.reader.get_type(name) if known is None else known.type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        if name in self.columns:
            return self.columns[name].slice(begin, end - begin)
        whole = self.source.read_column(name)
        if self.rows is None:
            return whole.slice(begin, end - begin)
        return whole.take(pa.array(self.rows[begin:end]))


def mark_positions(positions: Floats, training: Flags, offsets: Ints) -> Flags:
    """Mark the rows before the first step that training rows were made from.

    `positions` are those of the rows after the last step. What lies between two training rows that
    follow each other was made into the later one.
    """
    at = positions.astype(np.int64)
    marks = np.zeros(int(at.max()) + 1, dtype=bool)
    marks[at[training]] = True
    follows = training[1:] & training[:-1] & (np.diff(at) > 1)
    follows[offsets[1:-1] - 1] = False
    change = np.zeros(len(marks), dtype=np.int64)
    np.add.at(change, at[:-1][follows] + 1, 1)
    np.add.at(change, at[1:][follows], -1)
    return np.asarray(marks | (np.cumsum(change) > 0))


def _join_rows(every: Sequence[Ints | range]) -> Ints | None:
    """Return the rows of all series; None where they are all rows from the first on, in order."""
    expected = 0
    for rows in every:
        if not isinstance(rows, range) or rows.start != expected:
            return np.concatenate([list_rows(one) for one in every])
        expected = rows.stop
    return None


def _concatenate(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def to_classes(values: Floats, names: tuple[str, ...]) -> pa.DictionaryArray:
    """Return class numbers as text; NaN is no label."""
    unknown = np.isnan(values)
    codes = pa.array(np.where(unknown, 0, values).astype(np.int8), mask=unknown)
    return pa.DictionaryArray.from_arrays(codes, list(names))


def _to_times(parts: Sequence[Times | None]) -> pa.Array:
    times = _concatenate([part for part in parts if part is not None])
    return pa.array(times).cast(pa.timestamp("us")) if is_date(times) else pa.array(times)


@dataclass(frozen=True)
class PlannedStep:
    """One step, and its reach."""

    number: int
    config: PrepareStep
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    look_back: int | None = 0
    """Rows; None for all rows before"""
    look_ahead: int = 0
    formula: Formula | None = None

    @property
    def where(self) -> str:
        """How messages call it."""
        return name_step(self.number, self.config)

    @property
    def changes_rows(self) -> bool:
        """Whether it makes other rows, of all columns."""
        return isinstance(self.config, (ResampleStep, PadStep))


@dataclass(frozen=True)
class StepPlan:
    """The steps that make the columns which are needed, in order."""

    steps: tuple[PlannedStep, ...]
    data: Data

    @property
    def rows_ahead(self) -> int:
        """Rows that every row looks ahead, because it was made from later ones."""
        steps = (step for step in self.steps if isinstance(step.config, ResampleStep))
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
            if isinstance(step.config, ResampleStep):
                reach = dict.fromkeys(reach)
            rows = [reach.get(name, 0) for name in step.reads]
            known = [one for one in rows if one is not None]
            back = None
            if step.look_back is not None and len(known) == len(rows):
                back = max(known, default=0) + step.look_back
            reach |= dict.fromkeys(step.writes, back)
        return reach

    @cached_property
    def warm_up(self) -> dict[str, int | None]:
        """Rows at a series' beginning in which each written column may be unknown; None where only
        the data tell.

        A recursive filter knows its first row; a formula that has one in it says nothing about the
        rest of it; a join begins with the first row of its table.
        """
        reach: dict[str, int | None] = {}
        for step in self.steps:
            rows = [reach.get(name, 0) for name in step.reads]
            known = [one for one in rows if one is not None]
            own = step.look_back
            if isinstance(step.config, FilterStep):
                own = own or 0
            elif isinstance(step.config, JoinStep):
                own = None
            total = None
            if own is not None and len(known) == len(rows):
                total = max(known, default=0) + own
            if isinstance(step.config, ResampleStep):
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
        labels = (step.config for step in self.steps if isinstance(step.config, LabelStep))
        return {label.name: label.classes for label in labels}

    def makes_from_times(self, names: Collection[str]) -> bool:
        """Return whether steps make all of these columns from the rows' times alone."""
        mine = select_steps(self, names)
        has_join = any(isinstance(step.config, JoinStep) for step in mine.steps)
        return set(names) <= set(mine.written) and not (has_join or mine.list_sources())

    def trace_to_file(self, names: Collection[str], columns: Collection[str]) -> set[str]:
        """Return the columns of a file that these columns are, or are made from."""
        sources = select_steps(self, names).list_sources()
        return {name for name in (*names, *sources) if name in columns}

    def list_sources(self) -> dict[str, str]:
        """Return the columns that steps read from the file, and the first step that does."""
        new: set[str] = set()
        sources: dict[str, str] = {}
        for step in self.steps:
            for name in step.reads:
                if name not in new:
                    sources.setdefault(name, step.where)
            new |= set(step.writes)
        return sources


def plan_steps(data: Data, joined: Mapping[int, tuple[str, ...]] | None = None) -> StepPlan:
    """Check the steps against each other; `joined` are the columns that each join brings.

    Without them, which takes no file, columns that a join brings are not known yet.
    """
    steps: list[PlannedStep] = []
    labels: dict[str, str] = {}
    resampled = padded = False
    for number, config in enumerate(data.prepare, start=1):
        where = name_step(number, config)
        try:
            step = _plan_step(number, config, (joined or {}).get(number, ()))
        except UserError as error:
            raise UserError(f"{where}: " + error.message) from None
        _check_time(config, step, data, where)
        _check_look_ahead(step)
        for name in step.reads:
            if name in labels:
                raise UserError(
                    f'{where} reads "{name}", which {labels[name]} makes from rows to come; a '
                    "label can only be a target"
                )
        if isinstance(config, LabelStep):
            labels[config.name] = where
        if isinstance(config, ResampleStep):
            ahead = [one for one in steps if one.look_ahead]
            if resampled or padded or ahead:
                what = (
                    f"{ahead[0].where} looks ahead" if ahead else "another one or pad precedes it"
                )
                raise UserError(f"{where}: {what}; put it first")
            resampled = True
        if isinstance(config, PadStep):
            if padded:
                raise UserError(f"{where}: there is another pad before it; remove one")
            padded = True
        steps.append(step)
    return StepPlan(tuple(steps), data)


def select_steps(plan: StepPlan, needed: Collection[str]) -> StepPlan:
    """Return the steps that these columns depend on, and those that change rows."""
    wanted, steps = set(needed), []
    for step in reversed(plan.steps):
        if step.changes_rows:
            steps.append(step)
        elif mine := [name for name in step.writes if name in wanted]:
            wanted = (wanted - set(mine)) | set(step.reads)
            steps.append(step)
    return replace(plan, steps=tuple(reversed(steps)))


def _plan_step(number: int, config: PrepareStep, joined: tuple[str, ...]) -> PlannedStep:
    step = PlannedStep(number, config)
    match config:
        case ResampleStep():
            ahead = resampling.get_look_ahead(config.every, config.limit, config.method)
            return replace(step, look_back=None, look_ahead=ahead)
        case FilterStep():
            return _plan_filter(step, config)
        case FormulaStep():
            formula = parse_formula(config.value)
            back, ahead = formula.look_back, formula.look_ahead
            step = replace(step, reads=formula.columns, writes=(config.name,), formula=formula)
            return replace(step, look_back=back, look_ahead=ahead)
        case CalendarStep():
            if config.zone is not None:
                calendars.check_zone(config.zone)
            return replace(step, writes=calendars.name_columns(list_features(config)))
        case JoinStep():
            return replace(step, writes=joined)
        case LabelStep():
            ahead = config.rows
            return replace(step, reads=config.sources, writes=(config.name,), look_ahead=ahead)
        case UnitStep() | ClipStep() | OutliersStep():
            return replace(step, reads=config.columns, writes=config.columns)
        case PadStep():
            return step


def list_features(config: CalendarStep) -> tuple[str, ...]:
    """Return the features of a calendar, the holidays last."""
    return (*config.features, "holiday") if config.holidays else config.features


def _plan_filter(step: PlannedStep, config: FilterStep) -> PlannedStep:
    filters.check_filter(
        kind=config.kind,
        rows=config.rows,
        cutoff_hz=config.cutoff_hz,
        order=config.order or filters.DEFAULT_ORDER,
        centered=config.centered,
    )
    back, ahead = filters.get_reach(kind=config.kind, rows=config.rows, centered=config.centered)
    step = replace(step, reads=config.columns, writes=config.outputs)
    return replace(step, look_back=back, look_ahead=ahead)


def _check_time(config: PrepareStep, step: PlannedStep, data: Data, where: str) -> None:
    needs_time = isinstance(config, (ResampleStep, CalendarStep, JoinStep))
    needs_time = needs_time or (isinstance(config, FilterStep) and config.cutoff_hz is not None)
    needs_time = needs_time or (step.formula is not None and step.formula.needs_times)
    if needs_time and data.time_column is None:
        raise UserError(f"{where} needs the time of each row; set data.time")


def _check_look_ahead(step: PlannedStep) -> None:
    accepts = getattr(step.config, "lookahead", True)
    if step.look_ahead and not accepts:
        rows = "1 row" if step.look_ahead == 1 else f"{step.look_ahead} rows"
        raise UserError(
            f"{step.where} looks {rows} ahead, which is unknown when a prediction is made; use "
            "past rows only, or set lookahead = true in the step: these rows are then purged at "
            "every split border, and predictions come that much later"
        )


Limits = dict[str, tuple[float, float]]
"""The lowest and the highest value of each column"""


@dataclass(frozen=True)
class Replay:
    """What steps do not find out themselves."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    """The ranges that outliers steps were fitted to, by the step's number"""
    joins: Mapping[str, Any] = field(default_factory=dict)
    """Other tables or paths to join, by the file's name or the prefix of its columns"""


TO_DEVIATION = 1.4826
"""Median distances from the median to standard deviations, for a normal distribution"""


class JoinedRows(NamedTuple):
    """The rows of a joined table that belong to one series."""

    times: Times
    columns: dict[str, Floats]


def apply_step(
    step: PlannedStep,
    frame: SeriesFrame,
    *,
    context: int,
    limits: Limits | None = None,
    joined: JoinedRows | None = None,
) -> SeriesFrame:
    """Return the rows after a step; `context` is how many rows a model reads."""
    columns = frame.columns
    match step.config:
        case ResampleStep():
            return _resample(frame, step.config)
        case FilterStep() as config:
            return frame.write(_filter(frame, config))
        case FormulaStep(name=name):
            assert step.formula is not None
            return frame.write({name: step.formula.evaluate(columns, frame.times)})
        case CalendarStep() as config:
            assert frame.times is not None
            features, dates = list_features(config), config.holidays
            return frame.write(
                calendars.compute_calendar(frame.times, features, holidays=dates, zone=config.zone)
            )
        case JoinStep() as config:
            return frame.write(_join(frame, step, config, joined))
        case LabelStep(name=name) as config:
            return frame.write({name: labelling.label_rows(columns, config)})
        case UnitStep(columns=names, factor=factor, offset=offset):
            return frame.write({name: columns[name] * factor + offset for name in names})
        case ClipStep(columns=names, low=low, high=high):
            return frame.write({name: np.clip(columns[name], low, high) for name in names})
        case OutliersStep() as config:
            return frame.write(_limit(columns, config, limits))
        case PadStep() as config:
            return _pad(frame, config.rows or context - 1, zero=config.value == "zero")


def _resample(frame: SeriesFrame, config: ResampleStep) -> SeriesFrame:
    assert frame.times is not None
    result = resampling.resample(
        frame.times,
        frame.columns,
        every=config.every,
        method=config.method,
        limit=config.limit,
        keep=False,  # this frame is not used again
    )
    step, _ = resampling.get_lengths(frame.times, config.every, config.limit)
    ahead = 0
    if frame.ahead:  # a row that holds the last value, or a mean of fewer rows, is ahead too
        ahead = int((result.times > frame.times[-frame.ahead - 1]).sum())
    return replace(
        frame,
        ahead=ahead,
        skipped=0,  # its rows are others
        times=result.times,
        columns=result.columns,
        origin=list_rows(frame.origin)[result.rows],
        step=step / MICROSECONDS if is_date(frame.times) else step,
    )


def _filter(frame: SeriesFrame, config: FilterStep) -> dict[str, Floats]:
    pairs = zip(config.columns, config.outputs, strict=True)
    return {
        output: filters.apply_filter(
            frame.columns[name],
            kind=config.kind,
            rows=config.rows,
            cutoff_hz=config.cutoff_hz,
            order=config.order or filters.DEFAULT_ORDER,
            step_s=frame.step,
            centered=config.centered,
        )
        for name, output in pairs
    }


def _join(
    frame: SeriesFrame, step: PlannedStep, config: JoinStep, joined: JoinedRows | None
) -> dict[str, Floats]:
    assert frame.times is not None
    if joined is None:  # no row of the file has this series' id
        return {name: np.full(frame.num_rows, np.nan) for name in step.writes}
    return joins.join_as_of(
        frame.times,
        joined.times,
        joined.columns,
        period=config.period,
        label=config.label,
        delay=config.delay,
    )


def _limit(
    columns: Mapping[str, Floats], config: OutliersStep, limits: Limits | None
) -> dict[str, Floats]:
    """Limit columns to the fitted ranges; without any, before they are fitted, change nothing."""
    result = {}
    for name, (low, high) in (limits or {}).items():
        values = columns[name]
        if config.action == "clip":
            result[name] = np.clip(values, low, high)
        else:
            result[name] = np.where((values < low) | (values > high), np.nan, values)
    return result


def fit_limits(step: PlannedStep, frames: Sequence[SeriesFrame], training: Flags) -> Limits:
    """Fit the range of each column on the training rows, which `training` marks by position."""
    config = step.config
    assert isinstance(config, OutliersStep)
    limits: Limits = {}
    for name in config.columns:
        parts = []
        for frame in frames:
            positions = frame.first_position + list_rows(frame.origin)
            own = positions < len(training)
            own[own] = training[positions[own]]
            own[: frame.padding] = False
            values = frame.columns[name][own]
            parts.append(values[~np.isnan(values)])
        known = np.concatenate(parts)
        if not len(known):
            raise UserError(f'{step.where}: "{name}" has no value in the training rows')
        limits[name] = _fit_range(known, config)
        if limits[name][0] == limits[name][1]:
            raise UserError(
                f'{step.where}: more than half of the training values of "{name}" are '
                f"{limits[name][0]:g}, so their spread is 0; use method = "
                '"quantile", or leave the column out'
            )
    return limits


def _fit_range(values: Floats, config: OutliersStep) -> tuple[float, float]:
    if config.method == "quantile":
        low, high = np.quantile(values, (config.low, config.high))
        return float(low), float(high)
    middle = float(np.median(values))
    spread = config.z * TO_DEVIATION * float(np.median(np.abs(values - middle)))
    return middle - spread, middle + spread


def _pad(frame: SeriesFrame, rows: int, *, zero: bool) -> SeriesFrame:
    """Put rows before the first one, at the usual step."""
    if not rows:
        return frame
    times = frame.times
    if times is not None:
        unit = MICROSECONDS if is_date(times) else 1
        before = times[0] - np.arange(rows, 0, -1) * ((frame.step or 1.0) * unit)
        times = np.concatenate([before.astype(times.dtype), times])
    return replace(
        frame,
        times=times,
        columns={
            name: np.concatenate([np.full(rows, 0.0 if zero else values[0]), values])
            for name, values in frame.columns.items()
        },
        origin=np.concatenate([np.full(rows, frame.origin[0]), list_rows(frame.origin)]),
        padding=rows,
    )


class Source(NamedTuple):
    """Tables and what each of their columns is for."""

    data: Data
    tables: list[DataTable]
    roles: Roles
    classes: tuple[str, ...]
    notes: list[str]
    limits: dict[str, Limits]
    latency: int = 0
    features: tuple[str, ...] = ()
    """The columns that steps of `data.prepare` make, of those that a model may read"""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        return tuple(file for table in self.tables for file in table.files)


def find_source(
    config: Config, data: Data, tables: list[DataTable], before: Sequence[str]
) -> Source:
    """Find the roles of the columns, and read labels as class numbers; `before` are notes."""
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
    tables = [replace(one, column_names=(*one.column_names, POSITION)) for one in source.tables]
    positions = prepare_series(tables, data, counted, min_rows=min_rows).read_column(POSITION)
    return mark_positions(positions, training, index.offsets)


Key = tuple[str, ...]
"""The values of the columns that must be equal in both tables"""


class RowKeys(NamedTuple):
    """The key of each row, as a number of `keys`."""

    codes: Ints
    keys: list[Key]


@dataclass(frozen=True)
class JoinedTable:
    """A table to join, in time order, by id."""

    step: JoinStep
    where: str
    by_id: dict[Key, JoinedRows]
    column_names: tuple[str, ...]
    """As the join names them"""

    def find_keys(self, table: DataTable) -> RowKeys:
        """Return the key of every row of the table that is joined to."""
        return _read_keys(table, self.step.ids, self.where)

    def find_first_known(self, joined: JoinedRows, times: Times) -> Any:
        """Return the time from which on a row is known, in the unit of these times."""
        unit = MICROSECONDS if is_date(times) else 1.0
        return joined.times[0] + self.step.lag_s * unit


def read_joins(data: Data, replaced: Mapping[str, Any]) -> dict[int, JoinedTable]:
    """Read the table of each join; `replaced` names others, by the file's name or the prefix."""
    joins: dict[int, JoinedTable] = {}
    unused = set(replaced)
    for number, step in enumerate(data.prepare, start=1):
        if not isinstance(step, JoinStep):
            continue
        names = list_join_names(step)
        match = next((name for name in names if name in replaced), None)
        unused.discard(match or "")
        source = step.path if match is None else replaced[match]
        joins[number] = _read_join(step, name_step(number, step), source, data)
    if unused:
        steps = (step for step in data.prepare if isinstance(step, JoinStep))
        known = ", ".join(list_join_names(step)[0] for step in steps)
        what = f"there is {known}" if known else "the model's steps join none"
        raise UserError(f'joins: there is no joined table "{sorted(unused)[0]}"; {what}')
    return joins


def list_join_names(step: JoinStep) -> list[str]:
    """Return what a joined table may be called."""
    path = Path(step.path)
    names = [path.name, path.stem, step.path, step.prefix, step.prefix.rstrip("_")]
    return [name for name in names if name]


def _read_join(step: JoinStep, where: str, source: Any, data: Data) -> JoinedTable:
    is_path = isinstance(source, (str, Path))
    settings: dict[str, Any] = {
        "path": str(source) if is_path else None,
        "time": step.time or data.time,
        "id": step.id,
        "split": Split(train=0.7, val=0.1, test=0.2),
        "where": {},
        "task": "regress",
        "time_format": step.time_format or data.time_format,
        **dict.fromkeys(("skip_rows", "sheet", "variable")),  # it is laid out as it is
    }
    theirs = data.model_copy(update=settings)
    try:
        tables = read_tables(theirs, None if is_path else source)
        table = tables[0] if len(tables) == 1 else concatenate_tables(tables)
        return _split_join(step, where, table, theirs)
    except UserError as error:
        raise UserError(f"{where}: " + error.message) from None


def _split_join(step: JoinStep, where: str, table: DataTable, data: Data) -> JoinedTable:
    assert data.time_column is not None
    times = read_times(table, data.time_column, data.time_format, "time")
    reserved = {*data.time_columns, data.time_column, table.file_column, *step.ids}
    names = step.columns
    if names is None:
        free = (name for name in table.column_names if name not in reserved)
        names = tuple(name for name in free if is_numeric(table, name))
    if not names:
        raise UserError(f"{table.name}: has no numeric column to join")
    columns = {step.prefix + name: read_numbers(table, name, "columns") for name in names}
    codes, keys = _read_keys(table, step.ids, "id")
    by_id = {}
    for number, key in enumerate(keys):
        rows = np.flatnonzero(codes == number)
        order = rows
        if data.unsorted == "sort":
            order = rows[np.argsort(times[rows], kind="stable")]
        steps = np.diff(times[order])
        if len(steps) and steps.min() <= 0:
            _refuse_order(table, data, order, int(np.flatnonzero(steps <= 0)[0]), steps.min() < 0)
        by_id[key] = JoinedRows(times[order], {name: some[order] for name, some in columns.items()})
    return JoinedTable(step, where, by_id, tuple(columns))


def _refuse_order(table: DataTable, data: Data, rows: Ints, first: int, backwards: bool) -> None:
    here = table.locate_cell(int(rows[first + 1]), str(data.time_column))
    before = table.locate_row(int(rows[first]))
    if backwards:
        raise UserError(
            f"{here}: earlier than {before}; sort the file, set "
            + Setting({"data.unsorted": "sort"})
            + ", or name the column that tells its rows apart (id)"
        )
    raise UserError(
        f"{here}: the same time as {before}, so a row would match twice; remove duplicate rows, or "
        "name the column that tells them apart (id)"
    )


def _read_keys(table: DataTable, ids: tuple[str, ...], setting: str) -> RowKeys:
    """Return the key of each row; one for all of them where there are no ids."""
    codes = np.broadcast_to(np.zeros(1, dtype=np.int64), table.num_rows)
    keys: list[Key] = [()]
    for name in ids:
        more, texts = read_codes(table, name, setting)
        pairs, codes = np.unique(codes * len(texts) + more, return_inverse=True)
        values = [normalize_value(text) for text in texts]
        keys = [(*keys[pair // len(values)], values[pair % len(values)]) for pair in pairs]
    return RowKeys(codes, keys)
