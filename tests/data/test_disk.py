from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from slipstream import UserError
from slipstream.data import columns
from slipstream.data.files import read_file
from slipstream.data.formats import arrow


def test_parquet_is_read_by_column_and_row_group(tmp_path):
    path = tmp_path / "t.parquet"
    table = pa.table({"a": range(100), "b": range(100, 200)})
    pa.parquet.write_table(table, path, row_group_size=30)
    source = read_file(path, name="t")
    assert source.row_groups == (0, 30, 60, 90)
    for begin, end in ((0, 100), (10, 20), (29, 31), (60, 60 + 40), (99, 100)):
        stretch = source.slice_rows(begin, end)
        assert stretch.read_column("b").to_pylist() == list(range(100 + begin, 100 + end))
        assert stretch.locate_row(0) == f"t, row {begin + 1}"
    with pytest.raises(UserError, match=r'no column "c" \(data.inputs\); it has a, b'):
        columns.read_numbers(source, "c", "data.inputs")


def test_parquet_of_many_columns_is_read_as_it_is(tmp_path, monkeypatch):
    """Columns that are read together are those that were asked for, from the same rows."""
    monkeypatch.setattr(arrow, "READ_AHEAD_BYTES", 8 * 30 * 7)
    count = arrow.MANY_COLUMNS + 3
    table = pa.table({f"c{i}": np.arange(100) + 1000 * i for i in range(count)})
    for name in ("t.parquet", "u.parquet"):
        pa.parquet.write_table(table, tmp_path / name, row_group_size=30)
        table = table.select(table.column_names[::-1])
    one, other = (read_file(tmp_path / name, name=name) for name in ("t.parquet", "u.parquet"))
    for source in (one, other, one):
        for i in (0, count - 1, 500, 501, 7, 6):
            assert source.reader.get_type(f"c{i}") == pa.int64()
            for begin, end in ((0, 30), (10, 20), (29, 31), (99, 100), (0, 100)):
                wanted = (np.arange(begin, end) + 1000 * i).tolist()
                assert source.slice_rows(begin, end).read_column(f"c{i}").to_pylist() == wanted


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "t.parquet"
    for start in (0, 5):
        names = [f"c{i}" for i in range(arrow.MANY_COLUMNS)]
        pa.parquet.write_table(pa.table({name: [start, start + 1] for name in names}), path)
        source = read_file(path, name="t")
        assert source.read_column("c7").to_pylist() == [start, start + 1]


def test_an_arrow_file_with_offsets_beyond_its_end_is_refused(tmp_path):
    """Arrow follows them out of the file, which ends the process."""
    path = tmp_path / "t.arrow"
    texts = pa.array(["rest", "charge", "rest"]).dictionary_encode()
    with pa.ipc.new_file(str(path), pa.schema([("s", texts.type)])) as file:
        file.write_table(pa.table({"s": texts}))
    content = path.read_bytes()
    offsets = np.array([0, 4, 10], dtype=np.int32).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 2**30, 10], np.int32).tobytes()))
    table = arrow.read_arrow(path, "t.arrow")
    with pytest.raises(UserError, match=r"t\.arrow: cannot be read as Arrow: .*offset"):
        columns.read_column(table, "s", "data.inputs")


def test_the_name_of_a_column_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "t.arrow"
    with pa.ipc.new_file(str(path), pa.schema([("voltage", pa.float64())])) as file:
        file.write_table(pa.table({"voltage": [1.0, 2.0]}))
    path.write_bytes(path.read_bytes().replace(b"voltage", b"volt\xe4ge"))
    with pytest.raises(UserError, match="the name of a column is not UTF-8"):
        arrow.read_arrow(path, "t.arrow")
