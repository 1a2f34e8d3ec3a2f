"""The steps of `data.prepare`: one class each.

A class owns everything about its step but the settings, which are a section of `config/prepare`:

| | member |
|---|---|
| which columns and rows it needs | `reads`, `writes`, `look_back`, `look_ahead`, `warm_up` |
| what is wrong with it | `check`, `check_order`, `check_columns` |
| a range fitted on the training rows | `is_fitted`, `fit` |
| a whole series | `apply` |
| a table on disk, read in parts | `explain_no_parts` |
| one row after the other | `check_rows`, `compute_row` |
| one row after the other in C | `explain_no_c`, `write_c` |

Most steps write `reads`, `writes` and `apply` only: the other members follow from these. To add a
step, write its settings in `config/prepare`, its class here, and a line in `STEPS`; if its C code
calls a function that does not exist yet, add that to `exporting/c/templates/prepare.c.j2`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from slipstream.base.errors import UserError
from slipstream.base.text import format_c_double
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
from slipstream.data.columns import require_column
from slipstream.data.filters import (
    FilterDesign,
    design_filter,
    filter_column,
    filter_newest,
    filter_value,
    get_reach,
)
from slipstream.data.prepare import calendars, joins, resampling
from slipstream.data.prepare.c_code import Statements
from slipstream.data.prepare.formulas import Formula, parse_formula
from slipstream.data.prepare.frames import SeriesFrame
from slipstream.data.prepare.joins import JoinedRows
from slipstream.data.prepare.resampling import BarColumns
from slipstream.data.series import MICROSECONDS, Flags, Floats, is_date, list_rows
from slipstream.data.table import DataTable

Limits = dict[str, tuple[float, float]]
"""The lowest and the highest value of each column"""
Memory = Mapping[str, Floats]
"""The state of a step between rows, by the column that it writes"""
Variables = Mapping[str, str]
"""The variables of columns in C"""
TO_DEVIATION = 1.4826
"""The factor from the median distance to the median (MAD) to the standard deviation, for a normal
distribution"""
Settings = TypeVar("Settings", bound=PrepareStep)


class StepInputs(NamedTuple):
    """The inputs of a step besides the rows of a series."""

    context: int
    """The number of rows that a model reads"""
    limits: Limits | None = None
    """The fitted ranges of an outliers step; None before fitting"""
    joined: JoinedRows | None = None
    """The rows to join; None where no row of the joined table has the id of the series"""
    step_s: float | None = None
    """The time from row to row, for C code; a frame has its own"""


@dataclass(frozen=True)
class Step(ABC, Generic[Settings]):
    """One step, with its settings. Steps are counted from 1."""

    number: int
    config: Settings
    joined: tuple[str, ...] = ()
    """The columns that a join brings; empty until its table has been read"""

    changes_rows: ClassVar[bool] = False
    """Whether the step replaces the rows, in all columns"""
    is_fitted: ClassVar[bool] = False
    """Whether the step has ranges that are fitted on the training rows"""
    reads_table: ClassVar[bool] = False
    """Whether the step reads another table"""

    @property
    def where(self) -> str:
        """The name of the step in messages."""
        return name_step(self.number, self.config)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the step reads."""
        return ()

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns that the step makes or replaces."""
        return ()

    @property
    def look_back(self) -> int | None:
        """The number of earlier rows that a value depends on; None for all of them."""
        return 0

    @property
    def look_ahead(self) -> int:
        """The number of later rows that a value depends on."""
        return 0

    @property
    def warm_up(self) -> int | None:
        """The number of rows at the beginning of a series in which the step's columns may be
        unknown; None where only the data tell."""
        return self.look_back

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """The classes of the columns that the step writes as labels."""
        return {}

    @property
    def units(self) -> dict[str, str]:
        """The new units of the columns that the step converts."""
        return {}

    @property
    def needs_times(self) -> bool:
        """Whether the step needs a time column."""
        return False

    @property
    def keeps_rows(self) -> bool:
        """Whether the number of rows after the step is known without reading all rows."""
        return not (self.changes_rows or self.is_fitted or self.reads_table or self.labels)

    def check(self) -> None:
        """Refuse settings that no data can satisfy, beyond what the config checks."""

    def check_order(self, before: Sequence[Step[Any]]) -> None:
        """Refuse a step that must not follow the steps before it."""

    def check_columns(self, table: DataTable) -> None:
        """Refuse columns that the table, as steps before have made it, does not have."""
        for name in self.reads:
            require_column(table, name, self.where)

    def fit(self, frames: Sequence[SeriesFrame], training: Flags) -> Limits:
        """Return the ranges of the training rows, which `training` marks by position; steps with
        `is_fitted` have it."""
        raise NotImplementedError(f"{self.where} is not fitted")

    @abstractmethod
    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        """Return the rows of a series after the step."""

    def explain_no_parts(self, *, has_limits: bool) -> str | None:
        """Explain why a table on disk cannot be read in parts, each with the rows that the step
        looks back to; None where it can."""
        if self.changes_rows:
            return "makes other rows"
        if self.is_fitted and not has_limits:
            return "is fitted on all training rows"
        if self.look_back is None:
            return "depends on all rows before"
        if self.look_ahead and not self.labels:
            return "looks ahead"
        return None

    def check_rows(self, step_s: float | None) -> None:
        """Refuse to carry out the step on one row after the other, `step_s` apart."""
        reason = self._explain_no_rows()
        if reason is not None:
            raise UserError(f"{self.where} cannot be streamed: {reason}")

    def _explain_no_rows(self) -> str | None:
        if self.look_ahead:
            return f"it looks {self.look_ahead} rows ahead"
        return None

    def compute_row(
        self, rows: SeriesFrame, inputs: StepInputs, memory: Memory
    ) -> tuple[dict[str, float], Memory]:
        """Return the values that the step writes for the newest row, and its new state; `rows` has
        the rows that the step looks back to, as far as they exist, and the newest row."""
        after = self.apply(rows, inputs)
        return {name: float(after.columns[name][-1]) for name in self.writes}, {}

    def explain_no_c(self) -> str | None:
        """Explain why C code cannot carry out the step row by row; None where it can."""
        return "looks ahead" if self.look_ahead else None

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        """Add the statements of the step; return the variables of the columns that it writes.
        `columns` are the variables of all columns so far. Steps have it unless `explain_no_c` says
        why not."""
        raise NotImplementedError(self.where)


class Resampling(Step[ResampleStep]):
    """Rows at regular times."""

    changes_rows = True

    @property
    def bars(self) -> BarColumns | None:
        """The columns of the bars that it makes; None where it makes none."""
        return BarColumns.from_step(self.config)

    @property
    def reads(self) -> tuple[str, ...]:
        bars = self.bars
        return () if bars is None else tuple(dict.fromkeys((*bars.sources, *bars.volumes)))

    @property
    def writes(self) -> tuple[str, ...]:
        bars = self.bars
        return () if bars is None else (*bars.names, *bars.volumes)

    @property
    def look_back(self) -> None:
        return None

    @property
    def look_ahead(self) -> int:
        config = self.config
        return resampling.get_look_ahead(config.every, config.limit, config.method)

    @property
    def needs_times(self) -> bool:
        return True

    @property
    def makes_final_rows(self) -> bool:
        """Whether each row is made only once the later rows that it depends on are there."""
        return self.config.method == "linear"

    def check_order(self, before: Sequence[Step[Any]]) -> None:
        ahead = [step for step in before if step.look_ahead]
        if ahead:
            raise UserError(f"{ahead[0].where} looks ahead; put it first")
        if any(step.changes_rows for step in before):
            raise UserError("another one or pad precedes it; put it first")

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        config = self.config
        assert frame.times is not None
        result = resampling.resample(
            frame.times,
            frame.columns,
            every=config.every,
            method=config.method,
            limit=config.limit,
            bars=self.bars,
            keep=False,  # this frame is not used again
        )
        step, _ = resampling.get_lengths(frame.times, config.every, config.limit)
        ahead = 0
        if frame.ahead:  # a row that holds the last value, or a mean of fewer rows, is ahead too
            ends = result.times + (step if config.label == "start" else 0)
            ahead = int((ends > frame.times[-frame.ahead - 1]).sum())
        return replace(
            frame,
            ahead=ahead,
            skipped=0,  # its rows are others
            times=result.times,
            columns=result.columns,
            origin=list_rows(frame.origin)[result.rows],
            step=step / MICROSECONDS if is_date(frame.times) else step,
        )

    def explain_no_c(self) -> str | None:
        if self.config.method == "ohlc":
            return 'makes bars, which C code does not; it knows method = "mean" and "last"'
        return super().explain_no_c()


# A stream asks for the design at every row; it depends on the settings and the time step alone.
_design = lru_cache(maxsize=32)(design_filter)


class Filtering(Step[FilterStep]):
    """Smoothed columns."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.config.columns

    @property
    def writes(self) -> tuple[str, ...]:
        return self.config.outputs

    @property
    def look_back(self) -> int | None:
        return get_reach(self.config)[0]

    @property
    def look_ahead(self) -> int:
        return get_reach(self.config)[1]

    @property
    def warm_up(self) -> int:
        return self.look_back or 0  # a recursive filter knows its first row

    @property
    def needs_times(self) -> bool:
        return self.config.cutoff_hz is not None

    def design(self, step_s: float | None) -> FilterDesign:
        """Return the coefficients for rows that are `step_s` apart."""
        design = _design(self.config, step_s)
        assert design is not None  # which only filters of predictions may be
        return design

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        design = self.design(frame.step)
        pairs = zip(self.reads, self.writes, strict=True)
        return frame.write(
            {output: filter_column(frame.columns[name], design) for name, output in pairs}
        )

    def check_rows(self, step_s: float | None) -> None:
        super().check_rows(step_s)
        self.design(step_s)  # refuses a cut-off above half of the sampling rate

    def compute_row(
        self, rows: SeriesFrame, inputs: StepInputs, memory: Memory
    ) -> tuple[dict[str, float], Memory]:
        design = self.design(rows.step)
        values: dict[str, float] = {}
        remembered: dict[str, Floats] = {}
        for name, output in zip(self.reads, self.writes, strict=True):
            column = rows.columns[name]
            if len(design.sections):
                values[output], remembered[output] = filter_value(
                    design, memory.get(output), float(column[-1])
                )
            else:
                values[output] = filter_newest(column, design)
        return values, remembered

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        design = self.design(inputs.step_s)
        pairs = zip(self.reads, self.writes, strict=True)
        return {output: self._write_filter(columns[name], design, code) for name, output in pairs}

    def _write_filter(self, x: str, design: FilterDesign, code: Statements) -> str:
        if len(design.sections):
            return code.apply_low_pass(design.sections, x)
        if design.kind == "savgol":
            weights = code.add_array(design.weights[::-1].tolist())  # the oldest row first
            call = f"weigh({{state}}, {{rows}}, {weights}, {{x}})"
            return code.apply_ring("weigh", call, x, design.rows)
        function = "filter_median" if design.kind == "median" else "filter_mean"
        return code.apply_ring(function, f"{function}({{state}}, {{rows}}, {{x}})", x, design.rows)


