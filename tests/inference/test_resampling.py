from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import slipstream
from slipstream import UserError
from slipstream import config as configs
from slipstream.data import series
from slipstream.data.files import read_tables
from slipstream.data.roles import Roles
from slipstream.inference.rows import resample_series
from tests.conftest import small_config


def stored(times, values, ids=None):
    columns = {"time": times, "a": values} | ({} if ids is None else {"id": ids})
    config = configs.load(
        {
            "data": {"time": "time", "context": 2, "horizon": 1}
            | ({} if ids is None else {"id": "id"})
        }
    )
    sources = read_tables(config.data, pa.table(columns))
    return series.prepare_series(sources, config.data, Roles(("a",), ("a",)), min_rows=2)


def read(store):
    return store.read_column("a").tolist()


def test_a_coarser_row_is_the_mean_up_to_its_own_time():
    store = resample_series(stored(np.arange(10.0), np.arange(10.0)), 3.0)
    assert store.time.tolist() == [0.0, 3.0, 6.0, 9.0]
    assert read(store) == pytest.approx([0.0, 2.0, 5.0, 8.0])  # 1 to 3, 4 to 6, 7 to 9
    assert store.index.step == 3.0
    assert store.index.offsets.tolist() == [0, 4]


def test_what_does_not_fill_a_row_is_left_out():
    store = resample_series(stored(np.arange(11.0), np.arange(11.0)), 3.0)
    assert read(store) == pytest.approx([0.0, 2.0, 5.0, 8.0])


def test_a_finer_row_lies_between_its_neighbours():
    store = resample_series(stored(np.arange(4.0) * 10, [0.0, 10.0, 0.0, 20.0]), 5.0)
    assert read(store) == pytest.approx([0.0, 5.0, 10.0, 5.0, 0.0, 10.0, 20.0])


def test_gaps_and_series_stay_apart():
    times = [*range(6), *range(20, 26), *range(7)]
    ids = ["x"] * 12 + ["y"] * 7
    store = resample_series(stored([float(t) for t in times], np.arange(19.0), ids), 2.0)
    assert store.time.tolist() == [0, 2, 4, 20, 22, 24, 0, 2, 4, 6]
    assert store.index.breaks.tolist() == [0, 3, 6]
    assert store.index.offsets.tolist() == [0, 6, 10]
    assert read(store)[:3] == pytest.approx([0.0, 1.5, 3.5])


def test_dates():
    times = np.datetime64("2026-01-01", "us") + np.arange(9) * np.timedelta64(10, "m")
    store = resample_series(stored(times, np.arange(9.0)), 1800.0)
    wanted = np.datetime64("2026-01-01", "us") + np.arange(3) * np.timedelta64(30, "m")
    assert store.time.tolist() == wanted.astype(np.int64).tolist()


def test_a_model_predicts_from_rows_of_another_step(tmp_path):
    def table(step):
        times = np.arange(0.0, 400.0, step)
        return pa.table({"time": times, "a": np.sin(times / 9), "b": np.cos(times / 7)})

    result = slipstream.train(small_config(tmp_path), table(1.0))
    wanted = slipstream.predict(result.run, table(1.0))
    with pytest.raises(UserError, match=r"rows are 0.5 apart, .* 1 .*resample=True"):
        slipstream.predict(result.run, table(0.5))
    with pytest.warns(UserWarning, match=r"resampled from a step of 0.5 to 1"):
        found = slipstream.predict(result.run, table(0.5), resample=True)
    assert found["time"].to_pylist() == wanted["time"].to_pylist()
    np.testing.assert_allclose(found["a_predicted"], wanted["a_predicted"], atol=0.1)
    told = slipstream.evaluate(result.run, table(2.0), resample=True)
    assert "resampled from a step of 2 to 1" in told["notes"]
