"""Classification from a table to probabilities: alone, as lanes, in folds, resumed, reported."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import slipstream
from slipstream import config as configs
from slipstream import runs, training
from slipstream.data import dataset as datasets
from slipstream.data import labels as selection
from slipstream.data import windows
from slipstream.engine.planning import make_plan
from slipstream.inference import trained as new_data
from slipstream.models.forecaster import build
from slipstream.reporting.wording import describe_verdict
from slipstream.scoring import classification, ensemble
from slipstream.scoring import predict as score
from tests.cli.test_cli import invoke
from tests.conftest import KINDS, close, merged
from tests.labelled import NAMES, class_config, states
from tests.logs import as_lines
from tests.reporting.test_page import Page
from tests.training.test_lanes import stopping_at, train_windows
from tests.training.test_resume import ended, interrupted, same

LONG = states(3000, stay=60)
FAST = {"model": {"kind": "linear"}, "train": {"epochs": 3}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = class_config(
        tmp_path_factory.mktemp("classify"),
        data={"context": 12},
        train={"class_weights": "balanced"},
    )
    return config, slipstream.train(config, LONG)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    config = class_config(tmp_path_factory.mktemp("repeats"), train={"repeats": 3, "epochs": 3})
    return config, slipstream.train(config, states())


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    config = class_config(
        tmp_path_factory.mktemp("walk"),
        data={"split": {"walk_forward": 3, "purge": 4, "embargo": 4}},
        train={"epochs": 3, "class_weights": "balanced"},
    )
    return config, slipstream.train(config, states())


def test_what_can_be_told_apart_is_told_apart(trained):
    _, result = trained
    test, beside = result.metrics["test"], result.baselines
    assert list(test) == list(classification.NAMES)
    assert test["balanced_accuracy"] > 0.9
    assert result.summary["judged_by"] == "balanced_accuracy"  # for its class_weights
    # trees on the window's statistics tell these states apart as well
    assert set(result.summary["beaten_by"]) <= {"gbm"}
    differences = result.summary["against_baselines"]["differences"]["balanced_accuracy"]
    assert [differences[name]["verdict"] for name in ("majority", "logistic")] == ["better"] * 2
    assert set(beside) == {"majority", "logistic", "gbm", "rocket"}
    assert beside["gbm"]["metrics"]["test"]["balanced_accuracy"] > 0.9
    for baseline in (beside["majority"], beside["logistic"]):
        assert baseline["metrics"]["test"]["log_loss"] > test["log_loss"]
        assert baseline["metrics"]["test"]["balanced_accuracy"] < test["balanced_accuracy"]
    assert beside["majority"]["metrics"]["test"]["balanced_accuracy"] == pytest.approx(1 / 3)
    assert beside["logistic"]["metrics"]["test"]["balanced_accuracy"] > 0.5
    against = result.summary["against_majority"]
    assert set(against) == {"model", "logistic", "gbm", "rocket"}
    assert against["model"]["log_loss"]["interval"][1] < 0
    assert against["model"]["balanced_accuracy"]["interval"][0] > 0
    verdict = describe_verdict(result.summary)
    assert verdict.startswith("The model loses to gbm on the test set: balanced accuracy")
    assert "It is judged by balanced accuracy, since train.class_weights" in verdict
    assert "It beats the majority class: log-loss" in verdict
    for name, (low, high) in result.summary["intervals"]["test"].items():
        assert low <= high
        if name != "ece":  # a resample's is larger, as that of few windows is
            assert low <= test[name] <= high


def test_noise_does_not_beat_the_majority(tmp_path):
    table = states()
    draw = np.random.default_rng(0)
    coin = np.array(["x", "y"])[(draw.random(1200) < 0.7).astype(int)]
    table = table.set_column(3, "state", pa.array(coin))
    result = slipstream.train(class_config(tmp_path, **FAST), table)
    assert "Nothing here beats the majority class" in describe_verdict(result.summary)
    frequent = result.baselines["majority"]["metrics"]["test"]
    share = float((coin[960:] == "y").mean())
    assert frequent["accuracy"] == pytest.approx(share)
    seen = float((coin[7:840] == "y").mean())
    wanted = -share * math.log(seen) - (1 - share) * math.log(1 - seen)
    assert frequent["log_loss"] == pytest.approx(wanted, rel=1e-5)
    assert frequent["auc"] == pytest.approx(0.5)


def test_the_summary_says_what_there_is(trained):
    config, result = trained
    summary = result.summary
    # advice: where a baseline wins
    assert set(summary) - {"advice"} == {
        *("run", "name", "metrics", "windows", "baselines", "judged_by", "beaten_by", "classes"),
        *("against_baselines", "intervals", "against_majority", "steps", "repeated_steps"),
        *("epochs", "best_epoch", "stopped"),
        *("parameters", "windows_per_s", "plan", "monitor", "estimate", "notes", "seconds"),
        *("seconds_by_phase", "time", "data", "finished_at", "command", "windows_without_target"),
    }
    assert summary["classes"] == list(NAMES)
    saved = runs.read_json(result.run / "metrics.json")
    detail = saved["detail"]["test"]
    assert np.sum(detail["confusion"]) == summary["windows"]["test"] == 600
    assert set(detail["per_class"]) == set(NAMES)
    assert len(detail["reliability"]) == 15
    for one in detail["worst"]:
        assert one["label"] != one["predicted"]
        assert one["p_label"] < one["p_predicted"]
        assert LONG["state"][one["row"]].as_py() == one["label"]
    drawn = detail["worst"][0]
    rows = slice(drawn["row"] - 11, drawn["row"] + 1)
    close(drawn["inputs"]["a"], LONG["a"].to_numpy()[rows].copy(), rel=1e-4)
    written = configs.load(result.run / "config.toml")
    assert written.train.class_weights == "balanced"
    assert written.train.loss == "cross_entropy"
    assert written == config


def test_predictions_are_probabilities(trained):
    _, result = trained
    table = pyarrow.parquet.read_table(result.run / "predictions.parquet")
    names = [f"p_{name}" for name in NAMES]
    assert table.column_names == ["series", "row", "time", "label", "predicted", *names]
    likely = np.stack([table[name].to_numpy() for name in names], axis=1)
    np.testing.assert_allclose(likely.sum(axis=1), 1, atol=1e-5)
    assert [NAMES[i] for i in likely.argmax(axis=1)] == table["predicted"].to_pylist()
    truth = LONG["state"].to_numpy()[table["row"].to_numpy()]
    assert truth.tolist() == table["label"].to_pylist()
    numbers = np.array([NAMES.index(label) for label in truth])
    loss = -np.log(likely[np.arange(len(numbers)), numbers]).mean()
    assert result.metrics["test"]["log_loss"] == pytest.approx(loss, rel=1e-4)
    new = states(300, seed=9)
    found = slipstream.predict(result.run, new.drop_columns(["state"]))
    assert found.column_names == ["series", "row", "time", "predicted", *names]
    assert len(found) == 300 - 11
    right = found["predicted"].to_numpy() == new["state"].to_numpy()[11:]
    scored = slipstream.evaluate(result.run, new)
    assert scored["metrics"]["accuracy"] == pytest.approx(right.mean())
    assert scored["classes"] == list(NAMES)
    assert "scaled" not in scored


def test_evaluate_finds_the_runs_own_figures(tmp_path):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(states(), path)
    result = slipstream.train(class_config(tmp_path, data={"path": str(path)}, **FAST))
    again = slipstream.evaluate(result.run)
    assert again["metrics"] == pytest.approx(result.metrics["test"], rel=1e-5)
    for name in ("majority", "logistic", "gbm"):
        found, wanted = again["baselines"][name], result.baselines[name]
        assert found["metrics"] == pytest.approx(wanted["metrics"]["test"], rel=1e-5)
    labels = ["aloof", *states()["state"].to_pylist()[1:]]
    pa.parquet.write_table(states().set_column(3, "state", pa.array(labels)), path)
    with pytest.raises(slipstream.UserError, match="the classes now are aloof, calm, fast, wild"):
        slipstream.evaluate(result.run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", ["none", "last", "window"])
def test_every_model_gives_a_logit_for_each_class(kind, normalize):
    settings = {"model": {"kind": kind, "normalize": normalize, "hidden": 8}}
    past = {"horizon": 2, "inputs": ["a", "state"]}
    for data in ({"horizon": 0}, past):
        config = class_config(data=data, **settings)
        dataset = datasets.load_dataset(config, states())
        model = build(config.model, dataset.signature).eval()
        series, starts = dataset.memory.series, dataset.memory.starts["val"][:5]
        out = model(*windows.gather_inputs(series, starts)).detach()
        assert out.shape == (5, dataset.signature.steps_out, 1, 3)
        if normalize != "none" and data is past:  # moving the past labels moves no logit
            values = series.values.clone()
            values[:, -1] += 1.0
            moved = windows.gather_inputs(replace(series, values=values), starts)
            close(model(*moved).detach(), out, rel=1e-4)


def test_a_repeat_has_the_figures_of_its_seed_alone(repeated, tmp_path):
    _, result = repeated
    summary = result.summary
    for lane in summary["lanes"]:
        config = class_config(tmp_path, train={"epochs": 3}, seed=lane["seed"])
        alone = slipstream.train(config, states())
        for which in ("val", "test"):
            assert lane["metrics"][which] == pytest.approx(alone.metrics[which], rel=1e-4)
        assert "scaled" not in lane
    assert summary["spread"]["log_loss"]["mean"] == pytest.approx(
        np.mean([lane["metrics"]["test"]["log_loss"] for lane in summary["lanes"]])
    )
    assert summary["coverage"] == summary["width"] == {}
    assert summary["crps"] is None
    assert set(summary["against_majority"]) == {"model", "logistic", "gbm", "ensemble"}


def test_the_ensemble_is_the_mean_of_probabilities(repeated):
    _, result = repeated
    new, run = states(200, seed=4), runs.open_run(result.run)
    together = slipstream.predict(result.run, new, ensemble=True)
    config = configs.load(run.folder / "config.toml")
    chosen = make_plan(config, data_bytes=0, training=False)
    trained = ensemble.load_predictors(run, config, chosen, ensemble=False)
    dataset = new_data.load_new_data(config, trained.signature, trained.scaler, new, targets=False)
    (piece,) = dataset.iter_chunks("all", None, rows=0)
    kept = load_file(run.folder / "lanes" / "weights.safetensors")
    likely = []
    for number in "012":
        weights = {k.removeprefix(f"{number}/"): v for k, v in kept.items() if k[0] == number}
        predict = ensemble.build_predictor(weights, config, dataset, chosen)
        (chunk,) = score.predict_batches(predict, [piece], truth=False)
        likely.append(chunk.prediction[:, 0, 0].softmax(-1))
    mean = torch.stack(likely).mean(0)
    for i, name in enumerate(NAMES):
        close(together[f"p_{name}"].to_pylist(), mean[:, i], rel=1e-5)
    wanted = result.summary["ensemble"]["metrics"]["val"]["log_loss"]
    better = wanted < result.metrics["val"]["log_loss"]
    assert result.summary["uses"] == ("ensemble" if better else "model")


def test_folds_are_scored_together(walked):
    _, result = walked
    summary = result.summary
    assert len(summary["folds"]) == 3
    table = pyarrow.parquet.read_table(result.run / "predictions.parquet")
    assert len(table) == summary["windows"]["test"]
    right = table["label"].to_numpy() == table["predicted"].to_numpy()
    assert result.metrics["test"]["accuracy"] == pytest.approx(right.mean())
    for fold in summary["folds"]:
        mine = table["fold"].to_numpy() == fold["fold"]
        assert fold["metrics"]["test"]["accuracy"] == pytest.approx(right[mine].mean())
        assert set(fold["baselines"]) == {"majority", "logistic", "gbm", "rocket"}
    by_fold = [f["baselines"]["majority"]["metrics"]["test"]["log_loss"] for f in summary["folds"]]
    counts = [f["windows"]["test"] for f in summary["folds"]]
    pooled = result.baselines["majority"]["metrics"]["test"]["log_loss"]
    assert pooled == pytest.approx(np.average(by_fold, weights=counts))


def test_a_fold_has_the_figures_of_its_windows_trained_alone(walked, tmp_path):
    """With the first fold's class weights, which every fold may know."""
    config, result = walked
    dataset = datasets.load_dataset(config, states())
    weights = selection.balance_weights(dataset.count_classes())
    single = class_config(tmp_path, train={"epochs": 3, "class_weights": list(weights)})
    for fold, told in zip(dataset.folds, result.summary["folds"], strict=True):
        found = train_windows(single, dataset.select_fold(fold))
        for which in ("val", "test"):
            assert told["metrics"][which] == pytest.approx(found["metrics"][which], rel=1e-4)
        logistic = found["baselines"]["logistic"]
        assert told["baselines"]["logistic"]["metrics"] == logistic["metrics"]


