from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data import dataset as datasets
from slipstream.data import scaler as scaling
from slipstream.data.scaler import Scaler
from tests.conftest import small_config, small_dataset, waves

numbers = st.lists(st.integers(-10_000, 10_000).map(float), min_size=2, max_size=40).filter(
    lambda values: max(values) > min(values)
)


@given(
    numbers, st.lists(st.floats(-1e6, 1e6), max_size=10), st.sampled_from(["standard", "minmax"])
)
def test_a_scaler_sees_training_rows_only(train, later, kind):
    rows = np.arange(len(train) + len(later)) < len(train)
    fitted = scaling.fit_column("a", np.array(train + later), rows, kind=kind)
    mean, spread = math.fsum(train) / len(train), max(map(abs, train)) + 1
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in train) / len(train))
    if kind == "standard":
        assert fitted.shift["a"] == pytest.approx(mean, abs=1e-6 * spread)
        assert fitted.size["a"] == pytest.approx(deviation, rel=1e-4)
    else:
        assert fitted.shift["a"] == pytest.approx(min(train), abs=1e-6 * spread)
        assert fitted.size["a"] == pytest.approx(max(train) - min(train), rel=1e-4)
    assert fitted.deviation["a"] == pytest.approx(deviation, rel=1e-4)
    assert Scaler(**asdict(fitted)) == fitted


def test_the_future_changes_nothing_of_the_past():
    table = waves(300)
    changed = table.to_pydict()
    changed["a"] = [v if i < 210 else 1e6 for i, v in enumerate(changed["a"])]
    first, second = small_dataset(table=table), small_dataset(table=changed)
    assert first.scaler == second.scaler
    rows = first.memory.starts["train"][-1] + 20
    assert (first.memory.series.values[:rows] == second.memory.series.values[:rows]).all()


def test_a_constant_training_column_is_refused():
    values = np.array([3.0, 3.0, 4.0])
    rows = np.array([True, True, False])
    with pytest.raises(UserError, match=r'column "a" is 3 in every training row'):
        scaling.fit_column("a", values, rows, kind="standard")
    assert scaling.fit_column("a", values, rows, kind="none").size == {"a": 1.0}


def test_minmax_maps_training_rows_onto_zero_to_one():
    dataset = small_dataset(small_config(data={"scale": "minmax"}))
    values = dataset.memory.series.values[: int(dataset.memory.starts["train"][-1]) + 20]
    assert float(values.min()) == pytest.approx(0, abs=1e-6)
    assert float(values.max()) == pytest.approx(1, abs=1e-6)


@given(st.lists(numbers, min_size=2, max_size=5))
def test_sums_taken_stretch_by_stretch_are_those_of_the_whole(stretches):
    parts, whole = (scaling.RunningStatistics() for _ in range(2))
    arrays = [np.array(values) for values in stretches]
    for array in arrays:
        parts.add("a", array)
    whole.add("a", np.concatenate(arrays))
    found, wanted = parts.to_scaler("standard"), whole.to_scaler("standard")
    assert found.size["a"] == pytest.approx(wanted.size["a"], rel=1e-6)
    assert found.shift["a"] == pytest.approx(wanted.shift["a"], rel=1e-6, abs=1e-6)
    found, wanted = parts.to_scaler("minmax"), whole.to_scaler("minmax")
    assert (found.shift, found.size) == (wanted.shift, wanted.size)


OUTLIER = 4294967295.0
UNUSED = {
    "left out by where": ({"where": {"use": 1}}, "use"),
    "in a test series": ({"id": "id", "split": {"by": "id", "val": ["v"], "test": ["x"]}}, "id"),
    "in an unused series": (
        {"id": "id", "split": {"by": "id", "train": ["t"], "val": ["v"], "test": ["w"]}},
        "id",
    ),
    "last in time": ({"time": "time", "unsorted": "sort"}, "time"),
    "last in time, of folds": (
        {"time": "time", "unsorted": "sort", "split": {"walk_forward": 2}},
        "time",
    ),
}


def with_first_rows(first, kind):
    """A table whose first 20 rows, which do not train, hold `first` in column a."""
    table = waves(420).to_pydict()
    table["a"][:20] = [first] * 20
    if kind == "use":
        table["use"] = [0] * 20 + [1] * 400
    elif kind == "id":
        table["id"] = ["x"] * 20 + ["v"] * 50 + ["w"] * 50 + ["t"] * 300
    else:
        table["time"] = [1000 + t if t < 20 else t for t in table["time"]]
    return pa.table(table)


def trained_rows(dataset):
    """What every training window holds, and the scaler."""
    every = [fold.starts for fold in dataset.folds[:1]] or [dataset.memory.starts]
    starts, reach = every[0]["train"], dataset.signature.lead + dataset.signature.steps_out
    rows = starts[:, None] + torch.arange(reach)
    return dataset.memory.series.values[rows].numpy(), dataset.scaler


@pytest.mark.parametrize("unused", UNUSED)
@settings(max_examples=20)
@given(first=st.floats(-1e29, 1e29), second=st.floats(-1e29, 1e29))
def test_rows_that_do_not_train_change_no_bit_of_those_that_do(unused, first, second):
    data, kind = UNUSED[unused]
    config = small_config(data={"time": None, "inputs": ["a", "b"], "targets": ["a"]} | data)
    found = [small_dataset(config, with_first_rows(value, kind)) for value in (first, second)]
    (one, learnt), (other, again) = map(trained_rows, found)
    assert learnt == again
    assert (one == other).all()


