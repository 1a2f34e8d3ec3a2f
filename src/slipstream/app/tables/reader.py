"""A process that reads files for the server: one task a line, answered by lines of JSON.

Files of any size and content pass through here, so that the server stays small and a file that
crashes a library ends this process only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from slipstream import config as configs
from slipstream.app.tables import levels
from slipstream.app.tables.levels import Floats, LevelWriter
from slipstream.app.tables.service import CachedTable
from slipstream.base.errors import UserError, to_json_message
from slipstream.base.statistics import Moments
from slipstream.config import Config, Data
from slipstream.data import files
from slipstream.data.columns import clean_text, is_text
from slipstream.data.formats import arrow, find_format
from slipstream.data.formats.reader import Batch, OpenTable, open_table
from slipstream.data.roles import identify_series
from slipstream.data.table import FILE_COLUMN, DataTable, avoid_pandas
from slipstream.data.times import EVIDENCE_ROWS, GAP, TimeOrder, TimeSource, find_time
from slipstream.reporting.wording import find_unit
from slipstream.runs import to_json
from slipstream.tools.columns import MIN_TEXTS, ColumnProfile, TextCounter, parse_cells
from slipstream.tools.inspection import (
    inspect_path,
    open_tables,
    parse_options,
)

Report = Callable[[float], None]
COPY = "table.arrow"
PART_VALUES = 1 << 20
"""Values that are read at a time; larger parts are slower"""
MAX_CELL = 200
"""Characters of a cell that a page of rows shows"""
MAX_COLUMNS = 100
"""Columns of a page of rows"""
KINDS = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_timestamp, "time"),
    (pa.types.is_date, "time"),
    (pa.types.is_integer, "number"),
    (pa.types.is_floating, "number"),
    (pa.types.is_decimal, "number"),
    (pa.types.is_duration, "number"),
)


def describe_table(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Return rows, columns and the time of a file; copy the file first if it cannot be read in
    place."""
    table = _read_in_place(cached)
    facts: dict[str, Any] = {}
    if table is None:
        facts = _copy(cached, report)
        table = arrow.read_arrow(cached.folder / COPY, cached.path.name)
        table = replace(table, decimal=facts["decimal"], delimiter=facts["delimiter"])
    units = facts.pop("units", {})
    head, time = _read_head(table)
    return {
        "rows": table.num_rows,
        "format": table.files[0].format,
        "decimal": table.decimal,
        "delimiter": table.delimiter,
        "notes": [],
        "columns": [
            {
                "name": name,
                "type": _find_kind(table, name, head),
                "unit": units.get(name) or find_unit(name),
            }
            for name in table.column_names
        ],
        "time": time,
        **facts,
    }


def load_table(cached: CachedTable) -> DataTable:
    """Return the table of a file that `describe_table` has read."""
    facts = cached.read("table")
    table = _read_in_place(cached) or arrow.read_arrow(cached.folder / COPY, cached.path.name)
    return replace(table, decimal=facts["decimal"], delimiter=facts["delimiter"])


def iter_batches(table: DataTable, names: Iterable[str]) -> Iterator[Batch]:
    """Read columns part by part."""
    return open_table(replace(table, column_names=tuple(names)), PART_VALUES).batches


def read_rows(cached: CachedTable, begin: int, count: int) -> dict[str, Any]:
    """Return some rows as text, None where a value is missing."""
    table = load_table(cached)
    begin = min(max(begin, 0), max(table.num_rows - 1, 0))
    part = table.slice_rows(begin, min(begin + count, table.num_rows))
    names = table.column_names[:MAX_COLUMNS]
    columns = [[_format(cell) for cell in part.read_column(name)] for name in names]
    return {
        "begin": begin,
        "names": list(names),
        "rows": [list(cells) for cells in zip(*columns, strict=True)],
    }


def _format(cell: Any) -> str | None:
    try:
        value = cell.as_py()
    except (ValueError, pa.ArrowException):  # text that is not UTF-8, a time beyond year 9999
        return "?"
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}…"


