"""Both ways to use a model on a stream of rows: a window each time, and a carried state."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

import slipstream
from slipstream.base.errors import UserError
from slipstream.cli.commands import app
from slipstream.config import Config
from slipstream.inference.networks import explain_no_steps
from tests.conftest import merged, small_config, waves

ROWS, CONTEXT, GAP = 90, 8, 40
FILTER = ["predict.filter.kind=moving_average", "predict.filter.rows=4"]


def make_table(count=8):
    """Series of noisy sines; the last one has a gap in time."""
    table = waves(ROWS * count)
    time = np.tile(np.arange(ROWS), count)
    time[-(ROWS - GAP) :] += 100
    names = [f"s{number}" for number in range(count) for _ in range(ROWS)]
    return pa.table(
        {
            "time": time,
            "name": names,
            "x": table["a"].to_numpy() - 10,
            "y": table["b"].to_numpy() + np.roll(table["a"].to_numpy(), 2),
        }
    )


def train(folder, **sections):
    path = folder / "table.csv"
    make_table().to_pandas().to_csv(path, index=False)
    data = {"path": str(path), "id": "name", "inputs": ["x"], "targets": ["y"]}
    data |= {"horizon": 0, "context": CONTEXT}
    if "split" not in sections.get("data", {}):
        data["split"] = {"by": "name", "val": ["s4"], "test": ["s5", "s6", "s7"]}
    quick = {"data": data, "train": {"epochs": 2, "lr": 0.02}}
    return slipstream.train(small_config(folder, **merged(quick, sections)), quiet=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("lstm"), model={"kind": "lstm", "layers": 2})


@pytest.fixture(scope="module")
def scores(result):
    return slipstream.evaluate(result.run, stream=True)


def predict_row_by_row(result, table):
    """Carry the states of the layers from row to row by hand; physical estimates of one series."""
    model = slipstream.load(result.run)
    core, scaler = model.module.core, model.scaler
    states = [None] * len(core.layers)
    estimates = []
    for value in table:
        scaled = (value - scaler.shift["x"]) / scaler.size["x"]
        row = torch.tensor([[[scaled]]], dtype=torch.float32)
        for depth, layer in enumerate(core.layers):
            row, states[depth] = layer(row, states[depth])
        out = core.head(row[-1], None).item()
        estimates.append(out * scaler.size["y"] + scaler.shift["y"])
    return np.array(estimates)


def collect_by_hand(result):
    """Errors of the carried state, by rows since the start of a series or the end of a gap."""
    table = make_table().to_pandas()
    errors = []
    for name in ("s5", "s6", "s7"):
        rows = table[table["name"] == name]
        pieces = [rows] if name != "s7" else [rows[:GAP], rows[GAP:]]
        errors += [predict_row_by_row(result, one["x"]) - one["y"].to_numpy() for one in pieces]
    return errors


def test_the_window_regime_is_what_evaluate_scores(result, scores):
    plain = slipstream.evaluate(result.run)
    assert scores["window"]["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
    assert scores["window"]["scaled"] == pytest.approx(plain["scaled"], rel=1e-6)
    assert scores["windows"] == plain["windows"]


@torch.inference_mode()
def test_the_carried_regime_equals_a_loop_over_rows_by_hand(result, scores):
    pieces = collect_by_hand(result)
    late = np.concatenate([piece[CONTEXT - 1 :] for piece in pieces])
    assert len(late) == scores["windows"]
    metrics = scores["carried"]["metrics"]
    assert metrics["mae"] == pytest.approx(np.abs(late).mean(), rel=1e-5)
    assert metrics["rmse"] == pytest.approx(np.sqrt((late**2).mean()), rel=1e-5)
    for entry in scores["by_row"]:
        some = np.concatenate([piece[entry["from"] : entry["to"] + 1] for piece in pieces])
        assert entry["carried"]["rows"] == len(some)
        assert entry["carried"]["mae"] == pytest.approx(np.abs(some).mean(), rel=1e-5)
    assert [entry["from"] for entry in scores["by_row"]] == [0, 1, 2, 4, 8, 16, 32, 64]


def test_windows_have_no_prediction_before_their_context_is_full(scores):
    assert all(entry["window"] is None for entry in scores["by_row"] if entry["to"] < CONTEXT - 1)
    counts = [entry["window"]["rows"] for entry in scores["by_row"] if entry["window"]]
    assert sum(counts) == scores["windows"]
    assert scores["window"]["rows_to_first"] == CONTEXT
    assert scores["carried"]["rows_to_first"] == 1


def test_the_answer_names_a_regime_with_figures(scores):
    assert scores.deploy in ("window", "carried")
    assert scores.metrics == scores[scores.deploy]["metrics"]
    assert "%" in scores.reason or "that of windows" in scores.reason
    comparison = scores["comparison"]
    low, high = comparison["interval"]
    assert low <= comparison["value"] <= high
    ratio = scores["carried"]["scaled"]["mse"] / scores["window"]["scaled"]["mse"]
    assert comparison["value"] == pytest.approx(np.sqrt(ratio), rel=1e-5)
    assert "3 series" in comparison["how"]
    assert "carried state" in repr(scores)
    assert len(scores.to_pandas()) == len(scores["by_row"])


def test_multiply_adds_are_those_of_the_weights(scores):
    by_layer = 4 * 8 * (1 + 8) + 4 * 8 * (8 + 8)
    assert scores["carried"]["multiply_adds"] == by_layer + 8
    assert scores["window"]["multiply_adds"] == CONTEXT * by_layer + 8


@torch.inference_mode()
def test_a_filter_runs_from_the_first_row_of_a_carried_state(result):
    smooth = slipstream.evaluate(result.run, stream=True, overrides=FILTER)
    plain = slipstream.evaluate(result.run, overrides=FILTER)
    assert smooth["window"]["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
    unfiltered = smooth["window"]["unfiltered"]["metrics"]
    assert unfiltered == pytest.approx(plain["unfiltered"]["metrics"], rel=1e-6)
    truth, errors = make_table().to_pandas(), []
    for name, begin, end in (("s5", 0, ROWS), ("s6", 0, ROWS), ("s7", 0, GAP), ("s7", GAP, ROWS)):
        rows = truth[truth["name"] == name][begin:end]
        raw = predict_row_by_row(result, rows["x"])
        means = [raw[max(0, i - 3) : i + 1].mean() for i in range(len(raw))]
        errors.append((np.array(means) - rows["y"].to_numpy())[CONTEXT - 1 :])
    mae = np.abs(np.concatenate(errors)).mean()
    assert smooth["carried"]["metrics"]["mae"] == pytest.approx(mae, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"bidirectional": True}, "model.bidirectional = true"),
        ({"pool": "mean"}, 'model.pool = "mean"'),
        ({"pool": "attention"}, 'model.pool = "attention"'),
        ({"patch": 2}, "model.patch = 2"),
        ({"normalize": "last"}, 'model.normalize = "last"'),
        ({"normalize": "window"}, 'model.normalize = "window"'),
        ({"kind": "mlp"}, 'model.kind = "mlp" reads a window as a whole and has no state'),
        ({"kind": "linear"}, 'model.kind = "linear" reads a window as a whole and has no state'),
        (
            {"kind": "transformer"},
            'model.kind = "transformer" reads a window as a whole and has no state',
        ),
        (
            {"kind": "nets:Mixer"},
            'model.kind = "nets:Mixer" reads a window as a whole and has no state',
        ),
    ],
)
def test_a_carried_state_is_refused_with_the_setting(model, message):
    obstacle = explain_no_steps(Config(model=model, data={"context": 8}).model)
    assert obstacle is not None
    assert message in obstacle


@pytest.mark.parametrize("kind", ["lstm", "gru", "tcn"])
def test_a_carried_state_is_possible(kind):
    assert explain_no_steps(Config(model={"kind": kind}).model) is None


def test_where_it_is_refused_windows_are_still_scored(tmp_path):
    both = train(tmp_path, model={"bidirectional": True}, train={"epochs": 1})
    scores = slipstream.evaluate(both.run, stream=True)
    assert scores["carried"]["metrics"] is None
    assert scores["carried"]["refused"].startswith("model.bidirectional = true")
    assert scores["window"]["metrics"] == pytest.approx(both.metrics["test"], rel=1e-6)
    assert scores["deploy"]["use"] == "window"
    assert scores["comparison"] is None
    assert "model.bidirectional" in scores.reason
    repr(scores)


def test_windows_that_a_convolution_does_not_outgrow_equal_its_carried_state(tmp_path):
    tcn = {"kind": "tcn", "layers": 2, "kernel_size": 2}  # reads the last 7 rows
    scores = slipstream.evaluate(train(tmp_path, model=tcn).run, stream=True)
    for name in ("mae", "rmse", "max_error"):
        wanted = scores["window"]["metrics"][name]
        assert scores["carried"]["metrics"][name] == pytest.approx(wanted, rel=1e-5)
    assert scores["deploy"]["use"] == "carried"
    assert "that of windows" in scores.reason


def test_repeats_are_averaged_in_both_regimes(tmp_path):
    ahead = {"horizon": 2, "targets": ["x", "y"], "inputs": ["x", "y"]}
    repeats = train(tmp_path, train={"repeats": 2, "epochs": 1}, data=ahead)
    scores = slipstream.evaluate(repeats.run, stream=True, ensemble=True)
    plain = slipstream.evaluate(repeats.run, ensemble=True)
    assert scores["window"]["metrics"] == pytest.approx(plain["metrics"], rel=1e-6)
    single = slipstream.evaluate(repeats.run, stream=True, ensemble=False)
    assert scores["carried"]["multiply_adds"] == 2 * single["carried"]["multiply_adds"]
    assert scores["carried"]["metrics"]["mae"] != single["carried"]["metrics"]["mae"]


def test_a_set_within_series_goes_on_from_the_rows_before_it(tmp_path):
    """No series begins in the test rows, so that there is no warm-up to see."""
    within = {"split": {"train": 0.6, "val": 0.2, "test": 0.2}, "horizon": 3}
    scores = slipstream.evaluate(train(tmp_path, data=within).run, stream=True)
    assert scores["warm_up"]["rows"] is None
    assert all(entry["carried"]["rows"] == entry["window"]["rows"] for entry in scores["by_row"])
    assert scores["by_row"][0]["from"] > CONTEXT


def test_folds_are_scored_by_their_own_models(tmp_path):
    walk = {"split": {"walk_forward": 2}, "where": {"name": ["s0"]}}
    walked = train(tmp_path, data=walk, train={"epochs": 1})
    scores = slipstream.evaluate(walked.run, stream=True)
    assert scores["window"]["metrics"] == pytest.approx(walked.metrics["test"], rel=1e-6)
    assert scores["carried"]["metrics"]["mae"] > 0


def test_classes_are_compared_by_their_log_loss(tmp_path):
    table = make_table()
    label = np.where(table["y"].to_numpy() > 30, "high", "low")
    path = tmp_path / "classes.csv"
    table.append_column("state", pa.array(label)).to_pandas().to_csv(path, index=False)
    data = {"path": str(path), "task": "classify", "targets": ["state"], "inputs": ["x"]}
    scores = slipstream.evaluate(train(tmp_path, data=data).run, stream=True)
    assert scores["comparison"]["metric"] == "log_loss"
    assert scores["carried"]["metrics"].keys() >= {"log_loss", "accuracy"}
    assert scores["by_row"][0]["carried"].keys() == {"rows", "log_loss", "error_rate"}


def test_new_data_begin_with_their_first_row(result):
    rows = make_table(2).select(["time", "name", "x", "y"])
    scores = slipstream.evaluate(result.run, rows, stream=True)
    assert scores["on"] == "data"
    assert scores["by_row"][0]["carried"]["rows"] == 3
    assert scores["warm_up"]["settled"] > 0


def invoke(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_the_command_prints_one_object_and_writes_a_page(result, tmp_path):
    page = tmp_path / "stream.html"
    run = invoke("evaluate", result.run, "--stream", "--json", "--out", page)
    assert run.exit_code == 0
    scores = json.loads(run.stdout)
    assert {"mae", "rmse"} <= scores["window"]["metrics"].keys()
    assert {"mae", "rmse"} <= scores["carried"]["metrics"].keys()
    assert scores["page"] == str(page)
    text = page.read_text(encoding="utf-8")
    assert "deploy:" in text
    assert "<svg" in text
    shown = invoke("evaluate", result.run, "--stream")
    assert "warm-up of the carried state" in shown.output
    assert "deploy:" in shown.output


def test_a_page_needs_the_comparison(result, tmp_path):
    run = invoke("evaluate", result.run, "--out", tmp_path / "page.html")
    assert run.exit_code == 2
    assert "--stream" in run.stderr


def test_an_ensemble_of_runs_has_windows_only(result, tmp_path):
    other = train(tmp_path, train={"epochs": 1}, seed=1)
    joined = slipstream.ensemble([result.run, other.run], out=tmp_path)
    scores = slipstream.evaluate(joined.run, stream=True)
    assert "ensemble of runs" in scores["carried"]["refused"]
    assert scores["window"]["metrics"] == pytest.approx(joined.metrics["test"], rel=1e-5)


def test_a_table_on_disk_is_refused_with_the_way_out(tmp_path):
    parquet = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(make_table(), parquet)
    trained = train(tmp_path, data={"path": str(parquet)}, train={"epochs": 1})
    with pytest.raises(UserError, match=r"engine\.home=host"):
        slipstream.evaluate(trained.run, stream=True, overrides="engine.home=stream")


def test_a_model_that_is_trained_for_a_carried_state_has_both_regimes(tmp_path):
    carried = train(tmp_path, train={"state": "carried", "epochs": 1, "batch": 4})
    scores = slipstream.evaluate(carried.run, stream=True)
    assert scores["carried"]["metrics"] == pytest.approx(carried.metrics["test"], rel=1e-5)
    assert scores["window"]["metrics"]["mae"] != scores["carried"]["metrics"]["mae"]
