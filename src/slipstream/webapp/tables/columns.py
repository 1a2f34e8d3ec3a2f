"""Columns as float64 in files, with what their values tell: range, mean, missing, histogram."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.data.io.columns import clean_text, is_text
from slipstream.data.io.table import DataTable
from slipstream.errors import UserError
from slipstream.inspection.profiles import MAX_DISTINCT, MIN_TEXTS, parse_cells
from slipstream.inspection.times import GAP, TimeOrder, TimeSource
from slipstream.stats import Moments
from slipstream.webapp.tables import levels
from slipstream.webapp.tables.cache import CachedTable
from slipstream.webapp.tables.levels import Floats, LevelWriter
from slipstream.webapp.tables.source import Report, iter_batches, load_table

BINS = 60
MOST_TEXTS = 12
"""Texts of a column that are listed, the most frequent first"""
MOST_GAPS = 100
MICROSECONDS = 1e6


class _Parsed(NamedTuple):
    """The values of a batch."""

    numbers: Floats
    others: Any = None
    """Cells that are no numbers"""


def build_column(cached: CachedTable, column: int, report: Report) -> dict[str, Any]:
    """Write a column's values; return what they tell."""
    table = load_table(cached)
    name = _get_name(table, column)
    _check_disk(cached, table.num_rows)
    path = cached.folder / f"column-{column}"
    writer, moments, missing = LevelWriter(path), Moments(), 0
    texts = _Texts()
    for batch in iter_batches(table, [name]):
        parsed = _parse(batch[name], table, texts.has_only_text and not moments.count)
        known = parsed.numbers[np.isfinite(parsed.numbers)]
        others = 0 if parsed.others is None else texts.add(parsed.others)
        missing += len(parsed.numbers) - len(known) - others
        moments.add(known)
        writer.add(np.where(np.isfinite(parsed.numbers), parsed.numbers, np.nan))
        report(writer.num_rows / table.num_rows)
    writer.finish()
    is_number = moments.count > texts.count
    facts: dict[str, Any] = {"rows": table.num_rows, "missing": missing, "plot": is_number}
    if texts.count:
        facts |= texts.describe()
    if is_number:
        facts |= {"low": moments.low, "high": moments.high, "mean": moments.mean}
        facts |= {"deviation": moments.deviation, "others": texts.count}
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
        numbers, others = parse_cells(clean, table.decimal)
        return _Parsed(_to_floats(numbers), others)
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


class _Texts:
    """Counts the texts of a column, unless they are too many."""

    def __init__(self) -> None:
        self.count = 0
        self.counts: Counter[str] = Counter()
        self.is_open = True

    @property
    def has_only_text(self) -> bool:
        """Whether no number is to be expected, if there was none."""
        return self.count > MIN_TEXTS

    def add(self, texts: pa.ChunkedArray) -> int:
        self.count += len(texts)
        if self.is_open:
            for one in pc.value_counts(texts).to_pylist():
                self.counts[one["values"]] += one["counts"]
            self.is_open = len(self.counts) <= MAX_DISTINCT
        return len(texts)

    def describe(self) -> dict[str, Any]:
        common = [[text[:100], count] for text, count in self.counts.most_common(MOST_TEXTS)]
        return {
            "texts": common if self.is_open else [],
            "distinct": len(self.counts) if self.is_open else None,
        }


class _Gaps:
    """Remembers the longest gaps of the time."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, int, float]] = []
        self.num_rows = 0
        self.last = np.nan

    def add(self, times: Floats, step: float | None) -> None:
        if step is not None and len(times):
            steps = np.diff(times, prepend=self.last)
            rows = np.flatnonzero(steps > GAP * step)
            longest = rows[np.argsort(-steps[rows], kind="stable")[:MOST_GAPS]]
            starts = np.where(longest > 0, times[longest - 1], self.last)
            self.gaps += zip(
                steps[longest].tolist(),
                (longest + self.num_rows).tolist(),
                starts.tolist(),
                strict=True,
            )
            self.gaps = sorted(self.gaps, reverse=True)[:MOST_GAPS]
        self.num_rows += len(times)
        self.last = float(times[-1]) if len(times) else self.last

    def list_longest(self) -> list[dict[str, float]]:
        return [{"length": length, "row": row, "begin": begin} for length, row, begin in self.gaps]


def _count(path: Any, num_rows: int, moments: Moments) -> list[int]:
    """Return how many values lie in each part of the range."""
    low, size = moments.low, moments.high - moments.low
    counts = np.zeros(BINS, dtype=np.int64)
    if not size or not np.isfinite(size):
        return [moments.count]
    for values in levels.iter_values(path, num_rows):
        known = values[~np.isnan(values)]
        at = np.minimum(((known - low) * (BINS / size)).astype(np.int64), BINS - 1)
        counts += np.bincount(at, minlength=BINS)
    return counts.tolist()
