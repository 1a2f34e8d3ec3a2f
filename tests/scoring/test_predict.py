from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream import UserError
from slipstream.data import windows
from slipstream.engine.planning import make_plan
from slipstream.models.forecaster import build
from slipstream.scoring import baselines
from slipstream.scoring import batch as batches
from slipstream.scoring import predict as score
from tests.conftest import small_config, small_dataset, waves


def load_all(dataset):
    """A loader of a data set's chunks."""
    return lambda which: dataset.iter_chunks(which, None, rows=1)


def hourly(table):
    """The table with a row an hour."""
    time = np.datetime64("2024-01-01T00", "us") + np.arange(len(table)) * np.timedelta64(1, "h")
    return table.set_column(0, "time", pa.array(time))


def made(table=None, **sections):
    config = small_config(**sections)
    dataset = small_dataset(config, hourly(waves(3000)) if table is None else table)
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
    _, dataset, _ = made(waves(3000), data={"period": 2500})
    found = baselines.fit_baselines(dataset, load_all(dataset))
    assert found["seasonal"][:2] == ("its 2500 rows are more than windows can look back", None)


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


def check_season(dataset, found, period, column="a"):
    """The predictions for the last test windows are the values one season ago."""
    starts = dataset.memory.starts["test"][-5:]
    chunk = next(score.predict_batches(found.predict, chunk_of(dataset, starts)))
    table = score.build_table(chunk, dataset)
    values = waves(3000)[column].to_numpy()
    rows, steps = table["row"].to_numpy(), table["step"].to_numpy()
    ago = rows - steps + 1 - period + (steps - 1) % period
    np.testing.assert_allclose(table[f"{column}_predicted"].to_numpy(), values[ago], rtol=1e-4)


@pytest.mark.parametrize("channels", ["together", "independent"])
def test_a_season_may_begin_before_the_context(channels):
    data = {"context": 6, "horizon": 9, "period": 40, "channels": channels}
    _, dataset, _ = made(waves(3000), data=data)
    found = baselines.fit_baselines(dataset, load_all(dataset))["seasonal"]
    assert found.description == "the values 40 rows ago"
    for column in ("a", "b"):
        check_season(dataset, found, 40, column)
    # the first windows have no such rows, and repeat the last value
    series = dataset.memory.series
    first = found.predict(series, torch.tensor([0, 33, 34]))
    repeated = baselines.predict_repeat(windows.gather_past(series, torch.tensor([0]), 1), 9)
    assert torch.equal(first[: len(repeated), ..., 0], repeated)
    last = first[-len(repeated) :, 0, :, 0]
    assert torch.equal(last.flatten(), series.targets[0])


def test_no_season_reaches_across_a_gap():
    table = hourly(waves(300))
    kept = [row for row in range(300) if not 200 <= row < 210]
    _, dataset, _ = made(table.take(kept), data={"context": 6, "horizon": 2, "targets": ["a"]})
    series = dataset.memory.series
    for start, is_known in ((190, True), (200, False), (217, False), (218, True)):
        values = windows.gather_season(series, torch.tensor([start]), 24)
        assert bool(values.isfinite().all()) is is_known
        if is_known:
            assert torch.equal(values[0], series.targets[start + 6 - 24 : start + 8 - 24])