class FormulaColumn(Step[FormulaStep]):
    """A new column from an expression over columns."""

    @cached_property
    def formula(self) -> Formula:
        return parse_formula(self.config.value)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.formula.columns

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.config.name,)

    @cached_property
    def look_back(self) -> int | None:
        return self.formula.look_back

    @cached_property
    def look_ahead(self) -> int:
        return self.formula.look_ahead

    @property
    def needs_times(self) -> bool:
        return self.formula.needs_times

    def check(self) -> None:
        assert self.formula  # its parser refuses what is no formula

    def check_columns(self, table: DataTable) -> None:
        try:
            self.formula.check_columns(table.column_names)
        except UserError as error:
            raise UserError(f"{table.name}: {self.where}: " + error.message) from None

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        return frame.write({self.config.name: self.formula.evaluate(frame.columns, frame.times)})

    def _explain_no_rows(self) -> str | None:
        if self.look_back is None:
            return "its formula looks back over all rows; use a function of so many rows"
        return super()._explain_no_rows()

    def explain_no_c(self) -> str | None:
        return "needs the time of each row" if self.needs_times else super().explain_no_c()

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        return {self.config.name: self.formula.write_c(columns, code)}


class CalendarColumns(Step[CalendarStep]):
    """The position of a row in the day, week and year."""

    @property
    def features(self) -> tuple[str, ...]:
        """The features of the calendar, the holidays last."""
        config = self.config
        marks_days = config.holidays or config.country is not None
        return (*config.features, "holiday") if marks_days else config.features

    @property
    def writes(self) -> tuple[str, ...]:
        return calendars.name_columns(self.features)

    @property
    def needs_times(self) -> bool:
        return True

    def check(self) -> None:
        if self.config.zone is not None:
            calendars.check_zone(self.config.zone)
        if self.config.country is not None:
            calendars.check_country(self.config.country)

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        assert frame.times is not None
        config = self.config
        return frame.write(
            calendars.compute_calendar(
                frame.times,
                self.features,
                holidays=config.holidays,
                country=config.country,
                zone=config.zone,
            )
        )

    def explain_no_c(self) -> str:
        return "needs the time of each row"


