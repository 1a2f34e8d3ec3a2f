"""Workbooks: sheets, dates, merged names, formulas, and what cannot be read."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.base.errors import NoNamesError
from slipstream.data import columns
from slipstream.data.files import EMPTY_NOTE, read_file, read_files, read_parts, read_tables
from slipstream.data.formats import isolated
from slipstream.data.formats.reader import ReadOptions
from slipstream.data.table import find_duplicates
from slipstream.tools.inspection import inspect_path
from tests.workbooks import Fault, Formula, write_workbook

ROWS = [["t", "V", "note"], *([i, 3 + i / 7, "x"] for i in range(5))]
DATES = [datetime.datetime(2024, 2, 28, 23, 59, second) for second in (0, 1, 2)]


def read(path, **options):
    return read_file(path, name=path.name, options=ReadOptions(**options))


def numbers(table, name):
    return columns.read_numbers(table, name, "x")


def test_a_sheet_is_a_table_with_all_digits(tmp_path):
    table = read(write_workbook(tmp_path / "t.xlsx", {"Data": ROWS, "Empty": []}))
    assert table.column_names == ("t", "V", "note")
    assert numbers(table, "V").tolist() == [3 + i / 7 for i in range(5)]
    assert table.files[0].format == "Excel, sheet Data"
    assert table.files[0].notes == ()


def test_titles_units_and_empty_cells_around_the_table_are_recognised(tmp_path):
    rows = [["Cell A7"], [], [None, "t", "V", None], [None, "s", "V"], [None, 0, 1.5], [None, 1, 2]]
    table = read(write_workbook(tmp_path / "t.xlsx", {"Data": [*rows, [], [None, None, " "]]}))
    assert table.column_names == ("t", "V")
    assert numbers(table, "V").tolist() == [1.5, 2]
    (file,) = table.files
    assert file.units == {"t": "s", "V": "V"}
    assert file.notes[0] == "rows 1 to 2 are above the names (data.skip_rows = 2)"
    bad = [*rows[:5], [None, 1, "bad"]]
    table = read(write_workbook(tmp_path / "t.xlsx", {"Data": bad}))
    with pytest.raises(UserError, match=r't.xlsx, row 6, column "V": "bad" is not a number'):
        numbers(table, "V")
    table = read(write_workbook(tmp_path / "t.xlsx", {"Data": [["a"], ["b"], [1]]}), skip_rows=1)
    assert table.column_names == ("b",)


def test_merged_names_are_joined(tmp_path):
    rows = [["t", "U", None, "I", None], [None, "min", "max", "min", "max"], [0, 1, 2, 3, 4]]
    path = tmp_path / "t.xlsx"
    write_workbook(path, {"Data": [*rows, [1, 2, 3, 4, 5]]}, merged=["B1:C1", "D1:E1", "A1:A2"])
    table = read(path)
    assert table.column_names == ("t", "U min", "U max", "I min", "I max")
    assert numbers(table, "I max").tolist() == [4, 5]


@pytest.mark.parametrize("since_1904", [False, True])
def test_dates_are_dates_in_both_calendars(tmp_path, since_1904):
    rows = [["when", "a"], *([date, i] for i, date in enumerate(DATES))]
    table = read(write_workbook(tmp_path / "t.xlsx", {"Data": rows}, since_1904=since_1904))
    got = columns.read_times(table, "when", None).astype("datetime64[us]").tolist()
    assert got == DATES


@pytest.mark.parametrize("since_1904", [False, True])
def test_dates_and_times_of_day_in_two_columns_are_added(tmp_path, since_1904):
    clock = [datetime.time(18), datetime.time(18, 30)]
    rows = [["Date", "Time"], *([datetime.datetime(2004, 3, 10), time] for time in clock)]
    path = write_workbook(tmp_path / "t.xlsx", {"Data": rows}, since_1904=since_1904)
    data = configs.load({"data": {"path": str(path), "time": ["Date", "Time"]}}).data
    (table,) = read_tables(data, None)
    got = columns.read_times(table, "Date Time", None).astype("datetime64[us]").astype(str)
    assert [time[:19] for time in got] == ["2004-03-10T18:00:00", "2004-03-10T18:30:00"]


def test_formulas_are_their_stored_values_and_faults_are_missing(tmp_path):
    cells = [Formula("1/3", 1 / 3), Fault("#DIV/0!"), 2 / 3, "n/a", None, "no data", True]
    table = read(write_workbook(tmp_path / "t.xlsx", {"D": [["a", "b"], *([c, 1] for c in cells)]}))
    with pytest.raises(UserError, match=r't.xlsx, row 7, column "a": "no data" is not a number'):
        numbers(table, "a")
    table = read(tmp_path / "t.xlsx", na=("no data",))
    wanted = [1 / 3, np.nan, 2 / 3, np.nan, np.nan, np.nan, 1]
    np.testing.assert_array_equal(numbers(table, "a"), wanted)


def test_several_sheets_are_several_series(tmp_path):
    sheets = {"Cell 1": ROWS, "Cell 2": ROWS[:4], "Empty": [], "Lists": ROWS}
    path = write_workbook(tmp_path / "t.xlsx", sheets, hidden=["Lists"])
    tables = read_parts(path, name="t.xlsx", options=ReadOptions(sheets=("*",)))
    assert [table.name for table in tables] == ["t.xlsx/Cell 1", "t.xlsx/Cell 2"]
    assert [table.num_rows for table in tables] == [5, 3]
    assert tables[0].files[0].notes == ("left out, without rows: Empty",)
    assert find_duplicates(tables) == []
    assert read(path, sheets=("Lists",)).num_rows == 5
    assert read(path, sheets=("*2",)).num_rows == 3
    data = configs.load({"data": {"path": str(path), "sheet": ["Cell 2", "Cell 1"]}}).data
    assert [table.num_rows for table in read_tables(data, None)] == [3, 5]
    with pytest.raises(UserError, match=r't.xlsx: has several sheets \("Cell 1", "Cell 2"\); set'):
        read(path)
    with pytest.raises(
        UserError, match=r'has no sheet "Cell1" \(data.sheet\); did you mean "Cell 1"'
    ):
        read(path, sheets=("Cell1",))
    with pytest.raises(UserError, match=r't.xlsx: sheet "Empty" is empty'):
        read(path, sheets=("Empty",))


def test_what_cannot_be_read_is_named_with_the_fix(tmp_path):
    path = tmp_path / "t.xlsx"
    protected = b"\xd0\xcf\x11\xe0" + b"\0" * 600 + "EncryptedPackage".encode("utf-16-le")
    path.write_bytes(protected)
    with pytest.raises(UserError, match=r"t.xlsx: is protected by a password; save it without one"):
        read(path)
    path.write_bytes(protected[:600])
    with pytest.raises(UserError, match=r"is a workbook of the old format; rename it to .xls"):
        read(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(
        UserError, match=r"t.xlsx: is a text file, not a workbook; rename it to .csv"
    ):
        read(path)
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(UserError, match=r"t.xlsx: cannot be read as a workbook: "):
        read(path)
    for sheets, match in (
        ({"A": [], "B": []}, r't.xlsx: every sheet is empty \("A", "B"\)'),
        ({"A": [["a", "b"]]}, r't.xlsx: sheet "A" has no rows below the names'),
        ({"A": [[1, 2], [3, 4]]}, r't.xlsx: row 1 of sheet "A" should name the columns'),
    ):
        with pytest.raises(UserError, match=match):
            read(write_workbook(path, sheets))


def test_a_sheet_without_names_takes_them_from_the_settings(tmp_path):
    start = datetime.datetime(2024, 1, 1)
    hours = [start + datetime.timedelta(hours=hour) for hour in range(200)]
    rows = [[time, 1.5 + time.hour, 7.25 - i % 5] for i, time in enumerate(hours)]
    path = write_workbook(tmp_path / "t.xlsx", {"Data": rows})
    with pytest.raises(NoNamesError, match=r'row 1 of sheet "Data" .* set data.names = "none"'):
        read(path)
    table = read(path, names="none")
    assert table.column_names == ("V1", "V2", "V3")
    assert numbers(table, "V3").tolist() == [row[2] for row in rows]
    assert read(path, names=("t", "a", "b")).column_names == ("t", "a", "b")
    with pytest.raises(UserError, match=r"data.names is 1 name; it should be 3 names"):
        read(path, names=("a",))
    data = inspect_path(str(path)).proposal.config["data"]
    assert (data["names"], data["time"]) == ("none", "V1")


def test_a_workbook_without_rows_is_left_out_of_a_folder(tmp_path):
    write_workbook(tmp_path / "a.xlsx", {"Data": ROWS})
    write_workbook(tmp_path / "b.xlsx", {"Data": ROWS[:1]})
    (table,) = read_files([str(tmp_path)])
    assert [file.name for file in table.files] == ["a.xlsx", "b.xlsx"]
    assert table.files[1].notes == (EMPTY_NOTE,)


def test_a_sheet_with_a_series_per_row_needs_no_names(tmp_path):
    path = write_workbook(tmp_path / "t.xlsx", {"Data": [[1, 0.5, 2.5], [2, 1.5, 3.5]]})
    table = read(path, is_wide=True)
    assert table.num_rows == 2
    assert numbers(table, table.column_names[2]).tolist() == [2.5, 3.5]


def test_a_missing_extra_is_named_with_the_command(tmp_path, monkeypatch):
    path = write_workbook(tmp_path / "t.xlsx", {"Data": ROWS})
    monkeypatch.setitem(sys.modules, "fastexcel", None)
    with pytest.raises(UserError, match=r't.xlsx: .* read it: pip install "slipstream\[excel\]"'):
        read(path)


def replace_sheet(path, change):
    """Change the XML of the first sheet of a workbook."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, change(content) if name.endswith("sheet1.xml") else content)
    return path


