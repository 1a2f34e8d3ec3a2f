from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data import columns
from slipstream.data.files import read_file
from slipstream.data.table import concatenate_tables, read_memory


def write(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(tmp_path, content, name="t.csv"):
    return read_file(write(tmp_path, content, name), name=name)


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
    with pytest.raises(UserError, match=r'"2016-07-01" does not match data.time_format'):
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


CELLS = ["1", "-2.5", "+3", " 4 ", "", "NA", "nan", "1e3", "0x1", "text", "1,5", "007", "inf"]


@given(st.lists(st.sampled_from(CELLS), min_size=1, max_size=6), st.sampled_from(",;"))
def test_text_that_is_parsed_at_once_gives_the_same_numbers(tmp_path_factory, cells, delimiter):
    text = "".join(f'"{cell}"{delimiter}x\n' for cell in cells)
    path = write(tmp_path_factory.mktemp("t"), f"a{delimiter}b\n{text}")
    as_text, parsed = (read_file(path, name="t.csv") for _ in range(2))
    columns.parse_text(parsed, keep_text=())
    assert columns.is_numeric(as_text, "a") == columns.is_numeric(parsed, "a")
    results = []
    for table in (as_text, parsed):
        try:
            results.append(columns.read_numbers(table, "a", "data.inputs").tobytes())
        except UserError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_text_is_parsed_where_it_is_not_compared(tmp_path):
    table = read(tmp_path, "id,a,note\n007,1,x\n008,,y\n")
    columns.parse_text(table, keep_text={"id", None})
    types = [table.reader.get_type(name) for name in table.column_names]
    assert types == [pa.string(), pa.float64(), pa.string()]
    assert columns.read_codes(table, "id", "data.id")[1] == ["007", "008"]


def test_a_column_of_several_files_has_one_type(tmp_path):
    first = read(tmp_path, "a,b\n,1\n,2\n", "x.csv")
    second = read(tmp_path, "b,a\n3,text\n4,more\n", "y.csv")
    table = concatenate_tables([first, second])
    columns.parse_text(table, keep_text=())
    assert not columns.is_numeric(table, "a")
    assert columns.read_numbers(table, "b", "x").tolist() == [1, 2, 3, 4]