def test_the_season_is_a_day_or_a_week_by_validation():
    table, hours, data = hourly(waves(3000)), np.arange(3000), {"context": 16, "horizon": 24}
    day = np.sin(hours / 24 * 2 * np.pi)
    week = pa.array(day + 5 * ((hours // 24) % 7 < 5))
    _, dataset, _ = made(table.set_column(1, "a", week), data={**data, "targets": ["a"]})
    assert dataset.index.list_periods() == (24, 168, 8760)
    found = baselines.fit_baselines(dataset, load_all(dataset))["seasonal"]
    assert found.description == "the values 168 rows ago, the best in validation of 24, 168"
    rising = table.set_column(1, "a", pa.array(day + hours / 24))
    _, dataset, _ = made(rising, data={**data, "targets": ["a"]})
    found = baselines.fit_baselines(dataset, load_all(dataset))["seasonal"]
    assert found.description == "the values 24 rows ago, the best in validation of 24, 168"


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=70), st.integers(0, 2**16))
def test_sums_of_runs_are_the_sums_of_their_groups(groups, seed):
    keys = torch.tensor(sorted(groups))
    values = torch.randn(len(keys), 2, 3, generator=torch.Generator().manual_seed(seed)).double()
    values[keys == 3] = torch.nan  # stays in its group
    plain = torch.zeros(5, 2, 3).double().index_add_(0, keys, values)
    runs = batches._sum_runs(values, keys)
    assert int((runs.flatten(1) != 0).all(dim=1).sum()) == len(set(groups))
    found = torch.zeros(5, 2, 3).double().index_add_(0, keys, runs)
    torch.testing.assert_close(found, plain, equal_nan=True)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=70), st.integers(0, 2**16))
def test_sums_of_runs_whose_lengths_are_known_are_the_sums_of_their_groups(groups, seed):
    keys = torch.tensor(sorted(groups))
    values = torch.randn(len(keys), 2, 3, generator=torch.Generator().manual_seed(seed)).double()
    values[keys == 3] = torch.nan
    lengths = torch.unique_consecutive(keys, return_counts=True)[1].tolist()
    found, plain = (torch.zeros(5, 2, 3).double() for _ in range(2))
    batches.add_by_group(plain, keys, values)
    batches.add_by_group(found, keys, values, lengths)
    torch.testing.assert_close(found, plain, equal_nan=True)


@pytest.mark.parametrize("series", [1, 3, batches.MAX_RUNS + 1])
def test_batches_say_how_many_windows_follow_each_other_in_a_series(series):
    table = waves(100 * series)
    table = table.append_column("unit", [[f"u{i // 100:02}" for i in range(100 * series)]])
    _, dataset, predict = made(table, data={"id": "unit"})
    starts = dataset.memory.starts["train"]
    (batch,) = score.predict_batches(predict, chunk_of(dataset, starts))
    if series > batches.MAX_RUNS:
        assert batch.runs is None
        return
    counts = torch.bincount(batch.find_series(), minlength=series)
    assert batch.runs == tuple(counts.tolist())
    sums = score.accumulate([batch], dataset).compute()
    unknown = score.accumulate([batch._replace(runs=None)], dataset).compute()
    for name, figures in sums["per_series"].items():
        assert figures == pytest.approx(unknown["per_series"][name])
    assert sums["overall"] == pytest.approx(unknown["overall"])


def test_a_network_reads_a_large_pass_in_parts(monkeypatch):
    config, dataset, _ = made()
    (chunk,) = dataset.iter_chunks("train", None, rows=1)
    model, sizes = build(config.model, dataset.signature).eval(), []
    model.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    how = model, make_plan(config, data_bytes=0), dataset.signature, dataset.scaler
    whole = score.make_predictor(*how)(chunk.series, chunk.starts[:700])
    monkeypatch.setattr(score, "MAX_SEQUENCES", 256)
    monkeypatch.setattr(score, "EVAL_BATCH", 64)
    parts = score.make_predictor(*how)(chunk.series, chunk.starts[:700])
    assert sizes == [700, 256, 256, 188]
    torch.testing.assert_close(parts, whole)


