from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.config import Data
from slipstream.data import series
from slipstream.data.files import read_file
from slipstream.data.roles import Roles, find_roles
from slipstream.data.table import read_memory


def build(table, *, roles=None, min_rows=1, **settings):
    source = read_memory(table)
    data = Data.model_validate({"horizon": 1, **settings})
    found, _ = find_roles(source, data)
    return series.prepare_series([source], data, roles or found, min_rows=min_rows)


def column(store, name):
    """A stored column in physical units."""
    return store.read_column(name).tolist()


def test_a_gap_is_a_step_unlike_the_usual_one():
    time = [0, 10, 20, 29, 60, 70, 71, 81]
    store = build({"t": time, "a": range(8)}, time="t")
    assert store.index.breaks.tolist() == [0, 4, 6]
    assert store.index.step == 10


def test_the_tolerance_is_a_setting():
    time = np.array(["2024-01-04", "2024-01-05", "2024-01-08", "2024-01-09"], "datetime64[D]")
    table = {"t": pa.array(time), "a": range(4)}
    assert build(table, time="t").index.breaks.tolist() == [0, 2]
    assert build(table, time="t", gap_tolerance=2.5).index.breaks.tolist() == [0]
    assert build(table, time="t", gap_tolerance=float("inf")).index.breaks.tolist() == [0]
    assert build(table, time="t").index.step == 86400


def test_sorting_on_request():
    table = {"t": [3, 1, 2], "a": [30.0, 10.0, 20.0]}
    store = build(table, time="t", unsorted="sort")
    assert column(store, "a") == [10, 20, 30]
    assert store.index.breaks.tolist() == [0]
    with pytest.raises(UserError, match=r'row 2, column "t": earlier than data, row 1'):
        build(table, time="t")


def test_the_same_time_twice_is_refused_even_when_sorting():
    for settings in ({}, {"unsorted": "sort"}):
        with pytest.raises(UserError, match=r"row 3, .* the same time as data, row 2"):
            build({"t": [1, 2, 2], "a": [1, 2, 3]}, time="t", **settings)


def test_series_of_a_long_table_come_in_order_of_appearance():
    table = {"id": ["b", "a", "b", "a", "b"], "a": [1, 2, 3, 4, 5], "k": [7, 8, 7, 8, 7]}
    store = build(table, id="id", static=["k"])
    assert store.index.series_names == ("b", "a")
    assert store.index.offsets.tolist() == [0, 3, 5]
    assert column(store, "a") == [1, 3, 5, 2, 4]
    assert store.static.tolist() == [[7], [8]]
    assert store.index.breaks.tolist() == [0, 3]


def test_two_columns_can_name_a_series():
    table = {"p": ["x", "x", "y", "y", "x"], "q": [1, 2, 1, 1, 1], "a": [1, 2, 3, 4, 5]}
    store = build(table, id=["p", "q"])
    assert store.index.series_names == ("x/1", "x/2", "y/1")
    assert column(store, "a") == [1, 5, 2, 3, 4]


def test_where_keeps_rows():
    table = {"c": [25.0, 0.0, 25.0], "n": ["x", "x", "y"], "a": [1, 2, 3]}
    assert column(build(table, where={"c": 25}), "a") == [1, 3]
    assert column(build(table, where={"c": [25, 0], "n": "x"}), "a") == [1, 2]
    with pytest.raises(UserError, match=r"no row matches data.where \(c = 7\)"):
        build(table, where={"c": 7})


def test_default_inputs_leave_out_what_has_another_role():
    source = read_memory(
        {"t": [1, 2], "id": [1, 1], "k": [3, 3], "a": [1, 2], "b": [1, 2], "name": ["x", "y"]}
    )
    data = Data(time="t", id="id", static=("k",), ignore=("b",))
    roles, notes = find_roles(source, data)
    assert roles == Roles(("a",), ("a",), ("k",))
    assert notes == ["not used as inputs: name"]
    estimating = Data(horizon=0, targets=("a",), time="t")
    assert "a" not in find_roles(source, estimating)[0].inputs


