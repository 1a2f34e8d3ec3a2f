"""Tables in memory, as Arrow: pandas, polars, duckdb, pyarrow, a dict of columns, numpy.

None of these libraries is imported here; their objects are recognised by what they offer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from typing import Any

import pyarrow as pa

from slipstream.errors import UserError

TIME, INDEX = "time", "index"
"""Names of an unnamed index that holds dates: the first that is free"""
ACCEPTED = (
    "pass a pandas, polars, duckdb or pyarrow table, a dict of columns, or a numpy array with "
    "columns=[...]"
)


def to_arrow(table: Any, *, time: str | None = None) -> pa.Table:
    """Return a table in memory as an Arrow table; `time` is the column that `data.time` names.

    An index of pandas becomes a column where it has a name. Without one, it becomes the time column
    if it holds dates, and is left out if it numbers the rows.
    """
    if _is_from(table, "polars") and hasattr(table, "collect"):
        table = table.collect()
    if hasattr(table, "to_frame") and not hasattr(table, "columns"):  # one column of pandas, polars
        table = table.to_frame()
    if hasattr(table, "dtype") and hasattr(table, "shape") and not hasattr(table, "columns"):
        table = _split_array(table)
    if not (isinstance(table, (pa.Table, Mapping)) or hasattr(table, "__arrow_c_stream__")):
        kind = type(table).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        raise UserError(f"data is {article} {kind}; {ACCEPTED}")
    try:
        if _is_from(table, "pandas"):
            return _from_pandas(table, time)
        return pa.table(dict(table) if isinstance(table, Mapping) else table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"data: cannot be read as an Arrow table: {error}") from None


def _is_from(table: Any, library: str) -> bool:
    return type(table).__module__.partition(".")[0] == library


def _split_array(array: Any) -> dict[str, Any]:
    """Return the fields of a structured array; other arrays have no names."""
    names = getattr(array.dtype, "names", None)
    if not names:
        raise UserError(
            "data is an array, whose columns have no names; pass their names: columns=[...]"
        )
    return {name: array[name] for name in names}


def _from_pandas(frame: Any, time: str | None) -> pa.Table:
    columns = [str(name) for name in frame.columns]
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise UserError(f'data: {columns.count(twice[0])} columns are named "{twice[0]}"')
    table = pa.Table.from_pandas(frame.set_axis(columns, axis=1), preserve_index=False)
    for level in range(frame.index.nlevels):
        index = frame.index.get_level_values(level)
        name = index.name
        if name is None and pa.types.is_integer(pa.array(index[:0]).type):
            continue  # it numbers the rows
        free = [one for one in (time, TIME, INDEX) if one and one not in columns]
        name = str(name) if name is not None else free[0] if free else None
        if name is not None and name not in columns:
            table = table.append_column(name, pa.array(index))
    return table


class _PandasRefusal(MetaPathFinder):
    """A finder of modules that says there is no pandas."""

    def find_spec(self, fullname: str, *_: Any) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("no command needs pandas", name=fullname)


def avoid_pandas() -> None:
    """Make Arrow work without pandas, which its first conversion would import (0.5 s).

    Arrow looks for pandas once and remembers the answer. Afterwards others can still import it.
    """
    refusal = _PandasRefusal()
    sys.meta_path.insert(0, refusal)
    try:
        pa.chunked_array([pa.array([1.0])]).to_numpy()
    finally:
        sys.meta_path.remove(refusal)
