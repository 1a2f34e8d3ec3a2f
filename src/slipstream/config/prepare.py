"""The steps of `[[data.prepare]]`: what happens to the rows between the file and the windows."""

import datetime
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from slipstream.base.errors import join_messages
from slipstream.base.text import find_nearest
from slipstream.config.base import Count, Fraction, Names, PositiveFloat, PositiveOrInf, Section
from slipstream.config.errors import explain, format_value

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
UNITS_S |= {"w": 7 * 86400.0}
DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
Duration = PositiveOrInf | str
"""Seconds (the time column's own unit where times are numbers), or a text such as "15min" """


def parse_duration(value: float | str, setting: str) -> float:
    """Return a duration in seconds; "15min", "4h" and "1d" are accepted beside numbers."""
    if not isinstance(value, str):
        return float(value)
    match = DURATION.fullmatch(value)
    seconds = UNITS_S.get(match[2]) if match else None
    if match is None or seconds is None or not float(match[1]) > 0:
        raise ValueError(
            f"{setting} is {format_value(value)}; it should be a number of seconds or a text such "
            f'as "15min" ({", ".join(UNITS_S)})'
        )
    return float(match[1]) * seconds


BAR = ("open", "high", "low", "close")


class ResampleStep(Section):
    """Resample to one row per interval `every`, between gaps."""

    step: Literal["resample"] = "resample"
    every: Duration
    """The new time step: seconds, or a text such as `"15min"`, `"4h"`."""
    method: Literal["mean", "last", "linear", "nearest", "ohlc"] = "mean"
    """`"mean"` of the rows after the previous new row, `"last"` known value, `"linear"` between
    neighbours or the `"nearest"` row; the latter two look ahead. `"ohlc"` makes bars of bars or of
    ticks; other columns then have the last known value."""
    price: str | None = None
    """With `"ohlc"`: the column of prices, where rows are ticks. Default: rows are bars."""
    open: str | None = None
    """With `"ohlc"`: the column of opening prices (default `"open"`); of bars it is read and
    replaced, of ticks it is new. So are the next three."""
    high: str | None = None
    """With `"ohlc"`: the column of highest prices (default `"high"`)."""
    low: str | None = None
    """With `"ohlc"`: the column of lowest prices (default `"low"`)."""
    close: str | None = None
    """With `"ohlc"`: the column of closing prices (default `"close"`)."""
    volume: str | Names | None = None
    """With `"ohlc"`: columns that are added up, such as volumes; 0 in a bar without a row."""
    label: Literal["end", "start"] = "end"
    """With `"ohlc"`: whether time stamps, of the rows and of the new bars, are the `"end"` of the
    period that a bar covers or its `"start"`."""
    limit: Duration | None = None
    """Gaps in time longer than this stay gaps. Default: three times `every`; set it if rows are
    usually further apart."""
    lookahead: bool = False
    """Accept that the step looks ahead."""

    @model_validator(mode="after")
    def _check_durations(self) -> Self:
        if not math.isfinite(parse_duration(self.every, "every")):
            raise ValueError("every is inf; it should be a finite number")
        if self.limit is not None:
            parse_duration(self.limit, "limit")
        return self

    @model_validator(mode="after")
    def _check_bars(self) -> Self:
        if self.method != "ohlc":
            for name in ("price", *BAR, "volume"):
                if getattr(self, name) is not None:
                    raise ValueError(f'{name} applies only with method = "ohlc"; remove it')
            if self.label == "start":
                raise ValueError('label = "start" applies only with method = "ohlc"; remove it')
        names = [*self.bars, *self.volumes, *([] if self.price is None else [self.price])]
        if len(set(names)) < len(names):
            raise ValueError("a column is named twice among price, open, high, low, close, volume")
        return self

    @property
    def bars(self) -> tuple[str, str, str, str]:
        """The columns of a bar: open, high, low and close."""
        own = (self.open, self.high, self.low, self.close)
        opens, highs, lows, closes = (
            name or default for name, default in zip(own, BAR, strict=True)
        )
        return opens, highs, lows, closes

    @property
    def volumes(self) -> tuple[str, ...]:
        """The columns that are added up."""
        return _to_names(self.volume)


MAX_FILTER_ROWS = {
    "ema": 1_000_000,
    "moving_average": 1_000_000,
    "median": 100_001,
    "savgol": 1001,
}
MAX_FILTER_ORDER = {"butterworth": 10, "savgol": 5}
DEFAULT_FILTER_ORDER = 2


