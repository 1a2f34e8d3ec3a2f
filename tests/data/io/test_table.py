from __future__ import annotations

import datetime

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data.io import columns, parquet
from slipstream.data.io.files import read_file, read_files
from slipstream.data.io.memory import read_memory
from slipstream.data.io.table import FILE_COLUMN, concatenate_tables


def csv(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content, name="t.csv"):
    return read_file(csv(tmp_path, content, name), name=name)


@pytest.mark.parametrize(
    "content",
    [
        "time,a,b\n1,1.5,-2\n2,2.5,3e2\n",
        "time;a;b\n1;1.5;-2\n2;2.5;3e2\n",
        "time;a;b\n1;1,5;-2\n2;2,5;3e2\n",
        "time\ta\tb\n1\t1.5\t-2\n2\t2.5\t3e2\n",
        "time\ta\tb\r\n1\t1,5\t-2\r\n2\t2,5\t3e2\r\n",
        "\ufefftime,a,b\n1,1.5,-2\n2,2.5,3e2\n",
        '"time","a","b"\n"1","1.5","-2"\n"2","2.5","3e2"\n',
        "time, a, b\n1, 1.5, -2\n2, 2.5, 3e2\n",
        "time,a,b\n\n1,1.5,-2\n\n2,2.5,3e2\n\n",
        "\n\ntime,a,b\n1,1.5,-2\n2,2.5,3e2",
        "time,a,b\n1,+1.5,-2\n2,2.5,+3e2\n",
    ],
    ids=[
        "comma",
        "semicolon",
        "decimal comma",
        "tab",
        "tab, decimal comma, crlf",
        "bom",
        "quoted",
        "spaces",
        "blank lines",
        "blank lines first, no newline last",
        "plus signs",
    ],
)
def test_every_dialect_gives_the_same_numbers(tmp_path, content):
    source = read(tmp_path, content)
    assert source.column_names == ("time", "a", "b")
    assert columns.read_numbers(source, "a", "x").tolist() == [1.5, 2.5]
    assert columns.read_numbers(source, "b", "x").tolist() == [-2, 300]
    assert columns.read_times(source, "time", None).tolist() == [1, 2]


def test_types_come_from_the_whole_file(tmp_path):
    rows = "".join(f"{i}\n" for i in range(200_000))
    source = read(tmp_path, "a\n" + rows + "1027.5\n")
    assert columns.read_numbers(source, "a", "x")[-1] == 1027.5


def test_missing_values_are_nan_by_any_common_name(tmp_path):
    source = read(tmp_path, "a,b\n1,x\nNA,x\n,x\nNaN,x\nnull,x\n#N/A,x\n 7 ,x\n")
    assert np.isnan(columns.read_numbers(source, "a", "x")).tolist() == [False, *[True] * 5, False]


def test_a_quoted_field_may_hold_delimiters_and_newlines(tmp_path):
    source = read(tmp_path, 'a,note\n1,"x, y"\n2,"two\nlines"\n3,"or\nmore"\nbad,z\n')
    with pytest.raises(UserError, match=r't.csv, line 7, column "a": "bad" is not a number'):
        columns.read_numbers(source, "a", "data.inputs")


def test_text_columns_are_not_numeric_but_a_slip_of_the_pen_is_an_error(tmp_path):
    source = read(tmp_path, "name,slip\nx,1\ny,2\nz,3l\n")
    assert not columns.is_numeric(source, "name")
    assert columns.is_numeric(source, "slip")
    with pytest.raises(UserError, match=r'line 4, column "slip": "3l" is not a number'):
        columns.read_numbers(source, "slip", "data.inputs")


@pytest.mark.parametrize(
    ("text", "format_", "first"),
    [
        ("2016-07-01 00:00:00", None, "2016-07-01T00:00:00"),
        ("2016-07-01T00:00:00.5", None, "2016-07-01T00:00:00.5"),
        ("2016-07-01", None, "2016-07-01"),
        ("2016-07-01 12:30", None, "2016-07-01T12:30"),
        ("2016-07-01T00:00:00Z", None, "2016-07-01"),
        ("2016-07-01T02:00:00+02:00", None, "2016-07-01"),
        ("01.07.2016 06:00", "%d.%m.%Y %H:%M", "2016-07-01T06:00"),
        ("20160701", "%Y%m%d", "2016-07-01"),
    ],
)
def test_times(tmp_path, text, format_, first):
    source = read(tmp_path, f"t,a\n{text},1\n{text},2\n")
    found = columns.read_times(source, "t", format_)
    assert found.dtype == np.int64
    assert found[0] == np.datetime64(first, "us").astype(np.int64)


