"""Joined tables: their files, their rows by id, and the as-of join.

Each row gets the newest row of another table that is already known. A bar that is stamped with the
start of its period is known only at the end of it. Joining by `time <=` alone would show the close
of a four-hour bar up to four hours early.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.errors import Setting, UserError
from slipstream.base.text import format_count
from slipstream.config import Data, Split
from slipstream.config.prepare import JoinStep, name_step
from slipstream.data.columns import is_numeric, read_codes, read_numbers, read_times
from slipstream.data.files import read_tables
from slipstream.data.prepare.rolling import to_span
from slipstream.data.roles import normalize_value
from slipstream.data.series import (
    MERGE_HINT,
    MICROSECONDS,
    Floats,
    Ints,
    Times,
    is_date,
    merge_repeated,
)
from slipstream.data.table import DataTable, concatenate_tables

ROUNDING = 1e-6
"""The share of a period by which a row may be late where times are plain numbers: 0.1 + 0.2 is not
exactly 0.3"""


def join_as_of(
    times: Times,
    other_times: Times,
    columns: Mapping[str, Floats],
    *,
    period: str | float | None = None,
    label: str = "end",
    delay: str | float | None = None,
    limit: str | float | None = None,
) -> dict[str, Floats]:
    """Return the other table's columns at these times, NaN before any of its rows is known.

    A row of the other table is known from the end of its period on: at its own time where `label`
    is "end", one `period` later where it is "start"; and `delay` after that. With a `limit`, it
    is used for that long only.
    """
    rows = match_rows(times, other_times, period=period, label=label, delay=delay, limit=limit)
    known = rows >= 0
    result = {}
    for name, values in columns.items():
        result[name] = values[rows] if len(values) else np.empty(len(rows))
        result[name][~known] = np.nan
    return result


def match_rows(
    times: Times,
    other_times: Times,
    *,
    period: str | float | None = None,
    label: str = "end",
    delay: str | float | None = None,
    limit: str | float | None = None,
) -> Ints:
    """Return the row of the other table that is known at each time, -1 where none is.

    Both tables are in time order, the other one without repeated times.
    """
    _check_times(times, other_times)
    known_from = other_times + _get_wait(times, period, label, delay)
    moments = times
    if times.dtype != np.int64 and period is not None:
        moments = times + ROUNDING * to_span(period, times, "period")
    rows = np.searchsorted(known_from, moments, side="right") - 1
    if limit is not None and len(other_times):
        old = moments - known_from[rows] >= to_span(limit, times, "limit")
        rows[old] = -1
    if len(rows) and (rows < 0).all():
        raise UserError(
            "the join matches nothing: no row of the other table is known at any time of this one; "
            "compare their times, and period, label, delay and limit"
        )
    return rows


def _get_wait(
    times: Times, period: str | float | None, label: str, delay: str | float | None
) -> float:
    """Return how long after its time stamp a row is known, in the unit of the times."""
    if label == "start" and period is None:
        raise UserError('label = "start" needs the period after which a row is known, as in "4h"')
    wait = to_span(period, times, "period") if label == "start" and period is not None else 0
    return wait + (to_span(delay, times, "delay") if delay else 0)


def _check_times(times: Times, other_times: Times) -> None:
    if times.dtype != other_times.dtype:
        raise UserError(
            "one table has dates and the other plain numbers as times; convert one of them"
        )
    steps = np.diff(other_times)
    if (steps < 0).any():
        raise UserError("the other table is not in time order; sort it")
    if (steps == 0).any():
        row = int(np.flatnonzero(steps == 0)[0])
        raise UserError(
            f"{format_count(int((steps == 0).sum()), 'row')} of the other table repeat the time "
            f"of the row before, first row {row + 2}; remove them, or join by id as well"
        )


class JoinedRows(NamedTuple):
    """The rows of a joined table that belong to one series."""

    times: Times
    columns: dict[str, Floats]


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
    """The names that the join gives to the columns"""

    def find_keys(self, table: DataTable) -> RowKeys:
        """Return the key of every row of the table that is joined to."""
        return _read_keys(table, self.step.ids, self.where)

    def find_first_known(self, joined: JoinedRows, times: Times) -> Any:
        """Return the time from which on a row is known, in the unit of these times."""
        unit = MICROSECONDS if is_date(times) else 1.0
        return joined.times[0] + self.step.lag_s * unit


def read_joins(data: Data, replaced: Mapping[str, Any]) -> dict[int, JoinedTable]:
    """Read the table of each join; `replaced` holds tables or paths to read instead, by the file's
    name or the prefix."""
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
        available = f"there is {known}" if known else "the model's steps join none"
        raise UserError(f'joins: there is no joined table "{sorted(unused)[0]}"; {available}')
    return joins


def list_join_names(step: JoinStep) -> list[str]:
    """Return the names by which `joins` may refer to a joined table."""
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
        "layout": "long",
        "time_format": step.time_format or data.time_format,
        **dict.fromkeys(("skip_rows", "sheet", "variable")),  # it is laid out as it is
    }
    joined_data = data.model_copy(update=settings)
    try:
        tables = read_tables(joined_data, None if is_path else source)
        table = tables[0] if len(tables) == 1 else concatenate_tables(tables)
        return _split_join(step, where, table, joined_data)
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
        steps, repeated = np.diff(times[order]), None
        if len(steps) and steps.min() <= 0:
            if steps.min() < 0 or data.duplicates == "error":
                _refuse_order(table, data, order, steps)
            remaining, repeated = merge_repeated(
                order, np.append(False, steps == 0), data.duplicates
            )
            order = order[remaining]
        joined = {name: values[order] for name, values in columns.items()}
        if repeated is not None:
            for name, values in joined.items():
                repeated.put_means(columns[name], values)
        by_id[key] = JoinedRows(times[order], joined)
    return JoinedTable(step, where, by_id, tuple(columns))


def _refuse_order(table: DataTable, data: Data, rows: Ints, steps: Times) -> None:
    first = int(np.flatnonzero(steps <= 0 if data.duplicates == "error" else steps < 0)[0])
    here = table.locate_cell(int(rows[first + 1]), str(data.time_column))
    before = table.locate_row(int(rows[first]))
    if steps[first] < 0:
        raise UserError(
            f"{here}: earlier than {before}; sort the file, set "
            + Setting({"data.unsorted": "sort"})
            + ", or name the column that tells its rows apart (id)"
        )
    raise UserError(
        f"{here}: the same time as {before}, so a row would match twice "
        f"({format_count(int((steps == 0).sum()), 'row')} repeat the time of another); set "
        + Setting({"data.duplicates": "mean"})
        + MERGE_HINT
        + ", or name the column that tells them apart (id)"
    )


def _read_keys(table: DataTable, ids: tuple[str, ...], setting: str) -> RowKeys:
    """Return the key of each row; without ids, all rows share one key."""
    codes = np.broadcast_to(np.zeros(1, dtype=np.int64), table.num_rows)
    keys: list[Key] = [()]
    for name in ids:
        more, texts = read_codes(table, name, setting)
        pairs, codes = np.unique(codes * len(texts) + more, return_inverse=True)
        values = [normalize_value(text) for text in texts]
        keys = [(*keys[pair // len(values)], values[pair % len(values)]) for pair in pairs]
    return RowKeys(codes, keys)
