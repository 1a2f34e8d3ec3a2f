"""What the columns and rows of a table are: which values are the same, which column wins."""

from __future__ import annotations

import decimal
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream import config as configs
from slipstream.config import Data, Split
from slipstream.data import columns as typed
from slipstream.data import dataset as datasets
from slipstream.data import series, splits
from slipstream.data.roles import Roles, find_roles, normalize_value, sort_roles
from slipstream.data.table import read_memory

EANS = [4006381333931, 4006381333932, 4006381333933]


def build(table, **settings):
    source = read_memory(table)
    data = Data.model_validate({"horizon": 1, **settings})
    roles, _ = find_roles(source, data)
    return series.prepare_series([source], data, roles, min_rows=1)


def kept(cells, value):
    """The rows of a column that `data.where` keeps."""
    store = build({"c": cells, "a": range(len(cells))}, where={"c": value})
    return store.read_column("a").tolist()


@pytest.mark.parametrize(
    "cells",
    [
        EANS,
        list(map(float, EANS)),
        list(map(str, EANS)),
        [f"{ean}.0" for ean in EANS],
        [decimal.Decimal(ean) for ean in EANS],
    ],
    ids=["int", "float", "text", "text of floats", "decimal"],
)
@pytest.mark.parametrize("kind", [int, float, str])
def test_long_numbers_are_told_apart(cells, kind):
    assert kept(cells, kind(EANS[1])) == [1]


def test_whole_numbers_are_exact_beyond_what_float64_holds():
    large = [2**53, 2**53 + 1, 2**63 - 1]
    assert kept(large, 2**53 + 1) == [1]
    assert kept(list(map(str, large)), 2**53 + 1) == [1]
    assert kept([2.0**63, 2.0**62], 2**63) == [0]
    assert kept(pa.array([123456792.0, 5.0], pa.float32()), 123456792) == [0]


@pytest.mark.parametrize("value", [25, 25.0, "25", "25.0", "+25", "25.", "2.5e+01", "2.50E1"])
@pytest.mark.parametrize(
    "cells", [[25, 7], [25.0, 7.0], ["25", "x"], ["25.00", "x"], [" 25", "x"], ["2.5e+01", "x"]]
)
def test_equal_numbers_are_one_value_however_they_are_written(cells, value):
    assert kept(cells, value) == [0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1_2", "12"),
        ("007", "7"),
        ("1e3", "1000"),
        ("0e1234", "0e4321"),
        ("nan", "NaN"),
        ("inf", "Infinity"),
        ("\u0661", "1"),
        ("0x10", "16"),
        ("1 2", "12"),
        ("true", "1"),
        ("0.1234567890123", "0.1234567890124"),
        ("1e-400", "0"),
        ("9" * 5000, "9" * 5001),
    ],
)
def test_what_is_no_plain_number_is_compared_as_text(one, other):
    assert normalize_value(one) != normalize_value(other)
    assert kept([one, other], one) == [0]


def test_true_is_true_in_every_spelling():
    assert kept([True, False], True) == [0]
    assert kept(["True", "False"], True) == [0]
    assert kept(["TRUE", "FALSE"], "true") == [0]


@given(st.integers(), st.integers())
def test_two_whole_numbers_are_one_value_only_if_they_are_equal(one, other):
    assert (normalize_value(one) == normalize_value(str(other))) == (one == other)
    assert (
        normalize_value(one) == normalize_value(str(one)) == normalize_value(decimal.Decimal(one))
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_the_number_that_it_is_written_as(value):
    assert normalize_value(value) == normalize_value(repr(value)) or value.is_integer()
    if value.is_integer():
        assert normalize_value(value) == normalize_value(int(value))


def test_split_by_tells_long_ids_apart():
    table = {"ean": np.repeat(EANS, 4), "a": range(12)}
    split = {"by": "ean", "val": [EANS[1]], "test": [EANS[2]]}
    store = build(table, id="ean", split=Split.model_validate(split))
    assert store.index.group_names == tuple(map(str, EANS))
    found = splits.assign_rows(store.index, Data(id="ean", split=Split.model_validate(split)))
    assert [found.count_rows(which) for which in range(3)] == [4, 4, 4]


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([{"x": 1}, {"x": 2}]),
        pa.array([[1], [2]]),
        pa.array([b"x", b"\xff"]),
        pa.array([b"x", b"y"], pa.binary(1)),
        pa.array([b"x", b"y"], pa.large_binary()),
        pa.array([(1, 2, 3), (1, 2, 4)], pa.month_day_nano_interval()),
    ],
    ids=["struct", "list", "binary", "fixed binary", "large binary", "interval"],
)
@pytest.mark.parametrize(
    "settings",
    [
        {"id": "c"},
        {"where": {"c": "x"}},
        {"split": Split(by="c", val=("x",), test=("y",))},
    ],
    ids=["data.id", "data.where", "data.split.by"],
)
def test_a_type_that_tells_no_rows_apart_is_named(cells, settings):
    with pytest.raises(UserError, match=r'column "c" \(data\.\S+\) holds .*; it should be text'):
        build({"c": cells, "a": range(2)}, **settings)


