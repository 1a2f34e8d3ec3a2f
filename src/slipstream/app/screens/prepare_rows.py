"""The rows of a data file before and after steps of `data.prepare`, for a plot.

Steps run as in training, on a range of rows that the page states.
"""

from __future__ import annotations

import bisect
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slipstream.base.errors import UserError
from slipstream.config import SIMULATED, Config, Data, Split
from slipstream.config.prepare import JoinStep, PrepareStep
from slipstream.data import files, splits
from slipstream.data.columns import is_numeric, read_codes, read_numbers
from slipstream.data.formats.reader import ReadOptions
from slipstream.data.loading import (
    LoadedSeries,
    assign_predicted_rows,
    find_sets,
    load_series,
    read_source,
)
from slipstream.data.prepare.chain import PrepareChain, Source, find_source, plan_steps
from slipstream.data.prepare.steps import make_step
from slipstream.data.prepared_rows import load_prepared_rows, write_prepared_rows
from slipstream.data.scaler import fit_scaler
from slipstream.data.series import (
    MICROSECONDS,
    Floats,
    SeriesIndex,
    Times,
    is_date,
    iter_ordered,
    list_rows,
    refuse_short,
)
from slipstream.data.splits import SETS, FoldWindows, find_fold_windows
from slipstream.data.table import WRITTEN, DataTable, MemoryReader
from slipstream.reporting.charts import thin
from slipstream.tools.inspection import EVERY_SHEET, open_tables

USUAL_ROWS, MAX_ROWS = 20_000, 200_000
"""Rows that a preview reads, and the largest number that a request may ask for"""
MAX_POINTS = 2_000
MAX_SERIES = 500
MAX_BYTES = 64 << 20
"""Size of a file that a request reads as a whole"""