def _read_in_place(cached: CachedTable) -> DataTable | None:
    """Return the table of a file whose columns can be read without a copy; None for other
    formats."""
    file_format = find_format(cached.path)
    if cached.path.is_dir() or file_format is None or not file_format.load().reads_in_place:
        return None
    return files.read_file(cached.path, name=cached.path.name)


def _copy(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Copy all rows to one Arrow file; return the facts about its format."""
    options, _ = parse_options(cached.overrides)
    _, paths = files.expand_path(cached.path)
    total = sum(path.stat().st_size for path in paths)
    tables = open_tables(str(cached.path), options)
    first = next(tables)
    copy = _Copy(
        cached.folder / COPY, total, report, with_files=len(paths) > 1 or first.sheet != ""
    )
    for table in chain([first], tables):
        copy.add(table)
    copy.finish()
    return {
        "format": first.format,
        "decimal": first.decimal,
        "delimiter": first.delimiter,
        "units": dict(first.units),
        "notes": list(first.notes),
    }


class _Copy:
    """Writes the rows of tables one after the other."""

    def __init__(self, path: Path, total: int, report: Report, *, with_files: bool) -> None:
        self.path, self.total, self.report, self.with_files = path, total, report, with_files
        self.temporary = path.with_suffix(".part")
        self.writer: Any = None
        self.schema: Any = None
        self.num_bytes = 0

    def add(self, table: OpenTable) -> None:
        for batch in table.batches:
            if self.with_files and FILE_COLUMN not in table.columns:
                num_rows = len(next(iter(batch.values()))) if batch else 0
                name = pa.array([table.name] * num_rows)
                batch |= {FILE_COLUMN: pa.chunked_array([name])}
            if self.writer is None:
                self.schema = pa.schema(
                    [(name, _get_type(values)) for name, values in batch.items()]
                )
                self.writer = pa.ipc.new_file(str(self.temporary), self.schema)
            self.writer.write_table(_fit(batch, self.schema, table.name))
            self.num_bytes += sum(values.nbytes for values in batch.values())
            self.report(min(self.num_bytes / max(self.total, 1), 0.99))

    def finish(self) -> None:
        if self.writer is None:
            raise UserError(f"{self.path}: has no rows")
        self.writer.close()
        self.temporary.replace(self.path)


def _get_type(values: pa.ChunkedArray) -> pa.DataType:
    kind = values.type
    if kind == pa.null():
        return pa.string()
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _fit(batch: Batch, schema: pa.Schema, name: str) -> pa.Table:
    """Return rows with the columns of the first file."""
    num_rows = len(next(iter(batch.values())))
    columns = []
    for field in schema:
        values = batch.get(field.name)
        if values is None:
            values = pa.chunked_array([pa.nulls(num_rows, field.type)])
        try:
            columns.append(values if values.type == field.type else values.cast(field.type))
        except pa.ArrowException:
            raise UserError(
                f'{name}: column "{field.name}" holds {values.type}, but {field.type} in the first '
                "file; files of one job have the same columns"
            ) from None
    return pa.table(columns, schema=schema)


def _read_head(table: DataTable) -> tuple[Batch, dict[str, Any] | None]:
    """Return the first rows of text columns, and the columns that hold the time."""
    types = {name: table.reader.get_type(name) for name in table.column_names}
    dated = [name for name, kind in types.items() if _is_dated(kind)]
    part = table.slice_rows(0, min(EVIDENCE_ROWS, table.num_rows))
    needed = [name for name, kind in types.items() if not dated or is_text(kind)]
    head = {name: part.read_column(name) for name in needed}
    if dated:
        source: TimeSource | None = TimeSource((dated[0],), None, is_date=True)
    else:
        source = find_time(head, table.decimal)
    return head, None if source is None else _describe_source(source)


def _describe_source(source: TimeSource) -> dict[str, Any]:
    return {"columns": source.columns, "format": source.format, "is_date": source.is_date}


def _is_dated(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _find_kind(table: DataTable, name: str, head: Mapping[str, Any]) -> str:
    """Return the type of a column; the type of text comes from its first rows."""
    kind = table.reader.get_type(name)
    for test, word in KINDS:
        if test(kind):
            return word
    if name in head and is_text(kind):
        profile = ColumnProfile(name)
        profile.add(head[name], table.decimal)
        return profile.kind
    return "text"


BINS = 60
MAX_TEXTS = 12
"""Texts of a column that are listed, the most frequent first"""
MAX_GAPS = 100
MICROSECONDS = 1e6


class _Parsed(NamedTuple):
    """The numbers of a batch, and its cells that are no numbers."""

    numbers: Floats
    not_numbers: Any = None
    """Cells that are no numbers"""


def build_column(cached: CachedTable, column: int, report: Report) -> dict[str, Any]:
    """Write a column's values; return its statistics."""
    table = load_table(cached)
    name = _get_name(table, column)
    _check_disk(cached, table.num_rows)
    path = cached.folder / f"column-{column}"
    writer, moments, missing = LevelWriter(path), Moments(), 0
    texts = TextCounter()
    for batch in iter_batches(table, [name]):
        only_text = texts.total > MIN_TEXTS and not moments.count
        parsed = _parse(batch[name], table, only_text)
        known = parsed.numbers[np.isfinite(parsed.numbers)]
        missing += len(parsed.numbers) - len(known)
        if parsed.not_numbers is not None:
            texts.add(parsed.not_numbers)
            missing -= len(parsed.not_numbers)
        moments.add(known)
        writer.add(np.where(np.isfinite(parsed.numbers), parsed.numbers, np.nan))
        report(writer.num_rows / table.num_rows)
    writer.finish()
    is_number = moments.count > texts.total
    facts: dict[str, Any] = {"rows": table.num_rows, "missing": missing, "plot": is_number}
    if texts.total:
        common = texts.counts.most_common(MAX_TEXTS)
        facts["texts"] = [[text[:100], count] for text, count in common]
        facts["distinct"] = None if texts.has_many else len(texts.counts)
    if is_number:
        facts |= {"low": moments.low, "high": moments.high, "mean": moments.mean}
        facts |= {"deviation": moments.deviation, "others": texts.total}
        facts["histogram"] = _count(path, table.num_rows, moments)
    return facts


def build_time(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Write the time of every row; return its steps and gaps."""
    table = load_table(cached)
    facts = cached.read("table")["time"]
    if facts is None:
        raise UserError("no column of times was found")
    source = TimeSource(tuple(facts["columns"]), facts["format"], facts["is_date"])
    _check_disk(cached, table.num_rows)
    path = cached.folder / "column-time"
    order, gaps = TimeOrder(), _Gaps()
    with path.with_suffix(".values").open("wb") as file:
        for batch in iter_batches(table, source.columns):
            times = source.read(batch, table.decimal)
            before = order.gaps
            order.add(times)
            gaps.add(times, order.step if order.gaps > before else None)
            times.tofile(file)
            report(order.num_rows / table.num_rows)
    return {
        "step": order.step,
        "low": order.low if np.isfinite(order.low) else None,
        "high": order.high if np.isfinite(order.high) else None,
        "gaps": order.gaps,
        "longest": gaps.list_longest(),
        "disorder": order.backward + order.repeated,
        "ordered": not (order.backward or order.unreadable),
    }


def _get_name(table: DataTable, column: int) -> str:
    if not 0 <= column < len(table.column_names):
        raise UserError("there is no such column")
    return table.column_names[column]


def _check_disk(cached: CachedTable, num_rows: int) -> None:
    """Refuse a column that would fill the disk."""
    free = shutil.disk_usage(cached.folder).free
    if 2 * levels.WIDTH * num_rows > free:
        raise UserError(
            f"{cached.folder.parent}: only {free / 1e9:.1f} GB are free, too little to plot "
            f"{num_rows:,} rows; make room on the disk"
        )


def _parse(values: pa.ChunkedArray, table: DataTable, only_text: bool) -> _Parsed:
    """Return a batch as numbers: times in seconds, true as 1, NaN where there is no number."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = values.type
    if is_text(kind):
        clean = clean_text(values)
        if only_text:
            return _Parsed(np.full(len(clean), np.nan), clean.drop_null())
        numbers, not_numbers = parse_cells(clean, table.decimal)
        return _Parsed(_to_floats(numbers), not_numbers)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        micros = values.cast(pa.timestamp("us", getattr(kind, "tz", None)), safe=False)
        return _Parsed(_to_floats(micros.cast(pa.int64())) / MICROSECONDS)
    if pa.types.is_duration(kind):
        micros = values.cast(pa.duration("us"), safe=False)
        return _Parsed(_to_floats(micros.cast(pa.int64())) / MICROSECONDS)
    try:
        return _Parsed(_to_floats(values))
    except pa.ArrowException:  # lists and structures
        return _Parsed(np.full(len(values), np.nan), pa.chunked_array([["…"] * len(values)]))


def _to_floats(values: pa.ChunkedArray) -> Floats:
    floats = values.cast(pa.float64(), safe=False)
    floats = floats.fill_null(np.nan) if floats.null_count else floats
    return np.asarray(floats.to_numpy(), dtype=np.float64)


class _Gaps:
    """Keeps the longest gaps of the time."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, int, float]] = []
        self.num_rows = 0
        self.last = np.nan

    def add(self, times: Floats, step: float | None) -> None:
        if step is not None and len(times):
            steps = np.diff(times, prepend=self.last)
            rows = np.flatnonzero(steps > GAP * step)
            longest = rows[np.argsort(-steps[rows], kind="stable")[:MAX_GAPS]]
            starts = np.where(longest > 0, times[longest - 1], self.last)
            self.gaps += zip(
                steps[longest].tolist(),
                (longest + self.num_rows).tolist(),
                starts.tolist(),
                strict=True,
            )
            self.gaps = sorted(self.gaps, reverse=True)[:MAX_GAPS]
        self.num_rows += len(times)
        self.last = float(times[-1]) if len(times) else self.last

    def list_longest(self) -> list[dict[str, float]]:
        return [{"length": length, "row": row, "begin": begin} for length, row, begin in self.gaps]


def _count(path: Any, num_rows: int, moments: Moments) -> list[int]:
    """Return a histogram of the values."""
    low, size = moments.low, moments.high - moments.low
    counts = np.zeros(BINS, dtype=np.int64)
    if not size or not np.isfinite(size):
        return [moments.count]
    for values in levels.iter_values(path, num_rows):
        known = values[~np.isnan(values)]
        bins = np.minimum(((known - low) * (BINS / size)).astype(np.int64), BINS - 1)
        counts += np.bincount(bins, minlength=BINS)
    return counts.tolist()


MAX_SERIES = 5_000
PART_ROWS = 1 << 18
"""Rows at a time, so that all columns of a part fit into memory"""


def correlate(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Return Pearson's correlation of every pair of columns, over the rows that have both."""
    columns = [
        number
        for number in cached.list_correlated()
        if (cached.read(f"column-{number}") or {}).get("plot")
    ]
    facts = [cached.read(f"column-{number}") for number in columns]
    if len(columns) < 2:
        return {"columns": columns, "values": []}
    scale = np.array([[column["mean"], column["deviation"] or 1.0] for column in facts])
    num_rows = facts[0]["rows"]
    sums = np.zeros((4, len(columns), len(columns)))
    for begin in range(0, num_rows, PART_ROWS):
        end = min(begin + PART_ROWS, num_rows)
        paths = (cached.folder / f"column-{number}" for number in columns)
        part = np.stack([levels.read_values(path, begin, end) for path in paths])
        sums += _sum_products((part - scale[:, :1]) / scale[:, 1:])
        report(end / num_rows)
    return {"columns": columns, "values": _divide(sums).tolist()}


def _sum_products(part: Floats) -> Floats:
    """Return, for every pair, the rows that have both and the sums of x y, x and x² over them."""
    known = np.isfinite(part)
    part, has = np.where(known, part, 0.0), known.astype(np.float64)
    return np.stack([has @ has.T, part @ part.T, part @ has.T, (part**2) @ has.T])


def _divide(sums: Floats) -> Floats:
    count, products, totals, squares = sums
    with np.errstate(all="ignore"):
        covariance = products - totals * totals.T / count
        spread = squares - totals**2 / count
        values = covariance / np.sqrt(spread * spread.T)
    varies = spread > 1e-9 * count
    usual = (count > 2) & varies & varies.T
    return np.where(usual, np.clip(values, -1, 1), np.nan)


def find_series(cached: CachedTable, report: Report) -> dict[str, Any]:
    """Return the series by the columns of `data.id`, or by files; write the order of rows where
    series alternate."""
    table = load_table(cached)
    named = (cached.read("findings") or {}).get("config", {}).get("data", {}).get("id")
    names = [named] if isinstance(named, str) else list(named or ())
    if not names and cached.path.is_dir() and FILE_COLUMN in table.column_set:
        names = [FILE_COLUMN]
    if not names:
        return {"by": [], "series": [], "mixed": False, "more": 0}
    codes, labels = identify_series(table, Data(path=str(cached.path), id=tuple(names)))
    report(0.5)
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    mixed = len(starts) > len(labels)
    if mixed:
        order = np.argsort(codes, kind="stable")
        order.astype(np.int64).tofile((cached.folder / "series").with_suffix(".values"))
        codes = codes[order]
        starts = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = [*starts[1:].tolist(), table.num_rows]
    series = [
        {"name": labels[codes[begin]][:200], "begin": begin, "rows": end - begin}
        for begin, end in zip(starts.tolist(), ends, strict=True)
    ]
    return {
        "by": names,
        "series": series[:MAX_SERIES],
        "mixed": mixed,
        "more": max(len(series) - MAX_SERIES, 0),
    }


def inspect(cached: CachedTable, _: Report) -> dict[str, Any]:
    """Return the findings of `slipstream inspect`."""
    return inspect_path(str(cached.path), cached.overrides).to_dict()


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "table": describe_table,
    "column": build_column,
    "time": build_time,
    "findings": inspect,
    "correlations": correlate,
    "series": find_series,
}
"""Functions by the name of their task; each result is written to a file of that name"""


def run_task(request: dict[str, Any], report: Report) -> Any:
    """Carry out a task."""
    if request["task"] == "check":
        from slipstream.app.screens.prepare_rows import check_data

        (values,) = request["arguments"]
        return check_data(Config.model_validate(configs.from_json_values(values)), report)
    cached = CachedTable(
        Path(request["path"]), Path(request["folder"]), tuple(request["overrides"])
    )
    if request["task"] == "rows":
        return read_rows(cached, *request["arguments"])
    result = TASKS[request["task"]](cached, *request["arguments"], report)
    name = "-".join([request["task"], *map(str, request["arguments"])])
    cached.write(name, json.loads(to_json(result)))
    return None


def answer(line: str, send: Callable[[Any], None]) -> None:
    """Run the task of a line, and send its result or its error."""
    last = 0.0

    def report(progress: float) -> None:
        nonlocal last
        if progress >= last + 0.01:
            last = progress
            send({"progress": progress})

    try:
        send({"result": run_task(json.loads(line), report)})
    except UserError as error:
        send({"error": to_json_message(error.message), "setting": error.setting})
    except OSError as error:
        send({"error": f"{error.filename or 'the file'}: {error.strerror or error}"})
    except MemoryError:
        send({"error": "the file does not fit into memory"})


def main() -> None:
    """Answer until the server closes its end."""
    os.nice(int(sys.argv[1]))
    avoid_pandas()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no reply

    def send(value: Any) -> None:
        replies.write(to_json(value, indent=None) + "\n")
        replies.flush()

    for line in sys.stdin:
        try:
            answer(line, send)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