def check_filter(
    kind: str,
    rows: int | None,
    cutoff_hz: float | None,
    order: int | None,
    max_rows: Mapping[str, int],
) -> None:
    """Refuse settings that make no filter, of columns or of predictions.

    `max_rows` is the largest `rows` of each kind that takes them. A Butterworth filter takes a
    cut-off in Hz, and where it is listed there also `rows`, the period of the cut-off.
    """
    takes = ["rows"] if kind in max_rows else []
    takes += ["cutoff_hz"] if kind == "butterworth" else []
    lengths = {"rows": rows, "cutoff_hz": cutoff_hz}
    given = [name for name, value in lengths.items() if value is not None]
    for name in given:
        if name not in takes:
            raise ValueError(f'kind = "{kind}" takes {takes[0]}, not {name}; remove it')
    if len(given) != 1:
        needed = takes[0] if len(takes) == 1 else f"either {' or '.join(takes)}"
        raise ValueError(f'kind = "{kind}" needs {needed}')
    if order is not None and kind not in MAX_FILTER_ORDER:
        raise ValueError(f'order does not apply to kind = "{kind}"; remove it')
    degree = order or DEFAULT_FILTER_ORDER
    if degree > MAX_FILTER_ORDER.get(kind, degree):
        raise ValueError(
            f'order is {order}; kind = "{kind}" takes at most {MAX_FILTER_ORDER[kind]}'
        )
    # a polynomial needs more rows than its degree; half the sampling rate is a period of two rows
    fewest = {"savgol": degree + 1, "butterworth": 3}.get(kind, 1)
    if rows is not None and not fewest <= rows <= max_rows[kind]:
        raise ValueError(
            f'rows is {rows}; kind = "{kind}" takes from {fewest} to {max_rows[kind]:,}'
        )


class FilterStep(Section):
    """Smooth columns over past rows."""

    step: Literal["filter"] = "filter"
    kind: Literal["ema", "moving_average", "median", "butterworth", "savgol"]
    """Exponential or moving average, moving median, Butterworth low-pass, Savitzky-Golay."""
    columns: Annotated[Names, Field(min_length=1)]
    """The columns to filter."""
    rows: Count | None = None
    """Length in rows: the window, or the span of an exponential average."""
    cutoff_hz: PositiveFloat | None = None
    """Cut-off frequency of a Butterworth filter, below half of the sampling rate."""
    order: Count | None = None
    """Order of a Butterworth filter, or degree of the Savitzky-Golay polynomial (default 2)."""
    centered: bool = False
    """Use as many rows after as before each row; needs `lookahead`."""
    into: str | Names | None = None
    """Names of new columns; by default the columns are replaced."""
    lookahead: bool = False
    """Accept that the step looks ahead."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that are written, one for each of `columns`."""
        return self.columns if self.into is None else _to_names(self.into)

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        check_filter(self.kind, self.rows, self.cutoff_hz, self.order, MAX_FILTER_ROWS)
        if self.centered and self.kind in ("ema", "butterworth"):
            raise ValueError(f'kind = "{self.kind}" cannot be centered; remove it')
        if self.centered and self.rows is not None and self.rows % 2 == 0:
            raise ValueError(f"rows is {self.rows}; a centered filter needs an odd number of rows")
        _check_outputs(self.columns, self.into)
        return self


class FormulaStep(Section):
    """Compute a new column from an expression over columns."""

    step: Literal["formula"] = "formula"
    name: Annotated[str, Field(min_length=1)]
    """Name of the new column."""
    value: Annotated[str, Field(min_length=1)]
    """The expression, as in `"voltage * lag(current, 1)"`; put names that are not identifiers in
    backticks."""
    lookahead: bool = False
    """Accept that the step looks ahead, as `lag(x, -1)` does."""