@pytest.mark.parametrize(
    "cells",
    [
        pa.array([7, 8], pa.uint64()),
        pa.array([1.5, 2.5], pa.float16()),
        pa.array([1, 2], pa.decimal256(50, 3)),
        pa.array(["x", "y"], pa.string_view()),
        pa.array(["x", "y"], pa.large_string()),
        pa.array(["x", "y"]).dictionary_encode(),
        pa.array([True, False]),
        pa.array([1, 2], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([1, 2], pa.date32()),
        pa.array([1, 2], pa.time64("us")),
        pa.array([1, 2], pa.duration("s")),
    ],
    ids=lambda cells: str(cells.type),
)
def test_every_other_type_tells_series_apart(cells):
    assert len(build({"c": cells, "a": range(2)}, id="c").index.series_names) == 2


def test_a_number_that_is_none_names_no_series():
    with pytest.raises(UserError, match=r'row 2, column "c": is empty \(data.id\)'):
        build({"c": [1.0, float("nan")], "a": range(2)}, id="c")
    assert build({"c": [0.0, -0.0], "a": range(2)}, id="c").index.series_names == ("0",)


def test_series_of_a_float_column_are_called_by_their_whole_numbers():
    store = build({"ean": list(map(float, EANS)), "a": range(3)}, id="ean")
    assert store.index.series_names == tuple(map(str, EANS))


@pytest.mark.parametrize(("cell", "value"), [("007", 7), ("1e3", 1000), ("1_2", "12")])
def test_a_value_that_only_looks_like_a_cell_is_refused_in_a_list_too(cell, value):
    with pytest.raises(UserError, match=f'"c" is never {value}, but "{cell}"; write it so'):
        kept([cell, "25"], [value, 25])
    assert kept([cell, "25", str(value)], [value, 25]) == [1, 2]
    assert kept([cell, "25"], [cell, 25, 30]) == [0, 1]
    assert kept([2**53, 5], [2**53 + 1, 5]) == [1]


def test_what_where_looks_for_in_vain_is_shown_beside_what_there_is():
    with pytest.raises(UserError, match=r'\(c = 9\); "c" is 007, 008'):
        kept(["007", "008"], 9)


def write_files(folder, names, **columns):
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        shape = {"a": np.sin(np.arange(80) / 3), **columns}
        pa.parquet.write_table(pa.table(shape), folder / name, row_group_size=30)


def load(folder, *, engine=None, **data):
    settings = {"path": str(folder), "context": 8, "horizon": 2} | data
    return datasets.load_dataset(configs.load({"data": settings, "engine": engine or {}}))


HOMES = pytest.mark.parametrize("engine", [{}, {"home": "stream"}], ids=["memory", "stream"])


@HOMES
@pytest.mark.parametrize("names", [["x.parquet"], ["x.parquet", "y.parquet"]], ids=len)
def test_a_column_named_file_wins_over_the_files_of_rows(tmp_path, engine, names):
    for name in names:
        cells = np.repeat([f"{name[0]}1", f"{name[0]}2"], 40)
        write_files(tmp_path, [name], file=cells)
    found = load(tmp_path, id="file", engine=engine)
    assert found.index.series_names == tuple(f"{name[0]}{i}" for name in names for i in (1, 2))
    assert any('data.id = "file" is the column' in note for note in found.notes)


@HOMES
def test_without_such_a_column_file_stands_for_a_rows_file(tmp_path, engine):
    write_files(tmp_path, ["x.parquet", "y.parquet"])
    assert load(tmp_path, id="file", engine=engine).index.series_names == ("x.parquet", "y.parquet")


@HOMES
def test_files_stay_series_where_a_column_is_named_file(tmp_path, engine):
    write_files(tmp_path, ["x.parquet", "y.parquet"], file=np.arange(80) % 7)
    found = load(tmp_path, engine=engine)
    assert found.index.series_names == ("x.parquet", "y.parquet")
    assert found.signature.inputs == ("a", "file")


@HOMES
@pytest.mark.parametrize("settings", [{}, {"id": "file"}], ids=["no id", "file"])
def test_folders_are_the_sets_wherever_the_rows_are(tmp_path, engine, settings):
    names = ["train/a.parquet", "train/b.parquet", "val/a.parquet", "test/a.parquet"]
    write_files(tmp_path, names)
    found = load(tmp_path, split={"folders": True}, engine=engine, **settings)
    assert sorted(found.index.series_names) == sorted(names)
    assert found.num_windows == {"train": 2 * 71, "val": 71, "test": 71}


@HOMES
def test_a_column_named_series_wins_over_the_series_name(tmp_path, engine):
    path = tmp_path / "t.parquet"
    cells = {"id": np.repeat(["p", "q", "r"], 40), "series": np.repeat(["r", "p", "q"], 40)}
    pa.parquet.write_table(pa.table({"a": np.sin(np.arange(120)), **cells}), path)
    split = {"by": "series", "val": ["p"], "test": ["q"]}
    found = load(path, id="id", split=split, engine=engine)
    assert found.index.group_names == ("r", "p", "q")
    assert any('data.split.by = "series" is the column' in note for note in found.notes)


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_names_of_many_columns_are_looked_up_not_searched_for():
    names = tuple(Counted(f"c{i}") for i in range(1000))
    others = tuple(Counted(str(name)) for name in reversed(names[200:]))
    found = sort_roles(Roles(inputs=names, targets=others))
    assert found == Roles(inputs=(*names[:200], *others), targets=others)
    source = replace(read_memory({"a": [1]}), column_names=names)
    for name in others:
        typed.require_column(source, name, "data.inputs")
    assert Counted.compared < 20 * len(names)
