"""The summary: seeds without a finite loss, and results that are written early."""

from __future__ import annotations

import io
import json
import math
import signal

import pytest
import torch
from optuna.trial import TrialState
from rich.console import Console

import slipstream
from slipstream import Interrupted, UserError, runs
from slipstream import config as configs
from slipstream.engine.context import seed_generators
from slipstream.reporting.page import count_epochs
from slipstream.reporting.terminal.results import print_search
from slipstream.reporting.wording import describe_pruning
from slipstream.search import api, retraining
from slipstream.search import summary as summaries
from slipstream.search.budget import RetrainingPlan
from slipstream.search.retraining import RetrainedConfig
from slipstream.search.storage import OUT_OF_TIME
from slipstream.search.summary import compare_test_errors
from tests.conftest import slow, small_config
from tests.logs import as_lines
from tests.search.searches import make_settings, make_trial, run_search

DIVERGING = {"lr": 1e18, "clip": "off", "optimizer": "sgd", "epochs": 2}


def list_outputs(study):
    """What the screen and the report say."""
    out = io.StringIO()
    console = Console(file=out, width=400, highlight=False)
    print_search(study.summary | {"report": "report.html"}, console)
    page = slipstream.report(study.run).read_text(encoding="utf-8")
    return out.getvalue(), page


@pytest.mark.slow
def test_a_default_that_never_reaches_a_finite_loss_is_a_finding(tmp_path):
    tune = {"space": {"train.lr": [0.01, 0.02]}, "trials": 2, "sampler": "grid"}
    tune |= {"retrain": 1, "retrain_seeds": 2}
    study, _ = run_search(make_settings(tmp_path, train=DIVERGING, tune=tune))
    summary = json.loads((study.run / "metrics.json").read_text())
    assert summary["trials"]["finished"] == 2
    told = "the config without a search did not reach a finite loss from any of 2 seeds"
    assert summary["findings"] == [told]
    assert summary["comparison"]["verdict"] == "default failed"
    assert summary["comparison"]["chosen"]["n"] == 2
    assert summary["test"]["default"]["failed"]
    assert configs.load(study.run / "best.toml").train.lr in (0.01, 0.02)
    for text in list_outputs(study):
        assert told in text
        assert "Only the chosen settings reached a finite loss" in text
    assert len(slipstream.predict(study.run, tmp_path / "waves.parquet")) > 0
    again, _ = run_search(None, resume=study.run)
    assert again.summary["comparison"] == study.summary["comparison"]


def search_fragile(tmp_path, *, default, tried, seeds=2):
    """A search whose models start with infinite weights: of the default from the first so many of
    the seeds that it is trained again from, of every trial likewise; none of the search itself."""
    device = torch.device("cpu")

    def draw(seed):
        with seed_generators(seed, device):
            return float(torch.rand(()))

    for seed in range(500):
        again = [draw(seed + retraining.SEED_OFFSET + i) for i in range(seeds)]
        if max(again) < draw(seed):
            break
    shares = [0.0, *(sorted(again))]
    between = [(a + b) / 2 for a, b in zip(shares, [*shares[1:], draw(seed)], strict=True)]
    between[0] = 0.0
    space = {"model.options.share": [between[tried]], "train.lr": [0.01, 0.02]}
    tune = {"trials": 2, "sampler": "grid", "retrain": 1, "retrain_seeds": seeds, "space": space}
    settings = make_settings(tmp_path, train={"epochs": 2}, tune=tune)
    options = {"share": between[default]}
    settings["model"] = {"kind": "tests.models.nets:Fragile", "options": options}
    return settings | {"seed": seed}