STOPPED = {
    "train": {"class_weights": "balanced", "epochs": 3},
    "engine": {"log_every": 4, "checkpoint_minutes": 1e-9},
}


@pytest.mark.slow
def test_a_stopped_run_ends_as_the_unbroken_one(tmp_path):
    config = class_config(tmp_path / "whole", **STOPPED)
    wanted = ended(runs.open_run(slipstream.train(config, states()).run))
    again = class_config(tmp_path / "at", **STOPPED)
    run = interrupted(again, states(), 7)
    slipstream.train(again, states(), resume=run.folder)
    same(ended(run), wanted)


@pytest.mark.slow
def test_stopped_lanes_end_as_unbroken_ones(tmp_path):
    sections = merged(STOPPED, {"train": {"repeats": 2}})
    wanted = slipstream.train(class_config(tmp_path / "whole", **sections), states())

    with pytest.raises(slipstream.Interrupted):
        training.train(
            class_config(tmp_path / "at", **sections), states(), watch=as_lines(stopping_at(5))
        )
    run = runs.open_run(runs.find_last(str(tmp_path / "at")))
    found = slipstream.train(data=states(), resume=run.folder)
    assert found.metrics == wanted.metrics
    assert found.summary["lanes"] == wanted.summary["lanes"]


@pytest.mark.parametrize("which", ["trained", "repeated", "walked"])
def test_the_report_draws_what_classes_need(which, request):
    _, result = request.getfixturevalue(which)
    path = slipstream.report(result.run)
    text, page = path.read_text(encoding="utf-8"), Page()
    page.feed(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links)
    for heading in (
        "Confusion matrix",
        "Reliability",
        "Worst windows",
        "Comparison with baselines",
    ):
        assert heading in text
    assert "MAE" not in text.split("config.toml")[0]
    for name in NAMES:
        assert name in text


