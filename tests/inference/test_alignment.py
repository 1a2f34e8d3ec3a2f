"""Windows that several data sets share: the same series, and the same time of the forecast."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from slipstream import UserError
from slipstream.inference.mixture import describe_left_out, join_datasets, match_rows
from tests.conftest import small_config, small_dataset, waves

HOLES = [30, 31, 100, 260]


def table_with_holes():
    """Two series with times of their own, in which column c is missing here and there."""
    first, second = waves(300).to_pydict(), waves(200, seed=1).to_pydict()
    joined = {name: first[name] + second[name] for name in first}
    joined["id"] = ["x"] * 300 + ["y"] * 200
    for row in HOLES:
        joined["c"][row] = None
    return pa.table(joined)


def load(context, inputs, **data):
    table = table_with_holes()
    settings = {"context": context, "inputs": inputs, "targets": ["a"], "id": "id", **data}
    return small_dataset(small_config(data={"missing": "drop", **settings}), table)


def list_keys(dataset, which, starts=None):
    """Series and time of the last context row of every window of a set."""
    starts = dataset.memory.starts[which] if starts is None else starts
    rows = starts.numpy() + dataset.signature.context - 1
    owners = np.searchsorted(dataset.index.offsets, rows, side="right") - 1
    names = [dataset.index.series_names[owner] for owner in owners]
    return list(zip(names, dataset.memory.time[rows].tolist(), strict=True))


@pytest.fixture(scope="module")
def pair():
    return [load(16, ["a", "b"]), load(8, ["a", "c"])]


def test_rows_match_by_series_and_time(pair):
    rows = match_rows(*pair)
    mine, theirs = (one.memory.time for one in pair)
    found = rows >= 0
    np.testing.assert_array_equal(theirs[rows[found]], mine[found])
    assert (~found).sum() == len(HOLES)
    assert set(np.flatnonzero(~found)) == set(HOLES)


@pytest.mark.parametrize("reference", [0, 1])
def test_every_member_predicts_the_same_windows(pair, reference):
    joint, starts = join_datasets(pair, reference)
    for which, some in joint.memory.starts.items():
        wanted = list_keys(joint, which)
        for dataset, lookup in zip(pair, starts, strict=True):
            own = lookup[some]
            assert own.min() >= 0
            assert list_keys(dataset, which, own) == wanted
            breaks = dataset.index.breaks
            last = own.numpy() + dataset.signature.context - 1
            segments = [np.searchsorted(breaks, rows, side="right") for rows in (own.numpy(), last)]
            np.testing.assert_array_equal(*segments)  # no context crosses a gap


@pytest.mark.parametrize("reference", [0, 1])
def test_validation_and_test_windows_are_new_to_every_member(pair, reference):
    joint, _ = join_datasets(pair, reference)
    earlier = {"val": ["train"], "test": ["train", "val"]}
    for which, sets in earlier.items():
        for dataset in pair:
            seen = {
                (name, time + ahead)
                for other in sets
                for name, time in list_keys(dataset, other)
                for ahead in range(1, 5)
            }
            targets = {
                (name, time + ahead) for name, time in list_keys(joint, which) for ahead in (1, 4)
            }
            assert not targets & seen


def test_data_sets_with_the_same_windows_lose_none():
    one, other = load(16, ["a", "b"]), load(16, ["a", "b"])
    joint, _ = join_datasets([one, other], 0)
    assert joint.num_windows == one.num_windows
    assert describe_left_out(one, joint, ["train", "val", "test"]) == []


def test_a_longer_context_leaves_out_the_first_windows():
    one, other = load(8, ["a", "b"]), load(24, ["a", "b"])
    joint, _ = join_datasets([one, other], 0)
    (note,) = describe_left_out(one, joint, ["train"])
    assert note.startswith(f"32 of {one.num_windows['train']} train windows are left out")


def test_without_times_rows_count_from_the_start_of_each_series():
    one, other = (load(16, some, time=None, ignore=["time"]) for some in (["a", "b"], ["a"]))
    np.testing.assert_array_equal(match_rows(one, other), np.arange(500))
    rows = match_rows(one, load(16, ["a", "c"], time=None, ignore=["time"]))
    np.testing.assert_array_equal(rows, match_rows(one, load(16, ["a", "c"])))
    assert set(np.flatnonzero(rows < 0)) == set(HOLES)


def test_data_without_a_common_window_are_refused(pair):
    table = table_with_holes().to_pydict()
    table["time"] = [time + 10_000 for time in table["time"]]
    config = small_config(data={"targets": ["a"], "id": "id", "missing": "drop"})
    later = small_dataset(config, pa.table(table))
    joint, _ = join_datasets([pair[0], later], 0)
    with pytest.raises(UserError, match="no test window in common"):
        describe_left_out(pair[0], joint, ["test"])
