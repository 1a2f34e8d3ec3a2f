"""Trials of a search: failures, pruning, the time limit and folds."""

from __future__ import annotations

import io
import math

import numpy as np
import optuna
import pyarrow as pa
import pytest
import torch
from rich.console import Console

import slipstream
from slipstream import UserError, report, runs
from slipstream import config as configs
from slipstream.data import dataset as datasets
from slipstream.data import folds
from slipstream.reporting.terminal.results import print_search
from slipstream.reporting.wording import describe_search_verdict
from slipstream.search import api
from slipstream.search.storage import NOTES, OUT_OF_TIME
from tests.conftest import close, slow, waves
from tests.logs import read_lines
from tests.search.searches import get_trials, make_settings, run_search


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid", slow("gp"), "cmaes"])
def test_every_sampler(tmp_path, sampler):
    settings = make_settings(tmp_path, train={"epochs": 1}, tune={"sampler": sampler, "trials": 4})
    if sampler == "grid":
        settings["tune"]["space"] = {"model.hidden": [4, 8], "train.batch": [16, 32]}
    study, _ = run_search(settings)
    tried = [tuple(trial.params.values()) for trial in get_trials(study)]
    assert len(set(tried)) == 4
    assert study.summary["trials"] == {"finished": 4, "pruned": 0, "failed": 0}


def test_impossible_settings_fail_by_name_and_the_search_goes_on(tmp_path):
    space = {"model.kind": ["transformer", "mlp"], "model.hidden": [6, 8], "train.lr": [0.01, 0.02]}
    study, _ = run_search(
        make_settings(tmp_path, tune={"space": space, "sampler": "grid", "trials": 8})
    )
    failed = [t for t in get_trials(study) if t.state == optuna.trial.TrialState.FAIL]
    assert {(t.params["model.kind"], t.params["model.hidden"]) for t in failed} == {
        ("transformer", 6)
    }
    assert "is not a multiple of" in failed[0].user_attrs[NOTES]["stopped"]
    assert study.summary["trials"] == {"finished": 6, "pruned": 0, "failed": 2}


def test_a_conflicting_pair_of_sampled_settings_is_a_failed_trial(tmp_path):
    space = {"data.context": [8, 9], "model.patch": [2, 3]}
    tune = {"space": space, "sampler": "grid", "trials": 4}
    study, _ = run_search(
        make_settings(tmp_path, model={"patch": 2}, train={"epochs": 1}, tune=tune)
    )
    ended = {(t.params["data.context"], t.params["model.patch"]): t for t in get_trials(study)}
    assert study.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 2}
    assert "not a multiple" in ended[9, 2].user_attrs[NOTES]["stopped"]


def test_a_loss_that_is_not_finite_fails_only_its_trial(tmp_path):
    space = {"train.lr": [0.01, 1e18]}
    settings = make_settings(tmp_path, train={"clip": "off", "optimizer": "sgd"})
    settings["tune"] |= {"space": space, "sampler": "grid", "trials": 2}
    study, _ = run_search(settings)
    by_rate = {t.params["train.lr"]: t for t in get_trials(study)}
    assert by_rate[0.01].state == optuna.trial.TrialState.COMPLETE
    assert by_rate[1e18].state == optuna.trial.TrialState.FAIL
    assert "finite" in by_rate[1e18].user_attrs[NOTES]["stopped"]


