"""Tables with a series per row or per column become long tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.base.errors import UserError
from slipstream.config import Data, load
from slipstream.data.columns import read_numbers
from slipstream.data.dataset import load_dataset
from slipstream.data.files import read_tables
from slipstream.data.table import DataTable

WIDE = "name,kind,V1,V2,V3\na,x,1,2,3\nb,y,4,5,\nc,x,6,,8\n"


def read(tmp_path: Path, text: str, ending: str = "csv", **settings: Any) -> DataTable:
    path = tmp_path / f"table.{ending}"
    path.write_text(text)
    (table,) = read_tables(Data(path=str(path), **settings), None)
    return table


def list_values(table: DataTable, name: str = "value") -> list[float]:
    return read_numbers(table, name, "data.inputs").tolist()


def list_cells(table: DataTable, name: str) -> list[Any]:
    return list(table.read_column(name).to_pylist())


def test_a_row_becomes_a_series_that_ends_with_its_last_value(tmp_path: Path) -> None:
    table = read(tmp_path, WIDE, layout="wide", id="name", values="V1:")

    assert table.column_names == ("name", "kind", "value", "file")
    assert list_cells(table, "name") == list("aaabbccc")
    assert list_cells(table, "kind") == list("xxxyyxxx")
    expected = [1, 2, 3, 4, 5, 6, np.nan, 8]
    np.testing.assert_array_equal(list_values(table), expected)
    assert table.files[0].notes == ("a series per row: 3 series of 2 to 3 values",)


def test_without_an_id_a_series_has_the_number_of_its_row(tmp_path: Path) -> None:
    table = read(tmp_path, WIDE, layout="wide")

    assert list_cells(table, "series") == list("11122333")
    assert list_cells(table, "name") == list("aaabbccc")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("V2:", [2, 3, 5, np.nan, 8]),
        ("V1:V2", [1, 2, 4, 5, 6]),
        ("3:4", [1, 2, 4, 5, 6]),
        (["V3", "V1"], [3, 1, np.nan, 4, 8, 6]),
        ("V2", [2, 5]),
    ],
)
def test_values_are_a_range_of_columns_by_name_or_number(
    tmp_path: Path, values: Any, expected: list[float]
) -> None:
    table = read(tmp_path, WIDE, layout="wide", values=values)

    np.testing.assert_array_equal(list_values(table), expected)


@pytest.mark.parametrize("values", ["V9:", "9:", "V1-V2", "V3:V1", ["V1", "V9"]])
def test_a_range_that_no_columns_have_is_refused(tmp_path: Path, values: Any) -> None:
    with pytest.raises(UserError, match=r"data\.values"):
        read(tmp_path, WIDE, layout="wide", values=values)


def test_a_column_whose_name_has_a_colon_begins_a_range(tmp_path: Path) -> None:
    text = "name,00:00,00:15,00:30\na,1,2,3\nb,4,5,6\n"

    table = read(tmp_path, text, layout="wide", values="00:15:00:30")

    assert list_values(table) == [2, 3, 5, 6]


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_file_without_names_has_its_first_series_in_its_first_line(
    tmp_path: Path, ending: str
) -> None:
    text = "up,0.5,1.5,2.5\ndown,2.5,1.5,0.5\n".replace(",", "\t" if ending == "tsv" else ",")
    settings = {"task": "classify", "targets": ["column_1"], "horizon": 0}

    table = read(tmp_path, text, ending, layout="wide", values="2:", **settings)

    assert list_values(table) == [0.5, 1.5, 2.5, 2.5, 1.5, 0.5]
    assert list_cells(table, "column_1") == ["up"] * 3 + ["down"] * 3
    assert table.locate_cell(4, "value") == f'table.{ending}, line 2, value 2, column "value"'


def test_names_may_be_numbers_that_go_up(tmp_path: Path) -> None:
    table = read(tmp_path, "land,1990,1991,1992\na,1,2,3\nb,4,5,6\n", layout="wide", id="land")

    assert list_values(table) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("header", ["", "name,V1\n", "name,V1,V2,V3\n"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_rows_may_have_fewer_cells_than_others(tmp_path: Path, header: str, end: str) -> None:
    text = (header + "a,1.5\nb,2.5,3,4\nc,5,6\n").replace("\n", end)

    table = read(tmp_path, text, layout="wide", values="2:")

    assert list_values(table) == [1.5, 2.5, 3, 4, 5, 6]
    assert list_cells(table, "series") == list("122233")


def test_parquet_and_tables_of_python_are_read_alike(tmp_path: Path) -> None:
    columns = {"name": ["a", "b"], "V1": [1.0, 3.0], "V2": [2.0, None]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = Data(layout="wide", id="name")

    (stored,) = read_tables(data.model_copy(update={"path": str(tmp_path / "t.parquet")}), None)
    (passed,) = read_tables(data, columns)

    assert list_values(stored) == list_values(passed) == [1, 2, 3]
    assert list_cells(stored, "name") == list_cells(passed, "name") == ["a", "a", "b"]


def test_lists_are_series_of_several_columns() -> None:
    columns = {"load": [[1.0, 2.0], [3.0, 4.0, None]], "heat": [[5.0, 6.0], [7.0]]}

    (table,) = read_tables(Data(layout="wide"), columns)

    assert list_cells(table, "series") == list("1122")
    assert list_values(table, "load") == [1, 2, 3, 4]
    np.testing.assert_array_equal(list_values(table, "heat"), [5, 6, 7, np.nan])


def test_rows_that_are_long_already_stay_as_they_are() -> None:
    rows = {"series": ["a", "a"], "value": [1.0, 2.0]}

    (table,) = read_tables(Data(layout="wide"), rows)

    assert table.column_names == ("series", "value")


def test_marks_of_missing_values_end_a_series(tmp_path: Path) -> None:
    text = "V1,V2,V3\n1,2,-999\n3,-999,5\n"

    table = read(tmp_path, text, layout="wide", na=[-999])

    np.testing.assert_array_equal(list_values(table), [1, 2, 3, np.nan, 5])


def test_an_id_that_two_rows_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'line 4.*"x" is the name of the series of.*line 2'):
        read(tmp_path, WIDE, layout="wide", id="kind")


def test_rows_of_one_id_continue_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,V1,V2\nx,1,2\ny,3,4\n")
    (tmp_path / "b.csv").write_text("id,V1\nx,5\ny,6\n")
    (table,) = read_tables(Data(path=str(tmp_path), layout="wide", id="id"), None)

    assert list_cells(table, "id") == ["x", "x", "y", "y", "x", "y"]
    assert list_values(table) == [1, 2, 3, 4, 5, 6]


def test_a_column_becomes_a_series_from_its_first_value_to_its_last(tmp_path: Path) -> None:
    text = "time,a,b,price\n1,1,,7\n2,2,5,8\n3,,6,9\n"
    settings = {"layout": "columns", "time": "time", "values": ["a", "b"]}

    table = read(tmp_path, text, **settings)

    assert list_cells(table, "series") == ["a", "a", "b", "b"]
    assert list_values(table) == [1, 2, 5, 6]
    assert list_values(table, "time") == [1, 2, 2, 3]
    assert list_values(table, "price") == [7, 8, 8, 9]
    assert table.locate_cell(2, "value") == 'table.csv, line 3, column "value"'


def test_by_default_every_numeric_column_without_a_role_is_a_series(tmp_path: Path) -> None:
    text = "time,a,b,place\n1,1,3,x\n2,2,4,x\n"

    table = read(tmp_path, text, layout="columns", time="time")

    assert list_cells(table, "series") == ["a", "a", "b", "b"]
    assert list_cells(table, "place") == ["x"] * 4


def test_series_per_column_keep_the_ids_of_rows(tmp_path: Path) -> None:
    rows = "".join(f"{site},{t},{t + 1}\n" for site in "pq" for t in range(6))
    (tmp_path / "t.csv").write_text("site,a,b\n" + rows)
    split = {"by": "series", "val": ["p/b"], "test": ["q/*"]}
    data = {"path": str(tmp_path / "t.csv"), "layout": "columns", "id": "site", "split": split}

    dataset = load_dataset(load({"data": {**data, "context": 3, "horizon": 1}}))

    assert dataset.index.series_names == ("p/a", "q/a", "p/b", "q/b")
    assert dataset.num_windows == {"train": 3, "val": 3, "test": 6}


def test_values_need_another_layout() -> None:
    with pytest.raises(ValueError, match=r"data\.values names the columns"):
        Data(values="2:")
    with pytest.raises(ValueError, match="has no column of times"):
        Data(layout="wide", time="t")


def test_a_wide_table_trains_as_the_same_long_one() -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 40)).cumsum(axis=1)
    wide = {"id": list("abcde")} | {f"V{i}": matrix[:, i] for i in range(40)}
    long = {"id": np.repeat(list("abcde"), 40), "value": matrix.ravel()}
    settings = {"id": "id", "context": 8, "horizon": 4}

    expected = load_dataset(load({"data": settings}), long)
    result = load_dataset(load({"data": settings | {"layout": "wide"}}), wide)

    assert result.num_windows == expected.num_windows
    assert result.compute_fingerprint() == expected.compute_fingerprint()
