from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data import scaling
from slipstream.data.scaling import Scaler
from tests.conftest import small_config, small_dataset, waves

numbers = st.lists(st.floats(-1e6, 1e6).map(lambda v: round(v, 3)), min_size=2, max_size=40).filter(
    lambda values: max(values) - min(values) > 1e-3
)


@given(
    numbers, st.lists(st.floats(-1e6, 1e6), max_size=10), st.sampled_from(["standard", "minmax"])
)
def test_a_scaler_sees_training_rows_only(train, later, kind):
    rows = np.arange(len(train) + len(later)) < len(train)
    values = (np.array(train + later) - train[0]).astype(np.float32)[:, None]
    fitted = scaling.fit(values, ("a",), {"a": train[0]}, rows, kind=kind)
    mean, spread = math.fsum(train) / len(train), max(map(abs, train)) + 1
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in train) / len(train))
    if kind == "standard":
        assert fitted.shift["a"] == pytest.approx(mean, abs=1e-6 * spread)
        assert fitted.size["a"] == pytest.approx(deviation, rel=1e-4)
    else:
        assert fitted.shift["a"] == pytest.approx(min(train), abs=1e-6 * spread)
        assert fitted.size["a"] == pytest.approx(max(train) - min(train), rel=1e-4)
    assert fitted.deviation["a"] == pytest.approx(deviation, rel=1e-4)
    assert Scaler.from_dict(fitted.to_dict()) == fitted


def test_the_future_changes_nothing_of_the_past():
    table = waves(300)
    changed = table.to_pydict()
    changed["a"] = [v if i < 210 else 1e6 for i, v in enumerate(changed["a"])]
    first, second = small_dataset(table=table), small_dataset(table=changed)
    assert first.scaler == second.scaler
    rows = first.memory.starts["train"][-1] + 20
    assert (first.memory.series.values[:rows] == second.memory.series.values[:rows]).all()


def test_a_constant_training_column_is_refused():
    values = np.array([[0.0], [0.0], [1.0]], dtype=np.float32), ("a",), {"a": 3.0}
    rows = np.array([True, True, False])
    with pytest.raises(UserError, match=r'column "a" is 3 in every training row'):
        scaling.fit(*values, rows, kind="standard")
    assert scaling.fit(*values, rows, kind="none").size == {"a": 1.0}


def test_minmax_maps_training_rows_onto_zero_to_one():
    dataset = small_dataset(small_config(data={"scale": "minmax"}))
    values = dataset.memory.series.values[: int(dataset.memory.starts["train"][-1]) + 20]
    assert float(values.min()) == pytest.approx(0, abs=1e-6)
    assert float(values.max()) == pytest.approx(1, abs=1e-6)


@given(st.lists(numbers, min_size=2, max_size=5))
def test_sums_taken_stretch_by_stretch_are_those_of_the_whole(stretches):
    parts, whole = (scaling.Sums({}, {}, {}, {}, {}) for _ in range(2))
    arrays = [np.array(values, dtype=np.float32) for values in stretches]
    for array in arrays:
        parts.add("a", array, 5.0)
    whole.add("a", np.concatenate(arrays), 5.0)
    found, wanted = parts.scaler("standard"), whole.scaler("standard")
    assert found.size["a"] == pytest.approx(wanted.size["a"], rel=1e-6)
    assert found.shift["a"] == pytest.approx(wanted.shift["a"], rel=1e-6, abs=1e-6)
    found, wanted = parts.scaler("minmax"), whole.scaler("minmax")
    assert (found.shift, found.size) == (wanted.shift, wanted.size)