def test_a_cell_far_away_ends_another_process(tmp_path):
    """All cells in between would take 1.7 TB; the library ends the process that asks for it."""
    path = write_workbook(tmp_path / "t.xlsx", {"Data": ROWS})
    replace_sheet(path, lambda text: text.replace(b'r="C6"', b'r="XFD1048576"'))
    with pytest.raises(UserError) as caught:
        read(path)
    assert f"{path}: cannot be read as a workbook: the process that reads it ended by" in str(
        caught.value
    )
    assert "needs too much memory: save it again, or export it as CSV" in str(caught.value)
    assert read(write_workbook(tmp_path / "t.xlsx", {"Data": ROWS})).num_rows == 5


def test_what_the_library_prints_is_a_part_of_the_error(tmp_path, capfd):
    path = write_workbook(tmp_path / "t.xlsx", {"Data": ROWS})
    replace_sheet(path, lambda text: re.sub(rb"<sheetData>.*</sheetData>", b"", text))
    with pytest.raises(UserError) as caught:
        read(path)
    printed = "'worksheet' not a valid worksheet"
    said = f'{path}: sheet "Data" is empty (the library that reads it reports: {printed})'
    assert str(caught.value) == said
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_threads_read_at_the_same_time(tmp_path):
    paths = [write_workbook(tmp_path / f"{i}.xlsx", {"Data": ROWS[: i + 2]}) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda path: read(path).num_rows, paths)) == [1, 2, 3, 4]