class CalendarStep(Section):
    """Add columns with the position of a row in the day, week and year."""

    step: Literal["calendar"] = "calendar"
    features: Annotated[
        tuple[Literal["hour", "weekday", "day_of_year", "month"], ...], Field(strict=False)
    ] = ()
    """Each becomes two columns, its sine and cosine: `hour_sin`, `hour_cos`."""
    holidays: Names = ()
    """Dates such as `"2026-12-25"`; the column `holiday` is 1 on these days and 0 on others."""
    country: str | None = None
    """The country whose public holidays the column `holiday` marks as well, as in `"DE"`, or with
    its state or region `"DE-BY"`; needs `pip install "slipstream[holidays]"`."""
    zone: str | None = None
    """The time zone of the calendar, as in `"Europe/Berlin"`, where the times are UTC. Default: the
    times as they are written."""

    @model_validator(mode="before")
    @classmethod
    def _accept_dates(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or not isinstance(
            settings.get("holidays"), (list, tuple)
        ):
            return settings
        dates = [
            str(day) if isinstance(day, datetime.date) else day for day in settings["holidays"]
        ]
        return settings | {"holidays": dates}

    @model_validator(mode="after")
    def _check_dates(self) -> Self:
        if not self.features and not self.holidays and self.country is None:
            raise ValueError('features is missing, as in features = ["hour", "weekday"]')
        for date in self.holidays:
            try:
                datetime.date.fromisoformat(date)
            except ValueError:
                raise ValueError(
                    f'holidays has {format_value(date)}; write dates as "2026-12-25"'
                ) from None
        return self


class JoinStep(Section):
    """Add columns of another table, with the values that were known at each row's time."""

    step: Literal["join"] = "join"
    path: str
    """The file to join, of any format that `data.path` takes."""
    time: str | None = None
    """Its time column; by default the name of `data.time`."""
    time_format: str | None = None
    """Format of text in its time column; by default `data.time_format`."""
    id: str | Names | None = None
    """Columns that must be equal in both tables, beside the time."""
    columns: Names | None = None
    """The columns to add. Default: every numeric column."""
    prefix: str = ""
    """Prefix of the names of the added columns."""
    period: Duration | None = None
    """How much time a row of the file covers; needed with `label = "start"`."""
    label: Literal["start", "end"] = "start"
    """Meaning of a row's time stamp: the `"start"` of its period, so that the row is known `period`
    later, or the `"end"`, when the row is known."""
    delay: Duration | None = None
    """Additional time until a row is known."""

    @property
    def ids(self) -> tuple[str, ...]:
        return _to_names(self.id)

    @property
    def lag_s(self) -> float:
        """Seconds from a row's time stamp to the time from which on it is known."""
        period = parse_duration(self.period or 0.0, "period") if self.label == "start" else 0.0
        return period + parse_duration(self.delay or 0.0, "delay")

    @model_validator(mode="after")
    def _check_period(self) -> Self:
        if self.label == "start" and self.period is None:
            raise ValueError(
                "period is missing: a row is known at the end of its period; set it, as in "
                'period = "4h", or set label = "end" where the time stamp is when it was known'
            )
        if not math.isfinite(self.lag_s):
            raise ValueError("period and delay must be finite")
        return self


class LabelStep(Section):
    """Derive classes from later rows: up, flat or down. The column can only be a target."""

    step: Literal["label"] = "label"
    name: Annotated[str, Field(min_length=1)] = "label"
    """Name of the new column, which `data.targets` has to name."""
    column: str
    """The column whose moves are labelled."""
    kind: Literal["move", "barrier", "sign"] = "move"
    """`"move"`: the change over the next `rows` rows, beyond `up` or `down`. `"barrier"`: which of
    the two is reached first within these rows. `"sign"`: whether the value is higher or lower after
    `rows` rows."""
    rows: Count
    """How many rows ahead."""
    up: PositiveFloat | None = None
    """Smallest rise that counts as up: 0.006 for 0.6 %."""
    down: PositiveFloat | None = None
    """Smallest fall that counts as down. Default: as `up`."""
    relative: bool = True
    """Whether `up` and `down` are fractions of the column's value instead of differences."""
    high: str | None = None
    """With `"barrier"`: the column that reaches the upper barrier, such as a bar's high."""
    low: str | None = None
    """With `"barrier"`: the column that reaches the lower barrier, such as a bar's low."""

    @property
    def classes(self) -> tuple[str, ...]:
        return ("down", "up") if self.kind == "sign" else ("down", "flat", "up")

    @property
    def sources(self) -> tuple[str, ...]:
        """The columns that the label is computed from."""
        return tuple(name for name in (self.column, self.high, self.low) if name is not None)

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if self.kind != "sign" and self.up is None:
            raise ValueError(f'kind = "{self.kind}" needs up, as in up = 0.006')
        names = ["high", "low"] if self.kind == "move" else []
        names = ["up", "down", "high", "low"] if self.kind == "sign" else names
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f'{name} does not apply to kind = "{self.kind}"; remove it')
        return self


