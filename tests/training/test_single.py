from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pandas as pd
import polars as pl
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import config as configs
from slipstream import runs, training
from slipstream.base.phases import PhaseTimer
from slipstream.config import Config
from slipstream.data import dataset as datasets
from slipstream.reporting.wording import describe_verdict
from slipstream.scoring import baselines, predict
from slipstream.training import fitting
from tests.conftest import KINDS, close, mostly_slow, real_file, slow, small_config, waves
from tests.limits import hooked_models, run_out_of_memory, run_within
from tests.logs import read_lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One small run that many tests look at."""
    out = tmp_path_factory.mktemp("runs")
    config = small_config(out, model={"kind": "mlp"}, train={"epochs": 5, "lr": 0.01})
    return config, slipstream.train(config, waves(600))


def test_the_summary_keeps_its_contract(trained):
    _, result = trained
    summary = result.summary
    for which in ("train", "val", "test"):
        assert set(summary["metrics"][which]) >= {"mae", "rmse", "mse", "r2", "max_error"}
        assert summary["windows"][which] > 0
    assert set(summary["scaled"]["test"]) == {"mae", "mse"}
    assert set(summary["baselines"]) == {"repeat", "seasonal", "ridge", "gbm"}
    for name in ("repeat", "ridge", "gbm"):
        beside = summary["baselines"][name]
        assert set(beside["metrics"]) == set(beside["scaled"]) == {"train", "val", "test"}
        assert set(beside["metrics"]["test"]) == set(summary["metrics"]["test"])
    assert summary["baselines"]["seasonal"] is None
    for key in ("run", "steps", "epochs", "seconds", "windows_per_s", "plan"):
        assert summary[key] is not None
    assert summary["steps"] == 5 * -(-summary["windows"]["train"] // 32)
    assert summary["monitor"]["samples"] >= 1
    assert summary["monitor"]["rss_peak_bytes"] > 1e7
    assert summary["monitor"]["energy_wh"] is None
    estimate = summary["estimate"]
    assert estimate["before_is"] == "guessed"
    assert estimate["took_s"] == summary["seconds_by_phase"]["training"]
    for when in ("before", "after_ten_steps"):
        ratio = estimate[f"{when}_s"] / estimate["took_s"]
        assert estimate[f"{when}_ratio"] == pytest.approx(ratio)


def test_the_run_folder_explains_itself(trained):
    config, result = trained
    names = {path.name for path in result.run.iterdir()}
    assert names == {
        "config.toml",
        "plan.json",
        "events.jsonl",
        "checkpoints",
        "model",
        "baselines",
        "manifest.json",
        "metrics.json",
        "predictions.parquet",
    }
    written = tomllib.loads((result.run / "config.toml").read_text())
    assert Config.model_validate(written) == config
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["device"] == "cpu"
    kinds = [event["event"] for event in read_lines(runs.open_run(result.run))]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"


def test_no_file_is_a_pickle(trained):
    _, result = trained
    for path in result.run.rglob("*"):
        if path.is_file():
            assert path.suffix in (".toml", ".json", ".jsonl", ".safetensors", ".parquet")


def test_predictions_cover_every_test_window(trained):
    _, result = trained
    table = pyarrow.parquet.read_table(result.run / "predictions.parquet")
    assert table.num_rows == 4 * result.summary["windows"]["test"]
    errors = [
        abs(table[f"{name}_predicted"].to_numpy() - table[name].to_numpy()).mean()
        for name in ("a", "b", "c")
    ]
    assert sum(errors) / 3 == pytest.approx(result.metrics["test"]["mae"], rel=1e-4)


def test_evaluate_finds_the_same_figures(trained):
    _, result = trained
    with pytest.raises(slipstream.UserError, match=r"passed from Python.* data=TABLE"):
        slipstream.evaluate(result.run)
    everything = slipstream.evaluate(result.run, waves(600))
    assert everything["windows"] == 600 - 20 + 1
    test_rows = waves(600).slice(600 - 120 - 16)
    again = slipstream.evaluate(result.run, test_rows)
    assert again["windows"] == result.summary["windows"]["test"]
    assert again["metrics"]["mae"] == pytest.approx(result.metrics["test"]["mae"], rel=1e-6)
    assert again["scaled"]["mse"] == pytest.approx(
        result.summary["scaled"]["test"]["mse"], rel=1e-6
    )


def test_predict_forecasts_what_follows(trained):
    _, result = trained
    table = waves(600)
    ahead = slipstream.predict(result.run, table.slice(0, 596))
    assert ahead["time"].to_pylist() == [596, 597, 598, 599]
    every = slipstream.predict(result.run, table, every=True)
    assert every.num_rows == 4 * (600 - 16 + 1)
    same = every.to_pandas().query("row - step == 595").reset_index(drop=True)
    pd.testing.assert_frame_equal(same, ahead.to_pandas(), rtol=1e-5)


def test_columns_are_matched_by_name(trained):
    _, result = trained
    table = waves(100)
    shuffled = table.select(["c", "time", "a", "b"])
    first, second = (slipstream.predict(result.run, given) for given in (table, shuffled))
    assert first.equals(second)
    with pytest.raises(slipstream.UserError, match=r'has no column "b" \(data.inputs\)'):
        slipstream.predict(result.run, table.drop_columns(["b"]))
    with pytest.raises(slipstream.UserError, match=r'series "data" has 15 rows'):
        slipstream.predict(result.run, table.slice(0, 15))


def test_a_gap_before_the_end_leaves_nothing_to_forecast_from(trained):
    _, result = trained
    table = waves(100).to_pydict()
    table["time"][-5:] = [t + 50 for t in table["time"][-5:]]
    with pytest.raises(slipstream.UserError, match="a gap within its last 16 rows"):
        slipstream.predict(result.run, table)


def test_the_best_weights_are_the_model(trained):
    _, result = trained
    saved = load_file(result.run / "model" / "weights.safetensors")
    step = int(result.summary["best_epoch"]) * 13
    (file,) = (result.run / "checkpoints" / f"step-{step}").glob("*.safetensors")
    rows = load_file(file)
    best = {name.partition("best.")[2]: row for name, row in rows.items() if "best." in name}
    assert saved.keys() == best.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, best[name].view_as(weight))


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "lstm", "mlp"))
def test_the_same_config_gives_the_same_run(kind, tmp_path):
    config = small_config(tmp_path, model={"kind": kind, "layers": 2, "dropout": 0.2})
    first, second = (slipstream.train(config, waves()) for _ in range(2))
    assert first.run != second.run
    for name in ("metrics", "scaled", "baselines", "steps", "epochs"):
        assert first.summary[name] == second.summary[name]
    other = slipstream.train(config, waves(), overrides=("seed=1",))
    assert other.metrics != first.metrics


def test_where_there_is_no_triton_asking_for_our_kernels_changes_no_result(tmp_path, monkeypatch):
    """On a CPU they may be those in C, which round in another way."""
    monkeypatch.setitem(sys.modules, "triton", None)
    found = []
    for asked in ("auto", "slipstream"):
        engine = {"rnn": asked, "plan": "off"}
        config = small_config(tmp_path, model={"kind": "lstm"}, engine=engine)
        metrics = slipstream.train(config, waves()).metrics
        found.append([metrics[name]["rmse"] for name in ("train", "val", "test")])
    close(found[0], found[1], rel=1e-6)


def test_the_monitor_can_be_switched_off(tmp_path):
    result = slipstream.train(
        small_config(tmp_path, train={"epochs": 1}, engine={"monitor": False}), waves()
    )
    assert result.summary["monitor"] is None
    assert not any(event["event"] == "monitor" for event in read_lines(runs.open_run(result.run)))


def test_training_leaves_the_callers_generators_alone(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    slipstream.train(small_config(tmp_path, train={"epochs": 1}), waves())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, dict], ids=lambda f: f.__module__)
def test_any_table_gives_the_same_run(frame, tmp_path):
    table = waves().to_pydict()
    config = small_config(tmp_path, train={"epochs": 1})
    wanted = slipstream.train(config, waves())
    assert slipstream.train(config, frame(table)).metrics == wanted.metrics


def test_a_file_and_its_table_give_the_same_run(tmp_path):
    waves().to_pandas().to_csv(tmp_path / "t.csv", index=False)
    config = small_config(tmp_path, train={"epochs": 1}, data={"path": str(tmp_path / "t.csv")})
    from_file = slipstream.train(config)
    in_memory = slipstream.train(config, waves())
    assert from_file.metrics["test"] == pytest.approx(in_memory.metrics["test"])
    again = slipstream.evaluate(from_file.run)
    assert again["metrics"] == pytest.approx(from_file.metrics["test"])
    assert slipstream.evaluate(from_file.run, on="val")["metrics"] == pytest.approx(
        from_file.metrics["val"]
    )
    changed = waves().to_pandas()
    changed.loc[3, "a"] += 1
    changed.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(slipstream.UserError, match=r'have changed since training: column "a"'):
        slipstream.evaluate(from_file.run)


def test_losing_to_a_baseline_is_said_plainly(tmp_path):
    config = small_config(tmp_path, train={"epochs": 1, "lr": 1e-6})
    result = slipstream.train(config, waves(1000))
    assert "ridge" in result.summary["beaten_by"]
    assert result.summary["against_baselines"]["verdict"] == "worse"
    assert describe_verdict(result.summary).startswith("The model loses to")
    few = slipstream.train(config, waves(400))
    assert few.summary["beaten_by"] == []
    assert few.summary["against_baselines"]["how"].startswith("none: the windows hold fewer than")
    assert describe_verdict(few.summary).startswith("Too few windows to tell whether the model")


def test_estimation_reads_no_target(tmp_path):
    config = small_config(
        tmp_path, data={"horizon": 0, "targets": ["c"]}, train={"epochs": 1}, model={"kind": "gru"}
    )
    result = slipstream.train(config, waves())
    without = waves().drop_columns(["c"])
    found = slipstream.predict(result.run, without)
    assert found.column_names == ["series", "row", "time", "c_predicted"]
    assert found["row"].to_pylist() == list(range(15, 400))
    with pytest.raises(slipstream.UserError, match=r'no column "c" \(data.targets\)'):
        slipstream.evaluate(result.run, without)


def test_static_features_and_series_reach_the_model(tmp_path):
    table = waves(600).to_pydict()
    table["id"] = ["x"] * 300 + ["y"] * 300
    table["k"] = [1.0] * 300 + [3.0] * 300
    config = small_config(tmp_path, data={"id": "id", "static": ["k"]}, model={"kind": "linear"})
    result = slipstream.train(config, table)
    assert set(result.summary["windows"]) == {"train", "val", "test"}
    detail = json.loads((result.run / "metrics.json").read_text())["detail"]["test"]
    assert set(detail["per_series"]) == {"x", "y"}
    ahead = slipstream.predict(result.run, table)
    assert ahead["series"].to_pylist() == ["x"] * 4 + ["y"] * 4


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_seed_of_many_digits_trains(tmp_path, repeats):
    """A date and a time, as people take them, and one that differs in its upper bits alone."""
    drawn = []
    for seed in (20260131120000, 20260131120000 + 2**40):
        config = small_config(
            tmp_path, seed=seed, model={"kind": "mlp"}, train={"epochs": 1, "repeats": repeats}
        )
        drawn.append(slipstream.train(config, waves()).metrics["test"]["mae"])
    assert drawn[0] != drawn[1]


def test_stride_and_minutes_and_quantiles_work_together(tmp_path):
    config = small_config(
        tmp_path,
        data={"stride": 3},
        train={"loss": "quantile", "epochs": 2, "minutes": 5},
        model={"kind": "mlp"},
    )
    result = slipstream.train(config, waves())
    assert result.summary["windows"]["train"] == -(-(280 - 19) // 3)
    assert result.summary["judged_by"] == "mae"


def test_pm25_trains_with_missing_values_filled_forward(tmp_path):
    config = small_config(
        tmp_path,
        data={
            "path": str(real_file("beijing_pm25.csv")),
            "time": "No",
            "targets": ["pm2.5"],
            "missing": "forward",
            "context": 24,
            "horizon": 6,
            "stride": 8,
        },
        model={"kind": "gru", "hidden": 16},
        train={"epochs": 3, "batch": 256, "lr": 0.02},
    )
    result = slipstream.train(config)
    assert result.metrics["test"]["r2"] > 0.2
    assert any("pm2.5 2,043" in note for note in result.summary["notes"])


@pytest.mark.slow
def test_a_few_epochs_of_the_demo_clearly_beat_every_baseline(tmp_path):
    settings = (
        "train.epochs=3",
        f"out={tmp_path}",
        "engine.device=cpu",
        "engine.threads=1",
        "engine.plan=off",
    )
    demo = configs.load(configs.load_demo(), settings)
    result = slipstream.train(demo)
    assert result.summary["beaten_by"] == []
    blind = configs.load(demo, ["data.inputs=['voltage_V', 'temperature_degC']"])
    dataset = datasets.load_dataset(blind)
    found = baselines.fit_baselines(dataset, lambda which: dataset.iter_chunks(which, None, rows=1))
    chunks = predict.predict_batches(
        found["ridge"].predict, dataset.iter_chunks("test", None, rows=1)
    )
    linear = predict.accumulate(chunks, dataset).compute()["overall"]["mae"]
    assert result.metrics["test"]["mae"] < 0.6 * linear
    assert result.metrics["test"]["mae"] < 0.6 * result.baselines["ridge"]["metrics"]["test"]["mae"]


@pytest.mark.slow
def test_scoring_survives_a_full_memory(tmp_path):
    config = small_config(tmp_path, train={"epochs": 1})
    calm = slipstream.train(config, waves(700))
    failures = []

    def check(model, inputs):
        if not model.training and torch.is_inference_mode_enabled() and inputs.shape[1] > 100:
            failures.append(inputs.shape)
            raise run_out_of_memory()

    with hooked_models(before=check):
        found = slipstream.train(config, waves(700))
    assert failures
    close(found.metrics["test"]["mae"], calm.metrics["test"]["mae"], rel=1e-5)
    assert found.summary["windows"] == calm.summary["windows"]


@pytest.mark.parametrize("verb", ["train", slow("evaluate"), slow("predict")])
def test_too_little_memory_for_the_data_says_what_to_lower(tmp_path, verb):
    config = small_config(
        tmp_path, data={"stride": 20_000}, model={"kind": "linear"}, train={"epochs": 1}
    )
    run = slipstream.train(config, waves(300_000, columns=1)).run
    large = waves(8_000_000, columns=1)
    call = {
        "train": lambda: slipstream.train(config, large),
        "evaluate": lambda: slipstream.evaluate(run, large),
        "predict": lambda: slipstream.predict(run, large, every=True),
    }[verb]

    def work():
        try:
            call()
        except slipstream.UserError as error:
            return f"refused: {error}"
        return "there was enough"

    told = run_within(16, work)
    assert told.startswith("refused: out of memory ("), told
    assert "raise its limit (ulimit -v, or the container's), or lower what it needs" in told


@pytest.mark.slow
def test_training_does_not_load_the_compiler(tmp_path):
    """It would cost every run two seconds."""
    program = (
        "import sys, numpy, pyarrow, slipstream\n"
        "table = pyarrow.table({'x': numpy.sin(numpy.arange(300.0) / 9)})\n"
        "config = {'data': {'context': 8}, 'train': {'epochs': 1}, 'engine': {'plan': 'off'}}\n"
        f"slipstream.train(config | {{'out': {str(tmp_path)!r}}}, table)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout.strip() == "False", told.stderr


def test_an_inner_run_of_other_settings_is_not_taken_for_this_one(tmp_path):
    """As when a search goes on and finds a better trial: what the first one left is not its own."""
    folder, table = tmp_path / "retrained" / "best", waves(400)
    first = training.train_or_resume(folder, small_config(tmp_path), table, None)
    again = training.train_or_resume(folder, small_config(tmp_path), table, None)
    assert again == runs.read_json(folder / "metrics.json")
    assert again["metrics"] == first["metrics"]
    other = training.train_or_resume(
        folder, small_config(tmp_path, train={"lr": 0.05}), table, None
    )
    assert other["metrics"] != first["metrics"]
    assert runs.load_config(runs.open_run(folder)).train.lr == 0.05


def test_a_run_knows_the_fingerprint_of_its_data():
    context = fitting.load_context(small_config(), waves(), PhaseTimer())
    assert (
        context.fingerprint == datasets.load_dataset(small_config(), waves()).compute_fingerprint()
    )