class Joining(Step[JoinStep]):
    """Columns of another table, as they were known at each row's time."""

    reads_table = True

    @property
    def writes(self) -> tuple[str, ...]:
        return self.joined

    @property
    def warm_up(self) -> None:
        return None  # the columns begin with the first row of the table

    @property
    def needs_times(self) -> bool:
        return True

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        assert frame.times is not None
        if inputs.joined is None:  # no row of the file has this series' id
            return frame.write({name: np.full(frame.num_rows, np.nan) for name in self.writes})
        config, joined = self.config, inputs.joined
        return frame.write(
            joins.join_as_of(
                frame.times,
                joined.times,
                joined.columns,
                period=config.period,
                label=config.label,
                delay=config.delay,
            )
        )

    def _explain_no_rows(self) -> str:
        return "its table is not part of the stream; train on columns that each row has"

    def explain_no_c(self) -> str:
        return "reads another table"


class Labelling(Step[LabelStep]):
    """Classes from later rows: the move of a column, the first barrier reached, or its sign."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.config.sources

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.config.name,)

    @property
    def look_ahead(self) -> int:
        return self.config.rows

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        return {self.config.name: self.config.classes}

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        return frame.write({self.config.name: _label_rows(frame.columns, self.config)})


def _label_rows(columns: Mapping[str, Floats], step: LabelStep) -> Floats:
    """Return the number of each row's class among `step.classes`.

    The result is NaN where a row that decides on the class is missing, as at the end of a series.
    """
    values, rows = columns[step.column], step.rows
    result = np.full(len(values), np.nan)
    if len(values) <= rows:
        return result
    now = values[:-rows]
    if step.kind == "barrier":
        high, low = (columns[name or step.column] for name in (step.high, step.low))
        result[:-rows] = _find_first_barrier(now, high, low, step)
        return result
    change = values[rows:] - now
    if step.kind == "sign":
        result[:-rows] = np.where(change == 0, np.nan, change > 0)
    else:
        up, down = _get_distances(now, step)
        result[:-rows] = _number_moves(change >= up, change <= -down)
    result[:-rows][np.isnan(change)] = np.nan
    return result


def _get_distances(now: Floats, step: LabelStep) -> tuple[Floats, Floats]:
    """Return the distance of the upper and the lower threshold; NaN where the value is missing, or
    is 0 and thresholds are relative."""
    assert step.up is not None
    size: Floats = np.abs(now)
    if step.relative:
        size[size == 0] = np.nan
    else:
        size = np.where(np.isnan(now), np.nan, 1.0)
    return size * step.up, size * (step.down or step.up)


def _number_moves(up: Flags, down: Flags) -> Floats:
    """Return the class of each move: 2 for up, 0 for down, 1 for neither or both."""
    return 1.0 + up.astype(np.float64) - down


def _find_first_barrier(now: Floats, high: Floats, low: Floats, step: LabelStep) -> Floats:
    up, down = _get_distances(now, step)
    upper, lower = now + up, now - down
    result = np.full(len(now), 1.0)
    undecided = np.ones(len(now), dtype=bool)
    unknown = np.isnan(up)
    for ahead in range(1, step.rows + 1):
        rows = slice(ahead, ahead + len(now))
        touches = high[rows] >= upper, low[rows] <= lower
        unknown |= np.isnan(high[rows]) | np.isnan(low[rows])
        decided = undecided & (touches[0] | touches[1])
        result[decided] = _number_moves(*touches)[decided]
        undecided &= ~decided
    result[unknown] = np.nan
    return result


InPlaceSettings = TypeVar("InPlaceSettings", UnitStep, ClipStep, OutliersStep)


class InPlaceStep(Step[InPlaceSettings]):
    """A step that replaces the values of columns and keeps the rows."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.config.columns

    @property
    def writes(self) -> tuple[str, ...]:
        return self.config.columns


