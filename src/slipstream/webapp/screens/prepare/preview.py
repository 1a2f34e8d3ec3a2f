"""The rows of a data file before and after steps of `data.prepare`, for a plot.

Steps run as in training, on a range of rows that the page states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.config import SIMULATED, Config, Data
from slipstream.config.prepare import JoinStep, OutliersStep, PrepareStep
from slipstream.data.io import files
from slipstream.data.io.columns import is_numeric, read_numbers
from slipstream.data.io.table import DataTable, MemoryReader
from slipstream.data.prepare.chain.plan import plan_steps
from slipstream.data.prepare.chain.tables import PrepareChain
from slipstream.data.series import MICROSECONDS, Floats, Times, is_date, iter_ordered, list_rows
from slipstream.errors import UserError
from slipstream.reporting.plots.predictions import thin

USUAL_ROWS, MOST_ROWS = 20_000, 200_000
"""Rows that a preview reads, and the most that it may be asked for"""
MOST_POINTS = 2_000
MOST_SERIES = 500
MOST_BYTES = 64 << 20
"""Size of a file that a request reads as a whole"""
LAZY = ("parquet", "arrow")
"""Formats of which only some rows are read"""


class PreviewRange(NamedTuple):
    """What to look at: rows of one file, one series in them, one column."""

    file: str = ""
    begin: int = 0
    num_rows: int = USUAL_ROWS
    series: str = ""
    column: str = ""


Picture = dict[str, Any]
"""A column of a series, ready to be drawn: x, y, classes, num_rows, num_missing"""


def parse_range(value: Any) -> PreviewRange:
    """Return the range of a request."""
    value = value if isinstance(value, dict) else {}
    texts = {key: value.get(key) or "" for key in ("file", "series", "column")}
    numbers = {"begin": value.get("begin") or 0, "count": value.get("count") or USUAL_ROWS}
    if not all(isinstance(text, str) for text in texts.values()):
        raise UserError("file, series and column: expected texts")
    if not all(isinstance(number, int) and number >= 0 for number in numbers.values()):
        raise UserError("begin and count: expected whole numbers")
    if numbers["count"] > MOST_ROWS:
        raise UserError(f"a preview reads at most {MOST_ROWS:,} rows")
    return PreviewRange(
        texts["file"], numbers["begin"], numbers["count"], texts["series"], texts["column"]
    )


def preview_steps(config: Config, number: int, wanted: PreviewRange) -> dict[str, Any]:
    """Return a column before and after a step, counted from 1; 0 shows the rows of the file."""
    steps = config.data.prepare
    if not 0 <= number <= len(steps):
        raise UserError(f"there is no step {number}")
    names, table = read_some(config.data, wanted)
    read_type = {name: is_numeric(table, name) for name in table.column_names}
    before, notes = _run(config.data, steps[: max(number - 1, 0)], table)
    after, more = before, notes
    if number:
        after, more = _run(config.data, steps[:number], table)
        written = plan_steps(config.data.model_copy(update={"prepare": steps[:number]})).steps[-1]
    every = [name for name in after.column_names if read_type.get(name, True)]
    if not every:
        raise UserError(f"{table.files[0].name}: has no column of numbers to draw")
    series = [one.name for one in iter_ordered(after, _strip(config.data))]
    column = wanted.column if wanted.column in every else ""
    if not column and number:
        new = written.writes or _list_new(after, before)
        column = next((name for name in (*new, *written.reads) if name in every), "")
    column = column or next((n for n in config.data.targets or every if n in every), every[0])
    name = wanted.series if wanted.series in series else series[0]
    first, last = wanted.begin, wanted.begin + table.num_rows
    return {
        "file": table.files[0].name,
        "files": names,
        "range": [first, last],
        "series": series[:MOST_SERIES],
        "shown": name,
        "columns": every,
        "column": column,
        "time": config.data.time_column,
        "dates": _has_dates(after, config.data),
        "before": draw(before, config.data, name, column, first),
        "after": draw(after, config.data, name, column, first) if number else None,
        "notes": more,
    }


def _list_new(after: DataTable, before: DataTable) -> list[str]:
    return [name for name in after.column_names if name not in before.column_set]


def _strip(data: Data) -> Data:
    """Return the settings of rows that are selected already."""
    return data.model_copy(update={"where": {}})


def _has_dates(table: DataTable, data: Data) -> bool:
    series = next(iter_ordered(table, _strip(data)))
    return series.time is not None and is_date(series.time)


def read_some(data: Data, wanted: PreviewRange) -> tuple[list[str], DataTable]:
    """Return the names of a config's files, and the wanted rows of one of them."""
    if data.paths[0].startswith(SIMULATED):
        (table,) = files.read_tables(data, None)
        return [table.name], table.slice_rows(*_limit(wanted, table.num_rows))
    folder, every = files.expand_path(Path(data.paths[0]))
    names = [file.relative_to(folder).as_posix() for file in every]
    file = every[names.index(wanted.file)] if wanted.file in names else every[0]
    if not is_sampled(file, data):
        refuse_large([file])
    table = files.read_rows(data, file, wanted.begin, wanted.begin + wanted.num_rows)
    return names[:MOST_SERIES], table


