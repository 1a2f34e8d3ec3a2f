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
    fitted = scaling.fit({"a": np.array(train + later)}, rows, kind=kind)
    mean = math.fsum(train) / len(train)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in train) / len(train))
    if kind == "standard":
        assert fitted.shift["a"] == pytest.approx(mean, abs=1e-6)
        assert fitted.size["a"] == pytest.approx(deviation, rel=1e-9)
    else:
        assert (fitted.shift["a"], fitted.size["a"]) == (min(train), max(train) - min(train))
    assert fitted.deviation["a"] == pytest.approx(deviation, rel=1e-9)
    assert Scaler.from_dict(fitted.to_dict()) == fitted


def test_the_future_changes_nothing_of_the_past():
    table = waves(300)
    changed = table.to_pydict()
    changed["a"] = [v if i < 210 else 1e6 for i, v in enumerate(changed["a"])]
    first, second = small_dataset(table=table), small_dataset(table=changed)
    assert first.scaler == second.scaler
    rows = first.starts["train"][-1] + 20
    assert (first.series.values[:rows] == second.series.values[:rows]).all()


def test_a_constant_training_column_is_refused():
    values = {"a": np.array([3.0, 3.0, 4.0])}
    rows = np.array([True, True, False])
    with pytest.raises(UserError, match=r'column "a" is 3 in every training row'):
        scaling.fit(values, rows, kind="standard")
    assert scaling.fit(values, rows, kind="none").size == {"a": 1.0}


def test_minmax_maps_training_rows_onto_zero_to_one():
    dataset = small_dataset(small_config(data={"scale": "minmax"}))
    values = dataset.series.values[: int(dataset.starts["train"][-1]) + 20]
    assert float(values.min()) == 0.0
    assert float(values.max()) == 1.0
