from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from slipstream import UserError
from slipstream.data import columns
from slipstream.data.files import read_file
from slipstream.data.table import FILE_COLUMN, concatenate_tables, open_table_writer


def write(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content, name="t.csv"):
    return read_file(write(tmp_path, content, name), name=name)


def test_files_joined_to_one_table_still_name_file_and_line(tmp_path):
    sources = [read(tmp_path, "a\n1\n2\n", "x.csv"), read(tmp_path, "a\n3\nbad\n5\n6\n", "y.csv")]
    joined = concatenate_tables(sources)
    assert columns.read_codes(joined, FILE_COLUMN, "data.id")[1] == ["x.csv", "y.csv"]
    with pytest.raises(UserError, match=r'^y.csv, line 3, column "a": "bad"'):
        columns.read_numbers(joined, "a", "data.inputs")
    with pytest.raises(UserError, match=r'only one of them has the column "a"'):
        concatenate_tables([sources[0], read(tmp_path, "b\n1\n", "z.csv")])


def test_parquet_has_dictionaries_only_of_values_that_repeat(tmp_path):
    rows = np.arange(1000)
    names = pa.DictionaryArray.from_arrays(rows // 500, ["a", "b"])
    columns = {"series": names, "text": [f"t{i}" for i in rows], "row": rows, "step": rows % 4}
    table = pa.table(columns | {"flag": np.float64(rows % 2), "y": np.sin(rows)})
    with open_table_writer(tmp_path / "t.parquet") as write:
        write(table.slice(0, 600))
        write(table.slice(600))
    group = pyarrow.parquet.ParquetFile(tmp_path / "t.parquet").metadata.row_group(1)
    parts = [group.column(place) for place in range(group.num_columns)]
    coded = {part.path_in_schema for part in parts if part.has_dictionary_page}
    assert coded == {"series", "text", "step", "flag"}
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").equals(table)