def test_a_time_that_is_none_is_named(tmp_path):
    source = read(tmp_path, "t,a\n2016-07-01,1\n1.7.2016,2\n")
    with pytest.raises(UserError, match=r'line 3, column "t": "1.7.2016" is not an ISO 8601 time'):
        columns.read_times(source, "t", None)
    with pytest.raises(UserError, match=r'"2016-07-01" does not read as data.time_format'):
        columns.read_times(source, "t", "%d.%m.%Y")
    with pytest.raises(UserError, match=r"line 3.*the time is missing"):
        columns.read_times(read(tmp_path, "t,a\n1,1\n,2\n"), "t", None)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["00:00:00", "01:00:00", "02:00:00Z"], 'line 4, column "t": .*02:00:00Z" has a time zone'),
        (
            ["00:00:00Z", "01:00:00+01:00", "02:00:00"],
            'line 4, column "t": .*:00" has no time zone',
        ),
        (["00:00:00", "01:00:00Z", "02:00:00"], 'line 3, column "t": .*01:00:00Z" has a time zone'),
        (["00:00:00Z", "noon", "02:00:00"], 'line 3, .*noon" is not an ISO 8601 time'),
        (["noon", "01:00:00Z", "02:00:00"], 'line 2, .*noon" is not an ISO 8601 time'),
    ],
)
def test_times_with_and_without_a_zone_are_not_mixed(tmp_path, cells, said):
    lines = "".join(f"2016-07-01T{cell},1\n" for cell in cells)
    with pytest.raises(UserError, match=said):
        columns.read_times(read(tmp_path, "t,a\n" + lines), "t", None)


@given(st.lists(st.sampled_from(["2020-01-01", "2020-01-01T00:00:00Z", "x", ""]), min_size=1))
def test_the_first_time_that_differs_is_named(cells):
    source = read_memory({"t": cells})
    kinds = [{"2020-01-01": 1, "2020-01-01T00:00:00Z": 2}.get(cell, 0) for cell in cells]
    bad = next((i for i, kind in enumerate(kinds) if kind == 0 or kind != kinds[0]), None)
    if bad is None:
        assert len(columns.read_times(source, "t", None)) == len(cells)
    elif not all(cell == "" for cell in cells):  # nothing at all is a column of numbers
        with pytest.raises(UserError, match=f"data, row {bad + 1}, "):
            columns.read_times(source, "t", None)


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
    monkeypatch.setattr(parquet, "READ_AHEAD_BYTES", 8 * 30 * 7)
    count = parquet.MANY_COLUMNS + 3
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
        names = [f"c{i}" for i in range(parquet.MANY_COLUMNS)]
        pa.parquet.write_table(pa.table({name: [start, start + 1] for name in names}), path)
        source = read_file(path, name="t")
        assert source.read_column("c7").to_pylist() == [start, start + 1]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([1, 2], pa.uint8()),
        pa.array([True, False]),
        pa.array([1.5, 2.5], pa.float16()),
        pa.array([1, 2], pa.decimal128(5, 2)),
        pa.array(["1", "2"]).dictionary_encode(),
        pa.array(["1", "2"], pa.large_string()),
        pa.array(["1", "2"], pa.string_view()),
    ],
    ids=lambda values: str(values.type),
)
def test_every_numeric_type_becomes_float64(values):
    found = columns.read_numbers(read_memory(pa.table({"a": values})), "a", "x")
    assert found.dtype == np.float64
    assert np.isfinite(found).all()


def test_a_type_that_is_no_number_is_named():
    source = read_memory({"a": [[1], [2]], "d": [datetime.date(2020, 1, 1)] * 2})
    with pytest.raises(UserError, match=r'column "a" .* holds list<.*>, not numbers'):
        columns.read_numbers(source, "a", "data.inputs")
    assert not columns.is_numeric(source, "d")
    assert columns.read_times(source, "d", None).dtype == np.int64


def test_a_folder_is_its_files_by_name(tmp_path):
    for name in ("b.csv", "a.csv", "sub/c.csv", ".hidden.csv", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    assert [s.name for s in read_files([str(tmp_path)])] == ["a.csv", "b.csv", "sub/c.csv"]


def test_files_joined_to_one_table_still_name_file_and_line(tmp_path):
    sources = [read(tmp_path, "a\n1\n2\n", "x.csv"), read(tmp_path, "a\n3\nbad\n5\n6\n", "y.csv")]
    joined = concatenate_tables(sources)
    assert columns.read_codes(joined, FILE_COLUMN, "data.id")[1] == ["x.csv", "y.csv"]
    with pytest.raises(UserError, match=r'^y.csv, line 3, column "a": "bad"'):
        columns.read_numbers(joined, "a", "data.inputs")
    with pytest.raises(UserError, match=r'only one of them has the column "a"'):
        concatenate_tables([sources[0], read(tmp_path, "b\n1\n", "z.csv")])


def test_values_beyond_float32_are_named(tmp_path):
    source = read(tmp_path, "a\n1\n1e39\n")
    with pytest.raises(UserError, match=r'line 3, column "a": is 1e\+39'):
        columns.read_numbers(source, "a", "data.inputs")


def test_bytes_that_are_no_text_are_refused():
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    source = read_memory(pa.table({"a": broken}))
    with pytest.raises(UserError, match=r'column "a" \(data.inputs\): .*UTF8'):
        columns.read_numbers(source, "a", "data.inputs")