def test_horizons_classify_each_row_ahead(tmp_path):
    config = class_config(tmp_path, data={"horizon": 3}, **FAST)
    result = slipstream.train(config, states())
    detail = runs.read_json(result.run / "metrics.json")["detail"]["test"]
    assert len(detail["per_step"]) == 3
    assert np.sum(detail["confusion"]) == 3 * result.summary["windows"]["test"]
    assert len(result.baselines["logistic"]["log_loss_by_step"]) == 3
    ahead = slipstream.predict(result.run, states(100, seed=2))
    assert ahead["step"].to_pylist() == [1, 2, 3]
    assert ahead["row"].to_pylist() == [100, 101, 102]
    assert "By horizon" in slipstream.report(result.run).read_text(encoding="utf-8")


@pytest.mark.parametrize("loss", ["cross_entropy", "focal"])
def test_streams_and_losses_train_too(tmp_path, loss):
    path = tmp_path / "t.parquet"
    pa.parquet.write_table(states(600), path, row_group_size=100)
    config = class_config(
        tmp_path,
        data={"path": str(path)},
        model={"kind": "linear"},
        train={"loss": loss, "label_smoothing": 0.1, "class_weights": "balanced", "epochs": 2},
        engine={"home": "stream", "workers": 0},
    )
    result = slipstream.train(config)
    assert result.metrics["test"]["balanced_accuracy"] > 0.35
    assert runs.read_json(result.run / "metrics.json")["detail"]["test"]["worst"][0]["time"] is None