@pytest.mark.parametrize(
    ("default", "tried", "verdict", "told"),
    [
        (
            1,
            0,
            "too few seeds",
            "the config without a search did not reach a finite loss from 1 of",
        ),
        slow(
            2, 2, "both failed", "the config without a search did not reach a finite loss from any"
        ),
        slow(2, 1, "default failed", "did not reach a finite loss from 1 of 2 seeds"),
    ],
)
def test_seeds_without_a_finite_loss_are_reported(tmp_path, default, tried, verdict, told):
    study, _ = run_search(search_fragile(tmp_path, default=default, tried=tried))
    summary = json.loads((study.run / "metrics.json").read_text())
    assert summary["comparison"]["verdict"] == verdict
    assert summary["comparison"]["gain"] is None
    assert any(told in text for text in summary["findings"])
    for text in list_outputs(study):
        for finding in summary["findings"]:
            assert finding in text
    assert bool(summary["test"]["best"]["failed"]) == (tried == 2)
    assert len(slipstream.predict(study.run, tmp_path / "waves.parquet")) > 0
    again, _ = run_search(None, resume=study.run)
    assert again.summary["findings"] == summary["findings"]


@pytest.mark.slow
@pytest.mark.parametrize(("tried", "share"), [(1, "1"), (2, "any")])
def test_a_trial_that_fails_from_other_seeds_is_not_chosen(tmp_path, tried, share):
    study, _ = run_search(search_fragile(tmp_path, default=0, tried=tried))
    summary = json.loads((study.run / "metrics.json").read_text())
    assert summary["comparison"]["verdict"] == "no better trial"
    told = f"did not reach a finite loss from {share} of 2 seeds"
    assert any(told in text for text in summary["findings"])
    assert [row["what"] for row in summary["retrained"] if row["chosen"]] == ["default"]
    assert not summary["test"]["best"]["failed"]
    assert len(slipstream.predict(study.run, tmp_path / "waves.parquet")) > 0


@pytest.mark.slow
def test_fewer_seeds_are_compared_where_two_are_left(tmp_path):
    study, _ = run_search(search_fragile(tmp_path, default=1, tried=0, seeds=3))
    found = study.summary["comparison"]
    assert (found["default"]["n"], found["chosen"]["n"]) == (2, 3)
    assert found["verdict"] in ("better", "worse", "no difference shown")
    for text in list_outputs(study):
        assert "2 and 3 seeds" in text


def test_a_search_whose_trials_all_fail_writes_trials_json(tmp_path):
    tune = {"space": {"train.lr": [1e18, 1e19]}, "trials": 2, "sampler": "grid", "retrain": 1}
    with pytest.raises(UserError, match=r"no trial finished .*trials\.json .*correct tune\.space"):
        slipstream.tune(make_settings(tmp_path, train=DIVERGING, tune=tune))
    folder = runs.find_last(str(tmp_path / "runs"))
    assert [one["state"] for one in runs.read_json(folder / "trials.json")] == ["failed"] * 2
    with pytest.raises(UserError, match="no trial finished"):
        slipstream.tune(resume=folder)


@pytest.mark.parametrize(
    ("moment", "pending"),
    [(["retrained"], "retrained"), slow(["start", "scoring"], "test runs")],
    ids=["retrained", "tested"],
)
def test_a_search_writes_its_results_before_it_retrains_the_best(tmp_path, moment, pending):
    settings = make_settings(tmp_path, tune={"retrain": 1, "retrain_seeds": 2, "trials": 3})
    left = list(moment)

    def stop(event):
        if left and event["event"] == left[0]:
            left.pop(0)
            if not left:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted):
        api.tune(settings, watch=as_lines(stop))
    folder = runs.find_last(str(tmp_path / "runs"))
    assert pending in runs.read_json(folder / "metrics.json")["pending"]
    assert len(runs.read_json(folder / "trials.json")) == 3
    assert configs.load(folder / "best.toml").train.lr
    assert "The search is not complete" in slipstream.report(folder).read_text()
    result, _ = run_search(None, resume=folder)
    assert result.summary["pending"] is None
    assert result.summary["comparison"]