def _limit(wanted: PreviewRange, num_rows: int) -> tuple[int, int]:
    begin = min(wanted.begin, num_rows - 1)
    return begin, min(begin + wanted.num_rows, num_rows)


def is_sampled(file: Path, data: Data) -> bool:
    """Whether some rows of a file can be read without all the others."""
    reader = files.READERS.get(file.suffix.lower())
    return reader in LAZY or (reader == "csv" and data.encoding is None)


def refuse_large(every: Sequence[Path]) -> None:
    """Refuse to read files as a whole that are too large for a request."""
    size = sum(file.stat().st_size for file in every if file.exists())
    if size > MOST_BYTES:
        raise UserError(
            f"{every[0].name}: has {size / 1e6:,.0f} MB, of which all would have to be read; this "
            f"page reads up to {MOST_BYTES / 1e6:,.0f} MB"
        )


def refuse_large_joins(steps: Sequence[PrepareStep]) -> None:
    """Refuse joins of files that are too large for a request."""
    for step in steps:
        if isinstance(step, JoinStep):
            refuse_large(files.expand_path(Path(step.path))[1])


def _run(data: Data, steps: Sequence[PrepareStep], table: DataTable) -> tuple[DataTable, list[str]]:
    """Return the table after some steps, with all columns, and notes."""
    if isinstance(table.reader, MemoryReader):  # steps take columns out of it
        table = replace(table, reader=MemoryReader(dict(table.reader.columns)))
    if not steps:
        return _select(table, data), []
    refuse_large_joins(steps)
    update = {"prepare": tuple(steps), "inputs": None, "future": ()}
    chain = PrepareChain(data.model_copy(update=update))
    notes = []
    if chain.is_fitted:
        prepared = chain.apply([table])
    else:
        prepared = chain.fit([table], np.ones(table.num_rows, dtype=bool))
        notes = [
            f"step {number}: {name} is limited to {low:.6g} to {high:.6g}, as fitted on these "
            "rows; training fits the range on the training rows"
            for number, limits in prepared.limits.items()
            for name, (low, high) in limits.items()
            if isinstance(steps[int(number) - 1], OutliersStep)
        ]
    return prepared.tables[0], [*prepared.notes, *prepared.left_out, *notes]


def _select(table: DataTable, data: Data) -> DataTable:
    """Return the rows that `data.where` selects; without steps, the table has all of them."""
    if not data.where:
        return table
    from slipstream.data.prepare.chain.frames import PreparedReader
    from slipstream.data.roles import select_rows

    rows = list_rows(select_rows(table, data))
    reader = PreparedReader({}, table, rows)
    return replace(table, reader=reader, num_rows=len(rows), first_row=0, source_rows=rows)


def draw(table: DataTable, data: Data, series: str, column: str, first: int) -> Picture | None:
    """Return a column of one series; None where the table has no such column."""
    if column not in table.column_set:
        return None
    mine = next((one for one in iter_ordered(table, _strip(data)) if one.name == series), None)
    if mine is None:
        return None
    rows, classes = list_rows(mine.rows), list[str]()
    if is_numeric(table, column):
        values = read_numbers(table, column, column)[rows]
    else:
        values, classes = _read_classes(table, column)
        values = values[rows]
    x = number_rows(table, rows) + first if mine.time is None else to_axis(mine.time)
    return picture(x, values, classes)


def _read_classes(table: DataTable, column: str) -> tuple[Floats, list[str]]:
    """Return a column of labels as numbers, NaN where there is none, and the classes' names."""
    labels = table.read_column(column).combine_chunks()
    numbers = labels.indices.cast("float64").fill_null(np.nan)
    return np.asarray(numbers.to_numpy(zero_copy_only=False)), labels.dictionary.to_pylist()


def number_rows(table: DataTable, rows: Any) -> Any:
    """Return the numbers of rows in the file; padded ones come before the first."""
    numbers = rows if table.source_rows is None else table.source_rows[rows]
    if table.padded is not None:
        padded = int(table.padded[rows].sum())
        numbers = numbers.copy()
        numbers[:padded] -= np.arange(padded, 0, -1)
    return numbers


def to_axis(x: Times) -> Any:
    """Return times in seconds, or numbers as they are."""
    return x / MICROSECONDS if is_date(x) else x


def picture(x: Any, values: Any, classes: Sequence[str] = ()) -> Picture:
    """Return the points to draw, few enough, with the extremes."""
    at = thin([values], MOST_POINTS)
    return {
        "x": np.asarray(x, dtype=np.float64)[at].tolist(),
        "y": np.asarray(values, dtype=np.float64)[at].tolist(),
        "classes": list(classes),
        "num_rows": len(values),
        "num_missing": int(np.isnan(values).sum()),
    }
