"""Cells that mean "missing" by `data.na`, and times over several columns."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.data import columns, files, labels

NA = [-200, "no data", "9999.9"]


def read(table=None, **settings):
    return files.read_tables(configs.load({"data": settings}).data, table)[0]


def numbers(table, name):
    return columns.read_numbers(table, name, "data.inputs")


@pytest.mark.parametrize("decimal", [".", ","])
def test_marks_in_a_csv_are_missing_however_they_are_written(tmp_path, decimal):
    cells = ["1.5", "-200", "-200.0", " no data ", "9999.90", "-2.00E+02", "", "n/a"]
    path = tmp_path / "t.csv"
    path.write_text("".join(f"{cell}\tx\n" for cell in ["a", *cells]).replace(".", decimal))
    table = read(path=str(path), na=NA)
    np.testing.assert_array_equal(numbers(table, "a"), [1.5, *[np.nan] * 7])
    assert files.read_tables(configs.load({"data": {"path": str(path)}}).data, None)


def test_marks_in_typed_columns_and_streams_are_missing(tmp_path):
    table = pa.table({"i": [1, -200, 3], "f": [-200.0, 2.5, 9999.9], "s": ["x", "no data", "y"]})
    pa.parquet.write_table(table, tmp_path / "t.parquet")
    for source in (read(table, na=NA), read(path=str(tmp_path / "t.parquet"), na=NA)):
        np.testing.assert_array_equal(numbers(source, "i"), [1, np.nan, 3])
        np.testing.assert_array_equal(numbers(source, "f"), [np.nan, 2.5, np.nan])
        assert labels.read_labels(source, "s", "data.targets")[0].tolist() == [0, -1, 1]
        with pytest.raises(UserError, match=r'row 2, column "s": is empty'):
            columns.read_codes(source, "s", "data.id")


def test_class_numbers_are_no_marks():
    source = read({"y": ["b", "a", "-1"]}, na=[0, -1])
    (encoded,), names = labels.encode_labels([source], "y", "data.targets")
    assert names == ("a", "b")
    assert numbers(encoded, "y").tolist() == [1, 0, -1]


def test_a_bad_cell_beside_marks_is_still_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\nno data,3\nbad,4\n")
    with pytest.raises(UserError, match=r't.csv, line 4, column "a": "bad" is not a number'):
        numbers(read(path=str(tmp_path / "t.csv"), na=NA), "a")


def times(table, name="Date Time", time_format=None):
    return columns.read_times(table, name, time_format).astype("datetime64[us]").astype(str)


def test_times_over_two_columns_are_joined(tmp_path):
    (tmp_path / "t.csv").write_text("Date;Time;a\n10/03/2004;18.00.00;1\n 10/03/2004;19.30.00;2\n")
    table = read(path=str(tmp_path / "t.csv"), time=["Date", "Time"])
    got = times(table, time_format="%d/%m/%Y %H.%M.%S")
    assert got.tolist() == ["2004-03-10T18:00:00.000000", "2004-03-10T19:30:00.000000"]
    with pytest.raises(UserError, match=r'line 2, column "Date Time".*%d/%m/%Y %H.%M.%S'):
        times(table)


def test_times_over_columns_of_numbers_are_joined(tmp_path):
    rows = {"year": [2010, 2010], "month": [1.0, 12.0], "day": [1, 31], "hour": [0, 23]}
    (tmp_path / "t.csv").write_text("year,month,day,hour\n2010,1,1,0\n2010,12,31,23\n")
    for source in (read(rows, time=list(rows)), read(path=str(tmp_path / "t.csv"), time=[*rows])):
        got = times(source, "year month day hour", "%Y %m %d %H")
        assert got.tolist() == ["2010-01-01T00:00:00.000000", "2010-12-31T23:00:00.000000"]


def test_dates_and_times_of_day_are_added():
    clock, day = datetime.time(18, 30), datetime.date(2004, 3, 10)
    as_date = datetime.datetime(1899, 12, 31, 18, 30)
    for second in ([clock], [as_date], [datetime.timedelta(hours=18.5)]):
        table = read({"Date": [day], "Time": second}, time=["Date", "Time"])
        assert times(table).tolist() == ["2004-03-10T18:30:00.000000"]
    with pytest.raises(UserError, match=r'"Date" holds dates, but "Time".* make both of them text'):
        times(read({"Date": [day], "Time": ["18:30"]}, time=["Date", "Time"]))


def test_a_missing_part_or_column_is_refused():
    table = read({"Date": ["2004-03-10", None], "Time": ["18:30", "19:30"]}, time=["Date", "Time"])
    with pytest.raises(UserError, match=r'row 2, column "Date Time": the time is missing'):
        times(table)
    with pytest.raises(UserError, match=r'has no column "Tiem" \(data.time\); did you mean "Time"'):
        read({"Date": ["2004-03-10"], "Time": ["18:30"]}, time=["Date", "Tiem"])
