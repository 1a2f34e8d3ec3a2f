from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from slipstream import UserError
from slipstream.engine.planning import make_plan
from slipstream.models.forecaster import build
from slipstream.scoring import baselines
from slipstream.scoring import predict as score
from tests.conftest import small_config, small_dataset, waves


def load_all(dataset):
    """A loader of a data set's chunks."""
    return lambda which: dataset.iter_chunks(which, None, rows=1)


def made(**sections):
    config = small_config(**sections)
    table = waves(3000)
    time = np.datetime64("2024-01-01T00", "us") + np.arange(3000) * np.timedelta64(1, "h")
    dataset = small_dataset(config, table.set_column(0, "time", pa.array(time)))
    model = build(config.model, dataset.signature).eval()
    how = dataset.signature, dataset.scaler
    predict = score.make_predictor(model, make_plan(config, data_bytes=0), *how)
    return config, dataset, predict


def chunk_of(dataset, starts):
    """Some windows of a data set, as one chunk."""
    (piece,) = dataset.iter_chunks("test", None, rows=1)
    return [piece._replace(starts=starts)]


@pytest.mark.parametrize("channels", ["together", "independent"])
def test_every_window_is_scored_once_and_the_table_agrees_with_the_metrics(channels):
    _, dataset, predict = made(data={"channels": channels})
    starts = dataset.memory.starts["train"]
    chunks = list(score.predict_batches(predict, chunk_of(dataset, starts)))
    assert torch.equal(torch.cat([chunk.starts for chunk in chunks]), starts)
    found = score.accumulate(chunks, dataset).compute()
    table = pa.concat_tables([score.build_table(chunk, dataset) for chunk in chunks])
    assert table.num_rows == 4 * len(starts)
    for name in dataset.signature.targets:
        error = table[f"{name}_predicted"].to_numpy() - table[name].to_numpy()
        per_target = found["per_target"][name]
        assert per_target["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-4)
        assert per_target["max_error"] == pytest.approx(np.abs(error).max(), rel=1e-4)


def test_the_table_names_rows_times_and_true_values():
    _, dataset, predict = made()
    starts = dataset.memory.starts["test"][:3]
    chunk = next(score.predict_batches(predict, chunk_of(dataset, starts)))
    table = score.build_table(chunk, dataset)
    assert table.column_names[:4] == ["series", "row", "time", "step"]
    rows = table["row"].to_numpy()
    assert rows.tolist() == [int(s) + 16 + h for s in starts for h in range(4)]
    assert table["step"].to_pylist() == [1, 2, 3, 4] * 3
    assert table["time"][0].as_py().hour == int(starts[0] + 16) % 24
    truth = waves(3000)["b"].to_numpy()[rows]
    np.testing.assert_allclose(table["b"].to_numpy(), truth, rtol=1e-5)


def test_times_go_on_past_the_end_of_a_series():
    _, dataset, predict = made()
    last = torch.tensor([3000 - 16])
    chunk = next(score.predict_batches(predict, chunk_of(dataset, last), truth=False))
    table = score.build_table(chunk, dataset)
    assert "a" not in table.column_names
    hours = np.diff(table["time"].to_numpy()).astype("timedelta64[h]").astype(int)
    assert hours.tolist() == [1, 1, 1]
    assert table["row"].to_pylist() == [3000, 3001, 3002, 3003]


def test_quantiles_get_columns_and_coverage():
    _, dataset, predict = made(train={"loss": "quantile", "quantiles": [0.05, 0.5, 0.95]})
    chunks = list(score.predict_batches(predict, chunk_of(dataset, dataset.memory.starts["val"])))
    found = score.accumulate(chunks, dataset).compute()
    assert 0 <= found["overall"]["coverage"] <= 1
    table = score.build_table(chunks[0], dataset)
    assert {"a_q5", "a_q50", "a_q95", "a_predicted"} <= set(table.column_names)
    assert table["a_predicted"].equals(table["a_q50"])


def test_baselines_are_absent_where_they_mean_nothing():
    _, dataset, _ = made(data={"horizon": 0, "targets": ["a"]})
    found = baselines.fit_baselines(dataset, load_all(dataset))
    assert found["seasonal"].predict is None
    assert "training mean" in found["repeat"].description
    batches = score.predict_batches(found["repeat"].predict, load_all(dataset)("train"))
    train = score.accumulate(batches, dataset).compute()
    assert abs(train["overall"]["bias"]) < 1e-6
    assert train["overall"]["r2"] == pytest.approx(0, abs=1e-9)
    _, dataset, _ = made()
    found = baselines.fit_baselines(dataset, load_all(dataset))
    assert found["seasonal"][:2] == ("its 24 rows are more than data.context", None)


def test_the_seasonal_baseline_repeats_the_day_before():
    _, dataset, _ = made(data={"context": 24, "horizon": 30, "targets": ["a"]})
    found = baselines.fit_baselines(dataset, load_all(dataset))["seasonal"]
    chunk = next(
        score.predict_batches(found.predict, chunk_of(dataset, dataset.memory.starts["test"][:5]))
    )
    table = score.build_table(chunk, dataset)
    values = waves(3000)["a"].to_numpy()
    rows, steps = table["row"].to_numpy(), table["step"].to_numpy()
    ago = rows - steps + 1 - 24 + (steps - 1) % 24
    np.testing.assert_allclose(table["a_predicted"].to_numpy(), values[ago], rtol=1e-5)


def test_the_ridge_sees_fewer_windows_where_all_would_take_too_long(monkeypatch):
    _, dataset, _ = made()
    monkeypatch.setattr(baselines, "RIDGE_WORK", 1.0)
    found = baselines.fit_baselines(dataset, load_all(dataset))
    assert "one training window in 3" in found["ridge"].description


FAR = 123456789.0


@pytest.mark.parametrize("quantiles", [(), (0.1, 0.5, 0.9)])
def test_physical_values_far_from_zero_keep_their_digits(quantiles):
    train = {"loss": "quantile", "quantiles": list(quantiles)} if quantiles else {}
    config = small_config(data={"targets": ["a"]}, train=train)
    table = waves(400).to_pydict()
    table["a"] = [value + FAR for value in table["a"]]
    dataset = small_dataset(config, table)
    (piece,) = dataset.iter_chunks("test", None, rows=1)
    count = 3 if quantiles else 1

    def predict(series, starts):
        """What comes next, with quantiles at a distance of an eighth of a scaled unit."""
        truth = series.targets[starts[:, None] + series.target_rows]
        return torch.stack([truth + (q - count // 2) / 8 for q in range(count)], dim=-1)

    (chunk,) = score.predict_batches(predict, [piece])
    reach = {"80": torch.full((4, 1), 0.25), "95": torch.full((4, 1), 0.5)}
    found = score.build_table(chunk, dataset, reach).to_pandas()
    truth = np.array(table["a"])[found["row"]]
    assert len(np.unique(truth)) > 50
    size = dataset.scaler.size["a"]
    wanted = {"a": 0, "a_predicted": 0, "a_lo80": -0.25, "a_hi80": 0.25, "a_lo95": -0.5}
    wanted |= {"a_q10": -0.125, "a_q50": 0, "a_q90": 0.125} if quantiles else {}
    for name, off in wanted.items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name] - FAR, truth - FAR + off * size, rtol=0, atol=1e-6)


def test_a_table_never_writes_one_target_over_another():
    """Models that were trained when such names were accepted are still about."""
    _, dataset, predict = made(data={"targets": ["a", "b"]})
    signature = dataset.signature.model_copy(update={"targets": ("a", "a_predicted")})
    scaler = dataset.scaler
    for by_column in (scaler.shift, scaler.size):
        by_column["a_predicted"] = by_column["b"]
    chunk = next(
        score.predict_batches(predict, chunk_of(dataset, dataset.memory.starts["test"][:3]))
    )
    with pytest.raises(UserError, match='would be named "a_predicted"'):
        score.build_table(chunk, replace(dataset, signature=signature))
