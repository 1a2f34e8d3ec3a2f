"""One row of a stream: its numbers in the order of the columns, its time and its series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.config import Data
from slipstream.data.io.columns import LARGEST, read_times
from slipstream.data.io.marks import join_times, list_numbers
from slipstream.data.io.table import DataTable, wrap_table
from slipstream.data.series import MICROSECONDS, Floats
from slipstream.errors import UserError
from slipstream.text import find_nearest

EPOCH = datetime(1970, 1, 1)
MICROSECOND = timedelta(microseconds=1)


class RowTime(NamedTuple):
    """A time as series have it."""

    value: float
    """Microseconds of a date, or the number itself"""
    is_date: bool

    def since(self, other: RowTime) -> float:
        """Return the time since another, in seconds or in the unit of the numbers."""
        return (self.value - other.value) / (MICROSECONDS if self.is_date else 1)


class ParsedRow(NamedTuple):
    """A row that is complete and of the right types."""

    values: Floats
    """In the order of the stream's columns; NaN where a value is missing"""
    static: Floats | None
    """In the order of `data.static`; None where the row has none"""
    time: RowTime | None
    series: str


class RowParser:
    """Reads rows of some columns: a mapping by name, or numbers in their order."""

    def __init__(
        self,
        data: Data,
        columns: Sequence[str],
        static: Sequence[str],
        label: str | None = None,
        codes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`label` is a column of classes among the columns, and `codes` are their numbers."""
        self.data, self.columns, self.static = data, tuple(columns), tuple(static)
        self.label, self.codes = label, codes
        self.time_column, self.ids = data.time_column, data.ids
        self.missing = frozenset(list_numbers(data.na))

    def parse(self, row: Any, *, time: Any, series: Any, static: Any) -> ParsedRow:
        """Return the row; keywords take the place of its columns."""
        is_mapping = isinstance(row, Mapping)
        if is_mapping:
            values = np.array([self._read(row, name, "data.inputs") for name in self.columns])
        else:
            values = self._read_array(row)
        fixed = None
        if self.static:
            source = row if static is None and is_mapping else static
            if isinstance(source, Mapping):
                fixed = np.array([self._read(source, name, "data.static") for name in self.static])
            elif source is not None:
                fixed = np.asarray(source, dtype=np.float64).reshape(-1)
                if len(fixed) != len(self.static):
                    raise UserError(
                        f"static has {len(fixed)} values; data.static has {len(self.static)}: "
                        f"{', '.join(self.static)}"
                    )
        if time is None and is_mapping and self.time_column is not None:
            time = self._find_time(row)
        if series is None and self.ids:
            if not is_mapping:
                raise UserError(
                    f"the rows have a series ({', '.join(self.ids)}, data.id); pass id=..."
                )
            parts = [self._find(row, name, "data.id") for name in self.ids]
            series = tuple(parts)
        moment = time
        if time is not None and not isinstance(time, RowTime):
            moment = parse_time(time, self.data.time_format)
        return ParsedRow(values, fixed, moment, "" if series is None else self.name_series(series))

    def name_series(self, series: Any) -> str:
        """Return the name that a file's series of this id has; of several columns, a tuple."""
        parts = series if isinstance(series, tuple) else (series,)
        return "/".join(map(_to_text, parts))

    def _find_time(self, row: Mapping[str, Any]) -> Any:
        """Return the time of a row; that of several columns is parsed as a file's is."""
        columns = self.data.time_columns
        if len(columns) == 1 or self.time_column in row:
            return self._find(row, str(self.time_column), "data.time")
        parts = pa.table({name: [self._find(row, name, "data.time")] for name in columns})
        table = join_times(wrap_table(parts, "the row"), columns)
        return _read_time(table, str(self.time_column), self.data.time_format)

    def _find(self, row: Mapping[str, Any], name: str, setting: str) -> Any:
        try:
            return row[name]
        except KeyError:
            names = [str(one) for one in row]
            nearest = find_nearest(name, names)
            hint = f'did you mean "{nearest}"?' if nearest else f"it has {', '.join(names[:20])}"
            raise UserError(f'the row has no column "{name}" ({setting}); {hint}') from None

    def _read(self, row: Mapping[str, Any], name: str, setting: str) -> float:
        value = self._find(row, name, setting)
        if value is None:
            return math.nan
        if name == self.label and value in self.codes:
            return float(self.codes[value])
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f'the row has {value!r} in the column "{name}" ({setting}), not a number'
            ) from None
        return self._check(number, name)

    def _check(self, number: float, name: str) -> float:
        if number in self.missing:
            return math.nan
        if abs(number) > LARGEST:
            what = "infinite" if math.isinf(number) else number
            raise UserError(f'the row has a value in the column "{name}" that is {what}')
        return number

    def _read_array(self, row: Any) -> Floats:
        try:
            values = np.array(row, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.empty(())
        if values.ndim != 1:
            raise UserError(
                "a row is a mapping of columns to values, or the numbers of "
                f"{', '.join(self.columns)} in this order; this one is {str(row)[:100]}"
            )
        if values.shape != (len(self.columns),):
            raise UserError(
                f"the row has {values.size} values of the {len(self.columns)} columns: "
                f"{', '.join(self.columns)}"
            )
        if self.missing or np.abs(values).max(initial=0) > LARGEST:
            pairs = zip(values.tolist(), self.columns, strict=True)
            values = np.array([self._check(number, name) for number, name in pairs])
        return values


def _to_text(value: Any) -> str:
    """Return a series' name as a file's column has it: whole numbers without a point."""
    if isinstance(value, (float, np.floating)) and float(value).is_integer():
        return str(int(value))
    return str(value)


def parse_time(value: Any, time_format: str | None) -> RowTime:
    """Return a time: a number, a date or a text such as "2026-01-31 12:00"."""
    if isinstance(value, (int, float, np.integer, np.floating)):
        if not math.isfinite(value):
            raise UserError(f"the time of the row is {value}")
        return RowTime(float(value), False)
    if isinstance(value, np.datetime64):
        return RowTime(int(value.astype("datetime64[us]").astype(np.int64)), True)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        plain = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return RowTime((plain - EPOCH) // MICROSECOND, True)
    if not isinstance(value, str):
        raise UserError(f"the time of the row is {value!r}; it should be a number, date or text")
    return _read_time(wrap_table(pa.table({"time": [value]}), "the row"), "time", time_format)


def _read_time(table: DataTable, name: str, time_format: str | None) -> RowTime:
    times = read_times(table, name, time_format)
    return RowTime(times[0].item(), times.dtype == np.int64)
