"""Settings that are left out, or "auto", resolved from the data."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.config import load, replace_settings
from slipstream.data import defaults
from slipstream.data.defaults import list_unset, resolve
from slipstream.events import Start
from slipstream.reporting.terminal.progress import describe_plan
from slipstream.runs import Run
from tests.conftest import merged, slow, waves

LEFT = ["data.channels", "data.context", "model.normalize", "model.patch", "train.batch"]


def hourly(rows=2000, *, columns=1, seed=0):
    """A table of hours with a season of a day, in `columns` columns a, b, c ..."""
    draw = np.random.default_rng(seed)
    hours = np.arange(rows)
    season = np.sin(2 * np.pi * hours / 24)
    time = np.datetime64("2024-01-01", "h") + hours
    names = "abcdefgh"[:columns]
    values = {name: 5 + season + 0.1 * draw.standard_normal(rows) for name in names}
    return pa.table({"time": time.astype("datetime64[ns]")} | values)


def walk(rows=2000):
    """A table of a random walk."""
    steps = np.random.default_rng(1).standard_normal(rows)
    return pa.table({"time": np.arange(rows), "price": np.cumsum(steps)})


def resolved(table, **sections):
    config, choices = resolve(load(merged({"data": {"time": "time"}}, sections)), table)
    assert all(choice.reason for choice in choices.values())
    return config, {name: choice.value for name, choice in choices.items()}


def test_a_season_gives_the_context_and_patches_of_a_forecast():
    config, choices = resolved(hourly())
    assert (config.data.context, config.model.patch) == (168, 12)
    assert config.model.normalize == "window"
    assert choices["data.context"] == 168
    assert "data.channels" not in choices  # there is one target


def test_several_columns_that_are_all_predicted_are_channels_of_their_own():
    config, choices = resolved(hourly(columns=3))
    assert config.data.channels == "independent"
    assert choices["train.batch"] == 32
    config, _ = resolved(hourly(columns=3), data={"targets": ["a", "b"]})
    assert config.data.channels == "together"


def test_values_that_wander_are_forecast_from_the_last_row():
    assert resolved(walk())[0].model.normalize == "last"


@pytest.mark.parametrize(("table", "normalize"), [(hourly(20_000), "window"), (walk(), "last")])
def test_drift_is_measured_in_a_part_of_very_many_rows(table, normalize, monkeypatch):
    monkeypatch.setattr(defaults, "MAX_DRIFT_WINDOWS", 480)
    assert resolved(table)[0].model.normalize == normalize


def test_a_sample_of_rows_has_every_phase_of_a_season(monkeypatch):
    monkeypatch.setattr(defaults, "MAX_DRIFT_WINDOWS", 480)
    rows = defaults._sample_places(480 * 24)
    assert len(np.unique(rows)) == len(rows) == 480
    assert (np.diff(rows) > 0).all()
    assert np.bincount(rows % 24, minlength=24).min() > 10
    assert defaults._sample_places(480).tolist() == list(range(480))


def test_a_target_that_is_no_input_is_not_normalized():
    data = {"inputs": ["a"], "targets": ["b"]}
    assert resolved(hourly(columns=2), data=data)[0].model.normalize == "none"


def test_a_long_horizon_needs_a_long_context():
    assert resolved(hourly(8000), data={"horizon": 96})[0].data.context == 336


@pytest.mark.parametrize("rows", [40, 60, 100, 200, 400])
def test_a_context_is_never_longer_than_the_series_allow(rows):
    config, _ = resolved(hourly(rows), data={"horizon": 2})
    training_rows = round(0.7 * rows)
    assert 1 <= config.data.context <= 0.4 * training_rows
    assert training_rows - config.data.context - 2 >= 0.4 * training_rows


def test_gaps_shorten_the_context():
    table = hourly(2000)
    rows = np.arange(2000)
    gaps = table.filter(pa.array(rows % 50 != 49))
    assert resolved(gaps, data={"horizon": 4})[0].data.context <= 45


def test_few_windows_make_small_batches():
    assert resolved(hourly(300), data={"context": 24})[1]["train.batch"] == 16
    assert resolved(hourly(9000), data={"context": 24})[1]["train.batch"] == 128


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_a_model_that_reads_all_rows_at_once_has_no_patches(kind):
    config, choices = resolved(hourly(), model={"kind": kind})
    assert config.model.patch == 1
    assert "model.patch" not in choices


def test_an_estimate_reads_rows_as_they_are():
    data = {"horizon": 0, "targets": ["b"]}
    config, choices = resolved(hourly(columns=2), data=data)
    assert (config.data.channels, config.model.normalize) == ("together", "none")
    assert (config.model.patch, config.data.context) == (1, 96)
    assert set(choices) == {"data.context", "train.batch"}


def test_what_is_given_stays_and_the_rest_fits_it():
    config, choices = resolved(hourly(), data={"context": 50}, model={"normalize": "none"})
    assert (config.data.context, config.model.normalize) == (50, "none")
    assert config.data.context % config.model.patch == 0
    assert not {"data.context", "model.normalize"} & set(choices)
    for sections in ({}, {"data": {"horizon": 0, "targets": ["a"], "inputs": ["b"]}}):
        config, _ = resolved(hourly(columns=2), **merged({"model": {"patch": 7}}, sections))
        assert config.data.context % 7 == 0


def test_auto_is_as_if_the_setting_were_left_out():
    auto = {
        "data": {"channels": "auto", "context": "auto"},
        "model": {"normalize": "auto", "patch": "auto"},
        "train": {"loss": "auto", "lr": "auto", "schedule": "auto"},
    }
    assert resolved(hourly(columns=2), **auto) == resolved(hourly(columns=2))


def test_an_override_of_auto_takes_back_what_the_file_says(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\nnormalize = "last"\n')
    assert "model.normalize" not in list_unset(load(path))
    assert "model.normalize" in list_unset(load(path, ["model.normalize=auto"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"data": {"task": "classify", "targets": ["a"]}, "train": {"loss": "auto"}},
        {"data": {"scale_by": "window"}, "model": {"normalize": "auto"}},
        {"train": {"objective": "masked", "lr": "auto"}, "model": {"patch": "auto"}},
    ],
)
def test_auto_does_not_undo_what_another_setting_implies(settings):
    without = {
        section: {name: value for name, value in values.items() if value != "auto"}
        for section, values in settings.items()
    }
    assert load(settings) == load(without)


def test_patches_fit_every_kind_and_context_of_a_search():
    space = {"model.kind": ["mlp", "gru"], "data.context": [96, 120]}
    config, _ = resolved(hourly(), model={"kind": "mlp"}, tune={"space": space})
    assert config.model.patch == 8
    for kind, context in (("gru", 96), ("gru", 120)):
        replace_settings(config, {"model.kind": kind, "data.context": context})


def test_a_search_does_not_vary_auto():
    space = {"model.normalize": ["auto", "last"]}
    with pytest.raises(UserError, match=r'"model\.normalize" = "auto"'):
        slipstream.tune({"data": {"time": "time"}, "tune": {"space": space}}, waves())


SMALL = {
    "data": {"time": "time", "horizon": 4},
    "model": {"hidden": 8, "layers": 1, "heads": 2},
    "train": {"epochs": 1},
    "engine": {"device": "cpu", "threads": 1, "plan": "off"},
}
RUNS = {
    "one": {},
    "one column": {"data": {"targets": ["a"]}},
    "transformer": {"model": {"kind": "transformer"}},
    "mlp": {"model": {"kind": "mlp"}},
    "own class": {"model": {"kind": "tests.models.nets:Mixer"}},
    "repeats": {"train": {"repeats": 2}},
    "folds": {"data": {"split": {"walk_forward": 2}}},
    "quantiles": {"train": {"loss": "quantile"}},
    "carried": {"train": {"state": "carried", "batch": 4}},
    "measured batch": {"train": {"batch": "auto"}},
    "window scale": {"data": {"scale_by": "window"}},
    "known ahead": {"data": {"future": ["b"]}},
    "estimate": {"data": {"horizon": 0, "targets": ["a"]}},
}

AS_THEY_ARE = ("own class", "carried", "window scale", "estimate")
"""Runs whose windows are not normalized, or by another setting"""


@pytest.mark.parametrize(
    "kind", [name if name in ("one", "carried", "folds") else slow(name) for name in RUNS]
)
def test_a_run_has_numbers_its_reasons_and_resumes(tmp_path, kind):
    config = merged({**SMALL, "out": str(tmp_path)}, RUNS[kind])
    result = slipstream.train(config, hourly(500, columns=2))
    folder = result.run
    written = runs.load_config(Run(folder))
    assert not list_unset(written)
    assert isinstance(written.train.batch, int)
    settings = runs.read_json(folder / "plan.json")["settings"]
    for name, choice in settings.items():
        section, key = name.split(".")
        assert getattr(getattr(written, section), key) == choice["value"]
        assert choice["reason"]
    assert "data.context" in settings
    assert ("model.normalize" in settings) == (kind not in AS_THEY_ARE)
    more = slipstream.train(
        config, hourly(500, columns=2), resume=folder, overrides="train.epochs=2"
    )
    assert runs.load_config(Run(more.run)).data == written.data
    assert runs.read_json(folder / "plan.json")["settings"] == settings
    slipstream.evaluate(folder, hourly(500, columns=2, seed=1))
    if kind != "known ahead":  # which would need rows to come
        slipstream.predict(folder, hourly(500, columns=2, seed=1))
    slipstream.report(folder)


@pytest.mark.slow
def test_classes_of_whole_series_are_read_whole_and_resume(tmp_path):
    draw = np.random.default_rng(0)
    kinds = np.arange(60) % 2
    values = {f"v{i}": kinds + draw.standard_normal(60) for i in range(20)}
    table = pa.table({"kind": [f"k{kind}" for kind in kinds]} | values)
    path = tmp_path / "cases.csv"
    pa.csv.write_csv(table, path)
    data = {"path": str(path), "layout": "wide", "task": "classify", "targets": ["kind"]}
    config = {key: value for key, value in SMALL.items() if key != "data"}
    config |= {"data": data, "out": str(tmp_path)}
    result = slipstream.train(config)
    written = runs.load_config(Run(result.run))
    assert (written.data.context, written.train.batch) == (20, 16)
    assert written.train.loss == "cross_entropy"
    more = slipstream.train(config, resume=result.run, overrides="train.epochs=2")
    assert more.run == result.run


@pytest.mark.slow
def test_a_search_begins_from_numbers_and_its_trials_override_them(tmp_path):
    space = {"model.normalize": ["last", "none"], "train.lr": [0.01, 0.001]}
    tune = {"space": space, "trials": 4, "retrain": 1, "sampler": "grid"}
    config = merged({**SMALL, "out": str(tmp_path)}, {"train": {"batch": "auto"}, "tune": tune})
    found = slipstream.tune(config, hourly(400, columns=2))
    written = runs.load_config(Run(found.run))
    assert isinstance(written.train.batch, int)
    assert written.data.channels == "independent"
    assert written.data.context % written.model.patch == 0
    assert found.best.model.normalize in ("last", "none")
    again = slipstream.tune(config, hourly(400, columns=2), resume=found.run)
    assert again.run == found.run


@pytest.mark.slow
def test_workers_get_numbers_and_the_run_has_the_reasons(tmp_path):
    path = tmp_path / "hours.parquet"
    pa.parquet.write_table(hourly(500), path)
    config = merged(
        {**SMALL, "out": str(tmp_path)}, {"data": {"path": str(path)}, "train": {"repeats": 2}}
    )
    alone, shared = (slipstream.train(config, workers=workers) for workers in (1, 2))
    plans = [runs.read_json(result.run / "plan.json")["settings"] for result in (alone, shared)]
    assert plans[0] == plans[1]
    assert "data.context" in plans[0]
    assert runs.load_config(Run(shared.run)).data == runs.load_config(Run(alone.run)).data


@pytest.mark.slow
def test_rows_on_disk_have_the_usual_context(tmp_path):
    path = tmp_path / "hours.parquet"
    pa.parquet.write_table(hourly(1500), path, row_group_size=500)
    config = merged(
        {**SMALL, "out": str(tmp_path)},
        {"data": {"path": str(path), "stride": 8}, "engine": {"home": "stream", "workers": 0}},
    )
    written = runs.load_config(Run(slipstream.train(config).run))
    assert (written.data.context, written.model.normalize) == (96, "window")
    assert written.model.patch == 8


@pytest.mark.slow
def test_an_encoder_decides_what_a_model_that_starts_from_it_has(tmp_path):
    base = merged({**SMALL, "out": str(tmp_path)}, {"data": {"context": 32}})
    encoder = slipstream.pretrain(base, hourly(500, columns=2))
    config = merged(
        {**SMALL, "out": str(tmp_path)},
        {"model": {"normalize": "auto"}, "train": {"init_from": str(encoder.run)}},
    )
    written = runs.load_config(Run(slipstream.train(config, hourly(500, columns=2)).run))
    before = runs.load_config(Run(encoder.run))
    assert written.model.normalize == before.model.normalize == "none"
    assert (written.data.context, written.data.channels) == (32, "together")


def test_the_plan_names_each_setting_with_its_reason(tmp_path):
    config = merged({**SMALL, "out": str(tmp_path)}, {"data": {"targets": ["a"]}})
    events = []
    slipstream.train(config, hourly(500, columns=2), on_event=events.append)
    (start,) = [event for event in events if isinstance(event, Start)]
    lines = list(describe_plan(start.plan, 1, 1.0))
    assert any(line.startswith('plan: model.normalize = "last" (') for line in lines)
    assert any(line.startswith("plan: data.context = ") for line in lines)
    page = slipstream.report(runs.find_last(str(tmp_path))).read_text(encoding="utf-8")
    assert "<dt>model.normalize</dt>" in page


def test_few_steps_make_more_epochs_and_more_patience():
    small, large = {"context": 24, "horizon": 3}, hourly(9000)
    _, choices = resolved(hourly(100), data=small)
    assert (choices["train.epochs"], choices["train.patience"]) == (300, 60)
    config, choices = resolved(hourly(500), data=small)  # 324 windows are 21 steps
    assert (config.train.epochs, config.train.patience) == (-(-1600 // 21), -(-320 // 21))
    assert not {"train.epochs", "train.patience"} & resolved(large, data=small)[1].keys()
    config, choices = resolved(hourly(100), data=small, train={"epochs": 7, "patience": "off"})
    assert (config.train.epochs, config.train.patience) == (7, "off")
    _, choices = resolved(hourly(100), data=small, train={"batch": 1})
    assert not {"train.epochs", "train.patience"} & choices.keys()


@pytest.mark.parametrize(
    ("split", "windows", "batch"),
    [
        ({"by": "file", "test": ["test.csv"], "val": 0.4}, 6, 1),
        ({"train": 0.5, "val": 0.2, "test": 0.3}, 35, 4),
        ({}, 49, 4),
    ],
)
def test_whole_series_that_train_are_the_windows(tmp_path, split, windows, batch):
    values = np.random.default_rng(0).standard_normal((70, 12)).round(3)
    for name, rows in (("train.csv", values[:10]), ("test.csv", values[10:])):
        lines = ["label," + ",".join(f"v{i}" for i in range(12))]
        lines += ["ab"[i % 2] + "," + ",".join(map(str, row)) for i, row in enumerate(rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    data = {"path": str(tmp_path), "layout": "wide", "task": "classify", "targets": ["label"]}
    data |= {"context": "all", "values": "v0:"} | ({"split": split} if split else {})
    choices = resolve(load({"data": data, "train": {"batch": batch}})).choices
    steps = -(-windows // batch)
    assert choices["train.epochs"] == (-(-1600 // steps), f"an epoch has {steps} steps")


@pytest.mark.parametrize(("rows", "patch"), [(12, None), (47, None), (48, 4), (251, 8)])
def test_long_series_that_are_windows_are_cut_into_patches(rows, patch):
    """A network that reads step by step does not learn long series from few of them."""
    names = np.repeat([f"s{number}" for number in range(20)], rows)
    values = np.random.default_rng(0).standard_normal(len(names))
    labels = np.repeat(["a", "b"] * 10, rows)
    table = pa.table({"id": names, "value": values, "label": labels})
    data = {"id": "id", "task": "classify", "targets": ["label"], "context": "all", "time": None}
    data |= {"inputs": ["value"], "split": {"train": 0.5, "val": 0.2, "test": 0.3}}
    for kind, wanted in (("lstm", patch), ("tcn", patch), ("mlp", None)):
        config, choices = resolve(load({"data": data, "model": {"kind": kind}}), table)
        found = choices.get("model.patch")
        assert (found and found.value) == wanted
        assert config.data.context == -(-rows // (wanted or 1)) * (wanted or 1)
