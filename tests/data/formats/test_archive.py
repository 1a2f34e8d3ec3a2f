"""Files of the archives of time series classification."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.base.errors import UserError
from slipstream.config import Data
from slipstream.data.columns import read_numbers
from slipstream.data.files import read_tables
from slipstream.data.table import DataTable

UNIVARIATE = """# a comment
% another
@problemName Waves
@timeStamps false
@univariate true
@classLabel true up down

@data
1,2,3:up
# in between
4,?,6:down

7,8:up
"""
MULTIVARIATE = """@problemName Two
@dimensions 2
@classLabel true a b
@data
1,2:3,4:a
5:6:b
"""
FLAT = """% a comment
@relation waves
@attribute att1 numeric
@attribute 'att 2' REAL
@attribute att3 real
@attribute target {1, 2}
@data
1,2,3,1
% in between
4,5,?,2
"""
RELATIONAL = r"""@relation two
@attribute both relational
  @attribute t0 numeric
  @attribute t1 numeric
@end both
@attribute class {a,b}
@data
'1,2\n3,4',a
'5,6\n7,?',b
"""


def read(tmp_path: Path, text: str, ending: str = "ts", **settings: Any) -> DataTable:
    path = tmp_path / f"cases.{ending}"
    path.write_text(text)
    (table,) = read_tables(Data(path=str(path), **settings), None)
    return table


def list_values(table: DataTable, name: str) -> list[float]:
    return read_numbers(table, name, "data.inputs").tolist()


def test_a_case_per_line_is_a_series_with_its_label(tmp_path: Path) -> None:
    table = read(tmp_path, UNIVARIATE)

    assert table.read_column("series").to_pylist() == list("11122233")
    assert table.read_column("label").to_pylist() == ["up"] * 3 + ["down"] * 3 + ["up"] * 2
    np.testing.assert_array_equal(list_values(table, "value"), [1, 2, 3, 4, np.nan, 6, 7, 8])
    assert table.files[0].format == "series archive (.ts)"


def test_dimensions_are_the_columns_of_a_series(tmp_path: Path) -> None:
    table = read(tmp_path, MULTIVARIATE)

    assert list_values(table, "dim_1") == [1, 2, 5]
    assert list_values(table, "dim_2") == [3, 4, 6]
    assert table.read_column("label").to_pylist() == ["a", "a", "b"]


def test_a_number_to_predict_is_a_target(tmp_path: Path) -> None:
    table = read(tmp_path, "@targetLabel true\n@data\n1,2:0.5\n3,4:1.5\n")

    assert list_values(table, "target") == [0.5, 0.5, 1.5, 1.5]


def test_cases_may_have_no_label(tmp_path: Path) -> None:
    table = read(tmp_path, "@classLabel false\n@data\n1,2\n3,4,5\n")

    assert table.column_names == ("series", "value", "file")
    assert list_values(table, "value") == [1, 2, 3, 4, 5]


def test_attributes_side_by_side_are_a_series(tmp_path: Path) -> None:
    table = read(tmp_path, FLAT, "arff")

    assert list_values(table, "value") == [1, 2, 3, 4, 5]
    assert table.read_column("label").to_pylist() == ["1", "1", "1", "2", "2"]


def test_an_attribute_may_hold_several_series(tmp_path: Path) -> None:
    table = read(tmp_path, RELATIONAL, "arff")

    assert list_values(table, "dim_1") == [1, 2, 5, 6]
    np.testing.assert_array_equal(list_values(table, "dim_2"), [3, 4, 7, np.nan])
    assert table.read_column("label").to_pylist() == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("text", "ending", "message"),
    [
        (UNIVARIATE.replace("4,?", "4,x"), "ts", 'line 11: "x" is not a number'),
        (MULTIVARIATE.replace("5:6:b", "5:b"), "ts", "line 6: has 1 dimension, but.* 2"),
        (UNIVARIATE.replace("@data", ""), "ts", "line 9.*@data is expected"),
        ("@problemName x\n@data\n", "ts", "no cases below @data"),
        ("@timeStamps true\n@data\n(1,2):a\n", "ts", "pairs of a time and a value"),
        ("@relation x\n@data\n1,2\n", "arff", "no @attribute above @data"),
        ("@attribute a real\n@data\n{0 1}\n", "arff", "line 3: has a sparse case"),
        ("@attribute a real\n@data\n1,2\n", "arff", "cannot be read as ARFF"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, ending: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text, ending)


def test_a_folder_of_archives_needs_the_layout(tmp_path: Path) -> None:
    (tmp_path / "cases.ts").write_text(UNIVARIATE)

    with pytest.raises(UserError, match=r'data\.layout = "wide"'):
        read_tables(Data(path=str(tmp_path)), None)
    (table,) = read_tables(Data(path=str(tmp_path), layout="wide"), None)

    assert table.num_rows == 8


def test_series_of_several_files_are_named_after_their_file(tmp_path: Path) -> None:
    paths = [tmp_path / "X_TRAIN.ts", tmp_path / "X_TEST.ts"]
    for path in paths:
        path.write_text(MULTIVARIATE)

    (table,) = read_tables(Data(path=[str(path) for path in paths]), None)

    names = ["X_TRAIN.ts/1", "X_TRAIN.ts/2", "X_TEST.ts/1", "X_TEST.ts/2"]
    assert list(dict.fromkeys(table.read_column("series").to_pylist())) == names
