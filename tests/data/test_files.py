from __future__ import annotations

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from slipstream.data import columns
from slipstream.data.files import read_file, read_files
from slipstream.data.table import read_memory

NUMBERS = {"t": [1, 2, 3], "a": [1.5, None, 3.5], "s": ["x", "y", "x"]}


def arrow_table() -> pa.Table:
    return pa.table(NUMBERS)


@pytest.mark.parametrize(
    "made",
    [
        lambda: pa.table(NUMBERS),
        lambda: pd.DataFrame(NUMBERS),
        lambda: pl.DataFrame(NUMBERS),
        lambda: duckdb.sql("select * from arrow", connection=_connection()),
        lambda: NUMBERS,
    ],
    ids=["pyarrow", "pandas", "polars", "duckdb", "dict"],
)
def test_tables_in_memory(made):
    source = read_memory(made())
    assert columns.read_times(source, "t", None).tolist() == [1, 2, 3]
    np.testing.assert_array_equal(columns.read_numbers(source, "a", "x"), [1.5, np.nan, 3.5])
    assert columns.read_codes(source, "s", "x")[0].tolist() == [0, 1, 0]


def _connection():
    connection = duckdb.connect()
    connection.register("arrow", arrow_table())
    return connection


@pytest.mark.parametrize("suffix", [".parquet", ".feather", ".arrow"])
def test_binary_files(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    if suffix == ".parquet":
        pa.parquet.write_table(arrow_table(), path)
    elif suffix == ".feather":
        pa.feather.write_feather(arrow_table(), str(path))
    else:
        with pa.ipc.new_stream(str(path), arrow_table().schema) as writer:
            writer.write_table(arrow_table())
    source = read_file(path, name=path.name)
    np.testing.assert_array_equal(columns.read_numbers(source, "a", "x"), [1.5, np.nan, 3.5])


def test_a_folder_is_its_files_by_name(tmp_path):
    for name in ("b.csv", "a.csv", "sub/c.csv", ".hidden.csv", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    assert [s.name for s in read_files([str(tmp_path)])] == ["a.csv", "b.csv", "sub/c.csv"]