class UnitConversion(InPlaceStep[UnitStep]):
    """Columns in another unit."""

    @property
    def units(self) -> dict[str, str]:
        return dict.fromkeys(self.config.columns, self.config.unit)

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        factor, offset = self.config.factor, self.config.offset
        return frame.write({name: frame.columns[name] * factor + offset for name in self.reads})

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        factor, offset = format_c_double(self.config.factor), format_c_double(self.config.offset)
        return {name: code.assign(f"{columns[name]} * {factor} + {offset}") for name in self.reads}


class Clipping(InPlaceStep[ClipStep]):
    """Columns limited to a range."""

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        low, high = self.config.low, self.config.high
        return frame.write({name: np.clip(frame.columns[name], low, high) for name in self.reads})

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        low, high = self.config.low, self.config.high
        return {name: code.limit(columns[name], low, high) for name in self.reads}


class OutlierLimits(InPlaceStep[OutliersStep]):
    """Columns limited to a range that is fitted on the training rows."""

    is_fitted = True

    def fit(self, frames: Sequence[SeriesFrame], training: Flags) -> Limits:
        limits: Limits = {}
        for name in self.reads:
            parts = []
            for frame in frames:
                positions = frame.first_position + list_rows(frame.origin)
                in_training = positions < len(training)
                in_training[in_training] = training[positions[in_training]]
                in_training[: frame.padding] = False
                values = frame.columns[name][in_training]
                parts.append(values[~np.isnan(values)])
            known = np.concatenate(parts)
            if not len(known):
                raise UserError(f'{self.where}: "{name}" has no value in the training rows')
            low, high = limits[name] = self._fit_range(known)
            if low == high:
                raise UserError(
                    f'{self.where}: more than half of the training values of "{name}" are '
                    f'{low:g}, so their spread is 0; use method = "quantile", or leave the column '
                    "out"
                )
        return limits

    def _fit_range(self, values: Floats) -> tuple[float, float]:
        config = self.config
        if config.method == "quantile":
            low, high = np.quantile(values, (config.low, config.high))
            return float(low), float(high)
        middle = float(np.median(values))
        spread = config.z * TO_DEVIATION * float(np.median(np.abs(values - middle)))
        return middle - spread, middle + spread

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        """Return the rows within the fitted ranges; before they are fitted, change nothing."""
        result = {}
        for name, (low, high) in (inputs.limits or {}).items():
            values = frame.columns[name]
            if self.config.action == "clip":
                result[name] = np.clip(values, low, high)
            else:
                result[name] = np.where((values < low) | (values > high), np.nan, values)
        return frame.write(result)

    def write_c(self, columns: Variables, code: Statements, inputs: StepInputs) -> Variables:
        limits = inputs.limits or {}
        restrict = code.limit if self.config.action == "clip" else code.drop
        return {
            name: restrict(columns[name], *limits[name]) for name in self.reads if name in limits
        }


