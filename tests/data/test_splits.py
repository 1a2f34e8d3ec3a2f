from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.config import Data
from slipstream.data import series, splits
from slipstream.data.files import read_files
from slipstream.data.roles import find_roles
from slipstream.data.splits import SETS, UNUSED, SplitAssignment
from slipstream.data.table import read_memory


def assigned(table, **settings):
    data = Data.model_validate({"horizon": 1, **settings})
    source = read_memory(table)
    roles, _ = find_roles(source, data)
    store = series.prepare_series([source], data, roles, min_rows=1)
    return by_row(splits.assign_rows(store.index, data))


def by_row(runs):
    return np.repeat(runs.sets, runs.ends - runs.begins).tolist()


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    train=st.integers(1, 8),
    val=st.integers(1, 8),
)
def test_shares_of_each_series_in_time_order(lengths, train, val):
    shares = {"train": train / 20, "val": val / 20, "test": 1 - (train + val) / 20}
    ids = np.repeat(np.arange(len(lengths)), lengths)
    found = np.array(assigned({"id": ids, "a": ids}, id="id", split=shares))
    for i, length in enumerate(lengths):
        mine = found[ids == i]
        assert (np.diff(mine) >= 0).all()
        assert UNUSED not in mine
        assert (mine == 0).sum() == round(length * shares["train"])


def test_rows_leave_the_rest_unused():
    found = assigned({"a": range(10)}, split={"rows": [4, 2, 1]})
    assert found == [0, 0, 0, 0, 1, 1, 2, UNUSED, UNUSED, UNUSED]


def test_by_column_takes_the_rest_for_training():
    table = {"p": ["x", "y", "z", "w"], "a": range(4)}
    split = {"by": "p", "val": ["y"], "test": ["z"]}
    assert assigned(table, split=split) == [0, 1, 2, 0]
    assert assigned(table, split=split | {"train": ["x"]}) == [0, 1, 2, UNUSED]


def test_by_column_matches_numbers_and_series_names():
    table = {"n": [1.0, 2.0, 3.0], "a": range(3)}
    assert assigned(table, id="n", split={"by": "n", "val": [2], "test": [3]}) == [0, 1, 2]
    assert assigned(
        {"id": ["x", "y", "z"], "a": range(3)},
        id="id",
        split={"by": "series", "val": ["y"], "test": ["z"]},
    ) == [0, 1, 2]


def test_wrong_values_are_named():
    table = {"p": ["x", "y", "z"], "a": range(3)}
    with pytest.raises(
        UserError, match=r'data.split.test lists "q", but "p" has no such value; it has x'
    ):
        assigned(table, split={"by": "p", "val": ["y"], "test": ["q"]})
    with pytest.raises(UserError, match=r'"y" is in both val and test'):
        assigned(table, split={"by": "p", "val": ["y"], "test": ["y"]})


def test_folders_name_the_sets(tmp_path):
    for i, name in enumerate(SETS):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.csv").write_text("a\n" + f"{i}\n" * (i + 1))
    data = Data(horizon=1, path=str(tmp_path), split={"folders": True})
    sources = list(read_files(data.paths))
    roles, _ = find_roles(sources[0], data)
    store = series.prepare_series(sources, data, roles, min_rows=1)
    assert store.index.series_names == ("test/one.csv", "train/one.csv", "val/one.csv")
    assert by_row(splits.assign_rows(store.index, data)) == [2, 2, 2, 0, 1, 1]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1), st.data())
def test_a_mask_is_the_rows_of_a_set(runs, data):
    lengths, sets = zip(*runs, strict=True)
    ends = np.cumsum(lengths)
    made = SplitAssignment(ends - lengths, np.array(sets, dtype=np.int8), int(ends[-1]))
    begin = data.draw(st.integers(0, made.num_rows - 1))
    end = data.draw(st.integers(begin + 1, made.num_rows))
    for which in range(len(SETS)):
        wanted = [value == which for value in by_row(made)]
        assert made.mask(which, begin, end).tolist() == wanted[begin:end]
        assert made.count_rows(which) == sum(wanted)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    sets=st.lists(st.integers(0, UNUSED), min_size=36, max_size=36),
)
def test_a_set_reaches_the_series_that_have_a_row_in_it(lengths, sets):
    offsets = np.cumsum([0, *lengths])
    rows = np.array(sets[: offsets[-1]], dtype=np.int8)
    begins = np.flatnonzero(np.diff(rows, prepend=-1))  # runs go on from one series to the next
    runs = SplitAssignment(begins, rows[begins], len(rows))
    for which in range(len(SETS)):
        expected = [bool((rows[a:b] == which).any()) for a, b in pairwise(offsets)]
        assert runs.find_series(which, offsets).tolist() == expected