def test_where_memory_runs_out_all_predictors_get_fewer_windows():
    _, dataset, predict = made()
    sizes = []

    def predict_few(series, starts):
        sizes.append(len(starts))
        if len(starts) > 300:
            raise MemoryError("out of memory")
        return predict(series, starts)

    starts = dataset.memory.starts["train"]
    chunks = chunk_of(dataset, starts)
    rows = list(score.predict_side_by_side([predict, predict_few], lambda _: chunks, "train"))
    assert torch.equal(torch.cat([row[1].starts for row in rows]), starts)
    assert all(len(row[0].starts) == len(row[1].starts) <= 300 for row in rows)
    assert sum(size > 300 for size in sizes) < 4  # later passes are as small as the first that fits
    wanted = list(score.predict_batches(predict, chunks))
    together = [torch.cat([b.prediction for b in many]) for many in ([r[1] for r in rows], wanted)]
    torch.testing.assert_close(*together)


def test_a_single_window_that_does_not_fit_raises_the_error():
    _, dataset, _ = made()

    def predict(*_):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        list(score.predict_batches(predict, chunk_of(dataset, dataset.memory.starts["test"])))


@given(
    windows=st.integers(1, 8192),
    each=st.integers(1, 2**20),
    constant=st.integers(0, 2**30),
    free=st.integers(0, 140 * 2**30),
)
@example(windows=1, each=1, constant=11403, free=22807)
def test_passes_on_a_gpu_fit_into_its_free_memory(windows, each, constant, free):
    passes = [score.MeasuredPass(n, constant + n * each) for n in (windows, 4 * windows)]
    size = score.choose_pass_size(*passes, free)
    assert size & (size - 1) == 0
    assert 2 * size > windows
    if size > windows:
        assert size <= score.MAX_GPU_WINDOWS
        assert constant + size * each <= min(free / 2, 2**32)


def test_windows_of_few_numbers_are_predicted_by_the_hundred_thousand():
    each, trees = 48 * 5 * 40, 300 * 2**20  # what trees take does not grow
    passes = [score.MeasuredPass(n, trees + n * each) for n in (8192, 32768)]
    assert score.choose_pass_size(*passes, 130 * 2**30) == 2**18
    assert score.choose_pass_size(*passes, 6 * 2**30) == 2**18
    assert score.choose_pass_size(*passes, 2**30) == 2**14


@pytest.mark.gpu
def test_large_passes_give_the_same_metrics(monkeypatch):
    _, dataset, _ = made(hourly(waves(200_000)), engine={"device": "cuda"})
    (chunk,) = dataset.iter_chunks("train", None, rows=1)
    chunk = chunk._replace(series=chunk.series.to(torch.device("cuda")))
    fitted = baselines.fit_baselines(dataset, lambda _: [chunk], without=("gbm",))
    predict = fitted["ridge"].predict
    large = list(score.predict_batches(predict, [chunk]))
    assert max(len(batch.starts) for batch in large) > score.FIRST_GPU_WINDOWS
    monkeypatch.setattr(score, "choose_pass_size", lambda small, *_: small.num_windows)
    small = list(score.predict_batches(predict, [chunk]))
    figures = [score.accumulate(many, dataset).compute()["overall"] for many in (large, small)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)  # fp32 products of other sizes


@pytest.mark.gpu
def test_sums_by_group_are_the_same_each_time():
    keys = torch.arange(10_000, device="cuda") // 700
    values = torch.randn(10_000, 4, device="cuda").double()
    found = []
    for _ in range(20):
        found.append(torch.zeros(15, 4, device="cuda").double())
        batches.add_by_group(found[-1], keys, values)
    assert all(torch.equal(sums, found[0]) for sums in found)


def test_tables_of_a_large_pass_are_groups_of_whole_windows(monkeypatch):
    monkeypatch.setattr(score, "TABLE_ROWS", 50)
    _, dataset, predict = made()
    (batch,) = score.predict_batches(
        predict, chunk_of(dataset, dataset.memory.starts["test"][:100])
    )
    whole, parts = score.build_table(batch, dataset), list(score.build_tables(batch, dataset))
    assert [part.num_rows for part in parts] == [48] * 8 + [16]
    assert all(part["step"][0].as_py() == 1 for part in parts)
    assert pa.concat_tables(parts).equals(whole)
