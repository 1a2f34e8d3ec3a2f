"""CSV files as text: quotes that swallow rows, blank lines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream import config as configs
from slipstream.base.errors import NoNamesError
from slipstream.data import columns
from slipstream.data.files import read_file
from slipstream.data.formats import csv
from slipstream.data.formats.csv import CsvReader
from slipstream.data.formats.reader import InputFile, ReadOptions
from slipstream.tools.inspection import inspect_path

ROWS = [f"{i},{i * 7 % 11}.5,note {i}" for i in range(400)]


def read(tmp_path, lines, header="time,a,note", end="\n", name="t.csv"):
    path = tmp_path / name
    path.write_bytes((end.join([header, *lines]) + end).encode())
    return read_file(path, name=name)


def with_stray(*places, column=2):
    """Rows with a quote before one cell of each of these rows."""
    lines = list(ROWS)
    for row in places:
        cells = lines[row].split(",")
        cells[column] = '"' + cells[column]
        lines[row] = ",".join(cells)
    return lines


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("row", [0, 100, 398, 399])
def test_a_quote_that_never_closes_is_refused_by_line(tmp_path, row, end):
    with pytest.raises(UserError, match=rf"t.csv, line {row + 2}: .* quote .* never closes"):
        read(tmp_path, with_stray(row), end=end)


def test_also_where_the_file_ends_in_mid_line(tmp_path):
    path = tmp_path / "t.csv"
    for tail, line in (('2,"x', 3), ('2,"', 3), ('2,"""', 3), ('2,"a""', 3)):
        path.write_text(f"a,note\n1,x\n{tail}")
        with pytest.raises(UserError, match=f"t.csv, line {line}: .* never closes"):
            read_file(path, name="t.csv")
    for tail in ('2,""', '2,""""', '2,"a"""', '2,x"', '2,"a"b"'):
        path.write_text(f"a,note\n1,x\n{tail}")
        assert read_file(path, name="t.csv").num_rows == 2


@pytest.mark.parametrize("column", [0, 1])
def test_also_where_it_makes_the_row_too_short(tmp_path, column):
    with pytest.raises(UserError, match=r"t.csv, line 102: .* never closes"):
        read(tmp_path, with_stray(100, column=column))