@pytest.mark.parametrize("pruner", ["median", slow("hyperband"), slow("halving")])
def test_hopeless_trials_are_pruned(tmp_path, pruner):
    """A learning rate next to nothing learns nothing, which shows after an epoch."""
    space = {"train.lr": [1e-7, 2e-7, 0.01, 0.02, 0.03]}
    tune = {"pruner": pruner, "trials": 16, "parallel": 2, "startup_trials": 2, "warmup_epochs": 0}
    settings = make_settings(
        tmp_path, train={"epochs": 4}, tune=tune | {"space": space, "sampler": "random"}
    )
    study, _ = run_search(settings)
    pruned = [t for t in get_trials(study) if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    assert study.summary["trials"]["pruned"] == len(pruned)
    assert study.summary["best"]["params"]["train.lr"] >= 0.01
    for trial in pruned:
        assert trial.user_attrs[NOTES]["epochs"] == len(trial.intermediate_values)
    if pruner == "median":
        assert {t.params["train.lr"] for t in pruned} <= {1e-7, 2e-7, 0.01, 0.02, 0.03}
        assert any(t.params["train.lr"] < 1e-6 for t in pruned)


@pytest.mark.slow
def test_a_search_stops_after_its_minutes(tmp_path):
    tune = {"trials": 500, "minutes": 0.05, "parallel": 4}
    study, _ = run_search(make_settings(tmp_path, train={"epochs": 40}, tune=tune))
    counts = study.summary["trials"]
    assert 0 < sum(counts.values()) < 500
    cut_off = [one for one in read_trials(study) if one["state"] == "cut off"]
    assert len(cut_off) == counts.get("cut off", 0)
    for one in cut_off:
        assert one["epochs"] < 40
        assert one["stopped"] == OUT_OF_TIME
        assert one["value"] == pytest.approx(min(one["losses"].values()))
    assert (study.run / "best" / "model").exists()


def read_trials(study):
    return runs.read_json(study.run / "trials.json")


@pytest.mark.slow
def test_a_search_within_its_minutes_is_complete(tmp_path):
    study, _ = run_search(make_settings(tmp_path, tune={"trials": 2, "minutes": 30, "retrain": 1}))
    assert study.summary["trials"] == {"finished": 2, "pruned": 0, "failed": 0}
    assert study.summary["retraining"]["num_trials"] == 1
    assert not [one for one in study.summary["findings"] if "tune.minutes" in one]
    assert study.summary["comparison"] is not None


@pytest.mark.slow
def test_a_search_without_time_for_its_retraining_says_so_and_has_a_report(tmp_path):
    tune = {"trials": 8, "minutes": 0.02, "parallel": 2, "retrain": 5}
    settings = make_settings(tmp_path, train={"epochs": 2000, "patience": "off"}, tune=tune)
    study, _ = run_search(settings)
    assert study.summary["trials"]["finished"] == 0
    assert study.summary["retraining"] == {
        "num_trials": 0, "num_seeds": 0, "of_trials": 5, "of_seeds": 3
    }  # fmt: skip
    cut, skipped = study.summary["findings"]
    assert "of 2000 epochs; no trial was complete" in cut
    assert "no trial was retrained" in skipped
    assert "tune.minutes left no time" in describe_search_verdict(study.summary)
    assert report(study.run).exists()
    check_best_is_tested(study)


def check_best_is_tested(study):
    """The model of the best trial was tested as it is: its validation loss is the trial's."""
    assert list(study.summary["test"]) == ["best"]
    assert study.summary["comparison"] is None
    tested = slipstream.Study(**vars(study)).result
    assert tested.metrics["test"]["mae"] == study.summary["test"]["best"]["metrics"]["test"]["mae"]
    assert tested.baselines
    ended = [e for e in read_lines(runs.Run(tested.run)) if e["event"] == "epoch"]
    assert min(e["val_loss"] for e in ended) == study.summary["best"]["value"]
    assert tested.summary["parameters"] > 0
    assert (tested.run / "predictions.parquet").exists()


SHORT = {"trials": 8, "minutes": 0.02, "parallel": 2, "retrain": 2}


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"horizon": 0, "inputs": ["a", "b"], "targets": ["c"]}},
        slow({"tune": SHORT | {"folds": 2}}),
        slow({"train": {"epochs": 2000, "patience": "off", "loss": "quantile"}}),
    ],
    ids=["estimate", "folds", "quantiles"],
)
def test_the_best_trial_is_tested_where_there_is_no_time_to_retrain(tmp_path, sections):
    long = {"train": {"epochs": 2000, "patience": "off"}, "tune": SHORT}
    study, _ = run_search(make_settings(tmp_path, **(long | sections)))
    assert study.summary["retraining"]["num_trials"] == 0
    if "tune" not in sections:
        check_best_is_tested(study)
    assert study.summary["test"]["best"]["metrics"]["test"]["mae"] > 0


@pytest.mark.slow
def test_the_best_trial_of_several_workers_is_tested(tmp_path):
    long = {"train": {"epochs": 20_000, "patience": "off"}, "tune": SHORT | {"minutes": 0.15}}
    study = api.tune(make_settings(tmp_path, **long), workers=2)
    assert study.summary["retraining"]["num_trials"] == 0
    check_best_is_tested(study)


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [0.02, 1e-5])
def test_a_trial_is_cut_off_within_its_epoch(tmp_path, minutes):
    """However long an epoch takes, and before any was complete; the first one trains even where the
    time is over before."""
    tune = SHORT | {"trials": 1, "minutes": minutes}
    settings = make_settings(tmp_path, waves(120_000), train={"batch": 1, "epochs": 3}, tune=tune)
    study, events = run_search(settings)
    assert study.summary["trials"] == {"finished": 0, "pruned": 0, "failed": 0, "cut off": 1}
    (trial,) = (event for event in events if event["event"] == "trial")
    assert 0 < trial["epochs"] < 1
    check_best_is_tested(study)


