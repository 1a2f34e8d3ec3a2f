from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from slipstream.training.overview import MAX_SERIES, summarize_data
from tests.conftest import small_config, small_dataset, waves


def overview(table=None, **sections):
    config = small_config(**sections)
    found = summarize_data(small_dataset(config, table), config)
    json.dumps(found, allow_nan=False)
    return found


def test_ranges_are_physical_and_sets_lie_in_time():
    table = waves()
    found = overview(table)
    assert (found["series"], found["rows"], found["gaps"]) == (1, 400, 0)
    column = table.column("a").to_pylist()
    assert found["columns"]["a"]["range"] == pytest.approx([min(column), max(column)], rel=1e-5)
    assert found["columns"]["a"]["roles"] == ["inputs", "targets"]
    (timeline,) = found["timelines"]
    assert [part[0] for part in timeline["parts"]] == ["train", "val", "test"]
    assert timeline["parts"][0][1] == 0
    assert timeline["parts"][-1][2] == 399
    assert sum(found["rows_by_set"].values()) == 400


def test_a_range_that_begins_at_zero_does_so():
    table = waves().to_pydict()
    table["a"] = [float(i % 24) for i in range(400)]
    assert overview(table)["columns"]["a"]["range"] == [0.0, 23.0]


def test_gaps_interrupt_a_timeline():
    table = waves().to_pydict()
    table["time"] = [t + 1000 * (t >= 100) for t in table["time"]]
    found = overview(table)
    assert found["gaps"] == 1
    assert [part[0] for part in found["timelines"][0]["parts"]][:2] == ["train", "train"]


def test_folds_have_a_timeline_each():
    found = overview(data={"split": {"walk_forward": 3}})
    assert [row["name"] for row in found["timelines"]] == ["fold 1", "fold 2", "fold 3"]


def test_of_many_series_some_are_drawn():
    table = waves(3000).to_pydict()
    table["id"] = [f"s{i // 100:02}" for i in range(3000)]
    found = overview(table, data={"id": "id"})
    names = [row["name"] for row in found["timelines"]]
    assert len(names) == MAX_SERIES
    assert (names[0], names[-1]) == ("s00", "s29")


@pytest.mark.parametrize("policy", ["forward", "drop"])
def test_missing_values_are_counted_before_they_are_filled(policy):
    table = waves().to_pydict()
    table["b"][50] = table["b"][51] = table["c"][200] = None
    found = overview(table, data={"targets": ["c"], "inputs": ["a", "b"], "missing": policy})
    assert [found["columns"][name]["missing"] for name in "abc"] == [0, 2, 1]


def test_ranges_are_of_all_rows_and_missing_values_are_counted():
    table = waves(5003)
    values = table["b"].to_numpy().copy()
    values[[3, 70, 5001]] = np.nan
    values[[5002, 2500]] = [99.0, -99.0]
    table = table.set_column(2, "b", pa.array(values))
    columns = overview(table, data={"inputs": ["a", "c"], "targets": ["a", "b"]})["columns"]
    assert columns["b"]["range"] == pytest.approx([-99, 99], rel=1e-5)
    assert {name: column["missing"] for name, column in columns.items()} == {"a": 0, "b": 3, "c": 0}
    for name in ("a", "c"):
        wanted = [table[name].to_numpy().min(), table[name].to_numpy().max()]
        assert columns[name]["range"] == pytest.approx(wanted, rel=1e-5)
