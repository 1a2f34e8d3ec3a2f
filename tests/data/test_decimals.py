"""Commas in numbers: decimal marks where that is certain or said, never a guess."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream import UserError
from slipstream import config as configs
from slipstream.data import columns as typed
from slipstream.data import dataset as datasets
from slipstream.data import files
from slipstream.data.roles import find_roles

AMBIGUOUS = ["900", "1,199", "850", "1,020"]


def read(tmp_path, columns, *, separator=";", decimal=None):
    """A file of these columns, as a config with this `data.decimal` reads it."""
    rows = zip(*columns.values(), strict=True)
    path = tmp_path / "t.csv"
    path.write_text("\n".join(separator.join(row) for row in (tuple(columns), *rows)) + "\n")
    data = configs.load({"data": {"path": str(path), "decimal": decimal}}).data
    return files.read_tables(data, None)[0]


def numbers(source, name="a"):
    return typed.read_numbers(source, name, "data.inputs").tolist()


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize(
    "cells", [AMBIGUOUS, ["1,199", "2,305", "10,450", "7,001"], ["900", "468,", "3", "4"]]
)
def test_a_comma_that_may_be_either_is_refused_by_line(tmp_path, separator, cells):
    source = read(tmp_path, {"a": cells, "b": list("5678")}, separator=separator)
    line = next(i for i, cell in enumerate(cells) if "," in cell) + 2
    assert typed.is_numeric(source, "a")
    with pytest.raises(UserError, match=rf't.csv, line {line}, column "a": .*data.decimal = ","'):
        numbers(source)


def test_a_setting_says_what_it_is(tmp_path):
    source = read(tmp_path, {"a": AMBIGUOUS, "b": list("5678")}, decimal=",")
    assert numbers(source) == [900, 1.199, 850, 1.02]
    assert numbers(read(tmp_path, {"a": ["468,", ",5"], "b": ["1", "2"]}, decimal=",")) == [
        468,
        0.5,
    ]
    source = read(tmp_path, {"a": AMBIGUOUS, "b": list("5678")}, decimal=".")
    with pytest.raises(UserError, match=r'line 3, column "a": "1,199" .*data.decimal = "\."'):
        numbers(source)


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["1,5", "2,75", "3"], [1.5, 2.75, 3]),
        (["0,123", "1,199", "900"], [0.123, 1.199, 900]),
        (["1234,567", "1,199", "2"], [1234.567, 1.199, 2]),
        ([",5", "-1,25", "+2,5e3"], [0.5, -1.25, 2500]),
        (["1,5", "468,", "NA"], [1.5, 468, np.nan]),
    ],
)
def test_a_certain_decimal_comma_needs_no_setting(tmp_path, cells, wanted):
    source = read(tmp_path, {"a": cells, "b": list("567")})
    np.testing.assert_array_equal(typed.read_numbers(source, "a", "data.inputs"), wanted)


def test_one_column_may_settle_it_for_the_others(tmp_path):
    columns = {"a": AMBIGUOUS, "b": ["1,5", "2", "3", "4"]}
    assert numbers(read(tmp_path, columns)) == [900, 1.199, 850, 1.02]


@pytest.mark.parametrize("separator", [";", "\t"])
@pytest.mark.parametrize("cells", [["200", "2,89", "201", "202"], ["1,5", "2,5", "3,5", "4,5"]])
def test_a_comma_is_refused_where_other_numbers_have_a_point(tmp_path, separator, cells):
    """One of the two is a slip, or the points are none; nobody can tell."""
    columns = {"a": ["0.25", "1.25", "2.25", "3.25"], "b": cells, "c": AMBIGUOUS}
    source = read(tmp_path, columns, separator=separator)
    assert numbers(source, "a") == [0.25, 1.25, 2.25, 3.25]
    line = next(i for i, cell in enumerate(cells) if "," in cell) + 2
    with pytest.raises(UserError) as caught:
        numbers(source, "b")
    assert str(caught.value) == (
        f't.csv, line {line}, column "b": "{cells[line - 2]}" has a comma, but other numbers of '
        'the file have a decimal point, as "0.25" in line 2, column "a"; write all numbers with '
        'one decimal mark, or set data.decimal = "," if the points are none, or leave the column '
        "out of data.inputs"
    )
    with pytest.raises(UserError, match=r'line 3, column "c": "1,199" has a comma'):
        numbers(source, "c")


def test_a_mix_within_a_column_is_refused(tmp_path):
    source = read(tmp_path, {"a": ["0.25", "1,25", "7"], "b": list("567")})
    assert typed.is_numeric(source, "a")
    with pytest.raises(UserError, match=r'line 3, column "a": "1,25" has a comma, but other numb'):
        numbers(source)


def test_a_setting_reads_commas_beside_points_that_are_none(tmp_path):
    columns = {"clock": ["12.30", "12.45", "13.00"], "a": ["1,5", "2,5", "3"]}
    assert numbers(read(tmp_path, columns, decimal=",")) == [1.5, 2.5, 3]


def test_files_with_other_marks_are_refused_as_one_table(tmp_path):
    (tmp_path / "x.csv").write_text("id;a\n1;1,5\n1;2,5\n")
    (tmp_path / "y.csv").write_text("id;a\n2;0.5\n2;900\n")
    data = configs.load({"data": {"path": str(tmp_path), "id": "id"}}).data
    (source,) = files.read_tables(data, None)
    with pytest.raises(UserError, match=r'y.csv, line 2, column "a": "0.5" has a point, but the c'):
        numbers(source)


def test_commas_in_a_text_settle_nothing(tmp_path):
    source = read(tmp_path, {"a": AMBIGUOUS, "b": ["0,5 of it", "x, y", "a.b", "1.2.3"]})
    assert not typed.is_numeric(source, "b")
    with pytest.raises(UserError, match=r'line 3, column "a"'):
        numbers(source)


@pytest.mark.parametrize("decimal", [None, ","])
def test_points_between_thousands_are_refused_beside_decimal_commas(tmp_path, decimal):
    columns = {"a": ["1.199", "900", "1.020"], "b": ["1,5", "2,5", "3"]}
    source = read(tmp_path, columns, decimal=decimal)
    with pytest.raises(UserError, match=r't.csv, line 2, column "a": "1.199" .*decimal'):
        numbers(source)
    columns["a"][0] = "1.199,50"
    with pytest.raises(UserError, match=r't.csv, line 2, column "a": "1.199,50"'):
        numbers(read(tmp_path, columns, decimal=decimal))


def test_points_stay_decimals_where_no_comma_is_one(tmp_path):
    source = read(tmp_path, {"a": ["1.199", "900", "1.020"], "b": ["1", "2", "3"]})
    assert numbers(source) == [1.199, 900, 1.02]


@pytest.mark.parametrize("cells", [['"1,199"', "900"], ['"1,199"', '"2,300"'], ['"1,199.5"', "9"]])
def test_thousands_in_a_comma_separated_file_are_refused_not_left_out(tmp_path, cells):
    source = read(tmp_path, {"a": cells, "b": ["5", "6"]}, separator=",")
    data = configs.load({"data": {"path": "t.csv"}}).data
    assert find_roles(source, data)[0].inputs == ("a", "b")
    with pytest.raises(UserError, match=r'line 2, column "a": "1,199.* thousands .*data.decimal'):
        numbers(source)


def test_quoted_decimal_commas_are_read_if_said(tmp_path):
    columns = {"a": ['"1,5"', '"2,75"'], "b": ["5", "6"]}
    with pytest.raises(UserError, match=r'line 2, column "a": "1,5" .*data.decimal = ","'):
        numbers(read(tmp_path, columns, separator=","))
    assert numbers(read(tmp_path, columns, separator=",", decimal=",")) == [1.5, 2.75]


def test_text_of_a_table_in_memory_is_read_as_said():
    data = configs.load({"data": {"decimal": ","}}).data
    (source,) = files.read_tables(data, {"a": ["1,5", "2"]})
    assert numbers(source) == [1.5, 2]
    (source,) = files.read_tables(configs.load({}).data, {"a": ["1,5", "2"]})
    with pytest.raises(UserError, match=r'row 1, column "a": "1,5" .*data.decimal = ","'):
        numbers(source)


def test_files_of_one_table_share_their_mark(tmp_path):
    (tmp_path / "x.csv").write_text("id;a\n1;1,5\n1;2,5\n")
    (tmp_path / "y.csv").write_text("id;a\n2;1,199\n2;900\n")
    settings = {"path": str(tmp_path)}
    data = configs.load({"data": settings | {"id": "id"}}).data
    assert numbers(files.read_tables(data, None)[0]) == [1.5, 2.5, 1.199, 900]


def test_the_setting_reaches_labels_and_times(tmp_path):
    rows = [f"{i},125;{i % 7},5\n" for i in range(80)]
    (tmp_path / "t.csv").write_text("time;a\n" + "".join(rows))
    marks = [f"{i}\t{i},125\t{'xy'[i // 2 % 2]}\n" for i in range(10, 80, 2)]
    (tmp_path / "labels.tsv").write_text("start\tend\tlabel\n" + "".join(marks))
    settings = {"path": str(tmp_path / "t.csv"), "time": "time", "context": 4, "decimal": ","}
    settings |= {"task": "classify", "labels": str(tmp_path / "labels.tsv")}
    dataset = datasets.load_dataset(configs.load({"data": settings}))
    assert dataset.index.num_rows == 80
    assert sum(dataset.num_windows.values()) == 35