class PreviewRange(NamedTuple):
    """The rows of one file, and one series and column in them."""

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
    if numbers["count"] > MAX_ROWS:
        raise UserError(f"a preview reads at most {MAX_ROWS:,} rows")
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
    drawable = [name for name in after.column_names if read_type.get(name, True)]
    if not drawable:
        raise UserError(f"{table.files[0].name}: has no column of numbers to draw")
    series = [series_rows.name for series_rows in iter_ordered(after, _strip(config.data))]
    column = wanted.column if wanted.column in drawable else ""
    if not column and number:
        new = written.writes or _list_new(after, before)
        column = next((name for name in (*new, *written.reads) if name in drawable), "")
    column = column or next(
        (n for n in config.data.targets or drawable if n in drawable), drawable[0]
    )
    name = wanted.series if wanted.series in series else series[0]
    first, last = wanted.begin, wanted.begin + table.num_rows
    return {
        "file": table.files[0].name,
        "files": names,
        "range": [first, last],
        "series": series[:MAX_SERIES],
        "shown": name,
        "columns": drawable,
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
    folder, paths = files.expand_path(Path(data.paths[0]))
    names = [file.relative_to(folder).as_posix() for file in paths]
    file = paths[names.index(wanted.file)] if wanted.file in names else paths[0]
    if not files.can_sample(file, data):
        refuse_large([file])
    table = files.read_rows(data, file, wanted.begin, wanted.begin + wanted.num_rows)
    return names[:MAX_SERIES], table


def _limit(wanted: PreviewRange, num_rows: int) -> tuple[int, int]:
    begin = min(wanted.begin, num_rows - 1)
    return begin, min(begin + wanted.num_rows, num_rows)


def refuse_large(paths: Sequence[Path]) -> None:
    """Refuse to read files as a whole that are too large for a request."""
    size = sum(file.stat().st_size for file in paths if file.exists())
    if size > MAX_BYTES:
        raise UserError(
            f"{paths[0].name}: has {size / 1e6:,.0f} MB, of which all would have to be read; this "
            f"page reads up to {MAX_BYTES / 1e6:,.0f} MB"
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
        ]
    return prepared.tables[0], [*prepared.notes, *prepared.left_out, *notes]


def _select(table: DataTable, data: Data) -> DataTable:
    """Return the rows that `data.where` selects; a table without steps still has all rows."""
    if not data.where:
        return table
    from slipstream.data.prepare.frames import PreparedReader
    from slipstream.data.roles import select_rows

    rows = list_rows(select_rows(table, data))
    reader = PreparedReader({}, table, rows)
    return replace(table, reader=reader, num_rows=len(rows), first_row=0, source_rows=rows)


def draw(table: DataTable, data: Data, series: str, column: str, first: int) -> Picture | None:
    """Return a column of one series; None where the table has no such column."""
    if column not in table.column_set:
        return None
    found = next(
        (candidate for candidate in iter_ordered(table, _strip(data)) if candidate.name == series),
        None,
    )
    if found is None:
        return None
    rows, classes = list_rows(found.rows), list[str]()
    if is_numeric(table, column):
        values = read_numbers(table, column, column)[rows]
    else:
        values, classes = _read_classes(table, column)
        values = values[rows]
    x = number_rows(table, rows) + first if found.time is None else to_axis(found.time)
    return picture(x, values, classes)


def _read_classes(table: DataTable, column: str) -> tuple[Floats, list[str]]:
    """Return a column of labels as numbers, NaN for missing ones, and the classes' names."""
    labels = table.read_column(column).combine_chunks()
    numbers = labels.indices.cast("float64").fill_null(np.nan)
    return np.asarray(numbers.to_numpy(zero_copy_only=False)), labels.dictionary.to_pylist()


def number_rows(table: DataTable, rows: Any) -> Any:
    """Return the numbers of rows in the file; padded rows come before the first."""
    numbers = rows if table.source_rows is None else table.source_rows[rows]
    if table.padded is not None:
        padded = int(table.padded[rows].sum())
        numbers = numbers.copy()
        numbers[:padded] -= np.arange(padded, 0, -1)
    return numbers


def to_axis(x: Times) -> Any:
    """Return times in seconds, or unchanged numbers."""
    return x / MICROSECONDS if is_date(x) else x


def picture(x: Any, values: Any, classes: Sequence[str] = ()) -> Picture:
    """Return the points to draw, limited in number, with the extremes."""
    retained = thin([values], MAX_POINTS)
    return {
        "x": np.asarray(x, dtype=np.float64)[retained].tolist(),
        "y": np.asarray(values, dtype=np.float64)[retained].tolist(),
        "classes": list(classes),
        "num_rows": len(values),
        "num_missing": int(np.isnan(values).sum()),
    }


DEFAULT = Split(train=0.7, val=0.1, test=0.2)
MAX_SPANS = 500
MAX_GROUPS = 200


class Sets(NamedTuple):
    """One split, or one fold: rows and windows of each set."""

    label: str
    rows: dict[str, int]
    windows: dict[str, int]
    left_out: dict[str, int]
    spans: list[tuple[int, int, str]]
    """Runs of rows of the drawn series: the first row, the row after the last, the set"""


def describe_split(config: Config, series: str) -> dict[str, Any]:
    """Return the sets of a config, over all rows, with the target of one series to draw."""
    source = _read_few(config)
    loaded = load_series(config, source)
    raw, index = loaded.raw, loaded.raw.index
    names = index.series_names
    position = names.index(series) if series in names else 0
    begin, end = int(index.offsets[position]), int(index.offsets[position + 1])
    for name in raw.column_names:  # a missing value is refused when it is read
        raw.read_column(name)
    sets = find_sets(loaded)
    target = loaded.signature.targets[0]
    values = raw.read_column(target)[begin:end]
    x = np.arange(end - begin) if raw.time is None else to_axis(raw.time[begin:end])
    folds = [_count(loaded, fold, begin, end) for fold in sets.folds]
    folds = [fold._replace(spans=_place(fold.spans, x)) for fold in folds]
    return {
        "series": list(names[:MAX_SERIES]),
        "num_series": len(names),
        "shown": names[position],
        "rows": index.num_rows,
        "target": target,
        "classes": list(loaded.signature.classes),
        "dates": index.has_dates,
        "time": loaded.data.time_column,
        "plot": picture(x, np.where(values < 0, np.nan, values))
        if loaded.signature.classes
        else picture(x, values),
        "folds": [fold._asdict() for fold in folds],
        "gaps": len(index.breaks) - len(names),
        "notes": [*source.notes, *sets.notes, *raw.notes][:20],
    }


def _place(spans: Sequence[tuple[int, int, str]], x: Any) -> list[Any]:
    """Return spans on the axis; a set reaches up to the start of the next row."""
    last = len(x) - 1
    return [(float(x[a]), float(x[min(b, last)]), name) for a, b, name in spans[:MAX_SPANS]]


def _read_few(config: Config) -> Source:
    """Read the source of a config, if its rows are few enough for a request."""
    _refuse_many(config.data)
    return read_source(config, in_memory=True)


def _refuse_many(data: Data) -> None:
    """Refuse data whose files are too large for a request."""
    if not data.paths[0].startswith(SIMULATED):
        refuse_large([file for path in data.paths for file in files.expand_path(Path(path))[1]])
    refuse_large_joins(data.prepare)


def format_rows(config: Config, ending: str) -> bytes:
    """Return the rows that training sees, with their sets, as a file with this ending."""
    if ending not in WRITTEN:
        raise UserError(f"ending: expected one of {', '.join(WRITTEN)}")
    _refuse_many(config.data)
    rows = load_prepared_rows(config, in_memory=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows{ending}"
        write_prepared_rows(rows, path)
        return path.read_bytes()


def _count(loaded: LoadedSeries, fold: FoldWindows, begin: int, end: int) -> Sets:
    """Count rows and windows of each set, and find the spans of sets in rows `begin` to `end`."""
    assignment = assign_predicted_rows(loaded, fold)
    rows = {name: assignment.count_rows(number) for number, name in enumerate(SETS)}
    windows = {name: len(starts) for name, starts in fold.starts.items()}
    spans = []
    for first, past, number in zip(
        assignment.begins.tolist(), assignment.ends.tolist(), assignment.sets.tolist(), strict=True
    ):
        low, high = max(first, begin) - begin, min(past, end) - begin
        if low < high and number < len(SETS):
            spans.append((low, high, SETS[number]))
    return Sets(fold.label, rows, windows, fold.left_out, spans)


def list_groups(config: Config, column: str) -> list[str]:
    """Return the values of a column that may assign rows to sets, or the series' names."""
    data = config.data.model_copy(update={"split": DEFAULT})
    if not data.paths[0].startswith(SIMULATED):
        refuse_large([file for path in data.paths for file in files.expand_path(Path(path))[1]])
    tables = files.read_tables(data, None)
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(_list_values(table, data, column))
        if len(names) > MAX_GROUPS:
            raise UserError(f'"{column}" has more than {MAX_GROUPS} values')
    return list(names)


def _list_values(table: DataTable, data: Data, column: str) -> list[str]:
    if column == "series" and column not in table.column_set:
        from slipstream.data.roles import identify_series

        return identify_series(table, data)[1]
    return read_codes(table, column, "data.split.by")[1]


def count_rows_by_date(config: Config, borders: Sequence[str]) -> list[int]:
    """Return the rows of each set between dates: before the first border, up to the second, and up
    to the third or the end. All series must have equally many."""
    data = config.data.model_copy(update={"split": DEFAULT})
    config = config.model_copy(update={"data": data})
    raw = load_series(config, _read_few(config)).raw
    if raw.time is None:
        raise UserError("dates need the time of each row; choose the time column first")
    dates = is_date(raw.time)
    marks = [_parse_time(text, dates=dates) for text in borders if text.strip()]
    if len(marks) < 2 or marks != sorted(marks):
        raise UserError("give the times from which on rows validate and test, in that order")
    counts = set()
    for begin, end in zip(raw.index.offsets, raw.index.offsets[1:], strict=False):
        time = raw.time[begin:end]
        positions = [bisect.bisect_left(time, mark) for mark in marks]
        positions = [*positions, len(time)][:3]
        counts.add((positions[0], positions[1] - positions[0], positions[2] - positions[1]))
    if len(counts) > 1:
        raise UserError(
            "data.split.rows counts the same rows in every series, but these dates lie at "
            "different rows; choose shares, or a column that assigns rows to sets (by)",
            setting="data.split.rows",
        )
    (rows,) = counts
    if min(rows) < 1:
        raise UserError("every set needs rows; move the dates")
    return [int(count) for count in rows]


def _parse_time(text: str, *, dates: bool) -> float:
    try:
        if not dates:
            value = float(text)
        else:
            when = datetime.fromisoformat(text.strip())
            value = when.replace(tzinfo=when.tzinfo or UTC).timestamp() * MICROSECONDS
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        expected = "a time as in 2026-01-31 or 2026-01-31 12:00" if dates else "a number"
        raise UserError(f'"{text[:100]}" is not {expected}')
    return value


SAMPLE_ROWS = 200_000
"""Rows of a large file on which columns are checked"""
Report = Callable[[float], None]


def check_data(config: Config, report: Report) -> dict[str, Any]:
    """Return the rows and windows that a run would have; a UserError says why it would not start.

    `sample_rows` is how many rows were looked at where these are not all, and `unchecked` says what
    could not be checked on them.
    """
    data = config.data
    if data.paths[0].startswith(SIMULATED):
        return _check_all(config)
    paths = [file for path in data.paths for file in files.expand_path(Path(path))[1]]
    size = sum(file.stat().st_size for file in paths if file.exists())
    return _check_all(config) if size <= MAX_BYTES else _check_sample(config, paths, report)


def _check_all(config: Config) -> dict[str, Any]:
    loaded = load_series(config, read_source(config, in_memory=True))
    sets = find_sets(loaded)
    # a column that cannot be read as numbers, or cannot be scaled, is refused
    fit_scaler(loaded.raw, loaded.signature, sets.training, loaded.data, None)
    windows = {name: sum(len(fold.starts[name]) for fold in sets.folds) for name in SETS}
    num_rows = loaded.raw.index.num_rows
    return {"rows": num_rows, "windows": windows, "sample_rows": None, "unchecked": ""}


def _check_sample(config: Config, paths: Sequence[Path], report: Report) -> dict[str, Any]:
    """Check the columns on the first rows, and the lengths of the series on all rows."""
    data = config.data
    if not files.can_sample(paths[0], data):
        text = f"{paths[0].name} is too large to be read here"
        return {"rows": None, "windows": None, "sample_rows": 0, "unchecked": text}
    table = files.read_rows(data, paths[0], 0, SAMPLE_ROWS)
    loaded = _load_sample(config, [table])
    every_row = np.ones(loaded.raw.index.num_rows, dtype=bool)
    fit_scaler(loaded.raw, loaded.signature, every_row, loaded.data, None)
    unchecked = _find_unchecked(data)
    lengths = Counter[str]() if unchecked else _count_rows(data, paths, report)
    windows = None if unchecked else _count_windows(loaded, lengths)
    rows = None if unchecked else sum(lengths.values())
    return {
        "rows": rows,
        "windows": windows,
        "sample_rows": table.num_rows,
        "unchecked": unchecked and f"{unchecked}: windows were not counted",
    }


def _load_sample(config: Config, tables: list[DataTable]) -> LoadedSeries:
    """Return the series of the first rows. None counts as too short, since the last one may go on,
    and classes are not collected, since some may come later."""
    data = config.data
    if data.task == "classify":
        update = {"task": "regress", "targets": None, "labels": None, "horizon": 1}
        data = data.model_copy(update=update)
        config = config.model_copy(update={"data": data})
    if data.prepare:
        chain = PrepareChain(data)
        flags = np.ones(sum(table.num_rows for table in tables), dtype=bool)
        prepared = chain.apply(tables) if chain.is_fitted else chain.fit(tables, flags)
        data, tables = prepared.data, prepared.tables
    return load_series(config, find_source(config, data, tables, []), min_rows=1)


def _find_unchecked(data: Data) -> str:
    """Return the setting that hides the lengths of series from a look at the file; "" without
    one."""
    settings = {
        "data.where selects rows": bool(data.where),
        "data.labels define windows": data.labels is not None,
        "data.split.by assigns rows": data.split.by is not None,
        "data.split.folders assigns files": data.split.folders,
        "data.split.stratified assigns classes": data.split.stratified,
        'data.missing = "drop" drops rows': data.missing == "drop",
        "steps of data.prepare change the number of rows": not all(
            make_step(number, step).keeps_rows for number, step in enumerate(data.prepare, start=1)
        ),
    }
    return next((text for text, is_set in settings.items() if is_set), "")


def _count_rows(data: Data, paths: Sequence[Path], report: Report) -> Counter[str]:
    """Count the rows of each series, in one pass over all files."""
    options = ReadOptions.from_data(data)
    options = options if options.sheets else options._replace(sheets=EVERY_SHEET.sheets)
    counts: Counter[str] = Counter()
    total, done = sum(file.stat().st_size for file in paths), 0
    for file in paths:
        for table in open_tables(str(file), options):
            ids = [name for name in data.ids if name in table.columns]
            for batch in table.batches:
                length = len(next(iter(batch.values()))) if batch else 0
                keys = [batch[name].cast("string").to_pylist() for name in ids]
                if keys:
                    counts.update(" ".join(map(str, key)) for key in zip(*keys, strict=True))
                else:
                    counts[file.name + table.sheet] += length
        done += file.stat().st_size
        report(done / max(total, 1))
    return counts


def _count_windows(loaded: LoadedSeries, lengths: Counter[str]) -> dict[str, int]:
    """Return the windows of series of these lengths, as if they had no gaps."""
    data, signature = loaded.data, loaded.signature
    needed = data.context + data.horizon
    if data.short == "error":
        for name, rows in lengths.items():
            if rows < needed:
                refuse_short(name, rows, data, needed)
    used = {name: rows for name, rows in lengths.items() if rows >= needed}
    if not used:
        raise UserError(
            f"no series has the {needed} rows of one window; shorten data.context or data.horizon"
        )
    offsets = np.cumsum([0, *used.values()], dtype=np.int64)
    index = SeriesIndex(
        series_names=tuple(used),
        offsets=offsets,
        breaks=offsets[:-1],
        group_begins=offsets[:1],
        group_codes=np.zeros(1, dtype=np.int64),
        group_names=("",),
        step=loaded.raw.index.step,
        has_dates=loaded.raw.index.has_dates,
        look_ahead=loaded.raw.index.look_ahead,
    )
    if data.split.walk_forward is not None and not signature.masked:
        folds, _ = find_fold_windows(index, None, data, signature)
        return {name: sum(len(fold.starts[name]) for fold in folds) for name in splits.SETS}
    _, ranges = splits.find_windows(index, data, signature)
    return {name: len(windows) for name, windows in ranges.items()}
