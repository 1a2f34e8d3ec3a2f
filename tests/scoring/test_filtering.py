"""Filters of predictions in training, evaluation and prediction."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream.base.errors import UserError
from slipstream.config import PredictFilter
from slipstream.data.filters import RowFilter, design_filter
from tests.conftest import merged, small_config, waves

EMA = {"kind": "ema", "rows": 5}
SET_EMA = ["predict.filter.kind=ema", "predict.filter.rows=5"]


def train(folder, table=None, **sections):
    path = folder / "table.csv"
    (waves(600) if table is None else table).to_pandas().to_csv(path, index=False)
    data = {"path": str(path), "targets": ["a"], "horizon": 0, "context": 8}
    quick = {"data": data, "model": {"kind": "mlp"}, "train": {"epochs": 1}}
    return slipstream.train(small_config(folder, **merged(quick, sections)), quiet=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    return train(tmp_path_factory.mktemp("filtered"), predict={"filter": EMA})


def filter_by_hand(values, settings=EMA, step=1.0):
    design = design_filter(PredictFilter(**settings), step)
    assert design is not None
    one = RowFilter(design)
    return np.array([one.push(value) for value in values])


def with_gap(rows=80):
    """Two series, the second with a gap of 50 steps after 30 rows."""
    time = np.arange(rows)
    other = np.where(time < 30, time, time + 50)
    table = waves(2 * rows).to_pydict()
    return {**table, "time": np.concatenate([time, other]), "id": ["one"] * rows + ["two"] * rows}


def test_the_numbers_of_training_are_as_without_a_filter_and_stand_beside_the_filtered(
    result, filtered
):
    plain, summary = result.summary, filtered.summary
    assert summary["unfiltered"]["metrics"] == plain["metrics"]
    assert summary["unfiltered"]["scaled"] == plain["scaled"]
    assert summary["metrics"]["test"]["mae"] != plain["metrics"]["test"]["mae"]
    assert summary["filter"] == {**EMA, "delay_rows": pytest.approx(2.0)}
    assert "filter" not in plain


def test_the_scores_are_those_of_predictions_filtered_by_hand(result, filtered):
    read = pyarrow.parquet.read_table
    plain = read(result.run / "predictions.parquet")
    written = read(filtered.run / "predictions.parquet")
    expected = filter_by_hand(plain["a_predicted"].to_numpy())
    np.testing.assert_allclose(written["a_predicted"].to_numpy(), expected, rtol=1e-12)
    error = np.abs(expected - plain["a"].to_numpy()).mean()
    assert filtered.summary["metrics"]["test"]["mae"] == pytest.approx(error, rel=1e-9)


def test_evaluate_sets_changes_and_removes_a_filter(result, filtered):
    scores = slipstream.evaluate(result.run, overrides=SET_EMA)
    assert scores["metrics"] == pytest.approx(filtered.summary["metrics"]["test"])
    assert scores["unfiltered"]["metrics"] == pytest.approx(result.summary["metrics"]["test"])
    without = slipstream.evaluate(filtered.run, overrides="predict.filter=none")
    assert without["metrics"] == pytest.approx(result.summary["metrics"]["test"])
    assert "unfiltered" not in without
    assert "unfiltered" in repr(scores)


@pytest.mark.parametrize("kind", ["moving_average", "savgol", "butterworth"])
def test_predict_restarts_the_filter_at_each_series_and_after_each_gap(result, kind):
    settings = {"kind": kind, "rows": 7}
    overrides = [f"predict.filter.kind={kind}", "predict.filter.rows=7", "data.id=id"]
    table = with_gap()
    plain = slipstream.predict(result.run, table, overrides=["data.id=id"]).to_pydict()
    smooth = slipstream.predict(result.run, table, overrides=overrides).to_pydict()
    raw = np.array(plain["a_predicted"])
    edges = [i for i in range(1, len(raw)) if plain["row"][i] != plain["row"][i - 1] + 1]
    assert len(edges) == 2
    pieces = [filter_by_hand(part, settings) for part in np.split(raw, edges)]
    np.testing.assert_allclose(smooth["a_predicted"], np.concatenate(pieces), rtol=1e-12)
    for first in (0, *edges):
        assert smooth["a_predicted"][first] == pytest.approx(raw[first], rel=1e-12)


def test_rows_on_either_side_of_a_gap_do_not_meet_where_windows_have_one_row(tmp_path):
    one_row = train(tmp_path, data={"context": 1})
    options = ["data.id=id", "predict.filter.kind=ema", "predict.filter.rows=5"]
    plain = slipstream.predict(one_row.run, with_gap(), overrides=options[:1]).to_pydict()
    smooth = slipstream.predict(one_row.run, with_gap(), overrides=options).to_pydict()
    for first in (0, 80, 110):
        assert smooth["a_predicted"][first] == pytest.approx(plain["a_predicted"][first])
    assert smooth["a_predicted"][109] != pytest.approx(plain["a_predicted"][109])


@pytest.fixture(scope="module")
def forecaster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecaster")
    more = {"loss": "quantile", "quantiles": [0.1, 0.5, 0.9], "repeats": 2}
    sections = {"data": {"horizon": 4}, "train": more}
    return train(folder, **sections, predict={"filter": {"kind": "savgol", "rows": 6}})


def test_the_last_forecast_is_that_of_all_windows_before_it(forecaster):
    every = slipstream.predict(forecaster.run, waves(60), every=True)
    last = slipstream.predict(forecaster.run, waves(60))
    assert last.num_rows == 4
    for name in last.column_names[3:]:
        np.testing.assert_allclose(last[name], every[name].slice(every.num_rows - 4), rtol=1e-12)
    assert json.loads(last.schema.metadata[b"filter"])["kind"] == "savgol"


def test_each_step_ahead_is_filtered_on_its_own_and_quantiles_do_not_cross(forecaster):
    smooth = slipstream.predict(forecaster.run, waves(60), every=True)
    off = {"overrides": "predict.filter=none"}
    plain = slipstream.predict(forecaster.run, waves(60), every=True, **off)
    values = np.stack([plain[f"a_q{q}"].to_numpy() for q in (10, 50, 90)], axis=-1)
    expected = filter_by_hand(values.reshape(-1, 4, 3), {"kind": "savgol", "rows": 6})
    expected = np.sort(expected, axis=-1).reshape(-1, 3)
    for place, name in enumerate(("a_q10", "a_q50", "a_q90")):
        np.testing.assert_allclose(smooth[name].to_numpy(), expected[:, place], rtol=1e-12)


def test_intervals_have_the_widths_of_unfiltered_errors_around_filtered_predictions(forecaster):
    plain = slipstream.predict(
        forecaster.run, waves(60), every=True, overrides="predict.filter=none"
    )
    smooth = slipstream.predict(forecaster.run, waves(60), every=True)
    for table in (plain, smooth):
        middle = (table["a_lo80"].to_numpy() + table["a_hi80"].to_numpy()) / 2
        np.testing.assert_allclose(middle, table["a_predicted"].to_numpy(), rtol=1e-9)
    widths = [one["a_hi80"].to_numpy() - one["a_lo80"].to_numpy() for one in (plain, smooth)]
    np.testing.assert_allclose(*widths, rtol=1e-9)


def test_lanes_and_their_mean_are_scored_with_and_without(forecaster):
    summary = forecaster.summary
    uses = summary["ensemble"] if summary["uses"] == "ensemble" else summary
    for which in ("val", "test"):
        scores = slipstream.evaluate(forecaster.run, on=which)
        assert scores["metrics"] == pytest.approx(uses["metrics"][which])
        single = slipstream.evaluate(forecaster.run, on=which, ensemble=False)
        without = summary["unfiltered"]["metrics"][which]
        assert single["unfiltered"]["metrics"] == pytest.approx(without)
    assert summary["unfiltered"]["metrics"].keys() == {"train", "val", "test"}


def test_an_ensemble_of_runs_has_the_filter_of_its_members(result, filtered, tmp_path):
    with pytest.raises(UserError, match=r"predict\.filter is"):
        slipstream.ensemble([result.run, filtered.run], out=tmp_path)
    with pytest.raises(UserError, match="change it when the ensemble is used"):
        slipstream.ensemble([result.run, filtered.run], out=tmp_path, overrides=SET_EMA)
    joined = slipstream.ensemble([result.run, train(tmp_path, seed=1).run], out=tmp_path)
    scores = slipstream.evaluate(joined.run, overrides=SET_EMA)
    plain = joined.summary["metrics"]["test"]
    assert scores["unfiltered"]["metrics"] == pytest.approx(plain, rel=1e-5)
    assert scores["metrics"]["mae"] != plain["mae"]


def test_probabilities_of_classes_are_averaged(tmp_path):
    table = waves(500)
    label = ["up" if value > 10 else "down" for value in table["a"].to_pylist()]
    table = table.append_column("state", pa.array(label))
    data = {"task": "classify", "targets": ["state"], "inputs": ["b", "c"]}
    average = {"kind": "moving_average", "rows": 3}
    classified = train(tmp_path, table, data=data, predict={"filter": average})
    smooth = pyarrow.parquet.read_table(classified.run / "predictions.parquet")
    plain = slipstream.predict(classified.run, table, overrides="predict.filter=none")
    expected = filter_by_hand(plain["p_up"].to_numpy(), average)
    whole = slipstream.predict(classified.run, table)
    np.testing.assert_allclose(whole["p_up"].to_numpy(), expected, atol=1e-6)
    likely = np.where(whole["p_up"].to_numpy() > 0.5, "up", "down")
    assert whole["predicted"].to_pylist() == likely.tolist()
    assert classified.summary["unfiltered"]["metrics"]["test"].keys() >= {"log_loss", "auc"}
    assert smooth.num_rows == classified.summary["windows"]["test"]


def test_a_cut_off_that_the_rows_do_not_allow_is_refused_before_training(tmp_path):
    with pytest.raises(UserError, match="below half their rate"):
        train(tmp_path, predict={"filter": {"kind": "butterworth", "cutoff_hz": 0.7}})
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]


def test_a_stride_is_refused_on_a_trained_run_too(result):
    with pytest.raises(UserError, match="needs consecutive windows"):
        slipstream.evaluate(result.run, overrides=[*SET_EMA, "data.stride=3"])


def test_the_report_has_both_errors_and_the_delay(filtered):
    page = slipstream.report(filtered.run).read_text(encoding="utf-8")
    assert "without predict.filter" in page
    assert "a steady change is 2 rows late" in page