@pytest.mark.parametrize("unused", UNUSED)
def test_an_outlier_in_rows_that_do_not_train_costs_the_others_no_digits(unused):
    data, kind = UNUSED[unused]
    config = small_config(data={"time": None, "inputs": ["a"], "targets": ["a"]} | data)
    dataset = small_dataset(config, with_first_rows(OUTLIER, kind))
    rows, scaler = trained_rows(dataset)
    assert 0.5 < scaler.deviation["a"] < 1
    physical = rows.astype(np.float64) * scaler.size["a"] + scaler.shift["a"]
    assert np.isin(np.round(physical, 5), np.round(np.array(waves(420)["a"]), 5)).all()


@settings(max_examples=20)
@given(first=st.floats(-1e29, 1e29))
def test_rows_that_do_not_train_change_no_bit_of_a_stream(tmp_path_factory, first):
    path = tmp_path_factory.mktemp("stream") / "t.parquet"
    split = {"by": "id", "val": ["v"], "test": ["x"]}
    data = {"path": str(path), "time": None, "inputs": ["a"], "targets": ["a"], "id": "id"}
    config = small_config(data=data | {"split": split}, engine={"home": "stream"})
    found = []
    for value in (first, 10.0):
        pa.parquet.write_table(with_first_rows(value, "id"), path, row_group_size=64)
        dataset = datasets.load_dataset(config)
        (piece,) = dataset.iter_chunks("train", None, rows=10_000)
        found.append((dataset.scaler, piece.series.values))
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]).all()


def test_training_rows_that_an_outlier_leaves_without_digits_are_refused(tmp_path):
    table = waves(400).to_pydict()
    table["a"][0] = OUTLIER
    said = r'column "a": its training rows go from .* to 4294967295, .*keeps too few digits'
    with pytest.raises(UserError, match=said):
        small_dataset(table=table)
    pa.parquet.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=64)
    data = {"path": str(tmp_path / "t.parquet")}
    with pytest.raises(UserError, match=said):
        datasets.load_dataset(small_config(data=data, engine={"home": "stream"}))


def test_a_column_far_from_zero_keeps_its_digits_unless_it_is_not_scaled():
    table = waves(400).to_pydict()
    table["a"] = [v + 123456789.0 for v in table["a"]]
    for kind in ("standard", "minmax"):
        dataset = small_dataset(small_config(data={"scale": kind}), table)
        scaler = dataset.scaler
        column = dataset.signature.inputs.index("a")
        scaled = dataset.memory.series.values[:, column].double().numpy()
        np.testing.assert_allclose(
            scaled * scaler.size["a"] + scaler.shift["a"], table["a"], rtol=0, atol=1e-6
        )
    with pytest.raises(UserError, match=r'column "a": .* set data.scale = "standard"'):
        small_dataset(small_config(data={"scale": "none"}), table)


def test_static_columns_far_from_zero_keep_their_digits():
    table = waves(400).to_pydict()
    table["id"] = [i // 100 for i in range(400)]
    table["k"] = [123456789.0 + i // 100 for i in range(400)]
    dataset = small_dataset(small_config(data={"id": "id", "static": ["k"]}), table)
    deviation = 1.25**0.5
    wanted = [(i - 1.5) / deviation for i in range(4)]
    assert dataset.memory.series.static[:, 0].tolist() == pytest.approx(wanted, rel=1e-6)


def test_a_rare_event_is_no_outlier():
    """Half of the rows are one value, as of rain: what differs is what has to be told apart."""
    draw = np.random.default_rng(0)
    rain = np.where(draw.random(400) < 0.95, 0.0, draw.lognormal(1, 2, 400))
    assert small_dataset(table=waves().set_column(1, "a", pa.array(rain))).scaler.size["a"] > 0


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 7), st.integers(1, 40))
def test_the_size_of_a_series_by_seasons_is_its_mean_change_within_pieces(seed, season, rows):
    """Over training rows, from a row of the same piece of the series, however the blocks lie."""
    draw = np.random.default_rng(seed)
    days = np.cumsum(draw.choice([1, 1, 1, 1, 9], size=120))
    table = pa.table(
        {
            "id": ["x"] * 70 + ["y"] * 50,
            "time": [*days[:70], *days[70:]],
            "a": draw.standard_normal(120),
        }
    )
    data = {"id": "id", "time": "time", "context": 2, "horizon": 1, "gap_tolerance": 1.5}
    data |= {"scale": "seasonal", "scale_by": "series", "period": season}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "BLOCK_ROWS", rows)
        found = small_dataset(small_config(data=data), table).scaler
    values, ends = table["a"].to_numpy(), {"x": (0, 70, 49), "y": (70, 120, 35)}
    for name, (begin, end, num_train) in ends.items():
        changes = [
            abs(values[row] - values[row - season])
            for row in range(begin + season, min(begin + num_train, end))
            if (np.diff(days[row - season : row + 1]) == 1).all()
        ]
        wanted = np.mean(changes) if len(changes) >= scaling.MIN_CHANGES else None
        if wanted is None:
            wanted = values[begin : begin + num_train].std()
        place = found.series.index(name)
        assert found.series_size["a"][place] == pytest.approx(wanted)
