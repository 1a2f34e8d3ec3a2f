"""Models that prepare their data: raw rows to predictions, by whatever way they are asked for."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import slipstream
from slipstream import config as configs
from slipstream.base.errors import UserError
from slipstream.data import dataset as datasets
from tests.conftest import small_config
from tests.data.prepare.chain.tables import MINUTE, START, make_bars

TREND = "trend.csv"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Bars of two series as CSV, and an hourly trend beside them."""
    folder = tmp_path_factory.mktemp("files")
    pa.csv.write_csv(make_bars(500, names=("A", "B")), folder / "bars.csv")
    times = pa.array(START + 60 * MINUTE * np.arange(-6, 140)).cast(pa.timestamp("us"))
    pa.csv.write_csv(pa.table({"time": times, "value": np.cos(np.arange(146.0))}), folder / TREND)
    return folder


def make_config(files, out, **sections):
    steps = [
        {"step": "outliers", "columns": ["volume"], "method": "quantile", "high": 0.9},
        {"step": "resample", "every": "30min"},
        {"step": "filter", "kind": "butterworth", "columns": ["close"], "cutoff_hz": 1e-4},
        {"step": "formula", "name": "change", "value": "log(close / lag(close, 1))"},
        {"step": "calendar", "features": ["hour"]},
        {"step": "join", "path": str(files / TREND), "period": "1h", "prefix": "trend_"},
    ]
    data = {"path": str(files / "bars.csv"), "time": "time", "id": "name", "prepare": steps}
    data |= {"targets": ["close"], "future": ["hour_sin", "hour_cos"], "context": 12}
    return small_config(out, data=data | {"horizon": 3}, **sections)


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    return slipstream.train(make_config(files, tmp_path_factory.mktemp("runs")), quiet=True)


def compare(result, predicted):
    """Compare predictions of raw rows with those that the run has written; count them."""
    own = pq.read_table(f"{result.run}/predictions.parquet")
    keys = ("series", "time", "step")
    rows = [
        dict(zip(zip(*(table[key].to_pylist() for key in keys), strict=True), values, strict=True))
        for table, values in ((one, one["close_predicted"].to_pylist()) for one in (own, predicted))
    ]
    assert rows[0].keys() <= rows[1].keys()
    assert [rows[1][key] for key in rows[0]] == list(rows[0].values())
    return len(rows[0])


def test_predictions_of_raw_rows_are_those_of_training(trained, files):
    assert compare(trained, slipstream.predict(trained, files / "bars.csv", every=True)) > 100
    table = pa.csv.read_csv(files / "bars.csv")
    assert compare(trained, slipstream.load(trained).predict(table, every=True)) > 100


def test_a_part_of_the_rows_gives_the_same_forecast(trained, files):
    """Rows are cut where the filter has forgotten what it would carry over from older ones."""
    table = pa.csv.read_csv(files / "bars.csv")
    ends = np.concatenate([np.arange(100, 500), np.arange(600, 1000)])
    whole = slipstream.predict(trained, table)
    part = slipstream.predict(trained, table.take(ends))
    assert whole["time"].to_pylist() == part["time"].to_pylist()
    np.testing.assert_allclose(
        part["close_predicted"].to_numpy(), whole["close_predicted"].to_numpy(), rtol=1e-6
    )


def test_own_and_new_data_have_the_same_metrics(trained, files):
    own = slipstream.evaluate(trained)
    assert own["metrics"] == trained.summary["metrics"]["test"]
    new = slipstream.evaluate(trained, files / "bars.csv")
    assert new["windows"] > own["windows"]


def test_fitted_ranges_are_stored_with_the_model_and_stay(trained, files):
    stored = json.loads((trained.run / "model" / "prepare.json").read_text())["limits"]["1"]
    low, high = stored["volume"]
    table = pa.csv.read_csv(files / "bars.csv")
    volume = table["volume"].to_numpy()
    others = table.set_column(table.column_names.index("volume"), "volume", pa.array(volume * 50))
    predicted = slipstream.predict(trained, others)
    clipped = np.clip(volume * 50, low, high)
    again = table.set_column(table.column_names.index("volume"), "volume", pa.array(clipped))
    assert predicted["close_predicted"] == slipstream.predict(trained, again)["close_predicted"]
    shown = trained.summary["data"]["prepare"]["limits"]
    assert {name: list(ends) for name, ends in shown["1"].items()} == stored


def test_the_config_of_a_run_has_the_steps(trained):
    loaded = configs.load(trained.run / "config.toml")
    assert loaded.data.prepare == trained.config.data.prepare
    assert len(loaded.data.prepare) == 6


@pytest.mark.filterwarnings("ignore:column")
def test_predict_joins_another_table_where_one_is_passed(trained, files):
    table = pa.csv.read_csv(files / TREND)
    same = slipstream.predict(trained, files / "bars.csv", joins={TREND: table})
    assert same == slipstream.predict(trained, files / "bars.csv")
    other = table.set_column(1, "value", pa.array(np.full(len(table), 9.0)))
    assert same != slipstream.predict(trained, files / "bars.csv", joins={TREND: other})
    with pytest.raises(UserError, match=r"joins are for new data"):
        slipstream.evaluate(trained, joins={TREND: other})