class Padding(Step[PadStep]):
    """Rows before the first one of each series."""

    changes_rows = True

    @property
    def is_zero(self) -> bool:
        """Whether the padding rows hold zeros instead of the values of the first row."""
        return self.config.value == "zero"

    def count_rows(self, context: int) -> int:
        """Return the number of rows that are added before the first row of a new series."""
        return self.config.rows or (self.config.length or context) - 1

    def check_order(self, before: Sequence[Step[Any]]) -> None:
        if any(isinstance(step, Padding) for step in before):
            raise UserError("there is another pad before it; remove one")

    def apply(self, frame: SeriesFrame, inputs: StepInputs) -> SeriesFrame:
        """Return the rows with padding rows, at the usual step, before the first one."""
        rows = self.count_rows(inputs.context)
        if self.config.length is not None:
            rows = max(self.config.length - frame.num_rows, 0)
            frame = frame.cut(max(frame.num_rows - self.config.length, 0), frame.num_rows)
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
                name: np.concatenate([np.full(rows, 0.0 if self.is_zero else values[0]), values])
                for name, values in frame.columns.items()
            },
            origin=np.concatenate([np.full(rows, frame.origin[0]), list_rows(frame.origin)]),
            padding=rows,
        )


STEPS: dict[type[PrepareStep], type[Step[Any]]] = {
    ResampleStep: Resampling,
    FilterStep: Filtering,
    FormulaStep: FormulaColumn,
    CalendarStep: CalendarColumns,
    JoinStep: Joining,
    LabelStep: Labelling,
    UnitStep: UnitConversion,
    PadStep: Padding,
    ClipStep: Clipping,
    OutliersStep: OutlierLimits,
}


def make_step(number: int, config: PrepareStep, joined: tuple[str, ...] = ()) -> Step[Any]:
    """Return a step with its settings; `joined` are the columns that a join brings."""
    return STEPS[type(config)](number, config, joined)