class UnitStep(Section):
    """Convert columns to another unit: value * factor + offset."""

    step: Literal["unit"] = "unit"
    columns: Annotated[Names, Field(min_length=1)]
    """The columns to convert, in place."""
    factor: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor by which values are multiplied."""
    offset: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Offset that is added to the product."""
    unit: Annotated[str, Field(min_length=1)]
    """The new unit's name."""

    @model_validator(mode="after")
    def _check_factor(self) -> Self:
        if not self.factor:
            raise ValueError("factor is 0, which makes every value the same; correct it")
        return self


class PadStep(Section):
    """Add rows before the first row of each series, as context only: they are never scored."""

    step: Literal["pad"] = "pad"
    rows: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """How many rows. Default: `data.context` - 1, so that every row of a series has a context."""
    length: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Instead of `rows`: the rows of each series afterwards; of longer ones, the last rows stay.
    `data.context = "all"` sets it."""
    value: Literal["first", "zero"] = "first"
    """Values of the added rows: those of the first row, or zeros."""

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.rows is not None and self.length is not None:
            raise ValueError("rows and length both say how many rows to add; remove one")
        return self


class ClipStep(Section):
    """Limit columns to a range."""

    step: Literal["clip"] = "clip"
    columns: Annotated[Names, Field(min_length=1)]
    """The columns to limit, in place."""
    low: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The lowest value."""
    high: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The highest value."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("low and high are both missing; set one of them")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}")
        return self


class OutliersStep(Section):
    """Limit columns to a range that is fitted on training rows and stored with the model."""

    step: Literal["outliers"] = "outliers"
    columns: Annotated[Names, Field(min_length=1)]
    """The columns to limit, in place."""
    method: Literal["quantile", "robust_z"] = "robust_z"
    """`"quantile"`: from one quantile to another. `"robust_z"`: `z` deviations around the median,
    where one deviation is 1.4826 times the median distance from the median."""
    low: Fraction = 0.001
    """The lower quantile."""
    high: Fraction = 0.999
    """The upper quantile."""
    z: PositiveOrInf = 6.0
    """Deviations from the median, for `"robust_z"`."""
    action: Literal["clip", "missing"] = "clip"
    """Treatment of values outside: set to the limit, or to missing (`data.missing`)."""

    @model_validator(mode="after")
    def _check_quantiles(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low:g} is not below high = {self.high:g}")
        return self


PrepareStep = (
    ResampleStep
    | FilterStep
    | FormulaStep
    | CalendarStep
    | JoinStep
    | LabelStep
    | UnitStep
    | PadStep
    | ClipStep
    | OutliersStep
)
STEPS: dict[str, type[Section]] = {
    section.model_fields["step"].default: section for section in get_args(PrepareStep)
}


def name_step(number: int, step: PrepareStep | str) -> str:
    """Name a step as messages do; steps are counted from 1."""
    kind = step if isinstance(step, str) else step.step
    return f"data.prepare, step {number} ({kind})"


def parse_steps(entries: Any) -> Any:
    """Return the steps of a list of tables; the message of a ValueError names the step."""
    if isinstance(entries, Mapping) or not isinstance(entries, Iterable):
        raise ValueError("data.prepare is a list of steps; write each below [[data.prepare]]")
    return tuple(_parse_step(number, entry) for number, entry in enumerate(entries, start=1))


def _parse_step(number: int, entry: Any) -> Any:
    if isinstance(entry, get_args(PrepareStep)):
        return entry
    where = f"data.prepare, step {number}"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} is {format_value(entry)}; it should be a table")
    kind = entry.get("step")
    if kind not in STEPS:
        found = 'has no "step"' if kind is None else f"is {format_value(kind)}, which is no step"
        nearest = find_nearest(kind, STEPS) if isinstance(kind, str) else None
        hint = f'did you mean "{nearest}"?' if nearest else f"there are {', '.join(STEPS)}"
        raise ValueError(f"{where} {found}; {hint}")
    try:
        return STEPS[kind].model_validate(dict(entry))
    except ValidationError as error:
        problems = join_messages(problem.message for problem in explain(error, STEPS[kind]))
        raise ValueError(f"{name_step(number, kind)}: " + problems) from None


def _to_names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value or ()


def _check_outputs(columns: tuple[str, ...], into: str | tuple[str, ...] | None) -> None:
    for names in (columns, _to_names(into)):
        if len(set(names)) < len(names):
            raise ValueError("a column is named twice")
    if into is not None and len(_to_names(into)) != len(columns):
        raise ValueError(
            f"columns has {len(columns)} names and into {len(_to_names(into))}; give one for each"
        )