def test_the_verdict_follows_from_welchs_interval():
    def told(mean, sd, n=3):
        return {"judged_by": "mse", "spread": {"mse": {"mean": mean, "sd": sd, "n": n}}}

    clear = compare_test_errors(told(1.0, 0.1), told(2.0, 0.1))
    assert clear["verdict"] == "better"
    assert clear["gain"] == 1.0
    # Welch by hand: standard error 0.1 * sqrt(2 / 3), 4 degrees of freedom
    assert clear["low"] == pytest.approx(1 - 2.7764 * 0.1 * math.sqrt(2 / 3), abs=1e-4)
    assert compare_test_errors(told(1.0, 1.0), told(2.0, 1.0))["verdict"] == "no difference shown"
    assert compare_test_errors(told(3.0, 0.1), told(2.0, 0.1))["verdict"] == "worse"


def test_no_target_dominates_the_verdict_by_its_unit():
    """A column in mA beside one in V: what is better in standardised units is better."""

    def told(scaled, physical):
        spreads = {"spread": physical, "scaled_spread": scaled}
        over = {key: {"mse": {"mean": mean, "sd": 0.01, "n": 3}} for key, mean in spreads.items()}
        return {"judged_by": "mse"} | over

    found = compare_test_errors(told(0.5, 4e6), told(1.0, 1e6))
    assert found["verdict"] == "better"
    assert found["gain"] == 0.5


CUT = {"stopped": OUT_OF_TIME, "epochs": 3.0, "lowest": 0.2}


@pytest.mark.parametrize(
    ("cut_off", "retrained", "plan", "told"),
    [
        ((), (), (5, 3), []),
        ((), (), (2, 3), ["tune.minutes left time to retrain 2 of 5 trials, from 3 of 3 seeds"]),
        ((), (), (0, 0), ["no trial was retrained; the model of trial 0 was tested"]),
        ((0, 1), (), (5, 3), ["trial 0 was cut off after 3 of 40 epochs; no trial was complete"]),
        ((1,), (1,), (5, 3), ["trial 1 was cut off after 3 of 40 epochs"]),
        ((1,), (0,), (5, 3), []),  # it was not chosen
    ],
)
def test_what_the_time_limit_cut_short_is_said(cut_off, retrained, plan, told):
    config = small_config(train={"epochs": 40}, tune={"minutes": 1})
    trials = [
        make_trial(number, TrialState.PRUNED, **CUT)
        if number in cut_off
        else make_trial(number, TrialState.COMPLETE, 0.5, epochs=40.0)
        for number in range(2)
    ]
    results = [RetrainedConfig(number, config, [0.1]) for number in retrained]
    limits = summaries.describe_limits(config, trials, results, {}, RetrainingPlan(*plan))
    for text, expected in zip(limits, told, strict=True):
        assert text.endswith(expected)


def test_a_test_run_that_was_cut_off_is_said():
    trials = [make_trial(0, TrialState.COMPLETE, 0.5)]
    tests = {"best": {"stopped": "train.minutes have passed"}, "default": {"stopped": "done"}}
    (text,) = summaries.describe_limits(
        small_config(tune={"minutes": 1}), trials, [], tests, RetrainingPlan(5, 3)
    )
    assert text == "tune.minutes cut off the test run best"


def test_only_pruning_counts_as_saved_by_pruning():
    config = small_config(train={"epochs": 10})
    states = [("finished", 4.0), ("pruned", 2.0), ("cut off", 1.0), ("failed", 0.0)]
    trials = [
        {"trial": number, "state": state, "epochs": epochs, "params": {}}
        for number, (state, epochs) in enumerate(states)
    ]
    epochs = count_epochs(trials, config)
    assert epochs == (8.0, 40.0)
    counts = {"finished": 1, "pruned": 1, "failed": 1, "cut off": 1}
    text = describe_pruning({"trials": counts}, epochs)
    assert text == "1 of 4 trials pruned (25 %), which saved 8 of 40 epochs (20 %)"