def test_the_command_line_takes_labels_from_a_table(tmp_path):
    states().drop_columns(["state"]).to_pandas().to_csv(tmp_path / "table.csv", index=False)
    text = "start,end,label\n" + "".join(
        f"{end - 9},{end},{'ab'[i % 3 == 0]}\n" for i, end in enumerate(range(20, 1190, 10))
    )
    (tmp_path / "labels.csv").write_text(text)
    job = tmp_path / "job.toml"
    job.write_text(
        f'out = "{tmp_path}/runs"\n[data]\npath = "table.csv"\nlabels = "labels.csv"\n'
        'time = "time"\ntask = "classify"\ncontext = 8\n'
        '[model]\nkind = "linear"\n[train]\nepochs = 2\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nplan = "off"\n'
    )
    found = invoke("train", job, "--json")
    assert found.exit_code == 0, found.output
    summary = json.loads(found.stdout)
    assert summary["classes"] == ["a", "b"]
    assert sum(summary["windows"].values()) == 117
    shown = invoke("evaluate", summary["run"])
    assert shown.exit_code == 0, shown.output
    assert "log-loss" in shown.stdout
    shown = invoke("train", job)
    assert "majority" in shown.stdout
    assert "the majority class" in shown.stdout
    out = tmp_path / "p.csv"
    assert invoke("predict", summary["run"], tmp_path / "table.csv", "--out", out).exit_code == 0
    header = out.read_text().split("\n")[0].replace('"', "")
    assert header == "series,row,time,predicted,p_a,p_b"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": {"targets": ["a", "b"]}}, "needs one column of labels"),
        ({"data": {"labels": "l.csv"}}, "both define the target"),
        ({"data": {"channels": "independent", "horizon": 2}}, "not for classification"),
        ({"data": {"inputs": ["a", "state"]}}, "would read its own answer"),
        ({"data": {"label_rows": "every"}}, "data.label_rows applies only with data.labels"),
        (
            {"train": {"loss": "mse"}},
            'train.loss = "mse" does not work with data.task = "classify"',
        ),
        ({"data": {"task": "regress"}}, 'use one of "mse", "mae", "huber", "quantile"'),
        (
            {"data": {"split": {"stratified": True, "walk_forward": 2}}},
            "stratified needs the fractions",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, said):
    with pytest.raises(slipstream.UserError, match=said):
        class_config(**settings)


