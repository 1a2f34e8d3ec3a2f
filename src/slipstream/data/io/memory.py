"""Tables in memory: pandas, polars, duckdb, pyarrow, or a dict of columns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream.data.io.table import DataTable, MemoryReader, SourceFile, make_table
from slipstream.errors import UserError


def read_memory(table: Any, *, decimal: str | None = None) -> DataTable:
    """Take over a table that supports the Arrow interface, or a dict of columns."""
    if not (isinstance(table, (pa.Table, dict)) or hasattr(table, "__arrow_c_stream__")):
        raise UserError(
            f"data is a {type(table).__name__}, which does not speak Arrow; pass a pandas, polars, "
            "duckdb or pyarrow table"
        )
    try:
        arrow = pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"data: cannot be read as an Arrow table: {error}") from None
    return replace(wrap_table(arrow, "data"), decimal=decimal)


def wrap_table(
    table: pa.Table, name: str, *, path: Path | None = None, delimiter: str | None = None
) -> DataTable:
    """Return an Arrow table as ours; it may come from a CSV file."""
    names = tuple(table.column_names)
    source = SourceFile(name, table.num_rows, len(names), path, delimiter)
    reader = MemoryReader(dict(zip(names, table.columns, strict=True)))
    return make_table(reader, source, names)


def release_memory() -> None:
    """Make Arrow return the memory that it keeps for later to the system."""
    pa.default_memory_pool().release_unused()
