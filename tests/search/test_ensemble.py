"""Ensembles of runs: what they predict, what they hold, and which members they refuse."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import slipstream
from slipstream import UserError, runs
from slipstream.base.errors import ResumableError
from slipstream.search import ensemble
from tests.cli.test_cli import invoke
from tests.conftest import assert_interval_scores, merged, small_config, waves
from tests.labelled import CLASSIFY, states
from tests.logs import as_lines

QUICK = {"model": {"kind": "mlp"}, "train": {"epochs": 2, "lr": 0.01}}


def echoed(rows, seed=0):
    """A table whose column c is nearly its column a."""
    table = waves(rows, seed=seed).to_pydict()
    noise = 0.05 * np.random.default_rng(seed).standard_normal(rows)
    return pa.table(table | {"c": table["a"] + noise})


NEW = echoed(200, seed=3)


def train(folder, table, **sections):
    """Train on a file, so that the run can read its data again."""
    path = folder / "table.parquet"
    if not path.exists():
        pa.parquet.write_table(table, path)
    data = {"data": {"path": str(path), "targets": ["a", "b"]}}
    sections = merged(merged(QUICK, data), sections)
    return slipstream.train(small_config(folder / "runs", **sections))


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """An LSTM, an MLP of independent channels with a longer context, and two repeats of quantiles
    with a target that is no input."""
    folder, table = tmp_path_factory.mktemp("members"), echoed(600)
    quantiles = {"repeats": 2, "loss": "quantile", "quantiles": [0.1, 0.5, 0.9], "epochs": 4}
    return [
        train(folder, table, model={"kind": "lstm"}, train={"epochs": 8, "lr": 0.03}),
        train(folder, table, data={"context": 24, "channels": "independent", "inputs": ["a", "b"]}),
        train(folder, table, data={"context": 12, "inputs": ["b", "c"]}, train=quantiles),
    ]


@pytest.fixture(scope="module")
def joined(members, tmp_path_factory):
    """The ensemble of copies that are gone by the time it is used."""
    folder = tmp_path_factory.mktemp("joined")
    copies = [shutil.copytree(one.run, folder / one.run.name) for one in members]
    result = slipstream.ensemble(copies, out=folder / "runs")
    for copy in copies:
        shutil.rmtree(copy)
    return result


def list_weights(result):
    return [one["weight"] for one in result.summary["members"]]


def read_predictions(run, data, targets=("a", "b"), **options):
    table = slipstream.predict(run, data, **options).to_pandas()
    return table.set_index([name for name in ("time", "step") if name in table])[
        [f"{name}_predicted" for name in targets]
    ]


def test_weights_are_not_negative_and_add_up_to_one(joined):
    weights = list_weights(joined)
    assert min(weights) >= 0
    assert sum(weights) == pytest.approx(1)
    assert all(weight > 0.01 for weight in weights)


def test_the_members_order_their_targets_differently(members):
    signatures = [json.loads((one.run / "model" / "signature.json").read_text()) for one in members]
    assert [one["targets"] for one in signatures] == [["a", "b"], ["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("every", [False, True])
def test_predictions_are_the_weighted_mean_of_the_members(members, joined, every):
    found = read_predictions(joined.run, NEW, every=every)
    alone = [read_predictions(one.run, NEW, every=every).loc[found.index] for one in members]
    wanted = sum(weight * one for weight, one in zip(list_weights(joined), alone, strict=True))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert len(found) == (177 if every else 1) * 4  # 24 rows of context and those behind them


def test_no_member_has_a_lower_validation_error(joined):
    errors = [one["scaled"]["val"]["mse"] for one in joined.summary["members"]]
    assert joined.summary["scaled"]["val"]["mse"] < min(errors)


def test_members_are_scored_on_the_windows_of_the_ensemble(members, joined):
    assert joined.summary["windows"] == members[1].summary["windows"]  # the longest context
    same = joined.summary["members"][1]["metrics"]
    for which in ("val", "test"):
        assert same[which] == pytest.approx(members[1].metrics[which], rel=1e-5)


def test_evaluate_finds_the_metrics_and_coverage_of_the_ensemble(joined):
    for which in ("val", "test"):
        scored = slipstream.evaluate(joined.run, on=which)
        assert scored["metrics"] == pytest.approx(joined.metrics[which], rel=1e-6)
    assert scored["coverage"] == joined.summary["coverage"]
    assert scored["width"] == pytest.approx(joined.summary["width"], rel=1e-6)
    assert scored["crps"] == pytest.approx(joined.summary["crps"], rel=1e-6)
    assert scored["model"] == "the weighted mean of 3 models"
    for one, wanted in zip(scored["members"], joined.summary["members"], strict=True):
        assert one["weight"] == wanted["weight"]
        assert one["metrics"] == pytest.approx(wanted["metrics"]["test"], rel=1e-6)
    ridge = joined.baselines["ridge"]["metrics"]["test"]
    assert scored["baselines"]["ridge"]["metrics"] == pytest.approx(ridge, rel=1e-6)


def test_the_single_model_is_the_best_member(joined):
    errors = [one["scaled"]["val"]["mse"] for one in joined.summary["members"]]
    best = joined.summary["members"][int(np.argmin(errors))]
    scored = slipstream.evaluate(joined.run, ensemble=False)
    assert scored["metrics"] == pytest.approx(best["metrics"]["test"], rel=1e-6)
    assert scored["model"] == "the best of 3 models"


def test_intervals_are_scored_as_they_are_written(joined):
    assert_interval_scores(joined.summary, joined.run / "predictions.parquet", ("a", "b"))


def test_the_folder_is_a_run_like_any_other(joined):
    names = {path.name for path in joined.run.iterdir()} - {"report.html"}
    assert names == {
        *("config.toml", "ensemble.json", "members", "baselines", "plan.json", "events.jsonl"),
        *("manifest.json", "metrics.json", "predictions.parquet"),
    }
    runs.verify_files(joined.run, "config.toml", "ensemble.json", "predictions.parquet")
    assert runs.read_metrics(joined.run)["run"] == str(joined.run)
    page = slipstream.report(joined.run).read_text(encoding="utf-8")
    for one in joined.summary["members"]:
        assert f"{one['weight']:.3f} {one['name']} ({one['kind']})" in page


def test_a_list_of_runs_names_the_kinds_of_the_members(joined):
    (row,) = slipstream.list_runs(joined.run.parent)
    assert (row.kind, row.model, row.state) == ("ensemble", "lstm + mlp", "finished")
    assert all(name.startswith("data.") for name in slipstream.show_run(joined.run)["settings"])


def test_results_print_the_members(joined):
    opened = slipstream.Result.open(joined.run)
    table = opened.to_pandas()
    assert ("model", "test") in table.index
    assert any(name.startswith("lstm, weight 0.") for name, _ in table.index)
    assert "lstm, weight 0." in opened._repr_html_()
    assert "lstm, weight 0." in repr(opened.evaluate(NEW))


def test_edited_weights_are_refused(joined, tmp_path):
    run = shutil.copytree(joined.run, tmp_path / "run")
    text = (run / "ensemble.json").read_text()
    (run / "ensemble.json").write_text(text.replace("weights", "wights"))
    with pytest.raises(UserError, match=r"ensemble\.json: is damaged"):
        slipstream.predict(run, NEW)


def test_classes_have_the_weighted_mean_of_the_probabilities(tmp_path):
    table, new = states(360), states(150, seed=5)
    sections = [{}, {"data": {"context": 12, "inputs": ["a"]}}]
    settings = merged(CLASSIFY, {"train": {"epochs": 2}})
    members = [train(tmp_path, table, **merged(settings, one)) for one in sections]
    joined = slipstream.ensemble(members)
    names = [f"p_{name}" for name in joined.summary["classes"]]
    tables = [slipstream.predict(one.run, new).to_pandas() for one in (*members, joined)]
    first, second, found = (one.set_index("time")[names] for one in tables)
    weights = list_weights(joined)
    wanted = weights[0] * first.loc[found.index] + weights[1] * second.loc[found.index]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    losses = [one["metrics"]["val"]["log_loss"] for one in joined.summary["members"]]
    assert joined.metrics["val"]["log_loss"] <= min(losses) * (1 + 1e-6)
    assert slipstream.report(joined.run).exists()
    scored = slipstream.evaluate(joined.run)
    assert scored["metrics"] == pytest.approx(joined.metrics["test"], rel=1e-5)


def test_every_fold_has_weights_of_its_own(tmp_path):
    folds = {"data": {"split": {"walk_forward": 2}}}
    members = [
        train(tmp_path, waves(600), **merged(folds, one))
        for one in ({}, {"data": {"context": 24}, "seed": 1})
    ]
    joined = slipstream.ensemble(members)
    assert [one["fold"] for one in joined.summary["folds"]] == [1, 2]
    for fold in joined.summary["folds"]:
        assert sum(fold["weights"].values()) == pytest.approx(1)
    assert list(joined.summary["folds"][-1]["weights"].values()) == list_weights(joined)
    scored = slipstream.evaluate(joined.run)
    assert scored["metrics"] == pytest.approx(joined.metrics["test"], rel=1e-6)
    table = pa.parquet.read_table(joined.run / "predictions.parquet")
    assert set(table["fold"].to_pylist()) == {1, 2}
    assert "those of the last fold" in slipstream.report(joined.run).read_text(encoding="utf-8")


def test_streamed_data_are_refused_unless_they_are_loaded(tmp_path):
    streams = {"engine": {"home": "stream", "workers": 0}, "train": {"epochs": 1}}
    members = [train(tmp_path, waves(600), seed=seed, **streams) for seed in (0, 1)]
    with pytest.raises(UserError, match=r'streamed, .*pass overrides="engine\.home=host"'):
        slipstream.ensemble(members)
    joined = slipstream.ensemble(members, overrides="engine.home=host")
    assert joined.summary["windows"] == members[0].summary["windows"]


def test_a_table_from_python_is_passed_again(tmp_path):
    sections = [merged(QUICK, {"out": str(tmp_path), "seed": seed}) for seed in (0, 1)]
    members = [slipstream.train(small_config(**one), waves()) for one in sections]
    joined = slipstream.ensemble(members, waves())
    assert joined.metrics["test"]["mae"] > 0
    changed = waves().to_pydict()
    changed["a"][-1] += 1
    with pytest.raises(UserError, match="its data have changed since training"):
        slipstream.ensemble(members, changed)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"targets": ["a"]}}, r"targets are \['a'\], but \['a', 'b'\] in "),
        ({"data": {"horizon": 2}}, r"data\.horizon is 2, but 4 in "),
        (
            {"data": {"split": {"train": 0.5, "val": 0.2, "test": 0.3}}},
            r"data\.split is \{'train': 0\.5.* an ensemble needs the same",
        ),
    ],
)
def test_members_that_predict_something_else_are_refused(members, tmp_path, sections, message):
    other = train(tmp_path, echoed(600), **merged({"train": {"epochs": 1}}, sections))
    with pytest.raises(UserError, match=message):
        slipstream.ensemble([members[0], other])
    assert not list(members[0].run.parent.glob(".*"))


def test_members_of_other_data_are_refused(members, tmp_path):
    changed = echoed(600).to_pydict()
    changed["b"][500] += 1
    other = train(tmp_path, pa.table(changed), train={"epochs": 1})
    with pytest.raises(UserError, match=r'target "b" is .* in row 500 .*; 1 of 600 rows differ'):
        slipstream.ensemble([members[0], other])


def test_what_is_no_finished_run_is_refused(members, joined, tmp_path):
    with pytest.raises(UserError, match="needs two runs or more"):
        slipstream.ensemble([members[0]])
    with pytest.raises(UserError, match="needs a list of two runs or more"):
        slipstream.ensemble(str(members[0].run))
    with pytest.raises(UserError, match="is named twice"):
        slipstream.ensemble([members[0], members[0].run])
    with pytest.raises(UserError, match="is an ensemble itself"):
        slipstream.ensemble([members[0], joined])
    stopped = shutil.copytree(members[1].run, tmp_path / "stopped")
    (stopped / "metrics.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        slipstream.ensemble([members[0], stopped])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_ensemble_that_is_stopped_leaves_nothing_behind(members, tmp_path, error):
    def stop(event):
        if event["event"] == "scoring":
            raise error

    with pytest.raises((KeyboardInterrupt, ResumableError)):
        ensemble.ensemble([one.run for one in members], out=tmp_path, watch=as_lines(stop))
    assert list(tmp_path.iterdir()) == []


def test_an_ensemble_is_neither_resumed_nor_fine_tuned(joined, tmp_path):
    with pytest.raises(UserError, match="is an ensemble"):
        slipstream.train(resume=joined.run)
    config = small_config(tmp_path, train={"init_from": str(joined.run)})
    with pytest.raises(UserError, match="is an ensemble"):
        slipstream.train(config, waves())


def test_the_command_names_the_run_and_states_the_weights(members, tmp_path):
    folders = [one.run for one in members[:2]]
    options = ("--name", "pair", "--out", tmp_path)
    answer = invoke("ensemble", *folders, *options, "--json")
    assert answer.exit_code == 0, answer.output
    summary = json.loads(answer.stdout)
    assert summary["run"].startswith(str(tmp_path / "pair-"))
    assert sum(one["weight"] for one in summary["members"]) == pytest.approx(1)
    assert summary["report"] == f"{summary['run']}/report.html"
    answer = invoke("ensemble", *folders, *options)
    assert "weights, fitted to the validation set: " in answer.stdout
    assert "ensemble" in answer.stdout
    answer = invoke("ensemble", folders[0], "--json")
    assert answer.exit_code == 2
    assert "two runs or more" in json.loads(answer.stdout)["error"]
