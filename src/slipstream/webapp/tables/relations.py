"""How columns depend on each other, and which rows make a series."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.data.io.columns import read_codes
from slipstream.data.io.table import FILE_COLUMN
from slipstream.webapp.tables import levels
from slipstream.webapp.tables.cache import CachedTable
from slipstream.webapp.tables.levels import Floats
from slipstream.webapp.tables.source import Report, load_table

MOST_SERIES = 5_000
PART_ROWS = 1 << 18


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
    scale = np.array([[one["mean"], one["deviation"] or 1.0] for one in facts])
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
    """Return the series that the columns of `data.id` tell apart, or files; write the order of rows
    where series take turns."""
    table = load_table(cached)
    named = (cached.read("findings") or {}).get("config", {}).get("data", {}).get("id")
    names = [named] if isinstance(named, str) else list(named or ())
    if not names and cached.path.is_dir() and FILE_COLUMN in table.column_set:
        names = [FILE_COLUMN]
    if not names:
        return {"by": [], "series": [], "mixed": False, "more": 0}
    codes, labels = np.zeros(table.num_rows, dtype=np.int64), [""]
    for name in names:
        more, texts = read_codes(table, name, "data.id")
        codes, labels = _combine(codes * len(texts) + more, labels, texts)
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
        "series": series[:MOST_SERIES],
        "mixed": mixed,
        "more": max(len(series) - MOST_SERIES, 0),
    }


def _combine(
    codes: npt.NDArray[np.int64], labels: list[str], texts: list[str]
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return codes of the combinations that occur, numbered as they first appear."""
    values, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    names = [
        " / ".join(
            part for part in (labels[value // len(texts)], texts[value % len(texts)]) if part
        )
        for value in values[order].tolist()
    ]
    return rank[inverse], names