def test_a_joined_file_that_is_gone_is_named(trained, files):
    (files / TREND).rename(files / "moved.csv")
    try:
        with pytest.raises(
            UserError, match=r"step 6 \(join\): .*trend\.csv: there is no such file"
        ):
            slipstream.predict(trained, files / "bars.csv")
        moved = slipstream.predict(trained, files / "bars.csv", joins={TREND: files / "moved.csv"})
    finally:
        (files / "moved.csv").rename(files / TREND)
    assert moved == slipstream.predict(trained, files / "bars.csv")


def test_an_ensemble_prepares_the_data_of_each_member(trained, files, tmp_path):
    other = slipstream.train(make_config(files, tmp_path, seed=1), quiet=True)
    joint = slipstream.ensemble([trained, other], out=tmp_path, quiet=True)
    assert slipstream.predict(joint, files / "bars.csv").num_rows == 6


def test_folds_and_repeats_have_the_steps(files, tmp_path):
    config = make_config(files, tmp_path, train={"repeats": 2, "epochs": 1})
    config = configs.replace_settings(config, {"data.split": {"walk_forward": 2}})
    result = slipstream.train(config, quiet=True)
    dataset = datasets.load_dataset(config)
    first = dataset.folds[0].starts["train"].numpy()
    assert (
        first[first < 249].max() + 12 + 3 == 249 - 2 * 24 - 25
    )  # two test blocks, and a validation block
    assert slipstream.predict(result, files / "bars.csv").num_rows == 6


@pytest.mark.slow
def test_a_search_has_the_steps_and_fits_them_on_its_first_fold(files, tmp_path):
    tune = {"space": {"train.lr": [1e-3, 1e-2]}, "trials": 2, "folds": 2}
    config = make_config(files, tmp_path, tune=tune | {"retrain": 1, "retrain_seeds": 2})
    result = slipstream.tune(config, quiet=True)
    assert slipstream.predict(result, files / "bars.csv").num_rows == 6
    fold, whole = (datasets.load_dataset(config, num_folds=count).limits for count in (2, 1))
    assert fold != whole


def test_an_encoder_hands_its_steps_and_ranges_on(files, tmp_path):
    steps = [
        {"step": "outliers", "columns": ["volume"], "method": "quantile", "high": 0.9},
        {"step": "formula", "name": "change", "value": "log(close / lag(close, 1))"},
    ]
    data = {"path": str(files / "bars.csv"), "time": "time", "id": "name", "prepare": steps}
    data |= {"inputs": ["volume", "change"], "split": {"train": 0.5, "val": 0.2, "test": 0.3}}
    encoder = slipstream.pretrain(small_config(tmp_path, data=data), quiet=True)
    label = {"step": "label", "name": "move", "column": "close", "rows": 4, "kind": "sign"}
    tuned = {"task": "classify", "targets": ["move"], "prepare": [*steps, label], "horizon": 0}
    tuned |= {"split": {"train": 0.7, "val": 0.1, "test": 0.2}}
    config = small_config(tmp_path, data=data | tuned, train={"init_from": str(encoder.run)})
    result = slipstream.train(config, quiet=True)
    stored = [
        json.loads((one.run / "model" / "prepare.json").read_text()) for one in (encoder, result)
    ]
    assert stored[0] == stored[1]
    assert slipstream.evaluate(result)["windows"] == result.summary["windows"]["test"]


def test_looking_ahead_is_purged_and_its_latency_reported(files, tmp_path):
    steps = [
        {"step": "filter", "kind": "moving_average", "columns": ["volume"], "rows": 7}
        | {"centered": True, "lookahead": True, "into": "calm"}
    ]
    data = {"path": str(files / "bars.csv"), "time": "time", "id": "name", "prepare": steps}
    data |= {"targets": ["close"], "inputs": ["calm"], "horizon": 0, "context": 8}
    result = slipstream.train(small_config(tmp_path, data=data), quiet=True)
    facts = result.summary["data"]["prepare"]
    assert (facts["look_ahead"], facts["latency_rows"], facts["latency"]) == (3, 3, 2700.0)
    starts = datasets.load_dataset(result.config).memory.starts
    own = 497  # the last three rows are not known yet
    assert [int(starts[which][starts[which] < own].max()) + 7 for which in ("train", "val")] == [
        round(own * 0.7) - 4,
        round(own * 0.8) - 4,
    ]
    page = slipstream.report(result).read_text()
    assert "3 rows after its own, 45 minutes later" in page
    predicted = slipstream.predict(result, files / "bars.csv")
    last = max(time for time in predicted["time"].to_pylist())
    assert np.datetime64(last) == np.datetime64(START + 15 * MINUTE * 496, "us")


def test_a_run_is_resumed_with_its_steps(files, tmp_path):
    config = make_config(files, tmp_path, train={"epochs": 1})
    first = slipstream.train(config, quiet=True)
    more = slipstream.train(resume=first.run, overrides="train.epochs=2", quiet=True)
    assert more.summary["epochs"] == 2