@pytest.mark.slow
def test_a_search_of_a_classifier(tmp_path):
    """With weights that come from the training windows, and dropped in by every trial."""
    table = waves(400)
    first = np.asarray(table.column(1))
    up = first > np.median(first)
    table = table.append_column("up", pa.array(np.where(up, "yes", "no")))
    inputs = table.column_names[1:-1]
    data = {"task": "classify", "targets": ["up"], "horizon": 0, "inputs": inputs}
    measured = {"plan": "cached", "threads": "auto"}
    settings = make_settings(
        tmp_path, table, data=data, train={"class_weights": "balanced"}, engine=measured
    )
    settings["tune"] |= {"retrain": 1, "retrain_seeds": 2, "trials": 3}
    study, _ = run_search(settings)
    assert study.summary["trials"]["finished"] == 3
    assert study.summary["test"]["best"]["metrics"]["test"]["accuracy"] > 0.8
    assert study.summary["comparison"]["metric"] == "balanced_accuracy"  # what weights are for
    page = slipstream.report(study.run).read_text(encoding="utf-8")
    figures = page.split("On the test set")[1].split("</table>")[0]
    assert "<th>log-loss</th><th>balanced accuracy</th>" in figures
    assert "majority" in figures
    assert "test balanced accuracy against the defaults" in page
    out = io.StringIO()
    print_search(study.summary | {"report": "report.html"}, Console(file=out, width=200))
    assert "log-loss" in out.getvalue().split("test set")[1]


def test_folds_walk_back_from_the_validation_block():
    config = configs.load({"data": {"context": 8, "horizon": 2}})
    dataset = datasets.load_dataset(config, waves(400))
    starts, signature = dataset.memory.starts, dataset.signature
    offsets = torch.from_numpy(dataset.index.offsets)
    found = folds.divide_training(starts, 3, offsets=offsets, signature=signature, purge=0)
    assert torch.equal(found[-1]["train"], starts["train"])
    assert torch.equal(found[-1]["val"], starts["val"])
    first_test = int(starts["test"].min()) + signature.lead
    sizes = [len(fold["val"]) for fold in found]
    assert max(sizes) - min(sizes) <= 1
    for fold in found:
        last_of_training = int(fold["train"].max()) + signature.lead + signature.steps_out
        assert last_of_training <= int(fold["val"].min()) + signature.lead
        assert int(fold["val"].max()) + signature.lead + signature.steps_out <= first_test
    before = [int(fold["val"].min()) for fold in found]
    assert before == sorted(before)


@pytest.mark.slow
def test_a_trial_is_scored_by_its_folds(tmp_path):
    settings = make_settings(tmp_path, tune={"folds": 3, "trials": 4})
    study, events = run_search(settings)
    epochs = [event for event in events if event["event"] == "epoch"]
    for trial in get_trials(study):
        for step, value in trial.intermediate_values.items():
            mine = [
                event["val_loss"]
                for event in epochs
                if event["trial"] == trial.number and event["epoch"] == step + 1
            ]
            assert len(mine) == 3
            close(value, float(np.mean(mine)), rel=1e-6)


@pytest.mark.slow
def test_all_folds_of_a_pruned_trial_end(tmp_path):
    space = {"train.lr": [1e-7, 0.01, 0.02]}
    tune = {"pruner": "median", "folds": 3, "trials": 12, "space": space, "sampler": "random"}
    tune |= {"startup_trials": 1, "warmup_epochs": 0, "parallel": 2}
    study, events = run_search(make_settings(tmp_path, train={"epochs": 4}, tune=tune))
    pruned = [t.number for t in get_trials(study) if t.state == optuna.trial.TrialState.PRUNED]
    assert pruned
    ends = [event for event in events if event["event"] == "lane" and event["trial"] in pruned]
    assert len(ends) == 3 * len(pruned)
    for number in pruned:
        mine = [end for end in ends if end["trial"] == number]
        assert {end["stopped"] for end in mine} <= {"pruned", "all epochs done"}
        moments = [end["at_s"] for end in mine if end["stopped"] == "pruned"]
        others = [
            event for event in events if event["event"] == "epoch" and event["trial"] == number
        ]
        assert max(event["at_s"] for event in others) <= max(moments)


@pytest.mark.slow
def test_the_wilcoxon_pruner_compares_folds(tmp_path):
    space = {"train.lr": [1e-7, 0.01, 0.02]}
    tune = {"pruner": "wilcoxon", "folds": 4, "trials": 6, "space": space, "sampler": "grid"}
    tune |= {"retrain": 1, "retrain_seeds": 2}
    study, _ = run_search(make_settings(tmp_path, tune=tune))
    for trial in get_trials(study):
        if trial.state == optuna.trial.TrialState.COMPLETE:
            assert sorted(trial.intermediate_values) == [0, 1, 2, 3]
    again = study.summary["retrained"]
    assert [len(one["losses"]) for one in again] == [2, 2]  # by seeds, no longer by folds
    assert all(math.isfinite(loss) for one in again for loss in one["losses"])


def test_too_many_folds_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tune\.folds = 9"):
        slipstream.tune(make_settings(tmp_path, tune={"folds": 9}))
