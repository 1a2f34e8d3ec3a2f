"""Tables in memory, of every library that users have."""

from __future__ import annotations

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from slipstream import UserError
from slipstream.data.table import to_arrow

VALUES = {"a": [1.0, 2.0, 3.0], "b": [4, 5, 6]}
DATES = pd.date_range("2026-01-01", periods=3, freq="h")


@pytest.mark.parametrize(
    "table",
    [
        VALUES,
        pa.table(VALUES),
        pd.DataFrame(VALUES),
        pl.DataFrame(VALUES),
        pl.LazyFrame(VALUES),
        np.array([(1.0, 4), (2.0, 5), (3.0, 6)], dtype=[("a", "f8"), ("b", "i8")]),
    ],
    ids=lambda table: type(table).__name__,
)
def test_every_kind_of_table_gives_the_same_columns(table):
    assert to_arrow(table).to_pydict() == VALUES


def test_an_unnamed_index_of_dates_becomes_the_time_column():
    frame = pd.DataFrame(VALUES, index=DATES)
    assert to_arrow(frame, time="date").column_names == ["a", "b", "date"]
    assert to_arrow(frame)["time"].to_pandas().tolist() == DATES.tolist()
    assert to_arrow(frame.rename(columns={"a": "time"})).column_names == ["time", "b", "index"]


def test_a_named_index_becomes_a_column_of_that_name():
    frame = pd.DataFrame(VALUES, index=DATES.rename("when"))
    assert to_arrow(frame, time="when").column_names == ["a", "b", "when"]


def test_an_unnamed_index_that_numbers_the_rows_is_left_out():
    frame = pd.DataFrame(VALUES).query("a > 1")
    assert to_arrow(frame).to_pydict() == {"a": [2.0, 3.0], "b": [5, 6]}


def test_numbers_as_column_names_become_text():
    frame = pd.DataFrame(np.ones((2, 2)))
    assert to_arrow(frame).column_names == ["0", "1"]


def test_a_single_named_column_is_a_table():
    assert to_arrow(pd.Series([1.0], name="a")).column_names == ["a"]
    assert to_arrow(pl.Series("a", [1.0])).column_names == ["a"]


def test_an_array_without_names_asks_for_them():
    with pytest.raises(UserError, match=r"pass their names: columns="):
        to_arrow(np.ones((2, 2)))


@pytest.mark.parametrize("table", [3, object(), [1, 2], "rows"])
def test_anything_else_is_refused_with_what_is_accepted(table):
    kind = {int: "an int", object: "an object", list: "a list", str: "a str"}[type(table)]
    with pytest.raises(UserError, match=f"data is {kind}; pass a pandas, polars, duckdb or"):
        to_arrow(table)


def test_columns_of_one_name_are_refused():
    frame = pd.DataFrame(np.ones((2, 2)), columns=["a", "a"])
    with pytest.raises(UserError, match='2 columns are named "a"'):
        to_arrow(frame)