def test_the_loss_and_the_horizon_follow_from_the_task():
    found = configs.load({"data": {"task": "classify", "targets": ["y"]}})
    assert (found.train.loss, found.data.horizon) == ("cross_entropy", 0)
    assert configs.load({"data": {"targets": ["y"]}}).train.loss == "mse"


def test_a_class_missing_from_the_test_set_costs_its_area_only(tmp_path):
    """Nothing is known of the spread of what means nothing, and it is null in JSON."""
    table = states()
    labels = ["calm" if i >= 900 else x for i, x in enumerate(table["state"].to_pylist())]
    labels[-1] = "fast"
    config = class_config(tmp_path, **merged(FAST, {"train": {"repeats": 2}}))
    result = slipstream.train(config, table.set_column(3, "state", pa.array(labels)))
    assert math.isnan(result.metrics["test"]["auc"])
    assert math.isnan(result.summary["spread"]["auc"]["mean"])
    assert result.summary["spread"]["accuracy"]["sd"] >= 0
    saved = runs.read_json(result.run / "metrics.json")
    assert saved["metrics"]["test"]["auc"] is None
    assert saved["intervals"]["test"]["auc"] is None
    slipstream.report(result.run)


def test_a_run_from_before_there_were_classes_still_loads():
    signature = datasets.load_dataset(class_config(), states()).signature
    old = signature.model_dump()
    del old["classes"]
    assert configs.Signature.model_validate(old).classes == ()
    assert configs.Signature.model_validate_json(signature.model_dump_json()) == signature


def test_too_few_windows_beat_nothing(tmp_path):
    config = class_config(tmp_path, data={"context": 40}, train={"epochs": 8})
    result = slipstream.train(config, states(500, stay=20))
    assert result.summary["windows"]["test"] == 100
    assert set(result.summary["intervals"]["test"].values()) == {None}
    assert "Too few windows to tell" in describe_verdict(result.summary)
