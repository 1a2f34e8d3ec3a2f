"""Inputs that are known ahead, `data.future`: from the table to the forecast."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from torch import nn

import slipstream
from slipstream import UserError
from tests.conftest import KINDS, merged, mostly_slow, small_config, waves

HORIZON = 4
JOB = {
    "data": {"targets": ["load"], "future": ["planned"], "context": 8},
    "model": {"kind": "gru"},
}


def planned_load(rows=400, *, ahead=0, seed=0):
    """A load that follows a random plan; of the rows ahead, only the plan is known."""
    draw = np.random.default_rng(seed)
    planned = draw.standard_normal(rows + ahead)
    load = 50 + 5 * planned + 0.2 * draw.standard_normal(rows + ahead)
    other = np.sin(np.arange(rows + ahead) / 5)
    unknown = np.arange(rows + ahead) >= rows
    return {
        "time": np.arange(rows + ahead),
        "planned": planned,
        "other": pa.array(other, mask=unknown),
        "load": pa.array(load, mask=unknown),
    }


def job(out="runs", **sections):
    return small_config(out, **merged(JOB, sections))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = job(tmp_path_factory.mktemp("future"), train={"epochs": 6, "lr": 0.02})
    return slipstream.train(config, pa.table(planned_load()))


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "linear"))
def test_every_kind_learns_what_only_the_rows_ahead_tell(tmp_path, kind):
    settings = {"epochs": 12, "lr": 0.02, "patience": 12}
    config = job(tmp_path, model={"kind": kind, "layers": 1}, train=settings)
    scaled = slipstream.train(config, pa.table(planned_load())).summary["scaled"]["test"]
    assert scaled["mse"] < 0.2  # 1 without the plan


def test_ridge_reads_them_as_well(run):
    ridge = run.summary["baselines"]["ridge"]
    assert ridge["scaled"]["test"]["mse"] < 0.01
    assert "known ahead" in ridge["what"]
    assert run.summary["data"]["columns"]["planned"]["roles"] == ["inputs", "future"]


def predict_at(run, table, row):
    """The forecast whose first row is `row`."""
    whole = slipstream.predict(run.run, pa.table(table), every=True)
    rows, steps = whole["row"].to_numpy(), whole["step"].to_numpy()
    return whole["load_predicted"].to_numpy()[rows - steps + 1 == row]


def change(table, name, rows):
    values = pa.array(table[name]).to_numpy(zero_copy_only=False).copy()
    values[rows] += 1.0
    return table | {name: pa.array(values, from_pandas=True)}


def test_a_forecast_knows_the_rows_ahead_of_named_columns_and_no_others(run):
    table, first = planned_load(60, ahead=HORIZON), 30
    before = predict_at(run, table, first)
    assert len(before) == HORIZON
    later, beyond = slice(first, None), slice(first + HORIZON, None)
    for name in ("load", "other"):
        assert np.array_equal(predict_at(run, change(table, name, later), first), before)
    assert np.array_equal(predict_at(run, change(table, "planned", beyond), first), before)
    for ahead in range(HORIZON):
        changed = predict_at(run, change(table, "planned", first + ahead), first)
        assert abs(changed[ahead] - before[ahead]) > 1
    for name in ("load", "other", "planned"):
        assert not np.array_equal(predict_at(run, change(table, name, first - 1), first), before)


def test_rows_ahead_in_the_training_table_change_nothing(tmp_path):
    table = pa.table(planned_load(ahead=7))
    first, second = (
        slipstream.train(job(tmp_path, model={"kind": "linear"}), one)
        for one in (table[:400], table)
    )
    assert slipstream.load(first.run).scaler == slipstream.load(second.run).scaler
    assert first.summary["windows"] == second.summary["windows"]
    assert first.metrics == second.metrics
    assert any("left out 7 rows at its end" in note for note in second.summary["notes"])


def test_rows_at_the_end_with_nothing_but_the_plan_are_forecast(run):
    table = planned_load(50, ahead=HORIZON)
    found = slipstream.predict(run.run, pa.table(table))
    assert found["row"].to_pylist() == [50, 51, 52, 53]
    assert found["time"].to_pylist() == [50, 51, 52, 53]
    wanted = 50 + 5 * table["planned"][50:]
    assert np.abs(found["load_predicted"].to_numpy() - wanted).max() < 3
    more = slipstream.predict(run.run, pa.table(planned_load(50, ahead=HORIZON + 3)))
    assert more["row"].to_pylist() == [50, 51, 52, 53]


@pytest.mark.parametrize("missing", ["forward", "drop"])
def test_missing_values_do_not_hide_the_rows_ahead(tmp_path, missing):
    config = job(tmp_path, data={"missing": missing}, model={"kind": "linear"})
    run = slipstream.train(config, pa.table(planned_load()))
    table = planned_load(50, ahead=HORIZON)
    table["other"] = pa.array([None, *table["other"].to_pylist()[1:]])
    with pytest.warns(UserWarning, match="other 1"):
        found = slipstream.predict(run.run, pa.table(table))
    assert found["time"].to_pylist() == [50, 51, 52, 53]


@pytest.mark.parametrize("ahead", [0, 1, HORIZON - 1])
def test_predict_demands_the_rows_after_the_last_one(run, ahead):
    table = pa.table(planned_load(50, ahead=ahead))
    has = {0: "no such row", 1: "1 such row in line"}.get(ahead, f"{ahead} such rows in line")
    rows = {3: "1 row"}.get(ahead, f"{HORIZON - ahead} rows")
    message = f"has {has} after its last known one: append {rows} with planned there"
    with pytest.raises(UserError, match=message):
        slipstream.predict(run.run, table)
    with pytest.warns(UserWarning, match=rf"lack planned \(data.future\): {4 - ahead} of 43"):
        every = slipstream.predict(run.run, table, every=True)
    assert every["row"].to_numpy().max() == 49 + ahead


def test_rows_ahead_must_follow_the_last_row_without_a_gap(run):
    table = planned_load(50, ahead=HORIZON)
    table["time"] = np.where(table["time"] >= 52, table["time"] + 5, table["time"])
    with pytest.raises(UserError, match="has 2 such rows in line"):
        slipstream.predict(run.run, pa.table(table))


def test_a_missing_plan_is_named(run):
    table = planned_load(50, ahead=HORIZON)
    table["planned"] = pa.array([*table["planned"][:-1], None])
    with pytest.raises(UserError, match=r'"planned".*is missing'):
        slipstream.predict(run.run, pa.table(table))
    del table["planned"]
    with pytest.raises(UserError, match=r'no column "planned" \(data.future\)'):
        slipstream.predict(run.run, pa.table(table))


def test_rows_ahead_can_be_resampled(run):
    table = planned_load(100, ahead=2 * HORIZON + 1)
    table["time"] = table["time"] / 2
    with pytest.warns(UserWarning, match="resampled"):
        found = slipstream.predict(run.run, pa.table(table), resample=True)
    assert found["time"].to_pylist() == [50, 51, 52, 53]
    assert np.isfinite(found["load_predicted"].to_numpy()).all()


def test_predictions_of_the_run_are_those_of_new_data(run):
    written = pyarrow.parquet.read_table(run.run / "predictions.parquet")
    with pytest.warns(UserWarning, match="lack planned"):
        again = slipstream.predict(run.run, pa.table(planned_load()), every=True)
    assert len(written) > 100
    both = written.join(
        again.select(["row", "step", "load_predicted"]), ["row", "step"], right_suffix="_again"
    )
    np.testing.assert_allclose(both["load_predicted_again"], both["load_predicted"], rtol=1e-6)
    assert slipstream.evaluate(run.run, pa.table(planned_load())).metrics


SHAPES = {
    "channels": {"data": {"targets": ["load", "other"], "channels": "independent"}},
    "quantiles": {"train": {"loss": "quantile"}},
    "repeats": {"train": {"repeats": 2}},
    "folds": {"data": {"split": {"walk_forward": 2, "val": 0.1, "test": 0.2}}},
    "only the plan": {"data": {"inputs": ["planned"]}},
    "augmented": {"augment": {"mixup": 0.3, "cutmix": 0.3, "jitter": 0.1}},
    "normalized": {"model": {"normalize": "window"}},
}


@pytest.mark.parametrize("shape", mostly_slow(SHAPES, "channels", "repeats", "only the plan"))
def test_other_shapes_of_a_run_train_and_predict_the_rows_ahead(tmp_path, shape):
    run = slipstream.train(job(tmp_path, **SHAPES[shape]), pa.table(planned_load()))
    found = slipstream.predict(run.run, pa.table(planned_load(50, ahead=HORIZON)))
    assert found["row"].to_pylist() == [50, 51, 52, 53]
    assert np.isfinite(found["load_predicted"].to_numpy()).all()


def test_a_streamed_run_scores_what_a_run_in_memory_scores(tmp_path):
    pa.parquet.write_table(pa.table(planned_load()), tmp_path / "t.parquet", row_group_size=90)
    data = {"path": str(tmp_path / "t.parquet")}
    runs = [
        slipstream.train(
            job(
                tmp_path / home,
                data=data,
                model={"kind": "linear"},
                engine={"home": home, "workers": 0},
            )
        )
        for home in ("device", "stream")
    ]
    scores = [run.summary["baselines"]["ridge"]["scaled"]["test"]["mse"] for run in runs]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    assert runs[1].metrics["test"]["rmse"] == pytest.approx(
        runs[0].metrics["test"]["rmse"], rel=0.5
    )


@pytest.mark.slow
def test_a_search_reads_them_in_every_trial(tmp_path):
    tune = {"trials": 3, "space": {"model.hidden": [4, 6]}}
    config = job(tmp_path, train={"epochs": 3, "lr": 0.02}, tune=tune)
    result = slipstream.tune(config, pa.table(planned_load()))
    found = slipstream.predict(result.run, pa.table(planned_load(50, ahead=HORIZON)))
    assert found["row"].to_pylist() == [50, 51, 52, 53]


@pytest.mark.parametrize("normalize", ["none", "last"])
def test_an_encoder_is_pre_trained_and_fine_tuned_with_columns_known_ahead(tmp_path, normalize):
    model = {"normalize": normalize}
    sections = {"model": model, "pretrain": {"length": 2}, "train": {"epochs": 1}}
    encoder = slipstream.pretrain(job(tmp_path, **sections), pa.table(planned_load()))
    tuned = {"init_from": str(encoder.run), "epochs": 1}
    run = slipstream.train(job(tmp_path, model=model, train=tuned), pa.table(planned_load()))
    found = slipstream.predict(run.run, pa.table(planned_load(50, ahead=HORIZON)))
    assert found["row"].to_pylist() == [50, 51, 52, 53]
    without = job(tmp_path, data={"future": []}, model=model, train=tuned)
    if normalize == "none":
        slipstream.train(without, pa.table(planned_load()))
        return
    with pytest.raises(UserError, match=r"data.future is \[\], there \['planned'\]"):
        slipstream.train(without, pa.table(planned_load()))


class RowByRow(nn.Module):
    """Predicts each row from what is known ahead of it and the last row of the context."""

    def __init__(self, *, context, inputs, static, outputs, horizon, future):
        super().__init__()
        assert (context, inputs, static, outputs, horizon, future) == (8, 3, 0, 4, 4, 1)
        self.last, self.row = nn.Linear(inputs, 1), nn.Linear(future, 1)

    def forward(self, inputs, static, future):
        assert static is None
        assert future.shape[1:] == (4, 1)
        return self.row(future)[..., 0] + self.last(inputs[-1])


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_network_of_ones_own_takes_the_rows_ahead_as_a_third_argument(tmp_path, repeats):
    model = {"kind": "tests.test_future:RowByRow"}
    settings = {"epochs": 8, "lr": 0.05, "repeats": repeats}
    run = slipstream.train(
        job(tmp_path, model=model, train=settings), pa.table(planned_load()), allow_code=True
    )
    assert run.summary["scaled"]["test"]["mse"] < 0.1
    with pytest.raises(UserError, match=r"cannot be made with .*horizon, future"):
        slipstream.train(
            job(tmp_path, model={"kind": "tests.models.nets:Mixer"}),
            pa.table(planned_load()),
            allow_code=True,
        )


def test_members_of_an_ensemble_may_differ_in_what_they_know_ahead(tmp_path, run):
    table = pa.table(planned_load())
    without = job(tmp_path, data={"future": [], "ignore": ["planned"]}, model={"kind": "linear"})
    ensemble = slipstream.ensemble(
        [run.run, slipstream.train(without, table).run], table, out=tmp_path
    )
    assert ensemble.metrics["test"]["mae"] < 1


def test_a_loaded_model_names_the_columns(run):
    model = slipstream.load(run.run)
    assert model.future == ("planned",)
    assert model.inputs[0] == "planned"
    assert "and planned of the rows ahead" in repr(model)


def test_classes_of_the_rows_ahead_follow_the_plan(tmp_path):
    def states(rows, ahead=0):
        table = planned_load(rows, ahead=ahead)
        del table["load"]
        up = np.where(table["planned"] > 0, "up", "down").tolist()
        return pa.table(table | {"state": [*up[:rows], *[None] * ahead]})

    data = {"task": "classify", "targets": ["state"], "horizon": HORIZON}
    run = slipstream.train(job(tmp_path, data=data, train={"epochs": 5, "lr": 0.03}), states(400))
    assert run.metrics["test"]["accuracy"] > 0.9
    logistic = run.summary["baselines"]["logistic"]
    assert logistic["metrics"]["test"]["accuracy"] > 0.9
    assert "known ahead" in logistic["what"]
    table = states(50, HORIZON)
    found = slipstream.predict(run.run, table)["predicted"].to_numpy()
    planned = table["planned"].to_numpy()[50:]
    clear = np.abs(planned) > 0.3
    assert clear.sum() > 1
    assert np.array_equal(found[clear], np.where(planned[clear] > 0, "up", "down"))


CALENDAR = {
    "data": {
        "prepare": [{"step": "calendar", "features": ["hour"]}],
        "future": ["hour_sin", "hour_cos"],
        "targets": ["load"],
        "context": 8,
    },
    "model": {"kind": "linear"},
}


def daily(rows=400):
    """A load that follows the hour."""
    start = datetime.datetime(2026, 1, 1)
    hours = np.arange(rows)
    load = np.sin(2 * np.pi * hours / 24) + 0.05 * np.random.default_rng(0).standard_normal(rows)
    return {"time": [start + datetime.timedelta(hours=int(h)) for h in hours], "load": load}


@pytest.mark.parametrize("every", ["1h", "2h"])
def test_a_calendar_makes_its_own_rows_ahead(tmp_path, every):
    steps = [{"step": "resample", "every": every}] if every != "1h" else []
    prepare = [*steps, *CALENDAR["data"]["prepare"]]
    settings = merged(CALENDAR, {"data": {"prepare": prepare}, "train": {"epochs": 20, "lr": 0.02}})
    run = slipstream.train(small_config(tmp_path, **settings), pa.table(daily()))
    found = slipstream.predict(run.run, pa.table(daily(100)))
    hours = int(every[0])
    last = daily(100)["time"][99 - 99 % hours]
    assert found["time"].to_pylist() == [
        last + datetime.timedelta(hours=hours * step) for step in range(1, HORIZON + 1)
    ]
    whole = slipstream.predict(run.run, pa.table(daily(100)), every=True)
    cut = slipstream.predict(run.run, pa.table(daily(80)), every=True)
    both = whole["load_predicted"].to_numpy()[: len(cut)]
    np.testing.assert_allclose(both, cut["load_predicted"].to_numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"horizon": 0}, "data.horizon = 0.*list them in data.inputs instead"),
        ({"future": ["load"]}, 'data.future and data.targets both name "load"'),
        ({"future": ["planned", "planned"]}, 'data.future names a column twice: "planned"'),
        ({"static": ["planned"]}, 'data.future and data.static both name "planned"'),
        ({"ignore": ["planned"]}, 'data.future and data.ignore both name "planned"'),
    ],
)
def test_columns_known_ahead_that_make_no_sense_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        job(data=data)


def test_a_column_that_the_table_lacks_is_named(tmp_path):
    config = job(tmp_path, data={"future": ["plan"]})
    with pytest.raises(UserError, match=r'no column "plan" \(data.future\)'):
        slipstream.train(config, pa.table(planned_load()))
    config = small_config(tmp_path, data={"future": ["a", "b", "c"]})
    with pytest.raises(UserError, match=r"every input is known ahead.*name data.targets"):
        slipstream.train(config, waves())


def test_a_column_that_tells_the_target_of_its_row_is_noted(tmp_path):
    table = planned_load()
    table["planned"] = table["load"].to_numpy(zero_copy_only=False) * 2 + 1
    run = slipstream.train(job(tmp_path, model={"kind": "linear"}), pa.table(table))
    assert any('"planned" tells the target "load"' in note for note in run.summary["notes"])


def test_raw_rows_are_prepared_and_forecast_as_in_training(tmp_path):
    start = datetime.datetime(2026, 1, 1)
    draw, rows = np.random.default_rng(0), 1600
    minutes = [start + datetime.timedelta(minutes=15 * row) for row in range(rows + 16)]
    planned = np.repeat(draw.standard_normal(rows // 4 + 4), 4)
    load = 20 + 3 * planned + np.sin(np.arange(len(planned)) / 9)
    unknown = np.arange(len(planned)) >= rows
    table = pa.table({"time": minutes, "planned": planned, "load": pa.array(load, mask=unknown)})
    hours = minutes[::16]
    weather = {"time": hours, "wind": draw.standard_normal(len(hours))}
    pa.parquet.write_table(pa.table(weather), tmp_path / "weather.parquet")
    config = job(
        tmp_path,
        data={
            "future": ["planned", "change", "hour_sin", "hour_cos"],
            "prepare": [
                {"step": "resample", "every": "1h"},
                {"step": "filter", "kind": "ema", "columns": ["load"], "rows": 6, "into": ["slow"]},
                {"step": "formula", "name": "change", "value": "diff(planned, 1)"},
                {"step": "join", "path": str(tmp_path / "weather.parquet"), "period": "4h"},
                {"step": "calendar", "features": ["hour"]},
            ],
        },
        train={"epochs": 2},
    )
    run = slipstream.train(config, table)
    assert any("left out 4 rows at its end" in note for note in run.summary["notes"])
    assert slipstream.load(run.run).inputs == (
        *("planned", "change", "hour_sin", "hour_cos", "slow", "wind", "load"),
    )
    written = pyarrow.parquet.read_table(run.run / "predictions.parquet")
    again = slipstream.predict(run.run, table, every=True)
    both = written.join(again, ["time", "step"], right_suffix="_again")
    assert len(both) == len(written) > 100
    np.testing.assert_allclose(both["load_predicted_again"], both["load_predicted"], rtol=1e-5)
    last = slipstream.predict(run.run, table)["time"].to_pylist()
    assert last == [minutes[rows] + datetime.timedelta(hours=step) for step in range(HORIZON)]
    asked = r"reads planned \(data.future\) .* has no such row .*append 4 rows with planned there"
    with pytest.raises(UserError, match=asked):  # steps make the others of it and of the times
        slipstream.predict(run.run, table[:rows])
    with pytest.warns(UserWarning, match=r"the rows to predict lack planned \(data.future\)"):
        slipstream.predict(run.run, table[:rows], every=True)


def test_a_forecast_begins_earlier_where_steps_look_ahead(tmp_path):
    smooth = {"step": "filter", "kind": "moving_average", "columns": ["other"], "rows": 5}
    steps = [smooth | {"centered": True, "lookahead": True}]
    config = job(tmp_path, data={"prepare": steps}, model={"kind": "linear"})
    run = slipstream.train(config, pa.table(planned_load()))
    table = planned_load(50, ahead=HORIZON)
    found = slipstream.predict(run.run, pa.table(table))
    assert found["row"].to_pylist() == [48, 49, 50, 51]
    later = change(table, "load", slice(48, None))
    again = slipstream.predict(run.run, pa.table(later))
    assert again["load_predicted"].to_pylist() == found["load_predicted"].to_pylist()
