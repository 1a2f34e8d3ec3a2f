"""Arrow files and streams (Feather), memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream.data.io.table import DataTable, SourceFile, make_read_error, make_table


def read_arrow(path: Path, name: str) -> DataTable:
    """Map a file into memory; pages that nobody looks at are not read."""
    try:
        _open_file.cache_clear()  # a file of the same name may be another one by now
        table = _open_file(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise make_read_error(path, "Arrow", error) from None
    counts = [batch.num_rows for batch in table.to_batches()]
    groups = tuple(np.cumsum([0, *counts[:-1]]).tolist())
    names = tuple(table.column_names)
    source = SourceFile(name, table.num_rows, len(names), path)
    return make_table(_ArrowReader(path), source, names, row_groups=groups)


@dataclass(frozen=True)
class _ArrowReader:
    path: Path

    def get_type(self, name: str) -> pa.DataType:
        return _open_file(self.path).schema.field(name).type

    def read(self, name: str, begin: int, end: int) -> pa.ChunkedArray:
        return _open_file(self.path).column(name).slice(begin, end - begin)


@lru_cache(maxsize=16)
def _open_file(path: Path) -> Any:
    with pa.memory_map(str(path)) as memory:
        try:
            return pa.ipc.open_file(memory).read_all()
        except pa.ArrowInvalid:
            memory.seek(0)
            return pa.ipc.open_stream(memory).read_all()