def test_an_unnamed_index_column_is_no_input(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(",a\n0,5\n1,6\n")
    roles, notes = find_roles(read_file(path, name="t.csv"), Data())
    assert roles.inputs == ("a",)
    assert notes == ["not used as inputs: column_1"]


def test_a_static_column_must_not_change():
    with pytest.raises(UserError, match=r'row 2, column "k": is 4, not the 3'):
        build({"k": [3, 4], "a": [1, 2]}, static=["k"])


def test_short_series_are_refused_or_dropped():
    table = {"id": ["x", "y", "y", "y"], "a": [1, 2, 3, 4]}
    with pytest.raises(UserError, match=r'series "x" has 1 row of .*data.short = "drop"'):
        build(table, id="id", min_rows=2)
    store = build(table, id="id", min_rows=2, short="drop")
    assert store.index.series_names == ("y",)
    assert "left out" in store.notes[0]
    with pytest.raises(UserError, match="no series has the 9 rows"):
        build(table, id="id", min_rows=9, short="drop")


def naive_missing(values, how):
    """Rows kept with their values and whether each starts anew, one row at a time."""
    last = [None] * len(values[0])
    kept, restart = [], True
    for row in values:
        row = list(row)
        if how == "forward":
            row = [v if v is not None else last[i] for i, v in enumerate(row)]
            last = row
        if any(v is None for v in row):
            restart = True
            continue
        kept.append((row, restart))
        restart = False
    return kept


value = st.one_of(st.none(), st.integers(-5, 5))


@given(
    st.lists(st.tuples(value, value), min_size=1, max_size=30), st.sampled_from(["forward", "drop"])
)
def test_missing_values_agree_with_a_naive_loop(rows, how):
    a, b = zip(*rows, strict=True)
    wanted = naive_missing(rows, how)
    if all(v is None for v in a) or all(v is None for v in b) or not wanted:
        with pytest.raises(UserError):
            build({"a": a, "b": b}, missing=how)
        return
    table = pa.table({"a": pa.array(a, pa.int64()), "b": pa.array(b, pa.int64())})
    store = build(table, missing=how)
    assert column(store, "a") == [row[0] for row, _ in wanted]
    assert column(store, "b") == [row[1] for row, _ in wanted]
    restarts = [row for row, (_, restart) in enumerate(wanted) if restart]
    assert store.index.breaks.tolist() == restarts


def test_missing_values_are_refused_by_default():
    with pytest.raises(UserError, match=r'row 2, column "a": is missing .* a 1'):
        column(build({"a": [1, None, 3]}), "a")


def test_forward_counts_what_it_repeats_and_what_it_leaves_out():
    table = {"a": [None, 1, None, 3, None], "b": [None, None, 5, None, 6], "c": range(5)}
    store = build(table, missing="forward")
    assert column(store, "a") == [1, 3, 3]
    assert store.notes == (
        '"data": repeated the last known value: a 2, b 1; left out the first 2 rows, before every '
        "value is known: a 1, b 2",
    )
    (note,) = build({"a": [None, 1, 2], "c": range(3)}, missing="forward").notes
    assert note == '"data": left out the first row, before every value is known: a 1'
    (note,) = build({"a": [1, None, 2], "c": range(3)}, missing="forward").notes
    assert note == '"data": repeated the last known value: a 1'


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 3), value), min_size=1, max_size=30),
    st.sampled_from(["forward", "drop"]),
)
def test_interleaved_sorted_and_filtered_rows_agree_with_a_naive_loop(rows, how):
    ids, use, a = zip(*rows, strict=True)
    time = [-i for i in range(len(rows))]
    table = pa.table({"id": ids, "use": use, "t": time, "a": pa.array(a, pa.float64())})
    wanted = []
    kept = [row for row in rows if row[1]]
    for name in dict.fromkeys(ids):
        mine = [(value,) for owner, _, value in reversed(kept) if owner == name]
        wanted.append([row[0] for row, _ in naive_missing(mine, how)] if mine else [])
        if mine and not wanted[-1]:
            wanted = None
            break
    settings = {"id": "id", "time": "t", "unsorted": "sort", "missing": how}
    roles = Roles(("a",), ("a",))
    if not wanted or not any(wanted):
        with pytest.raises(UserError):
            build(table, roles=roles, where={"use": [1, 2, 3]}, **settings)
        return
    store = build(table, roles=roles, where={"use": [1, 2, 3]}, **settings)
    assert column(store, "a") == [value for some in wanted for value in some]