FORKS = """
import os, sys
from pathlib import Path
from slipstream.data.files import read_file

def count():
    return [read_file(Path(path), name=path).num_rows for path in sys.argv[1:]]

counts, forks = count(), []
for _ in range(2):
    if not (child := os.fork()):
        os._exit(count() != counts)
    forks.append(child)
assert count() == counts == [1, 2, 3, 4]
assert [os.waitpid(child, 0)[1] for child in forks] == [0, 0]
"""


@pytest.mark.slow
def test_a_fork_does_not_talk_to_the_process_that_its_parent_has_started(tmp_path):
    """In a process without other threads: a fork of many may inherit a lock that nobody opens."""
    paths = [write_workbook(tmp_path / f"{i}.xlsx", {"Data": ROWS[: i + 2]}) for i in range(4)]
    subprocess.run([sys.executable, "-c", FORKS, *map(str, paths)], check=True)


def test_a_process_that_has_ended_meanwhile_is_started_again(tmp_path):
    path = write_workbook(tmp_path / "t.xlsx", {"Data": ROWS})
    assert read(path).num_rows == 5
    for child in isolated._waiting[os.getpid()]:
        child.process.kill()
        child.process.wait()
    assert read(path).num_rows == 5


def test_the_decimal_mark_of_text_is_the_configured_one(tmp_path):
    write_workbook(tmp_path / "t.xlsx", {"Data": [["t", "v"], *([i, f"{i},5"] for i in range(4))]})
    (table,) = read_tables(configs.Data(path=str(tmp_path / "t.xlsx"), decimal=","), None)
    assert columns.read_numbers(table, "v", "data.inputs").tolist() == [0.5, 1.5, 2.5, 3.5]