def test_also_where_it_swallows_more_than_a_reader_holds(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time,a,note\n" + '7,8,"x\n' + "1,2,y\n" * 4_000_000)
    with pytest.raises(UserError, match=r"t.csv, line 2: .* quote"):
        read_file(path, name="t.csv")


def test_also_in_the_header(tmp_path):
    with pytest.raises(UserError, match=r"t.csv, line 1: .* never closes"):
        read(tmp_path, ROWS, header='time,a,"note')


@pytest.mark.parametrize("places", [(100, 300), (100, 101)])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_quote_that_closes_in_another_row_is_refused_by_line(tmp_path, places, column):
    with pytest.raises(UserError, match=r"t.csv, line 102(,|:) .*"):
        read(tmp_path, with_stray(*places, column=column))


def test_the_line_is_that_of_the_quote_not_of_the_row(tmp_path):
    lines = [*ROWS[:5], '5,1.5,"two', 'lines"', *ROWS[6:9], '9,1.5,"other', 'lines"']
    lines += ["10,2.5,x", '11,"2.5\n",x']
    with pytest.raises(UserError, match=r't.csv, line 15: .*column "a"'):
        read(tmp_path, lines)


def test_stray_quotes_beside_notes_of_many_lines_are_refused_too(tmp_path):
    lines = with_stray(100, 101, 200, 230)
    for row in range(300, 350):
        lines[row] = f'{row},1.5,"two, or\nmore, lines,\nof text"'
    with pytest.raises(UserError, match=r"t.csv, line 102: .* rows"):
        read(tmp_path, lines)


def test_the_only_row_may_have_swallowed_the_others(tmp_path):
    with pytest.raises(UserError, match=r't.csv, line 2: .*column "note"'):
        read(tmp_path, ['1,2,"x', '3,4,y"'])


def test_notes_of_many_lines_are_read(tmp_path):
    lines = list(ROWS)
    for row in range(300, 350):
        lines[row] = f'{row},1.5,"two, or\nmore, lines,\nof ""text"""'
    source = read(tmp_path, lines)
    assert source.num_rows == 400
    assert source.read_column("note")[320].as_py() == 'two, or\nmore, lines,\nof "text"'


def test_quoted_cells_are_read(tmp_path):
    source = read(tmp_path, [f'"{i}","1.5","x, ""y"""' for i in range(9)], '"time","a","note"')
    assert columns.read_numbers(source, "a", "x").tolist() == [1.5] * 9


@given(st.lists(st.text('a",\n\r', max_size=5), min_size=1, max_size=4))
def test_what_is_closed_is_never_called_open(tmp_path_factory, cells):
    path = tmp_path_factory.getbasetemp() / "closed.csv"
    quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
    path.write_bytes(b"a\n" + quoted.encode())
    assert not csv.is_open(path, cells[-1], ",")
    path.write_bytes(b"a\n" + quoted.encode()[:-1])
    assert csv.is_open(path, cells[-1], ",")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_an_empty_line_of_one_column_is_a_missing_value(tmp_path, end):
    source = read(tmp_path, ["1", "", "2", "bad", "", "4", "", ""], header="a", end=end)
    assert source.read_column("a").to_pylist() == ["1", "", "2", "bad", "", "4"]
    with pytest.raises(UserError, match=r't.csv, line 5, column "a": "bad"'):
        columns.read_numbers(source, "a", "data.inputs")
    source = read(tmp_path, ["", "1", "", "2"], header="a", end=end)
    np.testing.assert_array_equal(columns.read_numbers(source, "a", "x"), [np.nan, 1, np.nan, 2])


def test_an_empty_line_of_several_columns_is_nothing(tmp_path):
    source = read(tmp_path, ["1,2", "", "3,4"], header="a,b")
    assert source.num_rows == 2


BLOCK = "Tester 5000\nCell;A7\nStart;2024-01-01 12:00\n\n"
TABLE = "time;voltage;current\ns;V;A\n0;3,5;1\n1;3,6;1\n2;bad;1\n"


def test_a_block_above_the_names_and_a_row_of_units_are_recognised(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(BLOCK + TABLE)
    source = read_file(path, name="t.csv")
    assert source.column_names == ("time", "voltage", "current")
    (file,) = source.files
    assert file.units == {"time": "s", "voltage": "V", "current": "A"}
    assert file.format == "CSV, semicolons, decimal comma"
    assert [note[:40] for note in file.notes] == [
        "lines 1 to 4 are above the names (data.s",
        "a row of units is below the names: time ",
    ]
    assert columns.read_numbers(source, "time", "x").tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r't.csv, line 9, column "voltage": "bad"'):
        columns.read_numbers(source, "voltage", "x")


def test_a_file_without_names_is_read_by_the_setting(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("0.5,2\n1.5,3\n2.5,4\n")
    with pytest.raises(NoNamesError, match=r'line 1 should name .* set data.names = "none"'):
        read_file(path, name="t.csv")
    source = read_file(path, name="t.csv", options=ReadOptions(names="none"))
    assert source.column_names == ("V1", "V2")
    assert columns.read_numbers(source, "V1", "x").tolist() == [0.5, 1.5, 2.5]
    source = read_file(path, name="t.csv", options=ReadOptions(names=("a", "b"), skip_rows=1))
    assert columns.read_numbers(source, "b", "x").tolist() == [3, 4]
    with pytest.raises(UserError, match=r"data.names is 1 name; it should be 2 names"):
        read_file(path, name="t.csv", options=ReadOptions(names=("a",)))
    path.write_text("0,1\n0.5,2\n1.5,bad\n")  # numbered columns may be names
    with pytest.raises(UserError, match="line 1 should name") as caught:
        read_file(path, name="t.csv")
    assert not isinstance(caught.value, NoNamesError)
    source = read_file(path, name="t.csv", options=ReadOptions(names="none"))
    with pytest.raises(UserError, match=r't.csv, line 3, column "V2": "bad"'):
        columns.read_numbers(source, "V2", "x")


@pytest.mark.parametrize(
    "line",
    [
        "5.1,3.5,setosa",
        "2024-03-01 00:00,3.5,1",
        "1.5,13:05:00,ok",
        "1,,setosa",
        "0.1,0.2,0.3",
        "7,7,setosa",
    ],
)
def test_a_first_line_of_values_is_no_line_of_names(tmp_path, line):
    path = tmp_path / "t.csv"
    path.write_text("\n".join([line, line, "4.9,3.0,virginica", ""]))
    with pytest.raises(NoNamesError, match=r'line 1 should name .* set data.names = "none"'):
        read_file(path, name="t.csv")
    source = read_file(path, name="t.csv", options=ReadOptions(names="none"))
    assert source.num_rows == 3
    assert inspect_path(str(path)).proposal.config["data"]["names"] == "none"


@pytest.mark.parametrize(
    "line", ["country,1990,1991", "0,kind,x", "1990,2024 total,3rd", "a,b,setosa"]
)
def test_some_names_may_be_numbers(tmp_path, line):
    path = tmp_path / "t.csv"
    path.write_text("\n".join([line, "5.1,3.5,setosa", "4.9,3.0,virginica", ""]))
    assert read_file(path, name="t.csv").column_names == tuple(line.split(","))


@pytest.mark.parametrize(
    ("above", "names"),
    [
        ("# made by a logger\n#\n\n", ("V1", "V2", "V3")),
        ("% three words here\n% name: x\n", ("V1", "V2", "V3")),
        ("# 1:Date 2:Time 3:CO2\n", ("Date", "Time", "CO2")),
        ("# a logger\n% day clock value\n", ("day", "clock", "value")),
        ("#YY HS TMP\n#yr m degC\n", ("YY", "HS", "TMP")),
        ("# a\n#YY HS TMP\n#yr x y\n", ("YY", "HS", "TMP")),
        ("#YY HS TMP\n", ("YY", "HS", "TMP")),
        ("# a logger\nday  clock value\n", ("day", "clock", "value")),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_comments_stand_above_cells_with_spaces_between_them(tmp_path, above, names, end):
    path = tmp_path / "t.dat"
    rows = "2012  11 17.5\n 2012 12  18.5\n2012 12 19.5\n"
    path.write_text((above + rows).replace("\n", end), newline="")
    options = ReadOptions(names="none" if names[0] == "V1" else None)
    source = read_file(path, name="t.dat", options=options)
    assert source.column_names == names
    assert source.files[0].format == "CSV, spaces"
    assert source.num_rows == 3
    assert columns.read_numbers(source, names[2], "x").tolist() == [17.5, 18.5, 19.5]
    if names[0] == "V1":
        with pytest.raises(NoNamesError):
            read_file(path, name="t.dat")
    elif not above.endswith("value\n") or above.startswith("# a logger\n%"):
        source = read_file(path, name="t.dat", options=ReadOptions(names=("a", "b", "c")))
        assert (source.column_names, source.num_rows) == (("a", "b", "c"), 3)


def test_bars_may_separate_the_cells(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("country|year|pop\nA, B|1952|8,5\nC|1957|9,5\n")
    source = read_file(path, name="t.csv")
    assert source.files[0].format == "CSV, bars, decimal comma"
    assert source.column_names == ("country", "year", "pop")
    assert source.read_column("country").to_pylist() == ["A, B", "C"]
    path.write_text('a|b|c\n1|"2|3\n4|5"|6\n7|8|9\n')
    with pytest.raises(UserError, match="line 2: the quote that opens here"):
        read_file(path, name="t.csv")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a\tb\n1\t0.5\tx\n2\t1.5\ty\n", ("column_1", "a", "b")),
        ("a b\nr1 0.5 2\nr2 1.5 3\nr3 2.5 4\n", ("column_1", "a", "b")),
        ("a,b\nfirst,0.5,2\nsecond,1.5,3\n", ("column_1", "a", "b")),
        ("a;b\n1;0.5;\n2;1.5;\n", ("a", "b")),  # an empty cell at the end
    ],
)
def test_r_names_no_column_of_row_names(tmp_path, text, names):
    (tmp_path / "t.txt").write_text(text)
    assert read_file(tmp_path / "t.txt", name="t.txt").column_names == names


def test_a_cell_more_may_be_a_decimal_comma(tmp_path):
    (tmp_path / "t.csv").write_text("t,a\n0,1,5\n1,2,5\n")
    with pytest.raises(UserError, match="line 2: has 3 cells where the header has 2"):
        read_file(tmp_path / "t.csv", name="t.csv")


def test_comments_above_values_without_names_are_no_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("# made by a logger\n# in 2012\n0.5,2\n1.5,3\n")
    source = read_file(path, name="t.csv", options=ReadOptions(names="none"))
    assert source.column_names == ("V1", "V2")
    assert source.num_rows == 2


@pytest.mark.parametrize("names", ["x  y\n", ""])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_spaces_may_separate_the_cells(tmp_path, names, end):
    path = tmp_path / "t.txt"
    text = names + "  1.5   2 \n 2.5 NaN\n3.5  4\n"
    path.write_bytes(text.replace("\n", end).encode())
    options = ReadOptions(names=None if names else "none")
    source = read_file(path, name="t.txt", options=options)
    assert source.files[0].format == "CSV, spaces"
    assert source.column_names == (("x", "y") if names else ("V1", "V2"))
    first, second = source.column_names
    assert columns.read_numbers(source, first, "x").tolist() == [1.5, 2.5, 3.5]
    assert columns.read_numbers(source, second, "x")[[0, 2]].tolist() == [2, 4]
    (opened,) = CsvReader().inspect(InputFile(path, "t.txt", path.read_bytes()), options)
    assert opened.columns == source.column_names
    path.write_bytes(text.replace("4\n", "bad\n").replace("\n", end).encode())
    with pytest.raises(UserError, match=rf't.txt, line \d, column "{second}": "bad"'):
        columns.read_numbers(read_file(path, name="t.txt", options=options), second, "x")


@pytest.mark.parametrize(
    "text",
    [
        "name of it\n1\n2\n",
        "when\n2020-01-01 00:00:00\n2020-01-01 01:00:00\n",
        "a b,c\n1 2,3\n2 3,4\n",
    ],
)
def test_other_spaces_are_part_of_cells(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    assert "spaces" not in read_file(path, name="t.csv").files[0].format


def test_lines_above_the_names_can_be_counted_instead(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\nc,d\nx,y\n1,2\n")
    source = read_file(path, name="t.csv", options=ReadOptions(skip_rows=2))
    assert source.column_names == ("x", "y")
    assert source.files[0].notes == ()
    with pytest.raises(UserError, match=r"empty below line 9 \(data.skip_rows\)"):
        read_file(path, name="t.csv", options=ReadOptions(skip_rows=9))
    path.write_text("a,b\n1,2,3\n3,4\n5,6,7\n8,9\n")
    with pytest.raises(UserError, match=r"t.csv, line 2: has 3 cells .* set data.skip_rows"):
        read_file(path, name="t.csv")


def test_empty_columns_and_rows_at_the_end_are_left_out_with_a_note(tmp_path):
    source = read(tmp_path, ["1,2,,", "3,4,,", ",,,", ", ,,"], header="a,b,,")
    assert source.column_names == ("a", "b")
    assert source.num_rows == 2
    assert source.files[0].notes == (
        "2 empty columns left out",
        "2 empty rows at the end left out",
    )
    source = read(tmp_path, ["1,2,", "3,4,"], header="a,b")
    assert source.column_names == ("a", "b")
    source = read(tmp_path, ["1,2,x", ",,", "3,4,"], header="a,b,")
    assert source.column_names == ("a", "b", "column_3")  # a value without a name stays
    assert source.num_rows == 3


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-16-le", "UTF8"])
def test_other_encodings_are_read_by_name(tmp_path, encoding):
    path = tmp_path / "t.csv"
    path.write_bytes("Zeit;Größe\n0;1,5\n1;bad\n".encode(encoding))
    if encoding != "UTF8":
        with pytest.raises(UserError, match=r"t.csv.*data.encoding"):
            read_file(path, name="t.csv")
    source = read_file(path, name="t.csv", options=ReadOptions(encoding=encoding))
    assert source.column_names == ("Zeit", "Größe")
    with pytest.raises(UserError, match=r't.csv, line 3, column "Größe": "bad"'):
        columns.read_numbers(source, "Größe", "x")


def test_text_that_is_not_of_the_encoding_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("a;Größe\n0;1\n".encode("cp1252"))
    for encoding in ("ascii", "utf-16"):
        with pytest.raises(UserError, match=rf"^{path}: is not {encoding} text \(data.encoding"):
            read_file(path, name="t.csv", options=ReadOptions(encoding=encoding))
    path.write_bytes("a,b\n0,1,2\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"^t.csv, line 2: has 3 cells"):
        read_file(path, name="t.csv", options=ReadOptions(encoding="utf-16"))
    with pytest.raises(UserError, match=r'data.encoding = "klingon" is no encoding'):
        configs.load({"data": {"encoding": "klingon"}})


@pytest.mark.parametrize("cell", ["1 234,5", "1'234.5", "1\u202f234,5", "1.234.567,8"])
def test_thousands_separators_are_refused_with_the_fix(tmp_path, cell):
    source = read(tmp_path, [f"0;{cell}", "1;2"], header="t;a")
    assert columns.is_numeric(source, "a")
    with pytest.raises(UserError, match=r't.csv, line 2, column "a": .*thousands separators; writ'):
        columns.read_numbers(source, "a", "x")


@pytest.mark.parametrize("padding", ["", ",,,,,,"])
def test_the_export_of_a_cycler_is_read_as_it_is(tmp_path, padding):
    block = ["Test ID,585", "Cell,HG2 7", "Capacity, 3", "", "Started,11/7/2018 10:49:25 AM"]
    names = "Stamp,Step,State,Clock,Program,Voltage,Current,Temperature,"
    units = ",,,,,[V],[A],[C],"
    rows = [f"11/7/2018 5:0{i}:07 PM,3,DCH,25:0{i}:08.5,P1,3.{i},-1.5,25.0," for i in range(5)]
    lines = [line and line + padding for line in block] + [names, units, *rows]
    (tmp_path / "t.csv").write_text("\n".join(["", *lines]))
    source = read_file(tmp_path / "t.csv", name="t.csv")
    assert source.column_names == tuple(names.rstrip(",").split(","))
    assert source.num_rows == 5
    assert source.files[0].units == {"Voltage": "V", "Current": "A", "Temperature": "C"}
    assert source.files[0].notes[0] == "lines 1 to 6 are above the names (data.skip_rows = 6)"
    assert columns.read_times(source, "Clock", None).tolist() == [
        90008.5 + 60 * i for i in range(5)
    ]
    stamps = columns.read_times(source, "Stamp", "%m/%d/%Y %I:%M:%S %p")
    assert np.diff(stamps).tolist() == [60e6] * 4
